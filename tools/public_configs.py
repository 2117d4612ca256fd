"""Has models of 2024 to 2026 answered by an emulated GPU, from a config.json in the form that each has in public.

`public_configs.json` has one entry for each type of model with a language model: the keys that differ from the defaults of
its class in transformers. Neither these nor the defaults were compared with files on the hub, and the indexer of
``qwen4-exp`` has sizes that nobody published. An entry with ``architectures`` is written as it is, where transformers writes
another form.

Usage: python tools/public_configs.py [--method lora] [--gpu h100] [--sequence 1024] [--results results.jsonl] [NAME ...]
       python tools/public_configs.py --summary --results results.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_gputrain import Case
from pytest_gputrain.cases.model_config import with_model
from pytest_gputrain.execution.emulated import EmulatingExecutor
from pytest_gputrain.execution.launch.fork_server import ForkServer
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.records import EmulatedRun
from pytest_gputrain.session.tasks import full_size_task
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.units import format_bytes

CONFIGS: Final = Path(__file__).with_suffix(".json")
_TIMEOUT_SECONDS: Final = 900.0
_DOES_NOT_FIT: Final = "does not fit"


def configs() -> dict[str, dict[str, Any]]:
    """Return the entries by name."""
    entries: dict[str, dict[str, Any]] = json.loads(CONFIGS.read_bytes())
    return entries


def write(names: Iterable[str], folder: Path) -> None:
    """Write the config.json of entries into a folder, as transformers does or as they are published."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for name in names:
        entry = configs()[name]
        as_published = "architectures" in entry
        text = json.dumps(entry) if as_published else CONFIG_MAPPING[entry.pop("model_type")](**entry).to_json_string()
        (folder / f"{name}.json").write_text(text)


def answers(names: Sequence[str], folder: Path, gpu: str, **knobs: Any) -> Iterator[tuple[str, bool, str]]:
    """Yield the name of each entry, whether it was answered, and its figures or the sentence that refuses it."""
    executor = EmulatingExecutor(gpu, _TIMEOUT_SECONDS, os.environ, ForkServer())
    try:
        # In a process that can import torch without NVIDIA's libraries.
        command = [sys.executable, __file__, f"--write={folder}", *names]
        subprocess.run(command, env={**os.environ, **executor.environment(1)}, check=True)
        for name in names:
            case = Case(model=str(folder / f"{name}.json"), loss="fp32", steps=1, warmup=1, **knobs)
            try:
                case = with_model(case, folder)
                reply = executor.run(full_size_task(case, folder, emulated=gpu), watch=lambda event: None)
            except BadCase as error:
                yield name, False, str(error)
                continue
            if isinstance(reply, EmulatedRun):
                peak = format_bytes(reply.peak_reserved_bytes)
                yield name, True, f"{peak} reserved at the peak" if reply.fits else f"{_DOES_NOT_FIT}: {reply.refused}"
            else:
                yield name, False, f"{case} {describe_failure(reply, 'figures on an emulated GPU')}"
    finally:
        executor.close()


def summary(results: Iterable[tuple[str, str, bool, str]]) -> Iterator[str]:
    """Yield how many of the results are answers, by method, and the names that were refused by the same sentence."""
    by_method: dict[str, list[tuple[str, bool, str]]] = {}
    for name, method, answered, what in results:
        by_method.setdefault(method, []).append((name, answered, what))
    for method, found in by_method.items():
        fits = sum(answered and not what.startswith(_DOES_NOT_FIT) for _, answered, what in found)
        refused = [(name, what) for name, answered, what in found if not answered]
        too_large = len(found) - fits - len(refused)
        yield f"{method}: {fits} fit, {too_large} do not fit, {len(refused)} of {len(found)} are refused"
        names: dict[str, list[str]] = {}
        for name, what in refused:
            # Without what is of one model: its name with the digest, and what stands in quotes.
            names.setdefault(re.sub(r"\S*#\S+ ?|'[^']*'", "", what), []).append(name)
        for sentence, group in names.items():
            yield f"- {len(group)} ({', '.join(group)}): {sentence}"


def main() -> int:
    """Print a line for each entry; 1 where one was not answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="entries (default: all)")
    parser.add_argument("--method", default="lora", help="full, lora or qlora (default: lora)")
    parser.add_argument("--gpu", default="h100", help="marker of the GPU (default: h100)")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sample (default: 1024)")
    parser.add_argument("--results", type=Path, help="a file for a line of JSON each; what it has is not run again")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="only write the files into this folder")
    parser.add_argument("--summary", action="store_true", help="only count what the file of results has")
    options = parser.parse_args()
    if unknown := set(options.names) - configs().keys():
        parser.error(f"{CONFIGS.name} has no {', '.join(sorted(unknown))}")
    if options.write:
        write(options.names or configs(), options.write)
        return 0
    known = options.results.read_text().splitlines() if options.results and options.results.exists() else []
    if options.summary:
        print(*summary(map(json.loads, known)), sep="\n")
        return 0
    done = {tuple(json.loads(line)[:2]) for line in known}
    names = [name for name in options.names or configs() if (name, options.method) not in done]
    refused = 0
    with tempfile.TemporaryDirectory() as folder:
        knobs = {"method": options.method, "sequence_length": options.sequence}
        for name, answered, what in answers(names, Path(folder), options.gpu, **knobs):
            refused += not answered
            print(f"{name}: {'' if answered else 'refused: '}{what}", flush=True)
            if options.results:
                with options.results.open("a") as results:
                    print(json.dumps([name, options.method, answered, what]), file=results)
    print(f"{len(names) - refused} of {len(names)} answered")
    return int(refused > 0)


if __name__ == "__main__":
    raise SystemExit(main())
