"""Rules about weights: quantization against checkpoint, release and GPU; LoRA adapters and draft models."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from diag.core.files import parse_json
from diag.lint.conflicts import Conflict, conflict_rule, is_more
from diag.lint.rule import Edit, Example, LintTarget, Match, at_least, is_open, number, removal, rule
from diag.vllm.command.command import Command
from diag.vllm.gpus import capability
from diag.vllm.memory.model import is_folder

_AWQ, _GPTQ = ("awq", "awq_marlin", "auto_awq"), ("gptq", "gptq_marlin", "auto_gptq")
_PREPARED = (*_AWQ, *_GPTQ, "compressed-tensors")
"""Methods that only load weights that were quantized before."""
_ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "bitsandbytes")
_LOADS: Mapping[str, tuple[str, ...]] = {
    "awq": _AWQ,
    "gptq": _GPTQ,
    "fp8": ("fp8",),
    "compressed-tensors": ("compressed-tensors",),
    "bitsandbytes": ("bitsandbytes",),
}
"""The method in a checkpoint's quantization_config, and the values of --quantization that load it.

Of other values, such as moe_wna16 and humming, which load several kinds of checkpoint, nothing is reported.
"""
_LAST: Mapping[str, str] = {"gguf": "0.23.0", "bitsandbytes": "0.27.1"}
"""The last release that has a method."""
ONE_AWQ = "0.24.0"
"""The first release in which awq and awq_marlin are one method, which takes bfloat16 and chooses its kernels."""
_FLAG = "--quantization"
_MODULES, _RANK, _ENABLE = "--lora-modules", "--max-lora-rank", "--enable-lora"
_USUAL_RANK = 16
"""Default of max_lora_rank in vllm/config/lora.py in every release."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank that every release since 0.10.2 takes."""
_CONFLICT = Conflict(
    "more_adapters_than_in_memory",
    "--max-loras is above --max-cpu-loras",
    message="--max-loras {max-loras} is above --max-cpu-loras {max-cpu-loras}",
    holds=lambda target: (
        target.is_on(_ENABLE) and is_more(target.number("--max-loras"), target.number("--max-cpu-loras"))
    ),
    why="vLLM refuses it: the adapters of a step come from those in CPU memory",
    fix="Set --max-cpu-loras to {max-loras} or more",
    example=Example(
        "vllm serve m --enable-lora --max-loras 4 --max-cpu-loras 2",
        leaves="vllm serve m --enable-lora --max-loras 4 --max-cpu-loras 8",
    ),
)


def _checkpoint(target: LintTarget) -> str | None:
    """Return the method in the checkpoint's quantization_config, "" without one; None if that is unknown."""
    if target.shape is None or target.command.get("--hf-overrides") is not None:
        return None
    settings = target.shape.quantization
    method = str(settings.get("quant_method", "")).lower() if settings else ""
    return None if settings and not method else method  # modelopt names an algorithm in its place


@rule(
    "error",
    "--quantization is not the checkpoint's method",
    "A value of --quantization that does not load the method in quantization_config of the model's config.json:"
    " awq, gptq, fp8, bitsandbytes and compressed-tensors are compared.",
    "vLLM refuses it: the method in the model's config does not match the argument",
    "Remove --quantization: vLLM reads the method from the checkpoint",
    Example(
        "vllm serve ./model-awq --quantization fp8",
        requires="./model-awq is quantized with AWQ",
        leaves="vllm serve ./model-awq --quantization awq_marlin",
    ),
)
def quantization_of_another_checkpoint(target: LintTarget) -> Iterator[Match]:
    """Compare as `_verify_quantization` (vllm/config/model.py) does; other names of one method override it there."""
    wanted, method = target.command.get(_FLAG), _checkpoint(target)
    if wanted in (*_PREPARED, *_ONLINE) and wanted not in _LOADS.get(method or "", (wanted,)):
        yield Match(
            f"--quantization {wanted}, and the checkpoint is quantized with {method}",
            edits=removal(target.command.all(_FLAG)),
        )


