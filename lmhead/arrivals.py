"""Which ranks have come to a call that all of them agree on, told through the group's store.

A rank leaves a note before each agreement: it raises a counter of its own, on the store's server.
All ranks agree equally often, so a rank whose counter is below one's own has not come.  Nothing is
kept here, and the store holds as many keys after a million calls as after one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

# A collective that fails at once (a peer died) may be ahead of ranks that are on their way: they
# get so long to come.
SETTLE_S = 1.0
# Between two looks into the store: from the first, to the longest.
_POLL_S, _LONGEST_POLL_S = 0.0005, 0.02

# More than the counter of all ranks' notes ever holds.
_GIVEN_UP = 1 << 50


@dataclass(frozen=True)
class Arrivals:
    """This rank's note of one agreement, and what it says of the others."""

    store: Any
    scope: str  # what the keys begin with
    ranks: int
    count: int  # agreements of this rank, this one included
    timeout: float  # the group's, in seconds
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since this rank came."""
        return time.monotonic() - self.since

    def absent(self) -> list[int]:
        """The ranks that have not come: one look for each, so for errors only."""
        return [
            rank
            for rank in range(self.ranks)
            if self.store.add(f"{self.scope}/{rank}", 0) < self.count
        ]

    def settled(self) -> list[int]:
        """`absent` after a failure, once ranks on their way have had `SETTLE_S`, and within the
        group's timeout.
        """
        end = min(time.monotonic() + SETTLE_S, self.since + self.timeout)
        while (missing := self.absent()) and time.monotonic() < end:
            time.sleep(_LONGEST_POLL_S)
        return missing

    def wait(self) -> str:
        """Wait until every rank has come, by one look at a time into a counter of all ranks' notes.
        "" then, or why this rank waits no longer: the group's timeout is over, or that of another
        rank was.  Whoever gives up says so in the counter, so that a rank which comes after all
        does not go on alone; from then on no agreement of the group succeeds.
        """
        everyone, wanted, pause = f"{self.scope}/all", self.count * self.ranks, _POLL_S
        while (total := int(self.store.get(everyone))) < wanted:
            if total < 0:
                return "a rank has given up waiting for others, in this call or an earlier one"
            if self.seconds > self.timeout:
                if self.store.add(everyone, -_GIVEN_UP) + _GIVEN_UP < wanted:
                    return f"the group's timeout of {self.timeout:g} s is over"
                self.store.add(everyone, _GIVEN_UP)  # the last rank came just now
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        return ""


def note(
    group: dist.ProcessGroup,
    backend: str,
    rank: int,
    ranks: int,
    device: torch.device,
    *,
    waits: bool,
) -> Arrivals | None:
    """Leave this rank's note; None where the group has no store, or one that fails.  One round trip
    to the server, and a second where `wait` follows (`waits`).
    """
    scope = f"lmhead/arrived/{backend}"  # a group may have two backends, by device
    try:
        store = group.get_group_store()
        count = store.add(f"{scope}/{rank}", 1)
        if waits:
            store.add(f"{scope}/all", 1)
        return Arrivals(store, scope, ranks, count, _timeout_s(group, device))
    except Exception:  # whatever a store raises: the agreement itself does without
        return None


def _timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's timeout; torch's default where its backend has no such option."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return float(dist.constants.default_pg_timeout.total_seconds())


def words(absent: Sequence[int], seconds: float) -> str:
    """ "rank 2 did not arrive within 6.0 s"."""
    who = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    return f"{who} did not arrive within {seconds:.1f} s"
