"""Does a case fit: the judgement and its error, the search for the largest batch, and what the tables say. Pure."""

import argparse
import json
from pathlib import Path

import msgspec
import pytest

from pytest_gputrain import Case, GiB
from pytest_gputrain.cases import sweep
from pytest_gputrain.cases.model_config import with_model
from pytest_gputrain.cli.predict import _knobs, _lines, add_to
from pytest_gputrain.gate.fit import ERROR, Need, judge, largest_batch, loads_in_parts, need_of, tight
from pytest_gputrain.hardware.emulation.boards import CONTEXT_BYTES
from pytest_gputrain.records import EmulatedRun, LiveTensor
from pytest_gputrain.records.fit import FitCell, FitGpu, FitReport, LargestBatch
from pytest_gputrain.report import fit
from pytest_gputrain.session.fitting import computes_token_by_token, possible
from pytest_gputrain.session.remedies import remedy
from pytest_gputrain.storage.hub_cache import cached_models, hub_cache
from pytest_gputrain.storage.hub_cache import snapshot as snapshot_of


@pytest.fixture
def installed(monkeypatch):
    """All libraries that train, which these tests do not need."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


LORA = Case(model="llama-3.1-8b", method="lora", sequence_length=2048, batch_size=4)
MEMORY = 80 * GiB


def emulated(held, *, allocated=None, fits=True, **fields):
    """A run that took so much of a GPU, the driver's context included."""
    fields = {
        "phase_peak_bytes": {"backward": held - CONTEXT_BYTES if allocated is None else allocated - CONTEXT_BYTES}
    } | fields
    return EmulatedRun(
        device_name="NVIDIA H100 80GB HBM3",
        device_memory_bytes=MEMORY,
        runtime="13.0",
        packages={"torch": "2.13.0"},
        fits=fits,
        peak_allocated_bytes=(held if allocated is None else allocated) - CONTEXT_BYTES,
        peak_reserved_bytes=held - CONTEXT_BYTES,
        device_used_bytes=held,
        **fields,
    )


def of_any_memory(held, **fields):
    """A case that takes so much, of which its allocator gives nothing back."""
    return lambda memory: emulated(held, fits=not memory or held <= memory, **fields)


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.95, "fits"), (1 - ERROR / 2, "within-error"), (1 + ERROR / 2, "within-error"), (1.05, "does-not-fit")],
)
def test_figures_that_their_error_would_turn_are_within_the_error(share, expected):
    needs = int(share * MEMORY)
    assert judge(LORA, MEMORY, of_any_memory(needs)) == (expected, needs)
    assert tight(MEMORY) * (1 + ERROR) <= MEMORY < (tight(MEMORY) + 2) * (1 + ERROR)


@pytest.mark.parametrize(("estimated", "expected", "surely"), [(10, "fits", True), (11, "within-error", False)])
def test_workspaces_that_are_estimated_widen_the_error(estimated, expected, surely):
    at = of_any_memory(70 * GiB, estimated_bytes=estimated * GiB)
    assert judge(LORA, MEMORY, at).fit == expected
    assert need_of(LORA, MEMORY, at).fits is surely


@pytest.mark.parametrize(("estimated", "expected"), [(4, "does-not-fit"), (5, "within-error")])
def test_a_case_may_fit_if_estimates_are_too_high(estimated, expected):
    assert judge(LORA, MEMORY, of_any_memory(MEMORY + 5 * GiB, estimated_bytes=estimated * GiB)).fit == expected


def test_memory_that_the_allocator_would_give_back_is_not_needed():
    """Held up to the capacity and beyond, and a GPU of less memory would do as well."""

    def at(memory):
        return emulated(min(memory or 90 * GiB, 90 * GiB) - GiB, allocated=60 * GiB)

    assert judge(LORA, MEMORY, at) == ("fits", 79 * GiB)
    assert need_of(LORA, MEMORY, at) == (True, 79 * GiB)


