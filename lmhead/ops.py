"""The head's step, from hidden rows to logits.

`run_logits` and `run_exchange` are the implementation: plain functions on plain tensors that eager
callers reach directly.  `logits_by_name` and `exchange_by_name` validate and then run them for the
registered operators (`lmhead.operators`), which know their group by its name alone.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmhead import groups, reference, shapes
from lmhead.chooser import DEFAULTS, Chooser, Configs, Sizes
from lmhead.comm import Call, Comm
from lmhead.kernels import gemm as _gemm_kernels
from lmhead.kernels import reassemble as _reassemble_kernels
from lmhead.kernels import tiles
from lmhead.ranges import stage
from lmhead.route import Facts, Route, choose_by
from lmhead.shapes import Layout, Rows
from lmhead.workspace import Workspace

KERNELS = ("triton", "torch")

# Purposes of a workspace: own rows as an all-gather takes them, and once per rank for an
# all-to-all.
_OWN, _COPIES = "own rows", "copies of own rows"

_op_calls = itertools.count(1)


@dataclass(frozen=True)
class Plan:
    """All that decides how a call runs, equal on every rank but for `rows.rank`."""

    rows: Rows
    shard: int
    vocab_size: int
    logits_dtype: torch.dtype
    wire_dtype: torch.dtype
    kernels: str
    route: Route
    scale: float = 1.0
    softcap: float | None = None
    configs: Configs = DEFAULTS
    deterministic: bool = False
    replicate: bool = False  # the rows of the whole attention group, on each of its ranks

    @property
    def result_rows(self) -> int:
        """The rows whose logits this rank ends with."""
        return self.rows.group_total if self.replicate else self.rows.own

    @property
    def result_start(self) -> int:
        """Where they begin among the gathered ones."""
        return self.rows.group_start if self.replicate else self.rows.start

    @property
    def exact(self) -> bool:
        """Whether the received elements are the logits: no padding to drop, no cast."""
        return (
            self.vocab_size == self.rows.ranks * self.shard and self.wire_dtype == self.logits_dtype
        )


def choose_kernels(asked: str | None, device: torch.device) -> str:
    """ "triton" or "torch": what was asked for by argument, then by LMHEAD_KERNELS, else Triton on
    CUDA tensors.

    Raises ValueError for another word, or for Triton on CPU tensors without its interpreter.
    """
    asked = asked or os.environ.get("LMHEAD_KERNELS") or None
    if asked is None:
        return "triton" if device.type == "cuda" else "torch"
    if asked not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)} or None, got {asked!r}")
    if asked == "triton" and device.type != "cuda" and not tiles.INTERPRET.value:
        raise ValueError(
            f"Triton kernels on {device.type} tensors need TRITON_INTERPRET=1 in the environment "
            "before lmhead is imported"
        )
    return asked


def sizes_of(
    weight: torch.Tensor,
    wire_dtype: torch.dtype,
    logits_dtype: torch.dtype,
    deterministic: bool = False,
) -> Sizes:
    """What of a head decides its kernel configs."""
    return Sizes(
        weight.shape[0],
        wire_dtype.itemsize,
        logits_dtype.itemsize,
        hidden=weight.shape[1],
        itemsize=weight.itemsize,
        deterministic=deterministic,
    )


def check_deterministic(kernels: str, width: int, device: torch.device) -> None:
    """ValueError where torch's kernels cannot be batch-invariant on this machine."""
    depends = reference.order_of_sums(width, device) if kernels == "torch" else None
    if depends is not None:
        raise ValueError(
            f"deterministic=True needs a library that sums up each element of a product of one "
            f"shape in one order, and {reference.library_of(device)} on this {device.type} takes "
            f"the order by {depends} (H = {width})"
        )


@functools.cache
def shipped_configs(device: torch.device) -> Chooser:
    """The package's tables for a device, for callers that have no head to agree others with."""
    return Chooser(device)


def asked_route(asked: str | None) -> str | None:
    """The route asked for by argument, then by LMHEAD_ROUTE."""
    return asked or os.environ.get("LMHEAD_ROUTE") or None


def checking() -> bool:
    """Whether LMHEAD_CHECK=1: every call is then agreed among the ranks before its collectives."""
    return os.environ.get("LMHEAD_CHECK") == "1"


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):  # the current stream is one of the current device
        return torch.cuda.is_current_stream_capturing()


