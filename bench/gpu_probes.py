"""What a machine can do at best, measured: the ceilings that times are held against.

Protocol.  All by replays of a CUDA graph (`lmhead.measure.graph_clock`), median over rounds, on
random data: tensor cores run faster on zeros.  Bytes are counted read plus written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from lmhead import measure

BLOCK = 4096  # fp32 elements of a program's turn: four 16-byte accesses of each of 256 threads
L2_BYTES = 8 << 20  # of each buffer that must stay in L2, and in its nearer half
GRAPH_NODES = 200


@triton.jit
def _pass_kernel(
    source_ptr,  # [blocks * BLOCK] fp32, read `passes` times, never from L1
    target_ptr,  # [blocks * BLOCK] fp32, written; or [programs] sums where COPY is false
    blocks,
    passes,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(tl.program_id(0), blocks * passes, tl.num_programs(0)):
        place = i % blocks * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source_ptr + place, cache_modifier=".cg")
        if COPY:
            tl.store(target_ptr + place, value)
        else:
            total += value
    if not COPY:
        tl.store(target_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def _empty_kernel(unused_ptr):
    pass


def passes(
    source: torch.Tensor, target: torch.Tensor, count: int, programs: int, copy: bool
) -> None:
    """Read fp32 `source` `count` times over, and copy it to `target` or add it up there."""
    blocks = source.numel() // BLOCK
    _pass_kernel[(programs,)](
        source_ptr=source,
        target_ptr=target,
        blocks=blocks,
        passes=count,
        COPY=copy,
        BLOCK=BLOCK,
        num_warps=8,
    )


class Ceilings:
    """Each method measures one and says it in the unit of its name; `seconds` times a launch."""

    def __init__(self, device: torch.device, memory_bytes: int, matrix: int, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.memory_bytes, self.matrix = memory_bytes, matrix
        self.sms = 2
        if device.type == "cuda":
            self.sms = torch.cuda.get_device_properties(device).multi_processor_count

    def items(self) -> dict[str, Callable[[], Any]]:
        return {
            "copy_TBps": self.copy,
            "read_TBps": self.read,
            "node_us": self.node,
            "l2_copy_TBps": self.l2_copy,
            "l2_read_TBps": self.l2_read,
            "bf16_TFLOPps": self.matmul,  # last: what the clocks are after it is of interest
        }

    def seconds(self, launch: Callable[[], object], launches: int = 10) -> float:
        launch()  # compiles, and makes handles: never inside a capture
        clock = measure.host_clock(1)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            clock = measure.graph_clock(self.device, 1, launches=launches)
        found = clock({"it": lambda _: launch()}, self.rounds)["it"]
        return statistics.median(found)

    def _normal(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, device=self.device).normal_()

    def copy(self) -> float:
        source = self._normal(self.memory_bytes // 4)
        target = torch.empty_like(source)
        return 2 * self.memory_bytes / self.seconds(lambda: target.copy_(source)) / 1e12

    def read(self) -> float:
        source, sums = self._normal(self.memory_bytes // 4), self._normal(8 * self.sms)
        seconds = self.seconds(lambda: passes(source, sums, 1, 8 * self.sms, copy=False))
        return self.memory_bytes / seconds / 1e12

    def _l2(self, copy: bool) -> float:
        small = min(L2_BYTES, self.memory_bytes)
        count = max(1, self.memory_bytes // small)
        source, target = self._normal(small // 4), self._normal(small // 4)
        seconds = self.seconds(lambda: passes(source, target, count, 8 * self.sms, copy))
        return (2 if copy else 1) * small * count / seconds / 1e12

    def l2_copy(self) -> float:
        return self._l2(copy=True)

    def l2_read(self) -> float:
        return self._l2(copy=False)

    def matmul(self) -> float:
        n = self.matrix
        a, b = (self._normal(n * n).view(n, n).to(torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * n**3 / self.seconds(lambda: torch.mm(a, b, out=out)) / 1e12

    def node(self) -> float:
        """From one launch of an empty kernel to the next."""
        nothing = self._normal(1)
        return self.seconds(lambda: _empty_kernel[(1,)](nothing), GRAPH_NODES) * 1e6
