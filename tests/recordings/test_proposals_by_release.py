"""No proposal is refused by the release that it is made to: every fix of every incident, for every known release."""

import shlex
from collections.abc import Iterator

import pytest
from support.live import server
from support.sampling import some

from diag.core.incident import Fix, Signal
from diag.diagnosis.proposals import FlagChange, Proposal, available
from diag.diagnosis.relaunch import relaunch
from diag.knowledge.catalog import load
from diag.lint.rule import LintTarget
from diag.lint.rules import lint
from diag.vllm.command.parse import parse
from diag.vllm.flags import installed_parser as ask
from diag.vllm.flags.registry import release, versions

FIXES = [(incident.id, fix) for incident in load() for fix in incident.fixes if fix.flag or fix.environment]
SUPPORTED = [each for each in versions() if release(each) >= (0, 8, 0)]
NAMES = [f"{incident}-{fix.name}" for incident, fix in FIXES]


def value(fix: Fix, of: object) -> float | str | None:
    """A value of the kind that the doctor computes: within the bounds, in the fix's rounding."""
    if not isinstance(of, Signal):
        return of  # type: ignore[return-value]
    if fix.rounding == "hundredth_below":
        return 0.15 if fix.most == 0.2 else 0.85
    return 2.0 if fix.also else 256.0


def commands(fix: Fix) -> Iterator[str]:
    """A plain launch command with the fix in it, and one that gives the flag already."""
    own = FlagChange(fix.name, None, value(fix, fix.value))
    also = [FlagChange(flag, None, value(fix, of)) for flag, of in fix.also]
    proposal = Proposal(fix, None, own.after, (), True, fix.name, changes=(own, *also))
    given = f"vllm serve m {shlex.quote(fix.flag)} 1"
    for launch in (
        *(["vllm serve m"] if fix.value is not None else []),
        *([given] if fix.flag and (fix.value is None or isinstance(fix.value, Signal)) else []),
    ):
        line = relaunch(launch, [proposal])
        assert line is not None
        yield line


@pytest.mark.parametrize(("incident", "fix"), FIXES, ids=NAMES)
def test_no_release_refuses_its_proposals(incident: str, fix: Fix) -> None:
    able = [each for each in SUPPORTED if available(fix, each)]
    assert able, "no release that diag judges can use it"
    for version in some(able, 5):
        for line in commands(fix):
            found = lint(LintTarget(parse(line, version), version))
            assert [each.message for each in found if each.severity == "error"] == [], (version, line)


SET = [(name, fix) for name, fix in FIXES if fix.flag and fix.value is not None and fix.versions == ("", "")]


@pytest.mark.parametrize("fix", [fix for _, fix in SET if not fix.instead_of], ids=lambda fix: fix.name)
def test_release_without_a_proposed_flag_would_refuse_the_flag(fix: Fix) -> None:
    for version in (each for each in SUPPORTED if not available(fix, each)):
        for line in commands(fix):
            assert any(each.severity == "error" for each in lint(LintTarget(parse(line, version), version))), (
                version,
                line,
            )


@pytest.mark.live
@server.needed
def test_the_installed_parser_accepts_every_proposal() -> None:
    lines = [(line, fix) for _, fix in FIXES for line in commands(fix)]
    parsed = [parse(line) for line, _ in lines]
    version, refusals = ask.check(server.PYTHON, [each.words[each.arguments :] for each in parsed])
    asked = [(line, why) for (line, fix), why in zip(lines, refusals, strict=True) if available(fix, version)]
    assert len(asked) > 20
    assert [(line, why) for line, why in asked if why] == []
