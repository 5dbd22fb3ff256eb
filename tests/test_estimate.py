"""The model: numbers worked out by hand, and what must hold for every config and shape."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from data import quick
from hypothesis import given
from hypothesis import strategies as st

from lmhead import estimate, tune
from lmhead.bench.cases import MODELS, RANKS
from lmhead.devices import DEVICES, Device
from lmhead.estimate import Usage
from lmhead.kernels.config import (
    GemmConfig,
    GemmShape,
    ReassembleConfig,
    ReassembleShape,
    default_gemm,
)
from lmhead.tables import GEMM_BUCKETS, Config
from lmhead.tune import Build, Builds, Compiled, Problem

B200, H200 = DEVICES["b200"], DEVICES["h200"]
V4_PRO = GemmShape(288, 16160, 7168, 2)
WHOLE = GemmConfig(256, 128, 64, 8, 4, "bulk", tail_t=32)  # all 288 rows in one program


def test_the_published_workload_on_b200() -> None:
    assert default_gemm(V4_PRO, B200.arch) == WHOLE
    found = estimate.gemm(B200, WHOLE, V4_PRO)
    # 231.7 MB of weights, 4.1 MB of hidden rows and 9.3 MB of results at 8 TB/s.
    assert found.terms["hbm"] == pytest.approx((231.67e6 + 4.13e6 + 9.31e6) / 8e12 * 1e6, rel=1e-3)
    # 2250 TFLOP/s over 148 SMs of 8192 FLOP a clock are 1.856 GHz; a program draws
    # (256 + 32 + 128) * 7168 * 2 bytes at 48 a clock.
    assert found.terms["l2"] == pytest.approx(5.964e6 / (48 * 1.8558e9) * 1e6, rel=1e-3)
    # 2 * 128 * 288 * 7168 FLOP by one SM.
    assert found.terms["mma"] == pytest.approx(528.5e6 / (8192 * 1.8558e9) * 1e6, rel=1e-3)
    # 1.8 MB of weights behind 0.8 us, 64 KiB at a time.
    assert found.terms["flight"] == pytest.approx(1835008 / 65536 * 0.8, rel=1e-3)
    # The launch, a first load, and 288 * 128 * 2 bytes stored at the end.
    assert found.terms["fixed"] == pytest.approx(1.5 + 0.8 + 73728 / 89078, abs=0.01)
    assert [found.terms[term] for term in ("hbm", "l2", "mma")] == [30.64, 66.95, 34.76]
    assert found.limit == "l2"
    assert found.us == pytest.approx(found.terms["l2"] + found.terms["fixed"], abs=0.011)


def test_what_costs_more() -> None:
    """Single effects, each against the config above."""
    base = estimate.gemm(B200, WHOLE, V4_PRO).terms
    # Two programs' rounds where each SM has had one.
    twice = estimate.gemm(B200, WHOLE, dataclasses.replace(V4_PRO, shard=2 * 16160)).terms
    assert twice["l2"] == pytest.approx(2 * base["l2"], abs=0.011)
    # 64 vocabulary rows are half of what Blackwell's tensor core takes at a time; Hopper's take 64.
    narrow = dataclasses.replace(WHOLE, block_v=64)
    work = 2.0 * 64 * 288 * 7168 * 2  # 253 tiles: two rounds
    assert estimate.gemm(B200, narrow, V4_PRO).terms["mma"] == pytest.approx(
        work / (0.5 * B200.flop_per_clock * B200.clock) * 1e6, abs=0.011
    )
    assert estimate.gemm(H200, narrow, V4_PRO).terms["mma"] == pytest.approx(
        work / (H200.flop_per_clock * H200.clock) * 1e6, abs=0.011
    )
    # 16 rows keep the tensor cores as long as 32.
    few, more = (
        estimate.gemm(B200, GemmConfig(rows, 128, 64, 8, 6, "bulk"), V4_PRO).terms["mma"] / steps
        for rows, steps in ((16, 18), (32, 9))
    )
    assert few == pytest.approx(more, rel=1e-3)
    # fp32 results are twice the bytes.
    wide = estimate.gemm(B200, WHOLE, dataclasses.replace(V4_PRO, out_itemsize=4)).terms
    assert wide["hbm"] - base["hbm"] == pytest.approx(288 * 16160 * 2 / 8e12 * 1e6, abs=0.011)
    # Splits add their sums' traffic and a launch.
    split = estimate.gemm(B200, dataclasses.replace(WHOLE, splits=2), V4_PRO).terms
    sums = 2 * 288 * 16160 * 4
    assert split["hbm"] - base["hbm"] == pytest.approx(
        (sums - 288 * 16160 * 2) / 8e12 * 1e6, abs=0.011
    )
    assert split["fixed"] > base["fixed"] + 1.5 + sums / 8e12 * 1e6


def test_reassembly_is_bound_by_memory_where_bands_fill_the_chip() -> None:
    shape = ReassembleShape(8, 36, 16160, 2)
    found = estimate.reassemble(B200, ReassembleConfig("band", 512, 32, 8), shape)
    assert found.terms["hbm"] == pytest.approx(2 * 288 * 16160 * 2 / 8e12 * 1e6, abs=0.011)
    # 505 bands on 148 SMs, four at least: 288 rows of 64 bytes, read and written.
    assert found.terms["l2"] == pytest.approx(4 * 2 * 288 * 64 / 89078, abs=0.011)
    assert found.terms["flight"] == 1.6 and found.terms["fixed"] == 1.5
    # Cycles move 16 pieces after one another.
    slow = estimate.reassemble(B200, ReassembleConfig("cycle", 16, 256, 4), shape)
    assert slow.terms["flight"] == pytest.approx(18 * 1.6) and slow.limit == "flight"


@functools.cache
def problems() -> list[tuple[Device, Problem, tuple[Config, ...]]]:
    """A few of every kind with their spaces."""
    found = []
    for device in (B200, H200):
        wanted = [
            tune.gemm_problem(GemmShape(rows, shard, hidden, 2, out))
            for rows, shard, hidden, out in (
                (16, 16160, 7168, 2),
                (64, 1616, 576, 4),
                (288, 16160, 7168, 2),
                (512, 32064, 8192, 4),
                (4096, 6144, 576, 2),
                (3, 70, 201, 2),  # by ordinary loads
            )
        ]
        wanted += [
            tune.reassemble_problem(8, 36, 16160, 2),
            tune.reassemble_problem(64, 64, 2020, 4),
            tune.reassemble_problem(4, 9, 33, 2, out_itemsize=4),
        ]
        found += [(device, p, tuple(tune.space(p, device.arch, device.sms))) for p in wanted]
    return found


_usages = st.builds(Usage, st.integers(0, 255), st.integers(0, 232448), st.integers(0, 512))


@given(st.data())
@quick(300)
def test_without_a_compilation_the_estimate_is_a_lower_bound(data: st.DataObject) -> None:
    device, problem, space = data.draw(st.sampled_from(problems()))
    config, usage = data.draw(st.sampled_from(space)), data.draw(_usages)
    least = tune.modelled(problem, config, device, None)
    found = tune.modelled(problem, config, device, usage)
    assert least.us <= found.us
    assert least.terms.keys() == found.terms.keys()
    assert all(least.terms[term] <= found.terms[term] for term in least.terms)
    # And more of an SM for each program never makes it faster.
    more = Usage(usage.registers + 64, usage.shared_bytes + 1000, usage.tensor_memory_columns * 2)
    assert found.us <= tune.modelled(problem, config, device, more).us


@given(st.data())
@quick(300)
def test_more_work_is_never_faster_and_a_better_chip_never_slower(data: st.DataObject) -> None:
    device, problem, space = data.draw(st.sampled_from(problems()))
    config, usage = data.draw(st.sampled_from(space)), data.draw(_usages)
    base = tune.modelled(problem, config, device, usage)
    size = data.draw(st.sampled_from([f.name for f in dataclasses.fields(problem.shape)]))
    factor = data.draw(st.integers(2, 3))
    larger = dataclasses.replace(
        problem.shape, **{size: getattr(problem.shape, size) * factor + ("size" not in size)}
    )
    assert base.us <= tune.modelled(Problem(problem.key, larger), config, device, usage).us
    better = dataclasses.replace(
        device,
        **{data.draw(st.sampled_from(["hbm", "bf16"])): 1e18},  # type: ignore[arg-type]
    )
    assert tune.modelled(problem, config, better, usage).us <= base.us


# Each weight byte is asked for once.


def slack(config: Config, shape: GemmShape) -> float:
    """By how much what is asked for exceeds the shard's own bytes, counted from the programs."""
    assert isinstance(config, GemmConfig)
    own = shape.shard * shape.hidden * shape.itemsize
    programs = estimate.programs(config, shape) // config.splits
    asked = programs * config.block_v * shape.hidden * shape.itemsize
    assert asked == estimate.weight_bytes(config, shape)
    return asked / own - 1


