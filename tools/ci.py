"""Runs what CI runs: the README's test command, and then each part that takes longer or needs more to be installed.

    .ci/run                  everything but what runs once a week, at most 70 minutes
    .ci/run slow newest      these parts alone
    .ci/run --list           the parts as the matrix of a workflow of GitHub; with --weekly those that run once a week

A test that fails, or a part that takes longer than it may, fails the run. What cannot be installed (no network, no root, no
mirror of Debian's packages) is skipped. What a slow machine has no time left for is left out, and the run says that it is
incomplete, which fails it on GitHub. The last lines name each part, each skip and its reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import pythons

ROOT: Final = Path(__file__).parent.parent
ALL_MINUTES: Final = 70.0
INSTALL_MINUTES: Final = 12.0
OWN_PYTHON: Final = "3.11"
"""The version of Python that constraints.txt is for, and that GitHub runs this with."""

# As `pytest -rs` prints it; with a name of the environment before it where several run at once.
_SKIPPED: Final = re.compile(r"SKIPPED \[(\d+)\] (?P<place>[^:]+)(?::\d+)?: (?P<reason>.*)")
# A line of pytest's progress with a test that failed, or such a line as far as it was printed.
_FAILING: Final = re.compile(r"(\S+\.py )?[.sxX]*[FE][.sxXFE]*( +\[ *\d+%\])?\s*")
_REMOVED: Final = "removed-"
_ERROR: Final = re.compile(r"error[: ]|^E: |no space left|timed out", re.IGNORECASE)


class Part(NamedTuple):
    """An environment of tox.ini, or those of the README's command."""

    name: str
    minutes: float
    """The time limit of its tests: about three times what they take on two quiet cores."""
    programs: Mapping[str, str] = {}
    """Debian's packages, by the program of each that the tests look for."""
    by_name: bool = False
    """Run it only where the command names it."""
    leaves_a_core: bool = False
    """Run the next part beside it: it runs in one process, or waits most of the time."""
    python: str = ""
    """The version of Python that it is tested with, if it is not the one that runs this."""

    @property
    def runs_elsewhere(self) -> bool:
        """Whether it tells something with another version of Python, too. One whose name has the version does not."""
        return f"py{self.python.replace('.', '')}" not in self.name


QUICK: Final = "quick"
# In this order each installation that takes long falls into tests that take longer.
PARTS: Final = (
    Part(QUICK, 40),
    Part(
        "slow",
        40,
        {"chromium": "chromium", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"},
    ),
    Part("bare", 8, leaves_a_core=True),
    Part("bare-py312", 8, leaves_a_core=True, python="3.12"),
    Part("bare-py313", 8, leaves_a_core=True, python="3.13"),
    Part("bare-py314", 8, leaves_a_core=True, python="3.14"),
    Part("package", 8),
    Part("emulated", 50, {"cc": "gcc"}),
    Part("oldest", 24),
    Part("foreign", 10, {"cc": "gcc"}, python="3.13"),
    Part("ray", 12, leaves_a_core=True),
    Part("recipes", 12),
    Part("operators", 100, {"cc": "gcc"}, by_name=True),
    Part("foreign-weekly", 40, {"cc": "gcc"}, by_name=True),
    Part("finetuning-weekly", 30, {"cc": "gcc"}, by_name=True),
    Part("public-weekly", 100, {"cc": "gcc"}, by_name=True),
    Part("weekly", 150, {"cc": "gcc"}, by_name=True),
    Part("oldest-weekly", 20, by_name=True),
    *(Part(f"tests-py{version.replace('.', '')}", 40, by_name=True, python=version) for version in ("3.12", "3.13", "3.14")),
    Part("emulated-oldest", 24, {"cc": "gcc"}, by_name=True),
    # What is released tomorrow must not turn a change red today.
    Part("newest", 24, by_name=True),
    Part("emulated-newest", 24, {"cc": "gcc"}, by_name=True),
)


class Ran(NamedTuple):
    """The outcome of a command."""

    status: int | None
    """The exit status; None if its time was over."""
    lines: tuple[str, ...]

    @property
    def reason(self) -> str:
        """The last line that tells of an error."""
        told = [line.strip() for line in self.lines if line.strip()]
        return next((line for line in reversed(told) if _ERROR.search(line)), told[-1] if told else "nothing was printed")


class Outcome(NamedTuple):
    """The outcome of a part."""

    name: str
    status: str
    minutes: float
    skipped: tuple[str, ...]
    """The things that did not run, each with its reason."""


INCOMPLETE: Final = "incomplete"
"""The status of a part that the time of the whole run was too short for."""

Runner = Callable[[Sequence[str], float], Ran]


def run(command: Sequence[str], minutes: float) -> Ran:
    """Run a command, show and keep its output, and end it with all of its processes when its time is over."""
    print("+", *command, flush=True)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    over = threading.Event()

    def end() -> None:
        over.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(minutes, 0) * 60, end)
    timer.start()
    lines = []
    try:
        with process.stdout:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line)
        status = process.wait()
    finally:
        timer.cancel()
    return Ran(None if over.is_set() else status, tuple(lines))


