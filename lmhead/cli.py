"""The command line: `lmhead demo`, `bench`, `tune`, `inspect` and `explain`.

Exit status: 0 for success, 1 where what was shown does not hold or ranks failed, 2 for bad
arguments.  Results go to standard output, progress bars and errors to standard error.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from lmhead import demo, paths, sampling, tables, tune
from lmhead.bench import command as bench_command
from lmhead.bench import explain_command, inspection
from lmhead.bench.cases import MODELS, RANKS, Model
from lmhead.bench.roofline import Step
from lmhead.comm import CollectiveError
from lmhead.devices import DEVICES, Device, of_arch
from lmhead.head import VERSION
from lmhead.kernels import tiles
from lmhead.kernels.config import ARCHS
from lmhead.launch import LaunchError
from lmhead.progress import Progress
from lmhead.tune import Builds, Problem
from lmhead.tune_ranks import tune_ranks


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _sample(text: str) -> dict[str, Any]:
    try:
        return sampling.parameters_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**62 - 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmhead", description="The LM head for models whose attention is data-parallel."
    )
    parser.add_argument("--version", action="version", version=f"lmhead {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_bench(commands)
    _add_tune(commands)
    _add_inspect(commands)
    _add_explain(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction) -> None:
    show = commands.add_parser(
        "demo",
        help="decode a real model on ranks whose head is sharded, and compare with one process",
        description=(
            "Start ranks on this machine (or use those of torchrun), decode with a "
            "vocabulary-sharded head, time the "
            "head over both routes, and compare every token with one process that uses the "
            "model's own head."
        ),
    )
    show.add_argument(
        "--model",
        choices=("smollm2", "synthetic"),
        default="smollm2",
        help="smollm2: SmolLM2-135M-Instruct, decoding; synthetic: the head alone at V = 129280",
    )
    show.add_argument(
        "--ranks", type=_positive, default=4, help="ranks to start here (default %(default)s)"
    )
    show.add_argument(
        "--tokens",
        type=_positive,
        default=32,
        help="tokens to decode per row at most (default %(default)s)",
    )
    show.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="what the model is asked; may be given several times (default: eight questions)",
    )
    show.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompts as plain text, without the model's chat template",
    )
    show.add_argument(
        "--tp-size",
        type=_positive,
        metavar="N",
        help="ranks that the head is sharded over: all of them (the default)",
    )
    show.add_argument(
        "--dp-size",
        type=_positive,
        metavar="N",
        help="attention groups, which decode different prompts; the ranks of one decode the same "
        "(default: as many as ranks)",
    )
    show.add_argument(
        "--route",
        choices=demo.ROUTES,
        default=None,
        help="the route that decodes (default: by the rules); both are timed",
    )
    show.add_argument(
        "--rounds",
        type=_positive,
        default=10,
        help="timed rounds of each route (default %(default)s)",
    )
    show.add_argument(
        "--loop",
        choices=demo.LOOPS,
        default="eager",
        help="how the decode loop calls the head: eager; compile: torch.compile(fullgraph=True); "
        "graph: replayed CUDA graphs, which need a GPU per rank (default %(default)s)",
    )
    show.add_argument(
        "--sample",
        type=_sample,
        metavar="NAME=NUMBER,...",
        help="draw tokens from candidates instead of taking the likeliest: temperature, top_k, "
        "top_p, min_p, as in temperature=0.8,top_p=0.95",
    )
    show.add_argument(
        "--seed",
        type=_seed,
        metavar="S",
        help="with --sample: the first sequence's seed; each has one more than the one before "
        "(default 0)",
    )
    show.add_argument("--json", action="store_true", help="print the report as one JSON object")
    show.set_defaults(run=_demo)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "bench",
        help="measure: whole heads and their stages beside what else one would run, and their roof",
        description=(
            "Measure on ranks that are started here, or torchrun's, every method checked before it "
            "is timed, beside the rates that this machine reaches."
        ),
    )
    bench_command.add(command, _positive, _sample)
    command.set_defaults(run=bench_command.run)


def _add_head_arguments(command: argparse.ArgumentParser) -> None:
    """Which head: by a model's name, or by V and H."""
    command.add_argument(
        "--vocab", type=_positive, help="V, with --hidden, of a model that has no name here"
    )
    command.add_argument("--hidden", type=_positive, help="H")
    command.add_argument(
        "--arch", choices=tuple(ARCHS), help="architecture to compile for (default sm_100)"
    )
    command.add_argument(
        "--device",
        choices=tuple(DEVICES),
        help="GPU whose rates and table count (default: all of --arch; for inspect the first)",
    )


