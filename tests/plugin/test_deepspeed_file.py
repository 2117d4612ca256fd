"""A case's file of options of DeepSpeed, from the command line to the task, the baseline and back."""

import json

import pytest
from plugin_project import Project, only_sentence

SUITE = """
import pytest
from pytest_gputrain import Case, grid

BASE = Case(model="pangu-350m", sequence_length=512, parallel="zero2")
CASES = [BASE.replace(deepspeed_config="ds.json", steps=4), *grid(BASE.replace(steps=5), deepspeed_config=["ds.json"])]


@pytest.mark.parametrize("case", CASES, ids=["plain", "named"])
def test_sharded(gputrain, case):
    gputrain.check(case)
"""


@pytest.fixture
def sharded(h100: Project) -> Project:
    h100.write(test_sharded=SUITE)
    return h100


def write(project: Project, **options: object) -> None:
    (project.path / "ds.json").write_text(json.dumps(options))


def test_without_the_file_or_with_a_contradiction_in_it_nothing_starts(sharded: Project) -> None:
    sentence = only_sentence(sharded.run("-k", "plain"), "test_sharded[plain]")
    assert "asks for deepspeed_config, but ds.json cannot be read (No such file or directory); give a file" in sentence
    write(sharded, train_micro_batch_size_per_gpu=7)
    sentence = only_sentence(sharded.run("-k", "plain"), "test_sharded[plain]")
    assert "has train_micro_batch_size_per_gpu=7, which contradicts the case, whose batch_size makes it 1" in sentence
    assert not sharded.launches


def test_another_content_is_not_compared(sharded: Project) -> None:
    write(sharded, prescale_gradients=True)
    sharded.run("--gpu-baseline-update").assert_outcomes(passed=2)
    first = [launch["id"] for launch in sharded.launches if "deepspeed_config" in launch["id"]]
    assert len(set(first)) == 1
    assert first[0].startswith("pangu-350m-full-bf16-zero2-deepspeed_config=ds.json#")
    sharded.run("--gpu-strict").assert_outcomes(passed=2)
    write(sharded, prescale_gradients=False)
    result = sharded.run("--gpu-strict")
    result.assert_outcomes(failed=2)
    # Of the one the id stays, and of the other it does not.
    result.stdout.fnmatch_lines(
        [
            "FAILED *pangu-350m-full-bf16-zero2 is not what its baseline of * measured (deepspeed_config ds.json#*ds.json#*",
            "FAILED *pangu-350m-full-bf16-zero2-deepspeed_config=ds.json#* has no baseline; *",
        ]
    )
    write(sharded, prescale_gradients=True)
    sharded.run("--gpu-strict").assert_outcomes(passed=2)
