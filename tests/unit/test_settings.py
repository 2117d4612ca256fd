"""Tests the options: the command line precedes the ini file, which precedes the default; bad values give one sentence."""

import dataclasses
import fnmatch
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_gputrain.execution.settings import OPTIONS, Settings
from pytest_gputrain.plugin.settings import read
from pytest_gputrain.records.tolerance import CountTolerance, MemoryTolerance
from pytest_gputrain.utils.units import MiB

ROOT = Path("/project")
BY_NAME = {option.name: option for option in OPTIONS}
TYPED = [option for option in OPTIONS if not option.ini_only]


def _read(options=None, ini=None, root=ROOT):
    given_ = {option.name: None for option in TYPED} | (options or {})
    written = {option.name: "" for option in OPTIONS} | (ini or {})
    return read(given_, written, root)


def _refusal(options=None, ini=None):
    try:
        _read(options, ini)
    except ValueError as error:
        return str(error)
    return None


class Layers(NamedTuple):
    """One option in each of its sources, with the field it feeds and what that holds then; nothing types an ini-only one."""

    option: str
    field: str
    typed: tuple[Any, Any] | None
    written: tuple[str, Any]
    default: Any


TOLERANCES = {
    "launches": CountTolerance(ratio=0.05),
    "waits": CountTolerance(more=1),
    "h2d_bytes": CountTolerance(ratio=0.02, more=MiB),
}
LAYERS = [
    Layers("baseline-update", "baseline_update", (True, True), ("true", True), False),
    Layers("baseline-new", "baseline_new", (True, True), ("yes", True), False),
    Layers("baseline-prune", "baseline_prune", (True, True), ("true", True), False),
    Layers("baseline-dir", "baseline_dir", ("/typed", Path("/typed")), ("/ini", Path("/ini")), ROOT / "baselines"),
    Layers("time-tolerance", "time_tolerance", ("5%", 0.05), ("0.1", 0.1), 0.03),
    Layers("host-time-tolerance", "host_time_tolerance", None, ("80 %", 0.8), 0.5),
    Layers(
        "memory-tolerance",
        "memory_tolerance",
        ("512MiB", MemoryTolerance(bytes=512 * MiB)),
        ("5 % + 1GiB", MemoryTolerance(ratio=0.05, bytes=1024 * MiB)),
        MemoryTolerance(ratio=0.02),
    ),
    Layers("counts", "counts", None, ("tell", "tell"), "judge"),
    Layers(
        "count-tolerance",
        "count_tolerances",
        None,
        ("\nlaunches=5 %,waits = 1\nh2d_bytes=2% + 1MiB", TOLERANCES),
        {},
    ),
    Layers("judge-cpu-time", "judge_cpu_time", None, ("true", True), False),
    Layers("runs", "runs", ("5", 5), ("3", 3), None),
    Layers("reruns", "reruns", None, ("2", 2), 4),
    Layers("strict", "strict", (True, True), ("false", False), None),
    Layers("steps", "steps", ("7", 7), ("8", 8), None),
    Layers("warmup", "warmup", ("0", 0), ("1", 1), None),
    Layers("timeout", "timeout_seconds", ("90s", 90.0), ("2h", 7200.0), 1800.0),
    Layers("scale", "scale", ("full", "full"), ("tiny", "tiny"), "auto"),
    Layers("platform", "platform", ("h100", "h100"), ("a100", "a100"), None),
    Layers("processes", "processes", None, ("4", 4), 2),
    Layers("ids", "gpu_ids", ("0, 1", ("0", "1")), ("GPU-1", ("GPU-1",)), None),
    Layers("nodes", "nodes", None, ("4", 4), 1),
    Layers("shared", "shared", None, ("/ini", Path("/ini")), ROOT / ".gputrain"),
    Layers("rendezvous", "rendezvous", None, ("10.0.0.1:29400", "10.0.0.1:29400"), ""),
    Layers("executor", "fleet", ("slurm", "slurm"), ("ray", "ray"), None),
    Layers(
        "fleet-args",
        "fleet_args",
        None,
        (
            "\n--qos=low\ncpu: --mem='8 G' --exclusive\nrack=1 CPU=2",
            (("", ("--qos=low",)), ("cpu", ("--mem=8 G", "--exclusive")), ("", ("rack=1", "CPU=2"))),
        ),
        (),
    ),
    Layers("fleet-gpus", "fleet_gpus", None, ("16", 16), 8),
    Layers("fleet-jobs", "fleet_jobs", None, ("20", 20), 256),
    Layers("fleet-wait", "fleet_wait_seconds", None, ("2h", 7200.0), 3600.0),
    Layers("foreign", "foreign", None, ("ignore", "ignore"), "warn"),
    Layers("isolation", "isolation", ("inline", "inline"), ("process", "process"), "auto"),
    Layers(
        "set",
        "sweep",
        (["batch_size=1,2", "precision=fp32"], (("batch_size", (1, 2)), ("precision", ("fp32",)))),
        ("\nlearning_rate = 1e-6, 5e-5\ncpu_offload=true", (("learning_rate", (1e-6, 5e-5)), ("cpu_offload", (True,)))),
        (),
    ),
    Layers("emulate", "emulate", (True, True), ("yes", True), False),
    Layers("find-batch", "find_batch", (True, True), ("yes", True), False),
    Layers("find-batch-max", "find_batch_max", None, ("16", 16), 1024),
    Layers("loss", "loss_steps", ("1500", 1500), ("20", 20), None),
    Layers("summary", "summary", ("/typed.md", Path("/typed.md")), ("none", "none"), "auto"),
    Layers("json", "json", ("/typed.json", Path("/typed.json")), ("/ini.json", Path("/ini.json")), None),
    Layers("resume", "resume", ("/typed.json", Path("/typed.json")), ("/ini.json", Path("/ini.json")), None),
    Layers("history", "history", ("/typed.jsonl", Path("/typed.jsonl")), ("/ini.jsonl", Path("/ini.jsonl")), None),
    Layers("html", "html", ("/typed.html", Path("/typed.html")), ("/ini.html", Path("/ini.html")), None),
]


