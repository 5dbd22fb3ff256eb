"""A benchmark's report as people read it: tables by rich where that is installed, else plain."""

from __future__ import annotations

import importlib.util
import io
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lmhead.bench import machine
from lmhead.bench.gpu_report import columns
from lmhead.bench.kernels_bench import COPY, PERMUTE, is_ours
from lmhead.bench.methods import CANDIDATES, LAYOUTS_ONLY, OURS
from lmhead.bench.peers import EXCHANGE, GATHER, GEMM, STAGES
from lmhead.bench.results import Change, Report, Row
from lmhead.bench.roofline import PUBLISHED_SOURCE, PUBLISHED_STEP, Limits, break_even, published
from lmhead.devices import DEVICES

# Columns of a table where standard output is no terminal.
WIDTH = 170


@dataclass(frozen=True)
class Table:
    """A title, a header and rows of text; the first and the last column are words, the others
    numbers.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def render(report: Report) -> str:
    """The whole report as text."""
    parts: list[Table | str] = [*_head_lines(report)]
    for (case, part), rows in report.cases().items():
        if report.kind == "kernels":
            parts.append(_kernel_table(f"{part}, {case}", rows))
        elif report.kind != "scale":
            parts.append(_method_table(str(case), rows))
            parts += [*claims(rows), *draw_claims(rows)]
        if report.kind != "kernels":
            parts += [f"  FLAG {row.name}: {flag}" for row in rows for flag in row.flags]
    if report.kind == "scale":
        parts.append(_scale_table(report))
        parts += list(growth(report))
    if report.kind == "head":
        parts += ["", _published_table(), *_break_even_lines(report)]
    parts += report.notes
    return "\n".join(_text(part) for part in parts) + "\n"


def render_changes(changes: Sequence[Change], against: str) -> str:
    """What `--compare` prints."""
    rows = [
        (
            f"{change.row.case} {change.row.part}".strip(),
            change.row.name,
            f"{change.old_ms:.3f}",
            f"{change.row.ms:.3f}",
            f"{change.ratio:.3f}",
            f"{change.spread:.3f}",
            "within the spread" if change.within_spread else "",
        )
        for change in changes
    ]
    header = ("case", "method", "old ms", "new ms", "ratio", "+-", "")
    return _text(Table(f"against {against}: new over old", header, rows)) + "\n"


def _head_lines(report: Report) -> Iterator[str]:
    yield f"lmhead bench {report.kind}: {machine.line(report.machine)}"
    clock = report.machine.get("clock", "")
    yield (
        f"cadence: {report.cadence}; median over {report.rounds} rounds, slowest rank; +- is half "
        f"the interquartile range; clock {clock}; load {report.machine.get('load_at_start', '?')}"
    )
    for ranks, limits in report.limits.items():
        yield f"N = {ranks}: {_limits_words(limits)}"


def _limits_words(limits: Limits) -> str:
    words = f"{limits.name}: {limits.memory / 1e9:.1f} GB/s of memory, "
    words += f"{limits.math / 1e9:.0f} GFLOP/s"
    if limits.wire != float("inf"):
        words += f", {limits.wire / 1e9:.2f} GB/s received by {limits.wire_name}"
    return f"{words} per rank ({limits.source})"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _times(value: float | None, base: float | None) -> str:
    return "-" if not value or not base else f"{value / base:.2f}"


def _method_table(title: str, rows: Sequence[Row]) -> Table:
    ours = next((row.ms for row in rows if row.name == OURS), None)
    stages = [stage for stage in STAGES if any(stage in row.stages for row in rows)]
    header = ("method", "ms", "+-", "of ours", "of floor", *stages, "MB moved", "checked")
    lines = []
    for row in rows:
        own = row.sample or row.name.startswith((OURS, "roof"))
        label = row.title if own else f"{row.name}  {row.title}"
        lines.append(
            (
                label,
                _ms(row.ms),
                _ms(row.spread_ms if row.ms else None),
                _times(row.ms, ours),
                "-" if row.roof else _times(row.ms, row.floor_ms),
                *(_ms(row.stages.get(stage)) for stage in stages),
                f"{row.bytes / 1e6:.2f}" if row.ms else "-",
                row.checked,
            )
        )
    floor = rows[0].floor_ms if rows else 0.0
    return Table(f"{title}; floor {_ms(floor)} ms", header, lines)


def claims(rows: Sequence[Row]) -> Iterator[str]:
    """The ratios that matter, in words."""
    by_name = {row.name: row for row in rows if row.ms}
    ours = by_name.get(OURS)
    if ours is None or not ours.ms:
        return
    for name in ("a", "a-lean", "e", "b", "c", *LAYOUTS_ONLY):
        peer = by_name.get(name)
        if peer is not None and peer.each_ms:
            slower, faster = peer.over(ours), ours.over(peer)
            yield (
                f"  round by round, {name} takes {slower.median:.2f} +- {slower.spread:.2f} times "
                f"lmhead's time, lmhead {faster.median:.2f} +- {faster.spread:.2f} of it"
            )
    for words, without in (
        ("GEMM and the bare all-to-all", (GEMM,)),
        ("that and the hidden gather", (GEMM, GATHER)),
    ):
        mine, theirs = beyond(rows, OURS, without), beyond(rows, "b", without)
        if mine is not None and theirs:
            yield (
                f"  stages beyond {words}: lmhead {mine:.1f} ms, b {theirs:.1f} ms, "
                f"ratio {mine / theirs:.2f}"
            )


def draw_claims(rows: Sequence[Row]) -> Iterator[str]:
    """What drawing from candidates saves, in words."""
    by_name = {row.name: row for row in rows if row.ms}
    ours = by_name.get(CANDIDATES)
    if ours is None:
        return
    yield f"  tokens are drawn with {ours.sample}"
    for row in rows:
        if not row.sample or row is ours or not row.each_ms:
            continue
        slower = row.over(ours)
        words = (
            f"  round by round, {row.title} takes {slower.median:.2f} +- {slower.spread:.2f} times "
            "candidates' time"
        )
        mine, theirs = (
            sum(ms for stage, ms in which.stages.items() if stage not in (GATHER, GEMM))
            for which in (ours, row)
        )
        if mine and theirs:
            words += (
                f"; after the GEMM, candidates {mine:.1f} ms of {theirs:.1f} ms, "
                f"ratio {mine / theirs:.2f}"
            )
        yield words


def beyond(rows: Sequence[Row], name: str, without: Sequence[str]) -> float | None:
    """Milliseconds of a method's other stages, less what the bare all-to-all takes of its exchange
    (where that came out faster than the bare one, it is nothing).
    """
    by_name = {row.name: row for row in rows}
    row, roof = by_name.get(name), by_name.get("roof-all-to-all")
    if row is None or not row.stages or roof is None or EXCHANGE not in roof.stages:
        return None
    rest = sum(ms for stage, ms in row.stages.items() if stage not in (*without, EXCHANGE))
    return rest + max(0.0, row.stages.get(EXCHANGE, 0.0) - roof.stages[EXCHANGE])


def _kernel_table(title: str, rows: Sequence[Row]) -> Table:
    base = next((row.ms for row in rows if not is_ours(row) and row.name != COPY), None)
    copy = next((row.ms for row in rows if row.name == COPY), None)
    against = "permute" if any(row.name == PERMUTE for row in rows) else "library"
    header = ("kernel", "us", "+-", f"of {against}", "of copy", "of floor", "checked")
    lines = [
        (
            row.title,
            "-" if row.ms is None else f"{row.ms * 1e3:.1f}",
            f"{row.spread_ms * 1e3:.1f}",
            _times(row.ms, base),
            _times(row.ms, copy),
            _times(row.ms, row.floor_ms),
            "; ".join([row.checked, *row.flags]),
        )
        for row in sorted(rows, key=lambda row: row.ms or 0.0)
    ]
    return Table(title, header, lines)


def _scale_table(report: Report) -> Table:
    names = list(dict.fromkeys(row.name for row in report.rows))
    titles = {row.name: row.title for row in report.rows}
    header = ("model", "V", "N", "B", "floor ms", *(f"{titles[name]} ms" for name in names))
    header += (*(f"{titles[name]} MB" for name in names), "")
    lines = []
    for (case, _), rows in report.cases().items():
        by_name = {row.name: row for row in rows}
        known = [by_name.get(name) for name in names]
        lines.append(
            (
                case.model,
                f"{case.vocab}",
                f"{case.ranks}",
                f"{case.rows}",
                _ms(rows[0].floor_ms),
                *("-" if row is None else _ms(row.ms) for row in known),
                *("-" if row is None or not row.ms else f"{row.bytes / 1e6:.2f}" for row in known),
                "; ".join(row.checked for row in rows if row.ms is None),
            )
        )
    return Table(f"{report.rows[0].dtype}; growth of time and bytes per rank", header, lines)


def growth(report: Report) -> Iterator[str]:
    """How time and bytes grow with B at the largest N: the exponent (1 is linear), and what one
    more row costs, over the upper half of the row counts, where a call's fixed cost is small.
    """
    most, model = max(row.ranks for row in report.rows), report.rows[0].model
    lines: dict[str, list[Row]] = {}
    for row in report.rows:
        if (row.ranks, row.model) == (most, model) and row.ms:
            lines.setdefault(row.name, []).append(row)
    per_row: dict[str, tuple[float, float]] = {}
    for name, found in lines.items():
        found.sort(key=lambda row: row.rows)
        upper = found[len(found) // 2 :]
        if len(upper) < 2:
            continue
        counts, times = [float(row.rows) for row in upper], [row.ms or 0.0 for row in upper]
        exponent = _slope([math.log(b) for b in counts], [math.log(ms) for ms in times])
        moved = [float(row.bytes) for row in upper]
        per_row[name] = _slope(counts, times), _slope(counts, moved)
        yield (
            f"{found[0].title}, N = {most}: from B = {counts[0]:.0f} to {counts[-1]:.0f} time "
            f"grows as B to the {exponent:.2f}; a row more is {per_row[name][0]:.3f} ms and "
            f"{per_row[name][1] / 1e6:.3f} MB"
        )
    if OURS in per_row and "lmhead-all-gather" in per_row:
        ours, gathers = per_row[OURS], per_row["lmhead-all-gather"]
        yield (
            f"a row more costs all-gather {gathers[0] / ours[0]:.1f} times the all-to-all's time "
            f"and {gathers[1] / ours[1]:.1f} times its bytes (N = {most})"
        )


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the least-squares line."""
    middle, level = statistics.fmean(xs), statistics.fmean(ys)
    over = sum((x - middle) * (y - level) for x, y in zip(xs, ys, strict=True))
    return over / sum((x - middle) ** 2 for x in xs)


