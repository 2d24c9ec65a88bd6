"""Messages as a person gets them: recorded incidents in a real Prometheus, an Alertmanager and its local receivers.

The goldens are the messages as they are read: one for each trouble, whose text alone says what, where, how bad, since
when and what to do.
"""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import alertmanager, receivers, timelines
from support.alertmanager import snippet
from support.paths import GOLDENS
from support.prometheus_server import PLACES, hasty, program, serving
from support.receivers import Received
from support.timelines import Series, blocks
from support.waiting import until

from diag.artefacts.generate import files
from diag.core.contract import Contract, Site
from diag.knowledge.catalog import load
from diag.knowledge.formulas import model_series
from diag.promql import Block

SITE = Site(grafana_url="https://grafana.example")
CONTRACT = Contract(ttft_seconds=1.0, e2e_seconds=10, site=SITE)  # recorded queues and prefills break it
generated = cache(lambda: files(load(), CONTRACT))
REPLAYED = {
    "kv_eviction_cascade": "kv_eviction_cascade",
    "prefill_decode_contention": "contract_breached",
    "engine_dead": "engine_dead",
    "engine_stalled": "engine_stalled",
    "gpu_thermal_throttling": "gpu_thermal_throttling",
    "gpu_fault": "gpu_fault",
    "queue_saturation": "contract_breached",
}
"""Incidents that are replayed, and the incident of the one message about each."""


def receiving(received: Received, folder: Path) -> str:
    """The documented configuration with every documented receiver, all of them at local addresses."""
    config = snippet(generated(), "alertmanager.yml")
    documented = snippet(generated(), "receivers.yml")
    (folder / "slack.url").write_text(f"{received.http}/slack")
    for key in ("pagerduty.key", "opsgenie.key"):
        (folder / key).write_text("key")
    documented = documented.replace("/etc/alertmanager", str(folder))
    for name, url in (("routing_key_file", "url"), ("api_key_file", "api_url")):
        path = "pagerduty" if name == "routing_key_file" else "opsgenie/"
        documented = re.sub(rf"( +)- {name}: .*\n", rf"\g<0>\g<1>  {url}: {received.http}/{path}\n", documented)
    mail = f"smarthost: {received.smtp}\n        require_tls: false"
    documented = documented.replace("smarthost: mail.example.com:587", mail)
    both = config[: config.index("receivers:")] + documented + "  - name: nobody\n"
    both = both.replace("/etc/alertmanager/diag", str(folder))
    hasty = alertmanager.hasty(both, pages="15s", tickets="90s")  # the page comes minutes of its `for` after its cause
    return hasty.replace("group_wait: 90s", "group_wait: 90s\n  group_interval: 30s", 1)


def on(host: str, series: Series) -> Iterator[Block]:
    """The timeline of a pod of its own, which serves a model of its own."""
    for block in blocks(series):
        labels = tuple(
            {
                **each,
                "instance": f"{host}:8000",
                "namespace": "inference",
                "pod": f"{host}-0",
                **({"model_name": f"org/{host}"} if "model_name" in each else {}),
            }
            for each in block.labels
        )
        yield block._replace(labels=labels)
    place = {"model_name": f"org/{host}", "namespace": "inference", "pod": f"{host}-0", "job": "vllm"}
    place |= {"place": f"org/{host} at inference/{host}-0"}
    known = {"__name__": model_series(("instance",)), "instance": f"{host}:8000", **place}  # as recorded before
    yield Block((known,), block.times, np.ones((1, block.times.size)))


@pytest.fixture(scope="module", params=[PLACES[1], pytest.param(PLACES[0], marks=pytest.mark.nightly)])
def received(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Received]:
    folder = tmp_path_factory.mktemp("messages")
    (folder / "diag.rules.yaml").write_text(hasty(generated()["alerts/diag.rules.yaml"]))
    (folder / "diag.tmpl").write_text(generated()["alerts/templates/diag.tmpl"])
    with (
        receivers.listening() as arrived,
        alertmanager.running(folder, generated(), receiving(arrived, folder)) as address,
    ):
        documented = snippet(generated(), "prometheus.yml").replace("/etc/prometheus/diag", str(folder))
        sick = {name.replace("_", "-"): timelines.faulty(name)[0] for name in REPLAYED}
        samples = [block for host, series in sick.items() for block in on(host, series)]
        with serving(program(request.param), samples, documented.replace("alertmanager:9093", address)):
            until(lambda: len(arrived.of("/slack")) + len(arrived.of("/pagerduty")) >= len(REPLAYED))
            time.sleep(40)  # another message about one of these troubles would come by now
            yield arrived


