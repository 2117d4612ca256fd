"""Cases of several processes, with real ones on the CPU: what they compute, what they measure, how they end."""

import os
import shutil
import signal

import pytest
from leftovers import FAULTS, REASONS, assert_hung, assert_told, own_case
from one_process import losses_of_one_process
from preloaded_worker import measured, run
from several_processes import engine, needs_deepspeed

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.gate.rank_spread import widest
from pytest_gputrain.records import Crashed, Event, Measurement, Task
from pytest_gputrain.worker.parallel.zero import configure
from pytest_gputrain.worker.zoo.samples import spread_lengths

LLAMA = Case(model="llama-3.1-8b", precision="fp32", batch_size=2, sequence_length=32, learning_rate=1e-2, steps=4, warmup=1)


CLIPPED = {"optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.5, "lr_scheduler": "cosine", "lr_warmup_steps": 3}
OPTIMIZERS_OF_LIBRARIES = ("adamw_8bit", "paged_adamw_8bit", "adafactor")
REENTRANT = {"activation_checkpointing": True, "reentrant_checkpointing": True}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # a worker does not fail for what DeepSpeed and FSDP warn of
@pytest.mark.parametrize(
    "knobs",
    [
        engine("ddp"),
        engine("fsdp"),
        engine("fsdp", cpu_offload=True),
        engine("zero0"),
        engine("zero1"),
        engine("zero2", offload_optimizer=True),
        engine("zero3"),
        engine("zero3", offload_optimizer=True, offload_param=True),
        *(engine(name, **CLIPPED) for name in ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")),
        *(engine(name, **REENTRANT) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3")),
        *(engine("ddp", optimizer=name, learning_rate=1e-3) for name in OPTIMIZERS_OF_LIBRARIES),
    ],
)
def test_losses_are_those_of_one_process_on_the_whole_batch(knobs):
    case = LLAMA.replace(gpus=2, **knobs)
    reply, expected = measured(case), losses_of_one_process(case)
    assert reply.losses == pytest.approx(expected, rel=1e-3 if case.optimizer in OPTIMIZERS_OF_LIBRARIES else 1e-4)
    assert expected[-1] < expected[0] - 0.1, "a curve that stays where it is would prove nothing"
    if case.max_grad_norm:
        free = losses_of_one_process(case.replace(max_grad_norm=0.0))
        assert expected != pytest.approx(free, rel=1e-3), "clipping that changes nothing would prove nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(model="bert-large", precision="fp32", batch_size=2, sequence_length=32), id="fsdp"),
        pytest.param(
            Case(model="pangu-350m", precision="bf16", batch_size=2, sequence_length=16),
            id="zero3",
            marks=needs_deepspeed,
        ),
    ],
)
def test_a_shard_that_no_sample_needs_may_stay_as_it_is(request, case):
    # The second half of the positions: no gradient, and no change that bf16 could hold.
    measured(case.replace(parallel=request.node.callspec.id, gpus=2, steps=2, warmup=1))


PANGU = Case(model="pangu-2.6b", precision="bf16", sequence_length=16, gpus=2, steps=1, warmup=1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_given_the_size_of_the_buckets(stage):
    case = PANGU.replace(parallel=f"zero{stage}")
    for size, expected in {0: 500_000_000, 200_000_000: 200_000_000}.items():
        sized = case.replace(reduce_bucket_size=size)
        assert configure(sized, 1.0, on_gpu=True)["zero_optimization"]["reduce_bucket_size"] == expected
        tiny = configure(sized, 1e-4, on_gpu=False)["zero_optimization"]["reduce_bucket_size"]
        assert tiny == pytest.approx(expected * 1e-4, abs=32), "a multiple of 64"


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("overlap", [False, True], ids=["one-buffer", "two-buffers"])
def test_a_buffer_for_gradients_is_as_large_as_the_case_says(overlap):
    case = PANGU.replace(parallel="zero2", offload_optimizer=True, overlap_comm=overlap)
    # Of parameters at full size: fewer than PanGu has, and more.
    sizes = (10**9, 20 * 10**9, 40 * 10**9)
    replies = [measured(case.replace(reduce_bucket_size=size)) for size in sizes]
    fewer, more, most = (reply.phase_peak_bytes["backward"] for reply in replies)
    elements = (sizes[2] - sizes[1]) * replies[0].parameters / architectures()[case.model].trained_part.parameters["full"]
    # Threads of gloo let go of a copy sooner or later.
    assert most - more == pytest.approx((2 if overlap else 1) * 2 * elements, rel=0.06), "bf16"
    assert fewer < more - 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [engine(name) for name in ("ddp", "fsdp", "zero2", "zero3")])
def test_weights_that_do_not_move_are_noticed(knobs):
    reply = run(LLAMA.replace(precision="bf16", learning_rate=1e-30, gpus=2, steps=2, **knobs))
    assert isinstance(reply, Crashed), reply
    assert "trained tensors did not change" in reply.sentence


def test_ranks_that_were_started_end_where_the_next_cannot_be(leftovers, monkeypatch):
    def start(folder, rank, environment, start=launcher.start):
        if rank == 1:
            raise OSError("no more processes")
        return start(folder, rank, environment)

    monkeypatch.setattr(launcher, "start", start)
    with pytest.raises(OSError, match="no more processes"):
        run(LLAMA.replace(parallel="ddp", gpus=2), preloaded=None)
    assert leftovers.all() == []


@pytest.mark.slow
def test_figures_are_those_of_all_ranks():
    sharded, whole = (measured(LLAMA.replace(parallel=name, gpus=2)) for name in ("fsdp", "ddp"))
    assert sharded.batch_size == whole.batch_size == 4
    assert len(sharded.ranks) == 2
    assert sharded.environment.device_count == 2
    for step, seconds in enumerate(sharded.step_seconds):
        assert seconds == max(rank.step_seconds[step] for rank in sharded.ranks)
    assert sharded.peak_allocated_bytes == max(rank.peak_allocated_bytes for rank in sharded.ranks)
    assert sharded.peak_host_bytes == sum(rank.peak_host_bytes for rank in sharded.ranks)
    for rank in whole.ranks:
        assert all(0 < own < step for own, step in zip(rank.own_seconds, rank.step_seconds, strict=True))
    assert {rank.own_seconds for rank in sharded.ranks} == {()}, "its forward pass waits for the shards of the others"
    assert 0.45 * whole.model_bytes < sharded.model_bytes < 0.55 * whole.model_bytes
    assert sharded.flops_per_step == whole.flops_per_step == 2 * measured(LLAMA, processes=1).flops_per_step


@pytest.fixture
def faults(tmp_path, leftovers):
    (tmp_path / "code.py").write_text(FAULTS)

    def run_fault(name, **options):
        task = Task(case=own_case(name), scale="tiny", device_type="cpu", processes=2, root=str(tmp_path))
        return launcher.in_process(task, gpus=(), **({"timeout_seconds": 120.0} | options))

    return run_fault


def test_own_code_of_two_processes_can_talk(faults, leftovers):
    reply = faults("sound")
    assert isinstance(reply, Measurement), reply
    assert reply.losses == (2.0, 2.0)
    assert widest([reply]).slowest is None, "its steps do not tell their own work"
    assert leftovers.all() == []


@pytest.mark.slow
def test_a_straggler_is_told_though_all_steps_take_as_long(faults):
    reply = faults("straggles")
    assert isinstance(reply, Measurement), reply
    fast, slow = reply.ranks
    assert min(fast.step_seconds) > 0.1, "the other process waits for it"
    assert [len(rank.own_seconds) for rank in reply.ranks] == [2, 2]
    assert max(fast.own_seconds) < 0.1 < min(slow.own_seconds)
    spread = widest([reply])
    assert spread is not None
    assert (spread.slowest, spread.lag > 1) == (1, True)
    assert spread.lag_seconds == pytest.approx(0.1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", REASONS)
def test_one_rank_s_end_ends_the_case_with_its_own_reason(faults, leftovers, name):
    assert_told(faults(name, timeout_seconds=300), name)
    assert leftovers.all() == []


@pytest.mark.slow
def test_a_hang_shows_where_every_rank_stands(faults, leftovers):
    assert_hung(faults("hangs", timeout_seconds=25))
    assert leftovers.all() == []


ENDED = [
    pytest.param("test_hangs", (), id="own code"),
    pytest.param("test_ddp", ("--gpu-isolation=auto",), id="forked"),
    pytest.param("test_ddp", ("--gpu-isolation=process",), id="fresh"),
    pytest.param("test_zero2", (), id="zero2", marks=needs_deepspeed),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), ENDED)
def test_nobody_outlives_a_killed_pytest(project, leftovers, tmp_path, name, arguments):
    process = project(name, *arguments)
    process.kill()
    process.wait()
    # Who is killed sweeps no folder.
    shutil.rmtree(next((tmp_path / "tmp").glob("gputrain-*/case.json")).parent)
    assert leftovers.all() == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), ENDED[:2])
