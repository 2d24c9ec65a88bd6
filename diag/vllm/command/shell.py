"""Split shell scripts into words, and quote words as a line to paste into a shell.

A hidden value is written as a variable that has to be set, "${NAME:?}".
"""

import re
import shlex
import textwrap
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

from diag.core.errors import BadUsage


class _Pattern:
    """A pattern that is compiled when it is first used: most commands of diag read no launch."""

    def __init__(self, text: str, flags: int, noted: str = "") -> None:
        self.wanted, self.noted = (text, flags), noted

    def __getattr__(self, name: str) -> Any:
        text, flags = self.wanted
        method = getattr(re.compile(NOTATIONS["patterns"][self.noted] if self.noted else text, flags), name)
        setattr(self, name, method)
        return method


def compiled(text: str, flags: int = 0) -> re.Pattern[str]:
    return cast(re.Pattern[str], _Pattern(text, flags))


def noted(name: str) -> re.Pattern[str]:
    return cast(re.Pattern[str], _Pattern("", 0, name))


class _Notations(dict[str, Any]):
    """The tables of notations.toml, read when the first is asked for."""

    def __missing__(self, name: str) -> Any:
        self.update(tomllib.loads(Path(__file__).with_name("notations.toml").read_text(encoding="utf-8")))
        return dict(self)[name]


NOTATIONS: Mapping[str, Any] = _Notations()
LONGEST = 2**15
"""Characters of a variable that is filled in: each may name others several times."""
MOST_DOCUMENTS = 20
"""Here-documents of one script that are looked at."""
_KEYWORDS = {"while", "until", "do", "{", "!", "time"}
_TESTS = ("[", "[[", "test")
_DEEPEST = 16
"""Blocks within each other that tell the way to a command: each command has a path."""
BLOCK = noted("shell_block")
_BEHIND = noted("shell_behind")
CONDITION = noted("shell_condition")
COMMENT = compiled(r"\{#(?:(?!\{#).){0,9999}?#\}|\{\{-?[ \t]*/\*(?:(?!/\*).){0,9999}?\*/[ \t]*-?\}\}", re.DOTALL)
_FOLDED = noted("shell_folded")
_TEMPLATE = compiled(r"\$?\{{2,3}-?\s*+([^{}]{0,200}?)\s*-?\}{2,3}|\{%[^{}]{0,200}%\}")

_PIECE = compiled(
    r"""(?P<gap>(?:[ \t\r]|\\\r?\n)+)
      | (?P<opening>["`]|\$[({]|[<>]\()
      | (?P<hole><[A-Za-z](?:[\w ./:-]{0,60}\w)?>(?![>&(\w])|\$?\{\{[^{}]{0,200}\}\}|\{%[^{}]{0,200}%\}
          |(?<!\S)[\[{][A-Za-z][\w./-]*(?:[ ][\w./-]+)+[]}](?!\S))
      | (?P<operator>[&\d]*[<>]+[&|]?|[;&|\n]+|[()])
      | '(?P<single>[^']*)'
      | \\(?P<escaped>.)
      | (?P<plain>[^'"`$\\\s;&|()<>]+|\$|[^'"`\\])""",
    re.VERBOSE | re.DOTALL,
)
_INSIDE = compiled(r"\\.|\$\(|\$\{|['\"`()}]", re.DOTALL)
_ENDS = {"$(": ")", "<(": ")", ">(": ")", "(": ")", "${": "}", '"': '"', "`": "`"}
_ESCAPED = compiled(r"\\(?:\n|([$`\"\\]))")
_ARRAY = compiled(r"\w+\+?=")
PIPED = noted("shell_piped")
_OF_JUST = compiled(r"\{\{[ \t]*([A-Za-z_][\w-]*)[ \t]*\}\}")
_RULE = compiled(
    r"^(?![\w-]+=)[\w./%@-]([^\n:=]*+(?:=[ \t]*+(?:\"[^\"\n]*+\"|'[^'\n]*+'|[\w.-]++)[^\n:=]*+)*+):(?!=)[^\n=]*$",
    re.MULTILINE,
)
_GIVEN = compiled(r"[ \t]([A-Za-z_][\w-]*)=[ \t]*(\"[^\"\n]*\"|'[^'\n]*'|[\w.-]+)")
_DEFINED = compiled(r"(?m)^define[ \t]+(?P<name>[\w-]+)[ \t]*=?\n(?P<body>(?:(?!endef|define).*\n){0,99})endef[ \t]*$")
_CALLED = compiled(r"\$\(call[ \t]+(?P<name>[\w-]+),(?P<words>(?:[^()\n]|\([^()\n]*\)){0,2000})\)")
_QUOTED = compiled(r"(?m)^([A-Z_]\w*)[ \t]*:?=[ \t]*(-[^\n]*[\"'][^\n]*)$")
_OF_OUTER = compiled(r"'([^'\"\n\\$]*\$[^'\"\n\\]*)'")
_BY_ENVIRONMENT = compiled(r"env(?:_var_or_default)?\(\s*[\"'](\w+)[\"'],\s*[\"']([^\"'{}$`]*)[\"']\s*\)")
_HEREDOC = compiled(r"(?<!<)<<(?!<)-?[ \t]*['\"\\]?(\w+)")
_FAR = noted("shell_far")
_SHELL = compiled(r"(?:^|[\s;&|/])(?:ssh|pdsh|(?:ba|z|k|da)?sh)\b")


