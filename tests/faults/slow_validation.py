"""train.py whose validation after step 3 takes an hour, and says when it has begun."""

import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2]))
import train
from gpt2_repro import entry
from gpt2_repro.training.progress import ProgressBar


original = ProgressBar.on_prediction_step


def slowly(self, args, *rest, **more) -> None:
    (Path(args.output_dir).parent / "validating").touch()
    time.sleep(0.5)
    original(self, args, *rest, **more)


if __name__ == "__main__":
    ProgressBar.on_prediction_step = slowly
    entry.run(train.main)
