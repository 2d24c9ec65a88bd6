"""Find the secrets of a free text: by the name before a value, by their form, and by randomness.

Each step takes time in proportion to the length of the text.
"""

import re
import tomllib
from binascii import a2b_base64, a2b_hex
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from itertools import pairwise, takewhile, zip_longest
from pathlib import Path
from string import ascii_lowercase, digits

from diag.core.formatting import addresses_without_secrets
from diag.vllm.command.shell import HIDDEN, PLACEHOLDER
from diag.vllm.flags.registry import known, understood

_DATA = tomllib.loads((Path(__file__).parent / "secret_forms.toml").read_text(encoding="utf-8"))
_HARMLESS = tuple(_DATA["harmless_ends"])
_SECRET = re.compile(
    rf"(?i)(?:.*(?:{'|'.join(_DATA['name_parts'])})|(?:.*[-_.])?(?:{'|'.join(_DATA['names'])}))\d*(?:[-_.].*)?",
    re.DOTALL,
)
_MOST_NAME = 100
_PHRASES = re.compile(_DATA["patterns"]["phrases"])
_LETTER = r"[\w\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u109f\u1780-\u17ff\u200c]"
"""A letter or digit, or a sign that scripts such as Devanagari and Thai have within words."""
_NAME = re.compile(
    r"(?P<mark>(?<!\\)\\*[\"'`])?(?:(?<![\w.\u2013\u2014-])|(?<=\]\.))"
    rf"(?P<name>[\u2013\u2014-]{{0,2}}(?!\d){_LETTER}(?:{_LETTER}|[.-])*)"
)
_OPENING = r"(?:[|>][+-]?\d?|<<[-~]?[\"']?\w+[\"']?)?"
"""YAML's sign of a block, and a shell's of a here-document."""
_BREAK = rf"(?:[&!][\w.-]+[ \t]*(?=[|>\r\n]))?(?:{_OPENING}[ \t]*\\?(?:\r?\n[ \t]*){{1,3}}(?:-[ \t]+)?)?"
"""The end of a line within a value: of YAML's blocks, of a shell, of a list."""
_SIGN = "|".join(_DATA["signs"])
_BEHIND = re.compile(
    rf"(?P<closed>\\*[\"'`]\]?|\*\*|(?:\[\]|\])(?=\s*[=:]))?(?:\s*(?P<sign>{_SIGN})[ \t]*{_BREAK}|\s*(?P<comma>,)\s*"
    rf"|(?P<space>[ \t]+(?:\\\r?\n[ \t]*)?|[ \t]*\r?\n[ \t]*(?:-[ \t]+)?))"
)
"""What separates a name from its value."""
_CAPITALS, _DASH = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+"), re.compile(r"[ \t]+[\u2013\u2014-][ \t]+")
_CELL, _TO_CELL = re.compile(r"(?:[|│┃]|(?<![^\n]))[ \t]*`?\Z"), re.compile(r"`?[ \t]*[|│┃][ \t]*")
_CELL_END = re.compile(_DATA["patterns"]["cell_end"])
_SIBLING = re.compile(_DATA["patterns"]["sibling"])
_VALUES = re.compile(_DATA["patterns"]["values"])
_CLOSES = re.compile(r"[})]")
_FARTHEST, _MOST_LINES = 300, 4
"""Characters between two such fields; lines."""
_MORE_WORDS = 3
"""Words behind the first one of a flag's value, if a shell's quotation marks are lost."""
_PAIR = re.compile(_DATA["patterns"]["pair"])
_QUOTED = re.compile(_DATA["patterns"]["quoted"])
_IN_GROUP = re.compile(r"(?P<open>[\[({])|(?P<close>[\])}])|[^\[\](){}\"'`\\]+|.", re.DOTALL)
_FIELD = re.compile(r"(?P<indent>[ \t]*)(?:-[ \t]+)?[\"']?[\w.-]+[\"']?:(?:[ \t]+(?P<value>[^\r\n]+))?\r?(?:\n|\Z)")
_ITEM = re.compile(_DATA["patterns"]["item"])
_BECOMES = re.compile(r"[ \t]+[-=]>[ \t]+(?=[\"'])")
_REPR = re.compile(r"<\w[^<>\n]{0,300}>")
_BARE = re.compile(_DATA["patterns"]["bare"])
_WORD = re.compile(r"[^\s\"'`,;]+")
_FLAG = re.compile(r"(?:\\*[\"'`])?(?P<name>--?[A-Za-z][\w.-]*)")
_BETWEEN = re.compile(_DATA["patterns"]["between"])
_OPENS = re.compile(_DATA["patterns"]["opens"])
_BEGINS = re.compile(_DATA["patterns"]["begins"])
_LINE = re.compile(r"(?:(?!\\[rn])[^\r\n])*")
_SCHEME = re.compile(r"(?i)(?:bearer|basic|digest|token|apikey|negotiate|ntlm|[&!][\w!/.:-]*)\Z")
_NO_VALUE = re.compile(
    rf"(?i)[\"'\s]*+(?:none|null|true|false|%[sdr]|\*+|\[\s*\]|\(\s*\)|\{{\s*\}}|{'|'.join(_DATA['dummies'])}|{HIDDEN})?[\"'\s,;.)\]}}]*+"
)
_PROSE = re.compile(rf"(?i){'|'.join(_DATA['prose'])}")
"""Words that follow a flag in a sentence, and are no value."""
_ENCODED = re.compile(_DATA["patterns"]["encoded"])
_HOME = re.compile(r"(?:/home|/Users)/[^/\s'\"]+")


