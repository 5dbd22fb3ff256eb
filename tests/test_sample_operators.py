"""Draws as operators, in compiled code, under a capture and under LMHEAD_CHECK=1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_cases import Caught, caught, checked_mode
from data_head import FLOATS, normal, raised, shard_of
from data_sample import edits, mixed
from guards import Trail, capture_safe, violations
from ranks import pool
from torch._dynamo.utils import counters

import lmhead
from lmhead import candidates, ops, sample_operators, sampling
from lmhead.sampling import Request

BF16, _, FP32 = FLOATS
VOCAB, WIDTH, ROWS = 41, 8, 3


def _head(rank: int, ranks: int, **options: Any) -> lmhead.LMHead:
    weight = shard_of(normal(VOCAB, WIDTH, seed=9), ranks, rank)
    return lmhead.LMHead(weight, VOCAB, **options)


def _own(rank: int, rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    return normal(rows, WIDTH, seed=seed + rank) * 2


def _full(rank: int, rows: int = ROWS) -> torch.Tensor:
    """One rank's full logits, by the whole weight."""
    return _own(rank, rows) @ normal(VOCAB, WIDTH, seed=9).t()


def _columns(rank: int, ranks: int, rows: int = ROWS) -> torch.Tensor:
    """Partial logits [T, S]."""
    everyone = torch.cat([_full(other, rows) for other in range(ranks)])
    return shard_of(everyone.t().contiguous(), ranks, rank).t().contiguous()


# Parameters whose forms differ in every part of a message.
REQUESTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "greedy": lambda rows: {"temperature": 0.0},
    "drawn": lambda rows: {},
    "top-k, logprobs": lambda rows: {"top_k": 5, "top_p": 0.9, "logprobs": 3},
    "mixed": lambda rows: mixed(rows, VOCAB, 1),
    "top-p, missing": lambda rows: {"top_p": 0.99, "candidates": 2, "fallback": False},
    "edited, asked": lambda rows: {
        **edits(rows, VOCAB, 2),
        "top_k": 4,
        "logprobs": 0,
        "logprob_ids": torch.arange(2 * rows).view(rows, 2),
    },
}


