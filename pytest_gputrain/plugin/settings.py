"""Reads the settings of a run from the command line, the ini file and the defaults, and refuses contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pytest_gputrain.plugin.options import OPTIONS, Option
from pytest_gputrain.records.settings import OUTPUTS, Settings
from pytest_gputrain.utils.files import prepare


def read(options: Mapping[str, str | bool | list[str] | None], ini: Mapping[str, str], root: Path) -> Settings:
    """Return the settings; an option of the command line precedes the ini file, which precedes the default.

    Args:
        options: value of each option's flag by option name; None where it was not given, a list for one that is repeated,
            False for a switch whose ``--no-gpu-name`` came last.
        ini: value that each option has in the ini file by option name; empty where it is not set.
        root: folder that relative paths of the ini file are in; those of the command line are in the current folder.

    Raises:
        ValueError: one sentence naming the option, the value, and what would be accepted.
    """
    values = {option.name: _value(option, options.get(option.name), ini.get(option.name, ""), root) for option in OPTIONS}
    if values["baseline-update"] and values["baseline-new"]:
        raise ValueError("--gpu-baseline-update and --gpu-baseline-new contradict each other; give one")
    update: Literal["no", "new", "all"] = "all" if values["baseline-update"] else "new" if values["baseline-new"] else "no"
    baseline = values["baseline"]
    if baseline == "published" and update != "no":
        raise ValueError("--gpu-baseline-update records into --gpu-baseline-dir; it cannot update a published table")
    if baseline not in ("measured", "published"):
        typed = bool(options.get("baseline"))
        path = Path(baseline) if typed else root / baseline
        if not path.is_file():
            name = "--gpu-baseline" if typed else "gpu_baseline"
            raise ValueError(f"{name}: {baseline!r} is neither 'measured', 'published' nor a report that exists")
        if update != "no":
            raise ValueError("--gpu-baseline-update records into --gpu-baseline-dir; it cannot update a report")
        baseline = str(path.absolute())
    _refuse_contradictions(values)
    _refuse_outputs(values)
    _refuse_to_prune(values)
    return Settings(
        baseline_update=update,
        baseline_prune=bool(values["baseline-prune"]),
        baseline_dir=values["baseline-dir"].absolute(),
        baseline_dir_named=bool(options.get("baseline-dir") or ini.get("baseline-dir")),
        baseline=baseline,
        time_tolerance=values["time-tolerance"],
        memory_tolerance=values["memory-tolerance"],
        counts=values["counts"],
        count_tolerances=values["count-tolerance"] or {},
        judge_cpu_time=bool(values["judge-cpu-time"]),
        host_time_tolerance=values["host-time-tolerance"],
        typed=tuple(sorted(name for name, value in options.items() if value is not None)),
        runs=values["runs"],
        reruns=values["reruns"],
        strict=values["strict"],
        steps=values["steps"],
        warmup=values["warmup"],
        timeout_seconds=values["timeout"],
        scale=values["scale"],
        platform=values["platform"],
        processes=values["processes"],
        gpu_ids=values["ids"],
        isolation=values["isolation"],
        foreign=values["foreign"],
        nodes=values["nodes"],
        shared=values["shared"].absolute(),
        rendezvous=values["rendezvous"] or "",
        summary=values["summary"].absolute() if isinstance(values["summary"], Path) else values["summary"],
        json=None if values["json"] is None else values["json"].absolute(),
        resume=None if values["resume"] is None else values["resume"].absolute(),
        history=None if values["history"] is None else values["history"].absolute(),
        html=None if values["html"] is None else values["html"].absolute(),
        sweep=values["set"] or (),
        fleet=None if values["executor"] == "local" else values["executor"],
        fleet_args=values["fleet-args"] or (),
        fleet_gpus=values["fleet-gpus"],
        fleet_jobs=values["fleet-jobs"],
        fleet_wait_seconds=values["fleet-wait"],
        emulate=bool(values["emulate"]),
        find_batch=bool(values["find-batch"]),
        find_batch_max=values["find-batch-max"],
        loss_steps=values["loss"],
        root=root,
    )


def _value(option: Option, typed: str | bool | list[str] | None, written: str, root: Path) -> Any:
    """Return the value of an option; None where there is none.

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
        value = option.parse(text) if text else None
    except ValueError as error:
        raise ValueError(f"{option.flag if is_typed else option.ini}: {error}") from None
    return root / value if isinstance(value, Path) and not is_typed else value


def _refuse_together(option: str, others: Mapping[str, object], why: str) -> None:
    """Refuse an option beside any of the others that is asked for.

    Args:
        others: by its flag whether each is.

    Raises:
        ValueError: one is.
    """
    for other in (flag for flag, asked in others.items() if asked):
        raise ValueError(f"{option} and {other} contradict each other: {why}")


