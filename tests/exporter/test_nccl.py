"""NCCL's RAS service: a socket replays its statuses in both layouts, or misbehaves, and the collector names ranks."""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping

import pytest
from support.bad_servers import drip, hang, pages, serving, talking
from support.exporter_server import vllms_page
from support.nccl_ras import ALL_REDUCE, HASH, answering, status, text
from support.waiting import until

from diag.commands.exporter import Exporter, ExporterOptions
from diag.core.errors import BadUsage
from diag.core.metric_families import Collected
from diag.exporter import nccl
from diag.exporter.nccl import NcclCollector, NotRas, parse_address, read_status

Status = Mapping[str, object] | str
BEHIND = [1234] * 11 + [1233] + [1234] * 4
"""All-reduces of 16 ranks of which rank 11, on the second node, has not launched number 1234."""
LINE_UP = "  15 ranks have launched up to operation 1234\n"
OUTLIER = "  Rank 11 has launched up to operation 1233 -- GPU 3 managed by process 4011 on node 10.0.0.2\n\n"
MISMATCH = f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different {{}} operation counts\n"
NAMED = (HASH, "11", "10.0.0.2", "behind", ALL_REDUCE, "1234")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "QUERY_EVERY", 0.0)


def collected(*statuses: Status) -> Collected:
    """Return what is shown once each of the statuses has been read."""
    with answering(*statuses) as server:
        collector = NcclCollector(server.address)
        collector.page_answered(True)
        for _ in statuses:
            collector.collect()
            collector.wait(5)
        collector.page_answered(False)
        return collector.collect()


def named(found: Collected) -> dict[tuple[str, ...], float]:
    return {labels: value for name, labels, value in found.samples if name == "diag_nccl_missing_rank_operations"}


def counted(found: Collected) -> dict[str, float]:
    return {labels[0]: value for name, labels, value in found.samples if name == "diag_nccl_processes"}


@pytest.mark.parametrize(
    "seen",
    [
        status(BEHIND),
        text(MISMATCH.format(ALL_REDUCE) + LINE_UP + OUTLIER),
        text(MISMATCH.format(ALL_REDUCE) + LINE_UP + OUTLIER.replace(" (NVML 3)", ""), version="2.26.2+cuda12.8"),
    ],
)
def test_rank_that_stays_behind_is_named_with_its_node_and_operation(seen: Status) -> None:
    assert named(collected(seen)) == {}  # one status is no standstill
    found = collected(seen, seen)
    assert named(found) == {NAMED: 1.0}
    assert counted(found) == {"answering": 16, "behind": 1, "unresponsive": 0, "dead": 0}


def test_rank_that_has_launched_nothing_is_behind_by_all_operations() -> None:
    none = "  Rank 11 has not launched any operations -- GPU 3 managed by process 4011 on node 10.0.0.2\n\n"
    seen = text(MISMATCH.format(ALL_REDUCE) + LINE_UP + none)
    assert named(collected(seen, seen)) == {(*NAMED[:5], "1"): 1234.0}


def test_ranks_of_a_group_are_listed_below_its_count() -> None:
    group = "  14 ranks have launched up to operation 1234\n  2 ranks have launched up to operation 1230\n"
    listed = "".join(
        f"  Rank {rank} -- GPU {rank} (NVML {rank + 1}) managed by process 400{rank} on node fe80::1\n"
        for rank in (2, 5)
    )
    seen = text(MISMATCH.format("AllGather") + group + listed)
    assert set(named(collected(seen, seen))) == {
        (HASH, rank, "fe80::1", "behind", "AllGather", "1231") for rank in ("2", "5")
    }


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (status(BEHIND), status([2 * count for count in BEHIND])),  # it has moved on meanwhile
        (status([7] * 16), status(BEHIND)),
        (status(BEHIND, changes={"finalize_called": True}),) * 2,  # it leaves the communicator
        (status(BEHIND, changes={"init_state": 7}),) * 2,
        (status([5] * 2 + [4] * 14),) * 2,  # who of 14 is the cause is not known
        (text(MISMATCH.format("collective") + LINE_UP + OUTLIER, version="2.25.1"),) * 2,  # captured graphs count
        (status(BEHIND, version="2.25.1"),) * 2,
        (text(f"#0-0 ({HASH}) MISMATCH\n  Communicator ranks have different status\n{OUTLIER}"),) * 2,
    ],
)
def test_difference_of_a_healthy_job_is_not_a_missing_rank(before: Status, now: Status) -> None:
    found = collected(before, now)
    assert (named(found), found.problem, counted(found)["behind"]) == ({}, "", 0)


@pytest.mark.parametrize(("dead", "state"), [(False, "unresponsive"), (True, "dead")])
def test_process_without_an_answer_is_named(dead: bool, state: str) -> None:
    process = "  Process 4011 on node 10.0.0.2 managing GPU 3\n\n"
    summary = (
        "DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n"
        if dead
        else ("INCOMPLETE\n  Missing communicator data from 1 job process\n")
    )
    gone = f"#0-0 ({HASH}) INCOMPLETE\n  Missing communicator data from 1 rank\n"
    lost = "  Rank 11 -- GPU 3 managed by process 4011 on node 10.0.0.2\n\n"
    for seen in (status([5] * 16, {11: dead}), text(errors=summary + process + gone + lost)):
        assert named(collected(status([5] * 16), seen)) == {}
        found = collected(seen, seen)
        assert named(found) == {(HASH, "11", "10.0.0.2", state, "", ""): 0.0}
        assert counted(found)[state] == 1


