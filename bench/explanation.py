"""What `lmhead explain` shows: which way a configuration's logits take and why, who owns which
rows, what each way moves per rank, and the least time that takes.

Needs no GPU and no group: it is arithmetic.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lmhead import policy as policies
from lmhead.bench.ownership import BESIDE, ROUTES, moved, picture
from lmhead.bench.roofline import (
    Stage,
    Step,
    group_head_rows,
    layout_break_even,
    limits_of,
    owned_stages,
    slowest,
)
from lmhead.devices import Device
from lmhead.policy import Decision, ParallelConfig
from lmhead.route import POLICIES
from lmhead.shapes import Layout, Rows, shard_rows

WIDTH = 100


@dataclass(frozen=True)
class Impossible:
    """Why a configuration cannot be under a policy, and the nearest one that can."""

    config: ParallelConfig
    policy: str
    reason: str
    nearest: ParallelConfig

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The fields that differ: (given, nearest)."""
        given, found = asdict(self.config), asdict(self.nearest)
        return {name: (given[name], found[name]) for name in given if given[name] != found[name]}

    def lines(self, command: str) -> Iterator[str]:
        """As text; `command` is what asks for the nearest."""
        yield f"impossible (policy {self.policy})"
        yield from _sentence(self.reason)
        words = [f"{name} {found} instead of {given}" for name, (given, found) in self._words()]
        yield "nearest possible"
        yield from _sentence("; ".join(words))
        yield f"  {command}"

    def _words(self) -> Iterator[tuple[str, tuple[str, str]]]:
        for name, values in self.changes().items():
            given, found = ("left open" if value is None else str(value) for value in values)
            yield name, (given, found)

    def to_dict(self, command: str) -> dict[str, Any]:
        return {
            "outcome": "impossible",
            "reason": self.reason,
            "policy": self.policy,
            "config": asdict(self.config),
            "nearest": asdict(self.nearest),
            "command": command,
        }


def impossible(config: ParallelConfig, policy: str = "auto") -> Impossible | None:
    """Whether nothing can be explained: the policy refuses, or the sizes do not divide."""
    found = policies.nearest(config, policy)
    if found == config:
        return None
    reason = policies.refusal(config, policy) or policies.refusal(config, "auto")
    assert reason is not None
    return Impossible(config, policy, reason, found)


@dataclass(frozen=True)
class Explanation:
    """Everything about one configuration, a number of rows and a device.

    `ranks` are the rows of every rank; `moved` the bytes that each moves, by route, and beside it;
    `stages` those of the decision, of the rank that takes longest, and `floors` the sums of such
    stages, in microseconds, by route.  `other` is what the other policy says, or why it refuses.
    """

    config: ParallelConfig
    device: Device
    decision: Decision
    other: Decision | str
    step: Step
    layout: Layout
    row_counts: tuple[int, ...]
    ranks: tuple[Rows, ...]
    moved: dict[str, tuple[int, ...]]
    stages: tuple[Stage, ...]
    floors: dict[str, float]
    break_even: int | None

    def to_dict(self) -> dict[str, Any]:
        other = {"refused": self.other} if isinstance(self.other, str) else self.other.to_dict()
        return {
            "config": asdict(self.config),
            "device": asdict(self.device),
            "decision": self.decision.to_dict(),
            "outcome": self.decision.outcome,
            "other": other,
            "layout": asdict(self.layout),
            "step": asdict(self.step),
            "shard": shard_rows(self.step.vocab, self.decision.head_ranks),
            "row_counts": list(self.row_counts),
            "total": self.ranks[0].total,
            "held": [rows.brought for rows in self.ranks],
            "held_first": [rows.brought_start for rows in self.ranks],
            "owned": [rows.own for rows in self.ranks],
            "owned_first": [rows.start for rows in self.ranks],
            "bytes": {name: list(found) for name, found in self.moved.items()},
            "stages": [asdict(stage) for stage in self.stages],
            "floors_us": self.floors,
            "break_even_rows": self.break_even,
        }

    def lines(self) -> Iterator[str]:
        """The same as text, at most 100 columns wide."""
        step, decision = self.step, self.decision
        yield (
            f"{decision.outcome} (policy {decision.policy}): N = {step.ranks}, "
            f"T = {self.ranks[0].total}, V = {step.vocab}, H = {step.hidden}, "
            f"S = {shard_rows(step.vocab, decision.head_ranks)}, "
            f"{8 * step.wire_itemsize}-bit logits"
        )
        yield from _decision_lines(decision)
        yield ""
        yield from self._other_lines()
        yield ""
        yield from picture(self.layout, self.ranks)
        yield ""
        yield from self._byte_lines()
        yield ""
        yield from self._floor_lines()

    def _other_lines(self) -> Iterator[str]:
        name = _other(self.decision.policy)
        if isinstance(self.other, str):
            yield f"policy {name} refuses this"
            yield from _sentence(self.other)
        else:
            yield f"policy {name} says {self.other.outcome}"
            yield from _decision_lines(self.other)

    def _byte_lines(self) -> Iterator[str]:
        yield "bytes that a rank moves in a step, in its busier direction; > is what is decided"
        for name, words in {**ROUTES, **BESIDE}.items():
            decided = name == self.decision.outcome
            if name == "local" and not decided:
                continue
            found = sorted(set(self.moved[name]))
            most = f" to {_bytes(found[-1])}" if len(found) > 1 else ""
            mark = ">" if decided else " "
            yield f"{mark} {name:<12}{_bytes(found[0]) + most:<24}{words}"

    def _floor_lines(self) -> Iterator[str]:
        device = self.device
        yield (
            f"floors on {device.name}: {device.hbm / 1e12:.2f} TB/s of memory, "
            f"{device.bf16 / 1e12:.0f} TFLOP/s, {device.nvlink / 1e9:.0f} GB/s of NVLink"
        )
        for stage in self.stages:
            yield f"  {stage.name:<15}{stage.floor_us:>9.2f} us  {stage.limit}"
        yield f"  {'in series':<15}{self.floors['decision']:>9.2f} us"
        sums = [f"{name} {us:.2f} us" for name, us in self.floors.items() if name != "decision"]
        if self.layout.ranks == 1:
            return
        yield from _sentence(f"full logits in series by route: {', '.join(sums)}")
        if self.layout.ranks == self.layout.attn_tp_size:
            return
        if self.break_even is None:
            words = "a head over all ranks stays ahead of one per set of ranks with the same rows"
        else:
            words = (
                f"from {self.break_even} rows in every set of ranks that hold the same ones, a "
                "head per such set (dp_head) has a floor as low as one over all ranks"
            )
        copies = self.layout.ranks // self.layout.attn_tp_size
        weights = self.step.shard * self.step.hidden * self.step.itemsize
        yield from _sentence(f"{words}; it takes {copies} times the {_bytes(weights)} of weights")


