"""The tuner where there is a device, here on a CPU with the interpreter and a clock that is told
the times: what wins, what is refused and why, and what is left alone.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data_tune import (
    BAND,
    BULK,
    BULK_WIDE,
    COPY,
    CPU,
    CYCLE,
    GEMMS,
    HIDDEN,
    POINTER,
    SHARD,
    ToldClock,
    said,
)

import lmhead
from lmhead import measure, tables, tune
from lmhead.devices import DEVICES
from lmhead.kernels import gemm as gemm_kernels
from lmhead.kernels import reassemble as reassemble_kernels
from lmhead.kernels.config import (
    ARCHS,
    LIBRARY,
    GemmConfig,
    GemmShape,
    ReassembleShape,
    default_gemm,
    default_reassemble,
    fits,
)
from lmhead.measure import Launch
from lmhead.tables import Config, Entry

GEMM = tune.gemm_problem(GemmShape(4, SHARD, HIDDEN, 2))
MOVES = {
    "in place": tune.reassemble_problem(3, 5, 7, 2),
    "copy": tune.reassemble_problem(3, 5, 7, 2, out_itemsize=2),
    "cast": tune.reassemble_problem(3, 5, 7, 2, out_itemsize=4),
}
CONFIGS = {"in place": (BAND, CYCLE), "copy": (COPY,), "cast": (COPY,)}
SECONDS = dict.fromkeys(GEMMS, 5.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMHEAD_CONFIGS", str(tmp_path))
    return tmp_path


def run(
    clock: measure.Clock,
    configs: Sequence[Config] = GEMMS,
    problem: tune.Problem = GEMM,
    **rest: Any,
) -> Entry | None:
    return measure.measure(problem, CPU, clock=clock, configs=configs, rounds=3, sets=1, **rest)


# What wins.


@pytest.mark.parametrize("fastest", GEMMS, ids=str)
def test_the_fastest_by_the_clock_wins(fastest: GemmConfig) -> None:
    clock = ToldClock(SECONDS | {fastest: 1.25})
    entry = run(clock)
    assert entry is not None
    assert (entry.config, entry.origin, entry.us) == (fastest, "measured", 1.25)
    assert clock.timed == [[str(config) for config in GEMMS]]
    assert entry.details["timings"] == {
        str(config): [1.25 if config == fastest else 5.0] * 3 for config in GEMMS
    }
    assert entry.details["failed"] == {}
    assert entry.details["torch"] == torch.__version__
    assert {"device", "triton", "date"} <= entry.details.keys()


def test_the_median_decides_not_the_best_round() -> None:
    def clock(methods: Mapping[str, Launch], rounds: int) -> Mapping[str, Sequence[float]]:
        assert rounds == 3
        return {str(BULK): [1e-6, 9e-6, 9e-6], str(POINTER): [4e-6, 4e-6, 90e-6]}

    entry = run(clock, (BULK, POINTER))
    assert entry is not None and (entry.config, entry.us) == (POINTER, 4.0)


@pytest.mark.parametrize("kind", MOVES)
def test_copying_kernels_are_measured_too(kind: str) -> None:
    problem, configs = MOVES[kind], CONFIGS[kind]
    shape = problem.shape
    assert isinstance(shape, ReassembleShape)
    default = default_reassemble(shape, in_place=kind == "in place")
    entry = run(
        ToldClock({default: 3.0} | dict.fromkeys(configs, 2.0)), [default, *configs], problem
    )
    assert entry is not None
    assert entry.config == configs[0] and entry.details["failed"] == {}
    assert len(entry.details["timings"]) == 1 + len(configs)


def test_fp32_has_the_library_and_ordinary_loads() -> None:
    problem = tune.gemm_problem(GemmShape(4, 24, 32, 4, 4))
    names = measure.candidates(problem, CPU, ARCHS["sm_90"])
    assert names[0] == LIBRARY and {c.kind for c in names if isinstance(c, GemmConfig)} == {
        "library",
        *(c.kind for c in tune.space(problem, ARCHS["sm_90"], 132) if isinstance(c, GemmConfig)),
    }
    entry = run(ToldClock({LIBRARY: 2.0, POINTER: 1.0}), (LIBRARY, POINTER), problem)
    assert entry is not None and entry.config == POINTER


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_candidates_are_the_default_the_library_and_what_the_model_puts_first(arch: Any) -> None:
    problem = tune.gemm_problem(GemmShape(288, 16160, 7168, 2))
    found = measure.candidates(problem, CPU, arch)
    assert found[:2] == [default_gemm(problem.shape, arch), LIBRARY]
    assert len(set(found)) == len(found)
    assert measure.CANDIDATES <= len(found) <= measure.CANDIDATES + 2
    assert all(fits(config, arch, problem.shape) for config in found)
    device = next(d for d in DEVICES.values() if d.arch == arch)
    promised = [
        tune.Ranked(config, tune.modelled(problem, config, device, None)).order
        for config in tune.space(problem, arch, device.sms)
    ]
    best = min(promised)
    assert best[-1] in {str(config) for config in found}
    moved = MOVES["in place"]
    assert measure.candidates(moved, CPU, arch)[0] == default_reassemble(moved.shape, True)


def test_without_a_clock_a_cpu_is_timed_by_the_host() -> None:
    entry = measure.measure(GEMM, CPU, configs=(BULK, LIBRARY), rounds=2, sets=1)
    assert entry is not None
    assert all(len(us) == 2 and min(us) > 0 for us in entry.details["timings"].values())


def test_the_hosts_clock_interleaves_and_rotates_for_a_fixed_number_of_rounds() -> None:
    now, calls = [0.0], list[tuple[str, int]]()

    def method(name: str, seconds: float) -> Launch:
        def launch(i: int) -> None:
            calls.append((name, i))
            now[0] += seconds

        return launch

    clock = measure.host_clock(2, seconds=lambda: now[0])
    found = clock({"a": method("a", 1.0), "b": method("b", 0.5)}, 3)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 0), ("b", 0)]
    assert found == {"a": [1.0] * 3, "b": [0.5] * 3}


def test_inputs_rotate_through_more_memory_than_a_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 2 * max(device.l2_bytes for device in DEVICES.values()) < measure.COLD_BYTES
    per_set = (16 * HIDDEN + SHARD * HIDDEN + 16 * SHARD) * 2
    for sets in (1, 5, 1000):
        monkeypatch.setattr(measure, "COLD_BYTES", sets * per_set - 1)
        bench = measure._Gemm(GEMM, CPU, None)
        assert bench.sets == min(sets, measure.MAX_SETS)
        assert len(bench.hidden) == len(bench.weight) == len(bench.out) == bench.sets
    for kind, per_set in (("in place", 3 * 5 * 7 * 2), ("cast", 3 * 5 * 7 * 6)):
        monkeypatch.setattr(measure, "COLD_BYTES", 5 * per_set)
        assert measure._Reassemble(MOVES[kind], CPU, None).sets == 5


# What is refused.

Broken = Callable[..., Any]


def break_gemm(
    monkeypatch: pytest.MonkeyPatch,
    config: GemmConfig,
    broken: Callable[[torch.Tensor], None] | None,
) -> None:
    """Let the kernel of one config spoil its result; with None it writes nothing at all."""
    real = gemm_kernels.launch_gemm

    def launch(hidden: Any, weight: Any, after: Any, out: torch.Tensor, given: Any, s: Any) -> None:
        if given == config and broken is None:
            return
        real(hidden, weight, after, out, given, s)
        if given == config and broken is not None:
            broken(out)

    monkeypatch.setattr(gemm_kernels, "launch_gemm", launch)


def one_wrong(out: torch.Tensor) -> None:
    out[3, 5] += 1.0


def one_unwritten(out: torch.Tensor) -> None:
    out[:, 16:] = float("nan")


@pytest.mark.parametrize(
    ("broken", "words"),
    [(one_wrong, "relative error "), (one_unwritten, "relative error inf"), (None, "inf, allowed")],
    ids=["a wrong element", "an unwritten tile", "nothing written"],
)
@pytest.mark.parametrize("out_itemsize", [2, 4])
def test_a_wrong_gemm_is_named_and_never_timed(
    monkeypatch: pytest.MonkeyPatch, broken: Any, words: str, out_itemsize: int
) -> None:
    """A config that writes nothing leaves NaN, not the right result of the one before it."""
    break_gemm(monkeypatch, BULK, broken)
    clock = ToldClock(SECONDS | {BULK: 0.1, POINTER: 3.0})
    problem = tune.gemm_problem(GemmShape(4, SHARD, HIDDEN, 2, out_itemsize))
    entry = run(clock, (POINTER, BULK, LIBRARY), problem)
    assert entry is not None
    assert entry.config == POINTER and clock.timed == [[str(POINTER), "library"]]
    assert list(entry.details["failed"]) == [str(BULK)]
    assert words in entry.details["failed"][str(BULK)]


@pytest.mark.parametrize("kind", MOVES)
@pytest.mark.parametrize("lazy", [True, False], ids=["nothing written", "a wrong element"])
def test_a_wrong_move_is_named_and_never_timed(
    monkeypatch: pytest.MonkeyPatch, kind: str, lazy: bool
) -> None:
    problem, configs = MOVES[kind], CONFIGS[kind]
    shape = problem.shape
    assert isinstance(shape, ReassembleShape)
    default = default_reassemble(shape, in_place=kind == "in place")
    for name in ("launch_reassemble", "launch_copy"):
        real = getattr(reassemble_kernels, name)

        def launch(*args: Any, real: Any = real) -> None:
            if args[-1] == configs[0] and lazy:
                return
            real(*args)
            if args[-1] == configs[0]:
                args[0 if kind == "in place" else 1].view(-1)[17] += 1

        monkeypatch.setattr(reassemble_kernels, name, launch)
    clock = ToldClock(dict.fromkeys([default, *configs], 1.0))
    entry = run(clock, [default, *configs], problem)
    assert entry is not None and entry.config == default
    assert "elements differ, the first at" in entry.details["failed"][str(configs[0])]
    assert str(configs[0]) not in clock.timed[0]


def test_what_does_not_fit_is_named_and_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    too_deep = dataclasses.replace(BULK, num_stages=1000)
    break_gemm(monkeypatch, too_deep, lambda out: pytest.fail("was run"))
    entry = run(ToldClock(SECONDS), (too_deep, BULK))
    assert entry is not None
    assert entry.details["failed"] == {str(too_deep): "does not fit"}


def test_a_library_that_is_wrong_allows_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    break_gemm(monkeypatch, LIBRARY, None)
    break_gemm(monkeypatch, BULK, one_unwritten)
    entry = run(ToldClock(SECONDS))
    assert entry is not None
    assert set(entry.details["failed"]) == {"library", str(BULK)}


def test_where_nothing_can_be_used_the_default_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gemm_kernels.launch_gemm

    def launch(hidden: Any, weight: Any, after: Any, out: Any, config: Any, scratch: Any) -> None:
        if config != LIBRARY:
            raise RuntimeError("no such kernel\nand a long story")
        real(hidden, weight, after, out, config, scratch)

    with monkeypatch.context() as broken:
        broken.setattr(gemm_kernels, "launch_gemm", launch)
        clock = ToldClock({})
        with pytest.warns(RuntimeWarning) as caught:
            assert run(clock, (BULK, POINTER)) is None
    (text,) = said(caught)
    assert clock.timed == []
    assert "none of 2 configs" in text and "RuntimeError: no such kernel" in text
    assert "long story" not in text
    head = lmhead.LMHead(torch.eye(SHARD, HIDDEN).bfloat16(), SHARD, kernels="triton")
    report = head.warmup(rows=2)
    assert report.configs[(2,)]["gemm"].source == "default"
    assert torch.equal(head(torch.eye(2, HIDDEN).bfloat16()), torch.eye(2, SHARD).bfloat16())


# What is known already.


def measured(us: Mapping[Config, float]) -> Entry:
    entry = run(ToldClock(us), list(us))
    assert entry is not None
    return entry


def test_only_configs_without_a_timing_are_timed() -> None:
    before = measured({BULK: 2.0, POINTER: 3.0})
    clock = ToldClock({BULK_WIDE: 4.0, LIBRARY: 2.5})
    entry = run(clock, before=before)
    assert entry is not None
    assert clock.timed == [[str(BULK_WIDE), "library"]]
    assert (entry.config, entry.us) == (BULK, 2.0) and len(entry.details["timings"]) == 4
    # And with nothing new there is nothing to run.
    again = run(clock, before=entry)
    assert again is not None and again.config == BULK and len(clock.timed) == 1
    assert again.details["timings"] == entry.details["timings"]


def test_timings_of_configs_that_are_no_candidates_any_more_are_forgotten() -> None:
    entry = run(ToldClock({POINTER: 3.0}), (POINTER,), before=measured({BULK: 1.0, POINTER: 3.0}))
    assert entry is not None and entry.config == POINTER
    assert list(entry.details["timings"]) == [str(POINTER)]


@pytest.mark.parametrize(
    "change",
    [
        {"triton": "0.0"},
        {"torch": "0.0"},
        {"device": "another"},
        {"timings": None},
        {"timings": {str(BULK): []}},
        {"timings": {str(BULK): ["fast"]}},
        {"timings": {str(BULK): 1.0}},
    ],
)
def test_timings_of_another_machine_or_of_no_sense_do_not_count(change: dict[str, Any]) -> None:
    before = measured({BULK: 1.0})
    before = dataclasses.replace(before, details={**before.details, **change})
    clock = ToldClock({BULK: 7.0})
    entry = run(clock, (BULK,), before=before)
    assert entry is not None and entry.us == 7.0 and len(clock.timed) == 1
    del_timings = {k: v for k, v in before.details.items() if k != "timings"}
    entry = run(clock, (BULK,), before=dataclasses.replace(before, details=del_timings))
    assert entry is not None and entry.us == 7.0


# The table of a device.


def problems() -> list[tune.Problem]:
    return [tune.gemm_problem(GemmShape(rows, SHARD, HIDDEN, 2)) for rows in (4, 17, 40)]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that the interpreter runs quickly."""
    monkeypatch.setattr(measure, "candidates", lambda *_: [BULK, LIBRARY])
    monkeypatch.setattr(measure, "MAX_SETS", 1)


