"""Measures thousands of cases and millions of lines of history on this machine; exits with 1 if a limit is exceeded.

    python tools/load_here.py [--cases 10000] [--steps 50] [--workers 2]
    python tools/load_here.py --history-lines 10000000

The first runs pytest on a tenth, on three tenths and on all of the cases, each time to record their baselines, to judge
them against these, and to judge them under pytest-xdist, with report, history and summary. No case trains: where a worker
would be started, its reply of so many steps is put into its folder (``tools/load_plugin.py``); all else is as in any run.
The second writes a history of lines that have the keys which ``gputrain trend`` reads, and reads a tenth and all of it.

Times are those of the processor, which a busy neighbour does not change; peaks are of the resident set. An exponent of 1
says that twice the cases take twice the time, one of 2 four times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
MOST_BYTES: Final = 500 << 20
"""The memory limit of the process that gathers the results, and of ``gputrain trend``."""
MOST_CLOSING_SECONDS: Final = 60.0
"""The time limit of report, baselines, history, summary and table of ten thousand cases."""
MOST_EXPONENT: Final = 1.3

SUITE: Final = """
import pytest
from pytest_gputrain import Case, grid

BASE = Case(sequence_length=512, steps={steps})
CASES = grid(BASE, model=["llama-3.1-8b"], method=["full"], batch_size=range(1, {cases} + 1))

@pytest.mark.parametrize("case", CASES, ids=str)
def test_load(gputrain, case):
    gputrain.check(case)
