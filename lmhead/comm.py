"""The collectives of the head, each with the context that its error needs.

`Comm` wraps one process group: its own rank and size within the group (never the global rank), the
three collectives that the head uses, and the check of what only all ranks together can know.  It
never makes a group, and holds the group itself, not its name (`lmhead.groups`).

Payloads go to the backend as flat, contiguous 1-D views: graph capture takes no others.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lmhead import arrivals, groups, paths
from lmhead.arrivals import Arrivals
from lmhead.route import ALL_TO_ALL_BACKENDS
from lmhead.shapes import BYTES_ONLY

# A rank's part of the check: JSON, padded to this many bytes.
CHECK_BYTES = 4096
# NCCL's first exchange sets up its peer connections and buffers; 4 MiB per peer covers 120 rows x
# 16160 columns in bf16 (SGLang pull request 32313 warms up with the same amount).
WARMUP_BYTES_PER_PEER = 4 << 20


class CollectiveError(RuntimeError):
    """A collective of the head failed or timed out.  `record` holds the numbers of the message; the
    backend's own error is chained as __cause__.
    """

    def __init__(self, message: str, record: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.record = dict(record)


@dataclass(frozen=True)
class Call:
    """What a collective is part of, for its error: rows per rank, columns, dtype, and the caller's
    call number.
    """

    op: str
    rows: tuple[int, ...]
    columns: int
    dtype: str
    number: int


class Comm:
    """One group's collectives.  `group` is a ProcessGroup, a 1-D DeviceMesh, or None for the
    default group; without an initialised torch.distributed, None means one rank.  Raises ValueError
    where this process is not a member, or the group cannot serve tensors of `device`, RuntimeError
    where the group has been destroyed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.group = groups.process_group(group)
        self.ranks, self.rank, self.name, self.backend = 1, 0, "", "none"
        if self.group is None:
            return
        groups.require(self.group)
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError(
                "this process is not a member of the group: only members may build a head or "
                "exchange"
            )
        self.ranks = dist.get_world_size(self.group)
        self.name = self.group.group_name
        self.serve(torch.device("cpu") if device is None else device)

    def serve(self, device: torch.device) -> None:
        """Find the backend for tensors of `device`; ValueError where the group has none."""
        if self.group is not None and self.ranks > 1:
            self.backend = _backend(self.group, device)

    @classmethod
    def local(cls) -> Comm:
        """One rank without a group, whether or not torch.distributed is initialised."""
        comm = cls.__new__(cls)
        comm.group, comm.ranks, comm.rank, comm.name, comm.backend = None, 1, 0, "", "none"
        return comm

    def require(self) -> None:
        """RuntimeError where the group has been destroyed; no collective, 0.3 us on the host."""
        if self.group is not None:
            groups.require(self.group)

    @property
    def exchanges(self) -> bool:
        """Whether the backend is known to have an all-to-all with split sizes."""
        return self.backend in ALL_TO_ALL_BACKENDS

    @property
    def raises(self) -> bool:
        """Whether a collective that lacks a rank raises in Python, on gloo at once where the rank
        is dead.  NCCL's ends by its watchdog, which names no rank.
        """
        return self.backend == "gloo"

    @property
    def gathers_by_exchange(self) -> bool:
        """Whether hidden rows reach all ranks by ONE all-to-all of a copy per rank, and not by the
        true all-gather: on gloo only.

        gloo's all-gather is a ring of N - 1 steps, each of which waits for the one before; in its
        all-to-all every rank sends to every other at once.  A link carries the same bytes, so what
        is left is the wait: 14 ms against 6 ms for 37 kB of own rows on 8 ranks, the copies
        included, and no size at which the ring is faster (2, 4 and 8 ranks of 1 kB to 8 MB each:
        1.04 to 4.2 times the time; 2 cores of an AMD EPYC, 2026-12-02), hence no limit of size.
        Other backends have an all-gather that is better than N copies.
        """
        return self.backend == "gloo"

    def gather(self, out: torch.Tensor, own: torch.Tensor, call: Call) -> None:
        """All-gather: `own` [n] of every rank -> `out` [N*n], in rank order.  Both flat and
        contiguous.
        """
        self._gather(out, own, call)

    def _gather(
        self, out: torch.Tensor, own: torch.Tensor, call: Call, note: Arrivals | None = None
    ) -> None:
        collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        out, own = _wire(out), _wire(own)
        self._run("all_gather", call, lambda: collective(out, own, group=self.group), note)

    def exchange(
        self,
        out: torch.Tensor,
        blocks: torch.Tensor,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
        call: Call,
    ) -> None:
        """ONE all-to-all: block d of `blocks` goes to rank d, the block of rank n lands in place n
        of `out`.

        Both are flat, contiguous and apart in memory.  Splits are element counts per rank, None for
        equal ones.
        """
        out, blocks = _wire(out), _wire(blocks)
        if out.numel() and blocks.numel():
            apart = (
                out.data_ptr() + out.nbytes <= blocks.data_ptr()
                or blocks.data_ptr() + blocks.nbytes <= out.data_ptr()
            )
            assert apart, "send and receive storage overlap"
        splits = (
            None if out_splits is None else list(out_splits),
            None if in_splits is None else list(in_splits),
        )
        self._run(
            "all_to_all",
            call,
            lambda: dist.all_to_all_single(out, blocks, *splits, group=self.group),
        )

    def agree(
        self, fields: Mapping[str, Any], error: Exception | None, call: Call, device: torch.device
    ) -> None:
        """One small all-gather after which every rank goes on, or every rank raises.

        `fields` must be equal on all ranks; `error` is what this rank found wrong by itself, if
        anything.  The rank with the error raises it; the others raise ValueError naming that rank
        and its words.  Waits for the device, so it never runs in a capture.

        Raises CollectiveError where a rank does not come, within the group's timeout; it names the
        ranks that did not, and its `record` has them as "absent", if the group has a store.
        """
        if self.ranks == 1:
            if error is not None:
                raise error
            return
        note = self._note(call, device)
        said = dict(
            fields, error=None if error is None else f"{type(error).__name__}: {error}"[:2000]
        )
        data = json.dumps(said).encode()
        if len(data) > CHECK_BYTES:
            # Not enough room to compare fields: say so, rather than send half of them.  JSON may
            # spend six bytes on a character.
            text = said["error"] or f"check of {len(data)} bytes is too long"
            data = json.dumps({"error": text[: CHECK_BYTES // 8]}).encode()
        own = torch.zeros(CHECK_BYTES, dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = torch.empty(self.ranks * CHECK_BYTES, dtype=torch.uint8, device=device)
        self._gather(everyone, own.to(device), call, note)
        answers = [
            json.loads(bytes(part.tolist()).rstrip(b"\0"))
            for part in everyone.cpu().view(self.ranks, CHECK_BYTES)
        ]
        text = _disagreement(answers)
        if text is None:
            return
        self.dump(call, text, answers)
        raise (
            error
            if error is not None
            else ValueError(f"lmhead {call.op}, call {call.number}: {text}")
        )

    def _note(self, call: Call, device: torch.device) -> Arrivals | None:
        """Tell the other ranks that this one has come.  Where a collective that lacks a rank would
        not raise here, wait for all of them first.
        """
        assert self.group is not None
        waits = not self.raises
        note = arrivals.note(self.group, self.backend, self.rank, self.ranks, device, waits=waits)
        if waits and note is not None:
            try:
                why_not = note.wait()
            except Exception:  # the store is gone: the collective tells
                return None
            if why_not:
                text = f"it was not launched, as {why_not}"
                raise self._failed("all_gather", call, text, note) from TimeoutError(why_not)
        return note

    def share(self, data: bytes, call: Call, device: torch.device) -> bytes:
        """`data` of rank 0 on every rank.  Waits for the device, so it never runs in a capture."""
        if self.ranks == 1:
            return data
        size = torch.tensor([len(data)], dtype=torch.int64, device=device)
        self._broadcast(size, call)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        else:
            content = torch.empty(int(size), dtype=torch.uint8, device=device)
        self._broadcast(content, call)
        return bytes(content.tolist())

    def _broadcast(self, tensor: torch.Tensor, call: Call) -> None:
        self._run("broadcast", call, lambda: dist.broadcast(tensor, group=self.group, group_src=0))

    def warm_up(self, device: torch.device) -> int:
        """Run both collectives once, as calls will, and return the bytes moved; before memory is
        measured.
        """
        if self.ranks == 1:
            return 0
        per_peer = WARMUP_BYTES_PER_PEER if device.type == "cuda" else 4096
        call = Call("warmup", (), per_peer, "uint8", 0)
        send = torch.zeros(self.ranks * per_peer, dtype=torch.uint8, device=device)
        receive = torch.empty_like(send)
        self.exchange(receive, send, None, None, call)
        self.gather(receive, send[:per_peer], call)
        return 2 * send.nbytes

    def dump(
        self, call: Call, text: str, answers: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """With LMHEAD_DUMP=DIR, leave what this rank knows as DIR/lmhead-rank<r>-call<n>.json.

        An error is on its way already, so a folder that cannot be written hides nothing.
        """
        folder = os.environ.get("LMHEAD_DUMP")
        if not folder:
            return
        record = self.record(call) | {"error": text, "ranks_said": answers}
        with contextlib.suppress(OSError, ValueError):
            path = paths.path(folder) / f"lmhead-rank{self.rank}-call{call.number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1))

    def record(self, call: Call) -> dict[str, Any]:
        """The numbers of a call, for errors and dumps."""
        return {
            "group": self.name,
            "rank": self.rank,
            "ranks": self.ranks,
            "backend": self.backend,
            **asdict(call),
        }

    def _run(
        self,
        collective: str,
        call: Call,
        launch: Callable[[], object],
        note: Arrivals | None = None,
    ) -> None:
        try:
            launch()
        except RuntimeError as error:
            text = (
                str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            )
            raise self._failed(collective, call, text, note) from error

    def _failed(
        self, collective: str, call: Call, text: str, note: Arrivals | None
    ) -> CollectiveError:
        """The error of a collective, dumped; with the ranks that did not come, where notes say."""
        known: dict[str, Any] = {"collective": collective}
        if note is not None:
            with contextlib.suppress(Exception):  # a store that is gone hides no error
                known["absent"] = note.settled()
                if known["absent"]:
                    text += f"; {arrivals.words(known['absent'], note.seconds)}"
        message = (
            f"lmhead {call.op}: {collective} failed on rank {self.rank} of {self.ranks} (group "
            f"{self.name!r}, "
            f"{self.backend}), call {call.number}, rows {list(call.rows)}, {call.columns} "
            f"columns, {call.dtype}: "
            f"{text}. A rank that died, raised, skipped this call, made another one first or "
            "is still compiling "
            "looks like this; where other collectives run beside the head, give it a group of "
            "its own."
        )
        self.dump(call, message)
        return CollectiveError(message, self.record(call) | known)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    try:
        return group._get_backend(device).name()
    except RuntimeError as error:
        raise ValueError(
            f"group {group.group_name!r} has no backend for {device.type} tensors"
        ) from error


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a backend takes it: flat, and fp8 as bytes."""
    assert tensor.dim() == 1 and tensor.is_contiguous(), "collectives take flat, contiguous views"
    return tensor.view(torch.uint8) if tensor.dtype in BYTES_ONLY else tensor


def _disagreement(answers: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong among the ranks' answers, in words that are the same on every rank; None if
    nothing is.
    """
    refused = [
        f"rank {rank} refused: {said['error']}"
        for rank, said in enumerate(answers)
        if said["error"]
    ]
    if refused:
        return "; ".join(refused)
    differing = []
    for field in dict.fromkeys(field for said in answers for field in said):
        values: dict[str, list[int]] = {}
        for rank, said in enumerate(answers):
            values.setdefault(json.dumps(said.get(field)), []).append(rank)
        if len(values) > 1:
            holders = ", ".join(
                f"{value} on rank {_ranks(ranks)}" for value, ranks in values.items()
            )
            differing.append(f"{field} is {holders}")
            if field == "row_counts":
                differing.extend(_bad_pairs(answers))
    return "the ranks disagree: " + "; ".join(differing) if differing else None


def _ranks(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


def _bad_pairs(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which pairs of ranks would send and expect different numbers of rows."""
    found = []
    for sender, said in enumerate(answers):
        for receiver, heard in enumerate(answers):
            sends, expects = said.get("row_counts", []), heard.get("row_counts", [])
            if len(sends) == len(expects) == len(answers) and sends[receiver] != expects[receiver]:
                found.append(
                    f"{sender}->{receiver}: {sends[receiver]} rows sent, {expects[receiver]} "
                    "expected"
                )
    return found[:8]
