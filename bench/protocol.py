"""How `lmhead bench` measures, whatever it measures.

1. Check first.  Every method's result is compared on every rank, bit for bit, with what one process
   computes; a product that rounds otherwise is held against fp64 and may be twice as far from it as
   torch's own.  Tokens are compared instead where a method ends in them: lmhead's with those that
   full logits give by the same noise, and everybody's greedy ones with the largest logits.  Memory
   that a method forgets to write is NaN by then.  A method that fails gets no figure.  In a layout
   whose attention groups have several ranks a method ends in the rows that its rank owns or in all
   of its group's, and is compared with as many.
2. Count.  One call under the profiler says what was really moved; it must be what the arithmetic
   says.
3. Agree.  Rounds, calls and methods are compared among ranks: all make the same number of calls,
   however fast their clocks run.
4. Time.  The same inputs for all; warm-up; then rounds in which the methods take turns, in an
   order that is drawn anew for every round and is the same on every rank, so that what one leaves
   behind (caches, freed pages) is not always the same other's luck; a barrier before each window;
   a round's time is the slowest rank's, a figure the median over rounds, its spread half the
   interquartile range.  The cadence is stated: `isolated`, one call per window, or `streaming`,
   several back to back.
5. Stages are timed in rounds of their own, with a barrier before every stage, so their sum is not
   the whole's time.
6. On CUDA the device is drained before each window, events on the stream time it, and inputs
   rotate through more memory than L2 holds.  (Single kernels are timed by replays of a CUDA graph:
   `lmhead.bench.kernels_bench`.)
7. A bandwidth beyond what the machine can do is flagged, never hidden.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from lmhead import compare, measure, reference, sampling, timing
from lmhead.bench import counted, methods, rates
from lmhead.bench.cases import Case
from lmhead.bench.methods import Method
from lmhead.bench.peers import EXCHANGE, GATHER, GEMM, PEERS, REASSEMBLY, Inputs
from lmhead.bench.results import Row
from lmhead.bench.roofline import Limits, floor_us, stages
from lmhead.comm import Call, Comm
from lmhead.shapes import gathered_bytes

CADENCES = {"isolated": 1, "streaming": 10}  # calls in a window
MAX_SETS = 16
STAGE_ROUNDS_MOST = 10


@dataclass(frozen=True)
class Settings:
    """What is measured beside the cases, and how often."""

    exchange_only: bool
    names: tuple[str, ...]
    rounds: int = 10
    cadence: str = "isolated"
    stages: bool = True
    late_s: float = 0.0  # rank 1 comes so much later: to see that it changes nothing
    sample: dict[str, Any] = field(default_factory=dict)  # what is drawn, as `LMHead.sample` takes


@dataclass(frozen=True)
class Verdict:
    """What the check of one method said, the same on every rank."""

    ok: bool
    words: str


def measure_case(
    case: Case,
    group: dist.ProcessGroup,
    device: torch.device,
    settings: Settings,
    limits: Limits,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """The rows of one case; every rank of `group` calls and gets the same."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    assert ranks == case.ranks
    _agree(case, group, device, settings)
    sets = [make_inputs(case, group, rank, device, settings.exchange_only)]
    sets += [_again(sets[0]) for _ in range(_sets(case, device, settings) - 1)]
    truth = Truth(sets[0], settings.exchange_only)
    found: dict[str, list[Method]] = {}
    verdicts: dict[str, Verdict] = {}
    moved: dict[str, int] = {}
    for name in settings.names:
        built, verdict = _build(sets, name, truth, settings)
        if verdict is None:
            continue
        # Together after each call: a rank that found something wrong must not leave the others
        # alone in the next one.
        verdicts[name] = together(verdict, group)
        if verdicts[name].ok and settings.stages:
            again = together(_judge_staged(built[0], truth), group)
            verdicts[name] = verdicts[name] if again.ok else again
        if verdicts[name].ok:
            found[name] = built
            moved[name] = counted.count(built[0].whole, ranks)
    truth.forget()
    if rank == 1 and settings.late_s:
        time.sleep(settings.late_s)
    whole, by_stage = time_methods(found, group, device, settings, progress)
    rows = []
    for name, verdict in verdicts.items():
        row = Row.of(case, name, title_of(name, found), verdict.words)
        row.floor_ms = _floor_ms(case, limits, settings.exchange_only)
        if name in methods.DRAWING:
            row.sample = sampling.text_of(settings.sample)
        if name in whole:
            method, took = found[name][0], by_stage.get(name, {})
            row.roof = method.roof
            if not method.exchanges_logits:
                row.floor_ms = _floor_ms(case, limits, False, (GATHER, GEMM))
            row.time(whole[name])
            row.stages = {stage: timed.median * 1e3 for stage, timed in took.items()}
            row.stage_spread = {stage: timed.spread * 1e3 for stage, timed in took.items()}
            row.bytes, row.counted_bytes = method.bytes, moved[name]
        rows.append(row)
    reached = replace(limits, wire=max(limits.wire, *_bare_rates(rows)))
    for row in rows:
        if row.ms:
            row.flags = _flags(row, case, reached, settings.exchange_only)
    return rows


