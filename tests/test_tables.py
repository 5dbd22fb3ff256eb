"""Tables of tuned configs: keys, text, lookup, and a file that survives what happens to files."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from data import quick
from data_tune import BAND, BULK, COPY, CYCLE, POINTER
from hypothesis import given
from hypothesis import strategies as st
from ranks import pool

from lmhead import tables
from lmhead.kernels.config import (
    ARCHS,
    LIBRARY,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    default_gemm,
    default_reassemble,
    fits,
)
from lmhead.tables import GEMM_BUCKETS, ORIGINS, Entry, Key, Table

SM90 = ARCHS["sm_90"]
SHAPE = GemmShape(288, 16160, 7168, 2)
MOVED = ReassembleShape(8, 36, 16160, 2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's tables are; retries do not wait."""
    monkeypatch.setenv("LMHEAD_CONFIGS", str(tmp_path / "user"))
    monkeypatch.setattr(tables, "PAUSE_S", 0.0)
    return tmp_path / "user"


def one(config: Any = BULK, origin: str = "measured", rows: int = 288, **details: Any) -> Table:
    table = Table("b200")
    key = tables.gemm_key(GemmShape(rows, 16160, 7168, 2))
    table.add(key, Entry(config, origin, 1.5, details))
    return table


# Keys.


def test_a_bucket_is_the_least_that_holds_the_rows() -> None:
    assert list(GEMM_BUCKETS) == sorted(GEMM_BUCKETS)
    for rows in range(1, 5000):
        holding = [size for size in GEMM_BUCKETS if size >= rows]
        assert tables.bucket(rows) == (holding[0] if holding else GEMM_BUCKETS[-1])


def test_a_key_says_all_that_a_config_depends_on() -> None:
    assert tables.gemm_key(SHAPE) == Key("gemm", 7168, 0, 16160, 16, 16, "graph", 288)
    assert tables.gemm_key(GemmShape(17, 5, 8, 4, 4), "eager") == Key(
        "gemm", 8, 0, 5, 32, 32, "eager", 32
    )
    assert tables.reassemble_key(MOVED, True) == Key(
        "reassemble", 0, 8, 16160, 16, 16, "graph", 512
    )
    assert tables.reassemble_key(MOVED, False, "eager", out_itemsize=4) == Key(
        "copy", 0, 8, 16160, 16, 32, "eager", 512
    )
    # Beyond the largest band all row counts share a bucket.
    assert tables.reassemble_key(ReassembleShape(8, 5000, 3, 1), True).rows == 4096


@pytest.mark.parametrize(
    "change", [{"shard": 16161}, {"hidden": 7176}, {"itemsize": 4}, {"out_itemsize": 4}]
)
def test_other_shapes_have_other_keys(change: dict[str, int]) -> None:
    values = {"rows": 288, "shard": 16160, "hidden": 7168, "itemsize": 2, "out_itemsize": 2}
    assert tables.gemm_key(GemmShape(**values | change)) != tables.gemm_key(SHAPE)


# Text.

