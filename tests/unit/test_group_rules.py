"""One number that stands for a group (GPUs, engines, ranks, processes): each choice of a member has a reason."""

from collections.abc import Iterable, Iterator, Mapping

from diag import promql
from diag.core.contract import Contract
from diag.core.incident import Condition, Part, Signal
from diag.core.metric_families import families
from diag.knowledge.catalog import load
from diag.knowledge.formulas import formula, parts_first
from diag.knowledge.signals import DECLARED
from diag.knowledge.signals.expressions import SLOWEST_MEMBER
from diag.promql import data as nodes

MEMBERS = frozenset(("gpu", "engine", "rank", "pid", "port", "host", "peer"))
"""Labels that tell the members of a group apart."""
TOTALS = ("sum", "count", "group")
"""Aggregations over all members: they choose none."""
ONE_OF = frozenset(("diag_vllm_node_info",))
"""Metrics of which an expression selects one member by its labels."""
Labels = frozenset[str]


def labels_of(node: nodes.Node, named: Mapping[str, Labels]) -> Labels:
    """Return the labels by which series of an expression may differ; `named` are those of recorded parts."""
    match node:
        case nodes.Selector(text=text):
            own = families()[text].labels if text in families() else ()
            of_vllm = ("engine",) if text.startswith("vllm:") and text != "vllm:cache_config_info" else ()
            return named.get(text, frozenset(() if text in ONE_OF else ("instance", *own, *of_vllm)))
        case nodes.Range(selector):
            return labels_of(selector, named)
        case nodes.Subquery(expr) | nodes.Negate(expr):
            return labels_of(expr, named)
        case nodes.Aggregate(_, expr, _, names, without):
            inside = labels_of(expr, named)
            return inside - {*names} if without else inside & {*names}
        case nodes.Call(_, args):
            return frozenset().union(*(labels_of(each, named) for each in args))
        case nodes.Binary(op, left, right, matching):
            one, other = labels_of(left, named), labels_of(right, named)
            if op in ("and", "unless"):
                return one
            if matching.many:
                return (one if matching.many == "left" else other) | {*matching.include}
            return frozenset(matching.labels) if matching.on and op != "or" else one | other
    return frozenset()


def choices(node: nodes.Node) -> Iterator[nodes.Aggregate]:
    """Yield every aggregation that chooses one of its members, or their mean."""
    match node:
        case nodes.Aggregate(op, expr):
            yield from () if op in TOTALS else (node,)
            yield from choices(expr)
        case nodes.Binary(_, left, right):
            yield from choices(left)
            yield from choices(right)
        case nodes.Negate(expr) | nodes.Subquery(expr):
            yield from choices(expr)
        case nodes.Call(_, args):
            for each in args:
                yield from choices(each)


def signals() -> Iterator[tuple[Signal, tuple[str, ...]]]:
    """Yield every signal of the catalogue with the labels of the subjects that it is asked for."""
    for incident in load():
        fixes = [condition for fix in incident.fixes for condition in (*fix.only_if, *fix.expects)]
        conditions: list[Condition] = [*incident.every_condition, *fixes]
        own = (own for fix in incident.fixes for own in fix.signals)
        for signal in filter(None, (*(each.signal for each in conditions), *own, incident.sign)):
            yield signal, incident.per


Asked = Iterable[tuple[Part | Signal, tuple[str, ...]]]


def group_choices(asked: Asked) -> dict[str, frozenset[str]]:
    """Return the members that each part or signal reduces to one number, by its name."""
    found: dict[str, frozenset[str]] = {}
    named: dict[str, Labels] = {}
    for name, part in parts_first(formula(each, per, "5m", Contract()) for each, per in asked).items():
        node = promql.parse(part.text).node
        named[name] = labels_of(node, named)
        for choice in choices(node):
            left = labels_of(choice, named)
            if members := (labels_of(choice.expr, named) - left) & MEMBERS:
                found[name.split(":")[1]] = found.get(name.split(":")[1], frozenset()) | members
    return found


def test_the_member_that_stands_for_a_group_has_a_reason() -> None:
    without = {name for name in group_choices(signals()) if not DECLARED[name].group}
    assert without == set(), "state in `group` why the least, the largest, the median or the mean stands for the group"


def test_a_reason_stands_where_a_group_is_reduced_only() -> None:
    reduced = group_choices(signals()).keys() | group_choices((each, ("instance",)) for each in DECLARED.values())
    assert {name for name, each in DECLARED.items() if each.group and name not in reduced} == set()


def test_a_choice_among_members_is_found() -> None:
    """A limit by GPU, one by engine, and a total."""
    reduced = group_choices(signals())
    assert reduced["pcie_bandwidth"] == {"gpu"}
    assert reduced["usual_load_of_model"] == {"engine"}
    assert "finished_requests" not in reduced


def test_a_ring_is_as_fast_as_its_slowest_member() -> None:
    for name in ("pcie_bandwidth", "nvlink_bandwidth", "memory_bandwidth"):
        assert DECLARED[name].group == SLOWEST_MEMBER
        assert DECLARED[name].promql.startswith("min by (instance)")
