"""Says in one line which part of the programs of its cases a run has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pytest_gputrain.gate.messages import count
from pytest_gputrain.records import Case, Emulated, EmulatedRun, Measured, Measurement, Result, TrainingPhase
from pytest_gputrain.records.step_memory import COUNTED_ROUNDS, counted_steps

_BESIDE_STEPS: Final[dict[TrainingPhase, str]] = {
    "evaluate": "no evaluation was measured",
    "checkpoint": "no checkpoint was measured",
}


def line(results: Sequence[Result]) -> str:
    """Return a line on what was counted and what was left out; empty if nothing was left out.

    All steps of a built-in model are alike, so the first ones stand for all.
    """
    counted: dict[str, list[tuple[int, int]]] = {}
    of_own_code = [(result.case, run) for result in results if (run := _run_of_own_code(result)) is not None]
    for case, run in of_own_code:
        asked = sum(alike.steps for alike in run.memory_of_steps) if case.epoch else case.steps
        for what, steps in _counted(case, run):
            if steps < asked:
                counted.setdefault(what, []).append((steps, asked))
    steps_seen = ", and ".join(f"{what} counted in {_steps(pairs)}" for what, pairs in counted.items())
    left_out = ", and ".join(_left_out([run for _, run in of_own_code]))
    return "; ".join(filter(None, [steps_seen, left_out]))


def _left_out(runs: Sequence[Measurement | EmulatedRun]) -> Iterator[str]:
    """Yield the parts of programs beside their steps, such as evaluations, that these runs left out."""
    for phase, said in _BESIDE_STEPS.items():
        if without := sum(phase not in run.phase_peak_bytes for run in runs):
            yield said if without == len(runs) else f"{said} in {without} of {count(len(runs), 'case')}"


def _steps(pairs: Sequence[tuple[int, int]]) -> str:
    """Say how many steps of each case were counted; if the numbers differ, how many of all cases together."""
    if len(set(pairs)) == 1:
        return f"{pairs[0][0]} of {count(pairs[0][1], 'step')}"
    steps, asked = map(sum, zip(*pairs, strict=True))
    return f"{steps} of {asked} steps in {len(pairs)} cases"


def _run_of_own_code(result: Result) -> Measurement | EmulatedRun | None:
    """Return a run of own code that has figures; None for a script, whose number of steps nobody sets."""
    if not result.case.code or result.case.method == "script":
        return None
    runs = result.replies if isinstance(result, Measured) else [result.figures] if isinstance(result, Emulated) else ()
    return next((run for run in runs if isinstance(run, Measurement) or (isinstance(run, EmulatedRun) and run.fits)), None)


def _counted(case: Case, run: Measurement | EmulatedRun) -> Iterator[tuple[str, int]]:
    """Yield what was counted in a run, and in how many of its steps."""
    if run.memory_of_steps:
        yield "memory was", counted_steps(run.memory_of_steps)
    elif isinstance(run, Measurement) and run.environment.device_type == "cpu":
        yield "memory was", COUNTED_ROUNDS * case.gradient_accumulation
    if run.counts is not None:
        yield "operators and reads were" if run.counts.on_cpu else "requests to the GPU were", len(run.counts.steps)
