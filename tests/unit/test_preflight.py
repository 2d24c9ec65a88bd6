"""`diag preflight`: each check finds what it is for and passes what is well; the answer, its print, and diag.toml."""

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support import bad_servers, models, scripted_nvml
from support.paths import MODELS, ROOT
from support.schemas import validator
from support.scripted_nvml import GIB, H100, T4

from diag.commands import preflight as work
from diag.commands.explain import run as explain
from diag.commands.options import PreflightOptions
from diag.core.contract import Contract, Intentions
from diag.core.errors import BadContract, BadUsage
from diag.core.files import read_yaml
from diag.knowledge.catalog import load
from diag.preflight import machine
from diag.preflight.check import NotChecked, PreflightFacts, State
from diag.preflight.checks import CHECKS, Preflight, preflight
from diag.preflight.machine import Machine, Wheel
from diag.preflight.telemetry import pager_route
from diag.report import preflight as text
from diag.sources import kept_ramp
from diag.vllm.command.parse import parse

ROUTES: dict[str, list[State]] = {
    "critical|warning": ["pass"],
    "(?i)crit.*": ["pass"],
    "[a-z]+(-x)?": ["pass"],
    "warning": ["fail"],
    "((((.*)*)*)*)*x": [],
    ".*" * 40 + "x": [],
}
"""Patterns of a route, and what is said of it; nothing of one that Python matches in exponential time."""
LAUNCH = f"vllm serve {MODELS}/llama-3-8b --max-model-len 8192 --load-format dummy"
IDLE = H100 | {"utilization": 0, "used": 2 * GIB, "free": 77 * GIB}
NO_LIMIT = {"open_files": "this host has another limit"}
Show = Callable[..., None]


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Show]:
    place = scripted_nvml.loaded(tmp_path, monkeypatch)
    yield lambda *shown, **driver: scripted_nvml.write(place, shown, **driver)


def found(target: str = LAUNCH, contract: Path | None = None, **options: object) -> Preflight:
    return work.run(PreflightOptions(target, vllm_version="0.32.0", **options), contract)  # type: ignore[arg-type]


def states(of: Preflight, id: str) -> set[State]:
    return {result.state for result in of.results if result.id == id}


def facts(**changes: object) -> PreflightFacts:
    """Facts of a launch of which only this is known."""
    given = {"command": parse(LAUNCH), "elsewhere": "of the test", "no_gpus": "of the test", **changes}
    return PreflightFacts(Contract(), load(None), "0.32.0", **given)  # type: ignore[arg-type]


# -- GPUs --------------------------------------------------------------------------------------------------------------

AILING: dict[str, tuple[str, State, dict[str, object]]] = {
    "half of the lanes": ("pcie_width", "warn", {"width": 8}),
    "a lower power limit": ("power_limit", "warn", {"limit": 350_000}),
    "warm while idle": ("idle_temperature", "warn", {"margin": 11, "temperature": 76}),
    "an uncorrected error": ("memory_errors", "warn", {"uncorrected": 3}),
    "a row that waits": ("memory_errors", "warn", {"remapped": "0 1 1 0"}),
    "a row that cannot be replaced": ("memory_errors", "fail", {"remapped": "0 1 0 1"}),
    "too old": ("compute_capability", "fail", {"capability": "6 1"}),
    "another process": ("other_processes", "warn", {"processes": {os.getpid(): 3 * GIB}}),
    "no persistence": ("persistence_mode", "warn", {"also": {"nvmlDeviceGetPersistenceMode": "0"}}),
}


@pytest.mark.parametrize("name", AILING)
def test_an_ailing_gpu_is_found_and_a_sound_one_passes(name: str, gpus: Show) -> None:
    id, state, ailment = AILING[name]
    # an nvidia-ml-py without nvmlDeviceGetMarginTemperature reads the slowdown temperature instead
    sound = IDLE | {"slowdown": 87, "also": {"nvmlDeviceGetPersistenceMode": "1"}}
    gpus(sound)
    assert states(found(), id) == {"pass"}
    gpus(sound | ailment)
    assert states(found(), id) == {state}


