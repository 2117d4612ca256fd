"""Caches operators' calls on fakes by the shapes of their arguments.

A training step repeats the same few hundred calls tens of thousands of times. FakeTensorMode has such a cache too, whose key
alone costs more than all else in a prediction; this one knows only what a step is made of, and leaves the rest to it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pytest_gputrain.worker.prediction.operators import Operator

_META: Final = torch.device("meta")
_NUMBER: Final = "_gputrain_shape"
_PECULIAR: Final = -1
"""Number of a fake whose calls are not remembered: a sparse one, or one that stands for a constant."""


@dataclass(slots=True)
class Result:
    """One result of a call: a tensor, or what `plain` holds."""

    plain: Any = None
    """A number or None."""
    same: int = -1
    """Number of the argument that it is."""
    base: int = -1
    """Number of the argument that it is a view of."""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    """Bytes from that of the argument: DeepSpeed's parameters are all of one shape in one storage."""
    dtype: torch.dtype = torch.float32
    number: int = _PECULIAR
    """Number of its shape."""
    device: torch.device | None = None
    nbytes: int | None = None
    """Bytes of the storage, where it has one of its own."""


@dataclass(slots=True)
class Call:
    """The results of an operator's call, which an equal call returns again.

    Attributes:
        results: in order.
        kind: the sequence that they come in; None for a single one.
        temporaries: sizes in bytes of what its kernel allocates beside the results and frees at its end.
        arithmetic: type of its operands, where it has FLOPs.
        moved: bytes that it reads and writes.
        yoctoseconds: the least time that it takes.
    """

    results: list[Result]
    kind: Any = None
    temporaries: tuple[int, ...] = ()
    flops: int = 0
    arithmetic: torch.dtype | None = None
    moved: int = 0
    yoctoseconds: int = 0


