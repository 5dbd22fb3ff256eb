"""`lmhead bench head`, `exchange` and `scale`: the cases, and how ranks go through them.

Ranks are started once, for the largest N; a case of fewer ranks runs on a group of the first ones
while the others wait at a barrier.  How a case is measured is said in `lmhead.bench.protocol`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lmhead import launch
from lmhead.bench import machine, methods, protocol, rates
from lmhead.bench.cases import Case
from lmhead.bench.protocol import Settings
from lmhead.bench.results import Report
from lmhead.bench.roofline import Limits, limits_of
from lmhead.devices import DEVICES, slug
from lmhead.launch import LaunchError
from lmhead.progress import Progress

# A rank that compiles, or waits for one that does, takes minutes on a busy machine.
TIMEOUT_S = 1800
# Measured: a rank with torch imported takes about this much before any tensor.
RANK_BYTES = 300 << 20
# A CPU is not made to wait for a model's full H; the head's stages are all there at this one.
CPU_HIDDEN = 512


@dataclass(frozen=True)
class Suite:
    """What ranks are asked to do."""

    kind: str
    cases: tuple[Case, ...]
    settings: Settings


def run(suite: Suite) -> Report | None:
    """Measure on ranks that are started here, or torchrun's; None on all of these but rank 0.
    LaunchError or ValueError, in one line, for what cannot be.
    """
    most = max(case.ranks for case in suite.cases)
    if launch.under_torchrun():
        there = launch.world_size(most)
        if most > there:
            raise LaunchError(f"{most} ranks are asked for and torchrun started {there}")
        most = there
    needed = max(_bytes(case, suite.settings) * case.ranks for case in suite.cases)
    share = launch.local_ranks(most) / most
    launch.require_memory(
        int(needed * share) + launch.local_ranks(most) * RANK_BYTES, f"bench {suite.kind}"
    )
    found = launch.run(job, most, suite, timeout_s=TIMEOUT_S)
    assert found is None or isinstance(found, Report)
    return found


def job(rank: int, ranks: int, device: torch.device, suite: Suite) -> Report | None:
    """One rank's part; rank 0 returns the report."""
    sizes = sorted({case.ranks for case in suite.cases})
    groups: dict[int, Any] = {
        size: dist.group.WORLD if size == ranks else dist.new_group(list(range(size)))
        for size in sizes
    }
    settings = suite.settings
    facts = machine.facts(device) if rank == 0 else {}
    report = Report(suite.kind, settings.cadence, settings.rounds, facts, [])
    threads = torch.get_num_threads()
    with torch.inference_mode(), Progress(f"bench {suite.kind}", show=rank == 0) as bar:
        for done, case in enumerate(suite.cases):

            def note(part: int, parts: int, done: int = done, case: Case = case) -> None:
                bar.at(done * parts + part, len(suite.cases) * parts, str(case))

            if rank < case.ranks:
                _on_cores_of(case, ranks, device, threads)
                group = groups[case.ranks]
                if case.ranks not in report.limits:
                    report.limits[case.ranks] = _limits(case, group, device)
                report.rows += protocol.measure_case(
                    case, group, device, settings, report.limits[case.ranks], note
                )
            dist.barrier()
    return report if rank == 0 else None


def _on_cores_of(case: Case, ranks: int, device: torch.device, threads: int) -> None:
    """Fewer ranks share the cores among fewer."""
    if device.type == "cpu" and not launch.under_torchrun():
        cores = os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // case.ranks) if ranks != case.ranks else threads)


def _limits(case: Case, group: Any, device: torch.device) -> Limits:
    """The rates that floors are drawn from: a known GPU's vendor's, else what is measured here."""
    barrier, slowest = protocol.barrier_of(group), protocol.slowest_of(group, device)
    found = rates.measure(group, device, case, barrier, slowest)
    known = DEVICES.get(slug(device))
    if known is None:
        return found
    vendor = limits_of(known)
    return replace(
        vendor,
        source=f"{vendor.source}; measured at start: copy {found.memory / 1e12:.2f} TB/s, "
        f"matmul {found.math / 1e12:.0f} TFLOP/s, all-to-all {found.wire / 1e9:.0f} GB/s",
    )


def _bytes(case: Case, settings: Settings) -> int:
    """A rank's memory at its fullest, roughly: what each method keeps, and one method's own."""
    partial, names = case.total * case.shard * case.itemsize, set(settings.names)
    twice = 2 if settings.stages else 1  # the stages have buffers of their own
    ours = sum(name.startswith("lmhead") for name in names)
    kept = case.rows_of(0).group_total
    own = (4 + 2 * twice * ours) * partial + 3 * kept * case.vocab * 4
    fresh = {"a": 2, "a-lean": 1, "e": 3}
    full = names | {methods.SAMPLED[name][0] for name in names if name in methods.SAMPLED}
    everything = max([0, *(count for name, count in fresh.items() if name in full)])
    everything += twice if "lmhead-all-gather" in names else 0
    if "lmhead-replicate" in names and not case.layout.plain:
        # Copies for a group's ranks, and what they are sent: as many; or all logits of all ranks.
        own += 2 * twice * case.layout.span * partial
    own += everything * case.ranks * partial
    if settings.exchange_only:
        return own
    if names & set(methods.DRAWING):
        ours = sum(name in names for name in (methods.CANDIDATES, "lmhead-torch"))
        ours += "lmhead-torch-lean" in names
        own += 2 * ours * partial + 8 * case.rows * case.vocab * 4  # a sampler's copies
    weight = case.shard * case.hidden * case.itemsize
    return own + weight * (6 + (2 * case.ranks if "g" in settings.names else 0))


def scale_cases(
    models: Sequence[tuple[str, int, int]],
    rows: Sequence[int],
    ranks: Sequence[int],
    dtype: str,
) -> tuple[Case, ...]:
    """Three lines through one point: over B at the largest N, over N at the middle B, and over V
    by model at the largest N and the middle B.
    """
    name, vocab, hidden = models[0]
    most, middle = max(ranks), middle_rows(rows)
    found = [Case(name, vocab, hidden, most, count, dtype) for count in rows]
    found += [Case(name, vocab, hidden, size, middle, dtype) for size in ranks]
    found += [Case(other, v, h, most, middle, dtype) for other, v, h in models]
    return tuple(dict.fromkeys(found))


def middle_rows(rows: Sequence[int]) -> int:
    """The B at which other things are varied."""
    return sorted(rows)[len(rows) // 2]
