"""Declaring cases: grids of them, and what is wrong with one."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from pytest_gputrain.architectures import architectures
from pytest_gputrain.records import Case

METHODS: Final = ("full", "lora", "qlora")
PRECISIONS: Final = ("fp32", "bf16", "bf16-amp", "fp16")
PARALLELS: Final = ("single", "fsdp")
OPTIMIZERS: Final = ("adamw", "adamw-fused")

_ALWAYS_IN_ID: Final = ("model", "method", "precision", "parallel")
_FIELDS: Final = frozenset(Case.__struct_fields__) - {"named", "code"}


def grid(base: Case, *, platforms: Sequence[str] | None = None, **axes: Iterable[Any]) -> list[Case]:
    """The product of ``axes`` over ``base``, last axis fastest.

    Every axis is a field of `Case` with its values. Axes other than model, method, precision and parallel appear in the
    ids (``...-batch_size=32``), because they tell the cases apart. ``platforms`` is no axis: all cases get all of them.

        grid(Case(batch_size=2, sequence_length=8192), model=["llama-3.1-8b"], method=["full", "lora"], platforms=["h100"])

    Raises:
        TypeError: an axis is not a field of `Case`, or is a single string instead of a list.
    """
    for axis, values in axes.items():
        if axis not in _FIELDS:
            raise TypeError(f"grid() has no axis {axis!r}{_did_you_mean(axis, sorted(_FIELDS))}")
        if isinstance(values, str):
            raise TypeError(f"grid() takes a list for the axis {axis!r}: {axis}=[{values!r}]")
    if isinstance(platforms, str):
        raise TypeError(f"grid() takes a list of platforms: platforms=[{platforms!r}]")
    named = tuple(dict.fromkeys([*base.named, *(axis for axis in axes if axis not in _ALWAYS_IN_ID)]))
    common: dict[str, Any] = {"named": named}
    if platforms is not None:
        common["platforms"] = tuple(platforms)
    base = base.replace(**common)
    return [base.replace(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def problem(case: Case, markers: Sequence[str]) -> str | None:
    """The first thing that makes ``case`` impossible to run, as one sentence with its remedy; None for a sound case.

    Args:
        markers: the platform markers of the catalog, which lies on a higher floor.
    """
    found = _first_problem(case, markers)
    return None if found is None else " ".join(f"the case {case} {found}".split())


def _first_problem(case: Case, markers: Sequence[str]) -> str | None:
    try:
        msgspec.convert(msgspec.structs.asdict(case), Case)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        return f"has a field of the wrong type: {error}"
    vocabulary: list[tuple[str, str, Iterable[str]]] = [
        ("precision", case.precision, PRECISIONS),
        ("parallel", case.parallel, PARALLELS),
        ("optimizer", case.optimizer, OPTIMIZERS),
        *(("platform", platform, markers) for platform in case.platforms),
    ]
    if case.code:
        vocabulary.append(("method", case.method, ("custom",)))
    else:
        if not case.model:
            return f"names no model; known: {', '.join(architectures())}"
        vocabulary.insert(0, ("model", case.model, architectures()))
        vocabulary.insert(1, ("method", case.method, METHODS))
    for field, value, names in vocabulary:
        known = tuple(names)
        if value not in known:
            hint = _did_you_mean(value, known)
            return f"names the unknown {field} {value!r}{hint}; known: {', '.join(known)}"
    return _bad_number(case)


def _bad_number(case: Case) -> str | None:
    least = {"gpus": 1, "batch_size": 1, "gradient_accumulation": 1, "steps": 1, "warmup": 0, "sequence_length": 0}
    if not case.code:
        least["sequence_length"] = 2
    for field, bound in least.items():
        if getattr(case, field) < bound:
            return f"has {field}={getattr(case, field)}; it must be at least {bound}"
    if case.parallel == "single" and case.cpu_offload:
        return "asks for cpu_offload, which parallel='single' does not do; choose parallel='fsdp'"
    if case.parallel == "single" and case.gpus > 1:
        return f"asks for {case.gpus} GPUs, but parallel='single' uses one; choose a parallelism"
    return None


def differences(one: Case, other: Case) -> str:
    """``batch_size 2 -> 4, optimizer adamw -> adamw-fused`` for the fields of identity in which two cases differ."""
    before, after = one.identity(), other.identity()
    names = [name for name in Case.__struct_fields__ if before.get(name) != after.get(name)]
    return ", ".join(f"{name} {getattr(one, name)} -> {getattr(other, name)}" for name in names)


def same_id(suite: str, first: Case, second: Case) -> str:
    """The sentence for two different cases with one id."""
    return (
        f"two different cases of the suite {suite} have the id {second} ({differences(first, second)}): they would share "
        "one baseline; vary the difference in a grid, which puts it into the ids, or name one by model=..."
    )


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
