"""Fill in the templates of a Helm chart or an Ansible role; read values of a chart whose templates are not known."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import ge, gt, le, lt
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.errors import BadUsage
from diag.core.files import parse_yaml, read_bytes, read_yaml
from diag.vllm.command.command import NOTATIONS, command_line, flag, split
from diag.vllm.command.container import Container, inner, items, listed, read_pod
from diag.vllm.command.shell import BLOCK, COMMENT, CONDITION, folded
from diag.vllm.flags.registry import known, release

_EXPRESSION, _HOLE, _LOOP, _TAG, _TEST = (
    re.compile(NOTATIONS["patterns"][f"charts_{name}"]) for name in ("expression", "hole", "loop", "tag", "test")
)
_REWRITTEN = [(re.compile(written), instead) for written, instead in NOTATIONS["chart_rewritten"].items()]
_SIZES = {"gt": gt, "ge": ge, "lt": lt, "le": le}
_OPERATORS = ("and", "contains", "eq", "int", "ne", "not", "or", *_SIZES)
_TOKEN = re.compile(r"[()]|\"[^\"]*\"|'[^']*'|[^\s()]+")
_PLAIN_FILTER = re.compile(r"image|required|quote|squote|int|string|toString|trim|n?indent\s+\d+|toYaml|to_yaml|")

_APART = re.compile("|".join(NOTATIONS["chart_apart"]), re.IGNORECASE)
_LISTS = re.compile(r"model|engine|server|instance|replica|deployment", re.IGNORECASE)
_MODEL = re.compile(NOTATIONS["patterns"]["charts_model"])
_PROBE = re.compile(NOTATIONS["patterns"]["charts_probe"])
_WITHIN_MODEL = frozenset[str](NOTATIONS["chart_model"])
_ARGUMENTS = re.compile(r"(?:vllm|engine|server|additional|extra|model)?_?(?:args|arguments|extra)", re.IGNORECASE)
_SHORT = ("--dtype", "--quantization", "--revision", "--seed", "--tokenizer", "--runner")
_OTHER = re.compile(NOTATIONS["patterns"]["charts_other"], re.IGNORECASE)
_IMAGE = re.compile(r"\{\{-?\s*include \"([\w.-]*[iI]mage[\w.-]*)\" [^{}|]*(?:\|\s*(?:trim|quote)\s*)*-?\}\}")
_DEFINED = re.compile(r"\{\{-?\s*define \"([\w.-]+)\"\s*-?\}\}(.*?)(?=\{\{-?\s*define \"|\Z)", re.DOTALL)
_BLOCK_OF = re.compile(NOTATIONS["patterns"]["charts_block_of"])
_KEY = re.compile(r"(?m)^\w+:[ \t]*$|^- ")
_REQUIRED = re.compile(r"required\s+\"[^\"]*\"\s+([.$]+[\w.]+)")
_REMARK, _LAST_END = re.compile(r"(?s)\{\{-?\s*/\*.*?\*/\s*-?\}\}"), re.compile(r"\{\{-?\s*end\s*-?\}\}\s*\Z")
_NAMED_VALUES = re.compile(r"\{\{-?\s*\$(\w+)\s*:=\s*(\$?\.Values[\w.]*)\s*-?\}\}")
_REPOSITORY = re.compile(r"[$.]*(?:\.Values|\$v\w*)((?:\.\w+)+)\.repository\b")
_EMPTY = re.compile(r"(?<![\w.'\"])([A-Za-z_][\w.]*)\s*\|\s*default\((?:\[\]|''|\"\"|0|false)(?:, true)?\)")
_COMPARED = re.compile(r"([\w.]+|'[^']*') == ([\w.]+|'[^']*')")
_OVERLAYS = re.compile(r"/(?:environments?|envs?|overlays?|values|profiles)(?:/|$)")
_DEEPEST_VALUES = 4
_MOST, _MOST_LOOPS, _MOST_ITEMS, _MOST_BYTES = 2000, 40, 20, 2**18
_DEEPEST = 6
_PLAY = re.compile(r"^(?:- |  )hosts:", re.MULTILINE)


def filled(text: str, file: Path) -> str:
    """Fill in what values.yaml of a chart, or the defaults of a role, give a template of it, on the same lines."""
    values: dict[str, Any] = {}
    if _PLAY.search(text):  # a playbook: the variables of all hosts beside it, and of its plays
        shared = file.parent / "group_vars" / "all.yml"
        with suppress(OSError, BadUsage):
            values |= inner(read_yaml(shared)) if shared.is_file() else {}
        with suppress(BadUsage):
            for play in (one for document in parse_yaml(text, file.name) for one in listed(document)):
                values |= inner(play, "vars")
        values = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
    for folder in file.absolute().parents[1:3] if "{{" in text and not values else ():
        with suppress(OSError, BadUsage):
            if file.suffix != ".j2" and (folder / "templates") in file.absolute().parents:
                chart = read_yaml(folder / "Chart.yaml").items()
                about = {str(key)[:1].upper() + str(key)[1:]: value for key, value in chart}
                values = {"Values": read_yaml(folder / "values.yaml") or {}, "Chart": about}
            elif (folder / "defaults" / "main.yml").is_file():
                values = read_yaml(folder / "defaults" / "main.yml")
        if isinstance(values, dict) and values:
            break
    if not (isinstance(values, dict) and values):
        return text
    with suppress(OSError):  # a chart's own helpers: images as the values that they name, blocks in their places
        helpers = file.with_name("_helpers.tpl")
        content = read_bytes(helpers, _MOST_BYTES).decode("utf-8", "replace") if file.suffix != ".tpl" else ""
        bodies = {name: _LAST_END.sub("", _REMARK.sub("", body)) for name, body in _DEFINED.findall(content)}
        paths = {name: _REPOSITORY.search(body) for name, body in bodies.items()}
        able = {name: path for name, path in paths.items() if path}
        text = _IMAGE.sub(lambda one: f"{{{{ .Values{able[one[1]][1]} | image }}}}" if one[1] in able else one[0], text)
        text = _BLOCK_OF.sub(lambda one: _indented(bodies.get(one["name"], ""), one), text)
    text = COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    for written, instead in _REWRITTEN:
        text = written.sub(instead, text)
    for name, path in dict(_NAMED_VALUES.findall(text)).items():
        text = re.sub(rf"\${name}(?=[.\s)])(?!\s*:?=)", lambda _, path=path: path, text)  # type: ignore[misc]
    text = _unrolled(_NAMED_VALUES.sub("", text), values)
    text = CONDITION.sub(lambda condition: _decided(condition, values), text)
    for _ in range(3):  # values may name others
        text = _HOLE.sub(lambda hole: _value(hole, values), text)
    lines, opened = list[str](), list[bool | None]()  # None: a condition that is not known, or whose way was taken
    for line in text.split("\n"):
        block, test = BLOCK.fullmatch(line), _TEST.search(line)
        holds = None
        if block and (block["opens"] or block["start"]):
            holds = _holds(test, values) if test else None
            is_whole = test and test["rest"].startswith(".") and not any(map(str.strip, lines))  # a user turns it on
            opened.append(holds := holds or bool(is_whole) if holds is not None else None)
        elif block and (block["ends"] or block["stop"]) and opened:
            holds = opened.pop()
        elif block and opened and opened[-1] is not None and (block["other"] or block["another"]):
            way = _holds(test, values) if test else True
            opened[-1] = False if opened[-1] else way
            holds = True
        is_left_out = holds is not None or False in opened
        lines.append(("\\" if lines and lines[-1].endswith("\\") else "") if is_left_out else line)
    installs = f"\n# vllm=={values['vllm_version']}" if "vllm_version" in values else ""
    return folded("\n".join(lines)) + installs


def chart_of(file: Path) -> Path | None:
    """Return the folder of the chart to which a file of values belongs, None for another file."""
    folders = file.absolute().parents[:_DEEPEST_VALUES] if "values" in file.stem else ()
    is_deep = len(file.parts) > 1 and bool(_OVERLAYS.search(file.parent.as_posix()))
    folders = folders if is_deep else folders[:1]
    return next((folder for folder in folders if (folder / "Chart.yaml").is_file()), None)


def overlaid(documents: Sequence[Any], file: Path) -> Sequence[Any]:
    """Put the values of an environment over those of its chart, which they complete; its version is the usual tag."""
    chart = chart_of(file)
    if not chart or len(documents) != 1 or not isinstance(documents[0], dict):
        return documents
    with suppress(OSError, BadUsage):
        is_own = file.absolute() == chart / "values.yaml"
        whole = documents[0] if is_own else _merged(read_yaml(chart / "values.yaml"), documents[0])
        about, files = inner(read_yaml(chart / "Chart.yaml")), sorted((chart / "templates").rglob("*.[yt]*"))[:_MOST]
        parts = (read_bytes(one, _MOST_BYTES) for one in files if one.is_file() and one.stat().st_size)
        text = b"" if "dependencies" in about else b"".join(parts)
        able = {key for key in whole if not text or f".{key}".encode() in text}  # a template reads the key
        whole = {key: part for key, part in whole.items() if key in able or inner(part).get("enabled") is not False}
        image, version = inner(whole, "image"), about.get("appVersion")
        is_usual = version and image.get("repository") and image.get("tag", "-") in ("", None)
        return [{**whole, "image": {**image, "tag": version}} if is_usual else whole]
    return documents


def _merged(usual: Any, over: Any) -> Any:
    if not isinstance(usual, dict) or not isinstance(over, dict):
        return over
    return {**usual, **{key: _merged(usual.get(key), value) for key, value in over.items()}}


def _unrolled(text: str, values: Mapping[str, Any]) -> str:
    """Repeat what stands within a loop over a list of the values, with the path of each item."""
    at = 0
    for _ in range(_MOST_LOOPS):
        loop = _LOOP.search(text, at)
        if not loop:
            break
        items, at, depth = looked_up(loop["path"], values), loop.end(), 1
        tags = ((depth := depth + (-1 if tag["ends"] else 1), tag) for tag in _TAG.finditer(text, at))
        end = next((tag for level, tag in tags if not level), None)
        is_list = isinstance(items, list) and all(isinstance(item, str | int | float | dict) for item in items)
        if not end or not (items if loop["with"] else is_list):
            continue
        item = loop["helm"] or loop["jinja"]
        body, name = text[at : end.start()], rf"{re.escape(item)}(?![\w$])" if item else r"\."
        named = re.compile(rf"(?<![\w.$\"'/)]){name}")
        paths = [loop["path"]] if loop["with"] else [f"{loop['path']}.{place}" for place in range(len(items))]
        if len(text) + len(body) * len(paths) > _MOST_BYTES:
            continue
        whole = ""
        for path in paths[:_MOST_ITEMS]:
            whole += _in_scope(body, named, path if item else f"{path}.", is_named=bool(item))
        lost = body.count("\n") - whole.count("\n")
        text, at = text[: loop.start()] + whole + "\n" * max(0, lost) + text[end.end() :], loop.start()
    return text


def _in_scope(body: str, named: re.Pattern[str], instead: str, *, is_named: bool) -> str:
    """Write the path of a loop's item in its expressions; the dot of a block within it is that block's."""
    opened: list[bool] = []

    def replaced(hole: re.Match[str]) -> str:
        tag, is_own = _TAG.match(hole[0]), is_named or not any(opened)
        if tag and tag["ends"]:
            del opened[-1:]
        elif tag:
            opened.append(bool(re.match(r"\W*(?:with|range)\b", hole[0])))
        return named.sub(instead, hole[0]) if is_own else hole[0]

    return _EXPRESSION.sub(replaced, body)


def _indented(body: str, place: re.Match[str]) -> str:
    """Indent the body of a helper, and what it indents itself; one that has names of its own stays a call."""
    if ":=" in body or not _KEY.search(body):
        return place[0]
    deep, key = int(place["deep"]), f"{place['key']}\n" if place["key"] else ""
    body = re.sub(r"(?<=indent )\d+", lambda number: str(int(number[0]) + deep), _REQUIRED.sub(r"\1", body))
    return key + "\n".join(f"{' ' * deep}{line}" for line in body.split("\n") if line.strip())


def _holds(test: re.Match[str], values: Mapping[str, Any]) -> bool | None:
    """Return True if a condition holds; None for one that the values do not decide, and for what changes the names."""
    rest = _EMPTY.sub(lambda name: name[1] if looked_up(name[1], values) else "''", test["rest"])
    rest = _COMPARED.sub(r"(eq \1 \2)", rest.replace("| length > 0", ""))
    tokens = ["(", *_TOKEN.findall(rest), ")"]
    try:
        value = _operand(tokens, values)
    except LookupError:
        return None
    return None if tokens or (value and test["word"] not in ("if", "elif")) else bool(value)


def _decided(condition: re.Match[str], values: Mapping[str, Any]) -> str:
    """Return the arm of a condition within a line that the values decide; the condition if they do not."""
    test, tag = _TEST.match(condition[0]), _EXPRESSION.match(condition["other"] or "")
    holds = _holds(test, values) if test else None
    if holds is None or (tag and re.search(r"if\b", tag[0])):
        return condition[0]
    return condition["then"] if holds else (condition["other"] or "")[tag.end() if tag else 0 :]


def _operand(tokens: list[str], values: Mapping[str, Any]) -> Any:
    """Take an operand of a condition from its words; LookupError if the values do not show it."""
    token = tokens.pop(0)
    if token == "(":
        parts: list[Any] = []
        name = tokens.pop(0) if tokens[0] in _OPERATORS else ""
        while tokens[0] != ")":
            parts.append(_operand(tokens, values))
        tokens.pop(0)
        able = {
            "and": all(parts),
            "or": any(parts),
            "not": not any(parts),
            "contains": str(parts[:1]) in str(parts[1:]),
        }
        if name == "int" or name in _SIZES:  # of a value that is no number nothing is known
            numbers = [int(part) for part in parts if str(part).isdecimal()]
            if len(numbers) < len(parts) or len(parts) != 1 + (name in _SIZES):
                raise LookupError
            return numbers[0] if name == "int" else _SIZES[name](*numbers)
        same = all(str(part) == str(parts[0]) for part in parts)
        if not parts or (not name and len(parts) > 1):
            raise LookupError
        return able.get(name, same is (name == "eq")) if name else parts[0]
    if token[0] in "\"'" or token.isdecimal():
        return int(token) if token.isdecimal() else token[1:-1]
    value = looked_up(token, values)
    if value is None and not token.lstrip("$").startswith(".Values."):
        raise LookupError
    return value  # a key that values.yaml lacks is none


def looked_up(path: str, values: Any) -> Any:
    """Return the value of a path such as .Values.image.tag; None if there is none."""
    for key in path.strip("$.").split("."):
        if isinstance(values, list):
            values = dict(enumerate(values)).get(int(key)) if key.isdigit() else None
        else:
            values = values.get(key) if isinstance(values, dict) else None
    return values


def _value(hole: re.Match[str], values: Mapping[str, Any]) -> str:
    """Return the text of an expression, unchanged if the values do not show it."""
    value, filters = looked_up(hole["path"], values), [part.strip() for part in hole["filters"].split("|")]
    for part in filters:
        if instead := re.fullmatch(r"default[ (]\s*(?:[\"']([^\"']*)[\"']|([$.]*[\w.]+))\s*\)?", part):
            other = instead[1] if instead[2] is None else looked_up(instead[2], values) or instead[2]
            value = value or (None if str(other)[:1] in ".$" or other == "omit" else other)
        elif written := re.fullmatch(r"printf \"([^\"%]*%[sdv][^\"%]*)\"", part):
            value = None if value is None else re.sub("%[sdv]", lambda _: str(value), written[1])  # noqa: B023
        elif re.fullmatch(r"join \" \"", part) and isinstance(value, list):
            value = " ".join(map(str, value))
        elif not _PLAIN_FILTER.fullmatch(part):
            return hole[0]
    if isinstance(value, dict) and "image" in filters and value.get("repository"):
        registry, tag = value.get("registry"), value.get("tag") or inner(values, "Chart").get("AppVersion")
        value = f"{f'{registry}/' if registry else ''}{value['repository']}{f':{tag}' if tag else ''}"
    is_empty = isinstance(value, dict) and not any(value.values()) and hole["path"].endswith("resources")
    is_left = is_empty or (value == "" and "required" in filters)  # a user gives them
    lead = hole.string[: hole.start()].rpartition("\n")[2]
    if value and not is_left and isinstance(value, list | dict) and not lead.strip():
        deep = re.search(r"n?indent\s+(\d+)", hole["filters"])
        indent = " " * (int(deep[1]) if deep else len(lead))
        pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
        block = [
            f"{indent}{'-' if key is None else f'{json.dumps(str(key))}:'} {json.dumps(item)}" for key, item in pairs
        ]
        return "\n".join(block)[len(lead) :] if block[0].startswith(lead) else "\n" + "\n".join(block)
    if value is None or is_left or (isinstance(value, list | dict) and lead.lstrip().startswith("- ")):
        return hole[0]
    if isinstance(value, str) and "quote" not in filters:
        return value
    return json.dumps(str(value) if "quote" in filters else value)


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
        self.image, self.environment, self.pod = "", None, dict[str, Any]()  # resources and probes
        self.about = self.has_key = self.is_open = False
        self.left = _MOST


def engines(values: Mapping[str, Any], version: str) -> Iterator[Engine]:
    """Yield the servers of a chart's values; each of a list of models is one, with what stands beside the list."""
    for key, child in values.items():
        if _LISTS.search(str(key)) and isinstance(child, list):
            rest = {name: value for name, value in values.items() if name != key and not _is_choice(name, value)}
            able = [{**item, **{name: rest[name] for name in rest if name not in item}} for item in items(values, key)]
            made = [one for item in able[:_MOST_ITEMS] for one in _engine(item, version)]
            if made:
                yield from made
                return
    for key, child in (("", values), *values.items()):  # each role of a chart that splits prefill and decode
        if {"prefill", "decode"} <= inner(child).keys():
            for role, other in (("decode", "prefill"), ("prefill", "decode")):
                way = {name: part for name, part in child.items() if name != other}
                whole = {**values, key: way} if key else way
                yield from _engine({**whole, "name": role}, version)
            return
    apart = [(str(key), child) for key, child in values.items() if "vllm" in str(key) and isinstance(child, dict)]
    servers = [one for key, child in apart for one in _engine({key: child, "name": key}, version, least=1)]
    yield from servers if len(servers) > 1 else _engine(values, version)


