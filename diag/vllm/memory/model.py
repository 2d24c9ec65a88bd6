"""A model by its config.json: the numbers that determine the memory that vLLM needs for it.

Nothing of Hugging Face is imported and nothing is downloaded: a model is a folder, or an id in a local cache.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from pathlib import Path
from typing import Any

from diag.core.errors import BadUsage
from diag.core.files import expanded, read_bytes, read_text
from diag.core.formatting import MIB
from diag.vllm.command import redaction
from diag.vllm.command.free_text import hidden
from diag.vllm.flags.registry import release


@dataclass(frozen=True)
class Architecture:
    """Properties of an architecture that are in vLLM's code and not in config.json."""

    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """The number of norms of a layer, each of the hidden size."""
    tied: bool = False
    """True if the head is the embedding's matrix, unless the file has the field."""
    experts: str = ""
    """The field with the number of experts, "" for a dense model."""
    width: str = "intermediate_size"
    """The field with the width of one expert."""
    dense: str = "intermediate_size"
    """The field with the width of a layer without experts."""
    every: int = 0
    """One layer in so many attends to everything, the others to a window; 0 if the file has the field."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Defaults of Transformers for fields that the official files leave out."""


_GEMMA3 = Architecture(
    norms=4,
    tied=True,
    qk_norm=True,
    every=6,
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
)

FAMILIES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "Phi3ForCausalLM": Architecture(),
    "GraniteForCausalLM": Architecture(tied=True),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
    "Gemma2ForCausalLM": Architecture(norms=4, tied=True, every=2),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "MixtralForCausalLM": Architecture(experts="num_local_experts"),
    "Qwen2MoeForCausalLM": Architecture(qkv_bias=True, experts="num_experts", width="moe_intermediate_size"),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, experts="num_experts", width="moe_intermediate_size"),
    "DeepseekV2ForCausalLM": Architecture(experts="n_routed_experts", width="moe_intermediate_size"),
    "DeepseekV3ForCausalLM": Architecture(experts="n_routed_experts", width="moe_intermediate_size"),
    "GptOssForCausalLM": Architecture(qkv_bias=True, experts="num_local_experts", every=2),
    "Llama4ForConditionalGeneration": Architecture(experts="num_local_experts", dense="intermediate_size_mlp"),
}
"""Architectures whose weights and KV cache can be computed; of others only the size of the files is known."""


_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules", "exclude_modules")
MOST_PATTERNS = 256
_SPECIAL = frozenset("\\[](){}+?|^$")
_RENAMED: Mapping[str, str] = {
    "language_model": "",
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "shared_expert": "shared_experts",
}
"""Parts of a module's name that some architectures name otherwise."""
_FUSED: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


@dataclass(frozen=True)
class Unquantized:
    """Modules that are not quantized: whole names, patterns with a *, and regular expressions that diag cannot read."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def has(self, module: str) -> bool:
        """Return True if a module, model.layers.0.mlp.up_proj, is listed by its name or by whole words of it."""
        if not self.names and not self.patterns:
            return False
        before, _, last = module.rpartition(".")
        for name in {module, f"{before}.{_FUSED.get(last, last)}"}:
            words = name.split(".")
            runs = (".".join(words[start:end]) for start, end in combinations(range(len(words) + 1), 2))
            if any(run in self.names for run in runs):
                return True
            if any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in self.patterns):
                return True
        return False


def unquantized(settings: Mapping[str, Any]) -> Unquantized:
    """Read the unquantized modules of a quantization_config."""
    lists = [names for field in _LISTS if isinstance(names := settings.get(field), list)]
    texts = [text for names in lists for text in names if isinstance(text, str)]
    names, patterns, unread = set[str](), dict[str, None](), dict[str, None]()
    for text in texts:
        # vLLM matches a regular expression from the start; one with only .* and \. in it is a pattern
        regex = text[3:].removeprefix("^").removesuffix("$").replace("\\.", ".").replace(".*", "*")
        if not text.startswith("re:") and "*" not in text:
            names.add(_canonical(text))
        elif not text.startswith("re:"):
            patterns[_canonical(text)] = None
        elif _SPECIAL & set(regex):
            unread[text] = None
        else:
            patterns[_canonical(regex) + ("" if text.endswith("$") else "*")] = None
    return Unquantized(frozenset(names), tuple(patterns)[:MOST_PATTERNS], (*unread, *tuple(patterns)[MOST_PATTERNS:]))


def _canonical(name: str) -> str:
    return ".".join(filter(None, (_RENAMED.get(word, word) for word in name.split("."))))


MOST_BYTES = 4 * MIB
"""Most bytes of a config.json; the largest hold a few hundred kilobytes of quantization rules."""
MOST = 2**30
MOST_LAYERS = 2048
CACHE = "~/.cache/huggingface"
CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_LENGTHS = ("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions")
"""Fields in which vLLM finds the longest context of a model without `max_position_embeddings`."""
_UNSCALED = ("default", "llama3", "longrope", "su", "mrope")
"""With these no release multiplies `max_position_embeddings` by `factor` (config/model.py)."""
YARN_UNSCALED, LONGROPE_SHORT = (0, 30, 0), (0, 11, 1)
"""First release that does not multiply for YaRN either; first whose default for LongRoPE is the original context."""


class Config:
    """The fields of a config.json; a field that is missing, of another type or absurd raises BadUsage with its name."""

    def __init__(self, fields: Mapping[str, Any], place: str) -> None:
        self.fields = fields
        self._place = place

    def size(self, name: str, default: int | None = None, most: int = MOST, least: int = 1) -> int:
        """Return a whole number of `least` to `most`; the default if the field is missing or null."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise BadUsage(f"{self._place} has no {name!r}: it is not the config.json of a known model")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise BadUsage(f"{self._place}: {name!r} is {_quote(value)}, expected a whole number of {least} to {most}")
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadUsage(f"{self._place}: {name!r} is {_quote(value)}, expected true or false")
        return default if value is None else value

    def part(self, name: str) -> Mapping[str, Any]:
        """Return an object inside; {} if there is none."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise BadUsage(f"{self._place}: {name!r} is {_quote(value)}, expected an object")
        return value or {}

    def list(self, name: str) -> list[Any]:
        """Return a list; [] if there is none."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, list):
            raise BadUsage(f"{self._place}: {name!r} is {_quote(value)}, expected a list")
        return value or []


