"""The tuner without a GPU: what it may choose from, that its short cut changes no choice, and that
nothing is compiled twice.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from unittest import mock

import pytest
from data import quick
from hypothesis import given
from hypothesis import strategies as st

from lmhead import estimate, tables, tune
from lmhead.bench.cases import MODELS, RANKS
from lmhead.devices import DEVICES
from lmhead.kernels.config import (
    ARCHS,
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    default_pointer_gemm,
    default_reassemble,
    fits,
)
from lmhead.tune import Build, Builds, Compiled, Problem, Ranked

B200, H200 = DEVICES["b200"], DEVICES["h200"]
V4_PRO = tune.gemm_problem(GemmShape(288, 16160, 7168, 2))
BANDS = tune.reassemble_problem(8, 36, 16160, 2)
PROBLEMS = [
    V4_PRO,
    BANDS,
    tune.gemm_problem(GemmShape(16, 1616, 576, 2, 4)),
    tune.gemm_problem(GemmShape(512, 32064, 8192, 2)),
    tune.gemm_problem(GemmShape(3, 70, 201, 2)),
    tune.reassemble_problem(64, 64, 2020, 4),
    tune.reassemble_problem(4, 9, 33, 2, out_itemsize=4),
]


class Compiler:
    """Stands in for the compiler: what it says of a build depends on the seed and the build alone.
    Keeps what it was asked for.
    """

    def __init__(self, seed: int, refused: float) -> None:
        self._seed, self._refused = seed, refused
        self.builds: list[Build] = []

    def says(self, build: Build) -> Compiled:
        dice = random.Random(f"{self._seed} {build.text()}")
        problems = ("refused",) if dice.random() < self._refused else ()
        return Compiled(
            problems, dice.randint(16, 255), dice.randint(0, 232448), dice.randint(0, 512)
        )

    def __call__(self, build: Build) -> Compiled:
        self.builds.append(build)
        return self.says(build)


# What there is to choose from.


@given(
    rows=st.integers(1, 8192),
    shard=st.integers(1, 1 << 18),
    hidden=st.integers(1, 8192) | st.integers(1, 1024).map(lambda n: 8 * n),
    out=st.sampled_from([2, 4]),
    device=st.sampled_from([B200, H200]),
)
@quick(60)
def test_a_gemm_is_chosen_among_configs_that_fit(
    rows: int, shard: int, hidden: int, out: int, device: tune.Device
) -> None:
    problem = tune.gemm_problem(GemmShape(rows, shard, hidden, 2, out))
    space = tune.space(problem, device.arch, device.sms)
    assert space and len(set(space)) == len(space)
    for config in space:
        # Of the whole bucket, and of the least shape that is in it.
        assert fits(config, device.arch, problem.shape)
        assert fits(config, device.arch, GemmShape(rows, shard, hidden, 2, out))
        assert isinstance(config, GemmConfig)
        assert config.kind == ("bulk" if hidden % 8 == 0 else "pointer")
    if hidden % 8:
        assert space == [default_pointer_gemm(problem.shape)]


@given(
    ranks=st.integers(2, 64),
    rows=st.integers(2, 600),
    shard=st.integers(1, 1 << 18),
    itemsize=st.sampled_from([2, 4]),
    out=st.sampled_from([None, 2, 4]),
)
@quick(60)
def test_a_copying_kernel_is_chosen_among_configs_that_fit(
    ranks: int, rows: int, shard: int, itemsize: int, out: int | None
) -> None:
    problem = tune.reassemble_problem(ranks, rows, shard, itemsize, out_itemsize=out)
    space = tune.space(problem, ARCHS["sm_90"], 132)
    assert default_reassemble(problem.shape, in_place=out is None) in space
    assert len(set(space)) == len(space)
    for config in space:
        assert fits(config, ARCHS["sm_90"], problem.shape)
        assert isinstance(config, ReassembleConfig)
        assert (config.kind == "copy") is (out is not None)


def test_the_space_holds_what_is_known_to_be_good() -> None:
    gemms = tune.space(V4_PRO, B200.arch, B200.sms)
    assert GemmConfig(256, 128, 64, 8, 4, "bulk", tail_t=32) in gemms
    assert any(isinstance(c, GemmConfig) and c.warp_specialize for c in gemms)
    assert ReassembleConfig("band", 512, 32, 8) in tune.space(BANDS, B200.arch, B200.sms)
    # Few tiles leave multiprocessors idle: H is split between programs.
    few = tune.space(tune.gemm_problem(GemmShape(16, 1616, 7168, 2)), B200.arch, B200.sms)
    assert {c.splits for c in few if isinstance(c, GemmConfig)} >= {1, 2, 4, 8}
    assert {c.splits for c in gemms if isinstance(c, GemmConfig) and c.block_v == 64} == {1}


@pytest.mark.parametrize("rows", [1, 16, 17, 128, 129, 160, 288, 300, 320, 384, 512])
def test_rows_are_held_by_one_program_or_shared_evenly(rows: int) -> None:
    tiles = tune.row_tiles(rows)
    assert any(block + tail >= rows for block, tail in tiles)
    for block, tail in tiles:
        parts = [block, tail] if tail else [block]
        assert all(part & (part - 1) == 0 and 16 <= part <= 256 for part in parts)
        assert tail <= block
    # 288 rows fit in 256 + 32: no more than a tenth is padding where two powers of two can do it.
    assert rows != 288 or (256, 32) in tiles


def test_every_call_of_a_16_bit_head_finds_the_keys_that_tables_are_made_for() -> None:
    """What a head asks for is what `problems_of` lists."""
    for name, ranks in itertools.product(("deepseek-v4-pro", "gpt-oss"), (*RANKS, 3)):
        model = MODELS[name]
        listed = {problem.key for problem in tune.problems_of(model.hidden, model.vocab, ranks)}
        shard = model.shard(ranks)
        for rows, logits, wire in itertools.product(
            (1, 2, 3, 8, 36, 37, 120, 512, 600, 5000), (2, 4), (2, 4)
        ):
            if wire > logits:
                continue
            shape = GemmShape(ranks * rows, shard, model.hidden, 2, wire)
            assert tables.gemm_key(shape) in listed
            if ranks > 1 and rows > 1:
                moved = ReassembleShape(ranks, rows, shard, wire)
                assert tables.reassemble_key(moved, True) in listed
                assert tables.reassemble_key(moved, False, out_itemsize=logits) in listed


def test_a_problem_is_the_largest_shape_of_its_bucket() -> None:
    assert V4_PRO.key.rows == V4_PRO.shape.rows == 288
    assert tune.gemm_problem(GemmShape(289, 16160, 7168, 2)).shape.rows == 320
    assert BANDS.key.rows == 512 and BANDS.shape.rows == 64
    for problem in tune.problems_of(7168, 129280, 8):
        shape = problem.shape
        if isinstance(shape, ReassembleShape):
            out = problem.key.out_bits // 8
            sizes = ReassembleShape(8, shape.rows, shape.shard, problem.key.operand_bits // 8)
            in_place = problem.key.kernel == "reassemble"
            assert tables.reassemble_key(sizes, in_place, out_itemsize=out) == problem.key
        else:
            assert tables.gemm_key(shape) == problem.key


def test_asks_once_is_about_rows_that_one_program_can_hold() -> None:
    whole, halves = (
        GemmConfig(256, 128, 64, 8, 4, "bulk", 32),
        GemmConfig(128, 128, 64, 8, 6, "bulk"),
    )
    shape = GemmShape(288, 16160, 7168, 2)
    assert tune.asks_once(whole, shape)
    assert not tune.asks_once(halves, shape)  # three programs read each weight tile
    assert tune.asks_once(halves, GemmShape(128, 16160, 7168, 2))
    assert tune.asks_once(halves, GemmShape(1024, 16160, 7168, 2))  # from L2, beyond 512
    # 256 vocabulary rows a tile: 63.1 tiles of them are 64.
    assert tune.asks_once(GemmConfig(16, 256, 64, 8, 4, "bulk"), GemmShape(16, 16160, 7168, 2))
    # 130 rows are two tiles of 128, which nothing can help; but one program holds all tokens.
    small = GemmShape(288, 130, 7168, 2)
    assert tune.asks_once(whole, small) and not tune.asks_once(halves, small)
    assert tune.asks_once(ReassembleConfig("band", 512, 32, 8), ReassembleShape(8, 36, 16160, 2))


# The short cut.


def brute_force(problem: Problem, device: tune.Device, compiler: Compiler) -> Ranked | None:
    """Compile everything, then take the best."""
    found = []
    for config in tune.space(problem, device.arch, device.sms):
        compiled = compiler.says(tune.build_of(problem, config, device.arch_name))
        if tune.asks_once(config, problem.shape) and not compiled.problems:
            told = tune.modelled(problem, config, device, compiled.usage)
            found.append(Ranked(config, told, compiled))
    return min(found, key=lambda ranked: ranked.order, default=None)


@given(
    seed=st.integers(0, 1 << 32),
    refused=st.sampled_from([0.0, 0.3, 0.8, 0.97, 1.0]),
    device=st.sampled_from([B200, H200]),
    problems=st.lists(st.sampled_from(PROBLEMS), min_size=1, max_size=3),
)
@quick(60)
def test_best_first_finds_what_compiling_everything_finds(
    seed: int, refused: float, device: tune.Device, problems: list[Problem]
) -> None:
    compiler = Compiler(seed, refused)
    found = tune.offline(device, problems, builds=Builds(None), workers=0, compile_one=compiler)
    assert found.device == device.name.lower()
    texts = [build.text() for build in compiler.builds]
    assert len(set(texts)) == len(texts)  # nothing twice, also where problems share a build
    for problem in problems:
        best = brute_force(problem, device, compiler)
        entries = found.entries.get(problem.key, {})
        if best is None:
            assert entries == {}
            continue
        entry = entries["modelled"]
        assert best.compiled is not None
        assert (entry.config, entry.us, entry.origin) == (best.config, best.estimate.us, "modelled")
        assert entry.details["terms"] == best.estimate.terms
        assert entry.details["registers"] == best.compiled.registers
    assert len(found) == sum(
        brute_force(problem, device, compiler) is not None for problem in set(problems)
    )


def test_best_first_compiles_few() -> None:
    compiler = Compiler(1, refused=0.2)
    tune.offline(B200, PROBLEMS, builds=Builds(None), workers=0, compile_one=compiler)
    everything = sum(len(tune.space(problem, B200.arch, B200.sms)) for problem in PROBLEMS)
    assert len(compiler.builds) < everything / 2


@pytest.fixture
def forked() -> Iterator[None]:
    """Worker processes are forked for once: a spawned one takes seconds to import torch."""
    context = tune.multiprocessing.get_context("fork")
    with mock.patch.object(tune.multiprocessing, "get_context", lambda method: context):
        yield


def made(compiler: Callable[[Build], Compiled], workers: int, builds: Builds) -> tables.Table:
    return tune.offline(B200, PROBLEMS[:2], builds=builds, workers=workers, compile_one=compiler)


def test_a_table_is_made_in_other_processes_as_here(forked: None) -> None:
    here = made(Compiler(3, 0.3), 0, Builds(None))
    assert made(Compiler(3, 0.3), 2, Builds(None)) == here


class Deadly(Compiler):
    """One that some configs kill, or refuses them where it runs in this process."""

    def __init__(self, pid: int) -> None:
        super().__init__(4, refused=0.0)
        self._pid = pid

    def says(self, build: Build) -> Compiled:
        if isinstance(build.config, GemmConfig) and build.config.tail_t == 32:
            if os.getpid() != self._pid:
                os._exit(1)
            return Compiled(("died",))
        return super().says(build)


def test_a_compiler_that_dies_is_one_more_that_must_not_be_used(
    forked: None, tmp_path: Path
) -> None:
    compiler = Deadly(os.getpid())
    config = GemmConfig(256, 128, 64, 8, 4, "bulk", tail_t=32)
    spaces = {"gemm": [config, GemmConfig(256, 128, 64, 8, 3, "bulk", tail_t=64)]}
    spaces["reassemble"] = tune.space(BANDS, B200.arch, B200.sms)  # type: ignore[assignment]
    with mock.patch.object(tune, "space", lambda problem, *_: spaces[problem.key.kernel]):
        there = made(compiler, 2, Builds(tmp_path))
        assert there == made(compiler, 0, Builds(None))
        assert there.entries[V4_PRO.key]["modelled"].details["rejected"] == 1
        # Which is known from now on.
        assert made(lambda build: pytest.fail("compiled again"), 0, Builds(tmp_path)) == there
    refused = Builds(tmp_path).get(tune.build_of(V4_PRO, config, "sm_100"))
    assert refused == Compiled(("does not compile: the compiler died",))


def test_progress_is_told_what_is_solved_and_compiled() -> None:
    told: list[tuple[int, int, int]] = []
    compiler = Compiler(2, refused=0.3)
    tune.offline(
        B200,
        [*PROBLEMS, V4_PRO],  # one of them twice
        builds=Builds(None),
        workers=0,
        compile_one=compiler,
        progress=lambda *numbers: told.append(numbers),
    )
    assert told[0] == (0, len(PROBLEMS), 0)
    assert told[-1] == (len(PROBLEMS), len(PROBLEMS), len(compiler.builds))
    assert told == sorted(told)


def test_the_whole_space_is_ranked_what_is_usable_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, told = Compiler(8, refused=0.4), list[tuple[int, int]]()
    monkeypatch.setattr(tune, "compile_build", compiler)
    for turn in range(2):
        told.clear()
        found = tune.rank_all(
            V4_PRO,
            B200,
            builds=Builds(tmp_path),
            workers=0,
            progress=lambda *numbers: told.append(numbers),
        )
        space = tune.space(V4_PRO, B200.arch, B200.sms)
        assert {one.config for one in found} == set(space) and len(found) == len(space)
        refused = [bool(one.compiled and one.compiled.problems) for one in found]
        assert refused == sorted(refused) and set(refused) == {False, True}
        for part in (False, True):
            orders = [one.order for one, bad in zip(found, refused, strict=True) if bad is part]
            assert orders == sorted(orders)
        for one in found:
            assert one.compiled == compiler.says(tune.build_of(V4_PRO, one.config, "sm_100"))
            usage = None if one.compiled.problems else one.compiled.usage
            assert one.estimate == tune.modelled(V4_PRO, one.config, B200, usage)
        assert told == ([(n, len(space)) for n in range(1, len(space) + 1)] if turn == 0 else [])


def test_equals_are_told_apart_by_what_is_simpler() -> None:
    same = estimate.Estimate(10.0, {"hbm": 10.0, "fixed": 0.0})
    plain = GemmConfig(128, 128, 64, 8, 6, "bulk")
    others = [
        GemmConfig(128, 128, 64, 8, 6, "bulk", warp_specialize=True),
        GemmConfig(64, 128, 64, 8, 6, "bulk", tail_t=64),
        GemmConfig(128, 128, 64, 8, 3, "bulk"),  # less in flight
        GemmConfig(128, 128, 128, 8, 3, "bulk"),
        GemmConfig(128, 128, 64, 4, 6, "bulk"),
        GemmConfig(128, 128, 64, 8, 6, "bulk", splits=2),  # a launch more
    ]
    for other in others:
        assert Ranked(plain, same).order < Ranked(other, same).order
    # A config of two launches must promise a tenth more.
    for us, wins in ((9.2, False), (9.0, True)):
        split = Ranked(others[-1], estimate.Estimate(us, {}))
        assert (split.order < Ranked(plain, same).order) is wins


# What was compiled is kept.


def run(compiler: Callable[[Build], Compiled], folder: Path, *problems: Problem) -> tables.Table:
    return tune.offline(
        B200, problems or PROBLEMS, builds=Builds(folder), workers=0, compile_one=compiler
    )


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = Compiler(5, refused=0.5)
    want = run(whole, tmp_path / "whole")
    stopped = Compiler(5, refused=0.5)

    def compile_some(build: Build) -> Compiled:
        if len(stopped.builds) == 7:
            raise KeyboardInterrupt
        return stopped(build)

    with pytest.raises(KeyboardInterrupt):
        run(compile_some, tmp_path / "new")
    (path,) = (tmp_path / "new").iterdir()
    with path.open("a") as file:
        file.write('{"build": "{\\"arch\\"')  # as a run that was killed leaves it
    rest = Compiler(5, refused=0.5)
    assert run(rest, tmp_path / "new") == want
    # Two are taken on at a time; the one that was not told yet is compiled again.
    twice = {build.text() for build in rest.builds} & {b.text() for b in stopped.builds}
    assert len(twice) <= 1
    assert len(rest.builds) < len(whole.builds)
    # What was compiled right after the torn line is kept as well.
    nothing = Compiler(5, refused=0.5)
    assert run(nothing, tmp_path / "new") == want
    assert nothing.builds == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "5",
        "null",
        "[1]",
        "{}",
        '{"build": "b"}',
        '{"build": "b", "compiled": 3}',
        '{"build": "b", "compiled": {"registers": 3}}',
        '{"build": "b", "compiled": {"problems": [], "spills": 3}}',
        '{"build": ["b"], "compiled": {"problems": []}}',
        "\0\0\0\0",
        "\udcff\udcfe",
    ],
)
def test_a_line_that_says_nothing_is_passed_over(tmp_path: Path, line: str) -> None:
    build = tune.build_of(V4_PRO, GemmConfig(16, 128, 64, 8, 4, "bulk"), "sm_100")
    builds = Builds(tmp_path)
    builds.put(build, Compiled((), 40, 1000, 64))
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    path.write_bytes(f"{line}\n{text}{line}\n".encode(errors="surrogateescape"))
    assert Builds(tmp_path).get(build) == Compiled((), 40, 1000, 64)
    assert json.loads(text)["compiled"]["registers"] == 40


def test_builds_that_cannot_be_kept_are_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiler = Compiler(6, refused=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(compiler, tmp_path / "file" / "folder", BANDS)
    assert len(caught) == 1 and "compilations are not kept" in str(caught[0].message)
    assert found == run(Compiler(6, refused=0.5), tmp_path, BANDS)


def test_other_kernels_or_another_triton_start_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Compiler(7, refused=0.5)
    run(first, tmp_path, BANDS)
    monkeypatch.setattr(tune.triton, "__version__", "0.0")
    second = Compiler(7, refused=0.5)
    run(second, tmp_path, BANDS)
    assert second.builds == first.builds
    assert len(list(tmp_path.iterdir())) == 2


def test_a_build_tells_apart_what_compiles_differently() -> None:
    config = GemmConfig(16, 128, 64, 8, 4, "bulk")

    def unit(shard: int) -> Build:
        return tune.build_of(tune.gemm_problem(GemmShape(16, shard, 7168, 2)), config, "sm_100")

    # Shards alike in what they divide by share a compilation; bf16 in place moves as words.
    assert unit(16160) == unit(16032) != unit(16161)
    assert unit(16161).unit == 1 and unit(24).unit == 8
    wide = tune.build_of(tune.gemm_problem(GemmShape(16, 16160, 7168, 2, 4)), config, "sm_100")
    assert wide != unit(16160) and wide.out_bits == 32
    assert unit(16160).text() != tune.build_of(V4_PRO, config, "sm_90").text()


# Compiled for once.

SPILLS = ReassembleConfig("band", 512, 32, 8)  # 64 single elements a thread
DOES = ReassembleConfig("cycle", 16, 256, 8)
ODD = tune.reassemble_problem(8, 36, 16161, 2)
PRO = GemmConfig(16, 128, 64, 8, 4, "bulk")
FEW = tune.gemm_problem(GemmShape(16, 16160, 7168, 2))


def really_compiled(folder: str) -> tuple[tables.Table, tables.Table, int]:
    """A tiny search by the real compiler, twice; runs in the compiler's process."""
    spaces = {"reassemble": [SPILLS, DOES], "gemm": [PRO]}
    told: list[int] = []
    with mock.patch.object(tune, "space", lambda problem, *_: spaces[problem.key.kernel]):
        first, again = (
            tune.offline(
                B200,
                [ODD, FEW],
                builds=Builds(Path(folder)),
                workers=0,
                progress=lambda solved, total, compiled: told.append(compiled),
            )
            for _ in range(2)
        )
    return first, again, max(told[:-1])