def _records(given: dict[str, Any], rows: int, rank: int, ranks: int) -> tuple[Any, ...]:
    """What both operators take behind their first argument."""
    shard = -(-VOCAB // ranks)
    device = torch.device("cpu")
    # Operators are functions of their arguments: opcheck runs them again and compares.
    own = {"seeds": 11, "positions": torch.arange(rows), **given}
    request = Request(**own)
    form = request.form(VOCAB, VOCAB if ranks == 1 else shard)
    unseeded = sampling.unseeded(rows, rank, device)
    records = request.records(rows, form, VOCAB, device, unseeded)
    return records.words, form.to_list(), request.mask, False


def _opcheck(rank: int, ranks: int) -> int:
    name = dist.group.WORLD.group_name if ranks > 1 else ""
    weight = shard_of(normal(VOCAB, WIDTH, seed=9), ranks, rank)
    checks = 0
    for counts in (None, [2, 0, 3, 1][:ranks]):
        rows = ROWS if counts is None else counts[rank]
        total = ranks * ROWS if counts is None else sum(counts)
        for request in REQUESTS.values():
            records = _records(request(rows), rows, rank, ranks)
            head = (weight, None, VOCAB, name, ranks, 1.0, None, FP32, FP32, counts, "", "")
            torch.library.opcheck(sample_operators.sample_op, (_own(rank, rows), *records, *head))
            partial = normal(total, weight.shape[0], seed=5)
            rest = (VOCAB, name, ranks, counts, "", "")
            torch.library.opcheck(sample_operators.sample_exchange_op, (partial, *records, *rest))
            checks += 2
    return checks


def test_opcheck_in_one_process() -> None:
    assert _opcheck(0, 1) == 4 * len(REQUESTS)


def test_opcheck_among_ranks() -> None:
    assert pool(2).run(_opcheck) == [4 * len(REQUESTS)] * 2


def _differences(got: Any, want: Any) -> list[str]:
    """Which results of two draws differ; the route is not compared."""
    wrong = []
    for name in ("ids", "status", "logprobs", "asked_logprobs", "top_ids", "top_logprobs"):
        one, other = getattr(got, name), getattr(want, name)
        if one is None or other is None:
            same = one is other
        else:
            same = torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        if not same:
            wrong.append(f"{name} is {one}, not {other}")
    return wrong


def _compiled(rank: int, ranks: int, backend: str) -> list[str]:
    """Every request by compiled code is the eager one, from hidden rows and from partials."""
    wrong = []
    head = _head(rank, ranks)
    hidden, partial = _own(rank), _columns(rank, ranks)
    for name, request in REQUESTS.items():
        given = {"seeds": torch.arange(ROWS), "positions": torch.arange(ROWS) + 3, **request(ROWS)}
        for what, step, source in (
            ("head", lambda x, given=given: head.sample(x * 1.5, details=True, **given), hidden),
            (
                "partial",
                lambda x, given=given: lmhead.sample_exchange(x * 1.5, vocab_size=VOCAB, **given),
                partial,
            ),
        ):
            torch._dynamo.reset()
            counters.clear()
            with torch.no_grad():
                got = torch.compile(step, fullgraph=True, backend=backend)(source)
                want = step(source)
            wrong += [f"{name}, {what}: {text}" for text in _differences(got, want)]
            graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            if graphs != (1, 0):
                wrong.append(f"{name}, {what}: {graphs} graphs and breaks")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_draws_are_the_eager_ones(ranks: int) -> None:
    assert pool(ranks).run(_compiled, "aot_eager") == [[]] * ranks


@torch.no_grad()
def _values(rank: int, ranks: int) -> list[str]:
    """One graph of Inductor's for other values, seeds and row counts."""
    wrong = []
    torch._dynamo.reset()
    counters.clear()
    head = _head(rank, ranks)

    def step(hidden: torch.Tensor, heat: torch.Tensor, k: torch.Tensor, seeds: torch.Tensor) -> Any:
        given = {"temperature": heat, "top_k": k, "seeds": seeds, "positions": seeds + 1}
        return head.sample(hidden * 2, **given)

    compiled = torch.compile(step, fullgraph=True)
    for number in range(6):
        rows = 4 + number % 3
        known = mixed(rows, VOCAB, number)
        given = [_own(rank, rows, number)]
        given += [known[name] for name in ("temperature", "top_k", "seeds")]
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, 0)
        got, want = compiled(*given), step(*given)
        if not torch.equal(got, want):
            wrong.append(f"call {number}: {got} is not {want}")
    graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return wrong if graphs == (1, 0) else [*wrong, f"{graphs} graphs and breaks"]


def test_other_values_compile_nothing_anew() -> None:
    assert pool(2).run(_values) == [[]] * 2


@torch.no_grad()
def _unseeded(rank: int, ranks: int, compile: bool) -> list[list[int]]:
    """Three draws of 32 rows whose logits are all the same, after the same manual seed."""
    head = lmhead.LMHead(torch.zeros(50, WIDTH), 50 * ranks)
    torch._dynamo.reset()
    step = lambda x: head.sample(x)  # noqa: E731
    if compile:
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.manual_seed(4)
    return [step(torch.zeros(32, WIDTH)).tolist() for _ in range(3)]


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_unseeded_rows_differ_between_rows_calls_and_ranks(compile: bool) -> None:
    found = pool(2).run(_unseeded, compile)
    again = pool(2).run(_unseeded, compile)
    draws = [tuple(ids) for rank in found for ids in rank]
    assert len(set(draws)) == 6, "two calls or ranks draw the same noise"
    for ids in draws:
        assert len(set(ids)) > 16, "the rows of one call draw the same noise"
    assert found == again, "torch.manual_seed makes it come again"


