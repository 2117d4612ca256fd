"""Values of small tensors on an emulated GPU. Needs a CUDA build of torch, and no GPU."""

import pytest

UNTRACKED = """
    class Nothing:
        enable, report = (lambda self: None), (lambda self: {})
    import sys, torch
    sys.modules["_gputrain_memory_recorder"]._load_values = Nothing
"""
"""Begins a program whose values are not tracked."""


SAME_AS_ON_THE_CPU = {
    "arithmetic": "torch.arange(10, device=d) * 2 + 1",
    "a number of another type": "(torch.tensor(3, device=d) * 0.5, torch.tensor(3.0, device=d).half() * 0.5)",
    "masks": "torch.arange(10, device=d).masked_fill(torch.arange(10, device=d) > 2, -100)",
    "all": "bool(torch.ones(4, 4, dtype=torch.bool, device=d).all())",
    "nonzero": "(torch.arange(10, device=d) > 5).nonzero()",
    "index by a mask": "torch.arange(10, device=d)[torch.arange(10, device=d) % 3 == 0]",
    "masked_select": "torch.arange(10, device=d).masked_select(torch.arange(10, device=d) % 3 == 0)",
    "unique": "torch.tensor([3, 1, 1, 2], device=d).unique(return_inverse=True, return_counts=True)",
    "unique rows": "torch.tensor([[3, 1], [1, 2], [3, 1]], device=d).unique(dim=0)",
    "unique_consecutive": "torch.tensor([3, 1, 1, 3], device=d).unique_consecutive(return_counts=True)",
    "bincount": "torch.tensor([3, 1, 1], device=d).bincount()",
    "one_hot": "torch.nn.functional.one_hot(torch.tensor([3, 1], device=d))",
    "repeat_interleave": "torch.arange(3, device=d).repeat_interleave(torch.tensor([2, 0, 3], device=d))",
    "write by a mask": "torch.zeros(3, device=d).index_put((torch.arange(3, device=d) != 1,), torch.ones(2, device=d))",
    "positions": "torch.tensor([[1, 1, 0], [1, 1, 1]], device=d).cumsum(-1) - 1",
    "equal": "torch.equal(torch.arange(5, device=d), torch.arange(5, device=d))",
    "cat and stack": "torch.stack([torch.cat([torch.arange(3, device=d), torch.zeros(1, device=d)])] * 2)",
    "sort": "torch.tensor([3, 1, 2], device=d).sort()",
    "topk": "torch.tensor([3.0, 1.0, 2.0], device=d).topk(2)",
    "histc": "torch.tensor([0, 1, 1, 3], device=d, dtype=torch.int if d == 'cuda' else torch.float).histc(4, 0, 3).float()",
    "another type's bytes": "torch.arange(4, device=d, dtype=torch.int32).view(torch.uint8)",
    "a transposed view": "torch.zeros(3, 2, dtype=torch.long, device=d).t().fill_(4)",
    "row by row": "[[row.fill_(i) for i, row in enumerate(rows)] and rows for rows in [torch.empty(3, 2, device=d)]]",
    "many ones": "bool((torch.zeros(4000, 4000, device=d) + 1 == 1).all())",
    "lists of tensors": "torch._foreach_add([torch.tensor(1, device=d), torch.tensor(2, device=d)], 1)",
    "the order of a packed sequence": "rnn_utils.pack_padded_sequence(torch.zeros(5, 3, 2, device=d), "
    "torch.tensor([2, 5, 3]), enforce_sorted=False).unsorted_indices",
    "all places written": "torch.empty(3, dtype=torch.long, device=d).index_copy_(0, torch.tensor([1, 2, 0], device=d), "
    "torch.arange(3, device=d))",
    "isin": "torch.isin(torch.arange(5, device=d), torch.tensor([1, 3], device=d))",
    "in a thread": "in_thread(lambda: (torch.arange(5, device=d) > 2).nonzero())",
}


def test_small_operators_compute_what_they_compute_on_the_cpu(emulate_parts):
    out, _, process = emulate_parts(
        """
        import threading, torch
        import torch.nn.utils.rnn as rnn_utils
        from torch.utils._pytree import tree_map_only
        def in_thread(function):
            results = []
            thread = threading.Thread(target=lambda: results.append(function()))
            thread.start(), thread.join()
            return results[0]
        """,
        *(
            f"print({name!r}, [str(tree_map_only(torch.Tensor, lambda t: (t.dtype, t.tolist()), ({code}))) for d in "
            "('cpu', 'cuda')])"
            for name, code in SAME_AS_ON_THE_CPU.items()
        ),
    )
    lines = out.splitlines()
    assert len(lines) == len(SAME_AS_ON_THE_CPU)
    for line in lines:
        on_cpu, on_gpu = eval(line[line.index(" [") + 1 :])
        if not line.startswith("histc"):
            assert on_cpu == on_gpu, line
        assert on_gpu
    assert process["unknown_reads"] == []


