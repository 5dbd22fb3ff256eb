"""Layouts in compiled code, under a capture, by Triton's kernels, under LMHEAD_CHECK=1, and over a
backend without an all-to-all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_cases import caught, checked_mode
from data_head import FLOATS, collectives, normal, raised, shard_of, whole
from data_layout import held_rows, where
from data_sample import mixed
from guards import Trail, violations
from ranks import pool
from torch._dynamo.utils import counters

import lmhead
from lmhead import candidates, comm, operators, ops, route, sample_operators, sampling
from lmhead.sampling import Request
from lmhead.shapes import Layout

BF16, _, FP32 = FLOATS
VOCAB, WIDTH = 24, 8
# (tp_size, dp_size, attn_cp_size)
SIZES = ((4, 2, 1), (4, 1, 1), (4, 2, 2))

Call = Callable[[], Any]


def _head(rank: int, ranks: int, vocab: int = VOCAB, **options: Any) -> lmhead.LMHead:
    dtype = options.pop("dtype", FP32)
    weight = shard_of(whole(vocab, WIDTH, seed=1, dtype=dtype), ranks, rank)
    return lmhead.LMHead(weight, vocab, scale=0.5, **options)


def _hidden(
    sizes: tuple[int, int, int], rank: int, held: list[int], dtype: torch.dtype = FP32
) -> torch.Tensor:
    place = where(sizes, rank, held)
    everyone = whole(sum(held), WIDTH, seed=sum(held), dtype=dtype)
    return everyone[place.holds.start : place.holds.stop].contiguous()


# Operators.


def _opcheck(rank: int, ranks: int, sizes: tuple[int, int, int]) -> int:
    layout, device = Layout.of(*sizes), torch.device("cpu")
    name = dist.group.WORLD.group_name
    weight = _head(rank, ranks).weight
    checks = 0
    for held in ([3] * layout.sets, [5, 0, 2, 1][: layout.sets]):
        rows = layout.rows(held, rank)
        hidden = _hidden(sizes, rank, held)
        counts = None if len(set(held)) == 1 else held
        head = (weight, None, VOCAB, name, ranks, 0.5, None, FP32, FP32, counts, "", "")
        for replicate in (False, True):
            kept = rows.group_total if replicate else rows.own
            given = (hidden, kept, layout.to_list(), False, replicate, "auto", *head)
            torch.library.opcheck(operators.logits_held_op, given)
            out = torch.empty(kept, VOCAB + 3)[:, :VOCAB]
            torch.library.opcheck(operators.logits_held_out_op, (*given, out))
            everyone = whole(sum(held), WIDTH, seed=2)
            gathered = (everyone, kept, layout.to_list(), True, replicate, "auto", *head)
            torch.library.opcheck(operators.logits_held_op, gathered)
        request = Request(top_k=3, logprobs=1, seeds=5, positions=torch.arange(rows.group_total))
        form = request.form(VOCAB, weight.shape[0])
        unseeded = sampling.unseeded(rows.group_total, rank, device)
        words = request.records(rows.group_total, form, VOCAB, device, unseeded).words
        for share in (False, True):
            kept = rows.group_total if share else rows.own
            given = (hidden, words, form.to_list(), None, False, kept, layout.to_list())
            given = (*given, share, "auto", *head)
            torch.library.opcheck(sample_operators.sample_held_op, given)
        parts = [torch.arange(rows.own), normal(rows.own, 3, seed=rank)]
        given = (parts, rows.group_total, layout.to_list(), held, name, ranks)
        torch.library.opcheck(operators.share_op, given)
        checks += 9
    return checks


@pytest.mark.parametrize("sizes", SIZES)
def test_opcheck(sizes: tuple[int, int, int]) -> None:
    assert pool(4).run(_opcheck, sizes) == [18] * 4


def _step(head: lmhead.LMHead, way: str) -> Callable[..., Any]:
    def draw(hidden: torch.Tensor, **options: Any) -> Any:
        positions = torch.arange(hidden.shape[0] * head.layout.attn_cp_size)
        return head.sample(
            hidden * 2, seeds=7, positions=positions, top_k=5, logprobs=1, **options
        ).tensors()

    return {
        "owned": lambda x: head(x * 2) + 1,
        "replicated": lambda x: head(x * 2, replicate=True) + 1,
        "gathered": lambda x: head.forward_gathered(x.repeat(head.layout.sets, 1)) + 1,
        "drawn": draw,
        "drawn and shared": lambda x: draw(x, share=True),
    }[way]


@torch.no_grad()
def _compiled(rank: int, ranks: int, sizes: tuple[int, int, int], way: str) -> list[str]:
    """By Inductor, for row counts that it has not seen, by one graph, with eager bits."""
    torch._dynamo.reset()
    counters.clear()
    head = _head(rank, ranks, layout=Layout.of(*sizes))
    step, wrong = _step(head, way), []
    compiled = torch.compile(step, fullgraph=True)
    for count in (4, 5, 6, 9):
        hidden = _hidden(sizes, rank, [count] * head.layout.sets)
        torch._dynamo.mark_dynamic(hidden, 0)
        got, want = compiled(hidden), step(hidden)
        got, want = (list(of) if isinstance(of, (list, tuple)) else [of] for of in (got, want))
        if not all(map(torch.equal, got, want)):
            wrong.append(f"{count} rows: {got} is not {want}")
    graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return wrong if graphs == (1, 0) else [*wrong, f"{graphs} graphs and breaks"]


@pytest.mark.parametrize("way", ["owned", "replicated", "gathered", "drawn", "drawn and shared"])
@pytest.mark.parametrize("sizes", SIZES[::2])
def test_compiled_layouts_are_the_eager_ones(sizes: tuple[int, int, int], way: str) -> None:
    assert pool(4).run(_compiled, sizes, way) == [[]] * 4


@torch.no_grad()
def _uneven(rank: int, ranks: int, sizes: tuple[int, int, int]) -> list[str]:
    """Row counts that a graph holds as they are, an idle set among them, into a given buffer, and
    tokens that are shared by a call of their own.
    """
    torch._dynamo.reset()
    layout = Layout.of(*sizes)
    held = [3, 0, 4, 1][: layout.sets]
    head = _head(rank, ranks, layout=layout)
    hidden, rows = _hidden(sizes, rank, held), layout.rows(held, rank)

    def step(x: torch.Tensor, out: torch.Tensor) -> Any:
        logits = head(x, held, out)
        ids = head.share(head.sample(x, row_counts=held, temperature=0.0), held)
        return logits + 1, ids

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    outs = [torch.full((rows.own, VOCAB + 1), 7.0)[:, :VOCAB] for _ in range(2)]
    got, want = compiled(hidden, outs[0]), step(hidden, outs[1])
    same = [*map(torch.equal, got, want), torch.equal(*outs)]
    return [] if all(same) else [f"{same}"]


@pytest.mark.parametrize("sizes", SIZES)
def test_compiled_uneven_rows(sizes: tuple[int, int, int]) -> None:
    assert pool(4).run(_uneven, sizes) == [[]] * 4


# A capture.


def _calls(
    head: lmhead.LMHead,
    hidden: torch.Tensor,
    everyone: torch.Tensor,
    held: list[int],
    out: torch.Tensor,
    drawn: dict[str, Any],
) -> dict[str, Call]:
    """Everything that a head may be asked."""
    counts = None if len(set(held)) == 1 else held
    ids = torch.arange(out.shape[0])
    return {
        "owned": lambda: head(hidden, counts),
        "replicated": lambda: head(hidden, counts, replicate=True),
        "into out": lambda: head(hidden, counts, out),
        "gathered": lambda: head.forward_gathered(everyone, counts),
        "share": lambda: head.share(ids, held),
        "drawn": lambda: head.sample(hidden, row_counts=counts, **drawn),
        "drawn and shared": lambda: head.sample(hidden, row_counts=counts, share=True, **drawn),
    }


def _captured(rank: int, ranks: int, sizes: tuple[int, int, int], kernels: str) -> list[str]:
    """Every call of a warmed head under the guard, with the result that it had before; draws by the
    branch that a CUDA device takes.
    """
    layout, wrong = Layout.of(*sizes), []
    dtype = BF16 if kernels == "triton" else FP32
    for held in ([2] * layout.sets, [3, 0, 2, 1][: layout.sets]):
        rows, hidden = layout.rows(held, rank), _hidden(sizes, rank, held, dtype)
        everyone = whole(sum(held), WIDTH, seed=sum(held), dtype=dtype)
        head = _head(rank, ranks, layout=layout, kernels=kernels, dtype=dtype)
        out = torch.empty(rows.own, VOCAB, dtype=dtype)
        drawn = {"top_k": 3, "seeds": 5, "positions": torch.arange(rows.group_total)}
        calls = _calls(head, hidden, everyone, held, out, drawn)
        before = {name: call().clone() for name, call in calls.items()}
        with mock.patch.object(candidates, "_chosen", lambda mask: mask):
            trail = Trail()
            with trail.recording():
                head.warmup([held], sample=drawn, replicate=True)
                head.warmup([held], out)
            after = {name: violations(call, trail) for name, call in calls.items()}
        for name, (got, found) in after.items():
            allowed = {"allocation"} if "drawn" in name or name == "share" else set()
            wrong += [f"{name}: {kind}: {text}" for kind, text in found if kind not in allowed]
            if not torch.equal(got, before[name]):
                wrong.append(f"{name}: {got} is not {before[name]}")
    return wrong


@pytest.mark.parametrize("sizes", SIZES)
def test_warmed_layouts_are_capture_safe(sizes: tuple[int, int, int]) -> None:
    assert pool(4).run(_captured, sizes, "torch") == [[]] * 4


def test_warmed_layouts_are_capture_safe_by_kernels() -> None:
    assert pool(2).run(_captured, (2, 1, 1), "triton") == [[]] * 2


def _unwarmed(rank: int, ranks: int) -> list[Any]:
    """In a capture, after a warm-up of owned logits alone."""
    head = _head(rank, ranks, layout=Layout.of(ranks, 2))
    hidden = _hidden((ranks, 2, 1), rank, [2, 2])
    head.warmup([2], sample={"temperature": 0.5}, replicate=False)
    assert head.last_route is None and head.last_rows is None and head.stats() == {}
    with mock.patch.object(ops, "is_capturing", lambda device: True):
        return [
            raised(lambda: head(hidden)),
            raised(lambda: head(hidden, replicate=True)),
            raised(lambda: head.sample(hidden, temperature=0.0, share=True)),
            raised(lambda: head(hidden, [2, 3] if rank // 2 == 0 else [3, 2])),
        ]


def test_a_capture_refuses_what_was_not_warmed_up() -> None:
    for warm, replicated, drawn, uneven in pool(4).run(_unwarmed):
        assert warm.error == ""
        assert replicated.error == drawn.error == uneven.error == "RuntimeError"
        assert "warmup(rows=[2], replicate=True)" in replicated.text
        assert "warmup(rows=[2], sample=those parameters)" in drawn.text
        assert "before they were warmed up" in uneven.text
        assert not (replicated.collectives or drawn.collectives or uneven.collectives)


def _graphs(rank: int, ranks: int, sizes: tuple[int, int, int]) -> list[list[int]]:
    """A decode step whose tokens are shared, so that it returns as many as it was given rows."""
    head = _head(rank, ranks, layout=Layout.of(*sizes))

    def step(hidden: torch.Tensor) -> torch.Tensor:
        return head.sample(hidden, temperature=0.0, share=True)

    graphs = lmhead.DecodeGraphs(step, (2, 4), heads=(head,))
    graphs.capture(torch.empty(1, WIDTH))
    found = []
    refused = raised(lambda: graphs(torch.zeros(1, WIDTH), agreed=[1] * ranks))
    assert "agreed must name 2 sets of ranks that hold rows, got 4" in refused.text, refused
    for count in (1, 3, 4):
        hidden = _hidden(sizes, rank, [count] * head.layout.sets)
        found.append(graphs(hidden, agreed=[count] * head.layout.sets).tolist())
        assert found[-1] == head.sample(hidden, temperature=0.0, share=True).tolist()
    return found


def test_decode_graphs_replay_a_shared_draw() -> None:
    found = pool(4).run(_graphs, (4, 2, 1))
    assert found[0] == found[1] and found[2] == found[3] and found[0] != found[2]


# Kernels.


def _by_kernels(rank: int, ranks: int, sizes: tuple[int, int, int]) -> list[str]:
    """Triton's kernels, in the interpreter, against torch's: owned, replicated and drawn."""
    layout, wrong = Layout.of(*sizes), []
    for vocab in (VOCAB, VOCAB - 1):
        heads = [
            _head(rank, ranks, vocab, layout=layout, kernels=kernels, dtype=BF16)
            for kernels in ("torch", "triton")
        ]
        for held in ([2] * layout.sets, [3, 0, 2, 1][: layout.sets]):
            hidden = _hidden(sizes, rank, held, BF16)
            count = layout.rows(held, rank).group_total
            drawn = mixed(count, vocab, 3) | {"candidates": vocab}
            results = [
                (
                    head(hidden, held),
                    head(hidden, held, replicate=True),
                    head.sample(hidden, row_counts=held, share=True, **drawn),
                )
                for head in heads
            ]
            wrong += [
                f"V={vocab}, {held}: {one} is not {other}"
                for one, other in zip(*results, strict=True)
                if not torch.equal(one, other)
            ]
    return wrong


@pytest.mark.parametrize("sizes", [(2, 1, 1), (4, 2, 1)])
def test_kernels_give_what_torch_gives(sizes: tuple[int, int, int]) -> None:
    assert pool(sizes[0]).run(_by_kernels, sizes) == [[]] * sizes[0]


# A backend that is not known to have an all-to-all.


@contextlib.contextmanager
def _without_all_to_all() -> Iterator[None]:
    with (
        mock.patch.object(comm, "ALL_TO_ALL_BACKENDS", frozenset()),
        mock.patch.object(route, "ALL_TO_ALL_BACKENDS", frozenset()),
        mock.patch.object(comm.Comm, "gathers_by_exchange", False),
    ):
        route.choose_by.cache_clear()
        yield
    route.choose_by.cache_clear()


def _by_gathers(rank: int, ranks: int, sizes: tuple[int, int, int]) -> list[str]:
    layout, wrong, work = Layout.of(*sizes), [], lmhead.Workspace()
    head = _head(rank, ranks, layout=layout)
    partials = {
        total: (whole(total, WIDTH, seed=total) @ head.weight.t()) * 0.02 for total in range(40)
    }
    for number in (1, 2, 3, 5, 8):
        held, _ = held_rows(sizes, number)
        hidden = _hidden(sizes, rank, held)
        given = mixed(layout.rows(held, rank).group_total, VOCAB, 3)
        given["mask"] = torch.ones(given["seeds"].shape[0], VOCAB, dtype=torch.bool)
        given["mask"][:, :3] = False

        def results(given: Any = given, held: Any = held, hidden: Any = hidden) -> list[Any]:
            sample = head.sample(hidden, row_counts=held, details=True, **given)
            found = [head(hidden, held), *sample.tensors(), *head.share(sample).tensors()]
            for _ in range(2):  # into the same buffers
                options = {"layout": layout, "row_counts": held, "workspace": work, **given}
                drawn = lmhead.sample_exchange(partials[sum(held)], vocab_size=VOCAB, **options)
                found += drawn.tensors()
            return found

        want = results()
        with _without_all_to_all(), collectives() as seen:
            got = results()
            names = {moved.collective for moved in seen}
            if sum(held) and (head.last_route.rule != "backend" or len(names) != 1):
                wrong.append(f"{held}: {head.last_route} by {names}")
        pairs = zip(got, want, strict=True)
        wrong += [f"{held}: {a} is not {b}" for a, b in pairs if not torch.equal(a, b)]
    return wrong


@pytest.mark.parametrize("sizes", SIZES)
def test_without_an_all_to_all_gathers_do_the_same(sizes: tuple[int, int, int]) -> None:
    assert pool(4).run(_by_gathers, sizes) == [[]] * 4


# Under a caller's own GEMM.


@torch.no_grad()
def _own_gemm(rank: int, ranks: int, sizes: tuple[int, int, int]) -> list[str]:
    """`exchange`, `sample_exchange` and `share`, eager and compiled, against the head's own."""
    layout, wrong = Layout.of(*sizes), []
    head = _head(rank, ranks, VOCAB - 1, layout=layout)
    work = lmhead.Workspace()
    for held in ([4] * layout.sets, [3, 0, 2, 1][: layout.sets]):
        counts = None if len(set(held)) == 1 and held[0] == 4 else held
        everyone = whole(sum(held), WIDTH, seed=sum(held))
        partial = (everyone @ head.weight.t()) * 0.5
        hidden, options = _hidden(sizes, rank, held), {"vocab_size": VOCAB - 1, "layout": layout}
        given = mixed(layout.rows(held, rank).group_total, VOCAB - 1, 5)
        given["mask"] = torch.ones(given["seeds"].shape[0], VOCAB - 1, dtype=torch.bool)
        given["mask"][:, :2] = False
        drawn = head.sample(hidden, row_counts=counts, logprobs=1, **given)
        want = [head(hidden, counts), *drawn.tensors(), *head.share(drawn).tensors()]

        def step(
            partial: torch.Tensor,
            counts: Any = counts,
            held: Any = held,
            given: Any = given,
            options: Any = options,
        ) -> list[torch.Tensor]:
            eager = not torch.compiler.is_compiling()
            kept = {"workspace": work} if eager else {}
            logits = lmhead.exchange(partial * 1.0, row_counts=counts, **options, **kept)
            found = lmhead.sample_exchange(
                partial * 1.0, row_counts=counts, logprobs=1, **options, **given, **kept
            )
            shared = lmhead.share(found, layout=layout, row_counts=held, **kept)
            return [logits, *found.tensors(), *shared.tensors()]

        torch._dynamo.reset()
        for name, call in (
            ("eager", step),
            ("compiled", torch.compile(step, fullgraph=True, backend="aot_eager")),
        ):
            pairs = zip(call(partial), want, strict=True)
            wrong += [f"{name}, {held}: {a}, not {b}" for a, b in pairs if not torch.equal(a, b)]
    return wrong


