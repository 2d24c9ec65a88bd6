"""Which matrices of a quantized model are left at 16 bits, by the names in its quantization_config."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

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
        """Whether a matrix, model.layers.0.mlp.up_proj, is left: named whole or in part, but not in part of a word."""
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
    """What a quantization_config lists."""
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
