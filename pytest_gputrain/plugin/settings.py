"""Reads the settings of a run from the command line, the ini file and the defaults, and refuses contradictions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gputrain.execution.options import Option
from pytest_gputrain.execution.settings import OPTIONS, Settings
from pytest_gputrain.utils.files import prepare


def read(
    options: Mapping[str, str | bool | list[str] | None], ini: Mapping[str, str], root: Path, *, configured: bool = True
) -> Settings:
    """Return the settings. An option of the command line precedes the ini file, which precedes the default.

    Args:
        options: value of each option's flag by option name; None if it was not given, a list for one that is repeated,
            False for a switch whose ``--no-gpu-name`` came last.
        ini: value that each option has in the ini file by option name; empty if it is not set.
        root: folder that relative paths of the ini file are in; those of the command line are in the current folder.
        configured: whether there is a configuration file.

    Raises:
        ValueError: one sentence naming the option, the value, and what would be accepted.
    """
    typed = {name for name, value in options.items() if value is not None}
    settings = Settings(
        **{option.field: _value(option, options.get(option.name), ini.get(option.name, ""), root) for option in OPTIONS},
        root=root,
        configured=configured,
        typed=tuple(sorted(typed)),
        given=tuple(sorted(typed | {name for name, value in ini.items() if value})),
    )
    _refuse_baseline(settings)
    _refuse_contradictions(settings)
    _refuse_outputs(settings)
    _refuse_to_prune(settings)
    return settings


def _value(option: Option, typed: str | bool | list[str] | None, written: str, root: Path) -> Any:
    """Return the value of an option; a path is absolute.

    Args:
        typed, written: as of `read`.

    Raises:
        ValueError: as of `read`.
    """
    typed = "\n".join(typed) if isinstance(typed, list) else typed
    is_typed = typed is not None
    text = str(typed) if is_typed else (written or option.default)
    try:
        if is_typed and not text:
            raise ValueError("it was given without a value")
        value = option.parse(text) if text else option.absent
    except ValueError as error:
        raise ValueError(f"{option.flag if is_typed else option.ini}: {error}") from None
    return (value if is_typed else root / value).absolute() if isinstance(value, Path) else value


def _refuse_baseline(settings: Settings) -> None:
    """Raise an error if the report to compare with is missing, or if anything but recorded baselines is to be updated."""
    if settings.baseline_update and settings.baseline_new:
        raise ValueError("--gpu-baseline-update and --gpu-baseline-new contradict each other; give one")
    is_report = isinstance(settings.baseline, Path)
    if isinstance(settings.baseline, Path) and not settings.baseline.is_file():
        name = "--gpu-baseline" if "baseline" in settings.typed else "gpu_baseline"
        raise ValueError(f"{name}: '{settings.baseline}' is neither 'measured', 'published' nor a report that exists")
    if settings.records and settings.baseline != "measured":
        other = "report" if is_report else "published table"
        raise ValueError(f"--gpu-baseline-update records into --gpu-baseline-dir; it cannot update a {other}")


def _refuse_together(option: str, others: Mapping[str, object], why: str) -> None:
    """Raise an error if an option is used together with any of these others.

    Args:
        others: the value of each other option by its flag; a false value means that it is not used.
    """
    for other in (flag for flag, asked in others.items() if asked):
        raise ValueError(f"{option} and {other} contradict each other: {why}")


def _refuse_outputs(settings: Settings) -> None:
    """Raise an error for outputs that cannot all be written."""
    flags: dict[str, str] = {}
    for name, path in settings.outputs.items():
        other = flags.setdefault(os.path.realpath(path), f"--gpu-{name}")
        if other != f"--gpu-{name}":
            raise ValueError(
                f"{other} and --gpu-{name} contradict each other: both name {path}; give each a file of its own"
            )
        if path.suffix == ".py":  # Without a value, --gpu-json takes the test file that follows it.
            raise ValueError(f"--gpu-{name}: {path} is code, which it would replace; write the option as --gpu-{name}=FILE")


def _refuse_to_prune(settings: Settings) -> None:
    """Raise an error for removing baselines in a run whose options change the cases of its tests."""
    if not settings.baseline_prune:
        return
    others = {
        "--gpu-set": settings.sweep,
        "--gpu-find-batch": settings.find_batch,
        "--gpu-loss": settings.loss_steps,
        "--gpu-steps": settings.steps is not None,
        "--gpu-warmup": settings.warmup is not None,
        f"--gpu-baseline={settings.baseline}": settings.baseline != "measured",
    }
    _refuse_together("--gpu-baseline-prune", others, "tests ask for other cases then")


def prepare_outputs(settings: Settings) -> None:
    """Make the folders of the files that the run is to write.

    Raises:
        ValueError: a file that the run is to write cannot be written.
    """
    for name, path in settings.outputs.items():
        try:
            prepare(path)
        except OSError as error:
            raise ValueError(f"--gpu-{name}: {path} cannot be written ({error.strerror}); give another file") from None


def _refuse_contradictions(settings: Settings) -> None:
    """Raise an error for values that contradict each other."""
    find_batch, loss = settings.find_batch, settings.loss_steps
    is_inline = {"--gpu-isolation=inline": settings.isolation == "inline"}
    one_run = {f"--gpu-runs={settings.runs}": settings.runs not in (None, 1), **is_inline, "--gpu-resume": settings.resume}
    if settings.nodes > 1:
        others: dict[str, object] = {"--gpu-ids": settings.gpu_ids, **is_inline}
        _refuse_together("gpu_nodes", others, "it takes processes on all GPUs of each node")
    if settings.fleet is not None:
        others = {
            "--gpu-emulate": settings.emulate,
            **is_inline,
            "--gpu-ids": settings.gpu_ids,
            "gpu_rendezvous": settings.rendezvous,
        }
        why = "cases run on machines that a scheduler chooses"
        _refuse_together(f"--gpu-executor={settings.fleet}", others, why)
    if settings.emulate:
        others = {
            "--gpu-ids": settings.gpu_ids,
            "--gpu-find-batch": find_batch,
            "--gpu-loss": loss,
            "--gpu-baseline=published": settings.baseline == "published",
            **one_run,
        }
        why = "it measures nothing, and compares with recorded figures of an emulated GPU"
        _refuse_together("--gpu-emulate", others, why)
    studies = [flag for flag, asked in (("--gpu-find-batch", find_batch), ("--gpu-loss", loss)) if asked]
    if len(studies) > 1:
        raise ValueError(f"{' and '.join(studies)} contradict each other; give one")
    for study in studies:
        others = {"--gpu-baseline-update": settings.baseline_update, "--gpu-baseline-new": settings.baseline_new, **one_run}
        _refuse_together(study, others, "it starts the processes that it needs and records no baseline")
    both = {
        "batch_size": "--gpu-find-batch" if find_batch else "",
        "steps": "--gpu-loss" if loss else "--gpu-steps" if settings.steps is not None else "",
        "warmup": "--gpu-loss" if loss else "--gpu-warmup" if settings.warmup is not None else "",
    }
    for knob, flag in both.items():
        if flag and knob in dict(settings.sweep):
            raise ValueError(f"--gpu-set {knob} and {flag} contradict each other: both say what {knob} is; give one")
