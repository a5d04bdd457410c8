"""The same bits on other machines, emulated: python tests/machines.py [--quick] [--only digest,batch] [s390x arm64 ...]

Of each architecture a folder is put together from Debian's packages (Python, NumPy, netlib's reference BLAS, OpenBLAS;
trixie's, or forky's where the mirror's copy of trixie is not whole) and wheels (safetensors, tokenizers), which qemu's
user emulation then runs. Under each BLAS: the digests that the README states (the trained fixture's and the mixture of
experts'), golden vectors, a batch in a cramped cache held against sequential generation, files and figures of quantised
types and the tests of exp, log, sin, cos and of exact products. s390x is big-endian. Nothing is installed, and nothing
is written but the work folder and __pycache__: apt is run with lists, caches and a state of its own. Exit code 1 if
anything is otherwise than on every other machine.

Needs a Debian, for apt-get, dpkg and its mirror, pip, and qemu: apt-get install qemu-user-static
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from machine_folders import BLAS, MACHINES, TOP, Failed, Machine, launcher, put_together, tell

Commands = Mapping[str, Sequence[str]]  # words of the command line, by what the command is called here
DIGESTS = dict(
    re.findall(r'^([A-Z0-9]+)_DIGEST = "(\w{64})"', (TOP / "tests" / "test_bits.py").read_text(), re.MULTILINE)
)

# Prompts, and what the trained fixture answers; 14 blocks of 2 tokens do not hold all of them at once.
ASKED = {"sort: 7 2 9 4 1 ->": " 1 2 4 7 9", "add: 20 + 97 ->": " 117", "recall: f = 7, r = 2, v = 2; f ->": " 7"}
BATCH = ["generate", "--prove", "--json", "--block-size", "2", "--num-blocks", "14", "--max-num-batched-tokens", "7"]
BATCH += ["--max-tokens", "10", *(word for prompt in ASKED for word in ("--prompt", prompt))]
NUMERICS = [f"tests/arithmetic/test_{name}.py" for name in ("exact", "exact_attention")]
NUMERICS += ["tests/truth/test_elementary.py"]
PYTEST = ["pytest", "-q", "-p", "no:cacheprovider", *NUMERICS]
EIGHT_TYPES = [*PYTEST[:4], "tests/oracle/compare/test_eight_types.py", "-k"]
# Left out, as they ask for no bits: how close attention is to float64, which takes minutes emulated, and a control in
# plain float32, in which OpenBLAS's kernel for the Athlon dies under qemu.
NOT_BITS = ["-k", "not of_float64_at_any_length and not plain_float32"]
COMMANDS = {
    "digest": ["info", "--digest"],
    "mixture": ["info", "--digest", "--model", str(TOP / "fixtures" / "moe")],
    "lfm3": ["info", "--digest", "--model", str(TOP / "fixtures" / "lfm3")],
    "integers": ["info", "--digest", "--numerics", "integers"],
    "vectors": ["vectors", "verify", "--json"],
    "batch": BATCH,
    "compare": [*EIGHT_TYPES, "every_machine and all"],
    "tests": [*PYTEST, *NOT_BITS],
}
QUICK_TESTS = "(python_integers or order_of_its_terms or either_zero or zero_keeps_its_sign or both_ways)"
QUICK_TESTS += " and not longest and not plain_float32"
QUICK = {name: COMMANDS[name] for name in ("digest", "mixture", "lfm3", "integers", "batch")}
QUICK |= {"tests": [*PYTEST, "-k", QUICK_TESTS]}

# Runs there: what the machine is, and then one command after the other, each a line of JSON.
WORKER = """
import ctypes, contextlib, io, json, platform, sys, time
import numpy, lfm2np
from lfm2np.commands.cli import main

def config(path):
    asked = getattr(ctypes.CDLL(path), "openblas_get_config", None)
    if asked is None:
        return None
    asked.restype = ctypes.c_char_p
    return asked().decode()

