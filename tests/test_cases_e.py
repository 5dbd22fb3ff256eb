"""Cases E: sampling without exchanging logits; and what cases B and G say of choosing tokens."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from data_cases import KERNELS, Caught, caught, normal, watched_exchange
from data_head import collectives, shard_of
from data_sample import draw, edited, edits, mixed, of_row, rows_of
from ranks import pool

import lmhead
from lmhead import candidates, noise, sampling
from lmhead.sampling import Request

NAN, INF = math.nan, math.inf
LAYOUTS = (1, 2, 4)


def _partial(full: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """This rank's columns of full logits [T, V]; padding is NaN."""
    return shard_of(full.t().contiguous(), ranks, rank).t().contiguous()


def _job(rank: int, ranks: int, full: torch.Tensor, given: dict[str, Any]) -> lmhead.Sample:
    """Rank 0 owns all the rows of `full`, which stand on every layout of the ranks."""
    counts = [full.shape[0]] + [0] * (ranks - 1)
    own = given if rank == 0 else rows_of(given, slice(0, 0))
    partial = _partial(full, ranks, rank)
    vocab = full.shape[1]
    sample = lmhead.sample_exchange(partial, vocab_size=vocab, row_counts=counts, **own)
    return sample


def sampled(ranks: int, full: torch.Tensor, **given: Any) -> lmhead.Sample:
    """What rows of full logits [B, V] draw on `ranks` ranks."""
    if ranks == 1:
        return _job(0, 1, full, given)
    return pool(ranks).run(_job, full, given)[0]


def everywhere(full: torch.Tensor, **given: Any) -> list[int]:
    """The tokens, which must be the same on every layout."""
    found = [sampled(ranks, full, **given).ids.tolist() for ranks in LAYOUTS]
    assert found[0] == found[1] == found[2], found
    return found[0]


def test_e1_the_lowest_id_wins_among_equal_maxima() -> None:
    """V = 12 on four ranks: maxima in shards 1 and 3, and twice inside shard 1."""
    row = torch.arange(12.0) / 100
    row[[4, 5, 10]] = 7.0
    full = torch.stack([row, torch.zeros(12), -row, row.flip(0)])
    assert int(row.argmax()) == 4
    assert everywhere(full, temperature=0.0) == [4, 0, 0, 1]
    assert everywhere(full, top_k=1, seeds=1, positions=2) == [4, 0, 0, 1]


def test_e2_ids_beyond_2_to_the_24_travel_exactly() -> None:
    """Shards whose columns begin at 2**24: fp32 would make 16777216 of 16777217."""
    shard, first = 4, 1 << 24
    request = Request(temperature=0.0, logprobs=2)
    vocab = first + shard
    form = request.form(vocab, shard)
    unseeded = sampling.unseeded(1, 0, torch.device("cpu"))
    records = request.records(1, form, vocab, torch.device("cpu"), unseeded)
    for place in range(shard):
        partial = torch.zeros(1, shard)
        partial[0, place] = 3.0
        message = torch.empty((1, form.message_words), dtype=torch.int32)
        candidates.reduce(partial, first, vocab, records, None, message)
        ranks = vocab // shard
        others = message.clone()
        others[:, form.slices()["ids"]] = -1
        others[:, form.slices()["top_ids"]] = -1
        merged = candidates.merge(torch.stack([others, message]), records, vocab // 2, vocab)
        assert merged.ids.tolist() == [first + place] and ranks > 2
        assert merged.top_ids[0, 0] == first + place


def _job_e3(rank: int, ranks: int) -> list[Any]:
    """A bf16 head against fp64: (own fp64 logits, tokens), and the bytes of the exchange."""
    hidden = normal(20 * ranks, 64, seed=1, dtype=torch.bfloat16) * 4
    weight = normal(101, 64, seed=2, dtype=torch.bfloat16) * 4
    head = lmhead.LMHead(shard_of(weight, ranks, rank), 101)
    own = slice(20 * rank, 20 * rank + 20)
    with watched_exchange() as seen:
        ids = head.sample(hidden[own], temperature=0.0)
    return [hidden[own].double() @ weight.double().t(), ids, seen[-1].nbytes]


@pytest.mark.parametrize("ranks", [2, 4])
def test_e3_greedy_tokens_differ_from_the_truth_in_near_ties_alone(ranks: int) -> None:
    """Where fp64's first two lie more than two units of bf16's last place apart, the token is the
    first; and 12 bytes per row and rank move, by an all-to-all.
    """
    clear = 0
    for truth, ids, nbytes in pool(ranks).run(_job_e3):
        assert nbytes <= 20 * ranks * 12
        best, order = truth.topk(2, dim=1)
        unit = torch.exp2(best[:, 0].abs().log2().floor() - 7)
        wide = best[:, 0] - best[:, 1] > 2 * unit
        assert torch.equal(ids[wide], order[wide, 0])
        clear += int(wide.sum())
    assert clear > 10 * ranks


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}])
def test_e4_e5_rows_with_nan_have_no_token_and_neighbours_are_exact(given: dict[str, Any]) -> None:
    """One row all NaN, one with a NaN at column 0, on three layouts of V = 40 and V = 10."""
    for vocab in (40, 10):
        full = normal(5, vocab, seed=vocab) * 9
        clean = full.clone()
        full[1] = NAN
        full[3, 0] = NAN
        own = {"seeds": 5, "positions": torch.arange(5), **given}
        want = everywhere(clean, **own)
        for ranks in LAYOUTS:
            sample = sampled(ranks, full, logprobs=1, **own)
            assert sample.ids.tolist() == [want[0], -1, want[2], -1, want[4]]
            assert sample.status.tolist() == [0, sampling.NAN, 0, sampling.NAN, 0]
            assert sample.logprobs.isnan().tolist() == [False, True, False, True, False]


