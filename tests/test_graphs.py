"""DecodeGraphs without a GPU: buckets, padding, who agrees on what, how long a result lives, and
the order of a capture, which a stand-in for torch.cuda records.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from data_head import Arithmetic, Raised, raised, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import pool

import lmhead
from lmhead import graphs as graphs_module
from lmhead.compare import first_difference
from lmhead.graphs import check_buckets, choose_bucket

VOCAB, WIDTH = 11, 8


def _head(rank: int = 0, ranks: int = 1, **options: Any) -> lmhead.LMHead:
    weight, bias = whole(VOCAB, WIDTH, seed=1), whole(VOCAB, seed=2)
    return Arithmetic(bias=True).head(weight, bias, ranks, rank, **options)


def _truth(hidden: torch.Tensor) -> torch.Tensor:
    weight, bias = whole(VOCAB, WIDTH, seed=1), whole(VOCAB, seed=2)
    return Arithmetic(bias=True).truth(hidden, weight, bias).float()


def _captured(*arguments: Any, **options: Any) -> lmhead.DecodeGraphs:
    graphs = lmhead.DecodeGraphs(*arguments, **options)
    graphs.capture(torch.empty(1, WIDTH))
    return graphs


# Buckets.


def test_buckets_are_sorted_each_once_and_valid() -> None:
    assert check_buckets([30, 1, 2, 28, 4, 2]) == (1, 2, 4, 28, 30)
    assert check_buckets(range(1, 4)) == (1, 2, 3)
    for wrong, kind, text in (
        ([], ValueError, "buckets is empty"),
        ([0, 1], ValueError, r"must be positive, got 0 in \[0, 1\]"),
        ([-3], ValueError, "must be positive, got -3"),
        ([1.5], TypeError, "must be ints, got 1.5"),
        ([True], TypeError, "must be ints, got True"),
        (8, TypeError, "must be a list of row counts, got 8"),
        ("8", TypeError, "must be a list of row counts, got '8'"),
    ):
        with pytest.raises(kind, match=text):
            lmhead.DecodeGraphs(lambda x: x, wrong)


@given(st.lists(st.integers(1, 300), min_size=1), st.integers(0, 300))
@settings(deadline=None)
def test_the_least_bucket_that_holds_the_rows(buckets: list[int], rows: int) -> None:
    known = check_buckets(buckets)
    if rows > max(buckets):
        with pytest.raises(ValueError, match=f"{rows} rows are more than the largest bucket"):
            choose_bucket(known, rows)
        return
    chosen = choose_bucket(known, rows)
    assert chosen in buckets and chosen >= rows
    assert not any(rows <= bucket < chosen for bucket in buckets)


def test_negative_rows_have_no_bucket() -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        choose_bucket((1, 2), -1)


# Agreed counts among ranks.


def _two_hundred_steps(rank: int, ranks: int) -> tuple[list[int], int, list[str]]:
    """The bucket of every step, how often this rank was idle, and what was wrong."""
    wrong: list[str] = []
    seen: list[int] = []
    head = _head(rank, ranks)

    def step(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return head(hidden)

    graphs = lmhead.DecodeGraphs(step, (8, 1, 3, 5), heads=(head,))
    graphs.capture(torch.empty(1, WIDTH))
    seen.clear()
    chance, buckets, idle = random.Random(7), [], 0  # the same counts on every rank
    for number in range(200):
        counts = [chance.choice((0, 0, 1, 2, 3, 5, 8)) for _ in range(ranks)]
        counts = [0] * ranks if number == 100 else counts
        rows = counts[rank]
        idle += rows == 0
        hidden = whole(rows, WIDTH, seed=1000 * number + rank)
        agreed = counts if number % 2 else max(counts)
        logits = graphs(hidden, agreed=agreed)
        if logits.shape != (rows, VOCAB):
            wrong.append(f"step {number}: {tuple(logits.shape)} for {counts}")
        if difference := first_difference(logits, _truth(hidden)):
            wrong.append(f"step {number}, {counts}: {difference}")
        ran = seen.pop() if seen else 0
        if ran != (graphs.bucket(max(counts)) if max(counts) else 0) or seen:
            wrong.append(f"step {number}, {counts}: {ran} rows ran")
        buckets.append(ran)
    return buckets, idle, wrong


def test_ranks_agree_on_every_bucket_of_two_hundred_steps() -> None:
    """Random counts on 4 ranks, idle ranks among them, and one step in which nobody has a row."""
    answers = pool(4).run(_two_hundred_steps)
    for buckets, idle, wrong in answers:
        assert wrong == []
        assert idle > 20
        assert buckets == answers[0][0]
    assert set(answers[0][0]) == {0, 1, 3, 5, 8}


def _disagreeing(rank: int, ranks: int) -> list[Raised]:
    os.environ["LMHEAD_CHECK"] = "1"
    head = _head(rank, ranks)
    graphs = _captured(head, (2, 4), heads=(head,))
    graphs(whole(1, WIDTH, seed=rank))
    return [
        raised(lambda: graphs(whole(1, WIDTH, seed=rank), agreed=2 + rank)),
        raised(lambda: graphs(whole(1 + rank, WIDTH, seed=rank), agreed=1)),
    ]


def test_checked_mode_tells_of_different_buckets() -> None:
    """On a GPU a replay holds no check, and would hang."""
    mistake = "this rank has 2 rows, more than the agreed 1"
    for rank, (other, more) in enumerate(pool(2).run(_disagreeing)):
        assert (other.error, more.error) == ("ValueError", "ValueError")
        assert "bucket is 2 on rank 0, 4 on rank 1" in other.text
        told = mistake if rank else f"lmhead replay, call 3: rank 1 refused: ValueError: {mistake}"
        assert more.text == told
        for answer in (other, more):
            assert answer.seconds < 5 and len(answer.collectives) == 1


# Padding and inputs.


def test_rows_beyond_the_real_ones_hold_the_padding() -> None:
    """Whatever an earlier, larger call left there."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(hidden: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
        seen.append((hidden.clone(), slots.clone()))
        return {"hidden": hidden + 1, "more": (slots * 2, "kept")}

    graphs = lmhead.DecodeGraphs(step, (2, 4), padding=(0, -1))
    graphs.capture(torch.ones(1, 3), torch.ones(1, dtype=torch.int64))
    graphs(torch.ones(4, 3), torch.full((4,), 7))
    result = graphs(torch.full((3, 3), 5.0), torch.full((3,), 6))
    hidden, slots = seen[-1]
    assert hidden.tolist() == [[5.0] * 3] * 3 + [[0.0] * 3] and slots.tolist() == [6, 6, 6, -1]
    assert result["hidden"].tolist() == [[6.0] * 3] * 3
    assert result["more"][0].tolist() == [12] * 3 and result["more"][1] == "kept"
    graphs(torch.full((1, 3), 2.0), torch.full((1,), 3))
    assert seen[-1][1].tolist() == [3, -1]
    with pytest.raises(ValueError, match="padding has 2 values for 1 inputs"):
        lmhead.DecodeGraphs(step, (2,), padding=(0, -1)).capture(torch.ones(1, 3))


