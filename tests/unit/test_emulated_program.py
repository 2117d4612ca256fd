"""The verdict of `gputrain emulate`."""

import pytest

from pytest_gputrain.gate.emulated_program import judge
from pytest_gputrain.records.emulation import DeviceUse, EmulatedDevice, EmulatedProcess, Refused

GIB = 1 << 30


def process(number=1, *, refused=(), unknown=(), estimated=0):
    device = EmulatedDevice(
        index=0, gpu=0, peak_allocated_bytes=0, peak_reserved_bytes=0, peak=None, course=(), refused=tuple(refused)
    )
    return EmulatedProcess(process=number, devices=(device,), unknown=unknown, estimated_bytes=estimated * GIB)


def use(gib, number=1, gpu=0):
    return DeviceUse(process=number, gpu=gpu, peak_bytes=gib * GIB)


def beside(gib):
    return DeviceUse(process=1, gpu=0, peak_bytes=79 * GIB, missing_beside_torch=gib * GIB)


OOM = Refused(bytes=30 * GIB, free=18 * GIB, where="train.py:5 in grow")
LARGER = Refused(bytes=50 * GIB, free=20 * GIB, where="train.py:7 in grow")
SMALL = Refused(bytes=2 * GIB, free=18 * GIB, where="")
"""Free memory lay in pieces."""
SCENES = {
    "room": (0, [process()], [use(60)], 20),
    "the last byte": (0, [process()], [use(80)], 0),
    "two GPUs": (0, [process(1), process(2)], [use(60, 1), use(70, 2, gpu=1)], 10),
    "two processes": (0, [process(1), process(2)], [use(30, 1), use(40, 2)], 10),
    "refused": (1, [process(refused=[OOM, LARGER])], [use(60)], -30),
    "refused, and the program went on": (0, [process(refused=[OOM])], [use(60)], -12),
    "refused in pieces": (1, [process(refused=[SMALL])], [use(60)], 0),
    "refused, and another did not say": (1, [process(refused=[OOM])], [use(60), use(60, 2, gpu=1)], -12),
    "refused beside torch": (1, [process()], [beside(3)], -3),
    "refused beside torch, and the program went on": (0, [process()], [beside(3)], -3),
    "never used": (0, [], [], None),
    "failed": (3, [process()], [use(60)], 20),
    "killed": (137, [], [use(60)], 20),
    "ended without Python's end": (0, [process()], [use(60), use(20, 2, gpu=1)], 20),
    "not counted": (0, [process(unknown=("cuDNN's workspaces",))], [use(60)], 20),
    "estimated": (0, [process(estimated=20)], [use(60)], 20),
    "estimated within its error": (0, [process(estimated=9), process(2, estimated=12)], [use(30), use(30, 2)], 20),
    "estimated on another GPU": (0, [process(estimated=9), process(2, estimated=12)], [use(60), use(60, 2, gpu=1)], 20),
    "refused by less than the error": (1, [process(refused=[OOM], estimated=13)], [use(60)], -12),
    "two processes too many": (0, [process(1), process(2)], [use(50, 1), use(40, 2)], -10),
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_verdict_and_the_headroom(scene, snapshot):
    status, processes, used, headroom = SCENES[scene]
    fit = judge(["python", "train.py"], status, 80 * GIB, processes, used)
    assert fit.headroom_bytes == (None if headroom is None else headroom * GIB)
    assert f"{fit.verdict}: {fit.sentence}" == snapshot
