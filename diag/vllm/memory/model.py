"""A model as its config.json describes it: the numbers that decide how much memory vLLM needs for it.

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
from diag.core.files import read_bytes, read_text
from diag.core.formatting import MIB
from diag.vllm.command import redaction
from diag.vllm.flags.registry import release


@dataclass(frozen=True)
class Architecture:
    """Properties of an architecture that are in vLLM's code and not in config.json."""

    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """Of a layer, each one of the hidden size."""
    tied: bool = False
    """Whether the head is the embedding's matrix where the file does not say."""
    experts: str = ""
    """The field with the number of experts, "" for a dense model."""
    width: str = "intermediate_size"
    """The field with the width of one expert."""
    dense: str = "intermediate_size"
    """The field with the width of a layer without experts."""
    every: int = 0
    """A layer in so many attends to everything, the others to a window; 0 where the file says so itself."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Of Transformers, for fields that the official files leave out."""


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
"""The architectures whose weights and KV cache can be computed; of any other one only its files can be weighed."""


_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules", "exclude_modules")
MOST_PATTERNS = 256
_SPECIAL = frozenset("\\[](){}+?|^$")
_RENAMED: Mapping[str, str] = {
    "language_model": "",
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "shared_expert": "shared_experts",
}
"""What some architectures call the parts of a name."""
_FUSED: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


@dataclass(frozen=True)
class Unquantized:
    """Whole names, patterns with a *, and regular expressions that diag does not read (`unread`)."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def has(self, module: str) -> bool:
        """Return True if a module, model.layers.0.mlp.up_proj, is listed by its name or by whole words of it."""
        if not self.names and not self.patterns:
            return False
        before, _, last = module.rpartition(".")
        return any(map(self._names, {module, f"{before}.{_FUSED.get(last, last)}"}))

    def _names(self, module: str) -> bool:
        words = module.split(".")
        runs = (".".join(words[start:end]) for start, end in combinations(range(len(words) + 1), 2))
        return any(run in self.names for run in runs) or any(
            fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*") for pattern in self.patterns
        )


def unquantized(settings: Mapping[str, Any]) -> Unquantized:
    """Read the unquantized modules of a quantization_config."""
    lists = [names for field in _LISTS if isinstance(names := settings.get(field), list)]
    texts = [text for names in lists for text in names if isinstance(text, str)]
    plain = {_canonical(text) for text in texts if not text.startswith("re:") and "*" not in text}
    globs = dict.fromkeys(_glob(text) or text for text in texts if text.startswith("re:") or "*" in text)
    known = [glob for glob in globs if not glob.startswith("re:")]
    unread = [glob for glob in globs if glob.startswith("re:")] + known[MOST_PATTERNS:]
    return Unquantized(frozenset(plain), tuple(known[:MOST_PATTERNS]), tuple(unread))


def _canonical(name: str) -> str:
    words = (_RENAMED.get(word, word) for word in name.split("."))
    return ".".join(filter(None, words))


def _glob(pattern: str) -> str:
    r"""A regular expression with only .* and \. in it, which vLLM matches from the start; "" for any other one."""
    if not pattern.startswith("re:"):
        return _canonical(pattern)
    ends = "" if pattern.endswith("$") else "*"
    text = pattern[3:].removeprefix("^").removesuffix("$").replace("\\.", ".").replace(".*", "*")
    return "" if _SPECIAL & set(text) else _canonical(text) + ends


MOST_BYTES = 4 * MIB
"""Of a config.json; the largest ones hold a few hundred kilobytes of quantization rules."""
MOST = 2**30
MOST_LAYERS = 2048
CACHE = "~/.cache/huggingface"
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_LENGTHS = ("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions")
"""Where vLLM looks for the longest context of a model that has no `max_position_embeddings`."""
_UNSCALED = ("default", "llama3", "longrope", "su", "mrope")
"""With these no release multiplies `max_position_embeddings` by `factor` (config/model.py)."""
YARN_UNSCALED, LONGROPE_SHORT = (0, 30, 0), (0, 11, 1)
"""Since when YaRN's is not multiplied either, and LongRoPE's default is the context before it: read off the wheels."""


class Config:
    """The fields of a config.json, read with care: what is missing, of another type or absurd is refused by name."""

    def __init__(self, fields: Mapping[str, Any], place: str) -> None:
        self.fields = fields
        self._place = place

    def size(self, name: str, default: int | None = None, most: int = MOST, least: int = 1) -> int:
        """A whole number of `least` to `most`; the default where the field is missing or null."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise BadUsage(f"{self._place} has no {name!r}: it is not the config.json of a known model")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise BadUsage(f"{self._place}: {name!r} is {_shown(value)}, expected a whole number of {least} to {most}")
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadUsage(f"{self._place}: {name!r} is {_shown(value)}, expected true or false")
        return default if value is None else value

    def part(self, name: str) -> Mapping[str, Any]:
        """An object inside; empty where there is none."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise BadUsage(f"{self._place}: {name!r} is {_shown(value)}, expected an object")
        return value or {}

    def list(self, name: str) -> list[Any]:
        """A list; empty where there is none."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, list):
            raise BadUsage(f"{self._place}: {name!r} is {_shown(value)}, expected a list")
        return value or []


