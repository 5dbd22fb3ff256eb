"""Which way a call's logits take, and why.

The choice is a pure function of values that are the same on every rank (contract, point 5): how
many ranks there are and how they share attention, the group's backend, the rows that each set of
ranks holds, and what was asked for.  The first rule that applies decides; its name and its words
stand in `LMHead.last_route`, and `LMHead.stats` counts them.

| rule | route | when |
|---|---|---|
| one_rank | local | N == 1: nothing moves |
| no_rows | local | no rank has rows: nothing moves |
| asked | all_to_all or all_gather | `route=` or LMHEAD_ROUTE names it |
| backend | all_gather | the group's backend is not known to have all_to_all_single |
| published_layout | all_gather | policy "sglang", and ranks of an attention group share rows |
| published_uneven | all_gather | policy "sglang", and ranks hold different numbers of rows |
| one_group | all_gather | every rank wants the logits of all rows |
| default | all_to_all | otherwise, uneven and idle ranks included |

Policy "sglang" falls back where SGLang v0.5.18 does (pull request 32313); "auto" needs none of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from lmhead.shapes import Layout

ROUTES = ("all_to_all", "all_gather")
POLICIES = ("auto", "sglang")
# Backends whose all_to_all_single is known to take flat tensors with split sizes.  Others work
# through the fallback, or by asking for the route.
ALL_TO_ALL_BACKENDS = frozenset({"gloo", "nccl", "ucc", "xccl", "hccl", "mpi", "fake"})


@dataclass(frozen=True)
class Route:
    """A route's name, the name of the rule that chose it, and the reason in words."""

    name: str
    rule: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(frozen=True)
class Facts:
    """What the rules know of a call, equal on every rank; `held` has a count per set of ranks that
    hold the same rows, and is None while no call is known.
    """

    ranks: int
    backend: str
    asked: str | None = None
    layout: Layout | None = None  # None: every rank has rows of its own
    held: tuple[int, ...] | None = None
    replicate: bool = False  # every rank of an attention group wants all of the group's logits
    policy: str = "auto"

    @property
    def plain(self) -> bool:
        return self.layout is None or self.layout.plain


@dataclass(frozen=True)
class Rule:
    """One rule: where it applies it takes `route`, or what was asked for, and says why."""

    name: str
    route: str | None
    applies: Callable[[Facts], bool]
    reason: Callable[[Facts], str]


RULES = (
    Rule(
        "one_rank",
        "local",
        lambda facts: facts.ranks == 1,
        lambda facts: "one rank holds the whole vocabulary",
    ),
    Rule(
        "no_rows",
        "local",
        lambda facts: facts.held is not None and not any(facts.held),
        lambda facts: "no rank has rows, so nothing moves",
    ),
    Rule(
        "asked",
        None,
        lambda facts: facts.asked is not None,
        lambda facts: f"asked for by route={facts.asked!r} or LMHEAD_ROUTE",
    ),
    Rule(
        "backend",
        "all_gather",
        lambda facts: facts.backend not in ALL_TO_ALL_BACKENDS,
        lambda facts: f"backend {facts.backend!r} is not known to have all_to_all_single",
    ),
    Rule(
        "published_layout",
        "all_gather",
        lambda facts: facts.policy == "sglang" and not facts.plain,
        lambda facts: (
            f"the published exchange is for ranks with rows of their own, not for {facts.layout}"
        ),
    ),
    Rule(
        "published_uneven",
        "all_gather",
        lambda facts: facts.policy == "sglang" and len(set(facts.held or ())) > 1,
        lambda facts: (
            f"the published exchange is for equal row counts, and ranks hold "
            f"{list(facts.held or ())}"
        ),
    ),
    Rule(
        "one_group",
        "all_gather",
        lambda facts: facts.replicate and facts.layout is not None and facts.layout.dp_size == 1,
        lambda facts: "every rank wants the logits of all rows",
    ),
    Rule(
        "default",
        "all_to_all",
        lambda facts: True,
        lambda facts: f"{facts.ranks} ranks over {facts.backend}, one all-to-all per call",
    ),
)


def choose(ranks: int, backend: str, asked: str | None = None) -> Route:
    """The route for `ranks` ranks with rows of their own over `backend`; `asked` is "all_to_all",
    "all_gather" or None (decide).

    Raises ValueError for any other word.
    """
    return choose_by(Facts(ranks, backend, asked))


@functools.lru_cache(maxsize=4096)
def choose_by(facts: Facts) -> Route:
    """The route of the first rule that applies.

    Raises ValueError for a route or a policy that is none.
    """
    if facts.asked is not None and facts.asked not in ROUTES:
        raise ValueError(f"route must be one of {', '.join(ROUTES)} or None, got {facts.asked!r}")
    if facts.policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {facts.policy!r}")
    rule = next(rule for rule in RULES if rule.applies(facts))
    name = rule.route if rule.route is not None else facts.asked
    assert name is not None
    return Route(name, rule.name, rule.reason(facts))


@dataclass(frozen=True)
class RouteStats:
    """How often calls took a route: in all, by the rule that chose it, and the bytes that crossed
    this rank's link in the busier direction.
    """

    calls: int
    rules: dict[str, int]
    bytes: int


class Tally:
    """Counts calls by route and rule."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def add(self, route: Route | None, moved: int) -> None:
        """One more call of `route`, which moved so many bytes."""
        assert route is not None
        counts = self._counts.setdefault((route.name, route.rule), [0, 0])
        counts[0] += 1
        counts[1] += moved

    def read(self) -> dict[str, RouteStats]:
        """What was counted, by route."""
        found: dict[str, RouteStats] = {}
        for (name, rule), (calls, moved) in self._counts.items():
            known = found.get(name, RouteStats(0, {}, 0))
            rules = known.rules | {rule: calls}
            found[name] = RouteStats(known.calls + calls, rules, known.bytes + moved)
        return found
