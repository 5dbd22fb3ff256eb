"""Check and measure lmhead on a GPU, in under four minutes: `make gpu-check`.

It runs as it lies in a checkout, with any Python that has torch >= 2.11, Triton >= 3.6 and pytest;
nothing is installed or fetched.  In the order of time:

1. the tests marked `gpu`, and the compilation of all candidates, in processes side by side;
2. the ceilings: what this machine copies, reads and multiplies at best;
3. the GEMM for DeepSeek-V4-Pro's shard at 8 ranks, every candidate, against cuBLAS;
4. reassembly against permute + reshape and against a plain copy of the same bytes.

Each is a job in a process of its own, so that no error of one can reach another's results, and
whoever comes first may spend what time there is; what is left out is named.  `--seconds` bounds the
whole.  How things are timed is said in `lmhead.bench.gpu_sections` and `lmhead.bench.gpu_probes`.

It leaves two files: a JSON with everything, and beside it the measured configs as a table, which
`--merge` adds to the tables that lmhead ships (`lmhead/configs/<gpu>.json`): measured entries stand
beside the modelled ones and are preferred.  Without a GPU it says so and ends well; `--rehearse`
then goes through the same steps in Triton's interpreter, on tiny shapes.

Exit status: 0, also where time was short; 1 where a test failed or a section broke.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if (ROOT / "pyproject.toml").is_file() and str(ROOT) not in sys.path:  # a checkout
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from lmhead import measure, paths, tables  # noqa: E402
from lmhead.bench import gpu_report, gpu_sections  # noqa: E402
from lmhead.bench.gpu_sections import COLLECTED, FULL, REHEARSAL  # noqa: E402
from lmhead.bench.machine import said as _said  # noqa: E402
from lmhead.bench.machine import software  # noqa: E402
from lmhead.bench.supervise import (  # noqa: E402
    FAILED,
    FOUND,
    LEFT,
    NO_TIME,
    STARTED,
    STOPPED,
    Budget,
    Job,
    Journal,
    Record,
    supervise,
    work_through,
)

# Seconds of the whole, and shares of it: the tests and the compiler, side by side, may take this
# much; what they leave, the ceilings; and so on.  The last may take all that is left.
SECONDS = 220.0
SHARES = {"prepare": 0.42, "ceilings": 0.14, "gemm": 0.36, "reassemble": 1.0}
FINISH_S = 6.0  # kept for the report
LEAST_S = 8.0  # a job that is given less would only import torch
TEST_PARTS = 4
# What nvidia-smi is asked for: the driver, and what the clocks were at.
SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw")


@dataclass(frozen=True)
class Stage:
    """Jobs that run side by side, and the share of the whole that they may take."""

    name: str
    jobs: Sequence[Job]


def run_stages(
    stages: Sequence[Stage],
    budget: Budget,
    start: Callable[[Sequence[Job], float], Mapping[str, str]],
    say: Callable[[str], None],
) -> tuple[dict[str, str], dict[str, str]]:
    """Each stage in its turn with what the budget grants it.  Jobs that broke, and those that were
    left out or cut short, with the reasons; an error in starting a stage breaks that stage alone.
    """
    broken: dict[str, str] = {}
    short: dict[str, str] = {}
    for stage in stages:
        seconds = budget.grant(budget.total * SHARES[stage.name], keep=FINISH_S, least=LEAST_S)
        say(f"{budget.spent:5.0f} s  {stage.name}: up to {seconds:.0f} s")
        try:
            ended = start(stage.jobs, seconds)
        except Exception as error:  # the other stages must not miss their turn
            ended = {job.name: f"{type(error).__name__}: {error}" for job in stage.jobs}
        for name, why in ended.items():
            if why:
                (short if why == NO_TIME else broken)[name] = why
    return broken, short


def stages_of(folder: Path, cores: int, rehearse: bool) -> list[Stage]:
    def job(section: str, part: int = 0, parts: int = 1) -> Job:
        name = f"{section}-{part}" if parts > 1 else section
        command = [sys.executable, str(Path(__file__).resolve()), "--child", section]
        command += ["--part", str(part), str(parts), "--folder", str(folder)]
        command += ["--rehearse"] if rehearse else []
        return Job(name, command, Journal(folder / f"{name}.jsonl"))

    parts = 2 if rehearse else max(2, min(TEST_PARTS, cores // 2))
    compilers = 2 if rehearse else max(2, cores - parts)
    tests = [job("tests", part, parts) for part in range(parts)]
    compiling = [job("prepare", part, compilers) for part in range(compilers)]
    return [
        Stage("prepare", [*tests, *compiling]),
        *(Stage(name, [job(name)]) for name in ("ceilings", "gemm", "reassemble")),
    ]


def child(arguments: argparse.Namespace) -> None:
    """One job, in this process."""
    deadline = time.monotonic() + arguments.seconds
    section, (part, parts) = arguments.child, arguments.part
    plan = REHEARSAL if arguments.rehearse else FULL
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    name = f"{section}-{part}" if parts > 1 else section
    journal = Journal(arguments.folder / f"{name}.jsonl")
    if section == "tests":
        gpu_sections.gpu_tests(ROOT, journal, part, parts, device)
        return
    if section == "prepare":
        items = gpu_sections.prepare(plan, device, part, parts)
    elif section == "ceilings":
        items = {"smi before": smi, **gpu_sections.ceilings(plan, device)}
        items = {"gpu": lambda: describe(device), **items, "smi after": smi}
    else:
        cases = gpu_sections.gemm_cases if section == "gemm" else gpu_sections.copy_cases
        prepared = merged(arguments.folder, "prepare")
        items = gpu_sections.measuring(cases(plan), plan, device, prepared)
    work_through(items, journal, deadline, usable=lambda: measure.usable(device))


def merged(folder: Path, section: str) -> dict[str, Record]:
    """What the jobs of a section have written, taken together."""
    found: dict[str, Record] = {}
    for path in sorted(folder.glob(f"{section}*.jsonl")):
        found |= Journal(path).read()
    return found


# What is said of the machine.


def describe(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"gpu": f"none: {platform.machine()}, Triton's interpreter", "sms": 0}
    found = torch.cuda.get_device_properties(device)
    return {
        "gpu": found.name,
        "sms": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "memory_bytes": found.total_memory,
        "capability": list(torch.cuda.get_device_capability(device)),
        "cuda": torch.version.cuda,
        "driver": smi().get("driver_version"),
    }


def smi() -> dict[str, str]:
    """The driver's own figures for the first GPU, where there is the tool that tells them."""
    said = _said(["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"])
    values = [] if said is None else said.split(", ")
    return dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else {}


