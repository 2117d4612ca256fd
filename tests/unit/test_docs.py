"""Tests the pages of docs: links exist on GitHub (the build of the site checks its own), and the API page is complete."""

import json
import re
from itertools import pairwise
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
LONG_NAMES = 678
"""The number of tests whose names are older than their limit. It may only fall."""
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


def _pairs(sentence):
    """Words that follow each other; figures, units, names of code and what is quoted come between."""
    between = r"\S*[\d_/={}\[\]]\S*|\b[KMGT]i?B\b|\b\w*FLOP\b|'[^']*'|\"[^\"]*\"|[^\w\s'%-]+"
    return [pair for run in re.split(between, sentence) for pair in pairwise(re.findall(r"[A-Za-z][\w'-]*", run))]


def test_the_page_of_failures_has_the_words_of_the_code():
    code = "\n".join(path.read_text() for path in (ROOT / "pytest_gputrain").glob("**/*.py"))
    code = re.sub(r'"\s*\n\s*[rf]*"', "", code)  # a text that goes on in the next line
    rows = re.findall(r"^\| (`.*?) \| ", (DOCS / "reading-a-failure.md").read_text(), re.MULTILINE)
    sentences = [sentence for row in rows for sentence in re.findall("`([^`]+)`", row)]
    assert len(sentences) > 50
    unknown = {sentence: [pair for pair in _pairs(sentence) if " ".join(pair) not in code] for sentence in sentences}
    # Some words stand beside names of an example or are put together by the code. That number may only fall.
    assert sum(map(len, unknown.values())) <= 28, {sentence: pairs for sentence, pairs in unknown.items() if pairs}


def test_a_new_test_has_a_name_of_at_most_60_characters():
    functions = (
        re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE) for path in (ROOT / "tests").glob("**/test_*.py")
    )
    longer = sum(len(name) > 60 for names in functions for name in names)
    assert longer <= LONG_NAMES, f"{longer} names of tests are longer, {LONG_NAMES} may be: shorten the new one"


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


API = "".join((DOCS / name).read_text() for name in ("api.md", "api-records.md"))


def test_the_api_has_every_public_name_and_every_record():
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
