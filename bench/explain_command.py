"""`lmhead explain`: its arguments, and what becomes of them."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable, Sequence

from lmhead.bench.cases import MODELS, Model
from lmhead.bench.explanation import explain, impossible
from lmhead.devices import DEVICES
from lmhead.policy import MODES, ParallelConfig
from lmhead.route import POLICIES

ROWS = 36


def add(command: argparse.ArgumentParser, positive: Callable[[str], int]) -> None:
    """Fields of `ParallelConfig` under their engines' names, then the head, rows and device."""
    either = argparse.BooleanOptionalAction
    command.add_argument(
        "--tp-size", type=positive, required=True, metavar="N", help="ranks of the head's group"
    )
    command.add_argument(
        "--dp-size",
        type=positive,
        default=1,
        help="attention groups; without DP attention: copies of the model (default %(default)s)",
    )
    command.add_argument(
        "--attn-cp-size", type=positive, default=1, help="context-parallel ranks of a group"
    )
    command.add_argument(
        "--attn-tp-size", type=positive, help="tensor-parallel ranks of a group (default: the rest)"
    )
    command.add_argument(
        "--enable-dp-attention", action=either, help="(default: where --dp-size is above 1)"
    )
    command.add_argument(
        "--enable-dp-lm-head",
        action="store_true",
        help="a head per set of ranks with the same rows",
    )
    command.add_argument(
        "--enable-tp-lm-head-all-to-all", action=either, help="(default: the policy decides)"
    )
    command.add_argument("--disaggregation-mode", choices=("null", *MODES))
    command.add_argument(
        "--tied-head", action="store_true", help="the head's weight is the input embedding's"
    )
    command.add_argument(
        "--replicated-head", action="store_true", help="every rank holds the whole vocabulary"
    )
    command.add_argument("--policy", choices=POLICIES, default="auto", help="(default %(default)s)")
    command.add_argument(
        "--may-replicate",
        action="store_true",
        help="policy auto may choose a head per set of ranks that hold many rows alike",
    )
    command.add_argument("--model", choices=tuple(MODELS), help="a model by name")
    command.add_argument(
        "--vocab", type=positive, help="V, with --hidden, of a model that has no name here"
    )
    command.add_argument("--hidden", type=positive, help="H")
    rows = command.add_mutually_exclusive_group()
    rows.add_argument(
        "--rows",
        type=positive,
        help=f"rows of each set of ranks that hold the same ones (default {ROWS})",
    )
    rows.add_argument(
        "--row-counts", type=int, nargs="+", metavar="ROWS", help="a count per such set, 0 or more"
    )
    command.add_argument(
        "--logits", choices=("16", "32"), default="16", help="bits of a logit (default 16)"
    )
    command.add_argument(
        "--device", choices=tuple(DEVICES), default="b200", help="(default %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, model: Model) -> int:
    """Print the explanation of `model`'s head; 1 where the combination is impossible."""
    config = config_of(arguments)
    refused = impossible(config, arguments.policy)
    if refused is not None:
        words = command_of(refused.nearest, arguments)
        if arguments.json:
            print(json.dumps(refused.to_dict(words), indent=1))
        else:
            print("\n".join(refused.lines(words)))
        return 1
    found = explain(
        config,
        vocab=model.vocab,
        hidden=model.hidden,
        device=DEVICES[arguments.device],
        rows=arguments.rows or ROWS,
        row_counts=arguments.row_counts,
        policy=arguments.policy,
        itemsize=int(arguments.logits) // 8,
        may_replicate=arguments.may_replicate,
    )
    if arguments.json:
        print(json.dumps({"model": model.name, **found.to_dict()}, indent=1))
    else:
        print("\n".join(found.lines()))
    return 0


def config_of(arguments: argparse.Namespace) -> ParallelConfig:
    attention = arguments.enable_dp_attention
    return ParallelConfig(
        arguments.tp_size,
        arguments.dp_size,
        attn_cp_size=arguments.attn_cp_size,
        attn_tp_size=arguments.attn_tp_size,
        enable_dp_attention=arguments.dp_size > 1 if attention is None else attention,
        enable_dp_lm_head=arguments.enable_dp_lm_head,
        enable_tp_lm_head_all_to_all=arguments.enable_tp_lm_head_all_to_all,
        disaggregation_mode=arguments.disaggregation_mode,
        tied_head=arguments.tied_head,
        replicated_head=arguments.replicated_head,
    )


def command_of(config: ParallelConfig, arguments: argparse.Namespace) -> str:
    """The command line that asks for `config` and for all else that `arguments` ask for; counts of
    rows, where `config` has another number of sets that hold rows, become their largest.
    """
    words = ["lmhead", "explain", "--tp-size", config.tp_size, "--dp-size", config.dp_size]
    if config.attn_cp_size > 1:
        words += ["--attn-cp-size", config.attn_cp_size]
    if config.attn_tp_size is not None:
        words += ["--attn-tp-size", config.attn_tp_size]
    if config.enable_dp_attention != (config.dp_size > 1):
        words += [_either("--enable-dp-attention", config.enable_dp_attention)]
    if config.enable_tp_lm_head_all_to_all is not None:
        flag = config.enable_tp_lm_head_all_to_all
        words += [_either("--enable-tp-lm-head-all-to-all", flag)]
    for name in ("enable_dp_lm_head", "tied_head", "replicated_head"):
        words += [f"--{name.replace('_', '-')}"] if getattr(config, name) else []
    if config.disaggregation_mode is not None:
        words += ["--disaggregation-mode", config.disaggregation_mode]
    if arguments.policy != "auto":
        words += ["--policy", arguments.policy]
    words += ["--may-replicate"] if arguments.may_replicate else []
    for name in ("model", "vocab", "hidden"):
        if getattr(arguments, name) is not None:
            words += [f"--{name}", getattr(arguments, name)]
    words += _rows_words(arguments.rows, arguments.row_counts, config.layout().sets)
    if arguments.logits != "16":
        words += ["--logits", arguments.logits]
    if arguments.device != "b200":
        words += ["--device", arguments.device]
    words += ["--json"] if arguments.json else []
    return shlex.join(map(str, words))


def _either(name: str, value: bool) -> str:
    return name if value else f"--no-{name[2:]}"


def _rows_words(rows: int | None, counts: Sequence[int] | None, sets: int) -> list[str | int]:
    if counts is not None and len(counts) == sets:
        return ["--row-counts", *counts]
    rows = max(counts) if counts else rows
    return ["--rows", rows] if rows else []
