"""Counts live tensor storages on a CPU, one by one, where no allocator does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler  # noqa: TID251 - patched for what the user's own code receives
from typing import Any, Final
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import shared_cache
from torch.utils._pytree import tree_iter

from pytest_gputrain.records import TrainingPhase
from pytest_gputrain.records.step_memory import OfStep
from pytest_gputrain.worker.phases import Phases
from pytest_gputrain.worker.storages import Storages
from pytest_gputrain.worker.threads import SharedMode
from pytest_gputrain.worker.trace import Peaks, Trace, peaks

GIVEN: Final = "other code than an operator"
"""The name in place of an operator if none has made a tensor, as for `torch.frombuffer`."""
LIFT: Final = "aten.lift_fresh"
"""The operator that `torch.tensor` and `torch.from_numpy` end in: its result is its argument."""
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_hollow: Final[set[type]] = set()
"""The classes of tensors that wrap others without ``__tensor_flatten__``, as far as they were seen."""


class AllocationCounter(SharedMode):
    """Counts the bytes of every storage that an operator creates or resizes until the storage is freed, and their peak in
    each phase.

    Exact and the same on every run, where polling the resident set misses most of a peak. It follows untyped storages by
    weak reference, so views and in-place operators cost nothing, and it sees what Python sees: memory that a kernel takes
    and returns inside one operator is not counted. Tensors that no operator has made, or that were made before the counter
    was entered, are counted when an operator first takes or returns them. Roughly doubles the time of a small step, so it
    gets steps of its own. `follow_sizes_only` saves about half of that.

    Args:
        line: tells which line of the user's own files runs.

    Attributes:
        trace: records what is allocated and freed.
        phases: the phases of training.
        without_storage: the layouts of tensors whose memory another library keeps, so that it is not counted.
    """

    def __init__(self, line: Callable[[], str] = str) -> None:
        super().__init__()
        self.without_storage: set[str] = set()
        self.trace = Trace()
        self._storages = Storages(self.trace, line, self.lock)
        self._knows = self._storages.knows
        self.phases = Phases(self._enter)

    @property
    def live_bytes(self) -> int:
        """The bytes of all live storages."""
        return self._storages.live_bytes

    def _enter(self, phase: TrainingPhase) -> None:
        """Note a phase in the trace, as long as tensors are recorded. Tensors that an evaluation keeps do not count in the
        peaks of later steps."""
        if self._storages.traced:
            self.trace.enter(phase if self.phases.in_steps else None)

    def follow_sizes_only(self) -> None:
        """Count from now on only the memory of steps, without tensors and phases."""
        self._storages.traced = False

    def of_step(self) -> OfStep:
        """Return the memory of the step that has just ended."""
        return OfStep(self._storages.interval_peak(), self.live_bytes)

    @property
    def peak_bytes(self) -> int:
        """The highest `live_bytes` since the first step began; before the first step, since the start."""
        return self.peaks().bytes

    def peaks(self) -> Peaks:
        """Return the peak of each phase of training."""
        return peaks(self.trace)

    def uncounted(self) -> Iterator[str]:
        """Yield sentences on memory that was not counted."""
        if self.trouble:
            yield f"memory is counted in part only, because pytest-gputrain failed to follow a tensor ({self.trouble})"
        for layout in sorted(self.without_storage):
            yield f"memory of tensors of layout {layout} is not counted, because torch does not tell pytest-gputrain of it"

    def begin_step(self) -> None:
        """Note that a step of training starts."""
        if not self.phases.in_steps:
            self.trace.begin_training()
        self.phases.begin_step()
        self._storages.interval_peak()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if wraps(types):
            return NotImplemented
        if not self._storages.traced:
            return self._follow_sizes(func, types, args, kwargs)
        try:
            self.phases.follow()
            if name_of(func) != LIFT:
                for value in tensors_of((args, kwargs.values())):
                    self._look_at(value, GIVEN)
        except Exception as error:  # Counting must not fail a program.
            self.note_trouble(error)
        if wraps(types):  # Looking at the tensors may have found that a type is such a wrapper.
            return NotImplemented
        self.note_thread()
        result = func(*args, **kwargs)
        try:
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor):
                    self._look_at(value, name_of(func))
        except Exception as error:  # Counting must not fail a program.
            self.note_trouble(error)
        return result

    def _follow_sizes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and count its tensors, most of which are known, with as little work as possible."""
        try:
            if name_of(func) != LIFT:
                self._glance_at((args, kwargs.values()) if kwargs else args)
        except Exception as error:  # Counting must not fail a program.
            self.note_trouble(error)
        if types and wraps(types):  # Looking at the tensors may have found that a type is such a wrapper.
            return NotImplemented
        result = func(*args, **kwargs)
        try:
            self._glance_at((result,))
        except Exception as error:  # Counting must not fail a program.
            self.note_trouble(error)
        return result

    def _glance_at(self, values: Iterable[Any]) -> None:
        for value in tensors_of(values):
            if type(value) not in _PLAIN or value.layout != torch.strided or not self._knows(value.untyped_storage()):
                self._look_at(value, GIVEN)

    def _look_at(self, tensor: torch.Tensor, operator: str) -> None:
        """Count the storages of a tensor from now on."""
        if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return
        parts = strided_parts(tensor)
        if not parts:
            self.without_storage.add(str(tensor.layout))
        for part in parts:
            storage = part.untyped_storage()
            if not self._storages.knows(storage) and _has_memory(part, storage):
                self._see(storage, operator, tuple(part.shape), part.dtype)

    def __enter__(self) -> AllocationCounter:
        self._noting = contextlib.ExitStack()
        self._noting.enter_context(resizes_noted_by(self._see_resized))
        self._noting.enter_context(_frees_of_received_noted())
        self.phases.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self.phases.__exit__(*exc_info)
        self._noting.__exit__(*exc_info)
        # Callbacks that remained would call a counter that nobody reads any more, and would slow the timed steps.
        self._storages.leave()

    def _see(self, storage: torch.UntypedStorage, operator: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        self._storages.see(storage, storage.nbytes(), operator, self.phases.current, shape, dtype)

    def _see_resized(self, storage: torch.UntypedStorage) -> None:
        self._see(storage, "resize_", (storage.nbytes(),), None)


@contextlib.contextmanager
def resizes_noted_by(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Provide a context in which ``seen`` gets every storage that Python code resizes, as FSDP does without an operator."""

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]
        seen(storage)
        return result

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield


@contextlib.contextmanager
def _frees_of_received_noted() -> Iterator[None]:
    """Provide a context in which a storage that another process sent counts as freed as soon as it is.

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
    """Return the name of an operator without its overload: ``aten.mm``."""
    return str(getattr(operator, "overloadpacket", operator))


def wraps(types: Iterable[type]) -> bool:
    """Tell whether any of an operator's types is a wrapper of tensors, such as DTensor.

    The wrapper's own storage has the size of the whole tensor, and no memory. If a dispatch mode returns NotImplemented for
    a wrapper, torch calls the mode again with the tensors inside of it.
    """
    return any(hasattr(kind, "__tensor_flatten__") or kind in _hollow for kind in types)


def is_jagged(types: Iterable[type]) -> bool:
    """Tell whether any of an operator's types is torch's nested tensor of jagged layout, which has symbolic sizes."""
    return any(kind.__module__ == "torch.nested._internal.nested_tensor" for kind in types)


def _has_memory(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Tell whether a storage has memory of its own. A wrapper's storage has none, and the wrapper's class is remembered."""
    if type(tensor) in _PLAIN:
        return True
    try:
        storage.data_ptr()
    except RuntimeError:
        _hollow.add(type(tensor))
        return False
    return True


def tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operator."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, type({}.values()))):
            yield from tensors_of(value)


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the plain tensors that hold the storages of a sparse, nested or plain tensor.

    There are none if another library keeps its memory, as oneDNN does for ``to_mkldnn()``.
    """
    layout = tensor.layout
    if layout == torch.strided:
        return (tensor.values(),) if tensor.is_nested else (tensor,)
    if layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,) if torch._C._has_storage(tensor) else ()
