"""Keeps recorded predictions: ``<dir>/predicted/<platform>/<suite>.json``, reviewed in git.

A prediction depends on the versions of the libraries that it ran and on what is known of the platform: its conditions.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from pytest_gputrain.records import Case, Prediction, Scale
from pytest_gputrain.records.recorded import Conditions, Recorded, conditions
from pytest_gputrain.storage.by_conditions import StoreByConditions

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


class PredictionStore(StoreByConditions[Recorded, Prediction]):
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

    def _is_possible(self, entry: Prediction) -> bool:
        return entry.roofline_seconds is None or entry.roofline_seconds >= 0
