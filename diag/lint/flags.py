"""Rules about the names of flags and environment variables: abbreviated, misspelt, or not in this release."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import lru_cache

from diag.lint.removed import INEFFECTIVE, REPLACED_VARIABLES, V1, V1_ONLY, ReplacedVariable, removed_name
from diag.lint.rule import Edit, LintTarget, Match, at_least, is_open, removal, rule, shown
from diag.vllm.command.command import Command, Given
from diag.vllm.flags.registry import Flag, known, parsers
from diag.vllm.metric_names import newest, reads, variables

_PLUGINS = ("ARCTIC_INFERENCE_ENABLED", "VLLM_PLUGINS")
"""Variables that enable plugins, which may add flags."""
_CLOSE = 0.8
_VERY_CLOSE = 0.93
_NO_DOTTED_KEYS = "0.8.5"
"""The last release that is known to refuse `--compilation-config.level 3`."""


@rule()
def unknown_flag(target: LintTarget) -> Iterator[Match]:
    if other_program(target.command):
        return
    # a plugin or a fork has flags of its own: a name like one of vLLM's may be one of them
    plugin = next((name for name in _PLUGINS if target.command.environment.get(name, "0") not in ("", "0")), "")
    for mention in _unrecognized(target):
        if len(_longer_flags(mention, target)) > 1 or removed_name(mention, target.version):
            continue
        near = get_close_matches(
            mention.spelled.replace("_", "-").lower(), _flags_in_release(target.version), 1, _CLOSE
        )
        edits: tuple[Edit, ...] = ()
        if near and mention.words and not plugin and not target.build:
            has_value = len(mention.words) == 1 and mention.values  # --name=value
            renamed = f"{near[0]}={mention.values[0]}" if has_value else near[0]
            edits = (Edit(range(mention.words.start, mention.words.start + 1), (renamed,)),)
        yield Match(
            f"{shown(mention)}: no vLLM release has this flag",
            f"vLLM {target.version} exits with `unrecognized arguments`, unless a plugin adds the flag"
            + (f", and {plugin} enables one" if plugin else ""),
            "Correct the spelling, unless the plugin adds the flag"
            if plugin
            else f"Use {near[0]}, if you intended that flag"
            if near
            else "Remove it",
            edits,
            "warning" if plugin else None,
        )


@rule()
def ambiguous_flag(target: LintTarget) -> Iterator[Match]:
    for mention in _unrecognized(target):
        matching = _longer_flags(mention, target)
        if len(matching) > 1:
            names = f"{', '.join(matching[:4])}{' ...' if len(matching) > 4 else ''}"
            yield Match(f"{shown(mention)} is ambiguous: matches {names}")


def other_program(command: Command) -> str:
    """Return the program with flags of its own that reads the command: vLLM-Omni, to which --omni passes it, Dynamo."""
    is_omni = any(mention.spelled == "--omni" for mention in command.given) or "vllm-omni" in command.image
    return "vLLM-Omni" if is_omni else "Dynamo" if "dynamo.vllm" in command.words[: command.arguments] else ""


def _unrecognized(target: LintTarget) -> list[Given]:
    return [mention for mention in target.command.given if mention.option is None and not is_open(mention.spelled)]


@lru_cache(maxsize=4)
def _flags_in_release(version: str) -> dict[str, Flag]:
    return {name: flag for name, flag in known().items() if flag.in_release(version)}


def _longer_flags(mention: Given, target: LintTarget) -> list[str]:
    return sorted(
        name for name in _flags_in_release(target.version) if name.startswith(mention.spelled.replace("_", "-"))
    )


@rule()
def flag_of_a_later_release(target: LintTarget) -> Iterator[Match]:
    for mention in target.command.given:
        flag = mention.option.flag if mention.option else None
        if flag and not flag.in_release(target.version) and not at_least(target.version, flag.first):
            yield Match(
                f"{shown(mention)} exists since vLLM {flag.first}, not in {target.version}",
                f"vLLM {target.version} exits with `unrecognized arguments`",
                f"Remove it, or run vLLM {flag.first} or later",
            )
        elif flag and mention.words and mention.option:
            first, name = target.command.words[mention.words.start], mention.spelled.partition(".")[0]
            if not mention.spelled.startswith(("--", "-O")) and name not in flag.short:
                place = range(mention.words.start, mention.words.start + 1)
                yield Match(
                    f"vLLM {target.version} has no short name {name}",
                    f"vLLM {target.version} exits with `unrecognized arguments`",
                    f"Write {flag.name}",
                    (Edit(place, (first.replace(mention.spelled, flag.name, 1),)),),
                )
            elif mention.option.key and at_least(_NO_DOTTED_KEYS, target.version):
                yield Match(
                    f"{shown(mention)}: vLLM {target.version} has no keys behind a dot",
                    f"vLLM {target.version} exits with `unrecognized arguments`",
                    f"Give {flag.name} all of its keys in one JSON object",
                )


def _abbreviations(target: LintTarget) -> Iterator[tuple[Given, str, Flag]]:
    """Yield the options that abbreviate a flag: the option, its name with dashes, and the flag."""
    for mention in target.command.given:
        flag = mention.option.flag if mention.option else None
        name = mention.spelled.partition(".")[0].replace("_", "-")
        if flag and name.startswith("--") and name != flag.name and flag.name.startswith(name):
            yield mention, name, flag


@rule()
def taken_for_another(target: LintTarget) -> Iterator[Match]:
    for mention, name, flag in _abbreviations(target):
        if name in known():
            yield Match(
                f"{name} was removed, and vLLM {target.version} takes it for {flag.name}",
                f"{known()[name].last} is the last release with it; argparse accepts the beginning of a flag",
                f"Remove it, or write {flag.name}",
                removal([mention]),
            )


@rule()
def abbreviated_flag(target: LintTarget) -> Iterator[Match]:
    for _, name, flag in _abbreviations(target):
        if name not in known():
            yield Match(f"{name} is short for {flag.name}", fix=f"Write {flag.name}")


@rule()
def no_effect(target: LintTarget) -> Iterator[Match]:
    if target.command.environment.get("VLLM_USE_V1") == "0" and not target.since(V1_ONLY):
        return
    for mention in target.accepted():
        ineffective = INEFFECTIVE.get(mention.name)
        if ineffective and target.since(ineffective.first):
            yield Match(
                f"{shown(mention)} has no effect in {target.version}", ineffective.why, edits=removal([mention])
            )


@rule()
def no_such_negation(target: LintTarget) -> Iterator[Match]:
    for mention in target.accepted():
        option = mention.option
        if option and mention.words and not option.key and not option.on and not option.flag.no:
            is_refused = option.flag.takes != "none" or not mention.values
            if target.since(parsers()[0]) and is_refused:
                off = f": {option.flag.name} is off unless it is given" if option.flag.takes == "none" else ""
                yield Match(
                    f"{mention.spelled}: {option.flag.name} has no --no- form",
                    f"vLLM {target.version} exits with `unrecognized arguments`",
                    f"Remove it{off}",
                    removal([mention]),
                )


# -- environment variables


_OF_GAUDI = re.compile(r"(?i)gaudi|habana|\bPT_HPU_|[:_/-]hpu\b")
ATTENTION_BACKENDS = {
    *("CPU_ATTN", "CUTLASS_MLA", "FLASHINFER", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN", "FLASH_ATTN_MLA"),
    *("FLEX_ATTENTION", "ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_ATTN", "TRITON_ATTN", "TRITON_MLA"),
}
"""Names that --attention-backend accepts from 0.16.0 to 0.32.0 at least; FLASH_ATTN_VLLM_V1 became FLASH_ATTN."""


@rule()
def variable_not_read(target: LintTarget) -> Iterator[Match]:
    command = target.command
    if _OF_GAUDI.search(" ".join((command.image, *command.environment, *command.words))):
        return  # vllm-gaudi and Habana's fork read variables of their own
    for name in command.environment:
        is_own = name.startswith("VLLM_") and not reads(target.version, name)
        if is_own and (name in variables() or name in REPLACED_VARIABLES):
            yield _ineffective_variable(name, REPLACED_VARIABLES.get(name, ReplacedVariable()), target)
        elif is_own:  # one that a plugin reads, unless it is for vLLM's own image or nearly one of vLLM's
            able = [known for known in variables() if reads(target.version, known)]
            near = get_close_matches(name, able, 1, _VERY_CLOSE)
            flag = f"--{name.removeprefix('VLLM_').lower().replace('_', '-')}"
            is_told = bool(near)
            if not near:  # that no word uses, of a container of vLLM's own, or called as a flag
                words = (*command.exported, *command.words, *(word for outer, _ in command.around for word in outer))
                is_set = any(word.startswith((f"{name}=", f"--env={name}=", f"-e{name}=")) for word in words)
                is_flag = flag in known() and len(re.findall(rf"\b{name}\b", target.text)) == 1
                if command.container and command.container.kind == "Compose service":
                    # Compose fills in $NAME, a script within reads it
                    words = tuple(word for word in words if "$$" in word or " " in word)
                is_told = is_set and (is_flag or ("/vllm-openai" in command.image and not target.build))
                is_told = is_told and not any(map(re.compile(rf"\$[({{]?{name}\b").search, words))
            if is_told:
                fix = (
                    f"Use {flag}"
                    if flag in known()
                    else f"Use {near[0]}, if you intended that variable"
                    if near
                    else ""
                )
                yield Match(f"{name} has no effect: no known vLLM release reads it", fix=fix)


def _ineffective_variable(name: str, variable: ReplacedVariable, target: LintTarget) -> Match:
    command, flag = target.command, variable.flag
    backend = command.environment[name].removesuffix("_VLLM_V1")
    new = (flag, backend) if flag and backend in ATTENTION_BACKENDS and not command.all(flag) else ()
    first, last = variables().get(name, ("", ""))
    span = f"since {first}" if last == newest() else f"from {first} until {last}"
    edits: list[Edit] = []
    before, assigned = command.words[: command.arguments], re.compile(rf"(?:--env=|-e)?{name}=.*", re.DOTALL)
    place = next((at for at, word in enumerate(before) if assigned.fullmatch(word)), None)
    if place is not None:
        at = range(place - (place > 0 and before[place - 1] in ("-e", "--env")), place + 1)  # with docker's -e
        renamed = f"{variable.variable}={command.environment[name]}"
        edits.append(Edit(at, (*command.words[at.start : at.stop - 1], renamed) if variable.variable else ()))
        if new:
            edits.append(Edit(range(len(command.words), len(command.words)), new))
    by_flag = f"Use {flag} with a value that {target.version} has, or remove it" if flag else "Remove it"
    by_other = f"Use {variable.variable}" if variable.variable else by_flag
    if first and target.is_unstated:
        return Match(
            f"{name} may have no effect: vLLM reads it {span}, and the image does not say its release",
            variable.instead,
            "Name the release with --vllm-version",
            severity="info",
        )
    return Match(
        f"{name} has no effect: " + (f"vLLM {target.version} does not read it" if first else "no release reads it"),
        "; ".join(filter(None, (f"vLLM reads it {span}" if first else "", variable.instead))),
        f"Use {' '.join(new)}" if new else by_other,
        tuple(edits),
    )


@rule()
def old_engine(target: LintTarget) -> Iterator[Match]:
    """VLLM_USE_V1=0 chooses V0 from 0.8.0 to 0.10.2; 0.11.0 reads it and has no V0."""
    if target.command.environment.get("VLLM_USE_V1") == "0" and target.since(V1) and not target.since("0.11.1"):
        removed = target.since(V1_ONLY)
        yield Match(
            why=f"vLLM {target.version} has no V0 engine" if removed else "V0 is slower, and 0.11.0 removed it",
            severity="error" if removed else None,
        )
