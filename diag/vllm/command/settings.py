"""Read the files of variables beside a launch: `.env` of Compose, its `env_file`, and what a script sources."""

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from diag.vllm.command.container import inner
from diag.vllm.command.dockerfile import CALLERS, beside, text_of
from diag.vllm.command.free_text import is_secret
from diag.vllm.command.shell import LONGEST, NOTATIONS

_LINE = re.compile(NOTATIONS["patterns"]["settings_line"])
_PLAIN = re.compile(r"(?!- |(?i:true|false|yes|no|on|off|null|~)?\Z)(?:[\w./@,+= -]|:(?! |\Z))*")
"""A value that YAML reads as a text wherever it stands."""
_REFERENCE = re.compile(NOTATIONS["patterns"]["settings_reference"])
_SOURCED = re.compile(NOTATIONS["patterns"]["settings_sourced"])
_PATH = re.compile(r"([\w.-]+(?:/[\w.-]+)*)[\"'})]*\Z")
_MOST_FILES, _MOST_VARIABLES, _LONGEST = 8, 1000, 200


def with_settings(text: str, file: Path) -> str:
    """Fill in a Compose file the variables of `.env` beside it, and write in a script those of the files it sources."""
    if file.suffix in (".yml", ".yaml") and re.search(r"(?m)^services:", text):
        written = _LINE.findall(text_of(file.with_name(".env")))[:_MOST_VARIABLES]
        plain = {name: value.strip("\"'") for name, value in written if not is_secret(name) and "$" not in value}
        return _interpolated(text, plain)
    for sourced in islice(_SOURCED.finditer(text) if file.suffix in CALLERS else (), _MOST_FILES):
        whole = (sourced["path"] or sourced["file"]).strip("\"'")
        named = re.fullmatch(r"\$\{?(\w+)\}?", whole)
        assigned = re.search(rf"(?m)^[ \t]*(?:\w+ )?{named[1]}=(.*)$", text) if named else None
        path = _PATH.search((assigned[1].strip() if assigned else whole)[-_LONGEST:])
        able = (beside(file, f"{above}{path[1].lstrip('/')}") for above in ("", "../") if path)
        content = next(filter(None, map(text_of, filter(None, able))), "")
        lines = [(name, value) for name, value in _LINE.findall(content)[:_MOST_VARIABLES] if "`" not in value]
        export = "export " * bool(sourced["exports"] or re.search(r"\bset -a\b|allexport", text))
        pairs = (f"{export}{name}={f'${name}' if is_secret(name) else value}; " for name, value in lines)
        is_open = sourced["tested"] and not sourced["end"]  # more stands in the branch
        before = f"if true{sourced['then']}" if is_open else sourced["before"]
        end = "" if sourced["tested"] else sourced["end"] or ""
        text = text.replace(sourced[0], f"{before}{''.join(pairs)}:{end}", 1) if lines else text
    return text


def _interpolated(text: str, values: Mapping[str, str]) -> str:
    """Fill in the variables of a Compose file: words for a variable that is not set are left out."""

    def value(reference: re.Match[str]) -> str:
        name, sign, rest = reference["name"] or reference["plain"], reference["sign"] or "", reference["rest"] or ""
        if sign.endswith("+"):
            return _REFERENCE.sub(value, rest.replace('"', "")) if values.get(name) else f"${{{name}:-}}"
        able = values.get(name or "", "")
        return able if able and _PLAIN.fullmatch(able) else f"${{{name}:-{able}}}" if able.isalpha() else reference[0]

    longest = max(map(len, values.values()), default=0)
    is_long = text.count("$") * longest > LONGEST * 8
    return text if is_long else _REFERENCE.sub(value, text)


def with_env_files(documents: Sequence[Any], file: Path) -> list[Any]:
    """Give the services of Compose the variables of their env_file beside; a secret by its name alone."""
    joined, left = list[Any](), _MOST_FILES
    for document in documents:
        services = {**inner(document, "services")}
        for name in [name for name, node in services.items() if inner(node).get("env_file")][:left]:
            left -= 1
            service = services[name]
            files = service.get("env_file")
            named = [inner(one).get("path", one) for one in (files if isinstance(files, list) else [files])][
                :_MOST_FILES
            ]
            places = [(one, beside(file, one)) for one in named if isinstance(one, str) and "$" not in one]
            texts = {one: text for one, place in places if place and (text := text_of(place))}
            pairs = service.get("environment") or []
            if isinstance(pairs, dict):
                pairs = [key if value is None else f"{key}={value}" for key, value in pairs.items()]
            if not texts or not isinstance(pairs, list):
                continue
            lines = (line for text in texts.values() for line in _LINE.findall(text)[:_MOST_VARIABLES])
            values = {key: value.strip("\"'") for key, value in lines}
            for pair in pairs:
                values.pop(str(pair).partition("=")[0], None)
            added = [key if is_secret(key) or "$" in value else f"{key}={value}" for key, value in values.items()]
            rest = [one for one in named if not (isinstance(one, str) and one in texts)]
            services[name] = {**service, "environment": [*added, *pairs], "env_file": rest}
        joined.append({**document, "services": services} if services else document)
    return joined