def test_a_worker_below_gputrain_emulate_replaces_no_operator_twice(emulate_parts):
    out, _, process = emulate_parts("""
        import torch
        before = torch.arange(5, device="cuda")  # the recorder's own copy of the package has replaced them
        from pytest_gputrain.worker.emulated_values import tracking
        tracking.enable()
        after = torch.empty(5, device="cuda")
        after.copy_(torch.arange(5.0))
        print((before + after).tolist())
        (torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")).sum().item()
        print(len(tracking.report()["unknown_reads"]))
    """)
    assert out.splitlines() == ["[0.0, 2.0, 4.0, 6.0, 8.0]", "1"]
    assert len(process["unknown_reads"]) == 1


def test_unknown_values_are_made_up_and_are_told_with_their_line_but_for_checks_for_nan_which_do_not_fire(emulate_parts):
    out, told, process = emulate_parts("""
        import torch
        x = torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
        print(bool(torch.isfinite(x).all()), bool(torch.isnan(x).any()), bool(torch.isinf(x).any()), bool(x.sum().isnan()))
        print(0 < x.sum().item() < 1)
        print(x.cpu().isfinite().all().item())
        known = torch.arange(64, device="cuda")
        del known
        print(torch.empty(64, dtype=torch.long, device="cuda").cpu().sum().item())  # the same block
        known = torch.ones(64, 64, device="cuda")
        known @= x
        print(0 < known.sum().item() < 1)
    """)
    assert out.split() == ["True", *["False"] * 3, "True", "True", "0", "True"]
    assert {one["where"] for one in process["unknown_reads"]} == {f"train.py:{line} in <module>" for line in (5, 6, 9, 12)}
    assert {one["what"] for one in process["unknown_reads"] if one["where"].startswith("train.py:6")} == {
        "a copy to the host"
    }
    assert "made-up values were read where a GPU would have computed them, by" in told


SOUND = {
    "distributions take unknown parameters and refuse wrong ones": (
        """
        scores = torch.randn(128, 512, device="cuda")
        torch.distributions.Normal(scores, scores.exp()).log_prob(scores)
        torch.distributions.Categorical(probs=scores.softmax(-1)).sample()
        torch.distributions.MultivariateNormal(torch.zeros(512, device="cuda"), scores.T @ scores).rsample()
        try:
            torch.distributions.Normal(torch.zeros(2, device="cuda"), torch.tensor([-1.0, 1.0], device="cuda"))
        except ValueError:
            print("refused")
        """,
        "refused",
    ),
    "factors of unknown matrices are no errors": (
        """
        matrix = torch.randn(512, 512, device="cuda")
        torch.linalg.cholesky(matrix), torch.linalg.inv(matrix), torch.linalg.solve(matrix, matrix)
        try:
            torch.linalg.inv(torch.zeros(3, 3, device="cuda"))
        except torch.linalg.LinAlgError:
            print("singular")
        """,
        "singular",
    ),
    "the loss scale grows once and drops no update": (
        """
        model = torch.nn.Linear(128, 128).cuda()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(growth_interval=3)
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        for _ in range(4):
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.randn(8, 128, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer), scaler.update(), optimizer.zero_grad()
        print(scaler.get_scale(), len(steps))
        """,
        f"{2 * 65536.0} 4",
    ),
}


def test_what_checks_its_values_runs_on_unknown_ones(emulate_parts):
    out, _, _ = emulate_parts("import torch", *(code for code, _ in SOUND.values()))
    assert dict(zip(SOUND, out.splitlines(), strict=True)) == {name: printed for name, (_, printed) in SOUND.items()}


def test_the_programs_generators_advance_as_they_do_without(emulate_parts):
    code = """
        import torch
        torch.manual_seed(1)
        held = torch.randint(0, 1000, (64,), device="cuda"), torch.rand(64, device="cuda"), torch.randperm(64, device="cuda")
        held += (torch.bernoulli(held[1]), torch.multinomial(held[1], 2), torch.nn.functional.dropout(held[1]))
        print(torch.rand(1).item(), torch.cuda.get_rng_state().tolist())
    """
    assert emulate_parts(UNTRACKED, code)[0] == emulate_parts(code)[0]


