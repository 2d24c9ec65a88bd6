"""`diag lint`: find the launches in files and folders, read the GPUs and the memory of this host, print the reports."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diag.core.contract import Contract, find
from diag.core.errors import BadContract, BadUsage, NoFile, NoLaunch, Unfollowed
from diag.core.files import is_folder
from diag.core.formatting import plural
from diag.core.metric_families import Sample
from diag.exporter.gpu.collector import GpuCollector
from diag.exporter.process.kernel import control_group
from diag.lint.judge import Judge
from diag.lint.rule import HostGpus, LintReport, LintResult, UnknownValue, host_gpus, is_open, ranks
from diag.lint.rules import RULES
from diag.report.lint_formats import FORMATS
from diag.vllm.command import redaction
from diag.vllm.command.charts import chart_of
from diag.vllm.command.command import NOTATIONS, Command
from diag.vllm.command.dockerfile import started_files, text_of
from diag.vllm.command.parse import MOST_BYTES, is_existing, without_outputs
from diag.vllm.gpus import visible_gpus


@dataclass(frozen=True)
class LintOptions:
    """Options of the command line; for a `foreign` text, such as an agent's, no file of this host is opened.

    With `here` a file is judged for this host, as a command is. `every` shows infos about files too. `form` is one of
    `diag.report.lint_formats.FORMATS`.
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
    form: str = "text"


def run(targets: str | Sequence[str], options: LintOptions, as_json: bool) -> tuple[str, int]:
    """Return the text to print about commands, files and folders, and the exit status.

    NoFile for a name without a file, NoLaunch if nothing starts a server.
    """
    contract = find(options.contract)
    ignored = ignored_rules(options.ignore, contract)
    files = [targets] if isinstance(targets, str) and options.foreign else launch_files(targets)
    several = files != ([targets] if isinstance(targets, str) else [*targets]) or len(files) > 1
    held = {script for text in files for script in _scripts(text)} if len(files) > 1 else ()
    files = [text for text in files if Path(text).absolute() not in held]
    judged: list[LintReport] = []
    unread: dict[str, str] = {}
    for text in files:
        is_file = not options.foreign and "\n" not in text and is_existing(text)
        try:
            reports = judge_all(
                text,
                options.vllm_version,
                python=options.vllm_python,
                ignored=ignored,
                gpu=options.gpu,
                tenant_share=contract.preflight.gpu_memory_share,
                foreign=options.foreign,
                here=options.here or not is_file,
            )
        except BadUsage as error:
            if not several:
                if is_file and not str(error).startswith("--"):  # the file is wrong, not the usage
                    raise NoLaunch(str(error)) from error
                raise
            if (not isinstance(error, NoLaunch) and not _is_beside(text)) or isinstance(error, Unfollowed):
                name = redaction.name(text) or "a file whose name is not shown"
                unread[name] = str(error).removeprefix(text).lstrip(":, ")
            continue
        judged += [
            report.of_file(redaction.name(text) if is_file else "", options.every)
            for report in reports
            if options.only in ("", report.place)
        ]
    judged = [one for one in judged if not _is_started_by_a_template(one, judged)]
    if not judged and not unread:
        what = f"{plural(len(files), 'file')} read" if several else "the text"
        raise NoLaunch(f"no launch of vLLM found: {what}{f' has none called {options.only}' if options.only else ''}")
    result = LintResult(tuple(judged), len(files), unread)
    return FORMATS["json" if as_json else options.form](result), result.status


def _scripts(text: str) -> Iterable[Path]:
    """Return the scripts and Dockerfiles beside a file that its containers start: they are judged there."""
    name = Path(text).name.lower() if "\n" not in text else ""
    if not name.endswith((".yml", ".yaml", ".sh", ".slurm", ".sbatch")) and "dockerfile" not in name:
        return ()
    with suppress(OSError):
        return started_files(Path(text).read_text(encoding="utf-8", errors="replace"), Path(text))
    return ()


def _is_beside(text: str) -> bool:
    """Return True for a file without vLLM, and for a template of a chart without a container, such as a Service."""
    with suppress(OSError):
        content = Path(text).read_text(encoding="utf-8", errors="replace")
        return not _VLLM.search(content) or ("/templates/" in text and "image:" not in content)
    return False


def _is_started_by_a_template(one: LintReport, judged: Iterable[LintReport]) -> bool:
    """Return True for a chart's values, or a role's defaults, whose server is judged where a template starts it.

    A template that starts another server speaks for that one alone.
    """
    if (chart := chart_of(Path(one.file))) and chart / "values.yaml" != Path(one.file).absolute():
        # values of an environment complete the chart's own, and those of its templates
        files = (Path(other.file).absolute() for other in judged)
        return any(file == chart / "values.yaml" or chart / "templates" in file.parents for file in files)
    if not _FEEDS.search(one.file):
        return False
    whole = Path(_FEEDS.sub("", one.file))
    starts = (other for other in judged if {whole / "templates", whole / "tasks"} & {*Path(other.file).parents})
    is_chart = one.writing == "a container of Helm values"  # its templates alone know what its keys are for
    return any(
        one.model in (other.model, *other.command.split())
        or one.model.startswith("-")
        or (is_chart and _images(one) & _images(other))
        for other in starts
    )


