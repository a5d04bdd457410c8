"""Puts tests/ on the path, so that every test can import `builders`, and sets Hypothesis up.

Profiles, by the variable HYPOTHESIS_PROFILE: `ci` (default) always draws the same examples, `deep` draws new ones,
twenty times as many, `few` always the same five, for emulated machines. No profile has a deadline: this is no test of
speed.
"""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("few", derandomize=True, deadline=None, max_examples=5)
settings.register_profile("deep", derandomize=False, deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