def test_hanging_process_is_named_once_and_names_are_bounded() -> None:
    one = status(BEHIND)
    small = json.loads(json.dumps(one).replace(HASH, "00ff"))["communicators"][0]
    small["ranks"] = small["ranks"][10:12]
    both = {**one, "communicators": [small, *one["communicators"]]}  # type: ignore[misc]
    assert named(collected(both, both)) == {NAMED: 1.0}
    many = [{**rank, "rank": at, "pid": at + 1, "host": "b"} for at, rank in enumerate(small["ranks"] * 40)]
    crowd = {**one, "communicators": [{**small, "ranks": many}]}
    assert len(named(collected(crowd, crowd))) == nccl.MOST_NAMED


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "{",
        '{"nccl_version": "2.28.9"}',
        json.dumps(status(BEHIND))[:-200],
        '{"nccl_version": "2.28.9", "communicators": ' + "[" * 100_000,
        json.dumps(status(BEHIND)).replace("1233", "-1"),
        json.dumps(status(BEHIND)).replace("1233", "1e400"),
        json.dumps(status(BEHIND)).replace("1233", "9" * 5000),
        json.dumps(status(BEHIND)).replace(f"0x{HASH}", 'x\\"} 1\\n'),
        json.dumps(status(BEHIND, version="x")),
        text(MISMATCH.format(ALL_REDUCE) + LINE_UP + OUTLIER)[:700],
        "\x00\xff" * 1000,
        "HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_damaged_status_is_refused(answer: str) -> None:
    with pytest.raises(NotRas):
        read_status(answer)


def test_label_that_no_nccl_writes_is_left_out() -> None:
    odd = json.loads(json.dumps(status(BEHIND)).replace("10.0.0.2", 'b\\n\\"} 1'))
    assert named(collected(odd, odd)) == {(HASH, "11", "", "behind", ALL_REDUCE, "1234"): 1.0}


def _flood(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(64)
    while not over.is_set():
        connection.sendall(b"x" * 65536)


def _endless_status(connection: socket.socket, over: threading.Event) -> None:
    for answer in (b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n", b"{"):
        connection.recv(64)
        connection.sendall(answer)
    while not over.is_set():
        connection.sendall(b" " * 65536)


def _web_server(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(64)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def _closes(connection: socket.socket, over: threading.Event) -> None:
    connection.recv(64)


@pytest.mark.parametrize("talk", [hang, drip, _flood, _endless_status, _web_server, _closes])
def test_socket_that_misbehaves_never_delays_the_page(
    talk: Callable[[socket.socket, threading.Event], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(nccl, "MOST_BYTES", 2**20)
    with talking(talk) as server:
        collector = NcclCollector(("127.0.0.1", server.port))
        collector.page_answered(True)
        begun = time.monotonic()
        collector.collect()
        assert time.monotonic() - begun < 0.2
        collector.wait(3)
        assert time.monotonic() - begun < 2
        found = collector.collect()
    assert not found.samples
    assert found.problem.startswith(f"NCCL's RAS service at 127.0.0.1:{server.port}: ")


def test_old_status_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "TOO_OLD", 0.0)
    assert collected(status(BEHIND), status(BEHIND)).samples == ()


def test_service_is_asked_only_while_vllm_answers_and_only_if_the_job_is_its_own() -> None:
    with answering(status(BEHIND)) as server:
        starting = NcclCollector(server.address)
        assert starting.collect() == Collected(())
        shared = NcclCollector(server.address, lambda port: port == server.address[1])
        shared.page_answered(True)
        shared.collect()
        shared.wait(5)
        assert "another NCCL job listens there too" in shared.collect().problem
        assert server.commands == []


def test_exporter_serves_the_missing_rank() -> None:
    with answering(status(BEHIND)) as server, serving(pages(vllms_page())) as vllm:
        exporter = Exporter(ExporterOptions(vllm.url, nccl_ras=f"127.0.0.1:{server.address[1]}"))
        line = b'diag_nccl_missing_rank_operations{collective="AllReduce",communicator="cf264af53edbe986",'
        until(lambda: line in exporter.page(4))
        page = exporter.page(4)
    assert b'diag_scrape_success{collector="nccl"} 1.0' in page
    assert set(server.commands) == {"CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"}


@pytest.mark.parametrize("given", ["28028", "localhost:", "localhost:0", "localhost:99999", "[::1:28028", "a b:1"])
def test_address_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(BadUsage, match="localhost:28028"):
        parse_address(given)


def test_addresses_are_written_as_nccl_writes_them() -> None:
    assert parse_address("localhost:28028") == ("localhost", 28028)
    assert parse_address("[::1]:28028") == ("::1", 28028)
    assert parse_address("") is None