def time_methods(
    found: Mapping[str, list[Method]],
    group: dist.ProcessGroup,
    device: torch.device,
    settings: Settings,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, timing.Timing], dict[str, dict[str, timing.Timing]]]:
    """(whole, by stage) of checked methods."""
    barrier, slowest = barrier_of(group), slowest_of(group, device)
    stage_rounds = min(settings.rounds, STAGE_ROUNDS_MOST) if settings.stages else 0
    total = settings.rounds + stage_rounds
    whole = timing.interleaved(
        {name: methods.rotating([m.whole for m in built]) for name, built in found.items()},
        settings.rounds,
        device=device,
        barrier=barrier,
        slowest=slowest,
        calls=CADENCES[settings.cadence],
        shuffled=True,
        clock=clock,
        progress=lambda done, _: progress(done, total),
    )
    if not stage_rounds:
        return whole, {}
    staged = {name: methods.rotating([m.staged for m in built]) for name, built in found.items()}
    by_stage = timing.staged(
        staged,
        stage_rounds,
        device=device,
        shuffled=True,
        barrier=barrier,
        slowest=slowest,
        clock=clock,
        progress=lambda done, _: progress(settings.rounds + done, total),
    )
    return whole, by_stage


def barrier_of(group: dist.ProcessGroup) -> Callable[[], None]:
    return lambda: dist.barrier(group=group)


def slowest_of(
    group: dist.ProcessGroup, device: torch.device
) -> Callable[[list[float]], list[float]]:
    """Seconds of this rank -> those of the slowest, by one reduction."""

    def slowest(seconds: list[float]) -> list[float]:
        mine = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
        return mine.tolist()

    return slowest


def make_inputs(
    case: Case, group: dist.ProcessGroup, rank: int, device: torch.device, exchange_only: bool
) -> Inputs:
    """Random hidden rows and weights; for an exchange alone, partial logits that say where they
    belong.
    """
    if exchange_only:
        columns = range(rank * case.shard, (rank + 1) * case.shard)
        partial = methods.addressed(range(case.total), columns, case, device)
        hidden = weight = torch.empty(0, 0, dtype=case.torch_dtype, device=device)
    else:
        partial = torch.empty(case.total, case.shard, dtype=case.torch_dtype, device=device)
        held = case.rows_of(rank).group
        hidden = torch.cat([methods.hidden_of(case, r, device) for r in held])
        weight = methods.weight_of(case, rank, device)

    def full() -> torch.Tensor:
        parts = [methods.weight_of(case, r, device) for r in range(case.ranks)]
        return torch.cat(parts)[: case.vocab]

    return Inputs(case, group, rank, device, hidden, weight, partial, full)


