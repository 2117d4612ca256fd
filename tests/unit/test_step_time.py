"""Expected seconds: kernels by hand, and steps that were measured on an H200, each foretold without its own time."""

import math
import re
import statistics
import tomllib

import msgspec
import pytest
import step_time_errors

from pytest_gputrain.hardware import rates as rates_module
from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.hardware.rates import rates_of
from pytest_gputrain.hardware.step_time import expected_time
from pytest_gputrain.records import Rates, TracedCall

RATES = Rates(
    board="h200",
    flops={"bf16": 1e15, "fp32": 5e13, "tf32": 5e14},
    bandwidth=4e12,
    multiprocessors=100,
    kinds={
        "products_16bit": 0.8,
        "products_fp32": 0.5,
        "attention_cudnn": 0.5,
        "attention_cudnn_backward": 0.4,
        "convolutions_tf32": 0.4,
        "pointwise": 0.5,
        "reductions": 0.4,
        "gathers": 0.25,
        "thin_products": 0.25,
        "kernel_us": 0,
        "wave_us": 0,
        "step_us": 0,
        "call_us": 0,
        "l2_mb": 50,
    },
    measured=True,
)
"""Round figures: pointwise kernels move 2 TB/s, products in bf16 do 8 TFLOP/s on each of 100 multiprocessors."""
COPY = TracedCall(operator="mul", read=10**9, written=10**9)


def with_kinds(**kinds):
    return msgspec.structs.replace(RATES, kinds=RATES.kinds | kinds)


def product(rows, inner, columns, **fields):
    moved = {"read": 2 * inner * (rows + columns), "written": 2 * rows * columns}
    moved["shapes"] = (rows, inner), (inner, columns)
    return TracedCall(operator="mm", dtype="bf16", flops=2 * rows * inner * columns, **moved | fields)


def attention(*flags, backward=False, tokens=9000, **fields):
    shape = (1, 16, tokens, 128)
    name = f"_scaled_dot_product_cudnn_attention{'_backward' if backward else ''}"
    flops = (5 if backward else 2) * 2 * 16 * tokens**2 * 128
    return TracedCall(operator=name, shapes=(shape,) * 4, dtype="bf16", flags=flags, flops=flops, **fields)


CONVOLUTION = TracedCall(
    operator="convolution",
    shapes=((8, 64, 56, 56), (64, 64, 3, 3)),
    dtype="fp32",
    flags=("tf32",),
    flops=10**12,
    read=10**9,
    written=10**9,
)


