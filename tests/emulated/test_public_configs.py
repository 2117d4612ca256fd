"""Models of 2024 to 2026 by the config.json that each has in public: some of the list of `tools/public_configs.py`."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "public_configs.py"

SAMPLE = {
    "granite-3.0-3b-a800m": "GiB reserved at the peak",  # experts
    "paddleocr-vl": "GiB reserved at the peak",  # a text model that a head is put on
    "internvl3-8b": "GiB reserved at the peak",  # a type that only the hub has
    "phi-4-multimodal": "whose language model transformers does not separate from what reads images or sounds",
}


def test_a_sample_of_public_configs_is_answered_or_refused_in_a_sentence(stand_ins):
    done = subprocess.run(
        [sys.executable, TOOL, "--method=lora", "--sequence=256", *SAMPLE],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    *lines, last = done.stdout.splitlines()
    told = {name: what for name, _, what in (line.partition(": ") for line in lines)}
    assert told.keys() == SAMPLE.keys(), done.stderr
    assert not [name for name, end in SAMPLE.items() if not told[name].endswith(end)], told
    assert (last, done.returncode) == ("3 of 4 answered", 1)


def test_results_are_counted_by_method_and_by_the_sentence_that_refuses(tmp_path):
    results = [
        ("a", "lora", True, "9.0 GiB reserved at the peak"),
        ("b", "lora", True, "does not fit: CUDA out of memory"),
        ("c", "lora", False, "c#12-lora-bf16 gave none: c#12 has model_type='c', which is unknown"),
        ("d", "lora", False, "d#34-lora-bf16 gave none: d#34 has model_type='d', which is unknown"),
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(f"{json.dumps(result)}\n" for result in results))
    done = subprocess.run(
        [sys.executable, TOOL, "--summary", f"--results={file}"], capture_output=True, text=True, check=True, timeout=60
    )
    first, group = done.stdout.splitlines()
    assert first == "lora: 1 fit, 1 do not fit, 2 of 4 are refused"
    assert group.startswith("- 2 (c, d): ")


def test_each_entry_of_the_list_is_of_another_type():
    kinds = [entry["model_type"] for entry in json.loads(TOOL.with_suffix(".json").read_bytes()).values()]
    assert len(kinds) == len(set(kinds)) >= 52
