"""What a running server's metrics say of speculation (`--enable-metrics`)."""

from prometheus_client.parser import text_string_to_metric_families

from scripts.lib.http_client import HTTP

_OURS = "sglang_ext:"


def read_metrics(base_url: str) -> dict[str, float]:
    """The server's `sglang_ext:` series; see `parse_metrics`."""
    response = HTTP.get(base_url + "/metrics", timeout=30)
    response.raise_for_status()
    return parse_metrics(response.text)


def parse_metrics(text: str) -> dict[str, float]:
    """The `sglang_ext:` series of a Prometheus page by name.

    Those with a label `name` are called SERIES.NAME; a histogram's buckets are left out.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(_OURS) and not sample.name.endswith("_bucket"):
                name, label = sample.name.removeprefix(_OURS), sample.labels.get("name")
                found[f"{name}.{label}" if label else name] = sample.value
    return found
