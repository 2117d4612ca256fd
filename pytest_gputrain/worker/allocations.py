"""Live tensor storages on a CPU, counted one by one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

from pytest_gputrain.worker.threads import SharedMode


class AllocationCounter(SharedMode):
    """Counts the bytes of every storage that an operator creates or resizes, until it is freed.

    Exact and the same on every run, where polling the resident set misses most of a peak. It follows untyped storages by
    weak reference, so views and in-place operators cost nothing, and it sees what Python sees: memory that a kernel takes
    and returns inside one operator is not counted. Tensors made before the counter was entered are counted when an operator
    first returns them. Roughly doubles the time of a small step, so it gets steps of its own.

    Attributes:
        live_bytes: sum over the live storages.
        peak_bytes: highest ``live_bytes`` since the start or `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Let the peak start from what is live now."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps(types):
            return NotImplemented
        self.note_thread()
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not isinstance(value, FakeTensor):
                for part in _strided(value):
                    self._see(part.untyped_storage())
        return result

    def __enter__(self) -> AllocationCounter:
        self._resizing = resizes_told_to(self._see)
        self._resizing.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._resizing.__exit__(*exc_info)
        # No callbacks into a counter that nobody reads any more: they would disturb what is timed next.
        self._references.clear()

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        with self.lock:
            known = self._sizes.get(key)
            if known is None:
                self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
            if known != size:
                self._sizes[key] = size
                self.live_bytes += size - (known or 0)
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int) -> None:
        with self.lock:
            self._references.pop(key, None)
            self.live_bytes -= self._sizes.pop(key, 0)


@contextlib.contextmanager
def resizes_told_to(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """A context in which ``seen`` gets every storage that Python code resizes, as FSDP does: no operator tells of it."""

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]
        seen(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


def wraps(types: Iterable[type]) -> bool:
    """Whether any of an operator's types is a wrapper of tensors, such as DTensor.

    Its own storage is as large as the whole that it is a part of, and empty. A dispatch mode that returns NotImplemented is
    asked again for the tensors within.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def _strided(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold the storages of one that may be sparse."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
