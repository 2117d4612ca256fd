"""One-process reference trainings, which cases of several processes are compared with."""

import torch

from pytest_gputrain.worker import training as recipe
from pytest_gputrain.worker.learning_rate import factor
from pytest_gputrain.worker.run import SEED


def alone(case):
    return case.replace(parallel="single", gpus=1, servers=0, compile="off")


def losses_of_one_process(case, updates=None):
    """Timed losses of a plain training on the batches of all workers at once.

    Args:
        updates: for each step, whether the optimizer acts at its end; where left out, it does at all.
    """
    updates = updates or [True] * (2 + case.warmup + case.steps)  # two counted steps come first
    torch.manual_seed(SEED)
    training = recipe.Training(alone(case), "tiny", torch.device("cpu"))
    batches = []
    for rank in range(case.gpus):
        torch.manual_seed(SEED + rank)
        batches.append(training._workload.batch(torch.device("cpu")).inputs)
    optimizer = recipe.OPTIMIZERS[case.optimizer](list(training.model.parameters()), case.learning_rate)
    losses, done = [], 0
    for update in updates:
        loss = sum(training._workload.loss(batch) for batch in batches) / case.gpus
        (loss / case.gradient_accumulation).backward()
        if update:
            if case.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), case.max_grad_norm)
            optimizer.param_groups[0]["lr"] = case.learning_rate * factor(case, done)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        losses.append(loss.item())
    return losses[-case.steps :]
