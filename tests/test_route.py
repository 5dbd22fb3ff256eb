"""Which route a call takes: lmhead.route."""

from __future__ import annotations

import inspect

import pytest

from lmhead.route import ALL_TO_ALL_BACKENDS, ROUTES, choose


@pytest.mark.parametrize(
    ("ranks", "backend", "asked", "name", "rule"),
    [
        (1, "none", None, "local", "one_rank"),
        (1, "gloo", "all_gather", "local", "one_rank"),
        (2, "gloo", None, "all_to_all", "default"),
        (8, "nccl", None, "all_to_all", "default"),
        (8, "nccl", "all_gather", "all_gather", "asked"),
        (8, "nccl", "all_to_all", "all_to_all", "asked"),
        (4, "somebody's", None, "all_gather", "backend"),
        (4, "somebody's", "all_to_all", "all_to_all", "asked"),
    ],
)
def test_rules(ranks: int, backend: str, asked: str | None, name: str, rule: str) -> None:
    route = choose(ranks, backend, asked)
    assert (route.name, route.rule) == (name, rule)
    assert route.reason and str(route) == f"{name} ({route.reason})"


def test_the_reason_says_what_decided() -> None:
    assert "one rank" in choose(1, "none").reason
    assert "8 ranks over nccl" in choose(8, "nccl").reason
    assert "'odd'" in choose(2, "odd").reason
    assert "route='all_gather'" in choose(2, "gloo", "all_gather").reason


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asked", ["all2all", "local", "ALL_GATHER"])
def test_an_unknown_route_is_refused_with_the_known_ones(ranks: int, asked: str) -> None:
    with pytest.raises(ValueError, match=f"all_to_all, all_gather or None, got '{asked}'"):
        choose(ranks, "gloo", asked)


def test_the_choice_knows_nothing_that_one_rank_alone_knows() -> None:
    """Neither rank nor rows nor device enter, so all ranks choose alike (contract, point 5)."""
    assert list(inspect.signature(choose).parameters) == ["ranks", "backend", "asked"]
    for backend in sorted(ALL_TO_ALL_BACKENDS):
        for asked in (None, *ROUTES):
            assert choose(4, backend, asked) == choose(4, backend, asked)
