"""Mutations of a text as a hostile or broken writer would make them: lines, bytes, numbers, quotation, encodings."""

import re
from collections.abc import Callable, Sequence
from random import Random

MOST_BYTES = 2**18
"""Of a mutated text: size is bounded and tested elsewhere (docs/security.md)."""
NUMBERS = (
    *(b"NaN", b"+Inf", b"-Inf", b"nan", b"inf", b"0", b"-0", b"-1", b"1e308", b"-1e308", b"1e309", b"1e-320", b"1_0"),
    *(b"9223372036854775808", b"18446744073709551616", b"9" * 400, b"0x10", b"1e5", b"0.1", b"1795230492.5", b"007"),
)
PIECES = (
    *(
        b"\\",
        b'"',
        b"'",
        b"`",
        b"\\n",
        b'\\"',
        b"{",
        b"}",
        b"[",
        b"]",
        b"(",
        b")",
        b"$(",
        b"${",
        b"<<EOF\n",
        b"#",
        b"|",
    ),
    *(
        b"\n",
        b"\r",
        b"\r\n",
        b"\t",
        b"\0",
        b"\x0b",
        b"\x1b[2J",
        b"\x7f",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\xc3",
        b"=",
        b",",
    ),
    *(
        "\u0085\u2028\u202e\u200b\u2014\u0130\U0001f600".encode(),
        "\u0661".encode(),
        b"\xed\xa0\x80",
        b":",
        b"::",
        b"-",
        b"--",
    ),
    *(b"&a ", b"*a ", b"!!python/object/apply:os.system ", b"null", b"true", b"<<: ", b"%", b"{}", b"__name__", b" "),
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_WORD = re.compile(rb"[^\s\"'={},]+")

Mutation = Callable[[Random, bytes, bytes], bytes]


def mutated(random: Random, text: bytes, other: bytes = b"") -> bytes:
    """A text with one to six mutations; `other` is one whose parts may be taken over."""
    for _ in range(random.choice((1, 1, 2, 3, 6))):
        text = random.choice(MUTATIONS)(random, text, other)
    return text[:MOST_BYTES]


def _span(random: Random, size: int) -> tuple[int, int]:
    """A part of so many things, mostly a short one."""
    start = random.randint(0, size)
    return start, min(size, start + random.choice((1, 1, 1, 2, 8, 64)))


def _lines(random: Random, text: bytes, other: bytes) -> bytes:
    """Drop, repeat, move or take over a few lines."""
    lines = text.split(b"\n")
    start, end = _span(random, len(lines))
    part, rest = lines[start:end], lines[:start] + lines[end:]
    foreign = other.split(b"\n")
    first, last = _span(random, len(foreign))
    at = random.randint(0, len(rest))
    changed = random.choice(
        (
            rest,
            lines[:end] + part + lines[end:],
            rest[:at] + part + rest[at:],
            rest[:at] + foreign[first:last] + rest[at:],
        )
    )
    return b"\n".join(changed)


def _bytes(random: Random, text: bytes, other: bytes) -> bytes:
    """Flip, drop or repeat a few bytes."""
    start, end = _span(random, len(text))
    part = text[start:end]
    flipped = bytes(byte ^ (1 << random.randrange(8)) for byte in part)
    return text[:start] + random.choice((flipped, b"", part * 2, part * 200)) + text[end:]


def _number(random: Random, text: bytes, other: bytes) -> bytes:
    return _replaced(random, text, _NUMBER, random.choice(NUMBERS))


def _word(random: Random, text: bytes, other: bytes) -> bytes:
    """Put a word of this text or of the other one in the place of a word."""
    words = _WORD.findall(random.choice((text, other)))
    return _replaced(random, text, _WORD, random.choice(words) if words else b"")


def _replaced(random: Random, text: bytes, pattern: re.Pattern[bytes], instead: bytes) -> bytes:
    """Replace one match, searched from a random place on, so that a long text is not read as a whole."""
    found = pattern.search(text, random.randint(0, len(text)))
    return text[: found.start()] + instead + text[found.end() :] if found else text


def _insert(random: Random, text: bytes, other: bytes) -> bytes:
    at = random.randint(0, len(text))
    return text[:at] + random.choice(PIECES) * random.choice((1, 1, 1, 2, 50)) + text[at:]


def _truncate(random: Random, text: bytes, other: bytes) -> bytes:
    at = random.randint(0, len(text))
    return random.choice((text[:at], text[at:]))


def _encode(random: Random, text: bytes, other: bytes) -> bytes:
    """The whole text as another program may have written it."""
    decoded = text.decode("utf-8", "replace")
    return random.choice(
        (
            decoded.encode("utf-16"),
            decoded.encode("utf-8-sig"),
            text.replace(b"\n", b"\r\n"),
            text.replace(b"\n", b"\r"),
        )
    )


MUTATIONS: Sequence[Mutation] = (
    _lines,
    _lines,
    _bytes,
    _number,
    _number,
    _word,
    _word,
    _insert,
    _insert,
    _truncate,
    _encode,
)
