"""Reads knobs of the command line, as ``batch_size=1,2,4``, and puts their values into the cases of the tests. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.model_config import is_path
from pytest_gputrain.cases.validation import bad_value
from pytest_gputrain.records import Case, knob_text
from pytest_gputrain.records.case import IN_EVERY_ID, KNOBS
from pytest_gputrain.utils.suggest import did_you_mean

Axes = tuple[tuple[str, tuple[Any, ...]], ...]
"""Every knob with its values, in the order given."""

PLATFORMS: Final = "platforms"
"""The field that is no knob, and can be set all the same: its values are one list, not alternatives."""

_TYPES: Final = {
    field.name: field.type
    for field in msgspec.structs.fields(Case)
    if field.name != PLATFORMS and KNOBS[field.name].settable
}


_KINDS: Final[dict[Any, str]] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    bool | float: "true, false or a share from 0 to 1",
    bool | None: "true, false or null",
    float | None: "a number or null",
}


def parse_axes(text: str, markers: Sequence[str]) -> Axes:
    """Return the knobs that ``text`` sets, one ``KNOB=A,B,C`` in each line. Blank lines are ignored.

    Args:
        markers: the platform markers of the catalog, which lies in a higher package.

    Raises:
        ValueError: one sentence that names the knob or the value, and what would be accepted.
    """
    axes: dict[str, tuple[Any, ...]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        knob, equals, values = (part.strip() for part in line.partition("="))
        if not equals or not values:
            raise ValueError(f"{line!r} is not a knob with its values; write it as batch_size=1,2,4")
        if knob not in (*_TYPES, PLATFORMS):
            known = (*_TYPES, PLATFORMS)
            raise ValueError(f"{knob!r} is not a knob of a case{did_you_mean(knob, known)}; known: {', '.join(known)}")
        if knob in axes:
            raise ValueError(f"{knob} is given twice; give all of its values at once, as {knob}=A,B")
        texts = [value.strip() for value in values.split(",")]
        given = tuple(_platform(text, markers) if knob == PLATFORMS else _value(knob, text) for text in texts)
        if len(set(given)) != len(given):
            raise ValueError(f"{line!r} gives a value twice")
        axes[knob] = (given,) if knob == PLATFORMS else given
    return tuple(axes.items())


def _platform(text: str, markers: Sequence[str]) -> str:
    """Return the marker if the catalog has it."""
    if text not in markers:
        raise ValueError(f"the platform {text!r} is unknown{did_you_mean(text, markers)}; known: {', '.join(markers)}")
    return text


def _value(knob: str, text: str) -> Any:
    """Return the value of a knob from its text."""
    choices: Iterable[str] | None = architectures() if knob == "model" else KNOBS[knob].words or None
    if choices is not None and text not in choices and not (knob == "model" and is_path(text)):
        known = ", ".join(filter(None, choices))
        raise ValueError(f"the {knob} {text!r} is unknown{did_you_mean(text, choices)}; known: {known}")
    try:
        value = msgspec.convert(text, _TYPES[knob], strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{knob}={text!r} is not {_KINDS.get(KNOBS[knob].type, 'a value of it')}") from error
    complaint = bad_value(Case(**{knob: value}))
    if complaint:
        raise ValueError(f"a case {complaint}")
    return value


def combinations(axes: Axes) -> list[dict[str, Any]]:
    """Return every combination of the values, the last axis fastest."""
    names = [knob for knob, _ in axes]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in axes))]


def shown(knobs: Mapping[str, Any]) -> str:
    """Return the knobs as ids show them: ``batch_size=4-cpu_offload=true``."""
    return "-".join(f"{knob}={'+'.join(value) if knob == PLATFORMS else knob_text(value)}" for knob, value in knobs.items())


def override(case: Case, knobs: Mapping[str, Any]) -> Case:
    """Return ``case`` with other values for some knobs.

    Those that change appear in its id, so that each has its own baseline; platforms do not, since they change no figure.
    """
    changed = {knob: value for knob, value in knobs.items() if getattr(case, knob) != value}
    named: object = case.named
    if not changed or not isinstance(named, tuple):
        return case.replace(**changed)  # If `named` is not a tuple, the validation of the case refuses it later.
    new = [knob for knob in changed if knob not in (*IN_EVERY_ID, *named, PLATFORMS)]
    return case.replace(**changed, named=(*named, *new))
