"""Read the last stage of a Dockerfile, and what stands beside it: the script that it starts, the Compose service."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import parse_json, parse_yaml, read_bytes
from diag.vllm.command.command import NOTATIONS, command_line, read_config_file, split
from diag.vllm.command.container import inner, listed
from diag.vllm.command.shell import LONGEST, default

_FROM = re.compile(r"\A(?:[ \t]*(?:#.*|ARG[ \t].*)?\r?\n)*+FROM[ \t]+\S", re.ASCII)
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?=[:}])(:-[^{}]*)?\})", re.ASCII)
_ONE_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
_SHELL = re.compile(r"(?:\S*/)?(?:ba|da|z|k)?sh|\S+\.(?:sh|py)|envsubst")
_INSTRUCTION = re.compile(r"[ \t]*([A-Z]+)[ \t]+(.*)", re.DOTALL)
_SECRET = re.compile(NOTATIONS["patterns"]["writings_secret"])
STARTS_SCRIPT = re.compile(NOTATIONS["patterns"]["parse_starts_script"])
_COPIED = re.compile(NOTATIONS["patterns"]["dockerfile_copied"])
_MOST_VARIABLES = _MOST_INSTRUCTIONS = 1000
_MOST_SCRIPTS, _MOST_FOLDERS = 8, 4
_CONFIG = re.compile(NOTATIONS["patterns"]["dockerfile_config"])
CALLERS, _MOST_CALLERS = (".sh", ".slurm", ".sbatch", ".service"), 64
GUIDES = (".md", ".mdx", ".markdown", ".rst")
"""Endings of texts in which only code blocks start servers."""
_ENDED = re.compile(r"(?<!\\)\n")
_OF_THIS_HOST = re.compile(NOTATIONS["patterns"]["dockerfile_of_this_host"], re.DOTALL)
_CHANGED = re.compile(r"(?m)(?:^|&&|;)[ \t]*cd[ \t]+(\S{1,200}(?:[ \t]+[^\s;&]{1,200}\)\S{0,200})?)")
_PLAIN, _POSITION = re.compile(r"[\w./:@=+-]+"), re.compile(r"\$(?:([1-9])\b|\{([1-9])(?::?[-?][^{}]*)?\})")
_OWN_OPTIONS = re.compile(r"\b(?:shift|getopts)\b|^[ \t]*(?:function[ \t]|\w+[ \t]*\(\))", re.MULTILINE)
BUILT = ("built",)
"""The key, which no YAML has, of a service's Dockerfile and the secrets that it leaves in the image."""
_LONGEST_SCRIPT, _LONGEST_NAME = 2**16, 2**9
_CAT, _IMAGE = re.compile(NOTATIONS["patterns"]["dockerfile_cat"]), re.compile(r"[\w.:/@-]*vllm[\w.:/@-]*")


class BuildStage(NamedTuple):
    """A stage of a Dockerfile: the image that it begins with, its variables, ENTRYPOINT and CMD.

    `baked` are the instructions that leave a secret in the image.
    """

    image: str
    environment: Mapping[str, str] = {}
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] = ()
    baked: tuple[str, ...] = ()

    @property
    def program(self) -> tuple[str, ...]:
        """The words that a container starts; the first one is "" for the entry point of vLLM's own image."""
        if self.entrypoint is None and "vllm-openai" in self.image:
            return ("", *self.command)
        return (*(self.entrypoint or ()), *self.command)

    @property
    def literal(self) -> tuple[str, ...]:
        """The stage's variables in words that no shell expands: the program gets the names."""
        words = () if any(map(_SHELL.fullmatch, self.program)) else self.program
        names = (_ONE_REFERENCE.search(word) for word in words)
        return tuple(name[0] for name in names if name and (name[1] or name[2]) in self.environment)


def is_dockerfile(text: str) -> bool:
    return bool(_FROM.match(text))


