"""A row's columns of the training code -> the trainer's preset and what it does."""

from __future__ import annotations

import dataclasses
import re

from memadvisor.architecture import Architecture
from memadvisor.architectures.vision_transformers import image_tokens
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import Hardware
from memadvisor.layout_table.adapters import adapters_of
from memadvisor.layout_table.attention import kernel_of, with_attention
from memadvisor.layout_table.cells import Cells
from memadvisor.layout_table.columns import plain as plain_word
from memadvisor.layout_table.compiled_words import compiled_parts, is_compiled
from memadvisor.software import (
    DEEPSPEED,
    GPT_NEOX,
    JAX,
    LLM_FOUNDRY,
    MEGATRON_2021,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MODERN,
    NEMO,
    find_preset,
    names_hugging_face,
    preset_named_in,
)
from memadvisor.software_dtypes import (
    as_of_2023,
    names_dtype,
    on_accelerator,
    with_fp32_gradients,
    with_lora,
    with_optimizer,
    with_plain_loss,
    with_precision,
)
from memadvisor.software_torch import APEX, DDP, FSDP, HUGGING_FACE
from memadvisor.software_traits import Preset, Software

STRATEGIES = {
    "noshard": 0,
    "none": 0,
    "ddpsharded": 2,  # FairScale's, OSS with ShardedDDP
    "shardedddp": 2,
    "ddp": 0,
    "shardgradop": 2,
    "fullshard": 3,
    "hybridshard": 3,
    "fullyshard": 3,
    "optimgradsparams": 3,  # Megatron-FSDP's data_parallel_sharding_strategy
    "optimgrads": 2,
    "fsdp": 3,
    "hsdp": 3,
    "zerooffload": 2,  # arXiv:2101.06840
    "zeroinfinity": 3,  # arXiv:2104.07857
    "distributedoptimizer": 1,
    "posgp": 3,  # arXiv:1910.02054, section 5
    "posg": 2,
    "pos": 1,
    "osgp": 3,
    "osg": 2,
}
_LONGEST_OLD = 8192
_WITHOUT_FLASH = ("V100", "A100")
_OLDER = (DDP, HUGGING_FACE, DEEPSPEED)  # trainers of before FlashAttention
_LATER = re.compile(r"mpt\d|falcon|nemotron|starcoder|phi\d|stablelm|olmo")  # of 2023 and later
_DTYPE_BYTES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "16": 2, "fp32": 4, "float32": 4, "32": 4}
# Gradients are summed in the buffer that is reduced, whose dtype grad_reduce_in_fp32 says (megatron/core/distributed/
# distributed_data_parallel.py).
_SUMS_WHERE_IT_REDUCES = tuple(preset.software.name for preset in (MEGATRON_CORE, NEMO))

# Parts of a layer by the names of Megatron Core's scopes of CUDA graphs, and about what share of its launches each has.
_GRAPHED = {r"attn|attention": 0.25, r"router|preprocess": 0.25, r"mlp|experts|\bmoe\b": 0.5}


