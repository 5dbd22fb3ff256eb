"""The head's GEMM: hidden [T, H] x weight shard [S, H] -> partial [T, S], sliced by destination as
it is stored.

Gathered rows stand in rank order, so row-major [T, S] IS destination-major: chunk d, the rows of
rank d, is one contiguous piece of memory that the all-to-all sends as it stands.  The slicing costs
nothing.  Vocabulary is the M axis of the tensor-core multiply; consecutive programs share a weight
tile, so a tile's re-reads come from L2. The epilogue applies bias, scale and softcap to the fp32
accumulator and rounds once, to the dtype on the wire.

Twin: `lmhead.reference.gemm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import tiles
from .config import GemmConfig, GemmShape, default_gemm

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def epilogue(
    acc,  # [BLOCK_V, BLOCK_T] fp32
    bias_ptr,  # [S] any float, read
    columns,  # [BLOCK_V] of the shard
    live,  # [BLOCK_V] columns that exist
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """+ bias, * scale, then softcap (cap * tanh(x / cap)): the contract's order, all in fp32."""
    if HAS_BIAS:
        acc += tiles.widen(tl.load(bias_ptr + columns, mask=live, other=0.0))[:, None]
    if HAS_SCALE:
        acc *= scale
    if HAS_SOFTCAP:
        acc = softcap * tiles.tanh(acc / softcap)
    return acc


@triton.jit
def _gemm_kernel(
    hidden_ptr,  # [T, H] bf16, fp16 or fp32, read
    hidden_stride_t,
    hidden_stride_h,
    weight_ptr,  # [S, H] of hidden's dtype, read
    weight_stride_s,
    weight_stride_h,
    bias_ptr,  # [S] any float, read; weight_ptr again where HAS_BIAS is false
    partial_ptr,  # [T, S] bf16, fp16 or fp32, written; columns contiguous
    partial_stride_t,
    T,
    S,
    H,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    tiles_t = tl.cdiv(T, BLOCK_T)
    total = tiles_t * tl.cdiv(S, BLOCK_V)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        columns = (tile // tiles_t) * BLOCK_V + tl.arange(0, BLOCK_V)
        rows = (tile % tiles_t) * BLOCK_T + tl.arange(0, BLOCK_T)
        steps = tl.arange(0, BLOCK_H)
        live_columns = columns < S
        live_rows = rows < T
        weight = weight_ptr + tiles.offset(columns, weight_stride_s)[:, None]
        hidden = hidden_ptr + tiles.offset(rows, hidden_stride_t)[None, :]
        acc = tl.zeros((BLOCK_V, BLOCK_T), dtype=tl.float32)
        for start in range(0, H, BLOCK_H):
            h = start + steps
            live_h = h < H
            w = tl.load(
                weight + tiles.offset(h, weight_stride_h)[None, :],
                mask=live_columns[:, None] & live_h[None, :],
                other=0.0,
            )
            x = tl.load(
                hidden + tiles.offset(h, hidden_stride_h)[:, None],
                mask=live_rows[None, :] & live_h[:, None],
                other=0.0,
            )
            acc = tiles.dot(w, x, acc)
        acc = epilogue(
            acc, bias_ptr, columns, live_columns, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP
        )
        partial = partial_ptr + tiles.offset(rows, partial_stride_t)[None, :] + columns[:, None]
        tl.store(
            partial,
            tiles.round_to(acc, partial_ptr.dtype.element_ty),
            mask=live_columns[:, None] & live_rows[None, :],
        )


def launch_gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    out: torch.Tensor,
    config: GemmConfig,
) -> None:
    """Launch with shapes already validated."""
    (T, H), S = hidden.shape, weight.shape[0]
    total = triton.cdiv(T, config.block_t) * triton.cdiv(S, config.block_v)
    _gemm_kernel[tiles.grid(total)](
        hidden_ptr=hidden,
        hidden_stride_t=hidden.stride(0),
        hidden_stride_h=hidden.stride(1),
        weight_ptr=weight,
        weight_stride_s=weight.stride(0),
        weight_stride_h=weight.stride(1),
        bias_ptr=weight if bias is None else bias,
        partial_ptr=out,
        partial_stride_t=out.stride(0),
        T=T,
        S=S,
        H=H,
        scale=float(scale),
        softcap=0.0 if softcap is None else float(softcap),
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale != 1.0,
        HAS_SOFTCAP=softcap is not None,
        BLOCK_T=config.block_t,
        BLOCK_V=config.block_v,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    out: torch.Tensor,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """partial[t, s] = softcap((sum_h hidden[t, h] * weight[s, h] + bias[s]) * scale), in fp32,
    rounded once.

    hidden [T, H] and weight [S, H] share a dtype (bf16, fp16, fp32) and may have any strides; bias
    [S] is any float dtype, contiguous.  `out` [T, S] is bf16, fp16 or fp32 with contiguous columns;
    its row stride may exceed S. T = 0 launches nothing.  Returns `out`.  Raises ValueError or
    TypeError, with the shapes and dtypes, where they do not agree.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden [T, H] and weight [S, H] must share H, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden is {hidden.dtype} but weight is {weight.dtype}")
    if hidden.dtype not in _FLOATS or out.dtype not in _FLOATS:
        raise TypeError(
            f"hidden and out must be bfloat16, float16 or float32, got {hidden.dtype} and "
            f"{out.dtype}"
        )
    if out.shape != (hidden.shape[0], weight.shape[0]) or (out.shape[1] > 1 and out.stride(1) != 1):
        raise ValueError(
            f"out must be [{hidden.shape[0]}, {weight.shape[0]}] with contiguous columns, "
            f"got {tuple(out.shape)} with strides {out.stride()}"
        )
    if not tiles.writable(out):
        raise ValueError(f"out's rows overlap: {tuple(out.shape)} with strides {out.stride()}")
    if bias is not None and (bias.shape != (weight.shape[0],) or not bias.is_contiguous()):
        raise ValueError(
            f"bias must be contiguous [{weight.shape[0]}], got {tuple(bias.shape)} with strides "
            f"{bias.stride()}"
        )
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"bias must be a float tensor, got {bias.dtype}")
    if hidden.shape[0] == 0:
        return out
    if config is None:
        config = default_gemm(
            GemmShape(hidden.shape[0], weight.shape[0], weight.shape[1], weight.element_size())
        )
    launch_gemm(hidden, weight, bias, scale, softcap, out, config)
    return out