@pytest.mark.parametrize("held", [40 * GiB, 100 * GiB])
def test_figures_that_tell_already_cost_no_further_run(held):
    asked = []

    def at(memory):
        asked.append(memory)
        return emulated(held)

    assert judge(LORA, MEMORY, at) == ("fits" if held < MEMORY else "does-not-fit", held)
    assert need_of(LORA, MEMORY, at) == (held < MEMORY, held)
    assert asked == [0, 0]


def test_a_batch_that_fits_surely_would_fit_a_gpu_of_less_memory():
    assert need_of(LORA, MEMORY, of_any_memory(79 * GiB)) == (False, 79 * GiB)
    assert need_of(LORA, MEMORY, of_any_memory(75 * GiB)) == (True, 75 * GiB)


def test_more_than_an_emulated_gpu_has_addresses_does_not_fit():
    cut_short = lambda memory: emulated(20 * GiB, fits=False)  # noqa: E731
    assert judge(LORA, MEMORY, cut_short) == ("does-not-fit", None)
    assert need_of(LORA, MEMORY, cut_short) == (False, None)


def test_what_fits_by_what_is_counted_is_incomplete_where_memory_of_a_library_is_not_known():
    fits, too_large = (of_any_memory(gib * GiB, not_counted=("cuDNN's workspaces",)) for gib in (30, 100))
    assert judge(LORA, MEMORY, fits) == ("incomplete", 30 * GiB)
    assert judge(LORA, MEMORY, too_large) == ("does-not-fit", 100 * GiB)