def software_of(cells: Cells, architecture: Architecture, accelerator: Hardware) -> tuple[Preset, Software]:
    preset = _preset(cells, architecture, accelerator.name)
    software = preset.software
    mode, precision = cells.text("mp_mode"), cells.text("precision")
    attention = kernel_of(cells)
    is_fp16 = re.search("fp16|float16|half", (precision or "").lower()) is not None  # as before bf16's time
    if preset in (MEGATRON_DEEPSPEED, GPT_NEOX) and not (
        _is_old(cells, architecture, accelerator.name) or is_fp16
    ):
        software = as_of_2023(software)
    if preset is MEGATRON_2021 and cells.text("sequence_parallel") is not None:
        software = with_fp32_gradients(software)  # it has the option, and is of 2022
    if mode is not None:
        software = _composer(software, mode)
    if precision is not None:
        software = with_precision(software, precision)
    is_given = precision is not None and names_dtype(precision)
    software = on_accelerator(
        software, accelerator, is_given=is_given, in_container=_says(cells, r"nvidia|\bngc\b")
    )
    code = cells.text("model_code")
    is_hugging_face = names_hugging_face(cells.text("framework") or "") or software.reference_code
    reference = is_hugging_face if code is None else is_reference(code)
    if not reference:
        software = with_plain_loss(software)
    if attention is not None:
        software = with_attention(software, attention)
    elif _has_scores(cells, preset, architecture, accelerator.name, is_reference=reference):
        of_words = image_tokens(architecture) is None
        software = dataclasses.replace(software, fused_attention=False, dropout=of_words)
    if accelerator.name.startswith("V100"):
        # Torch of before 2.0, whose zero_grad kept gradients and filled them with zeros.
        software = dataclasses.replace(software, lets_gradients_go=False)
    dropout, optimizer = _dropout(cells), cells.text("optimizer")
    software = _collectives(cells, _compiled(cells, software))
    if cells.text("cuda_graphs") is not None:
        software = dataclasses.replace(software, launch_share=_launched(cells))
    if dropout is not None:
        software = dataclasses.replace(software, dropout=dropout)
    if optimizer is not None:
        software = _with_optimizer(cells, software, optimizer)
    if cells.flag("optimizer_in_backward"):
        software = dataclasses.replace(software, updates_in_backward=True)
    software = dataclasses.replace(
        software,
        reference_code=reference,
        patched_code=is_compiled(cells) or _says(cells, "xtuner") or _has_liger(cells),
        sample_len=cells.whole("sample_len"),
        masks_windows=reference and re.match(r"flash|fa\d", plain_word(attention or "")) is None,
    )
    lora = adapters_of(cells, software)
    return preset, software if lora is None else with_lora(software, lora)


def _with_optimizer(cells: Cells, software: Software, optimizer: str) -> Software:
    try:
        return with_optimizer(software, optimizer)
    except UsageError:
        cells.note(f"optimizer {optimizer!r} is not known: the trainer's own is taken")
        return software


def _has_scores(
    cells: Cells, preset: Preset, architecture: Architecture, gpu: str, *, is_reference: bool
) -> bool:
    """Whether an old model's scores are in memory with other trainers than Megatron's. FlashAttention is for cards from
    Turing on (its README.md), and Hugging Face's classes of GPT-2, BERT and OPT took torch's in 2024 (transformers 4.41
    to 4.46, release notes)."""
    if _says(cells, "deeplearningexamples") and not architecture.gated_mlp:
        return True  # NVIDIA's of 2019 to 2023, attention in separate operators whatever the card
    if not _is_old(cells, architecture, gpu):
        return False
    return is_reference or (preset in _OLDER and gpu.startswith("V100"))


def _says(cells: Cells, words: str) -> bool:
    """Whether the trainer's name or the row's source has one of these."""
    told = f"{cells.text('framework') or ''} {cells.text('source') or ''}".lower()
    return re.search(words, told) is not None


def _has_liger(cells: Cells) -> bool:
    """Whether the trainer is said to have Liger's kernels; a page of theirs has rows without them too."""
    return re.search(r"\bliger\b", (cells.text("framework") or "").lower()) is not None


def _compiled(cells: Cells, software: Software) -> Software:
    """The same code where torch.compile, or a kernel of the loss, fuses what it names."""
    parts = compiled_parts(cells)
    if is_compiled(cells):
        software = dataclasses.replace(software, fused_mlp=True, fused_rotary=True, dtensors=False)
    if _has_liger(cells):
        software = dataclasses.replace(
            software, liger=True, fused_mlp=True, repeats_keys=False, weighs_wide=False
        )
    fused, shared, pieces = (cells.flag(name) for name in ("fused_loss", "loss_parallel", "linear_loss"))
    loss_bytes = _dtype_bytes(cells, "loss_dtype")
    return dataclasses.replace(
        software,
        loss_bytes=loss_bytes or software.loss_bytes,
        fused_loss=software.fused_loss or "loss" in parts if fused is None else fused,
        compiled_loss="loss" in parts and fused is None,
        wide_fused_loss=software.wide_fused_loss if loss_bytes is None else loss_bytes == 4,
        linear_loss=software.linear_loss if pieces is None else pieces,
        loss_parallel=software.loss_parallel if shared is None else shared,
    )


