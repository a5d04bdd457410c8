"""That a page whose blocks are not what they say is found, and what the blocks' comments mean. Then, every command and
every piece of code in README and docs/ does what the page shows: pytest -m docs tests/docs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_pages
from run_pages import Wrong, blocks_of, matches


def run(tmp_path: Path, text: str, *options: str) -> tuple[int, str, Path]:
    """The page is run as the tests run the real ones: in a process of its own."""
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, run_pages.__file__, *options, str(page)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr, page


GOOD = """
```{code-block} python
:caption: helper.py
WORD = "here"
```

```console
$ cat helper.py
WORD = "here"
$ python -c "import helper; print(helper.WORD); print(3.25, 'seconds'); print('last')"
here
... seconds
last
```

```python
import helper
number = 3
```

```python
>>> number + 1, helper.WORD
(4, 'here')
>>> number = 7
```

- In a list:

  ```python
  >>> number
  7
  ```

<!-- run: exit 3, in checkout -->
```console
$ ls pyproject.toml
pyproject.toml
$ exit 3
```

<!-- not run: needs a server with a GPU -->
```bash
rm -rf everything
```
"""


def test_blocks_of_a_page_share_a_folder_and_names(tmp_path: Path) -> None:
    status, printed, _ = run(tmp_path, GOOD)
    assert status == 0, printed
    assert "not run: needs a server with a GPU" in printed


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("... seconds", "... minutes", "another output"),
        ("\nlast\n", "\n", "another output"),
        ("(4, 'here')", "(5, 'here')", "Expected:"),
        ("number = 3\n", "number = 3\nprint(number)\n", "prints what the page does not show"),
        ("number = 3\n", "number = 3\nraise KeyError(number)\n", "KeyError: 3"),
        ("exit 3,", "exit 2,", "exit code 3, expected 2"),
        ("exit 3,", "quickly,", "known are"),
        (", in checkout", "", "exit code 2, expected 0"),
        ("<!-- not run: needs a server with a GPU -->", "", "language 'bash'"),
        ("$ cat helper.py", "cat helper.py", "starts with `$ command`"),
        ("rm -rf everything\n```", "", "never closed"),
    ],
)
def test_what_is_not_as_shown_is_found(tmp_path: Path, right: str, wrong: str, told: str) -> None:
    assert right in GOOD
    status, said, _ = run(tmp_path, GOOD.replace(right, wrong))
    assert status == 1
    assert told in said


def test_write_puts_the_real_output_into_the_page_and_no_more(tmp_path: Path) -> None:
    status, _, page = run(tmp_path, GOOD.replace("\nlast\n", "\nfirst\nsecond\n"), "--write")
    assert status == 0
    assert page.read_text(encoding="utf-8") == GOOD.replace("... seconds", "3.25 seconds")


def test_dots_stand_for_lines_or_characters() -> None:
    assert matches(["a", "...", "z"], ["a", "b", "c", "z"])
    assert matches(["a", "...", "z"], ["a", "z"])
    assert matches(["took ... s."], ["took 1.5 s."])
    assert not matches(["took ... s."], ["took 1.5 s", "."])
    assert not matches(["a"], ["a", "b"])
    assert not matches(["took 1.5"], ["took 1x5"])


def test_any_decimals_are_those_with_a_point_or_an_exponent() -> None:
    expected = ["RMS  1.2e+05, worst 3e+06  in 2 rows"]
    assert matches(expected, ["RMS    7.25, worst 4.1e-02 in 2 rows"], any_decimals=True)
    assert not matches(expected, ["RMS    7.25, worst 4.1e-02 in 3 rows"], any_decimals=True)
    assert not matches(expected, ["RMS    inf, worst 4.1e-02 in 2 rows"], any_decimals=True)
    assert not matches(expected, ["RMS    7.25, worst 4.1e-02 in 2 rows"])


def test_what_a_command_left_running_is_ended(tmp_path: Path) -> None:
    status, printed, _ = run(tmp_path, f"```console\n$ sleep 1000 & echo $! > {tmp_path}/left; true &\n```\n")
    assert status == 0, printed
    left = (tmp_path / "left").read_text().strip()
    while is_running(left):  # a busy machine ends it when it comes to it
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    """A process that has ended counts as gone, also if nobody has fetched it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def test_a_comment_counts_only_right_above_its_block() -> None:
    text = "<!-- not run: far away -->\n\n```console\n$ true\n```\n"
    assert blocks_of(Path("page.md"), text)[0].not_run == ""
    with pytest.raises(Wrong, match="known are"):
        blocks_of(Path("page.md"), "<!-- run: sometimes -->\n```console\n```\n")


PICTURE = """
```console
$ echo "<text>drawn</text>" > curve.svg
```

![A curve.](pictures/curve.svg)
"""


@pytest.mark.slow
def test_a_picture_is_the_one_that_a_command_of_the_page_draws(tmp_path: Path) -> None:
    status, message, page = run(tmp_path, PICTURE)
    assert status == 1 and "a command of the page draws another" in message
    assert run(tmp_path, PICTURE, "--write")[0] == 0
    shown = page.parent / "pictures" / "curve.svg"
    assert shown.read_text() == "<text>drawn</text>\n"
    assert run(tmp_path, PICTURE)[0] == 0
    shown.write_text("<text>another</text>\n")
    assert run(tmp_path, PICTURE)[0] == 1
    status, message, _ = run(tmp_path, PICTURE.replace(" > curve.svg", ""), "--write")
    assert status == 1 and "pictures/curve.svg" in message


LONG = (  # take 20 seconds and more, and begin first
    *("learn/6-cost.md", "engine/5-property-suite.md", "engine/14-schedulers.md"),
    *("engine/15-rollouts.md", "engine/18-simulate.md", "engine/11-compare.md"),
)
PAGES = sorted(run_pages.pages(), key=lambda page: page not in [run_pages.DOCS / name for name in LONG])


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(run_pages.CHECKOUT)))
def test_the_page_shows_what_happens(page: Path) -> None:
    done = subprocess.run([sys.executable, run_pages.__file__, str(page)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)  # what was not run, and why
