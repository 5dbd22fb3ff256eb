"""LMHead and exchange, end to end on CPU tensors: the same bits on either route, the truth within
torch's own error, nothing allocated beside the result, and the module's manners.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

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
from guards import Allocations
from ranks import pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lmhead
from lmhead import ops, shapes
from lmhead.comm import CHECK_BYTES
from lmhead.compare import first_difference, relative_error

RANKS = (1, 2, 3, 4, 8)
ROWS = (1, 2, 3, 5, 8, 36)
HIDDEN = 48
# A refusal: two small collectives on busy cores at most, and far under any timeout.
QUICK_S = 5.0

PLAIN = Arithmetic()
FULL = Arithmetic(bias=True, scale=1.7, softcap=2.5)
WIDE = Arithmetic(bias=True, scale=0.6, softcap=2.5, logits_dtype=torch.float32)
NARROW = Arithmetic(scale=1.3, logits_dtype=torch.float32, wire_dtype=torch.bfloat16)


def uneven(ranks: int, turn: int = 0) -> list[int]:
    """Counts of all kinds, zeros among them; another rank has none with each turn."""
    counts = [0, 3, 1, 5, 0, 2, 8, 1][:ranks] if ranks > 1 else [3]
    turn %= ranks
    return counts[turn:] + counts[:turn]


# Both routes give the same bits, both within twice torch's own error.

# The whole list.  fp32 weights give fp32 logits anyway, so WIDE adds nothing to them.
EVERYTHING = tuple(
    (vocab, dtype, arithmetic)
    for vocab in (192, 197)
    for dtype in FLOATS
    for arithmetic in (PLAIN, FULL, WIDE, NARROW)
    if (dtype, arithmetic) != (torch.float32, WIDE)
)
# Triton's interpreter takes milliseconds a tile: every dtype, every arithmetic and both kinds of
# vocabulary, but not their product.
SELECTED = (
    (24, torch.bfloat16, FULL),
    (29, torch.bfloat16, PLAIN),
    (29, torch.bfloat16, NARROW),
    (24, torch.float16, WIDE),
    (29, torch.float16, FULL),
    (24, torch.float32, PLAIN),
    (29, torch.float32, FULL),
)


def _agreement(
    rank: int,
    ranks: int,
    kernels: str,
    cases: tuple[tuple[int, torch.dtype, Arithmetic], ...],
    rows: tuple[int, ...],
) -> tuple[int, list[str]]:
    """How many calls were compared, and everything that was wrong in them."""
    compared, wrong = 0, []
    calls = [(count, None) for count in rows] + [(uneven(ranks)[rank], uneven(ranks))]
    for vocab, dtype, arithmetic in cases:
        weight = normal(vocab, HIDDEN, seed=vocab, dtype=dtype).div_(HIDDEN**0.5)
        bias = normal(vocab, seed=vocab + 1, dtype=dtype)
        hidden = [
            normal(count, HIDDEN, seed=1000 * i + rank, dtype=dtype)
            for i, (count, _) in enumerate(calls)
        ]
        truths = [arithmetic.truth(own, weight, bias) for own in hidden]
        # Of all calls together: a single row of fp32 has too few elements for a steady measure.
        single = torch.cat([arithmetic.single(own, weight, bias) for own in hidden])
        bound = 2 * relative_error(single, torch.cat(truths))
        heads = [
            arithmetic.head(weight, bias, ranks, rank, route=route, kernels=kernels)
            for route in ROUTES
        ]
        for own, truth, (count, counts) in zip(hidden, truths, calls, strict=True):
            ours, fallback = (head(own, counts) for head in heads)
            what = f"V={vocab} {dtype} {arithmetic} B={count} of {counts}"
            compared += 1
            if difference := first_difference(ours, fallback):
                wrong.append(f"{what}: the routes differ: {difference}")
            if (ours.dtype, ours.shape) != (single.dtype, truth.shape) or not ours.is_contiguous():
                wrong.append(f"{what}: {ours.dtype} {tuple(ours.shape)}, {ours.stride()}")
            if count and not relative_error(ours, truth) <= bound:
                wrong.append(f"{what}: {relative_error(ours, truth):.3g} is over {bound:.3g}")
        names = [head.last_route.name for head in heads if head.last_route is not None]
        if names != (list(ROUTES) if ranks > 1 else ["local"] * 2):
            wrong.append(f"routes {names}")
    return compared, wrong


@pytest.mark.parametrize("ranks", RANKS)
def test_routes_give_the_same_bits_within_torchs_own_error(ranks: int) -> None:
    """Every N, B, dtype and arithmetic; V = 192 is divisible by every N, 197 by none
    but 1.
    """
    for compared, wrong in pool(ranks).run(_agreement, "torch", EVERYTHING, ROWS):
        assert wrong == []
        assert compared == len(EVERYTHING) * (len(ROWS) + 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_triton_kernels_give_the_same_bits_within_torchs_own_error(ranks: int) -> None:
    for compared, wrong in pool(ranks).run(_agreement, "triton", SELECTED, (1, 5)):
        assert wrong == []
        assert compared == len(SELECTED) * 3


# The receive buffer becomes the result; a warmed call allocates its result alone.


ENTRIES = ("forward", "forward_gathered", "exchange")


def _entry(
    entry: str,
    head: lmhead.LMHead,
    everyone: torch.Tensor,
    rows: shapes.Rows,
    counts: list[int] | None,
    out: torch.Tensor | None,
) -> Callable[[], torch.Tensor]:
    """A call of one way in, warmed."""
    own = everyone[rows.start : rows.start + rows.own]
    if entry != "exchange":
        head.warmup([rows.own if counts is None else counts], out)
        given = own if entry == "forward" else everyone
        return lambda: getattr(head, entry)(given, counts, out)
    # The caller's own GEMM, and what it has kept between calls.
    partial = (everyone @ head.weight.t() * head.scale).to(head._wire_dtype)
    work = lmhead.Workspace()

    def call() -> torch.Tensor:
        return lmhead.exchange(
            partial,
            vocab_size=head.vocab_size,
            row_counts=counts,
            logits_dtype=torch.float32,
            out=out,
            workspace=work,
            route=head._asked_route,
            kernels=head._asked_kernels,
        )

    call()
    return call


def _memory(rank: int, ranks: int, kernels: str) -> tuple[int, int, list[str]]:
    """How many calls were looked at, in how many the receive buffer had to be the result, and what
    was wrong.
    """
    looked, in_place, wrong = 0, 0, []
    for vocab, arithmetic, route, counts, with_out, entry in itertools.product(
        (24, 23),
        (PLAIN, FULL, NARROW),
        ROUTES,
        (None, [1, 3, 0, 2][:ranks]),
        (False, True),
        ENTRIES,
    ):
        if entry == "exchange" and arithmetic == FULL:
            continue  # the epilogue is the caller's
        if kernels == "triton" and entry != "forward" and arithmetic != PLAIN:
            continue  # the interpreter is slow, and the epilogue is inside its one GEMM kernel
        if kernels == "triton" and route == "all_gather" and counts is not None:
            continue  # nor is anything received in place there
        what = f"V={vocab} {arithmetic} {route} {counts} out={with_out} {entry}"
        rows = shapes.own_rows(4 if counts is None else counts[rank], counts, ranks, rank)
        # Whole numbers, so that every way in gives the same bits.
        weight, bias = whole(vocab, 8, seed=1), whole(vocab, seed=2)
        everyone = whole(rows.total, 8, seed=3)
        # tanh is each kernel set's own.
        kind = kernels if arithmetic.softcap else "torch"
        fallback = arithmetic.head(weight, bias, ranks, rank, route="all_gather", kernels=kind)
        want = fallback(everyone[rows.start : rows.start + rows.own], counts)
        head = arithmetic.head(weight, bias, ranks, rank, route=route, kernels=kernels)
        out = torch.empty(rows.own, vocab) if with_out else None
        call = _entry(entry, head, everyone, rows, counts, out)

        with collectives() as seen, Allocations() as allocations:
            logits = call()

        looked += 1
        if difference := first_difference(logits, want):
            wrong.append(f"{what}: {difference}")
        # One row may be the head of the receive buffer, with the padding columns behind it.
        own_wire = arithmetic.wire_dtype in (None, torch.float32)
        receives = ranks > 1 and route == "all_to_all" and own_wire and rows.own == 1
        columns = ranks * head.shard if receives else vocab
        new = [] if with_out or rows.own == 0 else [rows.own * columns * 4]
        if [size for _, size in allocations.seen] != new:
            wrong.append(f"{what}: allocates {allocations.seen}, not {new}")
        if with_out and logits is not out:
            wrong.append(f"{what}: what comes back is not out")
        if not with_out and rows.own and logits.untyped_storage().nbytes() != new[0]:
            wrong.append(f"{what}: {logits.untyped_storage().nbytes()} bytes are kept alive")
        last = seen[1:] if entry == "forward" else seen  # the first one moves the hidden rows
        sent = [moved for moved in last if moved.collective == "all_to_all_single"]
        if len(sent) != (ranks > 1 and route == "all_to_all"):
            wrong.append(f"{what}: {len(sent)} all-to-alls")
        if sent and kernels == "triton" and own_wire and vocab == ranks * head.shard and rows.own:
            in_place += 1
            if sent[0].out != logits.data_ptr():
                wrong.append(f"{what}: {sent[0].out:#x} received, {logits.data_ptr():#x} returned")
    return looked, in_place, wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_warmed_call_allocates_its_result_alone(kernels: str, ranks: int) -> None:
    """With `out=` nothing at all.  Every way in, both routes, even rows and row_counts, V divisible
    and not; and on the Triton kernels the memory that the all-to-all received into is the result's.
    """
    ways = (
        (3 + 2 + 3) * 4 if kernels == "torch" else (3 + 1 + 1) * 3
    )  # arithmetic, route and counts
    for rank, (looked, in_place, wrong) in enumerate(pool(ranks).run(_memory, kernels)):
        assert wrong == []
        assert looked == 2 * 2 * ways
        # On the all-to-all, PLAIN three ways in and FULL one, with and without out; the rank
        # without rows receives nothing in the calls with row_counts.
        shared = [1, 3, 0, 2][rank] > 0
        expected = (3 + 1) * 2 * (1 + shared) if kernels == "triton" and ranks > 1 else 0
        assert in_place == expected


# Random counts, one rank late.


def _steps(rank: int, ranks: int, kernels: str, steps: int) -> tuple[int, list[str]]:
    """How many steps had an idle rank, and what was wrong."""
    idle, wrong = 0, []
    chance = random.Random(ranks)  # the same on every rank
    weight, bias = whole(29, 16, seed=4), whole(29, seed=5)
    arithmetic = Arithmetic(bias=True, scale=0.5)
    head = arithmetic.head(weight, bias, ranks, rank, kernels=kernels)
    fallback = arithmetic.head(weight, bias, ranks, rank, kernels=kernels, route="all_gather")
    done: list[tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]] = []
    for step in range(steps):
        counts = [chance.choice((0, 0, 1, 2, 3, 5)) for _ in range(ranks)]
        counts = [0] * ranks if step == steps // 2 else counts
        idle += 0 in counts
        late, pause = chance.randrange(ranks), chance.choice((0.0, 0.001, 0.01))
        hidden = whole(counts[rank], 16, seed=1000 * step + rank)
        if rank == late:
            time.sleep(pause)
        logits = head(hidden, counts)
        # Whole numbers: exact in fp32 whatever the order of summation, so one process's fp64 has
        # the same bits.
        want = arithmetic.truth(hidden, weight, bias).float()
        if difference := first_difference(logits, want):
            wrong.append(f"step {step}, {counts}: {difference}")
        route = ("all_to_all", "default") if any(counts) else ("local", "no_rows")
        if head.last_route is None or (head.last_route.name, head.last_route.rule) != route:
            wrong.append(f"step {step}: {head.last_route}")
        done.append((logits, want, counts, hidden))
    # Only now, since a collective more in each step would have let the late rank catch up.
    for step, (logits, want, counts, hidden) in enumerate(done):
        if difference := first_difference(logits, want):
            wrong.append(f"a later step wrote into the result of step {step}: {difference}")
        if difference := first_difference(fallback(hidden, counts), logits):
            wrong.append(f"step {step}, {counts}, the routes differ: {difference}")
    return idle, wrong


@pytest.mark.parametrize(("kernels", "ranks"), [("torch", 4), ("torch", 3), ("triton", 2)])
def test_a_hundred_steps_of_random_rows_with_a_late_rank(kernels: str, ranks: int) -> None:
    """Counts are random in every step, zeros among them and all zero once; one rank comes late."""
    for idle, wrong in pool(ranks).run(_steps, kernels, 100):
        assert wrong == []
        assert idle > 30


# `out=`


def _out(rank: int, ranks: int) -> list[str]:
    """Strided rows inside a larger buffer, whose other elements are canaries."""
    wrong = []
    for vocab, arithmetic, kernels, route, rows in itertools.product(
        (12, 11), (PLAIN, NARROW), KERNELS, ROUTES, (1, 3)
    ):
        what = f"V={vocab} {arithmetic} {kernels} {route} B={rows}"
        weight, bias = whole(vocab, 8, seed=1), whole(vocab, seed=2)
        head = arithmetic.head(weight, bias, ranks, rank, kernels=kernels, route=route)
        hidden = whole(rows, 8, seed=10 + rank)
        want = head(hidden)
        for strided in (False, True):
            buffer = torch.full((rows + 2, vocab + 5 if strided else vocab), 77.0)
            out = buffer[1:-1, :vocab]
            if head(hidden, out=out) is not out:
                wrong.append(f"{what}: another tensor comes back")
            if difference := first_difference(out, want):
                wrong.append(f"{what} strided={strided}: {difference}")
            buffer[1:-1, :vocab] = 77.0
            if not bool((buffer == 77.0).all()):
                wrong.append(f"{what} strided={strided}: written beyond out")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_out_takes_the_logits_and_nothing_beside_it_is_touched(ranks: int) -> None:
    assert pool(ranks).run(_out) == [[]] * ranks


def _refused_out(rank: int, ranks: int) -> dict[str, Raised]:
    head = lmhead.LMHead(whole(6, 4, seed=rank), 12, logits_dtype=torch.float32)
    hidden = torch.ones(3, 4)
    buffer = torch.zeros(100)
    head.weight.data = buffer[:24].view(6, 4)
    outs = {
        "rows": torch.empty(4, 12),
        "columns": torch.empty(3, 11),
        "dtype": torch.empty(3, 12, dtype=torch.bfloat16),
        "strides": torch.empty(12, 3).t(),
        "expanded": torch.empty(12).expand(3, 12),
        "over the weight": buffer[20:56].view(3, 12),
        "grad": torch.empty(3, 12, requires_grad=True),
    }
    found = {name: raised(lambda out=out: head(hidden, out=out)) for name, out in outs.items()}
    over = buffer[30:66].view(3, 12)
    found["over hidden"] = raised(lambda: head(buffer[60:72].view(3, 4), out=over))
    partial = buffer[60:96].view(6, 6)
    found["over partial"] = raised(lambda: lmhead.exchange(partial, vocab_size=12, out=over))
    return found


def test_a_wrong_out_is_refused_before_any_collective() -> None:
    texts = {
        "rows": "out must be [3, 12], got (4, 12)",
        "columns": "out must be [3, 12], got (3, 11)",
        "dtype": "out is torch.bfloat16 but the logits are torch.float32",
        "strides": "got strides (1, 3)",
        "expanded": "got strides (0, 1)",
        "over the weight": "out overlaps weight",
        "grad": "out requires grad",
        "over hidden": "out overlaps hidden",
        "over partial": "out overlaps partial",
    }
    for found in pool(2).run(_refused_out):
        assert set(found) == set(texts)
        for name, answer in found.items():
            assert answer.error == ("TypeError" if name == "dtype" else "ValueError"), name
            assert texts[name] in answer.text
            assert answer.collectives == ()


# Gathered rows, and a caller's own GEMM.


def _gathered(rank: int, ranks: int) -> list[str]:
    wrong = []
    for vocab, counts in itertools.product((12, 11), (None, uneven(ranks))):
        weight, bias = whole(vocab, 8, seed=1), whole(vocab, seed=2)
        head = FULL.head(weight, bias, ranks, rank)
        rows = shapes.own_rows(3 if counts is None else counts[rank], counts, ranks, rank)
        everyone = whole(rows.total, 16, seed=3)[:, ::2]
        own = everyone[rows.start : rows.start + rows.own]
        want = head(own, counts)
        with collectives() as seen:
            got = head.forward_gathered(everyone, counts)
        if len(seen) != 1 or seen[0].collective != "all_to_all_single":
            wrong.append(f"{seen}: the hidden rows are here already")
        if difference := first_difference(got, want):
            wrong.append(f"V={vocab} {counts}: {difference}")
        version = everyone._version
        head.forward_gathered(everyone, counts)
        if everyone._version != version:
            wrong.append("the caller's rows were written")
    for call in (
        lambda: head.forward_gathered(everyone[:-1], counts),
        lambda: head.forward_gathered(torch.ones(2 * ranks + 1, 8)),
        lambda: head.forward_gathered(torch.ones(2 * ranks, 7)),
    ):
        answer = raised(call)
        if answer.error != "ValueError" or "gathered" not in answer.text or answer.collectives:
            wrong.append(f"{answer}")
    return wrong


def test_gathered_rows_give_what_own_rows_give() -> None:
    assert pool(3).run(_gathered) == [[]] * 3


def _own_gemm(rank: int, ranks: int) -> list[str]:
    """exchange under all dtypes that travel, on every route and kernel set, from strided memory."""
    wrong = []
    dtypes = (*FLOATS, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32, torch.int64)
    for dtype, vocab, counts in itertools.product(dtypes, (12, 11), (None, uneven(ranks))):
        rows = shapes.own_rows(2 if counts is None else counts[rank], counts, ranks, rank)
        shard = -(-12 // ranks)
        full = (torch.arange(rows.total * 12) % 120).view(rows.total, 12).to(dtype)
        want = full[rows.start : rows.start + rows.own, :vocab]
        own = full[:, rank * shard : (rank + 1) * shard]  # strided: columns of the full matrix
        for route, kernels in itertools.product(ROUTES, KERNELS):
            got = lmhead.exchange(
                own, vocab_size=vocab, row_counts=counts, route=route, kernels=kernels
            )
            if difference := first_difference(got, want):
                wrong.append(f"{dtype} V={vocab} {counts} {route} {kernels}: {difference}")
            if dtype in FLOATS:
                wide = lmhead.exchange(
                    own,
                    vocab_size=vocab,
                    row_counts=counts,
                    logits_dtype=torch.float32,
                    route=route,
                    kernels=kernels,
                )
                if difference := first_difference(wide, want.float()):
                    wrong.append(f"{dtype} to fp32 {route} {kernels}: {difference}")
    return wrong


def test_exchange_moves_every_dtype_untouched() -> None:
    assert pool(2).run(_own_gemm) == [[]] * 2


def _refused_exchange(rank: int, ranks: int) -> dict[str, Raised]:
    def tell(partial: torch.Tensor, **options: Any) -> Raised:
        return raised(lambda: lmhead.exchange(partial, **({"vocab_size": 6} | options)))

    return {
        "3 rows": tell(torch.ones(3, 3)),
        "too small a shard": tell(torch.ones(4, 2)),
        "row_counts": tell(torch.ones(4, 3), row_counts=[1, 2]),
        "float64": tell(torch.ones(4, 3, dtype=torch.float64)),
        "cast of int": tell(torch.ones(4, 3).to(torch.int8), logits_dtype=torch.float32),
        "narrowing": tell(torch.ones(4, 3), logits_dtype=torch.bfloat16),
        "kernels": tell(torch.ones(4, 3), kernels="cuda"),
        "route": tell(torch.ones(4, 3), route="ring"),
        "grad": tell(torch.ones(4, 3, requires_grad=True)),
    }


def test_exchange_refuses_before_any_collective() -> None:
    texts = {
        "3 rows": "partial has 3 rows, which 2 ranks cannot share evenly",
        "too small a shard": "vocab_size 6 exceeds the 4 rows",
        "row_counts": "adds up to 3 rows, but partial has 4",
        "float64": "partial cannot be torch.float64",
        "cast of int": "cannot become torch.float32",
        "narrowing": "wire_dtype torch.float32 must equal logits_dtype torch.bfloat16",
        "kernels": "got 'cuda'",
        "route": "got 'ring'",
        "grad": "partial requires grad",
    }
    for found in pool(2).run(_refused_exchange):
        assert set(found) == set(texts)
        for name, answer in found.items():
            kind = "TypeError" if name in ("float64", "cast of int") else "ValueError"
            assert (answer.error, answer.collectives) == (kind, ()), name
            assert texts[name] in answer.text


# The module: parameters, full weights, state, casts, gradients.


def test_a_parameter_stays_the_very_same_object() -> None:
    embedding = nn.Embedding(12, 8)
    bias = nn.Parameter(torch.ones(12))
    head = lmhead.LMHead(embedding.weight, 12, bias=bias)
    assert head.weight is embedding.weight and head.bias is bias
    assert dict(head.named_parameters()) == {"weight": embedding.weight, "bias": bias}


def test_a_tensor_becomes_a_parameter_over_its_own_storage() -> None:
    weight = normal(12, 8, seed=1)
    head = lmhead.LMHead(weight, 12)
    assert isinstance(head.weight, nn.Parameter) and not head.weight.requires_grad
    assert head.weight.data_ptr() == weight.data_ptr()
    hidden = normal(2, 8, seed=2)
    before = head(hidden)
    weight.mul_(2)  # tied: the head follows
    assert torch.equal(head(hidden), before * 2)


def _full(rank: int, ranks: int) -> list[str]:
    wrong = []

    def tied(part: torch.Tensor, full: torch.Tensor) -> bool:
        return part.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()

    for vocab, rows, multiple in ((12, 12, 1), (11, 11, 1), (11, 14, 1), (12, 12, 8), (5, 5, 4)):
        full, bias = whole(rows, 8, seed=1), whole(rows, seed=2)
        shard = shapes.shard_rows(vocab, ranks, multiple)
        hidden = whole(2, 8, seed=10 + rank)
        want = (hidden.double() @ full[:vocab].double().t() + bias[:vocab]).float()
        for copy in (False, True):
            what = f"V={vocab} of {rows}, multiple {multiple}, copy={copy}"
            head = lmhead.LMHead.from_full(full, vocab, bias=bias, multiple=multiple, copy=copy)
            if head.shard != shard or tuple(head.weight.shape) != (shard, 8):
                wrong.append(f"{what}: {tuple(head.weight.shape)}")
            if difference := first_difference(head(hidden), want):
                wrong.append(f"{what}: {difference}")
            whole_shard = (rank + 1) * shard <= rows
            for name, part, source in (("weight", head.weight, full), ("bias", head.bias, bias)):
                if tied(part, source) != (whole_shard and not copy):
                    wrong.append(f"{what}: {name} tied {tied(part, source)}")
                if copy and part.untyped_storage().nbytes() != part.nbytes:
                    wrong.append(f"{what}: {name} keeps the full one alive")
    # The default vocabulary is the weight's rows; options reach the constructor.
    head = lmhead.LMHead.from_full(nn.Parameter(full), softcap=2.0, logits_dtype=torch.float32)
    if head.vocab_size != rows or head.softcap != 2.0 or head.weight.requires_grad:
        wrong.append(f"{head}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 3])
def test_from_full_takes_this_ranks_rows(ranks: int) -> None:
    assert pool(ranks).run(_full) == [[]] * ranks


def _state(rank: int, ranks: int) -> list[str]:
    """Save, load into another head, cast: each the same head as one built so."""
    wrong = []
    weight, bias = whole(11, 8, seed=1), whole(11, seed=2)
    hidden = whole(2, 8, seed=10 + rank)

    def check(what: str, head: lmhead.LMHead, dtype: torch.dtype) -> None:
        want = Arithmetic(bias=True).truth(hidden, weight, bias).to(dtype)
        if difference := first_difference(head(hidden.to(head.weight.dtype)), want):
            wrong.append(f"{what}: {difference}")

    head = Arithmetic(bias=True).head(weight, bias, ranks, rank)
    state = head.state_dict()
    if sorted(state) != ["bias", "weight"]:
        wrong.append(f"state {sorted(state)}")
    for assign in (False, True):
        blank = Arithmetic(bias=True).head(weight * 0, bias * 0, ranks, rank)
        blank(hidden)
        parameter = blank.weight
        blank.load_state_dict(state, assign=assign)
        if (blank.weight is parameter) == assign:
            wrong.append(f"assign={assign}: parameter identity")
        check(f"load_state_dict, assign={assign}", blank, torch.float32)
    # An assigned weight of another dtype is another head: its logits follow.
    halves = {name: tensor.bfloat16() for name, tensor in state.items()}
    blank.load_state_dict(halves, assign=True)
    check("assigned bfloat16", blank, torch.bfloat16)

    parameter = head.weight
    with collectives() as seen:
        head.to(torch.bfloat16)
    if seen or head.weight is not parameter:
        wrong.append(f"the cast itself: {seen}")
    with collectives() as seen:
        check("to(bfloat16)", head, torch.bfloat16)
    if len(seen) != 3 or seen[0].out_bytes != ranks * CHECK_BYTES:
        wrong.append(f"the cast head was not checked among the ranks: {seen}")
    with collectives() as seen:
        check("again", head, torch.bfloat16)
    if len(seen) != 2:
        wrong.append(f"the check is repeated: {seen}")
    check("float()", head.float(), torch.float32)
    wide = Arithmetic(bias=True, logits_dtype=torch.float32).head(weight, bias, ranks, rank)
    check("half() under fp32 logits", wide.half(), torch.float32)
    # Asked for before, impossible now: every rank says so.
    narrow = Arithmetic(wire_dtype=torch.float16, logits_dtype=torch.float32)
    moved = narrow.head(weight, bias, ranks, rank).double()
    answer = raised(lambda: moved(hidden.double()))
    if answer.error != "TypeError" or "torch.float64" not in answer.text:
        wrong.append(f"double(): {answer}")
    # One rank alone casts: both are told, by the same check.
    alone = Arithmetic(bias=True).head(weight, bias, ranks, rank)
    alone.to(torch.bfloat16 if rank == 0 else torch.float16)
    answer = raised(lambda: alone(hidden.to(alone.weight.dtype)))
    if "dtype is" not in answer.text or "on rank 0" not in answer.text:
        wrong.append(f"cast differently: {answer}")
    return wrong


def test_state_dict_and_casts_behave_as_people_expect() -> None:
    assert pool(2).run(_state) == [[]] * 2


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("wanting", ["hidden", "weight", "bias"])
def test_what_requires_grad_is_refused_under_grad_mode(wanting: str, kernels: str) -> None:
    """A gradient would silently be lost; a model's own parameters require grad, so no_grad and
    inference_mode are the way to call.
    """
    given = {
        "hidden": normal(2, 8, seed=1),
        "weight": normal(12, 8, seed=2),
        "bias": torch.ones(12),
    }
    given[wanting] = nn.Parameter(given[wanting])
    head = lmhead.LMHead(given["weight"], 12, bias=given["bias"], kernels=kernels)
    calls = (head, head.forward_gathered)
    for call in calls:
        with pytest.raises(ValueError, match="requires grad, but lmhead is for inference") as error:
            call(given["hidden"])
        named = "gathered" if wanting == "hidden" and call is not head else wanting
        assert str(error.value).startswith(named)
        for quiet in (torch.no_grad, torch.inference_mode):
            with quiet():
                assert not call(given["hidden"]).requires_grad


def _inference(rank: int, ranks: int) -> list[str]:
    """Buffers made inside inference mode serve calls outside of it, and the other way round."""
    wrong = []
    modes = (torch.inference_mode, torch.no_grad, contextlib.nullcontext, torch.inference_mode)
    for kernels, arithmetic, counts in itertools.product(
        KERNELS, (FULL, NARROW), (None, uneven(ranks, 1))
    ):
        weight, bias = whole(11, 8, seed=1), whole(11, seed=2)
        head = arithmetic.head(weight, bias, ranks, rank, kernels=kernels)
        results = []
        for mode in modes:
            with mode():
                # Made here, so that in inference mode it is an inference tensor; strided, so that
                # it is copied into a kept buffer.
                hidden = whole(8, 3 if counts is None else counts[rank], seed=3 + rank).t()
                results.append(head(hidden, counts))
        if any(result.is_inference() for result in results[1:3]):
            wrong.append("an inference tensor outside of inference mode")
        wrong.extend(
            difference
            for result in results[1:]
            if (difference := first_difference(result, results[0]))
        )
    return wrong


def test_inference_tensors_work_in_and_out_of_inference_mode() -> None:
    assert pool(2).run(_inference) == [[]] * 2


def test_repr_names_the_numbers() -> None:
    head = lmhead.LMHead(normal(12, 8, seed=1).half(), 11, bias=torch.ones(12), softcap=30.0)
    for part in (
        "vocab_size=11",
        "shard=(12, 8)",
        "ranks=1",
        "dtype=torch.float16",
        "bias=True",
        "scale=1.0",
        "softcap=30.0",
    ):
        assert part in repr(head)


def test_last_route_is_none_until_a_call_says() -> None:
    head = lmhead.LMHead(normal(12, 8, seed=1), 12)
    assert head.last_route is None
    with pytest.raises(ValueError, match="hidden must be"):
        head(torch.ones(2, 7))
    assert head.last_route is None
    head(torch.ones(2, 8))
    assert head.last_route is not None
    assert (head.last_route.name, head.last_route.rule) == ("local", "one_rank")


def test_a_closed_head_says_so() -> None:
    head = lmhead.LMHead(normal(12, 8, seed=1), 12, softcap=2.0, logits_dtype=torch.bfloat16)
    head.warmup(rows=4)
    kept = weakref.ref(next(iter(head._workspace._buffers.values())))
    head.close()
    assert kept() is None, "the buffers are given back"
    head.close()
    for call in (
        lambda: head(torch.ones(2, 8)),
        lambda: head.forward_gathered(torch.ones(2, 8)),
        lambda: head.warmup(rows=4),
    ):
        with pytest.raises(RuntimeError, match="this LMHead is closed"):
            call()
    assert head.weight.shape == (12, 8), "the weight is the caller's"


# Warm-up and capture.


def _held(head: lmhead.LMHead) -> dict[str, int]:
    """The bytes of storage that the head's buffers really keep alive."""
    return {
        purpose: buffer.untyped_storage().nbytes()
        for purpose, buffer in head._workspace._buffers.items()
    }


