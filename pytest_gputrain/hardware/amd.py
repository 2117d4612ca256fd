"""Reads AMD GPUs through amdsmi, the library of amd-smi."""

from __future__ import annotations

import contextlib
import errno
import grp
import importlib
import io
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_gputrain.hardware.devices import SELF, UNKNOWN, Gpu, HardwareError, Occupancy, Reading
from pytest_gputrain.records import Holder

DEVICE_FILE: Final = Path("/dev/kfd")
"""The Linux kernel's file for compute devices: a container that may use AMD GPUs has it."""

RENDER_NODES: Final = Path("/dev/dri")
"""The folder where the kernel shows ``renderD<n>``, one for each GPU or part of one: a container may use those that it was
given."""

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")

ROCM: Final = Path("/opt/rocm")
"""The folder of ROCm, unless ``ROCM_PATH`` names another."""

_NOT_AVAILABLE: Final = "N/A"
_WHOLE: Final = "SPX"
"""The compute partition of a GPU that is one device."""
_PARTITIONS: Final = (_WHOLE, "DPX", "TPX", "QPX", "CPX")

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
"""The users of the library: it counts nothing, and the first to shut it down does so for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device:
    """A GPU, or a part of one, as the library hands it out."""

    handle: Any
    siblings: tuple[Any, ...]
    """The parts of the same GPU, this one among them. The library reports to secondary parts nothing that all have in
    common."""
    partition: str
    """The compute partition that it is a part of; empty for a whole GPU."""


class Amd:
    """A connection to amdsmi, AMD's management library."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._violations_read: dict[str, tuple[float, Any]] = {}
        self._left_out: list[str] = []
        self._devices: dict[str, _Device] | None = None
        """The devices by `Gpu.uuid`, in HIP's order, which is that of the kernel's nodes. That of amd-smi may differ: it is
        the order on the bus."""

    def gpus(self) -> tuple[Gpu, ...]:
        with _lock:
            return tuple(
                self._gpu(index, uuid, device) for index, (uuid, device) in enumerate(self._devices_by_uuid().items())
            )

    def left_out(self) -> tuple[str, ...]:
        """Return a sentence for each GPU that the library lists but that this process may not use."""
        with _lock:
            self._devices_by_uuid()
            return tuple(self._left_out)

    def _devices_by_uuid(self) -> dict[str, _Device]:
        if self._devices is None:
            handles = self._library.amdsmi_get_processor_handles()
            slots = [self._slot(handle) or at for at, handle in enumerate(handles)]
            order = sorted(range(len(handles)), key=lambda at: (self._number(handles[at], at), at))
            usable = [at for at in order if self._is_usable(handles[at])]
            names = [self._uuid(handles[at]) for at in usable]
            # Parts of a partitioned GPU may have the same UUID or none. Then their number is used, which ROCm also accepts.
            counts = Counter(names)
            unique = [name if name and counts[name] == 1 else str(index) for index, name in enumerate(names)]
            self._devices = {
                name: self._device(
                    handles[at], [other for other, slot in zip(handles, slots, strict=True) if slot == slots[at]]
                )
                for name, at in zip(unique, usable, strict=True)
            }
        return self._devices

    def _device(self, handle: Any, siblings: Sequence[Any]) -> _Device:
        """
        Args:
            siblings: all handles of the same slot.
        """
        part = self._value(self._ask("amdsmi_get_gpu_kfd_info", handle), "current_partition_id")
        modes = (self._ask("amdsmi_get_gpu_compute_partition", sibling) for sibling in (handle, *siblings))
        partition = next((mode for mode in modes if mode in _PARTITIONS), _WHOLE)
        is_whole = partition == _WHOLE and len(siblings) == 1 and not part
        return _Device(
            handle=handle,
            siblings=tuple(siblings),
            partition="" if is_whole else "partition" if partition == _WHOLE else partition,
        )

    def _slot(self, handle: Any) -> str | None:
        """Return the domain, bus and device on PCI, which the parts of a GPU share; their functions may be numbers of
        parts."""
        address = self._ask("amdsmi_get_gpu_device_bdf", handle)
        return None if address is None else str(address).rpartition(".")[0]

    def _is_usable(self, handle: Any) -> bool:
        """Tell whether this process may open the GPU. The library also lists GPUs that belong to other containers."""
        node = None if getattr(self._library, "is_replay", False) else self._render_node(handle)
        if node is None:
            return True
        try:
            os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            self._left_out.append(
                f"the AMD GPU at {self._ask('amdsmi_get_gpu_device_bdf', handle)} is left out: {node} cannot be opened "
                f"({error.strerror}); {_remedy_for(error, node)}"
            )
            return False
        return True

    def _render_node(self, handle: Any) -> Path | None:
        """Return the render node; None if neither the library (before ROCm 6.4) nor the kernel knows it, as for most parts
        of a GPU."""
        number = self._value(self._ask("amdsmi_get_gpu_enumeration_info", handle), "drm_render")
        if number is not None:
            return RENDER_NODES / f"renderD{number}"
        address = self._ask("amdsmi_get_gpu_device_bdf", handle)
        nodes = [] if address is None else list((PCI_DEVICES / str(address) / "drm").glob("renderD*"))
        return RENDER_NODES / nodes[0].name if len(nodes) == 1 else None

    def _number(self, handle: Any, at: int) -> int:
        """Return the number by which HIP sorts GPUs; ``at`` if neither the library (before ROCm 6.4) nor the kernel knows
        it."""
        hip = self._value(self._ask("amdsmi_get_gpu_enumeration_info", handle), "hip_id")
        node = self._value(self._ask("amdsmi_get_gpu_kfd_info", handle), "node_id") if hip is None else None
        return int(hip if hip is not None else node if node is not None else at)

    def _gpu(self, index: int, uuid: str, device: _Device) -> Gpu:
        handle = device.handle
        asic = self._ask("amdsmi_get_gpu_asic_info", handle)
        name = next(
            filter(None, map(self._name, (handle, *device.siblings))), f"AMD {self._value(asic, 'device_id') or 'GPU'}"
        )
        total = self._ask("amdsmi_get_gpu_memory_total", handle, self._library.AmdSmiMemoryType.VRAM)
        cap = self._value(self._ask("amdsmi_get_power_cap_info", handle), "power_cap")
        return Gpu(
            index=index,
            uuid=uuid,
            name=f"{name} {device.partition}".rstrip(),
            memory_bytes=int(total or 0),
            driver=self._value(self._ask("amdsmi_get_gpu_driver_info", handle), "driver_version") or "unknown",
            vendor="amd",
            # The unit is microwatts, but watts in some releases.
            power_limit_watts=None if cap is None or device.partition else cap / 1e6 if cap > 10_000 else float(cap),
            compute_units=self._value(asic, "num_compute_units"),
            pci_address=str(self._ask("amdsmi_get_gpu_device_bdf", handle) or "").lower(),
        )

    def _name(self, handle: Any) -> str:
        market_name = self._value(self._ask("amdsmi_get_gpu_asic_info", handle), "market_name")
        return str(market_name or self._value(self._ask("amdsmi_get_gpu_board_info", handle), "product_name") or "")

    def _uuid(self, handle: Any) -> str:
        """Return ROCm's UUID, which is made of the serial number; empty if there is none. amd-smi's own UUID has another
        form, which no variable accepts."""
        hip_uuid = self._value(self._ask("amdsmi_get_gpu_enumeration_info", handle), "hip_uuid")
        if hip_uuid:
            return str(hip_uuid)
        asic = self._ask("amdsmi_get_gpu_asic_info", handle)
        serial = str(self._value(asic, "asic_serial") or "").removeprefix("0x").lower()
        return f"GPU-{serial.zfill(16)}" if serial else ""

    def occupancy(self, gpu: Gpu) -> Occupancy:
        with _lock:
            handle, vram = self._device_of(gpu).handle, self._library.AmdSmiMemoryType.VRAM
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
            device = self._device_of(gpu)
            # The counters are those of the whole GPU, and a part has none of its own.
            if device.partition:
                return Reading()
            handle = device.handle
            energy = self._ask("amdsmi_get_energy_count", handle) or {}
            power = self._ask("amdsmi_get_power_info", handle)
            clock = self._ask("amdsmi_get_clock_info", handle, self._library.AmdSmiClkType.GFX)
            activity = self._value(self._ask("amdsmi_get_gpu_activity", handle), "gfx_activity")
            violations = self._violations(gpu, handle)
        # ROCm 6.2 and later use the first name, and older releases the second one.
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
        """Return the times in which limits lowered the clocks, read at most once a second. Each read takes the library a
        tenth of a second."""
        now = time.monotonic()
        asked_at, violations = self._violations_read.get(gpu.uuid, (-math.inf, None))
        if now - asked_at >= _VIOLATIONS_SECONDS:
            violations = self._ask("amdsmi_get_violation_status", handle)
            self._violations_read[gpu.uuid] = now, violations
        return violations

    def paths(self, gpus: Sequence[Gpu]) -> tuple[tuple[str, ...], ...]:
        """Return the paths between GPUs in the terms of ``amd-smi topology``: ``XGMI``, ``PCIE``."""
        with _lock:
            handles = [self._device_of(gpu).handle for gpu in gpus]
            return tuple(
                tuple(SELF if handle is other else self._path(handle, other) for other in handles) for handle in handles
            )

    def _path(self, handle: Any, other: Any) -> str:
        # The answer is a number of the enumeration of "IO" links. ROCm 6.3 and 6.4 have a second one, in which PCIe and XGMI
        # are exchanged. ROCm 7 has only the second name, with the numbers of the first.
        types = getattr(self._library, "AmdSmiIoLinkType", None) or getattr(self._library, "AmdSmiLinkType", None)
        kind = self._value(self._ask("amdsmi_topo_get_link_type", handle, other), "type")
        if types is None or kind is None:
            return UNKNOWN
        name = next((member.name for member in types if member.value == kind), "")
        return "XGMI" if name.endswith("XGMI") else "PCIE" if "PCI" in name else UNKNOWN

    def _device_of(self, gpu: Gpu) -> _Device:
        device = self._devices_by_uuid().get(gpu.uuid)
        if device is None:
            raise HardwareError(f"the AMD driver has no GPU {gpu.index} ({gpu.uuid}) any more; see what amd-smi says")
        return device

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer of a function of the library; None if the binding, the driver or the hardware lacks it."""
        function = getattr(self._library, name, None)
        if function is None:
            return None
        try:
            answer = function(*arguments)
        except self._library.AmdSmiException:
            return None
        return None if answer == _NOT_AVAILABLE else answer

    def _value(self, answer: Any, key: str) -> Any:
        """Return a value of a dictionary; None if it is missing or ``N/A``."""
        value = answer.get(key) if isinstance(answer, dict) else None
        return None if value == _NOT_AVAILABLE else value

    def _first_value(self, answer: Any, *keys: str) -> Any:
        return next((value for key in keys if (value := self._value(answer, key)) is not None), None)


def load() -> Any:
    """Return the library's binding; None if there is no driver, or if the binding cannot be imported (`binding_fault`)."""
    return _imported()[0]


