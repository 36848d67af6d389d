"""A stand-in of the Hugging Face Hub on this machine, for uploads: as much of it as they need."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"


class Hub:
    """Serves until `close`. `files`: repository -> path -> content, as committed.

    Large files go by LFS as on the Hub: their bytes come first, checked against their SHA-256, and
    the commit only names them. `answers` maps a piece of a path to a status to refuse it with.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.large: dict[str, bytes] = {}  # LFS objects by their SHA-256
        self.answers: dict[str, int] = {}
        self.asked: list[str] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        path = self.path.partition("?")[0]
        self.hub.asked.append(f"{self.command} {path}")
        refusal = next((s for piece, s in self.hub.answers.items() if piece in path), None)
        if refusal is not None:
            return self._send(refusal, {"error": "refused by the stand-in"})
        # The bytes of a large file go to a signed address, without the token.
        if "/lfs/" not in path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid credentials in Authorization header"})
        self._send(*self._answer(path, body))

    do_GET = do_POST = do_PUT = _serve

    def _answer(self, path: str, body: bytes) -> tuple[int, Any]:
        hub, parts = self.hub, path.strip("/").split("/")
        repo = "/".join(parts[2:4])
        if path == "/api/whoami-v2":
            return 200, {"name": "somebody", "type": "user"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            known = repo in hub.files
            if not known:
                hub.files[repo], hub.private[repo] = {}, asked["visibility"] == "private"
            return 409 if known else 200, {"url": f"{hub.address}/{repo}", "name": repo}
        if path.startswith("/lfs/"):
            content = hashlib.sha256(body).hexdigest()
            hub.large[parts[-1]] = body
            return (200, {}) if content == parts[-1] else (400, {"error": "another content"})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for item in objects:
                item["actions"] = {"upload": {"href": f"{hub.address}/lfs/{item['oid']}"}}
            return 200, {"transfer": "basic", "objects": objects}
        if "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": _mode(file["path"]), "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if "/tree/" in path:
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in hub.files[repo].items()
            ]
            return 200, listed
        if "/commit/" in path:
            for line in body.splitlines():
                self._commit(hub.files[repo], **json.loads(line))
            return 200, {"commitUrl": f"{hub.address}/{repo}/commit/1", "commitOid": "1" * 40}
        return 404, {"error": f"the stand-in does not know {self.command} {path}"}

    def _commit(self, files: dict[str, bytes], key: str, value: dict[str, Any]) -> None:
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            files[value["path"]] = self.hub.large[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
        else:
            assert key == "header", key

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _send(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"
