"""`lmhead bench`: every subcommand end to end at small sizes, and its mistakes in one line each.

Ranks are those of the tests' pool, but for one run that a stranger would make.  No test looks at
how long anything took.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import pool

from lmhead import cli
from lmhead.bench import command, methods, plots, rates, report, results, suites
from lmhead.bench.peers import PEERS
from lmhead.bench.results import Report, Row
from lmhead.bench.torch_sampler import Sampler, engine_sample, lean_sample

ROOT = Path(__file__).resolve().parent.parent
# f is compiled, which takes its ranks many seconds: it has a test of its own, as layouts have.
QUICK = [name for name in methods.NAMES if name not in ("f", *methods.LAYOUTS_ONLY)]
SMALL = ["--vocab", "1001", "--hidden", "32", "--rounds", "4"]


def on_pool(rank: int, ranks: int, job: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    # The machine's rates by small copies and products: a CPU without bf16 takes seconds for others.
    with mock.patch.multiple(rates, COPIES=(rates.MIB,), EXCHANGES=(rates.MIB,), MATRIX=64):
        found = job(rank, ranks, torch.device("cpu"), *arguments)
    assert rank == 0 or found is None
    return found


@pytest.fixture(autouse=True)
def pooled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def run(job: Callable[..., Any], ranks: int, *arguments: Any, timeout_s: float = 0) -> Any:
        return pool(ranks).run(on_pool, job, arguments)[0]

    monkeypatch.setattr(suites.launch, "run", run)
    monkeypatch.setattr(suites.launch, "require_memory", lambda needed, what: None)
    yield


def bench(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert cli.main(["bench", *arguments]) == status
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench(capsys, *arguments, "--json"))
    return found


def assert_sound(rows: list[dict[str, Any]]) -> None:
    """Every method was right, and moved what the arithmetic says."""
    for row in rows:
        if row["roof"]:
            assert row["checked"] in ("a part", "checked")
        else:
            assert row["checked"].startswith(("bit for bit", "to rounding", "checked")), row
        assert 0 < min(row["each_ms"]) <= row["ms"] <= max(row["each_ms"])
        assert row["bytes"] == row["counted_bytes"], row


def test_head_times_every_method_and_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--ranks", "4", "--rows", "3", "--methods", *QUICK)
    found = as_json(capsys, "head", *SMALL, *arguments)
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == set(QUICK)
    assert_sound(found["rows"])
    four = ["hidden gather", "gemm", "exchange", "reassembly"]
    for name in ("lmhead", "lmhead-fp32", "lmhead-all-gather", "a", "a-lean", "b", "c", "d", "h"):
        assert list(rows[name]["stages"]) == four
    assert list(rows["e"]["stages"]) == four[:3] and list(rows["g"]["stages"]) == ["gemm"]
    # 1001 / 4: padding is moved as well.
    block, own, others = 3 * 251 * 2, 3 * 32 * 2, 3
    moved = {name: row["bytes"] for name, row in rows.items()}
    assert moved["lmhead"] == moved["b"] == moved["d"] == moved["h"] == others * (own + block)
    assert moved["lmhead-fp32"] == moved["lmhead"]
    assert moved["a"] == moved["lmhead-all-gather"] == others * (own + 4 * block)
    assert moved["e"] == moved["a"]  # on a CPU DTensor gathers
    assert moved["c"] == 2 * others * own + others * block
    assert moved["g"] == moved["roof-gemm"] == 0 and moved["roof-all-to-all"] == others * block
    assert {"cpu", "cores", "torch", "triton", "clock", "commit"} <= set(found["machine"])
    limits = found["limits"]["4"]
    assert min(limits[name] for name in ("memory", "math", "wire")) > 0
    assert all(row["floor_ms"] > 0 for row in found["rows"])


def message_bytes(rows: int, record_words: int, message_words: int, missed: bool) -> int:
    """What a rank is sent by three others: hidden rows with records behind them, and messages."""
    return 3 * (rows * (32 * 2 + 4 * record_words + 4 * message_words) + (4 if missed else 0))


@pytest.mark.parametrize(
    ("sample", "words", "missed"),
    [("temperature=0.7", 2, False), ("top_k=20,top_p=0.95", 40, False), ("top_p=0.9", 130, True)],
)
def test_head_ends_in_tokens_by_several_ways(
    sample: str, words: int, missed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (methods.OURS, *methods.DRAWING)
    sizes = (*SMALL, "--ranks", "4", "--rows", "3")
    found = as_json(capsys, "head", *sizes, "--sample", sample, "--methods", *names)
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) == set(names)
    assert_sound(found["rows"])
    assert {row["sample"] for row in rows.values()} == {"", sample}
    own = rows["candidates"]
    stages = ["hidden gather", "gemm", "reduce", "exchange", "draw"]
    assert list(own["stages"])[:5] == stages
    # A nucleus of nearly flat logits is not covered: full logits are exchanged after all.
    full = 3 * 3 * 251 * 2 if "reassembly" in own["stages"] else 0
    assert own["bytes"] == message_bytes(3, 8, words, missed) + full
    assert full == 0 or missed
    for name, (logits, _) in methods.SAMPLED.items():
        assert list(rows[name]["stages"])[-2:] == ["reassembly", "draw"]
        if logits in rows:
            assert rows[name]["bytes"] == rows[logits]["bytes"]
    assert 0 < own["floor_ms"] < rows["lmhead"]["floor_ms"] == rows["a-torch"]["floor_ms"]


def test_drawing_is_told_in_words_and_drawn_as_stages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    sizes = (*SMALL, "--ranks", "2", "--rows", "2", "--methods", *methods.DRAWING)
    text = bench(capsys, "head", *sizes, "--plot", str(tmp_path))
    assert "tokens are drawn with temperature=0.7,top_k=20,top_p=0.8\n" in text
    assert "round by round, a + torch sampling takes " in text and "after the GEMM, " in text
    assert (tmp_path / "head-stages.png").stat().st_size > 10_000


def test_layouts_are_cases_of_one_run_with_the_same_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("--ranks", "4", "--rows", "3", "--dp-size", "4", "2", "1")
    found = as_json(capsys, "head", *SMALL, *sizes, "--methods", *QUICK, *methods.LAYOUTS_ONLY)
    assert_sound(found["rows"])
    by_case = {
        dp_size: {row["name"]: row for row in found["rows"] if row["dp_size"] == dp_size}
        for dp_size in (4, 2, 1)
    }
    assert set(by_case[4]) == set(QUICK)
    assert set(by_case[2]) == set(by_case[1]) == set(methods.IN_LAYOUTS)
    # 1001 / 4: padding is moved as well.
    block, row = 3 * 251 * 2, 32 * 2
    for dp_size, rows in by_case.items():
        span = 4 // dp_size
        hidden = (12 - 3 * span) * row  # all but those that a rank holds
        slices = 0 if dp_size == 1 else 3 * 3 * row  # a, which gathers what ranks own
        moved = {name: row["bytes"] for name, row in rows.items()}
        assert moved["lmhead"] == moved["lmhead-fp32"] == hidden + 3 * block
        assert moved["lmhead-all-gather"] == hidden + 3 * 4 * block
        assert moved["a"] == moved["a-lean"] == slices + 3 * 4 * block
        assert moved["roof-all-to-all"] == 3 * block and moved["roof-gemm"] == 0
        if dp_size < 4:
            assert moved["lmhead-replicate"] == hidden + span * 3 * block
        # top_k=20: 40 words a message; tokens and their status to the rest of the group.
        drawn = (12 - 3 * span) * (row + 4 * 8) + 9 * 4 * 40 + (span - 1) * 3 * 9
        assert moved["candidates"] == drawn
    gathering = {
        dp_size: "hidden gather" in rows["a"]["stages"] for dp_size, rows in by_case.items()
    }
    assert gathering == {4: True, 2: True, 1: False}
    assert list(by_case[2]["candidates"]["stages"])[-2:] == ["draw", "share"]
    floors = [rows["lmhead"]["floor_ms"] for rows in by_case.values()]
    assert floors[0] > floors[1] > floors[2]  # the fewer hidden rows are gathered
    first, second = found["notes"][-2:]
    assert "of the rows that a rank owns" in first
    left_out = [name for name in QUICK if name not in methods.IN_LAYOUTS]
    assert second.startswith(f"there {', '.join(left_out)} are left out")


def test_a_layout_is_named_saved_and_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    names = ("--methods", "lmhead", "lmhead-replicate", "candidates", "a")
    sizes = (*SMALL, "--ranks", "4", "--rows", "2", "--dp-size", "2", "1", *names)
    saved = tmp_path / "layouts.json"
    text = bench(capsys, "head", *sizes, "--save", str(saved), "--plot", str(tmp_path))
    case = "N = 4, B = 2, bf16, 2 attention groups of 2 tensor-parallel ranks"
    assert f"custom: V = 1001, H = 32, {case}; floor" in text
    assert text.count("round by round, a takes ") == 2
    assert text.count("round by round, lmhead-replicate takes ") == 2
    assert "are left out" not in text
    assert all((tmp_path / f"head-stages-{i}.png").stat().st_size > 10_000 for i in range(2))
    again = bench(capsys, "head", *sizes, "--compare", str(saved))
    assert "new over old" in again
    cells = [line for line in again.split("new over old")[1].splitlines() if "lmhead" in line]
    assert len(cells) >= 4
    lines = bench(capsys, "head", *sizes, "--csv").splitlines()
    (header,) = [i for i, line in enumerate(lines) if line.startswith("model,")]
    assert {row["dp_size"] for row in csv.DictReader(lines[header:])} == {"2", "1"}


def test_a_file_from_before_layouts_is_one_of_data_parallel_ranks(tmp_path: Path) -> None:
    made(3.0).save(tmp_path / "run.json")
    old = json.loads((tmp_path / "run.json").read_text())
    for row in old["rows"]:
        del row["dp_size"]
    (tmp_path / "run.json").write_text(json.dumps(old))
    before = results.load(tmp_path / "run.json")
    assert before == made(3.0)
    same, mixed = made(6.0), made(6.0)
    same.rows[0].dp_size, mixed.rows[0].dp_size = 2, 1
    assert [change.ratio for change in results.compare(before, same)] == [2.0]
    with pytest.raises(ValueError, match="no case in common"):
        results.compare(before, mixed)


@pytest.mark.parametrize("torch_sample", [engine_sample, lean_sample])
def test_torchs_samplers_draw_what_the_filters_leave(torch_sample: Sampler) -> None:
    torch.manual_seed(5)
    logits = torch.randn(1, 12).mul_(2).expand(20_000, 12)
    chances = (logits[0].double() / 0.8).softmax(0)
    order = chances.argsort(descending=True)
    for given, kept in (
        ({}, 12),
        ({"top_k": 3}, 3),
        ({"top_p": 0.8}, int((chances[order].cumsum(0) < 0.8).sum()) + 1),
        ({"min_p": float(chances[order[4]] / chances[order[0]]) * 0.99}, 5),
        ({"top_k": 5, "top_p": 1e-9}, 1),
    ):
        drawn = torch_sample(logits, temperature=0.8, **given)
        want = torch.zeros(12, dtype=torch.float64)
        want[order[:kept]] = chances[order[:kept]] / chances[order[:kept]].sum()
        shares = drawn.bincount(minlength=12) / drawn.numel()
        assert (shares - want).abs().max() < 0.02 and not shares[want == 0].any()
    assert torch.equal(torch_sample(logits, temperature=0.0), logits.argmax(1))


def test_a_token_that_is_not_the_largest_is_an_objection() -> None:
    own = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 5.0]])
    assert methods.not_greedy(own, torch.tensor([2, 2])) == ""
    assert methods.not_greedy(own, torch.tensor([1, 1])).startswith("row 1 takes 1 greedily, and 2")
    assert methods.not_greedy(own * torch.nan, torch.tensor([1, 1]))


def test_a_compiled_peer_is_checked_and_counted_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "head", *SMALL, *("--ranks", "2", "--rows", "2", "--methods", "f"))
    assert_sound(found["rows"])
    assert found["rows"][0]["bytes"] == 2 * (32 + 501) * 2


def test_exchange_over_rows_ranks_and_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--ranks", "1", "4", "--rows", "1", "3", "--dtype", "bf16", "fp32")
    names = ("lmhead", "lmhead-fp32", "lmhead-all-gather", "a", "b", "d", "e", "h", "g")
    found = as_json(
        capsys, "exchange", "--vocab", "77", *sizes, "--rounds", "2", "--methods", *names
    )
    rows = found["rows"]
    assert_sound(rows)
    for row in rows:
        assert row["name"] != "g"  # which exchanges nothing
        block = row["rows"] * -(-77 // row["ranks"]) * {"bf16": 2, "fp32": 4}[row["dtype"]]
        gathers = row["name"] in ("a", "e", "lmhead-all-gather")
        times = row["ranks"] if gathers else 1
        assert row["bytes"] == (row["ranks"] - 1) * block * times
    cases = {(row["ranks"], row["rows"], row["dtype"]) for row in rows}
    assert len(cases) == 8
    # fp32 logits of fp32 operands are what lmhead gives anyway, and one rank has no other route.
    assert not any(row["name"] == "lmhead-fp32" and row["dtype"] == "fp32" for row in rows)
    assert not any(row["name"] == "lmhead-all-gather" and row["ranks"] == 1 for row in rows)


def test_scale_shows_how_bytes_grow_and_draws_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    sizes = ("--vocab", "512", "--ranks", "1", "2", "4", "--rows", "1", "2", "4", "--rounds", "2")
    saved = tmp_path / "scale.json"
    text = bench(capsys, "scale", *sizes, "--plot", str(tmp_path), "--save", str(saved))
    assert "growth of time and bytes" in text and f"drawn: {tmp_path}/scale.png" in text
    found = results.load(saved)
    moved = {(row.ranks, row.rows, row.name): row.bytes for row in found.rows}
    for rows in (1, 2, 4):
        assert moved[4, rows, "lmhead"] == rows * moved[4, 1, "lmhead"]
        assert moved[4, rows, "lmhead-all-gather"] == 4 * moved[4, rows, "lmhead"]
    assert moved[2, 2, "lmhead-all-gather"] == 2 * moved[2, 2, "lmhead"]
    assert (tmp_path / "scale.png").stat().st_size > 10_000


def test_growth_is_read_off_the_upper_half_of_the_rows() -> None:
    """A fixed cost of 1 ms, then 2 ms a row against 8; 10 bytes a row against 40."""
    found = []
    for name, cost in (("lmhead", 2.0), ("lmhead-all-gather", 8.0)):
        for rows in (1, 2, 4, 64, 128, 256):
            row = Row("custom", 64, 8, 4, rows, "bf16", name, name, "bit for bit")
            row.ms, row.bytes = 1.0 + cost * rows, int(5e6 * cost * rows)
            found.append(row)
    lines = list(report.growth(Report("scale", "isolated", 3, {}, found)))
    assert lines[0] == (
        "lmhead, N = 4: from B = 64 to 256 time grows as B to the 1.00; a row more is 2.000 ms "
        "and 10.000 MB"
    )
    assert lines[2].startswith(
        "a row more costs all-gather 4.0 times the all-to-all's time and 4.0"
    )


def test_kernels_times_every_config_of_the_table_beside_its_peers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the interpreter here, as the tests run it; on a CPU without it ours are torch's twins."""
    sizes = ("--vocab", "96", "--hidden", "32", "--ranks", "2", "--rows", "3", "--rounds", "2")
    found = as_json(capsys, "kernels", *sizes, "--plot", str(tmp_path))
    assert [row["checked"] for row in found["rows"]] == ["checked"] * len(found["rows"])
    names = {
        part: [row["name"] for row in found["rows"] if row["part"] == part]
        for part in ("gemm", "reassembly")
    }
    assert any(name.startswith("bulk") for name in names["gemm"]) and "library" in names["gemm"]
    assert any(name.startswith("band") for name in names["reassembly"])
    assert {"permute-reshape", "plain-copy"} < set(names["reassembly"])
    assert (tmp_path / "kernels.png").exists() and (tmp_path / "kernels-roofline.png").exists()
    padded = as_json(capsys, "kernels", *("--vocab", "95", *sizes[2:]))
    assert any(row["name"].startswith("copy") for row in padded["rows"])


