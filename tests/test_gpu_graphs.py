"""CUDA graphs and compiled graphs on a CUDA device: run with `pytest -m gpu`.

One rank over NCCL (a group of one moves nothing, but is made, named and captured as any other), and
the kernels of several "virtual" ranks in one process.  Replays are compared bit for bit with eager
calls: the same kernels on the same numbers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from data import addresses, assert_same_bits, transposed
from guards import Trail, violations

import lmhead
from lmhead.kernels import reassemble

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCAB, WIDTH = 640, 128
BUCKETS = (1, 4, 36)


def normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    """A group of one rank over NCCL."""
    store = tmp_path_factory.mktemp("group") / "store"
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()


def head_of(group: dist.ProcessGroup | None, seed: int = 1, **options: object) -> lmhead.LMHead:
    return lmhead.LMHead(normal(VOCAB, WIDTH, seed=seed), VOCAB, group, **options)  # type: ignore[arg-type]


def padded(graphs: lmhead.DecodeGraphs, hidden: torch.Tensor) -> torch.Tensor:
    """The rows that a replay really runs: kernels, and with them the last bit, may depend on how
    many there are.
    """
    rows = hidden.new_zeros(graphs.bucket(hidden.shape[0]), hidden.shape[1])
    rows[: hidden.shape[0]].copy_(hidden)
    return rows


@pytest.mark.parametrize("with_out", [False, True], ids=["own results", "shared out"])
def test_a_thousand_replays_are_the_bits_of_eager_calls(
    group: dist.ProcessGroup, with_out: bool
) -> None:
    """Fresh inputs each time, all buckets in turn and rows between them; and memory stays where it
    is from the tenth replay on.
    """
    head = head_of(group)
    out = torch.empty(BUCKETS[-1], VOCAB, dtype=torch.bfloat16, device=DEVICE) if with_out else None
    graphs = lmhead.DecodeGraphs(head, BUCKETS, heads=(head,), out=out)
    report = graphs.capture(normal(1, WIDTH, seed=2))
    assert report.pool_bytes is not None
    rows = [1, 3, 4, 20, 36, 2, 5, 36, 1, 4]
    given = [normal(count, WIDTH, seed=10 + i) for i, count in enumerate(rows)]
    reserved = None
    for replay in range(1000):
        hidden = given[replay % len(given)]
        hidden.mul_(-1.01 if replay % 200 < 100 else -1 / 1.01)  # other numbers each time
        logits = graphs(hidden)
        assert_same_bits(logits, head(padded(graphs, hidden))[: hidden.shape[0]])
        if replay == 10:
            torch.cuda.synchronize()
            reserved = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    torch.cuda.synchronize()
    assert reserved == (torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0])
    graphs.close()
    head.close()


FIRST_CALL = """
import torch
import torch.distributed as dist
import lmhead

