"""The head under torch.compile: whole graphs, one for every row count, the bits of eager code.

Order among collectives, and published failures of compiled collectives, are in test_cases_j.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_head import FLOATS, Arithmetic, normal, raised, shard_of, whole
from ranks import pool
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import lmhead
from lmhead.compare import first_difference

BF16, FP16, FP32 = FLOATS
VOCAB, WIDTH = 11, 8

Function = Callable[..., torch.Tensor]


class Model(nn.Module):
    """A body and the head, as a model holds one."""

    def __init__(self, head: lmhead.LMHead) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        with torch.no_grad():
            self.embedding.weight.copy_(whole(32, WIDTH, seed=3))
        self.head = head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids) * 2 + 1) * 0.5


def _head(rank: int, ranks: int, **options: Any) -> lmhead.LMHead:
    weight, bias = whole(VOCAB, WIDTH, seed=9), whole(VOCAB, seed=8)
    return Arithmetic(bias=True, scale=0.5, softcap=20.0).head(weight, bias, ranks, rank, **options)


def _ids(rows: int, rank: int) -> torch.Tensor:
    return torch.randint(32, (rows,), generator=torch.Generator().manual_seed(100 * rows + rank))


def _graphs() -> tuple[int, int]:
    """(graphs compiled, graph breaks) since the counters were cleared."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@torch.no_grad()