def binding_fault() -> str:
    """Say why the binding cannot be imported although there is a driver, with the remedy; else empty."""
    return _imported()[1]


def rocm_version() -> str:
    """Return the version of ROCm on this machine, such as ``6.4.3``; empty if it does not lie in its usual place."""
    with contextlib.suppress(OSError):
        return (_rocm() / ".info" / "version").read_text().strip().partition("-")[0]
    return ""


def _rocm() -> Path:
    return Path(os.environ.get("ROCM_PATH") or ROCM)


def _imported() -> tuple[Any, str]:
    """Return the imported binding. Without ROCm its import prints, and raises errors of many kinds: KeyError, OSError,
    AttributeError."""
    if sys.modules.get("amdsmi") is None and not DEVICE_FILE.exists():
        return None, ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("amdsmi"), ""
    except Exception as error:
        return None, (
            f"{DEVICE_FILE} says that there is an AMD driver, but its binding amdsmi cannot be imported "
            f"({type(error).__name__}: {' '.join(str(error).split())}); {_remedy_for_binding()}"
        )


def _remedy_for_binding() -> str:
    library, own = _rocm() / "lib" / "libamd_smi.so", _rocm() / "share" / "amd_smi"
    if not library.exists():
        return f"{library} is missing: install ROCm's package amd-smi-lib, or set ROCM_PATH to where ROCm is"
    release = ".".join(rocm_version().split(".")[:2]) or "<major.minor of ROCm>"
    return (
        f'install the one of the same release as ROCm, by pip install "amdsmi=={release}.*", or the one that ROCm brings, '
        f"by pip install {own}"
    )


def _remedy_for(error: OSError, node: Path) -> str:
    if isinstance(error, FileNotFoundError):
        return f"pass it to the container (--device {node}) if it is to be used"
    if error.errno == errno.EACCES:
        return f"add this user to the group {group_of(node)}"
    return "the container was given other GPUs"


def group_of(node: Path) -> str:
    """Return the group that may open a file, or AMD's usual one if it cannot be found."""
    try:
        return grp.getgrgid(node.stat().st_gid).gr_name
    except (OSError, KeyError):
        return "render"


@contextlib.contextmanager
def opened() -> Iterator[Amd | None]:
    """Provide an open driver; None on a machine without one, or without the binding.

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
