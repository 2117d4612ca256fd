"""Launching: what workers are given, what their traces mean, and that they end with all that they started."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
from leftovers import has_ended, wait_until
from unit_examples import CASE, crashed, emulated_run, gpu_environment, measurement, out_of_memory

from pytest_gputrain.execution.launch import environment, ranks
from pytest_gputrain.execution.launch.case_folder import folder_of
from pytest_gputrain.execution.launch.environment import SessionEnvironment, refuse_recursion, worker_environment
from pytest_gputrain.execution.launch.merge import merge, merge_emulated
from pytest_gputrain.execution.launch.processes import CASE_FOLDER, FreshProcess
from pytest_gputrain.execution.launch.ranks import Rank, exit_text, follow, timed_out
from pytest_gputrain.records import (
    FORMAT,
    Crashed,
    EmulatedRun,
    Event,
    ExpectedTime,
    GpuSteps,
    OutOfMemory,
    Served,
    Task,
    TimedOut,
)
from pytest_gputrain.records import Rank as OfRank
from pytest_gputrain.records.node_protocol import write_record
from pytest_gputrain.utils.linux import PARENT
from pytest_gputrain.worker.progress import Progress

TASK = Task(case=CASE, scale="full", device_type="gpu", root=".")


# Environment

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
FIXED = {
    "PYTHONSAFEPATH": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
}
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
OWN = msgspec.structs.replace(TASK, case=CASE.replace(code="test_it.py::build", method="custom"))


@pytest.mark.parametrize(
    ("task", "adds"),
    [
        (TASK, {"HF_HUB_OFFLINE": "1"}),
        (OWN, {}),
        (msgspec.structs.replace(TASK, device_type="cpu"), {"HF_HUB_OFFLINE": "1", **SINGLE_THREAD}),
        (
            msgspec.structs.replace(TASK, emulated="h100"),
            {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        ),
    ],
    ids=["gpu", "own code may reach a hub", "cpu", "emulated"],
)
def test_a_worker_has_the_session_s_environment_with_the_task_s_changes_and_what_must_not_vary(task, adds, monkeypatch):
    monkeypatch.setenv("OF_ANOTHER_TEST", "1")
    began = dict.fromkeys(("KEPT", "CHANGED", "DELETED", *LAUNCHER, "PYTEST_CURRENT_TEST"), "1") | {"PATH": "/bin"}
    task = msgspec.structs.replace(task, variables={"CHANGED": "2", "DELETED": None, "NEW": "3", "PYTHONHASHSEED": "7"})
    assert worker_environment(task, (), began) == {
        "KEPT": "1",
        "CHANGED": "2",
        "NEW": "3",
        PARENT: str(os.getpid()),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}/bin",
        **({} if task.emulated else {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}),
        **FIXED,
        **adds,
    }
    assert worker_environment(task, ())["OF_ANOTHER_TEST"] == "1"


def test_processes_of_several_nodes_choose_their_network_themselves_and_those_of_one_without_a_loopback(monkeypatch):
    assert "GLOO_SOCKET_IFNAME" not in worker_environment(msgspec.structs.replace(TASK, nodes=2), (), {})
    monkeypatch.setattr(environment, "_loopback", lambda: "")
    assert worker_environment(TASK, (), {"GLOO_SOCKET_IFNAME": "eth7"})["GLOO_SOCKET_IFNAME"] == "eth7"


def test_changes_are_those_that_a_worker_sees(monkeypatch):
    monkeypatch.setenv("DELETED", "1")
    session = SessionEnvironment()
    monkeypatch.setenv("AT_IMPORT", "1")
    session.collected(elsewhere=True)
    monkeypatch.delenv("DELETED")
    monkeypatch.setenv("B_NEW", "1")
    unseen = {"RANK", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED", "HF_HUB_OFFLINE"}
    for name in (*unseen, "PYTEST_CURRENT_TEST"):
        monkeypatch.setenv(name, "41")
    assert list(session.changes(TASK).items()) == [("AT_IMPORT", "1"), ("B_NEW", "1"), ("DELETED", None)]
    assert session.changes(TASK, prefetched=True) == {"AT_IMPORT": "1"}
    assert session.changes(OWN).keys() - session.changes(TASK).keys() == {"HF_HUB_OFFLINE"}
    assert session.changes(TASK, inline=True).keys() >= unseen


def test_a_worker_starts_no_workers(monkeypatch):
    refuse_recursion()
    monkeypatch.setenv(PARENT, "1")
    with pytest.raises(RuntimeError, match=r"^a worker of pytest-gputrain must not start workers"):
        refuse_recursion()


def _of_rank(number, **fields):
    """Figures of which each rank has the larger in turn, so that a rank's alone are nobody's."""
    many, few = (10, 1) if number else (1, 10)
    return measurement(
        step_seconds=(float(many), float(few)),
        warmup_seconds=(float(many),),
        updates=number,
        gpu_steps=GpuSteps(seconds=(few / 2, many / 2), collective_seconds=(many / 4, few / 4)),
        losses=(float(many), float(few)),
        batch_size=2,
        model_bytes=100 * many,
        peak_allocated_bytes=1000 * few,
        peak_reserved_bytes=2000 * few,
        device_used_bytes=3000 * many,
        peak_host_bytes=many,
        flops_per_step=many,
        recomputed_flops_per_step=few,
        own_seconds=(0.5, 0.25 * many),
        core_wait_share=many / 10,
        environment=gpu_environment(host="one"),
        **fields,
    )


def test_figures_of_a_case_are_of_the_slowest_the_largest_or_of_all_its_ranks():
    server = Served(updates=3, rows=4, model_bytes=5000, peak_allocated_bytes=99_000, peak_host_bytes=6)
    workers = [_of_rank(0), _of_rank(1)]
    own = ("step_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes", "own_seconds")
    of_server = OfRank(role="server", step_seconds=(), peak_allocated_bytes=99_000, peak_host_bytes=6, updates=3, rows=4)
    assert merge([*workers, server]) == msgspec.structs.replace(
        workers[0],
        step_seconds=(10.0, 10.0),
        core_wait_share=1.0,
        warmup_seconds=(10.0,),
        gpu_steps=GpuSteps(seconds=(5.0, 5.0), collective_seconds=(0.25, 0.25)),
        losses=(5.5, 5.5),
        batch_size=4,
        model_bytes=5000,
        peak_allocated_bytes=99_000,
        peak_reserved_bytes=20_000,
        device_used_bytes=30_000,
        peak_host_bytes=17,
        flops_per_step=11,
        recomputed_flops_per_step=11,
        own_seconds=(),
        ranks=(*(OfRank(**{name: getattr(worker, name) for name in own}) for worker in workers), of_server),
    )


def test_what_no_rank_knows_is_not_known_and_what_one_knows_is():
    unknown = {"model_bytes": None, "flops_per_step": None, "recomputed_flops_per_step": None, "peak_reserved_bytes": None}
    silent, heard = (msgspec.structs.replace(_of_rank(1), **fields) for fields in (unknown, {}))
    assert {getattr(merge([silent, silent]), name) for name in unknown} == {None}
    for replies in ([silent, heard], [heard, silent]):
        assert all(getattr(merge(replies), name) == getattr(heard, name) for name in unknown)


def _emulated(rank, **fields):
    many, few = (10, 1) if rank else (1, 10)
    figures = {
        "device_name": "NVIDIA H100",
        "device_memory_bytes": 1000,
        "runtime": "13.0",
        "packages": {},
        "processes": 2,
        "fits": True,
        "peak_allocated_bytes": 100 * many,
        "peak_reserved_bytes": 200 * few,
        "device_used_bytes": 300 * few,
        "model_bytes": few,
        "flops_per_step": many,
        "notes": ("common",),
    }
    return EmulatedRun(**{**figures, **fields})


def test_memory_on_emulated_gpus_is_of_the_rank_that_needs_most_which_is_named():
    named = "rank 1 needs most memory: 900 B more allocated than rank 0, which needs least"
    assert merge_emulated([_emulated(0), _emulated(1)]) == _emulated(
        1,
        allocated_by_rank=(100, 1000),
        peak_reserved_bytes=2000,
        device_used_bytes=3000,
        model_bytes=10,
        flops_per_step=11,
        notes=("common", named),
    )
    assert merge_emulated([_emulated(1), _emulated(1)]).notes == ("common",)


def test_the_expected_time_on_emulated_gpus_is_of_the_slowest_rank_and_unknown_if_one_is():
    slow, fast, unknown = (ExpectedTime(seconds=seconds) for seconds in (2.0, 1.0, None))

    def merged(*of_ranks):
        return merge_emulated([_emulated(rank, expected=of_rank) for rank, of_rank in enumerate(of_ranks)]).expected

    assert (merged(slow, fast), merged(fast, slow), merged(None, slow)) == (slow, slow, slow)
    assert merged(slow, unknown) == unknown
    assert merged(None, None) is None


def test_the_rank_that_does_not_fit_its_emulated_gpu_ends_the_case_and_is_named(rank):
    unfit = _emulated(1, fits=False, refused="CUDA out of memory")
    failing = rank(number=1, reply_json=msgspec.json.encode(unfit))
    assert follow([failing], 60, print) == unfit
    named = "rank 1 does not fit, and the others were ended"
    several = follow([rank(polls=10_000), failing], 60, print)
    assert several == msgspec.structs.replace(unfit, notes=("common", named))


@pytest.mark.parametrize(
    ("hosts", "named"), [(("node-2", "node-2", "node-1", "node-1"), ("node-2", "node-1")), (("node-1", "node-1"), ())]
)
def test_several_nodes_are_named_in_the_order_of_their_ranks(hosts, named):
    merged = merge([measurement(environment=gpu_environment(host=host)) for host in hosts])
    assert merged.environment.hosts == named


def answering(exit_code, polls):
    """Return a process that ends by itself, with this exit code, when it has been asked so often."""
    running = iter(range(polls))
    return mock.Mock(poll=lambda: exit_code if next(running, None) is None else None, killed_for_memory=lambda before: False)


@pytest.fixture
def rank(tmp_path):
    """Makes a rank whose process has ended (after ``polls`` questions) with an exit code, and left these files."""

    def make(exit_code=0, number=0, polls=0, **files):
        process = answering(exit_code, polls)
        made = Rank(number, tmp_path / "case", lambda folder, rank: process)
        for name, data in files.items():
            (made.folder / name.replace("_", ".")).write_bytes(data)
        return made

    (tmp_path / "case").mkdir()
    return make


def _events(*events):
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


PROGRESS = _events(Event(phase="build"), Event(phase="measure", step=2))


@pytest.mark.parametrize(
    ("exit_code", "said"),
    [(0, "with exit code 0"), (3, "with exit code 3"), (-11, "by SIGSEGV"), (-1, "by SIGHUP"), (-99, "by signal 99")],
)
def test_an_end_without_a_reply_is_told_with_what_was_printed(rank, exit_code, said):
    ended_rank = rank(exit_code, progress_jsonl=PROGRESS, stdout_txt=b"out\n", stderr_txt=b"err\n", stacks_txt=b"stacks\n")
    sentence, detail = f"the worker ended {said} without a reply", "out\nerr\nstacks\n"
    assert ended_rank.failed()
    assert ended_rank.reply() == Crashed(sentence=sentence, phase="measure", step=2, detail=detail, exit_code=exit_code)
    assert exit_text(exit_code) == said


def test_a_crash_tells_its_own_words_last_and_the_end_of_long_stacks(rank):
    reply = rank(stdout_txt=b"out\n", reply_json=msgspec.json.encode(crashed(detail="traceback"))).reply()
    assert reply == crashed(detail="out\ntraceback")
    assert rank(1, number=1, stacks_txt=b"x" * 9000 + b"end").reply().detail == "x" * 7997 + "end"


def test_a_kill_that_the_kernel_counted_since_the_start_is_for_memory_of_the_host(rank, monkeypatch):
    monkeypatch.setattr(ranks, "oom_kills", lambda: 7)
    ended_rank = rank(-9, progress_jsonl=PROGRESS)
    ended_rank.process.killed_for_memory = lambda kills_before: kills_before == 7
    out_of_host = OutOfMemory(where="host", phase="measure", step=2, message="killed by the kernel's OOM killer")
    assert ended_rank.reply() == out_of_host


@pytest.mark.parametrize(
    ("reply", "exit_code", "sentence"),
    [
        (msgspec.json.encode(measurement()), 3, "the worker replied, then ended with exit code 3"),
        (b'{"format": 99}', 0, f"the worker's reply has format 99, this version reads format {FORMAT}: the worker imports"),
        (b'{"outcome"', 0, "the worker's reply cannot be read: "),
        (b'{"outcome": "unheard of"}', 0, "the worker's reply cannot be read: "),
    ],
    ids=["exit", "format", "cut", "unknown"],
)
def test_a_reply_that_cannot_be_taken_is_a_crash(rank, reply, exit_code, sentence):
    crash = rank(exit_code, reply_json=reply, progress_jsonl=PROGRESS, stderr_txt=b"err").reply()
    assert crash.sentence.startswith(sentence)
    assert (crash.phase, crash.step, crash.detail, crash.exit_code) == ("measure", 2, "err", exit_code)


@pytest.mark.parametrize(("free", "is_told"), [((1 << 20) - 1, True), (1 << 20, False)])
def test_a_full_disk_is_told_as_what_may_have_kept_a_worker_from_replying(rank, free, is_told, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert rank(1).reply().sentence.endswith(f"is free in {tmp_path}" if is_told else "without a reply")


@pytest.mark.parametrize(("exit_code", "is_told"), [(1, True), (-signal.SIGXFSZ, True), (-9, False)])
def test_a_limit_on_files_is_told_as_what_may_have_kept_a_worker_from_replying(rank, exit_code, is_told, monkeypatch):
    monkeypatch.setattr(ranks.resource, "getrlimit", lambda which: (2048, 2048))
    told = (
        rank(exit_code)
        .reply()
        .sentence.endswith("files may have at most 2.00 KiB here (ulimit -f), which may be too little for its reply")
    )
    assert told == is_told


def test_letters_that_utf_8_does_not_have_are_escaped_in_a_record(tmp_path):
    """Half a surrogate pair in the message of an exception must not cost the message."""
    write_record(tmp_path / "reply.json", crashed(sentence="ValueError: \ud800 \u00e9", detail="\udcff"))
    reply = msgspec.json.decode((tmp_path / "reply.json").read_bytes(), type=Crashed)
    assert (reply.sentence, reply.detail) == ("ValueError: \\ud800 \u00e9", "\\udcff")


def test_lines_of_progress_are_read_once_when_they_are_whole(rank):
    ended_rank = rank()
    path = ended_rank.folder / "progress.jsonl"
    assert (ended_rank.progress.read(), ended_rank.progress.last) == ([], Event(phase="start"))
    first, second = Event(phase="build"), Event(phase="count")
    line = _events(second)
    path.write_bytes(_events(first) + line[:5])
    assert ended_rank.progress.read() == [first]
    with path.open("ab") as file:
        file.write(line[5:] + b"\xff no event\n")
    assert (ended_rank.progress.read(), ended_rank.progress.last) == ([second], second)
    assert (ended_rank.progress.read(), ended_rank.progress.last) == ([], second)


def test_of_what_a_worker_prints_the_end_is_kept_and_the_disk_is_spared(rank):
    ended_rank = rank(1)
    path = ended_rank.folder / "stdout.txt"
    ended_rank.limit_output()  # not there yet
    path.write_bytes(b"x" * (1 << 20))
    ended_rank.limit_output()
    assert path.stat().st_size == 1 << 20
    path.write_bytes(b"x" * (1 << 20) + b"end of the first; ")
    ended_rank.limit_output()
    assert path.stat().st_size == 0
    path.write_bytes(b"and \xff of the second")
    detail = ended_rank.reply().detail
    assert detail.endswith("xx end of the first; and \ufffd of the second".replace("xx ", "x"))
    assert len(detail) == 8000


def test_a_death_without_a_word_is_the_cause_then_memory_then_the_earliest(rank):
    silent = rank(-9, number=0)
    memory = rank(number=1, reply_json=msgspec.json.encode(out_of_memory()))
    early, late = (rank(number=number, reply_json=msgspec.json.encode(crashed())) for number in (2, 3))
    for at, each_rank in enumerate((early, late, memory)):
        os.utime(each_rank.folder / "reply.json", ns=(at, 1_000 + at))
    by_cause = sorted([late, early, memory, silent], key=Rank.failure_sort_key)
    assert [each_rank.number for each_rank in by_cause] == [0, 1, 2, 3]


def test_the_failed_rank_is_named_where_there_are_several(rank):
    failing = rank(number=1, reply_json=msgspec.json.encode(crashed()))
    assert follow([rank(polls=9), failing], 60, print) == crashed(rank=1)
    assert follow([failing], 60, print) == crashed()


@pytest.mark.parametrize(("grace_seconds", "cause"), [(0.0, 0), (30.0, 1)])
def test_a_death_that_is_told_late_is_still_the_cause(rank, grace_seconds, cause):
    ranks_ = [rank(reply_json=msgspec.json.encode(crashed())), rank(-signal.SIGKILL, number=1, polls=5)]
    assert follow(ranks_, 60, print, grace_seconds=grace_seconds).rank == cause


@pytest.mark.parametrize(
    ("polls", "sentence"),
    [(0, "ValueError: loss is NaN"), (3, "node-2 was switched off"), (10_000, "node-2 was switched off")],
)
def test_the_first_bad_news_are_the_cause(rank, polls, sentence):
    """A rank that fails before there is trouble elsewhere, one that fails after, and one that tells nothing."""
    asked = iter(range(10_000))
    ranks_ = [rank(polls=polls, reply_json=msgspec.json.encode(crashed())), rank(number=1, polls=10_000)]
    trouble = crashed(sentence="node-2 was switched off")
    reply = follow(ranks_, 60, print, trouble=lambda: trouble if next(asked) >= 2 else None, grace_seconds=0.3)
    assert reply.sentence == sentence


def test_a_case_that_fails_under_the_profiler_lacks_nothing_but_gpu_seconds(rank, monkeypatch):
    monkeypatch.setattr(ranks, "_STACKS_SECONDS", 0.05)
    figures = [msgspec.json.encode(_of_rank(number)) for number in range(2)]
    profiling = _events(Event(phase="profile"))
    waiting = rank(polls=10_000, figures_json=figures[0], progress_jsonl=profiling)
    unprofiled = "without GPU seconds, because a step under torch's profiler failed"
    raised = msgspec.json.encode(crashed(sentence="OSError: no space is left", phase="profile"))
    for files, exit_code, why in (
        ({"reply_json": raised}, 0, "OSError: no space is left"),
        ({"progress_jsonl": profiling}, -signal.SIGSEGV, "the worker ended by SIGSEGV without a reply"),
    ):
        failing = rank(exit_code, number=1, figures_json=figures[1], **files)
        reply = follow([waiting, failing], 60, print)
        assert reply == msgspec.structs.replace(merge([_of_rank(0), _of_rank(1)]), notes=(f"{unprofiled} ({why})",))
        (failing.folder / "reply.json").unlink(missing_ok=True)
    hanging = rank(number=1, polls=10_000, figures_json=figures[1])
    assert follow([waiting, hanging], 0.1, print).notes == (f"{unprofiled} (it did not end in 100 ms)",)
    early = rank(number=1, figures_json=figures[1], reply_json=msgspec.json.encode(crashed(phase="check")))
    assert follow([waiting, early], 60, print) == crashed(phase="check", rank=1, measured=merge([_of_rank(0), _of_rank(1)]))


def test_a_case_ends_when_all_its_ranks_have(rank):
    both = [rank(number=number, polls=number, reply_json=msgspec.json.encode(_of_rank(number))) for number in range(2)]
    assert follow(both, 60, print) == merge([_of_rank(0), _of_rank(1)])
    assert follow([rank(reply_json=msgspec.json.encode(emulated_run()))], 60, print) == emulated_run()


def test_every_event_of_the_first_rank_is_shown_once_also_those_of_the_last_moment(rank):
    shown = []
    first = rank(reply_json=msgspec.json.encode(_of_rank(0)), progress_jsonl=_events(Event(phase="build")))
    other = rank(number=1, polls=3, reply_json=msgspec.json.encode(_of_rank(1)), progress_jsonl=PROGRESS)

    def end():
        (first.folder / "progress.jsonl").write_bytes(PROGRESS)
        return 0

    first.process.poll = end
    follow([first, other], 60, shown.append)
    assert shown == [Event(phase="build"), Event(phase="measure", step=2)]


def test_what_is_not_over_in_time_is_told_with_the_place_of_every_rank(rank, monkeypatch):
    monkeypatch.setattr(ranks, "_STACKS_SECONDS", 0.05)
    first = rank(polls=10_000, progress_jsonl=PROGRESS, stacks_txt=b"in all_reduce")
    second = rank(number=1, polls=10_000, stacks_txt=b"asleep")
    late = TimedOut(timeout_seconds=0.1, phase="measure", step=2, detail="rank 0:\nin all_reduce\nrank 1:\nasleep")
    assert follow([first, second], 0.1, print) == late
    assert timed_out([first], 9).detail == "in all_reduce"


@pytest.mark.parametrize(("phase", "advice"), [("import", ""), ("build", ", and torch.compile was compiling")])
def test_torch_is_not_said_to_compile_while_it_is_imported(rank, phase, advice):
    stacks = b'File "/lib/torch/_dynamo/convert_frame.py", line 62 in <module>'
    late = rank(polls=10_000, progress_jsonl=_events(Event(phase=phase)), stacks_txt=stacks)
    assert timed_out([late], 9).advice == advice


def test_stacks_are_asked_for_and_waited_for(rank, monkeypatch):
    monkeypatch.setattr(ranks, "_STACKS_SECONDS", 60)
    ended_rank = rank(polls=10_000)
    answer = threading.Timer(0.1, (ended_rank.folder / "stacks.txt").write_bytes, [b"in build"])
    ended_rank.process.ask_for_stacks = answer.start
    assert ended_rank.stacks() == "in build"


def test_a_case_has_a_folder_with_its_task_for_as_long_as_it_or_the_process_runs(tmp_path):
    open_files = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(KeyError), folder_of(TASK, tmp_path) as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith("gputrain-")
        assert msgspec.json.decode((folder / "case.json").read_bytes(), type=Task) == TASK
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == open_files


@contextlib.contextmanager
def _family(script, **environment):
    """A worker, and the process that it has started and told of."""
    worker = subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True, env=os.environ | environment
    )
    other = int(worker.stdout.readline())
    try:
        yield worker, other
    finally:
        for pid in (worker.pid, other):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        worker.communicate()


@pytest.mark.parametrize(
    "script",
    [
        "sleep 600 & echo $!; wait",
        "setsid sleep 600 & echo $!; wait",
        "setsid sh -c 'setsid sleep 600 & echo $!; wait' & wait",
    ],
    ids=["group", "session", "grandchild"],
)
def test_a_worker_ends_with_what_it_started(script):
    with _family(script) as (worker, child), _family("sleep 600 & echo $!; wait") as (_, other):
        process = FreshProcess(worker)
        assert process.poll() is None
        process.end()
        assert process.poll() == -signal.SIGKILL
        wait_until(lambda: has_ended(child), 10)
        assert not has_ended(other)
        process.end()  # of one that has ended already


def test_daemons_of_a_case_end_with_it_and_others_stay(tmp_path):
    script = "setsid sleep 600 & echo $!"
    with contextlib.ExitStack() as stack:
        with folder_of(TASK, tmp_path) as folder:
            _, daemon = stack.enter_context(_family(script, **{CASE_FOLDER: str(folder)}))
            _, other = stack.enter_context(_family(script, **{CASE_FOLDER: f"{folder}2"}))
            shutil.rmtree(folder)  # nor does it matter who was here before
        wait_until(lambda: has_ended(daemon), 10)
        assert not has_ended(other)


@pytest.mark.parametrize(
    ("exit_code", "kills_before", "is_for_memory"),
    [(-signal.SIGKILL, 4, True), (-signal.SIGKILL, 5, False), (-signal.SIGSEGV, 4, False)],
)
def test_only_a_kill_that_the_kernel_counted_was_for_memory(exit_code, kills_before, is_for_memory, monkeypatch):
    monkeypatch.setattr("pytest_gputrain.execution.launch.processes.oom_kills", lambda: 5)
    ended = FreshProcess(SimpleNamespace(pid=0, poll=lambda: exit_code))
    assert ended.killed_for_memory(kills_before) is is_for_memory


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_progress_that_cannot_be_written_ends_no_case():
    progress = Progress(Path("/dev/full"))
    progress.enter("measure")
    progress.stepped(1, 0.5, None)
    assert (progress.phase, progress.step) == ("measure", 1)