class Bare(str):
    """A word with a variable or a substitution outside of quotation marks: a shell may make several words of it.

    `raw` is the word as it was written.
    """

    raw = ""

    @classmethod
    def of(cls, word: str) -> str:
        """Return a word as it is written: a Bare one if it has a variable."""
        if "$" not in word:
            return word
        bare = cls(word)
        bare.raw = word
        return bare


class _Operator(str):
    """An operator between words."""


class Statement(NamedTuple):
    """A command of a script without redirections, or the array `name`; a name with a + at its end adds to the array.

    `path` has the branches around it: the number of an if, a case or a condition before && or ||, and the branch, -1
    for its else. `is_background` is True if the script goes on while it runs; `line` counts from 1. A test `decides`
    the last of these branches with the tests before it, which the operator `joint` joins to it; the patterns of a case
    are a test, too.
    """

    name: str
    words: list[str]
    path: tuple[tuple[int, int], ...] = ()
    is_background: bool = False
    line: int = 1
    decides: tuple[int, int] | None = None
    joint: str = ""

    @property
    def is_pattern(self) -> bool:
        return bool(self.decides and self.joint == ")")


def statements(text: str) -> Iterator[Statement]:
    """Yield the commands of a script; BadUsage if a quotation is not closed."""
    name, words, skip, is_split, line = "", list[str](), False, False, 1
    blocks, pattern, testing, joint, negated, is_empty = _Blocks(), False, False, "", False, False
    text = re.sub(r"\\\s*\Z|`#[^`\n]*`", "", text)  # the file ends in a continued line; comments in a command
    for token, at in _tokens(_inline_documents(PIPED.sub(r"\1'\2'", text))):
        line = line if words else at
        if not isinstance(token, _Operator):
            if not words and not skip and not name and token in ("if", "case", "elif", "else", "fi", "esac", "then"):
                testing = token in ("if", "elif")
                blocks.enter(token)
                pattern = token == "case" or (pattern and token != "esac")
                if token == "case":
                    words = ["case"]
                continue
            if is_split:  # the words of an array
                words = [f"${name}"] if re.search(r"\$\(|`", token) else token.split()
                yield Statement(name, words, blocks.path(), False, line)
                name, words, skip, is_split = "", [], True, False
            negated = negated or (token == "!" and not words)
            words += [] if skip or (not words and token in _KEYWORDS and not (negated and testing)) else [token]
            skip = False
        elif "[[" in words[:2] and words[-1] != "]]" and "\n" not in token:
            words.append(str(token))
        elif name and ")" not in token:
            continue
        elif token == "<<<" and "read" in words and any(re.match(r"-[a-z]*a", word) for word in words):
            name, words, is_split = words[-1], [], True  # read -ra NAME <<< "words of the array"
        elif "<" in token or ">" in token:
            skip = True
        elif pattern and blocks.in_case and not name and ("|" in token or (token == "(" and not words)):
            continue  # another pattern of the same branch
        elif pattern and ")" in token and blocks.in_case and not name:
            first = words.index("in") + 1 if words[:1] == ["case"] and "in" in words else 0
            yield Statement("", words[:first], blocks.path(), False, line)
            blocks.branch(is_else="*" in words)
            yield Statement("", words[first:], blocks.path(), False, line, blocks.way, ")")
            words, pattern = [], False
        else:
            opens = token == "(" and words and _ARRAY.fullmatch(words[-1])
            array = words.pop().removesuffix("=") if opens else ""
            is_test = token in ("&&", "||") and not (testing or negated) and bool(words) and words[0] in _TESTS
            blocks.count += is_test
            decides = (blocks.count, 0) if is_test else blocks.way if testing and words else None
            is_background = token == "&" or token.startswith("&\n")
            if words or name or decides or not is_empty:  # several empty lines end no more than one
                yield Statement(name, words, blocks.path(), is_background, line, decides, joint if testing else "")
            is_empty = not words
            if is_test:
                blocks.tested.append((blocks.count, 0 if token == "&&" else -1))
            elif ";" in token or "\n" in token:
                blocks.tested.clear()
            pattern = pattern or (";;" in token and blocks.in_case)
            name, words, skip, negated = array, [], False, False
            joint = str(token) if token in ("&&", "||") else ""
    yield Statement(name, words, blocks.path(), False, line)


