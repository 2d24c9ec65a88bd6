"""Parse a launch of vLLM: the words of a shell script, and each notation of `writings` as such words."""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.vllm.command import manifests, redaction
from diag.vllm.command.command import Command, from_file, is_dropped, is_server, options, read_config_file
from diag.vllm.command.free_text import is_secret
from diag.vllm.command.manifests import Writing
from diag.vllm.command.shell import Bare, default, here_documents, statements
from diag.vllm.command.writings import EXPECTED, notation, writings
from diag.vllm.flags.registry import understood

_IMAGE = re.compile(r"(?:\S*/)?[\w.-]*vllm[\w.-]*(?::\S+|@sha256:\S+)?|\$\{?\w*vllm\w*\}?", re.IGNORECASE)
_CONTAINERS = re.compile(
    r"docker|docker-compose|podman|nerdctl|apptainer|singularity|kubectl|oc|crictl|ctr|lxc|nsenter|chroot"
)
_HOSTS = {"ssh", "pdsh", "pssh", "clush", "rsh", "mosh", "srun", "mpirun", "ansible", "salt"}
IS_ALONE = re.compile(r"-[itdP]+|--(?:rm|detach|init|privileged|interactive|tty|read-only|nv|rocm)")
"""Options of `docker run` that take no value: the word after any other option is not the image."""


class Image(NamedTuple):
    """`arguments` is the place of vLLM's first argument, None if the container starts another program.

    `entry` is the place from which on words go to the image's own entry point, None if a program is named.
    """

    name: str = ""
    arguments: int | None = None
    entry: int | None = None


def image(words: Sequence[str]) -> Image:
    """Find the image and vLLM's arguments in `docker run IMAGE ...` or `kubectl run --image=IMAGE -- ...`.

    The image's own entry point is taken for vLLM's; a program of --entrypoint gets the words after the image.
    """
    words = [default(word) for word in words]
    able = (at for at, word in enumerate(words) if _CONTAINERS.fullmatch(Path(word).name) or word.startswith("$"))
    program = next(able, len(words))
    start = (words.index("run", program) if "run" in words[program:] else len(words)) + 1
    by_option = any(word.partition("=")[0] == "--image" for word in words[start:])
    for at in range(start, len(words)):
        before, named = words[at - 1], words[at].removeprefix("--image=")
        is_option = before == "--image" or named != words[at]
        is_value = before.startswith("-") and "=" not in before and not IS_ALONE.fullmatch(before)
        if not (is_option if by_option else not is_value) or not _IMAGE.fullmatch(named):
            continue

        entry = at + 1
        if by_option:
            entry = words.index("--") + 1 if "--" in words else len(words)
        programs = [
            option.partition("=")[2] or after
            for option, after in pairwise(words[:entry])
            if option.partition("=")[0] == "--entrypoint"
        ]
        serves = words[entry : entry + 1] == ["serve"]
        if programs and not (Path(programs[-1]).name == "vllm" and serves):
            return Image(named)
        return Image(named, entry + serves, None if programs else entry)
    return Image()


def elsewhere(words: Sequence[str]) -> str:
    """Return the location of a command's folders, "in the container" or "on another host"; "" for this host."""
    names = {Path(word).name for word in words}
    in_container = any(map(_CONTAINERS.fullmatch, names))
    return "in the container" if in_container else "on another host" if names & _HOSTS else ""


