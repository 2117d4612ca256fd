"""Defines the settings of a run as data; `pytest_gputrain.plugin.settings` reads them from options and the ini file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pytest_gputrain.records.counts import CountFigure
from pytest_gputrain.records.tolerance import CountTolerance, MemoryTolerance

Axes = tuple[tuple[str, tuple[Any, ...]], ...]
"""Every knob with its values, in the order given."""

OUTPUTS: Final = ("json", "html", "summary", "history")
"""The settings that name a file for a run to write; the options are called like them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a run, from the command line, the ini file and the defaults."""

    baseline_update: Literal["no", "new", "all"]
    baseline_prune: bool
    """Whether baselines that no test asks for are removed."""
    baseline_dir: Path
    baseline_dir_named: bool
    """Whether the command line or the ini file names it."""
    baseline: str
    """``measured``, ``published``, or the path of a report to compare with."""
    time_tolerance: float
    memory_tolerance: MemoryTolerance
    counts: Literal["judge", "tell", "off"]
    """What to do about what steps ask of an emulated GPU."""
    count_tolerances: Mapping[CountFigure, CountTolerance]
    judge_cpu_time: bool
    host_time_tolerance: float
    runs: int | None
    """Fresh processes per case; None for one, or five where a baseline of a GPU is recorded."""
    reruns: int
    """Most fresh processes more, where the first leave doubt."""
    strict: bool | None
    """None: strict where ``CI`` is set, unless published figures are what cases are compared with."""
    steps: int | None
    """Timed steps of every case, None for each case's own."""
    warmup: int | None
    timeout_seconds: float
    scale: Literal["auto", "full", "tiny"]
    platform: str | None
    """Catalog marker that this machine passes for, or that is emulated; None for what is detected."""
    processes: int
    """Most processes of a case on a CPU."""
    gpu_ids: tuple[str, ...] | None
    """Indices or UUIDs of the GPUs to use, None for all visible ones."""
    isolation: Literal["auto", "process", "inline"]
    foreign: Literal["error", "warn", "ignore"]
    nodes: int
    """Most nodes of a case."""
    shared: Path
    """Folder that all nodes see."""
    rendezvous: str
    """``HOST`` or ``HOST:PORT`` of this node for the others; empty for its name, or for Slurm to start them all."""
    summary: Path | Literal["auto", "none"]
    json: Path | None
    resume: Path | None
    """Report of an earlier run whose figures are taken over."""
    history: Path | None
    """File that this run's cases are appended to."""
    html: Path | None
    sweep: Axes
    """Knobs that replace those of every case, each with its values."""
    fleet: Literal["slurm", "ray"] | None
    """The scheduler that runs the cases, of ``--gpu-executor``; None for this machine."""
    fleet_args: tuple[tuple[str, tuple[str, ...]], ...]
    """Further arguments for the scheduler: a catalog marker, empty for all platforms, and arguments."""
    fleet_gpus: int
    """GPUs of each node of the fleet."""
    fleet_jobs: int
    """Most jobs in the scheduler's queue."""
    fleet_wait_seconds: float
    emulate: bool
    """Whether cases run on an emulated GPU."""
    find_batch: bool
    find_batch_max: int
    """The largest micro-batch that is tried."""
    loss_steps: int | None
    """Steps of the loss curves, None where there are to be none."""
    root: Path
    typed: tuple[str, ...]
    """Names of the options that the command line gives: they count before what a test says of itself."""

    @property
    def outputs(self) -> dict[str, Path]:
        """The files of `OUTPUTS` that this run is to write, by the name of the setting."""
        named = {name: getattr(self, name) for name in OUTPUTS}
        return {name: path for name, path in named.items() if isinstance(path, Path)}

    @property
    def written(self) -> tuple[Path, ...]:
        """Files and folders that a run changes, or that the one it resumes has changed."""
        named = (self.baseline_dir, self.resume, *self.outputs.values())
        return tuple(path for path in named if path is not None)
