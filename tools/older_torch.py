"""Compares published memory of older torch with an emulated GPU, as torch is now and with what the older one kept.

    python tools/older_torch.py [--only TEXT]

Each row trains at full size on an emulated GPU, in half a minute, by published_older.py. Nothing is tuned for a row:

- ``bert``: transformers' page on training on one GPU, by torch 1.10 on a V100 in January 2022, read from NVML after the
  training, with a context of 1,343 MiB.
- ``vit``: rasbt/pytorch-memory-optim, by torch 2.1.0.dev20230623, whose highest reserved memory it printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final, NamedTuple

from public_figures import emulated

from pytest_gputrain.utils.markdown import table
from pytest_gputrain.utils.units import MiB, format_percent

_CONTEXT: Final = 1343 * MiB


class Row(NamedTuple):
    """A published figure, and how its program trained."""

    published: int
    """Bytes."""
    batch: int
    precision: str = "fp32"
    micro_batches: int = 1
    checkpointing: bool = False


ROWS: Final = {
    "bert-4": Row(14949 * MiB, 4),
    "bert-4-fp16-amp": Row(13939 * MiB, 4, "fp16-amp"),
    "bert-1": Row(8681 * MiB, 1, micro_batches=4),
    "bert-1-checkpointing": Row(6775 * MiB, 1, micro_batches=4, checkpointing=True),
    "bert-1-checkpointing-fp16-amp": Row(7275 * MiB, 1, "fp16-amp", 4, True),
    "vit-64": Row(26_790_000_000, 64),
    "vit-64-fp16-amp": Row(18_210_000_000, 64, "fp16-amp"),
    "vit-64-bf16": Row(13_820_000_000, 64, "bf16"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with TEXT in their names")
    options = parser.parse_args(arguments)
    lines = []
    for name, row in ROWS.items():
        if options.only in name:
            figures = [reserved(name, older=older) for older in (False, True)]
            cells = [f"{figure / MiB:,.0f} ({format_percent(figure / row.published - 1)})" for figure in figures]
            lines.append([name, f"{row.published / MiB:,.0f}", *cells])
    print("\n".join(table(["row, MiB", "published", "emulated", "with what older torch kept"], lines)))
    return 0


def reserved(name: str, *, older: bool) -> int:
    """Return the highest reserved memory of a row on its emulated GPU in bytes, with CUDA's context if the figure has it."""
    gpu, context = ("v100_32gb", _CONTEXT) if name.startswith("bert") else ("a100", 0)
    try:
        emulation, _ = emulated(name, gpu, Path(__file__).with_name("published_older.py"), name, *["older"] * older)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    (process,) = emulation.processes
    return process.devices[0].peak_reserved_bytes + context


if __name__ == "__main__":
    sys.exit(main())
