"""Reads and writes recorded predictions, as the only module: ``<dir>/predicted/<platform>/<suite>.json``, reviewed in git.

A prediction depends on the versions of the libraries that it ran and on what is known of the platform. These are its
conditions, stored once and referred to by a short hash; a case has a prediction for each of the last few of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from pytest_gputrain.records import FORMAT, Case, Prediction, Scale
from pytest_gputrain.records.recorded import Conditions, Recorded, conditions
from pytest_gputrain.storage.baselines import (
    RECORD_ENTRY,
    RESTORE,
    BaselineError,
    decode,
    path_in,
    refuse_renamed,
    refuse_unknown,
)
from pytest_gputrain.utils import json_text
from pytest_gputrain.utils.files import locked, sweep, write_atomically

MOST_CONDITIONS: Final = 4
"""Predictions that are kept of a case, for test environments that differ in their libraries."""

FOLDER: Final = "predicted"
"""Beside the folders of devices."""


class _StoredCase(Struct, kw_only=True, forbid_unknown_fields=True):
    case: Case
    scale: Scale
    predictions: dict[str, dict[str, Any]]
    """Fields of `Prediction` but for its conditions, by reference to these."""


class _File(Struct, kw_only=True, forbid_unknown_fields=True):
    format: int
    platform: str
    suite: str
    conditions: dict[str, Conditions]
    cases: dict[str, _StoredCase]


class PredictionStore:
    """Recorded predictions in a folder of baselines, each file read once."""

    def __init__(self, baselines: Path) -> None:
        self.folder = baselines / FOLDER
        self._files: dict[tuple[str, str], dict[str, Recorded]] = {}

    def path(self, platform: str, suite: str) -> Path:
        """Raises:
        BaselineError: no place in the folder.
        """
        return path_in(self.folder.parent, self.folder.name, platform, suite)

    def has_platform(self, platform: str) -> bool:
        return any((self.folder / platform).glob("*.json"))

    def get(self, platform: str, suite: str, key: str) -> Recorded | None:
        """What is recorded of a case, None where nothing is.

        Raises:
            BaselineError: the file is there but cannot be read.
        """
        return self.suite(platform, suite).get(key)

    def suite(self, platform: str, suite: str) -> Mapping[str, Recorded]:
        """All that is recorded of a suite, by key.

        Raises:
            BaselineError: as of `get`.
        """
        if (platform, suite) not in self._files:
            self._files[platform, suite] = _load(self.path(platform, suite), platform)
        return self._files[platform, suite]

    def update(self, platform: str, suite: str, entries: Mapping[str, Recorded]) -> Path:
        """Put the predictions of ``entries`` in place of those under the same conditions, keep all others, return the file.

        Raises:
            BaselineError: the present file cannot be read, or the new one cannot be written; nothing has changed then.
        """
        path = self.path(platform, suite)
        try:
            with locked(path):
                merged = _load(path, platform)
                for key, entry in entries.items():
                    merged[key] = _merged(merged.get(key), entry)
                sweep(path)
                write_atomically(path, _encode(platform, suite, merged))
        except OSError as error:
            raise BaselineError(f"the baseline file {path} cannot be written: {error.strerror or error}") from error
        self._files[platform, suite] = merged
        return path


def rewritten(path: Path) -> bytes:
    """A file of recorded predictions as `PredictionStore.update` would write it again.

    Raises:
        BaselineError: it cannot be read.
    """
    platform = path.parent.name
    return _encode(platform, path.stem, _load(path, platform))


def _merged(before: Recorded | None, new: Recorded) -> Recorded:
    if before is None or before.case.identity() != new.case.identity():
        return new
    replaced = [conditions(prediction) for prediction in new.predictions]
    kept = [prediction for prediction in before.predictions if conditions(prediction) not in replaced]
    return msgspec.structs.replace(new, predictions=(*kept, *new.predictions)[-MOST_CONDITIONS:])


def _load(path: Path, platform: str) -> dict[str, Recorded]:
    if not path.exists():
        return {}
    file = decode(path, _File, "a file of recorded predictions")
    if (file.platform, file.suite) != (platform, path.stem):
        raise BaselineError(
            f"the baseline file {path} says that it holds {file.suite} on {file.platform}; move it to where it belongs, or "
            "record again"
        )
    for key, stored in file.cases.items():
        refuse_renamed(path, key, stored.case.precision, RECORD_ENTRY)
        if not stored.predictions or key.endswith("@tiny") != (stored.scale == "tiny"):
            what = f"the scale {stored.scale}" if stored.predictions else "no prediction"
            raise BaselineError(f"the baseline file {path} gives {key} {what}; {RESTORE}")
    return {
        key: Recorded(
            case=stored.case,
            scale=stored.scale,
            predictions=tuple(
                _prediction(path, key, reference, fields, file.conditions)
                for reference, fields in stored.predictions.items()
            ),
        )
        for key, stored in file.cases.items()
    }


def _prediction(
    path: Path, key: str, reference: str, fields: Mapping[str, Any], stored_conditions: Mapping[str, Conditions]
) -> Prediction:
    if reference not in stored_conditions:
        raise BaselineError(
            f"the baseline file {path} refers to the conditions {reference!r} in {key}, which it does not hold; {RESTORE}"
        )
    try:
        prediction = msgspec.convert({**fields, **msgspec.to_builtins(stored_conditions[reference])}, Prediction)
    except msgspec.ValidationError as error:
        raise BaselineError(f"the baseline file {path} holds no sound prediction for {key}: {error}; {RESTORE}") from None
    refuse_unknown(path, f"the prediction for {key}", fields, prediction)
    if _has_negative(fields):
        raise BaselineError(f"the baseline file {path} holds impossible figures for {key}; {RESTORE}")
    return prediction


def _has_negative(value: Any) -> bool:
    """Whether any number in there is below zero, which no figure of a prediction is."""
    if isinstance(value, Mapping):
        return any(map(_has_negative, value.values()))
    if isinstance(value, list):
        return any(map(_has_negative, value))
    return isinstance(value, int | float) and value < 0


def _encode(platform: str, suite: str, recorded: Mapping[str, Recorded]) -> bytes:
    stored_conditions: dict[str, Conditions] = {}
    cases = {}
    for key in sorted(recorded):
        entry = recorded[key]
        predictions = {}
        for prediction in entry.predictions:
            under = conditions(prediction)
            digest = hashlib.sha256(msgspec.json.encode(under, order="sorted")).hexdigest()[:8]
            stored_conditions[digest] = under
            fields = msgspec.to_builtins(prediction)
            predictions[digest] = {name: value for name, value in fields.items() if name not in Conditions.__struct_fields__}
        cases[key] = _StoredCase(case=entry.case, scale=entry.scale, predictions=predictions)
    ordered = {digest: stored_conditions[digest] for digest in sorted(stored_conditions)}
    return json_text.whole(_File(format=FORMAT, platform=platform, suite=suite, conditions=ordered, cases=cases))
