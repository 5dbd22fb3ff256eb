"""What this machine does at best, measured at the start of a benchmark by all ranks at once: the
rates that its floors are drawn from.

Protocol.  Interleaved, a barrier before each window, the slowest rank's time, and of all rounds and
sizes the BEST: a rate that something reached is the one that a floor may be drawn from.  Ranks that
share a machine share its rates, so a rate is one rank's share.  Bytes are counted read plus written
for a copy, received for the all-to-all.  Random data: some units run faster on zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lmhead import timing
from lmhead.bench.cases import Case
from lmhead.bench.roofline import Limits

MIB = 1 << 20
# Bytes of a buffer, and of what a rank sends: the smaller ones lie in a cache, as decode's blocks
# may.
COPIES = (1 * MIB, 8 * MIB, 64 * MIB)
EXCHANGES = (1 * MIB, 8 * MIB)
TILE = 1 * MIB  # of random numbers, which are slow to make
MATRIX = 1024
ROUNDS = 5
# Figures above these by more than a tenth, or what a vendor promises, are flagged.
MARGIN = 1.1


def measure(
    group: dist.ProcessGroup | None,
    device: torch.device,
    case: Case,
    barrier: Callable[[], None] = lambda: None,
    slowest: Callable[[list[float]], list[float]] = lambda seconds: seconds,
    rounds: int = ROUNDS,
) -> Limits:
    """The rates of one rank of `group` in the case's dtype; every rank of it calls.  None: this
    process is alone.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(case.torch_dtype)

    methods: dict[str, Callable[[], object]] = {}
    work: dict[str, tuple[str, float]] = {}

    def add(kind: str, amount: float, method: Callable[[], object]) -> None:
        name = f"{kind} {len(methods)}"
        methods[name], work[name] = method, (kind, amount)

    tile = normal(TILE // case.itemsize)
    for size in COPIES:
        source = tile.repeat(size // tile.nbytes)
        target = torch.empty_like(source)
        add("memory", 2 * size, lambda t=target, s=source: t.copy_(s))  # type: ignore[misc]
    for rows in dict.fromkeys((min(case.total, MATRIX), MATRIX)):
        a, b = normal(rows, MATRIX), normal(4 * MATRIX, MATRIX).t()
        out = torch.empty(rows, 4 * MATRIX, dtype=case.torch_dtype, device=device)
        flops = 2.0 * rows * 4 * MATRIX * MATRIX
        add("math", flops, lambda a=a, b=b, o=out: torch.mm(a, b, out=o))  # type: ignore[misc]
    if ranks > 1:
        for size in EXCHANGES:
            numel = size // case.itemsize // ranks * ranks
            send = tile.repeat(size // tile.nbytes)[:numel]
            received = torch.empty_like(send)
            add(
                "wire",
                send.nbytes * (ranks - 1) / ranks,
                lambda r=received, s=send: dist.all_to_all_single(r, s, group=group),  # type: ignore[misc]
            )
    timed = timing.interleaved(methods, rounds, device=device, barrier=barrier, slowest=slowest)
    best = {"memory": 0.0, "math": 0.0, "wire": 0.0}
    for name, (kind, amount) in work.items():
        best[kind] = max(best[kind], amount / min(timed[name].seconds))
    if ranks == 1:
        best["wire"] = float("inf")
    cpu = device.type == "cpu"
    return Limits(
        name="this machine" if cpu else f"this machine's {torch.cuda.get_device_name(device)}",
        memory=best["memory"],
        math=best["math"],
        wire=best["wire"],
        source="measured at start" + (f" by {ranks} ranks at once" if ranks > 1 else ""),
        math_name="arithmetic" if cpu else "tensor cores",
        wire_name="loopback" if cpu else "NVLink",
    )
