"""`lfm2np record`, and `check --locate`: from a wrong answer to the operation, alone or beside others."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import PLAIN, mixture
from engines import Kept, checked_target, known_of
from faults import inject
from http_player import playing

from lfm2np.checkpoint.config_json import load_config
from lfm2np.checkpoint.tensors import open_checkpoint
from lfm2np.commands.cli.program import main
from lfm2np.commands.cli.shared import terminal
from lfm2np.engine.loading import Model
from lfm2np.oracle.check import Cause, Checked, judged
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer
from lfm2np.oracle.engines.target import TargetError
from lfm2np.oracle.locate.dump import read_dump
from lfm2np.oracle.locate.locate import locate
from lfm2np.oracle.recorders.locating import cause_of, cause_to_dump
from lfm2np.oracle.recorders.registry import record_of
from lfm2np.oracle.sending import send_all
from lfm2np.teaching import nano
from lfm2np.teaching.tutorial import SIZES, Adapter, Shown

pytestmark = [pytest.mark.rounding, pytest.mark.usefixtures("without_constants"), pytest.mark.slow]

FIXTURES = Path(__file__).parents[3] / "fixtures"
TRAINED = FIXTURES / "trained"
CONFIG = load_config(TRAINED)
WRONG = "lfm2np.teaching.tutorial:wrong"


# --- the command


def test_a_request_of_a_ragged_batch_is_written_with_its_steps(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "dump.safetensors"
    command = ["record", "lfm2np:", "--prompt-ids", "1,17,42", "--prompt-ids", "5 6", "--request", "1"]
    assert main([*command, "--max-tokens", "3", "-o", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: 4 tokens, in steps of 2, 1, 1; ")
    dump = read_dump(file, CONFIG)
    assert (dump.token_ids[:2].tolist(), dump.sizes, dump.format) == ([5, 6], (2, 1, 1), "float32")
    assert locate(open_checkpoint(TRAINED, CONFIG), CONFIG, dump).findings == ()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["vllm:", "--prompt-ids", "1"], 2, "'vllm:' can't be recorded: expected transformers:"),
        (["transformers:x.gguf", "--prompt-ids", "1"], 2, "x.gguf: recorded of a checkpoint directory"),
        (["http://127.0.0.1:1", "--prompt-ids", "1"], 2, "can't be recorded"),
        (["lfm2np:float8", "--prompt-ids", "1"], 2, "lfm2np:float8: expected one of"),
        (["lfm2np:", "--prompt-ids", "1,512"], 2, "512, expected 0 to vocab_size-1=511"),
        (["lfm2np:", "--prompt-ids", "1,x"], 2, "expected whole numbers"),
        (["os.path:join", "--prompt-ids", "1"], 3, "os.path:join: TypeError"),
        (["builtins:dict", "--prompt-ids", "1"], 3, "builtins:dict: "),
        (["collections:Counter", "--prompt-ids", "1"], 3, "collections:Counter"),
    ],
)
def test_what_cannot_be_recorded_is_one_line_and_no_file(
    tmp_path: Path, capsys: Any, arguments: list[str], code: int, words: str
) -> None:
    assert main(["record", *arguments, "-o", str(tmp_path / "dump")]) == code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("numerics", ["exact", "float32", "bfloat16"])
def test_a_mixture_is_recorded_and_located_by_the_commands(tmp_path: Path, capsys: Any, numerics: str) -> None:
    model, file = str(mixture(PLAIN)), str(tmp_path / "dump.safetensors")
    command = ["record", f"lfm2np:{numerics}", "--model", model, "--prompt-ids", "1,17,42", "--prompt-ids", "5 6"]
    assert main([*command, "--request", "1", "-o", file, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tensors"]["model.layers.1.feed_forward.experts_chosen"] == [5, 2]
    assert (shown["token_ids"][:2], shown["steps"], shown["unknown"]) == ([5, 6], [2, 1, 1, 1], [])
    assert main(["locate", file, "--model", model]) == 0
    assert "nothing exceeds its bound" in capsys.readouterr().out


class Failing:
    """An engine that breaks while it is recorded, and one that tells what can't be."""

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        pass

    def record(self, prompts: Any, request: int, max_tokens: int, recorder: Any) -> None:
        raise ValueError("first line\nsecond line")


class Printing(Adapter):
    """An engine that writes to standard output as it loads and runs."""

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        print("loading")
        super().__init__(Shown(model))

    def record(self, prompts: Any, request: int, max_tokens: int, recorder: Any) -> None:
        print("running")
        super().record(prompts, request, max_tokens, recorder)


