"""Defines what the package knows of a knob of a case beside its type, its default and its docstring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_type_hints


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """A knob: which values it takes, what it excludes, and where it is written."""

    words: tuple[str, ...] = ()
    """The words that it takes, if it takes words; an empty one is the default."""
    least: int = 0
    """The least that a whole number may be."""
    accepts: Callable[[Any], bool] | None = None
    """Whether a value is accepted, where no other field says so."""
    must: str = ""
    """What a value must be that `accepts` refuses, as the rest of a sentence."""
    parallel: tuple[str, ...] = ()
    """The parallelisms that know it; empty for all."""
    methods: tuple[str, ...] = ()
    """The methods that know it; empty for all."""
    own_code: str = ""
    """Why own code cannot follow it, and what to do instead, as the rest of a sentence; empty if it can."""
    size: int | str = 0
    """An example, if it sets the size of a model's inputs."""
    identity: bool = True
    """Whether cases that differ in it measure different things."""
    in_every_id: bool = False
    """Whether every id shows its value without its name."""
    settable: bool = True
    """Whether grids, ``--gpu-set`` and tests set it; the package alone sets the others."""
    in_history: bool = True
    """Whether the lines of the history have it as a key."""
    type: Any = None
    """The type of the knob in Python, without bounds."""
    default: Any = None

    @property
    def history_type(self) -> Any:
        """The type of the knob in a line of the history, where a column has one type: a number if the knob may be one."""
        if self.type == bool | float:
            return float
        return self.type

    def in_line(self, value: Any) -> Any:
        """Return a value as the lines of the history have it."""
        return float(value) if self.history_type in (float, float | None) and value is not None else value


def knobs_of(case: type) -> dict[str, Knob]:
    """Return what the annotations of a case's fields say, by the names of the fields."""
    plain, defaults = get_type_hints(case), case()
    return {
        name: replace(
            next((part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Knob)), Knob()),
            type=plain[name],
            default=getattr(defaults, name),
        )
        for name, hint in get_type_hints(case, include_extras=True).items()
    }
