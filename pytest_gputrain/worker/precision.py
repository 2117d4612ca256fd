"""In which arithmetic a case trains."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Final

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Storage of the weights and arithmetic of the step."""

    weights: torch.dtype
    autocast: torch.dtype | None = None
    """Arithmetic under autocast, None to compute in the weights' own."""
    scaled: bool = False
    """The loss is scaled against underflow (fp16)."""

    @property
    def compute(self) -> torch.dtype:
        return self.autocast or self.weights

    def casting(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The context of the forward pass."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Scales the loss and steps the optimizer; passes everything through where nothing is to scale.

        Starts at 1024, where a fresh model's gradients do not overflow: torch's own 65536 drops the first updates.
        """
        return torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=self.scaled)


PRECISIONS: Final = {
    "fp32": Precision(weights=torch.float32),
    "bf16": Precision(weights=torch.bfloat16),
    "bf16-amp": Precision(weights=torch.float32, autocast=torch.bfloat16),
    "fp16": Precision(weights=torch.float32, autocast=torch.float16, scaled=True),
}
