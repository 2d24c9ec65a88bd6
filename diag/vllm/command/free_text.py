"""Hide secrets in free text, such as a line of a log: by the name before a value, by their form, and by randomness.

Each step takes time in proportion to the length of the text.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from string import ascii_lowercase, digits

from diag.core.formatting import addresses_without_secrets
from diag.vllm.command.shell import HIDDEN, PLACEHOLDER
from diag.vllm.flags.registry import known, understood

_SECRET = re.compile(
    r"(?i)(?:.*(?:keys?|keyfile|token|secrets?|passwords?|passwd|passphrase|passcode|pwd|credentials?|creds|jwt"
    r"|authorization|signature|session_?id|cookies?|webhook|connection_?string)"
    r"|(?:.*[-_.])?(?:pass|pat|o?auth|sig|session|sid|bearer|otp|dsn|pw))\d*(?:[-_.].*)?"
)
_HARMLESS = (
    *("_threshold", "_token_id", "_token_ids", "_token_index", "_adapter_token", "_per_token", "_output_token"),
    *("eos_token", "bos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token", "special_token"),
    *("token_type_ids", "pass_config", "key_value_heads"),
)
"""Ends of names that are no secret's: the token is a piece of text, the pass one of the compiler."""
_MOST_NAME = 100
_PHRASES = re.compile(r"(?i).*(?:authorization|cookie|passw|passphrase|passcode|pwd)")
"""Names of values that may have spaces in them."""
_NAME = re.compile(r"(?P<mark>(?<!\\)\\*[\"'`])?(?<![\w.\u2013\u2014-])(?P<name>[\u2013\u2014-]{0,2}[A-Za-z_][\w.-]*)")
_BEHIND = re.compile(
    r"(?P<closed>\\*[\"'`]\]?)?(?:\s*(?P<sign>=>|->|:=|[=:>])[ \t]*|\s*(?P<comma>,)\s*|(?P<space>[ \t]+))"
)
"""What separates a name from its value."""
_PAIR = re.compile(r"[\[(]\s{0,3}[bru]{0,2}\Z")
"""What stands before the name in a pair, ("token", "x")."""
_QUOTED = re.compile(
    r"[bruf]{0,2}(?P<quote>(?P<escaped>\\+)?[\"'`])(?:\\.|[^\\])*?(?:(?(escaped)(?<!\\))(?P=quote)|\\?\Z)", re.DOTALL
)
_IN_GROUP = re.compile(r"(?P<open>[\[({])|(?P<close>[\])}])|[^\[\](){}\"'`\\]+|.", re.DOTALL)
_BARE = re.compile(r"(?:[^\s\"'`,;)\]}\\(\[{]|\\.|[\"'`,;)\]}](?![\s\"'`,;:.)\]}>\\]|\Z))+\\?", re.DOTALL)
"""A word without quotation marks; one of them, or a bracket, ends it if nothing of the word follows."""
_WORD = re.compile(r"[^\s\"'`,;]+")
_FLAG = re.compile(r"(?:\\*[\"'`])?(?P<name>--?[A-Za-z][\w.-]*)")
_BETWEEN = re.compile(r"(?:\s*,\s*|[ \t]+)(?![\"'`\\]{0,3}-|[\s&|;<>]|\Z)")
"""What separates two values of a flag; the next word is no flag, and no operator of a shell."""
_LINE = re.compile(r"(?:(?!\\[rn])[^\r\n])*")
_SCHEME = re.compile(r"(?i)(?:bearer|basic|digest|token|apikey|negotiate|ntlm)\Z")
_NO_VALUE = re.compile(
    rf"(?i)[\"'\s]*+(?:none|null|true|false|\*+|\[\s*\]|\(\s*\)|\{{\s*\}}|{HIDDEN})?[\"'\s,;.)\]}}]*+"
)
_PROSE = re.compile(
    r"(?i)and|are|as|at|be|because|but|by|can|cannot|do|does|down|expects?|for|from|given|had|has|have|if|in|instead"
    r"|is|its?|may|missing|must|needs?|no|nor|not|of|on|only|or|requires?|set|should|takes?|than|that|the|then|this|to"
    r"|twice|unless|until|was|were|when|which|will|with|without"
)
"""Words that follow a flag in a sentence, and are no value."""
_BY_FORM = [
    re.compile(pattern, re.DOTALL | re.IGNORECASE if pattern.startswith("(?i)") else re.DOTALL)
    for pattern in (
        r"(?P<value>-----BEGIN [A-Z ]{1,40}-----(?:(?!-----END).)*+(?:-----END [A-Z ]{1,40}-----)?)",
        r"(?<![A-Za-z0-9])(?P<value>(?:(?:sk|glpat|nvapi|pypi|xox[abeprs])-|(?:gh[oprsu]|github_pat|npm|sk_live)_"
        r"|AIza|ya29\.|SG\.)[A-Za-z0-9_.-]{8,})",
        r"(?<![A-Za-z0-9])(?P<value>hf_[A-Za-z0-9]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9]))",
        r"(?<![A-Za-z0-9])(?P<value>eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_.-]*)",
        r"(?i)\bbearer\s+(?P<value>(?!tokens?\b|auth|scheme\b)[^\s\"',;)\]}]+)",
        r"(?i)\bbasic\s+(?P<value>(?-i:(?![a-z]+\b))[^\s\"',;)\]}]{6,})",
        r"(?i)\b(?:login|account)\s+\S+\s+password\s+(?P<value>\S+)",  # .netrc
        r"(?<![\w.-])(?:-u|--user|--proxy-user)[\"'=,\s]{1,5}(?P<value>(?!\d+:\d+\b)[^\s\"':]+:[^\s\"']+)",
    )
]
_HOME = re.compile(r"(?:/home|/Users)/[^/\s'\"]+")


