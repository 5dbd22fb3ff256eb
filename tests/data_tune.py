"""What the tests of tables, tuner and chooser share: configs that run on tiny shapes in the
interpreter, a clock that is told the times, and a record of what kernels are launched with.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from lmhead import tables
from lmhead.kernels import gemm as gemm_kernels
from lmhead.kernels import reassemble as reassemble_kernels
from lmhead.kernels.config import (
    LIBRARY,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
)
from lmhead.measure import Launch
from lmhead.tables import Config, Entry, Key, Table

CPU = torch.device("cpu")

# Configs for tiny shapes; none of them is a default.
BULK = GemmConfig(16, 16, 16, 4, 2, "bulk")
BULK_WIDE = GemmConfig(16, 32, 16, 4, 2, "bulk")
POINTER = GemmConfig(16, 16, 16, 4, 2)
GEMMS = (BULK, BULK_WIDE, POINTER, LIBRARY)
BAND = ReassembleConfig("band", 16, 4, 2)
CYCLE = ReassembleConfig("cycle", 4, 4, 2)
COPY = ReassembleConfig("copy", 2, 4, 2)

# A head of two ranks that the interpreter multiplies in milliseconds: S, H, V.
SHARD, HIDDEN, VOCAB = 24, 32, 48


def keys(rows: int, ranks: int = 2, mode: str = "eager") -> dict[str, Key]:
    """The keys of that head in bf16, by kernel."""
    moved = ReassembleShape(ranks, rows, SHARD, 2)
    return {
        "gemm": tables.gemm_key(GemmShape(ranks * rows, SHARD, HIDDEN, 2), mode),
        "reassemble": tables.reassemble_key(moved, True, mode),
        "copy": tables.reassemble_key(moved, False, mode),
    }


def table(rows: int = 2, **configs: Config) -> Table:
    """A CPU's table with measured configs by kernel, for calls of `rows` rows per rank."""
    found = Table("cpu")
    for kernel, config in configs.items():
        found.add(keys(rows)[kernel], Entry(config, "measured", 1.0))
    return found


class ToldClock:
    """A clock that is told the microseconds of each config; it runs every launch `runs` times and
    keeps what it was asked to time.
    """

    def __init__(self, us: Mapping[Config, float], runs: int = 1) -> None:
        self._us = {str(config): value for config, value in us.items()}
        self._runs = runs
        self.timed: list[list[str]] = []

    def __call__(self, methods: Mapping[str, Launch], rounds: int) -> Mapping[str, Sequence[float]]:
        self.timed.append(list(methods))
        for launch in methods.values():
            for _ in range(self._runs):
                launch(0)
        return {name: [self._us[name] * 1e-6] * rounds for name in methods}


def said(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """Our own warnings among those that were caught: Triton's interpreter has some as well."""
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


@contextlib.contextmanager
def launches() -> Iterator[list[tuple[str, Config]]]:
    """Record (kernel, config) of every launch inside the block; they run all the same."""
    seen: list[tuple[str, Config]] = []

    def recorder(kernel: str, module: Any, name: str) -> Any:
        real = getattr(module, name)

        def launch(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            seen.extend(
                (kernel, arg) for arg in given if isinstance(arg, GemmConfig | ReassembleConfig)
            )
            return real(*args, **kwargs)

        return mock.patch.object(module, name, launch)

    with contextlib.ExitStack() as stack:
        stack.enter_context(recorder("gemm", gemm_kernels, "launch_gemm"))
        stack.enter_context(recorder("reassemble", reassemble_kernels, "launch_reassemble"))
        stack.enter_context(recorder("copy", reassemble_kernels, "launch_copy"))
        yield seen
