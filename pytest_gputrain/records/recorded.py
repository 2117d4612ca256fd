"""Defines the records of stored predictions: those of a case, and the conditions that they depend on."""

from __future__ import annotations

from msgspec import Struct

from pytest_gputrain.records import Case, Prediction, Scale, Target


class Recorded(Struct, frozen=True, kw_only=True):
    """What is stored for one case on one platform."""

    case: Case
    scale: Scale
    predictions: tuple[Prediction, ...]
    """One for each set of conditions, the latest recorded last."""

    def like(self, prediction: Prediction) -> Prediction | None:
        """Return the prediction under the same conditions as ``prediction``."""
        return next((candidate for candidate in self.predictions if conditions(candidate) == conditions(prediction)), None)


class Conditions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a prediction depends on, beside the case."""

    packages: dict[str, str]
    target: Target
    processes: int | None = None


def conditions(prediction: Prediction) -> Conditions:
    return Conditions(packages=prediction.packages, target=prediction.target, processes=prediction.processes)
