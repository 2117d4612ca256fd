"""The suite's cases of one process on fakes at tiny scale, against the baselines that real workers recorded on a CPU.

A peak may be 0.5 % off by what is promised. None is, and one that is tells that an operator's kernel and its fake have
parted: `pytest_gputrain.worker.prediction.layouts` is the place for it.
"""

import functools
import importlib.util
from pathlib import Path

import msgspec
import pytest
from zoo_examples import H100, predicted

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.hardware.targets import target_of
from pytest_gputrain.storage.baselines import BaselineStore
from pytest_gputrain.storage.recorded import PredictionStore

ROOT = Path(__file__).parents[2]
STORE = BaselineStore(ROOT / "baselines")


def declared(several=False):
    """Pairs of a suite's name and one of its cases that train in one process, or in several."""
    for path in sorted((ROOT / "benchmarks").glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"declared_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for case in module.CASES:
            if (case.parallel != "single") == several:
                yield path.stem.removeprefix("test_"), case


CASES = list(declared())
ONE_OF_EACH_FAMILY = {architectures()[case.model].family: case for _, case in CASES}.values()


@functools.cache
def first(case):
    return uncompiled(case)


def uncompiled(case, *options, **fields):
    """What is predicted: nothing is compiled while a worker counts memory either."""
    return predicted(case.replace(compile="off"), *options, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "case"), CASES, ids=str)
def test_as_recorded(suite, case):
    recorded = STORE.get("cpu", suite, key_of(case, "tiny")).runs[-1]
    prediction = first(case)
    assert (prediction.peak_allocated_bytes, prediction.flops_per_step, prediction.model_bytes) == (
        recorded.peak_allocated_bytes,
        recorded.flops_per_step or 0,
        recorded.model_bytes,
    )
    assert prediction.phase_peak_bytes == recorded.phase_peak_bytes
    assert prediction.parameters == architectures()[case.model].trained_part.parameters.get("tiny", prediction.parameters)


@pytest.mark.slow
def test_no_case_leaves_a_trace_in_the_next():
    """In the same process, in another order, and between predictions by the other rules."""
    alone = [first(case) for case in ONE_OF_EACH_FAMILY]
    for case, expected in reversed(list(zip(ONE_OF_EACH_FAMILY, alone, strict=True))):
        on_gpu = uncompiled(case, H100)
        assert msgspec.json.encode(uncompiled(case)) == msgspec.json.encode(expected)
        assert on_gpu.fidelity == "cuda-rules"


# That of QLoRA takes longer, and tells what that of LoRA does.
@pytest.mark.parametrize("case", [case for suite, case in CASES if suite == "llm_tuned" and case.method != "qlora"], ids=str)
@pytest.mark.slow
def test_a_tuned_case_takes_no_more_memory_than_the_published_one(case):
    published = PredictionStore(ROOT / "baselines").suite("h100", "llm_finetuning")[str(case)].figures[-1]
    tuned = uncompiled(case, target_of("h100"), scale="full")
    assert tuned.target == published.target
    assert tuned.peak_allocated_bytes < published.peak_allocated_bytes
    assert tuned.peak_reserved_bytes < published.peak_reserved_bytes
