"""Follows the storages of fake tensors, and adds up the work of the operators."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gputrain.worker.allocations import resizes_noted_by, wraps
from pytest_gputrain.worker.flops import is_convolution, recomputation_counted_by
from pytest_gputrain.worker.phases import Phases
from pytest_gputrain.worker.prediction.accumulation import ADD, ADD_IN_PLACE, holders_of_first, is_in_place
from pytest_gputrain.worker.prediction.layouts import Layout
from pytest_gputrain.worker.prediction.operators import Operator, Operators, Temporaries, tensors_in
from pytest_gputrain.worker.prediction.shapes import Call, Shapes, forget_shape
from pytest_gputrain.worker.prediction.values import compute, map_tensors, touches_values
from pytest_gputrain.worker.storages import Storages
from pytest_gputrain.worker.trace import Trace

_FAKES: Final = (FakeTensor,)
_DEVICE_OF: Final = torch.ops.prim.device.default

YOCTOSECONDS: Final = 10**24
"""Yoctoseconds in a second."""


@dataclass(slots=True)
class Work:
    """The work of one step."""

    flops: int = 0
    recomputed: int = 0
    bytes: int = 0
    yoctoseconds: int = 0
    """The least time that it takes, in whole numbers, whose sum does not depend on their order."""
    by_type: Counter[torch.dtype] = field(default_factory=Counter)
    """FLOPs outside of optimizers, by the type of their operands."""
    operators: dict[str, list[int]] = field(default_factory=dict)
    """Calls, FLOPs and bytes by operator."""

    @property
    def total(self) -> int:
        return self.flops


class Tracker(TorchDispatchMode):
    """The mode that follows a run on fakes. It is entered inside a FakeTensorMode, always the same one; each time it starts
    anew, but for what it remembers of operators.

    Args:
        device: whose storages are followed.
        rounding: bytes that every storage is rounded up to a multiple of.
        layouts: what to call instead of an operator, see `layouts`.
        temporaries: of the operators that have any.
        workspace_bytes: what the first matrix product of a thread takes for good; the backward pass has its own thread.
        peak_flops: FLOP/s by dtype; an empty one leaves the roofline at zero.
        convolution_flops: FLOP/s of convolutions in fp32, if they have another rate than products.
        bandwidth: bytes per second.
        sums_in_place: whether autograd adds up gradients in place, as it does where no mode looks on.

    Attributes:
        trace: of the device's memory.
        host: of the host's, where that is not the device.
        work: since the last `begin_step`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rounding: int = 1,
        layouts: dict[Any, Layout] | None = None,
        temporaries: dict[Any, Temporaries] | None = None,
        workspace_bytes: int = 0,
        peak_flops: dict[torch.dtype, float] | None = None,
        convolution_flops: float | None = None,
        bandwidth: float | None = None,
        sums_in_place: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._workspace_bytes = workspace_bytes
        self._time_of_flop = {dtype: round(YOCTOSECONDS / rate) for dtype, rate in (peak_flops or {}).items()}
        self._time_of_convolution = round(YOCTOSECONDS / convolution_flops) if convolution_flops else None
        self._time_of_byte = round(YOCTOSECONDS / bandwidth) if bandwidth else 0
        self._operators = Operators(layouts or {}, temporaries or {})
        self._shapes = Shapes()
        self._rounding = rounding
        self._holders = holders_of_first() if sums_in_place else None
        self._begin()

    def _begin(self) -> None:
        self._on_device = Storages(Trace(self._rounding))
        self._on_host = Storages(Trace())
        self._workspaces: set[bool] = set()
        """Whether of the backward thread."""
        self._phases = Phases(self.trace.enter)
        self.work = Work()

    @property
    def trace(self) -> Trace:
        return self._on_device.trace

    @property
    def host(self) -> Trace:
        return self._on_host.trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch wraps the dispatch of a mode to keep its compiler out, which costs as much as the rest. Nothing compiles.
        return False

    def begin_step(self) -> None:
        """Note that a step starts: its phases and its work are counted anew."""
        if self._phases.current == "build":
            self.trace.begin_training()
        self._phases.begin_step()
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            # Autograd asks for it more often than all operators are called together.
            return args[0].fake_device
        if types != _FAKES and wraps(types):
            return self._on_parts(func, args, kwargs or {}) if _is_elementwise_on_lists(func) else NotImplemented
        kwargs = kwargs or {}
        if func is ADD and self._holders is not None and is_in_place(args, kwargs, self._holders):
            func = ADD_IN_PLACE
        operator = self._operators[func]
        self._phases.follow()
        tensors: list[Tensor] = []
        key = self._shapes.key(operator, args, kwargs, tensors)
        if key is not None and touches_values(operator, tensors):
            key = None
        call = None if key is None else self._shapes.recall(key)
        if call is not None:
            return self._again(operator, call, tensors)
        result = compute(operator, func, args, kwargs, tensors)
        written = sum(self._see_any(tensor, operator.name) for tensor in tensors_in((result,)))
        temporaries = operator.temporaries(args) if operator.temporaries is not None else ()
        self._pass(temporaries, operator)
        if result is None:
            written = sum(self._bytes_of(tensor) for tensor in operator.targets(args, kwargs))
        described = None if key is None else self._shapes.described(result, tensors)
        call = described or Call([])
        call.temporaries = temporaries
        self._measure(call, operator, tensors, written, result, args, kwargs)
        if described is not None:
            self._shapes.remember(key, described)
        self._count(operator, call)
        if operator.reshapes:
            for tensor in tensors:
                forget_shape(tensor)
        return result

    def _again(self, operator: Operator, call: Call, tensors: list[Tensor]) -> Any:
        """Do what `__torch_dispatch__` does, for a call that is remembered."""
        result = self._shapes.make(call, tensors)
        for described, tensor in zip(call.results, (result,) if call.kind is None else result, strict=True):
            if described.nbytes is None:
                continue
            if described.device != self._device:
                self._see_elsewhere(tensor, operator.name)
                continue
            storage = tensor.untyped_storage()
            self._on_device.see(
                storage, described.nbytes, operator.name, self._phases.current, described.size, described.dtype
            )
        self._pass(call.temporaries, operator)
        self._count(operator, call)
        return result

    def _on_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator on this process's parts of lists of DTensors, whose elements need no other, as in DTensor.

        DTensor takes minutes to find that out, with the square of the tensors in a list.
        """
        parts = self.__torch_dispatch__(func, _FAKES, map_tensors(args, _part), map_tensors(kwargs, _part))
        if parts is None:
            return None
        return [type(whole)(part, whole._spec, requires_grad=False) for whole, part in zip(args[0], parts, strict=True)]

    def __enter__(self) -> Tracker:
        self._begin()
        self._phases.__enter__()
        self._counting_recomputation = recomputation_counted_by(lambda: self.work)
        self._counting_recomputation.__enter__()
        self._resizing = resizes_noted_by(self._see_resized)
        self._resizing.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._resizing.__exit__(*exc_info)
        self._counting_recomputation.__exit__(*exc_info)
        self._phases.__exit__(*exc_info)
        # No callbacks into a tracker that nobody reads any more.
        self._on_device.leave()
        self._on_host.leave()

    def _see_any(self, tensor: Tensor, operator: str) -> int:
        """Look at the storages of a result, and return the bytes of its elements on the device."""
        if not isinstance(tensor, FakeTensor):
            return 0
        if tensor.fake_device != self._device:
            self._see_elsewhere(tensor, operator)
            return 0
        if tensor.layout is torch.strided:
            return self._see(tensor, operator)
        return sum(self._see(part, operator) for part in sparse_parts(tensor))

    def _see(self, tensor: Tensor, operator: str) -> int:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._on_device.see(storage, size, operator, self._phases.current, tuple(tensor.shape), tensor.dtype)
        return min(tensor.numel() * tensor.itemsize, size)

    def _see_elsewhere(self, tensor: FakeTensor, operator: str) -> None:
        """Follow a storage on the host; what is neither there nor on the device (``meta``) is nowhere."""
        if tensor.fake_device.type == "cpu" and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._on_host.see(storage, storage.nbytes(), operator, self._phases.current, tuple(tensor.shape), tensor.dtype)

    def _bytes_of(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor's elements on the device; of an expanded one no more than the storage."""
        if tensor.layout is not torch.strided or getattr(tensor, "fake_device", None) != self._device:
            return 0
        return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())

    def _see_resized(self, storage: torch.UntypedStorage) -> None:
        if self._on_device.has(storage):
            size = storage.nbytes()
            self._on_device.see(storage, size, "resize_", self._phases.current, (size,), None)

    def _pass(self, sizes: tuple[int, ...], operator: Operator) -> None:
        """Allocate and free what a kernel holds beside its results: most make these first."""
        if operator.multiplies and self._workspace_bytes:
            self._take_workspace()
        phase = self._phases.current
        numbers = [self.trace.allocate(size, operator.name, phase, (size,), "bytes") for size in sizes if size]
        for number in reversed(numbers):
            self.trace.free(number)

    def _take_workspace(self) -> None:
        backward = self._phases.current == "backward"
        if backward not in self._workspaces:
            self._workspaces.add(backward)
            size = self._workspace_bytes
            self.trace.allocate(size, "workspace of matrix products", self._phases.current, (size,), "bytes")

    def _measure(
        self, call: Call, operator: Operator, read: list[Tensor], written: int, result: Any, args: Any, kwargs: Any
    ) -> None:
        """Note the work of a call."""
        if operator.moves:
            call.moved = written + sum(self._bytes_of(tensor) for tensor in read)
        call.yoctoseconds = call.moved * self._time_of_byte
        if operator.flops is not None:
            call.flops, call.arithmetic = operator.flops(*args, **kwargs, out_val=result), read[0].dtype
            each = self._time_of_flop.get(call.arithmetic, 0)
            if self._time_of_convolution and is_convolution(operator.name) and call.arithmetic == torch.float32:
                each = self._time_of_convolution
            call.yoctoseconds = max(call.yoctoseconds, call.flops * each)

    def _count(self, operator: Operator, call: Call) -> None:
        work = self.work
        work.bytes += call.moved
        work.flops += call.flops
        work.yoctoseconds += call.yoctoseconds
        if call.arithmetic is not None and self._phases.current != "optimizer":
            work.by_type[call.arithmetic] += call.flops
        row = work.operators.get(operator.name)
        if row is None:
            work.operators[operator.name] = [1, call.flops, call.moved]
        else:
            row[0] += 1
            row[1] += call.flops
            row[2] += call.moved


@functools.cache
def _is_elementwise_on_lists(func: Any) -> bool:
    name = str(func.overloadpacket)
    return name.startswith("aten._foreach_") and not name.endswith(("_norm", "_max"))


def _part(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the storages of a sparse one; only torch's sparse gradients are followed."""
    return (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else ()


TENSOR_RATES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Name of the arithmetic by dtype."""
