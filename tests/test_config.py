"""Launch configurations: one predicate, and defaults that satisfy it for every shape."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from data import quick
from hypothesis import given
from hypothesis import strategies as st

from lmhead.kernels import config as cfg
from lmhead.kernels.config import (
    ARCHS,
    LIBRARY,
    MAX_TILE_NUMEL,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    default_gemm,
    default_pointer_gemm,
    default_reassemble,
    deterministic_gemm,
    fits,
)

SM90, SM100 = ARCHS["sm_90"], ARCHS["sm_100"]


def is_power_of_2(n: int) -> bool:
    return n > 0 and bin(n).count("1") == 1


@given(
    rows=st.integers(1, 1 << 20),
    shard=st.integers(1, 1 << 20),
    hidden=st.integers(1, 1 << 15) | st.integers(1, 1 << 12).map(lambda n: 8 * n),
    itemsize=st.sampled_from([2, 4]),
    out_itemsize=st.sampled_from([2, 4]),
)
@quick(300)
def test_default_gemm_fits_every_shape_on_every_arch(
    rows: int, shard: int, hidden: int, itemsize: int, out_itemsize: int
) -> None:
    shape = GemmShape(rows, shard, hidden, itemsize, out_itemsize)
    config = default_gemm(shape)
    assert fits(default_gemm(shape, SM100), SM100, shape)
    assert all(fits(config, arch, shape) for arch in ARCHS.values())
    assert (config.kind == "library") is (itemsize == 4)
    if config.kind == "library":
        config = default_pointer_gemm(shape)
        assert all(fits(config, arch, shape) for arch in ARCHS.values())
    assert (config.kind == "bulk") is (itemsize == 2 and hidden % 8 == 0)
    assert all(is_power_of_2(n) for n in (config.block_t, config.block_v, config.block_h))
    assert is_power_of_2(config.num_warps)
    assert config.rows * config.block_v <= MAX_TILE_NUMEL


@given(
    rows=st.integers(1, 1 << 20),
    shard=st.integers(1, 1 << 20),
    hidden=st.integers(1, 1 << 15) | st.integers(1, 1 << 12).map(lambda n: 8 * n),
    itemsize=st.sampled_from([2, 4]),
    bulk=st.booleans(),
)
@quick(200)
def test_deterministic_gemm_fits_every_arch_and_knows_neither_rows_nor_shard(
    rows: int, shard: int, hidden: int, itemsize: int, bulk: bool
) -> None:
    shape = GemmShape(rows, shard, hidden, itemsize)
    config = deterministic_gemm(shape, bulk=bulk)
    assert config == deterministic_gemm(GemmShape(1, 1, hidden, itemsize, 4), bulk=bulk)
    assert all(fits(config, arch, shape) for arch in ARCHS.values())
    assert (config.kind == "bulk") is (bulk and itemsize == 2 and hidden % 8 == 0)
    assert config.kind != "library" and config.splits == 1 and config.tail_t == 0


@given(
    ranks=st.integers(1, 128),
    rows=st.integers(1, 1 << 20),
    shard=st.integers(1, (1 << 20) + 1),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    in_place=st.booleans(),
)
@quick(300)
def test_default_reassemble_fits_every_shape_on_every_arch(
    ranks: int, rows: int, shard: int, itemsize: int, in_place: bool
) -> None:
    shape = ReassembleShape(ranks, rows, shard, itemsize)
    config = default_reassemble(shape, in_place)
    assert all(fits(config, arch, shape) for arch in ARCHS.values())
    assert is_power_of_2(config.block_rows) and is_power_of_2(config.block_s)
    assert is_power_of_2(config.num_warps)
    assert config.block_rows * config.block_s <= MAX_TILE_NUMEL
    assert (config.kind == "copy") is not in_place


def test_defaults_for_the_published_workload() -> None:
    # DeepSeek-V4-Pro at dp = 8: 36 rows per rank, V / N = 16160.
    assert default_reassemble(ReassembleShape(8, 36, 16160, 2), in_place=True) == ReassembleConfig(
        "band", block_rows=512, block_s=32, num_warps=8
    )
    # All 288 rows in one program: each weight byte is read once.
    config = default_gemm(GemmShape(288, 16160, 7168, 2))
    assert (config.kind, config.block_t, config.tail_t, config.block_v) == ("bulk", 256, 32, 128)


@pytest.mark.parametrize("rows", [1, 16, 17, 128, 129, 256, 257, 288, 289, 320, 400, 512])
def test_up_to_512_rows_one_program_holds_them_all(rows: int) -> None:
    for arch in ARCHS.values():
        config = default_gemm(GemmShape(rows, 16160, 7168, 2), arch)
        assert config.rows >= rows and config.block_v >= 64
    assert default_gemm(GemmShape(rows, 16160, 7168, 2), SM100).block_v == 128


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_band_is_used_up_to_4096_pieces_and_a_cycle_beyond(itemsize: int) -> None:
    for ranks, rows in ((2, 2048), (8, 512), (64, 64), (128, 32)):
        assert default_reassemble(ReassembleShape(ranks, rows, 64, itemsize), True).kind == "band"
        wider = ReassembleShape(ranks, rows + 1, 64, itemsize)
        assert default_reassemble(wider, True).kind == "cycle"


def test_rows_that_start_between_16_byte_borders_get_fewer_elements_a_thread() -> None:
    # 36 * 8 pieces of an odd shard: 16 elements a thread, where 64 would spill.
    config = default_reassemble(ReassembleShape(8, 36, 16161, 2), in_place=True)
    assert config.kind == "band"
    assert config.block_rows * config.block_s <= 16 * 32 * config.num_warps
    assert default_reassemble(ReassembleShape(8, 256, 16161, 2), in_place=True).kind == "cycle"


BAND = ReassembleConfig("band", block_rows=8, block_s=16, num_warps=1)
SHAPE = ReassembleShape(ranks=2, rows=4, shard=64, itemsize=2)
GEMM = GemmConfig(block_t=32, block_v=128, block_h=64, num_warps=4, num_stages=3)
GEMM_SHAPE = GemmShape(rows=32, shard=128, hidden=256, itemsize=2)


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({"num_warps": 3}, SHAPE),
        ({"num_warps": 32}, SHAPE),
        ({"num_warps": 0}, SHAPE),
        ({"block_s": 12}, SHAPE),
        ({"block_rows": 0}, SHAPE),
        ({"block_rows": 4}, SHAPE),  # fewer than the 8 pieces
        ({"block_s": 1 << 18}, SHAPE),  # over 2**20 elements
        ({"block_s": 8192, "num_warps": 16}, SHAPE),  # more than registers hold
        ({"block_s": 512}, SHAPE),  # 128 elements for each of 32 threads
        ({"block_s": 128}, dataclasses.replace(SHAPE, shard=63)),  # single elements: 32 a thread
    ],
)
def test_fits_refuses_a_reassembly_that_does_not(
    change: dict[str, int], shape: ReassembleShape
) -> None:
    assert fits(BAND, SM90, shape)
    assert not fits(dataclasses.replace(BAND, **change), SM90, shape)


@pytest.mark.parametrize(
    "change",
    [
        {"block_t": 8},
        {"block_t": 48},
        {"block_v": 0},
        {"num_stages": 0},
        {"num_warps": 6},
        {"num_stages": 12},  # shared memory
        {"block_h": 1024},  # shared memory
        {"block_t": 1 << 14},
    ],
)
def test_fits_refuses_a_gemm_that_does_not(change: dict[str, int]) -> None:
    for arch in ARCHS.values():
        assert fits(GEMM, arch, GEMM_SHAPE)
        assert not fits(dataclasses.replace(GEMM, **change), arch, GEMM_SHAPE)


BULK = GemmConfig(256, 128, 64, 8, 3, "bulk", tail_t=32)
BULK_SHAPE = GemmShape(rows=288, shard=16160, hidden=7168, itemsize=2)


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({"num_stages": 5}, {}),  # shared memory, barriers included
        ({"block_h": 256, "num_stages": 1}, {}),  # wider than two swizzled rows
        ({"tail_t": 48}, {}),
        ({"tail_t": 512}, {}),  # tensor memory, registers
        ({"splits": 3}, {}),
        ({"splits": 64}, {}),  # fewer steps a split than the pipeline is deep
        ({"num_warps": 2}, {}),
        ({"num_warps": 16}, {}),  # tensor memory
        ({}, {"hidden": 7172}),  # rows that start between 16-byte borders
        ({}, {"itemsize": 4}),
    ],
)
def test_fits_refuses_a_bulk_gemm_that_does_not(
    change: dict[str, int], shape: dict[str, int]
) -> None:
    config = dataclasses.replace(BULK, **change)
    for arch in ARCHS.values():
        assert fits(BULK, arch, BULK_SHAPE)
    assert not all(
        fits(config, arch, dataclasses.replace(BULK_SHAPE, **shape)) for arch in ARCHS.values()
    )


def test_fits_keeps_tails_splits_and_roles_to_bulk_loads() -> None:
    for change in ({"tail_t": 16}, {"splits": 2}, {"warp_specialize": True}):
        assert not fits(dataclasses.replace(GEMM, **change), SM100, GEMM_SHAPE)
    specialized = dataclasses.replace(BULK, warp_specialize=True)
    assert fits(specialized, SM100, BULK_SHAPE) and not fits(specialized, SM90, BULK_SHAPE)
    assert fits(LIBRARY, SM90, BULK_SHAPE) and not fits(LIBRARY, SM90, SHAPE)


def test_fits_knows_tensor_memory() -> None:
    # 1024 columns of accumulator: registers may hold them, tensor memory has 512.
    config = GemmConfig(block_t=1024, block_v=16, block_h=16, num_warps=4, num_stages=1)
    assert fits(config, SM90, GEMM_SHAPE)
    assert not fits(config, SM100, GEMM_SHAPE)


def test_fits_refuses_a_mixed_question() -> None:
    with pytest.raises(TypeError, match="GemmConfig cannot be asked about a ReassembleShape"):
        fits(GEMM, SM90, SHAPE)
    with pytest.raises(TypeError, match="ReassembleConfig cannot be asked about a GemmShape"):
        fits(BAND, SM90, GEMM_SHAPE)


def test_configs_are_frozen_and_refuse_unknown_keys() -> None:
    for config in (GEMM, BAND):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.num_warps = 8  # type: ignore[misc]
        with pytest.raises(TypeError, match="unexpected keyword"):
            dataclasses.replace(config, num_ctas=2)


def test_next_power_of_2() -> None:
    for n, power in itertools.chain(
        [(0, 1), (1, 1), (2, 2), (3, 4), (288, 512), (1 << 20, 1 << 20), ((1 << 20) + 1, 1 << 21)]
    ):
        assert cfg.next_power_of_2(n) == power


def test_elsewhere_defaults_take_ordinary_loads_and_the_shared_memory_that_all_have() -> None:
    for rows, itemsize in itertools.product((1, 36, 288, 4096), (2, 4)):
        shape = GemmShape(rows, 16160, 7168, itemsize)
        for config in (
            default_gemm(shape, cfg.OTHER),
            default_pointer_gemm(shape),
            cfg.deterministic_gemm(shape, bulk=cfg.OTHER.bulk),
        ):
            assert config.kind != "bulk" and fits(config, cfg.OTHER, shape)
    assert not fits(BULK, cfg.OTHER, BULK_SHAPE)
