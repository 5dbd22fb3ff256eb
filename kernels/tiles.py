"""Jit helpers that every kernel shares: offsets, program order, dot, rounding, tanh.

`INTERPRET` is fixed when this module is imported: it selects, at compile time, the few branches
that Triton's interpreter needs to give the numbers that compiled code gives.  Compiled kernels
carry none of them.
"""

from __future__ import annotations

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


@triton.jit
def offset(index, stride):
    """`index * stride` in 64 bits: T*V passes 2**31 (15408 rows of 151936 do), and a product of
    32-bit values wraps.
    """
    return index.to(tl.int64) * stride


@triton.jit
def dot(a, b, acc):
    """`acc + a @ b` with fp32 accumulation and, for fp32 operands, true fp32 products (never tf32).

    The interpreter multiplies the raw bits of bf16 operands, so they are widened there; products of
    bf16 or fp16 values are exact in fp32, so the numbers are those of the tensor core up to the
    order of summation.
    """
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Cast a float to `dtype`, to nearest even; an equal dtype (integers too) passes untouched.

    The interpreter truncates fp32 to bf16 where compiled code rounds, so there the bits are rounded
    by hand.
    """
    if INTERPRET and x.dtype != dtype:
        x = x.to(tl.float32)
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet = (bits >> 16) | 0x40
            return tl.where(x != x, quiet, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def tanh(x):
    """tanh in fp32, within a few units in the last place everywhere; NaN stays NaN, infinities give
    +-1.

    Away from zero (1 - e) / (1 + e) with e = exp(-2|x|) cannot overflow; near zero that form
    cancels, so the odd Taylor polynomial takes over (its first neglected term is 4e-11 of x at |x|
    = 0.125).
    """
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = size * (
        1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    )
    value = tl.where(size < 0.125, near, far)
    return tl.where(x < 0, -value, value)
