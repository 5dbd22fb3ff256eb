"""What `bench/gpu_check.py` says at the end: one table, in plain text under 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WIDTH = 99
Results = Mapping[str, Any]


def render(results: Results) -> str:
    """The whole report; every part of it may be missing from `results`."""
    lines = [*_machine(results), *_tests(results), *_ceilings(results), *_compiled(results), ""]
    lines += _gemms(results) + [""] + _copies(results)
    lines += [""] + _left_out(results) + _verdict(results)
    return "\n".join(line[:WIDTH].rstrip() for line in lines) + "\n"


def problems(results: Results) -> list[str]:
    """What makes the check fail: failed tests and jobs that broke; never a want of time."""
    failed = results.get("tests", {}).get("failed", [])
    found = [f"test failed: {test['name']}" for test in failed]
    return found + [f"{name}: {why}" for name, why in results.get("broken", {}).items()]


def _machine(results: Results) -> list[str]:
    machine = results.get("machine", {})
    words = (
        ("gpu", ""),
        ("driver", "driver "),
        ("torch", "torch "),
        ("triton", "Triton "),
        ("python", "Python "),
    )
    parts = [prefix + str(machine[name]) for name, prefix in words if machine.get(name)]
    commit = machine.get("commit", "unknown")
    spent = f"{results.get('spent_s', 0):.0f} of {results.get('budget_s', 0):.0f} s"
    first = f"lmhead gpu-check, {machine.get('date', '')}, commit {commit}, {spent}"
    return [first, ", ".join(parts)] + [
        f"{when} the ceilings: "
        + ", ".join(f"{name} {value}" for name, value in told.items() if name != "driver_version")
        for when, told in machine.get("smi", {}).items()
        if told
    ]


def _tests(results: Results) -> list[str]:
    tests = results.get("tests")
    if tests is None:
        return ["tests      not run"]
    counts = [f"{tests['passed']} passed", f"{len(tests['failed'])} failed"]
    counts += [f"{len(tests['skipped'])} skipped", f"{len(tests['left_out'])} left out"]
    lines = ["tests      " + ", ".join(counts)]
    for test in tests["failed"]:
        lines += [f"  FAILED {_short(test['name'])}", f"         {test['text']}"]
    lines += [f"  STOPPED {_short(name)}" for name in tests["stopped"]]
    reasons = {test["text"] for test in tests["skipped"]}
    return lines + [f"  skipped: {reason}" for reason in sorted(reasons)]


def _short(name: str) -> str:
    return name if len(name) <= 88 else name[:42] + " .. " + name[-42:]


def _ceilings(results: Results) -> list[str]:
    found = results.get("ceilings", {})
    parts = [
        f"{text} {found[name]:.{digits}f} {unit}"
        for name, text, digits, unit in (
            ("copy_TBps", "copy", 2, "TB/s"),
            ("read_TBps", "read", 2, "TB/s"),
            ("l2_copy_TBps", "L2 copy", 2, "TB/s"),
            ("l2_read_TBps", "L2 read", 2, "TB/s"),
            ("bf16_TFLOPps", "bf16", 0, "TFLOP/s"),
            ("node_us", "graph node", 2, "us"),
        )
        if name in found
    ]
    lines = [", ".join(parts[:3]) or "not measured", ", ".join(parts[3:])]
    return ["ceilings   " + lines[0], *(" " * 11 + line for line in lines[1:] if line)]


def _compiled(results: Results) -> list[str]:
    told = results.get("prepared", {})
    failed = told.get("failed", {})
    lines = [
        f"candidates {told.get('found', 0)} compiled and run, {len(failed)} failed, "
        f"{told.get('left_out', 0)} left out"
    ]
    return lines + [f"  {item}: {why}" for item, why in list(failed.items())[:5]]


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(a: float | None, b: float | None) -> str:
    return "-" if not a or not b else f"{a / b:.2f}"


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Columns as wide as they must be: the first and the last flush left, the others right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(width) if i in (0, len(row) - 1) else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _gemms(results: Results) -> list[str]:
    found = results.get("gemm", [])
    if not found:
        return ["GEMM: nothing measured"]
    shape = found[0]["shape"]
    rows: list[tuple[str, ...]] = [
        ("T", "ours", "cuBLAS", "chosen", "model", "floor", "/floor", "cuBLAS/", "ours is")
    ]
    for result in sorted(found, key=lambda r: (r["out"], r["shape"]["rows"])):
        us, least = result["us"], result["floor_us"]
        ours, library = us.get("ours"), us.get("cublas")
        rows.append(
            (
                f"{result['shape']['rows']} {result['out']}",
                *(_number(us.get(name)) for name in ("ours", "cublas", "chosen")),
                _number(result["model_us"]),
                f"{_number(least)} {result['floor_is']}".rstrip(),
                _ratio(ours, least),
                _ratio(library, ours),
                _abridged(result["ours"]),
            )
        )
    lines = [f"GEMM, S = {shape['shard']}, H = {shape['hidden']}, bf16 operands; us a launch"]
    lines += columns(rows) + [_noise(found)]
    for result in found:
        if result["chosen"] != result["ours"]:
            lines.append(
                f"  T = {result['shape']['rows']} {result['out']}: chosen is {result['chosen']}, "
                f"{result['chosen_source']}"
            )
        why = result["failed"].get(result["chosen"])
        lines += [f"    which was not measured: {why}"] if why else []
    return lines


def _abridged(config: str | None) -> str:
    """A GEMM config's name as short as a column wants it."""
    words = {"bulk ": "", "warps": "w", "stages": "s", "splits": "split"}
    text = str(config)
    for word, short in words.items():
        text = text.replace(word, short)
    return text


def _copies(results: Results) -> list[str]:
    found = results.get("reassemble", [])
    if not found:
        return ["reassembly: nothing measured"]
    shape = found[0]["shape"]
    rows: list[tuple[str, ...]] = [
        ("B", "ours", "permute", "copy", "chosen", "floor", "permute/", "/copy", "ours is")
    ]
    for result in sorted(found, key=lambda r: (r["out"], r["shape"]["rows"])):
        us, ours = result["us"], result["us"].get("ours")
        rows.append(
            (
                f"{result['shape']['rows']} {result['out']}",
                *(_number(us.get(name)) for name in ("ours", "permute", "copy", "chosen")),
                _number(result["floor_us"]),
                _ratio(us.get("permute"), ours),
                _ratio(ours, us.get("copy")),
                str(result["ours"]),
            )
        )
    lines = [f"reassembly, N = {shape['ranks']}, S = {shape['shard']}, bf16 received; us a launch"]
    return lines + columns(rows) + [_noise(found)]


def _noise(found: Iterable[Results]) -> str:
    """How far the same config's two figures lie apart, at worst."""
    apart = [
        abs(us["again"] / us["ours"] - 1)
        for us in (result["us"] for result in found)
        if us.get("ours") and us.get("again")
    ]
    if not apart:
        return ""
    return f"noise: the same config timed twice differs by up to {100 * max(apart):.1f} %"


def _left_out(results: Results) -> list[str]:
    left = results.get("left_out", {})
    return [f"left out: {item} ({why})" for item, why in list(left.items())[:20]]


def _verdict(results: Results) -> list[str]:
    found = problems(results)
    return [f"PROBLEM {text}" for text in found] or ["no test failed, and no section broke"]
