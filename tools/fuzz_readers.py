"""Feeds every reader of files and words with damaged input; exits with 1 where one does anything but its documented error.

    python tools/fuzz_readers.py [--inputs 1000000] [--seed N] [--only READER]

An input is a sound sample with some of its bytes or of its JSON values changed, or bytes at random. What a reader accepts is
used as the product does: judged, printed, exported, searched for changes. A documented error is one sentence.

Each failure is told with the seed that makes its input again (``--seed N --inputs 1 --only READER``) and the end of its
traceback, those that end at the same line once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from damage import damaged
from readers import READERS, Reader, Scratch

SHOWN: Final = 20

LIMIT_SECONDS: Final = 20
"""Processor time, of which a busy machine takes no more. Every input is read in less than one."""


class TooLong(Exception):
    """An input took longer than `LIMIT_SECONDS`."""


class Failure(NamedTuple):
    """An outcome that a reader must not have."""

    reader: str
    seed: int
    where: str
    """The line that it ends at, by which failures are told apart."""
    detail: str


def attempt(reader: Reader, seed: int, scratch: Scratch) -> tuple[str, Failure | None]:
    """Return the outcome of the input that ``seed`` makes: ``accepted``, the name of an error, or ``failed``."""
    rng = random.Random(seed)
    data = damaged(rng, reader.samples, structured=reader.is_json)
    try:
        with limited(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            reader.read(data, scratch, rng)
    except reader.documented as error:
        sentence = str(error)
        if sentence.strip() and len(sentence.splitlines()) == 1:
            return type(error).__name__, None
        return "failed", Failure(reader.name, seed, f"no sentence: {type(error).__name__}", repr(sentence)[:300])
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        detail = "".join(traceback.format_exception(error)[-6:]) + f"input: {data[:300]!r}"
        return "failed", Failure(reader.name, seed, where, detail)
    return "accepted", None


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise a `TooLong` in what does not end by itself."""

    def stop(*_: object) -> None:
        raise TooLong(f"it was not read in {LIMIT_SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def seeds_of(reader: Reader, seed: int, count: int) -> Iterator[int]:
    """Return the seeds of the inputs of a reader; the first is ``seed`` itself, so that one input can be made again."""
    yield seed
    rng = random.Random(f"{reader.name} {seed}")
    for _ in range(count - 1):
        yield rng.getrandbits(63)


def run(readers: list[Reader], inputs: int, seed: int) -> int:
    """Print a line for each reader, and then the failures; their number."""
    whole = sum(reader.weight for reader in readers)
    failures: dict[tuple[str, str], list[Failure]] = {}
    total, began = 0, time.monotonic()
    print(f"seed {seed}")
    for reader in readers:
        count = max(1, round(inputs * reader.weight / whole))
        outcomes: Counter[str] = Counter()
        start = time.process_time()
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            scratch = Scratch(Path(folder))
            for input_seed in seeds_of(reader, seed, count):
                outcome, failure = attempt(reader, input_seed, scratch)
                outcomes[outcome] += 1
                if failure is not None:
                    failures.setdefault((failure.reader, failure.where), []).append(failure)
        total += count
        counts = ", ".join(f"{number:,} {outcome}" for outcome, number in outcomes.most_common())
        print(f"{reader.name:12} {count:9,} inputs {time.process_time() - start:6.0f} s: {counts}", flush=True)
    print(f"{total:,} inputs in {time.monotonic() - began:.0f} s, {sum(map(len, failures.values())):,} failures")
    for alike in list(failures.values())[:SHOWN]:
        print(
            f"\n{alike[0].reader}, {len(alike):,} times, for one --seed {alike[0].seed}: {alike[0].where}\n{alike[0].detail}"
        )
    return len(failures)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all readers together (default: 1000000)")
    parser.add_argument("--seed", type=int, help="of the first input, and of the others (default: at random)")
    parser.add_argument("--only", choices=[reader.name for reader in READERS], help="this reader")
    given = parser.parse_args(arguments)
    chosen = [reader for reader in READERS if given.only in (None, reader.name)]
    return int(run(chosen, given.inputs, secrets.randbits(32) if given.seed is None else given.seed) > 0)


if __name__ == "__main__":
    sys.exit(main())
