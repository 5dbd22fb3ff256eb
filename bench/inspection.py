"""What `lmhead inspect` shows: the configs that a head would run with on an architecture, what the
machine code of each looks like, and per stage what is moved, computed and bound by what.

Needs no GPU: kernels are compiled for the architecture and read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lmhead import codegen, tables, tune
from lmhead.bench.roofline import Stage, Step, stages
from lmhead.devices import Device
from lmhead.estimate import Estimate, programs, resident, weight_bytes
from lmhead.kernels.config import GemmConfig, GemmShape, ReassembleShape, to_dict
from lmhead.tables import Choice
from lmhead.tune import Builds, Problem, Ranked

# Opcodes that decide whether a kernel is any good, by what they stand for.
TELLING = {
    "tensor-core multiplies": ("UTCHMMA", "HGMMA"),
    "bulk tensor loads": ("UTMALDG",),
    "global loads": ("LDG",),
    "global stores": ("STG",),
    "of them of 16 bytes": ("STG.E.128",),
    "barriers": ("BAR",),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel as it would be launched."""

    name: str
    choice: Choice
    estimate: Estimate | None
    report: codegen.Report | None  # None for the library's kernels
    problems: tuple[str, ...]
    programs: int
    resident: int  # programs on an SM at a time
    requested: float | None = None  # weight bytes asked for, over the shard's own

    def to_dict(self) -> dict[str, Any]:
        report = None
        if self.report is not None:
            report = {k: v for k, v in asdict(self.report).items() if k != "ttir"}
            report["counts"] = dict(sorted(self.report.counts.items()))
        return {
            "kernel": self.name,
            "config": to_dict(self.choice.config),
            "source": self.choice.source,
            "estimate": None if self.estimate is None else asdict(self.estimate),
            "programs": self.programs,
            "resident": self.resident,
            "weight_bytes_requested": self.requested,
            "problems": list(self.problems),
            "report": report,
        }


@dataclass(frozen=True)
class Inspection:
    """Everything about one step on one device."""

    device: Device
    step: Step
    kernels: tuple[Kernel, ...]
    stages: tuple[Stage, ...]
    ranking: tuple[Ranked, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": asdict(self.device),
            "step": asdict(self.step),
            "kernels": [kernel.to_dict() for kernel in self.kernels],
            "stages": [asdict(stage) for stage in self.stages],
            "ranking": [
                {
                    "config": to_dict(ranked.config),
                    "estimate": asdict(ranked.estimate),
                    "compiled": None if ranked.compiled is None else asdict(ranked.compiled),
                }
                for ranked in self.ranking
            ],
        }

    def lines(self) -> Iterator[str]:
        """The same as text, at most 100 columns wide."""
        step, device = self.step, self.device
        yield (
            f"{device.name} ({device.arch_name}): N = {step.ranks}, B = {step.rows}, "
            f"T = {step.total}, V = {step.vocab}, H = {step.hidden}, S = {step.shard}"
        )
        for kernel in self.kernels:
            yield ""
            yield from _kernel_lines(kernel)
        yield ""
        yield f"{'stage':<15}{'memory':>11}{'NVLink':>11}{'FLOPs':>11}{'floor':>11}  binds"
        for stage in self.stages:
            yield (
                f"{stage.name:<15}{stage.memory_bytes / 1e6:>8.2f} MB{stage.wire_bytes / 1e6:>8.2f}"
                f" MB{stage.flops / 1e9:>9.2f} G{stage.floor_us:>8.2f} us  {stage.limit}"
            )
        floor = sum(stage.floor_us for stage in self.stages)
        yield f"{'in series':<48}{floor:>8.2f} us"
        if self.ranking:
            yield ""
            yield from _ranking_lines(self.ranking)


