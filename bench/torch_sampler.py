"""Drawing tokens from full logits in torch: as inference engines write it, and leaner.

Both in our own words.  `engine_sample` follows vLLM's sampler without its own CUDA kernels
(`v1/sample/ops/topk_topp_sampler.py`, `forward_native`; SGLang's torch sampler is alike): filters
are masks over the whole vocabulary, top-p sorts all of it, and the draw is the exponential race
over every token, filtered or not.  `lean_sample` does no more than it has to: top-k's tokens are
taken out first and all else is done among them alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lmhead.sampling import GREEDY_BELOW

# logits [B, V] and parameters -> ids [B] int64, by torch's default generator.
Sampler = Callable[..., torch.Tensor]


def engine_sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """logits [B, V] -> ids [B] int64, by torch's default generator."""
    if temperature < GREEDY_BELOW:
        return logits.argmax(1)
    scaled = logits.to(torch.float32) / temperature
    if min_p > 0:
        probs = scaled.softmax(1)
        scaled = scaled.masked_fill(probs < min_p * probs.amax(1, keepdim=True), -torch.inf)
    filtered = 0 < top_k < logits.shape[1]
    if top_p < 1:
        ordered, ids = scaled.sort(dim=1)
        if filtered:
            ordered = ordered.masked_fill(ordered < ordered[:, -top_k, None], -torch.inf)
        unlikely = ordered.softmax(1).cumsum(1) <= 1 - top_p
        unlikely[:, -1] = False
        scaled = scaled.scatter(1, ids, ordered.masked_fill(unlikely, -torch.inf))
    elif filtered:
        least = scaled.topk(top_k, dim=1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    probs = scaled.softmax(1)
    return (probs / torch.empty_like(probs).exponential_()).argmax(1)


def lean_sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """logits [B, V] -> ids [B] int64, by torch's default generator."""
    if temperature < GREEDY_BELOW:
        return logits.argmax(1)
    ids = None
    if 0 < top_k < logits.shape[1]:
        logits, ids = logits.topk(top_k, dim=1)
    elif top_p < 1:
        logits, ids = logits.sort(dim=1, descending=True)
    probs = (logits.to(torch.float32) / temperature).softmax(1)
    if min_p > 0:
        probs = probs.masked_fill(probs < min_p * probs.amax(1, keepdim=True), 0.0)
    if top_p < 1:
        before = probs.cumsum(1) - probs
        probs = probs.masked_fill(before >= top_p * probs.sum(1, keepdim=True), 0.0)
    drawn = torch.multinomial(probs, 1)
    return (drawn if ids is None else ids.gather(1, drawn)).squeeze(1)
