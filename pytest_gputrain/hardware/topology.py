"""How the GPUs of a case reach each other: the matrix of ``nvidia-smi topo -m``, from NVML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from pytest_gputrain.hardware import nvidia
from pytest_gputrain.hardware.devices import Gpu

SELF: Final = "X"
UNKNOWN: Final = "N/A"
"""What this driver does not tell of a pair."""

_ANCESTORS: Final = {
    "NVML_TOPOLOGY_SINGLE": "PIX",
    "NVML_TOPOLOGY_MULTIPLE": "PXB",
    "NVML_TOPOLOGY_HOSTBRIDGE": "PHB",
    "NVML_TOPOLOGY_NODE": "NODE",
    "NVML_TOPOLOGY_SYSTEM": "SYS",
}
"""Names of nvidia-smi: one PCIe switch, several, a host bridge, several of one NUMA node, several nodes."""


def paths(gpus: Sequence[Gpu]) -> tuple[tuple[str, ...], ...]:
    """A row for each of ``gpus``, in their order, of its paths to all of them; empty for one GPU, which has none.

    A path is ``NV4`` for four NVLinks between the two, direct or through NVSwitches, else where on PCIe they meet.

    Raises:
        HardwareError: the driver does not answer at all.
    """
    if len(gpus) < 2:
        return ()
    with nvidia.library() as nvml:
        if nvml is None:
            return ()
        ends = [_End(nvml, gpu) for gpu in gpus]
        return tuple(tuple(SELF if one is other else one.path(other) for other in ends) for one in ends)


class _End:
    """A GPU with its NVLinks."""

    def __init__(self, nvml: Any, gpu: Gpu) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        self._address = self._ask(nvml.nvmlDeviceGetPciInfo)
        self._direct: list[Any] = []
        self._into_switches = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if not self._ask(nvml.nvmlDeviceGetNvLinkState, link):
                continue
            if self._ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                self._into_switches += 1
            else:
                self._direct.append(self._ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, link))

    def path(self, other: _End) -> str:
        links = sum(_same_place(address, other._address) for address in self._direct)
        # Switches join all GPUs that have links into them.
        links += min(self._into_switches, other._into_switches)
        if links:
            return f"NV{links}"
        level = self._ask(self._nvml.nvmlDeviceGetTopologyCommonAncestor, other._handle)
        known = {getattr(self._nvml, constant): name for constant, name in _ANCESTORS.items()}
        return known.get(level, UNKNOWN)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What ``call`` says of this GPU; None where the driver or the hardware has no such thing."""
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


def _same_place(one: Any, other: Any) -> bool:
    known = one is not None and other is not None
    return known and (one.domain, one.bus, one.device) == (other.domain, other.bus, other.device)
