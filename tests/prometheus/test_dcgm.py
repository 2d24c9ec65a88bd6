"""The recording rules for dcgm-exporter, judged by the real promtool of Prometheus 2 and 3."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from diag.artefacts import recording_rules
from diag.core.metric_families import THROTTLE_REASONS, families

PLACES = ("PATH", "DIAG_PROMETHEUS3")
SERVER, BY_POD = ("instance",), ("namespace", "pod")
VLLM = {"__name__": "vllm:num_requests_running", "job": "vllm", "namespace": "llm", "model_name": "m"}
ONE = {**VLLM, "pod": "vllm-0", "instance": "10.0.0.1:8000"}
TWO = {**VLLM, "pod": "vllm-1", "instance": "10.0.0.2:8000"}
GPU = {
    "gpu": "0",
    "UUID": "GPU-a",
    "pci_bus_id": "00000000:1A:00.0",
    "device": "nvidia0",
    "modelName": "NVIDIA H100 80GB HBM3",
    "Hostname": "node-1",
    "DCGM_FI_DRIVER_VERSION": "570.1",
    "job": "dcgm",
    "instance": "10.0.0.9:9400",
}
OURS = {"instance": "10.0.0.1:8000", "gpu": "0", "uuid": "GPU-a"}
MINE = {"namespace": "llm", "pod": "vllm-0", "container": "vllm"}
ASIDE = {"namespace": "gpu-operator", "pod": "dcgm-x", "exported_namespace": "llm", "exported_pod": "vllm-0"}
"""How Prometheus stores the workload's labels unless it is told to honour them."""
DEFAULT = (
    "SM_CLOCK MEM_CLOCK MEMORY_TEMP GPU_TEMP POWER_USAGE TOTAL_ENERGY_CONSUMPTION PCIE_REPLAY_COUNTER GPU_UTIL"
    " MEM_COPY_UTIL FB_FREE FB_USED FB_RESERVED UNCORRECTABLE_REMAPPED_ROWS CORRECTABLE_REMAPPED_ROWS ROW_REMAP_FAILURE"
)
"""What default-counters.csv of dcgm-exporter 4.8.3 has of the GPU, and the rates of PCIe."""
SCRAPED = {
    *(f"DCGM_FI_DEV_{counter}" for counter in DEFAULT.split()),
    *(f"DCGM_FI_PROF_PCIE_{w}_BYTES" for w in ("TX", "RX")),
}

