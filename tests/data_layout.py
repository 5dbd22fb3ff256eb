"""What the tests of layouts share: which ones, steps of random rows, and what crosses a link."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lmhead.shapes import Layout

# (tp_size, dp_size, attn_cp_size): data-parallel, both, tensor-parallel, context-parallel.
SIZES = ((2, 2, 1), (4, 4, 1), (4, 2, 1), (4, 1, 1), (8, 4, 1), (8, 2, 1), (4, 2, 2))


@dataclass(frozen=True)
class Where:
    """A rank's places by plain counting: which set of ranks holds its rows, which attention group
    it belongs to, and of which gathered rows each of them are, and the rank itself.
    """

    cell: int
    holds: range
    group: range
    owns: range


def where(sizes: tuple[int, int, int], rank: int, held: list[int]) -> Where:
    """By dealing out rows one after the other, not by the formulas of `lmhead.shapes`."""
    tp_size, dp_size, cp_size = sizes
    copies = tp_size // dp_size // cp_size
    cell, number = rank // copies, rank // (copies * cp_size)
    starts = [sum(held[:place]) for place in range(len(held) + 1)]
    first, last = starts[number * cp_size], starts[(number + 1) * cp_size]
    members = copies * cp_size
    piles: list[list[int]] = [[] for _ in range(members)]
    for row in range(last - first):
        piles[row % members].append(row)
    sizes_of = [len(pile) for pile in piles]
    place = rank % members
    begin = first + sum(sizes_of[:place])
    return Where(
        cell,
        range(starts[cell], starts[cell + 1]),
        range(first, last),
        range(begin, begin + sizes_of[place]),
    )


def held_rows(sizes: tuple[int, int, int], number: int) -> tuple[list[int], bool]:
    """The rows of step `number`, a count per set of ranks that hold the same ones, and whether all
    are equal and the call may go without a list.  Groups are idle now and then, all of them once.
    """
    generator = torch.Generator().manual_seed(1000 + number)
    sets = Layout.of(*sizes).sets

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    if number % 5 == 0:
        return [1 + below(5)] * sets, True
    if number % 25 == 7:
        return [0] * sets, False
    counts = [below(6) for _ in range(sets)]
    if sets > 1:
        counts[below(sets)] = 0
    if number % 5 == 1:  # all on one
        counts = [0] * sets
        counts[below(sets)] = 1 + below(9)
    return counts, False


@dataclass
class Crossed:
    """What one rank handed to the others, and got from them, in bytes, by collective."""

    sent: dict[str, int]
    received: dict[str, int]
    calls: list[int]  # the busier direction of each collective, in order

    @property
    def busier(self) -> int:
        return max(sum(self.sent.values()), sum(self.received.values()))


@contextlib.contextmanager
def crossed(group: dist.ProcessGroup | None = None) -> Iterator[Crossed]:
    """Count, at torch.distributed, what leaves this rank and what reaches it in `group`; split
    sizes count as they are given, and what a rank keeps for itself does not cross.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    found = Crossed({}, {}, [])

    def note(name: str, sent: int, received: int) -> None:
        found.sent[name] = found.sent.get(name, 0) + sent
        found.received[name] = found.received.get(name, 0) + received
        found.calls.append(max(sent, received))

    def splits(given: Any, tensor: torch.Tensor) -> int:
        parts = given or [tensor.numel() // ranks] * ranks
        return (sum(parts) - parts[rank]) * tensor.element_size()

    def to_all(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Any, given: Any, outs: Any = None, ins: Any = None, **rest: Any) -> Any:
            note("all_to_all", splits(ins, given), splits(outs, out))
            return real(out, given, outs, ins, **rest)

        return call

    def to_gather(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(out: Any, given: Any, **rest: Any) -> Any:
            note("all_gather", (ranks - 1) * given.nbytes, out.nbytes - given.nbytes)
            return real(out, given, **rest)

        return call

    with contextlib.ExitStack() as stack:
        for name, wrap in (
            ("all_to_all_single", to_all),
            ("all_gather_single", to_gather),
            ("all_gather_into_tensor", to_gather),
        ):
            if hasattr(dist, name):
                patched = wrap(getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, patched))
        yield found
