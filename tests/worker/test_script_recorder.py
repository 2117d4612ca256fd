"""Tests what a script that a test runs tells of its steps and of its memory: its own, a framework's, and none."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from pytest_gputrain.worker import script

LOOP = """
    import torch

    weight = torch.nn.Parameter(torch.ones(8))
    main, other = torch.optim.SGD([weight]), torch.optim.SGD([weight])
    for number in range(5):
        weight.sum().backward()
        main.step()
        if number % 2:
            other.step()
"""

TRAINER = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    )
    ids = torch.randint(16, (64, 4))
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, use_cpu=True
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train()
"""

LIGHTNING = """
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), 2)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=2, accumulate_grad_batches=2, logger=False, enable_checkpointing=False
    )
    trainer.fit(Module(), loader)
"""

ON_GPU = """
    import sys

    import torch

    peaks = [300, 200]

    def statistics(device):
        peak = max(peaks)
        return {"allocated_bytes.all.peak": peak, "reserved_bytes.all.peak": 2 * peak}

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = lambda: None
    torch.cuda.device_count = lambda: 1
    torch.cuda.memory_stats = statistics
    torch.cuda.mem_get_info = lambda device: (1000, 8000)
    torch._C._cuda_resetPeakMemoryStats(0) if hasattr(torch._C, "_cuda_resetPeakMemoryStats") else None
    if sys.argv[1:] == ["oom"]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.")
"""


def _run(folder: Path, text: str, *arguments: str) -> tuple[int, list[Any]]:
    file, state = folder / "train.py", folder / "state"
    file.write_text(textwrap.dedent(text))
    state.mkdir()
    startup = Path(script.__file__).parent / "startup"
    path = os.pathsep.join([str(startup), os.environ.get("PYTHONPATH", "")])
    # Other tests of this process leave variables of process groups behind.
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environ = {**clean, "GPUTRAIN_SCRIPT_STATE": str(state), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(file), *arguments], env=environ, cwd=folder, check=False, timeout=300)
    return done.returncode, [json.loads(path.read_bytes()) for path in state.iterdir()]


@pytest.mark.slow
def test_updates_of_the_busiest_optimizer_are_steps(tmp_path: Path) -> None:
    status, (recorded,) = _run(tmp_path, LOOP)
    assert status == 0
    assert (recorded["steps_of"], recorded["devices"]) == ("optimizer", [])
    (stamps,) = recorded["stamps"]
    assert len(stamps) == 5
    assert stamps == sorted(stamps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "name"), [(TRAINER, "transformers"), pytest.param(LIGHTNING, "lightning", marks=pytest.mark.weekly)]
)
def test_micro_batches_of_a_framework_are_steps(tmp_path: Path, text: str, name: str) -> None:
    pytest.importorskip(name)
    status, (recorded,) = _run(tmp_path, text)
    assert status == 0
    assert recorded["steps_of"] == name
    (stamps,) = recorded["stamps"]
    assert len(stamps) == 1 + {"transformers": 3, "lightning": 2}[name] * 2


def test_a_process_without_torch_tells_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path, "print(1)") == (0, [])


@pytest.mark.parametrize(("arguments", "status", "told"), [(("oom",), 1, "CUDA out of memory"), ((), 0, "None")])
def test_peaks_and_running_out_of_memory_are_told(
    tmp_path: Path, arguments: tuple[str, ...], status: int, told: str
) -> None:
    ended, (recorded,) = _run(tmp_path, ON_GPU, *arguments)
    assert ended == status
    assert recorded["devices"] == [{"allocated": 300, "reserved": 600, "used": 7000}]
    assert str(recorded["out_of_memory"]).startswith(told)
