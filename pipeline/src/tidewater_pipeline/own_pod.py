"""The pod that we run in, as the API server has it: what executors are to have, too."""

import http.client
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tidewater_core.errors import Retryable

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its token and who signed the API server's certificate."""
TIMEOUT_S: Final = 10.0


def own_pod(environment: Mapping[str, str], account: Path = ACCOUNT) -> dict[str, Any]:
    """Ask for our own pod; the rights that Spark needs to make executors are enough for it."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = int(environment.get("KUBERNETES_SERVICE_PORT", "443"))
    path = f"/api/v1/namespaces/{environment['POD_NAMESPACE']}/pods/{environment['POD_NAME']}"
    try:
        token = (account / "token").read_text(encoding="utf-8").strip()
        trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=trust)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            said = text[:200].decode(errors="replace")
            raise Retryable("NoOwnPod", f"GET {path}: {answer.status} {said}")
        pod: dict[str, Any] = json.loads(text)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Retryable("NoOwnPod", f"GET {path}: {error}") from error
    return pod
