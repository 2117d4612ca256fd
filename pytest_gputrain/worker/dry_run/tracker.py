"""Follows the storages of fake tensors, and adds up the work of the operators."""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_gputrain.records import LiveTensor, TrainingPhase
from pytest_gputrain.worker.allocations import resizes_told_to, wraps
from pytest_gputrain.worker.dry_run.allocator import EMPTY_CACHE
from pytest_gputrain.worker.dry_run.layouts import Layout
from pytest_gputrain.worker.dry_run.shapes import Shapes
from pytest_gputrain.worker.dry_run.values import compute, map_tensors
from pytest_gputrain.worker.flops import formulas, recomputation_told_to

_FAKES: Final = (FakeTensor,)
_DEVICE_OF: Final = torch.ops.prim.device.default

_PRODUCTS: Final = frozenset({"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm"})

Temporaries = Callable[[tuple[Any, ...]], int]
"""Bytes that an operator's kernel takes and gives back, from the operator's arguments."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a storage was made by and for."""

    bytes: int
    operator: str
    phase: TrainingPhase
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class Work:
    """Of one step."""

    flops: int = 0
    recomputed: int = 0
    bytes: int = 0
    roofline_seconds: float = 0.0
    operators: dict[str, list[int]] = field(default_factory=dict)
    """Calls, FLOPs and bytes by operator."""

    @property
    def total(self) -> int:
        return self.flops


@dataclass(frozen=True, slots=True)
class _Operator:
    """What the tracker looks up of an operator once."""

    name: str
    flops: Callable[..., int] | None
    moves: bool
    multiplies: bool
    """Whether it reads and writes memory: a view does not."""
    temporaries: Temporaries | None


