"""Which of the proposals to print where: what to do now, the change that ends the incident, the alternatives."""

from itertools import takewhile
from typing import NamedTuple

from diag.diagnosis.proposals import Proposal
from diag.diagnosis.relaunch import launchable
from diag.diagnosis.report import Finding


class Actions(NamedTuple):
    """`advice` are sentences for right now, `now` is a command or a number that needs no restart, `fix` the change.

    `is_over`: the incident has ended, so that advice and command are for the next time.
    """

    is_over: bool
    advice: tuple[str, ...]
    now: Proposal | None
    fix: Proposal | None
    alternatives: tuple[Proposal, ...]


def actions(finding: Finding) -> Actions:
    """Sort the proposals, which come the safest first; the fix is the one that the relaunch line carries."""
    complete = [proposal for proposal in finding.proposals if not proposal.needs]
    safest = list(takewhile(lambda fix: not fix.restart, finding.diagnosis.incident.fixes))
    now = next((p for p in complete if p.fix in safest and (p.computed or p.fix.command)), None)
    is_cure = now is not None and (now.computed or now.fix.while_it_lasts)
    rest = [proposal for proposal in (*complete, *finding.proposals) if proposal is not now]
    fix = launchable(finding.proposals) or next(iter(rest), None)
    return Actions(
        is_over=not finding.diagnosis.ongoing,
        advice=() if is_cure else finding.diagnosis.incident.mitigate,
        now=now,
        fix=fix,
        alternatives=tuple(proposal for proposal in finding.proposals if proposal not in (now, fix)),
    )
