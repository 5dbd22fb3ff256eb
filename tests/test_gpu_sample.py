"""Draws by compiled kernels on a CUDA device, against the same twins: run with `pytest -m gpu`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from data_head import whole
from data_sample import mixed
from drawing import draw, fused
from probes import noise_probe

import lmhead
from lmhead import noise
from lmhead.devices import arch_of
from lmhead.kernels import gemm
from lmhead.kernels import sample as kernels
from lmhead.kernels.config import GemmShape, default_gemm

pytestmark = pytest.mark.gpu


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


def test_noise_and_weights_have_the_twins_bits() -> None:
    """What contraction into one rounding would change."""
    ids = torch.arange(4096)
    row = torch.tensor([-(2**40) - 3, 2**33 + 7])
    below = torch.linspace(-70, 0, 4096)
    word = torch.empty(4096, dtype=torch.int32, device="cuda")
    gumbel, weight = torch.empty(4096, device="cuda"), torch.empty(4096, device="cuda").long()
    given = ids.int().cuda(), row.view(torch.int32).cuda(), below.cuda()
    noise_probe[(1,)](*given, word, gumbel, weight, 4096)
    want = noise.words(row[:1], row[1:], ids)
    assert torch.equal(word.cpu().long() & 0xFFFFFFFF, want)
    assert torch.equal(gumbel.cpu(), noise.gumbel(want))
    assert torch.equal(weight.cpu(), noise.weight(below))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocab", "ranks", "rows"), [(3001, 2, 36), (30, 8, 9), (129280, 8, 36)])
def test_messages_and_tokens_are_the_twins(
    vocab: int, ranks: int, rows: int, dtype: torch.dtype
) -> None:
    logits = (normal(rows, vocab, seed=vocab) * 3).to(dtype)
    logits[2, vocab // 2] = math.nan
    logits[5] = -math.inf
    given = {name: value.cuda() for name, value in mixed(rows, vocab, vocab).items()}
    asked = draw(logits, ranks, logprobs=3, **given)
    messages = asked.by_twin()
    asked.check(asked.by_kernels(), messages)
    asked.check_merged(messages)


@pytest.mark.parametrize("parameters", [{}, {"top_k": 20}, {"top_p": 0.9, "logprobs": 2}])
@pytest.mark.parametrize("rows", [1, 36, 100])
def test_a_gemm_that_summarises_shows_what_a_scan_of_its_logits_shows(
    rows: int, parameters: dict[str, Any]
) -> None:
    arch, shard = arch_of(torch.device("cuda")), 1000
    config = default_gemm(GemmShape(rows, shard, 512, 2), arch)
    if not kernels.can_fuse(config):
        pytest.skip(f"{config} on {arch.name} leaves the summary to a scan")
    hidden, weight = normal(rows, 512, seed=1).bfloat16(), normal(shard, 512, seed=3).bfloat16()
    partial = torch.empty(rows, shard, dtype=torch.bfloat16, device="cuda")
    gemm.gemm(hidden, weight, out=partial, config=config, scale=0.5)
    asked = draw(torch.zeros(rows, 2 * shard, device="cuda"), 2, **parameters)
    write = asked.form.candidates > 1 or asked.form.top_sent > 0
    for rank in range(2):
        where = {"first": rank * shard, "held": asked.held(rank)}
        scanned = torch.empty(kernels.summary_shape(rows, asked.held(rank)), device="cuda")
        kernels.scan(partial, asked.records.words, scanned, asked.layout(), **where)
        want, got = asked.fresh()[rank], asked.fresh()[rank]
        asked.pick(scanned, partial, want, rank, kernels.SCAN_COLUMNS)
        written = torch.empty_like(partial)
        summary = fused(hidden, weight, None, asked, rank, written, config, write=write)
        asked.pick(summary, written, got, rank, config.block_v)
        asked.check(got[None], want[None])


def test_a_head_draws_in_a_cuda_graph_by_the_seeds_that_its_tensors_then_hold() -> None:
    """G11: no seed is read from the host, so each replay draws as an eager call would."""
    head = lmhead.LMHead(whole(1000, 64, seed=1).bfloat16().cuda(), 1000, scale=0.02)
    hidden = whole(8, 64, seed=2).bfloat16().cuda()
    seeds, positions = torch.arange(8, device="cuda"), torch.zeros(8, device="cuda").long()
    given = {"seeds": seeds, "positions": positions, "temperature": 1.5}
    head.warmup(8, sample=given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = head.sample(hidden, **given)
    drawn = []
    for position in range(3):
        positions.fill_(position)
        graph.replay()
        assert torch.equal(ids, head.sample(hidden, **given))
        drawn.append(ids.tolist())
    assert drawn[0] != drawn[1]
