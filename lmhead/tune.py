"""The tuner: which configs there are for a problem, and the best of them by the model, without a
GPU.  (`lmhead.measure` finds the best by timing, where there is one.)

`offline` takes candidates in the order of what the model promises them before they are compiled,
which is never more than it gives them afterwards, and stops when no candidate left can beat the
best one that compiles as it should.  So the result is that of compiling the whole space, at the
price of a few.  What a compilation gave is kept in a file: an interrupted run goes on where it
stopped, and a config added to the space is the only one compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import triton
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from lmhead import codegen, estimate, tables
from lmhead.devices import Device
from lmhead.estimate import Estimate, Usage
from lmhead.kernels.config import (
    BARRIER_BYTES,
    MAX_WARPS,
    VECTOR_BYTES,
    Arch,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    bulk_loadable,
    default_pointer_gemm,
    default_reassemble,
    fits,
    next_power_of_2,
)
from lmhead.shapes import shard_rows
from lmhead.tables import Config, Entry, Key, Table

# Up to here a program holds all token rows, so that every weight byte is asked for once.
ONE_PROGRAM_ROWS = 512
# By how much the whole tiles of a chosen GEMM may exceed the shard, up to ONE_PROGRAM_ROWS.
WEIGHT_SLACK = 0.03

# T for which tables are made: one for each bucket of either kind of kernel.
ROWS = (2, 4, 8, *tables.GEMM_BUCKETS)

# How much faster than a config of one launch the model must call one that adds up splits.
SPLIT_MARGIN = 1.1


@dataclass(frozen=True)
class Problem:
    """What a config is wanted for: the key that it is kept under, and the bucket's largest shape
    (of the copying kernels: the itemsize of the wider side).
    """

    key: Key
    shape: GemmShape | ReassembleShape


def gemm_problem(shape: GemmShape, mode: str = "graph") -> Problem:
    key = tables.gemm_key(shape, mode)
    return Problem(key, replace(shape, rows=key.rows))


def reassemble_problem(
    ranks: int, rows: int, shard: int, itemsize: int, *, out_itemsize: int | None = None
) -> Problem:
    """In place where `out_itemsize` is None, else the out-of-place form."""
    shape = ReassembleShape(ranks, rows, shard, itemsize)
    key = tables.reassemble_key(shape, out_itemsize is None, out_itemsize=out_itemsize)
    largest = max(rows, key.rows // ranks)
    return Problem(
        key, ReassembleShape(ranks, largest, shard, max(itemsize, out_itemsize or itemsize))
    )


def problems_of(hidden: int, vocab: int, ranks: int, rows: Iterable[int] = ROWS) -> list[Problem]:
    """All that a 16-bit head of this size asks for, for T in `rows`: logits of 16 and of 32 bits,
    in place and not.
    """
    shard = shard_rows(vocab, ranks)
    found = [
        gemm_problem(GemmShape(total, shard, hidden, 2, out_itemsize))
        for out_itemsize in (2, 4)
        for total in rows
    ]
    if ranks > 1:
        buckets = {min(4096, next_power_of_2(max(total, 2 * ranks))) for total in rows}
        for total, sizes in itertools.product(
            sorted(buckets), ((2, None), (4, None), (2, 2), (2, 4), (4, 4))
        ):
            found.append(
                reassemble_problem(
                    ranks, max(2, total // ranks), shard, sizes[0], out_itemsize=sizes[1]
                )
            )
    return list(dict.fromkeys(found))


# The space.


def space(problem: Problem, arch: Arch, sms: int) -> list[Config]:
    """Every config worth compiling for a problem on `arch` with `sms` multiprocessors; all fit."""
    shape = problem.shape
    found: list[Config] = []
    if isinstance(shape, GemmShape):
        found += _gemm_space(shape, arch, sms)
    else:
        found += _reassemble_space(shape, problem.key.kernel)
    return [config for config in dict.fromkeys(found) if fits(config, arch, shape)]


def row_tiles(rows: int) -> list[tuple[int, int]]:
    """(BLOCK_T, TAIL_T) that hold `rows` token rows in one program, or share them evenly between
    few: one power of two, or two that leave little over.
    """
    whole = next_power_of_2(rows)
    tiles = [(max(16, whole), 0)] if whole <= 256 else []
    block = whole // 2
    if 16 <= block <= 256:
        tiles += [(block, max(16, next_power_of_2(rows - block)))]
    if rows > 128:
        tiles += [(128, 0), (128, 128)]
    if rows > 256:
        tiles += [(256, 0), (256, 256)]
    return list(dict.fromkeys(tiles))


def _gemm_space(shape: GemmShape, arch: Arch, sms: int) -> Iterator[GemmConfig]:
    if not bulk_loadable(shape):
        yield default_pointer_gemm(shape)
        return
    for (block_t, tail_t), block_v, block_h in itertools.product(
        row_tiles(shape.rows), (64, 128, 256), (64, 128)
    ):
        stage = (block_t + tail_t + block_v) * block_h * shape.itemsize
        tiles = -(-shape.shard // block_v) * -(-shape.rows // (block_t + tail_t))
        splits = [1]
        while tiles * splits[-1] < sms:  # what is there leaves multiprocessors idle
            splits.append(splits[-1] * 2)
        # As deep as one program's, two programs' and four programs' share of shared memory.
        depths = {min(12, (arch.shared_bytes // n - BARRIER_BYTES) // stage) for n in (1, 2, 4)}
        for depth, warps, roles, split in itertools.product(
            sorted(d for d in depths if d >= 2), (4, 8), (False, True), splits
        ):
            yield GemmConfig(block_t, block_v, block_h, warps, depth, "bulk", tail_t, split, roles)


def _reassemble_space(shape: ReassembleShape, kernel: str) -> Iterator[ReassembleConfig]:
    vector = max(1, VECTOR_BYTES // shape.itemsize)
    pieces = next_power_of_2(shape.ranks * shape.rows)
    warps = [1 << i for i in range(MAX_WARPS.bit_length())]
    widths = [vector << i for i in range(9)]
    if kernel == "copy":
        heights = [h for h in (1, 2, 4, 8, 16, 32) if h < 2 * shape.rows]
        kinds = [("copy", height) for height in heights]
    else:
        kinds = [("band", pieces)] + [("cycle", height) for height in (4, 8, 16, 32)]
    for (kind, height), width, number in itertools.product(kinds, widths, warps):
        # A full access for every thread; and no wider than the shard needs.
        full = height * width >= 32 * number * vector
        if full and width < 2 * max(shape.shard, vector):
            yield ReassembleConfig(kind, height, width, number)  # type: ignore[arg-type]
    yield default_reassemble(shape, in_place=kernel != "copy")


# Compiling.


@dataclass(frozen=True)
class Compiled:
    """What is kept of a compilation: why the kernel must not be used, and what it takes."""

    problems: tuple[str, ...]
    registers: int = 0
    shared_bytes: int = 0
    tensor_memory_columns: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(self.registers, self.shared_bytes, self.tensor_memory_columns)


@dataclass(frozen=True)
class Build:
    """All that a compilation depends on: shapes only by what they divide by."""

    arch: str
    config: Config
    operand_bits: int
    out_bits: int
    unit: int

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def build_of(problem: Problem, config: Config, arch: str) -> Build:
    key = problem.key
    unit = math.gcd(16, key.shard)
    if key.kernel == "reassemble":  # moved as it is
        return Build(arch, config, key.operand_bits, key.operand_bits, unit)
    return Build(arch, config, key.operand_bits, key.out_bits, unit)


def report_of(build: Build, *, epilogue: bool = False) -> codegen.Report:
    """Compile, in this process; a GEMM plain, or with bias, scale and softcap."""
    operands, out = _FLOAT[build.operand_bits], _FLOAT[build.out_bits]
    if isinstance(build.config, GemmConfig):
        return codegen.compile_gemm(
            build.arch,
            build.config,
            operands=operands,
            out=out,
            bias=operands if epilogue else None,
            scaled=epilogue,
            softcapped=epilogue,
            store_unit=build.unit,
        )
    moved = build.operand_bits == build.out_bits
    return codegen.compile_reassemble(
        build.arch,
        build.config,
        source=f"int{build.operand_bits}" if moved else operands,
        out=f"int{build.out_bits}" if moved else out,
        unit=build.unit,
    )


_FLOAT = {16: "bfloat16", 32: "float32"}


def compile_build(build: Build) -> Compiled:
    """Compile, a GEMM with and without an epilogue, and say what is wrong with the result; a kernel
    that does not compile is one more that must not be used.  The compiler's own complaints are not
    shown.
    """
    found = Compiled(())
    # Sums over splits have their epilogue in another kernel.
    single = isinstance(build.config, GemmConfig) and build.config.splits == 1
    for epilogue in (False, True) if single else (False,):
        try:
            with _quiet():
                report = report_of(build, epilogue=epilogue)
        except Exception as error:  # the compiler raises what it likes
            first = (str(error).strip().splitlines() or [""])[0]
            return Compiled((f"does not compile: {type(error).__name__} {first}"[:300],))
        found = Compiled(
            tuple(codegen.shortcomings(report, build.config, build.out_bits // 8, build.unit)),
            max(found.registers, report.registers),
            max(found.shared_bytes, report.shared_bytes),
            max(found.tensor_memory_columns, report.tensor_memory_columns),
        )
        if found.problems:
            break
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send file descriptor 2, to which the compiler writes, nowhere."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class Builds:
    """What compilations gave, kept in a file of one line each where a folder is given.  It holds
    only lines of this Triton and these kernels.  A file that cannot be used is one warning; the
    builds are then kept in memory alone.
    """

    def __init__(self, folder: Path | None) -> None:
        self._known: dict[str, Compiled] = {}
        self._path: Path | None = None
        self._cut_short = False  # the file ends in the middle of a line
        if folder is None:
            return
        self._path = folder / f"builds-{_fingerprint()}.jsonl"
        try:
            text = self._path.read_text(errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            self._give_up(error)
            return
        self._cut_short = not text.endswith("\n")
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line cut short
                found = json.loads(line)
                compiled = Compiled(**found["compiled"])
                self._known[found["build"]] = replace(compiled, problems=tuple(compiled.problems))

    def get(self, build: Build) -> Compiled | None:
        return self._known.get(build.text())

    def put(self, build: Build, compiled: Compiled) -> None:
        self._known[build.text()] = compiled
        if self._path is None:
            return
        line = json.dumps({"build": build.text(), "compiled": asdict(compiled)}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write("\n" + line if self._cut_short else line)
            self._cut_short = False
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._path = None
        warnings.warn(f"lmhead: compilations are not kept ({error})", RuntimeWarning, stacklevel=3)


def _fingerprint() -> str:
    """Of all that a compilation's result depends on beside its `Build`."""
    digest = hashlib.sha256(triton.__version__.encode())
    rooms = (Path(codegen.__file__), *sorted(Path(__file__).with_name("kernels").glob("*.py")))
    for path in rooms:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# The search.


