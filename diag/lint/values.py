"""Rules about the value of one flag at a time."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from diag.lint.finding import HELP, Edit, LintFinding, at_least, is_open, number, removal, shown
from diag.vllm.command.parse import Command, Given
from diag.vllm.flags.registry import Flag, described, known

_MOST = float("inf")
_PORT = (1.0, 65535.0)
LIMITS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(
        (
            *("--max-num-seqs", "--max-num-batched-tokens", "--max-num-scheduled-tokens", "--max-num-active-seqs"),
            *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--block-size"),
            *("--decode-context-parallel-size", "--prefill-context-parallel-size", "--nnodes", "--max-loras"),
            *("--stream-interval", "--prefill-schedule-interval", "--dp-sync-interval"),
        ),
        (1, _MOST),
    ),
    **dict.fromkeys(
        (
            *("--long-prefill-token-threshold", "--max-num-queued-reqs", "--max-num-queued-tokens", "--node-rank"),
            *("--data-parallel-size-local", "--data-parallel-rank", "--cpu-offload-gb", "--sse-keep-alive-interval"),
            *("--swap-space", "--ubatch-size", "--max-cudagraph-capture-size"),
        ),
        (0, _MOST),
    ),
    **dict.fromkeys(("--max-model-len", "--max-logprobs"), (-1, _MOST)),
    **dict.fromkeys(("--data-parallel-rpc-port", "--master-port"), _PORT),
    "--port": (0, 65535),
    "--optimization-level": (0, 3),
    "--gpu-memory-utilization": (0, 1),
    "--kv-cache-metrics-sample": (0, 1),
    "--watermark": (0, 1),
    "--video-pruning-rate": (0, 1),
}
"""The least and the most that is accepted: `Field(ge=..., le=...)` in vllm/config; a port is the kernel's."""
_OPEN_BELOW = {"--gpu-memory-utilization", "--kv-cache-metrics-sample"}
_OPEN_ABOVE = {"--watermark", "--video-pruning-rate"}
_PAIRS = re.compile(r"\w+=\d+(?:,\w+=\d+)*")
_ON = {
    *("--enable-prefix-caching", "--enable-chunked-prefill", "--async-scheduling", "--use-tqdm-on-load"),
    *("--enable-log-deltas", "--enable-flash-late-interaction", "--scheduler-reserve-full-isl"),
}
"""Switches that are not off by default: their false matters."""
_EXECUTORS = ("ray", "mp", "uni", "external_launcher")
_ARE = {
    "integer": "a whole number",
    "size": "a whole number, perhaps with k, M or G",
    "number": "a number",
    "json": "JSON",
    "object": "a JSON object",
    "text": "",
}


def missing(command: Command, version: str) -> Iterator[LintFinding]:
    """Flags at the end, or before another one, that need a value."""
    for given in command.given:
        takes = given.option.flag.takes if given.option else "optional"
        if given.option and takes in ("one", "many") and not given.values and given.option.flag.in_release(version):
            yield LintFinding(
                "value_missing",
                "error",
                f"{shown(given)} has no value",
                f"vLLM {version} ends with `expected {'at least ' * (takes == 'many')}one argument`",
                f"{given.name} VALUE, or remove it",
            )


def wrong(command: Command, version: str) -> Iterator[LintFinding]:
    """Values of the wrong kind, out of range, or not among the choices."""
    for given in command.given:
        if given.option and given.values and not given.option.key and given.option.flag.in_release(version):
            if any(is_open(each) for each in given.values):
                continue
            yield from _kind(given, version) or _limits(given, version) or _choice(given, version)


def _kind(given: Given, version: str) -> tuple[LintFinding, ...]:
    flag = known()[given.name]
    if all(_is(flag, each, version) for each in given.values):
        return ()
    return (
        LintFinding(
            "value_of_another_kind",
            "error",
            f"{shown(given)}: {_told(given)} is not {_ARE[flag.value]}",
            f"vLLM {version} ends with `invalid value`",
            f"{given.name} with {_ARE[flag.value]}",
        ),
    )


def _is(flag: Flag, text: str, version: str) -> bool:
    """Whether the parser can read it."""
    kind, value = flag.value, number(text)
    if flag.name == "--limit-mm-per-prompt" and not at_least(version, "0.10.0") and _PAIRS.fullmatch(text):
        return True
    if kind == "text" or (flag.null and text in ("", "None")):
        return True
    if kind in ("json", "object"):  # releases before the described one took a bare number for some objects
        return _is_json(text, dict if kind == "object" and at_least(version, described()) else object)
    if kind == "number":
        return value is not None and not text.strip()[-1:].isalpha()
    if kind == "size":
        return text.lower() == "auto" or (value is not None and value == int(value) and "e" not in text.lower())
    return text.strip().lstrip("+-").replace("_", "").isdigit()


