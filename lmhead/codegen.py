"""Compile a kernel for an architecture without a GPU, and read what the machine code says.

Triton brings its own assembler and disassembler, so a real cubin for sm_90 or sm_100 can be made
and inspected on any x86-64 Linux machine.  `compile_kernel` does the first, `Report` holds the
second: registers, spills, stack, shared and tensor memory, and the instructions whose count decides
whether a kernel is any good.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lmhead.kernels import gemm, reassemble, sample
from lmhead.kernels.config import (
    ARCHS,
    VECTOR_BYTES,
    Arch,
    GemmConfig,
    ReassembleConfig,
)

# Triton's names of the dtypes that cross a kernel's pointers, by torch's.
POINTERS = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int16": "*i16",
    "int32": "*i32",
}
# Opcodes that write global memory; STS and LDGSTS write shared memory.
GLOBAL_STORES = ("STG", "ST.", "UTMASTG")


@dataclass(frozen=True)
class Report:
    """What one compiled kernel uses.  Bytes are per program, registers per thread."""

    arch: str
    registers: int
    stack_bytes: int
    spills: int  # LDL + STL instructions
    shared_bytes: int
    tensor_memory_columns: int
    instructions: int
    counts: Mapping[str, int]  # of SASS opcodes with their modifiers, e.g. "LDG.E.128"
    ttir: str

    def count(self, *parts: str) -> int:
        """How many instructions' opcodes hold all of `parts`, e.g. count("STG", "128")."""
        return sum(n for opcode, n in self.counts.items() if all(part in opcode for part in parts))

    def problems(self, arch: Arch) -> list[str]:
        """Why this kernel must not be used, in words; empty when it may."""
        found = []
        if self.spills or self.stack_bytes:
            found.append(f"{self.spills} spills, {self.stack_bytes} bytes of stack")
        if self.shared_bytes > arch.shared_bytes:
            found.append(
                f"{self.shared_bytes} bytes of shared memory, the limit is {arch.shared_bytes}"
            )
        if self.tensor_memory_columns > arch.tensor_memory_columns:
            found.append(
                f"{self.tensor_memory_columns} columns of tensor memory, the limit is "
                f"{arch.tensor_memory_columns}"
            )
        if not any(opcode.startswith(GLOBAL_STORES) for opcode in self.counts):
            found.append(f"an empty body ({self.instructions} instructions, no store)")
        return found


# The tensor-core instruction of each architecture.
TENSOR_CORE = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}


def shortcomings(
    report: Report, config: GemmConfig | ReassembleConfig, out_itemsize: int, unit: int
) -> list[str]:
    """`Report.problems`, and whether a tuned kernel is what it should be: tensor cores and bulk
    loads for a GEMM, 16-byte accesses where rows of S elements allow them (`unit` divides S).
    """
    found = report.problems(ARCHS[report.arch])
    stores = {op: n for op, n in report.counts.items() if op.startswith("STG")}
    wide = unit * out_itemsize % VECTOR_BYTES == 0
    narrow = sum(n for op, n in stores.items() if op != "STG.E.128")
    if isinstance(config, GemmConfig):
        if config.splits > 1:  # fp32 partial sums
            wide = unit * 4 % VECTOR_BYTES == 0
        if config.kind == "bulk" and not report.count(TENSOR_CORE[report.arch]):
            found.append(f"no {TENSOR_CORE[report.arch]}: the tensor cores are not used")
        if config.kind == "bulk" and not report.count("UTMALDG"):
            found.append("no UTMALDG: operands do not come by bulk loads")
    else:
        barriers = sum(n for op, n in report.counts.items() if op.split(".")[0] == "BAR")
        if config.kind == "band" and barriers != 1:
            found.append(f"{barriers} barriers instead of one")
        if config.kind == "cycle":
            narrow -= 1  # the one piece that a cycle sets aside
    if wide and narrow > 0:
        found.append(f"{narrow} stores narrower than 16 bytes")
    return found


