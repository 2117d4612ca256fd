"""Steps in which the GPU waits for the host: what their seconds are held to, and what is said of them."""

import csv
import io
import json
import math
from dataclasses import replace

import msgspec
import pytest
from unit_examples import (
    CASE,
    baseline,
    baseline_run,
    cpu_environment,
    gpu_environment,
    judged,
    measurement,
    report,
    result,
    told,
)

from pytest_gputrain.gate import regression, suite_noise
from pytest_gputrain.gate.baseline_changes import loosened
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.regression import first_ratio
from pytest_gputrain.gate.suite_noise import prior_of, whole_suite
from pytest_gputrain.gate.summary import summarise
from pytest_gputrain.records import Counts, GpuSteps, Holder, StepCounts
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance
from pytest_gputrain.report import explanations, terminal, uncompared
from pytest_gputrain.report.export.formats import FORMATS
from pytest_gputrain.report.history_lines import lines_of
from pytest_gputrain.report.html.cases import gathered
from pytest_gputrain.storage.reports import to_baseline
from pytest_gputrain.utils.git import RunInfo

TOLERANCE = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02))
HERE, ELSEWHERE = gpu_environment(gpu_digests=("a", "b")), gpu_environment(gpu_digests=("c",))


def _steps(seconds, collectives=0.0):
    return None if seconds is None else GpuSteps(seconds=(seconds,) * 5, collective_seconds=(collectives,) * 5)


def _took(wall, gpu, *, on=HERE, **fields):
    return measurement(step_seconds=(wall,) * 3, gpu_steps=_steps(gpu), environment=on, **fields)


def _stored(wall=1.0, gpu=0.23, *, on=HERE, runs=5, **fields):
    return baseline(*[baseline_run(step_seconds=(wall,) * 3, gpu_steps=_steps(gpu), environment=on, **fields)] * runs)


def _ratio(reply, stored):
    return first_ratio(Criteria(case=CASE, scale="full", tolerance=TOLERANCE, baseline=stored), [reply])


def _outcome(replies, stored, **criteria):
    several = list(replies) if isinstance(replies, list) else [replies] * 3
    return judged(several, stored, TOLERANCE, **criteria)


def _judge(replies, stored, **criteria):
    return _outcome(replies, stored, **criteria).verdict


@pytest.fixture
def _judged(monkeypatch):
    monkeypatch.setattr(regression, "WHY_GPU_SECONDS_ARE_HELD_COARSELY", "")


@pytest.mark.parametrize(
    ("before", "now", "on", "status"),
    [
        (0.01, 0.11, HERE, "pass"),
        (0.01, 0.112, HERE, "regressed"),
        (0.112, 0.0, HERE, "improved"),
        (0.01, 0.51, ELSEWHERE, "pass"),
        (0.01, 0.53, ELSEWHERE, "not-comparable"),
        (None, None, HERE, None),
        (0.01, None, HERE, "not-comparable"),
        (None, 0.01, HERE, "not-comparable"),
    ],
)
@pytest.mark.parametrize("gpu", [None, 0.23, 0.99])
def test_a_step_may_wait_for_its_batches_by_as_much_longer_as_a_host_varies(before, now, on, status, gpu):
    verdict = _judge(_took(1.0, gpu, on=on, input_seconds=now), _stored(gpu=gpu, input_seconds=before))
    metric = verdict.metric("input_seconds")
    assert (metric.status if metric else None) == status
    assert verdict.status == ("pass" if status in (None, "not-comparable") else status)
    assert ("its wait for batches is not compared: " in verdict.sentence) is (status == "not-comparable")


def test_a_baseline_of_a_cpu_has_no_wait_for_batches():
    for environment, stored in ((HERE, 0.01), (cpu_environment(), None)):
        reply = measurement(environment=environment, input_seconds=0.01)
        [run] = to_baseline(result(replies=(reply,)), date="2026-01-01", session="x", commit="").runs
        assert run.input_seconds == stored


OLD = _stored(gpu=None, on=gpu_environment())


