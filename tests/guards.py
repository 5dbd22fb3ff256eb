"""Guards that a test puts around a call: `Allocations` records what it allocates, `Living` what
outlives it, and `capture_safe` fails where it does anything that a CUDA-graph capture cannot hold.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.compiler
import triton.testing
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from lmhead import comm, measure, ops, tables, timing, tune
from lmhead.kernels import gemm, reassemble


class Allocations(TorchDispatchMode):
    """Records every operator inside the block that returns storage none of its inputs has:
    (operator, bytes).

    Empty storage does not count: Triton's interpreter makes such tensors to hold views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.storages: list[tuple[str, int, int]] = []  # the same, and where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            _storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.untyped_storage().nbytes()
                and _storage(leaf) not in given
            ):
                nbytes = leaf.untyped_storage().nbytes()
                self.seen.append((str(func), nbytes))
                if not _inside_kernel:
                    self.storages.append((str(func), nbytes, _storage(leaf)))
                given.add(_storage(leaf))
        return result


@contextlib.contextmanager
def sums_in_order() -> Iterator[None]:
    """The interpreter's dot as a sum over k in order, the same everywhere in a tile, as on a GPU;
    then added to the accumulator, so that other tiles along H give other bits.

    numpy's own differs between two places of one tile with OpenBLAS 0.3.31.
    """

    def create_dot(builder: object, a: Any, b: Any, acc: Any, *_: object) -> Any:
        total = np.zeros_like(acc.data)
        for k in range(a.data.shape[1]):
            total += np.multiply(a.data[:, k : k + 1], b.data[k], dtype=total.dtype)
        return interpreter.TensorHandle(total + acc.data, acc.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Living(TorchDispatchMode):
    """Every tensor that the block makes, held weakly; afterwards, the bytes that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.made.extend(weakref.ref(leaf) for leaf in leaves)
        return result

    def bytes(self, expected: int) -> int:
        """Waits for `expected` bytes, as gloo's thread lets go a moment after a call returns."""
        deadline = time.monotonic() + 10
        while (found := self._bytes()) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def _bytes(self) -> int:
        gc.collect()
        alive = [tensor for ref in self.made if (tensor := ref()) is not None]
        storages = {tensor.untyped_storage() for tensor in alive}
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# Capture safety.


@dataclass
class Trail:
    """Which kernels a block launches, specialised as Triton would compile them, with which configs,
    and which routes its calls take.  Recorded around a warm-up, it says what a capture may use.
    """

    kernels: set[tuple[Any, ...]] = field(default_factory=set)
    routes: set[tuple[Any, ...]] = field(default_factory=set)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Trail]:
        with _watched(self.kernels.add, self.routes.add, lambda kind, what: None):
            yield self


