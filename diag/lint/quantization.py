"""Rules about quantized weights and caches: the method against the checkpoint, the release and the GPU."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from diag.lint.rule import Edit, Example, LintTarget, Match, at_least, removal, rule
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
