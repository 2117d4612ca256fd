"""Estimates how long a step takes on a GPU, from the calls of its operators and what the GPU sustains.

A kernel takes a start, and then the longer of its arithmetic, at the rate that its kind sustains and in whole waves of
tiles, and its traffic of memory. A step takes the longer of its kernels and of the host's time to call them.
docs/how-fast.md has the errors of the estimates.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from pytest_gputrain.records import ExpectedTime, Part, Rates, TracedCall
from pytest_gputrain.records.expected import LIKELY, ROUGH
from pytest_gputrain.utils.units import format_percent

_TILES: Final = ((256, 128, 1.0), (128, 128, 0.93), (64, 128, 0.8), (64, 64, 0.6))
"""Rows and columns of the tiles that products of matrices are divided into, and which share of the rate each sustains."""
_THIN: Final = 32
"""A product with a shorter side moves memory rather than that it computes."""
_HALF_RATE_AT: Final = {(True, False): 900, (True, True): 1200, (False, False): 200, (False, True): 300}
"""The length of sequences with which attention has half of its rate, by whether it is causal and a backward pass."""
_FULL_WIDTH: Final = 128
"""The width of a head that fills the tensor cores."""
_CACHED_SHARE: Final = 0.4
_CACHED_GAIN: Final = 1.6
"""A pointwise kernel that moves less than this share of the second-level cache finds its operands there, and is so much
faster."""
_COMPILED_TRAFFIC: Final = 0.45
"""The share of pointwise traffic that is left when torch.compile fuses kernels."""
_HIDDEN_EXCHANGE: Final = 0.9
"""The share of an exchange with other GPUs that the step hides, if the exchange is shorter than the step."""
_HOST_COPIES: Final = "copies between the host and the GPU"
_HOST_BANDWIDTH: Final = 25e9
"""Bytes per second of such copies over PCIe 4.0, which is assumed to tell whether they matter."""
_OF_A_NODE: Final = 8
"""The most GPUs that exchange data at the rate of their links."""
_UNKNOWN_FACTOR: Final = 10
"""An unknown kernel may take so many times as long as its traffic: fused attention of 8,192 tokens does."""
_UNKNOWN_SHARE: Final = 0.2
"""The share of the peak that an unknown kernel may sustain, whose FLOPs are known."""
_MOST_UNKNOWN: Final = 0.05
"""The largest share of a step that unknown kernels may take, so that there is an estimate."""
_FREE: Final = ("_unsafe_view", "lift_fresh")
_OVERWRITING: Final = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
"""Operators that do not read what they write to, though it is an argument of theirs."""
_REDUCING: Final = (
    "sum", "mean", "_softmax", "_log_softmax", "norm", "linalg_vector_norm", "var", "native_layer_norm", "native_group_norm",
    "native_batch_norm", "cudnn_batch_norm", "_batch_norm", "_fused_rms_norm", "nll_loss", "max_pool", "avg_pool", "amax",
    "argmax",
)  # fmt: skip
_GATHERING: Final = ("embedding", "index", "gather", "scatter", "_embedding_bag")
_PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm")
_UNPACKED: Final = ("bitsandbytes.gemm_4bit", "bitsandbytes.gemv_4bit", "_grouped_mm")
"""Other products, whose weights are unpacked or chosen by token first."""
_EXCHANGES: Final = ("c10d.", "_c10d_functional.")
"""Beginnings of the names of operators that exchange data with other GPUs."""
_KNOWN_LIBRARIES: Final = ("bitsandbytes.", "fsdp.", "prims.", "torchvision.")
"""Those of other libraries whose kernels move memory."""
_COMPUTING: Final = re.compile(
    r"rnn|lstm|gru(_|$)|_mm|mm_|matmul|cdist|pdist|linalg(?!_vector_norm)|fft|ctc|svd|geqrf|orgqr|ormqr|cholesky|triangular_solve"
    r"|(^|_)lu_|(?<!w)eig|conv_depthwise|slow_conv|conv_tbc|transformer_encoder|trilinear$|addr|spsolve|sspaddmm|sampled_addmm"
)
"""Parts of the names of torch's operators that compute more than they move, which mostly have no formula of FLOPs."""
_NO_RATES: Final = "it is not known what kernels sustain on this GPU"


class _Unknown(Exception):
    """The kernel of a call is not known, or no rate of it on this board. The argument names it better than its operator."""


