"""A model by its config.json: the numbers that determine the memory that vLLM needs for it.

Nothing of Hugging Face is imported and nothing is downloaded: a model is a folder, an id in a local cache, or the name
of a model whose shape is in models.json.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from diag.core.errors import BadUsage
from diag.core.files import expanded, is_folder, parse_json, read_bytes, read_json, read_text
from diag.core.formatting import MIB
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.command.container import inner
from diag.vllm.flags.registry import since
from diag.vllm.memory.architectures import LLAMA, Architecture, families, gives_vectors, stem
from diag.vllm.memory.config import MOST, TEXT_PARTS, Config, quote, unread_fields
from diag.vllm.memory.layers import experts, kind_names, stack
from diag.vllm.memory.parts import Experts, Layer, Mixer, UnknownLayers, WeightPart
from diag.vllm.memory.quantization import Modules, mixed_precision, modules, unquantized, with_experts
from diag.vllm.memory.shapes import closest, find_shape, members, unsized

MOST_BYTES = 4 * MIB
"""Most bytes of a config.json; the largest hold a few hundred kilobytes of quantization rules."""
MOST_LAYERS = 512
"""Four times those of the deepest model that vLLM serves; a ledger takes time for each of them."""
CACHE = "~/.cache/huggingface"
CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
_REVISION = re.compile(r"(?:refs/pr/)?\w[\w.-]{0,100}", re.ASCII)
"""A branch, a tag, a commit or a pull request of a model: one component of a path."""
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_LENGTHS = ("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions")
"""Fields in which vLLM finds the longest context of a model without `max_position_embeddings`."""
_UNSCALED = ("default", "llama3", "longrope", "su", "mrope")
"""With these no release multiplies `max_position_embeddings` by `factor` (config/model.py)."""


class NoFolder(BadUsage):
    """The config.json of a model is not on this host."""


@dataclass(frozen=True)
class Model:
    """A model's shape; `config` holds the fields of its language part.

    `longest` is the longest context that vLLM accepts for --max-model-len, `usual` the context without it, `positions`
    the number of rotary angles. `heads`, `kv_heads` and `head_dim` are those of most layers; `stack` has each layer,
    and is empty if the layers cannot be computed, for the reason in `unknown`. `family` is None for an unknown
    architecture, which is read like Llama; `doubt` has the reason for doubt. `latent` is the width of a token in MLA's
    cache, 0 for other attention. `mixed` has modules with bits of their own, `loose` those that may be in 16 bits.
    `encoders` are the fields of vision and audio encoders by the name of their object. `facts` is the sentence about
    the origin of a shape that is known by its name alone, which is `partial` if its context and quantization are not
    the checkpoint's own, and `taken_for` the repository whose shape a fine-tune's name was taken for.
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
    latent: int = 0
    tied: bool = False
    quantization: Mapping[str, Any] | None = None
    unquantized: Modules = field(default_factory=Modules)
    mixed: tuple[tuple[Modules, float], ...] = ()
    loose: Modules = field(default_factory=Modules)
    encoders: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unknown: str = ""
    doubt: str = ""
    stack: tuple[Layer, ...] = ()
    experts: Experts | None = None
    facts: str = ""
    partial: bool = False
    taken_for: str = ""
    counted: dict[range, Counter[WeightPart]] = field(init=False, default_factory=dict, compare=False, repr=False)
    """The parts of ranges of its layers: ledgers over releases and GPUs ask for them many times."""

    @property
    def traits(self) -> Architecture:
        """Return the properties that config.json leaves out: those of Llama for an unknown architecture."""
        return self.family or LLAMA

    @property
    def mixers(self) -> list[Mixer]:
        """Return the attention and the states of all layers."""
        return [mixer for layer in self.stack for mixer in layer.mixers]

    @property
    def has_states(self) -> bool:
        return any(mixer.kind == "state" for mixer in self.mixers)

    @property
    def keeps_tokens(self) -> bool:
        """Return False for a model of which vLLM caches nothing: BERT, EmbeddingGemma."""
        return not self.stack or any(mixer.cached for mixer in self.mixers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Return for each layer the tokens that it attends to, 0 for all."""
        return tuple(max((mixer.window for mixer in layer.mixers), default=0) for layer in self.stack)


def find(name: str, command: Command, revision: str = "") -> Path:
    """Return the folder of a model: the folder itself, or the snapshot of an id in the local Hugging Face cache.

    All files of a model are found here. For a command that runs elsewhere, such as an agent's, no folder that it names
    is opened. BadUsage if there is none.
    """
    if not command.elsewhere and is_folder(name):
        return expanded(name)
    variables = {**os.environ, **({} if command.elsewhere else command.environment)}
    home = Path(variables.get("HF_HOME") or CACHE)
    hub = expanded(variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    kept = hub / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    if not _REVISION.fullmatch(wanted):
        raise BadUsage(f"the revision {quote(wanted[:40])} is no branch, tag or commit")
    with suppress(OSError, ValueError):
        wanted = read_text(kept / "refs" / wanted, MOST_BYTES).strip()
    snapshot = kept / "snapshots" / wanted
    if _REVISION.fullmatch(wanted) and is_folder(str(snapshot)):
        return snapshot
    harmless = redaction.name(name)
    fetch = f"fetch it with `hf download {harmless} config.json`, or " if _HUB_ID.fullmatch(harmless) else ""
    no_folder = f"not a folder (one is {command.elsewhere})" if command.elsewhere else "neither a folder"
    raise NoFolder(
        f"the model {quote(harmless or '...')} is {no_folder} nor in the local cache {quote(str(hub))};"
        f" diag downloads nothing: {fetch}give a folder with its config.json"
    )


def read(folder: Path, name: str = "", version: str = "") -> Model:
    """Read the model of a folder with a config.json for a release; BadUsage, in one sentence, if that fails.

    A name that ends like a file's is that of the config.json itself.
    Without a release `longest` is the most that any release takes, and every field must be there; with one, a missing
    field of an unknown architecture is 0.
    """
    file = folder if folder.suffix and not is_folder(str(folder)) else folder / "config.json"
    folder = file.parent
    place = repr(str(file))[1:-1]
    try:
        content = read_bytes(file, MOST_BYTES)
    except FileNotFoundError as error:
        raise BadUsage(f"{place} does not exist: give a model's folder, or its id in the local cache") from error
    except OSError as error:
        raise BadUsage(f"{place} cannot be read: {error.strerror}") from error
    try:
        fields = parse_json(content)
    except ValueError as error:
        what = "an HTML page" if content.lstrip()[:1] == b"<" else "cut off or not JSON"
        raise BadUsage(f"{place} is {what}: download it again") from error
    if not isinstance(fields, dict):
        raise BadUsage(f"{place} holds {quote(fields)} instead of an object: it is not a model's config.json")
    return parse(fields, name or folder.name, folder, place, version)


def load(name: str, command: Command, revision: str = "", version: str = "") -> Model:
    """Read a model's config.json on this host, else take the facts that diag has by its name; BadUsage without both."""
    try:
        return read(find(name, command, revision), name, version)
    except NoFolder as error:
        if model := _by_name(name, version):
            return model
        if reason := unsized(name):
            raise BadUsage(f"{quote(redaction.name(name))} {reason}") from error
        if sizes := members(name):
            raise BadUsage(f"{quote(redaction.name(name))} names no size: diag knows {', '.join(sizes)}") from error
        near = closest(name)
        raise BadUsage(f"{error}{f'; the closest shape that diag knows is {near}' if near else ''}") from error


@lru_cache(maxsize=64)
def _by_name(name: str, version: str) -> Model | None:
    """Return the model whose shape diag knows by its name; a file of many launches asks for the same one each time."""
    shape = find_shape(name)
    if shape is None:
        return None
    model = parse(shape.config, name, Path(name), shape.repository, version)
    doubt = f"which modules of a checkpoint in {shape.format} stay in 16 bits is unknown"
    told = model.doubt or (doubt if shape.format and model.has_states else "")
    taken_for, loose = shape.repository if shape.tune else "", modules(shape.loose)
    return replace(model, facts=shape.note, partial=shape.partial, taken_for=taken_for, doubt=told, loose=loose)


def parse(fields: Mapping[str, Any], name: str, folder: Path, place: str, version: str) -> Model:
    """Return the model that the fields of a config.json describe; `place` names their origin in errors."""
    outer = Config({**fields, **inner(fields, "thinker_config")}, place)
    text = _language_part(outer)
    named = [name for name in outer.list("architectures") if isinstance(name, str)]
    architecture = named[0] if named else str(outer.fields.get("model_type", ""))
    # the language part of a model with encoders, or the model that JinaEmbeddingsV5Model extends
    kinds = [*text.list("architectures")[:1], text.fields.get("model_type")]
    kinds += [outer.fields.get("model_type")] if gives_vectors(architecture) else []
    stems = (stem(str(kind)) for kind in (architecture, *kinds))
    family = next((families()[name] for name in stems if name in families()), None)
    values = {name: value for name, value in {**outer.fields, **text.fields}.items() if value is not None}
    if values.get("head_dim") == 0:  # latent attention without rotary keys: GLM 5 Next
        del values["head_dim"]
    config = Config({**family.defaults, **values} if family else values, place)
    return _model(name, folder, architecture, config, outer, family, version)


def _language_part(outer: Config) -> Config:
    """Return the fields of the language part of a model with encoders; without fields if there is no such part."""
    for name in TEXT_PARTS:
        if part := outer.part(name):
            return Config({**part, **_language_part(Config(part, outer.place)).fields}, outer.place)
    return Config({}, outer.place)


_MOST_NAMED = 4
_ODD = TypeError, ValueError, ArithmeticError, LookupError, AttributeError
"""Errors of fields whose values are of no type that a layer has."""
_ENCODERS = re.compile(r"(vision|visual|audio|vit|encoder)\w*_config|audio_tower")


def _model(
    name: str, folder: Path, architecture: str, config: Config, outer: Config, family: Architecture | None, version: str
) -> Model:
    missing = 0 if version and architecture else None
    hidden, bare = config.size("hidden_size", missing), 0 if family and family.bare else missing  # Mamba without heads
    heads = config.size("num_attention_heads", bare, most=2**16)
    layers = config.size("num_hidden_layers", min(len(kind_names(config)), MOST_LAYERS) or missing, most=MOST_LAYERS)
    latent = 0 if family and family.multiplied else config.count("kv_lora_rank")
    vocabulary = config.size("vocab_size", missing)
    kv_heads = config.size("num_key_value_heads", heads, most=heads or 2**16)
    if kv_heads and heads % kv_heads:
        raise BadUsage(f"the model's {heads} attention heads are not a multiple of its {kv_heads} key-value heads")
    longest = _longest_context(config, version)
    usual, is_long = longest, _scaling(config)[1] in ("longrope", "su")
    if is_long and (not version or since(version, "longrope_short")):  # long factors cost short prompts
        usual = config.size("original_max_position_embeddings", longest)
    quantization = with_experts(_quantization(outer, config, folder), config.get("expert_dtype"))
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
    every, unknown = _stack(config, family, architecture, sizes)
    parts = (config.fields, *(config.part(part) for part in TEXT_PARTS), outer.fields)
    encoders = {name: part for fields in parts for name, part in fields.items() if _ENCODERS.fullmatch(name)}
    if family and family.crossed:
        encoders["encoder"] = config.fields
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
        vocabulary=vocabulary,
        longest=longest if (family and not unknown) or _declared_context(config) else MOST,
        usual=usual,
        positions=max(_longest_context(config), config.size("max_position_embeddings", 2048)),
        latent=latent + config.size("qk_rope_head_dim", missing, least=0) if latent else 0,
        tied=outer.switch("tie_word_embeddings", config.switch("tie_word_embeddings", bool(family and family.tied))),
        quantization=quantization,
        unquantized=unquantized(quantization or {}),
        mixed=mixed_precision(quantization or {}),
        encoders={name: part for name, part in encoders.items() if isinstance(part, dict) and part},
        unknown=unknown,
        doubt="" if family or unknown else f"the architecture {quote(architecture)} is unknown: it is read like Llama",
        stack=every,
        experts=experts(config) if every else None,
    )


