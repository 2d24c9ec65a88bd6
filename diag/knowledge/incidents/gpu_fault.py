"""The GPU itself fails: lost, an Xid error, or memory errors that cannot be corrected or remapped."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged

XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"

FAULTS = signals.gpu_faults.at_least(1, documented("each of these faults needs a hardware check", XID))
incident = Incident(
    id="gpu_fault",
    title="GPU hardware fault",
    severity="critical",
    outage=True,
    per=("instance", "gpu"),
    window="1m",
    live_window="1m",
    hold="0s",
    immediate="a lost GPU does not come back, and an Xid error or an uncorrectable memory error is one event",
    cause="""
        The driver lost the GPU, reported an Xid error, counted uncorrectable memory errors, or failed to remap a bad
        row. Work on this GPU fails or gives wrong results, and its peers wait for it.
    """,
    impact="requests fail or hang on this GPU and on every rank that works with it",
    symptoms=(FAULTS,),
    looks_like=(
        LookAlike(
            "an application error",
            distinguish="Xid 13, 31, 43 and 45 are caused by the program (an illegal memory access, for example) and "
            "are not counted.",
            refuted_by=FAULTS,
        ),
        LookAlike("tp_communication_stall", distinguish="The GPUs answer; only the ranks wait for each other."),
    ),
    explains=(
        *("engine_device_fault", "engine_dead", "tp_communication_stall", "engine_stalled", "contract_breached"),
        "output_corrupted",
    ),
    fixes=(
        Fix.without_restart(
            command="nvidia-smi -i {gpu} -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT; dmesg -T | grep -i xid",
            change="Save the evidence before any restart.",
            effect="the output names the kind of fault for the vendor",
            why=documented("the vendor asks for these", XID),
        ),
        Fix(
            change="Take the host out of rotation, reset the GPU or reboot, and run the vendor's diagnostics (dcgmi "
            "diag -r 3) before it serves again.",
            effect="the GPU answers and counts no further errors",
            risk="requests in flight are lost",
            why=judged("a GPU that failed once under load is likely to fail again"),
        ),
    ),
    operations=("cordon",),
    mitigate=(
        "Drain the host and move its load: results computed since the fault may be wrong.",
        "On a host with several servers, only those on this GPU are affected: `nvidia-smi` lists the processes.",
    ),
    hand_over=(
        "the output of `nvidia-bug-report.sh` and `dmesg -T | grep -i xid`, the serial number and the row-remap state "
        "(`nvidia-smi -q -d ROW_REMAPPER,ECC`)",
    ),
    do_not=("Do not only restart vLLM: it may start and serve from faulty memory.",),
)
