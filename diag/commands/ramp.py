"""`diag ramp`: put increasing load on a live server, or analyse the load of another tool."""

import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from diag.commands.doctor import Format
from diag.commands.observe import ObserveOptions, observe, running_of, site
from diag.commands.options import RampOptions
from diag.core.contract import Contract
from diag.core.errors import BadUsage, Unreachable
from diag.core.files import discard_output, exists, refused_in_words, written_whole
from diag.core.formatting import number, printable
from diag.core.subjects import instance_name
from diag.diagnosis.configuration import configurations
from diag.diagnosis.query_cache import QueryCache
from diag.http.address import PAGE, from_environment, parse
from diag.ramp import results
from diag.ramp.analysis import Circumstances, MeasuredOn, Ramp, conclude
from diag.ramp.comparison import RampComparison, compare, trend
from diag.ramp.plan import Limits, RequestLengths, own_traffic, request_lengths
from diag.ramp.results import Offer
from diag.ramp.run import STOPPED_BY_USER, Generator, RampRun, between, environment
from diag.ramp.step import measure, step_from_client
from diag.report import ramp as text
from diag.report import ramps as kept_text
from diag.report.terminal import steps_bar
from diag.sources import kept_ramp
from diag.sources.kept_ramp import RampResult
from diag.sources.live.scrape import UNTIL_STOPPED, BackgroundScraper, Scraper
from diag.sources.observation import Observation
from diag.sources.source import scrape_plan, shown_targets
from diag.vllm.command import parse as command

TRAFFIC = 10.0
"""Seconds for which existing traffic is observed before the first step."""
POWER_LIMITS = (
    "max by (instance, gpu) (last_over_time(diag_gpu_power_limit_watts[$window])"
    " unless on (instance, gpu) $gpus_not_serving)"
)
SCRAPES = 8
"""Scrapes of existing traffic in a step, at least: one of fewer is too short once it has settled."""
MOST_FILES = 200
"""Results in one table."""


def run(options: RampOptions, observed: ObserveOptions) -> Ramp:
    """Return the analysed ramp; BadUsage if it cannot begin, Unreachable if no server responds."""
    contract, _ = site(None, observed.contract)
    limits = Limits(contract, options.step_seconds, options.most, options.rates)
    if options.results:  # each is a step, with the samples of a recording of the same time if there is one
        recording, steps = None, []
        by_clients = results.read(options.results)
        if observed.targets:
            if not exists(observed.targets[0]):
                raise BadUsage("with --results, TARGET is a recording that was made meanwhile, or is left out")
            recording = observe(observed, contract)
        for offer, client in by_clients:
            step = measure(offer, between(recording, client.start, client.end), contract, client)
            steps.append(step or step_from_client(offer, client, contract))
        limits = limits._replace(seconds=min([limits.seconds, *(step.seconds for step in steps if step.is_usable)]))
        if recording:
            return conclude(steps, limits, _circumstances(options, recording, contract, "a load tool"))
        names = ", ".join(printable(path.name, 60) for path in options.results)
        note = "what binds is not known: no metrics of the server; give a recording as TARGET"
        measured_on = MeasuredOn(at=max((client.end for _, client in by_clients), default=0.0), load_by="a load tool")
        return conclude(steps, limits, Circumstances(names, options.model, notes=(note,), measured_on=measured_on))
    if not options.attach and not exists(observed.targets[0]):
        return _generate_load(options, observed, limits)
    traffic = observe(observed, contract)  # which is cut into steps of equal length
    if len(traffic.instances) != 1:
        raise BadUsage(f"{printable(traffic.target)} has {len(traffic.instances)} servers: a ramp is of one")
    start, end = (float(traffic.instants[at]) / 1000 for at in (0, -1))
    shortest = max(limits.seconds, SCRAPES * traffic.interval)
    parts = max(1, math.floor((end - start) / shortest))
    measured = (
        measure(Offer(), between(traffic, begin, begin + (end - start) / parts), contract, None)
        for begin in np.linspace(start, end, parts + 1)[:-1]
    )
    steps = [step for step in measured if step]
    return conclude(steps, limits, _circumstances(options, traffic, contract, "other clients")._replace(attached=True))


