"""Fill in the templates of a Helm chart or an Ansible role; read values of a chart whose templates are not known."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import read_yaml
from diag.vllm.command.command import NOTATIONS, command_line, flag, split
from diag.vllm.command.container import Container, inner, read_pod
from diag.vllm.command.shell import BLOCK
from diag.vllm.flags.registry import known, release

_HOLE = re.compile(NOTATIONS["patterns"]["charts_hole"])
_RANGE = re.compile(NOTATIONS["patterns"]["charts_range"])
_TEST = re.compile(NOTATIONS["patterns"]["charts_test"])
_PLAIN_FILTER = re.compile(r"quote|squote|int|string|toString|trim|n?indent\s+\d+|toYaml|to_yaml|")

_APART = re.compile("|".join(NOTATIONS["chart_apart"]), re.IGNORECASE)
_LISTS = re.compile(r"model|engine|server|instance|replica|deployment", re.IGNORECASE)
_MODEL = re.compile(NOTATIONS["patterns"]["charts_model"])
_WITHIN_MODEL = ("name", "id", "repo", "repoId", "path", "huggingfaceName", "uri")
_ARGUMENTS = re.compile(r"(?:vllm|engine|server|additional|extra|model)?_?(?:args|arguments|extra)", re.IGNORECASE)
_SHORT = ("--dtype", "--quantization", "--revision", "--seed", "--tokenizer", "--runner")
_MOST = 2000
_DEEPEST = 6


def filled(text: str, file: Path) -> str:
    """Fill in what values.yaml of a chart, or the defaults of a role, give a template of it, on the same lines."""
    values: dict[str, Any] = {}
    for folder in file.absolute().parents[1:3] if "{{" in text else ():
        with suppress(OSError, BadUsage):
            if file.suffix != ".j2" and (folder / "templates") in file.absolute().parents:
                chart = read_yaml(folder / "Chart.yaml").items()
                about = {str(key)[:1].upper() + str(key)[1:]: value for key, value in chart}
                values = {"Values": read_yaml(folder / "values.yaml") or {}, "Chart": about}
            elif (folder / "defaults" / "main.yml").is_file():
                values = read_yaml(folder / "defaults" / "main.yml")
        if isinstance(values, dict) and values:
            break
    else:
        return text
    for _ in range(3):  # values may name others
        text = _HOLE.sub(lambda hole: _value(hole, values), _RANGE.sub(lambda loop: _repeated(loop, values), text))
    lines, opened = list[str](), list[bool | None]()  # None: a condition that is not known
    for line in text.split("\n"):
        block, test = BLOCK.fullmatch(line), _TEST.search(line)
        holds = None
        if block and (block["opens"] or block["start"]):
            opened.append(holds := _holds(test, values) if test else None)
        elif block and (block["ends"] or block["stop"]) and opened:
            holds = opened.pop()
        elif block and opened and opened[-1] is not None and re.search(r"\belse\s*-?[%}]\}", line):
            holds = opened[-1] = not opened[-1]
        lines.append("" if holds is not None or False in opened else line)
    installs = f"\n# vllm=={values['vllm_version']}" if "vllm_version" in values else ""
    return "\n".join(lines) + installs


def _holds(test: re.Match[str], values: Mapping[str, Any]) -> bool | None:
    """Return True if a condition holds; None for one that the values do not decide, and for what changes the names."""
    value, how = _looked_up(test["path"], values), (test["how"] or "").strip()
    if (value is None and not test["path"].lstrip("$").startswith(".Values.")) or (value and test["word"] != "if"):
        return None  # a key that values.yaml lacks is none
    return (value == test["text"] if how in ("eq", "ne") else bool(value)) is not (how in ("not", "ne"))


def _looked_up(path: str, values: Any) -> Any:
    """Return the value of a path such as .Values.image.tag; None if there is none."""
    for key in path.lstrip("$.").split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _value(hole: re.Match[str], values: Mapping[str, Any]) -> str:
    """Return the text of an expression, unchanged if the values do not show it."""
    value, filters = _looked_up(hole["path"], values), [part.strip() for part in hole["filters"].split("|")]
    for part in filters:
        if instead := re.fullmatch(r"default[ (]\s*(?:[\"']([^\"']*)[\"']|([$.]*[\w.]+))\s*\)?", part):
            other = instead[1] if instead[2] is None else _looked_up(instead[2], values) or instead[2]
            value = value or (None if str(other)[:1] in ".$" or other == "omit" else other)
        elif not _PLAIN_FILTER.fullmatch(part):
            return hole[0]
    before = hole.string[: hole.start()].rstrip().rpartition("\n")[2].lstrip()
    if value is None or (isinstance(value, list | dict) and before.startswith("- ")):
        return hole[0]
    if isinstance(value, str) and "quote" not in filters:
        return value
    return json.dumps(str(value) if "quote" in filters else value)


def _repeated(loop: re.Match[str], values: Mapping[str, Any]) -> str:
    """Return what a loop within a line writes for each item of a list."""
    items, name = _looked_up(loop["path"], values), re.escape(loop["item"] or ".")
    if not isinstance(items, list) or not all(isinstance(item, str | int | float) for item in items):
        return loop[0]
    hole = re.compile(rf"\{{\{{-?\s*{name}\s*-?\}}\}}")
    return "".join(hole.sub(lambda _, item=item: str(item), loop["body"]) for item in items)


class Engine(NamedTuple):
    """A server that a chart starts: the words of vLLM, its environment, image, container and name."""

    words: tuple[str, ...]
    environment: Any
    image: str
    container: Container
    name: str


class _Found:
    """Settings of one server in the values.

    `about` is True if a name in them is that of vLLM, `is_open` if a setting of the server is not understood.
    """

    def __init__(self) -> None:
        self.models, self.flags, self.words = list[str](), dict[str, Any](), list[str]()
        self.image, self.environment, self.resources = "", None, dict[str, Any]()
        self.about = self.has_key = self.is_open = False
        self.left = _MOST


def engines(values: Mapping[str, Any], version: str) -> Iterator[Engine]:
    """Yield the servers of a chart's values; each of a list of models is one, with what stands beside the list."""
    for key, child in values.items():
        if _LISTS.search(str(key)) and isinstance(child, list):
            rest = {name: value for name, value in values.items() if name != key}
            made = [
                one for item in child[:_DEEPEST] if isinstance(item, dict) for one in _engine({**rest, **item}, version)
            ]
            if made:
                yield from made
                return
    yield from _engine(values, version)


