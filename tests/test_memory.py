"""The warm-up report: what it says is held is what is held, and device memory goes to the purpose
that took it.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from data_head import KERNELS, Arithmetic, whole
from guards import Living
from ranks import pool

import lmhead
from lmhead import memory
from lmhead.memory import Memory, taken_outside

MIB = 1 << 20
# (V, H, what to warm up for): even rows, a vocabulary with padding, uneven rows with an idle rank.
SHAPES: tuple[tuple[int, int, Any], ...] = (
    (24, 16, (4, 1)),
    (1999, 48, (36,)),
    (300, 64, ([3, 0, 5, 1], 2)),
)


def _held(rank: int, ranks: int, kernels: str) -> list[str]:
    """The workspace's bytes against the storages that outlive a warm-up, and later calls."""
    wrong: list[str] = []
    for vocab, hidden, rows in SHAPES:
        weight, bias = whole(vocab, hidden, seed=1), whole(vocab, seed=2)
        wanted = [entry if isinstance(entry, int) else entry[:ranks] for entry in rows]
        head = Arithmetic(bias=True, wire_dtype=torch.bfloat16).head(
            weight, bias, ranks, rank, kernels=kernels
        )
        with Living() as living:
            report = head.warmup(wanted)
        reported = sum(report.workspace_bytes.values())
        really = living.bytes(reported)
        if reported != really or (ranks > 1 and not really):
            wrong.append(
                f"V={vocab} {rows}: {report.workspace_bytes} reported, {really} bytes live"
            )
        with Living() as later:
            for entry in wanted:
                own = entry if isinstance(entry, int) else entry[rank]
                given = None if isinstance(entry, int) else entry
                head(whole(own, hidden, seed=3), given)
        if later.bytes(0) or head._workspace.bytes() != report.workspace_bytes:
            wrong.append(f"V={vocab} {rows}: {later.bytes(0)} bytes outlive warmed calls")
        if report.communicator_bytes is not None or report.kernel_bytes is not None:
            wrong.append(f"{report}: measured on a CPU?")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kernels", KERNELS)
def test_reported_workspace_bytes_are_what_is_allocated(kernels: str, ranks: int) -> None:
    """Three shapes; and warmed calls leave nothing behind."""
    assert pool(ranks).run(_held, kernels) == [[]] * ranks


def test_torchs_own_reserve_is_not_counted_twice() -> None:
    before = Memory(free=1000, reserved=100)
    assert before.taken_outside(Memory(free=600, reserved=300)) == 200
    assert before.taken_outside(Memory(free=1200, reserved=100)) == 0, "another process gave back"
    assert taken_outside(None, before) is None and taken_outside(before, None) is None
    assert memory.read(torch.device("cpu")) is None


def test_bytes_go_to_the_purpose_that_took_them() -> None:
    """Readings as a GPU might give them: built, connected, called."""
    readings = iter(
        Memory(free * MIB, reserved * MIB)
        for free, reserved in (
            (1000, 10),  # before the head was built
            (900, 10),  # its check made the communicator: 100
            (900, 10),
            (560, 50),  # warm-up connected the peers: 300, and took 40 of torch's
            (520, 70),  # calls: 20 of kernels, 20 more of torch's
            (520, 70),  # a second warm-up takes nothing more
            (520, 70),
            (520, 70),
        )
    )
    with mock.patch.object(memory, "read", lambda device: next(readings)):
        head = lmhead.LMHead(whole(24, 16, seed=1), 24)
        first, second = head.warmup(4), head.warmup(4)
    assert first.communicator_bytes == 400 * MIB and first.kernel_bytes == 20 * MIB
    assert first.before == Memory(900 * MIB, 10 * MIB) and first.after == Memory(
        520 * MIB, 70 * MIB
    )
    assert first.device_bytes == 380 * MIB
    assert second.communicator_bytes == 400 * MIB and second.kernel_bytes == 0
    assert second.device_bytes == 0
    text = str(first)
    for part in ("400.0 MiB of the communicator", "20.0 MiB of kernels", "900.0 MiB free", "520.0"):
        assert part in text