@rule(
    "error",
    "--quantization for a checkpoint that is not quantized",
    "An awq, gptq or compressed-tensors method for a model whose config.json has no quantization_config and whose"
    " folder has no quantize_config.json or quant_config.json.",
    "vLLM does not start: these methods load weights that were quantized before",
    "Name a checkpoint that was quantized with the method, or use --quantization fp8, which quantizes while it loads",
    Example(
        "vllm serve ./model --quantization awq",
        requires="./model is not quantized",
        leaves="vllm serve ./model --quantization fp8",
    ),
)
def checkpoint_not_quantized(target: LintTarget) -> Iterator[Match]:
    """Check like `get_quant_config` (model_loader/weight_utils.py): `Cannot find the config file for awq`."""
    wanted, shape = target.command.get(_FLAG), target.shape
    if wanted not in _PREPARED or shape is None or _checkpoint(target) != "":
        return
    has_settings = any(file.name.endswith(("quantize_config.json", "quant_config.json")) for file in _files(target))
    # a cache may hold config.json alone
    is_complete = is_folder(shape.name) or any(file.suffix in (".safetensors", ".bin") for file in _files(target))
    if is_complete and not has_settings:
        yield Match(f"--quantization {wanted}, and the checkpoint is not quantized")


def _files(target: LintTarget) -> list[Path]:
    return [*target.shape.folder.iterdir()] if target.shape and target.shape.folder.is_dir() else []


@rule(
    "error",
    "The quantization method was removed from vLLM",
    "bitsandbytes since 0.28.0 and gguf since 0.24.0, given by --quantization or by the model's config.json.",
    "vLLM exits with `Unknown quantization method`, unless a plugin registers it",
    "Use a checkpoint in another format (compressed-tensors, awq, gptq), or --quantization fp8, which quantizes an"
    " unquantized checkpoint while it loads",
    Example(
        "vllm serve m --quantization bitsandbytes",
        leaves="vllm serve m --quantization bitsandbytes",
        leaves_version="0.27.1",
    ),
)
def quantization_removed(target: LintTarget) -> Iterator[Match]:
    wanted, method = target.command.get(_FLAG), _checkpoint(target)
    for name, last in _LAST.items():
        if name in (wanted, method) and not at_least(last, target.version):
            whose = f"--quantization {name}" if wanted == name else f"The checkpoint's method, {name},"
            yield Match(f"{whose} was removed: {last} is the last release with it")


@rule(
    "error",
    "AWQ's plain kernels do not take bfloat16",
    "--quantization awq with --dtype bfloat16, before 0.24.0.",
    "vLLM refuses it: `torch.bfloat16 is not supported for quantization method awq`. Since 0.24.0 both are accepted",
    "Use --quantization awq_marlin, whose kernels take bfloat16, or --dtype float16",
    Example(
        "vllm serve m --quantization awq --dtype bfloat16",
        "0.23.0",
        leaves="vllm serve m --quantization awq_marlin --dtype bfloat16",
    ),
)
def awq_with_bfloat16(target: LintTarget) -> Iterator[Match]:
    """Check `get_supported_act_dtypes` of awq.py: [torch.half] up to 0.23.0; auto_awq.py of 0.24.0 takes both."""
    command = target.command
    plain = command.get(_FLAG) == "awq" and not target.since(ONE_AWQ)
    if plain and command.get("--dtype") == "bfloat16" and _checkpoint(target) in (None, "awq"):
        words = command.all(_FLAG)[-1].words
        yield Match(edits=(Edit(words, (_FLAG, "awq_marlin")),) if words else ())


_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
_NATIVE, _EMULATED = 8.9, 8.0
"""Compute capabilities since which kernels compute with 8-bit floats, and since which they convert them."""
_CONVERTS, _REFUSES = "0.11.1", "0.24.0"
"""First releases in which FlashInfer is chosen for such a cache, and in which Triton's kernels refuse it."""
_SIZES = (64, 128, 256)
"""Sizes of attention heads of which FlashInfer has kernels in every one of these releases."""


@rule(
    "info",
    "The GPU does not compute with an fp8 KV cache",
    "--kv-cache-dtype fp8 on a GPU whose compute capability is below 8.9 (A100, A10, RTX 3090), for attention without"
    " MLA, since 0.11.1. An error on one below 8.0 (T4, V100), or with --attention-backend TRITON_ATTN, since 0.24.0.",
    "The cache holds twice the tokens, but FlashInfer converts every value that it reads to 16 bits, in the place of"
    " FlashAttention: decoding has less to read, and attention computes no faster",
    "Keep it where the KV cache is the limit; measure the inter-token latency with and without it",
    Example(
        "vllm serve m --kv-cache-dtype fp8",
        requires="this host has an A100",
        leaves="vllm serve m --kv-cache-dtype bfloat16",
    ),
)
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


