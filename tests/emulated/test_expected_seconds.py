"""The seconds that are expected of a case of own code on an emulated H200, and when there are none."""

import textwrap

import pytest

PROGRAM = """
    import functools

    def train(setup, *, masked=False, launches=0, compiles=False):
        import torch
        import torch.nn.functional as F

        width, tokens, kind = 1024, 4096, {"device": setup.device, "dtype": torch.bfloat16}
        into, out = torch.nn.Linear(width, 3 * width, **kind), torch.nn.Linear(width, width, **kind)
        optimizer = torch.optim.AdamW([*into.parameters(), *out.parameters()])
        allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=setup.device) if masked else None
        pointwise = lambda x: F.gelu(x) * x.sigmoid() + x
        pointwise = torch.compile(pointwise) if compiles else pointwise
        x = torch.randn(2, tokens, width, **kind)
        ones = torch.ones(4, 256, **kind)
        while True:
            torch.bmm(ones[:, :, None], ones[:, None, :])  # which torch 2.13 computes by a kernel of Triton
            query, key, value = (part.view(2, tokens, 8, 128).transpose(1, 2) for part in into(x).chunk(3, -1))
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=not masked)
            loss = pointwise(out(attended.transpose(1, 2).reshape(2, tokens, width))).square().mean()
            for _ in range(launches):
                own_kernel()[(x.numel() // 1024,)](x, 1024)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    @functools.cache
    def own_kernel():
        import triton
        import triton.language as tl
        globals()["tl"] = tl

        @triton.jit
        def increase(to, count: tl.constexpr):
            place = tl.program_id(0) * count + tl.arange(0, count)
            tl.store(to + place, tl.load(to + place) + 1)

        return increase

    def check(gputrain, **knobs):
        gputrain.check(train, args=knobs, precision="bf16", batch_size=2, sequence_length=4096, steps=2, warmup=1)

    def test_plain(gputrain):
        check(gputrain)

    def test_masked(gputrain):
        check(gputrain, masked=True)

    def test_launching_once(gputrain):
        check(gputrain, launches=1)

    def test_launching_often(gputrain):
        check(gputrain, launches=8)

    def test_compiled(gputrain):
        check(gputrain, compiles=True)

    def test_ddp(gputrain):
        from pytest_gputrain import Case
        short = Case(model="transformer-big", precision="fp32", sequence_length=32, steps=1, warmup=1)
        gputrain.check(short.replace(parallel="ddp", gpus=8))
"""


@pytest.fixture(scope="module")
def expected(run_tests_in, tmp_path_factory):
    """What is expected of each test of the program."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "test_own.py").write_text(textwrap.dedent(PROGRAM))
    done, results = run_tests_in(folder, "--gpu-platform=h200")
    assert len(results) == 6, done.stdout
    return {name.removeprefix("test_"): result["reply"]["expected"] for name, result in results.items()}


def test_a_step_has_its_parts_and_an_interval(expected):
    plain = expected["plain"]
    assert set(plain["parts"]) == {"matrix products", "attention", "pointwise", "optimizer"}
    assert plain["low"] < plain["seconds"] < plain["high"]
    assert not plain["rough"]
    assert plain["unknown"] == ""
    assert plain["not_modelled"] == {}


def test_blocks_that_causality_skips_take_no_time_and_masked_ones_do(expected):
    plain, masked = (expected[name]["parts"]["attention"] for name in ("plain", "masked"))
    assert 1.4 * plain < masked < 2.2 * plain


def test_a_kernel_of_triton_is_not_known(expected):
    pytest.importorskip("triton")
    once, often = expected["launching_once"], expected["launching_often"]
    assert 0.01 < once["not_modelled"]["triton.increase"] < 0.05
    assert once["parts"] == expected["plain"]["parts"], "which are the same in every run"
    assert often["seconds"] is None
    assert often["unknown"].startswith("the kernels of triton.increase are not known")


def test_compiled_code_has_no_seconds(expected):
    assert expected["compiled"]["seconds"] is None
    assert expected["compiled"]["unknown"].startswith("how long kernels of torch.compile take is not known")


def test_gradients_that_several_gpus_exchange_take_time(expected):
    """They come back at once from a group without the other processes, and no operator exchanges them."""
    ddp = expected["ddp"]
    assert ddp["rough"]
    exchanged = 7 / 8 * 2 * 4 * 209e6 / 360e9  # of about 209 million parameters in fp32, scattered and gathered
    assert ddp["parts"]["communication"] == pytest.approx(0.1 * exchanged, rel=0.1)
