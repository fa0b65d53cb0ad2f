"""Catalog settings become Spark's; the command line becomes options."""

import argparse
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from tidewater_core.errors import (
    Corrupt,
    Invalid,
    NotFound,
    OutcomeUnknown,
    Retryable,
    TidewaterError,
)
from tidewater_core.settings import embedded
from tidewater_core.units import ByteSize
from tidewater_pipeline.cli import compact
from tidewater_pipeline.cli import options as given
from tidewater_pipeline.cli.arguments import build_parser
from tidewater_pipeline.cli.main import main
from tidewater_pipeline.cli.run import cores_of
from tidewater_pipeline.jars import ARTIFACTS, find_jars, pom_text
from tidewater_pipeline.java import choose_java, find_java, parse_version
from tidewater_pipeline.places import StoreSettings
from tidewater_pipeline.report import Outcome, Report, summary
from tidewater_pipeline.session import ConflictError, SnapshotGoneError, named_errors
from tidewater_pipeline.settings import (
    SparkSettings,
    catalog_conf,
    catalog_settings_conf,
    spark_conf,
)
from tidewater_pipeline.subscribers import Cursor

CATALOG = ["--topic", "shop/orders", "--catalog", "uri=http://c"]


def test_the_embedded_catalog_is_opened_over_jdbc(tmp_path: Path) -> None:
    conf = catalog_settings_conf(embedded(tmp_path).catalog)
    prefix = "spark.sql.catalog.tidewater"
    assert conf[f"{prefix}.uri"].startswith(f"jdbc:sqlite:file:{tmp_path}/catalog.db?")
    assert conf[f"{prefix}.jdbc.schema-version"] == "V1"
    assert conf[f"{prefix}.cache-enabled"] == "false"
    assert f"{prefix}.io-impl" not in conf


def test_what_stands_on_the_command_line_of_the_jvm_has_no_secrets() -> None:
    given_ = {"spark.sql.catalog.lake.s3.secret-access-key": "s3cret", "spark.x": "y"}
    conf = spark_conf(SparkSettings(master="local[1]", conf=given_), ("a", "b"))
    assert conf["spark.driver.extraClassPath"] == "a:b"
    assert conf["spark.x"] == "y"
    assert "s3cret" not in str(conf)


def test_rest_and_s3() -> None:
    conf = catalog_conf(
        {
            "type": "rest",
            "uri": "http://catalog:1",
            "warehouse": "s3://lake",
            "credential": "a:b",
            "s3.endpoint": "http://s3:2",
            "s3.region": "us-east-1",
            "py-io-impl": "x",
        }
    )
    assert conf == {
        "type": "rest",
        "uri": "http://catalog:1",
        "warehouse": "s3://lake",
        "credential": "a:b",
        "s3.endpoint": "http://s3:2",
        "client.region": "us-east-1",
        "s3.path-style-access": "true",
        "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
    }


def test_signed_requests_and_headers_reach_spark() -> None:
    """They were left out, and the catalog refused Spark what it gave the worker."""
    extra = {
        "rest.sigv4-enabled": "true",
        "rest.signing-name": "s3tables",
        "rest.signing-region": "eu-central-1",
        "header.x-realm": "lake",
        "audience": "catalog",
    }
    conf = catalog_conf({"type": "rest", "uri": "https://c", "py-io-impl": "x", **extra})
    assert conf == {"type": "rest", "uri": "https://c", **extra}


def test_other_catalogs() -> None:
    sql = catalog_conf({"uri": "postgresql+psycopg://h/db", "warehouse": "file:/w"})
    assert sql["uri"] == "jdbc:postgresql://h/db"
    assert "jdbc.user" not in sql
    uri = "postgresql+psycopg2://tide:p%40ss%2F@h:5433/db?sslmode=require"
    sql = catalog_conf({"uri": uri, "warehouse": "file:/w"})
    assert sql["uri"] == "jdbc:postgresql://h:5433/db?sslmode=require"
    assert (sql["jdbc.user"], sql["jdbc.password"]) == ("tide", "p@ss/")
    glue = catalog_conf({"type": "glue", "warehouse": "s3://lake", "glue.region": "eu-west-1"})
    assert (glue["type"], glue["client.region"]) == ("glue", "eu-west-1")
    with pytest.raises(Invalid, match="in-memory"):
        catalog_conf({"type": "in-memory"})
    with pytest.raises(Invalid, match="UnsupportedCatalog") as caught:
        catalog_conf({"uri": "postgresql://tide:secret@[h/db"})
    assert "secret" not in str(caught.value)


