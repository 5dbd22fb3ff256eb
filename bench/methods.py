"""Everything that is timed side by side in one run: our routes, the peers, and the bare GEMM and
all-to-all that nothing of the kind can beat.

Some end in tokens and not in logits: lmhead's draw from candidates, and full logits that go through
torch's sampler afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from lmhead import ops, ranges
from lmhead.bench.cases import Case
from lmhead.bench.peers import (
    DRAW,
    EXCHANGE,
    GATHER,
    GEMM,
    PEERS,
    REASSEMBLY,
    REDUCE,
    SHARE,
    Inputs,
    Peer,
    all_gather,
    unmarked,
)
from lmhead.bench.peers import IN_LAYOUTS as PEERS_IN_LAYOUTS
from lmhead.bench.torch_sampler import Sampler, engine_sample, lean_sample
from lmhead.chooser import DEFAULTS
from lmhead.comm import Call, Comm
from lmhead.head import LMHead
from lmhead.ops import Plan
from lmhead.own_gemm import exchange
from lmhead.route import Facts, Route, choose_by
from lmhead.sampling import Request, Sample
from lmhead.shapes import gathered_bytes, moved_bytes
from lmhead.timing import Mark
from lmhead.workspace import Workspace

OURS = "lmhead"


@dataclass(frozen=True)
class Method:
    """One way from hidden rows (or partial logits) to the own rows' logits, or to their tokens; if
    `grouped`, to those of all the attention group's rows.  `whole` is what a user calls; `staged`
    says when each stage has ended.  A roof is only a part: nobody could use it, and nothing that
    contains it can be faster.
    """

    name: str
    title: str
    whole: Callable[[], torch.Tensor]
    staged: Callable[[Mark], torch.Tensor]
    bytes: int  # that cross this rank's link in a call, by arithmetic
    roof: bool = False
    compiled: bool = False
    # Of one that ends in tokens: the logits of the attention group's rows [G, V] -> what is wrong
    # with the tokens of both calls, "" for nothing.
    check: Callable[[torch.Tensor], str] | None = None
    exchanges_logits: bool = True
    grouped: bool = False


@dataclass(frozen=True)
class Ours:
    """A configuration of ours: the route, the logits' dtype where it is not the wire's, and whether
    each rank of an attention group gets the logits of all its rows.
    """

    name: str
    title: str
    route: str | None = None
    logits: torch.dtype | None = None
    replicate: bool = False


OUR_WAYS = (
    Ours(OURS, "lmhead, all-to-all"),
    Ours("lmhead-fp32", "lmhead, fp32 logits", logits=torch.float32),
    Ours("lmhead-all-gather", "lmhead, its fallback", route="all_gather"),
    Ours("lmhead-replicate", "lmhead, replicated", replicate=True),
)
ROOFS = ("roof-gemm", "roof-all-to-all")
CANDIDATES = "candidates"
# Whose logits go through which of torch's samplers, by the name of the whole.
SAMPLED: dict[str, tuple[str, Sampler]] = {
    "lmhead-torch": (OURS, engine_sample),
    "lmhead-torch-lean": (OURS, lean_sample),
    "a-torch": ("a", engine_sample),
    "a-torch-lean": ("a-lean", lean_sample),
}
DRAWING = {
    CANDIDATES: "lmhead, candidates",
    "lmhead-torch": "lmhead + torch sampling",
    "lmhead-torch-lean": "lmhead + lean sampling",
    "a-torch": "a + torch sampling",
    "a-torch-lean": "a-lean + lean sampling",
}
NAMES = (*(way.name for way in OUR_WAYS), *PEERS, *DRAWING, *ROOFS)
# Those that know attention groups of several ranks, and those that are about nothing else.
IN_LAYOUTS = (*(way.name for way in OUR_WAYS), *PEERS_IN_LAYOUTS, CANDIDATES, *ROOFS)
LAYOUTS_ONLY = tuple(way.name for way in OUR_WAYS if way.replicate)


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
        kept = rows.group_total if way.replicate else rows.own
        configs = ops.shipped_configs(inputs.device).configs(rows, sizes, kept)
    route = _route(case, backend, way)
    sizes_ = rows, case.shard, case.vocab
    return Plan(*sizes_, logits, wire, kernels, route, configs=configs, replicate=way.replicate)


def _route(case: Case, backend: str, way: Ours) -> Route:
    facts = Facts(case.ranks, backend, way.route, case.layout, replicate=way.replicate)
    return choose_by(facts)


def _our_method(inputs: Inputs, way: Ours, exchange_only: bool) -> Method:
    case = inputs.case
    rows = case.rows_of(inputs.rank)
    # fp32 logits go where published engines put them: into a buffer of the caller's that stays.
    out = None
    if way.logits is not None:
        out = torch.empty(rows.own, case.vocab, dtype=way.logits, device=inputs.device)
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
            layout=case.layout,
            **options,
        )
        head.warmup(rows.brought, out=out, replicate=way.replicate)
        whole = lambda: head(inputs.hidden, out=out, replicate=way.replicate)  # noqa: E731
    comm, work = _MarkedComm(inputs.group, inputs.device), Workspace()
    plan = our_plan(inputs, way, comm.backend)

    def staged(mark: Mark) -> torch.Tensor:
        comm.mark, comm.multiplies = mark, not exchange_only  # type: ignore[method-assign]
        comm.gathered = exchange_only or inputs.all_held
        if exchange_only:
            call = Call("exchange", plan.rows.counts, plan.shard, case.dtype, 0)
            logits = ops.run_exchange(comm, plan, work, inputs.partial, out=out, call=call)
        else:
            logits = ops.run_logits(comm, plan, work, inputs.hidden, inputs.weight, None, out=out)
        mark(REASSEMBLY if case.ranks > 1 or exchange_only else GEMM)
        return logits

    moved = moved_bytes(plan.route.name, rows, case.shard, case.itemsize, way.replicate)
    if not exchange_only:
        moved += gathered_bytes(rows, case.hidden, case.itemsize)
    return Method(way.name, way.title, whole, staged, moved, grouped=way.replicate)


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
        grouped=not inputs.case.layout.plain,
    )


def _roof(inputs: Inputs, name: str) -> Method:
    """Into buffers that stay, on rows that are there already."""
    case = inputs.case
    if name == "roof-gemm":
        rows = inputs.hidden.new_empty(case.total, case.hidden)
        all_gather(rows, inputs.hidden[inputs.mine], inputs.group)
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


# Of a row's token, int64, and its status, uint8.
SHARED_BYTES = 8 + 1

# Names of `lmhead.ranges` -> those of the report.
_RANGES = {
    "gather": GATHER,
    "gemm": GEMM,
    "reduce": REDUCE,
    "exchange": EXCHANGE,
    "reassemble": REASSEMBLY,
    "merge": DRAW,
    "share": SHARE,
}


def _candidates(inputs: Inputs, parameters: Mapping[str, Any]) -> Method:
    """`LMHead.sample`, and its stages as it names them itself; every rank of an attention group
    ends with the tokens of all its rows.
    """
    case, grouped = inputs.case, inputs.grouped
    head = LMHead(inputs.weight, case.vocab, inputs.group, layout=case.layout)
    rows = torch.arange(grouped.start, grouped.stop, device=inputs.device)
    noise: dict[str, Any] = {"seeds": rows, "positions": torch.zeros_like(rows)}
    head.warmup(inputs.hidden.shape[0], sample={**noise, **parameters})

    def whole(**changed: Any) -> torch.Tensor:
        given = {**noise, **parameters, **changed}
        return cast(torch.Tensor, head.sample(inputs.hidden, share=True, **given))

    def staged(mark: Mark) -> torch.Tensor:
        with ranges.told(lambda name: mark(_RANGES[name])):
            return whole()

    def check(own: torch.Tensor) -> str:
        # All calls first: a rank that finds something wrong makes as many as the others.
        full, greedy = whole(route=head_route), whole(temperature=0.0)
        both = whole(), staged(unmarked)
        for got in both:
            wrong = (got != full).nonzero()
            if wrong.numel():
                row = int(wrong[0])
                return f"row {row} draws {got[row]}, and {full[row]} from full logits"
        return not_greedy(own, greedy)

    route = _route(case, dist.get_backend(inputs.group), OUR_WAYS[0]).name
    head_route = None if route == "local" else route
    found = head.sample(inputs.hidden, details=True, **noise, **parameters)
    assert isinstance(found, Sample) and found.route is not None
    moved = _candidate_bytes(inputs, parameters)
    if found.route.rule == "not_covered":
        moved += moved_bytes(route, case.rows_of(inputs.rank), case.shard, case.itemsize)
    return Method(
        CANDIDATES,
        DRAWING[CANDIDATES],
        whole,
        staged,
        moved,
        check=check,
        exchanges_logits=False,
        grouped=True,
    )


def _candidate_bytes(inputs: Inputs, parameters: Mapping[str, Any]) -> int:
    """Hidden rows with their records behind them, on a border of 16 bytes; a message per row and
    shard; how many rows were missed, where some may be; and to the other ranks of the attention
    group, a row's token and status.
    """
    case, rows = inputs.case, inputs.case.rows_of(inputs.rank)
    form = Request(**parameters).form(case.vocab, case.shard)
    row = -(-case.hidden * case.itemsize // 16) * 16 + 4 * form.record_words
    moved = gathered_bytes(rows, row, 1) + moved_bytes("all_to_all", rows, form.message_words, 4)
    if form.may_miss and form.fallback:
        moved += 4 * (case.ranks - 1)
    shared = max((rows.span - 1) * rows.own, rows.group_total - rows.own)
    return moved + shared * SHARED_BYTES


def _sampled(inputs: Inputs, name: str, parameters: Mapping[str, Any]) -> Method | None:
    """Full logits of the own rows by another method, then torch's sampler."""
    assert inputs.case.layout.plain
    source, sampler = SAMPLED[name]
    logits = build(inputs, source, exchange_only=False)
    if logits is None:
        return None

    def staged(mark: Mark, **changed: Any) -> torch.Tensor:
        own = logits.staged(mark)
        ids = sampler(own, **{**parameters, **changed})
        mark(DRAW)
        return ids

    def check(own: torch.Tensor) -> str:
        both = sampler(logits.whole(), temperature=0.0), staged(unmarked, temperature=0.0)
        return not_greedy(own, both[0]) or not_greedy(own, both[1])

    return replace(
        logits,
        name=name,
        title=DRAWING[name],
        whole=lambda: sampler(logits.whole(), **parameters),
        staged=staged,
        check=check,
    )


