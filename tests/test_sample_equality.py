"""Sampling on the sharded head gives, token for token, what a plain sampler of full logits gives by
the same noise: for every N, batch, split of the rows and mixture of parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_head import collectives, normal, shard_of, whole
from data_sample import draw, edited, edits, mixed, of_row, rows_of
from ranks import pool

import lmhead
from lmhead.sampling import Form, Request

RANKS = (1, 2, 4, 8)
# Rows of a call, over all ranks; 25 calls of 200 rows on each of four N are 20,000 draws.
ROWS, WIDTH = 200, 16
# (V, calls)
CALLS = ((96, 7), (101, 7), (1000, 6), (13, 5))
FILTERS = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
# How far the nucleus' limit, p of the mass, is moved to find rows that rounding may decide.
SLACK = 1e-6


def _counts(ranks: int, number: int) -> list[int] | None:
    """How the rows are split: evenly, unevenly with idle ranks, or all on the last rank."""
    if number % 3 == 0:
        return None
    if number % 3 == 1:
        return [0] * (ranks - 1) + [ROWS]
    weights = [(7 * rank + 3 * number) % 5 for rank in range(ranks)]
    weights[0] += sum(weights) == 0
    counts = [ROWS * weight // sum(weights) for weight in weights]
    counts[weights.index(max(weights))] += ROWS - sum(counts)
    return counts


def _logits(vocab: int, number: int) -> dict[str, torch.Tensor]:
    """The call's full logits, or the hidden rows and weights of a head whose products are exact.

    Every other call is full of ties: small integers, and bf16.
    """
    seed = 1000 * vocab + number
    if number % 2:
        hidden, weight = whole(ROWS, WIDTH, seed=seed), whole(vocab, WIDTH, seed=seed + 500)
        return {"hidden": hidden, "weight": weight, "logits": (hidden @ weight.t()) * 0.0625}
    scale = normal(ROWS, 1, seed=seed + 500).abs() * 3
    logits = normal(ROWS, vocab, seed=seed) * scale
    return {"logits": logits.bfloat16() if number % 4 else logits}


def _given(vocab: int, number: int) -> dict[str, Any]:
    given = mixed(ROWS, vocab, 77 * number + vocab, unseeded=number % 3 == 0)
    return given | (edits(ROWS, vocab, number) if number % 4 == 1 else {})


def _order(ranks: int, number: int) -> torch.Tensor:
    """The rows stand in another order, beside other rows, for each N."""
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(31 * ranks + number))


def _draws(rank: int, ranks: int, vocab: int, calls: int) -> list[tuple[torch.Tensor, ...]]:
    """(rows, tokens, their log-probabilities) of each call, of this rank's rows."""
    torch.manual_seed(rank)
    found = []
    work = lmhead.Workspace()
    for number in range(calls):
        order, counts = _order(ranks, number), _counts(ranks, number)
        sizes = counts or [ROWS // ranks] * ranks
        rows = order.split(sizes)[rank]
        options = rows_of(_given(vocab, number), rows) | {"row_counts": counts, "logprobs": 0}
        made = _logits(vocab, number)
        if "hidden" in made:
            shard = shard_of(made["weight"], ranks, rank)
            head = lmhead.LMHead(shard, vocab, scale=0.0625)
            sample = head.sample(made["hidden"][rows], **options)
        else:
            full = made["logits"][order]
            partial = shard_of(full.t().contiguous(), ranks, rank).t().contiguous()
            sample = lmhead.sample_exchange(partial, vocab_size=vocab, workspace=work, **options)
        assert sample.status.eq(0).all()
        found.append((rows, sample.ids, sample.logprobs))
    return found


def _wanted(vocab: int, number: int) -> list[tuple[set[int], torch.Tensor]]:
    """Of each row: the tokens that may be drawn (one, but where rounding decides the nucleus), and
    the ids that they are drawn among.
    """
    given, wanted = _given(vocab, number), []
    logits = _logits(vocab, number)["logits"].float()
    for row in range(ROWS):
        own = of_row(given, row)
        filters = {name: own.pop(name) for name in FILTERS}
        x = edited(logits[row], **own)
        answers = [draw(x, **filters, slack=slack) for slack in (-SLACK, SLACK)]
        wanted.append(({token for token, _ in answers}, answers[1][1]))
    return wanted


@pytest.mark.parametrize(("vocab", "calls"), CALLS)
def test_tokens_are_those_of_a_plain_sampler_for_every_n(vocab: int, calls: int) -> None:
    """A row's token is one and the same on 1, 2, 4 and 8 ranks, in another order and beside other
    rows each time, by the head and from partial logits; unseeded rows stay within their filters.
    """
    found = {ranks: pool(ranks).run(_draws, vocab, calls) for ranks in RANKS}
    compared = ambiguous = 0
    for number in range(calls):
        wanted, seeds = _wanted(vocab, number), _given(vocab, number)["seeds"]
        truth = torch.log_softmax(_logits(vocab, number)["logits"].double(), 1)
        ambiguous += sum(len(tokens) > 1 for tokens, _ in wanted)
        together = set()
        for ranks in RANKS:
            parts = [rank[number] for rank in found[ranks]]
            rows, ids, logprobs = (torch.cat(of) for of in zip(*parts, strict=True))
            assert sorted(rows.tolist()) == list(range(ROWS))
            tokens = torch.empty_like(ids)
            tokens[rows] = ids
            for row, token in enumerate(tokens.tolist()):
                allowed = wanted[row][0] if seeds[row] != -1 else set(wanted[row][1].tolist())
                assert token in allowed, (number, ranks, row, token, allowed)
            together.add(tuple(tokens[seeds != -1].tolist()))
            want = truth[rows].gather(1, ids[:, None]).squeeze(1)
            assert float((logprobs - want).abs().max()) < 1e-5, (number, ranks)
            compared += ROWS
        assert len(together) == 1, (number, "N changes a token")
    assert compared == len(RANKS) * ROWS * calls and ambiguous <= calls


def test_the_calls_add_up_to_twenty_thousand_draws() -> None:
    assert len(RANKS) * ROWS * sum(calls for _, calls in CALLS) == 20_000


def _told(rank: int, ranks: int, vocab: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Log-probabilities of the drawn, of every id and of the 7 most likely, of 5 rows."""
    full = (normal(5 * ranks, vocab, seed=vocab) * 4).to(dtype)
    partial = shard_of(full.t().contiguous(), ranks, rank).t().contiguous()
    asked = torch.arange(vocab).expand(5, vocab).contiguous()
    asked = torch.cat([asked, torch.full((5, 1), -1)], 1)
    options = {"logprobs": 7, "logprob_ids": asked, "temperature": 0.6, "top_k": 5}
    sample = lmhead.sample_exchange(partial, vocab_size=vocab, **options)
    own = full[5 * rank : 5 * rank + 5].double()
    truth = torch.log_softmax(own, 1)
    assert sample.asked_logprobs[:, vocab].isnan().all()
    every = sample.asked_logprobs[:, :vocab]
    top = truth.sort(dim=1, descending=True, stable=True)
    count = min(7, vocab)
    assert torch.equal(sample.top_ids[:, :count], top.indices[:, :count])
    return [
        (sample.logprobs - truth.gather(1, sample.ids[:, None]).squeeze(1)).abs().max(),
        (every - truth).abs().max(),
        (sample.top_logprobs[:, :count] - top.values[:, :count]).abs().max(),
        (every.double().exp().sum(1) - 1).abs().max(),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [10, 1001])
def test_log_probabilities_are_those_of_fp64(vocab: int, dtype: torch.dtype) -> None:
    """Within 1e-5 for the drawn, the asked and the most likely tokens; all V together make 1."""
    for ranks in RANKS:
        for errors in pool(ranks).run(_told, vocab, dtype):
            assert max(map(float, errors)) < 1e-5, (ranks, errors)


# By name: parameters, and the bytes that a row may cost per rank.
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({"temperature": 0.0}, 16),
    "temperature": ({"temperature": 0.8}, 16),
    "greedy, logprobs": ({"temperature": 0.0, "logprobs": 0}, 16),
    "temperature, logprobs": ({"temperature": 0.8, "logprobs": 0}, 16),
    "top-k": ({"top_k": 20}, 8 * 20 + 16),
    "top-k, logprobs": ({"top_k": 20, "logprobs": 0}, 8 * 20 + 16),
    "top-k of 3, top-p, min-p": ({"top_k": 3, "top_p": 0.9, "min_p": 0.1}, 8 * 3 + 16),
}


def _bytes(rank: int, ranks: int, counts: list[int] | None) -> dict[str, list[tuple[str, int]]]:
    """What reaches the collectives after the records' gather, and in all."""
    rows = sum(counts) if counts else 5 * ranks
    partial, work = normal(rows, 40, seed=rank), lmhead.Workspace()
    found = {}
    for name, (given, _) in KINDS.items():
        options = {"row_counts": counts, "workspace": work, **given}
        with collectives() as seen:
            lmhead.sample_exchange(partial, vocab_size=40 * ranks - 1, **options)
        found[name] = [(moved.collective, moved.in_bytes) for moved in seen]
    return found


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_candidates_are_a_few_bytes_at_the_collective(ranks: int) -> None:
    """At most 8 * k + 16 bytes per row and rank, 16 where no candidate but one is needed, and two
    collectives in all.
    """
    uneven = [rank % 3 * 4 for rank in range(ranks)]
    for counts in (None, uneven):
        rows = sum(counts) if counts else 5 * ranks
        for found in pool(ranks).run(_bytes, counts):
            for name, (_, limit) in KINDS.items():
                assert len(found[name]) == 2, (name, found[name])
                collective, nbytes = found[name][-1]
                assert collective == "all_to_all_single"
                assert 0 < nbytes <= rows * limit, (name, nbytes)


def test_a_top_k_draw_of_a_large_model_moves_under_a_hundredth_of_its_logits() -> None:
    """V = 129280 on 8 ranks, 36 rows each, top-k 20: 0.5 % of the bytes of bf16 logits, 0.6 % with
    log-probabilities.
    """
    vocab, ranks, rows = 129280, 8, 36
    shard = -(-vocab // ranks)
    logits = ranks * rows * shard * 2
    for given, percent in (({}, 0.5), ({"logprobs": 0}, 0.52), ({"logprobs": 2}, 0.57)):
        form = Request(top_k=20, **given).form(vocab, shard)
        sent = ranks * rows * form.message_words * 4
        assert sent / logits * 100 == pytest.approx(percent, abs=0.01), given
        assert sent / logits < 0.006
    assert Form().message_words * 4 == 8
