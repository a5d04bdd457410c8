"""A run of the page held against each of its requests alone, computed by the reference: token by token, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from numpy.typing import NDArray

from lfm2np.drawings.page.markup import counted
from lfm2np.engine.engine import OnLogits
from lfm2np.engine.sequential import answer_alone
from lfm2np.lab.compute import coming_of, run_engine
from lfm2np.lab.models import Models, understand
from lfm2np.lab.settings import Problems
from lfm2np.values import show


@dataclass(frozen=True)
class Proof:
    right: bool
    sentence: str


def noted_in(rows: dict[str, list[bytes]]) -> OnLogits:
    """Whole rows of logits, by request, in the order in which tokens come."""

    def note(name: str, position: int, row: NDArray[Any], token: int) -> None:
        rows.setdefault(name, []).append(row.tobytes())

    return note


def prove(query: str, models: Models) -> Proof:
    """The run of a link, anew."""
    try:
        settings = understand(parse_qsl(query, keep_blank_values=True), models)
    except Problems as problem:
        return Proof(False, str(problem))
    together: dict[str, list[bytes]] = {}
    ran = run_engine(settings, models, on_logits=noted_in(together))
    if ran.stopped:
        return Proof(False, f"{ran.stopped} So it is not proved.")
    chosen, count = models.by_name[settings.model], 0
    for request in coming_of(settings, models):
        name, alone = request.request_id, {request.request_id: list[bytes]()}
        ids = chosen.model.prompt_ids(request.prompt)
        *_, answer = answer_alone(chosen.model, name, ids, request.params, 0, on_logits=noted_in(alone))
        right, said = answer.outputs[0].token_ids, ran.tokens.get(name, ())
        if said != right:
            words = [" ".join(show(chosen.texts[token]) for token in answer) for answer in (said, right)]
            return Proof(False, f"Request {name}: its tokens are {words[0]}; alone they are {words[1]}.")
        if together.get(name) != alone[name]:
            return Proof(
                False, f"Request {name}: the tokens are right, and the logits are not those that it has alone."
            )
        count += len(right)
    requests = counted(len(settings.requests), "request")
    return Proof(
        True,
        f"{requests}, {counted(count, 'token')}, {count * chosen.model.config.vocab_size:,} logits: every one equals "
        "sequential generation, bit for bit.",
    )
