"""`diag budget` for several GPUs: fit, ceilings, and the cost of a million tokens.

Requests are those of the options, or of the traffic of a running or recorded server.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from diag import promql
from diag.commands.observe import ObserveOptions, observe
from diag.core.contract import Contract
from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.report.gpu_sizing import render_sizing, render_sizing_json
from diag.sources.observation import Observation
from diag.vllm import work
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.command.shown import masked
from diag.vllm.deployments import TENSORS, Deployment, Sizing, answer, changes, choices, chosen, layouts
from diag.vllm.flags.registry import versions
from diag.vllm.gpus import GpuModel, gpus
from diag.vllm.gpus import named as gpu_named
from diag.vllm.memory.ledger import judge
from diag.vllm.memory.model import Model, is_folder
from diag.vllm.memory.setup import CPU_SPACE, GpuSpec, Setup, check, invalid, setup, size

_MEAN_TOKENS = "sum(increase(vllm:request_{0}_tokens_sum[{1}s])) / sum(increase(vllm:request_{0}_tokens_count[{1}s]))"
_RUNNING = "sum(max_over_time(vllm:num_requests_running[{0}s]))"
_OUTPUT = "sum(rate(vllm:generation_tokens_total[{0}s]))"


class Traffic(NamedTuple):
    """Traffic of one server: peak of running requests, mean tokens of a request with its answer, output tokens/s."""

    launch: str
    version: str
    running: int
    tokens: int
    output_rate: float


def is_server(target: str) -> bool:
    """Return True for a URL or a recording, not a model or a command."""
    return target.startswith(("http://", "https://")) or (Path(target) / "recording.toml").is_file()


def traffic(target: str) -> Traffic:
    """Return the traffic of one server; BadUsage if it had none, or if its launch command is unknown."""
    seen = observe(ObserveOptions([target]), Contract())
    if len(seen.instances) != 1:
        raise BadUsage(
            f"{printable(target)} has {len(seen.instances)} servers: their traffic is compared one at a time"
        )
    name = seen.instances[0]
    if name not in seen.launch:
        raise BadUsage(f"how {printable(target)} was started is not known: give its launch command instead")
    window = max(1, round((seen.instants[-1] - seen.instants[0]) / 1000 + seen.interval))
    lengths = [_last_value(seen, _MEAN_TOKENS.format(kind, window)) for kind in ("prompt", "generation")]
    running, rate = (_last_value(seen, expression.format(window)) for expression in (_RUNNING, _OUTPUT))
    if not (running and rate and all(lengths)):
        raise BadUsage(
            f"{printable(target)} finished no request while it was observed: there is no traffic to size for"
        )
    return Traffic(seen.launch[name], seen.versions.get(name, ""), round(running), math.ceil(sum(lengths)), rate)


def _last_value(seen: Observation, expression: str) -> float:
    """Return the value at the last instant; 0 if there is none."""
    found = promql.evaluate(expression, seen.samples, seen.instants[-1:])
    value = float(found.values[0][0]) if len(found.labels) and found.present[0][0] else 0.0
    return value if math.isfinite(value) else 0.0


_PRICE = re.compile(r"([^=]+)=\$?(\d{1,6}(?:\.\d{1,6})?)")
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,3})?) ?%")


@dataclass(frozen=True)
class SizingOptions:
    """Options of the command line, "" or None if not given; `traffic` is that of the named server."""

    all_gpus: bool = False
    gpu: str = ""
    context: str = ""
    concurrency: int | None = None
    prices: Sequence[str] = ()
    utilisation: str = ""
    version: str = ""
    traffic: Traffic | None = None

    @property
    def wanted(self) -> bool:
        """True if GPUs are to be compared; BadUsage for options that have no effect otherwise."""
        wanted = self.all_gpus or self.concurrency is not None
        if not wanted and (self.context or self.prices or self.utilisation):
            raise BadUsage("--context, --price and --utilisation need --all-gpus, or --gpu NAME and --concurrency N")
        if self.all_gpus and self.gpu:
            raise BadUsage("--gpu and --all-gpus exclude each other: give one of them")
        if wanted and not (self.all_gpus or self.gpu):
            raise BadUsage("--concurrency needs --all-gpus, or --gpu NAME")
        return wanted


def run(model: Model, started: Command, options: SizingOptions, as_json: bool) -> tuple[str, int]:
    """Return the text to print, and the exit status: 0 if a GPU fits, 2 if none does, 3 if that is unknown."""
    sizing = size_up(model, started, options)
    verdicts = {one.ledger.verdict for one in sizing.rows}
    status = 0 if sizing.best and "fits" in verdicts else 3 if "cannot tell" in verdicts else 2
    return (render_sizing_json if as_json else render_sizing)(sizing), status


def size_up(model: Model, started: Command, options: SizingOptions) -> Sizing:
    """Return all deployments on one page; BadUsage for a model or a GPU that is not in the data.

    Without --context and --concurrency, tokens of a request and concurrency are those of the measured traffic.
    """
    version, had = options.version or versions()[-1], options.traffic
    length = size(options.context, "--context", most=2**30) if options.context else had.tokens if had else None
    concurrency = options.concurrency or (had.running if had else None)
    prices = _parse_prices(options.prices)
    kinds = tuple(gpus().values()) if options.all_gpus else (gpu_named(options.gpu),)
    if model.family is None or model.unknown:
        raise BadUsage(f"{model.unknown or model.doubt}: diag cannot compute its ceilings")
    # a command for a CPU becomes one for a GPU
    environment = {name: value for name, value in started.environment.items() if name != CPU_SPACE}
    started = started._replace(environment=environment)

    def set_up(gpu: GpuModel) -> list[Setup]:
        planned = setup(started, model, GpuSpec(gpu.memory, gpu.name), version)
        planned = replace(planned, length=length or planned.length, auto_length=False)
        is_fixed = started.get("--tensor-parallel-size") or planned.pipeline * planned.data > 1
        return [planned] if is_fixed else [replace(planned, tensor=tensor) for tensor in TENSORS]

    first = set_up(kinds[0])[0]
    check(model, first)
    work.check(model, first)
    judges = {gpu.name: judge(started, GpuSpec(gpu.memory, gpu.name), options.version) for gpu in kinds}
    of_kind = {gpu.name: layouts(model, set_up(gpu), gpu, concurrency, judge=judges[gpu.name]) for gpu in kinds}
    best = chosen((one for found in of_kind.values() for one in found), concurrency, prices)
    kind = best.gpu if best and best.gpu else kinds[0] if len(kinds) == 1 else None
    changed = []
    if kind:
        for change in changes(model, set_up(kind)[0]):
            found = layouts(model, set_up(kind), kind, concurrency, change, judges[kind.name])
            changed += _least([one for one in found if one.requests], concurrency)
    plain = [one for found in of_kind.values() for one in (found if len(kinds) == 1 else _least(found, concurrency))]
    unnamed = () if options.version else (f"vLLM {version} is assumed; set the release with --vllm-version",)
    rows = (*plain, *changed)
    if best := chosen(rows, concurrency, prices):
        rows = tuple(one for one in rows if not one.requests or one.holds(concurrency))
    return Sizing(
        model=model_label(model),
        version=version,
        context=first.length,
        concurrency=concurrency,
        rows=rows,
        best=best,
        answer=answer(rows, best, concurrency, prices),
        launch=_launch(model, started, best, length) if best else "",
        prices=prices,
        utilisation=_parse_utilisation(options.utilisation),
        measured=had.output_rate if had else None,
        choices=tuple(choices(model, best, concurrency)),
        notes=(*filter(None, (model.facts,)), *unnamed),
    )


def _least(found: list[Deployment], concurrency: int | None) -> list[Deployment]:
    """Return the fewest GPUs that hold the load; the most if none do."""
    return [one for one in found if one.holds(concurrency)][:1] or found[-1:]


def _launch(model: Model, started: Command, best: Deployment, length: int | None) -> str:
    """Return the command of one replica of a deployment, as a line to paste."""
    tensor = [] if started.get("--tensor-parallel-size") else ["--tensor-parallel-size", str(best.setup.tensor)]
    context = ["--max-model-len", str(length)] if length and length <= model.longest else []
    is_one = best.setup.tensor == 1
    added = [*([] if is_one else tensor), *context, *best.flags.split()]
    replaced = {at for given in started.given if given.name in added for at in given.words}
    shown = masked(started)  # it keeps its number of words
    words = (word for at, word in enumerate(shown.words) if at not in replaced)
    return shown._replace(words=(*words, *added)).written()


def model_label(model: Model) -> str:
    """Return the name of a model for printing: its folder, or its id."""
    return printable(redaction.name(model.folder.resolve().name if is_folder(model.name) else model.name), 60)


def _parse_prices(given: Sequence[str]) -> Mapping[str, float]:
    """Return dollars per GPU hour by the GPU's name."""
    found = {}
    for text in given:
        match = _PRICE.fullmatch(text)
        if not match or not float(match[2]):
            raise BadUsage(invalid("--price", text, "GPU=DOLLARS such as h100=2.5"))
        found[gpu_named(match[1]).name] = float(match[2])
    return found


def _parse_utilisation(text: str) -> float | None:
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / 100 if match else 0.0
    if text and not 0 < share <= 1:
        raise BadUsage(invalid("--utilisation", text, "a share such as 40%"))
    return share or None
