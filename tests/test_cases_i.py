"""Published failures of tuners and their caches (I): what must happen here."""

from __future__ import annotations

import ast
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data import addresses, assert_same_bits, transposed
from data_head import collectives, raised, shard_of, whole
from data_tune import (
    BAND,
    BULK,
    BULK_WIDE,
    COPY,
    CPU,
    CYCLE,
    HIDDEN,
    LIBRARY,
    POINTER,
    SHARD,
    VOCAB,
    ToldClock,
    launches,
    said,
    table,
)
from ranks import pool
from triton.runtime.errors import OutOfResources

import lmhead
from lmhead import measure, tables, timing, tune
from lmhead.devices import DEVICES
from lmhead.kernels import gemm as gemm_kernels
from lmhead.kernels import reassemble as reassemble_kernels
from lmhead.kernels.config import (
    Arch,
    GemmConfig,
    GemmShape,
    ReassembleShape,
    default_gemm,
    default_reassemble,
    fits,
)
from lmhead.measure import Launch
from lmhead.tables import Entry, Table
from lmhead.tune import Build, Builds, Compiled
from lmhead.tune_ranks import require_a_place

ROOT = Path(__file__).resolve().parent.parent
WEIGHT = whole(VOCAB, HIDDEN, seed=1, dtype=torch.bfloat16)
HIDDEN_ROWS = whole(2, HIDDEN, seed=2, dtype=torch.bfloat16)
LOGITS = (HIDDEN_ROWS.float() @ WEIGHT.float().t()).bfloat16()
GEMM = tune.gemm_problem(GemmShape(2, VOCAB, HIDDEN, 2))
EAGER = dataclasses.replace(GEMM.key, mode="eager")
IN_PLACE = tune.reassemble_problem(3, 5, 7, 2)
DEFAULT = default_reassemble(ReassembleShape(3, 5, 7, 2), in_place=True)
BANDS = {DEFAULT: 3.0, BAND: 2.0, CYCLE: 1.0}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's tables are; retries do not wait, and tuning knows two candidates."""
    monkeypatch.setenv("LMHEAD_CONFIGS", str(tmp_path / "user"))
    monkeypatch.setattr(tables, "PAUSE_S", 0.0)
    monkeypatch.setattr(measure, "candidates", lambda *_: [BULK, LIBRARY])
    monkeypatch.setattr(measure, "MAX_SETS", 2)
    return tmp_path / "user"


def tuned(clock: measure.Clock | None = None) -> Table:
    clock = clock or ToldClock({BULK: 1.0, LIBRARY: 2.0})
    return measure.tune_device([GEMM], CPU, clock=clock, rounds=2)


def served(group: dist.ProcessGroup | None = None) -> tuple[str, torch.Tensor]:
    """Where a fresh head's config is from after warm-up, and its logits, on one rank."""
    head = lmhead.LMHead(WEIGHT, VOCAB, group, kernels="triton")
    return head.warmup(rows=2).configs[(2,)]["gemm"].source, head(HIDDEN_ROWS)


# I1 to I3: what is in place.


def moved_by(config: Any) -> Callable[[], torch.Tensor]:
    """The in-place reassembly of a user's tensor, N=3, B=5, V=21."""

    def call() -> torch.Tensor:
        users = addresses((3, 5, 7), torch.bfloat16, first=100)
        return reassemble_kernels.reassemble(users, config)

    return call


def test_i1_tuning_an_in_place_kernel_uses_buffers_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    users = addresses((3, 5, 7), torch.bfloat16, first=100)
    kept, want = users.clone(), transposed(users)
    touched = set()
    real = reassemble_kernels.launch_reassemble

    def launch(data: torch.Tensor, *rest: Any) -> None:
        touched.add(data.untyped_storage().data_ptr())
        real(data, *rest)

    monkeypatch.setattr(reassemble_kernels, "launch_reassemble", launch)
    clock = ToldClock(BANDS, runs=5)
    entry = measure.measure(IN_PLACE, CPU, clock=clock, configs=list(BANDS), rounds=5)
    assert entry is not None and entry.config == CYCLE and entry.details["failed"] == {}
    assert touched and users.untyped_storage().data_ptr() not in touched
    assert_same_bits(users, kept)
    assert_same_bits(reassemble_kernels.reassemble(users, entry.config), want)  # type: ignore[arg-type]


