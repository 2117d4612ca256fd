"""Defines the precisions (how weights are stored, what steps compute in), and checks that own code trains in the one it
names.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from pytest_gputrain.worker.checks import CheckFailed, local


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The types in which a case stores its weights and computes its steps."""

    weights: torch.dtype
    autocast: torch.dtype | None = None
    """Arithmetic under autocast, None to compute in the weights' own."""
    scaled: bool = False
    """The loss is scaled against underflow (``fp16-amp``)."""

    @property
    def compute(self) -> torch.dtype:
        return self.autocast or self.weights

    def casting(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward pass."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return the scaler that scales the loss and steps the optimizer. It does nothing else if no scaling is needed.

        Starts at 1024, where a fresh model's gradients do not overflow: torch's own 65536 drops the first updates.
        """
        return torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=self.scaled)


PRECISIONS: Final = {
    "fp32": Precision(weights=torch.float32),
    "bf16": Precision(weights=torch.bfloat16),
    "bf16-amp": Precision(weights=torch.float32, autocast=torch.bfloat16),
    "fp16-amp": Precision(weights=torch.float32, autocast=torch.float16, scaled=True),
}


@contextlib.contextmanager
def tf32_allowed(allowed: bool | None) -> Iterator[None]:
    """Provide a context in which products and convolutions of fp32 may use TF32, or may not. None changes nothing."""
    # Switches are read only if they are to change, because torch refuses to read them once own code has set its newer
    # switches.
    switches: list[Any] = [] if allowed is None else [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = allowed
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


_MOST: Final = 0.9
"""Share of the FLOPs that makes their type that of the arithmetic: some losses and heads compute in fp32."""


def check_precision(name: str, label: str, weights: Mapping[torch.dtype, int], flops: Mapping[torch.dtype, int]) -> None:
    """Raise an error if a case of own code trains in another precision than it says.

    Weights are of the type that most of their bytes have, which adapters and norms in fp32 do not change. Where only weights
    or only arithmetic differ from what the label means, as in a frozen part in fp32, it takes `_MOST` of them; and what no
    label means, such as training in float64, fails none.

    Args:
        name: of the case's model.
        label: the case's precision.
        weights: bytes of the watched model's parameters, by type; nothing for a model that is not watched.
        flops: FLOPs of the step's matrix products, by type.

    Raises:
        CheckFailed: the precision is another one. The message names the label that fits.
    """
    stated = PRECISIONS[label]
    stored, computed = _chief(weights), _chief(flops)
    stores, computes = stored in (None, stated.weights), not flops or _share(flops, stated.compute) >= _MOST
    if stores and computes:
        return
    if weights and flops and (stores or computes):
        surely = _share(flops, computed) >= _MOST if stores else _share(weights, stored) >= _MOST
    else:
        surely = bool(weights) or _share(flops, computed) >= _MOST
    fitting = [
        f'"{other}"'
        for other, precision in PRECISIONS.items()
        if stored in (None, precision.weights) and computed in (None, precision.compute)
    ]
    if not surely or not fitting:
        return
    shares = [
        f"{_share(weights, stored):.0%} of the bytes of its weights are {_name(stored)}" if stored else "",
        f"{_share(flops, computed):.0%} of its FLOPs are {_name(computed)}" if computed else "",
    ]
    raise CheckFailed(
        f'{name} does not train in precision "{label}", which stores weights in {_name(stated.weights)} and computes in '
        f"{_name(stated.compute)}: {' and '.join(filter(None, shares))}; say precision={' or '.join(fitting)}, or train in "
        "the other one: by setup.dtype and setup.casting() in a function, by bf16=, fp16= or precision= of a trainer"
    )


def weights_by_type(model: nn.Module) -> Counter[torch.dtype]:
    """Return the bytes of all parameters by type. A parameter that is packed in four bits counts as the type it computes
    in."""
    sizes: Counter[torch.dtype] = Counter()
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            packed = getattr(parameter, "quant_state", None)
            dtype = (getattr(module, "compute_dtype", None) or packed.dtype) if packed else parameter.dtype
            if id(parameter) in seen or not (dtype.is_floating_point or dtype.is_complex):
                continue
            seen.add(id(parameter))
            part = local(parameter)
            sizes[dtype.to_real() if dtype.is_complex else dtype] += part.numel() * part.element_size()
    return +sizes


def _chief(amounts: Mapping[torch.dtype, int]) -> torch.dtype | None:
    """Return the type with the largest amount; None without any."""
    return max(amounts, key=lambda dtype: amounts[dtype], default=None)


def _share(amounts: Mapping[torch.dtype, int], dtype: torch.dtype | None) -> float:
    return amounts.get(dtype, 0) / sum(amounts.values()) if dtype else 0.0


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
