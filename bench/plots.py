"""Pictures of a benchmark, by matplotlib (the extra `bench`): stages per method, growth with rows
and ranks, and the roofline.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; no picture
leaves a distinction to colour alone.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmhead.bench import machine
from lmhead.bench.cases import Case
from lmhead.bench.kernels_bench import is_ours
from lmhead.bench.methods import OURS
from lmhead.bench.peers import DRAW, EXCHANGE, GATHER, GEMM, REASSEMBLY, REDUCE, SHARE, STAGES
from lmhead.bench.results import Report, Row
from lmhead.bench.roofline import Stage, dp_head, stages

COLOURS = {
    GATHER: "#56B4E9",
    GEMM: "#999999",
    EXCHANGE: "#D55E00",
    REASSEMBLY: "#F0E442",
    REDUCE: "#009E73",
    DRAW: "#CC79A7",
    SHARE: "#0072B2",
}
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
HATCHES = {
    GATHER: "",
    GEMM: "//",
    EXCHANGE: "",
    REASSEMBLY: "..",
    REDUCE: "xx",
    DRAW: "\\\\",
    SHARE: "++",
}
DPI = 96


def require() -> None:
    """ValueError, in one line, where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'lmhead[bench]'")


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw what this kind of benchmark has to show into `folder`; the files."""
    require()
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    if report.kind in ("head", "exchange"):
        for i, ((case, _), rows) in enumerate(report.cases().items()):
            name = f"{report.kind}-stages" + (f"-{i}" if len(report.cases()) > 1 else "")
            found += _stages(report, case, rows, folder / f"{name}.png")
    if report.kind == "scale":
        found += _growth(report, folder / "scale.png")
    if report.kind in ("head", "kernels"):
        found += _roofline(report, folder / f"{report.kind}-roofline.png")
    if report.kind == "kernels":
        found += _kernels(report, folder / "kernels.png")
    return found


def _figure(width: float, height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = [figure.add_subplot(1, panels, i + 1) for i in range(panels)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    return figure, axes


def _finish(figure: Any, report: Report, path: Path) -> list[Path]:
    figure.supxlabel(machine.line(report.machine), fontsize=7, color="#555555")
    figure.savefig(path, dpi=DPI, pil_kwargs={"optimize": True})
    return [path]


def _short(ms: float | None) -> str:
    """Three digits."""
    return f"{ms:.0f}" if ms and ms >= 100 else f"{ms:.3g}"


def _quartiles(row: Row) -> tuple[float, float]:
    """How far the middle half of the rounds lies below and above the median."""
    if row.ms is None or len(row.each_ms) < 2:
        return 0.0, 0.0
    low, _, high = statistics.quantiles(row.each_ms, n=4, method="inclusive")
    return row.ms - low, high - row.ms


def _log_ticks(axis: Any) -> None:
    """1, 2, 5, 10, ... in plain figures."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def _label(row: Row) -> str:
    own = row.sample or row.name.startswith(OURS)
    return row.title if own else f"{row.name}: {row.title}"


def _stages(report: Report, case: Case, rows: Sequence[Row], path: Path) -> list[Path]:
    """A bar per method, its stages side by side, and a mark where the whole call ends."""
    shown = [row for row in rows if row.stages and not row.roof]
    if not shown:
        return []
    figure, (axis,) = _figure(8.0, 1.6 + 0.33 * len(shown))
    left = [0.0] * len(shown)
    places = range(len(shown))
    for stage in STAGES:
        widths = [row.stages.get(stage, 0.0) for row in shown]
        if not any(widths):
            continue
        axis.barh(
            places,
            widths,
            left=left,
            label=stage,
            color=COLOURS[stage],
            hatch=HATCHES[stage],
            edgecolor="#333333",
            linewidth=0.5,
            height=0.72,
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.plot(
        [row.ms for row in shown],
        places,
        linestyle="none",
        marker="D",
        markersize=5,
        color="black",
        markerfacecolor="white",
        label="whole call",
    )
    for place, row in zip(places, shown, strict=True):
        end = max(left[place], row.ms or 0.0)
        axis.annotate(
            _short(row.ms), (end, place), xytext=(7, 0), textcoords="offset points", va="center"
        )
    floor = shown[0].floor_ms
    axis.axvline(floor, color="black", linestyle="--", linewidth=1.2, label="floor")
    axis.set_yticks(list(places), [_label(row) for row in shown])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12 * max(max(left), *((row.ms or 0.0) for row in shown)))
    axis.set_xlabel("milliseconds, median over rounds of the slowest rank")
    axis.set_title(str(case), fontsize=10)
    axis.grid(axis="x", color="#dddddd", linewidth=0.6)
    figure.legend(fontsize=8, frameon=False, loc="outside upper center", ncols=8)
    return _finish(figure, report, path)