class _Blocks:
    """The open ifs and cases of a script, and the branch of each; `tested` has the conditions before && and ||."""

    def __init__(self) -> None:
        self.count = 0
        self.tested = list[tuple[int, int]]()
        self._open, self._cases = list[tuple[int, int]](), list[bool]()

    @property
    def way(self) -> tuple[int, int] | None:
        """The innermost block and its branch."""
        return self._open[-1] if self._open else None

    @property
    def in_case(self) -> bool:
        return self._cases[-1:] == [True]

    def enter(self, word: str) -> None:
        if word in ("if", "case"):
            self.count += 1
            self._open.append((self.count, 0 if word == "if" else -2))
            self._cases.append(word == "case")
        elif word in ("fi", "esac"):
            del self._open[-1:], self._cases[-1:]
        elif word != "then":
            self.branch(is_else=word == "else")

    def branch(self, *, is_else: bool) -> None:
        if self._open:
            number, branch = self._open[-1]
            self._open[-1] = (number, -1 if is_else else max(0, branch + 1))

    def path(self) -> tuple[tuple[int, int], ...]:
        return (*self._open[:_DEEPEST], *self.tested[:_DEEPEST])


def filled_templates(text: str) -> str:
    """Replace what a template engine fills in, such as {{ model }}, by a shell's variable."""
    if "{{" not in text and "{%" not in text:
        return text
    text = _BEHIND.sub(lambda key: key[1] + " [$VALUES]" * bool(re.search(r"args|command", key[1])), text)
    lines, opened = list[str](), list[bool]()  # True behind an else
    for line in COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text).split("\n"):
        block = BLOCK.fullmatch(line)
        if block and (block["opens"] or block["start"]):
            opened.append(False)
        elif block and (block["ends"] or block["stop"]):
            del opened[-1:]
        elif block and (block["other"] or block["another"]) and opened:
            opened[-1] = True
        is_joined = bool(lines) and lines[-1].endswith("\\")  # the command goes on behind the block
        is_left_out = any(opened)  # only the first branch is read; lines keep their numbers
        unseen = "$OTHERWISE" if is_left_out and not block else "$VALUES" if block and block["same"] else ""
        indent = line[: len(line) - len(line.lstrip())]
        before = next(filter(str.strip, reversed(lines[-9:])), "") if unseen == "$VALUES" else ""
        is_list = re.match(r"\s*- |[^#]*\b(?:args|command):\s*$", before)
        if is_list:
            indent = before[: len(before) - len(before.lstrip())] + "  " * before.rstrip().endswith(":")
        is_flag = is_left_out and re.match(r"\s*- [\"']?--", line)  # of a list in YAML
        joined = f"{unseen} \\" if unseen and unseen not in "".join(lines[-1:]) else "\\"
        left_out = f"{indent}{joined}" if is_joined else f"{indent}- {unseen}" if is_flag or is_list else ""
        lines.append(left_out if block or is_left_out else CONDITION.sub(_conditional, line))
    return _TEMPLATE.sub(lambda hole: f"${variable_name(hole[1] or 'TEMPLATE')}", folded("\n".join(lines)))


