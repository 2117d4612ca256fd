"""What Slurm and Ray are asked for, and what is understood of their words: Slurm's were recorded from 22.05."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from unit_examples import CASE

from pytest_gputrain.execution.fleet.executor import scheduler_of
from pytest_gputrain.execution.fleet.ray import Ray
from pytest_gputrain.execution.fleet.scheduler import SPARE_SECONDS, Job, JobRefused, QueueFull, Unreachable
from pytest_gputrain.execution.fleet.slurm import Slurm
from pytest_gputrain.records import Conditions, Order, Task

FULL = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
SILENT = "Unable to contact slurm controller (connect failure)"


JOBS = {
    "4|COMPLETED|n1|None": Job("ended", "", "n1"),
    "5|NODE_FAIL|n1|NodeDown": Job("node_died", "NODE_FAIL, NodeDown", "n1"),
    "2|PENDING||PartitionConfig": Job("held", "PartitionConfig"),
    "3|PENDING||PartitionNodeLimit": Job("held", "PartitionNodeLimit"),
    "6|RUNNING|n2|None": Job("running", "RUNNING", "n2"),
    "7|PENDING||Resources": Job("waiting", "Resources"),
    "8|PENDING||Priority": Job("waiting", "Priority"),
    "9|FAILED|n2|NonZeroExitCode": Job("ended", "FAILED, NonZeroExitCode", "n2"),
    "10|PREEMPTED|n2|None": Job("preempted", "PREEMPTED", "n2"),
    "11|CANCELLED||BeginTime": Job("cancelled", "CANCELLED, BeginTime"),
    "12|RUNNING|n[1-2]|None": Job("running", "RUNNING", "n[1-2]"),
    # A limit on all jobs of a user is a turn, and one on a job is not.
    "13|PENDING||QOSMaxJobsPerUserLimit": Job("waiting", "QOSMaxJobsPerUserLimit"),
    "14|PENDING||AssocGrpCpuLimit": Job("waiting", "AssocGrpCpuLimit"),
    "15|PENDING||Licenses": Job("waiting", "Licenses"),
    "16|PENDING||QOSMaxWallDurationPerJobLimit": Job("held", "QOSMaxWallDurationPerJobLimit"),
    "17|PENDING||AssocMaxGRESPerNode": Job("held", "AssocMaxGRESPerNode"),
    "18|PENDING||ReqNodeNotAvail": Job("held", "ReqNodeNotAvail"),
}
"""What squeue prints of a job, and what that means."""

COMMAND = """#!{python}
import json, os, sys, time
name = os.path.basename(sys.argv[0])
with open({log!r}, "a") as log:
    log.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
