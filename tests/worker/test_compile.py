"""Compiled blocks and a loss by chunks: the same training by other means."""

import os
import re
import weakref

import pytest
import several_processes
import torch
from several_processes import engine, losses_of_one_process
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_examples import MINE, example, measured, once, refused, run, task_of, trained

from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.records import Crashed
from pytest_gputrain.worker import compiling, further_steps
from pytest_gputrain.worker.checks import CheckFailed

LLAMA = example("llama-3.1-8b", "lora", precision="fp32", activation_checkpointing=True, steps=3, warmup=2)


# torch's compiler provokes warnings of torch, and warns of what it traces; raised as here they would end it.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _as_new():
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(
            LLAMA.replace(method=method, activation_checkpointing=share)
            for method, share in (("full", 0.5), ("lora", False), ("lora", True))
        ),
        example("resnet-50", precision="fp32"),  # which has no blocks
    ],
    ids=str,
)
def test_compiled_blocks_train_as_they_do_otherwise(case):
    compiled, plain = measured(case.replace(compile="default")), measured(case)
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4)
    # transformers' own checkpointing asks for the gradient of the embedded tokens, which nobody needs where they are frozen.
    assert compiled.flops_per_step == pytest.approx(plain.flops_per_step, rel=0.03)
    assert compiled.recomputed_flops_per_step == plain.recomputed_flops_per_step
    assert compiled.warmup_seconds[0] > 2 * compiled.median_step_seconds  # seconds against hundredths


@pytest.mark.slow
def test_alike_blocks_are_compiled_once_and_nothing_falls_back():
    torch._dynamo.utils.counters.clear()
    measured(LLAMA.replace(model="llama-3.1-70b", compile="default"))  # of three tiny blocks
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] > 0
    assert counters["stats"]["unique_graphs"] < 3
    assert not counters["graph_break"]


def test_lists_of_blocks_are_compiled_block_by_block():
    """As in the middle of a UNet, whose lists are never called."""

    class Block(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    blocks = torch.nn.ModuleList(Block(4, 4) for _ in range(3))
    torch._dynamo.utils.counters.clear()
    compiling.compile_in_place([blocks], "default", torch.device("cpu"))
    torch.nn.Sequential(*blocks)(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [engine(name, weekly=name in ("ddp", "zero0", "zero1")) for name in ("ddp", "fsdp", "zero0", "zero1", "zero2")]
)
def test_compiled_blocks_train_in_several_processes(knobs):
    case = LLAMA.replace(**knobs, gpus=2, compile="default")
    assert several_processes.measured(case).losses == pytest.approx(losses_of_one_process(case), rel=1e-4)


# Gemma ties its head to its embedding.
@pytest.mark.parametrize(("model", "chunks"), [("llama-3.1-8b", 2), ("llama-3.1-8b", 7), ("gemma-7b", 7)])
def test_a_loss_by_chunks_is_the_loss(model, chunks):
    case = LLAMA.replace(model=model, method="full", steps=1, warmup=1)
    whole, parts = once(case), measured(case.replace(loss_chunks=chunks))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    assert parts.flops_per_step == whole.flops_per_step
    # The head's product once more.
    assert parts.recomputed_flops_per_step > whole.recomputed_flops_per_step


def test_gradients_of_a_loss_by_chunks_are_its_gradients():
    case = LLAMA.replace(method="full", optimizer="sgd", learning_rate=0.1)

    def weights(chunks):
        training = trained(case.replace(loss_chunks=chunks))
        for _ in range(2):
            training.step(True)
        return dict(training.model.named_parameters())

    torch.testing.assert_close(weights(5), weights(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "bf16-amp", "fp16-amp"])
def test_a_loss_by_chunks_is_the_loss_in_any_precision(precision):
    case = LLAMA.replace(method="full", precision=precision, gradient_accumulation=2, steps=2, warmup=0)
    whole, parts = measured(case), measured(case.replace(loss_chunks=4))
    assert parts.losses == pytest.approx(whole.losses, rel=0.01)


@pytest.mark.slow
def test_logits_of_one_chunk_exist_at_a_time():
    """Where the tiny vocabulary's are the peak; half of them is less than a block takes."""
    for precision in ("fp32", "bf16"):
        case = LLAMA.replace(method="full", precision=precision, batch_size=16, steps=1, warmup=0)
        whole, halves = (measured(case.replace(loss_chunks=chunks)).peak_allocated_bytes for chunks in (1, 2))
        assert halves < 0.9 * whole


def test_an_inline_case_that_failed_leaves_nothing_to_the_next():
    """Its traceback holds frames, and these hold tensors."""
    seen = []

    def build(setup):
        os.environ |= {"SET_BY_TRAINING": "1", "PATH": "other"}
        block = torch.zeros(1000, 1000)
        seen.append(weakref.ref(block))
        circle = [block]
        circle.append(circle)

        def step():
            held = block + 1
            seen.append(weakref.ref(held))
            raise RuntimeError(f"a fault with {len(circle)} in a circle")

        return step

    before = dict(os.environ)
    reply = launcher.inline(task_of(MINE), build)
    assert dict(os.environ) == before, "what the training and torch's profiler set, no test has changed"
    assert isinstance(reply, Crashed)
    del build
    assert [reference() for reference in seen] == [None, None]


class _Full(TorchDispatchMode):
    total = recomputed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_case_that_fits_only_compiled_has_its_figures(monkeypatch):
    monkeypatch.setattr(further_steps, "count_flops", _Full)
    case = LLAMA.replace(method="full", compile="default", activation_checkpointing=False, learning_rate=1e-2)
    figures = measured(case)
    assert len(figures.step_seconds) == len(figures.losses) == 3
    assert (figures.flops_per_step, figures.notes) == (None, (further_steps.UNWATCHED,))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert "OutOfMemoryError" in refused(case.replace(compile="off"))
    assert "did not change in 5 steps" in refused(case.replace(learning_rate=0.0))


@pytest.mark.parametrize("error", [CheckFailed, ValueError])
def test_what_fails_after_long_compiling_says_how_long_that_took(monkeypatch, error):
    def build(setup):
        raise error("refused")

    torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))  # own code compiles nothing on a CPU
    assert run(MINE, build).sentence.startswith(("refused", "ValueError: refused"))
    assert "torch.compile" not in run(MINE, build).sentence
    monkeypatch.setattr(compiling, "_LONG_SECONDS", 0.0)
    assert re.search(r"refused.*; torch.compile took [0-9.]+ m?s to compile before$", run(MINE, build).sentence)


@pytest.mark.parametrize(("importing", "seen"), [("transformers.integrations", False), ("mine", True)])
def test_what_a_library_compiles_while_it_is_imported_is_not_own_code_s(monkeypatch, importing, seen):
    asked = []
    monkeypatch.setattr(torch, "compile", asked.append)
    calls = compiling.CompileCalls()
    with calls.noted():
        exec(compile("import torch\ntorch.compile(max)", importing, "exec"), {"__name__": importing})
    assert asked == [max]
    assert calls.any is seen
    assert torch.compile == asked.append
