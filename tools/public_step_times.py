#!/usr/bin/env python3
"""Tries expected seconds on steps that others measured, on GPUs of which only published rates are known.

    tools/public_step_times.py             # prints measured by expected seconds by GPU, and intervals with each GPU left out
    tools/public_step_times.py --record    # emulates the programs anew, and writes the calls of their steps

The calls, once recorded, are in tests/step_calls/. Recording them takes a CUDA build of torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from step_time_errors import CALLS, SOURCES, Step, expected, read, record

from pytest_gputrain.hardware.rates import rates_of
from pytest_gputrain.records import Case

_NAME: Final = "published_elsewhere"
_TABLE: Final = CALLS / f"{_NAME}.json"
_TOKENS: Final = 384
_PIXELS: Final = 224
_SIZES: Final = {
    "bert-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "bert-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}


def bert(setup: Any, size: str, half: bool) -> Callable[[], Any]:
    """Fine-tune BERT on questions as in NVIDIA's example: eager attention, and in 16 bits all weights but their masters."""
    import torch
    from transformers import BertConfig, BertForQuestionAnswering

    torch.backends.cuda.matmul.allow_tf32 = True
    config = BertConfig(**_SIZES[size], attn_implementation="eager")
    model = BertForQuestionAnswering(config).to(setup.device, torch.float16 if half else torch.float32).train()
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights] if half else weights
    optimizer = torch.optim.Adam(masters, fused=True)
    shape = (setup.case.batch_size, _TOKENS)
    ids = torch.randint(0, config.vocab_size, shape, device=setup.device)
    mask, ends = torch.ones(shape, device=setup.device), torch.randint(0, _TOKENS, shape[:1], device=setup.device)

    def step() -> Any:
        loss = model(ids, attention_mask=mask, start_positions=ends, end_positions=ends).loss
        loss.backward()
        if half:
            for master, weight in zip(masters, weights, strict=True):
                master.grad = weight.grad.float()
        optimizer.step()
        if half:
            torch._foreach_copy_([weight.data for weight in weights], masters)
        model.zero_grad()
        optimizer.zero_grad()
        return loss

    return step


def resnet(setup: Any, half: bool) -> Callable[[], Any]:
    """Train ResNet-50 on images that lie channels first, in 16 bits by autocast."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).to(setup.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    size = setup.case.batch_size
    images = torch.randn(size, 3, _PIXELS, _PIXELS, device=setup.device)
    labels = torch.randint(0, 1000, (size,), device=setup.device)

    def step() -> Any:
        with torch.autocast("cuda", torch.float16, enabled=half):
            loss = torch.nn.functional.cross_entropy(model(images).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def measured_elsewhere() -> Iterator[Step]:
    """Yield the steps of the table in tests/step_calls."""
    for platform, program, precision, batch_size, rate in json.loads(_TABLE.read_text())["rows"]:
        half = precision == "fp16"
        function, args = ("resnet", {"half": half}) if program == "resnet50" else ("bert", {"size": program, "half": half})
        case = Case(
            method="custom",
            precision="fp16-amp" if half else "fp32",
            code=f"tools/public_step_times.py::{function}",
            args=json.dumps(args),
            batch_size=batch_size,
        )
        yield Step(_NAME, f"{program} {precision}, batch {batch_size}", platform, case, batch_size / rate)


def ratios() -> dict[str, dict[str, float]]:
    """Return the measured seconds by the expected ones, by step, of each GPU that has only published rates."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    recorded = [name for name in (_NAME, "published") if (CALLS / f"{name}.jsonl.gz").exists()]
    for step in itertools.chain.from_iterable(map(read, recorded)):
        rates = rates_of(step.platform)
        if rates is not None and not rates.measured and (seconds := expected(step, rates).seconds):
            found[step.platform][step.name] = step.seconds / seconds
    return found


def interval(groups: Sequence[Sequence[float]], share: float) -> tuple[float, float]:
    """Return the middle interval that has a share of all ratios, in which each group has the same weight."""
    weighted = sorted((ratio, 1 / len(group) / len(groups)) for group in groups for ratio in group)
    sums = list(itertools.accumulate(weight for _, weight in weighted))
    outside = (1 - share) / 2
    low = next(ratio for (ratio, _), total in zip(weighted, sums, strict=True) if total >= outside)
    return low, next(ratio for (ratio, _), total in zip(weighted, sums, strict=True) if total >= 1 - outside - 1e-9)


def left_out(by_gpu: Mapping[str, Mapping[str, float]], share: float = 0.8) -> dict[str, tuple[float, float, float]]:
    """Return, for each GPU, the interval that has the share of the others' steps, and the share of its own steps inside."""
    found = {}
    for gpu, steps in by_gpu.items():
        low, high = interval([list(others.values()) for other, others in by_gpu.items() if other != gpu], share)
        found[gpu] = low, high, statistics.mean(low <= ratio <= high for ratio in steps.values())
    return found


SOURCES[_NAME] = measured_elsewhere


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        record(_NAME, "")
        return
    by_gpu = ratios()
    inside = left_out(by_gpu)
    for gpu, steps in by_gpu.items():
        low, high, share = inside[gpu]
        of_gpu = sorted(steps.values())
        print(
            f"{gpu:16} {len(steps):3} steps took {of_gpu[0]:.2f} to {of_gpu[-1]:.2f} of what is expected, median "
            f"{statistics.median(of_gpu):.2f}; {share:.0%} are within {low:.2f} to {high:.2f}, as 80 % on the other GPUs"
        )
    print("all: 80 % within {:.2f} to {:.2f}".format(*interval([list(steps.values()) for steps in by_gpu.values()], 0.8)))


if __name__ == "__main__":
    main()