def _first_calls(rank: int, ranks: int, folder: str) -> tuple[bool, list[Any], list[Any]]:
    os.environ["LMHEAD_CONFIGS"] = folder
    head = lmhead.LMHead(shard_of(WEIGHT, ranks, rank), VOCAB, kernels="triton")
    head.warmup(rows=2)
    with launches() as first:
        one = head(HIDDEN_ROWS)
    with launches() as second:
        two = head(HIDDEN_ROWS)
    exact = torch.equal(one, LOGITS) and torch.equal(two, LOGITS)
    return exact, first, second


def test_i2_i3_the_first_call_is_as_right_as_the_second_and_launches_as_much(
    folder: Path,
) -> None:
    """There is no tuning call and there are no hooks: a call launches each kernel once."""
    folder.mkdir()
    tables.write(folder / "cpu.json", table(2, gemm=BULK, reassemble=CYCLE, copy=COPY))
    for exact, first, second in pool(2).run(_first_calls, str(folder)):
        assert exact
        assert first == second == [("gemm", BULK), ("reassemble", CYCLE)]
    for config in BANDS:
        assert_same_bits(moved_by(config)(), moved_by(config)())


def test_i3_a_run_while_tuning_is_a_launch_and_nothing_else() -> None:
    """One to verify, one for every run of the clock; and no kernel is tuned by triton.autotune,
    whose hooks would run for the tuning calls alone.
    """
    with launches() as seen:
        measure.measure(
            IN_PLACE, CPU, clock=ToldClock(BANDS, runs=5), configs=list(BANDS), rounds=5, sets=1
        )
    assert [seen.count(("reassemble", config)) for config in BANDS] == [6, 6, 6]
    for path in [*(ROOT / "kernels").glob("*.py"), *(ROOT / "lmhead").glob("*.py")]:
        names = {
            node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            for node in ast.walk(ast.parse(path.read_text()))
        }
        assert not names & {"autotune", "heuristics", "restore_value", "reset_to_zero"}


# I4: what fits one GPU and not another.

SMALL = Arch("small", 90, 98304, 0)
LARGE = GemmConfig(16, 128, 128, 4, 3, "bulk")  # 110592 bytes of tiles


def test_i4_a_config_that_does_not_fit_the_device_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = GEMM.shape
    assert isinstance(shape, GemmShape)
    assert fits(LARGE, DEVICES["h200"].arch, shape) and not fits(LARGE, SMALL, shape)
    monkeypatch.setattr(measure, "arch_of", lambda device: SMALL)
    real = gemm_kernels.launch_gemm

    def launch(hidden: Any, weight: Any, after: Any, out: Any, config: Any, scratch: Any) -> None:
        assert config != LARGE, "was run"
        if config == BULK:
            raise OutOfResources(131072, 98304, "shared memory")
        real(hidden, weight, after, out, config, scratch)

    monkeypatch.setattr(gemm_kernels, "launch_gemm", launch)
    clock = ToldClock({POINTER: 2.0, LIBRARY: 3.0})
    entry = measure.measure(
        GEMM, CPU, clock=clock, configs=[LARGE, BULK, LIBRARY, POINTER], rounds=2, sets=1
    )
    assert entry is not None and entry.config == POINTER
    assert list(entry.details["failed"]) == [str(LARGE), str(BULK)]
    assert entry.details["failed"][str(LARGE)] == "does not fit"
    assert "Required: 131072, Hardware limit: 98304" in entry.details["failed"][str(BULK)]
    # Nothing left: the default serves, which fits every device.
    with pytest.warns(RuntimeWarning, match="none of 2 configs could be used"):
        assert measure.measure(GEMM, CPU, clock=clock, configs=[LARGE, BULK], sets=1) is None