def test_a_search_by_the_real_compiler(compiler: Executor, tmp_path: Path) -> None:
    first, again, compiled = compiler.submit(really_compiled, str(tmp_path)).result(timeout=300)
    moved, multiplied = first.entries[ODD.key]["modelled"], first.entries[FEW.key]["modelled"]
    assert moved.config == DOES and moved.details["rejected"] == 1
    assert multiplied.config == PRO and 0 < multiplied.details["registers"] <= 255
    assert first == again and compiled == 3
    (path,) = tmp_path.iterdir()
    kept = [json.loads(line)["compiled"] for line in path.read_text().splitlines()]
    assert len(kept) == 3
    assert [any("spills" in problem for problem in one["problems"]) for one in kept].count(
        True
    ) == 1
    assert sorted(one["tensor_memory_columns"] > 0 for one in kept) == [False, False, True]


def test_what_does_not_compile_is_refused_with_the_compilers_words() -> None:
    """Here, where the interpreter leaves nothing to compile."""
    (problem,) = tune.compile_build(tune.build_of(V4_PRO, PRO, "sm_100")).problems
    assert problem.startswith("does not compile: RuntimeError kernels imported with TRITON_INTER")


def _first_to_last(folder: str) -> None:
    """A process that compiles in others and is killed meanwhile."""
    with tune._Workers(1) as pool:
        pool.submit(_say_who, Path(folder) / "worker").result()
        os.kill(os.getpid(), signal.SIGKILL)


def _say_who(path: Path) -> Compiled:
    path.write_text(str(os.getpid()))
    return Compiled(())


def test_compiling_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_first_to_last, args=(str(tmp_path),)
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    worker = int((tmp_path / "worker").read_text())
    for _ in range(200):
        try:
            state = Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"worker {worker} outlived its parent")
