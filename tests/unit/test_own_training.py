"""What own code trains, and on what shapes, beside its baseline."""

import pytest
from unit_examples import CASE, baseline, baseline_run, cpu_environment, emulated_run, measurement, recorded

from pytest_gputrain.gate import emulation, regression
from pytest_gputrain.gate.baseline_changes import loosened
from pytest_gputrain.gate.criteria import Criteria
from pytest_gputrain.gate.messages import OtherSide
from pytest_gputrain.gate.own_training import lost_tensors, other_shapes
from pytest_gputrain.records import BatchShapes, TrainedTensors
from pytest_gputrain.records.tolerance import MemoryTolerance, Tolerance
from pytest_gputrain.storage.baselines import BaselineStore
from pytest_gputrain.storage.emulated import EmulationStore

TOLERANCE = Tolerance(time=0.03, memory=MemoryTolerance(ratio=0.02))
ALL = TrainedTensors(learning={"layers.*.mlp": 8, "pooler": 2})
PART = TrainedTensors(learning={"layers.*.mlp": 8}, idle={"pooler.weight": 1, "pooler.bias": 1})
FEW = BatchShapes(steps=6, digest="aa", first=((6, ((8, 128), (8,))),), last=((8, 128), (8,)))
MANY = BatchShapes(steps=6, digest="bb", first=((2, ((8, 128), (8,))), (4, ((8, 160), (8,)))), last=((8, 160), (8,)))


def _measured(before, **now):
    run = baseline_run(environment=cpu_environment(), **before)
    new = measurement(environment=cpu_environment(), **now)
    criteria = Criteria(case=CASE, scale="full", tolerance=TOLERANCE, baseline=baseline(run))
    return regression.judge(criteria, [new]).verdict


def _emulated(before, **now):
    stored = recorded(emulated_run(**before).as_stored())
    return emulation.judge(CASE, emulated_run(**now), stored, "h100")


@pytest.fixture(params=[_measured, _emulated], ids=["measured", "emulated"])
def judged(request):
    """The verdict of a run beside a baseline with these fields."""
    return request.param


def test_a_tensor_that_trained_in_the_baseline_and_does_not_any_more_fails_with_its_name(judged):
    verdict = judged({"trained": ALL}, trained=PART)
    said = "no longer trains pooler.weight and pooler.bias, which got a gradient or changed before"
    assert (verdict.status, said in verdict.sentence) == ("regressed", True)


@pytest.mark.parametrize("before", [PART, None], ids=["idle, too", "older baseline"])
def test_a_tensor_that_is_not_known_to_have_trained_passes(judged, before):
    assert judged({"trained": before}, trained=PART).status == "pass"


@pytest.mark.parametrize(
    ("learning", "idle", "lost"),
    [
        ({"pooler": 2, "layers.*.mlp": 8}, {"head.weight": 1}, ""),
        ({"pooler": 2, "layers.*.mlp": 8}, {"layers.*.mlp.weight": 2}, ""),
        ({"pooler": 2, "layers.*.mlp": 6}, {}, ""),
        ({"layers.*.mlp": 8, "other": 2}, {}, ""),
        ({"pooler": 2, "layers.*.mlp": 6}, {"layers.*.mlp.weight": 2}, "layers.*.mlp.weight (2)"),
        ({"pooler": 1, "layers.*.mlp": 8, "new": 4}, {"pooler.bias": 1}, "pooler.bias"),
        ({"pooler": 2, "new": 4}, {f"layers.*.mlp.{name}": 1 for name in "abcdef"}, "a, layers.*.mlp.b, layers.*.mlp.c, "),
    ],
    ids=["new", "new layers", "fewer layers", "renamed", "of layers", "beside new ones", "many"],
)
def test_only_what_trained_before_is_lost(learning, idle, lost):
    said = lost_tensors(TrainedTensors(learning=learning, idle=idle), ALL)
    assert lost in said
    assert bool(said) == bool(lost)
    assert ("and 2 more" in said) == (len(idle) == 6)


def test_experts_that_take_turns_to_be_idle_are_not_lost():
    before, now = (TrainedTensors(learning={"e": 7}, idle={f"e.{name}": 1}) for name in ("weight", "bias"))
    assert lost_tensors(now, before) == ""


def test_a_failure_says_that_batches_have_other_shapes_and_which_come_first(judged):
    said = "its batches have other shapes than in the baseline: [8, 160] in step 3, where it had [8, 128]"
    bigger = {"peak_allocated_bytes": 10**12, "peak_reserved_bytes": 10**12} if judged is _emulated else {
        "peak_allocated_bytes": 10**12
    }  # fmt: skip
    verdict = judged({"batch_shapes": FEW}, batch_shapes=MANY, **bigger)
    assert (verdict.status, said in verdict.sentence) == ("regressed", True)
    assert "shapes" not in judged({"batch_shapes": FEW}, batch_shapes=FEW, **bigger).sentence
    assert judged({"batch_shapes": FEW}, batch_shapes=MANY).status == "pass"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (BatchShapes(steps=6, digest="cc", first=FEW.first, last=((4, 128), (4,))), ": [4, 128] and [4] in the last one, "),
        (BatchShapes(steps=6, digest="cc", first=FEW.first, last=FEW.last), "in base"),
        (BatchShapes(steps=3, digest="cc", first=((3, FEW.last),), last=FEW.last), ""),
    ],
    ids=["last step", "somewhere", "fewer steps"],
)
def test_shapes_are_compared_as_far_as_they_are_known(now, said):
    sentence = other_shapes(now, FEW, OtherSide.base())
    assert said in sentence
    assert bool(sentence) == bool(said)


@pytest.mark.parametrize(
    ("store", "record"),
    [
        (BaselineStore, lambda **fields: baseline(baseline_run(**fields), device="h100")),
        (EmulationStore, lambda **fields: recorded(emulated_run(**fields).as_stored())),
    ],
    ids=["measured", "emulated"],
)
def test_files_keep_what_trained_and_on_what_and_have_no_such_field_of_other_cases(tmp_path, store, record):
    new = record(trained=PART, batch_shapes=MANY)
    text = store(tmp_path).update("h100", "llm", {"mine": new, "other": record()}).read_text()
    assert store(tmp_path).get("h100", "llm", "mine") == new
    assert (text.count('"trained"'), text.count('"batch_shapes"')) == (1, 1)
    assert text.count("[8, 160]") == 2, "a shape is one line"


def test_a_baseline_that_is_recorded_with_less_that_trains_is_told():
    before, after = (baseline(baseline_run(trained=trained)) for trained in (ALL, PART))
    assert "no longer trains pooler.weight and pooler.bias" in loosened(before, after).lost[0]
    assert loosened(after, before).lost == ()
