"""What a step asks for on a CPU: operators, values that the program reads, and what it compiles."""

import functools
import gc
import inspect
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo_examples import MINE, measured, run

from pytest_gputrain import Case
from pytest_gputrain.worker.operator_counts import OperatorCounter
from pytest_gputrain.worker.own_lines import OwnLines

FILE = f"{__name__}.py"


@pytest.fixture
def counter():
    return OperatorCounter(OwnLines([Path(__file__).parent]))


def counted(counter, step, *parameters):
    """Return the figures of one step, and its causes by what is counted."""
    with counter.counting(parameters, update=True):
        step()
    counts = counter.counts()
    return counts.of_step(-1), {
        what: [cause for cause in counts.causes if cause.what == what] for what in ("operators", "reads", "other_reads")
    }


def line_of(function, text):
    """The number of the line of a function that holds a text."""
    lines, start = inspect.getsourcelines(function)
    return start + next(number for number, line in enumerate(lines) if text in line)


def forward_and_backward(weight):
    hidden = weight.view(-1) * 2  # forward
    hidden.view(2, 2).t().sum().backward()


def test_views_are_no_operators_and_a_backward_pass_belongs_to_the_line_of_the_forward_pass(counter):
    weight = torch.ones(2, 2, requires_grad=True)
    figures, causes = counted(counter, functools.partial(forward_and_backward, weight))
    found = {(cause.by, cause.backward): cause.own for cause in causes["operators"]}
    assert {by for by, _ in found}.isdisjoint({"aten.view", "aten.t", "aten.expand", "aten.detach"})
    assert figures.operators == len(found)  # each of them runs once
    line = line_of(forward_and_backward, "# forward")
    for backward in (False, True):
        own = found["aten.mul", backward]
        assert (own.file, own.function, own.line) == (FILE, "forward_and_backward", line)


def reads_a_truth_value(value):
    if value.sum() > 0:
        pass


