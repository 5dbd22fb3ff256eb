"""Which way a configuration's logits should take: the published table and our own rules."""

from __future__ import annotations

import inspect
import itertools
import json
from dataclasses import fields, replace
from typing import Any

import pytest

from lmhead import policy as policies
from lmhead.bench.roofline import MOST_ROWS
from lmhead.devices import DEVICES
from lmhead.policy import Decision, ParallelConfig, decide, nearest, refusal
from lmhead.route import POLICIES
from lmhead.shapes import Layout

PURE = ParallelConfig(8, 8, enable_dp_attention=True)
MIXED = ParallelConfig(8, 4, enable_dp_attention=True)
B200 = DEVICES["b200"].bf16 / DEVICES["b200"].hbm

CONDITIONS = ("decode", "dp_attention", "several", "pure", "no_cp", "no_dp_head")
TABLE = [
    (dict(zip(CONDITIONS, holds, strict=True)), flag)
    for holds in itertools.product((False, True), repeat=6)
    for flag in (None, True, False)
]


def configured(holds: dict[str, bool], flag: bool | None) -> ParallelConfig:
    """A configuration of which exactly those of the six conditions hold that `holds` says."""
    sizes = {(True, True): (8, 8), (True, False): (8, 4), (False, True): (1, 1)}
    tp_size, dp_size = sizes.get((holds["several"], holds["pure"]), (8, 1))
    return ParallelConfig(
        tp_size,
        dp_size,
        attn_cp_size=1 if holds["no_cp"] else 2,
        enable_dp_attention=holds["dp_attention"],
        enable_dp_lm_head=not holds["no_dp_head"],
        enable_tp_lm_head_all_to_all=flag,
        disaggregation_mode="decode" if holds["decode"] else "prefill",
    )


def published(holds: dict[str, bool], flag: bool | None) -> str:
    """What SGLang 0.5.18 does, written down from its description: "on", "off" or "error"."""
    if flag is False:
        return "off"
    if flag is None:
        return "on" if list(holds.values()) == [True] * 6 else "off"
    for needed in ("dp_attention", "no_dp_head", "pure", "no_cp"):
        if not holds[needed]:
            return "error"
    return "on"


@pytest.mark.parametrize(
    ("holds", "flag"),
    TABLE,
    ids=lambda value: (
        "".join("-+"[held] for held in value.values()) if isinstance(value, dict) else str(value)
    ),
)
def test_the_published_table(holds: dict[str, bool], flag: bool | None) -> None:
    config, expected = configured(holds, flag), published(holds, flag)
    if expected == "error":
        with pytest.raises(ValueError, match="is asked for, but needs that"):
            decide(config, "sglang")
        return
    decision = decide(config, "sglang")
    assert [condition.holds for condition in decision.conditions] == list(holds.values())
    assert ("on" if decision.enabled else "off") == expected
    if config.tp_size == 1:  # on or off, one rank has nobody to exchange with
        assert decision.outcome == "local"
        return
    off = "all_gather" if holds["no_dp_head"] else "dp_head"
    assert decision.outcome == ("all_to_all" if expected == "on" else off)


def test_the_table_has_192_rows_and_every_outcome() -> None:
    assert len(TABLE) == 192
    found = [published(holds, flag) for holds, flag in TABLE]
    # on: one row by default, and where it is asked for 2 * 2 of 64 (mode and dp_size are free).
    assert (found.count("on"), found.count("error"), found.count("off")) == (5, 60, 127)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"enable_dp_attention": False}, "DP attention is on (it is off)"),
        ({"enable_dp_lm_head": True}, "the DP LM head is off (it is on)"),
        ({"dp_size": 4}, "tp_size equals dp_size (they are 8 and 4)"),
        ({"attn_cp_size": 2}, "attn_cp_size is 1 (it is 2)"),
    ],
)
def test_the_published_error_names_the_condition_that_fails(
    change: dict[str, Any], words: str
) -> None:
    asked = replace(PURE, enable_tp_lm_head_all_to_all=True)
    with pytest.raises(ValueError) as raised:
        decide(replace(asked, **change), "sglang")
    assert words in str(raised.value)
    assert decide(asked, "sglang").enabled
    off = replace(asked, enable_tp_lm_head_all_to_all=False, **change)
    assert not decide(off, "sglang").enabled  # never an error


def test_the_published_policy_looks_at_flags_alone() -> None:
    odd = replace(PURE, dp_size=3, disaggregation_mode="decode")
    decision = decide(odd, "sglang")
    assert decision.outcome == "all_gather" and decision.layout is None
    tied = replace(PURE, tied_head=True, disaggregation_mode="decode")
    decision = decide(tied, "sglang")
    assert decision.enabled and "finds a tied head when it runs" in decision.reason
    assert (decision.outcome, decision.head_options()["route"]) == ("all_gather", "all_gather")


