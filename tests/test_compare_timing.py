"""Error measures and the fair clock: lmhead.compare, lmhead.timing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch

from lmhead.compare import first_difference, relative_error, top2_gap
from lmhead.timing import Timing, interleaved

NAN = float("nan")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8]
)
def test_first_difference_of_equal_tensors_is_none(dtype: torch.dtype) -> None:
    value = torch.arange(12).view(3, 4).to(dtype)
    assert first_difference(value, value.clone()) is None
    assert first_difference(value.t(), value.t().contiguous()) is None, "strides do not matter"
    assert first_difference(value[:0], value[:0]) is None


def test_first_difference_names_the_place_and_both_values() -> None:
    want = torch.zeros(3, 4)
    got = want.clone()
    got[1, 2], got[2, 0] = 7.0, 8.0
    text = first_difference(got, want)
    assert text == "2 of 12 elements differ, the first at [1, 2]: 7.0 where 0.0 belongs"


def test_first_difference_compares_bits() -> None:
    """-0.0 == 0.0 and NaN != NaN by value; movement of data must keep either as it was."""
    assert first_difference(torch.tensor([-0.0]), torch.tensor([0.0])) is not None
    assert first_difference(torch.tensor([NAN]), torch.tensor([NAN])) is None
    other = torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert first_difference(torch.tensor([NAN], dtype=torch.bfloat16), other) is not None


def test_first_difference_of_shape_or_dtype() -> None:
    text = first_difference(torch.zeros(2, 3), torch.zeros(3, 2))
    assert text == "torch.float32 (2, 3) is not torch.float32 (3, 2)"
    text = first_difference(torch.zeros(2).half(), torch.zeros(2))
    assert text == "torch.float16 (2,) is not torch.float32 (2,)"


def test_relative_error() -> None:
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(truth.float(), truth) == 0.0
    assert relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.0, 2.0]), torch.zeros(2, dtype=torch.float64)) == 2.0
    assert relative_error(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.float64)) == 0.0
    # fp32 could not tell the difference from the truth.
    close = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64)
    assert relative_error(torch.tensor([1.0]), close) == pytest.approx(2.0**-40, rel=1e-6)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_relative_error_of_anything_not_finite_is_infinite(bad: float) -> None:
    """NaN would compare as "not larger" with any bound."""
    truth = torch.ones(3, dtype=torch.float64)
    assert relative_error(torch.tensor([1.0, bad, 1.0]), truth) == math.inf


def test_relative_error_never_broadcasts() -> None:
    with pytest.raises(ValueError, match=r"\(1, 3\) and \(2, 3\)"):
        relative_error(torch.ones(1, 3), torch.ones(2, 3, dtype=torch.float64))


def test_top2_gap() -> None:
    assert top2_gap(torch.tensor([0.25, -1.0, 4.0, 3.5], dtype=torch.bfloat16)) == 0.5
    assert top2_gap(torch.tensor([1.0, 1.0, 0.0])) == 0.0


def test_timing_is_the_median_and_half_the_interquartile_range() -> None:
    timing = Timing((5.0, 1.0, 2.0, 100.0))
    low, _, high = statistics.quantiles(timing.seconds, n=4)
    assert timing.median == 3.5 and timing.spread == (high - low) / 2 > 0
    assert Timing((1.0, 9.0, 2.0)).spread == 0.0


class Clock:
    """Seconds that only methods spend."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def method(self, name: str, *costs: float) -> Callable[[], None]:
        """A method that takes `costs` in turn, warm-up included, and the last one from then on."""
        left = list(costs)

        def run() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run

    def barrier(self) -> None:
        self.log.append("barrier")
        self.now += 1000.0  # waiting for others belongs to nobody's time


def test_methods_are_interleaved_with_a_barrier_before_each_window() -> None:
    clock = Clock()
    methods = {"ours": clock.method("ours", 90, 80, 1, 2, 3), "theirs": clock.method("theirs", 10)}
    timings = interleaved(
        methods, 3, device=torch.device("cpu"), barrier=clock.barrier, clock=clock
    )
    warm, timed = clock.log[:4], clock.log[4:]
    assert warm == ["ours", "ours", "theirs", "theirs"], "warm-up is not timed"
    assert timed == ["barrier", "ours", "barrier", "theirs"] * 3
    assert timings["ours"].seconds == (1, 2, 3) and timings["ours"].median == 2
    assert timings["theirs"].seconds == (10, 10, 10)


def test_a_round_costs_what_the_slowest_rank_took() -> None:
    """`slowest` sees all rounds of all methods at once: one reduction, the same on every rank."""
    clock = Clock()
    asked: list[list[float]] = []

    def slowest(seconds: list[float]) -> list[float]:
        asked.append(list(seconds))
        return [second + 0.5 for second in seconds]

    timings = interleaved(
        {"a": clock.method("a", 1.0), "b": clock.method("b", 2.0)},
        2,
        device=torch.device("cpu"),
        slowest=slowest,
        warmup=0,
        clock=clock,
    )
    assert asked == [[1.0, 1.0, 2.0, 2.0]]
    assert timings["a"].seconds == (1.5, 1.5) and timings["b"].seconds == (2.5, 2.5)


def test_rounds_are_fixed_however_fast_the_clock_runs() -> None:
    """A time budget would let ranks run a collective a different number of times."""
    for cost in (1e-9, 1e9):
        clock = Clock()
        interleaved(
            {"only": clock.method("only", cost)},
            7,
            device=torch.device("cpu"),
            warmup=3,
            clock=clock,
        )
        assert clock.log.count("only") == 10


def test_shuffled_rounds_hold_every_method_once_in_an_order_that_all_ranks_share() -> None:
    logs = []
    for _ in range(2):
        clock = Clock()
        methods = {name: clock.method(name, 1.0) for name in "abcd"}
        timings = interleaved(
            methods, 8, device=torch.device("cpu"), warmup=0, shuffled=True, clock=clock
        )
        assert all(timing.seconds == (1.0,) * 8 for timing in timings.values())
        logs.append(clock.log)
    rounds = [tuple(logs[0][i : i + 4]) for i in range(0, 32, 4)]
    assert logs[0] == logs[1] and all(sorted(names) == list("abcd") for names in rounds)
    followers = {name: set() for name in "abcd"}
    for before, after in zip(logs[0], logs[0][1:], strict=False):
        followers[before].add(after)
    assert all(len(found) > 2 for found in followers.values())
