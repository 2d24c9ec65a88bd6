"""A parsed launch command of vLLM: its words, its options and the YAML file of --config; keyword arguments as words."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import parse_json, read_yaml
from diag.vllm.command import shell
from diag.vllm.command.container import Container
from diag.vllm.command.free_text import is_secret
from diag.vllm.command.shell import compiled, line
from diag.vllm.flags.registry import Option, known, release, understood

NOTATIONS = shell.NOTATIONS
_NUMBER = compiled(r"-\d+|-\d*\.\d+")
_SERVER = compiled(
    r"(?:\w*vllm\.)?vllm\.entrypoints\.(?:openai\.api_server|cli\.main|api_server|grpc_server)|dynamo\.vllm"
)


class Given(NamedTuple):
    """One option: its spelling, its `values` (none for a switch), and the words it takes in the command.

    `option` is None if no release has it; `words` is empty if a YAML file gives it.
    """

    spelled: str
    values: tuple[str, ...]
    option: Option | None
    words: range = range(0)

    @property
    def name(self) -> str:
        """The whole name of the flag, --tensor-parallel-size for -tp; the spelling of an unknown one."""
        return (self.option.flag.alias or self.option.flag.name) if self.option else self.spelled


def options(words: Sequence[str], start: int, version: str) -> tuple[tuple[Given, ...], list[int]]:
    """Split a command line into options; also return the places of the words that belong to no option."""
    mentions, loose, at = [], [], start
    while at < len(words):
        if not _is_option(words[at]):
            loose += [at] if words[at] != "--" else []
            at += 1
            continue

        name, joined, value = words[at].partition("=")
        option = understood(name, version)
        if re.fullmatch(r"-O\w+", name):
            joined, value = "=", name[2:]
        if name == "-O":  # a level, or JSON
            level = value if joined else "".join(words[at + 1 : at + 2])
            option = understood(f"-O{level}" if level.isdigit() else name, version)

        end = at + 1
        takes = option.flag.takes if option else "optional"
        if not joined and takes == "none" and not (option and option.key):
            end += "".join(words[end : end + 1]).lower() in ("true", "false")  # a word of its own up to 0.8
        elif not joined:
            most = len(words) if takes == "many" else min(end + 1, len(words))
            while end < most and words[end] != "--" and not _is_option(words[end]):
                end += 1
        mentions.append(Given(name, (value,) if joined else tuple(words[at + 1 : end]), option, range(at, end)))
        at = end
    return tuple(mentions), loose


def _is_option(word: str) -> bool:
    """Return True for an option as argparse sees it: no number, and no space in its name."""
    spaced = re.search(r"\s", word.partition("=")[0])
    return word.startswith("-") and word not in ("-", "--") and not spaced and not _NUMBER.fullmatch(word)


def read_config_file(file: Path) -> Mapping[str, Any]:
    """Read the keys of a --config file; BadUsage if it cannot be read or has none."""
    try:
        content = read_yaml(file)
    except OSError as error:
        raise BadUsage(f"--config {file} cannot be read: {error.strerror}") from error
    flags = [f"--{key}".replace("_", "-") in known() for key in content] if isinstance(content, dict) else []
    # nothing of a file is shown unless half of its keys are flags, written out
    if not isinstance(content, dict) or sum(flags) < len(flags) / 2:
        raise BadUsage(f"--config {file} holds no flags: expected lines such as `max-num-seqs: 64`")
    return {str(key): value for key, value in content.items()}


def is_dropped(key: str, value: Any, version: str) -> bool:
    """Return True if vLLM ignores a key: `false` from 0.9.0 to 0.27.1, since 0.31.0 under a key with underscores.

    Source: `load_config_file` of 0.11.0, 0.16.0, 0.24.0 - 0.27.1, 0.31.0 and 0.32.0.
    """
    at = release(version)
    ignored = release("0.9.0") <= at < release("0.28.0") or ("_" in key and at >= release("0.31.0"))
    return value is False and ignored


def from_file(content: Mapping[str, Any], version: str) -> tuple[Given, ...]:
    """Return the options that a --config file gives, without those that vLLM drops."""
    mentions = []
    for key, value in content.items():
        if is_dropped(key, value, version):
            continue
        flag = f"--no-{key}" if value is False else f"--{key}"
        texts = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        values = () if isinstance(value, bool) else tuple(map(str, texts))
        mentions.append(Given(flag, values, understood(flag, version)))
    return tuple(mentions)


class Command(NamedTuple):
    """A launch command: `words[:arguments]` are environment and program, the rest vLLM's; `config` is --config's file.

    `strays` are the places of words that belong to no option, `image` is the container's, and `entry` the place from
    which on words go to the image's own entry point (None: to a program that is named). `elsewhere` names the location
    of its folders if they are not on this host. `dropped` are keys of the config file whose `false` vLLM ignores.
    `more` counts later servers of the same text, where one is read. `around` holds the commands around this one
    (sh -c '...'), the outermost first, each with the place of the word that holds it; `exported` are the assignments of
    the script before it. `writing` names the notation that was read, "" for a plain command; `container` is what it
    runs in. `place` is its service, container or function, `line` that of its text (0: unknown), `branches` are the
    same server with the words of other branches of the script. `is_background` is True if the script goes on while it
    runs, `pinned` is the vLLM release that the text installs, `beside` that of the only image of vLLM that it names,
    or of its project, as `beside_by` says.
    `by_default` is the same command with the defaults of its variables, if there are any.
    `lost` is the flag of vLLM's with which the next command of the script begins, "" for another word; `path` has the
    branches of the script around it, as a Statement's, and those of the calls of its function; `absent` are variables
    in it that are empty by default, `dockerfile` is the text of which its image is built. `is_cut` is True if its
    script has more ways through its branches than are read.
    """

    words: tuple[str, ...]
    arguments: int
    environment: Mapping[str, str]
    model: str
    given: tuple[Given, ...]
    strays: tuple[int, ...] = ()
    config: str = ""
    image: str = ""
    entry: int | None = None
    elsewhere: str = ""
    dropped: tuple[str, ...] = ()
    more: int = 0
    around: tuple[tuple[tuple[str, ...], int], ...] = ()
    exported: tuple[str, ...] = ()
    writing: str = ""
    container: Container | None = None
    place: str = ""
    line: int = 0
    branches: tuple["Command", ...] = ()
    is_background: bool = False
    pinned: str = ""
    beside: str = ""
    beside_by: str = ""
    lost: str = ""
    path: tuple[tuple[int, int], ...] = ()
    by_default: tuple["Command", ...] = ()
    absent: tuple[str, ...] = ()
    dockerfile: str = ""
    is_cut: bool = False

    @property
    def by_module(self) -> bool:
        """True for `python -m vllm.entrypoints...`, which takes its model from --model only."""
        before = self.words[: self.arguments]
        return any(map(is_server, before)) and "serve" not in before

    def is_like(self, other: "Command") -> bool:
        """Return True for the same words and values, as of two branches of a script."""
        values = ([one.values for one in way.given] for way in (self, other))
        mine, others = ((one.words, one.model, one.image, one.exported) for one in (self, other))
        return mine == others and next(values) == next(values)

    def written(self) -> str:
        """Write the command in one line, with the commands around it and the variables that are exported to it."""
        text = line([*self.exported, *self.words])
        for words, place in reversed(self.around):
            outer = [line([word]) for word in words]
            outer[place] = shlex.quote(text)
            text = " ".join(outer)
        return text

    def all(self, flag: str) -> tuple[Given, ...]:
        """Return every mention of a flag; the last one counts."""
        return tuple(
            mention for mention in self.given if mention.name == flag and not (mention.option and mention.option.key)
        )

    def get(self, flag: str) -> str | None:
        """Return the value of a flag, "" for a switch, None if it is not given."""
        mentions = self.all(flag)
        return " ".join(mentions[-1].values) if mentions else None

    def keys(self, flag: str) -> Mapping[str, object]:
        """Return the keys of a flag that takes JSON, also of its dotted form; {} if the value is no JSON object."""
        keys: dict[str, object] = {}
        for mention in self.given:
            if mention.name == flag and mention.option:
                text = " ".join(mention.values)
                keys |= {mention.option.key: text} if mention.option.key else json_object(text)
        return keys

    def switched(self, flag: str) -> bool | None:
        """Return True or False for a switch; None if it is not given."""
        states = [
            mention.option.on and "".join(mention.values).lower() not in ("false", "0")
            for mention in self.all(flag)
            if mention.option
        ]
        return states[-1] if states else None


def is_server(word: str) -> bool:
    """Return True if a word is the module of vLLM's API server, or its file."""
    return bool(_SERVER.fullmatch(word)) or word.endswith("openai/api_server.py")


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; empty if the text is not one."""
    try:
        content = parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


# -- keyword arguments (Python, YAML, variables in upper case) as the words of a command line

_CAPITAL = compiled(r"(?<=[a-z0-9])(?=[A-Z])")
_MOST_BYTES = 2**20
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_RENAMED_LEVEL = "0.12.0"
"""The release from which on the key `level` of --compilation-config is called `mode`."""

_VARIABLES: Mapping[str, str] = NOTATIONS["worker"]
_EXTRA = ("VLLM_EXTRA_ARGS", "VLLM_ADDITIONAL_ARGS")
"""Variables that hold words of a command line: of RunPod's worker, and of KServe's LLMInferenceService."""
_OF_THE_WORKER = frozenset[str](NOTATIONS["worker_own"])
SAGEMAKER = "SM_VLLM_"
"""Amazon SageMaker's images of vLLM turn each variable with this prefix into a flag."""


