"""Damaged input to every reader, the same little in every run; ``tools/fuzz_readers.py`` makes new inputs."""

import dataclasses

import fuzz_readers
import pytest
from readers import READERS

INPUTS = 60
SEED = 2026

BY_NAME = {reader.name: reader for reader in READERS}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_reader_fails_by_its_documented_errors_only(reader, capsys):
    failures = fuzz_readers.run([reader], INPUTS, SEED)
    assert failures == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("raised", "documented", "told"),
    [
        (KeyError("x"), (), "KeyError at test_fuzz_readers.py"),
        (ValueError("one sentence"), (), "ValueError at test_fuzz_readers.py"),
        (ValueError("two\nlines"), (ValueError,), "no sentence: ValueError"),
        (ValueError(""), (ValueError,), "no sentence: ValueError"),
        (RecursionError("deep"), (ValueError,), "RecursionError at test_fuzz_readers.py"),
    ],
)
def test_anything_else_is_a_failure_with_the_seed_that_makes_its_input_again(tmp_path, capsys, raised, documented, told):
    inputs = []

    def read(data, scratch, rng):
        inputs.append(data)
        if len(data) % 2:
            raise raised

    reader = dataclasses.replace(BY_NAME["baseline"], read=read, documented=documented)
    assert fuzz_readers.run([reader], 30, 1) > 0
    shown = capsys.readouterr().out
    assert told in shown
    seed = int(shown.partition("--seed ")[2].partition(":")[0])
    first = next(data for data in inputs if len(data) % 2)
    assert fuzz_readers.run([reader], 1, seed) == 1
    assert inputs[-1] == first


def test_what_is_never_read_to_its_end_is_a_failure(capsys, monkeypatch):
    def read(data, scratch, rng):
        while True:
            pass

    monkeypatch.setattr(fuzz_readers, "LIMIT_SECONDS", 0.05)
    assert fuzz_readers.run([dataclasses.replace(BY_NAME["baseline"], read=read)], 2, 1) == 1
    assert "TooLong" in capsys.readouterr().out


def test_a_documented_error_of_one_sentence_is_none():
    def read(data, scratch, rng):
        raise ValueError("the file is not JSON: unexpected end; restore it from git")

    assert fuzz_readers.run([dataclasses.replace(BY_NAME["baseline"], read=read, documented=(ValueError,))], 20, 1) == 0