def compile_kernel(
    kernel: Any,
    arch: str,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    aligned: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 3,
) -> Report:
    """Compile a `triton.jit` function for `arch` ("sm_90", "sm_100") and disassemble it.

    `arguments` maps run-time arguments to Triton types ("*bf16", "i32", "fp32"), `constants` the
    rest to their values; `aligned` names the arguments that a launch would find divisible by 16.
    Raises RuntimeError where the kernels were imported under Triton's interpreter, which leaves
    nothing to compile.
    """
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError(
            "kernels imported with TRITON_INTERPRET=1 cannot be compiled; unset it first"
        )
    target = GPUTarget("cuda", ARCHS[arch].capability, 32)
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    attrs = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in aligned
        if name in arguments
    }
    source = ASTSource(kernel, signature, dict(constants), attrs)
    built = triton.compile(
        source, target=target, options={"num_warps": num_warps, "num_stages": num_stages}
    )
    usage, counts = _disassemble(built.asm["cubin"])
    return Report(
        arch=arch,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        spills=sum(n for opcode, n in counts.items() if opcode.startswith(("LDL", "STL"))),
        shared_bytes=built.metadata.shared,
        tensor_memory_columns=getattr(built.metadata, "tmem_size", 0) or 0,
        instructions=sum(counts.values()),
        counts=counts,
        ttir=str(built.asm["ttir"]),
    )