def test_what_programs_load_in_parts_is_judged_by_its_training_and_not_by_a_build_of_the_whole():
    whole = of_any_memory(30 * GiB, phase_peak_bytes={"build": 130 * GiB, "backward": 20 * GiB})
    assert judge(LORA.replace(method="qlora"), MEMORY, whole) == ("fits", 30 * GiB)
    assert judge(LORA, MEMORY, whole) == ("does-not-fit", 130 * GiB + CONTEXT_BYTES)
    assert [loads_in_parts(Case(parallel=engine)) for engine in ("single", "zero3", "fsdp")] == [False, False, True]
    assert not loads_in_parts(Case(parallel="fsdp", cpu_offload=True))


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 27, 100, 511, 1023, 1024, 5000])
@pytest.mark.parametrize("base", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("first", [(), (1,), (1, 2, 4, 8)])
def test_the_search_finds_the_largest_batch_by_few_tries(largest, base, first):
    capacity = 10_000_000
    slope = (1 - base) * capacity / (largest + 0.5)
    tries = []

    def need(batch):
        # Blocks are packed differently from batch to batch.
        held = int(base * capacity + slope * batch * (1 + 0.0003 * (batch % 3)))
        return Need(batch <= largest, held)

    def counted(batch):
        tries.append(batch)
        return need(batch)

    found = largest_batch(counted, {batch: need(batch) for batch in first}, capacity, most=1024)
    assert found == min(largest, 1024)
    assert len(tries) == len(set(tries)) <= 9


@pytest.mark.parametrize("held", [lambda batch: 5, lambda batch: 5 * batch**3, lambda batch: 1_000 // batch])
def test_the_search_ends_where_memory_is_no_line(held):
    tries = []

    def need(batch):
        tries.append(batch)
        return Need(batch <= 300, held(batch))

    assert largest_batch(need, {}, 10_000, most=1024) == 300
    assert len(tries) == len(set(tries)) < 25


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_is_told_once_and_what_can_be_stays():
    llama = Case(model="llama-3.1-8b", sequence_length=512, named=("batch_size",))
    wrong = [llama.replace(gpus=8, batch_size=size) for size in (1, 2)]
    asked, left_out = possible([llama, *wrong], ["h100", "t4"])
    assert [(case, gpu) for case, gpu in asked] == [(llama, "h100")]
    assert left_out == [
        "the case llama-3.1-8b-full-bf16-batch_size=1 (and 1 alike) asks for 8 GPUs, but parallel='single' uses one; choose "
        "a parallelism",
        "T4 does not compute in bf16; choose precision=fp16-amp or fp32 for it",
    ]


def test_libraries_that_are_missing_are_named_together_and_the_rest_is_predicted(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("peft", "bitsandbytes") else name)
    cases = [Case(model="qwen3-8b", method=method, sequence_length=512) for method in ("full", "lora", "qlora")]
    asked, left_out = possible(cases, ["h100"])
    assert [case.method for case, _ in asked] == ["full"]
    assert left_out == [
        "the case qwen3-8b-lora-bf16 (and 1 alike) cannot be predicted without peft and bitsandbytes; install them with: "
        "pip install peft bitsandbytes (or pytest-gputrain[suite])"
    ]


def report(*cells, **fields):
    given = {
        "generator": "pytest-gputrain 0",
        "model": "llama-3.1-8b",
        "gpus": (FitGpu(marker="h100", title="H100", memory_bytes=79 * GiB),),
        "error": ERROR,
        "knobs": ("method", "batch_size"),
        "packages": {"torch": "2.13.0"},
        "cells": cells,
        "largest": (),
        "left_out": (),
    }
    return msgspec.convert({**given, **fields}, FitReport, from_attributes=True)


def cell(kind, **fields):
    origins = {"build": 10**10, "forward": 10**10, "between": 8}
    figures = emulated(
        30 * GiB, trainable_parameters=11_430_825, peak_bytes_by_origin=origins, largest={"backward": (LARGE,)}
    )
    given = {"case": LORA, "gpu": "h100", "fit": kind, "needed_bytes": 30 * GiB, "figures": figures}
    return FitCell(**{**given, **fields})


LARGE = LiveTensor(
    bytes=80 << 20, count=2, operator="aten.zeros_like", phase="optimizer", shape=(1 << 20, 10), dtype="float32"
)
UNKNOWN = cell("does-not-fit", needed_bytes=None)
FAILED = cell(None, figures=None, needed_bytes=None, failure="it crashed")
REPORTS = {
    "it fits": report(cell("fits")),
    "within the error": report(cell("within-error")),
    "a remedy, and what cannot be": report(
        cell("does-not-fit", remedy="batch_size=1 makes it fit"), left_out=("x cannot be",)
    ),
    "perhaps a remedy, and what is said of the model": report(
        cell("within-error", remedy="activation_checkpointing=true makes it fit"),
        about=("its quantization is not looked at",),
    ),
    "more than can be told": report(UNKNOWN),
    "memory that is not counted": report(
        cell("incomplete", figures=msgspec.structs.replace(UNKNOWN.figures, not_counted=("cuDNN's workspaces",)))
    ),
    **{
        f"qlora in {precision}, unquantized_fp32={called}": report(
            cell("fits", case=LORA.replace(method="qlora", precision=precision, unquantized_fp32=called))
        )
        for precision, called in (("bf16", None), ("bf16", True), ("bf16-amp", None), ("bf16-amp", False))
    },
    "failures of one kind": report(FAILED, FAILED, cell("fits", case=LORA.replace(batch_size=8))),
}


def test_what_is_said_of_a_cell(snapshot):
    memory, of_all = fit.tables(REPORTS["it fits"])[0], [*fit.notes(REPORTS["it fits"])]
    said = {"of all": [memory.about, memory.headers, of_all]}
    for what, written in REPORTS.items():
        notes = [*fit.notes(written)]
        said[what] = [*fit.tables(written)[0].rows, *(note for note in notes if note not in of_all)]
        assert notes[-1] == of_all[-1]
    assert said == snapshot


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"batch_size": 7, "needed_bytes": 70 * GiB}, "7 (70.0 GiB)"),
        ({"batch_size": 1024, "needed_bytes": 70 * GiB, "is_bound": True}, "1024 or more (70.0 GiB)"),
        ({"batch_size": 0}, "none"),
        ({"batch_size": 0, "perhaps": 2}, "none, 2 within the error"),
        ({"batch_size": 0, "failure": "it crashed"}, "not known"),
    ],
)
def test_the_largest_batch_in_words(fields, text):
    given = {"case": LORA, "gpu": "h100", "needed_bytes": None, "perhaps": 0, "is_bound": False}
    found = LargestBatch(**{**given, **fields})
    assert fit.tables(report(cell("fits"), largest=(found,)))[1].rows == (("lora", text),)