METRIC = "diag_gpu_"
EXPECTED = {  # the field and its value as dcgm-exporter serves it; what is recorded: metric, own label, value
    "DEV_GPU_TEMP": (61, [("temperature_celsius", {"sensor": "gpu"}, 61), ("serving", {}, 1)]),
    "DEV_MEMORY_TEMP": (74, [("temperature_celsius", {"sensor": "memory"}, 74)]),
    "DEV_GPU_TEMP_LIMIT": (26, [("temperature_margin_celsius", {}, 26)]),
    "DEV_SM_CLOCK": (1980, [("clock_hertz", {"clock": "sm"}, 1.98e9)]),
    "DEV_MEM_CLOCK": (2619, [("clock_hertz", {"clock": "memory"}, 2.619e9)]),
    "DEV_MAX_SM_CLOCK": (1980, [("clock_max_hertz", {"clock": "sm"}, 1.98e9)]),
    "DEV_MAX_MEM_CLOCK": (2619, [("clock_max_hertz", {"clock": "memory"}, 2.619e9)]),
    "DEV_POWER_USAGE": (412.5, [("power_watts", {}, 412.5)]),
    "DEV_ENFORCED_POWER_LIMIT": (700, [("power_limit_watts", {}, 700)]),
    "DEV_POWER_MGMT_LIMIT_MIN": (200, [("power_limit_min_watts", {}, 200)]),
    "DEV_POWER_MGMT_LIMIT_DEF": (700, [("power_limit_default_watts", {}, 700)]),
    "DEV_TOTAL_ENERGY_CONSUMPTION": (5_000_500, [("energy_joules_total", {}, 5000.5)]),
    "DEV_GPU_UTIL": (97, [("utilization_ratio", {}, 0.97)]),
    "DEV_MEM_COPY_UTIL": (45, [("memory_busy_ratio", {}, 0.45)]),
    "DEV_FB_TOTAL": (81559, [("memory_total_bytes", {}, 81559 * 2**20)]),
    "DEV_FB_USED": (70000, [("memory_used_bytes", {}, 70000 * 2**20)]),
    "DEV_FB_FREE": (10900, [("memory_free_bytes", {}, 10900 * 2**20)]),
    "DEV_FB_RESERVED": (600, [("memory_reserved_bytes", {}, 600 * 2**20)]),
    "DEV_CLOCKS_EVENT_REASONS": (
        0x24,
        [("throttle_active", {"reason": reason}, int(bool(0x24 & bit))) for reason, bit in THROTTLE_REASONS.items()],
    ),
    "DEV_POWER_VIOLATION": (3_000_000_000, [("throttle_seconds_total", {"reason": "sw_power_cap"}, 3)]),
    "DEV_THERMAL_VIOLATION": (2_500_000_000, [("throttle_seconds_total", {"reason": "sw_thermal"}, 2.5)]),
    "DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS": (1e9, [("throttle_seconds_total", {"reason": "hw_thermal"}, 1)]),
    "DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS": (
        4e9,
        [("throttle_seconds_total", {"reason": "hw_power_brake"}, 4)],
    ),
    "DEV_SYNC_BOOST_VIOLATION": (5e9, [("throttle_seconds_total", {"reason": "sync_boost"}, 5)]),
    "DEV_BOARD_LIMIT_VIOLATION": (6e9, [("throttle_seconds_total", {"reason": "board_limit"}, 6)]),
    "DEV_RELIABILITY_VIOLATION": (7e9, [("throttle_seconds_total", {"reason": "reliability"}, 7)]),
    "PROF_PCIE_TX_BYTES_TOTAL": (8e9, [("pcie_bytes_total", {"direction": "tx"}, 8e9)]),
    "PROF_PCIE_RX_BYTES_TOTAL": (9e9, [("pcie_bytes_total", {"direction": "rx"}, 9e9)]),
    "PROF_PCIE_TX_BYTES": (2e9, [("pcie_throughput_bytes_per_second", {"direction": "tx"}, 2e9)]),
    "PROF_PCIE_RX_BYTES": (3e9, [("pcie_throughput_bytes_per_second", {"direction": "rx"}, 3e9)]),
    "DEV_PCIE_LINK_GEN": (4, [("pcie_link_generation", {"which": "current"}, 4)]),
    "DEV_PCIE_MAX_LINK_GEN": (5, [("pcie_link_generation", {"which": "max"}, 5)]),
    "DEV_PCIE_LINK_WIDTH": (8, [("pcie_link_width", {"which": "current"}, 8)]),
    "DEV_PCIE_MAX_LINK_WIDTH": (16, [("pcie_link_width", {"which": "max"}, 16)]),
    "DEV_PCIE_REPLAY_COUNTER": (3, [("pcie_replays_total", {}, 3)]),
    "DEV_NVLINK_COUNT_TX_BYTES": (6e12, [("nvlink_bytes_total", {"direction": "tx"}, 6e12)]),
    "DEV_NVLINK_COUNT_RX_BYTES": (7e12, [("nvlink_bytes_total", {"direction": "rx"}, 7e12)]),
    "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": (11, [("nvlink_errors_total", {"kind": "crc_flit"}, 11)]),
    "DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": (12, [("nvlink_errors_total", {"kind": "crc_data"}, 12)]),
    "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": (13, [("nvlink_errors_total", {"kind": "replay"}, 13)]),
    "DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": (14, [("nvlink_errors_total", {"kind": "recovery"}, 14)]),
    "DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL": (15, [("nvlink_errors_total", {"kind": "ecc_data"}, 15)]),
    "DEV_ECC_SBE_VOL_TOTAL": (16, [("ecc_errors_total", {"kind": "corrected"}, 16)]),
    "DEV_ECC_DBE_VOL_TOTAL": (17, [("ecc_errors_total", {"kind": "uncorrected"}, 17)]),
    "DEV_CORRECTABLE_REMAPPED_ROWS": (18, [("remapped_rows", {"kind": "corrected"}, 18)]),
    "DEV_UNCORRECTABLE_REMAPPED_ROWS": (19, [("remapped_rows", {"kind": "uncorrected"}, 19)]),
    "DEV_ROW_REMAP_FAILURE": (1, [("remap_failure", {}, 1)]),
}
RENAMED = {  # the default counters since dcgm-exporter 4.9.0, where the name or the unit is another one
    "DEV_GPU_TEMP_CELSIUS": (61, [("temperature_celsius", {"sensor": "gpu"}, 61), ("serving", {}, 1)]),
    "DEV_MEMORY_TEMP_CELSIUS": (74, [("temperature_celsius", {"sensor": "memory"}, 74)]),
    "DEV_SM_CLOCK_HERTZ": (1.98e9, [("clock_hertz", {"clock": "sm"}, 1.98e9)]),
    "DEV_MEMORY_CLOCK_HERTZ": (2.619e9, [("clock_hertz", {"clock": "memory"}, 2.619e9)]),
    "DEV_BOARD_POWER_WATTS": (412.5, [("power_watts", {}, 412.5)]),
    "DEV_GPU_ENERGY_JOULES_TOTAL": (5000, [("energy_joules_total", {}, 5000)]),
    "DEV_GPU_UTIL_RATIO": (0.97, [("utilization_ratio", {}, 0.97)]),
    "DEV_MEMORY_UTIL_RATIO": (0.45, [("memory_busy_ratio", {}, 0.45)]),
    "DEV_FB_CAPACITY_BYTES": (8.5e10, [("memory_total_bytes", {}, 8.5e10)]),
    "DEV_FB_USED_BYTES": (7e10, [("memory_used_bytes", {}, 7e10)]),
    "DEV_FB_FREE_BYTES": (1e10, [("memory_free_bytes", {}, 1e10)]),
    "DEV_FB_RESERVED_BYTES": (5e9, [("memory_reserved_bytes", {}, 5e9)]),
    "DEV_PCIE_REPLAY_TOTAL": (3, [("pcie_replays_total", {}, 3)]),
    "DEV_ROW_REMAP_CORRECTABLE_TOTAL": (18, [("remapped_rows", {"kind": "corrected"}, 18)]),
    "DEV_ROW_REMAP_UNCORRECTABLE_TOTAL": (19, [("remapped_rows", {"kind": "uncorrected"}, 19)]),
    "DEV_ROW_REMAP_FAILED": (0, [("remap_failure", {}, 0)]),
}
Sample = tuple[dict[str, str], float]


