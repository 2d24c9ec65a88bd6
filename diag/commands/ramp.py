"""`diag ramp`: load on a live server, more with each step, and what it shows; or the load of another tool."""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np

from diag.commands.observe import ObserveOptions, observe, running_of, site
from diag.core.errors import BadUsage, Unreachable
from diag.core.files import exists, refused_in_words, written_whole
from diag.core.formatting import number, printable
from diag.http.address import PAGE, parse
from diag.http.credentials import from_environment
from diag.ramp import results
from diag.ramp.analysis import Circumstances, Ramp, conclude
from diag.ramp.plan import Limits, RequestLengths, own_traffic, request_lengths
from diag.ramp.run import Generator, RampRun, between, environment
from diag.ramp.step import Offer, Step, measure, step_from_client
from diag.report import ramp as text
from diag.report.terminal import StepsBar, steps_bar
from diag.sources.live.scrape import UNTIL_STOPPED, BackgroundScraper, Scraper
from diag.sources.observation import Observation
from diag.sources.source import scrape_plan, shown_targets
from diag.vllm.command import parse as command

TRAFFIC = 10.0
"""Seconds for which the server's own traffic is watched before the first step."""


@dataclass(frozen=True)
class RampOptions:
    """What the user gave; "" or None where they gave nothing. Times in seconds, lengths in tokens."""

    observe: ObserveOptions
    python: str = ""
    attach: bool = False
    results: Sequence[Path] = ()
    model: str = ""
    tokenizer: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    step_seconds: float = 30.0
    first: int = 1
    most: int = 1024
    rates: int = 2
    yes: bool = False


def run(options: RampOptions) -> Ramp:
    """The ramp, judged; BadUsage where it cannot begin, Unreachable where no server answers."""
    contract, _ = site(None, options.observe.contract)
    limits = Limits(contract, options.step_seconds, options.most, options.rates)
    if options.results:
        return _of_results(options, limits)
    if options.attach or exists(options.observe.targets[0]):
        return _attached(options, limits)
    return _generated(options, limits)


def exit_code(ramp: Ramp) -> int:
    """0 where a ceiling was found, 2 where no load was served inside the SLO, 3 where too little was measured."""
    if ramp.ceiling:
        return 0
    measured = [step for step in ramp.steps if step.counts(ramp.limits.seconds)]
    return 2 if measured and measured[0].breaches(ramp.limits.contract) else 3


def print_report(ramp: Ramp, form: Literal["terminal", "json"]) -> None:
    """Print it on standard output."""
    sys.stdout.write(text.render_json(ramp) if form == "json" else text.render(ramp))


def write_html(ramp: Ramp, file: Path) -> None:
    """Write it as a page; BadUsage where the file cannot be written."""
    with refused_in_words(file), written_whole(file) as out:
        out.write(text.render_html(ramp))


# -- the load of another tool ------------------------------------------------------------------------------------------


def _of_results(options: RampOptions, limits: Limits) -> Ramp:
    """Each result as a step, with the samples of a recording that was made meanwhile where there is one."""
    found, target = results.read(options.results), options.observe.targets
    seen = None
    if target:
        if not exists(target[0]):
            raise BadUsage("with --results, TARGET is a recording that was made meanwhile, or is left out")
        seen = observe(options.observe, limits.contract)
    steps = []
    for offer, client in found:
        step = measure(offer, between(seen, client.start, client.end), limits.contract, client) if seen else None
        steps.append(step or step_from_client(offer, client, limits.contract))
    notes = () if seen else ("what binds is not known: no metrics of the server; give a recording as TARGET",)
    limits = limits._replace(seconds=min([limits.seconds, *(step.seconds for step in steps)]))
    return conclude(steps, limits, _circumstances(options, seen)._replace(notes=notes))


def _attached(options: RampOptions, limits: Limits) -> Ramp:
    """What was seen, cut into steps by time."""
    seen = observe(options.observe, limits.contract)
    if len(seen.instances) != 1:
        raise BadUsage(f"{printable(seen.target)} has {len(seen.instances)} servers: a ramp is of one")
    steps = list(_by_time(seen, limits))
    return conclude(steps, limits, _circumstances(options, seen)._replace(attached=True))


