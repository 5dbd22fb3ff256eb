"""Cases A: the collective contract -- idle and unequal ranks, order of calls, timeouts.

"Padded" below is what an engine does that agreed on a row count with all ranks: every rank pads its
rows to that count and cuts the result.  The other way is `row_counts`, which moves no padding rows
in the exchange.  Timeouts are those of groups made for one test, a few seconds each.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_cases import (
    KERNELS,
    ROUTES,
    Caught,
    address_head,
    addresses,
    caught,
    checked_mode,
    integers,
    same,
    shard_of,
    truth,
)
from ranks import own_group, pool

import lmhead
from lmhead import shapes
from lmhead.comm import Call, Comm

TIMEOUT_S = 4.0  # of groups in which a rank is missed on purpose
# A rank that misses another notices at the timeout; busy cores may wake it this much later.
LATE_S = 4.0


def _padded(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    """Own rows padded to the agreed count with NaN: nothing of them may reach another row."""
    padded = hidden.new_full((rows, hidden.shape[1]), float("nan"))
    padded[: hidden.shape[0]] = hidden
    return padded


def _job_a1(rank: int, ranks: int, rows: int, vocab: int) -> None:
    hidden, weight = integers(ranks * rows, 8, seed=1), integers(vocab, 8, seed=2)
    want = truth(hidden, weight).float()[rank * rows : (rank + 1) * rows]
    shard, seen = vocab // ranks, []

    def strict(
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        group: Any = None,
    ) -> None:
        """Takes what a graph capture takes, and moves dim 0 in N equal parts; H == S."""
        for tensor in (output, input):
            assert tensor.dim() == 1 and tensor.is_contiguous(), tensor.shape
            assert tensor.numel() == ranks * rows * shard, tensor.numel()
        assert output_splits is None and input_splits is None
        everyone = [torch.empty_like(input) for _ in range(ranks)]
        dist.all_gather(everyone, input, group=group)
        width = input.numel() // ranks
        for source, theirs in enumerate(everyone):
            output.narrow(0, source * width, width).copy_(theirs.narrow(0, rank * width, width))
        seen.append(input.numel())

    with mock.patch.object(dist, "all_to_all_single", strict):
        for kernels in KERNELS:
            head = lmhead.LMHead(shard_of(weight, ranks, rank), vocab, kernels=kernels)
            same(head(hidden[rank * rows : (rank + 1) * rows]), want, kernels)
            same(head.forward_gathered(hidden), want, kernels)
            partial = (hidden @ weight[rank * shard : (rank + 1) * shard].t()).contiguous()
            same(lmhead.exchange(partial, vocab_size=vocab, kernels=kernels), want, kernels)
    assert len(seen) == 8, "one all-to-all per call, and one for hidden rows that gloo gathers"


def test_a1_backend_sees_flat_views_of_all_elements() -> None:
    """The all-to-all gets 1-D contiguous tensors of N*B*S elements, the only form that a capture
    takes, and a backend that cuts dim 0 into N parts gives the right logits.
    """
    pool(4).run(_job_a1, 2, 32)


@pytest.mark.gpu
def test_a1_capture_on_gpu() -> None:
    """The same flat all-to-all, and a head, inside a real CUDA-graph capture, after `warmup`.  With
    one GPU the group has one rank; more of them need a multi-GPU machine.
    """
    device = torch.device("cuda", 0)
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        comm = Comm(None, device)
        send, receive = torch.arange(64.0, device=device), torch.zeros(64, device=device)
        call = Call("exchange", (2,), 32, "float32", 1)
        comm.exchange(receive, send, None, None, call)  # before any capture, as warmup does
        torch.cuda.synchronize()
        receive.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.exchange(receive, send, None, None, call)
        graph.replay()
        same(receive.cpu(), torch.arange(64.0), "captured all-to-all")

        hidden, weight = integers(2, 16, seed=1), integers(32, 16, seed=2)
        head = lmhead.LMHead(weight.to(device), 32)
        head.warmup(rows=2)
        static, graph = hidden.to(device), torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            logits = head(static)
        graph.replay()
        same(logits.cpu(), truth(hidden, weight).float(), "captured head")
    finally:
        dist.destroy_process_group()


def _job_a2_idle(rank: int, ranks: int, steps: int) -> int:
    group = own_group(timeout_s=10)
    weight, idle_steps = integers(10, 8, seed=3), 0
    heads = {
        kernels: lmhead.LMHead(shard_of(weight, ranks, rank), 10, group, kernels=kernels)
        for kernels in KERNELS
    }
    chance = random.Random(0)  # the same on every rank
    for step in range(steps):
        idle = chance.randrange(ranks)
        counts = [0 if r == idle else 3 for r in range(ranks)]
        idle_steps += rank == idle
        hidden = integers(counts[rank], 8, seed=100 * step + rank)
        want = truth(hidden, weight).float()
        for kernels, head in heads.items():
            same(head(_padded(hidden, 3))[: counts[rank]], want, (step, kernels, "padded"))
            got = head(hidden, counts)
            assert got.shape == (counts[rank], 10)
            same(got, want, (step, kernels, "counts"))
            assert head.last_route is not None and head.last_route.name == "all_to_all"
    dist.destroy_process_group(group)
    return idle_steps


def test_a2_idle_ranks_never_hang() -> None:
    """20 steps, another idle rank in each: nobody waits, the idle rank gets [0, V], the others
    their exact logits, padded to three rows as well as with counts of 0.
    """
    idle = pool(4).run(_job_a2_idle, 20)
    assert sum(idle) == 20 and max(idle) < 20


def _job_a2_skips(rank: int, ranks: int) -> Caught:
    group = own_group(timeout_s=TIMEOUT_S)
    head = lmhead.LMHead(torch.ones(2, 4), 8, group)
    head(torch.ones(3, 4))
    if rank == 3:
        return Caught()  # the rank that has no requests and does not call
    found = caught(lambda: head(torch.ones(3, 4)))
    assert found.record.pop("group") == group.group_name
    assert repr(group.group_name) in found.text
    return found


def test_a2_skipped_call_is_an_error_within_the_timeout() -> None:
    """One rank skips its call: the others end with an error that names op, group and rank."""
    for rank, found in enumerate(pool(4).run(_job_a2_skips)[:3]):
        assert found.error == "CollectiveError"
        assert "lmhead logits" in found.text and f"rank {rank} of 4" in found.text
        assert found.record["op"] == "logits" and found.record["rank"] == rank
        assert found.record["number"] == 2
        assert found.seconds < TIMEOUT_S + LATE_S


def _job_a3_crossed(rank: int, ranks: int) -> tuple[Caught, Caught]:
    group = own_group(timeout_s=TIMEOUT_S)
    head = lmhead.LMHead(torch.ones(4, 4), 8, group)
    calls = [
        lambda: head(torch.ones(2, 4)),
        lambda: dist.all_reduce(torch.ones(1000), group=group),
    ]
    first, second = (0, 1) if rank == 0 else (1, 0)
    found = {first: caught(calls[first]), second: caught(calls[second])}
    return found[0], found[1]


def _job_a3_apart(rank: int, ranks: int, steps: int) -> None:
    group, other = own_group(timeout_s=20), own_group(timeout_s=20)
    weight = integers(9, 8, seed=5)
    head = lmhead.LMHead(shard_of(weight, ranks, rank), 9, group)
    for step in range(steps):
        hidden, sums = integers(2, 8, seed=10 * step + rank), torch.full((1000,), rank + 1.0)
        early = rank == step % ranks  # the ranks cross in every step
        pending = dist.all_reduce(sums, group=other, async_op=True) if early else None
        logits = head(hidden)
        if pending is None:
            pending = dist.all_reduce(sums, group=other, async_op=True)
        pending.wait()
        same(logits, truth(hidden, weight).float(), step)
        same(sums, torch.full((1000,), 3.0), step)
    for used in (group, other):
        dist.destroy_process_group(used)


def test_a3_crossed_order_names_op_and_call() -> None:
    """One group, crossed order: gloo lets both ranks wait until its timeout and says only that.
    Ours says op, collective and call number, and to give the head a group of its own.
    """
    for rank, (head, reduce) in enumerate(pool(2).run(_job_a3_crossed)):
        assert reduce.error == "RuntimeError"  # the plain collective beside the head fails as well
        assert head.error == "CollectiveError" and head.seconds < TIMEOUT_S + LATE_S
        assert "lmhead logits: all_to_all failed" in head.text and "call 1" in head.text
        assert f"rank {rank} of 2" in head.text
        assert "give it a group of its own" in head.text
        assert head.record["number"] == 1 and head.record["collective"] == "all_to_all"


def test_a3_own_group_never_interleaves() -> None:
    """With a group of its own, the head and a pending all-reduce of another group cross in every
    step, and both are exact.
    """
    pool(2).run(_job_a3_apart, 10)


def _job_a4(rank: int, ranks: int) -> Caught:
    rows = (4, 0)
    weight, hidden = integers(7, 8, seed=6), integers(rows[rank], 8, seed=7 + rank)
    want = truth(hidden, weight).float()
    for kernels in KERNELS:
        for route in ROUTES:
            head = lmhead.LMHead(shard_of(weight, ranks, rank), 7, kernels=kernels, route=route)
            got = head(hidden, list(rows))
            assert got.shape == (rows[rank], 7) and got.is_contiguous()
            same(got, want, (kernels, route, "counts"))
            same(head(_padded(hidden, 4))[: rows[rank]], want, (kernels, route, "padded"))
    checked_mode()
    head = lmhead.LMHead(shard_of(weight, ranks, rank), 7)
    return caught(lambda: head(hidden))


def _job_a4_nobody(rank: int, ranks: int) -> None:
    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel or a collective was launched for no rows")

    head = lmhead.LMHead(torch.ones(4, 8), 7, kernels="triton")

    with (
        mock.patch("lmhead.kernels.gemm.launch_gemm", launched),
        mock.patch("lmhead.kernels.reassemble.launch_reassemble", launched),
        mock.patch("lmhead.kernels.reassemble.launch_copy", launched),
        mock.patch.object(Comm, "_run", launched),
    ):
        for counts in (None, [0] * ranks):
            assert head(torch.empty(0, 8), counts).shape == (0, 7)
        assert head.forward_gathered(torch.empty(0, 8)).shape == (0, 7)
        empty = lmhead.exchange(torch.empty(0, 4), vocab_size=7, kernels="triton")
        assert empty.shape == (0, 7)


def test_a4_rank_without_rows_gets_an_empty_result() -> None:
    """[0, H] on rank 1 while rank 0 has four rows: [0, 7] there, exact logits here, with counts and
    padded.  Neither declared nor padded, checked mode tells both ranks.
    """
    for undeclared in pool(2).run(_job_a4):
        assert undeclared.error == "ValueError"
        assert "1->0: 0 rows sent, 4 expected" in undeclared.text


def test_a4_no_rows_anywhere_launch_nothing() -> None:
    """No rank has rows: every way in returns [0, V] without a kernel and without a collective."""
    pool(2).run(_job_a4_nobody)


def _job_a5(rank: int, ranks: int) -> Caught:
    checked_mode()
    group = own_group(timeout_s=20)
    head = lmhead.LMHead(torch.ones(2, 4), 8, group)
    found = caught(lambda: head(torch.ones((8, 8, 4, 8)[rank], 4)))
    same(head(torch.ones(3, 4)), torch.full((3, 8), 4.0), "the group is still in step")
    dist.destroy_process_group(group)
    return found


def test_a5_one_bucket_for_all_ranks() -> None:
    """What decides a capture is the same on all ranks: of (1, 7, 3, 8) rows every rank takes 8.
    (Captured graphs per bucket come with the CUDA-graph decode; this is the value they are keyed
    by.)  Ranks that pad to different counts are told so in checked mode.
    """
    counts = [1, 7, 3, 8]
    known = [shapes.own_rows(counts[rank], counts, 4, rank) for rank in range(4)]
    assert [rows.largest for rows in known] == [8, 8, 8, 8]
    assert len({(rows.counts, rows.total, rows.uniform) for rows in known}) == 1
    padded = [shapes.own_rows(8, None, 4, rank) for rank in range(4)]
    assert {rows.counts for rows in padded} == {(8, 8, 8, 8)}
    for found in pool(4).run(_job_a5):
        assert found.error == "ValueError"
        assert "[8, 8, 8, 8] on rank 0,1,3" in found.text
        assert "[4, 4, 4, 4] on rank 2" in found.text


def _job_a6(rank: int, ranks: int) -> tuple[Caught, Caught, list[str]]:
    checked_mode()
    group = own_group(timeout_s=20)
    head = lmhead.LMHead(torch.ones(4, 4), 8, group)
    launched: list[str] = []
    plain = Comm._run

    def watch(self: Comm, collective: str, call: Call, *rest: Any) -> None:
        launched.append(f"{call.op}: {collective}")
        plain(self, collective, call, *rest)

    with mock.patch.object(Comm, "_run", watch):
        rows = (8, 4)[rank]
        first = caught(lambda: head(torch.ones(rows, 4)))
        second = caught(lambda: lmhead.exchange(torch.ones(2 * rows, 4), vocab_size=8, group=group))
    same(head(torch.ones(3, 4)), torch.full((3, 8), 4.0), "the group is still in step")
    dist.destroy_process_group(group)
    return first, second, launched


def test_a6_different_buckets_raise_before_the_big_collective() -> None:
    """Rank 0 comes with 8 rows, rank 1 with 4.  Plain gloo aborts one process and hands the other
    wrong data; in checked mode both raise, after one small all-gather and nothing else.
    """
    found = pool(2).run(_job_a6)
    for first, second, launched in found:
        for error in (first, second):
            assert error.error == "ValueError"
            assert "0->1: 8 rows sent, 4 expected" in error.text
            assert "1->0: 4 rows sent, 8 expected" in error.text
        assert launched == ["check: all_gather", "check: all_gather"]
    assert found[0][0].text == found[1][0].text


def _job_a7(rank: int, ranks: int, buckets: list[int]) -> list[tuple[int, ...]]:
    vocab = 20
    weight = integers(vocab, 8, seed=8)
    ready: dict[str, list[tuple[int, ...]]] = {}
    for kernels in KERNELS:
        head = lmhead.LMHead(shard_of(weight, ranks, rank), vocab, kernels=kernels)
        report = head.warmup(buckets if kernels == "torch" else [7])  # the interpreter is slow
        ready[kernels], held = list(report.rows), report.workspace_bytes
        for rows in [1, 3, 7] + ([28, 30] if kernels == "torch" else []):
            hidden = integers(rows, 8, seed=10 * rows + rank)
            same(head(hidden), truth(hidden, weight).float(), (kernels, rows))
        assert head._workspace.bytes() == held, "the largest bucket holds for all others"
    return ready["torch"]


def test_a7_row_counts_need_no_alignment() -> None:
    """Eight ranks, buckets 1, 2, 4, 28, 30: none of them a multiple of eight but every one is
    served, since the gathered rows are N times as many.  A bucket named twice is one bucket.
    """
    for ready in pool(8).run(_job_a7, [28, 1, 2, 2, 4, 30, 28]):
        assert sorted(ready) == [(rows,) * 8 for rows in (1, 2, 4, 28, 30)]


def _job_a8(rank: int, ranks: int) -> list[Caught]:
    head = lmhead.LMHead(torch.ones(4, 8), 8)
    hidden, gathered = torch.ones(3, 8), torch.ones(6, 8)

    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective was launched")

    with mock.patch.object(Comm, "_run", launched):
        return [
            caught(lambda: head(hidden, [661, 661])),
            caught(lambda: head.forward_gathered(gathered, [661, 3])),
            caught(lambda: lmhead.exchange(torch.ones(6, 4), vocab_size=8, row_counts=[661, 3])),
            caught(lambda: head(hidden, out=torch.empty(661, 8))),
            caught(lambda: head(hidden, [3])),
            caught(lambda: head(hidden, torch.tensor([3, 3]))),
            caught(lambda: head(hidden, [3, -3])),
        ]


def test_a8_row_metadata_must_match_the_tensor() -> None:
    """Metadata says 661 rows, the tensor has 3: a ValueError with both numbers before any
    collective, on every way in; never a read past the buffer.
    """
    for found in pool(2).run(_job_a8):
        assert [error.error for error in found] == [*["ValueError"] * 5, "TypeError", "ValueError"]
        for error in found[:3]:
            assert "661" in error.text or "664" in error.text
        assert "661" in found[0].text and "hidden has 3" in found[0].text
        assert "gathered has 6" in found[1].text
        assert "partial has 6" in found[2].text
        assert "out must be [3, 8], got (661, 8)" in found[3].text


def _job_a9(rank: int, ranks: int) -> tuple[Caught, Caught]:
    checked_mode()
    group = own_group(timeout_s=20)
    head = lmhead.LMHead(torch.ones(4, 4), 8, group)
    counts = [[2, 2], [2, 3]][rank]
    first = caught(lambda: head(torch.ones(counts[rank], 4), counts))
    partial = torch.ones(sum(counts), 4)
    second = caught(lambda: lmhead.exchange(partial, vocab_size=8, group=group, row_counts=counts))
    dist.destroy_process_group(group)
    return first, second


def test_a9_disagreeing_splits_name_the_pair() -> None:
    """Rank 0 sends two rows to rank 1, which expects three: in checked mode an error on both that
    names the pair and its numbers.
    """
    for both in pool(2).run(_job_a9):
        for found in both:
            assert found.error == "ValueError"
            assert "0->1: 2 rows sent, 3 expected" in found.text
            assert "1->0" not in found.text, "that pair agrees"


def _job_a10(rank: int, ranks: int) -> None:
    comm = Comm(own_group(timeout_s=10))
    call = Call("exchange", (), 1, "float32", 1)
    # Rank 0 sends nothing to anybody; rank 1 sends two elements to each.
    blocks = torch.tensor([] if rank == 0 else [10.0, 11.0, 12.0, 13.0])
    received = torch.full((2,), float("nan"))
    comm.exchange(received, blocks, [0, 2], [0, 0] if rank == 0 else [2, 2], call)
    same(received, torch.tensor([10.0, 11.0] if rank == 0 else [12.0, 13.0]), "raw splits")

    weight = integers(7, 8, seed=9)
    for kernels in KERNELS:
        head = lmhead.LMHead(shard_of(weight, ranks, rank), 7, comm.group, kernels=kernels)
        for counts in ([0, 2], [2, 0], [0, 1], [3, 2]):
            hidden = integers(counts[rank], 8, seed=rank + 1)
            same(head(hidden, counts), truth(hidden, weight).float(), (kernels, counts))
            assert head.last_route is not None and head.last_route.name == "all_to_all"
    dist.destroy_process_group(comm.group)


def test_a10_ranks_that_send_nothing() -> None:
    """Splits of zero are exact.

    The exchange sends each rank's true rows by split sizes: logits are wide (V), so padding them to
    the largest count would multiply the bytes that this head exists to save.  So are hidden
    rows sent on gloo; elsewhere their gather pads to the largest count, since an all-gather has no
    uneven form (tests/test_gather.py).  The same over NCCL needs two GPUs (one rank moves nothing).
    """
    pool(2).run(_job_a10)


def _job_a11(rank: int, ranks: int, rows: int, vocab: int) -> None:
    hidden, weight = address_head(ranks * rows, vocab)
    want = addresses(rank * rows, rows, vocab)
    own = hidden[rank * rows : (rank + 1) * rows]
    partial = addresses(0, ranks * rows, vocab)
    for kernels in KERNELS:
        for route in ROUTES:
            head = lmhead.LMHead(shard_of(weight, ranks, rank), vocab, kernels=kernels, route=route)
            same(head(own), want, (kernels, route))
            same(head.forward_gathered(hidden), want, (kernels, route, "gathered"))
            part = shard_of(partial.t(), ranks, rank).t().contiguous().to(torch.int32)
            got = lmhead.exchange(part, vocab_size=vocab, route=route, kernels=kernels)
            same(got, want.to(torch.int32), (kernels, route, "int32"))


@pytest.mark.parametrize("vocab", [20, 19])
def test_a11_every_row_and_column_in_its_place(vocab: int) -> None:
    """logits[r, v] = 1000 * global row + v: rank k gets rows 3k to 3k+2 only, and the columns in
    order, with a vocabulary that four ranks share evenly and with one that they do not.
    """
    pool(4).run(_job_a11, 3, vocab)


def _job_a12(rank: int, ranks: int) -> dict[str, list[int]]:
    rows = (1, 2)[rank]
    # Three rows in all; row r's winner lies in the other rank's shard: 6 for rank 0, 1 and 3.
    winners = torch.tensor([6, 1, 3])
    weight = -torch.ones(8, 3)
    weight[winners, torch.arange(3)] = 5.0
    own = torch.eye(3)[:1] if rank == 0 else torch.eye(3)[1:]
    found = {}
    for kernels in KERNELS:
        for route in ROUTES:
            head = lmhead.LMHead(shard_of(weight, ranks, rank), 8, kernels=kernels, route=route)
            padded = torch.zeros(2, 3)
            padded[:rows] = own
            found[f"{kernels} {route} padded"] = head(padded)[:rows].argmax(1).tolist()
            found[f"{kernels} {route} counts"] = head(own, [1, 2]).argmax(1).tolist()
    return found


def test_a12_winners_in_the_other_shard() -> None:
    """Every row's winner lies in the other rank's shard: greedy gives global ids of own rows; what
    was padded is cut after the exchange.  (Choosing tokens on the shard comes with the sampler.)
    """
    first, second = pool(2).run(_job_a12)
    assert set(map(tuple, first.values())) == {(6,)}
    assert set(map(tuple, second.values())) == {(1, 3)}


def _job_a13(rank: int, ranks: int) -> dict[str, tuple[int, torch.Tensor]]:
    hidden, weight = address_head(4, 7)
    found = {}
    for members in ([0, 1], [2, 3], [3, 1]):
        group = own_group(members, timeout_s=20)
        if rank in members:
            place = dist.get_rank(group)
            head = lmhead.LMHead(shard_of(weight, 2, place), 7, group)
            own = hidden[2 * place : 2 * place + 2]
            got = head(own)
            same(head(own, [2, 2]), got, members)
            by_name = torch.ops.lmhead.logits(
                *(own, head.weight, None, 7, group.group_name, 2, 1.0, None),
                *(torch.float32, torch.float32, None, "", ""),
            )
            same(by_name, got, members)
            found[str(members)] = (place, got)
    return found


def test_a13_subgroups_use_group_ranks() -> None:
    """Groups [2, 3] and [3, 1] of a world of four give what [0, 1] gives: shard k belongs to group
    rank k.  (torch sorts the members of a group, so in [3, 1] process 1 is rank 0.)
    """
    found = pool(4).run(_job_a13)
    for members in ([0, 1], [2, 3], [3, 1]):
        places = sorted(found[process][str(members)][0] for process in members)
        assert places == [0, 1]
        for process in members:
            place, logits = found[process][str(members)]
            same(logits, addresses(2 * place, 2, 7), (members, process))


def _job_a14(rank: int, ranks: int, folder: str) -> Caught:
    os.environ["LMHEAD_DUMP"] = folder
    group = own_group(timeout_s=TIMEOUT_S)
    head = lmhead.LMHead(torch.ones(5, 4, dtype=torch.bfloat16), 10, group)
    hidden = torch.ones(3, 4, dtype=torch.bfloat16)
    head(hidden)
    if rank == 1:
        time.sleep(TIMEOUT_S + 1)
    found = caught(lambda: head(hidden))
    assert found.record.pop("group") == group.group_name
    assert f"(group {group.group_name!r}, gloo)" in found.text
    return found


def test_a14_timeout_says_who_waited_in_what(tmp_path: Path) -> None:
    """Rank 1 sleeps past the timeout: the error holds op, group, rank, group size, rows, dtype and
    call number, in words and in `record`, with the backend's own error chained; the late rank gets
    an error too, not wrong data.
    """
    for rank, found in enumerate(pool(2).run(_job_a14, str(tmp_path))):
        assert found.error == "CollectiveError" and found.cause == "RuntimeError"
        assert found.seconds < TIMEOUT_S + LATE_S
        for words in ("lmhead logits", f"rank {rank} of 2", "call 2", "rows [3, 3]", "bfloat16"):
            assert words in found.text
        assert found.record == {
            "op": "logits",
            "collective": "all_to_all",
            "rank": rank,
            "ranks": 2,
            "rows": (3, 3),
            "columns": 4,  # H: it waited for hidden rows
            "dtype": "bfloat16",
            "number": 2,
            "backend": "gloo",
        }
        left = json.loads((tmp_path / f"lmhead-rank{rank}-call2.json").read_text())
        assert left["op"] == "logits" and left["error"] == found.text


def _job_a15(rank: int, ranks: int, folder: str) -> Caught:
    checked_mode()
    os.environ["LMHEAD_DUMP"] = folder
    counts = [[2, 2, 1, 4], [2, 2, 1, 4], [2, 2, 1, 5], [2, 2, 1, 4]][rank]
    head = lmhead.LMHead(torch.ones(3, 4), 10)
    head(torch.ones(2, 4))
    return caught(lambda: head(torch.ones(counts[rank], 4), counts))


def test_a15_dump_shows_the_bad_pair(tmp_path: Path) -> None:
    """Splits disagree between ranks 2 and 3: with LMHEAD_DUMP every rank leaves a JSON file from
    which rows, shard, dtype, call number and the bad pair can be read.
    """
    assert {found.error for found in pool(4).run(_job_a15, str(tmp_path))} == {"ValueError"}
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"lmhead-rank{rank}-call2.json" for rank in range(4)]
    for rank, name in enumerate(names):
        left = json.loads((tmp_path / name).read_text())
        assert (left["rank"], left["ranks"], left["number"]) == (rank, 4, 2)
        assert (left["columns"], left["dtype"]) == (3, "float32")
        said = [answer["row_counts"] for answer in left["ranks_said"]]
        bad = [
            (sender, receiver)
            for sender in range(4)
            for receiver in range(4)
            if said[sender][receiver] != said[receiver][receiver]
        ]
        assert bad == [(2, 3)] and "2->3: 5 rows sent, 4 expected" in left["error"]


def _job_a16(rank: int, ranks: int) -> tuple[Caught, Caught]:
    checked_mode()
    group = own_group(timeout_s=20)
    weight = integers(7, 8, seed=11)
    head = lmhead.LMHead(shard_of(weight, ranks, rank), 7, group)
    hidden = integers((2, 9)[rank], 8, seed=rank)
    dist.barrier(group)
    undeclared = caught(lambda: head(hidden))
    dist.barrier(group)
    one_refuses = caught(lambda: head(hidden, [2, 2]))
    same(head(hidden, [2, 9]), truth(hidden, weight).float(), "declared, it is served")
    dist.destroy_process_group(group)
    return undeclared, one_refuses


def test_a16_more_rows_on_one_rank_fail_at_once() -> None:
    """A step in which one rank wants logits of more rows (a prompt's) than it declared: in checked
    mode every rank raises in well under a second; declared in `row_counts` it is served.
    """
    for found in pool(2).run(_job_a16):
        for error in found:
            assert error.error == "ValueError" and error.seconds < 1
        assert "[2, 2] on rank 0" in found[0].text and "[9, 9] on rank 1" in found[0].text
        assert "rank 1 has 2 rows, but hidden has 9" in found[1].text
