"""What a running server's metrics say of speculation (`--enable-metrics`)."""

import re

import requests

_METRIC = re.compile(r"sglang_ext:(\w+)\{(.*)\} (\S+)")
_NAME_LABEL = re.compile(r'(?:^|,)name="([^"]*)"')


def read_metrics(base_url: str) -> dict[str, float]:
    """The server's `sglang_ext:` series; see `parse_metrics`."""
    response = requests.get(base_url + "/metrics", timeout=30)
    response.raise_for_status()
    return parse_metrics(response.text)


def parse_metrics(text: str) -> dict[str, float]:
    """The `sglang_ext:` series of a Prometheus page by name.

    Those with a label `name` are called SERIES.NAME; a histogram's buckets are left out.
    """
    found: dict[str, float] = {}
    for name, labels, value in _METRIC.findall(text):
        if name.endswith("_bucket"):
            continue
        label = _NAME_LABEL.search(labels)
        found[f"{name}.{label[1]}" if label else name] = float(value)
    return found
