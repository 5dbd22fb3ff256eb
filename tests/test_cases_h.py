"""Published failures of Triton kernels, and of layouts that kernels met (H, and parts of B, C and
M): what must happen here.  H2 is in test_codegen.py, H6 in test_gpu.py.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from data import addresses, assert_same_bits, framed, transposed
from probes import narrow_product_probe, offset_probe

from lmhead.kernels import gemm, reassemble, tiles
from lmhead.kernels.config import (
    MAX_TILE_NUMEL,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    default_gemm,
    default_reassemble,
    next_power_of_2,
)

# Every way to reassemble in place: tiles narrower, wider and much wider than the pieces.
IN_PLACE = [
    ReassembleConfig(kind, rows, block_s, num_warps=1)
    for kind, heights in (("band", (16, 32)), ("cycle", (1, 2, 4, 16)))
    for rows, block_s in itertools.product(heights, (1, 4, 8, 64))
]
COPIES = [
    ReassembleConfig("copy", rows, block_s, 1)
    for rows, block_s in itertools.product((1, 2, 8, 16), (1, 4, 8, 64))
]
GEMM = GemmConfig(block_t=16, block_v=16, block_h=16, num_warps=4, num_stages=2)


MOVING, MULTIPLYING = ("band", "cycle", "copy"), ("bulk", "pointer", "add_up")


class Recorder:
    """Stands in for a kernel and keeps the grid that it was launched with."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        self.grid = grid
        return self

    def __call__(self, **arguments: Any) -> None:
        self.arguments = arguments


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Kernels replaced by recorders, so that tensors of any size may be launched without memory."""
    recorders = {name: Recorder() for name in (*MOVING, *MULTIPLYING)}
    for name, recorder in recorders.items():
        module = reassemble if name in MOVING else gemm
        monkeypatch.setattr(module, f"_{name}_kernel", recorder)
    return recorders


def launch_all(rows: int, vocab: int, ranks: int = 8) -> None:
    """Every kernel for B = `rows` rows per rank, on tensors without memory."""
    shard = -(-vocab // ranks)
    received = torch.empty((ranks, rows, shard), dtype=torch.bfloat16, device="meta")
    reassemble.reassemble_into(
        received, torch.empty((rows, vocab), dtype=torch.float32, device="meta")
    )
    reassemble.reassemble(received)
    hidden = torch.empty((ranks * rows, 64), dtype=torch.bfloat16, device="meta")
    weight = torch.empty((shard, 64), dtype=torch.bfloat16, device="meta")
    out = received.view(ranks * rows, shard)
    gemm.gemm(hidden, weight, out=out)
    gemm.gemm(hidden, weight, out=out, config=GEMM)
    gemm._launch_add_up(out.unsqueeze(0), gemm.NO_EPILOGUE, out)


@pytest.mark.parametrize(("row", "vocab"), [(20000, 129280), (15408, 151936), (131072, 262144)])
def test_h1_row_times_vocab_is_64_bit(row: int, vocab: int) -> None:
    out = torch.empty(8, dtype=torch.int64)
    offset_probe[(1,)](out, row, vocab, BLOCK=8)
    want = [(row + i) * vocab for i in range(8)]
    assert want[0] > 2**31
    assert out.tolist() == want
    # The probe can fail: in 32 bits the product wraps (to -1709367296 in the first case).
    narrow_product_probe[(1,)](out, row, vocab, BLOCK=8)
    assert out.tolist() == [(n + 2**31) % 2**32 - 2**31 for n in want]


@pytest.mark.parametrize("rows", [1, 65535, 65536, 70000, 10**6])
def test_h3_rows_never_meet_the_limit_of_a_grid_axis(
    rows: int, launched: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many cycles as there can be, without walking millions of pieces.
    table = torch.empty(8 * rows, device="meta"), torch.empty(4 * rows + 1, device="meta")
    monkeypatch.setattr(reassemble, "_table", lambda *_: table)
    launch_all(rows, vocab=64)
    # Axis 0 may have 2**31 - 1 programs, the others 65535: there are no others.
    for name in ("copy", *MULTIPLYING) + (("cycle",) if rows > 1 else ()):
        assert len(launched[name].grid) == 1, name
        assert 1 <= launched[name].grid[0] <= tiles.MAX_PROGRAMS


def test_h4_a_huge_launch_is_bounded_and_its_counters_do_not_wrap(
    launched: dict[str, Recorder],
) -> None:
    rows, vocab, ranks = 16384, 262144, 8
    launch_all(rows, vocab, ranks)
    grids = {name: recorder.grid for name, recorder in launched.items() if recorder.grid}
    assert set(grids) == {"cycle", "copy", *MULTIPLYING}
    assert all(grids[name] == (tiles.MAX_PROGRAMS,) for name in ("copy", *MULTIPLYING))
    assert all(0 < grid[0] <= tiles.MAX_PROGRAMS for grid in grids.values())
    # A 32-bit loop counter goes at most one stride past the number of tasks.
    copy = launched["copy"].arguments
    tasks = ranks * triton.cdiv(rows, copy["BLOCK_ROWS"]) * triton.cdiv(copy["S"], copy["BLOCK_S"])
    assert tiles.MAX_PROGRAMS < tasks < 2**31 - tiles.MAX_PROGRAMS


@pytest.mark.parametrize("programs", [1, 2, 7])
def test_h4_every_program_loops_over_what_is_left(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "MAX_PROGRAMS", programs)
    for config in (ReassembleConfig("band", 16, 4, 1), ReassembleConfig("cycle", 4, 4, 1)):
        received = addresses((3, 5, 33), torch.bfloat16)
        want = transposed(received)
        assert_same_bits(reassemble.reassemble(received, config), want)
    received = addresses((3, 5, 33), torch.bfloat16)
    out = torch.empty(5, 98, dtype=torch.bfloat16)
    reassemble.reassemble_into(received, out, ReassembleConfig("copy", 2, 8, 1))
    assert_same_bits(out, transposed(received, 98))
    hidden, weight = torch.eye(40), torch.arange(40.0 * 50).view(50, 40)
    partial = torch.empty(40, 50)
    gemm.gemm(hidden, weight, out=partial, config=GEMM)
    assert_same_bits(partial, weight.t().contiguous())
    half = hidden.to(torch.bfloat16), (weight % 256).to(torch.bfloat16)
    for splits in (1, 2):
        config = GemmConfig(16, 16, 16, 4, 1, kind="bulk", splits=splits)
        gemm.gemm(*half, out=partial, config=config)
        assert_same_bits(partial, (weight % 256).t().contiguous())


@pytest.mark.parametrize("shard", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1 << 24])
def test_h5_no_block_passes_2_to_the_20_elements(shard: int) -> None:
    assert triton.language.core.TRITON_MAX_TENSOR_NUMEL == MAX_TILE_NUMEL == 1 << 20
    for rows, itemsize in itertools.product((1, 36, 1 << 17), (2, 4)):
        config = default_gemm(GemmShape(8 * rows, shard, 7168, itemsize))
        assert config.block_t * config.block_v <= MAX_TILE_NUMEL
        for in_place in (True, False):
            moving = default_reassemble(ReassembleShape(8, rows, shard, itemsize), in_place)
            assert moving.block_rows * moving.block_s <= MAX_TILE_NUMEL
            assert moving.block_s < next_power_of_2(shard)


def test_h7_every_masked_load_says_what_it_gives_elsewhere() -> None:
    loads = 0
    for file in sorted(Path(reassemble.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"):
                continue
            given = {keyword.arg for keyword in node.keywords}
            place = f"{file.name}:{node.lineno}"
            assert len(node.args) == 1, f"{place}: mask and other are given by name"
            assert "mask" not in given or "other" in given, f"{place}: a mask without other="
            loads += "mask" in given
    assert loads >= 8  # the walk has found the kernels


def test_h7_a_tail_shorter_than_its_block_leaves_the_surroundings_alone() -> None:
    shape, margin = (3, 4, 5), 8  # S = 5 with blocks of 8
    for kind, rows in (("band", 16), ("cycle", 8)):
        buffer = addresses((margin + 60 + margin,), torch.int16)
        before = buffer.clone()
        block = buffer[margin:-margin].view(shape)
        want = transposed(block)
        got = reassemble.reassemble(block, ReassembleConfig(kind, rows, 8, 1))
        assert_same_bits(got, want)
        assert_same_bits(buffer[:margin], before[:margin])
        assert_same_bits(buffer[-margin:], before[-margin:])
    frame = framed(4, 13, torch.bfloat16)
    received = addresses(shape, torch.bfloat16)
    reassemble.reassemble_into(received, frame.inside, ReassembleConfig("copy", 8, 8, 1))
    assert_same_bits(frame.inside, transposed(received, 13))
    frame.assert_intact()
    frame = framed(3, 5, torch.float32)
    gemm.gemm(torch.eye(3), torch.arange(15.0).view(5, 3), out=frame.inside, config=GEMM)
    assert_same_bits(frame.inside, torch.arange(15.0).view(5, 3).t())
    frame.assert_intact()


def test_b10_kernels_read_the_rows_of_a_sliced_view() -> None:
    # As published: a kernel with row * V instead of a stride reads [4, 5, 6, 7] for row 1.
    x = torch.arange(12.0).view(2, 6)[:, :4]
    out = torch.empty(2, 4)
    gemm.gemm(x, torch.eye(4), out=out, config=GEMM)
    assert out[1].tolist() == [6, 7, 8, 9]
    gemm.gemm(torch.eye(2), x.t(), out=(flipped := torch.empty(2, 4)), config=GEMM)
    assert_same_bits(flipped, out)
    reassemble.reassemble_into(x.view(1, 2, 4), (copied := torch.empty(2, 4)))
    assert_same_bits(copied, out)


def test_b10_kernels_write_rows_of_any_stride() -> None:
    vocab = 21
    received = addresses((3, 5, 7), torch.float32)
    weight = torch.arange(vocab * 5.0).view(vocab, 5)
    for extra in (0, 3):
        frame = framed(5, vocab, torch.float32, left=0, right=extra)
        reassemble.reassemble_into(received, frame.inside)
        assert_same_bits(frame.inside, transposed(received))
        gemm.gemm(torch.eye(5), weight, out=frame.inside, config=GEMM)
        assert_same_bits(frame.inside, weight.t())
        frame.assert_intact()


def test_b10_what_cannot_be_permuted_in_place_is_refused() -> None:
    wider = torch.zeros(3, 5, 10)[:, :, :7]
    with pytest.raises(ValueError, match=r"\(3, 5, 7\) with strides \(50, 10, 1\)"):
        reassemble.reassemble(wider)


@pytest.mark.parametrize("config", IN_PLACE, ids=lambda c: f"{c.kind}-{c.block_rows}x{c.block_s}")
def test_c4_source_and_result_overlap_unevenly_in_place(config: ReassembleConfig) -> None:
    # [3, 5, 7] and [5, 21]: no row of the result is a row of the source.
    for dtype in (torch.bfloat16, torch.float32):
        received = addresses((3, 5, 7), dtype)
        want = transposed(received)
        got = reassemble.reassemble(received, config)
        assert got.data_ptr() == received.data_ptr()
        assert_same_bits(got, want)


def test_m1_every_config_moves_the_same_bytes() -> None:
    generator = torch.Generator().manual_seed(11)
    values = torch.randint(-(1 << 15), 1 << 15, (3, 5, 7), generator=generator)
    received = values.to(torch.int16).view(torch.bfloat16)
    assert bool(received.isnan().any())
    want = transposed(received)
    for config in IN_PLACE:
        assert_same_bits(reassemble.reassemble(received.clone(), config), want)
    for config in COPIES:
        out = torch.empty(5, 20, dtype=torch.bfloat16)
        reassemble.reassemble_into(received, out, config)
        assert_same_bits(out, want[:, :20].contiguous())


def test_m1_a_cast_row_does_not_depend_on_its_neighbours() -> None:
    received = torch.randn(3, 33, 7, generator=torch.Generator().manual_seed(2))
    together = torch.empty(33, 20, dtype=torch.bfloat16)
    reassemble.reassemble_into(received, together)
    alone = torch.empty(1, 20, dtype=torch.bfloat16)
    reassemble.reassemble_into(received[:, 5:6], alone)
    assert_same_bits(alone, together[5:6].contiguous())
