"""What the recorder of `gputrain emulate` makes of torch's memory history."""

import random
import sysconfig

import pytest

from pytest_gputrain.worker import memory_recorder
from pytest_gputrain.worker.memory_recorder import course, find_peak, live_at


def event(action, address, size, line=1):
    return {"action": action, "addr": address, "size": size, "frames": [{"filename": "train.py", "line": line, "name": "f"}]}


def history(seed):
    """Random allocations and frees; with what is live after each."""
    chance, live, events, states = random.Random(seed), {}, [], []
    for number in range(chance.randrange(1, 60)):
        if live and chance.random() < 0.45:
            address = chance.choice(sorted(live))
            events.append(event("free_completed", address, live.pop(address)[0]) | {"frames": []})
        else:
            address = chance.choice([free for free in range(40) if free not in live])
            events.append(event("alloc", address, chance.randrange(1, 9), line=number))
            live[address] = (events[-1]["size"], events[-1]["frames"])
        states.append(dict(live))
    return events, states


@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_the_peak_and_what_lived_then_are_found_from_the_end(kept):
    for seed in range(200):
        events, states = history(seed)
        left = len(events) - max(1, int(kept * len(events)))
        sums = [sum(size for size, _ in state.values()) for state in states[left:]]
        at, peak = find_peak(events[left:], sums[-1])
        assert (at, peak) == (sums.index(max(sums)), max(sums))
        found, expected = live_at(events[left:], at, states[-1]), states[left + at]
        assert {place: size for place, (size, _) in found.items()} == {place: size for place, (size, _) in expected.items()}
        assert found == expected or left > 0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_the_course_of_memory_is_found_from_the_end_and_keeps_its_peak(seed, kept, monkeypatch):
    events, states = history(seed)
    left = len(events) - max(1, int(kept * len(events)))
    segments = [event("segment_alloc", 0, 50), *events[left:], event("segment_free", 0, 20), event("oom", 0, 999)]
    sums = [sum(size for size, _ in state.values()) for state in states[left:]]
    numbers = [sum(one["action"] == "alloc" for one in events[left : left + 1 + at]) for at in range(len(sums))]
    every = course(segments, sums[-1], 130)
    before = sums[0] - events[left]["size"] * (1 if events[left]["action"] == "alloc" else -1)
    assert every[0] == (0, before, 150)
    assert every[1:-1] == [(number, now, 150) for number, now in zip(numbers, sums, strict=True)]
    assert every[-1] == (numbers[-1], sums[-1], 130)
    monkeypatch.setattr(memory_recorder, "_MOST_POINTS", 7)
    few = course(segments, sums[-1], 130)
    assert len(few) <= 7
    assert max(now for _, now, _ in few) == max(before, *sums)
    assert few[0][2] == 150
    assert [number for number, _, _ in few] == sorted(number for number, _, _ in few)


LIBRARY = sysconfig.get_path("purelib")


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ([], "backward pass"),
        (["/work/train.py"], "/work/train.py:1 in f"),
        ([f"{LIBRARY}/torch/nn/linear.py", f"{LIBRARY}/models/llama.py", "/work/train.py", "/work/main.py"],
         "/work/train.py:1 in f, models/llama.py:1 in f"),
        ([f"{LIBRARY}/torch/utils/checkpoint.py", f"{LIBRARY}/models/llama.py"], "backward pass, models/llama.py:1 in f"),
        (["/tmp/torchinductor_me/ab/cd.py", f"{LIBRARY}/torch/_dynamo/x.py", "/work/train.py"],
         "/work/train.py:1 in f, code of torch.compile"),
        (["<frozen runpy>", "/work/train.py"], "/work/train.py:1 in f"),
    ],
)  # fmt: skip
def test_a_place_is_told_by_the_programs_line_and_the_librarys(files, where, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # which an import in this process may have set
    frames = [{"filename": file, "line": 1, "name": "f"} for file in files]
    assert memory_recorder._where(frames) == where


MODULE, OWN = f"{LIBRARY}/torch/nn/modules/module.py", "/work/train.py"


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        ([], "backward pass"),
        ([(f"{LIBRARY}/torch/autograd/function.py", "apply")], "backward pass"),
        ([(f"{LIBRARY}/torch/utils/checkpoint.py", "unpack_hook"), (MODULE, "_call_impl"), (OWN, "f")], "backward pass"),
        ([(MODULE, "convert"), (MODULE, "_apply"), (MODULE, "cuda"), (OWN, "<module>")], "weights and buffers"),
        ([(f"{LIBRARY}/torch/nn/modules/linear.py", "__init__"), (OWN, "__init__"), (OWN, "f")], "weights and buffers"),
        ([(OWN, "forward"), (MODULE, "_call_impl"), (OWN, "<module>")], "forward pass"),
        ([(f"{LIBRARY}/torch/utils/checkpoint.py", "checkpoint"), (MODULE, "_call_impl"), (OWN, "f")], "forward pass"),
        ([(f"{LIBRARY}/torch/optim/adamw.py", "step"), (MODULE, "_call_impl"), (OWN, "f")], "optimizer"),
        ([(f"{LIBRARY}/bitsandbytes/optim/optimizer.py", "step"), (OWN, "f")], "optimizer"),
        ([(OWN, "get_batch")], "the rest of the program"),
        # An editable installation is in no folder of libraries.
        ([(f"{memory_recorder._OWN}/emulated_values/operators.py", "run")], "backward pass"),
    ],
)
def test_memory_is_told_by_the_part_of_training_that_allocated_it(frames, part):
    found = [{"filename": file, "line": 1, "name": name} for file, name in frames]
    assert memory_recorder._part(found) == part
