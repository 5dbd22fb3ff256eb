"""A call that draws tokens: own hidden rows in, the rows' tokens out, and no logits exchanged.

    hidden and records [B, ...]   own rows
      | ONE all-gather            hidden [T, H], records [T, ...]
      | GEMM, own shard           partial [T, S]
      | reduce                    messages [T, words]: candidates and sums, kilobytes
      | ONE small all-to-all      messages [N, B, words] of the own rows
      | merge                     ids [B]

Where candidates may fail to cover a row, one number per rank says how often they did; if they did
anywhere, all ranks exchange their partial logits after all and draw those rows from them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmhead import candidates, ops, shapes
from lmhead.candidates import Merged
from lmhead.comm import Call, Comm
from lmhead.kernels import gemm as gemm_kernels
from lmhead.kernels import sample as kernels
from lmhead.kernels.config import GemmConfig, GemmShape, default_gemm
from lmhead.ops import Plan
from lmhead.ranges import stage
from lmhead.route import Route
from lmhead.sampling import (
    MISSED,
    SEED,
    Form,
    Records,
    Sample,
    check_mask,
    pack_bits,
    unpack_bits,
)
from lmhead.shapes import Layout, Rows
from lmhead.sharing import run_share
from lmhead.workspace import Workspace

# Rows of hidden and record together start on borders that bulk tensor loads take.
_ALIGNMENT = 16

_op_calls = itertools.count(1)

NOT_COVERED = "not_covered"  # the rule by which full logits are exchanged after all
BY_CANDIDATES = Route("candidates", "default", "each row's candidates go to its owner")


def run_sample(
    comm: Comm,
    plan: Plan,
    work: Workspace,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    records: Records,
    mask: torch.Tensor | None,
    *,
    full: bool = False,
    number: int = 0,
) -> Sample:
    """The rows [brought, H] that this rank holds, and the records and the mask of its attention
    group's G rows -> what the rows draw that it owns.  Everything has been validated.  `full` takes
    the plan's route for full logits.
    """
    call = _call(plan, "sample", number)
    own, mask = _own(plan, records, mask)
    if full or plan.rows.total == 0:
        logits = ops.run_logits(comm, plan, work, hidden, weight, bias, number=number)
        return _from_logits(plan, work, logits, own, mask)
    if plan.rows.span > 1 and records.form.noisy and not records.form.seeded:
        records = _with_owners_seeds(comm, plan, work, own, records, number)
    if comm.ranks > 1:
        with stage("gather"):
            hidden, records = _gather(comm, plan, work, hidden, records, call)
    else:
        weight = weight[: plan.vocab_size]
        bias = None if bias is None else bias[: plan.vocab_size]
    total, shard, device = plan.rows.total, weight.shape[0], hidden.device
    summary = None
    config = _fusing_config(comm, plan, records.form, hidden, weight)
    if config is None or records.form.reads_logits:
        partial = work.take("partial", total * shard, plan.wire_dtype, device).view(total, shard)
    else:  # no logit is ever written; its dtype alone is of use
        partial = work.take("partial", 1, plan.wire_dtype, device).expand(total, shard)
    if config is None:
        ops.run_gemm(plan, work, hidden, weight, bias, partial)
    else:
        first = comm.rank * shard
        summary = _summary(work, total, shard, config.block_v, device)
        with stage("gemm"):
            kernels.fused(
                hidden,
                weight,
                bias,
                records.words,
                summary.planes,
                _kernel_messages(records.form),
                first=first,
                held=_held(first, shard, plan.vocab_size),
                scale=plan.scale,
                softcap=plan.softcap,
                partial=partial,
                write=records.form.reads_logits,
                config=config,
            )
    return _draw(comm, plan, work, partial, records, mask, call, summary)


def run_sample_exchange(
    comm: Comm,
    plan: Plan,
    work: Workspace,
    partial: torch.Tensor,
    records: Records,
    mask: torch.Tensor | None,
    *,
    full: bool = False,
    number: int = 0,
) -> Sample:
    """The same from a caller's own partial logits [T, S], contiguous."""
    call = _call(plan, "sample_exchange", number)
    records, mask = _own(plan, records, mask)
    if full or plan.rows.total == 0:
        logits = ops.run_exchange(comm, plan, work, partial, call=call)
        return _from_logits(plan, work, logits, records, mask)
    if comm.ranks > 1:
        with stage("gather"):
            owned = Rows(plan.rows.counts, comm.rank)  # records are brought by their rows' owners
            told = replace(call, dtype="int32")
            words = ops.run_gather(comm, owned, work, records.words, told, "records")
        records = Records(words, records.form)
    return _draw(comm, plan, work, partial, records, mask, call)


