"""Any valid traces, not only those that fuzz draws."""

from __future__ import annotations

from hypothesis import strategies as st

from lfm2np.oracle.engines.records import Request, Trace, greedy
from lfm2np.suite.fuzz.trace import STOP_IN

ALPHABET = tuple(range(10, 18))


@st.composite
def requests(draw: st.DrawFn, index: int) -> Request:
    after = draw(st.none() | st.integers(0, index - 1)) if index else None
    temperature = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return greedy(
        "",
        tuple(draw(st.lists(st.sampled_from((1, *ALPHABET)), min_size=1, max_size=8))),
        draw(st.integers(1, 6)),
        after=after,
        after_tokens=None if after is None else draw(st.none() | st.integers(1, 4)),
        pause=draw(st.sampled_from([0, 5])),
        abort_after=draw(st.none() | st.integers(0, 3)),
        cold=draw(st.booleans()),
        temperature=temperature,
        seed=draw(st.integers(0, 3)),
        stop=draw(st.just(()) | st.text(min_size=1, max_size=3)),
        streamed=draw(st.booleans()),
        n=draw(st.integers(1, 3)) if temperature else 1,
        tags=draw(st.sampled_from([{}, {STOP_IN: 0}, {STOP_IN: 3}])),
    )


@st.composite
def any_traces(draw: st.DrawFn, most: int = 5) -> Trace:
    return Trace(tuple(draw(requests(index)) for index in range(draw(st.integers(1, most)))))
