"""A user's table as a file: what cannot be read is never lost, a write is atomic and synced, links
stay links, and ~ is the home directory, here and wherever else a path is given.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from data_head import shard_of, whole
from data_tune import BULK, COPY, CPU, HIDDEN, POINTER, VOCAB, ToldClock, said, table

import lmhead
from lmhead import cli, measure, paths, tables, tune, tune_ranks
from lmhead.bench import gpu_check
from lmhead.comm import Call, Comm
from lmhead.kernels.config import GemmShape
from lmhead.tables import Entry, NotReplaced, Table

ROOT = Path(__file__).resolve().parent.parent
OURS = table(2, gemm=POINTER)
TEXT = tables.dump(OURS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's tables are; retries do not wait."""
    monkeypatch.setenv("LMHEAD_CONFIGS", str(tmp_path / "user"))
    monkeypatch.setattr(tables, "PAUSE_S", 0.0)
    (tmp_path / "user").mkdir()
    return tmp_path / "user"


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "cpu.json"


# Every way in which a file can be unreadable.


def forbidden(path: Path) -> Any:
    """No permission to read: played, since root reads everything."""
    path.write_text(TEXT)
    real = Path.read_text

    def read_text(self: Path, *args: Any, **kwargs: Any) -> str:
        if self == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, *args, **kwargs)

    return mock.patch.object(Path, "read_text", read_text)


