"""Checks that a prediction sees what trains: on the GPU that is predicted for, not on the host, in the thread it follows."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from pytest_gputrain.records import Case
from pytest_gputrain.utils.units import format_bytes
from pytest_gputrain.worker.checks import CheckFailed, local
from pytest_gputrain.worker.trace import Trace, peaks

_REMEDY: Final = (
    "the host, whose memory is not that of the GPU; move the model by .to(setup.device), and give setup.device instead of "
    "cpu to a library that moves it"
)


_Storages = dict[int, tuple[torch.device, int]]
"""Device and bytes by address."""


class Placement:
    """The parameters that optimizers step while it is entered, their devices, and the other threads that compute.

    Args:
        gpu: label of the GPU that is predicted for; None for a CPU.
    """

    def __init__(self, gpu: torch.device | None) -> None:
        self._gpu = gpu
        self._stepped: dict[int, _Storages] = {}
        """The stepped storages by parameter: whoever moves the model between steps gives it another storage."""
        self._threads: set[str] = set()

    def __enter__(self) -> Placement:
        self._hook = register_optimizer_step_pre_hook(self._see)
        this_thread, dispatch = threading.get_ident(), FakeTensor.__torch_dispatch__
        bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

        # Modes, and so the tracker, belong to a thread; a fake brings torch's own with it into any other.
        def noting(cls: Any, *call: Any) -> Any:
            if threading.get_ident() != this_thread:
                self._note_thread()
            return dispatch(*call)

        # What another thread makes on the GPU is real, which nothing tells from what is on the host.
        def start(thread: threading.Thread) -> None:
            with _Watched(self._gpu, self._note_thread) if self._gpu is not None else contextlib.nullcontext():
                bootstrap(thread)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(FakeTensor, "__torch_dispatch__", classmethod(noting)))
            stack.enter_context(mock.patch.object(threading.Thread, "_bootstrap_inner", start))
            self._noting = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._noting.close()
        self._hook.remove()
        if self._threads and isinstance(error, Exception) and not isinstance(error, CheckFailed):
            raise self._refusal().with_traceback(error.__traceback__) from error

    def _note_thread(self) -> None:
        self._threads.add(threading.current_thread().name)

    def _refusal(self) -> CheckFailed:
        return CheckFailed(
            f"the case computes in the thread {min(self._threads)!r}, and a prediction follows only the one that calls the "
            "step: use other threads only to load data onto the host, or measure the case instead"
        )

    def _see(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            self._stepped |= {id(value): _storages([value]) for value in group["params"] if value.grad is not None}

    def check(self, model: nn.Module | None, case: Case, device: torch.device, trace: Trace, host: Trace) -> None:
        """Refuse a peak that misses what trains.

        Args:
            model: which the worker watches; without one, what optimizers stepped is what trains.
            case: whose engine may keep parameters on the host itself.
            device: whose memory ``trace`` is of.

        Raises:
            CheckFailed: the trained parameters are elsewhere, or another thread computes.
        """
        if self._threads:
            raise self._refusal()
        if not case.cpu_offload and not case.offload_param:
            stepped = {
                key: device_and_size for storages in self._stepped.values() for key, device_and_size in storages.items()
            }
            held = stepped if model is None else _storages(model.parameters())
            trained = {} if model is None else _storages(value for value in model.parameters() if value.requires_grad)
            # Lightning takes the model back to the host after its fit.
            if trained and device not in {where for where, _ in (*trained.values(), *stepped.values())}:
                raise CheckFailed(f"no trained parameter is on setup.device: {_places(trained, device)}, {_REMEDY}")
            peak = peaks(trace).bytes
            if peak < sum(size for _, size in held.values()):
                raise CheckFailed(
                    f"the GPU's peak of {format_bytes(peak)} is less than the parameters take: "
                    f"{_places(held, device)}, {_REMEDY}"
                )
        if _has_backward(host) and not _has_backward(trace):
            raise CheckFailed(f"all of the backward pass is on cpu, {_REMEDY}")


class _Watched(TorchFunctionMode):
    """Reports calls on its thread that name the GPU.

    Args:
        gpu: its label.
        report: is called for each.
    """

    def __init__(self, gpu: torch.device, report: Callable[[], None]) -> None:
        super().__init__()
        self._gpu = str(gpu)
        self._report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, str | torch.device) and str(value) == self._gpu for value in (*args, *kwargs.values())):
            self._report()
        return func(*args, **kwargs)


def _storages(parameters: Iterable[Tensor]) -> _Storages:
    """Return the storages of what this process holds of the parameters."""
    storages = {}
    for parameter in map(local, parameters):
        if isinstance(parameter, FakeTensor) and parameter.layout is torch.strided and parameter.fake_device.type != "meta":
            storage = parameter.untyped_storage()
            storages[storage._cdata] = parameter.fake_device, storage.nbytes()
    return {key: (where, size) for key, (where, size) in storages.items() if size}


def _has_backward(trace: Trace) -> bool:
    return any(allocation.phase == "backward" for allocation in trace.allocations)


def _places(storages: _Storages, device: torch.device) -> str:
    """Say where tensors are that are not on the device: ``1.2 GiB of them are on cpu``."""
    sizes = Counter[str]()
    for where, size in storages.values():
        sizes[str(where)] += size
    return ", ".join(f"{format_bytes(size)} of them are on {where}" for where, size in sizes.items() if where != str(device))