def _captured(rank: int, ranks: int) -> list[str]:
    """Warmed draws under the guard, by the branch that a CUDA device takes, against the CPU's own.

    Temporaries come from the graph's pool; nothing else happens that a capture cannot hold.
    """
    wrong = []
    as_on_a_device = mock.patch.object(candidates, "_chosen", lambda mask: mask)
    for name, request in REQUESTS.items():
        head = _head(rank, ranks)
        given = {"seeds": torch.arange(ROWS), "positions": torch.arange(ROWS), **request(ROWS)}
        if name == "mixed":
            given["fallback"] = False
        hidden, trail = _own(rank), Trail()
        want = head.sample(hidden, details=True, **given)

        def call(head: Any = head, hidden: Any = hidden, given: Any = given) -> Any:
            return head.sample(hidden, details=True, **given)

        with as_on_a_device:
            with trail.recording():
                head.warmup(ROWS, sample=given)
            got, found = violations(call, trail)
        wrong += [f"{name}: {kind}: {text}" for kind, text in found if kind != "allocation"]
        wrong += [f"{name}: {text}" for text in _differences(got, want)]
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_warmed_draws_are_capture_safe(ranks: int) -> None:
    assert pool(ranks).run(_captured) == [[]] * ranks


def _refusals(rank: int, ranks: int) -> list[Any]:
    head = _head(rank, ranks)
    hidden, found = _own(rank), []
    loose = {"top_p": 0.9, "candidates": 2}
    head.warmup(ROWS, sample=loose)
    head.warmup(ROWS, sample={"temperature": 0.5})
    partial, work = _columns(rank, ranks), lmhead.Workspace()
    with mock.patch.object(ops, "is_capturing", lambda device: True):
        for call in (
            lambda: head.sample(hidden, top_k=3),
            lambda: head.sample(hidden, **loose),
            lambda: lmhead.sample_exchange(partial, vocab_size=VOCAB, workspace=work, **loose),
        ):
            found.append(raised(call))
        found.append(raised(lambda: head.sample(hidden, temperature=0.5)))
        found.append(raised(lambda: head.sample(hidden, temperature=0.8)))
    return found


def test_a_capture_refuses_what_it_cannot_hold() -> None:
    """A form that was not warmed up, and a fallback whose need is not known: before any collective,
    with the remedy.  Another number for the same form is no other form.
    """
    for form, fallback, partial, warm, other in pool(2).run(_refusals):
        assert form.error == "RuntimeError" and not form.collectives
        assert "warmup(rows=[3], sample=those parameters)" in form.text
        for found in (fallback, partial):
            assert found.error == "RuntimeError" and not found.collectives
            assert "pass fallback=False" in found.text and "2 candidates" in found.text
        assert warm.error == other.error == ""


def _disagree(rank: int, ranks: int) -> dict[str, Caught]:
    """What rank 1 does otherwise than the others, under LMHEAD_CHECK=1."""
    checked_mode()
    head = _head(rank, ranks)
    hidden, odd, found = _own(rank), rank == 1, {}
    heat = torch.full((ROWS,), math.nan if odd else 1.0)
    partial = _columns(rank, ranks)
    for name, given in {
        "k": {"top_k": 7 if odd else 5},
        "k or none": {"top_k": 7} if odd else {},
        "candidates": {"top_p": 0.5, "candidates": 3 if odd else 4},
        "logprobs": {"logprobs": 2 if odd else 0},
        "mask": {"mask": torch.ones(ROWS, VOCAB, dtype=torch.bool)} if odd else {},
        "tensor": {"top_k": torch.full((ROWS,), 5) if odd else 5},
        "fallback": {"top_p": 0.5, "candidates": 4, "fallback": odd},
        "route": {"route": "all_gather"} if odd else {},
        "NaN": {"temperature": heat},
        "a number": {"min_p": 1.5 if odd else 0.5},
    }.items():
        found[name] = caught(lambda given=given: head.sample(hidden, **given))
        if name != "route":
            found[f"{name}, partial"] = caught(
                lambda given=given: lmhead.sample_exchange(partial, vocab_size=VOCAB, **given)
            )
    found["same"] = caught(lambda: head.sample(hidden, top_k=5).tolist())
    return found


