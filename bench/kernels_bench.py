"""`lmhead bench kernels`: the GEMM and the reassembly alone, on one device.

GEMM: every config that the tables hold for the shard, the untuned default, and the library (cuBLAS
on CUDA).  Reassembly: ours, permute + reshape as engines write it, and a plain copy of the same
bytes, which is its roof.

Protocol.  Each is checked first: a GEMM against fp64, with at most twice the library's error, a
reassembly bit for bit, both into memory filled with NaN.  Then all are timed interleaved, median
over rounds: on CUDA by replays of a graph over inputs that rotate through eight times the L2, on a
CPU by the host's clock.  On a CPU our Triton kernels run only in the interpreter
(TRITON_INTERPRET=1), whose times mean nothing; without it ours are their torch twins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from lmhead import compare, measure, reference, tables
from lmhead.bench import machine, rates
from lmhead.bench.cases import Case
from lmhead.bench.gpu_sections import REHEARSAL, Buffers, Plan
from lmhead.bench.gpu_sections import Case as KernelCase
from lmhead.bench.results import Report, Row
from lmhead.bench.roofline import Limits, Stage, limits_of, stages
from lmhead.devices import DEVICES, arch_of, slug
from lmhead.kernels import tiles
from lmhead.kernels.config import (
    LIBRARY,
    GemmShape,
    ReassembleShape,
    default_gemm,
    default_reassemble,
    fits,
)
from lmhead.tables import Config
from lmhead.timing import Timing, implausible
from lmhead.tune import Problem

Launch = Callable[[int], object]
PARTS = ("gemm", "reassembly")
OURS_ON_CPU, PERMUTE, COPY = "torch twin", "permute-reshape", "plain-copy"


def run(
    cases: tuple[Case, ...],
    rounds: int,
    progress: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> Report:
    """Measure every case on this process' device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report("kernels", _cadence(device), rounds, machine.facts(device), [])
    with torch.inference_mode():
        for done, case in enumerate(cases):
            progress(done, len(cases), str(case))
            if 1 not in report.limits:
                report.limits[1] = _limits(case, device)
            for part in PARTS if case.ranks > 1 and case.rows > 1 else PARTS[:1]:
                report.rows += _part(case, part, device, rounds, report.limits[1])
    progress(len(cases), len(cases), "")
    return report


def _cadence(device: torch.device) -> str:
    return "graph replay" if device.type == "cuda" else "isolated"


def _limits(case: Case, device: torch.device) -> Limits:
    known = DEVICES.get(slug(device))
    return rates.measure(None, device, case) if known is None else limits_of(known)


def problem_of(case: Case, part: str) -> KernelCase:
    """The same as the kernels' tables know it: in place where the received elements are the
    logits.
    """
    size = case.itemsize
    if part == "gemm":
        gemm = GemmShape(case.total, case.shard, case.hidden, size, size)
        return KernelCase(part, Problem(tables.gemm_key(gemm), gemm), case.dtype)
    moved = ReassembleShape(case.ranks, case.rows, case.shard, size)
    in_place = case.vocab == case.ranks * case.shard
    key = tables.reassemble_key(moved, in_place, out_itemsize=size)
    out = "in place" if in_place else "padded"
    return KernelCase(part, Problem(key, moved), out)


def table_configs(problem: KernelCase, device: torch.device) -> list[Config]:
    """Every config that the tables hold for the shape at any number of rows, and the default."""
    key, shape, arch = problem.problem.key, problem.problem.shape, arch_of(device)
    found: list[Config] = []
    name = slug(device) if device.type == "cuda" else "b200"
    for table in (tables.load_user(name), tables.load_shipped(name)):
        for known, entries in ({} if table is None else table.entries).items():
            if replace(known, rows=0) == replace(key, rows=0):
                found += [entry.config for entry in entries.values()]
    if isinstance(shape, GemmShape):
        found.append(default_gemm(shape, arch))
    else:
        found.append(default_reassemble(shape, key.kernel == "reassemble"))
    return [config for config in dict.fromkeys(found) if fits(config, arch, shape)]


def _part(case: Case, part: str, device: torch.device, rounds: int, limits: Limits) -> list[Row]:
    problem = problem_of(case, part)
    padding = case.ranks * case.shard - case.vocab
    plan = replace(REHEARSAL, vocab=case.vocab, hidden=case.hidden, padding=padding)
    buffers = _buffers(case, problem, plan, device)
    launches, failed = _checked(_methods(problem, buffers, device), problem, buffers)
    clock = measure.host_clock(buffers.sets)
    if device.type == "cuda":
        clock = measure.graph_clock(device, buffers.sets)
    timed = clock(launches, rounds)
    stage = next(s for s in stages(limits, case.step) if s.name == part)
    titles = {COPY: "plain copy", PERMUTE: "permute + reshape", str(LIBRARY): _library(device)}
    rows = []
    for name, words in failed.items():
        rows.append(Row.of(case, name, titles.get(name, name), words, part=part))
    for name, seconds in timed.items():
        row = Row.of(case, name, titles.get(name, name), "checked", part=part, roof=name == COPY)
        row.time(Timing(tuple(seconds)))
        row.floor_ms = stage.floor_us * 1e-3
        row.flags = _flags(stage, row, limits)
        rows.append(row)
    return rows


