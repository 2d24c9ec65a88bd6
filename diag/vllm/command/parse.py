"""Parse a launch of vLLM: the words of a shell script, and each notation of `writings` as such words."""

import operator
import re
import shlex
import textwrap
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, compress, groupby, islice, pairwise, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from diag.core.errors import BadUsage, NoLaunch, Unfollowed
from diag.core.formatting import printable
from diag.vllm.command import manifests, redaction
from diag.vllm.command.branches import OWN_OPTIONS, usual_ways
from diag.vllm.command.charts import filled, overlaid
from diag.vllm.command.command import NOTATIONS, Command, from_file, is_dropped, is_server, options, read_config_file
from diag.vllm.command.container import IS_ALONE, Container, inner, read_run, run_place
from diag.vllm.command.dockerfile import (
    GUIDES,
    STARTS_SCRIPT,
    built,
    called,
    text_of,
    unbuilt,
    with_config,
    with_scripts,
)
from diag.vllm.command.free_text import is_secret
from diag.vllm.command.manifests import Writing
from diag.vllm.command.modules import with_constants
from diag.vllm.command.settings import with_env_files, with_settings
from diag.vllm.command.shell import (
    LONGEST,
    MOST_DOCUMENTS,
    Bare,
    Statement,
    default,
    filled_templates,
    here_documents,
    is_default,
    line,
    otherwise,
    recipes,
    statements,
)
from diag.vllm.command.writings import EXPECTED, notation, writings
from diag.vllm.flags.registry import release, understood, versions

_IMAGE = re.compile(
    r"(?i)(?:\S*/)?[\w.-]*vllm[\w.-]*(?::(?:\$\{[^{}]*\}|\$(?!\{)|[^\s$])+|@sha256:\S+)?|\$\{?\w*vllm\w*\}?"
)
_OTHER_IMAGE = re.compile(r"[\w.-]+(?:/[\w-][\w.-]*)+(?::[\w.-]+)?")
_CONTAINERS = re.compile(NOTATIONS["patterns"]["parse_containers"])
_PROGRAM_WORD = re.compile(NOTATIONS["patterns"]["parse_program_word"])
_HOSTS = {"ssh", "pdsh", "pssh", "clush", "rsh", "mosh", "srun", "mpirun", "ansible", "salt"}


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
    ran = run_place(words, program)
    start = (len(words) if ran is None else ran) + 1
    by_option = any(word.partition("=")[0] == "--image" for word in words[start:])
    for at in range(start, len(words)):
        before, named = words[at - 1], words[at].removeprefix("--image=")
        is_option = before == "--image" or named != words[at]
        is_value = before.startswith("-") and "=" not in before and not IS_ALONE.fullmatch(before)
        if not (is_option if by_option else not is_value):
            continue
        if not _IMAGE.fullmatch(named):
            if not by_option and _OTHER_IMAGE.fullmatch(named):
                return Image()
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
        first, then, module = [*words[entry : entry + 3], "", "", ""][:3]
        is_own = Path(named.partition(":")[0]).name == "vllm-openai" and not programs and not by_option
        if is_own and then == "-m" and is_server(module):  # words for the image's own entry point, which refuses them
            return Image(named, entry + 3, entry)
        if _PROGRAM_WORD.fullmatch(first) or (then == "serve" and not _PROGRAM.fullmatch(Path(first).name)):
            return Image(named)  # as `dynamo serve ...`
        is_idle = not (words[entry:] or programs or by_option or "vllm-openai" in named)  # what it starts is unknown
        if is_idle or (programs and not (Path(programs[-1]).name == "vllm" and serves)):
            return Image(named)
        return Image(named, entry + serves, None if programs else entry)
    return Image()


def elsewhere(words: Sequence[str]) -> str:
    """Return the location of a command's folders, "in the container" or "on another host"; "" for this host."""
    names = {word.rpartition("/")[2] for word in words}
    in_container = any(map(_CONTAINERS.fullmatch, names))
    return "in the container" if in_container else "on another host" if names & _HOSTS else ""