class Promtool:
    """One of the promtools, and a folder for what it reads."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.program, *arguments], cwd=self.folder, capture_output=True, text=True, check=False)

    def rules(self, labels: tuple[str, ...], key: tuple[str, ...]) -> str:
        (self.folder / "dcgm.yaml").write_text(yaml.safe_dump({"groups": [recording_rules.dcgm_group(labels, key)]}))
        return "dcgm.yaml"

    def records(
        self,
        series: list[tuple[dict[str, str], str | float]],
        expected: dict[str, list[Sample]],
        labels: tuple[str, ...] = SERVER,
        key: tuple[str, ...] = BY_POD,
        at: str = "5m",
    ) -> None:
        """These queries have exactly these samples after some minutes of these series."""
        queries = [
            {
                "expr": query,
                "eval_time": at,
                "exp_samples": [{"labels": _selector(names), "value": value} for names, value in samples],
            }
            for query, samples in expected.items()
        ]
        inputs = [
            {"series": _selector(names), "values": values if isinstance(values, str) else f"{values}x20"}
            for names, values in series
        ]
        test = {"interval": "30s", "input_series": inputs, "promql_expr_test": queries}
        content = {"rule_files": [self.rules(labels, key)], "evaluation_interval": "30s", "tests": [test]}
        (self.folder / "test.yaml").write_text(yaml.safe_dump(content))
        done = self.run("test", "rules", "test.yaml")
        assert done.returncode == 0, done.stdout + done.stderr


def _selector(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in labels.items() if name != "__name__")
    return f"{labels['__name__']}{{{pairs}}}"


def field(name: str, **labels: str) -> dict[str, str]:
    return {"__name__": f"DCGM_FI_{name}", **GPU, **labels}


def recorded(fields: dict[str, Any], server: dict[str, str] = OURS) -> dict[str, list[Sample]]:
    """Return the recorded series of each metric; no other series of that name may exist."""
    expected: dict[str, list[Sample]] = {}
    for _, samples in fields.values():
        for metric, own, value in samples:
            name = METRIC + metric
            expected.setdefault(name, []).append(({"__name__": name, **server, **own}, value))
    return expected


def power(**labels: str) -> list[Sample]:
    return [({"__name__": "diag_gpu_power_watts", "gpu": "0", "uuid": "GPU-a", **labels}, 300)]


NOTHING: dict[str, list[Sample]] = {'{__name__=~"diag_.+"}': []}


@pytest.fixture(params=PLACES)
def promtool(request: pytest.FixtureRequest, tmp_path: Path) -> Promtool:
    cache = os.environ.get("DIAG_CACHE", str(Path.home() / ".cache" / "diag"))
    path = None if request.param == "PATH" else os.environ.get(request.param, f"{cache}/prometheus3")
    found = shutil.which("promtool", path=path)
    if found is None:
        pytest.skip(f"no promtool at {request.param}: .ci/components installs it")
    return Promtool(found, tmp_path)


@pytest.mark.parametrize("labels", [SERVER, ("cluster", "pod"), ("namespace", "pod"), ("job", "instance")], ids=str)
@pytest.mark.parametrize("key", [BY_POD, ("Hostname",), ("cluster", "namespace", "pod")], ids=str)
def test_prometheus_accepts_the_rules(promtool: Promtool, labels: tuple[str, ...], key: tuple[str, ...]) -> None:
    done = promtool.run("check", "rules", "--lint=all", "--lint-fatal", promtool.rules(labels, key))
    assert done.returncode == 0, done.stdout + done.stderr
    found = 1 + len(recording_rules.dcgm_rules()) + ("pod" in key)  # the servers, then the metrics
    assert f"{found} rules found" in done.stdout


def test_each_field_is_recorded_in_our_unit(promtool: Promtool) -> None:
    series = [(field(name, **ASIDE), value) for name, (value, _) in EXPECTED.items()]
    promtool.records([(ONE, 3), *series], recorded(EXPECTED))


def test_each_field_is_recorded_under_its_later_name(promtool: Promtool) -> None:
    series = [(field(name, **ASIDE), value) for name, (value, _) in RENAMED.items()]
    promtool.records([(ONE, 3), *series], recorded(RENAMED))


def test_every_rule_is_expected_above() -> None:
    given = {(METRIC + metric, *own.items()) for _, samples in EXPECTED.values() for metric, own, _ in samples}
    rules = {
        (record.metric, *record.labels.items())
        for record in (*recording_rules.dcgm_rules(), recording_rules.declared().serving)
    }
    assert rules == given | {("diag_gpu_xid_errors_total",)}


def test_metrics_have_the_labels_of_our_page() -> None:
    """`max by` keeps the server's, gpu and uuid; the rule gives the others, or keeps them as well."""
    for record in (*recording_rules.dcgm_rules(), recording_rules.declared().serving):
        assert families()[record.metric].labels == ("gpu", "uuid", *record.labels, *record.kept), record.metric


