"""Files that others wrote are read to an end, whatever lies in their place, and what is wrong with them is one sentence."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rights import without_rights_of_root
from test_launching import answering
from unit_examples import CASE, KINDS, baseline, baseline_run, report, result

import pytest_gputrain
from pytest_gputrain.cli import check_baselines
from pytest_gputrain.cli.main import main
from pytest_gputrain.execution.launch.ranks import Rank
from pytest_gputrain.records import Crashed
from pytest_gputrain.records.node_protocol import BadRecord, Nodes, read_record
from pytest_gputrain.report import json_report
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.utils import reading
from pytest_gputrain.utils.reading import opened, read_message, read_whole, tail

ROOT = Path(pytest_gputrain.__file__).parent
KEY = str(CASE)


@pytest.fixture
def endless(tmp_path):
    path = tmp_path / "endless"
    path.symlink_to("/dev/zero")
    return path


def test_only_regular_files_are_read_and_nobody_waits(fifo, endless, tmp_path):
    for path, reason in {fifo: "it is a FIFO", endless: "it is a device", tmp_path: "directory"}.items():
        with pytest.raises(OSError, match=reason):
            read_whole(path)
        assert tail(path) == ""


def test_what_a_process_of_a_case_wrote_is_no_link(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_whole(tmp_path / "link") == read_message(tmp_path / "file") == b"text"
    with pytest.raises(OSError, match="it is a link"):
        read_message(tmp_path / "link")


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    big = tmp_path / "big"
    for most, read_ in (("_MOST_BYTES", read_whole), ("_MOST_OF_A_MESSAGE", read_message)):
        monkeypatch.setattr(reading, most, 3 << 20)
        big.write_bytes(b"x" * (3 << 20))
        assert len(read_(big)) == 3 << 20
        big.write_bytes(b"x" * ((3 << 20) + 1))
        with pytest.raises(OSError, match="it has more than 3 MiB"):
            read_(big)


def test_what_a_shell_puts_for_a_command_is_read_where_it_is_named_and_no_other_pipe(tmp_path, fifo):
    """``gputrain export <(command)``, with more than the pipe holds."""
    say = [sys.executable, "-c", "print('x' * 300_000, end='')"]
    with subprocess.Popen(say, stdout=subprocess.PIPE) as writer:
        path = Path(f"/dev/fd/{writer.stdout.fileno()}")
        with pytest.raises(OSError, match="it is a FIFO"), opened(path):
            pass
        assert len(read_whole(path, pipe=True)) == 300_000
    with pytest.raises(OSError, match="it is a FIFO"):
        read_whole(fifo, pipe=True)


OWN = {
    "cases/architectures/facts.py": "the package's own",
    "hardware/amd.py": "ROCm's version, as installed",
    "hardware/catalog.py": "the package's own",
    "hardware/emulation/build.py": "the package's own",
    "hardware/emulation/libraries.py": "torch's, as installed",
    "hardware/emulation/wheels.py": "the package's own",
    "hardware/rates.py": "the package's own",
    "storage/result_cache.py": "the package's own, and what pip wrote",
    "utils/host.py": "the kernel's",
    "utils/linux.py": "the kernel's",
    "utils/reading.py": "the functions themselves",
}
"""Modules that read files as a whole which nobody else can have written, and whose."""


def test_all_other_modules_read_by_these_functions():
    def reads(node):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        named = node.func.attr in ("read_text", "read_bytes") and "/proc/" not in ast.unparse(node)
        return named and "environment.read_bytes" not in ast.unparse(node)  # of /proc

    modules = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
    found = {module for module, tree in modules.items() if any(map(reads, ast.walk(tree)))}
    assert found <= OWN.keys(), "read what others may write by utils/reading.py"


PLACES = {
    "device": lambda path: path.symlink_to("/dev/zero"),
    "FIFO": os.mkfifo,
    "circle": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "nowhere": lambda path: path.symlink_to("gone"),
    "forbidden": lambda path: path.touch(mode=0),
}
"""What may lie in the place of a file."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "words",
    [
        *("export FILE", "export --history FILE --format html", "trend FILE", "compare FILE FILE", "doctor --replay FILE"),
        "trend FILE --html page.html",
    ],
)
def test_no_subcommand_waits_for_what_is_no_file(words, place, capsys, monkeypatch, tmp_path):
    if "html" in words:
        pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    monkeypatch.chdir(tmp_path)
    PLACES[place](tmp_path / "FILE")
    with without_rights_of_root():
        assert main(words.split()) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "FILE" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


@pytest.mark.parametrize("place", ["fifo", "endless"])
def test_what_lies_in_the_place_of_a_reply_is_told(place, tmp_path, request):
    there = request.getfixturevalue(place)
    rank = Rank(0, tmp_path, lambda folder, number: answering(0, 0))
    for name in ("reply.json", "figures.json", "progress.jsonl", "stacks.txt"):
        (rank.folder / name).symlink_to(there)
    reply = rank.reply()
    assert isinstance(reply, Crashed)
    assert reply.sentence == "the worker's reply cannot be read: it is a link"
    assert rank.figures() is None
    (rank.folder / "reply.json").unlink()
    os.mkfifo(rank.folder / "reply.json")
    assert rank.reply().sentence == "the worker's reply cannot be read: it is a FIFO"


