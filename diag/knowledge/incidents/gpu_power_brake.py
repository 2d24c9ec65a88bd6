"""The board is told from outside to brake: the rack or the power supply is at its limit."""

from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.signals import brake_seconds, clock_loss

NVML = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"

BRAKED = brake_seconds.at_least(1, documented("an external power brake assertion is a hardware slowdown", NVML))
incident = Incident(
    id="gpu_power_brake",
    title="The power supply makes the GPU brake",
    severity="warning",
    per=("instance", "gpu"),
    hold="2m",
    cause="""
        The power brake input of the board is asserted from outside, by the chassis or the power supply, and halves the
        clocks or worse. It is about the power of the host or the rack, not about this GPU's temperature or its limit.
    """,
    impact="every request on this GPU gets slower by half or more while it lasts",
    symptoms=(BRAKED,),
    supports=(clock_loss.above(0.05, judged("below that nobody can tell")),),
    looks_like=(
        LookAlike("gpu_thermal_throttling", distinguish="There, the reasons are sw_thermal or hw_thermal."),
        LookAlike(
            "a power cap", distinguish="sw_power_cap is the board's own limit and normal under load.", refuted_by=BRAKED
        ),
    ),
    explains=("replicas_unbalanced",),
    fixes=(
        Fix(
            change="Have the power of the host looked at: failed or unplugged supplies, the budget of rack and PDU.",
            command="ipmitool sdr type 'Power Supply'   # on the host",
            effect="seconds in hardware power brake stop growing",
            restart=False,
            why=documented("the signal comes from outside of the GPU", NVML),
        ),
    ),
    mitigate=("Move load to another rack where users notice; the GPU itself is well.",),
    hand_over=(
        "the time, the rack and the PSU or PDU readings: this is for the data centre, not for the vendor of the GPU",
    ),
    do_not=("Never reboot for it: the brake is outside of the GPU, and the host draws its most while it starts.",),
)