def test_i4_a_config_from_a_file_is_checked_again() -> None:
    shape, found = GEMM.shape, Table("small")
    assert isinstance(shape, GemmShape)
    found.add(GEMM.key, Entry(LARGE, "measured", 1.0))
    found.add(GEMM.key, Entry(BULK, "modelled", 2.0))
    found = tables.parse(tables.dump(found))
    large = DEVICES["h200"].arch
    assert tables.look_up(found, None, GEMM.key, large, shape).config == LARGE
    assert tables.look_up(found, None, GEMM.key, SMALL, shape).config == BULK
    del found.entries[GEMM.key]["modelled"]
    choice = tables.look_up(found, None, GEMM.key, SMALL, shape)
    assert choice.source == "default" and choice.config == default_gemm(shape, SMALL)


# I5 and I6: the file.


def unreadable(path: Path) -> None:
    """Where no permission is missing (root reads everything), the refusal is played."""
    tables.write(path, table(2, gemm=POINTER))
    path.chmod(0)


BROKEN = {
    "empty": lambda path: path.write_bytes(b""),
    "a brace": lambda path: path.write_bytes(b"{"),
    "no UTF-8": lambda path: path.write_bytes(b'{"format": "\xff\xfe"}'),
    "another type": lambda path: path.write_bytes(b"[1, 2]"),
    "another format": lambda path: path.write_text(
        tables.dump(Table("cpu")).replace('"format": 1', '"format": 99')
    ),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "a huge number": lambda path: path.write_text(
        tables.dump(table(2, gemm=BULK)).replace('"us": 1.0', '"us": 1' + "0" * 400)
    ),
    "a folder": lambda path: path.mkdir(),
    "no permission": unreadable,
}
# Of these the first may be in use by a newer lmhead, and nobody has seen what is in the others.
LEFT_ALONE = ("another format", "a folder", "no permission")


