"""Tests ``gputrain compare``: one report judged against another, with its exit status."""

import re

import pytest
from unit_examples import CASE, SETTINGS, crashed, emulated_run, gpu_environment, measurement, report, result

from pytest_gputrain.cli.failing import VERDICTS
from pytest_gputrain.cli.main import main
from pytest_gputrain.records import Counts, StepCounts
from pytest_gputrain.report import json_report
from pytest_gputrain.utils.units import GiB


@pytest.fixture
def compare(tmp_path, capsys):
    def run(base, head, *arguments, **settings):
        for name, results in (("a.json", base), ("b.json", head)):
            json_report.write(report(*results, settings=SETTINGS | settings), tmp_path / name)
        code = main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def measured(*seconds, case=CASE, **fields):
    """A case with so many fresh processes."""
    return result(case, replies=tuple(measurement(step_seconds=(duration,) * 3, **fields) for duration in seconds))


BASE = measured(1.0, 1.001, 0.999, 1.0, 1.0)


LIKE = [CASE.replace(batch_size=size, named=("batch_size",)) for size in range(1, 13)]
FULL, QLORA = (result(CASE.replace(method=method)) for method in ("full", "qlora"))
CRASHED = result(replies=(crashed(),), summary=None, verdict=None)
EMULATED = result(reply=emulated_run(), device="emulated/h100")
MORE_EMULATED = result(
    reply=emulated_run(
        peak_allocated_bytes=33 * GiB, phase_peak_bytes={**emulated_run().phase_peak_bytes, "backward": 33 * GiB}
    ),
    device="emulated/h100",
)
COUNTED, WAITING = (
    result(
        reply=emulated_run(counts=Counts(steps=(0,) * 5, kinds=(StepCounts(waits=waits, launches=50),))),
        device="emulated/h100",
    )
    for waits in (1, 2)
)
ON_ANOTHER_DEVICE = gpu_environment(device_name="NVIDIA A100", device_type="rocm")


def suite(*slower, **other):
    """A case of each batch size, with processes that are so much slower, and some of them more."""
    return [measured(*[other.get(f"size_{case.batch_size}", ratio) for ratio in slower], case=case) for case in LIKE]


OF_BASE = suite(1.0, 1.001, 0.999, 1.0, 1.0)
SCENES = {
    "the same": ([BASE], [BASE], {}),
    "slower": ([BASE], [measured(1.08, 1.081, 1.08)], {}),
    "slower, within the limits of head": ([BASE], [measured(1.08, 1.081, 1.08)], {"time_tolerance": 0.1}),
    "one run each, a little slower: nothing can be measured again": ([measured(1.0)], [measured(1.05)], {}),
    "cases of one side only": ([BASE, FULL], [BASE, QLORA], {}),
    "a case that only base has": ([BASE, FULL], [BASE], {}),
    "a crash": ([BASE], [CRASHED], {}),
    "crashes on both sides": ([CRASHED], [CRASHED], {}),
    "a crash of a new case": ([], [CRASHED], {}),
    "another device": ([BASE], [measured(1.2, 1.2, 1.2, environment=ON_ANOTHER_DEVICE)], {}),
    "a slower machine: one case is 8 % slower, one 4 %": (OF_BASE, suite(*[1.025] * 3, size_5=1.08, size_6=1.04), {}),
    "a slower suite": (OF_BASE, suite(1.05, 1.05, 1.05), {}),
    "emulated runs": ([EMULATED], [MORE_EMULATED], {}),
    "emulated runs that wait more often": ([COUNTED], [WAITING], {}),
    "no emulated run to compare with": ([BASE], [EMULATED], {}),
}


@pytest.mark.parametrize("what", SCENES)
def test_what_is_said_and_what_fails(compare, snapshot, what):
    base, head, settings = SCENES[what]
    code, out, err = compare(base, head, **settings)
    fails = [verdict for verdict in VERDICTS if compare(base, head, f"--fail-on={verdict}", **settings)[0]]
    assert code == int(bool({"regressed", "over-limit", "failed"} & set(fails)))
    assert compare(base, head, "--fail-on=never", **settings)[0] == 0
    assert err == ""
    rows = [" ".join(line.split()) for line in out.splitlines()[3:]]
    said = [row for row in rows if "batch_size" not in row or " in doubt: " in row or re.search("size=[56] ", row)]
    assert {"fails": ", ".join(fails), "said": said} == snapshot
