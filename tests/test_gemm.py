"""The GEMM against the truth in fp64 and against its twin, in the interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from data import (
    FLOATS,
    assert_as_exact_as_torch,
    assert_same_bits,
    framed,
    logits,
    quick,
)
from hypothesis import given
from hypothesis import strategies as st
from variants import CELLS, GEMMS, ROWS, SHARDS, TWO_BYTES, WIDTHS, Cell, check_cell

from lmhead import reference
from lmhead.kernels import gemm, tiles
from lmhead.kernels.config import LIBRARY, GemmConfig

SMALL = GemmConfig(block_t=16, block_v=32, block_h=32, num_warps=4, num_stages=2)


def problem(
    rows: int,
    shard: int,
    hidden: int,
    operands: torch.dtype = torch.bfloat16,
    bias: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(hidden, weight, bias) whose logits are of the size of one or a few."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, w = normal(rows, hidden), normal(shard, hidden) / hidden**0.5
    return x.to(operands), w.to(operands), None if bias is None else normal(shard).to(bias)


def check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    out: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Run kernel and twin into poisoned memory; both must be as exact as torch."""
    epilogue: dict[str, Any] = {"scale": scale, "softcap": softcap}
    shape = hidden.shape[0], weight.shape[0]
    for run, options in ((gemm.gemm, {"config": config}), (reference.gemm, {})):
        got = torch.empty(shape, dtype=out)
        assert bool(got.isnan().all())
        assert run(hidden, weight, bias, **epilogue, out=got, **options) is got
        assert_as_exact_as_torch(got, hidden, weight, bias, **epilogue)
        if run is gemm.gemm:
            result = got
    return result


@pytest.mark.parametrize("rows", [1, 3, 17, 300])
@pytest.mark.parametrize(("shard", "hidden"), [(1, 64), (5, 8), (127, 200), (130, 576)])
def test_every_shape(rows: int, shard: int, hidden: int) -> None:
    dtype = FLOATS[(rows + shard) % 3]
    check(*problem(rows, shard, hidden, dtype), out=dtype)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_variant_at_ragged_shapes(cell: Cell) -> None:
    check_cell(cell)


def test_the_ragged_shapes_miss_nothing() -> None:
    for variant in GEMMS:
        cells = [cell for cell in CELLS if cell.variant == variant]
        assert {cell.rows for cell in cells} == set(ROWS)
        assert {cell.shard for cell in cells} == set(SHARDS)
        assert {cell.hidden for cell in cells} == set(WIDTHS)
        modes = {(cell.out, cell.epilogue) for cell in cells}
        assert modes == set(itertools.product(FLOATS, (False, True)))
        two_bytes = variant.startswith("bulk")
        assert {cell.operands for cell in cells} == set(TWO_BYTES if two_bytes else FLOATS)
    assert {(cell.rows, cell.hidden) for cell in CELLS} == set(itertools.product(ROWS, WIDTHS))


@pytest.mark.parametrize(("operands", "out"), [*itertools.product(FLOATS, FLOATS)])
def test_the_library_in_every_pair_of_dtypes(operands: torch.dtype, out: torch.dtype) -> None:
    check(*problem(17, 130, 200, operands), out=out, config=LIBRARY)
    given = problem(17, 130, 200, operands, bias=torch.float32)
    check(*given, scale=0.5, softcap=3.0, out=out, config=LIBRARY)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_splits_are_added_in_their_order(splits: int) -> None:
    """fp32 forgets a 1 beside 2**24, so (2**24 + 1) - 2**24 is 0; any other order gives 1."""
    hidden = torch.ones(1, 64, dtype=torch.bfloat16)
    weight = torch.zeros(1, 64, dtype=torch.bfloat16)
    weight[0, 0], weight[0, 16], weight[0, 32] = 2.0**24, 1.0, -(2.0**24)
    out = torch.empty(1, 1)
    config = GemmConfig(16, 16, 16, 4, 1, "bulk", splits=splits)
    gemm.gemm(hidden, weight, out=out, config=config)
    assert out.item() == 0.0


def test_fp32_rows_with_gaps_are_finished_in_place() -> None:
    hidden, weight, bias = problem(7, 33, 20, torch.float32, bias=torch.float32)
    frame = framed(7, 33, torch.float32)
    gemm.gemm(hidden, weight, bias, softcap=2.0, out=frame.inside)
    assert_as_exact_as_torch(frame.inside, hidden, weight, bias, softcap=2.0)
    frame.assert_intact()


