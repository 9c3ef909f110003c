"""A real etcd of one member: TLS with client certificates, a user with a role on one prefix, loopback only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from farfill.registry.etcd import EtcdStore
from farfill.registry.etcd_calls import EtcdCalls
from farfill.transport.tls import client_context
from support.pki import Pki, make_pki

USER, PASSWORD, PREFIX = "farfill", "correct horse", "/farfill/"
START_S = 20.0


class EtcdServer:
    """Start, kill and start again on the same ports and files."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("etcd")
        if binary is None:
            pytest.skip("needs etcd (apt-get install etcd-server)")
        self._binary = binary
        self._folder = folder
        self.pki: Pki = make_pki(folder / "pki")
        self.client = self.pki.without_common_name("client")
        self._port, self._peer_port = _free_ports(2)
        self.url = f"https://localhost:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        server = self.pki.name("etcd")
        peer = f"http://127.0.0.1:{self._peer_port}"
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._binary,
                    f"--data-dir={self._folder / 'data'}",
                    f"--listen-client-urls={self.url.replace('localhost', '127.0.0.1')}",
                    f"--advertise-client-urls={self.url}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=default={peer}",
                    f"--cert-file={server.cert}",
                    f"--key-file={server.key}",
                    f"--trusted-ca-file={server.ca}",
                    "--client-cert-auth",
                    "--bcrypt-cost=4",
                    "--heartbeat-interval=20",
                    "--election-timeout=200",
                    "--unsafe-no-fsync" if self._newer() else "--logger=zap",
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not self._healthy():
            assert self._process.poll() is None, (self._folder / "etcd.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "etcd does not answer"
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It hangs: connections stay, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """After `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def context(self) -> ssl.SSLContext:
        """A client of this server."""
        return client_context(*self.client.pems, check_hostname=True)

    def enable_auth(self) -> None:
        """One user with a role on `PREFIX`; nobody else but root."""
        prefix = b64encode(PREFIX.encode()).decode()
        end = b64encode(b"/farfill0").decode()
        for path, body in (
            ("/v3/auth/user/add", {"name": "root", "password": "root"}),
            ("/v3/auth/role/add", {"name": "root"}),
            ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
            ("/v3/auth/user/add", {"name": USER, "password": PASSWORD}),
            ("/v3/auth/role/add", {"name": USER}),
            (
                "/v3/auth/role/grant",
                {"name": USER, "perm": {"permType": "READWRITE", "key": prefix, "range_end": end}},
            ),
            ("/v3/auth/user/grant", {"user": USER, "role": USER}),
            ("/v3/auth/enable", {}),
        ):
            self._post(path, body)

    def compact(self, revision: int) -> None:
        """Forget history up to `revision`, as root."""
        token = json.loads(self._post("/v3/auth/authenticate", {"name": "root", "password": "root"}))["token"]
        self._post("/v3/kv/compaction", {"revision": str(revision)}, {"Authorization": token})

    def store(self, prefix: str, password: str = PASSWORD, url: str | None = None) -> EtcdStore:
        """Not opened yet."""
        return EtcdStore(EtcdCalls((url or self.url,), self.context(), USER, password), PREFIX + prefix)

    def registry_section(self, url: str | None = None) -> dict[str, Any]:
        """The cluster file's `registry` section that uses this server, reached at `url`; writes its secrets."""
        password = self._folder / "password"
        password.touch(mode=0o600)
        password.write_text(PASSWORD)
        os.chmod(self.client.key, 0o600)
        return {
            "store": "etcd",
            "etcd": {
                "endpoints": [url or self.url],
                "ca": f"file:{self.client.ca}",
                "cert": f"file:{self.client.cert}",
                "key": f"file:{self.client.key}",
                "user": USER,
                "password": f"file:{password}",
            },
        }

    def _newer(self) -> bool:
        return b"unsafe-no-fsync" in subprocess.run([self._binary, "--help"], capture_output=True, check=False).stdout

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", context=self.context(), timeout=1) as answer:
                return json.loads(answer.read()).get("health") == "true"
        except (urllib.error.URLError, OSError):
            return False

    def _post(self, path: str, body: dict[str, object], headers: dict[str, str] | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers or {})
        with urllib.request.urlopen(request, context=self.context(), timeout=5) as answer:
            return answer.read()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
