"""Tests the HTML report in a real browser: it loads nothing, and works by keyboard, on a phone, in the dark and on paper."""

import os
import shutil
import time
from pathlib import Path

import pytest
from test_html import BEFORE, asking, everything, history_trends_of, published_result, regressed, timed
from unit_examples import crashed, report, result

from pytest_gputrain.records import MetricVerdict, Verdict
from pytest_gputrain.report.html import page
from pytest_gputrain.utils.units import GiB

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")]

BASELINES = Path(__file__).parents[2] / "baselines"
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = play.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A page with all sections, and names as long as they get."""
    folder = tmp_path_factory.mktemp("page")
    slow = Verdict(
        status="regressed",
        sentence="gemma is slower",
        metrics=(MetricVerdict(metric="step_seconds", status="regressed", value=5.36, baseline=5.0),),
    )
    failed = Verdict(status="failed", sentence="phi crashed")
    reports = [
        report(
            timed(0.5, key="alpha"),
            timed(5.36, key="gemma", verdict=slow),
            timed(12.0, key="x" * 90, suite="vision"),
            result(key="phi", replies=(crashed(detail="Traceback " + "y" * 300),), summary=None, verdict=failed),
            published_result(),
        ),
        everything("z" * 70),
    ]
    past = history_trends_of(folder, *([timed(1.0 if day < 12 else 1.1, key="alpha")] for day in range(24)))
    written = folder / "page.html"
    page.write(written, reports, past, baseline_dir=BASELINES)
    return written


class Opened:
    """A page with what it said and asked for."""

    def __init__(self, browser, file, **options):
        self.said = []
        self.asked = []
        self.context = browser.new_context(**{"viewport": DESK, "reduced_motion": "reduce", **options})
        self.context.set_default_timeout(10_000)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    @property
    def shown(self):
        """Names of the cases in the table, from above."""
        rows = self.page.locator("#table tbody tr:visible th summary")
        return [name[:5] for name in rows.all_inner_texts()]

    def colour(self, variable):
        """Of the paper or the ink as painted."""
        return self.page.evaluate(f"getComputedStyle(document.body).{variable}")


@pytest.fixture
def open_page(browser, file):
    opened = []

    def open_(**options):
        opened.append(Opened(browser, file, **options))
        return opened[-1]

    yield open_
    for opened_page in opened:
        opened_page.context.close()


ALL = ["gemma", "phi", "alpha", "xxxxx", "llava", "zzzzz"]


def test_it_asks_for_nothing_but_itself_and_reports_no_error(open_page, file):
    opened = open_page()
    opened.page.locator("#table thead button").first.click()
    opened.page.locator(".chart[data-points]").first.hover()
    opened.page.wait_for_load_state("networkidle")
    assert (opened.said, opened.asked) == ([], [file.as_uri()])


def test_what_has_grown_stands_in_the_first_view_without_a_click(browser, tmp_path):
    """The sentence, the guilty line, its figures and its bar in the colour of failures."""
    failing = regressed(
        phase_peak_bytes=BEFORE.phase_peak_bytes | {"forward": 31 * GiB},
        counts=asking(20, 21, 60, *range(23, 30), waits=2),
    )
    written = tmp_path / "page.html"
    page.write(written, [report(failing, arguments=("benchmarks", "-m", "h100"))], baseline_dir=BASELINES)
    opened = Opened(browser, written, viewport={"width": 1200, "height": 800})
    bad = opened.page.evaluate("getComputedStyle(document.querySelector('.counts .bad')).color")
    seen = opened.page.evaluate("""() => [...document.querySelectorAll("#failures li, svg text, svg path")].filter((one) => {
        const { top, left, bottom, right } = one.getBoundingClientRect();
        return top >= 0 && left >= 0 && top < 760 && (one.tagName === "LI" || (bottom <= 800 && right <= 1200));
    }).map((one) => [one.tagName, one.textContent.trim(), getComputedStyle(one).fill])""")
    opened.context.close()
    texts = [text for tag, text, _ in seen if tag == "text"]
    assert failing.verdict.sentence in next(text for tag, text, _ in seen if tag == "LI")
    assert {"31.0 GiB now", "30.0 GiB before", "2 now", "60 now", "22 before"} <= set(texts)
    assert " ".join(texts).count("benchmarks/test_train.py:3 in train, x = layer_3(x)") == 2
    # The forward pass, the waits and the work of the line. Their texts have the colour, too.
    assert [tag for tag, _, fill in seen if fill == bad] == ["path", "text"] * 3


def test_a_foreign_script_would_not_run(open_page):
    """The policy is in force: what markup smuggles in is refused."""
    opened = open_page()
    opened.page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "document.title = 'broken'";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", "<img src=x onerror=\\"document.title = 'broken'\\">");
            document.body.insertAdjacentHTML("beforeend", "<p id=smuggled style='position: fixed'>x</p>");
        }"""
    )
    assert "broken" not in opened.page.title()
    assert opened.page.evaluate("getComputedStyle(smuggled).position") == "static"


def test_headings_sort_by_mouse_and_by_keys(open_page):
    opened = open_page()
    unsorted = opened.shown
    assert set(unsorted) == {*ALL}
    heading = opened.page.locator("#table thead th", has_text="Sec/step")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert opened.shown[:2] == ["alpha", "zzzzz"]
    assert opened.shown[-1] in ("phi", "zzzzz")  # what has no figure is last, either way
    opened.page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert opened.shown[:2] == ["xxxxx", "gemma"]
    assert opened.shown[-1] in ("phi", "zzzzz")
    opened.page.keyboard.press("Shift+Tab")
    assert opened.page.evaluate("document.activeElement.textContent") == "Suite"
    assert opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    opened.page.keyboard.press("Space")
    assert opened.page.locator("[aria-sort]").all_inner_texts() == ["Suite"]


