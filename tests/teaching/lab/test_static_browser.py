"""The laboratory without a server: pytest -m browser tests/teaching/lab; the extra `browser`, Pyodide by pip."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from lessons import SETTINGS
from page_checks import CONTRAST
from tabs import Fill, Tab, served

from lfm2np.teaching.lab.lessons import LESSONS
from lfm2np.teaching.lab.page import compute
from lfm2np.teaching.lab.settings import TEACHING_FAULTS, link_of
from lfm2np.teaching.lab.static.browser import HOST
from lfm2np.teaching.lab.static.build import write_static

pytestmark = pytest.mark.browser
README = Path(__file__).parents[3] / "README.md"
PATIENCE = 120_000  # milliseconds: other tests may run beside this
PROVED = "every one equals sequential generation, bit for bit."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inside a folder of another name: the laboratory must not be at the server's root."""
    top = tmp_path_factory.mktemp("host")
    write_static(top / "a path" / "lab", None, lambda what, done, count: None)
    return top


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with served(folder) as top:
        yield f"{top}a%20path/lab/"


class Visit(Tab):
    def __init__(self, context: Any, address: str, query: str = "") -> None:
        super().__init__(context, address, query, PATIENCE)

    def until(self, is_so: Callable[[], object]) -> None:
        """A page with this policy runs no text as code, so it is asked again and again."""
        end = time.monotonic() + PATIENCE / 1000
        while not is_so():
            assert time.monotonic() < end, self.state
            self.page.wait_for_timeout(50)

    @property
    def state(self) -> str:
        text: str = self.page.inner_text("#host-state")
        return text

    def ready(self) -> None:
        self.until(lambda: self.state.startswith("Ready: "))

    def kept(self) -> None:
        self.until(lambda: "without network" in self.state)

    def run(self, fields: Fill) -> None:
        self.fill(fields)
        self.page.click(".run")
        self.page.wait_for_selector(".run:not([aria-disabled])", state="attached")

    def follow(self, link: str) -> None:
        self.page.evaluate("document.body.dataset.old = 'yes'")
        self.page.click(link)
        self.page.wait_for_selector("body:not([data-old])", state="attached")

    def open_lesson(self, number: int) -> None:
        self.follow(f".lessons li:nth-child({number + 1}) a")


@pytest.fixture(scope="module")
def visit(browser: Any, address: str) -> Iterator[Visit]:
    """One tab for all that changes nothing but the run: Python starts once in it."""
    opened = Visit(browser.new_context(viewport={"width": 1280, "height": 900}), address)
    opened.ready()
    yield opened
    opened.close()


# --- a visit


def test_a_first_visit_one_without_network_and_one_to_a_newer_folder(browser: Any, folder: Path, address: str) -> None:
    """The newer page is seen although a browser takes a file of a month ago to be fresh for days."""
    path = folder / "a path" / "lab" / "index.html"
    os.utime(path, (0, time.time() - 30 * 86400))
    visit = Visit(browser.new_context(), address)
    assert visit.page.is_visible("#batching"), "a run is drawn before anything computes"
    visit.ready()
    visit.run({"policy": "static"})
    assert visit.settings.policy == "static"
    visit.kept()
    visit.context.set_offline(True)
    visit.page.goto(f"{address}?lesson=1")
    visit.until(lambda: visit.page.query_selector(".lesson-text"))
    visit.ready()
    visit.run({"budget": "2"})
    assert visit.page.inner_text("#verdict").startswith("Right. ")
    visit.context.set_offline(False)
    visit.page.goto(f"{address}?slots=3")  # by the service worker: kept by the browser, too
    text = path.read_text(encoding="utf-8")
    try:
        path.write_text(text.replace("<title>", "<title>New: ", 1), encoding="utf-8")
        second = visit.context.new_page()
        second.goto(address)
        assert second.title().startswith("New: ")
    finally:
        path.write_text(text, encoding="utf-8")
    visit.close()


def test_a_worker_may_ask_for_nothing_elsewhere(visit: Visit) -> None:
    """It asks in a task of its own: what a debugger evaluates is not held to the policy."""
    (worker,) = visit.page.workers
    asked = """new Promise((done) => {
        self.addEventListener("securitypolicyviolation", (event) => done(event.violatedDirective));
        setTimeout(() => fetch("https://example.org/").then(() => done("answered"), () => {}), 10);
    })"""
    assert worker.evaluate(asked) == "connect-src"
    evaluated = """new Promise((done) => setTimeout(() => {
        try { done((0, eval)("1")); } catch (problem) { done(problem.name); }
    }, 10))"""
    assert worker.evaluate(evaluated) == "EvalError"
    visit.elsewhere.clear()


