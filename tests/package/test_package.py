"""Tests the wheel and the sdist that a release would publish; `tox -e package` leaves them in dist/."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"

OWN_CODE = """
import torch


def build(setup):
    weight = torch.zeros(64, 64, requires_grad=True)

    def step():
        loss = (weight**2).sum()
        loss.backward()
        return loss.detach()

    return step


def test_it(gputrain):
    gputrain.check(build, precision="fp32", steps=2)
"""


def run(*command, cwd):
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTHONPATH", "PYTEST_ADDOPTS")}
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def tracked(*folders):
    return {PurePosixPath(line) for line in run("git", "ls-files", *folders, cwd=ROOT).splitlines()}


@pytest.fixture(scope="module")
def wheel():
    """Made from the sdist, as an installer makes it that finds no wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT, cwd=ROOT)
    (wheel,) = DIST.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    """The commands of an environment that has the wheel and what the suites need."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    run(folder / "bin" / "pip", "install", "-q", f"{wheel}[suite]", cwd=folder)
    return folder / "bin"


def test_metadata_are_complete(wheel):
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir(), cwd=ROOT)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    for field in (
        "Version",
        "Summary",
        "License-Expression",
        "Requires-Python",
        "Keywords",
        "Author",
        "Description-Content-Type",
    ):
        assert f"\n{field}: " in metadata
    assert "Classifier: Framework :: Pytest" in metadata


def test_the_wheel_has_every_file_of_the_package_and_the_published_tables(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {PurePosixPath(name) for name in archive.namelist() if ".dist-info/" not in name}
    tables = PurePosixPath("pytest_gputrain/storage/published_tables")
    published = {tables / path.relative_to("baselines/published") for path in tracked("baselines/published")}
    assert published
    assert held == tracked("pytest_gputrain") | published


def test_the_sdist_has_every_file_of_the_repository(wheel):
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {PurePosixPath(*PurePosixPath(each.name).parts[1:]) for each in archive if each.isfile()}
    assert held - {PurePosixPath("PKG-INFO")} == tracked()


def test_the_fixtures_are_known(fresh, tmp_path):
    assert "\ngputrain" in run(fresh / "pytest", "--fixtures", cwd=tmp_path)


def test_own_code_is_measured_recorded_and_gated(fresh, tmp_path):
    (tmp_path / "test_mine.py").write_text(OWN_CODE)
    assert "1 passed" in run(fresh / "pytest", "--gpu-baseline-update", cwd=tmp_path)
    assert "1 passed" in run(fresh / "pytest", "--gpu-strict", cwd=tmp_path)


def test_help_is_printed(fresh, tmp_path):
    assert "predict" in run(fresh / "gputrain", "--help", cwd=tmp_path)
