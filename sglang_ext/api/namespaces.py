"""A request's namespace from an HTTP header, whichever route it came by.

A middleware keeps the header's values in a context variable; the check of sampling parameters,
which SGLang runs in the request's own task, puts them into custom_params.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from sglang_ext.request_options import RequestOptionError, check_namespace, shown

_header_values: ContextVar[tuple[str, ...]] = ContextVar("sglang_ext_namespace", default=())


class NamespaceHeader:
    """ASGI middleware that remembers a header's values for the request's task.

    Args:
        app: the next ASGI application.
        header: name of the header.
    """

    def __init__(self, app: Any, header: str):
        self._app = app
        self._name = header.lower().encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        values = tuple(v.decode("latin-1") for k, v in scope["headers"] if k == self._name)
        token = _header_values.set(values)
        try:
            await self._app(scope, receive, send)
        finally:
            _header_values.reset(token)


def with_header(params: Mapping[str, Any] | None, header: str) -> Mapping[str, Any] | None:
    """`params` with the namespace of the current request's header.

    Raises:
        RequestOptionError: the header's value is not a namespace, or it and custom_params
            disagree.
    """
    values = _header_values.get()
    if not values:
        return params
    if len(set(values)) > 1:
        raise RequestOptionError(
            f"the header {header} comes with several values: {shown(', '.join(values))}"
        )
    namespace = check_namespace(values[0], f"the header {header}")
    given = (params or {}).get("namespace")
    if given is not None and given != namespace:
        raise RequestOptionError(
            f"custom_params.namespace {shown(given)} contradicts the header {header}: {namespace}"
        )
    return {**(params or {}), "namespace": namespace}
