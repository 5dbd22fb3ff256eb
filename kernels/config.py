"""Launch configurations of the kernels, and the ONE predicate that says whether one fits.

A config is frozen and says everything that is fixed when a kernel is compiled.  `default_gemm` and
`default_reassemble` work for every shape, untuned; they are pure functions of shape and dtype, so
every rank picks the same.  The predicate `fits` serves defaults, tests and (later) the tuner alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Bytes of one vectorised global access, and the width a band must have to use it.
VECTOR_BYTES = 16
# Triton refuses a tile of more elements (triton.language.core.TRITON_MAX_TENSOR_NUMEL).
MAX_TILE_NUMEL = 1 << 20
# A band of row pieces held in registers: 64 KiB over 512 threads is 32 registers a thread for data,
# which leaves room for addresses under the 128 that 16 warps may use (58 in all, compiled for
# sm_100 with Triton 3.8).
MAX_BAND_BYTES = 64 * 1024
MAX_WARPS = 16
# Bytes of tile that one thread of a copying kernel holds.
BYTES_PER_THREAD = 128
# Programs that a copying kernel aims for: two on each of B200's 148 SMs.
TARGET_PROGRAMS = 296


@dataclass(frozen=True)
class Arch:
    """What a kernel may use on an architecture (CUDA programming guide, table of compute
    capabilities).
    """

    name: str
    capability: int
    shared_bytes: int  # per program
    tensor_memory_columns: int  # 0: accumulators live in registers


ARCHS = {
    "sm_90": Arch("sm_90", 90, 232448, 0),
    "sm_100": Arch("sm_100", 100, 232448, 512),
}


@dataclass(frozen=True)
class GemmConfig:
    """One GEMM program computes BLOCK_V vocabulary columns for BLOCK_T rows, walking H in steps of
    BLOCK_H.
    """

    block_t: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ReassembleConfig:
    """A copying program.

    `band`: all N*B row pieces (block_rows >= N*B) times block_s columns pass through registers at
    once.
    `cycle`: one cycle of the permutation, block_rows pieces at a time, times block_s columns.
    `copy`: the out-of-place form, block_rows rows times block_s columns of one source rank.
    """

    kind: Literal["band", "cycle", "copy"]
    block_rows: int
    block_s: int
    num_warps: int


@dataclass(frozen=True)
class GemmShape:
    """T gathered rows, S shard rows, H hidden; itemsize in bytes of the operands."""

    rows: int
    shard: int
    hidden: int
    itemsize: int


@dataclass(frozen=True)
class ReassembleShape:
    """N ranks, B rows per rank, S shard rows; itemsize in bytes of an element as it is moved."""

    ranks: int
    rows: int
    shard: int
    itemsize: int


def next_power_of_2(n: int) -> int:
    """The least power of two >= n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def _power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def fits(
    config: GemmConfig | ReassembleConfig, arch: Arch, shape: GemmShape | ReassembleShape
) -> bool:
    """Whether `config` is legal for `shape` on `arch`: the only place where that is decided."""
    if not (_power_of_2(config.num_warps) and config.num_warps <= MAX_WARPS):
        return False
    if isinstance(config, GemmConfig) and isinstance(shape, GemmShape):
        return _gemm_fits(config, arch, shape)
    if isinstance(config, ReassembleConfig) and isinstance(shape, ReassembleShape):
        return _reassemble_fits(config, shape)
    raise TypeError(f"{type(config).__name__} cannot be asked about a {type(shape).__name__}")


def _gemm_fits(config: GemmConfig, arch: Arch, shape: GemmShape) -> bool:
    blocks = (config.block_t, config.block_v, config.block_h)
    # 16 is the least extent of a dot operand that every supported architecture takes.
    if not all(_power_of_2(block) and block >= 16 for block in blocks) or config.num_stages < 1:
        return False
    if config.block_t * config.block_v > MAX_TILE_NUMEL:
        return False
    stage = (config.block_t + config.block_v) * config.block_h * shape.itemsize
    if stage * config.num_stages > arch.shared_bytes:
        return False
    return not arch.tensor_memory_columns or config.block_t <= arch.tensor_memory_columns


def _reassemble_fits(config: ReassembleConfig, shape: ReassembleShape) -> bool:
    if not (_power_of_2(config.block_rows) and _power_of_2(config.block_s)):
        return False
    if config.block_rows * config.block_s > MAX_TILE_NUMEL:
        return False
    if config.block_rows * config.block_s * shape.itemsize > MAX_BAND_BYTES:
        return False
    return config.kind != "band" or config.block_rows >= shape.ranks * shape.rows


def default_gemm(shape: GemmShape) -> GemmConfig:
    """The untuned choice: right everywhere, within the limits of every arch in `ARCHS`."""
    if (
        shape.itemsize >= 4
    ):  # no tensor core keeps full fp32, so these run on the plain units, in small tiles
        block_t = min(32, max(16, next_power_of_2(shape.rows)))
        return GemmConfig(block_t, block_v=64, block_h=32, num_warps=4, num_stages=2)
    block_t = min(128, max(16, next_power_of_2(shape.rows)))
    return GemmConfig(
        block_t, block_v=128, block_h=64, num_warps=8 if block_t > 32 else 4, num_stages=3
    )


def default_reassemble(shape: ReassembleShape, in_place: bool) -> ReassembleConfig:
    """The untuned choice for moving [N, B, S]: as wide as one 16-byte access at least, narrower
    bands while that gives more programs, and cycles where a band of all N*B row pieces does not fit
    in registers.
    """
    vector = max(1, VECTOR_BYTES // shape.itemsize)
    pieces = next_power_of_2(shape.ranks * shape.rows)
    if not in_place:
        return _copy_config(shape, vector)
    if pieces * vector * shape.itemsize > MAX_BAND_BYTES:
        # 16 pieces in flight of 32 lanes times 16 bytes.
        return ReassembleConfig("cycle", block_rows=16, block_s=32 * vector, num_warps=4)
    # Narrower than 32 lanes of 16 bytes in all would leave lanes with less than a full access.
    block_s = max(vector, 32 * vector // pieces)
    while (
        pieces * block_s * 2 * shape.itemsize <= MAX_BAND_BYTES // 2
        and block_s * 2 * TARGET_PROGRAMS <= shape.shard
    ):
        block_s *= 2
    return ReassembleConfig("band", pieces, block_s, _warps(pieces * block_s * shape.itemsize))


def _copy_config(shape: ReassembleShape, vector: int) -> ReassembleConfig:
    block_rows = min(8, next_power_of_2(shape.rows))
    block_s = 32 * vector
    while block_s > vector and block_s // 2 >= shape.shard:
        block_s //= 2
    return ReassembleConfig(
        "copy", block_rows, block_s, _warps(block_rows * block_s * shape.itemsize)
    )


def _warps(tile_bytes: int) -> int:
    return max(1, min(MAX_WARPS, next_power_of_2(tile_bytes // (32 * BYTES_PER_THREAD))))
