"""A config.json as the model of a case: how it is found and normalised, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from pytest_gputrain import Case
from pytest_gputrain.cases.identity import identity_of
from pytest_gputrain.cases.model_config import config_of, with_model
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.records import Task
from pytest_gputrain.utils.errors import BadCase

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
}


def written(path: Path, content: Any = LLAMA) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def resolved(folder: Path, model: str, **knobs: Any) -> Case:
    return with_model(Case(model=model, sequence_length=512, **knobs), folder)


def test_a_file_becomes_a_name_with_a_digest_of_what_matters(tmp_path: Path) -> None:
    written(tmp_path / "a" / "small-llama.json")
    written(tmp_path / "b" / "small-llama.json", dict(reversed(LLAMA.items())) | {"torch_dtype": "bfloat16", "auto_map": {}})
    written(tmp_path / "c" / "small-llama.json", LLAMA | {"hidden_size": 1024})
    first, same, other = (resolved(tmp_path, f"{folder}/small-llama.json") for folder in "abc")
    assert first.model.startswith("small-llama#")
    assert len(first.model) == len("small-llama#12345678")
    assert first == same != other
    assert str(first) == f"{first.model}-full-bf16"
    assert config_of(first) == LLAMA
    assert config_of(other)["hidden_size"] == 1024
    assert problem(first, ()) is None


def test_the_digest_tells_tasks_apart(tmp_path: Path) -> None:
    written(tmp_path / "a" / "m.json")
    written(tmp_path / "b" / "m.json", LLAMA | {"hidden_size": 1024})
    tasks = [
        Task(case=case, scale="tiny", device_type="cpu", root=".", model_config=config_of(case))
        for case in (resolved(tmp_path, "a/m.json"), resolved(tmp_path, "b/m.json"))
    ]
    assert len({identity_of(task) for task in tasks}) == 2


@pytest.mark.parametrize(
    ("written_to", "model"),
    [
        ("my-llama/config.json", "my-llama/config.json"),
        ("my-llama/config.json", "./my-llama"),
        ("sub/my-llama/config.json", "sub/my-llama/"),
    ],
)
def test_a_folder_gives_its_name(tmp_path: Path, written_to: str, model: str) -> None:
    written(tmp_path / written_to)
    assert resolved(tmp_path, model).model.startswith("my-llama#")


def test_a_pipeline_of_diffusers_gives_what_trains(tmp_path: Path) -> None:
    written(
        tmp_path / "sd3" / "model_index.json", {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "X"]}
    )
    written(tmp_path / "sd3" / "transformer" / "config.json", {"_class_name": "SD3Transformer2DModel", "num_layers": 24})
    cases = [
        resolved(tmp_path, model)
        for model in ("./sd3", "sd3/model_index.json", "sd3/transformer", "sd3/transformer/config.json")
    ]
    assert len({case.model for case in cases}) == 1
    assert cases[0].model.startswith("sd3#")
    assert config_of(cases[0])["num_layers"] == 24


def test_a_name_of_the_zoo_and_own_code_are_no_paths(tmp_path: Path) -> None:
    for case in (
        Case(model="llama-3.1-8b"),
        Case(model="build/it", method="custom", code="x.py::it"),
        Case(model="unknown"),
    ):
        assert with_model(case, tmp_path) is case
        assert config_of(case) == {}


def test_what_is_not_there_or_is_no_model_that_can_train_is_one_sentence(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    contents: dict[str, Any] = {
        "no_json": "{",
        "no_object": "[]",
        "no_type": {"hidden_size": 8},
        "encoder": {"model_type": "t5", "is_encoder_decoder": True},
        "images": {"model_type": "gemma3", "text_config": {}},
    }
    for name, content in contents.items():
        written(tmp_path / f"{name}.json", content)
    (tmp_path / "empty").mkdir()
    written(tmp_path / "vae" / "model_index.json", {"vae": []})
    said = {}
    for model in (*(f"./{name}.json" for name in contents), "gone.json", "./empty", "./vae"):
        with pytest.raises(BadCase) as failure:
            resolved(tmp_path, model)
        said[model] = str(failure.value).replace(str(tmp_path), "")
    assert said == snapshot


def test_positions_limit_the_sequence(tmp_path: Path) -> None:
    written(tmp_path / "m.json")
    case = resolved(tmp_path, "m.json")
    assert problem(case.replace(sequence_length=4096), ()) is None
    sentence = problem(case.replace(sequence_length=4097), ())
    assert sentence is not None
    assert "has sequence_length=4097, more than the 4,096 positions of m#" in sentence
