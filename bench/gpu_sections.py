"""What `bench/gpu_check.py` measures, a section at a time; each is a job of its own process.

Protocol.  Candidates are those of `lmhead.measure.candidates`, the model's best first, with what an
untuned install would choose.  They are compiled and launched once beforehand, by several processes
at a time, into Triton's cache on disk; one that fails there is not measured.  `lmhead.measure` then
verifies each one on data of its own and times them interleaved, by graph replay over inputs that
rotate through eight times the L2.  The best one runs once more beside its peers, twice: what its
two figures differ by is the noise.  A section measures alone on the device.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lmhead import compare, measure, reference, tables, tune
from lmhead.bench.cases import MODELS
from lmhead.bench.gpu_probes import Ceilings
from lmhead.bench.supervise import FAILED, FOUND, LEFT, LOST, NO_TIME, STARTED, Journal, Record
from lmhead.devices import arch_of, slug
from lmhead.kernels import gemm as gemm_kernels
from lmhead.kernels import reassemble as reassemble_kernels
from lmhead.kernels.config import (
    LIBRARY,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    to_dict,
)
from lmhead.tables import Choice, Config, Entry, Table
from lmhead.tune import Problem

# Inputs rotate through this many times the L2: a cache that evicts at random keeps a tenth of what
# comes round after twice its size.
COLD_L2 = 8
MAX_SETS = 512


@dataclass(frozen=True)
class Plan:
    """The sizes of a check.  (T, bits of a logit) of the GEMMs and (B, "in place", "to fp32" or
    "padded") of the reassemblies, most important first.
    """

    vocab: int
    hidden: int
    ranks: int
    gemms: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, str], ...]
    padding: int  # columns that "padded" drops
    gemm_candidates: int
    copy_candidates: int
    rounds: int
    memory_bytes: int  # of each buffer of the ceilings
    matrix: int

    @property
    def shard(self) -> int:
        return -(-self.vocab // self.ranks)


FULL = Plan(
    vocab=MODELS["deepseek-v4-pro"].vocab,
    hidden=MODELS["deepseek-v4-pro"].hidden,
    ranks=8,
    gemms=((288, 16), (8, 16), (64, 16), (128, 16), (512, 16), (288, 32)),
    copies=(
        *((rows, "in place") for rows in (36, 8, 64, 128, 512, 2)),
        *((36, "to fp32"), (36, "padded"), (128, "to fp32")),
    ),
    padding=128,  # a multiple of 16: the kernel that `measure` runs without padding
    # A GEMM compiles in a second or two: nearly all of the space, so that the model that puts them
    # in order is itself put to the test.
    gemm_candidates=64,
    copy_candidates=20,
    rounds=measure.ROUNDS,
    memory_bytes=4 << 30,
    matrix=8192,
)
# Every line of the same in Triton's interpreter, on a CPU, in seconds.
REHEARSAL = Plan(
    vocab=96,
    hidden=32,
    ranks=2,
    gemms=((5, 16), (5, 32)),
    copies=((3, "in place"), (2, "to fp32"), (2, "padded")),
    padding=8,
    gemm_candidates=2,
    copy_candidates=2,
    rounds=2,
    memory_bytes=1 << 17,
    matrix=16,
)


@dataclass(frozen=True)
class Case:
    """One row of the report: a problem at its own number of rows, under its bucket's key."""

    name: str
    problem: Problem
    out: str  # what becomes of the result: "bf16", "fp32", "in place", "to fp32", "padded"