def test_choices_among_unknown_scores_are_dealt_in_turn(emulate_parts):
    out, told, process = emulate_parts("""
        import torch
        scores = (torch.randn(4096, 64, device="cuda") @ torch.randn(64, 16, device="cuda")).softmax(-1)
        chosen = scores.topk(2)[1]
        print(chosen[:3].tolist(), chosen.flatten().bincount().tolist() == [512] * 16)
        hit = torch.nn.functional.one_hot(chosen, 256).permute(2, 1, 0)  # 16 MiB
        print(hit.sum((-1, -2)).greater(0).nonzero().numel(), torch.where(hit[3])[1].numel())
        print(scores.argmax(-1)[:3].tolist(), scores.T[:4].sort(0)[1][:, :3].tolist())
    """)
    assert out.splitlines() == [
        "[[0, 1], [2, 3], [4, 5]] True",
        "16 512",
        "[0, 1, 2] [[0, 1, 2], [1, 2, 3], [2, 3, 0], [3, 0, 1]]",
    ]
    assert {"what": "topk", "where": "train.py:4 in <module>", "count": 1} in process["dealt"]
    assert "balanced routing is assumed" in told
    assert [row["what"] for row in process["dealt"]] == ["topk"], "the sizes follow from no other choice"


SCORES = """
    import torch
    batch = torch.randn(512, 64, device="cuda")
    scores = (batch @ torch.randn(64, 16, device="cuda")).softmax(-1)
    labels = torch.randint(16, (512,), device="cuda")
    choices = scores.argmax(-1)
"""


METRICS = """
    right = (choices == labels).sum().item()
    right = (choices == labels).float().mean().item()
    right = choices.eq(labels.view_as(choices)).sum().cpu().numpy()
    right = int((choices[labels != 3] == labels[labels != 3]).sum())
    right = scores.topk(5)[1].t().eq(labels.view(1, -1).expand(5, -1))[:5].reshape(-1).float().sum().item()
    right = (torch.cat([choices, choices]).cpu() == 3).sum()
    right = torch.bincount(labels * 16 + choices, minlength=256).reshape(16, 16).diag().float().mean().item()
    next_token = scores[0].argmax().item()
"""


def test_metrics_rest_on_no_balanced_routing(emulate_parts):
    _, told, process = emulate_parts(SCORES, METRICS)
    assert process["dealt"] == []
    assert "balanced routing" not in told


@pytest.mark.parametrize(
    "routing",
    [
        "rows = batch[choices == 3]",
        "rows = [batch[torch.where(choices == expert)] for expert in range(16)]",
        "parts = batch.split(torch.nn.functional.one_hot(choices, 16).sum(0).tolist())",
        *(
            pytest.param(text, marks=pytest.mark.weekly)
            for text in (
                "parts = batch.split(torch.bincount(choices, minlength=16).cpu().tolist())",
                "capacity = torch.nn.functional.one_hot(choices, 16).sum(0).max().item()",
                "rows = batch if (choices == 3).any() else None",
                "wrong = batch[choices != labels]",
                "mask = (choices == 3).cpu()",
            )
        ),
    ],
)
def test_sizes_and_branches_that_follow_from_choices_rest_on_balanced_routing(emulate_parts, routing):
    _, told, process = emulate_parts(SCORES, routing)
    assert [(row["what"], row["where"]) for row in process["dealt"]] == [("argmax", "train.py:6 in <module>")]
    assert "balanced routing is assumed" in told


def test_a_program_that_waits_for_values_to_be_followed_says_where(emulate):
    """What takes longer than all else is named, and neither what takes less nor a kernel that takes long itself."""
    done, report = emulate(
        """
        import sys, time
        import torch

        def choose():
            for _ in range(8):
                torch.rand(1 << 21, 2, device="cuda").argmax(-1)

        def wait():
            choose()
            time.sleep(2 * (time.perf_counter() - began))

        def convert():
            torch.ones(1 << 24).to("cuda", torch.bfloat16)

        torch.cuda.init()
        sys.modules["_gputrain_emulated_values.following_time"]._LEAST_SECONDS = 0
        following = torch._gputrain_operators.time
        for action in (wait, convert, choose):
            following.__init__()
            began = time.perf_counter()
            action()
            print(bool(following.sentence()))
        """,
        fresh=True,
    )
    assert done.stdout.split() == ["False", "False", "True"], done.stderr
    sentence = report["processes"][0]["slow_following"]
    assert "s in argmax at train.py:7 in choose" in sentence
    assert sentence in done.stderr


