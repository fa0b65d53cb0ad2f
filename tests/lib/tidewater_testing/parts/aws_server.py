"""moto's Glue and S3 on a port, with Glue's optimistic lock: `python aws_server.py PORT`.

It is not AWS. moto keeps the Glue tables and their versions, but takes an UpdateTable whose
`VersionId` has passed. Here that is refused with ConcurrentModificationException, as AWS documents
it. An UpdateTable without a `VersionId` goes through, as at AWS: a client that forgets it
overwrites what others did, and a test can see that.
"""

import sys
import threading
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.glue.responses import GlueResponse
from moto.server import main

_one_at_a_time = threading.Lock()
_update = GlueResponse.update_table


def update_table(response: GlueResponse) -> Any:
    """Update a table unless its version is another than the caller has seen."""
    database = response.parameters["DatabaseName"]
    name = response.parameters["TableInput"]["Name"]
    seen = response.parameters.get("VersionId")
    with _one_at_a_time:
        found = response.glue_backend.get_table(database, name).as_dict()["VersionId"]
        if seen not in (None, found):
            reason = "ConcurrentModificationException"
            raise JsonRESTError(reason, f"the table is at version {found}, not {seen}")
        return _update(response)


if __name__ == "__main__":
    GlueResponse.update_table = update_table  # type: ignore[assignment,method-assign]
    main(["-H", "127.0.0.1", "-p", sys.argv[1]])