def hidden(text: str) -> str:
    """Replace every secret, as `free_text.hidden` says."""
    text = addresses_without_secrets(text)
    text = _without_values(text)
    if "%3" in text:
        text = _ENCODED.sub(lambda pair: _hide_value(pair) if is_secret(pair["name"]) else pair[0], text)
    for pattern in _forms():
        text = pattern.sub(_hide_value, text)
    parts = _MANGLED.split(text)
    parts[::2] = map(_without_random, parts[::2])
    return _HOME.sub("~", "".join(parts))


def hidden_lines(lines: Iterable[str]) -> Iterator[str]:
    """Hide the secrets of lines, as `free_text.hidden_lines` says."""
    near, opened = deque[str](maxlen=_MOST_LINES), deque[bool](maxlen=_MOST_LINES)
    for line in lines:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(near[-1] if near else "", line, strict=False))
        head = line[: sum(1 for _ in same)]
        head = head[: head.rfind("] ") + 2] if "] " in head else ""  # which vLLM repeats on each line of a record
        text = line.removeprefix(head)
        if _BEGINS.match(text):
            opened.clear()
        if any(opened):
            whole = hidden("\n".join([*(one.removeprefix(head)[-_FARTHEST:] for one in near), text])).split("\n")
            yield head + (whole[-1] if len(whole) == len(near) + 1 else HIDDEN)
        else:
            yield hidden(line)
        if text.strip():
            near.append(line)
            names = (_OPENS.search(text), *_SIBLING.finditer(text))
            is_open = "-----BEGIN" in text or any(name and is_secret(name["name"][-_MOST_NAME:]) for name in names)
            opened.append(is_open)