READS = {
    "item": lambda value: value.sum().item(),
    "float": lambda value: float(value.detach().sum()),
    "truth": reads_a_truth_value,
    "format": lambda value: f"{value.sum():.2f}",
    "tolist": lambda value: value.tolist(),
    "cpu": lambda value: value.detach().cpu().numpy().tolist(),
    "cpu_then_items": lambda value: [one.item() for one in value.cpu().detach()],
    "numpy": lambda value: value.detach().numpy(),
    "nonzero": lambda value: value.nonzero(),
    "mask": lambda value: value[value > 0],
    "written_by_mask": lambda value: value.detach().index_put_((value > 0,), torch.ones(3)),
    "masked_select": lambda value: torch.ones(3).masked_select(value > 0),
    "unique": lambda value: value.unique(),
    "equal": lambda value: torch.equal(torch.ones(3), value),
    "repeat": lambda value: torch.ones(3).repeat_interleave(value.long()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("trained", [True, False])
def test_one_read_is_counted_once_and_is_judged_where_a_parameter_leads_to_it(counter, read, trained):
    weight = torch.ones(3, requires_grad=trained)
    figures, causes = counted(counter, lambda: read(weight * 1))
    items = 3 if read is READS["cpu_then_items"] else 0  # of a copy that is on the host
    without_operator = read in (READS["tolist"], READS["cpu"], READS["cpu_then_items"], READS["numpy"])
    assert (figures.reads, figures.other_reads) == ((1, items) if trained else (0, items if without_operator else 1))
    assert all(cause.own.file == FILE for cause in (*causes["reads"], *causes["other_reads"]))


def fills_a_total(weight, total):
    total += weight.detach().sum()
    total.item()


def goes_through_a_buffer(weight):
    buffer = torch.zeros(2)
    buffer[0] = weight.sum().detach()
    buffer[1].item()


def reads_data(weight):
    with torch.no_grad():
        weight.data.sum().item()


@pytest.mark.parametrize("step", [lambda weight: fills_a_total(weight, torch.zeros(())), goes_through_a_buffer, reads_data])
def test_what_is_written_from_a_parameter_depends_on_it(counter, step):
    weight = torch.ones(3, requires_grad=True)
    figures, _ = counted(counter, lambda: step(weight), weight)
    assert figures.reads == 1


def test_memory_that_is_given_back_depends_on_nothing(counter):
    weight = torch.ones(1000, requires_grad=True)

    def step():
        for _ in range(20):
            (weight * 2).detach()  # freed at once
            torch.ones(1000).sum().item()

    figures, _ = counted(counter, step)
    assert (figures.reads, figures.other_reads) == (0, 20)


class _Keeps(torch.autograd.Function):
    """Leaves a gradient in a cycle of garbage."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        made = gradient * 2
        cycle = [made]
        cycle.append(cycle)
        return made


def test_garbage_collection_changes_no_count(counter):
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: [[] for _ in range(100)] and None)  # makes objects before the gradient is kept

    def step():
        _Keeps.apply(weight).sum().backward()
        weight.grad = None

    thresholds = gc.get_threshold()
    found = []
    for often in (False, True):
        gc.set_threshold(*((1, 1, 1) if often else thresholds))
        found.append(counted(counter, step)[0])
    gc.set_threshold(*thresholds)
    assert found[0] == found[1]


def trains(optimizer):
    net = nn.Linear(4, 4)
    update = optimizer(net.parameters())
    batch = torch.randn(2, 4)

    def step():
        net(batch).sum().backward()
        update.step()
        update.zero_grad()

    for _ in range(2):  # whose states are made in the first
        step()
    return step


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.AdamW, foreach=True),
        functools.partial(torch.optim.AdamW, foreach=False),
        functools.partial(torch.optim.AdamW, fused=True),
        torch.optim.NAdam,
        torch.optim.Rprop,
        torch.optim.ASGD,
    ],
)
def test_what_torch_reads_on_a_cpu_alone_is_no_read(counter, optimizer):
    figures, _ = counted(counter, trains(optimizer))
    assert figures.operators
    assert (figures.reads, figures.other_reads) == (0, 0)


def test_what_torch_reads_on_a_gpu_too_is_one_of_the_line_that_asks_for_it(counter):
    net = nn.Linear(4, 4)
    net(torch.randn(2, 4)).sum().backward()
    figures, causes = counted(
        counter, lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0, error_if_nonfinite=True), *net.parameters()
    )
    assert figures.reads == 1
    [cause] = causes["reads"]
    assert cause.library.file == "torch/nn/utils/clip_grad.py"
    assert cause.own.file == FILE


def ctc(weight):
    lengths = torch.tensor([4, 3])
    scores = (torch.randn(6, 2, 5) * weight).log_softmax(-1)
    functional.ctc_loss(scores, torch.randint(1, 5, (2, 4)), torch.full((2,), 6), lengths).backward()


def packs(weight):
    lengths = torch.tensor([4, 3])
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 2, 5) * weight, lengths)
    packed.data.sum().backward()


def measures_accuracy(weight):
    labels = torch.tensor([0, -100, 1])
    logits = torch.randn(3, 2) * weight
    (logits[labels != -100].argmax(-1) == labels[labels != -100]).sum()


@pytest.mark.parametrize("step", [ctc, packs, measures_accuracy])
def test_lengths_and_labels_are_not_judged(counter, step):
    weight = torch.ones(1, requires_grad=True)
    figures, _ = counted(counter, lambda: step(weight))
    assert figures.reads == 0


def test_operators_in_inference_mode_are_counted_as_those_that_they_consist_of(counter):
    linear = nn.Linear(3, 3)
    batch = torch.ones(2, 3)
    with torch.no_grad():
        plain, _ = counted(counter, lambda: functional.mse_loss(linear(batch), batch).item())
    with torch.inference_mode():
        inferred, _ = counted(counter, lambda: functional.mse_loss(linear(batch), batch).item())
    assert (inferred.operators, inferred.reads) == (plain.operators, plain.reads) == (plain.operators, 1)


# --- Whole cases

COUNTED = MINE.replace(steps=3, warmup=1)


def loop(setup, **options):
    """A loop of own code."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(setup.device)
    setup.watch(net)
    update = torch.optim.AdamW(net.parameters())
    run_net = torch.compile(net, **options) if options else net
    while True:
        loss = run_net(torch.randn(4, 8, device=setup.device)).square().mean()
        loss.backward()
        update.step()
        update.zero_grad()
        loss.item()
        yield loss


FIGURES = ("losses", "peak_allocated_bytes", "phase_peak_bytes", "flops_per_step", "updates", "notes", "parameters")


@pytest.mark.parametrize("case", [COUNTED, COUNTED.replace(gradient_accumulation=1)])
def test_nothing_else_changes_where_steps_are_counted(case):
    with_counts, without = (run(case, loop, counts=counts) for counts in (True, False))
    assert [getattr(with_counts, name) for name in FIGURES] == [getattr(without, name) for name in FIGURES]
    assert without.counts is None
    assert with_counts.counts.of_step(0).reads == 1


@pytest.mark.parametrize(("accumulation", "updates"), [(1, [True, True]), (4, [False, False, False, True])])
def test_a_whole_round_of_the_accumulation_is_counted(accumulation, updates):
    def build(setup):
        net = nn.Linear(8, 8)
        update = torch.optim.AdamW(net.parameters())
        steps = itertools.count(1)

        def step():
            net(torch.randn(4, 8)).square().mean().backward()
            if next(steps) % accumulation == 0:
                update.step()
                update.zero_grad()

        return step

    counts = measured(COUNTED.replace(gradient_accumulation=accumulation), build).counts
    kinds = [counts.of_step(step) for step in range(len(counts.steps))]
    assert [kind.update for kind in kinds] == updates
    assert max(kinds, key=lambda kind: kind.operators).update


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_model_of_the_zoo_has_a_step_that_updates_and_one_that_does_not(accumulation):
    case = Case(model="ctr-dnn", precision="fp32", batch_size=50, gradient_accumulation=accumulation, steps=2, warmup=0)
    counts = measured(case).counts
    assert [counts.of_step(step).update for step in range(len(counts.steps))] == [False, True][-min(accumulation, 2) :]
    assert counts.kinds[-1].operators > counts.kinds[0].operators or accumulation == 1


class Ended(Exception):
    pass


@pytest.mark.parametrize("end", [None, Ended("no data"), SystemExit(0)])
def test_a_loop_that_ends_after_the_last_check_has_its_figures(end):
    whole = measured(COUNTED, loop)
    steps = 4 + 1 + 3 + 1  # counted for memory, warmed up, timed, watched; the generator takes one in its build

    def ends(setup):
        inner = loop(setup)
        for _ in range(steps + 1):
            yield next(inner)
        if end:
            raise end

    reply = measured(COUNTED, ends)
    assert reply.losses == whole.losses
    assert (len(whole.counts.steps), len(reply.counts.steps)) == (2, 1)
    assert "without further counts of what a step asks for" in reply.notes[-1]


def test_what_own_code_compiles_is_traced_in_the_counted_steps_alone():
    calls = []

    def build(setup):
        def noted(graph, inputs):
            calls.append(graph)
            return graph.forward

        return loop(setup, backend=noted, mode="reduce-overhead")

    plain, reply = measured(COUNTED, loop), measured(COUNTED, build)
    assert not calls  # its own backend is not asked on a CPU
    assert reply.losses == plain.losses
    kinds = [reply.counts.of_step(step) for step in range(len(reply.counts.steps))]
    assert [kind.compilations for kind in kinds] == [1, 0, 0, 0]
    assert {kind.operators for kind in kinds} == {plain.counts.of_step(0).operators}
    [cause] = [cause for cause in reply.counts.causes if cause.what == "compilations"]
    assert cause.by.startswith("torch.compile of ")


def breaking(**options):
    """Return a training of which torch.compile, with these options, compiles a step that breaks the graph."""

    def build(setup):
        net = nn.Linear(8, 8)
        update = torch.optim.SGD(net.parameters())

        @torch.compile(**options)
        def step_of(batch):
            hidden = net(batch)
            torch._dynamo.graph_break()
            return hidden.square().mean()

        while True:
            loss = step_of(torch.randn(4, 8))
            loss.backward()
            update.step()
            update.zero_grad()
            yield loss

    return build


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of torch.compile itself
def test_a_graph_break_is_counted_with_its_reason():
    reply = measured(COUNTED, breaking())
    assert reply.counts, reply.notes
    counts = reply.counts
    assert [counts.of_step(step).graph_breaks for step in range(4)] == [1, 0, 0, 0]


def test_code_that_cannot_be_compiled_has_all_other_figures_and_the_run_says_so():
    reply = measured(COUNTED, breaking(fullgraph=True))
    assert reply.counts is None
    assert "without further counts of what a step asks for" in reply.notes[-1]
    assert "Unsupported" in reply.notes[-1]