def _warmup(rank: int, ranks: int) -> list[str]:
    wrong = []
    # bf16 on torch's kernels: the epilogue needs fp32 scratch, on one rank too.
    weight, bias = whole(11, 8, seed=1, dtype=torch.bfloat16), whole(11, seed=2)
    counts = uneven(ranks, 1)
    head = FULL.head(weight, bias, ranks, rank)
    report = head.warmup(rows=[3, counts, 1, 3])
    if report.rows != tuple(dict.fromkeys([(3,) * ranks, tuple(counts), (1,) * ranks])):
        wrong.append(f"rows {report.rows}")
    if report.workspace_bytes != _held(head) or not sum(_held(head).values()):
        wrong.append(f"{report.workspace_bytes} reported, {_held(head)} held")
    gathered = max(3 * ranks, sum(counts))
    if ranks > 1 and report.workspace_bytes["partial"] != gathered * head.shard * 2:
        wrong.append(f"partial: {report.workspace_bytes}")
    if (report.collective_bytes > 0) != (ranks > 1) or report.device_bytes is not None:
        wrong.append(f"{report!r}")
    if "ready for rows" not in str(report) or "MiB of buffers" not in str(report):
        wrong.append(str(report))
    # What is ready stays as it is: even strided hidden rows find their buffer.
    for rows, given in ((3, None), (counts[rank], counts), (1, None)):
        flat = whole(rows, 8, seed=3, dtype=torch.bfloat16)
        for hidden in (flat, flat.t().contiguous().t()):
            with Allocations() as allocations:
                head(hidden, given)
            if len(allocations.seen) != (rows > 0):
                wrong.append(f"{rows} of {given}, {hidden.stride()}: {allocations.seen}")
    if _held(head) != report.workspace_bytes:
        wrong.append("calls after the warm-up grew the buffers")

    fresh = FULL.head(weight, bias, ranks, rank)
    out, hidden = torch.empty(5, 20, dtype=torch.bfloat16)[:3, :11], flat.repeat(3, 1)
    fresh.warmup(rows=3, out=out)
    with Allocations() as allocations:
        fresh(hidden, out=out)
    if allocations.seen:
        wrong.append(f"into a warmed out: {allocations.seen}")
    for bad, text in (
        ([], "at least one"),
        (-1, "non-negative"),
        ([[1] * (ranks + 1)], "must name"),
        ([True], "non-negative"),
    ):
        answer = raised(lambda bad=bad: head.warmup(rows=bad))
        if answer.error != "ValueError" or text not in answer.text:
            wrong.append(f"warmup({bad}): {answer}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_warmup_makes_ready_and_reports_what_it_keeps(ranks: int) -> None:
    assert pool(ranks).run(_warmup) == [[]] * ranks


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """As if a CUDA graph were being captured on the current stream."""
    with mock.patch.object(ops, "is_capturing", lambda device: True):
        yield


def _capture(rank: int, ranks: int) -> list[str]:
    wrong = []
    weight, bias = whole(11, 8, seed=1, dtype=torch.bfloat16), whole(11, seed=2)
    hidden = {rows: whole(rows, 8, seed=3, dtype=torch.bfloat16) for rows in range(10)}
    counts = uneven(ranks, 1)
    head = FULL.head(weight, bias, ranks, rank)
    head.warmup(rows=[2, counts])
    want = head(hidden[2])
    out = torch.empty(2, 11, dtype=torch.bfloat16)

    def refused(what: str, call: Callable[[], object], *texts: str) -> None:
        with capturing():
            answer = raised(call)
        if answer.error != "RuntimeError" or any(text not in answer.text for text in texts):
            wrong.append(f"{what}: {answer}")
        if answer.collectives:
            wrong.append(f"{what}: {answer.collectives} inside the capture")

    refused("warmup", lambda: head.warmup(rows=2), "inside a capture")
    refused("4 rows", lambda: head(hidden[4]), "rows 4 are captured", "warmup(rows=[4])")
    refused("out", lambda: head(hidden[2], out=out), "warmup(rows=[2], out=that buffer)")
    gathered = hidden[4].repeat(ranks, 1)
    refused("gathered", lambda: head.forward_gathered(gathered), "warmup(rows=[4])")
    if ranks > 1:
        other = uneven(ranks, 2)
        refused("counts", lambda: head(hidden[other[rank]], other), f"warmup(rows=[{other}])")

    watched = {name: weakref.ref(buffer) for name, buffer in head._workspace._buffers.items()}
    addresses = {name: buffer.data_ptr() for name, buffer in head._workspace._buffers.items()}
    with capturing(), Allocations() as allocations:
        got = head(hidden[2])
        head(hidden[counts[rank]], counts)
    if difference := first_difference(got, want):
        wrong.append(f"captured: {difference}")
    if len(allocations.seen) != 1 + (counts[rank] > 0):
        wrong.append(f"captured: {allocations.seen}")
    # A graph holds those addresses: buffers that are outgrown from now on are kept as they are.
    report = head.warmup(rows=50)
    for purpose, buffer in watched.items():
        alive = buffer()
        if alive is None or alive.data_ptr() != addresses[purpose]:
            wrong.append(f"{purpose} was given back under a captured graph")
    if not watched or not report.workspace_bytes.get("kept for captured graphs"):
        wrong.append(f"{report.workspace_bytes}")

    # Rows that the kernel reads as they lie: others would be another kernel.
    by_triton = FULL.head(weight, bias, ranks, rank, kernels="triton")
    by_triton.warmup(rows=2)
    strided = hidden[2].repeat(ranks, 2)[:, :8]
    refused("strided", lambda: by_triton.forward_gathered(strided), "contiguous rows")

    # A head that was cast is settled among the ranks first, which no capture can hold.
    head.float()
    refused("cast", lambda: head(hidden[2].float()), "call warmup(rows)")
    head.warmup(rows=2)
    with capturing():
        head(hidden[2].float())

    # exchange pins its workspace as well.
    work = lmhead.Workspace()
    partial = whole(9 * ranks, head.shard, seed=4)[:, None].repeat(1, 2, 1)[:, 0]

    def exchange(rows: int) -> torch.Tensor:
        return lmhead.exchange(partial[: rows * ranks], vocab_size=11, workspace=work)

    exchange(2)
    kept = [weakref.ref(buffer) for buffer in work._buffers.values()]
    with capturing():
        exchange(2)
    refused("exchange", lambda: exchange(9), "once before the capture")
    exchange(9)
    if not kept or any(buffer() is None for buffer in kept):
        wrong.append("exchange gave a buffer back under a captured graph")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_capture_wants_warmed_rows_and_keeps_their_buffers(ranks: int) -> None:
    assert pool(ranks).run(_capture) == [[]] * ranks


# The environment, and what only all ranks together can know.


def test_environment_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid words are refused with the known ones; an argument wins over the environment."""
    weight = normal(12, 8, seed=1)
    monkeypatch.setenv("LMHEAD_KERNELS", "cutlass")
    with pytest.raises(ValueError, match="one of triton, torch or None, got 'cutlass'"):
        lmhead.LMHead(weight, 12)
    assert lmhead.LMHead(weight, 12, kernels="torch")._kernels == "torch"
    monkeypatch.setenv("LMHEAD_KERNELS", "triton")
    assert lmhead.LMHead(weight, 12)._kernels == "triton"
    monkeypatch.setenv("LMHEAD_KERNELS", "")
    assert lmhead.LMHead(weight, 12)._kernels == "torch"
    monkeypatch.setenv("LMHEAD_ROUTE", "ring")
    with pytest.raises(ValueError, match="all_to_all, all_gather or None, got 'ring'"):
        lmhead.LMHead(weight, 12)
    with pytest.raises(ValueError, match="got 'ring'"):
        lmhead.exchange(torch.ones(2, 12), vocab_size=12)


def test_triton_on_cpu_needs_the_interpreter() -> None:
    """The environment decides when the kernels are imported, so the word comes with the remedy."""
    from lmhead.kernels import tiles

    with (
        mock.patch.object(tiles, "INTERPRET", mock.Mock(value=False)),
        pytest.raises(ValueError, match="TRITON_INTERPRET=1"),
    ):
        ops.choose_kernels("triton", torch.device("cpu"))
    assert ops.choose_kernels(None, torch.device("cuda")) == "triton"
    assert ops.choose_kernels(None, torch.device("cpu")) == "torch"


def _environment(rank: int, ranks: int) -> list[str]:
    wrong = []
    weight, bias = whole(12, 8, seed=1), whole(12, seed=2)
    hidden = whole(2, 8, seed=3 + rank)

    def collective_names(call: Callable[[], object]) -> list[str]:
        with collectives() as seen:
            call()
        return [one.collective for one in seen]

    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    rows_first = "all_to_all_single"  # gloo moves the hidden rows so, whatever the route
    partial = whole(2 * ranks, 6, seed=4)
    for asked, name in ((None, "all_to_all_single"), ("all_gather", gather)):
        if asked is not None:
            os.environ["LMHEAD_ROUTE"] = asked
        head = PLAIN.head(weight, bias, ranks, rank)
        if collective_names(lambda head=head: head(hidden)) != [rows_first, name]:
            wrong.append(f"LMHEAD_ROUTE={asked}")
        rule = head.last_route and head.last_route.rule
        if rule != ("default" if asked is None else "asked"):
            wrong.append(f"LMHEAD_ROUTE={asked}: {head.last_route}")
        if collective_names(lambda: lmhead.exchange(partial, vocab_size=12)) != [name]:
            wrong.append(f"exchange, LMHEAD_ROUTE={asked}")
    head = PLAIN.head(weight, bias, ranks, rank, route="all_to_all")
    if collective_names(lambda: head(hidden)) != [rows_first, "all_to_all_single"]:
        wrong.append("the argument does not win over LMHEAD_ROUTE")
    del os.environ["LMHEAD_ROUTE"]

    # LMHEAD_CHECK=1: one more small all-gather before each call, and every rank is told.
    os.environ["LMHEAD_CHECK"] = "1"
    head = PLAIN.head(weight, bias, ranks, rank)
    if collective_names(lambda: head(hidden)) != [gather, rows_first, "all_to_all_single"]:
        wrong.append("LMHEAD_CHECK=1 adds one all-gather")
    if collective_names(lambda: lmhead.exchange(partial, vocab_size=12)) != [
        gather,
        "all_to_all_single",
    ]:
        wrong.append("LMHEAD_CHECK=1 adds one all-gather to exchange")
    rows = 2 + rank
    for what, call, text in (
        ("rows", lambda: head(whole(rows, 8, seed=3)), "row_counts is [2, 2] on rank 0"),
        ("mixed", lambda: (head if rank else head.forward_gathered)(hidden), "gathered is true"),
        ("H", lambda: head(whole(2, 8 - rank, seed=3)), "got (2, 7)"),
        ("V", lambda: lmhead.exchange(partial, vocab_size=12 - rank), "vocab_size is 12 on rank 0"),
        ("0-d", lambda: lmhead.exchange(torch.ones(()), vocab_size=12), "must be [T, S]"),
    ):
        answer = raised(call)
        if answer.error != "ValueError" or text not in answer.text or answer.seconds > QUICK_S:
            wrong.append(f"{what}: {answer}")
        if answer.collectives != (gather,):
            wrong.append(f"{what}: {answer.collectives}")
    # The check waits for the device, so a capture goes without it.
    head.warmup(rows=2)
    with capturing():
        names = collective_names(lambda: head(hidden))
        names += collective_names(lambda: lmhead.exchange(partial, vocab_size=12))
    if names != [rows_first, "all_to_all_single", "all_to_all_single"]:
        wrong.append(f"in a capture: {names}")
    return wrong


def test_environment_among_ranks() -> None:
    assert pool(2).run(_environment) == [[]] * 2


def _disagree(rank: int, ranks: int) -> dict[str, Raised]:
    """Heads that differ on rank 1 alone; the others agree."""
    odd = rank == 1

    def build(shape: tuple[int, int] = (4, 8), vocab: int = 12, **options: Any) -> Raised:
        dtype = options.pop("dtype", torch.float32)
        weight = torch.ones(shape).to(dtype)
        return raised(lambda: lmhead.LMHead(weight, vocab, **options))

    found = {
        "nothing": build(softcap=30 if odd else 30.0, scale=2 if odd else 2.0),
        "V": build(vocab=11 if odd else 12),
        "S": build((5, 8) if odd else (4, 8)),
        "H": build((4, 16) if odd else (4, 8)),
        "dtype": build(dtype=torch.bfloat16 if odd else torch.float32, logits_dtype=torch.float32),
        "logits": build(logits_dtype=torch.bfloat16 if odd else None),
        "wire": build(wire_dtype=torch.bfloat16 if odd else None),
        "scale": build(scale=0.5 if odd else 1.0),
        "softcap": build(softcap=30.0 if odd else None),
        "bias": build(bias=torch.ones(4) if odd else None),
        "route": build(route="all_gather" if odd else None),
        "kernels": build(kernels="triton" if odd else "torch"),
        "deterministic": build(deterministic=odd),
        "int8": build(dtype=torch.int8 if odd else torch.float32),
        "fp8": build(dtype=torch.float8_e4m3fn if odd else torch.float32),
        "1-D": build((4,) if odd else (4, 8)),  # type: ignore[arg-type]
        "bias rows": build(bias=torch.ones(5 if odd else 4)),
        "unknown route": build(route="ring" if odd else None),
        "too few rows": build((4, 8), vocab=13 if odd else 12),
        "softcap sign": build(softcap=-1.0 if odd else 1.0),
    }
    nans = torch.ones(4, 8)
    nans[2, 3] = float("nan") if odd else 1.0
    found["NaN"] = raised(lambda: lmhead.LMHead(nans, 12, check_finite=True))
    found["full"] = raised(
        lambda: lmhead.LMHead.from_full(torch.ones(11 if odd else 12, 8), 12, softcap=1.0)
    )
    os.environ["LMHEAD_CHECK"] = "1" if odd else "0"
    found["LMHEAD_CHECK"] = build()
    os.environ.pop("LMHEAD_CHECK")
    os.environ["LMHEAD_ROUTE"] = "all_gather" if odd else ""
    found["LMHEAD_ROUTE"] = build()
    return found


def test_what_differs_between_ranks_is_told_to_all_of_them() -> None:
    """The same text on every rank, after one small all-gather, at once; a mistake of one rank alone
    reaches the others as that rank's words.
    """
    disagreements = {
        "V": "vocab_size is 12 on rank 0,2, 11 on rank 1",
        "S": "shard rows is 4 on rank 0,2, 5 on rank 1",
        "H": "hidden is 8 on rank 0,2, 16 on rank 1",
        "dtype": 'dtype is "torch.float32" on rank 0,2, "torch.bfloat16" on rank 1',
        "logits": 'logits_dtype is "torch.float32" on rank 0,2, "torch.bfloat16" on rank 1',
        "wire": 'wire_dtype is "torch.float32" on rank 0,2, "torch.bfloat16" on rank 1',
        "scale": "scale is 1.0 on rank 0,2, 0.5 on rank 1",
        "softcap": "softcap is null on rank 0,2, 30.0 on rank 1",
        "bias": "bias is false on rank 0,2, true on rank 1",
        "route": 'route is "all_to_all" on rank 0,2, "all_gather" on rank 1',
        "kernels": 'kernels is "torch" on rank 0,2, "triton" on rank 1',
        "deterministic": "deterministic is false on rank 0,2, true on rank 1",
        "LMHEAD_CHECK": "LMHEAD_CHECK is false on rank 0,2, true on rank 1",
        "LMHEAD_ROUTE": 'route is "all_to_all" on rank 0,2, "all_gather" on rank 1',
    }
    mistakes = {
        "int8": ("TypeError", "weight must be bfloat16, float16 or float32, got torch.int8"),
        "fp8": ("TypeError", "got torch.float8_e4m3fn: a quantised weight needs its scales"),
        "1-D": ("ValueError", "weight shard must be [S, H] with both positive, got (4,)"),
        "bias rows": ("ValueError", "bias must be [4], one per weight row, got (5,)"),
        "unknown route": ("ValueError", "got 'ring'"),
        "too few rows": ("ValueError", "vocab_size 13 exceeds the 12 rows"),
        "softcap sign": ("ValueError", "softcap must be positive and finite, got -1.0"),
        "NaN": ("ValueError", "1 of 4 weight rows are not finite, the first is row 2 of rank 1"),
        "full": ("ValueError", "V >= 12 rows, got (11, 8)"),
    }
    answers = pool(3).run(_disagree)
    for rank, found in enumerate(answers):
        assert set(found) == {"nothing"} | set(disagreements) | set(mistakes)
        assert found["nothing"].error == ""
        for name, answer in found.items():
            assert len(answer.collectives) == 1, name
            assert answer.seconds < QUICK_S, name
        for name, text in disagreements.items():
            assert found[name].error == "ValueError", name
            assert text in found[name].text and found[name].text == answers[0][name].text
        for name, (kind, text) in mistakes.items():
            assert text in found[name].text, name
            assert found[name].error == (kind if rank == 1 else "ValueError")
            if rank != 1:
                assert f"rank 1 refused: {kind}: " in found[name].text


# The group.


def _grouped(rank: int, ranks: int) -> list[str]:
    """Every way to name the same two pairs of ranks gives the pair's own result."""
    wrong = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    weight = whole(11, 8, seed=1)
    for what, group, size, place in (
        ("None", None, 4, rank),
        ("the default group", dist.group.WORLD, 4, rank),
        ("1-D mesh", line, 4, rank),
        ("slice of a mesh", mesh["tp"], 2, rank % 2),
        ("the other slice", mesh["dp"], 2, rank // 2),
        ("its process group", mesh["tp"].get_group(), 2, rank % 2),
    ):
        hidden = whole(2, 8, seed=10 + rank)
        want = PLAIN.truth(hidden, weight, weight[:, 0]).float()
        shard = shard_of(weight, size, place)
        head = lmhead.LMHead(shard, 11, group)
        if head.ranks != size:
            wrong.append(f"{what}: {head.ranks} ranks")
        if difference := first_difference(head(hidden), want):
            wrong.append(f"{what}: {difference}")
        whole_weight = lmhead.LMHead.from_full(weight, group=group)
        if difference := first_difference(whole_weight(hidden), want):
            wrong.append(f"{what}, from_full: {difference}")
    for call in (
        lambda: lmhead.LMHead(weight, 11, mesh),
        lambda: lmhead.LMHead.from_full(weight, 11, mesh),
        lambda: lmhead.exchange(weight, vocab_size=11, group=mesh),
    ):
        answer = raised(call)
        if answer.error != "ValueError" or "1-D DeviceMesh, got 2-D" not in answer.text:
            wrong.append(f"2-D mesh: {answer}")
        if answer.collectives:
            wrong.append(f"2-D mesh: {answer.collectives}")
    return wrong


def test_a_group_is_a_process_group_or_a_line_of_a_mesh() -> None:
    """And no group is made behind the user's back: `collectives` would have recorded new_group."""
    assert pool(4).run(_grouped) == [[]] * 4


def test_one_process_needs_no_group() -> None:
    assert not dist.is_initialized()
    weight, hidden = whole(12, 8, seed=1), whole(2, 8, seed=2)
    want = PLAIN.truth(hidden, weight, weight[:, 0]).float()
    with collectives() as seen:
        head = lmhead.LMHead(weight, 12)
        assert first_difference(head(hidden), want) is None
        partial = hidden @ weight.t()
        logits = lmhead.exchange(partial, vocab_size=12)
    assert first_difference(logits, want) is None
    assert logits.data_ptr() != partial.data_ptr(), "storage of its own"
    assert seen == []


def test_a_shard_without_its_group_gets_the_hint() -> None:
    for call in (
        lambda: lmhead.LMHead(torch.ones(3, 8), 12),
        lambda: lmhead.exchange(torch.ones(2, 3), vocab_size=12),
    ):
        with pytest.raises(ValueError, match="a shard of several needs its process group"):
            call()


def test_arguments_that_are_no_tensors_are_type_errors() -> None:
    with pytest.raises(TypeError, match="weight_shard must be a tensor, got list"):
        lmhead.LMHead([[1.0]], 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="vocab_size must be an int, got float"):
        lmhead.LMHead(torch.ones(12, 8), 12.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="row_counts must be a host list of 1 ints, got Tensor"):
        lmhead.LMHead(torch.ones(12, 8), 12)(torch.ones(2, 8), torch.tensor([2]))  # type: ignore[arg-type]