@pytest.mark.parametrize(
    ("call", "part", "seconds"),
    [
        (COPY, "pointwise", 1e-3),
        (msgspec.structs.replace(COPY, count=7), "pointwise", 7e-3),
        (msgspec.structs.replace(COPY, flags=("optimizer",)), "optimizer", 1e-3),
        (msgspec.structs.replace(COPY, operator="copy_"), "pointwise", 0.5e-3),
        (msgspec.structs.replace(COPY, operator="native_layer_norm"), "pointwise", 2e9 / 1.6e12),
        (TracedCall(operator="embedding", read=10**12, written=10**9), "pointwise", 2e9 / 1e12),
        (TracedCall(operator="mul", read=4 * 10**6, written=4 * 10**6), "pointwise", 8e6 / 2e12 / 1.6),
        (TracedCall(operator="view", flags=("view",)), "pointwise", 0),
        (msgspec.structs.replace(COPY, operator="fsdp.chunk_cat"), "pointwise", 1e-3),
        (TracedCall(operator="_unsafe_view", read=10**9, written=10**9), "pointwise", 0),
        # 100 tiles of 256 x 128 are one wave; with one row more five waves of 64 x 128 take less than two.
        (product(2560, 4096, 1280), "matrix products", 2 * 256 * 128 * 4096 / 8e12),
        (product(2561, 4096, 1280), "matrix products", 5 * 2 * 64 * 128 * 4096 / (0.8 * 8e12)),
        (product(16384, 8, 4096), "matrix products", 2 * (8 * (16384 + 4096) + 16384 * 4096) / 1e12),
        (product(2561, 4096, 1280, shapes=((2561, 4096), (0,))), "matrix products", 2 * 2561 * 4096 * 1280 / 8e14),
        (
            TracedCall(
                operator="bmm", shapes=((16, 512, 128), (16, 128, 512)), dtype="bf16", flops=16 * 2 * 512 * 128 * 512
            ),
            "matrix products",
            3 * 2 * 128 * 128 * 128 / (0.93 * 8e12),
        ),
        (
            TracedCall(operator="bitsandbytes.gemm_4bit", shapes=((8, 64),), dtype="bf16", flops=8 * 10**11, read=10**9),
            "matrix products",
            1e-3 + 3 * 1e9 / 2e12,
        ),
        (
            msgspec.structs.replace(
                attention("causal"), operator="_cudnn_attention_forward", shapes=((1, 9000, 16, 128),) * 3
            ),
            "attention",
            2 * 16 * 9000**2 * 128 / 5e14 * (1 + 900 / 9000),
        ),
        (
            msgspec.structs.replace(CONVOLUTION, shapes=((8, 64, 56, 56), (64, 1, 3, 3)), flags=("tf32", "grouped")),
            "convolutions",
            3 * 2e9 / 2e12,
        ),
        (attention(), "attention", 4 * 16 * 9000**2 * 128 / 5e14 * (1 + 200 / 9000)),
        (attention("causal"), "attention", 2 * 16 * 9000**2 * 128 / 5e14 * (1 + 900 / 9000)),
        (attention("causal", "masked"), "attention", 4 * 16 * 9000**2 * 128 / 5e14 * (1 + 200 / 9000)),
        (attention("causal", backward=True), "attention", 5 * 16 * 9000**2 * 128 / 4e14 * (1 + 1200 / 9000)),
        (CONVOLUTION, "convolutions", 1e12 / 2e14 + 4e9 / 2e12),
        (msgspec.structs.replace(CONVOLUTION, flags=("tf32", "channels_last")), "convolutions", 1e12 / 2e14 + 2e9 / 2e12),
    ],
)
def test_a_kernel_takes_what_it_does_by_hand(call, part, seconds):
    parts = expected_time([call], RATES).parts
    assert parts.get(part, 0) == pytest.approx(seconds, rel=1e-9)
    assert sum(parts.values()) == parts.get(part, 0)


def test_each_kernel_wave_step_and_call_takes_a_start():
    two = [msgspec.structs.replace(COPY, count=2), product(2560, 4096, 1280), TracedCall(operator="view", flags=("view",))]
    plain = expected_time(two, RATES)
    assert expected_time(two, with_kinds(kernel_us=5)).gpu_seconds == pytest.approx(plain.gpu_seconds + 3 * 5e-6)
    assert expected_time(two, with_kinds(wave_us=5)).gpu_seconds == pytest.approx(plain.gpu_seconds + 5e-6)
    assert expected_time(two, with_kinds(step_us=5)).seconds == pytest.approx(plain.seconds + 5e-6)
    hosted = expected_time(two, with_kinds(call_us=5))
    assert hosted.host_seconds == pytest.approx(4 * 5e-6)
    assert hosted.seconds == plain.seconds
    assert not hosted.host_bound
    assert hosted.dominant == ("pointwise", pytest.approx(plain.parts["pointwise"] / plain.gpu_seconds))


def test_steps_to_an_update_share_its_time():
    calls = [COPY, msgspec.structs.replace(COPY, flags=("optimizer",), count=4)]
    assert expected_time(calls, RATES, accumulation=8).seconds == pytest.approx(1.5e-3)
    assert expected_time(calls, with_kinds(call_us=1), accumulation=8).host_seconds == pytest.approx(1.5e-6)


def test_a_step_that_waits_for_the_host_takes_the_time_of_the_host():
    bound = expected_time([msgspec.structs.replace(COPY, count=10)], with_kinds(call_us=4000))
    assert bound.host_bound
    assert (bound.seconds, bound.gpu_seconds) == (pytest.approx(0.04), pytest.approx(0.01))
    assert bound.dominant == ("host", pytest.approx(0.75))


def test_the_interval_is_wide_where_nothing_was_measured_on_the_board():
    measured = expected_time([COPY], RATES)
    assert (measured.low, measured.high, measured.rough) == (pytest.approx(0.85e-3), pytest.approx(1.25e-3), False)
    public = expected_time([COPY], msgspec.structs.replace(RATES, measured=False))
    assert (public.low, public.high, public.rough) == (pytest.approx(0.7e-3), pytest.approx(2e-3), True)


