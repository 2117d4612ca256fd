"""Programs that look whether unknown values changed, on an emulated GPU. Needs a CUDA build of torch, and no GPU."""

import pytest

LOOKS = """
    import copy, io, torch
    layers = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 8)).cuda()
    weights = list(layers.parameters())
    optimizer = torch.optim.AdamW(weights)

    def numbers():
        with torch.no_grad():
            return {
                "norms": [weight.norm().item() for weight in weights],
                "total norm": torch.nn.utils.get_total_norm(weights).item(),
                "sum of norms": sum(weight.double().abs().sum() for weight in weights).item(),
                "norm of all": torch.cat([weight.flatten() for weight in weights]).norm().item(),
                "mean": weights[0].mean().item(),
                "copy": weights[0].cpu().norm().item(),
            }

    def differ(one, other):
        return [
            not torch.equal(one, other), not torch.allclose(one, other), bool((one != other).any()),
            not (one == other).all(), (one - other).abs().max().item() > 0, bool((one - other).norm() > 1e-6),
            not torch.isclose(one, other).all(), (one != other).sum().item() > 0,
            not torch.equal(one.cpu(), other.cpu()), not torch.allclose(one.cpu(), other.cpu()),
        ]

    def step():
        loss = layers(torch.randn(4, 512, device="cuda")).square().mean()
        loss.backward()
        assert all((weight.grad != 0).any() and weight.grad.norm() > 0 for weight in weights)
        assert all(torch.isfinite(weight.grad).all() for weight in weights)
        torch.nn.utils.clip_grad_norm_(weights, 1.0, error_if_nonfinite=True)
        optimizer.step(), optimizer.zero_grad()
        return loss.item()

    before, clones = numbers(), [weight.detach().clone() for weight in weights]
"""


@pytest.fixture
def look(emulate_parts):
    """Run code after ``LOOKS``, and return what it prints."""
    return lambda code: emulate_parts(LOOKS, code)[0]


def test_what_a_step_wrote_to_differs_in_each_way_to_look_at_it_and_its_numbers_are_others(look):
    printed = look("""
        losses = [step() for _ in range(20)]
        assert losses[-1] < losses[0] and all(0 < loss < 1 for loss in losses)
        after = numbers()
        assert all(one != other for one, other in zip(before.pop("norms"), after.pop("norms")))
        print(*(name for name in before if before[name] == after[name]))
        print(*(number for pair in zip(weights, clones) for number, yes in enumerate(differ(*pair)) if not yes))
        try:
            torch.testing.assert_close(weights[0].detach(), clones[0])
        except AssertionError:
            print("not close")
    """)
    assert printed == "\n\nnot close\n"


def test_what_nothing_was_written_to_is_equal_and_its_numbers_are_the_same(look):
    printed = look("""
        layers(torch.randn(4, 512, device="cuda")).sum().backward()
        assert numbers() == before
        pairs = [*zip(weights, clones), *zip(weights, copy.deepcopy(weights)), (weights[0], weights[0])]
        print(*(number for one, other in pairs for number, yes in enumerate(differ(one, other)) if yes))
        torch.testing.assert_close(weights[0].detach(), clones[0])
    """)
    assert printed == "\n"


def test_inside_of_a_module_weights_read_the_same_each_time_and_a_result_is_equal_to_its_clone(look):
    printed = look("""
        class Looks(torch.nn.Module):
            def forward(self, x):
                y = weights[0].square() @ x
                print(torch.equal(y, y.clone()), (y == y.clone()).all().item(), torch.equal(y, y + y))
                return weights[0].norm().item(), torch.cat([w.flatten() for w in weights]).sum().item()

        x = torch.randn(512, 512, device="cuda") @ weights[0]
        with torch.no_grad():
            first = Looks()(x)
        print(first == Looks()(x))
    """)
    assert printed == "True True False\nTrue True False\nTrue\n"


def test_only_what_was_written_to_differs(look):
    printed = look("""
        with torch.no_grad():
            weights[0][3].mul_(2)
        one, other = weights[0], clones[0]
        print(torch.equal(one, other), torch.equal(one[3], other[3]), torch.equal(one[4:], other[4:]))
    """)
    assert printed == "False False True\n"


def test_weights_that_were_saved_and_loaded_are_equal_until_they_are_trained(look):
    printed = look("""
        file = io.BytesIO()
        torch.save(layers.state_dict(), file)
        file.seek(0)
        loaded = copy.deepcopy(layers)
        torch.nn.init.normal_(loaded[0].weight)
        print(torch.equal(loaded[0].weight, weights[0]))
        loaded.load_state_dict(torch.load(file, map_location="cpu"))
        print(all(torch.equal(one, other) for one, other in zip(loaded.parameters(), weights)))
        step()
        print(any(torch.equal(one, other) for one, other in zip(loaded.parameters(), weights)))
    """)
    assert printed == "False\nTrue\nFalse\n"


