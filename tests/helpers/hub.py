"""A small Hugging Face hub: a local server of the part of its API that huggingface_hub uses, which
counts requests."""

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants as constants
import pytest

ROUTE = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.+))?)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
KINDS = {"models": "model", "datasets": "dataset"}


class Hub:
    """Serves repositories until it is closed.

    Attributes:
        endpoint: its address, for HF_ENDPOINT.
        gated: repositories that need a token.
        forbidden: files that even a token does not open.
        broken: files of which half is sent, as if they were whole.
        cut: files of which half is sent, then the connection ends.
        slow: seconds that each answer takes.
        private: repositories that were created as such.
        status: of every answer, if it is set.
        requests: (method, path without query) -> how often.
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], dict[str, dict[str, bytes]]] = {}
        self.refs: dict[tuple[str, str], dict[str, str]] = {}
        self.gated: set[str] = set()
        self.forbidden: set[str] = set()
        self.broken: set[str] = set()
        self.cut: set[str] = set()
        self.private: set[str] = set()
        self.slow, self.status = 0.0, 0
        self.requests: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})
        )
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def push(
        self, repo: str, files: Mapping[str, bytes], *, kind: str = "model", revision: str = "main"
    ) -> str:
        """Makes a commit of these files, and puts a branch at it. Returns the commit."""
        commit = hashlib.sha1(
            json.dumps({k: hashlib.sha1(v).hexdigest() for k, v in files.items()}).encode()
        ).hexdigest()
        self.repos.setdefault((kind, repo), {})[commit] = dict(files)
        self.refs.setdefault((kind, repo), {})[revision] = commit
        return commit

    def gets(self) -> Counter[str]:
        """How often each file was sent, by its name."""
        return Counter(
            {
                match[4]: n
                for (method, path), n in self.requests.items()
                if method == "GET" and (match := FILE.match(path))
            }
        )

    def use(self, patch: pytest.MonkeyPatch, cache: Any) -> None:
        """Makes this process, and what it forks, use this hub and an empty cache."""
        for name, value in settings(self.endpoint, cache).items():
            patch.setattr(constants, name, value)


def settings(endpoint: str, cache: Any) -> dict[str, Any]:
    """huggingface_hub's constants, which it reads from the environment when it is imported."""
    return {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """What an upload needs: a repository, then a commit of files, all of them in its body."""
        hub, body = self.hub, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        what, answer, status = self.path.split("/")[-2], {}, 200
        repo = "/".join(self.path.split("/")[3:5])
        if "Authorization" not in self.headers or hub.status:
            self._send(hub.status or 401, b'{"error": "no token"}')
            return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            status = 409 if ("model", repo) in hub.repos else 200
            if status == 200:
                hub.push(repo, {})
                hub.private |= (
                    {repo}
                    if asked.get("private") or asked.get("visibility") == "private"
                    else set()
                )
            answer = {"url": f"{hub.endpoint}/{repo}"}
        elif what == "preupload":
            given = [file["path"] for file in json.loads(body)["files"]]
            answer = {
                "files": [
                    {"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in given
                ]
            }
        elif what == "commit":
            files = dict(hub.repos["model", repo][hub.refs["model", repo]["main"]])
            for line in map(json.loads, body.splitlines()):
                about = line["value"]
                if line["key"] == "file":
                    files[about["path"]] = base64.b64decode(about["content"])
                elif line["key"] == "deletedFile":
                    del files[about["path"]]
            commit = hub.push(repo, files)
            answer = {"commitUrl": f"{hub.endpoint}/{repo}/commit/{commit}", "commitOid": commit}
        self._send(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _answer(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        path = unquote(url.path)
        with hub.lock:
            hub.requests[self.command, path] += 1
        time.sleep(hub.slow)
        if hub.status:
            self._send(hub.status, b"{}")
        elif match := FILE.fullmatch(url.path):
            self._file(
                "dataset" if match[1] else "model", match[2], unquote(match[3]), unquote(match[4])
            )
        elif match := ROUTE.fullmatch(url.path):
            self._about(
                KINDS[match[1]],
                match[2],
                unquote(match[4] or "main"),
                match[3],
                match[5],
                parse_qs(url.query),
            )
        else:
            self._send(404, b"{}")

    def _commit(self, kind: str, repo: str, revision: str) -> str:
        """The commit; "" if the answer was sent: there is none."""
        hub = self.hub
        if (kind, repo) not in hub.repos:
            # the hub doesn't tell strangers whether there is such a repository
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return ""
        commit = hub.refs[kind, repo].get(revision, revision)
        if commit not in hub.repos[kind, repo]:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return ""
        return commit

    def _about(
        self, kind: str, repo: str, revision: str, what: str, folder: str | None, query: dict
    ) -> None:
        if not (commit := self._commit(kind, repo, revision)):
            return
        files = self.hub.repos[kind, repo][commit]
        if what == "tree":
            prefix = f"{unquote(folder)}/" if folder else ""
            inside = {file: data for file, data in files.items() if file.startswith(prefix)}
            if folder and not inside:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            deep = query.get("recursive", ["false"])[0].lower() == "true"
            shown = [file for file in inside if deep or "/" not in file.removeprefix(prefix)]
            folders = {prefix + file.removeprefix(prefix).split("/")[0] for file in inside} - {
                *shown
            }
            answer: Any = [
                {"type": "file", "path": file, **self._blob(file, files[file])} for file in shown
            ]
            answer += (
                []
                if deep
                else [{"type": "directory", "path": name, "oid": "0" * 40} for name in folders]
            )
        else:
            names = [{"rfilename": file} for file in files]
            answer = {
                "id": repo,
                "sha": commit,
                "private": repo in self.hub.private,
                "tags": [],
                "downloads": 0,
                "siblings": names,
            }
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _blob(self, file: str, data: bytes) -> dict[str, Any]:
        """As git keeps it: large files by LFS."""
        about: dict[str, Any] = {
            "size": len(data),
            "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
        }
        if file.endswith((".safetensors", ".parquet")):
            about["lfs"] = {
                "size": len(data),
                "oid": hashlib.sha256(data).hexdigest(),
                "pointerSize": 130,
            }
        return about

    def _file(self, kind: str, repo: str, revision: str, file: str) -> None:
        if not (commit := self._commit(kind, repo, revision)):
            return
        files = self.hub.repos[kind, repo][commit]
        if file not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        elif file in self.hub.forbidden:
            self._send(403, b"")
        elif repo in self.hub.gated and "Authorization" not in self.headers:
            self._send(401, b"", {"X-Error-Code": "GatedRepo"})
        else:
            data, blob = files[file], self._blob(file, files[file])
            etag = blob["lfs"]["oid"] if "lfs" in blob else blob["oid"]
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if self.command == "GET" and file in self.hub.broken:
                data = data[: len(data) // 2]
            asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start, end = (
                int(asked[1]) if asked else 0,
                len(data) // 2 if file in self.hub.cut else len(data),
            )
            if asked:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._send(206 if asked else 200, data[start:end], headers, length=len(data) - start)

    def _send(
        self, status: int, data: bytes, headers: Mapping[str, str] | None = None, length: int = -1
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length < 0 else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
            self.close_connection |= length > len(data)
