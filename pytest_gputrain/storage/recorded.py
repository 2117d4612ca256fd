"""Keeps figures that depend on nothing but the case and some conditions, in folders beside those of measured baselines.

``<dir>/predicted/<platform>/<suite>.json`` holds predictions, ``<dir>/emulated/<platform>/<suite>.json`` runs on emulated
GPUs. The conditions are the versions of the libraries that ran and what is known of the platform; many cases share them. A
case has figures for each of the last few conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from pytest_gputrain.records import Case, EmulatedRun, Prediction, Scale
from pytest_gputrain.records.emulated import EmulatedConditions
from pytest_gputrain.records.prediction import PredictionConditions
from pytest_gputrain.records.recorded import FiguresT, Recorded
from pytest_gputrain.storage.baselines import SuiteStore

PREDICTED: Final = "predicted"
EMULATED: Final = "emulated"
"""The folders beside those of devices."""

MOST_CONDITIONS: Final = 4
"""Figures that are kept of a case, for test environments that differ in their libraries."""


class _File(Struct, forbid_unknown_fields=True):
    format: int
    platform: str
    suite: str
    conditions: dict[str, Any]
    """Fields of the conditions, by reference."""
    cases: dict[str, msgspec.Raw]
    """Each a `_PredictedCase` or an `_EmulatedCase`."""


class _PredictedCase(Struct, forbid_unknown_fields=True):
    case: Case
    scale: Scale
    predictions: dict[str, dict[str, Any]]
    """Fields of `Prediction` but for its conditions, by reference to these."""


class _EmulatedCase(Struct, forbid_unknown_fields=True):
    case: Case
    scale: Scale
    runs: dict[str, dict[str, Any]]
    """Fields of `EmulatedRun` but for its conditions, by reference to these."""


class RecordedStore(SuiteStore[Recorded[FiguresT], FiguresT]):
    """Figures whose devices are platforms; an update replaces those under the same conditions."""

    shared = "conditions"
    left_out: tuple[str, ...] = ()
    """Fields that files have only where they have a value."""
    file_type = _File

    def _record(self, device: str, case: Case, scale: Scale, entries: tuple[FiguresT, ...]) -> Recorded[FiguresT]:
        return Recorded(case=case, scale=scale, figures=entries)

    def _entries(self, record: Recorded[FiguresT]) -> tuple[FiguresT, ...]:
        return record.figures

    def _shared(self, entry: FiguresT) -> Struct:
        return entry.conditions

    def _stored(self, entries: Iterable[tuple[str, FiguresT]]) -> dict[str, dict[str, Any]]:
        every = ((reference, msgspec.to_builtins(entry)) for reference, entry in entries)
        shared = self.shared_type.__struct_fields__
        return {
            reference: {
                name: value
                for name, value in fields.items()
                if name not in shared and not (name in self.left_out and not value)
            }
            for reference, fields in every
        }

    def _fields(self, stored: dict[str, dict[str, Any]], find: Callable[[Any], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return ({**fields, **find(reference)} for reference, fields in stored.items())

    def _merged(self, before: Recorded[FiguresT] | None, new: Recorded[FiguresT]) -> Recorded[FiguresT]:
        if before is None or before.case.identity() != new.case.identity():
            return new
        if all(figures in before.figures for figures in new.figures):
            return before
        replaced = [figures.conditions for figures in new.figures]
        kept = [figures for figures in before.figures if figures.conditions not in replaced]
        return msgspec.structs.replace(new, figures=(*kept, *new.figures)[-MOST_CONDITIONS:])


class PredictionStore(RecordedStore[Prediction]):
    """Recorded predictions."""

    parent = (PREDICTED,)
    what = "a file of recorded predictions"
    entry = "prediction"
    case_type = _PredictedCase
    entry_type = Prediction
    shared_type = PredictionConditions

    def _is_possible(self, entry: Prediction) -> bool:
        return entry.roofline_seconds is None or entry.roofline_seconds >= 0


class EmulationStore(RecordedStore[EmulatedRun]):
    """Recorded runs on emulated GPUs."""

    parent = (EMULATED,)
    what = "a file of figures of an emulated GPU"
    entry = "run"
    case_type = _EmulatedCase
    entry_type = EmulatedRun
    shared_type = EmulatedConditions
    # Files that are older than the counts have none, and are as an update writes them.
    left_out = ("counts", "peak_bytes_by_origin", "roofline_seconds")

    def _merged(self, before: Recorded[EmulatedRun] | None, new: Recorded[EmulatedRun]) -> Recorded[EmulatedRun]:
        return super()._merged(before, msgspec.structs.replace(new, figures=tuple(run.as_stored() for run in new.figures)))

    def _is_possible(self, entry: EmulatedRun) -> bool:
        return entry.peak_allocated_bytes <= entry.peak_reserved_bytes