def expected_time(
    calls: Iterable[TracedCall],
    rates: Rates | None,
    *,
    compiled: bool = False,
    processes: int = 1,
    lacking: str = "",
) -> ExpectedTime:
    """Return the estimate for a step that makes these calls.

    Args:
        rates: of the GPU; None where they are not known, and then there is no estimate.
        compiled: whether the calls are those of code that torch.compile will fuse.
        processes: of the training, each with a GPU. Alone one exchanges nothing, whatever it calls.
        lacking: what a step does beside these calls, as the reason why there is no estimate; empty where that is nothing.
    """
    if rates is None:
        return ExpectedTime(seconds=None, unknown=_NO_RATES)
    board = _Board(rates)
    parts: defaultdict[Part, float] = defaultdict(float)
    unknown: defaultdict[str, float] = defaultdict(float)
    number = 0
    exchanged = 0.0
    for call in calls:
        number += call.count
        if call.operator.endswith(".wait_tensor"):
            continue
        if call.operator.startswith(_EXCHANGES):
            passes = 2 if "allreduce" in call.operator.replace("_", "") else 1  # it scatters the sums, and gathers them
            exchanged += call.count * passes * max(call.read, call.written) * (processes > 1)
            continue
        if "host" in call.flags:
            unknown[_HOST_COPIES] += call.count * max(call.read, call.written) / _HOST_BANDWIDTH
            continue
        try:
            part, seconds = board.kernel(call)
        except _Unknown as error:
            peak = rates.flops.get(call.dtype, min(rates.flops.values()))
            moving = _UNKNOWN_FACTOR * (call.read + call.written) / rates.bandwidth
            unknown[str(error) or call.operator] += call.count * max(moving, call.flops / (peak * _UNKNOWN_SHARE))
            continue
        parts[part] += call.count * seconds * (_COMPILED_TRAFFIC if compiled and part == "pointwise" else 1)
    gpu = sum(parts.values())
    share = {name: seconds / (gpu + sum(unknown.values())) for name, seconds in unknown.items() if seconds}
    host = number * rates.kinds["call_us"] * 1e-6
    why = lacking
    if not why and sum(share.values()) > _MOST_UNKNOWN:
        names = ", ".join(sorted(share, key=share.__getitem__, reverse=True)[:3])
        why = (
            f"the kernels of {names} are not known, or not how fast they are on this GPU, and may take up to "
            f"{format_percent(sum(share.values()), signed=False)} of a step"
        )
    elif not why and processes > 1 and not (exchanged and processes <= _OF_A_NODE and "link_gb" in rates.kinds):
        why = "it is not known how fast these GPUs exchange data with each other"
    elif not why and compiled and host > gpu:
        why = "it is not known how long the host takes for compiled code, and the GPU may wait for it"
    if why:
        return ExpectedTime(seconds=None, parts=dict(parts), host_seconds=host, not_modelled=share, unknown=why)
    step = max(gpu, host)
    if exchanged:
        link = exchanged / (rates.kinds["link_gb"] * 1e9)
        parts["communication"] = max(0.0, link - step) + (1 - _HIDDEN_EXCHANGE) * min(link, step)
    seconds = step + parts["communication"] + rates.kinds["step_us"] * 1e-6
    rough = not rates.measured or compiled or processes > 1
    low, high = ROUGH if rough else LIKELY
    return ExpectedTime(
        seconds=seconds,
        low=low * seconds,
        high=high * seconds,
        rough=rough,
        parts={part: value for part, value in parts.items() if value},
        host_seconds=host,
        not_modelled=share,
    )


