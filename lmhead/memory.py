"""Device memory as an engine must reckon with it: what the device has free, and how much of the
rest is torch's own, which it can use again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Memory:
    """One device at one moment, in bytes.  Other processes on the device move `free` too."""

    free: int
    reserved: int  # by torch's caching allocator, in use or not

    def taken_outside(self, later: Memory) -> int:
        """What was taken from the device until `later`, torch's allocator left out: communicators,
        loaded kernels, the driver's own.
        """
        return max(0, (self.free - later.free) - (later.reserved - self.reserved))


def read(device: torch.device) -> Memory | None:
    """The memory of a CUDA device now; None for another kind, which nobody measures so."""
    if device.type != "cuda":
        return None
    return Memory(torch.cuda.mem_get_info(device)[0], torch.cuda.memory_reserved(device))


def taken_outside(earlier: Memory | None, later: Memory | None) -> int | None:
    """`Memory.taken_outside`, None where nothing was measured."""
    return None if earlier is None or later is None else earlier.taken_outside(later)
