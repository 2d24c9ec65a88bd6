"""Onsets of incidents: each is judged again over short windows, and dated by its first sign."""

import math
import re
from collections.abc import Sequence
from itertools import islice

import numpy as np

from diag.core.incident import RANK, Condition, Incident, seconds
from diag.core.metric_prefix import OWN
from diag.core.subjects import Instants, SubjectIndex, median
from diag.diagnosis.decision_table import LOOK, Episode, Reading, Trits, holds, runs
from diag.diagnosis.diagnose import Diagnosis, diagnose, ranked, rule_out, with_severity
from diag.diagnosis.query_cache import FEWEST_INTERVALS, QueryCache
from diag.knowledge.formulas import expanded

MOST_DATED = 12
"""Incidents to date: each takes a few queries more."""
MOST_EPISODES = 4
"""Episodes of one incident to date, the last ones."""
AVERAGES = re.compile(r"\b(rate|avg_over_time)\(")
LOOK_BACK = 1800
"""Seconds before an episode in which its first sign is looked for."""
STEADY = 20
"""Scrapes in a row that all show an event: one before them that does not is no chance (95 % confidence)."""
MOST_BREAK = 300.0
"""Seconds without an event that separate two episodes of events, unless breaks inside the episode are shorter."""
LATELY = "2m"
"""The last minutes, which refute an incident that is judged over a longer window."""
HOURS = 3600
"""Seconds of a window from which on an incident is chronic."""
FEW = 5
"""Servers up to which all incidents are dated."""


def onset(reading: Reading, diagnosis: Diagnosis) -> float | None:
    """Return the time from which a condition of a present incident held without a break up to the reported instant.

    Unix seconds; the first instant judged if it held from the start; None if it does not hold. A missing value is no
    break.
    """
    if diagnosis.until is None:
        return None
    at = diagnosis.reported + 1
    began = None
    for instant, value in zip(reversed(diagnosis.instants[:at]), reversed(reading.history[:at]), strict=True):
        if reading.met_by(value) is False:
            break
        began = instant if value is not None else began
    return began


def _first_sign(diagnosis: Diagnosis, since: float, queries: QueryCache) -> float:
    """Return the time of the first sign of an episode: the first of its symptoms to hold without a break from then on.

    A median or a mean over a window holds up to a window later than what it measures, so that the onset lies in the
    window before it: a symptom counts from the scrape on from which it holds over the shortest window, or from where
    the mean of a value that jumps left the old value, in a straight line to the new one, whichever is earlier. A
    symptom that has held for longer was there before, and is no sign of this episode.
    """
    window, incident = queries.live(diagnosis.incident.live_window).seconds, diagnosis.incident
    if since not in diagnosis.instants or seconds(incident.live_window) > LOOK:
        return since
    back = window + 1.5 * queries.source.interval  # scrapes come a bit sooner or later
    instants, signs = diagnosis.instants, [since]
    place = instants.index(since)
    for reading in diagnosis.symptoms:
        if reading.condition not in incident.symptoms:
            continue
        signs += _first_scrape(reading.condition, reading.limit, diagnosis, queries, since, back)
        values = reading.history[: place + 1]
        first = 1 + max((at for at, value in enumerate(values) if not reading.met_by(value)), default=-1)
        if not 0 < first <= place or instants[first] <= since - window:
            continue
        signal, off = reading.condition.signal, 0.0  # share of its window for which a mean had been off
        if signal.unit != "bool" and signal.window_scaling != "peak" and AVERAGES.search(expanded(signal.promql)):
            before = max((at for at in range(first) if instants[at] <= instants[first] - window), default=0)
            beyond = (at for at in range(first, len(instants)) if instants[at] >= instants[first] + window)
            old, new = reading.history[before], reading.history[min(beyond, default=-1)]
            if old is not None and new is not None and new != old and reading.met_by(new):
                off = min(max((reading.limit - old) / (new - old), 0.0), 1.0)
        signs.append(instants[first] - window * off)
    return max(min(signs), since - window)


