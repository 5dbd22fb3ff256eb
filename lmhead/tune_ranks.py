"""Tuning under torchrun: rank 0 measures and decides, and every rank gets its answer."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lmhead import measure, tables
from lmhead.comm import Call, Comm
from lmhead.devices import slug
from lmhead.launch import under_torchrun
from lmhead.tables import Table
from lmhead.tune import Problem


def tune_ranks(
    problems: Sequence[Problem],
    *,
    again: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Table:
    """`measure.tune_device` on this process' GPU; under torchrun on rank 0's, for all ranks.
    OSError, before anything is measured, where the result could not be kept.
    """
    if not under_torchrun():
        device = torch.device("cuda", torch.cuda.current_device())
        require_a_place(device)
        table = measure.tune_device(problems, device, again=again, progress=progress)
        tables.save(table)
        return table
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    # The others wait as long as it takes.
    dist.init_process_group("gloo", timeout=datetime.timedelta(days=1))
    try:
        return decide(Comm(), problems, device, again=again, progress=progress)
    finally:
        dist.destroy_process_group()


def require_a_place(device: torch.device) -> None:
    """OSError where the user's table cannot be written or is not ours to replace; a measurement
    takes long.
    """
    try:
        tables.save(Table(slug(device)))
    except tables.NotReplaced:
        raise
    except OSError as error:
        raise OSError(
            f"{tables.user_folder()} cannot be written ({error}): set LMHEAD_CONFIGS to a folder"
        ) from error


def decide(
    comm: Comm,
    problems: Sequence[Problem],
    device: torch.device,
    *,
    again: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Table:
    """Rank 0's table on every rank, and in the user's file of every machine.  An error of rank 0 is
    raised there, and as ValueError with its words on the others.
    """
    text, error = "", None
    if comm.rank == 0:
        try:
            require_a_place(device)
            table = measure.tune_device(problems, device, again=again, progress=progress)
            text = tables.dump(table)
        except Exception as caught:
            error, text = caught, f"{type(caught).__name__}: {caught}"
    said = comm.share(text.encode(), Call("tune", (), 0, "", 0), torch.device("cpu")).decode()
    if error is not None:
        raise error
    if not said.startswith("{"):
        raise ValueError(f"rank 0 could not tune: {said}")
    found = tables.parse(said)
    if comm.rank == 0:  # entry by entry it is kept already, unless the folder failed meanwhile
        tables.save(found)
    else:  # which may be another machine; on rank 0's it changes nothing
        tables.save_user(found)
    return found