def _dtype_bytes(cells: Cells, column: str) -> int | None:
    """Of an element, in the dtype that the row says."""
    dtype = cells.text(column)
    if dtype is None:
        return None
    size = _DTYPE_BYTES.get(plain_word(dtype))
    if size is None:
        raise UsageError(f"{column} is {dtype!r}; it is bf16, fp16 or fp32.")
    return size


def _beside_computation(cells: Cells, software: Software) -> Software:
    """The same code where it is said what of its collectives runs beside computation."""
    reduce, gather = cells.text("overlap_reduce"), cells.text("overlap_gather")
    if reduce is not None:
        software = dataclasses.replace(software, overlap_reduce=bool(cells.flag("overlap_reduce")))
    if gather is not None:
        software = dataclasses.replace(software, overlap_gather=bool(cells.flag("overlap_gather")))
    return software


def _collectives(cells: Cells, software: Software) -> Software:
    """The same code where its collectives are said to be otherwise."""
    software = _beside_computation(cells, software)
    size, deferred, overlap = (
        _dtype_bytes(cells, "reduce_dtype"), cells.flag("no_sync"), cells.text("tensor_overlap")
    )  # fmt: skip
    if size is not None:
        software = dataclasses.replace(software, reduce_bytes=size)
        if software.name in _SUMS_WHERE_IT_REDUCES:
            software = dataclasses.replace(software, gradient_bytes=size)
    if overlap is not None:
        flag = {True: 0.5, False: 0.0}
        try:
            share = (
                float(overlap)
                if re.fullmatch(r"[01]?\.\d+", overlap)
                else flag[bool(cells.flag("tensor_overlap"))]
            )
        except UsageError as error:
            raise UsageError(f"tensor_overlap is {overlap!r}; it is a share of 0 to 1.") from error
        software = dataclasses.replace(software, tensor_overlap=min(share, 1.0))
    dispatcher = cells.text("dispatcher")
    is_once = re.search(r"deepep|hybridep|flex", plain_word(dispatcher or "")) is not None
    return dataclasses.replace(
        software,
        defers_reduction=bool(deferred),
        expert_overlap=bool(cells.flag("expert_overlap")),
        pads_experts=bool(cells.flag("pad_experts")),
        experts_in_turn=bool(cells.flag("experts_in_turn")),
        sends_once=is_once,
        loops_experts=re.match(r"eager|loop", plain_word(cells.text("experts_implementation") or ""))
        is not None,
        leaves_often=software.leaves_often if dispatcher is None else not is_once,
        dispatch_bytes=1.0
        if plain_word(cells.text("dispatch_dtype") or "").startswith(("fp8", "float8"))
        else software.dispatch_bytes,
    )


def _launched(cells: Cells) -> float:
    """Of a layer's launches, those that no CUDA graph replays."""
    text = (cells.text("cuda_graphs") or "").lower()
    if re.match(r"full|local|all|whole", text):
        return 0.0
    parts = [share for words, share in _GRAPHED.items() if re.search(words, text)]
    if parts:
        return 1.0 - sum(parts)
    return 0.0 if cells.flag("cuda_graphs") else 1.0


def _dropout(cells: Cells) -> bool | None:
    """Yes, no, or a probability."""
    text = cells.text("dropout")
    if text is not None and re.fullmatch(r"0?\.\d+", text):
        return float(text) > 0
    return cells.flag("dropout")


