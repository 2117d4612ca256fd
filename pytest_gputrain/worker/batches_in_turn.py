"""Lets a batch that a process of a DataLoader sends be counted when the loader hands it out, not when it arrives."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.data.dataloader import _BaseDataLoaderIter


@contextlib.contextmanager
def batches_in_turn() -> Iterator[None]:
    """Provide a context in which dispatch modes see the batches of a DataLoader in the order of the data set.

    Which of its processes is the first to send a batch differs from run to run. The loader keeps a batch that is early, so
    a mode that saw each as it arrives would count more or fewer of them in each run.
    """
    with contextlib.ExitStack() as stack:
        followed = set()
        initialize: Any = _BaseDataLoaderIter.__init__

        def follow(kind: Any) -> None:
            if "_try_get_data" in vars(kind) and kind not in followed:
                followed.add(kind)
                stack.enter_context(_in_turn(kind))

        def follow_and_initialize(loader: Any, *args: Any, **kwargs: Any) -> None:
            for kind in type(loader).__mro__:
                follow(kind)
            initialize(loader, *args, **kwargs)
            # A thread would pin batches in the order in which they arrive, if a CPU is measured on a machine with a GPU.
            loader._pin_memory = False

        for kind in _subclasses(_BaseDataLoaderIter):  # A DataLoader of any of these classes may be in use already.
            follow(kind)
        # torchdata's iterator is another class, and it may be imported later. So classes are looked for whenever an iterator
        # is made.
        stack.enter_context(mock.patch.object(_BaseDataLoaderIter, "__init__", follow_and_initialize))
        yield


def _subclasses(kind: Any) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


@contextlib.contextmanager
def _in_turn(kind: Any) -> Iterator[None]:
    """Provide the context of `batches_in_turn` for the iterators of one class of DataLoader."""
    receive, hand_out = kind._try_get_data, kind._process_data
    waiting: dict[int, list[_Rebuilt]] = {}
    """The tensors of each batch, by the id of the batch. A loader may drop a batch, so this keeps none alive."""
    with_state = any(each.__module__.startswith("torchdata.") for each in kind.__mro__)

    def received(loader: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), _Rebuilding() as rebuilding:
            success, data = receive(loader, *args, **kwargs)
        if success and rebuilding.made:
            _, sent = data
            # A process that has just started sends the state of its data set instead of a batch.
            if with_state and not isinstance(sent, tuple):
                for rebuilt in rebuilding.made:
                    rebuilt.show()
            else:
                waiting[id(sent[0] if with_state else sent)] = rebuilding.made
        return success, data

    def handed_out(loader: Any, batch: Any, *args: Any) -> Any:
        for rebuilt in waiting.pop(id(batch), ()):
            rebuilt.show()
        return hand_out(loader, batch, *args)

    patch = mock.patch.object
    with patch(kind, "_try_get_data", received), patch(kind, "_process_data", handed_out):
        yield


class _Rebuilt(NamedTuple):
    """A tensor that came from another process."""

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    layout: tuple[Any, ...]

    def show(self) -> None:
        """Repeat the operator that rebuilt the tensor, so that the present dispatch modes see it."""
        if (storage := self.storage()) is not None:
            torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.layout)


class _Rebuilding(TorchDispatchMode):
    """Records the tensors that are rebuilt while this mode is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[_Rebuilt] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.set_:
            for value in tree_iter(result):
                if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                    layout = value.storage_offset(), value.size(), value.stride()
                    self.made.append(_Rebuilt(weakref.ref(value.untyped_storage()), value.dtype, layout))
        return result
