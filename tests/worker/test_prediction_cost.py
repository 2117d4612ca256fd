"""A prediction asks little of the machine that it runs on. How long it takes, `tools/time_prediction.py` tells."""

import subprocess
import sys

import msgspec
import pytest
from test_prediction_repetition import full
from test_prediction_suite import declared

from pytest_gputrain.utils.units import GiB

SCRIPT = """
import sys, msgspec
from pytest_gputrain.records import Prediction, Task
from pytest_gputrain.worker.device import peak_host_bytes
from pytest_gputrain.worker.prediction.predict import predict
from pytest_gputrain.worker.progress import Progress

prediction = predict(msgspec.json.decode(sys.argv[1], type=Task), Progress(None))
assert isinstance(prediction, Prediction), prediction
print(prediction.peak_allocated_bytes, peak_host_bytes())
"""
LARGEST = ["llama-3.1-70b-lora-bf16-fsdp", "flux.1-dev-lora-bf16"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGEST)
def test_a_prediction_holds_less_than_a_gibibyte_however_large_the_model(name):
    (case,) = {case for _, case in [*declared(), *declared(several=True)] if str(case) == name}
    command = [sys.executable, "-c", SCRIPT, msgspec.json.encode(full(case)).decode()]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    predicted, held = map(int, output.split()[-2:])
    assert held < 1 * GiB < predicted