def check_call(
    comm: Comm,
    plan: Plan | None,
    error: Exception | None,
    op: str,
    number: int,
    device: torch.device,
    **said: object,
) -> None:
    """Raise `error`, what this rank found wrong with its call; under LMHEAD_CHECK=1 all ranks go on
    with the same call, or all raise.  For calls that belong to no head; `said` has to be equal on
    all ranks as well.
    """
    if checking() and not is_capturing(device):
        fields: dict[str, object] = {}
        call = Call("check", (), 0, "", number)
        if plan is not None:
            call = Call("check", plan.rows.counts, plan.shard, _name(plan.wire_dtype), number)
            fields = {
                "op": op,
                "vocab_size": plan.vocab_size,
                "row_counts": list(plan.rows.held),
                "layout": plan.rows.shape,
                "replicate": plan.replicate,
                "shard": plan.shard,
                "dtype": call.dtype,
                "route": plan.route.name,
                **said,
            }
        comm.agree(fields, error, call, device)
    if error is not None:
        raise error


def run_gather(
    comm: Comm,
    rows: Rows,
    work: Workspace,
    hidden: torch.Tensor,
    call: Call,
    what: str = "rows",
) -> torch.Tensor:
    """The rows [brought, H] that this rank holds -> all rows [T, H], by one collective; where every
    rank holds all of them, by none.

    That is a true all-gather, except where an all-to-all does the same sooner
    (`Comm.gathers_by_exchange`), or where several ranks hold the same rows: then an all-to-all
    brings each rank only what it does not hold.  An all-gather has no uneven form, so ranks with
    fewer rows send as many as the largest; their tails are left out when the rows are closed up.

    The result is a buffer of the workspace, by the name `what`: what is gathered under one name
    must not be in use any more when the next is.
    """
    if len(rows.held) == 1:
        return hidden
    if comm.gathers_by_exchange or (rows.copies > 1 and comm.exchanges):
        return _gather_by_exchange(comm, rows, work, hidden, call, what)
    if rows.holding is not None:
        hidden, rows = _apart(hidden, rows)
    width, largest = hidden.shape[1], rows.largest
    own = hidden
    if rows.own != largest or not hidden.is_contiguous():
        own = work.take(_OWN, largest * width, hidden.dtype, hidden.device).view(largest, width)
        own[: rows.own].copy_(hidden)
    size = comm.ranks * largest * width
    even = work.take(f"gathered {what}", size, hidden.dtype, hidden.device)
    comm.gather(even, own.view(-1), call)
    if rows.uniform:
        return even.view(rows.total, width)
    closed = work.take(f"closed-up {what}", rows.total * width, hidden.dtype, hidden.device)
    closed = closed.view(rows.total, width)
    start = 0
    for count, block in zip(rows.counts, even.view(comm.ranks, largest, width), strict=True):
        closed[start : start + count].copy_(block[:count])
        start += count
    return closed


def _apart(hidden: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, Rows]:
    """Rows that several ranks hold, dealt out to them: those that this rank sends."""
    counts = [part for count in rows.held for part in shapes.share_evenly(count, rows.copies)]
    apart = Rows(tuple(counts), rows.rank)
    begin = apart.start - rows.brought_start
    return hidden[begin : begin + apart.own], apart


def _gather_by_exchange(
    comm: Comm, rows: Rows, work: Workspace, hidden: torch.Tensor, call: Call, what: str
) -> torch.Tensor:
    """A copy of the rows that this rank holds is sent to one rank of every set that holds the same
    ones: its own place among `rows.copies`.  So each rank receives the rows of all sets, its own
    set's from itself.  An all-to-all takes split sizes: no count is padded, and the rows land
    closed up.
    """
    sets, brought, width = len(rows.held), rows.brought, hidden.shape[1]
    copies = work.take(_COPIES, sets * brought * width, hidden.dtype, hidden.device)
    copies.view(sets, brought, width).copy_(hidden)
    gathered = work.take(f"gathered {what}", rows.total * width, hidden.dtype, hidden.device)
    out_splits = in_splits = None
    if rows.copies > 1 or len(set(rows.held)) > 1:
        place = rows.rank % rows.copies
        out_splits, in_splits = [0] * comm.ranks, [0] * comm.ranks
        for number, count in enumerate(rows.held):
            peer = number * rows.copies + place
            out_splits[peer], in_splits[peer] = count * width, brought * width
    comm.exchange(gathered, copies, out_splits, in_splits, call)
    return gathered.view(rows.total, width)


def reserve_gather(
    comm: Comm, sets: int, largest: int, work: Workspace, like: torch.Tensor
) -> None:
    """Keep the buffer for own rows that `run_gather` may need after a warm-up that does not reach
    it: for strided hidden rows where the warm-up's are contiguous, and for copies of as many rows
    as the largest of the `sets` that hold different rows has, which may be this one's in a later
    call.
    """
    if sets == 1:
        return
    by_exchange = comm.gathers_by_exchange or (sets < comm.ranks and comm.exchanges)
    purpose, times = (_COPIES, sets) if by_exchange else (_OWN, 1)
    work.take(purpose, times * largest * like.shape[1], like.dtype, like.device)