def test_a_busy_gpu_is_no_warm_one(gpus: Show) -> None:
    gpus(H100 | {"margin": 5})
    assert states(found(), "idle_temperature") == {"not checked"}


def test_another_tenant_of_the_gpu_is_a_no_go(gpus: Show) -> None:
    gpus(IDLE | {"used": 50 * GIB, "free": 29 * GIB})
    assert found().results[0].id == "gpu_is_shared"
    assert found().answer == "no go"


def test_a_t4_takes_float16_and_no_bfloat16(gpus: Show) -> None:
    gpus(T4 | {"utilization": 0})
    assert states(found(), "compute_capability") == {"pass"}
    assert states(found(f"{LAUNCH} --dtype bfloat16"), "compute_capability") == {"fail"}


def test_compilers_are_counted_where_the_gpu_needs_them(gpus: Show) -> None:
    gpus(IDLE)
    assert states(found(f"MAX_JOBS=9000 {LAUNCH}"), "compiler_jobs") == set()
    gpus(IDLE | {"capability": "12 0"})
    assert states(found(f"MAX_JOBS=9000 {LAUNCH}"), "compiler_jobs") == {"warn"}
    assert states(found(f"MAX_JOBS=1 {LAUNCH}"), "compiler_jobs") == {"pass"}


def python_with(folder: Path, torch: str, cuda: str) -> str:
    """The path of a Python with this PyTorch and vLLM 0.32.0; nothing is run, so that it needs no program."""
    packages = folder / "lib" / "python3.12" / "site-packages"
    (packages / "vllm-0.32.0.dist-info").mkdir(parents=True)
    (packages / "torch").mkdir()
    (packages / "torch" / "version.py").write_text(f"__version__ = '{torch}'\ncuda: Optional[str] = '{cuda}'\n")
    return str(folder / "bin" / "python")


@pytest.mark.parametrize(("driver", "cuda", "state"), [("570.86", "13.0", "fail"), ("580.95", "13.0", "pass")])
def test_the_driver_has_to_run_the_wheels_toolkit(
    driver: str, cuda: str, state: State, gpus: Show, tmp_path: Path
) -> None:
    gpus(IDLE, nvmlSystemGetDriverVersion=driver)
    python = python_with(tmp_path / "site", "2.13.0", cuda)
    assert machine.wheel(python) == Wheel("0.32.0", "2.13.0", cuda)
    assert states(found(vllm_python=python), "driver_for_toolkit") == {state}


# -- host and network --------------------------------------------------------------------------------------------------


def test_a_taken_port_is_a_no_go() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = found(f"{LAUNCH} --host 127.0.0.1 --port {port}")
    assert (result.results[0].id, result.answer) == ("port_free", "no go")
    assert states(found(f"{LAUNCH} --host 127.0.0.1 --port {port}"), "port_free") == {"pass"}


