"""Cases of which one of those that are alike runs."""

import itertools

from alike import one_of_alike, values

from pytest_gputrain import Case, grid

LLM = Case(sequence_length=8192, batch_size=2)


def kept(cases):
    return list(itertools.compress(cases, one_of_alike(cases)))


def test_sizes_and_models_of_one_class_are_alike():
    cases = grid(LLM, model=["llama-3.1-8b", "llama-3-8b", "gemma-7b", "pangu-350m"], batch_size=[1, 2])
    assert [case.model for case in kept(cases)] == ["llama-3.1-8b", "gemma-7b", "pangu-350m"]


def test_each_value_of_a_field_remains_for_each_family():
    llama = grid(LLM, model=["llama-3.1-8b", "llama-2-13b"], method=["full", "lora"], precision=["fp32", "bf16"])
    images = grid(Case(resolution="512x512"), model=["sdxl"], method=["full", "lora"], precision=["fp32", "bf16"])
    knobs = [llama[0].replace(parallel="ddp", gpus=2), llama[0].replace(attention="eager"), llama[0]]
    cases = [*llama, *images, *knobs]
    remaining = kept(cases)
    assert {value for case in remaining for value in values(case)} == {value for case in cases for value in values(case)}
    assert len(remaining) < len(cases) / 2
    assert remaining[-2:] == knobs[:2]
