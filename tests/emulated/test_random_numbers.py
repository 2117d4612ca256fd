"""Random numbers of an emulated GPU. Needs a CUDA build of torch, and no GPU.

The expected numbers are those that public threads, tests and lessons print, drawn on many kinds of GPUs: in issues 47347,
62467, 79496, 143086 and 158398 of torch, in TensorRT-LLM's and FlashInfer's tests and documentation, and elsewhere.
"""

import textwrap

import pytest


@pytest.fixture
def emulate(emulate):
    """Run a program on an emulated H100: the lines that it printed, and the report of its process."""

    def run(*parts, **options):
        done, report = emulate("\n".join(["import torch", *(textwrap.dedent(part) for part in parts)]), **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), report["processes"][0]

    return run


RANDN_OF_SEED_0 = """
    -0.9247 -0.4253 -2.6438  0.1452 -0.1209 -0.5797 -0.6229 -0.3284 -1.0745 -0.3631 -1.6711  2.2655  0.3117 -0.1842  1.2866
     1.1820 -0.1271  1.2169  1.4353  1.0605 -0.4941 -1.4244 -0.7244 -1.2973  0.0697 -0.0074  1.8969  0.6878 -0.0779 -0.8373
     1.3506 -0.2879 -0.5965 -0.3283 -0.9086 -0.8059 -0.7407 -0.0504  0.5435  1.5150  0.0141  0.4532  1.6349  0.7124 -0.1806
     1.0252 -1.4622 -0.7554 -0.1836  0.3824  0.3918 -0.0830  0.8971 -1.1123  0.1116  0.4863 -0.5499 -0.3231 -0.5469  0.9049
     0.2837  0.1210  0.4730 -1.0823
"""
PRINTED_BY_GPUS = {
    "seed(0), torch.rand(10, device='cuda')": "0.3990 0.5167 0.0249 0.9401 0.9459 0.7967 0.4150 0.8203 0.2290 0.9096",
    "torch.rand(10, device='cuda')": "0.9722 0.7910 0.4690 0.3300 0.3345 0.3783 0.7640 0.6405 0.1103 0.3594",
    "seed(42), torch.rand(3, 4, device='cuda')": (
        "0.6130 0.0101 0.3984 0.0403 0.1563 0.4825 0.7362 0.4060 0.5189 0.2867 0.2416 0.9228"
    ),
    "seed(0), torch.randn(8, 8, device='cuda')": RANDN_OF_SEED_0,
    "seed(1), torch.randn(2, 10, device='cuda')": """
        -0.2963  2.6764 -0.1408 -0.8441  0.2905 -0.2838 -1.4535  2.3737 -0.0177 -2.7884
        -0.3788  0.7046 -1.3956 -0.1248 -0.9259 -1.5463 -0.4902  0.0244 -1.5992 -0.8469
    """,
    "seed(1), torch.randn(1000, device='cuda')[:0]": "",
    "torch.randn(3, device='cuda')": "-0.6340 -0.6431 -0.6420",
    "seed(10), torch.randn(3, device='cuda')": "-0.1029 1.6810 -0.2708",
    "seed(42), torch.randn(2, 5, device='cuda')": (
        "0.1940 2.1614 -0.1721 0.8491 -1.9244 0.6530 -0.6494 -0.8175 0.5280 -1.2753"
    ),
    "seed(1234), torch.randn(3, device='cuda')": "-1.6165 0.5685 -0.5102",
    "seed(0), torch.randn(2, 8, device='cuda', dtype=torch.float64)": (
        "-0.3104 -0.0343 0.1756 -2.2804 0.5039 0.5596 -0.0750 0.9691 "
        "-0.2357 -0.4582 0.5661 1.2851 -1.8667 -0.0312 1.2433 1.3689"
    ),
    "seed(0), torch.randint(0, 100, (4, 128), device='cuda')[:0]": "",
    "torch.randint(0, 100, (4,), device='cuda')": "64 30 43 74",
    "seed(42), torch.randn(4, 4, 3, device='cuda')[:0]": "",
    "torch.randint(0, 100, (4, 1), device='cuda')": "3 69 0 24",
    "torch.randn(3, device='cuda', generator=torch.Generator('cuda').manual_seed(43))[:1]": "1.9983",
    "seed(0), torch.distributions.Uniform(*torch.tensor([0.0, 1.0], device='cuda')).rsample((5,))": (
        "0.3990 0.5167 0.0249 0.9401 0.9459"
    ),
}