def test_a_stranger_gets_a_table_a_picture_and_a_file(tmp_path: Path) -> None:
    """Ranks started by the command itself, and no interpreter."""
    pytest.importorskip("matplotlib")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    sizes = ("--vocab", "2048", "--hidden", "64", "--ranks", "2", "--rows", "4", "--rounds", "4")
    names = ("--methods", "lmhead", "a", "b", "e", "roof-all-to-all")
    files = ("--save", str(tmp_path / "run.json"), "--plot", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "lmhead.cli", "bench", "head", *sizes, *names, *files],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "cadence: isolated",
        "of floor",
        "a  all-gather + scatter",
        "stages beyond GEMM and the bare all-to-all",
        "published by others and modelled",
        "a sharded head beats a DP head below",
        "drawn: ",
    ):
        assert words in done.stdout
    assert "Warning" not in done.stderr
    assert [row.name for row in results.load(tmp_path / "run.json").rows] == list(names[1:])
    assert (tmp_path / "head-stages.png").exists() and (tmp_path / "head-roofline.png").exists()


# Files and comparisons, of runs that nobody made.


def made(ms: float, spread: float = 0.01, cadence: str = "isolated", kind: str = "head") -> Report:
    row = Row("custom", 64, 8, 2, 3, "bf16", "lmhead", "lmhead, all-to-all", "bit for bit")
    row.ms, row.spread_ms = ms, spread
    row.stages = {"gemm": ms / 2, "exchange": ms / 2}
    machine = {"cpu": "a CPU", "cores": 2, "gpus": 0, "torch": "2", "triton": "3", "commit": "x"}
    return Report(kind, cadence, 4, machine | {"date": "2026-12-01T00:00"}, [row])