def _images(report: LintReport) -> set[str]:
    return {word for word in report.command.split() if re.match(r"[\w./-]*vllm[\w.-]*[:/@]", word)}


_SUFFIXES = frozenset[str](NOTATIONS["suffixes"])
_NAMES = ("Dockerfile", "dockerfile", "Makefile", "Justfile", "justfile", "Procfile")
_SKIPPED = {"node_modules", "__pycache__", "site-packages", ".git", ".venv", "venv", ".tox"}
_FEEDS = re.compile(r"(?:^|/)(?:values\.yaml|defaults/main\.yml)$")  # what fills in templates
_MOST_FILES = 100_000
_MOST_SEARCHED = 2**26
_MENTION = re.compile(rb"vllm|LLM_?Config|engine_kwargs|kind: InferenceService|^ +build:", re.IGNORECASE | re.MULTILINE)
_VLLM = re.compile("vllm|LLM_?Config|engine_kwargs|kind: InferenceService", re.IGNORECASE)
_LAUNCH = re.compile(rb"vllm[\s\"',]+serve\b|vllm\.entrypoints|vllm/vllm-|LLMConfig\(")
"""A launch in a file too large to be one: tables of tokens and results of benchmarks mention vLLM, too."""


def launch_files(targets: str | Sequence[str]) -> list[str]:
    """Return commands and files; a folder or a pattern stands for its files that mention vLLM."""
    texts: list[str] = []
    for text in [targets] if isinstance(targets, str) else targets:
        if not text.strip():
            raise BadUsage("an empty text names no launch: give a command, a file or a folder")
        is_word = not re.search(r"\s", text) and not text.startswith("-")
        if not is_word or is_existing(text):
            is_one = isinstance(targets, str) or len(targets) == 1
            texts += [text] if is_one or not is_word else map(str, _mentioning([Path(text)]))
        elif is_folder(text):
            texts += map(str, _mentioning(_files(Path(text))))
        elif "*" in text or "?" in text:
            able = sorted(Path(Path(text).anchor).glob(str(Path(text).relative_to(Path(text).anchor))))
            texts += map(str, _mentioning(file for file in able[:_MOST_FILES] if file.is_file()))
        elif Path(text).suffix in _SUFFIXES or "/" in text:
            raise NoFile(f"{redaction.name(text) or 'the file'}: no such file or folder")
        else:
            texts.append(text)
    if not texts:
        raise NoLaunch("no launch of vLLM found: no file there mentions vLLM")
    return texts


def _files(folder: Path) -> Iterator[Path]:
    """Yield files that may hold a launch, in the order of their names."""
    count = 0
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(names):
            count += 1
            if count < _MOST_FILES and (Path(name).suffix in _SUFFIXES or name.startswith(_NAMES)):
                yield Path(root) / name


def _mentioning(files: Iterable[Path]) -> Iterator[Path]:
    """Yield files that mention vLLM, those that are too large to be read if they look like a launch."""
    charts: dict[Path, bool] = {}  # whether the values of each mention vLLM: its templates may not
    for file in filter(Path.is_file, files):
        try:
            with file.open("rb") as opened:
                content = without_outputs(file.name, opened.read(_MOST_SEARCHED))
        except OSError:
            yield file  # reading it again says why it cannot be read
        else:
            is_template = file.parent.name == "templates" and b".Values" in content and b"image:" in content
            chart = file.parent.parent if is_template else None
            if chart and chart not in charts:
                charts[chart] = bool(_VLLM.search(text_of(chart / "values.yaml")))
            is_filled = chart is not None and charts[chart] and len(content) <= MOST_BYTES
            if is_filled or (_MENTION if len(content) <= MOST_BYTES else _LAUNCH).search(content):
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
    """Lint the first server of a text, with the options of a `Judge`."""
    return judge_all(text, wanted, **options)[0]


def judge_all(text: str, wanted: str = "", **options: Any) -> tuple[LintReport, ...]:
    """Lint every server of a text, or of the file that it names, with the options of a `Judge`."""
    return Judge(_local_gpus, _host_memory, wanted, **options).reports(text)


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
    gpus = host_gpus(samples)
    if not gpus.gpus:
        return None, [problem]
    blind = False
    with suppress(UnknownValue):
        blind = ranks(command, "--tensor-parallel-size") > 1 and not gpus.paths and len(gpus.gpus) > 1
    return gpus, ["how the GPUs are connected: the driver does not tell"] if blind else []


def _host_memory() -> float:
    """Return the bytes of memory that this host has, or the control group of this process; 0 if they are unknown."""
    samples = control_group(os.getpid(), Path("/proc")).samples()
    return next((value for family, _, value in samples if family == "diag_host_memory_limit_bytes"), 0)