def test_a_folder_that_is_not_there_and_a_shard_that_is_missing_are_a_no_go(tmp_path: Path) -> None:
    assert states(found("vllm serve /no/such/model"), "weight_files") == {"fail"}
    models.changed(tmp_path)
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"weight_map": dict(zip("ab", shards, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    models.tensors(tmp_path / shards[0], a=("BF16", 64))
    assert states(found(f"vllm serve {tmp_path}"), "weight_files") == {"fail"}
    models.tensors(tmp_path / shards[1], b=("BF16", 64))
    assert states(found(f"vllm serve {tmp_path}"), "weight_files") == {"pass"}


def test_offloaded_memory_has_to_be_there() -> None:
    many = f"{LAUNCH} --cpu-offload-gb 100000"
    assert states(found(many), "host_memory") == {"fail"}


def test_more_cores_than_processes() -> None:
    ranks = f"{LAUNCH} --data-parallel-size 256"
    assert states(found(ranks), "cpu_cores") == {"warn"}


def test_a_launch_for_a_container_is_not_judged_by_this_host() -> None:
    result = found(f"docker run --gpus all vllm/vllm-openai:v0.32.0 --model {MODELS}/llama-3-8b")
    assert states(result, "port_free") == states(result, "shared_memory") == {"not checked"}
    assert all(each.state == "not checked" for each in result.results if each.group == "host")


def node(folder: Path, **files: str) -> Machine:
    """A host whose folders of the kernel have these files; a double underscore is a slash."""
    for name, content in files.items():
        place = folder / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    return Machine(sys=folder)


NODES = f"{LAUNCH} --nnodes 2 --tensor-parallel-size 2"
NET = {"class__net__eth0__operstate": "up", "class__net__lo__operstate": "unknown"}


@pytest.mark.parametrize(
    ("variable", "state"),
    [
        ("", "pass"),
        ("NCCL_SOCKET_IFNAME=eth0", "pass"),
        ("NCCL_SOCKET_IFNAME=eth", "pass"),
        ("NCCL_SOCKET_IFNAME=^lo,docker", "pass"),
        ("NCCL_SOCKET_IFNAME==eth", "fail"),
        ("NCCL_SOCKET_IFNAME=ib0", "fail"),
        ("GLOO_SOCKET_IFNAME=lo", "fail"),
        ("GLOO_SOCKET_IFNAME=eth", "fail"),
        ("NCCL_SOCKET_IFNAME='$INTERFACE'", "pass"),
    ],
)
def test_the_interfaces_of_several_nodes(variable: str, state: State, tmp_path: Path) -> None:
    known = facts(command=parse(f"{variable} {NODES}"), machine=node(tmp_path, **NET))
    assert states(preflight(known, "m"), "socket_interfaces") == {state}


def test_infiniband_ports_of_several_nodes(tmp_path: Path) -> None:
    port = "class__infiniband__mlx5_0__ports__1__"
    up = {f"{port}state": "4: ACTIVE", f"{port}rate": "400 Gb/sec (4X NDR)"}
    known = facts(command=parse(NODES), machine=node(tmp_path, **NET, **up))
    assert states(preflight(known, "m"), "infiniband_ports") == {"pass"}
    node(tmp_path, **{f"{port}counters__link_downed": "7"})
    assert states(preflight(known, "m"), "infiniband_ports") == {"warn"}
    node(tmp_path, **{f"{port}state": "1: DOWN"})
    assert states(preflight(known, "m"), "infiniband_ports") == {"fail", "warn"}


def test_bridges_that_redirect_peer_to_peer_traffic(tmp_path: Path) -> None:
    bridge = tmp_path / "bus/pci/devices/0000:00:01.0"
    bridge.mkdir(parents=True)
    (bridge / "class").write_text("0x060400\n")
    space = bytearray(4096)
    space[0x100:0x104] = (0x0D | 1 << 16).to_bytes(4, "little")
    (bridge / "config").write_bytes(space)
    assert Machine(sys=tmp_path).redirecting_bridges() == ()
    space[0x106] = 0x0C
    (bridge / "config").write_bytes(space)
    assert Machine(sys=tmp_path).redirecting_bridges() == ("0000:00:01.0",)
    (bridge / "config").write_bytes(space[:64])  # what a user other than root sees
    assert Machine(sys=tmp_path).redirecting_bridges() is None


def test_addresses_that_an_iommu_translates(tmp_path: Path) -> None:
    group = "bus__pci__devices__0000:01:00.0__iommu_group__type"
    assert node(tmp_path, **{group: "DMA-FQ"}).is_translated("00000000:01:00.0")
    assert not node(tmp_path, **{group: "identity"}).is_translated("00000000:01:00.0")


# -- telemetry ---------------------------------------------------------------------------------------------------------

BAD = [bad_servers.hang, bad_servers.drip, bad_servers.flood, bad_servers.babble, bad_servers.slam]


@pytest.mark.slow
@pytest.mark.parametrize("talk", BAD)
def test_a_bad_prometheus_or_alertmanager_is_a_reason_and_no_end(talk: Callable[..., None]) -> None:
    with bad_servers.talking(talk) as bad:
        for result in (found(prometheus=bad.url), found(alertmanager=bad.url)):
            assert {each.state for each in result.results if each.group == "telemetry"} == {"not checked"}


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b'{"data": {}}', b'{"data": {"groups": 3}, "config": 1}', b'{"error": "no"}']
)
def test_an_answer_of_another_shape_is_a_reason(body: bytes) -> None:
    with bad_servers.serving(lambda _: bad_servers.Reply(body)) as other:
        for result in (found(prometheus=other.url), found(alertmanager=other.url)):
            assert {each.state for each in result.results if each.group == "telemetry"} == {"not checked"}


