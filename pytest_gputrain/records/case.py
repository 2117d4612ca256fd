"""Defines the records of what is asked: a case, and the task that a worker is given for it."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Struct

from pytest_gputrain.records.expected import Rates
from pytest_gputrain.records.knobs import Knob, knobs_of
from pytest_gputrain.records.whole import Whole

FORMAT: Final = 2
"""Version of every file this package writes. 2: the first that is released (0.1.0); 1 is refused."""

Scale = Literal["full", "tiny"]
"""The size of the models: as published, or small stand-ins that a CPU can train."""

MOST_EMULATED: Final = 8
"""Processes of own code that run on emulated GPUs at most. Each takes about 1 GiB of the host."""

ADAPTING: Final = ("lora", "qlora")
"""Methods that train adapters."""

_QUANTISING: Final = ("qlora",)
_ZERO: Final = ("zero0", "zero1", "zero2", "zero3")
_ONE_OPTIMIZER: Final = ("single", "ddp", "fsdp", *_ZERO)
"""Parallelisms with one optimizer for everything: tables have theirs on the servers, which know neither the norm of all
gradients nor how far the training is."""
_COMPILED: Final = ("single", "ddp", "fsdp", *_ZERO[:3])
"""Parallelisms under which a model is compiled. Stage 3 of DeepSpeed gathers parameters by hooks inside of every block,
each of which breaks the graph: two tiny blocks became 104 graphs. What the parameter server does in backward, none holds."""
_SERVED: Final = ("ps",)
_OWN_BATCHES: Final = "but own code makes its own batches; change them there"
_AMOUNT: Final = "be a finite number of at least 0"


def _is_amount(number: float) -> bool:
    return math.isfinite(number) and number >= 0


def _is_resolution(text: str) -> bool:
    return not text or re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d{0,4}", text) is not None


class Case(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The model to train and how to train it: model x method x precision x parallelism x knobs.

    Nothing is checked when you make a case, so that a misspelt case fails its own test and not the whole file. A field that
    the model, the method, the parallelism or own code does not have fails the test, too.
    """

    model: Annotated[str, Knob(in_every_id=True)] = ""
    """The name of a model that the package knows. Or the path, relative to the test file, of a config.json of transformers
    or diffusers, or of its folder; results show it as ``NAME#DIGEST``, because other contents make another case. For own
    code, the name of the function."""
    part: Annotated[
        str, Knob(words=("language", "all"), own_code="but own code chooses what trains; freeze the others there")
    ] = "language"
    """The networks that train of a vision-language model that a config.json describes: ``language`` for its language model
    alone, or ``all`` for the whole model, with one image in each sample."""
    method: Annotated[str, Knob(words=("full", "lora", "qlora", "pretrain", "sft", "dreambooth"), in_every_id=True)] = "full"
    """The method of training: ``full``, ``lora``, ``qlora``, ``pretrain``, ``sft`` or ``dreambooth``; ``custom`` for own
    code, ``script`` for a script."""
    precision: Annotated[str, Knob(words=("fp32", "bf16", "bf16-amp", "fp16-amp"), in_every_id=True)] = "bf16"
    """``fp32``, ``bf16`` (weights stored in bf16), ``bf16-amp`` or ``fp16-amp`` (fp32 weights under autocast). DeepSpeed
    trains ``fp16-amp`` in its own fp16, with fp32 master weights."""
    parallel: Annotated[
        str, Knob(words=("single", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "ps"), in_every_id=True)
    ] = "single"
    """``single``, ``ddp``, ``fsdp`` (FSDP2), ``zero0`` to ``zero3`` (DeepSpeed) or ``ps`` (parameter server)."""
    gpus: Annotated[Whole, Knob(least=1)] = 1
    """The number of processes that train, one for each GPU. For ``ps``, these are the workers."""
    servers: Annotated[Whole, Knob(parallel=_SERVED)] = 0
    """The number of further processes that hold the tables of ``ps``. They run on the host, not on a GPU."""
    asynchronous: Annotated[bool, Knob(parallel=_SERVED)] = False
    """Whether servers apply the gradients of each worker at once, instead of the mean over all workers (``ps``)."""
    batch_size: Annotated[Whole, Knob(least=1)] = 1
    """Samples per process in one step, which is one micro-batch."""
    sequence_length: Annotated[Whole, Knob(size=512)] = 0
    """Tokens of a sample. If ``lengths`` vary, those of the longest sample. For a vision-language model, the tokens of its
    image count too."""
    lengths: Annotated[str, Knob(words=("fixed", "padded", "packed"), own_code=_OWN_BATCHES)] = "fixed"
    """``fixed``: all samples are equally long. ``padded``: lengths are spaced evenly from an eighth of ``sequence_length``
    to all of it, and the rest of each row is masked. ``packed``: samples of such lengths fill each row and do not attend to
    each other."""
    id_distribution: Annotated[str, Knob(words=("uniform", "zipf"), own_code=_OWN_BATCHES)] = "uniform"
    """The distribution of the ids of words and categories: ``uniform``, or ``zipf``, where few ids are frequent and most are
    rare."""
    loader_workers: Annotated[Whole, Knob(own_code=_OWN_BATCHES)] = 0
    """Processes of a DataLoader that draws a new batch for every step. With 0, one batch stays on the device."""
    resolution: Annotated[
        str, Knob(size="512x512", accepts=_is_resolution, must="be WIDTHxHEIGHT in pixels, as 512x512")
    ] = ""
    """``WIDTHxHEIGHT`` of images and videos, in pixels. With ``part="all"``, empty takes the size that the model is made
    for, or ``1024x1024``."""
    frames: Annotated[Whole, Knob(size=9)] = 0
    """Frames of a video."""
    gradient_accumulation: Annotated[Whole, Knob(least=1)] = 1
    """Micro-batches per optimizer update. A step is ONE micro-batch, as the published tables count."""
    activation_checkpointing: Annotated[
        bool | float, Knob(accepts=lambda share: 0 <= share <= 1, must="be true, false or a share from 0 to 1")
    ] = False
    """Whether backward recomputes the blocks. A share p recomputes the first int(n * p) of n blocks, in the order in which
    they run."""
    activation_checkpointing_policy: Annotated[str, Knob(words=("", "save-attention", "save-matmuls"))] = ""
    """The results that recomputed blocks keep in addition to their inputs. ``save-attention`` keeps the results of fused
    attention. ``save-matmuls`` also keeps those of matrix products and convolutions."""
    reentrant_checkpointing: bool = False
    """Whether blocks are recomputed by torch's older variant, ``use_reentrant=True``."""
    lora_rank: Annotated[Whole, Knob(methods=ADAPTING)] = 0
    """The rank of the adapters, for ``lora`` and ``qlora``. 0 takes the rank of the model's published recipe."""
    lora_alpha: Annotated[Whole, Knob(methods=ADAPTING)] = 0
    """The alpha of the adapters. 0 keeps the ratio of alpha to rank that the recipe has."""
    lora_dropout: Annotated[
        float | None,
        Knob(methods=ADAPTING, accepts=lambda share: share is None or 0 <= share < 1, must="be at least 0 and below 1"),
    ] = None
    """The share of an adapter's inputs that are dropped. None takes the recipe's."""
    lora_targets: Annotated[str, Knob(methods=ADAPTING)] = ""
    """The layers that get adapters, joined by ``+``: ``q_proj+v_proj``. ``all-linear`` takes all that peft finds, and empty
    takes the recipe's."""
    dora: Annotated[bool, Knob(methods=ADAPTING)] = False
    """Whether peft uses DoRA (arXiv:2402.09353), which also trains the norms of the rows of the weights."""
    quantized_compute: Annotated[
        str,
        Knob(
            words=("", "fp32", "bf16"),
            methods=_QUANTISING,
            own_code="but own code quantises its own weights; set the type there",
        ),
    ] = ""
    """The type in which packed weights are multiplied (``qlora``): ``fp32`` or ``bf16``. Empty takes that of the
    precision."""
    unquantized_fp32: Annotated[
        bool | None,
        Knob(
            methods=_QUANTISING,
            parallel=("single", "ddp", "fsdp"),
            own_code="but own code prepares its own model; call peft's prepare_model_for_kbit_training there",
        ),
    ] = None
    """Whether peft's ``prepare_model_for_kbit_training`` is called, which converts the weights that are not packed
    (embeddings, head, norms) to fp32 (``qlora``). With True or False the model is built in the type that the precision
    computes in, as programs load it. None builds it in the type of the precision's weights, and calls nothing."""
    attention: Annotated[
        str,
        Knob(
            words=("", "eager", "sdpa", "sdpa-4.49"), own_code="but own code chooses its own attention; set it in its model"
        ),
    ] = ""
    """The attention of a language model of transformers: ``eager``, ``sdpa`` or ``sdpa-4.49``. The last calls sdpa as
    transformers 4.49 did: it repeats keys and values for the heads that share them, and leaves out Gemma 2's cap of the
    scores. Empty takes what transformers picks."""
    optimizer: Annotated[
        str, Knob(words=("adamw", "adamw-fused", "adamw_8bit", "paged_adamw_8bit", "adam", "adafactor", "momentum", "sgd"))
    ] = "adamw"
    """The optimizer. By torch: ``adamw`` (torch.optim.AdamW with its defaults), ``adamw-fused``, ``adam``, ``momentum`` (SGD
    with 0.9) or ``sgd``. By bitsandbytes: ``adamw_8bit`` or ``paged_adamw_8bit``. By transformers: ``adafactor``, as its
    Trainer makes it."""
    compile: Annotated[
        str,
        Knob(
            words=("off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
            parallel=_COMPILED,
            own_code="but own code calls torch.compile itself; call it there",
        ),
    ] = "off"
    """``off``, or the mode of ``torch.compile`` for the model that trains: ``default``, ``reduce-overhead``,
    ``max-autotune`` or ``max-autotune-no-cudagraphs``. A CPU traces the graphs and generates no code."""
    tf32: bool | None = None
    """Whether fp32 matrix products and convolutions may run in TF32. None takes torch's defaults: no for products (since
    1.12), yes for convolutions. A CPU has no TF32."""
    master_weights: Annotated[bool, Knob(own_code="but own code makes its own optimizer; keep master weights in it")] = False
    """Whether the optimizer updates fp32 copies of 16-bit weights, with gradients accumulated in fp32. DeepSpeed's engines
    always do."""
    loss: Annotated[
        str, Knob(words=("", "fp32", "logits"), own_code="but own code computes its own loss; compute it in fp32 there")
    ] = ""
    """The loss of a language model of transformers. ``fp32`` copies the logits to fp32, as transformers and its Trainer do.
    ``logits`` is the cross entropy of the logits in their own type. Empty takes ``fp32`` for models given by a config.json,
    and ``logits`` for models with published figures."""
    loss_chunks: Annotated[
        Whole, Knob(least=1, own_code="but own code computes its own loss; compute it in chunks there")
    ] = 1
    """The number of chunks that a batch's tokens are divided into for the loss of a language model. Only the logits of one
    chunk exist at a time, and backward recomputes them."""
    learning_rate: Annotated[float, Knob(accepts=_is_amount, must=_AMOUNT)] = 1e-4
    """The highest learning rate. In bf16, neighbours of a weight of 0.02 are 6e-5 to 1.2e-4 apart, so the default moves such
    weights."""
    lr_scheduler: Annotated[str, Knob(words=("constant", "linear", "cosine"), parallel=_ONE_OPTIMIZER)] = "constant"
    """``constant``, ``linear`` or ``cosine``. The last two fall to 0 over the updates of the warm-up and of the timed
    steps."""
    lr_warmup_steps: Annotated[Whole, Knob(parallel=_ONE_OPTIMIZER)] = 0
    """Optimizer updates over which the learning rate rises. With 10, the first update has a tenth of it."""
    max_grad_norm: Annotated[float, Knob(accepts=_is_amount, must=_AMOUNT, parallel=_ONE_OPTIMIZER)] = 0.0
    """The norm to which all gradients together are clipped before an update. 0 clips nothing."""
    cpu_offload: Annotated[bool, Knob(parallel=("fsdp",))] = False
    """Whether FSDP keeps parameters, gradients and optimizer state in host memory."""
    reshard_after_forward: Annotated[bool | None, Knob(parallel=("fsdp",))] = None
    """Whether FSDP frees a block's gathered parameters between its forward and its backward pass. None takes torch's
    default: it frees those of all blocks, but not those outside of the blocks."""
    offload_optimizer: Annotated[bool, Knob(parallel=_ZERO[1:])] = False
    """Whether DeepSpeed keeps the optimizer state and does the update in host memory."""
    offload_param: Annotated[bool, Knob(parallel=_ZERO[3:])] = False
    """Whether DeepSpeed keeps the parameters in host memory."""
    pin_memory: Annotated[bool, Knob(parallel=_ZERO[1:])] = False
    """Whether DeepSpeed pins the host memory that it offloads to."""
    overlap_comm: Annotated[bool | None, Knob(parallel=_ZERO)] = None
    """Whether DeepSpeed reduces gradients while backward runs. None takes DeepSpeed's default."""
    allgather_bucket_size: Annotated[Whole, Knob(parallel=_ZERO)] = 0
    """Elements that DeepSpeed gathers at once. 0 takes DeepSpeed's default."""
    reduce_bucket_size: Annotated[Whole, Knob(parallel=_ZERO[1:])] = 0
    """Elements of each buffer in which DeepSpeed gathers gradients. 0 takes DeepSpeed's default."""
    stage3_max_live_parameters: Annotated[Whole, Knob(parallel=_ZERO[3:])] = 0
    """Elements of parameters that ZeRO-3 keeps gathered at most. 0 takes DeepSpeed's default."""
    deepspeed_config: Annotated[
        str, Knob(parallel=_ZERO, own_code="but own code configures DeepSpeed itself; read the file there")
    ] = ""
    """A JSON file with further options of DeepSpeed, relative to the root of the project. It may not contradict the case.
    Results show it as ``FILE#DIGEST``, because other contents make another case."""
    steps: Annotated[Whole, Knob(least=1, identity=False)] = 10
    """Timed steps."""
    warmup: Annotated[Whole, Knob(identity=False)] = 3
    """Steps before the timed ones."""
    epoch: Annotated[bool, Knob(identity=False)] = False
    """Whether the loop of own code runs to its end, at most 1,000 steps, and the memory of all steps is known: of an epoch,
    for example. A Trainer without ``max_steps`` trains one epoch."""
    platforms: Annotated[tuple[str, ...], Knob(identity=False, in_history=False)] = ()
    """The markers of the GPUs that the case is declared for. Empty means any GPU."""
    code: Annotated[str, Knob(settable=False)] = ""
    """The function of own code that builds the step, as ``path/of/test_file.py::function``. For a script, its path."""
    args: Annotated[str, Knob(settable=False)] = ""
    """Keyword arguments of that function, or arguments of the script, as JSON. Empty for none."""
    named: Annotated[tuple[str, ...], Knob(settable=False, identity=False, in_history=False)] = ()
    """The fields that appear in the id because a grid varies them."""

    def __str__(self) -> str:
        # Sentences that refuse a field of a wrong type name the case by this id. So fields of any type are shown.
        parts = [self.model] if self.method in ("custom", "script") else [self.model, self.method]
        parts += [] if self.method == "script" else [self.precision]
        if self.parallel != "single":
            parts.append(self.parallel)
        named: object = self.named
        parts += [
            f"{knob}={knob_text(getattr(self, str(knob), None))}" for knob in (named if isinstance(named, tuple) else ())
        ]
        if self.args:
            parts.append(_arguments_text(self.args))
        return "-".join(map(str, parts))

    def replace(self, **fields: Any) -> Case:
        """Return this case with some fields changed. The id does not show the change; use `grid` for that."""
        return msgspec.structs.replace(self, **fields)

    @property
    def sides(self) -> tuple[Whole, Whole]:
        """Width and height of the resolution in pixels."""
        width, height = map(int, self.resolution.split("x"))
        return width, height

    def loaders(self, *, beside_gpu: bool) -> int:
        """Return the number of DataLoader processes for each process that trains. On a CPU, whose cores all share, it is at
        most two."""
        return self.loader_workers if beside_gpu else min(self.loader_workers, 2)

    def identity(self) -> dict[str, Any]:
        """Return the fields that decide whether two cases measure the same thing: all but steps, warm-up and platforms."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if KNOBS[name].identity}


KNOBS: Final = knobs_of(Case)
"""What the package knows of each field of a case."""
IN_EVERY_ID: Final = tuple(name for name, knob in KNOBS.items() if knob.in_every_id)


_READABLE: Final = re.compile(r"[\w.,:/=+@-]{1,48}")
"""Arguments that an id shows as they are: of others it shows a digest."""


def _arguments_text(args: str) -> str:
    """Return the arguments in the form of ids: ``width=64-depth=2``, or ``args=4f8b21c9`` if they are long or hard to
    read."""
    with contextlib.suppress(msgspec.MsgspecError, TypeError):
        # The arguments of a case that somebody wrote by hand may have any type.
        given = msgspec.json.decode(args, type=dict[str, Any] | list[str])
        words = [f"{name}={_plain(value)}" for name, value in given.items()] if isinstance(given, dict) else given
        text = "-".join(word.lstrip("-") for word in words)
        if _READABLE.fullmatch(text):
            return text
    return f"args={hashlib.sha256(str(args).encode()).hexdigest()[:8]}"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def knob_text(value: object) -> str:
    """Return a knob's value in the form of ids."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class Limit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory that an emulated GPU gives, in place of its own."""

    bytes: Whole
    """The memory, with the driver's context; 0 for any amount."""
    of_steps: bool = False
    """Whether it holds from the first step on, and not while the model is built."""


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The case file: everything a worker needs to know."""

    format: Whole = FORMAT
    case: Case
    scale: Scale
    device_type: Literal["cpu", "gpu"]
    processes: Whole = 1
    """Ranks of the case that train, one a GPU."""
    servers: Whole = 0
    """Further ranks, which serve the tables."""
    nodes: Whole = 1
    """The number of nodes that the ranks are spread over."""
    root: str
    """Folder that ``case.code`` is relative to."""
    module: str = ""
    """Name under which the parent imported the file of ``case.code``."""
    import_paths: tuple[str, ...] = ()
    """The parent's import path, appended to the worker's so that own code finds its helpers."""
    curve: bool = False
    """Whether the task is to record losses: all of them from the first step on, up to the first that is not finite."""
    deepspeed: dict[str, Any] = {}
    """The options of the case's ``deepspeed_config`` beyond the case. A node of a fleet may not have the file."""
    model_config: dict[str, Any] = {}
    """Content of the config.json that the case's model was read from."""
    growth_bytes: Whole = 0
    """The memory that own code may keep after every round of gradient accumulation, as its test allows."""
    emulated: str = ""
    """Catalog marker of the GPU that is emulated; empty if the devices are real."""
    counts: bool = True
    """Whether the work of each step for an emulated GPU, or its operators on a CPU, are counted."""
    limit: Limit | None = None
    """The memory of an emulated GPU, if it differs from that of the board."""
    rates: Rates | None = None
    """The rates that an emulated GPU sustains, from which the expected seconds of a step follow; None if they are not
    known."""
    memory_only: bool = False
    """Whether only the bytes that a case takes of an emulated GPU are wanted, without the work of its operators, which takes
    a further step, and without the tensors at its peaks."""
    variables: dict[str, str | None] = {}
    """Environment variables that the test has changed since the session began, by name in order; None for a deleted one."""

    @property
    def cores(self) -> int:
        """The number of CPU cores that the case would use: one for each process that trains, serves or loads."""
        return self.processes * (1 + self.case.loaders(beside_gpu=False)) + self.servers

    @property
    def simulated(self) -> bool:
        """Whether the first rank alone runs, in a process group without the others.

        Ranks of own code may do anything, so on emulated GPUs each of them runs, up to a number that a host has memory for.
        """
        runs_all = self.emulated and self.case.code and self.processes <= MOST_EMULATED
        return bool(self.emulated) and not runs_all

    @property
    def variables_digest(self) -> str:
        """A digest of the names and values of the changed variables; empty if none has changed."""
        return hashlib.sha256(msgspec.json.encode(self.variables)).hexdigest()[:12] if self.variables else ""
