"""Views of a distribution against engine/sampling/choice.py, which decides what a token is drawn from."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lfm2np.engine.sampling import choice
from lfm2np.engine.sampling.params import PROFILES, SamplingParams
from lfm2np.oracle.rollouts.views import processed, viewed

VIEWS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.3, 0.7, 1.0, 1.5)),
    top_k=st.sampled_from((0, 1, 3, 10)),
    top_p=st.sampled_from((1.0, 0.9, 0.5, 1e-6)),
    min_p=st.sampled_from((0.0, 0.05, 0.5, 1.0)),
    repetition_penalty=st.sampled_from((1.0, 1.3)),
    presence_penalty=st.sampled_from((0.0, 0.5)),
    frequency_penalty=st.sampled_from((0.0, -0.25)),
    profile=st.sampled_from(PROFILES),
)
LOGITS = st.lists(st.integers(-24, 24).map(lambda quarter: quarter / 4), min_size=2, max_size=40)


@given(LOGITS, VIEWS, st.data())
def test_a_view_is_what_choice_draws_from(logits, view, data):
    """Without ties at the border, where choice takes the lower ids and engines differ."""
    ids = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=3, max_size=6))
    row, start = np.array([logits], np.float32), len(ids) - 1
    weights = choice.distribution(row[0], view, ids[:start], (), ())
    values = processed(row, view, ids, range(start, start + 1), start)
    result = viewed(values, np.array(ids[start:]), view, (1e-4, 0.3))
    logprob = float(result["logprobs"][0, ...].item())
    weight = int(weights[ids[start]])
    tied = np.count_nonzero(values[0] == values[0, ids[start]]) > 1
    if weight:
        assert abs(logprob - math.log(weight / int(weights.sum()))) <= 1e-13 + 2 / weight + 1e-15 * len(logits)
        low, high = result["low"][:, 0], result["high"][:, 0]
        assert (low <= logprob + 1e-12).all() and (high >= logprob - 1e-12).all()
        assert low[1] <= low[0] + 1e-12 and high[1] >= high[0] - 1e-12  # a larger tolerance allows more
    elif not tied:
        assert logprob == -math.inf or logprob < -30.0  # a weight of 0 is below 2**-46 of the largest
