"""What `deterministic=True` costs on the CPU, under pytest-benchmark: `make bench`.

One rank's whole head at a small model's sizes, for one row and for 32, beside the same head without
it, on one thread as where several ranks share a machine.  Both are checked before they are timed:
against fp64, and the deterministic one for a row's bits alone and among the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lmhead
from lmhead import compare

VOCAB, HIDDEN = 16160, 2048


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("one_thread")
def test_deterministic(benchmark: Any, dtype: torch.dtype, rows: int, deterministic: bool) -> None:
    benchmark.group = f"head [{rows}, {HIDDEN}] -> [{rows}, {VOCAB}] {dtype}"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    head = lmhead.LMHead(weight, VOCAB, deterministic=deterministic)
    head.warmup(rows=(rows, 1))
    with torch.no_grad():
        logits = head(hidden)
        truth = hidden.double() @ weight.double().t()
        by_torch = (hidden.float() @ weight.float().t()).to(dtype)
        baseline = compare.relative_error(by_torch, truth)
        assert compare.relative_error(logits, truth) <= 2 * baseline
        if deterministic:
            assert compare.first_difference(head(hidden[-1:]), logits[-1:]) is None
        benchmark(head, hidden)
