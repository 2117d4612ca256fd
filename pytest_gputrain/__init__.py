"""GPU training benchmarks as test cases: measured in a process of their own, judged against stored baselines."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gputrain.cases.grid import grid
    from pytest_gputrain.cases.script import Script
    from pytest_gputrain.records import (
        BatchSearch,
        Case,
        Crashed,
        Emulated,
        Environment,
        LossStudy,
        Lost,
        Measured,
        Measurement,
        OutOfMemory,
        Report,
        Result,
        TimedOut,
        Verdict,
    )
    from pytest_gputrain.utils.units import GiB, KiB, MiB

__all__ = [
    "BatchSearch",
    "Case",
    "Crashed",
    "Emulated",
    "Environment",
    "GiB",
    "KiB",
    "LossStudy",
    "Lost",
    "Measured",
    "Measurement",
    "MiB",
    "OutOfMemory",
    "Report",
    "Result",
    "Script",
    "TimedOut",
    "Verdict",
    "grid",
]

if not TYPE_CHECKING:  # A type checker would take any name for one of this package.

    def __getattr__(name):
        """Import a public name when it is asked for: pytest imports this package in every project that has it installed."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = {"grid": "cases.grid", "Script": "cases.script"}.get(name) or (
            "utils.units" if name in ("GiB", "KiB", "MiB") else "records"
        )
        # The name is not stored in this module, because pytester removes imported modules after a run, and the next run
        # makes new classes.
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)

    def __dir__():
        return sorted({*globals(), *__all__})
