"""The stand-ins of the driver, the runtime and NVML, called from C with wrong sizes, addresses and handles.

They are compiled together with the program, without torch, so that a sanitizer sees every access.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gputrain.hardware.emulation import boards, build
from pytest_gputrain.utils.errors import CannotEmulate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
]

PROGRAM = [Path(__file__).with_name(name) for name in ("stand_ins.c", "captures.c")]
SOURCES = (
    "counters",
    "gpus",
    "graphs",
    "handles",
    "memory",
    "products",
    "random",
    "values",
    "cuda",
    "cudart",
    "nvidia-ml",
    "cusparse",
)
FLAGS = ("-std=gnu11", "-O1", "-g", "-rdynamic", "-D_GNU_SOURCE", "-DCUDA_VERSION=13000")
SANITIZERS = {
    "none": (),
    "addresses and undefined behaviour": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    # Its shadow memory leaves less than the 4 TiB of addresses that each device has.
    "threads": ("-fsanitize=thread", "-DGPUTRAIN_SPAN=((size_t)1<<38)"),
}
SEEDS = int(os.environ.get("GPUTRAIN_FUZZ_SEEDS", "20"))
"""Sequences of random calls. CI tries a few, and once a week many."""

CALLS = 5000


@pytest.fixture(scope="module", params=SANITIZERS)
def run(request, tmp_path_factory):
    """Run the program with arguments; it prints the lines whose check failed."""
    program = tmp_path_factory.mktemp("built") / "stand_ins"
    files = [*PROGRAM, *(build.SOURCES / f"{name}.c" for name in SOURCES)]
    try:
        command = [*build.find_compiler(), *FLAGS, *SANITIZERS[request.param], f"-I{build.SOURCES}", *map(str, files)]
    except CannotEmulate as error:
        pytest.skip(str(error))
    built = subprocess.run(
        [*command, "-o", str(program), "-lpthread", "-ldl"], capture_output=True, text=True, check=False, timeout=300
    )
    if built.returncode and SANITIZERS[request.param] and "cannot find -l" in built.stderr:
        pytest.skip("the compiler has no such sanitizer")
    assert built.returncode == 0, built.stderr
    description = boards.describe(boards.board("h100"), kernels=90)

    def call(*arguments):
        done = subprocess.run(
            [str(program), *map(str, arguments)],
            env={**os.environ, "GPUTRAIN_EMULATED_DEVICE": description},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("the sanitizer of threads does not run on this kernel")
        assert (done.returncode, done.stdout) == (0, ""), f"{arguments}: {done.stdout}{done.stderr}"

    call.sanitizer = request.param
    return call


def test_wrong_sizes_addresses_and_handles_are_errors(run):
    run("checks")


def test_children_do_not_wait_for_locks_of_their_parent_nor_change_its_memory(run):
    if run.sanitizer != "none":
        pytest.skip("sanitizers have locks of their own, which a child may wait for")
    run("forks")


@pytest.mark.parametrize("threads", [1, 4])
def test_calls_at_random_use_the_memory_that_they_add_up_to(run, threads):
    for seed in range(SEEDS):
        run("fuzz", seed, CALLS, threads)
