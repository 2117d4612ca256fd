"""The jobs of a fleet, with a scheduler and a clock that do as they are told: what is submitted when, what is lost how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from unit_examples import CASE, measurement

from pytest_gputrain.execution.fleet.job_queue import ASK_SECONDS, GRACE_SECONDS, LEAST_WAITING, Fleet
from pytest_gputrain.execution.fleet.scheduler import DELIVERY, OUTPUT, Doing, Job, JobRefused, QueueFull, Unreachable
from pytest_gputrain.records import Conditions, Delivery, Host, Lost, Order, Task
from pytest_gputrain.records.node_protocol import write_record

WAIT = 100.0
NODE = Host(name="n1", platform="h100", device="nvidia-h100-80gb-hbm3", gpus=1)
DONE = Delivery(host=NODE, reply=measurement())


def order(name: str = "a") -> Order:
    task = Task(case=CASE.replace(model=name), scale="full", device_type="gpu", root="/")
    conditions = Conditions(platform="h100", timeout_seconds=60, foreign="warn", shared="/")
    return Order(task=task, conditions=conditions, gpus=1, cpus=4)


class Scheduler:
    """Holds jobs by the name of their model, and says of them what a test wants."""

    name = "Test"
    ask_seconds = ASK_SECONDS
    remedies = {  # noqa: RUF012  # as the protocol has it
        "held": "wait",
        "refused": "ask otherwise",
        "unreachable": "call",
        "undelivered": "share gpu_shared",
    }

    def __init__(self) -> None:
        self.now = 0.0
        self.submitted: list[str] = []
        self.folders: dict[str, Path] = {}
        self.says: dict[str, Job] = {}
        self.cancelled: list[str] = []
        self.refusal: Exception | None = None
        self.silent = False
        self.most = 0
        self.script: dict[float, object] = {}

    def submit(self, order: Order, folder: Path) -> str:
        if self.refusal is not None:
            raise self.refusal
        job = f"{order.task.case.model}{sum(job.startswith(order.task.case.model) for job in self.submitted) or ''}"
        self.submitted.append(job)
        self.folders[job] = folder
        self.says.setdefault(job, Job("waiting", "Priority"))
        return job

    def jobs(self, ids: Sequence[str]) -> dict[str, Job]:
        if self.silent:
            raise Unreachable("no answer")
        self.most = max(self.most, len(ids))
        return {job: self.says[job] for job in ids if job in self.says}

    def cancel(self, ids: Sequence[str]) -> None:
        self.cancelled += ids

    def close(self) -> None:
        self.cancelled.append("closed")

    def deliver(self, job: str, delivery: Delivery = DONE) -> None:
        write_record(self.folders[job] / DELIVERY, delivery)
        self.says[job] = Job("ended")

    def sleep(self, seconds: float) -> None:
        """Lets time pass, and does what is due."""
        self.now += seconds
        assert self.now < 10_000, "the fleet waits for ever"
        for at in [at for at in self.script if at <= self.now]:
            self.script.pop(at)()  # type: ignore[operator]


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def fleet(scheduler: Scheduler, tmp_path: Path) -> Fleet:
    clock = {"now": lambda: scheduler.now, "sleep": scheduler.sleep}
    return Fleet(scheduler, tmp_path, most_jobs=3, wait_seconds=WAIT, **clock)  # type: ignore[arg-type]


def lost(outcome: Delivery | Lost) -> Lost:
    assert isinstance(outcome, Lost), outcome
    return outcome


def test_what_is_expected_is_submitted_in_its_order_as_far_as_the_window_reaches(fleet: Fleet, scheduler: Scheduler) -> None:
    fleet.expect(map(order, "abcde"))
    assert scheduler.submitted == ["a", "b", "c"]
    scheduler.deliver("b")
    assert fleet.run(order("b")) == DONE
    scheduler.now += ASK_SECONDS
    fleet.step()
    assert scheduler.submitted == ["a", "b", "c", "d"]
    assert scheduler.most <= 3


def test_as_many_wait_as_run(scheduler: Scheduler, tmp_path: Path) -> None:
    clock = {"now": lambda: scheduler.now, "sleep": scheduler.sleep}
    fleet = Fleet(scheduler, tmp_path, most_jobs=40, wait_seconds=WAIT, **clock)  # type: ignore[arg-type]
    fleet.expect(order(f"case-{number}-") for number in range(100))
    sizes = []
    for _ in range(4):
        sizes.append(len(scheduler.submitted))
        scheduler.says = dict.fromkeys(scheduler.submitted, Job("running"))
        scheduler.now += ASK_SECONDS
        fleet.step()
    assert sizes == [LEAST_WAITING, 2 * LEAST_WAITING, 4 * LEAST_WAITING, 40]


def test_what_is_held_does_not_keep_others_from_their_turn(scheduler: Scheduler, tmp_path: Path) -> None:
    clock = {"now": lambda: scheduler.now, "sleep": scheduler.sleep}
    fleet = Fleet(scheduler, tmp_path, most_jobs=40, wait_seconds=WAIT, **clock)  # type: ignore[arg-type]
    fleet.expect(order(f"wide-{number}-") for number in range(LEAST_WAITING))
    scheduler.says = dict.fromkeys(scheduler.submitted, Job("held", "no node has so many"))
    scheduler.script = {10: lambda: scheduler.deliver("a")}
    assert fleet.run(order("a")) == DONE
    assert scheduler.now < WAIT


def test_a_test_that_waits_goes_before_what_is_only_expected(fleet: Fleet, scheduler: Scheduler) -> None:
    fleet.expect(map(order, "abcde"))
    scheduler.script = {10: lambda: scheduler.deliver("a"), 20: lambda: scheduler.deliver("e")}
    assert fleet.run(order("e")) == DONE
    assert scheduler.submitted == ["a", "b", "c", "e", "d"]


def test_what_is_soon_to_be_asked_for_goes_before_what_was_expected_earlier(fleet: Fleet, scheduler: Scheduler) -> None:
    fleet.expect(map(order, "abcde"))
    fleet.expect([order("f"), order("g")], soon=True)
    for job in "abcfgde":
        scheduler.deliver(job)
        assert fleet.run(order(job)) == DONE
        scheduler.now += ASK_SECONDS
        fleet.step()
    assert scheduler.submitted == ["a", "b", "c", "f", "g", "d", "e"]


def test_what_arrives_before_a_test_asks_is_told_while_another_waits(scheduler: Scheduler, tmp_path: Path) -> None:
    arrivals: list[tuple[str, int, int]] = []

    clock = {"now": lambda: scheduler.now, "sleep": scheduler.sleep}
    fleet = Fleet(scheduler, tmp_path, most_jobs=9, wait_seconds=WAIT, **clock)  # type: ignore[arg-type]
    fleet.expect(map(order, "abb"))
    scheduler.script = {
        10: lambda: scheduler.deliver("b1"),  # with a gap before it
        20: lambda: scheduler.deliver("b"),
        30: lambda: scheduler.deliver("b2"),
        40: lambda: scheduler.deliver("a"),
    }
    for arrival in fleet.wait(order("a")):
        arrivals.append((arrival.task.case.model, len(fleet.arrived(arrival)), fleet.ordered(arrival)))
        if len(arrivals) == 1:
            fleet.expect([arrival], soon=True)
    assert fleet.run(order("a")) == DONE
    assert arrivals == [("b", 0, 2), ("b", 2, 3), ("b", 3, 3)]
    assert scheduler.submitted == ["a", "b", "b1", "b2"]
    # A test that asks knows best.
    fleet.expect([order("b")])
    scheduler.deliver("b3")
    for _ in range(4):
        assert list(fleet.wait(order("b"))) == []
        assert fleet.run(order("b")) == DONE


def test_each_run_of_a_case_is_a_job_of_its_own(fleet: Fleet, scheduler: Scheduler) -> None:
    fleet.expect([order(), order()])
    other = Delivery(host=NODE, refusal="another one")
    scheduler.deliver("a")
    scheduler.deliver("a1", other)
    assert [fleet.run(order()), fleet.run(order())] == [DONE, other]
    scheduler.script = {scheduler.now + 5: lambda: scheduler.deliver("a2")}
    assert fleet.run(order()) == DONE
    assert scheduler.submitted == ["a", "a1", "a2"]


@pytest.mark.parametrize("doing", ["node_died", "preempted", "cancelled"])
def test_a_job_that_was_ended_is_lost_with_the_words_of_the_scheduler(
    fleet: Fleet, scheduler: Scheduler, doing: Doing
) -> None:
    scheduler.says["a"] = Job("running", host="n7")
    scheduler.script = {10: lambda: scheduler.says.update(a=Job(doing, "it snowed"))}
    outcome = lost(fleet.run(order()))
    assert (outcome.cause, outcome.job, outcome.host) == (doing, "a", "n7")
    assert "it snowed" in outcome.sentence
    assert "pytest --lf" in outcome.sentence
    assert "\n" not in outcome.sentence


@pytest.mark.parametrize("doing", ["node_died", "preempted", "cancelled", "ended"])
def test_what_a_job_delivered_before_its_end_counts(fleet: Fleet, scheduler: Scheduler, doing: Doing) -> None:
    fleet.expect([order()])
    scheduler.deliver("a")
    scheduler.says["a"] = Job(doing)
    scheduler.now += ASK_SECONDS
    fleet.step()
    assert fleet.run(order()) == DONE


def test_a_delivery_may_come_late_but_not_later_than_the_grace(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.says["a"] = scheduler.says["b"] = Job("ended", "exit 0", "n7")
    scheduler.script = {GRACE_SECONDS - ASK_SECONDS: lambda: scheduler.deliver("a")}
    assert fleet.run(order("a")) == DONE
    began = scheduler.now
    outcome = lost(fleet.run(order("b")))
    assert outcome.cause == "no_delivery"
    assert GRACE_SECONDS <= scheduler.now - began <= GRACE_SECONDS + 3 * ASK_SECONDS
    assert "gpu_shared" in outcome.sentence


def test_a_delivery_that_cannot_come_any_more_is_not_waited_for(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.says["a"] = Job("ended", "killed", "n7", final=True)
    assert lost(fleet.run(order("a"))).cause == "no_delivery"
    assert scheduler.now <= 2 * ASK_SECONDS


def test_a_job_that_the_scheduler_has_forgotten_ended_nobody_knows_how(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.says["a"] = Job("running", host="n7")
    scheduler.script = {10: scheduler.says.clear}
    outcome = lost(fleet.run(order()))
    assert (outcome.cause, outcome.host) == ("no_delivery", "n7")
    assert outcome.sentence == (
        "Test does not know its job a on n7 any more; there is no delivery, and it is not known how it ended; "
        "pytest --lf runs it again"
    )
    assert GRACE_SECONDS <= scheduler.now - 10 <= GRACE_SECONDS + 3 * ASK_SECONDS


def test_what_a_forgotten_job_delivered_counts(fleet: Fleet, scheduler: Scheduler) -> None:
    def forget() -> None:
        scheduler.deliver("a")
        scheduler.says.clear()

    fleet.expect([order()])
    forget()
    assert fleet.run(order()) == DONE


def test_what_a_lost_job_printed_is_kept(fleet: Fleet, scheduler: Scheduler) -> None:
    def fail() -> None:
        (scheduler.folders["a"] / OUTPUT).write_text("No module named torch")
        scheduler.says["a"] = Job("ended", "exit 1")

    scheduler.script = {1: fail}
    outcome = lost(fleet.run(order()))
    assert outcome.detail == "No module named torch"


def test_a_job_that_waits_its_turn_waits_while_others_get_on(fleet: Fleet, scheduler: Scheduler) -> None:
    fleet.expect(map(order, "ab"))
    scheduler.script = {
        0.8 * WAIT: lambda: scheduler.says.update(b=Job("running")),
        1.6 * WAIT: lambda: scheduler.deliver("b"),
        2.4 * WAIT: lambda: scheduler.deliver("a"),
    }
    assert fleet.run(order("a")) == DONE
    assert scheduler.cancelled == []


def test_a_job_that_nothing_lets_start_is_given_up_and_cancelled(fleet: Fleet, scheduler: Scheduler) -> None:
    outcome = lost(fleet.run(order()))
    assert outcome.cause == "not_scheduled"
    assert "Priority" in outcome.sentence
    assert WAIT <= scheduler.now <= WAIT + 2 * ASK_SECONDS
    assert scheduler.cancelled == ["a"]


def test_a_job_that_is_held_does_not_profit_from_others(fleet: Fleet, scheduler: Scheduler) -> None:
    fleet.expect(map(order, "ab"))
    scheduler.says["a"] = Job("held", "PartitionNodeLimit")
    scheduler.script = {0.8 * WAIT: lambda: scheduler.says.update(b=Job("running"))}
    outcome = lost(fleet.run(order("a")))
    assert "PartitionNodeLimit" in outcome.sentence
    assert scheduler.now <= WAIT + 2 * ASK_SECONDS


def test_a_full_queue_is_waited_for(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.refusal = QueueFull("full")
    scheduler.script = {
        0.5 * WAIT: lambda: setattr(scheduler, "refusal", None),
        0.8 * WAIT: lambda: scheduler.deliver("a"),
    }
    assert fleet.run(order()) == DONE


def test_a_full_queue_is_waited_for_however_late_the_first_job_is_asked_for(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.now = began = 10 * WAIT
    scheduler.refusal = QueueFull("full")
    assert lost(fleet.run(order())).cause == "queue_full"
    assert scheduler.now - began >= WAIT


def test_all_that_wait_for_a_full_queue_are_lost_together(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.refusal = QueueFull("full")
    fleet.expect(map(order, "ab"))
    assert lost(fleet.run(order("a"))).cause == "queue_full"
    at = scheduler.now
    assert lost(fleet.run(order("b"))).cause == "queue_full"
    assert at <= WAIT + 2 * ASK_SECONDS
    assert scheduler.now == at


def test_a_refused_job_is_lost_at_once_and_no_other(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.refusal = JobRefused("no such partition")
    outcome = lost(fleet.run(order("a")))
    assert (outcome.cause, outcome.sentence, scheduler.now) == ("not_scheduled", "no such partition; ask otherwise", 0)
    scheduler.refusal = None
    scheduler.script = {5: lambda: scheduler.deliver("b")}
    assert fleet.run(order("b")) == DONE


def test_a_scheduler_may_be_silent_for_a_while_but_not_longer(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.says["a"] = Job("running")
    scheduler.script = {
        5: lambda: setattr(scheduler, "silent", True),
        0.9 * WAIT: lambda: setattr(scheduler, "silent", False),
        1.25 * WAIT: lambda: setattr(scheduler, "silent", True),
    }
    outcome = lost(fleet.run(order()))
    assert outcome.cause == "unreachable"
    assert scheduler.now >= 2.25 * WAIT - ASK_SECONDS


def test_a_node_that_is_not_what_was_asked_for_is_told(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.script = {5: lambda: scheduler.deliver("a", Delivery(host=NODE, unfit="it is an A100"))}
    outcome = lost(fleet.run(order()))
    assert outcome.cause == "unfit_node"
    assert "n1" in outcome.sentence
    assert "it is an A100" in outcome.sentence


def test_a_delivery_that_cannot_be_read_is_lost(fleet: Fleet, scheduler: Scheduler) -> None:
    scheduler.script = {5: lambda: (scheduler.folders["a"] / DELIVERY).write_text("{")}
    assert "cannot be read" in lost(fleet.run(order())).sentence


def test_what_is_dropped_is_cancelled_and_nothing_else(fleet: Fleet, scheduler: Scheduler) -> None:
    fleet.expect([order("a"), order("b"), order("a"), order("a")])
    scheduler.deliver("a")
    assert fleet.run(order("a")) == DONE
    fleet.drop(order("a"))
    assert scheduler.cancelled == ["a1"]
    fleet.close()
    assert scheduler.cancelled == ["a1", "b", "a1", "closed"], "dropped once more"


def test_what_ctrl_c_kept_from_being_cancelled_is_cancelled_in_the_end(
    fleet: Fleet, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.expect([order("a"), order("b")])
    with monkeypatch.context() as interrupted:
        interrupted.setattr(scheduler, "cancel", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fleet.drop(order("a"))
    fleet.close()
    assert sorted(scheduler.cancelled) == ["a", "b", "closed"]


def test_what_was_delivered_outlasts_being_dropped(fleet: Fleet, scheduler: Scheduler) -> None:
    fleet.expect([order("a"), order("a"), order("b")])
    scheduler.deliver("a")
    scheduler.now += ASK_SECONDS
    fleet.step()
    fleet.drop(order("a"))
    assert (fleet.arrived(order("a")), fleet.ordered(order("a"))) == ([DONE], 1)
    assert scheduler.cancelled == ["a1"]
    assert fleet.run(order("a")) == DONE


def test_all_but_some_can_be_dropped(fleet: Fleet, scheduler: Scheduler) -> None:
    fleet.expect(map(order, "abcde"))
    fleet.only([order("b"), order("e")])
    assert sorted(scheduler.cancelled) == ["a", "c"]
    scheduler.script = {5: lambda: scheduler.deliver("b"), 15: lambda: scheduler.deliver("e")}
    assert [fleet.run(order("b")), fleet.run(order("e"))] == [DONE, DONE]
    assert scheduler.submitted == ["a", "b", "c", "e"]


def test_the_end_cancels_what_is_under_way_and_leaves_no_folder(fleet: Fleet, scheduler: Scheduler, tmp_path: Path) -> None:
    fleet.expect(map(order, "abcde"))
    scheduler.deliver("b")
    fleet.run(order("b"))
    fleet.close()
    assert sorted(scheduler.cancelled) == ["a", "c", "closed"]
    assert list(tmp_path.iterdir()) == []
