"""Models by name: the vocabulary and hidden sizes that benchmarks, tables and `inspect` speak of.

Sizes are those of the models' published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmhead.bench.roofline import Step
from lmhead.shapes import Layout, Rows, shard_rows


@dataclass(frozen=True)
class Model:
    """V, H, and what the head does beside multiplying."""

    name: str
    vocab: int
    hidden: int
    softcap: float | None = None

    def shard(self, ranks: int) -> int:
        """S = ceil(V / N)."""
        return shard_rows(self.vocab, ranks)


MODELS = {
    model.name: model
    for model in (
        Model("deepseek-v4-pro", 129280, 7168),
        Model("llama-3-70b", 128256, 8192),
        Model("qwen3", 151936, 4096),
        Model("gpt-oss", 201088, 2880),
        Model("gemma-3", 262208, 5376, softcap=30.0),
        Model("glm-5", 154880, 6144),
        Model("kimi", 163840, 7168),
        Model("smollm2-135m", 49152, 576),
    )
}
RANKS = (1, 2, 4, 8)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One size that is measured: V, H, N ranks, B rows per rank, and the dtype of operands, wire
    and logits; and where it was asked for, in how many attention groups the ranks share attention.
    B rows are those that a rank owns, whatever the layout.  What runs at that size is the
    benchmark's kind.
    """

    model: str
    vocab: int
    hidden: int
    ranks: int
    rows: int
    dtype: str = "bf16"
    dp_size: int | None = None  # None: as many as ranks, data-parallel

    @property
    def layout(self) -> Layout:
        return Layout.of(self.ranks, self.ranks if self.dp_size is None else self.dp_size)

    @property
    def shard(self) -> int:
        """S."""
        return -(-self.vocab // self.ranks)

    @property
    def total(self) -> int:
        """T = N * B."""
        return self.ranks * self.rows

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    def rows_of(self, rank: int) -> Rows:
        layout = self.layout
        return layout.rows([self.total // layout.sets] * layout.sets, rank)

    @property
    def step(self) -> Step:
        """The same for the roofline."""
        size = self.itemsize
        sizes = self.vocab, self.hidden, self.ranks, self.rows
        layout = None if self.layout.plain else self.layout
        return Step(*sizes, size, size, size, layout=layout)

    def __str__(self) -> str:
        text = (
            f"{self.model}: V = {self.vocab}, H = {self.hidden}, N = {self.ranks}, "
            f"B = {self.rows}, {self.dtype}"
        )
        return text if self.dp_size is None else f"{text}, {self.layout}"
