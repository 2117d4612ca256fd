"""Tests which tests are found for a sentence that was changed."""

import subprocess

import changed_sentences
import pytest

DIFF = """--- a/pytest_gputrain/gate/messages.py
+++ b/pytest_gputrain/gate/messages.py
-            return f"is {size} {word} in the mean of its steps: {values}"
+            return f"is {size} {word} in the mean of all steps: {values}"
-            word = "more memory" if more else other  # not a sentence of the code
+            word = "more bytes" if more else other  # not a sentence of the code
"""
GONE = {"mean of its", "of its steps", "more memory"}


def test_phrases_that_are_gone_are_those_in_quotes():
    assert changed_sentences.changed(DIFF) == GONE


@pytest.mark.parametrize(
    ("text", "snapshot", "found"),
    [
        ('def test_a():\n    assert ("the mean "\n        "of its steps")\n\n\ndef test_b():\n    pass\n', "", ["::test_a"]),
        ('@parametrize("x", ["more memory"])\ndef test_a(x):\n    pass\n', "", ["::test_a"]),
        ('SAID = "more memory"\n\n\ndef test_a():\n    pass\n', "", [""]),
        ("def test_a():\n    pass\n", "needs 1 byte more memory", [""]),
        ("def test_a():\n    pass\n", "", []),
    ],
    ids=["in a test", "in its parameters", "outside", "in a snapshot", "nowhere"],
)
def test_a_test_is_found_by_what_it_looks_for(tmp_path, monkeypatch, text, snapshot, found):
    monkeypatch.setattr(changed_sentences, "ROOT", tmp_path)
    (tmp_path / "__snapshots__").mkdir()
    path = tmp_path / "test_own.py"
    path.write_text(text)
    (tmp_path / "__snapshots__" / "test_own.ambr").write_text(snapshot)
    assert list(changed_sentences.tests_of(path, GONE)) == [f"test_own.py{each}" for each in found]


def test_tests_that_are_skipped_here_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(changed_sentences, "ROOT", tmp_path)
    (tmp_path / "README.md").touch()
    for folder in ("bare", "emulated", "plugin"):
        path = tmp_path / "tests" / folder / f"test_{folder}.py"
        path.parent.mkdir(parents=True)
        path.write_text('def test_it():\n    assert "more memory"\n')
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, DIFF)

    monkeypatch.setattr(subprocess, "run", run)
    assert changed_sentences.main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "run by `tox -e bare`: tests/bare/test_bare.py::test_it" in printed
    assert "run by `tox -e emulated`: tests/emulated/test_emulated.py::test_it" in printed
    _, named, unit = commands
    assert [each for each in named if "::" in each] == ["tests/plugin/test_plugin.py::test_it"]
    assert unit[-1] == "tests/unit"
