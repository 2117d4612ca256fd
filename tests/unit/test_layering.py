"""Each package imports only from packages below its own, and what is slow to import stays out."""

import ast
import graphlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import reference_pages

import pytest_gputrain
from pytest_gputrain.plugin import hooks
from pytest_gputrain.plugin.fixtures import GpuTrain
from pytest_gputrain.plugin.marker_help import LIMIT, ONLY_ON, TOLERANCE

PACKAGE = "pytest_gputrain"
ROOT = Path(pytest_gputrain.__file__).parent
REPOSITORY = Path(__file__).parents[2]

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

TRAINING_LIBRARIES = {"torch", "transformers", "peft", "bitsandbytes", "accelerate", "diffusers", "numpy"}


class Import(NamedTuple):
    importer: str
    imported: str
    function: str
    """That the import stands in; empty at the top level."""


def _module_name(path):
    return ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {_module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def _absolute(module, imports):
    if not imports.level:
        return str(imports.module)
    package = module.split(".") if SOURCES[module].name == "__init__.py" else module.split(".")[:-1]
    return ".".join((*package[: len(package) - imports.level + 1], *filter(None, [imports.module])))


def _imports_of(module):
    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.Import():
                    yield from (Import(module, alias.name, function) for alias in child.names)
                case ast.ImportFrom():
                    source = _absolute(module, child)
                    for alias in child.names:
                        name = f"{source}.{alias.name}"
                        yield Import(module, name if name in SOURCES else source, function)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from walk(child, child.name)
                case _:
                    yield from walk(child, function)

    return walk(ast.parse(SOURCES[module].read_text()), "")


IMPORTS = [edge for module in SOURCES for edge in _imports_of(module)]
INSIDE = [edge for edge in IMPORTS if edge.imported.split(".")[0] == PACKAGE]


def _layer(module):
    return module.split(".")[1] if "." in module else ""


def _in_worker(module):
    return _layer(module) == "worker"


def test_the_imports_were_found():
    assert Import("pytest_gputrain.execution.local", "pytest_gputrain.execution.launch.launcher", "") in INSIDE
    assert Import("pytest_gputrain.execution.launch.launcher", "torch", "inline") in IMPORTS


def test_packages_are_those_of_the_layers_and_hold_a_docstring_only():
    """So that importing one module imports no other of its package. Registries and the public records are the exceptions."""
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(LAYERS)
    inits = {module for module, path in SOURCES.items() if path.name == "__init__.py"}
    more = {module for module in inits if len(ast.parse(SOURCES[module].read_text()).body) != 1}
    assert more == {PACKAGE, *(f"{PACKAGE}.{name}" for name in ("records", "worker.parallel", "worker.zoo"))}


def test_imports_go_down_the_packages():
    height = {layer: at for at, layer in enumerate(reversed(LAYERS))}
    height[""] = len(LAYERS)
    assert [edge for edge in INSIDE if height[_layer(edge.imported)] > height[_layer(edge.importer)]] == []


def _reach(arrows, package):
    return {reached for target in arrows[package] for reached in ({target} | _reach(arrows, target))}


def test_the_drawing_of_the_packages_has_the_arrows_of_the_code():
    """Those that follow from others are left out, and every import follows from the arrows."""
    imports = {layer: {_layer(e.imported) for e in INSIDE if _layer(e.importer) == layer} - {layer} for layer in LAYERS}
    direct = {
        layer: {found for found in imported if all(found not in _reach(imports, other) for other in imported)}
        for layer, imported in imports.items()
    }
    drawing = (REPOSITORY / "docs" / "architecture.md").read_text().split("```mermaid\nflowchart TD\n")[1].split("```")[0]
    drawn = {layer: set() for layer in LAYERS}
    for line in drawing.splitlines():
        importer, _, imported = line.strip().partition(" --> ")
        drawn[importer] = set(imported.split(" & "))
    assert drawn == direct


def test_the_page_of_the_architecture_names_files_that_exist():
    named = re.findall(r"`([a-z_]+/[\w/]+\.py)`", (REPOSITORY / "docs" / "architecture.md").read_text())
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).is_file() and not (REPOSITORY / name).is_file()] == []


INLINE = (f"{PACKAGE}.execution.launch.launcher", "inline")


def test_the_public_names_come_from_the_lowest_packages():
    assert {_layer(edge.imported) for edge in INSIDE if edge.importer == PACKAGE} <= {"cases", "records", "utils"}


def test_only_inline_runs_import_the_worker_which_imports_the_lowest_packages_and_nothing_of_pytest():
    outside = {(f.importer, f.function) for f in INSIDE if _in_worker(f.imported) and not _in_worker(f.importer)}
    assert outside == {INLINE}
    inside = [edge for edge in IMPORTS if _in_worker(edge.importer)]
    assert {_layer(edge.imported) for edge in inside if edge in INSIDE} == {
        "worker",
        "hardware",
        "cases",
        "records",
        "utils",
    }
    of_hardware = {edge.imported for edge in inside if edge in INSIDE and _layer(edge.imported) == "hardware"}
    assert of_hardware == {f"{PACKAGE}.hardware.step_time"}, "which knows no driver"
    assert not {edge.imported.split(".")[0] for edge in inside} & {"pytest", "_pytest", "pluggy", "xdist"}


