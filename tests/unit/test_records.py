"""The records: one definition for wire, files and schema."""

import json
import statistics
from pathlib import Path

import jsonschema
import msgspec
import pytest
import reference_pages
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit_examples import (
    crashed,
    measurement,
    out_of_memory,
    report,
    result,
    timed_out,
    values_of,
)

from pytest_gputrain import records
from pytest_gputrain.records import Case, Event, MetricVerdict, Reply, Report, Task, Verdict
from pytest_gputrain.report import json_report

RECORDS = [
    value
    for value in vars(records).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct) and value is not msgspec.Struct
]
REPLIES = [measurement(), out_of_memory(), crashed(), timed_out()]


def _full_report() -> Report:
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


@pytest.mark.parametrize(
    "record", [record for record in RECORDS if record is not Report], ids=lambda record: record.__name__
)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], max_examples=6)
@given(data=st.data())
def test_every_record_survives_json(record: type, data: st.DataObject) -> None:
    """But the report itself, which takes long to draw: its parts are drawn here, and a full one is written below."""
    value = data.draw(values_of(record))
    assert msgspec.json.decode(msgspec.json.encode(value), type=record) == value


def test_a_reply_is_told_by_its_outcome_as_published() -> None:
    encoded = [msgspec.json.encode(reply) for reply in REPLIES]
    assert [json.loads(text)["outcome"] for text in encoded] == ["measured", "out_of_memory", "crashed", "timed_out"]
    assert [msgspec.json.decode(text, type=Reply) for text in encoded] == REPLIES
    for text in ('{"outcome": "guessed"}', '{"sentence": "x", "phase": "start"}', "{}", "[]"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(text, type=Reply)


@pytest.mark.parametrize("value", [Case(), Task(case=Case(), scale="tiny", device_type="cpu", root="/")])
def test_a_field_the_worker_does_not_know_is_refused_and_an_event_of_a_newer_worker_read(value: Case | Task) -> None:
    fields = {**msgspec.to_builtins(value), "surprise": 1}
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.json.decode(msgspec.json.encode(fields), type=type(value))
    assert msgspec.json.decode('{"phase": "build", "new": 1}', type=Event) == Event(phase="build")


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9).map(tuple))
def test_step_time_is_the_median(seconds: tuple[float, ...]) -> None:
    assert measurement(step_seconds=seconds).median_step_seconds == statistics.median(seconds)


@pytest.mark.parametrize(("sequence_length", "tokens"), [(100, 800), (0, None)])
def test_rates_follow_from_batch_sequence_and_step_time(sequence_length: int, tokens: int | None) -> None:
    """Samples that are no sequences have no tokens."""
    measured = measurement(step_seconds=(0.5,), batch_size=4, sequence_length=sequence_length)
    assert (measured.samples_per_second, measured.tokens_per_second) == (8, tokens)


def test_published_schema_is_the_one_of_the_records() -> None:
    published = reference_pages.SCHEMA.read_text()
    assert published == reference_pages.schema_text(), "run tools/reference_pages.py"
    jsonschema.Draft202012Validator.check_schema(json.loads(published))


def test_a_written_report_fits_the_schema_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    json_report.write(_full_report(), path)
    validator = jsonschema.Draft202012Validator(json.loads(reference_pages.SCHEMA.read_text()))
    validator.validate(json.loads(path.read_text()))
    assert msgspec.json.decode(path.read_bytes(), type=Report) == _full_report()
    for field in ("format", "results", "created"):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate({**json.loads(path.read_text()), field: {"not": "this"}})
