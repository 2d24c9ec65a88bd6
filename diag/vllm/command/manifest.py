"""The containers of a Compose file or a Kubernetes manifest as commands that a shell would run."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diag.core.yaml import documents

_PODS = ("containers", "initContainers")
_TELLING = {"apiVersion", "kind", "services"}


def is_manifest(file: Path) -> bool:
    """Whether a document of it says that it is one."""
    return any(isinstance(each, dict) and not _TELLING.isdisjoint(each) for each in documents(file))


def started(file: Path) -> Iterator[str]:
    """A `docker run` for every container that has to do with vLLM; none where the file is no manifest."""
    for each in documents(file):
        yield from _within(each, "")


def _within(node: Any, under: str) -> Iterator[str]:
    if isinstance(node, dict):
        yield from _container(node, under in _PODS)
        for key, each in node.items():
            yield from _within(each, str(key))
    for each in node if isinstance(node, list) else ():
        yield from _within(each, under)


def _container(node: Mapping[Any, Any], of_pod: bool) -> Iterator[str]:
    """Kubernetes overrides the image's entry point by `command`, Compose by `entrypoint`."""
    program, *more = _words(node.get("command" if of_pod else "entrypoint")) or [""]
    words = [*more, *_words(node.get("args" if of_pod else "command"))]
    image = node.get("image")
    if isinstance(image, str) and ("vllm" in image or any("vllm" in each for each in (program, *words))):
        named = image if "vllm" in image else "vllm"
        options = [word for pair in _environment(node) for word in ("-e", pair)]
        options += ["--entrypoint", program] if program else []
        yield shlex.join(["docker", "run", *options, named, *words])


def _words(said: Any) -> list[str]:
    """A list of words, or a text that a shell would split."""
    if isinstance(said, str):
        try:
            return shlex.split(said)
        except ValueError:
            return said.split()
    return [str(each) for each in said] if isinstance(said, list) else []


def _environment(node: Mapping[Any, Any]) -> Iterator[str]:
    said = node.get("env", node.get("environment"))
    if isinstance(said, dict):
        yield from (f"{name}={value}" for name, value in said.items())
    for each in said if isinstance(said, list) else ():
        if isinstance(each, dict) and "value" in each:
            yield f"{each.get('name')}={each['value']}"
        elif isinstance(each, str) and "=" in each:
            yield each
