"""The tuner where there is a device: candidates are verified, then timed, and the fastest is kept.

Protocol.  Every candidate first runs into memory filled with NaN and is compared with fp64: its
error may be twice the library's.  What does not compile, does not fit or is not exact is named in
the entry with its reason, and never timed.  The rest is timed together: rounds interleave the
candidates, inputs rotate through more memory than L2 holds, and a figure is the median over rounds
of replays of a CUDA graph, so that launches cost what they cost in a decode loop.  `Clock` is a
parameter: tests bring one of their own.

The user's tensors are never touched: everything runs on buffers made here.  Nothing here is called
by a head; tuning is asked for.
"""

from __future__ import annotations

import datetime
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from lmhead import compare, reference, tables, tune
from lmhead.devices import DEVICES, Device, arch_of, of_arch, slug
from lmhead.kernels import gemm as gemm_kernels
from lmhead.kernels import reassemble as reassemble_kernels
from lmhead.kernels.config import (
    LIBRARY,
    Arch,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    default_gemm,
    default_reassemble,
    fits,
)
from lmhead.tables import Config, Entry, Key, Table
from lmhead.tune import Problem

# Launches by name, each told which set of inputs to use; rounds -> seconds of each round by name,
# per launch.
Launch = Callable[[int], object]
Clock = Callable[[Mapping[str, Launch], int], Mapping[str, Sequence[float]]]

ROUNDS = 20
# How many candidates the model proposes to the clock.
CANDIDATES = 24
# Inputs rotate through this many times the largest L2 (126 MB).
COLD_BYTES = 3 * (126 << 20)
MAX_SETS = 64
# A result may be this many times as far from the truth as the library's, or as far as sums of H
# fp32 products in an order of their own lie (a random walk): the library may be exact by luck, or
# sum in shorter pieces.
ERROR_FACTOR = 2.0