def _again(first: Inputs) -> Inputs:
    """The same values elsewhere in memory."""
    copies = (first.hidden.clone(), first.weight.clone(), first.partial.clone())
    whole: list[torch.Tensor] = []

    def full() -> torch.Tensor:
        whole.extend([] if whole else [first.full().clone()])
        return whole[0]

    return Inputs(first.case, first.group, first.rank, first.device, *copies, full)


def _sets(case: Case, device: torch.device, settings: Settings) -> int:
    if device.type != "cuda":
        return 1
    own = case.total * case.shard if settings.exchange_only else case.shard * case.hidden
    return max(1, min(MAX_SETS, -(-measure.COLD_BYTES // (own * case.itemsize))))


def _agree(case: Case, group: dist.ProcessGroup, device: torch.device, settings: Settings) -> None:
    fields = {
        "case": str(case),
        "methods": list(settings.names),
        "rounds": settings.rounds,
        "cadence": settings.cadence,
        "stages": settings.stages,
        "sample": settings.sample,
    }
    call = Call("bench", (), 0, case.dtype, 0)
    Comm(group, device).agree(fields, None, call, device)


# The check.


class Truth:
    """The logits of this rank's own rows, and of its attention group's, as one process computes
    them, shard by shard.
    """

    def __init__(self, inputs: Inputs, exchange_only: bool) -> None:
        case = inputs.case
        self._inputs, self._exchange_only = inputs, exchange_only
        self._exact: torch.Tensor | None = None
        if exchange_only:
            rows = range(inputs.grouped.start, inputs.grouped.stop)
            self.group = methods.addressed(rows, range(case.vocab), case, inputs.device)
            return
        everyone = torch.cat([methods.hidden_of(case, r, inputs.device) for r in range(case.ranks)])
        parts = [everyone @ self._shard(r).t() for r in range(case.ranks)]
        self.group = torch.cat([part[inputs.grouped] for part in parts], dim=1)[:, : case.vocab]

    def _shard(self, rank: int) -> torch.Tensor:
        return methods.weight_of(self._inputs.case, rank, self._inputs.device)

    def judge(self, got: torch.Tensor, grouped: bool = False) -> Verdict:
        """Of the own rows' logits, or if `grouped` of the attention group's."""
        chosen = slice(None) if grouped else self._inputs.mine
        want = self.group[chosen].to(got.dtype)
        difference = compare.first_difference(got, want)
        if difference is None:
            return Verdict(True, "bit for bit")
        if self._exchange_only or got.shape != want.shape:
            return Verdict(False, f"WRONG: {difference}")
        if self._exact is None:
            case, hidden = self._inputs.case, self._inputs.hidden
            blocks = [reference.gemm_exact(hidden, self._shard(r)) for r in range(case.ranks)]
            self._exact = torch.cat(blocks, dim=1)[:, : case.vocab]
        exact = self._exact[chosen]
        base = compare.relative_error(self.group[chosen], exact)
        error = compare.relative_error(got, exact) / base
        if error <= measure.ERROR_FACTOR:
            return Verdict(True, f"to rounding, {error:.2f} of torch's error")
        return Verdict(False, f"WRONG: {difference}")

    def forget(self) -> None:
        """Give the memory back before anything is timed."""
        self.group, self._exact = self.group.new_empty(0), None


def _build(
    sets: list[Inputs], name: str, truth: Truth, settings: Settings
) -> tuple[list[Method], Verdict | None]:
    """The method on every set of inputs, and what its check says; None where it has no part."""
    try:
        # Compiled code would be compiled once more for it.
        with _poisoned_memory(name != "f"):
            how = settings.exchange_only, settings.sample
            built = [methods.build(inputs, name, *how) for inputs in sets]
            if built[0] is None:
                return [], None
            ready = [method for method in built if method is not None]
            if ready[0].roof:
                ready[0].whole()
                return ready, Verdict(True, "a part")
            if ready[0].check is not None:
                return ready, _judge_tokens(ready[0].check(truth.group))
            return ready, truth.judge(ready[0].whole(), ready[0].grouped)
    except Exception as error:  # a backend or a compiler that cannot
        first = (str(error).strip().splitlines() or [""])[0]
        return [], Verdict(False, f"not here: {type(error).__name__}: {first}"[:160])


def _judge_tokens(objection: str) -> Verdict:
    return Verdict(not objection, f"WRONG: {objection}" if objection else "checked: tokens")


def _judge_staged(method: Method, truth: Truth) -> Verdict:
    if method.roof:
        method.staged(lambda stage: None)
        return Verdict(True, "a part")
    if method.check is not None:  # of both calls at once
        return _judge_tokens("")
    with _poisoned_memory(True):
        return truth.judge(method.staged(lambda stage: None), method.grouped)


@contextlib.contextmanager
def _poisoned_memory(on: bool) -> Iterator[None]:
    """torch.empty gives NaN meanwhile, so that nothing left unwritten passes by luck."""
    before = torch.are_deterministic_algorithms_enabled()
    before_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(on, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=before_warn)


def together(verdict: Verdict, group: dist.ProcessGroup) -> Verdict:
    """The first rank's objection, or rank 0's words where there is none."""
    said: list[Verdict] = [verdict] * dist.get_world_size(group)
    dist.all_gather_object(said, verdict, group=group)
    for rank, told in enumerate(said):
        if not told.ok:
            return Verdict(False, f"{told.words} (rank {rank})")
    return said[0]


# What a row says beside its times.


def title_of(name: str, found: Mapping[str, list[Method]]) -> str:
    if name in found:
        return found[name][0].title
    known = {way.name: way.title for way in methods.OUR_WAYS} | methods.DRAWING
    return known.get(name) or (PEERS[name].title if name in PEERS else name)


def _floor_ms(case: Case, limits: Limits, exchange_only: bool, parts: Sequence[str] = ()) -> float:
    """Of all stages, of the exchange's alone, or of `parts`."""
    if not exchange_only and not parts:
        return floor_us(limits, case.step) * 1e-3
    parts = parts or (EXCHANGE, REASSEMBLY)
    return sum(s.floor_us for s in stages(limits, case.step) if s.name in parts) * 1e-3


def _bare_rates(rows: Sequence[Row]) -> list[float]:
    """Bytes per second that the bare all-to-all reached at best in this run: the machine can do
    that, however busy it was when its rates were measured.
    """
    bare = [row for row in rows if row.name == "roof-all-to-all" and row.each_ms]
    return [0.0, *(row.bytes / (min(row.each_ms) * 1e-3) for row in bare)]


def _hidden_bytes(name: str, case: Case) -> int:
    """Those of hidden rows that a method moves."""
    if name in PEERS:
        return case.hidden * case.itemsize * case.rows * (case.ranks - 1)
    return gathered_bytes(case.rows_of(0), case.hidden, case.itemsize)


def _flags(row: Row, case: Case, limits: Limits, exchange_only: bool) -> list[str]:
    found = []
    if row.counted_bytes != row.bytes:
        found.append(f"moved {row.counted_bytes} bytes where the arithmetic says {row.bytes}")
    hidden = 0 if exchange_only or row.roof else _hidden_bytes(row.name, case)
    logits = row.bytes - hidden
    took = row.stages.get(EXCHANGE, 0.0)
    if took and logits > 0 and row.name != "c":
        why = timing.implausible(logits, took * 1e-3, limits.wire, rates.MARGIN)
        found += [f"exchange: {why}"] if why else []
    memory = {s.name: s.memory_bytes for s in stages(limits, case.step)}.get(REASSEMBLY)
    if memory and row.stages.get(REASSEMBLY):
        why = timing.implausible(memory, row.stages[REASSEMBLY] * 1e-3, limits.memory, rates.MARGIN)
        found += [f"reassembly: {why}"] if why else []
    return found
