"""Launch configurations of the kernels, and the ONE predicate that says whether one fits.

A config is frozen and says everything that is fixed when a kernel is compiled.  `default_gemm` and
`default_reassemble` work for every shape, untuned; they are pure functions of shape and dtype, so
every rank picks the same.  The predicate `fits` serves defaults, tests and (later) the tuner alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

# Bytes of one vectorised global access, and the width a band must have to use it.
VECTOR_BYTES = 16
# Triton refuses a tile of more elements (triton.language.core.TRITON_MAX_TENSOR_NUMEL).
MAX_TILE_NUMEL = 1 << 20
MAX_WARPS = 16
WARP = 32
# What one thread of a copying kernel may hold of its tile, under the 128 registers that 16 warps
# leave it.  Rows that start on 16-byte borders: bytes (96 registers in all, compiled for sm_90 and
# sm_100 with Triton 3.8).  Other rows: elements, since each then has addresses of its own (120
# registers; 32 elements would spill).
BYTES_PER_THREAD = 128
SCALARS_PER_THREAD = 16
# Shared memory that the barriers of a pipeline take beside the tiles (412 bytes warp-specialized,
# Triton 3.8).
BARRIER_BYTES = 1024
# fp32 accumulators a thread can hold where they live in registers: 144 compile to 170 registers for
# sm_90, 256 spill (Triton 3.8).
MAX_ACCUMULATORS = 160
# The innermost extent of one swizzled shared-memory row, and the most rows of one bulk load.
SWIZZLE_BYTES = 128
MAX_BULK_EXTENT = 256
# Programs that a copying kernel aims for: two on each of B200's 148 SMs.
TARGET_PROGRAMS = 296
# Token rows of a program whose tiles do not depend on the batch: wide enough that a prefill is not
# read from L2 too often, in one accumulator on every arch.
FIXED_ROWS = 128


@dataclass(frozen=True)
class Arch:
    """What a kernel may use on an architecture (CUDA programming guide, table of compute
    capabilities).
    """

    name: str
    capability: int
    shared_bytes: int  # per program
    tensor_memory_columns: int  # 0: accumulators live in registers
    bulk: bool = True  # bulk tensor loads feed its tensor cores as they do Hopper's


ARCHS = {
    "sm_90": Arch("sm_90", 90, 232448, 0),
    "sm_100": Arch("sm_100", 100, 232448, 512),
}
# Any other CUDA device from Ampere on, with the shared memory that all of them give a program.
OTHER = Arch("other", 80, 101376, 0, bulk=False)


@dataclass(frozen=True)
class GemmConfig:
    """How the GEMM runs.

    `bulk`: a program loads tiles by bulk tensor loads (TMA) and computes block_v vocabulary columns
    for block_t + tail_t rows, in one accumulator or two; `splits` programs share H between them.
    `pointer`: the same by ordinary loads, for operands that TMA cannot address; one accumulator.
    `library`: `torch.mm`, cuBLAS on CUDA, into the same buffer; the block sizes mean nothing.
    """

    block_t: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int
    kind: Literal["bulk", "pointer", "library"] = "pointer"
    tail_t: int = 0
    splits: int = 1
    warp_specialize: bool = False

    @property
    def rows(self) -> int:
        """Token rows of one program."""
        return self.block_t + self.tail_t

    def __str__(self) -> str:
        if self.kind == "library":
            return "library"
        rows = f"{self.block_t}+{self.tail_t}" if self.tail_t else f"{self.block_t}"
        text = f"{self.kind} t{rows} v{self.block_v} h{self.block_h} warps{self.num_warps}"
        text += f" stages{self.num_stages}"
        text += f" splits{self.splits}" if self.splits > 1 else ""
        return text + (" roles" if self.warp_specialize else "")


LIBRARY = GemmConfig(0, 0, 0, 0, 0, kind="library")


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

    def __str__(self) -> str:
        return f"{self.kind} rows{self.block_rows} s{self.block_s} warps{self.num_warps}"


def to_dict(config: GemmConfig | ReassembleConfig) -> dict[str, Any]:
    """A config as JSON takes it; what has its default is left out."""
    defaults = {field.name: field.default for field in fields(config)}
    return {name: value for name, value in asdict(config).items() if value != defaults[name]}


def from_dict(
    kind: type[GemmConfig] | type[ReassembleConfig], values: Mapping[str, Any]
) -> GemmConfig | ReassembleConfig:
    """The inverse of `to_dict`.  ValueError for an unknown, a missing or an ill-typed field: the
    values come from a file.
    """
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(values) - set(known))
    missing = sorted(
        name for name, field in known.items() if field.default is MISSING and name not in values
    )
    if unknown or missing:
        raise ValueError(f"{kind.__name__}: unknown fields {unknown}, missing fields {missing}")
    for name, value in values.items():
        want = {"kind": str, "warp_specialize": bool}.get(name, int)
        if type(value) is not want:
            raise ValueError(f"{kind.__name__}: {name} must be {want.__name__}, got {value!r}")
    words = {
        GemmConfig: ("pointer", "bulk", "library"),
        ReassembleConfig: ("band", "cycle", "copy"),
    }
    config = kind(**values)
    if config.kind not in words[kind]:
        raise ValueError(f"{kind.__name__}: kind must be one of {words[kind]}, got {config.kind!r}")
    return config


@dataclass(frozen=True)
class GemmShape:
    """T gathered rows, S shard rows, H hidden; itemsize in bytes of the operands and of the
    result.
    """

    rows: int
    shard: int
    hidden: int
    itemsize: int
    out_itemsize: int = 2


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
    if isinstance(config, GemmConfig) and config.kind == "library":
        return isinstance(shape, GemmShape)
    if not (_power_of_2(config.num_warps) and config.num_warps <= MAX_WARPS):
        return False
    if isinstance(config, GemmConfig) and isinstance(shape, GemmShape):
        return _gemm_fits(config, arch, shape)
    if isinstance(config, ReassembleConfig) and isinstance(shape, ReassembleShape):
        return _reassemble_fits(config, shape)
    raise TypeError(f"{type(config).__name__} cannot be asked about a {type(shape).__name__}")


def _gemm_fits(config: GemmConfig, arch: Arch, shape: GemmShape) -> bool:
    blocks = [config.block_t, config.block_v, config.block_h]
    blocks += [config.tail_t] if config.tail_t else []
    # 16 is the least extent of a dot operand that every supported architecture takes.
    if not all(_power_of_2(block) and block >= 16 for block in blocks) or config.num_stages < 1:
        return False
    if config.rows * config.block_v > MAX_TILE_NUMEL:
        return False
    stage = (config.rows + config.block_v) * config.block_h * shape.itemsize
    if stage * config.num_stages + BARRIER_BYTES > arch.shared_bytes:
        return False
    if arch.tensor_memory_columns:
        # An accumulator takes a column per token row and 128 vocabulary columns.
        columns = config.rows * max(1, config.block_v // 128)
        if next_power_of_2(columns) > arch.tensor_memory_columns:
            return False
    elif config.rows * config.block_v > MAX_ACCUMULATORS * WARP * config.num_warps:
        return False
    if config.kind == "pointer":
        return config.tail_t == 0 and config.splits == 1 and not config.warp_specialize
    return _bulk_fits(config, arch, shape)


def _bulk_fits(config: GemmConfig, arch: Arch, shape: GemmShape) -> bool:
    if not (arch.bulk and bulk_loadable(shape)):
        return False
    if config.block_h * shape.itemsize > 2 * SWIZZLE_BYTES:
        return False
    if config.tail_t > config.block_t or max(config.block_t, config.block_v) > MAX_BULK_EXTENT:
        return False
    # With 16 warps Triton 3.8 leaves the tensor cores that write tensor memory unused.
    if arch.tensor_memory_columns and config.num_warps > 8:
        return False
    steps = -(-shape.hidden // config.block_h)
    if not (_power_of_2(config.splits) and config.splits <= max(1, steps // config.num_stages)):
        return False
    # Triton 3.8 splits warps by role where accumulators live in tensor memory; 4 warps spill.
    return not config.warp_specialize or (arch.tensor_memory_columns > 0 and config.num_warps == 8)


def bulk_loadable(shape: GemmShape) -> bool:
    """Whether TMA can address rows of H elements: two-byte floats on 16-byte borders."""
    return shape.itemsize == 2 and shape.hidden * shape.itemsize % VECTOR_BYTES == 0


def _reassemble_fits(config: ReassembleConfig, shape: ReassembleShape) -> bool:
    if not (_power_of_2(config.block_rows) and _power_of_2(config.block_s)):
        return False
    # Which is far below MAX_TILE_NUMEL.
    if config.block_rows * config.block_s > WARP * config.num_warps * _thread_elements(shape):
        return False
    return config.kind != "band" or config.block_rows >= shape.ranks * shape.rows


def _thread_elements(shape: ReassembleShape) -> int:
    """How many elements of a copying program's tile one thread may hold."""
    if shape.shard * shape.itemsize % VECTOR_BYTES:
        return SCALARS_PER_THREAD
    return BYTES_PER_THREAD // shape.itemsize


