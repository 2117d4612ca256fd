"""Tests what the page of changed programs says: its table is that of the results, and some programs run again."""

import subprocess
import sys

import program_table
import pytest


def test_the_page_has_the_table_of_the_results():
    text = program_table.PAGE.read_text()
    assert program_table.page(text) == text, "python tools/program_table.py write"


@pytest.mark.parametrize(
    ("ran", "told"),
    [
        ({"wait": ""}, "ppo passes with wait"),
        ({}, "ppo was not run with wait"),
        ({"clean 2": "regressed: it is bigger"}, "ppo without a change: regressed: it is bigger"),
    ],
)
def test_passing_changes_and_failing_repeats_are_told(ran, told):
    changes = [change for change in program_table.CHANGES if not program_table.cannot("cpu", "ppo", change)]
    whole = dict.fromkeys(changes, "a sentence") | dict.fromkeys(["clean 1", "clean 2", "clean 3"], "pass")
    assert list(program_table.faults("cpu", ["ppo"], {"ppo": whole})) == []
    without = {name: found for name, found in whole.items() if name not in ran and (ran or name != "wait")}
    assert list(program_table.faults("cpu", ["ppo"], {"ppo": without | ran})) == [told]


def test_table_names_programs_that_pass_or_were_not_run():
    caught = {program: {"wait": "a sentence"} for program in (*program_table.PACKAGES, *program_table.OTHERS)}
    assert program_table.cell("cpu", "wait", caught) == "17 of 17"
    assert program_table.cell("cpu", "wait", caught | {"ppo": {"wait": ""}}) == "16 of 17; **pass**: ppo"
    assert program_table.cell("cpu", "wait", caught | {"ppo": {}}) == "16 of 17; not run: ppo"
    assert program_table.cell("cpu", "foreach", caught) == "cannot"


@pytest.mark.slow
@pytest.mark.weekly
def test_programs_fail_for_each_change_and_else_pass(tmp_path):
    """On a CPU: a loop, a compiled one, and a Trainer."""
    command = [sys.executable, program_table.__file__, "cpu", "--programs=diffusion,conformer,trainer"]
    done = subprocess.run([*command, f"--folder={tmp_path}"], capture_output=True, text=True, check=False, timeout=1800)
    assert not done.returncode, done.stdout + done.stderr
