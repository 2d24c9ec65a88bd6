"""Split shell scripts into words, and quote words as a line to paste into a shell.

A hidden value is written as a variable that has to be set, "${NAME:?}".
"""

import re
import shlex
import textwrap
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from diag.core.errors import BadUsage
from diag.vllm.command.command import Command

_KEYWORDS = {"if", "then", "elif", "else", "while", "until", "do", "{", "!", "time"}
_PIECE = re.compile(
    r"""(?P<gap>(?:[ \t\r]|\\\r?\n)+)
      | (?P<opening>["`]|\$[({]|[<>]\()
      | (?P<operator>[&\d]*[<>]+[&|]?|[;&|\n]+|[()])
      | '(?P<single>[^']*)'
      | \\(?P<escaped>.)
      | (?P<plain>[^'"`$\\\s;&|()<>]+|\$|[^'"`\\])""",
    re.VERBOSE | re.DOTALL,
)
_INSIDE = re.compile(r"\\.|\$\(|\$\{|['\"`()}]", re.DOTALL)
_ENDS = {"$(": ")", "<(": ")", ">(": ")", "(": ")", "${": "}", '"': '"', "`": "`"}
_ESCAPED = re.compile(r"\\(?:\n|([$`\"\\]))")
_ARRAY = re.compile(r"\w+\+?=")
PIPED = re.compile(r"(?<!\S)([A-Z_][A-Z0-9_]*=)(\d[\d,-]*(?:\|\d[\d,-]*)+)(?=\s)")
"""Cores for each rank, VLLM_CPU_OMP_THREADS_BIND=0|1, without the quotation marks that a shell needs."""
_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?[ \t]*['\"\\]?(\w+)")
_FAR = re.compile(r"(?:^|[\s;&|/])(?:ssh|pdsh|pssh|clush|srun|docker|podman|nerdctl|kubectl|oc|nsenter|chroot|lxc)\b")
"""Programs that run a shell on another host or in a container: its files are not on this host."""
_SHELL = re.compile(r"(?:^|[\s;&|/])(?:ssh|pdsh|(?:ba|z|k|da)?sh)\b")


class Bare(str):
    """A word with a variable or a substitution outside of quotation marks: a shell may make several words of it.

    `raw` is the word as it was written.
    """

    raw = ""


class _Operator(str):
    """An operator between words."""


def statements(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each command without redirections, after the name of the array ARGS=(...) or "".

    A name with a + at its end adds to the array. BadUsage if a quotation is not closed.
    """
    name, words, skip = "", list[str](), False
    for token in _tokens(_inline_documents(PIPED.sub(r"\1'\2'", text))):
        if not isinstance(token, _Operator):
            words += [] if skip or (not words and token in _KEYWORDS) else [token]
            skip = False
        elif name and ")" not in token:
            continue
        elif "<" in token or ">" in token:
            skip = True
        else:
            opens = token == "(" and words and _ARRAY.fullmatch(words[-1])
            array = words.pop().removesuffix("=") if opens else ""
            yield name, words
            name, words, skip = array, [], False
    yield name, words


def here_documents(text: str) -> list[str]:
    """Return the here-documents of a script without their common indentation."""
    found: list[str] = []
    _inline_documents(text, found)
    return [textwrap.dedent(document) for document in found]


def _inline_documents(text: str, found: list[str] | None = None) -> str:
    """Remove here-documents; one that a shell reads becomes its script: bash -c '...'. `found` collects the others."""
    lines, kept, at = text.split("\n"), list[str](), 0
    places: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        places.setdefault(line.strip(), []).append(place)
    while at < len(lines):
        line = lines[at]
        opened = _HEREDOC.search(line.partition("#")[0])
        ends = places.get(opened[1], []) if opened else []
        later = bisect_right(ends, at)
        end = ends[later] if later < len(ends) else at
        shell = _SHELL.search(line) if end > at else None
        document = "\n".join(lines[at + 1 : end])
        script = shlex.quote(document)
        if found is not None and end > at and not shell:
            found.append(document)
        kept.append(f"{'ssh HOST' if _FAR.search(line) else 'bash -c'} {script}" if shell else line)
        at = end + 1
    return "\n".join(kept)


def _tokens(text: str) -> Iterator[str]:
    """Yield the words of a script and the operators between them."""
    at = 0
    while at < len(text):
        if text[at] == "#":
            at = _end(text, "\n", at)
        found = _PIECE.match(text, at)
        if found and found.lastgroup == "operator":
            yield _Operator(found[0])
        if found and found.lastgroup in ("gap", "operator"):
            at = found.end()
        elif at < len(text):
            word, at = _word(text, at)
            yield word


def _end(text: str, character: str, start: int) -> int:
    """Return the place of the next such character, the end of the text if there is none."""
    found = text.find(character, start)
    return len(text) if found < 0 else found


def _word(text: str, start: int) -> tuple[str, int]:
    """Return the word that begins at `start`, without its quotation marks, and its end."""
    at, parts, bare = start, list[str](), False
    while (found := _PIECE.match(text, at)) and found.lastgroup not in ("gap", "operator"):
        opened = found["opening"]
        at = _nested_end(text, at) if opened else found.end()
        inner = text[found.start() : at]
        bare = bare or found[0] == "$" or bool(opened and opened != '"')
        parts.append(
            _ESCAPED.sub(lambda found: found[1] or "", inner[1:-1])
            if opened == '"'
            else inner
            if opened
            else found[found.lastgroup or 0]
        )
    if at < len(text) and not found:
        raise BadUsage("the command has an unclosed quotation mark or parenthesis")
    word = Bare("".join(parts)) if bare else "".join(parts)
    if isinstance(word, Bare):
        word.raw = text[start:at]
    return word, at


def _nested_end(text: str, at: int) -> int:
    """Return the end of the quotation or substitution that begins at `at`, with all that is nested in it."""
    ends = list[str]()
    while found := (_PIECE if not ends else _INSIDE).search(text, at):
        piece, at = found[0], found.end()
        quoted = ends[-1:] == ['"']
        if piece in ends[-1:]:
            ends.pop()
        elif piece == "'" and not quoted:
            at = _end(text, "'", at) + 1
        elif piece in _ENDS and not (quoted and piece == "("):
            ends.append(_ENDS[piece])
        if not ends:
            return at
    raise BadUsage("the command has an unclosed quotation mark or parenthesis")


HIDDEN = "REDACTED"
"""Replaces a secret in a quoted line of a log, and in recordings of older releases."""
PLACEHOLDER = re.compile(r"\$\{([A-Z][A-Z0-9_]{0,60}):\?\}")
"""Replaces a value in a command: a shell that lacks the variable refuses to run the command."""
_OPEN = re.compile(r'[^"`\\!]*\$[A-Za-z_{@*][^"`\\!]*')
_DEFAULT = re.compile(r"\$\{\w+:?-([^{}$]*)\}")
_NAMED = re.compile(r"(-{0,2}[\w.-]+=)(.*)", re.DOTALL)


def placeholder(name: str) -> str:
    """Return the variable that stands for a hidden value of that name."""
    return f"${{{re.sub(r'[^A-Z0-9]+', '_', name.upper()).strip('_').lstrip('0123456789_')[:60] or 'VALUE'}:?}}"


def line(words: Sequence[str]) -> str:
    """Join words to a line, with the quotation marks that a shell needs."""
    return " ".join(map(_quoted, words))


def written(command: Command) -> str:
    """Write a command in one line, with the commands around it and the variables that are exported to it."""
    text = line([*command.exported, *command.words])
    for words, place in reversed(command.around):
        outer = [_quoted(word) for word in words]
        outer[place] = shlex.quote(text)
        text = " ".join(outer)
    return text


def _quoted(word: str) -> str:
    """Quote a word; in `NAME=value` only the value, so that it stays an assignment."""
    named = _NAMED.fullmatch(word)
    if isinstance(word, Bare):
        return word.raw
    return f"{named[1]}{_value(named[2])}" if named else _value(word)


def _value(text: str) -> str:
    """Quote a value; variables stay open to the shell, and ~/ stays outside of quotation marks."""
    if text.startswith("~/"):
        return f"~/{_value(text[2:])}" if len(text) > 2 else text
    if PLACEHOLDER.search(text):
        done, end = "", 0
        for found in PLACEHOLDER.finditer(text):
            done += (_value(text[end : found.start()]) if found.start() > end else "") + f'"{found[0]}"'
            end = found.end()
        return done + (_value(text[end:]) if text[end:] else "")
    return f'"{text}"' if _OPEN.fullmatch(text) else shlex.quote(text)


def default(text: str) -> str:
    """Replace ${NAME:-x} by x, the value of an unset variable."""
    return _DEFAULT.sub(r"\1", text)
