"""Computes the scaling efficiency of a case (weak scaling: the batch of a worker stays the same). Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from pytest_gputrain.records import BaselineRun, Case, Measurement, update_seconds


def one_worker(case: Case) -> Case:
    """Return the case of a single worker that the case with several workers is compared with.

    DistributedDataParallel of one process is a plain training, which may be declared and measured anyway. Engines that
    shard or offload keep doing so: without them the model may not fit, and their knobs are no other engine's. Own code keeps
    its process group, in which it may exchange what it wants.
    """
    plain = case.parallel == "ddp" and not case.code
    return case.replace(gpus=1, parallel="single" if plain else case.parallel)


def efficiencies(case: Case, runs: Iterable[Measurement | BaselineRun]) -> list[float]:
    """Return the throughput of n workers over n times the throughput of one, for each of ``runs`` that has both.

    A worker has the same batch alone and among others, so the ratio is that of the times: one worker's seconds of an update
    over the case's. Of whole updates, because processes that accumulate gradients may exchange them only then.
    """
    return [
        run.one_worker_seconds / seconds
        for run in runs
        if run.one_worker_seconds and (seconds := update_seconds(run.step_seconds, case.gradient_accumulation))
    ]


def efficiency(case: Case, runs: Iterable[Measurement | BaselineRun]) -> float | None:
    """Return the median of `efficiencies`; None if no run has one."""
    values = efficiencies(case, runs)
    return statistics.median(values) if values else None
