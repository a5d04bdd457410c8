"""What a run counts of drafts, by their place."""

import pytest

from lfm2np.engine.outputs import RunMetrics


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
