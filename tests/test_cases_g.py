"""Cases G: CUDA graphs and memory.

What only a GPU can show is marked `gpu` and skipped elsewhere; its CPU part stands beside it.  G9
and G10 need symmetric memory, which nothing here uses.  G11, a captured sampler, comes with the
sampler.
"""

from __future__ import annotations

import ast
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_cases import caught, integers, same, shard_of, truth
from guards import Living, Trail
from ranks import pool

import lmhead
from lmhead import ops
from lmhead.kernels import gemm, reassemble, tiles

ROOT = Path(__file__).resolve().parent.parent
VOCAB, WIDTH = 12, 8


def _head(rank: int = 0, ranks: int = 1, vocab: int = VOCAB, **options: Any) -> lmhead.LMHead:
    weight = shard_of(integers(vocab, WIDTH, seed=1), ranks, rank)
    device, dtype = options.pop("device", "cpu"), options.pop("dtype", torch.float32)
    return lmhead.LMHead(weight.to(device, dtype), vocab, **options)


def _want(hidden: torch.Tensor, vocab: int = VOCAB) -> torch.Tensor:
    return truth(hidden, integers(vocab, WIDTH, seed=1)).float()


def _job_g1(rank: int, ranks: int) -> list[Any]:
    head = _head(rank, ranks)
    graphs = lmhead.DecodeGraphs(head, (2,))
    with mock.patch.object(ops, "is_capturing", lambda device: True):
        first = caught(lambda: head(torch.ones(2, WIDTH)))
        unready = caught(lambda: graphs(torch.ones(2, WIDTH)))
    head.warmup(2)
    with mock.patch.object(ops, "is_capturing", lambda device: True):
        ready = head(torch.ones(2, WIDTH))
    same(ready, _want(torch.ones(2, WIDTH)))
    return [first, unready]


def test_g1_capture_as_the_first_call_names_the_remedy() -> None:
    for first, unready in pool(2).run(_job_g1):
        assert first.error == unready.error == "RuntimeError"
        assert "call warmup(rows=[2]) before the capture" in first.text
        assert "call capture(*examples)" in unready.text