def flag(name: str) -> str:
    """Return the flag of a keyword in snake or camel case; a name that no release has keeps its spelling."""
    dashed = "--" + _CAPITAL.sub("-", name).replace("_", "-").lower()
    return dashed if dashed in known() else f"--{name}"


def command_line(arguments: Mapping[str, Any], version: str = "") -> list[str]:
    """Return the words after `vllm serve` that set the same arguments; None sets nothing."""
    positional = [str(arguments["model"])] if arguments.get("model") else []
    rest = ((name, value) for name, value in arguments.items() if name != "model" and value is not None)
    return positional + [word for name, value in rest for word in _words(flag(name), value, version)]


def _words(name: str, value: Any, version: str) -> list[str]:
    option = known()[name].at(version) if name in known() else None
    if option and option.takes == "none" and isinstance(value, str):
        if "$" in value:
            return [f"${name[2:].replace('-', '_').upper()}"]  # on or off, which the text does not show
        lowered = value.lower()
        value = lowered in _TRUE if lowered in (*_TRUE, *_FALSE) else value
    if value is True:
        return [name] if not option or option.takes in ("none", "optional") else [name, "true"]
    if value is False:
        is_off = option and (option.no or not option.in_release(version))
        if not option or is_off:
            return [f"--no-{name[2:]}"] if is_off else [name]
        return [] if option.takes == "none" else [f"{name}=false"]
    if name == "--compilation-config" and isinstance(value, int):
        value = {"mode" if not version or release(version) >= release(_RENAMED_LEVEL) else "level": value}
    if isinstance(value, list | tuple) and option and option.takes == "many":
        return [name, *map(_text, value)]
    text = _text(value)
    return [f"{name}={text}"] if text.startswith("-") else [name, text]


