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

Scratch = Callable[[str, int], torch.Tensor]


def gemm(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    out: torch.Tensor,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """partial[t, s] = softcap((sum_h hidden[t, h] * weight[s, h] + bias[s]) * scale), in fp32,
    rounded once.

    Shapes and dtypes as in `lmhead.kernels.gemm.gemm`.  `scratch(name, numel)` gives flat fp32
    memory; without it the temporaries are fresh.  Returns `out`.
    """
    plain = bias is None and scale == 1.0 and softcap is None
    if weight.dtype == out.dtype and (plain or out.dtype == torch.float32):
        # One library call accumulates in fp32 and rounds once at most; an fp32 result can be
        # finished where it stands.
        torch.mm(hidden, weight.t(), out=out)
        return out if plain else _epilogue(out, bias, scale, softcap)
    if scratch is None:
        scratch = lambda name, numel: torch.empty(numel, dtype=torch.float32, device=out.device)  # noqa: E731
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
