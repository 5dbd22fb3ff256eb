"""`lmhead inspect` and `lmhead tune` as a user runs them: in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lmhead import cli, tables
from lmhead.kernels.config import GemmConfig


def lmhead(*arguments: str, folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the command line, without the interpreter and with a user's folder of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"LMHEAD_CONFIGS": str(folder), "CUDA_VISIBLE_DEVICES": ""} | extra
    return subprocess.run(
        [sys.executable, "-m", "lmhead.cli", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def test_inspect_prints_configs_code_and_what_binds(tmp_path: Path) -> None:
    arguments = ("inspect", "--arch", "sm_100", "--model", "deepseek-v4-pro")
    done = lmhead(*arguments, "--ranks", "8", "--rows", "36", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "N = 8, B = 36, T = 288, V = 129280, H = 7168, S = 16160" in done.stdout
    assert done.stdout.count("modelled (shipped)") == 2  # the GEMM and the reassembly
    assert done.stdout.count(" 0 spills, 0 B stack") == 2
    for stage in ("hidden gather", "gemm", "exchange", "reassembly", "in series"):
        assert f"\n{stage}" in done.stdout
    assert "PROBLEM" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_inspect_as_json_for_a_head_without_a_name(tmp_path: Path) -> None:
    # 1001 / 4: rows that start anywhere, padding, fp32 logits of 16 bits on the wire.
    arguments = ("--vocab", "1001", "--hidden", "256", "--ranks", "4", "--rows", "3")
    formats = ("--logits", "32", "--wire", "16", "--device", "h200", "--json")
    done = lmhead("inspect", *arguments, *formats, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"]["name"] == "H200" and found["step"]["rows"] == 3
    gemm, copy = found["kernels"]
    assert gemm["source"] == copy["source"] == "default"
    assert gemm["report"]["spills"] == 0 and gemm["report"]["counts"]
    assert copy["kernel"] == "copy" and copy["config"]["kind"] == "copy"
    stages = {stage["name"]: stage for stage in found["stages"]}
    assert stages["exchange"]["wire_bytes"] == 3 * 3 * 251 * 2
    assert stages["hidden gather"]["wire_bytes"] == 3 * 3 * 256 * 2
    assert stages["gemm"]["flops"] == 2 * 12 * 251 * 256
    assert stages["reassembly"]["memory_bytes"] == 4 * 3 * 251 * 2 + 3 * 1001 * 4


def test_inspect_ranks_the_space_and_a_user_table_wins(tmp_path: Path) -> None:
    # Rows of 577 elements: one config of ordinary loads is all there is.
    table, config = tables.Table("b200"), GemmConfig(16, 64, 32, 4, 2)
    key = tables.Key("gemm", 577, 0, 500, 16, 16, "graph", 16)
    table.add(key, tables.Entry(config, "measured", 1.0))
    tables.write(tmp_path / "b200.json", table)
    arguments = ("--vocab", "4000", "--hidden", "577", "--rows", "1", "--all", "--json")
    done = lmhead("inspect", *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kernels"][0]["source"] == "measured (user)"
    (ranked,) = found["ranking"]
    assert ranked["config"] != found["kernels"][0]["config"]
    assert ranked["compiled"]["problems"] == [] and ranked["estimate"]["us"] > 0


def test_tune_offline_writes_a_table_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    arguments = ("tune", "--offline", "--device", "b200", "--model", "smollm2-135m")
    arguments += ("--ranks", "4", "--rows", "16", "--rows", "288", "--jobs", "2")
    done = lmhead(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    table = tables.parse((tmp_path / "b200.json").read_text(), "b200")
    kernels = [key.kernel for key in table.entries]
    assert kernels.count("gemm") == 4 and kernels.count("reassemble") == 4
    (builds,) = tmp_path.glob("builds-*.jsonl")
    lines = [line for line in builds.read_text().splitlines() if line]
    # A line cut short by an interruption, and one that is missing.
    builds.write_text("\n".join(lines[1:]) + '\n{"build": "')
    again = lmhead(*arguments, "--output", str(tmp_path), folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert tables.parse((tmp_path / "b200.json").read_text(), "b200").entries == table.entries
    compiled = [line for line in builds.read_text().splitlines() if line.endswith("}")]
    assert sorted(compiled) == sorted(lines)  # the missing one alone


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tune",), "needs a CUDA device"),
        (("inspect", "--vocab", "10"), "--vocab and --hidden come together"),
        (("inspect", "--vocab", "10", "--hidden", "8", "--model", "kimi"), "not by both"),
        (("inspect", "--arch", "sm_90", "--device", "b200"), "B200 is sm_100, not sm_90"),
        (("inspect", "--wire", "32"), "32 bits on the wire are more than the 16"),
        (("tune", "--offline", "--output", "/nowhere"), "/nowhere is no directory"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = lmhead(*arguments, folder=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_under_the_interpreter_there_is_nothing_to_compile(tmp_path: Path) -> None:
    done = lmhead("inspect", folder=tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 1 and "unset it" in done.stderr


def test_every_command_of_the_readme_parses() -> None:
    text = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    found = re.findall(r"^\.venv/bin/lmhead (.*)$", text, flags=re.MULTILINE)
    assert len(found) >= 3
    for line in found:
        assert cli._parser().parse_args(shlex.split(line)).run