# What was found.


def collect(folder: Path) -> dict[str, Any]:
    """The journals of all jobs, as the JSON has them."""
    ceilings = merged(folder, "ceilings")
    results: dict[str, Any] = {"tests": _tests(merged(folder, "tests"))}
    results["ceilings"] = {
        item: told.value
        for item, told in ceilings.items()
        if told.state == FOUND and isinstance(told.value, float)
    }
    gpu = ceilings.get("gpu", Record(LEFT))
    results["machine"] = dict(gpu.value) if gpu.state == FOUND else {}
    results["machine"]["smi"] = {
        item.removeprefix("smi "): told.value
        for item, told in ceilings.items()
        if item.startswith("smi ") and told.state == FOUND
    }
    prepared = merged(folder, "prepare").items()
    results["prepared"] = {
        "found": sum(told.state == FOUND for _, told in prepared),
        "left_out": sum(told.state in (LEFT, STARTED) for _, told in prepared),
        "failed": {item: told.value for item, told in prepared if told.state == FAILED},
        "seconds": {item: told.value for item, told in prepared if told.state == FOUND},
    }
    left_out: dict[str, str] = {}
    broken: dict[str, str] = {}
    for section in ("ceilings", "gemm", "reassemble"):
        for item, told in merged(folder, section).items():
            if told.state == FAILED:
                broken[item] = str(told.value)
            elif told.state != FOUND:
                left_out[item] = str(told.value or NO_TIME)
        if section != "ceilings":
            records = merged(folder, section).values()
            results[section] = [told.value for told in records if told.state == FOUND]
            for result in results[section]:
                least = gpu_sections.floor(result, results["ceilings"])
                result["floor_us"], result["floor_is"] = least
    return results | {"left_out": left_out, "broken": broken}


