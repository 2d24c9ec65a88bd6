"""Launch files as they are: every server judged, containers, releases, unknown values, folders, exit statuses."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml
from support import sarif

from diag.commands import preflight
from diag.commands.lint import LintOptions, run
from diag.commands.options import PreflightOptions
from diag.core.errors import BadUsage, NoFile, NoLaunch
from diag.vllm.command.modules import with_constants
from diag.vllm.command.parse import read_all

GPU = "deploy: {resources: {reservations: {devices: [{driver: nvidia, %s, capabilities: [gpu]}]}}}"
IMAGE = "image: vllm/vllm-openai:v0.25.1"
FIRST = GPU % 'device_ids: ["0"]'
AGAIN = "weights_are_downloaded_again"


def compose(*services: str) -> str:
    names = ("chat", "embed", "rerank")
    return "services:\n" + "".join(
        f"  {name}:\n    {IMAGE}\n{text}" for name, text in zip(names, services, strict=False)
    )


def service(command: str, *more: str) -> str:
    return "".join(f"    {line}\n" for line in (f"command: {command}", *more))


def pod(args: str, more: str = "", spec: str = "") -> str:
    container = f"{{name: vllm, {IMAGE}, args: [{args}]{more}}}"
    return f"kind: Deployment\nspec: {{template: {{spec: {{containers: [{container}]{spec}}}}}}}\n"


RUN = "docker run -p 127.0.0.1:8000:8000 --ipc=host --gpus"
SHELL = "IS=1\nARGS=(--seed 1)\n"
CALLED = f"""go() {{
  local share=$1
  {RUN} all -d vllm/vllm-openai:v0.25.1 --model m --gpu-memory-utilization $share --max-model-len $2
}}
%s
go %s
%s
go %s
%s
go %s
%s
"""
TABLE = {
    # a file: what it holds, and the rules of errors (2) and warnings (1) of each server
    "second service broken": (
        "c.yaml",
        compose(
            service("--model m --max-model-len 1k", "ipc: host", GPU % 'device_ids: ["0"]'),
            service("--model n --swap-space 4", "ipc: host", GPU % 'device_ids: ["1"]'),
        ),
        [{}, {"removed_flag": 2}],
    ),
    "two servers on one GPU": (
        "c.yaml",
        compose(
            service("--model m --gpu-memory-utilization 0.6", GPU % 'device_ids: ["0"]'),
            service("--model n --gpu-memory-utilization 0.6", GPU % 'device_ids: ["0"]'),
            service("--model o --gpu-memory-utilization 0.6", GPU % 'device_ids: ["1"]'),
        ),
        [{}, {"gpu_taken_twice": 2}, {}],
    ),
    "profiles are alternatives": (
        "c.yaml",
        compose(
            service("--model m", "profiles: [a]", GPU % "count: 1"),
            service("--model n", "profiles: [b]", GPU % "count: 1"),
        ),
        [{}, {}],
    ),
    "fewer GPUs than ranks": (
        "c.yaml",
        compose(service("--model m -tp 4", GPU % "count: 2")),
        [{"gpu_limit_differs": 2, "no_shared_memory": 1}],
    ),
    "more GPUs than ranks": (
        "c.yaml",
        compose(service("--model m -tp 2", GPU % 'device_ids: ["0", "1", "2"]', "ipc: host")),
        [{"gpu_limit_differs": 1}],
    ),
    "a part of the GPUs": (
        "c.yaml",
        compose(service("--model m", GPU % 'device_ids: ["0", "1"]', "environment: {CUDA_VISIBLE_DEVICES: '1'}")),
        [{}],
    ),
    "a health check gives up": (
        "c.yaml",
        compose(
            service(
                "--model m-32B",
                GPU % "count: 1",
                "healthcheck: {test: curl -f http://localhost:8000/health, start_period: 50s, interval: 10s}",
            )
        ),
        [{"probe_kills_the_start": 1}],
    ),
    "no GPU is given": (
        "r.sh",
        "docker run -p 8000:8000 vllm/vllm-openai:v0.25.1 m",
        [{"gpu_limit_differs": 2, "public_without_a_key": 1}],
    ),
    "a port of one address": ("r.sh", "docker run --gpus all -p 10.0.0.5:80:8000 vllm/vllm-openai:v0.25.1 /m\n", [{"model_not_in_a_volume": 1}]),  # noqa: E501
    "a port of every address": ("r.sh", "docker run --gpus all -p 0.0.0.0:80:8000 vllm/vllm-openai:v0.25.1 /m\n", [{"model_not_in_a_volume": 1, "public_without_a_key": 1}]),  # noqa: E501
    "a flag that no release has, before the oldest known one": ("r.sh", "docker run --gpus all vllm/vllm-openai:v0.4.2 --model /m --no-such-flag\n", [{"model_not_in_a_volume": 1}]),  # noqa: E501
    "a port of a public address": ("r.sh", "docker run --gpus all -p 203.0.113.5:80:8000 vllm/vllm-openai:v0.25.1 /m\n", [{"model_not_in_a_volume": 1, "public_without_a_key": 1}]),  # noqa: E501
    "a placeholder of a key": ("r.sh", "HF_TOKEN=nvapi-" + "x" * 64 + " vllm serve m\n", [{}]),
    "a key of another service": ("r.sh", "HF_TOKEN=nvapi-" + "aB3_" * 16 + " vllm serve m\n", [{"key_in_the_text": 1}]),
    "options with variables": (
        "r.sh",
        'docker run --gpus all --network host -p "$PORT:8000" -e HF_TOKEN=$HF_TOKEN --name $N vllm/vllm-openai:latest'
        ' --model org/m --trust-remote-code --api-key $KEY\n',
        [
            {
                **{"key_in_the_arguments": 1, "remote_code_of_any_revision": 1, "weights_are_downloaded_again": 1},
                **{"published_beside_the_hosts_network": 1, "image_not_pinned": 1},
            }
        ],
    ),
    "a Pod behind a NodePort": (
        "d.yaml",
        f"kind: Pod\nmetadata: {{labels: {{a: b}}}}\nspec: {{containers: [{{{IMAGE}, args: [--model, /model]}}]}}\n"
        "---\n"
        "kind: Service\nspec: {type: NodePort, selector: {a: b}}\n",
        [{"no_readiness_probe": 1, "public_without_a_key": 1, "model_not_in_a_volume": 1}],
    ),
    "a recipe with a build of its own": (
        "r.yaml",
        "container: vllm-node-mxfp4\ncommand: |\n  vllm serve m \\\n    --mxfp4-backend X --swap-space 4\n",
        [{"unknown_flag": 1, "removed_flag": 1}],
    ),
    "a pod, a task, values and a script in Terraform": (
        "main.tf",
        'locals { args = ["--model", "m", "--swap-space=4"] }\n'
        'resource "kubernetes_deployment_v1" "v" {\n  spec { template { spec {\n    container {\n'
        '      name = "vllm"\n      image = "vllm/vllm-openai:v0.25.1"\n      args = local.args # all\n'
        '      dynamic "env" {\n        for_each = var.more\n        content { name = env.value }\n      }\n'
        '      resources { limits = { "nvidia.com/gpu" = 1 } }\n    }\n'
        '    volume {\n      name = "w"\n      empty_dir {}\n    }\n  } } }\n}\n'
        'resource "aws_ecs_task_definition" "v" {\n  container_definitions = jsonencode([{\n'
        '    name = "e", image = "vllm/vllm-openai:v0.25.1"\n'
        '    command = concat(["--model", var.model], ["-tp", "2"])\n'
        '    resourceRequirements = [{ type = "GPU", value = "1" }]\n  }])\n}\n'
        'resource "helm_release" "v" {\n  values = [<<-EOT\n    command: "vllm serve ${var.m} --swap-space 4"\n'
        '    EOT\n  ]\n}\nresource "helm_release" "w" {\n  set {\n'
        '    name  = "servingEngineSpec.modelSpec[0].modelURL"\n    value = "m"\n  }\n  set {\n'
        '    name  = "servingEngineSpec.modelSpec[0].repository"\n    value = "vllm/vllm-openai"\n  }\n  set {\n'
        '    name  = "servingEngineSpec.modelSpec[0].vllmConfig.swapSpace"\n    value = "4"\n  }\n}\n'
        'resource "aws_instance" "v" {\n  user_data = <<EOF\n#!/bin/bash\n'
        "docker run --gpus all vllm/vllm-openai:v0.25.1 --model $${MODEL} --swap-space 4\nEOF\n}\n",
        [
            {"removed_flag": 2},
            {"gpu_limit_differs": 2},
            {"removed_flag": 1},
            {"removed_flag": 1, "image_not_pinned": 1},
            {"removed_flag": 2},
        ],
    ),
    "values of a chart, settings where it puts them": (
        "values.yaml",
        "modelName: org/m\nimage: {repository: r.io/vllm-openai, tag: v0.25.1}\nservice: {type: LoadBalancer}\n"
        'extraArgs: ["--swap-space", "4"]\nmultiNode: {pipelineParallelSize: 2}\n'
        "params: {attentionBackend: FLASHINFER, maxNumSeqs: -1}\n",
        [{"removed_flag": 2, "public_without_a_key": 1}],
    ),
    "values of a chart for an old image": (
        "values.yaml",
        "image: {repository: vllm/vllm-openai, tag: v0.6.6.post1}\nmodel: {name: org/m}\n"
        "vllm: {maxModelLen: '8192', dtype: bfloat16, attentionBackend: FLASH_ATTN}\n",
        [{}],
    ),
    "values of other servers": (
        "values.yaml",
        "image: {repository: r.io/vllm-router, tag: v1}\nvllm: {model: org/m, dtype: half, swapSpace: 4}\n"
        "litellm: {model: org/n, maxModelLen: 2}\n",
        [{"removed_flag": 1}],
    ),
    "blocks of Jinja within a command": (
        "run.sh.j2",
        "vllm serve {{ m }} \\\n{% if tp > 1 %}\n  -tp {{ tp }} \\\n{% endif %}\n{% if a %}\n  --host x \\\n"
        "{% else %}\n"
        "  --host {{ h }} \\\n{% endif %}\n  --swap-space 4\n",
        [{"removed_flag": 1}],
    ),
    "what Python appends": (
        "s.py",
        'import os\ncmd = ["vllm", "serve", m]\nenv = os.environ.copy()\nenv["VLLM_USE_V1"] = "1"\nif q:\n'
        '    cmd.extend(["--quantization", q])\nelse:\n    cmd += ["--dtype", "auto"]\nif e:\n'
        '    cmd.append("--swap-space=4")\n'
        'for a in more:\n    cmd.append(a)\nrun(cmd, env=env)\n'
        'def other():\n    cmd = ["vllm", "serve", "n"]\n    cmd = cmd + ["--swap-space", "4"]\n',
        [{"variable_not_read": 1, "removed_flag": 1}, {"removed_flag": 1}],
    ),
    "flags for a container in Python": (
        "s.py",
        'args = [\n    "--model", f"{m}",\n    "--swap-space", "4",\n    "--dtype=auto",\n]\nupload(args=args)\n',
        [{"removed_flag": 1}],
    ),
    "a Databricks notebook": (
        "s.py",
        "# Databricks notebook source\n# MAGIC %pip install vllm==0.25.1\n# COMMAND ----------\n# MAGIC %sh\n"
        "# MAGIC vllm serve m --swap-space 4\n",
        [{"removed_flag": 2}],
    ),
    "functions and arrays of a shell": (
        "s.sh",
        'start() {\n  local model=$1\n  shift\n  vllm serve "$model" --port 8000 "$@"\n}\n'
        'read -ra MORE <<< "--swap-space 4"\nstart a "${MORE[@]}" ${EAGER:+--enforce-eager}\nstart b\n',
        [{"removed_flag": 1}, {}],
    ),
    "a script that a function passes on": (
        "s.sh",
        "far HOST <<'END'\nset -eu\nARGS=(serve m)\nARGS+=(--swap-space 4)\n"
        'python -m vllm.entrypoints.cli.main "${ARGS[@]}"\nEND\n',
        [{"removed_flag": 1}],
    ),
    "a Makefile and Cloud Run": (
        "Makefile",
        "MODEL ?= m\nrun:\n\t@vllm serve $(MODEL) \\\n\t\t--swap-space 4\n\ncloud:\n\t@if true; then \\\n"
        "\t\tgcloud run deploy x --image=vllm/vllm-openai:v0.25.1 --gpu=1 \\\n"
        "\t\t--args='^|^--model=$(MODEL)|--swap-space=4' --set-env-vars=VLLM_USE_V1=1; \\\n\tfi\n",
        [{"removed_flag": 1}, {"removed_flag": 2, "variable_not_read": 1}],
    ),
    "a justfile": (
        "justfile",
        'model := "m"\n\nrun:\n    @vllm serve {{model}} --swap-space 4\n',
        [{"removed_flag": 1}],
    ),
    "modules of Ansible": (
        "play.yml",
        "- hosts: gpu\n  tasks:\n    - community.docker.docker_container:\n        name: v\n"
        f"        {IMAGE}\n        command: --model {{{{ model }}}} --swap-space 4\n        ipc_mode: host\n"
        "        device_requests: [{driver: nvidia, count: 1}]\n        ports: ['127.0.0.1:8000:8000']\n"
        "    - ansible.builtin.copy:\n        content: |\n          [Service]\n"
        "          ExecStart=/opt/vllm/bin/vllm serve m --swap-space 4\n",
        [{"removed_flag": 2}, {"removed_flag": 1}],
    ),
    "a devcontainer": (
        "devcontainer.json",
        json.dumps({"image": "vllm/vllm-openai:v0.25.1", "postStartCommand": "vllm serve m --swap-space 4"}),
        [{"removed_flag": 2}],
    ),
    "an image whose arguments are not shown": (
        "p.yaml",
        "kind: Pod\nspec:\n  containers:\n"
        "  - {name: v, image: 'r.io/vllm-own:1', resources: {limits: {nvidia.com/gpu: 1}}}\n"
        "  - {name: r, image: 'r.io/vllm-router:1', resources: {limits: {nvidia.com/gpu: 1}}}\n"
        "  - {name: t, image: 'r.io/triton:1', resources: {limits: {nvidia.com/gpu: 1}}}\n",
        [{}],
    ),
    "a health check by the host's address": (
        "c.yaml",
        compose(
            service(
                "--model m --swap-space 4",
                "ports: ['127.0.0.1:8086:8000']",
                "healthcheck: {test: 'curl http://${host_ip}:8086/health', start_period: 10m}",
                GPU % "count: 1",
            )
        ),
        [{"removed_flag": 2}],
    ),
    "another image's port": (
        "r.sh",
        "docker run -d -p 127.0.0.1:80:8080 --gpus all r.io/vllm:1 --model=m --swap-space 4\n",
        [{"removed_flag": 1}],
    ),
    "a template's image": (
        "c.yml.j2",
        "services:\n{% for m in ms %}\n  vllm-{{ m.name | lower }}:\n    image: {{ vllm_image }}:{{ tag }}\n"
        "    command: >\n      --model {{ m.path }}\n{% if x %}\n      --swap-space 4\n{% endif %}\n{% endfor %}\n",
        [{"removed_flag": 1}],
    ),
    "a chart's image": (
        "d.yaml",
        pod("--model, /m, --swap-space, '4'").replace(IMAGE, 'image: "{{ .Values.image }}:{{ .Values.tag }}"'),
        [{"removed_flag": 1}],
    ),
    "secrets of a build": (
        "Dockerfile",
        "FROM vllm/vllm-openai:v0.25.1 AS a\nARG HF_TOKEN\nFROM vllm/vllm-openai:v0.25.1\nENV OTHER_TOKEN= X=1\n"
        'CMD ["--model", "/m", "--swap-space", "4"]\n',
        [{"removed_flag": 2}],
    ),
    "caches by variables": (
        "d.yaml",
        pod("--model, org/m", ", env: [{name: HF_HOME, value: /data}], volumeMounts: [{mountPath: /data}]")
        + "---\n"
        + pod("--model, org/m", ", env: [{name: HF_HOME, value: /x}], volumeMounts: [{mountPath: /data}]")
        + "---\n"
        + pod("--model, meta-llama/m", ", envFrom: [{secretRef: {name: s}}], volumeMounts: [{mountPath: /data}]"),
        [{}, {"weights_are_downloaded_again": 1}, {}],
    ),
    "a range of releases": (
        "m.py",
        "pip_install('vllm>=0.16,<0.17')\nsubprocess.run(['vllm', 'serve', 'm', '--swap-space', '4'])\n",
        [{"no_effect": 1}],
    ),
    "volumes and a port of a variable's address": (
        "c.yaml",
        compose(service("--model /model", "volumes: ['${DIR:-x}:/model:ro']", "ports: ['${BIND_IP}:8000:8000']"))
        + service("--model org/m", "volumes: ['$HF:/root/.cache/huggingface']", "env_file: e", "ports: ['1:8000']")
        .replace("    command", f"  embed:\n    {IMAGE}\n    command"),
        [{"gpu_limit_differs": 1}] * 2,
    ),
    "one device for four ranks": ("r.sh", f"{RUN} device=0 {IMAGE[7:]} m -tp 4", [{"gpu_limit_differs": 2}]),
    "no shared memory": (
        "r.sh",
        "docker run --gpus all -p 127.0.0.1:8000:8000 vllm/vllm-openai:v0.25.1 m -tp 2",
        [{"no_shared_memory": 1}],
    ),
    "an unknown option": ("r.sh", f"{RUN} all $MORE vllm/vllm-openai:v0.25.1 m -tp 2 --port 9000", [{}]),
    "visible devices": ("r.sh", "CUDA_VISIBLE_DEVICES=0,1 vllm serve m -tp 4", [{"fewer_visible_than_ranks": 2}]),
    "ranks of Ray": ("r.sh", "CUDA_VISIBLE_DEVICES=0,1 vllm serve m -tp 4 --distributed-executor-backend ray", [{}]),
    "another port": ("r.sh", f"{RUN} all vllm/vllm-openai:v0.25.1 m --port 9000", [{"published_port_differs": 1}]),
    "a probe on another port": (
        "p.yaml",
        pod('m, --port, "8080"', ", startupProbe: {httpGet: {path: /health, port: 8000}, failureThreshold: 99}"),
        [{"probe_on_another_port": 2}],
    ),
    "a sidecar listens there": (
        "p.yaml",
        pod(
            'm, --port, "8200"',
            ", startupProbe: {httpGet: {path: /health, port: 8000}, failureThreshold: 99}}, {name: proxy, image: proxy",
        ),
        [{}],
    ),
    "servers of a script": (
        "s.sh",
        "vllm serve m --gpu-memory-utilization 0.3 &\nvllm serve n &\nvllm serve o --port 8001 --swap-space 1",
        [{}, {"port_taken_twice": 2}, {"removed_flag": 1}],
    ),
    "branches": (
        "s.sh",
        f"{SHELL}if [ $IS = 1 ]; then\n  ARGS+=(--port 8)\nelse\n  ARGS+=(--port 9)\nfi\n"
        '[[ -n $L ]] && ARGS+=(--enable-eplb)\nvllm serve m "${ARGS[@]}"',
        [{"balanced_experts_without_experts": 1}],
    ),
    "servers of two branches": (
        "s.sh",
        'CMD="vllm serve m --port 8000"\nif [ "$1" = b ]; then\n  $CMD &\nelse\n  $CMD\nfi\n',
        [{}, {}],
    ),
    "cases": (
        "s.sh",
        "case $1 in\n  a) vllm serve m --port 1 ;;\n  b|c)\n    vllm serve n --swap-space 4\n    ;;\nesac\n",
        [{}, {"removed_flag": 1}],
    ),
    "unknown values": (
        "s.sh",
        "vllm serve <your model> --data-parallel-size $N --data-parallel-size-local 8 --port {{ port }} --seed <seed>",
        [{}],
    ),
    "a template in another document": (
        "p.yaml",
        f"{pod('m')}---\nkind: Secret\nstringData:\n  token: {{{{HF_TOKEN}}}}\n",
        [{}],
    ),
    "a pinned release": (
        "m.py",
        'image = Image().uv_pip_install("vllm==0.16.0")\n@app.function(image=image, gpu="H100:2")\ndef serve():\n'
        '    cmd = ["vllm", "serve", "m", "--swap-space", "8", "-tp", "4"]\n',
        [{"gpu_limit_differs": 2, "no_effect": 1}],
    ),
    "a release by default": (
        "s.sh",
        'V="${V:-0.16.0}"\nuv pip install "vllm==${V}"\nvllm serve m --swap-space 4',
        [{"no_effect": 1}],
    ),
    "a script and a unit in a script": (
        "s.sh",
        "pip install vllm==0.16.0\ncat <<EOF | tee run.sh\n#!/bin/sh\nvllm serve m \\\\\n  --swap-space 4\nEOF\n"
        "cat >vllm.service <<'EOF'\n[Service]\nExecStart=/opt/bin/vllm serve n \\\n  --swap-space 4\nEOF\n",
        [{"no_effect": 1}, {"no_effect": 1, "public_without_a_key": 1}],
    ),
    "a unit on another host": (
        "s.sh",
        "ssh gpu 'bash -s' <<'END'\n  cat >v.service <<'EOF'\n[Service]\nExecStart=/bin/vllm serve n --swap-space 4\n"
        "EOF\nEND\n",
        [{"removed_flag": 1, "public_without_a_key": 1}],
    ),
    "a name of a function": (
        "s.py",
        'def f():\n    flag = "--swap-space"\n    subprocess.run(["vllm", "serve", "m", flag, "4"])\n',
        [{"removed_flag": 1}],
    ),
    "an application of Ray in a ConfigMap": (
        "r.yaml",
        "kind: ConfigMap\ndata:\n  app.py: |\n    from ray.serve.llm import LLMConfig\n"
        "    c = LLMConfig(model_loading_config=dict(model_id='m'), engine_kwargs=dict(swap_space=8))\n",
        [{"removed_flag": 1}],
    ),
    "a build of its own": (
        "r.sh",
        f"{RUN} all aibrix/vllm-openai:v0.11.0-edb0 --model m --swap-space 4 --of-this-build 1",
        [{"unknown_flag": 1, "no_effect": 1}],
    ),
    "vLLM-Omni": ("s.sh", "vllm serve m --omni --deploy-config stages.yaml --swap-space 1", [{"removed_flag": 1}]),
    "two engines": (
        "r.py",
        "from ray.serve.llm import LLMConfig\n"
        "a = LLMConfig(model_loading_config=dict(model_id='a'), engine_kwargs=dict(max_model_len=1024))\n"
        "b = LLMConfig(model_loading_config=dict(model_id='b'), engine_kwargs=dict(swap_space=8))\n",
        [{}, {"removed_flag": 1}],
    ),
    "a --config file": ("c.yaml", "tensor-parallel-size: 2\nmax-num-seqs: 8\n", [{}]),
    "options of bash": ("s.sh", f"{RUN} all vllm-node bash -c -i 'vllm serve m --port 8000'", [{}]),
    "another host": ("s.sh", "vllm serve m -tp 8 --cpu-offload-gb 500", [{}]),
    "a variable": ("s.sh", "VLLM_ALL2ALL_BACKEND=pplx VLLM_OF_OURS=1 vllm serve m", [{"variable_not_read": 1}]),
    "KubeAI": (
        "m.yaml",
        "kind: Model\n"
        "spec: {url: hf://org/m, engine: VLLM, args: [--swap-space=4, -tp=2], resourceProfile: nvidia-gpu-l4:1}",
        [{"removed_flag": 1, "gpu_limit_differs": 2}],
    ),
    "VLLMRuntime": (
        "m.yaml",
        "kind: VLLMRuntime\nspec:\n  model: {modelURL: org/m}\n  vllmConfig: {tensorParallelSize: 2, v1: true}\n"
        "  deploymentConfig: {resources: {gpu: '1'}, image: {name: 'vllm/vllm-openai:v0.25.1'}}\n",
        [{"gpu_limit_differs": 2}],
    ),
    "SkyPilot": (
        "t.sky.yaml",
        'envs: {M: org/m}\nresources: {accelerators: "H100:1"}\nsetup: uv pip install vllm==0.25.1\n'
        "run: |\n  vllm serve $M -tp 2\n",
        [{"gpu_limit_differs": 2}],
    ),
    "nodes of SkyPilot": (
        "t.yaml",
        'resources: {accelerators: "H100:8"}\nnum_nodes: 2\nrun: |\n  if [ "$R" == 0 ]; then\n'
        "    vllm serve m -tp $G -pp 2\n  else\n    sleep infinity\n  fi\n",
        [{}],
    ),
    "Slurm": (
        "j.sbatch",
        "#!/bin/bash\n#SBATCH --gpus-per-node=4\napptainer exec --nv vllm_0.9.2.sif vllm serve m -tp 8",
        [{"gpu_limit_differs": 2}],
    ),
    "Triton": ("model.json", '{"model": "m", "disable_log_requests": true}', [{"removed_flag": 1}]),
    "Beam": ("b.py", "from beam import VLLMArgs\nx = VLLMArgs(model='m', swap_space=4)", [{"removed_flag": 1}]),
    "a notebook": (
        "n.ipynb",
        json.dumps({"cells": [{"cell_type": "code", "source": ["!vllm serve m --swap-space 4\n"]}]}),
        [{"removed_flag": 1}],
    ),
    "a text in Python": (
        "s.py",
        '"""\nvllm serve x --swap-space 4\n"""\nM = "a/b"\ndef f():\n    print("vllm serve y")\n'
        '    run(f"vllm serve {M} --port {port()} --swap-space 4", shell=True)\n',
        [{"removed_flag": 1}],
    ),
    "a quadlet": (
        "v.container",
        f"[Container]\nImage={IMAGE[7:]}\nExec=--model m \\\n  --swap-space 4\nPublishPort=127.0.0.1:80:9000\n"
        "AddDevice=nvidia.com/gpu=all\n",
        [{"removed_flag": 2, "published_port_differs": 1}],
    ),
    "a guide": (
        "g.md",
        f"A\n\n```sh\nvllm serve m\n```\n```yaml\n{pod('m, -tp, 2')}```\n```py\nLLM('m', swap_space=4)\n```\n",
        [{}, {"no_shared_memory": 1}, {"removed_flag": 1}],
    ),
    "a step of CI": ("w.yml", "jobs: {a: {steps: [{run: 'vllm serve m --swap-space 4'}]}}\n", [{"removed_flag": 1}]),
    "a command kept in a variable": (
        "s.sh",
        'P=${P:-8001}\nCMD="vllm serve m --port $P"\nif [ "$A" ]; then\n  CMD="$CMD --swap-space 4"\nfi\nexec $CMD\n',
        [{"removed_flag": 1}],
    ),
    "functions run one after the other": (
        "s.sh",
        "a() {\n  vllm serve m --port 8100 &\n}\nb() {\n  vllm serve n --port 8100 &\n}\na\nb\n",
        [{}, {}],
    ),
    "a guide in YAML": (
        "g.yaml",
        "pages:\n- text: |\n    It isn't hard:\n\n    ```sh\n    vllm serve m --swap-space 4\n    ```\n- text: |\n"
        "    ```sh\n    vllm serve n\n    ```\n",
        [{"removed_flag": 1}, {}],
    ),
    "a guide in a notebook": (
        "n.ipynb",
        json.dumps({"cells": [{"cell_type": "markdown", "source": "\n```sh\nvllm serve m --swap-space 4\n```\n"}]}),
        [{"removed_flag": 1}],
    ),
    "a fence in one line, and line ends of Windows": (
        "g.md",
        "1. ```lmcache_vllm serve m --port 8000```\r\n\r\n```sh\r\nvllm serve m\r\n```\r\n",
        [{}, {}],
    ),
    "flags alone explain": ("g.md", "```sh\n--max-num-seqs 8\n```\n```sh\nvllm serve m\n```\n", [{}]),
    "a release that the guide names": (
        "g.md",
        "`docker pull intel/vllm:0.8.3-xpu`\n\n```sh\nvllm serve m --device xpu --disable-log-requests\n```\n",
        [{}],
    ),
    "Python in a ConfigMap": (
        "c.yaml",
        "kind: ConfigMap\ndata:\n  serve.py: |\n    from vllm import AsyncEngineArgs\n"
        "    args = AsyncEngineArgs(model=m, disable_log_requests=True)\n",
        [{"removed_flag": 1}],
    ),
    "variables of a Python program": (
        "s.py",
        'import os\nfrom vllm import LLM\nos.environ["VLLM_USE_V1"] = "1"\nLLM("m", max_model_len=n)\n',
        [{"variable_not_read": 1}],
    ),
    "a script in Python": (
        "s.py",
        'import x\nRUN = """set -e\nvllm serve m --swap-space 4 &\nwait\n"""\n'
        'p.add_parser("serve", usage="vllm serve [model_tag] [options]")\n',
        [{"removed_flag": 1}],
    ),
    "docker run in parts": (
        "s.py",
        'parts = [\n    "docker run --gpus all --ipc=host",\n    "vllm/vllm-openai:v0.25.1",\n    f"--model {m}",\n'
        '    "--swap-space 4",\n]\nif n:\n    parts.append(f"--max-model-len {n}")\nrun(" ".join(parts))\n',
        [{"removed_flag": 2}],
    ),
    "llmaz": (
        "b.yaml",
        "kind: BackendRuntime\nspec:\n  command: [python3, -m, vllm.entrypoints.openai.api_server]\n"
        "  image: vllm/vllm-openai\n  version: v0.25.1\n  recommendedConfigs:\n"
        "  - {name: default, args: [--model, '{{ .ModelPath }}']}\n"
        "  - {name: draft, args: [--model, '{{ .ModelPath }}', --swap-space, '4']}\n",
        [{}, {"removed_flag": 2}],
    ),
    "Kthena": (
        "b.yaml",
        "kind: ModelBooster\nspec: {backend: {modelURI: 'hf://org/m', workers: [{type: server, pods: 1,"
        " image: 'vllm/vllm-openai:v0.25.1', config: {enforce-eager: '', tensor-parallel-size: 2, swap-space: 4},"
        " resources: {limits: {nvidia.com/gpu: 2}}}]}}\n",
        [{"removed_flag": 2}],
    ),
    "Nomad": (
        "v.nomad.hcl",
        'job "llm" {\n  group "g" {\n    task "chat" {\n      driver = "docker"\n      config {\n'
        '        image = "vllm/vllm-openai:v0.25.1"\n        args = ["--model", "org/m", "-tp", "4",\n'
        '          "--swap-space", "4", "--port", "${NOMAD_PORT_http}"]\n      }\n      env { HF_HOME = "/m" }\n'
        '      resources {\n        device "nvidia/gpu" { count = 2 }\n      }\n    }\n'
        '    task "log" { config { image = "busybox" } }\n  }\n}\n',
        [{"removed_flag": 2, "gpu_limit_differs": 2}],
    ),
    "words for a shell": (
        "p.yaml",
        pod("'--model=org/m', '--swap-space=4'", """, command: [bash, -c, 'vllm serve "$@"', --]"""),
        [{"removed_flag": 2, "model_by_flag": 1, "weights_are_downloaded_again": 1}],
    ),
    "a chart whose settings stand beside the model": (
        "values.yaml",
        "model: {repoId: org/m}\nimage: {repository: vllm/vllm-openai, tag: v0.25.1}\n"
        "vllm: {task: '', servedModelName: m, maxModelLen: 16, extraArgs: [--swap-space, '4']}\n",
        [{"removed_flag": 2}],
    ),
    "a benchmark": ("s.sh", "python3 -m vllm.entrypoints.cli.main bench serve --rate 1\nvllm serve m", [{}]),
    "an overlay of Compose": (
        "c.yaml",
        "services: {v: {build: ./server, entrypoint: [python3, -m, vllm.entrypoints.openai.api_server]}}\n",
        [{}],
    ),
    "a container that is created only": (
        "s.sh",
        f"docker create --name m --gpus all --ipc=host {IMAGE[7:]} --model m --swap-space 4\ndocker start m\n",
        [{"removed_flag": 2}],
    ),
    "PowerShell": (
        "g.md",
        "```powershell\nvllm serve m `\n  --seed 1 `\n  --swap-space 4\n```\n",
        [{"removed_flag": 1}],
    ),
    "several releases in one text": (
        "s.py",
        'OLD = Image("vllm/vllm-openai:v0.8.5")\nNEW = Image("vllm/vllm-openai:v0.20.1").pip_install("vllm==0.7.2")\n'
        'A = ["vllm", "serve", "m", "--no-enable-log-requests"]\n',
        [{}],
    ),
    "a release that the guide installs": (
        "g.md",
        "```sh\npip install vllm==0.9.0\n```\n\n```sh\nvllm serve m --disable-log-requests --swap-space 4\n```\n",
        [{"no_effect": 1}],
    ),
    "a release behind a name": (
        "s.py",
        'V = "0.16.0"\nimage = x.pip_install(f"vllm=={V}")\nA = ["vllm", "serve", "m", "--swap-space", "4"]\n',
        [{"no_effect": 1}],
    ),
    "the image of a chart": (
        "values.yaml",
        "image: {repository: vllm/vllm-openai, tag: v0.25.1}\n"
        "server: {command: [sh, -c], args: [vllm serve m --swap-space 4]}\n"
        "check: {command: [curl, 'http://vllm']}\n",
        [{"removed_flag": 2}],
    ),
    "the JSON of a service": (
        "job.json",
        '{"model": {"containerSpec": {"imageUri": "vllm/vllm-openai:v0.25.1", "args": ["--model", "$(M)",'
        ' "--swap-space", "4"], "env": [{"key": "M", "value": "org/m"}], "ports": [{"containerPort": 8000}]}}}',
        [{"removed_flag": 2}],
    ),
    "arguments of a job": (
        "j.yaml",
        "tasks: [{name: vllm, image: {name: a/b}, command: [sh, -c],"
        " arguments: ['pip install x && vllm serve m --swap-space 4']}]",
        [{"removed_flag": 1}],
    ),
    "a command in a shell in YAML": (
        "c.yaml",
        'server:\n  start: "sh -c \\"warm & T=$(cat /t x) vllm serve m --swap-space 4\\""\n',
        [{"removed_flag": 1}],
    ),
    "variables that are meant for flags": (
        "c.yaml",
        compose(
            service(
                "''\n    entrypoint: sh -c 'vllm serve m --port $$VLLM_SEED'",
                "environment: [VLLM_SWAP_SPACE=4, VLLM_SEED=1, VLLM_OF_OURS=1]",
                GPU % "count: 1",
            )
        ),
        [{"variable_not_read": 1}],
    ),
    "Dynamo": (
        "d.yaml",
        "kind: DynamoGraphDeployment\nspec:\n  components:\n"
        "  - {name: Frontend, podTemplate: {spec: {containers: [{name: main,"
        " image: nvcr.io/nvidia/ai-dynamo/vllm-runtime:x, args: [-m, dynamo.frontend]}]}}}\n"
        "  - name: Decode\n    podTemplate: {spec: {containers: [{name: main, image: nvcr.io/ai-dynamo/vllm-runtime:x,"
        " command: [python3, -m, dynamo.vllm], args: [--model, m, --disaggregation-mode, decode, -tp, '2'],"
        " livenessProbe: {httpGet: {path: /live, port: 9090}}, resources: {limits: {nvidia.com/gpu: 1}}}]}}\n"
        "  - name: Prefill\n    multinode: {nodeCount: 2}\n    podTemplate: {spec: {containers: [{name: main,"
        " command: [python3, -m, dynamo.vllm], args: [--model, m, --swap-space, '4', -tp, '2'],"
        " resources: {limits: {nvidia.com/gpu: 1}}}]}}\n",
        [{"gpu_limit_differs": 2}, {"removed_flag": 1}],
    ),
    "a service of Dynamo's older form": (
        "d.yaml",
        "kind: DynamoGraphDeployment\nspec: {services: {Worker: {extraPodSpec: {mainContainer: {image: 'a/run:1',"
        " command: [sh, -c], args: ['python3 -m dynamo.vllm --model m --is-prefill-worker --swap-space 4']}}}}}\n",
        [{"removed_flag": 1}],
    ),
    "blocks of a template engine": (
        "p.yaml",
        pod("m, -tp, 2").replace("kind", "{{#if a}}\nx: 1\n{{else}}\nx: {{{b}}}\n{{/if}}\n{% if c %}\nkind"),
        [{"no_shared_memory": 1}],
    ),
    "a sidecar that starts first": (
        "p.yaml",
        pod("m").replace("containers", "initContainers").replace("name: vllm", "name: vllm, restartPolicy: Always")
        + "---\n"
        + pod("--swap-space, '4'").replace("containers", "initContainers"),
        [{}],
    ),
    "variables of some program": (
        "runtime.env",
        "MODEL_ID=org/m\nMAX_MODEL_LEN=8x\nGPU_MEMORY_UTILIZATION=0.9\nTENSOR_PARALLEL_SIZE=1\n",
        [{"value_of_wrong_type": 1}],
    ),
    "chips of another kind": (
        "p.yaml",
        pod("m, -tp, 2", ", resources: {limits: {aws.amazon.com/neuroncore: 2}}"),
        [{}],
    ),
    "the program of an image that has one": (
        "Dockerfile",
        f'FROM {IMAGE[7:]}\nCMD ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]\n',
        [{"entry_point_repeated": 2}],
    ),
    "an array that branches add to": (
        "s.sh",
        'cmd=(vllm serve "$M")\nif [ "$A" ]; then cmd+=(--swap-space 4); fi\nexec "${cmd[@]}"\n',
        [{"removed_flag": 1}],
    ),
    "a command in a variable": ("s.sh", 'C="vllm serve \\"$M\\" --swap-space 4"\nstart "$C"\n', [{"removed_flag": 1}]),
    "a value that is empty at first": (
        "s.sh",
        'M=""\nL=""\ncase "$1" in --len) L="$2";; esac\nif [ "$L" ]; then A+=(--max-model-len "$L"); fi\n'
        'vllm serve "$M" "${A[@]}"\n',
        [{}],
    ),
    "a Helm template": (
        "deployment.yaml",
        "{{- if .Values.on }}\n" + pod("--model, '{{ .Values.m }}', --temperature, '1'") + "{{- end }}\n",
        [{"unknown_flag": 2}],
    ),
    "what only looks like a server": (
        "s.sh",
        "vllm serve --help\npython3 -c 'import vllm.entrypoints.openai.api_server'\n"
        "docker run --rm -v /a:/b tools/pull -clean=true vllm/vllm-openai\nvllm serve m --swap-space 4\n",
        [{"removed_flag": 1}],
    ),
    "help in Python": (
        "s.py",
        "import subprocess\nsubprocess.run(['vllm', 'serve', '--help=all'])\n"
        "subprocess.run(['vllm', 'serve', 'm', '--swap-space', '4'])\n",
        [{"removed_flag": 1}],
    ),
    "a placeholder of several words": ("s.sh", "vllm serve [YOUR MODEL or MODEL PATH]\n", [{}]),
    "a parser may be in a variable": (
        "s.sh",
        'if [ -n "$tools" ]; then tool="--enable-auto-tool-choice"; fi\nvllm serve m $tool $extra\n',
        [{}],
    ),
    "the model may be in the file of the container": (
        "values.yaml",
        "image: {repository: a/vllm-x, tag: '1'}\n"
        "command: [bash, -c, 'python patch.py && exec vllm serve --config /etc/c.yaml']\n",
        [{}],
    ),
    "the values of some chart": (
        "values.yaml",
        "llm:\n  image: {repository: docker.io/vllm/vllm-openai, tag: v0.25.1-x86_64}\n  model: m\n"
        "  tensorParallelSize: 2\n  enforceEager: false\n  extraArgs: [--swap-space=4]\n"
        "  resources: {limits: {nvidia.com/gpu: 2}}\n  shmSizeLimit: 2Gi\n",
        [{"removed_flag": 2}],
    ),
    "a command of some other YAML": (
        "template.yml",
        "app:\n  startCmd: >-\n    rm -Rf .venv &&\n    uv run vllm serve ${MODEL}\n    --swap-space 4\n",
        [{"removed_flag": 1}],
    ),
    "a pod without a GPU": (
        "p.yaml",
        pod("m", ", resources: {limits: {cpu: 4, memory: 8Gi}}")
        + "---\n"
        + pod("m, --max-model-len, 1k", ", resources: {limits: {cpu: 4}}", ", runtimeClassName: nvidia")
        + "---\n"
        + pod("m, --max-model-len, 2k", ", resources: {limits: {cpu: 4, xpu.com/x: 1}}"),
        [{"gpu_limit_differs": 1}, {}, {}],
    ),
    "variables that no release reads": (
        "c.yaml",
        compose(
            service("m", "environment: [VLLM_WORKER_USE_NCCL=0]", "ipc: host", GPU % 'device_ids: ["0"]'),
            service("n --port $$VLLM_MY_PORT", "environment: [VLLM_MY_PORT=1]", GPU % 'device_ids: ["1"]'),
        ),
        [{"variable_not_read": 1}, {}],
    ),
    "the context of a model that has another's shape": (
        "s.sh",
        "vllm serve deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --max-model-len 16000\n"
        "vllm serve Qwen/Qwen3Guard-Gen-8B --max-model-len 50000\n",
        [{}, {}],
    ),
    "a list that is added to another": (
        "s.py",
        'cmd = before()\ncmd += ["python3", "-m", "vllm.entrypoints.openai.api_server"]\ncmd += ["--model", m]\n',
        [{}],
    ),
    "the GPU that a text names": (
        "p.yaml",
        "---\n".join(
            pod("m, --dtype, bfloat16", ", resources: {limits: {nvidia.com/gpu: 1}}", f", nodeSelector: {{x: {gpu}}}")
            for gpu in ("nvidia-tesla-t4", "g4dn.xlarge", "g5.xlarge")
        ),
        [{"option_of_another_gpu": 2}, {"option_of_another_gpu": 2}, {}],
    ),
    "the GPU of a task": (
        "s.yaml",
        "resources: {accelerators: {L4: 1}}\nrun: vllm serve Qwen/Qwen2.5-72B-Instruct --max-model-len 4096\n",
        [{"model_does_not_fit": 2}],
    ),
    "what an option needs of NVIDIA's GPUs": (
        "s.yaml",
        "resources: {accelerators: {MI300X: 1}}\nrun: vllm serve m --dtype bfloat16 --quantization fp8\n",
        [{}],
    ),
    "a list called as vLLM's arguments": (
        "values.yaml",
        "image: {vllm: {repository: vllm/vllm-openai, tag: latest}}\n"
        "backend:\n  vllmArgs: ['--model=m', '--swap-space=4']\n",
        [{"removed_flag": 1}],
    ),
    "a file of a chart's engines": (
        "values.yaml",
        "- {name: a, repository: vllm/vllm-openai, tag: v0.8.4, modelURL: m,"
        " vllmConfig: {extraArgs: [--swap-space, '4']}}\n",
        [{"no_effect": 1}],
    ),
    "the release that a Dockerfile builds": (
        "Dockerfile",
        "ARG VLLM_REF=v0.18.0\nFROM python\nRUN git clone https://github.com/vllm-project/vllm\n"
        'CMD ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--swap-space", "4"]\n',
        [{"removed_flag": 2}],
    ),
    "what a guide leaves out": ("g.md", "```bash\nvllm serve m ...\n```\n", [{}]),
    "the container of a custom resource": (
        "r.yaml",
        "apiVersion: ome.io/v1beta1\nkind: ClusterServingRuntime\nspec:\n  engineConfig:\n    runner:\n"
        f"      name: ome\n      {IMAGE}\n      command: [vllm, serve]\n      args: [$(MODEL_PATH), -tp, '2',"
        " --swap-space, '4']\n      volumeMounts: [{name: shm, mountPath: /dev/shm}]\n"
        "---\nkind: ClusterServingRuntime\nspec: {engineConfig: {runner: {name: ome,"
        " image: 'vllm/vllm-openai:v0.9.0.1', command: [python3, -m, vllm.entrypoints.openai.api_server],"
        " args: [--model, $(MODEL_PATH)]}}}\n",
        [{"removed_flag": 2}, {}],
    ),
    "flags of a plugin": (
        "s.sh",
        "ARCTIC_INFERENCE_ENABLED=1 vllm serve m --enable-shift-parallel --ulysses_sequence_parallel_size 8\n",
        [{"unknown_flag": 1}],
    ),
    "a model that KubeAI's own comes before": (
        "m.yaml",
        "kind: Model\nspec: {url: hf://org/m, engine: VLLM, args: ['--model=/m/x', --task=embed, --swap-space=4]}",
        [{"removed_flag": 1}],
    ),
    "a removed flag in short": (
        "s.sh",
        f"{RUN} all {IMAGE[7:]} --model m --disable-log-request\n"
        "docker run --gpus all --ipc=host vllm/vllm-openai:v0.9.0 --model m --disable-log-request\n",
        [{"removed_flag": 2}, {}],
    ),
    "an InferenceService and its ServingRuntime are one server": (
        "k.yaml",
        "kind: ServingRuntime\nmetadata: {name: r}\nspec: {containers: [{name: c, image: 'vllm/vllm-openai:v0.25.1',"
        " args: ['--model=/mnt/models', -tp, '4'], resources: {limits: {nvidia.com/gpu: 1}}}]}\n---\n"
        "kind: InferenceService\nmetadata: {name: s}\nspec: {predictor: {model: {modelFormat: {name: vLLM}, runtime: r,"
        " args: [--swap-space=4], resources: {limits: {nvidia.com/gpu: 4}}, storageUri: 's3://b'}}}\n",
        [{"removed_flag": 2, "no_shared_memory": 1}],
    ),
    "LLMKube": (
        "k.yaml",
        "kind: Model\nmetadata: {name: q}\nspec: {source: org/m}\n---\nkind: InferenceService\nspec: {modelRef: q,"
        " runtime: vllm, image: 'vllm/vllm-openai:v0.25.1', vllmConfig: {swapSpace: 4, maxModelLen: 1024}}\n",
        [{"removed_flag": 2}],
    ),
    "HyperPod": (
        "h.yaml",
        "kind: InferenceEndpointConfig\nspec: {worker: {image: 'vllm/vllm-openai:v0.25.1', args: [--model, m,"
        " --swap-space, '4']}}\n",
        [{"removed_flag": 2}],
    ),
    "a composite action": (
        "action.yml",
        "runs:\n  using: composite\n  steps:\n  - shell: bash\n    run: |\n      docker run --gpus all --ipc=host \\\n"
        "        vllm/vllm-openai:v0.25.1 \\\n        --model m --swap-space 4\n",
        [{"removed_flag": 2}],
    ),
    "a guide in reStructuredText": (
        "g.rst",
        "Title\n=====\n\nIt isn't.\n\n.. code-block:: bash\n\n   vllm serve m \\\n     --swap-space 4\n\nMore.\n",
        [{"removed_flag": 1}],
    ),
    "a guide with parts of JSX": (
        "g.mdx",
        "import X from 'x'\n\n```sh\nvllm serve m --swap-space 4\n```\n",
        [{"removed_flag": 1}],
    ),
    "a stray quotation mark at the end": (
        "s.sh",
        'vllm serve m --swap-space 4\n\n-q ${Q} --dtype x"\n\necho done\n',
        [{"removed_flag": 1}],
    ),
    "values with a model of several keys": (
        "values.yaml",
        "vllm: {image: {repository: vllm/vllm-openai, tag: v0.25.1}, model: {name: m, maxModelLen: 16},"
        " enableChunkedPrefill: true, swapSpace: 4}\n",
        [{"removed_flag": 2}],
    ),
    "a tag that names no release": (
        "c.yaml",
        "kind: Pod\nspec: {containers: [{name: v, image: 'vllm/vllm-openai:gptoss', args: [m], env: [{name:"
        " VLLM_ATTENTION_BACKEND, value: X}]}, {name: w, image: 'opea/vllm-gaudi:1.2', args: [m], env: [{name:"
        " VLLM_SKIP_WARMUP, value: 'true'}]}]}\n",
        [{}, {}],
    ),
    "a Deployment behind a LoadBalancer": (
        "d.yaml",
        pod("m", ", ports: [{containerPort: 8000}], env: [{name: VLLM_PORT, value: '8000'}]").replace(
            "template: {", "template: {metadata: {labels: {a: b}}, "
        )
        + "---\nkind: Service\nspec: {type: LoadBalancer, selector: {a: b}}\n---\n"
        + pod(
            "org/m/tree/main",
            ", ports: [{containerPort: 8000}], startupProbe: {httpGet: {path: /health, port: 8000},"
            " failureThreshold: 99}",
        ),
        [
            {"no_readiness_probe": 1, "public_without_a_key": 1, "internal_port_as_port": 1, "gpu_limit_differs": 1},
            {"page_as_model": 2, "gpu_limit_differs": 1},
        ],
    ),
    "arguments in a variable are no model": (
        "s.sh",
        "docker exec -d x bash -c \\\n  'vllm serve ${SERVE_ARGS_STR} --swap-space 4'\n",
        [{"removed_flag": 1}],
    ),
    "a flag on a line of its own": (
        "s.sh",
        "vllm serve m --seed 1 \\\n  # --seed 2 \\\n  --max-model-len 8k\n\nvllm serve n\n--port 1\nls --all\n",
        [{"continuation_lost": 1}, {"continuation_lost": 1}],
    ),
    "an image without a release": (
        "c.yaml",
        compose(service("--model m --enforce-eager", "ipc: host", GPU % "count: 1")).replace("v0.25.1", "latest"),
        [{"image_not_pinned": 1}],
    ),
    "a probe that leaves little time": (
        "d.yaml",
        pod("m", ", livenessProbe: {httpGet: {path: /health, port: 8000}, initialDelaySeconds: 60}"),
        [{"probe_may_kill_the_start": 1}],
    ),
    "a patch of a pod": (
        "d.yaml",
        pod("m", ", volumeMounts: [{name: a, mountPath: /a}]").replace("args: [m]", "env: [{name: A, value: b}]")
        + "---\n"
        + pod("m"),
        [{}],
    ),
    "a cache that ends with the pod": (
        "p.yaml",
        pod(
            "--model=org/m",
            ", volumeMounts: [{name: c, mountPath: /root/.cache/huggingface}]",
            ", volumes: [{name: c, emptyDir: {}}]",
        ),
        [{"weights_are_downloaded_again": 1}],
    ),
    "a cache that stays": (
        "p.yaml",
        pod(
            "--model=org/m",
            ", volumeMounts: [{name: c, mountPath: /root/.cache/huggingface}]",
            ", volumes: [{name: c, persistentVolumeClaim: {claimName: c}}]",
        ),
        [{}],
    ),
    "all GPUs for two servers": (
        "c.yaml",
        compose(service("--model m", GPU % "count: all"), service("--model n", GPU % "count: all")),
        [{}, {"gpu_taken_twice": 2}],
    ),
    "all GPUs, and a variable chooses": (
        "c.yaml",
        compose(
            service("--model m", GPU % "count: all", "environment: [CUDA_VISIBLE_DEVICES=$A]"),
            service("--model n", GPU % "count: all", "environment: [CUDA_VISIBLE_DEVICES=$B]"),
        ),
        [{}, {}],
    ),
    "commands to choose from": (
        "g.md",
        f"```bash\n{RUN} all -d vllm/vllm-openai:v0.25.1 /m\n{RUN} all -d vllm/vllm-openai:v0.25.1 /n\n```\n",
        [{"model_not_in_a_volume": 1}, {"model_not_in_a_volume": 1}],
    ),
    "the host's network": (
        "r.sh",
        "docker run --gpus all --network host -v /m:/m vllm/vllm-openai:v0.25.1 --model /m\n"
        "docker run --gpus all --network host -v /m:/m vllm/vllm-openai:v0.25.1 --model /m --host 127.0.0.1\n",
        [{"public_without_a_key": 1}, {}],
    ),
    "a unit for everybody": (
        "v.service",
        "[Service]\nExecStart=/opt/bin/vllm serve /m --host 0.0.0.0\n",
        [{"public_without_a_key": 1}],
    ),
    "a unit with a file of variables": (
        "v.service",
        "[Service]\nEnvironmentFile=/etc/vllm\nExecStart=/opt/bin/vllm serve /m --host 0.0.0.0\n",
        [{}],
    ),
    "a cloud's port": (
        "s.yaml",
        "resources:\n  accelerators: L4:1\n  ports: 8000\nrun: |\n  vllm serve google/gemma-2-2b\n",
        [{"public_without_a_key": 1, "gated_model_without_a_token": 1}],
    ),
    "a token of the host": (
        "c.yaml",
        compose(
            service("--model google/gemma-2-2b", GPU % "device_ids: ['0']", "environment: [HF_TOKEN]"),
            service("--model google/gemma-2-2b", GPU % "device_ids: ['1']", "environment: {HF_TOKEN: }"),
            service("--model google/gemma-2-2b", GPU % "device_ids: ['2']"),
        ),
        [{AGAIN: 1}, {AGAIN: 1}, {AGAIN: 1, "gated_model_without_a_token": 1}],
    ),
    "a token of a secret": (
        "p.yaml",
        pod("--model, google/gemma-2-2b", ", env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: a, key: b}}}]"),
        [{AGAIN: 1}],
    ),
    "a cloud's port with secrets": (
        "s.yaml",
        "resources:\n  accelerators: L4:1\n  ports: 8000\nsecrets: {HF_TOKEN: null, VLLM_API_KEY: null}\n"
        "run: |\n  vllm serve google/gemma-2-2b\n",
        [{}],
    ),
    "a function on the net": (
        "m.py",
        "import subprocess\nimport modal\napp = modal.App()\n\n@app.function(gpu='H100')\n@modal.web_server(8000)\n"
        "def serve():\n    subprocess.Popen('vllm serve /m', shell=True)\n",
        [{"public_without_a_key": 1}],
    ),
    "a job's image": (
        "j.sbatch",
        "#!/bin/bash\n#SBATCH --gpus=1\napptainer pull docker://vllm/vllm-openai:latest\n"
        "apptainer exec --nv vllm.sif vllm serve /m\n",
        [{"image_not_pinned": 1}],
    ),
    "the pods of a RayService": (
        "r.yaml",
        "kind: RayService\nspec:\n  serveConfigV2: |\n    applications:\n    - args:\n        llm_configs:\n"
        "        - model_loading_config: {model_id: m, model_source: org/m}\n"
        "          engine_kwargs: {tensor_parallel_size: 2}\n"
        "  rayClusterConfig:\n    workerGroupSpecs:\n"
        "    - template: {spec: {containers: [{image: 'rayproject/ray-llm:2.52.0'}]}}\n",
        [{"weights_are_downloaded_again": 1}],
    ),
    "a Service of another namespace": (
        "p.yaml",
        "kind: Deployment\nmetadata: {namespace: a}\n"
        + pod("--model=m").partition("\n")[2]
        + "---\nkind: Service\nmetadata: {name: vllm, namespace: b}\nspec: {selector: {app: x}}\n"
        + "---\nkind: Service\nmetadata: {name: vllm, namespace: a}\nspec: {selector: {app: x}, clusterIP: None}\n",
        [{}],
    ),
    "the path of another container's port": (
        "p.yaml",
        pod("--model=m", ", livenessProbe: {httpGet: {path: /healthz, port: 9000}, initialDelaySeconds: 600}"),
        [{"probe_on_another_port": 2}],
    ),
    "a key of another flag": (
        "s.sh",
        "docker run --gpus all vllm/vllm-openai:v0.11.0 --model m -O.attention_backend=A -O.cudagraph_mode=NONE",
        [{"no_such_key": 1}],  # it ignores the key
    ),
    "a key of another flag, refused": (
        "s.sh", "docker run --gpus all vllm/vllm-openai:v0.20.2 --model m"
        " --compilation-config.attention_backend=A", [{"no_such_key": 2}]
    ),
    "a guide installs": ("g.md", "```bash\npip install vllm\nvllm serve /m\n```\n", [{}]),
    "a guide sets up a service": (
        "g.md",
        "```bash\npip install -U vllm\nvllm serve /m\nsystemctl enable vllm\nvllm serve /n\n```\n",
        [{"vllm_not_pinned": 1}, {}],
    ),
    "a pinned installation": ("s.sh", "pip install torch 'vllm==0.25.1'\nvllm serve /m\n", [{}]),
    "a cell that is no Python": (
        "n.ipynb",
        json.dumps(
            {
                "cells": [
                    {"cell_type": "code", "source": text}
                    for text in (
                        "if 1:\n  ! pip install vllm\n%cd x",
                        "this is no Python",
                        "from vllm import LLM\nLLM('m', swap_space=4)",
                        "%%bash\nvllm serve n --swap-space 4",
                    )
                ]
            }
        ),
        [{"removed_flag": 1, "vllm_not_pinned": 1}, {"removed_flag": 1}],
    ),
    "a command in a text": (
        "s.sh",
        'CMD="$ENV \\\n A=1 vllm serve m \\\n --swap-space 4"\neval "$CMD &"\n',
        [{"removed_flag": 1}],
    ),
    "a command and its args in Python": (
        "s.py",
        "a_command = ['python3', '-m', 'vllm.entrypoints.api_server']\na_args = ['--model=m', '--swap-space=4']\n",
        [{"removed_flag": 1, "server_removed": 1}],
    ),
    "variables of Ray's runtime_env": (
        "s.py",
        "from ray.serve.llm import LLMConfig\nLLMConfig(model_loading_config={'model_id': 'm'},"
        " runtime_env=dict(env_vars={'VLLM_ALL2ALL_BACKEND': 'pplx'}))\n",
        [{"variable_not_read": 1}],
    ),
    "arguments as a mapping": (
        "p.yaml",
        "launch:\n  image: vllm/vllm-openai:v0.25.1\n  args: {--model: m, --swap-space: 4, --seed: 1}\n",
        [{"removed_flag": 2}],
    ),
    "a chart whose image stands elsewhere": (
        "values.yaml",
        "app: {name: v, image: 'vllm/vllm-openai:v0.25.1'}\nargs: [--model, m, --swap-space, '4']\n",
        [{"removed_flag": 2}],
    ),
    "a recipe of srt-slurm": (
        "r.yaml",
        "model: {path: m, container: 'vllm/vllm-openai:v0.25.1'}\nbackend:\n  type: vllm\n  prefill_environment:"
        " {VLLM_USE_V1: '1'}\n  vllm_config:\n    prefill: {max-model-len: 8192}\n"
        "    decode: {swap-space: 4, dyn-tool-call-parser: x}\n",
        [{"variable_not_read": 1}, {"removed_flag": 2}],
    ),
    "a runtime and its service in two blocks": (
        "g.md",
        "```yaml\nkind: ServingRuntime\nmetadata: {name: r}\nspec: {containers: [{image: 'vllm/vllm-openai:v0.25.1',"
        " args: [--model, /mnt/models]}]}\n```\n```yaml\nkind: InferenceService\nspec:\n  predictor:\n    model:\n"
        "      runtime: r\n      args: [--swap-space, '4']\n```\n",
        [{"removed_flag": 2}],
    ),
    "the default of a variable": (
        "s.sh",
        "docker run --gpus device=0 --ipc=host vllm/vllm-openai:v0.25.1 --model m -tp ${TP:-2} --dtype"
        " ${DTYPE:-float15}\n",
        [{"not_a_choice": 1, "gpu_limit_differs": 1}],
    ),
    "a variable that has a default and is set": (
        "s.sh",
        "export TP=1\ndocker run --gpus device=0 --ipc=host vllm/vllm-openai:v0.25.1 --model m -tp ${TP:-2} $MORE"
        " ${X:-}\n",
        [{}],
    ),
    "a number that the environment sets, in Python": (
        "s.py",
        'import os\nfrom vllm import LLM\nN = int(os.environ.get("N", "0"))\n'
        'LLM(model=os.getenv("M", "m"), max_num_seqs=N, tensor_parallel_size=int(os.environ["TP"]))\n'
        'LLM(model="m", max_num_seqs=int(os.environ.get("S", 64)))\nLLM(model="m", max_num_seqs=0)\n',
        [{"value_out_of_range": 1}, {}, {"value_out_of_range": 2}],
    ),
    "Modal's GPUs in a list, by a format": (
        "s.py",
        'import modal, subprocess\nN = 2\nFAST = False\n'
        'image = modal.Image.debian_slim().pip_install("vllm==0.25.1").env({"VLLM_API_KEY": "$K"})\n'
        '@app.function(image=image, gpu=["H100!"])\ndef a():\n'
        '    subprocess.run(["vllm", "serve", "m", "--tensor-parallel-size", str(N)])\n'
        '@app.function(image=image, gpu=f"H100:{N}")\ndef b():\n'
        '    cmd = ["vllm", "serve", "m", "--tensor-parallel-size", str(N)]\n'
        '    cmd += ["--swap-space=4" if FAST else "--enforce-eager"]\n    if FAST:\n'
        '        cmd += ["--swap-space", "4"]\n    subprocess.run(cmd)\n',
        [{"gpu_limit_differs": 2}, {}],
    ),
    "the variables of two images of Modal": (
        "s.py",
        'import modal, subprocess\na = modal.Image.debian_slim().pip_install("vllm==0.25.1").env({"VLLM_API_KEY":'
        ' "$K"})\n'
        'b = modal.Image.debian_slim().env({"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_API_KEY": "$K"})\n'
        '@app.function(image=a, gpu="H100")\ndef one():\n    subprocess.run(["vllm", "serve", "m"])\n'
        '@app.function(image=b, gpu="H100")\ndef two():\n    subprocess.run(["vllm", "serve", "n"])\n',
        [{}, {"longer_context_allowed": 1}],
    ),
    "a variable of one command": (
        "s.sh",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve m --port 1 &\nvllm serve n --port 2 &\n"
        "export VLLM_ALLOW_LONG_MAX_MODEL_LEN=1\nvllm serve o --port 3\n",
        [{"longer_context_allowed": 1}, {}, {"longer_context_allowed": 1}],
    ),
    "the variables of a ConfigMap": (
        "p.yaml",
        pod("m").rstrip() + "\n---\nkind: ConfigMap\nmetadata: {name: c}\n"
        "data: {VLLM_ALLOW_LONG_MAX_MODEL_LEN: '1'}\n---\n"
        + pod("m", ", envFrom: [{configMapRef: {name: c}}]"),
        [{}, {"longer_context_allowed": 1}],
    ),
    "engines of other libraries in a guide": (
        "g.md",
        "```python\nfrom tensorrt_llm import LLM\nllm = LLM(model='m', kv_cache_free_gpu_mem_fraction=0.9)\n```\n"
        "```python\nllm = LLM(model='m', swap_space=4)\n```\n```bash\nvllm serve m --swap-space 4\n```\n",
        [{"removed_flag": 1}],
    ),
    "an engine of another library": (
        "s.py",
        "import sglang\nfrom vllm import LLM\nsglang.LLM(model='m', swap_space=4)\nLLM(model='m', swap_space=4)\n",
        [{"removed_flag": 1}],
    ),
    "a code block by its indentation": (
        "g.md",
        "Start it:\n\n    vllm serve m \\\n      --swap-space 4\n\nand wait.\n  vllm serve n --swap-space 4\n",
        [{"removed_flag": 1}],
    ),
    "programs of Supervisor": (
        "s.conf",
        "[program:a]\ncommand=vllm serve m --swap-space 4\nautostart=true\n[program:b]\ncommand=nginx\n"
        '[program:c]\nenvironment=VLLM_USE_V1="1",A="b"\ncommand=vllm serve n\n  --port %(ENV_PORT)s\n',
        [{"removed_flag": 1}, {"variable_not_read": 1}],
    ),
    "a Truss": (
        "config.yaml",
        "model_name: t\nbase_image: {image: 'vllm/vllm-openai:v0.25.1'}\ndocker_server:\n"
        "  start_command: vllm serve m -tp 2"
        " --swap-space 4\nresources: {accelerator: 'H100:1', use_gpu: true}\n",
        [{"removed_flag": 2, "gpu_limit_differs": 2}],
    ),
    "the image and the GPUs of a SkyPilot task": (
        "s.yaml",
        "resources: {image_id: 'docker:vllm/vllm-openai:v0.25.1', accelerators: 'H200:8'}\nenvs: {D: half}\nrun: |\n"
        "  N=${SKYPILOT_NUM_GPUS_PER_NODE:-1}\n  T=${D:-float15}\n  vllm serve m -tp $N --dtype $T --swap-space 4\n",
        [{"removed_flag": 2}],
    ),
    "several nodes by Ray": (
        "s.sh",
        "export CUDA_VISIBLE_DEVICES=0,1\nray start --head\nvllm serve m -tp 2 -pp 2\n",
        [{}],
    ),
    "a condition within a line": (
        "d.yaml",
        "kind: Deployment\nmetadata:\n  name: {{ .Release.Name }}\nspec:\n  template:\n    spec:\n"
        "      containers:\n      - name: v\n"
        "        image: vllm/vllm-openai:v0.25.1\n        command: [sh, -c]\n        args:\n        - vllm serve m"
        " {{ if .Values.s }}--swap-space {{ .Values.s }}{{ end }} --dtype {{ if .Values.h }}half{{ else }}auto{{"
        " end }}\n",
        [{"removed_flag": 2}],
    ),
    "Jinja in a ConfigMap": (
        "c.yaml",
        "kind: ConfigMap\nmetadata: {name: c}\ndata:\n  run.sh: |\n    vllm serve m \\\n"
        "    {% if tp > 1 %}-tp 2 {% endif %}\\\n      --swap-space 4\n",
        [{"removed_flag": 1}],
    ),
    "probes of a template": (
        "d.yaml",
        "kind: Deployment\nspec:\n  template:\n    spec:\n      containers:\n      - name: v\n"
        "        image: vllm/vllm-openai:v0.25.1\n"
        "        args: [--model, m]\n        ports: [{containerPort: 8000}]\n        {{- with .Values.p }}\n"
        "        readinessProbe:\n"
        "          {{- toYaml . | nindent 10 }}\n        {{- end }}\n",
        [{}],
    ),
    "values of adapters": (
        "values.yaml",
        "vllm: {model: org/m, maxLoraRank: 128, maxModelLen: 8192}\n"
        "image: {repository: vllm/vllm-openai, tag: v0.25.1}\n",
        [{}],
    ),
    "a Dockerfile that leaves a secret": (
        "Dockerfile",
        "FROM vllm/vllm-openai:v0.25.1\nARG HF_TOKEN\nENV HF_TOKEN=$HF_TOKEN\n",
        [{"secret_in_the_image": 1}],
    ),
    "a model larger than any GPU": (
        "s.sh",
        "vllm serve deepseek-ai/DeepSeek-V3 --max-model-len 8192\nvllm serve deepseek-ai/DeepSeek-V3 -tp 8 -tp 8\n"
        "vllm serve deepseek-ai/DeepSeek-V3 $ARGS\nvllm serve deepseek-ai/DeepSeek-V3 -tp $TP\n"
        "vllm serve meta-llama/Llama-3.1-70B-Instruct\nVLLM_CPU_KVCACHE_SPACE=40 vllm serve deepseek-ai/DeepSeek-V3\n",
        [{"model_does_not_fit": 2}, {}, {}, {}, {}, {}],
    ),
    "a guide to a model larger than any GPU": (
        "g.md",
        "```bash\nvllm serve deepseek-ai/DeepSeek-V3\n```\n",
        [{"model_does_not_fit": 1}],
    ),
    "values of a chart for a model larger than any GPU": (
        "values.yaml",
        "model: {name: deepseek-ai/DeepSeek-V3}\nimage: {repository: vllm/vllm-openai, tag: v0.25.1}\n"
        "vllm: {maxModelLen: 8192, maxNumSeqs: 8}\n",
        [{}],
    ),
    "a comment of Jinja beside YAML": (
        "m.j2",
        "{# builds a vLLM serve command with arguments #}\n{% macro a() %}\nkind: x\n"
        "vllm serve m --swap-space 4\n{% endmacro %}\n",
        [{"removed_flag": 1}],
    ),
    "a model whose name has no size": (
        "p.yaml",
        pod(
            "deepseek-ai/DeepSeek-V3, -tp, '8'",
            ", startupProbe: {httpGet: {path: /health, port: 8000}, periodSeconds: 10, failureThreshold: 30}"
            ", resources: {limits: {nvidia.com/gpu: 8}}, volumeMounts: [{name: shm, mountPath: /dev/shm},"
            " {name: c, mountPath: /root/.cache/huggingface}]",
        ),
        [{"probe_kills_the_start": 1}],
    ),
    "kernels of a GPU without Marlin": (
        "m.yaml",
        pod("m, --quantization, awq", "", ", nodeSelector: {accelerator: nvidia-gtx-2080ti}").replace("0.25.1", "0.11.0"),  # noqa: E501
        [{}],
    ),
    "kernels of a GPU with Marlin": (
        "m.yaml",
        pod("m, --quantization, awq", "", ", nodeSelector: {accelerator: nvidia-l4}").replace("0.25.1", "0.11.0"),
        [{"slower_kernels": 1}],
    ),
    "the key of vLLM's examples": ("s.sh", "vllm serve m --api-key token-abc123\n", [{"key_in_the_text": 1}]),
    "the key of vLLM's examples in a guide": ("g.md", "```\nvllm serve m --api-key token-abc123\n```\n", [{}]),
    "a wheel with a first release alone": (
        "s.sh",
        "pip install 'vllm>=0.6.0' torch\nvllm serve m\n",
        [{"vllm_not_pinned": 1}],
    ),
    "a wheel with a last release": ("s.sh", "pip install 'vllm>=0.6.0,<0.7'\nvllm serve m\n", [{}]),
    "a chat template is no chart": (
        "c.yaml",
        compose(
            service(
                ">\n      --model m -tp 2 --chat-template '{%- if a -%}{{- a[\"b\"] if c else d -}}{%- else -%}{%- endif -%}'",  # noqa: E501
                GPU % "count: 2",
            )
        ),
        [{"no_shared_memory": 1}],
    ),
    "a web server on another method": (
        "m.py",
        "import modal\n@app.cls(gpu='L4')\nclass Server:\n    @modal.enter()\n    def start(self):\n"
        "        subprocess.Popen(['vllm', 'serve', 'm'])\n    @modal.web_server(8000)\n    def serve(self):\n        pass\n",  # noqa: E501
        [{"public_without_a_key": 1}],
    ),
    "calls of a function in branches": (
        "s.sh",
        CALLED % ("case $1 in\na)", "0.9 64", ";;\nb)", "0.8 32", ";;\nc)", "0.9 64", ";;\nesac"),
        [{}, {}],
    ),
    "calls of a function one after the other": (
        "s.sh",
        CALLED % ("", "0.9 64", "", "0.8 32", "", "0.9 64", ""),
        [{}, {"gpu_taken_twice": 2}, {"gpu_taken_twice": 2}],
    ),
    "an array that is assigned anew": (
        "s.sh",
        "A=(vllm serve m --swap-space 4)\nA=(vllm serve n)\n\"${A[@]}\"\n",
        [{}],
    ),
    "an array that ran before it is assigned anew": (
        "s.sh",
        "A=(vllm serve m --swap-space 4)\n\"${A[@]}\"\nA=(vllm serve n)\n\"${A[@]}\"\n",
        [{"removed_flag": 1}, {}],
    ),
    "services of one profile": (
        "c.yaml",
        compose(*[service(f"--model m --max-model-len {k}k", "ipc: host", "profiles: [x]", FIRST) for k in (1, 2)]),
        [{}, {"gpu_taken_twice": 2}],
    ),
    "services of different profiles": (
        "c.yaml",
        compose(*[service("--model m --max-model-len 1k", "ipc: host", f"profiles: [{k}]", FIRST) for k in "ab"]),
        [{}, {}],
    ),
    "a service of a profile without a GPU": (
        "c.yaml",
        compose(service("--model m", "profiles: [gpu]", "ports: ['127.0.0.1:8000:8000']")),
        [{"gpu_limit_differs": 1}],
    ),
    "a service written twice": (
        "c.yaml",
        compose(service("--model m", FIRST)) + f"  # again\n  chat:\n    {IMAGE}\n    command: n\n    gpus: all\n",
        [{"service_written_twice": 2}],
    ),
    "a service that is called as a key of another": (
        "c.yaml",
        compose(service("--model m", FIRST, "labels:", "  chat: x")) + "  other:\n    labels:\n      chat: y\n",
        [{}],
    ),
    "a token as a default": (
        "s.sh",
        'export HF_TOKEN="${HF_TOKEN:-hf_aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH}"\n'
        'exec apptainer exec --env HF_TOKEN="$HF_TOKEN" v.sif vllm serve m\n',
        [{"key_in_the_text": 1}],
    ),
    "a placeholder as a default": ("s.sh", 'export HF_TOKEN="${HF_TOKEN:-hf_your_token_here}"\nvllm serve m\n', [{}]),
    "a key that only begins with local": ("s.sh", "vllm serve m --api-key local-qwen-key\n", [{"key_in_the_text": 1}]),
    "a key for local use": ("s.sh", "vllm serve m --api-key local-dev\n", [{}]),
    "a unit without a host": ("v.service", "[Service]\nExecStart=/b/vllm serve m\n", [{"public_without_a_key": 1}]),
    "a unit for its own host": ("v.service", "[Service]\nExecStart=/b/vllm serve m --host 127.0.0.1\n", [{}]),
    "the tag of Intel's image": (
        "s.sh",
        f"{RUN} all intel/vllm:0.25.1-xpu --model m --swap-space 4\n",
        [{"removed_flag": 2}],
    ),
    "an unfinished line": ("s.sh", "vllm serve m \\\n  --enforce-eager \\\n", [{}]),
}  # fmt: skip


LEVELS = {"error": 2, "warning": 1}


def judged(file: Path, only: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run([str(file)], LintOptions(only=only), as_json=True)[0])["launches"]
    return found


@pytest.mark.slow
def test_every_server_of_a_file_is_judged_by_what_the_file_shows(tmp_path: Path) -> None:
    wrong = {}
    for at, (case, (name, text, expected)) in enumerate(TABLE.items()):
        file = tmp_path / str(at) / name  # alone: a project's files name a release
        file.parent.mkdir()
        file.write_text(text)
        findings = [found["findings"] for found in judged(file)]
        levels = [{each["rule"]: LEVELS[each["severity"]] for each in each_server} for each_server in findings]
        wrong |= {case: levels} if levels != expected else {}
    assert not wrong


POLICY = Path(__file__).parents[2] / "deploy" / "admission-policy.yaml"
RULES_OF_POLICY = ("gpu_limit_differs", "no_shared_memory", "probe_kills_the_start")
SHM = ", volumeMounts: [{name: shm, mountPath: /dev/shm}]"
PODS = (
    pod("m, -tp, '2'", ", resources: {limits: {nvidia.com/gpu: 1}}" + SHM),
    pod("m, --tensor-parallel-size=2", ", resources: {limits: {nvidia.com/gpu: 2}}" + SHM),
    pod("m, --tensor-parallel-size, '16', --nnodes, '2'", ", resources: {limits: {nvidia.com/gpu: '8'}}" + SHM),
    pod("m, -tp, '2'", ", resources: {limits: {nvidia.com/gpu: 2}}"),
    pod("m, -tp, '2'", "", ", hostIPC: true"),
    pod("m", ", livenessProbe: {httpGet: {path: /health, port: 8000}}"),
    pod("m", ", livenessProbe: {httpGet: {path: /health, port: 8000}, initialDelaySeconds: 40}"),
    pod("m", ", livenessProbe: {periodSeconds: 5}, startupProbe: {failureThreshold: 90}"),
)


def test_the_admission_policy_names_rules_of_lint() -> None:
    policy, binding = yaml.safe_load_all(POLICY.read_text())
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    named = [message["message"].rpartition("diag explain ")[2].rstrip(")") for message in policy["spec"]["validations"]]
    assert tuple(named) == RULES_OF_POLICY


def test_the_admission_policy_refuses_what_lint_finds(tmp_path: Path) -> None:
    celpy = pytest.importorskip("celpy")
    functions = {
        "join": lambda words, by: celpy.celtypes.StringType(str(by).join(map(str, words))),
        "find": lambda text, what: celpy.celtypes.StringType((re.search(str(what), text) or [""])[0]),
    }
    spec = next(yaml.safe_load_all(POLICY.read_text()))["spec"]

    def value(expression: str, **known: Any) -> Any:
        environment = celpy.Environment()
        return environment.program(environment.compile(expression), functions=functions).evaluate(known)

    for number, text in enumerate(PODS):
        known = {"object": celpy.json_to_cel(yaml.safe_load(text)), "variables": celpy.json_to_cel({})}
        for variable in spec["variables"]:
            known["variables"][celpy.celtypes.StringType(variable["name"])] = value(variable["expression"], **known)
        refused = {
            rule
            for rule, check in zip(RULES_OF_POLICY, spec["validations"], strict=True)
            if not value(check["expression"], **known)
        }
        (tmp_path / "p.yaml").write_text(text)
        assert refused == {each["rule"] for each in judged(tmp_path / "p.yaml")[0]["findings"]} & {*RULES_OF_POLICY}, (
            number
        )


REPOSITORY = compose(
    service("--model m --max-model-len 1k -tp 2", "ipc: host", GPU % "count: 1"),
    "    # diag: ignore removed_flag the flag is that of a patched build\n"
    + service(
        ">\n      --model n\n      --swap-space 4\n      --num-scheduler-steps 8",
        "ipc: host",
        GPU % 'device_ids: ["1"]',
    ),
)


def test_a_comment_with_a_reason_drops_the_findings_of_its_server(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(REPOSITORY)
    assert [found["ignored"] for found in judged(file)] == [{}, {"removed_flag": 2}]
    file.write_text("# diag: ignore gpu_limit_differs, one GPU is simulated\n" + REPOSITORY)
    assert [found["ignored"] for found in judged(file)] == [{"gpu_limit_differs": 1}, {"removed_flag": 2}]
    for comment, why in (("removed_flag", "has no reason"), ("no_such_rule it is ours", "no rule is called")):
        file.write_text(compose(service("--model n --swap-space 4", "ipc: host", f"# diag: ignore {comment}")))
        (found,) = judged(file)
        assert (found["ignored"], found["findings"][0]["rule"]) == ({}, "removed_flag")
        assert any(why in note for note in found["not_checked"])


def test_a_finding_has_the_line_of_its_flag(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(REPOSITORY.replace("# diag", "# "))
    lines = [each["line"] for found in judged(tmp_path / "c.yaml") for each in found["findings"]]
    assert lines == [2, 12, 13]


def formatted(file: Path, form: str) -> str:
    return run([str(file)], LintOptions(form=form), as_json=False)[0]


def test_formats_for_ci_name_file_line_and_rule(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(REPOSITORY.replace("# diag", "# "))
    first, second, _ = formatted(file, "github").splitlines()
    assert first.startswith(f"::error file={file},line=2,title=diag%3A gpu_limit_differs::The container has 1 GPU")
    assert second.startswith(f"::error file={file},line=12,title=diag%3A removed_flag::--swap-space was removed")
    suite = ElementTree.fromstring(formatted(file, "junit"))[0]
    assert (suite.get("tests"), suite.get("failures")) == ("2", "2")
    assert [[part.get("type") for part in case] for case in suite] == [["gpu_limit_differs"], ["removed_flag"] * 2]
    assert formatted(file, "markdown").count("\n| error |") == 3
    (sarif_run,) = json.loads(formatted(file, "sarif"))["runs"]
    found = [(each["ruleId"], each["level"]) for each in sarif_run["results"]]
    assert found == [("gpu_limit_differs", "error"), ("removed_flag", "error"), ("removed_flag", "error")]
    place = sarif_run["results"][1]["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == (str(file), 12)
    assert formatted(file, "json") == run([str(file)], LintOptions(), as_json=True)[0]


def test_sarif_is_valid(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(REPOSITORY)
    (tmp_path / "q.sh").write_text("vllm serve 'm")
    for target in (tmp_path, tmp_path / "c.yaml"):
        jsonschema.validate(json.loads(formatted(target, "sarif")), sarif.SCHEMA)
    command = run("vllm serve m --swap-space 4", LintOptions(form="sarif"), as_json=False)[0]
    jsonschema.validate(json.loads(command), sarif.SCHEMA)


@pytest.mark.slow
def test_the_action_and_the_hook_run_lint(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = yaml.safe_load((root / "action.yml").read_text())["runs"]["steps"][1]["run"]
    (hook,) = yaml.safe_load((root / ".pre-commit-hooks.yaml").read_text())
    (tmp_path / "bad.yaml").write_text(REPOSITORY)
    (tmp_path / "warned.sh").write_text("vllm serve m --disable-log-stats\n")
    (tmp_path / "none.yaml").write_text("vllm: none\n")
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    given = {key: str(tmp_path / key) for key in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")} | path

    def status(*words: str, **more: str) -> tuple[int, str]:
        done = subprocess.run(words, cwd=tmp_path, env=given | more, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    for name, fail_on, hooked, acted, said in (
        ("bad.yaml", "error", 1, 2, "::error file=bad.yaml,line="),
        ("warned.sh", "error", 1, 0, "::warning file=warned.sh,line=1,title=diag%3A no_metrics::"),
        ("none.yaml", "warning", 0, 0, "::notice title=diag lint::no launch of vLLM found"),
    ):
        inputs = {"PATHS": name, "OPTIONS": "--vllm-version 0.25.1", "FAIL_ON": fail_on, "RUNNER_TEMP": str(tmp_path)}
        code, printed = status("bash", "-c", script, **inputs)
        assert (name, code, said in printed) == (name, acted, True)
        assert (name, status(*shlex.split(hook["entry"]), name, "none.yaml")[0]) == (name, hooked)
    assert (tmp_path / "GITHUB_OUTPUT").read_text() == f"sarif={tmp_path}/diag-lint.sarif\n" * 2
    assert "no\\_metrics" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()


def test_folders_and_patterns_stand_for_their_launches(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.sh").write_text("vllm serve m --swap-space 4 --vllm 1")
    (tmp_path / "b.yaml").write_text("kind: Secret\nmetadata: {name: vllm-token}\n")
    (tmp_path / "c.yaml").write_text("nothing: here\n")
    (tmp_path / "d.yml").write_text("vllm: [\n")
    for targets in ([str(tmp_path)], [str(tmp_path / "**" / "*.*")]):
        text, status = run(targets, LintOptions(), as_json=True)
        document = json.loads(text)
        assert (status, document["files"], [*document["not_read"]]) == (2, 3, [str(tmp_path / "d.yml")])
        assert [found["file"] for found in document["launches"]] == [str(tmp_path / "deep" / "a.sh")]
    assert "1 server in 3 files: 1 with errors" in run([str(tmp_path)], LintOptions(), as_json=False)[0]
    with pytest.raises(NoLaunch, match="no launch of vLLM found"):
        run([str(tmp_path / "c*.yaml")], LintOptions(), as_json=False)
    with pytest.raises(NoFile, match="no such file or folder"):
        run([str(tmp_path / "e.yaml")], LintOptions(), as_json=False)


UNREAD = {
    "h.yaml": ("kind: Pod\ncontainers:\n  {{- range .Values.x }}\n  - vllm\n  {{- end }}\n", "this is a Helm template"),
    "large.sh": ("vllm serve m\n" + "# x\n" * 2**19, "cannot be read: it is larger than 1 MiB"),
    "q.sh": ("vllm serve 'm --port 1\n", "the command has an unclosed quotation mark"),
}  # fmt: skip


def test_a_file_that_could_not_be_read_is_named_and_is_no_pass(tmp_path: Path) -> None:
    for name, (text, _) in UNREAD.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "results.json").write_text(json.dumps({"backend": "vllm", "latencies": "1" * 2**20}))
    for servers in (0, 1):
        printed, status = run([str(tmp_path)], LintOptions(), as_json=True)
        not_read = json.loads(printed)["not_read"]
        assert (status, len(json.loads(printed)["launches"]), len(not_read)) == (1, servers, len(UNREAD))
        assert all(not_read[str(tmp_path / name)].startswith(why) for name, (_, why) in UNREAD.items())
        (tmp_path / "a.sh").write_text("vllm serve m\n")
    assert "1 server in 4 files: 0 with errors, 0 with warnings only; 3 files not read" in " ".join(
        run([str(tmp_path)], LintOptions(), as_json=False)[0].split()
    )
    for nothing in ("", " ", ["", "vllm serve m"]):
        with pytest.raises(BadUsage, match="an empty text names no launch"):
            run(nothing, LintOptions(), as_json=False)


CORRECTED = {
    "a Compose service": ("c.yaml", compose(service("--model m --swap-space 4", "ipc: host")), "--model m"),
    "a pod's shell": ("p.yaml", pod("-c, vllm serve m --swap-space 4", ", command: [sh]"), "vllm serve m"),
    "a pod's module": (
        "p.yaml",
        pod("-m, vllm.entrypoints.openai.api_server, --model=m, --swap-space=4", ", command: [python3]"),
        "--model=m",
    ),
    "a variable of a pod": ("p.yaml", pod("--model, m", ", env: [{name: VLLM_USE_V1, value: '1'}]"), None),
    "a wrapper": (
        "j.sbatch",
        "apptainer exec --nv --bind $HF_HOME vllm_0.9.2.sif vllm serve m --disable-log-requests --preemption-mode swap",
        "vllm serve m --disable-log-requests",
    ),
    "a volume": ("r.sh", f"{RUN} all -v /m:/m vllm/vllm-openai:v0.25.1 --model m --swap-space 4", "--model m"),
    "no hidden word": (
        "r.sh",
        f"{RUN} all vllm/vllm-openai:v0.25.1 --model m --swap-space 4",
        f"{RUN} all vllm/vllm-openai:v0.25.1 --model m",
    ),
}


def test_a_correction_never_drops_what_stands_around_vllm(tmp_path: Path) -> None:
    for case, (name, text, expected) in CORRECTED.items():
        (tmp_path / name).write_text(text)
        assert (case, judged(tmp_path / name)[0]["corrected_command"]) == (case, expected)


def test_an_error_of_the_newest_release_in_a_range_is_a_warning(tmp_path: Path) -> None:
    """The project may install a release that has the flag."""
    files = {"r.sh": "vllm serve org/m --swap-space 4\n", "pyproject.toml": 'dependencies = ["vllm>=0.9,<0.26"]\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (finding,) = (one for one in judged(tmp_path / "r.sh")[0]["findings"] if one["rule"] == "removed_flag")
    assert finding["severity"] == "warning"
    assert "if the server runs 0.25.1 (the newest of the range in pyproject.toml beside it)" in finding["why"]


def test_a_finding_names_its_flag_its_condition_and_its_number(tmp_path: Path) -> None:
    text = " ".join(run("vllm serve m --swap-space 4", LintOptions(), as_json=False)[0].split())
    assert "it recomputes. It is an error if the server runs 0." in text
    assert "fix Remove --swap-space " in text
    shape = {"model_type": "llama", "max_position_embeddings": 4096, "num_attention_heads": 32, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 32, "vocab_size": 32000}))
    text = run(f"vllm serve {tmp_path} --max-model-len 99999999", LintOptions(), as_json=False)[0]
    assert "--max-model-len 99999999 is above the model's maximum" in " ".join(text.split())


def test_infos_about_a_file_are_counted_and_shown_on_demand(tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_text("vllm serve m --enforce-eager")
    text, status = run([str(tmp_path / "s.sh")], LintOptions(), as_json=False)
    assert ("INFO" in text, "(--all shows them)" in text, status) == (False, True, 0)
    assert "INFO" in run([str(tmp_path / "s.sh")], LintOptions(every=True), as_json=False)[0]
    assert "INFO" in run("vllm serve m --enforce-eager", LintOptions(), as_json=False)[0]


def test_other_programs_are_no_launch_and_their_servers_are_named() -> None:
    image = "services:\n  front:\n    image: "
    for text, program in (
        ("python3 -m sglang.launch_server --model-path m --tp 2", "SGLang"),
        ("text-generation-launcher --model-id m", "TGI"),
        ("trtllm-serve m", "TensorRT-LLM"),
        (f"{image}ai-dynamo/vllm-runtime:1.0\n    command: python3 -m dynamo.frontend\n", "no co"),
        (f"{image}vllm-mock\n", "no co"),
        (
            "kind: RayCluster\nspec: {template: {spec: {containers: [{name: head, image: x/vllm-openai:v0.6.2}]}}}\n",
            "no co",
        ),
    ):
        with pytest.raises(NoLaunch, match=program):
            run(text, LintOptions(), as_json=False)


PART = "vllm: {enabled: false, image: {repository: vllm/vllm-openai, tag: v0.25.1}, model: org/m}\n"
SHOWN_PART = {"Chart.yaml": "name: c\n", "values.yaml": PART, "templates/s.yaml": "a: '{{ .Values.vllm.model }}'\n"}


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            {"Dockerfile": 'FROM vllm/vllm-openai:v0.25.1\nCMD [\n  "--model", "m"\n]\n'},
            r"each but the last needs a \\",
        ),
        ({"m.toml": 'a = "LLM("\n[services.v]\ncommand = "vllm-x"\n'}, "no command that starts a vLLM server"),
        ({**SHOWN_PART, "templates/s.yaml": "a: '{{ .Values.a }}'\n"}, "no launch of vLLM"),
        ({"d.yaml": "kind: CustomResourceDefinition\nspec: {description: python3 -m vllm.entrypoints.api}\n"}, "no co"),
        (
            {"c.yaml": "services: {v: {build: ., command: [org/m, --enable-lora]}}\n"},
            "the service v starts cannot be told",
        ),
        ({"t.env": "MODEL_ID=org/m\nSERVED_MODEL_NAME=m\nA=1\nB=2\nC=3\n"}, "no command"),
        ({"p.yaml": "kind: Pod\nm: {{ .Release.Name }}\nspec: {containers: [{image: vllm-sim:1}]}\n"}, "no container"),
    ],
    ids=[
        "a list that Docker does not read",
        "a form that is not read",
        "a part of a chart that nothing starts",
        "a schema that describes a command",
        "a service whose Dockerfile is elsewhere",
        "variables of another program",
        "a template without vLLM",
    ],
)
def test_what_starts_no_server_is_named_as_such(tmp_path: Path, files: dict[str, str], told: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(BadUsage, match=told):
        judged(tmp_path / next(iter(files)) if len(files) == 1 else tmp_path)


def test_a_part_of_a_chart_that_a_template_names_may_be_started(tmp_path: Path) -> None:
    (server,) = laid(tmp_path, SHOWN_PART)
    assert server["model"] == "org/m"


def test_preflight_needs_the_memory_for_a_go_and_names_errors_of_the_other_servers(tmp_path: Path) -> None:
    file = tmp_path / "s.sh"
    file.write_text("vllm serve org/m --port 18123 &\nvllm serve org/n --port 18123 &\n")
    found = preflight.run(PreflightOptions(str(file)))
    message = "line 2: Port 18123 is that of an earlier server of the same text (line 1)"
    assert message in [result.message for result in found.of("fail")]
    file.write_text("vllm serve org/m --port 18123\n")
    assert preflight.run(PreflightOptions(str(file))).answer not in ("go", "warnings")


PINS = {
    "pip install vllm==0.6.0 && vllm serve org/m": "0.6.0",  # in the server's own container
    "vllm serve org/m": "0.33.0",  # in the one beside it
}


@pytest.mark.parametrize("command", PINS)
def test_a_wheel_is_installed_in_the_container_that_installs_it(tmp_path: Path, command: str) -> None:
    beside = "" if "pip" in command else "  bench: {image: 'python:3.12', command: pip install vllm==0.6.0}\n"
    file = tmp_path / "compose.yaml"
    file.write_text(
        f"services:\n{beside}  llm:\n    image: vllm/vllm-openai:latest\n"
        f"    entrypoint: [bash, -c, {json.dumps(command)}]\n"
    )
    (server,) = judged(file)
    assert server["vllm_version"] == PINS[command]


@pytest.mark.parametrize(("named", "told"), [("ARGS+=(--model org/m)", False), ("ARGS+=(--seed 1)", True)])
def test_a_model_that_another_branch_names_is_not_missed(tmp_path: Path, named: str, told: bool) -> None:
    file = tmp_path / "serve.sh"
    script = f'ARGS=(--port 8000)\nif [ -n "$1" ]; then\n  {named}\nfi\n'
    file.write_text(f'#!/bin/bash\n{script}python -m vllm.entrypoints.openai.api_server "${{ARGS[@]}}"\n')
    (server,) = judged(file)
    assert ("no_model" in [finding["rule"] for finding in server["findings"]]) is told


CHART = {
    "Chart.yaml": "name: c\nappVersion: 0.6.3\n",
    "values.yaml": "image: {repository: vllm/vllm-openai, tag: ''}\nmodel: Qwen/Qwen3-8B\nlength: 4096\nextra: [--seed, '1']\n"  # noqa: E501
    "token: ''\nkind: image\nresources: {limits: {nvidia.com/gpu: 1}}\n",
    "templates/d.yaml": """kind: Deployment
