#!/usr/bin/env python3
"""Writes the generated parts of the reference pages in docs/ from the code, and the schema of reports.

    tools/reference_pages.py

A generated part stands between two comments that name it: an object of the code, as ``pytest_gputrain.Case``, or one of
`PARTS`. It is plain Markdown, so a code host shows it as the site does.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

import pytest_gputrain
from pytest_gputrain.cli.main import command_parser
from pytest_gputrain.execution.options import Option
from pytest_gputrain.execution.settings import OPTIONS
from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.plugin import hooks
from pytest_gputrain.plugin.marker_help import lines as marker_lines
from pytest_gputrain.report import schemas

DOCS: Final = Path(__file__).parent.parent / "docs"
PAGES: Final = tuple(DOCS / name for name in ("api.md", "api-records.md", "cli.md", "options.md"))
SCHEMAS_FOLDER: Final = Path(pytest_gputrain.__file__).parent / "schemas"
_PART: Final = re.compile(r"<!-- begin ([\w.]+) -->\n.*?<!-- end \1 -->", re.DOTALL)
_WITH_DEFAULTS: Final = ("Case",)
"""Classes whose objects users make; they only read those of the others."""
_AMONG_NAMES: Final = ("GpuTrain", "Setup")
"""Classes whose members the list of public names has."""
_RESULT: Final = "One of `Measured`, `Emulated`, `BatchSearch` and `LossStudy`"
_INTERNAL: Final = ("beside", "identity", "idle_names", "loaders", "sides", "watched")
"""Public members that users have no use for."""
_SHORT_TYPES: Final = {
    "Whole": "int",
    "TensorShapes": "tuple[tuple[int, ...], ...]",
    "StepSeconds": "tuple[float, ...]",
    " | UnsetType": "",
    " | ": "|",
}


def prose(text: str) -> str:
    """Return text of a docstring on one line, its names as Markdown has them."""
    return " ".join(text.split()).replace("``", "`")


# The Python API


def described(name: str) -> str:
    """Return the section of a class or function: its heading, its docstring, and its fields, properties and methods."""
    module, _, own_name = name.rpartition(".")
    definitions = _definitions(module)
    node = definitions[own_name]
    if isinstance(node, ast.FunctionDef):
        return f"### `{own_name}`\n\n{_function(node)}"
    members = list(_members(node))
    rows = [member for member in members if isinstance(member, Row)]
    parts = [f"### `{own_name}`", docstring(ast.get_docstring(node) or "")]
    if own_name not in _WITH_DEFAULTS:
        rows = [row._replace(meaning=_first(row.meaning)) for row in rows]
    if own_name not in _AMONG_NAMES:
        parts += [fields(rows, with_defaults=own_name in _WITH_DEFAULTS)] if rows else []
    methods = (f"#### `{member.name}()`\n\n{_function(member)}" for member in members if isinstance(member, ast.FunctionDef))
    return "\n\n".join([*parts, *methods])


def fields(rows: Iterable[Row], *, with_defaults: bool = False) -> str:
    """Return a list of fields or properties: names, types or else defaults, and meanings."""
    return "\n".join(
        f"- {row.name} ({row.default if with_defaults else row.type}): {row.meaning}" for row in rows if row.meaning
    )


def records() -> str:
    """Return the sections of the records that tests import and of their bases; each field with its first sentence."""
    kinds = [kind for kind in (getattr(pytest_gputrain, name) for name in pytest_gputrain.__all__) if inspect.isclass(kind)]
    public = [kind for kind in kinds if issubclass(kind, msgspec.Struct) and kind is not pytest_gputrain.Case]
    shown = dict.fromkeys(owner for kind in public for owner in reversed(kind.__mro__) if _is_record(owner))
    sections = []
    for kind in shown:
        members = list(_members(_class(kind.__module__, kind.__name__)))
        about = "" if kind in public else f"{_first(inspect.getdoc(kind) or '')} "  # the list of public names has the others
        inherited = (f"It also has the fields of `{base.__name__}`." for base in kind.__bases__ if _is_record(base))
        text = f"{about}{' '.join(inherited)}".strip()
        rows = [row._replace(meaning=_first(row.meaning)) for row in members if isinstance(row, Row)]
        functions = (member for member in members if isinstance(member, ast.FunctionDef))
        calls = [f"- `{each.name}()`: {_first(ast.get_docstring(each) or '')}" for each in functions]
        listed = "\n".join([fields(rows), *calls])
        sections.append("\n\n".join(part for part in (f"### `{kind.__name__}`", text, listed) if part))
    names = {kind.__name__ for kind in shown}
    others = sorted(name for name in msgspec.json.schema(pytest_gputrain.Report)["$defs"] if name not in {*names, "Case"})
    return "\n\n".join(
        [*sections, f"The schema describes the other records of a report: {', '.join(f'`{name}`' for name in others)}."]
    )


def _is_record(kind: type) -> bool:
    return kind.__module__.startswith(pytest_gputrain.__name__)


def _definitions(module: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Return the classes and functions of a module by name. It is not imported, because it may need torch."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


class Row(NamedTuple):
    """A field or property of a class."""

    name: str
    type: str
    default: str
    meaning: str


def _members(owner: ast.ClassDef) -> Iterator[Row | ast.FunctionDef]:
    for member, after in zip(owner.body, [*owner.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and "settable=False" in ast.unparse(member.annotation):
            continue  # the package alone sets it
        if isinstance(member, ast.AnnAssign) and _is_public(ast.unparse(member.target)):
            default = "" if member.value is None else f"`{ast.unparse(member.value)}`"
            yield Row(f"`{ast.unparse(member.target)}`", _type(member.annotation), default, prose(_text(after)))
        elif isinstance(member, ast.FunctionDef) and _is_public(member.name):
            if any(ast.unparse(decorator) == "property" for decorator in member.decorator_list):
                yield Row(f"`{member.name}`", _type(member.returns), "", prose(ast.get_docstring(member) or ""))
            else:
                yield member


def _is_public(name: str) -> bool:
    return not name.startswith("_") and name not in _INTERNAL


def _text(node: ast.stmt | None) -> str:
    """Return the docstring that a statement is, or nothing."""
    return str(node.value.value) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""


def _type(annotation: ast.expr | None) -> str:
    is_knob = isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated"
    text = ast.unparse(annotation.slice.elts[0] if is_knob else annotation) if annotation else "None"
    for long, short in _SHORT_TYPES.items():
        text = text.replace(long, short)
    return f"`{text}`"


def _function(node: ast.FunctionDef) -> str:
    node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
    marked = re.sub(r"(: [^=()]+)=", r"\1 = ", ast.unparse(node.args)).replace("_NO_ARGUMENTS", "{}")
    text = f"def {node.name}({marked}) -> {ast.unparse(node.returns) if node.returns else 'None'}"
    if len(text) > 100:
        arguments = re.split(r", (?=[*\w]+(?::|,|$|=))", marked)
        text = text.replace(marked, "\n" + "".join(f"    {argument},\n" for argument in arguments))
    return f"```py\n{text}: ...\n```\n\n{docstring(ast.get_docstring(node) or '')}"


def docstring(text: str) -> str:
    """Return a docstring as Markdown. Its ``Args:`` and the like become lists, and what is indented becomes code."""
    blocks = []
    for block in inspect.cleandoc(text).split("\n\n"):
        head, _, rest = block.partition("\n")
        if head in ("Args:", "Returns:", "Raises:"):
            rest = textwrap.dedent(rest)
            items = [rest] if head == "Returns:" else re.split(r"\n(?=\S)", rest)
            blocks += [head.replace("Args", "Arguments"), "\n".join(f"- {_item(prose(item))}" for item in items)]
        elif block.startswith("    "):
            blocks.append(f"```py\n{textwrap.dedent(block)}\n```")
        else:
            blocks.append(prose(re.sub(r"::$", ":", block)))
    return "\n\n".join(blocks)


def _item(text: str) -> str:
    return re.sub(r"^(\w+): ", r"`\1`: ", text)


def names() -> str:
    """Return the list of the public names: what is imported, the fixtures with their members, and the markers."""
    rows = [(f"`pytest_gputrain.{name}`", _sentence_of(name)) for name in pytest_gputrain.__all__]
    members = _members(_class("pytest_gputrain.plugin.fixtures", "GpuTrain"))
    told = {
        **{f"fixture `{name}`": _first(ast.get_docstring(node) or "") for name, node in _fixtures().items()},
        **{f"`gputrain.{name}`": sentence for name, sentence in map(_named, members)},
        **{
            f"`setup.{name}`": text
            for name, text in map(_named, _members(_class("pytest_gputrain.worker.training", "Setup")))
        },
    }
    markers = (line.partition(": gputrain: ") for line in marker_lines(printed=True))
    rows += [
        *told.items(),
        *((f"marker `{name.partition('(')[0]}`", _first(text.partition(";")[0])) for name, _, text in markers),
    ]
    return "\n".join(f"- {name}: {sentence}" for name, sentence in rows)


def _class(module: str, name: str) -> ast.ClassDef:
    node = _definitions(module)[name]
    assert isinstance(node, ast.ClassDef)
    return node


def _fixtures() -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Return the fixtures of the plugin by name."""
    definitions = _definitions(hooks.__name__)
    return {name: definitions[name] for name in hooks.__all__}


