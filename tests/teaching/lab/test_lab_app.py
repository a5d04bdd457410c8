"""The laboratory over real HTTP: what is there, what is refused, and several clients."""

from __future__ import annotations

import contextlib
import http.client
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

import pytest

from lfm2np.commands.lab_app import MOST_QUERY, MOST_WAITING, make_app
from lfm2np.commands.serve.server import serving_beside
from lfm2np.teaching.lab.settings import TEACHING_FAULTS
from lfm2np.teaching.lab.worker import Worker

MISBEHAVING = (sys.executable, str(Path(__file__).with_name("misbehaving_child.py")))
PAPER = "/?model=paper&prompt=the+cat&tokens=2"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


@dataclass(frozen=True, eq=False)
class Served:
    port: int
    worker: Worker

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read().decode())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Worker(seconds=60.0, command=MISBEHAVING) as worker, serving_beside(make_app(worker)) as port:
        yield Served(port, worker)


def test_the_page_has_the_form_the_answers_and_the_views(served: Served):
    answer = served.ask("/")
    assert answer.status == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text.startswith("<!DOCTYPE html>")
    for piece in ('name="prompt"', 'name="blocks"', 'id="result"', 'id="pool"', 'id="ragged"', 'method="get"'):
        assert piece in answer.text
    for name in TEACHING_FAULTS:
        assert f'value="{name}"' in answer.text


def test_the_same_link_is_the_same_bytes_also_after_others(served: Served):
    first = served.ask(PAPER)
    for number in range(9):
        served.ask(f"/?slots={number + 9}")
    assert served.worker.kept(PAPER[2:]) is None
    assert served.ask(PAPER).text == first.text


@pytest.mark.parametrize("path", ["/", "/health", "/?slots=0", "/none"])
def test_every_answer_says_how_a_browser_is_to_treat_it(served: Served, path: str):
    headers = served.ask(path).headers
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store" and "set-cookie" not in headers
    assert headers["content-security-policy"] == "frame-ancestors 'none'"


def test_problems_stand_at_their_fields_and_what_was_typed_stays(served: Served):
    prompt = '<b id="x">&amp;\u00e9'
    answer = served.ask(f"/?prompt={quote(prompt)}&arrival=soon&blocks=many&policy=lifo&prompt=&arrival=9&unknown=1")
    assert answer.status == 400
    for identity in ("arrival-0", "blocks", "policy"):
        assert f'id="problem-{identity}"' in answer.text and f'aria-describedby="problem-{identity}"' in answer.text
    assert 'id="problem-form"' in answer.text and "unknown" in answer.text
    assert f'value="{escape(prompt)}"' in answer.text and prompt not in answer.text
    assert 'value="soon"' in answer.text and 'value="many"' in answer.text
    assert '<option value="lifo" selected>' in answer.text
    assert 'id="pool"' not in answer.text and 'id="result"' not in answer.text


def test_bytes_that_are_no_text_are_told(served: Served):
    assert served.ask("/?prompt=a%00b").status == 400
    assert "no UTF-8" in served.ask("/?prompt=%ED%A0%80").text
    assert served.ask("/?" + "&".join(["prompt=a"] * 1500)).status == 400


def test_health_tells_that_it_is_there(served: Served):
    answer = served.ask("/health")
    assert (answer.status, answer.text) == (200, '{"status":"ok"}')


@pytest.mark.parametrize("path", ["/none", "/index.html", "/health/", "/..%2f", "//"])
def test_other_paths_are_not_there(served: Served, path: str):
    answer = served.ask(path)
    assert answer.status == 404 and answer.text.count("\n") == 1 and "the page is at /" in answer.text


def test_other_methods_are_refused(served: Served):
    answer = served.ask("/", "POST")
    assert answer.status == 405 and answer.text.count("\n") == 1 and "GET" in answer.headers["allow"]


@pytest.mark.parametrize("path", ["/", "/health", PAPER])
def test_a_head_is_the_same_without_a_body(served: Served, path: str):
    whole, head = served.ask(path), served.ask(path, "HEAD")
    assert (head.status, head.text) == (200, "")
    assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.text.encode()))


def test_a_link_that_is_too_long_is_refused(served: Served):
    assert served.ask("/?x=" + "a" * (MOST_QUERY - 2)).status == 400
    answer = served.ask("/?x=" + "a" * (MOST_QUERY - 1))
    assert answer.status == 414 and answer.text.count("\n") == 1 and "16385 bytes" in answer.text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "169.254.1.1", "", "[::2]"])
@pytest.mark.parametrize("path", ["/", "/health"])
def test_a_foreign_host_is_refused(served: Served, host: str, path: str):
    answer = served.ask(path, Host=host)
    assert answer.status == 421 and answer.text.count("\n") == 1 and repr(host) in answer.text


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8321", "localhost:1", "[::1]"])
def test_a_name_of_this_machine_is_served(served: Served, host: str):
    assert served.ask("/health", Host=host).status == 200


def test_two_at_once_get_their_own_pages(served: Served):
    paths = [f"/?model=paper&prompt=the+cat&tokens={count}" for count in (3, 4, 5)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(served.ask, paths))
    assert [answer.text for answer in together] == [served.ask(path).text for path in paths]
    assert len({answer.text for answer in together}) == 3


def leave(port: int, path: str) -> None:
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        time.sleep(0.2)


def test_a_client_that_leaves_harms_nobody(served: Served):
    leave(served.port, "/?sleep")
    leave(served.port, "/?crash")
    assert served.ask(PAPER).status == 200


@pytest.mark.slow
def test_who_left_while_others_were_computed_is_not_computed(served: Served):
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.ask, "/?sleep&slots=0")  # asked for nowhere else, so not kept
        time.sleep(0.3)
        leave(served.port, "/?hang")  # would end the process
        before = served.worker.pid
        assert served.ask("/?slots=77").status == 400
        assert served.worker.pid == before, "the process was ended for a run that hangs"
        assert asked.result().status == 400


def test_what_goes_wrong_is_told_on_a_page_with_the_form(served: Served):
    answer = served.ask("/?crash")
    assert answer.status == 500 and 'name="prompt"' in answer.text
    assert "The process that computes the run died; the next run has a new one." in answer.text
    assert served.ask(PAPER).status == 200


@pytest.mark.slow
def test_more_runs_than_may_wait_are_refused(served: Served):
    paths = [f"/?nap&slots={number}" for number in range(MOST_WAITING + 3)]
    with ThreadPoolExecutor(len(paths)) as pool:
        answers = list(pool.map(served.ask, paths))
    refused = [answer for answer in answers if answer.status == 503]
    assert len(refused) == 3 and [answer.status for answer in answers].count(400) == MOST_WAITING
    assert all("8 runs wait already" in answer.text and answer.text.count("\n") == 1 for answer in refused)
    assert served.ask("/?nap&slots=1").status == 400


def test_a_page_of_another_site_cannot_keep_the_engine_busy_and_a_link_there_leads_here(served: Served):
    def asked(site: str, mode: str, dest: str) -> int:
        return served.ask(PAPER, **{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}).status

    assert asked("cross-site", "no-cors", "image") == asked("same-site", "cors", "empty") == 403
    assert asked("cross-site", "navigate", "iframe") == 403
    assert asked("cross-site", "navigate", "document") == asked("same-origin", "cors", "empty") == 200
