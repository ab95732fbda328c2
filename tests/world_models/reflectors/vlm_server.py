"""An OpenAI-compatible server that judges the last picture; its path says how it misbehaves.

    python vlm_server.py      prints its port, serves until killed

``/right/v1`` says yes where the last picture is bright. Others: ``slow``, ``hang``, ``drip``,
``broken``, ``flaky`` (two errors before each answer), ``nonsense``, ``plain`` (no
log-probabilities), ``huge``, ``close`` (hangs up), ``once`` (dies after an answer), ``key`` (wants
a key).
"""

import base64
import io
import json
import math
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

LOCK = threading.Lock()
SEEN: dict[bytes, int] = {}
UNDER_WAY = [0, 0]  # now, most


def answer(request: dict, logprobs: bool = True) -> dict:
    content = request["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    header, _, data = urls[-1].partition(",")
    assert (
        header == "data:image/png;base64"
        and request["max_tokens"] == 1
        and request["logprobs"] is True
    )
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    yes = 0.02 + 0.9 * picture.mean() / 255
    top = [("Yes", yes * 0.75), (" yes", yes * 0.25), ("No", 0.94 - yes), ("Maybe", 0.06)]
    said = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in top]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Yes"},
        "finish_reason": "length",
    }
    if logprobs:
        choice["logprobs"] = {"content": [{**said[0], "top_logprobs": said}]}
    return {"id": "1", "object": "chat.completion", "model": request["model"], "choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(200, json.dumps(UNDER_WAY[1]).encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        kind, path = self.path.lstrip("/").split("/", 1)
        if path != "v1/chat/completions":
            return self.reply(404, b"no such page")
        with LOCK:
            UNDER_WAY[0] += 1
            UNDER_WAY[1] = max(UNDER_WAY)
            SEEN[body] = SEEN.get(body, 0) + 1
        try:
            self.handle_kind(kind, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with LOCK:
                UNDER_WAY[0] -= 1

    def handle_kind(self, kind: str, body: bytes) -> None:
        right = json.dumps(answer(json.loads(body))).encode()
        if kind == "right":
            time.sleep(0.02)
            self.reply(200, right)
        elif kind == "slow":
            time.sleep(3)
            self.reply(200, right)
        elif kind == "hang":
            time.sleep(600)
        elif kind == "drip":
            self.send_response(200)
            self.send_header("Content-Length", str(len(right)))
            self.end_headers()
            for byte in right:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.1)
        elif kind == "broken":
            self.reply(500, b"\x1b[31mout of memory")
        elif kind == "flaky":
            self.reply(*((200, right) if SEEN[body] % 3 == 0 else (503, b"loading")))
        elif kind == "nonsense":
            self.reply(200, np.random.default_rng(len(body)).bytes(2000))
        elif kind == "plain":
            self.reply(200, json.dumps(answer(json.loads(body), logprobs=False)).encode())
        elif kind == "huge":
            self.send_response(200)
            self.end_headers()
            for _ in range(2000):
                self.wfile.write(b" " * (1 << 20))
        elif kind == "close":
            self.close_connection = True
        elif kind == "key":
            known = self.headers.get("Authorization") == "Bearer sesame"
            self.reply(200 if known else 401, right if known else b"who are you?")
        elif kind == "once":
            self.reply(200, right)
            os._exit(1)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()
