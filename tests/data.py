"""Data for the kernels' proofs: values that name their own address, buffers whose borders are
guarded, and errors measured against torch's at equal precision.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmhead.compare import first_difference, relative_error

if TYPE_CHECKING:
    from hypothesis import settings

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Whatever a kernel leaves of this pattern it has not written; what a border loses of it was written
# by mistake.
CANARY = 0x5A
# Set by the options --slow and --everything.
SLOW = "LMHEAD_TEST_SLOW"


def quick(examples: int) -> settings:
    """Property tests of kernels: `examples` with the slow tests, a third of them in a quick run; no
    deadline, since the interpreter's first call is slow.

    Imported here: the tests for a GPU need no hypothesis.
    """
    from hypothesis import HealthCheck, settings

    return settings(
        max_examples=examples if os.environ.get(SLOW) else -(-examples // 3),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return tensor.view(INTEGERS[tensor.element_size()])


def addresses(shape: tuple[int, ...], dtype: torch.dtype, first: int = 0) -> torch.Tensor:
    """A tensor whose element i, read as an integer, is first + i: a misplaced one names itself.

    Every bit pattern may occur; `first` = 0x7F80 (16 bits) or 0x7F800000 (fp32) gives NaN payloads.
    """
    numel = 1
    for extent in shape:
        numel *= extent
    whole = torch.arange(first, first + numel, dtype=torch.int64)
    return whole.to(INTEGERS[dtype.itemsize]).view(dtype).view(shape)


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Shape, dtype and every bit; the message gives the place and the two addresses."""
    assert got.dtype == want.dtype
    difference = first_difference(bits(got), bits(want))
    assert difference is None, difference


def assert_same_numbers(got: torch.Tensor, want: torch.Tensor) -> None:
    """As `assert_same_bits`, except that any NaN is as good as another, as casts make their own."""
    assert got.dtype == want.dtype and got.shape == want.shape
    canonical = torch.full_like(want, float("nan"))
    assert_same_bits(
        torch.where(got.isnan(), canonical, got), torch.where(want.isnan(), canonical, want)
    )


@dataclass(frozen=True)
class Framed:
    """A matrix inside a larger buffer of canaries."""

    buffer: torch.Tensor
    inside: torch.Tensor

    def assert_intact(self) -> None:
        """Nothing around the matrix was written.  Overwrites the matrix."""
        bits(self.inside).view(torch.uint8).fill_(CANARY)
        wrong = (self.buffer.view(torch.uint8) != CANARY).nonzero()
        assert wrong.numel() == 0, f"bytes outside the matrix were written, first {wrong[0]}"


def framed(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    *,
    left: int = 3,
    right: int = 2,
    device: str = "cpu",
) -> Framed:
    """[rows, columns] with a row of canaries above and below and canary columns at its sides."""
    width = left + columns + right
    buffer = torch.empty((rows + 2) * width, dtype=dtype, device=device)
    buffer.view(torch.uint8).fill_(CANARY)
    buffer = buffer.view(rows + 2, width)
    return Framed(buffer, buffer[1 : rows + 1, left : left + columns])


def transposed(received: torch.Tensor, vocab: int | None = None) -> torch.Tensor:
    """[N, B, S] -> a fresh [B, V] by transpose and reshape: what a reassembly must give."""
    ranks, rows, shard = received.shape
    whole = received.transpose(0, 1).reshape(rows, ranks * shard).clone()
    return whole if vocab is None else whole[:, :vocab]


def logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    precision: torch.dtype,
) -> torch.Tensor:
    """The head's arithmetic by torch, all in `precision`."""
    result = hidden.to(precision) @ weight.to(precision).t()
    if bias is not None:
        result = result + bias.to(precision)
    result = result * scale
    return result if softcap is None else softcap * torch.tanh(result / softcap)


def assert_as_exact_as_torch(
    got: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> None:
    """Against the truth in fp64, `got` errs at most twice as much as torch does with fp32
    accumulation and one rounding, in the worst of a few orders of summation.

    Few logits say little, since torch may be exact there by luck: two units in their last place are
    allowed then, or two fp32 roundings of the sum of their terms' sizes, where these cancel.
    """
    epilogue = bias, scale, softcap
    truth = logits(hidden, weight, *epilogue, precision=torch.float64)
    generator = torch.Generator().manual_seed(0)
    baseline = 0.0
    for _ in range(8):
        order = torch.randperm(hidden.shape[1], generator=generator)
        by_torch = logits(hidden[:, order], weight[:, order], *epilogue, precision=torch.float32)
        baseline = max(baseline, relative_error(by_torch.to(got.dtype), truth))
    allowed = 2 * baseline
    if got.numel() < 64:
        sizes = hidden.double().abs() @ weight.double().abs().t() * abs(scale)
        cancelled = float(sizes.norm() / truth.norm().clamp(min=1e-30))
        fp32 = torch.finfo(torch.float32).eps
        allowed = max(allowed, 2 * torch.finfo(got.dtype).eps, 2 * fp32 * cancelled)
    error = relative_error(got, truth)
    assert error <= allowed, f"relative error {error:.3g}, torch's is {baseline:.3g}"
