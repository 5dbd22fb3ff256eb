"""The noise of a draw and its few elementary functions in a kernel: the same bits as in torch.

fp32 products and sums are rounded one by one, in the order that `lmhead.noise` states.  Compilers
contract `a * b + c` into one rounding wherever they may, so here both are libdevice's functions
that say how they round.

Twin: `lmhead.noise`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .tiles import INTERPRET

WEIGHT_ONE = tl.constexpr(2.0**40)


@triton.jit
def mul(a, b):
    """a * b in fp32, rounded before anything else is done with it."""
    if INTERPRET:
        return a * b
    else:
        return libdevice.mul_rn(a, b)


@triton.jit
def add(a, b):
    """a + b in fp32, rounded before anything else is done with it."""
    if INTERPRET:
        return a + b
    else:
        return libdevice.add_rn(a, b)


@triton.jit
def words(seed_low, seed_high, position_low, position_high, groups):
    """Philox4x32-10: int32 words of a row and int32 groups (ids // 4), which are broadcast against
    each other -> four uint32 words, of the ids 4 * group to 4 * group + 3.
    """
    c0 = groups.to(tl.uint32, bitcast=True)
    zero = c0 ^ c0
    return tl.philox_impl(
        c0,
        zero ^ position_low.to(tl.uint32, bitcast=True),
        zero ^ position_high.to(tl.uint32, bitcast=True),
        zero,
        zero ^ seed_low.to(tl.uint32, bitcast=True),
        zero ^ seed_high.to(tl.uint32, bitcast=True),
    )


@triton.jit
def word_of(ids, seed_low, seed_high, position_low, position_high):
    """The word of each id, by one call of Philox for each."""
    w0, w1, w2, w3 = words(seed_low, seed_high, position_low, position_high, ids >> 2)
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def _mantissa(x):
    """A positive normal fp32 x = (1 + z) * 2**e with 1 + z from sqrt(1/2) to sqrt(2) -> (z, e)."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    return add((bits - (e << 23)).to(tl.float32, bitcast=True), -1.0), e.to(tl.float32)


@triton.jit
def _log(z, e):
    """log((1 + z) * 2**e), by Cephes' polynomial."""
    square = mul(z, z)
    y = add(mul(z, 7.0376836292e-2), -1.1514610310e-1)
    y = add(mul(y, z), 1.1676998740e-1)
    y = add(mul(y, z), -1.2420140846e-1)
    y = add(mul(y, z), 1.4249322787e-1)
    y = add(mul(y, z), -1.6668057665e-1)
    y = add(mul(y, z), 2.0000714765e-1)
    y = add(mul(y, z), -2.4999993993e-1)
    y = add(mul(y, z), 3.3333331174e-1)
    y = mul(mul(y, z), square)
    y = add(y, mul(e, -2.12194440e-4))
    y = add(y, -mul(square, 0.5))
    return add(add(z, y), mul(e, 0.693359375))


@triton.jit
def gumbel(word):
    """uint32 words -> standard Gumbel noise, fp32, finite for all 2**32 of them."""
    v = mul(add(word.to(tl.float32), 0.5), 2.0**-32)
    rest = mul(add((word ^ 0xFFFFFFFF).to(tl.float32), 0.5), 2.0**-32)
    small = v < 0.29289323
    z, e = _mantissa(rest)
    z = tl.where(small, -v, z)
    e = tl.where(small, 0.0, e)
    z, e = _mantissa(-_log(z, e))
    return -_log(z, e)


@triton.jit
def weight(d):
    """exp(d) of fp32 d <= 0 in fixed point: int64, 2**40 for 1."""
    d = tl.maximum(d, -64.0)
    n = tl.floor(add(mul(d, 1.44269504088896341), 0.5))
    r = add(d, -mul(n, 0.693359375))
    r = add(r, -mul(n, -2.12194440e-4))
    y = add(mul(r, 1.9875691500e-4), 1.3981999507e-3)
    y = add(mul(y, r), 8.3334519073e-3)
    y = add(mul(y, r), 4.1665795894e-2)
    y = add(mul(y, r), 1.6666665459e-1)
    y = add(mul(y, r), 5.0000001201e-1)
    y = add(add(mul(y, mul(r, r)), r), 1.0)
    return mul(y, WEIGHT_ONE).to(tl.int64) >> (-n).to(tl.int64)
