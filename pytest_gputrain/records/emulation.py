"""Records of what a program took of an emulated GPU: written by the program's processes, read by `gputrain emulate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from pytest_gputrain.records.case import FORMAT
from pytest_gputrain.records.counts import Counts
from pytest_gputrain.records.expected import ExpectedTime
from pytest_gputrain.utils.units import format_bytes

BESIDE_TORCH: Final = "the driver's buffers for CUDA graphs"
"""The memory that is not known, but that only the device's figure contains: torch's allocated and reserved memory stay
exact."""

ASSUMPTION: Final = "unknown values are assumed to differ from each other and from zero, and to pass checks"
"""The assumption behind sizes and checks that depend on values which nothing computed."""

BALANCED: Final = "balanced routing is assumed: unknown scores were distributed evenly"
"""The assumption behind the choices that an emulated GPU makes among unknown scores."""

MADE_UP: Final = "made-up values were read where a GPU would have computed them"
"""What the host did at the lines whose values nothing computed."""

ESTIMATED: Final = "cuDNN's workspaces of convolutions are estimated, so reserved memory can be off by about the largest"
"""How sure reserved memory is with convolutions."""


class OtherKernels(msgspec.Struct, frozen=True, kw_only=True):
    """An emulated GPU for which there are no kernels, so that kernels for another GPU are used."""

    title: str
    kernels: int
    """90 for those that were compiled for ``sm_90``."""
    is_amd: bool

    @property
    def name(self) -> str:
        """The emulated GPU, as records, sentences and tables name it."""
        return f"{self.title}, by CUDA's kernels for sm_{self.kernels}"

    @property
    def sentence(self) -> str:
        """A sentence on what this means for the figures."""
        other = f"the kernels for sm_{self.kernels} decided what was allocated"
        if self.is_amd:
            return (
                f"{other}: torch for ROCm has its own kernels and libraries, which can take more or less than those of CUDA "
                f"on a real {self.title}"
            )
        return f"{other}: this torch has none for {self.title} and does not run on it; another torch can take more or less"

    def fields(self) -> dict[str, str]:
        """Return the fields of the description for the stand-ins, from which `of_description` makes this record."""
        return {"title": self.title, "amd": str(int(self.is_amd))}

    @classmethod
    def of_description(cls, description: str) -> OtherKernels | None:
        """Return the other GPU that the description for the stand-ins names; None if the GPU has kernels of its own."""
        fields = dict(field.split("=", 1) for field in description.split(","))
        if "title" not in fields:
            return None
        return cls(title=fields["title"], kernels=int(fields["kernels"]), is_amd=fields["amd"] == "1")


class Tensors(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one size that were allocated at one place in the code."""

    bytes: int
    """The size of each tensor."""
    count: int
    """The number of these tensors."""
    where: str
    """File and line of the program, and of the library that it called there."""
    part: str
    """The part of training: weights and buffers, forward pass, backward pass, optimizer, or the rest of the program."""


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """The memory in use at the peak that one part of training allocated."""

    name: str
    """The part of training, as in `Tensors`."""
    bytes: int
    """The bytes that this part has requested and that are in use at the peak."""


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The moment at which most memory was in use."""

    seconds: float
    """The seconds since the first allocation."""
    event: int
    """The number of the allocation that reached the peak, among all of the program."""
    events: int
    """The number of all allocations of the program."""
    bytes: int
    """The requested bytes in use then, before torch rounds them up to blocks."""
    parts: tuple[MemoryPart, ...]
    """The bytes in use at the peak, by the part of training that allocated them."""
    tensors: tuple[Tensors, ...]
    """The largest, by what they take together."""


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the GPU had no memory for."""

    bytes: int
    """The requested bytes."""
    free: int
    """The bytes that were free."""
    where: str
    """File and line of the program; empty if no Python code asked for them."""


class EmulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of torch's allocator on one emulated GPU."""

    index: int
    """The number of the GPU in the process."""
    gpu: int
    """The number of the GPU among all emulated GPUs, whatever CUDA_VISIBLE_DEVICES shows."""
    peak_allocated_bytes: int
    """The highest memory that torch's caching allocator had handed out."""
    peak_reserved_bytes: int
    """The highest memory that torch's caching allocator had reserved."""
    peak: Peak | None
    """The peak; None if the program made too many allocations since, or recorded them itself."""
    course: tuple[tuple[int, int, int], ...]
    """The course of memory: numbers of allocations, with the most bytes in use and reserved around each."""
    refused: tuple[Refused, ...]
    """Requests that the GPU had no memory for."""


