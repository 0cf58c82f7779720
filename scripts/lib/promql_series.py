"""Which series PromQL asks for, looked up in what a server's /metrics shows.

Queries are parsed as Prometheus does; values are not computed. What is found tells that a query is
not empty for want of a series or of a label, which is how dashboards break.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

# Prometheus puts them on what it scrapes.
TARGET = {"job": "sglang-ext", "instance": "127.0.0.1:30000"}
_LABEL_VALUES = re.compile(r"label_values\((.+), *(\w+)\)")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
# What a panel's resolution decides; any will do for looking series up.
_INTERVALS = {"__rate_interval": "5m", "__interval": "1m", "__range": "1h"}

Labels = Mapping[str, str]


class QueryError(ValueError):
    """A query that Prometheus would refuse, or that names a variable that is not there."""


@dataclass(frozen=True)
class Query:
    """A query, and where it stands."""

    where: str
    expression: str


class Scraped:
    """The series of one scrape, by name.

    Args:
        text: what /metrics answers.
        target: labels that Prometheus adds to each.
    """

    def __init__(self, text: str, target: Labels = TARGET):
        self._series: dict[str, list[dict[str, str]]] = {"up": [dict(target)]}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._series.setdefault(sample.name, []).append({**sample.labels, **target})

    def matching(self, selector: Any) -> list[dict[str, str]]:
        """The labels of each series that a vector selector selects."""
        matchers = selector.matchers.matchers
        return [
            labels
            for labels in self._series.get(selector.name or "", [])
            if all(_matches(matcher, labels) for matcher in matchers)
        ]


def empty_parts(expression: str, scraped: Scraped) -> list[str]:
    """The selectors of a query that select nothing, and labels it groups by that nothing has.

    Raises:
        QueryError: it is no PromQL.
    """
    import promql_parser as promql

    root = _parsed(expression)
    found: list[str] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql.VectorSelector) and not scraped.matching(node):
            found.append(node.prettify())
        elif isinstance(node, promql.AggregateExpr) and _keeps(node):
            found.extend(_labels_missing(node, scraped))
        return True

    promql.walk(root, visit)
    return sorted(set(found))


def series_asked(expression: str) -> list[Any]:
    """The vector selectors of a query, as promql_parser has them.

    Raises:
        QueryError: it is no PromQL.
    """
    return _selectors(_parsed(expression))


def dashboard_queries(text: str, scraped: Scraped) -> Iterator[Query]:
    """Each query of a Grafana dashboard, its variables chosen as "All" chooses them.

    Raises:
        QueryError: a variable finds nothing, or is not there.
    """
    board = json.loads(text)
    values: dict[str, str] = dict(_INTERVALS)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            values[variable["name"]] = _all_values(variable, values, scraped)
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Query(panel["title"], _filled_in(target["expr"], values))


def alert_queries(text: str) -> Iterator[Query]:
    """Each expression of a file of alert rules."""
    import yaml

    for group in yaml.safe_load(text)["groups"]:
        for rule in group["rules"]:
            yield Query(rule["alert"], rule["expr"])


def empty_queries(queries: Iterable[Query], scraped: Scraped) -> list[str]:
    """A line for each query of which a part is empty."""
    lines = []
    for query in queries:
        if parts := empty_parts(query.expression, scraped):
            lines.append(f"{query.where}: nothing for {', '.join(parts)}")
    return lines


def _keeps(node: Any) -> bool:
    """Whether an aggregation names the labels that it keeps, by `by`."""
    import promql_parser as promql

    return node.modifier is not None and node.modifier.type == promql.AggModifierType.By


def _labels_missing(node: Any, scraped: Scraped) -> list[str]:
    """Labels that an aggregation keeps and no series below it has."""
    series = [labels for s in _selectors(node.expr) for labels in scraped.matching(s)]
    return [
        f"the label {label} of {node.prettify()}"
        for label in node.modifier.labels
        if series and not any(label in labels for labels in series)
    ]


def _selectors(node: Any) -> list[Any]:
    import promql_parser as promql

    found: list[Any] = []

    def visit(inner: Any) -> bool:
        if isinstance(inner, promql.VectorSelector):
            found.append(inner)
        return True

    promql.walk(node, visit)
    return found


def _all_values(variable: Any, values: Mapping[str, str], scraped: Scraped) -> str:
    """What Grafana puts in for "All": each value that there is, as a regular expression."""
    asked = _LABEL_VALUES.fullmatch(variable["query"]["query"])
    if asked is None:
        raise QueryError(f"variable {variable['name']}: expected label_values(SERIES, LABEL)")
    selector = _parsed(_filled_in(asked[1], values))
    found = {labels[asked[2]] for labels in scraped.matching(selector) if asked[2] in labels}
    if not found:
        raise QueryError(f"variable {variable['name']}: nothing for {asked[0]}")
    escaped = [re.escape(value).replace("\\", "\\\\") for value in sorted(found)]
    return f"({'|'.join(escaped)})"


def _filled_in(expression: str, values: Mapping[str, str]) -> str:
    names: Sequence[str] = _VARIABLE.findall(expression)
    if unknown := [name for name in names if name not in values]:
        raise QueryError(f"{expression}: there is no variable {unknown[0]}")
    return _VARIABLE.sub(lambda match: values[match[1]], expression)


def _parsed(expression: str) -> Any:
    import promql_parser as promql

    try:
        return promql.parse(expression)
    except ValueError as error:
        raise QueryError(f"{expression}: {error}") from None


def _matches(matcher: Any, labels: Labels) -> bool:
    from promql_parser import MatchOp

    value = labels.get(matcher.name, "")
    if matcher.op in (MatchOp.Equal, MatchOp.NotEqual):
        return (value == matcher.value) is (matcher.op == MatchOp.Equal)
    return (re.fullmatch(matcher.value, value) is not None) is (matcher.op == MatchOp.Re)
