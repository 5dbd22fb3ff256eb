"""Every parallel layout: logits and drawn tokens of every row are those of one process, each row is
owned once, and no more bytes move than its owner needs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_head import Arithmetic, normal, raised, shard_of, whole
from data_layout import SIZES, crossed, held_rows, where
from data_sample import edits, mixed, rows_of
from ranks import pool
from test_sample_statistics import ENOUGH, KINDS, logits_of, p_value, probabilities

import lmhead
from lmhead import shapes
from lmhead.shapes import Layout

STEPS = 50
VOCABS = (96, 101)  # a multiple of every N, and not; steps take turns
WIDTH = 16


def _data(vocab: int, number: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [T, H], whole numbers whose products fp32 holds exactly, and the rows' parameters."""
    return whole(total, WIDTH, seed=100 * vocab + number), whole(vocab, WIDTH, seed=vocab)


def _given(vocab: int, number: int, total: int) -> dict[str, Any]:
    given = mixed(total, vocab, 7 * number + vocab)
    return given | (edits(total, vocab, number) if number % 6 == 1 else {})


def _heads(rank: int, ranks: int, sizes: tuple[int, int, int], vocab: int) -> list[lmhead.LMHead]:
    """By the rules, and by the all-gather."""
    shard = shard_of(_data(vocab, 0, 1)[1], ranks, rank, padding=float("nan"))
    layout = Layout.of(*sizes)
    return [
        lmhead.LMHead(shard, vocab, scale=0.0625, layout=layout, route=route)
        for route in (None, "all_gather")
    ]


def _steps(rank: int, ranks: int, sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    """What one rank ends with in every step, by the all-to-all; that the all-gather gives the same
    bits is held here.
    """
    both = {vocab: _heads(rank, ranks, sizes, vocab) for vocab in VOCABS}
    found = []
    for number in range(STEPS):
        held, equal = held_rows(sizes, number)
        vocab = VOCABS[number % 2]
        heads = both[vocab]
        hidden, _ = _data(vocab, number, sum(held))
        place = where(sizes, rank, held)
        counts = None if equal else held
        own = hidden[place.holds.start : place.holds.stop]
        given = rows_of(
            _given(vocab, number, sum(held)), slice(place.group.start, place.group.stop)
        )
        head, other = heads
        logits = head(own, counts)
        route = ("all_to_all", "default") if sum(held) else ("local", "no_rows")
        assert (head.last_route.name, head.last_route.rule) == route
        rows = head.last_rows
        assert (rows.start, rows.own) == (place.owns.start, len(place.owns))
        sample = head.sample(own, row_counts=counts, logprobs=2, **given)
        shared = head.share(sample)
        whole_group = head(own, counts, replicate=True)
        assert torch.equal(head.forward_gathered(hidden, counts), logits)
        assert torch.equal(head.share(sample.ids, held), shared.ids)
        begin = place.owns.start - place.group.start
        mine = slice(begin, begin + len(place.owns))
        assert torch.equal(whole_group[mine], logits)
        for part, everybody in zip(sample.tensors(), shared.tensors(), strict=True):
            assert torch.equal(everybody[mine].nan_to_num(-7), part.nan_to_num(-7))
        assert torch.equal(other(own, counts), logits)
        assert other.last_route.name == ("all_gather" if sum(held) else "local")
        assert torch.equal(other(own, counts, replicate=True), whole_group)
        again = other.sample(own, row_counts=counts, logprobs=2, share=True, **given)
        for part, same in zip(again.tensors(), shared.tensors(), strict=True):
            assert torch.equal(part.nan_to_num(-7), same.nan_to_num(-7))
        said = {"logits": logits, "whole": whole_group}
        said |= {"ids": shared.ids, "top": shared.top_logprobs}
        found.append(said | {"owns": place.owns, "group": place.group})
    assert head.stats()["all_to_all"].rules["default"] >= 2 * 20
    return found


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)))
def test_every_row_is_that_of_one_process(sizes: tuple[int, int, int]) -> None:
    """50 steps of random rows, with uneven counts and idle groups: logits, drawn tokens and their
    log-probabilities, bit for bit, by both routes, owned, shared and replicated.
    """
    ranks = pool(sizes[0]).run(_steps, sizes)
    singles = {vocab: lmhead.LMHead(_data(vocab, 0, 1)[1], vocab, scale=0.0625) for vocab in VOCABS}
    for number in range(STEPS):
        held, _ = held_rows(sizes, number)
        total, vocab = sum(held), VOCABS[number % 2]
        single = singles[vocab]
        hidden, _ = _data(vocab, number, total)
        logits = single(hidden)
        sample = single.sample(hidden, logprobs=2, **_given(vocab, number, total))
        owned = []
        for found in ranks:
            step = found[number]
            owned += list(step["owns"])
            own, group = (slice(part.start, part.stop) for part in (step["owns"], step["group"]))
            assert torch.equal(step["logits"], logits[own])
            assert torch.equal(step["whole"], logits[group])
            assert torch.equal(step["ids"], sample.ids[group])
            close = torch.testing.assert_close
            close(step["top"], sample.top_logprobs[group], rtol=0, atol=2e-6)
        assert owned == list(range(total)), "each row is owned once, in order"


