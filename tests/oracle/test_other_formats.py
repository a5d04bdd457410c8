"""Another format, checkpoint or weights as the reason of errors everywhere: named as far as they explain them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engines import Changed, checked_target, coarse, float32, loaded, noisy

from lfm2np.arithmetic.ieee import round_to_bfloat16
from lfm2np.engine.loading import Model
from lfm2np.errors import NumericsError
from lfm2np.oracle.causes import other_formats
from lfm2np.oracle.causes.everywhere import unrelated_cause
from lfm2np.oracle.causes.other_formats import is_alike
from lfm2np.oracle.check import Checked
from lfm2np.oracle.engines.protocol import Factory
from lfm2np.oracle.engines.python_target import PythonTarget
from lfm2np.oracle.engines.records import Answer, Request, greedy
from lfm2np.oracle.judging.formats import round_to_float16
from lfm2np.oracle.judging.scored import Evidence, Known
from lfm2np.oracle.judging.truth import Spoken
from lfm2np.oracle.judging.verdict import WRONG, Position, Verdict
from lfm2np.oracle.total import beyond_its_format
from lfm2np.teaching import nano
from lfm2np.teaching.tutorial import SIZES, Adapter, Shown

pytestmark = [pytest.mark.rounding, pytest.mark.slow]
ROUNDED = {"bfloat16": round_to_bfloat16, "float16": round_to_float16}
NO_FORMAT = "no format errs like this"


def checked_factory(model: Model, factory: Factory, form: str = "float32") -> Checked:
    return checked_target(model, PythonTarget(factory, model.path), form, ("neighbours",))


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("bfloat16", "outputs"),
        ("float16", "inputs"),
        pytest.param("bfloat16", "residual", marks=pytest.mark.night),
        pytest.param("bfloat16", "inputs", marks=pytest.mark.night),
        pytest.param("float16", "outputs", marks=pytest.mark.night),
    ],
)
def test_an_engine_that_rounds_to_a_format_in_places_is_sent_to_that_format(model: Model, form: str, what: str) -> None:
    """Before, "certain: wrong everywhere, and no format errs like this", though all is right under it."""
    factory = coarse(ROUNDED[form], what)
    total = checked_factory(model, factory).total
    assert total.verdict in WRONG and f"right under --format {form}" in total.reasons[0], total.reasons
    assert NO_FORMAT not in " ".join(total.reasons)
    assert checked_factory(model, factory, form).total.verdict not in WRONG


@pytest.mark.parametrize(("told", "verdict"), [(255, Verdict.BUG), (256, Verdict.DRIFT)])
def test_by_size_a_format_is_the_verdict_only_of_many(
    told: int, verdict: Verdict, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned: of 66 log-probabilities a swapped gate was "right under --format float16: run again with it"."""
    monkeypatch.setattr("lfm2np.oracle.total.other_format", lambda evidence: ("float16", other_formats.Fit.BY_SIZE))
    request = greedy("a", (1, 2), 300)
    far = [Position(request, 1 + at, True, 5, 5, 0.0, 0.0, 9.0, 9.0, 9.0, 9.0, Verdict.DRIFT) for at in range(told)]
    found, grounds, causes, errs_like = beyond_its_format(Evidence(model, "float32", [], far, Known()), [])
    named = grounds[0] if verdict is Verdict.DRIFT else causes[0].line
    assert found is verdict and errs_like == "float16" and "right under --format float16" in named