def _tests(found: Mapping[str, Record]) -> dict[str, Any]:
    tests: dict[str, Any] = {
        "passed": 0,
        "failed": [],
        "skipped": [],
        "left_out": [],
        "stopped": [],
    }
    for name, told in found.items():
        if name.startswith(COLLECTED):
            tests["left_out"] += [name for name in told.value if name not in found]
            continue
        value = told.value if told.state == FOUND else {"outcome": "failed", "text": told.value}
        if told.state in (LEFT, STARTED):
            tests["left_out"].append(name)
            if told.value == STOPPED:
                tests["stopped"].append(name)
        elif value["outcome"] == "passed":
            tests["passed"] += 1
        else:
            tests[value["outcome"]].append({"name": name, "text": value["text"]})
    return tests


def measured_table(results: Mapping[str, Any]) -> tables.Table | None:
    """The measured entries of a check; of two for one bucket, the one with more rows."""
    found: tables.Table | None = None
    for section in ("gemm", "reassemble"):
        for result in sorted(results.get(section, []), key=lambda r: r["shape"]["rows"]):
            if "table" in result:
                table = tables.parse(result["table"])
                found = table if found is None else found.merged(table)
    return found


def merge(path: Path, folder: Path = tables.SHIPPED) -> str:
    """Add the measured entries of the table at `path` to the shipped one of its device; what was
    done, in words.
    """
    new = tables.parse(path.read_text())
    for key in list(new.entries):
        measured = {o: entry for o, entry in new.entries[key].items() if o == "measured"}
        new.entries[key] = measured
    target = folder / f"{new.device}.json"
    there = tables.Table(new.device)
    if target.is_file():
        there = tables.parse(target.read_text(), new.device)
    folder.mkdir(parents=True, exist_ok=True)
    both = there.merged(new)
    tables.write(target, both)
    return f"{len(new)} measured entries merged into {target}, which now has {len(both)}"


def finish(results: Mapping[str, Any], path: Path) -> None:
    """Write the JSON and the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    with contextlib.suppress(ValueError):
        table = measured_table(results)
        if table is not None:
            tables.write(path.with_name(f"{path.stem}-table.json"), table)


# The command.


def check(seconds: float, path: Path, rehearse: bool) -> int:
    budget = Budget(seconds)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), environment.get("PYTHONPATH")) if part
    )
    # Tests compute their truths on the CPU, side by side with compilers.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // TEST_PARTS)))
    if rehearse:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    results: dict[str, Any] = {"format": 1, "budget_s": seconds, "broken": {}, "left_out": {}}
    with tempfile.TemporaryDirectory(prefix="lmhead-gpu-check-") as name:
        folder = Path(name)
        broken: dict[str, str] = {}
        short: dict[str, str] = {}
        stages = stages_of(folder, _cores(), rehearse)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            broken, short = run_stages(
                stages,
                budget,
                lambda jobs, granted: supervise(
                    jobs, granted, environment=environment, folder=ROOT
                ),
                lambda text: print(text, file=sys.stderr, flush=True),
            )
        finally:  # an interrupt too leaves what there is
            results |= collect(folder)
            results["machine"] |= software()
            results["broken"] |= broken
            results["left_out"] |= short
            results["spent_s"] = round(budget.spent, 1)
            finish(results, path)
            print(gpu_report.render(results), end="", flush=True)
            print(f"written to {path}", flush=True)
    return 1 if gpu_report.problems(results) else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


def _default_path() -> Path:
    return paths.path(os.environ.get("OUT") or ".") / "gpu-check.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Check and measure lmhead on a GPU."
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for the whole (default %(default)s)"
    )
    parser.add_argument(
        "--json",
        type=paths.path,
        default=None,
        help="where to write (gpu-check.json, under $OUT if set)",
    )
    parser.add_argument(
        "--merge", type=paths.path, metavar="TABLE", help="add a written table to the shipped ones"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny shapes in Triton's interpreter, on a CPU"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=paths.path, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    if asked.child:
        child(asked)
        return 0
    if asked.merge:
        print(merge(asked.merge))
        return 0
    if not asked.rehearse and not torch.cuda.is_available():
        print("gpu-check: there is no CUDA device here, so nothing was run")
        return 0
    try:
        return check(asked.seconds, asked.json or _default_path(), asked.rehearse)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
