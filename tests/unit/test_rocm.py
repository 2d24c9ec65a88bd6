"""On AMD GPUs the texts of incidents name ROCm's tools, and no longer NVIDIA's."""

import re

import pytest
from support.paths import ROOT

from diag.core.incident import Incident
from diag.knowledge.catalog import load as incidents
from diag.knowledge.platforms import incident_on_rocm, rocm_phrases
from diag.vllm.gpus import visible_gpus
from diag.vllm.running_config import ServerFacts, settle

NVIDIA = re.compile(r"nvidia|dcgmi|\bxid|NVLink|CUDA error|cuda-gdb", re.IGNORECASE)


def texts(incident: Incident) -> list[str]:
    fixes = [text for fix in incident.fixes for text in (fix.change, fix.effect, fix.command, fix.risk, fix.rollback)]
    looks = [look.distinguish for look in incident.looks_like]
    return [" ".join(incident.cause.split()), *looks, *fixes, *incident.mitigate, *incident.hand_over, *incident.do_not]


@pytest.mark.parametrize("incident", incidents(), ids=lambda incident: incident.id)
def test_no_text_names_a_tool_of_nvidia_on_rocm(incident: Incident) -> None:
    left = {found for text in texts(incident_on_rocm(incident)) for found in NVIDIA.findall(text)}
    assert not left


def test_every_phrase_is_in_some_text() -> None:
    everything = "\n".join(text for incident in incidents() for text in texts(incident))
    assert not [phrase for part in rocm_phrases() for phrase in part if phrase not in everything]


def test_a_runbook_lists_the_commands_of_rocm() -> None:
    page = (ROOT / "runbooks" / "gpu_thermal_throttling.md").read_text(encoding="utf-8")
    assert "`amd-smi set -g <gpu> --power-cap <value>` instead of `nvidia-smi -i <gpu> -pl <value>`" in page


@pytest.mark.parametrize(
    ("facts", "device"),
    [
        (ServerFacts(platform="rocm"), "rocm"),
        (ServerFacts(platform="rocm", server_info={"device": "cuda"}), "rocm"),  # vLLM calls it so, as torch does
        (ServerFacts(version="0.14.0+rocm700"), "rocm"),
        (ServerFacts(process="VLLM_ROCM_USE_AITER=1 vllm serve m"), "rocm"),
        (ServerFacts(process="HIP_VISIBLE_DEVICES=0 vllm serve m"), "rocm"),
        (ServerFacts(launch="docker run --device /dev/kfd vllm/vllm-openai-rocm:v0.14.0 --model m"), "rocm"),
        (ServerFacts(launch="docker run vllm/vllm-openai:v0.14.0 --model m"), ""),
        (ServerFacts(platform="tpu"), "tpu"),
        (ServerFacts(platform="cuda", server_info={"device": "cuda"}), "cuda"),
        (ServerFacts(version="0.14.0", process="vllm serve m"), ""),
    ],
)
def test_the_device_of_a_server_on_rocm_is_known(facts: ServerFacts, device: str) -> None:
    assert settle({}, facts).device == device


@pytest.mark.parametrize(
    ("environment", "visible"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "1"),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1"}, "0,1"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-ab,3"}, "GPU-ab,3"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-ab,3", "HIP_VISIBLE_DEVICES": "1"}, "3"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "5"}, "5"),
    ],
)
def test_hip_counts_among_the_gpus_that_rocr_leaves(environment: dict[str, str], visible: str | None) -> None:
    assert visible_gpus(environment) == visible
