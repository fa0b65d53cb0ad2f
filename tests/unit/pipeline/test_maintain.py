"""maintain without Spark: what each step is told, the message left behind, the exit code."""

import json
import ssl
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.errors import Corrupt, Invalid, NotFound, OutcomeUnknown, Retryable
from tidewater_core.names import HOLD, ORPHANS_AT, TopicName
from tidewater_core.units import ByteSize, Duration
from tidewater_pipeline.cli import maintain
from tidewater_pipeline.cli import options as given
from tidewater_pipeline.cli.arguments import build_parser
from tidewater_pipeline.cli.main import exit_code as run_exit_code
from tidewater_pipeline.cli.main import main
from tidewater_pipeline.cli.run import failure
from tidewater_pipeline.executors import ExecutorOptions, executor_conf, pod_template, spark_memory
from tidewater_pipeline.own_pod import own_pod
from tidewater_pipeline.places import read_places
from tidewater_pipeline.report import Outcome, Report
from tidewater_pipeline.session import ConflictError, Session
from tidewater_pipeline.state import Size
from tidewater_pipeline.subscribers import Cursor, Subscribers
from tidewater_pipeline.termination import BYTES_MAX, RunResult, TopicResult
from tidewater_pipeline.upkeep import (
    UpkeepOptions,
    Verdict,
    orphans_due,
    plan_upkeep,
    verdict,
)
from tidewater_testing.parts.certificates import Authority

POD = {"POD_NAME": "p", "POD_NAMESPACE": "shop", "POD_IP": "10.0.0.1", "PIPELINE_IMAGE": "i:1"}
GOOD = Verdict(Outcome.DONE, False, "")


def spec(text: Mapping[str, Any]) -> TopicSpec:
    return TopicSpec.model_validate(text)


def test_the_topic_says_what_is_done() -> None:
    cursors = (Cursor("shop/billing", 0, 3),)
    topic = spec(
        {
            "retention": {"time": "30d", "force": True},
            "maintenance": {"targetFileSize": "64Mi", "snapshotAge": "2h"},
        }
    )
    plan = plan_upkeep(UpkeepOptions(), Subscribers(topic, cursors))
    assert plan.retention is not None
    assert (plan.retention.keep, plan.retention.force) == (Duration("30d"), True)
    assert plan.retention.cursors == plan.expire.cursors == cursors
    assert plan.compact.target == ByteSize("64Mi")
    assert plan.expire.older_than == Duration("2h")
    assert plan.orphans.delete


def test_options_win_and_a_topic_without_retention_keeps_everything() -> None:
    assert plan_upkeep(UpkeepOptions(), Subscribers(spec({}))).retention is None
    chosen = UpkeepOptions(keep=Duration("1d"), target=ByteSize("8Mi"), older_than=Duration("5m"))
    plan = plan_upkeep(chosen, Subscribers(spec({"retention": {"time": "30d", "force": True}})))
    assert plan.retention is not None
    assert plan.retention.keep == Duration("1d")
    assert plan.compact.target == ByteSize("8Mi")
    assert plan.expire.older_than == Duration("5m")


def test_without_a_registered_topic_the_table_says_its_target() -> None:
    assert plan_upkeep(UpkeepOptions(), Subscribers()).compact.target is None


def test_orphans_are_looked_for_now_and_then() -> None:
    every = Duration("6h")
    assert orphans_due({}, every, 10)
    assert orphans_due({ORPHANS_AT: "nonsense"}, every, 10)
    assert not orphans_due({ORPHANS_AT: "10"}, every, 10 + every.ms - 1)
    assert orphans_due({ORPHANS_AT: "10"}, every, 10 + every.ms)


@pytest.mark.parametrize(
    ("outcomes", "whole"),
    [
        ((), Outcome.NOTHING),
        ((Outcome.NOTHING, Outcome.DONE), Outcome.DONE),
        ((Outcome.DONE, Outcome.CONFLICT), Outcome.CONFLICT),
        ((Outcome.REFUSED, Outcome.CONFLICT, Outcome.DONE), Outcome.REFUSED),
        ((Outcome.DONE, Outcome.REFUSED, Outcome.FAILED), Outcome.FAILED),
    ],
)
def test_the_verdict_is_the_worst_step(outcomes: tuple[Outcome, ...], whole: Outcome) -> None:
    assert verdict([Report("x", "a/b", outcome=each) for each in outcomes]).outcome is whole


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (Retryable("SparkGone", "the JVM is gone"), Outcome.FAILED, 1),
        (OutcomeUnknown("CommitOutcomeUnknown", "no answer"), Outcome.FAILED, 1),
        (ConflictError("CommitConflict", "the writer was faster"), Outcome.CONFLICT, 0),
        (NotFound("TableMissing", "no table"), Outcome.FAILED, 3),
        (Invalid("OutOfMemory", "heap space"), Outcome.FAILED, 3),
        (Corrupt("FrontierDamaged", "nonsense"), Outcome.FAILED, 3),
    ],
)
def test_the_exit_code_says_whether_a_retry_makes_sense(
    error: Retryable, outcome: Outcome, code: int
) -> None:
    report = failure("compact", "a/b", error)
    assert report.outcome is outcome
    done = RunResult(topics=(TopicResult(topic="a/b", verdict=verdict([report])),))
    assert maintain.exit_code(done) == code


