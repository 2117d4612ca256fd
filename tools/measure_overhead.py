"""Measures the cost of the plugin against the project's limits; exits with 1 if one is exceeded.

    python tools/measure_overhead.py [--suite]

Every figure is the median of a ratio or a difference between runs that alternate, so that the machine's mood cancels out.
``--suite`` also runs the whole CPU suite, which takes a few minutes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CASES: Final = 10_000

PLAIN = f"""
import pytest
CASES = [f"llama-3.1-8b-full-bf16-batch_size={{size}}" for size in range({CASES})]
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it(case):
    pass
"""

DECLARED = f"""
import pytest
from pytest_gputrain import Case, grid
BASE = Case(sequence_length=8192, platforms=("h100", "a100", "rtx_pro_6000", "h200"))
CASES = grid(BASE, model=["llama-3.1-8b"], method=["full"], batch_size=range(1, {CASES} + 1))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it(gputrain, case):
    gputrain.check(case)
"""

# Steps of the length of a tiny case's. Bare and measured passes alternate in one process; both return seconds per step.
LOOP = """
import statistics, time, sys
from pathlib import Path
import torch
from pytest_gputrain.worker.device import Cpu
from pytest_gputrain.worker.loop import timed
from pytest_gputrain.worker.progress import Progress

device = Cpu()
left, right = torch.randn(700, 700), torch.randn(700, 700)
progress = Progress(Path(sys.argv[1]))
progress.enter("measure")

def step(update):
    for _ in range(2):
        left @ right

def bare(count):
    start = time.perf_counter()
    for _ in range(count):
        step(False)
    return time.perf_counter() - start

def measured(count):
    start = time.perf_counter()
    timed(step, [False] * count, device.synchronize, lambda index, seconds: progress.stepped(index, seconds, None))
    return time.perf_counter() - start

bare(50)
pairs = [(measured(10), bare(10)) if index % 2 else (bare(10), measured(10))[::-1] for index in range(120)]
print(statistics.median(one / other for one, other in pairs), bare(50) / 50)
"""


def cpu_seconds(command: list[str], cwd: Path) -> float:
    """Return the user and system time of ``command``: pytest only computes here, and waiting for a busy neighbour is not its
    cost."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def alternated(first: list[str], second: list[str], cwd: Path, rounds: int) -> list[tuple[float, float]]:
    pairs = [(cpu_seconds(first, cwd), cpu_seconds(second, cwd)) for _ in range(rounds + 1)]
    return pairs[1:]  # the first round warms the disk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", action="store_true", help="also time the whole CPU suite")
    arguments = parser.parse_args()
    broken = 0

    def tell(what: str, value: float, limit: float, shown: str) -> None:
        nonlocal broken
        broken += value >= limit
        print(f"{'ok  ' if value < limit else 'FAIL'} {what}: {shown}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_plain.py").write_text(PLAIN)
        (folder / "test_declared.py").write_text(DECLARED)
        (folder / "test_one.py").write_text("def test_it(): pass\n")
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]

        pairs = alternated([*pytest, "test_one.py"], [*pytest, "-p", "no:gputrain", "test_one.py"], folder, 15)
        added = statistics.median(first - second for first, second in pairs)
        tell("added to the start of pytest", added, 0.1, f"{1000 * added:.0f} ms (limit 100 ms)")

        collect = [*pytest, "--collect-only"]
        pairs = alternated([*collect, "test_declared.py"], [*collect, "test_plain.py"], folder, 5)
        ratio = statistics.median(first / second for first, second in pairs)
        tell(f"collecting {CASES:,} cases", ratio, 1.5, f"{ratio:.2f} x a plain parametrize (limit 1.5 x)")

        command = [sys.executable, "-c", LOOP, str(folder / "progress.jsonl")]
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
        ratio, step = map(float, output.split())
        shown = f"{100 * (ratio - 1):+.2f} % on steps of {1000 * step:.1f} ms (limit 1 %)"
        tell("added by the timed loop", ratio, 1.01, shown)

        if arguments.suite:
            start = time.perf_counter()
            suite = [*pytest, "benchmarks", f"--gpu-baseline-dir={folder / 'none'}"]
            subprocess.run(suite, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=900)
            taken = time.perf_counter() - start
            tell("the whole suite on the CPU, one process", taken, 300, f"{taken:.0f} s (limit 300 s)")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
