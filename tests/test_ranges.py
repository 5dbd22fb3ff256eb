"""The stages of a call in a profile: named, in order, and free where nobody profiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from data_head import Arithmetic, whole
from ranks import pool
from torch.profiler import ProfilerActivity, profile

import lmhead
from lmhead import ranges

WIDTH = 8


def test_a_benchmark_is_told_of_stages_that_have_ended() -> None:
    head = lmhead.LMHead(torch.eye(4), 4)
    told: list[str] = []
    with ranges.told(told.append):
        head.sample(torch.eye(4), temperature=0.0)
    assert told == ["gemm", "reduce", "merge"]
    head.sample(torch.eye(4), temperature=0.0)
    assert len(told) == 3


def _stages(call: Callable[[], Any]) -> list[str]:
    """The ranges of ours in a CPU profile of `call`, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        call()
    events = [event for event in prof.events() if event.name.startswith("lmhead::")]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def _traces(rank: int, ranks: int) -> dict[str, list[str]]:
    found = {}
    everyone = whole(3 * ranks, WIDTH, seed=3)
    for vocab, route in ((12, "all_to_all"), (11, "all_gather")):
        weight, bias = whole(vocab, WIDTH, seed=1), whole(vocab, seed=2)
        head = Arithmetic().head(weight, bias, ranks, rank, route=route)
        partial = everyone @ head.weight.t()
        found[f"head, {route}"] = _stages(lambda head=head: head(everyone[:3]))
        found[f"gathered, {route}"] = _stages(lambda head=head: head.forward_gathered(everyone))
        found[f"exchange, {route}"] = _stages(
            lambda vocab=vocab, route=route, partial=partial: lmhead.exchange(
                partial, vocab_size=vocab, route=route
            )
        )
    in_place = Arithmetic().head(
        whole(12, WIDTH, seed=1), whole(12, seed=2), ranks, rank, kernels="triton"
    )
    found["head, in place"] = _stages(lambda: in_place(everyone[:3]))
    compiled = torch.compile(in_place, fullgraph=True, backend="aot_eager")
    compiled(everyone[:3])
    found["head, compiled"] = _stages(lambda: compiled(everyone[:3]))
    return found


def test_a_profile_reads_gather_gemm_exchange_reassemble() -> None:
    stages = [f"lmhead::{stage}" for stage in ("gather", "gemm", "exchange", "reassemble")]
    for found in pool(2).run(_traces):
        assert len(found) == 8
        for what, names in found.items():
            start = {"gathered": 1, "exchange": 2}.get(what.split(",")[0], 0)
            # The operator's own name is an event as well, in compiled code.
            assert [name for name in names if name != "lmhead::logits"] == stages[start:], what


def test_nothing_is_recorded_without_a_profiler() -> None:
    with mock.patch.object(ranges, "record_function", side_effect=AssertionError):
        assert ranges.stage("gemm") is ranges.stage("exchange")
        with profile(activities=[ProfilerActivity.CPU]), pytest.raises(AssertionError):
            ranges.stage("gemm")


def test_nvtx_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMHEAD_NVTX=1, for tools that do not run torch's profiler."""
    pushed: list[str] = []

    @contextlib.contextmanager
    def push(name: str):  # type: ignore[no-untyped-def]
        pushed.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", push)
    head = lmhead.LMHead(whole(12, WIDTH, seed=1), 12)
    head(whole(2, WIDTH, seed=2))
    assert pushed == []
    monkeypatch.setattr(ranges, "NVTX", True)
    head(whole(2, WIDTH, seed=2))
    assert pushed == ["lmhead::gemm"], "one rank gathers, exchanges and reassembles nothing"
