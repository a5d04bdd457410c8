"""What can't be met is one line that names it, with the exit code that the help says: tables of commands as typed."""

from __future__ import annotations

import json
import shlex
import sys
from itertools import product
from pathlib import Path

import pytest

import lfm2np
from lfm2np.checkpoint.loaded import checkpoint_path
from lfm2np.errors import CheckpointError

TORTURE = Path(__file__).parents[3] / "fixtures" / "torture"
CHECK = "check lfm2np.teaching.tutorial:right --cases short-prompts"
VET = "vet http://127.0.0.1:9 --candidate a=nowhere"
ROLLOUTS = f"rollouts {lfm2np.trained_fixture().parent / 'rollouts' / 'planted_pack.jsonl'}"
DRAFTING = "generate --prompt a --speculative draft"
SMALL = "simulate poisson:prompt=100,output=1-40,requests=60 --rate 5"
MANY = f"{SMALL} --sweep policy=fcfs,static --sweep rate=2,8"
LATE = [  # only the engine, or the reference, can tell
    ("--prompt-ids 300", "300"),
    ("--prompt-ids -1", "-1"),
    ("--prompt-ids 1 --max-tokens 0", "max_tokens 0: expected a whole number, at least 1"),
    ("--prompt-ids 1 --logprobs -1", "logprobs -1: expected a whole number, 0 to 300"),
    ("--prompt-ids 1 --logprobs 301", "logprobs 301"),
    (f"--prompt-ids {','.join(['1'] * 128)}", "prompt of 128 tokens"),
    (f"--prompt {'a' * 500}", "prompt of 501 tokens"),
]
FILES = {
    "TWO": '{"prompt": "a"}\n{"prompt": "ab"}',
    "TWICE": '{"prompt": "ab", "request_id": "1"}\n{"prompt": "ab"}',
    "empty.jsonl": "",
    "TEXT": "hello\n",
    "plain.jsonl": '{"at":0,"prompt_tokens":3,"output_tokens":1}',
    "r.html": '{"prompt": "a"}',
    "bad.jsonl": '{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [1]}',
}
HOWS = ("--replay", "--terminal")
REFUSED: list[tuple[str, int, str]] = [
    # MODEL: the tiny checkpoint of 300 tokens
    *((f"generate --model MODEL {words}", 2, named) for words, named in LATE),
    *((f"generate --model MODEL {words} --sequential", 2, named) for words, named in LATE),
    ("generate --model MODEL --prompt-ids ''", 2, "--prompt-ids ''"),
    *(
        (f"generate --model MODEL --prompt-ids {ids}", 2, "whole numbers with commas")
        for ids in ("1,,2", "1.5", "1_0", "+1", "\u0661")
    ),
    *(
        (f"generate --model MODEL --prompt-ids 1,{ids}", 2, "a number is too large, expected at most 18 digits")
        for ids in ("9" * 19, "9" * 5000)
    ),
    ("generate --model MODEL --prompt-file /nowhere", 2, "/nowhere: does not exist"),
    ("generate --model MODEL --prompt-file /", 2, "/: is not a regular file"),
    ("generate --model MODEL --prompt \udcff", 2, "surrogate"),
    ("generate --model MODEL --prompt a --system b", 2, "--system goes with --chat"),
    ("score --model MODEL --prompt a --completion-ids x", 2, "--completion-ids 'x'"),
    ("score --model MODEL --prompt-ids 1", 2, "1 token to score: expected 2 to max_position_embeddings=128"),
    (f"score --model MODEL --prompt-ids {','.join(['1'] * 129)}", 2, "129 tokens to score"),
    ("score --model MODEL --prompt-ids 1,300", 2, "300"),
    # numbers that no clock or generator takes
    *((f"{command} --timeout {seconds}", 3, "--timeout ") for command in (CHECK, VET) for seconds in ("nan", "1e10")),
    *((f"{CHECK} --seed {seed}", 3, "--seed ") for seed in ("-1", "99999999999999999999")),
    # where 2 is a verdict on an engine, a mistyped option is 3: also one that the command does not know
    *((f"{name} x --unknown", 3, "--unknown") for name in ("check", "fuzz", "rollouts", "locate")),
    *((name, 3, "required") for name in ("check", "fuzz", "vet", "rollouts", "locate")),
    *((words, 2, "") for words in ("serve --port", "lab --port many", "record", "score", "info --prompt a")),
    *((f"generate {words}", 2, "") for words in ("", "--prompt", "--prompt a --prompt-ids 1", "--prompt a --chat b")),
    ("generate --prompt a --numerics float8", 2, "; did you mean float64? (see lfm2np "),
    ("generate --prompt a --max-tokens many", 2, "--max-tokens"),
    ("info --digest --trust", 2, "--trust"),
    # a command or an option that is misspelt
    ("chek http://127.0.0.1:9", 3, "; did you mean check? (see lfm2np "),
    ("check a:b --modle x", 3, "; did you mean --model? (see lfm2np "),
    ("check a:b --mod x", 3, "; did you mean --model? (see lfm2np "),  # no abbreviations: --out would be --output
    ("check a:b --formt=bfloat16", 3, "; did you mean --format? (see lfm2np "),
    ("check a:b --format bfloat61", 3, "; did you mean bfloat16? (see lfm2np "),
    ("vectors mak", 3, "; did you mean make? (see lfm2np "),
    ("vectors make --modl x -o y", 3, "; did you mean --model? (see lfm2np "),
    ("vectors verify -o x", 3, "-o"),  # an option of make
    ("lab --model x", 2, "--model"),
    ("zzzz", 3, "zzzz"),
    ("digest -q", 3, "digest"),
    # an option whose first value would be lost, a file that would
    ("generate --prompt-ids 1,5 --prompt-ids 1,6", 2, "argument --prompt-ids: given twice"),
    ("rollouts x.jsonl --sample 1 --sample=2", 3, "argument --sample: given twice"),
    ("generate --requests TWO --trace ./TWO", 2, "argument --trace: TWO is another argument's file"),
    ("compare a b --requests r.html --report r.html", 2, "--report: r.html is another argument's file"),
    ("draw TWO -o TWO", 2, "argument -o/--output: TWO is another argument's file"),
    ("score --requests TWO --save /dev/full", 2, "/dev/full: is not a regular file"),
    # options of the engine
    ("generate --prompt a --num-speculative-tokens 3", 2, "--num-speculative-tokens goes with"),
    ("generate --prompt a --speculative none --num-speculative-tokens 3", 2, "--num-speculative-tokens goes with"),
    ("generate --prompt a --speculative ngram --num-speculative-tokens 0", 2, "num_speculative_tokens 0"),
    ("generate --prompt a --speculative ngram --draft-model x", 2, "--draft-model goes with --speculative draft"),
    ("generate --prompt a --draft-sampling random", 2, "--draft-sampling goes with --speculative draft"),
    (f"{DRAFTING} --draft-model /nowhere", 3, "/nowhere"),
    (f"{DRAFTING} --draft-model {TORTURE / 'wide_heads'}", 3, "vocab_size 79, expected 512"),
    (f"{DRAFTING} --model {lfm2np.trained_fixture()}", 2, "needs a --draft-model"),
    *(
        (f"{command} {name} 1", 2, f"{name} goes with --policy waiting-served")
        for name in ("--waiting-served-ratio", "--max-waiting-tokens")
        for command in (
            *("generate --prompt a", "generate --prompt a --policy static", "serve --port 0"),
            *("simulate poisson: --policy static", "simulate poisson: --sweep policy=fcfs,static"),
        )
    ),
    *(
        (f"generate --prompt a --sequential {words}", 2, f"{words.split()[0]}: not with --sequential, which runs no ")
        for words in ("--num-blocks 9", "--policy fcfs", "--no-prefix-caching", "--trace x", "--max-waiting-tokens 3")
    ),
    ("generate --prompt a --block-size 0", 2, "block_size 0"),
    ("generate --prompt 'add: 20 + 97' --num-blocks 1 --block-size 1", 2, "blocks"),
    ("generate --prompt a --max-num-seqs 0", 2, "max_num_seqs 0"),
    ("generate --prompt a --seed -1", 2, "seed -1"),
    ("generate --prompt a --temperature nan", 2, "temperature nan"),
    ("serve --port 70000", 2, "--port"),
    ("serve --host no.such.host.invalid", 2, "--host"),
    ("serve --host 'a b'", 2, "--host"),
    ("serve --port 0 --max-requests 0", 2, "max_requests 0"),
    ("serve --port 0 --request-seconds 0", 2, "request_seconds 0"),
    ("serve --port 0 --num-blocks 0", 2, "num_blocks 0"),
    ("serve --port 0 --draft-sampling greedy", 2, "--draft-sampling goes with"),
    ("lab --no-browser --port 70000", 2, "--port 70000"),
    # options of score
    *((f"score --prompt a {words}", 2, "--workers and --save go with") for words in ("--workers 2", "--save f")),
    ("score --requests TWO --completion a", 2, "--requests has prompts and completions in its lines"),
    ("score --requests TWO --system a", 2, "--requests has prompts and completions in its lines"),
    *((f"score --requests TWO --workers {at}", 2, f"'{at}': expected a number") for at in ("-1", "1.5", "tcp:", "h:1")),
    ("score --requests TWO --save f --numerics float32", 2, "numerics float32, expected exact"),
    ("score --requests TWO --workers tcp://h:1", 2, "needs the extra `dask`: pip install 'lfm2np[dask]'"),
    ("generate --requests TWICE", 2, "two requests have one request_id, or one is named like a sample: '1'"),
    ("score --requests TWICE", 2, "two requests have one request_id: '1'"),
    *((f"{name} --requests empty.jsonl", 2, "no requests, expected one JSON obj") for name in ("generate", "score")),
    ("score --merge nowhere -o x --model MODEL", 2, "no such file"),
    ("score --merge empty.jsonl -o x --model MODEL", 2, "no results"),
    ("score --merge empty.jsonl -o x --completion-ids 1", 2, "--completion-ids: is not used by --merge"),
    # of the others
    *((f"compare a b --report {each}", 2, ".html or .xml, each once") for each in ("r.htm", "r.xml --report ./r.xml")),
    ("rollouts missing.jsonl", 3, "missing.jsonl"),
    (f"{ROLLOUTS} --chunks a", 3, "--chunks 'a'"),
    (f"{ROLLOUTS} --sample 0", 3, "--sample 0"),
    (f"{ROLLOUTS} --trainer-format fp16", 3, "--trainer-format: format 'fp16'"),
    ("draw missing.jsonl -o x.html", 2, "RequestError: missing.jsonl: does not exist"),
    # pinned: 1 of a replay, 2 of `draw`
    *((f"draw {name} {how}", 3, "TraceError: ") for name, how in product(("empty.jsonl", "TEXT", "TWO"), HOWS)),
    ("check empty.jsonl", 3, "empty.jsonl: no answers, expected "),
    ("draw --demo -o x.html --step 1", 2, "--step goes with --terminal"),
    ("draw missing.jsonl --terminal --model MODEL", 2, "--model goes with --demo"),
    ("simulate", 2, "expected a trace or --fit"),
    ("simulate trace.csv --fit steps.csv", 2, "expected a trace or --fit"),
    ("simulate --fit steps.csv --report r.html", 2, "--report: does not go with --fit"),
    ("simulate --fit plain.jsonl", 2, "plain.jsonl: ',' expected after"),
    ("simulate poisson:prompt=1,prompt=2 --rate 1", 2, "'prompt=1': expected prompt, output, requests, each once"),
    ("simulate poisson: --rate 1 --num-blocks 100000000", 2, "num_blocks 100000000: expected at most 10000000"),
    ("simulate nowhere.csv", 3, "nowhere.csv: can't be read"),
    ("simulate bad.jsonl", 3, "bad.jsonl:1: timestamp -1"),
    (SMALL.replace(" --rate 5", ""), 2, "expected --rate"),
    (SMALL.replace("--rate 5", "--rate 0"), 2, "rate 0.0"),
    (f"{SMALL} --requests 5", 2, "--requests 5: not with drawn traffic"),
    (f"{SMALL} --requests 0", 2, "--requests 0"),
    (f"{SMALL} --workers -1", 2, "--workers -1: expected a whole number, 0 to 1024"),
    (f"{SMALL} --cost H100:GPT-5", 2, "GPU:MODEL"),
    (f"{SMALL} --target ttft_p99=1", 2, "--target"),
    *((f"{words} --output x", 2, "--output") for words in (SMALL, MANY)),
    (f"{SMALL} --sweep policy=fcfs,static --curve x.svg", 2, "--sweep rate="),
    (f"{MANY} --capacity ttft_p99=1", 2, "--capacity finds the rate"),
    (f"{SMALL} --capacity ttft=1", 2, "ttft_p99=2"),
    (f"{SMALL} --memory -1", 2, "--memory -1.0"),
    (f"{SMALL} --num-blocks 0", 2, "num_blocks 0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code", "named"), REFUSED, ids=[words[:60] for words, *_ in REFUSED])