def _add_tune(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "tune",
        help="find the best kernel configs: by measuring on a GPU, or by a model without one",
        description=(
            "On a GPU: verify and time candidates and keep the fastest in the user's table "
            "(LMHEAD_CONFIGS, or lmhead in the XDG cache directory). With --offline: compile the "
            "candidates for an architecture and rank them by a model; needs no GPU."
        ),
    )
    command.add_argument("--offline", action="store_true", help="compile and model, no GPU")
    command.add_argument(
        "--model",
        choices=tuple(MODELS),
        action="append",
        default=[],
        help="may be given several times (default: all)",
    )
    _add_head_arguments(command)
    command.add_argument(
        "--ranks",
        type=_positive,
        action="append",
        default=[],
        help="N; may be given several times (default: 1, 2, 4 and 8)",
    )
    command.add_argument(
        "--rows",
        type=_positive,
        action="append",
        default=[],
        help="T, the rows of all ranks; may be given several times (default: all buckets)",
    )
    command.add_argument(
        "--output",
        type=paths.path,
        metavar="DIR",
        help="with --offline: write DIR/<device>.json instead of the user's table",
    )
    command.add_argument(
        "--jobs", type=_positive, help="with --offline: processes (default: one per core)"
    )
    command.add_argument("--again", action="store_true", help="measure what is known anew")
    command.set_defaults(run=_tune)


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "inspect",
        help="what a head's kernels look like on an architecture, and what bounds each stage",
        description=(
            "Compile the kernels that a head would run with, read their machine code, and print "
            "bytes, FLOPs, floor and binding limit of every stage. Needs no GPU."
        ),
    )
    command.add_argument("--model", choices=tuple(MODELS), default=None, help="a model by name")
    _add_head_arguments(command)
    command.add_argument("--ranks", type=_positive, default=8, help="N (default %(default)s)")
    command.add_argument(
        "--rows", type=_positive, default=36, help="B, rows per rank (default %(default)s)"
    )
    command.add_argument(
        "--logits", choices=("16", "32"), default="16", help="bits of a logit (default 16)"
    )
    command.add_argument(
        "--wire", choices=("16", "32"), help="bits of what is exchanged (default: the logits')"
    )
    command.add_argument("--all", action="store_true", help="rank the GEMM's whole config space")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_inspect)


