"""Small collectives give what NCCL gives, for each type and operation, between GPUs of one process and of several."""

import json

import pytest

# Calls the stand-in of NCCL for four GPUs, and computes by torch what NCCL's kernels compute, one addition after the other.
EACH_TYPE = """
    import ctypes
    import numpy
    import torch

    RANKS = 4
    nccl = ctypes.CDLL("libnccl.so.2")
    comms = (ctypes.c_void_p * RANKS)()
    assert nccl.ncclCommInitAll(comms, RANKS, None) == 0
    comms = [ctypes.c_void_p(comm) for comm in comms]
    TYPES = [torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16, torch.float32,
             torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    SIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}  # whose bits torch adds and multiplies alike
    torch.manual_seed(0)

    def pointer(tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    def drawn(type_):  # all bits alike: infinities, the smallest numbers, and what is no number
        bits = torch.randint(0, 256, (RANKS, 8192 * type_.itemsize), dtype=torch.uint8)
        bits[1:, : 1024 * type_.itemsize] = bits[0, : 1024 * type_.itemsize]  # equal numbers, whose sums tie and overflow
        return bits.view(type_)

    def saturated(value, type_):
        return value.float().clamp(-torch.finfo(type_).max, torch.finfo(type_).max).to(type_)

    def applied(function, one, other):
        type_ = one.dtype
        if type_.itemsize == 1 and type_.is_floating_point:
            return saturated(function(one.half(), other.half()), type_)
        return function(one.view(SIGNED.get(type_, type_)), other.view(SIGNED.get(type_, type_))).view(type_)

    def compared(function):
        def numbers(one, other):
            return torch.where(other.isnan(), one, torch.where(one.isnan(), other, function(one, other)))

        def run(one, other):
            if one.dtype.is_floating_point:
                return applied(numbers, one, other)
            if one.dtype == torch.uint64:  # shifted into the range of int64
                least = torch.tensor(-(2**63))
                return (function(one.view(torch.int64) ^ least, other.view(torch.int64) ^ least) ^ least).view(one.dtype)
            if one.dtype == torch.uint32:
                return function(one.long(), other.long()).to(torch.uint32)
            return applied(function, one, other)
        return run

    def expected(sent, function, factor=None):
        if factor is not None:
            sent = [applied(torch.mul, one, factor.expand_as(one)) for one in sent]
        value = sent[0]
        for other in sent[1:]:
            value = function(value, other)
        return value

    def reduced(sent, operations):
        heard = [torch.empty_like(one) for one in sent]
        nccl.ncclGroupStart()
        for one, to, comm, operation in zip(sent, heard, comms, operations):
            type_, count = TYPES.index(one.dtype), ctypes.c_size_t(one.numel())
            assert nccl.ncclAllReduce(pointer(one), pointer(to), count, type_, operation, comm, None) == 0
        assert nccl.ncclGroupEnd() == 0
        return heard

    def check(name, heard, wanted):
        for one in heard:
            one, other = (value.double() if value.is_floating_point() else value for value in (one, wanted))
            assert torch.equal(torch.nan_to_num(one, nan=1e300), torch.nan_to_num(other, nan=1e300)), (name, one, other)

    def added(one, other):
        return applied(torch.add, one, other)

    checked = 0
    for number, type_ in enumerate(TYPES):
        sent = drawn(type_)
        floats = type_.is_floating_point
        functions = [added, lambda one, other: applied(torch.mul, one, other)]
        functions += [compared(torch.maximum), compared(torch.minimum)]
        for operation, function in enumerate(functions):
            check((type_, operation), reduced(sent, [operation] * RANKS), expected(sent, function))
            checked += 1
        # Sums that wrap are divided, too; floating point numbers are multiplied first.
        share = torch.tensor(1 / RANKS, dtype=torch.float64).to(type_) if floats else None
        wanted = expected(sent, added, share)
        if not floats:
            whole = wanted.numpy()
            divided = [abs(value) // RANKS * (1 if value >= 0 else -1) for value in whole.tolist()]
            wanted = torch.from_numpy(numpy.array(divided, dtype=whole.dtype))
        check((type_, "mean"), reduced(sent, [4] * RANKS), wanted)
        for on_host in (1, 0):
            factor = torch.tensor(0.3 if floats else 3, dtype=torch.float32).to(type_)
            there = factor if on_host else factor.cuda()
            made = []
            for comm in comms:
                made.append((ctypes.c_int * 2)(0, -7))
                assert nccl.ncclRedOpCreatePreMulSum(made[-1], pointer(there), number, on_host, comm) == 0
                assert made[-1][0] > 4 and made[-1][1] == -7  # nothing behind it is written to
            check((type_, "factor", on_host), reduced(sent, [one[0] for one in made]), expected(sent, added, factor))
            for comm, operation in zip(comms, made):
                assert nccl.ncclRedOpDestroy(operation[0], comm) == 0
                assert nccl.ncclRedOpDestroy(operation[0], comm) != 0  # it is gone
            checked += 1
        checked += 1
    zeros = torch.tensor([[0.0], [-0.0], [0.0], [-0.0]])
    print(checked, [torch.signbit(reduced(zeros, [operation] * 4)[0]).item() for operation in (2, 3)])
"""

