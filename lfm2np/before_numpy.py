"""What has to stand in the environment before NumPy loads its BLAS: imported first of all by the package itself.

After a product OpenBLAS's threads go on asking for work for 2**26 cycles, 26 ms, and so keep their cores from the
threads that compute elementwise pieces (arithmetic/pieces.py) in between (`lfm2np bench profile` shows it). 2**20 cycles,
0.4 ms, are more than lie between two products of a small step. Whoever imports NumPy before this package, and has not
set the variable, keeps OpenBLAS's own choice. No bit depends on it.

Source: OpenBLAS, driver/others/blas_server.c (thread_timeout).
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