def test_numbers_are_those_that_gpus_print_for_a_seed(emulate):
    lines, process = emulate(
        """
        seed = torch.manual_seed
        def show(numbers):
            numbers = numbers[1] if isinstance(numbers, tuple) else numbers
            form = "{:.4f}" if numbers.is_floating_point() else "{}"
            print(*(form.format(number) for number in numbers.flatten().tolist()))
        """,
        *(f"show(({code}))" for code in PRINTED_BY_GPUS),
    )
    for (code, expected), line in zip(PRINTED_BY_GPUS.items(), lines, strict=True):
        assert line.split() == expected.split(), code
    assert process["unknown_reads"] == []


STREAM = """
    torch.zeros(1, device="cuda")
    from pytest_gputrain.worker.emulated_values.random_numbers import Stream
    def stream(seed, processors, threads_of_each, offset=0):
        return Stream(seed, offset, processors * threads_of_each, lambda blocks: True)
"""


def test_more_numbers_than_a_gpu_has_threads_are_those_of_its_kind(emulate):
    lines, _ = emulate(
        STREAM,
        """
        a6000, m4000 = (stream(43, *threads).normal(3 * 128 * 128, torch.float32) for threads in ((84, 1536), (13, 2048)))
        print(a6000.reshape(3, -1)[:, 0], m4000.reshape(3, -1)[:, 0])
        print(stream(42, 28, 1536).normal(64 * 2048, torch.float32)[-3:])
        for threads in ((56, 2048), (13, 2048)):  # P100 and K80
            print(2 * (stream(0, *threads).uniform(1000 * 1000, torch.float32) < 0.5).sum().item())
        """,
    )
    assert lines == [
        "tensor([1.9983, 0.8704, 2.1127]) tensor([1.9983, 0.8704, 0.1787])",
        "tensor([-0.4841,  1.2850, -0.0282])",
        "999826",  # the sum of dropout of a million ones in issue 25690 of torch
        "999100",
    ]


def test_philox_gives_its_authors_known_answers(emulate):
    lines, _ = emulate(
        STREAM,
        """
        pi = 0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0
        swapped = [number >> 32 | (number & 0xFFFFFFFF) << 32 for number in pi]
        for low, high, seed in ((0, 0, 0), (2**64 - 1,) * 3, swapped):
            print(*map(hex, stream(seed, 1, 256, 4 * low).words(1, 1, 1, first_thread=high).flatten().tolist()))
        """,
    )
    assert lines == [
        "0x6627e8d5 0xe169c58d 0xbc57ac4c 0x9b00dbd8",
        "0x408f276d 0x41c83b0e 0xa20bc7c6 0x6d5451fd",
        "0xd16cfe09 0x94fdcceb 0x5001e420 0x24126ea1",
    ]


DRAWS = {
    "rand": "torch.rand(5, device=d, generator=g)",
    "randn": "torch.randn(5, device=d, generator=g)",
    "half precision": "torch.randn(5, device=d, generator=g, dtype=torch.bfloat16)",
    "complex": "torch.randn(5, device=d, generator=g, dtype=torch.complex64)",
    "randint": "torch.randint(0, 1000, (5,), device=d, generator=g)",
    "wide randint": "torch.randint(-2**62, 2**62, (5,), device=d, generator=g)",
    "randperm": "torch.randperm(50, device=d, generator=g)",
    "bernoulli": "torch.bernoulli(torch.full((40,), 0.5, device=d), generator=g)",
    "bernoulli by a number": "torch.empty(40, device=d).bernoulli_(0.5, generator=g)",
    "normal about tensors": "torch.normal(torch.arange(5.0, device=d), torch.ones(5, device=d), generator=g)",
    "multinomial": "torch.multinomial(torch.ones(50, device=d), 3, generator=g)",
    "multinomial with replacement": "torch.multinomial(torch.ones(50, device=d), 30, True, generator=g)",
    "exponential": "torch.empty(5, device=d).exponential_(generator=g)",
}


