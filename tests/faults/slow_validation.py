"""train.py whose validation after step 3 takes an hour, and says when it has begun."""

import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2]))
import train
from gpt2_repro import entry
from gpt2_repro.training import fit
from gpt2_repro.training.trainer import PretrainingTrainer


original = PretrainingTrainer._after_validation_batch


def slowly(self) -> None:
    (Path(self.args.output_dir).parent / "validating").touch()
    time.sleep(0.5)
    original(self)


if __name__ == "__main__":
    PretrainingTrainer._after_validation_batch = slowly
    assert fit.PretrainingTrainer is PretrainingTrainer
    entry.run(train.main)
