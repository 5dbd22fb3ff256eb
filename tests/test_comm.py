"""The collectives and their errors: lmhead.comm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_head import Arithmetic, Raised, collectives, normal, raised
from ranks import pool
from torch.distributed.device_mesh import init_device_mesh

import lmhead
from lmhead import groups as groups_module
from lmhead import shapes
from lmhead.comm import CHECK_BYTES, Call, Comm

CPU = torch.device("cpu")
CALL = Call("logits", (2, 2), 3, "float32", 7)
# What a refusal may take: two small collectives on busy cores, and far under any timeout.
QUICK_S = 5.0


def test_no_group_is_one_rank() -> None:
    """Nothing here has initialised torch.distributed."""
    assert not dist.is_initialized()
    for comm in (Comm(), Comm(None, CPU), Comm.local()):
        assert (comm.ranks, comm.rank, comm.name, comm.group) == (1, 0, "", None)
        assert comm.warm_up(CPU) == 0
        comm.agree({"anything": 1}, None, CALL, CPU)
        with pytest.raises(KeyError, match="mine"):
            comm.agree({}, KeyError("mine"), CALL, CPU)
    assert groups_module.resolve("") is None


@pytest.mark.parametrize("group", ["tp", 0, object()])
def test_what_is_no_group_is_refused(group: object) -> None:
    with pytest.raises(TypeError, match=f"1-D DeviceMesh or None, got {type(group).__name__}"):
        Comm(group)  # type: ignore[arg-type]


def _groups(rank: int, ranks: int) -> dict[str, Any]:
    """Every way to name a group, by ranks in it; on 4 ranks, the mesh is 2 x 2."""
    found: dict[str, Any] = {}

    def tell(name: str, comm: Comm) -> None:
        send = torch.full((comm.ranks,), float(rank))
        receive = torch.empty(comm.ranks)
        with collectives() as seen:
            comm.exchange(receive, send, None, None, CALL)
        assert all(moved.flat for moved in seen)
        found[name] = (comm.rank, comm.ranks, comm.backend, receive.tolist())
        assert groups_module.resolve(comm.name) is comm.group

    tell("None", Comm())
    tell("WORLD", Comm(dist.group.WORLD, CPU))
    tell("1-D mesh", Comm(init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), CPU))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tell("slice", Comm(mesh["tp"], CPU))
    found["2-D mesh"] = raised(lambda: Comm(mesh, CPU))
    # Ranks within this group are not the global ones, and two ranks are no members.
    pair = dist.new_group([1, 2], backend="gloo")
    if rank in (1, 2):
        tell("pair", Comm(pair, CPU))
    else:
        found["pair"] = raised(lambda: Comm(pair, CPU))
    found["no backend"] = raised(lambda: Comm(dist.group.WORLD, torch.device("meta")))
    alone = [dist.new_group([r], backend="gloo") for r in range(ranks)][rank]
    found["alone"] = (Comm(alone, CPU).ranks, Comm(alone, CPU).rank)
    return found


def test_groups() -> None:
    """A rank is its place in the group, a group is used as given, and what does not fit is a
    ValueError with the reason.
    """
    for rank, found in enumerate(pool(4).run(_groups)):
        everyone = (rank, 4, "gloo", [0.0, 1.0, 2.0, 3.0])
        assert found["None"] == found["WORLD"] == found["1-D mesh"] == everyone
        low = rank // 2 * 2
        assert found["slice"] == (rank % 2, 2, "gloo", [float(low), low + 1.0])
        assert found["2-D mesh"].error == "ValueError"
        assert "1-D DeviceMesh, got 2-D (2, 2)" in found["2-D mesh"].text
        if rank in (1, 2):
            assert found["pair"] == (rank - 1, 2, "gloo", [1.0, 2.0])
        else:
            assert found["pair"].error == "ValueError"
            assert "not a member" in found["pair"].text
        assert found["no backend"].error == "ValueError"
        assert "no backend for meta tensors" in found["no backend"].text
        assert found["alone"] == (1, 0)


def _agreements(rank: int, ranks: int) -> dict[str, Raised]:
    comm = Comm()

    def tell(fields: dict[str, Any], error: Exception | None = None) -> Raised:
        return raised(lambda: comm.agree(fields, error, CALL, CPU))

    long = {"text": "x" * CHECK_BYTES}
    return {
        "equal": tell({"a": 1, "b": [1, None, "two"]}),
        "differ": tell({"a": rank // 2, "b": "same", "c": rank == 1}),
        "counts": tell({"row_counts": [2, 3, 1, 1] if rank == 0 else [2, 2, 1, 1]}),
        "one refuses": tell({"a": rank}, TypeError("no fp8 here") if rank == 2 else None),
        "long": tell(long),
        "long refusal": tell(
            {}, ValueError("yyyy" + "\u00fc" * CHECK_BYTES) if rank == 0 else None
        ),
    }


def test_agree_lets_all_ranks_go_on_or_none() -> None:
    """One all-gather; the same text on every rank, except that a rank raises its own error as it
    is.
    """
    answers = pool(4).run(_agreements)
    for rank, found in enumerate(answers):
        assert all(len(answer.collectives) == 1 for answer in found.values())
        assert found["equal"].error == ""
        for name in ("differ", "counts", "long"):
            assert found[name].error == "ValueError" and found[name].text == answers[0][name].text
        assert found["differ"].text == (
            "lmhead logits, call 7: the ranks disagree: a is 0 on rank 0,1, 1 on rank 2,3; "
            "c is false on rank 0,2,3, true on rank 1"
        )
        assert "0->1: 3 rows sent, 2 expected" in found["counts"].text
        assert "is too long" in found["long"].text
        refused = found["one refuses"]
        if rank == 2:
            assert (refused.error, refused.text) == ("TypeError", "no fp8 here")
        else:
            assert refused.error == "ValueError"
            assert refused.text.endswith("rank 2 refused: TypeError: no fp8 here")
        assert found["long refusal"].error == "ValueError"
        assert "yyyy" in found["long refusal"].text
        assert max(answer.seconds for answer in found.values()) < QUICK_S


def _failing(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """A collective that fails at once, on every rank, in the two that the head uses."""
    os.environ["LMHEAD_DUMP"] = folder
    found: dict[str, Any] = {}
    weight = normal(3, 4, seed=rank)
    for route, name in (("all_to_all", "all_to_all_single"), ("all_gather", "all_gather_single")):
        head = lmhead.LMHead(weight, 6, route=route)
        head(torch.ones(2, 4))
        cause = RuntimeError("peer is gone\nand more lines")
        name = name if hasattr(dist, name) else "all_gather_into_tensor"
        with mock.patch.object(dist, name, side_effect=cause):
            try:
                head(torch.ones(2, 4))
            except lmhead.CollectiveError as error:
                assert error.__cause__ is cause and isinstance(error, RuntimeError)
                found[route] = (str(error), error.record)
        dist.barrier()  # nobody's next constructor may meet a rank that is still in this one
        head(torch.ones(2, 4))  # the head itself is not broken
    return found


def test_a_failed_collective_says_which_and_where(tmp_path: Path) -> None:
    for rank, found in enumerate(pool(2).run(_failing, str(tmp_path))):
        assert sorted(found) == ["all_gather", "all_to_all"]
        for route, (text, record) in found.items():
            assert f"lmhead logits: {route} failed on rank {rank} of 2" in text
            assert "gloo" in text and "call 2, rows [2, 2]" in text and "float32" in text
            assert "peer is gone" in text and "more lines" not in text
            assert record["collective"] == route and record["rank"] == rank
            assert record["ranks"] == 2 and record["number"] == 2 and record["rows"] == (2, 2)
            assert record["op"] == "logits" and repr(record["group"]) in text
        dumped = json.loads((tmp_path / f"lmhead-rank{rank}-call2.json").read_text())
        assert dumped["rank"] == rank and dumped["rows"] == [2, 2]
        assert "peer is gone" in dumped["error"]


def _guards(rank: int, ranks: int) -> list[Raised]:
    """What would be silently wrong in a backend never reaches it."""
    comm = Comm()
    memory = torch.zeros(4 * ranks)
    same, square = memory[: 2 * ranks], memory.view(2, -1)
    return [
        raised(lambda: comm.exchange(same, same, None, None, CALL)),
        raised(lambda: comm.exchange(same, memory[1 : 2 * ranks + 1], None, None, CALL)),
        raised(lambda: comm.exchange(square, square.clone(), None, None, CALL)),
        raised(lambda: comm.exchange(memory[::2], torch.zeros(2 * ranks), None, None, CALL)),
        raised(lambda: comm.gather(memory.view(ranks, -1), torch.zeros(4), CALL)),
    ]


def test_overlapping_or_shaped_payloads_never_reach_a_backend() -> None:
    for found in pool(2).run(_guards):
        assert [(guard.error, guard.collectives) for guard in found] == [("AssertionError", ())] * 5


def _moved(rank: int, ranks: int) -> list[str]:
    """`shapes.moved_bytes` against the bytes that torch.distributed was given."""
    wrong, uneven = [], [0, 3, 1, 2][:ranks]
    for dtype, arithmetic in (
        (torch.bfloat16, Arithmetic()),
        (torch.bfloat16, Arithmetic(logits_dtype=torch.float32)),
        (torch.float32, Arithmetic(wire_dtype=torch.float16)),
    ):
        weight, bias = normal(11, 8, seed=1, dtype=dtype), normal(11, seed=2)
        itemsize = (arithmetic.wire_dtype or arithmetic.logits_dtype or dtype).itemsize
        for route in ("all_to_all", "all_gather"):
            head = arithmetic.head(weight, bias, ranks, rank, route=route)
            for counts in (None, uneven):
                rows = shapes.own_rows(5 if counts is None else counts[rank], counts, ranks, rank)
                with collectives() as seen:
                    head(normal(rows.own, 8, seed=rank, dtype=dtype), counts)
                hidden, logits = seen
                # On gloo a copy per rank, own one included, in true counts.
                width = 8 * dtype.itemsize
                given = (hidden.collective, hidden.in_bytes, hidden.out_bytes)
                if given != ("all_to_all_single", ranks * rows.own * width, rows.total * width):
                    wrong.append(f"hidden: {hidden}")
                if route == "all_to_all":
                    own = rows.own * head.shard * itemsize
                    counted = max(logits.in_bytes - own, logits.out_bytes - own)
                else:
                    counted = logits.out_bytes - logits.in_bytes
                said = shapes.moved_bytes(route, rows, head.shard, itemsize)
                if said != counted or said == 0:
                    wrong.append(f"{dtype} {route} {counts}: {said} said, {counted} counted")
                if not (hidden.flat and logits.flat):
                    wrong.append(f"{dtype} {route} {counts}: not flat")
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_moved_bytes_are_the_bytes_at_the_collectives(ranks: int) -> None:
    assert pool(ranks).run(_moved) == [[]] * ranks


def _warm_up(rank: int, ranks: int) -> tuple[int, list[str]]:
    with collectives() as seen:
        moved = Comm().warm_up(CPU)
    return moved - sum(one.out_bytes for one in seen), [one.collective for one in seen]


def test_warm_up_runs_both_collectives_once() -> None:
    for difference, names in pool(2).run(_warm_up):
        assert difference == 0
        assert names[0] == "all_to_all_single" and names[1].startswith("all_gather")
        assert len(names) == 2


def _crossed_checks(rank: int, ranks: int) -> list[str]:
    """One rank builds a head while the other calls: both find out in the same small all-gather."""
    head = lmhead.LMHead(torch.eye(4)[2 * rank : 2 * rank + 2], 4)
    found = []
    for builder in (0, 1):
        try:
            if rank == builder:
                lmhead.LMHead(torch.eye(4)[2 * rank : 2 * rank + 2], 4)
            else:
                os.environ["LMHEAD_CHECK"] = "1"
                lmhead.exchange(torch.ones(2, 2), vocab_size=4)
        except ValueError as error:
            found.append(str(error).split(": ", 1)[1])
    head.close()
    return found


def test_different_calls_that_meet_in_the_check_raise_on_both_ranks() -> None:
    ours, theirs = pool(2).run(_crossed_checks)
    assert ours == theirs and len(ours) == 2
    assert all(text.startswith("the ranks disagree: ") and "row_counts is" in text for text in ours)


def _warmup_refused(rank: int, ranks: int) -> list[object]:
    """Rows and `out` are looked at before the first collective; then a good call still works."""
    head = lmhead.LMHead(torch.eye(4)[2 * rank : 2 * rank + 2], 4)
    found: list[object] = []
    with mock.patch.object(Comm, "exchange", side_effect=AssertionError("a collective")):
        for rows, out in (([2, -1], None), ([1, 3], torch.empty(2, 4)), ([2], torch.empty(2, 5))):
            try:
                head.warmup(rows, out=out)
            except ValueError as error:
                found.append(str(error))
    found.append(len(head.warmup([1, 2], out=torch.empty(2, 4)).rows))
    return found


def test_warmup_refuses_bad_rows_and_buffers_before_any_collective() -> None:
    for found in pool(2).run(_warmup_refused):
        assert "non-negative ints, got [-1, -1]" in found[0]
        assert "out must be [3, 4], got (2, 4)" in found[1]
        assert "out must be [2, 4], got (2, 5)" in found[2]
        assert found[3] == 2


def _unwritable_dump(rank: int, ranks: int, folder: str) -> str:
    os.environ |= {"LMHEAD_CHECK": "1", "LMHEAD_DUMP": f"{folder}/file/below"}
    try:
        lmhead.exchange(torch.ones(2 + 2 * rank, 2), vocab_size=4)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_dump_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for text in pool(2).run(_unwritable_dump, str(tmp_path)):
        assert text.startswith("ValueError: ") and "the ranks disagree" in text
