"""Cases of several processes on fakes: the first of them, against what real ones count and recorded."""

import gc
import importlib.util
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from preloaded_worker import measured

from pytest_gputrain import Case, launch
from pytest_gputrain.baselines import Store, key_of
from pytest_gputrain.records import Crashed, Prediction, Target, Task
from pytest_gputrain.units import GiB
from pytest_gputrain.worker.dry_run.predict import predict
from pytest_gputrain.worker.libraries import load
from pytest_gputrain.worker.progress import Progress

# DeepSpeed calls functions of torch by the names that they had, and compiles some as they once were.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning"),
]

STORE = Store(Path(__file__).parents[2] / "baselines")
CPU = Target(marker="cpu", kind="cpu")
H100 = Target(marker="h100", kind="cuda", memory_bytes=80 * GiB)

LLAMA = Case(model="llama-3.1-8b", precision="fp32", batch_size=2, sequence_length=32, learning_rate=1e-2, steps=1, warmup=0)
PANGU = Case(model="pangu-2.6b", precision="bf16", sequence_length=512, gradient_accumulation=8, parallel="zero0")
IMAGES = Case(precision="fp32", resolution="224x224", optimizer="momentum", learning_rate=0.01, batch_size=32)
CLICKS = Case(model="ctr-dnn", precision="fp32", batch_size=1000, optimizer="adam", parallel="ps", gpus=2, servers=1)


def _has_deepspeed():
    return importlib.util.find_spec("deepspeed") is not None


needs_deepspeed = pytest.mark.skipif(not _has_deepspeed(), reason="needs deepspeed")


@pytest.fixture(autouse=True, scope="module")
def _small_heap():
    """A prediction collects garbage first, which takes longer than the rest of it where all libraries are on the heap."""
    load(LLAMA)
    if _has_deepspeed():
        load(PANGU)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def replied(case, target=CPU, builder=None):
    load(case)
    task = Task(
        case=case,
        scale="tiny",
        device_type="cpu",
        root=".",
        processes=case.gpus,
        servers=case.servers,
        target=target,
    )
    return predict(task, Progress(None), builder)


def predicted(case, target=CPU):
    reply = replied(case, target)
    assert isinstance(reply, Prediction), reply
    return reply


def _recorded(suite, case, **named):
    key = key_of(case.replace(**named, named=tuple(named)), "tiny")
    marks = [needs_deepspeed] if case.parallel.startswith("zero") else []
    return pytest.param(suite, key, case.replace(**named), marks=marks, id=key)


@pytest.mark.parametrize(
    ("suite", "key", "case"),
    [
        _recorded("collective", IMAGES.replace(model="resnet-50", parallel="ddp"), batch_size=32, gpus=2),
        _recorded(
            "collective",
            Case(model="bert-large", precision="fp32", sequence_length=512, batch_size=4, optimizer="adam", parallel="ddp"),
            gpus=2,
        ),
        _recorded("deepspeed_zero", PANGU),
        _recorded("deepspeed_zero", PANGU.replace(parallel="zero1")),
        _recorded(
            "deepspeed_zero",
            PANGU.replace(parallel="zero2"),
            offload_optimizer=True,
            overlap_comm=True,
            allgather_bucket_size=500_000_000,
        ),
        _recorded(
            "deepspeed_zero",
            PANGU.replace(parallel="zero3"),
            offload_optimizer=True,
            offload_param=True,
            overlap_comm=True,
            stage3_max_live_parameters=500_000_000,
        ),
    ],
)
def test_as_recorded(suite, key, case):
    recorded = STORE.get("cpu", suite, key).runs[-1]
    prediction = predicted(case)
    assert prediction.peak_allocated_bytes == recorded.peak_allocated_bytes
    assert prediction.model_bytes == recorded.model_bytes
    assert prediction.flops_per_step * case.gpus == recorded.flops_per_step


def _engine(name, **knobs):
    return pytest.param({"parallel": name, **knobs}, marks=[needs_deepspeed] if name.startswith("zero") else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        _engine("ddp", method="lora", gradient_accumulation=4),
        _engine("fsdp", precision="bf16"),
        _engine("fsdp", precision="bf16-amp", cpu_offload=True),
        _engine("fsdp", activation_checkpointing=True, gradient_accumulation=4),
        _engine("fsdp", method="lora"),
        _engine("zero0", precision="bf16"),
        _engine("zero1"),
        _engine("zero2", precision="bf16"),
        _engine("zero3", precision="bf16-amp", offload_optimizer=True),
    ],
    ids=lambda knobs: "-".join(map(str, knobs.values())),
)
def test_as_two_processes_count_it(knobs):
    case = LLAMA.replace(gpus=2, **knobs)
    real, prediction = measured(case), predicted(case)
    assert prediction.peak_allocated_bytes == real.ranks[0].peak_allocated_bytes
    assert prediction.model_bytes == real.model_bytes
    assert prediction.flops_per_step * 2 == real.flops_per_step


@pytest.mark.slow
def test_a_parameter_server_s_worker():
    real, prediction = measured(CLICKS.replace(steps=1, warmup=0)), predicted(CLICKS)
    # What it sends by pickle takes some bytes that differ.
    assert prediction.peak_allocated_bytes == pytest.approx(real.ranks[0].peak_allocated_bytes, rel=0.0005)


