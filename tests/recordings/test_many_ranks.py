"""A server whose ranks span nodes, with an exporter on each node, and what NCCL and InfiniBand show of its stall."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support import rewriting
from support.rewriting import Scrape
from support.scenarios import Beside, config, found, gpu, judge, present, text, workers

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.metric_families import Sample
from diag.diagnosis.report import Report
from diag.exposition import render

STALL, HASH, LEADER = "tp_communication_stall", "cf264af53edbe986", "10.0.0.1:29501"
RECORDING = "tp_rank_missing_on_node_b"
LACKS = f"AllReduce 1234 of communicator {HASH} lacks rank 11 on 10.0.0.2"
MISSING = "diag_nccl_missing_rank_operations"


def nccl(state: str = "behind", since: float = 26.0) -> Beside:
    """Return the samples of NCCL's RAS service: rank 11 is in this state from then on, seconds after the first page."""

    def beside(t: float) -> Iterator[Sample]:
        yield "diag_nccl_processes", ("answering",), 16
        for each in ("behind", "unresponsive", "dead"):
            yield "diag_nccl_processes", (each,), float(each == state and t >= since)
        operation = (ALL_REDUCE, "1234") if state == "behind" else ("", "")
        if t >= since:
            yield MISSING, (HASH, "11", "10.0.0.2", state, *operation), 1

    return beside


ALL_REDUCE = "AllReduce"


def test_rank_on_another_node_is_named_by_nccl_with_the_link_that_failed() -> None:
    report = doctor.run(ObserveOptions([str(rewriting.RECORDINGS / RECORDING)]))
    stall = found(report, STALL).diagnosis
    assert dict(stall.subject) == {"instance": "node-a:9400"}
    assert stall.culprits == (f"AllReduce 184467 of communicator {HASH} lacks rank 11 on 10.0.0.2",)
    named = {reading.condition.signal.name: reading.culprits for reading in stall.supports if reading.holds}
    assert named["ranks out of step"] == ("rank 11 on node-b",)
    assert "link_downed on mlx5_3/1 of node-b" in named["InfiniBand and RoCE link errors"]
    assert found(report, "engine_stalled").diagnosis.explained_by == STALL
    assert not any("node-b" in str(dict(each.diagnosis.subject)) for each in report.present)


@pytest.mark.parametrize("state", ["behind", "unresponsive", "dead"])
def test_nccl_alone_names_the_rank(tmp_path: Path, state: str) -> None:
    report = judge(tmp_path, "engine_stalled", config(tensor_parallel_size=16), nccl(state), workers(*[1.0] * 8))
    named = LACKS if state == "behind" else f"communicator {HASH} lacks rank 11 on 10.0.0.2 ({state})"
    assert found(report, STALL).diagnosis.culprits == (named,)


def test_nccl_names_the_process_of_another_data_parallel_engine(tmp_path: Path) -> None:
    scrapes = list(rewriting.scrapes("data_parallel_lockstep"))
    pages = ((t, host, page + text(t - scrapes[0][0], page, [nccl(since=16.0)])) for t, host, page in scrapes)
    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages))]))
    readings = {
        reading.condition.signal.name: reading for reading in found(report, "data_parallel_lockstep").diagnosis.supports
    }
    assert readings["ranks missing from NCCL"].culprits == (LACKS,)


@pytest.mark.parametrize(
    ("vllm", "state"),
    [
        ("healthy", "behind"),
        ("healthy", "unresponsive"),
        ("idle", "dead"),
        ("idle", "behind"),
        ("kv_cascade", "behind"),
    ],
)
def test_nccl_proves_nothing_about_a_server_that_works_or_is_idle(tmp_path: Path, vllm: str, state: str) -> None:
    report = judge(tmp_path, vllm, config(tensor_parallel_size=16), nccl(state, since=0.0), workers(*[1.0] * 8))
    assert STALL not in present(report)


def test_no_missing_rank_by_nccl_proves_nothing_either(tmp_path: Path) -> None:
    """NCCL does not count the collectives of captured graphs: the processes still tell."""
    still = nccl(since=1e9)
    report = judge(tmp_path, "engine_stalled", config(tensor_parallel_size=2), still, workers(1.0, 0.0))
    assert found(report, STALL).diagnosis.culprits == ("rank 1",)


@pytest.mark.parametrize(("waited", "culprits"), [(0.5, ("rank 1",)), (0.0, ())])
def test_a_rank_that_shares_its_core_busy_waits_all_the_same(
    tmp_path: Path, waited: float, culprits: tuple[str, ...]
) -> None:
    shared = workers(0.45, 0.0)

    def ready(t: float) -> Iterator[Sample]:
        for rank, share in enumerate((waited, 0.0)):
            yield "diag_vllm_process_cpu_wait_seconds_total", (str(100 + rank), "worker", str(rank)), share * t

    report = judge(tmp_path, "engine_stalled", config(tensor_parallel_size=2), shared, ready)
    stalls = [each.diagnosis for each in report.present if each.diagnosis.incident.id == STALL]
    assert [name for stall in stalls for name in stall.culprits] == [*culprits]


def ports(grows: str) -> Beside:
    """Return two InfiniBand ports of which one counts errors of this kind all the time, and one is without a cable."""

    def beside(t: float) -> Iterator[Sample]:
        for number in (0, 1):
            port = (f"mlx5_{number}/1", "node-a")
            yield "diag_infiniband_port_active", port, float(number == 0)
            for kind in ("link_downed", "symbol_error"):
                yield "diag_infiniband_errors_total", (*port, kind), 5 + (t if kind == grows and number == 0 else 0)

    return beside


