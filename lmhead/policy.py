"""The parallel configuration's rules: which way a head's logits should take, before any call.

| policy | all-to-all | otherwise |
|---|---|---|
| sglang | where six conditions hold, or asked for and four of them hold | all_gather, dp_head |
| auto | every layout of several ranks that share the vocabulary | local, all_gather, dp_head |

Both are pure functions of a configuration that all ranks share.  What a call then does is
`lmhead.route`'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from typing import Any

from lmhead.route import POLICIES
from lmhead.shapes import Layout, share_evenly

MODES = ("prefill", "decode")
# TensorRT-LLM shards a head over as many ranks as together have this many tokens.
TENSORRT_LLM_TOKENS = 256


@dataclass(frozen=True)
class ParallelConfig:
    """A deployment as engines describe it; field names are theirs.

    `tp_size` ranks serve one copy of the model, and the head's group is those.  With
    `enable_dp_attention` attention falls into `dp_size` groups of ranks with rows of their own;
    without it `dp_size` counts further copies of the whole model, which have groups of their own,
    and attention is parallel over all `tp_size` ranks.  `attn_cp_size` ranks of a group share its
    rows' context; `attn_tp_size`, what is left, is derived and may be given as a check.

    `enable_dp_lm_head`: a head for each set of tensor-parallel ranks, which hold the same rows, its
    vocabulary shared by those alone (by none where there is one).  `enable_tp_lm_head_all_to_all`:
    True, False or None (decide).  `disaggregation_mode`: "prefill", "decode" or None; an engine's
    "null" is None.

    `replicated_head`: every rank holds the whole vocabulary's weight.  `tied_head`: the weight is
    the input embedding's; where that is sharded too, as `LMHead` wants it, nothing changes here,
    but the published code takes its all-to-all for neither a tied nor a replicated head.
    """

    tp_size: int = 1
    dp_size: int = 1
    attn_cp_size: int = 1
    attn_tp_size: int | None = None
    enable_dp_attention: bool = False
    enable_dp_lm_head: bool = False
    enable_tp_lm_head_all_to_all: bool | None = None
    disaggregation_mode: str | None = None
    tied_head: bool = False
    replicated_head: bool = False

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size", "attn_cp_size", "attn_tp_size"):
            value = getattr(self, name)
            if value is None and name == "attn_tp_size":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        for name in ("enable_dp_attention", "enable_dp_lm_head", "tied_head", "replicated_head"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}")
        flag = self.enable_tp_lm_head_all_to_all
        if flag is not None and not isinstance(flag, bool):
            raise TypeError(
                "enable_tp_lm_head_all_to_all must be a bool or None (decide), got "
                f"{type(flag).__name__}"
            )
        if self.disaggregation_mode == "null":
            object.__setattr__(self, "disaggregation_mode", None)
        if self.disaggregation_mode not in (*MODES, None):
            raise ValueError(
                f"disaggregation_mode must be one of {', '.join(MODES)} or None, got "
                f"{self.disaggregation_mode!r}"
            )

    @property
    def attn_dp_size(self) -> int:
        """Attention groups among the ranks of one copy of the model."""
        return self.dp_size if self.enable_dp_attention else 1

    def layout(self) -> Layout:
        """Who holds which rows.  ValueError, with the numbers, where the sizes do not divide."""
        if self.tp_size % (self.attn_dp_size * self.attn_cp_size):
            raise ValueError(
                f"tp_size {self.tp_size} is no multiple of {self.attn_dp_size} attention groups * "
                f"attn_cp_size {self.attn_cp_size}"
            )
        layout = Layout.of(self.tp_size, self.attn_dp_size, self.attn_cp_size)
        if self.attn_tp_size not in (None, layout.attn_tp_size):
            raise ValueError(
                f"attn_tp_size is {self.attn_tp_size}, but tp_size {self.tp_size} over "
                f"{self.attn_dp_size} attention groups * attn_cp_size {self.attn_cp_size} leaves "
                f"{layout.attn_tp_size}"
            )
        return layout


@dataclass(frozen=True)
class Condition:
    """One condition of a rule: whether it holds, and what it says, with the numbers.  One that does
    not decide is for comparison.
    """

    name: str
    holds: bool
    words: str
    decides: bool = True

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'no'}: {self.words}"


@dataclass(frozen=True)
class Decision:
    """What a policy says of a configuration, and why.

    | outcome | the vocabulary is shared by | what moves |
    |---|---|---|
    | all_to_all | all ranks | each row's logits, to the rank that owns it |
    | all_gather | all ranks | all rows' logits, to every rank |
    | dp_head | each set of ranks that hold the same rows | logits, among those alone |
    | local | nobody | nothing |

    `head_ranks` ranks share one copy of the vocabulary, and `route` is the one that their head's
    calls take.  `enabled` is what the tri-state flag resolves to; one rank alone is "local" even
    so.  `layout` is None where the sizes do not divide, which the published policy does not ask.
    `advice` names what might be better, or what else the outcome depends on.
    """

    policy: str
    outcome: str
    route: str
    head_ranks: int
    layout: Layout | None
    conditions: tuple[Condition, ...]
    reason: str
    enabled: bool
    advice: str | None = None

    def __str__(self) -> str:
        return f"{self.outcome} ({self.reason})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def head_options(self) -> dict[str, Any]:
        """What `lmhead.LMHead` takes beside its weight to run as decided, in a group of the
        `head_ranks` ranks that share a copy of the vocabulary.  ValueError without a layout.
        """
        if self.layout is None:
            raise ValueError("the sizes do not divide, so there is no layout to run")
        layout = self.layout
        if self.head_ranks != layout.ranks:
            layout = Layout.tensor_parallel(self.head_ranks)
        route = "all_gather" if self.route == "all_gather" else None
        return {"layout": layout, "route": route, "policy": self.policy}


def decide(
    config: ParallelConfig,
    policy: str = "auto",
    *,
    rows: int | Sequence[int] | None = None,
    flops_per_byte: float | None = None,
    may_replicate: bool = False,
) -> Decision:
    """The way of the head's logits under "auto", our rules, or "sglang", the published ones.

    `rows` are the rows that a rank holds in a step, or a count for each set of ranks that hold the
    same ones, and `flops_per_byte` is its device's peak rate over its memory's bandwidth (B200:
    281).  They matter to "auto": a head of 2-byte weights does two FLOPs per weight and row, so
    with that many rows reading its weights takes no longer than multiplying, and a head per set,
    where all have as many rows of as many FLOPs per rank as one over all ranks, saves the exchange
    between sets.  It needs the vocabulary in each set, so it is advised, and chosen only where the
    caller says that it `may_replicate` the weights and the flag is left open.

    Raises ValueError, with the reason, for what cannot be together; `nearest` says what can.
    """
    _check_policy(policy)
    held = [] if rows is None else [rows] if isinstance(rows, int) else list(rows)
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in held):
        raise ValueError(f"rows must be non-negative ints or None, got {rows!r}")
    if flops_per_byte is not None and not flops_per_byte > 0:
        raise ValueError(f"flops_per_byte must be positive or None, got {flops_per_byte}")
    why = refusal(config, policy)
    if why is not None:
        raise ValueError(why)
    if policy == "sglang":
        return _published(config)
    return _automatic(config, held, flops_per_byte, may_replicate)


def refusal(config: ParallelConfig, policy: str = "auto") -> str | None:
    """Why `config` cannot be under `policy`, or None where it can."""
    _check_policy(policy)
    asked = config.enable_tp_lm_head_all_to_all
    if policy == "sglang":
        if not asked:
            return None
        # SGLang 0.5.18 checks these in this order; the mode and dp_size > 1 are for its default.
        checked = ("dp_attention", "no_dp_head", "pure_dp", "no_context_parallel")
        found = {condition.name: condition for condition in _six_conditions(config)}
        broken = next((found[name] for name in checked if not found[name].holds), None)
        if broken is None:
            return None
        return f"enable_tp_lm_head_all_to_all is asked for, but needs that {broken.words}"
    undivided = _undivided(config)
    if undivided is not None:
        return undivided
    if asked and config.enable_dp_lm_head:
        return (
            "enable_tp_lm_head_all_to_all is asked for, but with enable_dp_lm_head the vocabulary "
            "is shared by each set of ranks with the same rows, not by all ranks"
        )
    if asked and config.replicated_head:
        return (
            "enable_tp_lm_head_all_to_all is asked for, but every rank holds the whole vocabulary "
            "(replicated_head), so there is nothing to exchange"
        )
    return None


def nearest(config: ParallelConfig, policy: str = "auto") -> ParallelConfig:
    """The configuration nearest to `config` that can be under `policy` and whose sizes divide:
    itself, or the one with the fewest fields changed.

    The number of ranks is kept.  Where as few changes do in several fields, `attn_tp_size` is left
    to be derived first, then the choice left open, then sizes changed to the nearest that divide,
    of two as near to the larger: groups, then context-parallel ranks.
    """

    def divisors(size: int) -> list[int]:
        found = [at for at in range(1, config.tp_size + 1) if config.tp_size % at == 0]
        return sorted(found, key=lambda at: (abs(at - size), -at))

    changes: dict[str, list[Any]] = {
        "attn_tp_size": [None],
        "enable_tp_lm_head_all_to_all": [None],
        "dp_size": divisors(config.dp_size),
        "attn_cp_size": divisors(config.attn_cp_size),
    }
    for count in range(len(changes) + 1):
        for names in combinations(changes, count):
            for values in product(*(changes[name] for name in names)):
                candidate = replace(config, **dict(zip(names, values, strict=True)))
                if _undivided(candidate) is None and refusal(candidate, policy) is None:
                    return candidate
    raise AssertionError(f"one attention group of {config.tp_size} ranks is always possible")


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")


def _undivided(config: ParallelConfig) -> str | None:
    try:
        config.layout()
    except ValueError as error:
        return str(error)
    return None


def _on(value: bool) -> str:
    return "on" if value else "off"


def _six_conditions(config: ParallelConfig) -> tuple[Condition, ...]:
    """SGLang 0.5.18's (pull request 32313), in its order."""
    tp_size, dp_size, cp_size = config.tp_size, config.dp_size, config.attn_cp_size
    mode = config.disaggregation_mode or "none"
    return (
        Condition("decode", mode == "decode", f"disaggregation_mode is decode (it is {mode})"),
        Condition(
            "dp_attention",
            config.enable_dp_attention,
            f"DP attention is on (it is {_on(config.enable_dp_attention)})",
        ),
        Condition("several_dp", dp_size > 1, f"dp_size is above 1 (it is {dp_size})"),
        Condition(
            "pure_dp",
            tp_size == dp_size,
            f"tp_size equals dp_size (they are {tp_size} and {dp_size})",
        ),
        Condition("no_context_parallel", cp_size == 1, f"attn_cp_size is 1 (it is {cp_size})"),
        Condition(
            "no_dp_head",
            not config.enable_dp_lm_head,
            f"the DP LM head is off (it is {_on(config.enable_dp_lm_head)})",
        ),
    )