def test_ranks_that_ask_for_different_draws_all_raise() -> None:
    found = pool(3).run(_disagree)
    for name in found[0]:
        errors = [rank[name] for rank in found]
        if name == "same":
            assert all(error.error == "" for error in errors)
            continue
        assert [error.error for error in errors] == ["ValueError"] * 3, (name, errors)
        if name.startswith("NaN"):
            assert all("temperature must be finite" in error.text for error in errors), errors
        assert all(error.seconds < 30 for error in errors)


BAD: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"temperature": math.nan}, "ValueError", "temperature"),
    ({"temperature": math.inf}, "ValueError", "temperature"),
    ({"temperature": torch.tensor([1.0, math.inf])}, "ValueError", "inf in row 1"),
    ({"temperature": torch.tensor([math.nan, 1.0])}, "ValueError", "nan in row 0"),
    ({"temperature": torch.ones(3)}, "ValueError", "[2], got (3,)"),
    ({"temperature": None}, "TypeError", "temperature"),
    ({"temperature": "hot"}, "TypeError", "str"),
    ({"top_k": 2.0}, "TypeError", "top_k"),
    ({"top_k": True}, "TypeError", "bool"),
    ({"top_k": torch.tensor([2.0, 3.0])}, "TypeError", "float32"),
    ({"top_k": torch.tensor([2, -2])}, "ValueError", "-2 in row 1"),
    ({"top_p": math.nan}, "ValueError", "top_p"),
    ({"top_p": 1.01}, "ValueError", "1.01"),
    ({"top_p": torch.tensor([0.5, 0.0])}, "ValueError", "0.0 in row 1"),
    ({"min_p": -0.1}, "ValueError", "-0.1"),
    ({"min_p": torch.tensor([math.nan, 0.1])}, "ValueError", "nan in row 0"),
    ({"repetition_penalty": 0.0, "output_tokens": torch.tensor([[1], [2]])}, "ValueError", "0.0"),
    ({"frequency_penalty": 0.5}, "ValueError", "penalties need"),
    ({"seeds": 1.5, "positions": 0}, "TypeError", "seeds"),
    ({"seeds": torch.tensor([1, 2])}, "ValueError", "seeds need positions"),
    ({"logprobs": -1}, "ValueError", "-1"),
    ({"logprobs": 12}, "ValueError", "0 to 11"),
    ({"logprob_ids": torch.tensor([[0], [11]])}, "ValueError", "11 in row 1"),
    ({"logprob_ids": torch.tensor([0, 1])}, "ValueError", "[2, width]"),
    ({"logit_bias": torch.ones(2, 2)}, "TypeError", "pair"),
    (
        {"logit_bias": (torch.tensor([[1], [2]]), torch.tensor([[1.0], [math.nan]]))},
        "ValueError",
        "NaN",
    ),
    ({"candidates": 0}, "ValueError", "candidates"),
    ({"candidates": 2.0}, "ValueError", "candidates"),
    ({"route": "express"}, "ValueError", "express"),
    ({"heat": 1.0}, "TypeError", "heat"),
)


@pytest.mark.parametrize(("given", "error", "text"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_parameters_are_refused_before_any_collective(
    given: dict[str, Any], error: str, text: str
) -> None:
    head = lmhead.LMHead(normal(11, WIDTH, seed=0), 11)
    hidden, partial = normal(2, WIDTH, seed=1), normal(2, 11, seed=2)
    for call in (
        lambda: head.sample(hidden, **given),
        lambda: lmhead.sample_exchange(partial, vocab_size=11, **given),
    ):
        found = raised(call)
        assert found.error == error and text in found.text, found
        assert not found.collectives
    assert head.sample(hidden).shape == (2,)


def test_the_guard_sees_a_draw_that_waits() -> None:
    """A head that looks at a value of its draw while a graph is captured does not pass."""
    head = lmhead.LMHead(normal(11, WIDTH, seed=0), 11)
    hidden, trail = normal(2, WIDTH, seed=1), Trail()
    with trail.recording():
        head.warmup(2, sample={"top_k": 3})
    with pytest.raises(AssertionError, match="sync"):
        capture_safe(lambda: head.sample(hidden, top_k=3).tolist(), trail)