def exit_code(ramp: Ramp) -> int:
    """Return 0 if a ceiling was found, 2 if no load was served within the SLO, 3 if there is not enough data."""
    if ramp.ceiling:
        return 0
    measured = [step for step in ramp.steps if step.counts(ramp.limits.seconds)]
    return 2 if measured and measured[0].breaches(ramp.limits.contract) else 3


def print_report(ramp: Ramp, form: Format, earlier: RampResult | None = None) -> int:
    """Print the report, and the comparison with an earlier result; return the exit status, 1 for a worse ramp.

    The report goes to standard error if the same Ctrl-C that ended the ramp has ended the reader of the pipe.
    """
    comparison = _against(ramp, earlier)
    if form == "json":
        against = {"against": kept_text.DOCUMENT.of(comparison, "comparison")} if comparison else {}
        page = text.DOCUMENT.text(ramp, **against)
    else:
        plain = form == "terminal"
        page = text.render(ramp) if plain else text.render_markdown(ramp)
        if comparison:
            page += "\n" + (kept_text.render(comparison) if plain else kept_text.render_markdown(comparison))
    try:
        sys.stdout.write(page)
        sys.stdout.flush()
    except BrokenPipeError:
        if ramp.stopped != STOPPED_BY_USER:
            raise
        discard_output()
        with suppress(OSError):
            sys.stderr.write(page)
    return 1 if comparison and comparison.verdict == "worse" else exit_code(ramp)


def _against(ramp: Ramp, earlier: RampResult | None) -> RampComparison | None:
    return compare(earlier, kept_ramp.parse(text.DOCUMENT.of(ramp), "this ramp", time.time())) if earlier else None


def read_earlier(file: Path | None) -> RampResult | None:
    """Read the result that a ramp is compared with, before any load is generated; BadUsage if it is none."""
    return kept_ramp.read(file) if file else None


def are_kept(targets: Sequence[str]) -> bool:
    """Return True if targets are files, as results of finished ramps are; recordings are folders."""
    return any(exists(name) and Path(name).is_file() for name in targets)


def print_kept(files: Sequence[str], earlier: RampResult | None, form: Format) -> int:
    """Print the trend of finished ramps, or the comparison of one with an earlier one; return the exit status."""
    if len(files) > MOST_FILES:
        raise BadUsage(f"{len(files):,} results are given: at most {MOST_FILES} are compared")
    ramps = [kept_ramp.read(Path(file)) for file in files]
    if earlier is None:
        line_up = trend(ramps)
        forms = {"terminal": kept_text.render_trend, "markdown": kept_text.render_trend_markdown}
        sys.stdout.write(kept_text.DOCUMENT.text((None, line_up)) if form == "json" else forms[form](line_up))
        return 0
    if len(ramps) != 1:
        raise BadUsage("--against compares one result: give one TARGET, or leave --against out for a table of them all")
    compared = compare(earlier, ramps[0])
    if form == "json":
        sys.stdout.write(kept_text.DOCUMENT.text((compared, trend([compared.before, compared.after]))))
    else:
        render = kept_text.render if form == "terminal" else kept_text.render_markdown
        sys.stdout.write(render(compared))
    return {"worse": 1, "not comparable": 3}.get(compared.verdict, 0)


def write_html(ramp: Ramp, file: Path, earlier: RampResult | None) -> None:
    """Write a ramp as an HTML page; BadUsage if the file cannot be written."""
    with refused_in_words(file), written_whole(file) as out:
        comparison = _against(ramp, earlier)
        out.write(text.render_html(ramp, kept_text.summary(comparison) if comparison else ()))


# -- the load of another tool ------------------------------------------------------------------------------------------