def _whole_model(rank: int, ranks: int, dynamic: bool, rows: tuple[int, ...]) -> list[str]:
    """A model with the head, by Inductor, for row counts that it has not seen."""
    torch._dynamo.reset()
    counters.clear()
    wrong = []
    model = Model(_head(rank, ranks))
    compiled = torch.compile(model, fullgraph=True, dynamic=None if dynamic else False)
    for count in rows:
        ids = _ids(count, rank)
        if dynamic:
            torch._dynamo.mark_dynamic(ids, 0)
        if difference := first_difference(compiled(ids), model(ids)):
            wrong.append(f"B={count}: {difference}")
    graphs = (1 if dynamic else len(rows), 0)
    if _graphs() != graphs:
        wrong.append(f"{_graphs()} graphs and breaks, not {graphs}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_graph_serves_every_row_count(ranks: int) -> None:
    """B = 2 to 64 by one graph of Inductor's, without a break, with the bits of eager code."""
    assert pool(ranks).run(_whole_model, True, tuple(range(2, 65))) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_static_rows_give_the_same_bits(ranks: int) -> None:
    assert pool(ranks).run(_whole_model, False, (3, 1)) == [[]] * ranks


def _targets(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def _every_way(rank: int, ranks: int) -> list[str]:
    """What else compiled code may ask of the head and of the exchange: each whole, each for a
    second row count by the same graph, each against eager code.
    """
    wrong: list[str] = []
    weight, bias = whole(VOCAB, WIDTH, seed=9), whole(VOCAB, seed=8)
    head = Arithmetic(bias=True).head(weight, bias, ranks, rank)
    mesh, world = init_device_mesh("cpu", (ranks,)), dist.group.WORLD
    work = lmhead.Workspace()
    exchange = lmhead.exchange

    def hidden(rows: int) -> torch.Tensor:
        return whole(rows, WIDTH, seed=rows + 50 * rank)

    def everyone(rows: int) -> torch.Tensor:
        return whole(ranks * rows, WIDTH, seed=rows)

    def partial(rows: int) -> torch.Tensor:
        return everyone(rows) @ shard_of(weight, ranks, rank, 0.0).t()

    def out(rows: int) -> torch.Tensor:
        return torch.full((rows, VOCAB + 2), 77.0)[:, :VOCAB]

    ways: dict[str, tuple[Function, tuple[Function, ...], str]] = {
        "forward": (head, (hidden,), "logits"),
        "into out": (lambda x, y: head(x, None, y), (hidden, out), "logits_out"),
        "gathered": (head.forward_gathered, (everyone,), "logits_gathered"),
        "gathered into out": (
            lambda x, y: head.forward_gathered(x, None, y),
            (everyone, out),
            "logits_gathered_out",
        ),
        "exchange": (lambda x: exchange(x, vocab_size=VOCAB), (partial,), "exchange"),
        "exchange, group": (
            lambda x: exchange(x, vocab_size=VOCAB, group=world),
            (partial,),
            "exchange",
        ),
        "exchange, mesh, workspace": (
            lambda x: exchange(x, vocab_size=VOCAB, group=mesh, workspace=work),
            (partial,),
            "exchange",
        ),
        "exchange to fp32 into out": (
            lambda x, y: exchange(x.to(BF16), vocab_size=VOCAB, logits_dtype=FP32, out=y),
            (partial, out),
            "exchange_out",
        ),
        "reassemble": (
            lambda x: torch.ops.lmhead.reassemble(x.view(ranks, -1, x.shape[1]), VOCAB, FP32, ""),
            (partial,),
            "reassemble",
        ),
    }
    for what, (function, inputs, operator) in ways.items():
        torch._dynamo.reset()
        counters.clear()
        seen: list[str] = []

        def record(graph: torch.fx.GraphModule, examples: list[Any], seen: Any = seen) -> Any:
            seen.extend(_targets(graph))
            return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

        compiled = torch.compile(lambda *a, f=function: f(*a), fullgraph=True, backend=record)
        for rows in (3, 5):
            given = [make(rows) for make in inputs]
            for tensor in given:
                torch._dynamo.mark_dynamic(tensor, 0)
            want = function(*[tensor.clone() for tensor in given])
            got = compiled(*given)
            if difference := first_difference(got, want):
                wrong.append(f"{what} B={rows}: {difference}")
            if operator.endswith("_out"):
                if difference := first_difference(given[-1], want):
                    wrong.append(f"{what} B={rows}, out: {difference}")
                if got.data_ptr() != given[-1].data_ptr():
                    wrong.append(f"{what} B={rows}: what comes back is not out")
        if _graphs() != (1, 0):
            wrong.append(f"{what}: {_graphs()} graphs and breaks")
        ours = [target.removesuffix(".default") for target in seen if "lmhead" in target]
        if ours != [f"lmhead.{operator}"] or any("copy_" in target for target in seen):
            wrong.append(f"{what}: {seen}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_in_compiles_whole(ranks: int) -> None:
    """Each becomes its one operator, `out=` the one that writes into it, and one graph serves two
    row counts.
    """
    assert pool(ranks).run(_every_way) == [[]] * ranks


def _manners(rank: int, ranks: int) -> list[str]:
    """Row counts per rank, a cast, and what is refused: by name, before any collective."""
    wrong: list[str] = []
    torch._dynamo.reset()
    counts = [3, 1]
    weight, bias = whole(VOCAB, WIDTH, seed=9), whole(VOCAB, seed=8)
    hidden = whole(counts[rank], WIDTH, seed=rank)
    everyone = torch.cat([whole(counts[r], WIDTH, seed=r) for r in range(ranks)])
    head = Arithmetic(bias=True).head(weight, bias, ranks, rank)
    want = Arithmetic(bias=True).truth(hidden, weight, bias)
    partial = everyone @ head.weight.t() + head.bias

    def compiled(function: Function, fullgraph: bool = True) -> Function:
        torch._dynamo.reset()
        return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)

    def check(what: str, got: torch.Tensor, dtype: torch.dtype = FP32) -> None:
        if difference := first_difference(got, want.to(dtype)):
            wrong.append(f"{what}: {difference}")

    def refused(what: str, function: Function, inputs: tuple[Any, ...], kind: str, text: str):
        answer = raised(lambda: compiled(function, False)(*inputs))
        if answer.error != kind or text not in answer.text or answer.collectives:
            wrong.append(f"{what}: {answer}")
        # A tracer that may not break reports what is raised while it traces in words of its own.
        answer = raised(lambda: compiled(function)(*inputs))
        if answer.error not in (kind, "Unsupported") or text not in answer.text:
            wrong.append(f"{what}, whole: {answer}")
        if answer.collectives:
            wrong.append(f"{what}, whole: {answer.collectives}")

    with torch.no_grad():
        check("row_counts", compiled(lambda x: head(x, counts))(hidden))
        check("gathered", compiled(lambda x: head.forward_gathered(x, counts) * 1)(everyone))
        exchange = compiled(lambda x: lmhead.exchange(x, vocab_size=VOCAB, row_counts=counts))
        check("exchange", exchange(partial))
        step = compiled(lambda x: head(x, counts))
        step(hidden)
        head.to(BF16)
        check("cast", step(hidden.to(BF16)), BF16)

        one, two = hidden.to(BF16)[:1], torch.empty(2, VOCAB, dtype=BF16)
        head(one)
        text = "out must be [1, 11], got (2, 11)"
        refused("wrong out", lambda x, y: head(x, None, y), (one, two), "ValueError", text)
        text = "row_counts must name 2 ranks, got 1: [4]"
        refused(
            "counts",
            lambda x: head.forward_gathered(x, [4]),
            (everyone.to(BF16),),
            "ValueError",
            text,
        )
        refused(
            "odd",
            lambda x: head.forward_gathered(x),
            (everyone.to(BF16)[:3],),
            "ValueError",
            "gathered has 3 rows, which 2 ranks cannot share evenly",
        )
        refused(
            "dtype",
            lambda x: lmhead.exchange(x, vocab_size=VOCAB),
            (torch.ones(2, 6, dtype=torch.int16),),
            "TypeError",
            "partial cannot be torch.int16",
        )
        # A graph break runs it as it should be run; where none may be, the error names the way.
        answer = raised(lambda: compiled(lambda x: (head.warmup(1), head(x))[1])(one))
        if "call it before the compiled code runs" not in answer.text or answer.collectives:
            wrong.append(f"warmup: {answer}")
        head.close()
        refused("closed", lambda x: head(x), (one,), "RuntimeError", "this LMHead is closed")
    return wrong


def test_compiled_code_gets_what_eager_code_gets() -> None:
    assert pool(2).run(_manners) == [[]] * 2


def test_a_gradient_is_an_error_in_compiled_code_too() -> None:
    head = lmhead.LMHead(nn.Parameter(normal(12, WIDTH, seed=1)), 12)
    compiled = torch.compile(head, backend="aot_eager")
    with pytest.raises(ValueError, match="weight requires grad"):
        compiled(normal(2, WIDTH, seed=2))
    with torch.no_grad():
        assert compiled(normal(2, WIDTH, seed=2)).shape == (2, 12)
    partial = normal(2, 12, seed=3).requires_grad_()
    compiled = torch.compile(lambda x: lmhead.exchange(x, vocab_size=12), backend="aot_eager")
    with pytest.raises(ValueError, match="partial requires grad"):
        compiled(partial)


def test_tracing_needs_no_group() -> None:
    """For row counts that are not known yet, under a name that nobody has heard of."""
    assert not dist.is_initialized()

    def step(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        head = (weight, None, 10, "no such group", 4, 1.0, None, FP32, BF16, None, "", "")
        logits = torch.ops.lmhead.logits(hidden, *head)
        everyone = hidden.repeat(4, 1)
        again = torch.ops.lmhead.logits_gathered(everyone, hidden.shape[0], *head)
        partial = everyone @ weight.t()
        exchanged = torch.ops.lmhead.exchange(
            partial, hidden.shape[0], 10, "no such group", 4, FP32, None, "", ""
        )
        received = partial.view(4, hidden.shape[0], weight.shape[0])
        torch.ops.lmhead.reassemble_out(received, "", again.to(BF16))
        return logits, again, exchanged, torch.ops.lmhead.reassemble(received, 10, FP32, "")

    graph = make_fx(step, tracing_mode="symbolic")(
        torch.empty(5, WIDTH, dtype=BF16), torch.empty(3, WIDTH, dtype=BF16)
    )
    ours = [target for target in _targets(graph) if "lmhead" in target]
    names = ("logits", "logits_gathered", "exchange", "reassemble_out", "reassemble")
    assert ours == [f"lmhead.{name}.default" for name in names]
    for node in graph.graph.nodes:
        if "lmhead" in str(node.target) and "out" not in str(node.target):
            rows, columns = node.meta["val"].shape
            assert isinstance(rows, torch.SymInt) and columns == 10
