"""`diag budget` for several GPUs: which of them hold the requests, their ceilings, and what a million tokens costs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from diag.commands.traffic import Traffic
from diag.core.errors import BadUsage
from diag.core.formatting import printable
from diag.report.gpu_sizing import Sizing, render_sizing, render_sizing_json
from diag.vllm.capacity.roofline import SizedReplica, choices, configurations
from diag.vllm.command import redaction
from diag.vllm.command.command import Command
from diag.vllm.flags.registry import versions
from diag.vllm.gpus import GpuModel, gpus
from diag.vllm.gpus import named as gpu_named
from diag.vllm.memory.model import Model, is_folder
from diag.vllm.memory.setup import CPU_SPACE, GpuSpec, Setup, invalid, setup, size

TENSORS = (1, 2, 4, 8)
_PRICE = re.compile(r"([^=]+)=\$?(\d{1,6}(?:\.\d{1,6})?)")
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,3})?) ?%")


@dataclass(frozen=True)
class SizingOptions:
    """What the user gave, "" or None where they gave nothing; `traffic` is that of the server they named."""

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
        """Whether GPUs are to be compared; BadUsage for options that do nothing without that."""
        wanted = self.all_gpus or self.concurrency is not None
        if not wanted and (self.context or self.prices or self.utilisation):
            raise BadUsage("--context, --price and --utilisation need --all-gpus, or --gpu NAME and --concurrency N")
        if self.all_gpus and self.gpu:
            raise BadUsage("--gpu and --all-gpus exclude each other: give one of them")
        if wanted and not (self.all_gpus or self.gpu):
            raise BadUsage("--concurrency needs --all-gpus, or --gpu NAME")
        return wanted


def run(model: Model, started: Command, options: SizingOptions, as_json: bool) -> tuple[str, int]:
    """What is printed, and the exit status: 0 where something fits, 2 where nothing does, 3 where that is open."""
    sizing = size_up(model, started, options)
    verdicts = {one.ledger.verdict for one in sizing.configurations}
    status = 0 if "fits" in verdicts else 3 if "cannot tell" in verdicts else 2
    return (render_sizing_json if as_json else render_sizing)(sizing), status


def size_up(model: Model, started: Command, options: SizingOptions) -> Sizing:
    """All configurations; BadUsage for a model or a GPU that is not in the data."""
    version = options.version or versions()[-1]
    length, concurrency = _demand(options)
    prices, started = _prices(options.prices), _on_gpus(started)
    kinds = tuple(gpus().values()) if options.all_gpus else (gpu_named(options.gpu),)
    _check(started, model)

    def of_gpu(gpu: GpuModel) -> Setup:
        planned = setup(started, model, GpuSpec(gpu.memory, gpu.name), version)
        return replace(planned, length=length or planned.length, auto_length=False)

    given = started.get("--tensor-parallel-size")
    tensors = (of_gpu(kinds[0]).tensor,) if given else TENSORS
    found: tuple[SizedReplica, ...] = tuple(configurations(model, of_gpu, kinds, tensors, concurrency))
    return Sizing(
        model=named(model),
        version=version,
        context=of_gpu(kinds[0]).length,
        concurrency=concurrency,
        configurations=found,
        prices=prices,
        utilisation=_utilisation(options.utilisation),
        measured=options.traffic.output_rate if options.traffic else None,
        choices=tuple(choices(model, found, concurrency, prices)),
    )


def _demand(options: SizingOptions) -> tuple[int | None, int | None]:
    """Tokens of a request and requests at a time: as given, else those of the traffic; None where neither says it."""
    had = options.traffic
    length = size(options.context, "--context", most=2**30) if options.context else had.tokens if had else None
    return length, options.concurrency or (had.running if had else None)


def _on_gpus(started: Command) -> Command:
    """The command without what makes it one for a CPU."""
    kept = {name: value for name, value in started.environment.items() if name != CPU_SPACE}
    return started._replace(environment=kept)


def named(model: Model) -> str:
    """What a model is called in print: its folder, or its id."""
    return printable(redaction.name(model.folder.resolve().name if is_folder(model.name) else model.name), 60)


def _check(started: Command, model: Model) -> None:
    if model.family is None or model.unknown:
        raise BadUsage(f"{model.unknown or 'the architecture is unknown'}: diag cannot compute its ceilings")
    for flag in ("--pipeline-parallel-size", "--data-parallel-size"):
        if started.get(flag) not in (None, "1"):
            raise BadUsage(f"the ceilings are those of one replica on one host: leave {flag} out")


def _prices(given: Sequence[str]) -> Mapping[str, float]:
    """Dollars for a GPU and an hour, by the GPU's name."""
    found = {}
    for text in given:
        match = _PRICE.fullmatch(text)
        if not match or not float(match[2]):
            raise BadUsage(invalid("--price", text, "GPU=DOLLARS such as h100=2.5"))
        found[gpu_named(match[1]).name] = float(match[2])
    return found


def _utilisation(text: str) -> float | None:
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / 100 if match else 0.0
    if text and not 0 < share <= 1:
        raise BadUsage(invalid("--utilisation", text, "a share such as 40%"))
    return share or None