@pytest.mark.parametrize("job", ["import", "replay", "audit", "maintain"])
def test_what_was_not_done_is_no_success(job: str) -> None:
    """An import that lost a race for its record ended with exit code 0: nobody ran it again."""
    report = failure(job, "a/b", ConflictError("CommitConflict", "another was faster"))
    assert (report.outcome, report.retry) == (Outcome.FAILED, True)
    assert run_exit_code([report]) == 1


def test_refusing_to_pass_a_cursor_is_no_failure() -> None:
    report = Report("retention", "a/b", outcome=Outcome.REFUSED, message="billing lies behind")
    done = RunResult(topics=(TopicResult(topic="a/b", verdict=verdict([report])),))
    assert maintain.exit_code(done) == 0
    assert json.loads(done.message())["topics"][0]["message"] == "retention: billing lies behind"


def test_one_failure_for_good_among_transient_ones_is_for_good() -> None:
    parts = [Verdict(Outcome.FAILED, True, ""), Verdict(Outcome.FAILED, False, ""), GOOD]
    done = RunResult(topics=tuple(TopicResult(topic="a/b", verdict=each) for each in parts))
    assert (done.ok, done.retry, maintain.exit_code(done)) == (False, False, 3)


@pytest.mark.parametrize("is_partial", [True, False])
def test_steps_go_on_after_a_part_that_failed(
    monkeypatch: pytest.MonkeyPatch, is_partial: bool
) -> None:
    """One damaged file must not keep snapshots from expiring."""
    broken = Report("compact", "a/b", outcome=Outcome.FAILED, is_partial=is_partial)
    fine: dict[str, Any] = dict.fromkeys(maintain.RUNNERS, lambda *_: Report("x", "a/b"))
    monkeypatch.setattr(maintain, "RUNNERS", {**fine, "compact": lambda *_: broken})
    monkeypatch.setattr(maintain, "upkeep_options", lambda _args: UpkeepOptions())
    state = SimpleNamespace(size=Size(), properties={HOLD: "of a job that died"})
    gone: list[str] = []
    table = SimpleNamespace(
        load=lambda: state,
        topic="a/b",
        set_properties=lambda _properties, removed=(): gone.extend(removed),
    )
    session = SimpleNamespace(
        progress=SimpleNamespace(say=lambda _text: None), clock=SimpleNamespace(now_us=lambda: 0)
    )
    run: Any = SimpleNamespace(
        session=session, args=None, subscribers=lambda _: Subscribers(), table=lambda *_: table
    )
    steps: list[Report] = []
    maintain._all_steps(run, TopicName("a", "b"), steps, [])
    assert len(steps) == (5 if is_partial else 2)
    assert gone == [HOLD]
    assert verdict(steps).outcome is Outcome.FAILED


def test_the_message_says_what_was_done() -> None:
    ranges = [{"rewritten_files": 40, "added_files": 1}, {"rewritten_files": 2, "added_files": 1}]
    steps = [
        Report("compact", "a/b", seconds=2.04, details={"ranges": ranges}),
        Report("expire", "a/b", details={"expired_snapshots": 7}),
        Report("orphans", "a/b", outcome=Outcome.NOTHING, message="looked before"),
    ]
    sizes = Size(files=50), Size(files=10, nbytes=9)
    topic = TopicResult(
        topic="a/b", verdict=GOOD, steps=steps, before=sizes[0], after=sizes[1], seconds=3.21
    )
    message = json.loads(RunResult(topics=(topic,), seconds=20, core_seconds=40).message())
    assert message["version"] == 1
    assert (message["ok"], message["retry"], message["core_seconds"]) == (True, False, 40)
    (one,) = message["topics"]
    assert (one["before"]["files"], one["after"]["files"], one["after"]["bytes"]) == (50, 10, 9)
    assert one["removed"] == {
        "rewritten_files": 42,
        "added_files": 2,
        "expired_snapshots": 7,
        "orphans": 0,
        "retired_files": 0,
    }
    assert one["steps"][0] == {"job": "compact", "outcome": "done", "seconds": 2.0}
    assert one["steps"][2]["message"] == "looked before"


