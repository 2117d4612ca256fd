"""The README's code runs as it is printed."""

import pytest
from documents import PAGES, blocks

BLOCKS = blocks("README.md", "python")


@pytest.fixture(autouse=True)
def _not_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)


def test_there_are_a_benchmark_file_and_own_code():
    assert len(BLOCKS) == 2


def test_the_benchmark_file_declares_its_cases(pytester):
    pytester.makepyfile(test_readme_benchmark=BLOCKS[0])
    pytester.runpytest("-m", "h100", "--gpu-platform=cpu").assert_outcomes(skipped=6)


def test_own_code_passes(pytester):
    pytester.makepyfile(test_readme_own=BLOCKS[1])
    pytester.runpytest_subprocess("--gpu-platform=cpu").assert_outcomes(passed=3)


def test_options_are_all_in_the_table():
    from pytest_gputrain.options import OPTIONS

    missing = [option.flag for option in OPTIONS if f"`{option.flag}" not in PAGES["README.md"]]
    assert missing == []
