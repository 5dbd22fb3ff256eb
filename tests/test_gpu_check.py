"""`make gpu-check` where there is no GPU: all of it but the CUDA calls."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmhead import tables
from lmhead.bench import gpu_check, gpu_report, gpu_sections, supervise
from lmhead.bench.gpu_sections import FULL, REHEARSAL
from lmhead.bench.supervise import FAILED, FOUND, LEFT, NO_TIME, Budget, Job, Journal
from lmhead.devices import slug
from lmhead.kernels.config import LIBRARY, GemmConfig, ReassembleConfig

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


class Time:
    """A clock that goes on only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# The command.


def test_without_a_gpu_it_says_so_in_one_line_and_ends_well(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu_check.py")],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "gpu-check: there is no CUDA device here, so nothing was run"
    ]
    assert not list(tmp_path.glob("*.json"))


def test_it_writes_into_out_where_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert gpu_check._default_path() == Path("gpu-check.json")
    monkeypatch.setenv("OUT", "/somewhere")
    assert gpu_check._default_path() == Path("/somewhere/gpu-check.json")


# The budget.


def test_a_budget_is_spent_by_who_comes_first() -> None:
    time = Time()
    budget = Budget(100.0, time)
    assert budget.grant(40.0) == 40.0
    time.now += 70.0
    assert budget.spent == 70.0
    assert budget.grant(40.0) == 30.0
    assert budget.grant(40.0, keep=10.0) == 20.0
    assert budget.grant(40.0, keep=10.0, least=25.0) == 0.0
    time.now += 70.0
    assert budget.grant(40.0) == 0.0


def test_stages_take_their_shares_and_what_is_late_is_left_out() -> None:
    time, given = Time(), {}
    names = ("prepare", "ceilings", "gemm", "reassemble")

    def start(jobs: Sequence[Job], seconds: float) -> Mapping[str, str]:
        (job,) = jobs
        given[job.name] = seconds
        time.now += {"ceilings": 30.0}.get(job.name, seconds)  # one ends early
        if job.name == "ceilings":
            raise OSError("no more processes")
        return {job.name: "" if seconds else NO_TIME}

    stages = [gpu_check.Stage(n, [Job(n, [], Journal(Path(n)))]) for n in names]
    broken, short = gpu_check.run_stages(stages, Budget(200.0, time), start, lambda _: None)
    assert given["prepare"] == pytest.approx(200 * gpu_check.SHARES["prepare"])
    assert given["reassemble"] == pytest.approx(
        200 - given["prepare"] - 30 - given["gemm"] - gpu_check.FINISH_S
    )
    assert broken == {"ceilings": "OSError: no more processes"} and not short

    late = Budget(200.0, time)
    time.now += 200 - gpu_check.FINISH_S - gpu_check.LEAST_S + 1
    broken, short = gpu_check.run_stages(stages, late, start, lambda _: None)
    assert set(short) == {"prepare", "gemm", "reassemble"} and set(short.values()) == {NO_TIME}


def test_the_jobs_use_the_cores_there_are(tmp_path: Path) -> None:
    stages = gpu_check.stages_of(tmp_path, 16, rehearse=False)
    assert [stage.name for stage in stages] == list(gpu_check.SHARES)
    names = [job.name for job in stages[0].jobs]
    assert len(names) == 16 and sum(name.startswith("tests") for name in names) == 4
    assert len(gpu_check.stages_of(tmp_path, 1, rehearse=False)[0].jobs) == 4
    paths = [job.journal.path for stage in stages for job in stage.jobs]
    assert len(set(paths)) == len(paths)


# Jobs.


def job(tmp_path: Path, name: str, code: str) -> Job:
    """A job that works through `items`, without importing torch."""
    source = (ROOT / "bench" / "supervise.py").as_posix()
    path = tmp_path / f"{name}.jsonl"
    head = f"""
        import importlib.util, os, sys, time
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("supervise", {source!r})
        supervise = importlib.util.module_from_spec(spec)
        sys.modules["supervise"] = supervise
        spec.loader.exec_module(supervise)
        journal = supervise.Journal(Path({str(path)!r}))
        deadline = time.monotonic() + float(sys.argv[-1])
        def fail(): raise ValueError("wrong\\nby far")
        """
    text = textwrap.dedent(head) + textwrap.dedent(code)
    return Job(name, [sys.executable, "-S", "-c", text], Journal(path))


def states(job: Job) -> dict[str, str]:
    return {item: told.state for item, told in job.journal.read().items()}


