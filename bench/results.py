"""What a benchmark leaves: rows with all that is known of them, as JSON and CSV, and the comparison
of two such files.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lmhead.bench.cases import Case
from lmhead.bench.roofline import Limits
from lmhead.timing import Timing

FORMAT = 1
# What makes two rows of two files the same measurement.
KEY = ("model", "vocab", "hidden", "ranks", "rows", "dtype", "part", "name", "sample", "groups")


@dataclass
class Row:
    """One method at one size.  Milliseconds of the whole call: median over rounds of the slowest
    rank, half the interquartile range, and every round; median and spread of each stage.  No figure
    where the check failed.
    """

    model: str
    vocab: int
    hidden: int
    ranks: int
    rows: int
    dtype: str
    name: str
    title: str
    checked: str
    part: str = ""  # of `bench kernels`: "gemm" or "reassembly"
    sample: str = ""  # what is drawn, of a method that ends in tokens
    dp_size: int | None = None  # attention groups, where they were asked for
    ms: float | None = None
    spread_ms: float = 0.0
    each_ms: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    stage_spread: dict[str, float] = field(default_factory=dict)
    bytes: int = 0  # that cross a rank's link, by arithmetic
    counted_bytes: int = 0  # the same, counted at the collective
    floor_ms: float = 0.0  # of what the step needs, on this machine
    roof: bool = False
    flags: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, case: Case, name: str, title: str, checked: str, **more: Any) -> Row:
        return cls(**asdict(case), name=name, title=title, checked=checked, **more)

    def time(self, timed: Timing) -> None:
        self.ms, self.spread_ms = timed.median * 1e3, timed.spread * 1e3
        self.each_ms = [seconds * 1e3 for seconds in timed.seconds]

    def over(self, other: Row) -> Timing:
        """This one's time over another's of the same run, round by round: what slows the machine
        for a while slows both.
        """
        pairs = zip(self.each_ms, other.each_ms, strict=True)
        return Timing(tuple(mine / theirs for mine, theirs in pairs))

    @property
    def case(self) -> Case:
        sizes = self.model, self.vocab, self.hidden, self.ranks, self.rows, self.dtype
        return Case(*sizes, self.dp_size)

    @property
    def groups(self) -> int:
        """Attention groups, asked for or not."""
        return self.ranks if self.dp_size is None else self.dp_size

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in KEY)


@dataclass
class Report:
    """A whole run.  `limits` are the rates that floors were drawn from, by number of ranks."""

    kind: str
    cadence: str
    rounds: int
    machine: dict[str, Any]
    rows: list[Row]
    limits: dict[int, Limits] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def cases(self) -> dict[tuple[Case, str], list[Row]]:
        """Rows by case (and part), in the order in which they came."""
        found: dict[tuple[Case, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.case, row.part), []).append(row)
        return found

    def to_dict(self) -> dict[str, Any]:
        limits = {str(ranks): _finite(asdict(known)) for ranks, known in self.limits.items()}
        return {
            "format": FORMAT,
            "kind": self.kind,
            "cadence": self.cadence,
            "rounds": self.rounds,
            "machine": self.machine,
            "limits": limits,
            "notes": self.notes,
            "rows": [asdict(row) for row in self.rows],
        }

    def to_csv(self) -> str:
        """One line per row; the machine in comment lines above."""
        text = io.StringIO()
        for name, value in {"kind": self.kind, "cadence": self.cadence, **self.machine}.items():
            text.write(f"# {name}: {value}\n")
        stages = list(dict.fromkeys(stage for row in self.rows for stage in row.stages))
        lists = ("stages", "stage_spread", "flags", "each_ms")
        names = [f.name for f in fields(Row) if f.name not in lists]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*names, *(f"{stage} ms" for stage in stages), "flags"])
        for row in self.rows:
            values = [getattr(row, name) for name in names]
            writer.writerow([*values, *(row.stages.get(s) for s in stages), "; ".join(row.flags)])
        return text.getvalue()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def load(path: Path) -> Report:
    """The inverse of `Report.save`.  ValueError, in one line, for anything else."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"format {FORMAT} expected, got {found['format']!r}")
        limits = {
            int(ranks): Limits(**(known | {"wire": known["wire"] or math.inf}))
            for ranks, known in found["limits"].items()
        }
        return Report(
            found["kind"],
            found["cadence"],
            found["rounds"],
            found["machine"],
            [Row(**row) for row in found["rows"]],
            limits,
            found["notes"],
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} holds no saved benchmark: {error}") from error


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}


@dataclass(frozen=True)
class Change:
    """The same row in two files: new over old, and the ratio's spread, from both rows' spreads."""

    row: Row
    old_ms: float
    ratio: float
    spread: float

    @property
    def within_spread(self) -> bool:
        return abs(self.ratio - 1.0) <= self.spread


def compare(old: Report, new: Report) -> list[Change]:
    """Every row that both files have a figure for.  ValueError where they are not of a kind: the
    same call takes half or twice the time by cadence alone.
    """
    for name in ("kind", "cadence"):
        if getattr(old, name) != getattr(new, name):
            raise ValueError(
                f"{name} {getattr(old, name)!r} cannot be compared with {getattr(new, name)!r}"
            )
    before = {row.key: row for row in old.rows if row.ms}
    changes = [
        Change(row, *_ratio(before[row.key], row))
        for row in new.rows
        if row.ms and row.key in before
    ]
    if not changes:
        raise ValueError("the two benchmarks have no case in common")
    return changes


def _ratio(old: Row, new: Row) -> tuple[float, float, float]:
    """(old ms, ratio, spread): the relative spreads of both add up at worst."""
    assert old.ms and new.ms
    ratio = new.ms / old.ms
    return old.ms, ratio, ratio * (old.spread_ms / old.ms + new.spread_ms / new.ms)


def past(changes: list[Change], percent: float) -> Iterator[Change]:
    """The changes for the worse by more than so many percent."""
    return (change for change in changes if change.ratio > 1.0 + percent / 100.0)
