"""Rules about the container in which `docker run` or `podman run` starts the server."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from diag.lint.removed import V1
from diag.lint.rule import Example, LintTarget, Match, is_open, rule

_ROOT, _DISABLED = "VLLM_CACHE_ROOT", "VLLM_DISABLE_COMPILE_CACHE"


@rule(
    "info",
    "The compile cache is lost with the container",
    f"`docker run` or `podman run` without a volume that covers {_ROOT}, /root/.cache/vllm in vLLM's own images. Not"
    " with --enforce-eager, which compiles nothing.",
    "torch.compile keeps its results there: a new container compiles again, which takes from seconds to a minute and"
    " more of each start",
    "Mount a volume at /root/.cache/vllm",
    Example(
        "docker run --gpus all -v ~/models:/models vllm/vllm-openai:v0.32.0 m",
        leaves="docker run --gpus all -v vllm-cache:/root/.cache/vllm vllm/vllm-openai:v0.32.0 m",
    ),
)
def compile_cache_is_lost(target: LintTarget) -> Iterator[Match]:
    command, environment = target.command, target.command.environment
    before = command.words[: command.arguments if command.entry is None else command.entry]
    compiles = target.since(V1) and not target.is_on("--enforce-eager")
    root = environment.get(_ROOT) or f"{environment.get('XDG_CACHE_HOME') or '/root/.cache'}/vllm"
    is_open_text = is_open(root) or any(map(is_open, before))
    if not _is_run(before) or not compiles or _DISABLED in environment or is_open_text:
        return
    places, cache = _mounted(before), PurePosixPath(root)
    # the home of another image is unknown
    is_known = "/vllm-openai" in command.image or _ROOT in environment or not places
    if is_known and not any(cache.is_relative_to(place) for place in places):
        yield Match(
            f"No volume covers {cache}: the compile cache is lost with the container",
            fix=f"Add -v vllm-cache:{cache}, or a folder of the host",
        )


def _is_run(words: Sequence[str]) -> bool:
    """Return True for `docker run` whose user and volumes are those that the words name."""
    names = [PurePosixPath(word).name for word in words]
    is_run = any(name in ("docker", "podman") for name in names) and "run" in words
    return is_run and not any(word.startswith(("--volumes-from", "--user", "-u")) for word in words)


def _mounted(words: Sequence[str]) -> list[str]:
    """Return the places in the container at which volumes or folders of the host are mounted."""
    found = []
    for word, following in zip(words, (*words[1:], ""), strict=True):
        option, joined, value = word.partition("=")
        text = value if joined else following
        if option in ("-v", "--volume"):
            found.append("".join(text.split(":")[1:2]))  # without a colon it is an anonymous volume
        elif option == "--mount":
            keys = dict(part.partition("=")[::2] for part in text.split(","))
            found.append(keys.get("target") or keys.get("destination") or keys.get("dst") or "")
        elif word.startswith("-v"):
            found.append("".join(word.split(":")[1:2]))
    return [place for place in found if place.startswith("/")]


RULES = (compile_cache_is_lost,)