def hidden(text: str) -> str:
    """Replace every text that is a secret by its place, its form or its randomness, anywhere in a free text.

    In addresses, user, password, query and fragment are dropped; a home folder becomes ~.
    """
    text = addresses_without_secrets(text)
    text = _without_values(text)
    for pattern in _BY_FORM:
        text = pattern.sub(_hide_value, text)
    parts = _MANGLED.split(text)
    parts[::2] = map(_without_random, parts[::2])
    return _HOME.sub("~", "".join(parts))


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return True if the value of an option, a variable or a field of that name is hidden."""
    option = understood(name) if name.startswith("-") else None
    if option and not option.key:
        return option.flag.takes != "none" and _is_secret(option.flag.name)
    if _is_secret(name):
        return True
    begun = name.replace("_", "-")  # a release may read it as an abbreviation of an option with a secret
    may_abbreviate = option is None and begun.startswith("--") and len(begun) > 2
    return may_abbreviate and any(whole.startswith(begun) and is_secret(whole) for whole in known())


def _is_secret(name: str) -> bool:
    return bool(_SECRET.fullmatch(name)) and not name.replace("-", "_").lower().endswith(_HARMLESS)


# -- place -------------------------------------------------------------------------------------------------------------


def _without_values(text: str) -> str:
    """Hide each value that stands behind the name of a secret."""
    done, past, parts = 0, 0, list[str]()
    for found in _NAME.finditer(text):
        if found.start("name") < past or not is_secret(found["name"][-_MOST_NAME:]):
            continue
        for start, end in _values(text, found):
            value = text[start:end]
            last_line = value.rfind("\n")  # what closes the value may belong to something else there
            past = end if last_line < 0 else start + last_line
            if end > done and not _NO_VALUE.fullmatch(PLACEHOLDER.sub("", value)):
                mark = _mark(value)
                parts += [text[done:start], mark, HIDDEN, mark] if start >= done else []
                done = end
    return "".join((*parts, text[done:]))


def _values(text: str, name: re.Match[str]) -> Iterator[tuple[int, int]]:
    """Yield where the values of a secret's name begin and end."""
    behind = _BEHIND.match(text, name.end())
    if not behind:
        return
    closed, start, is_flag = behind["closed"], behind.end(), name["name"][0] in "-\u2013\u2014"
    if behind["sign"]:
        if name["mark"] and not closed:  # the quotation began before the name
            end, mark = _end(text, name.start()), name["mark"]
            yield start, max(start, end - len(mark) * text.startswith(mark, end - len(mark)))
        else:
            yield start, _phrase_end(text, start) if _PHRASES.match(name["name"]) else _end(text, start)
    elif behind["comma"] and closed and (is_flag or _PAIR.search(text, max(0, name.start() - 5), name.start())):
        yield from _words(text, start, name["name"] if is_flag else "")
    elif behind["space"] and not closed:
        if is_flag:
            yield from _words(text, start, name["name"])
        elif _PHRASES.match(name["name"]) and _QUOTED.match(text, start):
            yield start, _end(text, start)


def _words(text: str, start: int, flag: str) -> Iterator[tuple[int, int]]:
    """Yield the words of a flag, of a command in a line or in a list; one word if it takes no more."""
    option = understood(flag) if flag else None
    while start < len(text):
        word, other = _WORD.match(text, start), _FLAG.match(text, start)
        if (word and _PROSE.fullmatch(word[0])) or (other and understood(other["name"])):
            return
        end = _end(text, start)
        yield start, end
        between = _BETWEEN.match(text, end)
        if not option or option.flag.takes != "many" or not between:
            return
        start = between.end()


def _phrase_end(text: str, start: int) -> int:
    """Return the end of a value that may have spaces in it, as that of a header has."""
    line = _LINE.match(text, start)
    return _end(text, start) if _QUOTED.match(text, start) or not line else line.end()


