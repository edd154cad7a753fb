"""A local S3 server behind a proxy that delays requests and injects errors."""

import contextlib
import http.client
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import s3fs


HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}
ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>injected</Message></Error>'
CALM_SECONDS = 25.0  # between two outages
OUTAGE_SECONDS = 4.0
PIECES = 5  # of a slow answer
EVENTS = ("500", "500", "reset", "reset in the answer", "slow answer")


class Weather:
    """Decides which request fails, and counts the injected faults by name.

    Args:
        rate: the share of requests that get a fault outside of outages.
    """

    def __init__(self, seed: int, rate: float) -> None:
        self.source = random.Random(seed)
        self.rate = rate
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.began = time.monotonic()

    def event(self, method: str) -> str:
        """Return the name of a fault for a request, or "" for none."""
        with self.lock:
            self.counts["requests"] += 1
            name = self._choose(method)
            if name:
                self.counts[name] += 1
            return name

    def _choose(self, method: str) -> str:
        if self.rate == 0:
            return ""
        age = (time.monotonic() - self.began) % (CALM_SECONDS + OUTAGE_SECONDS)
        if age > CALM_SECONDS:
            return "500 in an outage"
        if method == "DELETE" and self.source.random() < 5 * self.rate:
            return "403 on a deletion"
        if self.source.random() < self.rate:
            return self.source.choice(EVENTS)
        return ""

    def latency(self) -> float:
        with self.lock:
            return self.source.uniform(0.001, 0.03)


class Handler(BaseHTTPRequestHandler):
    """Forwards a request to the S3 server, unless the weather injects a fault."""

    protocol_version = "HTTP/1.1"
    weather: Weather
    upstream: int  # the port of the S3 server

    def log_message(self, *args: object) -> None:
        pass

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(self.weather.latency())
        event = self.weather.event(self.command)
        if event.startswith("500"):
            self.answer(500, ERROR.format(code="InternalError").encode())
        elif event.startswith("403"):
            self.answer(403, ERROR.format(code="AccessDenied").encode())
        elif event == "reset":
            self.reset()
        else:
            self.pass_on(body, event)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    def pass_on(self, body: bytes, event: str) -> None:
        server = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        with contextlib.closing(server):
            server.request(self.command, self.path, body, dict(self.headers))
            reply = server.getresponse()
            content = reply.read()
            length = reply.getheader("Content-Length", str(len(content)))
            headers = [pair for pair in reply.getheaders() if pair[0].lower() not in HOP_BY_HOP]
        self.send_response(reply.status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        if event == "reset in the answer":
            self.wfile.write(content[: len(content) // 2])
            self.reset()
        elif event == "slow answer":
            piece = len(content) // PIECES + 1
            for start in range(0, len(content), piece):
                time.sleep(0.2)
                self.wfile.write(content[start : start + piece])
        else:
            self.wfile.write(content)

    def answer(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def reset(self) -> None:
        """Close the connection with a reset instead of an orderly end."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


class Proxy(ThreadingHTTPServer):
    """A server that is silent about clients that were killed."""

    daemon_threads = True

    def handle_error(self, *args: object) -> None:
        pass


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def object_store(folder: Path, weather: Weather) -> Iterator[dict[str, str]]:
    """Serve an S3 store with the bucket `spot`, and yield the environment variables for its clients."""
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"MOTO_S3_CUSTOM_ENDPOINTS": ""})
    handler = type("BoundHandler", (Handler,), {"weather": weather, "upstream": port})
    proxy = Proxy(("127.0.0.1", 0), handler)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        _create_bucket(port)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.kill()
        server.wait()
        s3fs.S3FileSystem.clear_instance_cache()  # the next store has another address


def _create_bucket(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys).create_bucket(Bucket="spot")
