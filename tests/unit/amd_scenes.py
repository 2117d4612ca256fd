"""Machines with AMD GPUs, by what others have published of them. What nobody has published of one is left out."""

MIB = 2**20

TOTAL, USED = 206141652992, 297775104
"""Of an MI300X as its driver tells it: https://github.com/ROCm/legacy-rocm-build/issues/4750."""

MI300X = [
    {
        "name": "AMD Instinct MI300X",
        "device_id": "0x74a1",
        "compute_units": 304,
        "serial": serial,
        "bdf": bdf,
        "node_id": node,
        "kfd_id": kfd,
        "partition": "SPX",
        "partition_id": 0,
        "memory": TOTAL,
        "used": USED,
        "power_cap_watts": 750,
        "driver": "6.12.12",
        "power": power,
        "clock": clock,
        "gfx": 0,
        "violations": dict.fromkeys(("prochot_thrm", "ppt_pwr", "socket_thrm", "vr_thrm", "hbm_thrm"), 0),
        "link": 2,
    }
    for serial, bdf, node, kfd, power, clock in (
        ("0xC0B106985C515C91", "0000:0c:00.0", 2, 3771, 201, 2107),
        ("0xBBB09363B4D6F06E", "0000:df:00.0", 10, 29729, 210, 2104),
    )
]
"""The first and the last of eight. Their addresses and UUIDs: AMD's "Deep dive into the MI300 compute and memory partition
modes" (c0ff74a1-0000-1000-80b1-06985c515c91; the serial number is in it, as that of the MI325X shows). Nodes, device id,
power limit and driver: https://github.com/ROCm/amdsmi/issues/100; power and clock: the changelog of amdsmi for ROCm 6.4.1;
violations: that for ROCm 6.3.0, where none is active; links (xGMI) and compute units: AMD's data sheet of the platform."""

MI325X_VF = [
    {
        "name": "AMD Instinct Mi325X VF",
        "device_id": "0x74b9",
        "compute_units": 304,
        "serial": "0x9F444A2FB30ADEB0",
        "bdf": "0000:83:00.0",
        "kfd_id": 43855,
        "node_id": 9,
        "hip_id": 7,
        "hip_uuid": "GPU-9f444a2fb30adeb0",
        "render": 185,
        "partition": "SPX",
        "partition_id": 0,
        "clock": 131,
        "processes": [{"pid": 230139, "name": "/usr/bin/python3.12", "bytes": 528378265}],
    },
    {
        "name": "AMD Instinct Mi325X VF",
        "device_id": "0x74b9",
        "compute_units": 304,
        "serial": "0xB7D181671A192E45",
        "bdf": "0000:8b:00.0",
        "kfd_id": 27976,
        "node_id": 8,
        "hip_id": 6,
        "hip_uuid": "GPU-b7d181671a192e45",
        "render": 177,
        "partition": "SPX",
        "partition_id": 0,
    },
]
"""Virtual functions in a guest, in which HIP counts from the other end: internal/metricsmap.md of
https://github.com/ROCm/device-metrics-exporter, where the process has 503.9 MB."""

_PART = {"kfd_id": 48116, "bdf": "0000:0c:00.1", "node_id": 3, "partition_id": 1, "hip_id": 1}
_FIRST = {**MI300X[0], "kfd_id": 18421, "hip_id": 0, "render": 128, "partition": "CPX"}

CPX_MIRRORED = [_FIRST, {**_FIRST, **_PART, "render": 0xFFFFFFFF}]
"""The first two of eight parts up to ROCm 6.4.0, which mirrors the whole GPU: the changelog of amdsmi for ROCm 6.4.1,
"Previous Outputs in CPX"."""

CPX = [_FIRST, {**_PART, "render": 129, "memory": 24 * 1024 * MIB, "used": 512 * MIB}]
"""The same from ROCm 6.4.1 on, "Corrected outputs in CPX": a secondary part has neither device id nor mode, power nor clock
(also https://github.com/ROCm/amdsmi/issues/100), and 24.0 GB of memory, of which 0.5 GB are used."""

MI250 = [
    {
        "name": "AMD INSTINCT MI250 (MCM) OAM AC MBA",
        "device_id": "0x740c",
        "serial": "0x719d230578348e8c",
        "bdf": "0000:2f:00.0",
        "power_cap_watts": 560,
        "driver": "6.2.4",
        "average_power": 89,
        "clock": 800,
        "gfx": 10,
        "energy": (62929744071539, 15.3),
    }
]
"""One die, as rocm-smi told of it to the tests of wandb (core/pkg/monitor/gpu_amd_test.go)."""
