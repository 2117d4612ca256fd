"""Several ranks as one case: their figures, and which of them tells why it failed."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest
from unit_examples import crashed, gpu_environment, measurement

from pytest_gputrain.execution.launch.processes import Process
from pytest_gputrain.execution.launch.ranks import Rank, follow, merge
from pytest_gputrain.records import Crashed, Measurement
from pytest_gputrain.worker.progress import Progress


def test_nodes_are_named_in_the_order_of_their_ranks() -> None:
    hosts = ("node-2", "node-2", "node-1", "node-1")
    merged = merge([measurement(environment=gpu_environment(host=host)) for host in hosts])
    assert isinstance(merged, Measurement)
    assert merged.environment.hosts == ("node-2", "node-1")


def test_one_node_is_not_named_twice() -> None:
    merged = merge([measurement(), measurement()])
    assert isinstance(merged, Measurement)
    assert merged.environment.hosts == ()


class Answering(Process):
    """Ends by itself, with this exit code, when it has been asked so often."""

    def __init__(self, exit_code: int, polls: int) -> None:
        self.exit_code, self.polls = exit_code, polls

    def poll(self) -> int | None:
        self.polls -= 1
        return self.exit_code if self.polls < 0 else None

    def killed_for_memory(self, kills_before: int) -> bool:
        return False

    def ask_for_stacks(self) -> None:
        """Has none."""

    def end(self) -> None:
        """Has ended."""


@pytest.mark.parametrize(("grace_seconds", "cause"), [(0.0, 0), (30.0, 1)])
def test_a_death_that_is_told_late_is_still_the_cause(tmp_path: Path, grace_seconds: float, cause: int) -> None:
    processes = [Answering(0, polls=0), Answering(-signal.SIGKILL, polls=5)]
    ranks = [Rank(number, tmp_path, lambda folder, rank: processes[rank]) for number in range(2)]
    (tmp_path / "rank0" / "reply.json").write_bytes(msgspec.json.encode(crashed(sentence="connection closed by peer")))
    reply = follow(ranks, 60, lambda event: None, grace_seconds=grace_seconds)
    assert isinstance(reply, Crashed)
    assert reply.rank == cause


def test_trouble_counts_where_no_rank_tells_of_its_cause(tmp_path: Path) -> None:
    rank = Rank(0, tmp_path, lambda folder, rank: Answering(0, polls=10_000))
    assert follow([rank], 60, lambda event: None, trouble=lambda: crashed(sentence="srun is gone")) == crashed(
        sentence="srun is gone"
    )


@pytest.mark.parametrize(("polls", "sentence"), [(0, "connection closed by peer"), (3, "node-2 was switched off")])
def test_the_first_bad_news_are_the_cause(tmp_path: Path, polls: int, sentence: str) -> None:
    """A rank that fails before there is trouble elsewhere, and after."""
    asked = iter(range(10_000))
    processes = [Answering(0, polls=polls), Answering(0, polls=10_000)]
    ranks = [Rank(number, tmp_path, lambda folder, rank: processes[rank]) for number in range(2)]
    (tmp_path / "rank0" / "reply.json").write_bytes(msgspec.json.encode(crashed(sentence="connection closed by peer")))
    reply = follow(
        ranks,
        60,
        lambda event: None,
        trouble=lambda: crashed(sentence="node-2 was switched off") if next(asked) >= 2 else None,
        grace_seconds=0.3,
    )
    assert isinstance(reply, Crashed)
    assert reply.sentence == sentence


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_progress_that_cannot_be_written_ends_no_case() -> None:
    progress = Progress(Path("/dev/full"))
    progress.enter("measure")
    progress.stepped(1, 0.5, None)
    assert (progress.phase, progress.step) == ("measure", 1)