@dataclass(frozen=True)
class Ranked:
    """A candidate with its modelled time; `compiled` is None before it has been compiled."""

    config: Config
    estimate: Estimate
    compiled: Compiled | None = None

    @property
    def order(self) -> tuple[Any, ...]:
        """By time, and among equals the simplest: no roles for warps, one accumulator, the most
        bytes in flight, then the most warps to empty it.  What adds a launch must promise more
        than the model can be trusted with.
        """
        config, us = self.config, self.estimate.us
        if isinstance(config, GemmConfig):
            us *= SPLIT_MARGIN if config.splits > 1 else 1.0
            flight = config.num_stages * config.block_h
            tie = (config.warp_specialize, config.tail_t > 0, -flight, config.block_h)
            return (us, *tie, -config.num_warps, str(config))
        # Of copies: four warps, one for each scheduler of an SM, and wide rows.
        return (us, abs(config.num_warps - 4), -config.block_s, str(config))


def modelled(problem: Problem, config: Config, device: Device, usage: Usage | None) -> Estimate:
    """The model's word on a config; a lower bound where `usage` is None."""
    if isinstance(problem.shape, GemmShape):
        assert isinstance(config, GemmConfig)
        return estimate.gemm(device, config, problem.shape, usage)
    assert isinstance(config, ReassembleConfig)
    return estimate.reassemble(device, config, problem.shape, usage)


