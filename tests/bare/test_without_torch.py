"""Tests that a machine without torch collects, skips and says what is missing."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")

SUITE = """
    import pytest
    from pytest_gputrain import Case, grid

    CASES = grid(Case(sequence_length=128, platforms=("h100",)), model=["llama-3-8b"], method=["full"])

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_it(gputrain, case):
        gputrain.check(case)
"""


@pytest.fixture(autouse=True)
def _not_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)


def test_collects(pytester):
    pytester.makepyfile(SUITE)
    pytester.runpytest("--collect-only").stdout.fnmatch_lines(["*test_it*llama-3-8b-full-bf16*"])


def test_skips_what_needs_another_machine(pytester):
    pytester.makepyfile(SUITE)
    result = pytester.runpytest("-m", "h100", "-rs", "--gpu-platform=cpu")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs h100 x1, found cpu*"])


def test_fails_with_what_to_install(pytester):
    pytester.makepyfile(SUITE)
    result = pytester.runpytest("--gpu-platform=cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*cannot import torch*pytest-gputrain?suite?*"])


def test_a_torch_that_fails_as_it_is_imported_is_told(pytester, monkeypatch):
    pytester.makepyfile("def train(setup): ...\n\ndef test_own(gputrain):\n    gputrain.check(train, precision='fp32')")
    (pytester.mkdir("broken") / "torch.py").write_text("raise ValueError('libcublas.so is not found')")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path / "broken"), prepend=":")
    result = pytester.runpytest("--gpu-platform=cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*cannot import the libraries of this case (ValueError: libcublas.so is not found)*"])
