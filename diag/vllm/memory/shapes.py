"""Models by name: the config facts of models that people serve (models.json), for a name without a config.json here.

A row has the repository as its key, its `source`, and the `config` fields that describe its shape, or `like` and the
repository whose shape it has; `flags` are those that its launch needs. `partial` are rows with sizes alone:
the context and the quantization are not the checkpoint's own. `bench/models.py` refreshes rows.
"""

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache, lru_cache
from itertools import combinations
from typing import Any, NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.vllm.memory.quantization import Format, tables


class NamedShape(NamedTuple):
    """Config facts found by a name: the row's repository, its source, the fields, and what the name adds to them.

    `format` is the quantization that only the name states; `loose` are the modules that some such checkpoints
    leave in 16 bits. `tune` is the source that a fine-tune has this shape, or the words that say so.
    `partial` is True if context and quantization are not the checkpoint's own.
    """

    repository: str
    source: str
    config: Mapping[str, Any]
    format: str = ""
    loose: tuple[str, ...] = ()
    tune: str = ""
    partial: bool = True

    @property
    def note(self) -> str:
        """Return the sentence about the origin of the facts."""
        added = f"; its weights are taken for {self.format}, as the name says" if self.format else ""
        added += "; attention and shared experts may be in 16 bits, as in some checkpoints" if self.loose else ""
        taken = f"; the name is taken for it ({self.tune}): give --config to be sure" if self.tune else ""
        return f"no config.json is here: the shape is that of {self.repository} (source: {self.source}){taken}{added}"


class Tune(NamedTuple):
    """Names with these words have the shape of `like`, a repository with the groups of the words in it."""

    words: str
    like: str
    source: str


class _NameTables(NamedTuple):
    """The tables of names.toml: `adapted` has bases by the lists that name them, `unsized` words by the reasons."""

    same_shape: tuple[str, ...]
    other_shape: tuple[str, ...]
    other_size: tuple[str, ...]
    format: re.Pattern[str]
    draft: re.Pattern[str]
    spelling: Mapping[str, str]
    latest: Mapping[str, str]
    tune: tuple[Tune, ...]
    adapted: Mapping[str, Mapping[str, str]]
    unsized: Mapping[str, tuple[str, ...]]


@cache
def _names() -> _NameTables:
    return read(PACKAGE / "vllm" / "memory" / "names.toml", _NameTables)


@cache
def _rows() -> Mapping[str, Mapping[str, Any]]:
    return dict(json.loads((PACKAGE / "vllm" / "memory" / "models.json").read_text(encoding="utf-8")))


def launch_flags(name: str) -> Mapping[str, str]:
    """Return the flags with their values without which a model by its name does not do what it is made for."""
    shape = find_shape(name)
    return dict(_rows()[shape.repository].get("flags", {})) if shape else {}


def served_name(name: str) -> str:
    """Return the repository of the very model that a name without an owner, or misspelt, stands for; or the name."""
    shape, plain = find_shape(name), _respelled(name)
    owners = {spelled.rpartition("/")[0] for spelled in (plain, name.lower())}
    is_same = shape and not shape.format and ":" not in plain and owners & {"", shape.repository.lower().split("/")[0]}
    members = [_member(spelled).removeprefix("meta") for spelled in (shape.repository if shape else "", plain, name)]
    is_very = shape and is_same and members[0] in members[1:]
    return shape.repository if shape and is_very else name


def unsized(name: str) -> str:
    """Return why no shape is looked for by a name, as the end of a sentence; "" for a name that may have one."""
    plain = re.sub(r"[_\s]", "-", name.lower()).removeprefix("~")
    reasons = _names().unsized.items()
    reason = next((reason for reason, words in reasons if re.search("|".join(words), plain)), "")
    last = plain.rpartition("/")[2]
    drafted = re.sub(_names().draft, "", last).strip("-.") if reason.startswith("is a draft") else last
    target = find_shape(drafted) if drafted != last else None
    return f"{reason}, by its name {target.repository}: both are sized together" if target else reason


def repositories() -> tuple[str, ...]:
    """Return the repositories whose shapes are known."""
    return tuple(_rows())


def _fields(repository: str) -> Mapping[str, Any]:
    row = _rows()[repository]
    inherited = _fields(row["like"]) if "like" in row else {}
    return {name: value for name, value in {**inherited, **row.get("config", {})}.items() if value is not None}