MOST_BYTES = 2**20
MOST_NOTEBOOK = 2**24
"""Bytes of a notebook with its outputs, such as pictures, which are dropped before MOST_BYTES is applied."""
_OUTPUTS = re.compile(rb'(?m)^([ ]{0,16})("(?:outputs|attachments|widgets)": )[\[{]\r?\n(?:\1[ ].*\n)*+\1[\]}]')
_MOST_WORDS = 2**10
"""Words of an array, since an array may be made of arrays."""
MOST_ARGUMENTS = 10_000
"""Words of a launch: every rule of lint reads all of them."""
_MOST_UNKNOWN = 100
"""Most unknown options: the search for similar flags takes some milliseconds for each."""
_ARGUMENTS = re.compile(NOTATIONS["patterns"]["parse_arguments"])
_MOST_SERVERS = 100
"""Servers of one text that are counted."""
_ASSIGNMENT = re.compile(r"(?:--env=|-e|Environment=)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?:\w+_)?vllm|\$\{?\w*vllm\w*\}?", re.IGNORECASE)
_SCRIPT = re.compile(r"\b(?:serve|run)\s|vllm\.entrypoints\.|dynamo\.vllm\s")
_HELD = re.compile(NOTATIONS["patterns"]["parse_held"])
_SHELL = re.compile(r"-[a-z]*c|--(?:command|wrap)")
_PINNED = re.compile(NOTATIONS["patterns"]["parse_pinned"])
_AT_LEAST, _REMARK = re.compile(r"\bvllm(?:\[[\w,-]+\])?>="), re.compile(r"(?m)^[ \t]*#.*$")
_ADMITTED = re.compile(NOTATIONS["patterns"]["parse_admitted"])
_COMPARED = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "!=": operator.ne}
_RANGE = re.compile(NOTATIONS["patterns"]["parse_range"])
_BY_NAME = re.compile(NOTATIONS["patterns"]["parse_by_name"])
_IS_DOCKERFILE = re.compile(r"(?m)^ENTRYPOINT[ \t]")
_OF_ITS_IMAGE = re.compile(r"(?m)^FROM[ \t]+\S*vllm/vllm-|^[ -]*image:[ \t]*[\"']?\S*vllm[\w.-]*:")
_ENV_DEFAULT = re.compile(r"\bos\.(?:environ\.get|getenv)\(\s*[\"']\w+[\"'],\s*([\"'][^\"'\n]*[\"'])\s*\)")
_BUILT = re.compile(NOTATIONS["patterns"]["parse_built"])
_TAGGED = re.compile(NOTATIONS["patterns"]["parse_tagged"])
_BLOCK = re.compile(r"^([ \t]*```)[ \t]*([\w-]*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(NOTATIONS["patterns"]["parse_directive"])
_INSTALLS_ANY = re.compile(NOTATIONS["patterns"]["parse_installs_any"])
_INSTALLING: Sequence[str] = NOTATIONS["installing"]
_INLINE = re.compile(r"^[^`\n]*```([^`\n]{9,})```", re.MULTILINE)
_MORE = re.compile(r"(?<!\S)(?:\.\.\.|…)(?!\S)")
_TREE = re.compile(r"^(?:.*[├└│]|[^#\n]*→).*$", re.MULTILINE)
"""A line of a drawing of folders, of parts or of steps."""
_INDENTED = re.compile(NOTATIONS["patterns"]["parse_indented"])
_OTHER_ENGINE = re.compile(NOTATIONS["patterns"]["parse_other_engine"])
_VALUES = "a container of Helm values"
_DETACHED = frozenset({"-d", "--detach", "-itd", "-dit"})
_WITH_A_NAME = 3
"""Words of `docker stop NAME`; a function that ends servers may have none."""
_ENDS = re.compile(NOTATIONS["patterns"]["parse_ends"])
_OF_VLLM = re.compile(r"^[ \t>]*(?:from|import) vllm\b", re.MULTILINE)
_HEADER = re.compile(r"(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\(\)[ \t]*\{?[ \t]*$")
_JOB_GPUS = re.compile(NOTATIONS["patterns"]["parse_job_gpus"])
_JOB_NODES = re.compile(r"^#SBATCH\s+(?:--nodes[= ]|-N ?)(\d{1,4})", re.MULTILINE)
_RUNTIME = re.compile(r"^[ \t]*kind: (?:Cluster)?ServingRuntime\b", re.MULTILINE)
_SERVICE = re.compile(r"^[ \t]*kind: InferenceService\b[\s\S]*^[ \t]*runtime: ", re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_PATH = re.compile(r"\$(?:\w+|\{\w+\})(?:/[\w.-]+)+|(?:/[\w.-]+)+/\$(?:\w+|\{\w+\})")
"""A folder whose root, or whose name, the text does not show."""
_SET = re.compile(r"(?m)^(?:export |readonly )?([A-Z_]\w*)=[\"']?([\w./:@-]+|\$\{\w+:-[\w./:@-]*\})[\"']?[ \t]*$")
"""A variable that a script sets, and its here-documents may name."""
_CALL = re.compile(r"\$\(([\w-]+)\)")
_LONGEST_OUTPUT = 256
_NAME = re.compile(r"\w+")
_VARIABLE_WORD = re.compile(r"\$(?:\{(\w+):?-\}|\{?(\w+)\}?)")
_GIVEN_IF = re.compile(r"\$\{(\w+):?\+((?:[^{}$`]|\$\w|\$\{\w+(?::?-[^{}$`]*)?\})*)\}")
_TARGET = re.compile(r"[A-Za-z][^\n=]*:(?!=)")
_PRINTED = re.compile(r"\$\(\s*\[[^\n]{0,300}?\becho\b[^\n]{0,200}\)")
_ARRAY_USE = re.compile(r"\$\{(\w+)\[[@*]\](?::?[+-].*)?\}", re.DOTALL)
_WITHIN = re.compile(r"\"?\$\{(\w+)\[[@*]\](?:@Q)?\}\"?")
_ADDED, _IS_COMMAND = re.compile(r"([A-Za-z_]\w*)\+="), re.compile(r"vllm|^\s*--?[a-zA-Z]")
_USED_ARRAY = re.compile(r"\{(\w+)\[")
_WITH_DEFAULT = re.compile(r"\$\{(\w+):-(?:[^{}$]|\$\w|\$\{\w+\})*\}")
_MOST_BRANCHES = 8
_APPTAINER = re.compile(r"(?:\S*/)?(?:apptainer|singularity)")
_OF_APPTAINER = re.compile(r"(?:APPTAINER|SINGULARITY)ENV_(\w+)")
_MOST_STEPS = 25_000
"""Commands of all ways through the branches of a script, together: its usual way is always read."""
_WINDOWS = {"powershell": ".ps1", "pwsh": ".ps1", "ps1": ".ps1", "bat": ".bat", "cmd": ".bat"}
"""Languages of code blocks in which ` or ^ continues a line."""
_OTHERS: Mapping[str, str] = NOTATIONS["servers"]
_OTHER = re.compile("|".join(_OTHERS), re.IGNORECASE)
_RUNNERS = frozenset[str](NOTATIONS["runners"])
_DECLARING = ("export", "declare", "typeset", "readonly", "local", "set", "setenv", "if", ":")
_SUBSTITUTED = re.compile(r"\w+=\$\((?!\()(.*)\)", re.DOTALL)
_ENGINE = re.compile(NOTATIONS["patterns"]["parse_engine"])
_ARGUMENT = re.compile(r"\$(?:([1-9])\b|\{([1-9])(:?-[^{}]*)?\}|\{?[@*]\}?)")
_EXPORTED = re.compile(r"^[ \t]*export[ \t]+([A-Z_]\w*=[\w./:@-]+)[ \t]*$", re.MULTILINE)
_DEEPEST = 3
"""Functions within each other that are followed."""
_DEEPEST_SCRIPT = 8
"""Scripts in a word of another, sh -c '...', that are followed."""
_HELP = re.compile(r"(--help|-h)(=|$)|\$\{?(\w*_)?help(_\w+)?\}?$", re.IGNORECASE)
_MENTIONS = re.compile(NOTATIONS["patterns"]["parse_mentions"])


def read(text: str, folder: Path = Path(), version: str = "") -> Command:
    """Parse the first launch in a text, or in the file that the text names; BadUsage if it starts no server."""
    return _first(read_all(text, folder, version))


def parse(text: str, version: str = "", folder: Path | None = None, suffix: str = "") -> Command:
    """Parse the first launch in a text, as `parse_all` does."""
    return _first(parse_all(text, version, folder, suffix))


def _first(commands: Sequence[Command]) -> Command:
    return commands[0]._replace(more=len(commands) - 1)


def read_all(text: str, folder: Path = Path(), version: str = "") -> tuple[Command, ...]:
    """Parse every launch in a text, or in the file that the text names; BadUsage if it starts no server.

    The path of a --config file is relative to `folder`.
    """
    content = None if "\n" in text else _content(text)
    if content is None:
        return parse_all(text, version, folder)
    file = Path(text)
    for name, use in (("locals.tf", b"local."), ("variables.tf", b"var.")) if file.suffix == ".tf" else ():
        content += b"\n" + (_content(str(file.with_name(name))) or b"") if file.name != name and use in content else b""
    text = filled(with_settings(content.decode("utf-8-sig", "replace").replace("\r\n", "\n"), file), file)
    text, is_of_unit = called(with_config(with_constants(with_scripts(text, file), file), file), file)
    is_yaml = file.suffix in (".yaml", ".yml")

    def parsed(text: str) -> tuple[Command, ...]:
        return _read_yaml(file, text, folder, version) if is_yaml else parse_all(text, version, folder, file.suffix)

    other = otherwise(text) if is_yaml or file.suffix == ".j2" else text
    others: tuple[Command, ...] = ()
    with suppress(BadUsage):
        others = parsed(other) if other != text else ()
    try:
        try:
            started = parsed(text)
            places = [one.place for one in started]
            able = {other.place: other for other in others if places.count(other.place) == 1}
            ways = [(one, able.get(one.place, one)) for one in started]  # with the other branches of a template
            started = tuple(
                one if one.is_like(way) else one._replace(branches=(*one.branches, way)) for one, way in ways
            )
        except NoLaunch:
            if not (started := others):
                raise
    except NoLaunch:
        program = STARTS_SCRIPT.search(text) if "vllm" in text else None
        is_vllms = _OF_ITS_IMAGE.search(text)
        if not program and not (is_vllms and _IS_DOCKERFILE.search(text)):
            raise
        name = (redaction.name(program[1]) if program else "") or "a program"
        is_beside = program and is_existing(str(file.with_name(Path(program[1]).name)))
        lacks = "itself starts no vLLM: lint what it starts" if is_beside else "is not beside the file: lint the script"
        raise (Unfollowed if is_vllms else NoLaunch)(f"{file}: a container starts {name}, which {lacks}") from None
    unit, last = "a script of a systemd unit" * is_of_unit, content.count(b"\n") + 1  # a loop may be more lines now
    started = tuple(one._replace(line=min(one.line, last), writing=one.writing or unit) for one in started)
    unnamed = [not (one.image or one.pinned or one.beside) for one in started]
    if is_yaml or not any(unnamed) or _INSTALLS_ANY.search(text):
        return started
    project, by = _of_project(file.absolute())
    pairs = zip(started, unnamed, strict=True)
    return tuple(one._replace(beside=project, beside_by=by) if is_unnamed else one for one, is_unnamed in pairs)


def _of_project(file: Path) -> tuple[str, str]:
    """Return the release of vLLM that the files of a project beside a launch, or in the folder above, install."""
    for folder in (file.parent, file.parent.parent):
        texts = {name: text for name in _INSTALLING if (text := text_of(folder / name)) and "vllm" in text}
        last_first = [*reversed(texts.items())]
        named = ((next(filter(None, _named(text)), ""), f"named by {name}") for name, text in last_first)
        releases = {one: by for one, by in named if one}
        for name, text in () if releases else last_first:  # the newest known one in a range with an upper end
            ranges = {one[1] for one in islice(_ADMITTED.finditer(_REMARK.sub("", text)), MOST_DOCUMENTS)}
            bounds = re.findall(r"([<>!]=?)\s*(\d+(?:\.\d+)*)", ranges.pop()) if len(ranges) == 1 else []
            has_end = any(sign[0] == "<" for sign, _ in bounds)
            for version in reversed(versions() if has_end else ()):
                if all(_COMPARED[sign](release(version), release(f"{end}.0")) for sign, end in bounds):
                    releases[version] = f"the newest of the range in {name}"
                    break
        if releases or (folder / ".git").exists():
            return next(iter(releases.items())) if len(releases) == 1 else ("", "")
    return "", ""


def read_foreign(text: str, version: str = "") -> Command:
    """Parse the launch in a text of somebody who may see no file of this host, such as an agent: none is opened."""
    return unopened(parse(text, version))


def unopened(command: Command) -> Command:
    """Mark a command as somebody's who may see no file of this host."""
    return command._replace(elsewhere=command.elsewhere or "not looked at for a command from elsewhere")


def is_existing(text: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(text).is_file()
    return False


def _content(name: str) -> bytes | None:
    """Return the content of a file, None if a text is no name of a file."""
    try:
        if not Path(name).is_file():
            return None
        with Path(name).open("rb") as opened:
            content = opened.read((MOST_NOTEBOOK if name.endswith(".ipynb") else MOST_BYTES) + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != 36:  # a long command is no name of a file
            raise BadUsage(f"{name} cannot be read: {error.strerror}") from error
        return None
    content = without_outputs(name, content)
    if len(content) > MOST_BYTES:
        rest = " without its outputs" if name.endswith(".ipynb") else ""
        raise BadUsage(f"{name} cannot be read: it is larger than {MOST_BYTES // 2**20} MiB{rest}")
    if b"\0" in content:
        raise BadUsage(f"{name} is not a text file with a command")
    return content


def without_outputs(name: str, content: bytes) -> bytes:
    """Return a notebook that is too large without the outputs of its cells, which begin and end on lines of their own.

    The content of any other file, and of a notebook beyond its own bound, stays.
    """
    is_large = name.endswith(".ipynb") and MOST_BYTES < len(content) <= MOST_NOTEBOOK
    return _OUTPUTS.sub(rb"\1\2[]", content) if is_large else content


def _read_yaml(file: Path, text: str, folder: Path, version: str) -> tuple[Command, ...]:
    """Parse the launches in YAML; a file for --config becomes the command with that file."""
    documents = manifests.parse(text, printable(str(file)))
    if "$modelSpec.vllmConfig" in text:
        raise NoLaunch(f"{file} is a template of the production stack: lint its values")
    documents = built(with_env_files(overlaid(documents, file), file), file)
    others = [*manifests.above(file, text), *manifests.beside(file, text)]
    read = manifests.containers(documents, version, others)
    launches = manifests.templated(read, text)
    runtimes = [inner(one, "metadata") for one in others if "ServingRuntime" in manifests.kind(one)]
    named = [re.escape(str(about.get("name"))) for about in runtimes]
    able = [re.search(rf"runtime: *[\"']?{name}[\"'\s,}}]", text) for name in named]
    text += "".join(f"\n{about}" for about, used in zip(runtimes, able, strict=True) if used)  # with the release
    if launches:
        return _commands(launches, version, folder, text)
    keys = [pair for document in documents if isinstance(document, dict) for pair in document.items()]
    options = [(key, value, understood(f"--{key}")) for key, value in keys if key != "config"]
    flags = sum(
        option is not None
        and option.flag.name == f"--{str(key).replace('_', '-').removeprefix('no-')}"
        and (not isinstance(value, dict) or option.flag.value in ("json", "object"))
        for key, value, option in options
    )  # what a --config file may have
    if manifests.is_manifest(documents) or text.isspace() or flags * 2 < len(keys):
        for name, words in unbuilt(documents, file):
            is_vllms = sum(word.startswith("--") and bool(understood(word)) for word in words[:MOST_ARGUMENTS]) > 1
            told = (
                f"what the service {redaction.name(name)} starts cannot be told: its Dockerfile is not beside the file"
            )
            raise (Unfollowed if is_vllms else NoLaunch)(f"{file}: {told}")
        why = manifests.template(text) if manifests.is_hidden(documents) else ""
        none = "has no container that starts vLLM, and is no file for --config: give the command itself"
        raise (BadUsage if why else NoLaunch)(f"{file}: {why}" if why else f"{file} {none}")
    command = f"vllm serve --config {shlex.quote(str(file.absolute()))}"
    return tuple(one._replace(writing="a --config file") for one in _parse_shell(command, version, folder))


def parse_all(text: str, version: str = "", folder: Path | None = None, suffix: str = "") -> tuple[Command, ...]:
    """Parse every launch in a text, in any notation; BadUsage if it starts no server. `suffix` is that of its file.

    Without a folder no file is opened: a command from another host names files of that host.
    """
    if suffix in GUIDES:
        return _from_guide(_fenced(text) if suffix == ".rst" else text, version)
    if suffix in _WINDOWS.values():
        text = re.sub(r"[ \t][`^][ \t]*\n", " \\\n", re.sub(r"(?<=[\w:])\\(?=\w)", "/", text))  # C:\models
    if suffix not in (".py", ".ipynb", ".json") and _ENGINE.search(text) and not manifests.is_yaml(text):
        text = filled_templates(text)
    targets = list[int]()
    if suffix in ("", ".mk") and manifests.is_makefile(text):
        targets = [at for at, written in enumerate(text.split("\n"), 1) if _TARGET.match(written)]
        text = recipes(text)
    refused: BadUsage | None = None
    try:
        launches = writings(text, suffix, version)
    except BadUsage as error:
        if suffix == ".py":
            raise
        launches, refused = (), None if suffix == ".toml" else error  # a script may hold a manifest or Python
    if launches:
        return _commands(launches, version, folder, text)
    if suffix == ".j2":  # with the keys of a YAML
        text = filled_templates(text)
    try:
        servers = [one._replace(writing=notation(text)) for one in _parse_shell(text, version, folder)]
        ways = [((0, bisect_right(targets, one.line)),) * bool(targets) for one in servers]  # which target is made
        return tuple(one._replace(path=(*way, *one.path)) for one, way in zip(servers, ways, strict=True))
    except BadUsage as error:
        refused = refused or error
    commands: list[Command] = []
    variables = {name: value for name, value in _SET.findall(text) if not is_secret(name)}
    for document in here_documents(text):  # kubectl apply -f - <<EOF
        with suppress(BadUsage):
            if re.match(r"\s*(?:#!|set -[a-z]*e)", document) or notation(document):  # cat >run.sh <<EOF
                started = _parse_shell(document, version, None, variables)
                commands += [one._replace(writing=notation(document), pinned=_named(text)[0]) for one in started]
            else:
                commands += _commands(writings(_expand(document, variables), "", version), version, None, text)
    if not commands:
        raise refused
    return tuple(commands)


def _fenced(text: str) -> str:
    """Write the code blocks of reStructuredText as those of Markdown, on the same lines."""

    def fence(block: re.Match[str]) -> str:
        body = re.sub(r"^[ \t]+:[\w-]+:.*$", "", block[3], flags=re.MULTILINE).rstrip()
        lost = block[3].count("\n") - body.count("\n") - 1
        return f"```{block[2]}\n{body}\n```" + "\n" * max(1, lost)

    return _DIRECTIVE.sub(fence, text)


def _from_guide(text: str, version: str) -> tuple[Command, ...]:
    """Parse the code blocks of a guide; a server in several of them is one in each."""
    commands: list[Command] = []
    blocks = [(block.start(3), block[2].lower(), block[3]) for block in _BLOCK.finditer(text)]
    blocks += [(block.start(1), "", block[1]) for block in _INLINE.finditer(text)]
    if "```" not in text:
        blocks += [(block.start(1), "", block[1]) for block in _INDENTED.finditer(text)]
    pinned, beside = _named(text)
    is_other = _OTHER_ENGINE.search(text) and not _OF_VLLM.search(text)
    exports: dict[str, str] = {}
    runtime, taken = "", slice(0)  # a ServingRuntime, and its launches, of which an InferenceService makes a server
    for start, language, block in sorted(blocks):
        before, text_of_block = text.count("\n", 0, start), textwrap.dedent(block)
        is_joined = bool(runtime and _SERVICE.search(block))
        if is_joined:
            text_of_block = f"{runtime}\n---\n{text_of_block}"
        suffix = {"python": ".py", "py": ".py", "json": ".json", **_WINDOWS}.get(language, "")
        if manifests.template(block):
            continue
        if is_other and "LLM(" in block and "vllm" not in block:
            continue
        if re.match(r"\s*(?:#.*\s+)*(?:docker|podman|vllm|python3?|exec|nohup|uv)\s", text_of_block):
            used = [pair for name, pair in exports.items() if re.search(rf"\$\{{?{name}\b", block)]
            text_of_block = "".join(f"export {pair}; " for pair in used) + text_of_block.lstrip("\n")
        exports |= {pair.partition("=")[0]: pair for pair in _EXPORTED.findall(block)}
        text_of_block = text_of_block if suffix == ".py" else _MORE.sub("$MORE", _TREE.sub("", text_of_block))
        with suppress(BadUsage):
            started = parse_all(text_of_block, version, None, suffix)
            # flags alone explain a command, and values without a model, or JSON, a chart or a client
            started = tuple(
                one
                for one in started
                if one.arguments or one.writing
                if one.writing != _VALUES or not (language.startswith("json") or one.model.startswith("$"))
                if one.model or one.given or one.image or one.writing
            )
            lines = [before + (1 if is_joined else max(1, one.line)) for one in started]
            if is_joined:
                del commands[taken]
                runtime, taken = "", slice(0)
            elif _RUNTIME.search(block):
                runtime, taken = text_of_block, slice(len(commands), len(commands) + len(started))
            pairs = zip(started, lines, strict=True)
            way = (0, start)  # servers of two blocks are alternatives
            commands += [one._replace(line=line, beside=beside or pinned, path=(way, *one.path)) for one, line in pairs]
    if not commands:
        raise NoLaunch(f"no code block starts a vLLM server: {EXPECTED}")
    return tuple(commands[:_MOST_SERVERS])


def _commands(launches: Sequence[Writing], version: str, folder: Path | None, text: str) -> tuple[Command, ...]:
    """Parse the launches that start a server; only Python runs on this host."""
    commands: list[Command] = []
    lines = text.splitlines()
    error = NoLaunch(f"no command that starts a vLLM server: {EXPECTED}")
    for launch in launches[:_MOST_SERVERS]:
        try:
            if launch.suffix:
                started = parse_all(launch.command, version, None, launch.suffix)
            elif launch.name == manifests.SCRIPT and "<<" in launch.command:
                started = parse_all(launch.command, version, None, ".sh")
            else:
                started = _parse_shell(launch.command, version, folder if launch.is_here else None)
        except BadUsage as failure:
            if not isinstance(failure, NoLaunch) and launch.name != manifests.SCRIPT:
                raise
            error = failure if isinstance(failure, NoLaunch) else error
            continue
        quoted, taken = rf"[\"']?{re.escape(launch.place)}[\"']?", {command.line for command in commands}
        named = re.compile(rf"[ ]*(?:-?[ {{]*name *[:=] *{quoted}(?![\w-])|{quoted}:)")
        naming = (at for at, row in enumerate(lines if launch.place else (), 1) if at not in taken and named.match(row))
        line = launch.line or next(naming, 0)
        pinned, beside = _named(launch.dockerfile or text)
        for command in started:
            box = launch.container or command.container
            if launch.name == manifests.SCRIPT:  # of a host, which starts a container
                box = command.container or box
            # vLLM's image has its wheel, unless the container's own command installs another one
            has_wheel = box is not None and box.kind != "image" and command.image.startswith("vllm/")
            commands.append(
                command._replace(
                    writing=launch.name,
                    container=box,
                    place=launch.place or command.place,
                    line=line,
                    elsewhere=command.elsewhere or ("" if launch.is_here else "in the container"),
                    pinned=command.pinned or ("" if has_wheel else pinned),
                    beside=command.beside or beside,
                    dockerfile=launch.dockerfile,
                )
            )
    if not commands:
        raise error
    return tuple(commands)


@lru_cache(maxsize=4)
def _named(text: str) -> tuple[str, str]:
    """Return the release of vLLM that a text installs, and that of an image in it; "" for none or several."""
    text = _ENV_DEFAULT.sub(r"\1", _REMARK.sub("", text) if _AT_LEAST.search(text) else text)
    if "docker pull" in text and _INSTALLS_ANY.search(text):  # what is installed is not what is pulled
        text = re.sub(r"docker pull[^\n]*", "", text)
    for name in sorted({"".join(names) for names in _BY_NAME.findall(text)})[:MOST_DOCUMENTS]:
        assigned = rf"^[ \t]*(?:[A-Za-z]+[ \t]+)?{name} *(?:: *\w+ *)?:?= *[\"']?(?:\$\{{{name}:-)?v?(\d+\.\d+\.\d+)\b"
        if value := re.search(assigned, text, re.MULTILINE):
            text = re.sub(rf"(vllm==|vllm-openai:v)\$?\{{+{name}\}}+", rf"\g<1>{value[1]}", text)
    images = {"".join(groups) for groups in _TAGGED.findall(text)}
    built = _BUILT.findall(text) if "vllm-project/vllm" in text else ()
    wheels = {*_PINNED.findall(text), *("".join(names) for names in built)}
    wheels |= {f"{first}.{low}.0" for first, low, high in _RANGE.findall(text) if int(high) == int(low) + 1}
    if images and wheels and images != wheels:
        return "", ""  # several servers, or a step between releases
    pinned, beside = (found.pop() if len(found) == 1 else "" for found in (wheels, images))
    return pinned, beside


def _parse_shell(
    text: str, version: str, folder: Path | None, variables: Mapping[str, str] = MappingProxyType({}), depth: int = 0
) -> tuple[Command, ...]:
    """Parse the servers that a script, the word of `depth` others, starts with these variables; BadUsage for none."""
    steps, functions, ways, is_cut = _script(text, tuple(variables.items()))
    servers: dict[int, list[Command]] = {}
    ran = (server for way, others in ways for server in _run(way, version, folder, variables, others, depth))
    for at, command in takewhile(lambda _: len(servers) < _MOST_SERVERS, ran):
        if not any(map(command.is_like, servers.setdefault(at, []))):
            servers[at].append(command)
    if not servers:
        held = [(step.line, text) for step in steps for text in _assignments(step.words).values() if _HELD.match(text)]
        if held:  # CMD="vllm serve m"; start "$CMD"
            started = ((line, _parse_shell(text.strip(), version, folder)) for line, text in held[:_MOST_SERVERS])
            return tuple(each._replace(line=line) for line, commands in started for each in commands)
        if other := _OTHER.search(text):
            raise NoLaunch(f"the text starts {_OTHERS[other[0].lower()]}: diag reads launches of vLLM only")
        raise NoLaunch(f"no command that starts a vLLM server: {EXPECTED}")
    job, (pinned, beside) = None, _named(text)
    if gpus := _JOB_GPUS.search(text):  # what a batch script asks Slurm for
        nodes, by = _JOB_NODES.search(text), gpus[0].split(maxsplit=1)[1]
        job = Container("Slurm job", shared_memory=None, gpus=int(gpus[2]), gpus_by=by, is_whole=False)
        job = job._replace(nodes=int(nodes[1]) if nodes else 1, product=gpus[1] or "")
    commands = [
        first._replace(
            branches=(*others, *first.branches),
            line=steps[at].line,
            path=(*(path := steps[at].path), *[(-steps[at].line, hash(path))] * bool(path)),  # one of its calls
            place=functions[min(steps[at].line, len(functions) - 1)],
            is_background=(steps[at].is_background or not _DETACHED.isdisjoint(first.words[: first.arguments]))
            and not _ends(steps, at, servers),
            container=first.container or job,
            pinned=pinned,
            beside=beside,
            is_cut=first.is_cut or is_cut,
            lost=next(  # a flag with which the next command begins: its line was to continue this one
                (
                    name
                    for step in steps[at + 1 : at + 2]
                    for name in [word.partition("=")[0] for word in step.words[:1]]
                    if name.startswith("--") and understood(name)
                ),
                "",
            ),
        )
        for at, (first, *others) in sorted(servers.items())[:_MOST_SERVERS]
    ]
    is_new = (
        not any(one.line == other.line and one.path != other.path and one.is_like(other) for other in commands[:at])
        for at, one in enumerate(commands)
    )
    return tuple(compress(commands, is_new))  # calls of a function with the same values are one server


_Commands = Sequence[tuple[int, Sequence[str]]]
_Way = tuple[Sequence[tuple[int, Statement]], Mapping[int, Collection[str]]]


class _Script(NamedTuple):
    """A script: its commands, the function of each line, and the commands of each way through its branches.

    Beside a way's commands stand the variables that lead to it. `is_cut` is True if it has more ways than are read.
    """

    steps: Sequence[Statement]
    functions: Sequence[str]
    ways: Sequence[tuple[_Commands, Mapping[int, Collection[str]]]]
    is_cut: bool


@lru_cache(maxsize=4)
def _script(text: str, variables: tuple[tuple[str, str], ...]) -> _Script:
    """Split a script, once for all releases that it is read for."""
    steps = list[Statement]()
    try:
        for step in statements(text):
            steps.append(step)
    except BadUsage:  # a stray quotation mark behind the servers
        if not any("vllm" in word for step in steps for word in step.words):
            raise
    functions, name = [""], ""  # of each line, which count from 1
    for row, after in pairwise([*text.split("\n"), ""]):
        is_opened = "{" in row or after.lstrip().startswith("{")
        if (header := _HEADER.match(row)) and is_opened:  # and no call of Python's
            name = header[1]
        functions.append(name)
        name = "" if row.startswith("}") else name
    functions.append("")
    bodies: dict[str, list[Statement]] = {}
    for step in steps[:_MOST_WORDS]:
        name = functions[min(step.line, len(functions) - 1)]
        bodies.setdefault(name, []).extend([step] if step.words not in ([], [name], ["}"]) else [])
    outputs: dict[str, str] = {}  # what a function prints, if it does nothing else, in the place of $(NAME)
    for name, body in bodies.items():
        *before, printed = [step.words for step in body] or [[]]
        local = {key: value for words in before for key, value in _assignments(words).items()}
        is_plain = name and not any(step.path for step in body) and len(local) == len(before)
        if is_plain and len(printed) > 1 and printed[:-1] in (["echo"], ["printf", "%s"], ["printf", "%s\\n"]):
            output = _VARIABLE.sub(lambda one: local.get(one[1] or one[2], one[0]), printed[-1], _MOST_BRANCHES)  # noqa: B023
            is_known = not _ARGUMENT.search(output) and "$(" not in output and len(output) <= _LONGEST_OUTPUT
            outputs |= {name: output} if is_known else {}
    for at, step in enumerate(steps if outputs else ()):
        if any(map(_CALL.search, step.words)):
            words = [_CALL.sub(lambda call: outputs.get(call[1], call[0]), word) for word in step.words]
            steps[at] = step._replace(words=words)
    steps = _inlined(steps, functions)
    ways, is_cut = _branches(steps, functions, dict(variables))
    return _Script(steps, functions, [(_with_arrays(way), others) for way, others in ways], is_cut)


def _branches(
    steps: Sequence[Statement], functions: Sequence[str], variables: Mapping[str, str]
) -> tuple[Iterator[_Way], bool]:
    """Return the commands of each way through a script, the usual one first, and the variables that lead elsewhere.

    The second value is True for a script with more ways than are read.
    """
    usual, names = usual_ways(steps, functions, _assignments, variables)
    taken: dict[int, set[int]] = {}
    blocks: dict[int, int] = {}  # where each begins
    for at, step in enumerate(steps):
        for block, branch in step.path:
            taken.setdefault(block, set()).add(branch)
            blocks.setdefault(block, at)
    turns = max((len(branches - {-1, -2}) + 1 for branches in taken.values()), default=1)
    started = (step for step in steps if _serve_end(step.words) or _find_image(step.words, {}).arguments)
    starts = dict.fromkeys(step.path for step in started if step.path)
    most = 1 + _MOST_STEPS // max(1, len(steps))

    def turned(turn: int) -> dict[int, int]:
        return {block: turn if turn in branches else -1 for block, branches in taken.items()}

    first = {**turned(0), **usual}
    aside = [dict(path) for path in starts if any(first[block] != way for block, way in path)]
    ended = {step.path[-1] for step in steps if step.path and step.words[:1] == ["exit"]}

    def ways() -> Iterator[_Way]:
        yielded = set[tuple[object, ...]]()
        for chosen in islice(
            chain([first], ({**first, **path} for path in aside), map(turned, range(min(turns, _MOST_BRANCHES)))), most
        ):
            undecided = {block: way for block, way in chosen.items() if block not in usual}
            led: dict[int, int] = {}
            if undecided and chosen is not first:
                tested = [
                    step
                    for step in steps
                    if all(chosen[block] == way or (step.decides or (0,))[0] == block for block, way in step.path)
                ]
                decided, _ = usual_ways(tested, functions, _assignments, variables, undecided)
                led = {block: decided[block] for block in undecided if block in decided}
            if ended & {way for way in led.items() if chosen[way[0]] != way[1]}:
                continue  # the values of one branch lead to the end of the script
            ways = {**chosen, **led, **{block: way for block, way in usual.items() if way == OWN_OPTIONS}}
            active = [
                (at, step)
                for path, group in groupby(enumerate(steps), lambda numbered: numbered[1].path)
                if all(ways[block] == way for block, way in path)
                for at, step in group
                if not step.is_pattern
            ]
            others = {block for block, way in ways.items() if usual.get(block, way) != way}
            leading: dict[int, set[str]] = {}
            for block in names.keys() & others & blocks.keys():
                leading.setdefault(blocks[block], set()).update(names[block])
            if (way := (*(at for at, _ in active), *sorted(leading))) not in yielded:
                yielded.add(way)
                yield active, leading

    return ways(), turns > _MOST_BRANCHES or 1 + len(aside) + turns > most


def _ends(steps: Sequence[Statement], at: int, servers: Mapping[int, Sequence[Command]]) -> bool:
    """Return True if the server of a command is ended by one behind it, before another one starts.

    A container is not ended by a command that names others.
    """
    start = servers[at][0]
    name = next((after for word, after in pairwise(start.words[: start.arguments]) if word == "--name"), "")
    later = steps[at + 1 : min((other for other in servers if other > at), default=0)]
    ending = (step.words for step in later[:_MOST_WORDS] if step.words and _ENDS.match(" ".join(step.words[:3])))
    return any(not name or name in words or "$" in " ".join(words) or len(words) < _WITH_A_NAME for words in ending)


def _inlined(steps: list[Statement], functions: Sequence[str]) -> list[Statement]:
    """Put the commands of a function that starts a server with its own arguments in the place of each of its calls.

    `functions` has the function of each line.
    """
    for _ in range(_DEEPEST):
        places = [functions[min(step.line, len(functions) - 1)] for step in steps[:_MOST_WORDS]]
        bodies: dict[str, list[Statement]] = {}
        for step, place in zip(steps, places, strict=False):
            bodies.setdefault(place, []).append(step)
        able = {
            name: body
            for name, body in bodies.items()
            if name and any(_ARGUMENT.search(word) for step in body for word in step.words)
            if any("vllm" in word for step in body for word in step.words)
        }
        calls = [step.words[0] for step in steps if step.words and step.words[0] in able]
        if not calls or len(steps) > _MOST_WORDS:
            return steps
        made: list[Statement] = []
        for step, place in zip(steps, places, strict=True):
            name = step.words[0] if step.words else ""
            if len(made) > MOST_ARGUMENTS:
                return steps
            if name in able and name != place:
                made += _called(able[name], step)
            elif place not in calls:
                made.append(step)
        steps = made
    return steps


def _called(body: Sequence[Statement], call: Statement) -> Iterator[Statement]:
    """Yield the commands of a function for one of its calls."""
    passed = list(call.words[1:])
    for step in body:
        if step.words[:1] == ["shift"]:
            del passed[: int(step.words[1]) if step.words[1:] and step.words[1].isdigit() else 1]
            continue
        words = []
        for word in step.words:
            if word in ("$@", "$*", "${@}", "${*}"):
                words += passed
                continue
            filled = _ARGUMENT.sub(
                lambda one: (
                    passed[at - 1]
                    if 0 < (at := int(one[1] or one[2] or 0)) <= len(passed)
                    else (one[3] or "").removeprefix(":").removeprefix("-") or one[0]
                ),
                word,
            )
            words.append(filled if filled != word else word)
        yield step._replace(words=words, path=(*call.path, *step.path), is_background=step.is_background)


def _with_arrays(steps: Sequence[tuple[int, Statement]]) -> list[tuple[int, list[str]]]:
    """Return the commands of a script, each with its number and the words of its arrays.

    An array that is a command itself has the number of its making, and runs where it is used, if a command uses it.
    """
    commands, ran = list[tuple[int, list[str]]](), set[int]()
    arrays, waiting, named = dict[str, list[str]](), dict[str, int](), set[str]()
    for at, (name, words, *_) in steps:
        array, is_more = f"${{{name.removesuffix('+')}[@]}}", name.endswith("+")
        uses = [_ARRAY_USE.sub(r"${\1[@]}", word) for word in words]
        filled = [
            part for use, word in zip(uses, words, strict=True) for part in arrays.get(use, [_within(word, arrays)])
        ]
        if name and not (is_more and array in waiting):
            if array in waiting and name not in named:  # it never ran
                ran.add(id(arrays[array]))
            arrays[array] = [*(arrays.get(array, []) if is_more else []), *filled][:_MOST_WORDS]
            waiting.pop(array, None)
            if _serve_end(arrays[array]) is not None:
                commands.append((at, arrays[array]))
                waiting[array] = at
        elif name:
            arrays[array] += filled[: _MOST_WORDS - len(arrays[array])]
        elif not filled or _MENTIONS.fullmatch(filled[0]):
            continue
        is_script = any(_SHELL.fullmatch(word) or word in _RUNNERS or _SUBSTITUTED.fullmatch(word) for word in words)
        inside = (f"${{{use}[@]}}" for word in words if is_script for use in _WITHIN.findall(word))
        begun = [use for use in dict.fromkeys([*uses, *inside]) if use in waiting and use != array]
        ran.update(id(arrays[use]) for use in begun)
        places = [waiting.pop(use) for use in begun]
        named.update(_USED_ARRAY.findall(" ".join(words)))
        if not name:
            commands.append((min([*places, at]), filled))
    return [(at, words) for at, words in commands if id(words) not in ran]


def _within(word: str, arrays: Mapping[str, Sequence[str]]) -> str:
    """Write the words of arrays within a text that a shell runs: ID=$(docker run IMAGE "${ARGS[@]}")."""
    if "[" not in word or "${" not in word or " " not in word:
        return word
    uses = [use for use in dict.fromkeys(_WITHIN.findall(word)) if f"${{{use}[@]}}" in arrays][:_MOST_BRANCHES]
    texts = {use: line(arrays[f"${{{use}[@]}}"]) for use in uses}
    if sum(map(len, texts.values())) > LONGEST:
        return word
    return _WITHIN.sub(lambda use: texts.get(use[1], use[0]), word, _MOST_BRANCHES)


def _run(
    commands: _Commands,
    version: str,
    folder: Path | None,
    variables: Mapping[str, str],
    others: Mapping[int, Collection[str]],
    depth: int,
) -> Iterator[tuple[int, Command]]:
    """Yield the servers that commands of a script start, each with the number of its command.

    `others` has the variables which lead to a branch only if they have other values than those of the script, by the
    command with which its block begins.
    """
    environment, plain = {**variables}, dict(_plain(variables))
    exported, is_alone = dict[str, str](), len(commands) == 1
    left = sorted(others)
    idle = set[tuple[str, ...]]()  # commands that start and set nothing with these variables
    for at, words in commands:
        while left and left[0] <= at:
            for name in others[left.pop(0)]:
                environment.pop(name, None)
                plain.pop(name, None)
            idle.clear()
        if (key := tuple(words)) in idle:
            continue
        whole = _whole(words, environment)
        filled, absent = _split_words(whole, environment, plain)
        filled = _of_cloud_run(filled) or filled
        more = _split_words(whole, environment, plain, with_optional=True)[0] if absent else filled
        idle.add(key)
        for way in (filled, more)[: 1 + (more != filled)]:
            for server in _find_servers(way, environment, folder, version, is_alone, depth):
                idle.discard(key)
                is_far = server.around and server.elsewhere
                passed_on = () if is_far else tuple(f"{name}={value}" for name, value in exported.items())
                yield at, server._replace(exported=(*passed_on, *server.exported), absent=(*absent, *server.absent))
        assigned = dict[str, str]()
        for name, value in _assignments(filled).items():  # CMD="$CMD --flag"
            is_added_to = name in environment and "vllm" in environment[name]
            text = _expand(value, {**plain, name: environment[name]} if is_added_to else plain)
            if ":-" in text and text.count("$") > 1:  # a default names another variable
                named = {*_NAME.findall(text)} & environment.keys()
                text = _expand(text, _plain({key: default(environment[key]) for key in named}))
            assigned[name] = text
        is_unit = any(word.startswith("Environment=") for word in filled)
        if filled[0] not in _DECLARING and not is_unit and not all(map(_ASSIGNMENT.fullmatch, filled)):
            continue  # X=1 vllm serve ...: of this command alone
        idle.clear()
        environment |= assigned
        for name in assigned:
            plain.pop(name, None)
        plain |= _plain(assigned)
        if is_unit or filled[:1] in (["export"], ["declare"], ["typeset"]):
            exported |= assigned


def _whole(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Write NAME+=text as NAME=whole text, and a command that another shell gets by its name: eval "$CMD &"."""
    if words[0] in ("local", "export") or _ADDED.match(words[0]):
        added = [(word, _ADDED.match(word)) for word in words]
        return [
            f"{add[1]}={environment.get(add[1], '')[:LONGEST]}{word[add.end() :]}" if add else word
            for word, add in added
        ]
    if words[0] in _DECLARING or _ASSIGNMENT.match(words[0]):
        return [*words]
    quoted = [word for word in words if "$" in word and not isinstance(word, Bare)]
    names = {plain or braced for word in quoted for plain, braced in islice(_VARIABLE.findall(word), _MOST_WORDS)}
    commands = {name: text for name in names if "vllm" in (text := environment.get(name, "")) and _SCRIPT.search(text)}
    return [_expand(word, commands) if commands and not isinstance(word, Bare) else word for word in words]


def _split_words(
    words: Sequence[str], environment: Mapping[str, str], plain: Mapping[str, str], *, with_optional: bool = False
) -> tuple[list[str], list[str]]:
    """Return the words that a shell makes of these, and the variables that are empty by default.

    Words that are there if a variable is set, which the text does not show, are left out unless `with_optional`.
    """
    filled, absent = list[str](), list[str]()
    for word in words:  # a shell splits unquoted variables: ARGS="--a 1"; ... $ARGS
        value = _expand(word, plain) if isinstance(word, Bare) else ""
        named = _VARIABLE_WORD.fullmatch(word) if isinstance(word, Bare) else None
        name = (named[1] or named[2]) if named else ""
        text = environment.get(name, "")  # CMD="vllm serve $MODEL"; exec $CMD; of X=$(command) nothing is known
        if _IS_COMMAND.search(text) and not text.startswith(("$(", "`")) and not is_secret(name):
            filled += map(Bare.of, text.split())
        elif named and filled and environment.get(name, "" if named[1] else None) in ("", f"${{{name}:-}}"):
            absent.append(name)
        elif filled and isinstance(word, Bare) and _PRINTED.fullmatch(word):  # $([ "$X" = 1 ] && echo --flag)
            absent += (plain or braced for plain, braced in _VARIABLE.findall(word)[:1])
        elif (optional := _GIVEN_IF.fullmatch(word)) and (name := optional[1]) in plain:  # ${Q:+--quantization ${Q}}
            filled += _expand(optional[2], plain).replace('"', "").split() if plain[name] else []
        elif optional and isinstance(word, Bare) and filled:
            is_usual = is_default(environment.get(name, ""))
            filled += map(Bare.of, optional[2].replace('"', "").split()) if is_usual or with_optional else ()
            absent += [name] * (not is_usual)
        else:
            filled += value.split() if " " in value and "$" not in value else [word]
    return filled, absent


def _find_servers(
    words: Sequence[str], environment: Mapping[str, str], folder: Path | None, version: str, is_alone: bool, depth: int
) -> Iterator[Command]:
    """Yield the servers that a command of a script starts, itself or by a script in one of its words: sh -c '...'.

    Flags alone are a server's if `is_alone`: the text has no other command.
    """
    start = _serve_end(words)
    if any(_APPTAINER.fullmatch(word) for word in words[:_MOST_WORDS]):
        pairs = {**environment, **_assignments(words)}.items()
        inside = ((_OF_APPTAINER.fullmatch(name), value) for name, value in pairs)
        environment = {**environment, **{name[1]: value for name, value in inside if name}}
    if len(words) > MOST_ARGUMENTS and (is_alone or start is not None or run_place(words) is not None):
        raise BadUsage(f"the command has more than {MOST_ARGUMENTS:,} words: {EXPECTED}")
    inner, at = "", 0  # the script that another shell, perhaps on another host, runs, and the place of its word
    runs = any(word.rpartition("/")[2] in _RUNNERS for word in words)
    is_script = False
    for place, (before, word) in enumerate(pairwise(["", *words]) if start is None else ()):
        is_script = bool(_SHELL.fullmatch(before)) or (is_script and before.startswith("-"))  # bash -c -i '...'
        substituted = _SUBSTITUTED.fullmatch(word)
        script = substituted[1] if substituted else word if runs or is_script else ""
        if re.search(r"\s", script) and _SCRIPT.search(script) and "vllm" in script.lower():
            rest = shlex.join(words[place + 2 :])  # bash -c 'vllm serve "$@"' -- words
            inner, at = script.replace('"$@"', rest) if rest else script, place
            break

    contained = _find_image(words, environment)
    if inner and depth < _DEEPEST_SCRIPT:
        location = elsewhere(words)
        try:
            around = {**environment, **_assignments(words)}
            started = _parse_shell(inner, version, None if location else folder, around, depth + 1)
        except BadUsage:
            return
        for server in started:
            yield server._replace(
                environment={**around, **server.environment},
                image=server.image or contained.name,
                by_default=tuple(one._replace(image=one.image or contained.name) for one in server.by_default),
                elsewhere=server.elsewhere or location,
                around=(*([(tuple(words), at)] if inner == words[at] else []), *server.around),
                container=read_run(words[:at], _assignments(words)) or server.container,
            )
        return
    if start is None and is_alone and words and words[0].startswith("-") and understood(words[0].partition("=")[0]):
        start = 0  # nothing but vLLM's own flags
    start = contained.arguments if start is None else start
    if start is not None and not any(map(_HELP.match, words[start:])):
        assigned = _assignments(words[:start])
        server = _command(words, start, {**environment, **assigned}, folder, version)
        yield server._replace(container=read_run(filled_in(words[:start], environment), {**environment, **assigned}))


def _of_cloud_run(words: Sequence[str]) -> list[str]:
    """Return `docker run` for a container that `gcloud run deploy` starts; [] for other commands."""
    options = [word.partition("=") for word in words if word.startswith("--")]
    options += [(word, "", after) for word, after in pairwise(words) if word.startswith("--") and "=" not in word]
    given = {name: value for name, _, value in options if value}
    if "gcloud" not in words or "deploy" not in words or "vllm" not in given.get("--image", ""):
        return []
    lists = dict[str, list[str]]()
    for name in ("--command", "--args", "--set-env-vars"):  # a,b or ^|^a|b
        text = given.get(name, "")
        marked = re.match(r"\^(.{1,5}?)\^", text)
        lists[name] = text[marked.end() :].split(marked[1]) if marked else [*filter(None, text.split(","))]
    program, *more = lists["--command"] or [""]
    start = ["docker", "run", *(word for pair in lists["--set-env-vars"] for word in ("-e", pair))]
    start += ["--gpus", given["--gpu"]] if "--gpu" in given else ["--device", "$GPU"]
    start += ["--volume", "$VOLUMES", *(["--entrypoint", program] if program else [])]
    return [*start, given["--image"], *more, *lists["--args"]]


def _assignments(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that words set: NAME=value, export NAME=value, -e NAME=value, a unit's Environment=."""
    matches = (_ASSIGNMENT.fullmatch(word) for word in words)
    written = {assignment[1]: assignment[2] for assignment in matches if assignment and assignment[1] != "ExecStart"}
    passed = [name for option, name in pairwise(words) if option in ("-e", "--env") and name.isidentifier()]
    usual = (re.fullmatch(r"\$\{(\w+):?=([^{}]*)\}", word) for word in words if words[0] == ":")  # : "${X:=1}"
    written |= {name[1]: f"${{{name[1]}:-{name[2]}}}" for name in usual if name}
    return {**{name: f"${{{name}}}" for name in passed}, **written}  # passed on: of the host, or of a secret


def _find_image(words: Sequence[str], environment: Mapping[str, str]) -> Image:
    able = any("$" in word or _CONTAINERS.fullmatch(word.rpartition("/")[2]) for word in words)
    if not able or run_place(words) is None:
        return Image()
    return image(filled_in(words, {name: default(value) for name, value in environment.items()}))


def _serve_end(words: Sequence[str]) -> int | None:
    """Return the place after `vllm serve` or vLLM's module; None if there is neither."""
    for at, word in enumerate(words):
        after = words[at + 1] if at + 1 < len(words) else ""
        if after == "serve" and _PROGRAM.fullmatch(Path(word).name):
            return at + 2
        is_named = is_server(word) and words[at - 1] not in ("import", "from", "-")
        if is_named and (after == "serve" or not word.endswith(".cli.main")):
            return at + 2 if after == "serve" else at + 1
    return None


def _command(
    words: Sequence[str],
    start: int,
    environment: Mapping[str, str],
    folder: Path | None,
    version: str,
    *,
    is_usual: bool = False,
) -> Command:
    """Return the command with these words; unless it `is_usual`, also that with the defaults of its variables."""
    filled = filled_in(words, environment)
    mentions, loose = options(filled, start, version)
    if sum(option.option is None for option in mentions) > _MOST_UNKNOWN:
        raise BadUsage(f"more than {_MOST_UNKNOWN} options of the command are none of vLLM's: {EXPECTED}")
    contained, place = _find_image(words, environment), elsewhere(words[:start])
    config = next((option.values[0] for option in mentions if option.name == "--config" and option.values), "")
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
        given=(*from_file(content, version), *mentions),  # the command line counts more
        config=config,
        image=contained.name,
        entry=contained.entry,
        elsewhere=place,
        dropped=tuple(key for key, value in content.items() if is_dropped(key, value, version)),
    )
    takes_one = bool(loose) and not any(option.words for option in command.all("--model"))
    takes_one = takes_one and not _ARGUMENTS.fullmatch(filled[loose[0]])
    named = filled[loose[0]] if takes_one else command.get("--model") or ""
    command = command._replace(model=named, strays=tuple(loose[takes_one:]))
    if is_usual or not any(map(is_default, [*filled[start:], *environment.values()])):
        return command
    shown = [
        part
        for word in filled[start:]
        for part in (default(word).split() if is_default(word) and isinstance(word, Bare) else [_by_default(word)])
    ]
    settings = {name: _by_default(value) for name, value in environment.items()}
    usual = _command([*words[:start], *shown], start, settings, folder, version, is_usual=True)
    return command._replace(by_default=(usual,))


def _by_default(text: str) -> str:
    return default(text) if is_default(text) else text


def filled_in(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Fill in the variables that the text itself sets."""
    partly = {name: text for name, text in environment.items() if _PATH.fullmatch(text) and not is_secret(name)}
    values = {**partly, **_plain(environment)}
    return [_expand(word, values) for word in words]


def _plain(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that the text sets to a plain value; a secret stays $NAME, as do all others."""
    return {
        name: value
        for name, value in environment.items()
        if "$" not in value and "`" not in value and len(value) < LONGEST and not is_secret(name)
    }


def _expand(word: str, plain: Mapping[str, str]) -> str:
    filled = _VARIABLE.sub(lambda name: plain.get(name[1] or name[2], name[0]), word, _MOST_WORDS)
    if ":-" in filled:
        filled = _WITH_DEFAULT.sub(lambda name: plain.get(name[1]) or name[0], filled)
    # an unchanged Bare stays one; what is empty here is set in a branch, or by the script's own arguments
    return word if filled in (word, "") or len(filled) > len(word) + LONGEST else filled