code, said, complaint, seconds = json.load(open({answers!r}))[name]
print(complaint, file=sys.stderr, flush=True)
time.sleep(seconds)
print(said, end="")
sys.exit(code)
"""


class Commands:
    """Slurm's commands, which answer what they are told to."""

    def __init__(self, folder):
        self.folder = folder
        self._answers = folder / "answers.json"
        self._log = folder / "log.jsonl"
        self._known = {}
        for name in ("sbatch", "squeue", "scancel"):
            script = folder / name
            script.write_text(COMMAND.format(python=sys.executable, log=str(self._log), answers=str(self._answers)))
            script.chmod(0o755)
            self.answer(name)

    def answer(self, name, said="", complaint="", *, code=0, seconds=0.0):
        self._known[name] = (code, said, complaint, seconds)
        self._answers.write_text(json.dumps(self._known))

    def calls(self, name):
        calls_made = [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []
        return [words[1:] for words in calls_made if words[0] == name]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return Commands(folder)


def order(*, gpus=1, nodes=1, cpus=4, platform="h100"):
    task = Task(case=CASE, scale="full", device_type="gpu", nodes=nodes, root="/")
    conditions = Conditions(platform=platform, timeout_seconds=1790, foreign="warn", shared="/")
    return Order(task=task, conditions=conditions, gpus=gpus, cpus=cpus)


def options(commands, folder, *arguments, **takes):
    """Of sbatch, up to the script, without those that are the same for all."""
    commands.answer("sbatch", "17\n")
    (folder / "fleet-x").mkdir(exist_ok=True)
    Slurm(arguments).submit(order(**takes), folder / "fleet-x" / "1")
    (words,) = commands.calls("sbatch")
    own = words[: words.index(str(folder / "fleet-x" / "job.sh"))]
    return [word for word in own if not word.startswith(("--parsable", "--no-requeue", "--job-name", "--output", "--time"))]


def test_what_jobs_do_is_read_from_squeue_and_only_named_jobs_are_cancelled(commands):
    commands.answer("squeue", "".join(f"{line}\n" for line in JOBS))
    assert Slurm(()).jobs(["4", "5"]) == {line.partition("|")[0]: job for line, job in JOBS.items()}
    Slurm(()).cancel(["1", "2"])
    assert commands.calls("scancel") == [["--quiet", "1", "2"]]


def test_jobs_that_slurm_has_forgotten_are_left_out_and_a_silent_controller_is_no_news(commands):
    commands.answer("squeue", complaint="slurm_load_jobs error: Invalid job id specified", code=1)
    assert Slurm(()).jobs(["999"]) == {}
    commands.answer("squeue", complaint=f"slurm_load_jobs error: {SILENT}", code=1)
    with pytest.raises(Unreachable, match="connect failure"):
        Slurm(()).jobs(["1"])


@pytest.mark.parametrize(
    ("complaint", "kind", "says"),
    [
        ("sbatch: error: Batch job submission failed: Invalid feature specification", JobRefused, "Invalid feature"),
        (
            "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: No",
            JobRefused,
            ": x Batch",
        ),
        (f"sbatch: error: Batch job submission failed: {SILENT}", Unreachable, "connect failure"),
        (
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size "
            "and/or time limits)",
            QueueFull,
            "job submit limit",
        ),
    ],
)
def test_a_refusal_is_told_by_its_kind(commands, tmp_path, complaint, kind, says):
    commands.answer("sbatch", complaint=complaint, code=1)
    with pytest.raises(kind, match=says) as caught:
        Slurm(()).submit(order(), tmp_path / "1")
    assert "\n" not in str(caught.value)


def test_an_sbatch_that_waits_for_a_full_queue_is_ended_and_what_it_submitted_is_not_submitted_twice(commands, tmp_path):
    commands.answer("sbatch", "18\n", FULL, seconds=60)  # then it would say 18
    commands.answer("squeue", "")
    with pytest.raises(QueueFull, match="temporarily unable"):
        Slurm(()).submit(order(), tmp_path / "1")
    commands.answer("squeue", "18|PENDING||Priority\n")
    assert Slurm(()).submit(order(), tmp_path / "1") == "18"


def test_a_job_runs_the_node_with_this_python(commands, tmp_path):
    options(commands, tmp_path)
    (words,) = commands.calls("sbatch")
    folder = tmp_path / "fleet-x"
    assert words[-6:] == [
        str(folder / "job.sh"),
        sys.executable,
        "-P",
        "-m",
        "pytest_gputrain.execution.fleet.job",
        str(folder / "1"),
    ]
    assert "--time=40" in words
    assert "--job-name=gputrain-fleet-x" in words
    started = subprocess.run(["sh", folder / "job.sh", "echo", "a b", "$c"], capture_output=True, text=True, check=True)
    assert started.stdout == "a b $c\n"


@pytest.mark.parametrize(
    ("site", "takes", "asked"),
    [
        ((), {"gpus": 8, "nodes": 2}, "--nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=4"),
        ((), {"gpus": 0}, "--nodes=1 --ntasks-per-node=1 --cpus-per-task=4"),
        (
            ("--partition=gpu", "--gres=gpu:h100:{gpus}"),
            {"gpus": 2},
            "--nodes=1 --ntasks-per-node=1 --cpus-per-task=4 --partition=gpu --gres=gpu:h100:2",
        ),
        (("--mincpus={cpus}",), {"gpus": 2}, "--nodes=1 --ntasks-per-node=1 --gpus-per-node=2 --mincpus=4"),
    ],
    ids=["by default", "no GPU", "a site's own words", "a site's own count of cores"],
)
def test_gpus_and_cores_are_asked_for(commands, tmp_path, site, takes, asked):
    assert options(commands, tmp_path, *site, **takes) == asked.split()


def test_a_platform_adds_to_what_counts_for_all(commands, tmp_path):
    given = (("", ("--account=x",)), ("h100", ("--partition=a",)), ("a100", ("--partition=b",)))
    engine = scheduler_of(SimpleNamespace(fleet="slurm", fleet_args=given), "h100")
    commands.answer("sbatch", "17\n")
    engine.submit(order(), tmp_path / "1")
    (words,) = commands.calls("sbatch")
    assert [word for word in words if word.startswith(("--account", "--partition"))] == ["--account=x", "--partition=a"]


def test_what_cannot_run_is_told_before_anything_does(commands, tmp_path, monkeypatch):
    for argument in ("--gres={gpu}", "--comment={", "--x={}"):
        with pytest.raises(ValueError, match="gpu_fleet_args") as caught:
            Slurm((argument,))
        assert argument in str(caught.value)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="sbatch, squeue, scancel not found"):
        Slurm(())
    with pytest.raises(ValueError, match=r"^--gpu-executor=ray needs Ray, .*pytest-gputrain\[ray\]"):
        Ray([])


