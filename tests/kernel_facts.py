"""Operators, and the memory that each allocates on a GPU, as torch's CUDA build was seen to."""

import functools
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

CALLS = {
    "softmax to fp32": lambda values: torch.softmax(values, -1, dtype=torch.float32),
    "rms_norm": lambda values, weight=None: functional.rms_norm(values, values.shape[-1:], weight),
    "layer_norm": lambda values, weight, bias: functional.layer_norm(values, weight.shape, weight, bias),
    "group_norm": lambda values, weight, bias: functional.group_norm(values, 32, weight, bias),
    "group_norm of channels last": lambda values, weight, bias: functional.group_norm(
        values.contiguous(memory_format=torch.channels_last), 32, weight, bias
    ),
    "convolution of channels last": lambda values, *weights: functional.conv2d(
        values.contiguous(memory_format=torch.channels_last), *weights, padding="same"
    ),
    "convolution of transposed": lambda values, *weights: functional.conv2d(values.transpose(0, 1), *weights, padding=1),
    # The only sample leaves its stride open, and so the memory format.
    "convolution of halved rows": lambda values, *weights: functional.conv2d(
        values.transpose(1, 2).reshape(1, values.shape[2], 16, -1) / 2, *weights, padding=1
    ),
    "upsampling of transposed": lambda values: functional.interpolate(values.transpose(0, 1), scale_factor=2.0),
    "sum of rows": lambda values: values.sum(0),
    "sum of channels": lambda values: values.sum((0, 2, 3)),
    "mean": torch.mean,
    "norm": torch.linalg.vector_norm,
    "linear": functional.linear,
    "linear of transposed": lambda values, *weights: functional.linear(values.transpose(1, 2), *weights),
    "embedding": lambda weight, rows: functional.embedding(rows, weight),
    "attention": functional.scaled_dot_product_attention,
    "attention with dropout": functools.partial(functional.scaled_dot_product_attention, dropout_p=0.1),
    "attention of shared heads": functools.partial(functional.scaled_dot_product_attention, enable_gqa=True),
}


