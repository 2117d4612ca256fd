"""Tests the rows of public figures: each is whole, and the page has the table made of them."""

import msgspec
import public_figures
import pytest
from public_figures import PAGE, Row, faults, page, read

ROW = read()[0]


def test_the_page_has_the_table_of_the_rows():
    text = PAGE.read_text()
    assert page(text, read()) == text, "python tools/public_figures.py --write"


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
