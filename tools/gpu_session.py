"""Everything that a borrowed GPU can tell, in calls of limited time: each goes on where the last one ended.

    python tools/gpu_session.py DIR [-m MARKER] [--minutes N] [-k TEXT] [--runs N]
    python tools/gpu_session.py DIR --table
    python tools/gpu_session.py DIR --plan time [-m MARKER] [--minutes N] [--dry | --table]

A call takes the next of these steps while there is time for it: the drivers' replies (``driver.json``), the tests of
tests/gpu, then every case that is declared for the marker, those first that took least memory of an emulated GPU, each
recorded as a baseline in DIR/baselines with its report in DIR/reports, and in the end the levers of a tuned case, one upon
the other from the published case on. Cases of more GPUs than there are skip. What is done is in DIR/done.jsonl: a step that
fails is done, too, and told. DIR is all there is to carry home; copy its baselines over those of the repository.

``--table`` prints the measured figures of DIR/reports as Markdown, allocated / reserved memory beside the error of
an emulated GPU; the published figures are printed by ``gputrain export REPORT --published``.

``--plan time`` takes other steps, by which tools/gpu_time_plan.py finds out whether GPU seconds can be judged. They need
torch alone and less than 8 minutes. ``--dry`` runs them on an emulated GPU, where seconds mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import gpu_time_plan

from pytest_gputrain.records import EmulatedRun, Measurement
from pytest_gputrain.records.result import Emulated, Measured
from pytest_gputrain.storage.emulated import EmulationStore
from pytest_gputrain.storage.reports import read_report
from pytest_gputrain.utils.markdown import table
from pytest_gputrain.utils.units import GiB, format_seconds

ROOT: Final = Path(__file__).resolve().parent.parent
PYTEST: Final = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q")
LEAST_SECONDS: Final = 60.0
"""Left of a call, for a step to be begun whose like has not been timed."""
TIMED_OUT: Final = 124
LEVERED: Final = "llama-3.1-8b-full-bf16"
"""The case of both suites, published and tuned, whose levers are told apart."""
LEVERS: Final = ("optimizer=adamw-fused", "loss_chunks=16", "activation_checkpointing=0.8125")
"""Each upon those before it: recomputing less takes the memory that the others leave. With the next, ``compile``, the case
is the tuned one."""


class Step(NamedTuple):
    name: str
    command: tuple[str, ...]
    status: int = 0
    """The exit status that it has if all is well."""


class Done(NamedTuple):
    """A line of the log."""

    name: str
    status: int
    seconds: float


class Asked(NamedTuple):
    folder: Path
    marker: str
    text: str
    runs: int
    plan: str = "cases"
    dry: bool = False


def steps(asked: Asked) -> Iterator[Step]:
    """Return all steps, in their order."""
    if asked.plan == "time":
        yield from (Step(*step) for step in gpu_time_plan.steps(asked.folder, asked.marker, dry=asked.dry))
        return
    yield Step(
        "driver",
        (sys.executable, "-m", "pytest_gputrain.cli.main", "doctor", "--record", str(asked.folder / "driver.json")),
    )
    yield Step("tests", (*PYTEST, "tests/gpu", f"--junitxml={asked.folder / 'tests.xml'}"))
    for node in ordered(collected(asked), asked.marker):
        yield Step(f"{node} on {asked.marker}", measuring(asked, node))
    for count in range(1, len(LEVERS) + 1):
        levers = LEVERS[:count]
        yield Step(f"{' '.join(levers)} on {asked.marker}", with_levers(asked, levers))


def with_levers(asked: Asked, levers: Sequence[str]) -> tuple[str, ...]:
    """The published case with knobs of its tuned form; swept it has another name, so it is selected by a part of that."""
    case = measuring(asked, "benchmarks/test_llm_finetuning.py", name=f"{LEVERED}-{'-'.join(levers)}")
    return (*case, *(word for lever in levers for word in ("--gpu-set", lever)), "-k", f"{LEVERED} and not less_than")


def measuring(asked: Asked, node: str, name: str = "") -> tuple[str, ...]:
    """A case recorded, with its report."""
    suite = Path(node.partition("::")[0]).stem.removeprefix("test_")
    report = asked.folder / "reports" / f"{suite}-{name or case_of(node)}.json"
    return (
        *PYTEST,
        node,
        "-m",
        asked.marker,
        f"--gpu-platform={asked.marker}",
        "--gpu-baseline-update",
        f"--gpu-runs={asked.runs}",
        f"--gpu-baseline-dir={asked.folder / 'baselines'}",
        f"--gpu-json={report}",
        f"--gpu-history={asked.folder / 'history.jsonl'}",
    )


def case_of(node: str) -> str:
    return node.partition("[")[2].rstrip("]")


@functools.cache
def collected(asked: Asked) -> list[str]:
    """Return the tests of the suites' own cases that the marker and the text select, but for those that compare several."""
    select = ["-k", asked.text] if asked.text else []
    command = [*PYTEST, "benchmarks", "--collect-only", "-m", asked.marker, *select]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):  # 5: nothing is selected
        raise SystemExit(f"the suites cannot be collected:\n{done.stdout}{done.stderr}")
    nodes = [line for line in done.stdout.splitlines() if line.startswith("benchmarks/") and line.endswith("]")]
    suites = {node: Path(node.partition("::")[0]).stem for node in nodes}
    return [node for node in nodes if f"::{suites[node]}[" in node]


