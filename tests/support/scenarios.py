"""Recordings of exporter pages: real pages of vLLM, with scripted GPUs, log and processes of its host beside them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from support import rewriting
from support.paths import MODELS

from diag.commands import doctor
from diag.commands.observe import ObserveOptions
from diag.core.metric_families import Sample, families
from diag.diagnosis.report import Finding, Report
from diag.exposition import render
from diag.vllm import work
from diag.vllm.running_config import RunningConfig, ServerFacts

Beside = Callable[[float], Iterable[Sample]]
"""What stands beside vLLM so many seconds after the first scrape."""
SECONDS = 60
PHASES = (
    "process_start",
    "load_weights",
    "compile",
    "profile_memory",
    "allocate_kv_cache",
    "cuda_graph_capture",
    "warm_up",
    "ready",
)
GIB = 2.0**30


def judge(folder: Path, vllm: str, *beside: Beside) -> Report:
    """Judge a recording's pages with these parts beside them; "" for a vLLM that never answered."""
    scrapes = list(rewriting.scrapes(vllm)) if vllm else [(1_700_000_000.0 + t, "h:1", "") for t in range(SECONDS)]
    start = scrapes[0][0]
    pages = ((t, host, page + text(t - start, page, beside)) for t, host, page in scrapes)
    return doctor.run(ObserveOptions([str(rewriting.write(folder / "recording", pages))]))


def everything(folder: Path) -> Path:
    """A recording of a busy server with all that can stand beside it."""
    beside = (gpu(0), gpu(1), workers(1.0, 0.9), config(tensor_parallel_size=2, gpu_memory_utilization=0.9))
    beside += (model("mixtral-8x7b", "--tensor-parallel-size 2"),)
    scrapes = list(rewriting.scrapes("kv_cascade"))
    start = scrapes[0][0]
    beside += (network, health_check)
    spent = dict.fromkeys(PHASES[:-1], 10.0)
    told = (log("ready", spent, 600, start, cuda_out_of_memory=500, engine_start_failed=900), *map(_numbers, NUMBERS))
    pages = ((t, host, page + text(t - start, page, (*beside, *told))) for t, host, page in scrapes)
    return rewriting.write(folder / "everything", pages)


def health_check(_: float) -> Iterable[Sample]:
    """The answer of /health, which is asked beside each page."""
    yield "diag_vllm_health_status", (), 200.0


def network(t: float) -> Iterable[Sample]:
    """A first node of two, an InfiniBand port that counts errors, and a rank that NCCL misses."""
    yield "diag_vllm_node_info", ("10.0.0.1:29501", "0", "node-a"), 1
    yield "diag_infiniband_port_active", ("mlx5_0/1", "node-a"), float(t < 20)
    yield "diag_infiniband_errors_total", ("mlx5_0/1", "node-a", "link_downed"), float(t >= 20)
    yield "diag_nccl_processes", ("behind",), float(t >= 20)
    yield "diag_nccl_dump_timestamp_seconds", (), 0.0
    if t >= 20:
        labels = ("cf264af53edbe986", "1", "10.0.0.2", "behind", "AllReduce", "7")
        yield "diag_nccl_missing_rank_operations", labels, 1.0


NUMBERS = {
    "cuda_out_of_memory": ("wanted_gibibytes", "free_gibibytes", "total_gibibytes"),
    "free_memory_below_requested": ("free_gibibytes", "total_gibibytes"),
    "max_model_len_exceeds_kv_cache": ("max_model_len", "needed_gibibytes", "available_gibibytes"),
}


def _numbers(event: str) -> Beside:
    return said(event, **{field: 8.0 + at for at, field in enumerate(NUMBERS[event])})


def text(t: float, page: str, beside: Iterable[Beside]) -> str:
    """Return the samples that the exporter adds to a page."""
    own: list[Sample] = [("diag_vllm_up", (), float(bool(page))), ("diag_scrape_success", ("process",), 1.0)]
    return render([*own, *(sample for each in beside for sample in each(t))]).decode()


def present(report: Report) -> set[str]:
    """The incidents that hold, without the infos."""
    return {each.diagnosis.incident.id for each in report.present if each.diagnosis.severity != "info"}


def found(report: Report, incident: str) -> Finding:
    """The finding of a present incident."""
    return next(each for each in report.present if each.diagnosis.incident.id == incident)


