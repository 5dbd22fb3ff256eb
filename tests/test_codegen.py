"""The kernels compiled for sm_90 and sm_100, without a GPU: spills, access widths, tensor-core
instructions, limits, and products in 64 bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter
from typing import Any

import pytest
import triton
from compiling import Compiling
from probes import narrow_row_probe, wide_row_probe

from lmhead import codegen
from lmhead.codegen import Report
from lmhead.kernels import gemm, reassemble
from lmhead.kernels.config import (
    ARCHS,
    LIBRARY,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    default_gemm,
    default_pointer_gemm,
    default_reassemble,
    deterministic_gemm,
    fits,
)

# The assembler that comes with Triton 3.6 moves two registers of one default GEMM to the stack.
OLD_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8)

CARRIERS = {2: "int16", 4: "int32"}
S, H = 16160, 7168  # DeepSeek-V4-Pro over 8 ranks


def probe(name: str) -> Report:
    """Compile a probe; runs in the compiler's process, where it is a real jit function."""
    kernel = {"narrow": narrow_row_probe, "wide": wide_row_probe}[name]
    arguments = {"x_ptr": "*fp32", "out_ptr": "*fp32", "stride": "i32"}
    return codegen.compile_kernel(kernel, "sm_90", arguments, {"BLOCK": 32})


def of_ones(kernel: str, ones: tuple[str, ...]) -> Report:
    """Compile a kernel as a launch would where the arguments `ones` are 1: Triton makes them
    constants, which the interpreter does not.
    """
    sizes = ("received_stride_n", "received_stride_b", "out_stride_b", "N", "B", "S", "V")
    tile = {"UNIT": 1, "BLOCK_ROWS": 16, "BLOCK_S": 8}
    function, arguments, constants = {
        "band": (reassemble._band_kernel, {"data_ptr": "*i16"} | _ints("N", "B", "S"), tile),
        "cycle": (
            reassemble._cycle_kernel,
            {"data_ptr": "*i16", "order_ptr": "*i32", "start_ptr": "*i32"} | _ints("cycles", "S"),
            tile,
        ),
        "copy": (
            reassemble._copy_kernel,
            {"received_ptr": "*bf16", "out_ptr": "*fp32"} | _ints(*sizes),
            tile,
        ),
        "gemm": (
            gemm._pointer_kernel,
            dict.fromkeys(("hidden_ptr", "weight_ptr", "bias_ptr", "partial_ptr"), "*bf16")
            | _ints("hidden_stride_t", "hidden_stride_h", "weight_stride_s", "weight_stride_h")
            | _ints("partial_stride_t", "T", "S", "H")
            | {"scale": "fp32", "softcap": "fp32"},
            dict.fromkeys(("HAS_BIAS", "HAS_SCALE", "HAS_SOFTCAP"), True)
            | {"BLOCK_T": 16, "BLOCK_V": 64, "BLOCK_H": 32},
        ),
    }[kernel]
    run_time = {name: kind for name, kind in arguments.items() if name not in ones}
    return codegen.compile_kernel(function, "sm_90", run_time, constants | dict.fromkeys(ones, 1))


