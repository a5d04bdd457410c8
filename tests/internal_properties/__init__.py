"""Properties of this package's own parts, which other engines do not have: pool, scheduler, sampler, drafts, traces.

`pytest tests/internal_properties` tries them under `quick`, or under the profile that LFM2NP_PROFILE names;
`pytest tests/faults` tries them on faults, after those of lfm2np.suite.
"""