_counts = st.integers(1, 1 << 20)
_gemms = st.builds(
    GemmConfig,
    *[_counts] * 5,
    kind=st.sampled_from(["bulk", "pointer", "library"]),
    tail_t=st.integers(0, 64),
    splits=st.integers(1, 8),
    warp_specialize=st.booleans(),
)
_copies = st.builds(ReassembleConfig, st.just("copy"), *[_counts] * 3)
_moves = st.builds(ReassembleConfig, st.sampled_from(["band", "cycle"]), *[_counts] * 3)
_details = st.dictionaries(
    st.text().filter(lambda name: name not in ("rows", "config", "origin", "us")),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


@st.composite
def _tables(draw: st.DrawFn) -> Table:
    table = Table(draw(st.text(max_size=8)))
    kinds = {"gemm": _gemms, "reassemble": _moves, "copy": _copies}
    for kernel in draw(st.lists(st.sampled_from(list(kinds)), max_size=6)):
        numbers = [draw(st.integers(0, 3)) for _ in range(6)]  # few, so that keys share groups
        key = Key(kernel, *numbers[:5], draw(st.sampled_from(["graph", "eager"])), numbers[5])
        us = draw(st.floats(0, 1e9, allow_nan=False))
        table.add(
            key, Entry(draw(kinds[kernel]), draw(st.sampled_from(ORIGINS)), us, draw(_details))
        )
    return table


@given(_tables())
@quick(60)
def test_what_is_dumped_is_parsed_again(table: Table) -> None:
    text = tables.dump(table)
    assert tables.parse(text) == table == tables.parse(text, table.device)
    assert tables.dump(tables.parse(text)) == text
    # A changed entry is one changed line.
    assert sum(line.startswith('   {"rows"') for line in text.splitlines()) == len(table)


GOOD = json.loads(
    tables.dump(
        one(machine="here").merged(
            Table(
                "b200",
                {
                    tables.reassemble_key(MOVED, True): {"measured": Entry(BAND, "measured", 2.0)},
                    tables.reassemble_key(MOVED, False): {"measured": Entry(COPY, "measured", 3.0)},
                },
            )
        )
    )
)
COPY_AT, GEMM_AT, BAND_AT = (["groups", i, "entries", 0] for i in range(3))
ABSENT = object()


def changed(place: list[Any], value: Any) -> Any:
    """GOOD with something else in one place."""
    whole = json.loads(json.dumps(GOOD))
    part = whole
    for step in place[:-1]:
        part = part[step]
    if value is ABSENT:
        del part[place[-1]]
    else:
        part[place[-1]] = value
    return whole


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ([*GEMM_AT, "config", "num_ctas"], 2, r"unknown fields \['num_ctas'\]"),
        ([*GEMM_AT, "config", "block_v"], ABSENT, r"missing fields \['block_v'\]"),
        ([*GEMM_AT, "config", "block_v"], "128", "block_v must be int, got '128'"),
        ([*GEMM_AT, "config", "block_v"], 128.0, "block_v must be int, got 128.0"),
        ([*GEMM_AT, "config", "block_v"], True, "block_v must be int, got True"),
        ([*GEMM_AT, "config", "warp_specialize"], 1, "warp_specialize must be bool, got 1"),
        ([*GEMM_AT, "config", "kind"], "band", "kind must be one of .*'bulk'.*, got 'band'"),
        ([*GEMM_AT, "config", "kind"], ["bulk"], "kind must be str"),
        ([*GEMM_AT, "config"], [1], "unknown fields"),
        ([*GEMM_AT, "config"], None, "NoneType"),
        ([*BAND_AT, "config"], GOOD["groups"][1]["entries"][0]["config"], "unknown fields"),
        ([*BAND_AT, "config", "kind"], "copy", "a copy config cannot serve 'reassemble'"),
        ([*COPY_AT, "config", "kind"], "cycle", "a cycle config cannot serve 'copy'"),
        ([*GEMM_AT, "origin"], "guessed", "origin must be one of .*, got 'guessed'"),
        ([*GEMM_AT, "origin"], {}, "origin must be one of"),
        ([*GEMM_AT, "us"], "fast", "us must be a finite number, got 'fast'"),
        ([*GEMM_AT, "us"], False, "us must be a finite number"),
        ([*GEMM_AT, "us"], float("nan"), "us must be a finite number"),
        ([*GEMM_AT, "us"], float("inf"), "us must be a finite number"),
        ([*GEMM_AT, "us"], 10**400, "OverflowError"),
        ([*GEMM_AT, "us"], ABSENT, "KeyError 'us'"),
        ([*GEMM_AT, "rows"], "288", "rows must be int"),
        ([*GEMM_AT, "rows"], ABSENT, "KeyError 'rows'"),
        (["groups", 1, "kernel"], "sample", "unknown kernel 'sample'"),
        (["groups", 1, "shard"], 16160.0, "shard must be int"),
        (["groups", 1, "mode"], 1, "mode must be str"),
        (["groups", 1, "mode"], ABSENT, "KeyError 'mode'"),
        (["groups", 1, "entries"], {"rows": 1}, "no table of tuned configs"),
        (["groups", 1, "entries", 0], 5, "no table of tuned configs"),
        (["groups"], ABSENT, "KeyError 'groups'"),
        (["groups"], 3, "no table of tuned configs"),
        (["format"], 2, "format 1 for 'b200' expected, got 2"),
        (["device"], "h200", "format 1 for 'b200' expected, got 1 for 'h200'"),
    ],
)
def test_what_is_no_table_is_refused_with_the_reason(
    place: list[Any], value: Any, words: str
) -> None:
    assert len(tables.parse(json.dumps(GOOD), "b200")) == 3
    with pytest.raises(ValueError, match=words):
        tables.parse(json.dumps(changed(place, value)), "b200")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"b200"', "{}", "[" * 100_000, '{"format": 1}']
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        tables.parse(text, "b200")
    with pytest.raises(ValueError):
        tables.parse(text)


def test_an_origin_is_one_of_two() -> None:
    with pytest.raises(ValueError, match="origin must be one of"):
        one(origin="hoped")


# Lookup.