def test_a_job_that_dies_or_hangs_loses_one_item_and_no_other_job_any(tmp_path: Path) -> None:
    good = job(
        tmp_path,
        "good",
        "supervise.work_through({'a': lambda: 1, 'b': fail, 'c': lambda: 3}, journal, deadline)",
    )
    dies = job(
        tmp_path,
        "dies",
        """
        items = {"a": lambda: 1, "b": lambda: os.kill(os.getpid(), 11), "c": lambda: 3}
        supervise.work_through(items, journal, deadline)
        """,
    )
    lost = job(
        tmp_path,
        "lost",
        """
        items = {"a": lambda: 1, "b": fail, "c": lambda: 3}
        supervise.work_through(items, journal, deadline, usable=lambda: False)
        """,
    )
    broken = job(tmp_path, "broken", "print('no such library'); sys.exit(3)")
    ended = supervise.supervise([good, dies, lost, broken], 60.0)
    assert ended == {
        "good": "",
        "dies": "",
        "lost": "",
        "broken": "exit status 3: no such library",
    }
    wanted = {"a": FOUND, "b": FAILED, "c": FOUND}
    assert states(good) == states(dies) == states(lost) == wanted
    assert states(broken) == {}
    assert good.journal.read()["b"].value == "ValueError: wrong"
    assert dies.journal.read()["b"].value.startswith("exit status -11")


def test_a_job_that_hangs_is_stopped_and_what_it_left_is_known(tmp_path: Path) -> None:
    hangs = job(
        tmp_path,
        "hangs",
        """
        items = {"a": lambda: 1, "b": lambda: time.sleep(60), "c": lambda: 3}
        supervise.work_through(items, journal, deadline)
        """,
    )
    assert supervise.supervise([hangs], 1.5) == {"hangs": NO_TIME}
    assert states(hangs) == {"a": FOUND, "b": LEFT, "c": LEFT}
    assert supervise.supervise([hangs], 0.0) == {"hangs": NO_TIME}


def test_an_interrupt_stops_every_job(tmp_path: Path) -> None:
    hangs = job(tmp_path, "hangs", "time.sleep(60)")

    def clock() -> float:
        if hangs.journal.path.with_suffix(".log").exists():
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        supervise.supervise([hangs], 60.0, clock=clock)


def test_what_nvidia_smi_says_is_kept_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "580.1, 345 MHz, 1980 MHz, 2619 MHz, 75.20 W"
    monkeypatch.setattr(gpu_check, "_said", lambda command: told)
    assert gpu_check.smi()["driver_version"] == "580.1"
    assert gpu_check.smi()["power.draw"] == "75.20 W"
    monkeypatch.setattr(gpu_check, "_said", lambda command: None)
    assert gpu_check.smi() == {}


def test_items_past_the_deadline_are_not_started(tmp_path: Path) -> None:
    time, journal, ran = Time(), Journal(tmp_path / "j.jsonl"), []

    def take(name: str) -> Any:
        def action() -> str:
            ran.append(name)
            time.now += 10.0
            return name

        return action

    items = {name: take(name) for name in "abc"}
    supervise.work_through(items, journal, 115.0, clock=time)
    assert ran == ["a", "b"] and journal.read()["c"].state == LEFT
    supervise.work_through(items, journal, 1000.0, clock=time)  # what has ended is not repeated
    assert ran == ["a", "b", "c"]
    journal.path.write_text(journal.path.read_text() + '{"item": "cut sh')
    assert set(journal.read()) == {"a", "b", "c"}


# Sections, on the CPU.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The journals of a rehearsal, all sections in this process."""
    path = tmp_path_factory.mktemp("journals")
    for section in ("prepare", "ceilings", "gemm", "reassemble"):
        arguments = ["--child", section, "--folder", str(path), "--seconds", "100", "--rehearse"]
        parts = 2 if section == "prepare" else 1
        for part in range(parts):
            assert gpu_check.main([*arguments, "--part", str(part), str(parts)]) == 0
    yield path


