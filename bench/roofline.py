"""What a head's step must move and compute, stage by stage, and the least time that takes.

Floors are bytes over a bandwidth or FLOPs over a rate, whichever is more; nothing reaches them.
The rates are the vendor's (`lmhead.devices`), or those of this machine as measured at the start of
a benchmark (`lmhead.bench.rates`).  On the wire a rank sends and receives (N-1)/N of a collective's
bytes, in one direction each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lmhead import tables
from lmhead.devices import DEVICES, Device
from lmhead.kernels.config import GemmShape
from lmhead.shapes import Layout, Rows, moved_bytes, shard_rows


@dataclass(frozen=True)
class Limits:
    """What a rank can do at best, per second: bytes through memory (read plus written), FLOPs, and
    bytes received over the wire, with the words for the last two.
    """

    name: str
    memory: float
    math: float
    wire: float
    source: str
    math_name: str = "tensor cores"
    wire_name: str = "NVLink"


def limits_of(device: Device) -> Limits:
    """A GPU's rates as its vendor gives them."""
    return Limits(device.name, device.hbm, device.bf16, device.nvlink, "the vendor's figures")


@dataclass(frozen=True)
class Stage:
    """One stage of a rank's step.  Bytes through device memory, bytes received over NVLink, FLOPs,
    and the floor in microseconds with the limit that sets it.
    """

    name: str
    memory_bytes: int
    wire_bytes: int
    flops: int
    floor_us: float
    limit: str


@dataclass(frozen=True)
class Step:
    """A head's step: N ranks, B rows per rank, H, S, V, and the item sizes of operands, of what is
    exchanged and of the logits; whether logits are capped.
    """

    vocab: int
    hidden: int
    ranks: int
    rows: int
    itemsize: int = 2
    wire_itemsize: int = 2
    logits_itemsize: int = 2
    softcap: bool = False
    layout: Layout | None = None  # how T rows are held; None: every rank holds its own B

    @property
    def shard(self) -> int:
        return shard_rows(self.vocab, self.ranks)

    @property
    def total(self) -> int:
        """T = N * B."""
        return self.ranks * self.rows

    @property
    def in_place(self) -> bool:
        """Whether the received elements are the logits as they stand, but for their order."""
        return self.vocab == self.ranks * self.shard and self.wire_itemsize == self.logits_itemsize