def _is_choice(name: str, value: Any) -> bool:
    """Return True for settings of which each server takes one: a mapping of mappings, such as profiles of parsers."""
    able = [isinstance(child, dict) for child in inner(value).values()]
    return len(able) > 1 and all(able) and not re.search("vllm|engine|server|resources|probe", name, re.IGNORECASE)


def is_published(values: Mapping[str, Any], words: Sequence[str] = ()) -> bool:
    """Return True if the values of a chart give its server a Service for others than the cluster, and no key."""
    kind = inner(values, "service").get("type") or values.get("serviceType")
    return kind in ("LoadBalancer", "NodePort") and "key" not in str(words).lower()


def _engine(values: Mapping[str, Any], version: str, least: int = 2) -> Iterator[Engine]:
    found = _Found()
    _walk(values, "", found, 0)
    models = sorted(found.models, key=lambda name: "/" not in name)  # an alias stands beside the model
    listed = [_HOLE.sub(lambda hole: _value(hole, {"Values": values}), word) for word in found.words]
    is_repeated = listed[:1] == ["serve"] and len(listed) > 1
    if is_repeated:  # to the entry point of the image
        listed = ["--model", *listed[1:]]
    place = next((at for at, word in enumerate(listed) if re.match("--model(=|$)", word)), None)
    if place is not None:  # the templates know whether it is a word of `vllm serve`, or an option of the entry point
        is_joined = "=" in listed[place]
        named = listed[place].partition("=")[2] if is_joined else "".join(listed[place + 1 : place + 2])
        is_filled = bool(re.search(r"\$|\{\{", named))  # --model={{ .Values.vllm.model }}
        models = [*models, named] if is_filled else [named]
        listed = [*listed[:place], *listed[place + 2 - is_joined :]]
    flags = [word for word in listed if word.startswith("--")]
    is_whole = all(word.partition("=")[0].replace("_", "-") in known() for word in flags)
    is_vllm = (
        "vllm" in found.image or (is_whole and found.about) or (flags and models and "/" in models[0] and is_whole)
    )
    count = len(found.flags) + len(flags)
    other = next((values[key] for key in ("backend", "engine", "runtime") if isinstance(values.get(key), str)), "")
    if not is_vllm or _OTHER.search(other) or count + bool(models) < least - ("vllm" in found.image and bool(models)):
        return
    model = {"model": models[0] if models else "$MODEL"}
    tag = re.search(r":v?(\d+\.\d+\.\d+)", found.image)
    for key in list(found.flags):  # a key that the templates use otherwise
        is_conditional = "lora" in key.lower() and "--enable-lora" not in [*map(flag, found.flags), *flags]
        if is_conditional or (tag and release(known()[flag(key)].first) > release(tag[1])):
            del found.flags[key]
    pod = read_pod({}, found.pod, (), is_whole=False)
    is_public = is_published(values) and not found.has_key
    line = (
        *["serve"] * is_repeated,
        *command_line({**model, **found.flags}, version),
        *listed,
        *["$VALUES"] * found.is_open,
    )
    pod = pod._replace(shared_memory=None, is_public=is_public)
    yield Engine(line, found.environment, found.image, pod, str(values.get("name") or ""))