@pytest.mark.parametrize(
    ("config", "outcome", "way", "ranks"),
    [
        (PURE, "all_to_all", "all_to_all", 8),
        (MIXED, "all_to_all", "all_to_all", 8),
        (replace(MIXED, dp_size=2), "all_to_all", "all_to_all", 8),
        (ParallelConfig(8), "all_to_all", "all_to_all", 8),
        (ParallelConfig(8, 2, 2, enable_dp_attention=True), "all_to_all", "all_to_all", 8),
        (replace(MIXED, tied_head=True), "all_to_all", "all_to_all", 8),
        (replace(MIXED, enable_tp_lm_head_all_to_all=True), "all_to_all", "all_to_all", 8),
        (replace(MIXED, enable_tp_lm_head_all_to_all=False), "all_gather", "all_gather", 8),
        (ParallelConfig(), "local", "local", 1),
        (ParallelConfig(enable_tp_lm_head_all_to_all=True), "local", "local", 1),
        (replace(PURE, replicated_head=True), "local", "local", 1),
        (replace(PURE, enable_dp_lm_head=True), "dp_head", "local", 1),
        (replace(MIXED, enable_dp_lm_head=True), "dp_head", "all_to_all", 2),
        (
            replace(MIXED, enable_dp_lm_head=True, enable_tp_lm_head_all_to_all=False),
            "dp_head",
            "all_gather",
            2,
        ),
    ],
)
def test_our_rules(config: ParallelConfig, outcome: str, way: str, ranks: int) -> None:
    decision = decide(config)
    assert (decision.outcome, decision.route, decision.head_ranks) == (outcome, way, ranks)
    assert decision.layout == config.layout()
    assert decision.enabled == (outcome == "all_to_all")
    assert (decision.advice is None) == (not config.replicated_head)
    holds = all(condition.holds for condition in decision.conditions if condition.decides)
    assert holds == (outcome == "all_to_all")
    assert decision.reason and str(decision) == f"{outcome} ({decision.reason})"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"enable_dp_lm_head": True},
            "with enable_dp_lm_head the vocabulary is shared by each set",
        ),
        ({"replicated_head": True}, "every rank holds the whole vocabulary"),
        ({"dp_size": 3}, "tp_size 8 is no multiple of 3 attention groups * attn_cp_size 1"),
        ({"attn_cp_size": 4}, "tp_size 8 is no multiple of 4 attention groups * attn_cp_size 4"),
        ({"attn_tp_size": 4}, "attn_tp_size is 4, but tp_size 8 over 4 attention groups"),
    ],
)
def test_what_our_policy_refuses(change: dict[str, Any], words: str) -> None:
    config = replace(MIXED, enable_tp_lm_head_all_to_all=True, **change)
    with pytest.raises(ValueError) as raised:
        decide(config)
    assert words in str(raised.value)


def test_without_dp_attention_dp_size_counts_copies_of_the_model() -> None:
    config = ParallelConfig(4, 3)
    assert config.layout() == Layout.tensor_parallel(4)
    assert ParallelConfig(8, 3, attn_cp_size=2).layout() == Layout(1, 4, 2)
    assert replace(MIXED, attn_cp_size=2, attn_tp_size=1).layout() == Layout(4, 1, 2)


def test_rows_against_the_devices_ratio() -> None:
    few = decide(PURE, rows=281, flops_per_byte=B200)
    assert few.outcome == "all_to_all" and few.advice is None
    many = decide(PURE, rows=282, flops_per_byte=B200)
    assert many.outcome == "all_to_all" and many.advice is not None
    assert "with 282 rows held" in many.advice and "8 times the weights" in many.advice
    (ratio,) = (at for at in many.conditions if at.name == "rows_under_ratio")
    assert not ratio.holds and not ratio.decides and "(282 and 281)" in ratio.words
    chosen = decide(PURE, rows=282, flops_per_byte=B200, may_replicate=True)
    assert (chosen.outcome, chosen.route, chosen.head_ranks) == ("dp_head", "local", 1)
    assert decide(PURE, rows=281, flops_per_byte=B200, may_replicate=True).enabled
    # Two ranks hold the same rows and share a vocabulary.
    chosen = decide(MIXED, rows=282, flops_per_byte=B200, may_replicate=True)
    assert (chosen.outcome, chosen.route, chosen.head_ranks) == ("dp_head", "all_to_all", 2)
    # An explicit choice wins, and is advised of the other.
    asked = replace(PURE, enable_tp_lm_head_all_to_all=True)
    kept = decide(asked, rows=282, flops_per_byte=B200, may_replicate=True)
    assert kept.enabled and kept.advice is not None and "282 rows" in kept.advice
    # Uneven rows would load the ranks of one set with more than their part of the FLOPs.
    uneven = decide(MIXED, rows=[512, 0, 0, 0], flops_per_byte=B200, may_replicate=True)
    assert uneven.enabled and uneven.advice is None
    (ratio,) = (at for at in uneven.conditions if at.name == "rows_under_ratio")
    assert ratio.holds and "not alike (0 to 512, and 281)" in ratio.words
    even = decide(MIXED, rows=[512] * 4, flops_per_byte=B200, may_replicate=True)
    assert even.outcome == "dp_head"
    # One attention group is all ranks: its head is the one that there is.
    whole = decide(ParallelConfig(8), rows=MOST_ROWS, flops_per_byte=B200, may_replicate=True)
    assert whole.enabled and "rows_under_ratio" not in {at.name for at in whole.conditions}


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [
        (1, 8, 8),
        (32, 8, 8),
        (36, 8, 8),
        (64, 8, 4),
        (65, 8, 4),
        (128, 8, 2),
        (129, 8, 1),
        (9, 4, 4),
    ],
)
def test_tensorrt_llms_rule_of_256_tokens(rows: int, ranks: int, expected: int) -> None:
    assert policies.tensorrt_llm_ranks(rows, ranks) == expected
    (found,) = (at for at in decide(PURE, rows=rows).conditions if at.name == "tensorrt_llm")
    assert found.holds == (policies.tensorrt_llm_ranks(rows, 8) > 1) and not found.decides


