"""What the tests of sampling share: a plain sampler of full logits, and mixed parameters."""

from __future__ import annotations

import math
from typing import Any

import torch

from lmhead import noise


def draw(
    x: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: int = 0,
    positions: int = 0,
    slack: float = 0.0,
) -> tuple[int, torch.Tensor]:
    """x [V] fp32, one row's full logits -> (token, the ids that it was drawn among, in order).

    Sorts everything, by value and then by id; cuts min-p, top-k and top-p, whose mass is taken in
    fp64 and its limit moved by `slack`; adds the noise and takes the largest.  Token -1 for a row
    with a NaN, or with nothing above -inf.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    if bool(x.isnan().any()):
        return -1, nothing
    ids = torch.sort(x, descending=True, stable=True).indices
    ids = ids[x[ids] > -math.inf]
    if ids.numel() == 0:
        return -1, nothing
    heat = torch.tensor(temperature, dtype=torch.float32)
    if heat < 1e-5:
        return int(ids[0]), ids[:1]
    inverse = 1.0 / heat
    d = (x[ids] - x[ids[0]]) * inverse
    if min_p > 0:
        ids = ids[d >= torch.tensor(min_p, dtype=torch.float32).log()]
    if top_k > 0:
        ids = ids[:top_k]
    if top_p < 1:
        chance = d[: ids.numel()].double().exp()
        before = chance.cumsum(0) - chance
        limit = (float(torch.tensor(top_p, dtype=torch.float32)) + slack) * float(chance.sum())
        ids = ids[: max(1, int((before < limit).sum()))]
    word = noise.words(torch.tensor(seeds), torch.tensor(positions), ids)
    score = x[ids] * inverse + noise.gumbel(word)
    return int(ids[score == score.max()].min()), ids


def edited(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    logit_bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    prompt_tokens: torch.Tensor | None = None,
    output_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [V] fp32 -> the logits that are drawn from, one token at a time; lists are padded with -1.

    Bias; then penalties as vLLM documents them (repetition over prompt and output, frequency and
    presence over the output); then the mask.
    """
    x = x.clone()
    if logit_bias is not None:
        for token, value in zip(logit_bias[0].tolist(), logit_bias[1], strict=True):
            if token >= 0:
                x[token] += value
    prompt = [] if prompt_tokens is None else [t for t in prompt_tokens.tolist() if t >= 0]
    output = [] if output_tokens is None else [t for t in output_tokens.tolist() if t >= 0]
    repetition, frequency, presence = (
        torch.tensor(value, dtype=torch.float32)
        for value in (repetition_penalty, frequency_penalty, presence_penalty)
    )
    for token in set(prompt + output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
        if token in output:
            x[token] -= output.count(token) * frequency
            x[token] -= presence
    return x if mask is None else x.masked_fill(~mask, -math.inf)


def of_row(given: dict[str, Any], row: int) -> dict[str, Any]:
    """One row's values of parameters that are [B] tensors, lists [B, M], or numbers."""

    def value(of: Any) -> Any:
        if isinstance(of, tuple):
            return tuple(map(value, of))
        if not isinstance(of, torch.Tensor):
            return of
        return of[row].item() if of.dim() == 1 else of[row]

    return {name: value(of) for name, of in given.items()}


def rows_of(given: dict[str, Any], chosen: Any) -> dict[str, Any]:
    """The parameters of some rows."""

    def value(of: Any) -> Any:
        if isinstance(of, tuple):
            return tuple(map(value, of))
        return of[chosen] if isinstance(of, torch.Tensor) else of

    return {name: value(of) for name, of in given.items()}


def mixed(rows: int, vocab: int, seed: int, unseeded: bool = False) -> dict[str, Any]:
    """[rows] tensors of parameters that differ from row to row: greedy and not, every filter on and
    off, k up to more than the vocabulary; with `unseeded`, some rows without a seed.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        chosen = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[chosen]

    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), generator=generator)
    positions = torch.randint(0, 1 << 40, (rows,), generator=generator)
    if unseeded:
        seeds = torch.where(pick([0, 0, 0, 0, 1], torch.int64) == 1, -1, seeds)
    return {
        "temperature": pick([0.0, 1e-6, 0.3, 0.7, 1.0, 1.0, 1.9]),
        "top_k": pick([0, 0, -1, 1, 3, 20, vocab, vocab + 5], torch.int64),
        "top_p": pick([1.0, 1.0, 0.95, 0.5, 0.05]),
        "min_p": pick([0.0, 0.0, 0.02, 0.3]),
        "seeds": seeds,
        "positions": positions,
    }


def edits(rows: int, vocab: int, seed: int) -> dict[str, Any]:
    """Masks, biases and penalties that differ from row to row, some of them off."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(width: int) -> torch.Tensor:
        return torch.randint(-1, vocab, (rows, width), generator=generator)

    def pick(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    mask = torch.rand(rows, vocab, generator=generator) < 0.7
    mask[::3] = True
    return {
        "mask": mask,
        "logit_bias": (
            torch.rand(rows, vocab, generator=generator).topk(3).indices,
            torch.randn(rows, 3, generator=generator) * 4,
        ),
        "repetition_penalty": pick([1.0, 1.3, 0.8]),
        "frequency_penalty": pick([0.0, 0.4, -0.2]),
        "presence_penalty": pick([0.0, 0.9]),
        "prompt_tokens": tokens(6),
        "output_tokens": tokens(9) % 7 - 1,  # few different ones, so that some stand there twice
    }
