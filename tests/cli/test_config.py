"""`diag config`: the configuration of servers, the source of each value, what the unknown ones need."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from support.bad_servers import Answer, Reply, Request, closed_port, pages, serving
from support.cli import diag
from support.paths import OF_ONE_SERVER
from support.sampling import some
from support.schemas import validator

from diag import report
from diag.diagnosis import configuration
from diag.report.settings import CONFIG, UNKNOWN, render_config, source_text
from diag.sources.recording import reader as recording

KV_CASCADE = next(each for each in OF_ONE_SERVER if each.name == "kv_cascade")
INFO = 'vllm:cache_config_info{block_size="16",gpu_memory_utilization="0.9",cache_dtype="fp8",engine="0"} 1\n'
SCHEMA = validator(Path(report.__file__).parent / "diag.config.schema.json")
VLLM = f'vllm:num_requests_running{{engine="0",model_name="m"}} 0\n{INFO}'


def gpus(*kinds: tuple[str, int, bool]) -> str:
    """GPUs by name, GiB and whether the server runs on them."""
    return "".join(
        f'diag_gpu_info{{gpu="{number}",uuid="u{number}",name="{name}"}} 1\n'
        f'diag_gpu_memory_total_bytes{{gpu="{number}",uuid="u{number}"}} {size * 2**30}\n'
        f'diag_gpu_serving{{gpu="{number}",uuid="u{number}"}} {int(serves)}\n'
        for number, (name, size, serves) in enumerate(kinds)
    )


def write(folder: Path, page: str = VLLM, about: str = "", log: str = "") -> Path:
    """A recording of two scrapes."""
    made = folder / "recording"
    made.mkdir()
    (made / "metrics.prom").write_text(f"# scrape 1 h:1\n{page}# scrape 3 h:1\n{page}", encoding="utf-8")
    (made / "recording.toml").write_text(about, encoding="utf-8")
    if log:
        (made / "server.log").write_text(log, encoding="utf-8")
    return made


def entries(made: Path, launch: str = "") -> Mapping[str, configuration.ConfigEntry]:
    """Its settings by name."""
    (one,) = configuration.configurations(recording.read(made, launch))
    return {each.name: each for each in one.entries}


def value(made: Path, name: str, launch: str = "") -> tuple[object, str]:
    """A setting's value and source; "unknown" and what would tell."""
    (one,) = configuration.configurations(recording.read(made, launch))
    found = next(((each.value, source_text(each)) for each in one.entries if each.name == name), None)
    why = next((UNKNOWN[why] for why, names in one.unknown.items() if name in names), "no such flag")
    return found or ("unknown", why)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return diag("config", *arguments)


@pytest.mark.parametrize("made", some(OF_ONE_SERVER, 24), ids=lambda made: made.name)
def test_shown_configuration_is_that_of_the_rules(made: Path) -> None:
    seen = recording.read(made)
    blocks = seen.samples.select([])
    (one,) = configuration.configurations(seen)
    published = {
        labels["flag"]: float(row[~np.isnan(row)][-1])  # a server that is gone is not asked any more
        for block in blocks
        for labels, row in zip(block.labels, block.values, strict=True)
        if labels["__name__"] == "diag_vllm_config"
    }
    said = {each.name: each for each in one.entries if not each.default and isinstance(each.value, float)}
    shown = {name.removeprefix("--").replace("-", "_"): each.value for name, each in said.items()}
    assert published
    assert shown == published
    SCHEMA.validate(json.loads(CONFIG.text(([one], configuration.notes(seen)))))
    text = render_config([one], configuration.notes(seen))
    assert max(map(len, text.splitlines())) <= 100


def test_a_value_is_shown_with_its_source_and_with_conflicts(tmp_path: Path) -> None:
    made = write(tmp_path, about='vllm = "0.32.0"\nlaunch = "vllm serve m --block-size 32 --max-num-seqs 8"\n')
    (one,) = configuration.configurations(seen := recording.read(made))
    lines = render_config([one], configuration.notes(seen)).splitlines()
    assert lines[0] == "h:1: vLLM 0.32.0, m, no GPU found"
    assert lines[1].split() == ["--max-num-seqs", "8", "launch", "command"]
    assert re.search(r"--block-size +16 +/metrics: cache_config_info; launch command has 32", "\n".join(lines))
    assert re.search(r"--kv-cache-dtype +fp8 +/metrics: cache_config_info", "\n".join(lines))
    assert re.search(r"--watermark +0 +default of 0\.32\.0$", "\n".join(lines), re.M)
    assert not any(line.startswith("  Note") for line in lines), "it stands with the setting"


def test_a_flag_whose_value_is_not_shown_is_no_default(tmp_path: Path) -> None:
    backend = "our.company.serving.executors.ray.OurRayExecutor"
    done = run(
        str(write(tmp_path)), "--launch", f"vllm serve m --distributed-executor-backend {backend} --max-loras 1,0"
    )
    told = r" +\(set\) +launch command; value hidden or unreadable$"
    assert re.search("--distributed-executor-backend" + told, done.stdout, re.M)
    assert re.search("--max-loras" + told, done.stdout, re.M)
    assert backend not in done.stdout