def test_inputs_unlike_the_examples_are_refused_before_anything_runs() -> None:
    ran: list[int] = []

    def step(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ran.append(hidden.shape[0])
        return hidden

    graphs = lmhead.DecodeGraphs(step, (1, 4))
    hidden, ids = torch.ones(2, 3), torch.ones(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"not been called: call capture\(\*examples\)"):
        graphs(hidden, ids)
    graphs.capture(hidden, ids)
    assert graphs.captured
    ran.clear()
    for inputs, agreed, kind, text in (
        ((hidden,), None, TypeError, "captured with 2 inputs, not 1"),
        ((hidden, [1, 2]), None, TypeError, "input 1 must be a tensor, got list"),
        ((torch.ones(2, 4), ids), None, ValueError, r"must be \[rows, 3\] as captured, got \(2, 4"),
        ((hidden.double(), ids), None, TypeError, "input 0 is torch.float64 but was captured as"),
        ((hidden, ids.to("meta")), None, ValueError, "input 1 is on meta, captured on cpu"),
        ((hidden, ids[:1]), None, ValueError, "input 1 has 1 rows but input 0 has 2"),
        ((torch.ones(5, 3), torch.ones(5, dtype=torch.int64)), None, ValueError, "5 rows are more"),
        ((hidden, ids), 5, ValueError, "5 rows are more than the largest bucket, 4: add a bucket"),
        ((hidden, ids), 1, ValueError, "has 2 rows, more than the agreed 1"),
        ((hidden, ids), [1, 1], ValueError, r"has 2 rows, more than the agreed \[1, 1\]"),
        ((hidden, ids), [2, -1], ValueError, r"non-negative ints, got \[2, -1\]"),
        ((hidden, ids), torch.tensor(2), TypeError, "device tensor would make every step wait"),
    ):
        with pytest.raises(kind, match=text):
            graphs(*inputs, agreed=agreed)
    assert ran == []
    graphs(hidden, ids)
    assert ran == [4]
    head = _head()
    with pytest.raises(ValueError, match=r"must name 1 ranks, got 2: \[1, 1\]"):
        _captured(head, (2,), heads=(head,))(torch.ones(1, WIDTH), agreed=[1, 1])


def test_a_step_that_does_not_fit_is_refused_at_capture() -> None:
    for step, kind, text in (
        (
            lambda x: x[:1],
            ValueError,
            r"given 4 rows and must return .* as many, got \[\(1",
        ),
        (lambda x: x.sum(), ValueError, r"must return tensors of as many, got \[\(\)\]"),
        (lambda x: None, ValueError, r"must return tensors of as many, got \[\]"),
    ):
        graphs = lmhead.DecodeGraphs(step, (2, 4))
        with pytest.raises(kind, match=text):
            graphs.capture(torch.ones(1, 3))
        assert not graphs.captured
        with pytest.raises(RuntimeError, match="call capture"):
            graphs(torch.ones(1, 3))
    graphs = lmhead.DecodeGraphs(lambda x: x, (2,))
    for examples in ((), (torch.ones(()),), ([1],)):
        with pytest.raises(TypeError, match="one example tensor"):
            graphs.capture(*examples)
    with pytest.raises(ValueError, match="warmups must be positive, got 0"):
        graphs.capture(torch.ones(1, 3), warmups=0)
    with pytest.raises(ValueError, match=r"rows of the largest bucket, got \(3, 5\)"):
        lmhead.DecodeGraphs(lambda x: x, (4,), out=torch.ones(3, 5))


# How long a result lives.


@pytest.mark.parametrize("with_out", [False, True])
def test_a_result_lives_until_the_next_call_and_a_clone_for_ever(with_out: bool) -> None:
    head = _head()
    out = torch.empty(4, VOCAB) if with_out else None
    graphs = _captured(head, (1, 2, 4), heads=(head,), out=out)
    first, second = whole(2, WIDTH, seed=3), whole(1, WIDTH, seed=4)
    logits, copy = graphs(first), graphs(first, clone=True)
    assert first_difference(logits, _truth(first)) is None
    held = logits.data_ptr()
    graphs(second)  # another bucket, in the same memory
    assert first_difference(logits[:1], _truth(second)) is None
    assert first_difference(copy, _truth(first)) is None
    assert graphs(first).data_ptr() == held != copy.data_ptr()
    if out is not None:
        assert held == out.data_ptr()


def test_capture_again_and_close_twice() -> None:
    head = _head()
    graphs = _captured(head, (2,), heads=(head,))
    report = graphs.capture(torch.empty(5, WIDTH))
    assert report.buckets == (2,) and report.pool_bytes is None
    assert report.warmups[0].rows == ((2,),)
    assert str(report).startswith("buckets [2]: eager; ready for rows [[2]]")
    hidden = whole(2, WIDTH, seed=5)
    assert first_difference(graphs(hidden), _truth(hidden)) is None
    graphs.close()
    graphs.close()
    assert not graphs.captured
    with pytest.raises(RuntimeError, match="call capture"):
        graphs(hidden)


def test_inference_mode_may_come_and_go() -> None:
    """Buffers made under it would refuse to be written outside."""
    head = _head()
    with torch.inference_mode():
        graphs = _captured(head, (2,), heads=(head,))
        hidden = whole(2, WIDTH, seed=6)
        assert first_difference(graphs(hidden), _truth(hidden)) is None
    hidden = whole(1, WIDTH, seed=7)
    assert first_difference(graphs(hidden), _truth(hidden)) is None


# The order of a capture, on a stand-in for torch.cuda.


class StandIn:
    """What DecodeGraphs asks of torch.cuda, recorded; a "graph" runs its step again on replay."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.pools: set[Any] = set()
        self.stream = "caller's"
        self.capturing = False
        self.broken_end = False

    def graph_class(outer) -> type:
        class Graph:
            def replay(self) -> None:
                outer.events.append("replay")

            def reset(self) -> None:
                outer.events.append("reset")

        return Graph

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any) -> Iterator[None]:
        self.pools.add(pool)
        self.stream, self.capturing = "capture's", True
        try:
            yield
        except BaseException:
            if self.broken_end:  # cudaStreamEndCapture of a broken capture
                raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
            raise
        finally:
            self.capturing = False
        self.stream = "caller's"

    def set_stream(self, stream: Any) -> None:
        self.stream = stream

    @contextlib.contextmanager
    def active(self) -> Iterator[StandIn]:
        stream = mock.MagicMock()
        patches = {
            "CUDAGraph": self.graph_class(),
            "graph": self.graph,
            "graph_pool_handle": lambda: (0, len(self.pools)),
            "set_stream": self.set_stream,
            "current_stream": lambda: "caller's" if self.capturing else stream,
            "Stream": mock.MagicMock(),
            "stream": lambda _: contextlib.nullcontext(),
            "device": lambda _: contextlib.nullcontext(),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "memory_reserved": lambda: 1000 * len(self.events),
        }
        stream.wait_stream = lambda _: None
        with (
            mock.patch.multiple(torch.cuda, **patches),
            mock.patch.object(graphs_module, "_can_capture", lambda device: True),
        ):
            yield self


def test_captures_run_largest_first_into_one_pool_after_all_warmups() -> None:
    cuda = StandIn()

    def step(hidden: torch.Tensor) -> torch.Tensor:
        cuda.events.append(("capture" if cuda.capturing else "warm", hidden.shape[0]))
        return hidden * 2

    graphs = lmhead.DecodeGraphs(step, (1, 4, 2))
    with cuda.active():
        report = graphs.capture(torch.ones(1, 3), warmups=2)
        warm = [("warm", rows) for rows in (4, 4, 2, 2, 1, 1)]
        assert cuda.events == warm + [("capture", rows) for rows in (4, 2, 1)]
        assert len(cuda.pools) == 1 and report.pool_bytes == 3000
        cuda.events.clear()
        assert graphs(torch.ones(3, 3)).shape == (3, 3)
        assert cuda.events == ["replay"], "the step itself does not run again"
        assert graphs(torch.ones(0, 3)).shape == (0, 3)
        assert graphs(torch.ones(0, 3), agreed=[0, 2]).shape == (0, 3)
        assert cuda.events == ["replay"] * 2, "an idle rank replays; where all are, nobody does"
        graphs.close()
        assert cuda.events == ["replay"] * 2 + ["reset"] * 3


@pytest.mark.parametrize("broken_end", [False, True])
def test_a_failed_capture_says_why_and_leaves_eager_calls_working(broken_end: bool) -> None:
    cuda = StandIn()
    cuda.broken_end = broken_end
    head = _head()

    def step(hidden: torch.Tensor) -> torch.Tensor:
        if cuda.capturing and hidden.shape[0] == 2:
            raise ValueError("a host read")
        return head(hidden)

    graphs = lmhead.DecodeGraphs(step, (1, 2, 4), heads=(head,))
    hidden = whole(2, WIDTH, seed=8)
    with cuda.active():
        with pytest.raises(
            RuntimeError, match=r"capturing 2 rows .* ValueError: a host read"
        ) as caught:
            graphs.capture(torch.empty(1, WIDTH))
        assert isinstance(caught.value.__cause__, ValueError)
        assert "may be called eagerly" in str(caught.value)
        assert cuda.events.count("reset") == 1, "the graph of 4 rows is given back"
        assert not graphs.captured
        with pytest.raises(RuntimeError, match="a host read: call capture"):
            graphs(hidden)
        assert first_difference(step(hidden), _truth(hidden)) is None
    graphs.capture(torch.empty(1, WIDTH))  # eager again
    assert first_difference(graphs(hidden), _truth(hidden)) is None


def test_a_head_that_is_not_warm_fails_the_capture_and_names_the_remedy() -> None:
    """Under the stand-in, as if the stream were capturing."""
    from lmhead import ops

    cuda, head = StandIn(), _head()
    graphs = lmhead.DecodeGraphs(head, (1, 3))  # `heads` was forgotten
    with cuda.active(), mock.patch.object(ops, "is_capturing", lambda device: cuda.capturing):
        with pytest.raises(RuntimeError, match=r"capturing 3 rows .* warmup\(rows=\[3\]\)"):
            graphs.capture(torch.empty(1, WIDTH))
        assert cuda.stream == "caller's" or not cuda.capturing
        head.warmup((1, 3))
        graphs.capture(torch.empty(1, WIDTH))
        assert graphs.captured
