"""Operators, and what they allocate on a GPU: measured in torch's CUDA build, compared with what a prediction expects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Given:
    """A tensor that an operator is called with."""

    shape: tuple[int, ...]
    dtype: torch.dtype = FP32
    trained: bool = True

    def on(self, device):
        return torch.zeros(self.shape, dtype=self.dtype, device=device).requires_grad_(self.trained)


@dataclass(frozen=True)
class Fact:
    """What a call and its backward pass allocate, in blocks of 512 bytes.

    Attributes:
        forward: bytes at the peak of the call, and those that stay.
        backward: likewise.
    """

    name: str
    call: Callable[..., Any]
    given: tuple[Given, ...]
    forward: tuple[int, int]
    backward: tuple[int, int] = (0, 0)

    def __str__(self):
        return self.name

    def observed(self, device, watched):
        """The four figures, where ``watched(function)`` returns a result and the bytes it allocated and, negative, freed."""
        arguments = [argument.on(device) for argument in self.given]
        result, events = watched(lambda: self.call(*arguments))
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


def softmax(values):
    return torch.softmax(values, -1)


def softmax_in_fp32(values):
    return torch.softmax(values, -1, dtype=torch.float32)


def log_softmax_in_fp32(values):
    return torch.log_softmax(values, -1, dtype=torch.float32)


def softmax_of_transposed(values):
    return torch.softmax(values.transpose(1, 2), -1)


def rms_norm(values, weight=None):
    return functional.rms_norm(values, values.shape[-1:], weight)


def rms_norm_of_a_third(values, weight):
    return functional.rms_norm(values[..., : weight.shape[0]], weight.shape, weight)


def layer_norm(values, weight, bias):
    return functional.layer_norm(values, weight.shape, weight, bias)


def layer_norm_of_a_third(values, weight):
    return functional.layer_norm(values[..., : weight.shape[0]], weight.shape, weight, weight)


def group_norm(values, weight, bias):
    return functional.group_norm(values, 32, weight, bias)


def sum_of_rows(values):
    return values.sum(0)


def sum_of_channels(values):
    return values.sum((0, 2, 3))


def mean(values):
    return values.mean()


def norm(values):
    return torch.linalg.vector_norm(values)


def linear(values, weight, bias):
    return functional.linear(values, weight, bias)


def embedding(weight, rows):
    return functional.embedding(rows, weight)


def attention(query, key, value, mask=None):
    return functional.scaled_dot_product_attention(query, key, value, mask)


def attention_with_dropout(query, key, value):
    return functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)


def attention_of_shared_heads(query, key, value):
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def rows(count):
    return Given((count,), torch.int64, trained=False)


def heads(batch, count, length, width, dtype):
    return Given((batch, count, length, width), dtype)


def mask(length, keys, dtype):
    return Given((2, 1, length, keys), dtype, trained=False)


def three(*sizes):
    return (heads(*sizes),) * 3


FACTS = [
    Fact("softmax FP32", softmax, (Given((1, 16, 512, 512), FP32),), (16777216, 16777216), (33554432, 16777216)),
    Fact("softmax to fp32 FP32", softmax_in_fp32, (Given((2, 3, 700), FP32),), (16896, 16896), (33792, 16896)),
    Fact(
        "log_softmax to fp32 FP32", log_softmax_in_fp32, (Given((100, 7000), FP32),), (2800128, 2800128), (2800128, 2800128)
    ),
    Fact("softmax BF16", softmax, (Given((1, 16, 512, 512), BF16),), (8388608, 8388608), (16777216, 8388608)),
    Fact("softmax to fp32 BF16", softmax_in_fp32, (Given((2, 3, 700), BF16),), (33792, 16896), (33792, 8704)),
    Fact(
        "log_softmax to fp32 BF16", log_softmax_in_fp32, (Given((100, 7000), BF16),), (5600256, 2800128), (4200448, 1400320)
    ),
    Fact("softmax FP16", softmax, (Given((1, 16, 512, 512), FP16),), (8388608, 8388608), (16777216, 8388608)),
    Fact("softmax to fp32 FP16", softmax_in_fp32, (Given((2, 3, 700), FP16),), (16896, 16896), (25600, 8704)),
    Fact(
        "log_softmax to fp32 FP16", log_softmax_in_fp32, (Given((100, 7000), FP16),), (2800128, 2800128), (1400320, 1400320)
    ),
    Fact("softmax strided BF16", softmax_of_transposed, (Given((2, 320, 640), BF16),), (1638400, 819200), (1638400, 819200)),
    Fact("rms_norm FP32", rms_norm, (Given((2, 100, 1000), FP32), Given((1000,), FP32)), (801280, 801280), (804352, 803328)),
    Fact(
        "rms_norm frozen FP32",
        rms_norm,
        (Given((3000, 2048), FP32), Given((2048,), FP32, trained=False)),
        (24588288, 24588288),
        (24576000, 24563712),
    ),
    Fact("rms_norm bare FP32", rms_norm, (Given((5, 7, 64), FP32),), (9728, 9728), (9216, 8704)),
    Fact(
        "rms_norm strided FP32",
        rms_norm_of_a_third,
        (Given((2, 4096, 960), FP32), Given((320,), FP32, trained=False)),
        (21004288, 10518528),
        (41910272, 31424512),
    ),
    Fact(
        "layer_norm FP32",
        layer_norm,
        (Given((2, 4096, 320), FP32), Given((320,), FP32), Given((320,), FP32)),
        (10551296, 10551296),
        (10488832, 10423296),
    ),
    Fact(
        "layer_norm strided FP32",
        layer_norm_of_a_third,
        (Given((2, 4096, 960), FP32), Given((320,), FP32, trained=False)),
        (21037056, 10551296),
        (41877504, 31391744),
    ),
    Fact(
        "group_norm FP32",
        group_norm,
        (Given((2, 320, 64, 64), FP32), Given((320,), FP32), Given((320,), FP32)),
        (10491904, 10486784),
        (10497536, 10487808),
    ),
    Fact(
        "group_norm odd FP32",
        group_norm,
        (Given((1, 640, 33, 17), FP32), Given((640,), FP32, trained=False), Given((640,), FP32, trained=False)),
        (1442304, 1437184),
        (1444864, 1435136),
    ),
    Fact("rms_norm BF16", rms_norm, (Given((2, 100, 1000), BF16), Given((1000,), BF16)), (401408, 401408), (402432, 401408)),
    Fact(
        "rms_norm frozen BF16",
        rms_norm,
        (Given((3000, 2048), BF16), Given((2048,), BF16, trained=False)),
        (12300288, 12300288),
        (12288000, 12275712),
    ),
    Fact("rms_norm bare BF16", rms_norm, (Given((5, 7, 64), BF16),), (5120, 5120), (4608, 4096)),
    Fact(
        "rms_norm strided BF16",
        rms_norm_of_a_third,
        (Given((2, 4096, 960), BF16), Given((320,), BF16, trained=False)),
        (10518528, 5275648),
        (20938752, 15695872),
    ),
    Fact(
        "layer_norm BF16",
        layer_norm,
        (Given((2, 4096, 320), BF16), Given((320,), BF16), Given((320,), BF16)),
        (5308416, 5308416),
        (5244928, 5179392),
    ),
    Fact(
        "layer_norm strided BF16",
        layer_norm_of_a_third,
        (Given((2, 4096, 960), BF16), Given((320,), BF16, trained=False)),
        (10551296, 5308416),
        (20905984, 15663104),
    ),
    Fact(
        "group_norm BF16",
        group_norm,
        (Given((2, 320, 64, 64), BF16), Given((320,), BF16), Given((320,), BF16)),
        (5250048, 5243904),
        (5253632, 5243904),
    ),
    Fact(
        "group_norm odd BF16",
        group_norm,
        (Given((1, 640, 33, 17), BF16), Given((640,), BF16, trained=False), Given((640,), BF16, trained=False)),
        (725504, 719360),
        (727040, 717312),
    ),
    Fact(
        "rms_norm of two types",
        rms_norm,
        (Given((2, 4096, 320), BF16), Given((320,), FP32, trained=False)),
        (31490048, 15761408),
        (52396032, -5275648),
    ),
    Fact("sum of 4096 rows of 320 FP32", sum_of_rows, (Given((4096, 320), FP32, trained=False),), (10487808, 1536), (0, 0)),
    Fact(
        "sum of 16384 rows of 4096 FP32",
        sum_of_rows,
        (Given((16384, 4096), FP32, trained=False),),
        (138428928, 16384),
        (0, 0),
    ),
    Fact(
        "sum of 16384 rows of 14336 FP32",
        sum_of_rows,
        (Given((16384, 14336), FP32, trained=False),),
        (139518464, 57344),
        (0, 0),
    ),
    Fact("sum of 100000 rows of 64 FP32", sum_of_rows, (Given((100000, 64), FP32, trained=False),), (12813312, 512), (0, 0)),
    Fact("sum of 300 rows of 1000 FP32", sum_of_rows, (Given((300, 1000), FP32, trained=False),), (4096, 4096), (0, 0)),
    Fact(
        "sum of 2048 rows of 1280 FP32", sum_of_rows, (Given((2048, 1280), FP32, trained=False),), (20977152, 5120), (0, 0)
    ),
    Fact("sum of 5000 rows of 33 FP32", sum_of_rows, (Given((5000, 33), FP32, trained=False),), (85504, 512), (0, 0)),
    Fact("sum of 4096 rows of 320 BF16", sum_of_rows, (Given((4096, 320), BF16, trained=False),), (10487296, 1024), (0, 0)),
    Fact(
        "sum of 16384 rows of 4096 BF16",
        sum_of_rows,
        (Given((16384, 4096), BF16, trained=False),),
        (138420736, 8192),
        (0, 0),
    ),
    Fact(
        "sum of 16384 rows of 14336 BF16",
        sum_of_rows,
        (Given((16384, 14336), BF16, trained=False),),
        (139489792, 28672),
        (0, 0),
    ),
    Fact("sum of 100000 rows of 64 BF16", sum_of_rows, (Given((100000, 64), BF16, trained=False),), (12813312, 512), (0, 0)),
    Fact("sum of 300 rows of 1000 BF16", sum_of_rows, (Given((300, 1000), BF16, trained=False),), (2048, 2048), (0, 0)),
    Fact(
        "sum of 2048 rows of 1280 BF16", sum_of_rows, (Given((2048, 1280), BF16, trained=False),), (20974592, 2560), (0, 0)
    ),
    Fact("sum of 5000 rows of 33 BF16", sum_of_rows, (Given((5000, 33), BF16, trained=False),), (85504, 512), (0, 0)),
    Fact("sum of channels", sum_of_channels, (Given((32, 64, 56, 56), FP32, trained=False),), (512, 512), (0, 0)),
    Fact("mean", mean, (Given((16384, 14336), BF16, trained=False),), (8192, 512), (0, 0)),
    Fact("norm", norm, (Given((4, 1000, 3000), FP32, trained=False),), (3584, 512), (0, 0)),
    Fact(
        "linear",
        linear,
        (Given((2, 500, 320), BF16), Given((640, 320), BF16), Given((640,), BF16)),
        (1280000, 1280000),
        (1051136, 1051136),
    ),
    Fact(
        "embedding 4096 of 30000 FP32",
        embedding,
        (Given((30000, 1024), FP32), rows(4096)),
        (16777216, 16777216),
        (141533696, 122880000),
    ),
    Fact(
        "embedding 4096 of 30000 BF16",
        embedding,
        (Given((30000, 1024), BF16), rows(4096)),
        (8388608, 8388608),
        (80093696, 61440000),
    ),
    Fact(
        "embedding 16384 of 128256 BF16",
        embedding,
        (Given((128256, 4096), BF16), rows(16384)),
        (134217728, 134217728),
        (1346746368, 1050673152),
    ),
    Fact("embedding 4096 of 2 FP32", embedding, (Given((2, 1024), FP32), rows(4096)), (16777216, 16777216), (141312, 8192)),
    Fact(
        "embedding 16384 of 512 BF16",
        embedding,
        (Given((512, 1024), BF16), rows(16384)),
        (33554432, 33554432),
        (3582976, 1048576),
    ),
    Fact(
        "embedding 4000 of 1000 FP32", embedding, (Given((1000, 33), FP32), rows(4000)), (528384, 528384), (442368, 132096)
    ),
    Fact(
        "embedding 3072 of 50000 FP32",
        embedding,
        (Given((50000, 100), FP32), rows(3072)),
        (1228800, 1228800),
        (20000256, 20000256),
    ),
    Fact(
        "embedding 3073 of 50000 FP32",
        embedding,
        (Given((50000, 100), FP32), rows(3073)),
        (1229312, 1229312),
        (21506048, 20000256),
    ),
    Fact("attention 64 FP32", attention, three(2, 8, 1024, 64, FP32), (4259840, 4259840), (16908288, 12517376)),
    Fact("attention 40 FP32", attention, three(2, 8, 4096, 40, FP32), (10747904, 10747904), (48513024, 31195136)),
    Fact("attention 128 FP32", attention, three(2, 8, 1000, 128, FP32), (8257536, 8257536), (33032704, 24510464)),
    Fact("attention 256 FP32", attention, three(2, 8, 512, 256, FP32), (8421376, 8421376), (33619968, 25133056)),
    Fact(
        "attention cross FP32",
        attention,
        (heads(2, 8, 1000, 64, FP32), heads(2, 8, 77, 64, FP32), heads(2, 8, 77, 64, FP32)),
        (4161536, 4161536),
        (8989184, 4661248),
    ),
    Fact(
        "attention masked FP32",
        attention,
        (*three(2, 8, 333, 96, FP32), mask(333, 333, FP32)),
        (2963968, 2963968),
        (9306624, 5219840),
    ),
    Fact(
        "attention bool FP32",
        attention,
        (heads(2, 8, 1000, 64, FP32), heads(2, 8, 77, 64, FP32), heads(2, 8, 77, 64, FP32), mask(1000, 77, torch.bool)),
        (4801536, 4801536),
        (8989184, 4021248),
    ),
    Fact("attention 64 BF16", attention, three(2, 8, 1024, 64, BF16), (2163712, 2163712), (10551296, 6224896)),
    Fact("attention 40 BF16", attention, three(2, 8, 4096, 40, BF16), (5506048, 5506048), (26476544, 15465472)),
    Fact("attention 128 BF16", attention, three(2, 8, 1000, 128, BF16), (4161024, 4161024), (20544000, 12222976)),
    Fact("attention 256 BF16", attention, three(2, 8, 512, 256, BF16), (4228096, 4228096), (21004288, 12549120)),
    Fact(
        "attention cross BF16",
        attention,
        (heads(2, 8, 1000, 64, BF16), heads(2, 8, 77, 64, BF16), heads(2, 8, 77, 64, BF16)),
        (2113024, 2113024),
        (6523392, 2298368),
    ),
    Fact(
        "attention masked BF16",
        attention,
        (*three(2, 8, 333, 96, BF16), mask(333, 333, BF16)),
        (1045504, 1045504),
        (5136384, 3046400),
    ),
    Fact(
        "attention bool BF16",
        attention,
        (heads(2, 8, 1000, 64, BF16), heads(2, 8, 77, 64, BF16), heads(2, 8, 77, 64, BF16), mask(1000, 77, torch.bool)),
        (2421248, 2421248),
        (6523392, 1990144),
    ),
    Fact("attention 512 FP32", attention, three(2, 8, 512, 512, FP32), (16809984, 16809984), (67174400, 50298880)),
    Fact(
        "attention dropout", attention_with_dropout, three(2, 8, 1000, 128, BF16), (4161536, 4161024), (28934144, 12222976)
    ),
    Fact(
        "attention shared",
        attention_of_shared_heads,
        (heads(2, 32, 1000, 128, BF16), heads(2, 8, 1000, 128, BF16), heads(2, 8, 1000, 128, BF16)),
        (16641024, 16641024),
        (57600000, 24318976),
    ),
]