FOUR = [(origin, name) for origin in ORIGINS for name in ("user", "shipped")]
FITTING = [GemmConfig(256, 128, 64, 8, stages, "bulk", tail_t=32) for stages in (1, 2, 3, 4)]
TOO_DEEP = GemmConfig(256, 128, 64, 8, 9, "bulk", tail_t=32)  # more shared memory than there is


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_lookup_takes_the_best_origin_that_fits(arch: Any) -> None:
    """Every combination of entries that are absent, fit, or do not."""
    key = tables.gemm_key(SHAPE)
    assert not fits(TOO_DEEP, arch, SHAPE)
    for states in itertools.product(("absent", "fits", "does not"), repeat=4):
        found: dict[str, Table | None] = {"user": Table("x"), "shipped": Table("x")}
        want = (default_gemm(SHAPE, arch), "default", None)
        for us, ((origin, name), state, config) in reversed(
            list(enumerate(zip(FOUR, states, FITTING, strict=True)))
        ):
            table = found[name]
            assert table is not None
            if state != "absent":
                entry = Entry(config if state == "fits" else TOO_DEEP, origin, float(us))
                table.add(key, entry)
            if state == "fits":
                want = (config, f"{origin} ({name})", float(us))
        choice = tables.look_up(found["user"], found["shipped"], key, arch, SHAPE)
        assert (choice.config, choice.source, choice.us) == want
        # No table is as good as an empty one.
        missing = {name: table if len(table or ()) else None for name, table in found.items()}
        assert tables.look_up(missing["user"], missing["shipped"], key, arch, SHAPE) == choice


def test_without_entries_the_default_serves_every_kernel() -> None:
    for in_place in (True, False):
        key = tables.reassemble_key(MOVED, in_place)
        choice = tables.look_up(None, None, key, SM90, MOVED)
        assert choice.config == default_reassemble(MOVED, in_place) and choice.source == "default"


def test_an_entry_of_the_bucket_is_checked_against_the_shape_of_the_call() -> None:
    # A band of 4096 pieces serves the last bucket, but not the 8 * 600 pieces that are in it.
    table = Table("x")
    at_most, more = ReassembleShape(8, 512, 16160, 2), ReassembleShape(8, 600, 16160, 2)
    key = tables.reassemble_key(at_most, True)
    assert key == tables.reassemble_key(more, True)
    table.add(key, Entry(ReassembleConfig("band", 4096, 8, 16), "measured", 1.0))
    assert tables.look_up(table, None, key, SM90, at_most).source == "measured (user)"
    assert tables.look_up(table, None, key, SM90, more).source == "default"


def test_merging_keeps_both_and_prefers_the_other() -> None:
    old = one(FITTING[0]).merged(one(FITTING[1], "modelled"))
    both = old.merged(one(FITTING[2])).merged(one(FITTING[3], rows=16))
    (key, found), (_, small) = both.entries.items()
    assert {origin: entry.config for origin, entry in found.items()} == {
        "measured": FITTING[2],
        "modelled": FITTING[1],
    }
    assert small["measured"].config == FITTING[3] and len(both) == 3
    assert old.entries[key]["measured"].config == FITTING[0]  # as it was


def test_selection_takes_all_buckets_of_a_head_and_no_details() -> None:
    table = one(machine="here").merged(one(rows=16)).merged(one(POINTER, "modelled"))
    for other in (GemmShape(288, 16161, 7168, 2), GemmShape(288, 16160, 7168, 2, 4)):
        table.add(tables.gemm_key(other), Entry(LIBRARY, "measured", 1.0))
    table.add(tables.gemm_key(SHAPE, "eager"), Entry(LIBRARY, "measured", 1.0))
    chosen = tables.select(table, [tables.gemm_key(GemmShape(1, 16160, 7168, 2))], "b200")
    assert {key.rows for key in chosen.entries} == {16, 288} and len(chosen) == 3
    assert all(not e.details for found in chosen.entries.values() for e in found.values())
    assert len(tables.select(None, [tables.gemm_key(SHAPE)], "b200")) == 0


# Where the file is.


def test_the_folder_is_asked_for_by_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert tables.user_folder() == tmp_path / "user"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert tables.user_folder() == tmp_path / "user"
    monkeypatch.setenv("LMHEAD_CONFIGS", "")
    assert tables.user_folder() == Path("/cache/lmhead")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert tables.user_folder() == Path("/home/someone/.cache/lmhead")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LMHEAD_CONFIGS")
    assert tables.user_folder() == Path("/home/someone/.cache/lmhead")


