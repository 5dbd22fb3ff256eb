"""Cases J: torch.compile, and the rules of custom operators.

What every operator and every way in must show is in test_ops.py and test_compile.py; here are the
inputs that broke others.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from data_cases import addresses, caught, integers, same, shard_of, truth
from ranks import own_group, pool
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import lmhead
from lmhead import groups, operators

FP32 = torch.float32
VOCAB, WIDTH = 11, 8


def _head(rank: int, ranks: int, group: dist.ProcessGroup | None = None, **options: Any):
    weight = integers(VOCAB, WIDTH, seed=1)
    return lmhead.LMHead(shard_of(weight, ranks, rank), VOCAB, group, **options)


def _want(hidden: torch.Tensor) -> torch.Tensor:
    return truth(hidden, integers(VOCAB, WIDTH, seed=1)).float()


def test_j1_no_operator_returns_its_input_or_a_view_of_it() -> None:
    """On one rank too, where the partial logits and the received blocks are the logits already:
    torch refuses an operator that hands its input back.
    """
    block, weight = addresses(0, 3, 12), torch.eye(12)
    head = (weight, None, 12, "", 1, 1.0, None, FP32, FP32, None, "", "")
    for call, given in (
        (lambda: torch.ops.lmhead.logits(block, *head), (block, weight)),
        (lambda: torch.ops.lmhead.logits_gathered(block, 3, *head), (block, weight)),
        (lambda: torch.ops.lmhead.exchange(block, 3, 12, "", 1, FP32, None, "", ""), (block,)),
        (lambda: torch.ops.lmhead.reassemble(block.view(1, 3, 12), 12, FP32, ""), (block,)),
    ):
        result = call()
        same(result, block)
        storage = result.untyped_storage().data_ptr()
        assert all(storage != tensor.untyped_storage().data_ptr() for tensor in given)
    for op in (operators.logits_op, operators.exchange_op, operators.reassemble_op):
        schema = op._opoverload._schema
        assert all(argument.alias_info is None for argument in (*schema.arguments, *schema.returns))


def test_j2_out_variants_return_nothing_declare_what_they_mutate_and_compile() -> None:
    hidden, out = integers(3, WIDTH, seed=2), torch.zeros(3, VOCAB)
    weight = integers(VOCAB, WIDTH, seed=1)
    for name in ("logits", "logits_gathered", "exchange", "reassemble"):
        schema = getattr(torch.ops.lmhead, f"{name}_out").default._schema
        mutated = [arg.name for arg in schema.arguments if arg.alias_info is not None]
        assert mutated == ["out"] and len(schema.returns) == 0

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        head = (weight, None, VOCAB, "", 1, 1.0, None, FP32, FP32, None, "", "")
        torch.ops.lmhead.logits_out(hidden, *head, out)
        return out + 1

    same(step(hidden, out), _want(hidden) + 1)
    same(out, _want(hidden))


def test_j3_the_fake_has_the_true_width() -> None:
    """V = 10 over 4 ranks of 3 rows: [b, 10], not the 12 columns that were received."""
    with FakeTensorMode():
        weight = torch.empty(3, WIDTH)
        head = (weight, None, 10, "nobody's", 4, 1.0, None, FP32, FP32, None, "", "")
        for fake in (
            torch.ops.lmhead.logits(torch.empty(5, WIDTH), *head),
            torch.ops.lmhead.logits_gathered(torch.empty(20, WIDTH), 5, *head),
            torch.ops.lmhead.exchange(torch.empty(20, 3), 5, 10, "nobody's", 4, FP32, None, "", ""),
            torch.ops.lmhead.reassemble(torch.empty(4, 5, 3), 10, FP32, ""),
        ):
            assert fake.shape == (5, 10) and fake.stride() == (10, 1)


def test_j4_dynamic_rows_trace_over_a_fake_group() -> None:
    """A world of two that does not exist: one graph for 2 to 64 rows, none of them built in."""
    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        torch._dynamo.reset()
        counters.clear()
        # The fake group moves nothing, so the constructor's check cannot be run over it.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lmhead.comm.Comm, "agree", lambda *_: None)
            head = _head(0, 2)
        step = torch.compile(lambda x: head(x) * 2, fullgraph=True, backend="aot_eager")
        for rows in range(2, 65):
            hidden = torch.ones(rows, WIDTH)
            torch._dynamo.mark_dynamic(hidden, 0)
            assert step(hidden).shape == (rows, VOCAB)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    finally:
        dist.destroy_process_group()


# J5.


def _calls(code: str) -> list[str]:
    """The collectives of Inductor's code, in the order in which it runs them."""
    names = r"torch\.ops\.(lmhead\.\w+|_c10d_functional\.all_reduce_?)\."
    return re.findall(names, code[code.index("def call(") :])


