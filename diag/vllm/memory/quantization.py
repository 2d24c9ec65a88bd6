"""Bits of a weight by the quantization that a model's files or the command ask for, and the modules that it leaves out.

Bits are with a number's share of the scales and zero points.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.vllm.command.container import inner
from diag.vllm.memory.parts import WeightPart

HALF = 16.0
MOST_PATTERNS = 256
_SPECIAL = frozenset("\\[](){}+?|^$")
_CHOICE = re.compile(r"\(([\w.|]+)\)(?![?+*{])")
_GROUPED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "auto-round", "auto_round", "autoround", "inc", "moe_wna16")
"""Methods whose files state bits and a group of inputs that share a scale."""


class _ModuleNames(NamedTuple):
    """Names of modules as vLLM and quantization_config write them."""

    lists: tuple[str, ...]
    renamed: Mapping[str, str]
    fused: Mapping[str, str]
    mixers: Mapping[str, str]


class Format(NamedTuple):
    """A quantized format by the words of a name; `weights` are those of compressed-tensors, instead of a `config`."""

    words: re.Pattern[str]
    label: str
    loose: tuple[str, ...] = ()
    config: Mapping[str, Any] = {}
    weights: Mapping[str, Any] = {}


class Checkpoint(NamedTuple):
    """A quantized checkpoint that GPUs from a compute capability on run."""

    name: str
    capability: float
    config: Mapping[str, Any]


class Tables(NamedTuple):
    """The tables of quantization.toml."""

    bits: Mapping[str, float]
    number_bytes: Mapping[str, float]
    latent_bytes: Mapping[str, int]
    modules: _ModuleNames
    format: tuple[Format, ...]
    checkpoint: tuple[Checkpoint, ...]


@cache
def tables() -> Tables:
    """Return the bits by algorithm, the names of modules, and the formats by the words of a model's name."""
    return read(PACKAGE / "vllm" / "memory" / "quantization.toml", Tables)


# -- modules that a quantization leaves out


