"""Muon, the learning-rate schedule and the average of the weights."""

from typing import Literal


MUON = "muon"
Schedule = Literal["cosine", "warmup_stable_decay", "constant"]  # the formulas are in schedule.py