def otherwise(text: str) -> str:
    """Return a template with the second branch of each condition, on the same lines; the text if it has none."""
    lines, opened = list[str](), [(-1, False)]  # a condition's branch, -1 for another block; is it in a wrong branch?
    for line in text.split("\n") if "{{" in text or "{%" in text else ():
        block = BLOCK.fullmatch(line)
        branch, is_out = opened[-1]
        is_condition = bool(block) and branch >= 0
        if block and (block["opens"] or block["start"]):
            is_condition = bool(re.match(r"\W*if\b", line))
            opened.append((0 if is_condition else -1, is_out or branch not in (-1, 1)))
        elif block and (block["ends"] or block["stop"]):
            del opened[max(len(opened) - 1, 1) :]
        elif is_condition and block and (block["other"] or block["another"]):
            opened[-1] = (branch + 1, is_out)
        else:
            is_condition = False
        is_left_out = is_condition or opened[-1][1] or opened[-1][0] not in (-1, 1)
        lines.append(("\\" if "".join(lines[-1:]).endswith("\\") else "") if is_left_out else line)
    return "\n".join(lines) or text


def folded(text: str) -> str:
    """Move the empty lines that a template's blocks leave in a folded text of YAML to its end."""
    packed: str = _FOLDED.sub(
        lambda block: block[1] + "".join(sorted(block["body"].splitlines(True), key=str.isspace)), text
    )
    return packed


def in_its_words(text: str, source: str) -> str:
    """Write the variables of `filled_templates` in a text as the expressions of its source."""
    if "$" in text and "{{" in source:
        found = filter(None, (hole[1] for hole in _TEMPLATE.finditer(source)))
        holes = {variable_name(hole): hole.partition("|")[0].strip() for hole in found}
        plain = {name: f"{{{{ {hole} }}}}" for name, hole in holes.items() if re.fullmatch(r"[\w.$ ]+", hole)}
        expressions = {**plain, "VALUES": "{{ ... }}"}
        text = re.sub(r"\"?\$([A-Z][A-Z0-9_]*)\b\"?", lambda name: expressions.get(name[1], name[0]), text)
    return text


def _conditional(condition: re.Match[str]) -> str:
    """Return the flags of a condition's first branch; a value of one of several is a variable."""
    then = condition["then"]
    if not re.match(r"\s*-", then):
        return "$CONDITION" if then.strip() else ""
    return f"{then} $OTHERWISE" if condition["other"] else then