@pytest.mark.parametrize("kind", BROKEN)
def test_i5_a_broken_file_is_one_warning_and_a_fresh_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What could hold something of value is refused before tuning begins, and left as it is; what
    no lmhead can read is kept under another name, which the one warning gives.
    """
    folder.mkdir()
    path = folder / "cpu.json"
    BROKEN[kind](path)
    if kind == "no permission":
        real = Path.read_text

        def read_text(self: Path, *args: Any, **kwargs: Any) -> str:
            if self == path and not self.stat().st_mode & 0o400:
                raise PermissionError(errno.EACCES, "Permission denied", str(self))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.warns(RuntimeWarning) as caught:
        source, logits = served()
    (text,) = said(caught)
    assert str(path) in text and "is not used" in text and "lmhead tune" in text
    assert source == "default" and torch.equal(logits, LOGITS)
    if kind in LEFT_ALONE:
        before = path.stat()
        with pytest.raises(OSError, match="is not replaced") as refused:
            require_a_place(CPU)
        assert str(path) in str(refused.value) and "LMHEAD_CONFIGS" in str(refused.value)
        after = path.stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        return
    content = path.read_bytes()
    with pytest.warns(RuntimeWarning) as caught:
        require_a_place(CPU)
        tuned()
    (text,) = said(caught)
    kept = folder / "cpu.json.unreadable"
    assert str(kept) in text and kept.read_bytes() == content
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        source, logits = served()
    assert source == "measured (user)" and torch.equal(logits, LOGITS)


# Where the cache layer asks the system for something, by the name that it uses.
CALLS: dict[str, tuple[Any, str]] = {
    "read": (Path, "read_text"),
    "rename": (os, "replace"),
    "temporary file": (tempfile, "mkstemp"),
    "folder": (Path, "mkdir"),
    "lock": (fcntl, "flock"),
    "mode": (os, "chmod"),
    "sync": (os, "fsync"),
}
ERRORS = {name: getattr(errno, name) for name in ("EBUSY", "ESTALE", "ENOENT", "EIO")}


class Failing:
    """A call that fails so many times before it works; -1 for always."""

    def __init__(self, real: Any, error: int, times: int) -> None:
        self._real, self._error, self.left = real, error, times

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(self._error, os.strerror(self._error))
        return self._real(*args, **kwargs)

    def patched(self, owner: Any, name: str) -> Any:
        # As a plain function, so that it is bound where it is a method.
        return mock.patch.object(owner, name, lambda *args, **kwargs: self(*args, **kwargs))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("error", ERRORS)
def test_i6_a_shared_file_system_is_asked_again_and_then_done_without(
    folder: Path, call: str, error: str
) -> None:
    owner, name = CALLS[call]
    tables.save_user(table(2, gemm=POINTER))
    added = Table("cpu")
    added.add(EAGER, Entry(BULK, "measured", 1.0))

    # For a moment: nothing is lost, and nobody hears of it.
    failing = Failing(getattr(owner, name), ERRORS[error], 2)
    with failing.patched(owner, name), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert tables.save_user(added) == folder / "cpu.json"
        assert failing.left == 0
        assert len(tables.load_user("cpu") or ()) == 2

    # For good: one warning at most for each thing asked, the old file stays, and the head serves.
    failing = Failing(getattr(owner, name), ERRORS[error], -1)
    with failing.patched(owner, name), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        source, logits = served()
        assert tables.save_user(table(2, gemm=POINTER)) is None
    assert torch.equal(logits, LOGITS)
    assert source == ("default" if call == "read" else "measured (user)")
    # To serve, a file that is listed and cannot be found any more is as good as none.
    unserved = call == "read" and error != "ENOENT"
    assert len(said(caught)) == 1 + unserved
    assert len(tables.load_user("cpu") or ()) == 2
    assert sorted(os.listdir(folder)) == [".cpu.json.lock", "cpu.json"]


def test_i6_a_temporary_file_that_cannot_be_removed_fails_nothing(folder: Path) -> None:
    tables.save_user(table(2, gemm=POINTER))
    busy = OSError(errno.EBUSY, "Device or resource busy")
    with (
        mock.patch.object(os, "replace", side_effect=busy),
        mock.patch.object(os, "unlink", side_effect=busy),
        pytest.warns(RuntimeWarning, match="could not be written"),
    ):
        assert tables.save_user(table(3, gemm=POINTER)) is None
    assert tables.load_user("cpu") == table(2, gemm=POINTER)
    assert tables.save_user(table(3, gemm=POINTER)) is not None


@pytest.mark.parametrize("call", ["read_text", "open", "mkdir"])
def test_i6_the_file_of_compilations_is_done_without(tmp_path: Path, call: str) -> None:
    real = getattr(Path, call)

    def stale(path: Path, *args: Any, **kwargs: Any) -> Any:
        if tmp_path in (path, *path.parents):
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(path, *args, **kwargs)

    with (
        mock.patch.object(Path, call, stale),
        pytest.warns(RuntimeWarning, match="compilations are not kept") as caught,
    ):
        found = tune.offline(
            DEVICES["b200"],
            [tune.reassemble_problem(8, 36, 16160, 2)],
            builds=Builds(tmp_path / "builds"),
            workers=0,
            compile_one=lambda build: Compiled(("refused",) if build.config == BAND else ()),
        )
    assert len(found) == 1 and len(said(caught)) == 1


# I7: keys.


def test_i7_the_order_of_keywords_is_no_part_of_a_key() -> None:
    values = {"rows": 3, "shard": 5, "hidden": 7, "itemsize": 2, "out_itemsize": 4}
    keys = {
        tables.gemm_key(GemmShape(**dict(order)))
        for order in itertools.permutations(values.items())
    }
    assert len(keys) == 1
    (key,) = keys
    assert (key.rows, key.shard, key.hidden, key.operand_bits, key.out_bits) == (16, 5, 7, 16, 32)
    moved = {"ranks": 2, "rows": 3, "shard": 5, "itemsize": 2}
    assert (
        len(
            {
                tables.reassemble_key(ReassembleShape(**dict(order)), in_place=True)
                for order in itertools.permutations(moved.items())
            }
        )
        == 1
    )
    # Nor is the order of the fields in a file.
    whole_table = table(2, gemm=BULK, reassemble=BAND, copy=COPY)
    backwards = json.loads(
        tables.dump(whole_table), object_pairs_hook=lambda pairs: dict(reversed(pairs))
    )
    assert tables.parse(json.dumps(backwards)) == whole_table


def test_i7_a_head_called_with_keywords_in_any_order_launches_the_same() -> None:
    tuned()
    head = lmhead.LMHead(kernels="triton", vocab_size=VOCAB, weight_shard=WEIGHT)
    head.warmup(rows=2)
    out = torch.empty(2, VOCAB, dtype=torch.bfloat16)
    arguments = {"hidden": HIDDEN_ROWS, "row_counts": [2], "out": out}
    with launches() as seen:
        for order in itertools.permutations(arguments.items()):
            assert torch.equal(head(**dict(order)), LOGITS)
    assert seen == [("gemm", BULK)] * 6


# I8: a config more.


def test_i8_a_config_added_to_the_candidates_is_the_only_one_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned()
    for more, us in ((BULK_WIDE, 0.5), (POINTER, 9.0)):
        known = [*measure.candidates(GEMM, CPU, SMALL), more]
        monkeypatch.setattr(measure, "candidates", lambda *_, known=known: known)
        clock = ToldClock({more: us})
        entry = tuned(clock).entries[EAGER]["measured"]
        assert clock.timed == [[str(more)]]
        assert entry.config == BULK_WIDE and len(entry.details["timings"]) == len(known)


def test_i8_a_config_added_to_the_space_is_the_only_one_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, device = tune.gemm_problem(GemmShape(288, 16160, 7168, 2)), DEVICES["b200"]
    space = tune.space(problem, device.arch, device.sms)
    best = GemmConfig(256, 128, 64, 8, 4, "bulk", tail_t=32)
    others = [config for config in space if config != best]
    compiled: list[Build] = []

    def compile_one(build: Build) -> Compiled:
        compiled.append(build)
        return Compiled(())

    def run(configs: Sequence[Any]) -> list[Build]:
        compiled.clear()
        monkeypatch.setattr(tune, "space", lambda *_: list(configs))
        tune.offline(device, [problem], builds=Builds(tmp_path), workers=0, compile_one=compile_one)
        return list(compiled)

    assert len(run(others)) > 0 and run(others) == []
    assert [build.config for build in run([*others, best])] == [best]
    assert run([*others, best]) == []


# I9: a second process.


def _served_alone(rank: int, ranks: int, folder: str) -> tuple[str, torch.Tensor]:
    os.environ["LMHEAD_CONFIGS"] = folder
    alone = [dist.new_group([member], backend="gloo") for member in range(ranks)][rank]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return served(alone)


def test_i9_a_second_process_finds_the_table_and_gives_the_same_numbers(folder: Path) -> None:
    tuned()
    source, logits = served()
    assert source == "measured (user)" and torch.equal(logits, LOGITS)
    for again, values in pool(2).run(_served_alone, str(folder)):
        assert again == source
        assert_same_bits(values, logits)
    # And tuning once more has nothing to time.
    clock = ToldClock({})
    tuned(clock)
    assert clock.timed == []


# I10 to I12: ranks.


def _tuned_apart(rank: int, ranks: int, folders: list[str]) -> dict[str, Any]:
    """Every rank tunes by itself, by a clock of its own; then all warm up."""
    os.environ["LMHEAD_CONFIGS"] = folders[rank]
    fast, slow = (BULK, POINTER) if rank == 0 else (POINTER, BULK)
    shape = GemmShape(2 * ranks, SHARD, HIDDEN, 2)
    clock = ToldClock({fast: 1.0, slow: 2.0})
    with (
        collectives() as tuning,
        mock.patch.object(measure, "candidates", lambda *_: [BULK, POINTER]),
    ):
        table = measure.tune_device([tune.gemm_problem(shape)], CPU, clock=clock, rounds=2)
    (entry,) = table.entries.values()
    head = lmhead.LMHead(shard_of(WEIGHT, ranks, rank), VOCAB, kernels="triton")
    with collectives() as warming:
        report = head.warmup(rows=2)
    with launches() as seen, collectives() as calling:
        logits = head(HIDDEN_ROWS)
    return {
        "own": entry["measured"].config,
        "tuning": [moved.collective for moved in tuning],
        "others": [moved.collective for moved in (*warming, *calling)],
        "agreed": report.configs[(2, 2)]["gemm"].config,
        "launched": seen[0],
        "exact": torch.equal(logits, LOGITS),
    }


def test_i10_ranks_that_measure_differently_run_the_same(tmp_path: Path) -> None:
    """Tuning has no collective in it; one rank's result goes to all at warm-up."""
    first, second = pool(2).run(_tuned_apart, [str(tmp_path / str(rank)) for rank in range(2)])
    assert (first["own"], second["own"]) == (BULK, POINTER)
    assert first["tuning"] == second["tuning"] == []
    for one in (first, second):
        assert one["agreed"] == BULK and one["launched"] == ("gemm", BULK) and one["exact"]
    assert first["others"] == second["others"] != []