def test_e6_nan_is_told_apart_before_any_reduction() -> None:
    """Wherever the NaN stands, and whatever a library's argmax would make of it."""
    table = [[NAN, 6, 8], [6, NAN, 8], [6, 8, NAN], [NAN] * 3, [6, 8, 7], [-INF, NAN, -INF]]
    full = torch.tensor(table)
    own = {"seeds": 1, "positions": 1}
    for given in ({"temperature": 0.0}, own, {"top_k": 2, **own}):
        found = everywhere(full, **given)
        assert [token == -1 for token in found] == [True, True, True, True, False, True]


def test_e7_infinity_and_nan_in_either_order() -> None:
    """[nan, inf] and [inf, nan] split over two ranks: the same answer, none; +inf alone wins."""
    full = torch.tensor([[NAN, INF], [INF, NAN], [INF, 3.0], [3.0, INF], [INF, INF]])
    for ranks in (1, 2):
        sample = sampled(ranks, full, temperature=0.0)
        assert sample.ids.tolist() == [-1, -1, 0, 1, 0]
        assert sample.status.tolist() == [1, 1, 0, 0, 0]


def test_e8_all_equal_logits_give_id_0() -> None:
    """V = 2001 over three ranks, of either zero, in fp32 and bf16."""
    full = torch.zeros(2, 2001)
    full[1] = -0.0
    full[1, 5] = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        for ranks in (1, 3):
            assert sampled(ranks, full.to(dtype), temperature=0.0).ids.tolist() == [0, 0]


def test_e9_ties_at_the_threshold_go_by_id() -> None:
    """k = 3, C = 3, five equal values at the threshold in shard 0: the lowest ids are kept, the
    same on every layout, and each with its share of 50,000 draws.
    """
    row = torch.zeros(20)
    row[[0, 1, 2, 3, 4]] = 2.0
    row[11] = 2.5
    draws = 50_000
    full = row.expand(draws, -1).contiguous()
    given = {"top_k": 3, "candidates": 3, "seeds": 9, "positions": torch.arange(draws)}
    found = {ranks: sampled(ranks, full, **given).ids for ranks in LAYOUTS}
    assert all(torch.equal(ids, found[1]) for ids in found.values())
    chance = torch.softmax(row[[11, 0, 1]].double(), 0) * draws
    seen = torch.bincount(found[4], minlength=20).double()
    assert seen.sum() == seen[[11, 0, 1]].sum()
    statistic = float(((seen[[11, 0, 1]] - chance) ** 2 / chance).sum())
    assert math.exp(-statistic / 2) > 0.001  # two degrees of freedom
    fewer = sampled(4, full[:1], top_k=torch.tensor([4]), candidates=1, fallback=False)
    assert fewer.status.tolist() == [sampling.MISSED]