def fixes(report: Report, incident: str) -> dict[str, object]:
    """Return the proposals by the name of the changed setting."""
    return {each.name: each.after for each in found(report, incident).proposals if each.name}


def gpu(index: int = 0, **changes: object) -> Beside:
    """A GPU that serves, busy and well; `changes` are values, or functions of time, by family without "diag_gpu_".

    A key may end in ":" and the values of the labels after gpu and uuid: "clock_hertz:sm".
    """
    well: dict[str, object] = {
        "up": 1,
        "serving": 1,
        "utilization_ratio": 0.95,
        "power_watts": 400,
        "power_limit_watts": 700,
        "power_limit_min_watts": 200,
        "clock_hertz:sm": 1980e6,
        "clock_max_hertz:sm": 1980e6,
        "temperature_celsius:gpu": 60,
        "temperature_margin_celsius": 27,
        "memory_total_bytes": 80 * GIB,
        "memory_free_bytes": 4 * GIB,
        "throttle_seconds_total:sw_thermal": 0,
        "throttle_seconds_total:hw_thermal": 0,
        "throttle_seconds_total:hw_power_brake": 0,
        "throttle_seconds_total:sw_power_cap": lambda t: t,  # normal on a busy card
        "ecc_errors_total:uncorrected": 0,
        "remap_failure": 0,
        "nvlink_active_links": 0,
        "pcie_link_generation:current": 4,
        "pcie_link_generation:max": 4,
        "pcie_link_width:current": 16,
        "pcie_link_width:max": 16,
        "pcie_bytes_total:rx": lambda t: 1e9 * t,
        "xid_errors_total:79": 0,
        "xid_errors_total:31": 0,
        f"process_memory_bytes:{100 + index},worker,{index}": 70 * GIB,
        f"process_utilization_ratio:{100 + index},worker,{index}": 0.9,
    }
    told = {name.replace("__", ":"): value for name, value in changes.items()}
    values = {**well, **told}

    def beside(t: float) -> Iterable[Sample]:
        yield from work.gpu_samples("NVIDIA H100 80GB HBM3", (str(index), f"GPU-{index}"))
        for key, value in values.items():
            number = value(t) if callable(value) else value
            if number is not None:
                yield _sample(index, key, float(number))

    return beside


def _sample(index: int, key: str, value: float) -> Sample:
    name, _, rest = key.partition(":")
    labels = (str(index), f"GPU-{index}", *(rest.split(",") if rest else ()))
    assert len(labels) == len(families()[f"diag_gpu_{name}"].labels), key
    return f"diag_gpu_{name}", labels, value


def workers(*cores: float, stopped: Iterable[int] = ()) -> Beside:
    """An API server, an engine, and a worker for each of these numbers of cores that it uses."""

    def beside(t: float) -> Iterable[Sample]:
        processes = [("90", "api_server", "0", 0.1), ("91", "engine", "0", 0.2)]
        processes += [(str(100 + rank), "worker", str(rank), each) for rank, each in enumerate(cores)]
        for pid, role, rank, each in processes:
            yield "diag_vllm_process_cpu_seconds_total", (pid, role, rank), 30 + each * t
            yield "diag_vllm_process_stopped", (pid, role, rank), float(role == "worker" and int(rank) in stopped)
        for role, number in Counter(role for _, role, _, _ in processes).items():
            yield "diag_vllm_processes", (role,), float(number)

    return beside


Course = Callable[[float], float]
"""A number over time, in seconds after the first scrape."""


def memory(
    share: Course,
    limit: float = 64 * GIB,
    engine: Course = lambda _: 8 * GIB,
    kills: Course = lambda _: 0,
    hits: Course = lambda _: 0,
) -> Beside:
    """Host memory: the share in use of its limit, the resident bytes of the engine, kills, allocations at the limit."""

    def beside(t: float) -> Iterable[Sample]:
        yield "diag_host_memory_limit_bytes", (), limit
        yield "diag_host_memory_used_bytes", (), share(t) * limit
        yield "diag_host_memory_events_total", ("max",), hits(t)
        yield "diag_host_memory_events_total", ("oom_kill",), kills(t)
        yield "diag_vllm_process_resident_memory_bytes", ("90", "api_server", "0"), 2 * GIB
        yield "diag_vllm_process_resident_memory_bytes", ("91", "engine", "0"), engine(t)

    return beside


