"""Lists every option once: its flag, its name in the ini file, its default, its help, and how its text is parsed.

What is chosen for a run has a flag on the command line, and a name in the ini file beside. What a project or a site sets
once is `ini_only`; pytest's own option ``-o gpu_nodes=2`` changes it for one run.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_gputrain.utils.bounds import LEAST_STEPS, MAX_RUNS, MOST_RUNS
from pytest_gputrain.utils.units import parse_ratio, parse_seconds

_LONGEST_NAME: Final = 255
"""The most bytes that a file's name may have on common file systems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option: ``--gpu-name``, unless it is `ini_only`, and ``gpu_name`` in the ini file."""

    name: str
    help: str
    parse: Callable[[str], Any] = str
    default: str = ""
    """The default as one would type it; empty for none."""
    metavar: str | None = None
    switch: bool = False
    """Whether it is on or off: ``--gpu-name`` and ``--no-gpu-name``, of which the last counts."""
    repeated: bool = False
    """Whether it may be given several times; in the ini file each value is on its own line."""
    ini_only: bool = False
    """Whether the command line has no flag for it."""

    @property
    def flag(self) -> str:
        return f"--gpu-{self.name}"

    @property
    def ini(self) -> str:
        return "gpu_" + self.name.replace("-", "_")


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return parse


def _whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
        if number < least or (most is not None and number > most):
            raise ValueError(f"{text!r} is not a whole number from {least} {'on' if most is None else f'to {most}'}")
        return number

    return parse


