"""Counts on a CPU what a step asks of torch: operators, collectives, what is compiled, and values that the program reads."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from pytest_gputrain.records import CountCause, CountName, Counts, Place
from pytest_gputrain.worker.allocations import name_of, strided_parts, tensors_of, wraps
from pytest_gputrain.worker.counted_steps import CountedSteps, compiled, frames_of
from pytest_gputrain.worker.emulated_values.autograd_lines import AutogradLines
from pytest_gputrain.worker.flops import device_of, is_composite
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.threads import SharedMode, on_this_thread
from pytest_gputrain.worker.work import moves_memory, written_arguments

_FIRST: Final = slice(0, 1)
_READ: Final = {
    "aten._linalg_check_errors": _FIRST,
    "aten._local_scalar_dense": _FIRST,
    "aten._unique": _FIRST,
    "aten._unique2": _FIRST,
    "aten.bincount": _FIRST,
    "aten.equal": slice(0, 2),
    "aten.masked_select": slice(1, 2),
    "aten.nonzero": _FIRST,
    "aten.repeat_interleave": _FIRST,
    "aten.unique_consecutive": _FIRST,
    "aten.unique_dim": _FIRST,
    "aten.unique_dim_consecutive": _FIRST,
}
"""The operators for which the host of a GPU waits, because it needs a value or a size that the GPU computes, with the places
of the arguments that are read."""
_INDEXED: Final = ("aten.index", "aten._unsafe_index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_")
"""The operators that read an index of truth values."""
_NO_WORK: Final = frozenset(
    {"aten._local_scalar_dense", "aten._unsafe_view", "aten.lift_fresh", "aten.resize_", "aten.set_"}
)
_NO_OPERATORS: Final = frozenset({"c10d", "prim", "profiler"})
"""The namespaces of what is neither computed nor exchanged, or counted as a collective."""
_COLLECTIVES: Final = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_NO_EXCHANGE: Final = ("barrier", "wait_tensor", "wait_work")
_TORCH: Final = "torch/"
_METHODS: Final = ("torch/_tensor", "torch/functional.py")
"""The files in which torch keeps methods of tensors and functions that a program calls for itself."""


class OperatorCounter(SharedMode):
    """Counts the operators, collectives, compilations and reads of values of each step within `counting`, on a CPU.

    A value that depends on a trained parameter is on the GPU in a run on a GPU, as the parameter is. So a read of it makes
    the host wait there. Other values may be on the host even then, as lengths and labels often are.

    Args:
        lines: finds the user's own lines; None for a case without own code.
    """

    def __init__(self, lines: OwnLines | None) -> None:
        super().__init__()
        self.steps = CountedSteps(lines)
        self.steps.on_cpu = True
        self.steps.compiled = compiled()  # Cases that ran before this one in the same process have compiled functions, too.
        self._trained = _Trained()
        self._thread = threading.get_ident()
        self._lines = AutogradLines(self._line_of)
        self._here = _Here()
        self._judged: defaultdict[CountCause, list[int]] = defaultdict(lambda: [0, 0])
        self._others: defaultdict[CountCause, list[int]] = defaultdict(lambda: [0, 0])

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile that it may compile while this mode counts."""
        return True

    def counts(self) -> Counts | None:
        """Return the counts of all steps so far; None before the first step has ended, or if counting failed."""
        return None if self.trouble else self.steps.counts()

    @contextlib.contextmanager
    def counting(self, parameters: Iterable[Tensor], *, update: bool) -> Iterator[None]:
        """Provide a context that counts the operators and other events of one step.

        Args:
            parameters: the parameters that train, as far as they are known.
            update: whether the optimizer is to update at the end of the step.
        """
        for parameter in parameters:
            self._trained.add(parameter)
            if parameter.grad is not None:
                self._trained.add(parameter.grad)
        self._judged.clear()
        self._others.clear()
        self.steps.begin_asked()
        with contextlib.ExitStack() as stack:
            for name in ("cpu", "numpy", "tolist"):
                stack.enter_context(mock.patch.object(torch.Tensor, name, self._reading(name)))
            stack.enter_context(_no_garbage_collected())
            with self:
                yield
        for cause in self.steps.compiled_since():
            self._judged[cause][0] += 1
        self.steps.compiled = compiled()
        self.steps.add({**_as_pairs(self._judged), **self.steps.end_asked()}, _as_pairs(self._others), update=update)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if wraps(types):
            return NotImplemented
        if is_composite(func, device_of(args)):
            with on_this_thread(self):
                return func.decompose(*args, **kwargs)
        self.note_thread()
        try:
            given = list(tensors_of((args, kwargs.values())))
            depends = any(map(self._trained.has, given))
            read = _what_is_read(func, args, kwargs)
            reads_trained = any(map(self._trained.has, read))
        except Exception as error:  # Counting must not fail a program.
            self.note_trouble(error)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        try:
            if depends:
                is_exchange = func.namespace in _COLLECTIVES
                written = given if is_exchange else tensors_of(_written(func, args, kwargs))
                for tensor in (*tensors_of((result,)), *written):
                    self._trained.add(tensor)
            what, name = _kind_of(func)
            # This is also called for views, because it notes the line for their autograd nodes.
            place = self._place()
            if place and what:
                size = max(_bytes_of(given), _bytes_of(tensors_of((result,)))) if what == "collectives" else 0
                self._add(what, name, place, size)
            if place and read:
                self._add_read(name, place, trained=reads_trained)
        except Exception as error:
            self.note_trouble(error)
        return result

    def _reading(self, name: str) -> Callable[..., Any]:
        """Return a method of tensors that counts a read of values. On a CPU the original method runs no operator."""
        real = getattr(torch.Tensor, name)

        @functools.wraps(real)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._trained.has(tensor):
                return real(tensor, *args, **kwargs)
            if place := self._place():
                self._add_read(f"Tensor.{name}", place, trained=True)
            if name != "cpu":
                return real(tensor, *args, **kwargs)
            # On a GPU `.cpu()` waits once, and reading the copy does not wait again. So the copy is no longer watched for
            # reads.
            with _disable_current_modes():
                return tensor.clone()

        return read

    def _add_read(self, by: str, place: _Asked, *, trained: bool) -> None:
        """Count a read of a value. A value that torch's own code reads is only counted if it depends on a trained parameter;
        others are on the host of a GPU, too."""
        if trained:
            self._add("reads", by, place)
        elif place.library is None or place.library.file.startswith(_METHODS) or not place.library.file.startswith(_TORCH):
            self._add("other_reads", by, place)

    def _add(self, what: CountName, by: str, place: _Asked, size: int = 0) -> None:
        cause = CountCause(what=what, by=by, own=place.own, library=place.library, backward=place.backward, counts=())
        with self.lock:
            row = (self._judged if threading.get_ident() == self._thread else self._others)[cause]
            row[0] += 1
            row[1] += size

    # --- Lines

    def _place(self) -> _Asked | None:
        """Return the place that the last operator of this thread comes from; None if this package itself has called it."""
        line = self._lines.current()
        own, library, is_ours = self._here.found
        if is_ours:
            return None
        backward = torch._C._current_autograd_node() is not None
        if backward and own is None and self.steps.lines is not None:
            # Nodes of views, and nodes that add up gradients, do not lead to a line of the forward pass.
            own = self.steps.place_of(line) if line else self.steps.places(frames_of(sys._getframe()))[0]
        return _Asked(own, library, backward)

    def _line_of(self, frame: FrameType | None) -> str:
        """Find the places of a frame, and return its own line. In a backward pass autograd's node may know more."""
        within = torch._C._current_autograd_node() is not None
        self._here.found = own, _, _ = self.steps.places(frames_of(frame, within_backward=within))
        return own.at if own else ""


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Provide a context without garbage collection, because autograd copies a gradient to which a cycle of garbage still
    refers."""
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Asked(NamedTuple):
    """The place that a count comes from."""

    own: Place | None
    library: Place | None
    backward: bool


class _Here(threading.local):
    found: tuple[Place | None, Place | None, bool] = (None, None, False)
    """The places of the operator that was looked at last on this thread."""


class _Trained:
    """The storages whose values depend on a trained parameter, until they die."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def has(self, tensor: Tensor) -> bool:
        """Tell whether the value of a tensor depends on a trained parameter, or whether the tensor is one."""
        if isinstance(tensor, FakeTensor):
            return False
        if tensor.requires_grad and tensor.is_leaf:
            return True
        return any(part.untyped_storage()._cdata in self._references for part in _parts(tensor))

    def add(self, tensor: Tensor) -> None:
        """Record that the value of a tensor depends on a trained parameter."""
        for part in _parts(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if key not in self._references:
                self._references[key] = weakref.ref(storage, lambda _, key=key: self._references.pop(key, None))  # type: ignore[misc]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the storages of a tensor; none if the tensor has no storage."""
    return () if isinstance(tensor, FakeTensor) or wraps((type(tensor),)) else strided_parts(tensor)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yield the arguments that an operator writes to."""
    for place, name in written_arguments(func):
        yield args[place] if place < len(args) else kwargs.get(name)


@functools.cache
def _kind_of(func: Any) -> tuple[CountName | None, str]:
    """Return what an operator counts as, or None, and its name."""
    name, namespace = name_of(func), func.namespace
    if namespace in _COLLECTIVES:
        return (None if any(part in name for part in _NO_EXCHANGE) else "collectives"), name.rstrip("_")
    counts = namespace not in _NO_OPERATORS and name not in _NO_WORK and moves_memory(func)
    return ("operators" if counts else None), name


def _what_is_read(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments whose values a host would wait for on a GPU. Most operators have none."""
    name = name_of(func)
    if places := _READ.get(name):
        return [] if kwargs.get("output_size") is not None else list(tensors_of(args[places]))
    if name not in _INDEXED:
        return []
    # If the value is a single number, torch writes it as `masked_fill_` does, without reading the mask.
    if len(args) > 2 and args[2].numel() == 1:
        return []
    return [index for index in tensors_of(args[1]) if index.dtype in (torch.bool, torch.uint8)]


def _as_pairs(causes: dict[CountCause, list[int]]) -> dict[CountCause, tuple[int, int]]:
    return {cause: (number, size) for cause, (number, size) in causes.items()}
