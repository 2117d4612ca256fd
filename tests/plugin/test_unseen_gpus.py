"""Tests a machine whose GPUs cannot be used: it counts as a CPU, and the run says so."""

import pytest
from plugin_project import SUITE

from pytest_gputrain.hardware import amd

NO_LIBRARY = "print('Unable to find libamd_smi.so'); raise KeyError('libamd_smi.so')"
SENTENCE = "*no GPU is used, this machine counts as a CPU: *amdsmi cannot be imported (KeyError: 'libamd_smi.so')*"


@pytest.fixture
def unseen(project, monkeypatch):
    """A project on a machine with an AMD driver, whose binding cannot be imported."""
    (project.path / "amdsmi.py").write_text(NO_LIBRARY)
    (project.path / "kfd").touch()
    monkeypatch.syspath_prepend(project.path)
    monkeypatch.setattr(amd, "DEVICE_FILE", project.path / "kfd")
    project.write(test_tuning=SUITE)
    return project


def test_the_run_says_so_before_and_after_its_cases_and_fails_where_strict(unseen):
    for strict, status in (((), 0), (("--gpu-strict",), 1)):
        result = unseen.run("-m", "mi300x", *strict)
        result.assert_outcomes(skipped=3)
        assert result.ret == status
        result.stdout.fnmatch_lines(["collected 3 items", f"gputrain: {SENTENCE[1:]}", "*= gputrain =*", SENTENCE])


def test_who_wants_the_cpu_or_has_no_cases_hears_nothing(unseen):
    unseen.write(test_tuning="def test(gputrain):\n    assert gputrain.scale == 'tiny'\n")
    assert (unseen.run().ret, unseen.run("--gpu-strict").ret) == (0, 1)
    result = unseen.run("--gpu-strict", "--gpu-platform=cpu")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*amdsmi*")
    unseen.write(test_tuning="def test():\n    pass\n")
    result = unseen.run("--gpu-runs=2", "--gpu-strict")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*amdsmi*")
