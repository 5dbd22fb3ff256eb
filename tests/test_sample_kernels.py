"""Kernels of a draw against their twins, in the interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from data_head import normal, shard_of, whole
from data_sample import mixed
from drawing import draw, fused
from probes import noise_probe
from ranks import pool

import lmhead
from lmhead import noise
from lmhead.kernels import gemm
from lmhead.kernels import sample as kernels
from lmhead.kernels.config import GemmConfig
from lmhead.sampling import Request

SMALL = GemmConfig(32, 64, 32, num_warps=4, num_stages=2, kind="bulk")
TAILED = GemmConfig(32, 32, 64, num_warps=4, num_stages=2, kind="bulk", tail_t=16)


def test_noise_and_weights_have_the_twins_bits() -> None:
    ids = torch.cat(
        [torch.arange(1000), torch.randint(0, 2**31 - 1, (3000,)), torch.arange(96)]
    ).long()
    row = torch.tensor([-(2**40) - 3, 2**33 + 7])  # seed and position, both words of each in use
    below = torch.cat([torch.linspace(-70, 0, 4090), torch.tensor([-0.0, 0, -1e-9, -64, -65, -99])])
    found = noise_probe_results(ids, row, below)
    word = noise.words(row[:1], row[1:], ids)
    assert torch.equal(found[0], word)
    assert torch.equal(found[1], noise.gumbel(word))
    assert torch.equal(found[2], noise.weight(below))


def noise_probe_results(
    ids: torch.Tensor, row: torch.Tensor, below: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    word = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    gumbel, weight = torch.empty_like(below), torch.empty_like(ids)
    noise_probe[(1,)](ids.int(), row.view(torch.int32), below, word, gumbel, weight, len(ids))
    return word.long() & 0xFFFFFFFF, gumbel, weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocab", "ranks"), [(301, 2), (30, 8), (130, 1)])
def test_scan_pick_and_merge_give_the_twins_messages(
    vocab: int, ranks: int, dtype: torch.dtype
) -> None:
    """Ties are many in bf16; of 8 shards of 4 columns the last is padding alone; NaN and rows
    without a token are among the rows.
    """
    logits = (normal(10, vocab, seed=vocab) * 3).to(dtype)
    logits[2, vocab // 2] = math.nan
    logits[5] = -math.inf
    logits[6, 1:] = -math.inf
    logits[7, 3] = math.inf
    asked = draw(logits, ranks, logprobs=3, candidates=8, **mixed(10, vocab, vocab))
    messages = asked.by_twin()
    asked.check(asked.by_kernels(), messages)
    found = asked.check_merged(messages)
    assert found.status[2] == 1 and found.status[5] == 2 and found.ids[6] == 0


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.0, "logprobs": 1},
        {"top_k": 5},
        {"top_k": 40, "top_p": 0.9, "logprobs": 0},
        {"top_p": 0.95},
        {"min_p": 0.1, "candidates": 2},
    ],
)
def test_one_kind_of_row(parameters: dict[str, Any]) -> None:
    """What the host knows is compiled away: noise, sums, more than one candidate."""
    asked = draw(normal(4, 258, seed=3), 2, **parameters)
    messages = asked.by_twin()
    asked.check(asked.by_kernels(), messages)
    asked.check_merged(messages)


def test_equal_logits_are_taken_by_their_ids_whatever_the_tile() -> None:
    logits = torch.zeros(3, 600)
    logits[1, [599, 130, 7]] = 1.0
    logits[2] = -0.0
    logits[2, 300:] = 0.0
    asked = draw(logits, 2, top_k=4, temperature=0.5)
    got = asked.by_kernels()
    asked.check(got, asked.by_twin())
    ids = got[:, :, asked.form.slices()["ids"]]
    assert ids[0].tolist() == [[0, 1, 2, 3], [7, 130, 0, 1], [0, 1, 2, 3]]
    assert ids[1, 1].tolist() == [599, 300, 301, 302]
    greedy = draw(logits, 2, temperature=0.0)  # whose one candidate the tile itself knows
    ids = greedy.by_kernels()[:, :, greedy.form.slices()["ids"]]
    assert ids[:, :, 0].tolist() == [[0, 7, 0], [300, 599, 300]]


@pytest.mark.parametrize(
    ("config", "shard", "parameters"),
    [
        (SMALL, 96, {}),
        (SMALL, 75, {"top_p": 0.9, "candidates": 8, "logprobs": 2}),
        (TAILED, 75, {"logprobs": 0}),
        (TAILED, 96, {"top_k": 3}),
    ],
    ids=str,
)
def test_a_gemm_that_summarises_shows_what_a_scan_of_its_logits_shows(
    shard: int, parameters: dict[str, Any], config: GemmConfig
) -> None:
    """With bias, scale and softcap; the second shard is half padding."""
    rows = 34 if config is SMALL else 50  # a part of a second tile
    hidden, bias = normal(rows, 64, seed=1), normal(shard, seed=2)
    weight, hidden = normal(shard, 64, seed=3).bfloat16(), hidden.bfloat16()
    partial = torch.empty(rows, shard, dtype=torch.bfloat16)
    after = {"scale": 0.5, "softcap": 5.0}
    gemm.gemm(hidden, weight, bias, out=partial, config=config, **after)
    asked = draw(torch.zeros(rows, 2 * shard), 2, **parameters)
    asked.vocab -= shard // 2
    write = asked.form.candidates > 1 or asked.form.top_sent > 0
    for rank in range(2):
        where = {"first": rank * shard, "held": asked.held(rank)}
        words, layout = asked.records.words, asked.layout()
        scanned = torch.full(kernels.summary_shape(rows, asked.held(rank)), torch.nan)
        kernels.scan(partial, words, scanned, layout, **where)
        want, got = asked.fresh()[rank], asked.fresh()[rank]
        asked.pick(scanned, partial, want, rank, kernels.SCAN_COLUMNS)
        written = torch.empty_like(partial)
        summary = fused(
            hidden, weight, bias, asked, rank, written, config, write=write, softcap=5.0
        )
        asked.pick(summary, written, got, rank, config.block_v)
        asked.check(got[None], want[None])
        assert torch.equal(written, partial) if write else bool(written.isnan().all())


def _tokens(rank: int, ranks: int, vocab: int) -> list[Any]:
    """Tokens of own rows by kernels, in each way that a GEMM and a reduction can be had."""
    torch.manual_seed(rank)
    rows, given = 3, mixed(3 * ranks, vocab, 1)
    own = slice(rank * rows, (rank + 1) * rows)
    given = {name: value[own] for name, value in given.items()} | {"candidates": 4}
    hidden = whole(rows * ranks, 32, seed=5)[own].bfloat16()
    weight = shard_of(whole(vocab, 32, seed=6).bfloat16(), ranks, rank)
    found = []
    for parameters in (given, {"seeds": given["seeds"], "positions": given["positions"]}):
        for choice in ("torch", "triton"):
            head = lmhead.LMHead(weight, vocab, kernels=choice, scale=0.05)
            head.warmup(rows, sample=parameters)
            drawn = head.sample(
                hidden, logprobs=2, logprob_ids=given["positions"][:, None] % vocab, **parameters
            )
            full = head.sample(hidden, route="all_to_all", details=True, **parameters)
            assert torch.equal(drawn.ids, full.ids)
            found.append((drawn.ids.tolist(), drawn.top_ids.tolist(), drawn.status.tolist()))
            assert (
                drawn.logprobs
                - head(hidden).float().log_softmax(1).gather(1, drawn.ids[:, None]).squeeze(1)
            ).abs().max() < 1e-5
    assert found[0] == found[1] and found[2] == found[3]
    return found


@pytest.mark.parametrize(("vocab", "ranks"), [(96, 1), (94, 2), (130, 4)])
def test_heads_by_kernels_draw_what_torch_draws(vocab: int, ranks: int) -> None:
    pool(ranks).run(_tokens, vocab)


def test_logits_that_a_row_may_fall_back_on_are_written() -> None:
    """One candidate does not cover a nucleus, so the summary alone is not enough."""
    hidden, given = whole(4, 16, seed=2).bfloat16(), {"seeds": 3, "positions": torch.arange(4)}
    found = []
    for choice in ("torch", "triton"):
        head = lmhead.LMHead(whole(40, 16, seed=1).bfloat16(), 40, kernels=choice, scale=0.01)
        drawn = head.sample(hidden, top_p=0.9, candidates=1, details=True, **given)
        assert drawn.route.rule == "not_covered"
        found.append(drawn.ids.tolist())
    assert found[0] == found[1]


def test_what_kernels_do_not_take_goes_to_torch() -> None:
    head = lmhead.LMHead(whole(40, 16, seed=1).bfloat16(), 40, kernels="triton")
    hidden = whole(2, 16, seed=2).bfloat16()
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[:, 17] = True
    assert head.sample(hidden, mask=mask).tolist() == [17, 17]


def test_the_host_knows_which_rows_may_be_drawn_from_all_tokens() -> None:
    tensor = torch.ones(2)
    for given, noisy in (
        ({}, True),
        ({"temperature": 0.0}, False),
        ({"temperature": tensor}, True),
        ({"top_k": 3}, False),
        ({"top_k": 0}, True),
        ({"top_p": 0.9}, False),
        ({"top_p": 1.0}, True),
        ({"top_p": tensor}, True),
        ({"min_p": 0.1}, False),
    ):
        assert Request(**given).form(100, 50).noisy is noisy