def missing_programs(part: Part, run: Runner, minutes: float) -> tuple[str, ...]:
    """Install Debian's packages that the part lacks, and say why if they cannot be installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = {program: package for program, package in part.programs.items() if not shutil.which(program, path=path)}
    if not lacking:
        return ()
    packages = sorted(set(lacking.values()))
    if not shutil.which("apt-get"):
        why = "there is no apt-get"
    elif os.geteuid() != 0:
        why = "apt-get needs root"
    else:
        # One by one: Slurm is no reason to do without a browser.
        run(("apt-get", "update", "-qq"), minutes)
        ran = [run(("apt-get", "install", "-qq", "-y", "--no-install-recommends", package), minutes) for package in packages]
        if all(each.status == 0 for each in ran):
            return ()
        packages = [package for package, each in zip(packages, ran, strict=True) if each.status != 0]
        why = next(each.reason for each in ran if each.status != 0)
    return (f"what needs {', '.join(packages)}: cannot be installed: {why}",)


def skipped_tests(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the number of tests that pytest skipped, by file and reason."""
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        if match := _SKIPPED.search(line):
            found[match["place"], match["reason"].strip()] += int(match[1])
    return tuple(f"{count} of {place}: {reason}" for (place, reason), count in sorted(found.items()))


class Prepared(NamedTuple):
    """What the installation of a part came to."""

    installed: Ran
    without: tuple[str, ...] = ()
    """The things that could not be installed, each with its reason."""
    interpreter: tuple[str, ...] = ()
    """The arguments of tox that name it, if it is not the one that tox takes by itself."""


def prepare(part: Part, tox: str, run: Runner, minutes_left: float) -> Prepared:
    """Install a part, with the interpreter that it is for and the programs that its tests look for."""
    minutes = min(INSTALL_MINUTES, minutes_left)
    interpreter: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    if part.python:
        try:
            interpreter = ("--discover", str(pythons.find(part.python, str(Path(tox).with_name("python")))))
        except pythons.NotFound as error:
            if not part.runs_elsewhere:
                return Prepared(Ran(1, (str(error),)))
            without = (f"Python {part.python}, for which this machine's own was taken: {error}",)
    without += missing_programs(part, run, minutes)
    return Prepared(run((tox, "run", "-e", part.name, "--notest", *interpreter), minutes), without, interpreter)


def outcome(part: Part, tox: str, run: Runner, minutes_left: float, prepared: Callable[[], Prepared]) -> Outcome:
    """Run a part in the time that is left for all. The quick one installs itself, and asks for no `prepared`."""
    started = time.monotonic()

    def ended(status: str, *skipped: str) -> Outcome:
        return Outcome(part.name, status, (time.monotonic() - started) / 60, skipped)

    if minutes_left < part.minutes / 3:
        return ended(INCOMPLETE, f"all of it: {minutes_left:.0f} of {ALL_MINUTES:.0f} minutes are left, too few")
    if part.name == QUICK:
        ran = run((tox, "run-parallel", "--parallel-live"), part.minutes)
        return ended(_status(ran), *skipped_tests(ran.lines))
    installed, without, interpreter = prepared()
    if installed.status != 0:
        why = "its installation took too long" if installed.status is None else installed.reason
        return ended("skipped", f"all of it: cannot be installed: {why}")
    left = minutes_left - (time.monotonic() - started) / 60
    ran = run((tox, "run", "-e", part.name, "--skip-pkg-install", *interpreter), min(part.minutes, left))
    # Several environments hold the CUDA build of torch, of 3 GB and more.
    remove_in_background(ROOT / ".tox" / part.name)
    if ran.status is None and left < part.minutes and not any(map(_FAILING.fullmatch, ran.lines)):
        # The machine was slow in the parts before, which is no fault of this one.
        return ended(INCOMPLETE, *without, f"the rest of it: the {ALL_MINUTES:.0f} minutes of the whole run were over")
    return ended(_status(ran), *without, *skipped_tests(ran.lines))


