"""`diag baseline save`: what is normal for servers, observed while they are healthy and kept in a file."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from diag.commands.doctor import look
from diag.commands.observe import ObserveOptions, is_path
from diag.commands.site import site
from diag.core.errors import BadUsage
from diag.core.formatting import listed, plural, printable
from diag.diagnosis.report import Report
from diag.verify.baseline import Baseline, learn, merged, save


def run(options: ObserveOptions, file: Path | None, even_ill: bool) -> str:
    """Add what was observed to the file, [baseline] file of diag.toml unless it is named; what to print."""
    contract, incidents = site(options.incidents, options.contract)
    goal = file or (Path(contract.baseline) if contract.baseline else Path("baseline.json"))
    learnt, left_out, seen = [], [], []
    for one in _observations(options):
        report, queries = look(one, contract, incidents)
        ill = {} if even_ill else _ill(report)
        left_out += [f"{name} is left out, because it was not healthy: {why}" for name, why in ill.items()]
        learnt.append(learn(queries, ill))
        seen.append(report.observed.target)  # without credentials
    new = merged(normal for baseline in learnt for normal in baseline)
    if not any(normal.rows or normal.starts for normal in new):
        raise BadUsage(_nothing(seen, left_out))
    return "\n".join([*left_out, _summary(goal, new, save(goal, new))])


def _observations(options: ObserveOptions) -> Iterator[ObserveOptions]:
    """One for each recording, and one for all live servers, or for the Prometheus."""
    recordings = [target for target in options.targets if is_path(target)]
    live = [target for target in options.targets if target not in recordings]
    yield from (replace(options, targets=[recording]) for recording in recordings)
    if live or not recordings:
        yield replace(options, targets=live)


def _ill(report: Report) -> dict[str, str]:
    """The servers whose speed is not normal, and why: an incident, or nobody can tell."""
    found = [finding.diagnosis for finding in report.present if finding.diagnosis.severity != "info"]
    ill = {dict(diagnosis.subject).get("instance", ""): diagnosis.incident.id for diagnosis in reversed(found)}
    unknown = {dict(each.subject)["instance"]: each.why for each in report.not_judged if each.subject}
    return unknown | ill


def _nothing(seen: list[str], left_out: list[str]) -> str:
    if left_out:
        return f"{'; '.join(map(printable, left_out[:3]))}. To learn from it all the same, add --even-ill"
    targets = listed([printable(target) for target in seen])
    why = "no request was running, or too few scrapes were answered"
    return f"{targets}: {why}: there is nothing to learn; observe it under load, and for longer"


def _summary(file: Path, new: Baseline, known: Baseline) -> str:
    def counted(baseline: Baseline) -> str:
        windows, starts = (sum(map(len, each)) for each in zip(*(normal[1:] for normal in baseline), strict=True))
        return f"{plural(windows, 'window')} and {plural(starts, 'start')}"

    kinds = [f"{normal.kind.model or 'model unknown'} on vLLM {normal.kind.version or 'unknown'}" for normal in new]
    names = listed(list(dict.fromkeys(printable(kind) for kind in kinds)))
    return f"{printable(str(file))}: {counted(new)} observed ({names}); the file has {counted(known)} now"
