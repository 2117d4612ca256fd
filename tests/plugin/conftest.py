"""Gives every test here a project of its own in which pytest runs, without this machine's GPUs and its CI."""

from __future__ import annotations

import pytest
from plugin_project import H100, SUITE, Project


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty project on a machine without a GPU."""
    github = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE")
    for variable in ("CI", "GPUTRAIN_PARENT", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", *github):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "200")
    # Installed for other tests; hypothesis alone costs each run in this process a second.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
    project = Project(pytester)
    project.ini()
    return project


@pytest.fixture
def h100(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project on a machine with one recorded H100."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    project.machine(H100)
    return project


@pytest.fixture
def suite(h100: Project) -> Project:
    """Three cases on an H100, without any baseline."""
    h100.write(test_tuning=SUITE)
    return h100