# -- capacity ----------------------------------------------------------------------------------------------------------


def ramp_file(folder: Path, **changes: object) -> Path:
    """A kept ramp: ITL 40 ms at 32 requests at a time, 3 s at 64, and a ceiling of 32."""
    steps = [
        {"concurrency": load, "in_flight": load, "itl": {"p99": itl}, "counts": True, "within_slo": itl < 1}
        for load, itl in ((32, 0.04), (64, 3.0))
    ]
    document = {"schema": "diag.ramp/1", "model": f"{MODELS}/llama-3-8b", "vllm": "0.32.0", "launch": LAUNCH}
    document |= {"gpus": [H100["name"]], "measured_at": "2026-11-25T10:00:00+00:00"}
    file = folder / "ramp.json"
    file.write_text(json.dumps(document | {"ceiling": steps[0], "steps": steps} | changes))
    return file


def of_capacity(folder: Path, load: float, **changes: object) -> dict[str, State]:
    ramp = kept_ramp.read(ramp_file(folder, **changes))
    known = replace(facts(ramp=ramp), contract=Contract(preflight=Intentions(concurrency=load)))
    return {each.id: each.state for each in preflight(known, "m").results if each.group == "capacity"}


def test_a_load_below_the_ceiling_of_a_ramp_of_this_launch(tmp_path: Path) -> None:
    assert set(of_capacity(tmp_path, 30, measured_at=None).values()) == {"pass"}


def test_a_load_above_the_ceiling_needs_replicas(tmp_path: Path) -> None:
    assert of_capacity(tmp_path, 64) | {"ramp_result": "pass"} == {
        "ramp_result": "pass",
        "concurrency": "fail",
        "inter_token_latency": "fail",
    }


@pytest.mark.parametrize(
    "changes",
    [{"model": "other"}, {"vllm": "0.31.0"}, {"launch": f"{LAUNCH} --max-num-seqs 8"}, {"measured_at": "2026-01-01"}],
)
def test_a_ramp_of_something_else_is_a_warning(changes: dict[str, object], tmp_path: Path) -> None:
    assert of_capacity(tmp_path, 30, **changes)["ramp_result"] == "warn"


# -- any launch --------------------------------------------------------------------------------------------------------

ODD = (
    *("--port 99999", "--port -1", "--host a..b", "--tensor-parallel-size 1e300", "--nnodes 99 -tp 2", "--nnodes 0"),
    *("--data-parallel-size 100000000", "--cpu-offload-gb nan", "--port $P", "--download-dir /no/such/dir"),
)
LAUNCHES = [launch["text"] for file in (ROOT / "tests/data/launches").glob("*.yaml") for launch in read_yaml(file)]


