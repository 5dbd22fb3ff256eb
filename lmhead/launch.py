"""Rank processes: the ones torchrun started, or N that this machine starts by itself.

A failure of any rank ends all of them and reaches the caller as `LaunchError`, one line that names
the rank and the cause.  Children end with their parent, so nothing is left running.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

# A job: (rank, ranks, device, *arguments) -> result.  Only rank 0's result is kept.
Job = Callable[..., Any]

TIMEOUT_S = 300


class LaunchError(RuntimeError):
    """Ranks could not be started or did not survive; the text is one line."""


def under_torchrun() -> bool:
    """Whether this process already is one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run(job: Job, ranks: int, *arguments: Any, timeout_s: float = TIMEOUT_S) -> Any:
    """Run `job` on N ranks and return rank 0's result.

    Under torchrun the ranks are the ones found (`ranks` is not looked at), every one of them must
    call this, and all but rank 0 get None.  Otherwise `ranks` processes are started here, with NCCL
    where this machine has a GPU for each and gloo on the CPU otherwise.  `timeout_s` is the group's
    timeout.
    """
    if under_torchrun():
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", rank))
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        device = _join("env://", rank, ranks, local, local_ranks, timeout_s)
        try:
            result = job(rank, ranks, device, *arguments)
        finally:
            dist.destroy_process_group()
        return result if rank == 0 else None
    with tempfile.TemporaryDirectory(prefix="lmhead-") as folder:
        context = start_processes(
            _entry,
            args=(job, ranks, folder, os.getpid(), arguments, timeout_s),
            nprocs=ranks,
            join=False,
            start_method="spawn",
        )
        assert context is not None
        try:
            while not context.join(grace_period=5):
                pass
        except (ProcessExitedException, ProcessRaisedException) as error:
            raise LaunchError(_cause(context, error)) from error
        finally:  # an interrupt too takes the ranks along
            for process in context.processes:
                process.kill()
        try:
            return pickle.loads((Path(folder) / "result").read_bytes())
        except FileNotFoundError as error:
            raise LaunchError("rank 0 ended without a result: it was interrupted") from error


def world_size(ranks: int) -> int:
    """The number of ranks that `run` would run on: torchrun's, or `ranks`."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else ranks


def local_ranks(ranks: int) -> int:
    """How many of `ranks` ranks run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) if under_torchrun() else ranks


def on_cuda(local_ranks: int) -> bool:
    """Whether `run` computes on CUDA: where this machine has a device for each of its ranks."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks


def require_memory(needed: int, what: str) -> None:
    """LaunchError where fewer than `needed` bytes of memory are available: on the machine, or in
    this process's control group (Linux; elsewhere no check).
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    fields = dict(line.split(":", 1) for line in lines)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no such file, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    if needed > available:
        raise LaunchError(
            f"{what} needs about {needed / 2**30:.1f} GiB of memory and "
            f"{available / 2**30:.1f} GiB are available: use fewer ranks (--ranks)"
        )


def _entry(
    rank: int,
    job: Job,
    ranks: int,
    folder: str,
    parent: int,
    arguments: tuple[Any, ...],
    timeout_s: float,
) -> None:
    # torch asks for an interrupt, which a process started in the background ignores.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    if os.getppid() != parent:  # it died while we were imported, before it could take us along
        return
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    device = _join(f"file://{folder}/store", rank, ranks, rank, ranks, timeout_s)
    result = job(rank, ranks, device, *arguments)
    if rank == 0:
        (Path(folder) / "result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def _join(
    method: str, rank: int, ranks: int, local_rank: int, local_ranks: int, timeout_s: float
) -> torch.device:
    """Initialise the default group; the device that this rank computes on."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if on_cuda(local_ranks):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl",
            init_method=method,
            rank=rank,
            world_size=ranks,
            timeout=timeout,
            device_id=device,
        )
        return device
    dist.init_process_group(
        "gloo", init_method=method, rank=rank, world_size=ranks, timeout=timeout
    )
    return torch.device("cpu")


def _cause(context: ProcessContext, error: ProcessExitedException | ProcessRaisedException) -> str:
    """One line: which rank ended everything, and why.

    A rank that is killed takes the others' collectives down with it, and theirs may be the error
    that was seen first.
    """
    killed = {
        rank: -process.exitcode
        for rank, process in enumerate(context.processes)
        if process.exitcode is not None
        and process.exitcode < 0
        and process.exitcode != -signal.SIGTERM
    }
    if killed:
        rank, number = next(iter(killed.items()))
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        name = signal.Signals(number).name
        return f"rank {rank} was killed by {name}{hint}; the other ranks were stopped"
    if isinstance(error, ProcessExitedException):
        status = error.exit_code
        return f"rank {error.error_index} exited with status {status}; the other ranks were stopped"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"rank {error.error_index} failed: {lines[-1]}"
