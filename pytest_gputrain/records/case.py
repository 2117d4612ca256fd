"""Defines the records of what is asked: a case, and the task that a worker is given for it."""

from __future__ import annotations

import contextlib
import hashlib
import re
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from pytest_gputrain.records.prediction import Target
from pytest_gputrain.records.whole import Whole

FORMAT: Final = 2
"""Version of every file this package writes. 2: the first that is released (0.1.0); 1 is refused."""

Scale = Literal["full", "tiny"]

_NOT_IDENTITY: Final = frozenset({"steps", "warmup", "platforms", "named"})


class Case(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to train and how: model x method x precision x parallelism x knobs.

    A record only: nothing is checked or looked up here, so that one misspelt case fails its own test instead of the
    whole file (see `pytest_gputrain.cases.validation.problem`).
    """

    model: str = ""
    """A name of the zoo; the path, relative to the test file, of a config.json of transformers or diffusers or of a folder
    with one (in results ``NAME#DIGEST``: another content is another case); or the function's name for own code."""
    method: str = "full"
    """What trains: ``full``, ``lora``, ``qlora``, ``pretrain``, ``sft``, ``dreambooth``; ``custom`` for own code, ``script``
    for a script."""
    precision: str = "bf16"
    """``fp32``, ``bf16`` (weights stored in bf16), ``bf16-amp`` or ``fp16-amp`` (fp32 weights under autocast; the
    engines of DeepSpeed train ``fp16-amp`` in their own fp16, with fp32 masters of 16-bit weights)."""
    parallel: str = "single"
    """``single``, ``ddp``, ``fsdp`` (FSDP2), ``zero0`` to ``zero3`` (DeepSpeed) or ``ps`` (parameter server)."""
    gpus: Whole = 1
    """Processes of the case that train, one a GPU: the workers of ``ps``."""
    servers: Whole = 0
    """Processes beside them that hold the tables (``ps``); on the host, not on a GPU."""
    asynchronous: bool = False
    """Servers apply each worker's gradients at once, instead of the mean of all workers' (``ps``)."""
    batch_size: Whole = 1
    """Samples per process in one step (one micro-batch)."""
    sequence_length: Whole = 0
    """Tokens of a sample, of the longest where ``lengths`` differ; in a vision-language model with those of its image."""
    lengths: str = "fixed"
    """Of samples: ``fixed``; ``padded`` from an eighth of ``sequence_length`` to all of it, evenly spaced, the rest of each
    row masked; ``packed``: rows that are filled by samples of such lengths, which do not attend to each other."""
    ids: str = "uniform"
    """How ids of words and categories are drawn: ``uniform``, or ``zipf``, of which few are frequent and most are rare."""
    loader_workers: Whole = 0
    """Processes of a DataLoader that draw the batch anew for every step; 0 for one batch that stays on the device."""
    resolution: str = ""
    """``WIDTHxHEIGHT`` of images and videos in pixels."""
    frames: Whole = 0
    """Frames of a video."""
    gradient_accumulation: Whole = 1
    """Micro-batches per optimizer update. A step is ONE micro-batch, as the published tables count."""
    activation_checkpointing: bool | float = False
    """Whether the blocks are recomputed in backward; a share p of them: the first int(n * p) of all n, as they run."""
    activation_checkpointing_policy: str = ""
    """What recomputed blocks keep all the same: ``save-attention`` the results of fused attention, ``save-matmuls`` those of
    matrix products and convolutions, too; empty for nothing but their inputs."""
    reentrant_checkpointing: bool = False
    """Blocks are recomputed by torch's older variant, ``use_reentrant=True``."""
    lora_rank: Whole = 0
    """Of ``lora`` and ``qlora``, like the four below; 0 for the rank of the model's published recipe."""
    lora_alpha: Whole = 0
    """0 for the alpha of the recipe, which keeps its ratio to the rank."""
    lora_dropout: float | None = None
    """Share of an adapter's inputs that are dropped; None for the recipe's."""
    lora_targets: str = ""
    """Names of the adapted layers with ``+`` between them, as ``q_proj+v_proj``, or ``all-linear`` for all that peft finds;
    empty for the recipe's."""
    dora: bool = False
    """Whether peft adapts by DoRA (arXiv:2402.09353), which trains the norms of the weights' rows, too."""
    quantized_compute: str = ""
    """What packed weights are multiplied in (``qlora``): ``fp32`` or ``bf16``; empty for the arithmetic of the precision."""
    attention: str = ""
    """Of a language model by transformers: ``eager``, ``sdpa``, or ``sdpa-4.49``, which is sdpa as transformers 4.49 called
    it, with keys and values repeated for the heads that share them and without Gemma 2's cap of the scores; empty for the
    one that transformers picks."""
    optimizer: str = "adamw"
    """``adamw`` (torch.optim.AdamW as it comes), ``adamw-fused``, ``adam``, ``momentum`` (SGD with 0.9) or ``sgd`` by torch;
    ``adamw_8bit`` or ``paged_adamw_8bit`` by bitsandbytes; ``adafactor`` by transformers, as its Trainer makes it."""
    compile: str = "off"
    """``torch.compile`` of the model that trains: ``off``, or its mode ``default``, ``reduce-overhead``, ``max-autotune`` or
    ``max-autotune-no-cudagraphs``. On a CPU the graphs are traced, but no code is made of them."""
    tf32: bool | None = None
    """Whether matrix products and convolutions of fp32 may be computed in TF32; None for torch's defaults, which since
    version 1.12 are no for products and yes for convolutions. A CPU has no TF32."""
    master_weights: bool = False
    """The optimizer updates fp32 copies of 16-bit weights, by gradients that are added up in fp32, as engines of DeepSpeed
    always do."""
    loss: str = ""
    """Of a language model by transformers: ``fp32``, the loss that transformers and its Trainer compute, of logits that are
    copied to fp32, or ``logits``, a cross entropy of the logits in their own type. Empty for ``fp32`` where the model is
    known by its config.json, and for ``logits`` where published figures belong to it."""
    loss_chunks: Whole = 1
    """Chunks of a batch's tokens whose logits exist one after the other (language models); backward makes them anew."""
    learning_rate: float = 1e-4
    """The highest. The default moves weights of the usual 0.02 in bf16, whose neighbours lie 6e-5 to 1.2e-4 apart there."""
    lr_scheduler: str = "constant"
    """``constant``, ``linear`` or ``cosine``: these fall to 0 over the updates of the warm-up and the timed steps."""
    lr_warmup_steps: Whole = 0
    """Optimizer updates over which the learning rate rises: the first of 10 has a tenth of it."""
    max_grad_norm: float = 0.0
    """Norm of all gradients together that they are scaled down to before an update; 0 for no clipping."""
    cpu_offload: bool = False
    """Parameters, gradients and optimizer state in host memory (FSDP)."""
    reshard_after_forward: bool | None = None
    """Whether FSDP lets go of a block's gathered parameters between its forward and its backward pass; None for torch's
    default: of all blocks but not of what is outside of them."""
    offload_optimizer: bool = False
    """DeepSpeed's option, like those below: optimizer state and update in host memory."""
    offload_param: bool = False
    pin_memory: bool = False
    overlap_comm: bool | None = None
    """None for DeepSpeed's default."""
    allgather_bucket_size: Whole = 0
    """Elements; 0 for DeepSpeed's default."""
    reduce_bucket_size: Whole = 0
    """Elements of each buffer that gradients are gathered in; 0 for DeepSpeed's default."""
    stage3_max_live_parameters: Whole = 0
    """Elements; 0 for DeepSpeed's default."""
    deepspeed_config: str = ""
    """JSON file with further options of DeepSpeed, relative to the root of the project. In results ``FILE#DIGEST``: another
    content of the file is another case."""
    steps: Whole = 10
    """Timed steps."""
    warmup: Whole = 3
    """Steps before the timed ones."""
    platforms: tuple[str, ...] = ()
    """Catalog markers the case is declared for; none means any."""
    code: str = ""
    """``path/of/test_file.py::function`` that builds the step, for own code; ``path/of/script.py`` of a script."""
    args: str = ""
    """Keyword arguments of that function after its setup, or a script's arguments, as JSON; empty for none."""
    named: tuple[str, ...] = ()
    """Knobs that appear in the id, because a grid varies them."""

    def __str__(self) -> str:
        # Fields of a wrong type are shown too: this is also how the sentence that tells of them names the case.
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
        """Return this case with some fields changed; the id does not change for a knob (use `grid` for that)."""
        return msgspec.structs.replace(self, **fields)

    @property
    def sides(self) -> tuple[Whole, Whole]:
        """Width and height of the resolution in pixels."""
        width, height = map(int, self.resolution.split("x"))
        return width, height

    def loaders(self, *, beside_gpu: bool) -> int:
        """Return how many processes load for each one that trains: on a CPU, whose cores they share with it, two at most."""
        return self.loader_workers if beside_gpu else min(self.loader_workers, 2)

    def identity(self) -> dict[str, Any]:
        """Return the fields that decide whether two measurements measure the same thing (not steps, warm-up, platforms)."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in _NOT_IDENTITY}


_READABLE: Final = re.compile(r"[\w.,:/=+@-]{1,48}")
"""Arguments that an id shows as they are: of others it shows a digest."""


def _arguments_text(args: str) -> str:
    """Return the arguments as ids show them: ``width=64-depth=2``, or ``args=4f8b21c9`` of what is long or hard to read."""
    with contextlib.suppress(msgspec.MsgspecError, TypeError):  # of a case that somebody wrote
        given = msgspec.json.decode(args, type=dict[str, Any] | list[str])
        words = [f"{name}={_plain(value)}" for name, value in given.items()] if isinstance(given, dict) else given
        text = "-".join(word.lstrip("-") for word in words)
        if _READABLE.fullmatch(text):
            return text
    return f"args={hashlib.sha256(str(args).encode()).hexdigest()[:8]}"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def knob_text(value: object) -> str:
    """Return a knob's value as ids show it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


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
    """That the ranks are spread over."""
    root: str
    """Folder that ``case.code`` is relative to."""
    module: str = ""
    """Name under which the parent imported the file of ``case.code``."""
    import_paths: tuple[str, ...] = ()
    """The parent's import path, appended to the worker's so that own code finds its helpers."""
    curve: bool = False
    """Whether the losses are what is wanted: all of them from the first step on, up to the first that is not finite."""
    deepspeed: dict[str, Any] = {}
    """What the case's ``deepspeed_config`` sets beyond the case, whose file a node of a fleet may not have."""
    model_config: dict[str, Any] = {}
    """Content of the config.json that the case's model was read from."""
    growth_bytes: Whole = 0
    """That own code may keep more of after every round of its accumulation, as its test allows."""
    target: Target | None = None
    """The device to predict for on fake tensors, instead of training."""
    emulated: str = ""
    """Catalog marker of the GPU that is emulated, of which the first rank alone runs; empty where the devices are real."""
    variables: dict[str, str | None] = {}
    """Environment variables that the test has changed since the session began, by name in order; None for a deleted one."""

    @property
    def cores(self) -> int:
        """How many cores of a CPU the case would use: one for each process that trains, serves or loads."""
        return self.processes * (1 + self.case.loaders(beside_gpu=False)) + self.servers

    @property
    def variables_digest(self) -> str:
        """Tells changed variables from others by their values; empty where none has changed."""
        return hashlib.sha256(msgspec.json.encode(self.variables)).hexdigest()[:12] if self.variables else ""
