"""The one multi-process harness: rank processes over gloo, kept alive between tests.

A process start costs seconds on two cores, so there is one pool per number of ranks, made when
first asked for and kept for the whole run.  `pool(n).run(job, ...)` runs `job(rank, ranks, ...)` on
every rank and returns the results in rank order; `outcomes` returns errors as well, for tests that
expect them.  Jobs are module-level functions.

A job that leaves collectives half done must use a group of its own (`own_group`), or a pool of its
own (`fresh`). In every rank fresh memory is poisoned: torch.empty gives NaN, so that an unwritten
element cannot pass by luck.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import library
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# The default group's timeout: far over what a job takes on two busy cores, so that only a hang
# meets it.
GROUP_TIMEOUT_S = 120


@dataclass(frozen=True)
class Outcome:
    """What a job did on one rank: its value, or the error that it raised."""

    value: Any = None
    error: str = ""  # the exception's class name; "Died" where the process did not survive
    text: str = ""
    trace: str = ""
    seconds: float = 0.0


class JobFailed(AssertionError):
    """A job raised on at least one rank."""


class Pool:
    """N rank processes with an initialised default group over gloo."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._closed = False
        self._folder = tempfile.TemporaryDirectory(prefix="lmhead-ranks-")
        context = _context()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, ranks, str(Path(self._folder.name) / "store"), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, job: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Outcome]:
        """Run `job(rank, ranks, *args)` on every rank; what each returned or raised, in order."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # found dead below
                pipe.send_bytes(pickle.dumps((job, args)))
        found: dict[int, Outcome] = {}
        end = time.monotonic() + timeout
        while len(found) < self.ranks:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                missing = sorted(set(range(self.ranks)) - set(found))
                raise JobFailed(f"ranks {missing} hung for {timeout} s in {job}")
            for pipe in ready:
                try:
                    found[waiting[pipe]] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    found[waiting[pipe]] = Outcome(error="Died", text="the rank's process ended")
        return [found[rank] for rank in range(self.ranks)]

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        """The results of `job(rank, ranks, *args)` in rank order; JobFailed with every rank's trace
        if one raised.
        """
        outcomes = self.outcomes(job, *args, timeout=timeout)
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error]
        if failed:
            self.close()  # the others may be left in the middle of a collective
            raise JobFailed("\n".join(f"rank {rank}: {o.trace or o.text}" for rank, o in failed))
        return [outcome.value for outcome in outcomes]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _context() -> Any:
    """Rank processes are forked from one process that has imported what takes seconds, and has
    neither threads nor a group.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "triton.language", "hypothesis"])
    return context


_pools: dict[int, Pool] = {}


def pool(ranks: int) -> Pool:
    """The pool of `ranks` processes, made anew if a job has broken it."""
    if ranks in _pools and not _pools[ranks].alive:
        _pools.pop(ranks).close()
    if ranks not in _pools:
        _pools[ranks] = Pool(ranks)
    return _pools[ranks]


@contextlib.contextmanager
def fresh(ranks: int) -> Iterator[Pool]:
    """A pool for one test that kills processes or breaks the default group."""
    own = Pool(ranks)
    try:
        yield own
    finally:
        own.close()


def close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()


def own_group(members: list[int] | None = None, timeout_s: float = 6) -> dist.ProcessGroup:
    """Inside a job: a new gloo group with a short timeout; every rank of the pool calls it."""
    return dist.new_group(members, timeout=datetime.timedelta(seconds=timeout_s), backend="gloo")


def _serve(rank: int, ranks: int, store: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # which fills torch.empty with NaN
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    environment = dict(os.environ)
    with contextlib.suppress(EOFError):  # the parent is gone: so are we
        while True:
            job, args = pickle.loads(pipe.recv_bytes())
            begin = time.monotonic()
            try:
                with library.asked():
                    value = job(rank, ranks, *args)
                outcome = Outcome(value=value, seconds=time.monotonic() - begin)
                data = pickle.dumps(outcome)
            except BaseException as error:
                outcome = Outcome(
                    error=type(error).__name__,
                    text=str(error),
                    trace=traceback.format_exc(),
                    seconds=time.monotonic() - begin,
                )
                data = pickle.dumps(outcome)
            os.environ.clear()
            os.environ.update(environment)
            pipe.send_bytes(data)