def test_the_same_state_draws_the_same_and_the_next_draws_differ(emulate):
    lines, process = emulate(
        "d, g = 'cuda', torch.Generator('cuda').manual_seed(3)",
        *(
            f"""
            state = g.get_state()
            draws = [({code}).tolist(), ({code}).tolist()]
            g.set_state(state)
            print({name!r}, [({code}).tolist(), ({code}).tolist()] == draws, draws[0] != draws[1])
            """
            for name, code in DRAWS.items()
        ),
    )
    assert lines == [f"{name} True True" for name in DRAWS]
    assert process["unknown_reads"] == []


def test_each_gpu_and_each_generator_has_its_own_state(emulate):
    lines, _ = emulate(
        """
        torch.manual_seed(0)
        other = torch.Generator("cuda:1").manual_seed(0)
        first = torch.rand(3, device="cuda:0").tolist()
        print([torch.rand(3, device="cuda:1", generator=g).tolist() == first for g in (other, None, None)])
        print(torch.cuda.get_rng_state(0).tolist() == other.get_state().tolist())
        with torch.random.fork_rng():
            forked = torch.rand(3, device="cuda").tolist()
        print(forked == torch.rand(3, device="cuda").tolist())
        """,
        gpus=2,
    )
    assert lines == ["[True, True, False]", "True", "True"]


def test_checkpointed_functions_draw_the_same_again(emulate):
    lines, _ = emulate("""
        from torch.utils.checkpoint import checkpoint
        layer = torch.nn.Linear(32, 32).cuda()
        drawn = []
        def masked(x):
            x = x[torch.rand(len(x), device="cuda") > 0.5]
            drawn.append(len(x))
            return layer(torch.nn.functional.dropout(x, 0.1)).sum()
        def skipped(x):
            kept = torch.rand(1, device="cuda").item() < 0.5
            drawn.append(kept)
            return (layer(x).relu() if kept else x * x).sum()
        for function in (masked, skipped):
            for reentrant in (False, True):
                for _ in range(10):
                    x = torch.randn(100, 32, device="cuda", requires_grad=True)
                    checkpoint(function, x, use_reentrant=reentrant).backward()
        print(drawn[::2] == drawn[1::2], len(set(drawn)) > 10)
    """)
    assert lines == ["True True"]


def test_distributions_have_their_moments(emulate):
    lines, process = emulate("""
        torch.manual_seed(5)
        def close(numbers, mean, deviation):
            numbers = numbers.cpu().double()
            return abs(numbers.mean() - mean) < 0.1 * deviation and abs(numbers.std() - deviation) < 0.1 * deviation
        new = lambda dtype=torch.float32: torch.empty(4096, dtype=dtype, device="cuda")
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            print(close(new(dtype).normal_(3, 2), 3, 2), close(new(dtype).uniform_(-1, 3), 1, 4 / 12**0.5))
            print(close(new(dtype).exponential_(2), 0.5, 0.5), close(new(dtype).geometric_(0.5), 2, 2**0.5))
            print(close(new(dtype).bernoulli_(0.25), 0.25, 0.1875**0.5), close(new(dtype).log_normal_(0, 0.5), 1.133, 0.604))
            print(new(dtype).cauchy_(7, 2).median().item() // 1 in (6, 7), close(new(dtype).random_(-5, 5), -0.5, 2.87))
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
            mean = 0.5 if dtype == torch.bool else torch.iinfo(dtype).max / 2
            print(close(new(dtype).random_(), mean, mean / (3**0.5 if mean > 1 else 1)))
            print(close(new(dtype).random_(0, 2), 0.5, 0.5))
        for span in (1000, 1 << 29, 1 << 62):
            print(close(torch.randint(-span, span, (4096,), device="cuda"), 0, 2 * span / 12**0.5))
        chances = torch.tensor([0.1, 0.9], device="cuda").repeat(2048, 1)
        print([round(mean, 1) for mean in torch.bernoulli(chances).mean(0).tolist()])
        scores = torch.tensor([[1.0, 0.0, 4.0], [0.0, 1.0, 0.0]], device="cuda")
        for row in (torch.multinomial(scores, 4000, True), torch.multinomial(scores.repeat(2000, 1), 1).reshape(2000, 2).T):
            print([torch.bincount(one, minlength=3).div(len(one)).mul(10).round().tolist() for one in row])
    """)
    moments, rest = lines[:31], lines[31:]
    assert set(" ".join(moments).replace("tensor(True)", "True").split()) == {"True"}, lines
    assert rest == ["[0.1, 0.9]", *["[[2.0, 0.0, 8.0], [0.0, 10.0, 0.0]]"] * 2]
    assert process["unknown_reads"] == []


