"""Every way in which the GEMM and the reassembly can run, and ragged shapes to run them at: the
interpreter's tests and the GPU's take both from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from data import FLOATS, assert_as_exact_as_torch, assert_same_bits, framed
from data_head import normal, whole

from lmhead import reference
from lmhead.kernels import gemm
from lmhead.kernels.config import LIBRARY, GemmConfig, ReassembleConfig, next_power_of_2

ROWS = (1, 3, 17, 288, 300, 513)  # T
SHARDS = (1616, 5, 130, 127, 1)  # S
WIDTHS = (576, 64, 200, 8)  # H
TWO_BYTES = (torch.bfloat16, torch.float16)

# In tiles small enough that these sizes have several of each.  None: the default for the shape.
GEMMS: dict[str, GemmConfig | None] = {
    "default": None,
    "library": LIBRARY,
    "pointer": GemmConfig(128, 64, 64, 4, 2),
    "bulk": GemmConfig(64, 64, 64, 4, 3, "bulk"),
    "bulk, 256 + 32 rows": GemmConfig(256, 128, 64, 8, 3, "bulk", tail_t=32),
    "bulk, 256 + 256 rows": GemmConfig(256, 64, 64, 8, 3, "bulk", tail_t=256),
    "bulk, H in 2": GemmConfig(128, 128, 64, 8, 2, "bulk", splits=2),
    "bulk, H in 4": GemmConfig(64, 128, 32, 4, 2, "bulk", splits=4),
    "bulk, by roles": GemmConfig(128, 64, 64, 8, 2, "bulk", warp_specialize=True),
    "bulk, all of it": GemmConfig(
        128, 128, 32, 8, 2, "bulk", tail_t=16, splits=2, warp_specialize=True
    ),
}


@dataclass(frozen=True)
class Cell:
    """One call of a GEMM variant."""

    variant: str
    rows: int
    shard: int
    hidden: int
    operands: torch.dtype
    out: torch.dtype
    epilogue: bool  # bias, scale and softcap

    @property
    def config(self) -> GemmConfig | None:
        return GEMMS[self.variant]

    def __str__(self) -> str:
        dtypes = "-".join(str(dtype).removeprefix("torch.") for dtype in (self.operands, self.out))
        tail = "-epilogue" if self.epilogue else ""
        return f"{self.variant}-{self.rows}-{self.shard}-{self.hidden}-{dtypes}{tail}"


def _cells() -> list[Cell]:
    """Six calls a variant, in a rotation that starts elsewhere for each: every T, S, H, result
    dtype with and without epilogue, and operand dtype meets every variant; every H meets every T.
    """
    cells = []
    for i, (variant, config) in enumerate(GEMMS.items()):
        operands = TWO_BYTES if variant.startswith("bulk") else FLOATS
        # The widest shard meets few rows where a second kernel adds up in tiles of 4 rows, which
        # are slow in the interpreter, and many rows elsewhere.
        adds_up = config in (None, LIBRARY) or config.splits > 1
        first = 3 + i % 2 if adds_up else 1 + i % 2
        for j, rows in enumerate(ROWS):
            mode = (i + j) % 6
            cells.append(
                Cell(
                    variant,
                    rows,
                    SHARDS[(first + j) % len(SHARDS)],
                    WIDTHS[(i // 2 + j) % len(WIDTHS)],
                    operands[(i + j // 2) % len(operands)],
                    FLOATS[mode // 2],
                    mode % 2 == 1,
                )
            )
    return cells


CELLS = _cells()


def check_cell(cell: Cell, device: str = "cpu") -> None:
    """With an epilogue as exact as torch, and so is the twin; without, on whole numbers, which are
    exact in any order of summation, the twin's very bits.  Nothing is written beside them.
    """
    draw = normal if cell.epilogue else whole
    hidden = draw(cell.rows, cell.hidden, seed=1, dtype=cell.operands)
    weight = draw(cell.shard, cell.hidden, seed=2)
    epilogue: dict[str, Any] = {}
    if cell.epilogue:
        weight /= cell.hidden**0.5  # logits of the size of one or a few
        epilogue = {"bias": normal(cell.shard, seed=3), "scale": 0.5, "softcap": 3.0}
    weight = weight.to(cell.operands)
    twin = torch.empty(cell.rows, cell.shard, dtype=cell.out)
    reference.gemm(hidden, weight, out=twin, **epilogue)
    # Rows that start on 16-byte borders where S lets them, and rows that do not.
    left, right = ((8, 8), (3, 2))[cell.rows % 2]
    frame = framed(cell.rows, cell.shard, cell.out, left=left, right=right, device=device)
    on_device = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in epilogue.items()
    }
    gemm.gemm(
        hidden.to(device), weight.to(device), out=frame.inside, config=cell.config, **on_device
    )
    got = frame.inside.cpu()
    if cell.epilogue:
        for result in (got, twin):
            assert_as_exact_as_torch(result, hidden, weight, **epilogue)
    else:
        assert_same_bits(got, twin)
    frame.assert_intact()


# (N, B): first with T = N*B rows received by all, then with B rows on each rank.
BLOCKS = (
    *((1, 1), (3, 1), (17, 1), (8, 36), (4, 75), (3, 171)),
    *((2, 1), (2, 3), (3, 17), (2, 288), (2, 300), (2, 513)),
)


def reassembly(kind: str, ranks: int, rows: int) -> ReassembleConfig:
    """A config of a kind that serves [N, B, S] in several tiles."""
    if kind == "band":
        return ReassembleConfig("band", next_power_of_2(ranks * rows), 16, 16)
    return ReassembleConfig(kind, 16, 512, 16)  # type: ignore[arg-type]
