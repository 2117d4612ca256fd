"""Reads NVIDIA GPUs through NVML."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gputrain.hardware.devices import SELF, UNKNOWN, Gpu, HardwareError, Occupancy, Reading
from pytest_gputrain.records import Holder

DEVICE_FILES: Final = Path("/dev")
"""The files of GPUs in the kernel, whatever the library says about them."""

_ANCESTORS: Final = {
    "NVML_TOPOLOGY_SINGLE": "PIX",
    "NVML_TOPOLOGY_MULTIPLE": "PXB",
    "NVML_TOPOLOGY_HOSTBRIDGE": "PHB",
    "NVML_TOPOLOGY_NODE": "NODE",
    "NVML_TOPOLOGY_SYSTEM": "SYS",
}
"""Names of nvidia-smi: one PCIe switch, several, a host bridge, several of one NUMA node, several nodes."""

_REASONS: Final = {
    0x04: "SW Power Cap",
    0x08: "HW Slowdown",
    0x10: "Sync Boost",
    0x20: "SW Thermal Slowdown",
    0x40: "HW Thermal Slowdown",
    0x80: "HW Power Brake Slowdown",
}
"""``nvmlClocksEventReason...`` under nvidia-smi's names; bindings before 12.535 have other constants for them."""

_NO_INDEX: Final = (2, 3)
"""NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, instead of a handle: there is no such GPU."""

_LOST: Final = (15, 16)
"""NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED: no answer is None for these, but a fault."""

