"""Keeps fp32 copies of 16-bit weights for the optimizer, and adds up their gradients in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MasterWeights:
    """The fp32 weights that an optimizer updates in place of the 16-bit weights that a model computes with.

    Each 16-bit gradient is taken over as soon as it is there: of whole ones at most a few exist at a time, as under Paddle's
    ``amp_master_grad``. A weight in fp32 is its own master.

    Attributes:
        parameters: all masters.
    """

    def __init__(self, trained: Iterable[nn.Parameter]) -> None:
        self.parameters: list[nn.Parameter] = []
        self._weights: list[Tensor] = []
        self._masters: list[Tensor] = []
        for weight in trained:
            master = weight
            if weight.dtype != torch.float32:
                master = nn.Parameter(weight.detach().float())
                self._weights.append(weight)
                self._masters.append(master)
                _hand_over_gradients(weight, master)
            self.parameters.append(master)

    @torch.no_grad()
    def round(self) -> None:
        """Copy the updated fp32 weights to the 16-bit weights of the model, which rounds them."""
        torch._foreach_copy_(self._weights, self._masters)


def _hand_over_gradients(weight: nn.Parameter, master: nn.Parameter) -> None:
    def take(weight: Tensor) -> None:
        assert weight.grad is not None, "the hook runs once there is a gradient"
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    weight.register_post_accumulate_grad_hook(take)