TRACE = """
    def step(number):
        hidden = torch.nn.functional.embedding(torch.arange(64, device="cuda") + number, table)
        for layer in layers:
            normal = norm(hidden)
            one, other = (torch.nn.functional.gelu(layer(normal)) * normal.sigmoid()).chunk(2, -1)
            hidden = hidden + torch.cat([one.tanh() * other, other], -1) + hidden.exp() * 0.1
        small = torch.zeros(16, device="cuda", requires_grad=True)
        twice = small * 2
        loss = hidden.float().square().mean() + twice.sum() + twice.exp().sum() + twice[:4].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(), optimizer.zero_grad()

    import torch
    torch.cuda.init()
    table = torch.zeros(128, 256, device="cuda", requires_grad=True)
    layers, norm = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4)).cuda(), torch.nn.LayerNorm(256).cuda()
    parameters = [table, *layers.parameters(), *norm.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    import gc
    gc.disable()
    for number in range(3):
        step(number)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    begin = min(event["addr"] for event in events if event["action"] == "segment_alloc")
    for event in events:
        print(event["action"], event["size"], event["addr"] - begin)
"""


def test_the_allocator_does_the_same_as_without(emulate_parts):
    """Gradients that are added in place, above all: autograd does so where nobody else holds the tensor or its storage."""
    tracked, untracked = emulate_parts(TRACE)[0].splitlines(), emulate_parts(UNTRACKED, TRACE)[0].splitlines()
    assert len(tracked) > 1000
    assert tracked == untracked


@pytest.mark.slow
def test_what_others_write_is_unknown(emulate_parts):
    pytest.importorskip("triton")
    out, _, process = emulate_parts("""
        import torch, triton, triton.language as tl

        @triton.jit
        def fill(to, count: tl.constexpr):
            tl.store(to + tl.arange(0, count), 7)

        @torch.library.custom_op("mine::increase_", mutates_args={"x"}, device_types="cuda")
        def increase_(x: torch.Tensor) -> None:
            pass

        @torch.compile
        def increase_compiled(x, y):
            x.add_(y)

        x, y, z, read = (torch.ones(8, dtype=torch.long, device="cuda") for _ in range(4))
        fill[(1,)](x, 8), increase_(y), increase_compiled(z, read)
        print(x.tolist(), y.tolist(), z.tolist(), read.tolist())
    """)
    assert out == f"{[0] * 8} {[0] * 8} {[0] * 8} {[1] * 8}\n"
    assert sum(one["count"] for one in process["unknown_reads"]) == 3


OTHER_LIBRARY = r"""
    #include <stddef.h>
    struct dim3 { unsigned x, y, z; };
    struct accessor { float *data; long sizes[2], strides[2]; };
    int cudaLaunchKernel(const void *, struct dim3, struct dim3, void **, size_t, void *);
    void **__cudaRegisterFatBinary(void *);
    void __cudaRegisterFunction(void **, const void *, char *, const char *);
    void keep(const long *read, struct accessor written, int count) {
      void *arguments[] = {&read, &written, &count};
      cudaLaunchKernel(keep, (struct dim3){1, 1, 1}, (struct dim3){32, 1, 1}, arguments, 0, NULL);
    }
    __attribute__((constructor)) static void begin(void) {
      __cudaRegisterFunction(__cudaRegisterFatBinary(NULL), keep, "keep", "keep");
    }
    void launch(const long *read, float *written) { keep(read, (struct accessor){written, {2, 8}, {8, 1}}, 16); }
"""


def test_zeros_that_are_given_to_a_kernel_of_another_library_are_unknown(emulate, tmp_path):
    (tmp_path / "other.c").write_text(OTHER_LIBRARY)
    _, process = emulate("""
        import ctypes, subprocess, torch
        subprocess.run(["cc", "-shared", "-fPIC", "-o", "other.so", "other.c"], check=True)
        launch = ctypes.CDLL("./other.so").launch
        launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        lengths = torch.tensor([3, 4], device="cuda")
        before, given, untouched = (torch.zeros(16, device="cuda") for _ in range(3))
        launch(lengths.data_ptr(), given[8:].data_ptr())
        assert lengths.tolist() == [3, 4]
        assert untouched.sum().item() == before.sum().item() == 0
        assert torch.zeros(16, device="cuda").sum().item() == 0
        print(given.sum().item())
        given.zero_()
        assert given.sum().item() == 0
    """)
    assert [one["where"] for one in process["processes"][0]["unknown_reads"]] == ["train.py:12 in <module>"]
