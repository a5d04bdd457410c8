"""Every claim can fail: each property of the suite for any engine is broken by a fault, and says so.

Beside them stand those of this package's own parts that a fault of the catalogue breaks; the others of these are kept
by mutants of the code that they are about (docs/why/proved.md).
"""

import pytest
from internal_properties.catalogue import EVERYTHING

from faults import inject
from faults.trial import forget
from lfm2np.suite.adapters import own
from lfm2np.suite.catalogue import ALL
from lfm2np.suite.runner import run_property

pytestmark = pytest.mark.slow

BREAKS = {
    "equals-reference": ("positions-stop-at-40", "chunk-ignores-the-past-state", "right-padding-enters-the-state"),
    "every-schedule": ("fork-does-not-copy-the-state", "preempted-request-loses-its-output", "noise-of-the-batch-row"),
    "speculative-is-plain": ("rejected-drafts-stay-in-the-state",),
    "text-is-what-the-tokens-say": (
        *("stop-reason-not-told", "characters-cut-at-token-borders", "held-back-text-lost-at-an-abort"),
    ),
    "any-noise": ("first-stop-token-missed", "logprobs-after-temperature"),
    "draws-are-distributed": ("first-token-from-the-row-before",),
    "noise-differs": ("same-noise-for-all-samples", "engine-seed-ignored", "request-seed-ignored"),
    "conservation": ("abort-leaks-blocks",),
    "memory-is-right": ("checkpoint-one-token-ahead-of-its-key",),
    "refusals": ("ids-below-0-accepted",),
    "overflow-stays-home": ("one-overflow-ends-all",),
    "scores": ("attention-scale-missing",),
    "one-bos": ("double-bos-in-chats",),
    "prefix-hits": ("prefix-hit-without-its-state",),
    "wide-batches": ("slot-index-wraps-modulo-2",),
}
BREAKS_OWN_PARTS = {
    "runs-are-counted": "aborts-missing-from-the-trace",
    "scheduler-machine": "blocks-released-twice",
    "stop-strings-are-found": "stop-string-left-in-the-text",
    "drawn-drafts-are-of-their-place": "last-draft-accepted-unchecked",
    "draft-models-propose": "checkpoint-one-token-ahead-of-its-key",
    "sampling-is-its-definition": "tie-takes-the-highest-id",
    "is-lfm2": "final-norm-is-another-tensor",
    "noise-is-of-its-place": "requests-without-a-seed-share-noise",
    "rejection-is-exact": "drawn-guess-always-accepted",
    "guesses-use-their-own-noise": "noise-of-acceptance-draws-the-replacement",
    "waiting-served-counts": "waiting-served-ratio-ignored",
    "batches-meet-limits": "watermark-holds-when-nothing-runs",
    "batches-fit": "budget-ignored",
    "decodes-wait-their-turn": "decodes-starve-behind-prompts",
    "decodes-go-first": "budget-ignored",
    "priority-is-worth-steps": "priority-inverted",
    "answers-are-judged": "tokens-after-an-accepted-end",
    "published-blocks-are-not-written": "half-filled-block-published",
    "attention-in-pieces": "later-piece-of-queries-misses-its-own-position",
}
PROPERTIES = {prop.id: prop for prop in EVERYTHING}


def test_every_property_for_any_engine_has_a_fault() -> None:
    assert list(BREAKS) == [prop.id for prop in ALL]
    assert BREAKS_OWN_PARTS.keys() <= PROPERTIES.keys() - BREAKS.keys()


RARE = "held-back-text-lost-at-an-abort"  # half a minute until an abort meets a text that is held back
PAIRS = [
    pytest.param(name, fault, marks=[pytest.mark.night] * (fault == RARE))
    for name, faults in BREAKS.items()
    for fault in faults
]


@pytest.mark.parametrize(("name", "broken_by"), [*PAIRS, *BREAKS_OWN_PARTS.items()])
def test_a_property_fails_where_its_fault_is(name: str, broken_by: str) -> None:
    forget()
    try:
        with inject(broken_by):
            result = run_property(PROPERTIES[name], own, "ci", shrink=False)
    finally:
        forget()
    assert result.status == "failed"
