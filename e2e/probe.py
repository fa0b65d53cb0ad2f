"""Runs inside the cluster: says once a second what a user of a topic meets. Standard library only.

    python -c "$(cat probe.py)" NAMESPACE TOPIC SUBSCRIPTION PARTITIONS WORKERS_MAX

Each round asks every worker for its report, sends a message to each partition through a worker
that answered, and, in turns, pulls from the subscription or leaves it alone. One line of JSON a
round goes to the standard output; `e2e/truth.py` reads them.
"""

import concurrent.futures
import http.client
import json
import sys
import time
from typing import Any

TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
TIMEOUT_S = 2.0
PULL_S = 60.0
"""Consumers come for this long and stay away for as long."""
NAMESPACE, TOPIC, SUBSCRIPTION = sys.argv[1:4]
PARTITIONS, WORKERS_MAX = (int(text) for text in sys.argv[4:6])
PATH = f"/v1/{NAMESPACE}/{TOPIC}"


def call(worker: int, method: str, path: str, body: object = None) -> tuple[int, Any]:
    """Return status and decoded body; status 0: nobody is there, -1: no answer in time."""
    host = f"tidewater-default-{worker}.tidewater-default-workers"
    connection = http.client.HTTPConnection(host, 8080, timeout=TIMEOUT_S)
    try:
        with open(TOKEN) as file:
            headers = {"Authorization": f"Bearer {file.read().strip()}"}
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {**headers, "Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    except TimeoutError:
        return -1, {}
    except (OSError, ValueError, http.client.HTTPException):
        return 0, {}
    finally:
        connection.close()


def report(worker: int) -> Any:
    """Return what a worker says of itself, as far as conditions speak of it."""
    status, said = call(worker, "GET", f"/v1/{NAMESPACE}")
    if status != 200:
        return None
    topics = {one["name"]: one["partitions"] for one in said["topics"]}
    return {
        "topics": {
            name: {part["partition"]: part.get("state", "") for part in parts}
            for name, parts in topics.items()
        },
        "subscriptions": [one["name"] for one in said["subscriptions"]],
    }


def send(partition: int, there: list[int]) -> tuple[int, str, int | None]:
    """Send a message to a partition through any worker that is there."""
    seen: tuple[int, str, int | None] = (0, "NobodyThere", None)
    for worker in there:
        body = {"messages": [{"value": f"{time.time():.3f}"}]}
        status, said = call(worker, "POST", f"{PATH}/messages?partition={partition}", body)
        if status == 200:
            return status, "", said["acks"][0]["offset"]
        seen = (status, said.get("error", {}).get("reason", ""), None)
    return seen


def pull(there: list[int]) -> bool:
    """Pull and acknowledge; tell whether it was possible."""
    path = f"{PATH}/subscriptions/{SUBSCRIPTION}"
    for worker in there:
        status, said = call(worker, "POST", f"{path}/pull", {"max": 500, "consumer": "probe"})
        if status == 200:
            ids = [message["ack_id"] for message in said["messages"]]
            if ids:
                call(worker, "POST", f"{path}/ack", {"ack_ids": ids})
            return True
    return False


def main() -> None:
    """Do rounds for ever."""
    begin = time.time()
    with concurrent.futures.ThreadPoolExecutor(PARTITIONS + WORKERS_MAX) as pool:
        while True:
            at = time.time()
            found = list(pool.map(report, range(WORKERS_MAX)))
            there = [worker for worker, said in enumerate(found) if said is not None]
            sent = list(pool.map(send, range(PARTITIONS), [there] * PARTITIONS))
            consuming = int((at - begin) / PULL_S) % 2 == 0
            line = {
                "at": at,
                "until": time.time(),
                "reports": {str(worker): found[worker] for worker in there},
                "sent": sent,
                "pulled": consuming and pull(there),
            }
            print(json.dumps(line), flush=True)
            time.sleep(max(0.0, at + 1.0 - time.time()))


if __name__ == "__main__":
    main()
