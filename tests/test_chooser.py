"""Which configs a head's kernels are launched with, on two ranks whose files differ."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pathlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from data_head import collectives, raised, shard_of, whole
from data_tune import (
    BAND,
    BULK,
    BULK_WIDE,
    COPY,
    CYCLE,
    HIDDEN,
    POINTER,
    SHARD,
    VOCAB,
    keys,
    launches,
    said,
    table,
)
from ranks import pool

import lmhead
from lmhead import chooser, ops, tables
from lmhead.kernels.config import ARCHS, GemmConfig, GemmShape, default_gemm
from lmhead.shapes import Rows
from lmhead.tables import Entry

WEIGHT = whole(VOCAB, HIDDEN, seed=1, dtype=torch.bfloat16)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A folder for each of two ranks, with nothing in them."""
    found = [tmp_path / str(rank) for rank in range(2)]
    for folder in found:
        folder.mkdir()
    return found


def run(job: Any, folders: list[Path], *args: Any) -> list[Any]:
    return pool(2).run(job, [str(folder) for folder in folders], *args)


def built(rank: int, ranks: int, folders: list[str], vocab: int = VOCAB, **options: Any) -> Any:
    """This rank's head, where its own folder holds the user's tables."""
    os.environ["LMHEAD_CONFIGS"] = folders[rank]
    options = {"kernels": "triton", **options}
    return lmhead.LMHead(shard_of(WEIGHT[:vocab], ranks, rank), vocab, **options)


def rows_of(rank: int, rows: int) -> torch.Tensor:
    return whole(rows, HIDDEN, seed=10 + rank, dtype=torch.bfloat16)


def right(head: Any, rank: int, rows: int) -> bool:
    """Whether the logits are exact, whatever they were computed with."""
    hidden = rows_of(rank, rows)
    want = (hidden.float() @ WEIGHT[: head.vocab_size].float().t()).bfloat16()
    return bool(torch.equal(head(hidden), want))


# What is agreed on.


def _agreed(rank: int, ranks: int, folders: list[str], vocab: int) -> dict[str, Any]:
    head = built(rank, ranks, folders, vocab)
    with launches() as before:
        exact = right(head, rank, 2)
    with collectives() as moved:
        report = head.warmup(rows=[2, 1])
    with launches() as after:
        exact = right(head, rank, 2) and exact
    return {
        "before": before,
        "report": report.configs,
        "after": after,
        "exact": exact,
        "collectives": [one.collective for one in moved],
    }


MINE = {"gemm": BULK, "reassemble": BAND, "copy": COPY}
THEIRS = {"gemm": POINTER, "reassemble": CYCLE, "copy": COPY}


@pytest.mark.parametrize(("vocab", "mover"), [(VOCAB, "reassemble"), (VOCAB - 1, "copy")])
def test_two_ranks_with_different_tables_launch_what_rank_0s_says(
    folders: list[Path], vocab: int, mover: str
) -> None:
    tables.write(folders[0] / "cpu.json", table(2, **MINE))
    tables.write(folders[1] / "cpu.json", table(2, **THEIRS))
    first, second = run(_agreed, folders, vocab)
    assert first == second
    assert first["exact"]
    assert first["after"] == [("gemm", BULK), (mover, MINE[mover])]
    sources = {kernel: (one.config, one.source) for kernel, one in first["report"][(2, 2)].items()}
    assert sources == {kernel: (config, "measured (user)") for kernel, config in MINE.items()}
    # The GEMM's bucket of 16 rows holds one row per rank as well; a single row is never moved.
    assert first["report"][(1, 1)]["gemm"].config == BULK
    # A user's table lies on one machine: before warm-up it is not used.
    assert [kernel for kernel, _ in first["before"]] == ["gemm", mover]
    assert not {config for _, config in first["before"]} & {*MINE.values(), *THEIRS.values()}


@pytest.mark.parametrize("owner", [0, 1])
def test_a_table_on_one_rank_alone_is_rank_0s_word(folders: list[Path], owner: int) -> None:
    tables.write(folders[owner] / "cpu.json", table(2, **MINE))
    first, second = run(_agreed, folders, VOCAB)
    assert first == second
    used = {choice.source for choice in first["report"][(2, 2)].values()}
    assert used == {"measured (user)" if owner == 0 else "default"}


def test_only_what_fits_is_launched(folders: list[Path]) -> None:
    """A table of another machine, or of a shape that the bucket shares, is checked again."""
    too_deep = GemmConfig(16, 16, 16, 4, 1000, "bulk")
    tables.write(folders[0] / "cpu.json", table(2, **{**MINE, "gemm": too_deep}))
    first, second = run(_agreed, folders, VOCAB)
    assert first == second and first["exact"]
    default = default_gemm(GemmShape(4, SHARD, HIDDEN, 2), ARCHS["sm_90"])
    assert first["after"] == [("gemm", default), ("reassemble", BAND)]
    assert first["report"][(2, 2)]["gemm"].source == "default"


