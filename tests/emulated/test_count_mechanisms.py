"""Mechanisms of public performance regressions: which of them the counts of an emulated run find, and where."""

import json
import os
from pathlib import Path

import pytest
from filelock import FileLock

PROGRAMS = (Path(__file__).with_name("mechanisms") / "mechanisms.py").read_text()

BY_COUNTS = {
    "item_each_step": {"waits"},
    "item_each_second_step": {"waits"},
    "item_in_each_layer": {"waits", "work"},
    "small_operators": {"work"},
    "mask_on_host": {"waits", "pageable", "h2d_bytes"},
    "empty_cache": {"mallocs", "frees"},
    "clip_single": {"work"},
    "not_fused": {"work"},
    "tensor_by_tensor": {"work"},
    "blocking_batches": {"waits", "pageable"},
    "timesteps_by_nonzero": {"waits", "work"},
    "experts_loop": {"waits", "work"},
    "bucket_of_one": {"collectives"},
    "reduced_each_micro_batch": {"collectives", "collective_bytes", "work"},
    "recompiled": {"compilations"},
    "not_compiled": {"work"},
    "tf32_off": {"fp32_flops"},
    "odd_dimension": {"unaligned_flops"},
    "layout_lost": {"nchw_flops"},
}
"""The figures that fail, by mechanism."""
UNSEEN = ("slower_host", "fused_is_slower", "overflow_on_cpu", "process_each_step")
"""Mechanisms that ask the GPU for nothing more."""
MEMORY = ("bytes", "peak")
EACH_TIME = (
    "item_in_each_layer",
    "mask_on_host",
    "empty_cache",
    "bucket_of_one",
    "odd_dimension",
    "layout_lost",
    "logits_copied",
    "slower_host",
)
"""One mechanism of each kind; the others run weekly."""


def causes_of(name):
    """The lines of a mechanism that are marked as the cause."""
    lines = PROGRAMS.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"def {name}("))
    end = next(number for number in range(start + 1, len(lines)) if lines[number] and not lines[number].startswith(" "))
    return [number + 1 for number in range(start, end) if lines[number].endswith("# cause")]


@pytest.fixture(scope="module")
def results(run_tests_in, tmp_path_factory, request):
    """The results of the tested mechanisms by name, without the cause and with it; one worker of xdist makes them."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "mechanisms"
    kept = folder / "results.json"
    with FileLock(f"{folder}.lock"):
        if not kept.exists():
            folder.mkdir()
            (folder / "test_mechanisms.py").write_text(PROGRAMS)
            tested = {item.callspec.params["name"] for item in request.session.items if item.module is request.module}
            only = ("-n2", "-k", " or ".join(tested))
            done, _ = run_tests_in(folder, "--gpu-baseline-update", *only)
            assert done.returncode == 0, done.stdout
            runs = [run_tests_in(folder, "--gpu-strict", *only, **cause)[1] for cause in ({}, {"WITH_CAUSE": "1"})]
            kept.write_text(
                json.dumps([{name.partition("[")[2][:-1]: result for name, result in run.items()} for run in runs])
            )
        return json.loads(kept.read_text())


def mechanisms(*names):
    params = (pytest.param(name, marks=() if name in EACH_TIME else pytest.mark.weekly) for name in names)
    return pytest.mark.parametrize("name", list(params))


def failing(result):
    return {metric["metric"] for metric in result["verdict"]["metrics"] if metric["status"] == "regressed"}


@mechanisms(*BY_COUNTS, "logits_copied", *UNSEEN)
def test_without_the_cause_it_passes_and_asks_for_what_it_asked_for(results, name):
    good, _ = results
    verdict = good[name]["verdict"]
    assert verdict["status"] == "pass"
    differing = {metric["metric"] for metric in verdict["metrics"] if metric["value"] != metric["baseline"]}
    assert differing <= {"heap_growth"}  # some bytes of Python's


@mechanisms(*BY_COUNTS)
def test_counts_find_it_and_name_its_line(results, name):
    _, bad = results
    assert {figure for figure in failing(bad[name]) if not figure.startswith(MEMORY)} - {"peak_reserved_bytes"} >= (
        BY_COUNTS[name]
    )
    sentence = bad[name]["verdict"]["sentence"]
    lines = causes_of(name)
    assert not lines or any(f"test_mechanisms.py:{line} " in sentence for line in lines), sentence


@mechanisms("logits_copied")
def test_one_copy_more_is_found_by_the_bytes_that_operators_move(results, name):
    _, bad = results
    assert failing(bad[name]) == {"bytes_per_step"}
    (line,) = causes_of(name)
    assert f"clone (+15.8 MiB in +1 calls) at test_mechanisms.py:{line}" in bad[name]["verdict"]["sentence"]


@mechanisms(*UNSEEN)
def test_of_what_asks_for_nothing_more_the_run_claims_nothing(results, name):
    _, bad = results
    metrics = bad[name]["verdict"]["metrics"]
    counts = [metric for metric in metrics if not metric["metric"].endswith(("_bytes", "flops_per_step", "bytes_per_step"))]
    assert len(counts) > 10
    assert {metric["status"] for metric in counts} <= {"pass", "improved"}
    assert "slower" not in bad[name]["verdict"]["sentence"].replace(name, "")
