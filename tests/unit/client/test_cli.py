import argparse
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs

import pyarrow as pa
import pytest

from scripted_http import HANG_UP, Handler, Request, Server, answer
from tidewater import wire
from tidewater.admin import Bounds
from tidewater.cli import main as cli
from tidewater.cli.consume import position, starts
from tidewater.cli.produce import Plan, line_batches
from tidewater.cli.progress import Progress
from tidewater.cli.stats import flatten
from tidewater_core.errors import Invalid

Serve = Callable[[Handler], Server]
NAME = "default/quickstart"


class Worker:
    """Answers as a worker with one topic of two partitions does."""

    def __init__(self, values: dict[int, list[str]]) -> None:
        self.values = values
        self.bodies: list[tuple[str, bytes]] = []
        self.lost = ""
        """The header of answers to reads that names lost offsets."""

    def __call__(self, request: Request) -> bytes:
        path, _, query = request.target.partition("?")
        if path == "/v1/topics":
            topics = [
                {"namespace": n, "name": "quickstart", "partitions": 2} for n in ("default", "x")
            ]
            return answer(json.dumps({"topics": topics}).encode())
        if not path.startswith(f"/v1/{NAME}"):
            body = {"error": {"reason": "UnknownTopic", "message": f"no topic {path}"}}
            return answer(json.dumps(body).encode(), 404)
        if path.endswith("/flush"):
            return answer(b'{"snapshot_id":8,"frontier":{"0":3,"1":1}}')
        if path.endswith("/stats"):
            return answer(b'{"ack_ms":{"p50":0.25,"p99":null},"ok":true,"files":[1]}')
        if path.endswith("/messages"):
            return self._messages(request, query)
        partitions = [
            {"partition": p, "start": 0, "frontier": 0, "log_start": 0, "end": len(v)}
            for p, v in self.values.items()
        ]
        return answer(json.dumps({"partitions": partitions}).encode())

    def _messages(self, request: Request, query: str) -> bytes:
        if request.method == "POST":
            kind = request.headers["content-type"]
            self.bodies.append((kind, request.body))
            count = (
                len(json.loads(request.body)["messages"])
                if kind == wire.JSON
                else request.body.count(b"\n")
            )
            acks = [{"partition": 0, "offset": 0, "count": count}]
            return answer(json.dumps({"acks": acks}).encode())
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        values = self.values[int(asked["partition"])]
        start = int(asked.get("offset", "1"))
        offsets = range(start, min(len(values), start + int(asked["limit"])))
        if request.headers["accept"] == wire.ARROW:
            columns = {
                "tw_offset": pa.array(offsets, pa.int64()),
                "value": pa.array([values[o].encode() for o in offsets], pa.binary()),
            }
            return answer(wire.arrow_body(pa.record_batch(columns)))
        lines = (
            {"partition": int(asked["partition"]), "offset": o, "value": values[o]} for o in offsets
        )
        body = "".join(json.dumps(line) + "\n" for line in lines).encode()
        return answer(body, headers=self.lost)


@pytest.fixture
def worker() -> Worker:
    return Worker({0: ["a", "b", "c"], 1: ["d"]})


@pytest.fixture
def url(serve: Serve, worker: Worker) -> str:
    return serve(worker).url


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("produce", "consume", "topics", "stats", "flush"))
    assert run() == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(cli.BUILT_IN))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(name, "--help")
    assert caught.value.code == 0
    assert "--url" in capsys.readouterr().out
    command = cli.find(name)
    assert command is not None
    assert name == command.NAME


def test_an_unknown_command_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prodcue") == 2
    assert "produce" in capsys.readouterr().err


def test_commands_of_other_packages_are_loaded_only_when_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[str] = []

    class Entry:
        value = "somewhere:else"

        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> object:
            loaded.append(self.name)
            return SimpleNamespace(
                NAME=self.name,
                HELP="h",
                add_arguments=lambda parser: parser.add_argument("--n", type=int),
                run=lambda args: args.n,
            )

    entries = {"dev": Entry("dev"), "other": Entry("other")}
    monkeypatch.setattr(cli, "_added", lambda: entries)
    assert run("--help") == 0
    assert "run a worker on this machine" in capsys.readouterr().out
    assert loaded == []
    assert run("other", "--n", "7") == 7
    assert loaded == ["other"]


