"""Work that any process with the checkpoint can do, where it is done, and its results in files.

place.py (Work, Place, compute), shards.py (a map that survives workers that die), results_file.py (ResultsFile, merge,
spot checks; files of lines that are never half written).
Public: `from lfm2np.engine.work import Place, ResultsFile`.
"""

from lfm2np.engine.work.place import Place, Work, compute
from lfm2np.engine.work.results_file import ResultsFile

__all__ = ["Place", "ResultsFile", "Work", "compute"]