def read(text: str) -> str:
    """A message without the addresses of this host and the time of day."""
    text = re.sub(r"http://[\w.-]+:\d+", "http://HERE", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "2026-01-01 02:15 UTC", text)
    text = re.sub(r"since \d\d:\d\d UTC", "since 02:15 UTC", text)
    text = re.sub(r"(from|to)(=|%3D| )\d{9,}", r"\1\g<2>N", text)
    return re.sub(r"--from \d+", "--from N", text)


def without_numbers(text: str) -> str:
    """The text with any measured number: they are those of the second in which the rules are evaluated."""
    return re.sub(r"(?<![\w.:/=%-])\d+(?:\.\d+)?(?![\w.:/-]*[:/-])", "#", text)


def messages(received: Received) -> dict[str, str]:
    """Return the text that a person reads, by the model that it is about."""
    found = [
        *(
            (post["payload"]["summary"], post["payload"]["custom_details"]["text"])
            for post in received.of("/pagerduty")
        ),
        *((mail["subject"], mail["text"]) for mail in received.mails),
    ]
    named: dict[str, list[str]] = {}
    for subject, text in found:
        model = re.search(r"org/([\w-]+)", subject)
        named.setdefault(model[1] if model else subject, []).append(f"{subject}\n\n{text.strip()}\n")
    assert {name: len(texts) for name, texts in named.items()} == dict.fromkeys(named, 1)
    return {name: read(texts[0]) for name, texts in named.items()}


@pytest.mark.prometheus
def test_each_trouble_is_one_message_that_stands_alone(received: Received, golden: Callable[[str, str], None]) -> None:
    found = messages(received)
    assert {*found} == {name.replace("_", "-") for name in REPLAYED}
    about = {name: re.search(r"var-incident=(\w+)", text)[1] for name, text in found.items()}
    assert about == {name.replace("_", "-"): alert for name, alert in REPLAYED.items()}
    text, kept = f"\n{'=' * 80}\n".join(found[name] for name in sorted(found)), GOLDENS / "messages.txt"
    before = kept.read_text(encoding="utf-8")
    golden(kept.name, before if without_numbers(before) == without_numbers(text) else text)