def test_a_user_without_a_home_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("LMHEAD_CONFIGS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tables.load_user("b200") is None
    with pytest.warns(RuntimeWarning, match="Set LMHEAD_CONFIGS to a folder"):
        assert tables.save_user(one()) is None


def test_shipped_tables_lie_with_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Path(tables.__file__).parent / "configs" == tables.SHIPPED
    monkeypatch.setattr(tables, "SHIPPED", tmp_path)
    tables.write(tmp_path / "b200.json", one())
    assert tables.load_shipped("b200") == one()
    assert tables.load_shipped("h200") is None


# Its safety.


def test_saving_adds_to_what_is_there(folder: Path) -> None:
    assert tables.load_user("b200") is None and not folder.exists()
    path = tables.save_user(one(machine="here"))
    assert path == folder / "b200.json"
    tables.save_user(one(POINTER, rows=16))
    tables.save_user(one(POINTER, "modelled"))
    assert tables.load_user("b200") == one(machine="here").merged(one(POINTER, rows=16)).merged(
        one(POINTER, "modelled")
    )
    assert tables.load_user("h200") is None
    assert sorted(os.listdir(folder)) == [".b200.json.lock", "b200.json"]  # nothing temporary


def test_a_reader_sees_the_old_file_or_the_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new text is whole, beside the old one, when it takes the name."""
    tables.save_user(one())
    replaced = []

    def replace(source: str, target: Path) -> None:
        assert tables.load_user("b200") == one()
        assert Path(source).parent == folder
        assert len(tables.parse(Path(source).read_text())) == 2
        replaced.append(source)
        os.rename(source, target)

    monkeypatch.setattr(tables.os, "replace", replace)
    tables.save_user(one(rows=16))
    assert len(replaced) == 1
    assert len(tables.load_user("b200") or ()) == 2


@pytest.mark.parametrize("failing", ["dump", "replace"])
def test_a_save_that_breaks_off_leaves_what_was_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    tables.save_user(one())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*((tables, "dump") if failing == "dump" else (os, "replace")), interrupted)
    with pytest.raises(KeyboardInterrupt):
        tables.save_user(one(rows=16))
    assert sorted(os.listdir(folder)) == [".b200.json.lock", "b200.json"]
    assert tables.load_user("b200") == one()


def test_what_is_there_is_read_again_under_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that waits for another keeps what that one has written meanwhile."""
    folder.mkdir()
    waiting, real = threading.Event(), fcntl.flock

    def flock(file: Any, operation: int) -> None:
        waiting.set()
        real(file, operation)

    with open(folder / ".b200.json.lock", "a") as lock:
        real(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", flock)
        writer = threading.Thread(target=tables.save_user, args=(one(),))
        writer.start()
        assert waiting.wait(60)
        assert not (folder / "b200.json").exists()
        tables.write(folder / "b200.json", one(rows=16))
    writer.join(60)
    assert tables.load_user("b200") == one(rows=16).merged(one())


def _save_many(rank: int, ranks: int, folder: str, count: int) -> list[str]:
    """What was wrong while this process saved its own entries one by one."""
    os.environ["LMHEAD_CONFIGS"] = folder
    wrong = []
    for i in range(count):
        tables.save_user(one(rank=rank, rows=GEMM_BUCKETS[i * ranks + rank]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = tables.load_user("b200")
        mine = [e for by in (found or one()).entries.values() for e in by.values()]
        if caught or sum(entry.details.get("rank") == rank for entry in mine) != i + 1:
            wrong.append(f"rank {rank} after {i + 1} saves: {found}, {caught}")
    return wrong


def test_two_processes_that_save_at_once_both_end_up_in_the_file(folder: Path) -> None:
    assert pool(2).run(_save_many, str(folder), 7) == [[], []]
    found = tables.load_user("b200")
    assert found is not None and len(found) == 14


def test_a_file_system_without_locks_still_takes_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert tables.save_user(one()) is not None
    assert tables.load_user("b200") == one()


def test_a_missing_table_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError("slept")

    monkeypatch.setattr(tables.time, "sleep", sleep)
    assert tables.load_user("b200") is None
    folder.mkdir()
    assert tables.load_user("b200") is None


def test_configs_of_each_kernel_survive_the_file() -> None:
    table = one(LIBRARY)
    table.add(
        tables.reassemble_key(MOVED, True), Entry(CYCLE, "modelled", 2.5, {"terms": {"l2": 1}})
    )
    table.add(tables.reassemble_key(MOVED, False), Entry(COPY, "measured", 0.25))
    tables.save_user(table)
    assert tables.load_user("b200") == table
