"""Secrets, credentials in addresses and the names of home folders taken out of free text, such as a line of a log.

Of a command this is only the second barrier: what is shown of it is an allow-list (`shown`).
"""

import re
from functools import lru_cache

from diag.core.lazy_regex import lazy
from diag.vllm.command.shell import HIDDEN
from diag.vllm.flags.registry import known, understood

_SECRET = lazy(
    r"(?i)(?:.*(?:keys?|keyfile|token|secrets?|passwords?|passwd|passphrase|pwd|credentials?|authorization)"
    r"|(?:.*[-_.])?(?:pass|pat|o?auth))\d*(?:[-_.].*)?"
)
_HARMLESS = ("_threshold", "_token_id", "_token_ids", "_token_index", "_adapter_token")
_PARENTHESES = r"\((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*\)"
_FILLED_IN = rf"\${_PARENTHESES}|\$\{{[^{{}}\n]*\}}|`[^`\n]*`"
_ASSIGNED = lazy(rf"(?<![\w.-])([\w.-]+)=(?:{_FILLED_IN}|[^\s'\"&])+")
_FIELD = lazy(
    r"""(?<!\\)(?P<mark>\\*["'])(?P<name>[\w.-]+)(?P=mark)(?P<colon>\s*:\s*)(?P<value>"""
    r"""(?P<quote>\\*["'])(?:\\.|[^\\])*?(?:(?P=quote)|$)|\[[^\]]*\]|\{[^{}]*\}|-?\d[\w.+-]*)""",
    re.DOTALL,
)
"""A field of an object as JSON or Python writes it, perhaps in a string of another one."""
_INSIDE = (
    (lazy(r"(://)[^\s'\"@]{1,400}@"), rf"\1{HIDDEN}@"),
    (lazy(r"(://[^\s?#'\"]{1,400})[?#][^\s'\"]*"), r"\1"),
    (lazy(r"(?<![\w./:@-])[\w.-]+:[^\s/'\"@]{1,200}@(?!sha256:)"), f"{HIDDEN}@"),
    (lazy(r"(?<![A-Za-z0-9])(?:sk-|gh[oprsu]_|github_pat_|glpat-|nvapi-|xox[abpr]-)[A-Za-z0-9_-]{8,}"), HIDDEN),
    (lazy(r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9]))"), HIDDEN),
    (lazy(r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_.-]*"), HIDDEN),
    (lazy(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {HIDDEN}"),
    (lazy(r"(?:/home|/Users)/[^/\s'\"]+"), "~"),
)


def hidden(text: str) -> str:
    """Replace what looks like a secret by its shape, wherever it stands."""
    text = _ASSIGNED.sub(lambda found: f"{found[1]}={HIDDEN}" if is_secret(found[1]) else found[0], text)
    text = _FIELD.sub(_field, text)
    for pattern, instead in _INSIDE:
        text = pattern.sub(instead, text)
    return text


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether what an option, a variable or a field of that name holds is to be hidden."""
    option = understood(name) if name.startswith("-") else None
    if option and not option.key:
        return option.flag.takes != "none" and _is_secret(option.flag.name)
    return _is_secret(name) or (option is None and _may_abbreviate(name))


def _is_secret(name: str) -> bool:
    return bool(_SECRET.fullmatch(name)) and not name.replace("-", "_").lower().endswith(_HARMLESS)


def _may_abbreviate(name: str) -> bool:
    """Whether a release may take it for the beginning of an option that holds a secret."""
    begun = name.replace("_", "-")
    beginning = begun.startswith("--") and len(begun) > 2
    return beginning and any(name.startswith(begun) and is_secret(name) for name in known())


def _field(found: re.Match[str]) -> str:
    mark, value = found["mark"], found["value"]
    if is_secret(found["name"]):
        value = f"{found['quote'] or mark}{HIDDEN}{found['quote'] or mark}"
    else:
        value = _FIELD.sub(_field, value)
    return f"{mark}{found['name']}{mark}{found['colon']}{value}"