def test_search_and_filters_narrow_the_table_and_say_how_far(open_page):
    opened = open_page()
    count = opened.page.locator("#filters output")
    assert count.inner_text() == "10 of 10 cases"
    opened.page.get_by_label("Search").fill("slower GEMMA")
    assert opened.shown == ["gemma"]
    assert count.inner_text() == "1 of 10 cases"
    opened.page.get_by_role("button", name="Clear").click()
    playwright.expect(count).to_have_text("10 of 10 cases")
    opened.page.get_by_role("combobox", name="Verdict").select_option("failed")
    assert opened.shown == ["phi", "zzzzz", "zzzzz"]
    opened.page.get_by_role("combobox", name="Suite").select_option("llm")
    assert opened.shown == ["phi"]
    opened.page.get_by_label("Search").press("Enter")  # submits nothing
    assert opened.shown == ["phi"]
    assert len(opened.asked) == 1


def test_a_chart_tells_its_points_to_a_pointer_and_to_keys(open_page):
    opened = open_page()
    chart = opened.page.locator("#trends .chart").first
    chart.focus()
    opened.page.keyboard.press("ArrowLeft")
    assert chart.locator(".tip").inner_text() == "2026-01-24 c23 1.10 s"
    opened.page.keyboard.press("Home")
    assert chart.locator(".tip").inner_text() == "2026-01-01 c0 1.00 s"
    opened.page.keyboard.press("Escape")
    assert chart.locator(".tip").count() == 0
    chart.hover(position={"x": 300, "y": 60})
    assert "1.10 s" in chart.locator(".tip").inner_text()
    assert chart.locator("svg").get_attribute("aria-labelledby")


_SCROLLED = """() => [...document.querySelectorAll(".scroll, pre")].filter((one) => one.scrollWidth > one.clientWidth)
    .map((one) => one.ariaLabel ?? one.textContent)"""


@pytest.mark.parametrize("width", [320, 360, 768, 1200])
def test_no_width_scrolls_sideways(open_page, width):
    opened = open_page(viewport={"width": width, "height": 740})
    opened.page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    boxes = opened.page.evaluate("[...document.querySelectorAll('svg')].map((one) => one.getBoundingClientRect().width)")
    assert boxes
    if width >= 1200:
        assert opened.page.evaluate(_SCROLLED) == []
    assert all(width * 0.2 < box <= width for box in boxes)


def test_paper_shows_the_whole_width(open_page):
    opened = open_page(viewport={"width": 720, "height": 1000})  # A4 between its margins
    opened.page.emulate_media(media="print")
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 720
    assert not opened.page.locator("#filters").is_visible()


def test_a_wide_table_scrolls_in_its_own_frame_by_keys(open_page):
    opened = open_page(viewport=PHONE)
    frame = opened.page.get_by_role("region", name="Table of cases")
    frame.focus()
    for _ in range(100):  # a busy machine's browser drops keys before its first frame
        opened.page.keyboard.press("ArrowRight")
        opened.page.wait_for_timeout(100)
        if frame.evaluate("it => it.scrollLeft"):
            return
    pytest.fail("no key scrolled the table")


def _contrast(foreground, background):
    """Of WCAG 2."""

    def luminance(colour):
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(foreground), luminance(background)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


_PAINTED = """() => [...document.querySelectorAll("p, li, td, th, dt, dd, summary, h2, h3, .badge, svg text")].map((one) => {
    const style = getComputedStyle(one);
    let behind = one;
    while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    return [one.closest("svg") ? style.fill : style.color, getComputedStyle(behind).backgroundColor, one.textContent];
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_themes(open_page, scheme):
    opened = open_page(color_scheme=scheme)
    painted = opened.page.evaluate(_PAINTED)
    assert len(painted) > 200
    weak = [(ink, paper, text[:40]) for ink, paper, text in painted if _contrast(ink, paper) < 4.5]
    assert weak == []


def test_the_button_overrides_the_theme_of_the_system_and_is_remembered(open_page):
    opened = open_page(color_scheme="light")
    light = opened.colour("backgroundColor")
    button = opened.page.get_by_role("button", name="Theme")
    button.click()
    assert (button.inner_text(), opened.colour("backgroundColor")) == ("Theme: light", light)
    button.click()
    dark = opened.colour("backgroundColor")
    assert button.inner_text() == "Theme: dark"
    assert _contrast(light, dark) > 10
    end = time.monotonic() + 60
    opened.page.reload()
    while opened.colour("backgroundColor") != dark:  # a new renderer may be faster than what the old one stores
        assert time.monotonic() < end, "the choice is not remembered"
        opened.page.reload()
    opened.page.emulate_media(media="print")
    assert _contrast(opened.colour("backgroundColor"), "rgb(255, 255, 255)") == 1


def test_without_scripts_it_is_a_plain_page_with_every_case(open_page):
    opened = open_page(java_script_enabled=False, color_scheme="dark")
    assert opened.page.locator("#table tbody tr").count() == 10
    assert opened.page.locator("svg").count() > 5
    assert not opened.page.locator("#filters").is_visible()
    assert not opened.page.locator("#theme").is_visible()
    assert opened.page.locator("thead button").count() == 0