@cache
def _forms() -> list[re.Pattern[str]]:
    """Return the expressions of secret_forms.toml, each with a group `value`."""
    return [re.compile(form["text"], re.DOTALL) for form in _DATA["form"]]


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return True if a name is that of a secret, as `free_text.is_secret` says."""
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
    fields = list(_SIBLING.finditer(text)) if _VALUES.search(text) else []
    siblings = set[int]()  # where values begin that belong to a secret's name in another field
    for field, after in zip_longest(fields, fields[1:]):
        if not is_secret(field["name"]):
            continue
        near = max(0, field.start() - _FARTHEST)
        opened = max(text.rfind(bracket, near, field.start()) for bracket in "{(}")
        first = opened if opened >= 0 and text[opened] != "}" else field.end()  # the value may stand before the name
        closed = _CLOSES.search(text, field.end(), field.end() + _FARTHEST)
        last = min(after.start() if after else len(text), closed.start() if closed else field.end() + _FARTHEST)
        siblings |= {value.start() for value in _VALUES.finditer(text, first, last)}
    for name in _NAME.finditer(text):
        start = name.start("name")
        if start < past or not (is_secret(name["name"][-_MOST_NAME:]) or start in siblings):
            continue
        for start, end in _values(text, name):
            value = text[start:end]
            last_line = value.rfind("\n")  # what closes the value may belong to something else there
            past = end if last_line < 0 else start + last_line
            if end > done and not _NO_VALUE.fullmatch(PLACEHOLDER.sub("", value)):
                quoted = _QUOTED.match(value)
                # the marks of a whole quotation stay around the hidden value
                mark = quoted["quote"] if quoted and quoted.end() == len(value) else ""
                parts += [text[done:start], mark, HIDDEN, mark] if start >= done else []
                done = end
    return "".join((*parts, text[done:]))


def _values(text: str, name: re.Match[str]) -> Iterator[tuple[int, int]]:
    """Yield where the values of a secret's name begin and end."""
    before, dash = _CELL.search(text, max(0, name.start() - 5), name.start()), _DASH.match(text, name.end())
    if before and (cell := _TO_CELL.match(text, name.end())):
        closes = _CELL_END.search(text, cell.end())
        yield cell.end(), closes.start() if closes else len(text)
        return
    if dash and (_CAPITALS.fullmatch(name["name"]) or not name["name"].isascii()):
        yield dash.end(), _end(text, dash.end())
        return
    behind = _BEHIND.match(text, name.end())
    if not behind:
        return
    closed, start, is_flag = behind["closed"], behind.end(), name["name"][0] in "-\u2013\u2014"
    if behind["sign"]:
        if name["mark"] and not closed:  # the quotation began before the name
            end, mark = _end(text, name.start()), name["mark"]
            yield start, max(start, end - len(mark) * text.startswith(mark, end - len(mark)))
        elif "\n" in behind[0] and (fields := list(_block(text, text.rfind("\n", 0, start) + 1))):
            yield from fields
        else:
            is_phrase = _PHRASES.match(name["name"]) and not _QUOTED.match(text, start)  # a header's, with spaces in it
            line = _LINE.match(text, start) if is_phrase else None
            if line and text[start : start + 1] not in "([{":
                end = line.end()
            else:
                end = max(line.end() if line else 0, _end(text, start))
            # of a flag whose quotation marks are lost: a few words, up to the next flag
            for _ in range(_MORE_WORDS if is_flag and behind["sign"] == "=" else 0):
                between = None if _QUOTED.match(text, start) else _BETWEEN.match(text, end)
                word = _WORD.match(text, between.end()) if between else None
                if not between or "," in between[0] or not word or _PROSE.fullmatch(word[0]):
                    break
                end = _end(text, between.end())
            yield start, end
    elif behind["comma"] and (
        is_flag or ((closed or _QUOTED.match(text, start)) and _PAIR.search(text, name.start() - 5, name.start()))
    ):
        yield from _words(text, start, name["name"] if is_flag else "")
    elif behind["space"] and not closed:
        if is_flag:
            yield from _words(text, start, name["name"])
        elif _PHRASES.match(name["name"]) and _QUOTED.match(text, start):
            yield start, _end(text, start)
    elif behind["space"] and closed.endswith("]") and _QUOTED.match(text, start):
        yield start, _end(text, start)


