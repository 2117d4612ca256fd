"""Estimates how long a step takes on a GPU, from the calls of its operators and what the GPU sustains.

A kernel takes a start, and then the longer of its arithmetic, at the rate that its kind sustains and in whole waves of
tiles, and its traffic of memory. A step takes the longer of its kernels and of the host's time to call them.
docs/how-true.md has the errors of the estimates.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from pytest_gputrain.records import ExpectedTime, OperatorWork, Part, Rates, TracedCall
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
_HIDDEN_EXCHANGE: Final = 0.9
"""The share of an exchange with other GPUs that the step hides, if the exchange is shorter than the step."""
_HOST_COPIES: Final = "copies between the host and the GPU"
_HOST_BANDWIDTH: Final = 25e9
"""Bytes per second of such copies over PCIe 4.0, which is assumed to tell whether they matter."""
_OF_A_NODE: Final = 8
"""The most GPUs that exchange data at the rate of their links."""
_UNKNOWN_FACTOR: Final = 10
"""An unknown kernel may take this many times as long as its traffic: fused attention of 8,192 tokens does."""
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
"""Beginnings of the names of other libraries' operators whose kernels move memory."""
_COMPUTING: Final = re.compile(
    r"rnn|lstm|gru(_|$)|_mm|mm_|matmul|cdist|pdist|linalg(?!_vector_norm)|fft|ctc|svd|geqrf|orgqr|ormqr|cholesky|triangular_solve"
    r"|(^|_)lu_|(?<!w)eig|conv_depthwise|slow_conv|conv_tbc|transformer_encoder|trilinear$|addr|spsolve|sspaddmm|sampled_addmm"
)
"""Parts of the names of torch's operators that compute more than they move, which mostly have no formula of FLOPs."""
_SENT: Final = ("c10d.send", "c10d.recv")
"""Beginnings of the names of those by which a GPU waits for one other, as stages of a pipeline do."""

NOT_COMPILED: Final = "how long kernels of torch.compile take is not known; run it without"
"""Why a step that is compiled has no estimate."""


class UnknownKernel(Exception):
    """A call's kernel, or its rate on this board, is unknown. The argument names it."""


def expected_time(
    calls: Iterable[TracedCall], rates: Rates | None, *, processes: int = 1, accumulation: int = 1, lacking: str = ""
) -> ExpectedTime:
    """Return the estimate for a step that makes these calls.

    Args:
        rates: of the GPU; None if they are not known, and then there is no estimate.
        processes: of the training, each with a GPU. A single process exchanges nothing, whatever it calls.
        accumulation: how many steps there are to each update. All of them share its time.
        lacking: the reason why there is no estimate: work of a step beside these calls; empty if there is none.
    """
    if rates is None or lacking:
        return ExpectedTime(seconds=None, unknown=lacking or "it is not known what kernels sustain on this GPU")
    board = Board(rates)
    parts, unknown = defaultdict[Part, float](float), defaultdict[str, float](float)
    number, exchanged, sends = 0.0, 0.0, False
    for call in calls:
        times = call.count / (accumulation if "optimizer" in call.flags else 1)
        number += times
        if call.operator.startswith(_EXCHANGES):
            exchanged += times * _exchanged(call, processes)
            sends |= call.operator.startswith(_SENT)
        elif "host" in call.flags:
            unknown[_HOST_COPIES] += times * max(call.read, call.written) / _HOST_BANDWIDTH
        else:
            try:
                part, seconds = board.kernel(call)
                parts[part] += times * seconds
            except UnknownKernel as error:
                peak = rates.flops.get(call.dtype, min(rates.flops.values()))
                moving = _UNKNOWN_FACTOR * (call.read + call.written) / rates.bandwidth
                unknown[str(error)] += times * max(moving, call.flops / (peak * _UNKNOWN_SHARE))
    gpu, host = sum(parts.values()), number * rates.kinds["call_us"] * 1e-6
    share = {name: seconds / (gpu + sum(unknown.values())) for name, seconds in unknown.items() if seconds}
    step, why = max(gpu, host), ""
    if sum(share.values()) > _MOST_UNKNOWN:
        names = ", ".join(sorted(share, key=share.__getitem__, reverse=True)[:3])
        why = (
            f"the kernels of {names} are not known, or not how fast they are on this GPU, and may take up to "
            f"{format_percent(sum(share.values()), signed=False)} of a step"
        )
    elif processes > 1 and sends:
        why = "it is not known how long processes wait for what others send to them"
    elif processes > 1 and not (exchanged and processes <= _OF_A_NODE and "link_gb" in rates.kinds):
        why = "it is not known how fast these GPUs exchange data with each other"
    elif exchanged and accumulation > 1:
        why = "it is not known in which of the accumulated steps processes exchange gradients"
    elif exchanged:
        link = exchanged / (rates.kinds["link_gb"] * 1e9)
        parts["communication"] = max(0.0, link - step) + (1 - _HIDDEN_EXCHANGE) * min(link, step)
    seconds = step + parts["communication"] + rates.kinds["step_us"] * 1e-6
    rough = not rates.measured or processes > 1
    low, high = ROUGH if rough else LIKELY
    return ExpectedTime(
        seconds=None if why else seconds,
        low=None if why else low * seconds,
        high=None if why else high * seconds,
        rough=rough and not why,
        parts={part: value for part, value in parts.items() if value},
        host_seconds=host,
        not_modelled=share,
        unknown=why,
    )


