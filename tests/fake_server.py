"""A chat server for tests: it answers from a script, one entry a request, and remembers what was asked.

An entry is a text (a usual reply), a status (int, or (status, headers)), `EMPTY` (no body), or `HANG`.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EMPTY, HANG = object(), object()


class FakeServer:
    """`with FakeServer([...]) as server:` listens on server.url; a script that is used up repeats its end.

    script: entries, or a function of the request's JSON.
    """

    def __init__(self, script, *, hang: float = 1.0):
        self.script, self.hang = script, hang
        self.asked: list[dict] = []
        self.busy = self.most_busy = 0
        self._lock = threading.Lock()

    def __enter__(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with outer._lock:
                    outer.busy += 1
                    outer.most_busy = max(outer.most_busy, outer.busy)
                    number = len(outer.asked)
                    outer.asked.append(body)
                try:
                    entry = outer._entry(number, body)
                    self._answer(entry)
                finally:
                    with outer._lock:
                        outer.busy -= 1

            def _answer(self, entry):
                if entry is HANG:
                    time.sleep(outer.hang)
                    entry = "too late"
                status, headers, data = 200, {}, b""
                if isinstance(entry, tuple):
                    status, headers = entry
                elif isinstance(entry, int):
                    status = entry
                elif entry is not EMPTY:
                    data = json.dumps(_completion(entry)).encode()
                if status != 200:
                    data = b'{"error": {"message": "no"}}'
                try:
                    self.send_response(status)
                    self.send_header("content-type", "application/json")
                    self.send_header("content-length", str(len(data)))
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client has gone

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def _entry(self, number, body):
        if callable(self.script):
            return self.script(body)
        return self.script[min(number, len(self.script) - 1)]

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def _completion(text):
    message = {"role": "assistant", "content": text}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "fake",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }
