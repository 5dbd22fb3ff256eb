"""Cases K and L: the life of the process group; uneven and nested shards."""

from __future__ import annotations

import ast
import datetime
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
    Inputs,
    address_head,
    addresses,
    caught,
    every_path,
    integers,
    same,
    shard_of,
    truth,
)
from ranks import fresh, own_group, pool
from torch.distributed.device_mesh import init_device_mesh

import lmhead
from lmhead import shapes

TIMEOUT_S = 3.0
LATE_S = 4.0


def _job_k1(rank: int, ranks: int, folder: str, lives: int) -> list[tuple[str, str]]:
    names = []
    for life in range(lives):
        place = dist.get_rank()
        assert place == (rank + life) % ranks
        # Other weights and sizes in every life, and the ranks change places: whatever was kept of
        # an earlier one would show.
        vocab, rows = 7 + 2 * life, 2 + life
        weight, hidden = integers(vocab, 8, seed=life), integers(rows, 8, seed=10 + place + life)
        want = truth(hidden, weight).float()
        group = dist.new_group(backend="gloo")
        names.append((dist.group.WORLD.group_name, group.group_name))
        for used in (None, group):
            name = (group if used is not None else dist.group.WORLD).group_name
            for kernels in KERNELS:
                head = lmhead.LMHead(shard_of(weight, ranks, place), vocab, used, kernels=kernels)
                same(head(hidden), want, (life, kernels))
                by_name = torch.ops.lmhead.logits(
                    *(hidden, head.weight, None, vocab, name, ranks, 1.0, None),
                    *(torch.float32, torch.float32, None, kernels, ""),
                )
                same(by_name, want, (life, kernels, name))
                head.close()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/life{life}", ranks)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=(rank + life + 1) % ranks,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=30),
        )
    return names


def test_k1_init_destroy_init_again(tmp_path: Path) -> None:
    """The default group is destroyed and made anew, with the ranks in other places: heads on it
    and on a group of their own work in each of three lives, by name too, though the groups' names
    come back.
    """
    with fresh(2) as two:
        for names in two.run(_job_k1, str(tmp_path), 3):
            assert len(names) == 3 and len(set(names)) == 1, "torch gives the names again"


def _job_k2(rank: int, ranks: int) -> dict[str, Any]:
    broken = own_group(timeout_s=TIMEOUT_S)
    weight = integers(7, 8, seed=1)
    heads = [
        lmhead.LMHead(shard_of(weight, ranks, rank), 7, broken, kernels=kernels)
        for kernels in KERNELS
    ]
    hidden = integers(3, 8, seed=2 + rank)
    if rank == 1:
        time.sleep(TIMEOUT_S + 1)
    timed_out = caught(lambda: heads[0](hidden))
    for head in heads:
        head.close()
        head.close()  # twice is once
    closed = [caught(lambda head=head: head(hidden)) for head in heads]
    closed += [
        caught(lambda: heads[0].forward_gathered(torch.ones(6, 8))),
        caught(lambda: heads[0].warmup(3)),
    ]
    destroyed = caught(lambda: dist.destroy_process_group(broken))
    again = own_group(timeout_s=20)
    for kernels in KERNELS:
        head = lmhead.LMHead(shard_of(weight, ranks, rank), 7, again, kernels=kernels)
        same(head(hidden), truth(hidden, weight).float(), kernels)
    dist.destroy_process_group(again)
    return {"timed out": timed_out, "closed": closed, "destroyed": destroyed}


def test_k2_close_after_a_timeout_then_a_new_group() -> None:
    """A collective has timed out: the head can be closed (twice), the group destroyed, and a new
    group with a new head works; the old head says that it is closed.
    """
    for found in pool(2).run(_job_k2):
        assert found["timed out"].error == "CollectiveError"
        assert found["timed out"].seconds < TIMEOUT_S + LATE_S
        assert found["destroyed"].error == ""
        for refused in found["closed"]:
            assert refused.error == "RuntimeError" and "closed" in refused.text
            assert refused.seconds < 1


def _job_k3(rank: int, ranks: int) -> Caught | None:
    group = own_group([0, 1], timeout_s=20)  # by the caller, on all ranks of the world

    def made(*_: Any, **__: Any) -> None:
        raise AssertionError("a group was made behind the caller's back")

    names = ("new_group", "split_group", "new_subgroups", "init_process_group")
    with mock.patch.multiple(dist, **dict.fromkeys(names, made)):
        if rank == 2:  # no member: builds nothing, and is refused at once if it tries
            return caught(lambda: lmhead.LMHead(torch.ones(4, 4), 7, group))
        hidden, weight = address_head(4, 7)
        for kernels in KERNELS:
            head = lmhead.LMHead(shard_of(weight, 2, rank), 7, group, kernels=kernels)
            head.warmup([2, [1, 3]])
            same(head(hidden[2 * rank : 2 * rank + 2]), addresses(2 * rank, 2, 7), kernels)
    return None


def test_k3_no_group_is_made_behind_the_callers_back() -> None:
    """World of three, head on [0, 1], rank 2 builds nothing: nobody waits for it, since the head
    takes an existing group and makes none; a non-member's try is a ValueError at once.
    """
    first, second, third = pool(3).run(_job_k3)
    assert first is None and second is None
    assert third.error == "ValueError" and "not a member" in third.text and third.seconds < 1


@pytest.mark.parametrize("vocab", [5, 10])
def test_l1_uneven_shards_against_one_process(vocab: int) -> None:
    """V = 10 and V = 5 on four ranks (the last rank then holds padding alone): every path gives the
    single-process matmul's values and exactly V columns; shards put together give V rows.
    """
    hidden, weight = integers(8, 8, seed=3), integers(vocab, 8, seed=4)
    want = truth(hidden, weight).float()
    for path, logits in every_path(4, Inputs(list(hidden.chunk(4)), weight, vocab)).items():
        assert logits.shape == (8, vocab), path
        same(logits, want, path)
    shards = [shapes.shard_weight(weight, 4, rank) for rank in range(4)]
    assert {shard.shape[0] for shard in shards} == {-(-vocab // 4)}
    same(shapes.unshard_weight(shards, vocab), weight, "round trip")


def test_l1_no_test_takes_dtensor_as_the_oracle() -> None:
    """DTensor's redistribution returns padding rows for uneven shards, so no test may compare with
    it: nothing in tests/ imports torch.distributed.tensor.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    assert Path(__file__) in files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            assert not any(name.startswith("torch.distributed.tensor") for name in names), path


def _job_l2(rank: int, ranks: int, vocab: int) -> tuple[int, torch.Tensor, Caught]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    refused = caught(lambda: lmhead.LMHead(torch.ones(2, 4), vocab, mesh))
    # A name may be flattened once in a process's life, and another test may have done so.
    flat = mesh._flatten(f"head{vocab}")
    place = dist.get_rank(flat.get_group())
    hidden, weight = address_head(2 * ranks, vocab)
    own, found = hidden[2 * place : 2 * place + 2], []
    for group in (flat, flat.get_group()):
        for kernels in KERNELS:
            for route in ROUTES:
                shard = shard_of(weight, ranks, place)
                head = lmhead.LMHead(shard, vocab, group, kernels=kernels, route=route)
                found.append(head(own))
    # Over one dimension of the mesh: two groups of two, each with the whole vocabulary.
    nested = mesh["tp"]
    inner = nested.get_local_rank()
    head = lmhead.LMHead(shard_of(weight, 2, inner), vocab, nested)
    found.append(head(own))
    for logits in found:
        same(logits, found[0])
    return place, found[0], refused


def test_l2_nested_groups_keep_the_order() -> None:
    """A 2x2 mesh (dp, tp) flattened, V = 5: columns 0 to 4 in order, on every rank its own rows;
    the same over one dimension of it.  The 2-D mesh itself is refused, in words, on every rank.
    """
    found = pool(4).run(_job_l2, 5)
    assert sorted(place for place, _, _ in found) == [0, 1, 2, 3]
    for place, logits, refused in found:
        same(logits, addresses(2 * place, 2, 5), place)
        assert refused.error == "ValueError" and "1-D DeviceMesh, got 2-D" in refused.text
        assert refused.seconds < 1
