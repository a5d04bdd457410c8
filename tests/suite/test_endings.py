"""Where an answer must end, and with what text: engines that say something else are found."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lfm2np.checkpoint.loaded import trained_fixture
from lfm2np.suite import adapters
from lfm2np.suite.again import Checkpoint, Request, SamplingParams, Scenario, TinyModel
from lfm2np.suite.catalogue import by_id
from lfm2np.suite.properties.driver import require_grown
from lfm2np.suite.properties.endings import Ending, ending_of, text_of
from lfm2np.suite.properties.property import Violation
from lfm2np.suite.runner import run_property
from lfm2np.suite.strategies.tiny_models import loaded

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SCENARIO = Scenario(TinyModel(), (Request("a", (3, 4), GREEDY),))
TRAINED = Checkpoint(str(trained_fixture()))


def changed(**fields):
    """A factory of our engine, whose completions say something else; a function is given what they would say."""

    def wrong(right):
        return replace(right, **{key: value(right) if callable(value) else value for key, value in fields.items()})

    class Changed(adapters.Rounded):
        def generate(self, requests):
            return [list(map(wrong, answers)) for answers in self._engine.generate(requests)]

        def step(self):
            return {name: list(map(wrong, answers)) for name, answers in self._engine.step().items()}

    return lambda model, sizes: Changed(adapters.Own(adapters.load_once(Path(model)), sizes))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": (), "finish_reason": None, "logits": None}, "ended after 0 tokens (None), max_tokens is 4"),
        ({"token_ids": (), "finish_reason": "abort"}, "ended after 0 tokens (abort), max_tokens is 4"),
        ({"token_ids": lambda completion: completion.token_ids[:3]}, "ended after 3 tokens (length), max_tokens is 4"),
        ({"token_ids": lambda completion: (*completion.token_ids, 5)}, "output token 4: 5, but it had ended (length)"),
        ({"finish_reason": "stop"}, "ended after 4 tokens (stop), the reference says length"),
        ({"finish_reason": "eos"}, "ended after 4 tokens (eos), the reference says length"),
        ({"finish_reason": "error"}, "ended in an error"),
        ({"stop_reason": 7}, "stop reason 7, expected None"),
    ],
)
def test_an_answer_that_ends_elsewhere_is_found(fields, message):
    with pytest.raises(Violation, match=rf"^request a[,:] {re.escape(message)}\Z"):
        by_id("equals-reference").check(changed(**fields), SCENARIO)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": lambda completion: (completion.text or "") + " "}, "what was shown is taken back"),
        ({"text": None, "stop_reason": None}, "stop reason None, expected"),
        ({"stop_reason": lambda completion: completion.stop_reason or "?"}, "stop reason '?', expected None"),
    ],
)
def test_other_text_and_reasons_are_found(fields, message):
    result = run_property(by_id("text-is-what-the-tokens-say"), changed(**fields), "quick", shrink=False)
    assert result.status == "failed"
    assert message in result.message


def test_the_ending_of_an_answer():
    tokenizer = loaded(TRAINED).tokenizer
    ids = tokenizer.encode("count: 3 to 5 -> 3 4 5")
    request = Request("a", (1,), SamplingParams(temperature=0.0, max_tokens=len(ids), stop=["to 5"], ignore_eos=True))
    text = tokenizer.decode(ids)
    cut = next(count for count in range(len(ids)) if "to 5" in tokenizer.decode(ids[:count]))
    assert ending_of(TRAINED, request, ids) == Ending(cut, "stop", "to 5")
    assert text_of(TRAINED, request, ids[:cut]) == text[: text.index("to 5")]
    plain = replace(request, params=replace(request.params, stop=()))
    assert ending_of(TRAINED, plain, ids) == Ending(len(ids), "length", None)
    assert ending_of(TRAINED, plain, ids[:-1]) is None
    assert text_of(TRAINED, plain, ids) == text
    eos = replace(plain, params=replace(plain.params, ignore_eos=False))
    (end,) = loaded(TRAINED).config.eos_token_ids
    assert ending_of(TRAINED, eos, [*ids[:3], end]) == Ending(4, "stop", None)
    named = replace(plain, params=replace(plain.params, stop_token_ids=[end]))
    assert ending_of(TRAINED, named, [*ids[:3], end]) == Ending(4, "stop", end)
    both = replace(eos, params=replace(eos.params, stop_token_ids=[end]))
    assert ending_of(TRAINED, both, [*ids[:3], end]) == Ending(4, "stop", None)
    small = TinyModel(positions=6)  # no room for more
    assert ending_of(small, Request("a", (3, 4), GREEDY), [5, 5, 5, 5]) == Ending(4, "length", None)
    assert ending_of(small, Request("a", (3, 4, 3), GREEDY), [5, 5, 5]) == Ending(3, "length", None)
    patient = replace(eos, params=replace(eos.params, min_tokens=5))
    assert ending_of(TRAINED, patient, [*ids[:3], end]) is None


def test_what_was_shown_may_not_be_taken_back():
    completion = adapters.Answer((3, 4), text="ab")
    require_grown("a", [completion], [replace(completion, token_ids=(3, 4, 5), text="abc")])
    for wrong, message in (
        (replace(completion, token_ids=(3, 5, 5)), "tokens"),
        (replace(completion, text="b"), "text"),
    ):
        with pytest.raises(Violation, match=f"request a: {message} .* what was shown is taken back"):
            require_grown("a", [completion], [wrong])
    ended = replace(completion, finish_reason="length")
    with pytest.raises(Violation, match=r"had ended \(length\), and then changed"):
        require_grown("a", [ended], [replace(ended, finish_reason="stop")])