class AtLine(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at a line of the program."""

    what: str
    """The operator or the check."""
    where: str
    """File and line of the program."""
    count: int
    """How often it happened there."""


class NotExchanged(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of a function of NCCL that exchanged and computed nothing, since their data is too large."""

    function: str
    """The name of the function."""
    calls: int
    """The number of its calls."""
    bytes: int
    """The most bytes that one GPU has in a call."""


def not_exchanged_sentence(calls: Sequence[NotExchanged]) -> str:
    """Say which results of NCCL are not known."""
    named = ", ".join(f"{one.function} ({one.calls:,} times, up to {format_bytes(one.bytes)})" for one in calls)
    return f"NCCL did not exchange or compute data of more than 1 MiB for all GPUs together, by {named}"


class Unpadded(msgspec.Struct, frozen=True, kw_only=True):
    """Matrix products that Inductor would pad if it measured that to be faster, which an emulated GPU cannot."""

    product: str
    """The operator, the sizes of its matrices, and their type."""
    bytes: int
    """The bytes of the padded copies of one such product."""
    count: int
    """The number of these products in the compiled code."""


def unpadded_sentence(products: Sequence[Unpadded]) -> str:
    """Say how much more memory the compiled code can take on a GPU, where padding is chosen by time."""
    most, largest = sum(one.bytes * one.count for one in products), products[0]
    return (
        "torch.compile pads a matrix product on a GPU if it measures that to be faster, and pads none here: memory can be "
        f"up to {format_bytes(most)} higher, {format_bytes(largest.bytes * largest.count)} of it by {largest.product}"
    )


class CudaGraphs(msgspec.Struct, frozen=True, kw_only=True):
    """The CUDA graphs of a process."""

    captured: int
    """The number of captures."""
    launched: int
    """The number of launches."""
    most: int
    """The most graphs that could be launched at a time."""
    most_kernels: int
    """The most kernels that these have together."""
    most_in_pools: int
    """The most bytes that were reserved in private pools when a capture ended."""


class EmulatedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one process of the program on the emulated GPUs."""

    process: int
    """The id of the process."""
    rank: str | None = None
    """The rank, as torchrun and similar programs set it."""
    devices: tuple[EmulatedDevice, ...] = ()
    """The GPUs that it used. Empty if the process ended without Python's own end, and only the driver's figures are
    known."""
    unknown: tuple[str, ...] = ()
    """Memory of libraries and of the driver that is not known and not counted."""
    estimated_bytes: int = 0
    """The largest workspace of a convolution, as in `EmulatedRun`."""
    unknown_reads: tuple[AtLine, ...] = ()
    """The lines that read values that no kernel computed and got made-up values, the most frequent first."""
    not_exchanged: tuple[NotExchanged, ...] = ()
    """The functions of NCCL whose data was too large to be exchanged."""
    dealt: tuple[AtLine, ...] = ()
    """Choices among unknown scores that were dealt in turn, such as those of experts by a router."""
    assumed: tuple[AtLine, ...] = ()
    """Operators that assume of unknown values that all differ and none is zero, and checks that are assumed to pass."""
    unpadded: tuple[Unpadded, ...] = ()
    """The matrix products that Inductor might pad on a GPU. Those that would take most memory come first."""
    graphs: CudaGraphs | None = None
    """The CUDA graphs of the process; None if it captured none."""
    slow_following: str = ""
    """A sentence on the operators and lines whose values took long to follow. Empty if all else took longer."""
    packages: dict[str, str] = {}
    """The training libraries that the process imported, with their versions."""
    asked: Counts | None = None
    """The counts of all its threads in the whole run, such as kernel launches and copies, as one step. None if the program's
    environment lacks pytest-gputrain, or if the process ended without Python's own end."""
    steps: Counts | None = None
    """The counts of each of its first 50 steps, from one update of its optimizer to the next. None if there were fewer than
    two updates by optimizers of torch."""
    expected: ExpectedTime | None = None
    """How long a step takes on the GPU, by estimate: the median of its last 5 steps, from one update of its optimizer to the
    next. None unless ``--expect`` asks for it, which leaves out the counts."""

    @property
    def unknown_in_torch(self) -> tuple[str, ...]:
        """The memory that torch allocates and reserves and whose size is not known."""
        return tuple(what for what in self.unknown if what != BESIDE_TORCH)


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one process on one GPU as the driver sees it: torch's memory, that of others, and the context."""

    process: int
    """The id of the process."""
    gpu: int
    """The number of the GPU among the emulated ones."""
    peak_bytes: int
    """The highest memory in use, with the context."""
    managed_bytes: int = 0
    """The peak of managed memory (``cudaMallocManaged``), which is assumed to be on the GPU as far as it fits."""
    missing_beside_torch: int = 0
    """The most bytes that were missing for a request of a library or of the program itself, which torch's allocator knows
    nothing of; 0 if all had memory."""


class ProgramFit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the program fits the emulated GPUs."""

    verdict: Literal["fits", "does not fit", "incomplete"]
    """Whether it fits; ``incomplete`` if the program ended early, or if a part of its memory is not known."""
    headroom_bytes: int | None
    """The memory of the fullest GPU that was left at its peak. Negative where that was too little: at least so much is
    missing. None if the program never used a GPU."""
    sentence: str
    """The reason for ``fit``."""


class Emulation(msgspec.Struct, frozen=True, kw_only=True):
    """The document of ``gputrain emulate --json FILE``."""

    format: int = FORMAT
    """The version of the format."""
    generator: str
    """The name and the version of the package that wrote it."""
    device_name: str
    """The name that the driver of such a GPU reports. For a GPU that runs kernels for another GPU: which GPU is emulated,
    and by which kernels."""
    platform: str
    """The marker of the emulated GPU."""
    device_count: int
    """The number of GPUs that the program found."""
    device_memory_bytes: int
    """The memory of each GPU."""
    torch: str
    """The version of torch."""
    torch_build: str = ""
    """The wheel that torch came from, if ``gputrain emulate --install`` has installed it."""
    command: tuple[str, ...]
    """The program and its arguments, with ``***`` for what looks like a secret."""
    exit_status: int
    """The program's own exit status; 128 and the number of the signal that ended it."""
    processes: tuple[EmulatedProcess, ...]
    """The processes of the program that imported torch."""
    use: tuple[DeviceUse, ...]
    """The memory of each process on each GPU. Empty if the program never used the GPU."""
    fit: ProgramFit
    """Whether it fits."""
    notes: tuple[str, ...] = ()
    """Sentences on assumptions of the figures: kernels for another GPU, or a capacity that is computed."""

    @property
    def versions(self) -> str:
        """The training libraries that some process imported, with their versions."""
        versions = {"torch": self.torch}
        for process in self.processes:
            versions |= {name: version for name, version in process.packages.items() if name != "torch"}
        return ", ".join(f"{name} {version}" for name, version in versions.items())
