"""Users get less than they were promised, whatever the cause: the one that pages."""

from diag.incident import BurnRateWindow, Fix, Incident, LookAlike, documented, judged
from diag.signals import budget_burn, requests_running, waiting_share

WORKBOOK = "https://sre.google/workbook/alerting-on-slos/"

incident = Incident(
    id="contract_breached",
    title="Users do not get what they were promised",
    severity="critical",
    per=("instance", "engine"),
    hold="2m",
    burns=(BurnRateWindow(14.4, "1h", "5m"), BurnRateWindow(6, "6h", "30m")),
    cause="""
        The time to the first token, the gap between two tokens or the time of the whole answer is beyond the promise of
        diag.toml for so many answers that the error budget of a month is gone within days. This says that users
        are harmed and not why: the cause is another incident, or a load that the server was never meant for.
    """,
    impact="more answers are late than were promised to be",
    symptoms=(
        budget_burn.above(14.4, documented("2 % of a month's error budget in an hour; 6 over six hours", WORKBOOK)),
    ),
    supports=(
        waiting_share.above(0.33, judged("then the time before the first token is a queue, not the engine")),
        requests_running.at_least(1, judged("the engine works")),
    ),
    looks_like=(
        LookAlike(
            "engine_stalled", distinguish="There, nobody gets a token at all: nothing ends, so nothing is counted."
        ),
        LookAlike(
            "queue_saturation", distinguish="There, the wait for one's turn is what is long: it is a cause of this."
        ),
    ),
    fixes=(
        Fix(
            change="Look for the cause: what else `diag doctor` finds on this server and what its GPUs show.",
            command="diag doctor http://{instance}",
            effect="names the incident whose fixes apply",
            restart=False,
            why=judged("late answers are an effect"),
        ),
        Fix(
            change="Where nothing else is wrong, the load is more than the server can serve at this quality: add a "
            "replica, or send part of the traffic elsewhere.",
            effect="the share of late answers falls",
            restart=False,
            why=judged("a server at its ceiling gets slower for all"),
        ),
        Fix(
            change="Where nobody complains, the promise is not what users expect: set it in diag.toml.",
            effect="the budget is counted against what was really promised",
            restart=False,
            why=judged("an alert that nobody acts upon is noise"),
        ),
    ),
    mitigate=("Shed or divert load at the gateway: longest prompts first, then batch clients.",),
    hand_over=("the promises of diag.toml, the dashboard of the last six hours, and what `diag doctor` says",),
    do_not=("Do not restart a server that is merely slow: it comes back with an empty cache and the same load.",),
)
