"""The GPU itself fails: lost, Xid, memory that cannot be corrected or replaced."""

from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.signals import gpu_faults

XID = "https://docs.nvidia.com/deploy/xid-errors/index.html"

FAULTS = gpu_faults.at_least(1, documented("each of them needs a look at the hardware", XID))
incident = Incident(
    id="gpu_fault",
    title="The GPU has a fault",
    severity="critical",
    per=("instance", "gpu"),
    window="1m",
    live_window="1m",
    cause="""
        The driver lost the GPU, reported an Xid error, counted memory errors that could not be corrected, or could not
        replace a bad row. Work on it fails or gives wrong results, and its peers wait for it.
    """,
    impact="requests fail or hang on this GPU and on every rank that works with it",
    symptoms=(FAULTS,),
    looks_like=(
        LookAlike(
            "an application's own error",
            distinguish="Xid 13, 31, 43 and 45 come from the program, an illegal access for one; they are not counted "
            "here.",
            refuted_by=FAULTS,
        ),
        LookAlike(
            "tp_communication_stall", distinguish="There, the GPUs answer and only the ranks wait for each other."
        ),
    ),
    explains=("tp_communication_stall", "engine_stalled", "contract_breached"),
    fixes=(
        Fix(
            command="nvidia-smi -i {gpu} -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT; dmesg -T | grep -i xid",
            change="Keep the evidence before anything is restarted.",
            effect="names the kind of fault for the vendor",
            restart=False,
            why=documented("what to collect", XID),
        ),
        Fix(
            change="Take the host out of rotation, reset the GPU or reboot, and run the vendor's diagnostics (dcgmi "
            "diag -r 3) before it serves again.",
            effect="the GPU answers and counts no further error",
            risk="requests in flight are lost",
            why=judged("a GPU that failed once under load fails again"),
        ),
    ),
    mitigate=(
        "Drain the host and move its load: what the GPU computed since may be wrong.",
        "A host with several servers loses only those on this GPU: `nvidia-smi` lists the processes.",
    ),
    hand_over=(
        "`nvidia-bug-report.sh`, `dmesg -T | grep -i xid`, the serial number and the row-remap state (`nvidia-smi -q "
        "-d ROW_REMAPPER,ECC`)",
    ),
    do_not=("Do not only restart vLLM: it may start, and serve from broken memory.",),
)
