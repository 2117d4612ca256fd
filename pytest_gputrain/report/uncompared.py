"""Says in one line what a run did not compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from pytest_gputrain.gate.messages import count
from pytest_gputrain.records import Measurement, Result
from pytest_gputrain.report.explanations import METRIC_NAMES

_STATUSES: Final = {
    "new": "without a baseline",
    "not-comparable": "not comparable with the baseline",
    "recorded": "recorded instead",
}


def line(results: Sequence[Result], *, skipped: int = 0, left_out: int = 0, unclaimed: int = 0) -> str:
    """Return the line on what was not compared; empty if everything was.

    Args:
        skipped: tests with cases that were.
        left_out: tests that a marker leaves out of this kind of run.
        unclaimed: baselines that no test asked for.
    """
    cases: Counter[str] = Counter()
    metrics: Counter[str] = Counter()
    for result in results:
        verdict = result.verdict
        if verdict is None:
            continue
        if any(isinstance(reply, Measurement) and reply.uncounted_memory for reply in result.replies):
            metrics["uncounted memory"] += 1
        is_held = verdict.status == "new" and verdict.held_to is not None
        if verdict.status in _STATUSES and not is_held:
            cases[_STATUSES[verdict.status]] += 1
            continue
        missing = {metric.metric for metric in verdict.metrics if metric.status == "not-comparable"}
        missing |= {limit.metric for limit in verdict.limits if limit.status == "not-judged"}
        # An emulated run and a row of another machine do not limit the time.
        missing |= {"step_seconds"} if is_held else set()
        metrics.update(METRIC_NAMES[metric] for metric in sorted(missing))
    parts = [f"{count(number, 'case')} {what}" for what, number in cases.items()]
    parts += [f"{name} of {count(number, 'case')}" for name, number in metrics.items()]
    parts += [f"{count(skipped, 'test')} skipped"] if skipped else []
    parts += [f"{count(left_out, 'test')} left out by gpu_only_on"] if left_out else []
    parts += [f"{count(unclaimed, 'baseline')} that no test asked for"] if unclaimed else []
    return f"not compared: {', '.join(parts)}" if parts else ""