@pytest.mark.slow
@pytest.mark.parametrize("launch", [*LAUNCHES, *(f"vllm serve m {words}" for words in ODD)])
def test_a_launch_of_any_form_is_judged_in_forty_lines_or_refused_in_a_sentence(launch: str) -> None:
    try:
        result = work.run(PreflightOptions(launch))
    except BadUsage as refused:
        assert "\n" not in str(refused)
    else:
        assert len(text.render(result).splitlines()) <= text.MOST_LINES


def test_a_context_that_does_not_fit_is_a_no_go(gpus: Show) -> None:
    gpus(T4 | {"utilization": 0, "free": 15 * GIB, "used": 0})
    result = found(f"vllm serve {MODELS}/llama-3-8b --dtype half --load-format dummy")
    assert states(result, "memory_estimate") == {"fail"}
    gpus(IDLE)
    assert states(found(), "memory_estimate") == {"pass"}


@pytest.mark.parametrize(
    ("path", "bits", "state"), [("nvlink", 0x1C, "pass"), ("sys", 0x1C, "warn"), ("sys", 0, "pass")]
)
def test_gpus_whose_bridges_redirect_peer_to_peer_traffic(path: str, bits: int, state: State, tmp_path: Path) -> None:
    bridge = tmp_path / "bus/pci/devices/0000:00:01.0"
    bridge.mkdir(parents=True)
    (bridge / "class").write_text("0x060400")
    space = bytearray(4096)
    space[0x100:0x107] = (0x0D | 1 << 16 | bits << 48).to_bytes(7, "little")
    (bridge / "config").write_bytes(space)
    info = [({"gpu": number, "name": "H100", "pci_bus_id": f"00000000:0{number}:00.0"}, 1.0) for number in "01"]
    shown = {"diag_gpu_info": info, "diag_gpu_peer_info": [({"gpu": "0", "peer": "1", "path": path}, 1.0)]}
    known = facts(command=parse(f"{LAUNCH} -tp 2"), machine=Machine(sys=tmp_path), gpus=shown)
    assert states(preflight(known, "m"), "peer_to_peer") == {state}


def test_gpus_on_a_numa_node_whose_cpus_may_not_be_used(tmp_path: Path) -> None:
    cpus = "bus__pci__devices__0000:01:00.0__local_cpulist"
    info = [({"gpu": "0", "pci_bus_id": "00000000:01:00.0"}, 1.0)]
    for listed, state in ((f"{min(os.sched_getaffinity(0))}", "pass"), ("4000-4007", "warn")):
        known = facts(machine=node(tmp_path, **{cpus: listed}), gpus={"diag_gpu_info": info})
        assert states(preflight(known, "m"), "cpus_beside_gpus") == {state}


# -- the answer --------------------------------------------------------------------------------------------------------


def test_the_share_of_a_tenant_is_not_to_be_exceeded(gpus: Show, tmp_path: Path) -> None:
    gpus(IDLE)
    site = tmp_path / "diag.toml"
    site.write_text("[preflight]\ngpu_memory_share = 0.5\n")
    result = found(contract=site)
    assert states(result, "memory_share") == {"fail"}
    assert next(each.do for each in result.results if each.id == "memory_share") == "--gpu-memory-utilization 0.5"
    assert states(found(f"{LAUNCH} --gpu-memory-utilization 0.45", contract=site), "memory_share") == {"pass"}


def test_diag_toml_drops_a_result_with_its_reason(tmp_path: Path) -> None:
    site = tmp_path / "diag.toml"
    site.write_text('[preflight.ignore]\nweight_files = "they are mounted later"\n')
    result = found("vllm serve /no/such/model", contract=site)
    assert not states(result, "weight_files")
    assert "weight_files: they are mounted later" in text.render(result)


