"""What data must not do to whoever reads it: run, lead elsewhere, or pose as something else (docs/security.md)."""

import csv
import io
import os
import re
import stat
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unit_examples import CASE, report, result

from pytest_gputrain.execution.launch import node_service
from pytest_gputrain.hardware.devices import HardwareError
from pytest_gputrain.hardware.lease import lease_cores
from pytest_gputrain.records import Verdict
from pytest_gputrain.report import github, terminal
from pytest_gputrain.utils import files, markdown
from pytest_gputrain.utils.files import locked, prepare, write_atomically
from pytest_gputrain.utils.masking import masked, masked_settings
from pytest_gputrain.utils.sanitize import shown, spreadsheet

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202emoc.live\r\x00\ud800"


@given(st.text())
@example(HOSTILE)
@example("::error::made up")
@example("##[error]made up")
@example(":::stop-commands::x")
def test_nothing_shown_moves_the_cursor_or_commands_the_runner(text):
    text_shown = shown(text)
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", text_shown) is None
    assert re.search(r"::(error|add-mask|stop-commands)|##\[", text_shown) is None
    assert text_shown.count("\n") == text.count("\n")
    text_shown.encode()


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_what_does_no_harm_is_shown_as_it_is(text):
    if "::" not in text and "##" not in text:
        assert shown(text) == text
    assert shown("tests/test_a.py::TestB::test_c") == "tests/test_a.py::TestB::test_c"


@pytest.mark.parametrize("cell", ["=1+1", "+SUM(A1)", "-2+3|cmd", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "\u3000\n@A1"])
def test_no_cell_is_a_formula(cell):
    file = io.StringIO()
    csv.writer(file).writerow([spreadsheet(cell)])
    assert next(csv.reader(io.StringIO(file.getvalue(), newline="")))[0].lstrip(" \u3000\n")[0] not in "=+-@\t\r"


@pytest.mark.parametrize("cell", ["-", "-1.5", "+0.4 %", "-12,000", "a=b", "", 5, -1.5, None])
def test_figures_and_names_stay_what_they_are(cell):
    assert spreadsheet(cell) == cell


@given(st.text())
@example("<script>alert(1)</script>")
@example("[text](javascript:alert(1))")
@example("![](http://example.invalid/a.png)")
@example("&lt;b&gt; &#124; a | b")
@example("- list")
@example("1. list")
@example("+ list")
@example("===")
@example("| a |\n|---|")
def test_no_text_is_markup(text):
    """By CommonMark with tables, as rich's dependency reads it."""
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    escaped = markdown.escaped(text)
    tokens = parser.parse(escaped)
    assert [token.type for token in tokens] in ([], ["paragraph_open", "inline", "paragraph_close"])
    inline = [child for token in tokens if token.children for child in token.children]
    assert {child.type for child in inline} <= {"text"}
    without_joins = "".join(child.content for child in inline).replace("\u200b", "")
    assert without_joins == " ".join(shown(text).split()).replace("\u200b", "")


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        *(("@someone", 1), ("by @some/team, @other", 2), ("@_one", 1)),
        *(("a@b.example", 0), ("gemma-7b@tiny", 0), ("@ @", 0), ("94.3 %", 0)),
        *(("#12, a/b#3", 2), ("!1 %2 $3 GH-4 gh-5", 5)),
    ],
)
def test_nobody_and_no_issue_is_mentioned(text, mentions):
    escaped = markdown.escaped(text)
    assert re.search(r"(^|[^\w])@\w|[#!$%]\d|(?i:gh)-\d", escaped) is None
    assert escaped.count("\u200b") == mentions


def test_a_page_has_no_controls_and_turns_no_text_around():
    page = pytest.importorskip("pytest_gputrain.report.html.page", reason="the extra `report` is not installed")
    hostile = result(CASE.replace(model=f"a{HOSTILE}b"), verdict=Verdict(status="new", sentence=HOSTILE))
    try:
        text = page.page([report(hostile, notes=(HOSTILE,))], baseline_dir=Path("nowhere"))
    except ModuleNotFoundError:
        pytest.skip("the extra `report` is not installed")
    assert "moc.live" in text
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", text) is None
    assert re.search(r"&#(x0*202e|0*8238|x0*1b|0*27);", text) is None