def _rounded(rank: int, ranks: int, sizes: tuple[int, int, int]) -> int:
    """Numbers that round: both routes and every form of the call give the same bits; rows so."""
    layout, vocab = Layout.of(*sizes), 203
    compared = 0
    for dtype, options in (
        (torch.bfloat16, {"softcap": 30.0}),
        (torch.bfloat16, {"logits_dtype": torch.float32}),
        (torch.float32, {"scale": 0.3, "wire_dtype": torch.bfloat16}),
    ):
        weight, bias = normal(vocab, 24, seed=1, dtype=dtype), normal(vocab, seed=2)
        arithmetic = Arithmetic(bias=True, **options)
        heads = [
            arithmetic.head(weight, bias, ranks, rank, layout=layout, route=route)
            for route in ("all_to_all", "all_gather")
        ]
        for number in range(8):
            held, _ = held_rows(sizes, number)
            hidden = normal(sum(held), 24, seed=number, dtype=dtype)
            place = where(sizes, rank, held)
            own = hidden[place.holds.start : place.holds.stop]
            one, other = (head(own, held) for head in heads)
            assert torch.equal(one, other)
            error = (one.double() - arithmetic.truth(hidden, weight, bias)[list(place.owns)]).abs()
            assert not error.numel() or float(error.max()) < 0.5
            compared += one.shape[0]
    return compared


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes)))
def test_both_routes_give_the_same_bits_where_numbers_round(sizes: tuple[int, int, int]) -> None:
    assert sum(pool(sizes[0]).run(_rounded, sizes)) > 0


# Bytes.  S and H stand to each other as in DeepSeek-V4-Pro's head on 8 ranks, 16160 to 7168.
SHARD, HIDDEN = 72, 32


