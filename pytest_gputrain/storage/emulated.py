"""Keeps runs on emulated GPUs, in a folder beside those of measured baselines: ``<dir>/emulated/<platform>/<suite>.json``.

What they depend on beside the case are the versions of the libraries that ran and what is known of the platform; many cases
share these conditions. A case has figures for each of the last few.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from msgspec import Struct

from pytest_gputrain.records import Case, EmulatedRun, Recorded, Scale
from pytest_gputrain.records.emulated import EmulatedConditions
from pytest_gputrain.storage.baselines import SuiteStore

EMULATED: Final = "emulated"
"""The folder beside those of devices."""

MOST_CONDITIONS: Final = 4
"""Figures that are kept of a case, for test environments that differ in their libraries."""

_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(EmulatedRun)}
_LEFT_OUT: Final = (
    "counts",
    "trained",
    "batch_shapes",
    "evaluation_counts",
    "memory_of_steps",
    "kept_behind",
    "heap_growth",
    "allowed_growth",
    "peak_bytes_by_origin",
    "estimated_bytes",
    "expected",
)
"""Fields that files have only where they have a value. Files that are older than a field have none, and are as an update
writes them."""


class _File(Struct):
    format: int
    platform: str
    suite: str
    conditions: dict[str, Any]
    """Fields of the conditions, by reference."""
    cases: dict[str, msgspec.Raw]
    """Each a `_StoredCase`."""


class _StoredCase(Struct):
    case: Case
    scale: Scale
    runs: dict[str, dict[str, Any]]
    """Fields of `EmulatedRun` but for its conditions, by reference to these."""


class EmulationStore(SuiteStore[Recorded, EmulatedRun]):
    """The runs on emulated GPUs, whose devices are platforms. An update replaces runs under the same conditions."""

    parent = (EMULATED,)
    what = "a file of figures of an emulated GPU"
    entry = "run"
    shared = "conditions"
    file_type = _File
    case_type = _StoredCase
    entry_type = EmulatedRun
    shared_type = EmulatedConditions

    def _record(self, device: str, case: Case, scale: Scale, entries: tuple[EmulatedRun, ...]) -> Recorded:
        return Recorded(case=case, scale=scale, figures=entries)

    def _entries(self, record: Recorded) -> tuple[EmulatedRun, ...]:
        return record.figures

    def _shared(self, entry: EmulatedRun) -> Struct:
        return entry.conditions

    def _own(self, entry: EmulatedRun) -> dict[str, Any]:
        fields, shared = msgspec.to_builtins(entry), self.shared_type.__struct_fields__
        return {
            name: value
            for name, value in fields.items()
            if name not in shared and (name not in _LEFT_OUT or value not in (None, (), [], {}, _DEFAULTS[name]))
        }

    def _stored(self, entries: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        return dict(entries)

    def _references(self, stored: dict[str, dict[str, Any]]) -> Iterable[tuple[Any, dict[str, Any]]]:
        return stored.items()

    def _joined(self, own: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
        return {**own, **shared}

    def _merged(self, before: Recorded | None, new: Recorded) -> Recorded:
        new = msgspec.structs.replace(new, figures=tuple(run.as_stored() for run in new.figures))
        if before is None or before.case.identity() != new.case.identity():
            return new
        if all(figures in before.figures for figures in new.figures):
            return before
        replaced = [figures.conditions for figures in new.figures]
        kept = [figures for figures in before.figures if figures.conditions not in replaced]
        return msgspec.structs.replace(new, figures=(*kept, *new.figures)[-MOST_CONDITIONS:])

    def _is_possible(self, entry: EmulatedRun) -> bool:
        return entry.peak_allocated_bytes <= entry.peak_reserved_bytes