def stages(device: Device | Limits, step: Step) -> list[Stage]:
    """The stages of the all-to-all route in order, every rank owning `step.rows` rows; what one
    rank alone does not need is left out.
    """
    layout = Layout.data_parallel(step.ranks) if step.layout is None else step.layout
    held = [step.total // layout.sets] * layout.sets
    return owned_stages(device, step, layout.rows(held, 0))


def owned_stages(
    device: Device | Limits, step: Step, rows: Rows, *, route: str = "all_to_all"
) -> list[Stage]:
    """One rank's stages where ranks hold and own rows as `rows` says; `step` gives V, H, N and the
    item sizes, its row count does not enter.  `route` is "all_to_all" or "all_gather".

    Hidden rows that the rank holds already are not gathered, and rows that it does not own do not
    come back to it.
    """
    limits = device if isinstance(device, Limits) else limits_of(device)
    assert route in ("all_to_all", "all_gather") and rows.ranks == step.ranks
    total, own = rows.total, rows.own
    if not total:
        return []
    row, shard = step.hidden * step.itemsize, step.shard * step.wire_itemsize
    weights = step.shard * step.hidden * step.itemsize
    found = [
        _stage(
            limits,
            "gemm",
            memory=weights + total * (row + shard),
            flops=2 * total * step.shard * step.hidden,
        )
    ]
    if step.ranks == 1:
        return found
    brought = total - rows.brought
    if brought:
        memory = (rows.brought + total) * row
        found.insert(0, _stage(limits, "hidden gather", memory=memory, wire=brought * row))
    wire = moved_bytes(route, rows, step.shard, step.wire_itemsize)
    if route == "all_gather":
        memory = (1 + rows.ranks) * total * shard
        return [*found, _stage(limits, "exchange", memory=memory, wire=wire)]
    blocks = rows.ranks * own * shard
    found.append(_stage(limits, "exchange", memory=total * shard + blocks, wire=wire))
    if own > 1 or (own and not step.in_place):
        logits = own * step.vocab * step.logits_itemsize
        found.append(_stage(limits, "reassembly", memory=blocks + logits))
    return found


def slowest(ranks: Iterable[Sequence[Stage]]) -> list[Stage]:
    """Of several ranks' stages the one with the highest floor by name, in order: what all wait
    for.
    """
    found: dict[str, Stage] = {}
    order = ("hidden gather", "gemm", "exchange", "reassembly")
    for stage in chain.from_iterable(ranks):
        known = found.get(stage.name)
        if known is None or stage.floor_us > known.floor_us:
            found[stage.name] = stage
    return [found[name] for name in order if name in found]


def group_head_rows(layout: Layout, row_counts: Sequence[int], rank: int) -> Rows:
    """This rank's rows of a head that the `layout.attn_tp_size` ranks with the same rows share
    alone; `row_counts` has a count per set of such ranks.
    """
    few = layout.attn_tp_size
    return Layout.tensor_parallel(few).rows([row_counts[rank // few]], rank % few)


def dp_head(device: Device | Limits, step: Step) -> Stage:
    """A head that every rank holds whole: nothing is exchanged, all weights are read."""
    limits = device if isinstance(device, Limits) else limits_of(device)
    weights = step.vocab * step.hidden * step.itemsize
    own = step.rows * step.hidden * step.itemsize
    logits = step.rows * step.vocab * step.logits_itemsize
    flops = 2 * step.rows * step.vocab * step.hidden
    return _stage(limits, "gemm", memory=weights + own + logits, flops=flops)


def all_gather_exchange(device: Device | Limits, step: Step) -> Stage:
    """The exchange where every rank is sent every logit, and the copy that keeps its own rows."""
    limits = device if isinstance(device, Limits) else limits_of(device)
    block = step.total * step.shard * step.wire_itemsize
    memory, wire = (1 + step.ranks) * block, (step.ranks - 1) * block
    return _stage(limits, "exchange", memory=memory, wire=wire)


def floor_us(device: Device | Limits, step: Step) -> float:
    """The all-to-all route's stages, one after the other."""
    return sum(stage.floor_us for stage in stages(device, step))


MOST_ROWS = 8192


def break_even(device: Device | Limits, step: Step, *, overlapped: bool = False) -> int | None:
    """The least B at which the sharded head's floor is no longer under that of a head which every
    rank holds whole; None where that takes more than `MOST_ROWS`.

    In series each stage waits for the one before.  `overlapped` is the limit of what can be hidden:
    the GEMM or all else, whichever takes longer.
    """

    def sharded(at: Step) -> float:
        found = stages(device, at)
        gemm = sum(stage.floor_us for stage in found if stage.name == "gemm")
        rest = sum(stage.floor_us for stage in found) - gemm
        return max(gemm, rest) if overlapped else gemm + rest

    def pays(rows: int) -> bool:
        at = replace(step, rows=rows)
        return sharded(at) < dp_head(device, at).floor_us

    return next((rows for rows in range(1, MOST_ROWS + 1) if not pays(rows)), None)


def layout_break_even(device: Device | Limits, step: Step, layout: Layout) -> int | None:
    """The least rows per set of ranks with the same ones at which the floor of a head over all
    ranks is no longer under that of a head per such set, in series; None where that takes more than
    `MOST_ROWS`, or where one set is all ranks.
    """
    few = layout.attn_tp_size
    if few == layout.ranks:
        return None
    whole, small = replace(step, ranks=layout.ranks), replace(step, ranks=few)

    def floor(at: Step, rows: Rows) -> float:
        return sum(stage.floor_us for stage in owned_stages(device, at, rows))

    def pays(rows: int) -> bool:
        # Rank 0 owns as many rows as any, so no rank's floor is above its own.
        counts = [rows] * layout.sets
        alone = floor(small, group_head_rows(layout, counts, 0))
        return floor(whole, layout.rows(counts, 0)) < alone

    return next((rows for rows in range(1, MOST_ROWS + 1) if not pays(rows)), None)


# What others have published of the workload, in microseconds, and how it is modelled here.

PUBLISHED_SOURCE = "SGLang pull request 32313: DeepSeek-V4-Pro, 8 B200, 36 rows per rank"
PUBLISHED_STEP = Step(129280, 7168, 8, 36)


@dataclass(frozen=True)
class Published:
    """A figure of others beside ours for the same thing: the floor on B200, and where there is a
    model of the kernel, its modelled time.  None of them was measured here.
    """

    what: str
    published_us: float
    floor_us: float
    modelled_us: float | None = None


def published() -> list[Published]:
    device, step = DEVICES["b200"], PUBLISHED_STEP
    floor = {stage.name: stage.floor_us for stage in stages(device, step)}
    gathered = all_gather_exchange(device, step).floor_us
    shape = GemmShape(step.total, step.shard, step.hidden, step.itemsize, step.wire_itemsize)
    shipped = tables.load_shipped("b200")
    gemm = tables.look_up(None, shipped, tables.gemm_key(shape), device.arch, shape).us
    moved = floor["hidden gather"] + gathered
    return [
        Published("head held whole by every rank (DP)", 320.0, dp_head(device, step).floor_us),
        Published("sharded head, all-gather + scatter", 320.0, floor["gemm"] + moved),
        Published("  of it communication", 151.0, moved),
        Published("sharded head, all-to-all", 169.0, floor_us(device, step)),
        Published("  of it GEMM", 71.0, floor["gemm"], gemm),
        Published("  of it all-to-all", 46.0, floor["exchange"]),
    ]


def _stage(limits: Limits, name: str, *, memory: int, wire: int = 0, flops: int = 0) -> Stage:
    floors = {
        "memory": memory / limits.memory,
        limits.wire_name: wire / limits.wire,
        limits.math_name: flops / limits.math,
    }
    limit = max(floors, key=lambda name: floors[name])
    return Stage(name, memory, wire, flops, round(floors[limit] * 1e6, 2), limit)