MOST_BYTES = 2**20
_MOST_WORDS = 2**10
"""Words of an array, since an array may be made of arrays."""
_MOST_UNKNOWN = 100
"""Most unknown options: the search for similar flags takes some milliseconds for each."""
_MOST_SERVERS = 100
"""Servers of one text that are counted."""
_MOST_DOCUMENTS = 20
"""Here-documents of one script that are looked at."""
_ASSIGNMENT = re.compile(r"(?:--env=|-e|Environment=)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"vllm|\$\{?\w*vllm\w*\}?", re.IGNORECASE)
_SCRIPT = re.compile(r"\b(?:serve|run)\s|vllm\.entrypoints\.")
_SHELL = re.compile(r"-[a-z]*c|--(?:command|wrap)")
_RUNNERS = {"ssh", "tmux", "screen", "eval", "su", "srun", "watch", "parallel"}
_SUBSTITUTED = re.compile(r"\w+=\$\((?!\()(.*)\)", re.DOTALL)
_MENTIONS = re.compile(r"echo|printf|\w*log\w*|info|warn|p?kill|killall|pgrep|[ef]?grep|ps|trap|which|\[\[?")
"""Commands that mention a server and start none."""


def read(text: str, folder: Path = Path(), version: str = "") -> Command:
    """Parse the launch in a text, or in the file that the text names; BadUsage if it starts no server.

    The path of a --config file is relative to `folder`.
    """
    content = None if "\n" in text else _content(text)
    if content is None:
        return parse(text, version, folder)
    file = Path(text)
    if file.suffix in (".yaml", ".yml"):
        return _read_yaml(file, content, folder, version)
    return parse(content.decode("utf-8", "replace"), version, folder, file.suffix)


def read_foreign(text: str, version: str = "") -> Command:
    """Parse the launch in a text of somebody who may see no file of this host, such as an agent: none is opened."""
    found = parse(text, version)
    return found if found.elsewhere else found._replace(elsewhere="not looked at for a command from elsewhere")


def _content(name: str) -> bytes | None:
    """Return the content of a file, None if a text is no name of a file."""
    try:
        if not Path(name).is_file():
            return None
        with Path(name).open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != 36:  # a long command is no name of a file
            raise BadUsage(f"{name} cannot be read: {error.strerror}") from error
        return None
    if len(content) > MOST_BYTES or b"\0" in content:
        raise BadUsage(f"{name} is not a text file with a command")
    return content


def _read_yaml(file: Path, content: bytes, folder: Path, version: str) -> Command:
    """Parse the launch in YAML; a file for --config becomes the command with that file."""
    documents = manifests.parse(content, printable(str(file)))
    launches = tuple(manifests.containers(documents, version))
    if launches:
        return _first(launches, version, folder)
    flags = [understood(f"--{key}") for document in documents if isinstance(document, dict) for key in document]
    if manifests.is_manifest(documents) or (flags and flags.count(None) > len(flags) / 2):
        why = manifests.template(content.decode("utf-8", "replace"))
        raise BadUsage(
            f"{file}: {why}"
            if why
            else f"{file} has no container that starts vLLM, and is no file for --config: give the command itself"
        )
    command = f"vllm serve --config {shlex.quote(str(file.absolute()))}"
    return _parse_shell(command, version, folder)._replace(writing="a --config file")


def parse(text: str, version: str = "", folder: Path | None = None, suffix: str = "") -> Command:
    """Parse the launch in a text, in any notation; BadUsage if it starts no server. `suffix` is that of its file.

    Without a folder no file is opened: a command from another host names files of that host.
    """
    try:
        launches = writings(text, suffix, version)
    except BadUsage as error:
        if suffix == ".py":
            raise
        try:  # a script may hold a manifest or Python
            return _parse_shell(text, version, folder)
        except BadUsage:
            for document in here_documents(text)[:_MOST_DOCUMENTS]:  # kubectl apply -f - <<EOF
                with suppress(BadUsage):
                    if launches := writings(document, "", version):
                        return _first(launches, version, None)
            raise error from None
    if launches:
        return _first(launches, version, folder)
    return _parse_shell(text, version, folder)._replace(writing=notation(text))


def _first(launches: Sequence[Writing], version: str, folder: Path | None) -> Command:
    """Parse the first launch that starts a server, and count later ones; only Python runs on this host."""
    commands = []
    for launch in launches[:_MOST_SERVERS]:
        try:
            found = _parse_shell(launch.command, version, folder if launch.is_here else None)
        except BadUsage as failure:
            error = failure
            continue
        place = found.elsewhere or ("" if launch.is_here else "in the container")
        commands.append(found._replace(writing=launch.name, pod=launch.pod, elsewhere=place))
    if not commands:
        raise error
    return commands[0]._replace(more=sum(1 + command.more for command in commands) - 1)


def _parse_shell(
    text: str, version: str, folder: Path | None, variables: Mapping[str, str] = MappingProxyType({})
) -> Command:
    """Parse the command in a script that runs with these variables."""
    commands: list[list[str]] = []
    arrays: dict[str, list[str]] = {}
    for name, words in statements(text):
        filled = [part for word in words for part in arrays.get(word, [word])]
        if name and _serve_end(words) is None:
            use = f"${{{name.removesuffix('+')}[@]}}"
            arrays[use] = [*(arrays.get(use, []) if name.endswith("+") else []), *filled][:_MOST_WORDS]
        elif filled and not _MENTIONS.fullmatch(filled[0]):  # an array may be a command itself
            commands.append(filled)

    environment, plain = {**variables}, dict(_plain(variables))
    exported: dict[str, str] = {}
    for at, words in enumerate(commands):
        filled = []
        for word in words:  # a shell splits unquoted variables: ARGS="--a 1"; ... $ARGS
            value = _expand(word, plain) if isinstance(word, Bare) else ""
            filled += value.split() if " " in value and "$" not in value else [word]
        found = _find_server(filled, environment, folder, version)
        if found:
            rest = commands[at + 1 :]
            later = sum(_serve_end(words) is not None or image(words).arguments is not None for words in rest)
            is_far = found.around and found.elsewhere
            passed_on = () if is_far else tuple(f"{name}={value}" for name, value in exported.items())
            return found._replace(more=later, exported=(*passed_on, *found.exported))
        assigned = _assignments(filled)
        environment |= assigned
        for variable in assigned:
            plain.pop(variable, None)
        plain |= _plain(assigned)
        is_unit = any(word.startswith("Environment=") for word in filled)
        if is_unit or filled[:1] in (["export"], ["declare"], ["typeset"]):
            exported |= assigned
    raise BadUsage(f"no command that starts a vLLM server: {EXPECTED}")


def _find_server(
    words: Sequence[str], environment: Mapping[str, str], folder: Path | None, version: str
) -> Command | None:
    """Return the server that a command of a script starts, itself or by a script in one of its words: sh -c '...'."""
    start = _serve_end(words)
    inner, at = "", 0  # the script that another shell, perhaps on another host, runs, and the place of its word
    runs = any(Path(word).name in _RUNNERS for word in words)
    for place, (before, word) in enumerate(pairwise(["", *words]) if start is None else ()):
        substituted = _SUBSTITUTED.fullmatch(word)
        script = substituted[1] if substituted else word if runs or _SHELL.fullmatch(before) else ""
        if re.search(r"\s", script) and _SCRIPT.search(script) and "vllm" in script.lower():
            inner, at = script, place
            break

    contained = _find_image(words, environment)
    if inner:
        location = elsewhere(words)
        try:
            found = _parse_shell(inner, version, None if location else folder, _assignments(words))
        except BadUsage:
            return None
        return found._replace(
            environment={**environment, **_assignments(words), **found.environment},
            image=found.image or contained.name,
            elsewhere=found.elsewhere or location,
            around=(*([(tuple(words), at)] if inner == words[at] else []), *found.around),
        )
    if start is None and words and words[0].startswith("-") and understood(words[0].partition("=")[0]):
        start = 0  # nothing but vLLM's own flags
    start = contained.arguments if start is None else start
    if start is None:
        return None
    return _command(words, start, {**environment, **_assignments(words[:start])}, folder, version)


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that words set: NAME=value, export NAME=value, -e NAME=value, a unit's Environment=."""
    found = (_ASSIGNMENT.fullmatch(word) for word in words)
    return {assignment[1]: assignment[2] for assignment in found if assignment and assignment[1] != "ExecStart"}


def _find_image(words: Sequence[str], environment: Mapping[str, str]) -> Image:
    if not any("$" in word or _CONTAINERS.fullmatch(Path(word).name) for word in words):
        return Image()
    return image(filled_in(words, {name: default(value) for name, value in environment.items()}))


def _serve_end(words: Sequence[str]) -> int | None:
    """Return the place after `vllm serve` or vLLM's module; None if there is neither."""
    for at, word in enumerate(words):
        after = words[at + 1] if at + 1 < len(words) else ""
        if _PROGRAM.fullmatch(Path(word).name) and after == "serve":
            return at + 2
        if is_server(word):
            return at + 2 if after == "serve" else at + 1
    return None


def _command(
    words: Sequence[str], start: int, environment: Mapping[str, str], folder: Path | None, version: str
) -> Command:
    filled = filled_in(words, environment)
    given, loose = options(filled, start, version)
    if sum(option.option is None for option in given) > _MOST_UNKNOWN:
        raise BadUsage(f"more than {_MOST_UNKNOWN} options of the command are none of vLLM's: {EXPECTED}")
    contained, place = _find_image(words, environment), elsewhere(words[:start])
    config = next((option.values[0] for option in given if option.name == "--config" and option.values), "")
    is_here = folder is not None and config and "$" not in config and not place
    content: Mapping[str, Any] = {}
    try:
        if folder is not None and is_here:
            content = read_config_file(folder / config)
    except BadUsage:
        if redaction.name(config):
            raise
        # the name may be a secret, and the error has it
        raise BadUsage("the --config file cannot be read, or holds no flags") from None
    command = Command(
        words=tuple(words),
        arguments=start,
        environment=environment,
        model="",
        given=(*from_file(content, version), *given),  # the command line counts more
        config=config,
        image=contained.name,
        entry=contained.entry,
        elsewhere=place,
        dropped=tuple(key for key, value in content.items() if is_dropped(key, value, version)),
    )
    takes_one = bool(loose) and not any(option.words for option in command.all("--model"))
    named = filled[loose[0]] if takes_one else command.get("--model") or ""
    return command._replace(model=named, strays=tuple(loose[takes_one:]))


def filled_in(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Fill in the variables that the text itself sets."""
    plain = _plain(environment)
    return [_expand(word, plain) for word in words]


def _plain(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that the text sets to a plain value; a secret stays $NAME, as do all others."""
    return {
        name: value
        for name, value in environment.items()
        if "$" not in value and "`" not in value and not is_secret(name)
    }


def _expand(word: str, plain: Mapping[str, str]) -> str:
    filled = re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: plain.get(found[1] or found[2], found[0]), word)
    return word if filled == word else filled  # an unchanged Bare stays one