def _circumstances(options: RampOptions, observed: Observation, contract: Contract, load_by: str = "") -> Circumstances:
    name = observed.instances[0]
    queries = QueryCache(observed, contract)
    limits = {
        subject: float(row[-1])
        for subject, row in sorted(queries.ask(POWER_LIMITS, (), queries.whole).items())
        if instance_name(subject) == name and math.isfinite(row[-1])
    }
    gpus = tuple(gpu.name for server in configurations(observed) if server.instance == name for gpu in server.gpus)
    return Circumstances(
        target=observed.target,
        model=options.model or observed.models.get(name, ""),
        version=observed.versions.get(name, ""),
        running={name: running_of(observed, name)},
        measured_on=MeasuredOn(
            observed.launch.get(name, ""), gpus, float(observed.instants[-1]) / 1000, tuple(limits.values()), load_by
        ),
    )


# -- the load of diag --------------------------------------------------------------------------------------------------


def _generate_load(options: RampOptions, observed: ObserveOptions, limits: Limits) -> Ramp:
    """Put load on the server step by step, after the user has confirmed it."""
    if len(observed.targets) != 1:
        raise BadUsage("a ramp is of one server: give one URL")
    if not options.python:
        raise BadUsage("name the Python that has vLLM with --vllm-python, or give --attach or --results")
    observed = replace(observed, duration=UNTIL_STOPPED)
    with steps_bar() as tick:
        plan = scrape_plan(observed, lambda share: None)
        with BackgroundScraper(Scraper(observed.targets, plan)).running() as watched:
            begun = time.monotonic()
            while (passed := time.monotonic() - begun) <= 3 * TRAFFIC:
                before = watched.seen()
                if before and passed >= TRAFFIC and len(before.instants) > 2:
                    break
                tick("watching the traffic that is there", passed / TRAFFIC)
                threading.Event().wait(0.2)
            else:
                raise Unreachable("the server answered no scrape within 30 s")
            traffic = own_traffic(before, limits.contract)
            lengths = request_lengths(before, options.prompt_tokens, options.output_tokens)
            circumstances = _circumstances(options, before, limits.contract)._replace(traffic=traffic, lengths=lengths)
            generator = _generator(options, observed.targets[0], before, circumstances.model, lengths)
            if traffic and traffic.requests_per_second > 0:
                rate = number(traffic.requests_per_second)
                note = f"the server served {rate} requests/s of others when the ramp began: they are part of every step"
                circumstances = circumstances._replace(notes=(note,))
            tick.pause()
            if not options.yes:
                target = shown_targets(observed.targets)
                if not sys.stdin.isatty():
                    raise BadUsage(f"a ramp puts {target} under as much load as it can serve: confirm that with --yes")
                sys.stderr.write(
                    f"diag ramp will put {target} under as much load as it can serve: steps of {number(limits.seconds)}"
                    f" s with\ntwice as many requests each, {lengths.shown}. Its users will notice.\nStart? [y/N] "
                )
                sys.stderr.flush()
                if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                    raise BadUsage("no load was made")
            ramp = RampRun(generator, watched, limits, tick, options.first)
            ramp.run()
    measured_on = circumstances.measured_on._replace(at=time.time(), load_by=generator.name)
    return conclude(ramp.steps, limits, circumstances._replace(stopped=ramp.stopped, measured_on=measured_on))


def _generator(options: RampOptions, url: str, before: Observation, model: str, lengths: RequestLengths) -> Generator:
    """Return `vllm bench serve` for the server; BadUsage for credentials that it cannot read from its environment."""
    address, credentials = parse(url), from_environment(os.environ)
    if set(credentials.headers) - {"Authorization"} or credentials.client_cert:
        raise BadUsage("vllm bench serve takes headers and certificates from its command line only: use a bearer token")
    launch = before.launch.get(before.instances[0], "")
    started = command.read(launch) if launch else None
    named = (started.get("--tokenizer") or started.model) if started else ""
    model = model.partition(",")[0]
    return Generator(
        python=options.python,
        url=address.origin + address.path.rstrip("/").removesuffix(PAGE),
        model=model,
        tokenizer=options.tokenizer or named or model,
        lengths=lengths,
        environment=environment(
            os.environ, credentials.headers.get("Authorization", address.authorization), credentials.ca_file
        ),
    )