@dataclass(frozen=True)
class Modules:
    """Modules by whole names, by patterns with a *, and by regular expressions that diag cannot read."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    known: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)
    """Answers by module: a ledger asks for each of them many times."""

    def has(self, module: str) -> bool:
        """Return True if a module, model.layers.0.mlp.up_proj, is listed by its name or by whole words of it."""
        if not self.names and not self.patterns:
            return False
        if module not in self.known:
            before, _, last = module.rpartition(".")
            spellings = {module, f"{before}.{tables().modules.fused.get(last, last)}"}
            split = [name.split(".") for name in spellings]
            ends = [(words, *bounds) for words in split for bounds in combinations(range(len(words) + 1), 2)]
            patterns = [*self.patterns, *(f"{pattern}.*" for pattern in self.patterns)]
            self.known[module] = any(".".join(words[start:end]) in self.names for words, start, end in ends) or any(
                fnmatchcase(name, pattern) for name in spellings for pattern in patterns
            )
        return self.known[module]


def unquantized(settings: Mapping[str, Any]) -> Modules:
    """Read the unquantized modules of a quantization_config."""
    lists = [names for field in tables().modules.lists if isinstance(names := settings.get(field), list)]
    texts = [text for names in lists for text in names if isinstance(text, str)]
    dynamic, extra = settings.get("dynamic"), settings.get("extra_config")
    if isinstance(dynamic, dict):  # GPTQModel: a name that begins with - is left out
        texts += [f"re:{name[2:]}" for name in dynamic if isinstance(name, str) and name.startswith("-:")]
    if isinstance(extra, dict):  # AutoRound
        texts += [str(name) for name, own in extra.items() if isinstance(own, dict) and own.get("bits", 0) >= HALF]
    return modules(texts)


def modules(texts: Iterable[str]) -> Modules:
    """Read names of modules as quantization_config writes them."""
    names, patterns, unread = set[str](), dict[str, None](), dict[str, None]()
    choices: list[str] = []
    for text in texts:  # a regular expression with one choice, (gate|up), stands for two
        choice = _CHOICE.search(text) if text.startswith("re:") else None
        words = choice[1].split("|") if choice else ()
        choices += [text[: choice.start()] + word + text[choice.end() :] for word in words] if choice else [text]
    for text in choices:
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
    return Modules(frozenset(names), tuple(patterns)[:MOST_PATTERNS], (*unread, *tuple(patterns)[MOST_PATTERNS:]))


def _canonical(name: str) -> str:
    words, spelled = name.split("."), tables().modules
    if "mixer" in words:  # Nemotron-H: the last word tells attention and feed-forward parts
        mixer = spelled.mixers.get(words[-1].strip("*"), "mixer")
        words = [mixer if word == "mixer" else word for word in words]
    if "experts" in words:
        words = words[: words.index("experts") + 1]
    return ".".join(filter(None, (spelled.renamed.get(word, word) for word in words)))


# -- bits


@dataclass(frozen=True)
class Precision:
    """Bits of a number in matrices of each kind; `exact` is False if scales are estimated.

    `padded` is True if vLLM may enlarge the experts for its kernels.
    """

    linear: float = HALF
    expert: float = HALF
    plain: float = HALF
    exact: bool = True
    named: str = ""
    padded: bool = False

    def of(self, part: WeightPart) -> float:
        """Return the bits of one number of a part."""
        return part.bits or {"linear": self.linear, "expert": self.expert}.get(part.kind, self.plain)


def with_experts(settings: Mapping[str, Any] | None, expert_dtype: object) -> Mapping[str, Any] | None:
    """Return a quantization_config with the type of the routed experts, which DeepSeek V4 names beside it.

    With `moe_quant_algo` the lists of modules are those of the experts alone: all others follow the method.
    """
    if not settings or not isinstance(expert_dtype, str):
        return settings
    left_out = _OF_EXPERTS if settings.get("moe_quant_algo") else ()
    return {name: value for name, value in settings.items() if name not in left_out} | {"expert_dtype": expert_dtype}


_OF_EXPERTS = ("ignore", "quantized_layers", "config_groups", "quant_algo", "group_size")


def precision(settings: Mapping[str, Any], wanted: str = "", float32: bool = False) -> Precision | None:
    """Return the bits by kind of matrix of a quantization_config; None for an unknown method.

    `wanted` is --quantization, with which vLLM quantizes files that are not quantized as it loads them.
    """
    plain = 2 * HALF if float32 else HALF
    method = str(settings.get("quant_method", settings.get("quant_algo", wanted))).lower()
    if not method:
        return Precision(plain, plain, plain)
    if method == "mxfp4":
        return Precision(plain, 4 + 8 / 32, plain, False, "mxfp4 experts, 8-bit scales of 32", True)
    if mixed_precision(settings):
        return Precision(plain, plain, plain, False, f"{method}, matrix by matrix")
    bits = _bits(settings, method)
    of_experts = str(settings.get("moe_quant_algo") or settings.get("expert_dtype") or "").lower()
    if bits and of_experts in tables().bits:
        return Precision(bits, tables().bits[of_experts], plain, False, f"{method}, experts in {of_experts}", True)
    linear = plain if method == "experts_int8" else bits
    return (
        Precision(linear, bits, plain, False, f"{method}, {bits:.3g} bits with its scales") if bits and linear else None
    )


def _bits(settings: Mapping[str, Any], method: str) -> float | None:
    """Return the bits of a method with its settings; None if they are unknown."""
    algorithm, bits = str(settings.get("quant_algo", "")).lower(), tables().bits
    if algorithm in bits or method in bits:
        return bits.get(algorithm) or bits[method]
    if "fp4" in algorithm or "fp8" in algorithm:
        return bits["nvfp4" if "fp4" in algorithm else "fp8"]
    if method == "bitsandbytes":
        return 8.0 if settings.get("load_in_8bit") else 4 + 32 / 64
    if method == "quark":
        return bits.get(str(inner(settings, "global_quant_config", "weight").get("dtype", "")).lower())
    if method == "compressed-tensors":
        return _packed(compressed_weights(settings))
    return _packed(settings) if method in _GROUPED else None


def _packed(settings: Mapping[str, Any]) -> float | None:
    """Return the bits of packed integers, or of floats of 4 or 8 bits; None if the settings name no such width."""
    width = settings.get("bits", settings.get("w_bit", settings.get("num_bits")))
    if width not in (2, 3, 4, 5, 6, 8):
        return None
    group = _group(settings)
    # NVFP4 and MXFP4 have scales of 8 bits; integers have one of 16 bits, and a zero point unless they are symmetric
    zero_point = 0 if True in (settings.get("symmetric"), settings.get("sym")) else width
    scale = 8 if settings.get("type") == "float" else HALF + zero_point
    return float(width + (scale / group if width < 8 and isinstance(group, int) and group > 0 else 0.0))


def mixed_precision(settings: Mapping[str, Any]) -> tuple[tuple[Modules, float], ...]:
    """Return the modules with bits of their own, of files that are quantized matrix by matrix; () of others."""
    layers, groups = settings.get("quantized_layers"), settings.get("config_groups")
    named = defaultdict[float, list[str]](list)
    if isinstance(layers, dict):
        for name in layers:
            algorithm = str(inner(layers, name).get("quant_algo", "")).lower()
            named[tables().bits.get(algorithm, HALF)].append(str(name))
    elif isinstance(groups, dict) and len(groups) > 1:
        for group in groups.values():
            targets = group.get("targets") if isinstance(group, dict) else None
            if isinstance(targets, list) and isinstance(group.get("weights"), dict):
                names = ["*" if name == "Linear" else str(name) for name in targets]
                named[_packed(group["weights"]) or HALF] += names
    return tuple((modules(names), bits) for bits, names in named.items())


def _group(settings: Mapping[str, Any]) -> Any:
    return settings.get("group_size", settings.get("q_group_size", 128))


def group_size(settings: Mapping[str, Any]) -> int:
    """Return the inputs of a matrix that share a scale; 0 if a quantization_config has no groups."""
    method = str(settings.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        packed = compressed_weights(settings)
        group = 0 if packed.get("type") == "float" else packed.get("group_size")
    else:
        group = _group(settings) if method in ("awq", "awq_marlin", "gptq", "gptq_marlin") else 0
    return group if isinstance(group, int) and group > 0 else 0


def block_size(settings: Mapping[str, Any]) -> int:
    """Return the columns of an fp8 matrix that share a scale; 0 if there are no blocks."""
    blocks = settings.get("weight_block_size")
    size = blocks[0] if isinstance(blocks, list) and blocks else 0
    return size if isinstance(size, int) and size > 0 else 0


def compressed_weights(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings for the weights of the first group of layers."""
    groups = settings.get("config_groups")
    return inner(next(iter(groups.values()), None), "weights") if isinstance(groups, dict) else {}
