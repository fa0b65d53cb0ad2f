"""A small Iceberg REST catalog with OAuth2 in front of an SQL one, which misbehaves on demand."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

CREDENTIAL = "worker:secret"


class RestCatalogServer:
    """Serves a catalog over HTTP on a free port of loopback."""

    def __init__(self, catalog: SqlCatalog) -> None:
        self.catalog = catalog
        self.token_life_s: float = 3_600
        """What a token says of its own life."""
        self.tokens: dict[str, float] = {}
        """Valid tokens, and when they really end."""
        self.tokens_given = 0
        self.commit_faults: list[tuple[bool, int | str]] = []
        """For the next commits: carry it out?, then this status (or `hang`, `reset`)."""
        self.hang_s = 5.0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"rest": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.uri = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def revoke(self) -> None:
        """End all tokens, whatever they were told."""
        with self._lock:
            self.tokens.clear()

    def token(self, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        if f"{form['client_id'][0]}:{form['client_secret'][0]}" != CREDENTIAL:
            return 401, {"error": "invalid_client"}
        with self._lock:
            self.tokens_given += 1
            name = f"token-{self.tokens_given}"
            self.tokens[name] = time.monotonic() + self.token_life_s
        return 200, {
            "access_token": name,
            "token_type": "bearer",
            "expires_in": int(self.token_life_s),
        }

    def allows(self, header: str) -> bool:
        with self._lock:
            return self.tokens.get(header.removeprefix("Bearer "), 0) > time.monotonic()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        match (method, *path.strip("/").split("/")[1:]):
            case ("GET", "config"):
                return 200, {"defaults": {}, "overrides": {}}
            case ("POST", "namespaces"):
                self.catalog.create_namespace(tuple(json.loads(body)["namespace"]))
                return 200, {"namespace": json.loads(body)["namespace"]}
            case ("POST", "namespaces", namespace, "tables"):
                request = {"location": None, **json.loads(body)}
                return 200, self._create(namespace, CreateTableRequest.model_validate(request))
            case ("GET", "namespaces", namespace, "tables", name):
                return 200, _table(self.catalog.load_table((namespace, name)))
            case ("POST", "namespaces", namespace, "tables", name):
                return self._commit((namespace, name), CommitTableRequest.model_validate_json(body))
        return 404, _error("NotFoundException", path)

    def _create(self, namespace: str, request: CreateTableRequest) -> Any:
        made = self.catalog.create_table(
            (namespace, request.name),
            request.table_schema,
            partition_spec=request.partition_spec,  # type: ignore[arg-type]
            sort_order=request.write_order or UNSORTED_SORT_ORDER,
            properties=request.properties,
        )
        return _table(made)

    def _commit(self, name: tuple[str, str], request: CommitTableRequest) -> tuple[int, Any]:
        apply, then = self.commit_faults.pop(0) if self.commit_faults else (True, 200)
        answer: Any = _error("ServerError", "by script")
        if apply:
            self.catalog.commit_table(
                self.catalog.load_table(name), request.requirements, request.updates
            )
            answer = _table(self.catalog.load_table(name)) if then == 200 else answer
        if isinstance(then, str):
            if then == "hang":
                time.sleep(self.hang_s)
            return 0, None
        return then, answer


def _table(table: Table) -> dict[str, Any]:
    return {
        "metadata-location": table.metadata_location,
        "metadata": json.loads(table.metadata.model_dump_json()),
        "config": {},
    }


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "code": 0}}


_STATUS: dict[type[Exception], int] = {
    NoSuchTableError: 404,
    NoSuchNamespaceError: 404,
    TableAlreadyExistsError: 409,
    NamespaceAlreadyExistsError: 409,
    CommitFailedException: 409,
}


class _Handler(BaseHTTPRequestHandler):
    rest: RestCatalogServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if path == "/v1/oauth/tokens":
            status, answer = self.rest.token(parse_qs(body.decode()))
        elif not self.rest.allows(self.headers.get("Authorization", "")):
            status, answer = 401, _error("NotAuthorizedException", "token expired")
        else:
            try:
                status, answer = self.rest.answer(method, path, body)
            except tuple(_STATUS) as error:
                status, answer = _STATUS[type(error)], _error(type(error).__name__, str(error))
        if status == 0:
            self.close_connection = True
            return
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Say nothing: what matters is asserted."""