# Each collective, called for four GPUs of one process in one group.
EACH_COLLECTIVE = """
    import ctypes
    import os
    import torch

    RANKS, INT32, SUM = 4, 2, 0
    nccl = ctypes.CDLL("libnccl.so.2")
    comms = (ctypes.c_void_p * RANKS)()
    assert nccl.ncclCommInitAll(comms, RANKS, None) == 0
    comms = [ctypes.c_void_p(comm) for comm in comms]
    sent = [torch.arange(8, dtype=torch.int32) + 10 * rank for rank in range(RANKS)]

    def run(call, size):
        heard = [torch.full((size,), -1, dtype=torch.int32) for _ in range(RANKS)]
        nccl.ncclGroupStart()
        for rank in range(RANKS):
            assert call(ctypes.c_void_p(sent[rank].data_ptr()), ctypes.c_void_p(heard[rank].data_ptr()), rank) == 0
        assert nccl.ncclGroupEnd() == 0
        return heard

    def same(heard, wanted):
        assert all(map(torch.equal, heard, wanted)), (heard, wanted)

    whole, two, eight = torch.stack(sent), ctypes.c_size_t(2), ctypes.c_size_t(8)
    nothing = torch.full((8,), -1, dtype=torch.int32)
    same(run(lambda a, b, r: nccl.ncclReduce(a, b, eight, INT32, SUM, 2, comms[r], None), 8),
         [whole.sum(0, dtype=torch.int32) if rank == 2 else nothing for rank in range(RANKS)])
    same(run(lambda a, b, r: nccl.ncclReduceScatter(a, b, two, INT32, SUM, comms[r], None), 2),
         whole.sum(0, dtype=torch.int32).split(2))
    same(run(lambda a, b, r: nccl.ncclAllGather(a, b, eight, INT32, comms[r], None), 32), [whole.flatten()] * RANKS)
    same(run(lambda a, b, r: nccl.ncclBroadcast(a, b, eight, INT32, 3, comms[r], None), 8), [sent[3]] * RANKS)
    same(run(lambda a, b, r: nccl.ncclAlltoAll(a, b, two, INT32, comms[r], None), 8),
         [whole[:, 2 * rank : 2 * rank + 2].flatten() for rank in range(RANKS)])
    same(run(lambda a, b, r: nccl.ncclSend(a, eight, INT32, (r + 1) % RANKS, comms[r], None)
             or nccl.ncclRecv(b, eight, INT32, (r - 1) % RANKS, comms[r], None), 8),
         [sent[rank - 1] for rank in range(RANKS)])

    halves = (ctypes.c_void_p * RANKS)()
    nccl.ncclGroupStart()
    for rank in range(RANKS):
        assert nccl.ncclCommSplit(comms[rank], rank % 2, -rank, ctypes.byref(halves, 8 * rank), None) == 0
    assert nccl.ncclGroupEnd() == 0
    comms = [ctypes.c_void_p(half) for half in halves]
    ordered = [torch.cat([sent[rank % 2 + 2], sent[rank % 2]]) for rank in range(RANKS)]  # by falling numbers
    same(run(lambda a, b, r: nccl.ncclAllGather(a, b, eight, INT32, comms[r], None), 16), ordered)
    for _ in range(300):
        run(lambda a, b, r: nccl.ncclAllReduce(a, b, eight, INT32, SUM, comms[r], None), 8)
    print(sum(name.startswith("nccl-") for name in os.listdir(os.environ["GPUTRAIN_EMULATED_STATE"])) < 50)
"""

