"""Translate keyword arguments (Python, YAML, variables in upper case) into the words of a command line."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from diag.core.errors import BadUsage
from diag.vllm.command.free_text import is_secret
from diag.vllm.flags.registry import known, release

_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_MOST_BYTES = 2**20
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_RENAMED_LEVEL = "0.12.0"
"""The release from which on the key `level` of --compilation-config is called `mode`."""

_VARIABLES: Mapping[str, str] = {
    "MODEL_NAME": "model",
    "MODEL_ID": "model",
    "MODEL_REVISION": "revision",
    "TOKENIZER_NAME": "tokenizer",
    "OPENAI_SERVED_MODEL_NAME_OVERRIDE": "served_model_name",
    "CUSTOM_CHAT_TEMPLATE": "chat_template",
    "VLLM_CONFIG_FILE": "config",
}
"""Variables of RunPod's worker (src/args_builder.py) whose name is no flag in upper case."""
_EXTRA = ("VLLM_EXTRA_ARGS", "VLLM_ADDITIONAL_ARGS")
"""Variables that hold words of a command line: of RunPod's worker, and of KServe's LLMInferenceService."""
_OF_THE_WORKER = frozenset(("HOST", "PORT", "API_KEY", "CONFIG", "HELP", "LOG_LEVEL"))
"""Names of flags that RunPod's worker sets itself, or does not read."""
_SAGEMAKER = "SM_VLLM_"
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
            return [value]  # on or off, which the text does not show
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
    prefixed = {name[len(_SAGEMAKER) :]: value for name, value in variables.items() if name.startswith(_SAGEMAKER)}
    found: dict[str, Any] = {}
    for name, text in (prefixed or variables).items():
        keyword = _VARIABLES.get(name, name.lower())
        is_flag = name == name.upper() and f"--{keyword}".replace("_", "-") in known()
        if text and (prefixed or (is_flag and name not in _OF_THE_WORKER and not is_secret(name))):
            found[keyword] = text
    if not found.get("model"):
        return None
    return [*command_line(found, version), *(word for name in _EXTRA for word in split(variables.get(name, "")))]


def unread(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are no arguments: they stay variables of the process."""
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(_SAGEMAKER)
        and name not in (*_VARIABLES, *_EXTRA)
        and (is_secret(name) or name in _OF_THE_WORKER or f"--{name.lower()}".replace("_", "-") not in known())
    }


def split(value: Any) -> list[str]:
    """Return a list of words; a text is split as by a shell. BadUsage if an alias of YAML makes them very long."""
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError:
            return value.split()
    words = [str(word) for word in value] if isinstance(value, list) else []
    if sum(map(len, words)) > _MOST_BYTES:
        raise BadUsage("a list of words has more than 1 MiB")
    return words


def line(words: Iterable[str], environment: Mapping[str, str], image: str = "") -> str:
    """Write `vllm serve` with these words, in a container if the image is known."""
    return shlex.join(_line(list(words), environment, image))


def _line(words: list[str], environment: Mapping[str, str], image: str) -> Iterator[str]:
    if not image:
        yield from (f"{name}={value}" for name, value in environment.items())
        yield from ("vllm", "serve", *words)
        return
    yield from ("docker", "run")
    for name, value in environment.items():
        yield from ("-e", f"{name}={value}")
    yield from ("--entrypoint", "vllm", image, "serve", *words)
