"""Makes the JSON Schema of every file that this package writes and others may read; ``schemas`` holds them as files."""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any, Final

import msgspec

from pytest_gputrain.hardware.recording import Recording
from pytest_gputrain.records import BaselineRun, Case, EmulatedRun, Environment, HistoryLine, Report, Scale, Trends
from pytest_gputrain.records.doctor import Diagnosis
from pytest_gputrain.records.emulated import EmulatedConditions
from pytest_gputrain.records.emulation import Emulation
from pytest_gputrain.records.fit import FitReport


def _entry(record: type[msgspec.Struct], shared: Container[str], **more: Any) -> Any:
    """Return a record as files of baselines hold it: without the fields that stand there once for several entries."""
    fields = [field for field in msgspec.structs.fields(record) if field.name not in shared]
    required = [(field.name, field.type) for field in fields if field.required]
    others = [(field.name, field.type, msgspec.UNSET) for field in fields if not field.required]
    return msgspec.defstruct(f"Stored{record.__name__}", [*more.items(), *required, *others], kw_only=True)


def _file(name: str, folder: str, shared: str, shared_type: Any, runs: Any) -> Any:
    case = msgspec.defstruct(f"{name}Case", [("case", Case), ("scale", Scale), ("runs", runs)])
    parts = [("format", int), (folder, str), ("suite", str), (shared, _by_name(shared_type)), ("cases", _by_name(case))]
    return msgspec.defstruct(name, parts)


def _by_name(type_: Any) -> Any:
    return dict[str, type_]


_STORED_RUNS: Final[Any] = list.__class_getitem__(_entry(BaselineRun, {"environment"}, environment=str))
_STORED_EMULATED: Final[Any] = _entry(EmulatedRun, EmulatedConditions.__struct_fields__)

SCHEMAS: Final[dict[str, tuple[str, Any]]] = {
    "report": ("A report of --gpu-json", Report),
    "history": ("A line of --gpu-history", HistoryLine),
    "emulation": ("What gputrain emulate --json writes", Emulation),
    "fit": ("What gputrain predict --json writes", FitReport),
    "trends": ("What gputrain trend --format json prints", Trends),
    "doctor": ("What gputrain doctor --json prints", Diagnosis),
    "recording": ("What gputrain doctor --record writes", list[Recording]),
    "baselines": (
        "A file of measured baselines",
        _file("Baselines", "device", "environments", Environment, _STORED_RUNS),
    ),
    "emulated-baselines": (
        "A file of baselines of an emulated GPU",
        _file("EmulatedBaselines", "platform", "conditions", EmulatedConditions, _by_name(_STORED_EMULATED)),
    ),
}
"""By the name of its file: what it describes, and the type of that."""


def text_of(name: str) -> str:
    """Return the schema as its file has it."""
    title, type_ = SCHEMAS[name]
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    document = _with_clean_docstrings(msgspec.json.schema(type_)) | dialect
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic"), indent=1).decode() + "\n"


def _with_clean_docstrings(part: Any) -> Any:
    """Return the part of a schema without the indentation of docstrings, which Python keeps until 3.13."""
    if isinstance(part, list):
        return [_with_clean_docstrings(each) for each in part]
    if not isinstance(part, dict):
        return part
    described = {"description": inspect.cleandoc(part["description"])} if isinstance(part.get("description"), str) else {}
    return {name: _with_clean_docstrings(each) for name, each in part.items()} | described
