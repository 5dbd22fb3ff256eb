"""The house: who may import whom, whose kernels these are, and that everything imports anywhere."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each module of the host room may import of ours.  `kernels` stands for all of lmhead.kernels.
ALLOWED = {
    "__init__": {
        *("comm", "graphs", "head", "own_gemm", "policy", "sampling", "shapes", "workspace"),
    },
    "shapes": set(),
    "timing": set(),
    "compare": set(),
    "workspace": set(),
    "reference": set(),
    "launch": set(),
    "ranges": set(),
    "order": set(),
    "memory": set(),
    "groups": set(),
    "arrivals": set(),
    "route": {"shapes"},
    "policy": {"route", "shapes"},
    "comm": {"arrivals", "groups", "paths", "route", "shapes"},
    "codegen": {"kernels"},
    "devices": {"kernels"},
    "estimate": {"devices", "kernels"},
    "tables": {"kernels", "paths"},
    "progress": set(),
    "paths": set(),
    "tune": {"codegen", "devices", "estimate", "kernels", "shapes", "tables"},
    "measure": {"compare", "devices", "kernels", "reference", "tables", "tune"},
    "tune_ranks": {"comm", "devices", "launch", "measure", "tables", "tune"},
    "chooser": {"comm", "devices", "kernels", "shapes", "tables"},
    "ops": {
        *("chooser", "comm", "groups", "kernels", "ranges", "reference", "route", "shapes"),
        "workspace",
    },
    "operators": {"ops", "order", "route", "shapes", "sharing", "workspace"},
    "noise": set(),
    "sampling": set(),
    "candidates": {"noise", "sampling"},
    "sharing": {"comm", "ranges", "shapes", "workspace"},
    "draw": {
        *("candidates", "comm", "kernels", "ops", "ranges", "route", "sampling", "shapes"),
        *("sharing", "workspace"),
    },
    "sample_operators": {"draw", "operators", "ops", "order", "sampling", "shapes"},
    "head": {
        *("chooser", "comm", "draw", "groups", "memory", "operators", "ops", "order", "route"),
        *("sample_operators", "sampling", "shapes", "sharing", "tables", "workspace"),
    },
    "own_gemm": {
        *("comm", "draw", "groups", "operators", "ops", "order", "sample_operators", "sampling"),
        *("shapes", "sharing", "workspace"),
    },
    "graphs": {"comm", "groups", "head", "shapes"},
    "demo": {
        *("compare", "graphs", "head", "launch", "own_gemm", "sampling", "shapes", "timing"),
    },
    "cli": {
        *("bench", "comm", "demo", "devices", "head", "kernels", "launch"),
        *("paths", "progress", "sampling", "tables", "tune", "tune_ranks"),
    },
}
RUNTIME = {"torch", "triton", "lmhead"}
# Extras, imported inside the functions that need them, by module.
EXTRAS = {"demo": {"transformers", "tqdm"}, "progress": {"tqdm"}}


def imported(path: Path) -> set[str]:
    """Absolute names of everything that a file imports, wherever in it the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "lmhead.kernels" if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def rooms(path: Path) -> set[str]:
    """The modules of ours that a file imports: "shapes", "kernels", "bench", ..."""
    modules = {file.stem for file in (ROOT / "lmhead").glob("*.py")} | {"kernels", "bench"}
    parts = [name.split(".") for name in imported(path)]
    found = {name[1] for name in parts if name[0] == "lmhead" and len(name) > 1} & modules
    return found | {name[0] for name in parts if name[0] in ("tests", "bench", "kernels")}


@pytest.mark.parametrize("path", sorted((ROOT / "lmhead").glob("*.py")), ids=lambda path: path.stem)
def test_host_room_imports_only_what_its_row_of_the_table_says(path: Path) -> None:
    assert rooms(path) <= ALLOWED[path.stem]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda path: path.stem
)
def test_device_room_imports_torch_triton_and_itself(path: Path) -> None:
    outside = {
        name.split(".")[0] for name in imported(path) if not name.startswith("lmhead.kernels")
    }
    assert outside - set(sys.stdlib_module_names) <= {"torch", "triton"}


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.stem)
def test_measuring_room_never_imports_the_tests(path: Path) -> None:
    assert "tests" not in rooms(path)
    assert not imported(path) & {file.stem for file in (ROOT / "tests").glob("*.py")}


