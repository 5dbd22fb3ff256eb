"""Reassembly on the CPU against permute + reshape, under pytest-benchmark: `make bench`.

Both start from the same received blocks, DeepSeek-V4-Pro's at 8 ranks and 36 rows per rank in bf16
(9.3 MB), and write into memory that exists already, so that only the data movement is compared.
The result is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmhead import compare, reference

RANKS, ROWS, SHARD = 8, 36, 16160


def _ours(received: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return reference.reassemble_into(received, out)


def _permute_reshape(received: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(received.permute(1, 0, 2).reshape(out.shape))


@pytest.mark.parametrize("method", [_ours, _permute_reshape])
def test_reassemble(benchmark: Any, method: Callable[..., torch.Tensor]) -> None:
    benchmark.group = "reassemble [8, 36, 16160] bf16"
    received = torch.randn(RANKS, ROWS, SHARD).to(torch.bfloat16)
    out = torch.full((ROWS, RANKS * SHARD), float("nan"), dtype=torch.bfloat16)
    want = torch.cat(list(received), dim=1)
    assert compare.first_difference(method(received, out), want) is None
    benchmark(method, received, out)
