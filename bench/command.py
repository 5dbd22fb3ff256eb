"""`lmhead bench`: its arguments, and what becomes of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lmhead import launch, paths
from lmhead.bench import kernels_bench, methods, plots, report, results, suites
from lmhead.bench.cases import DTYPES, MODELS, Case, Model
from lmhead.bench.protocol import CADENCES, Settings
from lmhead.bench.results import Report
from lmhead.bench.suites import Suite
from lmhead.progress import Progress

DEFAULT_MODEL = "deepseek-v4-pro"
# Rows per rank, ranks, rounds and methods where nothing is asked for.
DEFAULTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, tuple[str, ...]]] = {
    "head": ((36,), (8,), 10, methods.NAMES),
    "exchange": ((1, 8, 36), (2, 4, 8), 10, methods.NAMES),
    "kernels": ((1, 8, 36), (8,), 20, ()),
    "scale": (
        (1, 2, 4, 8, 16, 32, 64, 128, 256),
        (1, 2, 4, 8),
        5,
        (methods.OURS, "lmhead-all-gather"),
    ),
}
WORDS = {
    "head": "the whole step and its stages: our routes and what else one would run, side by side",
    "exchange": "the exchange alone, over rows, ranks, vocabulary and dtype",
    "kernels": "GEMM and reassembly alone, on one device",
    "scale": "how the exchange's time and bytes grow with rows, ranks and vocabulary",
}


def add(
    bench: argparse.ArgumentParser,
    positive: Callable[[str], int],
    sample: Callable[[str], dict[str, Any]],
) -> None:
    """The four benchmarks and their arguments; `sample` reads what a draw is asked for."""
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="BENCHMARK")
    for kind, words in WORDS.items():
        rows, ranks, rounds, _ = DEFAULTS[kind]
        command = kinds.add_parser(kind, help=words, description=f"Measure {words}.")
        command.add_argument(
            "--model", nargs="+", choices=tuple(MODELS), default=[], help="models by name"
        )
        command.add_argument(
            "--vocab", type=positive, nargs="+", default=[], help="V, of models that have no name"
        )
        command.add_argument(
            "--hidden",
            type=positive,
            help=f"H (default: the model's; on a CPU {suites.CPU_HIDDEN})",
        )
        several = kind in ("exchange", "scale")
        command.add_argument(
            "--ranks",
            type=positive,
            nargs="+" if several else 1,
            help=f"N (default {_words(ranks)}, or as many as torchrun started)",
        )
        command.add_argument(
            "--rows", type=positive, nargs="+", help=f"B, rows per rank (default {_words(rows)})"
        )
        command.add_argument(
            "--dtype",
            nargs="+" if kind != "scale" else 1,
            choices=tuple(DTYPES),
            default=["bf16"],
            help="of operands, wire and logits (default bf16)",
        )
        command.add_argument(
            "--rounds", type=positive, default=rounds, help="timed rounds (default %(default)s)"
        )
        if kind != "kernels":
            command.add_argument(
                "--methods",
                nargs="+",
                choices=methods.NAMES,
                default=[],
                metavar="NAME",
                help=f"some of: {', '.join(methods.NAMES)}",
            )
            command.add_argument(
                "--cadence",
                choices=tuple(CADENCES),
                default="isolated",
                help="one call per timed window, or ten back to back (default %(default)s)",
            )
            command.add_argument(
                "--late",
                type=_seconds,
                default=0.0,
                metavar="S",
                help="rank 1 starts S seconds late: to see that no figure depends on it",
            )
        if kind == "head":
            command.add_argument(
                "--dp-size",
                type=positive,
                nargs="+",
                default=[],
                metavar="N",
                help="attention groups among which the ranks are divided, the same rows in all: a "
                "case for each (default: as many as ranks, data-parallel)",
            )
            command.add_argument(
                "--sample",
                type=sample,
                default="temperature=0.7,top_k=20,top_p=0.8",
                metavar="NAME=NUMBER,...",
                help="what methods that end in tokens draw with: temperature, top_k, top_p, min_p "
                "(default %(default)s, as Qwen3's model card recommends)",
            )
        _add_output(command)


def _add_output(command: argparse.ArgumentParser) -> None:
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--csv", action="store_true", help="print comma-separated values")
    command.add_argument("--plot", type=paths.path, metavar="DIR", help="draw pictures into DIR")
    command.add_argument("--save", type=paths.path, metavar="FILE", help="write everything as JSON")
    command.add_argument("--compare", type=paths.path, metavar="FILE", help="against a saved run")
    command.add_argument(
        "--fail-over",
        type=_percent,
        metavar="PERCENT",
        help="with --compare: exit with 1 where something takes so much longer than it did",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, draw, save, compare; the exit status."""
    if arguments.fail_over is not None and arguments.compare is None:
        raise ValueError("--fail-over needs --compare FILE")
    if arguments.plot is not None:
        plots.require()
    if arguments.save is not None and not arguments.save.parent.is_dir():
        raise ValueError(f"--save: {arguments.save.parent} is no directory")
    before = None if arguments.compare is None else results.load(arguments.compare)
    cases, notes = cases_of(arguments)
    if before is not None:
        _require_alike(before, arguments)
    found = _measure(arguments, cases)
    if found is None:  # another rank of torchrun prints
        return 0
    found.notes += notes
    changes = None if before is None else results.compare(before, found)
    if arguments.save is not None:
        found.save(arguments.save)
    drawn = [] if arguments.plot is None else plots.draw(found, arguments.plot)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    elif arguments.csv:
        print(found.to_csv(), end="")
    else:
        print(report.render(found), end="")
        print("".join(f"drawn: {path}\n" for path in drawn), end="")
    status = 0 if not any(row.checked.startswith("WRONG") for row in found.rows) else 1
    if changes is not None:
        if not (arguments.json or arguments.csv):
            print(report.render_changes(changes, str(arguments.compare)), end="")
        slower = list(results.past(changes, arguments.fail_over or 0.0))
        if arguments.fail_over is not None and slower:
            worst = max(slower, key=lambda change: change.ratio)
            print(
                f"{len(slower)} of {len(changes)} are past {arguments.fail_over:g} %: "
                f"{worst.row.name} by {100 * (worst.ratio - 1):.0f} % "
                f"(+- {100 * worst.spread:.0f} %)",
            )
            status = 1
    return status