def _ints(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def accesses(report: Report, kind: str) -> Counter[str]:
    """Global loads ("LDG") or stores ("STG") by their opcode."""
    return Counter({op: n for op, n in report.counts.items() if op.startswith(kind)})


def assert_usable(report: Report) -> None:
    if OLD_TRITON and report.spills <= 2:
        report = dataclasses.replace(report, spills=0, stack_bytes=0)
    assert report.problems(ARCHS[report.arch]) == []


# Reassembly.


def band_configs(itemsize: int) -> list[ReassembleConfig]:
    """Every default band of N = 2..64 ranks up to 4096 pieces, for a wide and a narrow shard."""
    shapes = [
        ReassembleShape(ranks, rows, shard, itemsize)
        for ranks, rows, shard in itertools.product(range(2, 65), (2, 3, 8, 36, 64), (S, 16))
        if ranks * rows <= 4096
    ]
    configs = {default_reassemble(shape, in_place=True) for shape in shapes}
    assert {config.kind for config in configs} == {"band"}
    assert max(config.block_rows for config in configs) == 4096
    return sorted(configs, key=lambda config: (config.block_rows, config.block_s))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_bands_have_one_barrier_16_byte_accesses_and_no_spills(
    compiled: Compiling, itemsize: int
) -> None:
    # Every 16-bit config for one of the two, in turn, and the published workload's for both; a
    # quarter of the 32-bit ones.  A compilation takes half a second, most of it disassembly.
    calls = [
        (config, arch)
        for i, config in enumerate(band_configs(itemsize))
        for j, arch in enumerate(ARCHS)
        if i % (itemsize * itemsize // 2) == j or (config.block_rows, config.block_s) == (512, 32)
    ]
    ask = functools.partial(
        compiled.start, codegen.compile_reassemble, source=CARRIERS[itemsize], unit=16
    )
    for report in [ask(arch, config) for config, arch in calls]:
        report = report.result()
        assert_usable(report)
        assert [n for op, n in report.counts.items() if op.split(".")[0] == "BAR"] == [1]
        loads, stores = accesses(report, "LDG"), accesses(report, "STG")
        assert set(loads) == {"LDG.E.128"} and set(stores) == {"STG.E.128"}
        assert loads.total() == stores.total()


@pytest.mark.parametrize(("itemsize", "shard"), [(2, 32776), (4, 32772)])
def test_a_shard_of_whole_16_byte_words_is_enough_for_16_byte_accesses(
    compiled: Compiling, itemsize: int, shard: int
) -> None:
    unit = math.gcd(16, shard)
    assert unit * itemsize == 16  # which Triton by itself would not see
    for rows, in_place in ((36, True), (2000, True), (36, False))[:: itemsize // 2]:
        config = default_reassemble(ReassembleShape(8, rows, shard, itemsize), in_place)
        report = compiled(
            codegen.compile_reassemble, "sm_90", config, source=CARRIERS[itemsize], unit=unit
        )
        assert_usable(report)
        assert accesses(report, "STG")["STG.E.128"] >= accesses(report, "STG").total() - 1


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_cycles_move_data_16_bytes_at_a_time(compiled: Compiling, arch: str, itemsize: int) -> None:
    config = default_reassemble(ReassembleShape(64, 65, S, itemsize), in_place=True)
    assert config.kind == "cycle"
    report = compiled(codegen.compile_reassemble, arch, config, source=CARRIERS[itemsize])
    assert_usable(report)
    loads, stores = accesses(report, "LDG"), accesses(report, "STG")
    assert loads["LDG.E.128"] == stores["STG.E.128"] > 0
    # The one piece that a cycle sets aside is spread over all threads, 4 bytes each; the other
    # loads are of the int32 table.
    assert stores.total() - stores["STG.E.128"] == 1
    assert set(loads) == {"LDG.E.128", "LDG.E"}


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("int16", "int16"),
        ("int32", "int32"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float16", "bfloat16"),
    ],
)
def test_copies_move_the_wider_side_16_bytes_at_a_time(
    compiled: Compiling, source: str, out: str
) -> None:
    itemsize = 4 if "32" in source + out else 2
    config = default_reassemble(ReassembleShape(8, 36, S, itemsize), in_place=False)
    report = compiled(codegen.compile_reassemble, "sm_100", config, source=source, out=out)
    assert_usable(report)
    if "32" not in source or "32" in out:
        assert set(accesses(report, "STG")) == {"STG.E.128"}
    if "32" not in out or "32" in source:
        assert set(accesses(report, "LDG")) == {"LDG.E.128"}


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("ranks", "rows", "in_place"),
    [(8, 36, True), (8, 128, True), (8, 1024, True), (8, 36, False)],
)
def test_an_odd_shard_does_not_spill(
    compiled: Compiling, ranks: int, rows: int, in_place: bool, itemsize: int
) -> None:
    config = default_reassemble(ReassembleShape(ranks, rows, S + 1, itemsize), in_place)
    arch = list(ARCHS)[itemsize // 2 % 2]
    assert_usable(
        compiled(codegen.compile_reassemble, arch, config, source=CARRIERS[itemsize], unit=1)
    )


def test_a_band_that_does_not_fit_is_seen_to_spill(compiled: Compiling) -> None:
    # 64 single elements a thread: what the predicate refuses, and why.
    config = ReassembleConfig("band", block_rows=512, block_s=32, num_warps=8)
    report = compiled(codegen.compile_reassemble, "sm_90", config, unit=1)
    assert report.spills > 0
    assert any("spills" in problem for problem in report.problems(ARCHS["sm_90"]))


# GEMM.

FULL = {"bias": "bfloat16", "scaled": True, "softcapped": True}
TENSOR_CORE = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("operands", "out"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")],
)
def test_gemm_uses_tensor_cores_wide_stores_and_no_spills(
    compiled: Compiling, arch: str, operands: str, out: str
) -> None:
    size = 4 if out == "float32" else 2
    calls: list[tuple[GemmConfig, dict[str, Any]]] = [
        (default_gemm(GemmShape(rows, S, H, 2, size), ARCHS[arch]), epilogue)
        for rows, epilogue in itertools.product((1, 17, 64, 128, 200, 288, 512), ({}, FULL))
    ]
    assert [config.rows for config, _ in calls[::2]] == [16, 32, 64, 128, 256, 288, 512]
    if operands == "float16":
        calls = calls[-4:-3]
    ask = functools.partial(compiled.start, codegen.compile_gemm, arch, operands=operands, out=out)
    for report in [ask(config, **epilogue) for config, epilogue in calls]:
        report = report.result()
        assert_usable(report)
        assert report.count(TENSOR_CORE[arch]) > 0
        assert set(accesses(report, "STG")) == {"STG.E.128"}
        assert report.count("UTMALDG") > 0  # operands come by bulk loads alone
        assert report.count("LDGSTS") == 0
        assert report.shared_bytes <= ARCHS[arch].shared_bytes
        assert (report.tensor_memory_columns > 0) is (arch == "sm_100")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("rows", "epilogue"), [(1, {}), (64, {}), (64, FULL)])
def test_fp32_gemm_keeps_full_products_and_does_not_spill(
    compiled: Compiling, arch: str, rows: int, epilogue: dict[str, Any]
) -> None:
    config = default_pointer_gemm(GemmShape(rows, S, H, 4))
    report = compiled(
        codegen.compile_gemm, arch, config, operands="float32", out="float32", **epilogue
    )
    assert_usable(report)
    # A tensor core would drop bits.  (HFMA2.MMA only loads constants.)
    assert not [op for op in report.counts if op.startswith(("HMMA", "HGMMA", "UTC"))]
    assert report.count("FFMA") > 0
    assert set(accesses(report, "STG")) == {"STG.E.128"}


@pytest.mark.parametrize(
    ("arch", "operands", "rows"),
    [
        ("sm_90", "bfloat16", 288),
        ("sm_100", "bfloat16", 288),
        ("sm_100", "bfloat16", 17),
        ("sm_90", "float32", 288),
    ],
)
@pytest.mark.parametrize(("shard", "hidden"), [(S + 1, H), (S + 1, H + 1)])
def test_gemm_of_odd_sizes_does_not_spill(
    compiled: Compiling, arch: str, operands: str, rows: int, shard: int, hidden: int
) -> None:
    itemsize = 4 if operands == "float32" else 2
    shape = GemmShape(rows, shard, hidden, itemsize, out_itemsize=4)
    config = default_pointer_gemm(shape) if itemsize == 4 else default_gemm(shape)
    assert (config.kind == "bulk") is (itemsize == 2 and hidden == H)
    report = compiled(
        codegen.compile_gemm,
        arch,
        config,
        operands=operands,
        out="float32",
        wide_loads=hidden == H,
        store_unit=16 if shard == S else 1,
        **FULL,
    )
    assert_usable(report)


def test_an_accumulator_beyond_tensor_memory_compiles_to_nothing_and_is_refused(
    compiled: Compiling,
) -> None:
    config = GemmConfig(block_t=1024, block_v=128, block_h=16, num_warps=8, num_stages=1)
    future = compiled.start(codegen.compile_gemm, "sm_100", config)
    if OLD_TRITON:
        assert future.exception(timeout=300) is not None  # 3.6 does not compile it at all
        return
    problems = future.result(timeout=300).problems(ARCHS["sm_100"])
    assert any("1024 columns of tensor memory, the limit is 512" in text for text in problems)
    assert any("an empty body" in text for text in problems)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(16, 128, 64, 8, 6, "bulk", splits=2),
        GemmConfig(64, 64, 64, 4, 6, "bulk"),
        GemmConfig(256, 128, 64, 8, 3, "bulk", tail_t=32, warp_specialize=True),
        GemmConfig(256, 64, 64, 8, 3, "bulk", tail_t=256),
    ],
)
def test_bulk_variants_compile_without_spills(
    compiled: Compiling, arch: str, config: GemmConfig
) -> None:
    """What a tuner may choose beside the defaults; roles for warps exist on sm_100 alone."""
    if not fits(config, ARCHS[arch], GemmShape(config.rows, S, H, 2)):
        assert config.warp_specialize or config.rows == 512
        return
    report = compiled(codegen.compile_gemm, arch, config)
    assert_usable(report)
    assert report.count(TENSOR_CORE[arch]) > 0 and report.count("UTMALDG") > 0
    assert set(accesses(report, "STG")) == {"STG.E.128"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("operands", "hidden", "bulk"),
    [
        ("bfloat16", H, True),
        ("bfloat16", H, False),  # a weight that starts between 16-byte borders
        ("bfloat16", H + 1, False),
        ("float32", H, False),
    ],
)
@pytest.mark.parametrize("shard", [S, S + 1])
def test_deterministic_gemms_do_not_spill(
    compiled: Compiling, arch: str, operands: str, hidden: int, bulk: bool, shard: int
) -> None:
    shape = GemmShape(1, shard, hidden, 4 if operands == "float32" else 2)
    report = compiled(
        codegen.compile_gemm,
        arch,
        deterministic_gemm(shape, bulk=bulk),
        operands=operands,
        out="float32",
        wide_loads=hidden == H,
        store_unit=16 if shard == S else 1,
        **FULL,
    )
    assert_usable(report)
    assert (report.count(TENSOR_CORE[arch]) > 0) is (operands != "float32")


