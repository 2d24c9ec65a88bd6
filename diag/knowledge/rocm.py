"""The words of an incident on AMD GPUs: ROCm's commands and terms in place of NVIDIA's (rocm.toml has the table)."""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from diag.core.declarations import PACKAGE, read
from diag.core.incident import Incident, LookAlike

SHOWS = re.compile(r"\bHIP\b|HSA_STATUS|by GPU node-\d|\bamdgpu\b|\brccl\b|libtorch_hip|\[aiter\]|/opt/rocm|\brocm\b")
"""Words of a log line that only ROCm's libraries write."""


class Phrases(NamedTuple):
    """ROCm's phrase for each of NVIDIA's."""

    commands: Mapping[str, str]
    words: Mapping[str, str]


@cache
def table() -> Phrases:
    return read(PACKAGE / "knowledge" / "rocm.toml", Phrases)


@cache
def _phrase() -> re.Pattern[str]:
    phrases = {**table().commands, **table().words}
    return re.compile("|".join(map(re.escape, sorted(phrases, key=len, reverse=True))))


def in_words(text: str) -> str:
    """Replace NVIDIA's phrases in a text; the longest one that fits counts."""
    return _phrase().sub(lambda found: {**table().commands, **table().words}[found[0]], text)


def commands_in(text: str) -> dict[str, str]:
    """Return ROCm's command for each of NVIDIA's in a text, in their order."""
    found = _phrase().findall(text)
    return {phrase: table().commands[phrase] for phrase in found if phrase in table().commands}


def look_alike_in_words(look_alike: LookAlike) -> LookAlike:
    return look_alike._replace(distinguish=in_words(look_alike.distinguish))


def incident_in_words(incident: Incident) -> Incident:
    """Return an incident with ROCm's words in all texts for people; what is measured stays."""
    return incident._replace(
        cause=in_words(" ".join(incident.cause.split())),
        looks_like=tuple(map(look_alike_in_words, incident.looks_like)),
        fixes=tuple(
            fix._replace(
                change=in_words(fix.change),
                effect=in_words(fix.effect),
                command=in_words(fix.command),
                risk=in_words(fix.risk),
                rollback=in_words(fix.rollback),
            )
            for fix in incident.fixes
        ),
        mitigate=tuple(map(in_words, incident.mitigate)),
        hand_over=tuple(map(in_words, incident.hand_over)),
        do_not=tuple(map(in_words, incident.do_not)),
    )
