"""Makes grids of cases: the product of some fields' values over a base case."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pytest_gputrain.records import Case
from pytest_gputrain.records.case import IN_EVERY_ID, KNOBS
from pytest_gputrain.utils.suggest import did_you_mean

_FIELDS: Final = frozenset(name for name, knob in KNOBS.items() if knob.settable)


def grid(base: Case, *, platforms: Sequence[str] | None = None, **axes: Iterable[Any]) -> list[Case]:
    """Return a case for each combination of the values of ``axes``. The last axis varies fastest.

    An axis is a field of `Case` with a list of values, and ``base`` has all other fields. The ids show model, method
    (not of own code), precision and, unless it is ``single``, parallel; other axes by name (``...-batch_size=32``).
    ``platforms`` is not an axis: each case gets all of them::

        grid(Case(batch_size=2, sequence_length=8192), model=["llama-3.1-8b"], method=["full", "lora"], platforms=["h100"])

    Raises:
        TypeError: an axis is not a field of `Case`, or is a single string instead of a list.
    """
    for axis, values in axes.items():
        if axis not in _FIELDS:
            raise TypeError(f"grid() has no axis {axis!r}{did_you_mean(axis, sorted(_FIELDS))}")
        if isinstance(values, str):
            raise TypeError(f"grid() takes a list for the axis {axis!r}: {axis}=[{values!r}]")
    if isinstance(platforms, str):
        raise TypeError(f"grid() takes a list of platforms: platforms=[{platforms!r}]")
    named = tuple(dict.fromkeys([*base.named, *(axis for axis in axes if axis not in IN_EVERY_ID)]))
    common: dict[str, Any] = {"named": named}
    if platforms is not None:
        common["platforms"] = tuple(platforms)
    base = base.replace(**common)
    return [base.replace(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
