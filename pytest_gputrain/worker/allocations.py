"""Counts live tensor storages on a CPU, one by one, where no allocator does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler  # noqa: TID251 - patched for what the user's own code receives
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import shared_cache
from torch.utils._pytree import tree_iter

from pytest_gputrain.worker.phases import Phases
from pytest_gputrain.worker.storages import Storages
from pytest_gputrain.worker.threads import SharedMode
from pytest_gputrain.worker.trace import Peaks, Trace, peaks


class AllocationCounter(SharedMode):
    """Counts the bytes of every storage that an operator creates or resizes, until it is freed, by phases of training.

    Exact and the same on every run, where polling the resident set misses most of a peak. It follows untyped storages by
    weak reference, so views and in-place operators cost nothing, and it sees what Python sees: memory that a kernel takes
    and returns inside one operator is not counted. Tensors made before the counter was entered are counted when an operator
    first returns them. Roughly doubles the time of a small step, so it gets steps of its own.

    Args:
        line: tells which line of the user's own files runs.

    Attributes:
        trace: what was allocated and freed.
    """

    def __init__(self, line: Callable[[], str] = str) -> None:
        super().__init__()
        self.trace = Trace()
        self._storages = Storages(self.trace, line, self.lock)
        self._phases = Phases(self.trace.enter)

    @property
    def live_bytes(self) -> int:
        """Sum over the live storages."""
        return self._storages.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest `live_bytes` since the first step began; before that, since the start."""
        return self.peaks().bytes

    def peaks(self) -> Peaks:
        """Return the peak of each phase of training."""
        return peaks(self.trace)

    def begin_step(self) -> None:
        """Note that a step of training starts."""
        if self._phases.current == "build":
            self.trace.begin_training()
        self._phases.begin_step()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps(types):
            return NotImplemented
        self.note_thread()
        self._phases.follow()
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not isinstance(value, FakeTensor):
                for part in strided_parts(value):
                    storage = part.untyped_storage()
                    if not self._storages.knows(storage):
                        self._see(storage, name_of(func), tuple(part.shape), part.dtype)
        return result

    def __enter__(self) -> AllocationCounter:
        self._noting = contextlib.ExitStack()
        self._noting.enter_context(resizes_noted_by(self._see_resized))
        self._noting.enter_context(_frees_of_received_noted())
        self._phases.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._phases.__exit__(*exc_info)
        self._noting.__exit__(*exc_info)
        # No callbacks into a counter that nobody reads any more: they would disturb what is timed next.
        self._storages.leave()

    def _see(self, storage: torch.UntypedStorage, operator: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        self._storages.see(storage, storage.nbytes(), operator, self._phases.current, shape, dtype)

    def _see_resized(self, storage: torch.UntypedStorage) -> None:
        self._see(storage, "resize_", (storage.nbytes(),), None)


@contextlib.contextmanager
def resizes_noted_by(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Provide a context in which ``seen`` gets every storage that Python code resizes, as FSDP does: no operator tells of
    it."""

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]
        seen(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


@contextlib.contextmanager
def _frees_of_received_noted() -> Iterator[None]:
    """Provide a context in which a storage that another process sent is known to be freed at once.

    In torch 2.9 the Python object of a storage lives on as long as C++ has a weak reference to it, and
    ``torch.multiprocessing`` keeps one to each storage that it received.
    """
    if torch.__version__ >= "2.10":
        yield
        return
    loads = ForkingPickler.loads

    def loads_and_forgets(*args: Any, **kwargs: Any) -> Any:
        received = loads(*args, **kwargs)
        with shared_cache.lock:
            shared_cache.clear()
        return received

    with mock.patch.object(ForkingPickler, "loads", loads_and_forgets):
        yield


@functools.cache
def name_of(operator: Any) -> str:
    """Return the name of an operator without that of its overload: ``aten.mm``."""
    return str(getattr(operator, "overloadpacket", operator))


def wraps(types: Iterable[type]) -> bool:
    """Tell whether any of an operator's types is a wrapper of tensors, such as DTensor.

    Its own storage is as large as the whole that it is a part of, and empty. A dispatch mode that returns NotImplemented is
    asked again for the tensors within.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that hold the storages of one that may be sparse."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
