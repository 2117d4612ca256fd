"""Runs the order in a folder, and leaves the delivery there.

    python -m pytest_gputrain.execution.fleet.job FOLDER [HOST [node]]

HOST is this node as the others reach it, where the scheduler starts no agents; ``node`` makes it one of the other nodes.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from pathlib import Path

import msgspec

from pytest_gputrain.execution.fleet.scheduler import DELIVERY, ORDER
from pytest_gputrain.execution.launch.node_service import serve
from pytest_gputrain.execution.local import LocalExecutor
from pytest_gputrain.hardware.devices import HardwareError
from pytest_gputrain.records import Delivery, Host, Order
from pytest_gputrain.records.node_protocol import write_record
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.linux import die_with_parent
from pytest_gputrain.utils.reading import read_message


def deliver(folder: Path, rendezvous: str = "") -> None:
    """Run the order in ``folder``, and write its delivery there.

    Args:
        rendezvous: this node as the others of the case reach it, where no scheduler starts their agents.

    Raises:
        OSError, msgspec.DecodeError: the order cannot be read, or the delivery not be written.
    """
    order = msgspec.json.decode(read_message(folder / ORDER), type=Order)
    delivery = _run_order(order, folder, rendezvous)
    with contextlib.suppress(FileNotFoundError):  # The folder is gone if nobody waits any more.
        write_record(folder / DELIVERY, delivery)


def _run_order(order: Order, folder: Path, rendezvous: str) -> Delivery:
    conditions = order.conditions
    conditions = msgspec.structs.replace(conditions, shared=str(folder), rendezvous=rendezvous or conditions.rendezvous)
    local = LocalExecutor(conditions)
    unknown = Host(name=socket.gethostname(), platform=conditions.platform or "unknown", device="", gpus=0)
    try:
        host = local.machine.host
    except HardwareError as error:
        return Delivery(host=unknown, unfit=str(error))
    if host.gpus < order.gpus:
        return Delivery(host=host, unfit=f"the case takes {order.gpus} GPUs of a node, and it sees {host.gpus}")
    try:
        return Delivery(host=host, reply=local.run(order.task, watch=lambda event: None))
    except BadCase as error:
        return Delivery(host=host, refusal=str(error))


def main(folder: Path, host: str = "", node: str = "") -> None:
    # A scheduler ends a job by SIGTERM. `sys.exit` runs the clean-up, which removes the case's folder from the node.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A scheduler may kill srun, which started this process, without killing this process.
    if host:
        die_with_parent()
    if node:
        serve(folder, host, print)
    else:
        deliver(folder, host)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
