"""The whole head on four CPU ranks, under pytest-benchmark: `make bench`.

Hidden gather, GEMM, exchange and reassembly, and draws of tokens, at SmolLM2-135M's sizes in bf16,
our routes beside the peers of `lmhead.bench.peers`, all checked and timed interleaved in one run by
`lmhead.bench.protocol`; the table has the slowest rank's seconds of every round.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from lmhead.bench.cases import MODELS, Case
from lmhead.bench.protocol import Settings
from lmhead.bench.replayed import ROUNDS, measured, timer

MODEL = MODELS["smollm2-135m"]
NAMES = (
    *("lmhead", "lmhead-fp32", "lmhead-all-gather", "a", "a-lean", "b", "c", "d", "e", "g", "h"),
    *("candidates", "lmhead-torch-lean", "a-torch-lean"),
)
SAMPLE = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


@functools.cache
def rounds_of(rows: int) -> dict[str, list[float]]:
    case = Case(MODEL.name, MODEL.vocab, MODEL.hidden, 4, rows)
    settings = Settings(False, NAMES, rounds=ROUNDS, stages=False, sample=SAMPLE)
    return measured(case, settings)


@pytest.mark.benchmark(timer=timer)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 36])
def test_head(benchmark: Any, rows: int, name: str) -> None:
    benchmark.group = f"head, 4 ranks x {rows} rows, V = {MODEL.vocab}, H = {MODEL.hidden}, bf16"
    timer.give(benchmark, rounds_of(rows)[name])
