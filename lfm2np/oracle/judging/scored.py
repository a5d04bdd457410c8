"""Answers under the oracle: the truth and the noise of each sequence, computed once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lfm2np.checkpoint.loaded import LoadedModel
from lfm2np.engine.work.place import Place
from lfm2np.oracle.engines.records import Answer, Pair, Request
from lfm2np.oracle.judging.noise import Noise, joined, noise_of
from lfm2np.oracle.judging.routes import as_key, margins
from lfm2np.oracle.judging.truth import Ids, Spoken, Truth, spoken_truths
from lfm2np.oracle.judging.verdict import Position
from lfm2np.values import Progress


@dataclass(frozen=True, eq=False)
class Scored:
    """One sequence under the oracle: the truth, and the noise of one format.

    In a mixture of experts the noise is that of engines that take the truth's routes. `loose` is that of engines that
    choose their own, for answers without routes in a format with many near ties.
    """

    truth: Truth
    noise: Noise
    loose: Noise | None = None

    @cached_property
    def margins(self) -> NDArray[np.float64] | None:
        """[T, L] how far each route is from a tie, in units of its noise; None without experts."""
        preferred, routes, squares = self.truth.preferred, self.truth.routes, self.noise.squares
        if preferred is None or routes is None or squares is None:
            return None
        return margins(preferred, squares, routes.shape[-1])


@dataclass(eq=False)
class Known:
    """Earlier results, so that another format, or another engine with the same answers, costs little; and where to
    compute.
    """

    truths: dict[Spoken, Truth] = field(default_factory=dict)
    noises: dict[tuple[str, Spoken], Noise] = field(default_factory=dict)
    loose: dict[tuple[str, Spoken], Noise] = field(default_factory=dict)  # of engines with routes of their own
    place: Place = field(default_factory=Place)
    wanted: dict[Spoken, dict[int, set[int]]] = field(default_factory=dict)  # of each truth, tokens by row


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a verdict on all positions together rests on: answers, and their positions judged as one format's."""

    model: LoadedModel
    format_name: str
    pairs: Sequence[Pair]
    positions: Sequence[Position]
    known: Known
    progress: Progress | None = None


def usable(pairs: Sequence[Pair]) -> list[Pair]:
    """Those whose answers have tokens."""
    return [(request, answer) for request, answer in pairs if answer.error is None and answer.token_ids]


def spoken(request: Request, answer: Answer) -> Spoken:
    ids = (*request.prompt_token_ids, *(answer.token_ids or ()))
    return Spoken(ids, as_key(answer.routes, len(ids) - 1))


def truths_of(
    model: LoadedModel, pairs: Sequence[Pair], known: Known, progress: Progress | None = None
) -> dict[Spoken, Truth]:
    """By sequence, at the rows that are judged; sequences that are the beginning of another share its truth, since the
    arithmetic is causal. With reported routes, only the same sequence with the same routes shares it.
    """
    wanted: dict[Spoken, dict[int, set[int]]] = {}
    for request, answer in pairs:
        add_rows(
            wanted.setdefault(spoken(request, answer), {}),
            judged_tokens(request, answer, bool(model.config.sparse_layers)),
        )
    shared = whole_sequences({*without_routes(wanted), *without_routes(known.truths)})
    whole = {Spoken(ids): list(map(Spoken, of)) for ids, of in shared.items()}
    whole |= {spoken_sequence: [spoken_sequence] for spoken_sequence in wanted if spoken_sequence.routes}
    missing: dict[Spoken, dict[int, list[int]]] = {}
    for sequence, of in whole.items():
        rows: dict[int, set[int]] = {}
        for part in of:
            add_rows(rows, wanted.get(part, {}))
        if rows and (sequence not in known.truths or not known.truths[sequence].covers(rows)):
            for part in of:  # what is known of it, and of its beginnings, may be wanted again
                add_rows(rows, known.wanted.get(part, {}))
            missing[sequence] = {row: sorted(rows[row]) for row in sorted(rows)}
            known.wanted[sequence] = rows
    for truth in spoken_truths(model, missing, known.place, progress):
        known.truths[truth.spoken] = truth
    for noises in (known.noises, known.loose):
        for key in [key for key in noises if key[1] in missing]:
            del noises[key]  # of other columns
    return {part: known.truths[sequence] for sequence, of in whole.items() for part in of if part in wanted}


def add_rows(rows: dict[int, set[int]], more: Mapping[int, set[int]]) -> None:
    for row, tokens in more.items():
        rows.setdefault(row, set()).update(tokens)


def judged_tokens(request: Request, answer: Answer, is_mixture: bool) -> dict[int, set[int]]:
    """The tokens whose log-probabilities an answer reports, by row: its own, alternatives, and its prompt's. In a
    mixture of experts all: each token's route counts (noise.loosened).
    """
    ids, start = spoken(request, answer).token_ids, len(request.prompt_token_ids) - 1
    has_prompt = answer.prompt_logprobs is not None or is_mixture
    rows = {row: {ids[row + 1]} for row in range(0 if has_prompt else start, len(ids) - 1)}
    for index, top in enumerate(answer.top_logprobs or ()):
        rows[start + index].update(top)
    return rows


def without_routes(wanted: Iterable[Spoken]) -> list[Ids]:
    return [spoken_sequence.token_ids for spoken_sequence in wanted if not spoken_sequence.routes]


def whole_sequences(sequences: Iterable[Ids]) -> dict[Ids, list[Ids]]:
    """Those that are not the beginning of another, each with all its beginnings, itself included."""
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
    draws: Sequence[int],
    progress: Progress | None = None,
    own_routes: bool = False,
) -> None:
    """Of these emulated engines, unless known already."""
    noises = known.loose if own_routes else known.noises
    missing: dict[tuple[int, ...], list[Truth]] = {}
    for truth in dict.fromkeys(truths):
        noise = noises.get((format_name, truth.spoken))
        new = tuple(draw for draw in draws if noise is None or draw not in noise.draws)
        if new:
            missing.setdefault(new, []).append(truth)
    for new, of in missing.items():
        new_noises = noise_of(model, of, format_name, new, place=known.place, progress=progress, own_routes=own_routes)
        for truth, new_noise in zip(of, new_noises, strict=True):
            before = noises.get((format_name, truth.spoken))
            noises[format_name, truth.spoken] = new_noise if before is None else joined(before, new_noise)
