"""Tells which sums of gradients autograd makes in the memory of one of them.

Where a tensor has several uses, autograd adds up their gradients: in place, if nothing else holds the first of them
(``accumulate`` of torch's input_buffer.cpp). Under any dispatch mode it never does, as if all tensors were subclasses, so a
prediction has to.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

ADD: Final = torch.ops.aten.add.Tensor
ADD_IN_PLACE: Final = torch.ops.aten.add_.Tensor

_ENGINE: Final = "_engine_run_backward"
"""The function of Python that autograd's engine is called by; what a hook or a formula in Python adds has another caller."""


def is_in_place(args: Any, kwargs: Any, holders: tuple[int, int]) -> bool:
    """Tell whether this call of `ADD`, which a dispatch mode has just got, is such a sum in place without the mode.

    Args:
        holders: what `holders_of_first` returns.
    """
    if kwargs or torch.is_grad_enabled() or sys._getframe(2).f_code.co_name != _ENGINE:
        return False
    first, second = args
    return first.shape == second.shape and first.dtype == second.dtype and _holders(first) == holders and _is_dense(first)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _holders(tensor: Tensor) -> tuple[int, int]:
    """Return how often a tensor and its storage are held."""
    count: Any = getattr(tensor, "_use_count", lambda: 0)
    return count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def holders_of_first() -> tuple[int, int]:
    """Return how often a first gradient and its storage are held, if by nothing but autograd and the call.

    It is measured, because releases of torch may differ. Call it before any mode is entered: inside, nothing has gradients.
    """
    seen: list[tuple[int, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is ADD:
                seen.append(_holders(args[0]))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Watch(), torch.enable_grad():  # type: ignore[no-untyped-call]
        table = torch.ones(4, requires_grad=True)
        (table[:2] * table[2:]).sum().backward()
    (holders,) = seen
    return holders
