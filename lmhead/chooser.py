"""Which kernel configs a head's calls use: looked up once per row count, equal on every rank.

Before `LMHead.warmup` a head knows the tables that its package ships.  A user's own table lies in
one machine's files, so it counts only once the ranks agree on it: at warm-up, rank 0's entries for
this head go to all, the user's and the package's.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lmhead import tables
from lmhead.comm import Call, Comm
from lmhead.devices import arch_of, slug
from lmhead.kernels.config import (
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    deterministic_gemm,
)
from lmhead.shapes import Rows
from lmhead.tables import Choice, Key, Table


@dataclass(frozen=True)
class Configs:
    """What the kernels of one call are launched with; None lets a kernel take its default."""

    gemm: GemmConfig | None = None
    in_place: ReassembleConfig | None = None
    copy: ReassembleConfig | None = None


DEFAULTS = Configs()
# Calls that a chooser remembers its choices for.
MOST_KNOWN = 4096


@dataclass(frozen=True)
class Sizes:
    """All of a head that a config depends on, beside its rows.  Item sizes in bytes; `hidden` is 0
    where the caller multiplies by itself.
    """

    shard: int
    wire_itemsize: int
    logits_itemsize: int
    hidden: int = 0
    itemsize: int = 0  # of the operands
    deterministic: bool = False  # the GEMM's config is fixed, whatever the tables say


class Chooser:
    """The tables as one device's head sees them."""

    def __init__(self, device: torch.device) -> None:
        self._arch = arch_of(device)
        self._name = slug(device)
        self._mode = "graph" if device.type == "cuda" else "eager"
        self._shipped = _shipped(self._name)
        self._user: Table | None = None
        self._told = ""  # the other versions that a warning has named
        self._known: dict[tuple[Sizes, int, int, int], dict[str, Choice]] = {}

    def agree(self, comm: Comm, sizes: Sizes, call: Call, device: torch.device) -> bool:
        """Take rank 0's entries for a head of these sizes, the user's and the package's; every rank
        calls.  Says whether they are others than before: what was warmed up may then run
        differently.

        Where rank 0 cannot even say that it has none (a warning that is made an error), it raises
        its own error and the others ValueError with its words: no rank waits for it.
        """
        wanted = [key for key, _ in self._keys(sizes, comm.ranks, 1, 1).values()]
        said: dict[str, Any] = {}
        error: Exception | None = None
        if comm.rank == 0:
            try:
                both = tables.load_user(self._name), _shipped(self._name)
                self._compare_versions(both[0], wanted)
                said["tables"] = [
                    tables.dump(tables.select(table, wanted, self._name)) for table in both
                ]
            except Exception as caught:
                error = caught
                said["error"] = f"{type(caught).__name__}: {caught}"
        said = json.loads(comm.share(json.dumps(said).encode(), call, device))
        if error is not None:
            raise error
        if "error" in said:
            raise ValueError(
                f"lmhead {call.op}: rank 0 has no tuned configs to share: {said['error']}"
            )
        old = [tables.select(table, wanted, "").entries for table in (self._user, self._shipped)]
        self._user, self._shipped = (tables.parse(text) for text in said["tables"])
        if old == [self._user.entries, self._shipped.entries]:
            return False
        self._known.clear()
        return True

    def _compare_versions(self, user: Table | None, wanted: Sequence[Key]) -> None:
        """One warning for a user's entries that were tuned under other releases than run here.  (A
        package's table is what the package was made with; the user's can be tuned again.)
        """
        there = tables.other_versions(user, wanted)
        if not there or there == self._told:
            return
        self._told = there
        here = " and ".join(f"{name} {version}" for name, version in tables.versions().items())
        warnings.warn(
            f"lmhead: {tables.user_folder() / self._name}.json has configs for this head that were "
            f"tuned under {there}; this is {here}. They are used; `lmhead tune` finds what is best "
            "now",
            RuntimeWarning,
            stacklevel=2,
        )

    def choices(self, rows: Rows, sizes: Sizes, kept: int | None = None) -> dict[str, Choice]:
        """The choices for a call by kernel: "gemm" where the head multiplies, and where there are
        several ranks "reassemble" (in place) and "copy".  `kept` are the rows whose logits the rank
        ends with, those that it owns by default.
        """
        kept = rows.own if kept is None else kept
        known = sizes, rows.ranks, rows.total, kept
        if known not in self._known:
            if len(self._known) >= MOST_KNOWN:  # uneven counts are new ones every time
                self._known.clear()
            keys = self._keys(sizes, rows.ranks, rows.total, kept)
            found = {
                kernel: tables.look_up(self._user, self._shipped, key, self._arch, shape)
                for kernel, (key, shape) in keys.items()
            }
            if sizes.deterministic:
                shape = keys["gemm"][1]
                assert isinstance(shape, GemmShape)
                config = deterministic_gemm(shape, bulk=self._arch.bulk)
                found["gemm"] = Choice(config, "deterministic")
            self._known[known] = found
        return self._known[known]

    def configs(self, rows: Rows, sizes: Sizes, kept: int | None = None) -> Configs:
        """The same, as the kernels take them."""
        choices = self.choices(rows, sizes, kept)
        found = {kernel: choice.config for kernel, choice in choices.items()}
        return Configs(found.get("gemm"), found.get("reassemble"), found.get("copy"))  # type: ignore[arg-type]

    def _keys(
        self, sizes: Sizes, ranks: int, total: int, own: int
    ) -> dict[str, tuple[Key, GemmShape | ReassembleShape]]:
        found: dict[str, tuple[Key, GemmShape | ReassembleShape]] = {}
        if sizes.hidden:
            shape = GemmShape(
                total,
                sizes.shard,
                sizes.hidden,
                sizes.itemsize,
                sizes.wire_itemsize,
            )
            found["gemm"] = tables.gemm_key(shape, self._mode), shape
        if ranks > 1 and own > 0:
            wire, logits = sizes.wire_itemsize, sizes.logits_itemsize
            moved = ReassembleShape(ranks, own, sizes.shard, wire)
            cast = ReassembleShape(ranks, own, sizes.shard, max(wire, logits))
            found["reassemble"] = tables.reassemble_key(moved, True, self._mode), moved
            key = tables.reassemble_key(moved, False, self._mode, out_itemsize=logits)
            found["copy"] = key, cast
        return found


@functools.cache
def _shipped(name: str) -> Table | None:
    """The package's table for a device, read once."""
    return tables.load_shipped(name)
