"""``gputrain predict`` from its arguments to its answer, by rules, as where no GPU can be emulated."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import pytest

from pytest_gputrain import Case, GiB
from pytest_gputrain.cli.main import main
from pytest_gputrain.cli.predict import _about, _unlike_trainer

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


WORDS = ("small", "--method=full", "--sequence=512", "--gpu=h100,rtx_4090", "--only-cells", "--json=answer.json")


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """The folder of an answer to `WORDS` in all forms, of its cache, and of the names of what its process had imported."""
    libraries = {"torch", "transformers", "numpy", "pytest"}
    code = (
        "import sys; from pytest_gputrain.cli.main import main; "
        f"status = main(['predict', *{WORDS}, '--markdown=answer.md', '--html=answer.html']); "
        f"open('imported.txt', 'w').write(str({libraries} & set(sys.modules))); sys.exit(status)"
    )
    with pytest.MonkeyPatch.context() as patch:
        folder = enter(tmp_path_factory.mktemp("once"), patch)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    return folder


def answer(*words):
    assert main(["predict", *words, "--json=answer.json"]) == 0
    return json.loads(Path("answer.json").read_text())


def test_an_answer_adds_up_in_all_forms_and_the_parent_imports_no_library_that_trains(once):
    assert (once / "imported.txt").read_text() == "set()"
    figures = json.loads((once / "answer.json").read_text())["cells"][0]["figures"]
    assert sum(figures["peak_bytes_by_origin"].values()) == figures["phase_peak_bytes"][figures["peak_phase"]]
    assert figures["peak_bytes_by_origin"]["build"] >= figures["model_bytes"]
    rows = [line for line in (once / "answer.md").read_text().splitlines() if line.startswith("| full | 1 |")]
    assert rows[0].count(" MiB fits |") == 2
    page = (once / "answer.html").read_text()
    assert page.count('<span class="badge good">') == 2
    assert "light-dark(" in page
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(dict(attributes))
    parser.feed(page)
    assert not [a for a in tags for name in ("src", "href") if not (a.get(name) or "#").startswith(("#", "data:"))]


def test_the_second_time_nothing_is_predicted_again(once, monkeypatch):
    again = mock.Mock(side_effect=AssertionError("predicted again"))
    monkeypatch.setattr("pytest_gputrain.execution.launch.launcher.predict", again)
    monkeypatch.setenv("XDG_CACHE_HOME", str(once / "cache"))
    assert answer(*WORDS) == json.loads((once / "answer.json").read_text())


@pytest.mark.slow
def test_a_grid_of_a_config_is_predicted_and_told(capsys):
    words = ("--method=full,lora", "--batch=1,4", "--sequence=512", "--gpu=h100,rtx_4090", "--only-cells")
    answered = answer("small/config.json", *words)
    cells = {(c["case"]["method"], c["case"].get("batch_size", 1), c["gpu"]): c for c in answered["cells"]}
    assert set(cells) == {(m, b, g) for m in ("full", "lora") for b in (1, 4) for g in ("h100", "rtx_4090")}
    assert {cell["fit"] for cell in cells.values()} == {"fits"}
    needed = {key: cell["needed_bytes"] for key, cell in cells.items()}
    assert needed["full", 4, "h100"] > needed["full", 1, "h100"] > 0.5 * GiB  # of which most is the context
    assert answered["packages"].keys() >= {"torch", "transformers", "peft"}
    out, err = capsys.readouterr()
    assert "Memory of small" in out
    assert out.count(" fits") == 8
    assert "8 combinations on " in err
    assert "\x1b" not in err  # no bar where nobody watches


T4 = ("small", "--method=full", "--gpu=t4", "--precision=fp32")


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not():
    (largest,) = answer(*T4, "--set=sequence_length=4096")["largest"]
    batch = largest["batch_size"]
    assert 1 < batch < 1024
    around = answer(*T4, "--set=sequence_length=4096", f"--batch={batch},{batch + 1}", "--only-cells")
    assert [cell["fit"] == "fits" for cell in around["cells"]] == [True, False]
    assert around["cells"][0]["needed_bytes"] == largest["needed_bytes"]


@pytest.mark.slow
def test_a_change_makes_the_smallest_unfit_batch_fit(capsys):
    first, second = answer(*T4, "--sequence=4096", "--batch=16,32")["cells"]
    assert first["fit"] == second["fit"] == "does-not-fit"
    assert "makes it fit" in first["remedy"]
    assert second["remedy"] == ""
    assert f"does not fit T4: {first['remedy']}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_in_the_cache_of_the_hub_is_taken_from_there(project, monkeypatch):
    snapshot = project / "hub" / "models--me--tiny-qwen" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (project / "small" / "config.json").rename(snapshot / "config.json")
    monkeypatch.setenv("HF_HUB_CACHE", str(project / "hub"))
    answered = answer("me/tiny-qwen", "--method=lora", "--sequence=512", "--gpu=h100", "--only-cells")
    assert answered["model"] == "tiny-qwen"


@pytest.mark.slow
def test_a_batch_of_many_tokens_is_predicted():
    """transformers looks at all positions for packed samples."""
    (cell,) = answer("small", "--method=full", "--batch=256", "--sequence=4096", "--gpu=b300", "--only-cells")["cells"]
    assert cell["failure"] == ""
    assert cell["fit"] is not None


@pytest.mark.slow
def test_the_loss_is_that_of_transformers_unless_another_is_named(once):
    as_transformers = json.loads((once / "answer.json").read_text())["cells"][0]
    in_own_type = answer(*WORDS, "--set=loss=logits")["cells"][0]
    assert as_transformers["case"]["loss"] == "fp32"
    peaks = [cell["figures"]["peak_allocated_bytes"] for cell in (as_transformers, in_own_type)]
    assert peaks[0] > peaks[1], "so small a difference may be lost in the segments that are reserved"


@pytest.mark.slow
def test_qlora_is_judged_by_its_training_and_not_by_a_build_in_full_width():
    (cell,) = answer("llama-3.1-8b", "--gpu=rtx_4090", "--method=qlora", "--checkpointing=true", "--only-cells")["cells"]
    assert cell["fit"] == "fits"
    assert cell["needed_bytes"] < 13 * GiB, "the weights alone are 15 GiB in 16 bits"


@pytest.mark.slow
def test_a_combination_that_cannot_be_does_not_stop_the_others(capsys):
    sharded = ("--parallel=single,fsdp", "--set=reshard_after_forward=true")
    answered = answer("small", "--method=full", "--gpu=h100", "--sequence=512", "--only-cells", *sharded)
    assert [cell["case"]["parallel"] for cell in answered["cells"]] == ["fsdp"]
    assert "asks for reshard_after_forward, which parallel='single' does not do" in capsys.readouterr().out


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
        (
            "pangu-350m --gpu=v100 --precision=fp16-amp --sequence=2000 --method=full",
            "has a table of 1,024 positions, too few for sequence_length=2000; set it to at most 1024",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(words, sentence, capsys):
    Path("broken.json").write_text("{}")
    assert main(["predict", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (told,) = [line for line in err.splitlines() if "may take about" not in line]
    assert sentence in told


def test_a_folder_named_like_a_built_in_model_is_told(project):
    (project / "sdxl").mkdir()
    assert _about("sdxl") == ("sdxl is the built-in model; give ./sdxl for the file or folder of that name",)
    assert not _about("sd3")


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
    told = _unlike_trainer([Case(model="qwen3-0.6b"), case])
    assert [sentence.partition(" (")[0] for sentence in told] == [
        "transformers' Trainer keeps the states of embeddings in fp32"
    ] * said
