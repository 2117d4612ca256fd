"""Seeds the random numbers of own code, so that its data do not depend on what was drawn before the training."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import numpy
import torch
from torch.optim.optimizer import Optimizer

SEED: Final = 20_240_101


_seed, _seed_numpy = random.seed, numpy.random.seed


def seed_python() -> None:
    """Set the seeds of Python's and NumPy's random numbers, in a process of a case."""
    _seed(0)
    _seed_numpy(0)


class Seeds:
    """Sets the seeds of own code again when an optimizer is made, and before the first step after the build. So later data
    do not depend on how many numbers the build has drawn.

    What the program seeds itself stays as it is.

    Args:
        of_python: whether the process is the case's own, so that Python's and NumPy's random numbers are, too.
    """

    def __init__(self, *, of_python: bool) -> None:
        self._times = 0
        self._of_python = of_python
        self._is_build = True

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Provide a context that records which optimizers are made and which seeds the program sets. Own code must be
        imported in it."""
        make = Optimizer.__init__

        def making(optimizer: Optimizer, *arguments: Any, **options: Any) -> None:
            make(optimizer, *arguments, **options)
            if self._is_build:
                self._set()

        def noted(seed: Callable[..., None]) -> Callable[..., None]:
            def seeding(*arguments: Any, **options: Any) -> None:
                self._of_python = False
                seed(*arguments, **options)

            return seeding

        with (
            mock.patch.object(Optimizer, "__init__", making),
            mock.patch.object(random, "seed", noted(_seed)),
            mock.patch.object(numpy.random, "seed", noted(_seed_numpy)),
        ):
            yield

    def end_build(self) -> None:
        """Note that the next step is the first after the build."""
        self._set()
        self._is_build = False

    def _set(self) -> None:
        """Set all seeds that the program has not set. torch's seed is another one each time."""
        if torch.initial_seed() == SEED + self._times:
            self._times += 1
            torch.manual_seed(SEED + self._times)
        if self._of_python:
            seed_python()
