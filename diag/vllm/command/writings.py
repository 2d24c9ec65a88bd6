"""Recognize the notation of a launch: Python, a Dockerfile, YAML, variables of a worker, or the words of a shell."""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress

from diag.core.errors import BadUsage, NoLaunch
from diag.core.files import parse_json, parse_toml
from diag.vllm.command.command import NOTATIONS, command_line, from_variables, serve, split, unread
from diag.vllm.command.container import Container
from diag.vllm.command.dockerfile import is_dockerfile, last_stage
from diag.vllm.command.free_text import is_secret
from diag.vllm.command.hcl import documents as hcl_documents
from diag.vllm.command.hcl import is_hcl
from diag.vllm.command.manifests import WORKER, Writing, containers, is_yaml, parse, template, templated
from diag.vllm.command.python_source import engines, is_parsed, is_python
from diag.vllm.flags.registry import known

FORMS: Mapping[str, str] = NOTATIONS["forms"]
EXPECTED = (
    "expected `vllm serve MODEL --flag value ...` or `python -m vllm.entrypoints.openai.api_server ...`, as"
    f" {', '.join(FORMS)}"
)
VARIABLES = "a worker's variables"
_MOST_VARIABLES = 1000
_SCRIPT_CELL = re.compile(r"\s*%%(?:script[ \t]+)?(?:sh|bash)\b.*")
_WRITTEN_CELL = re.compile(r"\s*%%(?:writefile|file)[ \t]+(?:-a[ \t]+)?\S*?(\.\w+)?[ \t]*\n")
_SHELL_LINE = re.compile(r"^[ \t]*(?:!+|%(?:sh|sx|system)[ \t])((?:.*\\\n)*.*)", re.MULTILINE)
_DATABRICKS = "# Databricks notebook source"
_HCL = (".tf", ".hcl", ".nomad")
_QUADLET = re.compile(r"^\[Container\][ \t]*$", re.MULTILINE)
_QUADLET_OPTIONS: Mapping[str, str] = NOTATIONS["quadlet"]
_SUPERVISED = re.compile(r"^\[program:[^\]\n]*\][ \t]*$", re.MULTILINE)
_UNIT = re.compile(r"^\[Service\]\s*$", re.MULTILINE)
_VARIABLE = re.compile(r"(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_SAMPLING = frozenset[str](NOTATIONS["sampling"])
_LONG_FLAG = re.compile(NOTATIONS["patterns"]["writings_long_flag"])


def writings(text: str, suffix: str, version: str) -> tuple[Writing, ...]:
    """Return the launches of a text that is no shell script, by its notation; () for the words of a shell.

    `suffix` is that of the text's file. BadUsage if the text cannot be read in its notation.
    """
    if is_dockerfile(text):
        return _from_dockerfile(text, version)
    is_code = suffix in (".py", ".ipynb", ".sh", ".bash", ".sbatch", ".slurm")
    is_code = is_code or text.lstrip().startswith(("import ", "from "))
    is_blocks = suffix in _HCL or (not is_code and is_hcl(text))
    if is_blocks or suffix == ".json" or (not is_code and is_yaml(text)):
        documents = hcl_documents(text) if is_blocks else parse(text, "the text")
        launches = templated(containers(documents, version), "" if is_blocks else text)
        for document in () if launches else documents:  # model.json of Triton's vLLM backend has an engine's arguments
            keys = [f"--{key}".replace("_", "-") for key in document] if isinstance(document, dict) else []
            if "--model" in keys and all(key in known() or key[2:] in _SAMPLING for key in keys):
                launches += (Writing("Triton's model.json", serve(command_line(document, version), {})),)
        if not launches:
            kind = "text" if is_blocks else "YAML"
            raise NoLaunch(f"{template(text) or f'the {kind} has no container that starts vLLM'}: {EXPECTED}")
        return launches
    if suffix == ".ipynb" or text.startswith(_DATABRICKS):
        code, shell, guide = _cells(text)
        files = [file for cell in code if (file := _WRITTEN_CELL.match(cell))]
        code = [cell for cell in code if not _WRITTEN_CELL.match(cell)]
        written = [("\n".join(shell), ""), (re.sub(r"(?m)^[ \t]*!(?=\w)", "", guide), ".md" if "```" in guide else "")]
        written += [(cell.string[cell.end() :], cell[1] if cell[1] not in (".sh", ".bash") else "") for cell in files]
        told = [Writing("a notebook", part, is_here=not end, suffix=end) for part, end in written if "vllm" in part]
        with suppress(BadUsage):
            told = [
                *(engines("\n".join(filter(is_parsed, code)), version) if is_python("\n".join(code)) else ()),
                *told,
            ]
        return tuple(told or [Writing("a notebook", "\n".join(code), is_here=True)])
    if suffix == ".toml":
        with suppress(ValueError):
            return tuple(containers([parse_toml(text)], version))
    is_written = bool(re.search(r"<<-?[ \t]*['\"]?\w", text))  # by a script
    if _QUADLET.search(text) and not is_written:
        return _from_quadlet(text)
    if _SUPERVISED.search(text) and not is_written:
        return _supervised(text)
    is_source = suffix == ".py" and re.search(r"vllm serve |vllm\.entrypoints\.", text)
    if is_source or (suffix != ".sh" and is_python(text)):
        launches = tuple(engines(text, version))
        if not launches:
            raise NoLaunch(f"the Python source starts no vLLM: {EXPECTED}")
        return launches
    if suffix == ".py":
        raise NoLaunch(f"the Python source starts no vLLM: {EXPECTED}")
    return _from_variables(text, version)


def _from_quadlet(text: str) -> tuple[Writing, ...]:
    """Return the container of a quadlet, a unit of Podman."""
    words = ["podman", "run"]
    image, program = "", list[str]()
    for key, value in re.findall(r"^(\w+)=(.*)$", re.sub(r"\\\r?\n[ \t]*", " ", text), re.MULTILINE):
        if key == "Image":
            image = value.strip()
        elif key == "Exec":
            program = split(value)
        elif key == "PodmanArgs":
            words += split(value)
        elif key in _QUADLET_OPTIONS:
            words += [word for part in split(value) for word in (_QUADLET_OPTIONS[key], part)]
    return (Writing("a quadlet", shlex.join([*words, image, *program])),)


def _supervised(text: str) -> tuple[Writing, ...]:
    """Return the programs of a configuration of Supervisor."""
    launches = list[Writing]()
    for name, program in re.findall(r"^\[program:([^\]\n]*)\][ \t]*$(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL):
        command, variables = (
            re.search(rf"^{key}[ \t]*=[ \t]*(.*(?:\n[ \t]+.*)*)", program, re.MULTILINE)
            for key in ("command", "environment")
        )
        if command and "vllm" in command[1]:
            pairs = variables[1].replace(",", " ") if variables else ""
            line = re.sub(r"\s*\n\s*", " ", command[1])
            line = re.sub(r"%\(ENV_(\w+)\)s", r"${\1}", line)
            launches.append(Writing("a program of Supervisor", f"{pairs} {line}", is_here=True, place=name))
    return tuple(launches)


def _cells(text: str) -> tuple[list[str], list[str], str]:
    """Return the cells of a notebook with code, their lines for a shell, which begin with !, and its prose."""
    if text.startswith(_DATABRICKS):
        parts = re.split(r"^# COMMAND -+$", re.sub(r"^# MAGIC ?", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
        cells = [("code", part.strip()) for part in parts]
    else:
        try:
            cells = parse_json(text).get("cells", [])
            cells = [(cell.get("cell_type"), "".join(cell.get("source", ""))) for cell in cells]
        except (ValueError, RecursionError, AttributeError, TypeError):
            raise BadUsage("the notebook cannot be read: it is no JSON") from None
    code, prose = ([text for kind, text in cells if kind == wanted] for wanted in ("code", "markdown"))
    scripts = [_SCRIPT_CELL.sub("", text) for text in code if _SCRIPT_CELL.match(text)]
    lines = [line for text in code if not _SCRIPT_CELL.match(text) for line in _SHELL_LINE.findall(text)]
    # what a line starts beside its last command ends with its cell
    lines = [line if line.rstrip().endswith("&") else re.sub(r"(?<=\s)&(?=\s)", ";", line) for line in lines]
    return code, [*lines, *scripts], "\n".join(prose)


def notation(text: str) -> str:
    """Return the name of a text of shell words, "" for a plain command."""
    return "a systemd unit" if _UNIT.search(text) and not _QUADLET.search(text) else ""


def _from_dockerfile(text: str, version: str) -> tuple[Writing, ...]:
    """Return the program of the last stage."""
    stage = last_stage(text)
    program, *words = stage.program or ("",)
    options = [word for name, value in stage.environment.items() for word in ("-e", f"{name}={value}")]
    options += ["--entrypoint", program] if program else []
    image = stage.image if "vllm" in stage.image else "vllm"
    if not program and not words:
        worker = from_variables(stage.environment, version) if WORKER.search(stage.image) else None
        if worker:
            return (Writing("a Dockerfile, by its variables", serve(worker, unread(stage.environment))),)
        if not re.search(r"(?:^|/)vllm-openai(?::|@|$)", stage.image):
            raise NoLaunch(
                "the Dockerfile has no ENTRYPOINT or CMD that starts vLLM: give the arguments of its container"
            )
        words = ["$ARGS"]  # of the container, for the image's own entry point
    around = Container("image", shared_memory=None, is_whole=False, baked=stage.baked, literal=stage.literal)
    return (Writing("a Dockerfile", shlex.join(["docker", "run", *options, image, *words]), around),)


def _from_variables(text: str, version: str) -> tuple[Writing, ...]:
    """Return the launch that a worker makes of variables, if the text has nothing but assignments."""
    variables: dict[str, str] = {}
    for written in text.splitlines():
        assigned = _VARIABLE.fullmatch(written.strip())
        if assigned:
            variables[assigned[1]] = " ".join(split(assigned[2])) if assigned[2][:1] in ("'", '"') else assigned[2]
        elif written.strip() and not written.lstrip().startswith("#"):
            return ()
    words = from_variables(variables, version) if 1 < len(variables) < _MOST_VARIABLES else None
    rest = unread(variables)
    # MODEL_NAME may be of any program, which has more variables of its own
    is_other = sum(not is_secret(name) for name in rest) * 2 > len(variables)
    if words is None or is_other or not any(_LONG_FLAG.match(word) for word in words):
        return ()
    return (Writing(VARIABLES, serve(words, rest)),)