def explain(
    config: ParallelConfig,
    *,
    vocab: int,
    hidden: int,
    device: Device,
    rows: int = 36,
    row_counts: Sequence[int] | None = None,
    policy: str = "auto",
    itemsize: int = 2,
    may_replicate: bool = False,
) -> Explanation:
    """What `config` means for a head of [vocab, hidden] 16-bit weights on `device`.

    `rows` per set of ranks that hold the same ones, or `row_counts`, a count for each.  `itemsize`
    is that of a logit, 2 or 4, on the wire and as a result.  ValueError where `impossible` says so.
    """
    if itemsize not in (2, 4):
        raise ValueError(f"itemsize must be 2 or 4 bytes per logit, got {itemsize}")
    refused = impossible(config, policy)
    if refused is not None:
        raise ValueError(refused.reason)
    layout = config.layout()
    given = [rows] * layout.sets if row_counts is None else list(row_counts)
    every = tuple(layout.rows(given, rank) for rank in range(layout.ranks))
    counts = every[0].held

    def decided(name: str) -> Decision:
        return policies.decide(
            config,
            name,
            rows=counts,
            flops_per_byte=device.bf16 / device.hbm,
            may_replicate=may_replicate,
        )

    decision, other = decided(policy), _other(policy)
    step = Step(vocab, hidden, layout.ranks, max(counts), 2, itemsize, itemsize)

    def small_rows(ranks: int) -> list[Rows]:
        """Each rank's rows of a head that `ranks` ranks with the same rows share."""
        if ranks == 1:
            return [Rows((rows.brought,), 0) for rows in every]
        return [group_head_rows(layout, counts, rank) for rank in range(layout.ranks)]

    def staged(ranks: int, way: str) -> list[Stage]:
        at = Step(vocab, hidden, ranks, max(counts), 2, itemsize, itemsize)
        whole = every if ranks == layout.ranks else small_rows(ranks)
        way = "all_to_all" if way == "local" else way
        return slowest([owned_stages(device, at, rows, route=way) for rows in whole])

    # Inside a group the decision's own route counts, if that is where the decision leads.
    few = layout.attn_tp_size
    inside = decision.route if decision.outcome == "dp_head" else "all_to_all"
    inside = "all_to_all" if inside == "local" else inside
    stages = staged(decision.head_ranks, decision.route)
    floors = {
        "decision": _sum(stages),
        "all_to_all": _sum(staged(layout.ranks, "all_to_all")),
        "all_gather": _sum(staged(layout.ranks, "all_gather")),
        "dp_head": _sum(staged(few, inside)),
    }
    return Explanation(
        config,
        device,
        decision,
        policies.refusal(config, other) or decided(other),
        step,
        layout,
        counts,
        every,
        moved(every, small_rows(few), step, inside, decision.outcome),
        tuple(stages),
        floors,
        layout_break_even(limits_of(device), step, layout),
    )


def _decision_lines(decision: Decision) -> Iterator[str]:
    yield from _sentence(decision.reason)
    compared = [condition for condition in decision.conditions if not condition.decides]
    deciding = [condition for condition in decision.conditions if condition.decides]
    for condition in deciding + compared:
        if compared and condition is compared[0]:
            yield "  for comparison"
        holds = "yes" if condition.holds else "no"
        yield f"  {holds:<4}{condition.name:<20} {condition.words}"
    if decision.advice is not None:
        yield from _sentence(decision.advice)


def _sentence(words: str) -> list[str]:
    """As paragraphs under a heading; a field's name keeps its case."""
    first = words.split(maxsplit=1)[0]
    start = words[0] if "_" in first else words[0].upper()
    return textwrap.wrap(
        f"{start}{words[1:]}.",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )


def _sum(stages: Sequence[Stage]) -> float:
    return round(sum(stage.floor_us for stage in stages), 2)


def _other(policy: str) -> str:
    (name,) = set(POLICIES) - {policy}
    return name


def _bytes(count: int) -> str:
    """In the largest unit of ten that leaves a whole number before the point."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
