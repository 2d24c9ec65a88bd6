"""Rules about weights: quantization against checkpoint, release and GPU; LoRA adapters and draft models."""

import re
from collections.abc import Iterator
from pathlib import Path

from diag.core.files import is_folder, parse_json
from diag.lint.rule import Edit, LintTarget, Match, at_least, is_open, number, removal, rule
from diag.vllm.command.command import Command
from diag.vllm.gpus import capability
from diag.vllm.memory.architectures import removed

_AWQ, _GPTQ = ("awq", "awq_marlin", "auto_awq"), ("gptq", "gptq_marlin", "auto_gptq")
_PREPARED = (*_AWQ, *_GPTQ, "compressed-tensors")
"""Methods that only load weights that were quantized before."""
_ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "bitsandbytes")
_LOADS = {"awq": _AWQ, "gptq": _GPTQ, **{name: (name,) for name in ("fp8", "compressed-tensors", "bitsandbytes")}}
"""The method in a checkpoint's quantization_config, and the values of --quantization that load it.

Of other values, such as moe_wna16 and humming, which load several kinds of checkpoint, nothing is reported.
"""
METHODS = ("gguf", "bitsandbytes")
"""Methods that a release lacks, and `quantization_removed` reports."""
_FORMATS = ("nvfp4", "fp4", "int4", "int8", "w8a8", "w4a16", "w8a16", "4bit", "8bit")
"""Formats of weights that 0.32.0 and 0.33.0 have no method of that name for."""
_GGUF = re.compile(r"(?i)(?:\.gguf|-gguf(?::[\w.-]+)?)$")
ONE_AWQ = "0.24.0"
"""The first release in which awq and awq_marlin are one method, which takes bfloat16 and chooses its kernels."""
_FLAG = "--quantization"
_MODULES, _RANK, _ENABLE = "--lora-modules", "--max-lora-rank", "--enable-lora"
_USUAL_RANK = 16
"""Default of max_lora_rank in vllm/config/lora.py in every release."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank that every release since 0.10.2 takes."""


def checkpoint(target: LintTarget) -> str | None:
    """Return the method in the checkpoint's quantization_config, "" without one; None if that is unknown."""
    if target.shape is None or target.command.get("--hf-overrides") is not None:
        return None
    if target.shape.taken_for:  # another checkpoint, which may be quantized otherwise
        return None
    settings = target.shape.quantization
    method = str(settings.get("quant_method", "")).lower() if settings else ""
    return None if settings and not method else method  # modelopt names an algorithm in its place


@rule()
def quantization_of_another_checkpoint(target: LintTarget) -> Iterator[Match]:
    """Compare as `_verify_quantization` (vllm/config/model.py) does; other names of one method override it there."""
    wanted, method = target.command.get(_FLAG), checkpoint(target)
    if wanted in (*_PREPARED, *_ONLINE) and wanted not in _LOADS.get(method or "", (wanted,)):
        yield Match(
            f"--quantization {wanted}, and the checkpoint is quantized with {method}",
            edits=removal(target.command.all(_FLAG)),
        )


@rule()
def checkpoint_not_quantized(target: LintTarget) -> Iterator[Match]:
    """Check like `get_quant_config` (model_loader/weight_utils.py): `Cannot find the config file for awq`."""
    wanted, shape = target.command.get(_FLAG), target.shape
    if wanted not in _PREPARED or shape is None or checkpoint(target) != "":
        return
    has_settings = any(file.name.endswith(("quantize_config.json", "quant_config.json")) for file in _files(target))
    # a cache may hold config.json alone
    is_known = (shape.facts and not shape.partial) or is_folder(shape.name)
    is_complete = is_known or any(file.suffix in (".safetensors", ".bin") for file in _files(target))
    if is_complete and not has_settings:
        yield Match(f"--quantization {wanted}, and the checkpoint is not quantized")


def _files(target: LintTarget) -> list[Path]:
    return [*target.shape.folder.iterdir()] if target.shape and target.shape.folder.is_dir() else []


@rule()
def quantization_removed(target: LintTarget) -> Iterator[Match]:
    wanted, method = target.command.get(_FLAG), checkpoint(target)
    named = "gguf" if _GGUF.search(target.command.model) else ""
    for name in METHODS:
        if name in (wanted, method, named) and not at_least(last := removed()[name], target.version):
            whose = f"--quantization {name}" if wanted == name else f"The checkpoint's method, {name},"
            yield Match(f"{whose} was removed: {last} is the last release with it")
    if wanted in _FORMATS and target.since("0.32.0"):
        yield Match(
            f"--quantization {wanted} is a format of weights, and no method of {target.version} has this name",
            fix="Remove it: the checkpoint names its method",
        )


@rule()
def awq_with_bfloat16(target: LintTarget) -> Iterator[Match]:
    """Check `get_supported_act_dtypes` of awq.py: [torch.half] up to 0.23.0; auto_awq.py of 0.24.0 takes both."""
    command = target.command
    plain = command.get(_FLAG) == "awq" and not target.since(ONE_AWQ)
    if plain and command.get("--dtype") == "bfloat16" and checkpoint(target) in (None, "awq"):
        words = command.all(_FLAG)[-1].words
        yield Match(edits=(Edit(words, (_FLAG, "awq_marlin")),) if words else ())


