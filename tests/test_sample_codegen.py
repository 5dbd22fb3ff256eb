"""Kernels of a draw compiled for sm_90 and sm_100: no spills, tensor cores, separate roundings."""

from __future__ import annotations

import pytest
from compiling import Compiling
from test_codegen import H, S, accesses, assert_usable

from lmhead import codegen
from lmhead.kernels import sample
from lmhead.kernels.config import ARCHS, GemmShape, default_gemm

ARCH = pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
TENSOR_CORES = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}


@ARCH
@pytest.mark.parametrize(
    ("rows", "noise", "sums", "write"),
    [(36, True, False, False), (16, False, True, True), (128, True, True, True)],
)
def test_a_gemm_that_summarises_does_not_spill_and_rounds_apart(
    compiled: Compiling,
    pytestconfig: pytest.Config,
    arch: str,
    rows: int,
    noise: bool,
    sums: bool,
    write: bool,
) -> None:
    _only_with_everything(pytestconfig, rows == 128)
    config = default_gemm(GemmShape(rows, S, H, 2), ARCHS[arch])
    assert sample.can_fuse(config)
    report = compiled(codegen.compile_fused, arch, config, noise=noise, sums=sums, write=write)
    assert_usable(report)
    assert report.count(TENSOR_CORES[arch]) > 0 and report.count("UTMALDG") > 0
    # A product and a sum in one rounding would be another token than the twin's.
    assert report.count("FFMA") == 0
    # A warp stores whole 128-byte lines of logits, 8 bytes a thread; summaries are single words.
    assert (accesses(report, "STG")["STG.E.64"] > 0) is write


def _only_with_everything(config: pytest.Config, slow: bool) -> None:
    if slow and not config.getoption("--everything"):
        pytest.skip("takes half a minute to compile: run with --everything")


def test_more_rows_than_that_are_left_to_the_scan() -> None:
    for arch in ARCHS.values():
        assert not sample.can_fuse(default_gemm(GemmShape(288, S, H, 2), arch))


@ARCH
@pytest.mark.parametrize("fours", [True, False])
def test_a_scan_does_not_spill_and_rounds_apart(
    compiled: Compiling, arch: str, fours: bool
) -> None:
    report = compiled(codegen.compile_scan, arch, fours=fours)
    assert_usable(report)
    assert report.count("FFMA") == 0
    # Four ids share a call of Philox, whose products of two words are what it takes.
    if fours:
        alone = compiled(codegen.compile_scan, arch, fours=False)
        assert 2 * report.count("IMAD.HI.U32") < alone.count("IMAD.HI.U32")


@ARCH
@pytest.mark.parametrize("count", [1, 20, sample.MAX_CANDIDATES])
def test_picks_do_not_spill(
    compiled: Compiling, pytestconfig: pytest.Config, arch: str, count: int
) -> None:
    _only_with_everything(pytestconfig, count > 20)
    assert_usable(compiled(codegen.compile_pick, arch, count, -(-S // sample.SCAN_COLUMNS)))


@ARCH
@pytest.mark.parametrize(("ranks", "count"), [(8, 1), (8, 20), (8, 64), (32, 64)])
def test_merges_do_not_spill_and_round_apart(
    compiled: Compiling, arch: str, ranks: int, count: int
) -> None:
    assert ranks * count <= sample.MAX_MERGED
    report = compiled(codegen.compile_merge, arch, ranks, count)
    assert_usable(report)
    assert report.count("FFMA") == 0
