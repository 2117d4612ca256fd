"""Sizes and checks that depend on values, on an emulated GPU that computes none. Needs a CUDA build of torch, and no GPU."""

import textwrap

import pytest

BEGIN = """
    import torch
    def unknown(rows, columns):  # a product of matrices is never computed
        return torch.ones(rows, 8, device="cuda") @ torch.ones(8, columns, device="cuda")
    x = unknown(100, 80)"""

KNOWN = {
    "two of three places are the same": "sparse(d, [[1, 2, 2]], 3).coalesce()._nnz()",
    "sums of elements at the same place": "sparse(d, [[1, 2, 2]], 3).coalesce().values().tolist()",
    "places in two dimensions": "sparse(d, [[1, 1, 0], [2, 2, 2]], 3).coalesce().indices().tolist()",
    "a matrix that becomes sparse": "torch.eye(9, device=d).to_sparse()._nnz()",
    "a matrix of compressed rows": "torch.eye(9, device=d).to_sparse_csr().col_indices().tolist()",
    "a sum over a sparse dimension": "torch.sparse.sum(torch.eye(9, device=d).to_sparse(), 0)._nnz()",
    "values among many": "torch.isin(torch.arange(40, device=d), torch.arange(0, 80, 5, device=d)).tolist()",
    "the older unique": "torch._unique(torch.tensor([3, 1, 1], device=d))[0].tolist()",
    "truth values": "[torch.tensor(x, device=d).unique().tolist() for x in ([True] * 3, [False] * 3, [True, False])]",
    "many equal values": "torch.ones(4000, 4000, device=d).unique().numel()",
    "rows that follow each other": "torch.tensor([[1, 2], [1, 2], [3, 4]], device=d).unique_consecutive(dim=0).tolist()",
    "the most frequent of many": "[int(one) for one in (torch.arange(6000, device=d) // 7).mode()][0]",
    "the most frequent of each long row": "(torch.arange(6000, device=d) // 7).reshape(2, 3000).mode()[0].tolist()",
    "a mask that repeats a small one": (
        "torch.ones(200, 9000, device=d)[(torch.arange(200, device=d) < 3)[:, None].expand(-1, 9000)].numel()"
    ),
    "a conjugate": "torch.tensor([1 + 2j], device=d).conj().cpu().tolist()",
    "many conjugates": "torch.full((9999,), 1 + 2j, device=d).conj().cpu()[0].tolist()",
    "the imaginary part of a conjugate": "torch.tensor([1 + 2j], device=d).conj().imag.tolist()",
    "what is written to a conjugate": "torch.ones(1, device=d).cfloat().conj().fill_(2j).resolve_conj().tolist()",
}


def test_sizes_of_known_values_are_those_of_the_cpu(emulate_parts):
    out, _, process = emulate_parts(
        """
        import torch
        def sparse(d, places, count):
            return torch.sparse_coo_tensor(torch.tensor(places, device=d), torch.ones(count, device=d), [5] * len(places))
        """,
        *(f"print([({code}) for d in ('cpu', 'cuda')])" for code in KNOWN.values()),
    )
    for name, line in zip(KNOWN, out.splitlines(), strict=True):
        on_cpu, on_gpu = eval(line)
        assert on_cpu == on_gpu, name
    assert process["unknown_reads"] == process["assumed"] == []


def test_rows_of_a_sparse_gradient_are_counted_from_its_ids(emulate_parts):
    out, _, process = emulate_parts("""
        import torch
        table = torch.nn.Embedding(200_000, 16, sparse=True).cuda()
        optimizer = torch.optim.SparseAdam(table.parameters())
        tokens = torch.randint(0, 200_000, (256, 512))  # 1 MiB
        table(tokens.cuda()).sum().backward()
        optimizer.step()
        print(table.weight.grad.coalesce()._nnz() == tokens.unique().numel())
    """)
    assert out == "True\n"
    assert process["unknown_reads"] == process["assumed"] == []


