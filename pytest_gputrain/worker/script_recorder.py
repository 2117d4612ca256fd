"""Records in a script that a test runs what it allocates at most, and when its steps end, and writes both when it ends.

It runs inside the script, loaded by its path: it imports the standard library and torch.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any, Final

FRAMEWORKS: Final = {
    "transformers.trainer": "_follow_transformers",
    "lightning.pytorch.trainer.trainer": "_follow_lightning",
    "pytorch_lightning.trainer.trainer": "_follow_lightning",
}
"""Modules that define trainers, and the methods that have them tell of their steps."""


def install(torch: ModuleType, memory_recorder: Any) -> None:
    """Begin to record, and write the record when the script ends."""
    memory = memory_recorder.Recorder(torch)
    memory.watch_resets()
    recorder = _Recorder(torch, memory, memory_recorder)
    if "GPUTRAIN_EMULATED_DEVICE" in os.environ:
        torch.cuda._lazy_call(recorder.track_values)
    recorder.follow_optimizers()
    after_import = memory_recorder.load("after_import").after_import
    for module, follow in FRAMEWORKS.items():
        after_import(module, getattr(recorder, follow))
    atexit.register(recorder.write)


class _Recorder:
    """Records the memory and the steps of this process.

    A step is a micro-batch of a framework's trainer, or an update of the optimizer that makes most of them.
    """

    def __init__(self, torch: ModuleType, memory: Any, memory_recorder: Any) -> None:
        self._torch, self._memory, self._memory_recorder = torch, memory, memory_recorder
        self._values: Any = None
        self._counter: Any = None
        self._process = os.getpid()
        self._framework = ""
        self._of_framework: list[list[float]] = []
        self._of_optimizers: list[list[float]] = []

    def write(self) -> None:
        """Write what happened for the worker that runs the script."""
        torch, folder = self._torch, os.environ.get("GPUTRAIN_SCRIPT_STATE")
        if not folder or os.getpid() != self._process:
            return
        used = torch.cuda.is_initialized()
        error = getattr(sys, "last_value", None)
        report = {
            "process": os.getpid(),
            "cuda": torch.version.cuda or torch.version.hip,
            "devices": [self._device(device) for device in range(torch.cuda.device_count())] if used else [],
            "steps_of": self._framework or "optimizer",
            "stamps": self._of_framework if self._framework else [max(self._of_optimizers, key=len, default=[])],
            "out_of_memory": str(error) if isinstance(error, torch.OutOfMemoryError) else None,
            "unknown": list(self._memory_recorder.unknown()),
            "estimated_bytes": self._memory_recorder.estimated_bytes(),
            "not_exchanged": list(self._memory_recorder.not_exchanged()),
            **(self._counter.report() if self._counter is not None else {}),
            **(self._values.report() if self._values else {}),
        }
        path = Path(folder, f"{os.getpid()}.json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps(report))
        part.rename(path)

    def track_values(self) -> None:
        """Track values from now on, because the script begins to use an emulated GPU, which computes no values."""
        if "GPUTRAIN_SCRIPT_COUNTS" in os.environ:
            self._counter = self._memory_recorder.program_counter()
        self._values = self._memory_recorder.tracked_values(self._counter)

    def _device(self, device: int) -> dict[str, int]:
        peaks = self._memory.keep_peaks(device)
        free, total = self._torch.cuda.mem_get_info(device)
        return {"allocated": peaks["allocated"], "reserved": peaks["reserved"], "used": total - free}

    def _stamp(self) -> float:
        """Return the time at which the device has finished all work so far. An emulated device has nothing to do."""
        if self._torch.cuda.is_initialized() and self._values is None:
            self._torch.cuda.synchronize()
        return time.perf_counter()

    def follow_optimizers(self) -> None:
        """Note the end of each update by an optimizer of torch."""
        stamps: weakref.WeakKeyDictionary[Any, list[float]] = weakref.WeakKeyDictionary()

        def updated(optimizer: Any, *_: object) -> None:
            if self._counter is not None:
                self._counter.updated(optimizer, ends_step=not self._framework)
            if self._framework:
                return
            if optimizer not in stamps:
                stamps[optimizer] = []
                self._of_optimizers.append(stamps[optimizer])
            stamps[optimizer].append(self._stamp())

        self._memory_recorder.follow_optimizers(updated)

    def began(self, framework: str) -> None:
        """Note that the training of a framework begins."""
        self._framework = framework
        self._end_step(kept=False)
        self._of_framework.append([self._stamp()])

    def stepped(self) -> None:
        """Note that a micro-batch of a framework is over."""
        self._end_step()
        self._of_framework[-1].append(self._stamp())

    def _end_step(self, *, kept: bool = True) -> None:
        if self._counter is not None:
            self._counter.next_step(kept=kept)

    def _follow_transformers(self, module: Any) -> None:
        recorder, train = self, module.Trainer.train

        class Steps(module.TrainerCallback):  # type: ignore[misc]  # which is known when the library is
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                recorder.began("transformers")

            def on_substep_end(self, *_: Any, **__: Any) -> None:
                recorder.stepped()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                recorder.stepped()

        def followed(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            trainer.add_callback(Steps())
            try:
                return train(trainer, *args, **kwargs)
            finally:
                trainer.remove_callback(Steps)

        module.Trainer.train = followed

    def _follow_lightning(self, module: Any) -> None:
        recorder, fit = self, module.Trainer.fit

        class Steps(module.Callback):  # type: ignore[misc]
            def on_train_start(self, *_: Any) -> None:
                recorder.began("lightning")

            def on_train_batch_end(self, *_: Any) -> None:
                recorder.stepped()

        def followed(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            steps = Steps()
            trainer.callbacks.append(steps)
            try:
                return fit(trainer, *args, **kwargs)
            finally:
                trainer.callbacks.remove(steps)

        module.Trainer.fit = followed
