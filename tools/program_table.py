"""Tells which changes of seventeen programs fail a run: measures what is missing, and writes the table of docs/programs.md.

    python tools/program_table.py cpu
    python tools/program_table.py emulated
    python tools/program_table.py write

Each program of ``tests/programs`` is recorded, run three times without a change, and run with the changes that
``tests/programs/planted.py`` makes. Those whose sentences tell them apart are made together. The results are in
``tests/programs/results.json``. What is there is not run again: remove what has to be. ``emulated`` needs a CUDA build of
torch and a C compiler, so the kinds may run in different environments. Beside pytest-gputrain[suite] the programs need the
packages of ``tests/emulated/foreign/requirements.txt`` and x-transformers; those that lack one are left out by name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = ROOT / "tests" / "programs"
RESULTS: Final = SOURCE / "results.json"
PAGE: Final = ROOT / "docs" / "programs.md"
KINDS: Final = {"cpu": ["--gpu-platform=cpu"], "emulated": ["--gpu-platform=h100", "--gpu-emulate"]}
FEW: Final = ["--gpu-steps=4", "--gpu-warmup=2"]
MANY: Final = ["--gpu-steps=24", "--gpu-warmup=1"]
REPEATS: Final = 3
LONGEST: Final = "15min"
"""The time limit of a program, which a busy machine needs where it compiles. What takes longer is not told."""
SECONDS: Final = 3600
"""The time limit of a run of pytest in seconds, which has a report then, too."""
AT_ONCE: Final = 4
"""The programs of a run of pytest, whose results are saved when it ends."""
PACKAGES: Final = {
    "contrastive": "sentence_transformers",
    "ppo": "stable_baselines3",
    "graphs": "torch_geometric",
    "words": "x_transformers",
    "metric": "pytorch_metric_learning",
    "grpo": "trl",
    "dpo": "trl",
    "trainer": "transformers",
    "sharded": "transformers",
    "experts": "transformers",
    "whisper": "transformers",
    "scaler": "accelerate",
    "diffusion": "diffusers",
}
"""The package that a program needs beside torch."""
OTHERS: Final = ("detection", "segmentation", "conformer", "yolo")
COMPILED: Final = ("conformer", "yolo")

Results = dict[str, dict[str, Any]]
CHANGES: Final = {
    "memory": ("a tensor is held", r"more memory|more in \w+"),
    "leak": ("a tensor is kept in each step", r"more of tensors after every|in optimizer at planted\.py:"),
    "wait": ("`.item()` in a layer", r"(waits for the GPU|reads values)[^;]*planted\.py:\d+ in \S*after_forward"),
    "foreach": ("`foreach=False`", r"_single_tensor_"),
    "compile": ("recompilation", r"compiles \d+ function"),
    "evaluation": ("evaluation keeps outputs", r"(in|behind its) evaluation"),
    "late": ("grows from step 20", r"planted\.py:|more memory|in step \d+"),
}
"""The heading of each change, and what the sentence of a failure must say of it."""
RUNS: Final = [
    ("few", FEW, ["memory", "wait", "foreach", "compile"]),
    ("few", FEW, ["leak"]),
    ("few", FEW, ["clean 1"]),
    ("few", FEW, ["clean 2"]),
    ("few", FEW, ["clean 3"]),
    ("few", FEW, ["evaluation"]),
    ("many", MANY, ["late"]),
]
"""The baseline of each run, its options, and what is changed in it."""


def cannot(kind: str, program: str, change: str) -> str:
    """Return why a run of this kind cannot see the change of a program, if it cannot."""
    if change == "compile" and program not in COMPILED:
        return "compiles nothing"
    if change == "foreach" and kind == "cpu":
        return "is the default on a CPU"
    if change == "late" and (kind, program) == ("cpu", "sharded"):
        return "is not compared, because a CPU follows the steps of one process"
    return ""


def installed() -> list[str]:
    """Return the programs that can run here, and print what the others lack."""
    missing = {program: package for program, package in PACKAGES.items() if not importlib.util.find_spec(package)}
    for program, package in missing.items():
        print(f"{program} is left out: it needs the package {package}")
    return [program for program in (*PACKAGES, *OTHERS) if program not in missing]


class Runs:
    """Runs of pytest in a folder of their own, which keeps the baselines."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder / kind
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in SOURCE.glob("*.py"):
            shutil.copy(file, self.folder / ("test_programs.py" if file.name == "programs.py" else file.name))
        (self.folder / "pytest.ini").write_text("[pytest]\n")

    def run(self, programs: Iterable[str], baselines: str, planted: str, sizes: Mapping[str, int], *options: str) -> Results:
        """Run the tests of programs, and return their results in the report by program.

        Args:
            baselines: the folder of the baselines.
            planted: the changes, joined by ``+``.
            sizes: the bytes that a change holds or keeps, by program.
        """
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        names = [f"test_programs.py::test_program[{program}]" for program in programs]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        environ = {name: value for name, value in os.environ.items() if name != "CI"}
        environ |= {"PYTHONPATH": path, "PLANTED": planted, "PLANTED_BYTES": json.dumps(sizes), "HF_HUB_OFFLINE": "1"}
        # A run that is ended by a signal still writes its report.
        command = ["timeout", str(SECONDS), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."]
        command += [*KINDS[self.kind], f"--gpu-json={report}", f"--gpu-baseline-dir={baselines}", f"--gpu-timeout={LONGEST}"]
        with (self.folder / f"{planted or 'clean'}.log").open("a") as log:
            subprocess.run([*command, *options, *names], cwd=self.folder, env=environ, stdout=log, stderr=log, check=False)
        found = json.loads(report.read_bytes())["results"] if report.exists() else []
        return {json.loads(result["case"]["args"])["name"]: result for result in found}

    def sizes(self, programs: Iterable[str], baselines: str, *options: str) -> dict[str, int]:
        """Record the programs that have no baseline yet, and return by program the bytes that a change holds or keeps.

        They are 5 % of the peak, or 15 % where a CPU's limit is 10 %, because several processes train.
        """
        file = self.folder / f"{baselines}.json"
        sizes = json.loads(file.read_bytes()) if file.exists() else {}
        lacking = [program for program in programs if program not in sizes]
        recorded = self.run(lacking, baselines, "", {}, "--gpu-baseline-update", *options) if lacking else {}
        for program, result in recorded.items():
            if result["verdict"]["status"] != "recorded":
                print(f"{program} is not recorded: {result['verdict']['sentence']}")
                continue
            share = 0.15 if (self.kind, program) == ("cpu", "sharded") else 0.05
            figures = result["reply"] if self.kind == "emulated" else result["replies"][0]
            sizes[program] = int(share * figures["peak_allocated_bytes"])
        file.write_text(json.dumps(sizes))
        return sizes


def measure(kind: str, programs: list[str], only: list[str], folder: Path, file: Path, deadline: float) -> None:
    """Run what the results lack of these programs, and save after each run.

    Args:
        folder: has the baselines.
        file: has the results.
        deadline: no run starts after it, in seconds of the monotonic clock.
    """
    runs = Runs(kind, folder)
    for baselines, options, together in RUNS:
        changes = [change for change in together if change.split()[0] in only]
        done = read(file).get(kind, {})
        wanted = [
            program
            for program in programs
            if any(not cannot(kind, program, change) and change not in done.get(program, {}) for change in changes)
        ]
        if not wanted:
            continue
        if time.monotonic() > deadline:
            print("the time is over; the same command goes on")
            return
        sizes = runs.sizes(wanted, baselines, *options)
        planted = "+".join(change for change in changes if change in CHANGES)
        judged = [program for program in wanted if program in sizes]
        for program, result in runs.run(judged, baselines, planted, sizes, "--gpu-strict", *options).items():
            status, sentence = result["verdict"]["status"], result["verdict"]["sentence"]
            caught = {change: clause_of(change, sentence) for change in changes if change in CHANGES}
            if "--gpu-timeout allows more" in sentence or (status == "failed" and planted and not any(caught.values())):
                print(f"{program} did not run with {planted or changes[0]}: {sentence}")
                continue
            if not planted:
                done.setdefault(program, {})[changes[0]] = status if status == "pass" else f"{status}: {sentence}"
                continue
            for change in changes:
                if not cannot(kind, program, change):
                    done.setdefault(program, {})[change] = caught[change] if status in ("regressed", "failed") else ""
        file.write_text(json.dumps(read(file) | {kind: done}, indent=1, sort_keys=True) + "\n")


def clause_of(change: str, sentence: str) -> str:
    """Return the clause of a failure that names the change, as far as 160 characters hold it; nothing if there is none."""
    found = re.search(CHANGES[change][1], sentence)
    return sentence[found.start() :][:160] if found else ""


def read(file: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return by kind, program and change the clause of the failure, or nothing where the run passed."""
    results: dict[str, dict[str, dict[str, str]]] = json.loads(file.read_bytes()) if file.exists() else {}
    return results


def faults(kind: str, programs: list[str], done: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield each change that passes or was not run, and each run that does not pass without a change."""
    for program in programs:
        ran = done.get(program, {})
        yield from (
            f"{program} {'passes' if change in ran else 'was not run'} with {change}"
            for change in CHANGES
            if not ran.get(change) and not cannot(kind, program, change)
        )
        for repeat in range(1, REPEATS + 1):
            if (status := ran.get(f"clean {repeat}", "was not run")) != "pass":
                yield f"{program} without a change: {status}"


def cell(kind: str, change: str, done: dict[str, dict[str, str]]) -> str:
    """Return how many programs fail with a change, of those in which a run of this kind can see it, and name the others."""
    seen = [program for program in sorted((*PACKAGES, *OTHERS)) if not cannot(kind, program, change)]
    passing = [program for program in seen if done.get(program, {}).get(change) == ""]
    missing = [program for program in seen if change not in done.get(program, {})]
    counted = f"{len(seen) - len(passing) - len(missing)} of {len(seen)}" if seen else "cannot"
    others = {"**pass**": passing, "not run": missing}
    return "; ".join([counted, *(f"{what}: {', '.join(names)}" for what, names in others.items() if names)])


def unchanged(done: dict[str, dict[str, str]]) -> str:
    """Return how many runs pass without a change."""
    repeats = [status for ran in done.values() for change, status in ran.items() if change.startswith("clean")]
    return f"{repeats.count('pass')} of {len(repeats)} pass"


def table(results: dict[str, dict[str, dict[str, str]]]) -> str:
    """Return the table of all changes, with a column for each kind of run."""
    kinds = {kind: results.get(kind, {}) for kind in KINDS}
    rows = [
        ["change", "fail on a CPU", "fail on an emulated H100"],
        ["---"] * (1 + len(kinds)),
        *([heading, *(cell(kind, name, done) for kind, done in kinds.items())] for name, (heading, _) in CHANGES.items()),
        ["none", *map(unchanged, kinds.values())],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(text: str) -> str:
    """Return the text of the page with the table of the results."""
    return with_part(text, "results", table(read(RESULTS)))


def with_part(text: str, name: str, part: str) -> str:
    """Return the text of a page with ``part`` between its comments ``begin name`` and ``end name``."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{part}\n\n{end}{rest.partition(end)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*KINDS, "write"])
    parser.add_argument("--programs", help="the programs, joined by commas (default: all whose packages are installed)")
    parser.add_argument(
        "--changes", default=",".join(["clean", *CHANGES]), help="the changes, joined by commas (default: all)"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of the baselines and results, in place of build and the committed file"
    )
    parser.add_argument("--minutes", type=float, default=600, help="start no run after this time")
    arguments = parser.parse_args()
    if arguments.what == "write":
        PAGE.write_text(page(PAGE.read_text()))
        return
    programs = installed()
    if arguments.programs:
        programs = [program for program in programs if program in arguments.programs.split(",")]
    deadline = time.monotonic() + 60 * arguments.minutes
    folder = (arguments.folder or ROOT / "build" / "programs").resolve()
    file = folder / "results.json" if arguments.folder else RESULTS
    for first in range(0, len(programs), AT_ONCE):
        measure(arguments.what, programs[first : first + AT_ONCE], arguments.changes.split(","), folder, file, deadline)
    found = list(faults(arguments.what, programs, read(file).get(arguments.what, {})))
    print("\n".join(found))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
