"""Tests what the README declares; test_documented_commands.py runs its commands and programs."""

import re

from documents import PAGES, blocks

BLOCKS = blocks("README.md", "python")


def test_there_are_a_benchmark_file_and_own_code():
    assert len(BLOCKS) == 2


def test_the_benchmark_file_declares_its_cases(project):
    project.write(test_readme_benchmark=BLOCKS[0])
    project.run("-m", "h100", "--gpu-platform=cpu").assert_outcomes(skipped=6)


def test_the_tables_list_exactly_the_options_and_the_settings_of_the_ini_file():
    from pytest_gputrain.plugin.options import OPTIONS

    section = PAGES["README.md"].partition("\n## Options\n")[2].partition("\n### ")[0]
    names = [
        re.findall(r"`((?:--)?gpu[\w-]+)", row.split(" | ")[0]) for row in section.splitlines() if row.startswith("| `")
    ]
    listed = [name for row in names for name in row]
    assert sorted(listed) == sorted(option.ini if option.ini_only else option.flag for option in OPTIONS)