@pytest.mark.parametrize("sizes", SIZES)
def test_own_gemms_have_layouts_too(sizes: tuple[int, int, int]) -> None:
    assert pool(4).run(_own_gemm, sizes) == [[]] * 4


def _one_row(rank: int, ranks: int) -> list[list[int]]:
    """One masked row in all, whose mask has more bytes than its hidden row: several draws."""
    vocab = 1024
    weight = shard_of(whole(vocab, 4, seed=1), ranks, rank)
    found = []
    for layout in (Layout.data_parallel(ranks), Layout.of(ranks, 2)):
        head = lmhead.LMHead(weight, vocab, layout=layout, route="all_gather")
        held = [1] + [0] * (layout.sets - 1)
        rows = layout.rows(held, rank)
        mask = torch.ones(rows.group_total, vocab, dtype=torch.bool)
        mask[:, :900] = False
        hidden = whole(rows.brought, 4, seed=2)
        for _ in range(4):
            given = {"seeds": 3, "positions": 5, "mask": mask, "share": True, "temperature": 40.0}
            found.append(head.sample(hidden, row_counts=held, **given).tolist())
    return found


def test_one_masked_row_is_drawn_the_same_again() -> None:
    single = lmhead.LMHead(whole(1024, 4, seed=1), 1024)
    mask = torch.arange(1024)[None] >= 900
    given = {"seeds": 3, "positions": 5, "mask": mask, "temperature": 40.0}
    want = single.sample(whole(1, 4, seed=2), **given).tolist()
    assert want != single.sample(whole(1, 4, seed=2), mask=mask, temperature=0.0).tolist()
    plain, *rest = pool(4).run(_one_row)
    assert plain == [want] * 8
    assert all(
        found[4:] == ([want] * 4 if rank == 1 else [[]] * 4) for rank, found in enumerate(rest, 1)
    )


