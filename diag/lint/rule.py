"""Lint rules: the command and facts that a rule checks, the declaration of a rule, and its findings."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from diag.core.declarations import Mistake, read
from diag.core.errors import BadUsage
from diag.core.formatting import flag_integer
from diag.vllm.command import redaction
from diag.vllm.command.command import Command, Given
from diag.vllm.flags.registry import known, release
from diag.vllm.memory.model import Model

GpuSample = tuple[str, tuple[str, ...], float]
"""A sample of the exporter: family, values of its labels, value."""


@dataclass(frozen=True)
class HostGpu:
    """One GPU: its memory in bytes, and the number of processes on it."""

    index: str
    name: str
    total: float
    free: float
    users: int = 0


@dataclass(frozen=True)
class HostGpus:
    """The GPUs that the server would see, in their order; `paths` has "nvlink", "sys" ... by pairs of indices."""

    gpus: tuple[HostGpu, ...]
    paths: Mapping[tuple[str, str], str]


LINKS = {"nvlink": "NVLink", "xgmi": "XGMI"}
"""The vendors' own links, by their paths."""


def host_gpus(samples: Iterable[GpuSample]) -> HostGpus:
    gpu_samples = [(family.removeprefix("diag_gpu_"), labels, value) for family, labels, value in samples]
    names = {labels[0]: labels[2] for family, labels, _ in gpu_samples if family == "info"}
    bytes_ = {(family, labels[0]): value for family, labels, value in gpu_samples if family.startswith("memory_")}
    users = [labels[0] for family, labels, _ in gpu_samples if family == "process_memory_bytes"]
    gpus = tuple(
        HostGpu(at, name, bytes_["memory_total_bytes", at], bytes_["memory_free_bytes", at], users.count(at))
        for at, name in names.items()
        if {("memory_total_bytes", at), ("memory_free_bytes", at)} <= bytes_.keys()
    )
    peers = (labels for family, labels, _ in gpu_samples if family == "peer_info")
    return HostGpus(gpus, {(first, second): path for first, second, path, *_ in peers})


@dataclass(frozen=True, eq=False)  # by identity: what one takes is computed once
class LintTarget:
    """A command and the release that it is checked for.

    `shape` is read from the model's config.json, `draft` from that of the draft model; `gpus` are the GPUs of this host
    or of --gpu, None if they are unknown; `host_memory` are the bytes that this host or its control group has, 0 if
    unknown. `adapter_ranks` has the rank of each LoRA adapter whose adapter_config.json could be read, by its path.
    `tenant_share` is the share of a GPU that diag.toml gives this server, None if it states none.
    `folder_without_config` is the model's folder if it holds no config.json; `parser_error` is the message of vLLM's
    own parser.
    `build` names an image that is not vLLM's own. `beside` are the
    earlier servers of the same text that run at the same time, `shares_container` is True if one of the text's other
    servers starts in the same container. `is_assumed` is True if nothing names the release, `is_unstated` if the image
    is another than the newest known release. `text` is the file or the text that starts the server, "" for none.
    """

    command: Command
    version: str
    shape: Model | None = None
    gpus: HostGpus | None = None
    folder_without_config: str = ""
    parser_error: str = ""
    draft: Model | None = None
    host_memory: float = 0
    adapter_ranks: Mapping[str, int] = field(default_factory=dict)
    tenant_share: float | None = None
    build: str = ""
    beside: "tuple[LintTarget, ...]" = ()
    shares_container: bool = False
    is_assumed: bool = False
    is_unstated: bool = False
    text: str = ""

    def since(self, version: str) -> bool:
        return at_least(self.version, version)

    def accepted(self) -> Iterator[Given]:
        return (
            mention for mention in self.command.given if mention.option and mention.option.flag.in_release(self.version)
        )

    def number(self, flag: str) -> float | None:
        """Return the value of a flag; None if the flag is not given or its value is not a number above zero."""
        value = number(self.command.get(flag))
        return value if value is not None and value > 0 else None

    def ranks(self, flag: str) -> int:
        return ranks(self.command, flag)

    def local_ranks(self) -> int:
        """Return the ranks on this host, each on a GPU of its own."""
        tensor, pipeline, data = (self.ranks(f"--{kind}-parallel-size") for kind in ("tensor", "pipeline", "data"))
        local = number(self.command.get("--data-parallel-size-local"))
        return tensor * pipeline * (data if local is None else int(local))

    def used_gpus(self) -> tuple[HostGpu, ...]:
        """Return the known GPUs that the server would use."""
        return self.gpus.gpus[: max(1, self.local_ranks())] if self.gpus else ()

    def lacks(self, *flags: str) -> bool:
        """Return True if none of the flags is given, nor can be by a variable or an unread --config file."""
        command = self.command
        is_whole = not (command.config and command.elsewhere)
        single = {at for each in command.given if each.words and len(each.values) == 1 for at in each.words}
        places = range(command.arguments, len(command.words))
        is_whole = is_whole and not any(is_open(command.words[at]) for at in places if at not in single)
        return is_whole and all(command.get(flag) is None for flag in flags)

    def is_on(self, flag: str) -> bool:
        return bool(self.command.switched(flag))

    def is_off(self, flag: str) -> bool:
        return self.command.switched(flag) is False

    def has(self, flag: str) -> bool:
        """Return True if the flag is given, in any way, and this release has it."""
        return self.command.get(flag) is not None and flag in known() and known()[flag].in_release(self.version)

    def keys(self, flag: str) -> Mapping[str, object]:
        return self.command.keys(flag)


