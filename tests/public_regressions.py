"""Public regressions of whole runs of training libraries, and which figure finds each on a CPU and on an emulated GPU."""

from pathlib import Path

PROGRAMS = (Path(__file__).parent / "emulated" / "regressions" / "regressions.py").read_text()
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


def check_caught(run, *, emulated):
    """Each program passes against its own baseline, and with its cause fails by its own figure.

    Args:
        run: runs pytest with options and variables; the results of its report by test.
    """
    run("--gpu-baseline-update")
    good, bad = run(), run(WITH_CAUSE="1")
    assert len(good) == len(bad) == len(CAUGHT)
    for results, column in ((good, None), (bad, int(emulated))):
        for name, verdict in ((name.partition("[")[2][:-1], result["verdict"]) for name, result in results.items()):
            said = None if column is None else CAUGHT[name][column]
            assert (verdict["status"] in ("regressed", "failed")) == (said is not None), (name, verdict)
            assert said is None or said in verdict["sentence"]