@pytest.mark.parametrize(
    ("hidden_as", "weight_as", "reason"),
    [
        (lambda x: x, lambda x: x, None),
        (lambda x: x.float(), lambda x: x.float(), "fp32"),
        (lambda x: x[:, :9], lambda x: x[:, :9], None),  # rows of 9, 32 elements apart
        (lambda x: x.t().contiguous().t(), lambda x: x, "hidden's columns are"),
        (lambda x: x, lambda x: x[:, ::2], "weight's columns are 2 elements apart"),
        (lambda x: x[:, :9].contiguous(), lambda x: x, "hidden's rows are 18 bytes apart"),
        (lambda x: x, lambda x: x[:, 1:], "weight starts at an address"),
        (lambda x: x[:1].expand_as(x), lambda x: x, "hidden's rows are 0 bytes apart"),
    ],
)
def test_the_reason_against_bulk_loads_is_given(
    hidden_as: Callable[[torch.Tensor], torch.Tensor],
    weight_as: Callable[[torch.Tensor], torch.Tensor],
    reason: str | None,
) -> None:
    x = torch.ones(5, 32, dtype=torch.bfloat16)
    found = gemm.why_not_bulk(hidden_as(x), weight_as(x.clone()))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(("operands", "out"), [*itertools.product(FLOATS, FLOATS)])
def test_every_pair_of_dtypes(operands: torch.dtype, out: torch.dtype) -> None:
    check(*problem(17, 130, 200, operands), out=out)
    check(*problem(17, 130, 200, operands, bias=torch.float32), scale=0.5, softcap=3.0, out=out)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap"),
    [*itertools.product((None, torch.bfloat16, torch.float64), (1.0, 0.0625), (None, 2.0))],
)
def test_bias_scale_and_softcap_each_and_together(
    bias: torch.dtype | None, scale: float, softcap: float | None, out: torch.dtype
) -> None:
    check(*problem(9, 127, 64, bias=bias), scale=scale, softcap=softcap, out=out)


def test_the_order_is_bias_then_scale_then_softcap() -> None:
    hidden, weight = torch.full((1, 16), 2.0), torch.full((1, 16), 30.0)  # 960
    bias = torch.tensor([40.0])
    out = torch.empty(1, 1)
    gemm.gemm(hidden, weight, bias, scale=0.0625, softcap=30.0, out=out)
    want = 30 * torch.tanh(torch.tensor(1000 * 0.0625 / 30, dtype=torch.float64))
    assert abs(out.item() - want.item()) < 1e-5


def test_d9_softcap_is_computed_in_fp32() -> None:
    cap = 15.0
    hidden, weight, _ = problem(17, 130, 512)
    hidden *= 8  # logits to several times the cap
    out = torch.empty(17, 130)
    gemm.gemm(hidden, weight, softcap=cap, out=out)
    truth = logits(hidden, weight, None, 1.0, cap, torch.float64)
    assert float((out.double() - truth).abs().max()) < 1e-5 * cap
    assert float(out.abs().max()) <= cap


@given(
    rows=st.integers(1, 40),
    shard=st.integers(1, 70),
    hidden=st.integers(1, 130),
    operands=st.sampled_from(FLOATS),
    out=st.sampled_from(FLOATS),
    bias=st.sampled_from([None, torch.float16]),
    softcap=st.sampled_from([None, 1.5]),
    blocks=st.tuples(*[st.sampled_from([16, 32, 64])] * 3),
    seed=st.integers(0, 1 << 20),
)
@quick(40)
def test_any_shape_with_any_tile(
    rows: int,
    shard: int,
    hidden: int,
    operands: torch.dtype,
    out: torch.dtype,
    bias: torch.dtype | None,
    softcap: float | None,
    blocks: tuple[int, int, int],
    seed: int,
) -> None:
    config = GemmConfig(*blocks, num_warps=4, num_stages=2)
    check(
        *problem(rows, shard, hidden, operands, bias, seed),
        softcap=softcap,
        out=out,
        config=config,
    )


def test_integers_are_exact_in_every_dtype() -> None:
    # Sums below 2**8 are exact even in bf16, so the bits must be torch's.
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randint(-2, 3, (33, 40), generator=generator).float()
    weight = torch.randint(-1, 2, (50, 40), generator=generator).float()
    want = hidden @ weight.t()
    for operands, out in itertools.product(FLOATS, FLOATS):
        got = torch.empty(33, 50, dtype=out)
        gemm.gemm(hidden.to(operands), weight.to(operands), out=got)
        assert_same_bits(got, want.to(out))


STRIDED = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "part of a wider matrix": lambda x: torch.nn.functional.pad(x, (3, 4, 1, 2))[1:-2, 3:-4],
    "expanded rows": lambda x: x[:1].expand_as(x),
    "expanded columns": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("hidden_as", STRIDED)
