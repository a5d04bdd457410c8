"""What was said, under the oracle: the truth and the noise of each sequence, computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.oracle.judging.noise import Ids, Noise, Spoken, Truth, noise_of, spoken_truths
from lfm2np.oracle.judging.routes import as_key, margins
from lfm2np.oracle.targets.records import Answer, Ask
from lfm2np.progress import Progress
from lfm2np.work.place import Place

Pair = tuple[Ask, Answer]


@dataclass(frozen=True, eq=False)
class Scored:
    """One sequence under the oracle: the truth, and the noise of one format.

    In a mixture of experts the noise is of engines that take the truth's routes. `loose` is that of engines that choose
    their own: of an answer that tells none, in a format in which near ties are no exception. `margins` [T, L] are how
    far each route is from a tie, in units of its noise.
    """

    truth: Truth
    noise: Noise
    loose: Noise | None = None
    margins: NDArray[np.float64] | None = None


@dataclass(eq=False)
class Known:
    """What was computed before, so that another format, or another engine that says the same, costs little; and where
    the rest is computed."""

    truths: dict[Spoken, Truth] = field(default_factory=dict)
    noises: dict[tuple[str, Spoken], Noise] = field(default_factory=dict)
    loose: dict[tuple[str, Spoken], Noise] = field(default_factory=dict)  # of engines with routes of their own
    place: Place = field(default_factory=Place)


def spoken(ask: Ask, answer: Answer) -> Spoken:
    ids = (*ask.prompt_token_ids, *(answer.token_ids or ()))
    return Spoken(ids, as_key(answer.routes, len(ids) - 1))


def truths_of(
    model: LoadedModel, pairs: Sequence[Pair], known: Known, progress: Progress | None = None
) -> dict[Spoken, Truth]:
    """By sequence; those that are the beginning of another share its truth, since the arithmetic is causal.

    Where routes are told, only the same sequence with the same routes shares it.
    """
    wanted: dict[Spoken, dict[int, set[int]]] = {}
    for ask, answer in pairs:
        rows = wanted.setdefault(spoken(ask, answer), {})
        for row, token_id in enumerate(spoken(ask, answer).token_ids[1:]):
            rows.setdefault(row, set()).add(token_id)
        for index, top in enumerate(answer.top_logprobs or ()):
            rows[len(ask.prompt_token_ids) - 1 + index].update(top)
    whole = {Spoken(ids): [Spoken(one) for one in of] for ids, of in whole_sequences(untold_of(wanted)).items()}
    whole |= {one: [one] for one in wanted if one.routes}
    missing: dict[Spoken, dict[int, list[int]]] = {}
    for one, of in whole.items():
        rows = {}
        for part in of:
            for row, tokens in wanted[part].items():
                rows.setdefault(row, set()).update(tokens)
        if one not in known.truths or not known.truths[one].covers(rows):
            missing[one] = {row: sorted(tokens) for row, tokens in rows.items()}
    for truth in spoken_truths(model, missing, known.place, progress):
        known.truths[truth.spoken] = truth
    for noises in (known.noises, known.loose):
        for key in [key for key in noises if key[1] in missing]:
            del noises[key]  # it is of other columns
    return {part: known.truths[one] for one, of in whole.items() for part in of}


def untold_of(wanted: Iterable[Spoken]) -> list[Ids]:
    return [one.token_ids for one in wanted if not one.routes]


def whole_sequences(sequences: Iterable[Ids]) -> dict[Ids, list[Ids]]:
    """Those that are no other's beginning, each with all that are its beginning, itself included."""
    whole: dict[Ids, list[Ids]] = {}
    for ids in sorted(sequences, reverse=True):  # a sequence comes right after those that begin with it
        last = next(reversed(whole), None)
        if last is not None and last[: len(ids)] == ids:
            whole[last].append(ids)
        else:
            whole[ids] = [ids]
    return whole


def add_noises(
    model: LoadedModel,
    format_name: str,
    truths: Sequence[Truth],
    known: Known,
    draws: int,
    progress: Progress | None = None,
    own_routes: bool = False,
) -> None:
    """Those that are not known yet."""
    noises = known.loose if own_routes else known.noises
    new = [one for one in truths if (format_name, one.spoken) not in noises]
    made = noise_of(model, new, format_name, draws, place=known.place, progress=progress, own_routes=own_routes)
    for truth, own in zip(new, made, strict=True):
        noises[format_name, truth.spoken] = own


def scored_as(model: LoadedModel, truth: Truth, noise: Noise, loose: Noise | None = None) -> Scored:
    if truth.preferred is None or noise.squares is None or model.config.mixture is None:
        return Scored(truth, noise)
    count = model.config.mixture.num_experts_per_tok
    return Scored(truth, noise, loose, margins(truth.preferred, noise.squares, count))