def default_gemm(shape: GemmShape, arch: Arch = ARCHS["sm_90"]) -> GemmConfig:
    """The untuned choice: right everywhere, and without a spill on every arch in `ARCHS`; elsewhere
    by ordinary loads.

    Up to 512 rows a program holds all token rows, so that every weight byte is read once; above, a
    weight tile is read again, from L2, by the programs next in order.
    """
    if shape.itemsize >= 4:  # no tensor core keeps full fp32
        return LIBRARY
    if not (arch.bulk and bulk_loadable(shape)):
        return default_pointer_gemm(shape)
    block_t = min(256, max(16, next_power_of_2(shape.rows)))
    tail_t = 0
    if 256 < shape.rows <= 512:
        tail_t = max(16, next_power_of_2(shape.rows - 256))
    block_v = 128
    if not arch.tensor_memory_columns and tail_t > 32:
        block_v = 64  # as many accumulators as the registers hold
    stage = (block_t + tail_t + block_v) * 64 * shape.itemsize
    stages = min(6, (arch.shared_bytes - BARRIER_BYTES) // stage)
    return GemmConfig(
        block_t, block_v, 64, num_warps=8, num_stages=stages, kind="bulk", tail_t=tail_t
    )


def default_pointer_gemm(shape: GemmShape) -> GemmConfig:
    """The untuned choice where bulk loads cannot be used, or rows of the result start anywhere."""
    # Triton uses wide accesses only along extents that are multiples of 16; single elements need
    # more registers for addresses, hence smaller tiles or more threads.
    wide_loads, wide_stores = shape.hidden % 16 == 0, shape.shard % 16 == 0
    least = max(16, next_power_of_2(shape.rows))
    if shape.itemsize >= 4:  # on the plain units, in small tiles
        return GemmConfig(min(32, least), block_v=64, block_h=32, num_warps=4, num_stages=3)
    block_t = min(128 if wide_loads and wide_stores else 64, least)
    num_warps = 4 if wide_loads and block_t <= 64 else 8
    return GemmConfig(block_t, block_v=128, block_h=64, num_warps=num_warps, num_stages=3)


def deterministic_gemm(shape: GemmShape, *, bulk: bool = True) -> GemmConfig:
    """The one choice of a batch-invariant head: no splits, and tiles that are the same whatever the
    batch, the shard and the architecture, so that every logit is summed up in one order.

    Depends on the operands' itemsize and on H alone, and on `bulk`: false where bulk loads cannot
    read the weight as it lies.  fp32 operands run by pointer, since cuBLAS picks an algorithm by
    shape.
    """
    # The narrowest shard: of two pointer tiles the one that spills for none.
    fixed = replace(shape, rows=FIXED_ROWS, shard=1)
    return default_gemm(fixed) if bulk and bulk_loadable(fixed) else default_pointer_gemm(fixed)


def default_reassemble(shape: ReassembleShape, in_place: bool) -> ReassembleConfig:
    """The untuned choice for moving [N, B, S]: as wide as one 16-byte access at least, narrower
    bands while that gives more programs, and cycles where a band of all N*B row pieces does not fit
    in registers.
    """
    vector = max(1, VECTOR_BYTES // shape.itemsize)
    if not in_place:
        return _copy_config(shape, vector)
    pieces = next_power_of_2(shape.ranks * shape.rows)
    most = WARP * MAX_WARPS * _thread_elements(shape)
    if pieces * vector > most:
        # 16 pieces in flight of 32 lanes times 16 bytes.
        tile = 16, WARP * vector
        return ReassembleConfig("cycle", *tile, max(4, _warps(tile, shape)))
    # Narrower than 32 lanes of 16 bytes in all would leave lanes with less than a full access.
    block_s = max(vector, WARP * vector // pieces)
    while pieces * block_s * 2 <= most // 2 and block_s * 2 * TARGET_PROGRAMS <= shape.shard:
        block_s *= 2
    return ReassembleConfig("band", pieces, block_s, _warps((pieces, block_s), shape))


def _copy_config(shape: ReassembleShape, vector: int) -> ReassembleConfig:
    block_rows = min(8, next_power_of_2(shape.rows))
    block_s = WARP * vector
    while block_s > vector and block_s // 2 >= shape.shard:
        block_s //= 2
    return ReassembleConfig("copy", block_rows, block_s, _warps((block_rows, block_s), shape))


def _warps(tile: tuple[int, int], shape: ReassembleShape) -> int:
    """The fewest warps whose threads may hold the tile."""
    return max(1, min(MAX_WARPS, tile[0] * tile[1] // (WARP * _thread_elements(shape))))
