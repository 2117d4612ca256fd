"""The records: one definition for wire, files and schema."""

import json

import jsonschema
import msgspec
import pytest
import reference_pages
from unit_examples import (
    crashed,
    measurement,
    out_of_memory,
    report,
    result,
    timed_out,
)

from pytest_gputrain.records import Case, Event, MetricVerdict, Reply, Report, Task, Verdict
from pytest_gputrain.report import json_report

REPLIES = [measurement(), out_of_memory(), crashed(), timed_out()]


def _full_report():
    metric = MetricVerdict(metric="step_seconds", status="regressed", value=2.0, baseline=1.0, limit=1.03)
    return report(
        result(),
        result(replies=(out_of_memory(environment=None),), summary=None, verdict=Verdict(status="failed", sentence="x")),
        result(replies=(crashed(), timed_out()), summary=None, verdict=None),
        result(verdict=Verdict(status="regressed", sentence="slower", metrics=(metric,))),
        branch="main",
        arguments=("--gpu-json=out.json",),
        settings={"runs": 1, "json": None, "memory_tolerance": {"ratio": 0.02, "bytes": 0}},
        exit_status=1,
        notes=("a note",),
    )


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


def test_published_schema_is_the_one_of_the_records():
    published = reference_pages.SCHEMA.read_text()
    assert published == reference_pages.schema_text(), "run tools/reference_pages.py"
    jsonschema.Draft202012Validator.check_schema(json.loads(published))


def test_a_written_report_fits_the_schema_and_reads_back(tmp_path):
    path = tmp_path / "deep" / "report.json"
    json_report.write(_full_report(), path)
    validator = jsonschema.Draft202012Validator(json.loads(reference_pages.SCHEMA.read_text()))
    validator.validate(json.loads(path.read_text()))
    assert msgspec.json.decode(path.read_bytes(), type=Report) == _full_report()
    for field in ("format", "results", "created"):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**json.loads(path.read_text()), field: {"not": "this"}})