def test_what_was_saved_equals_what_is_loaded_on_the_host_and_on_the_gpu_however_large_it_is(look):
    printed = look("""
        layers.register_parameter("scale", torch.nn.Parameter(torch.ones((), device="cuda") * weights[0].norm()))
        held = layers.bfloat16().state_dict()
        file = io.BytesIO()
        torch.save(held, file)
        for device in ("cpu", "cuda"):
            file.seek(0)
            loaded = torch.load(file, map_location=device)
            print({torch.equal(loaded[name], held[name].to(device)) for name in held})
            print({torch.equal(loaded[name].cpu(), held[name].cpu()) for name in held})
        print(loaded["scale"].item() == held["scale"].item() == held["scale"].cpu().item())
    """)
    assert printed == "{True}\n{True}\n{True}\n{True}\nTrue\n"


def test_large_tensors_of_the_host_count_as_different_if_one_element_or_their_order_differs(look):
    printed = look("""
        host = torch.randn(1000, 1001)
        other = host.clone()
        other[3, 7] += 1
        last = host.clone()
        last[-1, -1] += 1
        print([torch.equal(host.cuda(), one.cuda()) for one in (host.clone(), other, last, host.flip(1))])
    """)
    assert printed == "[True, False, False, False]\n"


def test_large_random_tensors_are_equal_if_they_are_drawn_from_the_same_state(look):
    printed = look("""
        def drawn(seed, draw):
            torch.manual_seed(seed)
            return draw(torch.empty(1000, 1000, device="cuda"))

        for draw in (torch.randn_like, torch.nn.init.kaiming_uniform_, lambda tensor: tensor.bernoulli_(0.5)):
            print(torch.equal(drawn(1, draw), drawn(1, draw)), torch.equal(drawn(1, draw), drawn(2, draw)))
        print(torch.equal(drawn(1, lambda one: one.uniform_(0, 1)), drawn(1, lambda one: one.uniform_(0, 2))))
    """)
    assert printed == "True False\n" * 3 + "False\n"


def test_batch_normalization_changes_its_running_statistics_in_training_and_not_in_evaluation(look):
    printed = look("""
        images = torch.randn(4, 3, 8, 8, device="cuda")
        for run in (
            torch.nn.BatchNorm2d(3).cuda(), torch.nn.BatchNorm2d(3, dtype=torch.float64).cuda(),
            torch.nn.InstanceNorm2d(3, track_running_stats=True).cuda(),
        ):
            for training in (False, True):
                run.train(training)
                mean, variance = run.running_mean.clone(), run.running_var.clone()
                run(images.to(mean.dtype))
                print(torch.equal(run.running_mean, mean), torch.equal(run.running_var, variance))
        mean = torch.zeros(3, device="cuda")
        torch.batch_norm_update_stats(images, mean, torch.ones_like(mean), 0.1)
        print((mean == 0).all().item())
    """)
    assert printed == "True True\nFalse False\n" * 3 + "False\n"


def test_a_loop_that_waits_for_a_small_number_ends(look):
    printed = look("""
        while True:
            optimizer.zero_grad()
            weights[0].data.mul_(0.9)
            if weights[0].norm().item() < 1e-3:
                break
        print("small")
    """)
    assert printed == "small\n"


def test_sharded_weights_differ_after_a_step_and_not_before(emulate):
    done, _ = emulate("""
        import torch, torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(2))).cuda()
        [fully_shard(layer) for layer in layers], fully_shard(layers)
        optimizer = torch.optim.AdamW(layers.parameters())

        def norms():
            return [
                [number(weight.detach()).item() for weight in layers.parameters()]
                for number in (
                    lambda w: w.to_local().norm(), lambda w: w.full_tensor().norm(), lambda w: w.norm().full_tensor()
                )
            ]

        before, whole = norms(), [weight.full_tensor().clone() for weight in layers.parameters()]
        for trained in (False, True):
            layers(torch.randn(8, 512, device="cuda")).sum().backward()
            if trained:
                optimizer.step()
            now = norms()
            print([one == other for one, other in zip(before, now)])
            print({torch.equal(weight.full_tensor(), one) for weight, one in zip(layers.parameters(), whole)})
        dist.destroy_process_group()
    """)
    assert done.stdout.splitlines() == ["[True, True, True]", "{True}", "[False, False, False]", "{False}"], done.stderr