@pytest.mark.parametrize(
    "toml",
    [
        '[preflight.ignore]\nno_such_check = "x"',
        "[preflight.ignore]\nport_free = true",
        "[preflight]\ngpu_memory_share = 2",
        "[preflight]\nramp = 3",
        "[preflight]\nconcurrency = 0",
        "[preflight]\nno_such_key = 1",
    ],
)
def test_a_wrong_intention_is_refused(toml: str, tmp_path: Path) -> None:
    site = tmp_path / "diag.toml"
    site.write_text(toml)
    with pytest.raises(BadContract):
        found(contract=site)


def test_a_removed_flag_is_a_no_go() -> None:
    result = found(f"{LAUNCH} --swap-space 4")
    assert (result.results[0].group, result.results[0].state) == ("launch", "fail")


def test_nothing_decisive_is_no_go_ahead() -> None:
    assert preflight(facts(), "m").answer == "cannot tell"


WORST = " ".join((LAUNCH, *(f"--no-such-flag-{number} {number}" for number in range(60)), "--port 1"))


@pytest.mark.parametrize("launch", [LAUNCH, WORST, "vllm serve /no/such/model"])
def test_the_print_fits_forty_lines_and_the_json_its_schema(launch: str) -> None:
    result = found(launch)
    lines = text.render(result).splitlines()
    assert len(lines) <= text.MOST_LINES and max(map(len, lines)) <= 120
    assert lines[-1].split()[0] == "more"
    validator(Path(text.__file__).parent / "diag.preflight.schema.json").validate(
        json.loads(text.DOCUMENT.text(result))
    )
    table = text.render_markdown(result).splitlines()
    assert sum(line.startswith("| ") for line in table) == len(result.results) + 1


@pytest.mark.parametrize("id", CHECKS)
def test_each_check_has_a_page_and_a_line_in_the_reference(id: str) -> None:
    page = explain(id, None)
    assert page.startswith(f"# {id}: ") and CHECKS[id].source in page


def judged_after(changes: Sequence[tuple[str, str, PreflightFacts]]) -> list[str]:
    """The states of checks in one process that changes its limits, then its user before each, unprivileged as root."""
    code = "import os, resource, pickle, sys; from diag.preflight.checks import CHECKS, results\n"
    code += "import diag.vllm.command.secret_search\n"  # while its files may be read
    code += "for change, id, facts in pickle.load(sys.stdin.buffer):\n    exec(change)\n"
    code += "    print(*[result.state for result in results(CHECKS[id], facts)])"
    given = pickle.dumps([(change, id, replace(known, incidents=())) for change, id, known in changes])
    bound = ["setpriv", "--bounding-set", "-ipc_lock"] if os.geteuid() == 0 else []
    ran = subprocess.run([*bound, sys.executable, "-c", code], input=given, capture_output=True, check=True)
    return ran.stdout.decode().splitlines()


def test_low_limits_and_a_user_without_a_name(tmp_path: Path) -> None:
    """Only root may take another user's id."""
    port = "class__infiniband__mlx5_0__ports__1__"
    host = node(tmp_path, **NET, **{f"{port}state": "4: ACTIVE", f"{port}rate": "400 Gb/sec (4X NDR)"})
    known = facts(command=parse(NODES), machine=host)
    changes = [
        ("resource.setrlimit(resource.RLIMIT_MEMLOCK, (65_536, 65_536))", "locked_memory", known),
        ("resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))", "open_files", facts(machine=Machine())),
        ("os.environ.clear(); os.setuid(54_321)", "user_name", facts(machine=Machine())),
    ]
    expected = ["fail", "warn", "warn"]
    is_root = os.geteuid() == 0
    assert judged_after(changes if is_root else changes[:2]) == (expected if is_root else expected[:2])
    assert states(preflight(replace(known, command=parse(LAUNCH)), "m"), "locked_memory") == set()


def test_weights_larger_than_the_disk() -> None:
    huge = f"vllm serve {MODELS}/llama-3.1-405b -tp 8 --max-model-len 8192 --download-dir {Path.home()}"
    expected = "pass" if shutil.disk_usage(Path.home()).free > 2 * 405e9 else "fail"
    assert states(found(huge, gpu="h200"), "disk_room") == {expected}