def posted(address: str, *alerts: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://{address}/api/v2/alerts", json.dumps(alerts).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=10).close()


def filled(
    pod: str, since: datetime, until: datetime | None = None, incident: str = "kv_eviction_cascade"
) -> dict[str, Any]:
    """An alert as Prometheus posts it, with characters that Slack and HTML would take for markup."""
    where = {"model": "org/m", "namespace": "inference", "pod": pod, "job": "vllm", "instance": f"{pod}:8000"}
    labels = {"alertname": incident, "incident": incident, "severity": "critical", **where}
    annotations = {
        "title": "KV-cache preemption cascade",
        "summary": f"KV-cache preemption cascade on org/m at inference/{pod} engine 0: 1.33 preemptions & more",
        "impact": "running streams pause for seconds",
        "do_now": "Limit gateway concurrency to 6 per engine.",
        "description": "preemptions / finished request: 1.33 (> 0.2 over 5m); cache <b>full</b>: 0 (< 1)",
        "runbook_url": "https://runbooks.example/kv_eviction_cascade.md",
        "dashboard_url": "https://grafana.example/d/diag-server?var-incident=kv_eviction_cascade&from=1&to=2",
        "doctor": f"diag doctor --prometheus http://p --match 'instance=\"{pod}:8000\"' --from 1",
    }
    ends = {} if until is None else {"endsAt": until.isoformat()}
    return {"labels": labels, "annotations": annotations, "startsAt": since.isoformat(), **ends}


@pytest.mark.prometheus
def test_every_receiver_gets_one_message_and_its_resolution(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    (tmp_path / "diag.tmpl").write_text(generated()["alerts/templates/diag.tmpl"])
    with receivers.listening() as arrived:
        config = receiving(arrived, tmp_path).replace("receiver: tickets\n", "receiver: both\n", 1)
        every = re.sub(r"  - name: (pager|tickets)\n", "", config.partition("receivers:\n")[2])
        every = f"receivers:\n  - name: both\n{every}".replace("  - name: nobody\n", "")
        routes = re.sub(r"  routes:\n(    .*\n)+", "", config.partition("receivers:\n")[0])
        with alertmanager.running(
            tmp_path, generated(), (routes + every).replace("group_wait: 90s", "group_wait: 10s")
        ) as address:
            until(lambda: answers(f"http://{address}/-/ready"))
            now = datetime.now(UTC)  # with a first alert older than group_wait, a group is sent before its second comes
            posted(address, filled("vllm-0", now), filled("vllm-1", now))
            until(lambda: len(everything(arrived)) >= 4)
            since = now.replace(second=0, microsecond=0) - timedelta(minutes=30)
            over = since + timedelta(minutes=29, seconds=30)
            posted(address, filled("vllm-0", since, over), filled("vllm-1", since, over))
            until(lambda: len(everything(arrived)) >= 8)
    assert len(everything(arrived)) == 8
    golden("messages_by_receiver.txt", read("\n".join(everything(arrived))))


@pytest.mark.prometheus
def test_cause_known_after_its_slo_updates_the_page_that_is_open(tmp_path: Path) -> None:
    (tmp_path / "diag.tmpl").write_text(generated()["alerts/templates/diag.tmpl"])
    with receivers.listening() as arrived:
        config = receiving(arrived, tmp_path).replace("group_wait: 15s", "group_wait: 2s")
        config = config.replace("group_interval: 1m", "group_interval: 5s")
        with alertmanager.running(tmp_path, generated(), config) as address:
            until(lambda: answers(f"http://{address}/-/ready"))
            now = datetime.now(UTC)
            posted(address, filled("vllm-0", now, incident="contract_breached"))
            until(lambda: len(arrived.of("/pagerduty")) == 1)
            cause = filled("vllm-0", now)  # its alert ends that of the SLO
            posted(address, cause, filled("vllm-0", now, datetime.now(UTC), "contract_breached"))
            until(lambda: len(arrived.of("/pagerduty")) == 2)
            posted(address, filled("vllm-0", now, datetime.now(UTC)), filled("vllm-0", now, incident="engine_dead"))
            posts = until(lambda: len(found := arrived.of("/pagerduty")) == 4 and found)
    page, update, *others = posts
    ends, dead = sorted(others, key=lambda post: post["event_action"])
    assert {post["dedup_key"] for post in (page, update, ends)} == {page["dedup_key"]} != {dead["dedup_key"]}
    assert "RESOLVED" not in update["payload"]["custom_details"]["text"]
    assert [post["event_action"] for post in (page, update, ends, dead)] == ["trigger", "trigger", "resolve", "trigger"]


@pytest.mark.parametrize(("grafana", "known"), [("https://grafana.example", True), ("http://localhost:3000", False)])
def test_no_message_has_a_link_to_a_grafana_at_localhost(tmp_path: Path, grafana: str, known: bool) -> None:
    """A link to the Grafana of deploy/compose opens nothing on a phone; the title leads to the runbook instead."""
    now = datetime.now(UTC)
    alert = {"status": "firing", **filled("vllm-0", now)}
    alert["annotations"]["dashboard_url"] = f"{grafana}/d/diag-server?var-incident=kv_eviction_cascade"
    labels = alert["labels"]
    (tmp_path / "data.json").write_text(json.dumps({"status": "firing", "commonLabels": labels, "alerts": [alert]}))
    (tmp_path / "diag.tmpl").write_text(generated()["alerts/templates/diag.tmpl"])
    texts = [f'{{{{ template "diag.{name}" . }}}}' for name in ("text", "slack.text", "mail.html")]
    texts += [f'{{{{ template "diag.{name}" (index .Alerts 0) }}}}' for name in ("dashboard", "link")]
    amtool = shutil.which("amtool") or pytest.skip("no amtool: .ci/components installs it")
    command = [amtool, "template", "render", f"--template.glob={tmp_path}/diag.tmpl"]
    command += [f"--template.data={tmp_path}/data.json", f"--template.text={'|||'.join(texts)}"]
    all_shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("|||")
    for text, shown in zip(texts, all_shown, strict=True):
        assert (grafana in shown, shown.startswith("https://runbooks.example/")) == (
            known,
            "link" in text and not known,
        )


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def everything(arrived: Received) -> list[str]:
    """Return what each receiver shows, receiver by receiver."""
    shown = []
    for post in arrived.of("/slack"):
        (card,) = post["attachments"]
        shown.append(f"== Slack, {card['color']}\n{card['title']}\n{card['title_link']}\n{card['text']}")
    for post in arrived.of("/pagerduty"):
        event = {"action": post["event_action"], **post.get("payload", {}).get("custom_details", {})}
        links = [f"{link['text']}: {link['href']}" for link in post.get("links", ())]
        about = post.get("payload", {})
        lines = [f"{about.get('severity')}: {about.get('summary')}", event.get("text", ""), *links]
        shown.append("\n".join([f"== PagerDuty, {event['action']}", *lines]))
    for path, post in arrived.posts:
        if path.startswith("/opsgenie"):
            shown.append(
                f"== Opsgenie {post.get('priority', 'close')}\n{post.get('message')}\n{post.get('description')}"
            )
    shown += [f"== Mail\n{mail['subject']}\n{mail['text']}\n{mail['html']}" for mail in arrived.mails]
    return shown