def _key(name: str) -> str:
    """Return what is left of a name without its owner, separators and the words that do not change the shape."""
    words = re.split(r"[-_:\s]+", name.rpartition("/")[2].lower())
    kept = (word for word in words if word not in _names().same_shape and not re.fullmatch(r"20\d{6}", word))
    return "".join(kept).replace(".", "")


def _member(name: str) -> str:
    """Return a name without its owner and separators, in which a base model and what was made of it differ."""
    plain = re.sub(r"(?<![a-z])(it|inst)(?![a-z])", "instruct", name.rpartition("/")[2].lower())
    return re.sub(r"[-_:\s.]+", "", plain)


def _respelled(name: str) -> str:
    """Return a name in small letters, as repositories have it: without what providers put around it."""
    respelled = name.lower()
    for words, instead in _names().spelling.items():
        respelled = re.sub(words, instead, respelled)
    return respelled


@cache
def _index() -> Mapping[str, str]:
    """Return the repositories by their whole names, their last parts, and their keys; the first of a kind counts."""
    spellings = (str.lower, lambda name: name.rpartition("/")[2].lower(), _member, _key)
    return dict(reversed([(spelled(name), name) for spelled in spellings for name in _rows()]))


_IN_16_BITS = re.compile(r"[-_](?:bf16|fp16|bfloat16|float16)$", re.IGNORECASE)


def find_shape(name: str) -> NamedShape | None:
    """Find a model by its repository, its name under another owner, or a near spelling; None if it is unknown."""
    respelled, known_size = _respelled(name), _names().latest.get(name.lower().removesuffix(":latest"))
    shape = _find(respelled if "+" in name else name)  # Command R+ is no Command R
    if respelled != name.lower() and (shape is None or shape.tune):
        instead = _find(respelled)
        shape = instead if instead and not (shape and instead.tune) else shape
    elif known_size and shape is None:
        shape = find_shape(f"{name.lower().removesuffix(':latest')}:{known_size}")
    if not (shape and "quantization_config" in shape.config and _IN_16_BITS.search(name)):
        return shape
    config = {key: value for key, value in shape.config.items() if key != "quantization_config"}
    return shape._replace(config=config, format="16 bits")  # a copy of a model that is published quantized


