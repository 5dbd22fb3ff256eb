"""A fair clock for comparing ways of doing the same thing on every rank of a group.

Methods are interleaved round by round, a barrier stands before every timed window, a round's time
is the slowest rank's, and the figure is the median over rounds.  The number of rounds is fixed, so
that no rank runs a collective more than another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of each round, slowest rank."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range; 0 for fewer than four rounds."""
        if len(self.seconds) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2


def interleaved(
    methods: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    device: torch.device,
    barrier: Callable[[], None] = lambda: None,
    slowest: Callable[[list[float]], list[float]] = lambda seconds: seconds,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every method `rounds` times, one after the other in each round.

    `barrier` lines the ranks up before each window; `slowest` turns this rank's seconds into the
    maximum over ranks (called once, at the end).  On CUDA the device is drained before the clock is
    read.
    """

    def drain() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for method in methods.values():
        for _ in range(warmup):
            method()
    mine: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            drain()
            barrier()
            begin = clock()
            method()
            drain()
            mine[name].append(clock() - begin)
    everyone = slowest([seconds for name in methods for seconds in mine[name]])
    return {
        name: Timing(tuple(everyone[i * rounds : (i + 1) * rounds]))
        for i, name in enumerate(methods)
    }
