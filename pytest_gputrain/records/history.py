"""Defines the record of one line of the history: a case as one pytest run measured it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from pytest_gputrain.records.case import FORMAT, Scale
from pytest_gputrain.records.verdict import Status
from pytest_gputrain.records.whole import Whole


class HistoryLine(Struct, frozen=True, kw_only=True):
    """One case in one pytest run, of ``--gpu-history``.

    Flat, and every key in every line, so that whatever reads JSON lines makes one column of each: a key has one type, or
    null where there is no such figure. Keys are added at times; none changes its meaning while ``format`` is the same.
    """

    format: Whole = FORMAT
    """Version of these keys."""
    kind: Literal["measurement", "prediction", "emulation"]
    """``prediction`` for a line of ``--gpu-predict``, ``emulation`` for one of ``--gpu-emulate``."""
    date: str
    """When the pytest run began: UTC, ISO 8601."""
    session: str
    """Id of the pytest run."""
    commit: str
    """With ``+dirty`` where tracked files differed from it; empty outside of a repository."""
    branch: str
    """Of git, or as CI names it where the head is detached; empty for none."""
    suite: str
    """Test file without ``test_`` and ``.py``."""
    key: str
    """Id of the case, ending in ``@tiny`` for the tiny scale."""
    scale: Scale
    """``full`` or ``tiny``."""
    platform: str
    """Catalog marker of the machine, or ``unknown``."""
    device: str
    """Slug of the device; ``predicted/h100`` for a prediction, ``emulated/h100`` for an emulated GPU."""
    device_name: str | None
    """As the driver gives it; this and what follows null where no process lived to tell."""
    device_type: str | None
    """``cpu``, ``cuda`` or ``rocm``."""
    device_count: Whole | None
    """Processes of the case, servers included."""
    device_memory_bytes: Whole | None
    """Of one device."""
    topology: str | None
    """How the case's GPUs are linked: ``NV18``."""
    host: str | None
    """Name of the machine, the first of several nodes."""
    cpu_model: str | None
    """Of the host."""
    os: str | None
    """Of the host."""
    threads: Whole | None
    """CPU threads of a worker."""
    cores: Whole | None
    """CPU cores that a worker could use; this and the next two null in lines from before they were asked for."""
    host_memory_bytes: Whole | None
    """Of the host, or the limit of its container."""
    nics: str | None
    """Ports of the host's network cards by kind and rate: ``8 x mlx5_core 400 Gb/sec (4X NDR)``."""
    version_gputrain: str
    """Of this package."""
    version_python: str | None
    """Of the worker."""
    version_driver: str | None
    """Of the GPU's driver."""
    version_runtime: str | None
    """CUDA or ROCm that torch was built for."""
    version_cudnn: str | None
    """cuDNN, under ROCm MIOpen; null on a CPU."""
    version_nccl: str | None
    """NCCL, under ROCm RCCL; null on a CPU."""
    version_torch: str | None
    """Null where it is not installed, as those below."""
    version_transformers: str | None
    version_diffusers: str | None
    version_peft: str | None
    version_accelerate: str | None
    version_bitsandbytes: str | None
    version_deepspeed: str | None
    version_triton: str | None
    model: str
    """From here to ``args`` the knobs of the case, as ``Case`` documents them."""
    method: str
    precision: str
    parallel: str
    gpus: Whole
    servers: Whole
    asynchronous: bool
    batch_size: Whole
    """Of one process."""
    sequence_length: Whole
    lengths: str
    ids: str
    loader_workers: Whole
    resolution: str
    frames: Whole
    gradient_accumulation: Whole
    activation_checkpointing: float
    """Share of the blocks that are recomputed: 1.0 for all."""
    activation_checkpointing_policy: str
    reentrant_checkpointing: bool
    lora_rank: Whole
    lora_alpha: Whole
    lora_dropout: float | None
    lora_targets: str
    dora: bool
    quantized_compute: str
    attention: str
    optimizer: str
    compile: str
    tf32: bool | None
    master_weights: bool
    loss: str
    loss_chunks: Whole
    learning_rate: float
    lr_scheduler: str
    lr_warmup_steps: Whole
    max_grad_norm: float
    cpu_offload: bool
    reshard_after_forward: bool | None
    offload_optimizer: bool
    offload_param: bool
    pin_memory: bool
    overlap_comm: bool | None
    allgather_bucket_size: Whole
    reduce_bucket_size: Whole
    stage3_max_live_parameters: Whole
    deepspeed_config: str
    """The file and the digest of what it sets."""
    steps: Whole
    warmup: Whole
    code: str
    args: str
    changed_variables: str | None
    """Names of the environment variables that the test had changed, with commas between them; null for none."""
    outcome: Literal["measured", "predicted", "emulated", "out_of_memory", "crashed", "timed_out", "lost"]
    """Of the first process that gave no figures, if one did."""
    verdict: Status | None
    """Null where the test only measured."""
    sentence: str | None
    """What the verdict says, or why there are no figures."""
    runs: Whole
    """Fresh processes that gave figures."""
    median_step_seconds: float | None
    """Of one micro-batch: the median over the processes of each one's median."""
    least_step_seconds: float | None
    """The median of the fastest process."""
    most_step_seconds: float | None
    """The median of the slowest process."""
    step_mad_seconds: float | None
    """Median distance of a step from the median of its process."""
    samples_per_second: float | None
    """Of all processes together, by the median step."""
    tokens_per_second: float | None
    """Likewise; null where samples are not token sequences."""
    scaling_efficiency: float | None
    """Share, where the test asks for it."""
    model_flops_utilization: float | None
    """Share of the platform's peak."""
    joules_per_sample: float | None
    """Energy of the case's GPUs; this and the next three null where no driver tells."""
    power_watts: float | None
    """Of the case's GPUs together."""
    clock_mhz: Whole | None
    """Of the GPU that has the lowest."""
    gpu_utilization: float | None
    """Share of the time in which a kernel ran."""
    peak_allocated_bytes: Whole | None
    """Of one process; this and the next nine the median over the processes, the higher of the middle two."""
    build_peak_bytes: Whole | None
    """Of building, before the first step; this and the next four null for a measurement on a GPU."""
    forward_peak_bytes: Whole | None
    """Of a step before its first backward pass."""
    backward_peak_bytes: Whole | None
    """Of backward passes."""
    between_peak_bytes: Whole | None
    """After the first backward pass of a step, outside of backward passes and optimizers."""
    optimizer_peak_bytes: Whole | None
    """Of steps of optimizers."""
    peak_reserved_bytes: Whole | None
    device_used_bytes: Whole | None
    """Memory in use on the device, others' included."""
    peak_host_bytes: Whole | None
    model_bytes: Whole | None
    """Parameters, buffers and quantisation state."""
    parameters: Whole | None
    trainable_parameters: Whole | None
    flops_per_step: Whole | None
    """Without recomputation."""
    recomputed_flops_per_step: Whole | None
    """What activation checkpointing repeats."""
    final_loss: float | None
    """Of the last timed step of the first process."""
    bytes_per_step: Whole | None
    """Of a prediction, as the next two: read and written by the operators."""
    roofline_seconds: float | None
    """Least time of a step."""
    fits: bool | None
    """Whether the case fits the platform."""
    baseline_step_seconds: float | None
    """What the verdict compared with."""
    limit_step_seconds: float | None
    """The time beyond which the case regresses, by tolerance and noise."""
    step_sensitivity: float | None
    """The slowdown, as a share, that would be caught 99 times in 100."""
    baseline_peak_allocated_bytes: Whole | None
    """What the verdict compared with."""
    limit_peak_allocated_bytes: Whole | None
    """The peak beyond which the case regresses."""
