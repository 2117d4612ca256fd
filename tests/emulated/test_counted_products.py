"""Products and convolutions that cuBLAS and cuDNN are asked for on an emulated GPU: their operations and their classes."""

import json
import textwrap

import pytest

PREAMBLE = """
    import ctypes, json
    import torch
    from torch.nn import functional as F
    from torch.utils.flop_counter import FlopCounterMode

    counters = ctypes.CDLL(None)

    def new(*shape, dtype=torch.bfloat16, last=False):
        tensor = torch.randn(shape, device="cuda", dtype=dtype)
        if last:
            tensor = tensor.contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
        return tensor.requires_grad_()

    def step(name, function):
        counters.gputrain_counters_begin()
        with FlopCounterMode(display=False) as counter:
            function().abs().square().mean().backward()
        counters.gputrain_counters_end()
        text = ctypes.create_string_buffer(1 << 20)
        counters.gputrain_counters_rows(text, ctypes.c_size_t(len(text)))
        rows = [line.split("\\t") for line in text.value.decode().splitlines()]
        calls = [(*row[1:4], int(row[-2]), int(row[-1])) for row in rows if row[0] == "library_calls"]
        print(json.dumps([name, calls, counter.get_total_flops()]))
"""


@pytest.fixture
def products(emulate):
    """Run the steps of a program on an emulated GPU: by name, calls of libraries, and the FLOPs that torch counts.

    Calls are (function, class, shape, their number, FLOPs of all of them), in the order of the first of each.
    """

    def run(code, **options):
        done, _ = emulate(textwrap.dedent(PREAMBLE) + textwrap.dedent(code), **options)
        assert done.returncode == 0, done.stderr
        return {name: (calls, flops) for name, calls, flops in map(json.loads, done.stdout.splitlines())}

    return run


def classes(calls):
    return [slow for _, slow, _, count, _ in calls for _ in range(count)]


EACH_TYPE = """
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        t = lambda *shape: new(*shape, dtype=dtype)
        step(f"mm {dtype}", lambda: t(64, 128) @ t(128, 96))
        step(f"addmm {dtype}", lambda: F.linear(t(64, 128), t(96, 128), t(96)))
        step(f"addmm of transposed {dtype}", lambda: torch.addmm(t(96), t(128, 64).t(), t(96, 128).t()))
        step(f"bmm {dtype}", lambda: torch.bmm(t(5, 64, 128), t(5, 128, 96)))
        step(f"baddbmm {dtype}", lambda: torch.baddbmm(t(5, 64, 96), t(5, 64, 128), t(5, 128, 96)))
        if not dtype.is_complex:
            step(f"conv1d {dtype}", lambda: F.conv1d(t(2, 16, 80), t(32, 16, 3)))
            step(f"conv2d {dtype}", lambda: F.conv2d(t(2, 16, 8, 8), t(32, 16, 3, 3), t(32), stride=2, padding=1))
            step(f"conv3d {dtype}", lambda: F.conv3d(t(2, 16, 8, 8, 8), t(32, 16, 3, 3, 3)))
            step(f"transposed {dtype}", lambda: F.conv_transpose2d(t(2, 32, 8, 8), t(32, 16, 3, 3), stride=2))
"""


def test_each_call_is_counted_once_with_the_flops_that_torch_counts(products):
    steps = products(EACH_TYPE)
    assert len(steps) == 5 * 5 + 4 * 4
    for name, (calls, flops) in steps.items():
        assert len(classes(calls)) == 3, name  # forward, and backward to either side
        assert sum(call[-1] for call in calls) == flops > 0, name


def test_flops_of_attention_in_cudnn_are_those_that_torch_counts(products):
    steps = products("""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attention = F.scaled_dot_product_attention
            step("other values", lambda: attention(new(2, 4, 64, 32), new(2, 4, 128, 32), new(2, 4, 128, 48)))
            step("shared", lambda: attention(new(2, 4, 64, 32), new(2, 2, 64, 32), new(2, 2, 64, 32), enable_gqa=True))
    """)
    assert len(steps) == 2
    for calls, flops in steps.values():
        assert sum(call[-1] for call in calls) == flops > 0
        assert classes(calls) == ["", ""]


