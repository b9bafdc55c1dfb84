"""Watching a run: its page alone, to this machine alone, for as long as somebody looks."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import command
import pytest
from runlogs import BAD, hostile, lines, train

from pliant import PliantError
from pliant.apps import report, watch
from pliant.apps.report import LogError
from pliant.session import run_log as runlog


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = train(tmp_path_factory.mktemp("runs") / "chain", 6)
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture
def server(run: Path) -> Iterator[ThreadingHTTPServer]:
    yield from serving(run)


def serving(run: Path) -> Iterator[ThreadingHTTPServer]:
    with watch.server(run) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(
    server: ThreadingHTTPServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, str, dict[str, str]]:
    """The answer to a request that is sent as it is, dots and all."""
    port = server.server_port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    out = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return out


def test_the_page_is_served_and_asks_for_news(server: ThreadingHTTPServer) -> None:
    code, page, headers = get(server, "/")
    assert code == 200 and "<body data-live>" in page and "Selection map" in page
    assert "default-src 'none'" in headers["Content-Security-Policy"] and headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff" and "Access-Control-Allow-Origin" not in headers
    assert get(server, "/", "HEAD")[:2] == (200, "")


def test_a_run_can_be_watched_from_its_first_moment(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")  # what `pliant train` writes before its log
    log = tmp_path / "run.jsonl"
    for server in serving(tmp_path):
        assert json.loads(get(server, "/news.json")[1])["said"] == "live, starting" and get(server, "/")[0] == 200
        runlog.append(log, [{"event": "run", "options": {"data": "digits"}, "total_steps": 8}])
        runlog.append(log, [{"event": "evaluated", "step": 0, "accuracy": 0.125, "loss": 2.0}])
        news = json.loads(get(server, "/news.json")[1])
        assert "measuring what each layer costs" in news["said"] and "12.5%" in news["main"] and "digits" in news["main"]
        runlog.append(log, [{**line, "total_steps": 8} for line in lines(train(tmp_path / "other", 4) / "run.jsonl")[:-3]])
        news = json.loads(get(server, "/news.json")[1])
        assert news["said"].startswith("live, step 4 of 8 (50%), ") and "<progress " in news["main"]


def test_news_come_when_the_log_has_grown(tmp_path: Path) -> None:
    run = train(tmp_path / "grows", 4)
    for server in serving(run):
        news = json.loads(get(server, "/news.json")[1])
        assert "Selection map" in news["main"] and news["said"] == "finished" and news["wait"] >= 2
        assert "main" not in json.loads(get(server, f"/news.json?since={news['stamp']}")[1])
        runlog.append(run / "run.jsonl", [{"event": "step", "step": 5, "round": 1, "loss": 0.5, "seconds": 0.01}])
        more = json.loads(get(server, f"/news.json?since={news['stamp']}")[1])
        assert more["said"] == "live, step 5" and more["stamp"] != news["stamp"] and "main" in more
        (run / "run.jsonl").unlink()
        assert "cannot be read" in json.loads(get(server, "/news.json")[1])["said"]
        assert get(server, "/")[0] == 503


# ---------------------------------------------------------------- only what was appended


def halves(run: Path, tmp_path: Path) -> tuple[Path, bytes, bytes]:
    """A log that holds the first half of a run's lines, and both halves."""
    lines = (run / "run.jsonl").read_bytes().splitlines(keepends=True)
    middle = len(lines) // 2
    log = tmp_path / "half.jsonl"
    log.write_bytes(b"".join(lines[:middle]))
    return log, b"".join(lines[:middle]), b"".join(lines[middle:])


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines that are taken apart from now on."""
    seen: list[bytes] = []
    loads = json.loads
    monkeypatch.setattr("pliant.apps.report.reading.json.loads", lambda line: seen.append(line) or loads(line))
    return seen


def test_only_what_was_appended_is_read_and_it_tells_the_same(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, _, second = halves(run, tmp_path)
    tail = report.Tail(log)
    assert tail.read() == report.load(log)
    seen = decoded(monkeypatch)
    for line in second.splitlines(keepends=True):
        with open(log, "ab") as file:
            file.write(line)
        now = tail.read()
        assert seen == [line]
        assert now == report.load(log)
        seen.clear()
    assert tail.read() == report.load(log) and len(report.load(log).steps) == 6


def test_half_a_line_waits_for_the_rest_of_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, first, second = halves(run, tmp_path)
    tail = report.Tail(log)
    before = tail.read()
    whole = second.splitlines(keepends=True)[0]
    log.write_bytes(first + whole[:-7])
    seen = decoded(monkeypatch)
    waiting = tail.read()
    assert waiting.torn and replace(waiting, torn=False) == before and seen == []
    log.write_bytes(first + whole)
    assert not tail.read().torn and seen == [whole]


@pytest.mark.parametrize("how", ["truncated", "rewritten", "longer", "replaced"])
def test_a_log_that_was_truncated_or_replaced_is_read_anew(run: Path, tmp_path: Path, how: str) -> None:
    log, first, second = halves(run, tmp_path)
    log.write_bytes(first + second)
    tail = report.Tail(log)
    tail.read()
    other = (train(tmp_path / "other", 9) / "run.jsonl").read_bytes()
    if how == "truncated":
        log.write_bytes(first)
    elif how == "rewritten":
        log.write_bytes(other[: other.rindex(b"\n", 0, len(first)) + 1])
    elif how == "longer":
        assert len(other) > len(first + second)
        log.write_bytes(other)
    else:
        (tmp_path / "aside").write_bytes(first + second.replace(b'"step": 6', b'"step": 7'))
        os.replace(tmp_path / "aside", log)
    assert tail.read() == report.load(log)
    with open(log, "ab") as file:
        file.write(b'{"event": "note", "step": 9, "text": "goes on"}\n')
    assert tail.read().notes[-1] == (9, "goes on") and tail.read() == report.load(log)


def test_a_second_run_in_the_same_file_takes_over_and_a_log_that_was_gone_is_read_again(run: Path, tmp_path: Path) -> None:
    log, first, second = halves(run, tmp_path)
    tail = report.Tail(log)
    tail.read()
    with open(log, "ab") as file:
        file.write(b'{"event": "step", "step": "odd"}\n')
    for _ in range(2):
        with pytest.raises(LogError, match=f"line {len(first.splitlines()) + 1}: not a line of a run log"):
            tail.read()
    with open(log, "ab") as file:
        file.write(first + second)
    assert tail.read() == report.load(log) and tail.read().earlier == 1
    log.unlink()  # gone for a while
    with pytest.raises(LogError, match="cannot be read"):
        tail.read()
    log.write_bytes(first)
    assert tail.read() == report.load(log)


def test_the_page_is_drawn_once_for_all_who_look(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _, second = halves(run, tmp_path)
    live, draw, times = watch.LivePage(log), report.body, list[int]()
    monkeypatch.setattr(report, "body", lambda runs: times.append(1) or draw(runs))
    one, two = live.news(""), live.news("")
    assert one["main"] == two["main"] and len(times) == 1
    with open(log, "ab") as file:
        file.write(second)
    assert live.news(str(one["stamp"]))["main"] != one["main"] and len(times) == 2


@pytest.mark.parametrize(
    "path",
    [
        "/run.jsonl",
        "/secret.txt",
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/./",
        "//[",
        "/%2e%2e/",
        "/chain/",
        "/news.json/",
        "/etc/passwd",
        "/?/../../etc/passwd/..",
        "/index.html",
        "/favicon.ico",
        "http://elsewhere/secret.txt",
    ],
)
def test_nothing_else_is_served(server: ThreadingHTTPServer, path: str) -> None:
    code, content, _ = get(server, path)
    assert "secret" not in content and "root:" not in content
    assert code == (200 if path.startswith("/?") else 404)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", ""]
)
def test_only_its_own_name_is_answered(server: ThreadingHTTPServer, host: str) -> None:
    code, content, _ = get(server, "/", host=host.format(port=server.server_port))
    assert code == 403 and "Selection" not in content
    assert get(server, "/", host=f"localhost:{server.server_port}")[0] == 200


def test_it_answers_nothing_but_reading_and_listens_on_this_machine_only(server: ThreadingHTTPServer) -> None:
    assert {get(server, "/", method)[0] for method in ("POST", "PUT", "DELETE", "OPTIONS")} == {501}
    assert server.server_address[0] == "127.0.0.1" and server.socket.family == socket.AF_INET


def test_what_a_log_says_is_escaped(run: Path, tmp_path: Path) -> None:
    for server in serving(hostile(tmp_path / "bad", run)):
        for content in (get(server, "/")[1], json.loads(get(server, "/news.json")[1])["main"]):
            assert "pwned" in content and BAD not in content and "<script>alert" not in content


def test_what_cannot_be_watched_is_told(tmp_path: Path, server: ThreadingHTTPServer, run: Path) -> None:
    with pytest.raises(LogError, match="no run"):
        watch.server(tmp_path)
    with pytest.raises(PliantError, match="cannot use port"):
        watch.server(run, server.server_port)


def test_ctrl_c_ends_the_command(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    serve = ThreadingHTTPServer.serve_forever

    def look_and_stop(server: ThreadingHTTPServer) -> None:
        codes.append(get(server, "/")[0])
        os.kill(os.getpid(), signal.SIGINT)

    def serve_forever(server: ThreadingHTTPServer) -> None:
        threading.Thread(target=look_and_stop, args=(server,)).start()
        serve(server)

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", serve_forever)
    shown = command.run(["watch", str(run)])
    assert codes == [200] and shown.exit_code == 0
    assert "http://127.0.0.1:" in command.text(shown) and shown.output.splitlines()[-1] == "stopped."


def test_drips_do_not_outlive_the_time_of_a_request(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends a byte now and then keeps no thread longer than a request may take."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = watch._UntilDeadline(theirs, watch._REQUEST_SECONDS)
        for second in range(20):
            now[0] = float(second)
            ours.send(b"G")
            if second < watch._REQUEST_SECONDS:
                assert reader.readinto(bytearray(8)) == 1
            else:
                with pytest.raises(TimeoutError):
                    reader.readinto(bytearray(8))


def test_requests_at_once_are_limited_and_later_ones_are_answered(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_MOST_REQUESTS", 3)
    for server in serving(run):
        before = threading.active_count()
        idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(3)]
        while threading.active_count() < before + 3:
            pass
        more = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(20)]
        assert all(one.recv(1) == b"" for one in more), "the others are sent away"
        assert threading.active_count() == before + 3
        for one in (*idle, *more):
            one.close()
        while threading.active_count() > before:
            pass
        assert get(server, "/")[0] == 200