def test_every_option_has_flag_ini_twin_layers_above_and_help_that_tells_its_default():
    assert len({option.flag for option in OPTIONS}) == len(OPTIONS)
    for option in OPTIONS:
        assert re.fullmatch(r"--gpu-[a-z-]+", option.flag)
        assert option.ini == option.flag.removeprefix("--").replace("-", "_")
        assert option.help
    assert {layers.option for layers in LAYERS} == set(BY_NAME) - {"baseline"}
    plain = {field.name for field in dataclasses.fields(Settings)} - {option.field for option in OPTIONS}
    assert plain == {"root", "configured", "typed", "given"}
    assert {layers.option for layers in LAYERS if layers.typed is None} == {o.name for o in OPTIONS if o.ini_only}


@pytest.mark.parametrize("layers", LAYERS, ids=lambda layers: layers.option)
def test_command_line_counts_before_ini_and_ini_before_default(layers):
    written, expected = layers.written
    assert getattr(_read(), layers.field) == layers.default
    assert getattr(_read(ini={layers.option: written}), layers.field) == expected
    if layers.typed is not None:
        typed, expected = layers.typed
        settings = _read({layers.option: typed}, {layers.option: written})
        assert getattr(settings, layers.field) == expected
        assert settings.typed == (layers.option,), "only what the command line gives counts as typed"


@pytest.mark.parametrize("switch", [option for option in TYPED if option.switch], ids=lambda option: option.name)
def test_a_switch_that_was_turned_off_counts_before_the_ini_file(switch):
    settings = _read({switch.name: False}, {switch.name: "true"})
    assert getattr(settings, switch.field) is False
    assert settings.typed == (switch.name,)


def test_a_folder_of_baselines_is_absolute_and_counts_as_named_wherever_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for settings in (_read({"baseline-dir": "figures"}), _read(ini={"baseline-dir": "figures"})):
        assert "baseline-dir" in settings.given
        assert settings.baseline_dir.is_absolute()
    assert "baseline-dir" not in _read().given


def test_what_turns_a_setting_of_the_ini_file_off_or_only_bounds_it_asks_for_nothing():
    assert _read({"executor": "local"}, {"executor": "slurm"}).fleet is None
    assert not _read({"runs": "2"}, {"find-batch-max": "8"}).find_batch


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("nodes", "2", "--gpu-nodes is set in the ini file: gpu_nodes = 2, or -o gpu_nodes=2 for one run"),
        (
            "fleet-jobs",
            None,
            "--gpu-fleet-jobs is set in the ini file: gpu_fleet_jobs = N, or -o gpu_fleet_jobs=N for *",
        ),
        ("judge-cpu-time", None, "* gpu_judge_cpu_time = true, or -o gpu_judge_cpu_time=true for one run"),
        ("fleet-args", "h100: -p a", "* gpu_fleet_args = h100: -p a, or -o 'gpu_fleet_args=h100: -p a' for one run"),
    ],
)
def test_the_flag_of_a_setting_of_the_ini_file_names_what_to_write_instead(name, value, sentence):
    assert fnmatch.fnmatchcase(BY_NAME[name].refused_flag(value), sentence)


def test_one_file_is_not_written_for_two_options(tmp_path):
    (tmp_path / "link").symlink_to("out")
    with pytest.raises(ValueError, match=r"--gpu-json and --gpu-html contradict each other: both name .*link"):
        _read({"json": str(tmp_path / "out"), "html": str(tmp_path / "link")})