torch.cuda.set_device(0)
dist.init_process_group(
    "nccl", init_method="file://" + STORE, rank=0, world_size=1, device_id=torch.device("cuda", 0)
)
weight = torch.randn(640, 128, dtype=torch.bfloat16, device="cuda")
head = lmhead.LMHead(weight, 640)
print(head.warmup((4,)))
hidden = torch.randn(4, 128, dtype=torch.bfloat16, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    logits = head(hidden)
hidden.copy_(torch.randn(4, 128, dtype=torch.bfloat16, device="cuda"))
graph.replay()
torch.cuda.synchronize()
want = head(hidden)
assert torch.equal(logits, want), (logits - want).abs().max()
dist.destroy_process_group()
print("captured as the first call")
"""


def test_capture_as_the_first_call_of_a_fresh_process(tmp_path: Path) -> None:
    root = str(Path(lmhead.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", f"STORE = {str(tmp_path / 'store')!r}\n{FIRST_CALL}"],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "captured as the first call" in done.stdout


def test_several_heads_in_one_graph(group: dist.ProcessGroup) -> None:
    """As a model with draft heads has them: each with weights, options and buffers of its own."""
    heads = (
        head_of(group, seed=1),
        head_of(group, seed=2, logits_dtype=torch.float32, softcap=5.0),
        head_of(group, seed=3, logits_dtype=torch.float32, wire_dtype=torch.bfloat16, scale=0.5),
    )

    def step(hidden: torch.Tensor) -> list[torch.Tensor]:
        return [head(hidden) for head in heads]

    graphs = lmhead.DecodeGraphs(step, (2, 8), heads=heads)
    graphs.capture(normal(1, WIDTH, seed=4))
    for seed, rows in ((5, 8), (6, 1), (7, 2), (8, 5)):
        hidden = normal(rows, WIDTH, seed=seed)
        for got, want in zip(graphs(hidden), step(padded(graphs, hidden)), strict=True):
            assert_same_bits(got, want[:rows])
    graphs.close()


def test_an_idle_rank_replays_and_gets_nothing(group: dist.ProcessGroup) -> None:
    head = head_of(group)
    graphs = lmhead.DecodeGraphs(head, BUCKETS, heads=(head,))
    graphs.capture(normal(1, WIDTH, seed=9))
    assert graphs(normal(0, WIDTH, seed=9), agreed=[3]).shape == (0, VOCAB)
    hidden = normal(3, WIDTH, seed=10)
    assert_same_bits(graphs(hidden, agreed=[3]), head(padded(graphs, hidden))[:3])


def test_a_result_lives_until_the_next_replay_of_its_bucket(group: dist.ProcessGroup) -> None:
    head = head_of(group)
    graphs = lmhead.DecodeGraphs(head, (4,), heads=(head,))
    graphs.capture(normal(1, WIDTH, seed=11))
    first, second = normal(4, WIDTH, seed=12), normal(4, WIDTH, seed=13)
    held, copy = graphs(first), graphs(first, clone=True)
    graphs(second)
    assert_same_bits(held, head(second))
    assert_same_bits(copy, head(first))


def test_real_kernels_pass_the_guard(group: dist.ProcessGroup) -> None:
    """The guard of the CPU tests, around real kernels: a warmed call compiles nothing, launches no
    kernel that was not warmed up, reads nothing back and allocates its result alone.
    """
    head = head_of(group, logits_dtype=torch.float32, softcap=5.0)
    trail = Trail()
    with trail.recording():
        head.warmup((1, 36))
    for rows in (36, 1):
        hidden = normal(rows, WIDTH, seed=14)
        _, found = violations(lambda hidden=hidden: head(hidden), trail, capturing=False)
        assert found == []


def test_reassemblies_of_virtual_ranks_in_one_graph() -> None:
    """Both in-place kernels and the padded form, replayed over fresh blocks."""
    shapes = ((8, 36, 512), (8, 600, 64), (3, 5, 7))
    buffers = [addresses(shape, torch.bfloat16).to(DEVICE) for shape in shapes]
    padded = torch.empty(36, 4000, dtype=torch.bfloat16, device=DEVICE)
    blocks = addresses(shapes[0], torch.bfloat16).to(DEVICE)
    for buffer in buffers:
        reassemble.reassemble(buffer)
    reassemble.reassemble_into(blocks, padded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for buffer in buffers:
            reassemble.reassemble(buffer)
        reassemble.reassemble_into(blocks, padded)
    for first in range(0, 5 * 101, 101):
        sources = [addresses(shape, torch.bfloat16, first).to(DEVICE) for shape in shapes]
        for buffer, source in zip(buffers, sources, strict=True):
            buffer.copy_(source)
        blocks.copy_(sources[0])
        graph.replay()
        for buffer, source in zip(buffers, sources, strict=True):
            want = transposed(source)
            assert_same_bits(buffer.view(want.shape), want)
        assert_same_bits(padded, transposed(sources[0], 4000).contiguous())


class Body(torch.nn.Module):
    """What stands before a head."""

    def __init__(self, head: lmhead.LMHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.silu(hidden) * 0.5) * 2.0


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_with_the_head(group: dist.ProcessGroup, mode: str) -> None:
    """Whole, by Inductor; under "reduce-overhead" torch captures it itself.  What the compiled body
    rounds otherwise than eager code does is compared through the head alone.
    """
    head = head_of(group)
    head.warmup((4, 8))
    torch._dynamo.reset()
    step = torch.compile(head, fullgraph=True, mode=mode)
    model = torch.compile(Body(head), fullgraph=True, mode=mode)
    with torch.no_grad():
        for seed in range(20, 26):
            hidden = normal(4 if seed < 24 else 8, WIDTH, seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            assert_same_bits(step(hidden).clone(), head(hidden))
            torch.compiler.cudagraph_mark_step_begin()
            got, want = model(hidden).clone().float(), Body(head)(hidden).float()
            error = (got - want).norm() / want.norm()
            assert float(error) < 0.02, f"relative error {error}"


def test_compiled_rows_are_one_graph_on_the_device(group: dist.ProcessGroup) -> None:
    from torch._dynamo.utils import counters

    head = head_of(group)
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(head, fullgraph=True)
    with torch.no_grad():
        for rows in (2, 3, 16, 17, 64):
            hidden = normal(rows, WIDTH, seed=rows)
            torch._dynamo.mark_dynamic(hidden, 0)
            assert_same_bits(step(hidden), head(hidden))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def _microseconds(call: Callable[[], object], rounds: int = 50) -> float:
    """Median wall time of a call and its work on the device, one at a time."""
    times = []
    for _ in range(10):
        call()
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def test_replay_time_against_eager_time(
    group: dist.ProcessGroup, record_property: Callable[[str, object], None]
) -> None:
    """A figure, not a bound: DeepSeek-V4-Pro's shard on one rank, replayed and eager."""
    weight = torch.randn(16160, 7168, dtype=torch.bfloat16, device=DEVICE) / 85
    head = lmhead.LMHead(weight, 16160, group)
    graphs = lmhead.DecodeGraphs(head, BUCKETS, heads=(head,))
    graphs.capture(torch.empty(1, 7168, dtype=torch.bfloat16, device=DEVICE))
    figures = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for rows in BUCKETS:
        hidden = torch.randn(rows, 7168, dtype=torch.bfloat16, device=DEVICE)
        figures[f"{rows} rows, eager, us"] = f"{_microseconds(lambda h=hidden: head(h)):.1f}"
        figures[f"{rows} rows, replay, us"] = f"{_microseconds(lambda h=hidden: graphs(h)):.1f}"
    for name, value in figures.items():
        record_property(name, value)
    print(json.dumps(figures))  # `make gpu-check ARGS=-s` shows it


def test_the_demo_decodes_from_graphs() -> None:
    """One rank; the head alone, which needs no package."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(lmhead.__file__).parent.parent)
    command = [sys.executable, "-m", "lmhead.cli", "demo", "--model", "synthetic", "--ranks", "1"]
    done = subprocess.run(
        [*command, "--rounds", "2", "--loop", "graph", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["loop"] == "graph" and report["identical"]