def test_a_library_config_has_nothing_to_compile() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        codegen.compile_gemm("sm_90", LIBRARY)


# What the interpreter cannot see.


@pytest.mark.parametrize(
    ("kernel", "ones"),
    [
        ("band", ("N", "B", "S")),
        ("cycle", ("cycles", "S")),
        ("copy", ("N",)),
        ("copy", ("received_stride_n", "received_stride_b", "out_stride_b", "N", "B", "S", "V")),
        ("gemm", ("T", "H")),
        ("gemm", ("hidden_stride_t", "weight_stride_s", "partial_stride_t", "T", "S", "H")),
    ],
)
def test_arguments_of_one_compile_as_constants(
    compiled: Compiling, kernel: str, ones: tuple[str, ...]
) -> None:
    assert_usable(compiled(of_ones, kernel, ones))


STRIDE_ONLY = (
    *("arith.extsi", "arith.divsi", "arith.muli"),
    *("tt.splat", "tt.expand_dims", "tt.broadcast"),
)


def row_products(ttir: str, strides: tuple[str, ...]) -> list[str]:
    """The types of all products of a stride (or of what is made of strides and constants alone)
    with anything else.
    """
    constants: set[str] = set()
    known = {f"%{stride}" for stride in strides}
    types = []
    for line in ttir.splitlines():
        found = re.match(r"\s*(%[\w#]+) = ([\w.]+) (.*?)(?: loc\(.*)?$", line)
        if not found:
            continue
        name, op, rest = found.groups()
        operands, _, result = rest.rpartition(" : ")
        used = set(re.findall(r"%[\w#]+", operands))
        constants.discard(name)
        known.discard(name)
        if op == "arith.constant":
            constants.add(name)
        elif used & known:
            if op in STRIDE_ONLY and used <= known | constants:
                known.add(name)
            elif op == "arith.muli":
                types.append(result)
    return types