def test_e10_a_nucleus_beyond_the_candidates_is_noticed() -> None:
    """A flat row of V = 1000 on four ranks, top-p 0.99: full logits are taken, the route says so,
    and the token is the plain sampler's.
    """
    full = torch.zeros(6, 1000)
    full[3:] = normal(3, 1000, seed=1) * 0.01 * torch.arange(1000).sub(500).sign()
    given = {"top_p": 0.99, "seeds": 3, "positions": torch.arange(6)}
    want = [draw(full[row], **of_row(given, row))[0] for row in range(6)]
    for ranks in LAYOUTS:
        sample = sampled(ranks, full, **given)
        assert sample.ids.tolist() == want
        assert sample.route.rule == "not_covered"
        assert "6 of rank 0" in sample.route.reason
    kept = sampled(4, full, fallback=False, **given)
    assert kept.ids.tolist() == [-1] * 6 and kept.route.name == "candidates"
    peaked = full.clone()
    peaked[:, 17] = 30.0
    sample = sampled(4, peaked, **given)
    assert sample.route.name == "candidates" and sample.ids.tolist() == [17] * 6


def test_e11_filters_that_are_off_are_no_filters() -> None:
    """k of None, 0, -1, V and more; p of None and 1; numbers and tensors: the plain draw."""
    full = normal(40, 30, seed=2) * 4
    own = {"seeds": 4, "positions": torch.arange(40)}
    want = [draw(full[row], **of_row(own, row))[0] for row in range(40)]
    assert everywhere(full, **own) == want
    for k in (None, 0, -1, 30, 31, torch.full((40,), 30), torch.zeros(40, dtype=torch.int64)):
        for p in (None, 1.0, torch.ones(40)):
            for ranks in (1, 4):
                found = sampled(ranks, full, top_k=k, top_p=p, min_p=0.0, **own)
                assert found.ids.tolist() == want, (k, p, ranks)


def test_e12_log_probabilities_are_over_all_shards() -> None:
    """Within 1e-6 of fp64's, for every kind of draw; a shard's own would be off by ln 4 or so."""
    full = normal(16, 44, seed=3) * 4
    truth = torch.log_softmax(full.double(), 1)
    for given in ({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5, "temperature": 0.3}):
        for ranks in LAYOUTS:
            sample = sampled(ranks, full, logprobs=4, **given)
            want = truth.gather(1, sample.ids[:, None]).squeeze(1)
            assert float((sample.logprobs - want).abs().max()) < 1e-6
            assert float((sample.top_logprobs - truth.topk(4).values).abs().max()) < 1e-6


@pytest.mark.parametrize("name", ["nothing", "bias", "penalties", "mask", "min_p", "all"])
def test_e13_each_processor_alone_and_all_together(name: str) -> None:
    """On the candidates' path and from full logits: the plain sampler's tokens."""
    rows, vocab = 24, 50
    full, every = normal(rows, vocab, seed=4) * 10, edits(rows, vocab, 5)
    parts = {
        "nothing": (),
        "bias": ("logit_bias",),
        "penalties": tuple(key for key in every if "penalty" in key or "tokens" in key),
        "mask": ("mask",),
        "min_p": (),
        "all": tuple(every),
    }[name]
    used = {key: every[key] for key in parts}
    own: dict[str, Any] = {"seeds": 8, "positions": torch.arange(rows)}
    if name in ("min_p", "all"):
        own["min_p"] = 0.1
    want = []
    for row in range(rows):
        x = edited(full[row], **of_row(used, row))
        want.append(draw(x, **of_row(own, row))[0])
    assert everywhere(full, **used, **own) == want
    for route in ("all_to_all", "all_gather"):
        assert sampled(4, full, route=route, **used, **own).ids.tolist() == want
    if name in ("bias", "penalties", "mask", "all"):
        plain = [draw(full[row], **of_row(own, row))[0] for row in range(rows)]
        assert want != plain, "the processors change nothing"


