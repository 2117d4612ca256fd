"""GPU training benchmarks as test cases: measured in a process of their own, judged against stored baselines."""

from pytest_gputrain.cases.grid import grid
from pytest_gputrain.records import (
    Case,
    Crashed,
    Environment,
    Lost,
    Measurement,
    OutOfMemory,
    Report,
    Result,
    TimedOut,
    Verdict,
)
from pytest_gputrain.utils.units import GiB, KiB, MiB

__all__ = [
    "Case",
    "Crashed",
    "Environment",
    "GiB",
    "KiB",
    "Lost",
    "Measurement",
    "MiB",
    "OutOfMemory",
    "Report",
    "Result",
    "TimedOut",
    "Verdict",
    "grid",
]