def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new: Report, *arguments: str) -> int:
    made(10.0, spread=1.0).save(tmp_path / "old.json")
    monkeypatch.setattr(command, "_measure", lambda arguments, cases: new)
    return cli.main(["bench", "head", *SMALL, "--compare", str(tmp_path / "old.json"), *arguments])


def test_compare_prints_ratio_and_spread_and_fails_past_a_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(monkeypatch, tmp_path, made(12.0, spread=1.2)) == 0
    # 12 / 10, and 10 % of either's spread.
    assert "1.200  0.240" in " ".join(capsys.readouterr().out.split()).replace(" ", "  ")
    assert compared(monkeypatch, tmp_path, made(12.0, spread=1.2), "--fail-over", "25") == 0
    assert compared(monkeypatch, tmp_path, made(12.0, spread=1.2), "--fail-over", "15") == 1
    assert "past 15 %: lmhead by 20 % (+- 24 %)" in capsys.readouterr().out
    assert compared(monkeypatch, tmp_path, made(5.0), "--fail-over", "0") == 0  # faster is no harm


@pytest.mark.parametrize(
    ("new", "words"),
    [(made(1.0, cadence="streaming"), "cadence"), (made(1.0, kind="exchange"), "kind")],
)
def test_unlike_runs_are_not_compared(new: Report, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        results.compare(made(1.0), new)


def test_a_run_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    run = made(3.0)
    run.save(tmp_path / "run.json")
    assert results.load(tmp_path / "run.json") == run
    assert "Infinity" not in (tmp_path / "run.json").read_text()


def test_ratios_are_taken_round_by_round() -> None:
    """The machine is three times slower in the second round and nine times in the third."""
    ours, peer = (made(0.0).rows[0] for _ in range(2))
    ours.each_ms, peer.each_ms = [1.0, 3.0, 9.0, 9.0], [2.0, 6.0, 18.0, 27.0]
    assert peer.over(ours).seconds == (2.0, 2.0, 2.0, 3.0) and peer.over(ours).median == 2.0


def test_what_lies_beyond_the_collective_is_never_less_than_nothing() -> None:
    ours, roof = (made(10.0).rows[0] for _ in range(2))
    roof.name, roof.stages = "roof-all-to-all", {"exchange": 4.0}
    ours.stages = {"hidden gather": 1.0, "gemm": 50.0, "exchange": 6.0, "reassembly": 2.0}
    assert report.beyond([ours, roof], "lmhead", ["gemm"]) == 1.0 + (6.0 - 4.0) + 2.0
    ours.stages["exchange"] = 3.0
    assert report.beyond([ours, roof], "lmhead", ["gemm", "hidden gather"]) == 2.0


def test_csv_names_the_machine_and_the_cadence(capsys: pytest.CaptureFixture[str]) -> None:
    lines = made(3.0).to_csv().splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    assert "# cadence: isolated" in comments and "# cpu: a CPU" in comments
    (at,) = csv.DictReader(lines[len(comments) :])
    assert at["name"] == "lmhead" and at["ms"] == "3.0" and at["exchange ms"] == "1.5"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 7}', '{"format": 1, "rows": [{}]}'])