def test_flops_of_grouped_convolutions_are_those_of_their_groups(products):
    # torch's counter takes the gradient of the weights for one of all channels.
    calls, _ = products("""step("grouped", lambda: F.conv2d(new(2, 32, 8, 8), new(64, 8, 3, 3), groups=4))""")["grouped"]
    assert sum(call[-1] for call in calls) == 3 * 2 * (2 * 64 * 6 * 6) * (8 * 3 * 3)


def test_fp32_is_a_class_of_products_where_tf32_is_not_allowed(products):
    steps = products("""
        for allowed in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            for dtype in (torch.float32, torch.complex64, torch.float16, torch.float64):
                t = lambda *shape: new(*shape, dtype=dtype)
                step(f"mm {dtype} {allowed}", lambda: t(64, 128) @ t(128, 96))
                step(f"addmm {dtype} {allowed}", lambda: F.linear(t(64, 128), t(96, 128), t(96)))
                step(f"bmm {dtype} {allowed}", lambda: torch.bmm(t(5, 64, 128), t(5, 128, 96)))
    """)
    slow = {name for name, (calls, _) in steps.items() if classes(calls) == ["fp32"] * 3}
    kinds = ("mm", "addmm", "bmm")
    assert slow == {f"{kind} torch.{dtype} False" for kind in kinds for dtype in ("float32", "complex64")}
    assert all(classes(calls) == [""] * 3 for name, (calls, _) in steps.items() if name not in slow)
    assert steps["bmm torch.float32 False"][0][0][2] == "5 x 64 x 96 x 128 fp32"
    assert steps["addmm torch.float32 False"][0][0][:3] == ["cublasLtMatmul", "fp32", "64 x 96 x 128 fp32"]


def test_rows_that_start_at_no_multiple_of_16_bytes_are_a_class_forward_and_backward(products):
    steps = products("""
        torch.backends.cuda.matmul.allow_tf32 = True
        for outputs in (50257, 50304):
            step(f"head of {outputs}", lambda: F.linear(new(64, 512), new(outputs, 512)).float())
            step(f"head of {outputs} and a bias", lambda: F.linear(new(64, 512), new(outputs, 512), new(outputs)).float())
        step("of fp32", lambda: new(64, 66, dtype=torch.float32) @ new(66, 64, dtype=torch.float32))
        step("of fp64", lambda: new(64, 65, dtype=torch.float64) @ new(65, 64, dtype=torch.float64))
        step("part of wide rows", lambda: new(64, 128)[:, :65] @ new(65, 64))
    """)
    odd, even = steps["head of 50257"][0], steps["head of 50304"][0]
    assert [call[:2] for call in odd] == [["cublasGemmEx", "unaligned"]] * 3
    assert odd[0][2] == "64 x 50257 x 512 bf16"
    assert {call[2] for call in odd[1:]} == {"64 x 512 x 50257 bf16", "50257 x 512 x 64 bf16"}
    assert classes(even) == classes(steps["head of 50304 and a bias"][0]) == classes(steps["of fp64"][0]) == [""] * 3
    assert classes(steps["head of 50257 and a bias"][0]) == ["unaligned"] * 3
    assert steps["of fp32"][0][0][1:3] == ["unaligned", "64 x 64 x 66 tf32"]
    assert steps["part of wide rows"][0][0][1] == ""


def test_where_the_numbers_of_a_matrix_and_of_a_batch_start_counts_too(products):
    steps = products("""
        step("a matrix", lambda: new(64 * 64 + 1)[1:].view(64, 64) @ new(64, 64))
        step("a batch", lambda: torch.bmm(new(4, 64 * 64 + 1)[:, :-1].view(4, 64, 64), new(4, 64, 64)))
    """)
    assert {name: classes(calls)[0] for name, (calls, _) in steps.items()} == dict.fromkeys(steps, "unaligned")


