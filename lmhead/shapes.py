"""Shapes, shards and rows: the arithmetic that every rank must do alike, and the messages when it
cannot be done.

Nothing here knows a process group; every function is pure.  Letters: N ranks, B own rows, T
gathered rows, H hidden, V true vocabulary, S shard rows (equal on all ranks, N*S >= V, padding at
the end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# gloo and NCCL of older releases know no fp8; its bytes travel as uint8.
BYTES_ONLY = tuple(
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)


def shard_rows(vocab_size: int, ranks: int, multiple: int = 1) -> int:
    """S: the least multiple of `multiple` with ranks * S >= vocab_size."""
    if vocab_size < 1 or ranks < 1 or multiple < 1:
        raise ValueError(
            f"vocab_size, ranks and multiple must be positive, got {vocab_size}, {ranks} and "
            f"{multiple}"
        )
    rows = -(-vocab_size // ranks)
    return -(-rows // multiple) * multiple


def shard_weight(
    full: torch.Tensor, ranks: int, rank: int, *, vocab_size: int | None = None, multiple: int = 1
) -> torch.Tensor:
    """Rank `rank`'s rows of a full weight [V, H] (or bias [V]): [S, H] (or [S]).

    A view of `full` where it has all S rows, so that tied weights stay tied; otherwise a copy whose
    missing rows, the padding, are zero.  `full` may have more rows than `vocab_size` (an embedding
    padded elsewhere).
    """
    if full.dim() == 0:
        raise ValueError("full must be [V, H] or [V], got a scalar")
    vocab = full.shape[0] if vocab_size is None else vocab_size
    if isinstance(vocab, bool) or not isinstance(vocab, int):
        raise TypeError(f"vocab_size must be an int, got {type(vocab).__name__}")
    if full.dim() not in (1, 2) or full.shape[0] < vocab:
        raise ValueError(
            f"full must be [V, H] or [V] with V >= {vocab} rows, got {tuple(full.shape)}"
        )
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is outside 0..{ranks - 1}")
    shard = shard_rows(vocab, ranks, multiple)
    start, stop = rank * shard, (rank + 1) * shard
    if stop <= full.shape[0]:
        return full[start:stop]
    padded = full.new_zeros((shard, *full.shape[1:]))
    if start < full.shape[0]:
        padded[: full.shape[0] - start].copy_(full[start:])
    return padded


def unshard_weight(shards: Sequence[torch.Tensor], vocab_size: int) -> torch.Tensor:
    """The inverse of `shard_weight`: all ranks' shards in rank order -> [V, H] (or [V]), padding
    dropped.
    """
    full = torch.cat(list(shards))
    if full.shape[0] < vocab_size:
        raise ValueError(
            f"{len(shards)} shards have {full.shape[0]} rows, fewer than vocab_size {vocab_size}"
        )
    return full[:vocab_size]


@dataclass(frozen=True)
class Rows:
    """Who owns which gathered rows: `counts[r]` rows of rank r, in rank order; `rank` is ours.

    `holding` are the rows that ranks bring, in the same order: one count per `copies` ranks in
    succession, all of which have the same rows.  `span` ranks in succession are an attention group:
    its rows are owned by its ranks, whichever of them holds them.  Without `holding` every rank
    holds what it owns.
    """

    counts: tuple[int, ...]
    rank: int
    holding: tuple[int, ...] | None = None
    copies: int = 1
    span: int = 1

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def own(self) -> int:
        """B, the rows that this rank owns."""
        return self.counts[self.rank]

    @property
    def total(self) -> int:
        """T, the rows of all ranks."""
        return sum(self.counts)

    @property
    def largest(self) -> int:
        return max(self.counts)

    @property
    def uniform(self) -> bool:
        return all(count == self.counts[0] for count in self.counts)

    @property
    def start(self) -> int:
        """Where this rank's rows begin among the gathered ones."""
        return sum(self.counts[: self.rank])

    @property
    def held(self) -> tuple[int, ...]:
        """The rows of each set of ranks that hold the same ones, in order."""
        return self.counts if self.holding is None else self.holding

    @property
    def brought(self) -> int:
        """The rows that this rank holds and brings to a call."""
        return self.held[self.rank // self.copies]

    @property
    def brought_start(self) -> int:
        """Where they begin among the gathered ones."""
        return sum(self.held[: self.rank // self.copies])

    @property
    def group(self) -> range:
        """The ranks of this rank's attention group."""
        first = self.rank - self.rank % self.span
        return range(first, first + self.span)

    @property
    def group_total(self) -> int:
        """G, the rows of this rank's attention group."""
        return sum(self.counts[rank] for rank in self.group)

    @property
    def group_start(self) -> int:
        """Where they begin among the gathered ones."""
        return sum(self.counts[: self.group.start])

    @property
    def shape(self) -> list[int]:
        """Ranks, those of an attention group, and those that hold the same rows: what must be equal
        on all ranks beside `held`.
        """
        return [self.ranks, self.span, self.copies]

    @property
    def groups(self) -> tuple[int, ...]:
        """G of every attention group, in order."""
        firsts = range(0, self.ranks, self.span)
        return tuple(sum(self.counts[first : first + self.span]) for first in firsts)


def share_evenly(rows: int, ranks: int) -> tuple[int, ...]:
    """`rows` dealt out to `ranks` as evenly as can be, in succession: the first get one more."""
    return tuple((rows + ranks - 1 - place) // ranks for place in range(ranks))


@dataclass(frozen=True)
class Layout:
    """How the N ranks of a head's group share the attention of a model.

    `dp_size` attention groups of `attn_cp_size` * `attn_tp_size` ranks each, in that order: rank =
    (dp * attn_cp_size + cp) * attn_tp_size + tp.  The tensor-parallel ranks of a group hold the
    same hidden rows; its context-parallel ranks hold different ones (the rows whose last token is
    theirs).

    | attention | dp_size | attn_cp_size | attn_tp_size | who holds a row |
    |---|---|---|---|---|
    | data-parallel | N | 1 | 1 | one rank |
    | data- and tensor-parallel | N / t | 1 | t | the t ranks of its group |
    | tensor-parallel | 1 | 1 | N | all ranks |
    | context-parallel | any | c | any | attn_tp_size ranks of its group |

    Gathered rows stand in the order of who holds them.  Each is owned by exactly one rank: the rows
    of a group are dealt out evenly to its ranks, in succession, so that all receive equal parts.
    """

    dp_size: int
    attn_tp_size: int = 1
    attn_cp_size: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")

    @classmethod
    def of(cls, tp_size: int, dp_size: int = 1, attn_cp_size: int = 1) -> Layout:
        """From an engine's sizes: `tp_size` ranks in all, of which attention takes dp_size *
        attn_cp_size apart; what is left is tensor-parallel.  ValueError where that does not divide.
        """
        layout = cls(dp_size, 1, attn_cp_size)
        if isinstance(tp_size, bool) or not isinstance(tp_size, int):
            raise TypeError(f"tp_size must be an int, got {type(tp_size).__name__}")
        if tp_size < 1 or tp_size % (dp_size * attn_cp_size):
            raise ValueError(
                f"tp_size {tp_size} is no multiple of dp_size {dp_size} * attn_cp_size "
                f"{attn_cp_size}"
            )
        return replace(layout, attn_tp_size=tp_size // (dp_size * attn_cp_size))

    @classmethod
    def data_parallel(cls, ranks: int) -> Layout:
        """Every rank has rows of its own."""
        return cls(ranks)

    @classmethod
    def tensor_parallel(cls, ranks: int) -> Layout:
        """Every rank has all rows."""
        return cls(1, ranks)

    def to_list(self) -> list[int]:
        """The sizes as `Layout` takes them, for an operator."""
        return [self.dp_size, self.attn_tp_size, self.attn_cp_size]

    @property
    def ranks(self) -> int:
        """N."""
        return self.dp_size * self.span

    @property
    def span(self) -> int:
        """The ranks of an attention group."""
        return self.attn_cp_size * self.attn_tp_size

    @property
    def sets(self) -> int:
        """How many sets of ranks hold different rows: what `row_counts` has a count for."""
        return self.dp_size * self.attn_cp_size

    @property
    def plain(self) -> bool:
        """Whether every rank is an attention group of its own."""
        return self.span == 1

    def __str__(self) -> str:
        parts = [f"{self.dp_size} attention groups"] if self.dp_size > 1 else []
        if self.attn_cp_size > 1:
            parts.append(f"{self.attn_cp_size} context-parallel ranks")
        if self.attn_tp_size > 1:
            parts.append(f"{self.attn_tp_size} tensor-parallel ranks")
        return " of ".join(parts) or "one rank"

    def owners(self, row_counts: Sequence[int]) -> tuple[int, ...]:
        """Rows held, a count per set -> rows owned, a count per rank."""
        width = self.attn_cp_size
        groups = [
            sum(row_counts[first * width : (first + 1) * width]) for first in range(self.dp_size)
        ]
        return tuple(count for rows in groups for count in share_evenly(rows, self.span))

    def rows(self, row_counts: Sequence[int], rank: int) -> Rows:
        """A call's rows; `row_counts`, a host list, has a count per set, zeros allowed."""
        if self.plain:
            return rows_from_counts(row_counts, self.ranks, rank)
        held = _checked_counts(row_counts, self.sets, f"{self.sets} sets of ranks that hold rows")
        return Rows(self.owners(held), rank, held, self.attn_tp_size, self.span)

    def own_rows(self, brought: int, row_counts: Sequence[int] | None, rank: int) -> Rows:
        """The rows of a call to which this rank brings `brought`; without counts all bring as
        many.
        """
        if self.plain:
            return own_rows(brought, row_counts, self.ranks, rank)
        if row_counts is None:
            return self.rows([brought] * self.sets, rank)
        rows = self.rows(row_counts, rank)
        if rows.brought != brought:
            place = rank // self.attn_tp_size
            raise ValueError(
                f"row_counts says that rank {rank} holds {rows.brought} rows (count {place} of "
                f"{self.sets}), but hidden has {brought} (row_counts={list(row_counts)})"
            )
        return rows

    def gathered_rows(
        self, total: int, row_counts: Sequence[int] | None, rank: int, what: str
    ) -> Rows:
        """The rows of a call that brings all T rows already, in the order of who holds them."""
        if self.plain:
            return gathered_rows(total, row_counts, self.ranks, rank, what)
        if row_counts is None:
            if total % self.sets:
                raise ValueError(
                    f"{what} has {total} rows, which {self.sets} sets of ranks cannot hold in "
                    "equal parts: pass row_counts, or pad"
                )
            return self.rows([total // self.sets] * self.sets, rank)
        rows = self.rows(row_counts, rank)
        _check_total(rows, total, row_counts, what)
        return rows

    def traced(
        self, row_counts: Sequence[int] | None, equal: int, rank: int
    ) -> tuple[int, int, int]:
        """G, where the rows that this rank owns begin among them, and how many these are, in code
        that is being traced and checks nothing.  Without counts each set holds `equal` rows.
        """
        # Not divmod, which Dynamo refuses where it takes a layout's sizes for symbols.
        group, place = rank // self.span, rank % self.span
        width = self.attn_cp_size
        if row_counts is None:
            total = equal * width
        else:
            total = sum(row_counts[group * width : (group + 1) * width])
        owned = share_evenly(total, self.span)
        return total, sum(owned[:place]), owned[place]


def rows_from_counts(row_counts: Sequence[int], ranks: int, rank: int) -> Rows:
    """`row_counts`, a host list of N counts that is the same on all ranks, as `Rows`."""
    return Rows(_checked_counts(row_counts, ranks, f"{ranks} ranks"), rank)


def _checked_counts(row_counts: Sequence[int], length: int, what: str) -> tuple[int, ...]:
    if isinstance(row_counts, torch.Tensor) or not isinstance(row_counts, (list, tuple)):
        raise TypeError(
            f"row_counts must be a host list of {length} ints, got {type(row_counts).__name__}: "
            "a device tensor would make every call wait for the device"
        )
    if len(row_counts) != length:
        raise ValueError(f"row_counts must name {what}, got {len(row_counts)}: {list(row_counts)}")
    if any(
        isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in row_counts
    ):
        raise ValueError(f"row_counts must be non-negative ints, got {list(row_counts)}")
    return tuple(row_counts)


def own_rows(rows: int, row_counts: Sequence[int] | None, ranks: int, rank: int) -> Rows:
    """The rows of a call in which this rank brings `rows` of its own; without counts every rank
    brings as many.
    """
    if row_counts is None:
        return Rows((rows,) * ranks, rank)
    known = rows_from_counts(row_counts, ranks, rank)
    if known.own != rows:
        raise ValueError(
            f"row_counts says that rank {rank} has {known.own} rows, but hidden has {rows} "
            f"(row_counts={list(row_counts)})"
        )
    return known


def gathered_rows(
    total: int, row_counts: Sequence[int] | None, ranks: int, rank: int, what: str
) -> Rows:
    """The rows of a call that brings all T rows already, in rank order."""
    if row_counts is None:
        if total % ranks:
            raise ValueError(
                f"{what} has {total} rows, which {ranks} ranks cannot share evenly: pass "
                "row_counts, or pad"
            )
        return Rows((total // ranks,) * ranks, rank)
    known = rows_from_counts(row_counts, ranks, rank)
    _check_total(known, total, row_counts, what)
    return known


def _check_total(rows: Rows, total: int, row_counts: Sequence[int], what: str) -> None:
    if rows.total != total:
        raise ValueError(
            f"row_counts adds up to {rows.total} rows, but {what} has {total} "
            f"(row_counts={list(row_counts)})"
        )


def traced_share(total: int, row_counts: Sequence[int] | None, ranks: int, rank: int) -> int:
    """B, this rank's share of `total` gathered rows, in code that is being traced: the operator
    finds out at run time whether they divide.
    """
    if row_counts is None:
        return total // ranks
    return rows_from_counts(row_counts, ranks, rank).own


def check_own(rows: Rows, own: int, what: str) -> None:
    """`own` is B, this rank's share of `what`'s rows."""
    if rows.own != own:
        raise ValueError(
            f"rows is {own}, but rank {rows.rank} of {rows.ranks} has {rows.own} of {what}'s rows"
        )


def check_vocab(vocab_size: int, shard: int, ranks: int) -> None:
    """V needs N*S >= V >= 1."""
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int):
        raise TypeError(f"vocab_size must be an int, got {type(vocab_size).__name__}")
    if vocab_size < 1:
        raise ValueError(f"vocab_size must be positive, got {vocab_size}")
    if ranks * shard < vocab_size:
        hint = "; a shard of several needs its process group" if ranks == 1 else ""
        raise ValueError(
            f"vocab_size {vocab_size} exceeds the {ranks * shard} rows that {ranks} ranks hold "
            f"with {shard} each{hint}"
        )


def check_weight(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """weight [S, H] of a float dtype; bias [S]."""
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(
            f"weight shard must be [S, H] with both positive, got {tuple(weight.shape)}"
        )
    if weight.dtype not in FLOATS:
        raise TypeError(
            f"weight must be bfloat16, float16 or float32, got {weight.dtype}: a quantised weight "
            "needs its scales, "
            "so multiply it yourself and hand the partial logits to lmhead.exchange"
        )
    if bias is not None:
        if bias.shape != (weight.shape[0],):
            raise ValueError(
                f"bias must be [{weight.shape[0]}], one per weight row, got {tuple(bias.shape)}"
            )
        if bias.dtype not in FLOATS:
            raise TypeError(f"bias must be bfloat16, float16 or float32, got {bias.dtype}")
        if bias.device != weight.device:
            raise ValueError(f"bias is on {bias.device} but weight is on {weight.device}")


def check_epilogue(scale: float, softcap: float | None) -> None:
    """scale is finite; softcap is None or a positive finite number."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if scale != scale or scale in (float("inf"), float("-inf")):
        raise ValueError(f"scale must be finite, got {scale}")
    if softcap is None:
        return
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap must be a number or None, got {type(softcap).__name__}")
    if not 0 < softcap < float("inf"):
        raise ValueError(f"softcap must be positive and finite, got {softcap}; None turns it off")


def check_hidden(hidden: torch.Tensor, weight: torch.Tensor, what: str = "hidden") -> None:
    """hidden [rows, H] with the weight's H, dtype and device; nothing that wants a gradient."""
    if not isinstance(hidden, torch.Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(hidden).__name__}")
    if hidden.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"{what} must be [rows, {weight.shape[1]}], got {tuple(hidden.shape)}")
    if hidden.dtype != weight.dtype:
        raise TypeError(f"{what} is {hidden.dtype} but the weight is {weight.dtype}")
    if hidden.device != weight.device:
        raise ValueError(f"{what} is on {hidden.device} but the weight is on {weight.device}")
    check_no_grad(**{what: hidden, "weight": weight})


def check_no_grad(**tensors: torch.Tensor | None) -> None:
    """Inference only: a gradient would silently be lost."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name} requires grad, but lmhead is for inference: call it under "
                "torch.inference_mode() or torch.no_grad()"
            )


def check_partial(partial: torch.Tensor) -> None:
    """partial [T, S] of a dtype that can travel."""
    if partial.dim() != 2 or partial.shape[1] < 1:
        raise ValueError(f"partial must be [T, S] with S positive, got {tuple(partial.shape)}")
    if partial.dtype not in FLOATS + BYTES_ONLY + (
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    ):
        raise TypeError(
            f"partial cannot be {partial.dtype}; bfloat16, float16, float32, fp8 and integers "
            "travel"
        )
    check_no_grad(partial=partial)


def check_received(received: torch.Tensor, vocab_size: int, dtype: torch.dtype) -> None:
    """received [N, B, S] of a dtype that travels, N*S >= V; floats alone may change their dtype."""
    if received.dim() != 3 or 0 in (received.shape[0], received.shape[2]):
        raise ValueError(
            f"received must be [N, B, S] with N and S positive, got {tuple(received.shape)}"
        )
    check_vocab(vocab_size, received.shape[2], received.shape[0])
    if received.dtype != dtype and not {received.dtype, dtype} <= set(FLOATS):
        raise TypeError(
            f"{received.dtype} blocks are moved as they are and cannot become {dtype} here"
        )
    check_no_grad(received=received)


def check_out(
    out: torch.Tensor | None, rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """out [B, V] of the logits' dtype with contiguous columns; its rows may be further apart than
    V.
    """
    if out is None:
        return
    if out.shape != (rows, vocab_size):
        raise ValueError(f"out must be [{rows}, {vocab_size}], got {tuple(out.shape)}")
    if out.dtype != dtype:
        raise TypeError(f"out is {out.dtype} but the logits are {dtype}")
    if out.device != device:
        raise ValueError(f"out is on {out.device} but the logits are on {device}")
    if (vocab_size > 1 and out.stride(1) != 1) or (rows > 1 and out.stride(0) < vocab_size):
        raise ValueError(
            "out must have contiguous columns and rows that do not overlap, got strides "
            f"{out.stride()}"
        )
    check_no_grad(out=out)


def check_no_overlap(out: torch.Tensor | None, **inputs: torch.Tensor | None) -> None:
    """`out` must not share memory with an input: it is written while inputs are still read."""
    if out is None:
        return
    for name, tensor in inputs.items():
        if tensor is not None and overlap(tensor, out):
            (first, last), (begin, end) = _span(out), _span(tensor)
            raise ValueError(
                f"out overlaps {name} in memory (bytes {first}..{last} and {begin}..{end})"
            )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the spans of two strided tensors share memory."""
    if one.numel() == 0 or other.numel() == 0 or one.device != other.device:
        return False
    (first, last), (begin, end) = _span(one), _span(other)
    return begin < last and first < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses [first, last) that a non-empty strided tensor touches."""
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def resolve_dtypes(
    source: torch.dtype, logits_dtype: torch.dtype | None, wire_dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    """(logits dtype, wire dtype): logits default to the source's, the wire to the logits'.

    The wire may be narrower than fp32 logits, never wider and never another 16-bit format: either
    would round twice.
    """
    logits = source if logits_dtype is None else logits_dtype
    if logits not in FLOATS:
        raise TypeError(f"logits_dtype must be bfloat16, float16 or float32, got {logits}")
    wire = logits if wire_dtype is None else wire_dtype
    if wire not in FLOATS:
        raise TypeError(f"wire_dtype must be bfloat16, float16 or float32, got {wire}")
    if wire != logits and logits != torch.float32:
        raise ValueError(
            f"wire_dtype {wire} must equal logits_dtype {logits}, or be narrower than float32 "
            "logits"
        )
    return logits, wire


def moved_bytes(route: str, rows: Rows, shard: int, itemsize: int, replicate: bool = False) -> int:
    """Bytes of logits that cross this rank's link in one call, in the busier direction; its own
    block stays.

    all_to_all: sent (T - B) * S, received (N - 1) * B * S; with `replicate`, where each rank gets
    all G rows of its attention group, sent to each other rank as many as its group has, received
    (N - 1) * G * S.  all_gather: sent once to each other rank as a ring does, received
    (N - 1) * T * S.
    """
    if route == "all_to_all":
        sent, kept = rows.total - rows.own, rows.own
        if replicate:
            sent, kept = rows.span * rows.total - rows.group_total, rows.group_total
        return max(sent, (rows.ranks - 1) * kept) * shard * itemsize
    if route == "all_gather":
        return (rows.ranks - 1) * rows.total * shard * itemsize
    return 0


def gathered_bytes(rows: Rows, width: int, itemsize: int) -> int:
    """Bytes of hidden rows, `width` elements each, that cross this rank's link in one call, in the
    busier direction: it sends what it holds to one rank of each other set, and receives what it
    does not hold.
    """
    sets = len(rows.held)
    return max((sets - 1) * rows.brought, rows.total - rows.brought) * width * itemsize
