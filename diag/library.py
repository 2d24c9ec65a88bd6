"""diag from Python: `import diag`, then these functions; docs/python.md shows them.

What stays stable: the names and parameters here, the columns of the tables, and the documents' schemas
(diag/report/*.schema.json), each with its version in `schema`. Everything else in the package may change.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Literal

from diag.commands import doctor
from diag.commands.observe import ObserveOptions, scraping, site
from diag.core.errors import BadUsage
from diag.diagnosis import report as judged
from diag.diagnosis.query_cache import QueryCache
from diag.sources.prometheus.scope import Scope, TimeSpan
from diag.sources.source import open_source

if TYPE_CHECKING:
    import pandas as pd

Target = str | PathLike[str]


@dataclass(frozen=True)
class ServerReport:
    """A diagnosis: what is wrong with the servers of the targets, the evidence, and the change to make."""

    _judged: judged.Report = field(repr=False)

    @property
    def verdict(self) -> Literal["healthy", "no_incident", "warning", "critical", "unknown"]:
        """The verdict of line 1; "unknown" is CANNOT TELL."""
        return self._judged.verdict

    @property
    def incidents(self) -> tuple[str, ...]:
        """The ids of the incidents that hold, the causes first."""
        return tuple(dict.fromkeys(found.diagnosis.incident.id for found in self._judged.present))

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """Each condition of each incident that was looked for: incident, state, subject, signal, value, threshold."""
        from diag.report.dataframe import conditions

        return conditions(self._judged.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of `diag doctor --json` (diag.doctor.schema.json)."""
        from diag.report.json import DOCTOR

        return DOCTOR.of(self._judged)

    def to_markdown(self) -> str:
        """Return the text of `diag doctor --markdown`."""
        from diag.report.markdown import render

        return render(self._judged, verbose=False)

    def to_html(self) -> str:
        """Return the page of `diag doctor --html`, whole in itself."""
        from diag.report.html import render

        return render(self._judged)


def diagnose(
    *targets: Target,
    seconds: float = 30.0,
    log: Target = "",
    prometheus: str = "",
    at: str = "",
    window: str = "15m",
    matchers: Sequence[str] = (),
) -> ServerReport:
    """Diagnose recordings, logs or live servers, or what a Prometheus has stored, as `diag doctor` does.

    Live servers are scraped for `seconds`; `log` is the log of the one that is named. For `prometheus`, a URL, no
    target is named: `at` (now) is the end of the `window`, `matchers` select series (`['cluster="eu"']`). DiagError,
    whose text is one sentence, for a target that is none or does not answer.
    """
    return ServerReport(
        doctor.run(_options(targets, seconds, log, prometheus, Scope(TimeSpan(at, window), matchers=matchers)))
    )


def signal_table(
    *targets: Target,
    seconds: float = 30.0,
    prometheus: str = "",
    at: str = "",
    window: str = "15m",
    matchers: Sequence[str] = (),
) -> "pd.DataFrame":
    """Return every signal at every instant: time, instance, engine, gpu, signal, unit, window, value.

    Takes what `diagnose` takes, except logs: BadUsage.
    """
    from diag.report.dataframe import signals

    options = _options(targets, seconds, "", prometheus, Scope(TimeSpan(at, window), matchers=matchers))
    contract, incidents = site(None, None)
    return signals(incidents, QueryCache(open_source(options, scraping(contract), contract), contract))


def lint_launch(launch: str, *, vllm_version: str = "", gpu: str = "") -> dict[str, Any]:
    """Return the document of `diag lint --json` about a launch command or a file with one (diag.lint.schema.json)."""
    from diag.commands.lint import LintOptions, run

    return _document(run(launch, LintOptions(vllm_version, gpu=gpu), True))


def memory_budget(launch: str, *, gpu: str = "", vllm_version: str = "") -> dict[str, Any]:
    """Return the document of `diag budget --json` about a launch command or a model (diag.budget.schema.json)."""
    from diag.commands.budget import run
    from diag.commands.options import BudgetOptions

    return _document(run(BudgetOptions(launch, gpu, version=vllm_version), True))


def _document(printed: tuple[str, int]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(printed[0])
    return document


def _options(targets: Sequence[Target], seconds: float, log: Target, prometheus: str, scope: Scope) -> ObserveOptions:
    names = [fspath(each) for each in targets]
    if not names and not prometheus:
        raise BadUsage("no target is named: name a recording, a log, a URL of a server, or a Prometheus (prometheus=)")
    return ObserveOptions(names, duration=seconds, log=fspath(log), prometheus=prometheus, scope=scope)
