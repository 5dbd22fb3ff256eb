"""Names for the stages of a call in a profile: lmhead::gather, lmhead::gemm, lmhead::exchange,
lmhead::reassemble.

They show in torch.profiler (as user annotations, on the device's timeline too), and as NVTX ranges
under torch.autograd.profiler.emit_nvtx, which turns the same annotations into them.  A tool that
knows nothing of torch's profiler (`nsys profile python serve.py`) sees them with LMHEAD_NVTX=1 in
the environment before lmhead is imported.  A replayed CUDA graph runs no Python: its kernels show
under their own names alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
from torch.profiler import record_function

NVTX = os.environ.get("LMHEAD_NVTX") == "1" and torch.backends.cuda.is_built()

_NOTHING = contextlib.nullcontext()
_told: Callable[[str], None] | None = None


def stage(name: str) -> contextlib.AbstractContextManager[object]:
    """The range `lmhead::<name>` around a block.

    record_function costs 10 µs without a profiler, this 0.3 µs (2026-12, one core of an EPYC): four
    stages of a call that takes 50 µs must not be seen where nobody looks.
    """
    if _told is not None:
        return _telling(_told, name)
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return record_function(f"lmhead::{name}")
    return torch.cuda.nvtx.range(f"lmhead::{name}") if NVTX else _NOTHING


@contextlib.contextmanager
def told(to: Callable[[str], None]) -> Iterator[None]:
    """Call `to` with the name of every stage that ends meanwhile, instead of naming it in a
    profile: for a benchmark that times the stages of a user's call.
    """
    global _told
    before, _told = _told, to
    try:
        yield
    finally:
        _told = before


@contextlib.contextmanager
def _telling(to: Callable[[str], None], name: str) -> Iterator[None]:
    yield
    to(name)