def violations(
    call: Callable[[], Any], prepared: Trail, capturing: bool = True
) -> tuple[Any, list[tuple[str, str]]]:
    """Run `call` as if a CUDA graph were being captured: its result, and everything in it that a
    real capture would die of, or bake in unprepared, as (kind, what).

    Kinds: "sync" (the host waits for the device), "scalar" (a value is read back), "allocation" (of
    anything but the result), "group", "compile", "tune", "file", and "kernel" and "route" for those
    that are not in `prepared`.
    """
    found: list[tuple[str, str]] = []

    def report(kind: str, what: str) -> None:
        found.append((kind, what))

    def kernel(key: tuple[Any, ...]) -> None:
        if key not in prepared.kernels:
            report("kernel", f"{key} was not warmed up")

    def route(key: tuple[Any, ...]) -> None:
        if key not in prepared.routes:
            report("route", f"{key} was not warmed up")

    allocations = Allocations()
    with contextlib.ExitStack() as stack:
        if capturing:
            stack.enter_context(mock.patch.object(ops, "is_capturing", lambda device: True))
            patched = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
            stack.enter_context(patched)
        stack.enter_context(_watched(kernel, route, report))
        for owner, name, kind in _FORBIDDEN:
            stack.enter_context(_noticed(owner, name, kind, report))
        stack.enter_context(_Scalars(report))
        stack.enter_context(_Waits(report))
        stack.enter_context(_files(report))
        with allocations:
            result = call()
    kept = {_storage(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
    for operator, nbytes, storage in reversed(allocations.storages):
        if storage in kept:  # the last to stand there; what was freed before it does not count
            kept.remove(storage)
        else:
            report("allocation", f"{operator} allocates {nbytes} bytes beside the result")
    return result, found


def capture_safe(call: Callable[[], Any], prepared: Trail, capturing: bool = True) -> Any:
    """`call()`, which must hold nothing that a capture cannot; see `violations`."""
    result, found = violations(call, prepared, capturing)
    assert found == [], "\n".join(f"{kind}: {what}" for kind, what in found)
    return result


# What is called by name: (where it lives, its name, what it does).
_FORBIDDEN = (
    (torch.cuda, "synchronize", "sync"),
    (torch.cuda.Stream, "synchronize", "sync"),
    (torch.cuda.Event, "synchronize", "sync"),
    (dist, "barrier", "sync"),
    (dist, "all_gather_object", "sync"),
    (dist, "init_process_group", "group"),
    (dist, "new_group", "group"),
    (dist, "split_group", "group"),
    (dist.distributed_c10d, "_new_process_group_helper", "group"),
    (triton, "compile", "compile"),
    (triton.compiler, "compile", "compile"),
    (JITFunction, "_do_compile", "compile"),
    (torch, "compile", "compile"),
    (triton.testing, "do_bench", "tune"),
    (triton.testing, "do_bench_cudagraph", "tune"),
    (Autotuner, "run", "tune"),
    (timing, "interleaved", "tune"),
    (measure, "measure", "tune"),
    (tune, "offline", "tune"),
    (tables, "load_user", "tune"),
)

Report = Callable[[str, str], None]


@contextlib.contextmanager
def _noticed(owner: Any, name: str, kind: str, report: Report) -> Iterator[None]:
    plain = getattr(owner, name)

    def noticed(*args: Any, **kwargs: Any) -> Any:
        report(kind, f"{getattr(owner, '__name__', owner)}.{name} is called")
        return plain(*args, **kwargs)

    with mock.patch.object(owner, name, noticed):
        yield


# Triton's interpreter copies tensors, reads them and allocates on its own account: what a guard
# sees while a kernel runs says nothing about compiled kernels.
_inside_kernel = False


def _specialised(name: str, value: Any, constant: bool) -> Any:
    """What of an argument Triton compiles a kernel for."""
    if constant:
        return name, value
    if isinstance(value, torch.Tensor):
        return name, str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        return name, value == 1, value % 16 == 0, abs(value) >= 2**31
    return name, type(value).__name__


@contextlib.contextmanager
def _watched(
    kernel: Callable[[tuple[Any, ...]], None],
    route: Callable[[tuple[Any, ...]], None],
    report: Report,
) -> Iterator[None]:
    """Tell every kernel launch, kernel config and route of the block."""
    runs = {cls: cls.run for cls in (InterpretedFunction, JITFunction)}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        global _inside_kernel
        given = dict(zip(inspect.signature(self.fn).parameters, args, strict=False)) | kwargs
        notes = inspect.get_annotations(self.fn)
        key = [
            _specialised(name, value, "constexpr" in str(notes.get(name, "")))
            for name, value in sorted(given.items())
        ]
        kernel((self.fn.__name__, *key))
        if isinstance(self, InterpretedFunction) and self.fn not in self.rewritten_fn:
            report("compile", f"{self.fn.__name__} is prepared for the interpreter")
        outer, _inside_kernel = _inside_kernel, True
        try:
            return runs[type(self)](self, *args, grid=grid, warmup=warmup, **kwargs)
        finally:
            _inside_kernel = outer

    def configured(plain: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(plain).bind(*args, **kwargs).arguments
            kernel((plain.__name__, bound["config"]))
            return plain(*args, **kwargs)

        return launch

    def planned(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(comm: Any, plan: Any, *args: Any, **kwargs: Any) -> Any:
            route((plain.__name__, plan.route.name))
            kernel((plain.__name__, plan.kernels))
            return plain(comm, plan, *args, **kwargs)

        return call

    def collective(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            route((plain.__name__,))
            return plain(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for cls in runs:
            stack.enter_context(mock.patch.object(cls, "run", run))
        for owner, names, wrap in (
            (gemm, ("launch_gemm",), configured),
            (reassemble, ("launch_reassemble", "launch_copy"), configured),
            (ops, ("run_logits", "run_exchange"), planned),
            (comm.Comm, ("gather", "exchange"), collective),
        ):
            for name in names:
                patched = wrap(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, patched))
        yield


class _Scalars(TorchDispatchMode):
    """Operators whose result the host needs before it can go on."""

    READS = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal")
    SHAPES = ("aten.nonzero", "aten.masked_select", "aten._unique2", "aten.bincount")

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        if not _inside_kernel and name in self.READS:
            self.report("scalar", f"{func} reads a value")
        if not _inside_kernel and name in self.SHAPES:
            self.report("sync", f"{func} has a result whose shape the host waits for")
        return func(*args, **(kwargs or {}))


class _Waits(TorchFunctionMode):
    """Methods of a tensor that bring its content to the host: on a CPU tensor they do nothing that
    a dispatch mode would see.
    """

    METHODS = ("tolist", "numpy", "cpu", "__array__", "__reduce_ex__", "__dlpack__")

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not _inside_kernel and name in self.METHODS:
            self.report("sync", f"Tensor.{name} waits for the device")
        return func(*args, **(kwargs or {}))


_listeners: list[Report] = []
_hooked = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    # An audit hook stays for ever: it must cost nothing while nobody listens.
    if _listeners and not _inside_kernel and event in ("open", "os.listdir", "os.scandir"):
        _listeners[-1]("file", f"{event} of {args[0]!r}")


@contextlib.contextmanager
def _files(report: Report) -> Iterator[None]:
    """Everything that opens a file in this process, however it is spelled."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    _listeners.append(report)
    try:
        yield
    finally:
        _listeners.pop()