@pytest.mark.parametrize(
    ("busy", "on", "slower", "status"),
    [
        (0.95, HERE, 1.029, "pass"),
        (0.95, HERE, 1.031, "regressed"),
        (0.95, ELSEWHERE, 1.031, "regressed"),
        (0.949, HERE, 1.099, "pass"),
        (0.949, HERE, 1.101, "regressed"),
        (0.949, HERE, 1 / 1.101, "improved"),
        (0.949, ELSEWHERE, 1.499, "pass"),
        (0.949, ELSEWHERE, 1.501, "not-comparable"),
        (0.949, ELSEWHERE, 0.1, "pass"),
    ],
)
def test_the_busy_share_of_the_baseline_and_the_machine_decide_what_wall_seconds_are_held_to(busy, on, slower, status):
    verdict = _judge(_took(slower, busy, on=on), _stored(gpu=busy))
    time = verdict.metric("step_seconds")
    assert (time.status, time.gpu_busy_share) == (status, busy)
    assert verdict.status == ("pass" if status == "not-comparable" else status)


def test_a_wider_time_tolerance_also_holds_for_steps_that_wait():
    wider = replace(TOLERANCE, time=0.2)
    for slower, status in ((1.19, "pass"), (1.21, "regressed")):
        assert judged([_took(slower, 0.23)] * 3, _stored(), wider).verdict.status == status


def test_a_machine_is_known_by_its_gpus_and_not_by_its_name():
    known = msgspec.structs.replace(HERE, host="another-name", gpu_digests=("b", "x"))
    unknown = gpu_environment()
    for on, status in ((known, "regressed"), (unknown, "pass"), (ELSEWHERE, "pass")):
        assert _judge(_took(1.4, 0.23, on=on), _stored()).status == status
    assert _judge(_took(1.4, 0.23), _stored(on=unknown)).status == "pass"


def test_wall_seconds_of_a_host_that_varies_are_held_to_its_own_spread():
    logs = (-0.25, -0.1, 0.0, 0.1, 0.25)
    varied = baseline(*(baseline_run(step_seconds=(math.exp(x),), gpu_steps=_steps(0.2), environment=HERE) for x in logs))
    assert _judge(_took(1.2, 0.2), varied).metric("step_seconds").status == "pass"
    assert _judge(_took(1.2, 0.2), _stored()).status == "regressed"


def test_a_step_that_waits_for_the_host_is_measured_again_only_beyond_its_limit():
    for slower, busy, settled in ((1.09, 0.23, True), (1.2, 0.23, False), (1.02, 0.99, False)):
        assert _outcome([_took(slower, busy)], _stored(gpu=busy)).settled is settled
    assert _outcome([_took(9.0, 0.23, on=ELSEWHERE)], _stored()).settled


@pytest.mark.parametrize("on", [HERE, ELSEWHERE])
@pytest.mark.parametrize(("now", "status"), [(1.099, "pass"), (1.101, "regressed"), (3.0, "regressed"), (0.9, "improved")])
def test_gpu_seconds_are_held_to_a_coarse_limit_before_their_noise_is_known(on, now, status):
    verdict = _judge(_took(1.0, 0.23 * now, on=on), _stored())
    assert verdict.status == verdict.metric("gpu_seconds").status == status
    assert _outcome([_took(1.0, 0.23 * now, on=on)], _stored()).settled is (status == "pass")
    assert _judge(_took(1.0, 0.3, on=on), _stored(), shift=0.3).status == "regressed", "of the host"


@pytest.mark.usefixtures("_judged")
@pytest.mark.parametrize(
    ("busy", "now", "on", "status"),
    [
        (0.23, 1.02, HERE, "pass"),
        (0.23, 1.07, HERE, "regressed"),
        (0.23, 1.07, ELSEWHERE, "regressed"),
        (0.23, 1 / 1.07, HERE, "improved"),
        (0.95, 1.07, HERE, "pass"),
    ],
)
def test_gpu_seconds_are_judged_on_any_machine_where_the_gpu_waits(busy, now, on, status):
    one = _stored(gpu=busy, runs=2)
    verdict = _judge(_took(1.0, busy * now, on=on), one)
    assert verdict.status == verdict.metric("gpu_seconds").status == status
    assert _outcome([_took(1.0, busy * now, on=on)], one).settled is (status == "pass")


@pytest.mark.usefixtures("_judged")
def test_a_gpu_beside_other_processes_is_in_doubt():
    beside = _took(1.0, 0.3, holders=(Holder(pid=7, gpu=0, name="python"),))
    assert _judge(beside, _stored()).metric("gpu_seconds").status == "inconclusive"
    unknown = _took(1.0, None, holders=beside.holders)
    assert _judge([unknown, *[_took(1.0, 0.3)] * 3], _stored()).metric("gpu_seconds").status == "regressed"