def _published(config: ParallelConfig) -> Decision:
    """The published policy, of flags alone; what it refuses has been refused."""
    layout = config.layout() if _undivided(config) is None else None
    conditions = _six_conditions(config)
    broken = [condition.words for condition in conditions if not condition.holds]
    asked = config.enable_tp_lm_head_all_to_all
    if asked is None:
        on = not broken
        reason = (
            "all six conditions hold"
            if on
            else f"of six conditions these fail: {'; '.join(broken)}"
        )
    else:
        on = asked
        reason = f"enable_tp_lm_head_all_to_all is {_on(asked)}, and an explicit choice wins"
    advice = None
    if on:
        advice = (
            "the published code takes it for a batch whose row count is positive and the same on "
            "all ranks, and gathers otherwise"
        )
    outcome = "all_to_all" if on else "all_gather"
    if on and (config.tied_head or config.replicated_head):
        outcome, advice = "all_gather", None
        reason += (
            f"; but the published code finds a {'tied' if config.tied_head else 'replicated'} head "
            "when it runs, and gathers all the same"
        )
    if config.tp_size == 1:
        reason += "; one rank has nobody to exchange with"
        return Decision("sglang", "local", "local", 1, layout, conditions, reason, on)
    head_ranks, route = config.tp_size, outcome
    if config.enable_dp_lm_head:
        outcome = "dp_head"
        head_ranks = 1 if layout is None else layout.attn_tp_size
        route = "local" if head_ranks == 1 else "all_gather"
    return Decision("sglang", outcome, route, head_ranks, layout, conditions, reason, on, advice)


