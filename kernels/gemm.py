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

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import tiles
from .config import (
    GemmConfig,
    GemmShape,
    default_gemm,
    default_pointer_gemm,
    deterministic_gemm,
)

# Flat fp32 memory by purpose and number of elements.
Scratch = Callable[[str, int], torch.Tensor]

# Token rows of an accumulator that pass through registers at a time.
FINISH_ROWS = tl.constexpr(32)

# The tile of the kernel that adds up splits.
ADD_UP_ROWS, ADD_UP_COLUMNS = 4, 256
# What lets cuBLAS add up in the result's dtype, by it.
_REDUCTIONS = {
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
    torch.float16: "allow_fp16_reduced_precision_reduction",
}

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
def _finish(
    acc,  # [BLOCK_V, BLOCK_T] fp32
    bias_ptr,
    partial_ptr,
    partial_stride_t,
    t,  # the first token row
    T,
    v,  # the first column of the shard
    S,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The epilogue, one rounding, and the store into rows t.. of partial: destination-major,
    columns contiguous.

    Rows are taken FINISH_ROWS at a time.  A whole accumulator of 256 in registers, with the
    epilogue's temporaries and addresses, spills; so it is halved until a part is small.  256 + 32
    rows of bf16 then take 50 registers where they took 204 (sm_100, Triton 3.8).
    """
    if BLOCK_T > FINISH_ROWS:
        half: tl.constexpr = BLOCK_T // 2
        low, high = tl.split(tl.permute(tl.reshape(acc, (BLOCK_V, 2, half)), (0, 2, 1)))
        _finish(
            low,
            bias_ptr,
            partial_ptr,
            partial_stride_t,
            t,
            T,
            v,
            S,
            scale,
            softcap,
            HAS_BIAS,
            HAS_SCALE,
            HAS_SOFTCAP,
            half,
            BLOCK_V,
        )
        _finish(
            high,
            bias_ptr,
            partial_ptr,
            partial_stride_t,
            t + half,
            T,
            v,
            S,
            scale,
            softcap,
            HAS_BIAS,
            HAS_SCALE,
            HAS_SOFTCAP,
            half,
            BLOCK_V,
        )
    else:
        columns = v + tl.arange(0, BLOCK_V)
        rows = t + tl.arange(0, BLOCK_T)
        acc = epilogue(
            acc, bias_ptr, columns, columns < S, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP
        )
        _store(acc, partial_ptr, partial_stride_t, rows, T, columns, S)


@triton.jit
def _store(acc, partial_ptr, partial_stride_t, rows, T, columns, S):
    """acc [BLOCK_V, BLOCK_T] -> partial[rows, columns]."""
    partial = partial_ptr + tiles.offset(rows, partial_stride_t)[None, :] + columns[:, None]
    mask = (columns < S)[:, None] & (rows < T)[None, :]
    tl.store(partial, tiles.round_to(acc, partial_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bulk_kernel(
    hidden_desc,  # [T, H] bf16 or fp16, read in blocks [BLOCK_T, BLOCK_H]
    tail_desc,  # the same matrix in blocks [TAIL_T, BLOCK_H]; hidden_desc where TAIL_T is 0
    weight_desc,  # [S, H] of hidden's dtype, read in blocks [BLOCK_V, BLOCK_H]
    bias_ptr,  # [S] any float, read; partial_ptr again where HAS_BIAS is false
    partial_ptr,  # [T, S] any float, written; or [SPLITS, T, S] fp32 without an epilogue
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
    TAIL_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    UNIT: tl.constexpr,  # divides S and the row stride; see tiles.unit
):
    S = S // UNIT * UNIT
    partial_stride_t = partial_stride_t // UNIT * UNIT
    tiles_t = tl.cdiv(T, BLOCK_T + TAIL_T)
    total = tiles_t * tl.cdiv(S, BLOCK_V) * SPLITS
    steps = tl.cdiv(tl.cdiv(H, BLOCK_H), SPLITS)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        split = tile % SPLITS
        v = tile // SPLITS // tiles_t * BLOCK_V
        t = tile // SPLITS % tiles_t * (BLOCK_T + TAIL_T)
        first = split * steps * BLOCK_H
        last = tl.minimum(first + steps * BLOCK_H, H)
        acc = tl.zeros((BLOCK_V, BLOCK_T), dtype=tl.float32)
        if TAIL_T > 0:
            tail = tl.zeros((BLOCK_V, TAIL_T), dtype=tl.float32)
        # A bulk load fills what lies outside the matrix with zeros: no masks.
        for h in tl.range(first, last, BLOCK_H, num_stages=STAGES, warp_specialize=WARP_SPECIALIZE):
            w = weight_desc.load([v, h])
            acc = tiles.dot(w, hidden_desc.load([t, h]).T, acc)
            if TAIL_T > 0:
                tail = tiles.dot(w, tail_desc.load([t + BLOCK_T, h]).T, tail)
        target = partial_ptr
        if SPLITS > 1:
            target += tiles.offset(split, T) * S
        _finish(
            acc,
            bias_ptr,
            target,
            partial_stride_t,
            t,
            T,
            v,
            S,
            scale,
            softcap,
            HAS_BIAS,
            HAS_SCALE,
            HAS_SOFTCAP,
            BLOCK_T,
            BLOCK_V,
        )
        if TAIL_T > 0:
            _finish(
                tail,
                bias_ptr,
                target,
                partial_stride_t,
                t + BLOCK_T,
                T,
                v,
                S,
                scale,
                softcap,
                HAS_BIAS,
                HAS_SCALE,
                HAS_SOFTCAP,
                TAIL_T,
                BLOCK_V,
            )


@triton.jit
def _pointer_kernel(
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
        _finish(
            acc,
            bias_ptr,
            partial_ptr,
            partial_stride_t,
            tile % tiles_t * BLOCK_T,
            T,
            tile // tiles_t * BLOCK_V,
            S,
            scale,
            softcap,
            HAS_BIAS,
            HAS_SCALE,
            HAS_SOFTCAP,
            BLOCK_T,
            BLOCK_V,
        )


@triton.jit
def _add_up_kernel(
    sums_ptr,  # [SPLITS, T, S] fp32, read; columns contiguous
    sums_stride_split,
    sums_stride_t,
    bias_ptr,  # [S] any float, read; sums_ptr again where HAS_BIAS is false
    partial_ptr,  # [T, S] any float, written; columns contiguous; may be sums_ptr for one split
    partial_stride_t,
    T,
    S,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    UNIT: tl.constexpr,  # divides S and the strides; see tiles.unit
):
    """Adds the splits up in their order, so that a result never depends on which came first."""
    S = S // UNIT * UNIT
    sums_stride_split = sums_stride_split // UNIT * UNIT
    sums_stride_t = sums_stride_t // UNIT * UNIT
    partial_stride_t = partial_stride_t // UNIT * UNIT
    bands = tl.cdiv(S, BLOCK_V)
    for task in range(tl.program_id(0), bands * tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        columns = task % bands * BLOCK_V + tl.arange(0, BLOCK_V)
        rows = task // bands * BLOCK_T + tl.arange(0, BLOCK_T)
        mask = (columns < S)[:, None] & (rows < T)[None, :]
        acc = tl.zeros((BLOCK_V, BLOCK_T), dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            part = sums_ptr + tiles.offset(tl.full((), split, tl.int64), sums_stride_split)
            part += tiles.offset(rows, sums_stride_t)[None, :] + columns[:, None]
            acc += tl.load(part, mask=mask, other=0.0)
        acc = epilogue(
            acc, bias_ptr, columns, columns < S, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP
        )
        _store(acc, partial_ptr, partial_stride_t, rows, T, columns, S)


@dataclass(frozen=True)
class _Epilogue:
    """What follows the sums, as the kernels take it."""

    bias: torch.Tensor | None
    scale: float
    softcap: float | None

    @property
    def plain(self) -> bool:
        return self.bias is None and self.scale == 1.0 and self.softcap is None

    def arguments(self, stand_in: torch.Tensor) -> dict[str, Any]:
        return {
            "bias_ptr": stand_in if self.bias is None else self.bias,
            "scale": float(self.scale),
            "softcap": 0.0 if self.softcap is None else float(self.softcap),
            "HAS_BIAS": self.bias is not None,
            "HAS_SCALE": self.scale != 1.0,
            "HAS_SOFTCAP": self.softcap is not None,
        }


NO_EPILOGUE = _Epilogue(None, 1.0, None)


def why_not_bulk(hidden: torch.Tensor, weight: torch.Tensor) -> str | None:
    """Why bulk tensor loads cannot read these operands; None where they can.

    TMA wants two-byte elements here, contiguous columns, and rows that start on 16-byte borders.
    """
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        size = tensor.element_size()
        if size != 2:
            return f"{name} is {tensor.dtype}, and no tensor core keeps full fp32"
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            return f"{name}'s columns are {tensor.stride(1)} elements apart"
        pitch = tensor.stride(0) * size
        if pitch % 16 or tensor.stride(0) < tensor.shape[1]:
            return f"{name}'s rows are {pitch} bytes apart, not a multiple of 16 that holds a row"
        if tensor.data_ptr() % 16:
            return f"{name} starts at an address that is no multiple of 16"
    return None


def _launch_bulk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    after: _Epilogue,
    out: torch.Tensor,
    config: GemmConfig,
) -> None:
    (T, H), S = hidden.shape, weight.shape[0]
    total = triton.cdiv(T, config.rows) * triton.cdiv(S, config.block_v) * config.splits
    hidden_desc = TensorDescriptor.from_tensor(hidden, [config.block_t, config.block_h])
    tail_desc = hidden_desc
    if config.tail_t:
        tail_desc = TensorDescriptor.from_tensor(hidden, [config.tail_t, config.block_h])
    _bulk_kernel[tiles.grid(total)](
        hidden_desc=hidden_desc,
        tail_desc=tail_desc,
        weight_desc=TensorDescriptor.from_tensor(weight, [config.block_v, config.block_h]),
        partial_ptr=out,
        partial_stride_t=out.stride(-2),
        T=T,
        S=S,
        H=H,
        **after.arguments(out),
        BLOCK_T=config.block_t,
        TAIL_T=config.tail_t,
        BLOCK_V=config.block_v,
        BLOCK_H=config.block_h,
        SPLITS=config.splits,
        STAGES=config.num_stages,
        WARP_SPECIALIZE=config.warp_specialize,
        UNIT=tiles.unit(S, out.stride(-2)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _launch_pointer(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    after: _Epilogue,
    out: torch.Tensor,
    config: GemmConfig,
) -> None:
    (T, H), S = hidden.shape, weight.shape[0]
    total = triton.cdiv(T, config.block_t) * triton.cdiv(S, config.block_v)
    _pointer_kernel[tiles.grid(total)](
        hidden_ptr=hidden,
        hidden_stride_t=hidden.stride(0),
        hidden_stride_h=hidden.stride(1),
        weight_ptr=weight,
        weight_stride_s=weight.stride(0),
        weight_stride_h=weight.stride(1),
        partial_ptr=out,
        partial_stride_t=out.stride(0),
        T=T,
        S=S,
        H=H,
        **after.arguments(weight),
        BLOCK_T=config.block_t,
        BLOCK_V=config.block_v,
        BLOCK_H=config.block_h,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _launch_add_up(sums: torch.Tensor, after: _Epilogue, out: torch.Tensor) -> None:
    """sums [splits, T, S] fp32 -> out [T, S]: added up, epilogue, rounded once."""
    splits, T, S = sums.shape
    tasks = triton.cdiv(S, ADD_UP_COLUMNS) * triton.cdiv(T, ADD_UP_ROWS)
    _add_up_kernel[tiles.grid(tasks)](
        sums_ptr=sums,
        sums_stride_split=sums.stride(0),
        sums_stride_t=sums.stride(1),
        partial_ptr=out,
        partial_stride_t=out.stride(0),
        T=T,
        S=S,
        **after.arguments(sums),
        SPLITS=splits,
        BLOCK_T=ADD_UP_ROWS,
        BLOCK_V=ADD_UP_COLUMNS,
        UNIT=tiles.unit(S, *sums.stride()[:2], out.stride(0)),
        num_warps=4,
    )


def _library(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    after: _Epilogue,
    out: torch.Tensor,
    scratch: Scratch,
) -> None:
    """torch.mm, cuBLAS on CUDA, which accumulates in fp32; then the epilogue where there is one."""
    T, S = out.shape
    sums = out
    if out.dtype != torch.float32 and (weight.dtype != out.dtype or not after.plain):
        sums = scratch("sums", T * S).view(T, S)  # rounded once, after the epilogue
    if weight.dtype == sums.dtype:
        with _full_sums(weight):
            torch.mm(hidden, weight.t(), out=sums)
    elif hidden.is_cuda:
        torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=sums)
    else:  # the CPU's mm has no out_dtype
        torch.mm(hidden.float(), weight.float().t(), out=sums)
    if sums is not out or not after.plain:
        # Where they are one, each element is read and written by the one thread that owns it.
        _launch_add_up(sums.unsqueeze(0), after, out)


@contextlib.contextmanager
def _full_sums(weight: torch.Tensor) -> Iterator[None]:
    """Have cuBLAS add partial sums up in fp32: by default torch lets it do so in the 16 bits of the
    result, which rounds more than once.  What the user has set is set again afterwards (1.3 us).
    """
    name = _REDUCTIONS.get(weight.dtype) if weight.is_cuda else None
    matmul = torch.backends.cuda.matmul
    if name is None or not getattr(matmul, name):
        yield
        return
    split_k = getattr(matmul, f"{name}_split_k", None)  # newer than torch 2.11
    setattr(matmul, name, False if split_k is None else (False, split_k))
    try:
        yield
    finally:
        setattr(matmul, name, True if split_k is None else (True, split_k))


def _plain_rows(hidden: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """hidden [T, H] as contiguous rows that start on a 16-byte border: itself, or a copy.

    The memory of the copy is asked for even where there is none to make, so that a call on strided
    rows after a warm-up on contiguous ones allocates nothing.
    """
    words = -(-hidden.numel() * hidden.element_size() // 4)
    kept = scratch("plain rows", words).view(hidden.dtype)[: hidden.numel()].view(hidden.shape)
    if hidden.is_contiguous() and hidden.data_ptr() % 16 == 0:
        return hidden.view(-1).view(hidden.shape)  # one row may have any stride
    return kept.copy_(hidden)


def launch_gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    after: _Epilogue,
    out: torch.Tensor,
    config: GemmConfig,
    scratch: Scratch,
) -> None:
    """Launch with shapes already validated and a config that fits."""
    if config.kind == "library":
        _library(hidden, weight, after, out, scratch)
    elif config.kind == "pointer":
        _launch_pointer(hidden, weight, after, out, config)
    elif config.splits == 1:
        _launch_bulk(hidden, weight, after, out, config)
    else:
        (T, S), splits = out.shape, config.splits
        sums = scratch("sums", splits * T * S).view(splits, T, S)
        _launch_bulk(hidden, weight, NO_EPILOGUE, sums, config)
        _launch_add_up(sums, after, out)


def gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    out: torch.Tensor,
    config: GemmConfig | None = None,
    deterministic: bool = False,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """partial[t, s] = softcap((sum_h hidden[t, h] * weight[s, h] + bias[s]) * scale), in fp32,
    rounded once.

    hidden [T, H] and weight [S, H] share a dtype (bf16, fp16, fp32) and may have any strides; bias
    [S] is any float dtype, contiguous.  `out` [T, S] is bf16, fp16 or fp32 with contiguous columns;
    its row stride may exceed S. T = 0 launches nothing.  Returns `out`.  Raises ValueError or
    TypeError, with the shapes and dtypes, where they do not agree.

    `deterministic`: a row's bits depend on the row and the weight alone, not on T, on the other
    rows or on how hidden lies; the config is then `deterministic_gemm`'s unless one is given.
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
    after = _Epilogue(bias, scale, softcap)
    shape = GemmShape(
        rows=hidden.shape[0],
        shard=weight.shape[0],
        hidden=weight.shape[1],
        itemsize=weight.element_size(),
        out_itemsize=out.element_size(),
    )
    if scratch is None:

        def scratch(name: str, numel: int) -> torch.Tensor:
            return torch.empty(numel, dtype=torch.float32, device=out.device)

    if deterministic:
        hidden = _plain_rows(hidden, scratch)
    if config is None:
        config = deterministic_gemm(shape) if deterministic else default_gemm(shape)
    if config.kind == "bulk" and why_not_bulk(hidden, weight) is not None:
        if deterministic:
            config = deterministic_gemm(shape, bulk=False)
        else:
            config = default_pointer_gemm(shape)
    with tiles.on(out):
        launch_gemm(hidden, weight, after, out, config, scratch)
    return out
