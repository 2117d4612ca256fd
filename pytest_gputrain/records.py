"""The records that travel through the house, and nothing else.

    Case -> launch -> worker -> Reply -> judge(Baseline) -> Verdict -> report

Both sides of the process boundary import this module, so it needs neither pytest nor torch. Every record is frozen, every
field is keyword-only and carries its unit in its name, and one definition serves the wire, the files and the JSON Schema.
"""

from __future__ import annotations

import statistics
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from pytest_gputrain.figures import Figures
from pytest_gputrain.findings import LossCurve, Search

FORMAT: Final = 1
"""Version of every file this package writes. 1: the first (0.1.0)."""

MAX_RUNS: Final = 20
"""Runs that a baseline keeps of one case."""

Scale = Literal["full", "tiny"]
Phase = Literal["start", "import", "build", "count", "warmup", "measure", "check", "reply"]
"""Where a worker stands; ``count`` is the pass that counts allocations."""
Status = Literal["pass", "regressed", "improved", "new", "not-comparable", "failed", "recorded"]
MetricName = Literal["step_seconds", "peak_allocated_bytes", "peak_reserved_bytes", "device_used_bytes"]

_NOT_IDENTITY: Final = frozenset({"steps", "warmup", "platforms", "named"})


class Case(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to train and how: model x method x precision x parallelism x knobs.

    A record only: nothing is checked or looked up here, so that one misspelt case fails its own test instead of the
    whole file (see `pytest_gputrain.cases.problem`).
    """

    model: str = ""
    """A name of the zoo, or the function's name for own code."""
    method: str = "full"
    """What trains: ``full``, ``lora``, ``qlora``, ``pretrain``, ``sft``, ``dreambooth``; ``custom`` for own code."""
    precision: str = "bf16"
    """``fp32``, ``bf16`` (weights stored in bf16), ``bf16-amp`` or ``fp16`` (fp32 weights under autocast)."""
    parallel: str = "single"
    """``single``; ``ddp``, ``fsdp``, ``zero0`` to ``zero3`` and ``ps`` (parameter server) are declared only, for now."""
    gpus: int = 1
    """Processes of the case, one a GPU."""
    batch_size: int = 1
    """Samples per process in one step (one micro-batch)."""
    sequence_length: int = 0
    """Tokens per sample, all of them real (no padding); for a vision-language model those of its images included."""
    resolution: str = ""
    """``WIDTHxHEIGHT`` of images and videos in pixels."""
    frames: int = 0
    """Frames of a video."""
    gradient_accumulation: int = 1
    """Micro-batches per optimizer update. A step is ONE micro-batch, as the published tables count."""
    activation_checkpointing: bool | float = False
    """Whether the blocks are recomputed in backward; a share p of them: the first int(n * p) of the model's main blocks."""
    lora_rank: int = 0
    """0 for the rank of the model's published recipe; alpha keeps its ratio to the rank."""
    optimizer: str = "adamw"
    """``adamw`` (torch.optim.AdamW as it comes), ``adamw-fused``, ``adam``, ``momentum`` (SGD with 0.9) or ``sgd``."""
    learning_rate: float = 1e-4
    """Constant. The default moves weights of the usual 0.02 in bf16, whose neighbours lie 6e-5 to 1.2e-4 apart there."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer state in host memory (FSDP)."""
    offload_optimizer: bool = False
    """DeepSpeed's option, like those below: optimizer state and update in host memory."""
    offload_param: bool = False
    pin_memory: bool = False
    overlap_comm: bool | None = None  # DeepSpeed's default
    allgather_bucket_size: int = 0
    """Elements, like the next; 0 for DeepSpeed's default."""
    stage3_max_live_parameters: int = 0
    steps: int = 10
    """Timed steps."""
    warmup: int = 3
    """Steps before the timed ones."""
    platforms: tuple[str, ...] = ()
    """Catalog markers the case is declared for; none means any."""
    code: str = ""
    """``path/of/test_file.py::function`` that builds the step, for own code."""
    named: tuple[str, ...] = ()
    """Knobs that appear in the id, because a grid varies them."""

    def __str__(self) -> str:
        # Fields of a wrong type are shown too: this is also how the sentence that tells of them names the case.
        parts = [self.model] if self.method == "custom" else [self.model, self.method]
        parts.append(self.precision)
        if self.parallel != "single":
            parts.append(self.parallel)
        named: object = self.named
        parts += [
            f"{knob}={knob_text(getattr(self, str(knob), None))}" for knob in (named if isinstance(named, tuple) else ())
        ]
        return "-".join(map(str, parts))

    def replace(self, **fields: Any) -> Case:
        """This case with some fields changed; the id does not change for a knob (use `grid` for that)."""
        return msgspec.structs.replace(self, **fields)

    @property
    def sides(self) -> tuple[int, int]:
        """Width and height of the resolution in pixels."""
        width, height = map(int, self.resolution.split("x"))
        return width, height

    def identity(self) -> dict[str, Any]:
        """The fields that decide whether two measurements measure the same thing (not steps, warm-up, platforms)."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in _NOT_IDENTITY}


def knob_text(value: object) -> str:
    """A knob's value as ids show it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class Environment(Struct, frozen=True, kw_only=True):
    """Where a measurement was made. Fields that differ between a run and its baseline are named in a regression."""

    device_name: str
    """As the driver gives it (``NVIDIA H100 80GB HBM3``), or ``cpu``."""
    device_type: Literal["cpu", "cuda", "rocm"]
    device_count: int
    device_memory_bytes: int | None
    host: str
    hosts: tuple[str, ...] = ()
    """All nodes, in the order of their ranks, where there were several."""
    cpu_model: str
    os: str
    python: str
    packages: dict[str, str]
    """Version of every training library that the worker had imported."""
    runtime: str | None = None
    """CUDA or ROCm version that torch was built for."""
    driver: str | None = None
    threads: int = 1
    """CPU threads the worker computed with."""


class Rank(Struct, frozen=True, kw_only=True):
    """What one of several processes of a case measured."""

    step_seconds: tuple[float, ...]
    peak_allocated_bytes: int
    peak_host_bytes: int
    peak_reserved_bytes: int | None = None


class Measurement(Struct, frozen=True, kw_only=True, tag="measured", tag_field="outcome"):
    """A case that trained to its end and passed the worker's checks.

    Of several processes: each step's seconds are the slowest's, memory is the largest of one process, host memory the sum.
    """

    step_seconds: tuple[float, ...]
    """Wall seconds of every timed step, synchronised with the device, in order."""
    warmup_seconds: tuple[float, ...]
    losses: tuple[float, ...]
    """Loss of every timed step."""
    batch_size: int
    """Samples in one step, over all processes."""
    sequence_length: int
    """Tokens per sample as run (the tiny scale shrinks them); 0 where samples are not token sequences."""
    updates: int
    """Optimizer updates from the first step to the last timed one; for own code, calls of its step."""
    parameters: int | None
    """None where own code does not let the worker watch its model; likewise the next two."""
    trainable_parameters: int | None
    model_bytes: int | None
    """Storage of parameters, buffers and quantisation state."""
    peak_allocated_bytes: int
    """Highest sum of live tensor storages from the first step on: the caching allocator's on a GPU, counted tensor by
    tensor (in steps of its own) on a CPU."""
    peak_host_bytes: int
    """Highest resident set of the worker process."""
    peak_reserved_bytes: int | None = None
    """Highest memory held by the caching allocator (GPU)."""
    device_used_bytes: int | None = None
    """Memory in use on the device after the last step, context and other processes included: what nvidia-smi shows."""
    flops_per_step: int | None = None
    """Floating-point operations of one step without recomputation; 0 never stands for unknown."""
    recomputed_flops_per_step: int | None = None
    """Further operations that activation checkpointing repeats."""
    ranks: tuple[Rank, ...] = ()
    """Figures of each process, where there were several."""
    environment: Environment

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def samples_per_second(self) -> float:
        return self.batch_size / self.median_step_seconds

    def update_seconds(self, accumulation: int) -> float | None:
        """Median seconds of an optimizer update with all its micro-batches; None where no whole one was timed."""
        starts = range(0, len(self.step_seconds) - accumulation + 1, accumulation)
        return statistics.median(sum(self.step_seconds[at : at + accumulation]) for at in starts) if starts else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.samples_per_second * self.sequence_length if self.sequence_length else None


class OutOfMemory(Struct, frozen=True, kw_only=True, tag="out_of_memory", tag_field="outcome"):
    """The case does not fit. An outcome: it can be a baseline, and fails a test whose baseline fitted."""

    where: Literal["device", "host"]
    phase: Phase
    message: str
    """The allocator's own sentence."""
    step: int | None = None
    rank: int | None = None
    """Of several processes, the one it happened to."""
    peak_allocated_bytes: int | None = None
    environment: Environment | None = None


class Crashed(Struct, frozen=True, kw_only=True, tag="crashed", tag_field="outcome"):
    """No number: an exception, a failed check, a signal, or a reply that cannot be read."""

    sentence: str
    phase: Phase
    step: int | None = None
    detail: str = ""
    """Traceback or the end of the worker's stderr."""
    exit_code: int | None = None
    rank: int | None = None


class TimedOut(Struct, frozen=True, kw_only=True, tag="timed_out", tag_field="outcome"):
    """The case was ended after its time."""

    timeout_seconds: float
    phase: Phase
    step: int | None = None
    detail: str = ""
    """Python stacks of the worker at the end, where it could still give them."""


Reply = Measurement | OutOfMemory | Crashed | TimedOut


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The case file: everything a worker needs to know."""

    format: int = FORMAT
    case: Case
    scale: Scale
    device_type: Literal["cpu", "gpu"]
    processes: int = 1
    """Ranks of the case, one a GPU."""
    root: str
    """Folder that ``case.code`` is relative to."""
    module: str = ""
    """Name under which the parent imported the file of ``case.code``."""
    import_paths: tuple[str, ...] = ()
    """The parent's import path, appended to the worker's so that own code finds its helpers."""
    curve: bool = False
    """Whether the losses are what is wanted: all of them from the first step on, up to the first that is not finite."""


class Event(Struct, frozen=True, kw_only=True):
    """One line of the progress file."""

    phase: Phase
    step: int | None = None
    """Timed steps finished."""
    step_seconds: float | None = None
    allocated_bytes: int | None = None


class BaselineRun(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fresh process of a recorded baseline. Raw figures only: the rule that judges them may change."""

    outcome: Literal["measured", "out_of_memory"]
    out_of: Literal["device", "host"] | None = None
    """Which memory ran out."""
    environment: Environment
    date: str
    """UTC, ISO 8601."""
    session: str
    """Id of the pytest run; runs of one session share the machine's mood."""
    commit: str = ""
    warmup: int = 0
    step_seconds: tuple[float, ...] = ()
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_host_bytes: int | None = None
    model_bytes: int | None = None
    flops_per_step: int | None = None
    final_loss: float | None = None


class Baseline(Struct, frozen=True, kw_only=True):
    """What is stored for one case on one device."""

    device: str
    """Slug of the folder it lies in, or the name of the report it was read from."""
    case: Case
    scale: Scale
    runs: tuple[BaselineRun, ...]


class Published(Struct, frozen=True, kw_only=True):
    """What others published for one case on one platform: a row of a table in ``baselines/published``."""

    table: str
    suite: str
    platform: str
    """Catalog marker."""
    case: Case
    outcome: Literal["measured", "out_of_memory", "error"]
    """``error`` where the row tells of one instead of figures."""
    cells: dict[str, str]
    """Every column as printed, by its header."""
    figures: dict[str, Figures]
    """By framework, ``pytorch`` or ``paddle``; empty where the figures are a picture."""
    made_with: str
    """Versions and hardware: ``torch 2.5.1 on NVIDIA H100``."""
    time_not_judged: str = ""
    """Why its time is shown but says nothing of the case as declared."""


class MetricVerdict(Struct, frozen=True, kw_only=True):
    """One metric of a case against its baseline."""

    metric: MetricName
    status: Status
    value: float | None = None
    baseline: float | None = None
    limit: float | None = None
    """The value above which the metric regresses."""
    note: str = ""
    """Why it was not compared, or what changed within the limit."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What a case's runs mean. ``failed`` stands for a case that gave no number (a crash, a time-out)."""

    status: Status
    sentence: str
    """One sentence for people: case, value, baseline, delta, limit, what changed in the environment."""
    metrics: tuple[MetricVerdict, ...] = ()

    def metric(self, name: MetricName) -> MetricVerdict | None:
        return next((metric for metric in self.metrics if metric.metric == name), None)


class Summary(Struct, frozen=True, kw_only=True):
    """Figures derived from the runs of a case, for readers that do not want to derive them."""

    median_step_seconds: float
    """Median over the runs of each run's median."""
    samples_per_second: float
    tokens_per_second: float | None
    peak_allocated_bytes: int
    """Median of the runs' peaks (the higher of the middle two)."""
    model_flops_utilization: float | None
    """FLOPs without recomputation over time and the platform's peak (MFU of the PaLM paper, arXiv:2204.02311)."""


class Result(Struct, frozen=True, kw_only=True):
    """One case in one test: a row of the table and of the JSON report."""

    nodeid: str
    suite: str
    key: str
    case: Case
    scale: Scale
    platform: str
    """Catalog marker of the machine, or ``unknown``."""
    device: str
    """Slug: the folder of its baselines."""
    replies: tuple[Reply, ...]
    """One per fresh process."""
    summary: Summary | None = None
    verdict: Verdict | None = None
    """None where the test only measured."""
    published: Published | None = None
    """The row that it was compared with under ``--gpu-baseline=published``."""
    search: Search | None = None
    """Of ``--gpu-find-batch``."""
    loss_curves: tuple[LossCurve, ...] = ()
    """Of ``--gpu-loss``; fp32 first."""


class Report(Struct, frozen=True, kw_only=True):
    """The document of ``--gpu-json``."""

    format: int = FORMAT
    generator: str
    created: str
    session: str
    commit: str = ""
    branch: str = ""
    arguments: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    """Only JSON values."""
    exit_status: int = 0
    notes: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
