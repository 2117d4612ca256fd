"""Counts the small errors in a package that its tests notice: a mutation score, of a sample that a seed draws.

    PYTHONHASHSEED=0 python tools/mutation_score.py pytest_gputrain/gate [--tests PATH] [--sample N] [--seed N] [--json OUT]

A mutant is the package with one expression changed: a comparison, an operator, a number or a truth value is another,
``and`` is ``or``, ``not`` and minus are gone, a condition always or never holds, None is returned, ``min`` is ``max``,
``any`` is ``all``, a sorting is reversed, a default is another. Strings, annotations, decorators, assertions and imports
stay as they are.

Of the test files below ``--tests``, those count that call a function of the package and pass without a mutant, within the
8 GiB of addresses that each process gets. The program first finds these, and names those that fail. A mutant runs first
in the files that import its module and call it (or, where none imports it, in all that call it), then, if it survives
these, in all others. It is killed by the first test that fails, or timed out, which counts as killed, after
``SLACK_SECONDS`` and ``SLACK`` times what the tests take without it.

Each runs in a process of its own, forked before anything of the package is imported, one at a time. Processes that tests
start have no mutant in them. Hypothesis has the profile ``mutants`` of ``tests/unit/conftest.py``: ten examples, always
the same ones; what draws seeds of its own gets the same ones, too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple

import pytest

WARM: Final = ("filelock", "hypothesis", "jinja2", "matplotlib.figure", "msgspec.json", "numpy", "psutil", "rich.table")
"""The modules that tests import anyway, imported once for all processes."""
OPTIONS: Final = (
    "-x",
    "-q",
    "--tb=short",
    "--assert=plain",  # whose importing of plugins would go before a mutant's
    "--hypothesis-profile=mutants",
    *("-p", "no:cacheprovider"),
    *("-p", "no:xdist"),
)
MOST_BYTES: Final = 8 << 30
"""The limit of the address space of a process."""
SLACK_SECONDS: Final = 20.0
SLACK: Final = 6.0
MOST_SECONDS: Final = 300.0
"""The time limit of all tests of the unchanged package, and of those of a mutant."""

COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
NAMES: Final = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
    "median_low": "median_high",
    "median_high": "median_low",
}
UNCHANGED_FIELDS: Final = {"annotation", "returns", "decorator_list", "bases", "format_spec"}
UNCHANGED_NODES: Final = (ast.Assert, ast.Import, ast.ImportFrom)

Node = ast.expr | ast.stmt


class Mutant(NamedTuple):
    """A change of one place."""

    module: str
    path: str
    line: int
    column: int
    change: str
    apply: Callable[[], None]
    """Makes it in the parsed module, for good: to be called in the process that runs it."""


@dataclass(frozen=True)
class Module:
    """A module of the package."""

    name: str
    path: Path
    tree: ast.Module


@dataclass
class Run:
    """The outcome of the tests in one process."""

    outcome: str
    """``passed``, ``failed`` or ``timed out``."""
    seconds: float
    failed: str = ""
    """The first test or file that failed; empty where pytest itself did, or the process died."""
    loaded: list[str] = field(default_factory=list)
    """Modules that the process imported from the given trees."""
    called: list[str] = field(default_factory=list)
    """Files whose functions were called, where that was asked for."""
    output: str = ""
    """The end of it."""


def modules_of(package: Path) -> list[Module]:
    modules = []
    for path in sorted(package.rglob("*.py")):
        parts = path.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return modules


def mutants_of(module: Module) -> Iterator[Mutant]:
    for node, parent, name, put in places(module.tree):
        for new in replacements(node, parent, name):
            change = f"{ast.unparse(node)} -> {ast.unparse(new)}"
            place = ast.fix_missing_locations(ast.copy_location(new, node))
            apply = functools.partial(put, place)
            yield Mutant(module.name, str(module.path), node.lineno, node.col_offset, change, apply)


def places(parent: ast.AST) -> Iterator[tuple[Node, ast.AST, str, Callable[[Node], None]]]:
    """Yield each expression and statement that may change, in the order of the source: its parent, its field there, and what
    puts another one in its place."""
    for name, value in ast.iter_fields(parent):
        if name in UNCHANGED_FIELDS:
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST) or isinstance(node, UNCHANGED_NODES) or _is_dunder_all(node):
                continue
            if isinstance(node, Node):

                def put(new: Node, name: str = name, value: object = value, index: int = index) -> None:
                    if isinstance(value, list):
                        value[index] = new
                    else:
                        setattr(parent, name, new)

                yield node, parent, name, put
            yield from places(node)


def _is_dunder_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def replacements(node: Node, parent: ast.AST, name: str) -> Iterator[Node]:
    """Return the replacements of a node in its mutants."""
    yield from _of_its_place(node, parent, name)
    yield from _of_operators(node)
    yield from _of_values(node)


def _of_operators(node: Node) -> Iterator[Node]:
    match node:
        case ast.Compare(left, operators, comparators):
            for index, operator in enumerate(operators):
                for other in COMPARISONS[type(operator)]:
                    changed = [*operators[:index], other(), *operators[index + 1 :]]
                    yield ast.Compare(left, changed, comparators)
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(operator)](), right)
        case ast.AugAssign(target, operator, value) if type(operator) in OPERATORS:
            yield ast.AugAssign(target, OPERATORS[type(operator)](), value)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _of_values(node: Node) -> Iterator[Node]:
    match node:
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield ast.Constant(2 * value or 1.0)
        case ast.Name(identifier, ast.Load()) if identifier in NAMES:
            yield ast.Name(NAMES[identifier], ast.Load())
        case ast.Attribute(value, attribute, ast.Load()) if attribute in NAMES:
            yield ast.Attribute(value, NAMES[attribute], ast.Load())
        case ast.Call(ast.Name("sorted") | ast.Attribute(attr="sort"), arguments, keywords):
            given = [keyword.value for keyword in keywords if keyword.arg == "reverse"]
            others = [keyword for keyword in keywords if keyword.arg != "reverse"]
            reverse = ast.UnaryOp(ast.Not(), given[0]) if given else ast.Constant(True)
            yield ast.Call(node.func, arguments, [*others, ast.keyword("reverse", reverse)])


def _of_its_place(node: Node, parent: ast.AST, name: str) -> Iterator[Node]:
    """Return the replacements of a condition, a returned value or a default, whatever they are."""
    match parent, name:
        case (ast.If() | ast.IfExp(), "test") | (ast.match_case(), "guard") | (ast.comprehension(), "ifs"):
            if ast.unparse(node) != "TYPE_CHECKING":
                yield ast.Constant(True)
                yield ast.Constant(False)
        case ast.While(), "test" if not isinstance(node, ast.Constant):
            yield ast.Constant(False)
        case ast.Return(), _ if not isinstance(node, ast.Constant):
            yield ast.Constant(None)
        case ast.arguments(), ("defaults" | "kw_defaults"):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield ast.Constant("mutant")
            elif not isinstance(node, ast.Constant):
                yield ast.Constant(None)


class Result(NamedTuple):
    """The outcome of a mutant."""

    module: str
    path: str
    line: int
    change: str
    outcome: str
    """``killed``, ``timed out`` or ``survived``."""
    by: str
    """The test that failed, or the end of what pytest printed where none did."""
    seconds: float


class Finder(importlib.abc.MetaPathFinder):
    """Imports the given modules from their parsed trees."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = {module.name: module for module in modules}
        self.loaded: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.modules:
            return None
        place = str(self.modules[fullname].path.resolve())
        return importlib.util.spec_from_file_location(fullname, place, loader=Loader(fullname, place, self))


class Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, finder: Finder) -> None:
        super().__init__(fullname, path)
        self.finder = finder

    def get_code(self, fullname: str) -> CodeType:
        self.finder.loaded.append(fullname)
        code: CodeType = compile(self.finder.modules[fullname].tree, self.path, "exec", dont_inherit=True)
        return code


class Observer:
    """Notes the first failure, and which files of the package the tests call."""

    def __init__(self, files: frozenset[str]) -> None:
        self.files = files
        self.called: set[str] = set()
        self.failed = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        if not self.files:
            return (yield)
        sys.setprofile(self._profile)
        try:
            return (yield)
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename in self.files and frame.f_code.co_name != "<module>":
            self.called.add(frame.f_code.co_filename)


def run(
    tests: Sequence[Path],
    scratch: Path,
    seconds: float,
    *,
    modules: Sequence[Module] = (),
    mutant: Mutant | None = None,
    profiled: frozenset[str] = frozenset(),
) -> Run:
    """Run test files in a forked process, which imports ``modules`` from their trees.

    Args:
        seconds: that it may take.
        profiled: files of which to tell whether their functions are called.
    """
    reply, log = scratch / "reply.json", scratch / "log.txt"
    reply.unlink(missing_ok=True)
    sys.stdout.flush()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with open(os.devnull, "rb") as nothing, open(log, "wb") as output:
                for stream, number in ((nothing, 0), (output, 1), (output, 2)):
                    os.dup2(stream.fileno(), number)
            code = _run_here(tests, scratch, reply, modules, mutant, profiled)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    ended = os.pidfd_open(pid)
    try:
        in_time = bool(select.select([ended], [], [], seconds)[0])
    finally:
        os.close(ended)
        with contextlib.suppress(ProcessLookupError):  # what it started, too
            os.killpg(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    took = time.monotonic() - began
    told: dict[str, Any] = json.loads(reply.read_bytes()) if reply.exists() else {}
    outcome = "passed" if code == 0 else "failed"
    return Run(
        outcome=outcome if in_time else "timed out",
        seconds=took,
        output=log.read_text(errors="replace")[-3000:],
        **told,
    )


def _run_here(
    tests: Sequence[Path],
    scratch: Path,
    reply: Path,
    modules: Sequence[Module],
    mutant: Mutant | None,
    profiled: frozenset[str],
) -> int:
    if mutant is not None:
        mutant.apply()
    finder, observer = Finder(modules), Observer(profiled)
    sys.meta_path.insert(0, finder)
    random.seed(0)
    secrets.randbits = random.Random(0).getrandbits  # type: ignore[assignment] # mypy knows its argument by another name
    code = pytest.main([*OPTIONS, f"--basetemp={scratch / 'pytest'}", *map(str, tests)], plugins=[observer])
    told = {"failed": observer.failed, "loaded": sorted(set(finder.loaded)), "called": sorted(observer.called)}
    part = reply.with_suffix(".part")
    part.write_text(json.dumps(told))
    part.replace(reply)
    return int(code)


@dataclass(frozen=True)
class Tests:
    """The test files that call the package."""

    calls: Mapping[Path, frozenset[str]]
    """Paths of modules, of each file."""
    imports: Mapping[Path, frozenset[str]]
    """Names of modules, of each file."""
    seconds: Mapping[Path, float]

    def near(self, module: Module) -> list[Path]:
        """Return the tests that should find an error in the module, the fastest first."""
        callers = [path for path in self.calls if str(module.path.resolve()) in self.calls[path]]
        return sorted([path for path in callers if module.name in self.imports[path]] or callers, key=self._order)

    def others(self, module: Module) -> list[Path]:
        near = self.near(module)
        return sorted((path for path in self.calls if path not in near), key=self._order)

    def limit(self, paths: Sequence[Path]) -> float:
        return min(MOST_SECONDS, SLACK_SECONDS + SLACK * sum(self.seconds[path] for path in paths))

    def _order(self, path: Path) -> tuple[float, Path]:
        return round(self.seconds[path]), path


def find_tests(places: Sequence[Path], modules: Sequence[Module], scratch: Path) -> Tests:
    """Find the tests that call the package, and leave out those that fail already, by name."""
    files = frozenset(str(module.path.resolve()) for module in modules)
    calls, imports, seconds = {}, {}, {}
    for path in sorted(found for place in places for found in ([place] if place.is_file() else place.rglob("test_*.py"))):
        profiled = run([path], scratch, MOST_SECONDS, profiled=files)
        plain = run([path], scratch, MOST_SECONDS) if profiled.called else profiled
        if failed := next((attempt for attempt in (profiled, plain) if attempt.outcome != "passed"), None):
            print(f"left out: {path} {failed.outcome} without a mutant:\n{failed.output}", flush=True)
        elif profiled.called:
            calls[path], imports[path], seconds[path] = frozenset(profiled.called), imports_of(path), plain.seconds
            print(
                f"{plain.seconds:6.1f} s {path}: {', '.join(sorted(Path(name).stem for name in profiled.called))}",
                flush=True,
            )
    everything = run(list(calls), scratch, MOST_SECONDS, modules=modules)
    if everything.outcome != "passed":
        sys.exit(f"the tests, all in one process, {everything.outcome} without a mutant:\n{everything.output}")
    if missing := {module.name for module in modules} - set(everything.loaded):
        sys.exit(f"no test imports {', '.join(sorted(missing))} in such a way that a mutant would be imported")
    print(f"{everything.seconds:6.1f} s all {len(calls)} files", flush=True)
    return Tests(calls, imports, seconds)


def imports_of(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def attempt(mutant: Mutant, module: Module, tests: Tests, scratch: Path) -> Result:
    outcome, by, seconds = "survived", "", 0.0
    for files in (tests.near(module), tests.others(module)):
        if files and outcome == "survived":
            ended = run(files, scratch, tests.limit(files), modules=[module], mutant=mutant)
            seconds += ended.seconds
            if ended.outcome != "passed":
                outcome = "timed out" if ended.outcome == "timed out" else "killed"
                by = ended.failed or ended.output[-300:]
    return Result(mutant.module, mutant.path, mutant.line, mutant.change, outcome, by, round(seconds, 2))


def table(results: Sequence[Result]) -> str:
    """The score by module, and the survivors."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        for name in (result.module, "all"):
            counts.setdefault(name, Counter())[result.outcome] += 1
    lines = ["", f"{'module':45} mutants  killed  timed out  survived  score"]
    for name in [*sorted(counts.keys() - {"all"}), "all"]:
        of, number = counts[name], counts[name].total()
        share = f"{1 - of['survived'] / number:.1%}"
        lines.append(f"{name:45} {number:7} {of['killed']:7} {of['timed out']:10} {of['survived']:9} {share:>6}")
    survivors = [result for result in results if result.outcome == "survived"]
    return "\n".join([*lines, "", *(f"{result.path}:{result.line}: {result.change}" for result in survivors)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="its folder, from the working directory")
    parser.add_argument("--tests", type=Path, nargs="+", default=[Path("tests/unit")], help="files and folders")
    parser.add_argument("--sample", type=int, default=400, help="mutants to run (default: 400)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: 1)")
    parser.add_argument("--json", type=Path, help="a file for the results")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    modules = {module.name: module for module in modules_of(given.package)}
    mutants = [mutant for module in modules.values() for mutant in mutants_of(module)]
    chosen = sorted(random.Random(given.seed).sample(range(len(mutants)), min(given.sample, len(mutants))))
    print(f"{len(mutants)} mutants, of which {len(chosen)} run (seed {given.seed})", flush=True)
    sys.path.insert(0, str(Path.cwd()))
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        tests = find_tests(given.tests, list(modules.values()), Path(folder))
        for number, index in enumerate(chosen, 1):
            mutant = mutants[index]
            result = attempt(mutant, modules[mutant.module], tests, Path(folder))
            results.append(result)
            place = f"{mutant.path}:{mutant.line}: {mutant.change}"
            print(f"{number:4} {result.outcome:9} {result.seconds:5.1f} s {place}", flush=True)
    print(table(results), f"{time.monotonic() - began:.0f} s", sep="\n")
    if given.json:
        document = {
            "package": str(given.package),
            "mutants": len(mutants),
            "seed": given.seed,
            "tests": sorted(map(str, tests.calls)),
            "results": [result._asdict() for result in results],
        }
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
