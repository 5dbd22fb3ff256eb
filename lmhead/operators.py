"""torch.ops.lmhead: the head's steps as operators, for compiled code.

| operator | from | to |
|---|---|---|
| logits | hidden [B, H], own rows | logits [B, V] |
| logits_gathered | gathered [T, H], all rows | logits [B, V] |
| logits_held | hidden rows that this rank holds, in any layout | logits [rows, V] |
| exchange | partial [T, S] of the caller's own GEMM | logits [B, V] |
| reassemble | received [N, B, S], no collective | logits [B, V] |
| share | tensors [B, ...] of the own rows | the attention group's, [G, ...] |

Each is functional: the result has storage of its own and never aliases an input.  Each that gives
logits has a twin `<name>_out` that writes into `out` [B, V] instead, declares that it does, and
returns nothing.

The group is a NAME, resolved when the operator runs, so fakes are shape arithmetic and tracing
works where no group exists.  A plain name means whichever group has it then; `LMHead` and
`exchange` give one that means their own group alone (`lmhead.groups.graph_name`).  The name stands
in the graph: ranks whose groups have different names compile, and cache, each for itself.  Dispatch
costs tens of microseconds, so eager callers do not come this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lmhead import ops, order, shapes, sharing
from lmhead.ops import Plan
from lmhead.route import choose
from lmhead.shapes import Layout, Rows
from lmhead.workspace import Workspace

HEAD = (
    "Tensor weight, Tensor? bias, int vocab_size, str group_name, int ranks, float scale, "
    "float? softcap, ScalarType logits_dtype, ScalarType wire_dtype, SymInt[]? row_counts, "
    "str kernels, str route"
)
_EXCHANGE = (
    "Tensor partial, SymInt rows, int vocab_size, str group_name, int ranks, "
    "ScalarType logits_dtype, SymInt[]? row_counts, str kernels, str route"
)
_OUT = "Tensor(a!) out"
_HELD = "int[] layout, bool gathered, bool replicate, str policy"


@torch.library.custom_op(
    "lmhead::logits", mutates_args=(), schema=f"(Tensor hidden, {HEAD}) -> Tensor"
)
def logits_op(*arguments: Any) -> torch.Tensor:
    """hidden [B, H], weight [S, H], bias [S] -> logits [B, V] of `logits_dtype`, fresh.

    `group_name` names a registered process group of `ranks` ranks ("" for one rank without a
    group); `kernels` is "triton", "torch" or "" (by device), `route` "all_to_all", "all_gather" or
    "" (by the rules).  Temporaries come from the allocator.  Errors are those of `lmhead.LMHead`.
    """
    return ops.logits_by_name(*arguments)


@torch.library.custom_op(
    "lmhead::logits_out", mutates_args=("out",), schema=f"(Tensor hidden, {HEAD}, {_OUT}) -> ()"
)
def logits_out_op(*arguments: Any) -> None:
    """`lmhead::logits` into the last argument, `out` [B, V], whose columns are contiguous."""
    hidden, *rest, out = arguments
    ops.logits_by_name(_apart(hidden, out), *rest, out=out)


@torch.library.custom_op(
    "lmhead::logits_gathered",
    mutates_args=(),
    schema=f"(Tensor gathered, SymInt rows, {HEAD}) -> Tensor",
)
def logits_gathered_op(gathered: torch.Tensor, rows: int, *arguments: Any) -> torch.Tensor:
    """gathered [T, H] in rank order, of which `rows` = B are this rank's -> logits [B, V], fresh.

    The rest as in `lmhead::logits`; errors are those of `lmhead.LMHead.forward_gathered`.
    """
    return ops.logits_by_name(gathered, *arguments, gathered=rows)


@torch.library.custom_op(
    "lmhead::logits_gathered_out",
    mutates_args=("out",),
    schema=f"(Tensor gathered, SymInt rows, {HEAD}, {_OUT}) -> ()",
)
def logits_gathered_out_op(gathered: torch.Tensor, rows: int, *arguments: Any) -> None:
    """`lmhead::logits_gathered` into the last argument, `out` [B, V]."""
    *rest, out = arguments
    ops.logits_by_name(_apart(gathered, out), *rest, gathered=rows, out=out)


@torch.library.custom_op(
    "lmhead::logits_held",
    mutates_args=(),
    schema=f"(Tensor hidden, SymInt rows, {_HELD}, {HEAD}) -> Tensor",
)
def logits_held_op(*arguments: Any) -> torch.Tensor:
    """hidden [brought, H], the rows that this rank holds (all T if `gathered`) -> logits [rows, V],
    fresh: of those that it owns, or of its attention group's if `replicate`.

    `layout` is `lmhead.Layout.to_list()`, `row_counts` has one count per set of ranks that hold the
    same rows, `policy` is "auto" or "sglang".  The rest as in `lmhead::logits`.
    """
    return _held(*arguments)


@torch.library.custom_op(
    "lmhead::logits_held_out",
    mutates_args=("out",),
    schema=f"(Tensor hidden, SymInt rows, {_HELD}, {HEAD}, {_OUT}) -> ()",
)
def logits_held_out_op(hidden: torch.Tensor, *arguments: Any) -> None:
    """`lmhead::logits_held` into the last argument, `out` [rows, V]."""
    *rest, out = arguments
    _held(_apart(hidden, out), *rest, out=out)


def _held(
    hidden: torch.Tensor,
    rows: int,
    layout: Sequence[int],
    gathered: bool,
    replicate: bool,
    policy: str,
    *head: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    held = ops.Held(Layout(*layout), replicate, policy)
    given = int(rows) if gathered else None
    logits = ops.logits_by_name(hidden, *head, gathered=given, held=held, out=out)
    assert logits.shape[0] == rows
    return logits


@torch.library.custom_op(
    "lmhead::share",
    mutates_args=(),
    schema="(Tensor[] parts, SymInt rows, int[] layout, SymInt[] row_counts, str group_name, "
    "int ranks) -> Tensor[]",
)
def share_op(
    parts: Sequence[torch.Tensor],
    rows: int,
    layout: Sequence[int],
    row_counts: Sequence[int],
    group_name: str,
    ranks: int,
) -> list[torch.Tensor]:
    """Tensors [B, ...] of the rows that this rank owns -> the same of all `rows` = G rows of its
    attention group, fresh; `lmhead.LMHead.share`, with `layout` and `row_counts` as in
    `lmhead::logits_held`.
    """
    device = parts[0].device
    comm = ops.op_comm(group_name, ranks, device)
    known, error = None, None
    try:
        given = Layout(*layout)
        ops.check_layout(given, comm)
        known = given.rows([int(count) for count in row_counts], comm.rank)
        sharing.check_parts(parts, known.own, device)
    except (ValueError, TypeError) as caught:
        error = caught
    checking = ops.checking() and not ops.is_capturing(device)
    sharing.agree(comm, known, parts, error, device, 0, checking)
    assert known is not None and known.group_total == rows
    found = sharing.run_share(comm, known, Workspace(), parts)
    pairs = zip(found, parts, strict=True)
    return [part.clone() if part is own else part for part, own in pairs]


@torch.library.custom_op("lmhead::exchange", mutates_args=(), schema=f"({_EXCHANGE}) -> Tensor")
def exchange_op(*arguments: Any) -> torch.Tensor:
    """partial [T, S] of the caller's own GEMM -> logits [rows, V], fresh; `rows` is B, this rank's
    own rows.

    The rest as in `lmhead::logits`; errors are those of `lmhead.exchange`.
    """
    return ops.exchange_by_name(*arguments)


@torch.library.custom_op(
    "lmhead::exchange_out", mutates_args=("out",), schema=f"({_EXCHANGE}, {_OUT}) -> ()"
)
def exchange_out_op(*arguments: Any) -> None:
    """`lmhead::exchange` into the last argument, `out` [rows, V]."""
    partial, *rest, out = arguments
    ops.exchange_by_name(_apart(partial, out), *rest, out=out)


@torch.library.custom_op(
    "lmhead::reassemble",
    mutates_args=(),
    schema="(Tensor received, int vocab_size, ScalarType logits_dtype, str kernels) -> Tensor",
)
def reassemble_op(
    received: torch.Tensor, vocab_size: int, logits_dtype: torch.dtype, kernels: str
) -> torch.Tensor:
    """received [N, B, S] of any strides, block n holding columns n*S to (n+1)*S -> logits [B, V] of
    `logits_dtype`, fresh; the N*S - V padding columns are dropped.

    Equal dtypes are moved bit for bit, floats may be cast.  `kernels` as in `lmhead::logits`.
    Raises ValueError or TypeError, with the numbers, for what does not fit.
    """
    shapes.check_received(received, vocab_size, logits_dtype)
    out = received.new_empty((received.shape[1], vocab_size), dtype=logits_dtype)
    _reassemble_into(received, out, kernels)
    return out


@torch.library.custom_op(
    "lmhead::reassemble_out",
    mutates_args=("out",),
    schema=f"(Tensor received, str kernels, {_OUT}) -> ()",
)
def reassemble_out_op(received: torch.Tensor, kernels: str, out: torch.Tensor) -> None:
    """`lmhead::reassemble` into `out` [B, V], which gives V and the dtype."""
    if out.dim() != 2:
        raise ValueError(f"out must be [B, V], got {tuple(out.shape)}")
    shapes.check_received(received, out.shape[1], out.dtype)
    shapes.check_out(out, received.shape[1], out.shape[1], out.dtype, received.device)
    _reassemble_into(_apart(received, out), out, kernels)


def _apart(given: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`given`, or a copy where `out` overlaps it.

    A caller who writes `source = buffer.clone()` and then this from `source` into `buffer` has done
    everything right, but Inductor takes the clone away (torch 2.13).
    """
    return given.clone() if shapes.overlap(given, out) else given


