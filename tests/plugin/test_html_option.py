"""Tests ``--gpu-html``: the page that is written at the end of a run."""

import html
import importlib.util
import re

import pytest
from plugin_project import GEMMA, LLAMA, LLAMA_2, assert_refused, recorded

pytest.importorskip("jinja2", reason="the extra `report` is not installed")
pytest.importorskip("matplotlib", reason="the extra `report` is not installed")


def text_of(path):
    """What the page shows, blanks squeezed."""
    body = path.read_text().partition("<body>")[2].partition("<script>")[0]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_a_run_leaves_a_page_with_its_verdicts_and_its_history(suite):
    suite.run("--gpu-baseline-update").assert_outcomes(passed=3)
    for _ in range(2):
        suite.run("--gpu-history=history.jsonl", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    suite.answer(recorded(slower=1.1), to=LLAMA)
    suite.run("--gpu-html=page.html", "--gpu-history=history.jsonl").assert_outcomes(passed=2, failed=1)
    text = text_of(suite.path / "page.html")
    assert "1 regressed 2 pass" in text
    assert re.search(rf"regressed tuning {LLAMA} .{{,20}}10\.0 %", text)
    assert f"Time of a step of {GEMMA} on nvidia-h100-80gb-hbm3 3 runs" in text  # this run among them
    assert f"Time of a step of {LLAMA_2}" not in text  # one run
    assert "3 lines appended to" in text


def test_the_ini_twin_writes_it_and_a_run_without_cases_has_one_too(suite):
    suite.ini("gpu_html = deep/page.html")
    suite.run("-k", "nothing")
    assert "No case has run." in text_of(suite.path / "deep" / "page.html")
    suite.run("-k", "gemma").assert_outcomes(passed=1, deselected=2)
    assert "1 new" in text_of(suite.path / "deep" / "page.html")


def test_a_damaged_history_costs_the_trends_alone(suite):
    (suite.path / "history.jsonl").write_text("damaged\n")
    result = suite.run("--gpu-html=page.html", "--gpu-history=history.jsonl")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*/page.html shows no trends: *history.jsonl:1 is not a line of a history*"])
    assert "3 new" in text_of(suite.path / "page.html")


def test_without_the_libraries_it_is_refused_before_anything_runs(suite, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "jinja2" else find(name, *rest))
    sentence = "--gpu-html: the HTML report needs jinja2; install it with: pip install 'pytest-gputrain?report?'"
    assert_refused(suite, sentence, "--gpu-html=page.html")
