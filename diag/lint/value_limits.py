"""The range of values that vLLM accepts for a flag: `Field(ge=..., le=...)` in vllm/config; a port is the kernel's."""

from collections.abc import Mapping
from dataclasses import dataclass

_NO_END = float("inf")


@dataclass(frozen=True)
class ValueRange:
    """From `least` to `most`; `above` and `below` say that the end itself is not accepted."""

    least: float
    most: float = _NO_END
    above: bool = False
    below: bool = False
    never: tuple[float, ...] = ()

    def __contains__(self, value: float) -> bool:
        low = self.least < value if self.above else self.least <= value
        high = value < self.most if self.below else value <= self.most
        return low and high and value not in self.never

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.least:g}"
        return low if self.most == _NO_END else f"{low} and {'below' if self.below else 'at most'} {self.most:g}"


VALUE_RANGES: Mapping[str, ValueRange] = {
    **dict.fromkeys(
        (
            *("--max-num-seqs", "--max-num-batched-tokens", "--max-num-scheduled-tokens", "--max-num-active-seqs"),
            *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--block-size"),
            *("--decode-context-parallel-size", "--prefill-context-parallel-size", "--nnodes", "--max-loras"),
            *("--stream-interval", "--prefill-schedule-interval", "--dp-sync-interval"),
        ),
        ValueRange(1),
    ),
    **dict.fromkeys(
        (
            *("--long-prefill-token-threshold", "--max-num-queued-reqs", "--max-num-queued-tokens", "--node-rank"),
            *("--data-parallel-size-local", "--data-parallel-rank", "--cpu-offload-gb", "--sse-keep-alive-interval"),
            *("--swap-space", "--ubatch-size", "--max-cudagraph-capture-size"),
        ),
        ValueRange(0),
    ),
    **dict.fromkeys(("--data-parallel-rpc-port", "--master-port"), ValueRange(1, 65535)),
    "--max-model-len": ValueRange(-1, never=(0,)),
    "--max-logprobs": ValueRange(-1),
    "--port": ValueRange(0, 65535),
    "--optimization-level": ValueRange(0, 3),
    "--gpu-memory-utilization": ValueRange(0, 1, above=True),
    "--kv-cache-metrics-sample": ValueRange(0, 1, above=True),
    "--watermark": ValueRange(0, 1, below=True),
    "--video-pruning-rate": ValueRange(0, 1, below=True),
}