def _moved(
    rank: int, ranks: int, sizes: tuple[int, int, int], total: int, options: dict[str, Any]
) -> dict[str, tuple[int, int]]:
    """Bytes in the busier direction, counted and by arithmetic, of one head call's hidden rows and
    logits, by route; of a draw; and of sharing its tokens.
    """
    layout = Layout.of(*sizes)
    vocab, width = SHARD * ranks, HIDDEN
    held = [total // layout.sets] * layout.sets
    rows = layout.rows(held, rank)
    hidden = normal(rows.brought, width, seed=rank // layout.attn_tp_size, dtype=torch.bfloat16)
    weight = shard_of(normal(vocab, width, seed=3, dtype=torch.bfloat16), ranks, rank)
    found = {}
    for route in ("all_to_all", "all_gather"):
        head = lmhead.LMHead(weight, vocab, layout=layout, route=route)
        with crossed() as seen:
            head(hidden, **options)
        counted = {name: max(seen.sent[name], seen.received[name]) for name in seen.sent}
        gathered = shapes.gathered_bytes(rows, width, 2)
        whole_rows = options.get("replicate", False)
        moved = shapes.moved_bytes(route, rows, SHARD, 2, whole_rows)
        assert head.stats()[route].bytes == moved
        if route == "all_gather":
            assert counted.get("all_to_all", 0) == gathered
            assert counted["all_gather"] == moved
            assert seen.busier == gathered + moved
        else:
            assert seen.busier == gathered + moved
            assert set(counted) == {"all_to_all"}
        found[route] = (seen.busier, moved)
    head = lmhead.LMHead(weight, vocab, layout=layout)
    with crossed() as seen:
        drawn = head.sample(hidden, top_k=4, seeds=torch.arange(rows.group_total), positions=3)
    found["candidates"] = (seen.busier, head.stats()["candidates"].bytes)
    with crossed() as seen:
        head.share(drawn)
    others = rows.group_total - rows.own
    assert seen.busier == max(others, (rows.span - 1) * rows.own) * 8
    return found


def test_a_mixed_layout_moves_no_more_than_pure_data_parallel() -> None:
    """At the collective, on 8 ranks and the same total rows: (8, 4, 1) as much of logits as (8, 8,
    1) and less of hidden rows; than the all-gather, eight times less of logits, and six times less
    with the hidden rows that both need.
    """
    total = 8 * 9
    pure = pool(8).run(_moved, (8, 8, 1), total, {})
    mixed_ = pool(8).run(_moved, (8, 4, 1), total, {})
    for before, now in zip(pure, mixed_, strict=True):
        assert now["all_to_all"][1] == before["all_to_all"][1]
        assert now["all_to_all"][0] <= before["all_to_all"][0]
        assert now["all_gather"][1] == 8 * now["all_to_all"][1]
        assert now["all_gather"][0] >= 6 * now["all_to_all"][0]
        assert now["candidates"][1] <= total // 8 * 7 * (8 * 4 + 16)


@pytest.mark.parametrize("sizes", [(8, 4, 1), (8, 2, 1), (4, 1, 1), (4, 2, 2)])
def test_replicating_costs_as_many_times_the_bytes_as_a_group_has_ranks(
    sizes: tuple[int, int, int],
) -> None:
    layout = Layout.of(*sizes)
    once = pool(sizes[0]).run(_moved, sizes, 16, {})
    every = pool(sizes[0]).run(_moved, sizes, 16, {"replicate": True})
    for one, all_of_them in zip(once, every, strict=True):
        assert all_of_them["all_to_all"][1] == layout.span * one["all_to_all"][1]


def _nothing_gathered(rank: int, ranks: int) -> list[str]:
    """Tensor-parallel attention: every rank has every hidden row already."""
    head = lmhead.LMHead(normal(16, 8, seed=rank), 16 * ranks, layout=Layout.tensor_parallel(ranks))
    with crossed() as seen:
        head(normal(2 * ranks, 8, seed=9))
    return [f"{name} {seen.sent[name]}" for name in seen.sent] + [f"{len(seen.calls)} in all"]


def test_hidden_rows_that_every_rank_has_are_not_gathered() -> None:
    for seen in pool(4).run(_nothing_gathered):
        assert seen == [f"all_to_all {3 * 2 * 16 * 4}", "1 in all"]


# Mistakes.


def _mistakes(rank: int, ranks: int) -> list[Any]:
    weight, hidden = normal(5, 8, seed=rank), normal(3, 8, seed=0)
    layout = Layout.of(ranks, ranks // 2)
    head, other = (lmhead.LMHead(weight, 5 * ranks, layout=layout) for _ in range(2))
    return [
        raised(lambda: lmhead.LMHead(weight, 5 * ranks, layout=Layout.of(ranks * 2, ranks))),
        raised(lambda: lmhead.LMHead(weight, 5 * ranks, layout=[2, 1, 1])),
        raised(lambda: lmhead.LMHead(weight, 5 * ranks, policy="vllm")),
        raised(lambda: head(hidden, [3] * ranks)),
        raised(lambda: head(hidden, [2, 2])),
        raised(lambda: head.forward_gathered(hidden)),
        raised(lambda: head.share(torch.zeros(7), [3, 3])),
        raised(lambda: head.share([1, 2], [3, 3])),
        raised(lambda: other.share(torch.zeros(2))),
        raised(lambda: head.sample(hidden, row_counts=[3, 3], temperature=torch.ones(2))),
    ]


def test_mistakes_are_told_with_their_numbers_before_any_collective() -> None:
    for rank, found in enumerate(pool(4).run(_mistakes)):
        words = [
            ("ValueError", "the layout is for 8 ranks"),
            ("TypeError", "layout must be a Layout or None, got list"),
            ("ValueError", "policy must be one of auto, sglang, got 'vllm'"),
            ("ValueError", "2 sets of ranks that hold rows, got 4: [3, 3, 3, 3]"),
            ("ValueError", f"rank {rank} holds 2 rows (count {rank // 2} of 2), but hidden has 3"),
            ("ValueError", "gathered has 3 rows, which 2 sets of ranks cannot hold in equal parts"),
            (
                "ValueError",
                f"this rank owns {2 - rank % 2} rows, and what is shared has shape (7,)",
            ),
            ("TypeError", "what is shared must be a tensor, got list"),
            ("ValueError", "nothing was called yet"),
            ("ValueError", "temperature must be a number or [3], got (2,)"),
        ]
        for said, wanted in zip(found, words, strict=True):
            assert said.error == wanted[0] and wanted[1] in said.text, said
        assert all(not said.collectives for said in found[3:4] + found[5:])


def _disagree(rank: int, ranks: int) -> Any:
    layout = Layout.of(ranks, 2) if rank else Layout.of(ranks, 4)
    return raised(lambda: lmhead.LMHead(normal(5, 8, seed=0), 5 * ranks, layout=layout))


def test_ranks_that_disagree_on_the_layout_all_say_so() -> None:
    for said in pool(4).run(_disagree):
        assert said.error == "ValueError" and "layout is" in said.text, said


def test_sizes_that_do_not_divide_are_refused_with_their_numbers() -> None:
    with pytest.raises(ValueError, match="tp_size 8 is no multiple of dp_size 3"):
        Layout.of(8, 3)
    with pytest.raises(ValueError, match="dp_size must be positive, got 0"):
        Layout.of(8, 0)
    with pytest.raises(TypeError, match="attn_cp_size must be an int, got float"):
        Layout.of(8, 2, 2.0)  # type: ignore[arg-type]
    assert Layout.of(8, 2, 2) == Layout(2, 2, 2) and Layout.of(8, 8).plain
    assert str(Layout.of(8, 2, 2)) == (
        "2 attention groups of 2 context-parallel ranks of 2 tensor-parallel ranks"
    )


# Unseeded draws.


def _unseeded(rank: int, ranks: int, sizes: tuple[int, int, int], given: dict[str, Any]) -> Any:
    """What 40 calls of 64 rows with the same logits draw, on ranks whose generators differ."""
    torch.manual_seed(1000 + 7 * rank)
    layout = Layout.of(*sizes)
    logits = logits_of(100)
    head = lmhead.LMHead(shard_of(logits[:, None], ranks, rank), 100, layout=layout)
    held = [64 if cell == 0 else 3 for cell in range(layout.sets)]
    hidden = torch.ones(layout.rows(held, rank).brought, 1)
    return [head.sample(hidden, row_counts=held, share=True, **given) for _ in range(40)]


@pytest.mark.parametrize("kind", ["temperature", "top-k", "mixture"])
@pytest.mark.parametrize("sizes", [(4, 1, 1), (4, 2, 1), (4, 2, 2)])
def test_unseeded_draws_are_the_same_on_all_ranks_of_a_group(
    sizes: tuple[int, int, int], kind: str
) -> None:
    """Each rank draws seeds of its own, and the shards of a row may see different ones; what its
    owner makes of them has the probabilities that it should, and the whole group gets it.
    """
    found = pool(4).run(_unseeded, sizes, KINDS[kind])
    span = Layout.of(*sizes).span
    for group in (found[first : first + span] for first in range(0, 4, span)):
        for rank in group[1:]:
            assert all(map(torch.equal, rank, group[0]))
    ids = torch.cat([call[:64] for call in found[0]])
    assert ids.numel() == 2560 and len(set(map(tuple, ids.view(40, 64).tolist()))) == 40
    assert p_value(ids, probabilities(logits_of(100), **KINDS[kind])) > ENOUGH