RULES = (
    quantization_of_another_checkpoint,
    checkpoint_not_quantized,
    quantization_removed,
    awq_with_bfloat16,
    fp8_cache_is_converted,
)


def adapter_paths(command: Command) -> list[str]:
    """Return the path of each adapter in --lora-modules: name=path, or a JSON object with a path."""
    found = []
    for text in (text for given in command.all(_MODULES)[-1:] for text in given.values):
        path = text.partition("=")[2]
        if text.lstrip().startswith(("{", "[")):
            try:
                content = parse_json(text)
            except ValueError:
                continue
            listed = content if isinstance(content, list) else [content]
            found += [str(one["path"]) for one in listed if isinstance(one, dict) and "path" in one]
        elif path and not is_open(path):
            found.append(path)
    return found


def adapter_rank(settings: object) -> int:
    """Return the largest rank in the content of an adapter_config.json; 0 if it has none."""
    fields = settings if isinstance(settings, dict) else {}
    patterns = fields.get("rank_pattern")
    ranks = [fields.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    return max((rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool)), default=0)


@rule(
    "error",
    "--lora-modules without --enable-lora",
    "A command with --lora-modules and without --enable-lora.",
    "vLLM loads the model and then exits: LoRA is not enabled",
    "Add --enable-lora",
    Example(
        "vllm serve m --lora-modules adapter=./adapter",
        leaves="vllm serve m --enable-lora --lora-modules adapter=./adapter",
    ),
)
def adapters_without_lora(target: LintTarget) -> Iterator[Match]:
    """Check like `init_static_loras`: lora_model_runner_mixin.py raises, and the API server exits."""
    command, end = target.command, len(target.command.words)
    if target.has(_MODULES) and (target.is_off(_ENABLE) or target.lacks(_ENABLE)):
        first = command.all(_MODULES)[0].words
        added = not command.all(_ENABLE) and bool(first) and command.arguments <= first.start <= end
        yield Match(edits=(Edit(range(first.start, first.start), (_ENABLE,)),) if added else ())


@rule(
    "error",
    "The rank of an adapter is above --max-lora-rank",
    f"An adapter in --lora-modules whose adapter_config.json on this host has a rank above --max-lora-rank, which is"
    f" {_USUAL_RANK} by default.",
    "vLLM loads the model and then exits: the LoRA rank is greater than max_lora_rank",
    "Set --max-lora-rank to the rank of the largest adapter, rounded up to a value that vLLM takes",
    Example(
        "vllm serve m --enable-lora --lora-modules adapter=./adapter-64",
        requires="./adapter-64/adapter_config.json has rank 64",
        leaves="vllm serve m --enable-lora --max-lora-rank 64 --lora-modules adapter=./adapter-64",
    ),
)
def adapter_rank_above_the_maximum(target: LintTarget) -> Iterator[Match]:
    given = target.command.get(_RANK)
    most = number(given) if given is not None else _USUAL_RANK if target.lacks(_RANK) else None
    ranks = (target.adapter_ranks.get(path, 0) for path in adapter_paths(target.command))
    rank = max(ranks, default=0)
    if most is not None and rank > most and target.is_on(_ENABLE):
        fitting = next((able for able in RANKS if able >= rank), 0)
        unset = " (the default)" if given is None else ""
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


@rule(
    "error",
    "The draft model has another vocabulary",
    "A draft model whose vocab_size differs from that of the model, both by their config.json, without"
    " use_heterogeneous_vocab, since 0.16.0.",
    "vLLM refuses it: tokens of one vocabulary mean nothing in the other",
    "Use a draft model of the same family, or `use_heterogeneous_vocab: true` in --speculative-config where the release"
    " has it",
    Example(
        """vllm serve ./model --speculative-config '{"model": "./draft", "num_speculative_tokens": 4}'""",
        requires="./model has 128,256 tokens, ./draft 32,000 and ./small 128,256",
        leaves="""vllm serve ./model --speculative-config '{"model": "./small", "num_speculative_tokens": 4}'""",
    ),
)
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


ADAPTER_RULES = (
    adapters_without_lora,
    adapter_rank_above_the_maximum,
    conflict_rule(_CONFLICT),
    draft_of_another_vocabulary,
)
