"""Queries that ask for what is not there are found, and those that do not are left alone."""

import json

import pytest

pytest.importorskip("promql_parser", reason="promql-parser is not installed")

from scripts.lib.promql_series import (
    Query,
    QueryError,
    Scraped,
    alert_queries,
    dashboard_queries,
    empty_parts,
    empty_queries,
)

TEXT = """\
# TYPE a:requests_total counter
a:requests_total{model_name="m/1.5",source="live"} 3
a:requests_total{model_name="m/1.5",source="static"} 0
# TYPE a:seconds histogram
a:seconds_bucket{model_name="m/1.5",le="1.0"} 2
a:seconds_bucket{model_name="m/1.5",le="+Inf"} 2
a:seconds_sum{model_name="m/1.5"} 1
a:seconds_count{model_name="m/1.5"} 2
"""


@pytest.fixture
def scraped():
    return Scraped(TEXT, {"job": "j", "instance": "host:1"})


@pytest.mark.parametrize(
    "expression",
    [
        "a:requests_total",
        'a:requests_total{source="live"}',
        'a:requests_total{source=~"l.*|x",model_name!="other",instance="host:1"}',
        'a:requests_total{source!~"live"}',
        'a:requests_total{absent=""}',
        "sum by (source) (rate(a:requests_total[5m])) / on () group_left () sum(a:seconds_count)",
        "histogram_quantile(0.9, sum by (le) (rate(a:seconds_bucket[5m])))",
        'up{job="j"} == 0',
        "1 + 1",
    ],
)
def test_what_is_there_is_found(expression, scraped):
    assert empty_parts(expression, scraped) == []


@pytest.mark.parametrize(
    ("expression", "missing"),
    [
        ("a:requests", "a:requests"),
        ("a:seconds", "a:seconds"),
        ('rate(a:requests_total{source="bigram"}[5m])', "bigram"),
        ('a:requests_total{source=~"liv"}', "liv"),
        ('a:requests_total{source=~".*",model_name!~"m.*"}', "model_name"),
        ("a:requests_total / b:requests_total", "b:requests_total"),
        ("histogram_quantile(0.9, sum by (le) (rate(a:seconds_sum[5m])))", "the label le"),
        ("sum by (tenant) (a:requests_total)", "the label tenant"),
        ('up{job="other"} == 0', "other"),
        ("max_over_time(rate(c[5m])[1h:1m])", "c"),
    ],
)
def test_what_is_not_there_is_named(expression, missing, scraped):
    assert missing in " ".join(empty_parts(expression, scraped))


def test_what_is_no_promql_is_an_error(scraped):
    with pytest.raises(QueryError, match="sum"):
        empty_parts("sum(", scraped)


def board(expression, *variables):
    asked = [{"name": n, "type": "query", "query": {"query": q}} for n, q in variables]
    panel = {"title": "P", "targets": [{"expr": expression}]}
    chosen = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return json.dumps(
        {
            "templating": {"list": [chosen, *asked]},
            "panels": [{"title": "a row", "type": "row"}, panel],
        }
    )


MODEL = ("model", "label_values(a:seconds_count, model_name)")
SERVER = ("server", 'label_values(a:seconds_count{model_name=~"$model"}, instance)')


def test_a_dashboards_variables_stand_for_all_their_values(scraped):
    selector = 'a:seconds_sum{model_name=~"$model",instance=~"${server}"}'
    text = board(f"rate({selector}[$__rate_interval])", MODEL, SERVER)
    (query,) = dashboard_queries(text, scraped)
    assert query.where == "P" and "[5m]" in query.expression
    assert empty_parts(query.expression, scraped) == []


def test_a_model_that_another_label_value_would_match_is_not_enough(scraped):
    """The dot of a name is a dot."""
    (query,) = dashboard_queries(board('x{model_name=~"$model"}', MODEL), scraped)
    other = Scraped('x{model_name="m/1x5"} 1\n')
    assert empty_parts(query.expression, other) != []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (board("a{b=~'$unknown'}"), "no variable unknown"),
        (board("a", ("v", "label_values(a:none, model_name)")), "variable v: nothing for"),
        (board("a", ("v", "label_values(a:seconds_count, none)")), "variable v: nothing for"),
        (board("a", ("v", "metrics(a)")), "expected label_values"),
    ],
)
def test_a_variable_that_finds_nothing_is_an_error(text, message, scraped):
    with pytest.raises(QueryError, match=message):
        list(dashboard_queries(text, scraped))


def test_empty_queries_are_told_with_their_place(scraped):
    rules = "groups: [{name: g, rules: [{alert: A, expr: a:none > 1}, {alert: B, expr: up == 0}]}]"
    asked = list(alert_queries(rules))
    assert asked == [Query("A", "a:none > 1"), Query("B", "up == 0")]
    assert empty_queries(asked, scraped) == ["A: nothing for a:none"]
