"""A written-down model of a kernel's time, for choosing among configs where there is no GPU.

The GEMM is bound by the slowest of five things, each of them a term in microseconds:

- `hbm`: every byte that must come from or go to memory once, over the memory's rate;
- `l2`: what the busiest SM asks of L2 (weights, and the hidden rows that every program reads
  again), over one SM's share;
- `mma`: the tensor-core work of the busiest SM, with rows padded to the tile and with the M and N
  extents that run below the full rate;
- `flight`: weights that the busiest SM waits for, when what it has in flight (stages of the
  pipeline times programs) is less than the memory's latency asks for (Little's law);
- `fixed`: the launch, and per round of programs the filling of the pipeline and the stores that
  nothing overlaps.

A program's partial sums over a part of H cost their own traffic and one more launch (`splits`).

What is assumed, because nobody publishes it, is below with its reason.  A modelled time is good for
ranking and for seeing which limit binds; it is no measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmhead.devices import Device
from lmhead.kernels.config import (
    WARP,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
)

# Bytes that one SM draws from L2 per clock: A100's whitepaper gives 5120 for 108 SMs, and nothing
# is published for the later ones.
L2_BYTES_PER_CLOCK = 48
# Seconds from a load's issue to its data under load.  Idle latencies measured on H100 and B200 lie
# between 0.5 and 0.9 us.
LATENCY = 0.8e-6
# Seconds from one node of a CUDA graph to the next.
LAUNCH = 1.5e-6
# The least N extent at which a tensor core runs at its full rate: below, reading the M operand
# from shared memory binds (64 x 16 two-byte values at 128 bytes a clock).
FULL_RATE_N = 32
# An SM keeps this much shared memory back for each program, and holds so many programs (CUDA
# programming guide, compute capabilities 9.0 and 10.0).
RESERVED_SHARED = 1024
MAX_RESIDENT = 32
# Warps that Triton adds to a program whose warps have roles, at most.
EXTRA_ROLE_WARPS = 8


@dataclass(frozen=True)
class Estimate:
    """Modelled time in microseconds, and the terms that it is made of."""

    us: float
    terms: dict[str, float]

    @property
    def limit(self) -> str:
        """Which term binds, `fixed` aside."""
        return max((term for term in self.terms if term != "fixed"), key=lambda t: self.terms[t])


@dataclass(frozen=True)
class Usage:
    """What a compiled program takes of an SM: registers per thread, bytes of shared memory, columns
    of tensor memory.  Zeros are what nothing is known of; they make the estimate a lower bound.
    """

    registers: int = 0
    shared_bytes: int = 0
    tensor_memory_columns: int = 0


def programs(config: GemmConfig | ReassembleConfig, shape: GemmShape | ReassembleShape) -> int:
    """How many programs' worth of work a kernel has.  Of cycles, whose number only the permutation
    knows: as if it were one.
    """
    if isinstance(config, GemmConfig):
        tiles = _cdiv(shape.rows, config.rows) * _cdiv(shape.shard, config.block_v)
        return tiles * max(1, config.splits)
    assert isinstance(shape, ReassembleShape)
    bands = _cdiv(shape.shard, config.block_s)
    if config.kind != "copy":
        return bands
    return bands * shape.ranks * _cdiv(shape.rows, config.block_rows)


def weight_bytes(config: GemmConfig, shape: GemmShape) -> int:
    """Bytes of weights that all programs ask for, whole tiles; the shard's own are S*H*itemsize."""
    columns = _cdiv(shape.shard, config.block_v) * config.block_v
    return _cdiv(shape.rows, config.rows) * columns * shape.hidden * shape.itemsize