def test_a_rehearsal_finds_everything(folder: Path) -> None:
    results = gpu_check.collect(folder)
    assert results["left_out"] == {} and results["broken"] == {}
    assert set(results["ceilings"]) == {
        "copy_TBps",
        "read_TBps",
        "bf16_TFLOPps",
        "node_us",
        "l2_copy_TBps",
        "l2_read_TBps",
    }
    prepared = results["prepared"]
    assert prepared["found"] > 5 and not prepared["failed"] and not prepared["left_out"]
    assert [r["name"] for r in results["gemm"]] == ["gemm T=5 bf16", "gemm T=5 fp32"]
    assert {r["out"] for r in results["reassemble"]} == {"in place", "to fp32", "padded"}
    for result in results["gemm"] + results["reassemble"]:
        peers = {"cublas"} if "hidden" in result["shape"] else {"permute", "copy"}
        assert set(result["us"]) == {"ours", "again", "chosen"} | peers
        assert result["ours"] in result["tuning"] and result["failed"] == {}
        assert result["floor_us"] >= 0 and result["sets"] > 1
        assert "table" not in result  # a CPU's times are no tuning
    assert "library" in results["gemm"][0]["tuning"]
    assert all(len(line) < 100 for line in gpu_report.render(results).splitlines())


def test_candidates_that_failed_or_were_late_are_not_measured() -> None:
    (case, *_) = gpu_sections.gemm_cases(REHEARSAL)
    good, bad, late = (GemmConfig(16, v, 64, 4, 2, "bulk") for v in (64, 128, 256))
    told = {
        f"{case.name} | {good}": supervise.Record(FOUND, 1.0),
        f"{case.name} | {bad}": supervise.Record(FAILED, "OutOfResources: shared memory"),
    }
    found, out = gpu_sections.ready(case, [good, LIBRARY, bad, late], told)
    assert found == [good, LIBRARY]
    assert out == {str(bad): "OutOfResources: shared memory", str(late): f"left out: {NO_TIME}"}


def test_a_wrong_kernel_is_never_timed_with_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in gpu_sections.copy_cases(REHEARSAL) if c.out == "padded")
    buffers = gpu_sections.Buffers(case, REHEARSAL, CPU, sets=1)
    config = ReassembleConfig("copy", 1, 8, 1)
    gpu_sections._verify_padded(buffers, [config, None])
    monkeypatch.setattr(
        gpu_sections.reassemble_kernels, "reassemble_into", lambda received, out, config: out
    )
    with pytest.raises(RuntimeError, match="elements differ"):
        gpu_sections._verify_padded(buffers, [config])


def test_floors_are_those_of_the_ceilings() -> None:
    found = {case.name: case for case in gpu_sections.gemm_cases(FULL)}
    ceilings = {"copy_TBps": 4.0, "read_TBps": 4.5, "bf16_TFLOPps": 800.0}
    shape = {"rows": 8, "shard": 16160, "hidden": 7168}
    moved = 2 * (8 + 16160) * 7168 + 2 * 8 * 16160
    us, limit = gpu_sections.floor({"shape": shape, "bytes": moved}, ceilings)
    assert us == pytest.approx(moved / 4.5e12 * 1e6) and limit == "mem"
    us, limit = gpu_sections.floor({"shape": shape | {"rows": 512}, "bytes": moved}, ceilings)
    assert us == pytest.approx(2 * 512 * 16160 * 7168 / 800e12 * 1e6) and limit == "math"
    copied = {"shape": {"ranks": 8, "rows": 36, "shard": 16160}, "bytes": 4e6}
    assert gpu_sections.floor(copied, ceilings)[0] == pytest.approx(1.0)
    assert gpu_sections.floor(copied, {}) == gpu_sections.floor({"shape": shape}, {}) == (None, "")
    assert found["gemm T=8 bf16"].problem.key.rows == 16  # the bucket that it serves


# Tests of tests.


def outcome(when: str, word: str, text: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        when=when,
        duration=0.1,
        failed=word == "failed",
        skipped=word == "skipped",
        longrepr=text,
    )


def test_outcomes_of_tests_are_kept_as_they_come(tmp_path: Path) -> None:
    recorders = []
    for part in range(2):
        journal = Journal(tmp_path / f"tests-{part}.jsonl")
        recorders.append(gpu_sections.Recorder(journal, part, 2))
        items = [SimpleNamespace(nodeid=name) for name in ("a", "b", "c", "d", "e", "f")]
        session = SimpleNamespace(items=items)
        recorders[part].pytest_collection_finish(session)
        assert [item.nodeid for item in session.items] == [["a", "c", "e"], ["b", "d", "f"]][part]
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="assert 1 == 2\n +  where"))
    for part, name, reports in (
        (0, "a", [outcome("setup", ""), outcome("call", "")]),
        (0, "c", [outcome("setup", ""), outcome("call", "failed", crash)]),
        (1, "b", [outcome("setup", "skipped", ("f", 1, "Skipped: no device"))]),
        (1, "d", [outcome("setup", "failed", "fixture broke\nhere")]),
    ):
        recorders[part].pytest_runtest_logstart(name)
        for report in reports:
            recorders[part].pytest_runtest_logreport(report)
        recorders[part].pytest_runtest_logfinish(name)
    recorders[1].pytest_runtest_logstart("f")
    recorders[1].pytest_collectreport(
        SimpleNamespace(failed=True, nodeid="tests/x.py", longrepr="E\nE  no module")
    )
    found = gpu_check._tests(gpu_check.merged(tmp_path, "tests"))
    assert found["passed"] == 1
    assert {test["name"]: test["text"] for test in found["failed"]} == {
        "c": "assert 1 == 2",
        "d": "fixture broke",
        "tests/x.py": "E  no module",
    }
    assert found["skipped"] == [{"name": "b", "text": "Skipped: no device"}]
    assert sorted(found["left_out"]) == ["e", "f"]


