"""The GPU lowers its clocks because it is too hot, and often keeps them low long after."""

from diag.incident import Fix, Incident, LookAlike, documented, judged, reported
from diag.signals import clock_loss, margin, sustained_power, thermal_seconds, thermal_share

NVML = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"
SMI = "https://docs.nvidia.com/deploy/nvidia-smi/index.html"
OLLAMA = "https://github.com/ollama/ollama/issues/13552"

HOT = thermal_share.above(0.05, judged("a twentieth of the time; NVML's counters see what samples of the flag miss"))
incident = Incident(
    id="gpu_thermal_throttling",
    title="The GPU is too hot and lowers its clocks",
    severity="warning",
    per=("instance", "gpu"),
    hold="2m",
    cause="""
        Above its slowdown temperature a GPU lowers its clocks, and many cards return them only several degrees lower (a
        T4 throttles at 83 C and comes back at 78 C): throughput saws, and stays low long after the load has gone.
    """,
    impact="every request on this GPU, and on all its tensor-parallel peers, gets slower",
    symptoms=(
        HOT,
        thermal_seconds.at_least(5, reported("903 ms counted while every flag was Not Active: not an alarm", OLLAMA)),
    ),
    supports=(
        clock_loss.above(0.05, judged("below that nobody can tell")),
        margin.below(5, judged("within the hysteresis of the cards that are documented")),
    ),
    looks_like=(
        LookAlike(
            "gpu_power_brake",
            distinguish="There, the board is told from outside to brake (hw_power_brake): rack or power supply.",
        ),
        LookAlike(
            "a power cap",
            distinguish="sw_power_cap alone is normal on a busy card and never an alarm; it counts in a reason of its "
            "own.",
            refuted_by=HOT,
        ),
    ),
    escalates=clock_loss.above(
        0.15,
        reported("20.5 % of the clock cost 5.2 % of the tokens", "https://github.com/noonghunna/club-3090/issues/178"),
    ),
    explains=("replicas_unbalanced",),
    fixes=(
        Fix(
            command="nvidia-smi -i {gpu} -pl {value}",
            value=sustained_power,
            change="Limit the power to what the cooling sustains: steady clocks instead of a saw.",
            effect="seconds in thermal slowdown stop growing; the temperature settles below the slowdown point",
            risk="the peak clock is lost: a T4 of 70 W was cured at 60 W for about 15 % of its peak",
            rollback="nvidia-smi -i <gpu> -pl <its default limit>",
            restart=False,
            why=documented("the power limit is set in watts, within the limits of the board", SMI),
        ),
        Fix(
            change="Look at the air: filters, fans, the slot beside it, the inlet temperature of the rack.",
            effect="the margin to slowdown grows",
            restart=False,
            why=judged("the cause; a lower limit only lives with it"),
        ),
    ),
    mitigate=(
        "Lower the power limit as proposed: it needs no restart and steadies the clocks at once.",
        "Take the hottest host's share of the traffic down at the balancer.",
    ),
    hand_over=(
        "the temperatures and fan speeds of the whole chassis (`nvidia-smi -q -d TEMPERATURE,PERFORMANCE`), the inlet "
        "temperature, and how many hosts throttle at once",
    ),
    do_not=("Do not reboot or restart vLLM for it: the heat stays.",),
)
