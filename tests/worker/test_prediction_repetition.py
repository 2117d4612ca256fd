"""What a deep model shows on fakes is what follows from shallow ones: every model that repeats its blocks, at full width."""

import msgspec
import pytest
from test_prediction_suite import declared
from zoo_examples import task_of

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.hardware.targets import target_of
from pytest_gputrain.records import Crashed, Prediction
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.prediction import tracker as tracker_module
from pytest_gputrain.worker.prediction.predict import PredictionRun, predict
from pytest_gputrain.worker.prediction.repetition import extrapolate
from pytest_gputrain.worker.progress import Progress
from pytest_gputrain.worker.zoo.completed import architecture_of

DEEP = 7
"""Repetitions: more than run for it, fewer than any model of the suite has."""


def repeating():
    """A case of each class of models that repeat blocks, with each method of Llama, and a sharded one of each library."""
    cases = {}
    for case in [*(case for _, case in declared()), *(case for _, case in declared(several=True))]:
        part = architecture_of(case.model).trained_part
        if not part.repeats or case.parallel not in ("single", "fsdp"):
            continue
        kind = part.model_class if case.parallel == "single" else part.library
        method = case.method if case.model == "llama-3.1-8b" else ""
        cases.setdefault((kind, case.parallel, method), case.replace(compile="off"))
    return list(cases.values())


def full(case):
    return task_of(case, scale="full", target=target_of("h100"))


CASES = repeating()
QUICK = {"qwen3-30b-a3b-lora-bf16", "llama-2-13b-full-bf16-fsdp"}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[] if str(case) in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_deep_model_shows_what_follows_from_shallow_ones(case):
    load(case, predicted=True)
    architecture = architecture_of(case.model)
    # What a first run leaves behind must not count for both.
    deep = PredictionRun(full(case), Progress(None)).run(architecture.repeated(DEEP))
    shallow = PredictionRun(full(case), Progress(None))
    runs = []

    def run(count):
        runs.append(count)
        return shallow.run(architecture.repeated(count))

    assert extrapolate(run, DEEP) == deep
    assert max(runs) < DEEP


def test_every_kind_of_block_is_repeated_as_often():
    for name in [name for name in architectures() if "#" not in name]:  # other tests declare configs of their own
        architecture = architecture_of(name)
        part = architecture.trained_part
        if not part.repeats:
            continue
        assert {part.config[key] / blocks for key, blocks in part.repeats.items()} == {architecture.repetitions}, name
        for times in (1, architecture.repetitions):
            facts = architecture.repeated(times).trained_part.config
            assert {key: facts[key] for key in part.repeats} == {key: times * blocks for key, blocks in part.repeats.items()}
        assert architecture.repeated(architecture.repetitions).trained_part.config == part.config, name


@pytest.fixture
def depths(monkeypatch):
    """The repetitions of the models that run; None for the task's own."""
    load(PHI, predicted=True)  # which makes tensors that are none of the model's
    repetitions = []
    run = PredictionRun.run

    def noted(self, architecture=None):
        repetitions.append(architecture and architecture.repetitions)
        return run(self, architecture)

    monkeypatch.setattr(PredictionRun, "run", noted)
    return repetitions


PHI = next(case for case in CASES if case.model == "phi-3-mini-128k")


@pytest.mark.slow
def test_a_prediction_runs_shallow_models_only_and_is_the_whole_ones(depths):
    prediction = predict(full(PHI), Progress(None))
    assert depths == [2, 3, 4]
    assert isinstance(prediction, Prediction)
    assert prediction == predict(full(PHI), Progress(None), whole=True)
    assert depths[3:] == [None]
    assert prediction.parameters == architectures()[PHI.model].trained_part.parameters["full"]


@pytest.mark.parametrize(
    ("knobs", "fields"),
    [({"activation_checkpointing": 0.5}, {}), ({"parallel": "ddp", "gpus": 2}, {}), ({}, {"scale": "tiny"})],
    ids=["share", "ddp", "tiny"],
)
def test_what_depends_on_the_depth_otherwise_and_a_tiny_model_run_whole(depths, knobs, fields, monkeypatch):
    if not fields:
        monkeypatch.setitem(architectures(), PHI.model, architectures()[PHI.model].repeated(DEEP))
    task = msgspec.structs.replace(full(PHI.replace(**knobs)), **fields)
    assert isinstance(predict(task, Progress(None)), Prediction)
    assert depths == [None]


def test_what_fails_in_a_shallow_model_leaves_nothing_to_the_whole_one(depths, monkeypatch):
    """A call whose work was not counted is not remembered without it."""
    monkeypatch.setitem(architectures(), PHI.model, architectures()[PHI.model].repeated(DEEP))
    whole = predict(full(PHI), Progress(None), whole=True)
    count, calls = tracker_module.Tracker._measure, []

    def failing(self, call, operator, *others):
        calls.append(operator.name)
        if calls.count("aten.mm") == 1 and operator.name == "aten.mm":
            raise ArithmeticError("not this one")
        count(self, call, operator, *others)

    monkeypatch.setattr(tracker_module.Tracker, "_measure", failing)
    assert predict(full(PHI), Progress(None)) == whole
    assert depths == [None, 2, None]


def test_a_model_whose_parameters_are_not_those_of_its_shallow_ones_runs_whole_and_is_refused(depths, monkeypatch):
    architecture = architectures()[PHI.model]
    part = architecture.trained_part
    wrong = msgspec.structs.replace(part, parameters={**part.parameters, "full": part.parameters["full"] + 1})
    monkeypatch.setitem(
        architectures(), PHI.model, msgspec.structs.replace(architecture, parts={**architecture.parts, "model": wrong})
    )
    reply = predict(full(PHI), Progress(None))
    assert depths == [2, 3, 4, None]
    assert isinstance(reply, Crashed)
    assert f"but {PHI.model} has {wrong.parameters['full']:,}" in reply.sentence


def test_what_does_not_follow_runs_whole(depths, monkeypatch):
    monkeypatch.setattr("pytest_gputrain.worker.prediction.predict.extrapolate", lambda run, repetitions: None)
    monkeypatch.setitem(architectures(), PHI.model, architectures()[PHI.model].repeated(DEEP))
    assert isinstance(predict(full(PHI.replace(method="full")), Progress(None)), Prediction)
    assert depths == [None]
