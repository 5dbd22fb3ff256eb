"""What an attention group's ranks have each for their own rows, put together on all of them: drawn
tokens and their log-probabilities, a few bytes a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lmhead.comm import Call, Comm
from lmhead.ranges import stage
from lmhead.shapes import Rows
from lmhead.workspace import Workspace


def run_share(
    comm: Comm, rows: Rows, work: Workspace, parts: Sequence[torch.Tensor], number: int = 0
) -> list[torch.Tensor]:
    """Each of `parts` [B, ...], of the rows that this rank owns -> [G, ...], of its attention
    group's, by one collective of the head's group, which every rank calls.

    Bytes move as they are, whatever the dtypes.  An all-to-all in which ranks of other groups get
    nothing does it; an all-gather where its backend has no such thing, and where the group is all
    ranks and their parts are equal.
    """
    if rows.span == 1 or rows.total == 0:
        return list(parts)
    device, own = parts[0].device, rows.own
    packed = torch.cat([_as_bytes(part, own) for part in parts], dim=1)
    width = packed.shape[1]
    call = Call("share", rows.counts, width, "uint8", number)
    with stage("share"):
        if not comm.exchanges or (
            rows.span == comm.ranks and rows.uniform and not comm.gathers_by_exchange
        ):
            together = _by_gather(comm, rows, work, packed, call)
        else:
            copies = work.take("shared copies", rows.span * own * width, torch.uint8, device)
            copies.view(rows.span, own, width).copy_(packed)
            sent, received = [0] * comm.ranks, [0] * comm.ranks
            for rank in rows.group:
                sent[rank], received[rank] = own * width, rows.counts[rank] * width
            together = work.take("shared", rows.group_total * width, torch.uint8, device)
            comm.exchange(together, copies, received, sent, call)
            together = together.view(rows.group_total, width)
    widths = [_row_bytes(part) for part in parts]
    found = zip(parts, together.split(widths, dim=1), strict=True)
    return [_as_given(block, part, rows.group_total) for part, block in found]


def check_parts(parts: Sequence[torch.Tensor], own: int, device: torch.device) -> None:
    """What is shared is [B, ...] of the rows that this rank owns."""
    for part in parts:
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"what is shared must be a tensor, got {type(part).__name__}")
        if part.dim() < 1 or part.shape[0] != own:
            raise ValueError(
                f"this rank owns {own} rows, and what is shared has shape {tuple(part.shape)}"
            )
        if part.device != device:
            raise ValueError(f"what is shared is on {part.device} but the head on {device}")


def agree(
    comm: Comm,
    rows: Rows | None,
    parts: Sequence[torch.Tensor],
    error: Exception | None,
    device: torch.device,
    number: int,
    checking: bool,
) -> None:
    """Raise `error`, what this rank found wrong; if `checking`, all ranks share the same form of
    the same rows, or all raise.
    """
    if checking:
        held = () if rows is None else rows.held
        forms = [] if error else [f"{part.dtype} {list(part.shape[1:])}" for part in parts]
        layout = [] if rows is None else rows.shape
        fields = {"op": "share", "row_counts": list(held), "layout": layout, "parts": forms}
        comm.agree(fields, error, Call("check", held, 0, "uint8", number), device)
    if error is not None:
        raise error


def _by_gather(
    comm: Comm, rows: Rows, work: Workspace, packed: torch.Tensor, call: Call
) -> torch.Tensor:
    """Of all ranks' rows, padded to the largest count, those of the own group."""
    width, largest = packed.shape[1], rows.largest
    padded = work.take("shared copies", largest * width, torch.uint8, packed.device)
    padded.view(largest, width)[: rows.own].copy_(packed)
    everyone = work.take("shared", comm.ranks * largest * width, torch.uint8, packed.device)
    comm.gather(everyone, padded, call)
    blocks = everyone.view(comm.ranks, largest, width)
    return torch.cat([blocks[rank, : rows.counts[rank]] for rank in rows.group])


def _row_bytes(part: torch.Tensor) -> int:
    return math.prod(part.shape[1:]) * part.element_size()


def _as_bytes(part: torch.Tensor, own: int) -> torch.Tensor:
    """[B, ...] -> its bytes [B, W]."""
    flat = part.contiguous().reshape(-1).view(torch.uint8)
    return flat.view(own, _row_bytes(part))


def _as_given(block: torch.Tensor, part: torch.Tensor, count: int) -> torch.Tensor:
    """Bytes [G, W] -> a tensor of its own like `part`, [G, ...]."""
    fresh = torch.empty((count, *part.shape[1:]), dtype=part.dtype, device=part.device)
    if fresh.numel():
        fresh.view(-1).view(torch.uint8).view(block.shape).copy_(block)
    return fresh
