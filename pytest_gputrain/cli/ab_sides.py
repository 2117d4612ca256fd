"""Prepares the sides of ``gputrain ab`` (a git revision, a folder or a virtual environment) and runs pytest in them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_gputrain.hardware import drivers
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.hardware.devices import HardwareError
from pytest_gputrain.records import Emulated, Measured, Report
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.reports import read_report
from pytest_gputrain.utils.git import git_output, uncommitted
from pytest_gputrain.utils.reading import tail

_USAGE_ERROR: Final = 4
_NOTHING_SELECTED: Final = 5
_TAIL_LINES: Final = 15
_END_SECONDS: Final = 60.0
"""The time that pytest has to end its workers."""
_LOOK_SECONDS: Final = 5.0
"""The time after which the log is read again for how far pytest is."""
_AT_ONCE: Final = 2
"""Cases of exact figures that run at once."""


class SideError(Exception):
    """A side cannot be run. The message is one sentence, and what pytest said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The folder and the interpreter in which pytest runs."""

    name: str
    """``base`` or ``head``."""
    label: str
    """The name of the side in sentences: as typed, a revision with its commit."""
    python: str
    folder: Path
    environ: Mapping[str, str]


@contextlib.contextmanager
def open_side(name: str, source: str, scratch: Path) -> Iterator[Side]:
    """Provide the side that ``source`` names. A revision is checked out into a worktree below ``scratch``, which is removed
    at the end.

    Raises:
        SideError: it is neither a folder nor a revision, or has no pytest-gputrain.
    """
    cwd = Path.cwd()
    if (Path(source) / "bin" / "python").exists():
        python = str(Path(source).absolute() / "bin" / "python")
        side = Side(name=name, label=source, python=python, folder=cwd, environ=dict(os.environ))
        probe = [python, "-c", "import pytest, pytest_gputrain.plugin.hooks"]
        if subprocess.run(probe, cwd=cwd, capture_output=True, check=False).returncode:
            raise SideError(f"--{name}: {source} has no pytest-gputrain; install it there")
        yield side
    elif Path(source).is_dir():
        root = git_output(cwd, "rev-parse", "--show-toplevel")
        folder = Path(source).absolute()
        environ = _environ(Path(root) if root else cwd, Path(git_output(folder, "rev-parse", "--show-toplevel") or folder))
        label = f"{source} (with uncommitted changes)" if uncommitted(folder) else source
        yield Side(name=name, label=label, python=sys.executable, folder=folder, environ=environ)
    else:
        with _worktree(name, source, cwd, scratch) as side:
            yield side


@contextlib.contextmanager
def _worktree(name: str, revision: str, cwd: Path, scratch: Path) -> Iterator[Side]:
    commit = git_output(cwd, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if not commit:
        raise SideError(
            f"--{name}: {revision!r} is neither a folder, a virtual environment nor a revision of a git repository here"
        )
    root, tree = Path(git_output(cwd, "rev-parse", "--show-toplevel")), scratch / name
    added = subprocess.run(
        ["git", "-C", str(root), "worktree", "add", "--detach", str(tree), commit],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        if added.returncode:
            raise SideError(
                f"--{name}: {revision} cannot be checked out: {(added.stderr.strip().splitlines() or ['?'])[-1]}"
            )
        folder = tree / cwd.resolve().relative_to(root.resolve())
        if not folder.is_dir():
            raise SideError(f"--{name}: {revision} has no folder {folder.relative_to(tree)}; run this in one that it has")
        label = f"{revision} ({commit[:12]})"
        yield Side(name=name, label=label, python=sys.executable, folder=folder, environ=_environ(root, tree))
    finally:
        subprocess.run(
            ["git", "-C", str(root), "worktree", "remove", "--force", str(tree)], capture_output=True, check=False
        )


def _environ(root: Path, tree: Path) -> dict[str, str]:
    """Return this environment, in which imports from ``root`` come from ``tree``. Its packages precede installed ones."""
    paths = []
    for path in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        inside = Path(path).resolve().is_relative_to(root.resolve())
        paths.append(str(tree / Path(path).resolve().relative_to(root.resolve())) if inside else path)
    own = [str(folder) for folder in (tree / "src", tree) if folder.is_dir()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*own, *paths]))}


def run(
    side: Side, arguments: Sequence[str], scratch: Path, watch: Callable[[float], None], against: Path | None = None
) -> Report:
    """Return the report of one run of pytest, with one fresh process of each case.

    Args:
        watch: called now and then with the share of the tests that have ended.
        against: the report that it is judged by, as ordinary runs are; by default nothing judges it.

    Raises:
        SideError: pytest gives no report, or one without cases.
    """
    report, log, no_baselines = report_of(side, scratch), scratch / f"{side.name}.log", scratch / "no-baselines"
    for folder in (report.parent, no_baselines):
        folder.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    command = [side.python, "-m", "pytest", *arguments, "-v", "--gpu-summary=none"]
    command += [f"--gpu-baseline={against or 'measured'}", f"--gpu-baseline-dir={no_baselines}", "--gpu-runs=1"]
    command += [f"--gpu-json={report}", *([] if against else ["-o", "gpu_reruns=0"])]
    command += ["-o", "gpu_strict=false", "-o", "gpu_history=", "-o", "console_output_style=progress"]
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            cwd=side.folder,
            env=side.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # The terminal would send Ctrl-C to pytest as well. Only `_end` sends it, because a second one would stop
            # pytest's cleaning up.
            start_new_session=True,
        )
        try:
            status = _wait(child, log, watch)
        except BaseException:
            _end(child)
            raise
    if status == _NOTHING_SELECTED:
        raise SideError(f"{side.label} has no test that {' '.join(arguments) or 'pytest without arguments'} selects")
    printed = "\n".join(tail(log).rstrip().splitlines()[-_TAIL_LINES:])
    if status == _USAGE_ERROR or not report.exists():
        raise SideError(f"pytest of {side.label} ended with status {status} and without a report:\n{printed}")
    side_report = written(side, scratch)
    if not any(isinstance(result, Measured | Emulated) for result in side_report.results):
        raise SideError(f"no test of {side.label} measured a case:\n{printed}")
    return side_report


def report_of(side: Side, scratch: Path) -> Path:
    """Return the file of a side's last report, by whose name sentences call the side."""
    return scratch / "reports" / side.name


