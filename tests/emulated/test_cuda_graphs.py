"""CUDA graphs on an emulated GPU: their memory, what replays write, what is illegal in a capture, and what is counted."""

import importlib.machinery
import json
import textwrap

import pytest

MIB = 1 << 20

needs_triton = pytest.mark.skipif(importlib.machinery.PathFinder.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture
def run(emulate_parts):
    """Run a program: what its last line has, what was told at the end, and the report of its process."""

    def run(code):
        printed, told, process = emulate_parts("import json\nimport torch", code)
        return json.loads(printed.splitlines()[-1]), told, process

    return run


WHOLE_NETWORK = """
    def pools():
        sizes = {}
        for segment in torch.cuda.memory_snapshot():
            pool = str(tuple(segment["segment_pool_id"]))
            sizes[pool] = sizes.get(pool, 0) + segment["total_size"]
        return sizes

    def memory():
        return [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), pools()]

    model = torch.nn.Sequential(
        torch.nn.Linear(4096, 2048), torch.nn.Dropout(p=0.2), torch.nn.Linear(2048, 1024), torch.nn.Dropout(p=0.1)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, capturable=True)
    data, target = torch.randn(640, 4096, device="cuda"), torch.randn(640, 1024, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    steps = optimizer.state[next(model.parameters())]["step"]
    found = {"after the capture": steps.item(), "captured": memory()}
    offset = torch.cuda.default_generators[0].get_offset()
    for _ in range(10):
        graph.replay()
    found |= {"after 10 replays": steps.item(), "offset": torch.cuda.default_generators[0].get_offset() - offset}
    found["replayed"] = memory()
    del graph, loss
    optimizer.zero_grad(set_to_none=True)
    torch._C._cuda_clearCublasWorkspaces()  # which older versions keep in the pool
    torch.cuda.empty_cache()
    found["gone"] = memory()
    print(json.dumps(found))
"""


def test_a_whole_network_takes_the_memory_of_its_pool_and_trains_at_each_replay(run):
    found, told, process = run(WHOLE_NETWORK)
    assert (found["after the capture"], found["after 10 replays"], found["offset"]) == (3, 13, 120)
    allocated, peak, reserved, pools = found["captured"]
    assert reserved == sum(pools.values()) == process["devices"][0]["peak_reserved_bytes"]
    assert pools["(1, 0)"] == 170 * MIB
    assert found["replayed"] == [allocated, peak, reserved, pools], "a replay allocates nothing"
    assert peak == process["devices"][0]["peak_allocated_bytes"]
    assert "(1, 0)" not in found["gone"][3]
    lines = [line for line in told.splitlines() if line.startswith("gputrain:   peak")]
    assert [("at least" in line) for line in lines] == [False, False, True], "the driver's part of a graph is not known"
    assert "not counted: the driver's buffers for CUDA graphs" in told


def test_a_replay_computes_what_is_small_and_known_and_forgets_the_rest(run):
    found, told, _ = run("""
        count = torch.zeros((), dtype=torch.int64, device="cuda")
        table, places = torch.arange(8, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
        pinned, back = (torch.zeros(4, dtype=torch.int64).pin_memory() for _ in range(2))
        weight = torch.randn(1000, 1000, device="cuda")
        large = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            count += 1
            places.copy_(pinned, non_blocking=True)
            y = table[places.clamp(max=7)] * 2 + count
            above = y > 8
            back.copy_(y, non_blocking=True)
            large.copy_((weight @ weight)[0, :4])
        found = [count.item(), places.tolist(), large.tolist()]
        for number in (1, 2, 3):
            pinned.fill_(number)
            graph.replay()
            torch.cuda.synchronize()
            found.append([count.item(), y.tolist(), above.tolist(), back.tolist()])
        count.fill_(100)
        graph.replay()
        found.append(count.item())
        same = large.clone()
        found += [torch.equal(same, large), graph.replay(), torch.equal(same, large), 0 < large.tolist()[0] < 1]
        print(json.dumps(found))
    """)
    assert found[:3] == [0, [0] * 4, [0.0] * 4], "a capture writes nothing"
    for number, replay in enumerate(found[3:6], 1):
        assert replay == [number, [3 * number] * 4, [3 * number > 8] * 4, [3 * number] * 4]
    assert found[6:] == [101, True, None, False, True]
    assert "made-up values were read" in told


def test_what_an_asserting_kernel_of_a_graph_finds_is_raised_by_the_replay(emulate):
    done, _ = emulate("""
        import torch
        places, table = torch.zeros(4, dtype=torch.int64, device="cuda"), torch.arange(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = table[places]
        graph.replay()
        places.fill_(9)
        print("so far")
        graph.replay()
        torch.cuda.synchronize()
    """)
    assert (done.returncode, done.stdout) == (1, "so far\n")
    assert "device-side assert triggered" in done.stderr
    assert "a CUDA graph asserts in index at train.py:6 in <module>: index 9 is out of range for 8 elements" in done.stderr


def test_the_body_of_a_conditional_node_is_forgotten_and_not_run(run):
    found, _, _ = run("""
        x, y = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
        truth, graph = torch.tensor(True, device="cuda"), torch.cuda.CUDAGraph()
        if not hasattr(graph, "begin_capture_to_if_node"):
            print(json.dumps(None))
            raise SystemExit
        with torch.cuda.graph(graph):
            x.add_(1)
            torch.cuda.CUDAGraph.get_currently_capturing_graph().begin_capture_to_if_node(truth)
            y.fill_(7)
            torch.cuda.CUDAGraph.get_currently_capturing_graph().end_capture_to_conditional_node()
            x.add_(1)
        before = y.tolist()
        graph.replay()
        print(json.dumps([x.tolist(), before, y.tolist()[0] not in (1, 7)]))
    """)
    if found is None:
        pytest.skip("this torch captures no conditional nodes")
    assert found == [[3.0] * 4, [1.0] * 4, True]


def test_captures_end_with_the_errors_of_cuda(run):
    found, _, _ = run("""
        import ctypes
        x, pinned, side = torch.ones(1000, device="cuda"), torch.ones(1000).pin_memory(), torch.cuda.Stream()
        outside = torch.cuda.Event()
        outside.record()
        def item(): (x * 2).sum().item()
        def nonzero(): x.nonzero()
        def synchronize(): torch.cuda.synchronize()
        def blocking(): pinned.to("cuda")
        def pageable(): torch.ones(1000).to("cuda")
        def not_blocking(): pinned.to("cuda", non_blocking=True)
        def library(): ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1 << 20))
        def unjoined():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side): x * 2
        def earlier(): torch.cuda.current_stream().wait_event(outside)
        def asked():
            event = torch.cuda.Event()
            event.record()
            event.query()
        def growing(): torch.empty(300 << 20, device="cuda")
        found = {}
        for function in (
            item, nonzero, synchronize, blocking, pageable, not_blocking, library, unjoined, earlier, asked, growing
        ):
            graph, first = torch.cuda.CUDAGraph(), None
            try:
                with torch.cuda.graph(graph):
                    try:
                        function()
                    except Exception as error:
                        first = str(error).splitlines()[0]
                        raise
                last = ""
            except Exception as error:
                last = str(error).splitlines()[0]
            found[function.__name__] = [first, last]
            x.sum().item()  # all goes on afterwards
        print(json.dumps(found))
    """)
    refused, invalid = (
        f"CUDA error: operation {what}"
        for what in ("not permitted when stream is capturing", "failed due to a previous error during capture")
    )
    for name in ("item", "nonzero", "synchronize", "blocking"):
        assert found.pop(name) == [refused, invalid], name
    first, last = found.pop("pageable")
    assert "unless the CPU tensor is pinned" in first or (first, last) == (refused, invalid), "torch 2.9 leaves it to CUDA"
    assert found == {
        "not_blocking": [None, ""],
        "library": [None, invalid],
        "unjoined": [None, "CUDA error: capturing stream has unjoined work"],
        "earlier": ["CUDA error: dependency created on uncaptured work in another stream", invalid],
        "asked": ["CUDA error: operation not permitted on an event last recorded in a capturing stream", invalid],
        "growing": [None, ""],
    }


def test_pools_are_shared_given_back_with_the_last_graph_and_kept_by_a_capture_that_failed(run):
    found, _, _ = run("""
        import gc
        x = torch.randn(1 << 20, device="cuda")
        def reserved():
            gc.collect()
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved()
        before, graphs = reserved(), [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        with torch.cuda.graph(graphs[0]): y = x * 2 + 1
        own = reserved()
        with torch.cuda.graph(graphs[1], pool=graphs[0].pool()): z = x * 2 + 1
        shared = reserved()
        del y, z
        graphs[0].reset()
        one = reserved()
        del graphs
        both, graph = reserved(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                y = torch.empty(1 << 28, device="cuda")
                y.sum().item()
        except torch.AcceleratorError:
            pass
        del graph, y
        print(json.dumps([size - before for size in (own, shared, one, both, reserved())]))
    """)
    own, shared, one, both, failed = found
    assert own > 0
    assert (shared, one, both) == (own, own, 0)
    assert failed >= 1 << 30


@needs_triton
def test_compiled_code_with_reduced_overhead_is_recorded_and_replayed(run):
    found, told, process = run("""
        model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        compiled = torch.compile(model, mode="reduce-overhead")
        for _ in range(4):
            compiled(torch.randn(512, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        pools = sum(one["total_size"] for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0))
        print(json.dumps([torch.cuda.memory_reserved(), pools]))
    """)
    reserved, pools = found
    assert 0 < pools < reserved == process["devices"][0]["peak_reserved_bytes"]
    graphs = process["graphs"]
    assert (graphs["launched"], graphs["most_kernels"], graphs["most_in_pools"]) == (6, 11, pools)
    assert f"launched 6 times; at most {graphs['most']} at a time with 11 kernels" in told


def test_collectives_of_a_graph_exchange_at_each_replay(emulate):
    code = """
        import os, json
        import torch
        import torch.distributed as dist
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        torch.cuda.set_device(rank)
        flag = torch.ones(1, device="cuda", dtype=torch.int64)
        own, heard = torch.zeros(1, device="cuda", dtype=torch.int64), torch.zeros(1, device="cuda", dtype=torch.int64)
        def work():
            dist.all_reduce(flag)
            torch.add(flag, rank, out=own)
            other = 1 - rank
            calls = [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, heard, other)]
            for call in dist.batch_isend_irecv(calls):
                call.wait()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        flag.fill_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        captured = flag.item()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        # What a group of messages brings is right in memory, and counts as unknown.
        bytes_ = (torch.empty(0, dtype=torch.int64).set_(torch._C._construct_storage_from_data_pointer(
            heard.data_ptr(), torch.device("cpu"), 8)).item())
        with open(f"{rank}.json", "w") as file:
            json.dump([captured, flag.item(), bytes_], file)
        dist.barrier()
        del graph
        dist.destroy_process_group()
    """
    done, _ = emulate(textwrap.dedent(LAUNCHED.format(code=textwrap.dedent(code))), gpus=2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[1, 8, 8 + 1], [1, 8, 8 + 0]]


LAUNCHED = '''
import json, os, subprocess, sys
open("rank.py", "w").write("""{code}""")
variables = dict(MASTER_ADDR="localhost", MASTER_PORT="0", WORLD_SIZE="2")
import socket
with socket.socket() as free:
    free.bind(("localhost", 0))
    variables["MASTER_PORT"] = str(free.getsockname()[1])
environments = [{{**os.environ, **variables, "RANK": str(rank)}} for rank in range(2)]
ranks = [subprocess.Popen([sys.executable, "rank.py"], env=one) for one in environments]
status = [rank.wait() for rank in ranks]
assert status == [0, 0], status
print(json.dumps([json.load(open(f"{{rank}}.json")) for rank in range(2)]))
'''


OWN = """
    import os
    import torch
    from torch import nn

    CHANGE = os.environ.get("CHANGE", "")

    def graphed(setup):
        net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(setup.device)
        setup.watch(net)
        optimizer = torch.optim.AdamW(net.parameters(), fused=True, capturable=True)
        batch = torch.randn(32, 256, device=setup.device)

        def step():
            loss = net(batch).square().mean()
            if CHANGE == "more":
                for _ in range(8):
                    loss = loss + 1
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                yield step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        while True:
            if CHANGE == "recaptures":
                del graph, loss
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    loss = step()
            if CHANGE == "eager":
                loss = step()
            else:
                graph.replay()
            yield loss

    def test_graphed(gputrain):
        gputrain.check(graphed, precision="fp32", batch_size=32)
"""
CHANGES = {
    "more": "has the GPU do 32 tasks a step (24 before), those of CUDA graphs included: 8 more at test_own.py:18 in "
    "graphed.<locals>.step, loss = loss + 1",
    "recaptures": "captures 1 CUDA graph a step (0 before): 1 more at test_own.py:37 in graphed, in torch/cuda/graphs.py",
    "eager": "launches 12 kernels a step (0 before) and calls libraries such as cuBLAS and cuDNN 11 times a step (0 before)",
}


@pytest.fixture(scope="module")
def recorded(run_tests_in, tmp_path_factory):
    """A folder with a training by a graph and its baseline, and the run that recorded it."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "test_own.py").write_text(textwrap.dedent(OWN))
    done, results = run_tests_in(folder, "--gpu-baseline-update")
    assert done.returncode == 0, done.stdout
    return folder, results["test_graphed"]["reply"]


def test_a_graph_that_updates_the_weights_is_counted_with_the_lines_of_its_capture(recorded):
    _, reply = recorded
    (kind,) = reply["counts"]["kinds"]
    assert (kind["replays"], kind["replayed"], "launches" in kind, "captures" in kind) == (1, 24, False, False)
    assert kind["library_flops"] > 0
    rows = [row for row in reply["counts"]["causes"] if row.get("replayed")]
    assert sum(row["counts"][0] for row in rows) == 24
    texts = {(row["own"]["text"], row.get("backward", False)) for row in rows}
    network = "loss = net(batch).square().mean()"
    assert texts == {(network, False), (network, True), ("loss.backward()", False), ("optimizer.step()", False)}
    (launch,) = [row for row in reply["counts"]["causes"] if row["what"] == "replays"]
    assert launch["own"]["text"] == "graph.replay()"
    assert reply["flops_per_step"] is None, "the operators of a replay are not counted"
    assert "FLOPs are not known, because a step launches CUDA graphs" in reply["notes"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_that_leaves_its_graph_or_runs_more_in_it_fails(recorded, run_tests_in, change):
    folder, _ = recorded
    done, _ = run_tests_in(folder, CHANGE=change)
    assert done.returncode == 1
    assert CHANGES[change] in done.stdout