def test_products_with_vectors_have_no_class(products):
    steps = products("""
        for dtype in (torch.bfloat16, torch.float32):  # without TF32
            t = lambda *shape: new(*shape, dtype=dtype)
            step(f"one row {dtype}", lambda: F.linear(t(1, 511), t(77, 511)))
            step(f"one column {dtype}", lambda: F.linear(t(77, 511), t(1, 511)))
            step(f"outer {dtype}", lambda: t(511, 1) @ t(1, 77))
            step(f"vector {dtype}", lambda: t(77, 511) @ t(511))
            step(f"vectors {dtype}", lambda: torch.bmm(t(5, 1, 511), t(5, 511, 77)))
    """)
    assert len(steps) == 10
    for name, (calls, _) in steps.items():
        assert calls, name
        assert set(classes(calls)) == {""}, name


def test_nchw_is_a_class_of_convolutions_that_channels_last_has_not(products):
    steps = products("""
        for last in (True, False):
            for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                t = lambda *shape: new(*shape, dtype=dtype, last=last)
                step(f"2d {dtype} {last}", lambda: F.conv2d(t(2, 16, 8, 8), t(32, 16, 3, 3)))
                step(f"3d {dtype} {last}", lambda: F.conv3d(t(2, 16, 8, 8, 8), t(32, 16, 3, 3, 3)))
                step(f"1x1 {dtype} {last}", lambda: F.conv2d(t(2, 16, 8, 8), t(32, 16, 1, 1)))
                step(f"groups {dtype} {last}", lambda: F.conv2d(t(2, 32, 8, 8), t(64, 8, 3, 3), groups=4))
                step(f"transposed {dtype} {last}", lambda: F.conv_transpose2d(t(2, 32, 8, 8), t(32, 16, 3, 3)))
    """)
    slow = {name for name, (calls, _) in steps.items() if classes(calls) == ["nchw"] * 3}
    kinds, types = ("2d", "3d", "1x1", "groups", "transposed"), ("float16", "bfloat16", "float32")
    assert slow == {f"{kind} torch.{dtype} False" for kind in kinds for dtype in types}
    assert all(classes(calls) == [""] * 3 for name, (calls, _) in steps.items() if name not in slow)
    assert steps["2d torch.float16 False"][0][0][2] == "2 x 16 x 8 x 8 with 32 x 16 x 3 x 3 fp16"
    assert steps["3d torch.float32 False"][0][0][2] == "2 x 16 x 8 x 8 x 8 with 32 x 16 x 3 x 3 x 3 tf32"


def test_what_has_one_pixel_lies_in_either_order(products):
    calls, _ = products("""step("one", lambda: F.conv2d(new(2, 16, 1, 1), new(32, 16, 1, 1)))""")["one"]
    assert classes(calls) == [""] * 3


def test_channels_of_no_multiple_of_16_bytes_are_a_class_unless_they_are_those_of_images(products):
    steps = products("""
        t = lambda *shape: new(*shape, last=True)
        step("read", lambda: F.conv2d(t(2, 60, 8, 8), t(64, 60, 3, 3)))
        step("made", lambda: F.conv2d(t(2, 64, 8, 8), t(60, 64, 3, 3)))
        step("image", lambda: F.conv2d(t(2, 3, 8, 8), t(64, 3, 3, 3)))
        step("latent made", lambda: F.conv2d(t(2, 64, 8, 8), t(4, 64, 3, 3)))
    """)
    assert classes(steps["read"][0]) == classes(steps["made"][0]) == ["unaligned"] * 3
    assert classes(steps["image"][0]) == classes(steps["latent made"][0]) == [""] * 3


