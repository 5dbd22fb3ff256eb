"""The plain twin of every kernel, in torch: the same names, signatures and results.

They say what a kernel means, and they are what runs on CPU tensors.  `gemm` works in column blocks,
so that an fp32 copy of the weight never exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

# fp32 elements of the weight block that `gemm` widens at a time: 4 MiB, which stays in a CPU's
# second-level cache and under a thousandth of a large shard.
BLOCK_ELEMENTS = 1 << 20

# Rows, columns and the most terms of the one product that a deterministic `gemm` asks the library
# for.  16 rows waste the least of a small batch; 128 columns of an H of 8192 are a widened block of
# 4 MiB again.  MKL splits a sum of about 1023 terms or more by the number of threads (2024.2, Intel
# with AVX-512 and AMX; 64 to 768 terms never), hence at most 512.
FIXED_ROWS, FIXED_COLUMNS, FIXED_TERMS = 16, 128, 512
# Thread counts under which the library is asked for that product before it is trusted, besides the
# one that is set.
PROBED_THREADS = (1, 2, 3, 4)

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

    `deterministic`: a row's bits depend on the row and the weight alone: not on T, S, the number of
    threads, or how the operands lie in memory.  A library picks its order of summation by such
    things, so the sums are cut into blocks of at most `FIXED_TERMS` terms, all products are fp32
    ones of one shape, and their results are added in the order of the blocks.
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
    """`gemm` by products [FIXED_ROWS, terms] x [terms, FIXED_COLUMNS] of contiguous fp32 copies on
    64-byte borders, zeros behind the last row, column and term; block 0 + block 1, + block 2, ...

    What is left to the library is checked by `order_of_sums`.
    """
    (rows, width), shard = hidden.shape, weight.shape[0]
    blocks, terms = _sum_blocks(width)
    padded = -(-rows // FIXED_ROWS) * FIXED_ROWS
    wide = scratch("hidden fp32", blocks * padded * terms).view(blocks, padded, terms)
    part = scratch("weight block", blocks * FIXED_COLUMNS * terms)
    part = part.view(blocks, FIXED_COLUMNS, terms)
    acc, product = scratch("accumulator", 2 * FIXED_ROWS * FIXED_COLUMNS).view(
        2, FIXED_ROWS, FIXED_COLUMNS
    )
    _copy_blocks(wide.zero_(), hidden)
    part.zero_()
    # Views cost as much as a small product: each is made once.
    operands = [block.t() for block in part]
    tiles = [tile.unbind() for tile in wide.split(FIXED_ROWS, dim=1)]
    for start in range(0, shard, FIXED_COLUMNS):
        columns = weight[start : start + FIXED_COLUMNS]
        count = columns.shape[0]
        _copy_blocks(part, columns)
        if count < FIXED_COLUMNS:
            part[:, count:].zero_()
        for first, tile in zip(range(0, rows, FIXED_ROWS), tiles, strict=False):
            torch.mm(tile[0], operands[0], out=acc)
            for block in range(1, blocks):
                torch.mm(tile[block], operands[block], out=product)
                acc.add_(product)
            if bias is not None:
                acc[:, :count].add_(bias[start : start + count])
            # All of it: the tanh of a few columns may run otherwise than that of whole vectors.
            _epilogue(acc, None, scale, softcap)
            target = out[first : first + FIXED_ROWS, start : start + count]
            target.copy_(acc[: target.shape[0], :count])
    return out


def _sum_blocks(width: int) -> tuple[int, int]:
    """Into how many blocks a deterministic `gemm` cuts a sum of H terms, and the terms of one: a
    multiple of 16, so that every row of a block starts on a 64-byte border.
    """
    blocks = max(1, -(-width // FIXED_TERMS))
    return blocks, max(16, -(-width // (16 * blocks)) * 16)


def _copy_blocks(blocks: torch.Tensor, matrix: torch.Tensor) -> None:
    """matrix [R, H] -> the first R rows of blocks [blocks, >= R, terms]; the rest stays."""
    (rows, width), (count, _, terms) = matrix.shape, blocks.shape
    if width == count * terms:
        blocks[:, :rows].copy_(matrix.unflatten(1, (count, terms)).transpose(0, 1))
        return
    for block, part in zip(blocks, matrix.split(terms, dim=1), strict=False):
        block[:rows, : part.shape[1]].copy_(part)


def order_of_sums(width: int, device: torch.device) -> str | None:
    """None where the library sums up every element of a deterministic `gemm`'s products over H =
    `width` in one order; otherwise what the order depends on.

    Asked with one row and one column, repeated, a few times over, since another order may give the
    same sum by luck, and under several numbers of threads (the number that is set is set again).
    MKL has one order (2024.2, AVX2 and AVX-512), OpenBLAS one by the place in the result (0.3.31,
    sgemm of 128 x 64 x 128).
    """
    _, terms = _sum_blocks(width)
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(8, 2, terms, generator=generator, dtype=torch.float32, device="cpu")
    before = torch.get_num_threads()
    counts = (before,) if device.type != "cpu" else (*PROBED_THREADS, before)
    found = []
    try:
        for threads in dict.fromkeys(counts):
            if threads != torch.get_num_threads():
                torch.set_num_threads(threads)
            for row, column in pairs.to(device):
                rows, columns = row.repeat(FIXED_ROWS, 1), column.repeat(FIXED_COLUMNS, 1)
                found.append(torch.mm(rows, columns.t()))
    finally:
        if before != torch.get_num_threads():
            torch.set_num_threads(before)
    products = torch.stack(found).view(-1, len(pairs), FIXED_ROWS, FIXED_COLUMNS)
    if bool((products != products[:, :, :1, :1]).any()):
        return "where in the result an element stands"
    if bool((products != products[:1]).any()):
        return "the number of threads"
    return None


def library_of(device: torch.device) -> str:
    """The library behind `torch.mm` on a device, by its name."""
    if device.type != "cpu":
        return "cuBLAS" if device.type == "cuda" else f"torch's {device.type} library"
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    names = {"mkl": "MKL", "open": "OpenBLAS", "accelerate": "Accelerate", "nvpl": "NVPL"}
    word = found.group(1) if found else "unknown"
    return names.get(word, f"BLAS {word!r}")


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
