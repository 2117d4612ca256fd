"""Implements pytest's side of ``--gpu-predict``: predictions of cases at full size, without the device.

`runner` asks worker processes for predictions and keeps them in a `cache`; `pytest_gputrain.gate.prediction` compares them
with those that `pytest_gputrain.storage.predictions` holds; `remedies` looks for what makes a case fit.
"""
