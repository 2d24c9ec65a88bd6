"""Which matrices of a quantised model are left at 16 bits, by the names in its quantization_config."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

_LISTS = ("modules_to_not_convert", "ignore", "ignored_layers", "llm_int8_skip_modules", "exclude_modules")
MOST_PATTERNS = 256
_SPECIAL = frozenset("\\[](){}+?|^$")
_OTHERWISE: Mapping[str, str] = {
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
    """Names with all of their parts, patterns with a *, and regular expressions that diag does not read."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    def has(self, module: str) -> bool:
        """Whether a matrix, model.layers.0.mlp.up_proj, is left: named whole or in part, but not in part of a word."""
        if not self.names and not self.patterns:
            return False
        before, _, last = module.rpartition(".")
        return any(map(self._names, {module, f"{before}.{_FUSED.get(last, last)}"}))

    def _names(self, module: str) -> bool:
        words = module.split(".")
        runs = (".".join(words[start:end]) for start, end in combinations(range(len(words) + 1), 2))
        return any(each in self.names for each in runs) or any(
            fnmatchcase(module, each) or fnmatchcase(module, f"{each}.*") for each in self.patterns
        )


def unquantized(settings: Mapping[str, Any]) -> Unquantized:
    """What a quantization_config lists."""
    listed = [each for field in _LISTS if isinstance(each := settings.get(field), list)]
    texts = [text for each in listed for text in each if isinstance(text, str)]
    plain = {_ours(each) for each in texts if not each.startswith("re:") and "*" not in each}
    globs = dict.fromkeys(_glob(each) or each for each in texts if each.startswith("re:") or "*" in each)
    known = [each for each in globs if not each.startswith("re:")]
    unread = [each for each in globs if each.startswith("re:")] + known[MOST_PATTERNS:]
    return Unquantized(frozenset(plain), tuple(known[:MOST_PATTERNS]), tuple(unread))


def _ours(name: str) -> str:
    words = (_OTHERWISE.get(each, each) for each in name.split("."))
    return ".".join(filter(None, words))


def _glob(pattern: str) -> str:
    r"""A regular expression with only .* and \. in it, which vLLM matches from the start; "" for any other one."""
    if not pattern.startswith("re:"):
        return _ours(pattern)
    ends = "" if pattern.endswith("$") else "*"
    text = pattern[3:].removeprefix("^").removesuffix("$").replace("\\.", ".").replace(".*", "*")
    return "" if _SPECIAL & set(text) else _ours(text) + ends
