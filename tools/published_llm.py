"""Trains a language model as the published program did (ljm565/universal-llm-trainer), for `compare_published`.

The model and its adapters are those of the suites. The rest is what the program's repository has:

- transformers' own checkpointing (``checkpoint_type: hf_checkpoint``), which is reentrant by default in transformers 4.49;
- the loss of a copy of the logits without the last token, in their own type;
- gradients clipped to a norm of 10, torch's AdamW, and deterministic algorithms.

The program passes a mask of the padding, too. There is no padding, so transformers ignores it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gputrain.records import Case
from pytest_gputrain.worker import zoo
from pytest_gputrain.worker.methods import adapt
from pytest_gputrain.worker.training import Setup
from pytest_gputrain.worker.zoo.completed import architecture_of


def train(setup: Setup, size: str, method: str) -> Callable[[], Tensor]:
    """Build the training of a model of the suites, and return the step of one micro-batch.

    Args:
        size: the model's name.
        method: full, lora or qlora.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    row = setup.case
    case = Case(model=size, method=method, batch_size=row.batch_size, sequence_length=row.sequence_length)
    architecture = architecture_of(size)
    before = torch.get_default_dtype()
    torch.set_default_dtype(setup.dtype)
    with setup.device:
        workload = zoo.build(case, "full", architecture)
    torch.set_default_dtype(before)
    whole: Any = workload.model
    whole.enable_input_require_grads()
    whole.gradient_checkpointing_enable()
    model: Any = adapt(whole, architecture, case, setup.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    ids = workload.batch(setup.device).inputs["input_ids"]
    micro_batches = 0

    def loss_of_output() -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1, :].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))

    def step() -> Tensor:
        nonlocal micro_batches
        loss = loss_of_output() / row.gradient_accumulation
        loss.backward()
        micro_batches += 1
        if micro_batches % row.gradient_accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step
