"""Predicted against published memory, for the single-GPU rows of a published table on one platform.

    python tools/compare_dry_run.py [llm-trainer] [--platform h100] [--only qlora]

One set of conditions holds for all rows of the table, and is printed with them; nothing is tuned for a row.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from pytest_gputrain import launch
from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.published import GATED, PublishedTable
from pytest_gputrain.records import Case, Prediction, Target, Task
from pytest_gputrain.units import GiB

USABLE_BYTES: Final = {"h100": int(79.1 * GiB), "a100": int(79.15 * GiB), "rtx_pro_6000": int(94.97 * GiB)}
"""What torch calls the total capacity of such a card, as in its messages of memory that ran out."""

TABLES: Final = Path(__file__).resolve().parent.parent / "baselines" / "published"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a document does not say, but its figures show."""

    context_bytes: int
    """The driver's context and kernels, which the allocator cannot have."""
    printed_with_context: bool
    """Whether the published figure counts them."""
    qlora_precision: str = "bf16"
    """Of the layers that are not quantised, and of the arithmetic: transformers' default for a quantised model is fp32."""

    grouped_queries: bool = True
    """See `Target`."""

    def case(self, case: Case) -> Case:
        return case.replace(precision=self.qlora_precision) if case.method == "qlora" else case

    def __str__(self) -> str:
        counted = "counted" if self.printed_with_context else "not counted"
        return (
            f"native allocator, loss in the logits' dtype, optimizer over lists of tensors, context of "
            f"{self.context_bytes / GiB:.2f} GiB ({counted} in the figures), QLoRA in {self.qlora_precision}, "
            f"grouped queries {'kept' if self.grouped_queries else 'repeated'}"
        )


CONDITIONS: Final = {
    "llm-trainer": Conditions(
        context_bytes=int(0.55 * GiB), printed_with_context=True, qlora_precision="fp32", grouped_queries=False
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", default="llm-trainer", choices=CONDITIONS)
    parser.add_argument("--platform", default="h100", choices=USABLE_BYTES)
    parser.add_argument("--only", default="", help="rows whose id has this in it")
    arguments = parser.parse_args()
    table = msgspec.json.decode((TABLES / f"{arguments.table}.json").read_bytes(), type=PublishedTable)
    conditions, platform = CONDITIONS[arguments.table], PLATFORMS[arguments.platform]
    target = Target(
        marker=platform.marker,
        kind="cuda",
        memory_bytes=USABLE_BYTES[platform.marker],
        grouped_queries=conditions.grouped_queries,
        context_bytes=conditions.context_bytes,
        capability=(7, 0) if platform.marker == "v100" else (8, 0),
        peak_flops=platform.peak_flops,
        bandwidth=platform.bandwidth,
    )
    print(f"{table.title}, {platform.title}; GiB, predicted/published")
    print(f"conditions: {conditions}")
    errors, wrong = [], 0
    for row in table.rows:
        if row.platform != platform.marker or row.case.parallel != "single" or arguments.only not in str(row.case):
            continue
        task = Task(case=conditions.case(row.case), scale="full", device_type="cpu", root=".", target=target)
        start = time.perf_counter()
        reply = launch.predict(task, timeout_seconds=600)
        seconds = time.perf_counter() - start
        if not isinstance(reply, Prediction):
            print(f"{row.case}: {reply}")
            return 1
        figures = row.figures.get(GATED)
        expected, model, step = (
            getattr(figures, name, None) for name in ("peak_reserved_bytes", "model_bytes", "step_seconds")
        )
        assert reply.peak_reserved_bytes is not None
        total = reply.peak_reserved_bytes + (conditions.context_bytes if conditions.printed_with_context else 0)
        shown, error = f"{total / GiB:.1f}/{expected.low / GiB:.0f}" if expected else f"{total / GiB:.1f}/OOM", ""
        if reply.fits != (row.outcome == "measured"):
            wrong += 1
            error = "  WRONG: " + ("fits" if reply.fits else "out of memory")
        elif expected and reply.fits:
            errors.append(total / expected.low - 1)
            error = f"{errors[-1]:+7.1%}"
        sizes = f"model {reply.model_bytes / GiB:.1f}" + (f"/{model.low / GiB:.1f}" if model else "")
        times = f"roofline {reply.roofline_seconds:.2f} s" + (f" -> {step.low}" if step else "")
        print(f"{row.case!s:32} {shown:>10} {error:8} {sizes:18} {times}  [{seconds:.0f} s]", flush=True)
    if errors:
        sizes_of = [abs(error) for error in errors]
        print(
            f"{len(errors)} rows: median error {statistics.median(sizes_of):.1%}, mean {statistics.mean(sizes_of):.1%}, "
            f"worst {max(sizes_of):.1%}; {wrong} wrong calls of fits or out of memory"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
