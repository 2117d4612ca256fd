"""Reads AMD GPUs through amdsmi, the library of amd-smi."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gputrain.hardware.devices import SELF, UNKNOWN, Gpu, HardwareError, Occupancy, Reading
from pytest_gputrain.records import Holder

DEVICE_FILE: Final = Path("/dev/kfd")
"""The Linux kernel's file for compute devices: a container that may use AMD GPUs has it."""

_NOT_AVAILABLE: Final = "N/A"
_WHOLE: Final = ("SPX", _NOT_AVAILABLE, "")
"""Compute partitions of a GPU that is one device."""

_VIOLATIONS_SECONDS: Final = 1.0
_VIOLATIONS: Final = {
    "active_ppt_pwr": "PPT",
    "active_socket_thrm": "socket thermal",
    "active_vr_thrm": "VR thermal",
    "active_hbm_thrm": "HBM thermal",
    "active_prochot_thrm": "PROCHOT",
}
"""Reasons for a lower clock: the package's power limit, four temperatures."""

_lock = threading.RLock()
"""The library must not be called from two threads at once."""

_users: list[object] = []
"""Who has it open: it counts nothing, and the first to shut it down does so for all."""


class Amd:
    """amdsmi, initialised."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._violations_read: dict[str, tuple[float, Any]] = {}
        self._handles: dict[str, Any] = {}
        """By `Gpu.uuid`, in HIP's order, which need not be amd-smi's: it follows the kernel's nodes, amd-smi's the bus."""

    def gpus(self) -> tuple[Gpu, ...]:
        with _lock:
            return tuple(
                self._gpu(index, uuid, handle) for index, (uuid, handle) in enumerate(self._handles_by_uuid().items())
            )

    def _handles_by_uuid(self) -> dict[str, Any]:
        if not self._handles:
            handles = self._library.amdsmi_get_processor_handles()
            order = sorted(range(len(handles)), key=lambda at: (self._number(handles[at], at), at))
            names = [self._uuid(handles[at]) for at in order]
            # Parts of a partitioned GPU may share its UUID; ROCm takes their number as well.
            unique = [name if names.count(name) == 1 else str(index) for index, name in enumerate(names)]
            self._handles = {name: handles[at] for name, at in zip(unique, order, strict=True)}
        return self._handles

    def _number(self, handle: Any, at: int) -> int:
        """What HIP sorts by; ``at`` where neither the library (before ROCm 6.4) nor the kernel tells."""
        hip = self._value(self._ask("amdsmi_get_gpu_enumeration_info", handle), "hip_id")
        node = self._value(self._ask("amdsmi_get_gpu_kfd_info", handle), "node_id") if hip is None else None
        return int(hip if hip is not None else node if node is not None else at)

    def _gpu(self, index: int, uuid: str, handle: Any) -> Gpu:
        asic = self._ask("amdsmi_get_gpu_asic_info", handle) or {}
        board = self._ask("amdsmi_get_gpu_board_info", handle) or {}
        name = self._value(asic, "market_name") or self._value(board, "product_name")
        name = name or f"AMD {self._value(asic, 'device_id') or 'GPU'}"
        partition = self._ask("amdsmi_get_gpu_compute_partition", handle) or _NOT_AVAILABLE
        total = self._ask("amdsmi_get_gpu_memory_total", handle, self._library.AmdSmiMemoryType.VRAM)
        cap = self._value(self._ask("amdsmi_get_power_cap_info", handle), "power_cap")
        whole = partition in _WHOLE
        return Gpu(
            index=index,
            uuid=uuid,
            name=name if whole else f"{name} {partition}",
            memory_bytes=int(total or 0),
            driver=self._value(self._ask("amdsmi_get_gpu_driver_info", handle), "driver_version") or "unknown",
            vendor="amd",
            # Microwatts; some releases gave watts.
            power_limit_watts=None if cap is None or not whole else cap / 1e6 if cap > 10_000 else float(cap),
        )

    def _uuid(self, handle: Any) -> str:
        """ROCm's, which is made of the serial number; amd-smi's own has another form that no variable takes."""
        hip_uuid = self._value(self._ask("amdsmi_get_gpu_enumeration_info", handle), "hip_uuid")
        if hip_uuid:
            return str(hip_uuid)
        asic = self._ask("amdsmi_get_gpu_asic_info", handle)
        serial = str(self._value(asic, "asic_serial") or "").removeprefix("0x").lower()
        return f"GPU-{serial.zfill(16)}" if serial else f"GPU-{self._library.amdsmi_get_gpu_device_uuid(handle)}"

    def occupancy(self, gpu: Gpu) -> Occupancy:
        with _lock:
            handle, vram = self._handle(gpu), self._library.AmdSmiMemoryType.VRAM
            used = self._ask("amdsmi_get_gpu_memory_usage", handle, vram)
            running = self._ask("amdsmi_get_gpu_process_list", handle)
        holders = None
        if running is not None:
            holders = tuple(
                Holder(
                    pid=process["pid"],
                    gpu=gpu.index,
                    name=self._value(process, "name") or "",
                    bytes=self._value(process.get("memory_usage"), "vram_mem"),
                )
                for process in running
                if isinstance(process, dict)
            )
        return Occupancy(None if used is None else gpu.memory_bytes - int(used), holders)

    def read(self, gpu: Gpu) -> Reading:
        with _lock:
            handle = self._handle(gpu)
            energy = self._ask("amdsmi_get_energy_count", handle) or {}
            power = self._ask("amdsmi_get_power_info", handle)
            clock = self._ask("amdsmi_get_clock_info", handle, self._library.AmdSmiClkType.GFX)
            activity = self._value(self._ask("amdsmi_get_gpu_activity", handle), "gfx_activity")
            violations = self._violations(gpu, handle)
        # Names of ROCm 6.2 and after, and of before.
        ticks = self._first_value(energy, "energy_accumulator", "power")
        resolution = self._value(energy, "counter_resolution")
        mhz = self._first_value(clock, "clk", "cur_clk")
        return Reading(
            energy_joules=None if ticks is None or resolution is None else ticks * resolution / 1e6,
            power_watts=self._first_value(power, "current_socket_power", "socket_power", "average_socket_power"),
            clock_mhz=None if mhz is None else int(mhz),
            utilization=None if activity is None else activity / 100,
            throttling=None
            if violations is None
            else frozenset(name for key, name in _VIOLATIONS.items() if self._value(violations, key)),
        )

    def _violations(self, gpu: Gpu, handle: Any) -> Any:
        """Asked once a second: the library sleeps for a tenth of one in it."""
        now = time.monotonic()
        asked_at, violations = self._violations_read.get(gpu.uuid, (-math.inf, None))
        if now - asked_at >= _VIOLATIONS_SECONDS:
            violations = self._ask("amdsmi_get_violation_status", handle)
            self._violations_read[gpu.uuid] = now, violations
        return violations

    def paths(self, gpus: Sequence[Gpu]) -> tuple[tuple[str, ...], ...]:
        """The paths as ``amd-smi topology`` names them: ``XGMI``, ``PCIE``."""
        with _lock:
            handles = [self._handle(gpu) for gpu in gpus]
            return tuple(
                tuple(SELF if handle is other else self._path(handle, other) for other in handles) for handle in handles
            )

    def _path(self, handle: Any, other: Any) -> str:
        # Releases number the types differently, and named them after "IO" links before.
        types = getattr(self._library, "AmdSmiLinkType", None) or getattr(self._library, "AmdSmiIoLinkType", None)
        kind = self._value(self._ask("amdsmi_topo_get_link_type", handle, other), "type")
        if types is None or kind is None:
            return UNKNOWN
        name = next((member.name for member in types if member.value == kind), "")
        return "XGMI" if name.endswith("XGMI") else "PCIE" if "PCI" in name else UNKNOWN

    def _handle(self, gpu: Gpu) -> Any:
        handle = self._handles_by_uuid().get(gpu.uuid)
        if handle is None:
            raise HardwareError(f"the AMD driver has no GPU {gpu.index} ({gpu.uuid}) any more; see what amd-smi says")
        return handle

    def _ask(self, name: str, *arguments: Any) -> Any:
        """What a function says; None where the binding, the driver or the hardware has no such thing."""
        function = getattr(self._library, name, None)
        if function is None:
            return None
        try:
            answer = function(*arguments)
        except self._library.AmdSmiException:
            return None
        return None if answer == _NOT_AVAILABLE else answer

    def _value(self, answer: Any, key: str) -> Any:
        """A value of a dictionary that may be missing, or say ``N/A``."""
        value = answer.get(key) if isinstance(answer, dict) else None
        return None if value == _NOT_AVAILABLE else value

    def _first_value(self, answer: Any, *keys: str) -> Any:
        return next((value for key in keys if (value := self._value(answer, key)) is not None), None)


def load() -> Any:
    """The library's binding; None where it is missing or finds no ROCm.

    Without one it prints, and raises whatever comes to its mind: KeyError, OSError, AttributeError.
    """
    if "amdsmi" not in sys.modules and not DEVICE_FILE.exists():
        return None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
        return importlib.import_module("amdsmi")
    return None


@contextlib.contextmanager
def opened() -> Iterator[Amd | None]:
    """The driver; None on a machine without one, or without the binding.

    Raises:
        HardwareError: the driver is there but does not answer, now or while it is open.
    """
    library = load()
    if library is None:
        yield None
        return
    with _lock:
        if not _users:
            try:
                library.amdsmi_init()
            except library.AmdSmiException as error:
                raise _fault(error) from error
        amd = Amd(library)
        _users.append(amd)
    try:
        yield amd
    except library.AmdSmiException as error:
        raise _fault(error) from error
    finally:
        with _lock:
            _users.remove(amd)
            if not _users:
                with contextlib.suppress(library.AmdSmiException):
                    library.amdsmi_shut_down()


def _fault(error: Exception) -> HardwareError:
    said = " ".join(str(error).split())
    return HardwareError(
        f"the AMD driver failed to describe its GPUs ({said}); see what amd-smi says, or leave them alone with "
        "--gpu-platform=cpu"
    )
