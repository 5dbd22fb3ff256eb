"""`exchange`, `sample_exchange` and `share`: the head's last steps under a caller's own GEMM."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lmhead import (
    draw,
    operators,  # noqa: F401  registers torch.ops.lmhead
    ops,
    sample_operators,
    sampling,
    shapes,
    sharing,
)
from lmhead.comm import Call, Comm
from lmhead.groups import identify
from lmhead.order import untraced
from lmhead.sampling import Form, Request, Sample
from lmhead.shapes import Layout
from lmhead.workspace import Workspace

_calls = itertools.count(1)


def exchange(
    partial: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    row_counts: Sequence[int] | None = None,
    logits_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    route: str | None = None,
    kernels: str | None = None,
    layout: Layout | None = None,
) -> torch.Tensor:
    """partial [T, S], this rank's columns of all gathered rows -> logits [B, V], all columns of its
    own rows.

    For a caller's own GEMM (quantised, LoRA): rows stand in rank order, T a multiple of N or the
    sum of `row_counts`, S the same on all ranks.  `partial` travels in its own dtype; bf16 or fp16
    may arrive as `logits_dtype` float32. fp8 and integers are moved untouched.  A strided partial
    is copied first.  `out` as in `LMHead.forward`.

    In a `layout` rows stand in the order of the ranks that hold them, `row_counts` has a count per
    set of these, and the result is of the rows that this rank owns, as in `LMHead.forward`; `share`
    is its counterpart for `LMHead.share`.

    A `workspace` (`lmhead.Workspace()`) keeps the buffers between calls; without one they are
    fresh.  Compiled code has a pool of its own and leaves the workspace alone.  Only LMHEAD_CHECK=1
    compares the ranks' arguments: there is no constructor that could have done so.

    Raises as `LMHead.forward` does.
    """
    if torch.compiler.is_compiling():
        return _exchange_compiled(
            partial, vocab_size, group, row_counts, logits_dtype, out, route, kernels, layout
        )
    return _exchange(
        partial,
        vocab_size,
        group,
        row_counts,
        logits_dtype,
        out,
        workspace,
        route,
        kernels,
        layout,
    )


def _exchange(
    partial: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | DeviceMesh | None,
    row_counts: Sequence[int] | None,
    logits_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    workspace: Workspace | None,
    route: str | None,
    kernels: str | None,
    layout: Layout | None,
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return untraced(
            _exchange,
            partial,
            vocab_size,
            group,
            row_counts,
            logits_dtype,
            out,
            workspace,
            route,
            kernels,
            layout,
        )
    if not isinstance(partial, torch.Tensor):
        raise TypeError(f"partial must be a tensor, got {type(partial).__name__}")
    comm = Comm(group, partial.device)
    number = next(_calls)
    plan, error = None, None
    try:
        plan = ops.exchange_plan(
            comm, partial, vocab_size, row_counts, logits_dtype, kernels, route, layout
        )
        shapes.check_out(out, plan.rows.own, vocab_size, plan.logits_dtype, partial.device)
        shapes.check_no_overlap(out, partial=partial)
    except (ValueError, TypeError) as caught:
        error = caught
    ops.check_call(comm, plan, error, "exchange", number, partial.device)
    assert plan is not None
    work = Workspace()
    if workspace is not None:
        work = workspace
        work.capturing(ops.is_capturing(partial.device))
    if not partial.is_contiguous():
        kept = work.take("contiguous partial", partial.numel(), partial.dtype, partial.device)
        partial = kept.view(partial.shape).copy_(partial)
    call = Call(
        "exchange",
        plan.rows.counts,
        plan.shard,
        str(plan.wire_dtype).removeprefix("torch."),
        number,
    )
    return ops.run_exchange(comm, plan, work, partial, out=out, call=call)


def _exchange_compiled(
    partial: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | DeviceMesh | None,
    row_counts: Sequence[int] | None,
    logits_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    route: str | None,
    kernels: str | None,
    layout: Layout | None,
) -> torch.Tensor:
    """`exchange` in compiled code: one opaque operator, which validates when it runs."""
    shapes.check_no_grad(partial=partial)
    name, ranks, rank = identify(group)
    row_counts = _owned(layout, partial.shape[0], row_counts)
    rows = shapes.traced_share(partial.shape[0], row_counts, ranks, rank)
    arguments = (
        partial,
        rows,
        vocab_size,
        name,
        ranks,
        partial.dtype if logits_dtype is None else logits_dtype,
        row_counts,
        kernels or "",
        route or "",
    )
    if out is None:
        return torch.ops.lmhead.exchange(*arguments)
    torch.ops.lmhead.exchange_out(*arguments, out)
    return out


def _owned(
    layout: Layout | None, total: int, row_counts: Sequence[int] | None
) -> Sequence[int] | None:
    """What a layout's row counts are to an operator that knows none: one per rank, of those that it
    owns; in code that is being traced.
    """
    if layout is None or layout.plain:
        return row_counts
    return layout.owners([total // layout.sets] * layout.sets if row_counts is None else row_counts)


def share(
    drawn: torch.Tensor | Sample,
    *,
    layout: Layout,
    row_counts: Sequence[int],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor | Sample:
    """What was drawn for the rows that this rank owns, ids [B] (or any tensor [B, ...]) or a
    `Sample` -> the same of all G rows of its attention group, on each of the group's ranks.

    `LMHead.share` for `exchange` and `sample_exchange`, whose `layout` and `row_counts` (or, where
    these got none, as many equal counts) it takes.  Raises as `LMHead.share` does.
    """
    parts = drawn.tensors() if isinstance(drawn, Sample) else [drawn]
    if torch.compiler.is_compiling():
        name, ranks, rank = identify(group)
        whole, _, _ = layout.traced(row_counts, 0, rank)
        sizes = (layout.to_list(), list(row_counts), name, ranks)
        found = parts if layout.plain else torch.ops.lmhead.share(parts, whole, *sizes)
    else:
        found = _share(parts, layout, row_counts, group, workspace)
    return drawn.with_tensors(found) if isinstance(drawn, Sample) else found[0]


def _share(
    parts: Sequence[torch.Tensor],
    layout: Layout,
    row_counts: Sequence[int],
    group: dist.ProcessGroup | DeviceMesh | None,
    workspace: Workspace | None,
) -> list[torch.Tensor]:
    if torch.compiler.is_compiling():
        return untraced(_share, parts, layout, row_counts, group, workspace)
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"what is shared must be a tensor, got {type(first).__name__}")
    comm, number = Comm(group, first.device), next(_calls)
    rows, error = None, None
    try:
        ops.check_layout(layout, comm)
        rows = layout.rows(row_counts, comm.rank)
        sharing.check_parts(parts, rows.own, first.device)
    except (ValueError, TypeError) as caught:
        error = caught
    checking = ops.checking() and not ops.is_capturing(first.device)
    sharing.agree(comm, rows, parts, error, first.device, number, checking)
    assert rows is not None
    work = Workspace() if workspace is None else workspace
    if workspace is not None:
        work.capturing(ops.is_capturing(first.device))
    return sharing.run_share(comm, rows, work, parts, number)


def sample_exchange(
    partial: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    row_counts: Sequence[int] | None = None,
    workspace: Workspace | None = None,
    route: str | None = None,
    kernels: str | None = None,
    layout: Layout | None = None,
    **parameters: Any,
) -> Sample:
    """partial [T, S], this rank's columns of all gathered rows -> what its own B rows draw.

    `exchange` and `lmhead.LMHead.sample` in one: rows, group, workspace and kernels as there, and
    parameters, [B] tensors and all, as here.  `partial` is bf16, fp16 or fp32.  The result is a
    `Sample`, which says the route; `route` "all_to_all" or "all_gather" draws from full logits.

    In a `layout` parameters are of all G rows of the rank's attention group, and the result is of
    those that it owns.

    Raises as `LMHead.sample` does.
    """
    request = Request(**parameters)
    if torch.compiler.is_compiling():
        return _sample_compiled(
            partial, vocab_size, group, row_counts, route, kernels, layout, request
        )
    return _sample_exchange(
        partial, vocab_size, group, row_counts, workspace, route, kernels, layout, request
    )


def _sample_exchange(
    partial: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | DeviceMesh | None,
    row_counts: Sequence[int] | None,
    workspace: Workspace | None,
    route: str | None,
    kernels: str | None,
    layout: Layout | None,
    request: Request,
) -> Sample:
    if torch.compiler.is_compiling():
        return untraced(
            _sample_exchange,
            partial,
            vocab_size,
            group,
            row_counts,
            workspace,
            route,
            kernels,
            layout,
            request,
        )
    if not isinstance(partial, torch.Tensor):
        raise TypeError(f"partial must be a tensor, got {type(partial).__name__}")
    comm, device = Comm(group, partial.device), partial.device
    number = next(_calls)
    capturing = ops.is_capturing(device)
    plan, error, form = None, None, Form()
    try:
        plan = draw.partial_plan(comm, partial, vocab_size, row_counts, kernels, route, layout)
        form = request.form(vocab_size, min(plan.shard, vocab_size))
        look = not capturing and (device.type == "cpu" or ops.checking())
        request.check(plan.rows.group_total, vocab_size, device, look)
    except (ValueError, TypeError) as caught:
        error = caught
    said = {"form": form.to_list(), "sample route": route}
    ops.check_call(comm, plan, error, "sample_exchange", number, device, **said)
    assert plan is not None
    if capturing and form.may_miss and form.fallback and route is None:
        raise RuntimeError(draw.not_known_in_a_capture(form))
    work = Workspace()
    if workspace is not None:
        work = workspace
        work.capturing(capturing)
    if not partial.is_contiguous():
        kept = work.take("contiguous partial", partial.numel(), partial.dtype, device)
        partial = kept.view(partial.shape).copy_(partial)
    rows = plan.rows.group_total
    unseeded = sampling.unseeded(rows, comm.rank, device)
    records = request.records(rows, form, vocab_size, device, unseeded)
    return draw.run_sample_exchange(
        comm, plan, work, partial, records, request.mask, full=route is not None, number=number
    )


def _sample_compiled(
    partial: torch.Tensor,
    vocab_size: int,
    group: dist.ProcessGroup | DeviceMesh | None,
    row_counts: Sequence[int] | None,
    route: str | None,
    kernels: str | None,
    layout: Layout | None,
    request: Request,
) -> Sample:
    """`sample_exchange` in compiled code: one opaque operator, which validates when it runs."""
    shapes.check_no_grad(partial=partial)
    name, ranks, rank = identify(group)
    total, device, owned = partial.shape[0], partial.device, slice(None)
    if layout is None or layout.plain:
        rows = shapes.traced_share(total, row_counts, ranks, rank)
    else:
        rows, begin, own = layout.traced(row_counts, total // layout.sets, rank)
        owned = slice(begin, begin + own)
        row_counts = _owned(layout, total, row_counts)
    form = request.form(vocab_size, min(partial.shape[1], vocab_size))
    request.check(rows, vocab_size, device, False)
    unseeded = sampling.unseeded(rows, rank, device)
    records = request.records(rows, form, vocab_size, device, unseeded)
    return sample_operators.sample_exchange(
        partial,
        records.rows(owned),
        None if request.mask is None else request.mask[owned],
        vocab_size,
        name,
        ranks,
        row_counts,
        kernels or "",
        route or "",
        full=route is not None,
    )