def _sentence_of(name: str) -> str:
    """Return the first sentence of a name that tests import."""
    value = getattr(pytest_gputrain, name)
    if isinstance(value, int):
        return f"{value:,} bytes."
    return _first((inspect.getdoc(value) if inspect.isroutine(value) or inspect.isclass(value) else "") or _RESULT)


def _named(member: Row | ast.FunctionDef) -> tuple[str, str]:
    if isinstance(member, Row):
        return member.name.strip("`"), _first(member.meaning)
    return f"{member.name}()", _first(ast.get_docstring(member) or "")


def _first(text: str) -> str:
    """Return the first sentence of a docstring."""
    sentence = re.split(r"(?<=[.])\s+(?=[A-Z`])", prose(text.partition("\n\n")[0]))[0].rstrip(".:")
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def platforms() -> str:
    """Return the markers of the platforms."""
    return textwrap.fill(", ".join(f"`{marker}`" for marker in MARKERS), 140) + "."


# The command line


def commands() -> str:
    """Return the section of each subcommand: what it does, its usage, and its arguments and options."""
    parser = command_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    help_of = {action.dest: action.help for action in subparsers._choices_actions}
    return "\n\n".join(_command(command, str(help_of[name])) for name, command in subparsers.choices.items())


def _command(parser: argparse.ArgumentParser, summary: str) -> str:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    description, _, example = (parser.description or f"{summary[:1].upper()}{summary[1:]}.").partition(" Example: ")
    parts = [f"## `{parser.prog}`", _cell(description), *([f"Example: `{example}`"] if example else [])]
    names = (f"`{' '.join((', '.join(action.option_strings), _metavar(action))).strip()}`" for action in actions)
    helps = (_cell(str(action.help) % {"default": action.default}) for action in actions)
    parts.append("\n".join(f"- {name}: {text}." for name, text in zip(names, helps, strict=True)))
    return "\n\n".join(parts)