metadata:
  labels:
    {{- include "c.labels" . | nindent 4 }}
spec:
  template:
    spec:
      containers:
      - name: vllm
        image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
        args:
        - --model
        - {{ .Values.model | quote }}
        {{- if .Values.token }}
        - --no-such-flag
        {{- else }}
        - --max-model-len={{ .Values.length }}
        {{- end }}
        {{- if ne .Values.kind "image" }}
        - --neither
        {{- end }}
        resources:
          {{- toYaml .Values.resources | nindent 10 }}
        readinessProbe: {httpGet: {path: /health, port: 8000}, failureThreshold: 90}
        volumeMounts: [{name: c, mountPath: /root/.cache/huggingface}]
""",
}


def laid(folder: Path, files: dict[str, str]) -> list[dict[str, Any]]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return judged(folder)


def test_a_chart_is_its_template_filled_in_by_its_values(tmp_path: Path) -> None:
    (server,) = laid(tmp_path, CHART)
    assert (server["model"], server["vllm_version"], server["line"]) == ("Qwen/Qwen3-8B", "0.6.3", 9)
    assert (server["findings"], server["vllm_version_source"]) == ([], "the image's tag")
    assert server["file"].endswith("templates/d.yaml")


def test_what_a_template_adds_or_does_not_name_is_unknown(tmp_path: Path) -> None:
    args = "{{- toYaml .Values.more | nindent 8 }}\n        resources"
    alone = {
        "d.yaml": re.sub(r"(?s) *\{\{- if.*\{\{- end \}\}\n", "", CHART["templates/d.yaml"]).replace(
            "resources", args, 1
        )
    }
    (server,) = laid(tmp_path, alone)
    assert (server["model"], server["findings"]) == ("{{ .Values.model }}", [])
    assert any("{{ ... }}" in text for text in server["not_checked"])


VALUES = """servingEngineSpec:
  modelSpec:
  - name: llama
    repository: vllm/vllm-openai
    tag: v0.20.0
    modelURL: meta-llama/Llama-3.1-8B-Instruct
    vllmConfig: {tensorParallelSize: 2, extraArgs: ["--swap-space", "4"]}
    requestGPU: 1