def inspect(
    device: Device,
    step: Step,
    *,
    every: bool = False,
    builds: Builds | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """Compile and read what `step` would run; with `every`, the GEMM's whole space."""
    shipped = tables.load_shipped(device.name.lower())
    user = tables.load_user(device.name.lower())
    shape = GemmShape(step.total, step.shard, step.hidden, step.itemsize, step.wire_itemsize)
    gemm = tune.gemm_problem(shape)
    found: list[tuple[Problem, str, GemmShape | ReassembleShape]] = [(gemm, "gemm", shape)]
    if step.ranks > 1 and (step.rows > 1 or not step.in_place):
        moved = ReassembleShape(step.ranks, step.rows, step.shard, step.wire_itemsize)
        out = None if step.in_place else step.logits_itemsize
        problem = tune.reassemble_problem(
            step.ranks, step.rows, step.shard, step.wire_itemsize, out_itemsize=out
        )
        if out is not None:
            moved = ReassembleShape(step.ranks, step.rows, step.shard, max(out, moved.itemsize))
        found.append((problem, problem.key.kernel, moved))
    kernels = tuple(
        _kernel(
            name,
            Problem(problem.key, shape),
            tables.look_up(user, shipped, problem.key, device.arch, shape),
            device,
            step.softcap,
        )
        for problem, name, shape in found
    )
    ranking: Iterable[Ranked] = ()
    if every:
        ranking = tune.rank_all(gemm, device, builds=builds or Builds(None), progress=progress)
    return Inspection(device, step, kernels, tuple(stages(device, step)), tuple(ranking))


def _kernel(name: str, problem: Problem, choice: Choice, device: Device, softcap: bool) -> Kernel:
    config, shape = choice.config, problem.shape
    if isinstance(config, GemmConfig) and config.kind == "library":
        return Kernel(name, choice, None, None, (), 0, 0)
    build = tune.build_of(problem, config, device.arch_name)
    report = tune.report_of(build, epilogue=softcap)
    usage = tune.usage_of(report)
    problems = codegen.shortcomings(report, config, build.out_bits // 8, build.unit)
    requested = None
    if isinstance(config, GemmConfig) and isinstance(shape, GemmShape):
        own = shape.shard * shape.hidden * shape.itemsize
        requested = weight_bytes(config, shape) / own
    return Kernel(
        name,
        choice,
        tune.modelled(problem, config, device, usage),
        report,
        tuple(problems),
        programs(config, shape),
        resident(device, config, usage),
        requested,
    )


def _kernel_lines(kernel: Kernel) -> Iterator[str]:
    yield f"{kernel.name}: {kernel.choice.config}"
    yield f"  config from: {kernel.choice.source}"
    if kernel.report is None or kernel.estimate is None:
        yield "  the library's own kernels: nothing of ours to compile"
        return
    report, estimate = kernel.report, kernel.estimate
    columns = report.tensor_memory_columns
    yield (
        f"  {report.registers} registers, {report.spills} spills, {report.stack_bytes} B stack, "
        f"{report.shared_bytes} B shared"
        + (f", {columns} columns of tensor memory" if columns else "")
    )
    yield f"  {kernel.programs} programs, {kernel.resident} on an SM at a time"
    counted = {
        words: sum(n for op, n in report.counts.items() if op.startswith(opcodes))
        for words, opcodes in TELLING.items()
    }
    yield "  " + ", ".join(f"{count} {words}" for words, count in counted.items() if count)
    if kernel.requested is not None:
        yield f"  weight bytes requested: {kernel.requested:.4f} of the shard's own"
    terms = ", ".join(f"{name} {us:.1f}" for name, us in estimate.terms.items())
    yield f"  modelled: {estimate.us:.1f} us ({terms}; {estimate.limit} binds)"
    for problem in kernel.problems:
        yield f"  PROBLEM: {problem}"


def _ranking_lines(ranking: Iterable[Ranked]) -> Iterator[str]:
    yield f"{'modelled':>10} {'regs':>5}  gemm config"
    for ranked in ranking:
        compiled = ranked.compiled
        assert compiled is not None
        time = f"{ranked.estimate.us:.2f} us" if not compiled.problems else "-"
        why = f"  ({compiled.problems[0]})" if compiled.problems else ""
        yield f"{time:>10} {compiled.registers:>5}  {ranked.config}{why}"