def test_a_lost_device_ends_the_job_after_the_test_that_lost_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "tests.jsonl")
    recorder = gpu_sections.Recorder(journal, 0, 1, lambda: False)
    recorder.pytest_runtest_logstart("a")
    recorder.pytest_runtest_logreport(outcome("call", ""))
    recorder.pytest_runtest_logfinish("a")  # passed: nobody asks
    recorder.pytest_runtest_logstart("b")
    recorder.pytest_runtest_logreport(outcome("call", "failed", "illegal memory access"))
    with pytest.raises(pytest.exit.Exception) as caught:
        recorder.pytest_runtest_logfinish("b")
    assert caught.value.returncode == supervise.LOST
    session = SimpleNamespace(items=[SimpleNamespace(nodeid=name) for name in ("a", "b", "c")])
    recorder.pytest_collection_finish(session)  # the next process
    assert [item.nodeid for item in session.items] == ["c"]


# The report.

ENTRY = tables.Entry(GemmConfig(256, 128, 64, 8, 4, "bulk", 32), "measured", 61.25, {"date": "d"})


def gemm_result(rows: int, config: GemmConfig = ENTRY.config) -> dict[str, Any]:  # type: ignore[assignment]
    (case,) = (c for c in gpu_sections.gemm_cases(FULL) if c.name == f"gemm T={rows} bf16")
    table = tables.Table("h200")
    table.add(case.problem.key, tables.Entry(config, "measured", 61.25, {"date": "d"}))
    return {
        "name": case.name,
        "shape": vars(case.problem.shape),
        "out": "bf16",
        "ours": "bulk t256+32 v128 h64 warps8 stages4 splits2",
        "chosen": "bulk t256 v128 h64 warps8 stages4",
        "chosen_source": "modelled (shipped)",
        "model_us": 73.68,
        "failed": {"bulk t256 v128 h64 warps8 stages4": "relative error 1.00e+00"},
        "us": {"ours": 1061.25, "again": 1062.5, "cublas": 1070.0, "chosen": 1065.0},
        "floor_us": 1054.2,
        "floor_is": "mem",
        "table": tables.dump(table),
    }


def synthetic() -> dict[str, Any]:
    copy = {
        "shape": {"ranks": 8, "rows": 512, "shard": 16160},
        "out": "in place",
        "ours": "band rows4096 s16 warps16",
        "chosen": "cycle rows16 s256 warps4",
        "us": {"ours": 1070.1, "again": 1070.2, "permute": 1090.3, "copy": 1060.4},
        "floor_us": None,
    }
    return {
        "machine": {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "date": "today"}
        | {"smi": {"after": {"driver_version": "580", "clocks.sm": "1980 MHz"}}},
        "budget_s": 220.0,
        "spent_s": 180.2,
        "tests": {
            "passed": 90,
            "failed": [{"name": "tests/test_gpu.py::" + "x" * 200, "text": "assert False"}],
            "skipped": [{"name": "b", "text": "no NVLink"}],
            "left_out": ["c"],
            "stopped": ["tests/test_gpu.py::hangs"],
        },
        "ceilings": {"copy_TBps": 4.3, "bf16_TFLOPps": 790.0, "node_us": 1.4},
        "prepared": {"found": 300, "left_out": 2, "failed": {"gemm | x": "OutOfResources: y"}},
        "gemm": [gemm_result(288), gemm_result(8)],
        "reassemble": [copy],
        "left_out": {"reassemble B=2 in place": NO_TIME},
        "broken": {"reassemble": "exit status -9: killed"},
    }


