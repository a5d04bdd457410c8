"""A run of the page held against each of its requests alone, computed by the reference: token by token, bit by bit."""

from __future__ import annotations

from urllib.parse import parse_qsl

from lfm2np.engine.sequential import answer_alone
from lfm2np.oracle.report.markup import counted
from lfm2np.teaching.lab.compute import Logits, coming_of, noted_in, run_engine
from lfm2np.teaching.lab.models import Models, understand
from lfm2np.teaching.lab.predictions import Verdict
from lfm2np.teaching.lab.settings import Problems
from lfm2np.values import show


def prove(query: str, models: Models) -> Verdict:
    """The run of a link, anew."""
    try:
        settings = understand(parse_qsl(query, keep_blank_values=True), models)
    except Problems as problem:
        return Verdict(False, str(problem))
    together = run_engine(settings, models)
    if together.stopped:
        return Verdict(False, f"{together.stopped} So it is not proved.")
    chosen, count = models.by_name[settings.model], 0
    for request in coming_of(settings, models):
        name, alone = request.request_id, Logits()
        ids = chosen.model.prompt_ids(request.prompt)
        *_, answer = answer_alone(chosen.model, name, ids, request.params, 0, on_logits=noted_in(alone))
        right, said = answer.outputs[0].token_ids, together.tokens.get(name, ())
        if said != right:
            words = [" ".join(show(chosen.texts[token]) for token in answer) for answer in (said, right)]
            return Verdict(False, f"Request {name}: its tokens are {words[0]}; alone they are {words[1]}.")
        if together.logits.get(name) != alone[name]:
            other_logits = "the tokens are right, and the logits are not those that it has alone"
            return Verdict(False, f"Request {name}: {other_logits}.")
        count += len(right)
    sizes = f"{counted(len(settings.requests), 'request')}, {counted(count, 'token')}"
    logits = f"{count * chosen.model.config.vocab_size:,} logits"
    return Verdict(True, f"{sizes}, {logits}: every one equals sequential generation, bit for bit.")