def run_gemm(
    plan: Plan,
    work: Workspace,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The shard's GEMM and epilogue into `out`, by the plan's kernels."""

    def scratch(name: str, numel: int) -> torch.Tensor:
        return work.take(name, numel, torch.float32, out.device)

    arguments: dict[str, Any] = {"scale": plan.scale, "softcap": plan.softcap, "scratch": scratch}
    arguments["deterministic"] = plan.deterministic
    with stage("gemm"):
        if plan.kernels == "triton":
            config = plan.configs.gemm
            _gemm_kernels.gemm(hidden, weight, bias, out=out, config=config, **arguments)
        else:
            reference.gemm(hidden, weight, bias, out=out, **arguments)


def run_reassemble_into(plan: Plan, received: torch.Tensor, out: torch.Tensor) -> None:
    """[N, B, S] -> out [B, V], by the plan's kernels."""
    with stage("reassemble"):
        if plan.kernels == "triton":
            _reassemble_kernels.reassemble_into(received, out, plan.configs.copy)
        else:
            reference.reassemble_into(received, out)


def run_logits(
    comm: Comm,
    plan: Plan,
    work: Workspace,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gathered: bool = False,
    out: torch.Tensor | None = None,
    number: int = 0,
) -> torch.Tensor:
    """The rows [brought, H] that this rank holds (or all [T, H] if `gathered`) -> logits of those
    that it owns, [B, V], or of its attention group's, [G, V], if the plan replicates.  Everything
    has been validated.
    """
    rows, device = plan.rows, hidden.device
    if rows.total == 0:  # every rank knows that no rank has rows
        return _result(plan, out, device)
    call = Call("logits", rows.counts, plan.shard, _name(plan.wire_dtype), number)
    if rows.ranks == 1 and plan.wire_dtype == plan.logits_dtype:
        result = _result(plan, out, device)
        vocab = plan.vocab_size
        run_gemm(plan, work, hidden, weight[:vocab], None if bias is None else bias[:vocab], result)
        return result
    if not gathered:
        with stage("gather"):
            hidden = run_gather(
                comm,
                rows,
                work,
                hidden,
                replace(call, dtype=_name(hidden.dtype), columns=hidden.shape[1]),
            )
    partial = work.take("partial", rows.total * plan.shard, plan.wire_dtype, device).view(
        rows.total, plan.shard
    )
    run_gemm(plan, work, hidden, weight, bias, partial)
    return run_exchange(comm, plan, work, partial, out=out, call=call)


def run_exchange(
    comm: Comm,
    plan: Plan,
    work: Workspace,
    partial: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    call: Call,
) -> torch.Tensor:
    """partial [T, S], destination-major and contiguous -> logits [B, V] of this rank's rows.

    On the all-to-all the receive buffer becomes the result where it can: where the elements are the
    logits (no padding, no cast) and either a kernel permutes them in place or, for one row, there
    is nothing to permute.
    """
    rows, shard, vocab, device = plan.rows, plan.shard, plan.vocab_size, partial.device
    ranks, kept = rows.ranks, plan.result_rows
    if rows.total == 0:
        return _result(plan, out, device)
    if plan.route.name == "local":
        result = _result(plan, out, device)
        run_reassemble_into(plan, partial.view(1, kept, shard), result)
        return result
    flat = partial.view(-1)
    if plan.route.name == "all_gather":
        everything = work.take("all partials", ranks * rows.total * shard, plan.wire_dtype, device)
        with stage("exchange"):
            comm.gather(everything, flat, call)
        start = plan.result_start
        blocks = everything.view(ranks, rows.total, shard)[:, start : start + kept]
        result = _result(plan, out, device)
        run_reassemble_into(plan, blocks, result)
        return result

    numel = ranks * kept * shard
    if kept == 1 and out is None and plan.wire_dtype == plan.logits_dtype:
        received, settled = torch.empty(numel, dtype=plan.wire_dtype, device=device), True
    elif (
        plan.exact
        and (kept <= 1 or plan.kernels == "triton")
        and (out is None or out.is_contiguous())
    ):
        received, settled = _result(plan, out, device).view(-1), True
    else:
        received, settled = work.take("received", numel, plan.wire_dtype, device), False
    counts = rows.counts
    if plan.replicate and rows.span > 1:
        counts = tuple(count for count in rows.groups for _ in range(rows.span))
        flat = _for_each_owner(plan, work, partial)
    even = all(count == counts[0] for count in counts)
    out_splits = None if even else [kept * shard] * ranks
    in_splits = None if even else [count * shard for count in counts]
    with stage("exchange"):
        comm.exchange(received, flat, out_splits, in_splits, call)
    blocks = received.view(ranks, kept, shard)
    if settled and kept > 1:
        with stage("reassemble"):
            logits = _reassemble_kernels.reassemble(blocks, plan.configs.in_place)
        return logits if out is None else out
    if settled:
        return received[: kept * vocab].view(kept, vocab) if out is None else out
    result = _result(plan, out, device)
    run_reassemble_into(plan, blocks, result)
    return result


def _for_each_owner(plan: Plan, work: Workspace, partial: torch.Tensor) -> torch.Tensor:
    """partial [T, S] -> each attention group's rows once for each of its ranks, flat."""
    rows, shard = plan.rows, plan.shard
    copies = work.take(
        "partial per rank", rows.span * rows.total * shard, partial.dtype, partial.device
    )
    begin = 0
    for count in rows.groups:
        source = partial[begin : begin + count]
        place = copies[begin * rows.span * shard : (begin + count) * rows.span * shard]
        place.view(rows.span, count, shard).copy_(source)
        begin += count
    return copies


def _result(plan: Plan, out: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if out is not None:
        return out
    return torch.empty((plan.result_rows, plan.vocab_size), dtype=plan.logits_dtype, device=device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# From the group's name on: what the registered operators run (lmhead.operators).


def logits_by_name(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    vocab_size: int,
    group_name: str,
    ranks: int,
    scale: float,
    softcap: float | None,
    logits_dtype: torch.dtype,
    wire_dtype: torch.dtype,
    row_counts: Sequence[int] | None,
    kernels: str,
    route: str,
    *,
    gathered: int | None = None,
    held: Held | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden [B, H], or all T rows of which `gathered` = B are this rank's -> logits [B, V].

    Arguments are those of `torch.ops.lmhead.logits`; `held` says what `logits_held` knows beside.
    Temporaries come from the allocator.
    """
    comm, number = op_comm(group_name, ranks, hidden.device), next(_op_calls)
    what = "hidden" if gathered is None else "gathered"
    plan, error = None, None
    try:
        plan = head_plan(
            comm,
            hidden,
            weight,
            bias,
            vocab_size,
            scale,
            softcap,
            logits_dtype,
            wire_dtype,
            row_counts,
            kernels,
            route,
            gathered=gathered,
            held=held,
        )
        shapes.check_out(out, plan.result_rows, vocab_size, plan.logits_dtype, hidden.device)
        shapes.check_no_overlap(out, **{what: hidden, "weight": weight, "bias": bias})
    except (ValueError, TypeError) as caught:
        error = caught
    check_call(comm, plan, error, "logits", number, hidden.device)
    assert plan is not None
    return run_logits(
        comm,
        plan,
        Workspace(),
        hidden,
        weight,
        bias,
        gathered=gathered is not None,
        out=out,
        number=number,
    )


@dataclass(frozen=True)
class Held:
    """What an operator for a layout knows beside a head: how ranks share attention, whether each
    gets its group's logits, and the policy.
    """

    layout: Layout
    replicate: bool = False
    policy: str = "auto"


def head_plan(
    comm: Comm,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    vocab_size: int,
    scale: float,
    softcap: float | None,
    logits_dtype: torch.dtype,
    wire_dtype: torch.dtype,
    row_counts: Sequence[int] | None,
    kernels: str,
    route: str,
    *,
    gathered: int | None = None,
    held: Held | None = None,
) -> Plan:
    """Validate a head's operands and say how the call runs; arguments as in `logits_by_name`."""
    held = Held(Layout.data_parallel(comm.ranks)) if held is None else held
    layout, replicate = held.layout, held.replicate
    what = "hidden" if gathered is None else "gathered"
    shapes.check_weight(weight, bias)
    shapes.check_hidden(hidden, weight, what)
    shapes.check_epilogue(scale, softcap)
    shapes.check_vocab(vocab_size, weight.shape[0], comm.ranks)
    logits_dtype, wire_dtype = shapes.resolve_dtypes(weight.dtype, logits_dtype, wire_dtype)
    counts = listed(row_counts)
    check_layout(layout, comm)
    if gathered is None:
        rows = layout.own_rows(hidden.shape[0], counts, comm.rank)
    else:
        rows = layout.gathered_rows(hidden.shape[0], counts, comm.rank, what)
        if not replicate:
            shapes.check_own(rows, gathered, what)
    kept = rows.group_total if replicate else rows.own
    chosen = choose_kernels(kernels, hidden.device)
    configs = DEFAULTS
    if chosen == "triton":
        sizes = sizes_of(weight, wire_dtype, logits_dtype)
        configs = shipped_configs(hidden.device).configs(rows, sizes, kept)
    asked = asked_route(route)
    facts = Facts(comm.ranks, comm.backend, asked, layout, rows.held, replicate, held.policy)
    return Plan(
        rows,
        weight.shape[0],
        vocab_size,
        logits_dtype,
        wire_dtype,
        chosen,
        choose_by(facts),
        scale,
        softcap,
        configs,
        replicate=replicate,
    )


def exchange_by_name(
    partial: torch.Tensor,
    rows: int,
    vocab_size: int,
    group_name: str,
    ranks: int,
    logits_dtype: torch.dtype,
    row_counts: Sequence[int] | None,
    kernels: str,
    route: str,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """partial [T, S] -> logits [rows, V]; arguments are those of `torch.ops.lmhead.exchange`."""
    comm, number = op_comm(group_name, ranks, partial.device), next(_op_calls)
    plan, error = None, None
    try:
        plan = exchange_plan(
            comm, partial, vocab_size, listed(row_counts), logits_dtype, kernels, route
        )
        shapes.check_own(plan.rows, rows, "partial")
        shapes.check_out(out, rows, vocab_size, plan.logits_dtype, partial.device)
        shapes.check_no_overlap(out, partial=partial)
    except (ValueError, TypeError) as caught:
        error = caught
    check_call(comm, plan, error, "exchange", number, partial.device)
    assert plan is not None
    call = Call("exchange", plan.rows.counts, plan.shard, _name(plan.wire_dtype), number)
    return run_exchange(comm, plan, Workspace(), partial.contiguous(), out=out, call=call)


def exchange_plan(
    comm: Comm,
    partial: torch.Tensor,
    vocab_size: int,
    row_counts: Sequence[int] | None,
    logits_dtype: torch.dtype | None,
    kernels: str | None,
    route: str | None,
    layout: Layout | None = None,
) -> Plan:
    """Validate an exchange of the caller's own partial logits and say how it runs."""
    layout = Layout.data_parallel(comm.ranks) if layout is None else layout
    check_layout(layout, comm)
    shapes.check_partial(partial)
    shard = partial.shape[1]
    shapes.check_vocab(vocab_size, shard, comm.ranks)
    rows = layout.gathered_rows(partial.shape[0], row_counts, comm.rank, "partial")
    logits_dtype = partial.dtype if logits_dtype is None else logits_dtype
    if partial.dtype in shapes.FLOATS:
        shapes.resolve_dtypes(partial.dtype, logits_dtype, partial.dtype)
    elif logits_dtype != partial.dtype:
        raise TypeError(
            f"a {partial.dtype} partial travels as it is and cannot become {logits_dtype} here"
        )
    chosen = choose_kernels(kernels, partial.device)
    configs = DEFAULTS
    if chosen == "triton":
        sizes = Sizes(shard, partial.itemsize, logits_dtype.itemsize)
        configs = shipped_configs(partial.device).configs(rows, sizes)
    return Plan(
        rows,
        shard,
        vocab_size,
        logits_dtype,
        partial.dtype,
        chosen,
        choose_by(Facts(comm.ranks, comm.backend, asked_route(route), layout, rows.held)),
        configs=configs,
    )


def check_layout(layout: Layout, comm: Comm) -> None:
    """TypeError or ValueError for what is no layout, or one of another number of ranks."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Layout or None, got {type(layout).__name__}")
    if layout.ranks != comm.ranks:
        raise ValueError(
            f"the layout is for {layout.ranks} ranks ({layout}), the group has {comm.ranks}"
        )


def op_comm(group_name: str, ranks: int, device: torch.device) -> Comm:
    """The collectives of the group that an operator names."""
    group = groups.resolve(group_name)
    if group is None and ranks != 1:
        raise ValueError(f"{ranks} ranks need the name of their process group, got {group_name!r}")
    comm = Comm.local() if group is None else Comm(group, device)
    if comm.ranks != ranks:
        raise ValueError(
            f"group {group_name!r} has {comm.ranks} ranks, the op was built for {ranks}"
        )
    return comm


def listed(row_counts: Sequence[int] | None) -> list[int] | None:
    """Row counts as an operator gets them, as a host list."""
    return None if row_counts is None else [int(count) for count in row_counts]
