"""The hardware power brake is asserted from outside the GPU: the rack or the power supply is at its limit."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged
from diag.knowledge import shared_fixes

NVML = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"

BRAKED = signals.brake_seconds.at_least(1, documented("an external power brake assertion is a hardware slowdown", NVML))
SLOWER = signals.clock_loss.above(0.05, judged("a smaller loss is not noticeable"))
incident = Incident(
    id="gpu_power_brake",
    title="GPU hardware power brake",
    severity="warning",
    per=("instance", "gpu"),
    hold="2m",
    cause="""
        The chassis or the power supply asserts the power brake input of the board, which halves the clocks or worse.
        The cause is the power supply of the host or the rack, not this GPU's temperature or its power limit.
    """,
    impact="every request on this GPU runs at half speed or less while it lasts",
    symptoms=(BRAKED,),
    supports=(SLOWER,),
    looks_like=(
        LookAlike("gpu_thermal_throttling", distinguish="The throttle reasons are sw_thermal or hw_thermal."),
        LookAlike(
            "a power cap",
            distinguish="sw_power_cap is the board's own power limit and normal under load.",
            refuted_by=BRAKED,
        ),
    ),
    explains=("contract_breached",),
    may_explain=tuple(edge._replace(where=(*edge.where, SLOWER)) for edge in shared_fixes.SLOW_SERVER),
    fixes=(
        Fix.without_restart(
            change="Have the power supply of the host checked: failed or unplugged supplies, the power budget of rack "
            "and PDU.",
            command="ipmitool sdr type 'Power Supply'   # on the host",
            effect="the hardware power brake is no longer asserted",
            why=documented("the signal comes from outside the GPU", NVML),
        ),
    ),
    operations=("drain", "scale"),
    mitigate=("If users notice, move load to another rack; the GPU itself is healthy.",),
    hand_over=(
        "the time, the rack and the PSU or PDU readings, for the data centre operator rather than the GPU vendor",
    ),
    do_not=(
        "Never reboot the host for it: the cause is outside the GPU, and a host draws the most power while it boots.",
    ),
)