def test_the_speed_of_the_disk_is_measured_on_a_large_file(tmp_path: Path) -> None:
    models.changed(tmp_path)
    models.tensors(tmp_path / "model.safetensors", a=("BF16", 300 * 2**20))
    (result,) = (each for each in found(f"vllm serve {tmp_path}").results if each.id == "read_speed")
    assert result.state == "pass" and "iB/s: " in result.message


def test_a_compile_cache_that_cannot_be_written() -> None:
    assert states(found(f"VLLM_CACHE_ROOT=/etc/passwd/cache {LAUNCH}"), "compile_cache") == {"fail"}


def test_the_folder_of_stack_dumps_is_one_that_may_be_written(tmp_path: Path) -> None:
    for folder, state in ((tmp_path / "new", "pass"), ("/etc/passwd/dumps", "fail"), ("/proc/none", "fail")):
        launch = f"{LAUNCH} --watchdog-config.dump_dir {folder}"
        assert states(found(launch), "dump_folder") == {state}
    assert states(found(LAUNCH), "dump_folder") == set()


@pytest.mark.parametrize(
    ("probe", "state"),
    [
        ("livenessProbe: {httpGet: {path: /livez, port: 9400}}", "pass"),
        ("livenessProbe: {exec: {command: [sh, -c, 'curl -f http://127.0.0.1:9400/livez']}}", "pass"),
        ("livenessProbe: {httpGet: {path: /health, port: 8000}}", "warn"),
        ("tty: false", "warn"),
    ],
)
def test_a_liveness_probe_should_notice_a_server_that_hangs(probe: str, state: State, gpus: Show) -> None:
    gpus(IDLE | {"free": GIB})  # this host is not the pod's node
    container = f"{{image: 'vllm/vllm-openai:v0.32.0', args: [--model, m], {probe}}}"
    manifest = f"{{kind: Deployment, spec: {{template: {{spec: {{containers: [{container}]}}}}}}}}"
    assert states(found(manifest), "liveness_probe") == {state}
    assert states(found(manifest), "gpu_is_shared") == set()
    assert states(found(manifest), "pcie_width") == {"not checked"}


def test_flags_alone_are_no_go_ahead() -> None:
    result = found("docker run --gpus all vllm/vllm-openai:v0.32.0 --model no/such --max-model-len 8192")
    assert result.answer == "cannot tell" and text.render(result).startswith("CANNOT TELL")


def test_a_server_that_runs_is_judged_by_its_exporters_page() -> None:
    page = bad_servers.PAGE + (ROOT / "tests" / "goldens" / "exporter.prom").read_bytes()
    with bad_servers.serving(bad_servers.pages(page)) as server:
        result = found(server.url, launch="vllm serve m --max-model-len 8k --no-such-flag")
    assert states(result, "power_limit") == states(result, "pcie_width") == {"pass"}
    assert states(result, "unknown_flag") == {"fail"}
    assert states(result, "port_free") == states(result, "weight_files") == set()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("pattern", ROUTES)
def test_a_pattern_of_a_route_takes_no_exponential_time(pattern: str) -> None:
    config = {
        "route": {"receiver": "none", "routes": [{"match_re": {"severity": pattern}, "receiver": "pager"}]},
        "receivers": [{"name": "none"}, {"name": "pager", "webhook_configs": [{"url": "http://h"}]}],
    }
    answer = {"config": {"original": json.dumps(config)}}
    facts = PreflightFacts(Contract(), (), "0.32.0", running=False, alertmanager=lambda _: answer)
    try:
        states: list[State] = [outcome.state for outcome in pager_route(facts)]
    except NotChecked as error:
        assert "a pattern that diag does not read" in str(error)
        states = []
    assert states == ROUTES[pattern]