def test_an_old_baseline_is_compared_as_far_as_it_goes():
    """The class of its steps follows from today's GPU seconds: its host may wait no more than before."""
    for gpu, slower, status in ((None, 1.04, "regressed"), (0.23, 1.3, "pass"), (0.97, 1.04, "regressed")):
        verdict = _judge(_took(slower, gpu), OLD)
        assert verdict.metric("step_seconds").status == status
        assert verdict.metric("gpu_seconds") is None or verdict.metric("gpu_seconds").status == "not-comparable"
    assert _judge(_took(0.8, 0.79), OLD).metric("step_seconds").gpu_busy_share == 0.79 / 0.8, "the GPU does less"
    shown = [result(replies=(_took(1.0, 0.23),), verdict=_judge(_took(1.0, 0.23), OLD))]
    assert uncompared.line(shown) == "not compared: GPU seconds of 1 case"
    assert any(
        "GPU seconds not compared: there were none before; record it again" in line for line in explanations.explain(shown)
    )


def test_host_bound_steps_tell_nothing_of_the_whole_suite(monkeypatch):
    slow, same = _took(1.4, 0.23), _took(1.4, 1.38)
    assert _ratio(slow, _stored()) is None
    assert _ratio(same, _stored(gpu=0.99)) == pytest.approx(math.log(1.4))

    def suite(reply, stored):
        verdict = _judge(reply, stored)
        return whole_suite([result(key=str(at), replies=(reply,), verdict=verdict) for at in range(10)], 0.03)

    assert suite(slow, _stored()) == suite(_took(1.0, 0.23 * 1.2), _stored()) == (False, "")
    assert suite(same, _stored(gpu=0.99))[0]
    for module in (regression, suite_noise):
        monkeypatch.setattr(module, "WHY_GPU_SECONDS_ARE_HELD_COARSELY", "")
    longer = _took(1.0, 0.23 * 1.2)
    assert _ratio(longer, _stored()) == pytest.approx(math.log(1.2))
    assert suite(longer, _stored())[0], "GPU seconds that are judged tell of the suite"
    shifted = _judge(longer, _stored(), shift=math.log(1.2))
    assert shifted.metric("gpu_seconds").status == "inconclusive"
    assert _judge(slow, _stored(), shift=math.log(1.4)).metric("step_seconds").status == "regressed"


def test_the_noise_of_hosts_is_not_expected_of_steps_that_wait_for_none():
    def varied(gpu):
        runs = [baseline_run(step_seconds=(1 + at / 5,), gpu_steps=_steps(gpu), environment=HERE) for at in range(5)]
        return [baseline(*runs)] * 10

    assert prior_of(varied(0.2)) == 0.01
    assert prior_of(varied(None)) == prior_of(varied(2.0)) > 0.1


def _asked(**figures):
    return Counts(steps=(0,) * 5, kinds=(StepCounts(**figures),), profiled=True)


@pytest.mark.parametrize(
    ("before", "now", "on", "status"),
    [
        (_asked(waits=1), _asked(waits=2), HERE, "regressed"),
        (_asked(waits=1), _asked(waits=1), HERE, "pass"),
        (_asked(kernels=100), _asked(kernels=200), HERE, "pass"),
        (_asked(waits=2), _asked(waits=1), HERE, "improved"),
        (None, _asked(waits=1), HERE, "pass"),
        (_asked(waits=1), None, HERE, "not-comparable"),
        (_asked(waits=1), _asked(waits=9), gpu_environment(device_name="NVIDIA H200"), "pass"),
    ],
)
def test_what_profiled_steps_ask_for_is_judged_on_gpus_of_one_model(before, now, on, status):
    verdict = _judge([_took(1.0, 0.23, on=on, counts=now)] * 2, _stored(counts=before))
    assert verdict.status == status
    compared = None not in (before, now) and on is HERE
    assert (verdict.metric("waits").status == "not-comparable") is not compared
    unconfirmed = _judge([_took(1.0, 0.23, counts=_asked(waits=waits)) for waits in (2, 1)], _stored(counts=_asked(waits=1)))
    assert unconfirmed.status == "inconclusive"


def test_a_baseline_whose_gpu_begins_to_wait_lets_more_pass():
    assert loosened(_stored(gpu=0.97), _stored(gpu=0.97)).raised == ()
    (raised,) = loosened(_stored(gpu=0.97), _stored(gpu=0.9)).raised
    assert raised == "its step may take longer, because the GPU waits for the host in 10 % of this step"
    assert loosened(_stored(gpu=0.9), _stored(gpu=0.8)).raised == ()
    assert loosened(_stored(), _stored(gpu=None)).lost == ("without GPU seconds, which was 230 ms",)
    assert any("GPU seconds 230 ms -> 240 ms" in what for what in loosened(_stored(), _stored(gpu=0.24)).raised)


