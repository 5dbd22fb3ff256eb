"""How many bytes a method really moved: counted at the collective, by the profiler's record of what
each backend was handed.  Counting is a call of its own, never a timed one.

What crosses a rank's link, in the busier direction, when it hands n bytes to a collective among N:
all-to-all (N-1)/N of n, its own block stays; all-gather (N-1) * n; all-reduce 2(N-1)/N of n, as a
ring does it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

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


def count(method: Callable[[], object], ranks: int) -> int:
    """Bytes that one call of `method` moves over this rank's link, by collectives."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler talks on standard error
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        method()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events: Sequence[Any] = profiled.profiler.kineto_results.events()
    return sum(
        crossing(event.name(), _handed(event.shapes(), event.dtypes()), ranks)
        for event in events
        if event.name().startswith(("gloo:", "nccl:")) and event.shapes()
    )


def _handed(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        numel = 1
        for size in shape:
            numel *= size
        total += numel * _ITEMSIZE[dtype]
    return total
