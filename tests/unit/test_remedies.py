"""What makes a case fit that does not: the cheapest of the changes that are tried."""

import pytest
from unit_examples import CASE, emulated_run, live_tensor

from pytest_gputrain.gate.fit import Need
from pytest_gputrain.session.remedies import remedy
from pytest_gputrain.utils.units import GiB

LOGITS = live_tensor(bytes=9 * GiB)


def _unfit(**fields):
    return emulated_run(**{"fits": False, "peak_reserved_bytes": 99 * GiB, **fields})


class Machine:
    """Tells that a case fits if these knobs have these values."""

    def __init__(self, **cures):
        self.cures = cures
        self.asked = []

    def __call__(self, case):
        self.asked.append(case)
        fits = bool(self.cures) and all(getattr(case, knob) == value for knob, value in self.cures.items())
        return Need(fits, (35 if fits else 99) * GiB + GiB // 2)


BIG = CASE.replace(batch_size=8, activation_checkpointing=False)


@pytest.mark.parametrize(
    ("cures", "sentence", "tries"),
    [
        ({"optimizer": "adamw-fused"}, "optimizer=adamw-fused makes it fit, in 35.5 GiB", 1),
        ({"activation_checkpointing": True}, "activation_checkpointing=true makes it fit, in 35.5 GiB", 3),
        ({"batch_size": 4}, "batch_size=4, gradient_accumulation=2 makes it fit, in 35.5 GiB", 4),
        ({"batch_size": 2}, "batch_size=2, gradient_accumulation=4 makes it fit, in 35.5 GiB", 5),
        ({"batch_size": 1, "activation_checkpointing": True}, "batch_size=1, gradient_accumulation=8, activation_", 7),
        ({}, "makes it fit, which needs 99.5 GiB; spread it over more GPUs (parallel=fsdp)", 7),
    ],
)
def test_the_cheapest_change_that_fits_is_told(cures, sentence, tries):
    machine = Machine(**cures)
    assert sentence in remedy(BIG, _unfit(), machine)
    assert len(machine.asked) == tries
    assert {case.batch_size * case.gradient_accumulation for case in machine.asked} == {8}, "as many samples"


def test_a_loss_by_chunks_is_tried_where_logits_are_at_the_peak():
    at_peak = _unfit(largest={"backward": (LOGITS,)})
    machine = Machine(loss_chunks=16)
    assert remedy(BIG, at_peak, machine) == "loss_chunks=16 makes it fit, in 35.5 GiB"
    words = "9.00 GiB at the peak are logits (128,256 words wide), which a loss fused with the output layer never holds"
    assert words in remedy(BIG, at_peak, Machine())
    assert len(machine.asked) == 2
    for machine, run, case in (
        (Machine(), _unfit(largest={"backward": (live_tensor(shape=(4096,)),)}), BIG),
        (Machine(), at_peak, BIG.replace(loss_chunks=4)),
        (Machine(), at_peak, BIG.replace(model="gemma-2-9b")),
    ):
        remedy(case, run, machine)
        assert not [asked for asked in machine.asked if asked.loss_chunks == 16]