def not_greedy(own: torch.Tensor, ids: torch.Tensor) -> str:
    """Which of ids [B] is not that of the largest of own [B, V], within the rounding of a logit in
    bf16; "" where none is.
    """
    best = own.amax(1).float()
    near = best - best.abs() * 2 * torch.finfo(torch.bfloat16).eps
    taken = own.gather(1, ids[:, None]).squeeze(1).float()
    wrong = (~(taken >= near)).nonzero()
    if wrong.numel() == 0:
        return ""
    row = int(wrong[0])
    return f"row {row} takes {ids[row]} greedily, and {own[row].argmax()} is the largest"


def build(
    inputs: Inputs,
    name: str,
    exchange_only: bool,
    parameters: Mapping[str, Any] | None = None,
) -> Method | None:
    """The method of that name for these inputs; None where it has no part in this benchmark.
    `parameters` of a draw are those of `LMHead.sample`.
    """
    if name in LAYOUTS_ONLY if inputs.case.layout.plain else name not in IN_LAYOUTS:
        return None
    if name in DRAWING:
        if exchange_only:
            return None
        given = parameters or {}
        return _candidates(inputs, given) if name == CANDIDATES else _sampled(inputs, name, given)
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
    """Rank r's rows [B, H], those that it owns: the same in every layout."""
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