@pytest.mark.parametrize("topics", [1, 5, 40])
def test_the_message_fits(topics: int) -> None:
    """However much there is to say, it is whole JSON of at most 4 KiB."""
    steps = [Report(job, "a/b", message="ü" * 900) for job in maintain.RUNNERS]
    size = Size(10**9, 10**15, 10**12, 10**4, 10**4)
    one = TopicResult(
        topic="n" * 63 + "/" + "t" * 63,
        verdict=Verdict(Outcome.FAILED, True, "ä" * 2000),
        steps=steps,
        before=size,
        after=size,
    )
    text = RunResult(
        topics=(one,) * topics, error=Verdict(Outcome.FAILED, True, "ö" * 999)
    ).message()
    assert len(text.encode()) <= BYTES_MAX
    assert len(json.loads(text)["topics"]) >= 1


def test_the_report_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 30 topics 17 were left out, as what Kubernetes keeps of a container has 4 KiB."""
    steps = [Report(job, "a/b", message="ü" * 900) for job in maintain.RUNNERS]
    names = [f"shop/t{number}" for number in range(30)]
    done = [TopicResult(topic=name, verdict=GOOD, steps=steps) for name in names]
    monkeypatch.setattr(maintain, "_topics", lambda _run: done)
    left, report = tmp_path / "termination-log", tmp_path / "report.json"
    words = ["maintain", "--topic=a/b", "--catalog=uri=x", f"--termination-log={left}"]
    session: Any = nullcontext()
    assert maintain.execute(session, None, build_parser().parse_args(words)) == 0
    more = [*words, f"--report={report}"]
    assert maintain.execute(session, None, build_parser().parse_args(more)) == 0
    assert len(left.read_bytes()) <= BYTES_MAX
    assert json.loads(left.read_text())["left_out"] > 0
    for text in (capsys.readouterr().out, report.read_text()):
        topics = json.loads(text)["topics"]
        assert [each["topic"] for each in topics] == names
        assert all(len(each["steps"]) == 5 for each in topics)
        assert topics[0]["steps"][0]["message"] == "ü" * 900


def test_settings_with_variables() -> None:
    text = json.dumps(
        {
            "worker_id": "${POD_NAME}",
            "of_a_later_version": {"x": 1},
            "catalog": {"properties": {"uri": "http://c", "credential": "${ID}:${SECRET}"}},
            "coordination": "http://etcd:2379",
            "coordination_prefix": "tidewater/shop",
            "coordination_tls": {"ca": "/etc/ca"},
            "coordination_password": "${SECRET}",
        }
    )
    places = read_places(text, {"ID": "me", "SECRET": 'pa"ss'})
    assert places.catalog.properties["credential"] == 'me:pa"ss'
    assert places.store is not None
    assert (places.store.prefix, places.store.password) == ("tidewater/shop", 'pa"ss')
    assert places.store.tls is not None
    assert places.store.tls.ca == "/etc/ca"
    assert 'pa"ss' not in repr(places.store)
    with pytest.raises(Invalid, match="variable SECRET"):
        read_places(text, {"ID": "me"})
    for bad in ("{}", "[]", "x", '{"catalog": 7}'):
        with pytest.raises(Invalid, match="InvalidSettings"):
            read_places(bad, {})


def test_executors_need_a_pod_and_get_restricted_ones() -> None:
    chosen = ExecutorOptions(count=3, cores=2, memory=ByteSize("2Gi"))
    conf = executor_conf(chosen, POD, "/tmp/template")
    assert conf["spark.driver.host"] == "10.0.0.1"
    assert conf["spark.dynamicAllocation.maxExecutors"] == "3"
    assert conf["spark.executor.memory"] == "2048m"
    assert conf["spark.kubernetes.driver.pod.name"] == "p"
    with pytest.raises(Invalid, match="POD_IP"):
        executor_conf(chosen, {**POD, "POD_IP": ""}, "")
    pod = json.loads(pod_template())["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    assert spark_memory(ByteSize("1536Mi")) == "1536m"


OWN: dict[str, Any] = {
    "spec": {
        "serviceAccountName": "tidewater-pipeline",
        "imagePullSecrets": [{"name": "pull"}],
        "nodeSelector": {"disk": "fast"},
        "containers": [
            {"name": "sidecar", "envFrom": [{"secretRef": {"name": "other"}}]},
            {
                "name": "driver",
                "imagePullPolicy": "Always",
                "envFrom": [{"secretRef": {"name": "catalog"}}],
                "env": [
                    {"name": "POD_NAME", "value": "p"},
                    {"name": "AWS_REGION", "value": "eu"},
                    {"name": "ETCD_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "e"}}},
                ],
            },
        ],
    }
}


def test_executors_have_what_the_driver_has() -> None:
    """They could not be pulled from a private registry, and had no credentials for the storage."""
    conf = executor_conf(ExecutorOptions(count=1), POD, "/t", OWN)
    prefix = "spark.kubernetes"
    assert conf[f"{prefix}.authenticate.executor.serviceAccountName"] == "tidewater-pipeline"
    assert conf[f"{prefix}.container.image.pullPolicy"] == "Always"
    assert conf["spark.authenticate"] == "true"
    assert not any("secret" in key for key in conf), "Spark draws it: it is on no command line"
    spec = json.loads(pod_template(OWN))["spec"]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert spec["nodeSelector"] == {"disk": "fast"}
    assert spec["automountServiceAccountToken"] is False
    (container,) = spec["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "catalog"}}]
    assert container["env"] == [{"name": "AWS_REGION", "value": "eu"}]


def test_the_driver_looks_at_its_own_pod(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("api")
    (tmp_path / "token").write_text("mine\n")
    (tmp_path / "ca.crt").write_bytes(authority.ca.read_bytes())
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(200 if self.path.endswith("/p") else 403)
            self.end_headers()
            self.wfile.write(json.dumps(OWN).encode())

        def log_message(self, *_words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.cert, pair.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {
            **POD,
            "KUBERNETES_SERVICE_HOST": "localhost",
            "KUBERNETES_SERVICE_PORT": str(server.server_port),
        }
        assert own_pod(where, tmp_path) == OWN
        with pytest.raises(Retryable, match="403"):
            own_pod({**where, "POD_NAME": "other"}, tmp_path)
        server.shutdown()
    assert asked[0] == (f"/api/v1/namespaces/{POD['POD_NAMESPACE']}/pods/p", "Bearer mine")
    with pytest.raises(Retryable, match="NoOwnPod"):
        own_pod(where, tmp_path / "nowhere")


def test_arguments_of_the_operator() -> None:
    words = ["maintain", "--topic", "shop/orders", "--settings", "x", "--memory", "2Gi"]
    args = build_parser().parse_args([*words, "--executors", "2", "--conf", "spark.a=b"])
    spark = given.spark_settings(args, POD, "/t")
    assert (spark.master, spark.driver_memory) == ("k8s://https://kubernetes.default.svc", "2048m")
    assert spark.conf["spark.a"] == "b"
    local = given.spark_settings(build_parser().parse_args(words), {}, "")
    assert (local.master, dict(local.conf)) == ("local[*]", {})
    with pytest.raises(Invalid, match="alone"):
        given.parse_jobs("maintain,audit")


def test_wrong_usage_leaves_a_message_too(tmp_path: Path) -> None:
    left = tmp_path / "termination-log"
    settings = tmp_path / "settings.json"
    settings.write_text('{"catalog": {"properties": {"uri": "${NOT_THERE_AT_ALL}"}}}')
    words = ["maintain", "--topic", "a/b", f"--settings={settings}", f"--termination-log={left}"]
    assert main([*words[:3], "--settings=nowhere", words[4]]) == 2
    assert "nowhere" in json.loads(left.read_text())["message"]
    assert main(words) == 2
    message = json.loads(left.read_text())
    assert (message["ok"], message["retry"]) == (False, False)
    assert "NOT_THERE_AT_ALL" in message["message"]


def test_whatever_goes_wrong_a_message_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "termination-log"
    words = ["maintain", "--topic", "a/b", "--catalog=uri=http://c", f"--termination-log={left}"]
    words += ["--skip", "expire"]

    def broken(_session: Session) -> Session:
        raise ZeroDivisionError

    monkeypatch.setattr(Session, "start", broken)
    with pytest.raises(ZeroDivisionError):
        main(words)
    message = json.loads(left.read_text())
    assert (message["ok"], message["retry"]) == (False, True)
    assert "ZeroDivisionError" in message["message"]
