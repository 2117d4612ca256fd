"""The figures of several ranks as one measurement."""

from unit_examples import gpu_environment, measurement

from pytest_gputrain.launch.ranks import merge


def test_nodes_are_named_in_the_order_of_their_ranks() -> None:
    hosts = ("node-2", "node-2", "node-1", "node-1")
    merged = merge([measurement(environment=gpu_environment(host=host)) for host in hosts])
    assert merged.environment.hosts == ("node-2", "node-1")


def test_one_node_is_not_named_twice() -> None:
    assert merge([measurement(), measurement()]).environment.hosts == ()