def last_stage(text: str, given: Mapping[str, str] = {}, target: str = "") -> BuildStage:
    """Return the last stage of a Dockerfile, or the `target`; `given` are arguments of the build."""
    stages: dict[str, BuildStage] = {}
    arguments: dict[str, str] = {}
    stage, alias = BuildStage(""), ""
    secrets: dict[str, str] = {}  # of the last stage alone: the layers of others stay behind
    lines = [line for line in _COPIED.sub("", text).split("\n") if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\[ \t]*\r?\n", " ", "\n".join(lines))
    matches = filter(None, (_INSTRUCTION.fullmatch(line.rstrip("\r")) for line in whole.split("\n")))
    for instruction, rest in [(one[1], one[2].strip()) for one in islice(matches, _MOST_INSTRUCTIONS)]:
        if instruction == "ARG":
            name, _, value = rest.partition("=")
            secrets |= {name.strip(): "ARG"} if _SECRET.fullmatch(name.strip()) else {}
            arguments[name.strip()] = given.get(name.strip(), _filled(value.strip().strip("\"'"), arguments))
        elif instruction == "FROM":
            if target and alias == target.lower():
                break
            name, *more = [_filled(word, arguments) for word in rest.split() if not word.startswith("--")] or [""]
            stage, secrets = stages.get(name.lower(), BuildStage(name)), {}
            alias = more[1].lower() if len(more) > 1 and more[0].upper() == "AS" else ""
        elif instruction == "ENV" and len(stage.environment) < _MOST_VARIABLES:
            filled = _filled(rest, {**arguments, **stage.environment})
            pairs = [word.partition("=") for word in split(filled)]  # NAME=value ..., or the older NAME value
            assigned = {name: value for name, joined, value in pairs if joined}
            if pairs and not pairs[0][1]:
                assigned = {pairs[0][0]: filled.partition(" ")[2].strip()}
            stage = stage._replace(environment={**stage.environment, **assigned})
            secrets |= {name: "ENV" for name, value in assigned.items() if value and _SECRET.fullmatch(name)}
        elif instruction == "ENTRYPOINT":
            stage = stage._replace(entrypoint=_program(rest), command=())
        elif instruction == "CMD":
            stage = stage._replace(command=_program(rest))
        if instruction != "ARG" and alias:
            stages[alias] = stage
    return stage._replace(baked=tuple(f"{by} {name}" for name, by in secrets.items()))


def _program(rest: str) -> tuple[str, ...]:
    """Return the words of ENTRYPOINT or CMD: a JSON list, or a line for a shell."""
    try:
        words = parse_json(rest) if rest.startswith("[") else None
    except ValueError:
        words = None
    if rest == "[":
        raise BadUsage("the Dockerfile has a list over several lines: each but the last needs a \\ at its end")
    return tuple(map(str, words)) if isinstance(words, list) else ("/bin/sh", "-c", rest)


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Fill in variables of the Dockerfile, unless the text may become very long."""
    if "$" not in text or text.count("$") * max(map(len, values.values()), default=0) > LONGEST:
        return text
    return default(_REFERENCE.sub(lambda at: values.get(at[1] or at[2], at[0]) or (at[0] if at[3] else ""), text))


# -- what stands beside


def with_scripts(text: str, file: Path) -> str:
    """Write the scripts beside a Dockerfile or a Compose file, or in it, where its containers start them.

    $(cat FILE) becomes the name of vLLM's image in that file.
    """

    def content(cat: re.Match[str]) -> str:
        assigned = re.search(rf"(?m)^[ \t]*{cat['name']}=(.*)$", text) if cat["name"] else None
        named = re.search(r"([\w-][\w.-]*\.\w+)[\"'}\s]*$", assigned[1] if assigned else cat["path"] or "")
        line = text_of(file.with_name(named[1]), _LONGEST_NAME).strip() if named else ""
        return line if _IMAGE.fullmatch(line) else cat[0]

    text = _CAT.sub(content, text)
    for start, (script, _) in _scripts(text, file).items():
        text = text.replace(start, f'["bash", "-c", {json.dumps(script)}, "--"')
    return text


def _scripts(text: str, file: Path) -> dict[str, tuple[str, Path | None]]:
    """Return the scripts that containers start, by what starts each: the text, and its file if it has one."""
    scripts: dict[str, tuple[str, Path | None]] = {}
    written = {copied["place"]: copied["body"] for copied in _COPIED.finditer(text)}
    for start in islice(STARTS_SCRIPT.finditer(text) if "vllm" in text else (), _MOST_SCRIPTS):
        if body := written.get(start[1]):
            scripts[start[0]] = (body, None)
            continue
        source = r"(?:^COPY[ \t]+(?:--\S+[ \t]+)*(?!\S*\.\./)|(?<![\w./-])\./)([\w./-]{1,200})"
        place = rf"{source}(?:[ \t]+|:){re.escape(start[1])}\b"
        copied = re.search(place, text, re.MULTILINE)
        able = (file.parent / (copied[1] if copied else Path(start[1]).name), file.parent / Path(start[1]).name)
        script = next((one for one in able if text_of(one)), able[0])  # the build's folder may be one above
        content = text_of(script)
        scripts |= {start[0]: (content, script)} if "vllm" in content else {}
    return scripts


def text_of(file: Path, most: int = _LONGEST_SCRIPT) -> str:
    """Return the text of a file beside; "" if it cannot be read, or is too long."""
    with suppress(OSError, BadUsage, ValueError):
        if file.is_file() and file.stat().st_size:  # those of /proc have no size, and may block
            return read_bytes(file, most).decode("utf-8", "replace").replace("\r\n", "\n")
    return ""


def called(text: str, file: Path) -> tuple[str, bool]:
    """Fill in the arguments of the one call of a script beside it, and its unit's variables; True if one starts it."""
    call, folder = re.compile(NOTATIONS["patterns"]["dockerfile_call"] % re.escape(file.name), re.M), file.parent
    kinds = ("*.*" if _POSITION.search(text) else "*.service", "*/*.service") if file.suffix in (".sh", ".bash") else ()
    able = sorted(one for kind in kinds for one in folder.glob(kind) if one.suffix in CALLERS and one != file)
    calls = [
        (one, "EnvironmentFile" not in it) for it in map(text_of, able[:_MOST_CALLERS]) for one in call.finditer(it)
    ]
    units = {one.string for one, is_whole in calls if one["unit"] and is_whole}
    if len(calls) == len(units) == 1:  # a secret, or what systemd fills in, stands by its name alone
        words = [word for line in re.findall(r"(?m)^Environment=(.*)$", min(units)) for word in split(line)]
        pairs = [word.partition("=")[::2] for word in words if re.match(r"[A-Za-z_]\w*=", word)]
        unseen = {name for name, value in pairs if _SECRET.fullmatch(name) or re.search("[%$`]", value)}
        sets = (f"export {name}={f'${name}' if name in unseen else shlex.quote(value)}; " for name, value in pairs)
        text = "".join(sets) + text
    given = {one["rest"].strip("& \t\r") for one, _ in calls}
    words = given.pop().split() if len(given) == 1 else []
    if all(map(_PLAIN.fullmatch, words)) and not _OWN_OPTIONS.search(text):
        text = _POSITION.sub(lambda at: dict(enumerate(words, 1)).get(int(at[1] or at[2]), at[0]), text)
    return text, bool(units)


def _mounted(place: str, text: str, file: Path) -> Path | None:
    """Return the file beside that a text mounts, or copies, at a place of the container, itself or by its folder."""
    for folder in (place, *map(str, [*Path(place).parents][:_MOST_FOLDERS])):
        pattern = NOTATIONS["patterns"]["dockerfile_mount"] % re.escape(folder)
        mount = re.search(pattern, text, re.MULTILINE) if folder != "/" else None
        if not mount:
            continue
        source = mount["source"] or mount["copied"] or ""
        for name in _ONE_REFERENCE.findall(source)[:_MOST_FOLDERS]:
            assigned = re.search(rf"(?m)^[ \t]*(?:export[ \t]+)?{name[0] or name[1]}=(.*)$", text)
            source = source.replace(f"${name[0]}" if name[0] else f"${{{name[1]}}}", assigned[1] if assigned else "")
        source = re.sub(r"\$\([^()]*\)|\$\{?\w+\}?|[\"'~]", "", source).lstrip("/")
        rest = place[len(folder) :].strip("/")
        able = [file.parent / source / rest, file.parent / Path(source).name / rest]
        able += [file.parent / (rest or Path(place).name)]
        inside = _whole(file.parent.parent)
        if script := next((one for one in able if _whole(one).is_relative_to(inside) and text_of(one)), None):
            return script
    return None


def _configs(text: str, file: Path) -> Iterator[tuple[re.Match[str], Path, str]]:
    """Yield where a text names a --config file beside, or one that its container gets, the file and the command."""
    is_read = file.suffix in (*CALLERS, *GUIDES) or is_dockerfile(text)
    for named in islice(_CONFIG.finditer(text) if is_read and "--config" in text else (), _MOST_SCRIPTS):
        start = max((line.end() for line in _ENDED.finditer(text, 0, named.start())), default=0)
        ended = _ENDED.search(text, named.end())
        line = text[start : ended.start() if ended else len(text)]
        place = None
        if named["place"].startswith("/"):
            place = _mounted(named["place"], text, file)
        elif _OF_THIS_HOST.fullmatch(text[start : named.start()]):
            changed = [
                re.sub(r"\$\([^()]*\)|\$\{?\w+\}?|[\"'~]", "", one) for one in _CHANGED.findall(text[: named.end()])
            ]
            folders = (*(beside(file, f"./{one}") for one in changed[-1:]), Path(), file.parent)
            able = (folder / named["place"] for folder in folders if folder)
            place = next((one for one in able if text_of(one)), None)
        if place:
            yield named, place, line


def with_config(text: str, file: Path) -> str:
    """Write the keys of the --config file beside, which a script or a guide names or an image holds, as flags."""
    parts, at = list[str](), 0
    for named, place, line in _configs(text, file):
        before = line[: line.index(named[0])]
        words = _flags(place, line, is_served=before.rstrip("\"', \\\n").endswith("serve"))
        is_listed = '"' in named["by"]
        written = f"{', '.join(map(json.dumps, words))}".strip('"') if is_listed else shlex.join(words)
        parts += [text[at : named.start()], written or named[0]]
        at = named.end()
    return "".join([*parts, text[at:]])


def _flags(place: Path | None, line: str, *, is_served: bool) -> list[str]:
    """Return the keys of a --config file as flags, without those that a command line gives itself."""
    content: Mapping[str, Any] = {}
    with suppress(BadUsage):
        content = read_config_file(place) if place else {}
    rest = {key: value for key, value in content.items() if not re.search(rf"--{re.escape(key)}[=\s\"']", line)}
    if re.search(r"\bserve[\s\"',\\]+[^\s\"',\\-]", line):  # a model, which counts more
        rest.pop("model", None)
    model = [] if is_served or "model" not in rest else ["--model", str(rest.pop("model"))]
    return [*model, *command_line(rest)] if content else []


def _with_mounted(service: Mapping[str, Any], document: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Write the keys of a --config file beside, which a service of Compose mounts, as flags."""
    mounts = [
        f"{one.get('source')}:{one.get('target')}" if isinstance(one, dict) else str(one)
        for one in listed(service.get("volumes"))
    ]
    for one in listed(service.get("configs")):
        source = inner(document, "configs", str(inner(one).get("source"))).get("file")
        mounts.append(f"{source}:{inner(one).get('target')}")
    for key in ("command", "entrypoint"):
        words = split(service.get(key))
        line = " ".join(words)
        named = _CONFIG.search(line) if mounts and "--config" in line else None
        place = _mounted(named["place"], "\n".join(mounts), file) if named else None
        if named and (given := _flags(place, line, is_served=line[: named.start()].rstrip().endswith("serve"))):
            at = next((at for at, word in enumerate(words) if word.startswith("--config")), None)
            if at is None:  # in a script
                return {**service, key: [word.replace(named[0], shlex.join(given), _MOST_SCRIPTS) for word in words]}
            return {**service, key: [*words[:at], *given, *words[at + (2 if words[at] == "--config" else 1) :]]}
    return service


def started_files(text: str, file: Path) -> set[Path]:
    """Return the files beside which the containers of a file start: scripts, and Dockerfiles with theirs."""
    builds: dict[Path, str] = {}
    with suppress(BadUsage):
        documents = parse_yaml(text, file.name) if file.suffix in (".yml", ".yaml") else []
        services = [node for one in documents for node in inner(one, "services").values() if isinstance(node, dict)]
        read = [_of_build(node, file) for node in services]
        builds = {_whole(place): content for content, place in read if "vllm" in content}
    texts = [(text, file), *((content, place) for place, content in builds.items())]
    builds |= {_whole(config): "" for _, config, _ in _configs(text, file)}
    return {*builds, *(_whole(script) for one in texts for _, script in _scripts(*one).values() if script)}


def built(documents: Sequence[Any], file: Path) -> list[Any]:
    """Fill in what the Dockerfiles beside a Compose file give its services: the image, variables and program."""
    joined = list[Any]()
    for document in documents:
        services = inner(document, "services")
        whole = dict[str, Mapping[Any, Any]]()
        for key, service in services.items():
            content, place = _of_build(service, file) if isinstance(service, dict) else ("", file)
            node: dict[Any, Any] = service
            if "vllm" in content:
                build, own = service.get("build"), service.get("environment")
                listing = listed(inner(build).get("args"))
                arguments = inner(build, "args") or dict(str(pair).partition("=")[::2] for pair in listing)
                passed = {str(name): default(str(value)) for name, value in arguments.items() if value is not None}
                stage = last_stage(with_scripts(content, place), passed, str(inner(build).get("target") or ""))
                pairs = [f"{name}={value}" for name, value in own.items()] if isinstance(own, dict) else listed(own)
                names = {str(pair).partition("=")[0] for pair in pairs}
                pairs = [*(f"{name}={value}" for name, value in stage.environment.items() if name not in names), *pairs]
                is_told = bool({"entrypoint", "command"} & service.keys())
                literal = () if is_told else stage.literal
                node = {**service, "environment": pairs, BUILT: (content, stage.baked, literal)}
                if stage.entrypoint is not None and "entrypoint" not in service:
                    node["entrypoint"] = [*stage.entrypoint]
                if stage.command and not is_told:
                    node["command"] = [*stage.command]
                node |= {"image": stage.image} if "vllm" in stage.image else {}
            if isinstance(service, dict):
                whole[key] = _with_mounted(node, document, file)
        joined.append({**document, "services": {**services, **whole}} if whole else document)
    return joined


def _of_build(service: Mapping[str, Any], file: Path) -> tuple[str, Path]:
    """Return the Dockerfile of a service: its text, "" for none, and its place."""
    build = service.get("build")
    folder = build if isinstance(build, str) else inner(service, "build").get("context", ".") if build else None
    if not isinstance(folder, str):
        return "", file
    place = file.parent / folder / str(inner(service, "build").get("dockerfile") or "Dockerfile")
    place = place if text_of(place) or place.name != "Dockerfile" else place.with_name("dockerfile")  # as BuildKit
    inline = inner(service, "build").get("dockerfile_inline")
    return (inline, place) if isinstance(inline, str) else (text_of(place), place)


def unbuilt(documents: Sequence[Any], file: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the services of a Compose file whose Dockerfile is not beside it, each with the words for its program."""
    for name, node in (pair for one in documents for pair in inner(one, "services").items()):
        if isinstance(node, dict) and "build" in node and not _of_build(node, file)[0]:
            yield str(name), split(node.get("command"))


def beside(file: Path, name: str) -> Path | None:
    """Return the place of a file that another names; None if it is not in the folder above that one."""
    place = _whole(file.parent / name)
    return place if len(name) < _LONGEST_NAME and place.is_relative_to(_whole(file.parent.parent)) else None


def _whole(file: Path) -> Path:
    return Path(os.path.normpath(file.absolute()))
