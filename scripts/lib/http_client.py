"""The HTTP client of checks, benchmarks and tests."""

from collections.abc import Iterator

import httpx

# A connection for each request, however many are under way: servers close idle ones, perhaps just
# as they are used again. May be used by several threads; httpx.post and its like would read the
# certificates anew each time, which takes longer than a short answer.
HTTP = httpx.Client(
    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    follow_redirects=True,
    timeout=None,
)


def lines(response: httpx.Response) -> Iterator[bytes]:
    """The lines of a streamed answer as they come.

    httpx's own iter_lines breaks them at U+2028 and others as well, which JSON may hold.
    """
    rest = b""
    for part in response.iter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        yield from whole
    if rest:
        yield rest