def test_tables_of_the_terminal_show_no_controls_and_no_markup():
    hostile = result(CASE.replace(model=f"[bold]{HOSTILE}[/bold]"), verdict=Verdict(status="new", sentence=HOSTILE))
    plain = terminal.render([hostile], width=200, colour=False)
    assert "[bold]" in plain
    assert re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", plain) is None
    coloured = terminal.render([hostile], width=200, colour=True)
    assert set(re.findall(r"\x1b.[^m]*.", coloured)) == set(re.findall(r"\x1b\[[0-9;]*m", coloured)), "its own colours only"


def test_no_failure_ends_the_annotation_that_tells_of_it():
    failure = github.Failure(None, None, "a,title=b::", "first\n::stop-commands::x\r##[add-mask]y\x1b[2J")
    (line,) = github.commands([failure])
    assert line.startswith("::error title=a%2Ctitle=b%3A%3A::first%0A")
    assert "\n" not in line
    assert "\x1b" not in line
    assert "##[" not in line
    assert "::stop-commands" not in line


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--token=abc", "-v"], ["--token=***", "-v"]),
        (["--api-key", "abc", "x"], ["--api-key", "***", "x"]),
        (["--hub-token", "-x"], ["--hub-token", "***"]),
        (["--token", "--abc", "--token", "--hub-token", "--x=y", "z"], ["--token", "***", "--token", "***", "***", "z"]),
        (["HF_TOKEN=abc", "AWS_SECRET_ACCESS_KEY='a b'"], ["HF_TOKEN=***", "AWS_SECRET_ACCESS_KEY=***"]),
        (["-o", "addopts=--password=abc --gpu-json=x"], ["-o", "addopts=--password=*** --gpu-json=x"]),
        (['{"api_key": "abc", "width": 3}'], ['{"api_key": ***, "width": 3}']),
        (["--index=https://me:abc@host/x?token=abc&b=1"], ["--index=https://***@host/x?token=***"]),
        (
            ["url?token=x&y=z", "-o", "a=--token=b&c,d -q", "x token=a'b\"c"],
            ["url?token=***", "-o", "a=--token=*** -q", "x token=***"],
        ),
        (["addopts=-q --token x -v", "addopts='--token --x'"], ["addopts=-q --token *** -v", "addopts='--token ***"]),
        (['{"api_key":"a\\"b","width":3}', 'x token="a b'], ['{"api_key":***,"width":3}', "x token=***"]),
        (["os.environ['HF_TOKEN']='abc'"], ["os.environ['HF_TOKEN']=***"]),
        (["X-Api-Key: abc", "Private-Token:abc"], ["X-Api-Key: ***", "Private-Token:***"]),
        (["Cookie: a=b; c=d", 'Authorization: Digest u="a", r="b"'], ["Cookie: ***", "Authorization: Digest ***"]),
        (["--token=ab&cd", "TOKEN=a,b", "--hub-token=a b"], ["--token=***", "TOKEN=***", "--hub-token=***"]),
        (["--password", "-abc", "--password", "--auth=x"], ["--password", "***", "--password", "***"]),
        (["https://user:p@ss@host/x@y"], ["https://***@host/x@y"]),
        (["Authorization: Bearer abc.d-e", "-H", "x: bearer abc"], ["Authorization: Bearer ***", "-H", "x: bearer ***"]),
        (
            ["Authorization: Basic abc==", '{"Authorization": "abc"}'],
            ["Authorization: Basic ***", '{"Authorization": "***"}'],
        ),
        (["hf_abcdefghijklmnop", "x=ghp_0123456789abcdef"], ["hf_***", "x=ghp_***"]),
        (
            ["addopts=--token 'a b' -v", '--api-key "a \\"b\\" c" -v', "x --token --auth a b"],
            ["addopts=--token *** -v", "--api-key *** -v", "x --token *** b"],
        ),
        (
            ['{"run": "--token \\"a b\\" -v"}', '{\\"api_key\\": \\"a b\\"}', 'x TOKEN=\\"a b\\" -v'],
            ['{"run": "--token *** -v"}', '{\\"api_key\\": ***}', "x TOKEN=*** -v"],
        ),
        (
            ['{"Cookie": "a=\\"b\\"; c=d", "x": 3}', "{'Cookie': 'a=\"b c\"; d', 'x': 3}", '{\\"Cookie\\": \\"a=b; c\\"}'],
            ['{"Cookie": "***", "x": 3}', "{'Cookie': '***', 'x': 3}", '{\\"Cookie\\": \\"***'],
        ),
    ],
)
def test_what_looks_like_a_secret_is_masked(arguments, shown):
    assert list(masked(arguments)) == shown
    assert masked_settings({"more": [["h100", arguments]]}) == {"more": [["h100", shown]]}


