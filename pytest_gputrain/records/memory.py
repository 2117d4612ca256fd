"""Defines the phases of training, and the tensors that are live at the peak of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

from pytest_gputrain.records.whole import Whole

TrainingPhase = Literal["build", "forward", "backward", "between", "optimizer", "evaluate", "checkpoint", "checkpoint_host"]
"""``forward`` is a step before its first backward pass; recomputation of activations is part of ``backward``. ``between`` is
what a step does after its first backward pass and outside of backward passes and optimizers: it clips gradients, or runs the
forward pass of the second loss of a GAN. ``evaluate`` and ``checkpoint`` are an evaluation and the saving of a checkpoint;
``checkpoint_host`` is the memory of the host in tensors while a checkpoint of a GPU is saved."""

BESIDE_STEPS: Final[frozenset[TrainingPhase]] = frozenset({"evaluate", "checkpoint", "checkpoint_host"})
"""The phases of what a training does beside its steps, which are no part of the peak of training."""


def peak_phase_of(peaks: Mapping[TrainingPhase, int]) -> TrainingPhase | None:
    """Return the first phase of a step with the highest peak; None if the peaks of phases are unknown."""
    of_steps = {phase: peak for phase, peak in peaks.items() if phase != "build" and phase not in BESIDE_STEPS}
    return max(of_steps, key=of_steps.__getitem__, default=None)


class LiveTensor(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tensors of one shape that one operator made in one phase, and that were live at the peak. A row without a shape adds
    up all smaller tensors of the operator."""

    bytes: Whole
    """The memory of all of them."""
    count: Whole
    """The number of tensors."""
    operator: str
    """The operator that made them."""
    phase: TrainingPhase
    """The phase that made them."""
    shape: tuple[Whole, ...]
    """The shape of each; empty for tensors of several shapes."""
    dtype: str
    """The type of the tensors; empty for the row that adds up tensors of several shapes."""
    lines: tuple[str, ...] = ()
    """The lines of your own files that made them, as ``tests/test_mine.py:41``, if memory was counted. Baselines keep no
    lines, because lines move."""


def without_lines(largest: Mapping[TrainingPhase, Sequence[LiveTensor]]) -> dict[TrainingPhase, tuple[LiveTensor, ...]]:
    """Return the rows as baselines keep them."""
    return {phase: tuple(msgspec.structs.replace(row, lines=()) for row in rows) for phase, rows in largest.items()}
