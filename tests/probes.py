"""Tiny kernels that put one jit helper each under test, and the mistake that a check must catch."""

from __future__ import annotations

import triton
import triton.language as tl

from lmhead.kernels import tiles


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
