"""Models by name: the vocabulary and hidden sizes that benchmarks, tables and `inspect` speak of.

Sizes are those of the models' published configurations.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmhead.shapes import shard_rows


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