def test_a_job_of_pytest_s_own_lends_no_wishes_to_those_of_cases(commands, tmp_path, monkeypatch):
    dump = tmp_path / "environment.json"
    (commands.folder / "sbatch").write_text(
        f"#!{sys.executable}\nimport json, os\njson.dump(dict(os.environ), open({str(dump)!r}, 'w'))\nprint(5)\n"
    )
    for name in ("SLURM_NTASKS", "SBATCH_PARTITION", "CUDA_VISIBLE_DEVICES", "PYTEST_CURRENT_TEST", "SLURM_CONF", "HOME_OF"):
        monkeypatch.setenv(name, "x")
    Slurm(()).submit(order(), tmp_path / "1")
    environment = json.loads(dump.read_text())
    assert {"SLURM_CONF", "HOME_OF", "PATH"} <= set(environment)
    assert not {"SLURM_NTASKS", "SBATCH_PARTITION", "CUDA_VISIBLE_DEVICES", "PYTEST_CURRENT_TEST"} & set(environment)


# Ray, by a stand-in for its module; tests/plugin/test_fleet_on_nodes.py has a real one


class _Remote:
    """A function of the driver's, with the options that it is started with."""

    def __init__(self, asked):
        self._asked = asked

    def options(self, **options):
        self._asked.append(options)
        return self

    def remote(self, *arguments):
        self._asked[-1]["arguments"] = arguments
        return []


@pytest.fixture
def asked(monkeypatch):
    """Options of every task, and the connection first."""
    resources = []

    def init(**options):
        resources.append(options)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))

    errors = SimpleNamespace(RayError=RuntimeError)
    module = SimpleNamespace(init=init, remote=lambda function: _Remote(resources), exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield resources
    assert signal.getsignal(signal.SIGTERM) is before, "Ray's own would end pytest without a report"


TWO_GPUS = {"num_cpus": 8, "num_gpus": 2, "resources": {"h100": 2}}


@pytest.mark.parametrize(
    ("arguments", "takes", "resources"),
    [
        ([], {"gpus": 2}, TWO_GPUS),
        (["accelerator_type:H100=0.001"], {"gpus": 2}, TWO_GPUS | {"resources": {"accelerator_type:H100": 0.001}}),
        (["CPU=24"], {"gpus": 2}, TWO_GPUS | {"num_cpus": 24}),
        (["rack={gpus}", "memory=1e9"], {"gpus": 2}, TWO_GPUS | {"memory": 1e9, "resources": {"rack": 2}}),
        (["GPU=0", "CPU={cpus}"], {"gpus": 2}, TWO_GPUS | {"num_gpus": 0}),
        ([], {"gpus": 0, "platform": "cpu"}, {"num_cpus": 8, "num_gpus": 0, "resources": {}}),
    ],
)
def test_a_case_asks_for_its_gpus_and_its_platform(asked, arguments, takes, resources):
    Ray(arguments).submit(order(cpus=8, **takes), Path("/nowhere"))
    connection, task = asked
    assert connection["address"] == "auto"
    assert task.pop("arguments") == (sys.executable, msgspec.json.encode(order(cpus=8, **takes)), "")
    assert task == {**resources, "max_retries": 0, "num_returns": "streaming"}


class _Stream:
    """Of what a task has yielded so far."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def __next__(self):
        return self.answers.pop(0)


def test_a_task_that_hangs_on_its_node_is_ended_some_time_after_the_case_should_have_been(asked, monkeypatch):
    now, ended, stream = [1000.0], [], _Stream("node7 host7")
    module = sys.modules["ray"]
    module.nodes = lambda: [{"NodeID": "node7", "Alive": True, "Resources": {"CPU": 8, "GPU": 8, "h100": 8}}]
    module.wait = lambda streams, timeout: ([stream for stream in streams if stream.answers], [])
    module.get = lambda answer: answer
    module.cancel = lambda task, force=False: ended.append((task, force))
    errors = ("TaskCancelledError", "NodeDiedError")
    module.exceptions = SimpleNamespace(RayError=RuntimeError, **{name: type(name, (RuntimeError,), {}) for name in errors})
    monkeypatch.setattr(_Remote, "remote", lambda self, *arguments: stream)
    monkeypatch.setattr("pytest_gputrain.execution.fleet.ray.time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = Ray([])
    job = engine.submit(order(gpus=2, cpus=8), Path("/nowhere"))
    now[0] += 10_000  # in the queue, which is the fleet's business
    assert engine.jobs([job]) == {job: Job("running", "", "host7")}
    now[0] += 1790 + SPARE_SECONDS
    assert engine.jobs([job])[job].doing == "running"
    now[0] += 1
    why = "it ran for more than 2,390 s, which is --gpu-timeout and ten minutes"
    assert engine.jobs([job]) == {job: Job("cancelled", why, "host7")}
    assert ended == [(stream, True)]
    engine.cancel([])


def test_the_address_is_that_of_the_arguments_or_of_ray(asked, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "one")
    Ray([])
    Ray(["--address=other"])
    assert [connection["address"] for connection in asked] == ["one", "other"]