def _job_j5(rank: int, ranks: int) -> tuple[list[str], list[str]]:
    """The order of collectives in the generated code, and what went wrong in 20 runs."""
    from torch._inductor.utils import run_and_get_code

    wrong: list[str] = []
    head = _head(rank, ranks)

    def step(
        hidden: torch.Tensor, sums: torch.Tensor, other: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        before = other.sum(dim=-1)  # which Inductor joins with work on the all-reduce's result
        logits = head(hidden)
        first = functional.all_reduce(sums, "sum", dist.group.WORLD)
        head(hidden)  # not used on this rank: the others wait for it all the same
        second = functional.all_reduce(first, "sum", dist.group.WORLD)
        head(hidden, None, out)
        return logits.neg(), first.sum(dim=-1) * before, second

    def inputs(seed: int) -> tuple[torch.Tensor, ...]:
        hidden = integers(3, WIDTH, seed=seed + rank)
        sums, other = integers(4, 5, seed=seed), integers(4, 5, seed=seed + 1)
        return hidden, sums, other, torch.empty(3, VOCAB)

    torch._dynamo.reset()
    # Another version's graph must not come out of a cache: what keeps the order is not in its key.
    with (
        torch.no_grad(),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compiled = torch.compile(step, fullgraph=True)
        _, (code,) = run_and_get_code(compiled, *inputs(0))
    chance = random.Random(5)
    for run in range(20):
        hidden, sums, other, out = given = inputs(10 * run)
        late, pause = chance.randrange(ranks), chance.choice((0.0, 0.002, 0.02))
        if rank == late:
            time.sleep(pause)
        with torch.no_grad():
            logits, mixed, second = compiled(*given)
        total = ranks * sums
        for what, got, want in (
            ("logits", logits, -_want(hidden)),
            ("first", mixed, total.sum(dim=-1) * other.sum(dim=-1)),
            ("second", second, ranks * total),
            ("out", out, _want(hidden)),
        ):
            if not torch.equal(got, want):
                wrong.append(f"run {run}: {what} is {got}, not {want}")
    return _calls(code), wrong


def test_j5_order_with_other_collectives_is_the_programs() -> None:
    """Head and all-reduce without a data link: in Inductor's code they stand as in the program, the
    unused head included, though fusion and locality would have it otherwise; and 20 runs with a
    late rank neither hang nor swap.
    """
    order = ["lmhead.logits", "_c10d_functional.all_reduce_"] * 2 + ["lmhead.logits_out"]
    for found, wrong in pool(2).run(_job_j5):
        assert wrong == []
        assert found == order


def _job_j6(rank: int, ranks: int) -> tuple[str, list[str]]:
    group = [own_group([0], 60), own_group([1], 60)][rank]
    head = _head(0, 1, group)
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if "lmhead" in str(node.target):
                names.extend(arg for arg in node.args if isinstance(arg, str) and arg)
        return graph.forward

    torch._dynamo.reset()
    hidden = integers(3, WIDTH, seed=rank)
    with torch.no_grad():
        same(torch.compile(head, fullgraph=True, backend=backend)(hidden), _want(hidden))
    assert groups.graph_name(group).startswith(group.group_name)
    return groups.graph_name(group), names


def test_j6_the_groups_name_is_in_the_graph_and_is_resolved_at_run_time() -> None:
    """So ranks of groups with other names compile, and cache, each for itself; the operators'
    documentation says so.
    """
    answers = pool(2).run(_job_j6)
    for group, names in answers:
        assert names == [group]
    assert answers[0][0] != answers[1][0]
    said = " ".join((operators.__doc__ or "").split())
    assert "ranks whose groups have different names compile" in said


def _job_j7(rank: int, ranks: int) -> list[int]:
    """Rank 0 with one row, then five: its code is specialised for one, and compiled again; rank 1
    has five from the start.
    """
    torch._dynamo.reset()
    counters.clear()
    head = _head(rank, ranks)
    step = torch.compile(lambda x, counts: head(x, counts), fullgraph=True, backend="aot_eager")
    graphs = []
    with torch.no_grad():
        for counts in ([1, 5], [5, 5], [4, 5], [1, 5]):
            hidden = integers(counts[rank], WIDTH, seed=rank)
            if rank == 0:
                time.sleep(0.2)  # as slow as a compilation may be
            same(step(hidden, counts), _want(hidden), counts)
            graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def _job_j7_late(rank: int, ranks: int) -> Any:
    head = _head(rank, ranks, own_group(timeout_s=3))
    step = torch.compile(head, fullgraph=True, backend="aot_eager")
    if rank == 0:
        time.sleep(6)  # a compilation longer than the group's timeout
    return caught(lambda: step(torch.ones(2, WIDTH)))


def test_j7_a_rank_that_compiles_again_keeps_the_others_waiting_no_longer() -> None:
    """Both finish; and where the group's timeout is shorter, the error hints at compilation."""
    first, second = pool(2).run(_job_j7)
    assert first[-1] > 1 and second[-1] >= 1, "rank 0 compiled again"
    outcome = pool(2).run(_job_j7_late)[1]
    assert outcome.error == "CollectiveError" and "still compiling" in outcome.text


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_j8_a_clone_in_front_of_a_mutating_operator_counts(kernels: str, backend: str) -> None:
    """src = buf.clone(); reassemble(src) into buf: Inductor drops the clone, and an operator that
    did not look would read what it writes.  N = 3, b = 5, S = 7; and every operator that has an
    `out`, called so by hand.
    """

    def moved(buffer: torch.Tensor) -> torch.Tensor:
        source = buffer.clone()
        torch.ops.lmhead.reassemble_out(source.view(3, 5, 7), kernels, buffer.view(5, 21))
        return buffer.view(5, 21) * 1

    torch._dynamo.reset()
    plain, given = addresses(0, 15, 7), addresses(0, 15, 7)
    want = moved(plain)
    same(torch.compile(moved, fullgraph=True, backend=backend)(given), want)
    same(given, plain)
    if backend == "inductor":
        return
    weight = torch.eye(7).flip(0)
    head = (weight, None, 7, "", 1, 1.0, None, FP32, FP32, None, kernels, "")
    for op, more, want in (
        (torch.ops.lmhead.logits_out, head, addresses(0, 15, 7).flip(1)),
        (torch.ops.lmhead.logits_gathered_out, (15, *head), addresses(0, 15, 7).flip(1)),
        (
            torch.ops.lmhead.exchange_out,
            (15, 7, "", 1, FP32, None, kernels, ""),
            addresses(0, 15, 7),
        ),
    ):
        # One row further on: each row is read after the one before it was written over.
        block = torch.zeros(16, 7)
        block[:15] = addresses(0, 15, 7)
        op(block[:15], *more, block[1:])
        same(block[1:], want, op)


TWICE = """
import importlib, importlib.util, sys, torch, lmhead
from lmhead import operators
importlib.reload(operators)
spec = importlib.util.spec_from_file_location("another_name", operators.__file__)
module = importlib.util.module_from_spec(spec)
sys.modules["another_name"] = module
spec.loader.exec_module(module)
importlib.reload(lmhead)
block = torch.arange(12.0).view(3, 2, 2)
want = block.transpose(0, 1).reshape(2, 6)
assert torch.equal(torch.ops.lmhead.reassemble(block, 6, torch.float32, ""), want)
assert torch.equal(module.reassemble_op(block, 6, torch.float32, ""), want)
step = torch.compile(lambda x: lmhead.LMHead.forward(head, x), fullgraph=True, backend="aot_eager")
head = lmhead.LMHead(torch.eye(4), 4)
assert torch.equal(step(torch.eye(4)), torch.eye(4))
"""


def test_j9_registering_twice_is_harmless() -> None:
    """Reloaded, and imported under a second name."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(lmhead.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", TWICE],
        env=environment | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def _job_j10(rank: int, ranks: int) -> list[str]:
    head = _head(rank, ranks)
    hidden = integers(3, WIDTH, seed=rank)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        results = (
            head(hidden),
            compiled(hidden),
            lmhead.exchange(hidden.repeat(ranks, 1) @ head.weight.t(), vocab_size=VOCAB),
        )
    return [type(result).__name__ for result in results]


def test_j10_results_are_plain_tensors() -> None:
    """Synchronous at the border: nothing that is waited for after a graph break."""
    assert pool(2).run(_job_j10) == [["Tensor"] * 3] * 2