"""
OPTIONS: Final = (
    "--gpu-platform=cpu",
    "--gpu-isolation=process",
    "--gpu-json=report.json",
    "--gpu-history=history.jsonl",
    "--gpu-summary=summary.md",
)
MODES: Final = {"record": ["--gpu-baseline-update"], "judge": []}


def run(folder: Path, cases: int, steps: int, options: list[str]) -> dict[str, float]:
    """Return the time and memory of the gathering process of a pytest run."""
    (folder / "test_load.py").write_text(SUITE.format(cases=cases, steps=steps))
    (folder / "tox.ini").write_text("[pytest]\n")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "GITHUB_STEP_SUMMARY")}
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "load_plugin", "-p", "no:cacheprovider", *OPTIONS, *options]
    done = subprocess.run(
        pytest, cwd=folder, env=environment | {"PYTHONPATH": paths}, check=False, capture_output=True, text=True
    )
    if done.returncode or f"{cases} passed" not in done.stdout:
        raise SystemExit(f"pytest failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    figures: dict[str, float] = json.loads((folder / "load-parent.json").read_text())
    return figures


def closing(figures: dict[str, float]) -> float:
    return figures["finish_cpu_seconds"] + figures["table_cpu_seconds"]


def peak(figures: dict[str, float]) -> float:
    return max(value for name, value in figures.items() if name.endswith("_peak_bytes"))


class Table:
    """Lines on the screen, and whether a limit was broken."""

    def __init__(self) -> None:
        self.broken = 0

    def tell(self, what: str, shown: str, kept: bool) -> None:
        self.broken += not kept
        print(f"{'ok  ' if kept else 'FAIL'} {what}: {shown}", flush=True)


def load(table: Table, folder: Path, cases: int, steps: int, workers: int) -> None:
    """Measure runs of growing size."""
    counts = [max(1, cases // 10), max(1, 3 * cases // 10), cases]
    modes = MODES | ({f"judge, {workers} workers": ["-n", str(workers)]} if workers else {})
    figures: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for count in counts:
        run_folder = folder / str(count)
        run_folder.mkdir()
        for mode, options in modes.items():
            figures[mode].append(run(run_folder, count, steps, options))
            last = figures[mode][-1]
            each = f"{1000 * last['run_cpu_seconds'] / count:.1f} ms a case, {closing(last):.1f} s to close"
            kept = peak(last) < MOST_BYTES and closing(last) < MOST_CLOSING_SECONDS * max(1, count / 10_000)
            table.tell(f"{count:,} cases, {mode}", f"{each}, peak {peak(last) / 2**20:.0f} MiB", kept)
        sizes = {
            path.name: path.stat().st_size >> 20 for path in run_folder.rglob("*.json*") if path.name != "load-parent.json"
        }
        print("     " + ", ".join(f"{name} {size:,} MiB" for name, size in sorted(sizes.items()) if size))
    for mode, runs in figures.items():
        for what, taken in (
            ("run", [run_figures["run_cpu_seconds"] for run_figures in runs]),
            ("close", list(map(closing, runs))),
        ):
            power = math.log(taken[-1] / taken[0]) / math.log(counts[-1] / counts[0])
            table.tell(f"exponent of {what}, {mode}", f"{power:.2f}", power < MOST_EXPONENT)


def lines(count: int, cases: int) -> Iterator[str]:
    """A history: runs of all cases, one run after the other; a tenth of the cases become 5 % slower half-way."""
    noise = random.Random(1)
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    for number in range(count):
        at, case = divmod(number, cases)
        slower = 1.05 if case % 10 == 0 and 2 * at > count // cases else 1.0
        line = {
            "format": 2,
            "date": (begin + datetime.timedelta(hours=at)).isoformat(),
            "session": f"{at:08x}",
            "commit": f"{at:07x}",
            "branch": "main",
            "suite": "load",
            "key": f"llama-3.1-8b-full-bf16-batch_size={case}",
            "device": "nvidia-h100-80gb-hbm3",
            "median_step_seconds": slower * noise.gauss(1.0, 0.01),
            "peak_allocated_bytes": 20_000_000_000 + 1000 * case,
        }
        yield json.dumps(line, separators=(",", ":")) + "\n"


def history(table: Table, folder: Path, count: int) -> None:
    """Measure ``gputrain trend`` on histories of growing length."""
    cases = max(1, min(10_000, count // 100))
    path = folder / "history.jsonl"
    taken: list[tuple[int, float]] = []
    for length in (count // 10, count):
        with path.open("w") as file:
            file.writelines(lines(length, max(1, cases * length // count)))
        size = path.stat().st_size
        command = [
            sys.executable,
            "-m",
            "pytest_gputrain.cli.main",
            "trend",
            str(path),
            "--format",
            "json",
            "--fail-on",
            "never",
        ]
        with (folder / "trends.json").open("w") as out:
            process = subprocess.Popen(command, stdout=out, env={**os.environ, "PYTHONPATH": str(ROOT)})
            _, status, usage = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status):
            raise SystemExit("gputrain trend failed")
        trends: list[dict[str, Any]] = json.loads((folder / "trends.json").read_text())["courses"]
        changed = {course["key"] for course in trends if course["changes"]}
        seconds, most = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
        taken.append((most, seconds))
        shown = f"{size >> 20:,} MiB, {seconds:.0f} s of one core, peak {most >> 20} MiB, {len(changed):,} cases changed"
        table.tell(f"{length:,} lines of {size / length:.0f} bytes", shown, most < MOST_BYTES)
    path.unlink()
    a_line = (taken[1][0] - taken[0][0]) / (count - count // 10)
    print(f"     {a_line:.0f} bytes of memory for each further line")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="of the largest run (default: 10000)")
    parser.add_argument("--steps", type=int, default=50, help="of each case (default: 50)")
    parser.add_argument("--workers", type=int, default=2, help="of pytest-xdist; 0 leaves it out (default: 2)")
    parser.add_argument("--history-lines", type=int, metavar="N", help="read a history of so many lines instead")
    given = parser.parse_args(arguments)
    table = Table()
    with tempfile.TemporaryDirectory(prefix="gputrain-load-") as name:
        if given.history_lines:
            history(table, Path(name), given.history_lines)
        else:
            load(table, Path(name), given.cases, given.steps, given.workers)
    return int(table.broken > 0)


if __name__ == "__main__":
    sys.exit(main())
