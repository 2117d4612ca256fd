"""Turns arguments of own code into the text by which they reach its worker, and refuses what has none."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from pytest_gputrain.utils.errors import BadCase


def arguments_of(builder: Callable[..., Any], args: object) -> str:
    """Return the keyword arguments of a function as JSON, the same for the same arguments; empty for none.

    Raises:
        BadCase: one of them is no plain value, or the function does not take them.
    """
    name = getattr(builder, "__name__", type(builder).__name__)
    if not isinstance(args, Mapping):
        raise BadCase(f"args of {name} is {_described(args)}; give its keyword arguments as a dict, as args={{'width': 64}}")
    for place, value in _foreign(args, "args"):
        raise BadCase(
            f"{place} of {name} is {_described(value)}, which cannot be passed to the process that trains; pass plain "
            f"values (text, numbers, lists, dicts) from which {name} makes it, or measure a closure over it with inline=True"
        )
    parameters = inspect.signature(builder)
    if not parameters.parameters:
        raise BadCase(f"{name} has no parameter for its setup; write def {name}(setup), which has the device, for example")
    try:
        parameters.bind(None, **args)
    except TypeError as error:
        raise BadCase(f"{name} does not take these args after its setup: {error}") from None
    return msgspec.json.encode(args, order="deterministic").decode() if args else ""


def _foreign(value: object, place: str) -> Iterator[tuple[str, object]]:
    """Yield the values that JSON cannot hold, each with its place."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            if isinstance(name, str):
                yield from _foreign(part, f"{place}[{name!r}]")
            else:
                yield f"a name in {place}", name
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _foreign(part, f"{place}[{number}]")
    elif not isinstance(value, str | int | None) and not (isinstance(value, float) and math.isfinite(value)):
        yield place, value


def _described(value: object) -> str:
    """Describe an argument: ``a Tensor``, ``the function tokenizer`` or ``nan``."""
    if inspect.isroutine(value) or inspect.isclass(value):
        kind = "class" if inspect.isclass(value) else "function"
        name = getattr(value, "__name__", "")
        return "a lambda" if name == "<lambda>" else f"the {kind} {name}"
    if isinstance(value, int | float):
        return str(value)
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"