def test_nearest_changes_the_fewest_fields() -> None:
    asked = replace(MIXED, enable_tp_lm_head_all_to_all=True)
    for config, policy, changes in (
        (MIXED, "auto", {}),
        (replace(MIXED, dp_size=3), "auto", {"dp_size": 4}),
        (replace(MIXED, dp_size=3), "sglang", {"dp_size": 4}),
        (replace(MIXED, dp_size=100), "auto", {"dp_size": 8}),
        (replace(MIXED, attn_tp_size=3), "auto", {"attn_tp_size": None}),
        (replace(MIXED, attn_cp_size=3), "auto", {"attn_cp_size": 2}),
        (replace(MIXED, attn_cp_size=4), "auto", {"dp_size": 2}),
        (replace(MIXED, dp_size=3, attn_cp_size=3), "auto", {"dp_size": 4, "attn_cp_size": 2}),
        (asked, "sglang", {"enable_tp_lm_head_all_to_all": None}),
        (replace(asked, dp_size=3), "sglang", {"dp_size": 8}),
        (replace(asked, enable_dp_lm_head=True), "auto", {"enable_tp_lm_head_all_to_all": None}),
        (replace(asked, replicated_head=True), "auto", {"enable_tp_lm_head_all_to_all": None}),
    ):
        found = nearest(config, policy)
        assert found == replace(config, **changes), (config, policy)
        decide(found, policy)


def test_nearest_is_always_possible_and_keeps_the_ranks() -> None:
    for tp, dp, cp, few, flag, head in itertools.product(
        (1, 4, 6), (1, 4, 5), (1, 2, 3), (None, 2), (None, True), (False, True)
    ):
        config = ParallelConfig(tp, dp, cp, few, True, head, flag)
        for policy in POLICIES:
            found = nearest(config, policy)
            assert refusal(found, policy) is None and found.layout().ranks == tp
            if refusal(config, "auto") is None and refusal(config, policy) is None:
                assert found == config


def test_decisions_are_data_and_the_same_each_time() -> None:
    """No rank, device or environment enters, so all ranks decide alike (contract, point 5)."""
    names = ["config", "policy", "rows", "flops_per_byte", "may_replicate"]
    assert list(inspect.signature(decide).parameters) == names
    for policy in POLICIES:
        decision = decide(MIXED, policy, rows=36, flops_per_byte=B200)
        assert decision == decide(MIXED, policy, rows=36, flops_per_byte=B200)
        found = json.loads(json.dumps(decision.to_dict()))
        assert set(found) == {field.name for field in fields(Decision)}
        assert found["layout"] == {"dp_size": 4, "attn_tp_size": 2, "attn_cp_size": 1}
        assert set(found["conditions"][0]) == {"name", "holds", "words", "decides"}
        hash(decision)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "tp_size must be positive, got 0", {"tp_size": 0}),
        (ValueError, "attn_tp_size must be positive, got -1", {"attn_tp_size": -1}),
        (TypeError, "dp_size must be an int, got bool", {"dp_size": True}),
        (TypeError, "attn_cp_size must be an int, got NoneType", {"attn_cp_size": None}),
        (TypeError, "tied_head must be a bool, got int", {"tied_head": 1}),
        (TypeError, "must be a bool or None", {"enable_tp_lm_head_all_to_all": "yes"}),
        (ValueError, "prefill, decode or None, got 'x'", {"disaggregation_mode": "x"}),
    ],
)
def test_fields_are_checked(error: type, words: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        ParallelConfig(**arguments)


def test_null_is_how_an_engine_spells_none() -> None:
    assert ParallelConfig(disaggregation_mode="null") == ParallelConfig()


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("policy must be one of auto, sglang, got 'vllm'", {"policy": "vllm"}),
        ("rows must be non-negative ints or None, got -1", {"rows": -1}),
        ("flops_per_byte must be positive or None, got 0", {"flops_per_byte": 0}),
    ],
)
def test_arguments_are_checked(words: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        decide(PURE, **arguments)