def test_a_scaling_efficiency_is_held_to_what_its_host_varies():
    two = {"gpus": 2, "parallel": "ddp"}
    here = msgspec.structs.replace(HERE, device_count=2)
    for busy, status in ((0.2, "pass"), (0.99, "regressed")):
        stored = baseline(
            *[baseline_run(gpu_steps=_steps(busy), environment=here, one_worker_seconds=0.9)] * 5, case=CASE.replace(**two)
        )
        replies = [_took(1.0, busy, on=here, one_worker_seconds=0.84)] * 3
        verdict = judged(replies, stored, TOLERANCE, case=CASE.replace(**two)).verdict
        assert verdict.metric("scaling_efficiency").status == status


def test_what_is_said_of_host_bound_steps(snapshot, monkeypatch):
    collective = _stored()
    collective = msgspec.structs.replace(
        collective, runs=tuple(msgspec.structs.replace(run, gpu_steps=_steps(0.23, 0.3)) for run in collective.runs)
    )
    verdicts = {
        "passes on its machine": _judge(_took(1.05, 0.23), _stored()),
        "passes on another machine": _judge(_took(1.4, 0.23, on=ELSEWHERE), _stored()),
        "passes on an unknown machine": _judge(_took(1.4, 0.23), OLD),
        "slower on its machine": _judge(_took(1.4, 0.23), _stored()),
        "far slower on another machine": _judge(_took(1.7, 0.23, on=ELSEWHERE), _stored()),
        "waits for other GPUs": _judge(_took(1.05, 0.23), collective),
        "its GPU is slower, which is told": _judge(_took(1.0, 0.25), _stored()),
        "the GPU has begun to wait": _judge(_took(1.02, 0.8), _stored(gpu=0.97)),
        "the GPU has begun to wait, and the step is slower": _judge(_took(1.25, 0.97), _stored(gpu=0.97)),
        "another machine made the GPU wait": _judge(_took(1.25, 0.97, on=ELSEWHERE), _stored(gpu=0.97)),
        "not measured": _judge(_took(1.05, None), _stored()),
        "waits longer for its batches": _judge(_took(1.0, 0.23, input_seconds=0.112), _stored(input_seconds=0.01)),
        "waits for its batches elsewhere": _judge(
            _took(1.0, 0.23, on=ELSEWHERE, input_seconds=0.53), _stored(input_seconds=0.01)
        ),
        "slower, and waits for its batches": _judge(
            _took(1.05, 1.0, input_seconds=0.06), _stored(gpu=1.0, input_seconds=0.01)
        ),
        "another machine, and no GPU seconds before": _judge(_took(2.0, 0.97), _stored(gpu=None, on=gpu_environment())),
        "slower on another machine, as is its GPU": _judge(_took(1.25, 1.2, on=ELSEWHERE), _stored(gpu=0.97)),
        "slower on another machine, and its mean is known": _judge(
            measurement(step_seconds=(1.3,) * 20, environment=ELSEWHERE, gpu_steps=_steps(0.97)),
            baseline(*[baseline_run(step_seconds=(1.0,) * 20, environment=HERE, gpu_steps=_steps(0.97))] * 5),
        ),
        "one of three processes waited for cores": _judge(
            [_took(2.0, 0.23, core_wait_share=share) for share in (0.5, 0.0, 0.0)], _stored()
        ),
    }
    for share, before in ((0.04, None), (0.06, None), (0.34, 0.3), (0.36, 0.3)):
        taken = _judge(_took(2.0, 0.23, core_wait_share=share), _stored(core_wait_share=before))
        verdicts[f"waited for cores in {share:.0%}, before in {before or 0:.0%}"] = taken
    for on, slower in ((HERE, 1.25), (ELSEWHERE, 1.49), (ELSEWHERE, 1.51)):
        where = "here" if on is HERE else "elsewhere"
        verdicts[f"a GPU that did not wait: {slower}, {where}"] = _judge(_took(slower, 0.97, on=on), _stored(gpu=0.97))
    for before, now in (
        (0.95, 0.84),
        (0.95, 0.86),
        (0.84, 0.95),
        (0.86, 0.96),
        (0.23, 0.2415),
        (0.23, 0.2346),
        (0.95, 0.99),
    ):
        verdicts[f"its GPU is busy {before} -> {now}"] = _judge(_took(1.0, now), _stored(gpu=before))
    monkeypatch.setattr(regression, "WHY_GPU_SECONDS_ARE_HELD_COARSELY", "")
    verdicts["its GPU is slower"] = _judge(_took(1.05, 0.25), _stored())
    verdicts["its GPU is faster"] = _judge(_took(1.05, 0.2), _stored(runs=1))
    assert told(verdicts) == snapshot