def cases_of(arguments: argparse.Namespace) -> tuple[tuple[Case, ...], list[str]]:
    """What was asked for, and what a reader must be told of it."""
    rows, ranks, _, _ = DEFAULTS[arguments.kind]
    rows = tuple(arguments.rows or rows)
    if arguments.ranks:
        ranks = tuple(arguments.ranks)
    elif launch.under_torchrun():
        there = launch.world_size(ranks[-1])
        ranks = (there,) if arguments.kind != "scale" else tuple(n for n in ranks if n <= there)
    known, notes = _models(arguments)
    if arguments.kind == "scale":
        lines = [(model.name, model.vocab, model.hidden) for model in known]
        return suites.scale_cases(lines, rows, ranks, arguments.dtype[0]), notes
    groups: list[int | None] = [*dict.fromkeys(getattr(arguments, "dp_size", []))] or [None]
    for n in ranks:
        _require_groups(n, groups)
    cases = tuple(
        Case(model.name, model.vocab, model.hidden, n, count, dtype, dp_size)
        for model in known
        for dtype in arguments.dtype
        for n in ranks
        for count in rows
        for dp_size in groups
    )
    if arguments.kind == "head":
        notes += _layout_notes(cases, _names(arguments))
    return cases, notes


def _require_groups(ranks: int, groups: Sequence[int | None]) -> None:
    """ValueError for a number of attention groups that does not divide `ranks`."""
    for dp_size in groups:
        if dp_size is not None and ranks % dp_size:
            raise ValueError(
                f"--dp-size {dp_size} does not divide {ranks} ranks into groups of equal size"
            )


