"""Defines the records of ``gputrain predict``: does a model fit GPUs that nobody has here, and up to which batch?"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from pytest_gputrain.records.case import FORMAT, Case
from pytest_gputrain.records.emulated import EmulatedRun
from pytest_gputrain.records.whole import Whole

Fit = Literal["fits", "incomplete", "within-error", "does-not-fit"]
"""``within-error``: figures that are wrong by their error would turn the answer. ``incomplete``: what is counted fits
surely, and memory of a library is not known."""


class FitGpu(Struct, frozen=True, kw_only=True):
    """One of the GPUs that ``--gpu`` names."""

    marker: str
    title: str
    """The name of the GPU. If it runs kernels that were compiled for another GPU, the name says so."""
    memory_bytes: Whole
    """The memory that a program can use, including the driver's context."""


class FitCell(Struct, frozen=True, kw_only=True):
    """Whether a case fits a GPU, and the memory that it needs there."""

    case: Case
    gpu: str
    """The marker of the GPU."""
    fit: Fit | None
    """Whether the case fits; None if there are no figures."""
    needed_bytes: Whole | None
    """The memory that nvidia-smi would show; if the case does not fit, that without a limit."""
    figures: EmulatedRun | None
    """The figures of the case on an emulated GPU that has as much memory as the case takes."""
    failure: str = ""
    """Why there are no figures."""
    remedy: str = ""
    """The cheapest change under which it surely fits, or that none is enough; of the smallest batch that does not."""


class LargestBatch(Struct, frozen=True, kw_only=True):
    """The largest batch of a case that fits a GPU."""

    case: Case
    """The case with that batch; with a batch of one if none fits."""
    gpu: str
    batch_size: Whole
    """0 if not even one sample fits."""
    needed_bytes: Whole | None
    """The memory with that batch."""
    perhaps: Whole
    """The largest batch among the given cases that is within the error; 0 for none."""
    is_bound: bool
    """Whether the search ended there, so that more might fit."""
    failure: str = ""
    """Why the search ended without an answer."""


class FitReport(Struct, frozen=True, kw_only=True):
    """The document of ``gputrain predict --json``: which cases fit which GPUs, and up to which batch."""

    format: int = FORMAT
    generator: str
    model: str
    gpus: tuple[FitGpu, ...]
    error: float
    """The error of memory as a ratio, which decides ``within-error``."""
    knobs: tuple[str, ...]
    """Fields of the cases that tell the cells apart."""
    sort: Literal["", "speed"] = ""
    """How the expected times are sorted: ``speed`` for the most tokens or samples a second first."""
    packages: dict[str, str]
    """Versions of the libraries that the figures belong to."""
    cells: tuple[FitCell, ...]
    largest: tuple[LargestBatch, ...]
    left_out: tuple[str, ...]
    """Sentences about combinations that cannot be."""
    about: tuple[str, ...] = ()
    """Sentences about the model and the GPUs."""