def gemm_cases(plan: Plan) -> list[Case]:
    found = []
    for rows, bits in plan.gemms:
        shape = GemmShape(rows, plan.shard, plan.hidden, 2, bits // 8)
        out = {16: "bf16", 32: "fp32"}[bits]
        found.append(Case(f"gemm T={rows} {out}", Problem(tables.gemm_key(shape), shape), out))
    return found


def copy_cases(plan: Plan) -> list[Case]:
    found = []
    for rows, out in plan.copies:
        size = 4 if out == "to fp32" else 2
        key = tables.reassemble_key(
            ReassembleShape(plan.ranks, rows, plan.shard, 2), out == "in place", out_itemsize=size
        )
        shape = ReassembleShape(plan.ranks, rows, plan.shard, size)
        found.append(Case(f"reassemble B={rows} {out}", Problem(key, shape), out))
    return found


def chosen(case: Case, device: torch.device) -> Choice:
    """What a head uses untuned: by the shipped table, or the default."""
    shipped = tables.load_shipped(slug(device))
    problem = case.problem
    return tables.look_up(None, shipped, problem.key, arch_of(device), problem.shape)


def candidates(case: Case, plan: Plan, device: torch.device) -> list[Config]:
    gemm = case.problem.key.kernel == "gemm"
    most = plan.gemm_candidates if gemm else plan.copy_candidates
    proposed = measure.candidates(case.problem, device, arch_of(device), most)
    return list(dict.fromkeys([chosen(case, device).config, *proposed]))


def _cold_bytes(device: torch.device) -> int:
    """What inputs must come to, all sets together, so that none is found in L2."""
    if device.type != "cuda":
        return 1 << 16
    return COLD_L2 * torch.cuda.get_device_properties(device).L2_cache_size


class Buffers:
    """A case's inputs and outputs, `sets` of each."""

    def __init__(self, case: Case, plan: Plan, device: torch.device, sets: int = 0) -> None:
        shape = case.problem.shape
        self.case = case
        out_bytes = {16: 2, 32: 4}[case.problem.key.out_bits]
        out_dtype = {2: torch.bfloat16, 4: torch.float32}[out_bytes]
        inputs: list[tuple[int, ...]]
        if isinstance(shape, GemmShape):
            result = shape.rows, shape.shard
            inputs = [(shape.rows, shape.hidden), (shape.shard, shape.hidden)]
        else:
            dropped = plan.padding if case.out == "padded" else 0
            result = shape.rows, shape.ranks * shape.shard - dropped
            inputs = [(shape.ranks, shape.rows, shape.shard)]
        # Reassembly reads no padding; in place it has no second buffer.
        read = result[0] * result[1]
        if isinstance(shape, GemmShape):
            read = (shape.rows + shape.shard) * shape.hidden
        self.bytes = 2 * read + out_bytes * result[0] * result[1]
        own = 2 * read if case.out == "in place" else self.bytes
        self.sets = sets or max(1, min(MAX_SETS, -(-_cold_bytes(device) // own)))

        def normal(size: tuple[int, ...]) -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device=device).normal_()

        self.inputs = [[normal(size) for size in inputs] for _ in range(self.sets)]
        if isinstance(shape, GemmShape):
            for _, weight in self.inputs:
                weight.div_(shape.hidden**0.5)
        self.out = [torch.empty(result, dtype=out_dtype, device=device) for _ in range(self.sets)]
        self._kept: dict[str, torch.Tensor] = {}

    def _scratch(self, name: str, numel: int) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numel:
            device = self.out[0].device
            kept = self._kept[name] = torch.empty(numel, dtype=torch.float32, device=device)
        return kept[:numel]

    def launch(self, config: Config) -> Callable[[int], object]:
        """How set i runs with a config of ours."""
        if isinstance(config, GemmConfig):
            return lambda i: gemm_kernels.gemm(
                *self.inputs[i], out=self.out[i], config=config, scratch=self._scratch
            )
        if self.case.out == "in place":
            return lambda i: reassemble_kernels.reassemble(self.inputs[i][0], config)
        return lambda i: reassemble_kernels.reassemble_into(self.inputs[i][0], self.out[i], config)

    def peers(self) -> dict[str, Callable[[int], object]]:
        """What ours are compared with, by name."""
        if isinstance(self.case.problem.shape, GemmShape):
            return {"cublas": self._cublas}
        return {"permute": self._permute, "copy": self._copy}

    def _cublas(self, i: int) -> object:
        """The library alone, straight into the result; a CPU's mm has no out_dtype."""
        (hidden, weight), out = self.inputs[i], self.out[i]
        if out.dtype == hidden.dtype:
            return torch.mm(hidden, weight.t(), out=out)
        if not out.is_cuda:
            return torch.mm(hidden.to(out.dtype), weight.to(out.dtype).t(), out=out)
        return torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)

    def _permute(self, i: int) -> object:
        """What `received.permute(1, 0, 2).reshape(B, N*S)` launches, but into memory that rotates
        as ours does, with the cast in the same pass.
        """
        return reference.reassemble_into(self.inputs[i][0], self.out[i])

    def _copy(self, i: int) -> object:
        """As many elements read and written, in the order in which they lie."""
        out = self.out[i].view(-1)
        return out.copy_(self.inputs[i][0].view(-1)[: out.numel()])


# Compiling.


def prepare(
    plan: Plan, device: torch.device, part: int = 0, parts: int = 1
) -> dict[str, Callable[[], Any]]:
    """By "case | config": compile it, and launch it once.  One part of several."""
    cases = gemm_cases(plan) + copy_cases(plan)
    ranked = [
        (rank, index, config)
        for index, case in enumerate(cases)
        for rank, config in enumerate(candidates(case, plan, device))
        if config != LIBRARY
    ]
    # The most promising of every case first: time may be short.
    ranked.sort(key=lambda task: (task[0], task[1]))

    def task(case: Case, config: Config) -> Callable[[], Any]:
        return lambda: _first_launch(case, config, plan, device)

    return {
        f"{cases[index].name} | {config}": task(cases[index], config)
        for _, index, config in ranked[part::parts]
    }


def _first_launch(case: Case, config: Config, plan: Plan, device: torch.device) -> float:
    """Seconds that it took."""
    buffers = Buffers(case, plan, device, sets=1)
    begin = time.perf_counter()
    buffers.launch(config)(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return round(time.perf_counter() - begin, 2)


def ready(
    case: Case, configs: list[Config], prepared: Mapping[str, Record]
) -> tuple[list[Config], dict[str, str]]:
    """Which configs can be measured without a wait for the compiler, and why the others are out."""
    found, out = [], {}
    for config in configs:
        told = prepared.get(f"{case.name} | {config}", Record(LEFT, NO_TIME))
        if config == LIBRARY or told.state == FOUND:
            found.append(config)
        else:
            out[str(config)] = str(told.value) if told.state == FAILED else f"left out: {NO_TIME}"
    return found, out


# Measuring.


def measuring(
    cases: list[Case], plan: Plan, device: torch.device, prepared: Mapping[str, Record]
) -> dict[str, Callable[[], Any]]:
    """By name of the case: the measurement that the report shows."""

    def one(case: Case) -> Callable[[], Any]:
        return lambda: _measured(case, plan, device, prepared)

    return {case.name: one(case) for case in cases}


def _clock(device: torch.device, sets: int) -> measure.Clock:
    return measure.graph_clock(device, sets) if device.type == "cuda" else measure.host_clock(sets)


def _measured(
    case: Case, plan: Plan, device: torch.device, prepared: Mapping[str, Record]
) -> dict[str, Any]:
    choice = chosen(case, device)
    configs, out = ready(case, candidates(case, plan, device), prepared)
    if not set(configs) - {LIBRARY} and out.get(str(choice.config), "").startswith("left out"):
        configs = [choice.config, *configs]  # compiled here: one at least
        del out[str(choice.config)]
    buffers = Buffers(case, plan, device)
    entry = measure.measure(
        case.problem,
        device,
        configs=configs,
        rounds=plan.rounds,
        sets=buffers.sets,
        clock=_clock(device, buffers.sets),
    )
    if entry is None:
        raise RuntimeError(f"none of {len(configs)} configs could be measured")
    medians = {name: statistics.median(us) for name, us in entry.details["timings"].items()}
    ours = min((name for name in medians if name != str(LIBRARY)), key=medians.get, default=None)  # type: ignore[arg-type]
    by_name = {str(config): config for config in configs}
    found = {
        "name": case.name,
        "shape": asdict(case.problem.shape),
        "out": case.out,
        "bytes": buffers.bytes,
        "sets": buffers.sets,
        "ours": ours,
        "config": None if ours is None else to_dict(by_name[ours]),
        "chosen": str(choice.config),
        "chosen_source": choice.source,
        "model_us": _modelled(case, choice.config, device),
        "tuning": medians,
        "failed": entry.details["failed"] | out,
        "us": _beside_peers(
            buffers,
            by_name.get(ours or ""),
            choice.config if str(choice.config) in medians else None,
            plan.rounds,
        ),
    }
    if device.type == "cuda":
        found["table"] = tables.dump(_table(case, entry, slug(device)))
        torch.cuda.empty_cache()
    return found


def _table(case: Case, entry: Entry, device: str) -> Table:
    """The entry as tables keep it: with the rows that it was measured at, where its bucket has
    more.
    """
    key, shape = case.problem.key, case.problem.shape
    own = shape.rows if isinstance(shape, GemmShape) else shape.rows * shape.ranks
    if own != key.rows:
        entry = replace(entry, details={**entry.details, "measured_rows": own})
    table = Table(device)
    table.add(key, entry)
    return table


def _modelled(case: Case, config: Config, device: torch.device) -> float | None:
    if config == LIBRARY:
        return None
    return tune.modelled(case.problem, config, measure.known_device(device), None).us


def _beside_peers(
    buffers: Buffers, ours: Config | None, choice: Config | None, rounds: int
) -> dict[str, float]:
    """Microseconds a launch: ours twice, what an untuned install chooses, and the peers."""
    methods: dict[str, Callable[[int], object]] = {}
    if ours is not None:
        methods["ours"] = buffers.launch(ours)
    if choice is not None:
        methods["chosen"] = buffers.launch(choice)
    methods |= buffers.peers()
    if ours is not None:
        methods["again"] = buffers.launch(ours)
    if buffers.case.out == "padded":  # whose columns end where `measure` does not look
        _verify_padded(buffers, [ours, choice])
    for launch in methods.values():
        launch(0)  # compiles, and makes handles: never inside a capture
    clock = _clock(buffers.out[0].device, buffers.sets)
    found = clock(methods, rounds)
    return {name: round(statistics.median(s) * 1e6, 2) for name, s in found.items()}


def _verify_padded(buffers: Buffers, configs: list[Config | None]) -> None:
    received, out = buffers.inputs[0][0], buffers.out[0]
    want = reference.reassemble_into(received, torch.empty_like(out))
    for config in configs:
        if config is None:
            continue
        assert isinstance(config, ReassembleConfig)
        out.fill_(float("nan"))
        difference = compare.first_difference(
            reassemble_kernels.reassemble_into(received, out, config), want
        )
        if difference is not None:
            raise RuntimeError(f"{config} is wrong: {difference}")


# Ceilings.


def ceilings(plan: Plan, device: torch.device) -> dict[str, Callable[[], Any]]:
    probe = Ceilings(device, plan.memory_bytes, plan.matrix, min(10, plan.rounds))

    def rounded(action: Callable[[], float]) -> Callable[[], float]:
        return lambda: round(action(), 3)

    return {name: rounded(action) for name, action in probe.items().items()}


def floor(result: Mapping[str, Any], ceilings: Mapping[str, float]) -> tuple[float | None, str]:
    """The least microseconds that the ceilings allow a measurement's case, and what binds.

    A GEMM reads nearly all that it moves, so memory's rate is the better one of reading and of
    copying; a reassembly copies.
    """
    shape = result["shape"]
    copy, read = ceilings.get("copy_TBps"), ceilings.get("read_TBps")
    if "hidden" not in shape:
        return (result["bytes"] / copy / 1e6, "mem") if copy else (None, "")
    rate, flops = max(copy or 0.0, read or 0.0), ceilings.get("bf16_TFLOPps")
    if not rate or not flops:
        return None, ""
    memory = result["bytes"] / rate / 1e6
    math = 2.0 * shape["rows"] * shape["shard"] * shape["hidden"] / flops / 1e6
    return max((memory, "mem"), (math, "math"))


# Tests.

COLLECTED = "(collected)"


class Recorder:
    """A pytest plugin that runs one part of the tests, those that have not ended before, and writes
    each outcome as it comes.
    """

    def __init__(
        self, journal: Journal, part: int, parts: int, usable: Callable[[], bool] = lambda: True
    ) -> None:
        self._journal, self._part, self._parts, self._usable = journal, part, parts, usable
        self._outcome: dict[str, Any] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        """After `-m gpu` has had its say."""
        own = session.items[self._part :: self._parts]
        self._journal.write(f"{COLLECTED} {self._part}", FOUND, [item.nodeid for item in own])
        ended = self._journal.ended()
        session.items[:] = [item for item in own if item.nodeid not in ended]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            lines = str(report.longrepr).strip().splitlines() or [""]
            self._journal.write(report.nodeid, FAILED, lines[-1][:300])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._journal.write(nodeid, STARTED)
        self._outcome = {"outcome": "passed", "seconds": 0.0}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._outcome["seconds"] = round(self._outcome["seconds"] + report.duration, 2)
        if report.failed and self._outcome["outcome"] != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr) if crash is None else crash.message
            first = (text.strip().splitlines() or [""])[0]
            self._outcome |= {"outcome": "failed", "text": first[:300]}
        elif report.skipped:
            where = report.longrepr
            text = where[2] if isinstance(where, tuple) else str(where)
            self._outcome |= {"outcome": "skipped", "text": text[:300]}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._journal.write(nodeid, FOUND, self._outcome)
        if self._outcome["outcome"] == "failed" and not self._usable():
            import pytest

            pytest.exit("the device is lost to this process", returncode=LOST)


def gpu_tests(root: Path, journal: Journal, part: int, parts: int, device: torch.device) -> None:
    """Run a part of the tests that are marked as needing a GPU; their outcomes go to `journal`."""
    import pytest

    files = [path for path in sorted((root / "tests").glob("test_*.py")) if _marked(path)]
    arguments = ["-m", "gpu", "-p", "no:cacheprovider", "--rootdir", str(root), "--tb=short"]
    arguments += ["--continue-on-collection-errors", *map(str, files)]
    recorder = Recorder(journal, part, parts, lambda: measure.usable(device))
    if not files:
        journal.write("tests", LEFT, f"no tests in {root}")
        return
    status = int(pytest.main(arguments, plugins=[recorder]))
    # 1: some failed, 5: none was left to run.
    if status not in (0, 1, 5):
        raise SystemExit(status)


def _marked(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return "mark.gpu" in path.read_text()
    return False
