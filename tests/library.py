"""Another machine's library of matrix products, for tests that must not rest on this one's.

`splitting` replaces torch's products on CPU tensors by ones whose order of summation follows the
shape, as most libraries' does, and for long sums the number of threads, as that of MKL does on an
Intel CPU with AVX-512 and AMX (from about 1023 terms on).  `pytest --library splitting` runs a
whole suite so, in the rank processes too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Read by the rank processes, which inherit the environment.
VARIABLE = "LMHEAD_TEST_LIBRARY"

LONG_SUM = 1000


def by_shape_and_threads(rows: int, columns: int, terms: int) -> int:
    """Into how many parts a sum is cut."""
    return 1 + (rows + columns) % 3 + (torch.get_num_threads() if terms >= LONG_SUM else 0)


def by_threads(rows: int, columns: int, terms: int) -> int:
    """The same for a library that cuts every sum by the number of threads."""
    return torch.get_num_threads()


@contextlib.contextmanager
def splitting(
    parts: Callable[[int, int, int], int] = by_shape_and_threads,
) -> Iterator[None]:
    """torch.mm, torch.matmul and `@` of CPU matrices in fp32, each sum in `parts(rows, columns,
    terms)` parts that are added in order, rounded once.
    """
    mm, matmul = torch.mm, torch.matmul

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (rows, terms), columns = a.shape, b.shape[1]
        count = max(1, min(terms, parts(rows, columns, terms)))
        wide_a, wide_b = a.float(), b.float()
        total = torch.zeros(rows, columns, dtype=torch.float32, device=a.device)
        for part in torch.arange(terms, device="cpu").tensor_split(count):
            if part.numel():
                begin, end = int(part[0]), int(part[-1]) + 1
                total += mm(wide_a[:, begin:end], wide_b[begin:end])
        return total.to(a.dtype)

    def replaced(a: torch.Tensor, b: torch.Tensor) -> bool:
        narrow = (torch.float32, torch.bfloat16, torch.float16)
        plain = type(a) in _PLAIN and type(b) in _PLAIN and a.dim() == b.dim() == 2
        eager = plain and a.device.type == "cpu" and not torch.compiler.is_compiling()
        return eager and a.dtype == b.dtype and a.dtype in narrow and a.shape[1] == b.shape[0]

    def other_mm(
        a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not replaced(a, b):
            return mm(a, b) if out is None else mm(a, b, out=out)
        if out is None:
            out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        with _disable_current_modes():  # tests that count allocations see the result's alone
            out.detach().copy_(product(a.detach(), b.detach()))
        return out

    def other_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return other_mm(a, b) if replaced(a, b) else matmul(a, b)

    with (
        mock.patch.object(torch, "mm", other_mm),
        mock.patch.object(torch, "matmul", other_matmul),
        mock.patch.object(torch.Tensor, "matmul", other_matmul),
        mock.patch.object(torch.Tensor, "__matmul__", other_matmul),
    ):
        yield


def asked() -> contextlib.AbstractContextManager[None]:
    """The library that the environment asks for."""
    return splitting() if os.environ.get(VARIABLE) == "splitting" else contextlib.nullcontext()


_PLAIN = (torch.Tensor, torch.nn.Parameter)
with _disable_current_modes():  # which imports a module when it is first used
    pass
