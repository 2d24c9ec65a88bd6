"""Notations of a launch: what is not shown, what another program's is, and hostile texts."""

import time

import pytest
from support.sampling import some

from diag.commands.lint import judge
from diag.core.errors import BadUsage
from diag.lint.rule import LintTarget
from diag.lint.rules import RULES, lint
from diag.vllm.command.command import command_line
from diag.vllm.command.parse import parse
from diag.vllm.command.writings import EXPECTED, FORMS

SECRET = "hf_aBcDeFgHiJkLmNoPqRsT"


@pytest.mark.parametrize(
    ("arguments", "version", "words"),
    [
        ({"model": "m", "enforce_eager": True}, "", ["m", "--enforce-eager"]),
        ({"enforce_eager": False}, "0.32.0", ["--no-enforce-eager"]),
        ({"enforce_eager": False}, "0.7.0", []),  # that release has no --no- form, and the switch is off
        ({"enable_chunked_prefill": False}, "0.32.0", ["--no-enable-chunked-prefill"]),
        ({"disable_log_requests": True}, "0.32.0", ["--disable-log-requests"]),
        ({"max_model_len": None}, "", []),
        ({"tensorParallelSize": 2}, "", ["--tensor-parallel-size", "2"]),
        ({"tensor_paralel_size": 2}, "", ["--tensor_paralel_size", "2"]),
        ({"served_model_name": ["a", "b"]}, "", ["--served-model-name", "a", "b"]),
        ({"allowed_origins": ["*"]}, "", ["--allowed-origins", '["*"]']),
        ({"hf_overrides": {"a": 1}}, "", ["--hf-overrides", '{"a": 1}']),
        ({"compilation_config": 3}, "0.32.0", ["--compilation-config", '{"mode": 3}']),
        ({"compilation_config": 3}, "0.9.0", ["--compilation-config", '{"level": 3}']),
        ({"trust_remote_code": "true"}, "", ["--trust-remote-code"]),
        ({"trust_remote_code": "$X"}, "", ["$TRUST_REMOTE_CODE"]),
        ({"max_logprobs": -1}, "", ["--max-logprobs=-1"]),
    ],
)
def test_keywords_become_the_words_of_a_command_line(
    arguments: dict[str, object], version: str, words: list[str]
) -> None:
    assert command_line(arguments, version) == words


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("N = 8 * 1024\nLLM('m', max_model_len=N)", "8192"),
        ("N = 1\nN = 2\nLLM('m', max_model_len=N)", "$MAX_MODEL_LEN"),
        ("def f(N):\n  LLM('m', max_model_len=N)\nN = 5", "$MAX_MODEL_LEN"),
        ("a = {'max_model_len': 5}\nLLM('m', **a)", "5"),
        ("a = {'max_model_len': 5}\na['max_model_len'] = g()\nLLM('m', **a)", "$MAX_MODEL_LEN"),
        ("a = {'max_model_len': 5}\na.update(b)\nLLM('m', **a)", None),
        ("a = {'max_model_len': 5}\nLLM('m', **{**a, **b})", "5"),
        ("LLM('m', max_model_len=9**9)", "$MAX_MODEL_LEN"),
        ("  llm = vllm.LLM('m', max_model_len=7)", "7"),
        ("!pip install vllm\nLLM('m', max_model_len=7)", "7"),
    ],
)
def test_constants_are_followed_and_nothing_is_executed(text: str, value: str | None) -> None:
    assert parse(text).get("--max-model-len") == value


@pytest.mark.parametrize(
    "text",
    [
        "from langchain.llms import LLM\nLLM(model='m')",
        "class LLM:\n  pass\nLLM(model='m')",
        "llm = LLM(model='m', base_url=url)",
        "docker run a/vllm-runtime:1 dynamo serve graphs.agg:Frontend --port 8000",
        'FROM vllm/vllm-openai\nENTRYPOINT []\nCMD ["uvicorn", "app:main"]',
        "FROM vllm/vllm-tpu\nRUN x",
        "kind: Deployment\nspec: {containers: [{name: web, image: nginx, args: [--pool, vllm-pool]}]}",
        "MODEL_NAME=gpt-4\nLOG_LEVEL=INFO",
        "just words",
    ],
)
def test_other_programs_are_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(BadUsage, match=r"\A[^\n]*\Z"):
        parse(text)


