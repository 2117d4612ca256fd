"""A config.json as a case's model, and a file of options of DeepSpeed: from the test file to the id and the baseline."""

import json

import pytest
from plugin_project import H100_FOLDER, only_sentence

MODELS = """
import pytest
from pytest_gputrain import Case

CASES = [Case(model="../configs/ours.json", sequence_length=512, method=method) for method in ("full", "lora")]


@pytest.mark.parametrize("case", CASES, ids=["full", "lora"])
def test_ours(gputrain, case):
    gputrain.check(case)
"""
LLAMA = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "max_position_embeddings": 4096}


def write(project, name="configs/ours.json", **config):
    (project.path / name).write_text(json.dumps(config))


@pytest.fixture
def models(h100):
    for folder, file, text in (("suite", "test_ours.py", MODELS), ("configs", "ours.json", json.dumps(LLAMA))):
        (h100.path / folder).mkdir()
        (h100.path / folder / file).write_text(text)
    return h100


def test_a_path_from_the_test_file_becomes_a_name_and_another_content_another_case(models):
    models.run("--gpu-baseline-update").assert_outcomes(passed=2)
    names = sorted(models.baselines("ours", H100_FOLDER))
    assert [name.partition("#")[0] for name in names] == ["ours", "ours"]
    assert [name.partition("-")[2] for name in names] == ["full-bf16", "lora-bf16"]
    write(models, **LLAMA | {"torch_dtype": "float32"})  # which no case takes from there
    models.run("--gpu-strict").assert_outcomes(passed=2)
    write(models, **LLAMA | {"hidden_size": 1024})
    result = models.run("--gpu-strict")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["FAILED *ours#*-full-bf16 has no baseline; *"])


def test_a_knob_of_the_command_line_takes_a_path(models):
    write(models, "configs/other.json", **LLAMA)
    models.run("--gpu-set=model=../configs/other.json", "-k", "full").assert_outcomes(passed=1, deselected=1)
    assert models.launches[0]["id"].startswith("other#")


def test_a_config_that_does_not_fit_starts_nothing(models):
    write(models, model_type="t5", is_encoder_decoder=True)
    sentence = only_sentence(models.run("-k", "full"), "test_ours[full]")
    assert "names the model ../configs/ours.json, but" in sentence
    assert "has is_encoder_decoder=true" in sentence
    write(models, **LLAMA | {"max_position_embeddings": 256})
    sentence = only_sentence(models.run("-k", "full"), "test_ours[full]")
    assert "has sequence_length=512, more than the 256 positions of ours#" in sentence
    assert not models.launches


SHARDED = """
import pytest
from pytest_gputrain import Case, grid

BASE = Case(model="pangu-350m", sequence_length=512, parallel="zero2")
CASES = [BASE.replace(deepspeed_config="ds.json", steps=4), *grid(BASE.replace(steps=5), deepspeed_config=["ds.json"])]


@pytest.mark.parametrize("case", CASES, ids=["plain", "named"])
def test_sharded(gputrain, case):
    gputrain.check(case)
"""


def test_options_of_another_content_are_not_compared_and_without_the_file_or_with_a_contradiction_nothing_starts(h100):
    h100.write(test_sharded=SHARDED)
    sentence = only_sentence(h100.run("-k", "plain"), "test_sharded[plain]")
    assert "asks for deepspeed_config, but ds.json cannot be read (No such file or directory); give a file" in sentence
    write(h100, "ds.json", train_micro_batch_size_per_gpu=7)
    sentence = only_sentence(h100.run("-k", "plain"), "test_sharded[plain]")
    assert "has train_micro_batch_size_per_gpu=7, which contradicts the case, whose batch_size makes it 1" in sentence
    assert not h100.launches

    write(h100, "ds.json", prescale_gradients=True)
    h100.run("--gpu-baseline-update").assert_outcomes(passed=2)
    h100.run("--gpu-strict").assert_outcomes(passed=2)
    write(h100, "ds.json", prescale_gradients=False)
    result = h100.run("--gpu-strict")
    result.assert_outcomes(failed=2)
    # Of the one the id stays, and of the other it does not.
    differs = "*pangu-350m-full-bf16-zero2 is not what its baseline of * measured (deepspeed_config ds.json#*ds.json#*"
    new = "*pangu-350m-full-bf16-zero2-deepspeed_config=ds.json#* has no baseline; *"
    result.stdout.fnmatch_lines([f"FAILED {differs}", f"FAILED {new}"])
