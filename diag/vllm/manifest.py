"""The containers of a Compose file or a Kubernetes manifest as commands that a shell would run."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diag.yaml import documents


def started(file: Path) -> Iterator[str]:
    """A `docker run` for every container that has to do with vLLM; none where the file is no manifest."""
    for each in documents(file):
        yield from _within(each)


def _within(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from _container(node)
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _within(each)


def _container(node: Mapping[Any, Any]) -> Iterator[str]:
    """Kubernetes overrides the image's entry point by `command`, Compose by `entrypoint`."""
    words = [word for name in ("entrypoint", "command", "args") for word in _words(node.get(name))]
    image = node.get("image")
    if isinstance(image, str) and ("vllm" in image or any("vllm" in each for each in words)):
        named = image if "vllm" in image else "vllm"
        pairs = [word for pair in _environment(node) for word in ("-e", pair)]
        yield shlex.join(["docker", "run", *pairs, named, *words])


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