# What becomes of a file that is broken.


def _warned(rank: int, ranks: int, folders: list[str], kernels: str) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        head = built(rank, ranks, folders, kernels=kernels)
        report = head.warmup(rows=2)
        exact = right(head, rank, 2)
    return {"warnings": said(caught), "report": report.configs, "exact": exact}


@pytest.mark.parametrize("owner", [0, 1])
def test_a_broken_file_is_one_warning_and_defaults_for_all(folders: list[Path], owner: int) -> None:
    (folders[owner] / "cpu.json").write_text("{")
    found = run(_warned, folders, "triton")
    for rank, one in enumerate(found):
        assert one["exact"]
        assert {choice.source for choice in one["report"][(2, 2)].values()} == {"default"}
        # Rank 1's file is nobody's business.
        assert len(one["warnings"]) == (rank == owner == 0)
    assert found[0]["report"] == found[1]["report"]


def test_torchs_kernels_use_no_table(folders: list[Path]) -> None:
    (folders[0] / "cpu.json").write_text("{")
    for one in run(_warned, folders, "torch"):
        assert one == {"warnings": [], "report": {}, "exact": True}


def _refused(rank: int, ranks: int, folders: list[str]) -> tuple[Any, bool, list[str]]:
    head = built(rank, ranks, folders)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        answer = raised(lambda: head.warmup(rows=2))
    path = Path(folders[0]) / "cpu.json"
    if rank == 0:
        tables.write(path, table(2, **MINE))
    report = head.warmup(rows=2)
    return answer, right(head, rank, 2), [c.source for c in report.configs[(2, 2)].values()]


def test_where_rank_0_raises_nobody_waits_for_it(folders: list[Path]) -> None:
    """As where warnings are made errors; the head goes on with the next warm-up."""
    (folders[0] / "cpu.json").write_text("{")
    (first, *rest), (second, *others) = run(_refused, folders)
    assert first.error == "RuntimeWarning" and "cpu.json is not used" in first.text
    assert second.error == "ValueError"
    assert second.text.startswith(
        "lmhead warmup: rank 0 has no tuned configs to share: RuntimeWarning: lmhead: the table"
    )
    assert first.collectives == second.collectives
    assert rest == others == [True, ["measured (user)"] * 3]


# What a second warm-up finds.


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    with mock.patch.object(ops, "is_capturing", lambda device: True):
        yield


def _again(rank: int, ranks: int, folders: list[str]) -> list[Any]:
    head = built(rank, ranks, folders)
    hidden = {rows: rows_of(rank, rows) for rows in (2, 3)}

    def ready(rows: int) -> bool:
        with capturing():
            return raised(lambda: head(hidden[rows])).error == ""

    def launched() -> list[Any]:
        with launches() as seen:
            head(hidden[2])
        return [config for _, config in seen]

    found: list[Any] = []
    head.warmup(rows=2)
    head.warmup(rows=3)
    found.append(("unchanged", ready(2), ready(3), launched()))
    if rank == 0:
        tables.write(Path(folders[0]) / "cpu.json", table(2, gemm=BULK_WIDE))
    # The file alone changes nothing: ranks would differ.
    found.append(("written", ready(2), ready(3), launched()))
    head.warmup(rows=3)
    found.append(("warmed 3", ready(2), ready(3), launched()))
    head.warmup(rows=2)
    found.append(("warmed 2", ready(2), ready(3), launched()))
    if rank == 0:
        (Path(folders[0]) / "cpu.json").unlink()
    head.warmup(rows=2)
    found.append(("removed", ready(2), ready(3), launched()))
    return found


def test_a_second_warm_up_takes_new_entries_and_forgets_what_was_warm(
    folders: list[Path],
) -> None:
    """Kernels of another config are not compiled yet: what a capture would find is not ready."""
    tables.write(folders[0] / "cpu.json", table(2, gemm=BULK, reassemble=BAND))
    first, second = run(_again, folders)
    assert first == second
    steps = {name: (two, three, configs) for name, two, three, configs in first}
    assert steps["unchanged"] == steps["written"] == (True, True, [BULK, BAND])
    two, three, configs = steps["warmed 3"]
    assert (two, three, configs[0]) == (False, True, BULK_WIDE) and configs[1] != BAND
    assert steps["warmed 2"][:2] == (True, True)
    two, three, configs = steps["removed"]
    assert (two, three) == (True, False) and configs[0] not in (BULK, BULK_WIDE)


# What is read, and when.


def _reads(rank: int, ranks: int, folders: list[str]) -> tuple[int, list[Any]]:
    """How often the user's table was read at warm-up, and all files that were opened after it."""
    head = built(rank, ranks, folders)
    with mock.patch.object(tables, "load_user", wraps=tables.load_user) as load:
        head.warmup(rows=[2, 3])
    opened: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        opened.append(args)
        raise PermissionError(f"{args} was read")

    hidden = {rows: rows_of(rank, rows) for rows in (2, 3, 4)}
    with contextlib.ExitStack() as stack:
        for module, name in (
            *((module, "open") for module in (builtins, io, os)),
            (tables, "load_user"),
            (tables, "load_shipped"),
            (pathlib.Path, "is_file"),
            (pathlib.Path, "read_text"),
        ):
            stack.enter_context(mock.patch.object(module, name, refuse))
        for rows in (2, 3, 4):  # 4 rows were never warmed up
            head(hidden[rows])
    return load.call_count, opened


