"""Runs the plugin on a real amdsmi binding whose C library is a stand-in. Each process has one binding, so it is a program.

    python amd_stand_in.py BINDING SCENES.json           prints what `drivers` tells of each scene, as JSON
    python amd_stand_in.py BINDING SCENES.json doctor    runs ``gputrain doctor`` in the first scene

The binding is a folder that pip installed amdsmi into. ``ROCM_PATH`` names a folder from `library`, whose C functions answer
"not supported" to all; those that a scene has an answer for are replaced by functions here, which fill the binding's own
structures.
"""

import ctypes
import dataclasses
import errno
import functools
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

NOT_SUPPORTED = 2
NONE16, NONE32 = 0xFFFF, 0xFFFFFFFF


def library(rocm, binding, release, compiler):
    """Build the folder of a release of ROCm; its C library has the functions that the release's binding calls, no others."""
    wrapper = (binding / "amdsmi" / "amdsmi_wrapper.py").read_text()
    names = sorted(set(re.findall(r"_libraries\['libamd_smi.so'\]\.(\w+)", wrapper)))
    assert len(names) > 100
    (rocm / "lib").mkdir(parents=True)
    (rocm / ".info").mkdir()
    (rocm / ".info" / "version").write_text(f"{release}-1\n")
    source = "\n".join(f"int {name}() {{ return {NOT_SUPPORTED}; }}" for name in names)
    command = [compiler, "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(rocm / "lib" / "libamd_smi.so")]
    subprocess.run(command, input=source.encode(), check=True, timeout=120)


class StandIn:
    """C functions of the library that answer for the GPUs of a scene: dictionaries, without what is not known of one."""

    def __init__(self, wrapper, gpus):
        self._wrapper, self._gpus = wrapper, gpus
        for name, answer in {
            "amdsmi_init": lambda *_: 0,
            "amdsmi_shut_down": lambda *_: 0,
            "amdsmi_get_socket_handles": self._sockets,
            "amdsmi_get_processor_handles": self._processors,
            "amdsmi_get_gpu_asic_info": self._answer(self._asic),
            "amdsmi_get_gpu_device_bdf": self._answer(self._address),
            "amdsmi_get_gpu_enumeration_info": self._answer(self._enumeration),
            "amdsmi_get_gpu_kfd_info": self._answer(self._kfd),
            "amdsmi_get_gpu_compute_partition": self._answer(self._partition),
            "amdsmi_get_gpu_memory_total": self._answer(self._number("memory")),
            "amdsmi_get_gpu_memory_usage": self._answer(self._number("used")),
            "amdsmi_get_power_cap_info": self._answer(self._power_cap),
            "amdsmi_get_gpu_driver_info": self._answer(self._driver),
            "amdsmi_get_energy_count": self._answer(self._energy),
            "amdsmi_get_power_info": self._answer(self._power),
            "amdsmi_get_power_info_v2": self._answer(self._power),
            "amdsmi_get_clock_info": self._answer(self._clock),
            "amdsmi_get_gpu_activity": self._answer(self._activity),
            "amdsmi_get_violation_status": self._answer(self._violations),
            "amdsmi_get_gpu_process_list": self._answer(self._processes),
            "amdsmi_topo_get_link_type": self._answer(self._link),
        }.items():
            if hasattr(wrapper, name):  # of this release
                setattr(wrapper, name, answer)

    def _sockets(self, count, handles):
        count._obj.value = 1
        if handles:
            handles[0] = 1
        return 0

    def _processors(self, socket, count, handles):
        count._obj.value = len(self._gpus)
        for at in range(len(self._gpus) if handles else 0):
            handles[at] = 0x1000 + at
        return 0

    def _answer(self, fill):
        """A C function of a handle that fills what the other arguments point to, and has no answer where a value lacks."""

        @functools.wraps(fill)
        def function(handle, *arguments):
            try:
                fill(self._gpus[handle.value - 0x1000], *(getattr(pointer, "_obj", pointer) for pointer in arguments))
            except KeyError:
                return NOT_SUPPORTED
            return 0

        return function

    @staticmethod
    def _number(key):
        def fill(gpu, kind, number):
            number.value = gpu[key]

        return fill

    @staticmethod
    def _asic(gpu, info):
        info.market_name, info.vendor_id = gpu.get("name", "").encode(), 0x1002
        info.device_id, info.asic_serial = int(gpu.get("device_id", "0"), 16), gpu.get("serial", "").encode()
        if hasattr(info, "num_of_compute_units"):
            info.num_of_compute_units = gpu.get("compute_units", NONE32)

    @staticmethod
    def _address(gpu, bdf):
        domain, bus, device, function = (int(part, 16) for part in re.split("[:.]", gpu["bdf"]))
        bdf.as_uint = domain << 16 | bus << 8 | device << 3 | function

    @staticmethod
    def _enumeration(gpu, info):
        info.hip_id, info.hip_uuid = gpu["hip_id"], gpu.get("hip_uuid", "").encode()
        info.drm_render, info.drm_card, info.hsa_id = gpu.get("render", NONE32), NONE32, NONE32

    @staticmethod
    def _kfd(gpu, info):
        info.kfd_id, info.node_id = gpu.get("kfd_id", 2**64 - 1), gpu["node_id"]
        info.current_partition_id = gpu.get("partition_id", NONE32)

    @staticmethod
    def _partition(gpu, text, length):
        text.value = gpu["partition"].encode()

    @staticmethod
    def _power_cap(gpu, sensor, info):
        info.power_cap = int(gpu["power_cap_watts"] * 1e6)

    @staticmethod
    def _driver(gpu, info):
        info.driver_name, info.driver_version = b"amdgpu", gpu["driver"].encode()

    @staticmethod
    def _energy(gpu, count, resolution, timestamp):
        count.value, resolution.value = gpu["energy"]

    @staticmethod
    def _power(gpu, *arguments):
        info = arguments[-1]
        info.current_socket_power = gpu.get("power", NONE16)
        info.average_socket_power = gpu.get("average_power", NONE16)
        if hasattr(info, "socket_power"):
            info.socket_power = gpu.get("power", gpu.get("average_power", NONE16))

    @staticmethod
    def _clock(gpu, kind, info):
        setattr(info, "clk" if hasattr(info, "clk") else "cur_clk", gpu["clock"])  # the latter before ROCm 6.2

    @staticmethod
    def _activity(gpu, info):
        info.gfx_activity, info.umc_activity, info.mm_activity = gpu["gfx"], NONE16, NONE16

    @staticmethod
    def _violations(gpu, info):
        active = gpu["violations"]
        for name in ("prochot_thrm", "ppt_pwr", "socket_thrm", "vr_thrm", "hbm_thrm"):
            setattr(info, f"active_{name}", active.get(name, 0xFF))

    @staticmethod
    def _processes(gpu, count, listed):
        count.value = len(gpu["processes"])
        for at, process in enumerate(gpu["processes"]):
            listed[at].pid, listed[at].name = process["pid"], process["name"].encode()
            listed[at].memory_usage.vram_mem = process["bytes"]

    @staticmethod
    def _link(gpu, other, hops, kind):
        hops.value, kind.value = 1, gpu["link"]


def told():
    """What the plugin makes of the answers."""
    from pytest_gputrain.hardware import amd, drivers

    with amd.opened() as driver:
        if driver is None:
            return {"unseen": drivers.unseen()}
        gpus = driver.gpus()
        readings = [driver.read(gpu)._asdict() for gpu in gpus]
        return {
            "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
            "readings": [{**reading, "throttling": sorted(reading["throttling"] or ())} for reading in readings],
            "holders": [
                [(holder.pid, holder.name, holder.bytes) for holder in driver.occupancy(gpu).holders or ()] for gpu in gpus
            ],
            "free": [driver.occupancy(gpu).free_bytes for gpu in gpus],
            "paths": driver.paths(gpus),
            "left_out": driver.left_out(),
            "unseen": drivers.unseen(),
        }


def run(binding, scenes_file, *command):
    from pytest_gputrain.cli.main import main
    from pytest_gputrain.hardware import amd, nvidia

    sys.modules["pynvml"] = None
    sys.path.insert(0, binding)
    refused, open_file = set(), os.open

    def opened(path, *arguments):
        if str(path) in refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, *arguments)

    os.open = opened  # root may open every file
    told_of = {}
    for name, scene in json.loads(Path(scenes_file).read_text()).items():
        root = Path(scene["root"])
        amd.DEVICE_FILE, amd.RENDER_NODES, amd.PCI_DEVICES = root / "kfd", root / "dri", root / "pci"
        nvidia.DEVICE_FILES = root
        refused = {str(root / "dri" / f"renderD{number}") for number in scene["refused"]}
        if scene["gpus"] is not None:
            importlib.import_module("amdsmi")
            StandIn(sys.modules["amdsmi.amdsmi_wrapper"], scene["gpus"])
        if command:
            return main(list(command))
        told_of[name] = told()
    print(json.dumps(told_of))
    return 0


if __name__ == "__main__":
    assert ctypes.sizeof(ctypes.c_void_p) == 8
    sys.exit(run(*sys.argv[1:]))
