"""How many bytes a method really moved: counted at the collective, by the profiler's record of what
each backend was handed.  Counting is a call of its own, never a timed one.

What crosses a rank's link, in the busier direction, when it hands n bytes to a collective among N:
all-to-all (N-1)/N of n, its own block stays; all-gather (N-1) * n; all-reduce 2(N-1)/N of n, as a
ring does it.

A backend's record says how much it was handed and not how that was split.  So an all-to-all with
split sizes is looked at where torch.distributed is called, too, and what its splits give to other
ranks and get from them is counted instead, if it is found again in the record with as many bytes:
what no backend saw has not moved.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

_ITEMSIZE = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "int": 4,
    "long": 8,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
}


def crossing(collective: str, handed: int, ranks: int) -> int:
    """Bytes that cross a rank's link; `collective` as a backend names it ("gloo:all_to_all")."""
    name = collective.lower().replace("_", "")
    others = ranks - 1
    if "alltoall" in name:
        return handed * others // ranks
    if "allgather" in name:
        return handed * others
    if "allreduce" in name:
        return 2 * handed * others // ranks
    raise ValueError(f"no rule for what {collective!r} moves")


@dataclass(frozen=True)
class Split:
    """An all-to-all with split sizes: the bytes that it was handed, and those that cross this
    rank's link in the busier direction.
    """

    handed: int
    crossing: int


def count(method: Callable[[], object], ranks: int) -> int:
    """Bytes that one call of `method` moves over this rank's link, by collectives."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler talks on standard error
    with (
        _splits() as split,
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled,
    ):
        method()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events: Sequence[Any] = profiled.profiler.kineto_results.events()
    seen = [
        (event.name(), _handed(event.shapes(), event.dtypes()))
        for event in events
        if event.name().startswith(("gloo:", "nccl:")) and event.shapes()
    ]
    return total(seen, split, ranks)


def total(seen: Sequence[tuple[str, int]], split: Sequence[Split], ranks: int) -> int:
    """Bytes that cross a rank's link in the collectives that backends saw (a backend's name of it,
    bytes handed), of which the all-to-alls in `split` are known closer.
    """
    rest, found = list(seen), 0
    for known in split:
        place = next((i for i, (name, handed) in enumerate(rest) if _is(name, handed, known)), None)
        if place is not None:
            del rest[place]
            found += known.crossing
    return found + sum(crossing(name, handed, ranks) for name, handed in rest)


def _is(name: str, handed: int, known: Split) -> bool:
    return handed == known.handed and "alltoall" in name.lower().replace("_", "")


@contextlib.contextmanager
def _splits() -> Iterator[list[Split]]:
    """The all-to-alls with split sizes that torch.distributed is asked for meanwhile."""
    found: list[Split] = []
    real = dist.all_to_all_single

    def others(parts: Sequence[int] | None, tensor: torch.Tensor, rank: int, ranks: int) -> int:
        """Bytes of a flat tensor that are not this rank's own."""
        kept = tensor.numel() // ranks if parts is None else parts[rank]
        return (tensor.numel() - kept) * tensor.element_size()

    def noted(
        out: torch.Tensor, given: torch.Tensor, outs: Any = None, ins: Any = None, **more: Any
    ) -> Any:
        if outs is not None or ins is not None:
            group = more.get("group")
            sizes = dist.get_rank(group), dist.get_world_size(group)
            crossed = max(others(ins, given, *sizes), others(outs, out, *sizes))
            found.append(Split(given.nbytes, crossed))
        return real(out, given, outs, ins, **more)

    with mock.patch.object(dist, "all_to_all_single", noted):
        yield found


def _handed(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        numel = 1
        for size in shape:
            numel *= size
        total += numel * _ITEMSIZE[dtype]
    return total
