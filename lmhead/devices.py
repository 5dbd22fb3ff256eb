"""What the GPUs that we ship tables for can do, with where each figure is from.

Rates are the vendor's for dense bf16 and one direction of NVLink; what a program reaches of them is
for a measurement to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmhead.kernels.config import ARCHS, OTHER, Arch


@dataclass(frozen=True)
class Device:
    """One GPU model.  Bytes and FLOPs per second, bytes, counts."""

    name: str  # as the vendor writes it; its lower case names the table
    arch_name: str
    sms: int
    hbm: float  # bytes/s, read or written
    bf16: float  # FLOP/s, dense, 16-bit operands and fp32 accumulators
    flop_per_clock: int  # of one SM's tensor cores, dense bf16
    nvlink: float  # bytes/s, one direction
    l2_bytes: int
    shared_bytes: int = 233472  # of an SM: 228 KiB (CUDA programming guide, compute capabilities)
    registers: int = 65536  # of an SM
    threads: int = 2048  # of an SM

    @property
    def arch(self) -> Arch:
        return ARCHS[self.arch_name]

    @property
    def clock(self) -> float:
        """Hz at which the tensor cores give the peak rate."""
        return self.bf16 / (self.sms * self.flop_per_clock)


DEVICES = {
    device.name.lower(): device
    for device in (
        # DGX B200 and HGX B200 datasheets (8 TB/s and 2.25 PFLOP/s a GPU, 1.8 TB/s of NVLink both
        # ways); 148 SMs and 126 MB of L2 as the driver reports them.
        Device("B200", "sm_100", 148, 8.0e12, 2250e12, 8192, 900e9, 126 << 20),
        # H200 and H100 SXM datasheets; H100 whitepaper (132 SMs, 4096 dense FLOP per clock and SM,
        # 50 MB of L2).
        Device("H200", "sm_90", 132, 4.8e12, 989e12, 4096, 450e9, 50 << 20),
        Device("H100", "sm_90", 132, 3.35e12, 989e12, 4096, 450e9, 50 << 20),
    )
}


def of_arch(arch: str) -> list[Device]:
    """The devices of an architecture, the most recent memory first."""
    return [device for device in DEVICES.values() if device.arch_name == arch]


def slug(device: torch.device) -> str:
    """The name under which a device's tables are kept: "b200", "h200", "h100", else the driver's
    name with dashes ("nvidia-a100-sxm4-80gb"); "cpu" for a CPU, which Triton's interpreter serves.
    """
    if device.type != "cuda":
        return device.type
    words = torch.cuda.get_device_name(device).lower().replace("/", " ").split()
    known = [word for word in words if word in DEVICES]
    # "NVIDIA H100 PCIe" and "H100 NVL" have fewer SMs and slower memory than the SXM part.
    if known and not {"pcie", "nvl", "mig"} & set(words):
        return known[0]
    return "-".join(words)


def arch_of(device: torch.device) -> Arch:
    """What programs may use on `device`; on a CPU, whose interpreter knows no limits, Hopper's."""
    if device.type != "cuda":
        return ARCHS["sm_90"]
    major, _ = torch.cuda.get_device_capability(device)
    # 12.x are the gaming cards, without tensor memory and with less shared memory.
    return {9: ARCHS["sm_90"], 10: ARCHS["sm_100"]}.get(major, OTHER)
