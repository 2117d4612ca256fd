"""A Slurm of two nodes on this machine, for tests: the real slurmctld, slurmd and munged on loopback, in a folder.

    python tools/slurm_here.py pytest benchmarks --gpu-executor=slurm

runs the command with that Slurm and ends it afterwards. It takes root, which slurmd asks for, and Debian's packages
slurmctld, slurmd, slurm-client and munge. There is no accounting, no cgroup and no account of a user in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "srun")
_PLACES = "/usr/sbin:/sbin"
_START_SECONDS = 30.0

_CONF = """
ClusterName=here
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,defer_batch
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
MpiDefault=none
MaxJobCount={most_jobs}
ReturnToService=2
KillWait=5
SlurmdTimeout=300
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=8000 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
"""


def lacking() -> str:
    """Say why there can be no such Slurm here; empty if there can."""
    if os.geteuid() != 0:
        return "it takes root to start slurmd"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)" if missing else ""


class SlurmHere:
    """A running Slurm.

    Args:
        folder: for its state, logs and sockets; gone with it. It wants a short path, for the sockets.
    """

    def __init__(self, folder: Path, *, cpus: int, most_jobs: int) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        ports = _free_ports(3)
        self.conf = folder / "slurm.conf"
        self.conf.write_text(_CONF.format(folder=folder, ports=ports, cpus=cpus, most_jobs=most_jobs))
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for whoever uses this Slurm."""
        return {"SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        """
        Raises:
            RuntimeError: a daemon does not come up; with the end of its log.
        """
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        named = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{option}={self._folder / name}" for option, name in named.items()]
        options += [f"--seed-file={self._folder / 'munge.seed'}", "--force", "--foreground"]
        self._run("munged", *options)
        self._wait("munged", (self._folder / "munge.socket").exists)
        self._run("slurmctld", "-D", "-i")
        for node in ("n1", "n2"):
            self.start_node(node)
        self._wait("slurmctld", lambda: set(self._states("n1,n2")) == {"idle"})

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._run(f"slurmd-{node}", "-D", "-N", node)

    def revive_node(self, node: str) -> None:
        """Start a node that died, and have it take jobs again."""
        self.start_node(node)
        self.command("scontrol", "update", f"nodename={node}", "state=resume")
        self._wait("slurmctld", lambda: set(self._states(node)) == {"idle"})

    def kill_node(self, node: str) -> None:
        """Have a node die: its slurmd at once, and slurmctld takes note."""
        process = self._processes.pop(f"slurmd-{node}")
        process.kill()
        process.wait()
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=died")
        self._kill_steps(node)

    def command(self, *words: str) -> str:
        """Return the output of a command of Slurm; an empty text if it fails."""
        done = subprocess.run(words, env=self._environment(), capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    def stop(self) -> None:
        """End all daemons and what runs under them."""
        if "slurmctld" in self._processes:
            self.command("scancel", "--user=root")
            deadline = time.monotonic() + 15
            while self.command("squeue", "--noheader").strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._kill_steps("n1", "n2")

    def _kill_steps(self, *nodes: str) -> None:
        """The daemons that slurmd leaves to watch jobs, known by their sockets, and all below them."""
        spools = tuple(str(self._folder / f"spool-{node}") for node in nodes)
        for daemon in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                if daemon.name().startswith("slurmstepd") and any(
                    end.laddr.startswith(spools) for end in daemon.net_connections("unix")
                ):
                    for process in (*daemon.children(recursive=True), daemon):
                        process.kill()

    def _states(self, nodes: str) -> list[str]:
        return self.command("sinfo", "--Node", "--noheader", f"--nodes={nodes}", "--format=%T").split()

    def _run(self, name: str, *options: str) -> None:
        program = shutil.which(name.partition("-")[0], path=_path())
        assert program is not None, lacking()
        with open(self._folder / f"{name}.out", "ab") as output:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", "--", program, *options],  # whatever becomes of this process
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": _path(), **self.environment}

    def _wait(self, name: str, ready: object) -> None:
        deadline = time.monotonic() + _START_SECONDS
        assert callable(ready)
        while not ready():
            if self._processes[name].poll() is not None or time.monotonic() > deadline:
                said = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self._folder.glob("*.out")))
                raise RuntimeError(f"{name} does not come up: {said}")
            time.sleep(0.1)


@contextlib.contextmanager
def slurm_here(*, cpus: int = 4, most_jobs: int = 10_000) -> Iterator[SlurmHere]:
    """A Slurm of the nodes n1 and n2 while the context is open, with the partitions ``low`` and, preempting it, ``high``.

    Args:
        cpus: of each node, whatever the machine has.
        most_jobs: that slurmctld keeps; with more it tells sbatch to wait.
    """
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        slurm = SlurmHere(Path(folder), cpus=cpus, most_jobs=most_jobs)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{_PLACES}"


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


if __name__ == "__main__":
    if len(sys.argv) < 2 or lacking():
        sys.exit(lacking() or "usage: python tools/slurm_here.py COMMAND [ARGUMENT ...]")
    with slurm_here() as running:
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **running.environment}, check=False).returncode)