def test_refusal_names_each_accepted_form() -> None:
    with pytest.raises(BadUsage) as error:
        parse("nothing")
    assert EXPECTED in str(error.value)
    assert all(form in EXPECTED for form in FORMS)


@pytest.mark.parametrize(
    "text",
    [
        f"LLM(model='m', hf_token='{SECRET}', api_key='{SECRET}', load='{SECRET}')",
        f"MODEL_NAME=m\nMAX_MODEL_LEN=5\nHF_TOKEN={SECRET}\nOTHER={SECRET}",
        f'FROM vllm/vllm-openai\nENV HF_TOKEN={SECRET}\nCMD ["--model", "m", "--hf-token", "{SECRET}"]',
        f"containers:\n- image: vllm/vllm-openai\n  args: [m, --api-key, {SECRET}]\n"
        f"  env: [{{name: A, value: {SECRET}}}]\n",
        f"applications: [{{args: {{llm_configs: [{{engine_kwargs: {{hf_token: {SECRET}, swap_space: 4}}}}]}}}}]",
    ],
)
def test_secrets_of_a_notation_are_not_shown(text: str) -> None:
    assert SECRET not in repr(judge(text, "0.32.0"))


def test_report_names_the_form_and_what_the_text_does_not_show() -> None:
    report = judge("LLM(model=args.model, tensor_parallel_size=args.tp, **more)", "0.32.0")
    assert report.writing == "Python: LLM(...)"
    assert "the values of --tensor-parallel-size, $MORE, which the text does not show" in report.not_checked
    pod = "containers: [{image: vllm/vllm-openai, args: [m], envFrom: [{configMapRef: {name: settings}}]}]"
    assert any("a ConfigMap" in each for each in judge(f"kind: Pod\n{pod}", "0.32.0").not_checked)


# -- pods -------------------------------------------------------------------------------------------------------------

HEALTHY = """
kind: Deployment
spec:
  template:
    spec:
      terminationGracePeriodSeconds: 120
      containers:
      - image: vllm/vllm-openai:v0.32.0
        args: [--model, m, ARGS]
        startupProbe: {httpGet: {path: /health}, failureThreshold: 60, periodSeconds: 10}
        livenessProbe: {httpGet: {path: /health}, periodSeconds: 5, failureThreshold: 3}
        lifecycle: {preStop: {exec: {command: [sleep, "15"]}}}
        resources: {limits: {nvidia.com/gpu: "2", memory: 64Gi}}
        volumeMounts: [{name: shm, mountPath: /dev/shm}]
---
kind: ScaledObject
spec:
  triggers:
  - {type: prometheus, metadata: {query: 'sum(vllm:num_requests_waiting{job="x"}) by (model_name)'}}
---
kind: HorizontalPodAutoscaler
spec: {metrics: [{type: Pods, pods: {metric: {name: vllm_num_requests_waiting}}}]}
"""


def found(text: str) -> set[str]:
    pods = {rule.id for rule in RULES.values() if rule.topic == "pods"}
    return {each.rule for each in lint(LintTarget(parse(text, "0.32.0"), "0.32.0"))} & pods


