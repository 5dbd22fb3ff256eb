"""The tables that the package ships: complete, honest about where an entry is from, and every
config in them compiles to what it should be.  `--everything` compiles them all, for each of their
architectures (`make test-all`); without it a representative part of each table.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import triton
from compiling import Compiling

from lmhead import codegen, estimate, tables, tune
from lmhead.bench.cases import MODELS, RANKS
from lmhead.codegen import Report
from lmhead.devices import DEVICES, Device
from lmhead.kernels.config import ARCHS, LIBRARY, GemmConfig, GemmShape, fits
from lmhead.tables import Table
from lmhead.tune import Build, Problem

TENSOR_CORE = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}
OLD_TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8)


def shipped(device: Device) -> Table:
    table = tables.load_shipped(device.name.lower())
    assert table is not None
    return table


def problems() -> list[Problem]:
    """All that the tables answer: the models, N = 1, 2, 4, 8, T = 1 to 4096."""
    found = [
        problem
        for model in MODELS.values()
        for ranks in RANKS
        for problem in tune.problems_of(model.hidden, model.vocab, ranks)
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_every_shape_has_an_entry_that_fits_and_says_where_it_is_from(device: Device) -> None:
    table = shipped(device)
    for problem in problems():
        entries = table.entries[problem.key]
        assert entries
        for origin, entry in entries.items():
            assert fits(entry.config, device.arch, problem.shape)
            assert entry.us > 0
            if origin == "modelled":
                assert {"hbm", "l2", "flight", "fixed"} <= set(entry.details["terms"])
            else:
                assert {"device", "torch", "triton", "date", "timings"} <= set(entry.details)
    assert set(table.entries) >= {problem.key for problem in problems()}


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_modelled_times_are_the_models(device: Device) -> None:
    """Recomputed from the config and the registers, without compiling; shared and tensor memory
    as the tiles need them.
    """
    table = shipped(device)
    for problem in problems():
        entry = table.entries[problem.key].get("modelled")
        if entry is not None:
            bound = tune.modelled(problem, entry.config, device, None)
            assert bound.us <= entry.us + 0.01
            assert bound.terms["hbm"] == pytest.approx(entry.details["terms"]["hbm"], abs=0.02)


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_weight_bytes_are_asked_for_once_up_to_512_rows(device: Device) -> None:
    table, checked = shipped(device), 0
    for problem in problems():
        shape, entry = problem.shape, table.entries[problem.key].get("modelled")
        if entry is None or not isinstance(shape, GemmShape) or shape.rows > 512:
            continue
        assert isinstance(entry.config, GemmConfig)
        own = shape.shard * shape.hidden * shape.itemsize
        assert estimate.weight_bytes(entry.config, shape) <= 1.03 * own, (problem, entry.config)
        checked += 1
    assert checked >= 8 * len(MODELS) * len(RANKS)


def builds(device: Device, everything: bool) -> list[Build]:
    """What the table's configs compile to, each once; a part of it holds every (BLOCK_T, TAIL_T,
    BLOCK_V) and every kind of copy at least once.
    """
    table, found = shipped(device), dict[Build, str]()
    for problem in problems():
        for entry in table.entries[problem.key].values():
            if entry.config != LIBRARY:
                build = tune.build_of(problem, entry.config, device.arch_name)
                found.setdefault(build, _family(build))
    if everything:
        return list(found)
    return list({family: build for build, family in found.items()}.values())


def _family(build: Build) -> str:
    config = build.config
    if isinstance(config, GemmConfig):
        # Tiles small and large, and what has a kernel of its own.
        size = "small" if config.rows <= 64 else "large" if config.rows <= 256 else "two"
        return f"{size} v{config.block_v} {config.splits > 1} {build.out_bits}"
    return f"{config.kind} {build.operand_bits} {build.out_bits}"


def compile_both(build: Build) -> list[Report]:
    """Runs in the compiler's process: without and, for a GEMM, with an epilogue."""
    plain, config = tune.report_of(build), build.config
    if not isinstance(config, GemmConfig):
        return [plain]
    if config.splits == 1:
        return [plain, tune.report_of(build, epilogue=True)]
    out = {16: "bfloat16", 32: "float32"}[build.out_bits]
    added = codegen.compile_add_up(build.arch, config.splits, out=out, store_unit=build.unit)
    assert added.problems(ARCHS[build.arch]) == []
    stores = {op for op in added.counts if op.startswith("STG")}
    assert build.unit * build.out_bits % 128 or stores == {"STG.E.128"}
    return [plain]


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_shipped_configs_compile_as_they_should(
    compiled: Compiling, device: Device, request: pytest.FixtureRequest
) -> None:
    everything = request.config.getoption("--everything")
    if device.name == "H100" and not everything:
        pytest.skip("the H100's architecture is the H200's: see --everything")
    wanted = builds(device, everything)
    for build in wanted:
        compiled.start(compile_both, build)
    for build in wanted:
        for report in compiled(compile_both, build):
            assert_as_it_should_be(report, build)


def assert_as_it_should_be(report: Report, build: Build) -> None:
    config, counts = build.config, report.counts
    stores = Counter({op: n for op, n in counts.items() if op.startswith("STG")})
    loads = Counter({op: n for op, n in counts.items() if op.startswith("LDG")})
    allowed = 2 if OLD_TRITON else 0
    assert report.spills <= allowed and (OLD_TRITON or report.stack_bytes == 0), build
    assert stores.total() > 0, build  # no empty body
    assert report.shared_bytes <= 232448
    assert report.tensor_memory_columns <= (512 if report.arch == "sm_100" else 0)
    out_bits = 32 if isinstance(config, GemmConfig) and config.splits > 1 else build.out_bits
    wide = build.unit * out_bits % 128 == 0
    if isinstance(config, GemmConfig):
        assert sum(n for op, n in counts.items() if op.startswith(TENSOR_CORE[report.arch])), build
        assert sum(n for op, n in counts.items() if op.startswith("UTMALDG")), build
        assert not wide or set(stores) == {"STG.E.128"}, (build, stores)
    elif config.kind == "band":
        assert [n for op, n in counts.items() if op.split(".")[0] == "BAR"] == [1], build
        assert not wide or (set(stores), set(loads)) == ({"STG.E.128"}, {"LDG.E.128"}), build
    elif config.kind == "copy" and build.operand_bits == build.out_bits:
        assert not wide or (set(stores), set(loads)) == ({"STG.E.128"}, {"LDG.E.128"}), build


def test_the_files_are_readable_json_with_one_line_an_entry() -> None:
    for device in DEVICES:
        text = (tables.SHIPPED / f"{device}.json").read_text()
        assert json.loads(text)["device"] == device
        assert tables.dump(tables.parse(text, device)) == text
        assert max(map(len, text.splitlines())) < 1000 or "measured" in text
