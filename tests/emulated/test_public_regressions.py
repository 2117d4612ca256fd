"""Public regressions of whole runs of training libraries, tried on a CPU and on an emulated GPU: which figure finds each."""

from pathlib import Path

import pytest

PROGRAMS = (Path(__file__).with_name("regressions") / "regressions.py").read_text()
KEEPS = "more of tensors after every step"
HEAP = "more on the host's heap after each step"
CAUGHT = {
    "graph_of_all_losses": (HEAP, HEAP),
    "metric_without_reset": (KEEPS, KEEPS),
    "cache_of_each_length": (KEEPS, KEEPS),
    "samples_in_a_cache": (HEAP, HEAP),
    "logits_until_the_next": (
        "1.00 MiB (float32[256, 1024] by addmm in forward",
        "1.00 MiB (float32[256, 1024] by addmm in",
    ),
    "reference_cycle": ("float32[32, 128] by mul in forward", "float32[32, 128] by mul in forward"),
    "inputs_in_fp32": ("more in forward", "more in forward"),
    "whole_log_softmax": ("float32[256, 1024] by _log_softmax", "most of it _log_softmax"),
    "row_by_row": ("operators a step", "kernels a step"),
    "clipping_that_looks": ("reads values that depend on its trained weights", "waits for the GPU 1 time a step"),
    "synchronized_log": (None, "waits for the GPU 1 time a step"),
    "loss_of_all_ranks": ("communicates with other GPUs 2 times a step", "communicates with other GPUs 4 times a step"),
    "counter_of_a_module": ("compiles 1 function", "compiles 1 function"),
    "mask_of_attention": ("4 x float32[256, 256] by where in forward", "4 x float32[256, 256] by where in forward"),
    "tensor_of_many_arrays": (None, None),
    "outputs_until_the_next_evaluation": (
        "384 KiB of tensors behind its evaluation",
        "384 KiB of tensors behind its evaluation",
    ),
    "embeddings_on_the_device": ("more in evaluation", "more in evaluation"),
    "gradients_in_an_evaluation": ("and in evaluation", "in evaluation"),
    "checkpoint_cloned": ("more while saving a checkpoint", "more while saving a checkpoint"),
    "copy_of_each_checkpoint": ("of tensors behind a checkpoint", "of tensors behind a checkpoint"),
    "checkpoint_twice_on_the_host": ("more while saving a checkpoint", "more on the host while saving a checkpoint"),
    "histograms_now_and_then": ("MiB in step 7 (1.15 MiB before)", "waits for the GPU 3 times in step"),
}
"""What the sentence says on a CPU and on an emulated GPU; None where a run of this kind cannot see it: a CPU is not asked to
synchronize, and a list of arrays takes time alone."""


@pytest.mark.weekly
@pytest.mark.parametrize("emulated", [False, True], ids=["cpu", "emulated"])
def test_each_regression_fails_by_its_own_figure(run_tests_in, tmp_path, emulated):
    (tmp_path / "test_regressions.py").write_text(PROGRAMS)
    options = ["-n2", *([] if emulated else ["--gpu-platform=cpu"])]
    done, _ = run_tests_in(tmp_path, "--gpu-baseline-update", *options, emulated=emulated)
    assert done.returncode == 0, done.stdout
    done, good = run_tests_in(tmp_path, *options, emulated=emulated)
    assert done.returncode == 0, done.stdout
    _, bad = run_tests_in(tmp_path, *options, emulated=emulated, WITH_CAUSE="1")
    assert len(good) == len(bad) == len(CAUGHT)
    for name, verdict in ((name.partition("[")[2][:-1], result["verdict"]) for name, result in bad.items()):
        said = CAUGHT[name][emulated]
        assert (verdict["status"] in ("regressed", "failed")) == (said is not None), verdict
        assert said is None or said in verdict["sentence"]
