"""The container that a command starts: its image, which words go into it, and where its folders are."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from diag.core.lazy_regex import lazy

_IMAGE = lazy(r"(?:\S*/)?[\w.-]*vllm[\w.-]*(?::\S+|@sha256:\S+)?|\$\{?\w*vllm\w*\}?", re.IGNORECASE)
_PROGRAM = lazy(r"docker|docker-compose|podman|nerdctl|apptainer|singularity|kubectl|oc|crictl|ctr|lxc|nsenter|chroot")
_HOSTS = {"ssh", "pdsh", "pssh", "clush", "rsh", "mosh", "srun", "mpirun", "ansible", "salt"}
IS_ALONE = lazy(r"-[itdP]+|--(?:rm|detach|init|privileged|interactive|tty|read-only|nv|rocm)")
"""Options of `docker run` that take no value: what follows any other one is not the image."""
_DEFAULT = lazy(r"\$\{\w+:?-([^{}$]*)\}")


class Image(NamedTuple):
    """`arguments` is where vLLM's own begin, None where the container starts something else.

    `entry` is the place from which on words go to the image's own entry point, None where a program is named.
    """

    name: str = ""
    arguments: int | None = None
    entry: int | None = None


def image(words: Sequence[str]) -> Image:
    """What `docker run IMAGE ...` or `kubectl run --image=IMAGE -- ...` starts."""
    words = [default(word) for word in words]
    start = _run(words) + 1
    by_option = any(word.partition("=")[0] == "--image" for word in words[start:])
    for at in range(start, len(words)):
        before, named = words[at - 1], words[at].removeprefix("--image=")
        is_option = before == "--image" or named != words[at]
        is_value = before.startswith("-") and "=" not in before and not IS_ALONE.fullmatch(before)
        if (is_option if by_option else not is_value) and _IMAGE.fullmatch(named):
            return _entered(words, _after_dashes(words) if by_option else at + 1, named)
    return Image()


def _after_dashes(words: Sequence[str]) -> int:
    return words.index("--") + 1 if "--" in words else len(words)


def _run(words: Sequence[str]) -> int:
    """The place of `run` after a program that starts containers; the end where there is none."""
    able = (at for at, word in enumerate(words) if _PROGRAM.fullmatch(Path(word).name) or word.startswith("$"))
    program = next(able, len(words))
    return words.index("run", program) if "run" in words[program:] else len(words)


def _entered(words: Sequence[str], entry: int, name: str) -> Image:
    """The image's own entry point is taken for vLLM's; another one is the program of the words after the image."""
    options = [
        (option, after) for option, after in pairwise(words[:entry]) if option.partition("=")[0] == "--entrypoint"
    ]
    program = [option.partition("=")[2] or after for option, after in options]
    serves = list(words[entry : entry + 1]) == ["serve"]
    if program and not (Path(program[-1]).name == "vllm" and serves):
        return Image(name)
    return Image(name, entry + serves, None if program else entry)


def default(text: str) -> str:
    """What a variable is where nobody sets it: x for ${NAME:-x}."""
    return _DEFAULT.sub(r"\1", text)


def elsewhere(words: Sequence[str]) -> str:
    """Where the folders of a command are when they are not here."""
    names = {Path(word).name for word in words}
    in_container = any(map(_PROGRAM.fullmatch, names))
    return "in the container" if in_container else "on another host" if names & _HOSTS else ""
