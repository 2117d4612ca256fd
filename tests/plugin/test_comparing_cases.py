"""Runs tests that compare cases with each other, as docs/invariants.md shows one."""

import pytest
from documents import blocks
from plugin_project import Project, failures, recorded

(PRINTED,) = blocks("docs/invariants.md", "python")
TEST = "test_qlora_stores_less_than_lora[gemma-7b-qlora-bf16]"


@pytest.fixture
def printed(h100: Project) -> Project:
    """Two models by LoRA and QLoRA, which stores less."""
    h100.write(test_tuning=PRINTED)
    for model in ("llama-3.1-8b", "gemma-7b"):
        h100.answer(recorded() | {"model_bytes": 6 * 10**9}, to=f"{model}-qlora-bf16")
    return h100


def test_a_comparison_launches_no_case_again_and_fails_alone_where_it_does_not_hold(printed: Project) -> None:
    printed.run("-m", "h100").assert_outcomes(passed=6)
    assert len(printed.launches) == 4
    printed.run("-m", "v100").assert_outcomes(deselected=6)
    printed.answer(recorded(), to="gemma-7b-qlora-bf16")
    assert list(failures(printed.run())) == [TEST]


def test_a_test_learns_the_scale(h100: Project) -> None:
    h100.write(test_scale="def test_scale(gputrain):\n    assert gputrain.scale == 'full'\n")
    h100.run().assert_outcomes(passed=1)
    h100.run("--gpu-scale=tiny").assert_outcomes(failed=1)
