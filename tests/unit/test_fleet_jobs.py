"""The jobs of a fleet, with a scheduler and a clock that do as they are told: what is submitted when, what is lost how."""

from unittest import mock

import pytest
from unit_examples import CASE, measurement

from pytest_gputrain.execution.fleet.job_queue import ASK_SECONDS, GRACE_SECONDS, LEAST_WAITING, Fleet
from pytest_gputrain.execution.fleet.scheduler import DELIVERY, OUTPUT, Job, JobRefused, QueueFull, Unreachable
from pytest_gputrain.records import Conditions, Delivery, Host, Lost, Order, Task
from pytest_gputrain.records.node_protocol import write_record

WAIT = 100.0
NODE = Host(name="n1", platform="h100", device="nvidia-h100-80gb-hbm3", gpus=1)
DONE = Delivery(host=NODE, reply=measurement())


def order(name="a"):
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

    def __init__(self):
        self.now = 0.0
        self.submitted = []
        self.folders = {}
        self.says = {}
        self.cancelled = []
        self.refusal = None
        self.silent = False
        self.most = 0
        self.script = {}

    def submit(self, order, folder):
        if self.refusal is not None:
            raise self.refusal
        job = f"{order.task.case.model}{sum(job.startswith(order.task.case.model) for job in self.submitted) or ''}"
        self.submitted.append(job)
        self.folders[job] = folder
        self.says.setdefault(job, Job("waiting", "Priority"))
        return job

    def jobs(self, ids):
        if self.silent:
            raise Unreachable("no answer")
        self.most = max(self.most, len(ids))
        return {job: self.says[job] for job in ids if job in self.says}

    def cancel(self, ids):
        self.cancelled += ids

    def close(self):
        self.cancelled.append("closed")

    def deliver(self, job, delivery=DONE):
        write_record(self.folders[job] / DELIVERY, delivery)
        self.says[job] = Job("ended")

    def sleep(self, seconds):
        """Lets time pass, and does what is due."""
        self.now += seconds
        assert self.now < 10_000, "the fleet waits for ever"
        for at in [at for at in self.script if at <= self.now]:
            self.script.pop(at)()


@pytest.fixture
def scheduler():
    return Scheduler()


def fleet_of(scheduler, folder, most_jobs=3):
    clock = {"now": lambda: scheduler.now, "sleep": scheduler.sleep}
    return Fleet(scheduler, folder, most_jobs=most_jobs, wait_seconds=WAIT, **clock)


@pytest.fixture
def fleet(scheduler, tmp_path):
    return fleet_of(scheduler, tmp_path)


def test_what_is_expected_is_submitted_in_its_order_as_far_as_the_window_reaches(fleet, scheduler):
    fleet.expect(map(order, "abcde"))
    assert scheduler.submitted == ["a", "b", "c"]
    scheduler.deliver("b")
    assert fleet.run(order("b")) == DONE
    scheduler.now += ASK_SECONDS
    fleet.step()
    assert scheduler.submitted == ["a", "b", "c", "d"]
    assert scheduler.most <= 3


def test_as_many_wait_as_run(scheduler, tmp_path):
    fleet = fleet_of(scheduler, tmp_path, most_jobs=40)
    fleet.expect(order(f"case-{number}-") for number in range(100))
    sizes = []
    for _ in range(4):
        sizes.append(len(scheduler.submitted))
        scheduler.says = dict.fromkeys(scheduler.submitted, Job("running"))
        scheduler.now += ASK_SECONDS
        fleet.step()
    assert sizes == [LEAST_WAITING, 2 * LEAST_WAITING, 4 * LEAST_WAITING, 40]


def test_what_is_held_does_not_keep_others_from_their_turn(scheduler, tmp_path):
    fleet = fleet_of(scheduler, tmp_path, most_jobs=40)
    fleet.expect(order(f"wide-{number}-") for number in range(LEAST_WAITING))
    scheduler.says = dict.fromkeys(scheduler.submitted, Job("held", "no node has so many"))
    scheduler.script = {10: lambda: scheduler.deliver("a")}
    assert fleet.run(order("a")) == DONE
    assert scheduler.now < WAIT


