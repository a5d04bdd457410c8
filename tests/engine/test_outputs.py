"""What a step returns, and what a run counts of drafts, by their place."""

import pytest

import lfm2np
from lfm2np import Engine, SamplingParams
from lfm2np.engine.outputs import Grown, RunMetrics


def test_outputs_stay_what_they_were_and_share_what_has_grown() -> None:
    """Each was a copy of all tokens so far, so that generating n of them copied n * n / 2."""
    engine = Engine(lfm2np.load(), num_blocks=40)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    engine.add_request("a", [1, 5, 6], params)
    *outputs, last = engine.stream()
    ids, (sample,) = last.outputs[0].token_ids, last.outputs
    assert isinstance(ids, tuple) and isinstance(sample.logprobs, tuple) and isinstance(last.prompt_logprobs, tuple)
    for count, output in enumerate(outputs, start=1):
        (sample,) = output.outputs
        assert isinstance(sample.token_ids, Grown) and isinstance(sample.logprobs, Grown)
        assert sample.token_ids == ids[:count] and ids[:count] == sample.token_ids and sample.token_ids != ids
        assert (sample.token_ids[-1], sample.token_ids[1:]) == (ids[count - 1], ids[1:count])
        assert (len(sample.logprobs), output.prompt_logprobs) == (count, last.prompt_logprobs)
        with pytest.raises(IndexError):
            sample.token_ids[count]


@pytest.mark.parametrize("answers", [[(1, 1), (3, 2)], [(3, 2), (1, 1)], [(2, 0), (5, 4), (0, 0), (3, 3)]])
def test_drafts_are_counted_by_place_whatever_number_comes_first(answers: list[tuple[int, int]]) -> None:
    metrics = RunMetrics()
    for num_drafts, num_accepted in answers:
        metrics.count_answer(num_drafts, num_accepted, num_accepted + 1)
    places = range(max(proposed for proposed, _ in answers))
    assert metrics.drafted_at == [sum(proposed > place for proposed, _ in answers) for place in places]
    assert metrics.accepted_at == [sum(accepted > place for _, accepted in answers) for place in places]
    assert metrics.draft_tokens == sum(metrics.drafted_at)
    assert metrics.accepted_tokens == sum(metrics.accepted_at)
