"""Which way a call's logits take, and why.

The choice is a pure function of values that are the same on every rank (contract, point 5): the
number of ranks, the group's backend, and what was asked for.  Row counts do not enter: uneven and
empty ranks stay on the all-to-all.

| route | rule | when |
|---|---|---|
| local | one_rank | N == 1: nothing moves |
| all_to_all or all_gather | asked | `route=` or LMHEAD_ROUTE names it |
| all_gather | backend | the group's backend is not known to have all_to_all_single |
| all_to_all | default | otherwise |
"""

from __future__ import annotations

from dataclasses import dataclass

ROUTES = ("all_to_all", "all_gather")
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


def choose(ranks: int, backend: str, asked: str | None = None) -> Route:
    """The route for `ranks` ranks over `backend`; `asked` is "all_to_all", "all_gather" or None
    (decide).

    Raises ValueError for any other word.
    """
    if asked is not None and asked not in ROUTES:
        raise ValueError(f"route must be one of {', '.join(ROUTES)} or None, got {asked!r}")
    if ranks == 1:
        return Route("local", "one_rank", "one rank holds the whole vocabulary")
    if asked is not None:
        return Route(asked, "asked", f"asked for by route={asked!r} or LMHEAD_ROUTE")
    if backend not in ALL_TO_ALL_BACKENDS:
        return Route(
            "all_gather", "backend", f"backend {backend!r} is not known to have all_to_all_single"
        )
    return Route("all_to_all", "default", f"{ranks} ranks over {backend}, one all-to-all per call")