def test_what_can_not_be_met_is_one_line_and_its_exit_code(tmp_path, monkeypatch, model, failure, words, code, named):
    """The engine and the reference refuse the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "distributed", None)
    for name, content in FILES.items():
        Path(name).write_text(content)
    before = {*Path().iterdir()}
    given, line = failure(*(str(model) if word == "MODEL" else word for word in shlex.split(words)))
    assert given == code and named in line
    assert ("did you mean" in line) == ("did you mean" in named)
    assert {*Path().iterdir()} == before, "nothing is written"


BAD_LINES = [  # of --requests: the command, a second line, and what is named
    ("generate", '{"max_tokens": 3}', "either prompt or prompt_token_ids"),
    ("generate", '{"prompt": "a", "prompt_token_ids": [1]}', "either prompt or prompt_token_ids"),
    ("generate", '{"prompt": 3}', "prompt 3"),
    ("generate", '{"prompt": "a", "tempreature": 1}', "tempreature"),
    ("generate", '{"prompt": "a", "temperature": NaN}', "NaN"),
    ("generate", '{"prompt": "a", "arrival_step": -1}', "arrival_step -1"),
    ("generate", '{"prompt": "a", "arrival_step": 100001}', "100001: expected at most 100000: idle steps are run one"),
    ("generate", '{"prompt": "a", "request_id": ""}', "request_id '': expected a string that is not empty"),
    ("generate", '{"prompt": "a", "stop": ""}', "stop"),
    ("generate", "{", "not JSON"),
    ("score", "{}", "either prompt or prompt_token_ids"),
    ("score", '{"prompt": "a", "prompt_token_ids": [1]}', "either prompt or prompt_token_ids"),
    ("score", '{"prompt": "a", "completion": "b", "completion_token_ids": [1]}', "not both"),
    ("score", '{"prompt": 3}', "prompt 3: expected a string"),
    ("score", '{"prompt": "a", "request_id": ""}', "request_id '': expected a string that is not empty"),
    ("score", '{"prompt": "a", "completion": ""}', "completion '': expected a string that is not empty"),
    ("score", '{"prompt": "a", "max_tokens": 3}', "'max_tokens': expected some of completion, "),
    ("score", '{"prompt_token_ids": [1]}', "1 token to score"),
    ("score", '{"prompt_token_ids": [1, 300]}', "300"),
    ("score", '{"prompt_token_ids": [1], "completion_token_ids": []}', "none, expected at least one"),
]


@pytest.mark.parametrize(("command", "line", "named"), BAD_LINES)
def test_a_bad_line_of_requests_is_named(tmp_path, model, failure, command, line, named):
    file = tmp_path / "requests.jsonl"
    file.write_text(f'{{"prompt": "abc"}}\n{line}\n')
    code, error = failure(command, "--requests", str(file), "--model", str(model))
    assert code == 2 and f"{file}, line 2: " in error and named in error


WRITTEN = {  # a command with what it needs, and its option for a file
    *product(["check x:y", "vet x.jsonl --candidate a=b", "compare a b"], ["--report", "--save"]),
    *product(["simulate"], ["--curve", "--output", "--report"]),
    *(("rollouts a", "--report"), ("score --merge a", "-o"), ("draw --demo", "-o"), ("vectors verify", "--save")),
    *(("record lfm2np: --prompt-ids 1", "-o"), ("generate --prompt a", "--trace"), ("serve", "--trace")),
    *(("score --prompt a", "--save"), ("vectors make -o a", "--save"), ("fuzz x:y", "--save")),
}


@pytest.mark.parametrize(("words", "option"), sorted(WRITTEN))
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, failure, words, option):
    """Pinned: `check` said of a report in JUnit's form so behind the whole check. Root has access to /proc, too."""
    refused = {tmp_path: "a directory, expected a file", tmp_path / "no" / "file": "no such directory"}
    for path, why in {**refused, Path("/proc/x.html"): "can't be written"}.items():
        code, line = failure(*words.split(), option, str(path))
        assert code in (2, 3) and f"{path}: " in line and why in line


