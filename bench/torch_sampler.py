"""Drawing tokens from full logits as an inference engine's sampler does it in torch.

In our own words from vLLM's `v1/sample/ops/topk_topp_sampler.py` and SGLang's sampler: logits are
divided by the temperature and go through a softmax in fp32, top-p sorts them, and one token is
drawn by `torch.multinomial` (which on a CPU is the exponential race that vLLM writes out).  Where
top-k is asked for, its tokens are taken out first by `torch.topk` and all else is done among them
alone: faster than the mask over all tokens that engines make of it.
"""

from __future__ import annotations

import torch

from lmhead.sampling import GREEDY_BELOW


def torch_sample(
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