def test_a_test_that_waits_goes_before_what_is_only_expected(fleet, scheduler):
    fleet.expect(map(order, "abcde"))
    scheduler.script = {10: lambda: scheduler.deliver("a"), 20: lambda: scheduler.deliver("e")}
    assert fleet.run(order("e")) == DONE
    assert scheduler.submitted == ["a", "b", "c", "e", "d"]


def test_what_is_soon_to_be_asked_for_goes_before_what_was_expected_earlier(fleet, scheduler):
    fleet.expect(map(order, "abcde"))
    fleet.expect([order("f"), order("g")], soon=True)
    for job in "abcfgde":
        scheduler.deliver(job)
        assert fleet.run(order(job)) == DONE
        scheduler.now += ASK_SECONDS
        fleet.step()
    assert scheduler.submitted == ["a", "b", "c", "f", "g", "d", "e"]


def test_what_arrives_before_a_test_asks_is_told_while_another_waits(scheduler, tmp_path):
    arrivals = []
    fleet = fleet_of(scheduler, tmp_path, most_jobs=9)
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


def test_each_run_of_a_case_is_a_job_of_its_own(fleet, scheduler):
    fleet.expect([order(), order()])
    other = Delivery(host=NODE, refusal="another one")
    scheduler.deliver("a")
    scheduler.deliver("a1", other)
    assert [fleet.run(order()), fleet.run(order())] == [DONE, other]
    scheduler.script = {scheduler.now + 5: lambda: scheduler.deliver("a2")}
    assert fleet.run(order()) == DONE
    assert scheduler.submitted == ["a", "a1", "a2"]


def then(at, does):
    return lambda scheduler: scheduler.script.update({at: lambda: does(scheduler)})


def says(job, doing, *words, **fields):
    return lambda scheduler: scheduler.says.update({job: Job(doing, *words, **fields)})


def sets(**fields):
    return lambda scheduler: [setattr(scheduler, name, value) for name, value in fields.items()]


def delivers(job, *delivery):
    return lambda scheduler: scheduler.deliver(job, *delivery)


def writes(name, text):
    return lambda scheduler: (scheduler.folders["a"] / name).write_text(text)


def forgets(scheduler):
    scheduler.says.clear()


RUNS = says("a", "running", host="n7")
LATER = GRACE_SECONDS, GRACE_SECONDS + 3 * ASK_SECONDS
LOST = {
    **{
        doing: ([RUNS, then(10, says("a", doing, "it snowed"))], 10, 10 + 2 * ASK_SECONDS)
        for doing in ("node_died", "preempted", "cancelled")
    },
    "ended without a delivery": ([says("a", "ended", "exit 0", "n7")], *LATER),
    "ended finally: no delivery can come any more": ([says("a", "ended", "killed", "n7", final=True)], 0, 2 * ASK_SECONDS),
    "forgotten by the scheduler": ([RUNS, then(10, forgets)], 10 + LATER[0], 10 + LATER[1]),
    "printed something": (
        [then(1, writes(OUTPUT, "No module named torch")), then(2, says("a", "ended", "exit 1"))],
        2,
        WAIT,
    ),
    "nothing lets it start": ([], WAIT, WAIT + 2 * ASK_SECONDS),
    "held, while others run": (
        [says("a", "held", "PartitionNodeLimit"), then(0.8 * WAIT, says("b", "running"))],
        WAIT,
        WAIT + 2 * ASK_SECONDS,
    ),
    "a queue that is full, however late it is asked for": (
        [sets(now=10 * WAIT, refusal=QueueFull("full"))],
        11 * WAIT,
        9999,
    ),
    "refused": ([sets(refusal=JobRefused("no such partition"))], 0, 0),
    "a scheduler that is silent for a while, and then for longer": (
        [RUNS, *(then(at * WAIT, sets(silent=silent)) for at, silent in ((0.05, True), (0.9, False), (1.25, True)))],
        2.25 * WAIT - ASK_SECONDS,
        9999,
    ),
    "another node than was asked for": ([then(5, delivers("a", Delivery(host=NODE, unfit="it is an A100")))], 5, WAIT),
    "a delivery that cannot be read": ([then(5, writes(DELIVERY, "{"))], 5, WAIT),
}


