import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema

from pytest_gputrain.worker.parallel.sharding_rules import found_in_linear_time

MANY = 40


@pytest.fixture
def mesh():
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    dist.init_process_group("fake", rank=0, world_size=2)
    yield DeviceMesh("cpu", [0, 1])
    dist.destroy_process_group()


@pytest.fixture
def reads(monkeypatch):
    """How often all tensors of a call were looked at."""
    reads, read = [], OpSchema.args_spec.fget

    def note(schema):
        reads.append(schema)
        return read(schema)

    monkeypatch.setattr(OpSchema, "args_spec", property(note))
    return reads


def update(mesh, rows):
    weights = [DTensor.from_local(torch.ones(rows, 4), mesh, [Shard(0)]) for _ in range(MANY)]
    torch._foreach_addcdiv_(weights, weights, weights, [float(number) for number in range(MANY)])
    return [(weight.placements, weight.to_local().tolist()) for weight in weights]


@pytest.mark.skipif(not hasattr(_sharding_prop, "_propagate_use_strided_shard_flag"), reason="this torch has no such rule")
def test_tensors_of_an_update_are_not_looked_at_for_each_of_them(mesh, reads):
    with found_in_linear_time():
        update(mesh, rows=3)
    assert len(reads) < MANY / 2


def test_an_update_finds_the_same_shardings(mesh):
    with found_in_linear_time():
        found = update(mesh, rows=5)
    assert found == [((Shard(0),), [[1.0 + number] * 4] * 5) for number in range(MANY)]