def test_total_is_summed_if_dcgm_lacks_it(promtool: Promtool) -> None:
    parts = {"DEV_FB_USED": 70000, "DEV_FB_FREE": 10900, "DEV_FB_RESERVED": 659}
    series = [(field(name, **MINE), value) for name, value in parts.items()]
    total = {"__name__": "diag_gpu_memory_total_bytes", **OURS}
    promtool.records([(ONE, 3), *series], {"diag_gpu_memory_total_bytes": [(total, 81559 * 2**20)]})
    promtool.records([(ONE, 3), *series[:2]], {"diag_gpu_memory_total_bytes": []})


def test_the_margin_is_what_is_left_to_the_slowdown_temperature(promtool: Promtool) -> None:
    series = [(field("DEV_SLOWDOWN_TEMP", **MINE), 87), (field("DEV_GPU_TEMP", **MINE), 61)]
    margin = {"__name__": "diag_gpu_temperature_margin_celsius", **OURS}
    promtool.records([(ONE, 3), *series], {"diag_gpu_temperature_margin_celsius": [(margin, 26)]})


def test_software_throttling_has_a_counter_of_its_own_where_the_driver_has(promtool: Promtool) -> None:
    series = [
        (field("DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS", **MINE), 2e9),
        (field("DEV_THERMAL_VIOLATION", **MINE), 9e9),
    ]
    name = "diag_gpu_throttle_seconds_total"
    promtool.records([(ONE, 3), *series], {name: [({"__name__": name, **OURS, "reason": "sw_thermal"}, 2)]})


