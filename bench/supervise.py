"""Jobs in processes of their own, against a deadline: none can spoil, or lose, what another found.

A job works through items and writes what became of each into its journal as it goes.  One that dies
(a CUDA error that sticks to its process, a crash of the compiler, a hang) loses the item it was at:
that one is blamed, and the job is started again for the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Clock = Callable[[], float]

# What an item can come to.  `left`: not tried, or not finished, for want of time.
STARTED, FOUND, FAILED, LEFT = "started", "found", "failed", "left"
# The exit status of a job whose device is lost to it.
LOST = 75
# A job is not started again for less than this: importing torch takes seconds.
RESTART_S = 10.0
POLL_S = 0.2  # how soon an interrupt is noticed
NO_TIME = "no time left"
STOPPED = "stopped when its time was over"


@dataclass(frozen=True)
class Record:
    """The last that is known of an item; `value` is its result, or the reason where it has none."""

    state: str
    value: Any = None


class Journal:
    """Items and what became of them: a file of one JSON line for each change."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, item: str, state: str, value: Any = None) -> None:
        line = json.dumps({"item": item, "state": state, "value": value})
        with self.path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> dict[str, Record]:
        found: dict[str, Record] = {}
        with contextlib.suppress(FileNotFoundError), self.path.open() as file:
            for line in file:
                with contextlib.suppress(ValueError):  # a line cut short by a kill
                    told = json.loads(line)
                    found[told["item"]] = Record(told["state"], told["value"])
        return found

    def ended(self) -> dict[str, Record]:
        """The items that need no further try."""
        return {item: told for item, told in self.read().items() if told.state in (FOUND, FAILED)}


class Budget:
    """Seconds that are spent by whoever comes first."""

    def __init__(self, total: float, clock: Clock = time.monotonic) -> None:
        self.total, self._clock, self._begin = total, clock, clock()

    @property
    def spent(self) -> float:
        return self._clock() - self._begin

    def grant(self, most: float, *, keep: float = 0.0, least: float = 0.0) -> float:
        """Up to `most` seconds, `keep` being kept back for what comes later; 0 where that is less
        than `least`, too little to be of use.
        """
        granted = min(most, self.total - self.spent - keep)
        return granted if granted >= max(least, 0.0) else 0.0


def first_line(error: BaseException | str) -> str:
    """The first line of a message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return (text if isinstance(error, str) else f"{type(error).__name__}: {text}")[:300]


def work_through(
    items: Mapping[str, Callable[[], Any]],
    journal: Journal,
    deadline: float,
    *,
    clock: Clock = time.monotonic,
    usable: Callable[[], bool] = lambda: True,
) -> None:
    """A job's loop: do what has not ended before, each item by itself.  After a failure that leaves
    the device unusable the process exits with `LOST`.
    """
    ended = journal.ended()
    left = {item: action for item, action in items.items() if item not in ended}
    for item in left:  # so that what a kill leaves out is known
        journal.write(item, LEFT, NO_TIME)
    for item, action in left.items():
        if clock() >= deadline:
            return
        journal.write(item, STARTED)
        try:
            value = action()
        except Exception as error:  # whatever it is, the next item must not miss its turn
            journal.write(item, FAILED, first_line(error))
            if not usable():
                raise SystemExit(LOST) from error
        else:
            journal.write(item, FOUND, value)


@dataclass(frozen=True)
class Job:
    """A command, which is told `--seconds` that it has, and its journal."""

    name: str
    command: Sequence[str]
    journal: Journal


def supervise(
    jobs: Iterable[Job],
    seconds: float,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    clock: Clock = time.monotonic,
) -> dict[str, str]:
    """Run jobs side by side for up to `seconds`; by name, why one ended badly, or "".

    Where it is 0 nothing runs.  Process groups are killed when a job ends, so nothing stays behind.
    """
    jobs = list(jobs)
    if seconds <= 0:
        return {job.name: NO_TIME for job in jobs}
    deadline, interrupted = clock() + seconds, threading.Event()

    def left() -> float:
        return 0.0 if interrupted.is_set() else deadline - clock()

    with ThreadPoolExecutor(len(jobs)) as threads:
        try:
            futures = {
                job.name: threads.submit(_to_its_end, job, left, environment, folder)
                for job in jobs
            }
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            interrupted.set()
            raise


def _to_its_end(
    job: Job,
    left: Callable[[], float],
    environment: Mapping[str, str] | None,
    folder: Path | None,
) -> str:
    while True:
        before = len(job.journal.ended())
        status, said = _once(job, left, environment, folder)
        if status == 0:
            return ""
        why = f"exit status {status}: {said}" if status is not None else NO_TIME
        for item, told in job.journal.read().items():
            if told.state == STARTED:
                if status is None:
                    job.journal.write(item, LEFT, STOPPED)
                else:
                    job.journal.write(item, FAILED, why)
        progress = len(job.journal.ended()) > before
        if status is None or not progress or left() < RESTART_S:
            return why


def _once(
    job: Job,
    left: Callable[[], float],
    environment: Mapping[str, str] | None,
    folder: Path | None,
) -> tuple[int | None, str]:
    """Start the job and wait: its exit status (None where it had to be killed), and the last line
    that it said.
    """
    log = job.journal.path.with_suffix(".log")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*job.command, "--seconds", f"{left():.1f}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            cwd=folder,
            start_new_session=True,
        )
        status: int | None = None
        try:
            while status is None and left() > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(min(POLL_S, max(0.01, left())))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return status, lines[-1].strip()[:300] if lines else "it said nothing"
