"""Patches DeepSpeed so that its engine runs on fakes as it would on a GPU; all else is DeepSpeed's own code.

Not covered: memory that its streams keep from being used again at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def patches(gpu: torch.device | None) -> Iterator[Any]:
    """Yield the patches of DeepSpeed's modules, which are imported.

    Args:
        gpu: label of the GPU that is predicted for; None for a CPU.
    """
    # It looks whether addresses are aligned, and fakes have none.
    yield mock.patch.object(FakeTensor, "data_ptr", _no_address, create=True)
    # Stage 3 puts its own in the place of torch's, for good.
    yield mock.patch.object(torch.nn.functional, "linear", torch.nn.functional.linear)
    # It would remember the process group of this run.
    for name in ("deepspeed.comm.comm", "deepspeed.utils.groups"):
        yield mock.patch.dict(vars(sys.modules[name]))
    if gpu is not None:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        yield mock.patch("deepspeed.accelerator.real_accelerator.ds_accelerator", _accelerator(gpu))
        # Asks only in whose autocast it is.
        yield mock.patch("deepspeed.runtime.zero.linear.get_accelerator", CPU_Accelerator)
        # A shortcut around gloo, which it would compile.
        yield mock.patch.dict(sys.modules["deepspeed.ops"].__compatible_ops__, {"deepspeed_shm_comm": False})
        # Its optimizers are compiled for the machine at hand.
        for name in ("FusedAdamBuilder", "CPUAdamBuilder"):
            for module in ("deepspeed.ops.adam.fused_adam", "deepspeed.ops.adam.cpu_adam"):
                if hasattr(sys.modules[module], name):
                    yield mock.patch.object(sys.modules[module], name, Kernels)
        # Slow, and asked only for a warning.
        yield mock.patch("cpuinfo.get_cpu_info", dict)


def _no_address(tensor: Tensor) -> int:
    # A mock would keep the tensors that it was asked for.
    return 0


def _accelerator(gpu: torch.device) -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Gpu(CPU_Accelerator):  # type: ignore[misc]
        """The one GPU that a rank sees, with unlimited memory."""

        def device_name(self, device_index: Any = None) -> str:
            return str(gpu)

        def current_device(self) -> int | None:
            return gpu.index

        def current_device_name(self) -> str:
            return str(gpu)

        def on_accelerator(self, tensor: Tensor) -> bool:
            return tensor.device == gpu

        def is_fp16_supported(self) -> bool:
            return True

        def supported_dtypes(self) -> list[torch.dtype]:
            return [torch.float, torch.half, torch.bfloat16]

        def available_memory(self, device_index: Any = None) -> int:
            return sys.maxsize

        def memory_allocated(self, device_index: Any = None) -> int:
            return 0

    return Gpu()


class Kernels:
    """DeepSpeed's compiled optimizers: they work in place."""

    def load(self) -> Kernels:
        """Return itself, where their builders load a library."""
        return self

    def multi_tensor_adam(self, chunk: int, flag: Any, lists: list[list[Tensor]], *numbers: float) -> None:
        """Update as `FusedAdam` does, in place: gradients, parameters and both moments."""
        gradients, parameters, first, second = lists
        rate, beta1, beta2, epsilon, step, _, _, decay = numbers
        steps = [torch.tensor(float(step))] * len(parameters)
        torch._fused_adamw_(
            parameters,
            gradients,
            first,
            second,
            [],
            steps,
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=epsilon,
            amsgrad=False,
            maximize=False,
        )

    def create_adam(self, *arguments: Any) -> None:
        """Stand in for `DeepSpeedCPUAdam`, as those below do: it works on the host, where nothing is counted."""

    def adam_update(self, *arguments: Any) -> None:
        """Do one update."""

    def destroy_adam(self, *arguments: Any) -> None:
        """Free the optimizer."""
