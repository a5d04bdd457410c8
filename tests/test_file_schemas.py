"""The JSON Schemas of traces, results, transcripts, comparisons and vector sets, against files as written."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator
from lfm3_models import MODELS
from quantise import write_types

import lfm2np
from lfm2np import Engine, NgramDrafter, SamplingParams
from lfm2np.arithmetic import NAMES
from lfm2np.commands.cli import main
from lfm2np.oracle.engines.records_json import ANSWER_FIELDS, FIELDS, SAMPLING
from lfm2np.oracle.rollouts.rollout import FIELDS as ROLLOUT_FIELDS
from lfm2np.oracle.vectors.set_files import PACKAGED, packaged_set
from lfm2np.suite.strategies.tiny_models import loaded
from scheduler import POLICIES, FinishReason
from scheduler.plan import MoveKind
from scheduler.trace import VERSION

pytestmark = pytest.mark.slow

PACKAGE = Path(lfm2np.__file__).parent
TORTURE = Path(__file__).parent.parent / "fixtures" / "torture"


def read_schema(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((PACKAGE / path).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return schema


TRACE = read_schema("engine/schemas/trace.schema.json")
RESULTS = read_schema("engine/schemas/results.schema.json")
TRANSCRIPT = read_schema("oracle/schemas/transcript.schema.json")
COMPARE = read_schema("oracle/schemas/compare.schema.json")
VECTORS = read_schema("oracle/schemas/vectors.schema.json")


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def complaints(schema: dict[str, Any], lines: list[Any]) -> list[str]:
    validator = Draft202012Validator(schema)
    return [f"{line}"[:200] + f": {error.message}"[:200] for line in lines for error in validator.iter_errors(line)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Runs that have every kind of line and of move between them."""
    model, windowed, records = lfm2np.load(), loaded(MODELS["all kinds of layers"]), []
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def begun(**sizes: Any) -> tuple[Engine, io.StringIO]:
        file = io.StringIO()
        return Engine(model, block_size=4, drafter=NgramDrafter(), trace=file, **sizes), file

    cramped, cramped_file = begun(num_blocks=14, prefix_caching=False)  # requests are preempted
    for name in "abc":
        cramped.add_request(name, "copy: tivu zo sa di ->", greedy)
    roomy, roomy_file = begun(num_blocks=60, max_num_batched_tokens=24, policy="priority")
    roomy.add_request("a", "copy: tivu zo sa di ->", greedy, priority=2)
    roomy.add_request("b", "copy: tivu zo sa ->", SamplingParams(n=2, max_tokens=5, seed=1, prompt_logprobs=0))
    for _ in range(3):
        roomy.step()
    roomy.add_request("again", "copy: tivu zo sa di ->", greedy)
    roomy.preempt("a")
    for _ in range(2):
        roomy.step()
    roomy.fork("a", "child")
    roomy.abort("again")
    windows_file = io.StringIO()
    windows = Engine(windowed, block_size=2, num_blocks=12, trace=windows_file)
    for name in "xyz":
        windows.add_request(name, [5, 17, 3, 3, 9], greedy)
    windows.step()
    windows.fork("x", "child of x")
    for engine, file in ((cramped, cramped_file), (roomy, roomy_file), (windows, windows_file)):
        while engine.has_unfinished:
            engine.step()
        records += [json.loads(line) for line in file.getvalue().splitlines()]
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    arguments = ["generate", "--chat", "sort: 3 1", "--chat", "add: 3 + 4", "--max-tokens", "3"]
    assert main([*arguments, "--trace", str(path), "--trace-detail"]) == 0
    records += lines_of(path)
    experts = ["generate", "--model", str(TORTURE / "moe_published"), "--prompt-ids", "1,17,42", "--max-tokens", "2"]
    assert main([*experts, "--trace", str(path), "--trace-detail"]) == 0
    return [*records, *lines_of(path)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = tmp_path_factory.mktemp("results") / "results.jsonl"
    asked = path.with_name("requests.jsonl")
    asked.write_text('{"prompt": "add: 34 + 58 ->", "completion": " 92"}\n{"prompt_token_ids": [1, 17, 42]}\n')
    assert main(["score", "--requests", str(asked), "--save", str(path)]) == 0
    array = {"dtype": "<f4", "shape": [2], "base64": "AACAPwAAAEA="}
    return [*lines_of(path), {**lines_of(path)[0], "result": {"logits": array, "more": [None, True, 1, 0.5, "x"]}}]


@pytest.fixture(scope="module")
def transcript(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    path = tmp_path_factory.mktemp("transcript") / "answers.jsonl"
    check = ["check", "lfm2np.suite.adapters:own", "--cases", "short-prompts"]
    assert main([*check, "--save", str(path)]) == 0
    answers = [line for line in lines_of(path) if "kind" not in line]  # beside truths, which are of RESULTS
    return [*answers, *TRANSCRIPT["examples"]]


def committed_vectors(name: str) -> Any:
    return json.loads(packaged_set(name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Figures that have all: of a mixture in Q4_0, in which tokens differ."""
    folder = tmp_path_factory.mktemp("compare")
    moe = TORTURE.parent / "moe"
    (path,) = write_types(moe, ["Q4_0"], folder)
    lines = [{"prompt_token_ids": [1, 20, 21, 22, 23]}, {"prompt": "add: 34 + 58 ->", "completion": " 92"}]
    (folder / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["compare", str(moe), str(path), "--requests", str(folder / "r.jsonl"), "--json"]) == 0
    figures = json.loads(said.getvalue())["figures"]
    assert figures["quantised"][0]["mismatches"]["count"]
    return [figures]


FILES = [("trace", TRACE), ("results", RESULTS), ("transcript", TRANSCRIPT), ("compare", COMPARE)]


@pytest.mark.rounding
@pytest.mark.parametrize(("name", "schema"), FILES, ids=[name for name, _ in FILES])
def test_what_is_written_is_of_the_schema(name: str, schema: dict[str, Any], request: pytest.FixtureRequest) -> None:
    lines = request.getfixturevalue(name)
    assert lines
    assert complaints(schema, lines) == []


@pytest.mark.parametrize("name", PACKAGED)
def test_the_committed_vectors_are_of_the_schema(name: str) -> None:
    document = committed_vectors(name)
    assert complaints(VECTORS, [document]) == []
    named = {note for entry in (*document["vectors"], *document["scripts"]) for note in entry["flags"]}
    assert named == document["notes"].keys()


OPTIONAL = {  # what an object may lack, by schema; in those that are not here it has all
    "trace": {"blas_kernel", "checksums", "model", "numerics", "seed", "sha256", "sliding_window", "num_window_blocks"}
    | {"window_table", "window", "context", "expert", "chosen", "normalised", "factor"},
    "transcript": FIELDS | SAMPLING | set(ANSWER_FIELDS) | {"sha256"},
    "rollouts": set(ROLLOUT_FIELDS) - {"prompt_token_ids", "token_ids"},
    "chats": {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"},
    "exec-protocol": {"stops", "abort_after", "prompt_logprobs", "stop", *ANSWER_FIELDS},
}
REQUIRED = {"prompt_token_ids", "max_tokens", "case"}  # of a transcript's request
ANYTHING = {
    "results": {"item", "result"},
    "chats": {"tools", "arguments"},
    "rollouts": {"metadata"},
}  # values of any kind


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """All of a schema that name their properties, but for conditions."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key not in ("if", "then", "else", "anyOf"):
            yield from objects(value)
    if isinstance(node, dict) and isinstance(node.get("properties"), dict):
        yield node


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*/schemas/*.schema.json")), ids=lambda path: path.name)
def test_an_object_has_no_other_names_what_may_be_missing_is_listed_and_each_value_is_of_a_kind(path: Path) -> None:
    name = path.name.removesuffix(".schema.json")
    for rule in objects(read_schema(str(path.relative_to(PACKAGE)))):
        assert rule.get("additionalProperties") is False or "propertyNames" in rule, rule
        assert set(rule["properties"]) - set(rule.get("required", ())) <= OPTIONAL.get(name, set()) - REQUIRED, rule
        free = {key for key, value in rule["properties"].items() if not value.keys() - {"description"}}
        assert free <= ANYTHING.get(name, set()), rule


def test_every_kind_of_hint_result_and_move_of_a_vector_set_is_in_the_committed_one() -> None:
    document, rules = committed_vectors("trained"), VECTORS["$defs"]
    steps = [step for script in document["scripts"] for step in script["steps"]]
    for seen, one_of in (
        ({hint["kind"] for vector in document["vectors"] for hint in vector["schedule"]}, rules["hint"]["oneOf"]),
        (
            {move["kind"] for step in steps for move in step["moves"]},
            rules["step"]["properties"]["moves"]["items"]["oneOf"],
        ),
    ):
        assert seen == {reference["$ref"].rpartition("/")[2] for reference in one_of}
    results = {position["result"] for vector in document["vectors"] for position in vector["positions"]}
    assert results == set(rules["position"]["properties"]["result"]["enum"])


def test_every_kind_of_line_and_of_move_was_seen(trace: list[Any]) -> None:
    kinds = {definition["$ref"].rpartition("/")[2] for definition in TRACE["oneOf"]}
    assert {line["kind"] for line in trace} == kinds
    moves = {move["kind"] for line in trace if line["kind"] == "step" for move in line["plan"]["moves"]}
    assert moves == set(get_args(MoveKind))
    assert any(line["plan"]["preempted"] for line in trace if line["kind"] == "step")
    assert any(line["drafts"] for line in trace if line["kind"] == "step")


def test_the_schemas_have_the_names_of_the_code() -> None:
    definitions = TRACE["$defs"]
    assert definitions["header"]["properties"]["version"] == {"const": VERSION}
    assert definitions["header"]["properties"]["numerics"] == {"enum": list(NAMES)}
    assert definitions["config"]["properties"]["policy"] == {"enum": list(POLICIES)}
    assert definitions["move"]["properties"]["kind"] == {"enum": list(get_args(MoveKind))}
    reasons = {"enum": [reason.value for reason in FinishReason]}
    assert definitions["finish"]["properties"]["reason"] == reasons
    assert definitions["step"]["properties"]["finished"]["additionalProperties"] == reasons
    request, answer = TRANSCRIPT["$defs"]["request"], TRANSCRIPT["$defs"]["answer"]
    assert set(request["propertyNames"]["enum"]) == FIELDS | SAMPLING >= set(request["properties"]) >= FIELDS
    assert set(answer["properties"]) == set(ANSWER_FIELDS)


@pytest.mark.parametrize(
    "wrong", [{"dtype": ">f4"}, {"base64": "no base 64"}, {"shape": [-1]}, {"shape": None}], ids=str
)
def test_a_wrong_array_is_no_result(results: list[Any], wrong: dict[str, Any]) -> None:
    line = copy.deepcopy(results[-1])
    line["result"]["logits"] |= wrong
    assert complaints(RESULTS, [line])