def test_i10_nothing_that_tunes_can_reach_a_collective() -> None:
    """By its imports: `measure` and `tune` know no group, and neither does what they import."""
    todo, seen = ["measure", "tune"], set()
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        for node in ast.walk(ast.parse((ROOT / "lmhead" / f"{module}.py").read_text())):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            if isinstance(node, ast.ImportFrom):
                if node.module == "lmhead":
                    todo += names
                elif (node.module or "").startswith("lmhead.kernels"):
                    continue
                elif (node.module or "").startswith("lmhead."):
                    todo.append((node.module or "").split(".")[1])
                names = [f"{node.module}.{name}" for name in names]
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not any("distributed" in name for name in names), module
    assert {"measure", "tune", "tables", "estimate", "codegen"} <= seen and "comm" not in seen


def _divergence(rank: int, ranks: int, folders: list[str], check: str) -> list[Any]:
    os.environ.update(LMHEAD_CONFIGS=folders[rank], LMHEAD_CHECK=check)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = lmhead.LMHead(shard_of(WEIGHT, ranks, rank), VOCAB, kernels="triton")
        with collectives() as seen:
            report = head.warmup(rows=2)
            exact = torch.equal(head(HIDDEN_ROWS), LOGITS)
    names = [moved.collective for moved in seen]
    return [report.configs[(2, 2)]["gemm"].source, exact, names]