def test_a_file_that_is_none_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.json").write_text(text)
    assert cli.main(["bench", "head", "--compare", str(tmp_path / "bad.json")]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and "holds no saved benchmark" in lines[0]


# Mistakes.


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["sprint"],
        ["head", "--rows", "0"],
        ["head", "--ranks", "2", "4"],
        ["head", "--model", "nothing"],
        ["exchange", "--dtype", "int4"],
        ["exchange", "--methods", "carrier-pigeon"],
        ["exchange", "--cadence", "sometimes"],
        ["head", "--late", "-1"],
        ["head", "--sample", "top_k"],
        ["head", "--sample", "top_k=2.5"],
        ["head", "--sample", "temperature=-1"],
        ["head", "--sample", "top_p=0.9,top_p=0.8"],
        ["exchange", "--sample", "top_k=2"],
        ["head", "--dp-size", "0"],
        ["exchange", "--dp-size", "2"],
        ["scale", "--dp-size", "2"],
        ["kernels", "--dp-size", "2"],
        ["kernels", "--rounds", "many"],
        ["scale", "--json", "--csv"],
        ["head", "--compare", "x", "--fail-over", "nan"],
    ],
)
def test_bad_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("lmhead")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["head", "--fail-over", "5"], "--fail-over needs --compare"),
        (["head", "--vocab", "10"], "--vocab needs --hidden"),
        (["head", "--vocab", "10", "--hidden", "8", "--model", "kimi"], "not by both"),
        (["head", "--save", "/nowhere/at/all.json"], "/nowhere/at is no directory"),
        (["head", "--compare", "/nowhere.json"], "/nowhere.json"),
        (["head", "--dp-size", "8", "3"], "--dp-size 3 does not divide 8 ranks"),
        (["head", "--ranks", "4", "--dp-size", "8"], "--dp-size 8 does not divide 4 ranks"),
        (["head", "--methods", "lmhead-replicate"], "lmhead-replicate is for layouts"),
        (["head", "--dp-size", "2", "--methods", "b", "g"], "none of b, g knows attention groups"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 1
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert captured.out == "" and len(lines) == 1 and words in lines[0]


def test_a_comparison_with_another_cadence_is_refused_before_it_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made(1.0, cadence="streaming").save(tmp_path / "old.json")
    monkeypatch.setattr(command, "_measure", lambda *_: pytest.fail("measured"))
    assert cli.main(["bench", "head", "--compare", str(tmp_path / "old.json")]) == 1
    assert "different questions" in capsys.readouterr().err
    assert cli.main(["bench", "exchange", "--compare", str(tmp_path / "old.json")]) == 1
    assert "holds a bench head" in capsys.readouterr().err


def test_without_matplotlib_plot_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "head", "--plot", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines == ["lmhead: --plot needs matplotlib: pip install 'lmhead[bench]'"]


def test_without_rich_the_table_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    rich = report.render(made(3.0))
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    plain = report.render(made(3.0))
    words = [line.split() for line in plain.splitlines()]
    assert ["lmhead,", "all-to-all", "3.000", "0.010", "1.00"] in [line[:5] for line in words]
    if importlib.util.find_spec("rich") is not None:
        assert "─" in rich
    assert "─" not in plain


def test_every_peer_names_its_source() -> None:
    from lmhead.bench import peers

    assert peers.__doc__ is not None
    table = [line for line in peers.__doc__.splitlines() if line.startswith("| ")]
    rows = {line.split("|")[1].strip(): line for line in table}
    assert set(PEERS) <= set(rows) and all(rows[name].count("|") == 4 for name in PEERS)