@pytest.mark.usefixtures("without_constants")
def test_a_format_that_cannot_hold_the_numbers_is_passed_over(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = other_formats.judge

    def overflowing(model: Model, name: str, *others: Any, **named: Any) -> Any:
        if name == "float16":
            raise NumericsError("overflow")
        return judge(model, name, *others, **named)

    monkeypatch.setattr(other_formats, "judge", overflowing)
    total = checked_factory(model, coarse(round_to_bfloat16, "outputs")).total
    assert "right under --format bfloat16" in total.reasons[0], total.reasons


@pytest.mark.parametrize("share", [0.001, pytest.param(0.1, marks=pytest.mark.night)])
def test_weights_that_are_off_by_a_little_are_not_called_a_format(model: Model, share: float) -> None:
    """Before, "errs like int4 everywhere" of 10 %: its size alone says only that it is right under it."""
    total = checked_factory(model, noisy(share)).total
    assert total.verdict in WRONG and "right under --format" in total.reasons[0], total.reasons
    assert "weight" in total.reasons[0] and "errs like" not in total.reasons[0]


def test_a_format_leaves_no_position_in_the_middle_without_an_error(model: Model) -> None:
    """Pinned: a floor of log-probabilities was DRIFT, right under int4, with 86 % of the positions exact in float32."""

    def nearly_floored(request: Request, answer: Answer) -> Answer:
        logprobs = tuple(max(value, 0.01 * value - 1.0) for value in answer.logprobs or ())
        return replace(answer, logprobs=logprobs, prompt_logprobs=None)

    cases = ("short-prompts", "borders", "neighbours", "prefixes")
    total = checked_target(model, Changed(model, nearly_floored), "float32", cases).total
    assert total.verdict is Verdict.BUG and "with errors of its size" not in " ".join(total.reasons), total.reasons


class HalvedOnce(Shown):
    """At the third new token one convolution's state is halved."""

    def convolve(self, chunk: nano.Chunk, number: int, new: nano.Array, taps: nano.Array) -> nano.Array:
        if len(chunk.sequence.new_token_ids) == 3 and number == 1:
            self.states[chunk.sequence.slot, number] *= np.float32(0.5)
        return super().convolve(chunk, number, new, taps)


class Leaking(Shown):
    """Each convolution's state gets a part of what an earlier request put into it."""

    def convolve(self, chunk: nano.Chunk, number: int, new: nano.Array, taps: nano.Array) -> nano.Array:
        inputs = vars(self).setdefault("inputs", {}).setdefault(number, [])
        self.states[chunk.sequence.slot, number] += np.float32(0.03) * (inputs[-25] if len(inputs) > 25 else 0)
        inputs.append(new[-1].copy())
        return super().convolve(chunk, number, new, taps)


@pytest.mark.parametrize(
    ("engine", "case", "words"),
    [(HalvedOnce, "short-prompts", "in decode"), (Leaking, "prefixes", "where the same tokens are sent again")],
)
def test_a_bug_of_one_place_and_a_state_that_leaks_everywhere_are_neither_a_format_nor_an_operator(
    model: Model, engine: type[Shown], case: str, words: str
) -> None:
    """Pinned: "certain: wrong by less than int4 rounds", before where it is wrong; and of the same tokens that err by
    other amounts each time "right under --format int4" or "a wrong operator"."""

    def factory(directory: str, sizes: dict[str, Any]) -> Adapter:
        return Adapter(engine(directory, **{name: size for name, size in sizes.items() if name in SIZES}))

    total = checked_target(model, PythonTarget(factory, model.path), "float32", (case,)).total
    assert total.verdict is Verdict.BUG and words in total.reasons[0], total.reasons
    assert "int4" not in " ".join(total.reasons) and not total.reasons[0].startswith("certain"), total.reasons


@pytest.mark.night
def test_no_format_is_blamed_where_none_explains_it(model: Model) -> None:
    total = checked_factory(model, noisy(0.3)).total
    assert total.verdict is Verdict.BUG and NO_FORMAT in total.reasons[0]


def test_answers_of_another_checkpoint_are_recognised(model: Model) -> None:
    """Before, "certain: as if there is a soft cap of logits at about 7.77"."""
    mixture = loaded(str(model.path.parent / "moe"))
    for asked, answering in ((model, mixture), (mixture, model)):
        total = checked_factory(asked, lambda _, sizes, of=answering: float32(str(of.path), sizes)).total  # type: ignore[misc]
        assert total.verdict is Verdict.BUG
        assert "look like answers of another checkpoint, tokenizer or prompt" in total.reasons[0], total.reasons


def test_a_correlation_of_errors_counts_if_it_is_large_and_no_accident() -> None:
    random = np.random.default_rng(0)
    sequences = [Spoken((index // 20,)) for index in range(800)]
    theirs, other = random.normal(size=(2, 800))
    assert is_alike(0.5 * theirs + other, theirs, sequences)
    assert not is_alike(0.1 * theirs + other, theirs, sequences), "sure, but small"
    assert not is_alike(other, theirs, sequences) and not is_alike(-theirs, theirs, sequences)
    assert not is_alike(0.5 * theirs + other, theirs, sequences[:1] * 800), "one sequence proves nothing"


@pytest.mark.parametrize(("error", "is_unrelated"), [(1.0, False), (2.0, True)])
def test_answers_are_unrelated_only_if_the_oracle_is_no_nearer_than_their_mean(
    error: float, is_unrelated: bool
) -> None:
    """Log-probabilities 0 to -4, whose variance is 2: half of it is left by a wrong operator, twice by anything."""
    request = greedy("a", (1,), 20, case="case")
    answer = Answer(tuple(range(20)), tuple(-float(index % 5) for index in range(20)))
    position: Any = SimpleNamespace(request=request, is_wrong=True, is_new=True, token_id=1, best=2, error=error)
    nothing: Any = None
    evidence = Evidence(nothing, "float32", [(request, answer)], [position] * 20, Known())
    assert (unrelated_cause(evidence) is not None) == is_unrelated