"""


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("BAAI/bge-m3", ["templates/d.yaml", "values.yaml"]),  # it starts another server
        ("meta-llama/Llama-3.1-8B-Instruct", ["templates/d.yaml"]),
    ],
)
def test_a_template_speaks_for_the_values_of_its_own_server_alone(model: str, files: list[str], tmp_path: Path) -> None:
    template = CHART["templates/d.yaml"].replace("{{ .Values.model | quote }}", model)
    servers = laid(tmp_path, {"Chart.yaml": CHART["Chart.yaml"], "values.yaml": VALUES, "templates/d.yaml": template})
    assert sorted(Path(server["file"]).relative_to(tmp_path).as_posix() for server in servers) == files


def test_a_role_has_its_defaults(tmp_path: Path) -> None:
    unit = "[Service]\nExecStart=/opt/v/bin/vllm serve {{ model }} {% for one in more %}{{ one }} {% endfor %}--host {{ host }}\n"  # noqa: E501
    defaults = "model: Qwen/Qwen3-8B\nmore: [--swap-space, '4']\nvllm_version: 0.26.0\nhost: '{{ address }}'\n"
    (server,) = laid(tmp_path, {"r/templates/v.service.j2": unit, "r/defaults/main.yml": defaults})
    assert (server["model"], server["vllm_version"]) == ("Qwen/Qwen3-8B", "0.26.0")
    assert [finding["rule"] for finding in server["findings"]] == ["removed_flag"]
    (tmp_path / "r/defaults/main.yml").unlink()
    assert judged(tmp_path)[0]["findings"] == []


POD = "kind: Deployment\nspec: {template: {spec: {containers: [{name: vllm, image: 'vllm/vllm-openai:v0.25.1', args: %s}]}}}\n"  # noqa: E501
MANY = """{{- if .Values.vllm.enabled }}
{{- range $x := .Values.backends }}
---
kind: Deployment
spec:
  template:
    metadata:
      labels: {{- include "c.labels" $ | nindent 8 }}
        app: v
    spec:
      securityContext: {{- omit .Values.vllm "enabled" | toYaml | nindent 8 }}
      containers:
      - name: vllm
        image: {{ include "c.image" $.Values.image | quote }}
        args:
        - {{ $x.model }}
        {{- if and $x.device (ne $x.device "auto") }}
        - --no-such-flag
        {{- else if $x.eager }}
        - --enforce-eager
        {{- end }}
        {{- with $x.more }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        resources: {limits: {nvidia.com/gpu: 1}}
{{- end }}
{{- end }}
"""
RENDERED = POD % '{{- include "common.tplvalues.render" (dict "value" .Values.args "context" $) }}'
SCRIPT = '#!/bin/sh\n: "${LENGTH:=4096}"\nM=${MODEL:-"Qwen/Qwen3-8B"}\nexec vllm serve "$M" --max-model-len "$LENGTH" --swap-space 4 "$@"\n'  # noqa: E501
UNIT = "[Service]\nExecStart=/opt/v/bin/vllm serve {{ model }} \\\n{% if tools %}\n  --seed 1 \\\n{% endif %}\n  --attention-backend {{ backend }}\n"  # noqa: E501
CELLS = [
    {"cell_type": "code", "source": "%%writefile d.yaml\n" + POD % "[n, --swap-space, '4']"},
    {"cell_type": "markdown", "source": "```bash\n!docker run --gpus all vllm/vllm-openai:v0.25.1 m\n```"},
]
CLASS = "from vllm import LLM\nclass A:\n    def __init__(self):\n        self.name = 'org/a'\n    def load(self):\n        LLM(self.name)\n"  # noqa: E501
READ = {
    # what the files hold, what each server is read as, and what is found at error or warning level
    "a loop over mappings, conditions within others, the image of a helper": (
        {
            "Chart.yaml": "name: c\nappVersion: v0.25.1\n",
            "values.yaml": "image: {registry: docker.io, repository: vllm/vllm-openai, tag: ''}\nvllm: {enabled: false}\n"  # noqa: E501
            "backends: [{model: org/a, device: auto, eager: true, more: [--seed, '1']}, {model: org/b, device: x}]\n",
            "templates/d.yaml": MANY,
        },
        ["docker.io/vllm/vllm-openai:v0.25.1 org/a --enforce-eager --seed 1", "vllm/vllm-openai:v0.25.1 org/b --no-such-flag"],  # noqa: E501
        [set(), {"unknown_flag"}],
    ),
    "values that no template uses are no arguments": (
        {
            "Chart.yaml": "name: c\n",
            "values.yaml": "image: {repository: vllm/vllm-openai, tag: v0.25.1}\nargs: [--model, org/a, --shm-size=1]\nmore: [org/b]\n",  # noqa: E501
            "templates/d.yaml": RENDERED.replace("v0.25.1", "{{ .Values.image.tag }}").replace(".args", ".more"),
        },
        ["vllm/vllm-openai:v0.25.1 org/b"],
        [set()],
    ),
    "a script beside a Dockerfile": (
        {"Dockerfile": 'FROM vllm/vllm-openai:v0.16.0\nCOPY run.sh /go.sh\nENTRYPOINT ["/go.sh"]\n', "run.sh": SCRIPT},
        ["vllm/vllm-openai:v0.16.0 -c 'exec vllm serve Qwen/Qwen3-8B --max-model-len 4096 --swap-space 4"],
        [{"no_effect"}],
    ),
    "a script beside a Compose file": (
        {
            "c.yaml": compose(service('["--seed", "1"]', 'entrypoint: ["/bin/bash", "/go.sh"]', "volumes: [./run.sh:/go.sh]")),  # noqa: E501
            "run.sh": SCRIPT,
        },
        ["--swap-space 4 --seed 1"],
        [{"removed_flag"}],
    ),
    "an entry point that is inherited": ({"Dockerfile": "FROM vllm/vllm-openai\nUSER v\n"}, ["$ARGS"], [{"image_not_pinned"}]),  # noqa: E501
    "defaults of a role, on continued lines": (
        {"templates/v.service.j2": UNIT, "defaults/main.yml": "model: org/m\ntools: true\nbackend: flashinference\n"},
        ["serve org/m --seed 1 --attention-backend flashinference"],
        [{"no_such_name"}],
    ),
    "locals beside a Terraform file": (
        {
            "main.tf": 'resource "kubernetes_deployment" "v" {\n  spec { template { spec { container {\n    name = "v"\n'  # noqa: E501
            '    image = "vllm/vllm-openai:v${local.release}"\n    args = local.words\n  } } } }\n}\n',
            "locals.tf": 'locals {\n  release = "0.16.0"\n  words = ["--model", "m", "--swap-space", "4"]\n}\n',
        },
        ["vllm/vllm-openai:v0.16.0 --model m --swap-space 4"],
        [{"no_effect"}],
    ),
    "the first argument chooses": (
        {"r.sh": 'if [ "$1" = small ]; then M=org/a; else M=org/b; fi\nvllm serve $M --swap-space 4\n'},
        ["vllm serve org/b --swap-space 4"],
        [{"removed_flag"}],
    ),
    "arguments of Vertex": (
        {
            "v.py": 'IMAGE = "vllm/vllm-openai:v0.16.0"\naiplatform.Model.upload(serving_container_image_uri=IMAGE,\n'
            '  serving_container_command=["python", "-m", "vllm.entrypoints.openai.api_server"],\n'
            '  serving_container_args=["--model=m", "--swap-space=4"])\n'
        },
        ["python -m vllm.entrypoints.openai.api_server --model=m --swap-space=4"],
        [{"no_effect"}],
    ),
    "what a notebook writes and shows": (
        {"n.ipynb": json.dumps({"cells": CELLS})},
        ["vllm/vllm-openai:v0.25.1 m", "vllm/vllm-openai:v0.25.1 n --swap-space 4"],
        [set(), {"removed_flag"}],
    ),
    "attributes of a class, defaults of options": (
        {"a.py": CLASS + 'p.add_argument("--len", default=64)\nlast = args.len\nsubprocess.run(["vllm", "serve", "m", "--seed", str(args.len)])\n'},  # noqa: E501
        ["vllm serve org/a", "--seed ${LEN:-64}"],
        [set(), set()],
    ),
    "a variable called as a flag": (
        {"r.sh": "export VLLM_GPU_MEMORY_UTILIZATION=0.5 VLLM_MAX_MODEL_LEN=9 VLLM_MY_OWN=1\nvllm serve m --max-model-len $VLLM_MAX_MODEL_LEN\n"},  # noqa: E501
        ["vllm serve m"],
        [{"variable_not_read"}],
    ),
    "servers one after the other": (
        {"r.sh": "vllm serve a --port 1 &\nsleep 9\nkill $!\nvllm serve b --port 1 &\nwait\n"},
        ["vllm serve a", "vllm serve b"],
        [set(), set()],
    ),
    "servers at the same time": (
        {"r.sh": "vllm serve a --port 1 &\nsleep 9\nvllm serve b --port 1 &\nkill 1\n"},
        ["vllm serve a", "vllm serve b"],
        [set(), {"port_taken_twice"}],
    ),
    "blocks of a guide are alternatives": (
        {"g.md": "```bash\nvllm serve a --port 1 &\n```\n```bash\nvllm serve b --port 1 &\n```\n"},
        ["vllm serve a", "vllm serve b"],
        [set(), set()],
    ),
    "a command for a shell, chips of Google": (
        {
            "s.json": '{"server": {"command": "nohup vllm serve a --enforce-eager > v.log 2>&1 &"}}',
            "t.yaml": "type: service\ncommands: [vllm serve b -tp 4]\nresources: {gpu: v5litepod-4}\n",
        },
        ["vllm serve a --enforce-eager", "vllm serve b -tp 4"],
        [set(), set()],
    ),
    "a template of the chat is none of the manifest": (
        {"d.yaml": POD % "[org/m]" + "---\nkind: ConfigMap\ndata:\n  chat.jinja: |\n    {%- if tools %}\n    {{ bos }}\n    {%- endif %}\n  more: x\n"},  # noqa: E501
        ["vllm/vllm-openai:v0.25.1 org/m"],
        [{"weights_are_downloaded_again"}],
    ),
}  # fmt: skip


RUNTIME = """kind: ServingRuntime
metadata: {name: r}
spec: {containers: [{name: kserve-container, image: 'vllm/vllm-openai:v0.25.1', args: [--model, /mnt/models]}]}
"""
INFERENCE = "kind: InferenceService\nmetadata: {name: i}\nspec: {predictor: {model: {modelFormat: {name: pytorch}, runtime: r, args: [--swap-space=4]}}}\n"  # noqa: E501
MOUNTED = "volumeMounts: [{name: c, mountPath: /etc/v}]}], volumes: [{name: c, configMap: {name: k}}]"
LABELS = "kind: Deployment\nspec: {template: {metadata: {labels: {app: v}}, spec: {containers: [{name: v, image: 'vllm/vllm-openai:v0.25.1', args: [org/m], ports: [{containerPort: 8000}]}]}}}\n"  # noqa: E501
NODE_PORT = "kind: Service\nspec: {type: NodePort, selector: {app: %s}, ports: [{port: 8000}]}\n"
STACK = VALUES.replace("\n", "\n  ").rstrip()
LOOP = """{{- range .Values.models }}
---
kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: vllm
        image: "{{ (.image).repository | default $.Values.image.repository }}:{{ (.image).tag | default $.Values.image.tag }}"
        args:
        - {{ .model }}
        {{- with .vllm }}
        {{- if .eager }}
        - --enforce-eager
        {{- end }}
        - {{ printf "--seed=%s" .seed | quote }}
        {{- end }}
        - {{ join " " .more }}
{{- end }}
"""  # noqa: E501
FOLDED = """kind: Deployment
spec:
  template:
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.25.1
        command: [sh, -c]
        args:
        - >-
          vllm serve
          {{- if eq .Values.kind "image" }}
          /models
          {{- else }}
          {{ .Values.model }}
          {{- end }}
          {{- range .Values.words }}
          {{ tpl . $ }}
          {{- end }}
        resources: {limits: {nvidia.com/gpu: 1}}
"""
SIMULATOR = "vllm: {image: {repository: ghcr.io/o/%s, tag: v0.25.1}, args: [--model, org/m, --max-model-len, '64', --queue, '9']}\n"  # noqa: E501
JINJA = """{% if many | default([]) | length > 0 %}
services:
{% for one in many %}
  {{ one.name }}: {image: other}
{% endfor %}
{% else %}
services:
  v:
{% if kind == 'own' %}
    image: mine  {# no vLLM #}
{% else %}
    image: {{ image }}
{% endif %}
    command: [--model, org/m, --swap-space, "4"]
{% endif %}
"""
FLAGS = "args: [--model, org/m, --max-model-len, '64'%s]"
CLOUD = "runcmd:\n- |\n  docker run -d --gpus all --network=host rocm/vllm:latest vllm serve org/m --seed 1\n"
OPTIONAL = """import subprocess
class A:
    length: int | None = None
    def go(self):
        command = ["vllm", "serve", "org/m"]
        if self.length is None:
            command += ["--max-model-len", "9"]
        if self.length is not None:
            command += ["--max-model-len", str(self.length)]
        subprocess.run(command)
"""
EMPTY = """N="$(nvidia-smi -L | wc -l)"
if [ -z "$N" ]; then N=1; fi
size=""
if [ -z "$size" ]; then words=""; else words="--seed $size"; fi
vllm serve org/m -tp $N $words
"""
BUILT = 'FROM ubuntu\nRUN git clone https://github.com/%s.git && cd v && git checkout v0.16.0\nCMD ["vllm", "serve", "m", "--swap-space", "4"]\n'  # noqa: E501
READ |= {
    "a runtime and the service that names it": ({"i.yaml": INFERENCE, "r.yaml": RUNTIME}, ["v0.25.1 --model /mnt/models --swap-space=4"], [{"removed_flag"}]),  # noqa: E501
    "a runtime that no service names": ({"i.yaml": INFERENCE.replace("runtime: r", "runtime: x"), "r.yaml": RUNTIME}, ["v0.25.1 --model /mnt/models"], [set()]),  # noqa: E501
    "variables and a file of a ConfigMap beside": (
        {
            "d.yaml": POD.replace("args: %s}]", "command: [sh, -c], args: ['vllm serve org/m --config /etc/v/f.yaml'], " + MOUNTED),  # noqa: E501
            "k.yaml": "kind: ConfigMap\nmetadata: {name: k}\ndata: {f.yaml: 'swap-space: 4'}\n",
        },
        ["vllm serve org/m --swap-space 4"],
        [{"removed_flag"}],
    ),
    "a ConfigMap of another name": (
        {
            "d.yaml": POD.replace("args: %s}]", "command: [sh, -c], args: ['vllm serve org/m --config /etc/v/f.yaml'], " + MOUNTED),  # noqa: E501
            "k.yaml": "kind: ConfigMap\nmetadata: {name: x}\ndata: {f.yaml: 'swap-space: 4'}\n",
        },
        ["vllm serve org/m --config /etc/v/f.yaml"],
        [set()],
    ),
    "a Service beside": ({"d.yaml": LABELS, "s.yaml": NODE_PORT % "v"}, ["org/m"], [{"public_without_a_key"}]),
    "a Service of another program beside": ({"d.yaml": LABELS, "s.yaml": NODE_PORT % "x"}, ["org/m"], [set()]),
    "the production stack under the name of a dependency": ({"values.yaml": "stack:\n  " + STACK}, ["--swap-space 4"], [{"removed_flag"}]),  # noqa: E501
    "the production stack in a HelmRelease": (
        {"r.yaml": "kind: HelmRelease\nspec:\n values:\n  " + STACK},
        ["meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --no-enable-prefix-caching --swap-space 4"],
        [{"removed_flag"}],
    ),
    "arguments of an inferenceService in values": (
        {"values.yaml": "inferenceService: {storage: {storageUri: 'oci://r/m:1'}, args: [--max-model-len=64, --gpu-memory-utilization=0.99]}  # vllm\n"},  # noqa: E501
        ["vllm serve /mnt/models --max-model-len=64 --gpu-memory-utilization=0.99"],
        [{"little_memory_left"}],
    ),
    "a with within a loop, the image of an item, a list that is joined": (
        {
            "Chart.yaml": "name: c\n",
            "values.yaml": "image: {repository: vllm/vllm-openai, tag: v0.25.1}\nmodels: [{model: org/a, vllm: {eager: true, seed: 1}, more: [--block-size=16]}, {model: org/b, image: {tag: v0.26.0}, vllm: {seed: 2}, more: [--dtype=half]}]\n",  # noqa: E501
            "templates/d.yaml": LOOP,
        },
        ["v0.25.1 org/a --enforce-eager --seed=1 --block-size=16", "v0.26.0 org/b --seed=2 --dtype=half"],
        [set(), set()],
    ),
    "values of an environment complete those of the chart": (
        {
            "Chart.yaml": "name: c\n",
            "values.yaml": "backend: llama-cpp\nimage: {vllm: {repository: vllm/vllm-openai, tag: latest}}\nvllm: {maxModelLen: 64, gpuMemoryUtilization: 0.5}\n"  # noqa: E501
            "embeddings: {image: {repository: ggml-org/llama.cpp}, extraArgs: []}\n",
            "values-prod.yaml": "backend: vllm\nimage: {vllm: {tag: v0.25.1}}\nembeddings: {extraArgs: [--embedding, --alias, x]}\n",  # noqa: E501
        },
        ["vllm/vllm-openai:v0.25.1 serve $MODEL --max-model-len 64 --gpu-memory-utilization 0.5"],
        [set()],
    ),
    "a chart's own helper for probes": (
        {
            "Chart.yaml": "name: c\n",
            "values.yaml": "ready: {httpGet: {path: /health, port: 8000}, failureThreshold: 2}\n",
            "templates/_helpers.tpl": '{{- define "c.probes" -}}\nlivenessProbe:\n  {{- toYaml .Values.ready | nindent 2 }}\n{{- end }}\n',  # noqa: E501
            "templates/d.yaml": POD.replace("spec: {template: {spec: {containers: [{name: vllm, image: 'vllm/vllm-openai:v0.25.1', args: %s}]}}}",  # noqa: E501
            'spec:\n  template:\n    spec:\n      containers:\n      - name: vllm\n        image: vllm/vllm-openai:v0.25.1\n        args: [org/m]\n{{- include "c.probes" . | nindent 8 }}'),  # noqa: E501
        },
        ["v0.25.1 org/m"],
        [{"probe_kills_the_start"}],
    ),
    "a folded script with blocks, arguments that are templates themselves": (
        {
            "Chart.yaml": "name: c\n",
            "values.yaml": "model: org/m\nwords: ['--seed={{ .Values.seed }}']\nseed: 1\nkind: hub\n",
            "templates/d.yaml": FOLDED,
        },
        ["-c 'vllm serve org/m --seed=1'"],
        [set()],
    ),
    "a simulator's values, and those of an image of vLLM": (
        {"a/values.yaml": SIMULATOR % "inference-sim", "b/values.yaml": SIMULATOR % "vllm-openai"},
        ["vllm-openai:v0.25.1 --model org/m --max-model-len 64 --queue"],
        [{"unknown_flag"}],
    ),
    "Compose of a template engine": (
        {"r/templates/c.yml.j2": JINJA, "r/defaults/main.yml": "many: []\nkind: x\nimage: vllm/vllm-openai:v0.25.1\n"},
        ["vllm/vllm-openai:v0.25.1 --model org/m --swap-space 4"],
        [{"removed_flag"}],
    ),
    "Compose without its top": (
        {"c.yaml": "v:\n  container_name: v\n  image: vllm/vllm-openai:v0.25.1\n  shm_size: 8gb\n  command: [--model, org/m, -tp, '2']\n"},  # noqa: E501
        ["--model org/m -tp 2"],
        [set()],
    ),
    "arguments of vLLM alone, and those of another program": (
        {
            "a.yaml": "kind: Pod\nspec: {containers: [{name: v, image: IMAGE_NAME, %s}]}\n# vllm\n" % (FLAGS % ", --swap-space, '4'"),  # noqa: E501
            "b.yaml": "kind: Pod\nspec: {containers: [{name: v, image: IMAGE_NAME, %s}]}\n# vllm\n" % (FLAGS % ", --ctx-size, '4'"),  # noqa: E501
        },
        ["--model org/m --max-model-len 64 --swap-space 4"],
        [{"removed_flag"}],
    ),
    "docker run in a script of a host": ({"u.yaml": CLOUD}, ["vllm serve org/m"], [{"image_not_pinned", "public_without_a_key"}]),  # noqa: E501
    "branches that exclude each other": ({"a.py": OPTIONAL}, ["vllm serve org/m --max-model-len $VALUE"], [set()]),
    "a computed number with a default, a value that only the other branch has": ({"r.sh": EMPTY}, ["-tp 1"], [set()]),
    "a default within a default": ({"r.sh": 'M="${1:-${BASE:-org/m}}"\nvllm serve "$M" --seed 1\n'}, ["vllm serve org/m"], [set()]),  # noqa: E501
    "the release of a checkout": ({"Dockerfile": BUILT % "vllm-project/vllm"}, ["serve m --swap-space 4"], [{"no_effect"}]),  # noqa: E501
    "the checkout of another repository": ({"Dockerfile": BUILT % "o/v"}, ["serve m --swap-space 4"], [{"removed_flag"}]),  # noqa: E501
    "the release of an environment's default": (
        {"m.py": 'import os, subprocess\nV = os.environ.get("V", "0.16.0")\nimage = f"vllm/vllm-openai:v{V}"\nsubprocess.run(["vllm", "serve", "m", "--swap-space", "4"])\n'},  # noqa: E501
        ["serve m --swap-space 4"],
        [{"no_effect"}],
    ),
    "the release of a typed constant": (
        {"m.py": 'import os, subprocess\nV: str = os.environ.get("V", "0.16.0")\nPACKAGES = [f"vllm=={V}"]\nsubprocess.run(["vllm", "serve", "m", "--swap-space", "4"])\n'},  # noqa: E501
        ["serve m --swap-space 4"],
        [{"no_effect"}],
    ),
    "a remark about a release beside another that is installed": (
        {"a.sh": "# vllm==0.16.0 crashed\npip install 'vllm>=0.17'\nvllm serve m --swap-space 4\n", "b.sh": "# needs vllm==0.16.0\nvllm serve m --swap-space 4\n"},  # noqa: E501
        ["serve m --swap-space 4", "serve m --swap-space 4"],
        [{"removed_flag", "vllm_not_pinned"}, {"no_effect"}],
    ),
    "what is only mentioned installs nothing": (
        {"m.py": '"""Serve.\n\n    pip install vllm\n"""\nimport subprocess\nsubprocess.run(["vllm", "serve", "m"])\n', "r.sh": "echo 'pip install vllm'\nvllm serve m\n"},  # noqa: E501
        ["serve m", "serve m"],
        [set(), set()],
    ),
    "a list of words that installs": (
        {"m.py": 'import subprocess\nsubprocess.run(["pip", "install", "-q", "vllm"])\nsubprocess.run(["vllm", "serve", "m"])\n'},  # noqa: E501
        ["serve m"],
        [{"vllm_not_pinned"}],
    ),
}  # fmt: skip


def test_what_stands_beside_a_launch_is_read_with_it(tmp_path: Path) -> None:
    wrong = {}
    ignored = {"gpu_limit_differs", "no_readiness_probe", "public_without_a_key", AGAIN, "gpu_taken_twice"}
    for at, (case, (files, texts, rules)) in enumerate(READ.items()):
        servers = laid(tmp_path / str(at) / "role", files)
        found = [{each["rule"] for each in server["findings"] if each["severity"] != "info"} for server in servers]
        kept = [names - (ignored - wanted) for names, wanted in zip(found, rules, strict=False)]
        is_read = [text in server["read_as"].replace('"', "") for text, server in zip(texts, servers, strict=False)]
        if not (len(servers) == len(texts) and all(is_read) and kept == rules):
            wrong[case] = [(server["read_as"], names) for server, names in zip(servers, found, strict=True)]
    assert not wrong


def test_a_script_that_is_not_beside_its_container_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(compose(service("[]", 'entrypoint: ["/bin/bash", "/go.sh"]')))
    (tmp_path / "d").mkdir()
    (tmp_path / "d/c.yaml").write_text((tmp_path / "c.yaml").read_text())
    (tmp_path / "d/go.sh").write_text("python3 worker.py\n")
    with pytest.raises(NoLaunch, match=r"starts /go\.sh, which itself starts no vLLM"):
        judged(tmp_path / "d/c.yaml")
    shutil.rmtree(tmp_path / "d")
    with pytest.raises(NoLaunch, match=r"starts /go\.sh, which is not beside the file"):
        judged(tmp_path / "c.yaml")
    result = json.loads(run([str(tmp_path)], LintOptions(), as_json=True)[0])
    assert [*result["not_read"].values()] == [
        "a container starts /go.sh, which is not beside the file: lint the script"
    ]


@pytest.mark.parametrize(("settings", "rules"), [("", {"public_without_a_key"}), ("EnvironmentFile=/k\n", set())])
def test_a_script_of_a_systemd_unit_serves_as_the_unit_does(tmp_path: Path, settings: str, rules: set[str]) -> None:
    unit = f"[Service]\n{settings}ExecStart=/bin/bash /opt/r.sh\n"
    (server,) = laid(tmp_path / "c", {"s/v.service": unit, "r.sh": "vllm serve org/m --host 0.0.0.0\n"})
    assert {each["rule"] for each in server["findings"] if each["severity"] == "warning"} == rules


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("", "only some branches of the script have --max-model-len"),
        ("--dtype half", "only some branches of the script have --dtype, --max-model-len"),
        ("--max-model-len 9", "branches of the script have other values of --max-model-len"),
        ("--max-model-len 64", ""),
    ],
    ids=["none", "another flag", "another value", "the same"],
)
def test_flags_that_not_every_branch_gives_are_named(tmp_path: Path, other: str, told: str) -> None:
    script = f'A="{other}"\nif [ -n "$BIG" ]; then A="--max-model-len 64"; fi\nvllm serve org/m --seed 1 $A\n'
    (tmp_path / "r.sh").write_text(script)
    (server,) = judged(tmp_path / "r.sh")
    notes = [note for note in server["not_checked"] if "branches of the script have" in note]
    assert notes == ([f"as one command: {told}"] if told else [])


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="Linux")
def test_no_file_of_proc_is_read_beside_a_launch(tmp_path: Path) -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_text()
    (tmp_path / "config.py").symlink_to(comm)
    try:
        comm.write_text("A = 1")
        source = "import config\nlaunch(config.A)\n"
        assert with_constants(source, tmp_path / "s.py") == source
    finally:
        comm.write_text(before)


def test_what_is_no_file_beside_a_launch_is_left_alone(tmp_path: Path) -> None:
    """Was: diag waited for the writer of a FIFO."""
    (tmp_path / "templates").mkdir()
    for name in ("Chart.yaml", "values.yaml"):
        (tmp_path / name).write_text("name: c\n")
    for name in ("a.yaml", "_helpers.tpl"):
        os.mkfifo(tmp_path / "templates" / name)
    text = POD.replace("args: %s", "args: [m], envFrom: [{configMapRef: {name: c}}]")
    (tmp_path / "templates" / "d.yaml").write_text(text + "# {{ .Values.name }}\n")
    (server,) = judged(tmp_path / "templates" / "d.yaml")
    assert "vllm/vllm-openai:v0.25.1 m" in server["read_as"]


STORY = """FROM python:3.12
RUN pip install vllm==0.16.0
ENV M=org/m
COPY --chmod=755 <<'S' /run.sh
#!/bin/sh
exec vllm serve $M --swap-space 4
S
ENTRYPOINT ["/run.sh"]
"""
MAPPED = POD.replace(
    "args: %s", 'args: [--model, "$(M)"], env: [{name: M, valueFrom: {configMapKeyRef: {name: k, key: m}}}]'
)
CONFIGURED = """kind: Pod
spec:
  containers:
  - image: vllm/vllm-openai:v0.25.1
    command: [vllm, serve, --config, /c/x.yaml]
    volumeMounts: [{name: c, mountPath: /c}]
  volumes: [{name: c, configMap: {name: k}}]
"""
MAP = "kind: ConfigMap\nmetadata: {name: k}\ndata: {m: org/%s}\n"
AKASH = """version: "2.0"
services:
  v:
    image: vllm/vllm-openai:v0.16.0
    expose: [{port: 8000, to: [{global: true}]}]
    command: [bash, -c]
    args: ["vllm serve org/m -tp 2 --swap-space 4"]
    env: [A=1]
profiles: {compute: {v: {resources: {gpu: {units: 2}}}}}
deployment: {v: {dcloud: {profile: v, count: 1}}}
"""
BRANCHES = """services:
  v:
{% if a %}
    image: {{ a }}
{% else %}
    image: vllm/vllm-openai:v0.25.1
{% endif %}
    command: >
      --model org/m
{% if b %}
      --dtype half
{% endif %}
    gpus: all
"""
ENDING = """L=""
COUNT=0
if [ -d "$D" ]; then
  for x in "$D"/*; do
    L="$L a=$x"
    COUNT=$((COUNT + 1))
  done
fi
if [ "$COUNT" -eq 0 ]; then
  exit 1
fi
vllm serve org/m --enable-lora --lora-modules $L
"""
ISVC = (
    "kind: InferenceService\nmetadata: {name: i}\nspec: {predictor: {model: {runtime: r, args: [--swap-space, '4']}}}\n"
)
SIZED = POD.replace(
    "args: %s",
    "command: [vllm, serve], args: [org/m,\n{{- if gt (int .Values.gpus) 1 }}\n"
    " '--tensor-parallel-size={{ .Values.gpus }}',\n{{- end }}\n]",
)
RELEASED = """kind: ServingRuntime
metadata: {name: %s, annotations: {opendatahub.io/runtime-version: v0.16.0}}
spec:
  containers:
  - {name: kserve-container, image: 'q.io/r/vllm@sha256:0000000000000000000000000000000000000000000000000000000000000000', command: [python, -m, vllm.entrypoints.openai.api_server], args: [--model, /mnt/models]}
"""  # noqa: E501
BOUND = """from ray import serve
from vllm import AsyncEngineArgs
@serve.deployment
class Server:
    def __init__(self, model, tp=None, **more):
        self.args = AsyncEngineArgs(model=model, tensor_parallel_size=tp, **more)
settings = {"seed": 4}
handles = {"m": Server.options(num_replicas=2).bind("org/m", tp=2, **settings)}
handles["n"] = Server.bind("org/n", seed=5, max_len=9)
"""
MODAL = """import modal
from vllm import LLM
ROOT = "/models"
GPU = modal.gpu.H100(count=2)
@app.function(gpu=GPU)
def run(settings):
    LLM(ROOT + "/" + "org/m", tensor_parallel_size=GPU.count, seed=getattr(settings, "seed", 5))
"""
MOUNTS = 'C="$(pwd)/c.yaml"\ndocker run --gpus all -v "${C}:/w/c.yaml:ro" vllm/vllm-openai:v0.16.0 --config /w/c.yaml\n'
QUANTIZED = """FROM vllm/vllm-openai:v0.16.0
ARG Q=half
ENV Q=${Q}
ENTRYPOINT []
CMD vllm serve org/m ${Q:+--dtype ${Q}} --seed 1
"""
PYTHON = """import argparse, os, subprocess, sys
parser = argparse.ArgumentParser()
parser.add_argument("-q", "--quant", default=None)
parser.add_argument("--eager", action="store_true")
parser.add_argument("--size", type=int, default=1)
args = parser.parse_args()
NAME = "org/Model-7B"
KEY = os.environ.get("KEY")
def start(revision=None, seed=5):
    cmd = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", NAME]
    cmd += ["--served-model-name", NAME.split("/")[-1].lower(), "--seed", str(seed)]
    if args.quant:
        cmd += ["--quantization", args.quant]
    if args.eager or revision is not None:
        cmd.append("--enforce-eager")
    if args.size > 1:
        cmd += ["--tensor-parallel-size", str(args.size)]
    if KEY:
        cmd += ["--api-key", KEY]
    if os.environ.get("PREFIX", "1") == "1":
        cmd.append("--enable-prefix-caching")
    subprocess.run(cmd)
"""
ARMS_VALUES = """image: {repository: vllm/vllm-openai, tag: v0.25.1, command: [vllm, serve, org/m, --dtype, half]}
live: {httpGet: {path: /health, port: 8000}, failureThreshold: 2}
"""
ARMS = """kind: Deployment
metadata:
  namespace: {{ include "c.namespace" . }}
spec:
  template:
    spec:
      {{- $fast := default dict .Values.fast }}
      containers:
      - name: vllm
        image: "{{ .Values.image.repository }}{{ if contains "sha256:" .Values.image.tag }}@{{ else }}:{{ end }}{{ .Values.image.tag }}"
        {{- if $fast.enabled }}
        command: [vllm, serve, org/fast]
        {{- else if .Values.image.command }}
        command:
          {{- toYaml .Values.image.command | nindent 10 }}
        {{- end }}
        livenessProbe:
          {{- toYaml .Values.live | nindent 10 }}
"""  # noqa: E501
LOOPED = """app:
  controllers:
    vllm:
      containers:
        main:
          image: {repository: org/vllm, tag: v1}
          command: [bash, -c, 'exec vllm serve %s--config /c/c.yaml']
  persistence: {c: {type: configMap, name: k}}
config: [{key: model, value: org/m}, {key: seed, value: 3}]
"""
CAT = """IMAGE_FILE="${IMAGE_FILE:-${HERE}/vllm_image.txt}"
IMAGE="$(cat "${IMAGE_FILE}" 2>/dev/null || true)"
docker run --gpus all "$IMAGE" --model org/m --swap-space 4
"""
EXEC = """FROM vllm/vllm-openai:v0.25.1
ENV M=org/m
CMD ["--model", "${M}"]
"""
UNIT_SCRIPT = "#!/bin/bash\nM=${M:-org/m}\nD=/d\nT=${T:-${D}/t}\nvllm serve $M --port ${PORT:-8} --tokenizer $T\n"
FAMILY = """M = "Qwen/Qwen2.5-7B-Instruct"
command = ["vllm", "serve", M]
if M.startswith("%s"):
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]
"""
TWO_FUNCTIONS = """import argparse
p = argparse.ArgumentParser()
p.add_argument("--size", type=int, default=3)
args = p.parse_args()
def serve(size):
    cmd = ["vllm", "serve", "org/m", "--seed", size]
def other(size):
    print(size)
serve(size=args.size)
other(size=%s)
"""

LONG = 100_000
PRINTS = 'f() {\n  echo "%s"\n}\n'
HOSTILE: dict[str, tuple[dict[str, str], str]] = {
    "no mount of a --config file": (
        {"r.sh": "docker run vllm/vllm-openai:v0.16.0 --config /w/c.yaml\n#" + "a" * LONG},
        "",
    ),
    "a --config file that is named often": (
        {
            "r.sh": MOUNTS + "#" + " --config /w/c.yaml" * 5000,
            "c.yaml": f"model: org/m\nserved-model-name: {'a' * 5000}\n",
        },
        "",
    ),
    "a key of a --config file that is an expression": ({"r.sh": MOUNTS, "c.yaml": "model: org/m\n'(': 4\n"}, ""),
    "no image in a long word": ({"r.sh": f"vllm serve org/m\n#{'vllm-' * (LONG // 5)}"}, ""),
    "no image in a long path": ({"r.sh": f"vllm serve org/m\n#/{'-vllm1.1.1' * (LONG // 10)}"}, ""),
    "branches that are false": (
        {"r.sh": "if false; then b\n" + "elif false; then b\n" * 5000 + "fi\nvllm serve org/m\n"},
        "",
    ),
    "a function that prints much": ({"r.sh": PRINTS % ("y" * LONG) + f"vllm serve {'$(f)' * 5000}\n"}, ""),
    "a function that prints a variable often": (
        {
            "r.sh": PRINTS.replace("  ", "  local a=" + "y" * 9000 + "\n  ") % ("$a" * 50_000)
            + "M=$(f)\nvllm serve $M\n"
        },
        "",
    ),
    "conditions of a template in each other": ({"c.yml.j2": "{% if a %}\n" * 9000 + "vllm serve org/m\n"}, ""),
    "an expression of spaces": ({"r.sh.j2": "vllm serve org/m\n{{" + " " * 20_000}, ""),
    "texts that double": (
        {
            "s.py": "from vllm import LLM\nA = '"
            + "a" * 900
            + "'\n"
            + "".join(f"A{i} = A{i - 1} + A{i - 1}\n".replace("A-1", "A") for i in range(40))
            + "LLM(A39)\n"
        },
        "",
    ),
    "services of Akash that are none": (
        {"d.yaml": "services: {v: , w: 5}\ndeployment: {v: 1}  # vllm\n"},
        "no container",
    ),
    "a block and an attribute of one name": (
        {"d.tf": 'resource "v" "vllm" {\n  a = "b"\n  a {\n  }\n}\n'},
        "no container",
    ),
    "names that are lists": (
        {"d.yaml": ISVC, "e.yaml": (RELEASED % "[r]").replace("annotations: {", "annotations: {a: b, ")},
        "no container",
    ),
    "a chart that is a list": (
        {
            "values.yaml": "image: {repository: vllm/vllm-openai, tag: ''}\nargs: [--model, org/m]\n",
            "Chart.yaml": "- a\n",
        },
        "",
    ),
}


def test_the_gpus_of_a_service_of_akash_are_those_of_its_profile(tmp_path: Path) -> None:
    text = AKASH.replace("compute: {v:", "compute: {v: {}, big:").replace("profile: v", "profile: big")
    for number, file in enumerate((AKASH, text, AKASH.replace("profile: v", "profile: w"))):
        (place := tmp_path / f"{number}.yaml").write_text(file)
        box = read_all(str(place))[0].container
        assert box is not None and box.gpus == (2, 2, None)[number]


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_read_at_once_or_refused(tmp_path: Path, case: str) -> None:
    """Was: minutes, gigabytes, or an exception."""
    files, why = HOSTILE[case]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    start, refused = time.process_time(), ""
    try:
        read_all(str(tmp_path / next(iter(files))))
    except BadUsage as error:
        refused = str(error)
    assert why in refused if why else not refused
    assert time.process_time() - start < 5


PATHS = """import os, sys, shutil, subprocess
from pathlib import Path
BIN = Path(sys.executable).parent
TOOL = BIN / "vllm"
subprocess.run([f"{BIN}/vllm", "serve", "org/a", "--port", "1"])
subprocess.run([os.path.join(BIN, "vllm"), "serve", "org/b", "--port", "2"])
subprocess.run([str(BIN / "vllm"), "serve", "org/c", "--port", "3"])
subprocess.run([shutil.which("vllm") or "vllm", "serve", "org/d", "--port", "4"])
subprocess.run([TOOL, "serve", "org/e", "--port", "5"])
subprocess.run([f"{BIN}/ollama", "serve", "org/f", "--port", "6"])
"""
KEYED = """import os
from vllm import LLM
def load(length=None, dev="auto", old=True):
    if dev not in ("", "auto"):
        os.environ["CUDA_VISIBLE_DEVICES"] = dev
    if old:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    kw = {"model": "org/m", "seed": 1}
    kw["dtype"] = "half"
    if length:
        kw["max_model_len"] = length
    if os.path.exists("seed"):
        kw["seed"] = 2
    if False:
        kw["block_size"] = 8
    return LLM(**kw)
"""
PUBLIC = LABELS.replace("args:", "%s, args:") + "---\n" + NODE_PORT % "v"
PICTURES = json.dumps(
    {
        "cells": [
            {
                "cell_type": "code",
                "outputs": [{"data": {"image/png": "x" * 2**20}}],
                "source": ["!vllm serve org/n & ngrok http 8000"],
            },
            {"cell_type": "code", "outputs": [{"text": ["vllm\n"] * 2**17}], "source": ["!vllm serve org/m --seed 1"]},
        ]
    },
    indent=1,
)
USUAL: dict[str, tuple[dict[str, str], list[str], str, list[set[str]]]] = {
    "a flag that is off by default": ({"r.sh": 'E="${E:-0}"\nA=(--seed 1)\nif [ "$E" -eq 1 ]; then A+=(--swap-space 4); fi\nvllm serve org/m "${A[@]}"\n'}, ["vllm serve org/m --seed 1"], "only some branches of the script have --swap-space", [{"removed_flag"}]),  # noqa: E501
    "a flag that is on by default": ({"r.sh": 'E="${E:-1}"\nA=(--seed 1)\nif [ "$E" -eq 1 ]; then A+=(--dtype half); fi\nvllm serve org/m "${A[@]}"\n'}, ["--seed 1 --dtype half"], "have --dtype", [set()]),  # noqa: E501
    "a case by default": ({"r.sh": 'case "${1:-b}" in a) X="--dtype half" ;; b|c) X="" ;; *) exit 1 ;; esac\nvllm serve org/m --seed 1 $X\n'}, ["vllm serve org/m --seed 1"], "more words of $X than by default", [set()]),  # noqa: E501
    "a script's own options": ({"r.sh": 'P=8001\nwhile [ $# -gt 0 ]; do case "$1" in --port|-p) P="$2"; shift 2 ;; --port=*) P="${1#*=}" ;; esac; done\nvllm serve org/m --port "$P"\n'}, ["vllm serve org/m --port 8001"], "", [set()]),  # noqa: E501
    "options by getopts": ({"r.sh": 'P=8001\nwhile getopts "p:" o; do case $o in p) P="$OPTARG" ;; esac; done\nvllm serve org/m --port "$P"\n'}, ["vllm serve org/m --port 8001"], "", [set()]),  # noqa: E501
    "a model that the Hub has is no folder": ({"r.sh": 'M="${M:-org/m}"\nif [ -d "$M" ]; then export HF_HUB_OFFLINE=1; else export HF_HUB_OFFLINE=0; fi\nvllm serve "$M"\n'}, ["HF_HUB_OFFLINE=0"], "", [set()]),  # noqa: E501
    "a folder may be there": ({"r.sh": 'if [ -d /m ]; then D=half; else D=auto; fi\nvllm serve /m --dtype "$D"\n'}, ["vllm serve /m --dtype half"], "other values of --dtype", [set()]),  # noqa: E501
    "a scheduler's variable is set": ({"r.sh": 'if [ -n "$SLURM_JOB_ID" ]; then D=half; else D=auto; fi\nvllm serve org/m --dtype "$D"\n'}, ["--dtype half"], "other values of --dtype", [set()]),  # noqa: E501
    "what a loop or a file of settings sets is unknown": ({"r.sh": 'for D in half auto; do if [ "$D" = auto ]; then X=1; else X=2; fi; done\nsource .env\nif [ -n "$Y" ]; then X=3; fi\nvllm serve org/m --seed "$X"\n'}, ["--seed 3"], "other values of --seed", [set()]),  # noqa: E501
    "branches with other variables and images": ({"r.sh": 'I=vllm/vllm-openai:v0.25.1\nif [ -n "$X" ]; then I=vllm/vllm-openai:v0.16.0; export VLLM_USE_V1=0; fi\ndocker run --gpus all --ipc=host $I --model org/m --seed 1\n'}, ["vllm-openai:v0.25.1 --model org/m"], "other values of $VLLM_USE_V1, the image", [{"variable_not_read"}]),  # noqa: E501
    "negation, alternatives and words of a test": ({"r.sh": 'A=1\n[ -z "$A" ] || X="--seed 1"\nif ! [[ "$A" == 2 || ( -n "$B" && "$A" == 1 ) ]]; then Y="--dtype half"; fi\nvllm serve org/m $X $Y\n'}, ["vllm serve org/m --seed 1 --dtype half"], "", [set()]),  # noqa: E501
    "a usage that ends the script decides nothing": ({"r.sh": 'case "$1" in a) M=org/a ;; *) echo usage; exit 1 ;; esac\nvllm serve "$M"\n'}, ["vllm serve org/a"], "", [set()]),  # noqa: E501
    "a default that names another": ({"r.sh": 'B=/models\nN="${1:-m-9b}"\nD="${D:-$B/$N}"\nvllm serve "$D" --seed 1\n'}, ["vllm serve /models/m-9b"], "", [set()]),  # noqa: E501
    "a folder whose root is unknown": ({"r.sh": 'R="$(pwd)"\nvllm serve "$R/out/m" --seed 1\n'}, ["vllm serve $R/out/m --seed 1"], "", [set()]),  # noqa: E501
    "a script within -c has the variables around it": ({"r.sh": 'M="${M:-org/m}"\ndocker run --entrypoint="" --gpus all -v c:/root/.cache vllm/vllm-openai:v0.25.1 bash -lc "vllm serve $M --seed 1"\n'}, ["vllm serve org/m --seed 1"], "", [set()]),  # noqa: E501
    "options of an array that may be unset": ({"r.sh": 'A=(--seed 1)\nvllm serve org/m ${A[@]+"${A[@]}"}\n'}, ["vllm serve org/m --seed 1"], "", [set()]),  # noqa: E501
    "a here-document names the variables of its script": ({"r.sh": 'I="vllm/vllm-openai:v0.16.0"\nC=$(cat <<EOF\nset -e\ndocker run --gpus all $I --model org/m --swap-space 4\nEOF\n)\nssh h "$C"\n'}, ["docker run --gpus all"], "", [{"no_effect"}]),  # noqa: E501
    "defaults of options, parameters and the environment": ({"s.py": PYTHON}, ["python3 -m vllm.entrypoints.openai.api_server --model org/Model-7B --served-model-name model-7b --seed ${SEED:-5} --enable-prefix-caching"], "have --enable-prefix-caching, --quantization, --enforce-eager, --tensor-parallel-size", [{"key_in_the_arguments"}]),  # noqa: E501
    "a parameter that the only call sets": ({"s.py": 'import subprocess\ndef start(seed=5):\n    subprocess.run(["vllm", "serve", "org/m", "--seed", str(seed)])\nstart(7)\n'}, ["--seed ${SEED:-7}"], "other values of --seed", [set()]),  # noqa: E501
    "a parameter that two calls set": ({"s.py": 'import subprocess\ndef start(seed=5):\n    subprocess.run(["vllm", "serve", "org/m", "--seed", str(seed)])\nstart(7)\nstart(seed=8)\n'}, ["--seed $VALUE"], "the value of --seed", [set()]),  # noqa: E501
    "an option that is passed on, and a question for help": ({"s.py": 'import argparse, subprocess\nfor help_word in ("-h", "--help"):\n    subprocess.run(["vllm", "serve", help_word])\ndef start(*, seed: int):\n    subprocess.run(["vllm", "serve", "org/m", "--seed", str(seed)])\nparser = argparse.ArgumentParser()\nparser.add_argument("--seed", type=int, default=7)\nargs = parser.parse_args()\nstart(seed=args.seed)\n'}, ["--seed ${SEED:-7}"], "other values of --seed", [set()]),  # noqa: E501
    "constants of a module beside": ({"s.py": 'import subprocess\nimport config as c\nsubprocess.run(["vllm", "serve", c.MODEL, "--seed", str(c.SEED), "--dtype", c.other])\n', "config.py": 'MODEL: str = "org/m"  # vllm\nSEED = 7\nother = "half"\n'}, ["vllm serve org/m --seed 7 --dtype half"], "", [set()]),  # noqa: E501
    "a constant that both modules have": ({"s.py": 'import subprocess\nimport config\nMODEL = "org/n"\nsubprocess.run(["vllm", "serve", config.MODEL, "--seed", "1"])\n', "config.py": 'MODEL = "org/m"\n'}, ["vllm serve $MODEL --seed 1"], "", [set()]),  # noqa: E501
    "a service and the Dockerfile that it builds": ({"c.yaml": "services: {v: {build: ./b, image: own-vllm, gpus: all, environment: {M: org/n}, ports: ['127.0.0.1:8000:8000']}}\n", "b/Dockerfile": STORY}, ["M=${M:?} --entrypoint bash own-vllm -c 'exec vllm serve org/n --swap-space 4'"], "", [{"no_effect"}]),  # noqa: E501
    "a Dockerfile and its own here-document": ({"Dockerfile": STORY}, ["exec vllm serve org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "arguments of the service for vLLM's image": ({"c.yaml": "services:\n  v:\n    build: {context: ., args: {TAG: v0.16.0}}\n    gpus: all\n    command: [--model, org/m, --swap-space, '4']\n", "Dockerfile": "ARG TAG=v0.32.0\nFROM vllm/vllm-openai:$TAG\nCMD [--model, x]\n"}, ["vllm/vllm-openai:v0.16.0 --model org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "a service that builds something else": ({"c.yaml": "services: {v: {build: ., image: a}, w: {image: 'vllm/vllm-openai:v0.25.1', gpus: all, command: [--model, org/m]}}\n", "Dockerfile": "FROM python\nCMD python app.py  # asks vllm\n"}, ["--model org/m"], "", [set()]),  # noqa: E501
    "the stage that a service builds": ({"c.yaml": "services:\n  v:\n    build: {context: ., target: b}\n    gpus: all\n", "Dockerfile": "FROM vllm/vllm-openai:v0.25.1 AS a\nENV A=1\nFROM a AS b\nCMD [--model, org/b]\nFROM a\nCMD [--model, org/c]\n".replace("[--model, ", '["--model", "').replace("]", '"]')}, ["vllm/vllm-openai:v0.25.1 --model org/b"], "", [set()]),  # noqa: E501
    "names that are too long for a file": ({"c.yaml": f"services: {{v: {{build: {{context: {'a' * 300}}}, image: 'vllm/vllm-openai:v0.25.1', gpus: all, command: [--model, org/m]}}}}\n", "s.yaml": f'services:\n  v:\n    image: vllm/vllm-openai:v0.25.1\n    gpus: all\n    command: [--model, org/m]\n  w:\n    entrypoint: ["/{"b" * 300}.sh"]\n'}, ["--model org/m", "--model org/m"], "", [set(), set()]),  # noqa: E501
    "no file outside of the build's folder": ({"d/Dockerfile": 'FROM vllm/vllm-openai:v0.25.1\nCOPY ../r.sh /o.sh\nENTRYPOINT ["/o.sh"]\n', "r.sh": "vllm serve org/m\n"}, ["vllm serve org/m"], "", [set()]),  # noqa: E501
    "an entrypoint of the service, which drops the Dockerfile's CMD": ({"c.yaml": "services: {v: {build: ., image: own-vllm, gpus: all, entrypoint: [vllm, serve, org/m]}}\n", "Dockerfile": 'FROM python\nRUN pip install vllm==0.16.0\nENTRYPOINT ["bash"]\nCMD ["x"]\n'}, ["--entrypoint vllm own-vllm serve org/m"], "", [set()]),  # noqa: E501
    "a dockerfile in lower case": ({"c.yaml": "services: {v: {build: ., gpus: all}}\n", "dockerfile": "FROM vllm/vllm-openai:v0.16.0\nCMD [\"--model\", \"org/m\", \"--swap-space\", \"4\"]\n"}, ["vllm/vllm-openai:v0.16.0 --model org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "arguments of a build that are empty": ({"c.yaml": "services:  # of vllm\n  v: {build: {args: {Q: ''}}}\n  w: {build: {args: {Q: bfloat16}}}\n  x: {build: .}\n  y: {build: {args: {Q: }}}\n", "Dockerfile": QUANTIZED}, ["serve org/m --seed 1", "serve org/m --dtype bfloat16 --seed 1", *["serve org/m --dtype half --seed 1"] * 2], "", [set()] * 4),  # noqa: E501
    "remarks within a command": ({"r.sh": "vllm serve org/m \\\n `# one GPU -> none` \\\n --seed 1 \\\n --port `cat port`\n"}, ["vllm serve org/m --seed 1 --port"], "the value of --port", [set()]),  # noqa: E501
    "a variable called help, and a helper": ({"r.sh": 'vllm serve "$HELP_ARG"\nvllm serve "$HELPER" --seed 1\n'}, ["vllm serve $HELPER --seed 1"], "", [set()]),  # noqa: E501
    "a word that an unknown variable leads to": ({"r.sh": 'vllm serve org/m ${Q:+--dtype half} --seed 1\n'}, ["vllm serve org/m --seed 1"], "more words of $Q", [set()]),  # noqa: E501
    "a script without an ending that is mounted": ({"c.yaml": "services:\n  v:\n    image: vllm/vllm-openai:${TAG:?is in .env}\n    entrypoint: ['/usr/bin/entrypoint']\n    environment: {LEN: '${LEN:-512}'}\n    volumes: ['./go.sh:/usr/bin/entrypoint:ro']\n".replace("'", '"'), "go.sh": 'exec vllm serve org/m --max-model-len "${LEN:-64}"\n'}, ["-c 'exec vllm serve org/m --max-model-len 512'"], "", [set()]),  # noqa: E501
    "the arguments with which a job calls a script": ({"r.sh": 'M="$1"\nvllm serve "$M" --port "${2:-9}"\n', "j.slurm": "#!/bin/bash\nchmod 755 r.sh\nsrun bash ./r.sh org/m 8001 &\n"}, ["vllm serve org/m --port 8001"], "", [set()]),  # noqa: E501
    "two calls with other arguments": ({"r.sh": 'vllm serve "$1" --seed 1\n', "j.slurm": "bash r.sh org/m\nbash r.sh org/n\n"}, ["vllm serve '$1' --seed 1"], "", [set()]),  # noqa: E501
    "a call with words that the text does not show": ({"r.sh": 'vllm serve "$1" --seed 1\n', "j.slurm": 'bash r.sh "$M"\n'}, ["vllm serve '$1' --seed 1"], "", [set()]),  # noqa: E501
    "a script that reads options of its own": ({"r.sh": 'M="${1:-org/n}"; shift\nvllm serve "$M" --seed 1\n', "j.slurm": "bash r.sh org/m\n"}, ["vllm serve org/n --seed 1"], "", [set()]),  # noqa: E501
    "a script that is copied": ({"r.sh": 'vllm serve "$1" --seed 1\n', "j.slurm": "cp r.sh /opt/r.sh\n"}, ["vllm serve '$1' --seed 1"], "", [set()]),  # noqa: E501
    "a ConfigMap in the folder above": ({"v/d.yaml": MAPPED, "k.yaml": MAP % "a"}, ["--model org/a"], "", [set()]),
    "a ConfigMap of an overlay": ({"base/d.yaml": MAPPED, "overlays/x/k.yaml": MAP % "a"}, ["--model org/a"], "", [set()]),  # noqa: E501
    "a --config file of an overlay": ({"base/d.yaml": CONFIGURED, "overlays/x/k.yaml": "kind: ConfigMap\nmetadata: {name: k}\ndata:\n  x.yaml: |\n    model: org/m\n    kv-cache-memory: 9\n"}, ["serve org/m --kv-cache-memory 9"], "", [set()]),  # noqa: E501
    "ConfigMaps of two overlays": ({"base/d.yaml": MAPPED, "overlays/x/k.yaml": MAP % "a", "overlays/y/k.yaml": MAP % "b"}, ["--model '$(M)'"], "the value of --model", [set()]),  # noqa: E501
    "a ConfigMap of another namespace": ({"v/d.yaml": MAPPED, "k.yaml": (MAP % "a").replace("{name", "{namespace: o, name")}, ["--model '$(M)'"], "the value of --model", [set()]),  # noqa: E501
    "a program within -c": ({"Dockerfile": 'FROM vllm/vllm-openai:v0.16.0\nCOPY . /v\nENTRYPOINT ["/bin/bash", "-c", "/v/run.sh; sleep 9"]\n', "run.sh": "vllm serve org/m --swap-space 4\n"}, ["vllm serve org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "named values of a chart and a ConfigMap of its": ({**CHART, "templates/d.yaml": "{{/* (why: it\n is) */}}\n{{- if .Values.v.on }}\n{{- $v := .Values.v }}\n" + POD.replace("args: %s", 'command: [vllm, serve], args: ["$(M)", --seed, "{{ $v.seed }}"], env: [{name: M, valueFrom: {configMapKeyRef: {name: k, key: m}}}]') + "{{- end }}\n", "templates/k.yaml": "kind: ConfigMap\nmetadata: {name: k}\ndata:\n  m: {{ .Values.v.model }}\n", "values.yaml": "v: {on: false, seed: 7, model: org/m}\n"}, ["serve org/m --seed 7"], "", [set()]),  # noqa: E501
    "arms of a condition that the values decide": ({"Chart.yaml": "name: c\n", "values.yaml": ARMS_VALUES, "templates/d.yaml": ARMS}, ["vllm/vllm-openai:v0.25.1 serve org/m --dtype half"], "", [{"probe_kills_the_start"}]),  # noqa: E501
    "arms of a condition, the other way": ({"Chart.yaml": "name: c\n", "values.yaml": ARMS_VALUES + "fast: {enabled: true}\n", "templates/d.yaml": ARMS}, ["vllm/vllm-openai:v0.25.1 serve org/fast"], "", [{"probe_kills_the_start"}]),  # noqa: E501
    "a --config file of a ConfigMap that a loop writes": ({"Chart.yaml": "name: c\n", "values.yaml": LOOPED % "", "templates/c.yaml": "kind: ConfigMap\nmetadata: {name: k}\ndata:\n  c.yaml: |\n{{ range .Values.config }}    {{ .key }}: {{ .value }}\n{{ end }}"}, ["vllm serve org/m --seed 3"], "", [set()]),  # noqa: E501
    "a --config file beside a model of the command": ({"Chart.yaml": "name: c\n", "values.yaml": LOOPED % "org/n ", "templates/c.yaml": "kind: ConfigMap\nmetadata: {name: k}\ndata:\n  c.yaml: |\n{{ range .Values.config }}    {{ .key }}: {{ .value }}\n{{ end }}"}, ["vllm serve org/n --config /c/c.yaml"], "", [set()]),  # noqa: E501
    "values of two dependencies": ({"values.yaml": "vllm: {extraArgs: [--served-model-name=a]}\nvllm-embeddings: {extraArgs: [--served-model-name=b, --max-model-len=64]}\nchat: {env: {M: x}}\n"}, ["vllm serve $MODEL --served-model-name=a", "vllm serve $MODEL --served-model-name=b --max-model-len=64"], "", [set(), set()]),  # noqa: E501
    "`serve` for the entry point of the image, by values": ({"values.yaml": "vllm: {model: org/m}\nimage: {repository: vllm/vllm-openai, tag: v0.27.1}\nworkload: {main: {args: [serve, '{{ .Values.vllm.model }}', --max-model-len, '64']}}\n"}, ["vllm/vllm-openai:v0.27.1 serve org/m --max-model-len 64"], "", [{"entry_point_repeated"}]),  # noqa: E501
    "an image whose name is in a file beside": ({"r.sh": CAT, "vllm_image.txt": "vllm/vllm-openai:v0.16.0\n"}, ["vllm/vllm-openai:v0.16.0 --model org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "a secret in a file beside stays there": ({"r.sh": 'K="$(cat key.txt)"\nvllm serve org/m --seed 1 --served-model-name "$K"\n', "key.txt": "abcdefgh12345678\n"}, ["vllm serve org/m --seed 1 --served-model-name $K"], "", [set()]),  # noqa: E501
    "switches of an operator": ({"m.yaml": "kind: VLLMRuntime\nspec: {model: {modelURL: org/m, enableLoRA: false}, vllmConfig: {enablePrefixCaching: false, maxNumSeqs: 4, v1: true}}\n---\nkind: VLLMRuntime\nspec: {model: {modelURL: org/n, enableLoRA: true}, vllmConfig: {seed: 0}}\n"}, ["vllm serve org/m --no-enable-prefix-caching --max-num-seqs 4", "vllm serve org/n --enable-lora --seed 0"], "", [set(), set()]),  # noqa: E501
    "GPUs of a task by its own variable": ({"t.yaml": "resources: {accelerators: 'H100:2'}\nrun: vllm serve org/m -tp $SKYPILOT_NUM_GPUS_PER_NODE\n"}, ["vllm serve org/m -tp 2"], "", [set()]),  # noqa: E501
    "a variable in the exec form": ({"Dockerfile": EXEC}, ["--model org/m"], "", [{"variable_in_the_exec_form"}]),
    "a variable in the exec form of a service's image": ({"c.yaml": "services: {v: {build: ., image: own-vllm, gpus: all}}\n", "Dockerfile": EXEC}, ["--model org/m"], "", [{"variable_in_the_exec_form"}]),  # noqa: E501
    "the exec form that a service replaces": ({"c.yaml": "services: {v: {build: ., image: own-vllm, gpus: all, command: [--model, org/n]}}\n", "Dockerfile": EXEC}, ["--model org/n"], "", [set()]),  # noqa: E501
    "a service of Akash": ({"d.yaml": AKASH}, ["--entrypoint bash vllm/vllm-openai:v0.16.0 -c 'vllm serve org/m -tp 2 --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "branches of a template": ({"c.yml.j2": BRANCHES}, ["vllm/vllm-openai:v0.25.1 --model org/m"], "", [set()]),
    "a template with an option of an engine alone": ({"c.yml.j2": BRANCHES.replace("{% if a %}\n    image: {{ a }}\n{% else %}\n", "").replace("{% endif %}\n    command", "    command")}, ["vllm/vllm-openai:v0.25.1 --model org/m --dtype half"], "only some branches", [set()]),  # noqa: E501
    "a branch that leads to the end of the script": ({"r.sh": ENDING}, ["--lora-modules $L"], "the value of --lora-modules", [set()]),  # noqa: E501
    "a branch that only warns": ({"r.sh": ENDING.replace("exit 1", "echo none")}, ["--lora-modules"], "other values of --lora-modules", [{"value_missing"}]),  # noqa: E501
    "a value that is always replaced": ({"r.sh": 'U="${U:-auto}"\nif [ "$U" = auto ]; then U=$(free); else echo "$U"; fi\nvllm serve org/m --seed "$U"\n'}, ["--seed $U"], "the value of --seed", [set()]),  # noqa: E501
    "a value that is replaced in a branch": ({"r.sh": 'U=auto\nif [ -d /x ]; then U=$(free); fi\nvllm serve org/m --seed "$U"\n'}, ["--seed $U"], "other values of --seed", [{"value_of_wrong_type"}]),  # noqa: E501
    "what a function prints": ({"r.sh": 'D=org/m\nname() {\n  local m="${A:-$D}"\n  printf "%s\\n" "$m"\n}\nM="$(name)"\nvllm serve "$M" --seed 1\n'}, ["vllm serve org/m --seed 1"], "", [set()]),  # noqa: E501
    "what a function prints of its arguments": ({"r.sh": 'name() {\n  echo "$1"\n}\nM="$(name)"\nvllm serve "$M" --seed 1\n'}, ["vllm serve $M --seed 1"], "", [set()]),  # noqa: E501
    "what a function prints in a branch": ({"r.sh": 'name() {\n  if [ -d /x ]; then\n    echo org/m\n  fi\n}\nM="$(name)"\nvllm serve "$M" --seed 1\n'}, ["vllm serve $M --seed 1"], "", [set()]),  # noqa: E501
    "a variable that is empty by default": ({"r.sh": "vllm serve org/m --seed 1 ${EXTRA:-}\n"}, ["vllm serve org/m --seed 1"], "more words of $EXTRA", [set()]),  # noqa: E501
    "a variable with an empty default that is set": ({"r.sh": "S=5\nvllm serve org/m --seed ${S:-} ${EXTRA:-}\n"}, ["vllm serve org/m --seed 5"], "more words of $EXTRA", [set()]),  # noqa: E501
    "the release of a runtime": ({"i.yaml": ISVC, "r.yaml": RELEASED % "r"}, ["q.io/r/vllm@sha256"], "", [{"no_effect"}]),  # noqa: E501
    "the release of another runtime": ({"i.yaml": ISVC.replace("runtime: r", "runtime: s"), "r.yaml": RELEASED % "r" + "---\n" + (RELEASED % "s").replace("0.16.0", "latest")}, ["q.io/r/vllm@sha256"], "", [{"removed_flag"}]),  # noqa: E501
    "the release of an image as a file": ({"j.slurm": "I=vllm-openai_v0.16.0.sif\napptainer exec --pwd $W $I vllm serve org/m --swap-space 4\n"}, ["vllm serve org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "texts and GPUs of Modal": ({"s.py": MODAL}, ["vllm serve /models/org/m --tensor-parallel-size 2 --seed ${SEED:-5}"], "other values of --seed", [set()]),  # noqa: E501
    "GPUs of Modal by their place": ({"s.py": MODAL.replace("count=2", "4")}, ["--tensor-parallel-size 4"], "other values of --seed", [set()]),  # noqa: E501
    "one GPU of Modal": ({"s.py": MODAL.replace("count=2", "")}, ["--tensor-parallel-size 1"], "other values of --seed", [set()]),  # noqa: E501
    "options of a GPU that are elsewhere": ({"s.py": MODAL.replace("count=2", "**OPTIONS")}, ["--tensor-parallel-size $TENSOR"], "the value of --tensor-parallel-size", [set()]),  # noqa: E501
    "GPUs that the source changes": ({"s.py": MODAL.replace("ROOT =", "GPU = pick()\nROOT =")}, ["--tensor-parallel-size $TENSOR_PARALLEL_SIZE --seed"], "the value of --tensor-parallel-size", [set()]),  # noqa: E501
    "a --config file that a script mounts": ({"r.sh": MOUNTS, "c.yaml": "model: org/m\nswap-space: 4\n"}, ["vllm/vllm-openai:v0.16.0 --model org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "a --config file that is not mounted": ({"r.sh": MOUNTS.replace('-v "${C}:/w/c.yaml:ro" ', ""), "c.yaml": "max-num-seqs: 4\n"}, ["--config /w/c.yaml"], "", [set()]),  # noqa: E501
    "the version of a chart as the usual tag": ({"Chart.yaml": "name: c\nappVersion: v0.16.0\n", "values.yaml": "image: {repository: vllm/vllm-openai, tag: ''}\nmodel: org/m\nextraArgs: [--swap-space, '4']\n"}, ["--swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "a tag that a chart's version sets elsewhere": ({"values.yaml": "image: {repository: vllm/vllm-openai, tag: ''}\nmodel: org/m\nextraArgs: [--max-model-len, '64', --swap-space, '4']\n"}, ["--swap-space 4"], "", [{"removed_flag"}]),  # noqa: E501
    "a number of the values that decides": ({"Chart.yaml": "name: c\n", "values.yaml": "gpus: 2\n", "templates/d.yaml": SIZED}, ["serve org/m --tensor-parallel-size=2"], "", [{"no_shared_memory"}]),  # noqa: E501
    "a number that the values do not have": ({"Chart.yaml": "name: c\n", "values.yaml": "gpus: all\n", "templates/d.yaml": SIZED}, ["serve org/m --tensor-parallel-size="], "only some branches", [{"value_of_wrong_type"}]),  # noqa: E501
    "a --config file of two ConfigMaps": ({"Chart.yaml": "name: c\n", "values.yaml": LOOPED % "", "templates/c.yaml": "kind: ConfigMap\nmetadata: {name: k}\ndata:\n  c.yaml: |\n    model: org/a\n---\nkind: ConfigMap\nmetadata: {name: l}\ndata:\n  c.yaml: |\n    model: org/b\n"}, ["vllm serve --config /c/c.yaml"], "", [set()]),  # noqa: E501
    "a model.json with keys of a request": ({"model.json": '\ufeff{"model": "org/m", "served_model_name": "vllm", "temperature": 0.7}'}, ["vllm serve org/m --served-model-name vllm --temperature"], "", [{"unknown_flag"}]),  # noqa: E501
    "a manifest in a task of Ansible": ({"t.yml": "- name: t\n  shell: |\n    kubectl apply -f - <<EOF\n" + textwrap.indent(POD.replace("args: %s", 'args: [--model, "{{ m }}", --swap-space, "4"]').replace("v0.25.1", "v0.16.0"), "    ") + "    EOF\n"}, ["--model {{ m }} --swap-space 4"], "the value of --model", [{"no_effect"}]),  # noqa: E501
    "the variables of a unit": ({"r.sh": UNIT_SCRIPT, "v.service": "[Service]\nEnvironment=PORT=9 \"M=org/n\"\nEnvironment=T=org/t\nExecStart=/o/r.sh\n"}, ["vllm serve org/n --port 9 --tokenizer org/t"], "", [set()]),  # noqa: E501
    "the variables of a unit with a file of more": ({"r.sh": UNIT_SCRIPT, "v.service": "[Service]\nEnvironment=PORT=9\nEnvironmentFile=/e\nExecStart=/o/r.sh\n"}, ["vllm serve org/m --port ${PORT:-8}"], "other values of --port", [set()]),  # noqa: E501
    "an image of a chart's helper by its parts": ({"Chart.yaml": "name: c\n", "values.yaml": "v: {image: {repository: vllm/vllm-openai, tag: v0.16.0}}\n", "templates/d.yaml": POD.replace("vllm/vllm-openai:v0.25.1", '{{ include "c.image" (dict "repo" .Values.v.image.repository "tag" .Values.v.image.tag "global" .Values.global) }}') % '[--model, org/m, --swap-space, "4"]'}, ["vllm/vllm-openai:v0.16.0 --model org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "switches of a chat template": ({"r.sh": """vllm serve org/m --default-chat-template-kwargs '{"enable_thinking": true, "preserve_thinking": true}'\n"""}, ["{enable_thinking: true, preserve_thinking: true}"], "", [set()]),  # noqa: E501
    "a text of a chat template": ({"r.sh": """vllm serve org/m --default-chat-template-kwargs '{"preserve_thinking": "Tr0ub4dor"}'\n"""}, ["--default-chat-template-kwargs ${DEFAULT_CHAT_TEMPLATE_KWARGS:?}"], "", [set()]),  # noqa: E501
    "a name with a letter beyond ASCII": ({"r.sh": "vllm serve Adı/Model\n"}, ["vllm serve 'Adı/Model'"], "", [set()]),
    "parameters of two functions": ({"s.py": TWO_FUNCTIONS % "args.size"}, ["--seed ${SIZE:-3}"], "other values of --seed", [set()]),  # noqa: E501
    "parameters of two functions with two values": ({"s.py": TWO_FUNCTIONS % "4"}, ["--seed $SIZE"], "the value of --seed", [set()]),  # noqa: E501
    "a branch for the models of another family": ({"s.py": FAMILY % "Qwen/Qwen3"}, ["vllm serve Qwen/Qwen2.5-7B-Instruct"], "", [set()]),  # noqa: E501
    "a branch for the models of its family": ({"s.py": FAMILY % "Qwen/Qwen2"}, ["vllm serve Qwen/Qwen2.5-7B-Instruct --enable-auto-tool-choice --tool-call-parser qwen3_coder"], "", [{"parser_of_another_model"}]),  # noqa: E501
    "a name that two cells set alike": ({"s.py": "M = 'org/m'\nM = 'org/m'\ncommand = ['vllm', 'serve', M]\n"}, ["vllm serve org/m"], "", [set()]),  # noqa: E501
    "a name that two cells set otherwise": ({"s.py": "M = 'org/m'\nM = 'org/n'\ncommand = ['vllm', 'serve', M]\n"}, ["vllm serve $M"], "", [set()]),  # noqa: E501
    "an array that is a command, behind its variables": ({"r.sh": 'C=(vllm serve org/m)\nC+=(--seed 1)\necho "${C[@]}"\nCUDA_VISIBLE_DEVICES=2 nice "${C[@]}" --port 9\n'}, ["CUDA_VISIBLE_DEVICES=2 nice vllm serve org/m --seed 1 --port 9"], "", [set()]),  # noqa: E501
    "an array that runs twice, and one of two arrays": ({"r.sh": 'C=(vllm serve org/m)\nCUDA_VISIBLE_DEVICES=0 "${C[@]}" --port 1 &\nCUDA_VISIBLE_DEVICES=1 "${C[@]}" --port 2 &\nA=(nice)\nB=("${A[@]}" "${C[@]}")\n"${B[@]}" --port 3\n'}, ["CUDA_VISIBLE_DEVICES=0 vllm serve org/m --port 1", "CUDA_VISIBLE_DEVICES=1 vllm serve org/m --port 2", "nice vllm serve org/m --port 3"], "", [set()] * 3),  # noqa: E501
    "a command that grows as a text": ({"r.sh": 'T=4\nC="vllm serve org/m"\nC+=" -tp $T"\nif [ -n "$Q" ]; then C+=" --quantization $Q"; fi\nC="$C --port 9"\neval "$C"\n'}, ["vllm serve org/m -tp 4 --port 9"], "", [set()]),  # noqa: E501
    "words that grow as a text": ({"r.sh": 'A=""\nA+=" --model org/m"\nA+=" --seed $S"\nif [ -n "$A" ]; then X=1; else X=2; fi\npython -m vllm.entrypoints.openai.api_server $A --port $X &\n'}, ["--model org/m --seed $S --port 1"], "the value of --seed", [set()]),  # noqa: E501
    "a text that a function makes of its arguments": ({"r.sh": 'start() {\n  local c="vllm serve $1"\n  c+=" --port $2"\n  eval "CUDA_VISIBLE_DEVICES=$3 $c &"\n}\nstart org/m 8001 0\nstart org/n 8002 1\n'}, ["CUDA_VISIBLE_DEVICES=0 vllm serve org/m --port 8001", "CUDA_VISIBLE_DEVICES=1 vllm serve org/n --port 8002"], "", [set()] * 2),  # noqa: E501
    "settings of a module beside, by its package": ({"app/s.py": 'import subprocess\nfrom app.settings import settings as conf, LIMITS\nsubprocess.run(["vllm", "serve", conf.model, "--seed", str(conf.seed), "--port", str(conf.port), "--max-num-seqs", str(LIMITS["seqs"]), "--dtype", conf.dtype])\n', "app/settings.py": 'from pydantic import Field\nclass Settings(BaseSettings):\n    model: str = "org/m"\n    seed: int = Field(default=7, ge=0)\n    port: int = 9\n    dtype: str = Field(...)\ndef get():\n    return Settings()\nsettings = get()\nLIMITS = {"seqs": 64}\n'}, ["vllm serve ${MODEL:-org/m} --seed ${SEED:-7} --port ${PORT:-9} --max-num-seqs 64 --dtype $DTYPE"], "the value of --dtype", [set()]),  # noqa: E501
    "attributes of a class, of an object, and of one that is changed": ({"s.py": 'import subprocess\nclass A:\n    seed = 7\nclass B:\n    port: int = 9\n    dtype: str = "half"\na, b, c = A(), B(), B()\nb = B(port=8)\nd = B()\nd.dtype = pick()\nsubprocess.run(["vllm", "serve", "org/m", "--seed", str(A.seed), "--port", str(b.port), "--dtype", d.dtype])\n'}, ["vllm serve org/m --seed 7 --port $VALUE --dtype $DTYPE"], "the values of --port, --dtype", [set()]),  # noqa: E501
    "variables and parameters of a justfile": ({"Justfile": 'm := "org/m"\nport := env_var_or_default("PORT", "9")\n\nserve tp="2" *rest: build\n    vllm serve {{m}} --port {{ port }} -tp {{tp}}\n'}, ["vllm serve org/m --port 9 -tp 2"], "", [set()]),  # noqa: E501
    "defaults of Terraform's variables, and their attributes": ({"m.tf": 'resource "kubernetes_pod" "v" {\n  spec {\n    container {\n      image = "vllm/vllm-openai:v0.25.1"\n      args = ["--model", var.model, "--seed", "${var.vllm.seed}", "--port", var.port]\n    }\n  }\n}\n', "variables.tf": 'variable "model" { default = "org/m" }\nvariable "vllm" {\n  default = { seed = 7 }\n}\nvariable "port" {}\n'}, ["--model ${VAR_MODEL:-org/m} --seed ${VAR_VLLM_SEED:-7} --port $VAR_PORT"], "the value of --port", [set()]),  # noqa: E501
    "a --config file in folders that Compose mounts": ({"c.yaml": "services:\n  v: {image: 'vllm/vllm-openai:v0.16.0', gpus: all, command: [--config, /c/d/x.yaml, --seed, '1'], volumes: ['./e:/c:ro']}\n  w: {image: 'vllm/vllm-openai:v0.16.0', gpus: all, entrypoint: vllm serve --config=/x.yaml, configs: [{source: k, target: /x.yaml}]}\nconfigs: {k: {file: e/d/x.yaml}}\n", "e/d/x.yaml": "model: org/m\nswap-space: 4\nseed: 2\n"}, ["vllm/vllm-openai:v0.16.0 --model org/m --swap-space 4 --seed 1", "serve org/m --swap-space 4 --seed 2"], "", [{"no_effect"}, {"no_effect", "gpu_taken_twice"}]),  # noqa: E501
    "a --config file in a folder of the host": ({"r.sh": 'D="$(pwd)/e"\n' + MOUNTS.replace("${C}:/w/c.yaml", "$D:/w"), "e/c.yaml": "model: org/m\nswap-space: 4\n"}, ["vllm/vllm-openai:v0.16.0 --model org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "a --config file that an image holds": ({"Dockerfile": 'FROM vllm/vllm-openai:v0.16.0\nCOPY e /w/\nCMD ["--config", "/w/c.yaml", "--seed", "1"]\n', "e/c.yaml": "model: org/m\nswap-space: 4\n"}, ["vllm/vllm-openai:v0.16.0 --model org/m --swap-space 4 --seed 1"], "", [{"no_effect"}]),  # noqa: E501
    "no --config file of another place": ({"c.yaml": "services: {v: {image: 'vllm/vllm-openai:v0.16.0', gpus: all, command: [--config, /c/x.yaml], volumes: ['../../../../o:/c']}}\n", "x.yml": "model: org/m\n"}, ["--config /c/x.yaml"], "", [set()]),  # noqa: E501
    "the variables around the scripts of a workflow": ({"w.yml": "on: push\nenv: {M: org/m}\njobs:\n  t:\n    env: {CUDA_VISIBLE_DEVICES: '0,1'}\n    steps:\n      - run: vllm serve $M -tp 2\n      - name: again\n        run: vllm serve ${{ env.M }} --port 9 &\n"}, ["CUDA_VISIBLE_DEVICES=0,1 vllm serve org/m -tp 2", "vllm serve org/m --port 9"], "", [set()] * 2),  # noqa: E501
    "services of a manifest in TOML": ({"manifest.toml": '[vars]\nM = "org/m"\n[services.a]\ncommand = "vllm serve $M --port 9"\n[services.b]\ncommand = \'\'\'\nexec vllm serve org/n \\\n  --port 8\n\'\'\'\n'}, ["vllm serve org/m --port 9", "exec vllm serve org/n --port 8"], "", [set()] * 2),  # noqa: E501
    "processes of a supervisor in YAML": ({"p.yaml": "processes:\n  v: {command: vllm serve org/m --port 9}\n  w: {command: vllm serve org/n --port 8}\n"}, ["vllm serve org/m --port 9", "vllm serve org/n --port 8"], "", [set()] * 2),  # noqa: E501
    "the variables of a play": ({"p.yml": "- hosts: g\n  vars: {m: org/m, own: '{{ m }}-x'}\n  tasks:\n    - name: v\n      shell: vllm serve {{ m }} --served-model-name {{ own }} --port {{ port }} --seed {{ seed }}\n", "group_vars/all.yml": "port: 9\n"}, ["vllm serve org/m --served-model-name org/m-x --port 9 --seed"], "the value of --seed", [set()]),  # noqa: E501
    "flags of a release older than all that are known": ({"c.yaml": "services: {v: {image: 'vllm/vllm-openai:v0.4.2', gpus: all, command: [--model, org/m, --image-feature-size, '576', --engine-use-ray]}}\n"}, ["--model org/m --image-feature-size"], "", [set()]),  # noqa: E501
    "an array within a substitution, and within a text": ({"r.sh": 'A=(--model "$M" --seed 1)\nID=$(docker run --gpus all -p 127.0.0.1:8000:8000 vllm/vllm-openai:v0.25.1 "${A[@]}")\nC=(vllm serve org/m)\nssh h "nohup ${C[*]} --port 9 > log"\n'}, ["vllm/vllm-openai:v0.25.1 --model $M --seed 1", "vllm serve org/m --port 9"], "the value of --model", [set()] * 2),  # noqa: E501
    "a placeholder of words, a drawing, and words that are left out": ({"g.md": "```\n├── a.py  (vllm serve x --bad)\n```\n```bash\nvllm serve {your model} --seed 1 ...\n```\n```\n./x.sh (starts vllm serve)\n```\n"}, ["vllm serve $YOUR_MODEL --seed 1 $MORE"], "the value of $MORE", [set()]),  # noqa: E501
    "a container of vLLM's image with another program": ({"r.sh": "docker run -d vllm/vllm-openai:v0.25.1 tail -f /dev/null\ndocker run --gpus all vllm/vllm-openai:v0.25.1 --model org/m\n"}, ["--model org/m"], "", [set()]),  # noqa: E501
    "a --config file in a script that Compose mounts": ({"c.yaml": "services: {v: {image: 'vllm/vllm-openai:v0.16.0', gpus: all, entrypoint: [\"/bin/sh\", \"/app/s.sh\"], volumes: ['./s.sh:/app/s.sh', './x.yaml:/app/x.yaml']}}\n", "s.sh": "exec vllm serve org/m --config /app/x.yaml\n", "x.yaml": "seed: 2\nswap-space: 4\n"}, ["exec vllm serve org/m --seed 2 --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "the variables beside a Compose file": ({"c.yaml": "services:\n  v:\n    image: vllm/vllm-openai:${V}\n    gpus: all\n    env_file: [.env, ../a.env]\n    command: --model $M --seed ${S:-1} --port ${P:?} ${Q:+--quantization ${Q}} ${Z:+--dtype ${Z}}\n", ".env": "# of vLLM\nV=v0.25.1\nM=org/m  # a model\nexport S=2\nQ='fp8'\nVLLM_API_KEY=abc\n", "../a.env": "CUDA_VISIBLE_DEVICES=0\n"}, ["CUDA_VISIBLE_DEVICES=0 vllm/vllm-openai:v0.25.1 --model org/m --seed 2 --port ${P:?} --quantization fp8"], "more words of $Z than by default", [set()]),  # noqa: E501
    "variables of a file that a script sources": ({"s/r.sh": 'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nset -a\nif [ -f "$D/../c/s.env" ]; then source "${D}/../c/s.env"; fi\nset +a\nvllm serve "$M" --port ${P:-1} --hf-token "$K_TOKEN"\n', "c/s.env": 'M="org/m"\nP=9\nK_TOKEN=secret\nVLLM_USE_V1=0\n'}, ["vllm serve org/m --port 9 --hf-token ${HF_TOKEN:?}"], "", [{"variable_not_read"}]),  # noqa: E501
    "variables that a script exports line by line": ({"r.sh": '[ -f .env ] && export $(grep -v "^#" .env | xargs)\nvllm serve "$M" --port $P\n', ".env": "M=org/m\nP=9\n"}, ["vllm serve org/m --port 9"], "", [set()]),  # noqa: E501
    "the output of a command, and optional words": ({"r.sh": 'L=$(grep -m1 -oP "tokens [0-9]+" vllm.log)\nvllm serve org/m --max-model-len $L ${Q:+--quantization "$Q"} ${R:+--port 9 --dtype $R} --seed 1\n'}, ["vllm serve org/m --max-model-len $L --seed 1"], "more words of $Q, $R than by default", [set()]),  # noqa: E501
    "optional words of an image": ({"Dockerfile": 'FROM vllm/vllm-openai:v0.25.1\nENV M=org/m S=1\nENTRYPOINT vllm serve $M ${S:+--seed $S} ${Q:+--quantization "$Q"}\n'}, ["vllm serve org/m --seed 1"], "more words of $Q than by default", [set()]),  # noqa: E501
    "inputs of an action": ({"action.yml": "inputs: {model: {default: org/m}}\nruns:\n  steps:\n    - name: v\n      run: vllm serve \"${{ inputs.model }}\" --port 9 &\n"}, ["vllm serve org/m --port 9"], "", [set()]),  # noqa: E501
    "documents that a script writes": ({"r.sh": 'M=org/m\nt=$(mktemp)\ncat > "$D/r.sh" <<EOV\n#!/bin/bash\nexec \'${D}/bin/vllm\' serve \'${M}\' --port \'9\' $( [[ "$X" == 1 ]] && echo "--trust-remote-code" ) --seed 1\nEOV\ncat >"$t" <<EOF\n[Container]\nImage=vllm/vllm-openai:v0.25.1\nAddDevice=nvidia.com/gpu=all\nExec=$M --port 8 --tensor-parallel-size 4\nEOF\n'}, ["bin/vllm serve org/m --port 9", "vllm/vllm-openai:v0.25.1 org/m --port 8 --tensor-parallel-size 4"], "", [set(), {"no_shared_memory"}]),  # noqa: E501
    "commands for a process manager": ({"r.sh": 'pm2 start --name a "vllm serve org/m --port 9"\npm2 start "vllm serve org/n" --name b\nforever start -c "vllm serve org/o --port 8" .\n'}, ["vllm serve org/m --port 9", "vllm serve org/n", "vllm serve org/o --port 8"], "", [set()] * 3),  # noqa: E501
    "steps of a run": ({"v.yaml": "name: r\nresources: {cluster: c}\nimage: i\nrun:\n  - command: pip install vllm\n    workdir: /a\n  - command: |\n      vllm serve $M --port 9 &\n    workdir: /a\nenv: {M: org/m}\n"}, ["vllm serve org/m --port 9"], "", [{"vllm_not_pinned"}]),  # noqa: E501
    "a Makefile's definition and its calls": ({"Makefile": "IMAGE := vllm/vllm-openai:v0.25.1  # newest\nJ := --limit-mm-per-prompt '{\"image\": 1}'\nP := 9\ndefine serve\n\t@echo $(1)\n\tdocker run --gpus all -v c:/root/.cache $(IMAGE) $(1) --served-model-name $(2) --port $(P) $(3)\nendef\n\nup-a:\n\t$(call serve,org/m,a,$(J))\n\nup-b:\n\t$(call serve,org/n,b,)\n"}, ["vllm-openai:v0.25.1 org/m --served-model-name a --port 9 --limit-mm-per-prompt '{image: 1}'", "vllm-openai:v0.25.1 org/n --served-model-name b --port 9"], "", [set()] * 2),  # noqa: E501
    "a folder of Windows": ({"r.ps1": "docker run --gpus all -v F:\\s\\c:/models `\n  vllm/vllm-openai:v0.25.1 --model /models/m\n"}, ["--model /models/m"], "", [set()]),  # noqa: E501
    "remote code of a folder": ({"r.sh": "vllm serve ./m-4 --trust-remote-code\n"}, ["vllm serve ./m-4"], "", [set()]),
    "settings of Ray that a source builds": ({"s.py": "from ray.serve.llm import LLMConfig\nk = dict(engine_kwargs=dict(seed=1))\nif x:\n    k['a'] = 1\nLLMConfig(**k)\nLLMConfig(**dict(engine_kwargs=dict(seed=2), model_loading_config=dict(model_id='org/m')))\n"}, ["vllm serve $MODEL $K", "vllm serve org/m --seed 2"], "the value of $K", [set()] * 2),  # noqa: E501
    "the defaults of a recipe": ({"r.yaml": "name: r\ncontainer: vllm\ndefaults: {port: 9, n: 4}\ncommand: |\n  vllm serve org/m --port {port} --max-num-seqs {n} --limit-mm-per-prompt '{\"image\": 1}'\n"}, ["vllm serve org/m --port 9 --max-num-seqs 4 --limit-mm-per-prompt"], "", [set()]),  # noqa: E501
    "words that a script may add, one with a typing error": ({"r.sh": 'Q=${Q:-}\nT=${T:-2}\nvllm serve org/m ${P:+--tool-call-parsr "${P:-}"} ${Q:+--dtype $Q} ${T:+--seed $T}\n'}, ["vllm serve org/m --seed 2"], "have --tool-call-parsr, --dtype", [{"unknown_flag"}]),  # noqa: E501
    "objects that Ray Serve binds": ({"s.py": BOUND}, ["vllm serve org/m --tensor-parallel-size 2 --seed 4", "vllm serve org/n --seed 5 --max_len"], "", [set(), {"unknown_flag"}]),  # noqa: E501
    "variables of SageMaker's image in a dict": ({"s.py": 'env = {"SM_VLLM_MODEL": "org/m", "SM_VLLM_ENFORCE_EAGER": "true"}\nenv["SM_VLLM_SEED"] = str(7)\nother = {}\nother["SM_VLLM_SWAP_SPACE"] = "4"\nModel(env=env)\n'}, ["vllm serve org/m --enforce-eager --seed 7"], "", [set()]),  # noqa: E501
    "the release that a project installs": ({"a/r.sh": "vllm serve org/m --swap-space 4\n", "requirements.txt": "vllm==0.10.1\n", "Dockerfile": "FROM python\n"}, ["vllm serve org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "a release that other files of the project contradict": ({"r.sh": "vllm serve org/m --swap-space 4\n", "requirements.txt": "vllm==0.10.1\n", "pyproject.toml": 'dependencies = ["vllm==0.16.0"]\n'}, ["vllm serve org/m --swap-space 4"], "", [{"removed_flag"}]),  # noqa: E501
    "containers that run one after another": ({"r.sh": "docker run -d --name a --gpus all vllm/vllm-openai:v0.25.1 --model org/m\ndocker rm -f a\ndocker run -d --name a --gpus all vllm/vllm-openai:v0.25.1 --model org/n\n"}, ["--model org/m", "--model org/n"], "", [set()] * 2),  # noqa: E501
    "a container whose name is freed before it starts": ({"r.sh": "docker run -d --name a --gpus all vllm/vllm-openai:v0.25.1 --model org/m\ndocker rm -f b\ndocker run -d --name b --gpus all vllm/vllm-openai:v0.25.1 --model org/n\ndocker rm -f a\n"}, ["--model org/m", "--model org/n"], "", [set(), {"gpu_taken_twice"}]),  # noqa: E501
    "steps that an arrow joins in a guide": ({"g.md": "```\nstart → vllm serve begins → ready\n```\n```\nvllm serve org/m --seed 1  # a → b\n```\n"}, ["vllm serve org/m --seed 1"], "", [set()]),  # noqa: E501
    "a patch, whose pod another file has": ({"p.yaml": "kind: Deployment\nmetadata: {name: m}\nspec: {template: {spec: {containers: [{name: s, command: [vllm, serve], args: [org/m, --tensor-parallel-size=2], resources: {limits: {nvidia.com/gpu: 2}}}]}}}\n"}, ["vllm serve org/m --tensor-parallel-size=2"], "", [set()]),  # noqa: E501
    "patches of a Kustomization": ({"kustomization.yaml": "kind: Kustomization\npatches:\n- patch: |-\n    kind: InferenceService\n    spec: {predictor: {model: {args: [--max-model-len=64, --max-num-batched-tokens=32, -tp=2]}}}\n- patch: |-\n    - {op: add, path: /a, value: vllm}\n"}, ["vllm serve $MODEL --max-model-len=64"], "", [set()]),  # noqa: E501
    "single settings of Ray": ({"p.yaml": "applications:\n- name: a\n  args:\n    prefill_config: {model_loading_config: {model_id: a, model_source: org/m}, engine_kwargs: {seed: 1}}\n    decode_config: {model_loading_config: {model_id: a, model_source: org/m}, engine_kwargs: {seed: 2}}\n    ingress_deployment_config: {}\n"}, ["vllm serve org/m --served-model-name a --seed 1", "vllm serve org/m --served-model-name a --seed 2"], "", [set(), set()]),  # noqa: E501
    "variables of an application of Ray": ({"r.yaml": "kind: RayService\nspec:\n  serveConfigV2: |\n    applications:\n    - import_path: s:model\n      runtime_env: {pip: [vllm==0.25.1], env_vars: {MODEL_ID: org/m, TENSOR_PARALLELISM: '2'}}\n"}, ["vllm serve org/m --tensor-parallel-size 2"], "", [set()]),  # noqa: E501
    "a catalog of KubeAI": ({"values.yaml": "catalog:\n  m:\n    {url: 'hf://org/m', engine: VLLM, args: [--swap-space=4], resourceProfile: 'nvidia-gpu-l4:1'}\n  o: {url: 'ollama://o', engine: OLlama}\n"}, ["vllm serve org/m --swap-space=4"], "", [{"removed_flag"}]),  # noqa: E501
    "entries of a catalogue with what they share": ({"v.yaml": "vllm_defaults: {repository: vllm/vllm-openai, tag: v0.25.1, max_model_len: 64, seed: 1}\nparsers: {a: {tool_call_parser: hermes}, b: {reasoning_parser: qwen3}}\nservices: {ui: web}\ntts: {container_name: t, image: x/tts}\nmodels:\n- {name: n, hf_name: org/m, vllm: {max_num_seqs: 4, max_model_len: 32}}\n- {name: o, hf_name: org/o, vllm: {max_num_seqs: 8}}\n"}, ["vllm/vllm-openai:v0.25.1 serve org/m --max-num-seqs 4 --max-model-len 32 --seed 1", "serve org/o --max-num-seqs 8 --max-model-len 64 --seed 1"], "", [set(), set()]),  # noqa: E501
    "roles of a chart's values": ({"values.yaml": "app:\n  decode: {extraArgs: [--max-model-len, '64', --max-num-seqs=2]}\n  prefill: {extraArgs: [--max-model-len, '32', --max-num-seqs=4]}\nvllm: {on: 1}\n"}, ["vllm serve $MODEL --max-model-len 64 --max-num-seqs=2", "vllm serve $MODEL --max-model-len 32 --max-num-seqs=4"], "", [set(), set()]),  # noqa: E501
    "an extra that the image lacks": ({"c.yaml": "services:\n  v:\n    image: ${I:-vllm/vllm-openai:v0.25.1}\n    ipc: host\n    entrypoint: [sh, -c]\n    command: [\"pip install 'vllm[audio]'; vllm serve org/m --seed ${S:-1}\"]\n"}, ["vllm serve org/m --seed"], "", [set()]),  # noqa: E501
    "a notebook whose outputs are larger than a launch may be": ({"a.ipynb": PICTURES}, ["vllm serve org/n", "vllm serve org/m --seed 1"], "", [set()] * 2),  # noqa: E501
    "a command between three quotation marks on one line of a guide": ({"g.md": "```ssh host```\n\n```sh\nvllm serve org/m --seed 1\n```\ntext\n```\nls\n```\n"}, ["vllm serve org/m --seed 1"], "", [set()]),  # noqa: E501
    "a --config file beside a script": ({"r.sh": "vllm serve \\\n  --config c.yaml --seed 1\n", "c.yaml": "model: org/m\nswap-space: 4\nseed: 2\n"}, ["vllm serve org/m --swap-space 4 --seed 1"], "", [{"removed_flag"}]),  # noqa: E501
    "a --config file in the folder that a script changes into": ({"r.sh": 'cd "$(dirname "$0")/d"\nvllm serve org/n --config c.yaml\n', "d/c.yaml": "model: org/m\nseed: 1\n", "c.yaml": "seed: 2\n"}, ["vllm serve org/n --seed 1"], "", [set()]),  # noqa: E501
    "a --config file beside a guide, and those of others": ({"g.md": "```\nvllm serve --config c.yaml\n```\n```\nlitellm --config c.yaml\ndocker run -d vllm/vllm-openai:v0.25.1 --config c.yaml --model org/n\n```\n", "c.yaml": "model: org/m\nseed: 1\n"}, ["vllm serve org/m --seed 1", "--config c.yaml --model org/n"], "", [set()] * 2),  # noqa: E501
    "an init before the script of an image": ({"Dockerfile": 'FROM vllm/vllm-openai:v0.16.0\nCOPY run.sh /go.sh\nENTRYPOINT ["/usr/bin/tini", "-g", "-e", "143", "--", "/go.sh"]\n', "run.sh": "vllm serve org/m --swap-space 4\n"}, ["vllm-openai:v0.16.0 -c"], "", [{"no_effect"}]),  # noqa: E501
    "a shell for the image's own entry point": ({"Dockerfile": 'FROM vllm/vllm-openai:v0.25.1\nCMD ["sh", "-c", "vllm serve org/m --seed 1"]\n'}, ["vllm serve org/m --seed 1"], "", [{"entry_point_repeated"}]),  # noqa: E501
    "a shell in the place of the image's entry point": ({"c.yaml": "services: {v: {image: 'vllm/vllm-openai:v0.25.1', ipc: host, gpus: all, entrypoint: '', command: [sh, -c, vllm serve org/m --seed 1]}}\n"}, ["vllm serve org/m --seed 1"], "", [set()]),  # noqa: E501
    "a probe of the root": ({"d.yaml": pod("org/m", ", livenessProbe: {httpGet: {path: /, port: 8000}, initialDelaySeconds: 900}")}, ["vllm-openai:v0.25.1 org/m"], "", [{"probe_of_another_path"}]),  # noqa: E501
    "variables of nothing hold no key": ({"d.yaml": PUBLIC % "envFrom: []" , "e.yaml": PUBLIC % "envFrom: [{secretRef: {name: s}}]"}, ["org/m"] * 2, "", [{"public_without_a_key"}, set()]),  # noqa: E501
    "a port against a Service named vllm": ({"d.yaml": pod("org/m", ", env: [{name: VLLM_PORT, value: '0'}]") + "---\nkind: Service\nmetadata: {name: vllm}\n"}, ["org/m"], "", [set()]),  # noqa: E501
    "a method that a release lacks is one fact": ({"r.sh": "vllm serve Qwen/Qwen3-8B --quantization bitsandbytes\n"}, ["--quantization bitsandbytes"], "", [{"quantization_removed"}]),  # noqa: E501
    "a program whose path is an expression": ({"s.py": PATHS}, [f"vllm serve org/{name}" for name in "abcde"], "", [set()] * 5),  # noqa: E501
    "keys of a dict that branches set": ({"s.py": KEYED}, ["CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES VLLM_WORKER_MULTIPROC_METHOD=spawn vllm serve org/m --seed $SEED --dtype half $MAX_MODEL_LEN"], "$MAX_MODEL_LEN, which", [set()]),  # noqa: E501
    "names that another program replaces": ({"r.sh": "vllm serve __MODEL__ --seed @SEED@ --port %PORT%\n"}, ["vllm serve __MODEL__"], "the values of --seed, --port", [set()]),  # noqa: E501
    "a template of a chart whose values alone name vLLM": ({"Chart.yaml": "name: c\n", "values.yaml": "image: vllm/vllm-openai:v0.25.1\n", "templates/d.yaml": POD.replace("'vllm/vllm-openai:v0.25.1'", "'{{ .Values.image }}'").replace("vllm,", "main,") % "[org/m, --seed=1]"}, ["vllm-openai:v0.25.1 org/m --seed=1"], "", [set()]),  # noqa: E501
    "variables for Apptainer's container": ({"r.sbatch": "export APPTAINERENV_SEED=1\nSINGULARITYENV_CUDA_VISIBLE_DEVICES=1 apptainer exec --nv v.sif vllm serve org/m --tensor-parallel-size 2\n"}, ["vllm serve org/m --tensor-parallel-size 2"], "", [{"fewer_visible_than_ranks"}]),  # noqa: E501
    "a range of releases that a project admits": ({"a/r.sh": "uv run vllm serve org/m --swap-space 4\n", "pyproject.toml": 'dependencies = ["vllm>=0.9.0,<0.11"]\n'}, ["vllm serve org/m --swap-space 4"], "", [{"no_effect"}]),  # noqa: E501
    "a container of a chart whose name is changed": ({"Chart.yaml": "name: c\n", "values.yaml": "n: org/M\nimage: vllm/vllm-openai:v0.25.1\n", "templates/d.yaml": "a: {{ .Values.n | lower }}\n" + POD.replace("'vllm/vllm-openai:v0.25.1'", "'{{ .Values.image }}'").replace("vllm,", 'v-{{ .Values.n | replace "/" "-" | lower }},') % "[org/m]"}, ["vllm-openai:v0.25.1 org/m"], "", [{"weights_are_downloaded_again"}]),  # noqa: E501
    "an image that is pulled beside a wheel": ({"r.sh": "pip install vllm\ndocker pull vllm/vllm-openai:v0.10.2\nvllm serve org/m --swap-space 4\n"}, ["vllm serve org/m --swap-space 4"], "", [{"removed_flag", "vllm_not_pinned"}]),  # noqa: E501
}  # fmt: skip


@pytest.mark.slow
def test_what_a_launch_does_by_default_is_read(tmp_path: Path) -> None:
    wrong = {}
    around = {
        "image_not_pinned",
        "no_readiness_probe",
        "public_without_a_key",
        AGAIN,
        "model_not_in_a_volume",
        "gpu_limit_differs",
    }
    for at, (case, (files, texts, note, rules)) in enumerate(USUAL.items()):
        servers = laid(tmp_path / str(at) / "c", files)
        read = [server["read_as"].replace('"', "") for server in servers]
        found = [{each["rule"] for each in server["findings"] if each["severity"] != "info"} for server in servers]
        notes = " ".join(
            text
            for server in servers
            for text in server["not_checked"]
            if "branches" in text or "value" in text or "words" in text
        )
        is_read = len(servers) == len(texts) and all(map(str.__contains__, read, texts))
        if (
            not is_read
            or note not in notes
            or [names - (around - wanted) for names, wanted in zip(found, rules, strict=False)] != rules
        ):
            wrong[case] = (read, notes, found)
    assert not wrong


def test_a_config_file_that_is_read_is_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    servers = laid(
        tmp_path, {"s.py": 'import os\nos.system("vllm serve --config c.yaml")\n', "c.yaml": "model: org/m\n"}
    )
    assert (servers[0]["model"], [text for text in servers[0]["not_checked"] if "--config" in text]) == ("org/m", [])


def test_a_value_that_is_replaced_by_a_variable_yields_no_error(tmp_path: Path) -> None:
    """Errors that do not speak of the value stay: a flag that the release does not have, a word too many."""
    wrong, value = {}, re.compile(r"(--?[a-z][a-z-]+(?:=|[ \t]+|['\"]?,[ \t]*['\"]?))(\d+|half|auto)\b(?![=:/.])")
    for at, (case, (files, *_)) in enumerate(USUAL.items()):
        changed = {name: value.sub(r"\1$UNSEEN", text) for name, text in files.items() if not name.endswith(".py")}
        if changed == files or len(changed) != len(files):
            continue
        before, after = (
            {
                each["rule"]
                for server in laid(tmp_path / f"{at}-{turn}", given)
                for each in server["findings"]
                if each["severity"] == "error"
            }
            for turn, given in enumerate((files, changed))
        )
        if after - before:
            wrong[case] = after - before
    assert not wrong