class UnknownValue(BadUsage):
    """A value that the text does not show: a rule that needs it finds nothing."""


_HOLE = re.compile(
    r"[$`]|\{\{|\{[A-Za-z_][\w.]*\}|<[A-Za-z](?:[\w ./:-]*\w)?>|\[[a-z_ ]+\]|%\([a-z]\w*\)s|^(?:\.{3}|…)$"
    r"|__[A-Z][A-Z0-9_]*__|@[A-Z][A-Z0-9_]*@|%[A-Z][A-Z_]{2,}%|^(?:YOUR|REPLACE|CHANGE)_[A-Z_]+$"  # sed, or a person
)


def is_open(text: str) -> bool:
    """Return True if a shell, a template, a program or a person fills in a part of the text later: it is unknown."""
    return bool(_HOLE.search(text))


_BEYOND = 2**63  # no size of vLLM's has more than 64 bits, and products of four stay floats


def number(text: str | None) -> float | None:
    """Read a value as vLLM does, 8k as 8000 and 8K as 8192; None if there is none or it is no number of 64 bits.

    UnknownValue if the text does not show the value.
    """
    if text is None:
        return None
    if is_open(text):
        raise UnknownValue("the text does not show a value")
    value: float | None = flag_integer(text.strip())
    try:
        value = float(text) if value is None else value
    except ValueError:
        return None
    return value if abs(value) < _BEYOND else None


def ranks(command: Command, flag: str) -> int:
    """Return the number of ranks of a parallel size, 1 if it is not given or not a number."""
    return max(1, int(number(command.get(flag)) or 1))


def at_least(version: str, since: str) -> bool:
    """Return True if a release is `since` or a later one."""
    return release(version) >= release(since)


# -- rules and findings ------------------------------------------------------------------------------------------------

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""An error: vLLM does not start. A warning: something has no effect or does harm. An info: consider it."""
EXIT = {"error": 2, "warning": 1}


@dataclass(frozen=True)
class Edit:
    """Replaces the words of a command in this range with `new`; an empty range is a place to insert them."""

    words: range
    new: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """One place in which a check found something; without a text or severity the rule's is used."""

    message: str = ""
    why: str = ""
    fix: str = ""
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None


@dataclass(frozen=True)
class LintFinding:
    """One finding of the rule with the id `rule`; `edits` are its `fix` as a correction of the command.

    `line` is that of its flag or variable in the file, 0 if it is unknown.
    """

    rule: str
    severity: Severity
    message: str
    why: str
    fix: str = ""
    edits: tuple[Edit, ...] = ()
    line: int = 0


@dataclass(frozen=True)
class LintReport:
    """All findings in a command for the vLLM release `version`; no value in it is secret.

    `version_source` names what the release was taken from. `corrected` is the command with every mechanical
    correction, "" if there is none; `errors_left` counts the errors that only the user can correct. `parser_error` is
    the message of vLLM's own parser, "" if it accepts the command, None if it was not run. `ignored` holds the rule
    id of each finding that was dropped. `writing` names the notation of the launch, "" for a command; `place` is its
    service, container or function, `line` its line in the text (0: unknown), `file` the file; `left_out` counts
    infos that are not shown, none of `every` report. `command` is the command as it was read. With `is_part`,
    `corrected` holds vLLM's own words without those around them.
    """

    version: str
    version_source: str
    model: str
    findings: tuple[LintFinding, ...]
    not_checked: tuple[str, ...]
    corrected: str = ""
    parser_error: str | None = None
    ignored: tuple[str, ...] = ()
    errors_left: int = 0
    writing: str = ""
    place: str = ""
    line: int = 0
    file: str = ""
    left_out: int = 0
    is_part: bool = False
    command: str = ""
    every: bool = False

    def of_file(self, name: str, every: bool) -> "LintReport":
        """Return the report for a file, or a command without a name; of a file `every` info is shown, or counted."""
        kept = tuple(finding for finding in self.findings if every or not name or finding.severity != "info")
        return replace(self, file=name, findings=kept, left_out=len(self.findings) - len(kept), every=every)

    @property
    def status(self) -> int:
        """The exit status: 0 nothing above info, 1 warnings, 2 errors."""
        return max((EXIT.get(finding.severity, 0) for finding in self.findings), default=0)


