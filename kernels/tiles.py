"""Jit helpers that every kernel shares: offsets, program order, dot, rounding, tanh.

`INTERPRET` is fixed when this module is imported: it selects, at compile time, the few branches
that Triton's interpreter needs to give the numbers that compiled code gives.  Compiled kernels
carry none of them.
"""

from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Upper bound of every 1-D grid; kernels loop over what is left.  Far under the launch limit of
# 2**31 - 1, far over what fills a GPU, and small enough that a 32-bit loop counter never wraps.
MAX_PROGRAMS = 1 << 16


def grid(tiles: int) -> tuple[int]:
    """The 1-D launch grid for `tiles` units of work: bounded, since every kernel loops with
    `tl.num_programs`.
    """
    return (max(1, min(tiles, MAX_PROGRAMS)),)


def on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Launch on the tensor's device: Triton itself takes the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def unit(*sizes: int) -> int:
    """The largest power of two up to 16 that divides all of `sizes`.

    By itself Triton asks only whether an argument is a multiple of 16, and would move rows of 24
    bf16 elements, 48 bytes, one element at a time.  Kernels take this as a constant UNIT, and
    `size // UNIT * UNIT` lets the compiler see the rest.
    """
    return math.gcd(16, *sizes)


def writable(out: torch.Tensor) -> bool:
    """Whether the rows of a matrix with contiguous columns lie apart, so that no two programs write
    one element.
    """
    return out.shape[0] <= 1 or out.stride(0) >= out.shape[1]


@triton.jit
def offset(index, stride):
    """`index * stride` in 64 bits: T*V passes 2**31 (15408 rows of 151936 do), and a product of
    32-bit values wraps.
    """
    return index.to(tl.int64) * stride


@triton.jit
def widen(x):
    """A float as fp32, exactly.

    The interpreter takes bf16's denormal values for zero, so there the bits are moved by hand.
    """
    if INTERPRET and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def dot(a, b, acc):
    """`acc + a @ b` with fp32 accumulation and, for fp32 operands, true fp32 products (never tf32).

    The interpreter multiplies the raw bits of bf16 operands, so they are widened there; products of
    bf16 or fp16 values are exact in fp32, so the numbers are those of the tensor core up to the
    order of summation: numpy's, which may differ between two places in one tile (OpenBLAS 0.3.31).
    """
    if INTERPRET:
        a = widen(a)
        b = widen(b)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Cast a float to `dtype`, to nearest even; an equal dtype (integers too) passes untouched.

    The interpreter truncates fp32 to bf16 where compiled code rounds, so there the bits are rounded
    by hand.
    """
    if INTERPRET and x.dtype != dtype:
        x = widen(x)
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet = (bits >> 16) | 0x40
            return tl.where(x != x, quiet, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """tanh in fp32, as exact as torch's within a factor of 2 in the mean; NaN stays NaN, infinities
    give +-1.

    Near zero the polynomial of Cephes' tanhf (Moshier, netlib.org/cephes, single/tanhf.c); beyond,
    where nothing cancels, 1 - 2e / (1 + e) with e = exp(-2|x|), which cannot overflow.
    """
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = 1.0 - 2.0 * e / (1.0 + e)
    square = x * x
    poly = -5.70498872745e-3 * square + 2.06390887954e-2
    poly = poly * square - 5.37397155531e-2
    poly = poly * square + 1.33314422036e-1
    poly = poly * square - 3.33332819422e-1
    near = size + size * square * poly
    value = tl.where(size < 0.625, near, far)
    return tl.where(x < 0, -value, value)