@torch.no_grad()
def _dynamic(rank: int, ranks: int) -> list[str]:
    """Two layouts through one compiled function, static and dynamic: sizes become symbols."""
    wrong = []
    weight = whole(VOCAB, WIDTH, seed=1)
    for dynamic in (None, True):
        torch._dynamo.reset()

        def step(partial: torch.Tensor, layout: Layout, held: list[int]) -> list[torch.Tensor]:
            given = {"vocab_size": VOCAB, "layout": layout, "row_counts": held}
            logits = lmhead.exchange(partial * 1.0, **given)
            ids = lmhead.sample_exchange(partial * 1.0, temperature=0.0, **given).ids
            return [logits, ids, lmhead.share(ids, layout=layout, row_counts=held)]

        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for sizes in SIZES:
            layout = Layout.of(*sizes)
            held = [3, 1, 2, 5][: layout.sets]
            everyone = whole(sum(held), WIDTH, seed=sum(held))
            partial = everyone @ shard_of(weight, ranks, rank).t()
            pairs = zip(compiled(partial, layout, held), step(partial, layout, held), strict=True)
            wrong += [f"{dynamic} {sizes}: {a}, {b}" for a, b in pairs if not torch.equal(a, b)]
    return wrong


def test_one_compiled_function_takes_several_layouts() -> None:
    assert pool(4).run(_dynamic) == [[]] * 4


