"""Work that any process with the checkpoint can do: place.py (Work, Place, compute, Workers: on any executor, though
workers die) and results_file.py (ResultsFile, merge, spot checks; LineFile, which survives an interrupt)."""

from lfm2np.engine.work.place import Place, Work, Workers, compute
from lfm2np.engine.work.results_file import ResultsFile

__all__ = ["Place", "ResultsFile", "Work", "Workers", "compute"]
