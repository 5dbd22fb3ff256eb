"""torch.ops.lmhead.sample and sample_exchange: draws as operators, for compiled code.

| operator | from | to |
|---|---|---|
| sample | hidden [B, H], own rows | what they draw |
| sample_held | hidden rows of a layout whose attention groups have several ranks | what they draw |
| sample_exchange | partial [T, S] of the caller's own GEMM | what the own B rows draw |

Parameters come as `records` [B, W] int32 (`lmhead.sampling.Request.records`) and their `form`,
whose integers are `lmhead.sampling.Form.to_list`'s; the results are ids [B] int64, status [B]
uint8, and the log-probabilities: of the drawn token [B], of asked ids [B, L], of the most likely
tokens [B, n] with their ids; empty where they are not asked for.  The rest as in
`lmhead.operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lmhead import draw, ops, order
from lmhead.operators import HEAD
from lmhead.sampling import Form, Records, Sample
from lmhead.shapes import Layout

_RESULTS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
_RECORDS = "Tensor records, SymInt[] form, Tensor? mask, bool full"
_HELD = "SymInt rows, int[] layout, bool share, str policy"
_PARTIAL = "int vocab_size, str group_name, int ranks, SymInt[]? row_counts, str kernels, str route"

_Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op(
    "lmhead::sample",
    mutates_args=(),
    schema=f"(Tensor hidden, {_RECORDS}, {HEAD}) -> {_RESULTS}",
)
def sample_op(*arguments: Any) -> _Results:
    """hidden [B, H] -> what the rows draw.  `full` draws from full logits by `route`, or by the
    rules.  Errors are those of `lmhead.LMHead.sample`.
    """
    return _results(draw.sample_by_name(*arguments))


@torch.library.custom_op(
    "lmhead::sample_exchange",
    mutates_args=(),
    schema=f"(Tensor partial, {_RECORDS}, {_PARTIAL}) -> {_RESULTS}",
)
def sample_exchange_op(*arguments: Any) -> _Results:
    """partial [T, S] of the caller's own GEMM -> what the own rows draw.  Errors are those of
    `lmhead.sample_exchange`.
    """
    return _results(draw.sample_exchange_by_name(*arguments))


@torch.library.custom_op(
    "lmhead::sample_held",
    mutates_args=(),
    schema=f"(Tensor hidden, {_RECORDS}, {_HELD}, {HEAD}) -> {_RESULTS}",
)
def sample_held_op(
    hidden: torch.Tensor,
    records: torch.Tensor,
    form: Sequence[int],
    mask: torch.Tensor | None,
    full: bool,
    rows: int,
    layout: Sequence[int],
    share: bool,
    policy: str,
    *head: Any,
) -> _Results:
    """hidden [brought, H], the rows that this rank holds, and the records of its attention group's
    G rows -> what the `rows` draw that it owns, or all G if `share`.  The rest as in
    `lmhead::logits_held`.
    """
    held = ops.Held(Layout(*layout), policy=policy)
    found = draw.sample_by_name(hidden, records, form, mask, full, *head, held=held, share=share)
    assert found.ids.shape[0] == rows
    return _results(found)


def _results(found: Sample) -> _Results:
    """Every result has storage of its own, the empty ones too."""

    def given(
        result: torch.Tensor | None, dims: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return found.ids.new_empty((0,) * dims, dtype=dtype) if result is None else result

    return (
        found.ids,
        found.status,
        given(found.logprobs, 1),
        given(found.asked_logprobs, 2),
        given(found.top_ids, 2, torch.int64),
        given(found.top_logprobs, 2),
    )


@sample_op.register_fake
@sample_exchange_op.register_fake
def _sample_fake(
    source: torch.Tensor, records: torch.Tensor, form: Sequence[int], *_: object
) -> _Results:
    return _fakes(source, form, records.shape[0])


@sample_held_op.register_fake
def _sample_held_fake(
    source: torch.Tensor,
    records: torch.Tensor,
    form: Sequence[int],
    mask: torch.Tensor | None,
    full: bool,
    rows: int,
    *_: object,
) -> _Results:
    return _fakes(source, form, rows)


def _fakes(source: torch.Tensor, form: Sequence[int], rows: int) -> _Results:
    order.keep_order(*(op._opoverload for op in _OPERATORS))
    known = Form.from_list(form)
    given = rows if known.logprobs else 0

    def floats(*shape: Any) -> torch.Tensor:
        return source.new_empty(shape, dtype=torch.float32)

    return (
        source.new_empty((rows,), dtype=torch.int64),
        source.new_empty((rows,), dtype=torch.uint8),
        floats(given),
        floats(rows, known.asked) if known.asked else floats(0, 0),
        source.new_empty((rows, known.top) if known.top else (0, 0), dtype=torch.int64),
        floats(rows, known.top) if known.top else floats(0, 0),
    )


_OPERATORS = (sample_op, sample_held_op, sample_exchange_op)

for _op in _OPERATORS:
    order.mark(_op._opoverload)


def sample(
    hidden: torch.Tensor,
    records: Records,
    mask: torch.Tensor | None,
    *head: Any,
    full: bool,
    held: tuple[Any, ...] | None = None,
) -> Sample:
    """The operator's results as a `Sample`, without a route; `held` are what `sample_held` takes
    between `full` and the head.
    """
    drawn = (hidden, records.words, records.form.to_list(), mask, full)
    if held is None:
        found = torch.ops.lmhead.sample(*drawn, *head)
    else:
        found = torch.ops.lmhead.sample_held(*drawn, *held, *head)
    return _sample(found, records.form)


def sample_exchange(
    partial: torch.Tensor,
    records: Records,
    mask: torch.Tensor | None,
    *rest: Any,
    full: bool,
) -> Sample:
    """The same from partial logits."""
    form = records.form.to_list()
    found = torch.ops.lmhead.sample_exchange(partial, records.words, form, mask, full, *rest)
    return _sample(found, records.form)


def _sample(found: _Results, form: Form) -> Sample:
    ids, status, logprobs, asked, top_ids, top_logprobs = found
    return Sample(
        ids,
        status,
        None,
        logprobs if form.logprobs else None,
        asked if form.asked else None,
        top_ids if form.top else None,
        top_logprobs if form.top else None,
    )
