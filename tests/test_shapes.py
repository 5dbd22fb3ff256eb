"""Shards, rows and the refusals, without a group: lmhead.shapes."""

from __future__ import annotations

import re

import pytest
import torch
from data_head import FLOATS
from hypothesis import given
from hypothesis import strategies as st

from lmhead import shapes
from lmhead.shapes import Rows

SHARDS = st.integers(1, 9)
VOCABS = st.integers(1, 60)
MULTIPLES = st.integers(1, 8)


@given(VOCABS, SHARDS, MULTIPLES)
def test_shard_rows_is_the_least_multiple_that_holds_the_vocabulary(
    vocab: int, ranks: int, multiple: int
) -> None:
    shard = shapes.shard_rows(vocab, ranks, multiple)
    assert shard % multiple == 0 and shard * ranks >= vocab
    assert (shard - multiple) * ranks < vocab


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-3, 2, 1)])
def test_shard_rows_refuses_what_is_not_positive(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {bad[0]}, {bad[1]} and {bad[2]}")):
        shapes.shard_rows(*bad)


@given(VOCABS, SHARDS, MULTIPLES, st.integers(0, 5), st.booleans())
def test_shards_put_together_are_the_full_weight(
    vocab: int, ranks: int, multiple: int, extra: int, flat: bool
) -> None:
    """Every row once, in order, on the rank that owns it; `extra` rows of a weight that was padded
    elsewhere do no harm.
    """
    full = torch.arange((vocab + extra) * 3.0).view(-1, 3)
    full = full[:, 0].contiguous() if flat else full
    shards = [
        shapes.shard_weight(full, ranks, rank, vocab_size=vocab, multiple=multiple)
        for rank in range(ranks)
    ]
    assert {tuple(shard.shape) for shard in shards} == {
        (shapes.shard_rows(vocab, ranks, multiple), *full.shape[1:])
    }
    assert torch.equal(shapes.unshard_weight(shards, vocab), full[:vocab])
    assert all(bool(torch.isfinite(shard).all()) for shard in shards)


@given(VOCABS, SHARDS)
def test_a_shard_is_a_view_exactly_where_no_padding_is_needed(vocab: int, ranks: int) -> None:
    full = torch.ones(vocab, 2)
    for rank in range(ranks):
        shard = shapes.shard_weight(full, ranks, rank)
        start, stop = rank * shard.shape[0], (rank + 1) * shard.shape[0]
        tied = shard.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        assert tied == (stop <= vocab)
        assert int(shard.sum()) == 2 * max(0, min(stop, vocab) - start), "padding is zero"


def test_shard_weight_names_the_numbers_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"V >= 9 rows, got \(8, 2\)"):
        shapes.shard_weight(torch.ones(8, 2), 2, 0, vocab_size=9)
    with pytest.raises(ValueError, match=r"got \(2, 2, 2\)"):
        shapes.shard_weight(torch.ones(2, 2, 2), 2, 0)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"rank {rank} is outside 0\.\.1"):
            shapes.shard_weight(torch.ones(8, 2), 2, rank)
    with pytest.raises(ValueError, match="2 shards have 6 rows, fewer than vocab_size 7"):
        shapes.unshard_weight([torch.ones(3, 2), torch.ones(3, 2)], 7)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_rows_know_where_they_lie(counts: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(counts) - 1))
    rows = shapes.rows_from_counts(counts, len(counts), rank)
    owner = [r for r, count in enumerate(counts) for _ in range(count)]
    assert owner[rows.start : rows.start + rows.own] == [rank] * rows.own
    assert owner.count(rank) == rows.own and rows.total == len(owner)
    assert rows.ranks == len(counts) and rows.largest == max(counts)
    assert rows.uniform == (len(set(counts)) == 1)


@pytest.mark.parametrize(
    ("counts", "error", "text"),
    [
        (torch.tensor([1, 2]), TypeError, "got Tensor: a device tensor would make every call wait"),
        ({0: 1, 1: 2}, TypeError, "host list of 2 ints, got dict"),
        ([1, 2, 3], ValueError, "must name 2 ranks, got 3: [1, 2, 3]"),
        ([1], ValueError, "must name 2 ranks, got 1: [1]"),
        ([1, -2], ValueError, "non-negative ints, got [1, -2]"),
        ([1, True], ValueError, "non-negative ints, got [1, True]"),
        ([1, 2.0], ValueError, "non-negative ints, got [1, 2.0]"),
    ],
)
def test_row_counts_are_a_host_list_of_counts(
    counts: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)):
        shapes.rows_from_counts(counts, 2, 0)  # type: ignore[arg-type]


