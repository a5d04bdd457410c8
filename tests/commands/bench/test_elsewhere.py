"""What other processes take meanwhile."""

import os
import subprocess
import sys

from lfm2np.commands.bench import machine
from lfm2np.commands.bench.machine import Elsewhere

SPIN = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"


def test_what_this_process_does_is_not_counted(monkeypatch):
    """The system's clock of busy time set to our own: nobody else does anything."""
    monkeypatch.setattr(machine, "busy_seconds", machine.own_seconds)
    counted = Elsewhere()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert counted.share() == 0.0


def test_what_others_do_is_a_share_of_all_processors(monkeypatch):
    """Two seconds of others in the last ten or a little more."""
    monkeypatch.setattr(machine, "busy_seconds", machine.own_seconds)
    counted = Elsewhere()
    counted._busy -= 2.0
    counted._began -= 10.0
    assert 0.0 < counted.share() <= 0.2 / os.cpu_count()


def test_a_process_of_ours_counts_as_ours_once_it_has_ended():
    before = machine.own_seconds()
    subprocess.run([sys.executable, "-c", SPIN], check=True)
    assert machine.own_seconds() - before >= 0.18


def test_a_system_that_does_not_say_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "STAT", tmp_path / "none")
    assert Elsewhere().share() is None
