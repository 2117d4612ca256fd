"""Cases of several processes, with real ones on the CPU: what they compute, what they measure, how they end."""

import shutil
import signal
import socket

import psutil
import pytest
from leftovers import FAULTS, REASONS, assert_hung, assert_told, own_case
from several_processes import LLAMA, engine, losses_of_one_process, measured, needs_deepspeed, run
from zoo_examples import task_of

from pytest_gputrain import Case
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.gate.rank_spread import widest
from pytest_gputrain.records import Crashed, Event, Measurement
from pytest_gputrain.worker.parallel.zero import configure
from pytest_gputrain.worker.zoo.samples import spread_lengths

# A worker does not fail for what DeepSpeed and FSDP warn of, and neither do these.
pytestmark = pytest.mark.filterwarnings("default")

CLIPPED = {"optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.5, "lr_scheduler": "cosine", "lr_warmup_steps": 3}
OPTIMIZERS_OF_LIBRARIES = ("adamw_8bit", "paged_adamw_8bit", "adafactor")
REENTRANT = {"activation_checkpointing": True, "reentrant_checkpointing": True}


# What they compute


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        *map(engine, ("zero0", "zero1")),
        engine("fsdp", cpu_offload=True),
        engine("fsdp", method="qlora", lora_dropout=0.0),
        engine("zero2", offload_optimizer=True),
        engine("zero3", offload_optimizer=True, offload_param=True),
        *(engine(name, **CLIPPED) for name in ("ddp", "fsdp", "zero2", "zero3")),
        *(engine(name, **REENTRANT) for name in ("fsdp", "zero3")),
        # What clips trains without as well, and stages of DeepSpeed that divide less share the code for both with stage 2.
        *(engine(name, weekly=True) for name in ("ddp", "fsdp", "zero3")),
        *(engine(name, weekly=True, **CLIPPED) for name in ("zero0", "zero1")),
        *(engine(name, weekly=True, **REENTRANT) for name in ("ddp", "zero1", "zero2")),
        *(
            engine("ddp", weekly=name.startswith("paged"), optimizer=name, learning_rate=1e-3)
            for name in OPTIMIZERS_OF_LIBRARIES
        ),
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
    "knobs",
    [
        engine("fsdp", model="bert-large", precision="fp32", sequence_length=32),
        engine("zero3", model="pangu-350m", precision="bf16", sequence_length=16),
    ],
)
def test_a_shard_that_no_sample_needs_may_stay_as_it_is(knobs):
    # The second half of the positions: no gradient, and no change that bf16 could hold.
    measured(Case(batch_size=2, gpus=2, steps=2, warmup=1, **knobs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [engine(name, weekly=name in ("ddp", "zero2")) for name in ("ddp", "fsdp", "zero2", "zero3")]
)
def test_weights_that_do_not_move_are_noticed(knobs):
    reply = run(LLAMA.replace(precision="bf16", learning_rate=1e-30, gpus=2, steps=2, **knobs))
    assert isinstance(reply, Crashed), reply
    assert "trained tensors did not change" in reply.sentence


# Options of FSDP and DeepSpeed

PANGU = Case(model="pangu-2.6b", precision="bf16", sequence_length=16, gpus=2, steps=1, warmup=1)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    "overlap", [pytest.param(False, marks=pytest.mark.weekly, id="one-buffer"), pytest.param(True, id="two-buffers")]
)
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_given_the_size_of_the_buckets(stage):
    for size, expected in {0: 500_000_000, 200_000_000: 200_000_000}.items():
        case = PANGU.replace(parallel=f"zero{stage}", reduce_bucket_size=size)
        assert configure(case, 1.0, on_gpu=True)["zero_optimization"]["reduce_bucket_size"] == expected
        tiny = configure(case, 1e-4, on_gpu=False)["zero_optimization"]["reduce_bucket_size"]
        assert tiny == pytest.approx(expected * 1e-4, abs=32), "a multiple of 64"


def test_further_options_of_deepspeed_are_merged_into_ours():
    options = {
        "zero_optimization": {"reduce_bucket_size": 2e8, "round_robin_gradients": True, "offload_optimizer": {"ratio": 0.5}},
        "fp16": {"initial_scale_power": 12},
    }
    case = PANGU.replace(parallel="zero2", offload_optimizer=True)
    ours, merged = configure(case, 1.0, on_gpu=True), configure(case, 1.0, options, on_gpu=True)
    assert merged["zero_optimization"].pop("round_robin_gradients")
    assert merged["zero_optimization"]["offload_optimizer"].pop("ratio") == 0.5
    assert merged["zero_optimization"]["reduce_bucket_size"] == 200_000_000
    assert merged["fp16"] == {"enabled": False, "initial_scale_power": 12}
    merged["fp16"], merged["zero_optimization"]["reduce_bucket_size"] = ours["fp16"], 500_000_000
    assert merged == ours
    tiny = configure(case, 0.001, options, on_gpu=False)["zero_optimization"]
    assert tiny["reduce_bucket_size"] == 200_000, "a tiny model's buffers shrink with it"
    nothing = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    assert configure(case, 0.001, nothing, on_gpu=False)["zero_optimization"]["stage3_param_persistence_threshold"] == 0


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    ("parallel", "options"), [("zero2", {"reduce_bucket_size": 20_000_000_000}), ("zero3", {"sub_group_size": 1000})]
)
def test_they_are_another_measurement(parallel, options):
    case = LLAMA.replace(parallel=parallel, precision="bf16", gpus=2, steps=2)
    options = {"zero_optimization": options}
    plain, changed = measured(case), measured(case, deepspeed=options)
    assert changed.peak_allocated_bytes != plain.peak_allocated_bytes
    assert changed.losses == pytest.approx(plain.losses, rel=1e-2)


