"""`LMHead`, the module that serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lmhead import (
    draw,
    groups,
    memory,
    operators,  # noqa: F401  registers torch.ops.lmhead
    ops,
    order,
    sample_operators,
    sampling,
    shapes,
    sharing,
)
from lmhead.chooser import DEFAULTS, Chooser
from lmhead.comm import Call, Comm
from lmhead.memory import Memory
from lmhead.ops import Plan
from lmhead.route import Facts, Route, RouteStats, Tally, choose_by
from lmhead.sampling import Form, Request, Sample
from lmhead.shapes import Layout, Rows
from lmhead.tables import Choice
from lmhead.workspace import Workspace

VERSION = "0.1.0"

# What a capture must find ready: the row counts, whether logits are replicated, and of `out` its
# row stride and alignment; or, of a draw, the form of its messages, whether full logits are
# exchanged for it and whether it is shared.
_WarmKey = tuple[tuple[int, ...], bool, tuple[int, int] | tuple[Form, bool, bool] | None]


@dataclass(frozen=True)
class WarmupReport:
    """What `LMHead.warmup` did and holds on this rank, in bytes; None where it is not measured, on
    a CPU.  An engine that sizes its KV cache takes what the device has free afterwards.
    """

    rows: tuple[tuple[int, ...], ...]  # what is ready: rows held, per rank or set of ranks
    workspace_bytes: dict[str, int]  # kept buffers by purpose; they lie in torch's allocator
    collective_bytes: int  # moved through the collectives before any call
    communicator_bytes: int | None  # taken by the backend: when the head was built, and here
    kernel_bytes: int | None  # taken by loaded kernels, and whatever else calls took beside torch
    before: Memory | None  # the device's memory
    after: Memory | None
    # By row counts and kernel ("gemm", "reassemble", "copy"): the config of each launch and where
    # it is from.  The same on every rank, but that the copying kernels go by their own rank's rows.
    # Empty for torch's kernels.
    configs: dict[tuple[int, ...], dict[str, Choice]]

    @property
    def device_bytes(self) -> int | None:
        """Device memory taken in all, torch's cache of freed blocks included."""
        if self.before is None or self.after is None:
            return None
        return self.before.free - self.after.free

    def __str__(self) -> str:
        held = sum(self.workspace_bytes.values())
        text = f"ready for rows {[list(counts) for counts in self.rows]}: "
        text += f"{held / 2**20:.1f} MiB of buffers"
        if self.before is not None and self.after is not None:
            communicator, kernels = self.communicator_bytes or 0, self.kernel_bytes or 0
            text += f", {communicator / 2**20:.1f} MiB of the communicator"
            text += f", {kernels / 2**20:.1f} MiB of kernels; the device had "
            text += f"{self.before.free / 2**20:.1f} MiB free and has {self.after.free / 2**20:.1f}"
        return text