def _is_json(text: str, kind: type) -> bool:
    try:
        return isinstance(json.loads(text), kind)
    except (ValueError, RecursionError):
        return False


def _limits(given: Given, version: str) -> tuple[LintFinding, ...]:
    values = [value for value in map(number, given.values) if value is not None]
    if given.name not in LIMITS or all(_within(given.name, value) for value in values):
        return ()
    least, most = LIMITS[given.name]
    low = f"above {least:g}" if given.name in _OPEN_BELOW else f"at least {least:g}"
    high = "" if most == _MOST else f" and {'below' if given.name in _OPEN_ABOVE else 'at most'} {most:g}"
    return (
        LintFinding(
            "value_out_of_range",
            "error",
            f"{shown(given)} is {_told(given)}: it has to be {low}{high}",
            f"vLLM {version} does not start with it",
            f"{given.name} with a value {low}{high}",
        ),
    )


def _within(name: str, value: float) -> bool:
    least, most = LIMITS[name]
    if name == "--max-model-len" and value == 0:
        return False
    return (least < value if name in _OPEN_BELOW else least <= value) and (
        value < most if name in _OPEN_ABOVE else value <= most
    )


def _choice(given: Given, version: str) -> tuple[LintFinding, ...]:
    """The choices are those of one release; of any other it is only a question."""
    choices = known()[given.name].choices
    if not choices or all(each in choices for each in given.values if each != "None"):
        return ()
    same = at_least(version, described()) and at_least(described(), version)
    return (
        LintFinding(
            "not_a_choice",
            "error" if same else "info",
            f"{shown(given)}: {_told(given)} is not what vLLM {described()} accepts",
            f"it accepts {', '.join(choices[:12])}{' ...' if len(choices) > 12 else ''}",
            f"one of them{'' if same else f', or make sure that {version} has this one'}",
        ),
    )


def _told(given: Given) -> str:
    """The value; that of an object may hold a secret."""
    is_object = bool(given.option) and known()[given.name].value in ("json", "object")
    return "its value" if is_object else repr(" ".join(given.values)[:60])


def compilation(command: Command, version: str) -> Iterator[LintFinding]:
    """`-O '{...}'` and `-O.key=value`, which were --compilation-config until -O became a level."""
    if not known()["--optimization-level"].in_release(version):
        return
    for given in command.given:
        if re.fullmatch(r"-O(?:\..*)?", given.spelled) and ("." in given.spelled or "{" in "".join(given.values)):
            at = range(given.words.start, given.words.start + 1)
            new = f"-cc{command.words[at.start].removeprefix('-O')}"
            yield LintFinding(
                "not_a_level",
                "error",
                f"{given.spelled} with settings of the compilation",
                f"in vLLM {version} -O is a level from 0 to 3 and nothing else",
                "-cc in its place, short for --compilation-config",
                () if "level" in " ".join((given.spelled, *given.values)) else (Edit(at, (new,)),),
            )


def executor(command: Command, version: str) -> Iterator[LintFinding]:
    """`--distributed-executor-backend nccl` parses, and Executor.get_class fails later; a class has a dot in it."""
    for given in command.all("--distributed-executor-backend"):
        value = "".join(given.values)
        if value and "." not in value and not is_open(value) and value not in _EXECUTORS:
            yield LintFinding(
                "no_such_executor",
                "error",
                f"{shown(given)}: vLLM has no executor {value[:40]!r}",
                "the parser accepts it, and the start fails later: it says what starts the ranks",
                f"one of {', '.join(_EXECUTORS)}, or remove it",
                removal([given]),
            )


def dropped(command: Command, version: str) -> Iterator[LintFinding]:
    """Keys of the config file that are false and never reach the parser, of switches that are on or may be."""
    for key in command.dropped:
        spelled = known().get("--" + key.replace("_", "-"))
        if spelled and spelled.name in _ON:
            new = key.replace("_", "-")
            yield LintFinding(
                "false_is_dropped",
                "warning",
                f"{key}: false (in the --config file) does nothing",
                f"vLLM {version} passes over a false"
                + (" whose key has underscores" if at_least(version, "0.31.0") else " there"),
                f"{new}: false" if at_least(version, "0.31.0") else f"--no-{new} on the command line",
            )