def _job_e14(rank: int, ranks: int) -> list[int]:
    """The same row on every rank, 200 steps, other torch seeds and other generators' states."""
    torch.manual_seed(1000 + rank)
    torch.rand(rank)
    head = lmhead.LMHead(shard_of(normal(50, 8, seed=1), ranks, rank), 50)
    hidden, found = normal(1, 8, seed=2) * 2, []
    for step in range(200):
        token = head.sample(hidden, seeds=77, positions=step)
        found.append(int(token))
    return found


def test_e14_ranks_with_one_row_and_one_seed_never_diverge() -> None:
    found = pool(4).run(_job_e14)
    assert all(tokens == found[0] for tokens in found)
    assert len(set(found[0])) > 10


def _job_e15(rank: int, ranks: int, seeded: bool) -> list[int]:
    torch.manual_seed(5)  # the same on all ranks, as engines do
    partial = torch.zeros(400 * ranks, 25)
    own = {"seeds": 6, "positions": torch.arange(400)} if seeded else {}
    return lmhead.sample_exchange(partial, vocab_size=50, **own).ids.tolist()


def test_e15_unseeded_ranks_draw_apart_and_equal_seeds_together() -> None:
    one, two = pool(2).run(_job_e15, False)
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 0.6 * 400
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 40, "1 in 50 by luck"
    one, two = pool(2).run(_job_e15, True)
    assert one == two and len(set(one)) == 50


def test_e16_no_word_wins_always() -> None:
    """Noise at both ends is finite, for all the words next to them too."""
    ends = torch.cat([torch.arange(4096), 2**32 - 1 - torch.arange(4096)])
    for mapper in (noise.gumbel, noise.gumbel_near):
        found = mapper(ends)
        assert found.isfinite().all(), mapper
        assert float(found.min()) > -4 and float(found.max()) < 24, mapper


def test_e17_a_row_does_not_change_with_its_batch_mates() -> None:
    """Row A with seed 7; row B filtered and not, by number and by tensor, before A and after."""
    full = normal(2, 60, seed=6)
    for position in range(8):
        tokens = []
        for order in ([0, 1], [1, 0]):
            seeds, place = torch.tensor([7, 9])[order], order.index(0)
            for k in (0, 5):
                filters = torch.tensor([0, k])[order]
                given = {"seeds": seeds, "positions": position, "top_k": filters}
                tokens.append(everywhere(full[order], **given)[place])
        assert set(tokens) == set(everywhere(full[:1], seeds=7, positions=position))


def test_e18_every_row_has_its_own_seed() -> None:
    """[1111, 2222, 3333, 4444] against [1111] * 4 on equal rows; permuted rows give permuted
    tokens.
    """
    full = torch.zeros(4, 1000)
    given = {"positions": torch.zeros(4, dtype=torch.int64)}
    seeds = torch.tensor([1111, 2222, 3333, 4444])
    apart = everywhere(full, seeds=seeds, **given)
    equal = everywhere(full, seeds=torch.full((4,), 1111), **given)
    assert equal == [apart[0]] * 4 and len(set(apart)) == 4
    order = torch.tensor([2, 0, 3, 1])
    permuted = everywhere(full, seeds=seeds[order], **given)
    assert permuted == [apart[place] for place in order.tolist()]