@pytest.mark.gpu
def test_g1_a_warmed_head_is_captured_as_the_very_first_call() -> None:
    """N = 1 over NCCL; test_gpu_graphs.py does it in a fresh process."""
    head = _head(device="cuda", dtype=torch.bfloat16)
    hidden = integers(3, WIDTH, seed=2).to("cuda", torch.bfloat16)
    head.warmup(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = head(hidden)
    graph.replay()
    same(logits.float().cpu(), _want(hidden.float().cpu()))


@pytest.mark.gpu
def test_g2_an_eager_call_after_a_failed_capture_is_right() -> None:
    """A host read inside the capture breaks it; the error names it, and the head goes on."""
    head = _head(device="cuda", dtype=torch.bfloat16)
    hidden = integers(3, WIDTH, seed=2).to("cuda", torch.bfloat16)

    def step(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(hidden)
        if torch.cuda.is_current_stream_capturing():
            logits.sum().item()
        return logits

    graphs = lmhead.DecodeGraphs(step, (1, 3), heads=(head,))
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match=r"capturing 3 rows .* failed"):
        graphs.capture(hidden)
    assert torch.cuda.current_stream() == stream
    same(head(hidden).float().cpu(), _want(hidden.float().cpu()))
    with pytest.raises(RuntimeError, match="call capture"):
        graphs(hidden)


# The CPU part of G2 is in test_graphs.py: a failed capture on a stand-in for torch.cuda.


def _job_g3(rank: int, ranks: int) -> list[str]:
    wrong: list[str] = []
    for vocab, kernels, dtype in (
        (12, "triton", torch.bfloat16),
        (11, "triton", torch.bfloat16),
        (12, "torch", torch.float32),
    ):
        head = _head(rank, ranks, vocab, kernels=kernels, dtype=dtype)
        warm, taken = Trail(), Trail()
        with warm.recording():
            head.warmup(3)
        hidden = integers(3, WIDTH, seed=rank).to(dtype)
        captured = mock.patch.object(ops, "is_capturing", lambda device: True)
        with captured, taken.recording():
            head(hidden)
        # The communicator warms both collectives; of a step on gloo, one has no need of the other.
        spare = {("gather",)} if head._comm.gathers_by_exchange else set()
        routes = taken.routes <= warm.routes <= taken.routes | spare
        if taken.kernels != warm.kernels or not routes or not taken.kernels:
            wrong.append(f"V={vocab} {kernels}: {taken} is not {warm}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_g3_a_capture_takes_the_kernels_that_warmup_took(ranks: int) -> None:
    """The same kernels, with the same specialisation, and the same routes: no more, no fewer."""
    assert pool(ranks).run(_job_g3) == [[]] * ranks


def test_g4_kernels_live_as_long_as_the_process() -> None:
    """Every kernel is a function of a module, and so is the cache that holds what it compiled: no
    kernel is freed, and no module unloaded, while something is captured.
    """
    found = 0
    for path in sorted((ROOT / "kernels").glob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(mark) == "triton.jit" for mark in node.decorator_list
            ):
                assert node in tree.body, f"{path.name}: {node.name} is made anew by each call"
                found += 1
    assert found >= 8
    assert all(hasattr(module, "__file__") for module in (gemm, reassemble, tiles))


@pytest.mark.gpu
def test_g4_collecting_garbage_inside_a_capture_frees_no_kernel() -> None:
    """A throwaway kernel dies inside the capture as well: torch and Triton must not unload ours."""
    from probes import round_probe

    heads = [_head(device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    hidden = integers(3, WIDTH, seed=2).to("cuda", torch.bfloat16)
    for head in heads:
        head.warmup(3)
    x = torch.ones(1024, device="cuda")
    compiled = round_probe[(1,)](x, torch.empty_like(x), BLOCK=1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = heads[0](hidden)
        del compiled
        gc.collect()
        second = heads[1](hidden)
    for _ in range(3):
        graph.replay()
    for logits in (first, second):
        same(logits.float().cpu(), _want(hidden.float().cpu()))


@pytest.mark.gpu
def test_g5_the_report_reads_the_devices_own_memory() -> None:
    """Bytes as the device counts them, not torch's statistics.  One rank shows the interface alone:
    what an all-to-all takes, several show.  The scripted readings are in test_memory.py.
    """
    report = _head(device="cuda", dtype=torch.bfloat16).warmup((1, 36))
    assert report.before is not None and report.after is not None
    assert report.after.free <= torch.cuda.mem_get_info()[1]
    assert report.device_bytes == report.before.free - report.after.free
    assert report.communicator_bytes is not None and report.communicator_bytes >= 0
    assert report.kernel_bytes is not None and report.kernel_bytes >= 0


def _job_g6(rank: int, ranks: int) -> list[str]:
    wrong: list[str] = []
    made: list[str] = []
    plain = dist.distributed_c10d._new_process_group_helper

    def helper(*args: Any, **kwargs: Any) -> Any:
        made.append("group")
        return plain(*args, **kwargs)

    with mock.patch.object(dist.distributed_c10d, "_new_process_group_helper", helper):
        head = _head(rank, ranks)
        with Living() as warm:
            held = sum(head.warmup((1, 5)).workspace_bytes.values())
        with Living() as later:
            for rows in (5, 1, 5):
                head(integers(rows, WIDTH, seed=rank))
    if made:
        wrong.append(f"{made} made behind the user's back")
    if not held or warm.bytes(held) != held:
        wrong.append("warm-up keeps nothing: what do calls use?")
    if kept := later.bytes(0):
        wrong.append(f"{kept} bytes are kept by calls after it")
    return wrong


def test_g6_after_warmup_a_call_keeps_nothing_and_makes_no_group() -> None:
    """So that an engine's KV cache, sized after the warm-up, is sized right on every replica."""
    assert pool(2).run(_job_g6) == [[]] * 2


def _job_g7(rank: int, ranks: int) -> list[str]:
    wrong: list[str] = []
    head = _head(rank, ranks)
    hidden = [integers(3, WIDTH, seed=10 * i + rank) for i in range(3)]
    results = [head(x) for x in hidden]  # all alive at once
    if len({logits.data_ptr() for logits in results}) != 3:
        wrong.append("two results share storage")
    for logits, x in zip(results, hidden, strict=True):
        if not torch.equal(logits, _want(x)):
            wrong.append("a result was overwritten by a later call")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_g7_every_eager_call_returns_fresh_storage(ranks: int) -> None:
    assert pool(ranks).run(_job_g7) == [[]] * ranks


@pytest.mark.gpu
def test_g7_a_compiled_graphs_result_is_overwritten_by_the_next_run_unless_cloned() -> None:
    """mode="reduce-overhead": torch's own rule, which the documentation of DecodeGraphs repeats."""
    head = _head(device="cuda", dtype=torch.bfloat16)
    step = torch.compile(head, fullgraph=True, mode="reduce-overhead")
    first, second = (integers(3, WIDTH, seed=s).to("cuda", torch.bfloat16) for s in (3, 4))
    with torch.no_grad():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            step(first)
        torch.compiler.cudagraph_mark_step_begin()
        kept = step(first).clone()
        torch.compiler.cudagraph_mark_step_begin()
        other = step(second).clone()
    same(kept.float().cpu(), _want(first.float().cpu()))
    same(other.float().cpu(), _want(second.float().cpu()))


def _job_g8(rank: int, ranks: int) -> list[str]:
    wrong: list[str] = []
    head = _head(rank, ranks)
    one, two = integers(3, WIDTH, seed=rank), integers(3, WIDTH, seed=9 + rank)
    outs = [torch.empty(3, VOCAB) for _ in range(2)]
    first = head(one, out=outs[0])
    head(two, out=outs[1])
    head(two)
    if not torch.equal(first, _want(one)):
        wrong.append("a call wrote into another call's out")
    head(two, out=outs[0])
    if not torch.equal(first, _want(two)) or first.data_ptr() != outs[0].data_ptr():
        wrong.append("the same out was not written again")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_g8_a_result_in_out_changes_only_with_that_out(ranks: int) -> None:
    assert pool(ranks).run(_job_g8) == [[]] * ranks


def test_g9_g10_symmetric_memory_is_not_used() -> None:
    """Its rendezvous on a subgroup, and its signals, have hung others: what is not there cannot."""
    for room in ("lmhead", "kernels"):
        for path in (ROOT / room).glob("*.py"):
            names = {
                getattr(node, "attr", None) or getattr(node, "module", None) or ""
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, (ast.Attribute, ast.ImportFrom))
            }
            assert not any("symmetric" in name.lower() for name in names), path
