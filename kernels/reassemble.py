"""Reassembly: the received blocks [N, B, S] become logits [B, N*S], in the same memory.

What arrives from rank n are the columns n*S to (n+1)*S of this rank's rows, so the buffer is a
matrix of N x B row pieces of S elements, and the result is its transpose.  Columns are independent
of each other, which gives two kernels that need no second buffer:

* band: a program owns a band of columns of ALL N*B pieces, loads it into registers, meets at one
  barrier, stores it permuted.  Every byte is read and written once.  Up to 4096 pieces.
* cycle: beyond that a program follows one cycle of the permutation for its band of columns, a few
  pieces at a time, in an order that the host has written down (`cycles`).

The out-of-place form `reassemble_into` drops padding columns (V < N*S), casts and takes strided
blocks, in one pass. Data is moved as integers of its size, so every bit pattern (NaN payloads too)
arrives as it was sent.

Twins: `lmhead.reference.reassemble`, `lmhead.reference.reassemble_into`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from . import tiles
from .config import ReassembleConfig, ReassembleShape, default_reassemble

# Elements are moved as the integer type of their size.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _carrier(dtype: torch.dtype) -> torch.dtype:
    if dtype.itemsize not in _CARRIERS:
        raise TypeError(f"elements of {dtype.itemsize} bytes ({dtype}) cannot be reassembled")
    return _CARRIERS[dtype.itemsize]


@triton.jit
def _band_kernel(
    data_ptr,  # [N*B, S] int8/16/32/64, read as source-major pieces, written as row-major ones
    N,
    B,
    S,
    UNIT: tl.constexpr,  # divides S; see tiles.unit
    BLOCK_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    S = S // UNIT * UNIT
    piece = tl.arange(0, BLOCK_ROWS)
    source = tiles.offset(piece, S)[:, None]
    target = tiles.offset((piece % B) * N + piece // B, S)[:, None]
    live = (piece < N * B)[:, None]
    for band in range(tl.program_id(0), tl.cdiv(S, BLOCK_S), tl.num_programs(0)):
        column = (band * BLOCK_S + tl.arange(0, BLOCK_S))[None, :]
        mask = live & (column < S)
        value = tl.load(data_ptr + source + column, mask=mask, other=0)
        # No store of this program may pass a load of it; other programs touch other columns.
        tl.debug_barrier()
        tl.store(data_ptr + target + column, value, mask=mask)


@triton.jit
def _cycle_kernel(
    data_ptr,  # [N*B, S] int8/16/32/64, read as source-major pieces, written as row-major ones
    order_ptr,  # [moved pieces] int32, read: piece order[i] receives piece order[i + 1]
    start_ptr,  # [cycles + 1] int32, read: where each cycle begins in `order`
    cycles,
    S,
    UNIT: tl.constexpr,  # divides S; see tiles.unit
    BLOCK_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    S = S // UNIT * UNIT
    bands = tl.cdiv(S, BLOCK_S)
    for task in range(tl.program_id(0), cycles * bands, tl.num_programs(0)):
        column = (task % bands) * BLOCK_S + tl.arange(0, BLOCK_S)
        live_column = column < S
        first = tl.load(start_ptr + task // bands)
        last = tl.load(start_ptr + task // bands + 1) - 1
        opening = data_ptr + tiles.offset(tl.load(order_ptr + first), S) + column
        saved = tl.load(opening, mask=live_column, other=0)
        for i in range(first, last, BLOCK_ROWS):
            step = i + tl.arange(0, BLOCK_ROWS)
            live = step < last
            target = tl.load(order_ptr + step, mask=live, other=0)
            source = tl.load(order_ptr + step + 1, mask=live, other=0)
            mask = live[:, None] & live_column[None, :]
            value = tl.load(
                data_ptr + tiles.offset(source, S)[:, None] + column[None, :], mask=mask, other=0
            )
            # Pieces stored below were loaded above, or one turn earlier, by any thread of this
            # program.
            tl.debug_barrier()
            tl.store(
                data_ptr + tiles.offset(target, S)[:, None] + column[None, :], value, mask=mask
            )
        closing = data_ptr + tiles.offset(tl.load(order_ptr + last), S) + column
        tl.store(closing, saved, mask=live_column)


@triton.jit
def _copy_kernel(
    received_ptr,  # [N, B, S] read; columns contiguous
    received_stride_n,
    received_stride_b,
    out_ptr,  # [B, V] written; columns contiguous
    out_stride_b,
    N,
    B,
    S,
    V,
    UNIT: tl.constexpr,  # divides S, V and the strides; see tiles.unit
    BLOCK_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    received_stride_n = received_stride_n // UNIT * UNIT
    received_stride_b = received_stride_b // UNIT * UNIT
    out_stride_b = out_stride_b // UNIT * UNIT
    S = S // UNIT * UNIT
    V = V // UNIT * UNIT
    bands = tl.cdiv(S, BLOCK_S)
    groups = tl.cdiv(B, BLOCK_ROWS)
    for task in range(tl.program_id(0), N * groups * bands, tl.num_programs(0)):
        n = task // (groups * bands)
        row = (task // bands) % groups * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = (task % bands) * BLOCK_S + tl.arange(0, BLOCK_S)
        live = (column < S) & (n * S + column < V)
        mask = (row < B)[:, None] & live[None, :]
        source = received_ptr + tiles.offset(n, received_stride_n)
        source += tiles.offset(row, received_stride_b)[:, None] + column[None, :]
        value = tl.load(source, mask=mask, other=0)
        target = out_ptr + tiles.offset(row, out_stride_b)[:, None] + (n * S + column)[None, :]
        tl.store(target, tiles.round_to(value, out_ptr.dtype.element_ty), mask=mask)


@functools.lru_cache(maxsize=256)
def cycles(ranks: int, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The cycles of the permutation of N*B pieces: (order [moved], start [cycles + 1]), int32 on
    `device`.

    Longest first, so that the last programs to start have the least to do; pieces that stay are
    left out.  Kept per (N, B, device) for a while: walking the cycles takes a second per million
    pieces.
    """
    pieces = ranks * rows
    seen = bytearray(pieces)
    found: list[list[int]] = []
    for leader in range(pieces):
        if seen[leader]:
            continue
        cycle, piece = [], leader
        while not seen[piece]:
            seen[piece] = 1
            cycle.append(piece)
            piece = (
                piece % ranks
            ) * rows + piece // ranks  # whose data belongs where `piece` stands
        if len(cycle) > 1:
            found.append(cycle)
    found.sort(key=len, reverse=True)
    order = [piece for cycle in found for piece in cycle]
    start = [0]
    for cycle in found:
        start.append(start[-1] + len(cycle))
    return (
        torch.tensor(order, dtype=torch.int32, device=device),
        torch.tensor(start, dtype=torch.int32, device=device),
    )


