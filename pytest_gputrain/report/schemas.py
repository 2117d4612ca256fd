"""Makes the JSON Schema of every file that this package writes and others may read; ``schemas`` holds them as files."""

from __future__ import annotations

import ast
import inspect
import itertools
import pkgutil
from collections.abc import Container
from importlib import import_module
from typing import Any, Final

import msgspec

from pytest_gputrain import records
from pytest_gputrain.hardware import recording
from pytest_gputrain.hardware.recording import Recording
from pytest_gputrain.records import BaselineRun, Case, EmulatedRun, Environment, HistoryLine, Report, Scale, Trends
from pytest_gputrain.records.doctor import Diagnosis
from pytest_gputrain.records.emulated import EmulatedConditions
from pytest_gputrain.records.emulation import Emulation
from pytest_gputrain.records.fit import FitReport
from pytest_gputrain.records.history import COUNT_KEYS, KNOB_KEYS


def _entry(record: type[msgspec.Struct], shared: Container[str], **more: Any) -> Any:
    """Return the type of a record in files of baselines. It lacks the fields that several entries share and that the file
    has once."""
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
"""The schemas by the names of their files, each with a description and the type that it describes."""


def text_of(name: str) -> str:
    """Return the text of a schema's file. The description of a field is the text below the field in the code."""
    title, type_ = SCHEMAS[name]
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    document = _with_clean_docstrings(msgspec.json.schema(type_)) | dialect
    texts = field_texts()
    for own_name, definition in document["$defs"].items():
        of_fields = texts.get(own_name.removeprefix("Stored"), {})
        for field, part in definition.get("properties", {}).items():
            if field in of_fields:
                part["description"] = of_fields[field]
    return msgspec.json.format(msgspec.json.encode(document, order="deterministic"), indent=1).decode() + "\n"


def field_texts() -> dict[str, dict[str, str]]:
    """Return the text below each field of each record, on one line, by the names of the record and of the field."""
    modules = [import_module(f"{records.__name__}.{module.name}") for module in pkgutil.iter_modules(records.__path__)]
    classes = {each for module in (*modules, recording) for each in vars(module).values() if inspect.isclass(each)}
    without_source = (msgspec.Struct, HistoryLine)
    own = {each: _own_texts(each) for each in classes if issubclass(each, msgspec.Struct) and each not in without_source}
    texts = {
        each.__name__: {field: text for base in reversed(each.__mro__) for field, text in own.get(base, {}).items()}
        for each in own
    }
    line = texts["_Line"] | {key: texts["Case"][key] for key in KNOB_KEYS}
    for key, figure in COUNT_KEYS.items():
        line[key] = f"The mean of the figure {figure} over the counted steps. Null if it was not counted."
    return texts | {"HistoryLine": line}


def _own_texts(record: type) -> dict[str, str]:
    """Return the string below each field of a class, which Python itself does not keep."""
    (node,) = ast.parse(inspect.getsource(record)).body
    assert isinstance(node, ast.ClassDef)
    return {
        ast.unparse(member.target): " ".join(str(after.value.value).split())
        for member, after in itertools.pairwise(node.body)
        if isinstance(member, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def _with_clean_docstrings(part: Any) -> Any:
    """Return the part of a schema without the indentation of docstrings, which Python keeps until 3.13."""
    if isinstance(part, list):
        return [_with_clean_docstrings(each) for each in part]
    if not isinstance(part, dict):
        return part
    described = {"description": inspect.cleandoc(part["description"])} if isinstance(part.get("description"), str) else {}
    return {name: _with_clean_docstrings(each) for name, each in part.items()} | described
