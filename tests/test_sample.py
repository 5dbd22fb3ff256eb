"""Draws on the sharded head: the same tokens as from full logits, for every N, route and mixture of
parameters; and what rows without a token give.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from data_head import collectives, normal, raised, shard_of
from data_sample import mixed
from ranks import pool

import lmhead
from lmhead import candidates, noise
from lmhead.sampling import Request, parameters_of

ROWS = 6


def _draws(rank: int, ranks: int, vocab: int, rounds: int) -> list[list[int]]:
    """Tokens of this rank's rows; each round is compared with the draw from full logits."""
    found = []
    for number in range(rounds):
        full = normal(ranks * ROWS, vocab, seed=number) * 3
        shard = -(-vocab // ranks)
        partial = shard_of(full.t().contiguous(), ranks, rank).t().contiguous()
        assert partial.shape == (ranks * ROWS, shard)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        given = {name: value[own] for name, value in mixed(ranks * ROWS, vocab, number).items()}
        drawn = lmhead.sample_exchange(partial, vocab_size=vocab, logprobs=3, **given)
        routed = lmhead.sample_exchange(
            partial, vocab_size=vocab, route="all_to_all", logprobs=3, **given
        )
        assert torch.equal(drawn.ids, routed.ids)
        truth = torch.log_softmax(full[own].double(), 1)
        want = truth.gather(1, drawn.ids[:, None]).squeeze(1)
        assert (drawn.logprobs - want).abs().max() < 1e-5
        assert (drawn.top_logprobs - truth.topk(3).values).abs().max() < 1e-5
        assert torch.equal(drawn.top_ids, routed.top_ids)
        greedy = given["temperature"] < 1e-5
        assert torch.equal(drawn.ids[greedy], full[own].argmax(1)[greedy])
        found.append(drawn.ids.tolist())
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("vocab", [64, 997])
def test_tokens_are_those_of_full_logits(vocab: int, ranks: int) -> None:
    found = pool(ranks).run(_draws, vocab, 5)
    assert all(len(rows) == ROWS for rank in found for rows in rank)


def _same_rows(rank: int, ranks: int, vocab: int) -> list[int]:
    full = normal(8, vocab, seed=1)
    partial = shard_of(full.t().contiguous(), ranks, rank).t().contiguous()
    given = mixed(8, vocab, 2)
    counts = [8] + [0] * (ranks - 1)
    own = slice(0, counts[rank])
    mine = {name: value[own] for name, value in given.items()}
    return lmhead.sample_exchange(partial, vocab_size=vocab, row_counts=counts, **mine).ids.tolist()


@pytest.mark.parametrize("vocab", [10, 257])
def test_a_row_draws_the_same_token_for_every_n(vocab: int) -> None:
    """Rank 0 owns all eight rows, the others none."""
    found = [pool(ranks).run(_same_rows, vocab)[0] for ranks in (1, 2, 4)]
    assert found[0] == found[1] == found[2]


def _bytes(rank: int, ranks: int) -> dict[str, int]:
    partial = normal(ranks * 5, 40, seed=rank)
    work, found = lmhead.Workspace(), {}
    for name, given in {
        "greedy": {"temperature": 0.0},
        "drawn": {},
        "top-k": {"top_k": 20, "top_p": 0.9},
    }.items():
        with collectives() as seen:
            lmhead.sample_exchange(partial, vocab_size=160, workspace=work, logprobs=0, **given)
        found[name] = seen[-1].in_bytes
    return found


def test_candidates_are_a_few_bytes() -> None:
    for found in pool(4).run(_bytes):
        assert found["greedy"] <= 5 * 4 * 16
        assert found["drawn"] <= 5 * 4 * 16
        assert found["top-k"] <= 5 * 4 * (8 * 20 + 16)


def _odd_rows(rank: int, ranks: int) -> list[Any]:
    full = normal(4, 40, seed=3)
    full[1] = math.nan
    full[2] = -math.inf
    full[3, 7] = math.nan
    partial = shard_of(full.t().contiguous(), ranks, rank).t().contiguous()
    counts = [4] + [0] * (ranks - 1)
    found = lmhead.sample_exchange(
        partial, vocab_size=40, row_counts=counts, temperature=0.0, logprobs=1
    )
    return [found.ids.tolist(), found.status.tolist(), int(full[0].argmax())]


def test_rows_without_a_token_say_so_on_every_layout() -> None:
    for ranks in (1, 2, 4):
        ids, status, first = pool(ranks).run(_odd_rows)[0]
        assert ids == [first, -1, -1, -1] and status == [0, 1, 2, 1]


def _flat(rank: int, ranks: int) -> str:
    partial = torch.zeros(ranks, 250)
    given = {"top_p": 0.99, "seeds": 1, "positions": 2}
    drawn = lmhead.sample_exchange(partial, vocab_size=1000, **given)
    full = lmhead.sample_exchange(partial, vocab_size=1000, route="all_gather", **given)
    assert torch.equal(drawn.ids, full.ids)
    kept = lmhead.sample_exchange(partial, vocab_size=1000, fallback=False, **given)
    assert kept.ids.tolist() == [-1] and kept.status.tolist() == [3]
    return drawn.route.rule


def test_e10_a_flat_nucleus_takes_full_logits_and_says_so() -> None:
    assert pool(4).run(_flat) == ["not_covered"] * 4


def test_bad_parameters_are_told_with_their_numbers() -> None:
    head = lmhead.LMHead(normal(10, 4, seed=0), 10)
    hidden = normal(2, 4, seed=1)
    for given, text in (
        ({"temperature": -1.0}, "-1.0"),
        ({"top_p": 0.0}, "above 0"),
        ({"top_k": -2}, "-2"),
        ({"min_p": torch.tensor([0.5, 1.5])}, "1.5 in row 1"),
        ({"seeds": 3}, "seeds need positions"),
        ({"mask": torch.ones(2, 12, dtype=torch.bool)}, "[2, 10]"),
        ({"logprob_ids": torch.tensor([[1], [10]])}, "10 in row 1"),
    ):
        error = raised(lambda given=given: head.sample(hidden, **given))
        assert error.error == "ValueError" and text in error.text and not error.collectives


def test_parameters_are_read_off_a_line_of_text() -> None:
    found = parameters_of("temperature=0.8, top_k=20,top_p=0.95")
    assert found == {"temperature": 0.8, "top_k": 20, "top_p": 0.95}
    for text, words in (
        ("", "'' is not one of temperature, top_k, top_p, min_p"),
        ("top_k=1,top_k=2", "'top_k=2' is not one of"),
        ("warmth=1", "'warmth=1' is not one of"),
        ("top_k=1.5", "top_k must be a whole number, got '1.5'"),
        ("min_p=", "min_p must be a number, got ''"),
        ("temperature=nan", "finite and at least 0, got nan"),
        ("top_p=0", "above 0"),
        ("top_k=-7", "-7"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            parameters_of(text)


def test_masks_biases_and_penalties_change_what_is_drawn() -> None:
    head = lmhead.LMHead(torch.eye(6), 6)
    hidden = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]])
    allowed = torch.tensor([[False, False, True, True, True, True]])
    assert head.sample(hidden, temperature=0.0, mask=allowed).tolist() == [2]
    bits = torch.tensor([[0b111100]], dtype=torch.int32)
    assert head.sample(hidden, temperature=0.0, mask=bits).tolist() == [2]
    bias = torch.tensor([[4, -1]]), torch.tensor([[9.0, 99.0]])
    assert head.sample(hidden, temperature=0.0, logit_bias=bias).tolist() == [4]
    written = torch.tensor([[0, 0, 0, -1]])
    told = {"output_tokens": written, "frequency_penalty": 0.5}
    assert head.sample(hidden, temperature=0.0, **told).tolist() == [1]
    found = head.sample(hidden, temperature=0.0, mask=allowed, logprobs=0)
    assert isinstance(found, lmhead.Sample) and found.logprobs is not None
    assert torch.allclose(found.logprobs, torch.log_softmax(hidden, 1)[:, 2], atol=1e-6)


