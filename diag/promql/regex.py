"""RE2 patterns by Python's `re`, and a refusal of those that the two read differently."""

import re
from functools import lru_cache

from diag.core.lazy_regex import lazy

_WORDS = re.compile(r"[\w|]*", re.ASCII)
"""Alternatives without any metacharacter, as most patterns are: they need not be compiled."""
_READ_DIFFERENTLY = (
    (lazy(r"\[[\[:]"), "a bracket or a named class inside a character class"),
    (lazy(r"\{,"), "a repetition without a lower bound"),
    (lazy(r"[*+?}]\+"), "a doubled repetition"),
    (lazy(r"\(\?[a-z]*i(?=.*[^\x00-\x7f])", re.DOTALL), "case folding outside of ASCII"),
)


def fully_matches(pattern: str, text: str) -> bool:
    """Match as Prometheus does: anchored at both ends, the dot matching a newline too."""
    words = _words(pattern)
    return text in words if words is not None else compiled(pattern).fullmatch(text) is not None


@lru_cache(maxsize=1024)
def _words(pattern: str) -> frozenset[str] | None:
    return frozenset(pattern.split("|")) if _WORDS.fullmatch(pattern) else None


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern that `refusal` has let through."""
    return re.compile(pattern, re.DOTALL | re.ASCII)


@lru_cache(maxsize=1024)
def refusal(pattern: str) -> str | None:
    """Say which part of a valid RE2 pattern is not supported; None when all of it is."""
    if _words(pattern) is not None:
        return None
    for unlike, what in _READ_DIFFERENTLY:
        if unlike.search(pattern):
            return f"{what} in the pattern {pattern!r}"
    try:
        compiled(pattern)
    except re.error as error:
        return f"the pattern {pattern!r} ({error})"
    return None


def expand(template: str, match: re.Match[str]) -> str:
    """Replace $1, ${1}, $name and ${name} as Go's Regexp.Expand does; an unknown group is empty."""

    def value(reference: re.Match[str]) -> str:
        if reference.group() == "$$":
            return "$"
        name = reference.group(1) or reference.group(2)
        groups: dict[str, str | None] = {str(i): group for i, group in enumerate((match.group(), *match.groups()))}
        return (groups | match.groupdict()).get(name) or ""

    return re.sub(r"\$\$|\$\{(\w+)\}|\$(\w+)", value, template, flags=re.ASCII)