def test_paths_are_in_the_folder_of_the_ini_file_or_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ini").mkdir()
    for folder in (tmp_path, tmp_path / "ini"):
        (folder / "old.json").touch()
    written = {"baseline-dir": "figures", "json": "out/new.json", "baseline": "old.json"}
    for folder, settings in ((tmp_path / "ini", _read(ini=written, root=tmp_path / "ini")), (tmp_path, _read(written))):
        assert settings.baseline == folder / "old.json"
        assert (settings.baseline_dir, settings.json) == (folder / "figures", folder / "out/new.json")


def test_a_baseline_report_comes_from_the_command_line_before_the_ini_file(tmp_path):
    typed, written = str(tmp_path / "typed.json"), str(tmp_path / "ini.json")
    for name in (typed, written):
        Path(name).touch()
    read_ = (_read({"baseline": typed}, {"baseline": written}), _read(ini={"baseline": written}), _read())
    assert [settings.baseline for settings in read_] == [Path(typed), Path(written), "measured"]
    with pytest.raises(ValueError, match="--gpu-baseline"):
        _read({"baseline": str(tmp_path)})  # a folder is no report


EMULATED = {"find-batch": True, "loss": "20", "baseline": "published", "isolation": "inline"}
EMULATED |= {"ids": "0", "runs": "3", "resume": "r.json", "executor": "slurm"}


def test_options_that_cannot_both_be_meant_are_refused(snapshot, tmp_path):
    (tmp_path / "old.json").touch()
    report = {"baseline": str(tmp_path / "old.json")}
    both = [
        ({"baseline-update": True, "baseline-new": True}, {}),
        *(({"emulate": True, name: value}, {}) for name, value in EMULATED.items()),
        ({"find-batch": True, "loss": "20"}, {}),
        ({"find-batch": True, "runs": "2"}, {}),
        ({"loss": "20", "runs": "2"}, {}),
        ({"find-batch": True, "baseline-update": True}, {}),
        ({"loss": "20", "baseline-new": True}, {}),
        ({"find-batch": True, "isolation": "inline"}, {}),
        ({"set": ["batch_size=1"], "find-batch": True}, {}),
        ({"set": ["steps=5"], "steps": "5"}, {}),
        ({"set": ["warmup=5"], "warmup": "0"}, {}),
        ({"set": ["steps=5"], "loss": "20"}, {}),
        ({"ids": "0"}, {"nodes": "2"}),
        ({"isolation": "inline"}, {"nodes": "2"}),
        ({"executor": "slurm"}, {"rendezvous": "node1"}),
        ({"executor": "ray", "ids": "0"}, {}),
        ({**report, "baseline-update": True}, {}),
    ]
    said = [(_refusal(options, ini) or "taken").replace(str(tmp_path), "") for options, ini in both]
    assert said == snapshot


REFUSED = {
    "baseline-update": ["perhaps"],
    "baseline-new": ["2"],
    "baseline": ["/no/such/report.json"],
    "time-tolerance": ["3", "-3%"],
    "memory-tolerance": ["5", "5 lumps"],
    "counts": ["count"],
    "count-tolerance": ["launches", "launchs=5%", "=1", "waits=1 MiB", "waits=-1", "waits=1.5", "waits=1,waits=2"],
    "runs": ["0", "2.5", "²"],
    "strict": ["maybe"],
    "steps": ["0", "ten"],
    "warmup": ["-1"],
    "timeout": ["0", "soon", "9" * 400],
    "scale": ["huge"],
    "ids": [",", "0,0"],
    "executor": ["cloud"],
    "fleet-args": ["--partition='a", "gpu"],
    "fleet-gpus": ["0"],
    "fleet-jobs": ["0"],
    "fleet-wait": ["soon"],
    "foreign": ["none"],
    "isolation": ["none"],
    "nodes": ["0"],
    "rendezvous": ["node1:", "tcp://node1:29400"],
    "find-batch": ["perhaps"],
    "find-batch-max": ["0"],
    "loss": ["19", "all"],
}
BAD = [(name, text) for name, texts in REFUSED.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_is_told_in_one_sentence_by_its_name_where_it_stands(name, text):
    refusal = _refusal(ini={name: text})
    assert BY_NAME[name].ini in refusal
    if not BY_NAME[name].ini_only:
        refusal = _refusal({name: text})
        assert BY_NAME[name].flag in refusal
        assert repr(text) in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize("name", [option.name for option in TYPED if not option.switch])
def test_an_empty_value_typed_is_refused_or_counts_as_not_given(name):
    """As ``--gpu-runs=$RUNS`` gives where the variable is not set."""
    refusal = _refusal({name: ""})
    if refusal is None:
        assert _read({name: ""}) == _read()
    else:
        assert BY_NAME[name].flag in refusal
