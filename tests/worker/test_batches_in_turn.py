"""Own code with processes of a DataLoader: which of them is early changes no figure."""

import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info
from zoo_examples import MINE, measured, refused

# From Python 3.12 on; torch's DataLoader forks so, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # torchdata 0.11 calls it, and is the last release.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

BATCH = 4 * 64 * 64


class Uneven(torch.utils.data.Dataset):
    """Samples of which the first process is slow to load its own, so that those of all others arrive before their turn."""

    def __len__(self):
        return 6400

    def __getitem__(self, index):
        if get_worker_info().id == 0:
            time.sleep(0.002)
        return torch.ones(64)


class Resumable(Uneven):
    """A data set whose state has a tensor, which each process sends when it starts."""

    def state_dict(self):
        return {"generator": torch.zeros(500)}

    def load_state_dict(self, state):
        assert state["generator"].shape == (500,)


class Opaque:
    """A batch whose tensor no library finds."""

    def __init__(self, samples):
        self.samples = torch.stack(samples)


def training(workers, collate=None, kept=None, loader=DataLoader, **options):
    def loop(setup):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 4)
        optimizer = torch.optim.SGD(model.parameters())
        setup.watch(model)
        for batch in loader(Uneven(), 64, num_workers=workers, collate_fn=collate, **options):
            loss = model(getattr(batch, "samples", batch)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kept is not None:
                kept.append(batch)
            yield loss

    return loop


def stateful(*args, **kwargs):
    for name in [name for name in sys.modules if name.startswith("torchdata.")]:
        del sys.modules[name]
    from torchdata.stateful_dataloader import StatefulDataLoader  # as late as accelerate does

    return StatefulDataLoader(*args, **kwargs)


@pytest.mark.parametrize(("collate", "loader"), [(None, DataLoader), (Opaque, DataLoader), (Opaque, stateful)])
def test_memory_does_not_depend_on_which_process_is_early(collate, loader):
    one, two = (measured(MINE, training(workers, collate, loader=loader)) for workers in (1, 2))
    assert two.phase_peak_bytes == one.phase_peak_bytes
    lines = {line for tensor in two.largest["forward"] if tensor.operator == "aten.set_" for line in tensor.lines}
    assert [line.partition(":")[0] for line in lines] == ["tests/worker/test_batches_in_turn.py"]
    assert two.peak_allocated_bytes > 2 * BATCH, "the batch and the one before are counted"


def test_states_that_processes_send_are_counted():
    def resumable(dataset, *args, **kwargs):
        return stateful(Resumable(), *args, **kwargs)

    one, two = (measured(MINE, training(workers, Opaque, loader=resumable)) for workers in (1, 2))
    of_second = 4 * 500
    assert two.phase_peak_bytes == {phase: peak + of_second for phase, peak in one.phase_peak_bytes.items()}


def test_a_loader_that_is_in_use_before_memory_is_counted_is_followed():
    def figures(workers):
        batches = iter(stateful(Uneven(), 64, num_workers=workers, collate_fn=Opaque))
        return measured(MINE, training(workers, loader=lambda *args, **kwargs: batches))

    one, two = map(figures, (1, 2))
    assert two.phase_peak_bytes == one.phase_peak_bytes
    assert two.peak_allocated_bytes > 2 * BATCH


def test_no_thread_pins_batches_out_of_turn_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *args: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda"))
    assert measured(MINE, training(2, pin_memory=True)).peak_allocated_bytes > 2 * BATCH


def test_batches_that_are_kept_are_found_with_the_line_that_took_them():
    message = refused(MINE, training(2, kept=[]))
    assert "keeps 16.0 KiB more of tensors after every step, most of it float32 [64, 64] (16.0 KiB)" in message
    assert "set_ in tests/worker/test_batches_in_turn.py" in message
