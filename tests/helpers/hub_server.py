"""A Hugging Face hub on this machine that speaks the endpoints which push and pull use, git-LFS uploads included."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

TOKEN = "hf_test"


class Hub:
    """Repositories in memory: id -> path -> bytes.

    ``gated`` ids need a licence, a file whose path holds ``cut`` ends half way, every file is said
    to take ``claimed``.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.gated: set[str] = set()
        self.cut, self.claimed = "", 0
        self.commits = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args) -> None:
                pass

            def answer(self, status: int, body: bytes | dict | list = b"", **headers: str) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for key, value in headers.items():
                    self.send_header(key.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def refuse(self, repo: str) -> bool:
                if repo in hub.gated:
                    self.answer(403, {"error": "gated"}, X_Error_Code="GatedRepo")
                elif repo not in hub.repos:
                    self.answer(404, {"error": "no"}, X_Error_Code="RepoNotFound")
                return repo in hub.gated or repo not in hub.repos

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                parts = unquote(urlparse(self.path).path).strip("/").split("/")
                if parts[:2] == ["api", "models"]:
                    repo = "/".join(parts[2:4])
                    if self.refuse(repo):
                        return
                    files = hub.repos[repo]
                    if parts[4:5] == ["tree"]:
                        listed = [entry(path, data) for path, data in files.items()]
                        return self.answer(200, listed)
                    siblings = [
                        {"rfilename": path, "size": hub.claimed or len(data)}
                        for path, data in files.items()
                    ]
                    return self.answer(200, {"id": repo, "sha": hub.sha(), "siblings": siblings})
                repo, path = "/".join(parts[:2]), "/".join(parts[4:])
                if self.refuse(repo):
                    return
                data = hub.repos[repo].get(path)
                if data is None:
                    return self.answer(404, {"error": "no"}, X_Error_Code="EntryNotFound")
                tags = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": hub.sha()}
                if hub.cut and hub.cut in path and self.command == "GET":
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                    self.wfile.flush()
                    self.connection.close()
                    return
                self.answer(200, data, **tags)

            def do_PUT(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                hub.blobs[hashlib.sha256(data).hexdigest()] = data
                self.answer(200)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = unquote(urlparse(self.path).path).strip("/")
                parts = path.split("/")
                if (
                    path != "api/validate-yaml"
                    and self.headers.get("Authorization") != f"Bearer {TOKEN}"
                ):
                    return self.answer(401, {"error": "Invalid credentials"})
                if path == "api/validate-yaml":
                    return self.answer(200, {"errors": [], "warnings": []})
                if path == "api/repos/create":
                    asked = json.loads(body)
                    repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
                    hub.repos.setdefault(repo, {})
                    return self.answer(200, {"url": f"{hub.url}/{repo}", "id": repo})
                if path.endswith("info/lfs/objects/batch"):
                    objects = [
                        {**o, "actions": {"upload": {"href": f"{hub.url}/blob"}}}
                        for o in json.loads(body)["objects"]
                    ]
                    return self.answer(200, {"transfer": "basic", "objects": objects})
                repo = "/".join(parts[2:4])
                if self.refuse(repo):
                    return
                if parts[4] == "preupload":
                    names = [f["path"] for f in json.loads(body)["files"]]
                    kind = {True: "lfs", False: "regular"}
                    modes = [
                        {
                            "path": n,
                            "uploadMode": kind[n.endswith("safetensors")],
                            "shouldIgnore": False,
                        }
                        for n in names
                    ]
                    return self.answer(200, {"files": modes})
                if parts[4] == "commit":
                    files = hub.repos[repo]
                    for line in body.splitlines():
                        item = json.loads(line)
                        value = item["value"]
                        if item["key"] == "file":
                            files[value["path"]] = base64.b64decode(value["content"])
                        elif item["key"] == "lfsFile":
                            files[value["path"]] = hub.blobs[value["oid"]]
                        elif item["key"] == "deletedFile":
                            files.pop(value["path"], None)
                    hub.commits += 1
                    url = f"{hub.url}/{repo}/commit/{hub.sha()}"
                    return self.answer(
                        200, {"commitUrl": url, "commitOid": hub.sha(), "success": True}
                    )
                return self.answer(404, {"error": path})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def sha(self) -> str:
        return f"{self.commits:040x}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def entry(path: str, data: bytes) -> dict:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