# The rules, and who disagrees.


def _published(rank: int, ranks: int) -> list[Any]:
    """What policy "sglang" takes, call by call, and what was counted."""
    plain = _head(rank, ranks, policy="sglang")
    groups = _head(rank, ranks, policy="sglang", layout=Layout.of(ranks, 2))
    found = []
    for held in ([2] * ranks, [2, 2, 1, 2], [2, 2, 0, 2], [0] * ranks):
        plain(_hidden((ranks, ranks, 1), rank, held), held)
        found.append(plain.last_route.rule)
    groups(_hidden((ranks, 2, 1), rank, [2, 2]))
    found.append(groups.last_route.rule)
    plain.warmup(2)
    torch._dynamo.reset()
    held, ways = [2, 2, 1, 2], []
    hidden = _hidden((ranks, ranks, 1), rank, held)
    for head in (plain, _head(rank, ranks)):
        compiled = torch.compile(lambda x, head=head: head(x, held), backend="aot_eager")
        with torch.no_grad(), collectives() as seen:
            compiled(hidden)
        ways.append(seen[-1].collective)
    return [*found, plain.stats(), groups.stats(), ways]


def test_the_published_policy_falls_back_where_it_does() -> None:
    for *rules, plain, groups, (compiled, ours) in pool(4).run(_published):
        assert compiled.startswith("all_gather") and ours == "all_to_all_single"
        uneven = "published_uneven"
        assert rules == ["default", uneven, uneven, "no_rows", "published_layout"]
        assert {name: found.rules for name, found in plain.items()} == {
            "all_to_all": {"default": 1},
            "all_gather": {uneven: 2},
            "local": {"no_rows": 1},
        }
        assert plain["all_to_all"].calls == 1 and plain["all_gather"].calls == 2
        assert plain["all_gather"].bytes == 3 * (7 + 6) * (VOCAB // 4) * 4
        assert plain["local"].bytes == 0
        assert groups["all_gather"].rules == {"published_layout": 1}


def _checked(rank: int, ranks: int) -> dict[str, Any]:
    """What rank 1 does otherwise than the others, under LMHEAD_CHECK=1."""
    checked_mode()
    odd = rank == 1
    sizes, held = (ranks, 2, 1), [2, 2]
    head = _head(rank, ranks, layout=Layout.of(*sizes))
    hidden = _hidden(sizes, rank, held)
    other = Layout(1, 2, 2) if odd else Layout(2, 2, 1)
    mine = other.rows([2, 2], rank).own
    return {
        "replicate": caught(lambda: head(hidden, replicate=odd)),
        "counts": caught(lambda: head(hidden, [2, 3] if odd else [2, 2])),
        "share": caught(lambda: head.sample(hidden, share=odd)),
        "shared rows": caught(lambda: head.share(torch.zeros(3 if odd else 1), held)),
        "shared dtype": caught(
            lambda: head.share(torch.zeros(1, dtype=torch.int64 if odd else torch.int32), held)
        ),
        "same": caught(lambda: head.share(torch.zeros(1), held).tolist()),
        # As many sets of ranks, but other groups and owners.
        "layout, exchange": caught(
            lambda: lmhead.exchange(torch.ones(6, 2), vocab_size=8, layout=other, row_counts=[3, 3])
        ),
        "layout, draw": caught(
            lambda: lmhead.sample_exchange(
                torch.ones(6, 2), vocab_size=8, layout=other, row_counts=[3, 3], top_k=2
            )
        ),
        "layout, share": caught(
            lambda: lmhead.share(torch.zeros(mine), layout=other, row_counts=[2, 2])
        ),
        "operator, share": caught(
            lambda: torch.ops.lmhead.share(
                [torch.zeros(3 if odd else 1)], 2, [2, 2, 1], held, head._comm.name, ranks
            )
        ),
    }


def test_ranks_that_ask_for_different_things_all_raise() -> None:
    found = pool(4).run(_checked)
    for name in found[0]:
        errors = [rank[name].error for rank in found]
        assert errors == ([""] * 4 if name == "same" else ["ValueError"] * 4), (name, found)
