"""Secrets, credentials in addresses and the names of home folders taken out of commands and sentences."""

import re
import shlex
from functools import lru_cache

from diag.core.lazy_regex import lazy
from diag.vllm.command.shell import HIDDEN
from diag.vllm.flags.registry import known, understood

_SECRET = lazy(
    r"(?i)(?:.*(?:keys?|keyfile|token|secrets?|passwords?|passwd|passphrase|pwd|credentials?|authorization)"
    r"|(?:.*[-_.])?(?:pass|pat|o?auth))\d*(?:[-_.].*)?"
)
_HARMLESS = ("_threshold", "_token_id", "_token_ids", "_token_index", "_adapter_token")
_NAME = lazy(r"[\w.-]+")
_PARENTHESES = r"\((?:[^()\n]|\((?:[^()\n]|\([^()\n]*\))*\))*\)"
_FILLED_IN = rf"\${_PARENTHESES}|\$\{{[^{{}}\n]*\}}|`[^`\n]*`"
_DOUBLE = rf'"((?:\\.|{_FILLED_IN}|[^"\\])*+)"'
_QUOTED = lazy(rf"'([^']*)'|{_DOUBLE}|({_FILLED_IN})|\\(.)", re.DOTALL)
_SUBSTITUTED = lazy(rf"\$({_PARENTHESES})|`([^`\n]*)`")
_WORD = lazy(
    rf"(?<![^\s;&|()])#[^\n]*|(?:[^\s'\"\\`$;&|<>()]|\\[^\r\n]|'[^']*'|{_DOUBLE}|{_FILLED_IN}|['\"`$]|\\(?!\r?\n))+",
    re.DOTALL,
)
"""A comment, or a word of a shell: what stands between white space and operators outside quotation marks."""
_OPERATOR = lazy(r"[;&|<>()]")
_PASSWORDS = {"sshpass": "-p", "curl": "-u", "login": "-p"}
"""Programs beside vLLM, and their option for a secret that does not say so."""
_HEADER = lazy(r"([\w.-]+)(:\s+(?:(?i:bearer|basic|digest|token)\s+)?)\S.*", re.DOTALL)
_ASSIGNED = lazy(rf"(?<![\w.-])([\w.-]+)=(?:{_FILLED_IN}|[^\s'\"&])+")
_FIELD = lazy(
    r"""(?<!\\)(?P<mark>\\*["'])(?P<name>[\w.-]+)(?P=mark)(?P<colon>\s*:\s*)(?P<value>"""
    r"""(?P<quote>\\*["'])(?:\\.|[^\\])*?(?:(?P=quote)|$)|\[[^\]]*\]|\{[^{}]*\}|-?\d[\w.+-]*)""",
    re.DOTALL,
)
"""A field of an object as JSON or Python writes it, perhaps in a string of another one."""
_INSIDE = (
    (lazy(r"(://)[^/\s'\"]+@"), rf"\1{HIDDEN}@"),
    (lazy(r"(?<![\w./:@-])[\w.-]+:[^\s/'\"@]{1,200}@(?!sha256:)"), f"{HIDDEN}@"),
    (lazy(r"(?<![A-Za-z0-9])(?:sk-|gh[oprsu]_|github_pat_|glpat-|nvapi-|xox[abpr]-)[A-Za-z0-9_-]{8,}"), HIDDEN),
    (lazy(r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9]))"), HIDDEN),
    (lazy(r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_.-]*"), HIDDEN),
    (lazy(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {HIDDEN}"),
    (lazy(r"(?:/home|/Users)/[^/\s'\"]+"), "~"),
)


def redact(command: str) -> str:
    """Take the secrets out of a command: as many words as before, each as a shell reads it."""
    done, end, due, before, asks = "", 0, 0, "", ""
    for found in _WORD.finditer(command):
        gap, word, plain = command[end : found.start()], found[0], _plain(found[0])
        glued = bool(re.fullmatch(r"[&|<>()]", gap)) and done.endswith(HIDDEN)  # a|b: who wrote it meant one value
        due = due if due and _is_value(plain, before, gap) else 0
        asks = _PASSWORDS.get(plain, "" if _OPERATOR.search(gap) else asks)
        given = bool(asks) and plain.startswith(asks)
        shown = f"{asks}{HIDDEN}" if given and plain != asks else _word(word, plain, before)
        instead = "#" if word.startswith("#") else HIDDEN
        done += gap + (instead if due or glued else shown)
        due = (
            due - 1
            if due
            else 0
            if glued
            else int((given and plain == asks) or (plain == "=" and is_secret(before))) or _values(plain)
        )
        before, end, asks = plain, found.end(), "" if given else asks
    return done + command[end:]


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


def _values(word: str) -> int:
    """How many words after this one may be secrets: up to the next option, where vLLM does not take just one."""
    if not word.startswith("-") or not _NAME.fullmatch(word) or not is_secret(word):
        return 0
    option = understood(word)
    return 1 if option and option.flag.takes in ("one", "optional") else 2**20


def _is_value(plain: str, before: str, gap: str) -> bool:
    """Whether a word still belongs to an option; the first one after it does even where it begins with a dash."""
    first, ended = before.startswith("-"), re.search(r"(?<![\\\r])\n", gap)
    if _OPERATOR.search(gap) or (ended and not (first and understood(before))):
        return False
    return not plain.startswith("-") or (first and not understood(plain.partition("=")[0]))


def _plain(word: str) -> str:
    """The word as a shell hands it on."""
    return _QUOTED.sub(
        lambda found: found[1] or re.sub(r'\\(["\\$`])', r"\1", found[2] or "") or found[3] or found[4] or "", word
    )


def _word(word: str, plain: str, before: str) -> str:
    if word.startswith("#"):
        return "#" if hidden(word) != word or any(map(is_secret, _NAME.findall(word))) else word
    is_script = plain != word and re.fullmatch(r"-[a-z]*c", before)
    shown = redact(plain) if is_script else _shown(plain, is_quoted=plain != word)
    return word if shown == plain else shown if plain == word else _quoted(shown, word)


def _shown(text: str, is_quoted: bool) -> str:
    """A word without its secrets."""
    if is_quoted and re.search(r"\s", text) and not text.startswith(("{", "[")):
        text = redact(text)  # ssh host '...'
    parts = text.split("=")
    named = (i for i, part in enumerate(parts[:-1], 1) if _NAME.fullmatch(part) and is_secret(part))
    if secret := next(named, 0):
        return f"{'='.join(parts[:secret])}={HIDDEN}"
    header = _HEADER.fullmatch(text)
    if header and is_secret(header[1]):
        return f"{header[1]}{header[2]}{HIDDEN}"
    text = _SUBSTITUTED.sub(lambda found: f"$({redact(found[1][1:-1])})" if found[1] else f"`{redact(found[2])}`", text)
    return hidden(text)


def _quoted(text: str, word: str) -> str:
    """With the kind of quotation mark that the word had; ~/ is a folder only outside of them."""
    name = re.match(r"(?:-{0,2}[\w.-]+=)?(?:~/)?", text)
    start = name[0] if name else ""
    value = text[len(start) :]
    mark = re.search(rf"'[^']*'|{_DOUBLE}", word)
    if not value or shlex.quote(value) == value:
        return start + value
    if mark is None:
        return start + re.sub(r"([^\w@%+=:,./-])", r"\\\1", value)
    return start + (shlex.quote(value) if mark[0][0] == "'" else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"')


def _field(found: re.Match[str]) -> str:
    mark, value = found["mark"], found["value"]
    if is_secret(found["name"]):
        value = f"{found['quote'] or mark}{HIDDEN}{found['quote'] or mark}"
    else:
        value = _FIELD.sub(_field, value)
    return f"{mark}{found['name']}{mark}{found['colon']}{value}"
