"""Loads of one GPU, for a Python that has PyTorch: `torch_load.py KIND SECONDS`; no setting of the card is changed.

`torch_load.py ceilings cpu` measures the CPU in the same way.

`matmul` computes at the power limit, `copy` moves device memory, `pcie` moves host memory to the device and back,
`hold SHARE` takes a share of the free memory and waits, `ceilings` measures the card and prints JSON.
"""

import json
import sys
import time

import torch

GIB = 2**30
TIMED = 3.0
"""Seconds over which a ceiling is measured, after a warm-up of one."""
DEVICE = "cpu" if sys.argv[-1] == "cpu" else "cuda"
SMALLER = 8 if DEVICE == "cpu" else 1


def repeat(step, seconds: float) -> float:
    """Run a step again and again; return the runs per second, once the device has finished them all."""
    begun, done = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        for _ in range(10 // SMALLER):
            step()
            done += 1
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    return done / (time.monotonic() - begun)


def matmul(kind=torch.bfloat16, size: int = 8192 // SMALLER):
    one, other = (torch.randn(size, size, device=DEVICE, dtype=kind) for _ in range(2))
    out = torch.empty_like(one)
    return (lambda: torch.matmul(one, other, out=out)), 2 * size**3


def copy():
    source = torch.randint(0, 255, (2 * GIB // SMALLER,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return (lambda: target.copy_(source)), 2 * source.numel()  # bytes read and written


def pcie():
    """Copies in both directions at the same time, as data sheets count them."""
    hosts = [torch.empty(GIB // 4, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(GIB // 4, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def there_and_back() -> None:
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)

    return there_and_back, 2 * hosts[0].numel()


def hold(share: float):
    free, _ = torch.cuda.mem_get_info()
    kept = torch.empty(int(free * share), dtype=torch.uint8, device="cuda")
    kept.fill_(1)
    return (lambda: time.sleep(0.1)), kept.numel()


def ceilings() -> dict[str, float | str]:
    """Measured rates: bf16 in TFLOP/s, device memory and PCIe in GB/s, and the memory that CUDA shows in GiB."""
    found: dict[str, float | str] = {"name": "CPU"}
    makers = [("bf16_teraflops", matmul, 1e12), ("bandwidth_gigabytes", copy, 1e9)]
    if DEVICE == "cuda":
        found = {"name": torch.cuda.get_device_name(), "memory_gibibytes": torch.cuda.mem_get_info()[1] / GIB}
        makers.append(("pcie_gigabytes", pcie, 1e9))
    for name, maker, unit in makers:
        step, work = maker()
        repeat(step, 1)
        found[name] = repeat(step, TIMED) * work / unit
    return found


def main() -> None:
    kind, *more = sys.argv[1:]
    if kind == "ceilings":
        print(json.dumps(ceilings()))
        return
    makers = {"matmul": matmul, "copy": copy, "pcie": pcie, "hold": lambda: hold(float(more[1]))}
    step, _ = makers[kind]()
    torch.cuda.synchronize()
    print("ready", flush=True)
    repeat(step, float(more[0]))


if __name__ == "__main__":
    main()
