"""Keeps recorded predictions: ``<dir>/predicted/<platform>/<suite>.json``, reviewed in git.

A prediction depends on the versions of the libraries that it ran and on what is known of the platform. These are its
conditions, which many cases share; a case has a prediction for each of the last few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec
from msgspec import Struct

from pytest_gputrain.records import Case, Prediction, Scale
from pytest_gputrain.records.recorded import Conditions, Recorded, conditions
from pytest_gputrain.storage.baselines import SuiteStore

MOST_CONDITIONS: Final = 4
"""Predictions that are kept of a case, for test environments that differ in their libraries."""

FOLDER: Final = "predicted"
"""Beside the folders of devices."""


class _StoredCase(Struct, forbid_unknown_fields=True):
    case: Case
    scale: Scale
    predictions: dict[str, dict[str, Any]]
    """Fields of `Prediction` but for its conditions, by reference to these."""


class _File(Struct, forbid_unknown_fields=True):
    format: int
    platform: str
    suite: str
    conditions: dict[str, Any]
    """Fields of `Conditions`."""
    cases: dict[str, msgspec.Raw]
    """Each a `_StoredCase`."""


class PredictionStore(SuiteStore[Recorded, Prediction]):
    """Recorded predictions, whose devices are platforms; an update replaces those under the same conditions."""

    parent = (FOLDER,)
    what = "a file of recorded predictions"
    option = "--gpu-predict --gpu-baseline-update"
    entry = "prediction"
    shared = "conditions"
    file_type = _File
    case_type = _StoredCase
    entry_type = Prediction
    shared_type = Conditions

    def _record(self, device: str, case: Case, scale: Scale, entries: tuple[Prediction, ...]) -> Recorded:
        return Recorded(case=case, scale=scale, predictions=entries)

    def _entries(self, record: Recorded) -> tuple[Prediction, ...]:
        return record.predictions

    def _shared(self, entry: Prediction) -> Conditions:
        return conditions(entry)

    def _stored(self, entries: Iterable[tuple[str, Prediction]]) -> dict[str, dict[str, Any]]:
        every = ((reference, msgspec.to_builtins(prediction)) for reference, prediction in entries)
        return {
            reference: {name: value for name, value in fields.items() if name not in Conditions.__struct_fields__}
            for reference, fields in every
        }

    def _fields(self, stored: dict[str, dict[str, Any]], find: Callable[[Any], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return ({**fields, **find(reference)} for reference, fields in stored.items())

    def _is_possible(self, entry: Prediction) -> bool:
        return entry.roofline_seconds is None or entry.roofline_seconds >= 0

    def _merged(self, before: Recorded | None, new: Recorded) -> Recorded:
        if before is None or before.case.identity() != new.case.identity():
            return new
        if all(prediction in before.predictions for prediction in new.predictions):
            return before
        replaced = [conditions(prediction) for prediction in new.predictions]
        kept = [prediction for prediction in before.predictions if conditions(prediction) not in replaced]
        return msgspec.structs.replace(new, predictions=(*kept, *new.predictions)[-MOST_CONDITIONS:])