@pytest.mark.slow
@needs_deepspeed
def test_an_option_that_deepspeed_does_not_know_is_told():
    reply = run(LLAMA.replace(parallel="zero2", gpus=2), deepspeed={"zero_optimization": {"reduce_bucket_sizes": 1}})
    assert isinstance(reply, Crashed)
    assert "reduce_bucket_sizes" in reply.sentence + reply.detail


@pytest.mark.slow
def test_what_fsdp_keeps_after_forward_takes_memory_and_changes_no_loss():
    case = LLAMA.replace(model="llama-3.1-70b", parallel="fsdp", gpus=2, steps=2)  # of three tiny blocks
    default, kept, let_go = (measured(case.replace(reshard_after_forward=value)) for value in (None, False, True))
    assert default.losses == kept.losses == let_go.losses
    assert kept.phase_peak_bytes["forward"] > 1.05 * default.phase_peak_bytes["forward"]


# What they measure


@pytest.mark.slow
def test_figures_are_those_of_all_ranks():
    sharded, whole = (measured(LLAMA.replace(parallel=name, gpus=2)) for name in ("fsdp", "ddp"))
    assert sharded.batch_size == whole.batch_size == 4
    assert len(sharded.ranks) == sharded.environment.device_count == 2
    for step, seconds in enumerate(sharded.step_seconds):
        assert seconds == max(rank.step_seconds[step] for rank in sharded.ranks)
    assert sharded.peak_allocated_bytes == max(rank.peak_allocated_bytes for rank in sharded.ranks)
    assert sharded.peak_host_bytes == sum(rank.peak_host_bytes for rank in sharded.ranks)
    for rank in whole.ranks:
        assert all(0 < own < step for own, step in zip(rank.own_seconds, rank.step_seconds, strict=True))
    assert {rank.own_seconds for rank in sharded.ranks} == {()}, "its forward pass waits for the shards of the others"
    assert 0.45 * whole.model_bytes < sharded.model_bytes < 0.55 * whole.model_bytes
    assert sharded.flops_per_step == whole.flops_per_step == 2 * measured(LLAMA).flops_per_step


@pytest.mark.slow
def test_progress_is_that_of_the_first_rank_and_tokens_are_those_of_both():
    events = []
    reply = measured(LLAMA.replace(parallel="ddp", gpus=2, lengths="padded"), watch=events.append)
    assert reply.tokens == 2 * sum(spread_lengths(32, 2))
    assert all(isinstance(event, Event) for event in events)
    assert [event.phase for event in events if event.step is None].count("measure") == 1


@pytest.fixture
def faults(tmp_path, leftovers):
    (tmp_path / "code.py").write_text(FAULTS)

    def run_fault(name, **options):
        task = task_of(own_case(name), root=str(tmp_path))
        return launcher.in_process(task, gpus=(), **({"timeout_seconds": 300.0} | options))

    return run_fault


def test_own_code_of_two_processes_can_talk_and_no_other_machine_can_connect(faults, leftovers, tmp_path, monkeypatch):
    others = [name for name, status in psutil.net_if_stats().items() if status.isup and name != "lo"]
    reachable = [name for name in others if any(of.family == socket.AF_INET for of in psutil.net_if_addrs()[name])]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", next(iter(reachable), "lo"))  # as where the host's name has such an address
    reply = faults("sound")
    listening = {*(tmp_path / "listening").read_text().split()}
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
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
    assert (spread.slowest, spread.lag > 1) == (1, True)
    assert spread.lag_seconds == pytest.approx(0.1, abs=0.05)


# How they end


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
@pytest.mark.parametrize("name", [*REASONS, "hangs"])
def test_a_rank_that_fails_or_hangs_ends_the_case_with_its_own_reason(faults, leftovers, name):
    if name == "hangs":
        assert_hung(faults(name, timeout_seconds=25))
    else:
        assert_told(faults(name), name)
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
    output, _ = process.communicate(timeout=600)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert leftovers.all() == []