def test_the_digests_here_are_those_of_the_readme_and_the_run_is_proved(visit: Visit) -> None:
    visit.follow(".lessons a")
    visit.page.click("#host-prove")
    visit.until(lambda: "Computed by" in visit.page.inner_text("#host-proof"))
    names, texts = (
        visit.page.eval_on_selector_all(f"#host-proof {tag}", "all => all.map(each => each.textContent)")
        for tag in ("dt", "dd")
    )
    facts = dict(zip(names, texts, strict=True))
    in_readme = re.findall(r"^[0-9a-f]{64}$", README.read_text(encoding="utf-8"), re.MULTILINE)
    digests = [facts[f"Digest of the fixture {name}"] for name in ("trained", "moe", "lfm3")]
    assert digests == [f"{value}: equal to the machine that built this page" for value in in_readme]
    assert facts["This run"].endswith(PROVED)
    assert (
        "machine wasm32, pointers of 32 bits, little-endian, Pyodide 0.27.7, files compared by SHA-256; "
        in facts["Computed by"]
    )
    assert visit.page.evaluate(CONTRAST) == []


@pytest.mark.night
def test_a_second_tab_computes_by_itself(visit: Visit) -> None:
    second = Visit(visit.context, visit.address)
    second.ready()
    second.run({"blocks": "21"})
    visit.follow(".lessons a")
    visit.run({"blocks": "22"})
    assert (second.settings.blocks, visit.settings.blocks) == (21, 22)
    assert second.complaints == second.elsewhere == []
    second.page.close()


def test_back_and_forward(visit: Visit) -> None:
    """And the keyboard goes on where the answer is."""
    visit.follow(".lessons a")
    visit.run({"slots": "0"})
    assert visit.page.inner_text("#problem-slots") == "'0': expected a whole number, 1 to 8."
    assert visit.page.evaluate("document.activeElement.id") == "slots"
    visit.run({"slots": "2", "blocks": "23"})
    visit.open_lesson(2)
    assert visit.page.evaluate("document.activeElement.textContent").startswith("Lesson 2: ")
    visit.page.go_back()
    visit.until(lambda: not visit.page.query_selector(".lesson-text"))
    assert visit.page.input_value("#blocks") == "23"
    visit.page.click('.side a[href="#pool"]')
    visit.page.click('.side a[href="#schedule"]')
    visit.page.go_back()
    visit.page.wait_for_selector("#pool.current")
    assert visit.page.input_value("#blocks") == "23", "a view is no other run"


def test_what_is_proved_is_what_is_shown(visit: Visit) -> None:
    """Also where a page was left for another before it came."""
    visit.open_lesson(3)
    assert "Broken" in visit.page.inner_text("#result")
    visit.open_lesson(1)
    visit.page.click(".run", no_wait_after=True)
    visit.page.go_back()
    visit.until(lambda: "Broken" in visit.page.inner_text("#result") and "Ready" in visit.state)
    assert visit.settings.lesson == "3"
    visit.page.click("#host-prove")
    visit.page.wait_for_selector("#host-proof dd.wrong")
    assert "the logits are not those that it has alone" in visit.page.inner_text("#host-proof dd.wrong")
    assert visit.page.evaluate("document.activeElement.id") == "host-prove"
    visit.until(lambda: "Computed by" in visit.page.inner_text("#host-proof"))


def test_other_files_of_the_host_are_left_alone(visit: Visit, folder: Path) -> None:
    top = folder / "a path" / "lab"
    (top / "worker.js").write_text("other")
    try:
        text, headers = visit.page.evaluate(
            "fetch('worker.js').then(async (a) => [await a.text(), [...a.headers.keys()]])"
        )
        assert text == "other" and "content-security-policy" not in headers
        stored = (
            "caches.keys().then(async ([name]) => (await (await caches.open(name)).keys()).map((each) => each.url))"
        )
        names = [url.removeprefix(visit.address) for url in visit.page.evaluate(stored)]
        assert "" in names and "worker.js" not in names
    finally:
        (top / "worker.js").unlink()


@pytest.mark.night
def test_a_link_a_proof_and_a_run_that_are_stopped(browser: Any, address: str) -> None:
    visit = Visit(browser.new_context(), address, "?lesson=5")
    visit.page.wait_for_selector("#host-stop:visible")
    visit.page.click("#host-stop")
    visit.ready()
    assert visit.state.endswith("The run was stopped.")
    assert urlsplit(visit.page.url).query == "", "the address is that of the page that is shown"
    visit.page.click("#host-prove")
    visit.page.click("#host-stop")
    visit.ready()
    assert visit.page.inner_text("#host-proof") == "Not proved\nThe run was stopped."
    assert visit.page.evaluate("document.activeElement.id") == "host-state"
    rows = {f"prompt-{index}": f"count: 1{index} to 30 ->" for index in range(6)}
    lengths = {f"tokens-{index}": "48" for index in range(6)}
    visit.open_form()
    for name, text in {**rows, **lengths, "blocks": "128", "slots": "1"}.items():
        visit.page.fill(f"#{name}", text)
    visit.page.click(".run", no_wait_after=True)
    visit.page.click("#host-stop")
    visit.page.wait_for_selector("#problem-form")
    assert visit.page.inner_text("#problem-form") == "The run was stopped."
    assert not visit.page.is_visible("#host-stop")
    visit.ready()
    visit.run({"slots": "8", **dict.fromkeys(lengths, "3")})
    assert visit.settings.slots == 8
    assert visit.page.query_selector("#problem-form") is None
    visit.close()