def usage_of(report: codegen.Report) -> Usage:
    """What the model wants to know of a compiled kernel."""
    return Usage(report.registers, report.shared_bytes, report.tensor_memory_columns)


def asks_once(config: Config, shape: GemmShape | ReassembleShape) -> bool:
    """Whether the tiles of a GEMM ask for each weight byte once, but for the slack of whole tiles.
    Re-reads that are meant to hit L2 are for a measurement to justify, not for the model.
    """
    if not isinstance(shape, GemmShape) or not isinstance(config, GemmConfig):
        return True
    own = shape.shard * shape.hidden * shape.itemsize
    if shape.rows > ONE_PROGRAM_ROWS or estimate.weight_bytes(config, shape) <= own * (
        1 + WEIGHT_SLACK
    ):
        return True
    # A shard smaller than a few tiles cannot meet it: then one tile over all rows is the best.
    return own < 1 / WEIGHT_SLACK * 64 * shape.hidden * shape.itemsize and config.rows >= shape.rows


class _Search:
    """One problem's candidates, best promise first."""

    def __init__(self, problem: Problem, device: Device) -> None:
        self.problem, self.device = problem, device
        self.best: Ranked | None = None
        self.rejected = 0
        candidates = (
            Ranked(config, modelled(problem, config, device, None))
            for config in space(problem, device.arch, device.sms)
            if asks_once(config, problem.shape)
        )
        self._left = sorted(candidates, key=lambda ranked: ranked.order, reverse=True)

    def next(self) -> Config | None:
        """What to compile next; None once nothing left can be better."""
        if not self._left or (self.best and self.best.order <= self._left[-1].order):
            return None
        return self._left[-1].config

    def tell(self, compiled: Compiled) -> None:
        """What compiling `next()` gave."""
        config = self._left.pop().config
        if compiled.problems:
            self.rejected += 1
            return
        found = Ranked(
            config, modelled(self.problem, config, self.device, compiled.usage), compiled
        )
        if self.best is None or found.order < self.best.order:
            self.best = found

    def entry(self) -> Entry | None:
        if self.best is None:
            return None
        compiled = self.best.compiled
        assert compiled is not None
        details = {
            "terms": self.best.estimate.terms,
            "registers": compiled.registers,
            "rejected": self.rejected,
            **tables.versions(),
        }
        return Entry(self.best.config, "modelled", self.best.estimate.us, details)


