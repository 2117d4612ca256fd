"""Checks of torch's public functions about a GPU and its memory, for `operator_database.py`, as torch documents them."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

MIB: Final = 1 << 20
cuda: Final = torch.cuda


def _make(bytes_: int) -> torch.Tensor:
    return torch.empty(bytes_, dtype=torch.uint8, device="cuda")


def _grown(read: Callable[[], int], bytes_: int) -> int:
    """Return by how much a figure is higher while a tensor of so many bytes exists."""
    before = read()
    tensor = _make(bytes_)
    after = read()
    del tensor
    return after - before


def _peak_of(bytes_: int) -> int:
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    _make(bytes_)
    return cuda.max_memory_allocated() - before


def _reserved_for(bytes_: int) -> int:
    cuda.empty_cache()
    return _grown(cuda.memory_reserved, bytes_)


def _reserved_peak() -> bool:
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    before = cuda.memory_reserved()
    _make(100 * MIB)
    cuda.empty_cache()
    return cuda.max_memory_reserved() - before == 100 * MIB and cuda.memory_reserved() == before


def _reused() -> bool:
    first = _make(4 * MIB)
    address = first.data_ptr()
    del first
    return _make(4 * MIB).data_ptr() == address


def _free_less() -> bool:
    cuda.empty_cache()
    free, total = cuda.mem_get_info()
    tensor = _make(64 * MIB)
    less = free - cuda.mem_get_info()[0]
    del tensor
    cuda.empty_cache()
    return less == 64 * MIB and cuda.mem_get_info() == (free, total)


def _refused(bytes_: int) -> str:
    try:
        _make(bytes_)
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""


def _after_refusal() -> bool:
    before = cuda.memory_stats()["num_ooms"]
    return bool(_refused(1 << 45)) and cuda.memory_stats()["num_ooms"] == before + 1 and _make(MIB).numel() == MIB


def _retried() -> bool:
    cuda.empty_cache()
    half = cuda.mem_get_info()[0] * 6 // 10
    before = cuda.memory_stats()["num_alloc_retries"]
    _make(half)
    _make(half + 64 * MIB)
    cuda.empty_cache()
    return bool(cuda.memory_stats()["num_alloc_retries"] == before + 1)


def _fraction() -> bool:
    cuda.set_per_process_memory_fraction(0.25)
    try:
        text, fraction = _refused(cuda.mem_get_info()[1] // 2), cuda.get_per_process_memory_fraction()
    finally:
        cuda.set_per_process_memory_fraction(1.0)
    return "allowed" in text and fraction == 0.25


def _by_hand() -> bool:
    before = cuda.memory_allocated()
    address = cuda.caching_allocator_alloc(3 * MIB)
    more = cuda.memory_allocated() - before
    cuda.caching_allocator_delete(address)
    return more == 3 * MIB and cuda.memory_allocated() == before


def _accumulated(reset: Callable[[], None]) -> bool:
    _make(MIB)
    reset()
    _make(MIB)
    return bool(cuda.memory_stats()["allocated_bytes.all.allocated"] == MIB)


def _snapshot_adds_up() -> bool:
    segments = cuda.memory_snapshot()
    blocks = [block for segment in segments for block in segment["blocks"]]
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return active == cuda.memory_allocated() and sum(one["total_size"] for one in segments) == cuda.memory_reserved()


def _history() -> bool:
    cuda.memory._record_memory_history()
    try:
        tensor = _make(5 * MIB)
        del tensor
        events = cuda.memory._snapshot()["device_traces"][0]
    finally:
        cuda.memory._record_memory_history(enabled=None)
    own = [event["action"] for event in events if event["size"] == 5 * MIB]
    return {"alloc", "free_requested", "free_completed"} <= set(own)


def _history_in_a_file() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        cuda.memory._record_memory_history()
        try:
            cuda.memory._dump_snapshot(f"{folder}/snapshot.pickle")
        finally:
            cuda.memory._record_memory_history(enabled=None)
        return Path(folder, "snapshot.pickle").stat().st_size > 0


def _pool() -> bool:
    pool = cuda.MemPool()
    with cuda.use_mem_pool(pool):
        tensor = _make(4 * MIB)
    segments = pool.snapshot()
    inside = any(one["address"] <= tensor.data_ptr() < one["address"] + one["total_size"] for one in segments)
    return inside


def _stream() -> bool:
    stream = cuda.Stream()
    with cuda.stream(stream):
        tensor = _make(8 * MIB)
    address = tensor.data_ptr()
    del tensor
    return _make(8 * MIB).data_ptr() != address  # a block belongs to the stream that it was allocated on


def _pinned() -> bool:
    tensor = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    return tensor.is_pinned() and not torch.empty(1).is_pinned()


def _pinned_bytes() -> bool:
    before = cuda.host_memory_stats()["allocated_bytes.current"]
    tensor = torch.empty(4 * MIB, dtype=torch.uint8, pin_memory=True)
    return bool(cuda.host_memory_stats()["allocated_bytes.current"] - before >= tensor.nbytes)


def _cycle() -> bool:
    before = cuda.memory_allocated()
    cycle: list[Any] = [_make(MIB)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    return cuda.memory_allocated() == before


def _views() -> bool:
    tensor = _make(8 * MIB)
    before = cuda.memory_allocated()
    half = tensor[: 4 * MIB]
    del tensor
    return cuda.memory_allocated() == before and half.untyped_storage().nbytes() == 8 * MIB


def _resized() -> bool:
    tensor = _make(2 * MIB)
    before = cuda.memory_allocated()
    tensor.untyped_storage().resize_(0)
    return before - cuda.memory_allocated() == 2 * MIB


def _raises(call: Callable[[], Any], error: type[Exception]) -> bool:
    with contextlib.suppress(error):
        call()
        return False
    return True


_ACCELERATOR: Final[Any] = getattr(torch, "accelerator", None)

CHECKS: Final[dict[str, Callable[[], Any]]] = {
    "one byte takes 512": lambda: _grown(cuda.memory_allocated, 1) == 512,
    "513 bytes take 1,024": lambda: _grown(cuda.memory_allocated, 513) == 1024,
    "memory_allocated of a large tensor": lambda: _grown(cuda.memory_allocated, 30 * MIB) == 30 * MIB,
    "an empty tensor takes nothing": lambda: _grown(cuda.memory_allocated, 0) == 0,
    "requested bytes are not rounded": lambda: (
        _grown(lambda: cuda.memory_stats().get("requested_bytes.all.current", 0), 513) == 513
    ),
    "max_memory_allocated": lambda: _peak_of(30 * MIB) == 30 * MIB,
    "reset_peak_memory_stats": lambda: (
        (cuda.reset_peak_memory_stats(), cuda.max_memory_allocated())[1] == cuda.memory_allocated()
    ),
    "a small tensor reserves 2 MiB": lambda: _reserved_for(1) == 2 * MIB,
    "a tensor of 5 MiB reserves 20 MiB": lambda: _reserved_for(5 * MIB) == 20 * MIB,
    "a tensor of 15 MiB reserves 16 MiB": lambda: _reserved_for(15 * MIB) == 16 * MIB,
    "max_memory_reserved and empty_cache": _reserved_peak,
    "a freed block is used again": _reused,
    "mem_get_info falls by what is reserved": _free_less,
    "mem_get_info has the capacity": lambda: cuda.mem_get_info()[1] == cuda.get_device_properties(0).total_memory,
    "device_memory_used": lambda: cuda.device_memory_used() >= cuda.memory_reserved(),
    "OutOfMemoryError names the request": lambda: "Tried to allocate 32768.00 GiB" in _refused(1 << 45),
    "OutOfMemoryError names the capacity": lambda: "total capacity" in _refused(1 << 45),
    "num_ooms, and memory after it": _after_refusal,
    "num_alloc_retries": _retried,
    "set_per_process_memory_fraction": _fraction,
    "an invalid fraction": lambda: _raises(lambda: cuda.set_per_process_memory_fraction(2.0), ValueError),
    "an invalid device": lambda: _raises(lambda: cuda.memory_allocated(99), (RuntimeError, AssertionError)),  # type: ignore[arg-type]
    "caching_allocator_alloc": _by_hand,
    "reset_accumulated_memory_stats": lambda: _accumulated(cuda.reset_accumulated_memory_stats),
    "memory_stats_as_nested_dict": lambda: "allocated_bytes" in cuda.memory_stats_as_nested_dict(),
    "memory_summary": lambda: (
        "CUDA OOMs" in cuda.memory_summary() and "Allocated memory" in cuda.memory_summary(abbreviated=True)
    ),
    "memory_snapshot": _snapshot_adds_up,
    "memory_usage": lambda: 0 <= cuda.memory_usage() <= 100,
    "utilization": lambda: 0 <= cuda.utilization() <= 100,
    "temperature": lambda: 0 < cuda.temperature() < 120,
    "power_draw": lambda: 0 < cuda.power_draw() < 2_000_000,
    "clock_rate": lambda: 0 < cuda.clock_rate() < 5_000,
    "list_gpu_processes": lambda: "GPU:0" in cuda.list_gpu_processes(),
    "_record_memory_history": _history,
    "_dump_snapshot": _history_in_a_file,
    "MemPool": _pool,
    "a block of another stream": _stream,
    "get_allocator_backend": lambda: cuda.get_allocator_backend() == "native",
    "another allocator is refused after the first use": lambda: _raises(
        lambda: cuda.memory.change_current_allocator(object.__new__(cuda.memory._CUDAAllocator)), Exception
    ),
    "pinned memory": _pinned,
    "host_memory_stats": _pinned_bytes,
    "host_memory_stats of a peak": lambda: "allocated_bytes.peak" in cuda.host_memory_stats(),
    "a cycle is freed by gc.collect": _cycle,
    "a view keeps its storage": _views,
    "a storage is resized": _resized,
    "ipc_collect": lambda: cuda.ipc_collect() is None,
    "synchronize": lambda: cuda.synchronize() is None,
    "accelerator.memory_allocated": lambda: _ACCELERATOR.memory_allocated() == cuda.memory_allocated(),
    "accelerator.max_memory_reserved": lambda: _ACCELERATOR.max_memory_reserved() == cuda.max_memory_reserved(),
    "accelerator.empty_cache": lambda: (
        _ACCELERATOR.empty_cache() is None and cuda.memory_reserved() <= cuda.max_memory_reserved()
    ),
}
"""Each is true on a GPU, by torch's documentation and the sizes of its allocator's blocks."""


def run() -> Iterator[tuple[str, str]]:
    """Run each check, and yield its name and how it failed: an empty text if it did not."""
    cuda.init()
    for name, check in CHECKS.items():
        try:
            failed = "" if check() else "not as on a GPU"
        except Exception as error:
            failed = f"{type(error).__name__}: {(str(error).splitlines() or ['no text'])[0][:160]}"
        gc.collect()
        yield name, failed