def test_the_command_starts_without_the_client_or_arrow() -> None:
    code = (
        "import sys; from tidewater.cli.main import main; main(['--help']);"
        "sys.exit(any(m in sys.modules for m in ('asyncio', 'pyarrow', 'msgspec', 'ssl')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


def test_topics_stats_flush(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("topics", "--url", url, "--namespace", "x") == 0
    assert capsys.readouterr().out == "x/quickstart  2 partitions\n"
    assert run("stats", NAME, "--url", url) == 0
    assert "ack_ms.p50  0.25\n" in capsys.readouterr().out
    assert run("flush", NAME, "--url", url) == 0
    assert "snapshot 8\npartition 0: every offset below 3\n" in capsys.readouterr().out
    for command in (["topics"], ["stats", NAME], ["flush", NAME]):
        assert run(*command, "--json", "--url", url) == 0
        json.loads(capsys.readouterr().out)


def test_messages_from_the_command_line(
    url: str, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("produce", NAME, "one", "two", "--key", "k", "--header", "h=1", "--url", url) == 0
    ((kind, body),) = worker.bodies
    assert kind == wire.JSON
    assert json.loads(body)["messages"] == [
        {"value": v, "key": "k", "headers": {"h": "1"}} for v in ("one", "two")
    ]
    assert "2 messages stored" in capsys.readouterr().err


def test_lines_ndjson_and_files(url: str, worker: Worker, tmp_path: Path) -> None:
    lines, messages, raw = tmp_path / "l", tmp_path / "m", tmp_path / "r"
    lines.write_bytes(b"a:1\nb:2\nc:3")
    messages.write_bytes(b'{"value":1}\n\n{"value":2}\n')
    raw.write_bytes(b"\xff\x00\n")
    common = ("--url", url, "-q", "--file")
    assert run("produce", NAME, "--key-separator", ":", "--batch", "2", *common, str(lines)) == 0
    assert run("produce", NAME, "--format", "ndjson", *common, str(messages)) == 0
    assert run("produce", NAME, "--format", "raw", *common, str(raw)) == 0
    first, second, third, fourth = worker.bodies
    sent = json.loads(first[1])["messages"] + json.loads(second[1])["messages"]
    assert [(m["key"], m["value"]) for m in sent] == [("a", "1"), ("b", "2"), ("c", "3")]
    assert third == (wire.NDJSON, b'{"value":1}\n{"value":2}\n')
    assert json.loads(fourth[1]) == {"messages": [{"value_b64": "/wAK"}]}


def test_lines_are_handed_on_as_they_arrive() -> None:
    reading, writing = os.pipe()
    arrived: list[list[bytes]] = []
    seen = threading.Event()

    def read() -> None:
        for lines in line_batches(reading, 1000):
            arrived.append(lines)
            seen.set()

    thread = threading.Thread(target=read)
    thread.start()
    os.write(writing, b"one\ntwo\nthr")
    assert seen.wait(5), "held back although nothing more came"
    os.write(writing, b"ee\nfour")
    os.close(writing)
    thread.join(5)
    os.close(reading)
    assert arrived[0] == [b"one", b"two"]
    assert [line for lines in arrived for line in lines] == [b"one", b"two", b"three", b"four"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--file", "f"],
        ["--key", "k", "--key-separator", ":"],
        ["--format", "ndjson", "--key", "k"],
        ["--format", "ndjson", "--key-separator", ":"],
        ["--header", "novalue", "m"],
        ["--file", "/does/not/exist"],
        ["no-separator", "--key-separator", ":"],
    ],
)
def test_arguments_that_contradict_each_other(
    url: str, worker: Worker, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("produce", NAME, *arguments, "--url", url) == 1
    assert "tidewater: Bad" in capsys.readouterr().err
    assert worker.bodies == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--file", os.curdir], "tidewater: IsADirectoryError: "),
        (["caf\udce9"], "tidewater: UnicodeEncodeError: "),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(
    url: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("produce", NAME, "-q", *arguments, "--url", url) == 1
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1


def test_output_that_cannot_be_written_is_told_in_a_line(url: str) -> None:
    command = [sys.executable, "-m", "tidewater.cli.main", "consume", NAME, "-q", "--url", url]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "tidewater: OSError: [Errno 28] No space left on device\n"


def test_a_part_that_is_stored_is_not_nothing(
    url: str, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever runs it again as a whole stores the first ones twice."""
    arguments = ("k:1", "k:2", "no-separator", "--key-separator", ":", "--batch", "1", "-q")
    assert run("produce", NAME, *arguments, "--url", url) == 4
    error = capsys.readouterr().err
    assert error.startswith(
        "tidewater: PartlyStored: the first 2 messages are stored; then BadLine"
    )
    assert len(worker.bodies) == 2


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "1e999", "1e10"])
def test_a_timeout_is_a_time(url: str, seconds: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run("topics", "--url", url, "--timeout", seconds)
    assert caught.value.code == 2


def consumed(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> bytes:
    assert run("consume", NAME, "-q", *arguments) == 0
    return capfdbinary.readouterr().out


def test_consume_prints_everything_in_each_format(
    url: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    raw = consumed(capfdbinary, "--url", url, "--format", "raw")
    assert raw == b"a\nb\nc\nd\n"
    lines = consumed(capfdbinary, "--url", url).splitlines()
    assert [json.loads(line)["value"] for line in lines] == ["a", "b", "c", "d"]
    array = json.loads(consumed(capfdbinary, "--url", url, "--format", "json"))
    assert [m["offset"] for m in array] == [0, 1, 2, 0]
    table = pa.ipc.open_stream(consumed(capfdbinary, "--url", url, "--format", "arrow")).read_all()
    assert table.column("value").to_pylist() == [b"a", b"b", b"c", b"d"]


def test_consume_from_a_position_with_a_limit(
    url: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    common = ("--url", url, "--format", "raw")
    assert consumed(capfdbinary, *common, "--limit", "2") == b"a\nb\n"
    assert consumed(capfdbinary, *common, "--partition", "1") == b"d\n"
    assert consumed(capfdbinary, *common, "--from", "latest") == b""
    assert consumed(capfdbinary, *common, "--from", "2", "--partition", "0") == b"c\n"
    assert consumed(capfdbinary, *common, "--from", "2026-01-31", "--partition", "0") == b"b\nc\n"
    assert (
        json.loads(consumed(capfdbinary, "--url", url, "--from", "latest", "--format", "json"))
        == []
    )


def test_consume_follows(
    url: str, worker: Worker, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    late = threading.Timer(0.3, lambda: worker.values[1].append("late"))
    late.start()
    out = consumed(
        capfdbinary, "--url", url, "--follow", "--from", "latest", "--limit", "1", "--format", "raw"
    )
    late.join()
    assert out == b"late\n"


def test_consume_names_what_was_lost_once(
    url: str, worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    """G7: the offsets on both sides of a gap do not look like neighbours."""
    worker.lost = f"{wire.GAPS_HEADER}: 1-2\r\n"
    assert run("consume", NAME, "-q", "--partition", "0", "--format", "raw", "--url", url) == 0
    said = capfd.readouterr()
    assert said.out == "a\nb\nc\n"
    assert said.err == "tidewater: offsets 1 to 1 of partition 0 were lost with a volume\n"


def test_errors_become_exit_codes(
    serve: Serve, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("stats", "default/nothing", "--url", url) == 1
    assert "tidewater: UnknownTopic: no topic" in capsys.readouterr().err
    assert run("consume", NAME, "--partition", "9", "--url", url) == 1
    assert "it has 0 to 1" in capsys.readouterr().err
    assert run("flush", NAME, "--url", serve(lambda _: HANG_UP).url) == 4
    busy = answer(b'{"error":{"reason":"Busy","message":"later"}}', 503)
    assert run("flush", NAME, "--url", serve(lambda _: busy).url) == 3
    gone = serve(lambda _: busy)
    gone.close()
    assert run("topics", "--url", gone.url) == 3
    assert run("topics", "--url", "nonsense") == 1
    with pytest.raises(SystemExit) as caught:
        run("flush", "no/such/name", "--url", url)
    assert caught.value.code == 2


def test_a_bare_name_is_of_the_default_namespace(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("stats", NAME.partition("/")[2], "--url", url) == 0
    assert "files" in capsys.readouterr().out
    assert run("stats", "nothing", "--url", url) == 1
    assert "default/nothing" in capsys.readouterr().err


def test_the_url_comes_from_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEWATER_URL", url)
    assert run("topics") == 0
    assert "quickstart" in capsys.readouterr().out


def test_positions() -> None:
    assert [position(text) for text in ("earliest", "latest", "12")] == ["earliest", "latest", 12]
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert position("2026-01-31T12:00:00Z") == position("2026-01-31 12:00") == noon
    for text in ("-1", "soon", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="not a position"):
            position(text)


def test_starts() -> None:
    bounds = {0: Bounds(5, 9), 1: Bounds(0, 0)}
    assert starts("earliest", None, bounds) == {0: 5, 1: 0}
    assert starts("latest", None, bounds) == {0: 9, 1: 0}
    assert starts(7, 0, bounds) == {0: 7}
    with pytest.raises(Invalid, match="UnknownPartition"):
        starts(7, 2, bounds)
    with pytest.raises(Invalid, match=r"OffsetInFuture.* partition 0 at 9, partition 1 at 0"):
        starts(10, None, bounds)


def test_a_plan_skips_batches_that_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(b"\n\n")
    args = argparse.Namespace(
        messages=[],
        file=[str(path)],
        format="ndjson",
        key=None,
        key_separator=None,
        header=[],
        batch=10,
    )
    assert [batch.count for batch in Plan.of(args).batches()] == [0]


def test_flatten() -> None:
    stats = {"a": {"b": 1.5, "c": []}, "d": [{"e": True}], "f": None}
    assert list(flatten("", stats)) == [("a.b", "1.5"), ("a.c", "[]"), ("d.0.e", "yes"), ("f", "-")]


def test_progress_is_silent_for_short_work_without_a_terminal() -> None:
    stream = io.StringIO()
    progress = Progress("stored", stream=stream)
    progress.add(3, 2048)
    assert stream.getvalue() == ""
    progress.finish("done")
    assert stream.getvalue() == "3 messages stored, 2.0 KiB; done\n"
    assert progress.line(progress._began + 2) == "3 messages stored, 2.0 KiB, 2/s over 2 s"