def _refuse_outputs(values: Mapping[str, Any]) -> None:
    """Refuse outputs that cannot all be written.

    Raises:
        ValueError: two options name one file, or one names a file that no run writes.
    """
    flags: dict[Path, str] = {}
    for name in OUTPUTS:
        path = values[name]
        if not isinstance(path, Path):
            continue
        other = flags.setdefault(path.resolve(), f"--gpu-{name}")
        if other != f"--gpu-{name}":
            raise ValueError(
                f"{other} and --gpu-{name} contradict each other: both name {path}; give each a file of its own"
            )
        if path.suffix == ".py":  # after --gpu-json without a value
            raise ValueError(f"--gpu-{name}: {path} is code, which it would replace; write the option as --gpu-{name}=FILE")


def _refuse_to_prune(values: Mapping[str, Any]) -> None:
    """Refuse to remove baselines on the word of tests that ask for other cases than their own.

    Raises:
        ValueError: baselines are to be removed that no test asks for, and tests are to ask for other cases than their own.
    """
    if not values["baseline-prune"]:
        return
    others = {
        "--gpu-set": values["set"],
        "--gpu-find-batch": values["find-batch"],
        "--gpu-loss": values["loss"],
        "--gpu-steps": values["steps"] is not None,
        "--gpu-warmup": values["warmup"] is not None,
        f"--gpu-baseline={values['baseline']}": values["baseline"] != "measured",
    }
    _refuse_together("--gpu-baseline-prune", others, "tests ask for other cases then")


def prepare_outputs(settings: Settings) -> None:
    """Make the folders of the files that the run is to write.

    Raises:
        ValueError: a file that the run is to write cannot be written; its folder has been made otherwise.
    """
    for name, path in settings.outputs.items():
        try:
            prepare(path)
        except OSError as error:
            raise ValueError(f"--gpu-{name}: {path} cannot be written ({error.strerror}); give another file") from None


def _refuse_contradictions(values: Mapping[str, Any]) -> None:
    """Refuse values that contradict each other.

    Raises:
        ValueError: two of the values cannot both be meant.
    """
    is_inline = {"--gpu-isolation=inline": values["isolation"] == "inline"}
    if values["nodes"] > 1:
        others = {"--gpu-ids": values["ids"], **is_inline}
        _refuse_together("gpu_nodes", others, "it takes processes on all GPUs of each node")
    if values["executor"] != "local":
        others = {
            "--gpu-emulate": values["emulate"],
            **is_inline,
            "--gpu-ids": values["ids"],
            "gpu_rendezvous": values["rendezvous"],
        }
        why = "cases run on machines that a scheduler chooses"
        _refuse_together(f"--gpu-executor={values['executor']}", others, why)
    if values["emulate"]:
        others = {
            "--gpu-ids": values["ids"],
            "--gpu-find-batch": values["find-batch"],
            "--gpu-loss": values["loss"],
            f"--gpu-baseline={values['baseline']}": values["baseline"] != "measured",
            f"--gpu-runs={values['runs']}": values["runs"] not in (None, 1),
            **is_inline,
            "--gpu-resume": values["resume"] is not None,
        }
        why = "it measures nothing, and compares with recorded figures of an emulated GPU"
        _refuse_together("--gpu-emulate", others, why)
    swept = dict(values["set"] or ())
    studies = [flag for flag, asked in (("--gpu-find-batch", values["find-batch"]), ("--gpu-loss", values["loss"])) if asked]
    if len(studies) > 1:
        raise ValueError(f"{' and '.join(studies)} contradict each other; give one")
    for study in studies:
        others = {
            "--gpu-baseline-update": values["baseline-update"],
            "--gpu-baseline-new": values["baseline-new"],
            f"--gpu-runs={values['runs']}": values["runs"] not in (None, 1),
            **is_inline,
            "--gpu-resume": values["resume"] is not None,
        }
        _refuse_together(study, others, "it starts the processes that it needs and records no baseline")
    both = {
        "batch_size": "--gpu-find-batch" if values["find-batch"] else "",
        "steps": "--gpu-loss" if values["loss"] else "--gpu-steps" if values["steps"] is not None else "",
        "warmup": "--gpu-loss" if values["loss"] else "--gpu-warmup" if values["warmup"] is not None else "",
    }
    for knob, flag in both.items():
        if flag and knob in swept:
            raise ValueError(f"--gpu-set {knob} and {flag} contradict each other: both say what {knob} is; give one")