def test_two_pods_on_one_node_have_their_own_gpus(promtool: Promtool) -> None:
    second = {"gpu": "1", "UUID": "GPU-b", "namespace": "llm", "pod": "vllm-1"}
    series = [
        (field("DEV_POWER_USAGE", **MINE), 300),
        (field("DEV_POWER_USAGE", **second), 500),
        (field("DEV_POWER_USAGE", gpu="2", UUID="GPU-c"), 70),  # nobody's
        (field("DEV_POWER_USAGE", gpu="3", UUID="GPU-d", namespace="llm", pod="training"), 700),
    ]
    other = {"__name__": "diag_gpu_power_watts", "instance": "10.0.0.2:8000", "gpu": "1", "uuid": "GPU-b"}
    expected = {"diag_gpu_power_watts": [*power(instance="10.0.0.1:8000"), (other, 500)]}
    promtool.records([(ONE, 3), (TWO, 0), *series], expected)


def test_the_engines_of_one_server_are_one_server(promtool: Promtool) -> None:
    engines = [({**ONE, "engine": engine}, 3) for engine in ("0", "1")]
    expected = {"diag_gpu_power_watts": power(instance="10.0.0.1:8000")}
    promtool.records([*engines, (field("DEV_POWER_USAGE", **MINE), 300)], expected)


def test_two_servers_in_one_pod_stay_unknown(promtool: Promtool) -> None:
    neighbour = {**ONE, "instance": "10.0.0.1:8001"}
    promtool.records([(ONE, 3), (neighbour, 3), (field("DEV_GPU_TEMP", **MINE), 61)], NOTHING)


def test_a_server_that_does_not_answer_has_no_gpus(promtool: Promtool) -> None:
    promtool.records([(ONE, "3 3 3 stale"), (field("DEV_GPU_TEMP", **MINE), 61)], NOTHING)


def test_gpus_of_a_host_with_one_server_belong_to_it(promtool: Promtool) -> None:
    here = {**ONE, "Hostname": "node-1"}
    elsewhere = {**TWO, "Hostname": "node-2"}
    series = [(field("DEV_POWER_USAGE"), 300), (field("DEV_GPU_TEMP"), 61)]
    expected = {"diag_gpu_power_watts": power(instance="10.0.0.1:8000"), "diag_gpu_serving": []}
    promtool.records([(here, 3), (elsewhere, 3), *series], expected, key=("Hostname",))


def test_a_host_of_two_servers_stays_unknown(promtool: Promtool) -> None:
    both = [({**server, "Hostname": "node-1"}, 3) for server in (ONE, TWO)]
    promtool.records([*both, (field("DEV_POWER_USAGE"), 300)], NOTHING, key=("Hostname",))


def test_gpu_without_a_join_label_has_no_server(promtool: Promtool) -> None:
    """Neither a server nor a GPU outside Kubernetes has a pod: that is nothing that they share."""
    outside = {"__name__": VLLM["__name__"], "instance": "10.0.0.1:8000"}
    promtool.records([(outside, 3), (field("DEV_POWER_USAGE"), 300)], NOTHING)