def test_a_command_that_cannot_be_parsed_is_noted(tmp_path: Path) -> None:
    done = run(str(write(tmp_path)), "--launch", "vllm serve 'm")
    assert "note             the launch command could not be parsed: the command has an unclosed" in done.stdout


def test_process_and_log_of_a_recording_are_sources_of_its_configuration(tmp_path: Path) -> None:
    log = "INFO 11-21 02:00:00 [utils.py:1] non-default args: {'max_num_seqs': 7, 'watermark': 0.1}\n"
    about = 'vllm = "0.32.0"\nlog_utc_offset = 0\n[config."h:1"]\nprocess = "python -m vllm serve m --max-num-seqs 8"\n'
    made = write(tmp_path, about=about, log=log)
    found = entries(made)
    assert (found["--max-num-seqs"].value, found["--max-num-seqs"].source) == (8, "process command line")
    assert [(each.value, each.source) for each in found["--max-num-seqs"].conflicts] == [(7, "log")]
    assert (found["--watermark"].value, found["--watermark"].source) == (0.1, "log")
    assert recording.read(made).launch == {"h:1": "python -m vllm serve m --max-num-seqs 8"}
    assert recording.read(made, "vllm serve mine").launch == {"h:1": "vllm serve mine"}


def test_a_log_with_its_arguments_is_all_that_was_set(tmp_path: Path) -> None:
    log = "INFO 11-21 02:00:00 [utils.py:1] non-default args: {'max_num_seqs': 7, 'dtype': 'bfloat16'}\n"
    made = write(tmp_path, about='vllm = "0.32.0"\nlog_utc_offset = 0\n', log=log)
    assert value(made, "--watermark") == (0, "default of 0.32.0")
    assert value(made, "--num-gpu-blocks-override") == (None, "")
    assert value(made, "--dtype") == ("bfloat16", "log")


def test_default_is_marked_as_possible_if_the_command_is_unknown(tmp_path: Path) -> None:
    made = write(tmp_path, about='vllm = "0.32.0"\n')
    assert value(made, "--watermark") == (0, "default of 0.32.0, unless set")
    assert value(made, "--num-gpu-blocks-override") == ("unknown", UNKNOWN["incomplete"])
    assert value(made, "--watermark", "vllm serve m --config x.yaml") == (0, "default of 0.32.0, unless set")
    assert value(made, "--watermark", "vllm serve m") == (0, "default of 0.32.0")


def test_unknown_release_has_only_defaults_common_to_all(tmp_path: Path) -> None:
    made = write(tmp_path)
    assert value(made, "--tensor-parallel-size", "vllm serve m") == (1, "default of every release")
    assert (
        value(made, "--max-num-seqs", "vllm serve m")[1] == "the default depends on the vLLM version, which is unknown"
    )


def test_a_release_newer_than_all_known_has_the_newest_defaults_by_name(tmp_path: Path) -> None:
    made = write(tmp_path, about='vllm = "0.99.0"\nlaunch = "vllm serve m"\n')
    assert value(made, "--watermark") == (0, "default of 0.33.0, the newest known")


def test_a_flag_that_the_release_lacks_is_not_listed(tmp_path: Path) -> None:
    made = write(tmp_path, about='vllm = "0.20.0"\nlaunch = "vllm serve m"\n')
    assert value(made, "--watermark") == ("unknown", "no such flag")


H100 = ("NVIDIA H100 80GB HBM3", 80, True)


@pytest.mark.parametrize(
    ("kinds", "launch", "seqs", "tokens"),
    [
        ([H100, H100], "", (1024, "default of 0.32.0 on 80 GiB"), (8192, "default of 0.32.0 on 80 GiB")),
        ([H100, ("NVIDIA L4", 24, False)], "", (1024, "default of 0.32.0 on 80 GiB"), None),
        ([H100, ("NVIDIA L4", 24, True)], "", None, None),
        ([], "", None, None),
        ([H100], " --max-num-batched-tokens 512", (512, "default of 0.32.0 on 80 GiB"), (512, "launch command")),
        (
            [H100],
            " --max-num-seqs 4 --max-model-len 1000",
            (4, "launch command"),
            (4000, "default of 0.32.0 on 80 GiB"),
        ),
        ([H100], " --performance-mode throughput", (2048, "default of 0.32.0 on 80 GiB"), None),
    ],
)
def test_gpu_dependent_default_follows_the_gpus_of_the_server(
    tmp_path: Path,
    kinds: list[tuple[str, int, bool]],
    launch: str,
    seqs: tuple[float, str] | None,
    tokens: tuple[float, str] | None,
) -> None:
    made = write(tmp_path, VLLM + gpus(*kinds), f'vllm = "0.32.0"\nlaunch = "vllm serve m{launch}"\n')
    unknown = not {name for name, _, serves in kinds if serves} or len({each for each in kinds if each[2]}) > 1
    expected = ("unknown", "the default depends on the GPU, and none or several kinds were found; needs /server_info")
    assert value(made, "--max-num-seqs") == (expected if unknown else seqs)
    if tokens:
        assert value(made, "--max-num-batched-tokens") == tokens


