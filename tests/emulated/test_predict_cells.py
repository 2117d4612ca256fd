"""``gputrain predict`` on emulated GPUs: what a case takes, under which limit, and whatever ran before it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gputrain import Case, GiB
from pytest_gputrain.cli import predict
from pytest_gputrain.cli.main import main
from pytest_gputrain.execution.launch import launcher
from pytest_gputrain.session.fit_engines import EmulatedCells

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
QLORA = Case(
    model="llama-3.1-8b", method="qlora", precision="bf16", sequence_length=512, activation_checkpointing=True, loss="fp32"
)


@pytest.fixture
def answer(preloaded, tmp_path, monkeypatch):
    """Ask in a folder with the config of a small model and an empty cache."""
    for name, value in preloaded({}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(predict, "_cache_folder", lambda: tmp_path / "cache")

    def ask(*words):
        assert main(["predict", "small.json", "--sequence=512", "--json=answer.json", *words]) == 0
        return json.loads(Path("answer.json").read_bytes())

    return ask


@pytest.fixture
def cells(preloaded, tmp_path):
    """Cases on emulated GPUs, of which none is remembered."""
    made = EmulatedCells(["h100", "rtx_4090"], tmp_path, 300, {**os.environ, **preloaded({})}, None)
    yield made
    made.close()


def test_an_answer_is_of_emulated_gpus_and_remembered(answer, capsys, monkeypatch):
    words = ("--method=lora", "--batch=1,64", "--gpu=h100", "--only-cells")
    answered = answer(*words)
    for cell in answered["cells"]:
        figures = cell["figures"]
        assert (figures["outcome"], figures["device_name"], cell["fit"]) == ("emulated", "NVIDIA H100 80GB HBM3", "fits")
        assert sum(figures["peak_bytes_by_origin"].values()) == pytest.approx(figures["peak_allocated_bytes"], rel=0.05)
        assert figures["expected"]["seconds"] or figures["expected"]["unknown"]
    assert "run on emulated GPUs (CUDA " in capsys.readouterr().out
    monkeypatch.setattr(launcher, "emulate", lambda *args, **fields: pytest.fail("run again"))
    assert answer(*words) == answered


def test_kernels_for_another_gpu_are_told(stand_ins, tmp_path):
    engines = EmulatedCells(["h100", "mi300x"], tmp_path, 300, os.environ, None)
    engines.close()
    assert [*engines.titles.values()] == ["H100", "MI300X, by CUDA's kernels for sm_90"]


def test_a_run_says_that_the_capacity_of_its_gpu_is_computed(answer):
    (cell,) = answer("--method=lora", "--gpu=rtx_5060_ti", "--only-cells")["cells"]
    said = "no report of a driver about the memory of RTX 5060 Ti is known: 7.40 GiB are computed"
    assert any(note.startswith(said) for note in cell["figures"]["notes"])


def test_a_case_takes_what_it_takes_in_a_fresh_process_whatever_ran_before(cells):
    case = Case(model="llama-3.2-1b", method="lora", precision="bf16", sequence_length=512, loss="fp32")
    for batch in (4, 2):
        cells.figures(case.replace(batch_size=batch), "h100")
    forked = cells.figures(case, "h100")
    cells._executors["h100"]._fork_server = None
    cells._executors["h100"]._replies.clear()
    assert cells.figures(case, "h100") == forked


def test_what_is_built_whole_is_built_without_the_limit_that_its_steps_have(cells):
    fitting = cells.figures(QLORA, "rtx_4090", 12 * GiB, memory_only=True)
    assert fitting.fits
    assert fitting.phase_peak_bytes["build"] > 12 * GiB > fitting.peak_reserved_bytes
    assert not cells.figures(QLORA, "rtx_4090", 6 * GiB, memory_only=True).fits
    needed = cells.figures(QLORA.replace(batch_size=64), "rtx_4090", memory_only=True)
    assert needed.fits, "any amount"
    assert needed.peak_reserved_bytes > 24 * GiB


def test_the_largest_batch_fits_and_the_next_does_not(answer):
    words = ("--method=full", "--gpu=rtx_4090")
    (largest,) = answer(*words)["largest"]
    batch = largest["batch_size"]
    assert 1 < batch < 1024
    around = answer(*words, f"--batch={batch},{batch + 1}", "--only-cells")["cells"]
    assert [cell["fit"] == "fits" for cell in around] == [True, False]
    assert around[0]["needed_bytes"] == largest["needed_bytes"]


def test_a_change_makes_the_smallest_unfit_batch_fit(answer):
    first, second = answer("--method=full", "--gpu=rtx_4090", "--batch=128,1024")["cells"]
    assert {first["fit"], second["fit"]} == {"does-not-fit"}
    assert "loss_chunks=16 makes it fit" in first["remedy"]
    assert second["remedy"] == ""


def test_an_answer_has_all_forms_and_the_parent_imports_no_library_that_trains(stand_ins, tmp_path):
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    words = ["small.json", "--method=full", "--sequence=512", "--gpu=h100,rtx_4090", "--only-cells"]
    code = (
        "import sys; from pytest_gputrain.cli.main import main; "
        f"status = main(['predict', *{words}, '--markdown=answer.md', '--html=answer.html']); "
        "print({'torch', 'transformers', 'pytest'} & set(sys.modules)); sys.exit(status)"
    )
    environ = {**os.environ, "XDG_CACHE_HOME": str(stand_ins.folder.parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "set()"
    rows = [line for line in (tmp_path / "answer.md").read_text().splitlines() if line.startswith("| full | 1 |")]
    assert rows[0].count(" GiB fits |") == 2
    page = (tmp_path / "answer.html").read_text()
    assert page.count('<span class="badge good">') == 2


def test_a_model_of_the_hubs_cache_has_the_loss_of_transformers_and_impossible_combinations_are_left_out(
    answer, tmp_path, monkeypatch, capsys
):
    snapshot = tmp_path / "hub" / "models--me--tiny-qwen" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "small.json").rename(snapshot / "config.json")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    words = ["me/tiny-qwen", "--method=full", "--gpu=h100", "--sequence=512", "--only-cells", "--json=answer.json"]
    combinations = ["--set=loss=fp32,logits", "--parallel=single,fsdp", "--set=reshard_after_forward=true"]
    assert main(["predict", *words, *combinations]) == 0
    answered = json.loads(Path("answer.json").read_bytes())
    assert answered["model"] == "tiny-qwen"
    assert [cell["case"]["parallel"] for cell in answered["cells"]] == ["fsdp", "fsdp"]
    as_transformers, in_own_type = (cell["figures"]["peak_allocated_bytes"] for cell in answered["cells"])
    assert as_transformers > in_own_type
    assert "asks for reshard_after_forward, which parallel='single' does not do" in capsys.readouterr().out
    assert main(["predict", *words]) == 0
    assert json.loads(Path("answer.json").read_bytes())["cells"][0]["case"]["loss"] == "fp32"


def test_what_a_worker_refuses_of_all_cases_is_one_sentence_and_status_2(stand_ins, capsys):
    words = ["pangu-350m", "--gpu=v100", "--precision=fp16-amp", "--sequence=2000", "--method=full"]
    assert main(["predict", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "has a table of 1,024 positions, too few for sequence_length=2000; set it to at most 1024" in err
