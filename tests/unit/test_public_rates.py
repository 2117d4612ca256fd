"""Published rates of boards, what follows from them for others, and how a board is calibrated."""

import tomllib

import calibrate
import msgspec
import pytest

from pytest_gputrain.hardware import rates as rates_module
from pytest_gputrain.hardware.rates import rates_of
from pytest_gputrain.hardware.step_time import expected_time
from pytest_gputrain.records import TracedCall

FILE = """
[sources.a]
title = "a"
measured = true
[sources.b]
title = "b"
[boards.h200.from.a]
products_16bit = 0.8
products_fp32 = 0.6
convolutions_16bit = 0.4
convolutions_tf32 = 0.3
products_tf32 = 0.5
pointwise = 0.6
gathers = 0.3
kernel_us = 3
[boards.a100]
like = "h200"
from.b = { products_16bit = 0.4, gathers = 0.5, pointwise = 0.9 }
[boards.a100_40gb]
like = "a100"
from.b = { products_16bit = 0.2, convolutions_16bit = 0.7 }
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "rates.toml"
    path.write_text(FILE)
    for module in (rates_module, calibrate):
        monkeypatch.setattr(module, "FILE", path)
    rates_of.cache_clear()
    yield path
    rates_of.cache_clear()


@pytest.mark.usefixtures("file")
def test_what_a_board_lacks_follows_from_the_board_that_it_is_like():
    a100, smaller = rates_of("a100"), rates_of("a100_40gb")
    assert a100.kinds == pytest.approx(
        {
            "products_16bit": 0.4,
            "products_fp32": 0.6,
            "products_tf32": 0.25,
            "convolutions_16bit": 0.2,
            "convolutions_tf32": 0.15,
            "pointwise": 0.9,
            "gathers": 0.5,
            "kernel_us": 3,
        }
    )
    assert smaller.kinds["convolutions_tf32"] == pytest.approx(0.075)
    assert smaller.kinds["convolutions_16bit"] == 0.7
    assert [rates_of(marker).measured for marker in ("h200", "a100", "a100_40gb")] == [True, False, False]
    assert rates_of("t4") is None
    like = rates_of("t4", like="h200").kinds
    assert like == {kind: rate for kind, rate in rates_of("h200").kinds.items() if kind != "link_gb"}


def test_each_published_rate_has_a_source_and_each_board_all_that_a_step_may_need():
    file = tomllib.loads(rates_module.FILE.read_text())
    used = {source for board in file["boards"].values() for source in board.get("from", {})}
    assert used == set(file["sources"])
    needed = set(rates_of("h200").kinds) - {"link_gb"}
    assert all(needed <= set(rates_of(marker).kinds) for marker in file["boards"])
    public = [marker for marker in file["boards"] if not rates_of(marker).measured]
    assert {"h100", "a100", "rtx_4090", "l40s", "rtx_3090", "t4", "v100", "rtx_pro_6000", "b200"} <= set(public)


def timed(kind, share, call, rates, factor=1.0):
    """A kernel that takes what is expected of it with another rate."""
    other = msgspec.structs.replace(rates, kinds=rates.kinds | {kind: share})
    return calibrate.Measured(kind, f"{call.read}", factor * expected_time([call], other).gpu_seconds, (call,))


def test_calibration_finds_the_rate_of_each_kind_and_how_far_each_kernel_is_off():
    rates = rates_of("h200")
    copies = [TracedCall(operator="mul", read=size, written=size) for size in (10**9, 2 * 10**9, 4 * 10**9)]
    sums = [TracedCall(operator="sum", read=size, written=1) for size in (10**9, 2 * 10**9)]
    found = [timed("pointwise", 0.5, call, rates) for call in copies]
    found += [timed("reductions", 0.25, sums[0], rates), timed("reductions", 0.25, sums[1], rates, factor=1.25)]
    found += [calibrate.Measured("step", name, 2.0 + (name == "b"), (copies[0],)) for name in ("base", "b")]
    kinds, lines = calibrate.fit(found, rates)
    assert kinds["pointwise"] == pytest.approx(0.5, rel=1e-6)
    assert 0.2 <= kinds["reductions"] <= 0.25
    assert "off by 0.0 % in the median and 0.0 % at most, each of 3 kernels left out" in lines[0]
    assert "off by 22.5 % in the median and 25.0 % at most, each of 2 kernels left out" in lines[1]
    assert lines[2].startswith("2 steps, to which nothing is fitted: off by 99.")
    assert lines[-1] == "b: +50.0 % was measured, +0.0 % is expected"


def test_the_entry_of_a_board_is_replaced_only_if_told(file):
    about = 'title = "mine"\nmeasured = true\n'
    written = calibrate.with_entry(FILE, "t4", {"pointwise": 0.7}, about, overwrite=False)
    again = calibrate.with_entry(written, "t4", {"pointwise": 0.6}, about, overwrite=True)
    file.write_text(again)
    assert (rates_of("t4").kinds["pointwise"], rates_of("t4").measured) == (0.6, True)
    assert rates_of("t4").kinds["gathers"] == pytest.approx(0.3)
    assert again == written.replace("pointwise = 0.700", "pointwise = 0.600")
    for marker in ("t4", "a100"):
        with pytest.raises(ValueError, match=f"has rates of {marker} already; add --overwrite"):
            calibrate.with_entry(written, marker, {}, "", overwrite=False)
    without = calibrate.with_entry(FILE, "a100", {"pointwise": 0.7}, about, overwrite=True)
    boards = tomllib.loads(without)["boards"]
    assert boards["a100"] == {"like": "h200", "from": {"calibrated-a100": {"pointwise": 0.7}}}
    assert boards["a100_40gb"] == tomllib.loads(FILE)["boards"]["a100_40gb"]
