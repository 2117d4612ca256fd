"""Tests the rows of public figures: each is whole, and the page has the table made of them."""

import subprocess
from pathlib import Path

import msgspec
import public_figures
import pytest
from public_figures import PAGE, Row, faults, page, read

from pytest_gputrain.records.emulation import DeviceUse, EmulatedProcess, Emulation, ProgramFit

ROW = read()[0]
README = (PAGE.parents[1] / "README.md").read_text()


def test_the_page_has_the_table_of_the_rows():
    text = PAGE.read_text()
    assert page(text, read()) == text, "python tools/public_figures.py --write"


def test_other_pages_have_the_counts_of_the_table():
    errors = [abs(row.error) for row in read()]
    met = [sum(error <= limit for error in errors) for limit in (0.01, 0.05)]
    assert f"Of [{len(errors)} figures that others published](docs/public-figures.md) {met[0]} are met within 1 %" in README
    assert f"| {len(errors)} | {met[0]} are met within 1 %, {met[1]} within 5 %" in (PAGE.parent / "how-true.md").read_text()


def test_each_row_is_whole_and_was_run():
    rows = read()
    assert [fault for row in rows for fault in faults(row)] == []
    assert [row.name for row in rows if row.emulated is None or not row.made_with] == []
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"program": "nowhere.py"}, "no program nowhere.py"),
        ({"gpu": "k80"}, "k80, which is not in the catalog"),
        ({"published": 2 * ROW.published, "cause": ""}, "write its cause"),
    ],
)
def test_a_row_that_is_wrong_is_told(changed, told):
    (fault,) = faults(msgspec.structs.replace(ROW, **changed))
    assert told in fault


def test_a_row_without_a_condition_is_refused():
    row = msgspec.to_builtins(ROW)
    del row["conditions"]["precision"]
    with pytest.raises(msgspec.ValidationError, match="precision"):
        msgspec.convert(row, Row)


def test_a_figure_of_gigabytes_is_compared_in_their_bytes():
    row = msgspec.structs.replace(ROW, published=2.0, unit="GB", emulated=2_020_000_000)
    assert row.error == pytest.approx(0.01)


def test_packages_are_found_wherever_a_program_imports_them(tmp_path, monkeypatch):
    monkeypatch.setattr(public_figures.importlib.metadata, "version", {"torch": "2.13.0", "msgspec": "1"}.get)
    program = tmp_path / "program.py"
    program.write_text("import argparse\n\ndef main():\n    from msgspec import json\n")
    assert public_figures.packages_of(program) == {"msgspec": "1", "torch": "2.13.0"}


@pytest.fixture
def measured(monkeypatch):
    """Measure a row whose program prints these lines, by an emulation that has all kinds of unknown memory."""
    process = EmulatedProcess(process=1, unknown=("cuDNN's workspaces", "NCCL's buffers"))
    emulation = Emulation(
        generator="",
        device_name="",
        platform=ROW.gpu,
        device_count=1,
        device_memory_bytes=0,
        torch="",
        command=(),
        exit_status=0,
        processes=(process,),
        use=(DeviceUse(process=1, gpu=0, peak_bytes=900),),
        fit=ProgramFit(verdict="fits", headroom_bytes=0, sentence=""),
    )

    def run(command, **options):
        Path(command[command.index("--json") + 1]).write_bytes(msgspec.json.encode(emulation))
        printed = "parameters 5000000\nother 7\npeak allocated 700\npeak reserved 800\n"
        return subprocess.CompletedProcess(command, 0, printed, "")

    monkeypatch.setattr(subprocess, "run", run)
    return lambda **changed: public_figures.measure(msgspec.structs.replace(ROW, **{"parameters": None, **changed}))


@pytest.mark.parametrize(("figure", "number"), [("allocated", 700), ("reserved", 800), ("device used", 900)])
def test_the_figure_that_a_source_prints_is_measured(measured, figure, number):
    assert measured(figure=figure).emulated == number


def test_buffers_of_nccl_are_missing_in_the_use_of_a_device(measured):
    assert measured(figure="reserved").uncounted == ("cuDNN's workspaces",)
    assert measured(figure="device used").uncounted == ("NCCL's buffers", "cuDNN's workspaces")


def test_a_program_that_trains_another_model_has_no_figure(measured):
    measured(parameters=5.02)
    with pytest.raises(RuntimeError, match=r"5,000,000 parameters, and the source 5\.03 million"):
        measured(parameters=5.03)