def test_only_the_worker_inline_runs_and_the_search_for_changes_import_training_libraries():
    outside = {
        (edge.importer, edge.function)
        for edge in IMPORTS
        if edge.imported.split(".")[0] in TRAINING_LIBRARIES and not _in_worker(edge.importer)
    }
    search = f"{PACKAGE}.gate.change_points"
    assert outside == {INLINE, (search, "")}
    assert [edge for edge in INSIDE if edge.imported == search and not edge.function] == [], "imported where it is needed"


def test_imports_have_no_cycle():
    graph = {module: set() for module in SOURCES}
    for edge in INSIDE:
        graph[edge.importer].add(edge.imported)
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(SOURCES)


SLOW = TRAINING_LIBRARIES | {"rich", "pynvml", "filelock", "psutil", "jinja2", "markupsafe", "matplotlib"}


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("pytest_gputrain", SLOW),
        ("pytest_gputrain.plugin.hooks", SLOW),
        ("pytest_gputrain.cli.main", SLOW),
        ("pytest_gputrain.worker.__main__", {"pytest", "_pytest", "torch"}),
    ],
)
def test_import_leaves_slow_libraries_out(module, left_out):
    code = f"import sys, {module}; print(*sorted({left_out!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == ""


def _loaded_by_run(folder, *arguments):
    """Run pytest in ``folder``, and return the modules of this package and of msgspec that it has loaded by its end."""
    code = (
        "import sys, pytest; status = pytest.main(sys.argv[1:]); "
        "print(*(name for name in sys.modules if name.startswith(('pytest_gputrain', 'msgspec')))); sys.exit(status)"
    )
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT.parent)}
    command = [sys.executable, "-c", code, "-q", "-p", "pytest_gputrain.plugin.hooks", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.splitlines()[-1].split())


PLAIN_TESTS = """
import pytest

pytestmark = pytest.mark.plain

@pytest.mark.parametrize("number", [1, 2])
def test_number(number, tmp_path):
    assert number

@pytest.mark.other
def test_other():
    pass

@pytest.mark.xfail
def test_failing():
    assert False
"""


def test_a_project_without_cases_loads_options_markers_and_fixtures_only(tmp_path, snapshot):
    """And what these need: no records, no gate, no runner, no report."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    plain\n    other\n")
    (tmp_path / "test_plain.py").write_text(PLAIN_TESTS)
    assert ", ".join(sorted(_loaded_by_run(tmp_path, "-m", "plain and not other"))) == snapshot


@pytest.mark.parametrize("arguments", [["--gpu-runs=2"], ["-o", "gpu_runs=2"]])
def test_an_option_loads_what_checks_it(tmp_path, arguments):
    (tmp_path / "test_plain.py").write_text("def test(): pass")
    assert "pytest_gputrain.plugin.case_session" in _loaded_by_run(tmp_path, *arguments)


def test_a_test_that_asks_for_the_fixture_has_everything_loaded_before_the_first_test(tmp_path):
    """A test may replace what importing needs, such as the file system."""
    (tmp_path / "test_plain.py").write_text("def test(gputrain): pass")
    assert "pytest_gputrain.plugin.case_session" in _loaded_by_run(tmp_path, "--collect-only")


def test_public_names_are_these_and_the_reference_has_a_sentence_on_each(snapshot):
    """A name that is new or gone changes the snapshot, so that nobody adds or removes one without noticing."""
    rows = re.findall(r"^- (?:fixture |marker )?`([^`]+?)(?:\(\))?`: (.*)$", reference_pages.names(), re.MULTILINE)
    listed = dict(rows)
    assert len(listed) == len(rows)
    assert all(re.fullmatch(r"[A-Z`0-9].{5,}\.", sentence) for sentence in listed.values()), listed
    defined = {f"pytest_gputrain.{name}" for name in pytest_gputrain.__all__}
    functions = [node for node in ast.parse(Path(hooks.__file__).read_text()).body if isinstance(node, ast.FunctionDef)]
    defined |= {node.name for node in functions if "pytest.fixture" in map(ast.unparse, node.decorator_list)}
    defined |= {f"gputrain.{name}" for name in vars(GpuTrain)} | {"PLATFORM", LIMIT, ONLY_ON, TOLERANCE}
    public = {name for name in defined if not any(part.startswith("_") for part in name.split("."))}
    assert public == {name for name in listed if not name.startswith("setup.")}
    assert ", ".join(listed) == snapshot


def test_no_two_test_modules_share_a_name():
    """pytest imports them by their bare names, and tests of the suites collect benchmarks/ in a process that ran others."""
    names = [path.name for folder in ("tests", "benchmarks") for path in REPOSITORY.glob(f"{folder}/**/test_*.py")]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))