@pytest.mark.parametrize("kind", ["symbol_error", "link_downed"])
def test_link_errors_alone_are_no_incident(tmp_path: Path, kind: str) -> None:
    assert present(judge(tmp_path, "healthy", config(tensor_parallel_size=2), ports(kind))) == set()


def test_corrected_symbols_and_ports_without_a_cable_are_no_evidence(tmp_path: Path) -> None:
    report = judge(tmp_path, "engine_stalled", config(tensor_parallel_size=2), workers(1.0, 0.0), ports("symbol_error"))
    readings = {each.condition.signal.name: each.value for each in found(report, STALL).diagnosis.supports}
    assert readings["InfiniBand and RoCE link errors"] == readings["InfiniBand ports gone down"] == 0


def test_dumps_of_the_flight_recorder_are_read_if_there_are_any(tmp_path: Path) -> None:
    def proposed(written: float) -> bool:
        dump: Beside = lambda _: [("diag_nccl_dump_timestamp_seconds", (), written)]  # noqa: E731
        folder = tmp_path / str(written)
        report = judge(folder, "engine_stalled", config(tensor_parallel_size=2), workers(1.0, 0.0), dump)
        return any("torchfrtrace" in each.fix.command for each in found(report, STALL).proposals)

    assert proposed(1_700_000_000.0)
    assert not proposed(0.0)


def test_nvlinks_that_were_trained_again_are_evidence(tmp_path: Path) -> None:
    links = {
        f"nvlink_errors_total:{kind}": grows
        for kind, grows in (("replay", lambda t: t), ("recovery", lambda t: t // 9))
    }
    report = judge(tmp_path, "engine_stalled", config(tensor_parallel_size=2), workers(1.0, 0.0), gpu(0, **links))
    reading = next(each for each in found(report, STALL).diagnosis.supports if "NVLinks" in each.condition.signal.name)
    assert (reading.holds, reading.culprits) == (True, ("GPU 0",))


# -- several exporters of one server -----------------------------------------------------------------------------------


def node(number: int, leader: str = LEADER) -> Beside:
    return lambda _: [("diag_vllm_node_info", (leader, str(number), f"node-{'ab'[number]}"), 1.0)]


def headless(still: Iterable[int], since: float) -> Beside:
    """Return the workers 8 to 15 of a node without an API server, some of which stand still from then on."""

    def beside(t: float) -> Iterator[Sample]:
        yield "diag_vllm_config", ("headless",), 1
        yield "diag_vllm_config", ("tensor_parallel_size",), 16
        yield "diag_vllm_processes", ("worker",), 8
        for rank in range(8, 16):
            labels = (str(100 + rank), "worker", str(rank))
            yield "diag_vllm_process_cpu_seconds_total", labels, 30 + (min(t, since) if rank in still else t)
            yield "diag_vllm_process_stopped", labels, 0

    return beside


def two_nodes(folder: Path, vllm: str, *of_b: Beside) -> Report:
    scrapes = list(rewriting.scrapes(vllm))
    start = scrapes[0][0]

    def pages() -> Iterator[Scrape]:
        for t, _, page in scrapes:
            of_a = (config(tensor_parallel_size=16), workers(*[1.0] * 8), node(0))
            yield t, "a:9400", page + text(t - start, page, of_a)
            own: list[Sample] = [("diag_vllm_up", (), 0.0), ("diag_scrape_success", ("vllm",), 0.0)]
            yield t, "b:9400", render([*own, *(sample for each in of_b for sample in each(t - start))]).decode()

    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages()))]))


def test_worker_that_stands_still_on_another_node_is_named(tmp_path: Path) -> None:
    report = two_nodes(tmp_path, "engine_stalled", node(1), headless({11}, 20.0))
    stall = found(report, STALL).diagnosis
    assert (dict(stall.subject), stall.culprits) == ({"instance": "a:9400"}, ("rank 11 on node-b",))


def test_two_exporters_of_one_node_make_no_query_fail(tmp_path: Path) -> None:
    scrapes = list(rewriting.scrapes("engine_stalled"))
    start = scrapes[0][0]

    def pages() -> Iterator[Scrape]:
        for t, _, page in scrapes:
            yield t, "a:9400", page + text(t - start, page, (config(tensor_parallel_size=16), node(0), workers(1.0)))
            for instance in ("b:9400", "b:9401"):
                of_b = (node(1), headless({11}, 20.0))
                yield t, instance, render([sample for each in of_b for sample in each(t - start)]).decode()

    report = doctor.run(ObserveOptions([str(rewriting.write(tmp_path / "recording", pages()))]))
    assert found(report, STALL).diagnosis.culprits == ("rank 11 on node-b",)


def test_headless_node_is_judged_with_its_server(tmp_path: Path) -> None:
    report = two_nodes(tmp_path, "healthy", node(1), headless((), 0.0))
    assert (report.verdict, report.present, report.not_judged) == ("healthy", (), ())


def test_headless_node_alone_cannot_be_judged(tmp_path: Path) -> None:
    report = judge(tmp_path, "", node(1), headless((), 0.0))
    assert report.verdict == "unknown"
    assert "headless node" in report.not_judged[0].sentence


@pytest.mark.parametrize(
    "of_b",
    [
        (node(1, "10.9.9.9:29501"), headless({11}, 20.0)),
        (node(1), node(1, "10.9.9.9:29501"), headless({11}, 20.0)),
        (node(0), headless({11}, 20.0)),
        (headless({11}, 20.0),),
    ],
    ids=["another server", "two servers in turn", "two first nodes", "no --nnodes"],
)
def test_node_that_may_be_of_another_server_is_not_joined(tmp_path: Path, of_b: tuple[Beside, ...]) -> None:
    assert STALL not in present(two_nodes(tmp_path, "engine_stalled", *of_b))