@pytest.mark.parametrize("weight_as", STRIDED)
def test_strided_operands_are_exact(hidden_as: str, weight_as: str) -> None:
    hidden, weight, _ = problem(19, 37, 72)
    hidden, weight = STRIDED[hidden_as](hidden), STRIDED[weight_as](weight)
    assert not (hidden.is_contiguous() or weight.is_contiguous())
    before = hidden.clone(), weight.clone()
    want = torch.empty(19, 37)
    gemm.gemm(hidden.contiguous(), weight.contiguous(), out=want, config=SMALL)
    got = torch.empty(19, 37)
    gemm.gemm(hidden, weight, out=got, config=SMALL)
    assert_same_bits(got, want)
    assert_as_exact_as_torch(got, hidden, weight)
    assert_same_bits(hidden.clone(), before[0])
    assert_same_bits(weight.clone(), before[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "shard"), [(1, 5), (17, 33), (18, 64)])
def test_strided_output_rows_are_written_and_nothing_else(
    rows: int, shard: int, dtype: torch.dtype
) -> None:
    hidden, weight, bias = problem(rows, shard, 40, bias=torch.bfloat16)
    want = torch.empty(rows, shard, dtype=dtype)
    gemm.gemm(hidden, weight, bias, out=want)
    frame = framed(rows, shard, dtype)
    gemm.gemm(hidden, weight, bias, out=frame.inside)
    assert_same_bits(frame.inside, want)
    frame.assert_intact()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_column(value: float) -> None:
    hidden, weight, bias = problem(21, 45, 50, torch.float32, bias=torch.float32)
    want = torch.empty(21, 45)
    gemm.gemm(hidden, weight, bias, softcap=4.0, out=want, config=SMALL)
    assert bool(want.isfinite().all())
    hidden[7, 49] = value
    weight[33, 0] = value
    bias[2] = float("nan")
    got = torch.empty(21, 45)
    gemm.gemm(hidden, weight, bias, softcap=4.0, out=got, config=SMALL)
    touched = torch.zeros(21, 45, dtype=torch.bool)
    touched[7] = True
    touched[:, 33] = True
    touched[:, 2] = True
    assert_same_bits(got.masked_fill(touched, 0), want.masked_fill(touched, 0))
    assert bool(got[:, 2].isnan().all())
    if value != value:
        assert bool(got[7].isnan().all()) and bool(got[:, 33].isnan().all())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    hidden, weight, _ = problem(33, 40, 64)
    together = torch.empty(33, 40)
    gemm.gemm(hidden, weight, out=together, config=SMALL)
    alone = torch.empty(1, 40)
    gemm.gemm(hidden[5:6], weight, out=alone, config=SMALL)
    assert_same_bits(alone, together[5:6].contiguous())


def test_a_bounded_grid_still_covers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MAX_PROGRAMS", 4)
    check(*problem(40, 100, 24), config=SMALL)  # 12 tiles


def test_no_rows_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("launched")

    monkeypatch.setattr(gemm, "launch_gemm", refuse)
    out = torch.empty(0, 5)
    assert gemm.gemm(torch.empty(0, 8), torch.ones(5, 8), out=out) is out


X, W = torch.zeros(3, 8), torch.zeros(5, 8)


@pytest.mark.parametrize(
    ("arguments", "out", "error", "text"),
    [
        ((X, torch.zeros(5, 9)), torch.zeros(3, 5), ValueError, r"\(3, 8\) and \(5, 9\)"),
        ((X[0], W), torch.zeros(3, 5), ValueError, r"\(8,\) and \(5, 8\)"),
        ((X, W.half()), torch.zeros(3, 5), TypeError, "float32 but weight is torch.float16"),
        ((X.double(), W.double()), torch.zeros(3, 5), TypeError, "torch.float64"),
        ((X, W), torch.zeros(3, 5).int(), TypeError, "torch.int32"),
        ((X, W), torch.zeros(3, 6), ValueError, r"\[3, 5\].*\(3, 6\)"),
        ((X, W), torch.zeros(5, 3).t(), ValueError, r"\[3, 5\].*\(1, 3\)"),
        ((X, W), torch.zeros(1, 5).expand(3, 5), ValueError, r"overlap.*\(3, 5\).*\(0, 1\)"),
        ((X, W, torch.zeros(4)), torch.zeros(3, 5), ValueError, r"\[5\], got \(4,\)"),
        ((X, W, torch.zeros(10)[::2]), torch.zeros(3, 5), ValueError, r"\(5,\).*\(2,\)"),
        ((X, W, torch.zeros(5).int()), torch.zeros(3, 5), TypeError, "torch.int32"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    arguments: tuple[torch.Tensor, ...], out: torch.Tensor, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        gemm.gemm(*arguments, out=out)
