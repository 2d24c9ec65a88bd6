"""The fleet that other tests query: each instance is whole, and sick where and when it should be."""

from pathlib import Path

import fleet
import pytest
from prometheus_server import PLACES, program
from timelines import SICK, STEP

from diag.catalog import load
from diag.contract import Contract

END = 1_790_000_000.5
MEMBERS = {"gpu_thermal_throttling": 3, "healthy": 2, "kv_eviction_cascade": 2}
INCIDENTS = {each.id: each for each in load()}


@pytest.mark.prometheus
@pytest.mark.parametrize("place", PLACES)
def test_instances_are_whole_and_those_with_a_fault_have_it(tmp_path: Path, place: str) -> None:
    fleet.write(tmp_path, MEMBERS, END)
    names = {kind: set(fleet.instances(kind, count)) for kind, count in MEMBERS.items()}
    now, before = round(END * 1000), round((END - SICK - STEP) * 1000)
    with fleet.serving(program(place), tmp_path) as server:
        held = server.query('count by (instance) ({job="vllm"})', now)
        counted = {dict(key)["instance"]: count for key, count in held.items()}
        assert counted.keys() == set.union(*names.values())
        assert all(len({counted[name] for name in each}) == 1 for each in names.values())
        for kind in INCIDENTS.keys() & MEMBERS.keys():
            asked = INCIDENTS[kind].query(INCIDENTS[kind].window, Contract().values())
            assert {dict(key)["instance"] for key in server.query(asked, now)} == names[kind]
            assert not server.query(asked, before)