@pytest.mark.parametrize("last", [True, False])
def test_fp32_is_a_class_of_convolutions_where_tf32_is_not_allowed(products, last):
    steps = products(f"""
        for allowed in (True, False):
            torch.backends.cudnn.allow_tf32 = allowed
            for dtype in (torch.float32, torch.float16, torch.float64):
                t = lambda *shape: new(*shape, dtype=dtype, last={last})
                step(f"{{dtype}} {{allowed}}", lambda: F.conv2d(t(2, 16, 8, 8), t(32, 16, 3, 3)))
    """)
    assert [name for name, (calls, _) in steps.items() if "fp32" in classes(calls)] == ["torch.float32 False"]
    assert classes(steps["torch.float32 False"][0]) == ["fp32"] * 3
    assert steps["torch.float32 False"][0][0][2] == "2 x 16 x 8 x 8 with 32 x 16 x 3 x 3 fp32"


def test_a_benchmark_of_engines_takes_one_with_tensor_cores_where_tf32_is_allowed(products):
    steps = products("""
        torch.backends.cudnn.benchmark = True
        for allowed in (True, False):
            torch.backends.cudnn.allow_tf32 = allowed
            t = lambda *shape: new(*shape, dtype=torch.float32, last=True)
            step(f"{allowed}", lambda: F.conv2d(t(2, 16, 8, 8), t(32, 16, 3, 3)))
            step(f"{allowed} again", lambda: F.conv2d(t(2, 16, 8, 8), t(32, 16, 3, 3)))
    """)
    assert {name: set(classes(calls)) for name, (calls, _) in steps.items()} == {
        "True": {""},
        "True again": {""},
        "False": {"fp32"},
        "False again": {"fp32"},
    }
    assert [len(classes(steps[f"{allowed} again"][0])) for allowed in (True, False)] == [3, 3]


def test_convolutions_of_each_channel_apart_have_no_class(products):
    steps = products("""
        torch.backends.cudnn.allow_tf32 = False
        for last in (True, False):
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                t = lambda *shape: new(*shape, dtype=dtype, last=last)
                step(f"{dtype} {last}", lambda: F.conv2d(t(2, 32, 8, 8), t(32, 1, 3, 3), groups=32))
    """)
    assert any(calls for calls, _ in steps.values())
    assert {slow for calls, _ in steps.values() for slow in classes(calls)} == {""}


def test_a_gpu_without_tensor_cores_for_a_type_has_no_classes_of_it(products):
    steps = products(
        """
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            t = lambda *shape: new(*shape, dtype=dtype)
            step(f"product {dtype}", lambda: t(64, 65) @ t(65, 64))
            step(f"convolution {dtype}", lambda: F.conv2d(t(2, 16, 8, 8), t(32, 16, 3, 3)))
        """,
        gpu="t4",
    )
    assert {name for name, (calls, _) in steps.items() if any(classes(calls))} == {
        "product torch.float16",
        "convolution torch.float16",
    }


CASE = """
    def train(setup):
        import torch
        from torch import nn

        body, head = nn.Linear(512, 512), nn.Linear(512, 1001)
        model = nn.Sequential(body, head).to(setup.device, torch.bfloat16)
        setup.watch(model)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            hidden = body(torch.randn(64, 512, device=setup.device, dtype=torch.bfloat16))
            loss = head(hidden).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    def test_train(gputrain):
        gputrain.check(train, precision="bf16", batch_size=64)
"""


def test_a_case_has_the_operations_of_each_class_and_their_line(run_tests, tmp_path):
    (tmp_path / "test_own.py").write_text(textwrap.dedent(CASE))
    _, results = run_tests()
    counts = results["test_train"]["reply"]["counts"]
    last = counts["kinds"][counts["steps"][-1]]
    slow = 3 * 2 * 64 * 512 * 1001
    assert last["slow_flops"] == {"unaligned": slow}
    assert last["library_flops"] == slow + 2 * 2 * 64 * 512 * 512
    causes = [cause for cause in counts["causes"] if cause.get("slow")]
    assert {cause["own"]["text"] for cause in causes} == {"loss = head(hidden).float().square().mean()"}
    assert {cause["shape"] for cause in causes if not cause.get("backward")} == {"64 x 1001 x 512 bf16"}