def test_a_job_is_lost(tmp_path, snapshot):
    said = {}
    for what, (doings, least, most) in LOST.items():
        scheduler = Scheduler()
        fleet = fleet_of(scheduler, tmp_path / what)
        for do in doings:
            do(scheduler)
        fleet.expect(map(order, "ab") if "others" in what else ())
        outcome = fleet.run(order("a"))
        assert isinstance(outcome, Lost)
        assert least <= scheduler.now <= most, what
        cancelled = " (cancelled)" if "a" in scheduler.cancelled else ""
        said[what] = f"{outcome.cause} of {outcome.job} on {outcome.host}{cancelled}: {outcome.sentence} {outcome.detail}"
    assert said == snapshot


FOUND = {
    **{doing: [then(5, delivers("a")), then(5.5, says("a", doing))] for doing in ("node_died", "preempted", "cancelled")},
    "forgotten": [then(5, delivers("a")), then(5.5, forgets)],
    "late, but not later than the grace": [says("a", "ended", "exit 0"), then(GRACE_SECONDS - ASK_SECONDS, delivers("a"))],
    "after a queue that was full": [
        sets(refusal=QueueFull("full")),
        then(0.5 * WAIT, sets(refusal=None)),
        then(0.8 * WAIT, delivers("a")),
    ],
    "after its turn: while others get on it waits": [
        then(0.8 * WAIT, says("b", "running")),
        then(1.6 * WAIT, delivers("b")),
        then(2.4 * WAIT, delivers("a")),
    ],
}


@pytest.mark.parametrize("what", FOUND)
def test_what_a_job_delivered_counts_whatever_became_of_it(fleet, scheduler, what):
    for do in FOUND[what]:
        do(scheduler)
    fleet.expect(map(order, "ab") if "others" in what else ())
    assert fleet.run(order("a")) == DONE
    assert scheduler.cancelled == []


def test_all_that_wait_for_a_full_queue_are_lost_together_and_a_refused_job_alone(fleet, scheduler):
    scheduler.refusal = JobRefused("no such partition")
    assert fleet.run(order("c")).cause == "not_scheduled"
    scheduler.refusal = None
    scheduler.script = {5: lambda: scheduler.deliver("d")}
    assert fleet.run(order("d")) == DONE
    scheduler.refusal, began = QueueFull("full"), scheduler.now
    fleet.expect(map(order, "ab"))
    assert fleet.run(order("a")).cause == "queue_full"
    at = scheduler.now
    assert fleet.run(order("b")).cause == "queue_full"
    assert scheduler.now == at <= began + WAIT + 2 * ASK_SECONDS


def test_what_is_dropped_is_cancelled_and_nothing_else_and_the_end_leaves_no_folder(fleet, scheduler, tmp_path):
    fleet.expect([order("a"), order("b"), order("a")])
    scheduler.deliver("a")
    scheduler.now += ASK_SECONDS
    fleet.step()
    fleet.drop(order("a"))
    assert (fleet.arrived(order("a")), fleet.ordered(order("a"))) == ([DONE], 1), "what was delivered outlasts it"
    assert scheduler.cancelled == ["a1"]
    assert fleet.run(order("a")) == DONE
    fleet.close()
    assert scheduler.cancelled == ["a1", "b", "a1", "closed"], "dropped once more"
    assert list(tmp_path.iterdir()) == []


def test_what_ctrl_c_kept_from_being_cancelled_is_cancelled_in_the_end(fleet, scheduler, monkeypatch):
    fleet.expect([order("a"), order("b")])
    with monkeypatch.context() as interrupted:
        interrupted.setattr(scheduler, "cancel", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fleet.drop(order("a"))
    fleet.close()
    assert sorted(scheduler.cancelled) == ["a", "b", "closed"]


def test_all_but_some_can_be_dropped(fleet, scheduler):
    fleet.expect(map(order, "abcde"))
    fleet.only([order("b"), order("e")])
    assert sorted(scheduler.cancelled) == ["a", "c"]
    scheduler.script = {5: lambda: scheduler.deliver("b"), 15: lambda: scheduler.deliver("e")}
    assert [fleet.run(order("b")), fleet.run(order("e"))] == [DONE, DONE]
    assert scheduler.submitted == ["a", "b", "c", "e"]
