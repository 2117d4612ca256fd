"""Errors that kernels raise for known values, on an emulated GPU. Needs a CUDA build of torch, and no GPU."""

import textwrap

IN_CHILDREN = """
    import os, sys, torch

    def ints(*numbers):
        return torch.tensor(numbers, device="cuda")

    def floats(*numbers):
        return torch.tensor(numbers, dtype=torch.float, device="cuda")

    def numbers(*sizes):
        return torch.zeros(sizes, device="cuda")

    def tried(name, trial):
        sys.stdout.flush()
        if os.fork() == 0:  # an error stays as long as the process lives
            try:
                trial()
                torch.cuda.synchronize()
                print(name, "passed", flush=True)
            except torch.AcceleratorError as error:
                print(name, "raised", *str(error).splitlines()[::len(str(error).splitlines()) - 1], flush=True)
            except Exception as error:
                print(name, "raised", repr(error), flush=True)
            os._exit(0)
        os.wait()

    functional = torch.nn.functional
"""
"""Begins a program that tries something that may end the use of the GPU."""


def programs(trials):
    return "\n".join([textwrap.dedent(IN_CHILDREN), *(f"tried({name!r}, lambda: {code})" for name, code in trials.items())])


WRONG = {
    "index": ("numbers(5)[ints(9)]", "index 9 is out of range for 5 elements"),
    "negative index": ("numbers(5)[ints(-6)]", "index -6 is out of range for 5 elements"),
    "index of a second dimension": ("numbers(5, 3)[:, ints(4)]", "index 4 is out of range for 3 elements"),
    "assignment": ("numbers(5).__setitem__(ints(5), 1)", "index 5 is out of range for 5 elements"),
    "embedding": ("torch.nn.Embedding(50000, 64).cuda()(ints(50000))", "index 50000 is out of range for 50000 elements"),
    "embedding_bag": ("functional.embedding_bag(ints(5), numbers(5, 2), ints(0))", "index 5 is out of range for 5 elements"),
    "offsets": ("functional.embedding_bag(ints(1, 2), numbers(5, 2), ints(0, 2, 1))", "offsets decrease"),
    "cross_entropy": ("functional.cross_entropy(numbers(2, 3), ints(3, 1))", "label 3 is none of 3 classes"),
    "cross_entropy of pixels": (
        "functional.cross_entropy(numbers(1, 3, 2, 1), ints(-1, 1).reshape(1, 2, 1))",
        "label -1 is none of 3 classes",
    ),
    "multi_margin_loss": ("functional.multi_margin_loss(numbers(1, 3), ints(3))", "label 3 is none of 3 classes"),
    "multilabel_margin_loss": (
        "functional.multilabel_margin_loss(numbers(1, 3), ints(3, -1, 0).reshape(1, 3))",
        "label 3 is none of 3 classes",
    ),
    "binary_cross_entropy": ("functional.binary_cross_entropy(floats(1.5), floats(1))", "a value is not between 0 and 1"),
    "gather": ("numbers(3).gather(0, ints(-1))", "index -1 is out of range for 3 elements"),
    "scatter": ("numbers(3).scatter(0, ints(3), 1.0)", "index 3 is out of range for 3 elements"),
    "scatter_add_": ("numbers(3).scatter_add_(0, ints(3), numbers(1))", "index 3 is out of range for 3 elements"),
    "one_hot": ("functional.one_hot(ints(4), 3)", "index 4 is out of range for 3 elements"),
    "index_select": ("numbers(2, 3).index_select(1, ints(3))", "index 3 is out of range for 3 elements"),
    "index_add_": ("numbers(3).index_add_(0, ints(3), numbers(1))", "index 3 is out of range for 3 elements"),
    "index_copy_": ("numbers(3).index_copy_(0, ints(-1), numbers(1))", "index -1 is out of range for 3 elements"),
    "index_fill_": ("numbers(3).index_fill_(0, ints(-4), 1)", "index -4 is out of range for 3 elements"),
    "take": ("numbers(2, 3).take(ints(6))", "index 6 is out of range for 6 elements"),
    "put_": ("numbers(2, 3).put_(ints(6), numbers(1))", "index 6 is out of range for 6 elements"),
    "_assert_async": ("torch._assert_async(ints(0)[0], 'not so')", "not so"),
    "multinomial": ("floats(1, -1).multinomial(1)", "probability tensor contains either `inf`, `nan` or element < 0"),
    "multinomial with replacement": (
        "floats(1, -1).multinomial(4, replacement=True)",
        "a weight is negative, infinite or NaN",
    ),
    "bernoulli": ("floats(0.5, 1.5).bernoulli()", "a value is not between 0 and 1"),
    "poisson": ("torch.poisson(floats(-1))", "a rate is negative"),
    "repeat_interleave": ("numbers(2).repeat_interleave(ints(1, -1), output_size=3)", "a number of repetitions is negative"),
    "masked_scatter": (
        "numbers(3).masked_scatter_(floats(1, 1, 1) > 0, numbers(2))",
        "the mask chooses 3 elements, and the source has 2",
    ),
    "backward": (
        "(lambda x: x.gather(0, ints(1)).backward(numbers(1)) or x.grad[ints(3)])(numbers(3).requires_grad_())",
        "index 3 is out of range for 3 elements",
    ),
}


