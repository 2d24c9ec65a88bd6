"""vLLM's metrics under other names: recognised on a page, named as vLLM names them, and asked for by these names."""

import re

import pytest
from support import rewriting
from support.ray_pages import as_ray

from diag.core.contract import Contract
from diag.core.metric_prefix import in_any_release, named_as_ours, with_prefix
from diag.knowledge.formulas import formula
from diag.promql import parse

LINE = b'num_requests_running{engine="0",model_name="tiny"} 3.0\n'


@pytest.mark.parametrize("prefix", ["vllm_", "kserve_vllm:", "ray_vllm:", "ray_vllm_", "acme_prod_vllm_"])
def test_any_prefix_is_found_and_replaced(prefix: str) -> None:
    page = b"# HELP " + prefix.encode() + b"num_requests_running Requests.\n" + prefix.encode() + LINE
    named, found = named_as_ours(page)
    assert found == prefix
    assert named.startswith(b"# HELP vllm:num_requests_running Requests.\nvllm:" + LINE)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(b"vllm:" + LINE, id="vLLM's own"),
        pytest.param(b"# TYPE x gauge\nvllm:" + LINE + b"vllm_" + LINE, id="under both names"),
        pytest.param(b"diag_vllm_up 1\ndiag_vllm_startup_phase 1\n", id="the exporter's without a server"),
        pytest.param(b"job:vllm:" + LINE, id="a recording rule's"),
        pytest.param(b"sglang:" + LINE, id="another engine's"),
        pytest.param(b"vllm_router:" + LINE, id="a router's"),
    ],
)
def test_other_pages_are_left_as_they_are(page: bytes) -> None:
    assert named_as_ours(page) == (page, "")


def test_a_counter_that_ray_has_not_created_yet_is_zero() -> None:
    """RayCounterWrapper.inc(0) does nothing: without a preemption there is no series."""
    page = as_ray('vllm:num_requests_running{engine="0"} 3\nvllm:num_preemptions_total{engine="0"} 0\n')
    assert "preemptions" not in page
    named, _ = named_as_ours(page.encode())
    (line,) = (line for line in named.splitlines() if line.startswith(b"vllm:num_preemptions_total"))
    assert line.endswith(b" 0") and b'engine="0"' in line


def test_replicas_on_one_node_are_engines_of_their_own() -> None:
    page = 'vllm:num_requests_running{engine="0"} 3\n'
    both = as_ray(page, replica="a1") + as_ray(page, replica="b2")
    named, _ = named_as_ours(both.encode())
    assert b'engine="0@a1"' in named and b'engine="0@b2"' in named
    alone, _ = named_as_ours(as_ray(page, replica="a1").encode())
    assert b'engine="0"' in alone


def test_an_expression_asks_for_the_sites_names_and_for_no_others() -> None:
    promql = 'sum(vllm:a) + job:vllm:b + max({__name__=~"vllm:(c|d)"}) + diag_vllm_up'
    assert with_prefix(promql, "vllm:") == promql
    assert with_prefix(promql, "kserve_vllm:") == (
        'sum(kserve_vllm:a) + job:vllm:b + max({__name__=~"kserve_vllm:(c|d)"}) + diag_vllm_up'
    )


def test_counter_missing_in_ray_is_zero_in_expressions() -> None:
    asked = with_prefix(formula("$preemptions", ("instance",), "5m", Contract()).written_out(), "ray_vllm_")
    assert asked == (
        "(sum by (instance) ((increase(ray_vllm_num_preemptions_total[5m])"
        " or 0 * last_over_time(ray_vllm_num_requests_running[5m]))))"
    )


def test_a_page_of_vllm_itself_is_not_copied() -> None:
    (_, _, page), *_ = rewriting.scrapes("healthy")
    whole = page.encode()
    assert named_as_ours(whole)[0] is whole


@pytest.mark.parametrize(
    ("promql", "in_all"),
    [
        (
            'sum by (le) (rate({}_bucket{{le=~"(1|2)"}}[5m]))',
            'sum by (le) (rate(x_bucket{le=~"(1|2)"}[5m]) or rate(y_bucket{le=~"(1|2)"}[5m]))',
        ),
        (
            "quantile_over_time(0.5, {}[5m]) + 1",
            "(quantile_over_time(0.5, x[5m]) or quantile_over_time(0.5, y[5m])) + 1",
        ),
        (
            "predict_linear({}_count[5m] offset 1h, 0)",
            "(predict_linear(x_count[5m] offset 1h, 0) or predict_linear(y_count[5m] offset 1h, 0))",
        ),
        ("max({} and up)", "max((x or y) and up)"),
        ('{{__name__=~"up|{}_sum"}}', '{__name__=~"up|x_sum|y_sum"}'),
        ("{}_of_another + my:{}", "x_of_another + my:x"),
    ],
)
def test_a_query_asks_for_every_name_of_a_renamed_metric(promql: str, in_all: str) -> None:
    widened = in_any_release(promql.format(*["vllm:inter_token_latency_seconds"] * 2))
    promql_of = {"x": "vllm:inter_token_latency_seconds", "y": "vllm:time_per_output_token_seconds"}
    assert widened == re.sub(r"\b[xy](?=_|\b)", lambda name: promql_of[name[0]], in_all)
    parse(widened)