def recipes(text: str) -> str:
    """Write the recipes of a Makefile or a justfile as commands of a shell, on the same lines."""
    bodies = {one["name"]: _of_make(one["body"]) for one in _DEFINED.finditer(text)}
    text = _DEFINED.sub(lambda one: "\n" * one[0].count("\n"), text) if bodies else text
    text = _CALLED.sub(lambda call: _called(call, bodies), text, MOST_DOCUMENTS) if bodies else text
    quoted = dict(_QUOTED.findall(text)[:MOST_DOCUMENTS])  # words with quotation marks, which no shell splits
    if quoted and text.count("$") * max(map(len, quoted.values())) < LONGEST * 8:
        text = re.sub(r"\$[({](\w+)[)}]", lambda name: quoted.get(name[1], name[0]), text)
    text = _of_make(text)
    text = re.sub(r"\$\((\w+)\)", r"${\1}", text).replace("$$", "$")
    text = _OF_JUST.sub(lambda hole: f"${{{hole[1]}}}", text)
    text = re.sub(r"^(?:export[ \t]+)?([\w-]+)[ \t]*[?:]?=[ \t]*(.*)$", _assigned, text, flags=re.MULTILINE)
    return _RULE.sub(lambda rule: "; ".join(f"{name}={value}" for name, value in _GIVEN.findall(rule[1])) or ":", text)


def _of_make(text: str) -> str:
    return re.sub(r"^([ \t]+)@-?(?=\S)", r"\1", text, flags=re.MULTILINE)


def _called(call: re.Match[str], bodies: Mapping[str, str]) -> str:
    """Return the commands of a Makefile's definition with the words of a call, on one line."""
    words = re.split(r",(?![^()]*\))", call["words"])
    body = "; ".join(re.sub(r"\\\n[ \t]*", " ", bodies.get(call["name"], "")).strip().split("\n"))
    body = re.sub(r"\$[({]([1-9])[)}]", lambda at: "".join(words[int(at[1]) - 1 : int(at[1])]), body)
    return body if body and len(body) < LONGEST else call[0]


def _assigned(line: re.Match[str]) -> str:
    if usual := _BY_ENVIRONMENT.fullmatch(line[2].strip()):
        return f'{line[1]}="${{{usual[1]}:-{usual[2]}}}"'
    value = line[2].strip() if line[2][:1] in ("'", '"') else shlex.quote(line[2].partition(" #")[0].strip())
    return f"{line[1]}={value}" if line[2].count("'") % 2 == 0 else ":"


