"""Cases D: the head's arithmetic -- quantised, tied, bias, scale, softcap, fp32 logits.

Values are compared, not token ids: a softcap that is missing or applied twice keeps every id.  A
quantised weight goes through `lmhead.exchange` under the caller's own GEMM; the head itself refuses
it, since it would be multiplied without its scales.  Temperature comes with the sampler.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from data_cases import (
    KERNELS,
    NAN,
    ROUTES,
    Caught,
    Inputs,
    caught,
    every_path,
    integers,
    normal,
    same,
    shard_of,
    truth,
    watched_exchange,
)
from ranks import pool

import lmhead
from lmhead import reference, shapes
from lmhead.compare import relative_error
from lmhead.kernels import gemm as gemm_kernels

BF16 = torch.bfloat16


def _gathered(own: torch.Tensor, ranks: int) -> torch.Tensor:
    everyone = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyone, own)
    return torch.cat(everyone)


def _job_d1(rank: int, ranks: int, weight: torch.Tensor) -> Caught:
    """int8 rows with one scale each, per shard; the caller's GEMM, our exchange."""
    vocab = weight.shape[0]
    scale = weight.abs().amax(1, keepdim=True) / 127
    quantised = (weight / scale).round().to(torch.int8)
    own = normal(2, weight.shape[1], seed=20 + rank)
    mine, mine_scale = shard_of(quantised, ranks, rank), shard_of(scale, ranks, rank)
    partial = (_gathered(own, ranks) @ mine.float().t()) * mine_scale.t()
    for kernels in KERNELS:
        for route in ROUTES:
            got = lmhead.exchange(partial, vocab_size=vocab, kernels=kernels, route=route)
            assert relative_error(got, truth(own, quantised.double() * scale.double())) < 1e-6
            assert relative_error(got, truth(own, weight)) < 1e-2
    # One rank's loader lost the scales: every rank's constructor refuses.
    shard = mine if rank == 1 else shard_of(weight, ranks, rank)
    return caught(lambda: lmhead.LMHead(shard, vocab))


def test_d1_int8_weight_needs_its_scales() -> None:
    """int8 rows with a scale each, multiplied by the caller: equal to the dequantised matmul.  An
    int8 weight without scales is an error in every rank's constructor, though only one has it.
    """
    found = pool(4).run(_job_d1, normal(10, 64, seed=21))
    assert [rank.error for rank in found] == ["ValueError", "TypeError", "ValueError", "ValueError"]
    for rank in found:
        assert "torch.int8" in rank.text and "needs its scales" in rank.text
        assert "lmhead.exchange" in rank.text


def _job_d2(rank: int, ranks: int) -> dict[str, Caught]:
    weight = integers(10, 8, seed=22)
    padding_nan = shard_of(weight, ranks, rank, padding=NAN)
    lmhead.LMHead(padding_nan, 10, check_finite=True)  # padding is nobody's business
    empty = torch.empty(3, 8)  # poisoned here: NaN, as memory that was never loaded may hold
    infinite = shard_of(weight, ranks, rank)
    infinite[1, 3] = float("inf")
    return {
        "one rank not loaded": caught(
            lambda: lmhead.LMHead(empty if rank == 2 else padding_nan, 10, check_finite=True)
        ),
        "one element": caught(lambda: lmhead.LMHead(infinite, 12, check_finite=True)),
    }


def test_d2_weights_that_were_never_loaded() -> None:
    """`check_finite=True` refuses a shard that still holds NaN, on every rank, naming rank and row;
    NaN in padding rows is no reason.
    """
    for rank, found in enumerate(pool(4).run(_job_d2)):
        first = found["one rank not loaded"]
        assert first.error == "ValueError"
        assert "3 of 3 weight rows are not finite" in first.text and "rank 2's shard" in first.text
        second = found["one element"]
        assert second.error == "ValueError"
        assert f"the first is row 1 of rank {rank}'s shard" in second.text


@pytest.mark.parametrize("dtype", shapes.BYTES_ONLY, ids=str)
def test_d3_fp8_without_scale_is_refused(dtype: torch.dtype) -> None:
    """An fp8 weight is a TypeError that tells the way out; it is never cast in silence."""
    weight = torch.zeros(10, 8, dtype=torch.uint8).view(dtype)
    for build in (
        lambda: lmhead.LMHead(weight, 10),
        lambda: lmhead.LMHead.from_full(weight),
        lambda: torch.ops.lmhead.logits(
            *(torch.ones(2, 8), weight, None, 10, "", 1, 1.0, None),
            *(torch.float32, torch.float32, None, "", ""),
        ),
    ):
        with pytest.raises(TypeError, match=r"quantised weight needs its scales.*lmhead\.exchange"):
            build()
    head = lmhead.LMHead(torch.zeros(10, 8, dtype=BF16), 10)
    with pytest.raises(TypeError, match=r"hidden is torch\.float32 but the weight is"):
        head(torch.ones(2, 8))


