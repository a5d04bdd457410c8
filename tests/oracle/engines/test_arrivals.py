"""A check that is interrupted keeps the answers of the rounds before, and goes on from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_player import model

from lfm2np.oracle.engines.file_target import Transcript
from lfm2np.oracle.engines.records import Answer, Trace
from lfm2np.oracle.engines.target import Abilities, Played
from lfm2np.oracle.sending import send_all

pytestmark = pytest.mark.rounding


class Interrupted:
    """Answers a round, once; then it is interrupted. Later it answers all."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.is_late = False

    def probe(self) -> Abilities:
        return Abilities("interrupted", at_once=8)

    def play(self, trace: Trace) -> Played:
        if self.sent and not self.is_late:
            raise KeyboardInterrupt
        self.sent += [request.request_id for request in trace.requests]
        return Played(tuple((Answer((3,) * request.max_tokens, finish_reason="length"),) for request in trace.requests))

    def close(self) -> None:
        pass


def test_a_check_that_is_interrupted_keeps_what_it_had_and_goes_on(tmp_path: Path) -> None:
    path, target = tmp_path / "answers.jsonl", Interrupted()
    with pytest.raises(KeyboardInterrupt), Transcript(path) as transcript:
        send_all(model(), target, 8, cases=["neighbours"], transcript=transcript)
    before = path.read_bytes()
    assert [request.request_id for request, _ in Transcript(path).pairs()] == target.sent
    path.write_bytes(before + b'{"request": {"request_id"')  # and a line that was torn
    target.is_late = True
    with pytest.warns(match="torn"):
        transcript = Transcript(path)
    with transcript:
        asked = send_all(model(), target, 8, cases=["neighbours"], transcript=transcript)
    after = path.read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == len(asked.pairs) + 1  # each answer once, and the end
    assert len(set(target.sent)) == len(target.sent)
    target.sent.clear()
    with Transcript(path) as transcript:
        assert send_all(model(), target, 8, cases=["neighbours"], transcript=transcript).pairs == asked.pairs
    assert not target.sent