def test_own_rows_agree_with_row_counts() -> None:
    assert shapes.own_rows(3, None, 4, 1) == Rows((3, 3, 3, 3), 1)
    assert shapes.own_rows(0, [5, 0], 2, 1) == Rows((5, 0), 1)
    with pytest.raises(ValueError, match=re.escape("rank 1 has 661 rows, but hidden has 3")):
        shapes.own_rows(3, [3, 661], 2, 1)


def test_gathered_rows_agree_with_row_counts() -> None:
    assert shapes.gathered_rows(6, None, 3, 2, "partial") == Rows((2, 2, 2), 2)
    assert shapes.gathered_rows(6, (0, 5, 1), 3, 2, "partial") == Rows((0, 5, 1), 2)
    with pytest.raises(ValueError, match="partial has 7 rows, which 3 ranks cannot share evenly"):
        shapes.gathered_rows(7, None, 3, 0, "partial")
    with pytest.raises(ValueError, match="adds up to 6 rows, but gathered has 7"):
        shapes.gathered_rows(7, [1, 2, 3], 3, 0, "gathered")


def test_check_vocab() -> None:
    shapes.check_vocab(12, 3, 4)
    shapes.check_vocab(10, 3, 4)
    with pytest.raises(ValueError, match=r"13 exceeds the 12 rows that 4 ranks hold with 3 each$"):
        shapes.check_vocab(13, 3, 4)
    with pytest.raises(ValueError, match="needs its process group"):
        shapes.check_vocab(4, 3, 1)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        shapes.check_vocab(0, 3, 4)
    for bad in (True, 3.0, "3"):
        with pytest.raises(TypeError, match=type(bad).__name__):
            shapes.check_vocab(bad, 3, 4)  # type: ignore[arg-type]


def test_check_weight() -> None:
    for dtype in FLOATS:
        shapes.check_weight(torch.ones(4, 2, dtype=dtype), torch.ones(4))
    for shape in ((4,), (0, 2), (4, 0), (1, 4, 2)):
        with pytest.raises(ValueError, match=re.escape(str(shape))):
            shapes.check_weight(torch.ones(shape), None)
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float64):
        with pytest.raises(TypeError, match=rf"{dtype}.*lmhead\.exchange"):
            shapes.check_weight(torch.ones(4, 2).to(dtype), None)
    for bias in (torch.ones(5), torch.ones(4, 1)):
        with pytest.raises(ValueError, match=r"bias must be \[4\]"):
            shapes.check_weight(torch.ones(4, 2), bias)
    with pytest.raises(TypeError, match=r"bias must be .*, got torch\.int32"):
        shapes.check_weight(torch.ones(4, 2), torch.ones(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="bias is on meta but weight is on cpu"):
        shapes.check_weight(torch.ones(4, 2), torch.ones(4, device="meta"))


def test_check_epilogue() -> None:
    shapes.check_epilogue(-0.5, None)
    shapes.check_epilogue(2, 30)
    for scale in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match=f"scale must be finite, got {scale}"):
            shapes.check_epilogue(scale, None)
    for softcap in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"got {softcap}; None turns it off"):
            shapes.check_epilogue(1.0, softcap)
    for bad in (True, "2", torch.ones(())):
        with pytest.raises(TypeError, match="scale must be a number"):
            shapes.check_epilogue(bad, None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="softcap must be a number or None"):
            shapes.check_epilogue(1.0, bad)  # type: ignore[arg-type]


def test_check_hidden() -> None:
    weight = torch.ones(4, 2)
    shapes.check_hidden(torch.ones(0, 2), weight)
    for shape in ((3,), (3, 4), (1, 3, 2)):
        with pytest.raises(ValueError, match=re.escape(f"must be [rows, 2], got {shape}")):
            shapes.check_hidden(torch.ones(shape), weight)
    with pytest.raises(TypeError, match=r"hidden is torch\.float16 but the weight is torch\.floa"):
        shapes.check_hidden(torch.ones(3, 2, dtype=torch.float16), weight)
    with pytest.raises(ValueError, match="gathered is on meta but the weight is on cpu"):
        shapes.check_hidden(torch.ones(3, 2, device="meta"), weight, "gathered")


def test_check_no_grad_looks_at_grad_mode() -> None:
    wanting = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="bias requires grad"):
        shapes.check_no_grad(weight=torch.ones(2), nothing=None, bias=wanting)
    with torch.no_grad():
        shapes.check_no_grad(bias=wanting)
    with torch.inference_mode():
        shapes.check_no_grad(bias=wanting)


