"""Follows what else writes to an emulated GPU's memory: kernels of Triton, and operators that libraries register later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .after_import import after_import
from .contents import Contents
from .graphs import Graphs
from .padding import Padding


def follow_triton(contents: Contents, graphs: Graphs, padding: Padding) -> None:
    """Mark as unknown what Triton kernels write, both kernels of torch.compile and kernels of the program."""

    def forget(names: Any, arguments: Any) -> None:
        written = []
        for index, argument in enumerate(arguments):
            # torch.compile gives this name to inputs that a kernel only reads.
            read_only = index < len(names) and names[index].startswith("in_ptr")
            if isinstance(argument, Tensor) and argument.is_cuda and not read_only:
                written.append(argument)
        if not (graphs.captures.value and graphs.defer(None, (), {}, None, written)):
            for argument in written:
                contents.forget(argument)

    def follow_compiled(module: Any) -> None:
        run = module.CachingAutotuner.run

        @functools.wraps(run)
        def run_and_forget(self: Any, *arguments: Any, **keywords: Any) -> Any:
            result = run(self, *arguments, **keywords)
            forget(self.fn.arg_names, arguments)
            return result

        module.CachingAutotuner.run = run_and_forget
        module.CachingAutotuner.benchmark_all_configs = _take_the_first
        module.CachingAutotuner.coordinate_descent_tuning = lambda tuner, launcher, *arguments, **keywords: launcher

    def follow_own(module: Any) -> None:
        run = module.JITFunction.run

        @functools.wraps(run)
        def run_and_forget(self: Any, *arguments: Any, **keywords: Any) -> Any:
            result = run(self, *arguments, **keywords)
            forget((), (*arguments, *keywords.values()))
            return result

        module.JITFunction.run = run_and_forget

    def follow_templates(module: Any) -> None:
        selector = module.AlgorithmSelectorCache
        selector.make_precompile_fn = lambda *arguments, **keywords: dict
        selector.make_benchmark_fn = lambda *arguments, **keywords: lambda choices: dict.fromkeys(choices, 1.0)

    # Times mean nothing here, and a choice by times would differ between two runs. So Inductor takes its first
    # choice, and allocates no buffers for measuring all choices.
    after_import("torch._inductor.runtime.triton_heuristics", follow_compiled)
    after_import("torch._inductor.select_algorithm", follow_templates)
    after_import("torch._inductor.fx_passes.pad_mm", padding.follow)
    after_import("triton.runtime.jit", follow_own)


def follow_libraries(replace_new: Callable[[], None], replacing: Callable[[], bool]) -> None:
    """Replace the operators that libraries register later, too."""
    library: Any = torch.library.Library
    operators: Any = type(torch.ops)
    register, load = library.impl, operators.load_library

    @functools.wraps(register)
    def register_and_replace(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = register(self, *arguments, **keywords)
        if not replacing():
            replace_new()
        return result

    @functools.wraps(load)
    def load_and_replace(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = load(self, *arguments, **keywords)
        replace_new()
        return result

    library.impl = register_and_replace
    operators.load_library = load_and_replace


def _take_the_first(tuner: Any, *arguments: Any, **keywords: Any) -> dict[Any, float]:
    """Return equal times for all configurations of a compiled kernel, so that torch takes the first one."""
    return dict.fromkeys(tuner.launchers, 0.0)