_NO_DRIVER: Final = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND."""

_NO_GPU: Final = 28
"""NVML_ERROR_GPU_NOT_FOUND, which old bindings have no name for."""

_POWER_INSTANT: Final = 186
"""NVML_FI_DEV_POWER_INSTANT."""

_LINK_DEVICES: Final = (0, 1)
"""NVML_NVLINK_DEVICE_TYPE_GPU and _IBMNPU, the CPU of a POWER9: what an NVLink leads to that is no switch."""

_NO_BUS: Final = 0xFF
"""The bus in the address of an NVSwitch that this machine does not see."""


class Nvidia:
    """A connection to NVML, NVIDIA's management library."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def gpus(self) -> tuple[Gpu, ...]:
        driver = self._nvml.nvmlSystemGetDriverVersion()
        listed: list[Gpu] = []
        for index, handle, fault in self._each():
            try:
                if handle is None:
                    listed.append(_silent(index, driver, fault))
                else:
                    listed += self._described(index, handle, driver)
            except self._nvml.NVMLError as error:  # Other GPUs may work.
                listed.append(_silent(index, driver, str(error)))
        return tuple(listed)

    def _each(self) -> Iterator[tuple[int, Any, str]]:
        """Yield the index of every GPU with its handle, or with its fault."""
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle, fault = None, ""
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            except self._nvml.NVMLError as error:
                if error.value in _NO_INDEX:
                    raise
                fault = str(error)
            yield index, handle, fault

    def _described(self, index: int, handle: Any, driver: str) -> list[Gpu]:
        """Yield descriptions of a GPU, or of the parts of a partitioned one."""
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        partitioned = bool(mode and mode[0])  # A partitioned GPU is no device, even if it has no parts yet.
        limit = None if partitioned else self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        address, minor = self._ask("nvmlDeviceGetPciInfo", handle), self._ask("nvmlDeviceGetMinorNumber", handle)
        described = []
        for part in self._parts(handle) if partitioned else [handle]:
            memory = self._ask("nvmlDeviceGetMemoryInfo", part)
            described.append(
                Gpu(
                    index=index,
                    uuid=self._nvml.nvmlDeviceGetUUID(part),
                    name=self._nvml.nvmlDeviceGetName(part),
                    memory_bytes=0 if memory is None else int(memory.total),
                    driver=driver,
                    power_limit_watts=None if limit is None else limit / 1000,
                    pci_address=f"{address.domain:04x}:{address.bus:02x}:{address.device:02x}.0" if address else "",
                    minor=minor,
                )
            )
        return described

    def _parts(self, handle: Any) -> list[Any]:
        """Return the MIG devices of a partitioned GPU."""
        most = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        parts = (self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, at) for at in range(most))
        return [part for part in parts if part is not None]

    def occupancy(self, gpu: Gpu) -> Occupancy:
        handle = self._handle(gpu)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        running = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if running is None:  # Drivers before 510 have only the older function.
            running = self._ask("nvmlDeviceGetComputeRunningProcesses_v2", handle)
        holders = None
        if running is not None:
            holders = tuple(
                Holder(pid=process.pid, gpu=gpu.index, bytes=getattr(process, "usedGpuMemory", None)) for process in running
            )
        return Occupancy(None if memory is None else int(memory.free), holders)

    def read(self, gpu: Gpu) -> Reading:
        if gpu.uuid.startswith("MIG-"):  # The counters would be those of the whole GPU.
            return Reading()
        handle = self._handle(gpu)
        energy = self._ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        power = self._power(handle)
        used = self._ask("nvmlDeviceGetUtilizationRates", handle)
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if reasons is None:  # Drivers before 535 have the older name.
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return Reading(
            energy_joules=None if energy is None else energy / 1000,
            power_watts=None if power is None else power / 1000,
            clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, self._nvml.NVML_CLOCK_SM),
            utilization=None if used is None else used.gpu / 100,
            throttling=None if reasons is None else frozenset(name for bit, name in _REASONS.items() if reasons & bit),
        )

    def _power(self, handle: Any) -> int | None:
        """Return the present power in milliwatts. Drivers before 530 have only a figure of their own, which on Ampere and
        newer GPUs except A100 is a mean of the last second."""
        values = self._ask("nvmlDeviceGetFieldValues", handle, [_POWER_INSTANT])
        if values and values[0].nvmlReturn == 0:
            return int(values[0].value.uiVal)
        milliwatts: int | None = self._ask("nvmlDeviceGetPowerUsage", handle)
        return milliwatts

    def paths(self, gpus: Sequence[Gpu]) -> tuple[tuple[str, ...], ...]:
        """Return the paths between GPUs in the terms of ``nvidia-smi topo -m``.

        ``NV4`` stands for four NVLinks, direct or through NVSwitches, else where on PCIe two meet.
        """
        known = []
        for _, handle, _ in self._each():
            with contextlib.suppress(self._nvml.NVMLError):  # This GPU cannot be at the end of a link.
                known += [] if handle is None else [self._nvml.nvmlDeviceGetPciInfo(handle)]
        ends = [_LinkEnd(self._nvml, self._ask, self._handle(gpu), known) for gpu in gpus]
        return tuple(tuple(SELF if end is other else end.path(other) for other in ends) for end in ends)

    def _handle(self, gpu: Gpu) -> Any:
        if gpu.uuid.startswith("MIG-"):
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return self._nvml.nvmlDeviceGetHandleByIndex(gpu.index)

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer of a function of the library; None if the binding, the driver or the hardware lacks it."""
        function: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if function is None:
            return None
        # Bindings since 12.560 raise this for an old driver, and it is no NVMLError.
        mismatch = getattr(self._nvml, "NVMLLibraryMismatchError", self._nvml.NVMLError)
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in _LOST:
                raise
            return None
        except mismatch:
            return None


class _LinkEnd:
    """A GPU and its NVLinks, as one end of a path.

    Args:
        known: addresses of all GPUs of this machine.
    """

    def __init__(self, nvml: Any, ask: Callable[..., Any], handle: Any, known: Sequence[Any]) -> None:
        self._nvml, self._ask, self._handle = nvml, ask, handle
        self._address = ask("nvmlDeviceGetPciInfo", handle)
        self._direct: list[Any] = []
        self._into_switches = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if not ask("nvmlDeviceGetNvLinkState", handle, link):
                continue
            kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            # A container may hide the GPU at the other end. A virtual machine never shows its switches, nor their type.
            is_seen = any(_same_address(remote, address) for address in known)
            is_hidden = kind in _LINK_DEVICES and remote is not None and remote.bus != _NO_BUS
            if kind != nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH and (is_seen or is_hidden):
                self._direct.append(remote)
            else:
                self._into_switches += 1

    def path(self, other: _LinkEnd) -> str:
        links = sum(_same_address(address, other._address) for address in self._direct)
        # Any two GPUs with links into switches reach each other.
        links += min(self._into_switches, other._into_switches)
        if links:
            return f"NV{links}"
        level = self._ask("nvmlDeviceGetTopologyCommonAncestor", self._handle, other._handle)
        names = {getattr(self._nvml, constant): name for constant, name in _ANCESTORS.items()}
        return names.get(level, UNKNOWN)


def _same_address(address: Any, other: Any) -> bool:
    both_known = address is not None and other is not None
    return both_known and (address.domain, address.bus, address.device) == (other.domain, other.bus, other.device)


@contextlib.contextmanager
def opened() -> Iterator[Nvidia | None]:
    """Provide an open driver; None on a machine without one.

    Raises:
        HardwareError: the driver is there but does not answer, now or while it is open.
    """
    try:
        # The import takes time, and most runs of pytest never ask for GPUs.
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # Any other error is a fault of a host that has GPUs. It must not be read as a host without GPUs.
        absent = error.value in _NO_DRIVER and not any(DEVICE_FILES.glob("nvidia[0-9]*"))
        if error.value != _NO_GPU and not absent:
            raise _fault(error) from error
        yield None
        return
    try:
        yield Nvidia(pynvml)
    except pynvml.NVMLError as error:
        raise _fault(error) from error
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _silent(index: int, driver: str, fault: str) -> Gpu:
    return Gpu(index=index, uuid="", name="", memory_bytes=0, driver=driver, fault=fault)


def _fault(error: Exception) -> HardwareError:
    return HardwareError(
        f"the NVIDIA driver failed to describe its GPUs ({error}); see what nvidia-smi says, or leave them alone with "
        "--gpu-platform=cpu"
    )