ASSUMED = {
    "x.nonzero()": ((8000, 2), "nonzero"),
    "x.argwhere()": ((8000, 2), "nonzero"),
    "torch.where(x > 0)[0]": ((8000,), "nonzero"),
    "x[x > 0]": ((8000,), "nonzero"),
    "x[(x > 0).flatten()[:100]]": ((100, 80), "nonzero"),
    "x.masked_select(x > 0)": ((8000,), "nonzero"),
    "torch.combinations(torch.arange(2000, device='cuda'), 2)": ((2000 * 2000, 2), "nonzero"),
    "x.to_sparse()._values()": ((8000,), "nonzero"),
    "x.to_sparse_csr().values()": ((8000,), "nonzero"),
    "x.to_sparse_bsr((5, 5)).values()": ((320, 5, 5), "nonzero"),
    "torch.sparse.sum(x.to_sparse(), 0)._values()": ((80,), "coalesce"),
    "torch.sparse_coo_tensor(x.long()[:2], x[0], (10, 10)).coalesce()._values()": ((80,), "coalesce"),
    "torch.sparse_coo_tensor(x.long()[:2], x[0], (5, 5)).coalesce()._values()": ((25,), "coalesce"),
    "x.unique()": ((8000,), "unique"),
    "x.to(torch.int8).unique()": ((256,), "unique"),
    "(x > 0).unique()": ((2,), "unique"),
    "torch._unique(x)[0]": ((8000,), "unique"),
    "x.unique(return_counts=True)[1]": ((8000,), "unique"),
    "x.unique(dim=1)": ((100, 80), "unique_dim"),
    "x.unique_consecutive()": ((8000,), "unique_consecutive"),
    "x.unique_consecutive(dim=0)": ((100, 80), "unique_consecutive"),
    "x[0].repeat_interleave(x[1].long())": ((80,), "repeat_interleave"),
    "x[:, 0].expand(9999, -1).mode(0)[0]": ((100,), "mode"),
}


def test_unknown_values_are_assumed_to_differ_and_not_to_be_zero_and_this_is_told(emulate_parts):
    out, told, process = emulate_parts(BEGIN, *(f"print(tuple(({code}).shape))" for code in ASSUMED))
    first = len(textwrap.dedent(BEGIN).splitlines()) + 1
    assumed = {(one["what"], int(one["where"].split(":")[1].split()[0])) for one in process["assumed"]}
    for line, (code, (size, name)) in enumerate(ASSUMED.items(), first):
        assert out.splitlines()[line - first] == str(size), code
        assert (name, line) in assumed, code
    assert "unknown values are assumed to differ from each other and from zero, and to pass checks, by " in told


LARGER = {
    "bincount": "x.flatten().long().bincount()",
    "one_hot": "torch.nn.functional.one_hot(x.long())",
}


def test_the_derivative_of_masked_scatter_finds_as_many_elements_as_were_scattered(emulate_parts):
    out, _, process = emulate_parts(
        BEGIN,
        """
        source = torch.ones(50, device="cuda", requires_grad=True)
        torch.zeros(100, 80, device="cuda").masked_scatter(x > 0, source).sum().backward()
        print(source.grad.numel())""",
    )
    assert out == "50\n"
    assert [row["what"] for row in process["assumed"]] == ["nonzero"]


@pytest.mark.parametrize("name", LARGER)
def test_a_size_by_the_largest_unknown_value_makes_figures_lower_bounds(name, emulate_parts):
    _, told, process = emulate_parts(BEGIN, LARGER[name])
    assert f"the sizes that {name} reads from values" in process["unknown"]
    assert "at least" in told


DECIDED = {
    "computed, or all differ and none is zero": {
        "_unique", "_unique2", "argwhere", "index.Tensor", "masked_select", "masked_select.out", "nonzero", "nonzero.out",
        "repeat_interleave.Tensor", "unique_consecutive", "unique_dim", "unique_dim_consecutive",
    },
    "at least": {"_ctc_loss", "_ctc_loss.Tensor", "bincount", "one_hot"},
    "its size follows from its inputs' sizes on a GPU": {"linalg_lstsq", "linalg_lstsq.out"},
}  # fmt: skip


def test_it_is_decided_for_each_operator_of_torch_whose_size_depends_on_values(emulate_parts):
    out, _, _ = emulate_parts("""
        import torch
        torch.cuda.init()
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::"):
                base, _, overload = name.removeprefix("aten::").partition(".")
                operator = getattr(getattr(torch.ops.aten, base), overload or "default", None)
                if operator is not None and torch.Tag.dynamic_output_shape in operator.tags:
                    print(name.removeprefix("aten::"))
    """)
    assert set(out.split()) <= set().union(*DECIDED.values())


CHECKED = {
    "normal": "torch.normal(x, x)",
    "cov": "torch.cov(x, aweights=x[0])",
    "istft": "torch.istft(torch.stft(x.flatten(), 64, window=x[0, :64], return_complex=True), 64, window=x[0, :64])",
    "a check that all are true": "torch.distributions.Normal(x, x).sample()",
    "allclose": "torch.linalg.eig(unknown(80, 80).requires_grad_())[1].abs().sum().backward()",
    "a check that raises an error": "assert (x.sum() <= x.cos().sum()) & (x.cos().sum() <= x.sum())",
}


