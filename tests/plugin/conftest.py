"""Gives every test here a project of its own in which pytest runs, without this machine's GPUs and its CI."""

import tempfile

import pytest
from plugin_project import H100, H100_FOLDER, SUITE, Project


@pytest.fixture
def project(pytester, monkeypatch, tmp_path_factory):
    """An empty project on a machine without a GPU."""
    # Locks lend the recorded GPU and the real cores to one case at a time; those of other xdist workers do not count here.
    temporary = tmp_path_factory.getbasetemp() / "temporary"
    temporary.mkdir(exist_ok=True)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    github = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE")
    for variable in ("CI", "GPUTRAIN_PARENT", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", *github):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "200")
    # Installed for other tests; hypothesis alone costs each run in this process a second, and syrupy warns where workers
    # of xdist only collect.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio -p no:syrupy")
    project = Project(pytester)
    project.ini()
    return project


@pytest.fixture
def h100(project, monkeypatch):
    """A project on a machine with one recorded H100."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    project.machine(H100)
    return project


@pytest.fixture
def suite(h100):
    """Three cases on an H100, without any baseline."""
    h100.write(test_tuning=SUITE)
    return h100


_BASELINES = []


@pytest.fixture
def gated(suite):
    """Three cases with the baselines of an H100, which the first test that wants them records."""
    file = suite.baseline_file("tuning", H100_FOLDER)
    if not _BASELINES:
        suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
        (suite.path / "launches.jsonl").unlink()
        _BASELINES.append(file.read_bytes())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(_BASELINES[0])
    return suite


@pytest.fixture
def cpu(project):
    """A machine without a GPU, whose replies are recorded."""
    project.machine(None)
    return project
