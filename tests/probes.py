"""Tiny kernels that put one jit helper each under test, and the mistake that a check must catch."""

from __future__ import annotations

import triton
import triton.language as tl

from lmhead.kernels import noise, tiles


@triton.jit
def round_probe(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tiles.round_to(tl.load(x_ptr + i), out_ptr.dtype.element_ty))


@triton.jit
def tanh_probe(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tiles.tanh(tl.load(x_ptr + i)))


@triton.jit
def dot_probe(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr):
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    i = row * BLOCK + column
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    tl.store(out_ptr + i, tiles.dot(tl.load(a_ptr + i), tl.load(b_ptr + i), acc))


@triton.jit
def offset_probe(out_ptr, row, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tiles.offset(row + i, stride))


@triton.jit
def wide_row_probe(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    """Reads column 0 of a row; its offset is a product of 64 bits."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row, tl.load(x_ptr + tiles.offset(row, stride)))


@triton.jit
def narrow_row_probe(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    """The same with the cast left out: the product wraps at 2**31."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row, tl.load(x_ptr + row * stride))


@triton.jit
def narrow_product_probe(out_ptr, row, stride, BLOCK: tl.constexpr):
    """What `offset_probe` would store without the cast."""
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, ((row + i) * stride).to(tl.int64))


@triton.jit
def noise_probe(
    ids_ptr,  # [COUNT] int32, read
    row_ptr,  # [4] int32, read: the seed's words, the position's
    below_ptr,  # [COUNT] fp32, read
    word_ptr,  # [COUNT] int32, written
    gumbel_ptr,  # [COUNT] fp32, written
    weight_ptr,  # [COUNT] int64, written
    COUNT: tl.constexpr,
):
    i = tl.arange(0, COUNT)
    row = row_ptr + tl.zeros((COUNT,), tl.int32)
    seed = tl.load(row), tl.load(row + 1)
    position = tl.load(row + 2), tl.load(row + 3)
    word = noise.word_of(tl.load(ids_ptr + i), seed[0], seed[1], position[0], position[1])
    tl.store(word_ptr + i, word.to(tl.int32, bitcast=True))
    tl.store(gumbel_ptr + i, noise.gumbel(word))
    tl.store(weight_ptr + i, noise.weight(tl.load(below_ptr + i)))