def test_every_result_is_saved_as_it_comes(few: None) -> None:
    calls = []

    class Interrupted(ToldClock):
        def __call__(self, *given: Any) -> Any:
            calls.append(given)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return super().__call__(*given)

    us = {BULK: 1.0, LIBRARY: 2.0}
    with pytest.raises(KeyboardInterrupt):
        measure.tune_device(problems(), CPU, clock=Interrupted(us), rounds=2)
    saved = tables.load_user("cpu")
    assert saved is not None
    # On a CPU there are no graphs: what is measured is an eager call, and the key says so.
    keys = [dataclasses.replace(problem.key, mode="eager") for problem in problems()]
    assert list(saved.entries) == keys[:2]

    told: list[tuple[int, int]] = []
    clock = ToldClock(us)
    table = measure.tune_device(
        problems(), CPU, clock=clock, rounds=2, progress=lambda *numbers: told.append(numbers)
    )
    assert len(clock.timed) == 1 and told == [(1, 3), (2, 3), (3, 3)]
    assert list(table.entries) == keys and table == tables.load_user("cpu")

    slower = ToldClock({BULK: 9.0, LIBRARY: 8.0})
    table = measure.tune_device(problems(), CPU, clock=slower, rounds=2, again=True)
    assert len(slower.timed) == 3
    assert {entry["measured"].config for entry in table.entries.values()} == {LIBRARY}
    assert table == tables.load_user("cpu")