def _flags(stage: Stage, row: Row, limits: Limits) -> list[str]:
    assert row.ms is not None
    why = implausible(stage.memory_bytes, row.ms * 1e-3, limits.memory, rates.MARGIN)
    return [why] if why else []


def _library(device: torch.device) -> str:
    return "cuBLAS" if device.type == "cuda" else "torch.mm"


def _buffers(case: Case, problem: KernelCase, plan: Plan, device: torch.device) -> Buffers:
    """Made as `make gpu-check` makes them, in 16 bits or, here, in fp32."""
    buffers = Buffers(problem, plan, device)
    if case.itemsize == 4 or case.dtype == "fp16":
        dtype = case.torch_dtype
        buffers.inputs = [[tensor.to(dtype) for tensor in given] for given in buffers.inputs]
        buffers.out = [out.to(dtype) for out in buffers.out]
    return buffers


def _methods(problem: KernelCase, buffers: Buffers, device: torch.device) -> dict[str, Launch]:
    kernels = device.type == "cuda" or bool(tiles.INTERPRET.value)
    ours = table_configs(problem, device) if kernels else []
    found = {str(config): buffers.launch(config) for config in ours}
    if isinstance(problem.problem.shape, GemmShape):
        return found | {str(LIBRARY): buffers.launch(LIBRARY)}

    def twin(i: int) -> object:
        return reference.reassemble_into(buffers.inputs[i][0], buffers.out[i])

    def permute(i: int) -> object:
        (received,), out = buffers.inputs[i], buffers.out[i]
        whole = received.permute(1, 0, 2).reshape(received.shape[1], -1)
        return whole[:, : out.shape[1]]

    def copy(i: int) -> object:
        out = buffers.out[i].view(-1)
        return out.copy_(buffers.inputs[i][0].view(-1)[: out.numel()])

    if not kernels:
        found[OURS_ON_CPU] = twin
    return found | {PERMUTE: permute, COPY: copy}


def _checked(
    launches: Mapping[str, Launch], problem: KernelCase, buffers: Buffers
) -> tuple[dict[str, Launch], dict[str, str]]:
    """Those that may be timed, and why the others may not."""
    good: dict[str, Launch] = {}
    failed: dict[str, str] = {}
    judge = _gemm_judge(buffers) if problem.name == "gemm" else _copy_judge(buffers)
    for name, launch in launches.items():
        try:
            why = None if name == COPY else judge(launch)
            launch(0)
        except Exception as error:  # compilers and drivers raise what they like
            first = (str(error).strip().splitlines() or [""])[0]
            why = f"not here: {type(error).__name__}: {first}"[:160]
        if why is None:
            good[name] = launch
        else:
            failed[name] = why
    return good, failed


def _gemm_judge(buffers: Buffers) -> Callable[[Launch], str | None]:
    hidden, weight = buffers.inputs[0]
    truth, out = reference.gemm_exact(hidden, weight), buffers.out[0]

    def error(launch: Launch) -> float:
        out.fill_(float("nan"))
        launch(0)
        return compare.relative_error(out, truth)

    allowed = measure.ERROR_FACTOR * error(buffers.launch(LIBRARY))

    def judge(launch: Launch) -> str | None:
        found = error(launch)
        return None if found <= allowed else f"WRONG: error {found:.2e}, allowed {allowed:.2e}"

    return judge


def _copy_judge(buffers: Buffers) -> Callable[[Launch], str | None]:
    """Every launch starts from the same blocks: one in place has overwritten them."""
    received, out = buffers.inputs[0][0], buffers.out[0]
    first = received.clone()
    want = torch.cat(list(first), dim=1)[:, : out.shape[1]]

    def judge(launch: Launch) -> str | None:
        received.copy_(first)
        out.fill_(float("nan"))
        got: Any = launch(0)
        difference = compare.first_difference(got, want)
        received.copy_(first)
        return None if difference is None else f"WRONG: {difference}"

    return judge


def is_ours(row: Row) -> bool:
    """Whether a row of `bench kernels` is a kernel of ours or its twin."""
    return row.name not in (str(LIBRARY), PERMUTE, COPY)