def _engine(values: Mapping[str, Any], version: str) -> Iterator[Engine]:
    found = _Found()
    _walk(values, "", found, 0)
    models = sorted(found.models, key=lambda name: "/" not in name)  # an alias stands beside the model
    listed = found.words
    place = next((at for at, word in enumerate(listed) if re.match("--model(=|$)", word)), None)
    if place is not None:  # the templates know whether it is a word of `vllm serve`, or an option of the entry point
        is_joined = "=" in listed[place]
        named = listed[place].partition("=")[2] if is_joined else "".join(listed[place + 1 : place + 2])
        is_filled = bool(re.search(r"\$|\{\{", named))  # --model={{ .Values.vllm.model }}
        models = [*models, named] if is_filled else [named]
        listed = [*listed[:place], *listed[place + 2 - is_joined :]]
    flags = [word for word in listed if word.startswith("--")]
    is_named = found.about or "vllm" in found.image
    is_vllm = is_named or (
        flags and models and "/" in models[0] and all(word.partition("=")[0] in known() for word in flags)
    )
    count = len(found.flags) + len(flags)
    if not is_vllm or count + bool(models) < 2 - ("vllm" in found.image and bool(models)):
        return
    model = {"model": models[0] if models else "$MODEL"}
    tag = re.search(r":v?(\d+\.\d+\.\d+)", found.image)
    for key in list(found.flags):  # a key that the templates use otherwise
        is_conditional = "lora" in key.lower() and "--enable-lora" not in [*map(flag, found.flags), *flags]
        if is_conditional or (tag and release(known()[flag(key)].first) > release(tag[1])):
            del found.flags[key]
    pod = read_pod({}, {"resources": found.resources}, (), is_whole=False)
    is_public = inner(values, "service").get("type") in ("LoadBalancer", "NodePort") and not found.has_key
    line = (*command_line({**model, **found.flags}, version), *listed, *["$VALUES"] * found.is_open)
    pod = pod._replace(shared_memory=None, is_public=is_public)
    yield Engine(line, found.environment, found.image, pod, str(values.get("name") or ""))


def _walk(node: Mapping[str, Any], under: str, found: _Found, depth: int) -> None:
    """Collect what a node of the values says; parts that are about something else are left out."""
    for key, child in node.items():
        name = str(key)
        found.left -= 1
        is_unset = isinstance(child, int | float) and child < 0
        if found.left < 0 or is_unset or child in (None, "", [], {}):
            continue
        found.has_key = found.has_key or "apikey" in re.sub(r"[-_]", "", name.lower())
        if name == "resources" and isinstance(child, dict):
            found.resources = found.resources or child
        elif name in ("env", "extraEnv", "environment"):
            found.environment = found.environment or child
        elif name == "image" and "vllm" not in found.image:
            image = (
                f"{child.get('repository') or child.get('image') or child.get('name') or ''}:{child.get('tag') or ''}"
                if isinstance(child, dict)
                else str(child)
            )
            found.image = image.removesuffix(":") if image[:1] != ":" else found.image
        elif _APART.search(name):
            continue
        elif _ARGUMENTS.fullmatch(name) and any(word.startswith("-") for word in split(child)):
            found.words += split(child)
            found.has_key = found.has_key or "--api-key" in found.words
        elif isinstance(child, dict) and depth < _DEEPEST:
            found.about = found.about or "vllm" in name.lower()
            _walk(child, name, found, depth + 1)
        elif isinstance(child, str | int | float):
            is_model = _MODEL.fullmatch(name) or (under.lower() == "model" and name in _WITHIN_MODEL)
            if is_model and isinstance(child, str):
                found.models.append(child)
            elif flag(name) in known() and (flag(name).count("-") > 2 or flag(name) in _SHORT):
                found.flags.setdefault(name, child)
            elif re.search("vllm|engine|arg", under, re.IGNORECASE):
                found.is_open = True
