"""The registered operators, torch.ops.lmhead: what opcheck asks for, exact fakes, results of their
own.  What compilers make of them is in test_compile.py.
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
    raised,
    shard_of,
    whole,
)
from ranks import pool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lmhead import operators
from lmhead.compare import first_difference

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


def _reassemble_arguments(
    ranks: int, sample: tuple[Any, ...], kernels: str = ""
) -> tuple[Any, ...]:
    vocab, rows, _, logits_dtype, wire_dtype, _, _ = sample
    shard = -(-vocab // ranks)
    blocks = whole(ranks, 2 * rows + 1, shard, seed=6, dtype=wire_dtype)
    return blocks[:, 1::2][:, :rows], vocab, logits_dtype, kernels


# An operator, its twin that writes into `out`, and what both are called with.
Case = tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]


def _cases(
    rank: int, ranks: int, sample: tuple[Any, ...], kernels: str = "", route: str = ""
) -> dict[str, Case]:
    """Every operator under one sample; the third and fourth are the functional form's arguments and
    the twin's, the latter without `out`.
    """
    head = _logits_arguments(rank, ranks, sample, kernels, route)
    counts, own = head[10], head[0].shape[0]
    everyone = [whole(own if counts is None else counts[r], WIDTH, seed=r) for r in range(ranks)]
    gathered = (torch.cat(everyone).to(head[0].dtype), own, *head[1:])
    exchanged = _exchange_arguments(rank, ranks, sample, kernels, route)
    moved = _reassemble_arguments(ranks, sample, kernels)
    return {
        "logits": (operators.logits_op, operators.logits_out_op, head, head),
        "logits_gathered": (
            operators.logits_gathered_op,
            operators.logits_gathered_out_op,
            gathered,
            gathered,
        ),
        "exchange": (operators.exchange_op, operators.exchange_out_op, exchanged, exchanged),
        "reassemble": (
            operators.reassemble_op,
            operators.reassemble_out_op,
            moved,
            (moved[0], kernels),
        ),
    }


def _opcheck(rank: int, ranks: int, samples: tuple[Any, ...]) -> int:
    """Raises on the first complaint.  Every rank runs the same checks, so the collectives inside
    meet.
    """
    checks = 0
    for sample in samples:
        for op, out_op, arguments, out_arguments in _cases(rank, ranks, sample).values():
            torch.library.opcheck(op, arguments)
            logits = op(*arguments)
            rows, vocab = logits.shape
            out = logits.new_empty((rows + 1, vocab + 3))[1:, :vocab]  # inside a larger buffer
            torch.library.opcheck(out_op, (*out_arguments, out))
            checks += 2
    return checks


def test_opcheck_in_one_process() -> None:
    assert not dist.is_initialized()
    assert _opcheck(0, 1, SAMPLES) == 8 * len(SAMPLES)


@pytest.mark.parametrize(("ranks", "samples"), [(2, SAMPLES), (4, SAMPLES[:6])])
def test_opcheck_among_ranks(ranks: int, samples: tuple[Any, ...]) -> None:
    assert pool(ranks).run(_opcheck, samples) == [8 * len(samples)] * ranks


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.storage_offset(),
    )


def _fakes(rank: int, ranks: int) -> list[str]:
    """Real results against fake ones: shape, stride, dtype; no result shares an input's storage;
    and the twins write the same bits into `out`, and nothing beside it.
    """
    wrong = []
    for sample, kernels, route in itertools.product(SAMPLES, KERNELS, ROUTES):
        for name, case in _cases(rank, ranks, sample, kernels, route).items():
            if name == "reassemble" and route != ROUTES[0]:
                continue  # it knows none
            op, out_op, arguments, out_arguments = case
            what = f"{name} {sample} {kernels} {route}"
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
                wrong.append(f"{what}: tracing starts {seen}")
            if _form(real) != _form(fake) or not real.is_contiguous():
                wrong.append(f"{what}: {_form(real)} is faked as {_form(fake)}")
            given = [arg for arg in arguments if isinstance(arg, torch.Tensor)]
            storages = {tensor.untyped_storage().data_ptr() for tensor in (*given, again)}
            if real.numel() and real.untyped_storage().data_ptr() in storages:
                wrong.append(f"{what}: the result is not in storage of its own")
            if difference := first_difference(real, again):
                wrong.append(f"{what}: {difference}")
            (rows, vocab), left = real.shape, 3
            buffer = torch.full((rows + 2, vocab + 5), 77.0, dtype=real.dtype)
            out = buffer[1:-1, left : left + vocab]
            if out_op(*out_arguments, out) is not None:
                wrong.append(f"{what}: the twin returns something")
            if difference := first_difference(out, real):
                wrong.append(f"{what}: the twin's out: {difference}")
            out.fill_(77.0)
            if not bool((buffer == 77.0).all()):
                wrong.append(f"{what}: the twin writes beyond out")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_fakes_are_exact_and_results_have_storage_of_their_own(ranks: int) -> None:
    assert pool(ranks).run(_fakes) == [[]] * ranks


def test_twins_refuse_what_they_cannot_write_into() -> None:
    """In one process; every rank raises alike, since each validates before any collective."""
    partial, hidden, weight = torch.ones(2, 12), torch.ones(2, 12), torch.ones(12, 12)
    head = (weight, None, 12, "", 1, 1.0, None, FP32, FP32, None, "", "")
    received = torch.ones(3, 2, 4)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "logits": lambda out: operators.logits_out_op(hidden, *head, out),
        "gathered": lambda out: operators.logits_gathered_out_op(hidden, 2, *head, out),
        "exchange": lambda out: operators.exchange_out_op(
            partial, 2, 12, "", 1, FP32, None, "", "", out
        ),
        "reassemble": lambda out: operators.reassemble_out_op(received, "", out),
    }
    wide = "cannot become torch.float64"
    outs = {
        "rows": (torch.empty(3, 12), "out must be [2, 12], got (3, 12)"),
        "dtype": (torch.empty(2, 12, dtype=torch.float64), "out is torch.float64 but"),
        "strides": (torch.empty(12, 2).t(), "contiguous columns and rows"),
        "the weight's": (weight[:2], "out overlaps weight"),
    }
    for (name, call), (what, (out, text)) in itertools.product(calls.items(), outs.items()):
        if what == "the weight's" and name in ("exchange", "reassemble"):
            continue  # they have none
        answer = raised(lambda call=call, out=out: call(out))
        assert answer.error in ("ValueError", "TypeError"), (name, what, answer)
        assert (wide if (name, what) == ("reassemble", "dtype") else text) in answer.text


def test_reassembly_moves_what_it_is_given_and_refuses_what_it_cannot() -> None:
    received = torch.arange(24, dtype=torch.int32).view(3, 2, 4)
    want = received.transpose(0, 1).reshape(2, 12)
    reassemble = torch.ops.lmhead.reassemble
    for kernels in KERNELS:
        assert torch.equal(reassemble(received, 11, torch.int32, kernels), want[:, :11])
        strided = received.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(reassemble(strided, 12, torch.int32, kernels), want)
        nothing = reassemble(received[:, :0], 12, torch.int32, kernels)
        assert nothing.shape == (0, 12)
        wide = reassemble(received.to(BF16), 12, FP32, kernels)
        assert torch.equal(wide, want.float())
    for arguments, kind, text in (
        ((received[0], 4, torch.int32, ""), ValueError, r"must be \[N, B, S\]"),
        ((received, 13, torch.int32, ""), ValueError, "vocab_size 13 exceeds the 12 rows"),
        ((received, 12, FP32, ""), TypeError, "torch.int32 blocks .* cannot become torch.float32"),
        ((received.float(), 12, FP32, "cuda"), ValueError, "got 'cuda'"),
    ):
        with pytest.raises(kind, match=text):
            reassemble(*arguments)


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
        head = (weight, None, 10, "no such group", 4, 1.0, None, FP32, BF16, None, "", "")
        everyone = hidden.repeat(4, 1)
        logits = torch.ops.lmhead.logits_gathered(everyone, everyone.shape[0] // 4, *head)
        assert isinstance(logits.shape[0], torch.SymInt) and logits.stride() == (10, 1)
        assert torch.ops.lmhead.logits_out(hidden, *head, logits) is None
        partial = torch.empty(20, 3, dtype=BF16)
        logits = torch.ops.lmhead.exchange(
            partial, 2, 10, "no such group", 4, FP32, [9, 2, 4, 5], "", ""
        )
        assert (logits.shape, logits.stride(), logits.dtype) == ((2, 10), (10, 1), FP32)
        logits = torch.ops.lmhead.reassemble(partial.view(4, 5, 3), 10, FP32, "")
        assert (logits.shape, logits.stride(), logits.dtype) == ((5, 10), (10, 1), FP32)


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
