"""Tests the pages of docs: links exist on GitHub (the build of the site checks its own), and the API page is complete."""

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
import reference_pages

import pytest_gputrain
from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.plugin.hooks import __all__ as FIXTURES
from pytest_gputrain.plugin.markers import _KEYWORDS as KEYWORDS
from pytest_gputrain.records.case import KNOBS
from pytest_gputrain.records.counts import COUNT_FIGURES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]


def prose(page):
    """Without blocks of code and code in the text, which have no links."""
    without_blocks = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: "" if "](" in code[0] else code[0], without_blocks)


def links(page):
    yield from (link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link)


def anchors(page):
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for link in links(page):
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link} leads nowhere; the site takes links to files only"
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), f"{link} is no heading of {target.name}"


def test_links_were_found():
    assert "gate.md#limits" in set(links(DOCS / "api.md"))
    assert "how-often-it-is-wrong" in anchors(DOCS / "ab.md")


def test_the_index_has_every_page_once():
    """The site takes its contents from it."""
    listed = [link for link in links(DOCS / "README.md") if re.fullmatch(r"[\w-]+\.md", link)]
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md") if page.name not in ("README.md", "index.md"))


def test_contributors_are_led_to_files_that_exist():
    named = re.findall(r"`((?:\.\w+|\w+)/[\w./-]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists() and not (ROOT / "pytest_gputrain" / name).exists()] == []


PROGRAMS = ("own-loops-trainers.md", "own-loops-more.md")
"""Pages of complete programs, of which a reader needs one."""


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in reference_pages.PAGES and page.name != "CHANGELOG.md"],
    ids=lambda page: page.name,
)
def test_a_page_is_read_in_ten_minutes(page):
    assert page.read_text().count("\n") <= (400 if page.name in PROGRAMS else 200)


def test_every_fault_names_tests_that_exist():
    page = (DOCS / "faults.md").read_text()
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", page)
    rows = [row for row in page.splitlines() if row.startswith("| ") and not row.endswith("| shown by |")]
    assert len(rows) > 30
    assert [row for row in rows if "::test_" not in row and not row.endswith("| the same |")] == []
    missing = [(file, name) for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []


API = "".join((DOCS / name).read_text() for name in ("api.md", "api-records.md"))


def test_the_api_has_every_public_name_and_every_record_of_a_report():
    described = set(re.findall(r"^### `(\w+)`$", API, re.MULTILINE))
    assert set(pytest_gputrain.__all__) - {"KiB", "MiB", "GiB", "Result"} <= described
    schema = json.loads((reference_pages.SCHEMAS_FOLDER / "report.json").read_text())
    (others,) = re.findall(r"^The schema describes the other records of a report: (.*)\.$", API, re.MULTILINE)
    assert set(schema["$defs"]) <= described | set(re.findall(r"\w+", others))


@pytest.mark.parametrize("page", reference_pages.PAGES, ids=lambda page: page.name)
def test_a_reference_page_is_that_of_the_code(page):
    assert reference_pages.filled(page.read_text()) == page.read_text(), "run tools/reference_pages.py"


def test_every_field_of_the_api_has_a_meaning():
    rows = [row for row in API.splitlines() if re.match(r"- `\w+(\(\))?` \(", row)]
    assert len(rows) > 200
    assert [row for row in rows if row.endswith(": ")] == []


def test_the_api_has_every_word_of_a_case_fixture_and_marker():
    words = (*KNOBS["method"].words, *KNOBS["precision"].words, "custom", *FIXTURES, *MARKERS, *KEYWORDS)
    assert [word for word in words if f"`{word}`" not in API] == []
    for marker, keywords in KEYWORDS.items():
        (row,) = (row for row in API.splitlines() if row.startswith(f"- `{marker}("))
        assert all(re.search(rf"\b{keyword}\b", row) for keyword in keywords if keyword not in COUNT_FIGURES)
    counts = (DOCS / "counts.md").read_text()
    assert all(f"`{figure}`" in counts for figure in COUNT_FIGURES)
