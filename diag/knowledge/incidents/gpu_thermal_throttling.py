"""The GPU lowers its clocks because it is too hot, and often keeps them low long after the load has ended."""

from diag import signals
from diag.incident import Fix, Incident, LookAlike, documented, judged, reported
from diag.knowledge import shared_fixes

NVML = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"
SMI = "https://docs.nvidia.com/deploy/nvidia-smi/index.html"
OLLAMA = "https://github.com/ollama/ollama/issues/13552"

HOT = signals.thermal_share.above(
    0.05, judged("{threshold} of the time is noticeable; NVML's counters include what samples of the flag miss")
)
SLOWER = signals.clock_loss.above(0.05, judged("a smaller loss is not noticeable"))
incident = Incident(
    id="gpu_thermal_throttling",
    title="GPU thermal throttling",
    severity="warning",
    per=("instance", "gpu"),
    hold="2m",
    cause="""
        Above its slowdown temperature a GPU lowers its clocks, and many cards restore them only several degrees below
        (a T4 throttles at 83 °C and recovers at 78 °C). Throughput follows a sawtooth and stays low long after the load
        has gone.
    """,
    impact="every request on this GPU and on all its tensor-parallel peers gets slower",
    symptoms=(
        HOT,
        signals.thermal_seconds.at_least(
            5, reported("903 ms were counted while every flag was Not Active, which is no reason for an alarm", OLLAMA)
        ),
    ),
    supports=(
        SLOWER,
        signals.margin.below(5, judged("this is within the hysteresis of documented cards")),
    ),
    looks_like=(
        LookAlike(
            "gpu_power_brake",
            distinguish="The power brake is asserted from outside the GPU (hw_power_brake): rack or power supply.",
        ),
        LookAlike(
            "a power cap",
            distinguish="sw_power_cap alone is normal on a busy card and never an alarm; NVML counts it as a separate "
            "reason.",
            refuted_by=HOT,
        ),
    ),
    escalates=signals.clock_loss.above(
        0.5,
        judged(
            "at half the clock prefill, which computes all the time, takes twice as long; a clock lower by 20.5 % cost "
            "5.2 % of the throughput (noonghunna/club-3090#178), and a power limit alone takes 31 % of an H100's"
        ),
    ),
    explains=("contract_breached",),
    may_explain=tuple(edge._replace(where=(*edge.where, SLOWER)) for edge in shared_fixes.SLOW_SERVER),
    fixes=(
        Fix.without_restart(
            command="nvidia-smi -i {gpu} -pl {value}",
            value=signals.sustained_power,
            direction="lower",
            current=signals.power_limit,
            change="Limit the power to what the cooling sustains: steady clocks instead of a sawtooth.",
            effect="no more time in thermal slowdown; the temperature settles below the slowdown temperature",
            risk="lower peak clock: a 70 W T4 stopped throttling at 60 W and lost about 15 % of its peak throughput",
            rollback="nvidia-smi -i <gpu> -pl <its default limit>",
            why=documented("the power limit is set in watts, within the limits of the board", SMI),
        ),
        Fix.without_restart(
            change="Improve the airflow: check filters, fans, the neighbouring slot and the inlet temperature of the "
            "rack.",
            effect="the margin to slowdown grows",
            why=judged("airflow is the cause; a lower power limit only mitigates it"),
        ),
    ),
    operations=("drain", "cordon"),
    mitigate=(
        "Lower the power limit (nvidia-smi -pl), unless it is the board's lowest: it needs no restart and steadies the "
        "clocks at once.",
        "Reduce the hottest host's share of the traffic at the load balancer.",
    ),
    hand_over=(
        "the temperatures and fan speeds of the whole chassis (`nvidia-smi -q -d TEMPERATURE,PERFORMANCE`), the inlet "
        "temperature, and how many hosts throttle at the same time",
    ),
    do_not=("Do not reboot the host or restart vLLM for it: the temperature does not change.",),
)