@pytest.mark.parametrize("check", ["0", "1"])
@pytest.mark.parametrize("hit", ["rank 0", "rank 1", "both", "none", "broken"])
def test_i11_a_hit_on_one_rank_and_a_miss_on_another_cannot_part_them(
    tmp_path: Path, hit: str, check: str
) -> None:
    """With LMHEAD_CHECK=1 every call is compared as well, and nothing differs."""
    folders = [tmp_path / str(rank) for rank in range(2)]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        if hit in (f"rank {rank}", "both"):
            tables.write(folder / "cpu.json", table(2, gemm=(BULK, POINTER)[rank]))
        if hit == "broken" and rank == 0:
            (folder / "cpu.json").write_text("{")
    first, second = pool(2).run(_divergence, [str(folder) for folder in folders], check)
    assert first == second
    assert first[:2] == ["measured (user)" if hit in ("rank 0", "both") else "default", True]


def _one_has_others_rows(rank: int, ranks: int, folders: list[str]) -> Any:
    os.environ.update(LMHEAD_CONFIGS=folders[rank], LMHEAD_CHECK="1")
    head = lmhead.LMHead(shard_of(WEIGHT, ranks, rank), VOCAB, kernels="triton")
    head.warmup(rows=2)
    return raised(lambda: head(HIDDEN_ROWS[: 1 + rank]))


def test_i11_what_does_differ_raises_the_same_on_all_ranks(tmp_path: Path) -> None:
    """Rows decide the bucket: with other rows on a rank the guard raises, before the kernels."""
    folders = [tmp_path / str(rank) for rank in range(2)]
    folders[0].mkdir()
    tables.write(folders[0] / "cpu.json", table(2, gemm=BULK))
    first, second = pool(2).run(_one_has_others_rows, [str(folder) for folder in folders])
    assert first.error == second.error == "ValueError"
    assert first.text == second.text and "the ranks disagree: row_counts" in first.text


