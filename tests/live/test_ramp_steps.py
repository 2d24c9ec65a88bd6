"""`diag ramp` on a real vLLM on the CPU: what a step measures, whatever else runs on the host."""

import json
from pathlib import Path

import pytest
from support.live import load, ramps, server

from diag.ramp.comparison import compare
from diag.sources import kept_ramp

pytestmark = [pytest.mark.live, pytest.mark.nightly, server.needed]
OPTIONS = ("--from", "4", "--most", "16", "--rates", "0", "--step-seconds", "15")


def test_a_ramp_measures_the_steady_part_of_its_steps(tmp_path: Path) -> None:
    """A cap of 8: four requests at a time are not the client's limit, and 16 need a cap of 64.

    On a crowded host the ramp says so, and proposes nothing.
    """
    with server.running(tmp_path, ramps.EIGHT.size, ramps.EIGHT.flags) as vllm, load.alone():
        found = ramps.ramp(vllm.url, ramps.EIGHT.tokens, *OPTIONS)
    told = json.dumps(found, indent=1)
    read = kept_ramp.parse(json.loads(told), "ramp.json", 0.0)
    assert read.load_by == f"vllm bench serve {found['vllm']}", told
    assert compare(read, read).verdict == ("no change" if read.ceiling else "not comparable"), told
    for step in found["steps"]:
        assert (step["failures"]["failed"], step["failures"]["by"]) == (0, "server"), told
    if not ramps.names_a_crowded_host(found):
        assert [step["concurrency"] for step in found["steps"]] == [4, 8, 16], told
        assert [step["in_flight"] for step in found["steps"]] == pytest.approx([4, 8, 16], rel=0.1), told
        assert found["binds"]["id"] == ramps.EIGHT.binds, told
        (change, *_) = found["binds"]["changes"]
        assert (change["flag"], change["before"], change["after"]) == ("--max-num-seqs", 8, 64), told
