"""Chooses cases of a suite so that each value of a field remains, for runs that need not train all that are alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records import Case

SIZES: Final = frozenset({"model", "batch_size", "sequence_length", "resolution", "frames", "steps", "warmup", "platforms"})
"""Fields that do not count: those of size and of platforms, and `model`, of which the class counts."""


def values(case: Case) -> Iterator[tuple[Any, ...]]:
    """Yield what the case has: the class of its model, and each of its other fields that is set, with the model's family."""
    architecture = architectures()[case.model]
    part = architecture.trained_part
    yield ("class", part.model_class or part.config.get("model_type") or part.config.get("_class_name"))
    for name, value in msgspec.structs.asdict(case).items():
        if name not in SIZES and value != getattr(_DEFAULT, name):
            yield (architecture.family, name, str(value))


def one_of_alike(cases: Iterable[Case]) -> Iterator[bool]:
    """Yield for each case in turn whether it has a value that none before it has."""
    seen: set[tuple[Any, ...]] = set()
    for case in cases:
        new = set(values(case)) - seen
        seen |= new
        yield bool(new)


_DEFAULT: Final = Case()
