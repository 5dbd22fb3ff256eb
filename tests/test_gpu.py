"""Compiled kernels on a CUDA device, against the same twins and truths: run with `pytest -m gpu`.

The interpreter can be right where compiled code is wrong: it runs programs and threads one after
another, so it knows no race, and it rounds and vectorises in its own way.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from data import (
    FLOATS,
    addresses,
    assert_as_exact_as_torch,
    assert_same_bits,
    assert_same_numbers,
    framed,
    transposed,
)
from probes import offset_probe, round_probe, tanh_probe
from variants import BLOCKS, CELLS, SHARDS, Cell, check_cell, reassembly

import lmhead
from lmhead.devices import arch_of
from lmhead.kernels import gemm, reassemble, tiles
from lmhead.kernels.config import (
    ARCHS,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    fits,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPES = [
    (2, 2, 1),
    (3, 5, 7),
    (8, 36, 161),
    (8, 36, 16160),  # DeepSeek-V4-Pro
    (8, 36, 4104),  # rows of whole 16-byte words, though no multiple of 16 elements
    (64, 64, 24),  # 4096 pieces, the last band
    (8, 300, 33),  # an odd shard: cycles from 1024 pieces
    (64, 65, 40),
    (2, 3000, 512),
]


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int64])
def test_reassembly_in_place(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    received = addresses(shape, dtype).to(DEVICE)
    want = transposed(received)
    got = reassemble.reassemble(received)
    assert got.data_ptr() == received.data_ptr()
    assert_same_bits(got, want)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("kind", ["band", "cycle", "copy"])
def test_every_kind_of_reassembly_at_ragged_shapes(kind: str, shard: int) -> None:
    for i, (ranks, rows) in enumerate(BLOCKS):
        received = addresses((ranks, rows, shard), FLOATS[(i + shard) % 3]).to(DEVICE)
        vocab = ranks * shard - (i % min(shard, 4) if kind == "copy" else 0)
        want = transposed(received, vocab).contiguous()
        config = reassembly(kind, ranks, rows)
        if kind == "copy":
            out = torch.empty(rows, vocab, dtype=received.dtype, device=DEVICE)
            reassemble.reassemble_into(received, out, config)
            assert_same_bits(out, want)
        else:
            assert_same_bits(reassemble.reassemble(received, config), want)


@pytest.mark.parametrize("warps", [1, 4, 16])
@pytest.mark.parametrize("block_s", [1, 8, 64, 256])
def test_h6_every_config_moves_the_same_bytes(block_s: int, warps: int) -> None:
    source = addresses((8, 9, 530), torch.bfloat16).to(DEVICE)
    want = transposed(source)
    for kind, rows in (("band", 128), ("band", 256), ("cycle", 1), ("cycle", 16)):
        config = ReassembleConfig(kind, rows, block_s, warps)
        if not fits(config, ARCHS["sm_90"], ReassembleShape(8, 9, 530, 2)):
            continue  # more than registers hold
        assert_same_bits(reassemble.reassemble(source.clone(), config), want)
    for rows in (1, 8, 32):
        out = torch.empty(9, 4000, dtype=torch.bfloat16, device=DEVICE)
        reassemble.reassemble_into(source, out, ReassembleConfig("copy", rows, block_s, warps))
        assert_same_bits(out, want[:, :4000].contiguous())


@pytest.mark.parametrize("shape", [(8, 36, 16160), (64, 65, 2048)])
def test_no_store_overtakes_a_load(shape: tuple[int, int, int]) -> None:
    # Fresh data each time: an element that a faster warp has overwritten names the wrong address.
    for first in range(0, 20 * 997, 997):
        received = addresses(shape, torch.bfloat16, first).to(DEVICE)
        want = transposed(received)
        assert_same_bits(reassemble.reassemble(received), want)


@pytest.mark.parametrize(("source", "target"), [*itertools.product(FLOATS, FLOATS)])
def test_reassembly_out_of_place(source: torch.dtype, target: torch.dtype) -> None:
    for ranks, rows, shard, vocab in ((3, 5, 7, 20), (8, 36, 1616, 12920), (4, 1, 33, 130)):
        received = addresses((ranks, rows, shard), source).to(DEVICE)
        for left, right in ((3, 2), (8, 8)):
            frame = framed(rows, vocab, target, left=left, right=right, device=DEVICE)
            reassemble.reassemble_into(received, frame.inside)
            compare = assert_same_bits if source == target else assert_same_numbers
            compare(frame.inside, transposed(received, vocab).to(target))
            frame.assert_intact()


def test_reassembly_of_strided_blocks() -> None:
    # As the all-gather route has them: own rows of every rank's [T, S].
    everything = addresses((4, 24, 50), torch.bfloat16).to(DEVICE)
    blocks = everything[:, 6:12]
    out = torch.empty(6, 199, dtype=torch.bfloat16, device=DEVICE)
    reassemble.reassemble_into(blocks, out)
    assert_same_bits(out, transposed(blocks, 199))


def test_h1_offsets_beyond_2_to_the_31() -> None:
    ranks, rows, shard = 8, 16700, 16160  # 2.16e9 elements
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    pieces = torch.arange(ranks * rows, device=DEVICE).to(torch.int16) * 7919
    columns = torch.arange(shard, device=DEVICE).to(torch.int16)
    received = (pieces[:, None] + columns).view(ranks, rows, shard)
    got = reassemble.reassemble(received).view(rows, ranks, shard)
    for n in range(ranks):
        assert torch.equal(got[:, n], pieces.view(ranks, rows)[n][:, None] + columns)
    out = torch.empty(8, dtype=torch.int64, device=DEVICE)
    offset_probe[(1,)](out, 20000, 129280, BLOCK=8)
    assert out.tolist() == [(20000 + i) * 129280 for i in range(8)]


def test_rounding_is_torchs() -> None:
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    words = torch.cat([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    x = words.to(torch.int32).view(torch.float32).to(DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
        round_probe[(x.numel() // 1024,)](x, out, BLOCK=1024)
        assert_same_numbers(out, x.to(dtype))


def test_tanh_is_close_to_fp64() -> None:
    x = torch.cat([torch.logspace(-37, 4, 8190), torch.tensor([0.0, float("inf")])])
    x = torch.cat([x, -x, torch.full((1024,), float("nan"))]).to(DEVICE)
    out = torch.empty_like(x)
    tanh_probe[(x.numel() // 1024,)](x, out, BLOCK=1024)
    truth = torch.tanh(x.double())
    assert bool((out.isnan() == x.isnan()).all())
    # The device's exponential is itself within two units.
    error = (out.double() - truth).abs() / truth.abs().clamp_min(1e-38)
    assert float(error.nan_to_num().max()) <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("operands", "out"), [*itertools.product(FLOATS, FLOATS)])
def test_gemm(operands: torch.dtype, out: torch.dtype) -> None:
    for rows, shard, hidden in ((1, 130, 576), (17, 127, 200), (300, 512, 1024), (288, 333, 64)):
        x = normal(rows, hidden, seed=1, dtype=operands)
        w = normal(shard, hidden, seed=2, dtype=operands) / hidden**0.5
        bias = normal(shard, seed=3, dtype=operands)
        for arguments in ((None, 1.0, None), (bias, 0.5, 2.0)):
            frame = framed(rows, shard, out, device=DEVICE)
            added = None if arguments[0] is None else arguments[0].to(DEVICE)
            gemm.gemm(
                x.to(DEVICE),
                w.to(DEVICE),
                added,
                scale=arguments[1],
                softcap=arguments[2],
                out=frame.inside,
            )
            assert_as_exact_as_torch(frame.inside.cpu(), x, w, *arguments)
            frame.assert_intact()


# Each is a compilation, so half of the interpreter's, with other T for every second variant; all of
# those that split H, since not every H can be split.
@pytest.mark.parametrize(
    "cell",
    [cell for i, cell in enumerate(CELLS) if i % 2 == i // 6 % 2 or "H in" in cell.variant],
    ids=str,
)
def test_every_gemm_variant_at_ragged_shapes(cell: Cell) -> None:
    sizes = cell.rows, cell.shard, cell.hidden
    shape = GemmShape(*sizes, cell.operands.itemsize, cell.out.itemsize)
    arch = arch_of(torch.device(DEVICE))
    if cell.config is not None and not fits(cell.config, arch, shape):
        pytest.skip(f"{cell.config} does not fit {shape} on {arch.name}")
    check_cell(cell, DEVICE)


def test_gemm_of_strided_operands_is_exact() -> None:
    # Integers: exact in any order of summation.
    x = torch.arange(33 * 40).view(33, 40).remainder(5).sub(2).to(torch.bfloat16)
    w = torch.arange(50 * 40).view(50, 40).remainder(3).sub(1).to(torch.bfloat16)
    want = (x.float() @ w.float().t()).to(DEVICE)
    x, w = x.to(DEVICE), w.to(DEVICE)
    for hidden, weight in (
        (x.t().contiguous().t(), w),
        (x, w.t().contiguous().t()),
        (x.repeat_interleave(2, dim=1)[:, ::2], w.repeat_interleave(3, dim=1)[:, ::3]),
    ):
        out = torch.empty(33, 50, device=DEVICE)
        gemm.gemm(hidden, weight, out=out)
        assert_same_bits(out, want)


def test_a_bounded_grid_still_covers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "MAX_PROGRAMS", 3)
    for config in (ReassembleConfig("band", 64, 16, 4), ReassembleConfig("cycle", 8, 16, 4)):
        received = addresses((8, 7, 300), torch.bfloat16).to(DEVICE)
        want = transposed(received)
        assert_same_bits(reassemble.reassemble(received, config), want)
    x = normal(100, 96, seed=4, dtype=torch.bfloat16)
    w = normal(300, 96, seed=5, dtype=torch.bfloat16)
    out = torch.empty(100, 300, device=DEVICE)
    gemm.gemm(x.to(DEVICE), w.to(DEVICE), out=out, config=GemmConfig(16, 128, 32, 4, 3))
    assert_as_exact_as_torch(out.cpu(), x, w)


@pytest.mark.parametrize("logits_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "bias, scale and softcap"])
def test_head_on_one_device(logits_dtype: torch.dtype, full: bool) -> None:
    weight = normal(1000, 256, seed=6, dtype=torch.bfloat16) / 16
    bias = normal(1000, seed=7, dtype=torch.bfloat16) if full else None
    scale, softcap = (0.5, 3.0) if full else (1.0, None)
    head = lmhead.LMHead(
        weight.to(DEVICE),
        990,  # ten rows of padding
        bias=None if bias is None else bias.to(DEVICE),
        scale=scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
    )
    for rows in (1, 5, 36):
        hidden = normal(rows, 256, seed=rows, dtype=torch.bfloat16)
        logits = head(hidden.to(DEVICE))
        assert logits.shape == (rows, 990) and logits.dtype == logits_dtype
        own_bias = None if bias is None else bias[:990]
        assert_as_exact_as_torch(logits.cpu(), hidden, weight[:990], own_bias, scale, softcap)
    head.close()


def test_head_in_a_cuda_graph() -> None:
    weight = normal(640, 128, seed=8, dtype=torch.bfloat16).to(DEVICE)
    head = lmhead.LMHead(weight, 640)
    head.warmup(rows=(4,))
    static = normal(4, 128, seed=9, dtype=torch.bfloat16).to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = head(static)
    for seed in range(3):
        hidden = normal(4, 128, seed=seed, dtype=torch.bfloat16).to(DEVICE)
        static.copy_(hidden)
        graph.replay()
        assert_same_bits(logits, head(hidden))
    head.close()


def test_capture_without_warmup_names_the_remedy() -> None:
    head = lmhead.LMHead(normal(64, 32, seed=10, dtype=torch.bfloat16).to(DEVICE), 64)
    head.warmup(rows=(4,))
    hidden = torch.zeros(5, 32, dtype=torch.bfloat16, device=DEVICE)
    with (
        pytest.raises(RuntimeError, match=r"warmup\(rows=\[5\]\)"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        head(hidden)
    head.close()


def test_a_captured_reassembly_keeps_its_cycle_table() -> None:
    shape = 8, 600, 64  # 4800 pieces: cycles
    buffer = addresses(shape, torch.bfloat16).to(DEVICE)
    reassemble.reassemble(buffer)  # compiles, and makes the table
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reassemble.reassemble(buffer)
    reassemble.cycles.cache_clear()
    torch.cuda.empty_cache()
    source = addresses(shape, torch.bfloat16, first=77).to(DEVICE)
    buffer.copy_(source)
    graph.replay()
    assert_same_bits(buffer.view(600, 8 * 64), transposed(source))
