"""The gather of hidden rows: which collective moves them, where they land, what it moves and keeps.

The true all-gather, which every backend but gloo gets, runs here on gloo under another's name.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from data_head import FLOATS, Arithmetic, collectives, whole
from guards import Allocations
from ranks import pool

from lmhead import ops, shapes
from lmhead.comm import Call, Comm
from lmhead.workspace import Workspace

CPU = torch.device("cpu")
WIDTH = 5
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@pytest.mark.parametrize("backend", ["gloo", "nccl", "ucc", "mpi", "xccl", "fake", "none"])
def test_only_gloo_gathers_by_an_exchange(backend: str) -> None:
    """By the backend's name alone, which all ranks share."""
    comm = Comm.local()
    comm.backend = backend
    assert comm.gathers_by_exchange == (backend == "gloo")


def _counts(ranks: int) -> dict[str, list[int]]:
    """Uniform, uneven, one idle rank, all but one idle, nothing at all."""
    return {
        "uniform": [3] * ranks,
        "one row": [1] * ranks,
        "uneven": [2, 5, 1, 3][:ranks],
        "idle": [0, 3, 0, 2][:ranks],
        "one alone": [4, 0, 0, 0][:ranks],
        "nobody": [0] * ranks,
    }


def _bits(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, WIDTH] of `dtype` whose every byte says where it is, NaN patterns included."""
    raw = torch.arange(rows * WIDTH * dtype.itemsize) * 37 + 101 * rank
    return (raw % 251).to(torch.uint8).view(dtype).view(rows, WIDTH)


def _layouts(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same rows, as they may lie in memory."""
    wide = rows.new_full((rows.shape[0], 2 * WIDTH + 1), 7.0)
    wide[:, 1:-1:2] = rows
    return {"plain": rows, "transposed": rows.t().contiguous().t(), "sliced": wide[:, 1:-1:2]}


def _arrive(rank: int, ranks: int, backend: str) -> list[str]:
    """What is wrong with the rows, the bytes and the collectives of every gather."""
    comm, work, wrong = Comm(None, CPU), Workspace(), []
    comm.backend = backend
    for dtype in FLOATS:
        for name, counts in _counts(ranks).items():
            rows = shapes.rows_from_counts(counts, ranks, rank)
            want = torch.cat([_bits(source, count, dtype) for source, count in enumerate(counts)])
            call = Call("logits", rows.counts, WIDTH, str(dtype), 1)
            for layout, own in _layouts(_bits(rank, rows.own, dtype)).items():
                with collectives() as seen:
                    got = ops.run_gather(comm, rows, work, own, call)
                what = f"{dtype}, {name}, {layout}"
                if got.shape != want.shape or not got.is_contiguous():
                    wrong.append(f"{what}: {tuple(got.shape)}, {got.stride()}")
                elif not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
                    wrong.append(f"{what}: {got} for {want}")
                row = WIDTH * dtype.itemsize
                expected = (ALL_GATHER, rows.largest * row, ranks * rows.largest * row)
                if backend == "gloo":
                    expected = ("all_to_all_single", ranks * rows.own * row, rows.total * row)
                moved = [(one.collective, one.in_bytes, one.out_bytes) for one in seen]
                if moved != [expected] or not seen[0].flat:
                    wrong.append(f"{what}: {moved}, not {expected}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_rows_arrive_bit_for_bit_by_one_collective(backend: str, ranks: int) -> None:
    """In rank order and closed up, however many and however strided; on gloo by one all-to-all that
    hands out N copies of the true rows, (N - 1) * B of which leave, elsewhere by one all-gather of
    as many rows as the largest rank has.
    """
    assert pool(ranks).run(_arrive, backend) == [[]] * ranks


def _kept(rank: int, ranks: int, backend: str) -> list[str]:
    """What a gather allocates once its buffers are there."""
    comm, work, wrong = Comm(None, CPU), Workspace(), []
    comm.backend = backend
    counts, like = [2, 5, 1, 3][:ranks], torch.empty(0, WIDTH)

    def gather(counts: list[int], layout: str) -> None:
        rows = shapes.rows_from_counts(counts, ranks, rank)
        own = _layouts(_bits(rank, rows.own, torch.float32))[layout]
        call = Call("logits", rows.counts, WIDTH, "float32", 1)
        before = work.bytes()
        with Allocations() as allocations:
            ops.run_gather(comm, rows, work, own, call)
        if ready and (allocations.seen or work.bytes() != before):
            wrong.append(f"{counts}, {layout}: {allocations.seen}, {before} -> {work.bytes()}")

    ready = False
    ops.reserve_gather(comm, comm.ranks, max(counts), work, like)
    gather(counts, "plain")
    ready = True
    # As many rows in all, by turns on every rank: the buffers of one rank are those of each.
    for turn in range(ranks):
        for layout in ("plain", "transposed", "sliced"):
            gather(counts[turn:] + counts[:turn], layout)
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_nothing_is_allocated_once_buffers_are_there(backend: str, ranks: int) -> None:
    assert pool(ranks).run(_kept, backend) == [[]] * ranks


def _warm_calls(rank: int, ranks: int) -> dict[str, tuple[list[str], int]]:
    """The collectives of a warm head's call, and how often it allocates."""
    found, counts = {}, [2, 0, 1, 3][:ranks]
    for backend in ("gloo", "nccl"):
        head = Arithmetic().head(whole(11, 8, seed=1), whole(11, seed=2), ranks, rank)
        head._comm.backend = backend
        head.warmup([3, counts])
        for name, rows, given in (("even", 3, None), ("counts", counts[rank], counts)):
            hidden = whole(rows, 8, seed=3 + rank)
            with collectives() as seen, Allocations() as allocations:
                head(hidden, given)
            moved = [one.collective for one in seen]
            # Ranks without rows have nothing to allocate a result for.
            found[f"{backend}, {name}"] = (moved, len(allocations.seen) - (rows > 0))
    return found


def test_a_warm_call_runs_two_collectives_and_allocates_its_result() -> None:
    """On gloo no all-gather at all; on another backend no all-to-all but that of the logits."""
    for found in pool(4).run(_warm_calls):
        for name in ("even", "counts"):
            assert found[f"gloo, {name}"] == (["all_to_all_single"] * 2, 0)
            assert found[f"nccl, {name}"] == ([ALL_GATHER, "all_to_all_single"], 0)
