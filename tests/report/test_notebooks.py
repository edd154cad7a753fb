"""All notebook cells run without errors, on a recorded run and on a new tiny run."""

import json
import shutil
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.sources import small_texts
from tests.report.conftest import write_run


NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def execute(name: str, parameters: str) -> tuple[str, list[str]]:
    """Run a notebook; return its text output and the media types of all its outputs.

    The code in `parameters` replaces the cell with the tag "parameters".
    """
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    cell.source = parameters
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    return "".join(output.get("text", "") for output in outputs), kinds


def test_the_report_in_a_notebook(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", learning_rate=2e-3)
    with (two / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "los')  # the run was killed while it wrote this line
    shutil.rmtree(two / "evaluation")
    text, kinds = execute("run_report", f"RUNS = {[str(one), str(two)]}")
    assert kinds.count("image/png") == 2 + 1  # two figures without HellaSwag, and the plot in the last cell
    assert "validation loss (nats/token)" in text and "one: evaluation" in text
    assert "two: Not evaluated yet" in text and "one, step 40: Once there was" in text


@pytest.mark.slow
def test_shakespeare_from_text_to_samples(real_data: Path, tmp_path: Path, monkeypatch) -> None:
    recipe = yaml.safe_load((NOTEBOOKS.parent / "recipes" / "shakespeare_char_cpu.yaml").read_text(encoding="utf-8"))
    monkeypatch.setattr(small_texts, "URL", (real_data / "tinyshakespeare" / "input.txt").as_uri())
    prepare(DataArguments(**recipe["data"] | {"dataset_dir": str(tmp_path / "data")}), PreparationOptions(num_proc=1))
    options = "--max_steps 30 --warmup_steps 10 --eval_steps 30 --eval_tokens 6400"
    parameters = f'DATA, RUN, OPTIONS = "{tmp_path}/data", "{tmp_path}/run", "{options}"'
    text, kinds = execute("shakespeare", parameters)
    assert kinds.count("image/png") == 2
    assert "run: complete, step 30 of 30" in text and "time of the run by activity" in text
    assert json.loads((tmp_path / "run" / "run_status.json").read_text(encoding="utf-8"))["eval_loss"] < 4
    assert text.count("ROMEO:") > 3


def colab(folder: Path) -> str:
    """Write a text, and return the parameters of the notebook for a tiny model."""
    stories = [f"Once there was a {word} on a hill. " * 60 for word in ("cat", "dog", "bird", "boat", "tree") * 20]
    lines = [json.dumps({"text": f"{number}: {story}"}) + "\n" for number, story in enumerate(stories)]
    (folder / "stories.jsonl").write_text("".join(lines), encoding="utf-8")
    return f'''DATA, RUN, COPIES, PROMPT = "{folder}/data", "{folder}/run", "{folder}/drive", "Once"
TEXT = "--data_files {folder}/stories.jsonl --tokenizer train:300 --num_proc 1"
MODEL = "--n_layer 1 --n_head 1 --n_embd 16"
STEPS = "--max_steps 4 --tokens_per_step 1024 --per_device_train_batch_size 2 --use_cpu --sample_tokens 8"
'''


def test_colab_from_text_to_scores(tmp_path: Path) -> None:
    text, kinds = execute("colab", colab(tmp_path))
    assert "run: complete, step 4 of 4" in text and "image/png" in kinds
    assert "bits_per_byte" in text and "untrained" in text
    assert (tmp_path / "drive/final/model.safetensors").is_file()


@pytest.mark.slow
def test_colab_after_a_disconnect(tmp_path: Path) -> None:
    parameters = colab(tmp_path)
    text, _ = execute("colab", parameters + 'STEPS += " --stop_at_step 2"')
    assert "Stopped at step 2" in text
    shutil.rmtree(tmp_path / "run")  # the machine is gone, the drive is not
    text, _ = execute("colab", parameters)
    assert "restored" in text and "run: complete, step 4 of 4" in text
