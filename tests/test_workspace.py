"""Kept buffers: lmhead.workspace."""

from __future__ import annotations

import weakref

import pytest
import torch
from guards import Allocations

from lmhead import Workspace

CPU = torch.device("cpu")


def test_a_buffer_is_used_again_by_its_purpose() -> None:
    work = Workspace()
    first = work.take("partial", 12, torch.float32, CPU)
    assert first.shape == (12,) and first.dtype == torch.float32
    with Allocations() as allocated:
        again = work.take("partial", 5, torch.float32, CPU)
        cast = work.take("partial", 24, torch.bfloat16, CPU)
    assert allocated.seen == []
    assert first.data_ptr() == again.data_ptr() == cast.data_ptr()
    assert again.shape == (5,) and cast.shape == (24,) and cast.dtype == torch.bfloat16
    other = work.take("received", 12, torch.float32, CPU)
    assert other.data_ptr() != first.data_ptr()
    assert work.bytes() == {"partial": 48, "received": 48}


def test_a_buffer_grows_and_never_shrinks() -> None:
    work = Workspace()
    work.take("partial", 4, torch.float32, CPU)
    work.take("partial", 6, torch.float32, CPU)
    assert work.bytes() == {"partial": 24}
    work.take("partial", 1, torch.int64, CPU)
    assert work.bytes() == {"partial": 24}


@pytest.mark.parametrize("captured", [False, True])
def test_an_outgrown_buffer_stays_only_for_a_captured_graph(captured: bool) -> None:
    """A graph replays into the address that it saw: that memory is never given back."""
    work = Workspace()
    address = work.take("partial", 4, torch.float32, CPU).data_ptr()
    buffer = weakref.ref(work._buffers["partial"])
    if captured:
        work.capturing(True)
        work.capturing(False)
    work.take("partial", 8, torch.float32, CPU)
    kept = buffer()
    assert (kept is not None and kept.data_ptr() == address) == captured
    expected = {"partial": 32} | ({"kept for captured graphs": 16} if captured else {})
    assert work.bytes() == expected


def test_clear_gives_everything_back() -> None:
    work = Workspace()
    work.take("partial", 4, torch.float32, CPU)
    work.capturing(True)
    work.capturing(False)
    work.take("partial", 8, torch.float32, CPU)
    work.clear()
    assert work.bytes() == {}
    work.take("partial", 4, torch.float32, CPU)
    work.take("partial", 8, torch.float32, CPU)
    assert work.bytes() == {"partial": 32}, "the pin went with the graphs"


def test_no_buffer_grows_while_a_graph_is_captured() -> None:
    work = Workspace()
    work.take("partial", 4, torch.float32, CPU)
    work.capturing(True)
    assert work.take("partial", 4, torch.float32, CPU).numel() == 4
    with pytest.raises(RuntimeError, match="holds 16 of the 32 bytes that 'partial' needs"):
        work.take("partial", 8, torch.float32, CPU)
    with pytest.raises(RuntimeError, match="once before the capture"):
        work.take("received", 1, torch.float32, CPU)
    assert work.bytes() == {"partial": 16}


def test_another_device_gets_another_buffer() -> None:
    work = Workspace()
    work.take("partial", 4, torch.float32, CPU)
    moved = work.take("partial", 4, torch.float32, torch.device("meta"))
    assert moved.device.type == "meta" and work.bytes() == {"partial": 16}


def test_no_elements_need_no_buffer() -> None:
    work = Workspace()
    with Allocations() as allocated:
        assert work.take("received", 0, torch.bfloat16, CPU).shape == (0,)
    assert allocated.seen == []
