"""The records: one definition for wire, files and schema."""

import json

import msgspec
import pytest
from unit_examples import (
    crashed,
    measurement,
    out_of_memory,
    timed_out,
)

from pytest_gputrain.records import Case, Event, Reply, Task

REPLIES = [measurement(), out_of_memory(), crashed(), timed_out()]


def test_a_reply_is_told_by_its_outcome_as_published():
    encoded = [msgspec.json.encode(reply) for reply in REPLIES]
    assert [json.loads(text)["outcome"] for text in encoded] == ["measured", "out_of_memory", "crashed", "timed_out"]
    assert [msgspec.json.decode(text, type=Reply) for text in encoded] == REPLIES
    for text in ('{"outcome": "guessed"}', '{"sentence": "x", "phase": "start"}', "{}", "[]"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=Reply)


@pytest.mark.parametrize("value", [Case(), Task(case=Case(), scale="tiny", device_type="cpu", root="/")])
def test_a_field_the_worker_does_not_know_is_refused_and_an_event_of_a_newer_worker_read(value):
    fields = {**msgspec.to_builtins(value), "surprise": 1}
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.json.decode(msgspec.json.encode(fields), type=type(value))
    assert msgspec.json.decode('{"phase": "build", "new": 1}', type=Event) == Event(phase="build")


@pytest.mark.parametrize(("sequence_length", "tokens"), [(100, 800), (0, None)])
def test_rates_follow_from_batch_sequence_and_step_time(sequence_length, tokens):
    """Samples that are no sequences have no tokens."""
    measured = measurement(step_seconds=(0.5,), batch_size=4, sequence_length=sequence_length)
    assert (measured.samples_per_second, measured.tokens_per_second) == (8, tokens)