def _call(plan: Plan, op: str, number: int) -> Call:
    dtype = str(plan.wire_dtype).removeprefix("torch.")
    return Call(op, plan.rows.counts, plan.shard, dtype, number)


def _own(
    plan: Plan, records: Records, mask: torch.Tensor | None
) -> tuple[Records, torch.Tensor | None]:
    """Of what belongs to an attention group's rows, what belongs to those that this rank owns."""
    rows = plan.rows
    begin = rows.start - rows.group_start
    chosen = slice(begin, begin + rows.own)
    return records.rows(chosen), None if mask is None else mask[chosen]


def _with_owners_seeds(
    comm: Comm, plan: Plan, work: Workspace, own: Records, records: Records, number: int
) -> Records:
    """The records of an attention group's rows, in which rows without a seed have one that each
    rank made up, with those of the rows' owners: all shards add the same noise then.
    """
    (seeds,) = run_share(comm, plan.rows, work, [own.words[:, SEED]], number)
    words = records.words.clone()
    words[:, SEED] = seeds
    return Records(words, records.form)


def _gather(
    comm: Comm, plan: Plan, work: Workspace, hidden: torch.Tensor, records: Records, call: Call
) -> tuple[torch.Tensor, Records]:
    """All ranks' hidden rows and records, by one collective: [T, H] of some stride, [T, ...].  None
    is needed where every rank holds all rows.
    """
    if len(plan.rows.held) == 1:
        return hidden, records
    begin = plan.rows.brought_start - plan.rows.group_start
    records = records.rows(slice(begin, begin + hidden.shape[0]))
    (own, width), size = hidden.shape, hidden.element_size()
    start = -(-width * size // _ALIGNMENT) * _ALIGNMENT // size
    pitch = start + records.words.shape[1] * 4 // size
    rows = work.take("own rows and records", own * pitch, hidden.dtype, hidden.device)
    rows = rows.view(own, pitch)
    rows[:, :width].copy_(hidden)
    rows[:, width:start].zero_()
    rows[:, start:].copy_(records.words.view(hidden.dtype))
    name = str(hidden.dtype).removeprefix("torch.")
    gathered = ops.run_gather(comm, plan.rows, work, rows, replace(call, dtype=name, columns=pitch))
    words = gathered[:, start:].contiguous().view(torch.int32)
    hidden = gathered[:, :width]
    if plan.kernels == "torch":
        # A library may sum up in another order where rows lie apart.
        total = plan.rows.total
        plain = work.take("plain rows", total * width, hidden.dtype, hidden.device)
        hidden = plain.view(total, width).copy_(hidden)
    return hidden, Records(words, records.form)


def _draw(
    comm: Comm,
    plan: Plan,
    work: Workspace,
    partial: torch.Tensor,
    records: Records,
    mask: torch.Tensor | None,
    call: Call,
    summary: _Summary | None = None,
) -> Sample:
    """partial [T, S] and the records of all T rows, and the own rows' mask -> what they draw.  A
    GEMM that summarised its tiles hands their `summary` on.
    """
    rows, form = plan.rows, records.form
    own = records.rows(slice(rows.start, rows.start + rows.own))
    allowed = _exchange_mask(comm, plan, work, mask, partial.shape[1], call)
    width = form.message_words
    sent = work.take("messages", rows.total * width, torch.int32, partial.device)
    first = comm.rank * partial.shape[1]
    with stage("reduce"):
        _reduce(
            plan,
            work,
            partial,
            first,
            records,
            allowed,
            sent.view(rows.total, width),
            fast=_by_kernels(plan, form, comm.ranks),
            summary=summary,
        )
    received = _to_owners(comm, plan, work, sent, width, "received messages", call)
    with stage("merge"):
        found = candidates.merge(
            received.view(comm.ranks, rows.own, width),
            own,
            partial.shape[1],
            plan.vocab_size,
            kernels.merge if _by_kernels(plan, form, comm.ranks) else None,
        )
    route = BY_CANDIDATES
    if form.may_miss and form.fallback:
        missed = _count_missed(comm, work, found, call)
        if any(missed):
            logits = partial[:, : plan.vocab_size]
            if comm.ranks > 1:
                logits = ops.run_exchange(comm, plan, work, partial, call=call)
            _draw_missed(found, logits, own, mask)
            where = ", ".join(f"{count} of rank {rank}" for rank, count in enumerate(missed))
            route = Route(
                plan.route.name,
                NOT_COVERED,
                f"rows that {form.candidates} candidates per shard do not cover: {where}",
            )
    return _sample(found, route)


def _by_kernels(plan: Plan, form: Form, ranks: int) -> bool:
    """Whether kernels make and merge the candidates: where logits are drawn from as they are, and
    a row's candidates fit in one program.
    """
    return (
        plan.kernels == "triton"
        and not form.edited
        and max(form.candidates, form.top_sent) <= kernels.MAX_CANDIDATES
        and ranks * form.candidates <= kernels.MAX_MERGED
    )


def _fusing_config(
    comm: Comm, plan: Plan, form: Form, hidden: torch.Tensor, weight: torch.Tensor
) -> GemmConfig | None:
    """The config by which the GEMM summarises its own tiles; None where a scan does it."""
    if not _by_kernels(plan, form, comm.ranks) or plan.deterministic:
        return None
    if gemm_kernels.why_not_bulk(hidden, weight) is not None:
        return None
    config = plan.configs.gemm
    if config is None:
        sizes = plan.rows.total, weight.shape[0], weight.shape[1]
        config = default_gemm(GemmShape(*sizes, weight.itemsize, plan.wire_dtype.itemsize))
    return config if kernels.can_fuse(config) else None


def _kernel_messages(form: Form) -> kernels.Messages:
    parts = form.slices()
    return kernels.Messages(
        form.record_words,
        form.message_words,
        form.candidates,
        parts["lse"].start if form.logprobs else -1,
        parts["mass"].start if form.by_mass else -1,
        form.noisy,
    )


@dataclass(frozen=True)
class _Summary:
    """What tiles of `block_v` columns show: planes [PLANES, tiles, T] fp32."""

    planes: torch.Tensor
    block_v: int


def _summary(
    work: Workspace, rows: int, columns: int, block_v: int, device: torch.device
) -> _Summary:
    shape = kernels.summary_shape(rows, columns, block_v)
    planes = work.take("summary", math.prod(shape), torch.float32, device)
    return _Summary(planes.view(shape), block_v)


def _held(first: int, shard: int, vocab_size: int) -> int:
    """How many of a shard's columns are not padding."""
    return max(0, min(shard, vocab_size - first))


def _reduce(
    plan: Plan,
    work: Workspace,
    partial: torch.Tensor,
    first: int,
    records: Records,
    allowed: torch.Tensor | None,
    out: torch.Tensor,
    *,
    fast: bool,
    summary: _Summary | None = None,
) -> None:
    """partial [T, S], columns from `first` on -> out [T, form.message_words], by kernels if
    `fast`.
    """
    if not fast:
        candidates.reduce(partial, first, plan.vocab_size, records, allowed, out)
        return
    form, (total, shard) = records.form, partial.shape
    held = _held(first, shard, plan.vocab_size)
    messages, words = _kernel_messages(form), records.words
    if summary is None:
        summary = _summary(work, total, held, kernels.SCAN_COLUMNS, partial.device)
        kernels.scan(partial, words, summary.planes, messages, first=first, held=held)
    pick = functools.partial(
        kernels.pick,
        summary.planes,
        partial,
        words,
        out,
        first=first,
        held=held,
        block_v=summary.block_v,
    )
    pick(messages)
    parts = form.slices()
    if form.top_sent:
        top = replace(messages, count=form.top_sent, lse_at=-1, mass_at=-1)
        pick(top, values_at=parts["top_values"].start, plain=True)
    if form.asked:
        asked = candidates.gather_wide(partial[:, :held], records.asked_ids, first)
        out[:, parts["asked"]] = asked.view(torch.int32)


def _sample(found: Merged, route: Route) -> Sample:
    return Sample(
        found.ids,
        found.status,
        route,
        found.logprobs,
        found.asked_logprobs,
        found.top_ids,
        found.top_logprobs,
    )


def _to_owners(
    comm: Comm,
    plan: Plan,
    work: Workspace,
    sent: torch.Tensor,
    width: int,
    purpose: str,
    call: Call,
) -> torch.Tensor:
    """Flat rows [T * width] of all owners -> flat [N * B * width], the own rows of all ranks."""
    rows = plan.rows
    if comm.ranks == 1:
        return sent
    name = str(sent.dtype).removeprefix("torch.")
    call = replace(call, columns=width, dtype=name)
    if plan.route.name == "all_gather":
        everything = work.take(purpose, comm.ranks * sent.numel(), sent.dtype, sent.device)
        with stage("exchange"):
            comm.gather(everything, sent, call)
        blocks = everything.view(comm.ranks, rows.total, width)
        return blocks[:, rows.start : rows.start + rows.own].reshape(-1)
    received = work.take(purpose, comm.ranks * rows.own * width, sent.dtype, sent.device)
    out_splits = None if rows.uniform else [rows.own * width] * comm.ranks
    in_splits = None if rows.uniform else [count * width for count in rows.counts]
    with stage("exchange"):
        comm.exchange(received, sent, out_splits, in_splits, call)
    return received


def _exchange_mask(
    comm: Comm,
    plan: Plan,
    work: Workspace,
    mask: torch.Tensor | None,
    shard: int,
    call: Call,
) -> torch.Tensor | None:
    """The own rows' mask -> what of all T rows' masks concerns this shard, bool [T, S]."""
    if mask is None:
        return None
    vocab, rows = plan.vocab_size, plan.rows
    allowed = mask if mask.dtype == torch.bool else unpack_bits(mask, vocab)
    if comm.ranks == 1:
        return allowed
    padded = torch.nn.functional.pad(allowed, (0, comm.ranks * shard - vocab))
    bits = pack_bits(padded.view(rows.own, comm.ranks, shard).transpose(0, 1))
    width = bits.shape[2]
    name = "own rows' masks"
    received = work.take(name, rows.total * width, torch.uint8, mask.device)
    call = replace(call, columns=width, dtype="uint8")
    with stage("mask"):
        if plan.route.name == "all_gather":
            received = _gathered_bits(comm, plan, work, bits, call)
        else:
            splits = [count * width for count in rows.counts], [rows.own * width] * comm.ranks
            comm.exchange(received, bits.view(-1), *splits, call)
    return unpack_bits(received.view(rows.total, width), shard)


def _gathered_bits(
    comm: Comm, plan: Plan, work: Workspace, bits: torch.Tensor, call: Call
) -> torch.Tensor:
    """bits [N, B, W], by destination -> this rank's [T, W], where there is no all-to-all."""
    ranks, own, width = bits.shape
    per_row = bits.transpose(0, 1).reshape(own, ranks * width)
    rows = Rows(plan.rows.counts, comm.rank)  # a mask's rows are brought by those that own them
    everyone = ops.run_gather(comm, rows, work, per_row, call, "masks")
    return everyone.view(-1, ranks, width)[:, comm.rank].contiguous()


def _count_missed(comm: Comm, work: Workspace, found: Merged, call: Call) -> list[int]:
    """How many rows of each rank the candidates do not cover, known to all.  Waits for the
    device.
    """
    own = (found.status == MISSED).sum().to(torch.int32).view(1)
    if comm.ranks == 1:
        return own.tolist()
    everyone = work.take("missed rows", comm.ranks, torch.int32, own.device)
    with stage("exchange"):
        comm.gather(everyone, own, replace(call, columns=1, dtype="int32"))
    return everyone.tolist()


def _from_logits(
    plan: Plan, work: Workspace, logits: torch.Tensor, records: Records, mask: torch.Tensor | None
) -> Sample:
    """logits [B, V] -> what the rows draw, with no row missed: those that C candidates do not cover
    are drawn from all, at once where the host may not look which they are.
    """
    rows, vocab = logits.shape
    form = replace(records.form, top_sent=min(records.form.top, vocab))
    blind = not form.sure and ops.is_capturing(logits.device)
    if blind:
        form = replace(form, candidates=vocab, may_miss=False, by_mass=False)
    records = Records(records.words, form)
    if mask is not None and mask.dtype != torch.bool:
        mask = unpack_bits(mask, vocab)
    messages = torch.empty((rows, form.message_words), dtype=torch.int32, device=logits.device)
    fast = _by_kernels(plan, form, 1)
    _reduce(plan, work, logits, 0, records, mask, messages, fast=fast)
    found = candidates.merge(messages[None], records, vocab, vocab, kernels.merge if fast else None)
    if not form.sure and not blind:
        _draw_missed(found, logits, records, mask)
    return _sample(found, plan.route)


def _draw_missed(
    found: Merged, logits: torch.Tensor, records: Records, mask: torch.Tensor | None
) -> None:
    """Draw the rows that the candidates do not cover from all of their logits [B, V]."""
    vocab = logits.shape[1]
    missed = (found.status == MISSED).nonzero().squeeze(1)
    if missed.numel() == 0:
        return
    if mask is not None and mask.dtype != torch.bool:
        mask = unpack_bits(mask, vocab)
    every: Form = replace(
        records.form,
        candidates=vocab,
        top_sent=min(records.form.top, vocab),
        sure=True,
        may_miss=False,
        by_mass=False,
    )
    chosen = Records(records.words[missed], every)
    messages = torch.empty(
        (missed.numel(), every.message_words), dtype=torch.int32, device=logits.device
    )
    allowed = None if mask is None else mask[missed]
    candidates.reduce(logits[missed], 0, vocab, chosen, allowed, messages)
    better = candidates.merge(messages[None], chosen, vocab, vocab)
    for name in ("ids", "status", "logprobs", "asked_logprobs", "top_ids", "top_logprobs"):
        into, value = getattr(found, name), getattr(better, name)
        if into is not None:
            into.index_copy_(0, missed, value)


def not_known_in_a_capture(form: Form) -> str:
    """Why a draw that may need full logits cannot be captured."""
    return (
        f"{form.candidates} candidates may fail to cover a row, and whether they do is not known "
        "while a graph is captured: pass fallback=False, and draw rows whose id is -1 once more "
        "outside of the graph; or pass top_k"
    )


def partial_plan(
    comm: Comm,
    partial: torch.Tensor,
    vocab_size: int,
    row_counts: Sequence[int] | None,
    kernels: str | None,
    route: str | None,
    layout: Layout | None = None,
) -> Plan:
    """Validate a draw from the caller's own partial logits and say how it runs."""
    if partial.dtype not in shapes.FLOATS:
        raise TypeError(f"partial must be bfloat16, float16 or float32, got {partial.dtype}")
    return ops.exchange_plan(comm, partial, vocab_size, row_counts, None, kernels, route, layout)


# From the group's name on: what the registered operators run (lmhead.sample_operators).


def sample_by_name(
    hidden: torch.Tensor,
    words: torch.Tensor,
    form_values: Sequence[int],
    mask: torch.Tensor | None,
    full: bool,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    vocab_size: int,
    group_name: str,
    ranks: int,
    *head: Any,
    held: ops.Held | None = None,
    share: bool = False,
) -> Sample:
    """hidden [B, H] and records -> what the rows draw; arguments are those of
    `torch.ops.lmhead.sample`, `held` and `share` those of `sample_held`.  Temporaries come from the
    allocator.
    """
    scale, softcap, logits_dtype, wire_dtype, row_counts, kernels, route = head
    comm, number = ops.op_comm(group_name, ranks, hidden.device), next(_op_calls)
    plan, error, records = None, None, _records(words, form_values)
    try:
        plan = ops.head_plan(
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
            held=held,
        )
        _check_records(records, plan, mask, full, hidden.device)
    except (ValueError, TypeError) as caught:
        error = caught
    said = {"form": records.form.to_list(), "full": full, "share": share}
    ops.check_call(comm, plan, error, "sample", number, hidden.device, **said)
    assert plan is not None
    work = Workspace()
    drawn = run_sample(
        comm, plan, work, hidden, weight, bias, records, mask, full=full, number=number
    )
    return run_share_sample(comm, plan, work, drawn, number) if share else drawn


def run_share_sample(
    comm: Comm, plan: Plan, work: Workspace, drawn: Sample, number: int = 0
) -> Sample:
    """What the own rows drew -> what the attention group's did, on each of its ranks."""
    return drawn.with_tensors(run_share(comm, plan.rows, work, drawn.tensors(), number))


def sample_exchange_by_name(
    partial: torch.Tensor,
    words: torch.Tensor,
    form_values: Sequence[int],
    mask: torch.Tensor | None,
    full: bool,
    vocab_size: int,
    group_name: str,
    ranks: int,
    row_counts: Sequence[int] | None,
    kernels: str,
    route: str,
) -> Sample:
    """partial [T, S] and the own rows' records -> what they draw; arguments are those of
    `torch.ops.lmhead.sample_exchange`.
    """
    comm, number = ops.op_comm(group_name, ranks, partial.device), next(_op_calls)
    plan, error, records = None, None, _records(words, form_values)
    try:
        counts = ops.listed(row_counts)
        plan = partial_plan(comm, partial, vocab_size, counts, kernels, route)
        _check_records(records, plan, mask, full, partial.device)
    except (ValueError, TypeError) as caught:
        error = caught
    said = {"form": records.form.to_list(), "full": full}
    ops.check_call(comm, plan, error, "sample_exchange", number, partial.device, **said)
    assert plan is not None
    return run_sample_exchange(
        comm, plan, Workspace(), partial.contiguous(), records, mask, full=full, number=number
    )


def _records(words: torch.Tensor, form_values: Sequence[int]) -> Records:
    return Records(words, Form.from_list([int(value) for value in form_values]))


def _check_records(
    records: Records, plan: Plan, mask: torch.Tensor | None, full: bool, device: torch.device
) -> None:
    words, want = records.words, (plan.rows.group_total, records.form.record_words)
    if words.shape != want or words.dtype != torch.int32 or words.device != device:
        raise ValueError(
            f"records must be {list(want)} int32 on {device}, got {tuple(words.shape)} "
            f"{words.dtype} on {words.device}"
        )
    if (mask is not None) != records.form.masked:
        raise ValueError(f"the form says masked={records.form.masked}, but mask is {mask!r}")
    check_mask(mask, plan.rows.group_total, plan.vocab_size, device)
    doubtful = records.form.may_miss and records.form.fallback and not full
    if doubtful and ops.is_capturing(device):
        raise ValueError(not_known_in_a_capture(records.form))