@pytest.mark.parametrize(
    ("calls", "rates", "why"),
    [
        ([COPY], None, "what kernels sustain on this GPU"),
        (
            [COPY, TracedCall(operator="flash_attn._flash_attn_forward", read=10**9)],
            RATES,
            "_flash_attn_forward are",
        ),
        ([COPY, TracedCall(operator="mine.attention", dtype="bf16", flops=10**12)], RATES, "mine.attention are"),
        ([COPY, TracedCall(operator="_native_multi_head_attention", read=10**9)], RATES, "_native_multi_head_attention are"),
        ([COPY, TracedCall(operator="triton.mine", read=10**9)], RATES, "triton.mine are not known"),
        (
            [COPY, attention(read=10**9)],
            msgspec.structs.replace(RATES, flops={"fp32": 5e13}),
            "cudnn_attention are",
        ),
        (
            [COPY, msgspec.structs.replace(attention(read=10**9), operator="_scaled_dot_product_flash_attention")],
            RATES,
            "flash_attention are not known",
        ),
    ],
)
def test_there_are_no_seconds_where_a_large_part_is_not_known(calls, rates, why):
    expected = expected_time(calls, rates)
    assert (expected.seconds, expected.low, expected.high, expected.dominant is None) == (None, None, None, rates is None)
    assert why in expected.unknown


@pytest.mark.parametrize("name", ["_cudnn_rnn", "_int_mm", "_cdist_forward", "linalg_qr", "_fft_r2c", "_ctc_loss", "addmm_"])
def test_an_operator_that_computes_without_a_formula_is_not_taken_for_a_copy(name):
    assert f"{name} are not known" in expected_time([COPY, msgspec.structs.replace(COPY, operator=name)], RATES).unknown


@pytest.mark.parametrize("name", ["linalg_vector_norm", "native_layer_norm", "relu_", "silu_backward", "_weight_norm"])
def test_an_operator_that_only_moves_memory_is_known(name):
    assert expected_time([msgspec.structs.replace(COPY, operator=name)], RATES).seconds


def test_grouped_convolutions_are_not_known():
    grouped = msgspec.structs.replace(CONVOLUTION, shapes=((8, 64, 56, 56), (64, 4, 3, 3)), flags=("tf32", "grouped"))
    assert "grouped convolutions are not known" in expected_time([COPY, grouped], RATES).unknown


def test_a_board_without_tf32_convolves_in_fp32():
    flops = {"fp32": 5e13, "fp16": 1e14}
    rates = msgspec.structs.replace(with_kinds(convolutions_fp32=0.8), flops=flops)
    assert expected_time([CONVOLUTION], rates).gpu_seconds == pytest.approx(1e12 / 4e13 + 4e9 / 2e12)
    assert [marker for marker in ("v100", "t4", "a100") if "tf32" in rates_of(marker).flops] == ["a100"]


def test_functional_collectives_exchange_what_those_of_c10d_do_and_waiting_exchanges_nothing():
    names = ("c10d.allreduce_", "_c10d_functional.all_reduce", "_c10d_functional.wait_tensor")
    one, other, wait = (TracedCall(operator=name, read=10**9, written=10**9) for name in names)
    steps = ([COPY, one], [COPY, other, wait])
    assert len({expected_time(calls, with_kinds(link_gb=100), processes=2).seconds for calls in steps}) == 1


def test_copies_over_pcie_are_not_known():
    few, many = (
        expected_time([COPY, TracedCall(operator="copy_", flags=("host",), written=size)], RATES) for size in (10**6, 10**7)
    )
    assert few.seconds == pytest.approx(1e-3)
    assert few.not_modelled == {"copies between the host and the GPU": pytest.approx(0.04 / 1.04)}
    assert many.seconds is None
    assert expected_time([COPY], RATES, lacking="it offloads").unknown == "it offloads"


def test_attention_by_a_kernel_without_a_rate_counts_by_its_flops():
    other = msgspec.structs.replace(attention(), operator="_scaled_dot_product_flash_attention")
    seconds = other.flops / (0.2 * 1e15)
    steps = [msgspec.structs.replace(COPY, count=count) for count in (10, 1000)]
    assert expected_time([steps[0], other], RATES).seconds is None
    told = expected_time([steps[1], other], RATES)
    assert told.not_modelled == {"_scaled_dot_product_flash_attention": pytest.approx(seconds / (1 + seconds))}