def test_a_setting_by_the_name_of_a_secret_is_masked():
    assert masked_settings({"api_key": "x", "tokens": "y", "token": 5}) == {"api_key": "***", "tokens": "y", "token": 5}


@pytest.mark.parametrize(
    "argument",
    [
        *("--max-tokens=5", "--tokenizer=gpt2", "tests/test_token.py::test_token::x", "-k token and not secret", "path=x"),
        *("--tokens=5", "key=3", "--gpu-set=keys=1", "a=token", "test_a[token-1]", "monkey=1", "https://host/@x", "pat"),
    ],
)
def test_what_is_no_secret_stays(argument):
    assert masked([argument, "next"]) == (argument, "next")


PARTS = (
    "token:",
    'token="\\',
    "'token='",
    "--token x",
    '"Cookie": "',
    "Cookie: x",
    "=--",
    "a-",
    "-",
    "token",
    "token=",
    "token ",
    'token="',
    "--token ",
    "--token \\'x ",
    "token\\",
    "\\",
    '"Cookie": "\\',
    "auth",
    "a://b",
    "a@",
    "Bearer ",
    "Authorization:",
    "sk-",
    " ",
)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("begin", ["", "--", "token=", "a://", "Authorization: "])
def test_the_time_of_masking_grows_with_the_length_of_an_argument_and_not_with_its_square(begin, part):
    def seconds(length):
        times = []
        for _ in range(5):
            start = time.thread_time_ns()
            masked([begin + part * (length // len(part)) + "!"])
            times.append(time.thread_time_ns() - start)
        return min(times)

    assert seconds(8_000) < 27 * seconds(1_000), "each of three doublings takes at most three times as long"


def test_locks_are_in_a_folder_of_this_user_alone(tmp_path, monkeypatch, no_locks_of_folders):
    """In a folder of somebody else a link would have the lock made, and its target emptied, anywhere."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    locks = tmp_path / f"gputrain-locks-{os.getuid()}"
    with locked(tmp_path / "file"):
        assert stat.S_IMODE(locks.stat().st_mode) == 0o700
    locks.chmod(0o777)
    with pytest.raises(OSError, match="not a folder of this user alone"), locked(tmp_path / "file"):
        pass
    locks.rename(tmp_path / "elsewhere")
    locks.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not a folder of this user alone"), locked(tmp_path / "file"):
        pass


def test_no_file_is_written_through_a_link_of_another_user_in_a_folder_of_all(tmp_path, monkeypatch):
    """With it, another user would choose which file ``--gpu-json=/tmp/report.json`` replaces."""
    common, target = tmp_path / "common", tmp_path / "target"
    common.mkdir()
    target.write_text("mine")
    (common / "report.json").symlink_to(target)
    (common / "deep").symlink_to(tmp_path)
    common.chmod(0o1777)
    write_atomically(common / "report.json", b"one's own link in a folder of all")
    monkeypatch.setattr(files, "_is_foreign", lambda status: True)
    common.chmod(0o755)
    write_atomically(common / "report.json", b"another user's link, in a folder of few")
    common.chmod(0o1777)
    for path in (common / "report.json", common / "deep" / "target"):
        for write in (prepare, lambda path: write_atomically(path, b"other")):
            with pytest.raises(PermissionError, match="is a link that another user made"):
                write(path)
    assert target.read_text() == "another user's link, in a folder of few"


def test_leases_follow_no_link(tmp_path):
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    (tmp_path / "leases").symlink_to(own)
    with pytest.raises(HardwareError, match="is not a folder of leases"), lease_cores(1, tmp_path / "leases"):
        pass
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    common = tmp_path / "common"
    common.mkdir()
    (common / "core-queue.lock").symlink_to(tmp_path / "made")
    with pytest.raises(OSError, match="symbolic links"), lease_cores(1, common):
        pass
    assert not (tmp_path / "made").exists()


def test_a_node_takes_part_in_cases_of_its_own_user_only(tmp_path):
    folder = tmp_path / "case"
    folder.mkdir(mode=0o700)
    assert node_service._is_of(folder, os.getuid())
    assert not node_service._is_of(folder, os.getuid() + 1)
    folder.chmod(0o770)
    assert not node_service._is_of(folder, os.getuid())
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    assert not node_service._is_of(link, os.getuid())
    assert not node_service._is_of(tmp_path / "gone", os.getuid())
