"""What is told of the calls of a step, for its expected seconds."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from pytest_gputrain.worker.flops import FlopCount
from pytest_gputrain.worker.traced_calls import describe

aten = torch.ops.aten


class _Calls(FlopCount):
    """Keeps the descriptions, as if each call read and wrote a byte."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def count(self, func, args, kwargs, result, flops):
        optimizing = self.share().optimizers > 0
        self.seen.append(describe(func, args, kwargs, flops, 1, 1, optimizing=optimizing))


def traced(run):
    with _Calls() as calls:
        run()
    return calls.seen


def test_products_have_shapes_and_types_and_other_operators_none():
    left, right = torch.ones(8, 4, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16)
    product, double = traced(lambda: (left @ right) * 2)
    assert (product.operator, product.shapes, product.dtype, product.flops) == ("mm", ((8, 4), (4, 2)), "bf16", 128)
    assert (double.operator, double.shapes, double.dtype, double.flops) == ("mul", (), "", 0)


def test_what_an_optimizer_does_and_does_at_once_is_told():
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD(parameters, foreach=True)
    (update,) = [call for call in traced(optimizer.step) if call.operator == "_foreach_add_"]
    assert update.flags == ("optimizer", "list")
    (alone,) = traced(lambda: torch._foreach_add([torch.ones(3)], 1))[1:]
    assert alone.flags == ("list",)


@pytest.mark.parametrize(
    ("layer", "shape", "flags"),
    [
        (torch.nn.Conv2d(4, 4, 3), (1, 4, 8, 8), ()),
        (torch.nn.Conv2d(4, 4, 3, groups=4), (1, 4, 8, 8), ("grouped",)),
        (torch.nn.Conv1d(4, 4, 3, groups=2), (1, 4, 8), ("grouped",)),
        (torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), (1, 4, 8, 8), ("channels_last",)),
    ],
)
def test_layout_and_groups_of_convolutions_are_told_in_both_passes(layer, shape, flags):
    images = torch.ones(shape, requires_grad=True)
    if "channels_last" in flags:
        images = images.detach().to(memory_format=torch.channels_last).requires_grad_()
    calls = traced(lambda: layer(images).sum().backward())
    told = {call.operator: call.flags for call in calls if "convolution" in call.operator}
    assert told == {"convolution": flags, "convolution_backward": flags}


@pytest.mark.parametrize(("masked", "causal"), [(False, False), (True, False), (False, True)])
def test_causality_and_masks_of_attention_are_told(masked, causal):
    query, key, value = (torch.ones(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    mask = torch.zeros(8, 8) if masked else None

    def run():
        with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        attended.sum().backward()

    told = [call.flags for call in traced(run) if "attention" in call.operator]
    assert told == [("causal",) * causal + ("masked",) * masked] * 2


@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "flash"])
def test_causality_is_found_in_the_arguments_of_each_kernel_of_a_gpu(kernel):
    operator = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    tensors = [torch.ones(1, 2, 8, 16) for _ in range(3)]
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    given = {"query": tensors[0], "key": tensors[1], "value": tensors[2], "dropout_p": 0.0}
    args = [given.get(name, False) for name in names]
    assert describe(operator, args, {}, 9, 1, 1, optimizing=False).flags == ()
    args[names.index("is_causal")] = True
    assert describe(operator, args, {}, 9, 1, 1, optimizing=False).flags == ("causal",)
    if "attn_bias" in names:
        args[names.index("attn_bias")] = torch.ones(8, 8)
        assert describe(operator, args, {}, 9, 1, 1, optimizing=False).flags == ("causal", "masked")
    assert describe(operator, args[:3], {"is_causal": True}, 9, 1, 1, optimizing=False).flags == ("causal",)


def test_copies_between_host_and_gpu_are_told_by_what_lies_on_the_gpu():
    copy, cast = aten.copy_.default, aten._to_copy.default
    on_gpu, on_host = torch.ones(4, device="meta"), torch.ones(4)

    def flags(operator, *args, read, written):
        return describe(operator, args, {}, 0, read, written, optimizing=False).flags

    assert flags(copy, on_gpu, on_gpu, read=32, written=16) == flags(cast, on_gpu, read=16, written=16) == ()
    assert flags(copy, on_gpu, on_host, read=16, written=16) == ("host",)
    assert flags(copy, on_host, on_gpu, read=16, written=0) == ("host",)
    assert flags(cast, on_gpu, read=16, written=0) == flags(cast, on_host, read=0, written=16) == ("host",)
    assert flags(aten.mul.Tensor, on_gpu, on_host, read=16, written=16) == ()


def test_what_the_host_computes_is_no_work_of_the_gpu():
    assert describe(aten.mm.default, [torch.ones(4, 4)] * 2, {}, 128, 0, 0, optimizing=False).flops == 0


def test_an_operator_of_another_library_has_no_shapes_whatever_its_name():
    torch.library.define("howfast::convolution_backward", "(Tensor x) -> Tensor")
    operator = torch.ops.howfast.convolution_backward.default
    call = describe(operator, [torch.ones(2)], {}, 8, 1, 1, optimizing=False)
    assert (call.operator, call.shapes, call.dtype, call.flops) == ("howfast.convolution_backward", (), "fp32", 8)


def test_views_move_nothing():
    assert describe(aten.view.default, [torch.ones(4), [2, 2]], {}, 0, 0, 0, optimizing=False).flags == ("view",)
