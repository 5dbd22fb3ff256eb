"""Shared set-up.  Kernels run in Triton's interpreter unless the run is `-m gpu`; nothing needs a
GPU or a compiler.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator

import compiling
import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module imports the kernels: the interpreter is chosen when they are decorated.
    if config.option.markexpr != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # Before numpy is loaded: the interpreter's small products take twice the time on two threads.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Nobody's own table of tuned configs decides what is tested: a folder that does not exist.
    os.environ["LMHEAD_CONFIGS"] = os.path.join(os.sep, "nonexistent", "lmhead")
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
    parser.addoption(
        "--everything",
        action="store_true",
        help="slow tests too, and every shipped config, every sample and every demo instead of a "
        "representative part",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, unless everything is asked for, a marker expression speaks of them, or
    tests are named one by one.
    """
    named = "slow" in config.option.markexpr or any("::" in argument for argument in config.args)
    if config.option.everything or named:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]