# Tables that captured CUDA graphs read.  A replay must find this very memory or it writes anywhere,
# so these outlive what `cycles` keeps.
_captured: dict[tuple[int, int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}


def _table(ranks: int, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`cycles`, kept for good once a graph is captured over it; made by a call before the
    capture.
    """
    key = ranks, rows, device
    if key in _captured:
        return _captured[key]
    table = cycles(*key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured[key] = table
    return table


def launch_reassemble(
    data: torch.Tensor, ranks: int, rows: int, shard: int, config: ReassembleConfig
) -> None:
    """Permute `data`, N*B*S contiguous elements of an integer dtype, in place."""
    bands = triton.cdiv(shard, config.block_s)
    if config.kind == "band":
        _band_kernel[tiles.grid(bands)](
            data_ptr=data,
            N=ranks,
            B=rows,
            S=shard,
            UNIT=tiles.unit(shard),
            BLOCK_ROWS=config.block_rows,
            BLOCK_S=config.block_s,
            num_warps=config.num_warps,
        )
        return
    order, start = _table(ranks, rows, data.device)
    count = start.numel() - 1
    _cycle_kernel[tiles.grid(count * bands)](
        data_ptr=data,
        order_ptr=order,
        start_ptr=start,
        cycles=count,
        S=shard,
        UNIT=tiles.unit(shard),
        BLOCK_ROWS=config.block_rows,
        BLOCK_S=config.block_s,
        num_warps=config.num_warps,
    )


def launch_copy(received: torch.Tensor, out: torch.Tensor, config: ReassembleConfig) -> None:
    """One out-of-place pass; integer dtypes are moved, floats are cast."""
    (ranks, rows, shard), vocab = received.shape, out.shape[1]
    tasks = ranks * triton.cdiv(rows, config.block_rows) * triton.cdiv(shard, config.block_s)
    _copy_kernel[tiles.grid(tasks)](
        received_ptr=received,
        received_stride_n=received.stride(0),
        received_stride_b=received.stride(1),
        out_ptr=out,
        out_stride_b=out.stride(0),
        N=ranks,
        B=rows,
        S=shard,
        V=vocab,
        UNIT=tiles.unit(shard, vocab, *received.stride()[:2], out.stride(0)),
        BLOCK_ROWS=config.block_rows,
        BLOCK_S=config.block_s,
        num_warps=config.num_warps,
    )


def reassemble(received: torch.Tensor, config: ReassembleConfig | None = None) -> torch.Tensor:
    """received [N, B, S], contiguous, any dtype of 1, 2, 4 or 8 bytes -> the SAME memory as [B,
    N*S], row-major.

    Nothing is launched where the memory is right as it stands (N == 1, B == 1, or no elements).
    Raises ValueError for strided input: what is permuted in place must be one block; TypeError for
    elements of another size.
    """
    if received.dim() != 3 or not received.is_contiguous():
        raise ValueError(
            f"received must be a contiguous [N, B, S], got {tuple(received.shape)} with strides "
            f"{received.stride()}"
        )
    ranks, rows, shard = received.shape
    logits = received.view(rows, ranks * shard)
    if ranks == 1 or rows <= 1 or received.numel() == 0:
        return logits
    data = received.view(-1).view(_carrier(received.dtype))
    if config is None:
        shape = ReassembleShape(ranks, rows, shard, received.element_size())
        config = default_reassemble(shape, in_place=True)
    with tiles.on(data):
        launch_reassemble(data, ranks, rows, shard, config)
    return logits


def reassemble_into(
    received: torch.Tensor, out: torch.Tensor, config: ReassembleConfig | None = None
) -> torch.Tensor:
    """received [N, B, S] -> out [B, V], V <= N*S: drops the padding columns and casts to out's
    dtype in one pass.

    Both may have any row strides, but contiguous columns; they must not overlap.  Equal dtypes are
    moved bit for bit; otherwise both are bf16, fp16 or fp32 and the cast rounds to nearest even.
    Returns `out`.  Raises ValueError or TypeError, with the numbers, for what does not fit.
    """
    if received.dim() != 3 or out.dim() != 2 or received.shape[1] != out.shape[0]:
        raise ValueError(
            f"received [N, B, S] and out [B, V] must share B, got {tuple(received.shape)} and "
            f"{tuple(out.shape)}"
        )
    ranks, rows, shard = received.shape
    if out.shape[1] > ranks * shard:
        raise ValueError(
            f"out has {out.shape[1]} columns but {ranks} blocks of {shard} give {ranks * shard}"
        )
    for name, tensor in (("received", received), ("out", out)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have contiguous columns, got strides {tensor.stride()}")
    if not tiles.writable(out):
        raise ValueError(f"out's rows overlap: {tuple(out.shape)} with strides {out.stride()}")
    if out.numel() == 0:
        return out
    if received.dtype == out.dtype:
        carrier = _carrier(out.dtype)
        received, target = received.view(carrier), out.view(carrier)
    else:
        floats = (torch.bfloat16, torch.float16, torch.float32)
        if received.dtype not in floats or out.dtype not in floats:
            raise TypeError(f"cannot cast {received.dtype} to {out.dtype} while reassembling")
        target = out
    if config is None:
        shape = ReassembleShape(
            ranks, rows, shard, max(received.element_size(), out.element_size())
        )
        config = default_reassemble(shape, in_place=False)
    with tiles.on(out):
        launch_copy(received, target, config)
    return out
