"""Figures of several ranks under pytest-benchmark.

pytest-benchmark times a call in one process; a collective's time is that of the slowest rank, in
windows that a barrier opens.  So the ranks measure themselves, by `lmhead.bench.protocol`, and
pytest-benchmark, which keeps, compares and prints what it is told, reads their rounds off a timer
that gives them back one by one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lmhead import launch
from lmhead.bench import protocol
from lmhead.bench.cases import Case
from lmhead.bench.protocol import Settings
from lmhead.bench.results import Row
from lmhead.bench.roofline import Limits

ROUNDS = 20
# No floor is drawn and nothing is flagged here.
UNLIMITED = Limits("none", float("inf"), float("inf"), float("inf"), "none")


class Timer:
    """A clock whose every second reading comes `rounds[i]` after the one before."""

    def __init__(self) -> None:
        self.now, self.readings = 0.0, 0
        self.rounds: list[float] = []

    def __call__(self) -> float:
        self.readings += 1
        if self.readings % 2 == 0:
            self.now += self.rounds[(self.readings // 2 - 1) % len(self.rounds)]
        return self.now

    def give(self, benchmark: Any, rounds: list[float]) -> None:
        """Have `benchmark`, made with this timer, record these seconds."""
        self.rounds, self.readings = rounds, 0
        benchmark.pedantic(lambda: None, rounds=len(rounds), iterations=1, warmup_rounds=0)


timer = Timer()


def job(rank: int, ranks: int, device: torch.device, case: Case, settings: Settings) -> list[Row]:
    """One rank's part."""
    group = dist.group.WORLD
    assert group is not None
    with torch.inference_mode():
        return protocol.measure_case(case, group, device, settings, UNLIMITED)


def measured(case: Case, settings: Settings) -> dict[str, list[float]]:
    """Seconds of every round by method, all of them right; on ranks that this starts."""
    rows: list[Row] = launch.run(job, case.ranks, case, settings)
    wrong = [f"{row.name}: {row.checked}" for row in rows if row.ms is None]
    assert not wrong, wrong
    return {row.name: [ms * 1e-3 for ms in row.each_ms] for row in rows}
