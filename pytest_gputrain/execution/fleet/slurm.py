"""Submits and watches jobs of Slurm by its own commands: sbatch, squeue, scancel. Accounting (sacct) is not needed."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from pytest_gputrain.execution.fleet.scheduler import OUTPUT, SPARE_SECONDS, Doing, Job, JobRefused, QueueFull, Unreachable
from pytest_gputrain.execution.launch.environment import CHOOSING
from pytest_gputrain.records import Order
from pytest_gputrain.utils.linux import PARENT

_COMMAND_SECONDS: Final = 60.0

_MOST_IDS: Final = 500
"""The most ids in one command."""

_JOB: Final = '#!/bin/sh\nexec "$@"\n'

_QUEUE_FULL: Final = ("sleeping and retrying", "job submit limit", "queue full", "temporarily unable to accept")
"""Parts of what sbatch says where a job may be taken later."""

_NO_ANSWER: Final = ("contact slurm controller", "socket timed out", "unable to establish controller", "zero bytes were")

_ITS_TURN: Final = frozenset({"None", "Priority", "Resources"})
"""Reasons of a job that only waits for others."""

_OF_ALL_JOBS: Final = re.compile(r"Licenses|(?:QOS|Assoc)(?!.*Per(?:Job|Node))")
"""Reasons of a waiting job that concern a limit on what a user or an account runs at once, but not a limit on what one job
may request."""

_STATES: Final[Mapping[str, Doing]] = {
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "SIGNALING", "RESIZING"), "running"),
    **dict.fromkeys(("COMPLETED", "FAILED", "OUT_OF_MEMORY"), "ended"),
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), "node_died"),
    **dict.fromkeys(("CANCELLED", "TIMEOUT", "DEADLINE", "REVOKED"), "cancelled"),
    "PREEMPTED": "preempted",
}
"""The meaning of Slurm's states. Pending and similar states are missing: their reasons decide."""


