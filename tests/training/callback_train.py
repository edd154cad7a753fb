"""Run train.py with a callback that records the checkpoint of each on_save, and the end of the training.

Environment variables:
    CALLS: a file that gets one line of JSON for each call.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from gpt2_repro import cli


def add_recorder() -> None:
    from transformers import TrainerCallback

    from gpt2_repro.checkpoints.manifest import defect
    from gpt2_repro.training import build

    def write(event: str, state: Any, complete: bool) -> None:
        call = {"event": event, "step": state.global_step, "complete": complete, "epoch": state.epoch}
        with Path(os.environ["CALLS"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(call) + "\n")

    class Recorder(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")  # as the callback of wandb
            write("save", state, defect(folder, read_files=True) is None)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                write("end", state, complete=True)

    add_callbacks = build.add_callbacks

    def add(trainer: Any) -> None:
        add_callbacks(trainer)
        trainer.add_callback(Recorder())

    build.add_callbacks = add


if __name__ == "__main__":
    add_recorder()
    cli.run(train.main)
