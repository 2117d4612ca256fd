"""Records what a program allocates on an emulated GPU and asks of it, and writes at its end what was allocated at the peak.

It runs inside the program that `gputrain emulate` starts, loaded by its path: it imports the standard library and torch, and
this package only where the program's environment has it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

MOST_EVENTS: Final = 1_000_000
"""Events that torch keeps of each device, the last ones, of which an allocation and its free make three. They take some
0.6 GB of the host."""

_NOTED: Final = "<noted>"
"""The file name of a made-up frame that holds a line of the forward pass."""

_LARGEST: Final = 12
"""The most groups of tensors that are recorded."""

_MOST_POINTS: Final = 400
"""Points of the course of memory, each the highest of its part of the events."""

_CHANGES: Final = {"alloc": 1, "free_completed": -1}
_CHANGES_OF_RESERVED: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
"""Whether an event adds its bytes or takes them away."""

PACKAGES: Final = (
    "torch",
    "transformers",
    "diffusers",
    "peft",
    "accelerate",
    "trl",
    "lightning",
    "bitsandbytes",
    "deepspeed",
)
"""Training libraries whose code decides what is allocated."""

Trace = list[dict[str, Any]]
"""Events of torch's memory history."""


def install(torch: ModuleType) -> None:
    """Begin to record when the program first uses the GPU, and write the record when the program ends."""
    recorder = Recorder(torch)
    # A program that uses CUDA before it forks cannot use CUDA in its children. So recording begins when the program first
    # uses CUDA.
    torch.cuda._lazy_call(recorder.begin)
    atexit.register(recorder.write)
    recorder.watch_resets()
    follow_optimizers(recorder.updated)


def follow_optimizers(updated: Callable[..., None]) -> None:
    """Have ``updated`` called after each update of an optimizer of torch, with the optimizer.

    An optimizer that steps while a CUDA graph is captured updates whenever the graph is launched, and not in the capture.
    """
    graph: Any = importlib.import_module("torch.cuda").CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay
    capturing: list[Any] = []
    captured: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def stepped(optimizer: Any, *_: object) -> None:
        if capturing:
            captured.setdefault(capturing[-1], []).append(optimizer)
        else:
            updated(optimizer)

    @functools.wraps(begin)
    def capture(this: Any, *arguments: Any, **options: Any) -> None:
        begin(this, *arguments, **options)
        capturing.append(this)

    @functools.wraps(end)
    def finish(this: Any) -> None:
        if this in capturing:
            capturing.remove(this)
        end(this)

    @functools.wraps(replay)
    def launch(this: Any) -> None:
        replay(this)
        for optimizer in captured.get(this, ()):
            updated(optimizer)

    graph.capture_begin, graph.capture_end, graph.replay = capture, finish, launch
    importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook(stepped)


def program_counter() -> Any:
    """Begin to count the work that the program gives to the GPU, or to time its steps if an environment variable says so.

    Returns:
        What does so; None if the program's environment lacks this very package.
    """
    try:
        counts: Any = importlib.import_module("pytest_gputrain.worker.program_counts")
    except ImportError:
        return None
    if not os.path.samefile(os.path.dirname(counts.__file__), _OWN):
        return None
    rates = os.environ.get("GPUTRAIN_EMULATED_RATES")
    return counts.ProgramTimer(rates) if rates else counts.ProgramCounter()


