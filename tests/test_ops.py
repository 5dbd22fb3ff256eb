"""The registered operators, torch.ops.lmhead.logits and torch.ops.lmhead.exchange: what opcheck
asks for, exact fakes, results of their own, and torch.compile.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data_head import (
    FLOATS,
    KERNELS,
    ROUTES,
    Arithmetic,
    Raised,
    collectives,
    normal,
    raised,
    shard_of,
    whole,
)
from ranks import pool
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import lmhead
from lmhead.compare import first_difference
from lmhead.operators import exchange_op, logits_op

BF16, FP16, FP32 = FLOATS
WIDTH = 8

# (V, rows, weight dtype, logits dtype, wire dtype, row_counts of 4 ranks or None, with bias): each
# value of each at least once with every kind of vocabulary.
SAMPLES = (
    (12, 5, FP32, FP32, FP32, None, True),
    (12, 1, BF16, BF16, BF16, None, False),
    (12, 0, FP16, FP32, FP16, None, True),
    (11, 5, BF16, FP32, BF16, None, False),
    (11, 1, FP16, FP16, FP16, None, True),
    (11, 0, FP32, FP32, FP32, None, False),
    (12, 0, FP32, FP32, FP32, (3, 0, 1, 5), False),
    (11, 0, BF16, FP32, FP32, (2, 5, 0, 1), True),
)


def _name(ranks: int) -> str:
    return dist.group.WORLD.group_name if ranks > 1 else ""


def _logits_arguments(
    rank: int, ranks: int, sample: tuple[Any, ...], kernels: str = "", route: str = ""
) -> tuple[Any, ...]:
    vocab, rows, dtype, logits_dtype, wire_dtype, counts, with_bias = sample
    given = None if counts is None else list(counts[:ranks])
    hidden = whole(rows if given is None else given[rank], WIDTH, seed=rank, dtype=dtype)
    weight = shard_of(whole(vocab, WIDTH, seed=9, dtype=dtype), ranks, rank)
    bias = shard_of(whole(vocab, seed=8), ranks, rank) if with_bias else None
    softcap = 30.0 if with_bias else None
    return (
        hidden,
        weight,
        bias,
        vocab,
        _name(ranks),
        ranks,
        0.5,
        softcap,
        logits_dtype,
        wire_dtype,
        given,
        kernels,
        route,
    )


def _exchange_arguments(
    rank: int, ranks: int, sample: tuple[Any, ...], kernels: str = "", route: str = ""
) -> tuple[Any, ...]:
    vocab, rows, _, logits_dtype, wire_dtype, counts, _ = sample
    given = None if counts is None else list(counts[:ranks])
    total = rows * ranks if given is None else sum(given)
    full = whole(total, vocab, seed=7, dtype=wire_dtype)
    partial = shard_of(full.t(), ranks, rank).t()  # strided, as a caller's may be
    own = rows if given is None else given[rank]
    name = _name(ranks)
    return partial, own, vocab, name, ranks, logits_dtype, given, kernels, route


def _opcheck(rank: int, ranks: int, samples: tuple[Any, ...]) -> int:
    """Raises on the first complaint.  Every rank runs the same checks, so the collectives inside
    meet.
    """
    for sample in samples:
        torch.library.opcheck(logits_op, _logits_arguments(rank, ranks, sample))
        torch.library.opcheck(exchange_op, _exchange_arguments(rank, ranks, sample))
    return 2 * len(samples)


def test_opcheck_in_one_process() -> None:
    assert not dist.is_initialized()
    assert _opcheck(0, 1, SAMPLES) == 2 * len(SAMPLES)


@pytest.mark.parametrize(("ranks", "samples"), [(2, SAMPLES), (4, SAMPLES[3:7])])
def test_opcheck_among_ranks(ranks: int, samples: tuple[Any, ...]) -> None:
    assert pool(ranks).run(_opcheck, samples) == [2 * len(samples)] * ranks


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.storage_offset(),
    )


def _fakes(rank: int, ranks: int) -> list[str]:
    """Real results against fake ones: shape, stride, dtype; and no result shares an input's
    storage.
    """
    wrong = []
    for sample, kernels, route in itertools.product(SAMPLES, KERNELS, ROUTES):
        what = f"{sample} {kernels} {route}"
        for op, arguments in (
            (torch.ops.lmhead.logits, _logits_arguments(rank, ranks, sample, kernels, route)),
            (torch.ops.lmhead.exchange, _exchange_arguments(rank, ranks, sample, kernels, route)),
        ):
            real = op(*arguments)
            again = op(*arguments)
            with FakeTensorMode() as mode, collectives() as seen:
                fake = op(
                    *(
                        mode.from_tensor(given) if isinstance(given, torch.Tensor) else given
                        for given in arguments
                    )
                )
            if seen:
                wrong.append(f"{op} {what}: tracing starts {seen}")
            if _form(real) != _form(fake) or not real.is_contiguous():
                wrong.append(f"{op} {what}: {_form(real)} is faked as {_form(fake)}")
            given = [arg for arg in arguments if isinstance(arg, torch.Tensor)]
            storages = {tensor.untyped_storage().data_ptr() for tensor in (*given, again)}
            if real.numel() and real.untyped_storage().data_ptr() in storages:
                wrong.append(f"{op} {what}: the result is not in storage of its own")
            if difference := first_difference(real, again):
                wrong.append(f"{op} {what}: {difference}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_fakes_are_exact_and_results_have_storage_of_their_own(ranks: int) -> None:
    assert pool(ranks).run(_fakes) == [[]] * ranks


def test_a_fake_never_touches_a_group() -> None:
    """Tracing works where no group exists, under a name that nobody has heard of, for row counts
    that are not known yet.
    """
    assert not dist.is_initialized()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    hidden = mode.from_tensor(torch.ones(5, WIDTH, dtype=BF16), static_shapes=False)
    with mode:
        weight = torch.empty(3, WIDTH, dtype=BF16)
        logits = torch.ops.lmhead.logits(
            hidden, weight, None, 10, "no such group", 4, 1.0, None, FP32, BF16, None, "", ""
        )
        assert isinstance(logits.shape[0], torch.SymInt) and logits.shape[1] == 10
        assert logits.dtype == FP32 and logits.stride() == (10, 1)
        partial = torch.empty(20, 3, dtype=BF16)
        logits = torch.ops.lmhead.exchange(
            partial, 2, 10, "no such group", 4, FP32, [9, 2, 4, 5], "", ""
        )
        assert (logits.shape, logits.stride(), logits.dtype) == ((2, 10), (10, 1), FP32)


def _right(rank: int, ranks: int) -> list[str]:
    """Values: whole numbers, so one process in fp64 has the same bits."""
    wrong = []
    for vocab, kernels, route, counts in itertools.product(
        (12, 11), KERNELS, ROUTES, (None, [3, 0, 1, 2][:ranks])
    ):
        rows = 3 if counts is None else counts[rank]
        weight, bias = whole(vocab, WIDTH, seed=9), whole(vocab, seed=8)
        hidden = whole(rows, WIDTH, seed=rank)
        arithmetic = Arithmetic(bias=True, scale=0.5)
        want = arithmetic.truth(hidden, weight, bias).float()
        got = torch.ops.lmhead.logits(
            hidden,
            shard_of(weight, ranks, rank),
            shard_of(bias, ranks, rank),
            vocab,
            _name(ranks),
            ranks,
            0.5,
            None,
            FP32,
            FP32,
            counts,
            kernels,
            route,
        )
        if difference := first_difference(got, want):
            wrong.append(f"logits V={vocab} {kernels} {route} {counts}: {difference}")
        everyone = [whole(3 if counts is None else counts[r], WIDTH, seed=r) for r in range(ranks)]
        partial = torch.cat(everyone) @ shard_of(weight, ranks, rank).t()
        got = torch.ops.lmhead.exchange(
            partial, rows, vocab, _name(ranks), ranks, FP32, counts, kernels, route
        )
        want = (hidden.double() @ weight.double().t()).float()
        if difference := first_difference(got, want):
            wrong.append(f"exchange V={vocab} {kernels} {route} {counts}: {difference}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_operators_compute_what_the_head_does(ranks: int) -> None:
    assert pool(ranks).run(_right) == [[]] * ranks


def _refused(rank: int, ranks: int) -> dict[str, Raised]:
    hidden, weight, name = torch.ones(2, WIDTH), torch.ones(6, WIDTH), _name(ranks)

    def logits(**changed: Any) -> Raised:
        arguments = {
            "hidden": hidden,
            "weight": weight,
            "bias": None,
            "vocab_size": 12,
            "group_name": name,
            "ranks": ranks,
            "scale": 1.0,
            "softcap": None,
            "logits_dtype": FP32,
            "wire_dtype": FP32,
            "row_counts": None,
            "kernels": "",
            "route": "",
        }
        return raised(lambda: torch.ops.lmhead.logits(**(arguments | changed)))

    def exchange(rows: int, **changed: Any) -> Raised:
        arguments = {"row_counts": None, "kernels": "", "route": ""} | changed
        return raised(
            lambda: torch.ops.lmhead.exchange(
                torch.ones(4, 6), rows, 12, name, ranks, FP32, **arguments
            )
        )

    return {
        "weight": logits(weight=torch.ones(6, WIDTH, dtype=torch.int8)),
        "hidden": logits(hidden=torch.ones(2, 7)),
        "vocabulary": logits(vocab_size=13),
        "softcap": logits(softcap=0.0),
        "ranks": logits(ranks=3),
        "counts": logits(row_counts=[2, 1] if rank else [1, 2]),
        "wire": logits(logits_dtype=BF16),
        "kernels": logits(kernels="cuda"),
        "route": logits(route="ring"),
        "no group": logits(group_name=""),
        "rows": exchange(3),
        "exchange counts": exchange(2, row_counts=[1, 2]),
    }


def test_operators_refuse_what_the_head_refuses() -> None:
    texts = {
        "weight": ("TypeError", "weight must be bfloat16"),
        "hidden": ("ValueError", "hidden must be [rows, 8], got (2, 7)"),
        "vocabulary": ("ValueError", "vocab_size 13 exceeds the 12 rows"),
        "softcap": ("ValueError", "softcap must be positive"),
        "ranks": ("ValueError", "has 2 ranks, the op was built for 3"),
        "counts": ("ValueError", "rows, but hidden has 2"),
        "wire": ("ValueError", "must equal logits_dtype"),
        "kernels": ("ValueError", "got 'cuda'"),
        "route": ("ValueError", "got 'ring'"),
        "no group": ("ValueError", "2 ranks need the name of their process group"),
        "rows": ("ValueError", "rows is 3, but rank"),
        "exchange counts": ("ValueError", "adds up to 3 rows, but partial has 4"),
    }
    for found in pool(2).run(_refused):
        assert set(found) == set(texts)
        for name, answer in found.items():
            kind, text = texts[name]
            assert (answer.error, answer.collectives) == (kind, ()), name
            assert text in answer.text, name


def _checked(rank: int, ranks: int) -> dict[str, Raised]:
    """LMHEAD_CHECK=1, and rank 1 calls otherwise than rank 0."""
    os.environ["LMHEAD_CHECK"] = "1"
    name, width = _name(ranks), WIDTH

    def logits(rows: int = 2, vocab: int = 12, counts: list[int] | None = None) -> Raised:
        hidden, weight = torch.ones(rows, width), torch.ones(6, width)
        options = (name, ranks, 1.0, None, FP32, FP32, counts, "", "")
        return raised(lambda: torch.ops.lmhead.logits(hidden, weight, None, vocab, *options))

    def exchange(rows: int = 2, total: int = 4) -> Raised:
        partial, options = torch.ones(total, 6), (12, name, ranks, FP32, None, "", "")
        return raised(lambda: torch.ops.lmhead.exchange(partial, rows, *options))

    return {
        "fine": logits(),
        "rows": logits(rows=2 + rank),
        "vocabulary": logits(vocab=12 - rank),
        "mistake": logits(counts=[2, 2 + rank]),
        "fine exchange": exchange(),
        "exchange rows": exchange(2 + rank, 4 + 2 * rank),
        "exchange mistake": exchange(2 + rank, 4),
        "other op": exchange() if rank else logits(),
    }


def test_operators_are_checked_among_ranks_when_asked() -> None:
    """An operator has no constructor that could have compared the ranks, so LMHEAD_CHECK=1 is all
    that stands between unequal row counts and a torn exchange.
    """
    texts = {
        "rows": "row_counts is [2, 2] on rank 0, [3, 3] on rank 1",
        "vocabulary": "vocab_size is 12 on rank 0, 11 on rank 1",
        "mistake": "row_counts says that rank 1 has 3 rows, but hidden has 2",
        "exchange rows": "row_counts is [2, 2] on rank 0, [3, 3] on rank 1",
        "exchange mistake": "rows is 3, but rank 1 of 2 has 2",
        "other op": 'op is "logits" on rank 0, "exchange" on rank 1',
    }
    for found in pool(2).run(_checked):
        assert set(found) == {"fine", "fine exchange"} | set(texts)
        assert found["fine"].error == "" and len(found["fine"].collectives) == 3
        assert found["fine exchange"].error == "" and len(found["fine exchange"].collectives) == 2
        for name, text in texts.items():
            assert found[name].error == "ValueError" and text in found[name].text, name
            assert len(found[name].collectives) == 1 and found[name].seconds < 5, name


# torch.compile


def _compiled(rank: int, ranks: int, backend: str, rows: tuple[int, ...]) -> list[str]:
    """One function around the head, whole in one graph, for row counts that it has not seen."""
    wrong = []
    torch._dynamo.reset()
    vocab = 11
    weight, bias = whole(vocab, WIDTH, seed=9), whole(vocab, seed=8)
    arithmetic = Arithmetic(bias=True, scale=0.5, softcap=20.0)
    head = arithmetic.head(weight, bias, ranks, rank)
    graphs = []

    def counting(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, examples)

    def step(hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        logits = head(hidden * 2 + residual)
        return logits - logits.amax(dim=-1, keepdim=True)

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    for count in rows:
        hidden = whole(count, WIDTH, seed=count + rank)
        residual = whole(count, WIDTH, seed=count + rank + 50)
        for tensor in (hidden, residual):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            if difference := first_difference(compiled(hidden, residual), step(hidden, residual)):
                wrong.append(f"B={count}: {difference}")
    if len(graphs) != 1:
        wrong.append(f"{len(graphs)} graphs for {len(rows)} row counts")
    return wrong


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole_for_every_row_count(backend: str) -> None:
    """On 2 ranks: one graph, no graph break, the bits of eager code."""
    rows = (3, 5, 2, 9) if backend == "aot_eager" else (3, 5)
    assert pool(2).run(_compiled, backend, rows) == [[]] * 2


def _compiled_ways(rank: int, ranks: int) -> list[str]:
    """What else compiled code may ask of the head."""
    wrong = []
    torch._dynamo.reset()
    vocab, counts = 11, [3, 1]
    weight, bias = whole(vocab, WIDTH, seed=9), whole(vocab, seed=8)
    hidden = whole(counts[rank], WIDTH, seed=rank)
    everyone = torch.cat([whole(counts[r], WIDTH, seed=r) for r in range(ranks)])
    head = Arithmetic(bias=True).head(weight, bias, ranks, rank)
    want = Arithmetic(bias=True).truth(hidden, weight, bias)

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, backend="aot_eager", **options)

    def check(what: str, got: torch.Tensor, dtype: torch.dtype = FP32) -> None:
        if difference := first_difference(got, want.to(dtype)):
            wrong.append(f"{what}: {difference}")

    with torch.no_grad():
        check("row_counts", compiled(lambda x: head(x, counts), fullgraph=True)(hidden))
        out = torch.full((counts[rank], vocab + 2), 77.0)
        compiled(lambda x, y: head(x, counts, y), fullgraph=True)(hidden, out[:, :vocab])
        check("out", out[:, :vocab])
        if not bool((out[:, vocab:] == 77.0).all()):
            wrong.append("out: written beyond")
        # No operator takes rows that are gathered already: a graph break, and the right numbers.
        check("gathered", compiled(lambda x: head.forward_gathered(x, counts) * 1)(everyone))
        partial = everyone @ head.weight.t() + head.bias
        check(
            "exchange",
            compiled(lambda x: lmhead.exchange(x, vocab_size=vocab, row_counts=counts))(partial),
        )
        step = compiled(lambda x: head(x, counts), fullgraph=True)
        step(hidden)
        head.to(BF16)
        check("cast", step(hidden.to(BF16)), BF16)
        # `out.copy_(logits)` alone would have broadcast one row into two.
        one, two = hidden.to(BF16)[:1], torch.empty(2, vocab, dtype=BF16)
        head(one)
        answer = raised(lambda: compiled(lambda x, y: head(x, None, y))(one, two))
        if answer.error != "ValueError" or "out must be [1, 11]" not in answer.text:
            wrong.append(f"wrong out: {answer}")
        if answer.collectives:
            wrong.append(f"wrong out: {answer.collectives}")
        head.close()
        answer = raised(lambda: compiled(lambda x: head(x, counts))(hidden.to(BF16)))
        if answer.error != "RuntimeError" or "closed" not in answer.text:
            wrong.append(f"closed: {answer}")
    return wrong


def test_compiled_code_gets_what_eager_code_gets() -> None:
    assert pool(2).run(_compiled_ways) == [[]] * 2


def test_a_gradient_is_an_error_in_compiled_code_too() -> None:
    head = lmhead.LMHead(nn.Parameter(normal(12, WIDTH, seed=1)), 12)
    compiled = torch.compile(head, backend="aot_eager")
    with pytest.raises(ValueError, match="weight requires grad"):
        compiled(normal(2, WIDTH, seed=2))
    with torch.no_grad():
        assert compiled(normal(2, WIDTH, seed=2)).shape == (2, 12)
