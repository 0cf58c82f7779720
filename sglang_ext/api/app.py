"""SGLang's HTTP application with our routes and the namespace header.

`app` is what uvicorn's workers import with --tokenizer-worker-num above 1, where SGLang loads no
plugins; the plugin points SGLANG_HTTP_SERVER_APP_PATH here.
"""

from typing import Any

APP_PATH = "sglang_ext.api.app:app"


def extend(app: Any, namespace_header: str) -> Any:
    """Add the routes and the middleware to SGLang's FastAPI application; idempotent."""
    from sglang_ext.admission.bodies import JsonBodies
    from sglang_ext.admission.ollama import OllamaErrors
    from sglang_ext.api.datastore.routes import add_routes
    from sglang_ext.api.namespaces import NamespaceHeader
    from sglang_ext.api.openapi import change_schema
    from sglang_ext.api.predicted_outputs import describe_field
    from sglang_ext.api.translation import session_routes
    from sglang_ext.options import Options

    if not getattr(app.state, "sglang_ext", False):
        app.state.sglang_ext = True
        add_routes(app)
        change_schema(app, describe_field)
        options = Options.from_env()
        if "ssbd" in options.loaded_drafters():
            session_routes.add_routes(app)
        if namespace_header:
            app.add_middleware(NamespaceHeader, header=namespace_header)
        app.add_middleware(OllamaErrors)
        app.add_middleware(JsonBodies, max_bytes=options.max_body_mb << 20)
    return app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(name)
    from sglang.srt.plugins import load_plugins

    from sglang_ext import plugin

    plugin.in_http_worker = True
    load_plugins()
    from sglang.srt.entrypoints.http_server import app

    from sglang_ext.options import Options

    return extend(app, Options.from_env().namespace_header)
