"""How Grafana and Prometheus write the value of a signal, by the signal's unit."""

GRAFANA = {
    "share": "percentunit",
    "seconds": "s",
    "bytes": "bytes",
    "celsius": "celsius",
    "watts": "watt",
    "bool": "bool_yes_no",
}
PLAIN_NUMBER = '{{ printf (or (and (ge $value 100.0) "%.0f") "%.3g") $value }}'
"""Whole numbers from 100 on, below three digits, as the doctor writes them; `humanize` writes 0.09 as "90m"."""
ALERT_VALUE = {
    "share": "{{ $value | humanizePercentage }}",
    "seconds": "{{ $value | humanizeDuration }}",
    "bytes": "{{ $value | humanize1024 }}B",
    "celsius": '{{ printf "%.0f" $value }} °C',
    "watts": '{{ printf "%.0f" $value }} W',
    "bool": "{{ if $value }}yes{{ else }}no{{ end }}",
}
TOKENS_PER_SECOND = "count:tokens/s"
"""A unit that Grafana does not have by itself: any text after `count:`."""


def grafana_unit(unit: str) -> str:
    """Grafana's id of a signal's unit; a plain number is shortened (12.3 K)."""
    return GRAFANA.get(unit, "short")


def alert_value(unit: str) -> str:
    """The template with which Prometheus writes the value of an alert."""
    return ALERT_VALUE.get(unit, PLAIN_NUMBER)
