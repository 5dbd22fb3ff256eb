"""`DecodeGraphs`: a decode step captured once per row bucket and replayed ever after.

torch.cuda.CUDAGraph captures and replays; what it lacks is here: buckets, padding, warming up what
a capture must find ready, one pool for all graphs, and the same object on a CPU, where the step
runs eagerly and everything else is the same, so that a decode loop is written and tested once.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from lmhead import groups
from lmhead.comm import Call
from lmhead.head import LMHead, WarmupReport
from lmhead.shapes import Layout


@dataclass(frozen=True)
class CaptureReport:
    """What `DecodeGraphs.capture` did on this rank."""

    buckets: tuple[int, ...]
    warmups: tuple[WarmupReport, ...]  # one per head
    pool_bytes: int | None  # that torch reserved for all graphs together; None without graphs

    def __str__(self) -> str:
        held = (
            "eager" if self.pool_bytes is None else f"{self.pool_bytes / 2**20:.1f} MiB of graphs"
        )
        return "; ".join([f"buckets {list(self.buckets)}: {held}", *map(str, self.warmups)])


def check_buckets(buckets: Iterable[int]) -> tuple[int, ...]:
    """The row buckets ascending, each once.  Raises TypeError or ValueError for what is no list of
    positive ints.
    """
    if isinstance(buckets, (int, str)):
        raise TypeError(f"buckets must be a list of row counts, got {buckets!r}")
    found = list(buckets)
    for bucket in found:
        if isinstance(bucket, bool) or not isinstance(bucket, int):
            raise TypeError(f"buckets must be ints, got {bucket!r}")
        if bucket < 1:
            raise ValueError(f"buckets must be positive, got {bucket} in {found}")
    if not found:
        raise ValueError("buckets is empty: name at least one row count")
    return tuple(sorted(set(found)))


def choose_bucket(buckets: tuple[int, ...], rows: int) -> int:
    """The least of the ascending `buckets` that holds `rows`: a pure function, so ranks that agree
    on `rows` agree on the graph.  Raises ValueError where none does.
    """
    if rows < 0:
        raise ValueError(f"rows must not be negative, got {rows}")
    if rows > buckets[-1]:
        raise ValueError(
            f"{rows} rows are more than the largest bucket, {buckets[-1]}: add a bucket, or run "
            "this step eagerly on every rank"
        )
    return buckets[bisect.bisect_left(buckets, rows)]


class DecodeGraphs:
    """Replays `step` for any number of rows, from graphs of a few.

    Args:
        step: takes tensors with the same number of rows, and returns a tensor, or a nest of tuples,
            lists and dicts of tensors, with as many rows as it was given.  It must be capturable:
            no host synchronisation, and every rank runs the same collectives.
        buckets: the row counts to capture, in any order.
        heads: the `LMHead`s that `step` calls with exactly the rows it is given; they are warmed up
            for every bucket.  A head that is called with another number is the caller's to warm up.
        out: a buffer with at least the largest bucket's rows that `step` takes as keyword `out`,
            cut to the bucket, as `LMHead.forward` does.  All graphs then share it; without it each
            graph keeps results of its own.
        padding: what fills the rows of an input beyond the real ones; one value, or one per input
            (-1 for a cache slot that must not be written, say).
        eager: run `step` eagerly on CUDA as well, to compare or to debug.  On a CPU it always is.

    Every rank calls with the same row count, or with `agreed`, so that all replay the same bucket;
    a rank without rows calls too.

    Where ranks of an attention group hold the same rows, a head gives fewer rows than it was given:
    a step that ends with `head.sample(..., share=True)` gives as many again (not with
    context parallelism, where it gives those of the whole group).  Draws are warmed up by the
    caller, `head.warmup(buckets, sample=...)`.

    A result lives until the next call: it is memory of the graphs, which the next replay, of
    whatever bucket, may overwrite.  `clone=True` gives one of its own.  Eager calls keep to that:
    they write into kept buffers too.

    Calls run on the current stream; those of one object must not overlap.

    A call asks whether every group that lmhead used in the capture still lives.  Nothing can ask
    that for graphs which torch.cuda.graph or `mode="reduce-overhead"` replay.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        buckets: Iterable[int],
        *,
        heads: Sequence[LMHead] = (),
        out: torch.Tensor | None = None,
        padding: float | Sequence[float] = 0,
        eager: bool = False,
    ) -> None:
        self.buckets = check_buckets(buckets)
        if out is not None and (out.dim() < 1 or out.shape[0] < self.buckets[-1]):
            raise ValueError(
                f"out must have the {self.buckets[-1]} rows of the largest bucket, got "
                f"{tuple(out.shape)}"
            )
        self._step = step
        self._heads = tuple(heads)
        self._out = out
        self._padding = padding
        self._eager = eager
        self._inputs: tuple[torch.Tensor, ...] = ()  # each for the largest bucket
        self._fill: tuple[float, ...] = ()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._results: dict[int, Any] = {}  # by bucket, what its graph (or eager call) writes
        self._groups: tuple[dist.ProcessGroup, ...] = ()  # that lmhead's calls in it went through
        self._why_not = "capture(...) has not been called"
        self._calls = itertools.count(1)

    def bucket(self, rows: int) -> int:
        """The bucket that serves `rows`, the largest count of any rank.  The same on every rank
        that is told the same.
        """
        return choose_bucket(self.buckets, rows)

    @property
    def captured(self) -> bool:
        """Whether calls are ready to be replayed (eagerly run, on a CPU)."""
        return not self._why_not

    def capture(self, *examples: torch.Tensor, warmups: int = 2) -> CaptureReport:
        """Make everything ready: buffers, heads, `warmups` eager steps per bucket, then one graph
        per bucket, largest first, into one pool.

        `examples` are inputs as calls will bring them; their shapes (but for rows), dtypes and
        device count, their values do not.  All ranks call this at the same time.  What was captured
        before is given back first.

        Raises ValueError or TypeError for examples or a step that do not fit, and RuntimeError
        where a capture fails: nothing is captured then, eager calls of `step` go on working, and
        `capture` may be called again.
        """
        self.close()
        if not examples or any(not isinstance(e, torch.Tensor) or not e.dim() for e in examples):
            raise TypeError("capture needs one example tensor [rows, ...] per input of the step")
        if len({example.device for example in examples}) > 1:
            raise ValueError(
                f"inputs must be on one device, got {[str(e.device) for e in examples]}"
            )
        if warmups < 1:
            raise ValueError(f"warmups must be positive, got {warmups}")
        self._fill = self._fills(len(examples))
        device, largest = examples[0].device, self.buckets[-1]
        eager = self._eager or not _can_capture(device)
        # Not inference tensors, whatever mode this is called in: calls may come in another.
        with torch.inference_mode(False), torch.no_grad():
            self._inputs = tuple(
                example.new_full((largest, *example.shape[1:]), fill)
                for example, fill in zip(examples, self._fill, strict=True)
            )
        with torch.no_grad(), groups.watch() as used:
            reports = tuple(head.warmup(self.buckets, self._out) for head in self._heads)
            if eager:
                self._keep_eager(warmups)
                pool_bytes = None
            else:
                pool_bytes = self._capture_all(device, warmups)
        self._groups = tuple(used.values())
        self._why_not = ""
        return CaptureReport(self.buckets, reports, pool_bytes)

    def __call__(
        self,
        *inputs: torch.Tensor,
        agreed: int | Sequence[int] | None = None,
        clone: bool = False,
    ) -> Any:
        """inputs [rows, ...] -> what `step` returns for them, exactly `rows` rows of each result.

        `agreed` is the largest row count of any rank, or the host list of all ranks' counts (of a
        layout's sets of ranks that hold the same rows), equal on every rank; without it every rank
        brings as many rows.  Where no rank has any, nothing runs.  The result lives until the next
        call, unless it is a `clone`.

        Raises RuntimeError before `capture`, and where a group that lmhead's calls in `step` went
        through has been destroyed since; ValueError or TypeError, before anything runs, for inputs
        unlike its examples or rows beyond the largest bucket.
        """
        if self._why_not:
            raise RuntimeError(
                f"{self._why_not}: call capture(*examples) on every rank first, or the step itself"
            )
        for group in self._groups:  # a replay asks nobody, and would wait for ranks that are gone
            groups.require(group)
        rows = most = bucket = 0
        error: Exception | None = None
        try:
            rows = self._check_inputs(inputs)
            most = _largest(agreed, rows, self._heads[0].layout if self._heads else None)
            bucket = self.bucket(most)
        except (ValueError, TypeError) as caught:
            error = caught
        self._check_agreed(bucket, error)
        if most == 0:  # every rank knows that no rank has rows
            return tree_map(lambda result: _head_rows(result, 0, clone), self._results[bucket])
        for kept, given, fill in zip(self._inputs, inputs, self._fill, strict=True):
            kept[:rows].copy_(given, non_blocking=True)
            if rows < bucket:
                kept[rows:bucket].fill_(fill)
        if bucket in self._graphs:
            self._graphs[bucket].replay()
        else:
            with torch.no_grad():
                self._run_eager(bucket)
        return tree_map(lambda result: _head_rows(result, rows, clone), self._results[bucket])

    def close(self) -> None:
        """Give graphs, their pool and all buffers back; results that are not clones die with them.
        May be called twice.
        """
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._results.clear()
        self._groups = ()
        self._inputs = ()
        self._why_not = "capture(...) has not been called"

    def _run_step(self, bucket: int) -> Any:
        given = [kept[:bucket] for kept in self._inputs]
        if self._out is None:
            return self._step(*given)
        return self._step(*given, out=self._out[:bucket])

    def _keep_eager(self, warmups: int) -> None:
        """Run every bucket, and keep buffers for the results of the largest; smaller ones share
        them, as graphs share their pool.
        """
        kept: Any = None
        for bucket in reversed(self.buckets):
            for _ in range(warmups):
                result = self._checked(self._run_step(bucket), bucket)
            if kept is None:
                with torch.inference_mode(False):
                    kept = tree_map(self._buffer_for, result)
            self._results[bucket] = tree_map(lambda leaf, b=bucket: _head_rows(leaf, b), kept)

    def _buffer_for(self, result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        if self._out is not None and _same_storage(result, self._out):
            return result
        return torch.empty_like(result, memory_format=torch.contiguous_format)

    def _run_eager(self, bucket: int) -> None:
        result = self._checked(self._run_step(bucket), bucket)
        kept, fresh = tree_leaves(self._results[bucket]), tree_leaves(result)
        for target, source in zip(kept, fresh, strict=True):
            if isinstance(source, torch.Tensor) and not _same_storage(source, target):
                target.copy_(source)

    def _capture_all(self, device: torch.device, warmups: int) -> int:
        """One graph per bucket; the bytes that torch reserved for their pool."""
        with torch.cuda.device(device):
            stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                for bucket in reversed(self.buckets):
                    for _ in range(warmups):
                        self._checked(self._run_step(bucket), bucket)
            stream.wait_stream(side)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            pool = torch.cuda.graph_pool_handle()
            for bucket in reversed(self.buckets):
                graph, own = torch.cuda.CUDAGraph(), None
                try:
                    with torch.cuda.graph(graph, pool=pool):
                        try:
                            self._results[bucket] = self._checked(self._run_step(bucket), bucket)
                        except Exception as error:
                            own = error  # the end of a broken capture raises over it
                            raise
                except Exception as error:
                    torch.cuda.set_stream(stream)  # which a broken capture leaves on its own
                    self._fail(bucket, own or error)
                self._graphs[bucket] = graph
            return torch.cuda.memory_reserved() - before

    def _fail(self, bucket: int, error: Exception) -> NoReturn:
        """Give everything back and say which bucket failed, and why."""
        self.close()
        text = (
            f"capturing {bucket} rows (of buckets {list(self.buckets)}) failed: "
            f"{type(error).__name__}: {error}"
        )
        self._why_not = text
        raise RuntimeError(
            f"{text}. Nothing is captured; the step may be called eagerly, and capture() again, on "
            "every rank"
        ) from error

    def _checked(self, result: Any, bucket: int) -> Any:
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        wrong = [leaf for leaf in leaves if leaf.dim() < 1 or leaf.shape[0] != bucket]
        if wrong or not leaves:
            shapes = [tuple(leaf.shape) for leaf in leaves]
            raise ValueError(
                f"the step was given {bucket} rows and must return tensors of as many, got {shapes}"
            )
        return result

    def _fills(self, count: int) -> tuple[float, ...]:
        if isinstance(self._padding, (int, float)):
            return (self._padding,) * count
        if len(self._padding) != count:
            raise ValueError(f"padding has {len(self._padding)} values for {count} inputs")
        return tuple(self._padding)

    def _check_inputs(self, inputs: tuple[torch.Tensor, ...]) -> int:
        """The rows that all inputs share."""
        if len(inputs) != len(self._inputs):
            raise TypeError(
                f"the step was captured with {len(self._inputs)} inputs, not {len(inputs)}"
            )
        for place, (given, kept) in enumerate(zip(inputs, self._inputs, strict=True)):
            if not isinstance(given, torch.Tensor):
                raise TypeError(f"input {place} must be a tensor, got {type(given).__name__}")
            if given.dim() < 1 or given.shape[1:] != kept.shape[1:]:
                shape = ", ".join(["rows", *map(str, kept.shape[1:])])
                raise ValueError(
                    f"input {place} must be [{shape}] as captured, got {tuple(given.shape)}"
                )
            if given.dtype != kept.dtype:
                raise TypeError(f"input {place} is {given.dtype} but was captured as {kept.dtype}")
            if given.device != kept.device:
                raise ValueError(f"input {place} is on {given.device}, captured on {kept.device}")
            if given.shape[0] != inputs[0].shape[0]:
                raise ValueError(
                    f"input {place} has {given.shape[0]} rows but input 0 has {inputs[0].shape[0]}"
                )
        return inputs[0].shape[0]

    def _check_agreed(self, bucket: int, error: Exception | None) -> None:
        """Raise `error`; under LMHEAD_CHECK=1 all ranks replay the same bucket, or all raise."""
        if self._heads and self._heads[0].checking:
            head = self._heads[0]
            dtype, number = str(head.weight.dtype), next(self._calls)
            call = Call("replay", (bucket,) * head.ranks, head.shard, dtype, number)
            head._comm.agree({"op": "replay", "bucket": bucket}, error, call, head.weight.device)
        if error is not None:
            raise error


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def _largest(agreed: int | Sequence[int] | None, rows: int, layout: Layout | None) -> int:
    """The row count that the bucket is chosen by."""
    if agreed is None:
        return rows
    if isinstance(agreed, torch.Tensor):
        raise TypeError(
            "agreed must be an int or a host list of ints: a device tensor would make every step "
            "wait for the device"
        )
    counts = [agreed] if isinstance(agreed, int) else list(agreed)
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in counts):
        raise ValueError(f"agreed must be non-negative ints, got {agreed!r}")
    if layout is not None and not isinstance(agreed, int) and len(counts) != layout.sets:
        who = "ranks" if layout.plain else "sets of ranks that hold rows"
        raise ValueError(f"agreed must name {layout.sets} {who}, got {len(counts)}: {agreed!r}")
    if rows > max(counts):
        raise ValueError(f"this rank has {rows} rows, more than the agreed {agreed!r}")
    return max(counts)


def _head_rows(result: Any, rows: int, clone: bool = False) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    return result[:rows].clone() if clone else result[:rows]


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
