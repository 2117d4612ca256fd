"""Follows operators of sparse and nested tensors, whose parts are tensors of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

_KEYS: Final = ("SparseCUDA", "SparseCsrCUDA", "NestedTensorCUDA")

_BY_OWN_KERNELS: Final = frozenset((
    "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "floor_divide", "floor_divide_", "mm", "mv", "bmm",
    "addmm", "addmm_", "addmv", "baddbmm", "sspaddmm", "hspmm", "matmul", "matmul_backward", "sum", "any", "norm",
    "native_norm", "sparse_mask", "sparse_sampled_addmm", "triangular_solve", "_spsolve", "_sparse_mask_projection",
    "_sparse_broadcast_to", "_sparse_softmax", "_sparse_softmax_backward_data", "_sparse_log_softmax",
    "_sparse_log_softmax_backward_data", "_sparse_sum_backward", "_sparse_sparse_matmul", "_sparse_csr_sum",
    "_sparse_csr_prod", "_softmax", "_softmax_backward_data", "_nested_tensor_softmax_with_shape",
    "_nested_from_padded_and_nested_example", "to_padded_tensor",
))  # fmt: skip
"""Operators that write by kernels of their own, and not only by other operators."""


def operators_to_follow() -> Iterator[tuple[str, str]]:
    """Yield the names of the operators that write by kernels of their own, each with its key in torch's dispatcher."""
    for key in _KEYS:
        for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            namespace, _, name = qualified.partition("::")
            if namespace == "aten" and name.partition(".")[0] in _BY_OWN_KERNELS:
                yield name, key


def elements(tensor: Tensor) -> Tensor:
    """Return the elements that a sparse or nested tensor stores."""
    if tensor.layout is torch.strided:
        return tensor.values() if tensor.is_nested else tensor
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()


def most_places(tensor: Tensor) -> int:
    """Return how many different places the elements of a sparse tensor have at most."""
    return min(tensor._nnz(), math.prod(tensor.size()[: tensor.sparse_dim()]))
