"""Every reader of the package with sound samples of what it reads, and what is done with what it accepts."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.cli import main
from pytest_gputrain.execution.launch import ranks
from pytest_gputrain.execution.settings import OPTIONS
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.regression import judge
from pytest_gputrain.gate.summary import detail_of, failure_of, summarise
from pytest_gputrain.hardware import drivers
from pytest_gputrain.hardware.devices import HardwareError
from pytest_gputrain.hardware.machine import Machine
from pytest_gputrain.hardware.recording import replayed
from pytest_gputrain.plugin import settings
from pytest_gputrain.records import (
    Baseline,
    Case,
    Emulated,
    EmulatedRun,
    Event,
    Measured,
    Report,
    Result,
    Served,
    Task,
    Verdict,
)
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance
from pytest_gputrain.report import explanations, progress_line, studies, summary, terminal
from pytest_gputrain.report.history_lines import lines_of
from pytest_gputrain.report.html import page
from pytest_gputrain.report.trend.reading import Filter, History
from pytest_gputrain.report.trend.series import analyse
from pytest_gputrain.storage import published
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore
from pytest_gputrain.storage.emulated import EmulationStore
from pytest_gputrain.storage.history import HistoryError, append
from pytest_gputrain.storage.reports import ReportStore, read_report, to_baseline
from pytest_gputrain.storage.result_cache import ResultCache
from pytest_gputrain.utils.git import RunInfo
from pytest_gputrain.utils.reading import UNREADABLE

ROOT: Final = Path(__file__).resolve().parent.parent
REPLIES: Final = ROOT / "tests" / "plugin" / "replies"
RECORDINGS: Final = ROOT / "tests" / "unit" / "recordings"

CASE: Final = Case(model="llama-3.1-8b", method="lora", batch_size=2, sequence_length=8192)
MACHINE: Final = Machine(platform="cpu", gpus=())
TOLERANCE: Final = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02), cpu_time=True)
SESSION: Final = RunInfo(id="s1", created="2026-02-01T00:00:00Z", commit="c0ffee", branch="main")
METRICS: Final = ("median_step_seconds", "peak_allocated_bytes")


@dataclass
class Scratch:
    """A folder for the files of one input after the other."""

    folder: Path

    def file(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path


Read = Callable[[bytes, Scratch, random.Random], object]


@dataclass(frozen=True)
class Reader:
    """Something that takes data in."""

    name: str
    read: Read
    """Reads, and uses what it has read."""
    samples: Sequence[bytes]
    documented: tuple[type[Exception], ...] = ()
    weight: int = 1
    is_json: bool = True


@functools.cache
def reply(name: str) -> Any:
    return msgspec.json.decode((REPLIES / f"{name}.json").read_bytes(), type=ranks.Reply)


def sound_result(name: str = "cpu_measured", **fields: Any) -> Result:
    replies = (reply(name),)
    defaults: dict[str, Any] = {
        "nodeid": "test_llm.py::test_it",
        "suite": "llm",
        "key": f"{CASE}@tiny",
        "case": CASE,
        "scale": "tiny",
        "platform": "cpu",
        "device": "cpu",
        "replies": replies,
        "summary": summarise(CASE, MACHINE, replies),
        "verdict": Verdict(status="pass", sentence=f"{CASE} is within its limits"),
    }
    return Measured(**defaults | fields)


def sound_emulated(run: EmulatedRun, **fields: Any) -> Result:
    defaults: dict[str, Any] = {
        "nodeid": "test_llm.py::test_it",
        "suite": "llm",
        "key": str(CASE),
        "case": CASE,
        "scale": "full",
        "platform": "h100",
        "device": "emulated/h100",
    }
    return Emulated(reply=run, **defaults | fields)


def sound_report() -> bytes:
    """Return a report with measured, failed and emulated cases."""
    emulated = msgspec.json.decode((REPLIES / "h100_emulated.json").read_bytes(), type=EmulatedRun)
    results = (
        sound_result(),
        sound_result("h100_measured", key=str(CASE), scale="full", platform="h100", device="nvidia-h100-80gb-hbm3"),
        *(sound_result(name, key=name, verdict=None) for name in ("crashed", "timed_out", "h100_out_of_memory")),
        sound_emulated(emulated),
    )
    tolerances = {"time_tolerance": 0.03, "memory_tolerance": {"ratio": 0.02, "bytes": 0}, "judge_cpu_time": False}
    report = Report(generator="x", created=SESSION.created, session="s1", settings=tolerances, results=results)
    return msgspec.json.encode(report)


def sound_baseline() -> bytes:
    baseline = to_baseline(sound_result(), date=SESSION.created, session="s1", commit="c0ffee")
    with tempfile.TemporaryDirectory() as folder:
        return BaselineStore(Path(folder)).update("cpu", "llm", {f"{CASE}@tiny": baseline}).read_bytes()


def sound_history() -> bytes:
    (line,) = lines_of([sound_result()], SESSION)
    days = [msgspec.structs.replace(line, date=f"2026-02-{day:02}T00:00:00Z") for day in range(1, 13)]
    return b"".join(msgspec.json.encode(day) + b"\n" for day in days)


def a_few(path: Path, field: str, count: int = 1) -> bytes:
    """A file of the repository with only some of its entries."""
    document = json.loads(path.read_bytes())
    entries = document[field]
    document[field] = entries[:count] if isinstance(entries, list) else dict(list(entries.items())[:count])
    return json.dumps(document, indent=1).encode()


def _held_to(case: Case, baseline: Baseline) -> Criteria:
    return Criteria(case=case, scale="full", tolerance=TOLERANCE, baseline=baseline)


def read_baseline(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    scratch.file("cpu/llm.json", data)
    store = BaselineStore(scratch.folder)
    for baseline in store.suite("cpu", "llm").values():
        for name in ("cpu_measured", "h100_measured", "h100_out_of_memory"):
            for case in (CASE, baseline.case):
                judge(_held_to(case, baseline), [reply(name)])
    store.rewritten("cpu", "llm")


def read_emulated(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    scratch.file("emulated/h100/llm_finetuning.json", data)
    store = EmulationStore(scratch.folder)
    for key, entry in store.suite("h100", "llm_finetuning").items():
        results = [sound_emulated(run, key=key) for run in entry.figures]
        show(results)


def read_published(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    published.load(scratch.file("amd-diffusion.json", data)).published()


def read_a_report(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    path = scratch.file("report.json", data)
    report = read_report(path)
    ReportStore(path)
    kind = rng.random()
    if kind < 0.03 and not page.missing():
        text = page.page([report], baseline_dir=ROOT / "baselines")
        assert "<script>alert" not in text, "a value is part of the page's markup"
    elif kind < 0.3:
        show(report.results)
    else:
        command(scratch, rng.choice(_COMMANDS))


def read_history(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    path = scratch.file("history.jsonl", data)
    if rng.random() < 0.1:
        append(path, lines_of([sound_result()], SESSION))
    list(analyse(History([path], METRICS, Filter(), ignore), METRICS))


def read_reply(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    scratch.file("reply.json", data)
    exit_code = rng.choice((0, 0, 0, 0, 1, -9, -99))
    parsed = ranks._read_reply(scratch.folder, exit_code, Event(phase="measure"), False, "output")
    if isinstance(parsed, Served | EmulatedRun):
        return
    verdict = judge(_held_to(CASE, sound()), [parsed]).verdict
    result = sound_result(replies=(parsed,), summary=summarise(CASE, MACHINE, (parsed,)), verdict=verdict)
    failure_of(result), detail_of(result)
    if rng.random() < 0.1:
        show([result])
        lines_of([result], SESSION)


@functools.cache
def sound() -> Any:
    return to_baseline(sound_result(), date=SESSION.created, session="s1", commit="c0ffee")


def read_progress(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    path = scratch.file("progress.jsonl", b"")
    progress = ranks._ProgressFile(path)
    for part in (data[: len(data) // 2], data[len(data) // 2 :]):
        with path.open("ab") as file:
            file.write(part)
        for event in progress.read():
            progress_line.describe(CASE, event, 2)


def read_cache(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    task = Task(case=CASE, scale="full", device_type="cpu", root="/")
    cache = ResultCache(scratch.folder, "")
    path = cache._path(task)
    if path is not None:
        scratch.file(path.name, data)
        cache.get(task)


def read_recording(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    with replayed(scratch.file("recording.json", data)):
        gpus = drivers.gpus()
        drivers.occupancy(gpus[:1])
        drivers.paths(gpus)


def read_settings(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    try:
        options, ini = msgspec.json.decode(data, type=tuple[dict[str, Any], dict[str, Any]])
    except UNREADABLE:
        return  # only the tool's way to write them down
    # pytest gives strings, lists of them where an option is repeated, and True or False for a switch.
    typed: dict[str, Any] = {}
    for option in (option for option in OPTIONS if not option.ini_only):
        value = options.get(option.name)
        if option.switch:
            typed[option.name] = value if isinstance(value, bool) else None
        elif value is not None:
            typed[option.name] = [_text(value)] if option.repeated else _text(value)
    settings.read(typed, {name: _text(value) for name, value in ini.items()}, scratch.folder)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_command(data: bytes, scratch: Scratch, rng: random.Random) -> None:
    words = [word.decode(errors="surrogateescape") for word in data.split(b"\0")]
    if words[:1] in (["node"], ["ab"], ["emulate"]):
        with contextlib.suppress(SystemExit):
            main.command_parser().parse_args(words)  # they would run for long, or any program
        return
    for name in ("report.json", "history.jsonl"):
        if not (scratch.folder / name).exists():
            scratch.file(name, sound_report() if name.startswith("report") else sound_history())
    command(scratch, words)


def command(scratch: Scratch, words: Sequence[str]) -> None:
    """Run ``gputrain`` with these words, in the folder."""
    given = [str(scratch.folder / word) if word in _FILES else word for word in words]
    if "-o" in given or "--output" in given or "--record" in given or "--html" in given:
        given = [word for word in given if word not in ("-o", "--output", "--record", "--html")]
    try:
        status = main.main(given)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 2
    if status not in (0, 1, 2):
        raise AssertionError(f"exit status {status}")
    shutil.rmtree(scratch.folder / "out", ignore_errors=True)


def show(results: Sequence[Result]) -> None:
    terminal.render(results, width=100, colour=False)
    explanations.explain(results)
    studies.explain(results)
    summary.lines(results, (), ())


def ignore(sentence: str) -> None:
    """Ignore an output that is only reported."""


_FILES: Final = ("report.json", "history.jsonl", ".")
_COMMANDS: Final = (
    ("export", "report.json"),
    ("export", "report.json", "--published", "amd-diffusion"),
    ("export", "report.json", "--published", "--format", "csv"),
    ("compare", "report.json", "report.json"),
    *(("export", "report.json", "--format", name) for name in ("bencher", "csv", "markdown", "github-action-benchmark")),
    ("export", "report.json", "--format", "pytest-benchmark"),
)
_LINES: Final = (
    *_COMMANDS,
    ("trend", "history.jsonl", "--format", "json"),
    ("trend", "history.jsonl", "--least", "5%", "--newest", "3", "--branch", "*", "--fail-on", "regressed,improved"),
    ("check-baselines", "."),
    ("node", "shared", "--host", "a:1"),
    ("ab", "--base", "main", "benchmarks", "-k", "lora"),
    ("export", "--help"),
    ("nothing",),
)
_SETTINGS: Final = (
    {"memory-tolerance": "2% + 1 GiB", "time-tolerance": "3%", "runs": "5", "timeout": "30min", "ids": "0,1"},
    {"set": "batch_size=1,2\nprecision=bf16", "steps": "7", "platform": "h100", "json": "report.json"},
    {"find-batch": True, "find-batch-max": "64", "loss": "50", "rendezvous": "node1:29400", "nodes": "2"},
    {"baseline-update": True, "baseline-dir": "somewhere", "strict": "auto", "summary": "none", "foreign": "warn"},
)

READERS: Final = (
    Reader(
        "baseline",
        read_baseline,
        (sound_baseline(), a_few(ROOT / "baselines/cpu/collective.json", "cases")),
        (BaselineError,),
        12,
    ),
    Reader(
        "emulated",
        read_emulated,
        (a_few(ROOT / "baselines/emulated/h100/llm_finetuning.json", "cases"),),
        (BaselineError,),
        5,
    ),
    Reader(
        "published", read_published, (a_few(ROOT / "baselines/published/amd-diffusion.json", "rows"),), (BaselineError,), 8
    ),
    Reader("report", read_a_report, (sound_report(),), (BaselineError,), 5),
    Reader("history", read_history, (sound_history(),), (HistoryError,), 10),
    Reader("reply", read_reply, tuple(path.read_bytes() for path in sorted(REPLIES.glob("*.json"))), (), 15),
    Reader(
        "progress",
        read_progress,
        (b'{"phase":"start","at":1.5}\n{"phase":"measure","step":3,"step_seconds":0.5,"allocated_bytes":7}\n',),
        (),
        15,
    ),
    Reader("cache", read_cache, ((REPLIES / "h100_emulated.json").read_bytes(),), (), 4),
    Reader(
        "recording",
        read_recording,
        tuple(path.read_bytes() for path in sorted(RECORDINGS.glob("*.json"))),
        (ValueError, HardwareError),
        3,
    ),
    Reader(
        "settings",
        read_settings,
        tuple(json.dumps([setting, {}]).encode() for setting in _SETTINGS)
        + tuple(json.dumps([{}, setting]).encode() for setting in _SETTINGS),
        (ValueError,),
        20,
    ),
    Reader("command", read_command, tuple("\0".join(words).encode() for words in _LINES), (), 3, is_json=False),
)