class Tracker(TorchDispatchMode):
    """Entered inside a FakeTensorMode.

    Args:
        device: whose storages are followed.
        rounding: bytes that every storage is rounded up to a multiple of.
        layouts: what to call instead of an operator, see `layouts`.
        temporaries: of the operators that have any.
        workspace_bytes: what the first matrix product of a thread takes for good; the backward pass has its own thread.
        peak_flops: FLOP/s by dtype; an empty one leaves the roofline at zero.
        bandwidth: bytes per second.

    Attributes:
        trace: an allocation's number where it is made, its complement where it is freed; see `allocator.replay`.
        allocations: by number.
        live_bytes: now.
        host_bytes: highest sum of storages on the host, where that is not the device.
        phase_peaks: highest ``live_bytes`` by phase.
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
        bandwidth: float | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._rounding = rounding
        self._temporaries = temporaries or {}
        self._workspace_bytes = workspace_bytes
        self._workspaces: set[bool] = set()
        """Whether of the backward thread."""
        self._rates = peak_flops or {}
        self._seconds_per_byte = 1 / bandwidth if bandwidth else 0.0
        self._formulas = formulas()
        self._known: dict[Any, _Operator] = {}
        self._shapes = Shapes(layouts or {})
        self._numbers: dict[int, int] = {}
        """Allocation by address of the storage."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._nbytes: dict[int, int] = {}
        self.trace = array("q")
        self.allocations: list[Allocation] = []
        self.live_bytes = 0
        self._on_host: dict[int, int] = {}
        """Bytes by address of the storage."""
        self._live_on_host = 0
        self.host_bytes = 0
        self.phase: TrainingPhase = "build"
        self.phase_peaks: dict[TrainingPhase, int] = {"build": 0}
        self._peak = 0
        self._peaks_at: dict[TrainingPhase, int] = {"build": 0}
        """Events of the trace until the peak of each phase."""
        self.peak_phase: TrainingPhase = "build"
        self.work = Work()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch wraps the dispatch of a mode to keep its compiler out, which costs as much as the rest. Nothing compiles.
        return False

    def begin_step(self) -> None:
        """A step starts: its phases and its work are counted anew."""
        if self.phase == "build":
            self.trace.append(EMPTY_CACHE)
            self._peak = 0
        self._enter("forward")
        self.work = Work()

    @property
    def peak_bytes(self) -> int:
        """Highest ``live_bytes`` since the first step began."""
        return self._peak

    def largest_at_peaks(self, count: int) -> dict[TrainingPhase, tuple[LiveTensor, ...]]:
        """What lived at the peak of each phase, alike storages together, the largest ``count`` of them."""
        return {phase: self._largest_at(at)[:count] for phase, at in self._peaks_at.items()}

    def _largest_at(self, event_number: int) -> tuple[LiveTensor, ...]:
        live: set[int] = set()
        for event in self.trace[:event_number]:
            if event >= 0:
                live.add(event)
            elif event != EMPTY_CACHE:
                live.remove(~event)
        alike: dict[Allocation, int] = {}
        for number in sorted(live):
            allocation = self.allocations[number]
            alike[allocation] = alike.get(allocation, 0) + 1
        rows = [live_tensor(allocation, times) for allocation, times in alike.items()]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            # Autograd asks for it more often than all operators are called together.
            return args[0].fake_device
        if types != _FAKES and wraps(types):
            return self._on_parts(func, args, kwargs or {}) if _is_elementwise_on_lists(func) else NotImplemented
        kwargs = kwargs or {}
        operator = self._known.get(func) or self._look_up(func)
        self._follow_phase()
        if operator.multiplies and self._workspace_bytes:
            self._take_workspace()
        read = list(tensors_in((*args, *kwargs.values())))
        result = compute(func, args, kwargs, read, self._shapes)
        if operator.temporaries is not None:
            self._pass(operator.temporaries(args), operator.name)
        moved = 0
        for tensor in tensors_in((result,)):
            if not isinstance(tensor, FakeTensor):
                continue
            if tensor.fake_device != self._device:
                self._see_elsewhere(tensor)
            elif tensor.layout is torch.strided:
                moved += self._see(tensor, operator.name)
            else:
                moved += sum(self._see(part, operator.name) for part in sparse_parts(tensor))
        self._count(operator, read, result, moved, args, kwargs)
        return result

    def _on_parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator on lists of DTensors, each element of which needs no other: this process's parts, as in DTensor.

        DTensor takes minutes to find that out, with the square of the tensors in a list.
        """
        parts = self.__torch_dispatch__(func, _FAKES, map_tensors(args, _part), map_tensors(kwargs, _part))
        if parts is None:
            return None
        return [type(one)(part, one._spec, requires_grad=False) for one, part in zip(args[0], parts, strict=True)]

    def __enter__(self) -> Tracker:
        self._telling = recomputation_told_to(lambda: self.work)
        self._telling.__enter__()
        self._resizing = resizes_told_to(self._see_resized)
        self._resizing.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self._resizing.__exit__(*exc_info)
        self._telling.__exit__(*exc_info)
        # No callbacks into a tracker that nobody reads any more.
        self._references.clear()

    def _look_up(self, func: Any) -> _Operator:
        packet = func.overloadpacket
        name = str(packet)
        reads_nothing = name.startswith(("aten.empty", "aten.new_empty")) or name == "aten.detach"
        known = _Operator(
            name=name,
            flops=self._formulas.get(packet),
            moves=not (func.is_view or reads_nothing),
            multiplies=name in _PRODUCTS,
            temporaries=self._temporaries.get(packet),
        )
        self._known[func] = known
        return known

    def _follow_phase(self) -> None:
        phase = self.phase
        if phase == "build":
            return
        # True for all of a backward pass, between its nodes too.
        if torch._C._current_graph_task_id() != -1:
            if phase != "backward":
                self._enter("backward")
        elif phase == "backward":
            self._enter("optimizer")

    def _enter(self, phase: TrainingPhase) -> None:
        self.phase = phase
        self._mark_peak()

    def _mark_peak(self) -> None:
        live, phase = self.live_bytes, self.phase
        if live > self.phase_peaks.get(phase, -1):
            self.phase_peaks[phase] = live
            self._peaks_at[phase] = len(self.trace)
        if live > self._peak:
            self._peak, self.peak_phase = live, phase

    def _see(self, tensor: Tensor, operator: str) -> int:
        """Bytes of the tensor's elements, after its storage was looked at."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._nbytes.get(key)
        if known is None:
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        if known != size:
            self._hold(key, size, operator, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        return min(tensor.numel() * tensor.itemsize, size)

    def _see_resized(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if self._nbytes.get(key, size) != size:
            self._hold(key, size, "resize_", (size,), "bytes")

    def _hold(self, key: int, size: int, operator: str, shape: tuple[int, ...], dtype: str) -> None:
        """A storage is new, or has become larger or smaller."""
        before = self._numbers.pop(key, None)
        self._nbytes[key] = size
        if size:
            self._numbers[key] = self._allocate(size, operator, shape, dtype)
        if before is not None:
            self._free(before)
        self._mark_peak()

    def _see_elsewhere(self, tensor: FakeTensor) -> None:
        """Count a storage on the host; what is neither there nor on the device (``meta``) is nowhere."""
        if tensor.fake_device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._on_host.get(key)
        if known is None:
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        if known != size:
            self._on_host[key] = size
            self._live_on_host += size - (known or 0)
            self.host_bytes = max(self.host_bytes, self._live_on_host)

    def _forget(self, key: int) -> None:
        self._references.pop(key, None)
        self._nbytes.pop(key, None)
        self._live_on_host -= self._on_host.pop(key, 0)
        number = self._numbers.pop(key, None)
        if number is not None:
            self._free(number)

    def _allocate(self, size: int, operator: str, shape: tuple[int, ...], dtype: str) -> int:
        held = -(-size // self._rounding) * self._rounding
        number = len(self.allocations)
        self.allocations.append(Allocation(held, operator, self.phase, shape, dtype))
        self.trace.append(number)
        self.live_bytes += held
        return number

    def _free(self, number: int) -> None:
        self.trace.append(~number)
        self.live_bytes -= self.allocations[number].bytes

    def _pass(self, size: int, operator: str) -> None:
        """A kernel's own memory, taken and given back."""
        if size:
            number = self._allocate(size, operator, (size,), "bytes")
            self._mark_peak()
            self._free(number)

    def _take_workspace(self) -> None:
        backward = self.phase == "backward"
        if backward not in self._workspaces:
            self._workspaces.add(backward)
            self._allocate(self._workspace_bytes, "workspace of matrix products", (self._workspace_bytes,), "bytes")

    def _count(self, operator: _Operator, read: list[Tensor], result: Any, written: int, args: Any, kwargs: Any) -> None:
        work = self.work
        moved = flops = 0
        if operator.moves:
            moved = written
            for tensor in read:
                if tensor.layout is torch.strided and getattr(tensor, "fake_device", None) == self._device:
                    # Of an expanded tensor no more than the storage.
                    moved += min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
            work.bytes += moved
        seconds = moved * self._seconds_per_byte
        if operator.flops is not None:
            flops = operator.flops(*args, **kwargs, out_val=result)
            work.flops += flops
            rate = self._rates.get(read[0].dtype)
            if rate:
                seconds = max(seconds, flops / rate)
        work.roofline_seconds += seconds
        row = work.operators.get(operator.name)
        if row is None:
            work.operators[operator.name] = [1, flops, moved]
        else:
            row[0] += 1
            row[1] += flops
            row[2] += moved


@functools.cache
def _is_elementwise_on_lists(func: Any) -> bool:
    name = str(func.overloadpacket)
    return name.startswith("aten._foreach_") and not name.endswith(("_norm", "_max"))


def _part(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def live_tensor(allocation: Allocation, count: int = 1) -> LiveTensor:
    """As reports show it."""
    return LiveTensor(
        bytes=allocation.bytes * count,
        count=count,
        operator=allocation.operator,
        phase=allocation.phase,
        shape=allocation.shape,
        dtype=allocation.dtype,
    )


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among the values, in lists and tuples too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the storages of a sparse one; only torch's sparse gradients are followed."""
    return (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else ()


TENSOR_RATES: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Name of the arithmetic by dtype."""