def tensorrt_llm_ranks(rows: int, ranks: int) -> int:
    """Over how many of `ranks` ranks TensorRT-LLM shards a head under attention DP when each has
    `rows` tokens, one or more: 256 // rows, rounded up to a power of two, at most all (its
    create_lm_head_tp_mapping).
    """
    wanted = TENSORRT_LLM_TOKENS // rows
    return min(1 << max(wanted - 1, 0).bit_length(), ranks)


def _automatic(
    config: ParallelConfig, held: list[int], flops_per_byte: float | None, may_replicate: bool
) -> Decision:
    """Our policy; what it refuses has been refused."""
    layout = config.layout()
    ranks, few, asked = layout.ranks, layout.attn_tp_size, config.enable_tp_lm_head_all_to_all
    conditions = [
        Condition("several_ranks", ranks > 1, f"the head has more than one rank (it has {ranks})"),
        Condition(
            "sharded_head",
            not config.replicated_head,
            "the weight is not whole on every rank (replicated_head is "
            f"{_on(config.replicated_head)})",
        ),
        Condition(
            "no_dp_head",
            not config.enable_dp_lm_head,
            "no head of fewer ranks is asked for (enable_dp_lm_head is "
            f"{_on(config.enable_dp_lm_head)})",
        ),
        Condition(
            "not_off",
            asked is not False,
            "the exchange is not turned off (it is "
            f"{'left open' if asked is None else _on(asked)})",
        ),
    ]
    smaller = ranks > few and not config.replicated_head
    enough, rows = False, max(held, default=0)
    if smaller and held and flops_per_byte is not None:
        least = min(held)
        enough = least == rows >= flops_per_byte
        words = f"rows that a rank holds are fewer than FLOPs per byte ({rows} and "
        if least != rows:
            words = f"rows are fewer than FLOPs per byte, or not alike ({least} to {rows}, and "
        conditions.append(
            Condition(
                "rows_under_ratio",
                not enough,
                f"{words}{flops_per_byte:.0f})",
                decides=may_replicate and asked is None,
            )
        )
    if smaller and rows:
        own = max(share_evenly(rows * layout.attn_cp_size, layout.span))
        theirs = tensorrt_llm_ranks(own, ranks)
        conditions.append(
            Condition(
                "tensorrt_llm",
                theirs > 1,
                f"TensorRT-LLM's {TENSORRT_LLM_TOKENS} tokens shard it, too ({theirs} of {ranks} "
                f"ranks at {own} rows)",
                decides=False,
            )
        )
    outcome, route, head_ranks, reason = _automatic_outcome(config, layout)
    advice = None
    times = ranks // few
    if outcome == "all_to_all" and enough:
        words = (
            f"with {rows} rows held, a head per set of ranks with the same rows reads its weights "
            "in no more time than it multiplies, does as many FLOPs per rank and exchanges nothing "
            "between sets"
        )
        if may_replicate and asked is None:
            outcome, head_ranks, reason = "dp_head", few, words
            route = "local" if few == 1 else "all_to_all"
        else:
            advice = (
                f"{words}: one to consider where there is room for {times} times the weights "
                "(enable_dp_lm_head)"
            )
    elif outcome == "local" and ranks > 1:
        advice = (
            "LMHead.from_full takes a rank's shard of such a weight, as a view where the ranks "
            f"divide the vocabulary: each would then read 1 / {ranks} of the weights a step"
        )
    return Decision(
        "auto",
        outcome,
        route,
        head_ranks,
        layout,
        tuple(conditions),
        reason,
        outcome == "all_to_all",
        advice,
    )