@dataclass(frozen=True)
class LintResult:
    """The reports on all servers, the number of files read, and why files that mention vLLM could not be read."""

    launches: tuple[LintReport, ...]
    files: int = 1
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """The highest of the servers; 1 at least if a file could not be read, which is no pass."""
        return max([report.status for report in self.launches] + [EXIT["warning"]] * bool(self.unread), default=0)


@dataclass(frozen=True)
class Example:
    """A command in which the rule finds something for the release `version`, and a near miss that it `leaves` alone.

    `leaves_version` is the release of the near miss, "" for `version`. `requires` names what the host must have for
    both, "" if the commands alone are enough.
    """

    command: str
    leaves: str
    version: str = "0.32.0"
    requires: str = ""
    leaves_version: str = ""


@dataclass(frozen=True)
class Case:
    """Terms that hold beside those of the rule, with a fix and a message of their own."""

    when: tuple[str, ...]
    fix: str = ""
    message: str = ""


@dataclass(frozen=True)
class RuleText:
    """A rule in rules.toml: the texts of the page that `diag explain ID` prints, and those of its findings.

    The errors of a rule that `differs_by_build` may not be errors of a build of vLLM that is not its own. `message`,
    `since`, `until` and `removes` are those of a conflict (`conflicts.py`), which holds `when` its terms do
    (`terms.py`), or with those of the first of its `cases` that holds. `topic` is its page in docs/lint-rules. A
    finding `of_text` is about a whole text, and is that of its first server alone.
    """

    id: str
    severity: Severity
    title: str
    why: str
    fix: str
    example: Example
    finds: str = ""
    differs_by_build: bool = False
    message: str = ""
    since: str = ""
    until: str = ""
    removes: tuple[str, ...] = ()
    when: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    topic: str = "conflicts"
    of_text: bool = False


_SUBJECT = re.compile(r"(?:--?[A-Za-z]|VLLM_)[\w.-]*(?:, --?[A-Za-z][\w.-]*)*")
"""The flags, or the variable, that a message is about, at its beginning."""
Check = Callable[[LintTarget], Iterator[Match]]


@dataclass(frozen=True)
class LintRule(RuleText):
    """A rule with its `check`."""

    check: Check = field(kw_only=True)

    def findings(self, target: LintTarget) -> Iterator[LintFinding]:
        """Yield a finding for each match, with the texts of the rule if the match has none; end at an unknown value."""
        with suppress(UnknownValue):
            for match in self.check(target):
                message, fix = match.message or self.title, match.fix or self.fix
                if flag := _SUBJECT.match(message):
                    fix = re.sub(r"^Remove it\b", f"Remove {flag[0]}", fix)
                severity, why = match.severity or self.severity, match.why or self.why
                yield LintFinding(self.id, severity, message, why, fix, match.edits)


@cache
def texts() -> Mapping[str, RuleText]:
    """Return the rules of rules.toml by id, in the order in which findings of one severity are reported."""
    return {text.id: text for text in read(Path(__file__).with_name("rules.toml"), tuple[RuleText, ...], "rule")}


def text_of(id: str) -> RuleText:
    """Return the texts of a rule; Mistake if rules.toml has none."""
    if id not in texts():
        raise Mistake(f"the rule {id} has no [[rule]] in diag/lint/rules.toml")
    return texts()[id]


def rule(topic: str = "", **numbers: object) -> Callable[[Check], LintRule]:
    """Make the decorated check the rule of its name; `numbers` replace their {name} in the rule's texts.

    The rule is on the page of its module unless a `topic` is given.
    """

    def declared(check: Check) -> LintRule:
        text = text_of(check.__name__)
        finds = text.finds
        for name, number in numbers.items():
            finds = finds.replace("{" + name + "}", str(number))
        module = check.__module__.rpartition(".")[2]
        return LintRule(**{**vars(text), "finds": finds, "topic": topic or module}, check=check)

    return declared


def removal(options: Sequence[Given]) -> tuple[Edit, ...]:
    """Return the edits that remove options; an option of a YAML file has no words in the command."""
    return tuple(Edit(mention.words) for mention in options if mention.words)


def shown(mention: Given) -> str:
    """Name an option in a report, and the --config file if the option stands there.

    A word that is no flag of vLLM may be a secret, such as the value of the flag before it: it is named by its
    position.
    """
    spelled = redaction.flag(mention)
    if not spelled:
        return f"Word {mention.words.start + 1}" if mention.words else "A key of the --config file"
    named = spelled if mention.name.startswith(spelled) else f"{spelled} ({mention.name})"
    return named if mention.words else f"{named} (in the --config file)"
