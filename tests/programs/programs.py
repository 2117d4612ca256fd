"""Seventeen small programs with random weights, each in a file of its own; ``planted.py`` changes something in them."""

import importlib
import json
import os

import pytest

PROGRAMS = {
    "contrastive": {"batch_size": 16},
    "ppo": {"batch_size": 64},
    "graphs": {"batch_size": 16},
    "words": {"batch_size": 8},
    "detection": {"batch_size": 2},
    "segmentation": {"batch_size": 2},
    "metric": {"batch_size": 32},
    "conformer": {"batch_size": 4},
    "sharded": {"batch_size": 4, "parallel": "fsdp", "gpus": 2},
    "grpo": {"batch_size": 8},
    "trainer": {"batch_size": 4, "gradient_accumulation": 2},
    "scaler": {"batch_size": 16},
    "whisper": {"batch_size": 4},
    "yolo": {"batch_size": 2},
    "dpo": {"batch_size": 4},
    "experts": {"batch_size": 4, "gradient_accumulation": 2},
    "diffusion": {"batch_size": 4},
}
SIZES = json.loads(os.environ.get("PLANTED_BYTES", "{}"))


def program(setup, name):
    importlib.import_module("planted").size = SIZES.get(name, 0)
    return importlib.import_module(name).train(setup)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(gputrain, name):
    precision = "fp32"
    if name == "scaler":
        precision = "fp16-amp" if gputrain.scale == "full" else "bf16-amp"  # nothing scales a loss on a CPU
    gputrain.check(program, args={"name": name}, precision=precision, **PROGRAMS[name])
