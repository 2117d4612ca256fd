"""Evaluation and the saving of a checkpoint: phases of their own, which leave the figures of the steps as they are."""

import copy
import itertools
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from zoo_examples import measured, refused, task_of

from pytest_gputrain import Case
from pytest_gputrain.worker import beside_steps
from pytest_gputrain.worker.allocations import AllocationCounter
from pytest_gputrain.worker.beside_steps import MOST_SAVED, BesideSteps
from pytest_gputrain.worker.device import Cpu
from pytest_gputrain.worker.group import Group
from pytest_gputrain.worker.loops import Beside
from pytest_gputrain.worker.training import OwnCodeTraining

MINE = Case(model="mine", method="custom", precision="fp32", batch_size=4, steps=3, warmup=1)
_LOGITS = 64 * 1000 * 4
"""Bytes of what the model gives for one batch of the evaluation."""


def training(told):
    """Own code with dropout, whose evaluation draws its data; ``told`` gets the setup, the model and what evaluates it."""

    def build(setup):
        model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 1000))
        optimizer = torch.optim.AdamW(model.parameters())
        setup.watch(model)

        def evaluate(kept=1):
            model.eval()  # and not back
            outputs = []
            for _ in range(6):
                with torch.no_grad():
                    outputs = [*outputs, model(torch.randn(64, 32))][-kept:]
                torch.rand(8).sum().item()

        def step():
            loss = model(torch.randn(4, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        told(setup, model, evaluate)
        return step

    return build


def test_an_evaluation_changes_no_figure_of_steps():
    teacher, modes, made = nn.Dropout(), [], []

    def evaluating(model, evaluate):
        made.append(copy.deepcopy(teacher).eval())
        modes.append((model.training, teacher.training, *(metric.training for metric in made)))
        evaluate(kept=6)
        teacher.eval()

    def both(setup, model, evaluate):
        setup.evaluation(lambda: evaluating(model, evaluate))
        setup.checkpoint(
            lambda folder: torch.save(
                {name: value.clone() for name, value in model.state_dict().items()}, folder / "last.pt"
            )
        )

    without, with_both = measured(MINE, training(lambda *_: None)), measured(MINE, training(both))
    assert without.phase_peak_bytes.keys() & {"evaluate", "checkpoint"} == set()
    assert with_both.phase_peak_bytes.keys() - without.phase_peak_bytes.keys() == {"evaluate", "checkpoint"}
    assert with_both.phase_peak_bytes["evaluate"] > with_both.peak_allocated_bytes, "which would be its peak"
    for figure in ("peak_allocated_bytes", "losses", "counts", "flops_per_step", "updates"):
        assert getattr(with_both, figure) == getattr(without, figure), figure
    assert teacher.training, "though it is no part of the model"
    assert modes == [(True, True, False), (True, True, False, False)], "once for memory, and once for counts"
    assert without.phase_peak_bytes == {phase: with_both.phase_peak_bytes[phase] for phase in without.phase_peak_bytes}


def test_an_evaluation_has_a_peak_and_counts():
    def keeping(number):
        return measured(MINE, training(lambda setup, model, evaluate: setup.evaluation(lambda: evaluate(number))))

    one, all_of_them = keeping(1), keeping(6)
    # Of one that is kept, the one before lives until the next one is there.
    grown = all_of_them.phase_peak_bytes["evaluate"] - one.phase_peak_bytes["evaluate"]
    assert grown == 4 * _LOGITS
    (row,) = (row for row in all_of_them.largest["evaluate"] if row.phase == "evaluate" and row.shape == (64, 1000))
    assert (row.count, row.bytes) == (6, 6 * _LOGITS)
    assert "test_beside_steps.py:" in row.lines[0]
    counts = one.evaluation_counts
    assert (counts.kinds[0].other_reads, counts.kinds[0].reads) == (6, 0)
    assert counts.kinds[0].operators == all_of_them.evaluation_counts.kinds[0].operators > 12


def test_what_outlives_an_evaluation_and_a_checkpoint_is_known():
    kept = []

    def leaving(setup, model, evaluate):
        setup.evaluation(lambda: (evaluate(), kept.append(torch.ones(1000))))
        setup.checkpoint(lambda folder: kept.append([value.clone() for value in model.parameters()]))

    weights = 4 * (32 * 64 + 64 + 64 * 1000 + 1000)
    assert measured(MINE, training(leaving)).kept_behind == {"evaluate": 4000, "checkpoint": weights}
    sound = measured(MINE, training(lambda setup, model, evaluate: setup.evaluation(evaluate)))
    assert sound.kept_behind == {"evaluate": 0}


def test_what_an_evaluation_keeps_is_no_peak_of_steps():
    kept = []

    def keeping(setup, model, evaluate):
        setup.evaluation(lambda: kept.append(torch.ones(10_000_000)))

    without, with_it = (measured(MINE.replace(steps=8), training(told)) for told in (lambda *_: None, keeping))
    assert kept
    assert with_it.peak_allocated_bytes == without.peak_allocated_bytes
    assert with_it.phase_peak_bytes.items() >= without.phase_peak_bytes.items()


@pytest.mark.parametrize("processes", [1, 2])
def test_what_another_process_was_sent_is_not_left_behind(processes, monkeypatch):
    """A thread of gloo lets go of it when it comes to it."""
    sent = []
    monkeypatch.setattr(beside_steps.time, "sleep", lambda seconds: sent.clear())
    own = object.__new__(OwnCodeTraining)
    own.__dict__ |= {"model": None, "beside": Beside(evaluate=lambda: sent.append(torch.ones(1000)))}
    counter, group = AllocationCounter(str), Group(size=processes, simulated=True)
    beside = BesideSteps(task_of(MINE), Cpu(), group, mock.Mock(), mock.Mock(), None)
    with counter:
        counter.begin_step()
        beside.run(own, counter)
    figures = msgspec.defstruct("Figures", ["kept_behind", "evaluation_counts", ("notes", tuple, ())])
    told = beside.behind_checks(own, figures({}, None), counts=False)
    assert told.kept_behind == {"evaluate": 4000 * (processes == 1)}


@pytest.mark.parametrize(
    ("told", "agreed"),
    [
        ([{"this"}, set(), set(), set()], ["to save", "folder", "made", "barrier"]),
        ([{"this"}, {str(MOST_SAVED + 1)}], ["to save"]),
        ([{"this"}, set(), set(), {"node2 cannot make the folder /a"}], ["to save", "folder", "made"]),
    ],
    ids=["small", "too large", "a node without the folder"],
)
def test_processes_agree_on_a_checkpoint(told, agreed, monkeypatch, tmp_path):
    """Otherwise one of them waits in its folder for the others, which go on."""
    asked, of_the_other = [], iter(told)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Two(Group):
        def union(self, names):
            asked.append(agreed[len(asked)])
            return tuple(ours | next(of_the_other) for ours in names)

        def barrier(self):
            asked.append("barrier")

    own = object.__new__(OwnCodeTraining)
    own.__dict__ |= {"model": None, "beside": Beside()}
    beside = BesideSteps(task_of(MINE), Cpu(), Two(size=2), mock.Mock(), mock.Mock(), None)
    beside.run(own, AllocationCounter(str))
    assert asked == agreed, "though this process has nothing to save"
    assert [note.partition(" because ")[0] for note in beside._notes] == ["no checkpoint was saved,"] * (
        "barrier" not in asked
    )
    assert not [*tmp_path.iterdir()]


def test_a_copy_of_the_state_is_in_the_peak_of_a_checkpoint():
    folders = []

    def saving(change):
        def save(folder, model):
            folders.append((folder, folder.is_dir()))
            torch.save(change(model.state_dict()), folder / "last.pt")

        return measured(MINE, training(lambda setup, model, _: setup.checkpoint(lambda folder: save(folder, model))))

    plain = saving(lambda state: state)
    copied = saving(lambda state: {name: value.clone() for name, value in state.items()})
    weights = 4 * (32 * 64 + 64 + 64 * 1000 + 1000)
    assert copied.phase_peak_bytes["checkpoint"] - plain.phase_peak_bytes["checkpoint"] == weights
    assert [existed for _, existed in folders] == [True, True]
    assert not any(folder.exists() for folder, _ in folders)


def test_a_checkpoint_that_may_be_too_large_is_not_written(monkeypatch):
    monkeypatch.setattr("pytest_gputrain.worker.beside_steps.MOST_SAVED", 1000)
    saved = []
    figures = measured(MINE, training(lambda setup, *_: setup.checkpoint(saved.append)))
    assert not saved
    assert "checkpoint" not in figures.phase_peak_bytes
    assert figures.notes[0].startswith("no checkpoint was saved, because as much as ")


def test_what_is_no_function_is_refused():
    sentence = refused(MINE, training(lambda setup, *_: setup.evaluation(3)))
    assert sentence.startswith("setup.evaluation() takes a function that the worker calls, and got int")


def test_only_the_first_samples_of_a_stream_are_evaluated():
    from pytest_gputrain.worker.frameworks.transformers import _first_samples

    class Stream(IterableDataset):
        def __iter__(self):
            return itertools.count()

        def __len__(self):
            return 10**9

    assert [*_first_samples(Stream(), 3)] == [0, 1, 2]


def test_a_trainer_evaluates_and_saves_as_it_is_told():
    import numpy as np
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    def trainer(rows, setup, *, picks, **arguments):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
        drawn = torch.randint(256, (rows, 16))
        data = [{"input_ids": row, "labels": row} for row in drawn]
        return Trainer(
            LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)),
            TrainingArguments("out", per_device_train_batch_size=4, use_cpu=True, report_to=[], **arguments),
            train_dataset=data[:64],
            eval_dataset=data,
            compute_metrics=lambda predicted: {"mean": float(np.mean(predicted.predictions))},
            preprocess_logits_for_metrics=(lambda logits, labels: logits.argmax(-1)) if picks else None,
        )

    def of(rows, **options):
        return measured(MINE, lambda setup: trainer(rows, setup, **options))

    evaluating = {"eval_strategy": "steps", "eval_steps": 2}
    neither = of(64, picks=True, save_strategy="no")
    small, large = (of(64, picks=picks, **evaluating) for picks in (True, False))
    assert {"evaluate", "checkpoint"} & neither.phase_peak_bytes.keys() == set()
    assert (
        small.phase_peak_bytes.keys()
        == large.phase_peak_bytes.keys()
        == {*neither.phase_peak_bytes, "evaluate", "checkpoint"}
    )
    for figure in ("peak_allocated_bytes", "losses", "counts"):
        assert getattr(small, figure) == getattr(large, figure) == getattr(neither, figure), figure
    logits = 8 * 16 * 256 * 4
    grown = large.phase_peak_bytes["evaluate"] - small.phase_peak_bytes["evaluate"]
    assert grown > 6 * logits, "those of 8 batches of 8 samples are kept"
    longer = of(72, picks=True, **evaluating)
    assert longer.phase_peak_bytes["evaluate"] == small.phase_peak_bytes["evaluate"] + 8 * 16 * 8, "data of a ninth batch"
    assert longer.evaluation_counts.kinds == small.evaluation_counts.kinds
    assert longer.notes[-1] == "the evaluation took the first 8 batches alone"
    assert small.notes[-1:] != longer.notes[-1:]


