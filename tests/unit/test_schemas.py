"""The JSON Schema in the wheel of each file that is written: what the writers write fits it."""

import dataclasses
import json
from argparse import Namespace

import jsonschema
import msgspec
import pytest
import reference_pages
from test_history import SESSION
from test_html_emulation import report as emulation
from unit_examples import (
    KINDS,
    crashed,
    emulated_run,
    measurement,
    out_of_memory,
    report,
    result,
    timed_out,
)

from pytest_gputrain.cli import predict
from pytest_gputrain.cli.main import main
from pytest_gputrain.hardware import recording
from pytest_gputrain.records import Case, MetricVerdict, Report, Verdict
from pytest_gputrain.records.fit import FitGpu, FitReport, LargestBatch
from pytest_gputrain.report import json_report
from pytest_gputrain.report.history_lines import lines_of
from pytest_gputrain.report.schemas import SCHEMAS, text_of
from pytest_gputrain.storage.history import append
from pytest_gputrain.utils.json_text import encoded

METRIC = MetricVerdict(metric="step_seconds", status="regressed", value=2.0, baseline=1.0, limit=1.03)
FULL = report(
    result(),
    result(replies=(out_of_memory(environment=None),), summary=None, verdict=Verdict(status="failed", sentence="x")),
    result(replies=(crashed(), timed_out()), summary=None, verdict=None),
    result(verdict=Verdict(status="regressed", sentence="slower", metrics=(METRIC,))),
    result(reply=emulated_run(), device="emulated/h100", verdict=None),
    branch="main",
    arguments=("--gpu-json=out.json",),
    settings={"runs": 1, "json": None, "memory_tolerance": {"ratio": 0.02, "bytes": 0}},
    exit_status=1,
    notes=("a note",),
)


def _report(path, capsys):
    json_report.write(FULL, path)
    assert msgspec.json.decode(path.read_bytes(), type=Report) == FULL
    return [json.loads(path.read_text())]


def _history(path, capsys):
    append(path, lines_of([result(), result(replies=(crashed(),), summary=None, key="other")], SESSION))
    return [json.loads(line) for line in path.read_text().splitlines()]


def _trends(path, capsys):
    days = [dataclasses.replace(SESSION, id=str(day), created=f"2026-01-{day + 10}T00:00:00Z") for day in range(8)]
    for day, session in enumerate(days):
        slower = 1.0 if day < 4 else 1.5
        append(path, lines_of([result(replies=(measurement(step_seconds=(slower,) * 3),))], session))
    assert main(["trend", str(path), "--format", "json"]) == 0
    return [json.loads(capsys.readouterr().out)]


def _emulation(path, capsys):
    """A test on an emulated GPU has one that the command wrote."""
    return [json.loads(encoded(emulation()))]


def _fit(path, capsys):
    none = {"cells": (), "left_out": (), "packages": {"torch": "2.13.0"}, "knobs": ("batch_size",)}
    largest = LargestBatch(case=Case(model="m"), gpu="h100", batch_size=4, needed_bytes=7, perhaps=0, is_bound=False)
    gpus = (FitGpu(marker="h100", title="H100", memory_bytes=80),)
    given = FitReport(generator="x", model="m", gpus=gpus, error=0.02, largest=(largest,), **none)
    predict.write(Namespace(json=path, markdown=None, html=None), given)
    return [json.loads(path.read_text())]


def _doctor(path, capsys):
    main(["doctor", "--json"])
    return [json.loads(capsys.readouterr().out)]


def _recording(path, capsys):
    class Library:
        class NVMLError(Exception):
            pass

        LIMIT = 5

        def nvmlSystemGetDriverVersion(self):
            return "580.1"

    recorder = recording.Recorder(Library(), "pynvml")
    assert (recorder.nvmlSystemGetDriverVersion(), recorder.LIMIT) == ("580.1", 5)
    return [json.loads(json.dumps([recorder.document]))]


def _baselines(kind):
    def write(path, capsys):
        store = kind.store(path)
        return [json.loads(store.update(kind.device, "llm", {"a": kind.record}).read_text())]

    return write


WRITERS = {
    "report": _report,
    "history": _history,
    "trends": _trends,
    "emulation": _emulation,
    "fit": _fit,
    "doctor": _doctor,
    "recording": _recording,
    **{name: _baselines(kind) for name, kind in zip(("baselines", "emulated-baselines"), KINDS, strict=True)},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_that_of_the_records_and_what_is_written_fits_it(name, tmp_path, capsys):
    text = (reference_pages.SCHEMAS_FOLDER / f"{name}.json").read_text()
    assert text == text_of(name), "run tools/reference_pages.py"
    validator = jsonschema.Draft202012Validator(json.loads(text))
    validator.check_schema(validator.schema)
    documents = WRITERS[name](tmp_path / "written", capsys)
    assert documents
    for document in documents:
        validator.validate(document)
        part = document[0] if isinstance(document, list) else document
        for field in part:
            kept = part[field]
            part[field] = [{"not": "this"}] if isinstance(kept, dict) else {"not": ["this"]}
            assert not validator.is_valid(document), field
            part[field] = kept


def test_a_schema_describes_fields_of_records_and_their_parts():
    report, history, baselines = (json.loads(text_of(name))["$defs"] for name in ("report", "history", "baselines"))
    for records, without in ((report, {"kind", "outcome"}), (history, set())):
        parts = [part for record in records.values() for part in record.get("properties", {}).items()]
        assert {name for name, part in parts if "description" not in part} == without, "these tell records apart"
    case = report["Case"]["properties"]["batch_size"]["description"]
    assert history["HistoryLine"]["properties"]["batch_size"]["description"] == case
    inherited, own = (report["Measured"]["properties"][name]["description"] for name in ("nodeid", "resumed"))
    assert (inherited, own[:16]) == ("pytest's id of the test.", "The earlier runs")
    stored = baselines["StoredBaselineRun"]["properties"]
    assert stored["free_bytes"]["description"]