def ordered(nodes: Sequence[str], marker: str) -> list[str]:
    """Sort cases by their known memory, so that the first call has figures of many."""
    store = EmulationStore(ROOT / "baselines")
    known_bytes = {}
    for node in nodes:
        suite = Path(node.partition("::")[0]).stem.removeprefix("test_")
        run = emulated(store, marker, suite, case_of(node))
        known_bytes[node] = run.peak_allocated_bytes if run else sys.maxsize
    return sorted(nodes, key=known_bytes.__getitem__)


def emulated(store: EmulationStore, platform: str, suite: str, key: str) -> EmulatedRun | None:
    """Return the recorded run for the platform, or for an H100, whose kernels take the same memory as those of similar
    GPUs."""
    entry = (store.suite(platform, suite) or store.suite("h100", suite)).get(key)
    return entry.figures[-1] if entry else None


def left_over(todo: Iterator[Step], done: Sequence[Done], seconds_left: float) -> Step | None:
    """The next step that is not done and that may end in time; None where there is none."""
    names = {finished.name for finished in done}
    slowest = max((finished.seconds for finished in done if finished.name not in ("driver", "tests")), default=0.0)
    if seconds_left < max(LEAST_SECONDS, slowest):
        return None
    return next((step for step in todo if step.name not in names), None)


