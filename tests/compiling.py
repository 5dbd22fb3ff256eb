"""Processes in which kernels can be compiled: without Triton's interpreter, which the tests' own
process runs.  Imports nothing that decorates a kernel, so that a worker sees the variable unset.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


def without_interpreter() -> None:
    """Set a worker up; it ends with the tests' own process, even if that is killed."""
    os.environ.pop("TRITON_INTERPRET", None)
    from torch.multiprocessing import _prctl_pr_set_pdeathsig

    _prctl_pr_set_pdeathsig(signal.SIGKILL)


def executor(workers: int = 2) -> Executor:
    return concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=without_interpreter,
    )


class Compiling:
    """Results by call, each computed once; ask for many with `start`, then read them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    @functools.cache  # noqa: B019 - lives as long as the session's one instance
    def start(self, function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        return self._executor.submit(function, *args, **options)

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self.start(function, *args, **options).result(timeout=300)
