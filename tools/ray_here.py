"""A Ray cluster of two nodes on this machine, for tests: the real daemons on loopback, in a folder, without a dashboard.

    python tools/ray_here.py pytest benchmarks --gpu-fleet=ray

runs the command with that cluster and ends it afterwards. It takes 1.1 GiB of memory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

_STORE_BYTES = 80 << 20
"""Ray's least is 75 MiB; orders and deliveries are some kilobytes."""


class RayHere:
    """A running cluster."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address

    @property
    def environment(self) -> dict[str, str]:
        """Variables for whoever uses this cluster."""
        return {"RAY_ADDRESS": self.address}

    def add_node(self, **resources: float) -> Any:
        """Start a node, with two CPUs, that has these resources besides."""
        node = self._cluster.add_node(num_cpus=2, object_store_memory=_STORE_BYTES, resources=resources)
        self._cluster.wait_for_nodes()
        return node

    def kill_node(self, node: Any) -> None:
        """Have a node die at once, and all that it runs."""
        self._cluster.remove_node(node, allow_graceful=False)


@contextlib.contextmanager
def ray_here() -> Iterator[RayHere]:
    """A cluster while the context is open: a node with two CPUs and the resource ``first``, and one with ``second``."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # Other people's work on the machine must not look like a daemon that does not come up.
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        from ray.cluster_utils import Cluster

        first = {"num_cpus": 2, "object_store_memory": _STORE_BYTES, "resources": {"first": 2}}
        cluster = Cluster(initialize_head=True, head_node_args={**first, "include_dashboard": False, "temp_dir": folder})
        try:
            running = RayHere(cluster)
            running.add_node(second=2)
            yield running
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python tools/ray_here.py COMMAND [ARGUMENT ...]")
    with ray_here() as running:
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **running.environment}, check=False).returncode)
