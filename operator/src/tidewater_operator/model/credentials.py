"""Which Secret a namespace's copies of the credentials are made from. Pure.

Whoever may read Secrets in a namespace has what is copied there: a namespace that is to have
credentials of its own never gets the shared ones, also while its own are not there.
"""

from tidewater_operator.model.names import CATALOG_SECRET, ETCD_SECRET
from tidewater_operator.settings import OperatorSettings


def sources(settings: OperatorSettings, namespace: str, home: str) -> dict[str, str]:
    """Return the Secrets to copy to a namespace: name there → name in the operator's own, `home`.

    A Secret of `home` that has the name of its copy already is nobody's copy there.
    """
    tenants = settings.tenants
    return {
        target: f"{source}.{namespace}" if namespace in separate else source
        for target, source, separate in (
            (CATALOG_SECRET, settings.catalog_secret, tenants.separate_catalog),
            (ETCD_SECRET, settings.etcd.secret, tenants.separate_etcd),
        )
        if source and (namespace, target) != (home, source)
    }
