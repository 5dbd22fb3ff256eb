"""Kept buffers: what a warmed call needs beside its result is allocated once and used again.

A buffer belongs to a purpose ("gathered", "partial", "received", ...), grows when a larger call
comes, and never shrinks.  Two calls that run at the same time (on two streams) must not share a
workspace.

No buffer belongs to a process group: a workspace serves the next group as it served the last.
"""

from __future__ import annotations

import torch


class Workspace:
    """Buffers by purpose.  `take` returns the head of a buffer; its content is whatever the last
    user left.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        # A captured graph replays into the addresses that it saw, so a buffer that was outgrown
        # after a capture stays.
        self._pinned: list[torch.Tensor] = []
        self._captured = False
        self._frozen = False

    def take(
        self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A flat [numel] tensor of `dtype` on `device`; allocates only if the purpose's buffer is
        too small, and raises RuntimeError if that happens while a graph is captured.
        """
        nbytes = numel * dtype.itemsize
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.numel() < nbytes or buffer.device != device:
            if self._frozen:
                held = 0 if buffer is None else buffer.numel()
                raise RuntimeError(
                    f"the workspace holds {held} of the {nbytes} bytes that {purpose!r} needs, and "
                    "a graph is being captured: make the same call once before the capture"
                )
            if buffer is not None and self._captured:
                self._pinned.append(buffer)
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._buffers[purpose] = buffer
        return buffer[:nbytes].view(dtype)

    def capturing(self, now: bool) -> None:
        """Say whether a graph is being captured over these buffers: while it is, none may grow, and
        from then on none is given back.
        """
        self._frozen = now
        self._captured = self._captured or now

    def bytes(self) -> dict[str, int]:
        """Bytes held, by purpose."""
        held = {purpose: buffer.numel() for purpose, buffer in self._buffers.items()}
        if self._pinned:
            held["kept for captured graphs"] = sum(buffer.numel() for buffer in self._pinned)
        return held

    def clear(self) -> None:
        """Give everything back."""
        self._buffers.clear()
        self._pinned.clear()
        self._captured = False
