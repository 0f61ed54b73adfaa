"""Scores answers over HTTP: POST of ``{"questions": […], "answers": […]}`` to /score gives ``{"rewards": […]}``."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from additions import right


class Verifier(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pairs = zip(asked["questions"], asked["answers"], strict=True)
        body = json.dumps(
            {"rewards": [float(answer == right(question)) for question, answer in pairs]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Verifier).serve_forever()
