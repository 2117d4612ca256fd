"""Tests how output files are written: whole, through links, devices and FIFOs, and never over one of these."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from pytest_gputrain.utils.files import prepare, write_atomically

PRINTED = """
from pathlib import Path
from pytest_gputrain.utils.files import write_atomically

print("before", flush=True)
write_atomically(Path("/dev/stdout"), b"export\\n")
print("after", flush=True)
"""


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"old")
    (tmp_path / "other").hardlink_to(path)
    write_atomically(path, iter([b"n", b"ew"]))
    assert (path.read_bytes(), (tmp_path / "other").read_bytes()) == (b"new", b"old")


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path, there):
    link, between, target = tmp_path / "link", tmp_path / "between", tmp_path / "elsewhere" / "target"
    target.parent.mkdir()
    link.symlink_to("between")
    between.symlink_to(target)
    if there:
        target.write_text("old")
    prepare(link)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert between.is_symlink()
    assert target.read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["between", "elsewhere", "link", "target"]


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "target")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("link", "circle"):
        with pytest.raises(OSError):  # noqa: PT011 - of two kinds
            prepare(tmp_path / name)
        with pytest.raises(OSError):  # noqa: PT011 - of two kinds
            write_atomically(tmp_path / name, b"new")
        assert (tmp_path / name).is_symlink()


def test_what_a_shell_puts_for_a_command_is_written_to():
    """``gputrain export -o >(jq .)``, with more than the pipe holds."""
    reading, writing = os.pipe()
    read = []

    def read_all():
        with os.fdopen(reading, "rb") as file:
            read.append(file.read())

    reader = threading.Thread(target=read_all)
    reader.start()
    try:
        write_atomically(Path(f"/dev/fd/{writing}"), b"x" * 300_000)
    finally:
        os.close(writing)
        reader.join(timeout=600)
    assert [len(data) for data in read] == [300_000]


def test_a_fifo_that_nobody_reads_is_told_at_once(fifo):
    with pytest.raises(OSError, match="nobody reads it"):
        write_atomically(fifo, b"new")
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize("appended", [True, False])
def test_what_the_standard_output_leads_to_keeps_what_was_printed(tmp_path, appended):
    out = tmp_path / "out"
    with out.open("ab" if appended else "wb") as stdout:
        subprocess.run([sys.executable, "-c", PRINTED], stdout=stdout, check=True)
    assert out.read_text().split() == ["before", "export", "after"]


def test_what_cannot_be_written_at_the_end_is_told_before(tmp_path, fifo):
    (tmp_path / "file").touch(mode=0o444)
    for path, reason in {
        fifo: "not a regular file",
        tmp_path: "not a regular file",
        Path("/dev/null"): "not a regular file",
        tmp_path / "file": "read-only",
        tmp_path / "file" / "report.json": "Not a directory",
    }.items():
        with pytest.raises(OSError, match=reason):
            prepare(path)
    prepare(tmp_path / "deep" / "er" / "report.json")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "er", "fifo", "file"]


def test_who_may_not_write_is_told():
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "history.jsonl").touch(mode=0o644)
        os.seteuid(65_534)
        try:
            for path in (folder / "report.json", folder / "deep" / "report.json", folder / "history.jsonl"):
                with pytest.raises(PermissionError):
                    prepare(path)
        finally:
            os.seteuid(0)
