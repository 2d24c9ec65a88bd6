"""Show a launch command by an allow-list. Every other word becomes a variable that has to be set, "${NAME:?}".

Flags of vLLM are shown, values and variables that `redaction` lists as harmless, and the words of programs around
vLLM that are listed here. Other commands of the same text are left out.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePosixPath

from diag.core.errors import BadUsage
from diag.vllm.command import redaction
from diag.vllm.command.command import Command, is_server
from diag.vllm.command.container import IS_ALONE, LONG
from diag.vllm.command.redaction import VARIABLES
from diag.vllm.command.shell import PLACEHOLDER, compiled, default, line, noted, placeholder

_ASSIGNMENT = compiled(r"(--env=|-e|)([A-Za-z_][A-Za-z0-9_]{0,60})=(.*)", re.DOTALL)
_NAME = compiled(r"[A-Za-z_][A-Za-z0-9_]{0,60}")
_PROGRAMS = noted("shown_programs")
_OPTIONS, _WORDS = (frozenset(redaction.CONTENT[key]) for key in ("options", "words"))
"""Options of these programs that are shown, each with a value that is a number or one of _WORDS."""
_NUMBERS = compiled(r"\d[\d.,:-]{0,30}[kmgKMG]?[bB]?")


def shown(text: str) -> str:
    """Return the command in a text as one line to paste, without any word that may be a secret.

    "" if the text cannot be parsed or has nothing of vLLM in it. A line that is already shown stays as it is.
    """
    if not text:
        return ""
    from diag.vllm.command.parse import parse  # noqa: PLC0415  # without a launch command, its readers are not needed

    try:
        return masked(parse(text)).written()
    except BadUsage:
        pass
    try:  # a program of the site's own that passes vLLM's flags on: its name is not shown
        command = parse(f"vllm serve {text}")
    except BadUsage:
        return ""
    if not any(mention.option for mention in command.given):
        return ""
    rest = masked(command).words[command.arguments + bool(command.model) :]
    return line([*[placeholder("program")] * bool(command.model), *rest])


def masked(command: Command) -> Command:
    """Replace the words of a command that may not be shown; it keeps its number of words."""
    from diag.vllm.command.parse import filled_in  # noqa: PLC0415  # as above

    words = filled_in(command.words, redaction.harmless(command.environment))
    masks = {}
    for at in range(command.arguments, len(words)):
        is_open = redaction.is_variable(words[at]) or PLACEHOLDER.fullmatch(words[at])
        masks[at] = words[at] if is_open or words[at] in ("--", "") else placeholder(f"word_{at + 1}")
    loose = set(masks).difference(command.strays, *(mention.words for mention in command.given))
    names = ((at, redaction.name(words[at]) or redaction.image(words[at])) for at in loose if words[at] != "--")
    masks |= {at: name or placeholder("model") for at, name in names}
    before = None
    for mention in command.given:
        if mention.words:
            first, *more = words[mention.words.start : mention.words.stop]
            is_due = before and before.option and redaction.takes_secret(before) and not before.values
            is_due = is_due and not mention.option
            flag = "" if is_due else redaction.flag(mention)
            if before and is_due:
                spelled = redaction.value(before, "")
            elif flag and len(mention.words) == 1 and mention.values:
                separator = "" if re.match(r"-O\w", first) else "="
                spelled = f"{flag}{separator}{redaction.value(mention, mention.values[0])}"
            else:
                spelled = flag or placeholder(f"word_{mention.words.start + 1}")
            masks |= zip(mention.words, [spelled, *redaction.listed(mention, more)], strict=True)
            before = mention
    return command._replace(
        words=(*_show_prefix(words[: command.arguments], None, command.image), *(masks[at] for at in sorted(masks))),
        exported=tuple(_show_prefix(command.exported)),
        around=tuple((_show_prefix(outer, place, command.image), place) for outer, place in command.around),
    )


def _show_prefix(words: Sequence[str], script: int | None = None, image: str = "") -> tuple[str, ...]:
    """Return the words around vLLM's arguments; options of an unknown program are hidden."""
    done, is_known = list[str](), False
    for at, (before, whole) in enumerate(pairwise(["", *words])):
        word = whole.removeprefix("ExecStart=")
        is_program = bool(_PROGRAMS.fullmatch(PurePosixPath(word).name) and redaction.name(word))
        is_value = before.startswith("-") and "=" not in before and not IS_ALONE.fullmatch(before)
        kept = word if at == script else _show_word(word, before if is_known else "", is_program, image)
        option = before if is_known and before in _OPTIONS and not word.startswith("-") else f"word_{at + 1}"
        is_known = is_program or (is_known and (is_value or word.startswith("-") or bool(kept)))
        done.append(kept or placeholder(LONG.get(option, option)))
    return tuple(done)


def _show_word(word: str, before: str, is_program: bool, image: str) -> str:
    """Return a word before vLLM's arguments; "" if it may not be shown."""
    assigned = _ASSIGNMENT.fullmatch(word)
    name, equals, value = word.partition("=")
    if before in ("-e", "--env") and _NAME.fullmatch(word):  # the shell's variable of that name
        return word if word in VARIABLES else f"{word}={placeholder(word)}"
    if name == "--env" and _NAME.fullmatch(value):
        return word if value in VARIABLES else f"{word}={placeholder(value)}"
    if assigned and word not in _WORDS:
        option, variable, text = assigned.groups()
        kept = text if PLACEHOLDER.fullmatch(text) else redaction.variable(variable, text)
        return f"{option}{variable}={kept or placeholder(variable)}"
    if name in _OPTIONS and equals:
        return f"{name}={_show_value(value, name, image) or placeholder(name)}"
    if is_program:
        return redaction.name(word)
    is_open = redaction.is_variable(word) or PLACEHOLDER.fullmatch(word)
    is_kept = is_open or is_server(word) or word in _OPTIONS or IS_ALONE.fullmatch(word)
    return word if is_kept else _show_value(word, before, image)


def _show_value(text: str, option: str, image: str) -> str:
    """Return the value of another program's option; "" if it may not be shown."""
    is_plain = option in _OPTIONS and (_NUMBERS.fullmatch(text) or text in _WORDS)
    is_image = default(text) == image and redaction.image(text)
    return text if is_plain or is_image or PLACEHOLDER.fullmatch(text) else ""
