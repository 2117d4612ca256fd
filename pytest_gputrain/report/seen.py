"""Says in one line which part of the programs of its cases a run has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_gputrain.gate.messages import count, listed
from pytest_gputrain.records import Emulated, EmulatedRun, Measured, Measurement, Result
from pytest_gputrain.records.step_memory import COUNTED_ROUNDS, counted_steps


def line(results: Sequence[Result]) -> str:
    """Return the line; empty where nothing was left out."""
    seen = phrases(results)
    return f"this run saw {listed(seen)}" if seen else ""


def phrases(results: Sequence[Result]) -> list[str]:
    """Return what a run saw of the programs of its cases, where that is not all: ``memory of 4 of 30 steps``.

    Steps of a built-in model are alike, so that the first ones tell of all.
    """
    counted: dict[str, list[tuple[int, int]]] = {}
    for result in results:
        asked = result.case.steps
        for what, steps in _counted(result):
            if steps < asked:
                counted.setdefault(what, []).append((steps, asked))
    return [f"{what} of {_steps(pairs)}" for what, pairs in counted.items()]


def _steps(pairs: Sequence[tuple[int, int]]) -> str:
    """Say how many steps were counted of those of each case, or of all cases together where they differ."""
    if len(set(pairs)) == 1:
        return f"{pairs[0][0]} of {count(pairs[0][1], 'step')}"
    steps, asked = map(sum, zip(*pairs, strict=True))
    return f"{steps} of {asked} steps in {len(pairs)} cases"


def _counted(result: Result) -> Iterator[tuple[str, int]]:
    """Yield what was counted of a case of own code, and in how many of its steps. Nobody asks a script for a number."""
    runs = result.replies if isinstance(result, Measured) else [result.figures] if isinstance(result, Emulated) else ()
    run = next((run for run in runs if isinstance(run, Measurement | EmulatedRun)), None)
    if run is None or not result.case.code or result.case.method == "script":
        return
    if run.memory_of_steps:
        yield "memory", counted_steps(run.memory_of_steps)
    elif isinstance(run, Measurement) and run.environment.device_type == "cpu":
        yield "memory", COUNTED_ROUNDS * result.case.gradient_accumulation
    if run.counts is not None:
        yield "operators and reads" if run.counts.on_cpu else "requests to the GPU", len(run.counts.steps)
