"""What other processes take meanwhile."""

import os
import subprocess
import sys
import time

from lfm2np.bench import elsewhere
from lfm2np.bench.elsewhere import Elsewhere

SPIN = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


def test_what_this_process_does_is_not_counted(monkeypatch):
    """The system's clock of busy time set to our own: nobody else does anything."""
    monkeypatch.setattr(elsewhere, "busy_seconds", elsewhere.own_seconds)
    counted = Elsewhere()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert counted.share() == 0.0


def test_what_others_do_is_counted(monkeypatch):
    """Two of our seconds are none of ours."""
    counted = Elsewhere()
    own = elsewhere.own_seconds
    monkeypatch.setattr(elsewhere, "own_seconds", lambda: own() - 2.0)
    counted._began = time.perf_counter() - 10.0
    counted._busy = elsewhere.busy_seconds()
    assert 2.0 / 11.0 / (os.cpu_count() or 1) < counted.share() <= 1.0


def test_a_process_of_ours_counts_as_ours_once_it_has_ended():
    before = elsewhere.own_seconds()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert elsewhere.own_seconds() - before >= 0.45


def test_a_system_that_does_not_say_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(elsewhere, "STAT", tmp_path / "none")
    assert Elsewhere().share() is None
