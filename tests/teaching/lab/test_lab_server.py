"""The laboratory over real HTTP: what is there, what is refused, and several clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from lfm2np.commands.cli import main
from lfm2np.teaching.lab import server
from lfm2np.teaching.lab.page import compute
from lfm2np.teaching.lab.server import serving

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "lfm2np", "lab", "--port", "0", "--no-browser", "--json"]
PAPER = "model=paper&prompt=the+cat&tokens=2"


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    text: str


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as url:
        yield urlsplit(url).port or 0


def ask(port: int, path: str, method: str = "GET", **headers: str) -> Answer:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read().decode())


def test_a_page_is_that_of_its_link_whoever_else_asks(port: int) -> None:
    links = [f"model=paper&prompt=the+cat&tokens={count}" for count in (3, 4, 5)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda link: ask(port, f"/?{link}"), links))
    assert [(answer.status, answer.text) for answer in answers] == [compute(link) for link in links]
    assert len({answer.text for answer in answers}) == 3
    assert answers[0].headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize("path", [f"/?{PAPER}", "/?slots=0", "/none"])
def test_every_answer_says_how_a_browser_is_to_treat_it(port: int, path: str) -> None:
    headers = ask(port, path).headers
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store" and "set-cookie" not in headers
    assert headers["content-security-policy"] == "frame-ancestors 'none'"


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/none", "GET", 404),
        ("/index.html", "GET", 404),
        ("/..%2f", "GET", 404),
        ("/", "POST", 501),
        ("/?prompt=a%00b", "GET", 400),
        ("/?" + "&".join(["prompt=a"] * 1500), "GET", 400),
    ],
)
def test_what_is_not_there_is_refused(port: int, path: str, method: str, status: int) -> None:
    assert ask(port, path, method).status == status


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "169.254.1.1", "", "[::2]", "["])
def test_a_foreign_host_is_refused(port: int, host: str) -> None:
    answer = ask(port, f"/?{PAPER}", Host=host)
    assert answer.status == 403 and answer.text.count("\n") == 1 and repr(host) in answer.text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8321", "localhost:1", "[::1]"])
def test_a_name_of_this_machine_is_served(port: int, host: str) -> None:
    assert ask(port, "/?slots=0", Host=host).status == 400


def test_a_page_of_another_site_cannot_keep_the_engine_busy_and_a_link_there_leads_here(port: int) -> None:
    def asked(site: str, mode: str, dest: str) -> int:
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
        return ask(port, "/?slots=0", **headers).status

    assert asked("cross-site", "no-cors", "image") == asked("same-site", "cors", "empty") == 403
    assert asked("cross-site", "navigate", "iframe") == 403
    assert asked("cross-site", "navigate", "document") == asked("same-origin", "cors", "empty") == 400


def test_a_client_that_leaves_and_one_that_says_nothing_harm_nobody(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 60):  # says nothing
        with socket.create_connection(("127.0.0.1", port), 60) as client:
            client.sendall(f"GET /?{PAPER} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert ask(port, "/?slots=0").status == 400


def test_a_defect_is_told_by_its_name(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "computed", {}.__getitem__)
    answer = ask(port, "/?x")
    assert (answer.status, answer.text) == (500, "KeyError: a defect of the laboratory\n")


def test_one_run_is_computed_at_a_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault changes the functions of the process."""
    monkeypatch.setattr(server, "computed", lambda link: (200, str(server.one_at_a_time.locked())))
    assert ask(port, "/?x").text == "True"


# --- `lfm2np lab` as a process


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_answers_and_ends(how: signal.Signals) -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = urlsplit(json.loads(process.stdout.readline())["url"])
            assert url.hostname == "127.0.0.1"
            assert ask(url.port or 0, "/?slots=0").status == 400
            process.send_signal(how)
            assert process.wait(60) == 0
            assert process.stdout.read() == process.stderr.read() == ""
        finally:
            process.kill()


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        assert main(["lab", "--no-browser", "--port", port]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"lfm2np: RequestError: --port {port}: ") and "in use" in error
