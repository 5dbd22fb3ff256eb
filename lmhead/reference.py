"""The plain twin of every kernel, in torch: the same names, signatures and results.

They say what a kernel means, and they are what runs on CPU tensors.  `gemm` works in column blocks,
so that an fp32 copy of the weight never exists.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# fp32 elements of the weight block that `gemm` widens at a time: 4 MiB, which stays in a CPU's
# second-level cache and under a thousandth of a large shard.
BLOCK_ELEMENTS = 1 << 20

# Rows and columns of the one product that a deterministic `gemm` asks the library for.  16 rows
# waste the least of a small batch; 128 columns of an H of 8192 are a widened block of 4 MiB again.
FIXED_ROWS, FIXED_COLUMNS = 16, 128

Scratch = Callable[[str, int], torch.Tensor]


def gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    out: torch.Tensor,
    deterministic: bool = False,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """partial[t, s] = softcap((sum_h hidden[t, h] * weight[s, h] + bias[s]) * scale), in fp32,
    rounded once.

    Shapes and dtypes as in `lmhead.kernels.gemm.gemm`.  `scratch(name, numel)` gives flat fp32
    memory; without it the temporaries are fresh.  Returns `out`.

    `deterministic`: a row's bits depend on the row and the weight alone.  A library picks its order
    of summation by shape, alignment and dtype, so all products are then fp32 ones of one shape.
    """
    if scratch is None:
        scratch = lambda name, numel: torch.empty(numel, dtype=torch.float32, device=out.device)  # noqa: E731
    if deterministic:
        return _fixed_gemm(hidden, weight, bias, scale, softcap, out, scratch)
    plain = bias is None and scale == 1.0 and softcap is None
    if weight.dtype == out.dtype and (plain or out.dtype == torch.float32):
        # One library call accumulates in fp32 and rounds once at most; an fp32 result can be
        # finished where it stands.
        torch.mm(hidden, weight.t(), out=out)
        return out if plain else _epilogue(out, bias, scale, softcap)
    (rows, width), shard = hidden.shape, weight.shape[0]
    wide_hidden = hidden
    if hidden.dtype != torch.float32:
        wide_hidden = scratch("hidden fp32", rows * width).view(rows, width).copy_(hidden)
    columns = min(shard, max(16, BLOCK_ELEMENTS // width))
    accumulator = scratch("accumulator", rows * columns)
    block = (
        weight.new_empty(0)
        if weight.dtype == torch.float32
        else scratch("weight block", columns * width)
    )
    for start in range(0, shard, columns):
        part = weight[start : start + columns]
        count = part.shape[0]
        if weight.dtype != torch.float32:
            part = block[: count * width].view(count, width).copy_(part)
        acc = accumulator[: rows * count].view(rows, count)
        torch.mm(wide_hidden, part.t(), out=acc)
        _epilogue(acc, None if bias is None else bias[start : start + count], scale, softcap)
        out[:, start : start + count].copy_(acc)
    return out


def _fixed_gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    out: torch.Tensor,
    scratch: Scratch,
) -> torch.Tensor:
    """`gemm` by products [FIXED_ROWS, H] x [H, FIXED_COLUMNS] of contiguous fp32 copies that start
    where an allocation does, zeros behind the last row and column.

    What is left to the library is `sums_in_one_order`.
    """
    (rows, width), shard = hidden.shape, weight.shape[0]
    padded = -(-rows // FIXED_ROWS) * FIXED_ROWS
    wide = scratch("hidden fp32", padded * width).view(padded, width)
    wide[:rows].copy_(hidden)
    wide[rows:].zero_()
    block = scratch("weight block", FIXED_COLUMNS * width).view(FIXED_COLUMNS, width)
    acc = scratch("accumulator", FIXED_ROWS * FIXED_COLUMNS).view(FIXED_ROWS, FIXED_COLUMNS)
    for start in range(0, shard, FIXED_COLUMNS):
        part = weight[start : start + FIXED_COLUMNS]
        count = part.shape[0]
        block[:count].copy_(part)
        block[count:].zero_()
        for first in range(0, rows, FIXED_ROWS):
            torch.mm(wide[first : first + FIXED_ROWS], block.t(), out=acc)
            if bias is not None:
                acc[:, :count].add_(bias[start : start + count])
            # All of it: the tanh of a few columns may run otherwise than that of whole vectors.
            _epilogue(acc, None, scale, softcap)
            target = out[first : first + FIXED_ROWS, start : start + count]
            target.copy_(acc[: target.shape[0], :count])
    return out


def sums_in_one_order(width: int, device: torch.device) -> bool:
    """Whether the library sums up every element of the fixed product in one order, wherever in it
    the element stands: MKL does (2024.2, AVX-512), OpenBLAS does not (0.3.31, sgemm of 128 x 64 x
    128).  Asked with one row and one column, repeated.
    """
    generator = torch.Generator().manual_seed(0)
    row, column = torch.randn(2, 1, width, generator=generator).to(device)
    rows, columns = row.repeat(FIXED_ROWS, 1), column.repeat(FIXED_COLUMNS, 1)
    product = torch.mm(rows, columns.t())
    return bool((product == product[0, 0]).all())


def gemm_exact(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """The same in fp64 throughout, unrounded: the truth that errors are measured against."""
    acc = hidden.double() @ weight.double().t()
    return _epilogue(acc, None if bias is None else bias.double(), scale, softcap)


def _epilogue(
    acc: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None
) -> torch.Tensor:
    """+ bias, * scale, then cap * tanh(x / cap), in place on fp32 or fp64."""
    if bias is not None:
        acc.add_(bias)
    if scale != 1.0:
        acc.mul_(scale)
    if softcap is not None:
        acc.div_(softcap).tanh_().mul_(softcap)
    return acc


def reassemble(received: torch.Tensor) -> torch.Tensor:
    """received [N, B, S], contiguous -> the same memory as [B, N*S], row-major; through a copy,
    unlike the kernel.
    """
    ranks, rows, shard = received.shape
    logits = received.view(rows, ranks * shard)
    if ranks > 1 and rows > 1:
        logits.view(rows, ranks, shard).copy_(received.clone().transpose(0, 1))
    return logits


def reassemble_into(received: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """received [N, B, S] -> out [B, V], V <= N*S: drops the padding columns, casts to out's dtype.
    Returns `out`.
    """
    shard, vocab = received.shape[2], out.shape[1]
    whole = vocab // shard  # ranks that have no padding
    if whole:
        blocks = received[:whole].transpose(0, 1)
        out[:, : whole * shard].unflatten(1, (whole, shard)).copy_(blocks)
    if vocab > whole * shard:
        out[:, whole * shard :].copy_(received[whole, :, : vocab - whole * shard])
    return out
