"""Keeps the values of small fake tensors: what shapes and branches of a model depend on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from pytest_gputrain.worker.prediction.operators import Operator, tensors_in

LIMIT: Final = 2**18
"""Elements of the largest tensor whose values are kept: activations are not."""
_INTEGER_BYTES: Final = 2**26
"""The bytes of the largest storage of whole numbers that are kept: token ids and masks of a batch of 8 million tokens."""

_ATEN: Final = torch.ops.aten
_INTEGERS: Final = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64})
_MAKERS: Final = frozenset(
    getattr(_ATEN, name)
    for name in ("arange", "zeros", "ones", "full", "randint", "randperm", "scalar_tensor", "linspace", "eye")
)
"""Operators without tensor arguments whose result is known."""
_SHUFFLED: Final = _ATEN.randperm
"""The operator that shuffles the samples of a data set. Its values are always known."""
_SCALAR: Final = _ATEN._local_scalar_dense.default
_INDEX: Final = _ATEN.index.Tensor
_SELECT: Final = _ATEN.masked_select.default

_SEND: Final = torch.ops.c10d.send.default
_BROADCAST: Final = torch.ops.c10d.broadcast_.default

_NAME: Final = "_gputrain_value"
_overwritten: Final[dict[int, StorageWeakRef]] = {}
"""Storages of values that something unknown was written into, through whichever view, by their addresses; these are no other
storage's while there is a reference."""


def value_of(tensor: Tensor) -> Tensor | None:
    """Return the contents of a tensor that may be fake, None where they are not known."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value: Tensor | None = getattr(tensor, _NAME, None)
    if value is not None and _overwritten and value.untyped_storage()._cdata in _overwritten:
        return None
    return value


def forget(tensor: Tensor) -> None:
    """Forget the values of a fake, and of all that shares its storage: something unknown was written into it."""
    value = getattr(tensor, _NAME, None)
    if value is not None:
        storage = value.untyped_storage()
        _overwritten[storage._cdata] = StorageWeakRef(storage)


def compute(operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """Call ``func(*args, **kwargs)`` on fakes, and on their values where all of them are known.

    Args:
        operator: what is known of it.
        tensors: those among the arguments.

    A scalar that is read without being known is 0.0 if it is a float, which tells the loss scaler that nothing overflowed.
    DeepSpeed asks that of integers, and the loaders of torch and torchdata draw them for seeds.
    """
    if not tensors:
        if func.namespace == "profiler":
            return _real(func, args, kwargs)
        result = func(*args, **kwargs)
        if func.overloadpacket in _MAKERS and (_is_small(result) or func.overloadpacket is _SHUFFLED):
            keep(result, _real(func, args, kwargs))
        return result
    if func is _SCALAR:
        return _read(tensors[0], func)
    if func.namespace == "c10d":
        if func is not _SEND and not (func is _BROADCAST and args[2] == 0):
            # Of what the other processes hold nothing is known; the simulated one is the first.
            for tensor in tensors:
                forget(tensor)
        return func(*args, **kwargs)
    all_known = all(value_of(tensor) is not None for tensor in tensors)
    if operator.dynamic and (all_known or func in (_INDEX, _SELECT)):
        return _fakes_of(_real(func, args, kwargs), tensors) if all_known else _taken(func, *args)
    result = None if operator.in_place_on_lists else operator.call(*args, **kwargs)
    if all_known:
        if not all(_is_small(part) for part in tensors_in((result,))):
            return result
        with contextlib.suppress(RuntimeError):  # a kernel that only a GPU has
            keep(result, _real(func, args, kwargs))
            return result
    for part in operator.targets(args, kwargs):
        forget(part)
    return result


def touches_values(operator: Operator, tensors: list[Tensor]) -> bool:
    """Tell whether a call computes or overwrites known values."""
    have_values = [getattr(tensor, _NAME, None) is not None for tensor in tensors]
    return any(have_values) if operator.written else all(have_values)


def _read(tensor: Tensor, func: Any) -> Any:
    value = value_of(tensor)
    if value is not None:
        with _disable_current_modes():
            return value.item()
    if tensor.is_floating_point():
        return 0.0
    return 0 if _read_by("deepspeed", "torch.utils.data", "torchdata") else func(tensor)


def answer(result: Tensor, value: bool) -> Tensor:
    """Give a fake of unknown bools the value that training expects of all of them."""
    if isinstance(result, FakeTensor) and value_of(result) is None and result.numel() <= LIMIT:
        with _disable_current_modes():
            keep(result, torch.full(result.shape, value))
    return result


def forget_all() -> None:
    """Forget all values: the fakes of a prediction are no more."""
    _overwritten.clear()


def _read_by(*packages: str) -> bool:
    """Tell whether the code that reads a scalar is that of one of the packages."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("pytest_gputrain.worker.prediction."):
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__", "").startswith(tuple(f"{package}." for package in packages)))


def _taken(func: Any, source: Tensor, indices: Any) -> Any:
    """Take elements of an unknown tensor by indices; a mask among them must be known."""
    if func is _SELECT:
        return source.new_empty((_count(indices),))
    first = indices[0]
    if len(indices) == 1 and first is not None and first.dtype == torch.bool:
        return source.new_empty((_count(first), *source.shape[first.dim() :]))
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            positions += [source.new_empty((_count(index),), dtype=torch.int64)] * index.dim()
        else:
            positions.append(index)
    return _INDEX(source, positions)


def _count(mask: Tensor) -> int:
    value = value_of(mask)
    if value is None:
        raise RuntimeError(
            "a mask decides the shape of a result, and a prediction does not know its content: measure the case instead"
        )
    with _disable_current_modes():
        return int(value.sum())


def _real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _disable_current_modes():
        return func(*map_tensors(args, value_of), **map_tensors(kwargs, value_of))


def _fakes_of(real: Any, tensors: list[Tensor]) -> Any:
    """Return fakes of what was computed, with its values."""
    if isinstance(real, Tensor):
        fake = tensors[0].new_empty(real.shape, dtype=real.dtype)
        keep(fake, real)
        return fake
    return type(real)(_fakes_of(part, tensors) for part in real)


def keep(result: Any, real: Any) -> None:
    """Remember the contents of fakes."""
    if isinstance(result, FakeTensor):
        setattr(result, _NAME, real)
    elif isinstance(result, list | tuple):
        for part, value in zip(result, real, strict=True):
            keep(part, value)


def _is_small(tensor: Any) -> bool:
    # An expanded tensor has many elements over a small storage.
    if not isinstance(tensor, Tensor):
        return True
    held = tensor.untyped_storage().nbytes()
    return held <= _INTEGER_BYTES if tensor.dtype in _INTEGERS else held <= 8 * LIMIT and tensor.numel() <= LIMIT


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the value with its tensors changed, in lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(part, change) for part in value)
    if isinstance(value, dict):
        return {name: map_tensors(part, change) for name, part in value.items()}
    return value
