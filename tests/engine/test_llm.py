"""`lfm2np.LLM`: what it takes, what it refuses, and that it honours all that it takes."""

import inspect
import io
import typing

import numpy as np
import pytest

import lfm2np
from lfm2np import LLM, Engine, SamplingParams
from lfm2np.checkpoint.loaded import hand_fixture
from lfm2np.engine.llm import EngineOptions
from lfm2np.errors import RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
IDS = [1, 17, 42]


@pytest.fixture(scope="module")
def model():
    return lfm2np.load()


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_whatever_is_a_prompt_of_the_model_is_one_here(llm, model):
    expected = model.generate(IDS, 4).token_ids
    for one in (IDS, tuple(IDS), np.array(IDS), [np.int64(id) for id in IDS]):
        assert tokens(llm.generate(one, GREEDY)) == [expected]
    for many in ([IDS, IDS], [np.array(IDS), tuple(IDS)], np.array([IDS, IDS])):
        assert tokens(llm.generate(many, GREEDY)) == [expected, expected]
    text = model.generate("add: 3 + 4 ->", 4).token_ids
    assert tokens(llm.generate("add: 3 + 4 ->", GREEDY)) == [text]
    assert tokens(llm.generate(["add: 3 + 4 ->", IDS], sampling_params=[GREEDY, GREEDY])) == [text, expected]
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "sampling_params", "words"),
    [
        ([IDS], {"temperature": 0}, "sampling_params {'temperature': 0}: expected SamplingParams"),
        ([IDS], [{"temperature": 0}], r"sampling_params\[0\] {'temperature': 0}: expected SamplingParams"),
        ([IDS], [GREEDY, GREEDY], "2 sampling_params for 1 prompts"),
        (None, GREEDY, "prompts None: expected a text, token ids, or a list"),
        ((id for id in IDS), GREEDY, "prompts <generator .*: expected a text"),
        (np.array(1), GREEDY, r"prompts array\(1\): expected a text"),
        (b"abc", GREEDY, "prompts b'abc': expected a text"),
        ([[1.5]], GREEDY, r"ids\[0\]: 1.5, expected an integer"),
    ],
)
def test_what_is_no_prompt_or_parameters_is_one_line(prompts, sampling_params, words, llm):
    with pytest.raises(RequestError, match=f"^{words}"):
        llm.generate(prompts, sampling_params)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"numerics": "nonsense"}, "numerics 'nonsense': expected one of exact, float32"),
        ({"numerics": "float32"}, "numerics 'float32': expected 'exact'"),
        ({"max_seqs": 8}, "max_seqs: no option of LLM .did you mean max_num_seqs"),
        ({"seed": "a"}, "seed 'a': expected a whole number, 0 to"),
        ({"seed": -1}, "seed -1: expected a whole number, 0 to"),
        ({"seed": 2**64}, "seed 18446744073709551616: expected"),
        ({"block_size": "16"}, "block_size '16': expected a whole number"),
        ({"num_blocks": "3"}, "num_blocks '3': expected a whole number"),
        ({"watermark": "a"}, "watermark 'a': expected a number"),
        ({"prefix_caching": "no"}, "prefix_caching 'no': expected true or false"),
        ({"room_for": 5}, "room_for 5: expected a list"),
        ({"trace": "file"}, "trace 'file': expected a text file"),
        ({"clock": 3}, "clock 3: expected a function"),
    ],
)
def test_an_option_that_can_not_be_honoured_is_refused_by_name(options, words, model):
    with pytest.raises(RequestError, match=f"^{words}"):
        LLM(model, **options)


@pytest.mark.rounding
def test_numerics_are_those_of_the_checkpoint_or_those_of_the_model():
    assert LLM(numerics="float32").model.numerics.name == "float32"
    assert LLM(lfm2np.load(numerics="float32")).model.numerics.name == "float32"


def test_what_is_no_model_is_named():
    with pytest.raises(RequestError, match=r"^model 'LFM2': expected a loaded model"):
        Engine("LFM2")


def test_numbers_of_numpy_are_numbers(model):
    options = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8, "seed": 3}
    trace = io.StringIO()  # JSON, which knows no NumPy
    llm = LLM(
        model, **{name: np.int64(value) for name, value in options.items()}, watermark=np.float32(0.5), trace=trace
    )
    llm.engine.add_request("a", IDS, GREEDY, priority=np.int64(3))
    (last,) = [output for output in llm.engine.stream() if output.finished]
    assert last.outputs[0].token_ids == model.generate(IDS, 4).token_ids
    assert llm.engine.scheduler.config.block_size == 4


@pytest.mark.slow
def test_requests_of_the_caller_keep_their_outputs(llm, model):
    """They had vanished: LLM drew all outputs from its engine and kept its own."""
    name = str(llm._requests)  # the id that LLM would take next
    llm.engine.add_request(name, [1, 5, 6], GREEDY)
    llm.engine.add_request("long", [1, 5, 6], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert tokens(llm.generate(IDS, GREEDY)) == [model.generate(IDS, 4).token_ids]
    outputs = [output for output in llm.engine.stream() if output.finished]
    assert {output.request_id: len(output.outputs[0].token_ids) for output in outputs} == {name: 4, "long": 12}


def test_an_answer_to_come_keeps_its_name(model):
    """A later prompt had got the answer of the caller's request."""
    llm = LLM(model)
    llm.engine.add_request("1", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=1))
    llm.generate(IDS, GREEDY)
    (output,) = llm.generate([9, 9, 9], GREEDY)
    assert output.prompt_token_ids == (9, 9, 9)
    assert [(each.request_id, each.finished) for each in llm.engine.step()] == [("1", True)]


def test_a_request_that_min_tokens_leaves_no_token_is_refused(llm, model):
    eos = list(model.config.eos_token_ids)
    with pytest.raises(RequestError, match="min_tokens 1: expected 0, since allowed_token_ids"):
        llm.generate(IDS, SamplingParams(allowed_token_ids=eos, min_tokens=1, ignore_eos=True))


def test_a_chat_is_what_its_template_makes_of_it(llm, model):
    question, other = ([{"role": "user", "content": text}] for text in ("sort: 3 1 2", "add: 3 + 4"))
    params = SamplingParams(temperature=0.0)
    (answer,) = llm.chat(question, params)
    assert answer.outputs[0].text == "1 2 3"
    assert list(answer.prompt_token_ids) == model.tokenizer.encode_chat(question)
    assert [output.outputs[0].text for output in llm.chat([question, other], sampling_params=params)] == ["1 2 3", "7"]
    begun = [*question, {"role": "assistant", "content": "1 2"}]
    assert llm.chat(begun, params, continue_final_message=True)[0].outputs[0].text == " 3"
    for wrong in ([], "hello", {"role": "user", "content": "x"}, [[]], [3], [{"role": "user"}]):
        with pytest.raises(RequestError, match=r"^messages"):
            llm.chat(wrong)


def test_an_interrupt_that_ends_the_run_is_what_generate_raises(monkeypatch):
    """Not that its requests can't be aborted any more."""
    llm = LLM(lfm2np.load(hand_fixture()), num_blocks=40)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.scheduler, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([1, 5, 6])


def test_the_options_that_an_editor_shows_are_those_of_the_engine():
    of_engine = {
        name: each for name, each in inspect.signature(Engine, eval_str=True).parameters.items() if name != "model"
    }
    assert typing.get_type_hints(EngineOptions) == {name: each.annotation for name, each in of_engine.items()}
