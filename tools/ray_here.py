"""A Ray cluster of two nodes on this machine, for tests: the real daemons on loopback, in a folder, without a dashboard.

    python tools/ray_here.py pytest benchmarks --gpu-executor=ray

runs the command with that cluster and ends it afterwards. It takes 1.1 GiB of memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import psutil

_STORE_BYTES = 80 << 20
"""Ray's least is 75 MiB; orders and deliveries are some kilobytes."""

_SHORT = "/tmp"
"""The folder of Ray's sockets, whose whole path may have 107 characters: TMPDIR may be anywhere."""

_CPUS = 4
"""The CPUs of each node, whatever the machine has: a case with parameter servers takes so many."""

_ATTEMPTS = 4
_WAIT_SECONDS = 120


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
        """Start a node that has these resources besides."""
        wanted = {"num_cpus": _CPUS, "object_store_memory": _STORE_BYTES, "resources": resources}
        node = _started(lambda: self._cluster.add_node(**wanted))
        self._cluster.wait_for_nodes(_WAIT_SECONDS)
        return node

    def kill_node(self, node: Any) -> None:
        """Have a node die at once, and all that it runs."""
        self._cluster.remove_node(node, allow_graceful=False)


def _started(start: Callable[[], Any]) -> Any:
    """Return the result of ``start``. Ray gives up a node that is not there within 30 seconds, as on a machine that has
    other work.

    Raises:
        Exception: Ray's own, where it does so again and again.
    """
    there = set(psutil.Process().children(recursive=True))
    for attempt in itertools.count(1):
        try:
            return start()
        except Exception as error:  # Ray raises nothing narrower
            for process in set(psutil.Process().children(recursive=True)) - there:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if attempt == _ATTEMPTS or "timed out" not in str(error):
                raise


@contextlib.contextmanager
def ray_here() -> Iterator[RayHere]:
    """A cluster while the context is open: a node with the resource ``first``, and one with ``second``."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir=_SHORT, ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder  # where Ray notes its latest cluster, in a folder that has to be there
        os.makedirs(f"{folder}/ray")
        from ray.cluster_utils import Cluster

        first = {"num_cpus": _CPUS, "object_store_memory": _STORE_BYTES, "resources": {"first": 2}}
        head = {**first, "include_dashboard": False, "temp_dir": folder}
        cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=head))
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
