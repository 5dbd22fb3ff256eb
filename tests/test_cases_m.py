"""Cases of section M: a row's logits do not depend on the batch that it came in.

M1, for kernels that only move data: every config gives the same bytes.  (Kernels that reduce over
the vocabulary, log-sum-exp and top-k, have the same proof beside their own tests.)
M2, `LMHead(..., deterministic=True)`: a row has the same bits whatever B, N and its neighbours.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data import FLOATS, addresses, assert_as_exact_as_torch, assert_same_bits, transposed
from data_head import KERNELS, Arithmetic, normal
from guards import Allocations, sums_in_order
from library import by_threads, splitting
from ranks import pool

import lmhead
from lmhead import reference, tables, tune
from lmhead.compare import first_difference
from lmhead.kernels import gemm, reassemble
from lmhead.kernels.config import ARCHS, GemmConfig, GemmShape, deterministic_gemm

BATCHES = (1, 2, 7, 32)
ARITHMETIC = Arithmetic(bias=True, scale=0.5, softcap=3.0, logits_dtype=torch.float32)
# (V, H).  torch's kernels: sums long enough for a library to have several orders of summation.
SIZES = {
    "torch": [(1, 64), (131, 577), (384, 1024), (1617, 200), (257, 4096)],
    "triton": [(1, 64), (131, 200), (40, 65)],
}
CASES = [(kernels, *size) for kernels in KERNELS for size in SIZES[kernels]]

# M1.


def _reassemblies(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> int:
    """Run every config in the tuner's space, in place and out of place; how many there were."""
    ranks, rows, shard = shape
    source = addresses(shape, dtype).to(device)
    want = transposed(source)
    vocab = ranks * shard - min(3, shard - 1)
    configs = 0
    for out_itemsize in (None, dtype.itemsize):
        problem = tune.reassemble_problem(*shape, dtype.itemsize, out_itemsize=out_itemsize)
        # What fits the largest of a bucket is in the space; all of it serves this shape.
        for config in tune.space(problem, ARCHS["sm_100"], 148):
            if out_itemsize is None:
                assert_same_bits(reassemble.reassemble(source.clone(), config), want)
            else:
                out = torch.empty(rows, vocab, dtype=dtype, device=device)
                reassemble.reassemble_into(source, out, config)
                assert_same_bits(out, want[:, :vocab].contiguous())
            configs += 1
    return configs


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 5, 21), torch.bfloat16),
        ((2, 7, 40), torch.float32),
        ((4, 3, 64), torch.float16),
    ],
)
def test_m1_every_reassembly_config_gives_the_same_bytes(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    assert _reassemblies(shape, dtype, "cpu") >= 10


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 5, 21), (8, 9, 530), (8, 36, 1616)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_m1_every_reassembly_config_gives_the_same_bytes_compiled(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    assert _reassemblies(shape, dtype, "cuda") >= 20


# M2.


def build(
    kernels: str,
    vocab: int,
    width: int,
    dtype: torch.dtype,
    ranks: int = 1,
    rank: int = 0,
    **options: Any,
) -> lmhead.LMHead:
    weight = normal(vocab, width, seed=1).div(width**0.5).to(dtype)
    bias = normal(vocab, seed=2).to(dtype)
    given = {"deterministic": True, "kernels": kernels} | options
    return ARITHMETIC.head(weight, bias, ranks, rank, **given)


def everyone(width: int, dtype: torch.dtype) -> torch.Tensor:
    """The 32 rows that all of these tests are about."""
    return normal(32, width, seed=3).to(dtype)


def dependent(head: lmhead.LMHead, hidden: torch.Tensor) -> list[str]:
    """Where a row's bits depend on its company: on how many there are, on where among them it
    stands, on what they hold and on how all of them lie.
    """
    wrong = []
    own = (0, 5, 31)  # rows looked at
    alone = {row: head(hidden[row : row + 1]).clone() for row in own}

    def compare(what: str, batch: torch.Tensor, rows: list[int]) -> None:
        logits = head(batch)
        for place, row in enumerate(rows):
            if row in own and (
                difference := first_difference(
                    logits[place : place + 1].view(torch.int32), alone[row].view(torch.int32)
                )
            ):
                wrong.append(f"{what}, row {row}: {difference}")

    for count in BATCHES:
        for row in own:
            rows = [(row - count // 2 + i) % 32 for i in range(count)]
            compare(f"B={count}", hidden[rows], rows)
    strange = hidden.clone()
    for row in set(range(32)) - set(own):
        strange[row] = (float("nan"), float("inf"), 1e4, 0.0)[row % 4]
    compare("strange neighbours", strange, list(range(32)))
    compare("by columns", hidden.t().contiguous().t(), list(range(32)))
    wider = torch.nn.functional.pad(hidden, (1, 2))
    compare("in a wider matrix", wider[:7, 1:-2], list(range(7)))
    compare("in a wider row", wider[5:6, 1:-2], [5])
    return wrong


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("kernels", "vocab", "width"), CASES)
def test_m2_a_row_has_one_set_of_bits(
    kernels: str, vocab: int, width: int, dtype: torch.dtype
) -> None:
    head = build(kernels, vocab, width, dtype)
    hidden = everyone(width, dtype)
    with torch.no_grad(), sums_in_order():
        assert dependent(head, hidden) == []
        weight, bias = head.weight.detach(), head.bias
        assert bias is not None
        assert_as_exact_as_torch(head(hidden), hidden, weight, bias.detach(), 0.5, 3.0)


def _of_ranks(
    rank: int, ranks: int, kernels: str, vocab: int, width: int, dtype: torch.dtype
) -> list[tuple[list[int], torch.Tensor]]:
    """(which of the 32 rows, their logits) for even and for uneven calls."""
    head = build(kernels, vocab, width, dtype, ranks, rank)
    hidden, found = everyone(width, dtype), []
    for counts in (*([b] * ranks for b in BATCHES), [3, 0, 1, 2]):
        rows = [(sum(counts[:rank]) + i) % 32 for i in range(counts[rank])]
        given = None if len(set(counts)) == 1 else counts
        with torch.no_grad(), sums_in_order():
            found.append((rows, head(hidden[rows], given)))
    return found


@pytest.mark.parametrize(
    ("kernels", "vocab", "width", "dtype"),
    [
        ("torch", 257, 577, torch.bfloat16),  # shards of 65
        ("torch", 1617, 200, torch.float16),
        ("torch", 513, 1024, torch.float32),
        ("triton", 257, 200, torch.bfloat16),
        ("triton", 131, 65, torch.float16),
        ("triton", 131, 65, torch.float32),
    ],
)
def test_m2_four_ranks_give_the_bits_of_one(
    kernels: str, vocab: int, width: int, dtype: torch.dtype
) -> None:
    """Shards of a quarter put every column elsewhere in its block; the ranks have one thread."""
    with torch.no_grad(), sums_in_order():
        want = build(kernels, vocab, width, dtype)(everyone(width, dtype))
    found = pool(4).run(_of_ranks, kernels, vocab, width, dtype)
    assert sum(len(rows) for calls in found for rows, _ in calls) == 4 * sum(BATCHES) + 6
    for calls in found:
        for rows, logits in calls:
            assert_same_bits(logits, want[rows])


def _bits_by_threads(rank: int, ranks: int, width: int) -> list[torch.Tensor]:
    """The logits of this rank's rows, under one to four threads; by torch's library and by one that
    splits long sums.
    """
    weight, hidden = normal(131, width, seed=8), everyone(width, torch.float32)
    own = hidden[8 * rank : 8 * rank + 5]
    found, before = [], torch.get_num_threads()
    try:
        for library in (contextlib.nullcontext(), splitting()):
            with library, torch.no_grad():
                for threads in (1, 2, 3, 4):
                    torch.set_num_threads(threads)
                    head = lmhead.LMHead.from_full(weight, kernels="torch", deterministic=True)
                    found.append(head(own))
    finally:
        torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("width", [64, 1023, 1024, 2048, 7168])
def test_m2_bits_depend_on_neither_threads_nor_ranks(width: int) -> None:
    want: dict[int, torch.Tensor] = {}
    for ranks in (1, 2, 4):
        for rank, found in enumerate(pool(ranks).run(_bits_by_threads, width)):
            assert len(found) == 8
            for logits in found:
                assert_same_bits(logits, want.setdefault(rank, found[0]))


def test_m2_the_splitting_library_is_what_such_a_cpu_does() -> None:
    """The test above can fail: a plain product by that library follows the number of threads."""
    a, b = normal(16, 1024, seed=9), normal(128, 1024, seed=10)
    before, found = torch.get_num_threads(), []
    try:
        with splitting():
            for threads in (1, 2):
                torch.set_num_threads(threads)
                found.append(torch.mm(a, b.t()))
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(*found)


def _refused(rank: int, ranks: int, width: int) -> str:
    """The text with which a library is refused whose every sum follows the number of threads."""
    weight, before = normal(40, width, seed=11), torch.get_num_threads()
    with splitting(by_threads):
        try:
            lmhead.LMHead.from_full(weight, kernels="torch", deterministic=True)
        except ValueError as error:
            assert torch.get_num_threads() == before
            return str(error)
    return "taken"


@pytest.mark.parametrize("width", [64, 7168])
def test_m2_a_library_whose_sums_follow_the_number_of_threads_is_refused(width: int) -> None:
    for text in pool(2).run(_refused, width):
        name = reference.library_of(torch.device("cpu"))
        assert f"{name} on this cpu takes the order by the number of threads" in text
        assert f"(H = {width})" in text


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", FLOATS)
def test_m2_torchs_kernels_do_not_depend_on_how_the_weight_lies(dtype: torch.dtype) -> None:
    hidden, weight = everyone(1023, dtype), normal(513, 1023, seed=4).to(dtype)
    results = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        for lying in (
            weight,
            weight.t().contiguous().t(),
            torch.nn.functional.pad(weight, (1, 2))[:, 1:-2],
            torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(weight.shape),
        ):
            out = torch.empty(32, 513)
            results.append(reference.gemm(hidden, lying, out=out, deterministic=True))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def test_m2_blocks_of_a_sum_are_added_in_their_order() -> None:
    """A 1 that comes after 2**24 in a block is lost; in a block of its own before it is taken off
    again, it is not.
    """
    weight, hidden = torch.zeros(1, 1536), torch.ones(1, 1536)
    weight[0, 0], weight[0, 512], weight[0, 1024] = 2.0**24, 1.0, -(2.0**24)
    out = torch.empty(1, 1)
    assert reference.gemm(hidden, weight, out=out, deterministic=True).item() == 0.0
    weight[0, 512], weight[0, 1024] = -(2.0**24), 1.0
    assert reference.gemm(hidden, weight, out=out, deterministic=True).item() == 1.0


def test_m2_a_library_with_several_orders_of_summation_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = torch.mm

    def other_order_in_the_last_columns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = product(a, b)
        found[:, 120:] = product(a.flip(1), b[:, 120:].flip(0))
        return found

    build("torch", 12, 1000, torch.float32)
    monkeypatch.setattr(torch, "mm", other_order_in_the_last_columns)
    with pytest.raises(ValueError, match=r"one order.*cpu.*H = 1000"):
        build("torch", 12, 1000, torch.float32)
    build("torch", 12, 1000, torch.float32, deterministic=False)


def test_m2_torchs_plain_kernels_have_no_such_property() -> None:
    """The check above can fail: without `deterministic` this library's product of one row is summed
    up in another order than that of many.
    """
    head = build("torch", 384, 1024, torch.float32, deterministic=False)
    with torch.no_grad():
        found = dependent(head, everyone(1024, torch.float32))
    if not found:
        pytest.skip("this machine's library gives a row the same bits anyway")
    assert all("row" in text for text in found)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [64, 65])
@pytest.mark.parametrize("aligned", [True, False])
def test_m2_one_config_serves_every_batch(
    dtype: torch.dtype, width: int, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where bulk loads cannot read the weight, and where they could read some hidden rows
    only: the interpreter may give the same bits by several tiles, a GPU need not.
    """
    seen = set()

    def spy(hidden: torch.Tensor, *given: Any) -> None:
        assert hidden.stride() == (width, 1) and hidden.data_ptr() % 16 == 0
        seen.add(given[3])

    monkeypatch.setattr(gemm, "launch_gemm", spy)
    weight = torch.zeros(1 + 300 * width, dtype=dtype)[not aligned :][: 300 * width].view(300, -1)
    one = torch.zeros(1, width + 3, dtype=dtype)
    batches = [torch.zeros(rows, width, dtype=dtype) for rows in (1, 2, 16, 17, 129, 300)]
    for hidden in (*batches, one[:, :width], one[:, 1 : width + 1], batches[3].t().clone().t()):
        for shard in (weight, weight[:75], weight[:1]):
            out = torch.empty(hidden.shape[0], shard.shape[0])
            gemm.gemm(hidden, shard, out=out, deterministic=True)
    shape = GemmShape(1, 300, width, dtype.itemsize)
    assert seen == {deterministic_gemm(shape, bulk=aligned)}


def _tune(folder: Path, head: lmhead.LMHead) -> None:
    """A user's table in which 17 to 32 rows split H and fewer do not."""
    config = GemmConfig(16, 128, 16, 4, 1, "bulk")
    shape = GemmShape(1, head.shard, head.weight.shape[1], 2, 4)
    table = tables.Table("cpu")
    for rows, splits in ((1, 1), (32, 2)):
        key = tables.gemm_key(dataclasses.replace(shape, rows=rows), "eager")
        chosen = dataclasses.replace(config, splits=splits)
        table.add(key, tables.Entry(chosen, "measured", 1.0))
    tables.write(folder / "cpu.json", table)


def test_m2_tuned_tables_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 forgets a 1 beside 2**24: added up in order the row is 0, in two halves 1."""
    monkeypatch.setenv("LMHEAD_CONFIGS", str(tmp_path))
    weight = torch.zeros(3, 64, dtype=torch.bfloat16)
    weight[:, 0], weight[:, 32], weight[:, 48] = 2.0**24, 1.0, -(2.0**24)
    hidden = torch.ones(32, 64, dtype=torch.bfloat16)
    options: Any = {"kernels": "triton", "logits_dtype": torch.float32}
    plain = lmhead.LMHead(weight, 3, **options)
    fixed = lmhead.LMHead(weight, 3, deterministic=True, **options)
    _tune(tmp_path, plain)
    sources = {
        head: {found["gemm"].source for found in head.warmup(rows=(1, 32)).configs.values()}
        for head in (plain, fixed)
    }
    assert sources == {plain: {"measured (user)"}, fixed: {"deterministic"}}
    with torch.no_grad():
        assert plain(hidden)[:1].tolist() != plain(hidden[:1]).tolist()
        assert_same_bits(fixed(hidden)[:1], fixed(hidden[:1]))


def _manners(rank: int, ranks: int, kernels: str) -> list[str]:
    """A warmed call allocates its result alone, however the rows lie; `from_full` takes the
    option.
    """
    wrong = []
    weight = normal(40, 24, seed=5).to(torch.bfloat16)
    head = lmhead.LMHead.from_full(weight, kernels=kernels, deterministic=True)
    head.warmup(rows=5)
    flat = normal(5, 24, seed=6 + rank).to(torch.bfloat16)
    want = head(flat)
    for hidden in (flat, flat.t().contiguous().t()):
        with Allocations() as allocations:
            logits = head(hidden)
        if [size for _, size in allocations.seen] != [5 * 40 * 2]:
            wrong.append(f"{hidden.stride()}: {allocations.seen}")
        if difference := first_difference(logits, want):
            wrong.append(f"{hidden.stride()}: {difference}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kernels", KERNELS)
def test_m2_a_warmed_call_allocates_its_result_alone(kernels: str, ranks: int) -> None:
    assert pool(ranks).run(_manners, kernels) == [[]] * ranks


def test_m2_compiled_code_runs_the_head_between_two_graphs_or_says_that_it_cannot() -> None:
    head = build("torch", 12, 8, torch.float32)
    hidden = everyone(8, torch.float32)
    torch._dynamo.reset()
    with torch.no_grad():
        step = torch.compile(lambda x: head(x * 2) + 1, backend="aot_eager")
        assert_same_bits(step(hidden), head(hidden * 2) + 1)
        torch._dynamo.reset()
        whole = torch.compile(head, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="a deterministic head has no operator"):
            whole(hidden)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("kernels", "vocab", "width"),
    [("torch", 131, 577), ("triton", 1617, 576), ("triton", 1617, 577), ("triton", 384, 7168)],
)
def test_m2_a_row_has_one_set_of_bits_compiled(
    kernels: str, vocab: int, width: int, dtype: torch.dtype
) -> None:
    head = build(kernels, vocab, width, dtype).cuda()
    hidden = everyone(width, dtype).cuda()
    with torch.no_grad():
        assert dependent(head, hidden) == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [576, 577])
def test_m2_shards_of_any_size_give_the_bits_of_the_whole_compiled(
    dtype: torch.dtype, width: int
) -> None:
    """What four ranks compute, one after another."""
    hidden, weight = everyone(width, dtype).cuda(), normal(1617, width, seed=7).to(dtype).cuda()
    whole = torch.empty(32, 1617, device="cuda")
    gemm.gemm(hidden, weight, out=whole, deterministic=True)
    for repeat in (1, 4):
        for start in range(0, 1617, 405):
            # Copies, as ranks have them: a view of an odd width starts between 16-byte borders.
            shard = weight[start : start + 405].clone()
            out = torch.empty(32 * repeat, shard.shape[0], device="cuda")
            gemm.gemm(hidden.repeat(repeat, 1), shard, out=out, deterministic=True)
            for block in out.view(repeat, 32, -1):
                assert_same_bits(block.clone(), whole[:, start : start + 405].contiguous())