@dataclass(frozen=True)
class Model:
    """A model's shape; `config` holds the fields of its language part.

    `longest` is the longest context that vLLM accepts for --max-model-len, `usual` the context without it, `positions`
    the number of rotary angles. `windows` has a number for each layer: the tokens it attends to, 0 for all. `latent` is
    the width of a token in MLA's cache, 0 for other attention. `unknown` is the reason why the KV cache cannot be
    computed, "" if it can; `family` is None for an unknown architecture.
    """

    name: str
    folder: Path
    architecture: str
    config: Config
    family: Architecture | None
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    longest: int
    usual: int
    positions: int
    windows: tuple[int, ...]
    latent: int = 0
    tied: bool = False
    quantization: Mapping[str, Any] | None = None
    unquantized: Unquantized = field(default_factory=Unquantized)
    vision: Mapping[str, Any] | None = None
    unknown: str = ""


def is_folder(name: str) -> bool:
    """Return True if a folder of that name exists; False for a text that cannot be a path."""
    try:
        return expanded(name).is_dir()
    except (OSError, ValueError):  # too long, NUL
        return False


def find(name: str, environment: Mapping[str, str], revision: str = "") -> Path:
    """Return the folder of a model: the folder itself, or the snapshot of an id in the local Hugging Face cache."""
    if is_folder(name):
        return expanded(name)
    variables = {**os.environ, **environment}
    home = Path(variables.get("HF_HOME") or CACHE)
    hub = expanded(variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    kept = hub / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    with suppress(OSError, ValueError):
        wanted = read_text(kept / "refs" / wanted, MOST_BYTES).strip()
    snapshot = kept / "snapshots" / wanted
    if is_folder(str(snapshot)):
        return snapshot
    shown = redaction.name(name)
    fetch = f"fetch it with `hf download {shown} config.json`, or " if _HUB_ID.fullmatch(shown) else ""
    raise BadUsage(
        f"the model {_quote(shown or '...')} is neither a folder nor in the local cache {_quote(str(hub))};"
        f" diag downloads nothing: {fetch}give a folder with its config.json"
    )


def read(folder: Path, name: str = "", version: str = "") -> Model:
    """Read the model of a folder with a config.json for a release; BadUsage, in one sentence, if that fails.

    Without a release `longest` is the most that any release takes, and every field must be there; with one, a missing
    field of an unknown architecture is 0.
    """
    file = folder / "config.json"
    place = repr(str(file))[1:-1]
    try:
        content = read_bytes(file, MOST_BYTES)
    except FileNotFoundError as error:
        raise BadUsage(f"{place} does not exist: give a model's folder, or its id in the local cache") from error
    except OSError as error:
        raise BadUsage(f"{place} cannot be read: {error.strerror}") from error
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        what = "an HTML page" if content.lstrip()[:1] == b"<" else "cut off or not JSON"
        raise BadUsage(f"{place} is {what}: download it again") from error
    if not isinstance(found, dict):
        raise BadUsage(f"{place} holds {_quote(found)} instead of an object: it is not a model's config.json")

    outer = Config(found, place)
    inner = outer.part("text_config")
    named = [name for name in outer.list("architectures") if isinstance(name, str)]
    architecture = named[0] if named else str(outer.fields.get("model_type", ""))
    family = FAMILIES.get(architecture)
    given = {name: value for name, value in {**outer.fields, **inner}.items() if value is not None}
    config = Config({**family.defaults, **given} if family else given, place)
    return _model(name or folder.name, folder, architecture, config, outer, version)


def _model(name: str, folder: Path, architecture: str, config: Config, outer: Config, version: str) -> Model:
    family = FAMILIES.get(architecture)
    missing = 0 if version and architecture and not family else None
    hidden, heads = config.size("hidden_size", missing), config.size("num_attention_heads", missing, most=2**16)
    layers = config.size("num_hidden_layers", missing, most=MOST_LAYERS)
    latent = config.size("kv_lora_rank", 0, least=0)
    windows, unknown = _windows(config, family or Architecture(), layers)
    kv_heads = config.size("num_key_value_heads", heads, most=heads or 2**16)
    if kv_heads and heads % kv_heads:
        raise BadUsage(f"the model's {heads} attention heads are not a multiple of its {kv_heads} key-value heads")
    longest = _longest_context(config, version)
    usual, is_long = longest, _scaling(config)[1] in ("longrope", "su")
    if is_long and (not version or release(version) >= LONGROPE_SHORT):  # long factors cost short prompts
        usual = config.size("original_max_position_embeddings", longest)
    names = ("quantization_config", "compression_config")  # modelopt writes the latter
    quantization = next((part for fields in (outer, config) for name in names if (part := fields.part(name))), None)
    return Model(
        name=name,
        folder=folder,
        architecture=architecture,
        config=config,
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.size("head_dim", hidden // max(heads, 1)),
        vocabulary=config.size("vocab_size", missing),
        longest=longest if family or _declared_context(config) else MOST,
        usual=usual,
        positions=max(_longest_context(config), config.size("max_position_embeddings", 2048)),
        windows=windows,
        latent=latent + config.size("qk_rope_head_dim", missing) if latent else 0,
        tied=outer.switch("tie_word_embeddings", config.switch("tie_word_embeddings", bool(family and family.tied))),
        quantization=quantization,
        unquantized=unquantized(quantization or {}),
        vision=outer.part("vision_config") or None,
        unknown=unknown if family else f"the architecture {_quote(architecture)} is unknown",
    )


def _declared_context(config: Config) -> int:
    """Return the longest context that the file names; 0 if it names none."""
    lengths = [config.size(name) for name in _LENGTHS if name in config.fields]
    return config.size("max_position_embeddings", min(lengths, default=0))


def _longest_context(config: Config, version: str = "") -> int:
    """Return the longest context as vLLM derives it."""
    longest = _declared_context(config) or 2048
    scaling, kind = _scaling(config)
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    unscaled = kind in _UNSCALED or ("yarn" in kind and release(version) >= YARN_UNSCALED)
    if unscaled or "gemma3" in str(config.fields.get("model_type")):
        return longest
    if not isinstance(factor, int | float) or not 1 <= factor <= 2**16:
        return longest
    if kind == "yarn":
        longest = original if isinstance(original, int) and 1 <= original <= MOST else longest
    return min(int(longest * factor), MOST)


def _scaling(config: Config) -> tuple[Mapping[str, Any], str]:
    scaling = config.part("rope_scaling") or config.part("rope_parameters")
    return scaling, str(scaling.get("rope_type", scaling.get("type", "default")))


def _windows(config: Config, family: Architecture, layers: int) -> tuple[tuple[int, ...], str]:
    """Return the window of every layer, and the reason why the KV cache cannot be computed from them, or ""."""
    window = config.size("sliding_window", 0, least=0) if config.fields.get("use_sliding_window") is not False else 0
    kinds = config.list("layer_types")
    known = {"full_attention": 0, "sliding_attention": window, "chunked_attention": 0}
    if kinds and (len(kinds) != layers or any(str(kind) not in known for kind in kinds)):
        other = sorted({str(kind) for kind in kinds} - known.keys())
        why = f"layers of the kind {_quote(other[0])}" if other else f"{len(kinds)} layer_types for {layers} layers"
        return (0,) * layers, f"{why} are not covered"
    if kinds:
        return tuple(known[kind] for kind in kinds), ""
    every = config.size("sliding_window_pattern", family.every, least=0) if family.every else 0
    if every and window:
        return tuple(0 if (at + 1) % every == 0 else window for at in range(layers)), ""
    return (window,) * layers, ""


def _quote(value: object) -> str:
    """Quote a value of a file or a command, short, without terminal escapes and without secrets."""
    text = hidden(repr(value))
    return text if len(text) <= 80 else f"{text[:76]} ..."