@pytest.mark.filterwarnings("ignore")  # Lightning warns of its own defaults
def test_lightning_validates_and_saves_as_it_is_told(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self, keeps):
            super().__init__()
            self.keeps, self.kept = keeps, []
            self.layers = nn.Sequential(nn.Linear(32, 1000), nn.Dropout(0.5))

        def training_step(self, batch):
            return self.layers(batch).square().mean()

        def validation_step(self, batch):
            self.kept = [*self.kept, self.layers(batch)][-self.keeps :]

        def on_validation_epoch_end(self):
            self.kept = []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def of(*loaders, keeps=1, saves=True):
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=saves, logger=False
        )
        return measured(MINE, lambda setup: (trainer, Module(keeps), *loaders))

    trains, validates = (DataLoader(torch.ones(number, 32), batch_size=4) for number in (40, 36))
    neither, small, large = of(trains, saves=False), of(trains, validates), of(trains, validates, keeps=6)
    assert {"evaluate", "checkpoint"} & neither.phase_peak_bytes.keys() == set()
    assert small.phase_peak_bytes.keys() == {*neither.phase_peak_bytes, "evaluate", "checkpoint"}
    for figure in ("peak_allocated_bytes", "losses"):
        assert getattr(small, figure) == getattr(large, figure) == getattr(neither, figure), figure
    assert small.counts == large.counts, "without validation, Lightning itself calls fewer functions"
    # Of one that is kept, the one before lives until the next one is there. Gradients, which are larger, are gone by then.
    assert large.phase_peak_bytes["evaluate"] - small.phase_peak_bytes["evaluate"] == 5 * 4 * 1000 * 4
    assert small.notes[-1] == "the evaluation took the first 8 batches alone"
    assert small.kept_behind == {"evaluate": 0, "checkpoint": 0}


@pytest.mark.parametrize("times", [0, 1])
def test_an_evaluation_of_an_iterator_that_is_used_up_is_told(times):
    def once(setup, model, evaluate):
        batches = iter(range(times))
        setup.evaluation(lambda: next(batches))

    if not times:
        assert "setup.evaluation() reads an iterator that is used up" in refused(MINE, training(once))
        return
    found = measured(MINE, training(once))
    assert found.evaluation_counts is None
    assert "without counts of the evaluation, which failed the second time (StopIteration)" in found.notes
