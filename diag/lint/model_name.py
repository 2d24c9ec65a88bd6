"""Rules about where a command names its model, and about the entry point of an image."""

from collections.abc import Iterator

from diag.lint.finding import Edit, removal
from diag.lint.rule import Example, LintRule, Match
from diag.lint.target import HELP, LintTarget, is_open
from diag.vllm.command.command import Command, Given


def _is_help(command: Command) -> bool:
    return any(given.spelled in HELP for given in command.given)


def _is_without_model(command: Command) -> bool:
    """Not where a shell may fill one in, nor where there are flags alone."""
    return not command.model and command.arguments > 0 and not any(map(is_open, command.words))


def has_model(command: Command) -> bool:
    """Whether it starts a server, and names its model or may do so."""
    return not _is_help(command) and not _is_without_model(command)


def by_flag(command: Command) -> list[Given]:
    """Each --model on the command line itself."""
    return [given for given in command.all("--model") if given.words]


def _no_model(target: LintTarget) -> Iterator[Match]:
    if _is_without_model(target.command) and not _is_help(target.command):
        default = "Qwen/Qwen3-0.6B" if target.since("0.9.0") else "a default model"
        yield Match(why=f"vLLM {target.version} serves {default}")


def _named_twice(target: LintTarget) -> Iterator[Match]:
    command, named = target.command, by_flag(target.command)
    if named and has_model(command) and command.arguments in command.strays and not command.by_module:
        yield Match(why=f"vLLM {target.version} exits with `unrecognized arguments`", edits=removal(named))


def _model_by_flag(target: LintTarget) -> Iterator[Match]:
    command, named = target.command, by_flag(target.command)
    is_serve = "serve" in command.words[: command.arguments] and not command.entry
    if named and is_serve and has_model(command) and command.arguments not in command.strays:
        refused = not target.since("0.11.1") and any(len(given.words) > 1 for given in named)
        first = range(command.arguments, command.arguments)
        yield Match(
            edits=(*removal(named), Edit(first, named[-1].values)),
            severity="error" if refused else None,
        )


def _model_not_read(target: LintTarget) -> Iterator[Match]:
    command = target.command
    first = command.words[command.arguments : command.arguments + 1]
    is_word = bool(first) and not first[0].startswith("-")
    if has_model(command) and _is_module(target) and not by_flag(command) and is_word:
        yield Match(
            "python -m vllm.entrypoints... takes its model only from --model"
            + ("" if command.by_module else ", and it is the entry point of this image"),
            fix="Use vllm serve MODEL ..., or --model MODEL" if command.by_module else "Use --model MODEL",
            edits=(Edit(range(command.arguments, command.arguments), ("--model",)),),
        )


def _is_own_image(command: Command) -> bool:
    """Whether it is an image of vLLM's own, by the last part of its name."""
    return command.image.rpartition("/")[2].startswith("vllm-openai")


def _is_module(target: LintTarget) -> bool:
    """Whether the module is started, as vLLM's own image does up to 0.9.1; 0.17.1's starts `vllm serve`."""
    command = target.command
    is_entry = _is_own_image(command) and command.entry is not None
    return command.by_module or (is_entry and not target.since("0.9.2"))


def _entry_point_repeated(target: LintTarget) -> Iterator[Match]:
    command = target.command
    if _is_own_image(command) and command.entry is not None and command.entry < command.arguments:
        again = range(command.entry, command.arguments)
        words = " ".join(command.words[at] for at in again)
        yield Match(f"`{words}` after the image, whose entry point starts the server", edits=(Edit(again),))


RULES = (
    LintRule(
        "no_model",
        "warning",
        "No model is named",
        "A command that names no model, neither as its first word nor by --model.",
        "vLLM serves a default model",
        "Name the model: vllm serve MODEL ...",
        Example("vllm serve --port 8000"),
        _no_model,
    ),
    LintRule(
        "model_named_twice",
        "error",
        "The model is named twice, as the first word and by --model",
        "`vllm serve MODEL` with --model.",
        "vLLM exits with `unrecognized arguments`",
        "Keep only the first word",
        Example("vllm serve m --model n"),
        _named_twice,
    ),
    LintRule(
        "model_by_flag",
        "warning",
        "vllm serve takes the model as its first word, not by --model",
        "`vllm serve --model MODEL`. Up to 0.11.0 it is an error.",
        "Releases up to 0.11.0 refuse --model; later ones accept it and log that it is deprecated",
        "Write vllm serve MODEL ...",
        Example("vllm serve --model m"),
        _model_by_flag,
    ),
    LintRule(
        "model_not_read",
        "error",
        "The API server module takes its model only from --model",
        "`python -m vllm.entrypoints.openai.api_server MODEL`, or the image of a release up to 0.9.1, which starts that"
        " module.",
        "vLLM refuses the word, or ignores it and serves a default model",
        "Use --model MODEL",
        Example("python -m vllm.entrypoints.openai.api_server m"),
        _model_not_read,
    ),
    LintRule(
        "entry_point_repeated",
        "error",
        "The image's own entry point is repeated",
        "`vllm serve` after one of vLLM's own images, whose entry point starts the server already.",
        "The entry point takes the words for its arguments: `unrecognized arguments`",
        "Remove it: only flags follow the image",
        Example("docker run vllm/vllm-openai:v0.32.0 vllm serve m"),
        _entry_point_repeated,
    ),
)