def _switch(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ValueError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def _strict(text: str) -> bool | None:
    if text.lower() == "auto":
        return None
    try:
        return _switch(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither true, false nor auto") from None


def _endpoint(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+(:[0-9]{1,5})?", text):
        raise ValueError(f"{text!r} is not a host, or a host and a port, as node1 or node1:29400")
    return text


def _path(text: str) -> Path:
    longest = max(len(os.fsencode(part)) for part in ("", *text.split("/")))
    if "\0" in text or longest > _LONGEST_NAME:
        raise ValueError(
            f"{text[:40]!r}{'...' if len(text) > 40 else ''} is not a path: a name in it is too long, or has a zero byte"
        )
    return Path(text)


def _memory_tolerance(text: str) -> object:
    from pytest_gputrain.records.tolerance import parse_memory_tolerance  # a project without cases needs no records

    return parse_memory_tolerance(text)


def _count_tolerances(text: str) -> object:
    from pytest_gputrain.records.tolerance import parse_count_tolerances  # as above

    return parse_count_tolerances(text)


def _axes(text: str) -> object:
    from pytest_gputrain.cases.sweep import parse_axes  # as above
    from pytest_gputrain.hardware.catalog import MARKERS

    return parse_axes(text, MARKERS)


def _baseline(text: str) -> str:
    return text if text in ("measured", "published") else str(_path(text))


def _site_arguments(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the catalog marker of each line, empty for all platforms, and its arguments."""
    arguments = []
    for line in filter(None, map(str.strip, text.splitlines())):
        platform, colon, rest = line.partition(":")
        if platform.startswith("-") or "=" in platform:
            platform, rest = "", line
        elif not colon:
            raise ValueError(f"{line!r} is neither arguments nor a platform with some, as 'h100: --partition=gpu'")
        try:
            arguments.append((platform.strip(), tuple(shlex.split(rest))))
        except ValueError as error:
            raise ValueError(f"{line!r} cannot be split into arguments: {error}") from None
    return tuple(arguments)


def _summary(text: str) -> Path | str:
    return text if text in ("auto", "none") else _path(text)


def _ids(text: str) -> tuple[str, ...]:
    ids = tuple(part.strip() for part in text.split(",") if part.strip())
    if not ids or len(set(ids)) != len(ids):
        raise ValueError(f"{text!r} is not a list of GPU indices or UUIDs, each once, separated by commas")
    return ids


OPTIONS: Final = (
    Option(
        name="baseline-update",
        switch=True,
        parse=_switch,
        help=("store the figures of this run as the baselines, replacing all runs of a case"),
    ),
    Option(
        name="baseline-new",
        switch=True,
        parse=_switch,
        help=("store the figures of cases that have no baseline yet"),
    ),
    Option(
        name="baseline-prune",
        switch=True,
        parse=_switch,
        help=(
            "remove the baselines of this device that no test asks for any more, in files whose tests all ran to their end"
        ),
    ),
    Option(
        name="baseline-dir",
        parse=_path,
        default="baselines",
        metavar="DIR",
        help=("the folder of the baselines (default: baselines beside the ini file)"),
    ),
    Option(
        name="baseline",
        parse=_baseline,
        default="measured",
        metavar="measured|published|REPORT",
        help=(
            "what to compare with: the baselines of this device (measured), the tables that others published, or the "
            "report of an earlier --gpu-json (default: measured)"
        ),
    ),
    Option(
        name="time-tolerance",
        parse=parse_ratio,
        default="3%",
        metavar="RATIO",
        help=("by how much the median step may be slower, and scaling efficiency worse (default: 3%)"),
    ),
    Option(
        name="host-time-tolerance",
        ini_only=True,
        parse=parse_ratio,
        default="50%",
        metavar="RATIO",
        help=(
            "by how much the median step may be slower on another machine than that of the baseline, if the GPU waits for "
            "the host in more than 5 % of it; a slower one is not compared, and the run says so (default: 50%)"
        ),
    ),
    Option(
        name="memory-tolerance",
        parse=_memory_tolerance,
        default="2%",
        metavar="RATIO|BYTES|RATIO+BYTES",
        help=(
            "by how much peak allocated memory may grow, as 2%, 512MiB or 2%+512MiB; on a GPU, 64 MiB are added "
            "(default: 2%)"
        ),
    ),
    Option(
        name="counts",
        ini_only=True,
        parse=_one_of("judge", "tell", "off"),
        default="judge",
        metavar="judge|tell|off",
        help=(
            "what to do about what each step asks of an emulated GPU or a CPU, such as launches and reads: fail the case "
            "where it asks for more than recorded (judge), only tell of it (tell), or count nothing (off) (default: judge)"
        ),
    ),
    Option(
        name="count-tolerance",
        ini_only=True,
        parse=_count_tolerances,
        metavar="COUNT=RATIO|NUMBER|RATIO+NUMBER, ...",
        help=(
            "how much more of a count passes than the rules allow, as launches=5 %, waits=1; each count that is named is "
            "judged by this alone"
        ),
    ),
    Option(
        name="judge-cpu-time",
        ini_only=True,
        switch=True,
        parse=_switch,
        help=(
            "also judge time on a CPU, against a baseline of at least five runs of the same host; an update then "
            "records five"
        ),
    ),
    Option(
        name="runs",
        parse=_whole(1, MAX_RUNS),
        metavar="K",
        help=("fresh processes per case (default: 1, or 5 if a baseline is recorded on a GPU)"),
    ),
    Option(
        name="reruns",
        ini_only=True,
        parse=_whole(0, MAX_RUNS - 1),
        default=str(MOST_RUNS - 1),
        metavar="N",
        help=(
            "how often a case that looks slower, faster, bigger or out of memory is measured again at most, in fresh "
            "processes, until they agree; 0 judges by the first process alone, against a wider limit "
            f"(default: {MOST_RUNS - 1})"
        ),
    ),
    Option(
        name="strict",
        switch=True,
        parse=_strict,
        default="auto",
        help=(
            "fail cases that are new, inconclusive or not comparable (default: if CI is set, except for published tables)"
        ),
    ),
    Option(name="steps", parse=_whole(1), metavar="N", help=("timed steps of every case (default: each case's own number)")),
    Option(
        name="warmup", parse=_whole(0), metavar="N", help=("steps before the timed ones (default: each case's own number)")
    ),
    Option(
        name="timeout",
        parse=parse_seconds,
        default="30min",
        metavar="TIME",
        help=("end a process that takes longer than this, as 90s, 15min or 2h (default: 30min)"),
    ),
    Option(
        name="scale",
        parse=_one_of("auto", "full", "tiny"),
        default="auto",
        metavar="auto|full|tiny",
        help=("the size of the models: full, tiny, or auto, which is full on a GPU and tiny on a CPU (default: auto)"),
    ),
    Option(
        name="platform",
        metavar="MARKER",
        help=(
            "the GPU that this machine must have (h100, a100, ...), or that is emulated; a GPU whose name is not "
            "known is accepted as this one; cpu uses no GPU"
        ),
    ),
    Option(
        name="processes",
        ini_only=True,
        parse=_whole(1),
        default="2",
        metavar="N",
        help=(
            "the most processes of a case on a CPU, and the most parameter servers; a case of more GPUs runs with that "
            "many, and 1 skips cases of several GPUs (default: 2)"
        ),
    ),
    Option(name="ids", parse=_ids, metavar="ID,ID", help=("the GPUs to use, by index or UUID (default: all visible ones)")),
    Option(
        name="foreign",
        ini_only=True,
        parse=_one_of("error", "warn", "ignore"),
        default="warn",
        metavar="error|warn|ignore",
        help=(
            "what to do if other processes use the GPUs of a case: fail the case without measuring it (error), measure "
            "it, but neither call it slower nor record it (warn), or ignore them (default: warn)"
        ),
    ),
    Option(
        name="isolation",
        parse=_one_of("auto", "process", "inline"),
        default="auto",
        metavar="auto|process|inline",
        help=(
            "where cases run: each in a fresh interpreter (process), or in the pytest process for a debugger (inline); "
            "auto is process, except that cases on a CPU or an emulated GPU are forked from a process that has only "
            "imported the libraries of the models, or torch for own code (default: auto)"
        ),
    ),
    Option(
        name="nodes",
        ini_only=True,
        parse=_whole(1),
        default="1",
        metavar="N",
        help=("the most nodes of a case (default: 1)"),
    ),
    Option(
        name="shared",
        ini_only=True,
        parse=_path,
        default=".gputrain",
        metavar="DIR",
        help=("the folder that all nodes share, for cases of several nodes (default: .gputrain beside the ini file)"),
    ),
    Option(
        name="rendezvous",
        ini_only=True,
        parse=_endpoint,
        metavar="HOST[:PORT]",
        help=("the address of this node for the other nodes, outside of Slurm (default: its name, and any free port)"),
    ),
    Option(
        name="executor",
        parse=_one_of("local", "slurm", "ray"),
        default="local",
        metavar="local|slurm|ray",
        help=(
            "where cases run: on this machine (local), or each as a job of a scheduler, on machines of the platform "
            "that -m or --gpu-platform names (default: local)"
        ),
    ),
    Option(
        name="fleet-args",
        ini_only=True,
        parse=_site_arguments,
        metavar="[PLATFORM:] ARGUMENTS",
        help=(
            "further arguments for the scheduler, one line for each platform, as 'h100: --partition=gpu', or for Ray "
            "'h100: h100={gpus}'; a line without a platform applies to all"
        ),
    ),
    Option(
        name="fleet-gpus",
        ini_only=True,
        parse=_whole(1),
        default="8",
        metavar="N",
        help=("GPUs of each node of the fleet (default: 8)"),
    ),
    Option(
        name="fleet-jobs",
        ini_only=True,
        parse=_whole(1),
        default="256",
        metavar="N",
        help=("the most jobs in the scheduler's queue at once (default: 256)"),
    ),
    Option(
        name="fleet-wait",
        ini_only=True,
        parse=parse_seconds,
        default="1h",
        metavar="TIME",
        help=(
            "give up a case as lost if it does not start for this time, while no other job starts or ends either "
            "(default: 1h)"
        ),
    ),
    Option(
        name="summary",
        parse=_summary,
        default="auto",
        metavar="FILE|auto|none",
        help=(
            "write the verdicts to this file as Markdown; auto writes them to the file of GITHUB_STEP_SUMMARY, if that "
            "is set (default: auto)"
        ),
    ),
    Option(
        name="json",
        parse=_path,
        metavar="FILE",
        help=("write environment, cases, measurements and verdicts to this JSON file"),
    ),
    Option(
        name="resume",
        parse=_path,
        metavar="REPORT",
        help=("take the figures from an earlier --gpu-json of the same code, and measure only what it lacks"),
    ),
    Option(
        name="history",
        parse=_path,
        metavar="FILE",
        help=("append one JSON line for every case to this file, which keeps all runs"),
    ),
    Option(
        name="html",
        parse=_path,
        metavar="FILE",
        help=("write verdicts, figures and charts to this HTML file, with the trends of --gpu-history"),
    ),
    Option(
        name="set",
        parse=_axes,
        repeated=True,
        metavar="KNOB=A,B",
        help=("run every case with each of these values for one of its knobs; several options run all combinations"),
    ),
    Option(
        name="emulate",
        switch=True,
        parse=_switch,
        help=(
            "run every case at full size on an emulated GPU of the platform that -m or --gpu-platform names, and compare "
            "its memory, and what its steps ask of the GPU, with recorded emulated runs"
        ),
    ),
    Option(
        name="find-batch",
        switch=True,
        parse=_switch,
        help=("find the largest micro-batch of every case that fits, and the fastest one, instead of judging the case"),
    ),
    Option(
        name="find-batch-max",
        ini_only=True,
        parse=_whole(1),
        default="1024",
        metavar="N",
        help=("the largest micro-batch that --gpu-find-batch tries (default: 1024)"),
    ),
    Option(
        name="loss",
        parse=_whole(LEAST_STEPS),
        metavar="STEPS",
        help=(
            "train every case for that many steps in each precision and compare the loss curves, instead of judging the case"
        ),
    ),
)


WITHOUT_PREDICT: Final = (
    "--gpu-predict (gpu_predict in the ini file) was removed: --gpu-emulate runs every case on an emulated GPU, and "
    "gputrain predict tells whether a model fits a GPU"
)
"""The sentence that refuses this option of earlier versions."""


def ini_only_sentence(flag: str, value: str | None) -> str:
    """Return the sentence that refuses the flag of an option that is `ini_only`, with what has to be written instead.

    Args:
        value: as it was typed; None or empty where there was none.
    """
    option = next(option for option in OPTIONS if option.flag == flag)
    value = "true" if option.switch else value or option.metavar
    override = shlex.quote(f"{option.ini}={value}")
    return f"{flag} is set in the ini file: {option.ini} = {value}, or -o {override} for one run"