def test_what_is_given_wins() -> None:
    spark = SparkSettings(master="k8s://x", conf={"spark.ui.enabled": "true"})
    conf = spark_conf(spark, ())
    assert conf["spark.ui.enabled"] == "true"
    assert "spark.driver.host" not in conf


def test_arguments(tmp_path: Path) -> None:
    parser = build_parser()
    args = parser.parse_args(
        ["compact,expire", "--topic", "a/b", "--catalog", "uri=http://c", "--target-size", "8Mi"]
    )
    assert given.parse_jobs(args.jobs) == ["compact", "expire"]
    assert given.compact_options(args).target == ByteSize("8Mi")
    assert given.places(args, {}).catalog.properties == {"uri": "http://c"}
    assert given.parse_cursor("billing:2=77") == Cursor("billing", 2, 77)
    args.settings = tmp_path / "settings.json"
    args.settings.write_text(embedded(tmp_path).to_json())
    assert given.places(args, {}).catalog.properties["type"] == "sql"
    args.settings.write_bytes(b"\xd0")
    with pytest.raises(Invalid, match="InvalidSettings"):
        given.places(args, {})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dance", "--topic", "a/b"], "no job 'dance'"),
        (["audit", "--topic", "a/b"], "name the catalog"),
        (["audit", "--topic", "a", "--catalog", "uri=http://c"], "namespace/name"),
        (["audit", "--topic", "a/b", "--catalog", "x"], "KEY=VALUE"),
        (["audit", "--topic", "a/b", "--data", "nowhere"], "no catalog.db"),
        (["retention", "--topic", "a/b", "--data", "nowhere"], "--keep"),
        (["maintain", "--topic", "a/b", "--data", "nowhere", "--settle", "0s"], "--settle"),
        (["import", "--topic", "a/b", "--data", "nowhere", "--batch", "0"], "--batch 0"),
        (["replay", "--topic", "a/b", "--data", "nowhere", "--batch", "-3"], "--batch -3"),
        (["audit", "--topic", "a/b", "--data", "nowhere", "--executors", "-1"], "--executors -1"),
        (["import", *CATALOG, "--from", "x", "--id", "größe"], "--id 'größe' must be"),
        (["replay", *CATALOG, "--to", "x/y", "--id", ""], "--id '' must be"),
        (["audit", *CATALOG, "--memory", "1.5Gi"], "--memory: '1.5Gi' is not a size"),
        (["audit", *CATALOG, "--report", "nowhere/x.json"], "nowhere/x.json cannot be written"),
        (["audit", *CATALOG, "--report", "."], "--report . cannot be written"),
        (["retention", *CATALOG, "--keep", "1d", "--cursor", "s:0=²"], "--cursor"),
    ],
)
def test_wrong_usage_is_said_before_spark_starts(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["retention", "--keep", "1h"],
        ["expire"],
        ["compact,expire"],
        ["maintain", "--keep", "1h", "--skip", "expire"],
        ["maintain"],
    ],
)
def test_nothing_that_readers_need_goes_without_a_store(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a store no subscription was known, and rows that one had not read were removed."""
    assert main([*words, *CATALOG]) == 2
    assert "NoStore" in capsys.readouterr().err
    args = build_parser().parse_args([*words, *CATALOG])
    given.check_store(words[0].split(","), args, StoreSettings(place="x"))
    args.force = True
    given.check_store(words[0].split(","), args, None)


def test_each_option_says_what_it_is_and_what_it_is_without() -> None:
    own = argparse.ArgumentParser()
    compact.add_arguments(own)
    for parser in (build_parser(), own):
        for action in parser._actions:
            if action.option_strings and action.option_strings[0] != "-h" and not action.required:
                assert "(default: " in str(action.help), action.option_strings
    text = " ".join(own.format_help().split())
    assert "a bare name means default/NAME" in text
    assert "(default: ./data)" in text


def test_what_asks_nobody_needs_no_store() -> None:
    def check(*words: str) -> None:
        args = build_parser().parse_args([*words, *CATALOG])
        given.check_store([words[0]], args, None)

    check("compact")
    check("maintain", "--skip", "expire")
    check("maintain", "--keep", "1h", "--skip", "retention", "--skip", "expire")
    check("retention", "--keep", "1h", "--cursor", "billing:0=7")


def test_cursors_are_checked() -> None:
    with pytest.raises(Invalid, match="SUBSCRIPTION"):
        given.parse_cursor("billing=3")


def test_java_versions() -> None:
    assert parse_version('openjdk version "17.0.15" 2025-04-15') == 17
    assert parse_version('java version "1.8.0_292"') == 1
    assert parse_version("?") is None


def test_java_is_found() -> None:
    assert find_java({}) == "java"


def test_an_old_java_home_does_not_stand_before_the_java_that_was_chosen(tmp_path: Path) -> None:
    """Spark's scripts take JAVA_HOME before the PATH: Java 11 started, and failed."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    for version, left in (("11.0.2", None), ("21.0.1", str(tmp_path))):
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        java.chmod(0o755)
        environment = {"JAVA_HOME": str(tmp_path)}
        choose_java(environment)
        assert environment.get("JAVA_HOME") == left


def test_jars_of_an_image_are_used(tmp_path: Path) -> None:
    for artifact in ARTIFACTS[:3]:
        (tmp_path / artifact.file).touch()
    assert find_jars(tmp_path, tmp_path, lambda _text: None).classpath == ()
    assert all(artifact.name in pom_text() for artifact in ARTIFACTS)


def test_the_report_says_if_all_is_good() -> None:
    good = Report("audit", "a/b", seconds=1.0)
    assert '"ok": true' in summary([good], 2.0, 2)
    assert '"core_seconds": 6.0' in summary([good], 2.0, 2)
    bad = Report("audit", "a/b", outcome=Outcome.FOUND, details={"missing": 3})
    assert '"ok": false' in summary([good, bad], 2.0, 2)


def test_cores() -> None:
    assert cores_of("local[3]") == 3
    assert cores_of("k8s://x") == 1
    assert cores_of("local[*]", executors=3, executor_cores=2) == 7
    assert cores_of("local[*]") >= 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[TABLE_OR_VIEW_NOT_FOUND] The table", NotFound),
        ("org.apache.iceberg.exceptions.CommitFailedException: no", ConflictError),
        ("exceptions.ValidationException: Found conflicting files that can", ConflictError),
        ("exceptions.ValidationException: Missing required files to delete: a", ConflictError),
        (
            "exceptions.ValidationException: Deleted manifest s3://a/m1.avro could not be found in "
            "the latest snapshot 4364",
            ConflictError,
        ),
        (
            "exceptions.ValidationException: Cannot determine history between starting",
            ConflictError,
        ),
        ("exceptions.ValidationException: Cannot find field 'x' in struct", Invalid),
        ("[MALFORMED_RECORD_IN_PARSING.WITHOUT_SUGGESTION] Malformed", Invalid),
        ("raise\ntidewater_core.errors.Forbidden: Forbidden: produce on a/b", Invalid),
        ("raise\ntidewater_core.errors.Retryable: WorkerUnreachable: away", Retryable),
        (
            "raise\njava.lang.IllegalArgumentException: Cannot find snapshot with ID 7",
            SnapshotGoneError,
        ),
        ("org.apache.hadoop.fs.ChecksumException: Checksum error: file:/x at 0", Corrupt),
        ("RuntimeException: file:/x is not a Parquet file. Expected magic number", Corrupt),
        ('fs.UnsupportedFileSystemException: No FileSystem for scheme "s3"', Invalid),
        ("ClassNotFoundException: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found", Invalid),
        ("java.io.IOException: No space left on device", Retryable),
        ("CommitStateUnknownException: caused by CommitFailedException", OutcomeUnknown),
        ("anything else\n\tat org.apache.spark.Where", Retryable),
    ],
)
def test_errors_of_spark_say_what_to_do(text: str, kind: type[TidewaterError]) -> None:
    with pytest.raises(kind) as caught, named_errors("doing"):
        raise PySparkException(text)
    assert type(caught.value) is kind
    assert "\tat" not in caught.value.message
