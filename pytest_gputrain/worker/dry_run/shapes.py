"""Results of operators on fakes, remembered by the shapes of their arguments.

A training step repeats the same few hundred calls tens of thousands of times. FakeTensorMode has such a cache too, whose key
alone costs more than all else in a dry run; this one knows only what a step is made of, and leaves the rest to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_NEVER: Final = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view})
_FROM_THE_START: Final = frozenset({torch.ops.aten.as_strided.default})
"""Operators whose arguments name places in the storage."""
_RESIZING: Final = frozenset({"aten.resize_", "aten.resize_as_", "aten.set_", "aten.sparse_resize_"})


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor among the results of a call."""

    same: int = -1
    """Number of the argument that it is."""
    base: int = -1
    """Number of the argument that it is a view of."""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    """From that of the argument: DeepSpeed's parameters are all of one shape in one storage."""
    dtype: torch.dtype = torch.float32


class Shapes:
    """A cache of calls.

    Args:
        layouts: what to call instead of an operator.
    """

    def __init__(self, layouts: dict[Any, Callable[..., Any]]) -> None:
        self._layouts = layouts
        self._eligible: dict[Any, bool] = {}
        self._silent: set[Any] = set()
        self._results: dict[Any, Any] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """``func(*args, **kwargs)``.

        Args:
            tensors: those among the arguments, in order.
        """
        eligible = self._eligible.get(func)
        if eligible is None:
            eligible = self._eligible[func] = _is_eligible(func)
            if _is_silent(func):
                self._silent.add(func)
        if func in self._silent:
            return None
        call = self._layouts.get(func, func)
        if not eligible or not tensors:
            return call(*args, **kwargs)
        for tensor in tensors:
            if type(tensor) is not FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
                return call(*args, **kwargs)
        # The default is the type of what integers become.
        start = tensors[0].storage_offset() if func in _FROM_THE_START else 0
        key = (func, _key(args), _key(kwargs.items()) if kwargs else None, torch.get_default_dtype(), start)
        try:
            known = self._results.get(key, self)
        except TypeError:  # an argument without a hash
            return call(*args, **kwargs)
        if known is self:
            result = call(*args, **kwargs)
            self._results[key] = _described(result, tensors)
            return result
        if known is None:
            return call(*args, **kwargs)
        return _made(known, tensors, tensors[0].fake_mode)  # type: ignore[attr-defined]


def _is_eligible(func: Any) -> bool:
    return func.namespace == "aten" and not _NEVER & set(func.tags) and str(func.overloadpacket) not in _RESIZING


def _is_silent(func: Any) -> bool:
    """Whether it changes lists of tensors in place and returns nothing, as optimizers call it: fakes have nothing to change.

    FakeTensorMode checks hundreds of tensors one by one, which takes a quarter of a dry run.
    """
    return str(func.overloadpacket).startswith("aten._foreach_") and not func._schema.returns


def _key(values: Any) -> Any:
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append((value.shape, value.stride(), value.dtype, device_of(value)))
        elif isinstance(value, list | tuple):
            found.append(_key(value))
        else:
            # 1, 1.0 and True are one key, but not one result.
            found.append((type(value), value))
    return tuple(found)


def _described(result: Any, tensors: list[Tensor]) -> Any:
    """How to make the result again; None where that is not known."""
    if isinstance(result, list | tuple):
        parts = [_described(part, tensors) for part in result]
        return None if any(part is None for part in parts) else (type(result), parts)
    if type(result) is not FakeTensor or result.layout is not torch.strided or result.constant is not None:
        return None
    for number, tensor in enumerate(tensors):
        if tensor is result:
            return _Result(same=number)
    size, stride, offset = tuple(result.shape), result.stride(), int(result.storage_offset())
    storage = result.untyped_storage()
    for number, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata == storage._cdata:
            if tensor.dtype != result.dtype:
                return None
            offset -= int(tensor.storage_offset())
            return _Result(base=number, size=size, stride=stride, offset=offset, dtype=result.dtype)
    with torch._C._DisableTorchDispatch():
        again = torch.empty_strided(size, stride, dtype=result.dtype, device="meta")
    if offset or again.untyped_storage().nbytes() != storage.nbytes() or result.fake_device != device_of(tensors[0]):
        return None
    return _Result(size=size, stride=stride, dtype=result.dtype)


def _made(known: Any, tensors: list[Tensor], mode: FakeTensorMode) -> Any:
    if isinstance(known, tuple):
        kind, parts = known
        return kind(_made(part, tensors, mode) for part in parts)
    if known.same >= 0:
        return tensors[known.same]
    with torch._C._DisableTorchDispatch():
        if known.base >= 0:
            element = torch.empty((0,), dtype=known.dtype, device="meta")
            base = tensors[known.base]
            element.set_(base.untyped_storage(), base.storage_offset() + known.offset, known.size, known.stride)
        else:
            element = torch.empty_strided(known.size, known.stride, dtype=known.dtype, device="meta")
    return _fake(mode, element, device_of(tensors[0]))


_fresh: dict[tuple[int, torch.device], dict[str, Any]] = {}
"""Attributes of a new fake, by mode and device; the mode is among them, so that its number stays its own."""


def _fake(mode: FakeTensorMode, element: Tensor, device: torch.device) -> Tensor:
    """``FakeTensor(mode, element, device)``, whose checks and 25 attributes, all alike, are a seventh of a dry run."""
    attributes = _fresh.get((id(mode), device))
    if attributes is None:
        made = FakeTensor(mode, element, device)
        _fresh.clear()
        _fresh[id(mode), device] = dict(made.__dict__)
        return made
    fake = Tensor._make_subclass(FakeTensor, element, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(attributes)
    return fake


def device_of(fake: Any) -> torch.device:
    """The label of a fake; its ``device`` takes a way through all modes."""
    device: torch.device = fake.fake_device
    return device