def _published_table() -> Table:
    rows = [
        (
            figure.what,
            f"{figure.published_us:.0f}",
            f"{figure.floor_us:.1f}",
            "-" if figure.modelled_us is None else f"{figure.modelled_us:.1f}",
            "",
        )
        for figure in published()
    ]
    header = ("8 B200, us; nothing here was measured", "published", "floor", "modelled", "")
    return Table(f"published by others and modelled: {PUBLISHED_SOURCE}", header, rows)


def _break_even_lines(report: Report) -> Iterator[str]:
    """From which B on a head that every rank holds whole is as good."""
    known: list[tuple[str, Limits]] = []
    step = PUBLISHED_STEP
    for device in DEVICES.values():
        serial, hidden = break_even(device, step), break_even(device, step, overlapped=True)
        yield (
            f"{device.name}, by its floors: a sharded head beats a DP head below B = {serial} in "
            f"series, below {hidden} with all exchange hidden (V = {step.vocab}, N = {step.ranks})"
        )
    known += [(f"N = {ranks}", limits) for ranks, limits in report.limits.items() if ranks > 1]
    for name, limits in known:
        if limits.name.startswith("this machine"):
            case = next(row.case for row in report.rows if f"N = {row.ranks}" == name)
            serial = break_even(limits, replace(case, dp_size=None).step)
            words = "never" if serial == 1 else f"below B = {serial}"
            yield f"this machine, {name}, by its floors in series: {words}"


# Text.


def _text(part: Table | str) -> str:
    if isinstance(part, str):
        return part
    if importlib.util.find_spec("rich") is None:
        return "\n".join([part.title, *columns([part.header, *part.rows])])
    return _rich(part)


def _rich(table: Table) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    last = len(table.header) - 1
    for i, name in enumerate(table.header):
        numbers = 0 < i < last and not name.startswith("method")
        drawn.add_column(name, justify="right" if numbers else "left", no_wrap=numbers)
    for row in table.rows:
        drawn.add_row(*row)
    out = io.StringIO()
    terminal = sys.stdout.isatty()
    console = Console(
        file=out,
        force_terminal=terminal,
        width=None if terminal else WIDTH,
        no_color=not terminal,
        highlight=False,
        markup=False,
    )
    console.print(drawn)
    return out.getvalue().rstrip("\n")
