"""Which route a call takes: lmhead.route."""

from __future__ import annotations

import inspect

import pytest

from lmhead.route import ALL_TO_ALL_BACKENDS, ROUTES, RULES, Facts, Route, Tally, choose, choose_by
from lmhead.shapes import Layout


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


MIXED, TENSOR = Layout.of(8, 4), Layout.tensor_parallel(8)


@pytest.mark.parametrize(
    ("facts", "name", "rule"),
    [
        (Facts(1, "none", held=(0,)), "local", "one_rank"),
        (Facts(8, "nccl", held=(0,) * 8), "local", "no_rows"),
        (Facts(8, "nccl", "all_gather", held=(0,) * 8), "local", "no_rows"),
        (Facts(8, "nccl", held=(0, 5, 0, 3), layout=MIXED), "all_to_all", "default"),
        (Facts(8, "nccl", layout=MIXED, replicate=True), "all_to_all", "default"),
        (Facts(8, "nccl", layout=TENSOR), "all_to_all", "default"),
        (Facts(8, "nccl", layout=TENSOR, replicate=True), "all_gather", "one_group"),
        (Facts(8, "nccl", "all_to_all", TENSOR, (9,), True), "all_to_all", "asked"),
        (Facts(8, "odd", layout=TENSOR, replicate=True), "all_gather", "backend"),
        (Facts(8, "nccl", held=(2,) * 8, policy="sglang"), "all_to_all", "default"),
        (Facts(8, "nccl", held=(2,) * 7 + (0,), policy="sglang"), "all_gather", "published_uneven"),
        (Facts(8, "nccl", layout=MIXED, policy="sglang"), "all_gather", "published_layout"),
        (Facts(8, "nccl", "all_to_all", MIXED, policy="sglang"), "all_to_all", "asked"),
        (Facts(8, "odd", layout=MIXED, policy="sglang"), "all_gather", "backend"),
    ],
)
def test_rules_of_a_call(facts: Facts, name: str, rule: str) -> None:
    route = choose_by(facts)
    assert (route.name, route.rule) == (name, rule) and route.reason


def test_every_rule_has_a_case_and_a_line_in_the_table() -> None:
    import lmhead.route

    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names) and names[-1] == "default"
    assert lmhead.route.__doc__ is not None
    lines = [line for line in lmhead.route.__doc__.splitlines() if line.startswith("| ")]
    assert [line.split("|")[1].strip() for line in lines[1:]] == names


def test_calls_are_counted_by_route_and_by_rule() -> None:
    tally = Tally()
    assert tally.read() == {}
    for rule, moved in (("default", 5), ("asked", 7), ("default", 6)):
        tally.add(Route("all_to_all", rule, "why"), moved)
    tally.add(Route("local", "no_rows", "why"), 0)
    found = tally.read()
    assert list(found) == ["all_to_all", "local"]
    assert (found["all_to_all"].calls, found["all_to_all"].bytes) == (3, 18)
    assert found["all_to_all"].rules == {"default": 2, "asked": 1}
    assert found["local"].rules == {"no_rows": 1}


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="auto, sglang, got 'vllm'"):
        choose_by(Facts(8, "nccl", policy="vllm"))


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