numpy.ones((2, 2)) @ numpy.ones((2, 2))
mapped = sorted({line.split()[-1] for line in open("/proc/self/maps") if "blas" in line or "lapack" in line})
facts = {"python": platform.python_version(), "numpy": numpy.__version__, "order": sys.byteorder}
facts |= {"machine": platform.machine(), "lfm2np": lfm2np.__file__, "mapped": {path: config(path) for path in mapped}}
print(json.dumps(facts), flush=True)
for name, words in json.loads(sys.argv[1]).items():
    began, worked, said = time.monotonic(), time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(said):
        if words[0] == "pytest":
            import pytest
            code = int(pytest.main(words[1:]))
        else:
            code = main(words)
    took = {"seconds": time.monotonic() - began, "processor_seconds": time.process_time() - worked}
    print(json.dumps({"name": name, "code": code, "said": said.getvalue(), "took": took}), flush=True)
"""


@dataclass
class Row:
    """What one machine did under one BLAS. `wrong`: all that is otherwise than it has to be."""

    machine: Machine
    blas: str
    facts: dict[str, Any] = field(default_factory=dict)
    cells: dict[str, str] = field(default_factory=dict)  # by command
    took: dict[str, dict[str, float]] = field(default_factory=dict)  # by command: seconds, processor_seconds
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.machine.name}, {self.blas}"


# --- what it does there


def run(row: Row, folder: Path, commands: Commands) -> None:
    """Runs the commands, one after the other in one process, and writes into the row what came of them."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile("w+") as errors:
        python = launcher(row.machine, folder, row.blas, Path(scratch))
        command = [python, "-c", WORKER, json.dumps(commands)]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        with subprocess.Popen(
            command, cwd=TOP, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            for line in process.stdout or ():
                message = json.loads(line)
                if "name" not in message:
                    row.facts = message
                    row.wrong += wrong_facts(row, folder)
                    continue
                name = message["name"]
                row.took[name] = message["took"]
                row.cells[name], wrong = JUDGES[name](message["code"], message["said"])
                row.wrong += [f"{name}: {problem}" for problem in wrong]
                took = "{seconds:.0f} s, {processor_seconds:.0f} s of a processor".format(**message["took"])
                tell(f"{row}: {name}: {row.cells[name]} ({took})")
        errors.seek(0)
        said = errors.read().strip()[-2000:]
    for name in commands:
        row.cells.setdefault(name, "none")
    if process.returncode or len(row.took) < len(commands):
        row.wrong.append(f"ended with {process.returncode} after {', '.join(row.took) or 'nothing'}")
    if row.wrong and said:
        row.wrong.append(said)
    for problem in row.wrong:
        tell(f"{row}: WRONG: {problem}")


def wrong_facts(row: Row, folder: Path) -> list[str]:
    """If it is another machine, Python, checkout or BLAS than it should be."""
    facts, libraries = row.facts, folder / "root" / "usr" / "lib" / row.machine.triplet
    expected = {"order": row.machine.order, "machine": row.machine.wheel, "lfm2np": str(TOP / "lfm2np" / "__init__.py")}
    wrong = [f"{name}: {facts[name]}, expected {value}" for name, value in expected.items() if facts[name] != value]
    ours = {libraries / BLAS[row.blas], *([libraries / "lapack"] if row.blas == "netlib" else [])}
    if not facts["mapped"] or {Path(path).parent for path in facts["mapped"]} != ours:
        wrong.append(f"libraries {', '.join(facts['mapped'])}: expected those of {', '.join(map(str, sorted(ours)))}")
    if bool(config_of(facts)) != (row.blas == "OpenBLAS"):
        wrong.append(f"BLAS {config_of(facts) or 'without openblas_get_config'}, expected {row.blas}")
    return wrong


def config_of(facts: Mapping[str, Any]) -> str:
    """What OpenBLAS says of itself; empty if none is loaded."""
    return next(filter(None, facts.get("mapped", {}).values()), "")


def judge_digest(expected: str, code: int, said: str) -> tuple[str, list[str]]:
    digest = said.strip()
    wrong = [] if (code, digest) == (0, expected) else [f"{digest}, expected {expected}"]
    return f"{digest[:8]}...{digest[-4:]}", wrong


def judge_vectors(code: int, said: str) -> tuple[str, list[str]]:
    return (f"{json.loads(said)['figures']['vectors']} as stated", []) if code == 0 else ("differ", [said])


def judge_batch(code: int, said: str) -> tuple[str, list[str]]:
    """A verified run, and that its cache was too small: else nothing was preempted, and little was verified."""
    report = json.loads(said) if said else {"summary": {"proved": False, "preemptions": 0}, "outputs": []}
    summary, answers = report["summary"], [output["outputs"][0]["text"] for output in report["outputs"]]
    wrong = [] if (code, summary.get("proved")) == (0, True) else [f"not verified: {said[-500:]}"]
    wrong += [] if answers == list(ASKED.values()) else [f"answers {answers}, expected {list(ASKED.values())}"]
    wrong += [] if summary["preemptions"] else ["no preemption, expected some"]
    return f"{'not ' if wrong else ''}verified, {summary['preemptions']} preempted", wrong


def judge_tests(code: int, said: str) -> tuple[str, list[str]]:
    passed = re.search(r"(\d+) passed", said)
    right = code == 0 and passed is not None and not re.search(r"\d+ (failed|error|skipped)", said)
    last = said.strip().splitlines()[-1:] or [""]
    return (f"{passed[1]} passed" if right and passed else last[0]), [] if right else [said[-3000:]]


JUDGES = {
    "digest": partial(judge_digest, DIGESTS["TRAINED"]),
    "mixture": partial(judge_digest, DIGESTS["MOE"]),
    "lfm3": partial(judge_digest, DIGESTS["LFM3"]),
    "integers": partial(judge_digest, DIGESTS["TRAINED"]),
    "batch": judge_batch,
    "vectors": judge_vectors,
    "compare": judge_tests,
    "tests": judge_tests,
}


# --- what is shown


def blas_text(row: Row) -> str:
    """With its version: OpenBLAS's own words, netlib's by the name of its file."""
    words = config_of(row.facts).split()
    if words:
        cores = [word for word in words[2:] if not re.match(r"NO_|USE_|DYNAMIC|MAX_|SINGLE|BUILD|=", word)]
        return " ".join(["OpenBLAS", words[1], *cores])
    return " ".join([row.blas, *re.findall(r"libblas\.so\.(3\.\d+.*)", "\n".join(row.facts.get("mapped", ())))])


def table(rows: Sequence[Row], commands: Sequence[str]) -> Iterator[str]:
    titles = ["machine", "byte order", "Python", "NumPy", "BLAS", *commands]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for row in rows:
        facts = [str(row.facts.get(name, "none")) for name in ("order", "python", "numpy")]
        name = row.machine.name + (" **WRONG**" if row.wrong else "")
        cells = [name, *facts, blas_text(row), *(row.cells.get(command, "not run") for command in commands)]
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=f"of {', '.join(MACHINES)} (all of them)")
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(COMMANDS)} (all of them)")
    parser.add_argument(
        "--quick", action="store_true", help="no vectors, few tests, with netlib's BLAS the digests only"
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lfm2np" / "machines"
    parser.add_argument(
        "--work", type=Path, default=cache, metavar="DIR", help="where the machines are kept (%(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (%(default)s)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.machines if name not in MACHINES]
    if unknown:
        parser.error(f"{unknown[0]}: no such machine, expected one of {', '.join(MACHINES)}")
    machines = [MACHINES[name] for name in arguments.machines or MACHINES]
    commands = QUICK if arguments.quick else COMMANDS
    asked = arguments.only.split(",") if arguments.only else list(commands)
    for name in asked:
        if name not in commands:
            parser.error(f"--only {name}: expected some of {','.join(commands)}")
    chosen = [name for name in commands if name in asked]
    work = arguments.work.resolve()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        folders = {machine.name: pool.submit(put_together, machine, work) for machine in machines}
        both = ["info", "--digest", "mixture", "lfm3"] if arguments.quick else chosen
        chosen_by = {blas: [name for name in chosen if blas == "OpenBLAS" or name in both] for blas in BLAS}
        rows = [Row(machine, blas) for machine in machines for blas in BLAS if chosen_by[blas]]
        words = {blas: {name: commands[name] for name in names} for blas, names in chosen_by.items()}
        first = sorted(rows, key=lambda row: row.blas == "netlib")  # each machine compiles its Python once
        for done in [pool.submit(tried, row, folders[row.machine.name], words[row.blas]) for row in first]:
            done.result()
    print("\n".join(table(rows, chosen)))
    return int(any(row.wrong for row in rows))


def tried(row: Row, folder: Future[Path], commands: Commands) -> None:
    """As `run`; what keeps the machine from being run is wrong with the row."""
    try:
        run(row, folder.result(), commands)
    except Failed as problem:
        row.wrong.append(str(problem))
        tell(f"{row}: WRONG: {problem}")


if __name__ == "__main__":
    raise SystemExit(main())
