"""What a user would run instead of lmhead, each in our own words from its public description.

A peer takes hidden rows [B, H] and the shard [S, H] to its own rows' logits, in the stages that
`lmhead.bench.roofline` knows, and allocates per call what the original allocates per call.  Where a
description leaves something open, the reading that is kinder to the peer is taken.  Every one of
them is checked for equality before it is timed (`lmhead.bench.protocol`).

In a layout whose attention groups have several ranks, a and a-lean alone are defined
(`IN_LAYOUTS`), and end as engines do with all G rows of a group's logits on each of its ranks.
Hidden rows are gathered once: each rank sends the slice of its group's rows that it owns, and
nobody anything where all ranks hold all rows.

| peer | what | source |
|---|---|---|
| a | all-gather of all logits into [T, V], then the own rows are copied out | engines until 2026: \
SGLang's logits processor (`tensor_model_parallel_all_gather`, `dp_scatter`), vLLM's `all_gather` |
| a-lean | the same, but only the own rows are put in order | a careful hand |
| b | flat all-to-all, view-permute-reshape, fp32 copy into a caller's buffer | SGLang pull \
request 32313 |
| c | b behind a hidden gather by zero-fill and all-reduce | the same, as published |
| d | list all-to-all, concatenate | `torch.distributed.all_to_all` |
| e | DTensor, `redistribute(Shard(1) -> Shard(0))` | torch.distributed.tensor's documentation |
| f | functional collectives, compiled whole | torch.distributed._functional_collectives, \
torch.compile |
| g | every rank holds the whole head (DP head): no exchange | SGLang's `--enable-dp-lm-head` |
| h | rows put in their owners' order, all-to-all with split sizes, concatenate | vLLM pull \
request 50465 (batch-sharded sampling), whose requests belong to ranks in turn |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lmhead.bench.cases import Case
from lmhead.timing import Mark

GATHER, GEMM, EXCHANGE, REASSEMBLY = "hidden gather", "gemm", "exchange", "reassembly"
# Of methods that end in tokens: candidates are found in the shard; tokens are drawn from them, or
# from the own rows' logits.
REDUCE, DRAW = "reduce", "draw"
# Of one that hands them to the whole attention group.
SHARE = "share"
# In the order of a step.
STAGES = (GATHER, GEMM, REDUCE, EXCHANGE, REASSEMBLY, DRAW, SHARE)


@dataclass
class Inputs:
    """What every method starts from on one rank: hidden, the rows that it holds (its own [B, H], or
    all [G, H] of its attention group), weight [S, H], and for a benchmark of the exchange alone,
    partial [T, S].
    """

    case: Case
    group: dist.ProcessGroup
    rank: int
    device: torch.device
    hidden: torch.Tensor
    weight: torch.Tensor
    partial: torch.Tensor
    full: Callable[[], torch.Tensor]  # [V, H], made when first asked for

    @property
    def own(self) -> slice:
        """The own rows among all T."""
        return slice(self.rank * self.case.rows, (self.rank + 1) * self.case.rows)

    @property
    def grouped(self) -> slice:
        """Those of the attention group; the own ones where each rank is one by itself."""
        rows = self.case.rows_of(self.rank)
        return slice(rows.group_start, rows.group_start + rows.group_total)

    @property
    def all_held(self) -> bool:
        """Whether every rank holds all rows before the step."""
        return self.case.ranks > 1 and self.case.layout.sets == 1

    @property
    def mine(self) -> slice:
        """The own rows among the attention group's."""
        return slice(self.own.start - self.grouped.start, self.own.stop - self.grouped.start)