def test_ctrl_c_leaves_nothing(project, leftovers, name, arguments):
    process = project(name, *arguments)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert leftovers.all() == []


@pytest.mark.slow
@needs_deepspeed
def test_a_rank_of_deepspeed_killed_in_mid_step_leaves_nothing(leftovers):
    def watch(event):
        if event.phase == "measure" and event.step:
            (second,) = [text for text in leftovers.processes() if text.endswith(" 1")]
            os.kill(int(second.partition(":")[0]), signal.SIGKILL)

    clicks = Case(model="ctr-dnn", precision="fp32", batch_size=50, parallel="zero2", gpus=2, steps=1_000_000)
    reply = run(clicks, watch=watch, preloaded=None)
    assert isinstance(reply, Crashed), reply
    assert (reply.rank, reply.phase) == (1, "measure")
    assert "SIGKILL" in reply.sentence
    assert leftovers.all() == []


@pytest.mark.slow
def test_progress_is_that_of_the_first_rank_and_tokens_are_those_of_both():
    events = []
    reply = measured(LLAMA.replace(parallel="ddp", gpus=2, lengths="padded"), watch=events.append)
    assert reply.tokens == 2 * sum(spread_lengths(32, 2))
    assert all(isinstance(event, Event) for event in events)
    assert [event.phase for event in events if event.step is None].count("measure") == 1
