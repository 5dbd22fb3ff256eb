"""What a CUDA-graph capture cannot hold, shown without a GPU: every public call passes the guard
(`guards.capture_safe`) once it is warm, and a broken call of each kind does not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton
from data_head import FLOATS, KERNELS, ROUTES, Arithmetic, whole
from guards import Trail, capture_safe, violations
from ranks import pool
from triton.runtime.interpreter import InterpretedFunction

import lmhead
from lmhead import operators, timing
from lmhead.chooser import Configs
from lmhead.compare import first_difference
from lmhead.kernels.config import GemmConfig

BF16, _, FP32 = FLOATS
VOCAB, WIDTH, ROWS = 24, 8, 3
ARITHMETIC = Arithmetic(bias=True, scale=0.5)

Call = Callable[[], Any]


def _head(
    rank: int, ranks: int, vocab: int = VOCAB, dtype: torch.dtype = FP32, **options: Any
) -> lmhead.LMHead:
    weight, bias = whole(vocab, WIDTH, seed=1, dtype=dtype), whole(vocab, seed=2, dtype=dtype)
    return ARITHMETIC.head(weight, bias, ranks, rank, **options)


def _public_calls(rank: int, ranks: int, kernels: str, route: str) -> list[str]:
    """Every public call, warmed, under the guard, with the result that it had before."""
    wrong: list[str] = []
    counts = [1, ROWS, 0, 2][:ranks]
    for vocab in (VOCAB, VOCAB - 1):
        # On Triton bf16, which has a kernel of its own; fp32 is the library's.
        dtype = BF16 if kernels == "triton" else FP32
        asked = route if ranks > 1 else None
        head = _head(rank, ranks, vocab, dtype, kernels=kernels, route=asked)
        everyone = whole(ranks * ROWS, WIDTH, seed=3, dtype=dtype)
        own = everyone[rank * ROWS : (rank + 1) * ROWS]
        few = whole(counts[rank], WIDTH, seed=4, dtype=dtype)
        some = torch.cat([few.new_zeros(count, WIDTH) for count in counts])
        out = torch.empty(ROWS, vocab, dtype=dtype)
        partial, work = everyone @ head.weight.t(), lmhead.Workspace()
        strided = torch.stack([partial, partial], dim=2)[..., 0]

        def exchange(given: torch.Tensor, head: Any = head, work: Any = work, **more: Any) -> Any:
            options = {"route": head._asked_route, "kernels": kernels, "workspace": work}
            return lmhead.exchange(given, vocab_size=head.vocab_size, **options, **more)

        calls: dict[str, Call] = {
            "head": lambda head=head, own=own: head(own),
            "head, counts": lambda head=head, few=few: head(few, counts),
            "head, out": lambda head=head, own=own, out=out: head(own, out=out),
            "gathered": lambda head=head, all=everyone: head.forward_gathered(all),
            "gathered, counts": lambda head=head, some=some: head.forward_gathered(some, counts),
            "exchange": lambda partial=partial: exchange(partial),
            "exchange, strided": lambda strided=strided: exchange(strided),
            "exchange, out": lambda partial=partial, out=out: exchange(partial, out=out),
        }
        trail = Trail()
        with trail.recording():
            head.warmup([ROWS, counts], None)
            head.warmup(ROWS, out)
            before = {name: call().clone() for name, call in calls.items() if "exchange" in name}
        before |= {name: call().clone() for name, call in calls.items() if "exchange" not in name}
        for name, call in calls.items():
            result, found = violations(call, trail)
            what = f"V={vocab} {name}"
            wrong.extend(f"{what}: {kind}: {text}" for kind, text in found)
            if difference := first_difference(result, before[name]):
                wrong.append(f"{what}: {difference}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_public_call_is_capture_safe(kernels: str, ranks: int) -> None:
    for route in ROUTES[: ranks if kernels == "torch" else 1]:
        assert pool(ranks).run(_public_calls, kernels, route) == [[]] * ranks


def _operator_calls(rank: int, ranks: int) -> list[str]:
    """The operators take their temporaries from the allocator (a graph's pool, in a capture); they
    hold nothing else that a capture cannot.
    """
    wrong: list[str] = []
    name = dist.group.WORLD.group_name if ranks > 1 else ""
    weight, bias = _head(rank, ranks).weight, None
    everyone = whole(ranks * ROWS, WIDTH, seed=3)
    own = everyone[rank * ROWS : (rank + 1) * ROWS]
    head = (weight, bias, VOCAB, name, ranks, 0.5, None, FP32, FP32, None, "", "")
    exchange = (everyone @ weight.t(), ROWS, VOCAB, name, ranks, FP32, None, "", "")
    received, out = whole(ranks, ROWS, VOCAB // ranks, seed=5), torch.empty(ROWS, VOCAB)
    calls: dict[str, Call] = {
        "logits": lambda: operators.logits_op(own, *head),
        "logits_out": lambda: operators.logits_out_op(own, *head, out),
        "logits_gathered": lambda: operators.logits_gathered_op(everyone, ROWS, *head),
        "logits_gathered_out": lambda: operators.logits_gathered_out_op(everyone, ROWS, *head, out),
        "exchange": lambda: operators.exchange_op(*exchange),
        "exchange_out": lambda: operators.exchange_out_op(*exchange, out),
        "reassemble": lambda: operators.reassemble_op(received, VOCAB, FP32, ""),
        "reassemble_out": lambda: operators.reassemble_out_op(received, "", out),
    }
    for what, call in calls.items():
        trail = Trail()
        with trail.recording():
            call()
        kinds = {kind for kind, _ in violations(call, trail)[1]}
        if kinds - {"allocation"} or (kinds and "reassemble" in what):
            wrong.append(f"{what}: {violations(call, trail)[1]}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_operator_is_capture_safe(ranks: int) -> None:
    assert pool(ranks).run(_operator_calls) == [[]] * ranks


def _decode_calls(rank: int, ranks: int) -> list[str]:
    """A replay on a CPU is the eager step: with a buffer for its results it allocates nothing."""
    wrong: list[str] = []
    head = _head(rank, ranks)
    for out in (torch.empty(4, VOCAB), None):
        graphs = lmhead.DecodeGraphs(head, (2, 4), heads=(head,), out=out)
        trail = Trail()
        with trail.recording():
            graphs.capture(torch.empty(1, WIDTH))
        for rows, agreed in ((3, 3), (1, 1), (0, 2), (2, [2] * ranks)):
            hidden = whole(rows, WIDTH, seed=rows + rank)
            for capturing in (True, False):
                _, found = violations(
                    lambda hidden=hidden, agreed=agreed, graphs=graphs: graphs(
                        hidden, agreed=agreed
                    ),
                    trail,
                    capturing,
                )
                steps_own = [("allocation",)] if out is None else []
                if [(kind,) for kind, _ in found] != steps_own:
                    wrong.append(f"rows {rows} of {agreed}, out={out is not None}: {found}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_decode_graphs_are_capture_safe(ranks: int) -> None:
    assert pool(ranks).run(_decode_calls) == [[]] * ranks


# A broken call of each kind: the warmed call of a head, and what somebody might have left in it.


def _scalar(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    logits = head(hidden)
    assert hidden.sum().item() != 0.5
    return logits


def _branch_on_a_value(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    return head(hidden) if hidden.isfinite().all() else hidden


def _wait(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):  # there may be no device to wait for
        torch.cuda.synchronize()
    return head(hidden)


def _bring_to_the_host(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    hidden[0].tolist()
    return head(hidden)


def _shape_by_content(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    rows: list[torch.Tensor] = []
    rows.append(hidden.nonzero())
    return head(hidden)


def _temporary(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    return head(hidden.clone())


def _group(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):  # there is no default group here
        dist.new_group([0])
    return head(hidden)


def _compile_triton(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        triton.compile(None)
    return head(hidden)


def _compile_torch(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    torch.compile(head, backend="eager")
    return head(hidden)


def _first_use_of_a_kernel(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    InterpretedFunction.rewritten_fn.clear()
    return head(hidden)


def _tune(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    timing.interleaved({"one": lambda: None}, 1, device=hidden.device)
    return head(hidden)


def _tune_triton(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):  # it wants a driver
        triton.testing.do_bench(lambda: None)
    return head(hidden)


def _open(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    with open(__file__) as file:
        assert file
    return head(hidden)


def _read_text(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    Path(__file__).read_bytes()
    return head(hidden)


def _other_rows(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    return head(hidden[:1])


def _other_config(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    config = GemmConfig(32, 128, 64, num_warps=8, num_stages=3, kind="bulk")
    with mock.patch.object(head._chooser, "configs", lambda *_: Configs(gemm=config)):
        return head(hidden)


def _other_kernels(head: lmhead.LMHead, hidden: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(head, "_kernels", "torch"):
        return head(hidden)


BROKEN: tuple[tuple[Callable[..., torch.Tensor], set[str]], ...] = (
    (_scalar, {"scalar", "allocation"}),
    (_branch_on_a_value, {"scalar", "allocation"}),
    (_wait, {"sync"}),
    (_bring_to_the_host, {"sync"}),
    (_shape_by_content, {"sync", "allocation"}),
    (_temporary, {"allocation"}),
    (_group, {"group"}),
    (_compile_triton, {"compile"}),
    (_compile_torch, {"compile"}),
    (_first_use_of_a_kernel, {"compile"}),
    (_tune, {"tune"}),
    (_tune_triton, {"tune"}),
    (_open, {"file"}),
    (_read_text, {"file"}),
    (_other_rows, {"kernel"}),
    (_other_config, {"kernel"}),
    (_other_kernels, {"kernel"}),
)


@pytest.mark.parametrize(("broken", "kinds"), BROKEN, ids=[call.__name__ for call, _ in BROKEN])
def test_the_guard_fails_on_a_broken_call(
    broken: Callable[..., torch.Tensor], kinds: set[str]
) -> None:
    torch.compile(lambda: None, backend="eager")  # the first one reads its files
    weight = whole(VOCAB, WIDTH, seed=1, dtype=BF16)
    head = lmhead.LMHead(weight, VOCAB, kernels="triton")
    hidden = whole(ROWS, WIDTH, seed=2, dtype=BF16)
    trail = Trail()
    with trail.recording():
        head.warmup(ROWS)
    capture_safe(lambda: head(hidden), trail)
    _, found = violations(lambda: broken(head, hidden), trail, capturing=False)
    assert {kind for kind, _ in found} >= kinds, found
    assert {kind for kind, _ in found} <= kinds | {"allocation"}, found
    with pytest.raises(AssertionError, match=sorted(kinds)[-1]):
        capture_safe(lambda: broken(head, hidden), trail, capturing=False)


def _other_route(rank: int, ranks: int) -> list[str]:
    """A route that is chosen anew, by what the moment brings."""
    head = _head(rank, ranks)
    other = _head(rank, ranks, route="all_gather")
    other.warmup(ROWS)
    hidden = whole(ROWS, WIDTH, seed=2)
    trail = Trail()
    with trail.recording():
        head.warmup(ROWS)
    capture_safe(lambda: head(hidden), trail)
    return [text for kind, text in violations(lambda: other(hidden), trail)[1] if kind == "route"]


def test_the_guard_fails_on_another_route() -> None:
    for found in pool(2).run(_other_route):
        assert any("all_gather" in text for text in found)