class LMHead(nn.Module):
    """The vocabulary-sharded head of a model whose attention is data-parallel, or parallel in any
    other way that a `lmhead.Layout` describes.

    Every rank of `group` holds `weight_shard` [S, H] and calls with its own hidden rows [B, H];
    every rank gets its rows' logits [B, vocab_size].  All ranks make the same calls in the same
    order.  Where ranks of an attention group hold the same rows, each calls with all that it holds
    and gets the logits of those that it owns, an equal part of the group's; `share` hands drawn
    tokens back to the whole group.

    Args:
        weight_shard: [S, H] bf16, fp16 or fp32; rank r holds vocabulary rows r*S to (r+1)*S.  Used
            as given: no copy, no cast, and a Parameter stays the very same object, so tied weights
            stay tied.
        vocab_size: V, the true vocabulary, at most N*S.  What lies beyond is padding; its content
            is never seen.
        group: ProcessGroup, 1-D DeviceMesh, or None for the default group (one rank where there is
            none).  Once it has been destroyed every call raises RuntimeError, compiled ones too:
            build a new head.
        bias: [S], added to the fp32 accumulator.
        scale: multiplies (hidden @ weight.T + bias).
        softcap: cap * tanh(x / cap) after the scale; None for none.
        logits_dtype: of the result; the weight's by default.  float32 logits come from fp32
            accumulators.
        wire_dtype: of what is exchanged; the logits' by default.  bfloat16 or float16 under float32
            logits halves the bytes and rounds once more, as published engines do.
        route: "all_to_all", "all_gather" or None (decide; LMHEAD_ROUTE may ask too).
        layout: how the ranks share attention, `Layout.of(tp_size, dp_size, attn_cp_size)`; None for
            ranks that each have rows of their own.
        policy: "auto", or "sglang" to fall back to the all-gather where SGLang v0.5.18 does
            (`lmhead.route`).
        kernels: "triton", "torch" or None (Triton on CUDA, torch on CPU; LMHEAD_KERNELS may ask
            too).
        deterministic: a row's logits have the same bits whatever the batch size, its neighbours,
            N and the number of threads (batch invariance), for H up to 16384.  The GEMM then runs
            in tiles of one size, never by a tuned table: on CUDA weight tiles are read once per 128
            rows, and fp32 runs without cuBLAS; on a CPU every product is an fp32 one of 16 rows,
            128 columns and at most 512 terms, and longer sums are added up block by block.  For one
            row that takes 4 to 5 times as long as the plain product; for 32 rows as long in fp32,
            and in bf16 a quarter of the time on a CPU without bf16 instructions and 4 to 9 times on
            one with them (H = 2048 and 7168, one thread, AMD EPYC, 2026-12).  A CPU whose library
            sums up even these products in several orders is refused, by the library's name.  The
            bits are those of one machine, torch and library: another vendor's CPU or another
            instruction set may add up a block in another order, which may change the last bits.
        check_finite: refuse weights with NaN or infinity in a true vocabulary row (reads the weight
            once).

    The constructor makes one small all-gather that raises the same error on every rank where
    vocab_size, shapes, dtypes, arithmetic, layout, route, policy, kernels, `deterministic` or
    version differ between ranks.  With LMHEAD_CHECK=1 every call is checked so.

    Raises ValueError or TypeError, with the numbers, for what is wrong with the arguments.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        weight_shard: torch.Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        logits_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        route: str | None = None,
        layout: Layout | None = None,
        policy: str = "auto",
        kernels: str | None = None,
        deterministic: bool = False,
        check_finite: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(weight_shard, torch.Tensor):
            raise TypeError(f"weight_shard must be a tensor, got {type(weight_shard).__name__}")
        self._comm = Comm(group, weight_shard.device)
        self._graph_name = groups.graph_name(self._comm.group)
        self._workspace = Workspace()
        self._calls = 0
        self._closed = False
        self._warmed: set[_WarmKey] = set()
        self._last_route: Route | None = None
        self._last_rows: Rows | None = None
        self._tally = Tally()
        self.vocab_size = vocab_size
        self.scale = scale
        self.softcap = softcap
        self._deterministic = bool(deterministic)
        self._asked_logits, self._asked_wire = logits_dtype, wire_dtype
        self._asked_route, self._asked_kernels = ops.asked_route(route), kernels
        self._layout = Layout.data_parallel(self._comm.ranks) if layout is None else layout
        self._policy = policy
        self.weight = _parameter(weight_shard)
        self.bias = None if bias is None else _parameter(bias)
        self._check_calls = ops.checking()
        self._settled: tuple[object, ...] | None = None
        before = memory.read(weight_shard.device)
        self._settle(check_finite)
        # The first collective makes the communicator.
        self._communicator = memory.taken_outside(before, memory.read(weight_shard.device))

    @classmethod
    def from_full(
        cls,
        weight: torch.Tensor,
        vocab_size: int | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        bias: torch.Tensor | None = None,
        multiple: int = 1,
        copy: bool = False,
        **options: object,
    ) -> LMHead:
        """Build from the full weight [V, H] (and bias [V]) that every rank can see, taking this
        rank's rows.

        `vocab_size` is the weight's rows by default; a weight padded elsewhere may have more.  S is
        rounded up to `multiple`.  The shard is a view of `weight`, so tied weights stay tied,
        except on a rank that needs padding rows; `copy=True` copies it, so that the full weight can
        be freed (and `torch.save` saves the shard alone).  The other options are the constructor's.
        """
        if vocab_size is None and weight.dim():
            vocab_size = weight.shape[0]
        comm = Comm(group, weight.device)
        with torch.no_grad():
            try:
                shard, bias_shard = (
                    None
                    if full is None
                    else shapes.shard_weight(
                        full.detach(),
                        comm.ranks,
                        comm.rank,
                        vocab_size=vocab_size,
                        multiple=multiple,
                    )
                    for full in (weight, bias)
                )
            except (ValueError, TypeError) as error:
                # The other ranks wait in their constructor's check, so the mistake is told there.
                comm.agree(
                    {}, error, Call("constructor", (), 0, str(weight.dtype), 0), weight.device
                )
                raise
            assert shard is not None
            if copy:
                shard = shard.clone()
                bias_shard = None if bias_shard is None else bias_shard.clone()
        assert vocab_size is not None
        return cls(shard, vocab_size, group, bias=bias_shard, **options)  # type: ignore[arg-type]

    @property
    def last_route(self) -> Route | None:
        """The route of the latest call and its reason; None before the first."""
        return self._last_route

    @property
    def last_rows(self) -> Rows | None:
        """Who held and who owned the rows of the latest call; None before the first."""
        return self._last_rows

    def stats(self) -> dict[str, RouteStats]:
        """By route, how many calls took it and by which rules, and the bytes of logits (of
        candidates, for "candidates") that crossed this rank's link in them.

        Counted are eager calls; a capture counts once, its replays and compiled code not at all.
        Warm-ups do not count.
        """
        return self._tally.read()

    @property
    def layout(self) -> Layout:
        """How the ranks share attention."""
        return self._layout

    @property
    def checking(self) -> bool:
        """Whether LMHEAD_CHECK=1 when the head was built: every call is agreed among the ranks."""
        return self._check_calls

    @property
    def ranks(self) -> int:
        """N."""
        return self._comm.ranks

    @property
    def shard(self) -> int:
        """S, this rank's weight rows, padding included."""
        return self.weight.shape[0]

    def forward(
        self,
        hidden: torch.Tensor,
        row_counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        *,
        replicate: bool = False,
    ) -> torch.Tensor:
        """hidden [B, H], this rank's own rows -> logits [B, V] in storage of their own, or in
        `out`.

        B is the same on every rank, or `row_counts` is a host list of all N counts, the same list
        on all ranks, zeros allowed.  `out` [B, V] has the logits' dtype and contiguous columns.

        In a layout whose attention groups have several ranks, hidden are the rows that this rank
        holds, `row_counts` has one count per set of ranks that hold the same rows
        (`Layout.sets`), and the result has the rows that this rank owns: an equal part of its
        group's, in the order of `last_rows`.  `replicate=True` gives each rank all G rows of its
        group, [G, V], for as many times the bytes as the group has ranks (`lmhead explain` says how
        many).

        Raises ValueError or TypeError before any collective; `lmhead.CollectiveError` where a
        collective fails; RuntimeError in a capture that `warmup` has not prepared, after `close`,
        or where the head's group has been destroyed.
        """
        if torch.compiler.is_compiling():
            self._open()
            return self._forward_compiled(hidden, row_counts, out, replicate=replicate)
        return self._call(hidden, row_counts, out, gathered=False, replicate=replicate)

    def forward_gathered(
        self,
        gathered: torch.Tensor,
        row_counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        *,
        replicate: bool = False,
    ) -> torch.Tensor:
        """The same for an engine that has gathered the rows already: gathered [T, H], in rank
        order (of those that hold them), equal on all ranks.  T is a multiple of N (of
        `Layout.sets`), or `row_counts` adds up to it.  No hidden row is moved.
        """
        if torch.compiler.is_compiling():
            self._open()
            return self._forward_compiled(
                gathered, row_counts, out, gathered=True, replicate=replicate
            )
        return self._call(gathered, row_counts, out, gathered=True, replicate=replicate)

    def sample(
        self,
        hidden: torch.Tensor,
        *,
        row_counts: Sequence[int] | None = None,
        route: str | None = None,
        details: bool = False,
        share: bool = False,
        **parameters: Any,
    ) -> torch.Tensor | Sample:
        """hidden [B, H], this rank's own rows -> their next tokens, ids [B] int64; -1 for a row
        that has none (all NaN or masked).  Logits are not exchanged: each shard sends its
        candidates to the row's owner, kilobytes.

        In a layout whose attention groups have several ranks, hidden are the rows that this rank
        holds, parameters are of all G rows of its group (the same on each of its ranks), and the
        result is of those that it owns; `share=True` hands the group's to all its ranks, as `share`
        does.  Where a row that no filter cuts may have no seed (no `seeds`, or a tensor of them),
        one more small collective hands its owner's to the group.

        With `logprobs`, `logprob_ids` or `details=True` the result is a `Sample`, which holds the
        log-probabilities, each row's status and the route as well.

        Parameters are numbers or [B] tensors on the head's device, in any mixture, and are applied
        in this order:
            mask: [B, V] bool, or [B, ceil(V / 32)] int32 of bits, lowest first; true allows.
            logit_bias: (ids [B, M], values [B, M]), added; ids are padded with -1.
            repetition_penalty, frequency_penalty, presence_penalty: as vLLM defines them, over
                prompt_tokens [B, P] (repetition alone) and output_tokens [B, O], padded with -1.
            temperature: 1.0 by default; below 1e-5 greedy, the lowest id among equals.
            min_p: tokens at least so likely as the likeliest times min_p.
            top_k: the k most likely, the lowest ids among equals; 0, -1, None or k >= V: all.
            top_p: the most likely until their mass reaches top_p of what the others left.
            seeds, positions: int64.  The noise is a function of the row's seed, its position and
                the token's id alone: the same token for every N, batch and kernel.  A row with seed
                -1, or all without `seeds`, draws from torch's default generator, apart on each
                rank.
        and about the answer:
            logprobs: None, or the number n of most likely tokens to give beside the drawn one; of
                the model's own logits, before all of the above.
            logprob_ids: [B, L] ids whose log-probability is asked for; -1 for none.
            candidates: C, per shard and row: top_k's number or 64 where there is need of more than
                one.
            fallback: where C candidates do not cover a row (top-p or min-p without top-k, or a
                tensor's k above C), all ranks exchange full logits for it in the same call, which
                `last_route` and the result say.  False gives such rows id -1 and waits for no
                device; a capture wants that.

        Numbers, the presence of a tensor and the width of a list are the same on every rank, like
        `row_counts`; what a tensor holds is each rank's own.  `route` "all_to_all" or "all_gather"
        draws from full logits.  Values of CUDA tensors are checked under LMHEAD_CHECK=1 alone.

        Raises as `forward` does.
        """
        request = Request(**parameters)
        compiling = torch.compiler.is_compiling()
        if compiling:
            self._open()
            sample = self._sample_compiled(hidden, row_counts, route, request, share)
        else:
            sample = self._sample(hidden, row_counts, route, request, share=share)
        plain = request.logprobs is None and request.logprob_ids is None and not details
        return sample.ids if plain else sample

    def share(
        self, drawn: torch.Tensor | Sample, row_counts: Sequence[int] | None = None
    ) -> torch.Tensor | Sample:
        """What was drawn for the rows that this rank owns, ids [B] (or any tensor [B, ...]) or a
        `Sample` -> the same of all G rows of its attention group, on each of the group's ranks.

        One small collective of the head's group: every rank calls.  `row_counts` as in the call
        that drew them; None for those of the latest eager call (replays of a graph are none).
        Where every rank is an attention group of its own, `drawn` is returned as it is.

        Raises ValueError or TypeError before any collective.
        """
        parts = drawn.tensors() if isinstance(drawn, Sample) else [drawn]
        if torch.compiler.is_compiling():
            self._open()
            found = self._share_compiled(parts, row_counts)
        else:
            found = self._share(parts, row_counts)
        return drawn.with_tensors(found) if isinstance(drawn, Sample) else found[0]

    def warmup(
        self,
        rows: int | Iterable[int | Sequence[int]],
        out: torch.Tensor | None = None,
        sample: Mapping[str, Any] | None = None,
        *,
        replicate: bool = False,
    ) -> WarmupReport:
        """Do everything that a first call does, for each entry of `rows`, before a capture or a
        memory measurement.

        An entry is B, the same on every rank, or a list of N counts (of `Layout.sets` counts: of
        the rows that ranks hold).  Runs both collectives once
        with 4 MiB per peer on CUDA, allocates the buffers for the largest, compiles and loads every
        kernel; after it nothing persistent is allocated.  With `out`, a buffer of at least as many
        rows, calls that write into it are made ready as well; with `sample`, parameters of
        `LMHead.sample` (tensors of at least as many rows), such draws; with `replicate`, calls
        that replicate logits.  Every rank calls with the same rows.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("warmup cannot be compiled: call it before the compiled code runs")
        self._open()
        self._comm.require()
        entries = [rows] if isinstance(rows, int) else list(rows)
        if not entries:
            raise ValueError("warmup needs at least one row count")
        device = self.weight.device
        if ops.is_capturing(device):
            raise RuntimeError("warmup cannot run inside a capture: call it before")
        self._settle_again()
        self._workspace.capturing(False)
        wanted = list(dict.fromkeys(self._entry(entry) for entry in entries))  # each once
        if out is not None:
            for counts in wanted:
                kept = counts.group_total if replicate else counts.own
                shapes.check_out(out[:kept], kept, self.vocab_size, self._logits_dtype, device)
        before = memory.read(device)
        moved = self._comm.warm_up(device)
        connected = memory.read(device)
        more = memory.taken_outside(before, connected)
        if self._communicator is not None and more is not None:
            self._communicator += more
        if self._chooser is not None:
            call = Call("warmup", (), self.shard, str(self.weight.dtype).removeprefix("torch."), 0)
            if self._chooser.agree(self._comm, self._sizes, call, device):
                self._warmed.clear()
        largest = max(max(counts.held) for counts in wanted)
        sets = self._layout.sets
        ops.reserve_gather(self._comm, sets, largest, self._workspace, self.weight)
        for counts in sorted(wanted, key=lambda known: known.total, reverse=True):
            hidden = torch.zeros(
                (counts.brought, self.weight.shape[1]), dtype=self.weight.dtype, device=device
            )
            given = list(counts.held)
            with torch.no_grad():
                for whole in (False, True) if replicate else (False,):
                    self._call(hidden, given, None, gathered=False, replicate=whole, warming=True)
                if out is not None:
                    part = out[: counts.group_total if replicate else counts.own]
                    self._call(
                        hidden, given, part, gathered=False, replicate=replicate, warming=True
                    )
                ids = torch.zeros(counts.own, dtype=torch.int64, device=device)
                self._share([ids], given)
                if sample is not None:
                    self._warm_sample(hidden, counts, sample)
        after = memory.read(device)
        return WarmupReport(
            rows=tuple(counts.held for counts in wanted),
            workspace_bytes=self._workspace.bytes(),
            collective_bytes=moved,
            communicator_bytes=self._communicator,
            kernel_bytes=memory.taken_outside(connected, after),
            before=before,
            after=after,
            configs={
                counts.held: self._chooser.choices(counts, self._sizes)
                for counts in wanted
                if self._chooser is not None
            },
        )

    def close(self) -> None:
        """Give the buffers back.  Calls after it raise RuntimeError; the group is the caller's and
        stays.  May be called twice, and after a collective has failed.
        """
        self._closed = True
        self._workspace.clear()
        self._warmed.clear()

    def extra_repr(self) -> str:
        return (
            f"vocab_size={self.vocab_size}, shard={tuple(self.weight.shape)}, ranks={self.ranks}, "
            f"dtype={self.weight.dtype}, bias={self.bias is not None}, scale={self.scale}, "
            f"softcap={self.softcap}, layout={self._layout}"
        )

    def _settle(self, check_finite: bool = False) -> None:
        """Validate the head as it now stands, with all ranks; they go on together or raise
        together.
        """
        error: Exception | None = None
        fields: dict[str, object] = {}
        try:
            self._validate(check_finite)
            fields = {
                "version": VERSION,
                "vocab_size": self.vocab_size,
                "shard rows": self.shard,
                "hidden": self.weight.shape[1],
                "dtype": str(self.weight.dtype),
                "logits_dtype": str(self._logits_dtype),
                "wire_dtype": str(self._wire_dtype),
                "bias": self.bias is not None,
                "scale": float(self.scale),
                "softcap": None if self.softcap is None else float(self.softcap),
                "kernels": self._kernels,
                "deterministic": self._deterministic,
                "route": self._route.name,
                "layout": repr(self._layout),
                "policy": self._policy,
                "LMHEAD_CHECK": self._check_calls,
            }
        except (ValueError, TypeError) as caught:
            error = caught
        call = Call(
            "constructor",
            (),
            self.weight.shape[0] if self.weight.dim() else 0,
            str(self.weight.dtype).removeprefix("torch."),
            0,
        )
        self._comm.agree(fields, error, call, self.weight.device)
        self._settled = self._form()

    def _settle_again(self) -> None:
        """Settle a head that was moved or cast since; on all ranks, as it was on all."""
        if self._settled != self._form():
            self._warmed.clear()
            self._settle()

    def _form(self) -> tuple[object, ...]:
        """What a call must find as it was settled: `.to()`, `load_state_dict(assign=True)` and
        assigned parameters change it, on every rank alike; the next call then settles anew.
        """
        weight, bias = self.weight, self.bias
        form = (weight.shape, weight.dtype, weight.device)
        return form if bias is None else (*form, bias.shape, bias.dtype, bias.device)

    def _validate(self, check_finite: bool) -> None:
        shapes.check_weight(self.weight, self.bias)
        shapes.check_epilogue(self.scale, self.softcap)
        shapes.check_vocab(self.vocab_size, self.shard, self.ranks)
        self._logits_dtype, self._wire_dtype = shapes.resolve_dtypes(
            self.weight.dtype, self._asked_logits, self._asked_wire
        )
        device = self.weight.device
        self._comm.serve(device)
        self._kernels = ops.choose_kernels(self._asked_kernels, device)
        if self._deterministic:
            ops.check_deterministic(self._kernels, self.weight.shape[1], device)
        ops.check_layout(self._layout, self._comm)
        self._route = self._choose(self._asked_route)
        self._sizes = ops.sizes_of(
            self.weight, self._wire_dtype, self._logits_dtype, self._deterministic
        )
        self._chooser = Chooser(device) if self._kernels == "triton" else None
        if check_finite:
            true_rows = max(0, min(self.shard, self.vocab_size - self._comm.rank * self.shard))
            finite = torch.isfinite(self.weight[:true_rows].detach()).all(dim=1)
            if not bool(finite.all()):
                bad = (~finite).nonzero().flatten()
                raise ValueError(
                    f"{bad.numel()} of {true_rows} weight rows are not finite, the first is row "
                    f"{int(bad[0])} of rank {self._comm.rank}'s shard: were the weights loaded?"
                )

    def _choose(
        self, asked: str | None, rows: Rows | None = None, replicate: bool = False
    ) -> Route:
        held = None if rows is None else rows.held
        layout, backend = self._layout, self._comm.backend
        return choose_by(Facts(self.ranks, backend, asked, layout, held, replicate, self._policy))

    def _plan(self, rows: Rows, replicate: bool = False) -> Plan:
        kept = rows.group_total if replicate else rows.own
        return Plan(
            rows,
            self.shard,
            self.vocab_size,
            self._logits_dtype,
            self._wire_dtype,
            self._kernels,
            self._choose(self._asked_route, rows, replicate),
            float(self.scale),
            self.softcap,
            DEFAULTS if self._chooser is None else self._chooser.configs(rows, self._sizes, kept),
            self._deterministic,
            replicate,
        )

    def _call(
        self,
        hidden: torch.Tensor,
        row_counts: Sequence[int] | None,
        out: torch.Tensor | None,
        *,
        gathered: bool,
        replicate: bool = False,
        warming: bool = False,
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return order.untraced(
                LMHead._call,
                self,
                hidden,
                row_counts,
                out,
                gathered=gathered,
                replicate=replicate,
                warming=warming,
            )
        capturing = self._begin()
        plan, error = None, None
        try:
            plan = self._checked_plan(hidden, row_counts, out, gathered, replicate)
        except (ValueError, TypeError) as caught:
            error = caught
        self._agree(plan, error, capturing, op="logits", gathered=gathered, replicate=replicate)
        assert plan is not None
        into = None if out is None else (out.stride(0), out.data_ptr() % 16)
        key = (plan.rows.held, replicate, into)
        if capturing:
            self._require_warm(key)
            if (gathered or self._layout.sets == 1) and plan.kernels == "triton":
                _require_plain(hidden)
        self._workspace.capturing(capturing)
        if not warming:
            self._last_route, self._last_rows = plan.route, plan.rows
            self._tally.add(plan.route, self._logits_bytes(plan))
        result = ops.run_logits(
            self._comm,
            plan,
            self._workspace,
            hidden,
            self.weight,
            self.bias,
            gathered=gathered,
            out=out,
            number=self._calls,
        )
        if warming:
            self._warmed.add(key)
        return result

    def _logits_bytes(self, plan: Plan) -> int:
        size = plan.wire_dtype.itemsize
        return shapes.moved_bytes(plan.route.name, plan.rows, plan.shard, size, plan.replicate)

    def _begin(self) -> bool:
        """Start an eager call; whether a graph is being captured."""
        self._open()
        self._comm.require()
        capturing = ops.is_capturing(self.weight.device)
        if self._settled != self._form():
            if capturing:
                raise RuntimeError(
                    "the head was moved or cast after its last call: call warmup(rows) before "
                    "capturing"
                )
            self._settle_again()
        self._calls += 1
        return capturing

    def _checked_plan(
        self,
        hidden: torch.Tensor,
        row_counts: Sequence[int] | None,
        out: torch.Tensor | None,
        gathered: bool,
        replicate: bool = False,
    ) -> Plan:
        what = "gathered" if gathered else "hidden"
        shapes.check_hidden(hidden, self.weight, what)
        shapes.check_no_grad(bias=self.bias)
        layout, rank = self._layout, self._comm.rank
        if gathered:
            rows = layout.gathered_rows(hidden.shape[0], row_counts, rank, what)
        else:
            rows = layout.own_rows(hidden.shape[0], row_counts, rank)
        plan = self._plan(rows, replicate)
        shapes.check_out(out, plan.result_rows, self.vocab_size, self._logits_dtype, hidden.device)
        shapes.check_no_overlap(out, **{what: hidden, "weight": self.weight, "bias": self.bias})
        return plan

    def _agree(
        self, plan: Plan | None, error: Exception | None, capturing: bool, **said: object
    ) -> None:
        """Raise `error`, what this rank found wrong; under LMHEAD_CHECK=1 all ranks go on with the
        same call, or all raise.
        """
        if self._check_calls and not capturing:
            counts = () if plan is None else plan.rows.held
            fields = {**said, "call": self._calls, "row_counts": list(counts)}
            dtype = str(self._wire_dtype).removeprefix("torch.")
            call = Call("check", counts, self.shard, dtype, self._calls)
            self._comm.agree(fields, error, call, self.weight.device)
        if error is not None:
            raise error

    def _sample(
        self,
        hidden: torch.Tensor,
        row_counts: Sequence[int] | None,
        route: str | None,
        request: Request,
        *,
        share: bool = False,
        warming: bool = False,
    ) -> Sample:
        if torch.compiler.is_compiling():
            return order.untraced(
                LMHead._sample,
                self,
                hidden,
                row_counts,
                route,
                request,
                share=share,
                warming=warming,
            )
        capturing = self._begin()
        plan, error, form = None, None, Form()
        device = self.weight.device
        full = route is not None
        try:
            plan = self._checked_plan(hidden, row_counts, None, False)
            form = request.form(self.vocab_size, self._sampled_columns)
            look = not capturing and (device.type == "cpu" or self._check_calls)
            request.check(plan.rows.group_total, self.vocab_size, device, look)
            if full:
                plan = replace(plan, route=self._choose(route, plan.rows))
        except (ValueError, TypeError) as caught:
            error = caught
        said = {"op": "sample", "form": form.to_list(), "sample route": route, "share": share}
        self._agree(plan, error, capturing, **said)
        assert plan is not None
        key = (plan.rows.held, False, (form, full, share))
        if capturing:
            self._require_warm(key)
            if form.may_miss and form.fallback and not full:
                raise RuntimeError(draw.not_known_in_a_capture(form))
            if self._layout.sets == 1 and plan.kernels == "triton":
                _require_plain(hidden)
        self._workspace.capturing(capturing)
        rank, rows = self._comm.rank, plan.rows.group_total
        unseeded = sampling.unseeded(rows, rank, device)
        sample = draw.run_sample(
            self._comm,
            plan,
            self._workspace,
            hidden,
            self.weight,
            self.bias,
            request.records(rows, form, self.vocab_size, device, unseeded),
            request.mask,
            full=full,
            number=self._calls,
        )
        if share:
            sample = draw.run_share_sample(self._comm, plan, self._workspace, sample, self._calls)
        if warming:
            self._warmed.add(key)
        else:
            self._last_route, self._last_rows = sample.route, plan.rows
            self._tally.add(sample.route, self._drawn_bytes(plan, form, sample.route))
        return sample

    def _drawn_bytes(self, plan: Plan, form: Form, route: Route | None) -> int:
        """Bytes of candidates, of logits, or of both, that a draw moved."""
        assert route is not None
        moved = 0
        if route.name != draw.BY_CANDIDATES.name:
            moved += self._logits_bytes(replace(plan, route=route))
        if route.name == draw.BY_CANDIDATES.name or route.rule == draw.NOT_COVERED:
            way = "all_gather" if plan.route.name == "all_gather" else "all_to_all"
            moved += shapes.moved_bytes(way, plan.rows, form.message_words, 4)
        return moved

    def _share(
        self, parts: Sequence[torch.Tensor], row_counts: Sequence[int] | None
    ) -> list[torch.Tensor]:
        """Parts [B, ...] of the own rows -> [G, ...] of the attention group's."""
        if torch.compiler.is_compiling():
            return order.untraced(LMHead._share, self, parts, row_counts)
        self._open()
        self._comm.require()
        if self._layout.plain:
            return list(parts)
        capturing = ops.is_capturing(self.weight.device)
        rows, error = self._last_rows, None
        try:
            if row_counts is not None:
                rows = self._layout.rows(row_counts, self._comm.rank)
            if rows is None:
                raise ValueError("nothing was called yet whose rows could be shared")
            sharing.check_parts(parts, rows.own, self.weight.device)
        except (ValueError, TypeError) as caught:
            error = caught
        checking = self._check_calls and not capturing
        device = self.weight.device
        sharing.agree(self._comm, rows, parts, error, device, self._calls, checking)
        assert rows is not None
        self._workspace.capturing(capturing)
        return sharing.run_share(self._comm, rows, self._workspace, parts, self._calls)

    def _warm_sample(self, hidden: torch.Tensor, rows: Rows, parameters: Mapping[str, Any]) -> None:
        """A draw for as many rows as the attention group has, whose tensors may have more; shared
        afterwards where there is somebody to share with.
        """
        count = rows.group_total

        def cut(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            return value[:count] if isinstance(value, torch.Tensor) else value

        given = {name: cut(value) for name, value in parameters.items()}
        route, request = given.pop("route", None), Request(**given)
        for share in (False,) if self._layout.plain else (False, True):
            self._sample(hidden, list(rows.held), route, request, share=share, warming=True)

    @property
    def _sampled_columns(self) -> int:
        """Columns among which a shard looks for candidates."""
        return self.vocab_size if self.ranks == 1 else self.shard

    def _require_warm(self, key: _WarmKey) -> None:
        if key not in self._warmed:
            counts, replicate, into = key
            rows = counts[0] if len(set(counts)) == 1 else list(counts)
            extra = "" if into is None else ", out=that buffer"
            if into is not None and isinstance(into[0], Form):
                extra = ", sample=those parameters"
            extra += ", replicate=True" if replicate else ""
            raise RuntimeError(
                f"rows {rows} are captured before they were warmed up: call "
                f"warmup(rows=[{rows}]{extra}) before the "
                "capture, so that no collective is set up and no kernel compiled inside it"
            )

    def _forward_compiled(
        self,
        hidden: torch.Tensor,
        row_counts: Sequence[int] | None,
        out: torch.Tensor | None,
        *,
        gathered: bool = False,
        replicate: bool = False,
    ) -> torch.Tensor:
        """In compiled code the head is one opaque operator, which resolves the group by name and
        validates when it runs: a tracer hides what is raised while it traces.  Dtypes follow the
        weight as it is now: `.to()` settles nothing before an eager call.
        """
        if self._deterministic:  # a graph break, unless the caller wants a full graph
            raise RuntimeError(
                "a deterministic head has no operator for compiled code: call it eagerly, or "
                "compile without fullgraph=True, so that it runs between two graphs"
            )
        logits_dtype, wire_dtype = shapes.resolve_dtypes(
            self.weight.dtype, self._asked_logits, self._asked_wire
        )
        what = "gathered" if gathered else "hidden"
        shapes.check_no_grad(**{what: hidden, "weight": self.weight, "bias": self.bias})
        ranks, rank = self._comm.ranks, self._comm.rank
        rows = hidden.shape[0]
        if self._by_held:
            equal = rows // self._layout.sets if gathered else rows
            group, _, own = self._layout.traced(row_counts, equal, rank)
            rows = group if replicate else own
        elif gathered or row_counts is not None:
            rows = shapes.traced_share(rows, row_counts, ranks, rank)
        arguments = (
            self.weight,
            self.bias,
            self.vocab_size,
            self._graph_name,
            ranks,
            float(self.scale),
            self.softcap,
            logits_dtype,
            wire_dtype,
            row_counts,
            self._asked_kernels or "",
            self._asked_route or "",
        )
        if self._by_held:
            held = (hidden, rows, self._layout.to_list(), gathered, replicate, self._policy)
            if out is None:
                return torch.ops.lmhead.logits_held(*held, *arguments)
            torch.ops.lmhead.logits_held_out(*held, *arguments, out)
            return out
        given = (hidden, rows) if gathered else (hidden,)
        if out is None:
            op = torch.ops.lmhead.logits_gathered if gathered else torch.ops.lmhead.logits
            return op(*given, *arguments)
        op = torch.ops.lmhead.logits_gathered_out if gathered else torch.ops.lmhead.logits_out
        op(*given, *arguments, out)
        return out

    @property
    def _by_held(self) -> bool:
        """Whether compiled code needs the operators that know a layout."""
        return not self._layout.plain or self._policy != "auto"

    def _share_compiled(
        self, parts: Sequence[torch.Tensor], row_counts: Sequence[int] | None
    ) -> list[torch.Tensor]:
        if self._layout.plain:
            return list(parts)
        if row_counts is None:
            raise RuntimeError(
                "share needs row_counts in compiled code, which keeps no call in mind: pass "
                "those of the call that drew, or share=True to it"
            )
        layout = self._layout.to_list()
        rows, _, _ = self._layout.traced(row_counts, 0, self._comm.rank)
        name, ranks = self._graph_name, self.ranks
        return torch.ops.lmhead.share(list(parts), rows, layout, list(row_counts), name, ranks)

    def _sample_compiled(
        self,
        hidden: torch.Tensor,
        row_counts: Sequence[int] | None,
        route: str | None,
        request: Request,
        share: bool = False,
    ) -> Sample:
        """In compiled code a draw is one opaque operator, as `_forward_compiled` says."""
        if self._deterministic:
            raise RuntimeError(
                "a deterministic head has no operator for compiled code: call it eagerly, or "
                "compile without fullgraph=True, so that it runs between two graphs"
            )
        logits_dtype, wire_dtype = shapes.resolve_dtypes(
            self.weight.dtype, self._asked_logits, self._asked_wire
        )
        shapes.check_no_grad(hidden=hidden, weight=self.weight, bias=self.bias)
        rows, device = hidden.shape[0], self.weight.device
        held = None
        if self._by_held:
            rows, _, own = self._layout.traced(row_counts, rows, self._comm.rank)
            held = (rows if share else own, self._layout.to_list(), share, self._policy)
        form = request.form(self.vocab_size, self._sampled_columns)
        request.check(rows, self.vocab_size, device, False)
        unseeded = sampling.unseeded(rows, self._comm.rank, device)
        return sample_operators.sample(
            hidden,
            request.records(rows, form, self.vocab_size, device, unseeded),
            request.mask,
            self.weight,
            self.bias,
            self.vocab_size,
            self._graph_name,
            self.ranks,
            float(self.scale),
            self.softcap,
            logits_dtype,
            wire_dtype,
            row_counts,
            self._asked_kernels or "",
            self._asked_route or "" if route is None else route,
            full=route is not None,
            held=held,
        )

    def _entry(self, entry: int | Sequence[int]) -> Rows:
        counts = [entry] * self._layout.sets if isinstance(entry, int) else list(entry)
        return self._layout.rows(counts, self._comm.rank)

    def _open(self) -> None:
        if self._closed:
            raise RuntimeError("this LMHead is closed")


def _require_plain(hidden: torch.Tensor) -> None:
    """Rows that the GEMM reads as they lie must lie as those of the warm-up did: other strides or
    another alignment are another kernel.
    """
    if not hidden.is_contiguous() or hidden.data_ptr() % 16:
        raise RuntimeError(
            f"rows with strides {hidden.stride()} at address {hidden.data_ptr():#x} are captured, "
            "but warmup made the kernel ready for contiguous rows that start on a 16-byte border: "
            "copy them into such a buffer first"
        )


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    """The Parameter itself, or a Parameter over the same storage that wants no gradient."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=False)