def _end(text: str, start: int) -> int:
    """Return the end of a value: of one word, and behind the scheme of a header of one more."""
    at = _word_end(text, start)
    return _word_end(text, at + 1) if text[at : at + 1] == " " and _SCHEME.match(text, start, at) else at


def _word_end(text: str, start: int) -> int:
    """Return the end of quotations, groups in brackets and bare words without a space between them."""
    at, quoted = start, _QUOTED.match(text, start)
    while quoted:
        at = quoted.end()
        quoted = _QUOTED.match(text, at)
    while at < len(text):
        if text[at] in "[({":
            at = _group_end(text, at)
        elif bare := _BARE.match(text, at):
            at = bare.end()
        else:
            break
    return at


def _group_end(text: str, start: int) -> int:
    """Return the place behind the bracket that closes the one at `start`, or the end of the text."""
    at, depth = start, 0
    while at < len(text):
        part = _QUOTED.match(text, at) or _IN_GROUP.match(text, at)
        if part is None:
            break
        at = part.end()
        depth += part.re is _IN_GROUP and (part.lastgroup == "open") - (part.lastgroup == "close")
        if depth == 0:
            return at
    return len(text)


def _mark(value: str) -> str:
    """Return the quotation mark that a hidden value keeps."""
    quoted = _QUOTED.match(value)
    return quoted["quote"] if quoted and quoted.end() == len(value) else ""


def _hide_value(found: re.Match[str]) -> str:
    start, end = (at - found.start() for at in found.span("value"))
    return found[0][:start] + HIDDEN + found[0][end:]


# -- randomness --------------------------------------------------------------------------------------------------------

_RUNS = (
    re.compile(r"(?<![A-Za-z0-9+/_=-])(?:[A-Za-z0-9+]|/(?=[A-Za-z0-9/]*\+))[A-Za-z0-9+/_=-]{19,}"),
    re.compile(r"[A-Za-z0-9+_=-]{20,}"),
    re.compile(r"[A-Za-z0-9]{20,}"),
)
"""Base64, which is no path; a part of a path; a part of a name."""
_HEX = re.compile(
    r"(?<![A-Za-z0-9/_@-])(?<!sha1:)(?<!sha256:)(?<!sha512:)(?<!md5:)"
    r"(?:[0-9a-f]{24,39}|[0-9a-f]{41,}|[0-9A-F]{24,39}|[0-9A-F]{41,})(?![A-Za-z0-9])"
)
"""Long hexadecimal numbers by themselves; not a commit, nor one behind the name of what it identifies."""
_PARTS = re.compile(r"[A-Za-z0-9]{6,}")
_HASH = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_MANGLED = re.compile(r"((?<!\w)_Z\w+)")
"""Names of C++ functions as a linker has them."""
_RARE = (
    *("954497595963439593436777696", "365637884593773694463989585", "396738835944782794635899696"),
    *("476526683995774795465779794", "474355687984537562348675797", "486643892994773694554989695"),
    *("486728544995645693464789886", "277728983986673894645989697", "554556599984424595439596959"),
    *("396727974957883697482778796", "475615583994756686365659797", "387527883983673698555899498"),
    *("257628993985573398565999798", "484335384966764698436699897", "664486696964425493544657998"),
    *("386737864973883493545889596", "777789999995957866580969997", "385527693966563694446689598"),
    *("584727743976775487424879697", "385627943996674694455879597", "545646695994436493438999993"),
    *("276917793995585797789899996", "276637843996843794468878997", "564645874996586397638886592"),
    *("665645774995435295337768776", "487817983997674797778989676", "555455899998787899789893991"),
)
"""For each letter, and for any digit last, the bits of information in each of them as the next character.

Counted in the words of Python's standard library and of this repository, at most 9. An ordinary word has 3 bits per
character on average, a random one 6.3.
"""
_SYMBOLS = ascii_lowercase + "0"
_BITS = {a + b: int(row[at]) for a, row in zip(_SYMBOLS, _RARE, strict=True) for at, b in enumerate(_SYMBOLS)}
_ANY_DIGIT = str.maketrans(digits, "0" * 10)
_RANDOM_BITS, _FEWEST_PAIRS = 4.75, 12


def _without_random(text: str) -> str:
    for run in _RUNS:
        text = run.sub(lambda found: HIDDEN if _is_random(found[0]) else found[0], text)
    return _HEX.sub(lambda found: found[0] if found[0].isdecimal() else HIDDEN, text)


def _is_random(run: str) -> bool:
    """Return True for a word that nobody has chosen. Hexadecimal parts do not count: most are names of something."""
    parts = [part.lower().translate(_ANY_DIGIT) for part in _PARTS.findall(run) if not _HASH.fullmatch(part)]
    bits = [_BITS[first + second] for part in parts for first, second in pairwise(part)]
    return len(bits) >= _FEWEST_PAIRS and sum(bits) >= _RANDOM_BITS * len(bits)