def test_what_a_kernel_asserts_of_known_values_raises_what_torch_raises_on_a_gpu_with_the_operators_line(emulate):
    done, _ = emulate(programs({name: code for name, (code, _) in WRONG.items()}))
    lines = done.stdout.splitlines()
    assert len(lines) == len(WRONG), done.stderr
    first = programs({}).count("\n") + 2
    for number, (line, (name, (_, reason))) in enumerate(zip(lines, WRONG.items(), strict=True), first):
        assert line.startswith(f"{name} raised CUDA error: device-side assert triggered"), line
        assert line.endswith(f" at train.py:{number} in <lambda>: {reason}."), line


RIGHT = {
    "an index from the end": "numbers(5)[ints(-5)]",
    "a label to ignore": "functional.cross_entropy(numbers(2, 3), ints(-100, 1))",
    "labels behind the end": "functional.multilabel_margin_loss(numbers(1, 3), ints(2, -1, 7).reshape(1, 3))",
    "no index": "numbers(5)[torch.empty(0, dtype=torch.long, device='cuda')]",
    "a mask": "numbers(2)[ints(1, 0) > 0]",
    "a mask and an index": "numbers(2, 3)[ints(1, 1) > 0, ints(2, 0)]",
    "unknown indices": "numbers(3)[(numbers(512, 512) @ numbers(512, 512)).long()]",
    "unknown probabilities": "(numbers(512, 512) @ numbers(512, 512) + 2).bernoulli()",
    "an assertion of unknown values": "torch._assert_async((numbers(512, 512) @ numbers(512, 512)).sum() > 1)",
    "all of a scalar": "torch.zeros((), device='cuda').index_select(0, ints(0))",
}


def test_values_in_range_and_unknown_ones_raise_nothing(emulate):
    done, _ = emulate(programs(RIGHT))
    assert done.stdout.splitlines() == [f"{name} passed" for name in RIGHT], done.stderr


def test_the_error_stays_until_the_process_ends_and_the_report_is_made_nevertheless(emulate):
    done, report = emulate("""
        import torch
        table = torch.zeros(1 << 20, device="cuda")
        for trial in (lambda: table[torch.tensor([1 << 20], device="cuda")], lambda: table + 1, torch.cuda.synchronize):
            try:
                trial()
            except torch.AcceleratorError as error:
                print(str(error).splitlines()[0])
    """)
    assert done.stdout.splitlines() == ["CUDA error: device-side assert triggered"] * 3
    assert report["processes"][0]["devices"][0]["peak_allocated_bytes"] == 8 << 20
