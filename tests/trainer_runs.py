"""Runs of transformers' Trainer, in a process of its own: Accelerate has one device for a process.

`python -m tests.trainer_runs FOLDER NAME ...` writes what each run logged into `FOLDER/NAME.pt`.
"""

import sys
from pathlib import Path

import torch
import transformers

from funcacc.errors import FuncaccError
from funcacc.integrations.transformers import WindowTrainer

K = 3


def rows(count, length=12):
    """Token rows with labels of other numbers in each."""
    ids = torch.randint(1, 40, (count, length))
    labels = ids.clone()
    for row, cut in enumerate(torch.randint(4, length + 1, (count,)).tolist()):
        labels[row, cut:] = -100
    return [{"input_ids": i, "labels": j} for i, j in zip(ids, labels, strict=True)]


def gpt2(dropout):
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=12, n_embd=16, n_layer=1, n_head=2, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


class Logged(transformers.TrainerCallback):
    """What was logged for each step."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            keys = ("loss", "grad_norm", "learning_rate")
            self.logs.append([float(logs[key]) for key in keys])


def train(cls, out, *, dropout=0.0, resume=None, count=32, **options):
    torch.manual_seed(0)
    # 32 rows are 16 batches: five windows of three and one of one in each epoch.
    data, model, logged = rows(count), gpt2(dropout), Logged()
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(out), "max_steps": 20, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": K, "max_grad_norm": 0.5, "learning_rate": 1e-2,
            "adam_epsilon": 1e-4, "lr_scheduler_type": "cosine", "warmup_steps": 3,
            "weight_decay": 0.1, "logging_steps": 1, "save_steps": 10, "report_to": [],
            "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 1, **options,
        }
    )  # fmt: skip
    trainer = cls(model, arguments, train_dataset=data, callbacks=[logged])
    trainer.train(resume_from_checkpoint=resume and str(resume))
    weights = {k: v.cpu() for k, v in trainer.model.state_dict().items()}
    step = getattr(trainer, "window_step", None)
    return {
        "logs": torch.tensor(logged.logs, dtype=torch.float64),
        "weights": weights,
        "device": trainer.args.device.type,
        "compiles": step and step.report().compiles,
    }


def refused(*args, **options):
    try:
        train(*args, **options)
    except FuncaccError as e:
        return f"{type(e).__name__}: {e}"


RUNS = {
    "plain": lambda out: train(transformers.Trainer, out),
    "window": lambda out: train(WindowTrainer, out),
    "smooth-plain": lambda out: train(
        transformers.Trainer, out, label_smoothing_factor=0.6, max_steps=3, max_grad_norm=0.0
    ),
    "smooth-window": lambda out: train(
        WindowTrainer, out, label_smoothing_factor=0.6, max_steps=3, max_grad_norm=0.0
    ),
    "whole": lambda out: train(WindowTrainer, out, dropout=0.1),
    "resumed": lambda out: train(
        WindowTrainer, out, dropout=0.1, resume=out.parent / "whole" / "checkpoint-10"
    ),
    "ragged": lambda out: refused(WindowTrainer, out, count=3),
    "bf16": lambda out: refused(WindowTrainer, out, bf16=True, use_cpu=True),
}


if __name__ == "__main__":
    for name in sys.argv[2:]:
        out = Path(sys.argv[1]) / name
        torch.save(RUNS[name](out), out.with_suffix(".pt"))
