"""The containers of a Compose file or a Kubernetes manifest as commands that a shell would run."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diag.core.yaml import documents

_PODS = ("containers", "initContainers")
_MANIFEST_KEYS = {"apiVersion", "kind", "services"}


def is_manifest(file: Path) -> bool:
    """Whether a document of it says that it is one."""
    return any(isinstance(document, dict) and not _MANIFEST_KEYS.isdisjoint(document) for document in documents(file))


def started(file: Path) -> Iterator[str]:
    """A `docker run` for every container that has to do with vLLM; none where the file is no manifest."""
    for document in documents(file):
        yield from _within(document, "")


def _within(node: Any, under: str) -> Iterator[str]:
    if isinstance(node, dict):
        yield from _container(node, under in _PODS)
        for key, child in node.items():
            yield from _within(child, str(key))
    for child in node if isinstance(node, list) else ():
        yield from _within(child, under)


def _container(node: Mapping[Any, Any], of_pod: bool) -> Iterator[str]:
    """Kubernetes overrides the image's entry point by `command`, Compose by `entrypoint`."""
    program, *more = _words(node.get("command" if of_pod else "entrypoint")) or [""]
    words = [*more, *_words(node.get("args" if of_pod else "command"))]
    image = node.get("image")
    if isinstance(image, str) and ("vllm" in image or any("vllm" in word for word in (program, *words))):
        named = image if "vllm" in image else "vllm"
        options = [word for pair in _environment(node) for word in ("-e", pair)]
        options += ["--entrypoint", program] if program else []
        yield shlex.join(["docker", "run", *options, named, *words])


def _words(value: Any) -> list[str]:
    """A list of words, or a text that a shell would split."""
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError:
            return value.split()
    return [str(word) for word in value] if isinstance(value, list) else []


def _environment(node: Mapping[Any, Any]) -> Iterator[str]:
    variables = node.get("env", node.get("environment"))
    if isinstance(variables, dict):
        yield from (f"{name}={value}" for name, value in variables.items())
    for entry in variables if isinstance(variables, list) else ():
        if isinstance(entry, dict) and "value" in entry:
            yield f"{entry.get('name')}={entry['value']}"
        elif isinstance(entry, str) and "=" in entry:
            yield entry
