"""Defines the records of what own code trains, and of the shapes that it trains on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from msgspec import Struct

from pytest_gputrain.records.whole import Whole

TensorShapes = tuple[tuple[Whole, ...], ...]
"""The shapes of several tensors."""


class TrainedTensors(Struct, frozen=True, kw_only=True):
    """The tensors of a watched model that require a gradient, without those that its test declares to be idle. In the names,
    ``*`` stands for a number."""

    learning: dict[str, Whole] = {}
    """How many tensors got a gradient or changed, by the name of their module."""
    idle: dict[str, Whole] = {}
    """How many did not, by their own name."""


def module_of(name: str) -> str:
    """Return the name of the module that has a tensor. `TrainedTensors` counts tensors by module."""
    return name.rpartition(".")[0]


class BatchShapes(Struct, frozen=True, kw_only=True):
    """The shapes of a watched model's inputs in each step; for a framework's trainer, the shapes of its batches. They are
    noted in all steps except the timed ones."""

    steps: Whole
    """The number of steps in which they were noted."""
    digest: str
    """A digest of the shapes of all these steps."""
    first: tuple[tuple[Whole, TensorShapes], ...] = ()
    """The shapes of the first steps, each with the number of consecutive steps that have them."""
    last: TensorShapes = ()
    """The shapes of the last step, in which FLOPs are counted."""

    def known(self) -> Iterator[TensorShapes]:
        """Return the shapes of the first steps, one step after the other."""
        return itertools.chain.from_iterable(itertools.repeat(shapes, count) for count, shapes in self.first)
