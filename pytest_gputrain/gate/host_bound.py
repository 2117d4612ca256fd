"""Tells whether the GPU or the host decides how long a step takes, and what its seconds are held to then. Pure.

The busy share of a step is that of its GPU seconds in its wall seconds. Where it is low, the GPU waits for the host, and
wall seconds are those of the host: they differ by 30 % between machines of one name and one model of CPU
(docs/how-true.md), and by 20 % between steps. `tools/measure_gate.py` simulates both and prints how often the rules are
wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import UNSET

from pytest_gputrain.records import BaselineRun, Measurement

WHY_GPU_SECONDS_ARE_HELD_COARSELY: Final = "their noise has not been measured yet"
"""Why GPU seconds are not held to the time tolerance, but to `COARSE_GPU_TOLERANCE`. If this text is empty, they are held to
it: ``tools/gpu_session.py --plan time`` measures on a GPU whether it may be empty."""
COARSE_GPU_TOLERANCE: Final = 0.10
"""The least tolerance of GPU seconds until their noise is measured: four times `GPU_PRIOR_SD`, and five times the largest
noise that `tools/measure_gate.py` assumes. Without it a GPU that becomes slower would pass on another machine."""
GPU_BOUND: Final = 0.95
"""The busy share from which on wall seconds are judged by the time tolerance."""
_CHANGED_BELOW: Final = 0.85
"""A step has changed if one of the baseline and today is at or above `GPU_BOUND`, and the other below this share."""
LEAST_HOST_TOLERANCE: Final = 0.10
"""The least tolerance of the wall seconds of a step that waits for the host, on the machine of its baseline."""
_HELD_UP: Final = 0.05
"""Other programs use the host if the training waits longer for a CPU core than in its baseline, by this share of the time. A
baseline without this figure counts as one that did not wait."""
HOST_PRIOR_SD: Final = 0.06
"""The standard deviation of such wall seconds between processes: s0 of `pytest_gputrain.gate.step_times`."""
GPU_PRIOR_SD: Final = 0.025
"""The standard deviation of GPU seconds between processes, until it is measured. With this value 0.03 % of unchanged cases
fail if the true one is 2 %; with 0.01, 0.5 % would fail."""

_Runs = Sequence[Measurement] | Sequence[BaselineRun]


class Pace(NamedTuple):
    """The share of a step in which the GPU is busy, in the baseline and today."""

    share: float | None
    """The share in the baseline. None if neither the baseline nor today's runs have GPU seconds."""
    now: float | None = None
    """The share today; None if it is not known."""
    with_others: bool = False
    """Whether the GPU also exchanges data with others."""

    @property
    def is_host_bound(self) -> bool:
        return self.share is not None and self.share < GPU_BOUND

    @property
    def changed(self) -> bool:
        """Whether the GPU decided the time of a step in the baseline and the host does today, or the other way round."""
        if self.share is None or self.now is None:
            return False
        return min(self.share, self.now) < _CHANGED_BELOW and max(self.share, self.now) >= GPU_BOUND

    def __str__(self) -> str:
        """Describe how much the GPU waits: ``the GPU waits for the host in 77 % of this step``."""
        assert self.share is not None
        waiting, today = map(_waiting, (self.share, self.now or 0.0))
        whom = "the host or other GPUs" if self.with_others else "the host"
        return f"the GPU waits for {whom} in {waiting} of this step{f', and in {today} today' if self.changed else ''}"


def _waiting(share: float) -> str:
    return f"{100 * max(0.0, 1 - share):.0f} %"


def gpu_seconds(runs: _Runs) -> list[float]:
    """Return the median GPU seconds of a step, for each of the runs that has them."""
    return [statistics.median(run.gpu_steps.seconds) for run in runs if run.gpu_steps]


def pace(fitted: Sequence[BaselineRun], measured: Sequence[Measurement] = ()) -> Pace:
    """Return the shares of a step in which the GPU is busy, of a baseline and of today's runs.

    Of a baseline without GPU seconds it is the share that today's would have been of its step, which is right as long as the
    GPU does the same work, or today's own if that is more: then the GPU does less.
    """
    before, now = _busy_share(fitted), _busy_share(measured)
    if before is None and now is not None:
        before = statistics.median(gpu_seconds(measured))
        before = max(now, before / statistics.median(statistics.median(run.step_seconds) for run in fitted))
    steps = [*(run.gpu_steps for run in fitted), *(run.gpu_steps for run in measured)]
    return Pace(before, now, any(any(profiled.collective_seconds) for profiled in steps if profiled))


def _busy_share(runs: _Runs) -> float | None:
    steps = [statistics.median(run.step_seconds) for run in runs if run.gpu_steps]
    shares = [busy / step for busy, step in zip(gpu_seconds(runs), steps, strict=True)]
    return statistics.median(shares) if shares else None


def held_up(measured: Sequence[Measurement], fitted: Sequence[BaselineRun]) -> str:
    """Say that other programs took more of the cores in today's runs than in the baseline's; empty if they did not."""
    before, waiting = (statistics.median(run.core_wait_share or 0.0 for run in runs) for runs in (fitted, measured))
    if waiting - before < _HELD_UP:
        return ""
    against = f" ({100 * before:.0f} % before)" if before else ""
    return f"while it waited for a CPU core in {100 * waiting:.0f} % of the time{against}"


def other_host(measured: Sequence[Measurement], fitted: Sequence[BaselineRun]) -> str:
    """Say how the host of today's runs differs from that of the baseline, ``on another machine``; empty if it does not.

    Names, models of CPU and numbers of cores do not tell: three virtual machines with the same differed by 28 %. GPUs do.
    """
    here, recorded = measured[0].environment, [run.environment.gpu_digests for run in fitted]
    if here.gpu_digests is UNSET or UNSET in recorded:
        return "on a machine that may be another one"
    known = {digest for digests in recorded for digest in digests or ()}
    return "" if known & set(here.gpu_digests) else "on another machine"
