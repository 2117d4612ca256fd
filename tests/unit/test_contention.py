"""What others on the GPUs do to figures and verdicts."""

import msgspec
from unit_examples import measurement

from pytest_gputrain.gate.contention import describe_holders, describe_others, describe_throttling, why_not_recorded
from pytest_gputrain.records import Holder, Telemetry
from pytest_gputrain.utils.units import GiB

PYTHON = Holder(pid=4711, gpu=0, name="python", bytes=12 * GiB)


def _run(throttled=None, others=(), **fields):
    telemetry = Telemetry(
        readings=9,
        energy_joules=None,
        power_watts=None,
        clock_mhz=None,
        utilization=None,
        throttled=throttled,
        others=others,
    )
    return msgspec.structs.replace(measurement(), telemetry=telemetry, **fields)


HOLDERS = (
    (),
    (PYTHON,),
    (Holder(pid=None, gpu=0, bytes=3 * GiB),),
    (Holder(pid=7, gpu=1), PYTHON),
    tuple(Holder(pid=pid, gpu=0) for pid in range(1, 6)),
)


def test_those_on_a_gpu_are_named(snapshot):
    assert list(map(describe_holders, HOLDERS)) == snapshot


def test_who_was_there_before_and_who_came_are_each_named_once_and_nothing_beside_them_is_recorded():
    newcomer = Holder(pid=8, gpu=0, name="jupyter")
    runs = [_run(holders=(PYTHON,)), _run(others=(PYTHON, newcomer))]
    beside = "beside python (pid 4711, 12.0 GiB) on GPU 0 and jupyter (pid 8) on GPU 0"
    assert describe_others(runs) == beside
    assert describe_others([_run()]) == describe_others([measurement()]) == ""
    assert why_not_recorded(runs, None).startswith(f"was measured {beside}, so it is not recorded")
    assert why_not_recorded([_run(), _run()], None) == ""


def test_lowered_clocks_are_told_but_for_the_power_limit():
    runs = [_run({"SW Power Cap": 0.9, "HW Thermal Slowdown": 0.1}), _run({"HW Thermal Slowdown": 0.4, "HW Slowdown": 0.01})]
    assert describe_throttling(runs) == "its GPUs lowered their clocks (HW Thermal Slowdown for 40.0 % of the time)"
    assert (
        describe_throttling([_run({"PPT": 1.0})])
        == describe_throttling([_run(None)])
        == describe_throttling([measurement()])
        == ""
    )