def grouped(parts: Sequence[Part]) -> Iterator[tuple[Part, ...]]:
    """Yield the parts one by one, and those that leave a core together with the next one, two of which run at a time."""
    group: tuple[Part, ...] = ()
    for part in parts:
        group += (part,)
        if not part.leaves_a_core:
            yield group
            group = ()
    if group:
        yield group


def remove_in_background(folder: Path) -> None:
    """Remove an environment while the next part runs: that takes minutes on a slow disk, and hardly any CPU.

    Its name is free at once. The end of the run does not wait, and the next run removes what is left.
    """
    if folder.is_dir():
        folder = folder.rename(Path(tempfile.mkdtemp(dir=folder.parent, prefix=_REMOVED)) / folder.name).parent
        threading.Thread(target=shutil.rmtree, args=(folder, True), daemon=True).start()


def _status(ran: Ran) -> str:
    return {0: "passed", None: "failed, as its time was over"}.get(ran.status, "failed")


def told(outcomes: Sequence[Outcome]) -> str:
    """The last lines of the run."""
    lines = ["", "what CI ran:"]
    for each in outcomes:
        lines.append(f"  {each.name}: {each.status} after {each.minutes:.1f} minutes")
        lines += [f"    skipped: {reason}" for reason in each.skipped]
    if cut := [each.name for each in outcomes if each.status == INCOMPLETE]:
        lines.append(f"{INCOMPLETE}: {ALL_MINUTES:.0f} minutes were too few for {', '.join(cut)}")
    return "\n".join(lines)


def exit_status(outcomes: Sequence[Outcome], environ: Mapping[str, str]) -> int:
    """Return 1 if something failed; on GitHub also if something was left out, since nobody reads the log of a green run."""
    failing = ("failed", INCOMPLETE) if environ.get("GITHUB_ACTIONS") else ("failed",)
    return int(any(each.status.startswith(failing) for each in outcomes))


def _job(part: Part) -> dict[str, str | float]:
    """Return what a job of GitHub has to know of a part; its own limit ends it before the job's would."""
    return {"part": part.name, "python": part.python or OWN_PYTHON, "minutes": part.minutes + 2 * INSTALL_MINUTES}


def main(arguments: Sequence[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)}; by default all but the weekly ones")
    parser.add_argument("--list", action="store_true", help="print the parts as JSON, and run none")
    parser.add_argument("--weekly", action="store_true", help="the weekly ones, where no part is named")
    given = parser.parse_args(arguments)
    wanted = given.parts or [part.name for part in PARTS if part.by_name is given.weekly]
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(names)}")
    due = [part for part in PARTS if part.name in wanted]
    if given.list:
        print(json.dumps([_job(part) for part in due]))
        return 0
    # What is named may take the time of each.
    ends = time.monotonic() + 60 * max(ALL_MINUTES, sum(INSTALL_MINUTES + part.minutes for part in due if part.by_name))

    def minutes_left() -> float:
        return (ends - time.monotonic()) / 60

    outcomes: list[Outcome] = []
    for removed in (ROOT / ".tox").glob(f"{_REMOVED}*"):
        remove_in_background(removed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as installer:
        python, tox = f"{folder}/bin/python", f"{folder}/bin/tox"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "tox"], check=True)
        prepared: dict[str, Future[Prepared]] = {}
        for together, following in itertools.pairwise([*grouped(due), ()]):
            # An installation waits for the network and the disk, so the next parts are installed beside the tests of these.
            for each in (*together, *following):
                if each.name != QUICK and each.name not in prepared:
                    prepared[each.name] = installer.submit(prepare, each, tox, run, minutes_left())

            def ran(part: Part) -> Outcome:
                # By a function: the quick part has none.
                return outcome(part, tox, run, minutes_left(), lambda: prepared[part.name].result())  # noqa: PLW0108

            with ThreadPoolExecutor(2) as tests:
                outcomes += tests.map(ran, together)
            if together[0].name == QUICK and outcomes[-1].status != "passed":
                break
        installer.shutdown(cancel_futures=True)
    print(told(outcomes), flush=True)
    return exit_status(outcomes, os.environ)


if __name__ == "__main__":
    sys.exit(main())