def log_of(folder: Path) -> list[Done]:
    path = folder / "done.jsonl"
    return [Done(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def work(asked: Asked, seconds: float) -> int:
    """Run as many parts as there is time for; return 1 if one of them failed."""
    end = time.monotonic() + seconds
    failed = False
    while True:
        seconds_left = end - time.monotonic()
        step = left_over(steps(asked), log_of(asked.folder), seconds_left)
        if step is None:
            break
        begin = time.monotonic()
        print(f"{step.name} ...", flush=True)
        (asked.folder / "reports").mkdir(exist_ok=True)
        with open(asked.folder / "output.txt", "ab") as output:
            output.write(f"\n$ {' '.join(step.command)}\n".encode())
            output.flush()
            try:
                status = subprocess.run(
                    step.command, cwd=ROOT, stdout=output, stderr=output, timeout=seconds_left, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                if seconds_left < seconds - 1:  # of less than a whole call
                    print(f"{step.name} was cut off, and is tried again by the next call")
                    break
                status = TIMED_OUT
        took = time.monotonic() - begin
        with open(asked.folder / "done.jsonl", "a") as log:
            log.write(json.dumps(Done(step.name, status, took)._asdict()) + "\n")
        print(
            f"{step.name}: {'done' if status == step.status else f'exit status {status}, see output.txt'} in {took:.0f} s",
            flush=True,
        )
        failed = failed or status != step.status
    names = {finished.name for finished in log_of(asked.folder)}
    left_names = [step.name for step in steps(asked) if step.name not in names]
    print(f"{len(names)} steps done, {len(left_names)} left{': call again' if left_names else ''}")
    return int(failed)


def rows(folder: Path) -> list[tuple[str, ...]]:
    """A row for each measured case of the reports, with the error of a run on an emulated GPU, which a report of the
    folder has or else the repository."""
    reports = [read_report(path) for path in sorted((folder / "reports").glob("*.json"))]
    results = [result for report in reports for result in report.results]
    ran = {(result.suite, result.key): result.figures for result in results if isinstance(result, Emulated)}
    store = EmulationStore(ROOT / "baselines")
    table_rows = []
    for result in sorted((result for result in results if isinstance(result, Measured)), key=_allocated):
        run = ran.get((result.suite, result.key)) or emulated(store, result.platform, result.suite, result.key)
        table_rows.append(_row(result, run))
    return table_rows


def _allocated(result: Measured) -> int:
    return result.summary.peak_allocated_bytes if result.summary else 0


def _row(result: Measured, run: EmulatedRun | None) -> tuple[str, ...]:
    measured = [reply for reply in result.replies if isinstance(reply, Measurement)]
    summary = result.summary
    if not measured or summary is None:
        return (result.key, result.verdict.sentence if result.verdict else "no figures", *[""] * (len(HEADERS) - 2))
    reserved = measured[-1].peak_reserved_bytes or 0
    allocated = summary.peak_allocated_bytes
    return (
        result.key,
        format_seconds(summary.median_step_seconds),
        _share(summary.gpu_utilization),
        _share(summary.model_flops_utilization),
        f"{summary.joules_per_step:.0f} J" if summary.joules_per_step is not None else "",
        f"{allocated / GiB:.2f} / {reserved / GiB:.2f}",
        f"{_error(run.peak_allocated_bytes, allocated)} / {_error(run.peak_reserved_bytes, reserved)}" if run else "",
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _error(figure: int | None, measured: int) -> str:
    if not figure or not measured:
        return "?"
    return "equal" if abs(figure - measured) < EQUAL_BYTES else f"{100 * (figure / measured - 1):+.2f} %"


EQUAL_BYTES: Final = 512
"""Less than a block of torch's allocator."""
HEADERS: Final = (
    "case",
    "time per step",
    "GPU busy",
    "MFU",
    "energy per step",
    "measured, GiB",
    "emulation is off by",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="of all that comes out; the same for every call")
    parser.add_argument("-m", dest="marker", default="h200", help="platform (default: h200)")
    parser.add_argument("--minutes", type=float, default=8.5, help="of this call (default: 8.5)")
    parser.add_argument("-k", dest="text", default="", help="only cases that pytest's -k selects by this")
    parser.add_argument("--runs", type=int, default=1, help="fresh processes of each case (default: 1)")
    parser.add_argument("--table", action="store_true", help="print what there is, and measure nothing")
    parser.add_argument("--plan", choices=("cases", "time"), default="cases", help="what to measure (default: cases)")
    parser.add_argument("--dry", action="store_true", help="run the plan of time on an emulated GPU")
    given: Any = parser.parse_args(arguments)
    folder = given.folder.absolute()
    if given.dry and given.plan != "time":
        parser.error("--dry is for --plan time; pytest --gpu-emulate runs the cases on an emulated GPU")
    if given.table and given.plan == "time":
        return gpu_time_plan.report(folder)
    if given.table:
        print("\n".join(table(HEADERS, rows(folder))))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    return work(Asked(folder, given.marker, given.text, given.runs, given.plan, given.dry), 60 * given.minutes)


if __name__ == "__main__":
    sys.exit(main())