# hidden rows -> all rows; partial -> logits; hidden rows -> logits.
Gather = Callable[[], torch.Tensor]
Exchange = Callable[[torch.Tensor, Mark], torch.Tensor]
Head = Callable[[Mark], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """One way.  `build` prepares it for given inputs (buffers that a caller would keep, meshes) and
    returns its head and its exchange; None where it has no exchange of its own.
    """

    name: str
    title: str
    build: Callable[[Inputs], tuple[Head, Exchange | None]]
    # How hidden rows move, and then logits: for the arithmetic of bytes.
    gathers: str = "all_gather"
    exchanges: str = "all_to_all"

    def bytes(self, case: Case, exchange_only: bool, device: torch.device) -> int:
        """Bytes that cross a rank's link in one call, by arithmetic."""
        others, rows = case.ranks - 1, 0 if exchange_only else case.rows
        if case.layout.sets == 1:
            rows = 0  # every rank holds them all
        own = rows * case.hidden * case.itemsize
        hidden = {"all_gather": own * others, "all_reduce": 2 * own * others, "": 0}[self.gathers]
        # torch's own backends for CPU have no all-to-all that DTensor would take.
        exchanges = self.exchanges
        if exchanges == "redistribute":
            exchanges = "all_gather" if device.type == "cpu" else "all_to_all"
        block = case.rows * case.shard * case.itemsize
        logits = {"all_to_all": others, "all_gather": others * case.ranks, "": 0}[exchanges] * block
        return hidden + logits


def all_gather(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """torch's all-gather by whichever of its names this release has; flat views."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(out.view(-1), own.contiguous().view(-1), group=group)
    return out


def _fresh_gather(inputs: Inputs) -> Gather:
    hidden, total = inputs.hidden, inputs.case.total
    if inputs.all_held:
        return lambda: hidden
    hidden = hidden[inputs.mine]
    return lambda: all_gather(hidden.new_empty(total, hidden.shape[1]), hidden, inputs.group)


def _in_sequence(inputs: Inputs, gather: Gather, exchange: Exchange) -> Head:
    """Gather, multiply into fresh memory, exchange."""

    def head(mark: Mark) -> torch.Tensor:
        rows = gather()
        if not inputs.all_held:
            mark(GATHER)
        partial = rows @ inputs.weight.t()
        mark(GEMM)
        return exchange(partial, mark)

    return head


def _plain(exchange_of: Callable[[Inputs], Exchange]) -> Callable[[Inputs], tuple[Head, Exchange]]:
    """A peer whose own part is the exchange."""

    def build(inputs: Inputs) -> tuple[Head, Exchange]:
        exchange = exchange_of(inputs)
        return _in_sequence(inputs, _fresh_gather(inputs), exchange), exchange

    return build


def _all_gather_scatter(inputs: Inputs) -> Exchange:
    """All logits of all rows on every rank, put in order, of which the own rows (the attention
    group's) are copied out, unless they are all there are.
    """
    case, kept = inputs.case, inputs.grouped

    def exchange(partial: torch.Tensor, mark: Mark) -> torch.Tensor:
        everything = partial.new_empty(case.ranks, case.total, case.shard)
        all_gather(everything, partial, inputs.group)
        mark(EXCHANGE)
        ordered = everything.movedim(0, 1).reshape(case.total, case.ranks * case.shard)
        logits = ordered
        if not inputs.all_held:
            logits = torch.empty_like(ordered[kept]).copy_(ordered[kept])
        mark(REASSEMBLY)
        return logits[:, : case.vocab]

    return exchange


def _all_gather_own(inputs: Inputs) -> Exchange:
    """The same gather, but nothing is done to rows that are not the own ones (the attention
    group's).
    """
    case, kept = inputs.case, inputs.grouped

    def exchange(partial: torch.Tensor, mark: Mark) -> torch.Tensor:
        everything = partial.new_empty(case.ranks, case.total, case.shard)
        all_gather(everything, partial, inputs.group)
        mark(EXCHANGE)
        logits = everything[:, kept].movedim(0, 1).reshape(kept.stop - kept.start, -1)
        mark(REASSEMBLY)
        return logits[:, : case.vocab]

    return exchange


def _published(inputs: Inputs) -> Exchange:
    """Fresh receive buffer, one all-to-all, permuted into a second buffer, widened to fp32 in a
    third, which belongs to the caller and stays.
    """
    case = inputs.case
    kept = torch.empty(case.rows, case.vocab, dtype=torch.float32, device=inputs.device)

    def exchange(partial: torch.Tensor, mark: Mark) -> torch.Tensor:
        received = torch.empty_like(partial)
        dist.all_to_all_single(received.view(-1), partial.view(-1), group=inputs.group)
        mark(EXCHANGE)
        blocks = received.view(case.ranks, case.rows, case.shard)
        logits = blocks.permute(1, 0, 2).reshape(case.rows, case.ranks * case.shard)
        kept.copy_(logits[:, : case.vocab])
        mark(REASSEMBLY)
        return kept

    return exchange


def _build_published_whole(inputs: Inputs) -> tuple[Head, Exchange | None]:
    """The hidden gather that stands in front of it there: a kept buffer is zeroed, the own rows are
    written, and the sum over ranks is everybody's rows.  Its exchange is that of b.
    """
    case = inputs.case
    everyone = inputs.hidden.new_empty(case.total, case.hidden)

    def gather() -> torch.Tensor:
        everyone.zero_()
        everyone[inputs.own].copy_(inputs.hidden)
        dist.all_reduce(everyone, group=inputs.group)
        return everyone

    return _in_sequence(inputs, gather, _published(inputs)), None


def _list_all_to_all(inputs: Inputs) -> Exchange:
    case = inputs.case

    def exchange(partial: torch.Tensor, mark: Mark) -> torch.Tensor:
        received = [partial.new_empty(case.rows, case.shard) for _ in range(case.ranks)]
        dist.all_to_all(received, list(partial.chunk(case.ranks)), group=inputs.group)
        mark(EXCHANGE)
        logits = torch.cat(received, dim=1)
        mark(REASSEMBLY)
        return logits[:, : case.vocab]

    return exchange


def _redistribute(inputs: Inputs) -> Exchange:
    """What DTensor makes of it: on a GPU an all-to-all, on a CPU an all-gather and a chunk."""
    from torch.distributed.tensor import DTensor, Shard

    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # it says so on every rank
    mesh = DeviceMesh.from_group(inputs.group, inputs.device.type)

    def exchange(partial: torch.Tensor, mark: Mark) -> torch.Tensor:
        sharded = DTensor.from_local(partial, mesh, [Shard(1)], run_check=False)
        logits = sharded.redistribute(mesh, [Shard(0)]).to_local()
        mark(EXCHANGE)
        return logits[:, : inputs.case.vocab]

    return exchange


def _build_compiled(inputs: Inputs) -> tuple[Head, Exchange | None]:
    """Compiled as one piece, so its stages are those of the same functions uncompiled."""
    functional: Any = torch.distributed._functional_collectives
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    case, group = inputs.case, inputs.group

    def exchange(partial: torch.Tensor, mark: Mark) -> torch.Tensor:
        sent = functional.all_to_all_single(partial, None, None, group)
        received = functional.wait_tensor(sent)
        mark(EXCHANGE)
        blocks = received.view(case.ranks, case.rows, case.shard)
        logits = blocks.permute(1, 0, 2).reshape(case.rows, case.ranks * case.shard)
        mark(REASSEMBLY)
        return cast(torch.Tensor, logits[:, : case.vocab])

    def head(mark: Mark) -> torch.Tensor:
        rows = functional.wait_tensor(gather(inputs.hidden, 0, group))
        mark(GATHER)
        partial = rows @ inputs.weight.t()
        mark(GEMM)
        return exchange(partial, mark)

    def whole(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = functional.wait_tensor(gather(hidden, 0, group))
        partial = rows @ weight.t()
        received = functional.wait_tensor(functional.all_to_all_single(partial, None, None, group))
        blocks = received.view(case.ranks, case.rows, case.shard)
        logits = blocks.permute(1, 0, 2).reshape(case.rows, case.ranks * case.shard)
        return cast(torch.Tensor, logits[:, : case.vocab])

    compiled = torch.compile(whole, fullgraph=True, dynamic=False)

    def either(mark: Mark) -> torch.Tensor:
        if mark is unmarked:
            logits: torch.Tensor = compiled(inputs.hidden, inputs.weight)
            return logits
        return head(mark)

    return either, None


def _build_dp_head(inputs: Inputs) -> tuple[Head, Exchange | None]:
    weight = inputs.full()

    def head(mark: Mark) -> torch.Tensor:
        logits = inputs.hidden @ weight.t()
        mark(GEMM)
        return logits

    return head, None


def _owner_order(inputs: Inputs) -> Exchange:
    """A request may belong to any rank, so its rows are gathered by owner first.  The description
    does not say where in the step that happens; here it is one index_select of the partial logits,
    by an order that the host made before the step.
    """
    case = inputs.case
    order = torch.arange(case.total, device=inputs.device)
    sent = [case.rows * case.shard] * case.ranks

    def exchange(partial: torch.Tensor, mark: Mark) -> torch.Tensor:
        ordered = partial.index_select(0, order)
        received = torch.empty_like(ordered)
        flat = received.view(-1)
        dist.all_to_all_single(flat, ordered.view(-1), sent, sent, group=inputs.group)
        mark(EXCHANGE)
        blocks = received.view(case.ranks, case.rows, case.shard)
        logits = torch.cat(list(blocks), dim=1)
        mark(REASSEMBLY)
        return logits[:, : case.vocab]

    return exchange


# Peers that know attention groups of several ranks, all of whose rows they end with.
IN_LAYOUTS = ("a", "a-lean")


def unmarked(stage: str) -> None:
    """The mark of a call whose stages nobody times."""


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("a", "all-gather + scatter", _plain(_all_gather_scatter), exchanges="all_gather"),
        Peer("a-lean", "all-gather, own rows", _plain(_all_gather_own), exchanges="all_gather"),
        Peer("b", "published all-to-all, fp32", _plain(_published)),
        Peer("c", "b after an all-reduce", _build_published_whole, gathers="all_reduce"),
        Peer("d", "list all-to-all + cat", _plain(_list_all_to_all)),
        Peer("e", "DTensor redistribute", _plain(_redistribute), exchanges="redistribute"),
        Peer("f", "functional, compiled", _build_compiled),
        Peer("g", "DP head, no exchange", _build_dp_head, gathers="", exchanges=""),
        Peer("h", "batch-sharded sampling's", _plain(_owner_order)),
    )
}