@pytest.mark.parametrize("part", [{"GPU_I_ID": "3", "GPU_I_PROFILE": "1g.10gb"}, {"vgpu": "0"}], ids=str)
def test_mig_slice_is_not_the_whole_gpu(promtool: Promtool, part: dict[str, str]) -> None:
    promtool.records([(ONE, 3), (field("DEV_POWER_USAGE", **MINE, **part), 300)], NOTHING)


def test_other_labels_may_identify_a_server(promtool: Promtool) -> None:
    server = {**ONE, "cluster": "west"}
    expected = {"diag_gpu_power_watts": power(cluster="west", pod="vllm-0")}
    series = [(server, 3), (field("DEV_POWER_USAGE", **ASIDE), 300)]
    promtool.records(series, expected, labels=("cluster", "pod"))  # the pod is in the key as well
    promtool.records(series, {"diag_gpu_power_watts": power(pod="vllm-0")}, labels=("pod",))
    beside = [({**server, "Hostname": "node-1"}, 3), (field("DEV_POWER_USAGE", **ASIDE), 300)]
    promtool.records(beside, expected, labels=("cluster", "pod"), key=("Hostname",))


def test_the_first_xid_increases_the_counter(promtool: Promtool) -> None:
    """dcgm-exporter shows it from 1 on; what comes back after a scrape that failed is not new."""
    xid = {"__name__": "DCGM_EXP_XID_ERRORS_TOTAL", **GPU, **MINE, "xid": "79"}
    name = "diag_gpu_xid_errors_total"
    growth = {f"increase({name}[4m]) > bool 0": [({**OURS, "xid": "79"}, 1)]}
    whole = {name: [({"__name__": name, **OURS, "xid": "79"}, 1)]}
    promtool.records([(ONE, 3), (xid, "_x3 1x20")], {name: whole[name], **_unnamed(growth)})
    calm = {f"increase({name}[4m]) > bool 0": [({**OURS, "xid": "79"}, 0)]}
    promtool.records([(ONE, 3), (xid, "1x9 stale _x3 1x20")], {name: whole[name], **_unnamed(calm)}, at="9m30s")


def test_xid_of_a_pod_is_not_attributed_to_the_next_pod(promtool: Promtool) -> None:
    xid = {"__name__": "DCGM_EXP_XID_ERRORS_TOTAL", **GPU, "xid": "79"}
    before = ({**xid, "namespace": "llm", "pod": "training"}, "1x9 stale")
    after = ({**xid, **MINE}, "_x9 1x20")
    growth = _unnamed({"increase(diag_gpu_xid_errors_total[3m]) > bool 0": [({**OURS, "xid": "79"}, 0)]})
    promtool.records([(ONE, 3), before, after], growth, at="8m")


def _unnamed(expected: dict[str, list[Sample]]) -> dict[str, list[Sample]]:
    return {
        query: [({"__name__": "", **labels}, value) for labels, value in found] for query, found in expected.items()
    }


def test_each_field_is_a_default_or_is_switched_on() -> None:
    """Each rule needs at least one such field; an alias and a stand-in need no line."""
    lines = [line.split(",") for line in recording_rules.declared().csv.splitlines()]
    assert all(len(line) == 3 and line[1].strip() in ("gauge", "counter") for line in lines), (
        "a CSV line has three fields"
    )
    switched_on = {name for name, *_ in lines}
    assert not switched_on & SCRAPED
    named = [set(re.findall(r"DCGM_[A-Z0-9_]+", record.promql)) for record in recording_rules.dcgm_rules()]
    assert not [names for names in named if not names & (switched_on | SCRAPED)]
    assert switched_on <= set().union(*named), "a line that no rule needs"
    assert recording_rules.declared().csv in recording_rules.declared().dcgm_header


@pytest.mark.fast
def test_every_gpu_metric_is_recorded_or_listed_as_left_out() -> None:
    metrics = {name for name in families() if name.startswith(METRIC)}
    rules = {record.metric for record in (*recording_rules.dcgm_rules(), recording_rules.declared().serving)}
    left_out = set(re.findall(r"diag_gpu_\w+", recording_rules.declared().dcgm_header))
    assert metrics - rules == left_out, "a GPU metric has a rule, or dcgm_header names it"
