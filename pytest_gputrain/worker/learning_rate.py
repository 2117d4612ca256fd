"""Makes the scheduler of a case's learning rate, which acts after every update."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pytest_gputrain.records import Case
from pytest_gputrain.worker.loop import lead_in, schedule, timed_steps


def is_scheduled(case: Case) -> bool:
    """Tell if the learning rate changes."""
    return case.lr_scheduler != "constant" or case.lr_warmup_steps > 0


def scheduler(case: Case, optimizer: Optimizer) -> LambdaLR:
    """Return the scheduler of ``optimizer``, whose first update already uses the first rate."""
    return LambdaLR(optimizer, lambda update: factor(case, update))


def factor(case: Case, update: int) -> float:
    """Return the factor of the learning rate in an update, whose number begins with 0.

    The factors are those of diffusers' ``get_scheduler``, except in the warm-up, whose first update has a rate of 0 there
    and changes nothing. The rate falls over the updates of the case's warm-up and timed steps, and is 0 for all later ones.
    """
    if update < case.lr_warmup_steps:
        return (update + 1) / case.lr_warmup_steps
    if case.lr_scheduler == "constant":
        return 1.0
    parts = (case.warmup, lead_in(case), timed_steps(case))
    updates = sum(sum(schedule(steps, case.gradient_accumulation)) for steps in parts)
    done = min(1.0, (update - case.lr_warmup_steps) / max(1, updates - case.lr_warmup_steps))
    return 1 - done if case.lr_scheduler == "linear" else (1 + math.cos(math.pi * done)) / 2
