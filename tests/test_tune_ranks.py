"""Tuning on several ranks: rank 0 decides, all get its answer, and an error of its reaches all."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ranks import pool

from lmhead import measure, tables, tune_ranks
from lmhead.comm import Comm
from lmhead.kernels.config import GemmConfig
from lmhead.tables import Entry, Key, Table

KEY = Key("gemm", 64, 0, 32, 16, 16, "graph", 16)


def _decide(rank: int, ranks: int, folder: str, fails: bool) -> dict[str, Any]:
    os.environ["LMHEAD_CONFIGS"] = str(Path(folder) / str(rank))
    calls: list[int] = []

    def tune_device(problems: Any, device: Any, **_: Any) -> Table:
        calls.append(rank)
        if fails:
            raise RuntimeError("the clock stands still")
        table = Table("b200")
        config = GemmConfig(16, 128, 64, 8, 2 + rank, "bulk")
        table.add(KEY, Entry(config, "measured", 1.0 + rank, {"timings": {str(config): [1.0]}}))
        return table

    error, found = "", None
    with (
        mock.patch.object(measure, "tune_device", tune_device),
        mock.patch.object(tune_ranks, "slug", lambda _: "b200"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            found = tune_ranks.decide(Comm(), [], torch.device("cpu"))
        except (RuntimeError, ValueError, OSError) as caught:
            error = f"{type(caught).__name__}: {caught}"
    saved = tables.load_user("b200")
    return {
        "calls": calls,
        "error": error,
        "entries": None if found is None else found.entries,
        "saved": None if saved is None else saved.entries,
    }


def test_rank_0_measures_and_all_get_its_table(tmp_path: Path) -> None:
    first, second = pool(2).run(_decide, str(tmp_path), False)
    assert (first["calls"], second["calls"]) == ([0], [])
    assert first["entries"] == second["entries"] == first["saved"] == second["saved"]
    assert first["entries"][KEY]["measured"].config.num_stages == 2


def test_an_error_of_rank_0_reaches_all(tmp_path: Path) -> None:
    first, second = pool(2).run(_decide, str(tmp_path), True)
    assert first["error"] == "RuntimeError: the clock stands still"
    assert second["error"] == "ValueError: rank 0 could not tune: " + first["error"]
    assert not first["saved"] and second["saved"] is None


def test_what_could_not_be_kept_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("a file where the folder belongs")
    first, second = pool(2).run(_decide, str(tmp_path), False)
    assert first["calls"] == [] and "cannot be written" in first["error"]
    assert "cannot be written" in second["error"]
