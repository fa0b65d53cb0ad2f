"""Which image a Pool may run. Pure.

A worker has the catalog's credentials and is sent the tokens of those who use it: who may choose
its program may read all messages of the namespace, whatever RBAC says.
"""

from tidewater_core.crd.pool import PoolSpec
from tidewater_operator.settings import OperatorSettings


def image_problem(spec: PoolSpec, settings: OperatorSettings) -> str:
    """Say why a pool may not run its image; empty if it may, as with one that it does not name."""
    image, ours = spec.image, [settings.worker_image, settings.pool_defaults.image]
    if image is None or image in ours:
        return ""
    allowed = settings.pools.allowed_images or sorted({repository(one) for one in ours if one})
    for entry in allowed:
        if entry in ("*", image, repository(image)):
            return ""
        if entry.endswith("/") and image.startswith(entry):
            return ""
    return f"image {image} is none of those that the operator allows: {', '.join(allowed)}"


def repository(image: str) -> str:
    """Return an image's name without tag and digest; a colon before the last `/` is a port's."""
    folder, slash, last = image.partition("@")[0].rpartition("/")
    return f"{folder}{slash}{last.partition(':')[0]}"