def _layout_notes(cases: Sequence[Case], names: Sequence[str]) -> list[str]:
    """What is left out of a layout, or of all others, and what there is to compare."""
    layouts = [case for case in cases if not case.layout.plain]
    if not layouts:
        alone = [name for name in names if name not in methods.LAYOUTS_ONLY]
        if not alone:
            raise ValueError(f"{names[0]} is for layouts: ask for a --dp-size below --ranks")
        return []
    left_out = [name for name in names if name not in methods.IN_LAYOUTS]
    if len(left_out) == len(names):
        raise ValueError(
            f"none of {', '.join(names)} knows attention groups of several ranks, as in "
            f"{layouts[0].layout}: ask for some of {', '.join(methods.IN_LAYOUTS)}"
        )
    notes = [
        "where ranks of an attention group hold the same rows, lmhead ends in the logits of the "
        "rows that a rank owns; a, a-lean and lmhead-replicate in those of all rows of its group, "
        "and candidates in their tokens"
    ]
    if left_out:
        notes.append(
            f"there {', '.join(left_out)} are left out: they are written for ranks that each have "
            "rows of their own"
        )
    return notes


def _names(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The methods, each once."""
    return tuple(dict.fromkeys(tuple(arguments.methods) or DEFAULTS[arguments.kind][3]))


def _models(arguments: argparse.Namespace) -> tuple[list[Model], list[str]]:
    names = arguments.model
    if arguments.vocab:
        if names:
            raise ValueError("a head is given by --model, or by --vocab and --hidden, not by both")
        if arguments.hidden is None and arguments.kind in ("head", "kernels"):
            raise ValueError("--vocab needs --hidden")
        return [Model("custom", vocab, arguments.hidden or 1) for vocab in arguments.vocab], []
    if not names:
        others = [name for name in MODELS if name != DEFAULT_MODEL]
        names = [DEFAULT_MODEL, *(others if arguments.kind == "scale" else [])]
    notes = []
    hidden = arguments.hidden
    if hidden is None and arguments.kind in ("head", "kernels") and not _on_cuda(arguments):
        hidden = suites.CPU_HIDDEN
        notes.append(f"H = {hidden}, not the model's own: this is a CPU; --hidden says another one")
    return [Model(name, MODELS[name].vocab, hidden or MODELS[name].hidden) for name in names], notes


def _on_cuda(arguments: argparse.Namespace) -> bool:
    """Whether the measuring will be done on CUDA."""
    if arguments.kind == "kernels":
        return torch.cuda.is_available()
    most = max(arguments.ranks or DEFAULTS[arguments.kind][1])
    return launch.on_cuda(launch.local_ranks(launch.world_size(most)))


def _measure(arguments: argparse.Namespace, cases: Sequence[Case]) -> Report | None:
    if arguments.kind == "kernels":
        if launch.under_torchrun():
            raise ValueError("bench kernels runs on one device: start it without torchrun")
        with Progress("bench kernels") as bar:
            return kernels_bench.run(tuple(cases), arguments.rounds, bar.at)
    settings = Settings(
        exchange_only=arguments.kind != "head",
        names=_names(arguments),
        rounds=arguments.rounds,
        cadence=arguments.cadence,
        stages=arguments.kind != "scale",
        late_s=arguments.late,
        sample=getattr(arguments, "sample", {}),
    )
    return suites.run(Suite(arguments.kind, tuple(cases), settings))


def _require_alike(before: Report, arguments: argparse.Namespace) -> None:
    """Told before anything is measured."""
    if before.kind != arguments.kind:
        raise ValueError(
            f"--compare: {arguments.compare} holds a bench {before.kind}, not a {arguments.kind}"
        )
    cadence = getattr(arguments, "cadence", before.cadence)
    if before.cadence != cadence:
        raise ValueError(
            f"--compare: {arguments.compare} was measured at cadence {before.cadence!r}, this run "
            f"is {cadence!r}: they answer different questions"
        )


def _words(values: Sequence[int]) -> str:
    return " ".join(map(str, values))


def _seconds(text: str) -> float:
    return _number(text, "seconds")


def _percent(text: str) -> float:
    return _number(text, "percent")


def _number(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of {unit}")
    return value