_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
_NATIVE, _EMULATED = 8.9, 8.0
"""Compute capabilities since which kernels compute with 8-bit floats, and since which they convert them."""
_CONVERTS, _REFUSES = "0.11.1", "0.24.0"
"""First releases in which FlashInfer is chosen for such a cache, and in which Triton's kernels refuse it."""
_SIZES = (64, 128, 256)
"""Sizes of attention heads of which FlashInfer has kernels in every one of these releases."""


@rule()
def fp8_cache_is_converted(target: LintTarget) -> Iterator[Match]:
    """Report what v1/attention/backends/flashinfer.py and triton_attn.py of 0.24.0 - 0.32.0 do below 8.9."""
    dtype, shape = target.command.get("--kv-cache-dtype"), target.shape
    backend = target.command.get("--attention-backend")
    if dtype not in _FP8 or (shape and (shape.latent or shape.head_dim not in _SIZES)):
        return
    for gpu in target.used_gpus()[:1]:
        level = capability(gpu.name)
        if not 0 < level < _NATIVE:
            return
        what = f"--kv-cache-dtype {dtype} on {gpu.name}, whose compute capability is {level}"
        if level < _EMULATED or backend == "TRITON_ATTN":
            if target.since(_REFUSES) and backend in (None, "TRITON_ATTN"):
                yield Match(
                    what,
                    "vLLM refuses it: Triton's kernels need 8.9, and FlashInfer, which converts it, needs 8.0",
                    f"Use --kv-cache-dtype {'bfloat16' if level >= _EMULATED else 'float16'}",
                    severity="error",
                )
        elif target.since(_CONVERTS) and backend in (None, "FLASHINFER"):
            yield Match(what)


def adapter_paths(command: Command) -> list[str]:
    """Return the path of each adapter in --lora-modules: name=path, or a JSON object with a path."""
    paths = []
    for text in (text for mention in command.all(_MODULES)[-1:] for text in mention.values):
        path = text.partition("=")[2]
        if text.lstrip().startswith(("{", "[")):
            try:
                content = parse_json(text)
            except ValueError:
                continue
            listed = content if isinstance(content, list) else [content]
            paths += [str(one["path"]) for one in listed if isinstance(one, dict) and "path" in one]
        elif path and not is_open(path):
            paths.append(path)
    return paths


def adapter_rank(settings: object) -> int:
    """Return the largest rank in the content of an adapter_config.json; 0 if it has none."""
    fields = settings if isinstance(settings, dict) else {}
    patterns = fields.get("rank_pattern")
    ranks = [fields.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    return max((rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool)), default=0)


@rule()
def adapters_without_lora(target: LintTarget) -> Iterator[Match]:
    """Check like `init_static_loras`: lora_model_runner_mixin.py raises, and the API server exits."""
    command, end = target.command, len(target.command.words)
    if target.has(_MODULES) and (target.is_off(_ENABLE) or target.lacks(_ENABLE)):
        first = command.all(_MODULES)[0].words
        added = not command.all(_ENABLE) and bool(first) and command.arguments <= first.start <= end
        yield Match(edits=(Edit(range(first.start, first.start), (_ENABLE,)),) if added else ())


@rule(usual=_USUAL_RANK)
def adapter_rank_above_the_maximum(target: LintTarget) -> Iterator[Match]:
    wanted = target.command.get(_RANK)
    most = number(wanted) if wanted is not None else _USUAL_RANK if target.lacks(_RANK) else None
    ranks = (target.adapter_ranks.get(path, 0) for path in adapter_paths(target.command))
    rank = max(ranks, default=0)
    if most is not None and rank > most and target.is_on(_ENABLE):
        fitting = next((able for able in RANKS if able >= rank), 0)
        unset = " (the default)" if wanted is None else ""
        yield Match(
            f"An adapter has rank {rank}, and --max-lora-rank is {most:g}{unset}",
            fix=f"Set --max-lora-rank to {fitting}" if fitting else "Use an adapter of a smaller rank",
        )


_OTHER_HEADS = ("eagle", "medusa", "mtp", "dflash", "speculator", "dspark")
"""Parts of the names of draft models that share the target's vocabulary in their own ways."""


def draft_model(target: LintTarget) -> str:
    """Return the name of a draft model that drafts by itself, "" if there is none or another method drafts."""
    keys, command = target.keys("--speculative-config"), target.command
    name = str(keys.get("model") or command.get("--spec-model") or "")
    method = keys.get("method") or command.get("--spec-method") or "draft_model"
    is_other = any(part in name.lower() for part in _OTHER_HEADS)
    return "" if is_other or method != "draft_model" or is_open(name) else name


@rule()
def draft_of_another_vocabulary(target: LintTarget) -> Iterator[Match]:
    """Check like `verify_equal_vocab_size_if_draft_model` (vllm/config/speculative.py of 0.16.0 - 0.32.0)."""
    shape, draft = target.shape, target.draft
    if not (shape and draft and draft.family and draft_model(target)) or not target.since("0.16.0"):
        return
    is_allowed = target.keys("--speculative-config").get("use_heterogeneous_vocab") in (True, "true")
    is_changed = target.command.get("--hf-overrides") is not None
    if shape.vocabulary and shape.vocabulary != draft.vocabulary and not is_allowed and not is_changed:
        yield Match(
            f"The draft model has a vocabulary of {draft.vocabulary:,} tokens, and the model one of"
            f" {shape.vocabulary:,}"
        )