def test_the_gpus_are_named(tmp_path: Path) -> None:
    made = write(tmp_path, VLLM + gpus(H100, H100, ("NVIDIA L4", 24, True)), 'vllm = "0.32.0"\n')
    done = run(str(made))
    assert done.stdout.startswith("h:1: vLLM 0.32.0, m, 2 x NVIDIA H100 80GB HBM3 (80 GiB), 1 x NVIDIA L4 (24 GiB)\n")


def test_an_exporter_is_a_source(tmp_path: Path) -> None:
    made = write(tmp_path, VLLM + 'diag_vllm_config{flag="max_num_seqs"} 9\ndiag_vllm_config{flag="block_size"} 16\n')
    assert value(made, "--max-num-seqs") == (9, "exporter")
    assert value(made, "--block-size") == (16, "/metrics")


SECRET = (
    "vllm serve /home/alice/m --api-key hush1 --hf-token hf_hush2hush2 --max-num-seqs 8 --quantization hf_hush3hush3"
)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_no_secret_and_no_escape_is_shown(tmp_path: Path, form: tuple[str, ...]) -> None:
    page = VLLM.replace('model_name="m"', 'model_name="m\x1b[31m"').replace("fp8", "/srv/hush4")
    launch = f"VLLM_API_KEY=hush5 VLLM_X=sk-hush6hush6 NCCL_DEBUG=INFO {SECRET}"
    made = write(tmp_path, page, 'vllm = "0.32.0\\u001b"\n')
    done = run(str(made), "--launch", launch, *form)
    assert done.returncode == 0, done.stderr
    assert "hush" not in done.stdout
    assert "alice" not in done.stdout
    assert "\x1b" not in done.stdout
    assert "NCCL_DEBUG" in done.stdout


def test_the_json_has_values_as_a_machine_wants_them(tmp_path: Path) -> None:
    made = write(tmp_path, about='vllm = "0.32.0"\nlaunch = "NCCL_DEBUG=INFO vllm serve m --enforce-eager"\n')
    document = json.loads(run(str(made), "--json").stdout)
    (server,) = document["servers"]
    settings = {each["name"]: each for each in server["settings"]}
    assert document["schema"] == "diag.config/2"
    assert (server["instance"], server["version"], server["model"], server["gpus"]) == ("h:1", "0.32.0", "m", [])
    assert (settings["--enforce-eager"]["value"], settings["--enforce-eager"]["is_default"]) == (True, False)
    assert (settings["--block-size"]["value"], settings["--block-size"]["source"]) == (16, "/metrics")
    assert (settings["--watermark"]["value"], settings["--watermark"]["is_default"]) == (0, True)
    assert settings["--num-gpu-blocks-override"]["value"] is None
    assert server["environment"] == {"NCCL_DEBUG": "INFO"}
    assert server["incomplete"] is None
    assert {each["name"] for each in server["unknown"]} >= {"--max-num-seqs", "--async-scheduling"}


def server(block_size: int) -> Answer:
    """A vLLM of 0.32.0 that says what it is."""
    texts = {
        "/metrics": VLLM.replace('block_size="16"', f'block_size="{block_size}"'),
        "/version": '{"version": "0.32.0"}',
        "/v1/models": '{"data": [{"id": "m", "max_model_len": 4096}]}',
        "/server_info": json.dumps({"vllm_config": {"scheduler_config": {"max_num_seqs": 99}}}),
    }

    def answer(request: Request) -> Reply:
        text = texts.get(request.path.partition("?")[0])
        return Reply(text.encode()) if text else Reply(b"", 404)

    return answer


def test_live_servers_are_scraped_once() -> None:
    with serving(server(32)) as one, serving(server(64)) as two:
        done = run(one.url, two.url, "--json")
        asked = [each.path for each in one.requests].count("/metrics")
    found = [{each["name"]: each for each in each["settings"]} for each in json.loads(done.stdout)["servers"]]
    assert [each["--block-size"]["value"] for each in found] == [32, 64]
    assert [each["--max-num-seqs"]["source"] for each in found] == ["/server_info"] * 2
    assert [each["--max-model-len"]["source"] for each in found] == ["/v1/models"] * 2
    assert [each["--gpu-memory-utilization"]["value"] for each in found] == [0.9, 0.9]
    assert (done.returncode, asked) == (0, 1)


def test_a_busy_server_is_not_watched() -> None:
    busy = VLLM.replace("} 0\n", "} 5\n", 1).encode()
    with serving(pages(busy)) as one:
        done = run(one.url)
        assert [each.path for each in one.requests].count("/metrics") == 1
    assert done.returncode == 0


def test_unreachable_configuration_is_an_exit_status() -> None:
    assert run(f"http://127.0.0.1:{closed_port()}").returncode == 69
    assert run("no/such/recording").returncode in (64, 69)
    assert run(str(KV_CASCADE), "http://127.0.0.1:1").returncode == 64
    assert run("--no-such-option").returncode == 64