def _by_time(seen: Observation, limits: Limits) -> Iterator[Step]:
    start, end = (float(seen.instants[at]) / 1000 for at in (0, -1))
    parts = max(1, math.floor((end - start) / limits.seconds))
    for begin in np.linspace(start, end, parts + 1)[:-1]:
        step = measure(Offer(), between(seen, begin, begin + (end - start) / parts), limits.contract, None)
        if step:
            yield step


def _circumstances(options: RampOptions, seen: Observation | None) -> Circumstances:
    if seen is None:
        shown = ", ".join(printable(path.name, 60) for path in options.results)
        return Circumstances(shown)
    name = seen.instances[0]
    return Circumstances(
        target=seen.target,
        model=options.model or seen.models.get(name, ""),
        version=seen.versions.get(name, ""),
        running={name: running_of(seen, name)},
    )


# -- the load of diag --------------------------------------------------------------------------------------------------


def _generated(options: RampOptions, limits: Limits) -> Ramp:
    if len(options.observe.targets) != 1:
        raise BadUsage("a ramp is of one server: give one URL")
    if not options.python:
        raise BadUsage("name the Python that has vLLM with --vllm-python, or give --attach or --results")
    observed = replace(options.observe, duration=UNTIL_STOPPED)
    with steps_bar() as tick:
        plan = scrape_plan(observed, lambda share: None)
        with BackgroundScraper(Scraper(observed.targets, plan)).running() as watched:
            seen = _first_look(watched, tick)
            traffic = own_traffic(seen, limits.contract)
            lengths = request_lengths(seen, options.prompt_tokens, options.output_tokens)
            known = _circumstances(options, seen)._replace(traffic=traffic, lengths=lengths)
            generator = _generator(options, seen, known.model, lengths)
            known = known._replace(notes=tuple(_notes(known)))
            tick.pause()
            _ask(options, known, limits)
            ramp = RampRun(generator, watched, limits, tick, options.first)
            ramp.run()
    return conclude(ramp.steps, limits, known._replace(stopped=ramp.stopped))


def _first_look(watched: BackgroundScraper, tick: "StepsBar") -> Observation:
    """The server before any load of ours; Unreachable where it gives no metrics."""
    begun = time.monotonic()
    for _ in count():
        seen, passed = watched.seen(), time.monotonic() - begun
        if seen and passed >= TRAFFIC and len(seen.instants) > 2:
            return seen
        if passed > 3 * TRAFFIC:
            raise Unreachable("the server answered no scrape within 30 s")
        tick("watching the traffic that is there", passed / TRAFFIC)
        threading.Event().wait(0.2)
    raise AssertionError


def _generator(options: RampOptions, seen: Observation, model: str, lengths: RequestLengths) -> Generator:
    address, credentials = parse(options.observe.targets[0]), from_environment(os.environ)
    if set(credentials.headers) - {"Authorization"} or credentials.client_cert:
        raise BadUsage("vllm bench serve takes headers and certificates from its command line only: use a bearer token")
    launch = seen.launch.get(seen.instances[0], "")
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


def _notes(known: Circumstances) -> Iterator[str]:
    if known.traffic and known.traffic.requests_per_second > 0:
        rate = number(known.traffic.requests_per_second)
        yield f"the server served {rate} requests/s of others when the ramp began: they are part of every step"


def _ask(options: RampOptions, known: Circumstances, limits: Limits) -> None:
    """Load is made only after a yes."""
    if options.yes:
        return
    target = shown_targets(options.observe.targets)
    if not sys.stdin.isatty():
        raise BadUsage(f"a ramp puts {target} under as much load as it can serve: confirm that with --yes")
    lengths = known.lengths.shown if known.lengths else ""
    sys.stderr.write(
        f"diag ramp will put {target} under as much load as it can serve: steps of {number(limits.seconds)} s with\n"
        f"twice as many requests each, {lengths}. Its users will notice.\nStart? [y/N] "
    )
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise BadUsage("no load was made")