class Slurm:
    """Runs orders as jobs of Slurm.

    Args:
        arguments: of sbatch, for this site: ``{gpus}``, ``{cpus}`` and ``{nodes}`` stand for what a case takes, the first
            two of each node.

    Raises:
        ValueError: Slurm's commands are not here, or the arguments make no sense.
    """

    name = "Slurm"
    ask_seconds = 4.0
    remedies: Mapping[Literal["held", "refused", "unreachable", "undelivered"], str] = {
        "held": "see `scontrol show partition`, and check the request in gpu_fleet_args",
        "refused": "check the request in gpu_fleet_args",
        "unreachable": "see `scontrol ping`",
        "undelivered": "all machines need the folder of gpu_shared, and the same Python environment, under the same path",
    }

    def __init__(self, arguments: Sequence[str]) -> None:
        lacking = [command for command in ("sbatch", "squeue", "scancel") if shutil.which(command) is None]
        if lacking:
            raise ValueError(
                f"--gpu-executor=slurm: {', '.join(lacking)} not found on PATH; start pytest on a machine that submits jobs"
            )
        self._arguments = tuple(arguments)
        for argument in arguments:
            try:
                argument.format(gpus=1, cpus=1, nodes=1)
            except (KeyError, IndexError, ValueError):
                raise ValueError(
                    f"gpu_fleet_args: {argument!r} has braces around something else than gpus, cpus or nodes"
                ) from None
        self._known: set[str] = set()
        dropped = (*CHOOSING, PARENT, "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")
        self._environment = {
            # If pytest itself runs in a job, sbatch would read that job's variables as options.
            name: value
            for name, value in os.environ.items()
            if name not in dropped and (not name.startswith(("SLURM_", "SBATCH_")) or name == "SLURM_CONF")
        }

    def submit(self, order: Order, folder: Path) -> str:
        script = folder.parent / "job.sh"
        if not script.exists():
            script.write_text(_JOB)
        name = f"gputrain-{folder.parent.name}"
        command = ["sbatch", "--parsable", "--no-requeue", f"--job-name={name}", f"--output={folder / OUTPUT}"]
        python = [sys.executable, "-P", "-m", "pytest_gputrain.execution.fleet.job"]
        command += [*self._requested(order), str(script), *python, str(folder)]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C must not end sbatch before it has printed the number of the job.
        ) as process:
            answer = self._answer(process, name)
        self._known.add(answer)
        return answer

    def _answer(self, process: subprocess.Popen[bytes], name: str) -> str:
        """Return the id of the job that sbatch submits. If the queue is full, sbatch would sleep for minutes, so it is
        ended."""
        began = time.monotonic()
        while True:
            try:
                said, complaint = (text.decode(errors="replace").strip() for text in process.communicate(timeout=0.5))
                break
            except subprocess.TimeoutExpired as still:
                said, complaint = "", (still.stderr or b"").decode(errors="replace").strip()
                if _has(complaint, _QUEUE_FULL) or time.monotonic() - began > _COMMAND_SECONDS:
                    process.kill()
                    process.wait()
                    break
        if process.returncode == 0:
            return said.partition(";")[0]
        if process.returncode < 0:
            for job in self._by_name(name) - self._known:  # These jobs were submitted just before sbatch was ended.
                return job
        words = " ".join(complaint.replace("sbatch: ", "").replace("error: ", "").split()) or f"sbatch: {process.returncode}"
        if _has(complaint, _QUEUE_FULL):
            raise QueueFull(words)
        if process.returncode < 0 or _has(complaint, _NO_ANSWER):
            raise Unreachable(words)
        raise JobRefused(f"Slurm refuses it: {words}")

    def _requested(self, order: Order) -> list[str]:
        """Return the options of sbatch for an order: the defaults, except for those that the site sets itself."""
        minutes = math.ceil((order.conditions.timeout_seconds + SPARE_SECONDS) / 60)
        site = " ".join(self._arguments)
        asked = [f"--nodes={order.task.nodes}", "--ntasks-per-node=1", f"--time={minutes}"]
        if order.gpus and "{gpus}" not in site:
            asked.append(f"--gpus-per-node={order.gpus}")
        if "{cpus}" not in site:
            asked.append(f"--cpus-per-task={order.cpus}")
        values = {"gpus": order.gpus, "cpus": order.cpus, "nodes": order.task.nodes}
        return [*asked, *(argument.format(**values) for argument in self._arguments)]

    def jobs(self, ids: Sequence[str]) -> Mapping[str, Job]:
        jobs: dict[str, Job] = {}
        for begin in range(0, len(ids), _MOST_IDS):
            chunk = ids[begin : begin + _MOST_IDS]
            jobs |= _read(self._squeue(f"--jobs={','.join(chunk)}"))
        return jobs

    def cancel(self, ids: Sequence[str]) -> None:
        for begin in range(0, len(ids), _MOST_IDS):
            with contextlib.suppress(Unreachable, OSError):
                self._run(["scancel", "--quiet", *ids[begin : begin + _MOST_IDS]])

    def close(self) -> None:
        """Do nothing, because there is no connection to close."""

    def _by_name(self, name: str) -> set[str]:
        try:
            return set(_read(self._squeue(f"--name={name}")))
        except Unreachable:
            return set()

    def _squeue(self, which: str) -> str:
        # squeue forgets a job some minutes after its end (MinJobAge) and then fails, which is no error here.
        command = ["squeue", "--noheader", "--states=all", "--format=%i|%T|%N|%r", which]
        done = self._run(command)
        if done.returncode and "Invalid job id" not in done.stderr:
            raise Unreachable(" ".join(done.stderr.replace("error: ", "").split()))
        return done.stdout

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm, and return what it printed."""
        try:
            return subprocess.run(
                command, env=self._environment, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unreachable(f"{command[0]} took more than {_COMMAND_SECONDS:g} s") from None


def _has(text: str, parts: Sequence[str]) -> bool:
    return any(part in text.lower() for part in parts)


def _read(lines: str) -> dict[str, Job]:
    """Return the jobs by id from what squeue printed."""
    jobs = {}
    for line in lines.splitlines():
        job, _, rest = line.partition("|")
        state, _, rest = rest.partition("|")
        nodes, _, reason = rest.partition("|")
        jobs[job] = _job(state, nodes, reason)
    return jobs


def _job(state: str, nodes: str, reason: str) -> Job:
    if state not in _STATES:
        return Job("waiting" if reason in _ITS_TURN or _OF_ALL_JOBS.match(reason) else "held", reason)
    why = state if reason in ("", "None") else f"{state}, {reason}"
    return Job(_STATES[state], "" if state == "COMPLETED" else why, nodes)