def _masked(rank: int, ranks: int, vocab: int) -> bool:
    full = normal(ranks * ROWS, vocab, seed=7)
    partial = shard_of(full.t().contiguous(), ranks, rank).t().contiguous()
    mask = normal(ROWS, vocab, seed=8 + rank) > 0.5
    given = {"mask": mask, "top_k": 5, "seeds": rank, "positions": 3}
    drawn = lmhead.sample_exchange(partial, vocab_size=vocab, **given)
    routed = lmhead.sample_exchange(partial, vocab_size=vocab, route="all_gather", **given)
    return torch.equal(drawn.ids, routed.ids) and bool(mask.gather(1, drawn.ids[:, None]).all())


@pytest.mark.parametrize("vocab", [64, 66, 997])
def test_a_mask_ends_with_the_vocabulary_on_a_padded_shard(vocab: int) -> None:
    assert pool(4).run(_masked, vocab) == [True] * 4


def test_blocks_and_lanes_do_not_change_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, of few columns, and columns that begin amid four ids."""
    x, found = normal(3, 210, seed=9), []
    for block, first in ((1 << 20, 0), (64, 0), (1 << 20, 203)):
        monkeypatch.setattr(candidates, "BLOCK_ELEMENTS", block)
        request = Request(seeds=torch.tensor([1, 2, 3]), positions=torch.tensor([4, 5, 6]))
        form = request.form(413, 210)
        none = torch.zeros(3, dtype=torch.int64)
        records = request.records(3, form, 413, x.device, (none, none))
        out = torch.empty(3, form.message_words, dtype=torch.int32)
        candidates.reduce(x, first, 413, records, None, out)
        ids = out[:, form.slices()["ids"]].long()
        places = first + torch.arange(210)
        word = noise.words(records.seeds[:, None], records.positions[:, None], places)
        score = x + noise.gumbel(word)
        assert torch.equal(ids[:, 0] - first, score.argmax(1))
        found.append(out)
    assert torch.equal(found[0], found[1])
