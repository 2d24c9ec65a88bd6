"""Pools by prompt length: proposed where they help, with the effect that they have, and else not at all."""

import re
from pathlib import Path

import pytest
from support.mixed_lengths import CHAT, DOCUMENTS, latencies, recorded

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.diagnosis.proposals import Proposal

TEXT = re.compile(
    r"Of every (\d) replicas, serve prompts up to ([\d,]+) tokens on (\d) and longer ones on (\d)\. .*"
    r"model error (\d+) %\): decode time in stream pauses ([\d.]+) % -> about ([\d.]+) %, "
    r"TTFT \(mean\) ([\d.]+) s -> about ([\d.]+) (m?s)\."
)


def proposed(folder: Path) -> list[Proposal]:
    found = [each for each in doctor.run(ObserveOptions([str(folder)])).findings if each.diagnosis.state == "present"]
    return [proposal for finding in found for proposal in finding.proposals if proposal.fix.pools]


def test_pools_have_the_effect_that_the_proposal_names(tmp_path: Path) -> None:
    """The other simulator, with its own scheduler and its own arrivals, plays the mixed replica and both pools."""
    (proposal,) = proposed(recorded(tmp_path, (CHAT, DOCUMENTS), 900, 5))
    named = TEXT.match(proposal.text)
    assert named, proposal.text
    replicas, short, long = (int(named[at]) for at in (1, 3, 4))
    assert short + long == replicas
    assert 1000 <= float(named[2].replace(",", "")) <= 10_000
    assert int(named[5]) <= 25

    mixed = latencies((CHAT, DOCUMENTS), 1, 1800)
    chat = latencies((CHAT,), short / replicas, 900)
    documents = latencies((DOCUMENTS,), long / replicas, 900)
    ttft = (chat[0] * short + documents[0] * long) / (chat[1] * short + documents[1] * long)
    assert float(named[8]) == pytest.approx(mixed[0] / mixed[1], rel=0.25)
    assert float(named[9]) * (0.001 if named[10] == "ms" else 1) == pytest.approx(ttft, rel=0.25)
    assert mixed[2] > 0.2
    assert chat[2] == 0
    assert float(named[7]) < 5 < float(named[6])


@pytest.mark.parametrize("name", ["contention_bigbatch", "kv_cascade", "kv_cascade_base"])
def test_no_pools_where_the_model_is_wrong_or_a_split_does_not_help(name: str) -> None:
    assert proposed(Path("tests/recordings") / name) == []