def _job_d4(rank: int, ranks: int, weight: torch.Tensor, tile: int) -> tuple[float, float]:
    """fp8 in tiles of 128 vocabulary rows, two ranks to a tile; the scale goes by global row."""
    vocab = weight.shape[0]
    fp8 = torch.float8_e4m3fn
    scale = weight.view(-1, tile * weight.shape[1]).abs().amax(1) / torch.finfo(fp8).max
    by_row = scale.repeat_interleave(tile)[:, None]
    quantised = (weight / by_row).to(fp8)
    own = normal(2, weight.shape[1], seed=23 + rank)
    mine = shapes.shard_weight(quantised.view(torch.uint8), ranks, rank).view(fp8).float()
    product = _gathered(own, ranks) @ mine.t()
    shard = vocab // ranks
    assert shard == 64 < tile
    exact = truth(own, quantised.double() * by_row.double())
    errors = []
    for index in (rank * shard // tile, min(rank, len(scale) - 1)):  # the right tile, a naive one
        got = lmhead.exchange(product * scale[index], vocab_size=vocab)
        errors.append(relative_error(got, exact))
    return errors[0], errors[1]


def test_d4_shard_smaller_than_a_quantisation_block() -> None:
    """Blocks of 128 along V, shards of 64: rank r's rows lie in tile r // 2, whose scale the
    caller's GEMM under `exchange` applies; tile r would be wrong.  The head refuses fp8 (case D3).
    """
    weight = normal(256, 32, seed=24)
    weight[128:] *= 50  # so that the wrong scale shows
    for right, naive in pool(4).run(_job_d4, weight, 128):
        assert right < 1e-6 < 1e-1 < naive


def test_d5_bias_is_kept_on_tied_weights() -> None:
    """A tied embedding with a head bias that is a large ramp: the bias shard is applied per column,
    a padding bias is ignored, and argmax follows the bias.
    """
    embedding = torch.nn.Embedding(10, 8)
    with torch.no_grad():
        embedding.weight.copy_(integers(10, 8, seed=25))
    embedding.requires_grad_(False)
    bias, hidden = 1000.0 * torch.arange(10), integers(8, 8, seed=26)
    want = truth(hidden, embedding.weight, bias).float()
    for padding in (0.0, 1e9, NAN):
        inputs = Inputs(list(hidden.chunk(4)), embedding.weight, 10, bias=bias, padding=padding)
        for path, logits in every_path(4, inputs).items():
            same(logits, want, (path, padding))
            assert logits.argmax(1).tolist() == [9] * 8, path
    head = lmhead.LMHead.from_full(embedding.weight, bias=bias)
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
    same(head(hidden), want, "one rank, tied")


@pytest.mark.parametrize("ranks", [1, 4])
def test_d6_bias_is_added_once(ranks: int) -> None:
    """hidden = 0: the logits are the bias exactly, not twice and not N times, on every path, from a
    bias in bf16 too.
    """
    bias = (torch.arange(10.0) - 3.25) / 8
    for given in (bias, bias.bfloat16()):
        hidden = [torch.zeros(2, 8)] * ranks
        inputs = Inputs(hidden, integers(10, 8, seed=27), 10, bias=given, padding=NAN)
        for path, logits in every_path(ranks, inputs).items():
            same(logits, bias.expand(2 * ranks, 10).contiguous(), path)


def _one_number(
    ranks: int, raw: float, scale: float = 1.0, softcap: float | None = None
) -> dict[str, float]:
    """The logit that a raw product of `raw` becomes, by path; alike in every row and column."""
    options = {"scale": scale, "softcap": softcap}
    inputs = Inputs([torch.full((2, 4), raw / 4)] * ranks, torch.ones(10, 4), 10, options=options)
    found = {}
    for path, logits in every_path(ranks, inputs).items():
        assert float(logits.min()) == float(logits.max()), path
        found[path] = float(logits[0, 0])
    return found


@pytest.mark.parametrize("ranks", [1, 4])
def test_d7_scale_before_softcap(ranks: int) -> None:
    """raw 1000, scale 1/16, cap 30: scale first gives 30 * tanh(62.5 / 30) = 29.08, the other order
    1.875.
    """
    for path, value in _one_number(ranks, 1000, 0.0625, 30).items():
        assert math.isclose(value, 30 * math.tanh(62.5 / 30), rel_tol=1e-6), path
        assert abs(value - 1.875) > 27, path


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("ranks", [1, 4])
def test_d8_softcap_is_a_bound(ranks: int) -> None:
    """raw 124, cap 30 gives 29.98; no input, infinite ones included, leaves [-cap, cap]."""
    for path, value in _one_number(ranks, 124, softcap=30).items():
        assert round(value, 2) == 29.98, path
    raw = torch.tensor([0.0, -124, 1e5, -1e5, 3e38, -3e38, float("inf"), float("-inf")])
    hidden = raw[:, None].expand(8, 1)
    inputs = Inputs(list(hidden.chunk(ranks)), torch.ones(5, 1), 5, options={"softcap": 30.0})
    for path, logits in every_path(ranks, inputs).items():
        assert bool((logits.abs() <= 30).all()), path
        assert logits[2:, 0].tolist() == [30, -30] * 3, path


@pytest.mark.parametrize("ranks", [1, 4])
def test_d9_tanh_in_fp32(ranks: int) -> None:
    """bf16 hidden and weights, fp32 logits, cap 15: within 1e-5 of the cap of the fp64 truth, which
    a tanh in bf16 misses by far.
    """
    hidden, weight = normal(8, 64, seed=28, dtype=BF16), 120 * normal(21, 64, seed=29).to(BF16)
    want = truth(hidden, weight, softcap=15)
    options = {"softcap": 15.0, "logits_dtype": torch.float32}
    inputs = Inputs(list(hidden.chunk(ranks)), weight, 21, options=options)
    for path, logits in every_path(ranks, inputs).items():
        assert logits.dtype == torch.float32
        assert float((logits - want).abs().max()) < 1e-5 * 15, path
    raw = truth(hidden, weight).to(BF16)
    narrow = 15 * torch.tanh(raw / 15)
    assert float((narrow - want).abs().max()) > 1e-3 * 15, "the case tells the two apart"


@pytest.mark.parametrize("ranks", [1, 4])
def test_d10_softcap_is_applied_exactly_once(ranks: int) -> None:
    """raw 60, cap 30: none gives 60, one 28.92, two 22.4: exactly one on every path, and none
    where none was asked for.
    """
    once = 30 * math.tanh(2)
    twice = 30 * math.tanh(once / 30)
    assert round(once, 2) == 28.92 and 22 < twice < 23
    for path, value in _one_number(ranks, 60, softcap=30).items():
        assert math.isclose(value, once, rel_tol=1e-6), path
    for path, value in _one_number(ranks, 60).items():
        assert value == 60, path


def test_d10_softcap_once_in_kernel_and_twin() -> None:
    """The same of the GEMM kernel and of its twin alone, with and without a bias and a scale, into
    fp32 and into bf16 memory.
    """
    hidden, weight = torch.full((3, 16), 60 / 16), torch.ones(5, 16)
    for gemm in (gemm_kernels.gemm, reference.gemm):
        for bias, scale in ((None, 1.0), (torch.full((5,), 60.0), 0.5)):
            for dtype in (torch.float32, BF16):
                out = torch.empty(3, 5, dtype=dtype)
                gemm(hidden, weight, bias, scale=scale, softcap=30.0, out=out)
                want = torch.full((3, 5), 30 * math.tanh(2), dtype=torch.float64)
                tolerance = 1e-6 if dtype == torch.float32 else 2**-8
                assert relative_error(out, want) < tolerance, (gemm.__module__, bias, dtype)


def _job_d11(rank: int, ranks: int, weight: torch.Tensor) -> list[int]:
    before = weight.clone()
    hidden = normal(3, weight.shape[1], seed=30 + rank, dtype=BF16)
    want = truth(hidden, weight)
    moved = []
    for kernels in KERNELS:
        for logits_dtype in (BF16, torch.float32):
            head = lmhead.LMHead.from_full(weight, kernels=kernels, logits_dtype=logits_dtype)
            assert head.weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
            assert head.weight.dtype == BF16
            with watched_exchange() as seen:
                logits = head(hidden)
            rows, exchanged = seen
            assert rows.dtype == BF16 and logits.dtype == exchanged.dtype == logits_dtype
            moved.append(exchanged.nbytes)
            if logits_dtype == torch.float32:
                assert float((logits - want).abs().max()) < 1e-3
                through_bf16 = (logits.to(BF16) - want).abs().max()
                assert float(through_bf16) > 1e-3, "the case tells the two apart"
        same(weight, before, "the embedding is as it was")
    return moved


def test_d11_fp32_logits_leave_the_weight_alone() -> None:
    """fp32 logits from a tied bf16 embedding: dtype, storage and bits of the weight stay, the error
    against fp64 is below 1e-3 at H = 512, and the exchange carries fp32, twice the bytes.
    """
    weight = 20 * normal(48, 512, seed=31).to(BF16)
    for moved in pool(4).run(_job_d11, weight):
        narrow, wide = 12 * 12 * 2, 12 * 12 * 4  # T = 12 rows by S = 12 columns
        assert moved == [narrow, wide] * len(KERNELS)
    rows = shapes.own_rows(3, None, 4, 0)
    at = [
        shapes.moved_bytes("all_to_all", rows, 12, dtype.itemsize) for dtype in (BF16, torch.float)
    ]
    assert at[1] == 2 * at[0] == 3 * 3 * 12 * 4
