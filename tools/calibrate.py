#!/usr/bin/env python3
"""Measures what kernels sustain on the GPU of this machine, and writes it to rates.toml, which expected seconds rest on.

    python tools/calibrate.py [--minutes 10] [--state FILE] [--overwrite]
    gputrain emulate --gpu h100 -- python tools/calibrate.py --dry-run

Steps come first, then kernels. A call goes on where the last one ended or was killed. The rate of a kind is the one with
which the model expects the measured seconds, as the median of its kernels. A dry run runs everything once, and writes no
rates.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from pytest_gputrain.hardware.catalog import marker_of
from pytest_gputrain.hardware.rates import FILE, rates_of
from pytest_gputrain.hardware.step_time import expected_time
from pytest_gputrain.records import Rates, TracedCall
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.units import format_percent

_DRY_RUN: Final = "gputrain emulate --gpu h100 -- python tools/calibrate.py --dry-run"
LIKE: Final = "h200"
"""The board whose rates stand in for kinds that are not measured."""
_PROJECTIONS: Final = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024), (3072, 8192), (1536, 8960))
_IMAGES: Final = (((64, 64, 56, 56), 64, 3), ((64, 256, 56, 56), 64, 1), ((16, 320, 64, 64), 320, 3))
"""Shapes of images, output channels and kernels of convolutions of ResNet-50 and of a U-Net."""
_HEADS: Final = ((2048, 128, True), (8192, 128, True), (2048, 128, False), (2048, 64, True))
"""Tokens, width, and whether attention is causal."""
_STEPS: Final = ("base", "batch=8", "checkpointing", "eager", "fused", "autocast", "copies", "fp32_logits", "clipped")
"""Steps of a language model of 0.4 billion parameters; each but the first makes a pair with it."""

Make = Callable[[], Callable[[], Any]]
"""Builds the tensors, and returns what runs once."""


class Measured(NamedTuple):
    """The seconds of a kernel or a step, and its calls."""

    kind: str
    name: str
    seconds: float
    calls: tuple[TracedCall, ...]


def measures() -> Iterator[tuple[str, str, Make]]:
    """Yield kind, name and what builds each measurement, in the order in which they count most."""
    import torch
    from torch.nn import attention, functional

    half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    draw = functools.partial(torch.randn, device="cuda")
    yield from (("step", name, functools.partial(_step, half, name)) for name in _STEPS)
    yield "call_us", "a step that waits for the host", functools.partial(_step, half, "tiny")

    def both(function: Callable[..., Any], *given: Any) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(found := function(*given), given, found)

    def product(rows: int, inner: int, columns: int, dtype: Any, precision: str) -> Callable[[], Any]:
        torch.set_float32_matmul_precision(precision)
        return functools.partial(functional.linear, draw(rows, inner, dtype=dtype), draw(columns, inner, dtype=dtype))

    def attend(kernel: str, tokens: int, width: int, causal: bool, backward: bool) -> Callable[[], Any]:
        def run(*given: Any) -> Any:
            with attention.sdpa_kernel(getattr(attention.SDPBackend, f"{kernel.upper()}_ATTENTION")):
                return functional.scaled_dot_product_attention(*given, is_causal=causal)

        shape = (max(1, 8192 // tokens), 2048 // width, tokens, width)
        given = [draw(shape, dtype=half, requires_grad=backward) for _ in range(3)]
        return both(run, *given) if backward else functools.partial(run, *given)

    def convolve(shape: tuple[int, ...], output: int, side: int, dtype: Any, precision: str) -> Callable[[], Any]:
        torch.backends.cudnn.allow_tf32 = precision == "high"
        layout = torch.channels_last if dtype == half else torch.contiguous_format
        shapes = shape, (output, shape[1], side, side)
        given = [draw(one, dtype=dtype).to(memory_format=layout).requires_grad_() for one in shapes]
        return both(functools.partial(functional.conv2d, padding=side // 2), *given)

    for kind, *numbers in (("16bit", half, "high"), ("fp32", torch.float32, "highest"), ("tf32", torch.float32, "high")):
        for sides in itertools.product((16384, 2048, 512), _PROJECTIONS[: 6 if kind == "16bit" else 2]):
            yield f"products_{kind}", str(sides), functools.partial(product, sides[0], *sides[1], *numbers)
        for image in _IMAGES:
            yield f"convolutions_{kind}", str(image), functools.partial(convolve, *image, *numbers)
    for rank in (8, 16):
        yield "thin_products", f"rank {rank}", functools.partial(product, 16384, 4096, rank, half, "high")
    rows, places = draw(64_000, 4000, dtype=half), torch.randint(0, 64_000, (32768,), device="cuda")
    yield "pointwise", "add", lambda: lambda: rows + rows
    yield "pointwise", "gelu", lambda: lambda: functional.gelu(rows)
    yield "pointwise", "to fp32", lambda: rows.float
    yield "reductions", "softmax", lambda: lambda: rows.softmax(-1)
    yield "reductions", "layer_norm", lambda: lambda: functional.layer_norm(rows, (4000,))
    yield "gathers", "embedding", lambda: lambda: functional.embedding(places, rows)
    yield "gathers", "index", lambda: lambda: rows[places]
    for kernel, backward, head in itertools.product(("flash", "efficient", "cudnn"), (False, True), _HEADS):
        kind = f"attention_{kernel}{'_backward' if backward else ''}"
        yield kind, str(head), functools.partial(attend, kernel, *head, backward)


def _step(half: Any, name: str) -> Callable[[], Any]:
    """Build a Llama of transformers with one thing changed, and return its step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width, shape = (128, (4, 64)) if name == "tiny" else (1536, (8 if name == "batch=8" else 4, 1024))
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 128}
    config = LlamaConfig(**sizes, num_hidden_layers=12, attn_implementation="eager" if name == "eager" else "sdpa")
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.float32 if name == "autocast" else half).train()
        ids = torch.randint(0, config.vocab_size, shape)
    if name == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers if name == "copies" else ():
        layer.register_forward_hook(lambda module, args, output: output.clone())
    optimizer = torch.optim.AdamW(model.parameters(), fused=name == "fused")

    def step() -> None:
        with torch.autocast("cuda", half, enabled=name == "autocast"):
            logits = model(ids).logits.flatten(0, 1)
        torch.nn.functional.cross_entropy(logits.float() if name == "fp32_logits" else logits, ids.flatten()).backward()
        if name == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(kind: str, name: str, make: Make, runs: int) -> Measured | None:
    """Run one, and return its calls and the median of its seconds; None if the GPU cannot compute it."""
    import torch

    from pytest_gputrain.worker.flops import count_flops
    from pytest_gputrain.worker.work import WorkCount

    events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    work = WorkCount(lambda: "")
    try:
        run = make()
        run()
        with count_flops(work):
            run()
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"{kind}, {name} is left out: {str(error).splitlines()[0]}", flush=True)
        return None
    times = [begin.elapsed_time(end) / 1000 for begin, end in itertools.pairwise(events)]
    return Measured(kind, name, statistics.median(times), tuple(work.calls()))


