"""HTTP requests to an ASGI application, piece by piece, as uvicorn makes them."""

import asyncio
import json


class Call:
    """One request in a task; the client can leave before it is answered."""

    def __init__(self, app, method, path, body=None, headers=None):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._body = [content[i : i + 65536] for i in range(0, len(content), 65536)] or [b""]
        if body is None:
            self._body = [b""]
        self._left = asyncio.Event()
        self._sent = asyncio.Queue()
        self._text = ""
        self.status = 0
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._sent.put))

    async def _receive(self):
        if self._body:
            part = self._body.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._body)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    def leave(self):
        """The client disconnects."""
        self._left.set()

    async def begin(self):
        """The status, when it comes."""
        message = await asyncio.wait_for(self._sent.get(), 5)
        self.status = message["status"]
        return self.status

    async def event(self):
        """The next server-sent event: its fields, data as an object where it is JSON."""
        while "\n\n" not in self._text:
            message = await asyncio.wait_for(self._sent.get(), 5)
            self._text += message["body"].decode()
            if not message.get("more_body") and "\n\n" not in self._text:
                return None
        text, _, self._text = self._text.partition("\n\n")
        fields = dict(line.split(": ", 1) for line in text.split("\n"))
        if fields.get("data", "").startswith("{"):
            fields["data"] = json.loads(fields["data"])
        return fields

    async def answer(self):
        """Status and JSON body."""
        await self.begin()
        body = b""
        while True:
            message = await asyncio.wait_for(self._sent.get(), 5)
            body += message["body"]
            if not message.get("more_body"):
                return self.status, json.loads(body) if body else None