@dataclass(frozen=True)
class Given:
    """A tensor that an operator is called with."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool = True

    def __str__(self):
        return f"{'' if self.trained else 'still '}{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def on(self, device):
        return torch.zeros(self.shape, dtype=self.dtype, device=device).requires_grad_(self.trained)


def fp32(*shape):
    return Given(torch.float32, shape)


def bf16(*shape):
    return Given(torch.bfloat16, shape)


def still(given):
    """The tensor without a gradient."""
    return replace(given, trained=False)


def rows(count):
    return Given(torch.int64, (count,), trained=False)


def mask(length, keys):
    return Given(torch.bool, (2, 1, length, keys), trained=False)


@dataclass(frozen=True)
class Fact:
    """What a call and its backward pass allocate, in blocks of 512 bytes.

    Attributes:
        forward: bytes at the peak of the call, and those that stay.
        backward: likewise.
    """

    call: str
    given: list[Given]
    forward: tuple[int, int]
    backward: tuple[int, int] = (0, 0)

    def __str__(self):
        return f"{self.call} {', '.join(map(str, self.given))}"

    def observed(self, device, watched):
        """The four figures, where ``watched(function)`` returns a result and the bytes it allocated and, negative, freed."""
        arguments = [given.on(device) for given in self.given]
        result, events = watched(lambda: CALLS[self.call](*arguments))
        forward = summed(events)
        if not result.requires_grad:
            return forward, (0, 0)
        grad = torch.empty_like(result)
        return forward, summed(watched(lambda: result.backward(grad))[1])


def summed(events):
    live = peak = 0
    for size in events:
        live += size
        peak = max(peak, live)
    return peak, live


FACTS = [
    Fact("softmax to fp32", [bf16(2, 3, 700)], (33792, 16896), (33792, 8704)),
    Fact("rms_norm", [bf16(2, 100, 1000), bf16(1000)], (401408, 401408), (402432, 401408)),
    Fact("layer_norm", [bf16(2, 4096, 320), bf16(320), bf16(320)], (5308416, 5308416), (5244928, 5179392)),
    Fact("group_norm", [bf16(2, 320, 64, 64), bf16(320), bf16(320)], (5250048, 5243904), (5253632, 5243904)),
    Fact("group_norm", [bf16(1, 640, 33, 17), still(bf16(640)), still(bf16(640))], (725504, 719360), (727040, 717312)),
    Fact("rms_norm", [bf16(2, 4096, 320), still(fp32(320))], (31490048, 15761408), (52396032, -5275648)),
    Fact("sum of rows", [still(bf16(16384, 14336))], (139489792, 28672)),
    Fact("sum of rows", [still(bf16(100000, 64))], (12813312, 512)),
    Fact("sum of rows", [still(bf16(300, 1000))], (2048, 2048)),
    Fact("sum of rows", [still(bf16(2048, 1280))], (20974592, 2560)),
    Fact("sum of rows", [still(bf16(5000, 33))], (85504, 512)),
    Fact("sum of channels", [still(fp32(32, 64, 56, 56))], (512, 512)),
    Fact("mean", [still(bf16(16384, 14336))], (8192, 512)),
    Fact("norm", [still(fp32(4, 1000, 3000))], (3584, 512)),
    Fact("linear", [bf16(2, 500, 320), bf16(640, 320), bf16(640)], (1280000, 1280000), (1051136, 1051136)),
    Fact("linear of transposed", [bf16(1, 320, 500), bf16(640, 320), bf16(640)], (640000, 640000), (731136, 731136)),
    Fact("group_norm of channels last", [bf16(2, 320, 64, 64), bf16(320), bf16(320)], (15735808, 10486784), (5253632, 1024)),
    Fact("convolution of channels last", [bf16(2, 64, 16, 16), bf16(128, 64, 3, 3)], (344064, 196608), (294912, 147456)),
    Fact("convolution of transposed", [bf16(64, 2, 16, 16), bf16(128, 64, 3, 3)], (541184, 131072), (623104, 212992)),
    Fact("convolution of halved rows", [bf16(1, 512, 64), bf16(128, 64, 3, 3)], (606720, 196608), (623104, 147456)),
    Fact(
        "convolution of channels last",
        [bf16(1, 64, 32, 32), bf16(2240, 64, 1, 1), bf16(2240)],
        (4718592, 4718592),
        (18772992, 291328),
    ),
    Fact("upsampling of transposed", [fp32(64, 2, 16, 16)], (655360, 524288), (262144, 131072)),
    Fact("embedding", [bf16(128256, 4096), rows(16384)], (134217728, 134217728), (1346746368, 1050673152)),
    Fact("embedding", [fp32(2, 1024), rows(4096)], (16777216, 16777216), (141312, 8192)),
    Fact("embedding", [fp32(1000, 33), rows(4000)], (528384, 528384), (442368, 132096)),
    Fact("embedding", [fp32(50000, 100), rows(3072)], (1228800, 1228800), (20000256, 20000256)),
    Fact("embedding", [fp32(50000, 100), rows(3073)], (1229312, 1229312), (21506048, 20000256)),
    Fact("attention", [*[fp32(2, 8, 1024, 64)] * 3], (4259840, 4259840), (16908288, 12517376)),
    Fact("attention", [*[bf16(2, 8, 1024, 64)] * 3], (2164224, 2163712), (10551808, 6224896)),
    Fact("attention", [*[bf16(2, 8, 4096, 40)] * 3], (5506560, 5506048), (26477056, 15465472)),
    Fact("attention", [*[bf16(2, 8, 333, 96)] * 3, still(bf16(2, 1, 333, 333))], (1046016, 1045504), (5136896, 3046400)),
    Fact(
        "attention",
        [bf16(2, 8, 1000, 64), *[bf16(2, 8, 77, 64)] * 2, mask(1000, 77)],
        (2421760, 2421248),
        (6523904, 1990144),
    ),
    Fact("attention", [bf16(2, 8, 1000, 64), *[bf16(2, 8, 1, 64)] * 2], (2113024, 2113024), (10407936, 1987072)),
    Fact("attention", [*[bf16(2, 8, 1000, 192)] * 2, bf16(2, 8, 1000, 128)], (4161536, 4161024), (28736512, 16318976)),
    Fact("attention", [*[fp32(2, 8, 512, 512)] * 3], (16809984, 16809984), (67174400, 50298880)),
    Fact("attention with dropout", [*[bf16(2, 8, 1000, 128)] * 3], (4161536, 4161024), (28934144, 12222976)),
    Fact(
        "attention of shared heads",
        [bf16(2, 32, 1000, 128), *[bf16(2, 8, 1000, 128)] * 2],
        (16641536, 16641024),
        (90368512, 24318976),
    ),
]
