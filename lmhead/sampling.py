"""What a draw is asked for, and what it gives: parameters per row, their record on the wire, and
the result.

Order of operations, as vLLM documents its sampler: mask, bias, penalties; temperature; min-p;
top-k; top-p; draw.  Log-probabilities are the model's own: of the logits before all of that.

Numbers, the presence of a tensor and the width of a list shape the messages, so they are the same
on every rank, like `row_counts`; the CONTENT of a tensor is each rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

import torch

# Below this a temperature means greedy (vLLM's _SAMPLING_EPS).
GREEDY_BELOW = 1e-5
# Candidates per shard and row where no top-k says how many it takes.
BUDGET = 64
# The seed of a row that has none of its own.
UNSEEDED = -1

OK, NAN, EMPTY, MISSED = 0, 1, 2, 3
STATUS = {
    OK: "a token was drawn",
    NAN: "a logit that is not masked is NaN",
    EMPTY: "every token is masked or -inf",
    MISSED: "the candidates do not cover the row, and fallback=False",
}

Number = float | torch.Tensor


class Sample(NamedTuple):
    """What was drawn.  Rows without a token have id -1, log-probability NaN, and say why in
    `status`; their neighbours are untouched.
    """

    ids: torch.Tensor  # [B] int64
    status: torch.Tensor  # [B] uint8, a key of `STATUS`
    # lmhead.route.Route: "candidates", or the route of full logits and why; None in compiled code.
    route: Any
    logprobs: torch.Tensor | None = None  # [B] fp32, of the drawn token
    asked_logprobs: torch.Tensor | None = None  # [B, L] fp32; NaN where the asked id is -1
    top_ids: torch.Tensor | None = None  # [B, n] int64, most likely first; -1 where there is none
    top_logprobs: torch.Tensor | None = None  # [B, n] fp32

    def tensors(self) -> list[torch.Tensor]:
        """All that has a row per drawn token, in order; what was not asked for is left out."""
        return [part for part in self if isinstance(part, torch.Tensor)]

    def with_tensors(self, parts: Sequence[torch.Tensor]) -> Sample:
        """The same with other tensors in place of `tensors()`."""
        names = [name for name, part in self._asdict().items() if isinstance(part, torch.Tensor)]
        return self._replace(**dict(zip(names, parts, strict=True)))


@dataclass(frozen=True)
class Form:
    """What shapes the messages of a call, equal on every rank."""

    candidates: int = 1  # C, per shard and row
    biased: int = 0  # tokens with a bias, per row
    counted: int = 0  # tokens that are penalised, per row
    asked: int = 0  # L, ids whose log-probability is asked for
    top: int = 0  # n
    top_sent: int = 0  # of which a shard has this many
    logprobs: bool = False
    masked: bool = False
    noisy: bool = True  # whether a row may be drawn from all tokens
    sure: bool = True  # whether C candidates cover every row, however many columns there are
    may_miss: bool = False  # whether C of a shard's columns may fail to cover a row
    by_mass: bool = False  # whether a nucleus may have to be cut from all logits' mass
    fallback: bool = True
    seeded: bool = True  # whether every row is known to have a seed of its own

    def to_list(self) -> list[int]:
        """As an operator takes it."""
        return [int(value) for value in astuple(self)]

    @classmethod
    def from_list(cls, values: Sequence[int]) -> Form:
        names = [field.name for field in fields(cls)]
        given: dict[str, Any] = dict(zip(names[:6], values[:6], strict=True))
        return cls(**given, **dict(zip(names[6:], map(bool, values[6:]), strict=True)))

    @property
    def edited(self) -> bool:
        """Whether what is drawn from differs from the model's logits."""
        return self.masked or self.biased > 0 or self.counted > 0

    @property
    def raw(self) -> bool:
        """Whether a candidate needs its unedited logit beside the edited one."""
        return self.logprobs and self.edited

    @property
    def reads_logits(self) -> bool:
        """Whether anything but a tile's own summary is, or may be, asked of a shard's logits."""
        listed = self.candidates > 1 or self.top_sent > 0 or self.asked > 0
        return listed or self.edited or self.may_miss

    @property
    def record_words(self) -> int:
        """32-bit words of a row's record, a multiple of 16 bytes."""
        words = FIXED + (3 if self.counted else 0)
        words += 2 * self.biased + 2 * self.counted + self.asked
        return -(-words // 4) * 4

    @property
    def message_words(self) -> int:
        """32-bit words that a shard sends for a row."""
        return self.slices()["end"].start

    def slices(self) -> dict[str, slice]:
        """Where in a message each part stands."""
        count = self.candidates
        parts = {
            "values": count,  # fp32
            "ids": count,  # int32; -1 none, -2 in the first place: NaN
            "raws": count if self.raw else 0,  # fp32
            "mass": 2 if self.by_mass else 0,  # fp32 max and sum of exp((x - max) / temperature)
            "lse": 2 if self.logprobs else 0,  # fp32 max and sum of exp(x - max), unedited
            "asked": self.asked,  # fp32, of ids on this shard
            "top_values": self.top_sent,  # fp32, unedited
            "top_ids": self.top_sent,  # int32
            "end": 0,
        }
        found, start = {}, 0
        for name, words in parts.items():
            found[name] = slice(start, start + words)
            start += words
        return found


# The words of a record that every row has: 1 / temperature (0: greedy), k (0: off), p (1: off),
# ln of min-p (-inf: off), the seed's two, the position's two.
FIXED, SEED = 8, slice(4, 6)


@dataclass(frozen=True)
class Records:
    """The rows' parameters as they travel: words [B, form.record_words] int32."""

    words: torch.Tensor
    form: Form

    def floats(self, column: int) -> torch.Tensor:
        return self.words[:, column].contiguous().view(torch.float32)

    @property
    def inverse_temperature(self) -> torch.Tensor:
        return self.floats(0)

    @property
    def k(self) -> torch.Tensor:
        return self.words[:, 1]

    @property
    def p(self) -> torch.Tensor:
        return self.floats(2)

    @property
    def log_min_p(self) -> torch.Tensor:
        return self.floats(3)

    @property
    def greedy(self) -> torch.Tensor:
        return self.inverse_temperature == 0

    @property
    def unfiltered(self) -> torch.Tensor:
        """Rows drawn from all tokens: their candidate is the shard's maximum with noise."""
        off = (self.k == 0) & (self.p >= 1) & (self.log_min_p == -math.inf)
        return off & ~self.greedy

    @property
    def seeds(self) -> torch.Tensor:
        return self.words[:, 4:6].contiguous().view(torch.int64).squeeze(1)

    @property
    def positions(self) -> torch.Tensor:
        return self.words[:, 6:8].contiguous().view(torch.int64).squeeze(1)

    def _list(self, start: int, count: int) -> torch.Tensor:
        return self.words[:, start : start + count]

    @property
    def _lists(self) -> int:
        return FIXED + (3 if self.form.counted else 0)

    @property
    def penalties(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Repetition, frequency, presence, each [B] fp32."""
        return self.floats(FIXED), self.floats(FIXED + 1), self.floats(FIXED + 2)

    @property
    def bias_ids(self) -> torch.Tensor:
        return self._list(self._lists, self.form.biased)

    @property
    def bias_values(self) -> torch.Tensor:
        start = self._lists + self.form.biased
        return self._list(start, self.form.biased).contiguous().view(torch.float32)

    @property
    def token_ids(self) -> torch.Tensor:
        """Tokens of the prompt and the output, each once; -1 where there is none."""
        return self._list(self._lists + 2 * self.form.biased, self.form.counted)

    @property
    def token_counts(self) -> torch.Tensor:
        """How often each stands in the output; 0 where in the prompt alone."""
        start = self._lists + 2 * self.form.biased + self.form.counted
        return self._list(start, self.form.counted)

    @property
    def asked_ids(self) -> torch.Tensor:
        start = self._lists + 2 * self.form.biased + 2 * self.form.counted
        return self._list(start, self.form.asked)

    def rows(self, chosen: slice | torch.Tensor) -> Records:
        return Records(self.words[chosen], self.form)


@dataclass(frozen=True)
class Request:
    """The arguments of a draw for B rows, as users give them; see `LMHead.sample`."""

    temperature: Number = 1.0
    top_k: int | torch.Tensor | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    seeds: int | torch.Tensor | None = None
    positions: int | torch.Tensor | None = None
    logprobs: int | None = None
    logprob_ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    logit_bias: tuple[torch.Tensor, torch.Tensor] | None = None
    repetition_penalty: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    prompt_tokens: torch.Tensor | None = None
    output_tokens: torch.Tensor | None = None
    candidates: int | None = None
    fallback: bool = True

    def form(self, vocab_size: int, shard: int) -> Form:
        """How the messages look.  Raises ValueError or TypeError for what cannot be meant."""
        k, fixed_k = self.top_k, 0
        if isinstance(k, bool) or not (k is None or isinstance(k, (int, torch.Tensor))):
            raise TypeError(f"top_k must be an int, a tensor or None, got {type(k).__name__}")
        if isinstance(k, int):
            _within("top_k", k, -1, math.inf, "at least 0, or -1 for off")
            fixed_k = k if 0 < k < vocab_size else 0
        cut = _on(self.top_p, 1.0) or _on(self.min_p, 0.0)
        loose = isinstance(k, torch.Tensor) or (not fixed_k and cut)
        count = self.candidates
        if count is None:
            count = fixed_k or (BUDGET if loose else 1)
        elif isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"candidates must be a positive int or None, got {count!r}")
        count = min(count, shard)
        top = 0 if self.logprobs is None else self.logprobs
        if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= vocab_size:
            raise ValueError(
                f"logprobs must be None or the number of most likely tokens, 0 to {vocab_size}, "
                f"got {self.logprobs!r}"
            )
        tokens = sum(
            0 if given is None else given.shape[-1]
            for given in (self.prompt_tokens, self.output_tokens)
        )
        penalised = any(
            given is not None
            for given in (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        )
        if penalised and self.prompt_tokens is None and self.output_tokens is None:
            raise ValueError("penalties need prompt_tokens or output_tokens to count")
        sure = not loose and count >= fixed_k
        may_miss = not sure and count < shard
        return Form(
            candidates=count,
            biased=0 if self.logit_bias is None else self.logit_bias[0].shape[-1],
            counted=tokens if penalised else 0,
            asked=0 if self.logprob_ids is None else self.logprob_ids.shape[-1],
            top=top,
            top_sent=min(top, shard),
            logprobs=self.logprobs is not None or self.logprob_ids is not None,
            masked=self.mask is not None,
            noisy=not (fixed_k or self._all_greedy or self._all_cut),
            sure=sure,
            may_miss=may_miss,
            by_mass=may_miss and loose and _on(self.top_p, 1.0),
            fallback=bool(self.fallback),
            seeded=isinstance(self.seeds, int) and self.seeds != UNSEEDED,
        )

    @property
    def _all_greedy(self) -> bool:
        given = self.temperature
        return isinstance(given, (int, float)) and given < GREEDY_BELOW

    @property
    def _all_cut(self) -> bool:
        """Whether top-p or min-p cuts every row, as far as the host knows."""
        p, min_p = self.top_p, self.min_p
        return (isinstance(p, (int, float)) and p < 1) or (
            isinstance(min_p, (int, float)) and min_p > 0
        )

    def check(self, rows: int, vocab_size: int, device: torch.device, values: bool) -> None:
        """ValueError or TypeError, with the numbers, for shapes and dtypes; with `values` for what
        the tensors hold, which waits for the device.
        """
        for name, low, high, meaning in (
            ("temperature", 0.0, math.inf, "finite and at least 0"),
            ("top_p", 0.0, 1.0, "above 0 and at most 1"),
            ("min_p", 0.0, 1.0, "from 0 to 1"),
            ("repetition_penalty", 0.0, math.inf, "positive and finite"),
            ("frequency_penalty", -math.inf, math.inf, "finite"),
            ("presence_penalty", -math.inf, math.inf, "finite"),
        ):
            given = getattr(self, name)
            if isinstance(given, torch.Tensor):
                _per_row(name, given, rows, device)
            elif given is None or isinstance(given, bool) or not isinstance(given, (int, float)):
                if given is None and name != "temperature":
                    continue
                raise TypeError(f"{name} must be a number or a tensor, got {type(given).__name__}")
            _values(name, given, low, high, meaning, values)
            if name in ("top_p", "repetition_penalty"):
                _values(name, given, math.ulp(0.0), high, meaning, values)
        for name in ("top_k", "seeds", "positions"):
            given = getattr(self, name)
            if isinstance(given, torch.Tensor):
                _per_row(name, given, rows, device, whole=True)
                if name == "top_k":
                    _values(name, given, -1, math.inf, "at least 0, or -1 for off", values)
            elif given is not None and (isinstance(given, bool) or not isinstance(given, int)):
                raise TypeError(
                    f"{name} must be an int, a tensor or None, got {type(given).__name__}"
                )
        if self.seeds is not None and self.positions is None:
            raise ValueError(
                "seeds need positions: the same seed at the same position draws the same noise, so "
                "every step of a sequence would"
            )
        self._check_lists(rows, vocab_size, device, values)
        check_mask(self.mask, rows, vocab_size, device)

    def _check_lists(self, rows: int, vocab_size: int, device: torch.device, values: bool) -> None:
        lists = {
            "logprob_ids": self.logprob_ids,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, (tuple, list)) or len(self.logit_bias) != 2:
                raise TypeError("logit_bias must be a pair of tensors, ids and values")
            ids, bias = self.logit_bias
            lists["logit_bias ids"] = ids
            if not isinstance(bias, torch.Tensor) or not bias.is_floating_point():
                raise TypeError("logit_bias values must be a float tensor")
            if bias.shape != ids.shape or bias.device != device:
                raise ValueError(
                    f"logit_bias values must be {tuple(ids.shape)} on {device} as their ids are, "
                    f"got {tuple(bias.shape)} on {bias.device}"
                )
            if values and bool(bias.isnan().any()):
                raise ValueError("logit_bias has a NaN among its values")
        for name, given in lists.items():
            if given is None:
                continue
            if not isinstance(given, torch.Tensor) or given.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} must be an int32 or int64 tensor, padded with -1")
            if given.dim() != 2 or given.shape[0] != rows or given.device != device:
                raise ValueError(
                    f"{name} must be [{rows}, width] on {device}, got {tuple(given.shape)} on "
                    f"{given.device}"
                )
            _values(name, given, -1, vocab_size - 1, f"token ids below {vocab_size}, or -1", values)

    def records(
        self,
        rows: int,
        form: Form,
        vocab_size: int,
        device: torch.device,
        unseeded: tuple[torch.Tensor, torch.Tensor],
    ) -> Records:
        """The rows' records.  `unseeded` gives seeds and positions, [B] int64 each, for rows that
        have none.
        """
        inverse = _column(self.temperature, rows, torch.float32, device)
        warm = inverse >= GREEDY_BELOW
        inverse = torch.where(warm, 1.0 / inverse, torch.zeros_like(inverse))
        k = _column(0 if self.top_k is None else self.top_k, rows, torch.int64, device)
        k = torch.where((k > 0) & (k < vocab_size), k, torch.zeros_like(k))
        p = _column(1.0 if self.top_p is None else self.top_p, rows, torch.float32, device)
        min_p = _column(0.0 if self.min_p is None else self.min_p, rows, torch.float32, device)
        seeds, positions = unseeded
        if self.seeds is not None:
            assert self.positions is not None
            given = _column(self.seeds, rows, torch.int64, device)
            own = given != UNSEEDED
            seeds = torch.where(own, given, seeds)
            given = _column(self.positions, rows, torch.int64, device)
            positions = torch.where(own, given, positions)
        parts = [
            _bits(inverse),
            k.to(torch.int32)[:, None],
            _bits(p),
            _bits(min_p.log()),
            seeds[:, None].view(torch.int32),
            positions[:, None].view(torch.int32),
        ]
        if form.counted:
            for penalty, off in (
                (self.repetition_penalty, 1.0),
                (self.frequency_penalty, 0.0),
                (self.presence_penalty, 0.0),
            ):
                value = off if penalty is None else penalty
                parts.append(_bits(_column(value, rows, torch.float32, device)))
        if self.logit_bias is not None:
            ids, bias = self.logit_bias
            parts += [ids.to(torch.int32), bias.to(torch.float32).contiguous().view(torch.int32)]
        if form.counted:
            parts += count_tokens(self.prompt_tokens, self.output_tokens)
        if self.logprob_ids is not None:
            parts.append(self.logprob_ids.to(torch.int32))
        missing = form.record_words - sum(part.shape[1] for part in parts)
        if missing:
            parts.append(torch.zeros((rows, missing), dtype=torch.int32, device=device))
        return Records(torch.cat(parts, dim=1), form)


# What a command line may say of a draw, and how its values are read.
TOLD = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}


def parameters_of(text: str) -> dict[str, Any]:
    """ "temperature=0.8,top_k=20" -> what `LMHead.sample` takes by these names.  ValueError, in one
    line, for what cannot be meant.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in TOLD or name in found:
            raise ValueError(
                f"{part.strip()!r} is not one of {', '.join(TOLD)}, each once, as NAME=NUMBER"
            )
        try:
            found[name] = TOLD[name](value)
        except ValueError:
            kind = "a whole number" if TOLD[name] is int else "a number"
            raise ValueError(f"{name} must be {kind}, got {value!r}") from None
    Request(**found).form(vocab_size=1, shard=1)
    Request(**found).check(0, 1, torch.device("cpu"), values=True)
    return found


def text_of(parameters: Mapping[str, Any]) -> str:
    """The inverse of `parameters_of`."""
    return ",".join(f"{name}={value:g}" for name, value in parameters.items()) or "temperature=1"


def unseeded(rows: int, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions, [B] int64 each, of rows that have none: from torch's default generator,
    which a captured graph and compiled code carry on with, and apart on every rank even where all
    ranks called torch.manual_seed with the same number.
    """
    low, high = -(1 << 63), (1 << 63) - 1
    seeds = torch.randint(low, high, (rows,), dtype=torch.int64, device=device)
    mixed = (rank + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1  # the golden ratio in 64 bits
    return seeds ^ (mixed - (1 << 64) if mixed >> 63 else mixed), torch.zeros_like(seeds)


def count_tokens(
    prompt: torch.Tensor | None, output: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """prompt [B, P] and output [B, O], padded with -1 -> (ids, counts), both [B, P + O] int32: each
    token once, -1 behind the last, and how often it stands in the output.
    """
    lists = [given.to(torch.int64) for given in (prompt, output) if given is not None]
    tokens = torch.cat(lists, dim=1)
    written = torch.zeros_like(tokens)
    if output is not None and output.shape[1]:
        written[:, -output.shape[1] :] = 1
    tokens, order = tokens.sort(dim=1, descending=True, stable=True)
    written = written.gather(1, order)
    fresh = torch.ones_like(tokens)
    fresh[:, 1:] = (tokens[:, 1:] != tokens[:, :-1]).to(torch.int64)
    place = fresh.cumsum(1) - 1
    ids = torch.full_like(tokens, -1).scatter(1, place, tokens)
    counts = torch.zeros_like(tokens).scatter_add(1, place, written)
    return ids.to(torch.int32), torch.where(ids < 0, 0, counts).to(torch.int32)


def check_mask(mask: torch.Tensor | None, rows: int, vocab_size: int, device: torch.device) -> None:
    """mask [B, V] bool, or [B, ceil(V / 32)] int32 whose bit i of word w stands for token
    32 * w + i; true allows.
    """
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.int32):
        raise TypeError("mask must be a bool tensor [B, V], or int32 [B, ceil(V / 32)] of bits")
    width = vocab_size if mask.dtype == torch.bool else -(-vocab_size // 32)
    if mask.shape != (rows, width) or mask.device != device:
        raise ValueError(
            f"mask of {mask.dtype} must be [{rows}, {width}] on {device}, got {tuple(mask.shape)} "
            f"on {mask.device}"
        )


def unpack_bits(bits: torch.Tensor, columns: int) -> torch.Tensor:
    """uint8 or int32 words of bits, lowest first, [R, W] -> bool [R, columns]."""
    width = 8 * bits.element_size()
    places = torch.arange(width, dtype=bits.dtype, device=bits.device)
    return ((bits[:, :, None] >> places) & 1).bool().flatten(1)[:, :columns]


def pack_bits(allowed: torch.Tensor) -> torch.Tensor:
    """bool [..., S] -> uint8 [..., ceil(S / 8)], lowest bit first; missing bits are 0."""
    columns = allowed.shape[-1]
    padded = torch.nn.functional.pad(allowed.to(torch.uint8), (0, -columns % 8))
    places = 1 << torch.arange(8, dtype=torch.uint8, device=allowed.device)
    return (padded.unflatten(-1, (-1, 8)) * places).sum(-1, dtype=torch.uint8)


def _on(value: Number | None, off: float) -> bool:
    """Whether a filter may do something, as far as the host knows."""
    return isinstance(value, torch.Tensor) or (value is not None and value != off)


def _column(value: Number, rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    return torch.full((rows,), value, dtype=dtype, device=device)


def _bits(column: torch.Tensor) -> torch.Tensor:
    """[B] fp32 -> [B, 1] int32."""
    return column.contiguous().view(torch.int32)[:, None]


def _per_row(
    name: str, given: torch.Tensor, rows: int, device: torch.device, whole: bool = False
) -> None:
    if given.shape != (rows,):
        raise ValueError(f"{name} must be a number or [{rows}], got {tuple(given.shape)}")
    if given.device != device:
        raise ValueError(f"{name} is on {given.device} but the hidden rows are on {device}")
    kind = (torch.int32, torch.int64)
    if given.dtype not in kind and (whole or not given.is_floating_point()):
        raise TypeError(f"{name} cannot be {given.dtype}")


def _values(name: str, given: Number, low: float, high: float, meaning: str, look: bool) -> None:
    if not isinstance(given, torch.Tensor):
        _within(name, given, low, high, meaning)
    elif look and given.numel():
        # A NaN fails both comparisons.  In fp64, where no limit is rounded to 0.
        wide = given.double() if given.is_floating_point() else given
        bad = ~((wide >= low) & (wide <= high)) | given.isinf()
        if bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name} must be {meaning}, got {given[tuple(first)].item()} in row {first[0]}"
            )


def _within(name: str, value: float, low: float, high: float, meaning: str) -> None:
    if not low <= value <= high or math.isinf(value):
        raise ValueError(f"{name} must be {meaning}, got {value}")
