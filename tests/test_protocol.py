"""The measuring protocol (lmhead.bench.protocol), and section N of the cases: what a benchmark must
not do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import pool

from lmhead import timing
from lmhead.bench import counted, methods, peers, protocol, rates, report, roofline
from lmhead.bench.cases import MODELS, Case
from lmhead.bench.peers import PEERS, Exchange, Inputs, Peer
from lmhead.bench.protocol import Settings
from lmhead.bench.results import Row
from lmhead.bench.roofline import Limits, Step
from lmhead.bench.torch_sampler import engine_sample
from lmhead.devices import DEVICES
from lmhead.timing import Mark

CPU = torch.device("cpu")
CASE = Case("custom", 40, 16, 2, 3)
LIMITS = Limits("this machine", 1e10, 1e11, 1e9, "made up")


def measured(rank: int, case: Case, names: tuple[str, ...], **settings: Any) -> list[Row]:
    asked = Settings(settings.pop("exchange_only", True), names, rounds=2, **settings)
    return protocol.measure_case(case, dist.group.WORLD, CPU, asked, LIMITS)


# Check first.


def _shifted(inputs: Inputs) -> Exchange:
    """Wrong on every rank but rank 0, by one column."""
    right = peers._list_all_to_all(inputs)

    def exchange(partial: torch.Tensor, mark: Mark) -> torch.Tensor:
        return right(partial, mark).roll(inputs.rank, dims=1)

    return exchange


def _forgetful(inputs: Inputs) -> Exchange:
    """Writes all but the last column of what it allocates."""
    right = peers._list_all_to_all(inputs)

    def exchange(partial: torch.Tensor, mark: Mark) -> torch.Tensor:
        logits = right(partial, mark)
        mine = torch.empty_like(logits)
        mine[:, :-1].copy_(logits[:, :-1])
        return mine

    return exchange


def _raising(inputs: Inputs) -> Exchange:
    raise RuntimeError("this backend has no such thing\nand says so at length")


def job_with_peer(rank: int, ranks: int, exchange: Any, exchange_only: bool) -> list[Row]:
    PEERS["x"] = Peer("x", "an odd one", peers._plain(exchange))  # type: ignore[index]
    try:
        return measured(rank, CASE, ("lmhead", "x"), exchange_only=exchange_only)
    finally:
        del PEERS["x"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("exchange_only", [True, False])
@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (_shifted, "WRONG: "),
        (_forgetful, "WRONG: "),
        (_raising, "not here: RuntimeError: this backend has no such thing (rank 0)"),
    ],
)
def test_what_fails_its_check_gets_no_figure(
    exchange: Callable[..., Any], words: str, exchange_only: bool
) -> None:
    for rows in pool(2).run(job_with_peer, exchange, exchange_only):
        ours, odd = rows
        assert ours.ms and ours.checked == "bit for bit"
        assert odd.ms is None and not odd.stages and odd.checked.startswith(words)
        if exchange is _shifted:
            assert odd.checked.endswith("(rank 1)")  # which every rank is told


def job_wrong_tokens(rank: int, ranks: int) -> list[Row]:
    """A sampler that is off by a token on rank 1."""

    def shifted(*given: Any, **more: Any) -> torch.Tensor:
        return (engine_sample(*given, **more) + rank) % CASE.vocab

    names = ("candidates", "lmhead-torch", "a-torch")
    wrong = {name: (methods.SAMPLED[name][0], shifted) for name in names[1:]}
    with mock.patch.dict(methods.SAMPLED, wrong):
        return measured(rank, CASE, names, exchange_only=False, sample={"top_k": 3})


def test_wrong_tokens_get_no_figure() -> None:
    for rows in pool(2).run(job_wrong_tokens):
        ours, *others = rows
        assert ours.ms and ours.checked == "checked: tokens" and ours.sample == "top_k=3"
        for row in others:
            assert row.ms is None and row.checked.startswith("WRONG: row ")
            assert row.checked.endswith("(rank 1)")


# Layouts: two attention groups of two ranks.

MIXED = replace(CASE, ranks=4, dp_size=2)


def _own_alone(inputs: Inputs) -> Exchange:
    """Ends with the own rows, and not with all of the attention group's."""
    right = peers._all_gather_own(inputs)
    return lambda partial, mark: right(partial, mark)[inputs.mine]


