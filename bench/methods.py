"""Everything that is timed side by side in one run: our routes, the peers, and the bare GEMM and
all-to-all that nothing of the kind can beat.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lmhead import ops
from lmhead.bench.cases import Case
from lmhead.bench.peers import (
    EXCHANGE,
    GATHER,
    GEMM,
    PEERS,
    REASSEMBLY,
    Inputs,
    Peer,
    all_gather,
    unmarked,
)
from lmhead.chooser import DEFAULTS
from lmhead.comm import Call, Comm
from lmhead.head import LMHead
from lmhead.ops import Plan
from lmhead.own_gemm import exchange
from lmhead.route import choose
from lmhead.shapes import moved_bytes
from lmhead.timing import Mark
from lmhead.workspace import Workspace

OURS = "lmhead"


@dataclass(frozen=True)
class Method:
    """One way from hidden rows (or partial logits) to the own rows' logits.  `whole` is what a user
    calls; `staged` says when each stage has ended.  A roof is only a part: nobody could use it, and
    nothing that contains it can be faster.
    """

    name: str
    title: str
    whole: Callable[[], torch.Tensor]
    staged: Callable[[Mark], torch.Tensor]
    bytes: int  # that cross this rank's link in a call, by arithmetic
    roof: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Ours:
    """A configuration of ours: the route, and the logits' dtype where it is not the wire's."""

    name: str
    title: str
    route: str | None = None
    logits: torch.dtype | None = None


OUR_WAYS = (
    Ours(OURS, "lmhead, all-to-all"),
    Ours("lmhead-fp32", "lmhead, fp32 logits", logits=torch.float32),
    Ours("lmhead-all-gather", "lmhead, its fallback", route="all_gather"),
)
ROOFS = ("roof-gemm", "roof-all-to-all")
NAMES = (*(way.name for way in OUR_WAYS), *PEERS, *ROOFS)


class _MarkedComm(Comm):
    """A group's collectives that say where the stages of `ops.run_logits` end.

    Which stage a collective belongs to is told by its turn and not by its kind: the first of a head
    call brings the hidden rows, by an all-gather or an all-to-all, the next one the logits.
    """

    mark: Mark = staticmethod(unmarked)  # type: ignore[assignment]
    gathered = True  # whether the hidden rows have come: then a collective is one of logits
    multiplies = False

    def gather(self, out: torch.Tensor, own: torch.Tensor, call: Call) -> None:
        self._moved(lambda: super(_MarkedComm, self).gather(out, own, call))

    def exchange(
        self,
        out: torch.Tensor,
        blocks: torch.Tensor,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
        call: Call,
    ) -> None:
        self._moved(
            lambda: super(_MarkedComm, self).exchange(out, blocks, out_splits, in_splits, call)
        )

    def _moved(self, collective: Callable[[], None]) -> None:
        if not self.gathered:
            collective()
            self.gathered = True
            self.mark(GATHER)
            return
        if self.multiplies:
            self.mark(GEMM)
        collective()
        self.mark(EXCHANGE)


def our_plan(inputs: Inputs, way: Ours, backend: str) -> Plan:
    """What `LMHead` would decide for these inputs."""
    case, wire = inputs.case, inputs.case.torch_dtype
    logits = way.logits or wire
    kernels, configs = ops.choose_kernels(None, inputs.device), DEFAULTS
    rows = case.rows_of(inputs.rank)
    if kernels == "triton":
        sizes = replace(ops.sizes_of(inputs.weight, wire, logits), shard=case.shard)
        configs = ops.shipped_configs(inputs.device).configs(rows, sizes)
    route = choose(case.ranks, backend, way.route)
    return Plan(rows, case.shard, case.vocab, logits, wire, kernels, route, configs=configs)


def _our_method(inputs: Inputs, way: Ours, exchange_only: bool) -> Method:
    case = inputs.case
    # fp32 logits go where published engines put them: into a buffer of the caller's that stays.
    out = None
    if way.logits is not None:
        out = torch.empty(case.rows, case.vocab, dtype=way.logits, device=inputs.device)
    whole: Callable[[], torch.Tensor]
    if exchange_only:
        kept = Workspace()
        whole = lambda: exchange(  # noqa: E731
            inputs.partial,
            vocab_size=case.vocab,
            group=inputs.group,
            logits_dtype=way.logits,
            out=out,
            workspace=kept,
            route=way.route,
        )
    else:
        options: dict[str, Any] = {} if way.logits is None else {"wire_dtype": case.torch_dtype}
        head = LMHead(
            inputs.weight,
            case.vocab,
            inputs.group,
            logits_dtype=way.logits,
            route=way.route,
            **options,
        )
        head.warmup(case.rows, out=out)
        whole = lambda: head(inputs.hidden, out=out)  # noqa: E731
    comm, work = _MarkedComm(inputs.group, inputs.device), Workspace()
    plan = our_plan(inputs, way, comm.backend)

    def staged(mark: Mark) -> torch.Tensor:
        comm.mark, comm.gathered, comm.multiplies = mark, exchange_only, not exchange_only  # type: ignore[method-assign]
        if exchange_only:
            call = Call("exchange", plan.rows.counts, plan.shard, case.dtype, 0)
            logits = ops.run_exchange(comm, plan, work, inputs.partial, out=out, call=call)
        else:
            logits = ops.run_logits(comm, plan, work, inputs.hidden, inputs.weight, None, out=out)
        mark(REASSEMBLY if case.ranks > 1 or exchange_only else GEMM)
        return logits

    own = 0 if exchange_only else case.rows * case.hidden * case.itemsize
    moved = moved_bytes(plan.route.name, plan.rows, case.shard, case.itemsize)
    return Method(way.name, way.title, whole, staged, own * (case.ranks - 1) + moved)


def _peer_method(inputs: Inputs, peer: Peer, exchange_only: bool) -> Method | None:
    head, exchanging = peer.build(inputs)
    staged: Callable[[Mark], torch.Tensor] = head
    if exchange_only:
        if exchanging is None:
            return None
        staged = lambda mark: exchanging(inputs.partial, mark)  # noqa: E731
    moved = peer.bytes(inputs.case, exchange_only, inputs.device)
    return Method(
        peer.name,
        peer.title,
        lambda: staged(unmarked),
        staged,
        moved,
        compiled=peer.name == "f",
    )


def _roof(inputs: Inputs, name: str) -> Method:
    """Into buffers that stay, on rows that are there already."""
    case = inputs.case
    if name == "roof-gemm":
        rows = inputs.hidden.new_empty(case.total, case.hidden)
        all_gather(rows, inputs.hidden, inputs.group)
        product, work = torch.empty_like(inputs.partial), Workspace()
        plan = our_plan(inputs, OUR_WAYS[0], "gloo")

        def multiply() -> torch.Tensor:
            ops.run_gemm(plan, work, rows, inputs.weight, None, product)
            return product

        return _alone(name, "GEMM alone", multiply, GEMM, 0)
    received, sent = (torch.empty_like(inputs.partial).view(-1) for _ in range(2))
    sent.copy_(inputs.partial.view(-1))

    def move() -> torch.Tensor:
        dist.all_to_all_single(received, sent, group=inputs.group)
        return received

    moved = (case.ranks - 1) * case.rows * case.shard * case.itemsize
    return _alone(name, "all-to-all alone", move, EXCHANGE, moved)


def _alone(
    name: str, title: str, part: Callable[[], torch.Tensor], stage: str, moved: int
) -> Method:
    def staged(mark: Mark) -> torch.Tensor:
        result = part()
        mark(stage)
        return result

    return Method(name, title, part, staged, moved, roof=True)


def build(inputs: Inputs, name: str, exchange_only: bool) -> Method | None:
    """The method of that name for these inputs; None where it has no part in this benchmark."""
    if name in PEERS:
        return _peer_method(inputs, PEERS[name], exchange_only)
    if name in ROOFS:
        wanted = inputs.case.ranks > 1 if name == "roof-all-to-all" else not exchange_only
        return _roof(inputs, name) if wanted else None
    way = next(way for way in OUR_WAYS if way.name == name)
    narrow = inputs.case.torch_dtype != torch.float32
    if (way.logits is not None and not narrow) or (way.route and inputs.case.ranks == 1):
        return None
    return _our_method(inputs, way, exchange_only)


def rotating(calls: Sequence[Callable[..., torch.Tensor]]) -> Callable[..., torch.Tensor]:
    """One of `calls` after the other, so that no input is found in a cache."""
    if len(calls) == 1:
        return calls[0]
    turn = itertools.cycle(calls)
    return lambda *arguments: next(turn)(*arguments)


def weight_of(case: Case, rank: int, device: torch.device) -> torch.Tensor:
    """Rank r's shard [S, H]: what every rank can make again, to check with."""
    generator = torch.Generator(device).manual_seed(rank)
    weight = torch.randn(case.shard, case.hidden, generator=generator, device=device)
    return (weight / case.hidden**0.5).to(case.torch_dtype)


def hidden_of(case: Case, rank: int, device: torch.device) -> torch.Tensor:
    """Rank r's rows [B, H]."""
    generator = torch.Generator(device).manual_seed(100_000 + rank)
    return torch.randn(case.rows, case.hidden, generator=generator, device=device).to(
        case.torch_dtype
    )


def addressed(rows: range, columns: range, case: Case, device: torch.device) -> torch.Tensor:
    """Logits that encode where they belong: small integers of row and column, exact in 16 bits."""
    row = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)[:, None]
    column = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=device)[None]
    found = torch.empty(len(rows), len(columns), dtype=case.torch_dtype, device=device)
    for start in range(0, len(rows), 64):  # int32 temporaries of a few rows at a time
        part = slice(start, start + 64)
        found[part] = ((row[part] * 131 + column * 17 + column // 509) % 509 - 254).to(found.dtype)
    return found
