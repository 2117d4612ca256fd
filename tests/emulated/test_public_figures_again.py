"""Runs the programs of public figures again: each takes what figures.json has."""

import importlib.metadata
import os

import pytest
from public_figures import measure, packages_of, read


def missing(row):
    """The versions that the recorded bytes were made with, and that are not here."""
    try:
        here = packages_of(row.file)
    except importlib.metadata.PackageNotFoundError as error:
        return str(error)
    return {name: version for name, version in row.made_with.items() if here.get(name) != version}


@pytest.mark.weekly
@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("row", read(), ids=lambda row: row.name)
def test_a_program_takes_what_is_recorded(row):
    if lacking := missing(row):
        leave = pytest.fail if "GPUTRAIN_PUBLIC_FIGURES" in os.environ else pytest.skip
        leave(f"the figure was made with other versions: {lacking}")
    measured = measure(row)
    assert measured.emulated == pytest.approx(row.emulated, rel=0.002)
    assert measured.uncounted == row.uncounted