@pytest.mark.parametrize("path", sorted((ROOT / "lmhead").glob("*.py")), ids=lambda path: path.stem)
def test_runtime_needs_torch_and_triton_alone(path: Path) -> None:
    """At module level, that is; extras may be imported where they are used."""
    tree = ast.parse(path.read_text())
    top = ast.Module(
        [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], []
    )
    names = {name.split(".")[0] for name in _names(top)} - set(sys.stdlib_module_names)
    assert names <= RUNTIME
    inside = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names)
    assert inside - RUNTIME <= EXTRAS.get(path.stem, set())


@pytest.mark.parametrize(
    "path",
    sorted(set((ROOT / "bench").glob("*.py")) - set((ROOT / "bench").glob("test_*.py"))),
    ids=lambda path: path.stem,
)
def test_measuring_room_imports_extras_only_where_it_uses_them(path: Path) -> None:
    """`lmhead --help` and the measuring itself need no rich, no matplotlib and no pytest."""
    tree = ast.parse(path.read_text())
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {name.split(".")[0] for name in _names(ast.Module(top, []))}
    assert names - set(sys.stdlib_module_names) <= RUNTIME
    inside = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names)
    assert inside - RUNTIME <= {"report": {"rich"}, "plots": {"matplotlib"}}.get(
        path.stem, {"pytest"}
    )


def _names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "lmhead")
    return found


def test_the_table_names_every_module() -> None:
    assert {path.stem for path in (ROOT / "lmhead").glob("*.py")} == set(ALLOWED)


def test_kernels_are_this_checkouts() -> None:
    import lmhead
    from lmhead.kernels import gemm

    assert Path(gemm.__file__).resolve() == ROOT / "kernels" / "gemm.py"
    assert Path(lmhead.__file__).resolve() == ROOT / "lmhead" / "__init__.py"
    for room in ("kernels", "bench"):
        link = ROOT / "lmhead" / room
        assert link.is_symlink() and os.readlink(link) == f"../{room}"
        assert not (ROOT / room / "__init__.py").exists()


EVERYTHING = """
import importlib, os, pathlib, sys
before = set(os.listdir("."))
import torch, torch.distributed as dist
root = pathlib.Path(sys.argv[1])
names = [f"lmhead.{p.stem}" for p in (root / "lmhead").glob("*.py") if p.stem != "__init__"]
names += [f"lmhead.kernels.{p.stem}" for p in (root / "kernels").glob("*.py")]
for name in names:
    importlib.import_module(name)
assert not torch.cuda.is_initialized(), "a device was touched"
assert not dist.is_initialized(), "a group was made"
assert set(os.listdir(".")) == before, "a file was written"
from lmhead.kernels import tiles
assert tiles.INTERPRET.value is False
print(len(names))
"""


def test_everything_imports_without_gpu_group_or_interpreter(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING, str(ROOT)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(ALLOWED) - 1 + 4


def test_a_wheel_holds_one_top_level_name_and_the_kernels(tmp_path: Path) -> None:
    """A top-level package named `kernels` would hide the Hugging Face package of that name."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for file in files:  # a copy, so that no build folder is left in the checkout
        target = tmp_path / "source" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (ROOT / file).is_dir():
            shutil.copy(ROOT / file, target)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*build, "-w", str(tmp_path)], cwd=tmp_path / "source", check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"lmhead"}
    assert {f"lmhead/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")} <= set(names)


def test_importing_twice_is_harmless() -> None:
    """Operators are registered on import; doing that again must not raise."""
    code = (
        "import importlib, torch, lmhead, lmhead.operators\n"
        "importlib.reload(lmhead.operators)\n"
        "importlib.reload(lmhead)\n"
        "head = lmhead.LMHead(torch.eye(4), 4)\n"
        "assert torch.equal(head(torch.eye(4)), torch.eye(4))\n"
        "args = (4, '', 1, 1.0, None, torch.float32, torch.float32, None, '', '')\n"
        "assert torch.equal(torch.ops.lmhead.logits(torch.eye(4), torch.eye(4), None, *args), "
        "torch.eye(4))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
