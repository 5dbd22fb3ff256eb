"""What a head's step must move and compute, stage by stage, and the least time that takes.

Floors are bytes over the vendor's bandwidth or FLOPs over the vendor's rate (`lmhead.devices`),
whichever is more; nothing reaches them.  On the wire a rank sends and receives (N-1)/N of a
collective's bytes, in one direction each.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmhead.devices import Device
from lmhead.shapes import shard_rows


@dataclass(frozen=True)
class Stage:
    """One stage of a rank's step.  Bytes through device memory, bytes received over NVLink, FLOPs,
    and the floor in microseconds with the limit that sets it.
    """

    name: str
    memory_bytes: int
    wire_bytes: int
    flops: int
    floor_us: float
    limit: str


@dataclass(frozen=True)
class Step:
    """A head's step: N ranks, B rows per rank, H, S, V, and the item sizes of operands, of what is
    exchanged and of the logits; whether logits are capped.
    """

    vocab: int
    hidden: int
    ranks: int
    rows: int
    itemsize: int = 2
    wire_itemsize: int = 2
    logits_itemsize: int = 2
    softcap: bool = False

    @property
    def shard(self) -> int:
        return shard_rows(self.vocab, self.ranks)

    @property
    def total(self) -> int:
        """T = N * B."""
        return self.ranks * self.rows

    @property
    def in_place(self) -> bool:
        """Whether the received elements are the logits as they stand, but for their order."""
        return self.vocab == self.ranks * self.shard and self.wire_itemsize == self.logits_itemsize


def stages(device: Device, step: Step) -> list[Stage]:
    """The stages of the all-to-all route in order; what one rank alone does not need is left
    out.
    """
    others = step.ranks - 1
    block = step.rows * step.shard * step.wire_itemsize
    gathered = step.total * step.hidden * step.itemsize
    partial = step.total * step.shard * step.wire_itemsize
    weights = step.shard * step.hidden * step.itemsize
    found = [
        _stage(
            device,
            "gemm",
            memory=weights + gathered + partial,
            flops=2 * step.total * step.shard * step.hidden,
        )
    ]
    if step.ranks == 1:
        return found
    own = step.rows * step.hidden * step.itemsize
    found.insert(0, _stage(device, "hidden gather", memory=own + gathered, wire=others * own))
    found.append(_stage(device, "exchange", memory=2 * step.ranks * block, wire=others * block))
    if step.rows > 1 or not step.in_place:
        logits = step.rows * step.vocab * step.logits_itemsize
        found.append(_stage(device, "reassembly", memory=step.ranks * block + logits))
    return found


def _stage(device: Device, name: str, *, memory: int, wire: int = 0, flops: int = 0) -> Stage:
    floors = {
        "memory": memory / device.hbm,
        "NVLink": wire / device.nvlink,
        "tensor cores": flops / device.bf16,
    }
    limit = max(floors, key=lambda name: floors[name])
    return Stage(name, memory, wire, flops, round(floors[limit] * 1e6, 2), limit)