@dataclass(frozen=True)
class Model:
    """A model's shape; `config` holds the fields of its language part.

    `longest` is the most that vLLM takes for --max-model-len, `usual` the context without it, `positions` how many it
    has angles for. `windows` has a number for each layer: the tokens it attends to, 0 for all of them. `latent` is the
    width of what MLA keeps of a token, 0 for other attention. `unknown` says why its KV cache cannot be computed, ""
    where it can; `family` is None for an architecture that is not known.
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
        return Path(name).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, NUL, a home that nobody has
        return False


def find(name: str, environment: Mapping[str, str], revision: str = "") -> Path:
    """The folder of a model: the folder itself, or the snapshot of an id in the local Hugging Face cache."""
    if is_folder(name):
        return Path(name).expanduser()
    variables = {**os.environ, **environment}
    home = Path(variables.get("HF_HOME") or CACHE)
    hub = Path(variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()
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
        f"the model {_shown(shown or '...')} is neither a folder nor in the local cache {_shown(str(hub))};"
        f" diag downloads nothing: {fetch}give a folder with its config.json"
    )


def read(folder: Path, name: str = "", version: str = "") -> Model:
    """The model of a folder with a config.json, as that release reads it; BadUsage where that is none, in one sentence.

    Without a release `longest` is the most that any of them takes, and every field must be there; with one, what is
    missing of an architecture that is not known is 0.
    """
    place = repr(str(folder / "config.json"))[1:-1]
    outer = Config(_object(folder / "config.json", place), place)
    inner, family = outer.part("text_config"), FAMILIES.get(_architecture(outer))
    given = {name: value for name, value in {**outer.fields, **inner}.items() if value is not None}
    config = Config({**family.defaults, **given} if family else given, place)
    return _model(name or folder.name, folder, config, outer, version)


def _architecture(outer: Config) -> str:
    """Its name; "" where the file has none."""
    named = [name for name in outer.list("architectures") if isinstance(name, str)]
    return named[0] if named else str(outer.fields.get("model_type", ""))


def _object(file: Path, place: str) -> dict[str, Any]:
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
        raise BadUsage(f"{place} holds {_shown(found)} instead of an object: it is not a model's config.json")
    return found


def _model(name: str, folder: Path, config: Config, outer: Config, version: str) -> Model:
    architecture = _architecture(outer)
    family = FAMILIES.get(architecture)
    missing = 0 if version and architecture and not family else None
    hidden, heads = config.size("hidden_size", missing), config.size("num_attention_heads", missing, most=2**16)
    layers = config.size("num_hidden_layers", missing, most=MOST_LAYERS)
    latent = config.size("kv_lora_rank", 0, least=0)
    windows, unknown = _windows(config, family or Architecture(), layers)
    kv_heads = config.size("num_key_value_heads", heads, most=heads or 2**16)
    if kv_heads and heads % kv_heads:
        raise BadUsage(f"the model's {heads} attention heads are not a multiple of its {kv_heads} key-value heads")
    longest = _longest(config, version)
    places = [(fields, name) for fields in (outer, config) for name in ("quantization_config", "compression_config")]
    quantization = next(
        filter(None, (fields.part(name) for fields, name in places)), None
    )  # modelopt writes the latter
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
        longest=longest if family or _declared(config) else MOST,
        usual=_usual(config, version, longest),
        positions=max(_longest(config), config.size("max_position_embeddings", 2048)),
        windows=windows,
        latent=latent + config.size("qk_rope_head_dim", missing) if latent else 0,
        tied=outer.switch("tie_word_embeddings", config.switch("tie_word_embeddings", bool(family and family.tied))),
        quantization=quantization,
        unquantized=unquantized(quantization or {}),
        vision=outer.part("vision_config") or None,
        unknown=unknown if family else f"the architecture {_shown(architecture)} is unknown",
    )


def _declared(config: Config) -> int:
    """The longest context that the file names; 0 where it names none."""
    lengths = [config.size(name) for name in _LENGTHS if name in config.fields]
    return config.size("max_position_embeddings", min(lengths, default=0))


def _longest(config: Config, version: str = "") -> int:
    """The longest context as vLLM derives it."""
    longest = _declared(config) or 2048
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


def _usual(config: Config, version: str, longest: int) -> int:
    """The context where --max-model-len is not given: long factors cost short prompts."""
    if _scaling(config)[1] in ("longrope", "su") and (not version or release(version) >= LONGROPE_SHORT):
        return config.size("original_max_position_embeddings", longest)
    return longest


def _scaling(config: Config) -> tuple[Mapping[str, Any], str]:
    scaling = config.part("rope_scaling") or config.part("rope_parameters")
    return scaling, str(scaling.get("rope_type", scaling.get("type", "default")))


def _windows(config: Config, family: Architecture, layers: int) -> tuple[tuple[int, ...], str]:
    """The window of every layer, and why the KV cache cannot be computed from them."""
    window = config.size("sliding_window", 0, least=0) if config.fields.get("use_sliding_window") is not False else 0
    kinds = config.list("layer_types")
    known = {"full_attention": 0, "sliding_attention": window, "chunked_attention": 0}
    if kinds and (len(kinds) != layers or any(str(kind) not in known for kind in kinds)):
        other = sorted({str(kind) for kind in kinds} - known.keys())
        why = f"layers of the kind {_shown(other[0])}" if other else f"{len(kinds)} layer_types for {layers} layers"
        return (0,) * layers, f"{why} are not covered"
    if kinds:
        return tuple(known[kind] for kind in kinds), ""
    every = config.size("sliding_window_pattern", family.every, least=0) if family.every else 0
    if every and window:
        return tuple(0 if (at + 1) % every == 0 else window for at in range(layers)), ""
    return (window,) * layers, ""


def _shown(value: object) -> str:
    """Quote a value of a file or a command, short, without terminal escapes and without secrets."""
    text = redaction.hidden(repr(value))
    return text if len(text) <= 80 else f"{text[:76]} ..."
