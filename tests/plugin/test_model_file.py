"""A config.json as a case's model, from the test file to the task, the id and the sentence of a failure."""

import json
from typing import Any

import pytest
from plugin_project import H100_FOLDER, Project, only_sentence

SUITE = """
import pytest
from pytest_gputrain import Case

CASES = [Case(model="../configs/ours.json", sequence_length=512, method=method) for method in ("full", "lora")]


@pytest.mark.parametrize("case", CASES, ids=["full", "lora"])
def test_ours(gputrain, case):
    gputrain.check(case)
"""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def project(h100: Project) -> Project:
    (h100.path / "suite").mkdir()
    (h100.path / "suite" / "test_ours.py").write_text(SUITE)
    write(h100, **LLAMA)
    return h100


def write(project: Project, **config: Any) -> None:
    (project.path / "configs").mkdir(exist_ok=True)
    (project.path / "configs" / "ours.json").write_text(json.dumps(config))


def test_a_path_from_the_test_file_becomes_a_name_with_a_digest(project: Project) -> None:
    project.run("--gpu-baseline-update").assert_outcomes(passed=2)
    ids = sorted({launch["id"] for launch in project.launches})
    assert [name.partition("#")[0] for name in ids] == ["ours", "ours"]
    assert [name.partition("-")[2] for name in ids] == ["full-bf16", "lora-bf16"]
    assert sorted(project.baselines("ours", H100_FOLDER)) == ids
    project.run("--gpu-strict").assert_outcomes(passed=2)


def test_another_content_is_another_case(project: Project) -> None:
    project.run("--gpu-baseline-update").assert_outcomes(passed=2)
    write(project, **LLAMA | {"hidden_size": 1024})
    result = project.run("--gpu-strict")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["FAILED *ours#*-full-bf16 has no baseline; *"])
    write(project, **LLAMA | {"torch_dtype": "float32"})
    project.run("--gpu-strict").assert_outcomes(passed=2)


def test_a_knob_of_the_command_line_takes_a_path(project: Project) -> None:
    (project.path / "configs" / "other.json").write_text(json.dumps(LLAMA))
    project.run("--gpu-set=model=../configs/other.json", "-k", "full").assert_outcomes(passed=1, deselected=1)
    assert project.launches[0]["id"].startswith("other#")


def test_bad_input_starts_nothing(project: Project) -> None:
    write(project, model_type="t5", is_encoder_decoder=True)
    sentence = only_sentence(project.run("-k", "full"), "test_ours[full]")
    assert "names the model ../configs/ours.json, but" in sentence
    assert "has is_encoder_decoder=true" in sentence
    write(project, **LLAMA | {"max_position_embeddings": 256})
    sentence = only_sentence(project.run("-k", "full"), "test_ours[full]")
    assert "has sequence_length=512, more than the 256 positions of ours#" in sentence
    assert not project.launches