def _find(name: str) -> NamedShape | None:
    if re.match(r"[./~]|\w+://", name) or name.count("/") > 1:
        return None
    is_unsized = bool(unsized(name))
    for spelling in (name.lower(), name.rpartition("/")[2].lower(), _member(name), _key(name)):
        if (repository := _index().get(spelling)) and not (is_unsized and spelling != name.lower()):
            row = _rows()[repository]
            return NamedShape(repository, row["source"], _fields(repository), partial="like" in row or "partial" in row)
    if is_unsized:
        return None
    plain = _without_format(name)
    if plain == name or not (shape := _find(plain)):
        return _tuned(name) if plain == name else None
    words, method = name.rpartition("/")[2], str(shape.config.get("quantization_config", {}).get("quant_method"))
    format = next(filter(None, (_format(words),)))
    if (format.label == "FP8" and "fp8" in method) or (format.label == "MXFP4" and method == "mxfp4"):
        return shape
    groups = {"group_0": {"targets": ["Linear"], "weights": format.weights}}
    compressed = {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": groups}
    config = {**shape.config, "quantization_config": format.config or compressed}
    return shape._replace(config=config, format=format.label, loose=format.loose)


def _format(words: str) -> Format | None:
    return next((format for format in tables().format if format.words.search(words.lower().replace("_", "-"))), None)


def _without_format(name: str) -> str:
    """Return a name without the words of its quantization; the name itself if it has none."""
    owner, slash, last = name.rpartition("/")
    words = re.split(r"[-_]", last)
    kept = [word for word in words if not re.fullmatch(_names().format.pattern, word.lower())]
    return f"{owner}{slash}{'-'.join(kept)}" if _format(last) and len(kept) < len(words) and kept else name


_MOST_WORDS = 32
_SIZE = re.compile(r"\d+(?:\.\d+)?[bm]")


@lru_cache(maxsize=8192)  # the closest name is looked for among all repositories
def _words(name: str) -> list[str]:
    """Return the words of a name in which family, generation and size are apart: qwen, 2.5, 7b."""
    words = re.findall(r"\d+(?:\.\d+)*[a-z]*|[a-z]+", name.rpartition("/")[2].lower())
    return [word for word in words if word not in _names().same_shape]


def _sizes(words: Iterable[str]) -> set[str]:
    return {word for word in words if _SIZE.fullmatch(word)}


@cache
def _families() -> Mapping[tuple[str, ...], str]:
    """Return the rows whose words name a family and a size, by these words."""
    rows = {tuple(_words(name)): name for name in reversed(repositories())}
    whole = {words: name for words, name in rows.items() if words and words[0].isalpha() and _sizes(words)}
    brief = {words[:-2]: name for words, name in whole.items() if words[-2:-1] == ("a",)}  # providers leave out A3B
    return {**brief, **whole}


@cache
def _generations() -> Mapping[tuple[str, ...], str]:
    """Return the rows whose words are a family and its generation without a size (GLM 4.6, Kimi K2), by these words."""
    rows = {tuple(_words(name)): name for name in reversed(repositories())}
    return {words: name for words, name in rows.items() if words[1:] and words[0].isalpha() and not _sizes(words)}


def _tuned(name: str) -> NamedShape | None:
    """Find the shape of a fine-tune: by names.toml, or by a family, a generation and its size, if any, in its words."""
    last = re.sub(r"[_:\s]", "-", name.rpartition("/")[2].lower())
    words, other = _words(name), _names().other_shape
    if len(words) > _MOST_WORDS:
        return None
    for source, bases in _names().adapted.items():
        if base := bases.get(name.lower()):
            return NamedShape(base, _rows()[base]["source"], _fields(base), tune=source)
    spans = {tuple(words[start:end]) for start, end in combinations(range(len(words) + 1), 2)}
    for span in sorted(spans & _families().keys(), key=lambda span: -len(span)):
        if _sizes(words) == _sizes(span) and not (set(words) - set(span)) & set(other):
            row = _families()[span]
            return NamedShape(row, _rows()[row]["source"], _fields(row), tune="by the family and the size in it")
    for tune in _names().tune:
        match = re.search(rf"(?<![a-z0-9.])(?:{tune.words})(?![a-z0-9])", last)
        unnamed = set(other) - set(_words(tune.words))
        if match and not set(words) & unnamed and (shape := _find(match.expand(tune.like))):
            return shape._replace(tune=tune.source, partial=True)
    begins = [span for span in _generations() if tuple(words[: len(span)]) == span]
    if span := max(begins, key=len, default=()):
        added = words[len(span) :]
        if "".join(added[:1] or "a").isalpha() and not (_sizes(added) or set(added) & {*other, *_names().other_size}):
            row = _generations()[span]
            return NamedShape(row, _rows()[row]["source"], _fields(row), tune="by the family and generation in it")
    return None


def members(name: str) -> tuple[str, ...]:
    """Return a model of each size of a family by its name without a size (Qwen/Qwen3)."""
    words = tuple(_words(name))
    sized: dict[str, str] = {}
    for spelled, row in sorted(_families().items(), key=lambda family: len(family[1])):
        if words and not _sizes(words) and spelled[: len(words)] == words and _SIZE.fullmatch(spelled[len(words)]):
            sized.setdefault(spelled[len(words)], row)
    return tuple(sized[size] for size in sorted(sized, key=_number))


def closest(name: str) -> str:
    """Return the repository with the closest name of the same family and about the same size, "" without one."""
    wanted, words = _key(_without_format(name)), _words(_without_format(name))
    size = _largest(_without_format(name))
    ratio = 1.3  # of sizes that are about the same

    def is_near(repository: str) -> bool:
        same_family = bool(words) and _words(repository)[:1] == words[:1]
        return same_family and size / ratio <= _largest(repository) <= size * ratio

    keys = {_key(repository): repository for repository in reversed(repositories()) if is_near(repository)}
    near = [key for key in sorted(keys) if wanted and key.startswith(wanted)] or get_close_matches(wanted, keys, n=1)
    return keys[near[0]] if near else ""


def _largest(name: str) -> float:
    """Return the largest size in a name, 0 without one."""
    return max(map(_number, _sizes(_words(name))), default=0.0)


def _number(size: str) -> float:
    return float(size[:-1]) / (1000 if size.endswith("m") else 1)