def _other_group(inputs: Inputs) -> Exchange:
    """Right but for the rows, on the last rank."""
    right = peers._all_gather_own(inputs)
    return lambda partial, mark: right(partial, mark).roll(inputs.rank // 3, dims=0)


def job_in_layout(rank: int, ranks: int, exchange: Any, exchanges: str) -> list[Row]:
    odd = Peer("a", "an odd one", peers._plain(exchange), exchanges=exchanges)
    with mock.patch.dict(PEERS, {"a": odd}):  # type: ignore[arg-type]
        return measured(rank, MIXED, ("lmhead", "a", "lmhead-replicate"), exchange_only=False)


@pytest.mark.parametrize(
    ("exchange", "exchanges", "words"),
    [
        (_own_alone, "all_gather", "WRONG: "),
        (_other_group, "all_gather", "WRONG: "),
        (peers._all_gather_own, "all_to_all", "moved 1008 bytes where the arithmetic says 468"),
    ],
)
def test_what_is_wrong_in_a_layout_is_found(
    exchange: Callable[..., Any], exchanges: str, words: str
) -> None:
    for rows in pool(4).run(job_in_layout, exchange, exchanges):
        ours, odd, replicated = rows
        for right in (ours, replicated):
            assert right.ms and right.checked == "bit for bit"
            assert right.bytes == right.counted_bytes
        if exchanges == "all_gather":
            assert odd.ms is None and odd.checked.startswith(words)
        else:
            assert words in odd.flags
        if exchange is _other_group:
            assert odd.checked.endswith("(rank 3)")


def job_split_logits(rank: int, ranks: int) -> list[Row]:
    """A replicating head that hands out the rows of its rank's own alone."""
    wrong = replace(methods.OUR_WAYS[0], name="lmhead-replicate", replicate=False)
    ways = (*methods.OUR_WAYS[:-1], wrong)
    with (
        mock.patch.object(methods, "OUR_WAYS", ways),
        mock.patch.object(methods, "_our_method", _called_grouped(methods._our_method)),
    ):
        return measured(rank, MIXED, ("lmhead-replicate",), exchange_only=False)


def _called_grouped(real: Callable[..., methods.Method]) -> Callable[..., methods.Method]:
    return lambda *given: replace(real(*given), grouped=True)


def test_a_replicating_head_must_end_with_all_rows_of_its_group() -> None:
    for rows in pool(4).run(job_split_logits):
        assert rows[0].ms is None and rows[0].checked.startswith("WRONG: ")


# Agree; the same number of calls, whatever the clocks say (I12).


def job_disagreeing(rank: int, ranks: int) -> str:
    settings = Settings(True, ("lmhead",), rounds=2 + rank)
    try:
        protocol.measure_case(CASE, dist.group.WORLD, CPU, settings, LIMITS)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_that_ask_for_different_rounds_are_told_so_on_all() -> None:
    first, second = pool(2).run(job_disagreeing)
    assert first == second and "rounds is 2 on rank 0, 3 on rank 1" in first


def built(rank: int, ranks: int) -> dict[str, list[methods.Method]]:
    case = replace(CASE, ranks=ranks)
    inputs = protocol.make_inputs(case, dist.group.WORLD, rank, CPU, True)
    method = methods.build(inputs, "lmhead", True)
    assert method is not None
    return {"lmhead": [method]}


def job_fast_clock(rank: int, ranks: int) -> tuple[int, tuple[float, ...]]:
    """Rank 1's clock runs at twice the pace."""
    found, calls = built(rank, ranks), 0
    whole = found["lmhead"][0].whole

    def count() -> torch.Tensor:
        nonlocal calls
        calls += 1
        return whole()

    found["lmhead"] = [replace(found["lmhead"][0], whole=count)]
    settings = Settings(True, ("lmhead",), rounds=7, stages=False)
    pace = 1.0 + rank
    group = dist.group.WORLD
    timed, _ = protocol.time_methods(
        found, group, CPU, settings, clock=lambda: pace * time.perf_counter()
    )
    return calls, timed["lmhead"].seconds


def test_case_i12_a_faster_clock_makes_no_more_calls() -> None:
    (calls, seconds), (others, same) = pool(2).run(job_fast_clock)
    assert calls == others == 7 + 2  # the warm-up
    assert seconds == same  # the slowest rank's, on every rank


# N1: a late rank, more than line rate.


def job_late(rank: int, ranks: int, late_s: float) -> tuple[float, list[float]]:
    """When rank 1 has woken up inside its first wait, and when every window began."""
    found = built(rank, ranks)
    begins: list[float] = []
    woken = 0.0
    barrier = protocol.barrier_of(dist.group.WORLD)

    def late_barrier() -> None:
        nonlocal woken
        if rank == 1 and not woken:
            time.sleep(late_s)
            woken = time.monotonic()
        barrier()

    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        if reads % 2:
            begins.append(time.monotonic())
        return time.monotonic()

    timing.interleaved(
        {"it": found["lmhead"][0].whole}, 3, device=CPU, barrier=late_barrier, clock=clock
    )
    return woken, begins


def test_case_n1_no_window_opens_before_the_last_rank_has_come() -> None:
    """One clock serves all processes of a machine, so what came first can be said for certain."""
    (_, early), (woken, late) = pool(2).run(job_late, 0.5)
    assert len(early) == len(late) == 3
    assert woken > 0 and min(early) >= woken and min(late) >= woken


def job_reports_late(rank: int, ranks: int) -> list[Row]:
    return measured(rank, CASE, ("lmhead",), late_s=0.5)


def test_case_n1_the_command_takes_a_late_rank() -> None:
    for rows in pool(2).run(job_reports_late):
        assert rows[0].ms and rows[0].checked == "bit for bit"


def test_case_n1_a_bandwidth_beyond_the_machine_is_flagged() -> None:
    assert timing.implausible(1000, 1.0, limit=1000.0, margin=1.1) is None
    assert timing.implausible(1100, 1.0, limit=1000.0, margin=1.1) is None
    text = timing.implausible(12_000_000_000, 1.0, limit=6e9, margin=1.1)
    assert text == "12.0 GB/s is more than the 6.0 GB/s that the machine can do"
    assert timing.implausible(1, 0.0, limit=1e9, margin=1.1) is not None
    row = Row.of(CASE, "b", "", "bit for bit", ms=1.0, stages={"exchange": 1e-6, "reassembly": 9.0})
    row.bytes = row.counted_bytes = 120
    (flag,) = protocol._flags(row, CASE, LIMITS, True)
    assert flag.startswith("exchange: 120.0 GB/s is more")
    row.stages["exchange"] = 1.0
    assert protocol._flags(row, CASE, LIMITS, True) == []
    row.counted_bytes = 121
    (flag,) = protocol._flags(row, CASE, LIMITS, True)
    assert "moved 121 bytes where the arithmetic says 120" in flag


# N2: the cadence.


class Clock:
    """Seconds that calls and waits spend."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float) -> None:
        self.log.append(name)
        self.now += seconds

    def barrier(self) -> None:
        self.call("barrier", 1000.0)  # which belongs to nobody's time


def test_case_n2_streaming_is_the_mean_of_calls_back_to_back() -> None:
    clock = Clock()
    timed = timing.interleaved(
        {"it": lambda: clock.call("it", 2.0)},
        2,
        device=CPU,
        barrier=clock.barrier,
        calls=5,
        warmup=1,
        clock=clock,
    )
    assert clock.log == ["it", *(["barrier"] + ["it"] * 5) * 2]
    assert timed["it"].seconds == (2.0, 2.0)


def test_case_n2_the_cadence_is_said_with_every_result() -> None:
    from lmhead.bench.results import Report

    machine = {"cores": 1, "cpu": "x", "gpus": 0, "torch": "", "triton": "", "commit": ""}
    for cadence in protocol.CADENCES:
        run = Report("exchange", cadence, 2, machine | {"date": ""}, [])
        assert f"cadence: {cadence};" in report.render(run)
        assert run.to_dict()["cadence"] == cadence and f"# cadence: {cadence}" in run.to_csv()


# Stages.


def test_a_barrier_stands_before_every_stage() -> None:
    clock = Clock()

    def method(mark: Mark) -> None:
        clock.call("gather", 1.0)
        mark("gather")
        clock.call("gemm", 5.0)
        mark("gemm")
        clock.call("gemm again", 2.0)
        mark("gemm")

    progress: list[tuple[int, int]] = []
    found = timing.staged(
        {"a": method, "b": method},
        2,
        device=CPU,
        barrier=clock.barrier,
        clock=clock,
        progress=lambda *at: progress.append(at),
        slowest=lambda seconds: [second + 0.5 for second in seconds],
    )
    one = ["barrier", "gather", "barrier", "gemm", "barrier", "gemm again", "barrier"]
    assert clock.log == [name for name in one if name != "barrier"] * 2 + one * 4
    assert found["b"]["gather"].seconds == (1.5, 1.5)
    assert found["a"]["gemm"].median == 7.5 and list(found["a"]) == ["gather", "gemm"]
    assert progress == [(1, 2), (2, 2)]


def test_stages_must_be_the_same_in_every_call() -> None:
    names = iter(["warm-up", "first", "second"])
    with pytest.raises(AssertionError, match="stages differ"):
        timing.staged({"it": lambda mark: mark(next(names))}, 2, device=CPU)


# Bytes.


def test_what_crosses_a_link_by_collective() -> None:
    assert counted.crossing("gloo:all_to_all", 800, 8) == 700
    assert counted.crossing("nccl:_all_gather_base", 100, 8) == 700
    assert counted.crossing("gloo:all_reduce", 800, 8) == 1400
    with pytest.raises(ValueError, match="send"):
        counted.crossing("gloo:send", 1, 2)


def job_count(rank: int, ranks: int) -> tuple[int, int]:
    """Two collectives in a call add up; none is none."""
    send, receive = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)

    def both() -> None:
        dist.all_to_all_single(receive, send)
        dist.all_reduce(torch.zeros(3))

    return counted.count(both, ranks), counted.count(lambda: None, ranks)


def test_collectives_of_a_call_are_counted_together() -> None:
    assert pool(2).run(job_count) == [(8 + 12, 0)] * 2


def job_count_splits(rank: int, ranks: int) -> tuple[int, int]:
    """An all-to-all that leaves out the neighbour, beside one with equal blocks; and one whose
    splits happen to be equal.
    """
    ins, outs = [0] * ranks, [0] * ranks
    for peer in (rank, (rank + 2) % ranks):
        ins[peer] = outs[peer] = 3
    send, receive = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)

    def both() -> None:
        dist.all_to_all_single(receive, send, outs, ins)
        dist.all_to_all_single(torch.zeros(8), torch.zeros(8))

    def even() -> None:
        dist.all_to_all_single(torch.zeros(8), torch.zeros(8), [2] * ranks, [2] * ranks)

    return counted.count(both, ranks), counted.count(even, ranks)


def test_split_sizes_say_what_crosses() -> None:
    """Half of what is handed stays, where the backend's record would have it be a quarter."""
    assert pool(4).run(job_count_splits) == [(3 * 2 + 6 * 4, 6 * 4)] * 4


def test_what_no_backend_has_seen_is_not_counted() -> None:
    seen = [("gloo:all_gather", 12), ("gloo:all_to_all", 12), ("gloo:all_to_all", 8)]
    assert counted.total(seen, [], 4) == 36 + 9 + 6
    assert counted.total(seen, [counted.Split(12, 6)], 4) == 36 + 6 + 6
    assert counted.total(seen, [counted.Split(12, 6)] * 2, 4) == 36 + 6 + 6
    assert counted.total([], [counted.Split(12, 6)], 4) == 0


# The roofline.


def test_a_layout_gathers_what_a_rank_does_not_hold() -> None:
    """T - brought hidden rows, and none where every rank holds all; the rest as it was."""
    plain = roofline.stages(LIMITS, replace(CASE, ranks=4).step)
    mixed = roofline.stages(LIMITS, MIXED.step)
    whole = roofline.stages(LIMITS, replace(MIXED, dp_size=1).step)
    row = MIXED.hidden * MIXED.itemsize
    assert plain[0].wire_bytes == 9 * row and mixed[0].wire_bytes == 6 * row
    assert mixed[0].memory_bytes == (6 + 12) * row
    assert plain[1:] == mixed[1:] == whole and plain[0].name == "hidden gather"
    assert replace(MIXED, dp_size=4).step == replace(CASE, ranks=4).step


def job_rates(rank: int, ranks: int) -> Limits:
    group = dist.group.WORLD
    slowest = protocol.slowest_of(group, CPU)
    return rates.measure(group, CPU, CASE, protocol.barrier_of(group), slowest, rounds=1)


def test_this_machine_is_measured_and_all_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pool(2).run(job_rates)
    assert first == second and first.source == "measured at start by 2 ranks at once"
    assert all(0 < rate < math.inf for rate in (first.memory, first.math, first.wire))


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_break_even_is_where_the_floors_cross(name: str) -> None:
    device, step = DEVICES[name], roofline.PUBLISHED_STEP
    for overlapped in (False, True):
        rows = roofline.break_even(device, step, overlapped=overlapped)
        assert rows is not None

        def ahead(count: int, overlapped: bool = overlapped) -> float:
            at = replace(step, rows=count)
            found = {stage.name: stage.floor_us for stage in roofline.stages(device, at)}
            gemm = found.pop("gemm")
            rest = sum(found.values())
            sharded = max(gemm, rest) if overlapped else gemm + rest
            return roofline.dp_head(device, at).floor_us - sharded

        assert ahead(rows - 1) > 0 >= ahead(rows)


def test_on_b200_a_sharded_head_pays_up_to_about_the_ops_to_byte_ratio() -> None:
    """2250 TFLOP/s over 8 TB/s is 281 FLOP per byte, and a DP head does B FLOP per byte of weight;
    its rows and logits are bytes too.
    """
    rows = roofline.break_even(DEVICES["b200"], roofline.PUBLISHED_STEP, overlapped=True)
    assert rows is not None and 281 <= rows <= 281 * 1.06
    serial = roofline.break_even(DEVICES["b200"], roofline.PUBLISHED_STEP)
    assert serial is not None and serial < rows
    assert roofline.break_even(LIMITS, Step(100, 10, 2, 1)) == 1  # never


def test_published_figures_stand_beside_models_and_say_so() -> None:
    figures = roofline.published()
    assert [figure.published_us for figure in figures] == [320, 320, 151, 169, 71, 46]
    by_what = {figure.what.strip(): figure for figure in figures}
    gathered = by_what["of it communication"].floor_us
    assert gathered == pytest.approx(7 * 288 * 16160 * 2 / 900e9 * 1e6 + 4.01, abs=0.02)
    assert by_what["of it GEMM"].floor_us == pytest.approx(30.64)
    assert by_what["of it GEMM"].modelled_us is not None
    assert all(figure.floor_us < figure.published_us for figure in figures)
    text = report._text(report._published_table())
    assert "published" in text and "modelled" in text and "nothing here was measured" in text


def test_a_case_is_the_same_step_as_the_roofline_s() -> None:
    case = Case("deepseek-v4-pro", MODELS["deepseek-v4-pro"].vocab, 7168, 8, 36)
    assert case.step == roofline.PUBLISHED_STEP
    assert case.shard == 16160 and case.total == 288