def offline(
    device: Device,
    problems: Sequence[Problem],
    *,
    builds: Builds,
    workers: int | None = None,
    progress: Callable[[int, int, int], None] = lambda solved, total, compiled: None,
    compile_one: Callable[[Build], Compiled] = compile_build,
) -> Table:
    """The modelled table of a device for some problems, in parallel on `workers` processes (all
    cores by default; 0 compiles here).  A problem for which nothing compiles gets no entry.

    `progress` is told how many problems are solved, of how many, after how many compilations.
    """
    searches = [_Search(problem, device) for problem in dict.fromkeys(problems)]
    if workers is None:
        workers = os.cpu_count() or 1
    table, compiled = Table(device.name.lower()), 0
    open_searches, running = list(searches), dict[Future[Compiled], Build]()
    with _Workers(workers) as pool:
        while open_searches:
            waiting: dict[str, Build] = {}
            for search in list(open_searches):
                while (config := search.next()) is not None:
                    build = build_of(search.problem, config, device.arch_name)
                    known = builds.get(build)
                    if known is None:
                        waiting.setdefault(build.text(), build)
                        break
                    search.tell(known)
                else:
                    open_searches.remove(search)
            progress(len(searches) - len(open_searches), len(searches), compiled)
            busy = {build.text() for build in running.values()}
            # Few at a time: what one search learns spares others their next compilation.
            for text, build in waiting.items():
                if text not in busy and len(running) < max(1, workers) * 2:
                    running[pool.submit(compile_one, build)] = build
            if not running:
                continue
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                build = running.pop(future)
                builds.put(build, pool.result(future, compile_one, build))
                compiled += 1
    for search in searches:
        entry = search.entry()
        if entry is not None:
            table.add(search.problem.key, entry)
    return table


def rank_all(
    problem: Problem,
    device: Device,
    *,
    builds: Builds,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Ranked]:
    """The whole space of one problem, compiled: usable candidates first, each part by time."""
    configs = space(problem, device.arch, device.sms)
    wanted = {config: build_of(problem, config, device.arch_name) for config in configs}
    new = [build for build in wanted.values() if builds.get(build) is None]
    with _Workers(os.cpu_count() or 1 if workers is None else workers) as pool:
        futures = {pool.submit(compile_build, build): build for build in dict.fromkeys(new)}
        for done, (future, build) in enumerate(futures.items()):
            builds.put(build, pool.result(future, compile_build, build))
            progress(done + 1, len(futures))
    ranked = []
    for config, build in wanted.items():
        compiled = builds.get(build)
        assert compiled is not None
        usage = None if compiled.problems else compiled.usage
        ranked.append(Ranked(config, modelled(problem, config, device, usage), compiled))
    return sorted(ranked, key=lambda r: (bool(r.compiled and r.compiled.problems), *r.order))


class _Workers:
    """Processes of their own that compile, and die with what they were doing when the caller is
    interrupted; 0 of them compile here.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def submit(self, function: Callable[[Build], Compiled], build: Build) -> Future[Compiled]:
        if self._workers == 0:
            future: Future[Compiled] = Future()
            future.set_result(function(build))
            return future
        if self._executor is not None:
            with contextlib.suppress(BrokenProcessPool):
                return self._executor.submit(function, build)
        self._executor = _processes(self._workers)
        return self._executor.submit(function, build)

    def result(
        self, future: Future[Compiled], function: Callable[[Build], Compiled], build: Build
    ) -> Compiled:
        """What a submitted build gave.  A compiler that dies takes all processes with it: each
        build that was lost is compiled once more, alone, so that the one to blame is known.
        """
        try:
            return future.result()
        except BrokenProcessPool:
            self._executor = None
        with _processes(1) as alone:
            try:
                return alone.submit(function, build).result()
            except BrokenProcessPool:
                return Compiled(("does not compile: the compiler died",))


def _processes(number: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(number, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Have the kernel end this process with the one that started it, even if that is killed."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
