"""Defines the settings of a run: each field that declares an option is its flag, its name in the ini file, and its help.

What is chosen for a run has a flag on the command line, and a name in the ini file beside. What a project or a site sets
once is `ini_only`; pytest's own option ``-o gpu_nodes=2`` changes it for one run. `pytest_gputrain.plugin.settings` reads
them. pytest imports this module in every project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pytest_gputrain.execution import options
from pytest_gputrain.execution.options import choice, option, options_of, switch, whole
from pytest_gputrain.utils.bounds import LEAST_STEPS, MAX_RUNS, MOST_RUNS
from pytest_gputrain.utils.units import parse_ratio, parse_seconds

if TYPE_CHECKING:
    from pytest_gputrain.cases.sweep import Axes
    from pytest_gputrain.records import CountFigure
    from pytest_gputrain.records.tolerance import CountTolerance, MemoryTolerance

CountMode = Literal["judge", "tell", "off"]
ScaleChoice = Literal["auto", "full", "tiny"]
Foreign = Literal["error", "warn", "ignore"]
Isolation = Literal["auto", "process", "inline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a run, from the command line, the ini file and the defaults. Paths are absolute."""

    baseline_update: bool = switch(
        "store the figures of this run as the baselines, replacing all runs of a case", page="gate.md"
    )
    baseline_new: bool = switch("store the figures of cases that have no baseline yet")
    baseline_prune: bool = switch(
        "remove the baselines of this device that no test asks for any more, in files whose tests all ran to their end"
    )
    baseline_dir: Path = option(
        "DIR",
        "the folder of the baselines",
        parse=options.parse_path,
        default="baselines",
        default_meaning="baselines beside the ini file",
    )
    baseline: Path | Literal["measured", "published"] = option(
        "measured|published|REPORT",
        "what to compare with: the baselines of this device (measured), the tables that others published, or the report of "
        "an earlier --gpu-json",
        parse=options.path_or("measured", "published"),
        default="measured",
        page="how-true.md",
    )
    time_tolerance: float = option(
        "RATIO",
        "by how much the median step may be slower, and scaling efficiency worse",
        parse=parse_ratio,
        default="3%",
        page="gate.md",
    )
    host_time_tolerance: float = option(
        "RATIO",
        "by how much the median step may be slower on another machine than that of the baseline, if the GPU waits for the "
        "host in more than 5 % of it; a slower one is not compared, and the run says so",
        parse=parse_ratio,
        default="50%",
        ini_only=True,
    )
    memory_tolerance: MemoryTolerance = option(
        "RATIO|BYTES|RATIO+BYTES",
        "by how much peak allocated memory may grow, as 2%, 512MiB or 2%+512MiB; on a GPU, 64 MiB are added",
        parse=options.parse_memory_tolerance,
        default="2%",
        page="gate.md",
    )
    counts: CountMode = choice(
        CountMode,
        "what to do about what each step asks of an emulated GPU or a CPU, such as launches and reads: fail the case where "
        "it asks for more than recorded (judge), only tell of it (tell), or count nothing (off)",
        default="judge",
        ini_only=True,
        page="counts.md",
    )
    count_tolerances: Mapping[CountFigure, CountTolerance] = option(
        "COUNT=RATIO|NUMBER|RATIO+NUMBER, ...",
        "how much more of a count passes than the rules allow, as launches=5 %, waits=1; each count that is named is "
        "judged by this alone",
        name="count-tolerance",
        parse=options.parse_count_tolerances,
        absent={},
        ini_only=True,
        page="counts.md",
    )
    judge_cpu_time: bool = switch(
        "also judge time on a CPU, against a baseline of at least five runs of the same host; an update then records five",
        ini_only=True,
        page="gate.md",
    )
    runs: int | None = option(
        "K",
        "fresh processes per case",
        parse=whole(1, MAX_RUNS),
        default_meaning="1, or 5 if a baseline is recorded on a GPU",
    )
    reruns: int = option(
        "N",
        "how often a case that looks slower, faster, bigger or out of memory is measured again at most, in fresh processes, "
        "until they agree; 0 judges by the first process alone, against a wider limit",
        parse=whole(0, MAX_RUNS - 1),
        default=str(MOST_RUNS - 1),
        ini_only=True,
    )
    strict: bool | None = switch(
        "fail cases that are new, inconclusive or not comparable",
        parse=options.parse_strict,
        default="auto",
        default_meaning="if CI is set, except for published tables",
        page="gate.md",
    )
    steps: int | None = option("N", "timed steps of every case", parse=whole(1), default_meaning="each case's own number")
    warmup: int | None = option("N", "steps before the timed ones", parse=whole(0), default_meaning="each case's own number")
    timeout_seconds: float = option(
        "TIME",
        "end a process that takes longer than this, as 90s, 15min or 2h",
        name="timeout",
        parse=parse_seconds,
        default="30min",
    )
    scale: ScaleChoice = choice(
        ScaleChoice,
        "the size of the models: full, tiny, or auto, which is full on a GPU and tiny on a CPU",
        default="auto",
    )
    platform: str | None = option(
        "MARKER",
        "the GPU that this machine must have (h100, a100, ...), or that is emulated; a GPU whose name is not known is "
        "accepted as this one; cpu uses no GPU",
        parse=options.parse_platform,
        page="gpus.md",
    )
    processes: int = option(
        "N",
        "the most processes of a case on a CPU, and the most parameter servers; a case of more GPUs runs with that many, "
        "and 1 skips cases of several GPUs",
        parse=whole(1),
        default="2",
        ini_only=True,
    )
    gpu_ids: tuple[str, ...] | None = option(
        "ID,ID",
        "the GPUs to use, by index or UUID",
        name="ids",
        parse=options.parse_ids,
        default_meaning="all visible ones",
    )
    foreign: Foreign = choice(
        Foreign,
        "what to do if other processes use the GPUs of a case: fail the case without measuring it (error), measure it, but "
        "neither call it slower nor record it (warn), or ignore them",
        default="warn",
        ini_only=True,
        page="gpus.md",
    )
    isolation: Isolation = choice(
        Isolation,
        "where cases run: each in a fresh interpreter (process), or in the pytest process for a debugger (inline); auto is "
        "process, except that cases on a CPU or an emulated GPU are forked from a process that has only imported the "
        "libraries of the models, or torch for own code",
        default="auto",
    )
    nodes: int = option("N", "the most nodes of a case", parse=whole(1), default="1", ini_only=True, page="fleet.md")
    shared: Path = option(
        "DIR",
        "the folder that all nodes share, for cases of several nodes",
        parse=options.parse_path,
        default=".gputrain",
        default_meaning=".gputrain beside the ini file",
        ini_only=True,
    )
    rendezvous: str = option(
        "HOST[:PORT]",
        "the address of this node for the other nodes, outside of Slurm",
        parse=options.parse_endpoint,
        default_meaning="its name, and any free port",
        absent="",
        ini_only=True,
    )
    fleet: Literal["slurm", "ray"] | None = option(
        "local|slurm|ray",
        "where cases run: on this machine (local), or each as a job of a scheduler, on machines of the platform that -m or "
        "--gpu-platform names",
        name="executor",
        parse=options.parse_executor,
        default="local",
        page="fleet.md",
    )
    fleet_args: tuple[tuple[str, tuple[str, ...]], ...] = option(
        "[PLATFORM:] ARGUMENTS",
        "further arguments for the scheduler, one line for each platform, as 'h100: --partition=gpu', or for Ray "
        "'h100: h100={gpus}'; a line without a platform applies to all",
        parse=options.parse_site_arguments,
        absent=(),
        ini_only=True,
    )
    fleet_gpus: int = option("N", "GPUs of each node of the fleet", parse=whole(1), default="8", ini_only=True)
    fleet_jobs: int = option(
        "N", "the most jobs in the scheduler's queue at once", parse=whole(1), default="256", ini_only=True
    )
    fleet_wait_seconds: float = option(
        "TIME",
        "give up a case as lost if it does not start for this time, while no other job starts or ends either",
        name="fleet-wait",
        parse=parse_seconds,
        default="1h",
        ini_only=True,
    )
    summary: Path | Literal["auto", "none"] = option(
        "FILE|auto|none",
        "write the verdicts to this file as Markdown; auto writes them to the file of GITHUB_STEP_SUMMARY, if that is set",
        parse=options.path_or("auto", "none"),
        default="auto",
        output=True,
        page="ci.md",
    )
    json: Path | None = option(
        "FILE",
        "write environment, cases, measurements and verdicts to this JSON file",
        parse=options.parse_path,
        output=True,
        page="api-records.md",
    )
    resume: Path | None = option(
        "REPORT",
        "take the figures from an earlier --gpu-json of the same code, and measure only what it lacks",
        parse=options.parse_path,
        page="reading-a-failure.md",
    )
    history: Path | None = option(
        "FILE",
        "append one JSON line for every case to this file, which keeps all runs",
        parse=options.parse_path,
        output=True,
        page="trends.md",
    )
    html: Path | None = option(
        "FILE",
        "write verdicts, figures and charts to this HTML file, with the trends of --gpu-history",
        parse=options.parse_path,
        output=True,
        page="trends.md",
    )
    sweep: Axes = option(
        "KNOB=A,B",
        "run every case with each of these values for one of its knobs; several options run all combinations",
        name="set",
        parse=options.parse_axes,
        absent=(),
        repeated=True,
        page="knobs.md",
    )
    emulate: bool = switch(
        "run every case at full size on an emulated GPU of the platform that -m or --gpu-platform names, and compare its "
        "memory, and what its steps ask of the GPU, with recorded emulated runs",
        page="emulated-gpu.md",
    )
    find_batch: bool = switch(
        "find the largest micro-batch of every case that fits, and the fastest one, instead of judging the case",
        page="knobs.md",
    )
    find_batch_max: int = option(
        "N",
        "the largest micro-batch that --gpu-find-batch tries",
        parse=whole(1),
        default="1024",
        ini_only=True,
    )
    loss_steps: int | None = option(
        "STEPS",
        "train every case for that many steps in each precision and compare the loss curves, instead of judging the case",
        name="loss",
        parse=whole(LEAST_STEPS),
        page="knobs.md",
    )
    root: Path
    configured: bool
    """Whether pytest found a configuration file. Without one, ``root`` depends on where pytest is started."""
    typed: tuple[str, ...]
    """Names of the options that the command line gives: they count before what a test says of itself."""
    given: tuple[str, ...]
    """Names of the options that the command line or the ini file gives."""

    @property
    def records(self) -> bool:
        """Whether baselines are recorded: of all cases, or of new ones."""
        return self.baseline_update or self.baseline_new

    @property
    def outputs(self) -> dict[str, Path]:
        """The files that this run is to write, by the names of their options."""
        named = {option.name: getattr(self, option.field) for option in OPTIONS if option.output}
        return {name: path for name, path in named.items() if isinstance(path, Path)}

    @property
    def written(self) -> tuple[Path, ...]:
        """Files and folders that a run changes, or that the one it resumes has changed."""
        named = (self.baseline_dir, self.resume, *self.outputs.values())
        return tuple(path for path in named if path is not None)


OPTIONS: Final = options_of(Settings)
