"""Muon, MARS, the learning-rate schedule and the average of the weights."""

from typing import Literal


MUON, MARS = "muon", "mars"
OWN_OPTIMIZERS = (MUON, MARS)
Schedule = Literal["cosine", "warmup_stable_decay", "constant"]  # the formulas are in schedule.py
