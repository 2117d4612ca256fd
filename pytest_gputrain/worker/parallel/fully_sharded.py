"""Implements the engine fsdp, torch's FSDP2: parameters, gradients and optimizer state in shards, gathered block by
block.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from pytest_gputrain.worker.parallel.engine import EngineOptions
from pytest_gputrain.worker.parallel.single import Single


class FullySharded(Single):
    """The engine fsdp, with one unit for each block and one for the rest. Autocast precisions become FSDP's own: shards in
    fp32 that are gathered in 16 bits."""

    def spread(self, model: nn.Module, options: EngineOptions) -> nn.Module:
        # This import brings DTensor and sympy, and takes a third of the start of a worker. So only a case that shards
        # imports it.
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        offload = CPUOffloadPolicy(pin_memory=options.device.type != "cpu") if options.case.cpu_offload else OffloadPolicy()
        arithmetic = options.precision.autocast
        policy = (
            MixedPrecisionPolicy(param_dtype=arithmetic, reduce_dtype=torch.float32)
            if arithmetic
            else MixedPrecisionPolicy()
        )
        # A UNet's blocks are lists of modules, which FSDP cannot wrap.
        blocks = [inner for block in options.blocks for inner in (block if isinstance(block, nn.ModuleList) else [block])]
        reshard = options.case.reshard_after_forward
        asked: dict[str, Any] = {} if reshard is None else {"reshard_after_forward": reshard}
        for unit in (*blocks, model):
            fully_shard(unit, mp_policy=policy, offload_policy=offload, **asked)
        if options.case.cpu_offload:
            for buffer in model.buffers():  # FSDP leaves buffers on the device of the build.
                buffer.data = buffer.to(options.device)
        return model

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def communicating(self, update: bool) -> contextlib.AbstractContextManager[Any]:
        # Whole gradients would not fit. So every micro-batch reduces them to shards.
        return contextlib.nullcontext()