@pytest.mark.parametrize("device", [B200, H200], ids=lambda device: device.name)
def test_defaults_ask_for_each_weight_byte_once_up_to_512_rows(device: Device) -> None:
    for model in MODELS.values():
        for ranks in RANKS:
            for rows in range(1, 513):
                shape = GemmShape(rows, model.shard(ranks), model.hidden, 2)
                assert slack(default_gemm(shape, device.arch), shape) <= 0.03


def builds(build: Build) -> Compiled:
    """As if the compiler refused every third config, whichever they are."""
    return Compiled(("refused",) if sum(build.text().encode()) % 3 == 0 else ())


@pytest.mark.parametrize("device", [B200, H200], ids=lambda device: device.name)
def test_chosen_configs_ask_for_each_weight_byte_once_up_to_512_rows(device: Device) -> None:
    wanted = [
        tune.gemm_problem(GemmShape(rows, model.shard(ranks), model.hidden, 2))
        for model in MODELS.values()
        for ranks in RANKS
        for rows in (16, 64, 128, 288, 512)
    ]
    found = tune.offline(device, wanted, builds=Builds(None), workers=0, compile_one=builds)
    assert len(found) == len(wanted) == 160
    for problem in wanted:
        shape = problem.shape
        assert isinstance(shape, GemmShape) and shape.rows in GEMM_BUCKETS
        config = found.entries[problem.key]["modelled"].config
        assert slack(config, shape) <= 0.03, (config, shape)
        assert isinstance(config, GemmConfig) and config.rows >= shape.rows