def _exchanged(call: TracedCall, processes: int) -> float:
    """Return the bytes that each GPU sends in a ring. Data go around once, and twice for a sum, whose result goes around as
    well."""
    if "wait" in call.operator:
        return 0.0
    rounds = 2 if "allreduce" in call.operator.replace("_", "") else 1
    return rounds * max(call.read, call.written) * (processes - 1) / processes


class Board:
    """Estimates the seconds that kernels take on a board."""

    def __init__(self, rates: Rates) -> None:
        self._rates, self._start = rates, rates.kinds["kernel_us"] * 1e-6

    def kernel(self, call: TracedCall) -> tuple[Part, float]:
        """Return the part of the step to which a call belongs, and the seconds of one such call.

        Without shapes they are those of large operands.

        Raises:
            UnknownKernel: its kernel is not known, or no rate of it.
        """
        name = call.operator
        if "view" in call.flags or name in _FREE:
            return "pointwise", 0.0
        try:
            if "." not in name and call.flops:
                if "attention" in name:
                    return "attention", self._start + self._attention(call)
                if "convolution" in name:
                    return "convolutions", self._convolution(call)
                if name in _PRODUCTS:
                    return "matrix products", self._start + self._product(call)
            if name in _UNPACKED:
                return "matrix products", 2 * self._start + self._computing(call, "products") + 3 * self._moving(call)
            is_known = "." not in name or name.startswith(_KNOWN_LIBRARIES)
            if is_known and not (call.flops or "attention" in name or _COMPUTING.search(name)):
                return "optimizer" if "optimizer" in call.flags else "pointwise", self._traffic(call)
        except KeyError:
            pass
        raise UnknownKernel(name)

    def work(self, operator: str, work: OperatorWork, dtype: str) -> float:
        """Return roughly how many seconds all calls of an operator take, if each has the average size.

        Args:
            dtype: of their tensors, as rates.toml names it.

        Raises:
            UnknownKernel: its kernel is not known, or no rate of it.
        """
        calls = max(work.calls, 1)
        name, flops, moved = operator.removeprefix("aten."), work.flops // calls, work.bytes // calls
        return work.calls * self.kernel(TracedCall(operator=name, dtype=dtype, flops=flops, read=moved))[1]

    def _computing(self, call: TracedCall, kind: str) -> float:
        """Return the seconds of a call's arithmetic, at the rate that rates.toml has for a kind of kernel."""
        peaks, name = self._rates.flops, call.dtype
        # Attention kernels ignore the switch for TF32.
        if "tf32" in call.flags and name == "fp32" and "tf32" in peaks and "attention" not in kind:
            name = "tf32"
        ends = "16bit" if name in ("bf16", "fp16") else name
        share = self._rates.kinds[kind if ends == "16bit" and "attention" in kind else f"{kind}_{ends}"]
        return call.flops / (peaks[name] * share)

    def _moving(self, call: TracedCall, kind: str = "pointwise") -> float:
        """Return the seconds in which a call's bytes are moved."""
        return (call.read + call.written) / (self._rates.bandwidth * self._rates.kinds[kind])

    def _traffic(self, call: TracedCall) -> float:
        """Return the seconds of a kernel that computes little."""
        name, moved = call.operator, call.read + call.written
        if not moved:
            return 0.0
        kind = "pointwise"
        if name.startswith(_GATHERING):
            kind = "gathers"
            if call.written and "backward" not in name and "put" not in name:
                moved = 2 * call.written  # Only these rows are moved, and not the whole table.
        elif name.startswith(_REDUCING):
            kind = "reductions"
        elif name in _OVERWRITING:
            moved -= call.written
        cached = "list" not in call.flags and moved < _CACHED_SHARE * self._rates.kinds["l2_mb"] * 1e6
        bandwidth = self._rates.bandwidth * self._rates.kinds[kind] * (_CACHED_GAIN if cached else 1)
        return self._start + moved / bandwidth

    def _product(self, call: TracedCall) -> float:
        computing = self._computing(call, "products")
        matrices = [shape for shape in call.shapes if len(shape) > 1][-2:]
        if len(matrices) < 2:  # ZeRO leaves an empty weight where it has divided it.
            return max(computing, self._moving(call))
        left, right = matrices
        batch = left[0] if len(left) == 3 else 1
        rows, inner, columns = left[-2], left[-1], right[-1]
        if min(rows, columns, inner) < _THIN:
            return max(computing, self._moving(call, "thin_products"))
        cores = self._rates.multiprocessors
        # seconds in which one multiprocessor computes an element of the result
        of_core = computing * cores / (batch * rows * columns)
        fastest = math.inf
        for tile_rows, tile_columns, share in _TILES:
            tiles = batch * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            split = 1
            if tiles * 2 <= cores and inner > 1024:
                split = max(1, min(8, cores // tiles, inner // 512))  # several multiprocessors share the sums of a tile
            of_wave = tile_rows * tile_columns * of_core / (split * share) + self._rates.kinds["wave_us"] * 1e-6
            fastest = min(fastest, math.ceil(tiles * split / cores) * of_wave)
        return max(fastest, self._moving(call))

    def _attention(self, call: TracedCall) -> float:
        backward = "backward" in call.operator
        kernel = next((name for name in ("cudnn", "flash", "efficient") if name in call.operator), "")
        in_half = call.dtype in ("bf16", "fp16")
        computing = self._computing(call, f"attention_{kernel}{'_backward' if backward and in_half else ''}")
        if call.shapes:
            query, key = call.shapes[backward], call.shapes[backward + 1]
            skips = "causal" in call.flags and "masked" not in call.flags
            tokens, keys = (query[-2], key[-2]) if "scaled_dot_product" in call.operator else (query[-3], key[-3])
            if in_half:
                computing *= 1 + _HALF_RATE_AT[skips, backward] / max(tokens, 1)
                computing /= min(1.0, query[-1] / _FULL_WIDTH) ** 0.35
            computing *= 0.5 if skips and tokens == keys else 1.0
        return max(computing, self._moving(call))

    def _convolution(self, call: TracedCall) -> float:
        backward = "backward" in call.operator
        start, moving = (1 + 2 * backward) * self._start, self._moving(call)
        if "grouped" in call.flags:
            if call.shapes[backward + 1][1] > 1:
                raise UnknownKernel("grouped convolutions")
            return start + 3 * moving
        moving *= 1 if "channels_last" in call.flags else 2  # other layouts are copied to channels last and back
        return start + self._computing(call, "convolutions") + moving