def all_wide(types: list[str]) -> bool:
    return all(re.search(r"\bi64$|xi64>$", kind) for kind in types)


def test_h2_the_check_fails_where_the_cast_is_left_out(compiled: Compiling) -> None:
    narrow = row_products(compiled(probe, "narrow").ttir, ("stride",))
    wide = row_products(compiled(probe, "wide").ttir, ("stride",))
    assert len(narrow) == len(wide) == 1
    assert not all_wide(narrow)
    assert all_wide(wide)


def test_h2_every_row_is_multiplied_by_its_stride_in_64_bits(compiled: Compiling) -> None:
    band, cycle, copy = (
        compiled(codegen.compile_reassemble, "sm_90", config)
        for config in (
            ReassembleConfig("band", 512, 32, 8),
            ReassembleConfig("cycle", 16, 256, 4),
            ReassembleConfig("copy", 8, 256, 1),
        )
    )
    matmul = compiled(codegen.compile_gemm, "sm_90", GemmConfig(16, 128, 64, 4, 3))
    strides = ("received_stride_n", "received_stride_b", "out_stride_b")
    for ttir, names, products in (
        (band.ttir, ("S",), 2),  # source and target
        (cycle.ttir, ("S",), 4),  # opening, source, target, closing
        (copy.ttir, strides, 3),
        (matmul.ttir, ("hidden_stride_t", "weight_stride_s", "partial_stride_t"), 3),
    ):
        types = row_products(ttir, names)
        assert len(types) == products
        assert all_wide(types), types