def test_progress_without_an_end_is_read_in_parts_and_what_follows_it_is_found(tmp_path):
    rank = Rank(0, tmp_path, lambda folder, number: answering(0, 0))
    with (rank.folder / "progress.jsonl").open("wb") as file:
        file.truncate(3 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"phase":"build"}\n')
    reads = [rank.progress.read() for _ in range(4)]
    assert [[event.phase for event in events] for events in reads] == [[], [], [], ["build"]]


def test_output_that_is_a_link_leaves_its_target_as_it_is(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"x" * (2 << 20))
    rank = Rank(0, tmp_path, lambda folder, number: answering(0, 0))
    (rank.folder / "stdout.txt").symlink_to(other)
    rank.limit_output()
    assert other.stat().st_size == 2 << 20


def test_a_record_of_a_node_that_is_none_is_told(tmp_path, fifo):
    (tmp_path / "nodes.json").write_text('{"count": "many"}')
    for path, reason in ((tmp_path / "nodes.json", "Expected `int`"), (fifo, "it is a FIFO")):
        with pytest.raises(BadRecord, match=f"{path.name} cannot be read: {reason}"):
            read_record(path, Nodes)
    assert read_record(tmp_path / "none", Nodes) is None


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, tmp_path):
    kind.update(tmp_path / "baselines", {KEY: kind.record})
    return tmp_path / "baselines"


def _refusals(kind, folder):
    """What pytest and check-baselines say of the only file."""
    with pytest.raises(BaselineError) as caught:
        kind.get(folder, KEY)
    return [str(caught.value), *map(str, check_baselines.check(folder))]


def test_damage_of_a_baseline_is_told_with_its_line_by_both_who_read_it(kind, folder):
    file = kind.file(folder)
    sound = file.read_bytes()
    assert list(check_baselines.check(folder)) == []
    name = CASE.model.encode()
    lines = sound.splitlines()
    number = next(number for number, line in enumerate(lines, 1) if b'"model"' in line)
    damages = {
        sound.replace(b'"model": "' + name, b'"model": "\xff' + name): ("0xff", number),
        b"\xef\xbb\xbf" + sound: ("byte-order mark", 1),
        sound.replace(b'"format"', b'"format": 1,\n"format"'): ("format", 3),
    }
    for damage, (reason, line) in damages.items():
        assert damage != sound
        file.write_bytes(damage)
        by_pytest, by_command = _refusals(kind, folder)
        assert reason in by_pytest
        assert reason in by_command
        assert by_command.startswith(f"{file}:{line}: ")


def test_a_fifo_in_the_place_of_a_baseline_is_told(kind, folder):
    file = kind.file(folder)
    file.unlink()
    os.mkfifo(file)
    by_pytest, by_command = _refusals(kind, folder)
    assert by_pytest == f"{file} cannot be read: it is a FIFO"
    assert by_command == f"{file}:1: it cannot be read: it is a FIFO"


def test_folders_that_may_not_be_read_are_told(kind, folder, capsys):
    file = kind.file(folder)
    file.parent.chmod(0)
    try:
        with without_rights_of_root():
            by_pytest, by_command = _refusals(kind, folder)
            assert main(["check-baselines", str(folder)]) == 1
    finally:
        file.parent.chmod(0o755)
    assert by_pytest == f"{file} cannot be read: Permission denied"
    assert by_command == f"{file.parent}:1: it cannot be read: Permission denied"


def test_what_a_known_field_may_be_without_is_not_unknown(kind, folder):
    file = kind.file(folder)
    document = json.loads(file.read_bytes())
    (stored,) = document["cases"].values()
    entries = stored[kind.entries]
    for entry in entries if isinstance(entries, list) else entries.values():
        entry |= {"counts": None, "largest": {}}
    file.write_text(json.dumps(document))
    assert kind.get(folder, KEY).case == CASE
    assert not any("unknown" in problem.sentence for problem in check_baselines.check(folder))


def test_a_measured_run_without_step_times_is_impossible_not_unknown(tmp_path):
    measured = KINDS[0]
    file = measured.update(tmp_path, {KEY: baseline(baseline_run(step_seconds=(1.0,)))})
    document = json.loads(file.read_bytes())
    document["cases"][KEY]["runs"][0]["step_seconds"] = []
    file.write_text(json.dumps(document))
    with pytest.raises(BaselineError, match="holds impossible figures for"):
        measured.get(tmp_path, KEY)


def test_a_report_with_a_result_without_replies_is_refused(tmp_path, capsys):
    path = tmp_path / "report.json"
    json_report.write(report(result(CASE)), path)
    document = json.loads(path.read_bytes())
    document["results"][0]["replies"] = []
    path.write_text(json.dumps(document))
    assert main(["compare", str(path), str(path)]) == 2
    assert "replies" in capsys.readouterr().err
