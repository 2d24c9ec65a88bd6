"""The fields of a config.json, under one name each; modules that a quantization leaves out."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import combinations
from typing import Any

from diag.core.declarations import PACKAGE, read
from diag.core.errors import BadUsage
from diag.vllm.command.free_text import hidden

MOST = 2**30
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder_config")
"""Objects with the fields of the language part."""


@cache
def aliases() -> Mapping[str, tuple[str, ...]]:
    """Return other names of a field, by the name that diag uses; the first one that a file has counts."""
    return read(PACKAGE / "vllm" / "memory" / "aliases.toml", dict[str, tuple[str, ...]])


class Config:
    """The fields of a config.json; a field that is missing, of another type or absurd raises BadUsage with its name.

    `asked` collects the names of the fields that were looked for.
    """

    def __init__(self, fields: Mapping[str, Any], place: str, asked: set[str] | None = None) -> None:
        self.fields = fields
        self.place = place
        self.asked = set[str]() if asked is None else asked

    def changed(self, fields: Mapping[str, Any]) -> "Config":
        """Return these fields with some of them changed."""
        return Config({**self.fields, **fields}, self.place, self.asked)

    def _spelled(self, name: str) -> str:
        """Return the name under which the file has a field."""
        self.asked.update((name, *aliases().get(name, ())))
        if self.fields.get(name) is not None:
            return name
        return next((other for other in aliases().get(name, ()) if self.fields.get(other) is not None), name)

    def has(self, *names: str) -> bool:
        """Return True if the file has one of these fields, whatever its spelling."""
        return any(self.fields.get(self._spelled(name)) is not None for name in names)

    def get(self, name: str) -> Any:
        """Return a field as it is; None if it is missing."""
        return self.fields.get(self._spelled(name))

    def size(self, name: str, default: int | None = None, most: int = MOST, least: int = 1) -> int:
        """Return a whole number of `least` to `most`; the default if the field is missing or null."""
        name = self._spelled(name)
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise BadUsage(f"{self.place} has no {name!r}: it is not the config.json of a known model")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise BadUsage(f"{self.place}: {name!r} is {quote(value)}, expected a whole number of {least} to {most}")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """Return a whole number that may be 0; the default if the field is missing or no number."""
        return self.size(name, default, least=0)

    def first(self, name: str, default: int = 0) -> int:
        """Return a whole number, or the first of a list with one for each layer; the default if it is missing."""
        value = self.get(name)
        value = value[0] if isinstance(value, list) and value else value
        return Config({name: value}, self.place).count(name, default)

    def switch(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadUsage(f"{self.place}: {name!r} is {quote(value)}, expected true or false")
        return default if value is None else value

    def any_switch(self, *names: str) -> bool:
        """Return True if one of these fields is true."""
        return any(self.fields.get(name) is True for name in names)

    def part(self, name: str) -> Mapping[str, Any]:
        """Return an object inside; {} if there is none."""
        self.asked.add(name)
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise BadUsage(f"{self.place}: {name!r} is {quote(value)}, expected an object")
        return value or {}

    def list(self, name: str) -> list[Any]:
        """Return a list; [] if there is none."""
        self.asked.add(name)
        value = self.fields.get(name)
        if value is not None and not isinstance(value, list):
            raise BadUsage(f"{self.place}: {name!r} is {quote(value)}, expected a list")
        return value or []


_HARMLESS = re.compile(
    r"_.*|.*(_token_ids?|_token_index|_eps|_epsilon|_theta|_dropout|_pdrop|_range|_scaling|_scale|_factor|_multipliers?|_coef"
    r"|_rate|_loss|_std|_beta|_alpha|_limit|_version|_penalty|_beams|_beam_groups|_sequences|_length|_dtype|_capping"
    r"|_softcap|_step_min|_step_max|_step_floor|_mscale|_config)|id2label|label2id|auto_map|architectures|rope_\w*"
    r"|top_k|topk_group|n_group|num_expert_group|pretraining_tp|chunk_size\w*|num_logits_to_keep|bos|eos|pad"
    r"|max_position_embeddings|(original_)?max_\w*|seq_length|model_max_length|num_nextn_predict_layers|mtp_\w*"
    r"|vocab_size|(text|vision|audio|quantization|compression|llm|generation)_\w*|image_\w*|video_\w*|audio_\w*|vision_\w*"
    r"|rotary_\w*|partial_rotary_factor|torch_dtype|initializer\w*|transformers\w*|attention_value_scale|query_pre_attn_scalar|task_\w*"
)
"""Names of fields that do not describe a layer's shape."""


