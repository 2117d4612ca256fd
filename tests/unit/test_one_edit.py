"""A new knob of a case and a new option are one edit each: nothing else in the package enumerates them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest_gputrain

PACKAGE = Path(pytest_gputrain.__file__).parent

KNOB = '''    momentum: Annotated[
        str, Knob(words=("low", "high"), parallel=("fsdp",), methods=("lora",), own_code="but own code has its own")
    ] = "low"
    """How much of the last update is kept."""
    steps: '''
OPTION = """    fan_speed: int = option("N", "how fast the fan turns", parse=whole(1), default="3")
    root: Path
"""

USE = """
from pathlib import Path

import msgspec

from pytest_gputrain.cases.grid import grid
from pytest_gputrain.cases.identity import differences
from pytest_gputrain.cases.sweep import parse_axes
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.execution.settings import OPTIONS
from pytest_gputrain.plugin.settings import read
from pytest_gputrain.records import Case, HistoryLine
from pytest_gputrain.records.history import knobs
from pytest_gputrain.report.export.formats import CSV_HEADERS

language = dict(model="llama-3.1-8b", sequence_length=512)
low, high = grid(Case(**language, method="lora", parallel="fsdp"), momentum=["low", "high"])
own = Case(model="train", method="custom", code="test_it.py::train", momentum="high")
print(f"{high}: {differences(low, high)}; {parse_axes('momentum=low,high', ())}")
for case in (high.replace(momentum="hihg"), high.replace(parallel="ddp"), high.replace(method="full"), own):
    print(problem(case, ()))
print(problem(high, ()), knobs(high)["momentum"], "momentum" in CSV_HEADERS)
(key,) = (field for field in msgspec.structs.fields(HistoryLine) if field.name == "momentum")
print(key.type, key.default)
(option,) = (option for option in OPTIONS if option.name == "fan-speed")
print(option.flag, option.ini, option.help)
print(read({}, {}, Path.cwd()).fan_speed, read({"fan-speed": "7"}, {"fan-speed": "5"}, Path.cwd()).fan_speed)
"""


def _edit(path, before, after):
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def test_a_new_knob_and_a_new_option_are_one_edit_each(tmp_path, snapshot):
    """The package is copied and edited, and what reads knobs and options is asked of the new ones."""
    copy = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    _edit(copy / "records" / "case.py", "    steps: ", KNOB)
    _edit(copy / "execution" / "settings.py", "    root: Path\n", OPTION)
    command = [sys.executable, "-c", USE]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == snapshot