def repeated(command: Command, version: str) -> Iterator[LintFinding]:
    """A flag that is given more than once with different values: the last one wins."""
    for name in dict.fromkeys(each.name for each in command.given if each.option):
        said = command.all(name)
        values = {(each.values, each.option.on if each.option else True) for each in said}
        if len(values) < 2 or name == "--middleware":  # the only one that collects
            continue
        *lost, last = said
        from_file = not lost[-1].words
        negated = len({on for _, on in values}) > 1
        kind = "is given both ways" if negated else f"is given {len(said)} times"
        yield LintFinding(
            "given_twice",
            "info" if from_file and len(said) == 2 else "warning",
            f"{name} {kind}: the last one wins",
            "the command line counts more than the --config file" if from_file else "argparse keeps the last value",
            f"keep {last.spelled} alone",
            removal(lost),
        )


def model(command: Command, version: str) -> Iterator[LintFinding]:
    """The model: missing, named twice, or named where this way to start does not look for it."""
    named = [each for each in command.all("--model") if each.words]
    first = command.words[command.arguments : command.arguments + 1]
    if any(each.spelled in HELP for each in command.given):
        return
    if not command.model and command.arguments and not any(is_open(each) for each in command.words):
        yield _no_model(version)
    elif named and command.arguments in command.strays:
        yield _named_twice(command, named, version)
    elif named and "serve" in command.words[: command.arguments] and not command.entry:
        refused = not at_least(version, "0.11.1") and any(len(each.words) > 1 for each in named)
        yield LintFinding(
            "model_by_flag",
            "error" if refused else "warning",
            "vllm serve takes the model as its first word, not by --model",
            "releases up to 0.11.0 refuse --model there; later ones accept it and announce its end",
            "vllm serve MODEL ...",
            (*removal(named), Edit(range(command.arguments, command.arguments), named[-1].values)),
        )
    elif _is_module(command, version) and not named and first and not first[0].startswith("-"):
        yield LintFinding(
            "model_not_read",
            "error",
            "python -m vllm.entrypoints... takes its model from --model only"
            + ("" if command.by_module else ", and it is the entry point of this image"),
            "the word is refused, or ignored and a default model served",
            "vllm serve MODEL ..., or --model MODEL" if command.by_module else "--model MODEL",
            (Edit(range(command.arguments, command.arguments), ("--model",)),),
        )


def repeated_entry(command: Command, version: str) -> Iterator[LintFinding]:
    """`docker run vllm/vllm-openai vllm serve m`: the words are arguments of the image's own entry point."""
    if _is_own_image(command) and command.entry is not None and command.entry < command.arguments:
        again = range(command.entry, command.arguments)
        yield LintFinding(
            "entry_point_repeated",
            "error",
            f"`{' '.join(command.words[at] for at in again)}` after the image, whose entry point starts the server",
            "the words are taken for arguments of it: `unrecognized arguments`",
            "leave it out: what follows the image are the flags",
            (Edit(again),),
        )


def _is_own_image(command: Command) -> bool:
    """Whether it is an image of vLLM's own, by the last part of its name."""
    return command.image.rpartition("/")[2].startswith("vllm-openai")


def _is_module(command: Command, version: str) -> bool:
    """Whether the module is started, as vLLM's own image does up to 0.9.1; 0.17.1's starts `vllm serve`."""
    return command.by_module or (
        _is_own_image(command) and command.entry is not None and not at_least(version, "0.9.2")
    )


def _no_model(version: str) -> LintFinding:
    default = "Qwen/Qwen3-0.6B" if at_least(version, "0.9.0") else "a default of its own"
    return LintFinding(
        "no_model", "warning", "no model is named", f"vLLM would serve {default}", "vllm serve MODEL ..."
    )


def _named_twice(command: Command, named: Sequence[Given], version: str) -> LintFinding:
    refused = f"vLLM {version} ends with `unrecognized arguments`"
    if command.by_module:
        what, instead = "a word stands before the flags that belongs to none", "remove it: --model names the model"
        return LintFinding("word_too_many", "error", what, refused, instead, (Edit(_first(command)),))
    what = "the model is named twice, as the first word and by --model"
    return LintFinding("model_named_twice", "error", what, refused, "keep the first word", removal(named))


def _first(command: Command) -> range:
    return range(command.arguments, command.arguments + 1)