class Shapes:
    """The remembered calls of a prediction, however often its case runs."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        """The numbers by the properties that distinguish shapes."""
        self._calls: dict[Any, Call] = {}
        self._fresh: dict[torch.device, dict[str, Any]] = {}
        """Attributes of a new fake."""

    def key(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Return the key that the call is remembered by; None if it is not remembered.

        Args:
            tensors: gets those among the arguments, in order.
        """
        # The default is the type of what integers become.
        parts: list[Any] = [operator, torch.get_default_dtype()]
        usual = self._describe(args, parts, tensors)
        if kwargs:
            parts.extend(kwargs)
            usual &= self._describe(kwargs.values(), parts, tensors)
        if not usual or not tensors or not operator.repeats:
            return None
        if operator.from_start:
            parts.append(tensors[0].storage_offset())
        return tuple(parts)

    def recall(self, key: Any) -> Call | None:
        """Return the call, if it was remembered before."""
        try:
            return self._calls.get(key)
        except TypeError:  # an argument without a hash
            return None

    def described(self, result: Any, tensors: list[Tensor]) -> Call | None:
        """Describe the results of a call, without its work; None where they cannot be made again."""
        kind = type(result) if isinstance(result, list | tuple) else None
        parts = [result] if kind is None else result
        results: list[Result] = []
        for part in parts:
            described = self._described(part, tensors)
            if described is None:
                return None
            results.append(described)
        return Call(results, kind)

    def remember(self, key: Any, call: Call) -> None:
        """Remember a call, with its work."""
        with contextlib.suppress(TypeError):  # an argument without a hash
            self._calls[key] = call

    def make(self, call: Call, tensors: list[Tensor]) -> Any:
        """Make the call's result for other tensors of the same shapes."""
        results = [self._make(result, tensors) for result in call.results]
        return results[0] if call.kind is None else call.kind(results)

    def _describe(self, values: Any, parts: list[Any], tensors: list[Tensor]) -> bool:
        """Add what tells the values from others, and say whether they are of the usual kinds."""
        usual = True
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                tensors.append(value)
                number = getattr(value, _NUMBER, None)
                if number is None:
                    number = self._number(value)
                    setattr(value, _NUMBER, number)
                parts.append(number)
                if number == _PECULIAR:
                    usual = False
            elif isinstance(value, Tensor):
                tensors.append(value)
                usual = False
            elif isinstance(value, list | tuple):
                parts.append(kind)
                usual &= self._describe(value, parts, tensors)
                parts.append(None)
            else:
                # 1, 1.0 and True are equal, but not alike; nor is a number alone, which is that of a shape.
                parts.append(kind)
                parts.append(value)
        return usual

    def _number(self, fake: Any) -> int:
        if fake.layout is not torch.strided or fake.constant is not None:
            return _PECULIAR
        stride = fake.stride()
        # Of an expanded tensor no more is read than the storage.
        stored = fake.untyped_storage().nbytes() if 0 in stride else None
        facts = (fake.shape, stride, fake.dtype, fake.fake_device, stored)
        return self._numbers.setdefault(facts, len(self._numbers))

    def _described(self, part: Any, tensors: list[Tensor]) -> Result | None:
        if part is None or type(part) is int:
            return Result(plain=part)
        if type(part) is not FakeTensor:
            return None
        for number_of_argument, tensor in enumerate(tensors):
            if tensor is part:
                return Result(same=number_of_argument)
        number = self._number(part)
        if number == _PECULIAR:
            return None
        size, stride, offset, dtype = tuple(part.shape), part.stride(), int(part.storage_offset()), part.dtype
        storage = part.untyped_storage()
        device = device_of(part)
        for number_of_argument, tensor in enumerate(tensors):
            if tensor.untyped_storage()._cdata == storage._cdata:
                offset = offset * dtype.itemsize - int(tensor.storage_offset()) * tensor.itemsize
                return Result(
                    base=number_of_argument,
                    size=size,
                    stride=stride,
                    offset=offset,
                    dtype=dtype,
                    number=number,
                    device=device,
                )
        with torch._C._DisableTorchDispatch():
            copy = torch.empty_strided(size, stride, dtype=dtype, device=_META)
        nbytes = storage.nbytes()
        if offset or copy.untyped_storage().nbytes() != nbytes:
            return None
        return Result(size=size, stride=stride, dtype=dtype, number=number, device=device, nbytes=nbytes)

    def _make(self, result: Result, tensors: list[Tensor]) -> Any:
        if result.same >= 0:
            return tensors[result.same]
        if result.device is None:
            return result.plain
        with torch._C._DisableTorchDispatch():
            if result.base >= 0:
                element = torch.empty((0,), dtype=result.dtype, device=_META)
                base = tensors[result.base]
                offset = (base.storage_offset() * base.itemsize + result.offset) // result.dtype.itemsize
                element.set_(base.untyped_storage(), offset, result.size, result.stride)
            else:
                element = torch.empty_strided(result.size, result.stride, dtype=result.dtype, device=_META)
        return self._fake(element, result, tensors[0].fake_mode)  # type: ignore[attr-defined]

    def _fake(self, element: Tensor, result: Result, mode: Any) -> Tensor:
        """Make ``FakeTensor(mode, element, device)``, whose checks and 25 attributes, all alike, took a seventh of the
        time."""
        device: Any = result.device
        attributes = self._fresh.get(device)
        if attributes is None:
            fake = FakeTensor(mode, element, device)
            self._fresh[device] = dict(fake.__dict__)
        else:
            fake = Tensor._make_subclass(FakeTensor, element, False, dispatch_device=True, device_for_backend_keys=device)
            torch._C._set_throw_on_mutable_data_ptr(fake)
            fake.__dict__.update(attributes)
        setattr(fake, _NUMBER, result.number)
        return fake


def forget_shape(tensor: Any) -> None:
    """Forget the shape of a tensor that got another shape or storage."""
    if isinstance(tensor, FakeTensor):
        setattr(tensor, _NUMBER, None)


def device_of(fake: Any) -> torch.device:
    """Return the label of a fake's device; its ``device`` takes a way through all modes."""
    device: torch.device = fake.fake_device
    return device