def test_fewer_shards_are_larger():
    two, eight = (predicted(LLAMA.replace(parallel="fsdp", gpus=gpus), H100) for gpus in (2, 8))
    # Adam's states, gradients and weights, for all but what is gathered.
    assert two.phase_peak_bytes["optimizer"] > 3 * eight.phase_peak_bytes["optimizer"]
    assert two.peak_allocated_bytes > eight.peak_allocated_bytes
    assert two.model_bytes == pytest.approx(4 * eight.model_bytes, rel=0.01)


def test_what_fsdp_offloads_is_on_the_host():
    case = LLAMA.replace(parallel="fsdp", gpus=4)
    here, there = predicted(case, H100), predicted(case.replace(cpu_offload=True), H100)
    shards = 3 * here.model_bytes  # weights and Adam's two states, at rest
    assert here.phase_peak_bytes["forward"] - there.phase_peak_bytes["forward"] == pytest.approx(shards, rel=0.05)
    assert there.host_bytes > shards
    assert here.host_bytes < 1024, "numbers only"


@needs_deepspeed
def test_each_stage_of_zero_needs_less_for_the_update():
    case = LLAMA.replace(gpus=8, precision="fp16")  # which no CPU could train
    peaks = [predicted(case.replace(parallel=f"zero{stage}"), H100).phase_peak_bytes["optimizer"] for stage in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[1] < 0.6 * peaks[0], "the states are those of an eighth"


@needs_deepspeed
@pytest.mark.parametrize(
    "knobs",
    [{"parallel": "zero2"}, {"parallel": "zero3", "offload_param": True}],
    ids=lambda knobs: "-".join(map(str, knobs.values())),
)
def test_what_deepspeed_offloads_is_on_the_host(knobs):
    case = LLAMA.replace(gpus=2, precision="bf16", **knobs)
    here = predicted(case.replace(offload_param=False), H100)
    there = predicted(case.replace(offload_optimizer=True), H100)
    masters = 3 * 4 * here.parameters // 2  # fp32 weights and Adam's two states of a half
    assert there.host_bytes > masters
    assert here.peak_allocated_bytes - there.peak_allocated_bytes > 0.9 * masters


@pytest.mark.slow
@needs_deepspeed
def test_the_same_in_a_process_of_its_own():
    case = LLAMA.replace(parallel="zero3", precision="bf16", gpus=8)
    task = Task(case=case, scale="tiny", device_type="cpu", root=".", processes=8, target=H100)
    alone = launch.predict(task, timeout_seconds=120)
    assert isinstance(alone, Prediction), alone
    assert msgspec.json.encode(alone) == msgspec.json.encode(predicted(case, H100))


OWN = Case(model="own", method="custom", precision="fp32", code="here", parallel="ddp", gpus=2)


def exchanging(exchange):
    def build(setup):
        model = torch.nn.Linear(8, 1, device=setup.device)
        setup.watch(model)
        rows = torch.arange(8.0, device=setup.device).expand(4, 8)
        counts = torch.tensor([3, 4], device=setup.device)

        def step():
            exchange(counts)
            loss = model(rows[: int(counts[0])]).sum()
            loss.backward()
            return loss.detach()

        return step

    return build


@pytest.mark.parametrize("target", [CPU, H100], ids=lambda target: target.kind)
@pytest.mark.parametrize(
    "exchange",
    [
        dist.all_reduce,
        lambda counts: dist.broadcast(counts, 1),
        lambda counts: dist.recv(counts, 1),
        lambda counts: dist.all_to_all_single(counts, counts.clone()),
        lambda counts: dist.all_gather_object([None, None], 1),
    ],
    ids=["all_reduce", "broadcast", "recv", "all_to_all", "object"],
)
def test_what_another_process_would_send_is_not_made_up(exchange, target):
    reply = replied(OWN, target, exchanging(exchange))
    assert isinstance(reply, Crashed), reply
    assert "which a dry run does not know; least of all where it comes from another process" in reply.sentence
    assert reply.phase == "count"


@pytest.mark.parametrize("exchange", [lambda counts: dist.broadcast(counts, 0), lambda counts: dist.barrier()])
def test_what_the_first_process_sends_it_knows(exchange):
    assert isinstance(replied(OWN, H100, exchanging(exchange)), Prediction)


def test_own_code_gets_the_buckets_of_ddp():
    def build(setup):
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False, device=setup.device), **options)
        inputs = torch.zeros(1, 1024, device=setup.device)

        def step():
            loss = model(inputs).sum()
            loss.backward()
            model.zero_grad()
            return loss.detach()

        return step

    options = {}
    reply = replied(OWN, H100, build)
    assert isinstance(reply, Prediction), reply
    weights = 4 * 1024 * 1024
    assert reply.peak_allocated_bytes == pytest.approx(3 * weights, rel=0.01), "weights, gradients and a bucket for them"
    options = {"gradient_as_bucket_view": True}
    reply = replied(OWN, H100, build)
    assert isinstance(reply, Crashed), reply
    assert reply.sentence == "a dry run does not know what DistributedDataParallel does with gradient_as_bucket_view"
