"""The script of docs/websocket.md in a real browser: `make test-browser`.

Not found by `make test`, since a browser is larger than everything else that the tests install.
"""

import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

import pytest

from tidewater_testing.parts.worker import Worker, topic_manifest

ROOT = Path(__file__).parent.parent
PAGE = """<!doctype html><script>
const say = (...words) => fetch("/said", {method: "POST", body: JSON.stringify(words)});
console.log = say; console.error = (...words) => say("error", ...words);
%s
</script>"""

pytestmark = pytest.mark.timeout(120)


def script(address: str) -> str:
    """Return the script as a reader of the page would use it, with this worker's address."""
    text = (ROOT / "docs" / "websocket.md").read_text()
    (found,) = re.findall(r"```js\n(.*?)```", text, re.DOTALL)
    return str(found).replace("localhost:8080", address).replace('"latest"', '"earliest"')


def serve(page: str, said: "Queue[list[object]]") -> ThreadingHTTPServer:
    """Serve the page, and take what its console says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def do_POST(self) -> None:
            said.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_a_page_produces_and_reads(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    assert browser is not None, "no chromium on the PATH"
    said: Queue[list[object]] = Queue()
    manifest = topic_manifest("default/quickstart", {"partitions": 1})
    with Worker(tmp_path / "worker", [manifest]) as worker:
        server = serve(PAGE % script(worker.address), said)
        shown = subprocess.Popen(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"http://127.0.0.1:{server.server_port}/",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            words = [said.get(timeout=60), said.get(timeout=60)]
        finally:
            shown.kill()
            shown.wait()
            server.shutdown()
            server.server_close()
    assert ["stored", 1, [{"partition": 0, "offset": 0, "count": 1}]] in words
    assert [0, "hello"] in words
