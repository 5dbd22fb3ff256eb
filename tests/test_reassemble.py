"""Reassembly, bit for bit: against its twin and against transpose + reshape, in the interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from data import (
    CANARY,
    FLOATS,
    addresses,
    assert_same_bits,
    assert_same_numbers,
    bits,
    framed,
    quick,
    transposed,
)
from hypothesis import given
from hypothesis import strategies as st
from variants import BLOCKS, SHARDS, reassembly

from lmhead import reference
from lmhead.kernels import reassemble, tiles
from lmhead.kernels.config import ReassembleConfig, next_power_of_2

DTYPES = (*FLOATS, torch.uint8, torch.int64)
# Where an address becomes a NaN payload: the first one above infinity.
NAN_BITS = {1: 0, 2: 0x7F81, 4: 0x7F800001, 8: 0x7FF0000000000001}

Shape = tuple[int, int, int]


@st.composite
def shapes(draw: st.DrawFn, pieces: int, least_rows: int = 2, ranks: int = 128) -> Shape:
    """(N, B, S) of at most `ranks` ranks and about `pieces` row pieces."""
    ranks = draw(st.integers(2, ranks))
    rows = draw(st.integers(least_rows, max(least_rows, pieces // ranks)))
    return ranks, rows, draw(st.integers(1, 70))


powers = st.sampled_from([1, 2, 4, 8, 16, 32, 64])


def in_place(received: torch.Tensor, config: ReassembleConfig | None) -> torch.Tensor:
    """Reassemble a copy of `received` that lies inside a larger buffer, and check everything that
    can be checked of it.
    """
    want = transposed(received)
    assert_same_bits(reference.reassemble(received.clone()), want)
    margin = 5  # elements: the block starts on no 16-byte border
    buffer = torch.empty(received.numel() + 2 * margin, dtype=received.dtype)
    buffer.view(torch.uint8).fill_(CANARY)
    block = buffer[margin : margin + received.numel()].view(received.shape)
    block.copy_(received)
    got = reassemble.reassemble(block, config)
    assert got.data_ptr() == block.data_ptr() and got.is_contiguous()
    assert_same_bits(got, want)
    assert bool((buffer[:margin].view(torch.uint8) == CANARY).all())
    assert bool((buffer[-margin:].view(torch.uint8) == CANARY).all())
    return got


@given(shape=shapes(pieces=1024), dtype=st.sampled_from(DTYPES), nan=st.booleans())
@quick(60)
def test_in_place_with_the_default_config(shape: Shape, dtype: torch.dtype, nan: bool) -> None:
    in_place(addresses(shape, dtype, nan * NAN_BITS[dtype.itemsize]), None)


@given(
    shape=shapes(pieces=1024),
    dtype=st.sampled_from(DTYPES),
    spare=st.sampled_from([1, 2]),
    block_s=powers,
    warps=st.sampled_from([1, 4, 16]),
)
@quick(40)
def test_in_place_by_bands(
    shape: Shape, dtype: torch.dtype, spare: int, block_s: int, warps: int
) -> None:
    ranks, rows, _ = shape
    block_rows = next_power_of_2(ranks * rows) * spare
    in_place(addresses(shape, dtype), ReassembleConfig("band", block_rows, block_s, warps))


@given(
    shape=shapes(pieces=256),
    dtype=st.sampled_from(DTYPES),
    block_rows=st.sampled_from([4, 8, 16, 32]),
    block_s=st.sampled_from([16, 32, 64, 128]),
)
@quick(30)
def test_in_place_by_cycles(
    shape: Shape, dtype: torch.dtype, block_rows: int, block_s: int
) -> None:
    in_place(addresses(shape, dtype), ReassembleConfig("cycle", block_rows, block_s, 4))


@pytest.mark.parametrize("kind", ["band", "cycle"])
def test_in_place_for_every_small_shape_one_element_at_a_time(kind: str) -> None:
    for ranks, rows, shard in itertools.product((2, 3, 4), (2, 3, 5), (1, 2)):
        block_rows = next_power_of_2(ranks * rows) if kind == "band" else 1
        config = ReassembleConfig(kind, block_rows, block_s=1, num_warps=1)
        in_place(addresses((ranks, rows, shard), torch.bfloat16), config)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((64, 64, 8), "band"),  # 4096 pieces: the last that fits in registers
        ((64, 65, 8), "cycle"),
        ((128, 33, 3), "cycle"),
        ((2, 2049, 1), "cycle"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_than_4096_pieces_follow_cycles(
    shape: Shape, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    launch = reassemble.launch_reassemble

    def spy(data: torch.Tensor, ranks: int, rows: int, shard: int, config: object) -> None:
        chosen.append(config)
        launch(data, ranks, rows, shard, config)

    monkeypatch.setattr(reassemble, "launch_reassemble", spy)
    in_place(addresses(shape, dtype), None)
    assert [config.kind for config in chosen] == [kind]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("kind", ["band", "cycle", "copy"])
def test_every_kind_at_ragged_shapes(kind: str, shard: int) -> None:
    for i, (ranks, rows) in enumerate(BLOCKS):
        if (i + SHARDS.index(shard)) % 2:
            continue  # every block meets two of the shards or more
        dtype = FLOATS[(i + shard) % 3]
        received = addresses((ranks, rows, shard), dtype)
        config = reassembly(kind, ranks, rows)
        if kind == "copy":
            out_of_place(received, ranks * shard - i % min(shard, 4), dtype, config)
        else:
            in_place(received, config)


@given(ranks=st.integers(1, 128), rows=st.integers(1, 200))
@quick(60)
def test_the_cycle_table_is_the_permutation(ranks: int, rows: int) -> None:
    order, start = reassemble.cycles(ranks, rows, torch.device("cpu"))
    assert order.dtype == start.dtype == torch.int32
    pieces = ranks * rows
    # Row-major piece p = b*N + n must receive source-major piece n*B + b.
    source = {p: (p % ranks) * rows + p // ranks for p in range(pieces)}
    moved = [p for p in range(pieces) if source[p] != p]
    assert sorted(order.tolist()) == moved  # every moved piece once, no other
    assert start[0] == 0 and start[-1] == len(moved)
    lengths = start.diff()
    assert bool((lengths >= 2).all()) and bool((lengths.diff() <= 0).all())
    for first, last in itertools.pairwise(start.tolist()):
        cycle = order[first:last].tolist()
        for here, there in itertools.pairwise([*cycle, cycle[0]]):
            assert source[here] == there


def test_tables_of_captured_graphs_outlive_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(reassemble, "_captured", {})
    made = []

    def cycles(ranks: int, rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        made.append((ranks, rows))  # a cache that forgets at once
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(reassemble, "cycles", cycles)
    device = torch.device("cuda", 0)
    assert reassemble._table(2, 3000, device) is not reassemble._table(2, 3000, device)
    capturing = True
    captured = reassemble._table(2, 3000, device)
    capturing = False
    assert reassemble._table(2, 3000, device) is captured
    reassemble._table(2, 4000, device)
    assert list(reassemble._captured) == [(2, 3000, device)] and len(made) == 4


@pytest.mark.parametrize(
    "config",
    [
        ReassembleConfig("band", 16, 4, 1),
        ReassembleConfig("cycle", 4, 4, 1),
    ],
)
def test_a_bounded_grid_still_covers_everything_in_place(
    config: ReassembleConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "MAX_PROGRAMS", 2)
    in_place(addresses((3, 5, 37), torch.bfloat16), config)  # 10 bands; 1 cycle of 10 bands


@pytest.mark.parametrize("shape", [(1, 7, 5), (4, 1, 5), (1, 1, 1), (4, 0, 5), (3, 2, 0)])
def test_nothing_is_launched_where_nothing_moves(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("launched")

    monkeypatch.setattr(reassemble, "launch_reassemble", refuse)
    received = addresses(shape, torch.bfloat16)
    got = reassemble.reassemble(received)
    assert got.data_ptr() == received.data_ptr()
    assert got.shape == (shape[1], shape[0] * shape[2])
    assert_same_bits(got, transposed(received))


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (lambda: torch.zeros(3, 4, 5).transpose(0, 1), r"\(5, 20, 1\)"),
        (lambda: torch.zeros(3, 4, 10)[:, :, ::2], r"\(40, 10, 2\)"),
        (lambda: torch.zeros(3, 4, 6)[:, :, :5], r"\(24, 6, 1\)"),
        (lambda: torch.zeros(1, 4, 5).expand(3, 4, 5), r"\(0, 5, 1\)"),
        (lambda: torch.zeros(3, 4), r"\(4, 1\)"),
    ],
)
def test_what_is_not_one_block_is_refused_in_place(
    view: Callable[[], torch.Tensor], strides: str
) -> None:
    received = view()
    before = received.clone()
    with pytest.raises(ValueError, match=strides):
        reassemble.reassemble(received)
    assert_same_bits(received.clone(), before)


def test_elements_of_16_bytes_are_refused() -> None:
    received = torch.zeros(2, 3, 4, dtype=torch.complex128)
    with pytest.raises(TypeError, match="16 bytes"):
        reassemble.reassemble(received)
    with pytest.raises(TypeError, match="16 bytes"):
        reassemble.reassemble_into(received, torch.zeros(3, 8, dtype=torch.complex128))


# The out-of-place form.

LAYOUTS = ("contiguous", "wider", "swapped", "one block", "one row")


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """`values` [N, B, S] (or what an expanded view of them can hold) as a strided tensor."""
    ranks, rows, shard = values.shape
    if layout == "wider":  # as all-gathered blocks [N, T, S], cut to own rows, are
        buffer = torch.empty(ranks, rows + 3, shard + 5, dtype=values.dtype)
        view = buffer[:, 2 : 2 + rows, 1 : 1 + shard]
        view.copy_(values)
        return view
    if layout == "swapped":
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "one block":
        return values[:1].expand(ranks, rows, shard)
    if layout == "one row":
        return values[:, :1].expand(ranks, rows, shard)
    return values


def out_of_place(
    received: torch.Tensor,
    vocab: int,
    dtype: torch.dtype,
    config: ReassembleConfig | None = None,
    margins: tuple[int, int] = (3, 2),
) -> None:
    """Reassemble into a matrix framed by canaries, and check everything that can be checked."""
    want = transposed(received, vocab).to(dtype)
    assert_close = assert_same_bits if received.dtype == dtype else assert_same_numbers
    twin = torch.empty(received.shape[1], vocab, dtype=dtype)
    assert reference.reassemble_into(received, twin) is twin
    assert_close(twin, want)
    frame = framed(received.shape[1], vocab, dtype, left=margins[0], right=margins[1])
    before = received.clone()
    assert reassemble.reassemble_into(received, frame.inside, config) is frame.inside
    assert_close(frame.inside, want)
    assert_same_bits(received.clone(), before)
    frame.assert_intact()


# The interpreter takes milliseconds for each program of the copying kernel, one or more per rank.
@given(
    shape=st.one_of(shapes(60, 1, ranks=6), shapes(60, 1, ranks=6), shapes(300, 1)),
    missing=st.integers(0, 200),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    margins=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    nan=st.booleans(),
)
@quick(35)
def test_out_of_place_drops_padding_and_takes_strides(
    shape: Shape,
    missing: int,
    dtype: torch.dtype,
    layout: str,
    margins: tuple[int, int],
    nan: bool,
) -> None:
    ranks, _, shard = shape
    received = laid_out(addresses(shape, dtype, nan * NAN_BITS[dtype.itemsize]), layout)
    out_of_place(received, max(1, ranks * shard - missing), dtype, margins=margins)


@given(
    shape=shapes(pieces=40, least_rows=1, ranks=4),
    missing=st.integers(0, 40),
    block_rows=st.sampled_from([1, 2, 8, 32]),
    block_s=st.sampled_from([8, 16, 64, 128]),
)
@quick(15)
def test_out_of_place_with_any_tile(
    shape: Shape, missing: int, block_rows: int, block_s: int
) -> None:
    config = ReassembleConfig("copy", block_rows, block_s, 1)
    vocab = max(1, shape[0] * shape[2] - missing)
    out_of_place(addresses(shape, torch.bfloat16), vocab, torch.bfloat16, config)


def test_out_of_place_for_one_rank_one_row_and_one_column() -> None:
    for ranks, rows, shard, vocab in ((1, 4, 9, 7), (4, 1, 9, 30), (1, 1, 1, 1), (3, 4, 1, 2)):
        out_of_place(addresses((ranks, rows, shard), torch.float16), vocab, torch.float16)


def _range(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max + 1


CASTS = [(a, b) for a, b in itertools.product(FLOATS, FLOATS) if a != b]


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_round_once_to_nearest_even(source: torch.dtype, target: torch.dtype) -> None:
    ties = [1 + n * 2.0**-k for k in (8, 9, 11, 12) for n in (1, 3, 5)]
    special = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 65504, 65520, 3.4e38, 1e-40]
    numbers = torch.tensor([*ties, *special]).to(source)
    size = bits(numbers).dtype
    pattern = torch.randint(*_range(size), (1 << 13,), generator=torch.Generator().manual_seed(3))
    anything = pattern.to(size).view(source)
    values = torch.cat([numbers, -numbers, anything])
    ranks, rows = 3, 4
    shard = values.numel() // (ranks * rows)
    received = values[: ranks * rows * shard].view(ranks, rows, shard)
    out_of_place(received, ranks * shard - 5, target)


@given(
    shape=shapes(pieces=30, least_rows=1, ranks=5),
    missing=st.integers(0, 30),
    cast=st.sampled_from(CASTS),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1 << 30),
)
@quick(20)
def test_casts_of_any_shape(
    shape: Shape, missing: int, cast: tuple[torch.dtype, torch.dtype], layout: str, seed: int
) -> None:
    source, target = cast
    generator = torch.Generator().manual_seed(seed)
    received = laid_out(torch.randn(shape, generator=generator).to(source), layout)
    out_of_place(received, max(1, shape[0] * shape[2] - missing), target)


def test_a_bounded_grid_still_covers_everything_out_of_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "MAX_PROGRAMS", 3)
    config = ReassembleConfig("copy", 2, 4, 1)
    out_of_place(addresses((3, 5, 21), torch.bfloat16), 60, torch.bfloat16, config)


@pytest.mark.parametrize("shape", [(3, 0, 5), (3, 2, 5)])
def test_an_empty_result_launches_nothing(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise AssertionError("launched")

    monkeypatch.setattr(reassemble, "launch_copy", refuse)
    out = torch.empty(shape[1], 15 if shape[1] == 0 else 0)
    assert reassemble.reassemble_into(torch.zeros(shape), out) is out


@pytest.mark.parametrize(
    ("received", "out", "error", "text"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 4), ValueError, r"\(2, 3\) and \(3, 4\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 8), ValueError, r"\(2, 3, 4\) and \(2, 8\)"),
        (torch.zeros(2, 3, 4), torch.zeros(24), ValueError, r"\(24,\)"),
        (torch.zeros(2, 3, 4), torch.zeros(3, 9), ValueError, "9 columns but 2 blocks of 4 give 8"),
        (torch.zeros(2, 3, 8)[:, :, ::2], torch.zeros(3, 8), ValueError, r"received.*\(24, 8, 2\)"),
        (torch.zeros(2, 3, 4), torch.zeros(8, 3).t(), ValueError, r"out.*\(1, 3\)"),
        (torch.zeros(2, 3, 4), torch.zeros(1, 8).expand(3, 8), ValueError, r"overlap.*\(0, 1\)"),
        (torch.zeros(2, 3, 4).int(), torch.zeros(3, 8), TypeError, "torch.int32 to torch.float32"),
        (torch.zeros(2, 3, 4).double(), torch.zeros(3, 8), TypeError, "torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    received: torch.Tensor, out: torch.Tensor, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        reassemble.reassemble_into(received, out)
