"""`diag verify` compares a server before and after a change; `diag baseline` keeps the normal speed in files."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from diag.commands.doctor import Format
from diag.commands.observe import ObserveOptions, look, site, take_snapshot
from diag.core.errors import BadUsage, Unreachable
from diag.core.files import exists
from diag.core.formatting import listed, plural, printable
from diag.core.subjects import instance_name
from diag.http.address import parse
from diag.report.coverage import normal_sentence
from diag.report.layout import paragraph
from diag.report.verify import DOCUMENT, render, render_markdown
from diag.sources.source import is_path, shown_targets
from diag.verify.compare import Verification, compare

if TYPE_CHECKING:
    from diag.diagnosis.report import NormalReading

EXIT = {"fixed": 0, "better": 1, "no effect": 1, "worse": 2, "not comparable": 3}


def verify(before: str, options: ObserveOptions) -> Verification:
    """Compare `before` with the targets of the options, or with the servers of `before` as they are now.

    Raises BadUsage if both are one live server, Unreachable if one of them does not respond.
    """
    after = options.targets
    if not exists(before) and (not after or _identity(before) == _identity(after[0])):
        raise BadUsage(
            f"BEFORE must be a recording: {shown_targets([before])} is a live server, which cannot show its past;"
            " run diag record URL DIR before the change, and give DIR"
        )
    earlier = take_snapshot(replace(options, targets=[before], launch="", log=""))
    if after:
        return compare(earlier, take_snapshot(options))
    try:  # the recorded servers as they are now
        return compare(earlier, take_snapshot(replace(options, targets=earlier.instances)))
    except Unreachable as error:
        raise Unreachable(f"{error} BEFORE was recorded there: if the server has moved, give AFTER") from error


def _identity(target: str) -> str:
    """Return a path that exists as it is, or a URL's host and port, so that two spellings of a target compare."""
    return target if exists(target) else parse(target).instance


def print_report(verification: Verification, form: Format) -> int:
    """Print a comparison on standard output; return the exit status."""
    forms = {"terminal": render, "markdown": render_markdown}
    sys.stdout.write(DOCUMENT.text(verification) if form == "json" else forms[form](verification))
    return EXIT[verification.verdict]


# -- diag baseline save ------------------------------------------------------------------------------------------------


def save_baseline(options: ObserveOptions, file: Path | None, include_unhealthy: bool) -> str:
    """Add observations to the baseline file, by default [baseline] file of diag.toml; return the text to print.

    Servers that are not healthy, or whose health is unknown, are left out unless `include_unhealthy`.
    """
    from diag.normal.baseline import learn, merged, save

    contract, incidents = site(options.incidents, options.contract)
    goal = file or (Path(contract.baseline) if contract.baseline else Path("baseline.json"))
    recordings = [target for target in options.targets if is_path(target)]
    live = [target for target in options.targets if target not in recordings]
    observations = [replace(options, targets=[recording]) for recording in recordings]
    if live or not recordings:
        observations.append(replace(options, targets=live))

    learnt, left_out, names = [], [], []
    for observation in observations:
        report, queries, _ = look(observation, contract, incidents)
        unhealthy: dict[str, str] = {}
        if not include_unhealthy:
            unhealthy = {
                instance_name(unjudged.subject): unjudged.why for unjudged in report.not_judged if unjudged.subject
            }
            suspects = [finding.diagnosis for finding in report.health.suspects]
            unhealthy |= {instance_name(suspect.subject): f"possibly {suspect.incident.id}" for suspect in suspects}
            present = [finding.diagnosis for finding in report.present if finding.diagnosis.severity != "info"]
            unhealthy |= {instance_name(diagnosis.subject): diagnosis.incident.id for diagnosis in reversed(present)}
        left_out += [f"{name} is left out, because it was not healthy: {why}" for name, why in unhealthy.items()]
        learnt.append(learn(queries, unhealthy))
        names.append(printable(report.observed.target))  # without credentials
    new = merged(normal for baseline in learnt for normal in baseline)
    if not any(normal.rows or normal.starts for normal in new):
        if left_out:
            raise BadUsage(
                f"{'; '.join(map(printable, left_out[:3]))}. To learn from it all the same, add --include-unhealthy"
            )
        why = "no request was running, or too few scrapes were answered"
        raise BadUsage(f"{listed(names)}: {why}: there is nothing to learn; observe it under load, and for longer")
    counts = []
    for baseline in (new, save(goal, new)):
        windows, starts = (sum(map(len, rows)) for rows in zip(*(normal[1:] for normal in baseline), strict=True))
        counts.append(f"{plural(windows, 'window')} and {plural(starts, 'start')}")
    kinds = [f"{normal.kind.model or 'model unknown'} on vLLM {normal.kind.version or 'unknown'}" for normal in new]
    learnt_of = listed(list(dict.fromkeys(map(printable, kinds))))
    summary = f"{printable(str(goal))}: {counts[0]} observed ({learnt_of}); the file has {counts[1]} now"
    return "\n".join([*left_out, summary])


def compare_baselines(old: Path, new: Path) -> tuple[str, int]:
    """Return the text that says which normal speeds moved from one file to another, and 1 if one got worse, else 0."""
    from diag.normal.baseline import read
    from diag.normal.comparison import between

    compared = between(read(old), read(new), str(old))
    moved = [reading for reading in compared.readings if reading.notable]
    unmoved = dict.fromkeys(reading.measure for reading in compared.readings if not reading.notable)
    lines = [
        *("\n".join(paragraph(f"{_direction(reading)}: {normal_sentence(reading)}")) for reading in moved),
        *([f"no change: {listed(list(unmoved), most=8)}"] if unmoved else []),
        *(f"not compared: {reason}" for reason in compared.reasons),
    ]
    worse = any(_direction(reading) == "worse" for reading in moved)
    nothing = "nothing to compare: no server is in both files with enough windows or starts"
    return "\n".join(lines or [nothing]), int(worse)


def _direction(reading: "NormalReading") -> str:
    return "worse" if (reading.value > reading.normal) == (reading.worse == "higher") else "better"
