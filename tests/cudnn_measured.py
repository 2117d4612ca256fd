"""Convolutions and attention, and the memory that they took on an H200: `cudnn_on_an_h200.json` has the figures."""

import json
from pathlib import Path

import torch
from torch.nn import functional

MEASURED = json.loads((Path(__file__).parent / "cudnn_on_an_h200.json").read_text())
CONVOLUTIONS = MEASURED["convolutions"]
LARGE = MEASURED["large convolutions, forward only"]
ATTENTION = MEASURED["attentions"]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIB = 2**20


def convolution(peak_of, device, *measured):
    """The highest memory of its forward and of its backward pass.

    Args:
        peak_of: calls a function, and returns its result and the highest memory that it allocated.
    """
    name, batch, channels, sides, made, window, stride, padding, last, groups, bias, trained, *_ = measured
    flat = len(sides) == 2
    windows = [window] * len(sides) if isinstance(window, int) else window
    memory_format = torch.contiguous_format
    if last:
        memory_format = torch.channels_last if flat else torch.channels_last_3d

    def zeros(*shape):
        return torch.zeros(*shape, device=device, dtype=TYPES[name])

    source = zeros(batch, channels, *sides).to(memory_format=memory_format).requires_grad_(bool(trained))
    weight = zeros(made, channels // groups, *windows).to(memory_format=memory_format).requires_grad_()
    offsets = zeros(made).requires_grad_() if bias else None
    function = functional.conv2d if flat else functional.conv3d
    result, forward = peak_of(lambda: function(source, weight, offsets, stride, padding, 1, groups))
    grad = torch.empty_like(result)
    _, backward = peak_of(lambda: result.backward(grad))
    return forward, backward


def attention(peak_of, device, *measured):
    """The highest memory of its forward and of its backward pass."""
    name, batch, heads, fewer, queries, keys, width, causal, mask, height, strided, *_ = measured

    def zeros(count, length, size):
        shape = (batch, length, count, size) if strided else (batch, count, length, size)
        values = torch.zeros(*shape, device=device, dtype=TYPES[name]).requires_grad_()
        return values.transpose(1, 2) if strided else values

    given = zeros(heads, queries, width), zeros(fewer, keys, width), zeros(fewer, keys, height)
    bias = None
    if mask:
        bias = torch.ones(batch, 1, queries, keys, device=device, dtype=torch.bool if mask == "bool" else TYPES[name])
    options = {"is_causal": bool(causal), "enable_gqa": heads != fewer}
    result, forward = peak_of(lambda: functional.scaled_dot_product_attention(*given, bias, **options))
    grad = torch.empty_like(result)
    _, backward = peak_of(lambda: result.backward(grad))
    return forward, backward


def errors(peak_of, device, operator, rows):
    """The differences to what was measured, of the forward and of the backward pass of each row."""
    return [
        expected - seen
        for measured in rows
        for expected, seen in zip(operator(peak_of, device, *measured), measured[-2:], strict=True)
    ]


def within(differences, mib):
    return sum(abs(difference) <= mib * MIB for difference in differences)