def _disassemble(cubin: bytes) -> tuple[dict[str, int], Counter[str]]:
    """(resource usage, opcode counts) of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
        sass = subprocess.run(
            [tool, "-sass", file.name], check=True, capture_output=True, text=True
        ).stdout
    fields = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    # A line of code reads "/*0a40*/  @!P0 LDG.E.128 R4, desc[...][...] ;"
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", sass)
    return fields, Counter(opcodes)


def compile_gemm(
    arch: str,
    config: GemmConfig,
    *,
    operands: str = "bfloat16",
    out: str = "bfloat16",
    bias: str | None = None,
    scaled: bool = False,
    softcapped: bool = False,
    wide_loads: bool = True,
    store_unit: int = 16,
) -> Report:
    """The GEMM as `gemm.launch_gemm` would launch it for contiguous operands; dtypes by torch's
    names.

    `wide_loads`: H is a multiple of 16, so that operand rows start on 16-byte borders; S is a
    multiple of `store_unit`.  Raises ValueError for a library config, which has no kernel of ours.
    """
    if config.kind == "library":
        raise ValueError("a library config has no kernel to compile")
    split = config.splits > 1
    arguments = {
        "bias_ptr": POINTERS[bias or operands],
        "partial_ptr": POINTERS["float32" if split else out],
        "partial_stride_t": "i32",
        "T": "i32",
        "S": "i32",
        "H": "i32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    constants: dict[str, Any] = {
        "HAS_BIAS": bias is not None and not split,
        "HAS_SCALE": scaled and not split,
        "HAS_SOFTCAP": softcapped and not split,
        "BLOCK_T": config.block_t,
        "BLOCK_V": config.block_v,
        "BLOCK_H": config.block_h,
    }
    aligned = ["bias_ptr", "partial_ptr"]
    aligned += ["partial_stride_t", "S"] if store_unit == 16 else []
    aligned += ["H"] if wide_loads else []
    if config.kind == "bulk":
        kernel = gemm._bulk_kernel
        block = f"tensordesc<{POINTERS[operands][1:]}[{{}},{config.block_h}]>"
        arguments |= {
            "hidden_desc": block.format(config.block_t),
            "tail_desc": block.format(config.tail_t or config.block_t),
            "weight_desc": block.format(config.block_v),
        }
        constants |= {
            "TAIL_T": config.tail_t,
            "SPLITS": config.splits,
            "STAGES": config.num_stages,
            "WARP_SPECIALIZE": config.warp_specialize,
            "UNIT": store_unit,
        }
    else:
        kernel = gemm._pointer_kernel
        arguments |= {
            "hidden_ptr": POINTERS[operands],
            "hidden_stride_t": "i32",
            "weight_ptr": POINTERS[operands],
            "weight_stride_s": "i32",
        }
        constants |= {"hidden_stride_h": 1, "weight_stride_h": 1}
        aligned += ["hidden_ptr", "weight_ptr"]
        aligned += ["hidden_stride_t", "weight_stride_s"] if wide_loads else []
    return compile_kernel(
        kernel,
        arch,
        arguments,
        constants,
        aligned=tuple(aligned),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def compile_add_up(
    arch: str, splits: int, *, out: str = "bfloat16", bias: str = "bfloat16", store_unit: int = 16
) -> Report:
    """The kernel that adds up the sums of `splits` parts of H, with its whole epilogue."""
    arguments = {"sums_ptr": "*fp32", "bias_ptr": POINTERS[bias], "partial_ptr": POINTERS[out]}
    arguments |= dict.fromkeys(
        ("sums_stride_split", "sums_stride_t", "partial_stride_t", "T", "S"), "i32"
    )
    arguments |= {"scale": "fp32", "softcap": "fp32"}
    constants: dict[str, Any] = dict.fromkeys(("HAS_BIAS", "HAS_SCALE", "HAS_SOFTCAP"), True)
    constants |= {"SPLITS": splits, "UNIT": store_unit}
    constants |= {"BLOCK_T": gemm.ADD_UP_ROWS, "BLOCK_V": gemm.ADD_UP_COLUMNS}
    sizes = ("sums_stride_split", "sums_stride_t", "partial_stride_t", "S")
    aligned = ("sums_ptr", "bias_ptr", "partial_ptr", *(sizes if store_unit == 16 else ()))
    return compile_kernel(gemm._add_up_kernel, arch, arguments, constants, aligned=aligned)


def compile_reassemble(
    arch: str,
    config: ReassembleConfig,
    *,
    source: str = "int16",
    out: str | None = None,
    unit: int = 16,
) -> Report:
    """A reassembly kernel; `source` and `out` are the dtypes as they are moved (bf16 in place moves
    as int16).

    `unit`: the largest power of two up to 16 that divides S, V and the strides.
    """
    constants = {"UNIT": unit, "BLOCK_ROWS": config.block_rows, "BLOCK_S": config.block_s}
    sizes: tuple[str, ...] = ()
    if unit % 16 == 0:
        sizes = ("S", "V", "received_stride_n", "received_stride_b", "out_stride_b")
    pointers = ("data_ptr", "received_ptr", "out_ptr", "order_ptr", "start_ptr")
    if config.kind == "band":
        kernel = reassemble._band_kernel
        arguments = {"data_ptr": POINTERS[source], "N": "i32", "B": "i32", "S": "i32"}
    elif config.kind == "cycle":
        kernel = reassemble._cycle_kernel
        arguments = {
            "data_ptr": POINTERS[source],
            "order_ptr": "*i32",
            "start_ptr": "*i32",
            "cycles": "i32",
            "S": "i32",
        }
    else:
        kernel = reassemble._copy_kernel
        arguments = {"received_ptr": POINTERS[source], "out_ptr": POINTERS[out or source]}
        arguments |= dict.fromkeys(
            ("received_stride_n", "received_stride_b", "out_stride_b", "N", "B", "S", "V"), "i32"
        )
    return compile_kernel(
        kernel, arch, arguments, constants, aligned=pointers + sizes, num_warps=config.num_warps
    )


def _integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def compile_fused(
    arch: str,
    config: GemmConfig,
    *,
    operands: str = "bfloat16",
    noise: bool = True,
    sums: bool = True,
    write: bool = True,
    fours: bool = True,
    softcapped: bool = False,
    unit: int = 16,
) -> Report:
    """The GEMM that summarises its tiles for a draw, as `sample.fused` launches it."""
    block = f"tensordesc<{POINTERS[operands][1:]}[{{}},{config.block_h}]>"
    arguments = {
        "hidden_desc": block.format(config.block_t),
        "tail_desc": block.format(config.tail_t or config.block_t),
        "weight_desc": block.format(config.block_v),
        "bias_ptr": POINTERS[operands],
        "partial_ptr": POINTERS[operands],
        "records_ptr": "*i32",
        "summary_ptr": "*fp32",
        "scale": "fp32",
        "softcap": "fp32",
    } | _integers("partial_stride_t", "T", "S", "H", "held", "first")
    constants = {
        "HAS_BIAS": False,
        "HAS_SCALE": False,
        "HAS_SOFTCAP": softcapped,
        "WORDS": 8,
        "NOISE": noise,
        "FOURS": fours,
        "SUMS": sums,
        "MASSES": False,
        "WRITE": write,
        "BLOCK_T": config.block_t,
        "TAIL_T": config.tail_t,
        "BLOCK_V": config.block_v,
        "BLOCK_H": config.block_h,
        "STAGES": config.num_stages,
        "WARP_SPECIALIZE": config.warp_specialize,
        "UNIT": unit,
    }
    aligned = ["bias_ptr", "partial_ptr", "records_ptr", "summary_ptr", "H"]
    aligned += ["partial_stride_t", "S"] if unit == 16 else []
    return compile_kernel(
        sample._fused_kernel,
        arch,
        arguments,
        constants,
        aligned=tuple(aligned),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def compile_scan(arch: str, *, source: str = "bfloat16", fours: bool = True) -> Report:
    """The one pass over partial logits that summarises tiles, with noise and both sums."""
    arguments = {
        "partial_ptr": POINTERS[source],
        "records_ptr": "*i32",
        "summary_ptr": "*fp32",
    } | _integers("partial_stride_t", "T", "S", "first")
    constants = dict.fromkeys(("NOISE", "SUMS", "MASSES"), True) | {
        "FOURS": fours,
        "WORDS": 8,
        "BLOCK_T": sample.SCAN_ROWS,
        "BLOCK_V": sample.SCAN_COLUMNS,
        "UNIT": 16,
    }
    aligned = ("partial_ptr", "records_ptr", "summary_ptr", "partial_stride_t")
    return compile_kernel(sample._scan_kernel, arch, arguments, constants, aligned=aligned)


def compile_pick(arch: str, count: int, tiles: int, *, source: str = "bfloat16") -> Report:
    """The kernel that picks a shard's first `count` candidates of `tiles` tiles of a scan."""
    arguments = {
        "summary_ptr": "*fp32",
        "partial_ptr": POINTERS[source],
        "records_ptr": "*i32",
        "out_ptr": "*i32",
    } | _integers("partial_stride_t", "T", "S", "first", "tiles_s")
    sizes, num_warps = sample.pick_sizes(count, tiles)
    constants = {
        "WORDS": 8,
        "WIDTH": 2 * count + 4,
        "COUNT": count,
        "VALUES_AT": 0,
        "IDS_AT": count,
        "LSE_AT": 2 * count,
        "MASS_AT": 2 * count + 2,
        "PLAIN": False,
        "BLOCK_V": sample.SCAN_COLUMNS,
    } | sizes
    aligned = ("summary_ptr", "partial_ptr", "records_ptr", "out_ptr", "partial_stride_t")
    return compile_kernel(
        sample._pick_kernel, arch, arguments, constants, aligned=aligned, num_warps=num_warps
    )


def compile_merge(arch: str, ranks: int, count: int) -> Report:
    """The kernel by which a row's owner draws from `count` candidates of each rank."""
    arguments = {
        "messages_ptr": "*i32",
        "records_ptr": "*i32",
        "mass_ptr": "*fp64",
        "ids_ptr": "*i64",
        "status_ptr": "*u8",
        "value_ptr": "*fp32",
    } | _integers("N", "B", "shard", "vocab_size")
    slots, num_warps = sample.merge_sizes(ranks, count)
    constants = {"WORDS": 8, "WIDTH": 2 * count, "COUNT": count, "BY_MASS": True, "SLOTS": slots}
    return compile_kernel(sample._merge_kernel, arch, arguments, constants, num_warps=num_warps)