def test_no_file_is_read_after_warm_up_and_by_rank_0_alone(folders: list[Path]) -> None:
    tables.write(folders[0] / "cpu.json", table(2, **MINE))
    assert run(_reads, folders) == [(1, []), (0, [])]


def test_importing_and_building_read_no_table_of_the_user() -> None:
    with mock.patch.object(tables, "load_user", side_effect=AssertionError("was read")):
        head = lmhead.LMHead(WEIGHT, VOCAB, kernels="triton")
        head(rows_of(0, 2))


# One process.


def test_shipped_entries_serve_before_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same on every rank; a user's measured entry goes before them afterwards."""
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("LMHEAD_CONFIGS", str(tmp_path / "user"))
    chooser._shipped.cache_clear()
    key = tables.gemm_key(GemmShape(2, VOCAB, HIDDEN, 2), "eager")
    for folder, config in (("shipped", BULK), ("user", POINTER)):
        found = tables.Table("cpu")
        found.add(key, Entry(config, "measured", 1.0))
        (tmp_path / folder).mkdir()
        tables.write(tmp_path / folder / "cpu.json", found)
    try:
        head = lmhead.LMHead(WEIGHT, VOCAB, kernels="triton")
        used = []
        for rows in (None, 2):
            if rows is not None:
                head.warmup(rows=rows)
            with launches() as seen:
                assert right(head, 0, 2)
            used += [config for _, config in seen]
        assert used == [BULK, POINTER]
    finally:
        chooser._shipped.cache_clear()


def test_a_head_that_was_cast_waits_for_its_next_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 and fp16 run alike, and share their entries; but a new form is settled anew."""
    monkeypatch.setenv("LMHEAD_CONFIGS", str(tmp_path))
    found = tables.Table("cpu")
    key = tables.gemm_key(GemmShape(2, VOCAB, HIDDEN, 2), "eager")
    found.add(key, Entry(BULK, "measured", 1.0))
    tables.write(tmp_path / "cpu.json", found)
    head = lmhead.LMHead(WEIGHT, VOCAB, kernels="triton")
    head.warmup(rows=2)
    head.half()
    hidden = rows_of(0, 2).half()
    used = []
    for warm in (False, True):
        if warm:
            head.warmup(rows=2)
        with launches() as seen:
            head(hidden)
        used += [config for _, config in seen]
    assert used[0] != BULK and used[1] == BULK


def test_a_warm_up_right_after_a_cast_is_of_the_new_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_CONFIGS", str(tmp_path))
    found = tables.Table("cpu")
    key = tables.gemm_key(GemmShape(2, VOCAB, HIDDEN, 2), "eager")
    found.add(key, Entry(BULK, "measured", 1.0))
    tables.write(tmp_path / "cpu.json", found)
    head = lmhead.LMHead(WEIGHT.float(), VOCAB, kernels="triton")
    head.to(torch.bfloat16)
    out = torch.empty(2, VOCAB, dtype=torch.bfloat16)
    for _ in range(2):
        report = head.warmup(rows=2, out=out)
        assert report.configs[(2,)]["gemm"].source == "measured (user)"
    with launches() as seen:
        head(rows_of(0, 2).bfloat16(), out=out)
    assert [config for _, config in seen] == [BULK]


def test_choices_for_ever_new_counts_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "MOST_KNOWN", 8)
    one = chooser.Chooser(torch.device("cpu"))
    sizes = chooser.Sizes(VOCAB, 2, 2, HIDDEN, 2)
    for rows in range(1, 40):
        assert one.configs(Rows((rows,), 0), sizes).gemm is not None
        assert len(one._known) <= 8


def test_rows_of_one_bucket_share_its_entry_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_CONFIGS", str(tmp_path))
    found = tables.Table("cpu")
    for rows, config in ((16, BULK), (32, BULK_WIDE)):
        key = tables.gemm_key(GemmShape(rows, VOCAB, HIDDEN, 2), "eager")
        found.add(key, Entry(config, "measured", 1.0))
    tables.write(tmp_path / "cpu.json", found)
    head = lmhead.LMHead(WEIGHT, VOCAB, kernels="triton")
    report = head.warmup(rows=[1, 16, 17, 32, 33])
    configs = {counts[0]: choice["gemm"].config for counts, choice in report.configs.items()}
    assert configs[1] == configs[16] == BULK and configs[17] == configs[32] == BULK_WIDE
    assert report.configs[(33,)]["gemm"].source == "default"
    assert keys(2)["gemm"] != key  # two ranks' shard is another