def _with(rates: Rates, kinds: Mapping[str, float]) -> Rates:
    return msgspec.structs.replace(rates, kinds={**rates.kinds, **kinds})


def fitted(one: Measured, rates: Rates) -> float | None:
    """Return the value of its kind with which a kernel is expected to take its seconds; None if there is none."""
    low, high = 1e-3, 1e3
    for _ in range(50):
        middle = math.sqrt(low * high)
        expected = expected_time(one.calls, _with(rates, {one.kind: middle}))
        is_short = expected.host_seconds < one.seconds if one.kind == "call_us" else expected.gpu_seconds > one.seconds
        low, high = (middle, high) if is_short else (low, middle)
    return low if 2e-3 < low < 5e2 else None


def fit(found: Sequence[Measured], rates: Rates) -> tuple[dict[str, float], list[str]]:
    """Return the rates of the kinds that were measured, and lines with the errors when each kernel is left out in turn."""
    kinds: dict[str, float] = {}
    lines = []
    steps = {one.name: one for one in found if one.kind == "step" and one.seconds}
    # What is bound by memory comes first, because others may be, too.
    for kind in sorted({one.kind for one in found} - {"step"}, key=lambda kind: (kind != "pointwise", kind)):
        values = [value for one in found if one.kind == kind and (value := fitted(one, _with(rates, kinds)))]
        if values:
            kinds[kind] = statistics.median(values)
        if len(values) > 1:
            others = [statistics.median(values[:at] + values[at + 1 :]) for at in range(len(values))]
            lines.append(f"{kind} {kinds[kind]:.3f}: {_off(others, values)}, each of {len(values)} kernels left out")
    takes = {name: expected_time(one.calls, _with(rates, kinds)).seconds or math.nan for name, one in steps.items()}
    if steps:
        off = _off([*takes.values()], [one.seconds for one in steps.values()])
        lines.append(f"{len(steps)} steps, to which nothing is fitted: {off}")
    for name in steps if "base" in steps else ():
        was, will = steps[name].seconds / steps["base"].seconds - 1, takes[name] / takes["base"] - 1
        lines.append(f"{name}: {format_percent(was)} was measured, {format_percent(will)} is expected")
    return kinds, lines