def cpu(waited: float | None = None, pressure: float = 0.0, throttled: float = 0.0) -> Beside:
    """CPU time: the share for which the engine waits for some (None: not said), PSI, throttled seconds a second."""

    def beside(t: float) -> Iterable[Sample]:
        yield "diag_host_pressure_ratio", ("cpu",), pressure
        yield "diag_host_cpu_throttled_seconds_total", (), throttled * t
        if waited is not None:
            yield "diag_vllm_process_cpu_wait_seconds_total", ("90", "api_server", "0"), 0.1 * waited * t
            yield "diag_vllm_process_cpu_wait_seconds_total", ("91", "engine", "0"), waited * t

    return beside


def config(**flags: float) -> Beside:
    """Return the running configuration of vLLM."""
    return lambda _: [("diag_vllm_config", (flag,), value) for flag, value in flags.items()]


def model(name: str, flags: str = "") -> Beside:
    """The work of a model of tests/data/models, as an exporter publishes it."""
    facts = ServerFacts(version="0.32.0", launch=f"vllm serve {MODELS / name} {flags}")
    samples = work.server_samples(RunningConfig(incomplete=""), facts)
    assert samples
    return lambda _: samples


def log(
    phase: str, spent: Mapping[str, float], silent: float = 0.0, start: float = 1_700_000_000.0, **ago: float
) -> Beside:
    """A start in that phase, with seconds by phase, the last sign of progress so long before the first scrape.

    `ago`: events, by how many seconds before the first scrape they came.
    """
    events = ("cuda_out_of_memory", "max_model_len_exceeds_kv_cache", "free_memory_below_requested")
    ends = (
        "engine_start_failed",
        "engine_dead",
        "worker_died",
        "shut_down",
        "cuda_error",
        "nccl_timeout",
        "all_to_all_timeout",
    )
    told = ("kv_scales_missing", "float16_cast")
    others = ("no_kv_cache_memory", "shm_broadcast_wait", "compiled_while_serving")
    every = dict.fromkeys((*events, *ends, *told, *others, *ago))

    def beside(t: float) -> Iterable[Sample]:
        for each in PHASES:
            yield "diag_vllm_startup_phase", (each,), float(each == phase)
        for each, seconds in spent.items():
            yield "diag_vllm_startup_phase_seconds", (each,), seconds + (t if each == phase else 0)
        yield "diag_vllm_startup_last_progress_timestamp_seconds", (), start - silent
        yield "diag_vllm_log_last_line_timestamp_seconds", (), start - silent
        for each in every:
            yield "diag_vllm_log_event_last_timestamp_seconds", (each,), start - ago[each] if each in ago else 0.0
            yield "diag_vllm_log_events_total", (each,), float(each in ago)

    return beside


def reading(rate: float) -> Beside:
    """A worker that reads the weights at that rate in bytes per second, a quarter of which are loaded."""

    def beside(t: float) -> Iterable[Sample]:
        yield "diag_vllm_process_read_bytes_total", ("100", "worker", "0"), rate * t
        yield "diag_vllm_startup_progress_ratio", (), 0.25

    return beside


def started(at: float) -> Beside:
    """A server process that was started at that time."""
    return lambda _: [("diag_vllm_process_start_time_seconds", (), at)]


def crashed(times: int) -> Beside:
    """So many crashes in a row in the log."""
    return lambda _: [("diag_vllm_log_consecutive_crashes", (), times)]


def logged(event: str, rate: float) -> Beside:
    """So many lines a second that show an event."""
    return lambda t: [("diag_vllm_log_events_total", (event,), float(int(rate * t)))]


def said(event: str, **numbers: float) -> Beside:
    """The numbers in the last line of that kind."""
    return lambda _: [("diag_vllm_log_value", (event, field), value) for field, value in numbers.items()]


def eplb(mean: float, busiest: float, version: str = "0.32.0", lines: float = 1.0) -> Beside:
    """The lines of EPLB that an exporter has read: the tokens of the mean and the busiest rank, lines a second."""

    def beside(t: float) -> Iterable[Sample]:
        count = float(int(lines * t))
        yield "diag_vllm_info", (version, "m", "cuda"), 1.0
        yield "diag_vllm_log_events_total", ("eplb_balance",), count
        yield "diag_vllm_log_value_total", ("eplb_balance", "avg_tokens"), mean * count
        yield "diag_vllm_log_value_total", ("eplb_balance", "max_tokens"), busiest * count

    return beside
