"""Implements the engines zero0 to zero3, by DeepSpeed: optimizer state, then gradients, then parameters in shards, or on the
host.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor, nn

from pytest_gputrain.cases.deepspeed_config import merge
from pytest_gputrain.records import Case
from pytest_gputrain.worker.checks import CheckFailed
from pytest_gputrain.worker.device import is_gpu
from pytest_gputrain.worker.learning_rate import is_scheduled, scheduler
from pytest_gputrain.worker.parallel.engine import Engine, EngineOptions

_DEFAULT_BUCKET_ELEMENTS: Final = 500_000_000
"""DeepSpeed's own, for gathering and for reducing."""

_DEFAULT_PREFETCH_ELEMENTS: Final = 50_000_000
_DEFAULT_PERSISTENT_ELEMENTS: Final = 100_000
"""DeepSpeed's own for stage 3: a parameter with fewer elements stays whole: all of a tiny model's would."""

_SIZES: Final = frozenset(
    {
        "reduce_bucket_size",
        "allgather_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    }
)
"""Options of ``zero_optimization`` that are numbers of elements."""

_ALIGNMENT: Final = 64

_INITIAL_SCALE_POWER: Final = 10
"""The first scale, as in `Precision.scaler`: DeepSpeed's own 2**16 drops the first updates of a fresh model."""


class Zero(Engine):
    """The engine of DeepSpeed with the case's options, and with DeepSpeed's defaults for all others.

    Its own fp16 (``fp16-amp``) and bf16 (``bf16``) keep the model in 16 bits and fp32 masters with the optimizer's states;
    ``bf16-amp`` is autocast over fp32 weights. AdamW is DeepSpeed's own on a GPU machine (`DeepSpeedCPUAdam` for an
    offloaded update) and torch's on a CPU, where DeepSpeed would have to compile one first.
    """

    def __init__(self, model: nn.Module, options: EngineOptions) -> None:
        import deepspeed

        on_gpu = is_gpu(options.device)
        if options.case.precision == "fp16-amp" and not on_gpu:
            raise CheckFailed("DeepSpeed's fp16 needs a GPU; choose bf16 on a CPU")
        trained = [value for value in model.parameters() if value.requires_grad]
        self._precision = options.precision
        self._device = options.device
        configuration = configure(options.case, options.shrinkage, options.deepspeed, on_gpu=on_gpu)
        client = None if "optimizer" in configuration else options.make_optimizer(trained)
        if not on_gpu:
            # Otherwise DeepSpeed compiles this shortcut around gloo for minutes, or waits for the lock of a killed build.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo")
        self._engine: Any = deepspeed.initialize(
            model=model,
            model_parameters=trained,
            optimizer=client,
            lr_scheduler=functools.partial(scheduler, options.case) if is_scheduled(options.case) else None,
            config=configuration,
        )[0]
        self.model = self._engine
        self.updates = 0
        self.forward_is_local = options.case.parallel != "zero3"

    def step(self, loss: Callable[[], Tensor], update: bool) -> Tensor:
        engine = self._engine
        engine.set_gradient_accumulation_boundary(update)
        with self._casting():
            value = loss()
        engine.backward(value)
        before = engine.skipped_steps
        engine.step()
        self.updates += update and engine.skipped_steps == before
        return value.detach()

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        # DeepSpeed itself casts the inputs of a 16-bit model.
        return contextlib.nullcontext() if self._engine.fp16_enabled() else self._precision.casting(self._device)


def configure(
    case: Case, shrinkage: float, further: Mapping[str, Any] = MappingProxyType({}), *, on_gpu: bool
) -> dict[str, Any]:
    """Return DeepSpeed's configuration for the case.

    Args:
        shrinkage: the factor for sizes of buffers, without which a tiny model would allocate gigabytes of them.
        further: options that the case does not decide; they replace what is set here for all cases.
    """
    zero: dict[str, Any] = {
        "stage": int(case.parallel.removeprefix("zero")),
        "reduce_bucket_size": _sized(case.reduce_bucket_size or _DEFAULT_BUCKET_ELEMENTS, shrinkage),
        "allgather_bucket_size": _sized(case.allgather_bucket_size or _DEFAULT_BUCKET_ELEMENTS, shrinkage),
    }
    if case.parallel == "zero3":
        zero["stage3_prefetch_bucket_size"] = _sized(_DEFAULT_PREFETCH_ELEMENTS, shrinkage)
        zero["stage3_param_persistence_threshold"] = _sized(_DEFAULT_PERSISTENT_ELEMENTS, shrinkage)
    if case.stage3_max_live_parameters:
        zero["stage3_max_live_parameters"] = _sized(case.stage3_max_live_parameters, shrinkage)
    host = {"device": "cpu", "pin_memory": case.pin_memory}
    if case.offload_optimizer:
        zero["offload_optimizer"] = host
    if case.offload_param:
        zero["offload_param"] = host
    if case.overlap_comm is not None:
        zero["overlap_comm"] = case.overlap_comm
    configuration: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch_size,
        "gradient_accumulation_steps": case.gradient_accumulation,
        "zero_optimization": zero,
        "bf16": {"enabled": case.precision == "bf16"},
        "fp16": {"enabled": case.precision == "fp16-amp", "initial_scale_power": _INITIAL_SCALE_POWER},
        # By default DeepSpeed clips to 1.0.
        "gradient_clipping": case.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if case.optimizer in ("adamw", "adamw-fused"):
        parameters = {"lr": case.learning_rate, "weight_decay": 0.01, "torch_adam": not on_gpu, "adam_w_mode": True}
        configuration["optimizer"] = {"type": "AdamW", "params": parameters}
    merge(configuration, dict(further))
    for name in _SIZES & further.get("zero_optimization", {}).keys():
        zero[name] = zero[name] and _sized(round(zero[name]), shrinkage)
    return configuration


def _sized(elements: int, shrinkage: float) -> int:
    if shrinkage == 1:
        return elements
    # DeepSpeed refuses a size that is no multiple of its alignment.
    return max(1, round(elements * shrinkage / _ALIGNMENT)) * _ALIGNMENT
