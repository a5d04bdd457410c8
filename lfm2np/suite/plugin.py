"""pytest's plugin: the options of `pytest --pyargs lfm2np.suite`, and which files of tests they choose.

It is loaded into every run of pytest where this package is installed, so it must import little and disturb no one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

PROFILES = ("quick", "ci", "deep")
# The names of judging.formats.FORMATS, which would load NumPy here.
NUMBER_FORMATS = ("float32", "float16", "bfloat16", "q8", "w8a8", "int8", "int4")


SIZES = {  # option -> its name in engines.protocol.TOLD, and what it is
    "--block-size": ("block_size", "tokens of one of the engine's blocks"),
    "--max-num-batched-tokens": ("max_num_batched_tokens", "most tokens of a step of the engine"),
    "--max-num-seqs": ("max_num_seqs", "requests that the engine runs at once"),
    "--max-model-len": ("max_model_len", "most tokens of a request"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    """Options only where the suite is asked for: anyone else's --model or --profile are his own."""
    if requests_for_suite(args):
        add_options(parser)


def requests_for_suite(args: Iterable[object]) -> bool:
    return any("lfm2np.suite" in str(arg) or "lfm2np/suite" in str(arg) for arg in args)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("lfm2np.suite")
    options: dict[str, dict[str, Any]] = {
        "--engine": {"metavar": "MODULE:FACTORY", "help": "the engine to test (default: lfm2np's own)"},
        "--scheduler": {
            "metavar": "MODULE:FACTORY",
            "help": "a scheduler to test instead, without a model: see scheduler/protocol.py",
        },
        "--tool-parser": {
            "metavar": "MODULE:FACTORY",
            "help": "a parser of LFM2's replies to test instead, without a model: see suite/tool_parsers/parsers.py",
        },
        "--server": {
            "metavar": "URL",
            "help": "a server to hold against itself instead, of any model: see `lfm2np check --against itself`",
        },
        "--vocab-size": {"metavar": "N", "help": "with --server: ids below N are sent"},
        "--budget": {"metavar": "MINUTES", "help": "with --server: ask nothing new after so many minutes"},
        "--bitwise": {"action": "store_const", "const": "yes", "help": "with --server: expect equal bits"},
        "--faults": {
            "action": "store_const",
            "const": "yes",
            "help": "with --scheduler: also put bugs of real engines into it; each has to be caught",
        },
        "--properties": {
            "action": "store_const",
            "const": "yes",
            "help": "print what is tested and run nothing: the properties, with --scheduler the demands",
        },
        "--xfails": {"metavar": "FILE", "help": "property ids that are known to fail, one a line, # for comments"},
        "--profile": {"choices": PROFILES, "help": "how many examples (quick)"},
        "--number-format": {
            "choices": NUMBER_FORMATS,
            "help": "how the engine computes: what that explains is no failure (default: it is exact). The same as "
            "--format of lfm2np check; --numerics is lfm2np's own arithmetic",
        },
    }
    for name, (_, meaning) in SIZES.items():
        options[name] = {"metavar": "N", "help": f"{meaning}: lengths are drawn around its multiples"}
    for name, settings in options.items():
        with contextlib.suppress(ValueError):  # another plugin has an option of that name: see `option`
            group.addoption(name, **settings)


def option(config: pytest.Config, name: str) -> str | None:
    """--engine, --xfails and so on; where another plugin owns that name, LFM2NP_ENGINE, LFM2NP_XFAILS."""
    value = getattr(config.option, name.replace("-", "_"), None)
    value = value if isinstance(value, str) else None
    return value or os.environ.get(f"LFM2NP_{name.upper().replace('-', '_')}")


def chosen_profile(config: pytest.Config) -> str:
    name = option(config, "profile") or "quick"
    if name not in PROFILES:
        raise pytest.UsageError(f"profile {name!r}: expected one of {', '.join(PROFILES)}")
    return name


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """--properties: the catalogue in place of the tests."""
    if option(config, "properties") is None:
        return None
    if option(config, "tool-parser") is not None:
        from lfm2np.suite.tool_parsers.properties import PROPERTIES

        print("\n".join(f"{name}\n     {sentence}" for name, (sentence, _) in PROPERTIES.items()))
        return 0
    print("\n".join(f"{name}\n     {text}" for name, text in catalogue(option(config, "scheduler") is not None)))
    return 0