def test_a_permutation_holds_each_number_once(emulate):
    lines, _ = emulate("""
        for count, type_ in ((1, "int64"), (2, "int64"), (50, "float16"), (8192, "int64"), (30100, "int16")):
            order = torch.randperm(count, dtype=getattr(torch, type_), device="cuda").tolist()
            print(sorted(order) == list(range(count)))
        torch.manual_seed(0)
        print(len({tuple(torch.randperm(3, device="cuda").tolist()) for _ in range(100)}))
    """)
    assert lines == [*["True"] * 5, "6"]


def test_numbers_are_drawn_in_the_order_of_memory(emulate):
    lines, _ = emulate("""
        def drawn(to, draw=torch.Tensor.random_):
            torch.manual_seed(0)
            return draw(to)
        expected = drawn(torch.empty(2, 4, 3, 5, device="cuda"))
        other = drawn(torch.empty(2, 3, 5, 4, device="cuda").permute(0, 3, 1, 2))
        print(torch.equal(expected.flatten(), other.permute(0, 2, 3, 1).flatten()), torch.equal(expected, other))
        part = torch.zeros(4, 6, device="cuda")
        drawn(part[:, ::2])
        print(torch.equal(part[:, ::2].flatten(), expected.flatten()[:12]), part[:, 1::2].any().item())
        ones = torch.ones(2, 3, 5, 4, device="cuda").permute(0, 3, 1, 2)
        kept = drawn(ones, torch.nn.functional.dropout).permute(0, 2, 3, 1).flatten()
        print(torch.equal(kept, drawn(torch.ones(120, device="cuda"), torch.nn.functional.dropout)))
    """)
    assert lines == ["True False", "True False", "True"]


def test_dropout_keeps_what_its_mask_says_also_of_unknown_values(emulate):
    lines, process = emulate("""
        torch.manual_seed(0)  # of eight elements another seed may keep none
        for count, dtype in ((8, torch.float32), (4096, torch.bfloat16), (4095, torch.float32), (30, torch.float64)):
            ones = torch.ones(count, dtype=dtype, device="cuda")
            values, mask = torch.native_dropout(ones, 0.75, True)
            print(torch.equal(values, mask * 4), mask.any().item() and not mask.all().item())
        unknown = torch.randn(64, 300, device="cuda")
        state = torch.cuda.get_rng_state()
        mask = torch.native_dropout(unknown, 0.5, True)[1]
        print(0.45 < mask.sum().item() / mask.numel() < 0.55)
        torch.cuda.set_rng_state(state)
        print(torch.equal(mask, torch.native_dropout(unknown, 0.5, True)[1]))
    """)
    assert lines == [*["True True"] * 4, "True", "True"]
    assert process["unknown_reads"] == []


def test_only_large_tensors_and_numbers_of_a_changed_kernel_are_unknown(emulate):
    lines, process = emulate("""
        def drawn(count):
            torch.manual_seed(0)
            return torch.rand(count, device="cuda")[:1].item()
        print([round(drawn(count), 4) == 0.399 for count in (1, 16384, 16385)])
        torch.poisson(torch.ones(3, device="cuda")).sum().item()
        real = torch.cuda.get_device_properties
        class Other:
            multi_processor_count, max_threads_per_multi_processor = 1, 2048
        torch.cuda.get_device_properties = lambda device: Other
        print([round(drawn(count), 4) == 0.399 for count in (2048, 2049)])
        torch.cuda.get_device_properties = real
    """)
    assert lines == ["[True, True, False]", "[True, False]"]
    assert {one["where"]: one["count"] for one in process["unknown_reads"]} == {
        "train.py:5 in drawn": 2,
        "train.py:7 in <module>": 1,
    }