def gemm(
    device: Device, config: GemmConfig, shape: GemmShape, usage: Usage | None = None
) -> Estimate:
    """The model for a config that has blocks (`bulk` or `pointer`)."""
    usage = usage or Usage()
    stage = (config.rows + config.block_v) * config.block_h * shape.itemsize
    usage = Usage(
        usage.registers,
        max(usage.shared_bytes, stage * config.num_stages),
        usage.tensor_memory_columns,
    )
    count = programs(config, shape)
    rounds = _cdiv(count, device.sms)
    together = min(resident(device, config, usage), rounds)
    steps = _cdiv(_cdiv(shape.hidden, config.block_h), config.splits)
    depth = steps * config.block_h
    split = config.splits > 1
    out_itemsize = 4 if split else shape.out_itemsize

    operands = (shape.shard + shape.rows) * shape.hidden * shape.itemsize
    results = shape.rows * shape.shard * out_itemsize * config.splits
    per_sm = L2_BYTES_PER_CLOCK * device.clock
    tile = (config.rows + config.block_v) * depth * shape.itemsize
    flops = 2.0 * config.block_v * _padded_n(config) * depth
    rate = device.flop_per_clock * device.clock * _m_rate(device, config)
    weights = config.block_v * depth * shape.itemsize
    flight = together * config.num_stages * config.block_v * config.block_h * shape.itemsize
    store = config.rows * config.block_v * out_itemsize / per_sm
    exposed = _cdiv(rounds, together)
    terms = {
        "hbm": (operands + results) / device.hbm,
        "l2": rounds * tile / per_sm,
        "mma": rounds * flops / rate,
        "flight": rounds * weights * LATENCY / flight,
        "fixed": LAUNCH + exposed * (LATENCY + store),
    }
    if split:
        moved = results + shape.rows * shape.shard * shape.out_itemsize
        terms["fixed"] += LAUNCH + 2 * LATENCY + moved / device.hbm
    return _sum(terms)


def reassemble(
    device: Device, config: ReassembleConfig, shape: ReassembleShape, usage: Usage | None = None
) -> Estimate:
    """The model of a copying kernel: bytes over memory's rate, or over what the resident programs
    have in flight."""
    usage = usage or Usage()
    pieces = shape.ranks * shape.rows
    moved = 2.0 * pieces * shape.shard * shape.itemsize
    count = programs(config, shape)
    rows, turns = pieces, 1
    if config.kind == "copy":
        rows = config.block_rows
    elif config.kind == "cycle":  # one chain, block_rows pieces after block_rows pieces
        rows, turns = config.block_rows, _cdiv(pieces, config.block_rows)
    tile = rows * config.block_s * shape.itemsize
    rounds = _cdiv(count, device.sms * resident(device, config, usage))
    per_sm = L2_BYTES_PER_CLOCK * device.clock
    terms = {
        "hbm": moved / device.hbm,
        "l2": _cdiv(count, device.sms) * turns * 2 * tile / per_sm,
        # A load and a store, one behind the other, in every round.
        "flight": rounds * turns * 2 * LATENCY,
        "fixed": LAUNCH,
    }
    return _sum(terms)


def _sum(seconds: dict[str, float]) -> Estimate:
    terms = {term: round(value * 1e6, 2) for term, value in seconds.items()}
    worst = max(value for term, value in terms.items() if term != "fixed")
    return Estimate(round(worst + terms["fixed"], 2), terms)


def resident(device: Device, config: GemmConfig | ReassembleConfig, usage: Usage) -> int:
    """Programs that one SM holds at a time, as far as `usage` says what each takes."""
    warps = config.num_warps
    if isinstance(config, GemmConfig) and config.warp_specialize:
        warps += EXTRA_ROLE_WARPS
    limits = [MAX_RESIDENT, device.threads // (WARP * warps)]
    if usage.shared_bytes:
        limits.append(device.shared_bytes // (usage.shared_bytes + RESERVED_SHARED))
    if usage.registers:
        limits.append(device.registers // (WARP * warps * usage.registers))
    if isinstance(config, GemmConfig) and device.arch.tensor_memory_columns:
        # The accumulators take that much at least: a column holds 128 values.
        least = _cdiv(config.rows * config.block_v, 128)
        columns = max(usage.tensor_memory_columns, least)
        limits.append(device.arch.tensor_memory_columns // columns)
    return max(1, min(limits))


def _padded_n(config: GemmConfig) -> int:
    """Token rows that the tensor cores spend time on."""
    parts = [config.block_t] + ([config.tail_t] if config.tail_t else [])
    return sum(max(part, FULL_RATE_N) for part in parts)


def _m_rate(device: Device, config: GemmConfig) -> float:
    """Blackwell's tensor core takes 128 rows of M at its full rate, 64 at half (CUTLASS's tcgen05
    documentation); Hopper's takes 64 in each of its warp groups of four warps, and needs two of
    them to overlap.
    """
    if device.arch.tensor_memory_columns:
        return 0.5 if config.block_v < 128 else 1.0
    return 1.0


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
