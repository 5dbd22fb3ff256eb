"""What a figure was measured with: machine, versions, clock, commit.  It goes into every file."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent


def said(command: Sequence[str]) -> str | None:
    """The first line that a command prints; None where it cannot."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    return None


def software() -> dict[str, str]:
    """Versions, the date, and the commit of a checkout."""
    commit = said(["git", "rev-parse", "--short=12", "HEAD"])
    changed = said(["git", "status", "--porcelain", "--untracked-files=no"])
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": "unknown" if commit is None else commit + (" with changes" if changed else ""),
    }


def facts(device: torch.device) -> dict[str, Any]:
    """Everything about this machine that a reader of a figure would ask for."""
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
    }
    with contextlib.suppress(OSError, ValueError):
        found["memory_GiB"] = round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        )
    found["gpu"], found["gpus"] = "none", 0
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpus"], found["cuda"] = torch.cuda.device_count(), torch.version.cuda
    with contextlib.suppress(OSError):
        found["load_at_start"] = round(os.getloadavg()[0], 1)
    return found | {"clock": _clock()} | software()


def line(facts: dict[str, Any]) -> str:
    """The same in one line, for a table's head and a picture's foot."""
    what = f"{facts['cores']} cores of {facts['cpu']}"
    if facts["gpus"]:
        what = f"{facts['gpus']} x {facts['gpu']}"
    return (
        f"{what}, torch {facts['torch']}, Triton {facts['triton']}, "
        f"commit {facts['commit']}, {facts['date'][:10]}"
    )


def _cpu() -> str:
    """The processor's name, and which of the instructions that a bf16 product is made of it has."""
    name, flags = platform.processor() or platform.machine(), ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        lines = [line.partition(":") for line in text.splitlines()]
        fields = {key.strip(): value.strip() for key, _, value in lines}
        name, flags = fields.get("model name", name), fields.get("flags", "")
    told = {"amx_bf16": "AMX bf16", "avx512_bf16": "AVX-512 bf16", "avx512f": "AVX-512"}
    best = next((words for flag, words in told.items() if flag in flags.split()), None)
    return f"{name} ({best})" if best else name


def _clock() -> str:
    clock = time.get_clock_info("perf_counter")
    text = f"{clock.implementation}, {clock.resolution * 1e9:.0f} ns"
    with contextlib.suppress(OSError):
        source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
        text += f", from {source.read_text().strip()}"
    return text