TWO_PROCESSES = """
    import os, sys
    import torch
    import torch.distributed as dist
    if "RANK" not in os.environ:
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__])
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")

    def reduced(value, type_, operation=dist.ReduceOp.SUM):
        tensor = torch.tensor([value], dtype=type_, device="cuda")
        dist.all_reduce(tensor, op=operation)
        return tensor.item()

    assert reduced(1764284000123456789 + rank, torch.int64, dist.ReduceOp.MAX) == 1764284000123456790
    assert reduced(1.5 + rank, torch.bfloat16) == 4
    assert reduced(1.5 + rank, torch.float16, dist.ReduceOp.AVG) == 2
    assert reduced(4.0, torch.float32, dist._make_nccl_premul_sum(0.5)) == 4
    factor = torch.tensor(0.25, device="cuda")
    assert reduced(4.0, torch.float32, dist._make_nccl_premul_sum(factor)) == 2
    many = torch.full((60_000,), 0.5 + rank, device="cuda")
    dist.all_reduce(many)
    assert many.tolist() == [2.0] * 60_000
    shared = torch.tensor([2.5 * rank], device="cuda")
    dist.broadcast(shared, src=1)
    assert shared.item() == 2.5
    gathered = [torch.empty(2, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    dist.all_gather(gathered, torch.full((2,), rank + 0.5, dtype=torch.bfloat16, device="cuda"))
    assert [one.tolist() for one in gathered] == [[0.5, 0.5], [1.5, 1.5]]
    print(end="known\\n")  # in one piece, where output is not buffered
    unknown = torch.ones(300, 300, device="cuda").mm(torch.ones(300, 300, device="cuda")).sum()
    mixed = unknown if rank else torch.tensor(3.0, device="cuda")  # only the second does not know what it has
    dist.all_reduce(mixed)
    mixed.item()
    gradients = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(gradients)
    dist.all_reduce(gradients)
    dist.destroy_process_group()
"""

ONE_PROCESS = """
    import torch
    from torch.cuda import comm, nccl
    tensors = [torch.full((3,), float(i), device=f"cuda:{i}") for i in range(8)]
    nccl.all_reduce(tensors)
    assert all(tensor.tolist() == [28.0] * 3 for tensor in tensors)
    copies = comm.broadcast(torch.arange(5, device="cuda:0"), list(range(8)))
    assert [copy.sum().item() for copy in copies] == [10] * 8
    shared = [torch.full((2,), i + 5.0, device=f"cuda:{i}") for i in range(8)]
    nccl.broadcast(shared)
    assert all(tensor.tolist() == [5.0] * 2 for tensor in shared)
    parts = [torch.empty(1, device=f"cuda:{i}") for i in range(8)]
    nccl.reduce_scatter([torch.arange(8.0, device=f"cuda:{i}") for i in range(8)], parts)
    assert [part.item() for part in parts] == [8.0 * i for i in range(8)]
    grouped = comm.broadcast_coalesced([torch.ones(2, device="cuda:0"), torch.zeros(3, device="cuda:0")], list(range(8)))
    assert [one.tolist() for one in grouped[7]] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
"""


@pytest.mark.parametrize(
    ("program", "printed"), [(EACH_TYPE, "84 [False, True]"), (EACH_COLLECTIVE, "True")], ids=["types", "collectives"]
)
def test_each_gives_what_nccl_gives(emulate, program, printed):
    done, _ = emulate(program, gpus=4)
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr


def test_between_processes_values_are_right_and_what_one_does_not_know_nobody_knows(emulate):
    done, report = emulate(TWO_PROCESSES, gpus=2)
    assert (done.returncode, done.stdout) == (0, "known\n" * 2), done.stderr
    reads = [process["unknown_reads"] for process in report["processes"]]
    assert [[one["what"] for one in of_one] for of_one in reads] == [["a number for the host"]] * 2, json.dumps(reads)
    too_large = {"function": "ncclAllReduce", "calls": 2, "bytes": 4 << 20}
    assert [process["not_exchanged"] for process in report["processes"]] == [[too_large]] * 2
    assert "more than 1 MiB for all GPUs together, by ncclAllReduce (2 times, up to 4.00 MiB)" in done.stderr


def test_eight_gpus_of_one_process(emulate):
    done, report = emulate(ONE_PROCESS, gpus=8)
    assert done.returncode == 0, done.stderr
    assert report["processes"][0]["unknown_reads"] == []


def test_numbers_of_eight_bits_are_added_only_where_nccl_has_kernels_for_them(emulate):
    code = """
        import ctypes
        import torch
        nccl = ctypes.CDLL("libnccl.so.2")
        comm = ctypes.c_void_p()
        assert nccl.ncclCommInitAll(ctypes.byref(comm), 1, None) == 0
        data = (ctypes.c_uint8 * 4)()
        print(nccl.ncclAllReduce(data, data, ctypes.c_size_t(4), 10, 0, comm, None))
    """
    assert [emulate(code, gpu=gpu)[0].stdout.strip() for gpu in ("a100", "h100")] == ["4", "0"]