# --- all of the laboratory


def solved(number: str) -> str:
    """A link to a lesson with a right answer."""
    return link_of(replace(LESSONS[number].start, **SETTINGS[number][0]))


def test_a_page_here_is_the_page_of_the_server(visit: Visit) -> None:
    """Each fault, the run beside it and each lesson: the same numbers, digit by digit, drawn by another machine."""
    (worker,) = visit.page.workers
    queries = [
        *(f"fault={name}&drafts=2" for name in TEACHING_FAULTS),
        *(solved(number) for number in LESSONS),
        "slots=x",
    ]
    for query in queries:
        here = json.loads(worker.evaluate("query => browser.page(query)", query))
        assert (here["status"], here["text"]) == compute(query, HOST), query


# --- how it looks


def test_it_fits_and_can_be_read(browser: Any, address: str) -> None:
    """While it loads, and as nothing computes: what comes later is the laboratory's, and tested there."""
    visit = Visit(browser.new_context(), address)
    for width, scheme in ((360, "light"), (1280, "dark"), (1920, "light")):
        visit.page.set_viewport_size({"width": width, "height": 900})
        visit.page.emulate_media(color_scheme=scheme)
        assert visit.state
        assert visit.page.evaluate(CONTRAST) == []
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    visit.context.close()


# --- a browser that can't


def failing(browser: Any, address: str, script: str = "", **options: Any) -> str:
    """What the page says in a browser that a script took something from; its drawings stay."""
    context = browser.new_context(**options)
    context.add_init_script(script)
    page = context.new_page()
    page.goto(address)
    for _ in range(600):
        text: str = page.inner_text("#host-state")
        if text and not text.startswith(("Loading", "Starting")):
            break
        page.wait_for_timeout(100)
    assert page.is_visible("#batching")
    assert not page.is_visible("#host-prove")
    context.close()
    return text


def test_a_browser_without_webassembly_or_scripts(browser: Any, address: str) -> None:
    sentence = "needs JavaScript and WebAssembly. What is drawn below stays."
    assert sentence in failing(browser, address, "delete window.WebAssembly")
    assert sentence in failing(browser, address, java_script_enabled=False)


def test_a_download_that_is_cut(browser: Any, folder: Path) -> None:
    with served(folder, cut="fixtures.zip") as top:
        text = failing(browser, f"{top}a%20path/lab/", service_workers="block")
    assert "fixtures.zip came with" in text or "fixtures.zip can't be loaded" in text
    assert text.endswith("What is drawn below stays; reload the page to try again.")


def test_a_file_that_is_another(browser: Any, folder: Path, address: str) -> None:
    (path,) = folder.glob("a path/lab/*/lfm2np.zip")
    content = path.read_bytes()
    try:
        path.write_bytes(content[:-1] + b"?")
        assert "lfm2np.zip is not the file that was built" in failing(browser, address)
    finally:
        path.write_bytes(content)


def test_too_little_memory(browser: Any, folder: Path) -> None:
    arguments = ["--no-sandbox", "--js-flags=--wasm-max-mem-pages=128"]
    small = browser.browser_type.launch(executable_path=shutil.which("chromium"), args=arguments)
    with served(folder) as top:
        assert "this browser gave too little memory" in failing(small, f"{top}a%20path/lab/")
    small.close()


@pytest.mark.night
def test_a_classroom_without_https(browser: Any, folder: Path) -> None:
    """There is no service worker there, no cache and no SHA-256: the network each time, and all else as it is."""
    arguments = ["--no-sandbox", "--host-resolver-rules=MAP lab.test 127.0.0.1"]
    plain = browser.browser_type.launch(executable_path=shutil.which("chromium"), args=arguments)
    with served(folder) as top:
        visit = Visit(plain.new_context(), f"{top.replace('127.0.0.1', 'lab.test')}a%20path/lab/", "?lesson=1")
        assert not visit.page.evaluate("isSecureContext")
        visit.until(lambda: visit.page.query_selector(".lesson-text"))
        visit.run({"budget": "2"})
        assert visit.page.inner_text("#verdict").startswith("Right. ")
        assert visit.state == "Ready: Python 3.12.7 and NumPy 2.0.2 in this browser."
        visit.page.click("#host-prove")
        visit.until(lambda: "Computed by" in visit.page.inner_text("#host-proof"))
        assert "files compared by length only, without HTTPS" in visit.page.inner_text("#host-proof")
        visit.close()
    plain.close()


def test_a_page_of_a_file_says_what_serves_it(browser: Any, folder: Path) -> None:
    assert "python -m http.server" in failing(browser, (folder / "a path" / "lab" / "index.html").as_uri())
