"""Tests what the README declares; test_documented_commands.py runs its commands and programs."""

from documents import PAGES, blocks

BLOCKS = blocks("README.md", "python")


def test_there_are_a_benchmark_file_and_own_code():
    assert len(BLOCKS) == 2


def test_the_benchmark_file_declares_its_cases(project):
    project.write(test_readme_benchmark=BLOCKS[0])
    project.run("-m", "h100", "--gpu-platform=cpu").assert_outcomes(skipped=6)


def test_options_are_all_in_the_table():
    from pytest_gputrain.plugin.options import OPTIONS

    missing = [option.flag for option in OPTIONS if f"`{option.flag}" not in PAGES["README.md"]]
    assert missing == []