def test_check_partial() -> None:
    for dtype in (*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float8_e5m2):
        shapes.check_partial(torch.ones(4, 2).to(dtype))
    for dtype in (torch.float64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match=str(dtype)):
            shapes.check_partial(torch.ones(4, 2).to(dtype))
    for shape in ((4,), (4, 0), (2, 2, 2)):
        with pytest.raises(ValueError, match=re.escape(str(shape))):
            shapes.check_partial(torch.ones(shape))
    with pytest.raises(ValueError, match="partial requires grad"):
        shapes.check_partial(torch.ones(4, 2, requires_grad=True))


def test_check_out() -> None:
    def check(out: torch.Tensor | None) -> None:
        shapes.check_out(out, 3, 4, torch.float32, torch.device("cpu"))

    for fine in (None, torch.ones(3, 4), torch.ones(3, 9)[:, :4], torch.ones(6, 4)[::2]):
        check(fine)
    for shape in ((3, 5), (2, 4), (4,), (1, 3, 4)):
        with pytest.raises(ValueError, match=re.escape(f"out must be [3, 4], got {shape}")):
            check(torch.ones(shape))
    with pytest.raises(TypeError, match=r"out is torch\.bfloat16 but the logits are torch\.float3"):
        check(torch.ones(3, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out is on meta"):
        check(torch.ones(3, 4, device="meta"))
    strided = (torch.ones(4, 3).t(), torch.ones(3, 8)[:, ::2], torch.ones(4).expand(3, 4))
    for out in strided:
        with pytest.raises(ValueError, match=re.escape(f"got strides {out.stride()}")):
            check(out)
    with pytest.raises(ValueError, match="out requires grad"):
        check(torch.ones(3, 4, requires_grad=True))
    # One column or one row leaves the strides without a meaning.
    shapes.check_out(torch.ones(1, 9)[:, :4], 1, 4, torch.float32, torch.device("cpu"))
    shapes.check_out(torch.ones(3, 9)[:, 2:3], 3, 1, torch.float32, torch.device("cpu"))


def test_check_no_overlap_compares_addresses() -> None:
    memory = torch.zeros(100)
    out = memory[40:60].view(4, 5)
    apart = {"left": memory[:40], "right": memory[60:], "empty": memory[45:45], "none": None}
    shapes.check_no_overlap(out, **apart)
    shapes.check_no_overlap(None, hidden=memory)
    shapes.check_no_overlap(memory[40:40].view(0, 5), hidden=memory)
    for inside in (memory[59:], memory[:41], memory[50:51], memory[::7]):
        with pytest.raises(ValueError, match="out overlaps weight in memory"):
            shapes.check_no_overlap(out, hidden=memory[:40], weight=inside)


@pytest.mark.parametrize("source", FLOATS)
def test_resolve_dtypes_defaults_to_the_source(source: torch.dtype) -> None:
    assert shapes.resolve_dtypes(source, None, None) == (source, source)
    for logits in FLOATS:
        assert shapes.resolve_dtypes(source, logits, None) == (logits, logits)
    for wire in FLOATS:
        assert shapes.resolve_dtypes(source, torch.float32, wire) == (torch.float32, wire)


def test_resolve_dtypes_never_rounds_twice() -> None:
    for logits, wire in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
    ):
        with pytest.raises(ValueError, match=f"wire_dtype {wire} must equal logits_dtype {logits}"):
            shapes.resolve_dtypes(torch.float32, logits, wire)
    with pytest.raises(TypeError, match=r"logits_dtype .* got torch\.float64"):
        shapes.resolve_dtypes(torch.float32, torch.float64, None)
    with pytest.raises(TypeError, match=r"wire_dtype .* got torch\.int8"):
        shapes.resolve_dtypes(torch.float32, None, torch.int8)


def test_moved_bytes_of_the_published_workload() -> None:
    """DeepSeek-V4-Pro, N = 8, B = 36, bf16: 7/8 of the 8.14 MB that a rank's rows make, and 7 times
    the 9.3 MB of its partial logits on the fallback, which is N times as much.
    """
    rows = Rows((36,) * 8, 3)
    assert shapes.moved_bytes("all_to_all", rows, 16160, 2) == 7 * 36 * 16160 * 2
    assert shapes.moved_bytes("all_gather", rows, 16160, 2) == 7 * 288 * 16160 * 2
    assert shapes.moved_bytes("local", Rows((36,), 0), 129280, 2) == 0


def test_moved_bytes_takes_the_busier_direction() -> None:
    """Rank 0 has all rows and receives; rank 1 has none and sends."""
    assert shapes.moved_bytes("all_to_all", Rows((6, 0, 0), 0), 10, 4) == 2 * 6 * 10 * 4
    assert shapes.moved_bytes("all_to_all", Rows((6, 0, 0), 1), 10, 4) == 6 * 10 * 4