def linked(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def holding(content: str | bytes) -> Callable[[Path], int]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda path: path.write_bytes(data)


def changed(**fields: Any) -> Callable[[Path], int]:
    return holding(json.dumps(json.loads(TEXT) | fields))


# What may be of value to somebody: (how it comes about, words of the reason).
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a newer format": (changed(format=2), "format 1 for 'cpu' expected, got 2 for 'cpu'"),
    "a format in words": (changed(format="b"), "got 'b' for 'cpu'"),
    "another GPU's": (changed(device="b200"), "got 1 for 'b200'"),
    "a directory": (lambda path: path.mkdir(), "directory"),
    "no permission": (forbidden, "Permission denied"),
    "a pipe": (lambda path: os.mkfifo(path), "is no regular file"),
    "a link to a device": (linked("/dev/null"), "is no regular file"),
    "a link to a directory": (linked("."), "directory"),
    "a link to itself": (linked("cpu.json"), "symbolic links"),
}
# What no lmhead can read.
KEPT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (holding(""), "Expecting value"),
    "blank": (holding("\n \n"), "Expecting value"),
    "cut short": (holding(TEXT[: len(TEXT) // 2]), "line"),
    "twice": (holding(TEXT + TEXT), "Extra data"),
    "no JSON": (holding("tuned: yes\n"), "Expecting value"),
    "no UTF-8": (holding(b'{"format": 1, "device": "\xff\xfe"}'), "utf-8"),
    "UTF-16": (holding(TEXT.encode("utf-16")), "utf-8"),
    "zeros": (holding(bytes(512)), "Expecting value"),
    "a list": (holding("[1, 2]"), "TypeError"),
    "a number": (holding("1"), "TypeError"),
    "null": (holding("null"), "TypeError"),
    "deep": (holding("[" * 100_000), "RecursionError"),
    "no format": (holding('{"device": "cpu"}'), "KeyError 'format'"),
    "no groups": (holding('{"format": 1, "device": "cpu"}'), "KeyError 'groups'"),
    "an unknown field": (holding(TEXT.replace('"block_v"', '"block_w"')), "unknown fields"),
    "an unknown kernel": (holding(TEXT.replace('"gemm"', '"sample"')), "unknown kernel 'sample'"),
    "a time that is none": (holding(TEXT.replace('"us": 1.0', '"us": NaN')), "finite number"),
}


def look(path: Path) -> tuple[Any, ...]:
    """All of a file that could be lost."""
    found = path.lstat()
    content = path.read_bytes() if stat.S_ISREG(found.st_mode) else None
    return found.st_ino, found.st_mode, found.st_mtime_ns, content


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("tuning began")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_ours_to_read_is_refused_before_tuning_and_left_alone(
    path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = REFUSED[kind]
    monkeypatch.setattr(measure, "tune_device", never)
    monkeypatch.setattr(tune, "offline", never)
    monkeypatch.setattr(tune_ranks, "slug", lambda _: "cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    played = make(path)
    with played if kind == "no permission" else contextlib.nullcontext():
        before = look(path)
        with pytest.warns(RuntimeWarning, match="is not used") as caught:
            assert tables.load_user("cpu") is None
        (text,) = said(caught)
        assert str(path) in text and words in text and "leaves it alone" in text
        with pytest.warns(RuntimeWarning, match="is not replaced"):
            assert tables.save_user(OURS) is None
        refusals = [
            lambda: tables.save(OURS),
            lambda: tables.vacate(path, "cpu"),
            lambda: tune_ranks.tune_ranks([]),
            lambda: tune_ranks.decide(Comm(), [], CPU),
        ]
        for refusal in refusals:
            with pytest.raises(NotReplaced) as refused:
                refusal()
            assert str(refused.value).startswith(f"{path} is not replaced (")
            assert words in str(refused.value) and "LMHEAD_CONFIGS" in str(refused.value)
        # The command: one line, before anything is compiled.
        monkeypatch.setattr(cli, "_require_compiler", lambda: None)
        device = replace(cli.DEVICES["b200"], name="CPU")
        monkeypatch.setattr(cli, "_devices", lambda _: [device])
        for more in ([], ["--output", str(path.parent)]):
            assert cli.main(["tune", "--offline", *more]) == 1
            (line,) = capsys.readouterr().err.strip().splitlines()
            assert line.startswith(f"lmhead: {path} is not replaced (") and words in line
        assert look(path) == before
    assert set(os.listdir(path.parent)) <= {"cpu.json", ".cpu.json.lock"}


@pytest.mark.parametrize("kind", KEPT)
def test_what_no_lmhead_can_read_is_kept_under_a_name_that_is_said(path: Path, kind: str) -> None:
    make, words = KEPT[kind]
    make(path)
    content = path.read_bytes()
    path.chmod(0o640)
    with pytest.warns(RuntimeWarning, match="is not used") as caught:
        assert tables.load_user("cpu") is None
    (text,) = said(caught)
    assert str(path) in text and words in text and "keeps a copy" in text
    assert path.read_bytes() == content
    with pytest.warns(RuntimeWarning, match="is no table") as caught:
        tune_ranks.require_a_place(CPU)
    (text,) = said(caught)
    kept = path.with_name("cpu.json.unreadable")
    assert f"{path} is no table" in text and words in text and f"kept as {kept}" in text
    assert kept.read_bytes() == content and stat.S_IMODE(kept.stat().st_mode) == 0o640
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tables.save(OURS)
        assert tables.load_user("cpu") == OURS


def test_no_copy_takes_anothers_place(path: Path) -> None:
    """The same content again needs no second copy: an attempt that is repeated makes one."""
    kept = path.with_name("cpu.json.unreadable")
    path.with_name("cpu.json.unreadable-2").mkdir()
    for content, names in (("{", [""]), ("[", ["", "-2", "-3"]), ("{", ["", "-2", "-3"])):
        path.write_text(content)
        with pytest.warns(RuntimeWarning, match="is kept as"):
            tables.save(OURS)
        found = sorted(name for name in os.listdir(path.parent) if ".unreadable" in name)
        assert set(found) == {f"{kept.name}{end}" for end in {*names, "-2"}}
    assert kept.read_text() == "{"
    assert path.with_name("cpu.json.unreadable-3").read_text() == "["


def test_a_copy_that_cannot_be_made_keeps_the_file(path: Path) -> None:
    path.write_text("{")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(tables, "_copy", side_effect=full),
        pytest.warns(RuntimeWarning, match="could not be written"),
    ):
        assert tables.save_user(OURS) is None
    assert path.read_text() == "{"


@pytest.mark.parametrize("number", ["EIO", "ESTALE", "EBUSY", "ENOENT"])
def test_a_read_that_fails_for_good_replaces_nothing(path: Path, number: str) -> None:
    path.write_text(TEXT)
    before = look(path)
    error = OSError(getattr(errno, number), os.strerror(getattr(errno, number)))
    with (
        mock.patch.object(Path, "read_text", side_effect=error) as read,
        pytest.raises(OSError, match=os.strerror(getattr(errno, number))),
    ):
        tables.save(table(3, gemm=BULK))
    assert read.call_count == tables.ATTEMPTS and look(path) == before


def test_a_file_that_turns_foreign_while_tuning_runs_is_left_alone_and_said(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where it is gone by the end, all entries are kept."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune_ranks, "slug", lambda _: "cpu")
    foreign = TEXT.replace('"format": 1', '"format": 2')

    def tune_device(*_: Any, **__: Any) -> Table:
        path.write_text(foreign)
        tables.save_user(OURS)
        if moved:
            path.rename(path.with_name("moved.json"))
        return OURS

    monkeypatch.setattr(measure, "tune_device", tune_device)
    for moved in (False, True):
        with pytest.warns(RuntimeWarning, match="is not replaced"):
            if moved:
                assert tune_ranks.tune_ranks([]) == tables.load_user("cpu") == OURS
            else:
                with pytest.raises(NotReplaced, match=r"cpu\.json is not replaced"):
                    tune_ranks.tune_ranks([])
                assert path.read_text() == foreign
                path.unlink()


# The write.


def test_a_write_is_synced_before_the_name_and_the_name_after_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    sync, rename = os.fsync, os.replace

    def fsync(handle: int) -> None:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            assert os.path.samestat(found, path.parent.stat())
            done.append("folder")
        else:
            assert found.st_size == len(TEXT)  # nothing is left in a buffer
            done.append("file")
        sync(handle)

    def replaced(source: str, target: Path) -> None:
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    tables.save(OURS)
    assert done == ["file", "rename", "folder"]


@pytest.mark.parametrize("number", ["EINVAL", "ENOSYS", "EOPNOTSUPP"])
def test_a_file_system_that_cannot_sync_a_folder_still_takes_a_table(
    path: Path, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(getattr(errno, number), "")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    assert tables.save(OURS) == path and tables.load_user("cpu") == OURS


def test_a_file_keeps_its_mode(path: Path) -> None:
    tables.save(OURS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.chmod(0o600)
    tables.save(table(3, gemm=BULK))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# Links.


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("there", [False, True], ids=["dangling", "there"])
def test_a_link_is_written_through(path: Path, there: bool, relative: bool, tmp_path: Path) -> None:
    """Over two links; the target is replaced in its own folder, under its own lock."""
    home = tmp_path / "home"
    home.mkdir()
    target, between = home / "mine.json", home / "between.json"
    between.symlink_to("mine.json" if relative else target)
    path.symlink_to("../home/between.json" if relative else between)
    if there:
        target.write_text(TEXT)
    else:
        with mock.patch.object(tables.time, "sleep", never):
            assert tables.load_user("cpu") is None
    more = table(3, copy=COPY)
    assert tables.save(more) == path
    assert path.is_symlink() and between.is_symlink() and not target.is_symlink()
    want = OURS.merged(more) if there else more
    assert tables.load_user("cpu") == want == tables.parse(target.read_text(), "cpu")
    assert sorted(os.listdir(home)) == [".mine.json.lock", "between.json", "mine.json"]
    assert os.listdir(path.parent) == ["cpu.json"]
    tables.write(path, OURS)  # whoever writes whole tables does as well
    assert path.is_symlink() and target.read_text() == TEXT


def test_a_broken_target_is_kept_beside_the_target(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine.json"
    target.write_text("{")
    path.symlink_to(target)
    with pytest.warns(RuntimeWarning, match=r"mine\.json\.unreadable"):
        tables.save(OURS)
    assert path.is_symlink() and target.read_text() == TEXT
    assert (tmp_path / "mine.json.unreadable").read_text() == "{"


# The home directory.


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The home, with the working directory elsewhere; no folder may be named "~"."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield tmp_path / "home"
    assert os.listdir(tmp_path / "here") == []


def test_the_home_is_expanded_in_variables(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CONFIGS", "~/cfg")
    assert tables.save(OURS) == home / "cfg" / "cpu.json" and tables.load_user("cpu") == OURS
    monkeypatch.delenv("LMHEAD_CONFIGS")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert tables.user_folder() == home / "cache" / "lmhead"
    monkeypatch.setenv("LMHEAD_DUMP", "~/dump")
    Comm().dump(Call("logits", (1,), 1, "float32", 7), "it broke")
    left = json.loads((home / "dump" / "lmhead-rank0-call7.json").read_text())
    assert left["error"] == "it broke"
    monkeypatch.setenv("OUT", "~/out")
    assert gpu_check._default_path() == home / "out" / "gpu-check.json"


def test_a_home_that_nobody_has_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CONFIGS", "~nobody-of-that-name/cfg")
    with pytest.warns(RuntimeWarning, match="is not used .*nobody-of-that-name"):
        assert tables.load_user("cpu") is None
    with pytest.warns(RuntimeWarning, match="could not be written .*nobody-of-that-name"):
        assert tables.save_user(OURS) is None
    with pytest.raises(ValueError, match="nobody-of-that-name"):
        tune_ranks.require_a_place(CPU)
    monkeypatch.setenv("LMHEAD_DUMP", "~nobody-of-that-name/dump")
    Comm().dump(Call("logits", (1,), 1, "float32", 7), "it broke")  # an error is on its way already


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                for words, found in _options(command):
                    yield f"{name} {words}", found
        else:
            yield "", action


def test_the_home_is_expanded_in_every_option_that_takes_a_path(home: Path) -> None:
    """No option takes its path unexpanded, and these are all."""
    found = {
        f"{words}{action.option_strings[0]}"
        for parser in (cli._parser(), gpu_check._parser())
        for words, action in _options(parser)
        if action.type is paths.path
    }
    kinds = ("head", "exchange", "kernels", "scale")
    assert found == {"tune --output", "--json", "--merge", "--folder"} | {
        f"bench {kind} {option}" for kind in kinds for option in ("--plot", "--save", "--compare")
    }
    arguments = cli._parser().parse_args(["bench", "head", "--save=~/run.json", "--plot=~"])
    assert arguments.save == home / "run.json" and arguments.plot == home
    with pytest.raises(SystemExit):
        cli._parser().parse_args(["bench", "head", "--save=~nobody-of-that-name/x"])
    for file in [*(ROOT / "lmhead").glob("*.py"), *(ROOT / "bench").glob("*.py")]:
        assert not re.search(r"type=(\w+\.)?Path\b|\bPath\((os\.)?environ", file.read_text()), file


# Versions.

KEY = tables.gemm_key(GemmShape(2, VOCAB, HIDDEN, 2), "eager")
HERE = tables.versions()


def tuned_under(**versions: object) -> Table:
    found = Table("cpu")
    found.add(KEY, Entry(BULK, "measured", 1.0, versions))
    return found


def test_a_release_is_major_and_minor() -> None:
    releases = {name: ".".join(version.split(".")[:2]) for name, version in HERE.items()}
    same = {name: f"{release}.99+cu999" for name, release in releases.items()}
    for versions in ({}, HERE, releases, same, {"torch": None, "triton": 3.6}, {"torch": "main"}):
        assert tables.other_versions(tuned_under(**versions), [KEY]) == ""
    for versions, words in (
        (HERE | {"torch": "1.13.1+cu117"}, f"torch 1.13 and triton {releases['triton']}"),
        (HERE | {"triton": "2.1.0"}, f"torch {releases['torch']} and triton 2.1"),
        ({"triton": "2.1.0"}, "triton 2.1"),
    ):
        assert tables.other_versions(tuned_under(**versions), [KEY]) == words
    assert tables.other_versions(None, [KEY]) == ""
    # Another head's entries do not matter, nor does one that a better one hides.
    old = tuned_under(torch="1.13.1")
    assert tables.other_versions(old, [replace(KEY, shard=7)]) == ""
    assert tables.other_versions(old, [replace(KEY, rows=1024)]) == "torch 1.13"
    hidden = tuned_under(**HERE)
    hidden.add(KEY, Entry(BULK, "modelled", 1.0, {"torch": "1.13.1"}))
    assert tables.other_versions(hidden, [KEY]) == ""


def test_every_entry_that_is_tuned_names_its_versions() -> None:
    problem = tune.gemm_problem(GemmShape(2, VOCAB, HIDDEN, 2))
    clock = ToldClock({BULK: 1.0})
    measured = measure.measure(problem, CPU, clock=clock, configs=[BULK], rounds=1, sets=1)
    moved = tune.reassemble_problem(2, 2, 24, 2)
    modelled = tune.offline(
        cli.DEVICES["b200"],
        [moved],
        builds=tune.Builds(None),
        workers=0,
        compile_one=lambda build: tune.Compiled(()),
    )
    assert measured is not None
    for entry in (measured, modelled.entries[moved.key]["modelled"]):
        assert {name: entry.details[name] for name in HERE} == HERE


def test_a_warm_up_says_once_that_a_table_is_of_other_versions(path: Path) -> None:
    weight = whole(VOCAB, HIDDEN, seed=1, dtype=torch.bfloat16)
    tables.write(path, tuned_under(torch="1.13.1", triton="2.1.0"))
    head = lmhead.LMHead(shard_of(weight, 1, 0), VOCAB, kernels="triton")
    with pytest.warns(RuntimeWarning) as caught:
        report = head.warmup(rows=2)
        head.warmup(rows=2)
    (text,) = said(caught)
    assert str(path) in text and "tuned under torch 1.13 and triton 2.1" in text
    assert f"torch {HERE['torch']} and triton {HERE['triton']}" in text and "lmhead tune" in text
    assert report.configs[(2,)]["gemm"].config == BULK  # which is used all the same
    tables.write(path, tuned_under(**HERE))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        lmhead.LMHead(shard_of(weight, 1, 0), VOCAB, kernels="triton").warmup(rows=2)
