"""What the tests of the head share: seeded tensors, shards, the oracle and torch's own answer, and
a recorder of everything that reaches torch.distributed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import lmhead

KERNELS = ("torch", "triton")
ROUTES = ("all_to_all", "all_gather")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normals, the same on every rank that asks with the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Integers from 1 to 4 with either sign: dot products of up to 2**19 of them are exact in fp32
    in any order, and none is a negative zero.
    """
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(1, 5, shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (size * sign).to(dtype)


def shard_of(full: torch.Tensor, ranks: int, rank: int, padding: float = math.nan) -> torch.Tensor:
    """Rank `rank`'s S = ceil(V / N) rows of `full` [V, ...], by plain slicing; what lies beyond V
    holds `padding`.
    """
    shard = -(-full.shape[0] // ranks)
    rows = full.new_full((shard, *full.shape[1:]), padding)
    own = full[rank * shard : (rank + 1) * shard]
    rows[: own.shape[0]] = own
    return rows


@dataclass(frozen=True)
class Arithmetic:
    """What a head computes beside the product, by the constructor's names."""

    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    logits_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None

    def head(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor,
        ranks: int,
        rank: int,
        **options: Any,
    ) -> lmhead.LMHead:
        """This rank's head over full `weight` [V, H] and `bias` [V]; padding is NaN."""
        return lmhead.LMHead(
            shard_of(weight, ranks, rank),
            weight.shape[0],
            bias=shard_of(bias, ranks, rank) if self.bias else None,
            scale=self.scale,
            softcap=self.softcap,
            logits_dtype=self.logits_dtype,
            wire_dtype=self.wire_dtype,
            **options,
        )

    def truth(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The oracle: one process, fp64 throughout."""
        return self._finish(hidden.double() @ weight.double().t(), bias.double())

    def single(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """What torch gives in one process at this precision: fp32 accumulation and epilogue, then
        rounded once to what travels (and widened, where fp32 logits travel narrower).
        """
        logits = self._finish(hidden.float() @ weight.float().t(), bias.float())
        dtype = self.logits_dtype or weight.dtype
        return logits.to(self.wire_dtype or dtype).to(dtype)

    def _finish(self, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        logits = (logits + bias if self.bias else logits) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True)
class Moved:
    """One collective as torch.distributed got it."""

    collective: str
    out: int  # address of the first element
    out_bytes: int
    in_bytes: int
    flat: bool  # both tensors are 1-D and contiguous


# Everything that a head might call, so that a collective nobody expects is recorded as well.
_COLLECTIVES = (
    "all_to_all_single",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_to_all",
    "all_gather",
    "all_reduce",
    "reduce_scatter_tensor",
    "broadcast",
    "barrier",
    "new_group",
)


@contextlib.contextmanager
def collectives() -> Iterator[list[Moved]]:
    """Record every collective that this rank starts inside the block; they run all the same."""
    seen: list[Moved] = []

    def recorder(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [arg for arg in args if isinstance(arg, torch.Tensor)]
            assert len(given) == 2 or name not in _COLLECTIVES[:3], f"{name} got {len(given)}"
            out, own = given if len(given) == 2 else (torch.empty(0), torch.empty(0))
            flat = all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in (out, own))
            seen.append(Moved(name, out.data_ptr(), out.nbytes, own.nbytes, flat))
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                patched = recorder(name, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, patched))
        yield seen


@dataclass(frozen=True)
class Raised:
    """An error as plain data, which travels between processes."""

    error: str = ""
    text: str = ""
    seconds: float = 0.0
    collectives: tuple[str, ...] = ()  # what had been started before it was raised


def raised(call: Callable[[], Any]) -> Raised:
    """What `call` raises; error is "" where it raises nothing."""
    begin = time.monotonic()
    with collectives() as seen:
        try:
            call()
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        else:
            kind, text = "", ""
    return Raised(kind, text, time.monotonic() - begin, tuple(moved.collective for moved in seen))