def _metavar(action: argparse.Action) -> str:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return ""
    shown = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper())
    return f"[{shown} ...]" if action.nargs == "*" and action.option_strings else str(shown)


def _cell(text: str) -> str:
    """Return help as Markdown: options and commands as code."""
    return re.sub(r"(?<![\w`-])(--?[a-z][\w-]*(?:=[\w,.]+)?)", r"`\1`", " ".join(text.replace("%%", "%").split()))


def options_typed() -> str:
    return _options(option for option in OPTIONS if not option.ini_only)


def options_in_the_ini_file() -> str:
    return _options(option for option in OPTIONS if option.ini_only)


def _options(options: Iterable[Option]) -> str:
    lines = []
    for option in options:
        equals = " = " if option.ini_only else "="
        value = f"{equals}{option.metavar or 'true|false'}" if option.metavar or option.ini_only else ""
        name = f"{option.ini if option.ini_only else option.flag}{value}"
        default = f"`{option.default}`" if option.default else _cell(option.default_meaning)
        page = f"; see [{option.page.removesuffix('.md')}]({option.page})" if option.page else ""
        default = f" (default: {default})" if default else ""
        lines.append(f"- `{name}`{default}: {_cell(option.meaning)}{page}.")
    return "\n".join(lines)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "names": names,
    "platforms": platforms,
    "records": records,
    "commands": commands,
    "options": options_typed,
    "ini": options_in_the_ini_file,
}


def filled(page: str) -> str:
    """Return the page with its generated parts as the code has them."""

    def part(found: re.Match[str]) -> str:
        name = found[1]
        text = PARTS[name]() if name in PARTS else described(name)
        return f"<!-- begin {name} -->\n\n{text}\n\n<!-- end {name} -->"

    return _PART.sub(part, page)


if __name__ == "__main__":
    for name in schemas.SCHEMAS:
        (SCHEMAS_FOLDER / f"{name}.json").write_text(schemas.text_of(name))
    for path in PAGES:
        path.write_text(filled(path.read_text()))
