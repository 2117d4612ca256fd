"""Counts the verdicts of the time gate on this machine, for steps that are slower by a known share.

    python tools/measure_gate_here.py [--minutes N] [--cases N] [--seed N]

Small training steps on the CPU are recorded as a suite's own code, five fresh processes each, and gated with
``gpu_judge_cpu_time``: as they are, and slowed down by 5, 10 and 20 %. A step that is slowed down repeats its work until
so much more time has gone by. What of the unchanged steps is called regressed is a false alarm; of the others, what is not.

Repetitions alternate between the machine as it is and one with noisy neighbours: a process for each core that computes and
sleeps by turns of random length, during the recording, too. Each repetition has a baseline of its own. After ``--minutes``
the table is printed; on Ctrl-C, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

SLOWED: Final = (0.0, 0.05, 0.1, 0.2)
VERDICTS: Final = ("pass", "inconclusive", "improved", "regressed")
CALM, NOISY = "idle", "noisy neighbours"

SUITE: Final = """
import os
import time

import pytest

SLOWER = float(os.environ.get("GATE_SLOWER", "0"))
SIZES = {sizes}


def build(setup):
    import torch

    size = setup.case.batch_size
    model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, size))
    batch = torch.randn(64, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train():
        for _ in range(20):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def step():
        begin = time.perf_counter()
        loss = train()
        until = time.perf_counter() + SLOWER * (time.perf_counter() - begin)
        while time.perf_counter() < until:
            pass
        return loss

    return step


@pytest.mark.parametrize("size", SIZES)
def test_gate(gputrain, size):
    gputrain.check(build, precision="fp32", batch_size=size, steps=20, warmup=5)
"""

NEIGHBOUR: Final = """
import os, random, time
numbers = random.Random({seed})
parent = os.getppid()
while os.getppid() == parent:  # whoever kills that needs to look for no neighbours
    until = time.monotonic() + numbers.uniform(0.2, 4)
    while time.monotonic() < until:
        sum(range(10000))
    time.sleep(numbers.uniform(0.2, 4))
"""

Counts = dict[tuple[str, float], Counter[str]]
"""Verdicts by the machine's state and the share by which steps were slowed down."""


@contextlib.contextmanager
def running(programs: Iterable[str]) -> Iterator[list[int]]:
    """Run programs of Python beside this one, and end them by their ids."""
    children = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        yield [child.pid for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def neighbours(count: int, seed: int) -> contextlib.AbstractContextManager[list[int]]:
    """Have processes beside this one that compute now and then."""
    return running(NEIGHBOUR.format(seed=seed + number) for number in range(count))


def gate(folder: Path, slower: float, *arguments: str) -> list[str]:
    """Return the verdicts of all cases of one pytest run.

    Raises:
        RuntimeError: pytest gave no report.
    """
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--gpu-platform=cpu",
            "-o",
            "gpu_judge_cpu_time=true",
            f"--gpu-json={report}",
            *arguments,
        ],
        cwd=folder,
        env={**os.environ, "GATE_SLOWER": str(slower), "CI": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if not report.exists():
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return [result["verdict"]["status"] for result in json.loads(report.read_text())["results"]]


def table(counts: Counts) -> str:
    """Return Markdown: a row for each state and share."""
    header = ["machine", "slowed by", "verdicts", *VERDICTS, "other"]
    rows = [header, ["---"] * len(header)]
    for (state, slower), verdicts in counts.items():
        total = verdicts.total()
        shares = [f"{verdicts[verdict]} ({verdicts[verdict] / total:.0%})" if total else "" for verdict in VERDICTS]
        other = total - sum(verdicts[verdict] for verdict in VERDICTS)
        rows.append([state, f"{slower:.0%}", str(total), *shares, str(other)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measure(counts: Counts, deadline: float, cases: int, seed: int) -> None:
    """Fill ``counts`` until ``deadline`` (monotonic seconds); a verdict counts when its pytest has ended."""
    sizes = [96 + 32 * number for number in range(cases)]
    repetition = 0
    while time.monotonic() < deadline:
        state = (CALM, NOISY)[repetition % 2]
        with (
            tempfile.TemporaryDirectory(prefix="gate-here-") as folder,
            neighbours(os.cpu_count() or 1 if state == NOISY else 0, seed + 1000 * repetition),
        ):
            path = Path(folder)
            (path / "test_gate.py").write_text(SUITE.format(sizes=sizes))
            (path / "pytest.ini").write_text("[pytest]\n")
            recorded = gate(path, 0.0, "--gpu-baseline-update")
            if set(recorded) != {"recorded"}:
                raise RuntimeError(f"recording gave {recorded}")
            for slower in SLOWED:
                if time.monotonic() < deadline:
                    counts[state, slower].update(gate(path, slower))
                    print(f"repetition {repetition + 1}, {state}, slowed by {slower:.0%}", file=sys.stderr, flush=True)
        repetition += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="default: 30; a repetition takes some minutes")
    parser.add_argument("--cases", type=int, default=4, help="default: 4; from ten on the suite guard plays a part")
    parser.add_argument("--seed", type=int, default=None, help="of the neighbours (default: a fresh one)")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    counts: Counts = {(state, slower): Counter() for state in (CALM, NOISY) for slower in SLOWED}
    begin = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        measure(counts, begin + 60 * options.minutes, options.cases, seed)
    minutes = (time.monotonic() - begin) / 60
    print(f"{options.cases} cases on {os.cpu_count()} cores, {platform.platform()}, seed {seed}, {minutes:.0f} minutes\n")
    print(table(counts))


if __name__ == "__main__":
    main()
