"""Keeps tensors that a case offloads to the host from taking real memory, while the GPU is emulated.

A model of 70B parameters that is built on the host takes 140 GB there, and its values are of no use, because kernels compute
nothing. Linux gives an allocation its memory page by page as the pages are written to, so tensors that are never written to
take none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only

from pytest_gputrain.utils.units import MiB
from pytest_gputrain.worker.allocations import wraps
from pytest_gputrain.worker.threads import SharedMode

_LARGE: Final = 1 * MiB
"""Bytes of a storage from which on it is not written to; smaller ones are computed, since they may decide what is done."""

_CHANGES_STORAGE: Final = frozenset({"resize_", "set_", "share_memory_", "resize_as_"})
"""Operators in place that do more than to write values."""


class UntouchedHost(SharedMode):
    """A mode in which operators on large tensors of the host return their results without computing or writing anything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if wraps(types):
            return NotImplemented
        if func is torch.ops.aten.copy_.default and _is_large(args[0]) and _is_to_host(args[1], args[0].device):
            _stage(args[1], args[0].dtype, (*args, *kwargs.values())[2:])
            return args[0]
        if func is torch.ops.aten._to_copy.default and _is_large(args[0]) and _is_to_host(args[0], kwargs.get("device")):
            dtype, pinned = kwargs.get("dtype") or args[0].dtype, bool(kwargs.get("pin_memory"))
            _stage(args[0], dtype, (kwargs.get("non_blocking"),))
            return torch.empty_like(args[0], dtype=dtype, device="cpu", pin_memory=pinned)
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        on_host = all(value.device.type == "cpu" for value in given)
        if not on_host or _device_of(kwargs) != "cpu" or func.is_view or (given and not any(map(_is_large, given))):
            return func(*args, **kwargs)
        name, schema = func.overloadpacket.__name__, func._schema
        if name == "_pin_memory":
            return torch.empty_like(args[0], pin_memory=True)
        if schema.is_mutable:
            if name in _CHANGES_STORAGE:
                return func(*args, **kwargs)
            written = _written(schema, args, kwargs)
            if not any(map(_is_large, written)):
                return func(*args, **kwargs)
            return None if not schema.returns else written[0] if len(schema.returns) == 1 else tuple(written)
        if name.startswith("empty"):
            return func(*args, **kwargs)
        results = self._shapes(func, args, kwargs)
        if results is None or not any(_is_large(value) for value in tree_iter(results) if isinstance(value, Tensor)):
            return func(*args, **kwargs)
        pinned = bool(kwargs.get("pin_memory"))
        return tree_map_only(Tensor, lambda value: torch.empty_like(value, device="cpu", pin_memory=pinned), results)

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the operator would return, as tensors without contents; None if that depends on values."""
        args, kwargs = tree_map_only(Tensor, lambda value: value.to("meta"), (args, kwargs))
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = torch.device("meta")
        try:
            results = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            return None
        meta = all(value.device.type == "meta" for value in tree_iter(results) if isinstance(value, Tensor))
        return results if meta else None


def _is_to_host(source: Tensor, device: torch.device | None) -> bool:
    """Tell whether a copy of this tensor to that device goes from a GPU to the host."""
    return source.device.type != "cpu" and device is not None and torch.device(device).type == "cpu"


def _stage(source: Tensor, dtype: torch.dtype, non_blocking: Sequence[Any]) -> None:
    """Allocate on the device what torch allocates for a moment before a copy to the host (copy_kernel_cuda of Copy.cu)."""
    # A non-blocking copy changes the type on the device, and a blocking copy changes it on the host.
    (source.to(dtype) if any(non_blocking) else source).contiguous()


def _device_of(kwargs: dict[str, Any]) -> str:
    """Return the type of the device on which the operator puts its result."""
    device = kwargs.get("device")
    return "cpu" if device is None else torch.device(device).type


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.untyped_storage().nbytes() >= _LARGE


def _written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that the operator writes to, which it returns."""
    named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    return [
        named.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
