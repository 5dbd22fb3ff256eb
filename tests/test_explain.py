"""`lmhead explain`: what it prints, its JSON, and that its figures add up.

The texts are in tests/golden/.  After a wanted change write them anew, and read the difference:

    LMHEAD_REGOLD=1 .venv/bin/python -m pytest tests/test_explain.py; git diff tests/golden

That run fails on purpose, so that nothing passes by rewriting what it should be compared with.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from lmhead import cli
from lmhead.bench.cases import MODELS
from lmhead.bench.explanation import Explanation, explain, impossible
from lmhead.bench.ownership import BESIDE, ROUTES, picture
from lmhead.bench.roofline import (
    Step,
    all_gather_exchange,
    break_even,
    dp_head,
    floor_us,
    layout_break_even,
    owned_stages,
)
from lmhead.devices import DEVICES
from lmhead.policy import ParallelConfig
from lmhead.shapes import Layout

GOLDEN = Path(__file__).resolve().parent / "golden"
B200 = DEVICES["b200"]
V4 = {"vocab": 129280, "hidden": 7168, "device": B200}
MIXED = ParallelConfig(8, 4, enable_dp_attention=True)

COMMANDS = {
    "pure": "--tp-size 8 --dp-size 8 --rows 36 --disaggregation-mode decode",
    "mixed": "--tp-size 8 --dp-size 4 --rows 36 --model deepseek-v4-pro",
    "mixed-wide": "--tp-size 8 --dp-size 2 --row-counts 50 7 --model qwen3 --device h200",
    "tensor": "--tp-size 8 --rows 100 --model kimi",
    "context": "--tp-size 4 --dp-size 2 --attn-cp-size 2 --row-counts 3 0 5 1 --model gpt-oss",
    "context-tensor": "--tp-size 8 --dp-size 2 --attn-cp-size 2 --rows 6",
    "uneven-many": "--tp-size 8 --dp-size 4 --row-counts 512 0 300 512 --may-replicate",
    "one": "--tp-size 1 --rows 4 --model smollm2-135m",
    "off": "--tp-size 8 --dp-size 4 --no-enable-tp-lm-head-all-to-all --logits 32",
    "dp-head": "--tp-size 8 --dp-size 4 --enable-dp-lm-head",
    "sglang": "--tp-size 8 --dp-size 4 --disaggregation-mode decode --policy sglang",
    "sglang-on": "--tp-size 4 --dp-size 4 --disaggregation-mode decode --policy sglang --tied-head",
    "many-rows": "--tp-size 8 --dp-size 8 --rows 512",
    "many-rows-chosen": "--tp-size 8 --dp-size 4 --rows 512 --may-replicate",
    "replicated": "--tp-size 4 --dp-size 4 --replicated-head --model llama-3-70b",
    "many-ranks": "--tp-size 32 --dp-size 8 --rows 16 --vocab 1001 --hidden 256",
    "idle": "--tp-size 4 --dp-size 2 --row-counts 0 0",
    "impossible-sizes": "--tp-size 8 --dp-size 3 --row-counts 3 0 5",
    "impossible-both": "--tp-size 8 --dp-size 4 --enable-dp-lm-head --enable-tp-lm-head-all-to-all",
    "impossible-sglang": "--tp-size 8 --dp-size 4 --enable-tp-lm-head-all-to-all --policy sglang",
}


def run(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Status, output and errors of `lmhead explain`."""
    status = cli.main(["explain", *shlex.split(words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status, out, err = run(f"{words} --json", capsys)
    assert (status, err) == (1 if words in impossibles() else 0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def impossibles() -> list[str]:
    return [words for name, words in COMMANDS.items() if name.startswith("impossible")]


@pytest.mark.parametrize("name", COMMANDS)
def test_golden(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(COMMANDS[name], capsys)
    assert err == ""
    text = f"$ lmhead explain {COMMANDS[name]}\n{out}exit status {status}\n"
    path = GOLDEN / f"explain-{name}.txt"
    if os.environ.get("LMHEAD_REGOLD") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"{path.name} was written anew: read its difference, and run without REGOLD")
    assert text == path.read_text()
    assert max(map(len, out.splitlines())) <= 100
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_every_golden_text_is_of_a_command() -> None:
    assert {path.stem for path in GOLDEN.glob("explain-*.txt")} == {
        f"explain-{name}" for name in COMMANDS
    }


@pytest.mark.parametrize("name", [name for name in COMMANDS if "impossible" not in name])
def test_json_says_who_holds_and_owns_what(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(COMMANDS[name], capsys)
    ranks, total = found["step"]["ranks"], found["total"]
    layout = Layout(**found["layout"])
    assert layout.ranks == ranks and found["outcome"] == found["decision"]["outcome"]
    owned = [
        row
        for first, count in zip(found["owned_first"], found["owned"], strict=True)
        for row in range(first, first + count)
    ]
    assert owned == list(range(total))
    assert sum(found["row_counts"]) == total and len(found["row_counts"]) == layout.sets
    few = layout.attn_tp_size
    assert found["held"] == [found["row_counts"][rank // few] for rank in range(ranks)]
    assert set(found["bytes"]) == set(ROUTES) | set(BESIDE)
    assert all(len(moved) == ranks for moved in found["bytes"].values())
    assert found["outcome"] in found["bytes"] and len(found["decision"]["conditions"]) >= 4
    assert found["decision"]["head_ranks"] * found["shard"] >= found["step"]["vocab"]
    stages = sum(stage["floor_us"] for stage in found["stages"])
    assert found["floors_us"]["decision"] == pytest.approx(stages)
    if found["outcome"] != "local":
        assert found["floors_us"][found["outcome"]] == found["floors_us"]["decision"]


@pytest.mark.parametrize("words", impossibles())
def test_the_nearest_command_explains(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(words, capsys)
    assert set(found) == {"outcome", "reason", "policy", "config", "nearest", "command"}
    assert found["outcome"] == "impossible"
    program, command, *rest = shlex.split(found["command"])
    assert (program, command) == ("lmhead", "explain")
    assert cli.main(["explain", *rest]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["config"] == found["nearest"] != found["config"]
    assert again["decision"]["policy"] == found["policy"]


def test_every_flag_survives_in_the_nearest_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--tp-size 8 --dp-size 2 --attn-cp-size 3 --no-enable-dp-attention --tied-head "
        "--disaggregation-mode prefill --policy sglang --vocab 500 --hidden 64 --rows 7 "
        "--logits 32 --device h100 --may-replicate --no-enable-tp-lm-head-all-to-all"
    )
    status, out, _ = run(words, capsys)
    assert status == 1
    assert out.splitlines()[-1] == (
        "  lmhead explain --tp-size 8 --dp-size 2 --attn-cp-size 4 --no-enable-dp-attention "
        "--no-enable-tp-lm-head-all-to-all --tied-head --disaggregation-mode prefill "
        "--policy sglang --may-replicate --vocab 500 --hidden 64 --rows 7 --logits 32 --device h100"
    )
    _, out, _ = run("--tp-size 4 --dp-size 2 --attn-tp-size 3 --row-counts 1 2", capsys)
    assert out.splitlines()[-1] == "  lmhead explain --tp-size 4 --dp-size 2 --row-counts 1 2"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--dp-size 8", 2, "--tp-size"),
        ("--tp-size 0", 2, "positive"),
        ("--tp-size 8 --rows 3 --row-counts 3", 2, "not allowed with"),
        ("--tp-size 8 --dp-size 4 --row-counts 3 1", 1, "row_counts must name 4 sets of ranks"),
        ("--tp-size 8 --row-counts few", 2, "invalid int value: 'few'"),
        ("--tp-size 8 --vocab 8", 1, "--vocab and --hidden come together"),
    ],
)
def test_mistakes_are_errors(
    words: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = cli.main(["explain", *words.split()])
    except SystemExit as stopped:
        found = int(str(stopped.code))
    captured = capsys.readouterr()
    assert found == status and said in captured.err and captured.out == ""


def explained(config: ParallelConfig, **more: Any) -> Explanation:
    return explain(config, **{**V4, **more})


def test_bytes_of_mixed_attention_by_hand() -> None:
    """T = 144 rows, 18 owned by each of 8 ranks, 36 held; S = 16160, 2 bytes a logit."""
    moved = explained(MIXED).moved
    assert moved == {
        "all_to_all": (7 * 18 * 16160 * 2,) * 8,
        "all_gather": (7 * 144 * 16160 * 2,) * 8,
        "candidates": (7 * 18 * 20 * 8,) * 8,
        "dp_head": (18 * (129280 // 2) * 2,) * 8,
        "replicate": (7 * 36 * 16160 * 2,) * 8,
        "local": (0,) * 8,
        "hidden": ((144 - 36) * 7168 * 2,) * 8,
        "share": (18 * 8,) * 8,
    }
    # As many rows in all under pure data parallelism: the exchange moves as much.
    pure = explained(ParallelConfig(8, 8, enable_dp_attention=True), rows=18).moved
    assert pure["all_to_all"] == moved["all_to_all"] and pure["dp_head"] == (0,) * 8
    assert pure["share"] == (0,) * 8 and pure["replicate"] == pure["all_to_all"]


def test_bytes_with_idle_groups_by_hand() -> None:
    """Counts 3, 0, 5, 1 over pairs: 2 1 | 0 0 | 3 2 | 1 0 owned."""
    found = explained(MIXED, row_counts=[3, 0, 5, 1])
    assert [rows.own for rows in found.ranks] == [2, 1, 0, 0, 3, 2, 1, 0]
    row = 16160 * 2
    sent_or_received = [7 * 2, 8, 9, 9, 7 * 3, 7 * 2, 8, 9]
    assert found.moved["all_to_all"] == tuple(rows * row for rows in sent_or_received)
    # Of 18 rows that leave it (each to both ranks of its group), a group's own stay in part.
    replicated = [7 * 3, 7 * 3, 18, 18, 7 * 5, 7 * 5, 17, 17]
    assert found.moved["replicate"] == tuple(rows * row for rows in replicated)
    assert found.moved["share"] == (16, 16, 0, 0, 24, 24, 8, 8)
    # A rank sends its set's rows to the three others, and receives theirs.
    assert [count // (7168 * 2) for count in found.moved["hidden"]] == [9, 9, 9, 9, 15, 15, 8, 8]
    half = 129280 // 2 * 2
    assert [count // half for count in found.moved["dp_head"]] == [2, 2, 0, 0, 3, 3, 1, 1]


def test_a_head_per_group_moves_what_its_own_route_moves() -> None:
    asked = ParallelConfig(8, 4, enable_dp_attention=True, enable_dp_lm_head=True)
    ours, theirs = explained(asked), explained(asked, policy="sglang")
    assert (ours.decision.route, theirs.decision.route) == ("all_to_all", "all_gather")
    half = 129280 // 2 * 2
    assert ours.moved["dp_head"] == (18 * half,) * 8
    assert theirs.moved["dp_head"] == (36 * half,) * 8


def test_floors_are_the_rooflines() -> None:
    """Where the roofline of equal rows knows the case, this is the same."""
    step = Step(129280, 7168, 8, 36)
    found = explained(ParallelConfig(8, 8, enable_dp_attention=True))
    assert found.floors["decision"] == pytest.approx(floor_us(B200, step))
    assert found.floors["dp_head"] == dp_head(B200, step).floor_us
    gathered = all_gather_exchange(B200, step).floor_us
    (exchange,) = (
        stage
        for stage in owned_stages(B200, step, found.ranks[0], route="all_gather")
        if stage.name == "exchange"
    )
    assert exchange.floor_us == gathered
    assert found.break_even == break_even(B200, step) == layout_break_even(B200, step, Layout(8))


def test_floors_of_uneven_rows_are_those_of_the_slowest_rank() -> None:
    found = explained(MIXED, row_counts=[3, 0, 5, 1])
    stages = {stage.name: stage for stage in found.stages}
    assert list(stages) == ["hidden gather", "gemm", "exchange", "reassembly"]
    assert stages["hidden gather"].wire_bytes == 9 * 7168 * 2  # an idle rank gets all rows
    assert stages["gemm"].flops == 2 * 9 * 16160 * 7168
    assert stages["exchange"].wire_bytes == 7 * 3 * 16160 * 2
    assert stages["reassembly"].memory_bytes == 2 * 3 * 129280 * 2


def test_break_even_is_where_the_floors_cross() -> None:
    for layout in (Layout(8), Layout(4, 2), Layout(2, 2, 2)):
        config = ParallelConfig(
            8, layout.dp_size, attn_cp_size=layout.attn_cp_size, enable_dp_attention=True
        )
        rows = explained(config).break_even
        assert rows is not None
        before, after = explained(config, rows=rows - 1).floors, explained(config, rows=rows).floors
        assert before["all_to_all"] < before["dp_head"]
        assert after["all_to_all"] >= after["dp_head"]
    assert explained(ParallelConfig(8)).break_even is None  # one group is all ranks


def test_a_whole_head_multiplies_the_rows_that_its_rank_holds() -> None:
    found = explained(ParallelConfig(8, 4, enable_dp_attention=True, replicated_head=True))
    (gemm,) = found.stages
    assert found.decision.outcome == "local" and gemm.flops == 2 * 36 * 129280 * 7168


def test_what_cannot_be_is_refused() -> None:
    odd = ParallelConfig(8, 3, enable_dp_attention=True)
    refused = impossible(odd, "sglang")  # whose rule does not ask, but there is nothing to draw
    assert refused is not None and refused.changes() == {"dp_size": (3, 4)}
    with pytest.raises(ValueError, match="tp_size 8 is no multiple of 3 attention groups"):
        explained(odd)
    with pytest.raises(ValueError, match="itemsize must be 2 or 4 bytes per logit, got 1"):
        explained(MIXED, itemsize=1)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_explains(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(f"--tp-size 8 --dp-size 4 --model {model}", capsys)
    assert status == 0 and f"V = {MODELS[model].vocab}, H = {MODELS[model].hidden}" in out


def test_no_owner_is_lost_in_the_picture() -> None:
    """However few of the rows are a rank's, and however many there are."""
    counts = [4000, 1, 0, 3]
    found = explained(MIXED, row_counts=counts)
    lines = [line for line in picture(found.layout, found.ranks) if "|" in line]
    assert len(lines) == 8
    for line, rows in zip(lines, found.ranks, strict=True):
        bar = line.split("|")[1]
        assert len(bar) == 32 and ("#" in bar) == (rows.own > 0)
        assert (bar.strip() != "") == (rows.brought > 0)
