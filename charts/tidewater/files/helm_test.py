"""What `helm test` does: produce to a topic of this namespace, flush it, read it back."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

BASE = f"{os.environ['WORKER_URL']}/v1/{os.environ['TOPIC']}"
TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
DEADLINE = time.monotonic() + 240


def call(method: str, path: str, body: object = None) -> dict:
    """Send a request, again and again while the topic is being made."""
    headers = {"Authorization": f"Bearer {TOKEN.read_text()}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    while True:
        request = urllib.request.Request(BASE + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except (urllib.error.URLError, OSError) as error:
            text = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
            print(f"{method} {path}: {error} {text}", flush=True)
            if time.monotonic() > DEADLINE:
                sys.exit("the topic did not get ready in time")
            time.sleep(2)


values = [f"message {number} of {time.time_ns()}" for number in range(10)]
acks = call("POST", "/messages", {"messages": [{"value": value} for value in values]})["acks"]
snapshot = call("POST", "/flush")["snapshot_id"]
offset = acks[0]["offset"]
page = call("GET", f"/messages?partition=0&offset={offset}&limit=10")
read = [message["value"] for message in page["messages"]]
if read != values:
    sys.exit(f"sent {values}, read {read}")
print(f"10 messages acknowledged, read back, and in the table since snapshot {snapshot}")