def test_what_an_engine_prints_does_not_stand_in_the_answer(tmp_path: Path, capsys: Any) -> None:
    """Pinned: vLLM's log in front of the JSON of `check --locate`."""
    output = str(tmp_path / "dump.safetensors")
    assert main(["record", "test_record:Printing", "--prompt-ids", "5,6", "--json", "-o", output]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["output"] == output
    assert shown.err == "loading\nrunning\n"


def test_whatever_an_engine_raises_is_one_line() -> None:
    record = record_of("test_record:Failing", TRAINED, "float32")
    with pytest.raises(TargetError, match=r"test_record:Failing: ValueError: first line.*second line"):
        record([[1]], 0, 1)


# --- from verdict to cause


def located(model: Model, name: str, cases: tuple[str, ...], target: str = "lfm2np:float32") -> tuple[Checked, Cause]:
    """Of our own engine, asked and recorded while a fault is in it, and judged while none is."""
    with inject(name):
        collected = send_all(model, PythonTarget("lfm2np.suite.adapters:own", model.path), cases=cases)
    checked = judged(model, collected.abilities, "float32", collected.pairs, known=known_of(model))
    record = record_of(target, model.path, "float32")

    def faulty(prompts: Any, request: int, new: int, until: int | None = None) -> bytes:
        with inject(name):
            return record(prompts, request, new, until)

    tensors, known = open_checkpoint(model.path, model.config), known_of(model)
    cause = cause_of(checked, target, lambda: faulty, tensors, model, known=known)
    assert cause is not None
    return checked, cause


def test_a_wrong_operator_is_named_from_the_shortest_wrong_request_alone(model: Model) -> None:
    checked, cause = located(model, "rotation-backwards", ("short-prompts",))
    assert cause.finding is not None
    assert cause.finding["name"] == "model.layers.2.self_attn.k_rotated"
    assert (cause.beside, len(cause.prompts)) == (False, 1)
    rows = [position.row for position in checked.positions if position.verdict in ("BUG", "DRIFT")]
    assert len(cause.prompts[0]) + cause.max_tokens - 2 == min(rows)
    _, broken = located(model, "rotation-backwards", ("short-prompts",), "test_record:Failing")  # it costs no verdict
    assert broken.lines[1] == "not recorded        test_record:Failing: ValueError: first line second line"


def test_a_right_engine_has_no_cause(model: Model) -> None:
    checked = checked_target(model, Kept("lfm2np.suite.adapters:own", model.path), cases=("short-prompts",))
    renew = partial(record_of, "lfm2np:float32", model.path, "float32")
    assert cause_of(checked, "", renew, open_checkpoint(model.path, model.config), model) is None
    assert cause_to_dump(checked, "a server", "", "") is None


def test_every_report_has_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[tuple[dict[str, Any], str]] = []  # of --json, and without it
    monkeypatch.setattr(terminal, "print_result", lambda arguments, fields, text: printed.append((fields, text)))
    files = [part for ending in (".html", ".xml") for part in ("--report", str(tmp_path / f"r{ending}"))]
    assert main(["check", WRONG, "--cases", "short-prompts", "--locate", *files]) == 1
    ((fields, text),) = printed
    assert fields["figures"]["cause"]["finding"]["name"] == "model.layers.0.conv.state"
    where = "first wrong operation: layer 0, what the step found of the convolution"
    for ending in (".html", ".xml"):
        assert where in (tmp_path / f"r{ending}").read_text()
    assert "first wrong tensor  model.layers.0.conv.state (layer 0)" in (tmp_path / "r.html").read_text()
    assert "\nwhere it goes wrong\nrecorded            " in text
    assert where in text.split("engine  ")[0]


class Leaving:
    """An engine of which all but the first run is wrong: it leaves something behind. The probe is no run."""

    lacks = Adapter.lacks

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        self.inner, self.runs = Adapter(Shown(model)), -1

    def generate(self, requests: Any) -> list[list[Answer]]:
        (((answer,),), self.runs) = self.inner.generate(requests), self.runs + 1
        return [[replace(answer, logprobs=tuple(each - 3.0 * (self.runs > 1) for each in answer.logprobs or ()))]]


class Recorded(Leaving):
    def record(self, prompts: Any, request: int, max_tokens: int, recorder: Any) -> None:
        keep, self.runs = recorder.keep, self.runs + 1
        lift = 30.0 * (self.runs > 0) * (np.arange(512) == 7)
        recorder.keep = lambda name, rows: keep(name, rows + lift if name == "lm_head" else rows)
        self.inner.record(prompts, request, max_tokens, recorder)


def test_a_request_that_is_wrong_only_after_others_is_said_to_need_them(capsys: Any) -> None:
    """Pinned: a request that is right alone was said to be wrong alone."""
    command = ["check", "test_record:Recorded", "--cases", "short-prompts", "--max-num-seqs", "1", "--locate", "--json"]
    assert main(command) == 1
    report = json.loads(capsys.readouterr().out)
    cause = report["figures"]["cause"]
    assert (cause["request_id"], len(cause["prompts"]), len(cause["before"])) == ("short-prompts-2", 1, 1)
    assert "or one before it that was not dumped" in json.dumps(report)
    text = "\n".join(cause["lines"])
    assert "short-prompts-2: prompt of 1, 1 new, alone after short-prompts-1" in text and "lm_head" in text


class Stateless(Shown):
    """Its hits take the cached blocks, and zeros for the states behind them."""

    def admit(self) -> nano.Sequence:
        sequence = super().admit()
        self.states[sequence.slot] = 0.0
        return sequence


class Hitting(Adapter):
    """Records with its prefix cache, of which a recorder knows nothing."""

    def __init__(self, model: str, sizes: dict[str, Any]) -> None:
        super().__init__(Stateless(model, **{name: size for name, size in sizes.items() if name in SIZES}))

    def record(self, prompts: Any, request: int, max_tokens: int, recorder: Any) -> None:
        engine, engine.recorder = self.engine, recorder
        sequences = [engine.add(str(index), tuple(prompt), max_tokens) for index, prompt in enumerate(prompts)]
        engine.recorded = sequences[request]
        while engine.unfinished:
            engine.step()
        engine.recorded = None


def test_a_prefix_hit_is_recorded_and_its_state_located(capsys: Any) -> None:
    """Pinned: "step 0: start=16 after 0 tokens", of an engine that was handed the recorder."""
    assert main(["check", "test_record:Hitting", "--cases", "prefixes", "--first", "--locate", "--json"]) == 1
    cause = json.loads(capsys.readouterr().out)["figures"]["cause"]
    assert cause["finding"] is not None, cause["lines"]
    assert cause["finding"]["name"] == "model.layers.0.conv.state" and cause["before"]


def test_of_an_engine_without_a_recorder_the_request_to_dump_is_named(capsys: Any) -> None:
    """Pinned: exit code 3."""
    command = ["check", "test_record:Leaving", "--cases", "short-prompts", "--max-num-seqs", "1", "--locate", "--json"]
    assert main(command) == 1
    text = "\n".join(json.loads(capsys.readouterr().out)["figures"]["cause"]["lines"])
    assert "Leaving has no method record(" in text
    assert "short-prompts-2: prompt of 1, 1 new, alone; greedy" in text


def test_an_invalid_recorder_is_refused_before_any_request(capsys: Any) -> None:
    assert main(["check", WRONG, "--locate", "http://127.0.0.1:1"]) == 3
    assert "'http://127.0.0.1:1' can't be recorded" in capsys.readouterr().err


# --- a server shows answers only: its wrong request is to be dumped where it runs


def test_of_a_server_the_verdict_comes_and_then_how_to_dump_its_shortest_wrong_request(capsys: Any) -> None:
    """Pinned: exit code 3 and no verdict, "can't be recorded: expected transformers:..."."""

    def half_a_nat_off_late(reply: dict[str, Any]) -> None:
        for choice in reply.get("choices", ()):
            logprobs = choice["logprobs"]["token_logprobs"]
            logprobs[2:] = [logprob - 0.5 for logprob in logprobs[2:]]

    with playing("vllm") as server:
        server.spoil = half_a_nat_off_late
        assert main(["check", server.url, "--cases", "short-prompts", "--locate", "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    cause = output["figures"]["cause"]
    assert (output["exit_code"], cause["finding"], cause["max_tokens"]) == (1, None, 3)
    (prompt,) = cause["prompts"]
    assert cause["lines"][0].startswith(f"not recorded        {server.url} shows answers only")
    assert "short-prompts-1: prompt of 1, 3 new, alone; greedy" in cause["lines"][1]
    assert cause["lines"][2].split() == ["its", "prompt", "ids", str(prompt[0])]
    assert cause["lines"][-1] == "then                lfm2np locate dump.safetensors --format float32"
