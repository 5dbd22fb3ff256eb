"""Error measures: bit equality that names the place, error against a truth in fp64."""

from __future__ import annotations

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """None where the two have the same shape, dtype and bits (NaN payloads and signs of zero
    included); otherwise where they first differ, both values there, and how many elements do.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)} is not {want.dtype} {tuple(want.shape)}"
    bits = _BITS[got.element_size()]
    wrong = (got.contiguous().view(bits) != want.contiguous().view(bits)).nonzero()
    if wrong.numel() == 0:
        return None
    place = tuple(int(i) for i in wrong[0])
    return (
        f"{wrong.shape[0]} of {got.numel()} elements differ, the first at {list(place)}: "
        f"{got[place].item()} where {want[place].item()} belongs"
    )


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """||got - truth|| / ||truth|| in fp64, Frobenius norms; NaN or infinity anywhere gives
    infinity.

    `truth` is fp64, of the same shape.  A truth of norm zero gives ||got||.
    """
    if got.shape != truth.shape:
        raise ValueError(f"shapes differ: {tuple(got.shape)} and {tuple(truth.shape)}")
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    error = torch.linalg.vector_norm(got.double() - truth)
    size = torch.linalg.vector_norm(truth)
    return float(error / size) if size > 0 else float(error)


def top2_gap(logits: torch.Tensor) -> float:
    """The distance between the two largest of a row [V]: how far a greedy choice is from another
    one.
    """
    best = torch.topk(logits.double(), 2).values
    return float(best[0] - best[1])