@pytest.mark.parametrize(
    "arguments",
    [
        "-tp, '2', --shutdown-timeout, '60'",
        "-tp, '2', --cpu-offload-gb, '16'",
        "-tp, $(TP)",
        "-tp, '8', --distributed-executor-backend, ray",
        "-tp, '8', --nnodes, '4'",
        "-dp, '8', --data-parallel-size-local, '2'",
    ],
)
def test_healthy_pod_has_no_finding(arguments: str) -> None:
    assert found(HEALTHY.replace("ARGS", arguments)) == set()


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("failureThreshold: 60", "failureThreshold: 3", "probe_kills_the_start"),
        (
            "livenessProbe: {httpGet: {path: /health}",
            "livenessProbe: {httpGet: {path: /v1/models}",
            "liveness_without_engine",
        ),
        ("'60'", "'110'", "grace_period_too_short"),
        ("mountPath: /dev/shm", "mountPath: /cache", "no_shared_memory"),
        ('gpu: "2"', 'gpu: "1"', "gpu_limit_differs"),
        ('gpu: "2"', 'gpu: "4"', "gpu_limit_differs"),
        ("memory: 64Gi", "memory: 16Gi", "memory_limit_too_low"),
        ("vllm:num_requests_waiting", "num_requests_waiting", "autoscaler_metric_missing"),
        ("vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc", "autoscaler_metric_missing"),
    ],
)
def test_one_mistake_in_a_pod_is_found(before: str, after: str, rule: str) -> None:
    text = HEALTHY.replace("ARGS", "-tp, '2', --shutdown-timeout, '60', --cpu-offload-gb, '16'")
    assert before in text
    assert found(text.replace(before, after)) == {rule}


# -- hostile texts ----------------------------------------------------------------------------------------------------

MIB = 2**20
HOSTILE = {
    "a sum": "LLM(model=" + "1+" * (MIB // 4) + "1)",
    "parentheses": "LLM(" + "(" * (MIB // 2),
    "attributes": "LLM(" + "a." * (MIB // 4) + "b)",
    "many engines": "LLM(model='m')\n" * (MIB // 16),
    "many arguments": "LLM(" + ",".join(f"a{i}={i}" for i in range(40_000)) + ")",
    "a dict of itself": "a={**a}\nLLM(**a)",
    "dicts of dicts": "\n".join(f"a{i}=dict(**a{i + 1},**a{i + 1})" for i in range(60)) + "\nLLM(**a0)",
    "values of values": "\n".join(f"a{i}=dict(x=a{i + 1},y=a{i + 1})" for i in range(60)) + "\nLLM(model=a0)",
    "a large number": "LLM(model='m', max_model_len=" + "*".join(["999999"] * 2000) + ")",
    "an alias": f"a: &a '{'x' * MIB}'\ncontainers:\n- {{image: vllm, args: [{','.join(['*a'] * 9_000)}]}}\n",
    "a list as an alias": f"a: &a ['{'x' * 500_000}']\ncontainers:\n" + "- {image: vllm, args: *a}\n" * 9_000,
    "open templates": "kind: x\n" + "{{ " * (MIB // 12),
    "variables": "MODEL_NAME=x\n" + "\n".join(f"A{i}=b" for i in range(80_000)),
    "growing variables": "FROM vllm/vllm-openai\nENV A=xx\n" + "ENV A=$A$A\n" * 50_000 + 'CMD ["--model","m"]',
    "many variables": "FROM vllm\n" + "".join(f"ENV A{i}=b\n" for i in range(50_000)) + 'CMD ["--model","m"]',
    "continued lines": "FROM vllm/vllm-openai\n" + "\\\n" * (MIB // 2),
    "comments": "#a\n" * (MIB // 3) + "FROM x",
    "lines": "\n" * MIB + "FROM",
    "documents": "".join(f"apiVersion: {i}\ncat <<A{i}\nkind: x\nA{i}\n" for i in range(15_000)),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", some(HOSTILE.values(), 1), ids=some(HOSTILE, 1))
def test_a_hostile_text_is_read_or_refused_in_bounded_time(text: str) -> None:
    began = time.process_time()
    try:
        parse(text, "0.32.0")
    except BadUsage as error:
        assert "\n" not in str(error)
    assert time.process_time() - began < 15