@pytest.mark.parametrize(
    ("checkpointed", "told"), [(20, "activation_checkpointing=true makes it fit, in 20.0 GiB"), (90, "")]
)
def test_a_case_that_may_fit_is_told_only_what_makes_it_surely_fit(checkpointed, told):
    def changed(case):
        gib = checkpointed if case.activation_checkpointing is True else 90
        return Need(gib < 79, gib * GiB)

    case = LORA.replace(batch_size=1, optimizer="sgd")
    assert remedy(case, emulated(78 * GiB), changed, may_fit=True) == told


@pytest.mark.usefixtures("installed")
def test_the_knobs_that_people_use_are_taken_by_the_command():
    words = "--batch=1 --precision=bf16 --optimizer=adamw,adamw_8bit,paged_adamw_8bit,adafactor,sgd --checkpointing=true,0.5"
    knobs = "loss=fp32,logits loss_chunks=16 lora_rank=8 lora_alpha=8 lora_dropout=0.1 lora_targets=all-linear dora=true"
    knobs += " max_grad_norm=1.0 attention=eager activation_checkpointing_policy=save-matmuls lengths=packed"
    knobs += " learning_rate=1e-5 sequence_length=512 method=lora"
    options = argparse.ArgumentParser()
    add_to(options.add_subparsers())
    given = options.parse_args(
        ["predict", "qwen3-8b", "--gpu=h100", *words.split(), *(f"--set={knob}" for knob in knobs.split())]
    )
    axes = sweep.parse_axes(_knobs(given, Case(model="qwen3-8b")), ())
    cases = [Case(model="qwen3-8b", **combination) for combination in sweep.combinations(axes)]
    asked, left_out = possible(cases, ["h100"])
    assert (len(asked), left_out) == (5 * 2 * 2, [])


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, "~/.cache/huggingface/hub"),
    ],
)
def test_the_cache_of_the_hub_is_where_its_variables_say(variables, folder):
    assert hub_cache(variables) == Path(folder).expanduser()


@pytest.fixture
def hub(tmp_path):
    """A cache with two revisions of a model."""
    for revision, size in (("aaa", 64), ("bbb", 32)):
        folder = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / revision
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(f'{{"model_type": "qwen3", "hidden_size": {size}}}')
    return tmp_path


def test_a_model_of_the_hub_is_its_main_revision_or_any_other_that_was_fetched(hub):
    variables = {"HF_HUB_CACHE": str(hub)}
    assert cached_models(variables) == ["Qwen/Qwen3-8B"]
    assert cached_models({"HF_HUB_CACHE": str(hub / "nothing")}) == []
    fetched = snapshot_of("Qwen/Qwen3-8B", variables)
    assert (fetched / "config.json").is_file()
    assert snapshot_of("Qwen/Qwen4", variables) is None
    refs = hub / "models--Qwen--Qwen3-8B" / "refs"
    refs.mkdir()
    (refs / "main").write_text("aaa\n")
    folder = snapshot_of("Qwen/Qwen3-8B", variables)
    assert folder.name == "aaa"
    assert with_model(Case(model=str(folder)), Path()).model.startswith("Qwen3-8B#")


def test_without_a_terminal_a_line_tells_how_much_is_done_and_how_long_the_rest_takes(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    note = _lines()
    for seconds, done in ((1, 0), (5, 1), (21, 2), (30, 3)):
        now[0] = 100.0 + seconds
        note("cases", done, 4)
    told = "2 of 4 cases are done after 20 s, the others may take about 20 s"
    assert capsys.readouterr().err == f"gputrain: {told}\n"


def test_models_that_are_computed_token_by_token_are_known_by_their_type(tmp_path):
    for kind in ("xlstm", "qwen3"):
        (tmp_path / f"{kind}.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 2}))
    slow, quick = (with_model(Case(model=f"{kind}.json"), tmp_path) for kind in ("xlstm", "qwen3"))
    assert [computes_token_by_token(case) for case in (slow, quick)] == [True, False]