def _text(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, dict | list | tuple) else str(value)


def from_variables(variables: Mapping[str, str], version: str = "") -> list[str] | None:
    """Return the words after `vllm serve` that a worker makes of its variables; None if they name no model."""
    prefixed = {name[len(SAGEMAKER) :]: value for name, value in variables.items() if name.startswith(SAGEMAKER)}
    arguments: dict[str, Any] = {}
    for name, text in (prefixed or variables).items():
        keyword = _VARIABLES.get(name, name.lower())
        is_flag = name == name.upper() and f"--{keyword}".replace("_", "-") in known()
        if text and (prefixed or (is_flag and name not in _OF_THE_WORKER and not is_secret(name))):
            arguments[keyword] = text
    if not arguments.get("model"):
        return None
    return [*command_line(arguments, version), *(word for name in _EXTRA for word in split(variables.get(name, "")))]


def unread(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are no arguments: they stay variables of the process."""
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(SAGEMAKER)
        and name not in (*_VARIABLES, *_EXTRA)
        and (is_secret(name) or name in _OF_THE_WORKER or f"--{name.lower()}".replace("_", "-") not in known())
    }


def split(value: Any) -> list[str]:
    """Return a list of words; a text is split as by a shell. BadUsage if an alias of YAML makes them very long."""
    if isinstance(value, str):
        try:
            return shlex.split(re.sub(r"\\[ \n]", " ", value))  # YAML folds a continued line to "\ "
        except ValueError:
            return value.split()
    words = [str(word) for word in value] if isinstance(value, list) else []
    if sum(map(len, words)) > _MOST_BYTES:
        raise BadUsage("a list of words has more than 1 MiB")
    return words


def serve(words: Iterable[str], environment: Mapping[str, str], image: object = None) -> str:
    """Write `vllm serve` with these words, in a container if the image is one of vLLM."""
    pairs = [f"{name}={value}" for name, value in environment.items()]
    if not isinstance(image, str) or "vllm" not in image.rpartition("/")[2].partition(":")[0]:
        return shlex.join([*pairs, "vllm", "serve", *words])
    options = [word for pair in pairs for word in ("-e", pair)]
    return shlex.join(["docker", "run", *options, "--entrypoint", "vllm", image, "serve", *words])