def test_several_gpus_need_a_known_link_and_exchanges_that_are_seen():
    exchanging = [COPY, TracedCall(operator="c10d.allreduce_", read=10**9)]
    linked = with_kinds(link_gb=100)
    for calls, rates in ((exchanging, RATES), ([COPY], linked)):
        assert expected_time(calls, rates, processes=2).unknown == (
            "it is not known how fast these GPUs exchange data with each other"
        )
    for processes, share in ((2, 1 / 2), (8, 7 / 8)):
        link = 2 * share * 1e9 / 1e11
        told = expected_time(exchanging, linked, processes=processes).parts["communication"]
        assert told == pytest.approx(link - 1e-3 + 0.1 * 1e-3)
    assert expected_time(exchanging, linked, processes=2).rough, "since no step of several GPUs was measured"
    assert "accumulated" in expected_time(exchanging, linked, processes=2, accumulation=8).unknown
    assert expected_time(exchanging, linked, processes=9).seconds is None
    assert expected_time(exchanging, RATES).seconds == pytest.approx(1e-3), "one process alone exchanges nothing"


def test_processes_that_send_to_each_other_may_wait_for_as_long_as_a_stage_takes():
    sending = [COPY, TracedCall(operator="c10d.send", read=10**6)]
    assert expected_time(sending, with_kinds(link_gb=100), processes=2).unknown.endswith("what others send to them")


def test_a_small_part_that_is_not_known_is_told():
    expected = expected_time([COPY, TracedCall(operator="mine.small", read=10**6)], RATES)
    assert expected.seconds == pytest.approx(1e-3)
    assert expected.not_modelled == {"mine.small": pytest.approx(10 * 1e6 / 4e12 / 1e-3, rel=0.01)}


@pytest.mark.parametrize(("size", "seconds"), [(10**8, 1e-3 + 0.1e-3), (10**10, 10e-3 + 0.1e-3)])
def test_an_exchange_hides_behind_a_step_that_is_longer(size, seconds):
    exchange = TracedCall(operator="c10d.allgather_", read=size, written=size // 2)
    expected = expected_time([COPY, exchange], with_kinds(link_gb=500 if size > 10**9 else 50), processes=2)
    assert expected.seconds == pytest.approx(seconds)
    assert expected.gpu_seconds == pytest.approx(1e-3)
    assert expected.dominant[0] == ("communication" if size > 10**9 else "pointwise")


def test_figures_of_the_file_are_of_boards_and_kinds_that_there_are():
    file = tomllib.loads(rates_module.FILE.read_text())
    told = set(re.findall(r"\w+", rates_module.FILE.read_text().split("[sources")[0]))
    kernels = {f"attention_{kernel}{end}" for kernel in ("cudnn", "flash", "efficient") for end in ("", "_backward")}
    for marker in file["boards"]:
        rates = rates_of(marker)
        assert set(rates.kinds) <= told | kernels
        units = ("_us", "_mb", "_gb")
        shares = {name: value for name, value in rates.kinds.items() if not name.endswith(units)}
        assert all(0.05 <= share <= 1.4 for share in shares.values()), shares
        assert rates.flops["fp32"] == PLATFORMS[marker].peak_flops["fp32"]
    assert rates_of("h200").measured
    assert rates_of("h20_3e") is None


def test_steps_of_an_h200_are_foretold_without_their_own_times():
    errors = step_time_errors.errors_on_h200()
    assert len(errors) == 19
    left_out, families = ([abs(getattr(error, name)) for error in errors] for name in ("left_out", "family_left_out"))
    assert statistics.median(left_out) <= 0.06
    assert max(left_out) <= 0.25
    assert statistics.median(families) <= 0.10
    inside = [error.estimate.low <= error.step.seconds <= error.estimate.high for error in errors]
    assert sum(inside) >= 0.85 * len(errors)
    bound = {error.step.name for error in errors if error.estimate.host_bound}
    assert bound == {"ctr-dnn-full-fp32", "sd3-lora-fp16-amp", "sdxl-full-bf16", "sdxl-lora-bf16", "word2vec-full-fp32"}


def test_the_page_has_the_errors_of_each_step():
    page = (step_time_errors.ROOT / "docs/how-true.md").read_text()
    assert [row for row in step_time_errors.rows(step_time_errors.errors_on_h200()) if row not in page] == []


def test_rates_of_the_file_are_those_that_the_fit_finds():
    rates = rates_of("h200")
    fitted = step_time_errors.with_factors(rates, step_time_errors.Fit(step_time_errors.read("h200"), rates).factors)
    assert all(math.isclose(fitted.kinds[name], value, rel_tol=0.02) for name, value in rates.kinds.items())