def test_the_report_names_what_matters_within_100_columns() -> None:
    text = gpu_report.render(synthetic())
    lines = text.splitlines()
    assert all(len(line) < 100 for line in lines) and len(text) < 12000
    for words in (
        "NVIDIA H200, driver 580, torch 2.11.0",
        "180 of 220 s",
        "90 passed, 1 failed, 1 skipped, 1 left out",
        "assert False",
        "STOPPED tests/test_gpu.py::hangs",
        "after the ceilings: clocks.sm 1980 MHz",
        "copy 4.30 TB/s, bf16 790 TFLOP/s, graph node 1.40 us",
        "300 compiled and run, 1 failed, 2 left out",
        "S = 16160, H = 7168",
        "which was not measured: relative error 1.00e+00",
        "left out: reassemble B=2 in place",
        "PROBLEM reassemble: exit status -9: killed",
        "differs by up to 0.1 %",
    ):
        assert words in text, words
    rows = [line.split() for line in lines if line.startswith(("8 bf16", "288 bf16"))]
    assert [row[0] for row in rows] == ["8", "288"]
    assert rows[1][2:] == [
        *("1061.2", "1070.0", "1065.0", "73.7", "1054.2", "mem", "1.01", "1.01"),
        *("t256+32", "v128", "h64", "w8", "s4", "split2"),
    ]
    (row,) = (line for line in lines if line.startswith("512 in place"))
    assert row.endswith("band rows4096 s16 warps16")
    assert gpu_report.problems(synthetic())


def test_an_empty_report_is_one_too() -> None:
    text = gpu_report.render({})
    assert "tests      not run" in text and "GEMM: nothing measured" in text
    assert gpu_report.problems({}) == []


# The files.


def test_a_check_leaves_its_json_and_a_table_that_merges(tmp_path: Path) -> None:
    results = synthetic()
    gpu_check.finish(results, tmp_path / "new" / "gpu-check.json")
    assert json.loads((tmp_path / "new" / "gpu-check.json").read_text()) == json.loads(
        json.dumps(results)
    )
    path = tmp_path / "new" / "gpu-check-table.json"
    keys = [case.problem.key for case in gpu_sections.gemm_cases(FULL)[:2]]
    measured = tables.parse(path.read_text(), "h200")
    assert set(measured.entries) == set(keys)

    # Into a table that has a modelled entry for one of them, and one that is no concern of ours.
    shipped = tables.Table("h200")
    shipped.add(keys[0], tables.Entry(LIBRARY, "modelled", 80.0))
    other = tables.Key("gemm", 64, 0, 128, 16, 16, "graph", 16)
    shipped.add(other, tables.Entry(LIBRARY, "measured", 1.0))
    folder = tmp_path / "configs"
    folder.mkdir()
    tables.write(folder / "h200.json", shipped)
    said = gpu_check.merge(path, folder)
    assert said.startswith("2 measured entries merged into") and said.endswith("which now has 4")
    both = tables.parse((folder / "h200.json").read_text(), "h200")
    assert both.entries[keys[0]] == {
        "modelled": shipped.entries[keys[0]]["modelled"],
        "measured": ENTRY,
    }
    assert both.entries[other] == shipped.entries[other]
    gpu_check.merge(path, tmp_path / "fresh")  # a device without a table so far
    assert tables.parse((tmp_path / "fresh" / "h200.json").read_text()).entries == measured.entries


def test_of_two_measurements_of_a_bucket_the_larger_is_kept() -> None:
    small, large = (
        c
        for c in gpu_sections.copy_cases(FULL)
        if c.name.endswith(("=36 in place", "=64 in place"))
    )
    assert small.problem.key == large.problem.key
    results = []
    for case, us in ((large, 9.0), (small, 6.0)):
        entry = tables.Entry(ReassembleConfig("band", 512, 32, 8), "measured", us)
        table = gpu_sections._table(case, entry, "h200")
        results.append({"shape": vars(case.problem.shape), "table": tables.dump(table)})
    found = gpu_check.measured_table({"reassemble": results})
    assert found is not None
    entry = found.entries[large.problem.key]["measured"]
    assert entry.us == 9.0 and "measured_rows" not in entry.details


def test_an_entry_says_the_rows_it_was_measured_at() -> None:
    case = next(c for c in gpu_sections.gemm_cases(FULL) if c.name == "gemm T=8 bf16")
    table = gpu_sections._table(case, ENTRY, "h200")
    assert table.entries[case.problem.key]["measured"].details == {"date": "d", "measured_rows": 8}


def test_a_cpu_is_never_a_tuned_device() -> None:
    assert (
        slug(CPU) == "cpu" and gpu_check.measured_table({"gemm": [{"shape": {"rows": 1}}]}) is None
    )