def _stack(
    config: Config, family: Architecture | None, architecture: str, sizes: Mapping[str, int]
) -> tuple[tuple[Layer, ...], str]:
    """Return the layers of a model, or none and the reason why they are unknown; `sizes` must not be 0."""
    unknown = f"the architecture {quote(architecture)} is unknown, and"
    absent = [name for name, size in sizes.items() if not size]
    if absent and not (family and family.bare):
        fields = " and ".join(filter(None, (", ".join(absent[:-1]), absent[-1])))
        return (), f"config.json has no {fields}" if family else f"{unknown} its config.json has no {fields}"
    try:
        layers = stack(config, family or LLAMA, sizes["num_hidden_layers"])
    except UnknownLayers as error:
        return (), str(error)
    except _ODD as error:
        raise BadUsage(f"{config.place}: the fields of the layers cannot be read: {quote(str(error))}") from error
    if strange := [] if family else unread_fields(config):
        more = f" and {len(strange) - _MOST_NAMED} more" if len(strange) > _MOST_NAMED else ""
        return (), f"{unknown} so are its fields {', '.join(map(quote, strange[:_MOST_NAMED]))}{more}"
    return layers, ""


def _quantization(outer: Config, config: Config, folder: Path) -> Mapping[str, Any] | None:
    """Return the quantization in config.json, or in hf_quant_config.json, where ModelOpt writes it."""
    names = ("quantization_config", "compression_config")  # modelopt writes the latter
    if settings := next((part for fields in (outer, config) for name in names if (part := fields.part(name))), None):
        return settings
    with suppress(OSError, ValueError):
        beside = read_json(folder / "hf_quant_config.json", MOST_BYTES)
        settings = beside.get("quantization") if isinstance(beside, dict) else None
        return {"quant_method": "modelopt", **settings} if isinstance(settings, dict) else None
    return None


def _declared_context(config: Config) -> int:
    """Return the longest context that the file names; 0 if it names none."""
    lengths = [config.size(name) for name in _LENGTHS if name in config.fields]
    # `model_max_length` wins (transformers_utils/model_arch_config_convertor.py): Command R has both
    return config.size("model_max_length", config.size("max_position_embeddings", min(lengths, default=0)))


def _longest_context(config: Config, version: str = "") -> int:
    """Return the longest context as vLLM derives it."""
    longest = _declared_context(config) or 2048
    scaling, kind = _scaling(config)
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    unscaled = kind in _UNSCALED or ("yarn" in kind and since(version, "yarn_unscaled"))
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