def _held(
    condition: Condition, limit: float, diagnosis: Diagnosis, queries: QueryCache, begin: float, end: float
) -> tuple[Instants, list[Trits]]:
    """Return the scrapes of a span of unix seconds, and where a condition holds over each of a few short windows."""
    step, last = round(queries.source.interval * 1000), round(end * 1000)
    first = max(queries.source.first, round(begin * 1000) - step)
    scraped = queries.source.instants
    instants = scraped[(scraped >= first) & (scraped <= last)]
    if len(instants) < (last - first) // step:  # a long range is judged at fewer instants than it was scraped
        instants = last - step * np.arange((last - first) // step, -1, -1, dtype=np.int64)
    # over two intervals a first sign is diluted; over the last one, few events may show nothing
    windows = [queries.holding(queries.source.interval / 2), queries.holding(queries.source.interval)]
    windows += [queries.live("1s")] if condition.signal is diagnosis.incident.sign else []
    rows = (
        queries.ask(condition.signal, diagnosis.incident.per, window, instants).of(diagnosis.subject)
        for window in (windows if len(instants) else ())
    )
    return instants, [holds(row, condition.op, limit) for row in rows if row is not None]


def _first_scrape(
    condition: Condition,
    limit: float,
    diagnosis: Diagnosis,
    queries: QueryCache,
    until: float,
    back: float,
    end: float = -math.inf,
) -> list[float]:
    """Return the first of the unbroken row of scrapes up to a time at which a condition holds over a short window.

    Empty if the row reaches back to the first sample, or for `back` seconds, or the last scrape does not show it. A
    sign that is a peak is an event: a break that is usual in its episode, which goes on until `end`, is none.
    """
    is_event = condition.signal is diagnosis.incident.sign and _has_events(diagnosis.incident)
    last = max(until, end) if is_event else until
    instants, rows = _held(condition, limit, diagnosis, queries, until - back, last)
    before, first = instants <= until * 1000, []
    for held in rows:
        usual, apart = _breaks(instants[(held == 1) & ~before], queries)
        for shown in runs(held[before], instants[before], apart)[-1:]:
            is_broken = (held[before][shown[-1] :] == 0).any() and until - instants[shown[-1]] / 1000 > apart
            events = instants[shown[0] :][held[shown[0] :] == 1]
            is_rare = is_event and (len(events) < STEADY or _breaks(events, queries)[0] > 0)
            clean = max(usual, 2.5 * queries.source.interval * is_rare)  # less than that before it is chance
            if not is_broken and (held[: shown[0]] == 0).any() and instants[shown[0]] - instants[0] > clean * 1000:
                first.append(int(shown[0]))
    return [float(instants[min(first)]) / 1000] if first else []


def _breaks(events: Instants, queries: QueryCache) -> tuple[float, float]:
    """Return the seconds of a usual break between events, and of the longest one that is no end of them.

    Of events that come by chance, one break in twenty is four times as long as the median.
    """
    breaks = np.diff(events) / 1000
    breaks = breaks[breaks > 1.5 * queries.source.interval]
    usual = median(breaks) if len(breaks) else 0.0
    return usual, min(4 * usual, MOST_BREAK)


def _joined(diagnosis: Diagnosis, queries: QueryCache) -> tuple[Episode, ...]:
    """Return the episodes of an incident; those between which its events go on are one, whichever symptom shows them.

    One symptom of several holds here, another one there, and each comes and goes about its limit.
    """
    incident, (first, *others) = diagnosis.incident, diagnosis.episodes
    if incident.sign is None or not others or not _has_events(incident):
        return diagnosis.episodes
    sign, joined = Condition(incident.sign, ">", 0.0, incident.symptoms[0].why), [first]
    begin, interval = max(queries.source.first / 1000, first[1] - LOOK_BACK), queries.source.interval
    instants, rows = _held(sign, 0.0, diagnosis, queries, begin, others[-1][1])
    for since, until in others:
        began, ended = joined[-1]
        for shows in (instants[held == 1] / 1000 for held in rows):
            sides = ((shows >= (began or begin)) & (shows <= ended), (shows >= since) & (shows <= until))
            apart = max(4 * interval, *(_breaks(1000 * shows[side], queries)[1] for side in sides))
            if max(np.diff([ended, *shows[(shows > ended) & (shows < since)].tolist(), since])) <= apart:
                joined[-1] = (began, until)
                break
        else:
            joined.append((since, until))
    return tuple(joined)


def _has_events(incident: Incident) -> bool:
    """Return True if the sign of an incident is an event, between two of which no scrape shows it."""
    return incident.sign is not None and incident.sign.window_scaling == "peak"


def _ended(diagnosis: Diagnosis, queries: QueryCache) -> Diagnosis:
    """Return a present incident with the end at which its raw signal fell; it is over if the last minutes refute it.

    A window of five minutes shows an incident for minutes after its end, and a burn rate over hours for longer. What
    ends its alert over the last minutes ends it here. A short window may hold few of its events by chance: it goes on
    until they have failed to come for longer than that.
    """
    incident, lately = diagnosis.incident, queries.live(LATELY)
    is_event, is_short = _has_events(incident), queries.window(incident).seconds < lately.seconds
    if incident.outage or not incident.ends_over or (is_short and (diagnosis.ongoing or not is_event)):
        return diagnosis
    signal = incident.ending.signal
    reading = next(one for one in diagnosis.symptoms if one.condition.signal.id.startswith(signal.id))
    row = queries.ask(signal, incident.per, lately, queries.source.instants[-1:]).of(diagnosis.subject)
    limit = queries.contract.limit(incident.ending.limit)
    if diagnosis.ongoing and (row is None or holds(row, incident.ending.op, limit)[-1] != 1):
        return diagnosis
    (since, until), last = diagnosis.episodes[-1], float(queries.source.instants[-1]) / 1000
    began = until - LOOK_BACK if since is None else since
    shown = reading.condition._replace(signal=signal, limit=queries.contract.limit(reading.condition.limit))
    shown = Condition(incident.sign, ">", 0.0, shown.why) if incident.sign else shown
    instants, rows = _held(shown, float(shown.limit), diagnosis, queries, began, last if is_event else until)
    rows = rows[:2] if is_event else rows  # a long window shows an event for as long behind it
    shows = instants[np.any([held == 1 for held in rows], axis=0)] if rows else instants[:0]
    end = max((shows[shows <= until * 1000] / 1000).tolist(), default=until)
    for event in (shows[shows > until * 1000] / 1000).tolist() if is_event else ():
        end = event if event - end <= _breaks(shows, queries)[1] else end
    ongoing = is_event and last - end <= _breaks(shows, queries)[1] and not queries.is_gone(diagnosis.subject)
    episodes = (*diagnosis.episodes[:-1], (since, last if ongoing else end))
    return with_severity(diagnosis._replace(episodes=episodes, ongoing=ongoing), queries)


def _began(diagnosis: Diagnosis, episode: Episode, after: float | None, queries: QueryCache) -> float | None:
    """Return the time at which an episode really began; None if it held from the first sample on.

    The episode begins at the first instant that shows it, None for the first of all; `after` ends the one before. An
    incident judged over five minutes shows up to five minutes after its onset. Judged again over the live window, at
    every scrape of the first long window that shows it, its onset can be dated to half a minute: by its first sign.
    """
    (since, end), incident = episode, diagnosis.incident
    live, long = queries.live(incident.live_window).seconds, queries.window(incident).seconds
    until = diagnosis.instants[0] if since is None else since
    began = since
    if long > live and (since is not None or seconds(incident.live_window) <= LOOK):
        step = round(queries.source.interval * 1000)
        instants = round(until * 1000) - step * np.arange((long + live) * 1000 // step, -1, -1, dtype=np.int64)
        if since is None:
            instants = instants[instants >= queries.source.first]
        close = queries.at(instants)
        # a look at the end alone is no proof that it held from the first sample on
        is_within = since is not None or until - queries.source.first / 1000 > long + 1.5 * queries.source.interval
        again = (other for other in diagnose([incident], close) if other.subject == diagnosis.subject)
        starts = (
            ((is_within and other.instants[0]) or None) if start is None else _first_sign(other, start, queries)
            for other in again
            for start, _ in other.episodes
        )
        began = next((start for start in starts if after is None or start is None or start > after), since)
    elif since is not None:
        began = _first_sign(diagnosis, since, queries)
    if incident.sign is None:
        return began
    sign, shown = Condition(incident.sign, ">", 0.0, incident.symptoms[0].why), until if began is None else began
    scrapes = _first_scrape(sign, 0.0, diagnosis, queries, shown, LOOK_BACK, end)
    is_early = shown - queries.source.first / 1000 <= live + 1.5 * queries.source.interval
    if _has_events(incident) and is_early:  # the first live window of all samples shows the episode already
        rows = (
            row
            for symptom in diagnosis.symptoms  # one with an upper bound, such as a low ITL, holds without an episode
            if symptom.condition in incident.symptoms and symptom.condition.op != "<"
            for row in _held(symptom.condition, symptom.limit, diagnosis, queries, queries.source.first / 1000, shown)[
                1
            ]
        )
        was_under_way = any((row == 1).any() and not (row == 0).any() for row in rows)
        began, scrapes = None, [] if was_under_way else scrapes  # a scrape between two events shows none
    return next((scrape for scrape in scrapes if after is None or scrape > after), began)


def _since_when(diagnosis: Diagnosis, queries: QueryCache) -> Diagnosis:
    """Return a chronic incident, judged over an hour or all that was observed, with what is known of its onset.

    It began where its windows of minutes began to show it; before all samples only if the first of them show it.
    """
    # what rules a look-alike out is no onset: a hit rate of 0 % began before its prefills cost time
    short = diagnosis.incident._replace(window="5m", live_window=f"{LOOK:.0f}s", looks_like=())
    again = next((other for other in diagnose([short], queries) if other.subject == diagnosis.subject), None)
    since = diagnosis.since
    if again is not None and again.state == "present" and again.ongoing:
        after = again.episodes[-2][1] if len(again.episodes) > 1 else None
        since = _began(again, again.episodes[-1], after, queries)
        if since is None:
            return diagnosis
        # what wanders about its limit has no onset: one has a whole window before it and behind it
        sides = (since - queries.source.first / 1000, queries.source.instants[-1] / 1000 - since)
        since = since if min(sides) >= seconds(short.window) else None
    episodes = (*diagnosis.episodes[:-1], (since, diagnosis.episodes[-1][1]))
    return diagnosis._replace(since=episodes[0][0], episodes=episodes, watched=0.0)


def dated(diagnoses: Sequence[Diagnosis], queries: QueryCache) -> tuple[Diagnosis, ...]:
    """Return the diagnoses; each episode has the time at which it really began, if that lies within the span.

    The onsets decide which incident is the cause.
    """
    most = MOST_DATED * FEW // max(FEW, len(queries.subjects(("instance",))))  # a fleet's worst, for the same work
    result = [*diagnoses]
    late = (
        place
        for place, diagnosis in enumerate(diagnoses)
        if diagnosis.incident.began is None
        and (diagnosis.state == "present" or any(since is not None for since, _ in diagnosis.episodes))
    )
    for place in islice(late, most):
        diagnosis = diagnoses[place]._replace(episodes=_joined(diagnoses[place], queries))
        episodes = diagnosis.episodes[:-MOST_EPISODES]
        if diagnosis.state == "present" and seconds(diagnosis.incident.live_window) >= HOURS:
            result[place] = _since_when(diagnosis, queries)
            continue
        for since, until in diagnosis.episodes[-MOST_EPISODES:]:
            after = episodes[-1][1] if episodes else None
            episodes = (*episodes, (_began(diagnosis, (since, until), after, queries), until))
        since = episodes[0][0] if diagnosis.state == "present" else None  # the episodes of an absent one are notes
        live = queries.live(diagnosis.incident.live_window).seconds
        first = queries.source.first / 1000 + live  # where long windows begin to show it, live ones have shown it
        is_closer = since is None and episodes and queries.window(diagnosis.incident).seconds > live
        watched = diagnosis.instants[0] - first if is_closer else diagnosis.watched
        result[place] = diagnosis._replace(since=since, episodes=episodes, watched=watched)
        if diagnosis.state == "present":
            result[place] = _ended(result[place], queries)
    # what only the page of an engine shows, and is no consequence of its death, ended with it
    dead = {one.server: one for one in result if one.incident.crash is not None and one.ongoing}
    for place, one in enumerate(result):
        death, lasts = dead.get(one.server), one.is_alarming and one.ongoing and not one.incident.outage
        died = death.since if death and lasts and one.incident.id not in death.incident.explains else None
        by_page = died and all(OWN in expanded(symptom.signal.promql) for symptom in one.incident.symptoms)
        if died and by_page and (one.episodes[-1][0] or 0.0) <= died:
            episodes = (*one.episodes[:-1], (one.episodes[-1][0], died))
            result[place] = with_severity(one._replace(ongoing=False, episodes=episodes), queries)
    result = [*ranked(result)]
    # what brought about the death of a server did not begin after it, if it showed later
    deaths = {
        (one.server, one.explained_by): one.episodes[-1][0] for one in result if one.incident.crash and one.ongoing
    }
    for place, one in enumerate(result):
        died, (since, end) = deaths.get((one.server, one.incident.id)), (*one.episodes[-1:], (None, 0.0))[0]
        if one.ongoing and died is not None and since is not None and died < since:
            episodes = (*one.episodes[:-1], (died, end))
            result[place] = one._replace(since=episodes[0][0], episodes=episodes)
    return tuple(result)


def begun(diagnoses: Sequence[Diagnosis], incidents: Sequence[Incident], queries: QueryCache) -> tuple[Diagnosis, ...]:
    """Return the diagnoses; if nothing is wrong over the windows of the alerts, with what the last live windows show.

    Over five minutes, an incident of one minute is not present yet. A look at the end, which lasts as long as that of
    `diag doctor URL`, shows it. If something is wrong, what makes it worse is looked for.
    """
    live = {each.id: queries.live(each.live_window).seconds for each in incidents if seconds(each.live_window) <= LOOK}
    late = [each for each in incidents if live.get(each.id, math.inf) < queries.window(each).seconds]
    if len(queries.subjects(("instance",))) > FEW:
        return tuple(diagnoses)
    if late and not any(diagnosis.is_alarming for diagnosis in diagnoses):
        step, longest = round(queries.source.interval * 1000), max(live.values())
        close = queries.at(queries.source.instants[-1] - step * np.arange(math.ceil(1000 * longest / step), -1, -1))
        close.gone = queries.gone
        begins = [diagnosis for diagnosis in diagnose(late, close) if diagnosis.is_alarming and diagnosis.ongoing]
        now = {(diagnosis.incident.id, diagnosis.subject): diagnosis for diagnosis in dated(begins, queries)}
        diagnoses = [now.get((diagnosis.incident.id, diagnosis.subject), diagnosis) for diagnosis in diagnoses]
    return _graver(diagnoses, queries)


def _graver(diagnoses: Sequence[Diagnosis], queries: QueryCache) -> tuple[Diagnosis, ...]:
    """Return the diagnoses with what explains an alarm, is worse, and has not lasted as long as its own alert waits.

    It is judged from the onset of the alarm on: in a longer window, what was before refutes it, such as the last
    successes; a shorter look may show it by chance.
    """
    result, last = [*diagnoses], queries.source.instants[-1] / 1000
    alarms = [one for one in diagnoses if one.is_alarming and one.ongoing]
    for place, (incident, subject, *_) in enumerate(diagnoses):
        is_open = incident.escalates and not incident.outage and not diagnoses[place].is_alarming
        for alarm in alarms if is_open and seconds(incident.live_window) <= LOOK else ():
            lasts, half = last - (alarm.since or last), queries.source.interval / 2
            is_cause = alarm.incident.id in incident.explains and alarm.server == diagnoses[place].server
            if is_cause and lasts + half >= queries.live(incident.live_window).seconds:
                look = f"{min(lasts - half, seconds(incident.window)):.0f}s"
                again = diagnose([incident._replace(window=look, live_window=look, hold="0s")], queries)
                worse = next(other for other in again if other.subject == subject)
                if worse.ongoing and RANK[worse.severity] > RANK[alarm.severity]:
                    others = SubjectIndex((other.subject, other) for other in diagnoses)
                    result[place] = dated([rule_out(worse.one_by_one[-1], others, queries)], queries)[0]
    return ranked(result)


def by_scrapes(diagnosis: Diagnosis, queries: QueryCache) -> Diagnosis:
    """Return a diagnosis from a short observation with onset and histories in the shortest windows.

    An observation of half a minute has one live window, which shows neither how a value changed nor when.
    """
    is_chronic = seconds(diagnosis.incident.live_window) > LOOK
    if len(diagnosis.instants) > 1 or is_chronic or len(queries.subjects(("instance",))) > FEW:
        return diagnosis
    shortest = f"{math.ceil(FEWEST_INTERVALS * queries.source.interval - 0.01)}s"  # the interval is measured
    incident = diagnosis.incident._replace(window=shortest, live_window=shortest)
    again = next((other for other in diagnose([incident], queries) if other.subject == diagnosis.subject), None)
    if again is None or len(again.instants) < 2:
        return diagnosis

    def drawn(readings: Sequence[Reading], closer: Sequence[Reading]) -> tuple[Reading, ...]:
        return tuple(one._replace(history=other.history) for one, other in zip(readings, closer, strict=True))

    episodes = diagnosis.episodes
    is_dated = again.ongoing and incident.began is None and not _has_events(incident)  # scrapes between two show none
    if is_dated and episodes[-1][0] is None:
        episodes = ((again.episodes[-1][0], episodes[-1][1]),)
    return diagnosis._replace(
        since=episodes[0][0],
        episodes=episodes,
        instants=again.instants,
        symptoms=drawn(diagnosis.symptoms, again.symptoms),
        supports=drawn(diagnosis.supports, again.supports),
    )