def _growth(report: Report, path: Path) -> list[Path]:
    """Time against rows and against ranks, log axes, with the floor."""
    most = max(row.ranks for row in report.rows)
    first = report.rows[0].model
    counts = [row.rows for row in report.rows if row.ranks == most and row.model == first]
    middle = next((row.rows for row in report.rows if row.ranks != most), max(counts))
    figure, (by_rows, by_ranks) = _figure(9.0, 3.9, panels=2)
    for axis, what in ((by_rows, "rows"), (by_ranks, "ranks")):
        on_line = [
            row
            for row in report.rows
            if row.model == first
            and row.ms
            and (row.ranks == most if what == "rows" else row.rows == middle)
        ]
        for i, name in enumerate(dict.fromkeys(row.name for row in on_line)):
            line = sorted(
                (row for row in on_line if row.name == name), key=lambda row: getattr(row, what)
            )
            axis.errorbar(
                [getattr(row, what) for row in line],
                [row.ms for row in line],
                yerr=list(zip(*(_quartiles(row) for row in line), strict=True)),
                label=line[0].title,
                color=LINES[i % len(LINES)],
                marker=MARKERS[i % len(MARKERS)],
                markersize=5,
                linewidth=1.6,
                capsize=2,
            )
        floors = sorted({(getattr(row, what), row.floor_ms) for row in on_line if row.floor_ms})
        axis.plot(*zip(*floors, strict=True), "k--", linewidth=1.2, label="floor of the all-to-all")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = sorted({getattr(row, what) for row in on_line})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        _log_ticks(axis.yaxis)
        axis.grid(color="#dddddd", linewidth=0.6)
    by_rows.set_xlabel(f"rows per rank, B (N = {most})")
    by_ranks.set_xlabel(f"ranks, N (B = {middle})")
    by_rows.set_ylabel("exchange, milliseconds")
    by_rows.legend(fontsize=8, frameon=False)
    vocab = report.rows[0].vocab
    figure.suptitle(
        f"{first}: exchange of logits, V = {vocab}, {report.rows[0].dtype}", fontsize=10
    )
    return _finish(figure, report, path)


def _roofline(report: Report, path: Path) -> list[Path]:
    """GEMMs under the roof of one rank: FLOP/s against FLOPs per byte of memory."""
    points = _gemm_points(report)
    limits = next(iter(report.limits.values()), None)
    if limits is None or not points:
        return []
    figure, (axis,) = _figure(6.4, 4.2)
    ridge = limits.math / limits.memory
    low = min([ridge, *(x for x, _, _ in points)]) / 4
    high = max([ridge, *(x for x, _, _ in points)]) * 4
    xs = [low, ridge, high]
    axis.plot(
        xs,
        [min(x * limits.memory, limits.math) / 1e9 for x in xs],
        color="black",
        linewidth=1.6,
        label=f"{limits.name}, {limits.source}",
    )
    for i, (x, y, label) in enumerate(points):
        axis.plot(
            [x],
            [y / 1e9],
            linestyle="none",
            marker=MARKERS[i % len(MARKERS)],
            markersize=8,
            color=LINES[i % len(LINES)],
            label=label,
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("FLOP per byte of memory traffic")
    axis.set_ylabel("GFLOP/s of one rank")
    axis.set_ylim(top=1.5 * limits.math / 1e9)
    _log_ticks(axis.xaxis)
    _log_ticks(axis.yaxis)
    axis.grid(color="#e5e5e5", linewidth=0.5)
    axis.legend(fontsize=7, frameon=False, loc="lower right")
    axis.set_title("GEMM under the roofline", fontsize=10, loc="left")
    return _finish(figure, report, path)


def _gemm_points(report: Report) -> list[tuple[float, float, str]]:
    """(FLOP per byte, FLOP/s, what) of the GEMMs that were timed: of ours and of the DP head, or of
    the fastest kernel of ours and the library.
    """
    found: list[tuple[float, float, str]] = []
    timed: list[tuple[Row, float | None, Stage]]
    for (case, part), rows in report.cases().items():
        limits = next(iter(report.limits.values()))
        sharded = next(s for s in stages(limits, case.step) if s.name == GEMM)
        if report.kind == "kernels":
            if part != GEMM:
                continue
            ours = [row for row in rows if row.ms and is_ours(row)]
            best = [min(ours, key=lambda row: row.ms or 0.0)] if ours else []
            timed = [(row, row.ms, sharded) for row in rows if row.ms and not is_ours(row)]
            timed += [(row, row.ms, sharded) for row in best]
        else:
            whole = dp_head(limits, case.step)
            timed = [(row, row.stages.get(GEMM), sharded) for row in rows if row.name == OURS]
            timed += [(row, row.stages.get(GEMM), whole) for row in rows if row.name == "g"]
        for row, ms, stage in timed:
            if ms:
                label = f"{row.title}, B = {case.rows}"
                if case.dp_size is not None:
                    label += f", {case.dp_size} groups"
                found.append((stage.flops / stage.memory_bytes, stage.flops / ms * 1e3, label))
    return found


def _kernels(report: Report, path: Path) -> list[Path]:
    """The fastest kernel of ours beside its peers, by rows, log axes."""
    parts = list(dict.fromkeys(row.part for row in report.rows))
    figure, axes = _figure(4.6 * len(parts), 3.9, panels=len(parts))
    for axis, part in zip(axes, parts, strict=True):
        lines: dict[str, dict[int, float]] = {}
        floors: dict[int, float] = {}
        for row in report.rows:
            if row.part != part or not row.ms:
                continue
            name = "lmhead, best config" if is_ours(row) else row.title
            line = lines.setdefault(name, {})
            line[row.rows] = min(line.get(row.rows, row.ms), row.ms)
            floors[row.rows] = row.floor_ms
        for i, (name, line) in enumerate(lines.items()):
            axis.plot(
                list(line),
                [1e3 * ms for ms in line.values()],
                label=name,
                color=LINES[i % len(LINES)],
                marker=MARKERS[i % len(MARKERS)],
            )
        axis.plot(list(floors), [1e3 * ms for ms in floors.values()], "k--", label="floor")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(list(floors), [str(rows) for rows in floors])
        axis.minorticks_off()
        _log_ticks(axis.yaxis)
        axis.set_xlabel(f"rows per rank, B (N = {report.rows[0].ranks})")
        axis.set_ylabel("microseconds")
        axis.set_title(part, fontsize=10, loc="left")
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.legend(fontsize=8, frameon=False)
    return _finish(figure, report, path)
