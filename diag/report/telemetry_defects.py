"""Sentences about defects of the telemetry, each with the change that repairs it."""

from diag.core.formatting import listed, moment, printable
from diag.core.metric_prefix import relabelling
from diag.diagnosis.report import TelemetryDefect

FEW = 3
"""Servers above which a defect of every server is reported as one of "all servers"."""
SENTENCES = {
    "ended": (
        "nothing was scraped after {time}, so this report shows the state at that time; check in Prometheus, Status >"
        " Targets, whether these servers still exist"
    ),
    "gone": (
        "no longer scraped: {servers}, since {time} or earlier, so their state is unknown; unless they were stopped on"
        " purpose, check the service discovery of Prometheus"
    ),
    "gaps": (
        "scrapes missing: {servers}, up to {percent:.0f} % of them; what happened in these gaps is unknown. A failed"
        " scrape would leave up = 0, so Prometheus was down or overloaded, or its service discovery had lost these"
        " targets"
    ),
    "slow": (
        "scraped only every {number:.0f} s: {servers}; too rare for the alerts {names}, which fire late or never: set"
        " scrape_interval to 15s"
    ),
    "renamed": (
        "metrics stored as {prefix}... instead of {usual}..., which no rule matches: {servers}; judged all the same;"
        ' add to the scrape job {relabelling} (alerts/relabel.yaml), or state prefix = "{prefix}" in diag.toml, [site]'
    ),
    "double": (
        "several targets have the same instance label, so that sums count twice: {servers}{jobs}; scrape each server"
        " once, or, if they are different servers, name the labels that distinguish them in diag.toml, [site] labels"
    ),
    "aliases": (
        "the same server is scraped as several instances, each diagnosed and alerted on: {groups}; scrape it once,"
        " through `diag exporter` where there is one"
    ),
    "silent": (
        "requests are served under /v1/, but there are no vLLM metrics: {servers}; if that is vLLM and no proxy, it"
        " runs with --disable-log-stats: remove that flag"
    ),
    "collectors": (
        "collectors of `diag exporter` that failed all the time: {groups}; its standard error has the reason"
    ),
    "not joined": (
        "dcgm-exporter's metrics exist, but are not joined with {servers}: load alerts/dcgm.yaml, and name the labels"
        " that they share in diag.toml, [site] gpu_join"
    ),
    "no gpu": (
        "no GPU telemetry, though other servers have it: {servers}; scrape `diag exporter` there too, instead of vLLM"
    ),
    "no throttling": (
        "GPU telemetry without throttle reasons: {servers}; dcgm-exporter leaves them out by default, and the head of"
        " alerts/dcgm.yaml has the lines that enable them"
    ),
    "no start": (
        "no process_start_time_seconds, so that a restart shows only as counters that fall: {servers}; if the scrape"
        " configuration drops it, keep it; otherwise vLLM runs several API servers, which write no statistics to the"
        " log either: --api-server-count 1 restores both"
    ),
    "claimed": (
        "the log of {servers} conflicts with its metrics: the same process goes on answering, though the log claims"
        ' {claims}; these lines are ignored. The first one: "{line}"{place}, {time}. A client may have written'
        " it, or the log is that of another server or of another time zone (--log-timezone)"
    ),
    "survived": (
        "the log of {servers} claims {claims}, and shows the same server at work afterwards; these lines are ignored."
        ' The first one: "{line}"{place}, {time}. A client may have written it, or the log is that of several servers'
    ),
    "log alone": (
        "only the log shows what is wrong with {servers}: none of its pages came, and its processes were not seen"
    ),
}


def sentence(defect: TelemetryDefect) -> str:
    """Return the defect and the servers that have it, and what to change."""
    groups = [f"{printable(name)} on {listed(sorted(map(printable, servers)))}" for name, servers in defect.groups]
    if defect.kind == "aliases":
        same = [sorted(map(printable, names)) for _, names in defect.groups]
        groups = [" = ".join([*names[:FEW], *(["..."] if len(names) > FEW else [])]) for names in same]
    prefix, usual = defect.names if defect.kind == "renamed" else ("", "")
    line, place, *claims = map(printable, defect.names) if defect.kind in ("claimed", "survived") else ("", "")
    are_all = defect.of_all and len(defect.servers) > FEW
    return SENTENCES[defect.kind].format(
        servers=f"all {len(defect.servers):,} servers"
        if are_all
        else listed(list(map(printable, sorted(defect.servers)))),
        time=moment(defect.number),
        percent=100 * defect.number,
        number=defect.number,
        names=listed([*defect.names]),
        line=line,
        place=f" at {place}" if place else "",
        claims=listed(claims, most=FEW),
        jobs=f" (jobs {listed(sorted(map(printable, defect.names)))})" if len(defect.names) > 1 else "",
        prefix=prefix,
        usual=usual,
        relabelling=relabelling(prefix) if prefix else "",
        groups=listed(groups) if defect.kind == "aliases" else "; ".join(groups),
    )