def test_a_defect_of_a_checkpoint_is_one_line_and_exit_code_3(model, failure):
    """What each defect is called: tests/checkpoint."""
    (model / "model.safetensors").write_bytes(b"")
    code, line = failure("generate", "--model", str(model), "--prompt-ids", "1,2")
    assert code == 3 and str(model) in line
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    code, line = failure("info", "--model", str(model))
    assert code == 3 and "config.json" in line


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_dangling_link_is_not_an_absent_file(model, failure, name):
    """An interrupted download leaves them; without eos ids or the template the answer would be another."""
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(model / "gone")
    code, line = failure("generate", "--model", str(model), "--chat", "a")
    assert code == 3 and f"{name}: does not exist" in line


FETCHED = [
    ("LFM2-350M", "hf download LiquidAI/LFM2-350M --local-dir LFM2-350M"),
    ("my models/LFM2-8B-A1B", "hf download LiquidAI/LFM2-8B-A1B --local-dir 'my models/LFM2-8B-A1B'"),
    ("LFM2.5-1.2B-Instruct", "hf download LiquidAI/LFM2.5-1.2B-Instruct --local-dir LFM2.5-1.2B-Instruct"),
    ("x/LFM2-350M-Q4_K_M.gguf", "hf download LiquidAI/LFM2-350M-GGUF LFM2-350M-Q4_K_M.gguf --local-dir x"),
    ("my-model", None),
    ("LFM2-350M-4bit", None),  # not by Liquid AI
]


@pytest.mark.parametrize(("name", "command"), FETCHED)
def test_how_a_published_checkpoint_is_fetched(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        checkpoint_path(name)
    assert str(error.value).startswith(f"{name}: not a directory, expected one with config.json")
    assert str(error.value).endswith(command) if command else "hf" not in str(error.value)
