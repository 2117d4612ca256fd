"""What ``gputrain predict`` refuses and says of a model; tests/emulated/test_predict_cells.py has its answers."""

import json
from pathlib import Path

import pytest

from pytest_gputrain import Case
from pytest_gputrain.cli.main import main
from pytest_gputrain.cli.predict import _about, _known_errors
from pytest_gputrain.utils.errors import CannotEmulate

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "auto_map": {"AutoConfig": "evil--evil.Config", "AutoModelForCausalLM": "evil.Model"},
}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with the config of a small model, and no cache from elsewhere."""
    return enter(tmp_path, monkeypatch)


def enter(folder, patch):
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps(SMALL))
    # What auto_map names, and nobody may run.
    (folder / "small" / "evil.py").write_text("raise SystemExit('code of the model was executed')")
    patch.chdir(folder)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.delenv("HF_HOME", raising=False)
    patch.delenv("HF_HUB_CACHE", raising=False)
    return folder


MANY = ",".join(map(str, range(1, 2002)))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("llama-3.1-8c --gpu=h100", "the model 'llama-3.1-8c' is unknown (did you mean 'llama-3.1-8b'?): it is not a file"),
        ("small --gpu=rtx_409", "the GPU 'rtx_409' is unknown (did you mean 'rtx_4090'?); known: "),
        ("small --gpu=,", "--gpu names none; give some of "),
        ("small --gpu=h100 --method=lroa", "the method 'lroa' is unknown (did you mean 'lora'?); known: "),
        ("small --gpu=h100 --set=lora_rnak=8", "'lora_rnak' is not a knob of a case (did you mean 'lora_rank'?)"),
        ("small --gpu=h100 --set=model=sdxl", "--set model is not accepted"),
        ("small --gpu=h100 --batch=1 --set=batch_size=2", "batch_size is given twice; give all of its values at"),
        ("small --gpu=h100 --batch=0", "a case has batch_size=0; it must be at least 1"),
        ("small --gpu=h100 --gpus=8", "asks for 8 GPUs, but parallel='single' uses one; choose a parallelism"),
        ("small --gpu=t4", "T4 does not compute in bf16; choose precision=fp16-amp or fp32 for it"),
        ("sdxl --gpu=h100", "sdxl has inputs whose size you choose; add --set resolution=512x512"),
        ("small/nothing.json --gpu=h100", "the model 'small/nothing.json' is unknown"),
        ("broken.json --gpu=h100", "broken.json has neither model_type"),
        (f"small --gpu=h100 --batch={MANY} --method=full", "2,001 combinations are"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(words, sentence, capsys):
    Path("broken.json").write_text("{}")
    assert main(["predict", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (told,) = [line for line in err.splitlines() if "may take about" not in line]
    assert sentence in told


def test_that_no_gpu_can_be_emulated_here_is_one_sentence_and_status_2(monkeypatch, capsys):
    def refuse():
        raise CannotEmulate("there is no torch to emulate a GPU for")

    monkeypatch.setattr("pytest_gputrain.hardware.emulation.libraries.find_torch", refuse)
    assert main(["predict", "small", "--gpu=h100", "--method=full", "--json=answer.json"]) == 2
    assert capsys.readouterr().err == "gputrain: there is no torch to emulate a GPU for\n"
    assert not Path("answer.json").exists()


def test_a_folder_named_like_a_built_in_model_is_told(project):
    (project / "sdxl").mkdir()
    assert _about("sdxl", alone=True) == ("sdxl is the built-in model; give ./sdxl for the file or folder of that name",)
    assert not _about("sd3", alone=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, True),
        ({"optimizer": "adamw"}, False),
        ({"optimizer": "paged_adamw_8bit"}, False),
        ({"method": "lora"}, False),
        ({"model": "sd-1.5"}, False),
    ],
)
def test_the_states_that_a_trainer_keeps_in_more_bits_are_told(fields, said):
    case = Case(**{"model": "qwen3-0.6b", "method": "full", "optimizer": "adamw_8bit"} | fields)
    told = _known_errors([Case(model="qwen3-0.6b"), case])
    assert [sentence.partition(" (")[0] for sentence in told] == [
        "transformers' Trainer keeps the states of embeddings in fp32"
    ] * said


@pytest.mark.parametrize(("parallel", "said"), [("zero2", True), ("fsdp", False)])
def test_the_error_of_zero_is_told(parallel, said):
    told = _known_errors([Case(model="qwen3-0.6b", method="lora", parallel=parallel, gpus=2)])
    assert [sentence.partition(":")[0] for sentence in told] == ["the error is larger with ZeRO"] * said