def _reassemble_into(received: torch.Tensor, out: torch.Tensor, kernels: str) -> None:
    if out.numel() == 0:
        return
    if received.shape[2] > 1 and received.stride(2) != 1:
        received = received.contiguous()
    ranks, rows, shard = received.shape
    plan = Plan(
        Rows((rows,) * ranks, 0),
        shard,
        out.shape[1],
        out.dtype,
        received.dtype,
        ops.choose_kernels(kernels, received.device),
        choose(1, "none"),
    )
    ops.run_reassemble_into(plan, received, out)


# Fakes: shape arithmetic, no group.


@logits_op.register_fake
def _logits_fake(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    vocab_size: int,
    group_name: str,
    ranks: int,
    scale: float,
    softcap: float | None,
    logits_dtype: torch.dtype,
    *_: object,
) -> torch.Tensor:
    _tell_inductor()
    return hidden.new_empty((hidden.shape[0], vocab_size), dtype=logits_dtype)


@logits_gathered_op.register_fake
def _logits_gathered_fake(gathered: torch.Tensor, rows: int, *arguments: Any) -> torch.Tensor:
    vocab_size, logits_dtype = arguments[2], arguments[7]
    _tell_inductor()
    return gathered.new_empty((rows, vocab_size), dtype=logits_dtype)