def variable_name(text: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", text.upper()).strip("_").lstrip("0123456789_")[:60] or "VALUE"


def here_documents(text: str) -> list[str]:
    """Return the here-documents of a script without their common indentation, each on the lines that it has there."""
    documents: list[str] = []
    for outer in chain([text], documents):  # also those in others, such as a unit in ssh HOST <<EOF
        _inline_documents(outer, documents)
    return [textwrap.dedent(document) for document in documents]


def _inline_documents(text: str, others: list[str] | None = None) -> str:
    """Remove here-documents; one that a shell reads becomes its script: bash -c '...'. `others` collects the rest."""
    if "<<" not in text:
        return text
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
        if opened and opened[0].endswith((f"<{opened[1]}", f"-{opened[1]}", f" {opened[1]}")):  # the shell fills it in
            document = re.sub(r"\\([\\$`])", r"\1", _OF_OUTER.sub(r'"\1"', document))
        script = shlex.quote(document)
        if others is not None and end > at and len(others) < MOST_DOCUMENTS:
            others.append("\n" * (at + 1) + document)
        kept.append(f"{'ssh HOST' if _FAR.search(line) else 'bash -c'} {script}" if shell else line)
        kept += [""] * (1 if shell else end - at)  # the lines keep their numbers
        at = end + 1
    return "\n".join(kept)


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield the words of a script and the operators between them, each with its line."""
    at, line, counted = 0, 1, 0
    while at < len(text):
        if text[at] == "#":
            at = _end(text, "\n", at)
        piece = _PIECE.match(text, at)
        if piece and piece.lastgroup == "operator":
            yield _Operator(piece[0]), line
        if piece and piece.lastgroup in ("gap", "operator"):
            at = piece.end()
        elif at < len(text):
            line, counted = line + text.count("\n", counted, at), at
            start, parts, bare = at, list[str](), False  # a word, without its quotation marks
            while (piece := _PIECE.match(text, at)) and piece.lastgroup not in ("gap", "operator"):
                opened = piece["opening"]
                at = _nested_end(text, at) if opened else piece.end()
                inner = text[piece.start() : at]
                bare = bare or piece[0] == "$" or bool(opened and opened != '"') or piece.lastgroup == "hole"
                parts.append(
                    f"${variable_name(piece['hole'])}"
                    if piece.lastgroup == "hole"
                    else _ESCAPED.sub(lambda piece: piece[1] or "", inner[1:-1])
                    if opened == '"'
                    else inner
                    if opened
                    else piece[piece.lastgroup or 0]
                )
            if at < len(text) and not piece:
                raise BadUsage("the command has an unclosed quotation mark or parenthesis")
            word = Bare("".join(parts)) if bare else "".join(parts)
            if isinstance(word, Bare):
                word.raw = text[start:at]
            yield word, line


def _end(text: str, character: str, start: int) -> int:
    """Return the place of the next such character, the end of the text if there is none."""
    place = text.find(character, start)
    return len(text) if place < 0 else place


def _nested_end(text: str, at: int) -> int:
    """Return the end of the quotation or substitution that begins at `at`, with all that is nested in it."""
    ends = list[str]()
    while token := (_PIECE if not ends else _INSIDE).search(text, at):
        piece, at = token[0], token.end()
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
PLACEHOLDER = noted("shell_placeholder")
_OPEN = compiled(r'[^"`\\!]*\$[A-Za-z_{@*][^"`\\!]*')
_DEFAULT = compiled(r"\$\{[\w@*]+:?-([\"']?)([^{}$]*?)\1\}")
_NESTED = 3
_SCHEDULERS = compiled(r"\$\{(?:SLURM|SKYPILOT|DSTACK|PBS|LSB|LWS|OMPI|KUBERNETES|RUNPOD|NOMAD|AWS)_")
_NAMED = compiled(r"(-{0,2}[\w.-]+=)(.*)", re.DOTALL)


def placeholder(name: str) -> str:
    """Return the variable that stands for a hidden value of that name."""
    return f"${{{variable_name(name)}:?}}"


def line(words: Sequence[str]) -> str:
    """Join words to a line, with the quotation marks that a shell needs."""
    return " ".join(map(_quoted, words))


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
        for variable in PLACEHOLDER.finditer(text):
            done += (_value(text[end : variable.start()]) if variable.start() > end else "") + f'"{variable[0]}"'
            end = variable.end()
        return done + (_value(text[end:]) if text[end:] else "")
    return f'"{text}"' if _OPEN.fullmatch(text) else shlex.quote(text)


def default(text: str) -> str:
    """Replace ${NAME:-x} by x, the value of an unset variable, also within another: ${1:-${NAME:-x}}."""
    for _ in range(_NESTED if "${" in text else 0):
        text = _DEFAULT.sub(r"\2", text)
    return text


def is_default(value: object) -> bool:
    """Return True for a text with a variable that has a default, which is not empty; schedulers set their own."""
    named = _DEFAULT.finditer(value) if isinstance(value, str) and ":-" in value else ()
    return any(match[2] and not _SCHEDULERS.match(match[0]) for match in named)


def with_default(name: str, value: object) -> str:
    """Return the variable of that name, with its default if a shell can write it; without one for None and False."""
    text = "" if value is None or value is False or value == [] else str(value)
    is_plain = name.isidentifier() and not re.search(r"[{}$`\\]", text)
    return f"${{{name}:-{text}}}" if is_plain else f"${variable_name(name)}"


def usual(value: Any) -> Any:
    """Return a value with the defaults of its variables; ValueError if one has none."""
    text = default(value) if isinstance(value, str) else value
    if isinstance(text, str) and "$" in text:
        raise ValueError
    return text
