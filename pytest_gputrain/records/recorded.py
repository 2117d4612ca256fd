"""Defines the record of what is stored of a case without times: its predictions, or its runs on emulated GPUs."""

from __future__ import annotations

from typing import Generic, TypeVar

from msgspec import Struct

from pytest_gputrain.records.case import Case, Scale
from pytest_gputrain.records.emulated import EmulatedRun
from pytest_gputrain.records.prediction import Prediction

FiguresT = TypeVar("FiguresT", bound=Prediction | EmulatedRun)
"""Figures that are the same in every process under the same conditions."""


class Recorded(Struct, Generic[FiguresT], frozen=True, kw_only=True):
    """The stored figures of one case on one platform."""

    case: Case
    scale: Scale
    figures: tuple[FiguresT, ...]
    """The figures of each set of conditions, the latest recorded last."""

    def like(self, figures: FiguresT) -> FiguresT | None:
        """Return what is stored under the same conditions."""
        return next((stored for stored in self.figures if stored.conditions == figures.conditions), None)

    def nearest(self, figures: FiguresT) -> FiguresT:
        """Return what is stored with the most libraries alike, and of several the latest."""
        return max(reversed(self.figures), key=lambda stored: len(stored.packages.items() & figures.packages.items()))
