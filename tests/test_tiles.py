"""The jit helpers, each alone, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from data import FLOATS, assert_same_bits, assert_same_numbers
from probes import dot_probe, round_probe, tanh_probe

from lmhead.compare import relative_error
from lmhead.kernels import tiles

BLOCK = 1 << 16
# Lower halves of an fp32 word around the tie at 0x8000.
TIES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def every_upper_half() -> torch.Tensor:
    """fp32 values with every upper half, each with lower halves below, at and above the tie."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    words = torch.cat([upper | lower for lower in TIES])
    return words.to(torch.int32).view(torch.float32)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    round_probe[(x.numel() // BLOCK,)](x, out, BLOCK=BLOCK)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_fp32_is_torchs_for_every_upper_half_and_its_ties(dtype: torch.dtype) -> None:
    x = every_upper_half()
    assert_same_numbers(rounded(x, dtype), x.to(dtype))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_rounding_every_16_bit_value_is_torchs(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int64).to(torch.int16).view(source)
    assert_same_numbers(rounded(x, target), x.to(target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int16])
def test_rounding_to_the_same_dtype_keeps_every_bit(dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int64).to(torch.int16).view(dtype)
    assert_same_bits(rounded(x, dtype), x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    tanh_probe[(1,)](x, out, BLOCK=x.numel())
    return out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tanh_is_within_two_units_of_fp64_over_the_whole_range() -> None:
    size = torch.logspace(-44.8, 4, 1 << 14, dtype=torch.float64).to(torch.float32)
    near = torch.linspace(0.6, 0.65, 1 << 14)  # where one form takes over from the other
    x = torch.cat([size, -size, near, -near])
    truth = torch.tanh(x.double())
    unit = torch.finfo(torch.float32).eps
    error = (tanh(x).double() - truth).abs()
    # The smallest values are denormal, spaced 1.4e-45.
    assert bool((error <= 2 * unit * truth.abs() + 1.5e-45).all())
    assert bool((tanh(x).abs() <= 1).all())


def test_tanh_errs_at_most_twice_as_much_as_torchs() -> None:
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 1.0), (1.0, 8.0)):
        x = torch.linspace(low, high, 1 << 14)
        truth = torch.tanh(x.double())
        assert relative_error(tanh(x), truth) <= 2 * relative_error(torch.tanh(x), truth)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tanh_of_zero_infinity_and_nan() -> None:
    x = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
    got = tanh(x)
    assert got[:3].tolist() == [0.0, 1.0, -1.0]
    assert bool(got[3].isnan())


@pytest.mark.parametrize("dtype", FLOATS)
def test_dot_multiplies_values_not_raw_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    # Small integers: every product and sum is exact in fp32, whatever the order.
    a, b = torch.randint(-8, 9, (2, 16, 16), generator=generator).to(dtype)
    out = torch.empty(16, 16)
    dot_probe[(1,)](a, b, out, BLOCK=16)
    assert_same_bits(out, a.float() @ b.float())


def test_dot_of_fp32_keeps_all_its_bits() -> None:
    a = torch.full((16, 16), 1 + 2.0**-20)
    b = torch.eye(16)
    out = torch.empty(16, 16)
    dot_probe[(1,)](a, b, out, BLOCK=16)
    assert_same_bits(out, a)  # tf32 would drop the 2**-20


@pytest.mark.parametrize(
    ("sizes", "unit"),
    [((16160,), 16), ((32776,), 8), ((12, 8), 4), ((7, 16), 1), ((0, 16), 16), ((2, 1024), 2)],
)
def test_unit_is_the_largest_common_power_of_two_up_to_16(
    sizes: tuple[int, ...], unit: int
) -> None:
    assert tiles.unit(*sizes) == unit


def test_grid_is_bounded_and_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiles.grid(0) == (1,)
    assert tiles.grid(5) == (5,)
    assert tiles.grid(10**12) == (tiles.MAX_PROGRAMS,)
    assert tiles.MAX_PROGRAMS <= 2**31 - 1
    monkeypatch.setattr(tiles, "MAX_PROGRAMS", 3)
    assert tiles.grid(5) == (3,)


@pytest.mark.parametrize(
    ("shape", "strides", "fine"),
    [
        ((3, 4), (4, 1), True),
        ((3, 4), (9, 1), True),
        ((3, 4), (3, 1), False),
        ((1, 4), (0, 1), True),
    ],
)
def test_rows_that_overlap_are_not_writable(
    shape: tuple[int, int], strides: tuple[int, int], fine: bool
) -> None:
    assert tiles.writable(torch.empty(64).as_strided(shape, strides)) is fine