def written(side: Side, scratch: Path) -> Report:
    """Return the side's last report. An interrupted run may have written it.

    Raises:
        SideError: there is none, or it cannot be read.
    """
    try:
        return read_report(report_of(side, scratch), "both sides need versions that agree on its format")
    except BaselineError as error:
        raise SideError(str(error)) from None


def measures_time(arguments: Sequence[str]) -> bool:
    """Tell whether pytest would run cases on a GPU here, judging by its arguments and the drivers."""
    if "--gpu-emulate" in arguments or f"--gpu-platform={CPU}" in arguments:
        return False
    try:
        return bool(drivers.gpus())
    except HardwareError:  # A driver is installed if it raises an error.
        return True


def with_more_at_once(side: Side, arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments with the option of pytest-xdist that runs several cases at once, if pytest-xdist is installed."""
    own = any(re.match(r"-n|--numprocesses|--dist|--pdb|(-p *)?no:xdist", argument) for argument in arguments)
    if own or len(os.sched_getaffinity(0)) < _AT_ONCE or "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in side.environ:
        return arguments
    probe = [side.python, "-c", "import xdist"]
    if subprocess.run(probe, env=side.environ, cwd=side.folder, capture_output=True, check=False).returncode:
        return arguments
    return ["-n", str(_AT_ONCE), *arguments]


def _wait(child: subprocess.Popen[bytes], log: Path, watch: Callable[[float], None]) -> int:
    """Wait until pytest has ended, and report its progress meanwhile."""
    while True:
        try:
            return child.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            shares = re.findall(r"\[ *(\d+)%\]", tail(log))
            watch(int(shares[-1]) / 100 if shares else 0.0)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest as Ctrl-C does, so that it ends its workers; kill it if it does not end."""
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(signal.SIGINT)
    try:
        child.wait(_END_SECONDS)
    except BaseException:
        child.kill()
        child.wait()