def test_a_check_of_unknown_values_passes_and_is_told(emulate_parts):
    _, _, process = emulate_parts(BEGIN, *CHECKED.values(), "torch.matrix_exp(x[:98].reshape(10, 28, 28))")
    assert {f"a check of {name}" if " " not in name else name for name in CHECKED} <= {
        one["what"] for one in process["assumed"]
    }


def test_a_tensor_is_close_to_itself_and_not_known_to_be_close_to_another(emulate_parts):
    out, _, process = emulate_parts(BEGIN, "print(torch.allclose(x, x))", "print(torch.allclose(x, x + 1))")
    assert out.split() == ["True", "False"]
    assert [one["where"].split()[0] for one in process["unknown_reads"]] == ["train.py:7"]


CHANGED = """
    changed = x.clone()
    changed.add_(1)
    def same(): assert (changed == x).all()
    def close(): assert torch.allclose(changed, x)
    def near(): assert (changed - x).abs().max() < 1e-6
    for check in (same, close, near):
        try:
            check()
        except AssertionError:
            print(check.__name__)
"""


def test_a_check_that_a_changed_tensor_is_the_same_fails(emulate_parts):
    out, _, _ = emulate_parts(BEGIN, CHANGED)
    assert out.split() == ["same", "close", "near"]


def test_a_choice_by_an_order_is_the_same_in_every_step(emulate_parts):
    out, _, _ = emulate_parts(BEGIN, "print(sum(1 for _ in range(100) if x.sum() < 10))")
    assert int(out) == 100


def test_a_loop_ends_that_waits_for_larger_numbers(emulate_parts):
    out, _, _ = emulate_parts(
        BEGIN,
        """
        time, rounds = x.sum(), 0
        while time < 1000 and time.cos() < 1000:
            time, rounds = time + x.sum(), rounds + 1
        print(rounds)
    """,
    )
    assert int(out) < 100


def test_what_only_a_part_of_an_operator_wrote_is_unknown(emulate_parts):
    _, _, process = emulate_parts("""
        import torch
        ones, table = torch.ones(1, 3, 3, device="cuda"), torch.ones(9, 4, device="cuda", requires_grad=True)
        torch.baddbmm(ones, ones, ones).sum().item()  # it begins with a copy of its first argument
        torch.nn.functional.embedding(torch.tensor([1], device="cuda"), table).sum().backward()
        table.grad.sum().item()  # it begins as zeros
        torch.eye(3, device="cuda").to_sparse().to_dense().sum().item()  # as zeros, too
    """)
    assert [one["where"].split()[0] for one in process["unknown_reads"]] == [f"train.py:{line}" for line in (4, 6, 7)]


def test_a_library_that_reads_the_gpu_past_torch_is_told_of(emulate_parts):
    _, _, process = emulate_parts(
        BEGIN,
        """
        import ctypes
        read = ctypes.c_int64()
        ctypes.CDLL(None).cudaMemcpy(ctypes.byref(read), ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(8), 2)
    """,
    )
    assert [one["what"] for one in process["unknown_reads"]] == ["a number for a library"]


def test_choices_that_are_kept_take_a_bounded_part_of_the_host(emulate):
    """What is chosen by the least value, as a level of a 4-bit weight for each number, is unknown instead if it is large."""
    done, report = emulate(
        """
        import os
        import torch

        def chosen():
            return torch.rand(1 << 22, 2, device="cuda").argmax(-1).clone()  # both are of 32 MiB

        def held():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

        first = chosen()
        assert first.any()
        before = held()
        kept = [chosen() for _ in range(30)]
        print(held() - before)
        assert kept[-1].any()
        first.any().item()
        levels = torch.rand(1 << 20, 16, device="cuda").argmin(-1)
        levels.any().item()
        """
    )
    assert done.returncode == 0, done.stderr
    assert 400 < int(done.stdout) < 700  # of 960 MiB
    reads = report["processes"][0]["unknown_reads"]
    assert [read["where"] for read in reads] == ["train.py:18 in <module>", "train.py:20 in <module>"]


def test_kernels_of_an_undefined_operator_are_left_alone(emulate):
    """As torchao has them, for operators that another of its libraries defines."""
    done, _ = emulate(
        """
        import torch
        library = torch.library.Library("elsewhere", "IMPL")
        library.impl("undefined", lambda: None, "CUDA")
        print(torch.arange(3, device="cuda").sum().item())
        """,
        fresh=True,
    )
    assert done.stdout == "3\n", done.stderr
