"""Finds memory that own code keeps from step to step: a leak, or a buffer that its test allows."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_iter

from pytest_gputrain.records import LiveTensor, Task
from pytest_gputrain.records.step_memory import COUNTED_ROUNDS, LEAST_HEAP, LEAST_RISE, Rise, rise_of
from pytest_gputrain.utils.units import KiB, MiB, format_bytes
from pytest_gputrain.worker.allocations import name_of, strided_parts, wraps
from pytest_gputrain.worker.checks import CheckFailed, local
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.loop import Steps
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.threads import SharedMode
from pytest_gputrain.worker.trace import taken
from pytest_gputrain.worker.training import Trainable

TENSORS: Final = LEAST_RISE
"""Growth of a round that is none."""
PROCESS: Final = 4 * MiB
"""Growth of the process in a step that is none: its allocator takes more at a time than it needs."""

_ROUNDS: Final = 3
_STEPS: Final = 10
_SHARE: Final = 0.8


Kept = tuple[Counter[LiveTensor], int]
"""The tensors that live of what some steps have made, how many there are of each, and the number of these steps."""


class Growth:
    """Records the tensors that are left at the end of each round. A round is one step, or the steps over which gradients are
    accumulated.

    Args:
        task: the task, which says how much growth is allowed.
        group: whose processes agree on further rounds.
    """

    def __init__(self, task: Task, group: Group) -> None:
        self._name = task.case.model
        self._steps = task.case.gradient_accumulation
        self._curve = task.curve
        self._allowed = task.growth_bytes
        self._folders = [Path(task.root)]
        self._group = group
        self._resident: list[int] = []
        """Resident bytes of this process before the first timed step and after each one, where they are known."""
        self._handed_out: list[int] = []
        """Bytes that malloc has handed out at the same times, where they are known."""
        self._ends: list[int] = []
        """Bytes in tensors after each timed round, on a GPU."""
        self._begin_step: Callable[[], None] = lambda: None
        self._end_step: Callable[[], None] = lambda: None
        self._last_ends: list[int] = []
        """Bytes in tensors after each step that runs for nothing but this."""
        self._rounds = 0
        """The rounds so far, where they are trained for this."""
        self._known: tuple[int, int] = (0, 0)
        """Bytes in tensors at the last look, and those that were expected."""
        self._device = "cpu" if task.device_type == "cpu" else "cuda"
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Provide a context that records the steps of optimizers."""

        def see(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._optimizers.add(optimizer)

        with register_optimizer_step_pre_hook(see):
            yield

    def count(
        self,
        training: Trainable,
        allocated: Callable[[], int],
        begin_step: Callable[[], None],
        end_step: Callable[[], None],
    ) -> Steps:
        """Run the counted rounds. The first one makes the optimizer's states, and the second one uses them.

        Two more tell whether tensors are left over. Garbage is collected between these, so that it adds nothing to the peak.

        Args:
            allocated: bytes in tensors now.
            begin_step: is called before each step.
            end_step: is called after each one.

        Raises:
            CheckFailed: more tensors live after each round.
        """
        self._begin_step, self._end_step = begin_step, end_step
        first = []
        for _ in range(COUNTED_ROUNDS // 2):
            first.append((yield from self._round(training, allocated)))
        if self._curve:  # All steps of a curve have been counted by now, so no further rounds follow.
            return
        later = [self._collected(training, allocated)]
        training.losses.clear()  # the losses of further rounds would add to the peak
        for _ in range(COUNTED_ROUNDS // 2):
            later.append((yield from self._round(training, allocated, collect=True)))
        if self._any(first[1] > first[0] and self._grows(later)):
            yield from self._look_closer(training, allocated)

    def follow(self, training: Trainable, allocated: Callable[[], int], rounds: int) -> Generator[bool, None, str]:
        """Run this many rounds after the counted ones, and describe what they keep at even distances.

        Raises:
            CheckFailed: more and more tensors live after each round, up to the last one.
        """
        before, ends = self._rounds, [self._unexpected(training, allocated)]
        for _ in range(rounds):
            ends.append((yield from self._round(training, allocated, collect=True)))
        return (yield from self._look_at(ends, before - 1, training, allocated))

    def note_end(self, training: Trainable, allocated: int) -> None:
        """Record the bytes of tensors after a further step, which may be the last one."""
        self._last_ends.append(self._unexpected(training, lambda: allocated))

    def judge_ends(self, steps: int) -> str:
        """Describe the memory that the steps recorded by `note_end` keep.

        Args:
            steps: the number of steps so far, with them.
        """
        ends = self._last_ends[self._steps - 1 :: self._steps]
        rise = rise_of(ends, max(TENSORS, self._allowed))
        if rise is None:
            return ""
        step = steps - len(self._last_ends) + rise.first * self._steps + 1
        # No further steps run. So nobody knows whether the memory is kept for ever or comes from longer batches.
        return self._told(rise, step)

    def _told(self, rise: Rise, step: int) -> str:
        every = rise.every * self._steps
        after = f"every {every} steps" if every > 1 else "each step"
        return f"its steps keep {format_bytes(rise.mean)} more of tensors after {after}, from step {step} on"

    def _look_at(
        self,
        ends: Sequence[int],
        before: int,
        training: Trainable,
        allocated: Callable[[], int],
        kept: Callable[[], Kept] | None = None,
    ) -> Generator[bool, None, str]:
        """Describe what rounds keep at even distances. If each of the last rounds keeps something, further rounds run to
        find it.

        Args:
            ends: the bytes after each of these rounds.
            before: the number of rounds before them.

        Raises:
            CheckFailed: each does.
        """
        rise = rise_of(ends, max(TENSORS, self._allowed))
        step = (before + rise.first) * self._steps + 1 if rise else 0
        if self._any(rise is not None and rise.every == 1):
            # On a GPU the growth may have begun before the first timed step. So a step is named only if it is a later one.
            since = f" from step {step} on" if rise and (rise.first > 1 or self._rounds) else ""
            yield from self._look_closer(training, allocated, kept, since)
        elif rise:
            return self._told(rise, step)
        return ""

    def _any(self, suspicious: bool) -> bool:
        """Tell whether any process of the case is suspicious, so that all processes take further steps."""
        (suspects,) = self._group.union(({"this"} if suspicious else set(),))
        return bool(suspects)

    def begin_step(self) -> None:
        """Note that a timed step is to begin."""
        if not self._resident:
            self._look_at_process()

    def end_step(self, training: Trainable, allocated: int | None) -> None:
        """Note that a timed step has ended.

        Args:
            allocated: bytes in tensors, where an allocator knows.
        """
        self._look_at_process()
        if allocated is not None:
            self._ends.append(allocated - self._expected(training))

    def check(
        self,
        training: Trainable,
        allocated: Callable[[], int | None],
        kept: Callable[[], Kept] | None = None,
        before: int = 0,
    ) -> Generator[bool, None, str]:
        """Describe what the timed steps keep, if it is more than allowed.

        Args:
            before: the number of steps before them.
            kept: tells what lives of what the steps have made, where that is known.

        Raises:
            CheckFailed: they kept more and more.
        """
        if self._curve:
            return ""
        told = ""
        if self._ends:
            ends = self._ends[self._steps - 1 :: self._steps]
            told = yield from self._look_at(ends, before // self._steps, training, lambda: allocated() or 0, kept)
        most = max(PROCESS, self._allowed)
        grown = [later - earlier for earlier, later in itertools.pairwise(self._resident)]
        growing = [growth for growth in grown if growth > most]
        mean = sum(grown) / max(1, len(grown))
        if len(grown) >= _STEPS and len(growing) >= _SHARE * len(grown):
            raise CheckFailed(
                f"the process of {self._name} grows by {format_bytes(mean)} a step, in {len(growing)} of "
                f"{len(grown)} timed steps, beside the tensors that are counted: look for what each step keeps, "
                f"such as NumPy arrays in a list, or allow it with {_marker(mean)}"
            )
        if not grown or len(growing) < len(grown):
            mean = _steady_growth(self._handed_out[:: self._steps], most) / self._steps
        if mean > most:
            return f"the process grew by {format_bytes(mean)} a step on average, beside the tensors that are counted"
        return told

    @property
    def on_heap(self) -> int | None:
        """Return the bytes that each timed step leaves on the heap; 0 if the heap does not grow on and on.

        None if malloc does not tell, or the steps are too few.
        """
        ends = self._handed_out[:: self._steps]
        if len(ends) <= _ROUNDS or self._curve:
            return None
        last = ends[len(ends) // 2 :]  # The first steps allocate memory that later steps reuse.
        return (last[-1] - last[0]) // (len(last) - 1) // self._steps if _steady_growth(ends, LEAST_HEAP) else 0

    def _look_at_process(self) -> None:
        for sizes, now in ((self._resident, resident_bytes()), (self._handed_out, malloc_bytes())):
            if now is not None:
                sizes.append(now)

    def _round(
        self, training: Trainable, allocated: Callable[[], int], *, collect: bool = False
    ) -> Generator[bool, None, int]:
        """Train one more round, and return the bytes in tensors after it."""
        for _ in range(self._steps):
            self._begin_step()
            yield True
            if collect:
                gc.collect()
            self._end_step()
        self._rounds += 1
        return self._unexpected(training, allocated)

    def _collected(self, training: Trainable, allocated: Callable[[], int]) -> int:
        """Collect garbage, and return the bytes of tensors without those that `_expected` counts."""
        gc.collect()
        return self._unexpected(training, allocated)

    def _unexpected(self, training: Trainable, allocated: Callable[[], int]) -> int:
        """Return the bytes of tensors without those that `_expected` counts. Counting these takes long for many tensors."""
        now, (before, expected) = allocated(), self._known
        if now != before:
            expected = self._expected(training)
            self._known = now, expected
        return now - expected

    def _expected(self, training: Trainable) -> int:
        """Return the bytes of the losses that the worker keeps, and of the gradients and optimizer states of all parameters.

        A parameter gets these when it first trains, which is late for an expert that is seldom chosen. What a state collects
        in a list is not among them: it may grow for ever.
        """
        optimizers = tuple(self._optimizers)
        states = [value for optimizer in optimizers for state in optimizer.state.values() for value in _values(state)]
        gradients = [value.grad for optimizer in optimizers for group in optimizer.param_groups for value in group["params"]]
        tensors = (local(value) for value in (*training.losses, *states, *gradients) if isinstance(value, Tensor))
        storages = (part.untyped_storage() for tensor in tensors for part in strided_parts(tensor))
        sizes = {storage._cdata: storage.nbytes() for storage in storages if storage.device.type == self._device}
        return sum(taken(size, self._device) for size in sizes.values())

    def _grows(self, ends: Sequence[int]) -> bool:
        growth = [later - earlier for earlier, later in itertools.pairwise(ends)]
        return min(growth) > 0 and sum(growth) > max(TENSORS, self._allowed) * len(growth)

    def _look_closer(
        self, training: Trainable, allocated: Callable[[], int], kept: Callable[[], Kept] | None = None, since: str = ""
    ) -> Steps:
        """Run further rounds to find out what they keep.

        Args:
            since: the step from which on they do, as a part of a sentence.

        Raises:
            CheckFailed: they do.
        """
        ends = [self._collected(training, allocated)]
        # `_Makers` is a TorchDispatchMode, which some operators refuse. So it is used only if `kept` knows no tensors.
        known = None if kept is None else kept()
        with _Makers(OwnLines(self._folders), self._device) if known is None else contextlib.nullcontext() as makers:
            for _ in range(_ROUNDS):
                if makers:
                    makers.begin_round()
                end = yield from self._round(training, allocated, collect=True)
                ends.append(end - makers.latest_bytes() if makers else end)
        if makers:
            del ends[0]  # The first round was not watched, so nobody knows which tensors it made.
        if not self._grows(ends):
            return
        mean = (ends[-1] - ends[0]) / (len(ends) - 1)
        part = makers.largest(mean) if makers else _largest(known, mean, self._steps) if known else ""
        raise self._kept(mean, f"{since}{part}")

    def _kept(self, mean: float, which: str) -> CheckFailed:
        after = "step" if self._steps == 1 else f"round of {self._steps} steps"
        return CheckFailed(
            f"{self._name} keeps {format_bytes(mean)} more of tensors after every {after}{which}; do not "
            f"keep them "
            "(a loss that is kept without detach() keeps its graph), or, if a buffer is meant to fill, allow it with "
            f"{_marker(mean)}"
        )


class _Makers(SharedMode):
    """Records which operator and line made each live storage.

    Args:
        device: the type of device whose storages are meant. The host's copies are no growth of a GPU.
    """

    def __init__(self, lines: OwnLines, device: str) -> None:
        super().__init__()
        self._lines = lines
        self._device = device
        # The list has an entry from the start, because other threads may run operators before the first round.
        self._rounds: list[dict[int, tuple[weakref.ref[torch.UntypedStorage], LiveTensor]]] = [{}]

    def begin_round(self) -> None:
        """Note that a round starts."""
        self._rounds.append({})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps(types):
            return NotImplemented
        # The storages are read before the operator runs, because `set_` gives a tensor another one. Batches from a
        # DataLoader's process arrive by `set_`.
        given = {storage._cdata for _, storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor, storage in _storages(result):
            if storage._cdata not in given and storage.device.type == self._device:
                dtype = str(tensor.dtype).removeprefix("torch.")
                line = self._lines.current()
                made = LiveTensor(
                    bytes=storage.nbytes(), count=1, operator=name_of(func), phase="forward", shape=tuple(tensor.shape),
                    dtype=dtype, lines=(line,) if line else (),
                )  # fmt: skip
                # A new storage may have the address of a freed one, whose entry it replaces here.
                self._rounds[-1][storage._cdata] = weakref.ref(storage), made
        return result

    def latest_bytes(self) -> int:
        """Return the live bytes that the latest round has made. A later batch may only be longer."""
        living = (made.bytes for storage, made in self._rounds[-1].values() if storage() is not None)
        return sum(taken(size, self._device) for size in living)

    def largest(self, growth: float) -> str:
        """Describe the largest part of what a round leaves in memory. Tensors of the last round may still be in use.

        Args:
            growth: the bytes that are left over after each round. A part that explains less than a tenth is not described.
        """
        kept: Counter[LiveTensor] = Counter()
        # In each round an LSTM on a GPU gives a tensor the storage of its weights by `set_`, without making a storage.
        times = Counter(key for storages in self._rounds for key, (living, _) in storages.items() if living() is not None)
        for storages in self._rounds[:-1]:
            kept.update(made for key, (living, made) in storages.items() if living() is not None and times[key] == 1)
        return _largest((kept, max(1, len(self._rounds) - 2)), growth)


def _largest(kept: Kept, growth: float, steps: int = 1) -> str:
    """Describe the largest part of what rounds of this many steps leave in memory."""
    tensors, of_steps = kept
    if not tensors:
        return ""
    rounds = max(1.0, of_steps / steps)
    tensor, number = max(tensors.items(), key=lambda item: item[0].bytes * item[1])
    share = tensor.bytes * number / rounds
    if share < growth / 10:
        return ""
    part = "most of it" if share > growth / 2 else "including"
    count = round(number / rounds)
    kind = f"{count} x {tensor.dtype}" if count > 1 else tensor.dtype
    where = f" in {tensor.lines[0]}" if tensor.lines else ""
    return f", {part} {kind} {list(tensor.shape)} ({format_bytes(share)}) made by {tensor.operator}{where}"


def resident_bytes() -> int | None:
    """Return the resident memory of this process that belongs to no file; None without /proc."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def malloc_bytes() -> int | None:
    """Return the bytes that malloc has handed out and not got back; None if this malloc has no such figure.

    They are exact, where resident memory rises and falls by what malloc keeps for later: by up to 32 MiB from step to step
    in loops that keep nothing.
    """
    return _handed_out() if _malloc_tells() else None


def _handed_out() -> int:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


@functools.cache
def _malloc_tells() -> bool:
    """Tell whether malloc is glibc's, from version 2.33 on, and not replaced by another library's."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return False
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    before = _handed_out()
    block = libc.malloc(PROCESS)
    after = _handed_out()
    libc.free(block)
    return after - before >= PROCESS


def _steady_growth(ends: Sequence[int], least: float) -> float:
    """Return the mean growth from one end to the next; 0 if the growth stops.

    It goes on where each half grows by more than ``least``, and nothing of the second half is below the first by as much.
    What is made once, or differs from step to step, does not so.
    """
    first, last = ends[: len(ends) // 2], ends[len(ends) // 2 :]
    goes_on = first and max(first) - min(last) <= least < min(first[-1] - first[0], last[-1] - last[0])
    return (ends[-1] - ends[0]) / (len(ends) - 1) if goes_on else 0.0


def _values(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, dict) else ()


def _storages(values: Any) -> Iterable[tuple[Tensor, torch.UntypedStorage]]:
    for value in tree_iter(values):
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            for part in strided_parts(value):
                yield part, part.untyped_storage()


def _marker(growth: float) -> str:
    """Return the marker that allows a quarter more than this growth."""
    unit, name = (MiB, "MiB") if growth > MiB else (KiB, "KiB")
    return f'@pytest.mark.gpu_tolerance(growth="{math.ceil(growth * 1.25 / unit)} {name}")'
