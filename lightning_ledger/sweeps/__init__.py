"""Sweeps: W&B sweep files, run on this machine, without a server. Needs no torch."""

from lightning_ledger.sweeps.definition import Run, Sweep
from lightning_ledger.sweeps.running import Outcome, run_all

__all__ = ["Outcome", "Run", "Sweep", "run_all"]