# The reports themselves.

GOOD = Report(
    arch="sm_100",
    registers=64,
    stack_bytes=0,
    spills=0,
    shared_bytes=1000,
    tensor_memory_columns=512,
    instructions=100,
    counts={"LDG.E.128": 2, "STG.E.128": 2, "BAR.SYNC.DEFER_BLOCKING": 1},
    ttir="",
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spills": 3}, "3 spills"),
        ({"stack_bytes": 16}, "16 bytes of stack"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory, the limit is 232448"),
        ({"tensor_memory_columns": 576}, "576 columns of tensor memory, the limit is 512"),
        ({"counts": {"EXIT": 1}, "instructions": 4}, "empty body (4 instructions"),
        # Stores to shared memory, asynchronous copies among them, leave no result behind.
        ({"counts": {"STS.128": 4, "LDGSTS.E.BYPASS.128": 8, "UTCATOMSWS.AND": 1}}, "empty body"),
    ],
)
def test_problems_are_recognised(change: dict[str, Any], words: str) -> None:
    assert GOOD.problems(ARCHS["sm_100"]) == []
    problems = dataclasses.replace(GOOD, **change).problems(ARCHS["sm_100"])
    assert len(problems) == 1 and words in problems[0]


def test_tensor_memory_is_a_problem_where_there_is_none() -> None:
    assert GOOD.problems(ARCHS["sm_90"]) == ["512 columns of tensor memory, the limit is 0"]


def test_opcodes_are_counted_by_their_parts() -> None:
    assert GOOD.count("E", "128") == 4
    assert GOOD.count("STG", "128") == 2
    assert GOOD.count("LDL") == 0


def test_interpreted_kernels_are_not_compiled() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 cannot be compiled"):
        codegen.compile_gemm("sm_90", GemmConfig(16, 128, 64, 4, 3))
