"""From a catalog's settings in pyiceberg's terms to Spark's configuration. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from tidewater_core.errors import Invalid
from tidewater_core.settings import CatalogSettings

SQLITE_BUSY_TIMEOUT_MS: Final = 30_000
"""How long Spark waits for the worker that is writing to the catalog's file."""
EXTENSIONS: Final = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"

_S3_KEYS: Final = {
    "s3.endpoint": "s3.endpoint",
    "s3.access-key-id": "s3.access-key-id",
    "s3.secret-access-key": "s3.secret-access-key",
    "s3.session-token": "s3.session-token",
    "s3.region": "client.region",
    "s3.path-style-access": "s3.path-style-access",
    "client.region": "client.region",
}
# Credentials are AWS's own variables, which both programs read.
_GLUE_KEYS: Final = {
    "glue.endpoint": "glue.endpoint",
    "glue.id": "glue.id",
    "glue.region": "client.region",
}
_REST_KEYS: Final = frozenset(
    {"uri", "warehouse", "credential", "token", "scope", "audience", "resource"}
    | {"oauth2-server-uri"}
)
_REST_PREFIXES: Final = ("rest.", "header.")
"""How requests are signed (`rest.sigv4-enabled`), and what is sent along: spelled alike by both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkSettings:
    """How the session runs."""

    master: str = "local[*]"
    """Where tasks run: `local[N]`, or `k8s://…` from a driver pod."""
    driver_memory: str = "1g"
    """Heap of the driver, which in local mode is all there is."""
    shuffle_partitions: int = 8
    """Tasks of a shuffle; adaptive execution joins the small ones."""
    conf: Mapping[str, str] = field(default_factory=dict)
    """Further settings of Spark; they win over ours."""

    @property
    def is_local(self) -> bool:
        """Say if everything runs in the driver's process."""
        return self.master.startswith("local")


def spark_conf(spark: SparkSettings, classpath: tuple[str, ...]) -> dict[str, str]:
    """Return the configuration that the JVM starts with; it stands on its command line."""
    conf = {
        "spark.master": spark.master,
        "spark.app.name": "tidewater-pipeline",
        "spark.driver.memory": spark.driver_memory,
        "spark.sql.shuffle.partitions": str(spark.shuffle_partitions),
        # Times of the tables are UTC; a driver's local zone must not shift a literal.
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.extensions": EXTENSIONS,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if spark.is_local:
        conf |= {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            # One small JVM for minutes: start and footprint count, not peak throughput of the GC.
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -Xshare:auto",
        }
    if classpath:
        conf["spark.driver.extraClassPath"] = ":".join(classpath)
    own = {k: v for k, v in spark.conf.items() if not k.startswith("spark.sql.catalog.")}
    return conf | own


def catalog_settings_conf(catalog: CatalogSettings) -> dict[str, str]:
    """Return the configuration of a catalog, which may hold secrets."""
    prefix = f"spark.sql.catalog.{catalog.name}"
    conf = {
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        # A cached table would hide what the worker has committed since.
        f"{prefix}.cache-enabled": "false",
    }
    return conf | {f"{prefix}.{k}": v for k, v in catalog_conf(catalog.properties).items()}


def catalog_conf(properties: Mapping[str, str]) -> dict[str, str]:
    """Translate pyiceberg's catalog properties into those of Iceberg's Java library."""
    kind = properties.get("type", "") or _infer(properties.get("uri", ""))
    if kind == "sql":
        return _sql_conf(properties)
    if kind == "rest":
        conf = {
            key: value
            for key, value in properties.items()
            if key in _REST_KEYS or key.startswith(_REST_PREFIXES)
        }
        return {"type": "rest", **conf, **_s3_conf(properties)}
    if kind == "glue":
        return {
            "type": "glue",
            "warehouse": properties.get("warehouse", ""),
            **{ours: properties[key] for key, ours in _GLUE_KEYS.items() if key in properties},
            **_s3_conf(properties),
        }
    raise Invalid("UnsupportedCatalog", f"Spark cannot open a catalog of type {kind!r}")


def _infer(uri: str) -> str:
    return "rest" if uri.startswith("http") else "sql" if ":" in uri else ""


def _sql_conf(properties: Mapping[str, str]) -> dict[str, str]:
    uri = properties.get("uri", "")
    login: dict[str, str] = {}
    if uri.startswith("sqlite:///"):
        path = uri.removeprefix("sqlite:///").partition("?")[0]
        jdbc = f"jdbc:sqlite:file:{path}?busy_timeout={SQLITE_BUSY_TIMEOUT_MS}"
    elif uri.startswith("postgresql"):
        # Java's driver takes no user and password before the host.
        try:
            url = urlsplit(uri)
        except ValueError as error:  # it may hold a password: nothing of it is said
            raise Invalid("UnsupportedCatalog", f"the catalog's address is none: {error}") from None
        place = url.netloc.rpartition("@")[2]
        jdbc = f"jdbc:postgresql://{place}{url.path}{'?' if url.query else ''}{url.query}"
        if url.username is not None:
            login["jdbc.user"] = unquote(url.username)
        if url.password is not None:
            login["jdbc.password"] = unquote(url.password)
    else:
        raise Invalid("UnsupportedCatalog", f"Spark cannot open the SQL catalog {uri[:80]!r}")
    return {
        "catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
        "uri": jdbc,
        **login,
        # The layout of its tables that pyiceberg makes.
        "jdbc.schema-version": "V1",
        "warehouse": properties.get("warehouse", ""),
        **_s3_conf(properties),
    }


def _s3_conf(properties: Mapping[str, str]) -> dict[str, str]:
    conf = {_S3_KEYS[key]: value for key, value in properties.items() if key in _S3_KEYS}
    s3 = properties.get("warehouse", "").startswith("s3") or bool(conf)
    if s3:
        conf["io-impl"] = "org.apache.iceberg.aws.s3.S3FileIO"
    if "s3.endpoint" in conf:
        # Servers other than AWS's own rarely have a host name for each bucket.
        conf.setdefault("s3.path-style-access", "true")
    return conf