def _timed(rank: int, ranks: int) -> tuple[int, list[str], list[int]]:
    """A method with a collective in it, timed by a clock that is twice as fast on rank 1."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0 / (1 + rank)
        return now[0]

    def method() -> None:
        dist.all_reduce(torch.ones(1))

    with collectives() as seen:
        found = timing.interleaved(
            {"a": method, "b": method}, 5, device=CPU, barrier=dist.barrier, clock=clock
        )
    launched: list[int] = []
    host = measure.host_clock(1, seconds=clock)
    host({"x": launched.append}, 7)
    assert found["a"].median == pytest.approx(1.0 / (1 + rank))
    return (
        len(launched),
        [moved.collective for moved in seen],
        [len(t.seconds) for t in found.values()],
    )


def test_i12_a_faster_clock_runs_no_more_rounds() -> None:
    """Rounds are counted, never timed: ranks stay in step."""
    first, second = pool(2).run(_timed)
    assert first == second
    launched, moved, rounds = first
    assert launched == 7 and rounds == [5, 5]
    assert moved == ["all_reduce"] * 4 + ["barrier", "all_reduce"] * 10


def test_i12_tuning_launches_as_often_by_any_clock() -> None:
    counts = []
    for speed in (1.0, 1e-6):
        now = [0.0]

        def seconds(speed: float = speed, now: list[float] = now) -> float:
            now[0] += speed
            return now[0]

        with launches() as seen:
            measure.measure(
                GEMM,
                CPU,
                clock=measure.host_clock(1, seconds=seconds),
                configs=[BULK, POINTER],
                rounds=4,
                sets=1,
            )
        counts.append((seen.count(("gemm", BULK)), seen.count(("gemm", POINTER))))
    assert counts == [(5, 5), (5, 5)]


# I13: what is timed is what is served.


def test_i13_the_mode_of_a_measurement_is_part_of_its_key() -> None:
    shape = GEMM.shape
    assert isinstance(shape, GemmShape)
    graph, eager = tables.gemm_key(shape), tables.gemm_key(shape, "eager")
    assert graph != eager and (graph.mode, eager.mode) == ("graph", "eager")
    moved = ReassembleShape(2, 2, SHARD, 2)
    assert tables.reassemble_key(moved, True) != tables.reassemble_key(moved, True, "eager")
    found = Table("cpu")
    found.add(graph, Entry(POINTER, "measured", 1.0))
    found.add(eager, Entry(BULK, "measured", 2.0))
    found = tables.parse(tables.dump(found))
    arch = DEVICES["h200"].arch
    assert tables.look_up(found, None, graph, arch, shape).config == POINTER
    assert tables.look_up(found, None, eager, arch, shape).config == BULK
    # Without graphs, on a CPU, heads ask for what was measured eagerly.
    tables.save_user(found)
    source, _ = served()
    head = lmhead.LMHead(WEIGHT, VOCAB, kernels="triton")
    assert source == "measured (user)"
    assert head.warmup(rows=2).configs[(2,)]["gemm"].config == BULK


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_i13_a_graph_replay_is_timed_without_the_launch(
    rows: int, record_property: Callable[[str, object], None]
) -> None:
    """The same candidates by replay and by eager calls, S = 16160: the heads of a decode loop take
    the replay's, and both results are reported.
    """
    device = torch.device("cuda")
    problem = tune.gemm_problem(GemmShape(rows, 16160, 1024, 2))
    shape = problem.shape
    assert isinstance(shape, GemmShape)
    configs = [default_gemm(shape, measure.arch_of(device)), LIBRARY]

    def eager(methods: Mapping[str, Launch], rounds: int) -> Mapping[str, Sequence[float]]:
        found = timing.interleaved(
            {name: lambda launch=launch: launch(0) for name, launch in methods.items()},
            rounds,
            device=device,
        )
        return {name: one.seconds for name, one in found.items()}

    replayed = measure.measure(problem, device, configs=configs, rounds=5, sets=4)
    called = measure.measure(problem, device, configs=configs, rounds=5, sets=4, clock=eager)
    assert replayed is not None and called is not None
    assert replayed.details["failed"] == called.details["failed"] == {}
    assert problem.key.mode == "graph"
    for kind, entry in (("replayed", replayed), ("called", called)):
        record_property(kind, f"{entry.config}: {entry.us} us")
        assert set(entry.details["timings"]) == {str(config) for config in configs}
