"""Keeps the figures of cases on emulated GPUs: ``<dir>/emulated/<platform>/<suite>.json``, reviewed in git."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from pytest_gputrain.records import Case, EmulatedRun, Scale
from pytest_gputrain.records.emulated import EmulatedConditions, RecordedRuns, conditions_of
from pytest_gputrain.storage.by_conditions import StoreByConditions

FOLDER: Final = "emulated"
"""Beside the folders of devices."""


class _StoredCase(Struct, forbid_unknown_fields=True):
    case: Case
    scale: Scale
    runs: dict[str, dict[str, Any]]
    """Fields of `EmulatedRun` but for its conditions, by reference to these."""


class _File(Struct, forbid_unknown_fields=True):
    format: int
    platform: str
    suite: str
    conditions: dict[str, Any]
    """Fields of `EmulatedConditions`."""
    cases: dict[str, msgspec.Raw]
    """Each a `_StoredCase`."""


class EmulationStore(StoreByConditions[RecordedRuns, EmulatedRun]):
    """Recorded runs on emulated GPUs."""

    parent = (FOLDER,)
    what = "a file of figures of an emulated GPU"
    option = "--gpu-emulate --gpu-baseline-update"
    entry = "run"
    shared = "conditions"
    file_type = _File
    case_type = _StoredCase
    entry_type = EmulatedRun
    shared_type = EmulatedConditions

    def _record(self, device: str, case: Case, scale: Scale, entries: tuple[EmulatedRun, ...]) -> RecordedRuns:
        return RecordedRuns(case=case, scale=scale, runs=entries)

    def _entries(self, record: RecordedRuns) -> tuple[EmulatedRun, ...]:
        return record.runs

    def _shared(self, entry: EmulatedRun) -> EmulatedConditions:
        return conditions_of(entry)

    def _is_possible(self, entry: EmulatedRun) -> bool:
        return entry.peak_allocated_bytes <= entry.peak_reserved_bytes
