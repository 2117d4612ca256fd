"""Wall time and memory of predictions from cold, one case a command, against the limits that the project sets itself.

    python tools/time_prediction.py [--runs N] [--only TEXT]

A command is what a user types for one case: pytest starts, a worker imports its libraries, the prediction is judged, and
nothing is remembered from an earlier run. The first run of each case does not count: it writes bytecode and warms the disk.
Leave the machine alone meanwhile. Exits with 1 where a limit is broken.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from pytest_gputrain.utils.units import GiB, format_bytes

ROOT: Final = Path(__file__).resolve().parent.parent
PYTEST: Final = [sys.executable, "-m", "pytest", "-m", "h100", "--gpu-predict", "-q", "-p", "no:cacheprovider"]
LIMIT: Final = 10.0
"""Seconds, of a language model on one GPU."""
OTHER_LIMITS: Final = {
    "test_llm_finetuning[llama-3.1-70b-lora-bf16-fsdp]": 25.0,
    "test_diffusion[flux.1-dev-lora-bf16]": 25.0,
}
MEMORY_LIMIT: Final = 1 * GiB
"""The memory limit of the largest process."""


def limit_of(test: str) -> float | None:
    is_of_one_gpu = test.startswith("test_llm_finetuning[") and "-fsdp" not in test
    return LIMIT if is_of_one_gpu else OTHER_LIMITS.get(test)


def tests() -> list[str]:
    """Return the node ids of the tests with a limit."""
    command = [*PYTEST, "--collect-only", "benchmarks/test_llm_finetuning.py", "benchmarks/test_diffusion.py"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=100).stdout
    return [line for line in listing.splitlines() if "::" in line and limit_of(line.split("::")[1]) is not None]


def timed(nodeid: str) -> tuple[float, int]:
    """Return the seconds and bytes of a command that predicts one case."""
    start = time.perf_counter()
    process = subprocess.Popen([*PYTEST, nodeid], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{nodeid} failed; see {' '.join(PYTEST[2:])} '{nodeid}'")
    return seconds, usage.ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="of each case that count (3)")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs: {arguments.runs} is not a number of runs from 1 on")
    node_ids = tests()
    chosen = [nodeid for nodeid in node_ids if arguments.only in nodeid]
    if not chosen:
        parser.error(f"--only: no case with a limit has {arguments.only!r} in its name; known: {', '.join(node_ids)}")
    broken = 0
    for nodeid in chosen:
        name = nodeid.split("::")[1]
        limit = limit_of(name)
        assert limit is not None, "tests() leaves out the others"
        runs = [timed(nodeid) for _ in range(arguments.runs + 1)][1:]
        seconds = statistics.median(seconds for seconds, _ in runs)
        held = max(held for _, held in runs)
        good = seconds <= limit and held <= MEMORY_LIMIT
        broken += not good
        shown = f"{seconds:.1f} s (least {min(runs)[0]:.1f}, limit {limit:.0f}), {format_bytes(held)}"
        print(f"{'ok  ' if good else 'FAIL'} {name}: {shown}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
