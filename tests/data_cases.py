"""What the case tests share: values that carry their address, every path through the head, and the
oracle, which is one matmul in fp64 in a single process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import ranks as harness
import torch
import torch.distributed as dist

import lmhead
from lmhead.compare import first_difference

KERNELS = ("torch", "triton")
ROUTES = ("all_to_all", "all_gather")
NAN = float("nan")

Group = dist.ProcessGroup | None


def addresses(start: int, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] fp32 with 1000 * (start + row) + column: exact below 2**24, so a misplaced
    element names where it came from.
    """
    row = torch.arange(start, start + rows, dtype=torch.float32)[:, None]
    return 1000 * row + torch.arange(columns, dtype=torch.float32)


def address_head(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden [rows, rows], weight [vocab, rows]) whose logits are `addresses(0, rows, vocab)`: row
    r is the unit vector of r, and column r of the weight holds row r's logits.
    """
    return torch.eye(rows), addresses(0, rows, vocab).t().contiguous()


def integers(
    rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[rows, columns] of integers in -4..4: their dot products are exact in fp32 in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (rows, columns), generator=generator).to(dtype)


def normal(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, columns] of standard normals, scaled by columns**-0.5 so that dot products are O(1)
    against another normal.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).div(columns**0.5).to(dtype)


def truth(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """The oracle, fp64 [rows, V]: one process, one matmul, then bias, scale, softcap."""
    logits = hidden.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def same(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    """Bit equality, or an AssertionError that names the place."""
    difference = first_difference(got, want)
    assert difference is None, f"{what}: {difference}"


def shard_of(
    full: torch.Tensor, ranks: int, rank: int, shard: int | None = None, padding: float = 0.0
) -> torch.Tensor:
    """Rank `rank`'s rows of `full` [V, ...], by plain slicing; rows beyond V hold `padding`."""
    shard = -(-full.shape[0] // ranks) if shard is None else shard
    rows = full.new_full((shard, *full.shape[1:]), padding)
    own = full[rank * shard : (rank + 1) * shard]
    rows[: own.shape[0]] = own
    return rows


@dataclass(frozen=True)
class Inputs:
    """One head for all ranks: everyone's hidden rows, the full weight, and what padding holds."""

    hidden: list[torch.Tensor]  # of each rank [B, H]
    weight: torch.Tensor  # [rows >= V, H]
    vocab: int
    bias: torch.Tensor | None = None  # [rows >= V]
    padding: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def head(self, ranks: int, rank: int, group: Group = None, **options: Any) -> lmhead.LMHead:
        bias = None if self.bias is None else shard_of(self.bias, ranks, rank, None, self.padding)
        return lmhead.LMHead(
            shard_of(self.weight, ranks, rank, None, self.padding),
            self.vocab,
            group,
            bias=bias,
            **(self.options | options),
        )

    def counts(self) -> list[int]:
        return [rows.shape[0] for rows in self.hidden]


def serve(rank: int, ranks: int, inputs: Inputs) -> dict[str, torch.Tensor]:
    """A job: this rank's logits by every way in, every route and both kernel sets."""
    own, counts, found = inputs.hidden[rank], inputs.counts(), {}
    uneven = None if len(set(counts)) == 1 else counts
    for kernels in KERNELS:
        for route in ROUTES if ranks > 1 else ("local",):
            asked = None if route == "local" else route
            head = inputs.head(ranks, rank, route=asked, kernels=kernels)
            found[f"{route}, {kernels}"] = head(own, uneven)
            assert head.last_route is not None and head.last_route.name == route
            name = f"{route}, {kernels}, gathered by the caller"
            found[name] = head.forward_gathered(torch.cat(inputs.hidden), uneven)
            options = inputs.options
            logits_dtype = options.get("logits_dtype") or own.dtype
            found[f"{route}, {kernels}, operator"] = torch.ops.lmhead.logits(
                own,
                head.weight,
                head.bias,
                inputs.vocab,
                dist.group.WORLD.group_name if ranks > 1 else "",
                ranks,
                float(options.get("scale", 1.0)),
                options.get("softcap"),
                logits_dtype,
                options.get("wire_dtype") or logits_dtype,
                uneven,
                kernels,
                asked or "",
            )
    return found


def every_path(ranks: int, inputs: Inputs) -> dict[str, torch.Tensor]:
    """All ranks' logits in rank order [T, V], by path (`serve`); one rank runs in this process."""
    if ranks == 1:
        return serve(0, 1, inputs)
    found = harness.pool(ranks).run(serve, inputs)
    return {path: torch.cat([logits[path] for logits in found]) for path in found[0]}


@dataclass(frozen=True)
class Caught:
    """What a call raised, ready for a pipe; `error` is "" where it returned."""

    error: str = ""
    text: str = ""
    seconds: float = 0.0
    cause: str = ""
    record: dict[str, Any] = field(default_factory=dict)
    value: Any = None


def caught(call: Callable[[], Any]) -> Caught:
    """Run `call`; what it raised, with the seconds that it took."""
    begin = time.monotonic()
    try:
        value = call()
    except Exception as error:
        return Caught(
            type(error).__name__,
            str(error),
            time.monotonic() - begin,
            "" if error.__cause__ is None else type(error.__cause__).__name__,
            dict(getattr(error, "record", {})),
        )
    return Caught(value=value, seconds=time.monotonic() - begin)


def checked_mode() -> None:
    """Inside a job: heads built from here on agree on every call; the harness takes it back."""
    os.environ["LMHEAD_CHECK"] = "1"


@dataclass(frozen=True)
class Sent:
    """One all-to-all as the backend saw it."""

    dtype: torch.dtype
    nbytes: int
    dims: tuple[int, int]
    contiguous: bool
    receive: tuple[int, int]  # addresses [first, last)
    send: tuple[int, int]


@contextlib.contextmanager
def watched_exchange() -> Iterator[list[Sent]]:
    """Records every `all_to_all_single` inside the block, which still happens."""
    seen: list[Sent] = []
    plain = dist.all_to_all_single

    def watch(output: torch.Tensor, input: torch.Tensor, *splits: Any, **options: Any) -> Any:
        spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (output, input)]
        seen.append(
            Sent(
                input.dtype,
                input.nbytes,
                (output.dim(), input.dim()),
                output.is_contiguous() and input.is_contiguous(),
                *spans,
            )
        )
        return plain(output, input, *splits, **options)

    with mock.patch.object(dist, "all_to_all_single", watch):
        yield seen