class _Board:
    """What kernels take on a board, in seconds."""

    def __init__(self, rates: Rates) -> None:
        self._rates, self._kinds = rates, rates.kinds
        self._start = rates.kinds["kernel_us"] * 1e-6

    def _kind(self, name: str) -> float:
        if name not in self._kinds:
            raise _Unknown
        return self._kinds[name]

    def _bandwidth(self, kind: str) -> float:
        return self._rates.bandwidth * self._kind(kind)

    def _arithmetic(self, call: TracedCall) -> tuple[str, float]:
        """Return the name of the arithmetic of a call in rates.toml, and the peak of it."""
        in_tf32 = "tf32" in call.flags and call.dtype == "fp32" and "attention" not in call.operator  # which ignores it
        name = "tf32" if in_tf32 and "tf32" in self._rates.flops else call.dtype
        if name not in self._rates.flops:
            raise _Unknown
        return "16bit" if name in ("bf16", "fp16") else name, self._rates.flops[name]

    def kernel(self, call: TracedCall) -> tuple[Part, float]:
        """Return the part of the step that a call belongs to, and the seconds of one such call.

        Raises:
            _Unknown: its kernel is not known.
        """
        name = call.operator
        if "view" in call.flags or name in _FREE:
            return "pointwise", 0.0
        if call.shapes and "attention" in name:
            return "attention", self._start + self._attention(call)
        if call.shapes and "convolution" in name:
            return "convolutions", self._convolution(call)
        if call.shapes and name in _PRODUCTS:
            return "matrix products", self._start + self._product(call)
        if name in _UNPACKED:
            kind, peak = self._arithmetic(call)
            traffic = 3 * (call.read + call.written) / self._bandwidth("pointwise")
            return "matrix products", 2 * self._start + call.flops / (peak * self._kind(f"products_{kind}")) + traffic
        if (
            call.flops
            or "attention" in name
            or _COMPUTING.search(name)
            or ("." in name and not name.startswith(_KNOWN_LIBRARIES))
        ):
            raise _Unknown
        return "optimizer" if "optimizer" in call.flags else "pointwise", self._traffic(call)

    def _traffic(self, call: TracedCall) -> float:
        """Return the seconds of a kernel that computes little."""
        name, moved = call.operator, call.read + call.written
        if not moved:
            return 0.0
        kind = "pointwise"
        if name.startswith(_GATHERING):
            kind = "gathers"
            if "backward" not in name and "put" not in name:
                moved = 2 * call.written  # and not the whole table
        elif name.startswith(_REDUCING):
            kind = "reductions"
        elif name in _OVERWRITING:
            moved -= call.written
        cached = "list" not in call.flags and moved < _CACHED_SHARE * self._kind("l2_mb") * 1e6
        return self._start + moved / (self._bandwidth(kind) * (_CACHED_GAIN if cached else 1))

    def _product(self, call: TracedCall) -> float:
        left, right = [shape for shape in call.shapes if len(shape) > 1][-2:]
        batch = left[0] if len(left) == 3 else 1
        rows, inner, columns = left[-2], left[-1], right[-1]
        kind, peak = self._arithmetic(call)
        rate = peak * self._kind(f"products_{kind}")
        moved = call.read + call.written
        if min(rows, columns, inner) < _THIN:
            return max(call.flops / rate, moved / self._bandwidth("thin_products"))
        cores = self._rates.multiprocessors
        fastest = math.inf
        for tile_rows, tile_columns, share in _TILES:
            tiles = batch * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            split = 1
            if tiles * 2 <= cores and inner > 1024:
                split = max(1, min(8, cores // tiles, inner // 512))  # several multiprocessors share out the sums of a tile
            waves = math.ceil(tiles * split / cores)
            of_wave = 2 * tile_rows * tile_columns * (inner / split) / (rate * share / cores)
            fastest = min(fastest, waves * (of_wave + self._kind("wave_us") * 1e-6))
        return max(fastest, moved / self._bandwidth("pointwise"))

    def _attention(self, call: TracedCall) -> float:
        backward = "backward" in call.operator
        query, key = call.shapes[backward], call.shapes[backward + 1]
        kernel = next((name for name in ("cudnn", "flash", "efficient") if name in call.operator), "")
        skips = "causal" in call.flags and "masked" not in call.flags
        tokens, keys = (query[-2], key[-2]) if "scaled_dot_product" in call.operator else (query[-3], key[-3])
        kind, peak = self._arithmetic(call)
        if kind == "16bit":
            share = self._kind(f"attention_{kernel}{'_backward' if backward else ''}")
            share /= 1 + _HALF_RATE_AT[skips, backward] / max(tokens, 1)
            share *= min(1.0, query[-1] / _FULL_WIDTH) ** 0.35
        else:
            share = self._kind(f"attention_{kernel}_{kind}")
        useful = call.flops * (0.5 if skips and tokens == keys else 1.0)
        return max(useful / (peak * share), (call.read + call.written) / self._bandwidth("pointwise"))

    def _convolution(self, call: TracedCall) -> float:
        backward = "backward" in call.operator
        kind, peak = self._arithmetic(call)
        weight = call.shapes[backward + 1]
        start, moved = (1 + 2 * backward) * self._start, call.read + call.written
        bandwidth = self._bandwidth("pointwise")
        if "grouped" in call.flags and weight[1] == 1:
            return start + 3 * moved / bandwidth
        if "grouped" in call.flags:
            raise _Unknown("grouped convolutions")
        moved *= 1 if "channels_last" in call.flags else 2  # copied to channels last, and back
        return start + call.flops / (peak * self._kind(f"convolutions_{kind}")) + moved / bandwidth