def graph_clock(device: torch.device, sets: int, *, launches: int = 0) -> Clock:
    """Time by replaying a CUDA graph of at least `launches` launches that rotate through `sets`
    inputs.
    """
    count = -(-max(launches, 10) // sets) * sets

    def clock(methods: Mapping[str, Launch], rounds: int) -> Mapping[str, Sequence[float]]:
        graphs = {}
        for name, launch in methods.items():
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for i in range(count):
                    launch(i % sets)
        found: dict[str, list[float]] = {name: [] for name in methods}
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize(device)
        for _ in range(rounds):
            for name, graph in graphs.items():
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                found[name].append(begin.elapsed_time(end) * 1e-3 / count)
        return found

    return clock


def host_clock(sets: int, *, seconds: Callable[[], float] = time.perf_counter) -> Clock:
    """Time calls by the host's clock, for devices without graphs (a CPU)."""

    def clock(methods: Mapping[str, Launch], rounds: int) -> Mapping[str, Sequence[float]]:
        found: dict[str, list[float]] = {name: [] for name in methods}
        for turn in range(rounds):
            for name, launch in methods.items():
                begin = seconds()
                launch(turn % sets)
                found[name].append(seconds() - begin)
        return found

    return clock


def machine(device: torch.device) -> dict[str, str]:
    """What a measurement was made with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"device": name} | tables.versions()


class _Gemm:
    """A GEMM problem's inputs, and how a config runs on them."""

    def __init__(self, problem: Problem, device: torch.device, sets: int | None) -> None:
        shape = problem.shape
        assert isinstance(shape, GemmShape)
        T, S, H = shape.rows, shape.shard, shape.hidden
        operands = torch.bfloat16 if shape.itemsize == 2 else torch.float32
        out = {16: torch.bfloat16, 32: torch.float32}[problem.key.out_bits]
        per_set = (T * H + S * H) * shape.itemsize + T * S * out.itemsize
        self.sets = sets or max(1, min(MAX_SETS, -(-COLD_BYTES // per_set)))
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.float32)

        self.hidden = [normal(T, H).to(operands) for _ in range(self.sets)]
        self.weight = [(normal(S, H) / H**0.5).to(operands) for _ in range(self.sets)]
        self.out = [torch.empty(T, S, dtype=out, device=device) for _ in range(self.sets)]
        self._kept: dict[str, torch.Tensor] = {}
        self._truth = reference.gemm_exact(self.hidden[0], self.weight[0])
        by_library = self._error(LIBRARY)
        if not math.isfinite(by_library):  # which would allow anything
            by_library = torch.finfo(out).eps
        least = torch.finfo(torch.float32).eps * H**0.5
        self._allowed = max(ERROR_FACTOR * by_library, least)

    def _scratch(self, name: str, numel: int) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numel:
            device = self.out[0].device
            kept = self._kept[name] = torch.empty(numel, dtype=torch.float32, device=device)
        return kept[:numel]

    def launch(self, config: Config) -> Launch:
        assert isinstance(config, GemmConfig)

        def run(i: int) -> object:
            return gemm_kernels.gemm(
                self.hidden[i],
                self.weight[i],
                out=self.out[i],
                config=config,
                scratch=self._scratch,
            )

        return run

    def _error(self, config: Config) -> float:
        self.out[0].fill_(float("nan"))
        self.launch(config)(0)
        return compare.relative_error(self.out[0], self._truth)

    def wrong(self, config: Config) -> str | None:
        """Why the result must not be trusted; None where it may."""
        error = self._error(config)
        if error <= self._allowed:
            return None
        return f"relative error {error:.2e}, allowed {self._allowed:.2e}"


class _Reassemble:
    """The same for a copying problem: scratch memory that is permuted, or copied from."""

    def __init__(self, problem: Problem, device: torch.device, sets: int | None) -> None:
        shape, key = problem.shape, problem.key
        assert not isinstance(shape, GemmShape)
        self._in_place = key.kernel == "reassemble"
        words = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
        floats = {16: torch.bfloat16, 32: torch.float32}
        moved = key.operand_bits == key.out_bits
        source = words[key.operand_bits] if moved else floats[key.operand_bits]
        target = words[key.out_bits] if moved else floats[key.out_bits]
        size = shape.ranks, shape.rows, shape.shard
        numel = shape.ranks * shape.rows * shape.shard
        per_set = numel * (source.itemsize + (0 if self._in_place else target.itemsize))
        self.sets = sets or max(1, min(MAX_SETS, -(-COLD_BYTES // per_set)))
        values = torch.arange(numel, device=device)
        first = (values.remainder(251) if not moved else values).to(source).view(size)
        self._first = first
        self.received = [first.clone() for _ in range(self.sets)]
        vocab = shape.ranks * shape.shard
        self._want = reference.reassemble(first.clone()).to(target)
        self.out = self.received
        if not self._in_place:
            self.out = [
                torch.empty(shape.rows, vocab, dtype=target, device=device)
                for _ in range(self.sets)
            ]

    def launch(self, config: Config) -> Launch:
        assert isinstance(config, ReassembleConfig)

        def run(i: int) -> object:
            if self._in_place:
                return reassemble_kernels.reassemble(self.received[i], config)
            return reassemble_kernels.reassemble_into(self.received[i], self.out[i], config)

        return run

    def wrong(self, config: Config) -> str | None:
        self.received[0].copy_(self._first)
        if not self._in_place:
            poison = float("nan") if self.out[0].is_floating_point() else -1
            self.out[0].fill_(poison)
        self.launch(config)(0)
        return compare.first_difference(self.out[0].view(self._want.shape), self._want)


def known_device(device: torch.device) -> Device:
    """The device's figures, or those of the newest of its architecture; of any other, Hopper's."""
    kin = of_arch(arch_of(device).name) or of_arch("sm_90")
    return DEVICES.get(slug(device)) or kin[0]


def candidates(
    problem: Problem, device: torch.device, arch: Arch, most: int = CANDIDATES
) -> list[Config]:
    """The default, cuBLAS where it is a choice, and the best `most` that the model proposes."""
    shape = problem.shape
    found: list[Config]
    if isinstance(shape, GemmShape):
        found = [default_gemm(shape, arch), LIBRARY]
    else:
        found = [default_reassemble(shape, problem.key.kernel == "reassemble")]
    known = known_device(device)
    proposed = [
        tune.Ranked(config, tune.modelled(problem, config, known, None))
        for config in tune.space(problem, arch, known.sms)
    ]
    proposed.sort(key=lambda ranked: ranked.order)
    return list(dict.fromkeys(found + [ranked.config for ranked in proposed[:most]]))


def measure(
    problem: Problem,
    device: torch.device,
    *,
    clock: Clock | None = None,
    rounds: int = ROUNDS,
    configs: Sequence[Config] | None = None,
    before: Entry | None = None,
    sets: int | None = None,
) -> Entry | None:
    """The measured entry of a problem: the fastest of `configs` (`candidates` by default).

    With `before`, an entry measured on the same machine with the same versions, only configs that
    it has no timing of are timed, and the best of all is kept.  None, after a warning, where not
    one config could be timed: the default then serves.  Raises RuntimeError in a capture.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tuning cannot run inside a capture: run `lmhead tune` before serving")
    arch = arch_of(device)
    if configs is None:
        configs = candidates(problem, device, arch)
    if device.type != "cuda":
        problem = replace(problem, key=replace(problem.key, mode="eager"))
    by_name = {str(config): config for config in configs}
    timings: dict[str, list[float]] = {}
    here = machine(device)
    if before is not None and all(before.details.get(name) == here[name] for name in here):
        timings = {n: us for n, us in _timings(before).items() if n in by_name}
    failed: dict[str, str] = {}
    bench: _Gemm | _Reassemble | None = None
    launches: dict[str, Launch] = {}
    for name, config in by_name.items():
        if name in timings:
            continue
        if bench is None:
            kind = _Gemm if isinstance(problem.shape, GemmShape) else _Reassemble
            bench = kind(problem, device, sets)
        reason = _refused(bench, config, arch, problem)
        if reason is None:
            launches[name] = bench.launch(config)
            continue
        failed[name] = reason
        if not usable(device):
            raise RuntimeError(
                f"{name} has left the device unusable ({reason}): tune again without it, or report "
                f"it with {problem.key}"
            )
    if launches:
        assert bench is not None
        if clock is None:
            clock = graph_clock(device, bench.sets) if device.type == "cuda" else host_clock(1)
        for name, seconds in clock(launches, rounds).items():
            timings[name] = [round(s * 1e6, 2) for s in seconds]
    elif before is not None and str(before.config) in timings:
        return before  # nothing is new
    if not timings:
        warnings.warn(
            f"lmhead: none of {len(by_name)} configs could be used for {problem.key}: {failed}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    best = min(timings, key=lambda name: statistics.median(timings[name]))
    details = here | {
        "date": datetime.date.today().isoformat(),
        "timings": timings,
        "failed": failed,
    }
    return Entry(by_name[best], "measured", statistics.median(timings[best]), details)


def usable(device: torch.device) -> bool:
    """Whether this process can still use the device: some CUDA errors stick to it."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _timings(entry: Entry) -> dict[str, list[float]]:
    """The timings by config's name that an entry holds; it comes from a file."""
    found = entry.details.get("timings")
    if not isinstance(found, dict):
        return {}
    return {
        name: [float(us) for us in rounds]
        for name, rounds in found.items()
        if isinstance(rounds, list) and rounds and all(type(us) in (int, float) for us in rounds)
    }


def _refused(
    bench: _Gemm | _Reassemble, config: Config, arch: Arch, problem: Problem
) -> str | None:
    """Why a config is out; None where it may be timed."""
    if not fits(config, arch, problem.shape):
        return "does not fit"
    try:
        return bench.wrong(config)
    except Exception as error:  # compilers and drivers raise what they like
        first = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first}"[:300]


def tune_device(
    problems: Sequence[Problem],
    device: torch.device,
    *,
    again: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Clock | None = None,
    rounds: int = ROUNDS,
) -> Table:
    """Measure problems one after the other; each result is saved as it comes, so that an
    interrupted run goes on where it stopped.  With `again`, what is known is measured anew.
    """
    name = slug(device)
    known = tables.load_user(name)
    table = Table(name)
    for done, problem in enumerate(problems):
        key = problem.key if device.type == "cuda" else replace(problem.key, mode="eager")
        before = None if known is None or again else known.entries.get(key, {}).get("measured")
        entry = measure(problem, device, before=before, clock=clock, rounds=rounds)
        if entry is not None:
            table.add(key, entry)
            tables.save_user(_one(name, key, entry))
        progress(done + 1, len(problems))
    return table


def _one(device: str, key: Key, entry: Entry) -> Table:
    table = Table(device)
    table.add(key, entry)
    return table