@logits_held_op.register_fake
def _logits_held_fake(hidden: torch.Tensor, rows: int, *arguments: Any) -> torch.Tensor:
    vocab_size, logits_dtype = arguments[6], arguments[11]
    _tell_inductor()
    return hidden.new_empty((rows, vocab_size), dtype=logits_dtype)


@share_op.register_fake
def _share_fake(parts: Sequence[torch.Tensor], rows: int, *_: object) -> list[torch.Tensor]:
    _tell_inductor()
    return [part.new_empty((rows, *part.shape[1:])) for part in parts]


@exchange_op.register_fake
def _exchange_fake(
    partial: torch.Tensor,
    rows: int,
    vocab_size: int,
    group_name: str,
    ranks: int,
    logits_dtype: torch.dtype,
    *_: object,
) -> torch.Tensor:
    _tell_inductor()
    return partial.new_empty((rows, vocab_size), dtype=logits_dtype)


@reassemble_op.register_fake
def _reassemble_fake(
    received: torch.Tensor, vocab_size: int, logits_dtype: torch.dtype, kernels: str
) -> torch.Tensor:
    return received.new_empty((received.shape[1], vocab_size), dtype=logits_dtype)


@logits_out_op.register_fake
@logits_gathered_out_op.register_fake
@logits_held_out_op.register_fake
@exchange_out_op.register_fake
def _collective_out_fake(*_: object) -> None:
    _tell_inductor()


@reassemble_out_op.register_fake
def _reassemble_out_fake(*_: object) -> None:
    return None


# Order (see lmhead.order).

_COLLECTIVES = (
    logits_op,
    logits_out_op,
    logits_gathered_op,
    logits_gathered_out_op,
    logits_held_op,
    logits_held_out_op,
    share_op,
    exchange_op,
    exchange_out_op,
)

for _op in _COLLECTIVES:
    order.mark(_op._opoverload)


def _tell_inductor() -> None:
    """From the fakes, which run whenever the operators are traced, and not when this is imported:
    Inductor takes a second to load.
    """
    order.keep_order(*(op._opoverload for op in _COLLECTIVES))