def _is_old(cells: Cells, architecture: Architecture, gpu: str) -> bool:
    """Of the time before FlashAttention: Llamas, Hopper, some families of GPTs, and sequences whose scores no memory takes (of a head
    0.5 GB at 16k tokens), came after it."""
    is_later = _LATER.match(plain_word(architecture.name)) is not None
    is_later |= (cells.whole("seq_len") or 0) > _LONGEST_OLD or (cells.whole("cp") or 1) > 1
    return not architecture.gated_mlp and gpu.startswith(_WITHOUT_FLASH) and not is_later


def _preset(cells: Cells, architecture: Architecture, gpu: str) -> Preset:
    is_old = _is_old(cells, architecture, gpu)
    framework = cells.text("framework")
    if framework is not None:
        preset = find_preset(framework)
        if preset in (DDP, HUGGING_FACE):
            preset = _sharded_by(cells, is_old) or preset
        if preset is not None:
            return MEGATRON_CORE if preset is MEGATRON_2021 and not is_old else preset
        cells.note(f"framework {framework!r} is not known: what is taken where none is named is taken")
    if gpu.startswith("TPU"):
        return JAX
    if cells.text("mp_mode") is not None:
        return LLM_FOUNDRY
    named = _named_by_strategy(cells.text("strategy") or "", is_old) or preset_named_in(
        cells.text("source") or ""
    )
    if named is DDP and _says(cells, "deeplearningexamples"):
        return APEX
    if named is not None:
        return MEGATRON_CORE if named is MEGATRON_2021 and not is_old else named
    if image_tokens(architecture) is not None:
        return DDP
    return MEGATRON_2021 if is_old else MODERN


def _sharded_by(cells: Cells, is_old: bool) -> Preset | None:
    """Whose shards are trained by a project that has none of its own: FSDP's or DeepSpeed's, by their words."""
    found = _named_by_strategy(cells.text("strategy") or "", is_old)
    if found is None and stage_in(f"zero{cells.text('zero_stage') or ''}"):
        return DEEPSPEED
    if found is MEGATRON_DEEPSPEED:
        return DEEPSPEED
    return found if found in (FSDP, DEEPSPEED) else None


def _named_by_strategy(text: str, is_old: bool) -> Preset | None:
    """The trainer whose words `DDP`, `FULL_SHARD`, `ZeRO-3` or `Megatron TP=8` are."""
    word = plain_word(text)
    if word == "ddp":
        return DDP
    if re.search("fsdp|hsdp|fullshard|shardgradop|hybridshard", word):
        return FSDP
    found = find_preset(text)
    if found is DEEPSPEED and is_old:
        return MEGATRON_DEEPSPEED
    return found


def _composer(software: Software, mode: str) -> Software:
    word = mode.upper()
    if word not in ("PURE", "DEFAULT", "FULL"):
        raise UsageError(f"mp_mode is {mode!r}; it is PURE, DEFAULT or FULL.")
    if word == "FULL":
        return with_precision(software, "fp32")
    return dataclasses.replace(software, reduce_bytes=2 if word == "PURE" else 4)


def is_reference(text: str) -> bool:
    """Whether the model is Hugging Face's class. Raises UsageError for a word that does not say."""
    word = plain_word(text)
    if word.startswith(("reference", "huggingface", "hf", "transformers")):
        return True
    if word in ("fused", "own", "trainer"):
        return False
    raise UsageError(f"model_code is {text!r}; it is reference or fused.")


def strategy_stage(cells: Cells) -> int | None:
    """The ZeRO stage that a word such as FULL_SHARD, ZeRO-2 or `FSDP + TP` stands for."""
    return stage_in(cells.text("strategy") or "")


def stage_in(text: str) -> int | None:
    """Of `FULL_SHARD`, `DeepSpeed ZeRO-2`, `P_os+g`, `distributed optimizer`; None of words that tell none."""
    word = plain_word(text)
    match = re.search(r"(?:zero|\bz)(?:dp|stage|optimizer)*([0-3])|stage([0-3])", word)
    if match is not None:
        return int(match.group(1) or match.group(2))
    return next((stage for name, stage in STRATEGIES.items() if name in word), None)
