"""Who holds and who owns which gathered rows, as a picture, and what that makes each rank move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lmhead.bench.roofline import Step
from lmhead.sampling import Request
from lmhead.shapes import Layout, Rows, gathered_bytes, moved_bytes, shard_rows

TOP_K = 20
ID_BYTES = 8  # sampled ids are int64
PICTURED = 16  # ranks that are drawn one by one; of more the first and the last
COLUMNS = 32

# What a step moves, by route, and beside it.
ROUTES = {
    "all_to_all": "logits, to the rank that owns a row",
    "all_gather": "logits of all rows, to every rank",
    "candidates": f"instead of logits, the messages of a draw with top_k = {TOP_K}",
    "dp_head": "logits, among the ranks that share a group's vocabulary",
    "replicate": "logits, to all ranks of a row's group (replicate=True)",
    "local": "nothing: the vocabulary is whole on every rank",
}
BESIDE = {
    "hidden": "hidden rows, to ranks without them; not for dp_head and local",
    "share": "sampled ids, to the other ranks of the group (share)",
}


def moved(
    every: Sequence[Rows],
    small: Sequence[Rows],
    step: Step,
    inside: str = "all_to_all",
    outcome: str = "all_to_all",
) -> dict[str, tuple[int, ...]]:
    """Bytes that each rank moves in a step, by the names of `ROUTES` and `BESIDE`, in its busier
    direction.  `small` are its rows of a head that fewer ranks share, whose logits go by `inside`.

    Logits and hidden rows by `lmhead.shapes`; where the `outcome` is that all are gathered, so are
    candidates, and logits that are replicated.  share: sent (span - 1) * B ids, received G - B.
    """
    shard, size = step.shard, step.wire_itemsize
    way = "all_gather" if outcome == "all_gather" else "all_to_all"
    form = Request(top_k=min(TOP_K, step.vocab - 1) or None).form(step.vocab, shard)

    def by(count: Callable[[Rows], int]) -> tuple[int, ...]:
        return tuple(count(rows) for rows in every)

    def shared(rows: Rows) -> int:
        return max((rows.span - 1) * rows.own, rows.group_total - rows.own) * ID_BYTES

    return {
        "all_to_all": by(lambda rows: moved_bytes("all_to_all", rows, shard, size)),
        "all_gather": by(lambda rows: moved_bytes("all_gather", rows, shard, size)),
        "candidates": by(lambda rows: moved_bytes(way, rows, form.message_words, 4)),
        "dp_head": tuple(
            moved_bytes(inside, rows, shard_rows(step.vocab, rows.ranks), size) for rows in small
        ),
        "replicate": by(lambda rows: moved_bytes(way, rows, shard, size, replicate=True)),
        "local": by(lambda rows: 0),
        "hidden": by(lambda rows: gathered_bytes(rows, step.hidden, step.itemsize)),
        "share": by(shared),
    }


def picture(layout: Layout, ranks: Sequence[Rows]) -> Iterator[str]:
    """Who holds and who owns which gathered rows, a line per rank; of more than 16 ranks the first
    and the last.
    """
    total = ranks[0].total
    columns = min(total, COLUMNS)
    scale = "a row" if columns == total else f"{total / columns:.4g} rows, marked by any"
    title = f"who owns which of {total} gathered rows"
    if len(title) + len(str(layout)) > 96:
        yield title
        yield f"  {layout}"
    else:
        yield f"{title} ({layout})"
    if total:
        yield f"  # holds and owns, + owns, - holds; a character is {scale}"
    shown = list(range(len(ranks)))
    if len(shown) > PICTURED:
        shown = shown[: PICTURED // 2] + shown[-2:]
    named = -1
    before = -1
    for rank in shown:
        if rank != before + 1:
            yield f"  ... {rank - before - 1} ranks more"
        before, rows = rank, ranks[rank]
        group = "" if named == rank // rows.span else f"group {rank // rows.span}"
        named = rank // rows.span
        held = _range(rows.brought_start, rows.brought)
        yield (
            f"  {group:<9}rank {rank:<3}|{_bar(rows, columns)}| holds {held:<13}owns "
            f"{_range(rows.start, rows.own)}"
        ).rstrip()


def _bar(rows: Rows, columns: int) -> str:
    """A character per column, marked where one of the column's rows is owned or held."""

    def marked(first: int, count: int) -> range:
        if not count:
            return range(0)
        return range(first * columns // rows.total, (first + count - 1) * columns // rows.total + 1)

    owned = marked(rows.start, rows.own)
    held = marked(rows.brought_start, rows.brought)
    marks = {(True, True): "#", (True, False): "+", (False, True): "-", (False, False): " "}
    return "".join(marks[column in owned, column in held] for column in range(columns))


def _range(first: int, count: int) -> str:
    if count < 2:
        return str(first) if count else "none"
    return f"{first}..{first + count - 1}"