def _off(expected: Sequence[float], measured: Sequence[float]) -> str:
    errors = [abs(one / other - 1) for one, other in zip(expected, measured, strict=True)]
    median, worst = (format_percent(error, signed=False) for error in (statistics.median(errors), max(errors)))
    return f"off by {median} in the median and {worst} at most"


def with_entry(text: str, marker: str, kinds: Mapping[str, float], about: str, *, overwrite: bool) -> str:
    """Return the text of rates.toml with an entry of a board.

    Raises:
        ValueError: it has one already, and is not to be replaced.
    """
    source = f"calibrated-{marker}"
    old = re.compile(rf"^\[(?:boards\.{marker}(?:\.from\..*)?|sources\.{source})\]\n(?:(?!\[).*(?:\n|\Z))*", re.MULTILINE)
    if old.search(text) and not overwrite:
        raise ValueError(f"{FILE} has rates of {marker} already; add --overwrite to replace them")
    like = "" if marker == LIKE else f'[boards.{marker}]\nlike = "{LIKE}"\n\n'
    rates = "".join(f"{kind} = {value:.3f}\n" for kind, value in sorted(kinds.items()))
    return f"{old.sub('', text).rstrip()}\n\n[sources.{source}]\n{about}\n{like}[boards.{marker}.from.{source}]\n{rates}"


def _about(properties: Any) -> str:
    asked = ["nvidia-smi", "--id=0", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits"]
    driver, power = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split(",")
    title = f"tools/calibrate.py on {properties.name}"
    facts = {"title": title, "date": time.strftime("%Y-%m-%d"), "driver": driver, "power_watts": float(power)}
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in facts.items()) + "measured = true\n"


def _why_not() -> str:
    """Say why nothing can be measured here; empty if it can."""
    try:
        import torch
        import transformers  # noqa: F401 - of which the steps are
    except ImportError as error:
        return f"a library cannot be imported ({error})"
    return "" if torch.cuda.is_available() else "torch finds no GPU here"


def main() -> int:
    """Measure what is left, and write the rates if all is measured; 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--state", type=Path, default=Path("calibration.jsonl"), metavar="FILE")
    parser.add_argument("--overwrite", action="store_true", help="replace the rates that the board has")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    is_dry, deadline = options.dry_run, time.monotonic() + 60 * options.minutes
    if lacking := _why_not():
        print(f"{lacking}; without a GPU try {_DRY_RUN}", file=sys.stderr)
        return 2
    if is_dry:
        print("dry run: the times and rates below mean nothing, and none are written", flush=True)
    import torch

    properties = torch.cuda.get_device_properties(0)
    marker = marker_of(properties.name) or ""
    write = functools.partial(with_entry, FILE.read_text(), marker, overwrite=options.overwrite or is_dry)
    try:
        prior = rates_of(marker, like=LIKE)
        write({}, "")
    except (KeyError, ValueError) as error:
        print(error if marker else f"{properties.name} is not in the catalog: see docs/gpus.md", file=sys.stderr)
        return 2
    lines = options.state.read_bytes().splitlines() if options.state.exists() and not is_dry else []
    found = {(one.kind, one.name): one for one in (msgspec.json.decode(line, type=Measured) for line in lines)}
    for kind, name, make in measures():
        if time.monotonic() > deadline:
            print(f"the time is over; the same command goes on from {options.state}")
            return 0
        if (kind, name) not in found and (measured := measure(kind, name, make, runs=2 if is_dry else 20)):
            found[kind, name] = measured
            if not is_dry:
                write_atomically(options.state, b"\n".join(map(msgspec.json.encode, found.values())))
    kinds, told = fit([*found.values()], prior)
    print("\n".join(told))
    if is_dry:
        print(f"{len(found)} measurements ran, and no rates are written")
        return 0
    kinds["l2_mb"] = properties.L2_cache_size / 1e6
    write_atomically(FILE, write(kinds, _about(properties)).encode())
    print(f"{FILE} has the rates of {marker} now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
