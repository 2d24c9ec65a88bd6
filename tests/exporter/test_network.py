"""InfiniBand ports, dumps of the flight recorder and the nodes of a server, as the exporter reads them."""

import os
import socket
from pathlib import Path

import pytest
from support.processes import TP2, serving
from support.waiting import until

from diag.exporter.infiniband import MOST_PORTS, InfiniBandCollector
from diag.exporter.process import collector
from diag.exporter.process.collector import ProcessCollector
from diag.exporter.process.server import NodeOfServer, dump_prefixes, newest_dump, parse_node


def test_port_state_and_errors_are_collected(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_3/ports/1"
    (port / "counters").mkdir(parents=True)
    (port / "hw_counters").mkdir()
    (port / "state").write_text("4: ACTIVE\n")
    for name, text in {"link_downed": "2\n", "symbol_error": "N/A (no PMA)", "port_rcv_errors": "-1"}.items():
        (port / "counters" / name).write_text(text)
    (port / "hw_counters" / "local_ack_timeout_err").write_text("7\n")
    host = socket.gethostname()
    assert InfiniBandCollector(tmp_path).collect().samples == [
        ("diag_infiniband_port_active", ("mlx5_3/1", host), 1),
        ("diag_infiniband_errors_total", ("mlx5_3/1", host, "link_downed"), 2),
        ("diag_infiniband_errors_total", ("mlx5_3/1", host, "local_ack_timeout_err"), 7),
    ]


def test_number_of_ports_is_bounded_and_a_pipe_does_not_hang(tmp_path: Path) -> None:
    for number in range(MOST_PORTS + 5):
        folder = tmp_path / f"class/infiniband/mlx5_{number:02}/ports/1"
        folder.mkdir(parents=True)
        os.mkfifo(folder / "state") if number == 3 else (folder / "state").write_text("1: DOWN")
    found = InfiniBandCollector(tmp_path).collect().samples
    assert [value for _, _, value in found] == [0.0] * (MOST_PORTS - 1)
    assert InfiniBandCollector(tmp_path / "none").collect().samples == []


# -- dumps of the flight recorder --------------------------------------------------------------------------------------


def test_newest_dump_since_the_start_counts(tmp_path: Path) -> None:
    prefix = f"{tmp_path}/comm_lib_trace_rank_"
    for name, at in {"0": 100, "11": 300, "2": 200, "x": 900, "12.tmp": 900}.items():
        (tmp_path / f"comm_lib_trace_rank_{name}").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
        os.utime(f"{prefix}{name}", (at, at))
    (tmp_path / "comm_lib_trace_rank_7").mkdir()
    (tmp_path / "comm_lib_trace_rank_8").symlink_to("/etc/passwd")
    assert newest_dump([prefix], 50.0) == 300
    assert newest_dump([prefix], 301.0) == newest_dump([f"{tmp_path}/none/x"], 0.0) == newest_dump([], 0.0) == 0


@pytest.mark.parametrize(
    ("environment", "prefixes"),
    [
        ({"TORCH_FR_DUMP_TEMP_FILE": "/d/r_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/old"}, ["/d/r_"]),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "relative_"}, []),
        ({"HOME": "/h"}, ["/h/.cache/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]),
        ({"XDG_CACHE_HOME": "/x"}, ["/x/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]),
    ],
)
def test_place_of_the_dumps_is_that_of_the_launch(environment: dict[str, str], prefixes: list[str]) -> None:
    assert dump_prefixes(environment) == prefixes


# -- nodes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "found"),
    [
        (
            "vllm serve m --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --headless",
            NodeOfServer("10.0.0.1:29501", "1"),
        ),
        ("vllm serve m -n 2 --master_addr=a --master-port 7", NodeOfServer("a:7", "0")),
        ("vllm serve m --nnodes 1 --master-addr 10.0.0.1", None),
        ("vllm serve m --nnodes 2 --node-rank 1", None),
        ("vllm serve m --nnodes two --master-addr 10.0.0.1", None),
        ("vllm serve m --nnodes 2 --node-rank -1 --master-addr 10.0.0.1", None),
        ("vllm serve m --nnodes 2 --master-addr '${HEAD}'", None),
        ("", None),
    ],
)
def test_node_is_that_of_the_launch(launch: str, found: NodeOfServer | None) -> None:
    assert parse_node(launch) == found


def test_exporter_names_its_node_and_the_dumps_of_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(collector, "SEARCH_SHARE", float("inf"))
    flags = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--headless"]
    dumps = {"TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/rank_"}
    with serving(tmp_path, TP2, flags=flags, environment=dumps) as fake:
        processes = ProcessCollector(fake.port)
        until(lambda: processes.collect() and processes.server_pid() == fake.process.pid)
        (tmp_path / "rank_1").touch()
        samples = {name: (labels, value) for name, labels, value in processes.collect().samples}
        assert samples["diag_vllm_node_info"] == (("10.0.0.1:29501", "1", socket.gethostname()), 1)
        assert samples["diag_nccl_dump_timestamp_seconds"][1] > (processes.started() or 0.0)
