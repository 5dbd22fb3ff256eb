"""The command line: `lmhead demo`.

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

from lmhead import demo
from lmhead.comm import CollectiveError
from lmhead.head import VERSION
from lmhead.launch import LaunchError


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmhead", description="The LM head for models whose attention is data-parallel."
    )
    parser.add_argument("--version", action="version", version=f"lmhead {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
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
        help="tokens to decode per row (default %(default)s)",
    )
    show.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt; may be given several times (default: eight built-in ones)",
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
    show.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        # As an exception, so that ranks are ended and temporary files removed on the way out.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = demo.Options(
        model=arguments.model,
        ranks=arguments.ranks,
        tokens=arguments.tokens,
        prompts=tuple(arguments.prompt),
        route=arguments.route,
        rounds=arguments.rounds,
        loop=arguments.loop,
    )
    try:
        report = demo.run(options)
    except (CollectiveError, LaunchError, OSError, ValueError) as error:
        print(f"lmhead: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lmhead: interrupted", file=sys.stderr)
        return 130
    if report is None:  # another rank of torchrun prints
        return 0
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        print("\n".join(report.lines()))
    return 0 if report.identical else 1


if __name__ == "__main__":
    sys.exit(main())
