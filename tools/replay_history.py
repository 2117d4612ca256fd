"""Replays commits of a public library on an emulated H100 or on a CPU, each judged against the one before.

It tells how often the gate would have failed, and why: a rule is worth what its failures are worth. Programs that train with
a library lie in ``tools/replay``. For example, with a clone of timm:

    python tools/replay_history.py ../pytorch-image-models --program tools/replay/timm_steps.py --folder timm --commits 50

Only commits are taken that change a Python file below the folder. Each is exported to a folder of its own, which is first on
``PYTHONPATH``. Whatever else the library imports has to be installed. The result is a table in Markdown, and a line of JSON
for each commit beside it. With ``--on-cpu`` the programs run on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_gputrain.gate.messages import REPLACED

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 900
"""The time limit of a commit."""


def git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True).stdout


def commits(repository: Path, head: str, folder: str, number: int) -> list[tuple[str, str, str]]:
    """Return hash, date and subject of the last commits that change Python files below the folder, the oldest first."""
    log = git(
        repository, "log", "--first-parent", "--format=%h\t%cs\t%s", f"-{number}", head, "--", f":(glob){folder}/**/*.py"
    )
    rows = (line.split("\t", 2) for line in log.splitlines())
    return [(commit, date, subject) for commit, date, subject in rows][::-1]


def export(repository: Path, commit: str, folder: str, target: Path) -> None:
    """Write the folder as it was at the commit below ``target``."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    archive = subprocess.Popen(["git", "-C", str(repository), "archive", commit, folder], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(target)], stdin=archive.stdout, check=True)
    if archive.wait():
        raise SystemExit(f"git cannot export {folder} of {commit} from {repository}")


def run(scratch: Path, source: Path, device: list[str], arguments: list[str]) -> list[dict[str, Any]]:
    """Run the programs with the library in ``source``, record their figures, and return their results.

    Args:
        device: options that name it.
    """
    report = scratch / "report.json"
    report.unlink(missing_ok=True)
    path = os.pathsep.join([str(source), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTHONDONTWRITEBYTECODE")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", f"--gpu-json={report}"]
    options = [*device, "--gpu-baseline-update"]
    log = scratch / "log.txt"
    with log.open("w") as output, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*command, *options, *arguments],
            cwd=scratch,
            env=environ | {"PYTHONPATH": path},
            stdout=output,
            stderr=output,
            timeout=SECONDS,
            check=False,
        )
    return json.loads(report.read_bytes())["results"] if report.exists() else []


def changes(results: list[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield case, status and sentence of each result that is no pass."""
    for result in results:
        verdict = result["verdict"]
        status = verdict.get("before") or verdict["status"]
        if status not in ("pass", "new"):
            sentence = verdict["sentence"].partition(REPLACED)[2] or verdict["sentence"]
            yield result["nodeid"].partition("::")[2], status, sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="a clone of the library")
    parser.add_argument("--program", type=Path, required=True, help="file of tests that train with the library")
    parser.add_argument("--folder", required=True, help="the library's package in the repository, or a folder of packages")
    parser.add_argument("--head", default="HEAD", help="the last commit")
    parser.add_argument("--commits", type=int, default=50, help="number of commits that are judged")
    parser.add_argument("--output", type=Path, help="file of the table (default: <program>.md here)")
    parser.add_argument("--on-cpu", action="store_true", help="run on the CPU instead of an emulated H100")
    parser.add_argument("--reports", type=Path, help="folder for the whole report of each commit (default: none is kept)")
    arguments, others = parser.parse_known_args()
    device = ["--gpu-platform=cpu"] if arguments.on_cpu else ["--gpu-emulate", "--gpu-platform=h100"]
    output = arguments.output or Path(f"{arguments.program.stem}.md")
    history = commits(arguments.repository, arguments.head, arguments.folder, arguments.commits + 1)
    with tempfile.TemporaryDirectory(prefix="replay-") as made, output.with_suffix(".jsonl").open("w") as lines:
        scratch = Path(made)
        (scratch / "pytest.ini").write_text("[pytest]\n")
        shutil.copy(arguments.program, scratch / f"test_{arguments.program.name}")
        table = ["| commit | date | subject | verdict |", "| --- | --- | --- | --- |"]
        for place, (commit, date, subject) in enumerate(history):
            export(arguments.repository, commit, arguments.folder, scratch / "source")
            code = scratch / "source" / arguments.folder
            results = run(scratch, code.parent if (code / "__init__.py").exists() else code, device, others)
            found = list(changes(results)) if results else [("", "not run", (scratch / "log.txt").read_text()[-300:])]
            if results and arguments.reports:
                arguments.reports.mkdir(parents=True, exist_ok=True)
                shutil.copy(scratch / "report.json", arguments.reports / f"{commit}.json")
            lines.write(json.dumps({"commit": commit, "date": date, "subject": subject, "changes": found}) + "\n")
            lines.flush()
            if place:  # nothing is known of what came before the first one
                told = "<br>".join(f"{case}: **{status}**, {sentence}" for case, status, sentence in found) or "pass"
                table.append(f"| {commit} | {date} | {subject} | {told} |".replace("\n", " "))
            print(f"{place}/{arguments.commits} {commit} {[status for _, status, _ in found]}", flush=True)
    output.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
