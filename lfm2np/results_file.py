"""The name under which README first gave it out; it stands in work/."""

from lfm2np.work.results_file import ResultsFile

__all__ = ["ResultsFile"]