def _add_explain(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "explain",
        help="which way a parallel configuration's logits take, why, and what that moves",
        description=(
            "Decide the way of a head's logits from an engine's flags, and print each condition, "
            "who owns which rows, bytes per rank by route, and the least time of every stage. "
            "Needs no GPU. Exit status 1 for an impossible combination, with the nearest possible."
        ),
    )
    explain_command.add(command, _positive)
    command.set_defaults(run=_explain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        # As an exception, so that ranks are ended and temporary files removed on the way out.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        status: int = arguments.run(arguments)
        return status
    except (CollectiveError, LaunchError, OSError, ValueError) as error:
        print(f"lmhead: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lmhead: interrupted", file=sys.stderr)
        return 130


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.seed is not None and arguments.sample is None:
        raise ValueError("--seed goes with --sample: the likeliest token is not drawn")
    options = demo.Options(
        model=arguments.model,
        ranks=arguments.ranks,
        tokens=arguments.tokens,
        prompts=tuple(arguments.prompt),
        route=arguments.route,
        rounds=arguments.rounds,
        loop=arguments.loop,
        sample=arguments.sample,
        seed=arguments.seed or 0,
        tp_size=arguments.tp_size,
        dp_size=arguments.dp_size,
        raw=arguments.raw,
    )
    report = demo.run(options)
    if report is None:  # another rank of torchrun prints
        return 0
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print("\n".join(report.lines()))
    return 0 if report.identical else 1


def _tune(arguments: argparse.Namespace) -> int:
    models = [MODELS[name] for name in arguments.model]
    custom = _custom(arguments)
    models += [custom] if custom else []
    problems: list[Problem] = []
    for model in models or MODELS.values():
        for ranks in arguments.ranks or RANKS:
            rows = arguments.rows or tune.ROWS
            problems += tune.problems_of(model.hidden, model.vocab, ranks, rows)
    problems = list(dict.fromkeys(problems))
    if arguments.offline and arguments.again:
        raise ValueError("--again is for measuring: a model gives the same answer again")
    if arguments.offline:
        return _tune_offline(arguments, problems)
    for name in ("arch", "device", "output", "jobs"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name} goes with --offline: measuring is for the GPU that is here")
    if not torch.cuda.is_available():
        raise ValueError("measuring needs a CUDA device: use --offline for a modelled table")
    with Progress("measuring") as bar:
        table = tune_ranks(problems, again=arguments.again, progress=bar.at)
    print(f"{len(table)} entries in {tables.user_folder() / (table.device + '.json')}")
    return 0


def _tune_offline(arguments: argparse.Namespace, problems: Sequence[Problem]) -> int:
    _require_compiler()
    if arguments.output is not None and not arguments.output.is_dir():
        raise ValueError(f"--output {arguments.output} is no directory")
    builds = Builds(tables.user_folder())
    devices = _devices(arguments)
    for device in devices:  # before minutes are spent on what could then not be kept
        name = device.name.lower()
        if arguments.output is None:
            tables.save(tables.Table(name))
        else:
            tables.vacate(arguments.output / f"{name}.json", name)
    for device in devices:
        with Progress(f"{device.name}: problems") as bar:

            def note(solved: int, total: int, compiled: int, bar: Progress = bar) -> None:
                bar.at(solved, total, f"{compiled} compiled")

            table = tune.offline(
                device, problems, builds=builds, workers=arguments.jobs, progress=note
            )
        if arguments.output is None:
            path = tables.save(table)
        else:
            path = arguments.output / f"{table.device}.json"
            tables.write(path, table)
        print(f"{len(table)} of {len(problems)} entries, modelled, in {path}")
        if len(table) < len(problems):
            return 1
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    _require_compiler()
    model = _custom(arguments) or MODELS[arguments.model or "deepseek-v4-pro"]
    logits = int(arguments.logits) // 8
    wire = int(arguments.wire) // 8 if arguments.wire else logits
    if wire > logits:
        raise ValueError(f"{8 * wire} bits on the wire are more than the {8 * logits} of a logit")
    sizes = model.vocab, model.hidden, arguments.ranks, arguments.rows
    step = Step(*sizes, 2, wire, logits, softcap=model.softcap is not None)
    with Progress("compiling", show=arguments.all) as bar:
        found = inspection.inspect(
            _devices(arguments)[0],
            step,
            every=arguments.all,
            builds=Builds(tables.user_folder()),
            progress=bar.at,
        )
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print("\n".join(found.lines()))
    return 1 if any(kernel.problems for kernel in found.kernels) else 0


def _explain(arguments: argparse.Namespace) -> int:
    model = _custom(arguments) or MODELS[arguments.model or "deepseek-v4-pro"]
    return explain_command.run(arguments, model)


def _custom(arguments: argparse.Namespace) -> Model | None:
    """The head that --vocab and --hidden describe, if they do."""
    if arguments.vocab is None and arguments.hidden is None:
        return None
    if arguments.vocab is None or arguments.hidden is None:
        raise ValueError("--vocab and --hidden come together")
    if arguments.model:
        raise ValueError("a head is given by --model, or by --vocab and --hidden, not by both")
    return Model("custom", arguments.vocab, arguments.hidden)


def _devices(arguments: argparse.Namespace) -> list[Device]:
    if arguments.device is None:
        return of_arch(arguments.arch or "sm_100")
    device = DEVICES[arguments.device]
    if arguments.arch not in (None, device.arch_name):
        raise ValueError(f"{device.name} is {device.arch_name}, not {arguments.arch}")
    return [device]


def _require_compiler() -> None:
    if tiles.INTERPRET.value:
        raise ValueError("TRITON_INTERPRET=1 leaves no kernel to compile: unset it")


if __name__ == "__main__":
    sys.exit(main())
