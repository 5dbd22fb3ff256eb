"""A rank dies in mid-decode: the others end with the contract's error, in the group's timeout."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data_cases import caught, checked_mode, integers, same, shard_of, truth
from ranks import fresh, own_group

import lmhead
from lmhead.comm import Comm

TIMEOUT_S = 6.0
# What busy cores may add until a process that has been woken runs again.
LATE_S = 3.0
VICTIM, DEADLY_STEP = 2, 5


def _decode(rank: int, ranks: int, folder: str, moment: str) -> dict[str, Any]:
    """Greedy decoding in which one rank is killed, without a chance to say goodbye."""
    group = own_group(timeout_s=TIMEOUT_S)
    weight = integers(10, 8, seed=1, dtype=torch.bfloat16)
    head = lmhead.LMHead(shard_of(weight, ranks, rank), 10, group)
    counts = [2, 1, 3, 2]
    checked_mode()
    checked = lmhead.LMHead(shard_of(weight, ranks, rank), 10, own_group(timeout_s=TIMEOUT_S))
    hidden = integers(counts[rank], 8, seed=2 + rank, dtype=torch.bfloat16)
    head.warmup([counts])  # call 1
    plain = Comm.exchange

    def die() -> None:
        (Path(folder) / "died").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def deadly(self: Comm, *args: Any) -> None:
        if step == DEADLY_STEP and args[-1].columns == head.shard:  # logits, not hidden rows
            time.sleep(0.5)  # until the others wait in the exchange
            die()
        plain(self, *args)

    deadline = time.monotonic() + 30
    with mock.patch.object(
        Comm, "exchange", deadly if rank == VICTIM and moment == "in" else plain
    ):
        for step in range(100):
            if rank == VICTIM and moment == "between" and step == DEADLY_STEP:
                die()
            assert time.monotonic() < deadline, "decoding went on without the dead rank"
            found = caught(lambda hidden=hidden: head(hidden, counts))
            if found.error:
                break
            same(found.value, truth(hidden, weight).bfloat16(), step)
            hidden = weight[found.value.float().argmax(1)] + hidden.clamp(-1, 1)
    noticed = time.monotonic()
    assert found.record.pop("group") == group.group_name
    assert f"group {group.group_name!r}" in found.text
    died = float((Path(folder) / "died").read_text())
    again = caught(lambda: head(hidden, counts))  # the group is gone for good, and says so
    named = caught(lambda: checked(hidden, counts))
    head.close()
    dist.destroy_process_group(group)
    return {"error": found, "steps": step, "after": noticed - died, "again": again, "named": named}


# On gloo hidden rows (H = 8) and logits (S = 3) both move by an all-to-all: the columns tell which.
@pytest.mark.parametrize(("moment", "columns"), [("in", 3), ("between", 8)])
def test_dead_rank_ends_the_others_in_time(tmp_path: Path, moment: str, columns: int) -> None:
    """Rank 2 of 4 is killed by SIGKILL, in the middle of a call (hidden rows gathered, logits not
    yet exchanged) or between two: every other rank gets `CollectiveError` with op, group, rank, N,
    rows, dtype and call number, the backend's error chained, no later than the group's timeout.
    """
    with fresh(4) as four:
        outcomes = four.outcomes(_decode, str(tmp_path), moment, timeout=60)
    assert outcomes[VICTIM].error == "Died"
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM:
            continue
        assert outcome.error == "", outcome.trace
        found, after = outcome.value["error"], outcome.value["after"]
        assert found.error == "CollectiveError" and found.cause == "RuntimeError"
        assert outcome.value["steps"] == DEADLY_STEP
        assert 0 <= after < TIMEOUT_S + LATE_S, f"rank {rank} noticed after {after:.1f} s"
        assert found.record == {
            "op": "logits",
            "collective": "all_to_all",
            "rank": rank,
            "ranks": 4,
            "rows": (2, 1, 3, 2),
            "columns": columns,
            "dtype": "bfloat16",
            "number": DEADLY_STEP + 2,  # the warm-up was call 1
            "backend": "gloo",
        }
        for words in (
            f"lmhead logits: all_to_all failed on rank {rank} of 4",
            f"call {DEADLY_STEP + 2}",
            "rows [2, 1, 3, 2]",
            "bfloat16",
            "died",
        ):
            assert words in found.text
        named = outcome.value["named"]  # a head that agrees on every call knows who is missing
        assert named.error == "CollectiveError" and named.record["absent"] == [VICTIM]
        assert f"rank {VICTIM} did not arrive within" in named.text
        assert outcome.value["again"].error == "CollectiveError"
        assert outcome.value["again"].seconds < TIMEOUT_S + LATE_S