def image_of(node: Any) -> str:
    """Return the image of the values of a chart; "" for none."""
    if not isinstance(node, dict):
        return str(node)
    name, tag = node.get("repository") or node.get("image") or node.get("name") or "", node.get("tag")
    tag = "$APP_VERSION" if tag == "" else tag  # of the chart, which the text does not show
    return f"{name}:{tag}" if name and tag else str(name)


def _walk(node: Mapping[str, Any], under: str, found: _Found, depth: int) -> None:
    """Collect what a node of the values says; parts that are about something else are left out."""
    for key, child in node.items():
        name = str(key)
        found.left -= 1
        is_unset = isinstance(child, int | float) and child < 0
        found.image = found.image or (image_of(node) if name == "repository" and "vllm" in str(child) else "")
        if found.left < 0 or is_unset or child in (None, "", [], {}):
            continue
        found.has_key = found.has_key or "apikey" in re.sub(r"[-_]", "", name.lower())
        if (name == "resources" or _PROBE.fullmatch(name)) and isinstance(child, dict):
            if child.get("enabled") is not False:
                found.pod.setdefault(name, child)
        elif name in ("env", "extraEnv", "environment"):
            found.environment = found.environment or child
        elif name == "image" and "vllm" not in found.image:
            inside = child if isinstance(child, dict) and "repository" not in child else {}
            of_vllm = (one for kind, one in inside.items() if "vllm" in str(kind).lower() and isinstance(one, dict))
            named = next(of_vllm, child)
            found.image = image_of(named) or found.image
        elif _APART.search(name):
            continue
        elif _ARGUMENTS.fullmatch(name) and any(word.startswith("-") for word in split(child)):
            found.words += split(child)
            found.has_key = found.has_key or "--api-key" in found.words
        elif isinstance(child, dict) and _OTHER.search(of := image_of(child.get("image") or "")) and "vllm" not in of:
            continue  # another program's container
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
