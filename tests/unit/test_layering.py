"""Each package imports only from packages below its own, and what is slow to import stays out."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import pytest_gputrain

PACKAGE = "pytest_gputrain"
ROOT = Path(pytest_gputrain.__file__).parent

LAYERS = (
    "cli",
    "plugin",
    "report",
    "session",
    "execution",
    "gate",
    "storage",
    "worker",
    "hardware",
    "cases",
    "records",
    "utils",
)
"""The packages, each of which may import those after it."""

WORKER_IMPORTS = {"worker", "cases", "records", "utils"}
BELOW_PUBLIC_NAMES = {"cases", "records", "utils"}

TRAINING_LIBRARIES = {"torch", "transformers", "peft", "bitsandbytes", "accelerate", "diffusers", "numpy"}


class Import(NamedTuple):
    importer: str
    imported: str
    function: str
    """That the import stands in; empty at the top level."""


def _module_name(path: Path) -> str:
    return ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {_module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def _imports_of(module: str) -> Iterator[Import]:
    def walk(node: ast.AST, function: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import():
                    yield from (Import(module, alias.name, function) for alias in child.names)
                case ast.ImportFrom():
                    assert child.level == 0, f"{module} has a relative import, which this test does not follow"
                    for alias in child.names:
                        name = f"{child.module}.{alias.name}"
                        yield Import(module, name if name in SOURCES else str(child.module), function)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from walk(child, child.name)
                case _:
                    yield from walk(child, function)

    return walk(ast.parse(SOURCES[module].read_text()), "")


IMPORTS = [edge for module in SOURCES for edge in _imports_of(module)]
INSIDE = [edge for edge in IMPORTS if edge.imported.split(".")[0] == PACKAGE]


def _layer(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _in_worker(module: str) -> bool:
    return _layer(module) == "worker"


def test_the_imports_were_found() -> None:
    assert Import("pytest_gputrain.execution.local", "pytest_gputrain.execution.launch.launcher", "") in INSIDE
    assert Import("pytest_gputrain.execution.launch.launcher", "torch", "inline") in IMPORTS


def test_the_root_holds_packages_and_data_only() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(LAYERS)
    assert {path.name for path in ROOT.iterdir() if path.is_file()} == {"__init__.py", "py.typed"}


def test_packages_hold_a_docstring_only() -> None:
    """So that importing one module imports no other of its package. Registries and the public records are the exceptions."""
    inits = {module for module, path in SOURCES.items() if path.name == "__init__.py"}
    bodies = {module: ast.parse(SOURCES[module].read_text()).body for module in inits}
    assert {module for module, body in bodies.items() if len(body) != 1} == {
        "pytest_gputrain",
        "pytest_gputrain.records",
        "pytest_gputrain.worker.parallel",
        "pytest_gputrain.worker.zoo",
    }


def test_imports_go_down_the_packages() -> None:
    height = {layer: at for at, layer in enumerate(reversed(LAYERS))}
    height[""] = len(LAYERS)
    assert [edge for edge in INSIDE if height[_layer(edge.imported)] > height[_layer(edge.importer)]] == []


def test_the_public_names_come_from_the_lowest_packages() -> None:
    assert {_layer(edge.imported) for edge in INSIDE if edge.importer == PACKAGE} <= BELOW_PUBLIC_NAMES


def test_only_inline_runs_import_the_worker_from_outside() -> None:
    outside = {(f.importer, f.function) for f in INSIDE if _in_worker(f.imported) and not _in_worker(f.importer)}
    assert outside == {("pytest_gputrain.execution.launch.launcher", "inline")}


def test_the_worker_imports_the_lowest_packages_and_itself_only() -> None:
    assert {_layer(edge.imported) for edge in INSIDE if _in_worker(edge.importer)} == WORKER_IMPORTS


def test_the_worker_imports_nothing_of_pytest() -> None:
    banned = {"pytest", "_pytest", "pluggy", "xdist"}
    assert [f for f in IMPORTS if _in_worker(f.importer) and f.imported.split(".")[0] in banned] == []


def test_only_the_worker_inline_runs_and_the_search_for_changes_import_training_libraries() -> None:
    outside = {
        (edge.importer, edge.function)
        for edge in IMPORTS
        if edge.imported.split(".")[0] in TRAINING_LIBRARIES and not _in_worker(edge.importer)
    }
    assert outside == {("pytest_gputrain.execution.launch.launcher", "inline"), ("pytest_gputrain.gate.change_points", "")}


def test_the_search_for_changes_is_imported_where_it_is_needed() -> None:
    early = [edge for edge in INSIDE if edge.imported == "pytest_gputrain.gate.change_points" and not edge.function]
    assert early == []


def test_imports_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in SOURCES}
    for edge in INSIDE:
        graph[edge.importer].add(edge.imported)
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(SOURCES)


@pytest.mark.parametrize("module", ["pytest_gputrain", "pytest_gputrain.plugin.hooks", "pytest_gputrain.cli.main"])
def test_import_leaves_slow_libraries_out(module: str) -> None:
    slow = {*TRAINING_LIBRARIES, "rich", "pynvml", "filelock", "psutil", "jinja2", "markupsafe", "matplotlib"}
    code = f"import sys, {module}; print(*sorted({slow!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_worker_entry_leaves_pytest_out() -> None:
    code = "import sys, pytest_gputrain.worker.__main__; print(*sorted({'pytest', '_pytest', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_public_names_are_these() -> None:
    assert pytest_gputrain.__all__ == [
        "Case",
        "Crashed",
        "Environment",
        "GiB",
        "KiB",
        "Lost",
        "Measurement",
        "MiB",
        "OutOfMemory",
        "Report",
        "Result",
        "TimedOut",
        "Verdict",
        "grid",
    ]


def test_public_names_resolve() -> None:
    assert [name for name in pytest_gputrain.__all__ if getattr(pytest_gputrain, name, None) is None] == []


def test_no_two_test_modules_share_a_name() -> None:
    """pytest imports them by their bare names, and tests of the suites collect benchmarks/ in a process that ran others."""
    repository = Path(__file__).parents[2]
    names = [path.name for folder in ("tests", "benchmarks") for path in repository.glob(f"{folder}/**/test_*.py")]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))


def test_wall_clocks_are_read_only_for_the_date_of_a_run() -> None:
    """They jump: no duration and no time-out may hang on one."""
    of_walls = {("time", name) for name in ("time", "time_ns", "localtime", "gmtime", "ctime")}
    of_walls |= {(name, method) for name in ("datetime", "date") for method in ("now", "utcnow", "today")}
    clocks = set()
    for module, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                if (owner, node.attr) in of_walls:
                    clocks.add((module, node.attr))
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                clocks |= {(module, alias.name) for alias in node.names if ("time", alias.name) in of_walls}
    # And for the age of a file that may be forgotten.
    assert clocks == {("pytest_gputrain.utils.git", "now"), ("pytest_gputrain.session.dry_run.cache", "time")}