def test_every_report_shows_gpu_seconds_and_the_busy_share():
    replies = (_took(1.0, 0.23), _took(1.0, 0.25), _took(1.0, 0.24))
    one = result(replies=replies, summary=summarise(CASE, "h100", replies))
    session = RunInfo(id="s1", created="2026-02-01T00:00:00Z", commit="", branch="")
    (line,) = lines_of([one], session)
    (row,) = csv.DictReader(io.StringIO(FORMATS["csv"].export([report(one)])))
    (benchmark,) = json.loads(FORMATS["pytest-benchmark"].export([report(one)]))["benchmarks"]
    for shown in (msgspec.to_builtins(line), row, benchmark["extra_info"]):
        assert [float(shown[name]) for name in ("gpu_seconds", "gpu_busy_share")] == [0.24, 0.24]
    cells = dict(zip((page := gathered([one])).columns, page.rows[0].cells, strict=True))
    assert (cells["GPU sec/step"].text, cells["GPU busy"].text) == ("240 ms", "24.0 %")
    assert "GPU busy" in (table := terminal.render([one], width=120, colour=False))
    assert " 24 % " in table


@pytest.mark.parametrize("on", [HERE, cpu_environment()])
def test_every_third_step_that_is_slow_fails_and_a_step_now_and_then_does_not(on):
    """The median of all of them is 10 ms. One slow step of a process is left out, whatever it takes."""

    def took(*slow, steps=20):
        return measurement(step_seconds=tuple(0.1 if at in slow else 0.01 for at in range(steps)), environment=on)

    def told(*replies, gpu=None, before=(), waited=None):
        run = baseline_run(
            step_seconds=took(*before).step_seconds, environment=on, gpu_steps=_steps(gpu), core_wait_share=waited
        )
        return judged(replies, baseline(*[run] * 5), replace(TOLERANCE, cpu_time=True)).verdict

    third = took(*range(2, 20, 3))
    verdict = told(third, third, third)
    assert (verdict.status, verdict.metric("step_seconds").status) == ("regressed", "pass")
    assert "is 236.8 % slower in the mean of its steps: 33.7 ms a step against 10.0 ms" in verdict.sentence
    for first, before in ((third, took()), (took(), third)):
        stored = baseline(*[baseline_run(step_seconds=before.step_seconds, environment=on)] * 5)
        assert not judged([first], stored, replace(TOLERANCE, cpu_time=True)).settled
    assert told(*[took(9, 19)] * 3).status == "regressed", "each tenth"
    held_up = [msgspec.structs.replace(third, core_wait_share=0.06)] * 3
    assert told(*held_up).status == "inconclusive"
    assert (
        "for a CPU core in 6 % of the time; this exceeds its limit, but the host may explain it" in told(*held_up).sentence
    )
    assert told(*held_up, waited=0.05).status == "regressed"
    assert told(*[took(7)] * 3).metric("mean_step_seconds") is None
    assert told(third, took(), took(7), took()).status == "pass"
    assert told(*[took(0, 1, 2, steps=9)] * 3).status == "pass", "too few steps"
    assert told(*[took()] * 3, before=range(2, 20, 3)).status == "improved"
    assert told(*[third] * 3, before=range(2, 20, 3)).status == "pass"


def test_the_mean_of_steps_that_wait_is_judged_on_the_machine_of_the_baseline_alone():
    steps = tuple(0.1 if at % 3 == 2 else 0.01 for at in range(20))
    run = baseline_run(step_seconds=(0.01,) * 20, environment=HERE, gpu_steps=_steps(0.002))
    for on, status in ((HERE, "regressed"), (ELSEWHERE, "pass")):
        reply = measurement(step_seconds=steps, environment=on, gpu_steps=_steps(0.002))
        assert _judge(reply, baseline(*[run] * 5)).status == status
