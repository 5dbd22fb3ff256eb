"""A fair clock for comparing ways of doing the same thing on every rank of a group.

Methods are interleaved round by round, a barrier stands before every timed window, a round's time
is the slowest rank's, and the figure is the median over rounds.  The number of rounds is fixed, so
that no rank runs a collective more than another.

Cadence: a window holds one call (`isolated`) or several back to back (`streaming`), whose mean it
then gives; the two are different questions, and their figures are never compared.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

# Says that a stage has just ended.
Mark = Callable[[str], None]


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
    calls: int = 1,
    shuffled: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Timing]:
    """Time every method `rounds` times, one after the other in each round.

    Or, `shuffled`, in an order that is drawn anew for every round, the same on every rank: what a
    method leaves behind (caches, freed pages) then meets each of the others in turn.  `barrier`
    lines the ranks up before each window, and so after the warm-up; `slowest` turns this rank's
    seconds into the maximum over ranks (called once, at the end).  A window holds `calls` calls and
    counts for their mean.  On CUDA the device is drained before a window, and events time it.
    """
    watch = _Watch(device, clock)
    for method in methods.values():
        for _ in range(warmup):
            method()
    mine: dict[str, list[float]] = {name: [] for name in methods}
    for done in range(rounds):
        for name in _order(methods, done, shuffled):
            method = methods[name]
            drain(device)
            barrier()
            watch.start()
            for _ in range(calls):
                method()
            mine[name].append(watch.stop() / calls)
        progress(done + 1, rounds)
    everyone = slowest([seconds for name in methods for seconds in mine[name]])
    return {
        name: Timing(tuple(everyone[i * rounds : (i + 1) * rounds]))
        for i, name in enumerate(methods)
    }


def staged(
    methods: Mapping[str, Callable[[Mark], object]],
    rounds: int,
    *,
    device: torch.device,
    barrier: Callable[[], None] = lambda: None,
    slowest: Callable[[list[float]], list[float]] = lambda seconds: seconds,
    warmup: int = 1,
    shuffled: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, Timing]]:
    """Time the stages of every method, each alone: a barrier stands before every stage, so that no
    stage pays for a rank that was late in the one before.  Their sum is more than the whole takes.

    A method calls its argument with a stage's name when that stage has ended, the same stages in
    every call and on every rank; a name that comes twice in a call adds up.
    """
    for method in methods.values():
        for _ in range(warmup):
            method(lambda stage: None)
    mine: dict[str, list[dict[str, float]]] = {name: [] for name in methods}
    for done in range(rounds):
        for name in _order(methods, done, shuffled):
            mine[name].append(_stages_of(methods[name], device, barrier, clock))
        progress(done + 1, rounds)
    stages = {name: list(found[0]) if found else [] for name, found in mine.items()}
    for name, found in mine.items():
        assert all(list(took) == stages[name] for took in found), "stages differ between calls"
    everyone = iter(
        slowest([took[stage] for name in methods for stage in stages[name] for took in mine[name]])
    )
    return {
        name: {
            stage: Timing(tuple(next(everyone) for _ in range(rounds))) for stage in stages[name]
        }
        for name in methods
    }


def _order(names: Iterable[str], turn: int, shuffled: bool) -> list[str]:
    found = list(names)
    if shuffled:
        random.Random(turn).shuffle(found)
    return found


def _stages_of(
    method: Callable[[Mark], object],
    device: torch.device,
    barrier: Callable[[], None],
    clock: Callable[[], float],
) -> dict[str, float]:
    took: dict[str, float] = {}
    watch = _Watch(device, clock)
    drain(device)
    barrier()
    watch.start()

    def mark(stage: str) -> None:
        took[stage] = took.get(stage, 0.0) + watch.stop()
        barrier()
        watch.start()

    method(mark)
    return took


class _Watch:
    """Seconds from `start` to `stop`: by events on a CUDA device's stream, which tell what the
    device did and not when the host noticed; by `clock` elsewhere.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device, self._clock, self._begin = device, clock, 0.0
        self._events: tuple[torch.cuda.Event, ...] = ()
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        if self._events:
            self._events[0].record(torch.cuda.current_stream(self._device))
        self._begin = self._clock()

    def stop(self) -> float:
        if not self._events:
            return self._clock() - self._begin
        begin, end = self._events
        end.record(torch.cuda.current_stream(self._device))
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def drain(device: torch.device) -> None:
    """Wait for what a CUDA device still has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def implausible(moved: int, seconds: float, limit: float, margin: float) -> str | None:
    """Why a bandwidth cannot be believed: `moved` bytes in `seconds` are more than `margin` times
    `limit` bytes per second; None where they are not.  Such a figure says that the clock was
    started late or stopped early, or that what was moved lay in a cache.
    """
    if moved <= limit * margin * seconds:
        return None
    rate = moved / seconds / 1e9 if seconds > 0 else float("inf")
    return f"{rate:.1f} GB/s is more than the {limit / 1e9:.1f} GB/s that the machine can do"
