"""Defines the record of one line of the history: a case as one pytest run measured it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct

from pytest_gputrain.records.case import FORMAT, KNOBS, Case, Scale
from pytest_gputrain.records.counts import COUNT_FIGURES, CountFigure
from pytest_gputrain.records.verdict import Status
from pytest_gputrain.records.whole import Whole


class _Line(Struct, frozen=True, kw_only=True):
    """A line of ``--gpu-history``: one case in one pytest run.

    It is flat, and every line has every key, so that whatever reads JSON lines makes one column of each. A key has one type,
    or null if there is no such figure. New versions may add keys. They do not change the meaning of a key while ``format``
    is the same.
    """

    format: Whole = FORMAT
    """The version of these keys."""
    kind: Literal["measurement", "emulation"]
    """``emulation`` for a line of ``--gpu-emulate``, otherwise ``measurement``."""
    date: str
    """When the pytest run began, in UTC (ISO 8601)."""
    session: str
    """The id of the pytest run."""
    commit: str
    """The commit, with ``+dirty`` if tracked files differed from it. Empty outside of a repository."""
    branch: str
    """The branch, or its name in CI if the head is detached. Empty for none."""
    suite: str
    """The test file without ``test_`` and ``.py``."""
    key: str
    """The id of the case. It ends in ``@tiny`` at the tiny scale."""
    scale: Scale
    """``full`` or ``tiny``."""
    platform: str
    """The marker of the machine, or ``unknown``."""
    device: str
    """The name of the folder of its baselines; ``emulated/h100`` for an emulated GPU."""
    device_name: str | None
    """The name that the driver reports. This and the following keys are null if no process lived long enough to report
    them."""
    device_type: str | None
    """``cpu``, ``cuda`` or ``rocm``."""
    device_count: Whole | None
    """The processes of the case, servers included."""
    device_memory_bytes: Whole | None
    """The memory of one device."""
    topology: str | None
    """How the case's GPUs are linked, as ``NV18``."""
    host: str | None
    """The name of the machine, or of the first of several nodes."""
    cpu_model: str | None
    """The model of the CPU of the host."""
    os: str | None
    """The operating system of the host."""
    threads: Whole | None
    """CPU threads of a worker."""
    cores: Whole | None
    """CPU cores that a worker could use. This and the next two are null in lines that are older than the keys."""
    host_memory_bytes: Whole | None
    """The memory of the host, or the limit of its container."""
    nics: str | None
    """The ports of the host's network cards by kind and rate, as ``8 x mlx5_core 400 Gb/sec (4X NDR)``."""
    version_gputrain: str
    """The version of this package."""
    version_python: str | None
    """The version of Python of the worker."""
    version_driver: str | None
    """The version of the GPU's driver."""
    version_runtime: str | None
    """The version of CUDA or ROCm that torch was built for."""
    version_cudnn: str | None
    """The version of cuDNN, or of MIOpen under ROCm. Null on a CPU."""
    version_nccl: str | None
    """The version of NCCL, or of RCCL under ROCm. Null on a CPU."""
    version_torch: str | None
    """The version of torch. Null if it is not installed."""
    version_transformers: str | None
    """The version of transformers. Null if it is not installed."""
    version_diffusers: str | None
    """The version of diffusers. Null if it is not installed."""
    version_peft: str | None
    """The version of peft. Null if it is not installed."""
    version_accelerate: str | None
    """The version of accelerate. Null if it is not installed."""
    version_bitsandbytes: str | None
    """The version of bitsandbytes. Null if it is not installed."""
    version_deepspeed: str | None
    """The version of deepspeed. Null if it is not installed."""
    version_triton: str | None
    """The version of triton. Null if it is not installed."""
    changed_variables: str | None
    """Names of the environment variables that the test had changed, separated by commas. Null for none."""
    outcome: Literal["measured", "emulated", "out_of_memory", "crashed", "timed_out", "lost"]
    """The outcome of the case: that of the first process that gave no figures, if there is one."""
    verdict: Status | None
    """The verdict. Null if the test only measured."""
    sentence: str | None
    """The sentence of the verdict, or the reason why there are no figures."""
    runs: Whole
    """Fresh processes that gave figures."""
    median_step_seconds: float | None
    """Seconds of one micro-batch: the median over the processes of the median of each."""
    least_step_seconds: float | None
    """The median of the fastest process."""
    most_step_seconds: float | None
    """The median of the slowest process."""
    step_mad_seconds: float | None
    """The median distance of a step from the median of its process."""
    samples_per_second: float | None
    """Samples per second of all processes together, at the median step."""
    tokens_per_second: float | None
    """Tokens per second of all processes together, at the median step. Null if samples are not token sequences."""
    scaling_efficiency: float | None
    """The scaling efficiency as a share, if the test asks for it."""
    model_flops_utilization: float | None
    """The share of the platform's peak FLOP/s."""
    joules_per_sample: float | None
    """The energy of the case's GPUs per sample. This and the next three are null if no driver reports them."""
    power_watts: float | None
    """The mean power of the case's GPUs together."""
    clock_mhz: Whole | None
    """The median clock of the GPU that has the lowest."""
    gpu_utilization: float | None
    """The share of the time in which a kernel ran."""
    gpu_seconds: float | None
    """The seconds that the GPU works in a step, without collectives. This and the next are null in lines that are older than
    the keys, and where they are not known."""
    gpu_busy_share: float | None
    """The share of the median step in which the GPU works."""
    peak_allocated_bytes: Whole | None
    """The peak of one process. This and the next nine are medians over the processes. Of an even number, the higher of the
    middle two."""
    build_peak_bytes: Whole | None
    """The peak of building, before the first step. This and the next four are null for a measurement on a GPU."""
    forward_peak_bytes: Whole | None
    """The peak of a step before its first backward pass."""
    backward_peak_bytes: Whole | None
    """The peak of backward passes."""
    between_peak_bytes: Whole | None
    """The peak after the first backward pass of a step, outside of backward passes and optimizers."""
    optimizer_peak_bytes: Whole | None
    """The peak of steps of optimizers."""
    evaluate_peak_bytes: Whole | None = None
    """The peak of the evaluation. This and the next two are null of a case without them, and in lines that are older."""
    checkpoint_peak_bytes: Whole | None = None
    """The peak of saving a checkpoint."""
    checkpoint_host_peak_bytes: Whole | None = None
    """The host's peak of saving a checkpoint of a GPU."""
    peak_reserved_bytes: Whole | None
    """The highest memory that the caching allocator held."""
    device_used_bytes: Whole | None
    """The memory in use on the device, that of others included."""
    peak_host_bytes: Whole | None
    """The highest resident set of the worker."""
    model_bytes: Whole | None
    """The memory of parameters, buffers and quantisation state."""
    parameters: Whole | None
    """The number of parameters."""
    trainable_parameters: Whole | None
    """The number of parameters that train."""
    flops_per_step: Whole | None
    """Floating-point operations of one step, without recomputation."""
    recomputed_flops_per_step: Whole | None
    """Further operations that activation checkpointing repeats."""
    bytes_per_step: Whole | None
    """For an emulated run: the bytes that the operators read and write."""
    fits: bool | None
    """Whether the case fits the platform, for an emulated run."""
    baseline_step_seconds: float | None
    """The time that the verdict compared with."""
    limit_step_seconds: float | None
    """The time beyond which the case regresses, by tolerance and noise."""
    step_sensitivity: float | None
    """The slowdown, as a share, that would be caught 99 times in 100."""
    baseline_peak_allocated_bytes: Whole | None
    """The peak that the verdict compared with."""
    limit_peak_allocated_bytes: Whole | None
    """The peak beyond which the case regresses."""


COUNT_KEYS: Final[dict[str, CountFigure]] = {f"{figure}_per_step": figure for figure in COUNT_FIGURES}
"""The keys of the counts of a step, each with its figure: the mean of the counted steps."""

KNOB_KEYS: Final = {name: knob for name, knob in KNOBS.items() if knob.in_history}
"""The keys of the case, each a field of `Case` of the same name and meaning. A line that is older than a knob has its
default."""


def knobs(case: Case) -> dict[str, Any]:
    """Return the knobs of a case as a line has them."""
    return {name: knob.in_line(getattr(case, name)) for name, knob in KNOB_KEYS.items()}


if TYPE_CHECKING:
    HistoryLine = _Line
else:
    HistoryLine = msgspec.defstruct(
        "HistoryLine",
        [
            *((name, knob.history_type, knob.in_line(knob.default)) for name, knob in KNOB_KEYS.items()),
            *((key, float | None, None) for key in COUNT_KEYS),
        ],
        bases=(_Line,),
        module=__name__,
        namespace={"__doc__": _Line.__doc__},
        frozen=True,
        kw_only=True,
    )