class Recorder:
    """Records the memory of this process."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._process = os.getpid()
        self._peaks: dict[int, Counter[str]] = {}
        self._values: Any = None
        self._counter: Any = None

    def begin(self) -> None:
        backend = self._torch.cuda.get_allocator_backend()
        if backend != "native":
            raise RuntimeError(
                f"an emulated GPU reports the memory of torch's own allocator, but this program chose {backend}; "
                "take backend:... out of PYTORCH_ALLOC_CONF, or do not change the allocator"
            )
        if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
            raise RuntimeError(
                "an emulated GPU reports the memory of torch's caching allocator, which PYTORCH_NO_CUDA_MEMORY_CACHING "
                "turns off; unset it"
            )
        self._torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, context="alloc", stacks="python")
        self._counter = program_counter()
        self._values = tracked_values(self._counter)

    def updated(self, optimizer: Any, *_: object) -> None:
        """Record that an optimizer has updated."""
        if self._counter is not None:
            self._counter.updated(optimizer)

    def watch_resets(self) -> None:
        """Keep peaks that the program resets."""
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            reset = getattr(self._torch._C, name, None)
            if reset is not None:
                setattr(self._torch._C, name, self._after_keeping(reset))

    def _after_keeping(self, reset: Any) -> Any:
        def keep_and_reset(device: int) -> None:
            self.keep_peaks(device)
            reset(device)

        return keep_and_reset

    def keep_peaks(self, device: int) -> Counter[str]:
        """Return the highest memory so far, even if the program resets torch's peaks."""
        statistics = self._torch.cuda.memory_stats(device)
        now = {name: statistics.get(f"{name}_bytes.all.peak", 0) for name in ("allocated", "reserved", "requested")}
        # `|` of two counters keeps the larger number of each
        self._peaks[device] = self._peaks.get(device, Counter()) | Counter(now)
        return self._peaks[device]

    def write(self) -> None:
        """Write the record of this process beside the files of the stand-ins."""
        torch, folder = self._torch, os.environ.get("GPUTRAIN_EMULATED_STATE")
        if not folder or os.getpid() != self._process or not torch.cuda.is_initialized():
            return
        slow = self._values.slow()
        # The history is up to a million objects that all stay. To look for garbage among them takes longer than to read it.
        gc.disable()
        counts = self._counter.report() if self._counter is not None else {}
        snapshot = _snapshot(torch)
        torch.cuda.memory._record_memory_history(enabled=None)
        devices = [
            {"gpu": _gpu(torch, device), **_device(device, self.keep_peaks(device), snapshot)}
            for device in range(torch.cuda.device_count())
        ]
        report = {
            "process": os.getpid(),
            "rank": os.environ.get("RANK"),
            "devices": [device for device in devices if device["peak_allocated_bytes"] or device["refused"]],
            "unknown": list(unknown()),
            "estimated_bytes": estimated_bytes(),
            "not_exchanged": list(not_exchanged()),
            "packages": packages(),
            **counts,
            "graphs": self._values.graphs() or None,
            "slow_following": slow,
            **self._values.report(),
        }
        path = Path(folder, f"{os.getpid()}.json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps(report))
        part.rename(path)


def _snapshot(torch: ModuleType) -> Any:
    """Return torch's memory history without an import of torch's compiler, which would take longer than a small program.

    Torch looks there for the lines of compiled code, and a program that has not imported it compiled none.
    """
    absent = "torch._inductor" not in sys.modules
    if absent:
        vars(torch)["_inductor"] = None
    try:
        return torch.cuda.memory._snapshot()
    finally:
        if absent:
            del vars(torch)["_inductor"]


def _gpu(torch: ModuleType, device: int) -> int:
    """Return the number of a GPU among all emulated ones, which is the last byte of its UUID."""
    return int(str(torch.cuda.get_device_properties(device).uuid)[-2:], 16)


def packages() -> dict[str, str]:
    """Return the versions of the training libraries that this process has imported."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        if name in sys.modules:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
    return versions


def tracked_values(counter: Any) -> Any:
    """Switch on the tracking of values, and return its module.

    It comes from the package beside this module, which the program's environment may lack. Torch's memory history gets the
    lines of the forward pass that are behind a backward pass.

    Args:
        counter: gets these lines, too, if it is not None.
    """
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "emulated_values")
    name = "_gputrain_emulated_values"
    spec: Any = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    tracking = importlib.import_module(f"{name}.tracking")
    autograd_lines = importlib.import_module(f"{name}.autograd_lines")
    line_of, note_line = _program_lines.line_of, lambda line: None
    if counter is not None:
        line_of, note_line = counter.line_of, counter.note
    tracking.enable(autograd_lines.BackwardNotes(line_of, note_line))
    return tracking


def unknown() -> Iterator[str]:
    """Return descriptions of memory that the stand-ins cannot know."""
    torch = sys.modules.get("torch")
    by_time = torch is not None and torch.backends.cudnn.benchmark
    return (what for what in _listed("gputrain_unknown_at") if by_time or "cudnn.benchmark" not in what)


def estimated_bytes() -> int:
    """Return the largest workspace of a convolution that the stand-in of cuDNN has estimated."""
    try:
        told = ctypes.CDLL(None).gputrain_estimated_bytes
    except AttributeError:
        return 0
    told.restype = ctypes.c_uint64
    return int(told())


def not_exchanged() -> Iterator[dict[str, Any]]:
    """Return the functions of NCCL that did not exchange data, with the number of calls and the most bytes of a call."""
    calls, most = ctypes.c_uint64(), ctypes.c_uint64()
    for function in _listed("gputrain_not_exchanged_at", ctypes.byref(calls), ctypes.byref(most)):
        yield {"function": function, "calls": calls.value, "bytes": most.value}


def _listed(name: str, *written: Any) -> Iterator[str]:
    """Yield the texts that a function of the stand-ins returns for 0, 1, and so on. It also writes to ``written``."""
    try:
        at = getattr(ctypes.CDLL(None), name)
    except AttributeError:
        return
    at.restype = ctypes.c_char_p
    for number in itertools.count():
        text = at(number, *written)
        if text is None:
            return
        yield text.decode()


def _device(index: int, peaks: Counter[str], snapshot: dict[str, Any]) -> dict[str, Any]:
    traces = snapshot.get("device_traces", [])
    trace: Trace = traces[index] if index < len(traces) else []
    refused = [event for event in trace if event["action"] == "oom"]
    events = [event for event in trace if event["action"] in _CHANGES]
    segments = [segment for segment in snapshot.get("segments", ()) if segment["device"] == index]
    live = {
        block["address"]: (block["requested_size"], block.get("frames") or [])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }
    in_use = sum(size for size, _ in live.values())
    at, peak = find_peak(events, in_use)
    known = peak == peaks["requested"]
    return {
        "index": index,
        "peak_allocated_bytes": peaks["allocated"],
        "peak_reserved_bytes": peaks["reserved"],
        "peak": _moment(events, at, live) if known and events else None,
        "course": course(trace, in_use, sum(segment["total_size"] for segment in segments)),
        "refused": [
            {"bytes": event["size"], "free": event.get("device_free", 0), "where": _where(event.get("frames") or [])}
            for event in refused[-3:]
        ],
    }


def find_peak(events: Trace, at_end: int) -> tuple[int, int]:
    """Return the event after which most bytes were in use, and these bytes. The search goes back from the bytes at the end.

    From the end, since only the last events are kept.
    """
    at, peak, now = len(events) - 1, at_end, at_end
    for number in range(len(events) - 1, -1, -1):
        if now >= peak:  # The loop goes backwards, so the last moment that it finds is the first one at the peak.
            at, peak = number, now
        event = events[number]
        now += event["size"] if event["action"] == "free_completed" else -event["size"]
    return at, peak


def course(trace: Trace, in_use: int, reserved: int) -> list[tuple[int, int, int]]:
    """Return the course of memory: numbers of allocations, each with the highest bytes in use and reserved around it.

    Args:
        in_use: bytes at the end.
        reserved: bytes that torch's allocator has reserved at the end.
    """
    steps = [
        (event["action"], event["size"])
        for event in trace
        if event["action"] in _CHANGES.keys() | _CHANGES_OF_RESERVED.keys()
    ]
    in_use -= sum(_CHANGES.get(action, 0) * size for action, size in steps)
    reserved -= sum(_CHANGES_OF_RESERVED.get(action, 0) * size for action, size in steps)
    width, number, points = -(-len(steps) // _MOST_POINTS) or 1, 0, []
    for first in range(0, len(steps), width):
        most = most_reserved = -1
        at = number
        for action, size in steps[first : first + width]:
            number += action == "alloc"
            in_use += _CHANGES.get(action, 0) * size
            reserved += _CHANGES_OF_RESERVED.get(action, 0) * size
            if in_use > most:
                at, most = number, in_use
            most_reserved = max(most_reserved, reserved)
        points.append((at, most, most_reserved))
    return points


def live_at(events: Trace, at: int, at_end: dict[int, tuple[int, list[Any]]]) -> dict[int, tuple[int, list[Any]]]:
    """Return the blocks in use after this event, by address, with the bytes and the Python frames of each."""
    live = dict(at_end)
    for event in reversed(events[at + 1 :]):
        if event["action"] == "free_completed":
            live[event["addr"]] = (event["size"], [])
        else:
            live.pop(event["addr"], None)
    found = set()
    for event in reversed(events[: at + 1]):
        address = event["addr"]
        if event["action"] == "alloc" and address in live and address not in found:
            live[address] = (live[address][0], _frames(event))
            found.add(address)
    return live


def _frames(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the frames of an event, with the line of the forward pass that `BackwardNotes` has noted."""
    note = event.get("user_metadata")
    return [*(event.get("frames") or []), *([{"filename": _NOTED, "line": 0, "name": note}] if note else [])]


def _moment(events: Trace, at: int, at_end: dict[int, tuple[int, list[Any]]]) -> dict[str, Any]:
    groups: Counter[tuple[int, str, str]] = Counter()
    parts: Counter[str] = Counter()
    for size, frames in live_at(events, at, at_end).values():
        part = _part(frames)
        groups[size, _where(frames), part] += 1
        parts[part] += size
    largest = sorted(groups.items(), key=lambda group: group[0][0] * group[1], reverse=True)
    return {
        "seconds": (events[at]["time_us"] - events[0]["time_us"]) / 1e6,
        "event": sum(event["action"] == "alloc" for event in events[: at + 1]),
        "events": sum(event["action"] == "alloc" for event in events),
        "bytes": parts.total(),
        "parts": [{"name": name, "bytes": size} for name, size in parts.most_common()],
        "tensors": [
            {"bytes": size, "count": count, "where": where, "part": part}
            for (size, where, part), count in largest[:_LARGEST]
        ],
    }


_OWN: Final = os.path.dirname(os.path.abspath(__file__))
"""The operators that `emulated_values` replaced call torch's own."""


def load(name: str) -> Any:
    """Import a module of the package `emulated_values`, which the program's environment may lack."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "emulated_values", f"{name}.py")
    spec: Any = importlib.util.spec_from_file_location(f"_gputrain_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_program_lines = load("program_lines")


def _part(frames: list[dict[str, Any]]) -> str:
    """Return the part of training that allocated something, by torch's functions among the frames."""
    functions = [(frame["filename"].rpartition("site-packages/")[2], frame["name"]) for frame in frames]
    if any(file.startswith(("torch/optim/", "bitsandbytes/optim/")) for file, _ in functions):
        return "optimizer"
    if any(file == "torch/utils/checkpoint.py" and name in _RECOMPUTING for file, name in functions):
        return "backward pass"  # Activation checkpointing computes this again during the backward pass.
    if any(file.startswith("torch/nn/modules/") and name in _MAKING for file, name in functions):
        return "weights and buffers"
    if any(file == "torch/nn/modules/module.py" and name in _CALLING for file, name in functions):
        return "forward pass"
    files = [frame["filename"] for frame in frames]
    in_program = any(not _program_lines.is_library(file) and not _program_lines.is_ours(file) for file in files)
    return "the rest of the program" if in_program else _program_lines.BACKWARD


_RECOMPUTING: Final = ("unpack_hook", "recompute_fn", "backward")
_MAKING: Final = ("__init__", "_apply", "to_empty", "load_state_dict")
"""A layer's own weights are made on the GPU, or moved to it."""
_CALLING: Final = ("_call_impl", "_wrapped_call_impl")


def _where(frames: Iterable[dict[str, Any]]) -> str:
    """Return the innermost line of the program itself, and the innermost line of a model library that it called there."""
    own, library = "", ""
    for frame in frames:
        file = frame["filename"]
        if _program_lines.is_ours(file):
            continue
        if file == _NOTED:
            own = f"{_program_lines.BACKWARD} of {frame['name']}"
            break
        if not _program_lines.is_library(file):
            own = _line(frame)
            break
        if not library and _program_lines.is_compiled(file):
            library = "code of torch.compile"
        elif not library and "site-packages/" in file and f"{os.sep}torch{os.sep}" not in file:
            library = _line(frame)
    return ", ".join(filter(None, (own or _program_lines.BACKWARD, library)))


def _line(frame: dict[str, Any]) -> str:
    described: str = _program_lines.describe_line(frame["filename"], frame["line"], frame["name"])
    return described