def catalogue(of_schedulers: bool) -> Iterable[tuple[str, str]]:
    """What is tested: names, each with its sentence. Of schedulers what each must do, then what one may promise."""
    if of_schedulers:
        from lfm2np.suite.schedulers.demands import DEMANDS
        from scheduler.protocol import POLICIES

        return [*DEMANDS.items(), *((f"{name} (promised)", text) for name, text in POLICIES.items())]
    from lfm2np.suite.catalogue import ALL

    entries = []
    for prop in ALL:
        bugs = f"\n     would have caught {', '.join(prop.bugs)}" if prop.bugs else ""
        entries.append((f"{prop.id}  (law {prop.law}; needs {', '.join(prop.needs)})", prop.sentence + bugs))
    return entries


FILES = {  # by option
    "engine": ("test_conformance.py",),
    "scheduler": ("test_schedulers.py",),
    "faults": ("test_schedulers.py", "test_scheduler_faults.py"),
    "server": ("test_server.py",),
    "tool-parser": ("test_tool_parsers.py",),
}
SUMMARIES = pytest.StashKey[list[Callable[[], Iterable[str]]]]()  # each gives lines for the end of the run


def summarise(config: pytest.Config, lines: Callable[[], Iterable[str]]) -> None:
    """At the end of the run, these are printed."""
    config.stash.setdefault(SUMMARIES, []).append(lines)


def known_failures(path: str | None, known: Collection[str]) -> dict[str, str]:
    """Property id -> the line's comment. UsageError for a file that can't be read or an id that is not known."""
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise pytest.UsageError(f"--xfails {path}: {problem}") from None
    failures = {}
    for number, line in enumerate(text.splitlines(), start=1):
        property_id, _, comment = (part.strip() for part in line.partition("#"))
        if property_id and property_id not in known:
            raise pytest.UsageError(f"--xfails {path}, line {number}: {property_id!r} is no property")
        if property_id:
            failures[property_id] = comment or "known to fail"
    return failures


def pytest_configure(config: pytest.Config) -> None:
    """UsageError at once for a --scheduler that is none."""
    if not requests_for_suite((*config.invocation_params.args, *config.args)):
        return
    if getattr(config.option, "scheduler", None) == "":
        raise pytest.UsageError("--scheduler: an empty name, expected package.module:factory")
    subjects = [
        f"--{name}" for name in ("scheduler", "engine", "server", "tool-parser") if option(config, name) is not None
    ]
    if len(subjects) > 1:
        raise pytest.UsageError(f"{' and '.join(subjects)}: expected one of them")
    name = option(config, "scheduler")
    if name is None and option(config, "faults"):
        raise pytest.UsageError("--faults: expected with --scheduler")
    if name is None:
        return
    from lfm2np.errors import RequestError
    from lfm2np.suite.schedulers.suite import require_scheduler

    try:
        require_scheduler(name)
    except (RequestError, AssertionError) as error:
        raise pytest.UsageError(f"--scheduler {name}: {error}") from None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The files that no option asks for: see FILES."""
    chosen = next((name for name in ("faults", "scheduler", "server", "tool-parser") if option(config, name)), "engine")
    ours = Path(__file__).parent in collection_path.parents
    left_out = {file for files in FILES.values() for file in files}.difference(FILES[chosen])
    return True if ours and collection_path.name in left_out else None


def given_sizes(config: pytest.Config) -> dict[str, Any]:
    """By names of SIZES; UsageError for one that is none."""
    from lfm2np.errors import Lfm2npError
    from lfm2np.suite.strategies.lengths import lengths_of

    sizes: dict[str, Any] = {}
    try:
        for name, (size, _) in SIZES.items():
            value = option(config, name.removeprefix("--"))
            if value is not None:
                sizes[size] = int(value) if value.isdecimal() else value
                lengths_of({size: sizes[size]}, name)
    except Lfm2npError as error:
        raise pytest.UsageError(str(error)) from None
    return sizes


def cases(values: dict[str, Any], config: pytest.Config) -> list[Any]:
    """A parameter for each value, by its id; those of --xfails must fail."""
    xfails = known_failures(option(config, "xfails"), values)
    return [
        pytest.param(
            value, id=name, marks=[pytest.mark.xfail(reason=xfails[name], strict=True)] if name in xfails else []
        )
        for name, value in values.items()
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    for lines in config.stash.get(SUMMARIES, []):
        for line in lines():
            terminalreporter.write_line(line, yellow=line.startswith("WARNING"))
