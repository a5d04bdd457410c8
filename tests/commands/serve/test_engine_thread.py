"""What clients get where the engine fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from served_app import model, serving

FIELDS: dict[str, Any] = {"prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("method", ["step", "add_request"])
def test_an_exception_in_the_engine_ends_it_and_all_are_told(
    monkeypatch: pytest.MonkeyPatch, method: str, is_streamed: bool
) -> None:
    """Those in progress, the one that comes with it, and those that come later."""
    with serving(model()) as served, ThreadPoolExecutor(1) as pool:
        long = {"prompt": [1], "max_tokens": 200, "ignore_eos": True, "stream": is_streamed}
        first = pool.submit(served.ask, "/v1/completions", long)
        served.wait_until(lambda: served.service.engine.state.metrics.steps > 2)
        monkeypatch.setattr(served.engine, method, lambda *_: {}["no"])
        status, reply = served.ask("/v1/completions", {"prompt": [[2], [3]]})
        assert status in (500, 503) and "KeyError: 'no'" in reply["error"]["message"]
        status, reply = first.result()
        error = (reply[-1] if is_streamed else reply)["error"]
        assert (status, error["code"], error["message"]) == (200 if is_streamed else 500, 500, "KeyError: 'no'")
        status, reply = served.ask("/v1/completions", FIELDS)
        assert status == 503 and "the engine ended: KeyError: 'no'" in reply["error"]["message"]
        assert served.get("/health")[0] == 503 and served.get("/v1/models")[0] == 200
        assert served.service.engine.num_places == 0


def test_a_request_that_the_engine_refuses_keeps_no_other_from_running() -> None:
    with serving(model()) as served, ThreadPoolExecutor(2) as pool:
        good = pool.submit(served.ask, "/v1/completions", {**FIELDS, "max_tokens": 30})
        bad = [{"prompt": [[1, 2], [1] * 200], "max_tokens": 100, "stream": stream} for stream in (False, True)]
        for fields in bad:  # one bad prompt of two ends the call; a stream that can't begin is not a stream
            status, reply = served.ask("/v1/completions", fields)
            assert status == 400 and "the pool has 60" in reply["error"]["message"]
        assert good.result()[0] == 200
        served.wait_until_empty()