def unread_fields(config: Config) -> list[str]:
    """Return the names of numbers, lists and objects that may describe layers, and that were not read."""
    return sorted(
        name
        for name, value in config.fields.items()
        if isinstance(value, int | list | dict) and not isinstance(value, bool) and value and value != 1
        if name not in config.asked and not _HARMLESS.fullmatch(name)
    )


def quote(value: object) -> str:
    """Quote a value of a file or a command, short, without terminal escapes and without secrets."""
    text = hidden(repr(value))
    return text if len(text) <= 80 else f"{text[:76]} ..."


_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules", "exclude_modules", "exclude")
MOST_PATTERNS = 256
_SPECIAL = frozenset("\\[](){}+?|^$")
_RENAMED: Mapping[str, str] = {
    "language_model": "",
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "shared_expert": "shared_experts",
    "backbone": "model",
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
}
"""Parts of a module's name that some architectures name otherwise."""
FUSED: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


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
            self.known[module] = self._lists(module)
        return self.known[module]

    def _lists(self, module: str) -> bool:
        before, _, last = module.rpartition(".")
        for name in {module, f"{before}.{FUSED.get(last, last)}"}:
            words = name.split(".")
            runs = (".".join(words[start:end]) for start, end in combinations(range(len(words) + 1), 2))
            if any(run in self.names for run in runs):
                return True
            if any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in self.patterns):
                return True
        return False


def unquantized(settings: Mapping[str, Any]) -> Modules:
    """Read the unquantized modules of a quantization_config."""
    lists = [names for field in _LISTS if isinstance(names := settings.get(field), list)]
    texts = [text for names in lists for text in names if isinstance(text, str)]
    dynamic, extra = settings.get("dynamic"), settings.get("extra_config")
    if isinstance(dynamic, dict):  # GPTQModel: a name that begins with - is left out
        texts += [f"re:{name[2:]}" for name in dynamic if isinstance(name, str) and name.startswith("-:")]
    if isinstance(extra, dict):  # AutoRound
        texts += [str(name) for name, own in extra.items() if isinstance(own, dict) and own.get("bits", 0) >= _UNPACKED]
    return modules(texts)


_UNPACKED = 16
_CHOICE = re.compile(r"\(([\w.|]+)\)(?![?+*{])")


def modules(texts: Iterable[str]) -> Modules:
    """Read names of modules as quantization_config writes them."""
    names, patterns, unread = set[str](), dict[str, None](), dict[str, None]()
    for text in (choice for given in texts for choice in _choices(given)):
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


def _choices(text: str) -> list[str]:
    """Return the expressions that a regular expression with one choice, (gate|up), stands for."""
    found = _CHOICE.search(text) if text.startswith("re:") else None
    if not found:
        return [text]
    return [text[: found.start()] + choice + text[found.end() :] for choice in found[1].split("|")]


def _canonical(name: str) -> str:
    words = name.split(".")
    if "mixer" in words:  # Nemotron-H: the last word tells attention and feed-forward parts
        words = [_MIXERS.get(words[-1].strip("*"), "mixer") if word == "mixer" else word for word in words]
    if "experts" in words:
        words = words[: words.index("experts") + 1]
    return ".".join(filter(None, (_RENAMED.get(word, word) for word in words)))


_MIXERS: Mapping[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("up_proj", "down_proj", "gate_proj"), "mlp"),
}