def _block(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield the values of the fields of a block of YAML that begins at `at`."""
    form = _FIELD if _FIELD.match(text, at) else _ITEM
    most, field = at + _FARTHEST, form.match(text, at)
    indent = len(field["indent"]) if field else 0
    while field and at < most and len(field["indent"]) >= indent:
        if field["value"]:
            yield field.span("value")
        at = field.end()
        field = form.match(text, at)


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


def _end(text: str, start: int) -> int:
    """Return the end of a value: of one word, behind the scheme of a header of one more, of the two of a change."""
    at = _word_end(text, start)
    if becomes := _BECOMES.match(text, at):
        return _word_end(text, becomes.end())
    return _word_end(text, at + 1) if text[at : at + 1] == " " and _SCHEME.match(text, start, at) else at


def _word_end(text: str, start: int) -> int:
    """Return the end of quotations, groups in brackets and bare words without a space between them."""
    at, quoted = start, _QUOTED.match(text, start)
    while quoted:
        at = quoted.end()
        quoted = _QUOTED.match(text, at)
    if object_in := _REPR.match(text, at):
        return object_in.end()
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


def _hide_value(match: re.Match[str]) -> str:
    start, end = (at - match.start() for at in match.span("value"))
    return match[0][:start] + HIDDEN + match[0][end:]


# -- randomness --------------------------------------------------------------------------------------------------------

_RUNS = (
    re.compile(r"(?<![A-Za-z0-9+/_=-])(?:[A-Za-z0-9+]|/(?=[A-Za-z0-9/]*\+))[A-Za-z0-9+/_=-]{19,}"),
    re.compile(r"[A-Za-z0-9+_=-]{20,}"),
    re.compile(r"[A-Za-z0-9]{20,}"),
)
"""Base64, which is no path; a part of a path; a part of a name."""
_CACHED = re.compile(
    r"((?:/[\w.-]{1,60}){0,8}/(?:torch_compile_cache|inductor_cache)(?:/[\w.-]{1,40}){0,6}/[a-z0-9]{2}/c[a-z2-7]{51}\.py\b)"
)
"""Code that torch.compile has written: the name is its hash, and the way to it decides what failed."""
_HEX = re.compile(_DATA["patterns"]["hex"])
_PACKED, _LOGIN = re.compile(r"(?<![\w+/=-])[\w+/=-]{12,}"), re.compile(rb"[\w.@-]{1,64}:[!-~]{3,200}")
"""Words that may be base64 or hexadecimal of a user and a password, as in a header."""
_PARTS = re.compile(r"[A-Za-z0-9]{6,}")
_PUBLISHED = re.compile("|".join(_DATA["published"]), re.IGNORECASE)
_HASH = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_MANGLED = re.compile(_DATA["patterns"]["mangled"])
_SYMBOLS = ascii_lowercase + "0"
_BITS = {a + b: int(row[at]) for a, row in zip(_SYMBOLS, _DATA["rare"], strict=True) for at, b in enumerate(_SYMBOLS)}
_ANY_DIGIT = str.maketrans(digits, "0" * 10)
_RANDOM_BITS, _FEWEST_PAIRS = 4.75, 12


def _without_random(text: str) -> str:
    text = _PACKED.sub(lambda word: HIDDEN if _is_user_and_password(word[0]) else word[0], text)
    if "_cache/" in text and len(parts := _CACHED.split(text)) > 1:  # each second part is such a path
        return "".join(part if at % 2 else _without_random(part) for at, part in enumerate(parts))
    for run in _RUNS:
        text = run.sub(lambda word: HIDDEN if _is_random(word[0]) else word[0], text)
    return str(_HEX.sub(lambda word: word[0] if word[0].isdecimal() else HIDDEN, text))


def _is_user_and_password(word: str) -> bool:
    with suppress(ValueError):
        return bool(_LOGIN.fullmatch(a2b_hex(word) if _HASH.fullmatch(word) else a2b_base64(word, strict_mode=True)))
    return False


def _is_random(run: str) -> bool:
    """Return True for a word that nobody has chosen. Hexadecimal parts do not count: most are names of something."""
    parts = [part for part in _PARTS.findall(_PUBLISHED.sub("/", run)) if not _HASH.fullmatch(part)]
    parts = [part.lower().translate(_ANY_DIGIT) for part in parts]
    bits = [_BITS[first + second] for part in parts for first, second in pairwise(part)]
    return len(bits) >= _FEWEST_PAIRS and sum(bits) >= _RANDOM_BITS * len(bits)