def test_e19_masks_may_leave_one_shard_or_nothing() -> None:
    """Tokens in shard 2 of 4 alone: finite log-probabilities; none at all: an id of -1 that says
    why; and shards whose logits are all -inf.
    """
    full = normal(3, 40, seed=7)
    full[2, 10:] = -INF
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[0, 20:30] = True
    mask[2] = True
    for given in ({"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.9}):
        for ranks in LAYOUTS:
            sample = sampled(ranks, full, mask=mask, logprobs=2, **given)
            assert 20 <= int(sample.ids[0]) < 30 and int(sample.ids[1]) == -1
            assert 0 <= int(sample.ids[2]) < 10
            assert sample.status.tolist() == [0, sampling.EMPTY, 0]
            truth = torch.log_softmax(full.double(), 1)
            for row in (0, 2):
                want = truth[row, sample.ids[row]]
                assert abs(float(sample.logprobs[row]) - float(want)) < 1e-6
            assert sample.top_logprobs.isfinite().all()


def test_e20_a_nucleus_of_131072_tokens_is_cut_as_in_fp64() -> None:
    """bf16 logits, shuffled, top-p 0.95 whose nucleus has thousands of tokens: drawn tokens lie in
    fp64's, and the plain sampler draws the same ones.
    """
    vocab = 131072
    full = (normal(1, vocab, seed=8) * vocab**0.5 * 2.0).bfloat16()
    assert float(full.float().std()) > 1.5
    rows = full.expand(8, -1).contiguous()
    given = {"top_p": 0.95, "seeds": 2, "positions": torch.arange(8)}
    want = [draw(full[0].float(), **of_row(given, row)) for row in range(8)]
    nucleus = want[0][1]
    chance = torch.softmax(full[0].double(), 0)
    assert nucleus.numel() > 5000
    assert 0.95 <= float(chance[nucleus].sum()) < 0.951
    for ranks in (1, 4):
        sample = sampled(ranks, rows, **given)
        assert sample.ids.tolist() == [token for token, _ in want], ranks


def test_e21_a_mask_is_as_wide_as_the_vocabulary() -> None:
    """V = 10 padded to 12 over four ranks: [b, 10] is taken, as bools and as bits; any other width
    is refused before a collective.
    """
    full = normal(3, 10, seed=9)
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[0, : int(full[0].argmax()) + 1] = int(full[0].argmax()) == 9
    mask[1, int(full[1].argmax())] = False
    masked = full.masked_fill(~mask, -INF)
    places = 1 << torch.arange(10, dtype=torch.int32)
    bits = (mask.to(torch.int32) * places).sum(1, keepdim=True, dtype=torch.int32)
    want = masked.argmax(1).tolist()
    assert everywhere(full, temperature=0.0, mask=mask) == want
    assert everywhere(full, temperature=0.0, mask=bits) == want
    for found in pool(4).run(_job_e21):
        for error in found:
            assert error.error == "ValueError" and "must be [2, " in error.text


def _job_e21(rank: int, ranks: int) -> list[Caught]:
    found = []
    for width, dtype in ((12, torch.bool), (9, torch.bool), (2, torch.int32)):
        mask = torch.ones(2, width, dtype=dtype)
        partial = torch.zeros(2 * ranks, 3)
        with collectives() as seen:
            error = caught(
                lambda mask=mask, partial=partial: lmhead.sample_exchange(
                    partial, vocab_size=10, mask=mask
                )
            )
        assert not seen
        found.append(error)
    return found


def test_e22_rows_ask_for_what_they_want() -> None:
    """Row 0 asks for given ids, row 1 for the five likeliest: each as if alone."""
    full = normal(2, 40, seed=10) * 6
    truth = torch.log_softmax(full.double(), 1)
    asked = torch.tensor([[3, 39, 20], [-1, -1, -1]])
    for ranks in LAYOUTS:
        both = sampled(ranks, full, temperature=0.0, logprobs=5, logprob_ids=asked)
        one = sampled(ranks, full[:1], temperature=0.0, logprob_ids=asked[:1])
        two = sampled(ranks, full[1:], temperature=0.0, logprobs=5)
        assert torch.equal(both.asked_logprobs[:1], one.asked_logprobs)
        assert both.asked_logprobs[1].isnan().all()
        assert torch.equal(both.top_ids[1:], two.top_ids)
        assert torch.equal(both.top_logprobs[1:], two.top_logprobs)
        assert both.top_logprobs.isfinite().all()
        assert float((both.asked_logprobs[0] - truth[0, asked[0]]).abs().max()) < 1e-6


# What cases B say of choosing tokens on the shard.


def _job_b1(rank: int, ranks: int, padding: float) -> list[int]:
    ids = torch.arange(10)
    weight = torch.zeros(10, 8)
    weight[:, 0] = -1 - (ids * 7 % 10) * 4 / 9
    hidden = torch.zeros(40, 8)
    hidden[:, 0] = 1
    head = lmhead.LMHead(shard_of(weight, ranks, rank, padding), 10)
    found = []
    for given in ({"temperature": 0.0}, {}, {"top_k": 10}, {"top_k": 3}, {"top_p": 0.9}):
        sample = head.sample(hidden, logprobs=10, **given)
        assert sample.top_ids.sort(dim=1).values.tolist() == [list(range(10))] * 40
        assert float(sample.top_logprobs.double().exp().sum(1).sub(1).abs().max()) < 1e-5
        assert given != {"temperature": 0.0} or sample.ids.tolist() == [0] * 40
        found += sample.ids.tolist()
    return found


@pytest.mark.parametrize("padding", [0.0, -1e4, NAN, INF, -INF, 1e30])
def test_b1_b2_padding_is_never_drawn(padding: float) -> None:
    """All real logits lie in [-5, -1], and padding weights hold anything: greedy, Gumbel and top-k
    draws stay within the vocabulary.
    """
    for found in pool(4).run(_job_b1, padding):
        assert len(found) == 200 and min(found) >= 0 and max(found) < 10


def _job_b2(rank: int, ranks: int, padding: float) -> list[list[int]]:
    hidden = torch.ones(6, 8)
    hidden[1::2] = -1
    weight, bias = normal(10, 8, seed=1), normal(1, 10, seed=2)[0]
    head = lmhead.LMHead(
        shard_of(weight, ranks, rank, padding), 10, bias=shard_of(bias, ranks, rank, padding)
    )
    given = {"seeds": 3, "positions": torch.arange(6)}
    return [head.sample(hidden, **given, **mode).tolist() for mode in ({}, {"top_k": 4})]


def test_b2_padding_changes_no_token_for_either_sign() -> None:
    found = [pool(4).run(_job_b2, padding) for padding in (0.0, -1e4, NAN, INF, -INF)]
    assert all(tokens == found[0] for tokens in found)


def _job_b3(rank: int, ranks: int, rows: int) -> dict[str, tuple[int, int]]:
    hidden, weight = normal(rows * ranks, 16, seed=3) * 4, normal(10, 16, seed=4)
    shard = shard_of(weight, ranks, rank)
    live = max(0, min(3, 10 - 3 * rank))
    shard[live:] = 50 * torch.randn(3 - live, 16, generator=torch.Generator().manual_seed(rank))
    step = shard.abs().amax(1, keepdim=True) / 127
    quantised = (shard / step).round().to(torch.int8)
    partial = (hidden @ quantised.float().t()) * step.t()
    own, found = hidden[rows * rank : rows * rank + rows], {}
    for kernels in KERNELS:
        head = lmhead.LMHead(shard, 10, kernels=kernels)
        count = rows if kernels == "torch" else 12  # a row takes the interpreter 10 ms
        first = partial.unflatten(0, (ranks, rows))[:, :count].flatten(0, 1)
        int8 = lmhead.sample_exchange(first, vocab_size=10, kernels=kernels)
        for name, ids in (("float", head.sample(own[:count])), ("int8", int8.ids)):
            found[f"{name}, {kernels}"] = int(ids.min()), int(ids.max())
    return found


def test_b3_no_padding_id_is_ever_drawn() -> None:
    """Padding rows of 50 * randn, temperature 1, 5000 draws over four ranks, of float weights and
    of int8 ones.
    """
    for found in pool(4).run(_job_b3, 1250):
        assert len(found) == 4
        assert all(low >= 0 and high < 10 for low, high in found.values()), found


def _job_b5(rank: int, ranks: int) -> list[list[int]]:
    weight = normal(37, 32, seed=7, dtype=torch.bfloat16)
    hidden = normal(8, 32, seed=8, dtype=torch.bfloat16) * 5
    own = slice(2 * rank, 2 * rank + 2)
    head = lmhead.LMHead(shard_of(weight, ranks, rank), 37)
    found = []
    given = rows_of(mixed(8, 37, 3), own)
    for parameters in ({"temperature": 0.0}, given):
        for route in (None, "all_to_all", "all_gather"):
            found.append(head.sample(hidden[own], route=route, **parameters).tolist())
    found.append(head(hidden[own]).float().argmax(1).tolist())
    return found


def test_b5_every_path_draws_the_same_ids() -> None:
    """V % N != 0: candidates, all-to-all and gather give one answer, greedy that of the logits."""
    for found in pool(4).run(_job_b5):
        assert found[0] == found[1] == found[2] == found[6]
        assert found[3] == found[4] == found[5]


def _job_b10(rank: int, ranks: int) -> None:
    wide = normal(2 * 6, 25, seed=11 + rank)
    view = wide[:, :22]
    padded = torch.full((6, 19), NAN)
    padded[:, :16] = normal(6, 16, seed=5)
    for given in (
        {"temperature": 0.0},
        {"seeds": 1, "positions": torch.arange(6)},
        {"top_k": 4, "top_p": 0.9, "seeds": 1, "positions": torch.arange(6)},
    ):
        options = {"vocab_size": 41, "logprobs": 3, **given}
        one = lmhead.sample_exchange(view, **options)
        two = lmhead.sample_exchange(view.contiguous(), **options)
        for name in ("ids", "logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(one, name), getattr(two, name)), name
        assert one.logprobs.isfinite().all()
        head = lmhead.LMHead(shard_of(normal(41, 16, seed=6), ranks, rank), 41)
        rows = head.sample(padded[:, :16], **{**given, "logprobs": 0})
        again = head.sample(padded[:, :16].contiguous(), **{**given, "logprobs": 0})
        assert torch.equal(rows.ids, again.ids) and rows.logprobs.isfinite().all()


def test_b10_draws_from_sliced_views() -> None:
    """Partials and hidden rows that are views of wider ones: as their contiguous copies."""
    pool(2).run(_job_b10)


# G11: a captured sampler.


def test_g11_seeds_and_positions_are_tensors_and_no_generator_is_asked_for() -> None:
    """Another seed in the same tensor is another draw; torch's generator has no part in it."""
    head = lmhead.LMHead(torch.zeros(500, 8), 500)
    hidden = torch.zeros(4, 8)
    seeds, positions = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    names = [*inspect.signature(lmhead.LMHead.sample).parameters, *Request.__dataclass_fields__]
    assert not any("generator" in name for name in names)
    first = head.sample(hidden, seeds=seeds, positions=positions).tolist()
    torch.manual_seed(99)
    assert head.sample(hidden, seeds=seeds, positions=positions).tolist() == first
    seeds += 10
    second = head.sample(hidden, seeds=seeds, positions=positions).tolist()
    positions += 1
    third = head.sample(hidden, seeds=seeds, positions=positions).tolist()
    assert first != second != third != first


@pytest.mark.gpu
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 20}, {"top_p": 0.9, "candidates": 256, "fallback": False}]
)
def test_g11_a_captured_draw_follows_its_seed_tensor(filters: dict[str, Any]) -> None:
    """Replays with other seeds and positions are the eager draws, and unseeded replays differ."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(1000, 64, generator=generator).to("cuda", torch.bfloat16)
    hidden = torch.randn(8, 64, generator=generator).to("cuda", torch.bfloat16) * 0.3
    head = lmhead.LMHead(weight, 1000)
    seeds = torch.arange(8, device="cuda")
    positions = torch.zeros(8, dtype=torch.int64, device="cuda")
    given = {"seeds": seeds, "positions": positions, "temperature": 0.9, **filters}
    free = {"temperature": 0.9, **filters}
    head.warmup(8, sample=given)
    head.warmup(8, sample=free)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = head.sample(hidden, **given)
        unseeded = head.sample(hidden, **free)
    drawn, loose = [], []
    for step in range(4):
        seeds.copy_(torch.arange(8) + 100 * (step % 2))
        positions.fill_(step // 2)
        graph.replay()
        drawn.append(tuple(ids.tolist()))
        loose.append(tuple(unseeded.tolist()))
        assert list(drawn[-1]) == head.sample(hidden, **given).tolist(), step
    assert len(set(drawn)) == 4 and len(set(loose)) == 4
