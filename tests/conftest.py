"""Shared set-up.  Kernels run in Triton's interpreter unless the run is `-m gpu`; nothing needs a
GPU or a compiler.
"""

from __future__ import annotations

import concurrent.futures
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import compiling
import pytest

TESTS = Path(__file__).resolve().parent


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module imports the kernels: the interpreter is chosen when they are decorated.
    if config.option.markexpr != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # Before numpy is loaded: the interpreter's small products take twice the time on two threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if os.environ.get("PYTEST_XDIST_WORKER"):
        # Workers have the cores among them: one's threads would wait for those of the others.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
        # Inductor's cache does not tell instruction sets apart: it would hand out AVX2's code here.
        cache = f"torchinductor_{os.getuid()}_{capability}"
        path = os.path.join(tempfile.gettempdir(), cache)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", path)
    # Nobody's own table of tuned configs decides what is tested: a folder that does not exist.
    os.environ["LMHEAD_CONFIGS"] = os.path.join(os.sep, "nonexistent", "lmhead")
    if config.option.slow or config.option.everything:
        os.environ["LMHEAD_TEST_SLOW"] = "1"
    if config.option.library:
        os.environ["LMHEAD_TEST_LIBRARY"] = config.option.library
    # cuBLAS refuses to run without it where algorithms are to be deterministic, as they are below.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip(
            "kernels run in Triton's interpreter here: run `pytest -m gpu` for compiled ones"
        )


def pytest_sessionfinish() -> None:
    import ranks

    ranks.close_all()


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN (integers: the largest value), so that an unwritten element cannot pass
    by luck.
    """
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def library_asked_for() -> Iterator[None]:
    """`--library splitting`: products as on another machine."""
    if not os.environ.get("LMHEAD_TEST_LIBRARY"):
        yield
        return
    import library

    with library.asked():
        yield


@pytest.fixture(scope="session")
def compiler() -> Iterator[concurrent.futures.Executor]:
    """Processes without Triton's interpreter, in which kernels can be compiled: submit functions of
    lmhead.codegen.
    """
    with compiling.executor() as executor:
        yield executor


@pytest.fixture(scope="session")
def compiled(compiler: concurrent.futures.Executor) -> compiling.Compiling:
    """What they give, each call compiled once."""
    return compiling.Compiling(compiler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="slow tests too")
    parser.addoption(
        "--everything",
        action="store_true",
        help="slow tests too, and every shipped config, every sample and every demo instead of a "
        "representative part",
    )
    parser.addoption(
        "--library",
        choices=("splitting",),
        help="products as on a machine whose library sums up in other orders (tests/library.py)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow cases, and leave them out unless an option asks for them, a marker expression
    speaks of them, or tests are named one by one.
    """
    lines = (TESTS / "slow_cases.txt").read_text().splitlines()
    unseen = slow = {line for line in lines if line and not line.startswith("#")}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        names = {name, name.partition("[")[0]} & slow
        if names:
            item.add_marker(pytest.mark.slow)
            unseen = unseen - names
        _share_out(item)
    whole = not config.option.keyword and not config.option.deselect
    if whole and [Path(path).resolve() for path in config.args] == [TESTS] and unseen:
        raise pytest.UsageError(f"slow_cases.txt names no test by {sorted(unseen)}")
    named = "slow" in config.option.markexpr or any("::" in path for path in config.args)
    if config.option.slow or config.option.everything or named:
        return
    left_out = [item for item in items if item.get_closest_marker("slow")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _share_out(item: pytest.Item) -> None:
    """Which worker of pytest-xdist runs a test, under `--dist loadgroup`: all tests with rank
    processes the same one, which keeps them, and all that compile kernels; others by their file.
    """
    module = getattr(item, "module", None)
    if "compiled" in getattr(item, "fixturenames", ()):
        group = "compiler"
    elif hasattr(module, "pool") or hasattr(module, "ranks"):
        group = "ranks"
    else:
        group = item.nodeid.partition("::")[0]
    item.add_marker(pytest.mark.xdist_group(group))
