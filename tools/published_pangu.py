"""Trains PanGu as the published program did (sunzeyeah/RLHF), for `compare_published`.

It differs from the PanGu of the suites in what takes memory:

- Attention multiplies, scales, masks, adds the mask of the padding, applies softmax and dropout, and multiplies. The mask of
  the padding is in fp32, so that under autocast the scores are so, too.
- The loss is that of a copy of the logits without the last token.
- Gradients are clipped to a norm of 1. Then the AdamW that transformers had updates one parameter after the other.

The program scales the loss in fp16, which takes a few numbers of memory, and is left out.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_gputrain.worker.training import Setup
from pytest_gputrain.worker.zoo.completed import architecture_of
from pytest_gputrain.worker.zoo.pangu import Attention, PanGu

MASKED: Final = -1e4
"""What is added to the score of a token that is not to be seen."""


def train(setup: Setup, size: str, method: str) -> Callable[[], Tensor]:
    """Build the training of a PanGu, and return the step of one micro-batch.

    Args:
        size: the model's name.
        method: full, which is all that was published.
    """
    case = setup.case
    with setup.device:
        model = PanGu(**architecture_of(size).parts["model"].config)
    setup.watch(model)
    seen = torch.ones(model.wpe.num_embeddings, model.wpe.num_embeddings, dtype=torch.uint8, device=setup.device).tril()
    ids = torch.randint(model.wte.num_embeddings, (case.batch_size, case.sequence_length), device=setup.device)
    padding = torch.ones_like(ids)
    for block in model.blocks:
        assert isinstance(block.attention, Attention)
        block.attention.register_buffer("seen", seen.clone())
        block.attention.forward = types.MethodType(attend, block.attention)  # type: ignore[method-assign]
    optimizer = OneByOne(model.parameters(), lr=1e-5)
    micro_batches = 0

    def step() -> Tensor:
        nonlocal micro_batches
        with setup.casting():
            mask = (1 - padding[:, None, None, :].float()) * MASKED
            for block in model.blocks:
                block.attention.padding = mask
            logits = model(ids)
            loss = functional.cross_entropy(logits[:, :-1].contiguous().flatten(0, 1), ids[:, 1:].flatten())
        del logits
        (loss / case.gradient_accumulation).backward()
        micro_batches += 1
        if micro_batches % case.gradient_accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def attend(self: Any, states: Tensor, queries: Tensor | None = None) -> Tensor:
    """Attend with scores (batch, heads, sequence, sequence) in memory."""
    query = self._split(self.q_proj(states if queries is None else queries))
    key, value = self._split(self.k_proj(states)), self._split(self.v_proj(states))
    scores = query @ key.mT
    scores = scores / float(value.shape[-1]) ** 0.5
    length = scores.shape[-1]
    scores = torch.where(self.seen[:length, :length].bool(), scores, torch.tensor(MASKED, device=scores.device).to(scores))
    scores = scores + self.padding
    shares = self.dropout(functional.softmax(scores, dim=-1).type(value.dtype))
    mixed = (shares @ value).transpose(1, 2).contiguous().flatten(2)
    result: Tensor = self.dropout(self.c_proj(mixed))
    return result


class OneByOne(torch.optim.Optimizer):
    """AdamW that updates one parameter after the other, with one temporary of its size."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            first_decay, second_decay = group["betas"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(steps=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
                state["steps"] += 1
                state["mean"].mul_(first_decay).add_(gradient, alpha=1 - first_decay)
                state["square"].mul_(second_decay).addcmul_(gradient, gradient, value=1 - second_decay)
                bias = (1 - second_decay ** state["steps"]) ** 0.5 / (1 - first_decay ** state["steps"])
                deviation = state["square"].sqrt().add_(group["eps"])
                parameter.addcdiv_(state["mean"], deviation, value=-group["lr"] * bias)
                parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