def test_a_problem_without_a_usable_config_is_left_out(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_refused", lambda *_: "no")
    with pytest.warns(RuntimeWarning, match="none of 2 configs"):
        table = measure.tune_device(problems(), CPU, clock=ToldClock({}))
    assert len(table) == 0 and tables.load_user("cpu") is None


# What is left alone.


def test_nothing_is_tuned_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(measure, "arch_of", lambda device: pytest.fail("asked the device"))
    with pytest.raises(RuntimeError, match=r"inside a capture: run `lmhead tune` before"):
        measure.measure(GEMM, torch.device("cuda"), configs=(BULK,))


def test_a_head_never_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measure", "tune_device", "candidates"):
        monkeypatch.setattr(measure, name, lambda *_, **__: pytest.fail("tuned"))
    head = lmhead.LMHead(torch.eye(SHARD, HIDDEN).bfloat16(), SHARD, kernels="triton")
    hidden = torch.eye(3, HIDDEN).bfloat16()
    first = head(hidden)  # not even where nothing is warmed up and no table is there
    head.warmup(rows=3)
    assert torch.equal(head(hidden), first)


def test_a_measured_table_serves_the_head(few: None) -> None:
    """From the clock to the launch, and a second process finds the same (I9)."""
    problem = tune.gemm_problem(GemmShape(3, SHARD, HIDDEN, 2))
    measure.tune_device([problem], CPU, clock=ToldClock({BULK: 1.0, LIBRARY: 2.0}), rounds=2)
    head = lmhead.LMHead(torch.eye(SHARD, HIDDEN).bfloat16(), SHARD, kernels="triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        choice = head.warmup(rows=3).configs[(3,)]["gemm"]
    assert (choice.config, choice.source, choice.us) == (BULK, "measured (user)", 1.0)