def _automatic_outcome(config: ParallelConfig, layout: Layout) -> tuple[str, str, int, str]:
    """(outcome, route, ranks of a head, reason), rows aside."""
    ranks, few, asked = layout.ranks, layout.attn_tp_size, config.enable_tp_lm_head_all_to_all
    if ranks == 1:
        return "local", "local", 1, "one rank holds the whole vocabulary, so nothing moves"
    if config.replicated_head:
        reason = (
            f"each of {ranks} ranks holds the whole vocabulary, so each multiplies the rows that "
            "it holds and nothing moves"
        )
        return "local", "local", 1, reason
    if config.enable_dp_lm_head:
        if few == 1:
            reason = "asked for: every rank holds the whole vocabulary, so nothing moves"
            return "dp_head", "local", 1, reason
        reason = (
            f"asked for: every {few} tensor-parallel ranks share a vocabulary of their own, and "
            "logits move among those alone"
        )
        return "dp_head", "all_gather" if asked is False else "all_to_all", few, reason
    if asked is False:
        reason = (
            "the all-to-all is turned off, so every rank gets all rows' logits and keeps those it "
            "owns"
        )
        return "all_gather", "all_gather", ranks, reason
    reason = (
        f"{ranks} ranks share the vocabulary ({layout}), and one all-to-all gives each the whole "
        "vocabulary for the rows it owns"
    )
    return "all_to_all", "all_to_all", ranks, reason
