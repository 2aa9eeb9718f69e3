"""A Hugging Face `Trainer` whose optimizer steps are funcacc's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from funcacc.batches import Window, stack
from funcacc.errors import BatchError, OptionError
from funcacc.loss import Loss
from funcacc.step import StepOutput
from funcacc.train import TrainStep

_FILE = "funcacc.pt"


class WindowsMixin:
    """Puts funcacc's training step into a `transformers.Trainer`, by inheritance.

    The trainer reads ``gradient_accumulation_steps`` batches, as always. They are collected, and
    with the last of them one `TrainStep` computes gradients, clips them to ``max_grad_norm`` and
    updates parameters and optimizer. Batches, learning rates, logs, evaluation, callbacks and
    checkpoints are the trainer's own, and so is the loss that is traced (`compute_loss`, overridden
    or not, with label smoothing or ``compute_loss_func``). Differences:

    - ``p.grad`` stays empty, so ``on_pre_optimizer_step`` finds no gradients.
    - Dropout draws from funcacc's key. It is kept with each checkpoint, so a resumed run goes on
      with the same numbers.
    - Batches of one window have one shape: pad to a fixed length, ``dataloader_drop_last=True``.

    Example:
        >>> from transformers import Seq2SeqTrainer
        >>> class Seq2SeqWindowTrainer(WindowsMixin, Seq2SeqTrainer):
        ...     pass
    """

    window_options: dict[str, Any] = {}  # noqa: RUF012 - read only
    """Further options of `TrainStep`, set in a subclass or on the trainer."""

    window_step: TrainStep | None = None
    """The step of the training under way; `None` before the first window."""

    _batches: list[dict[str, Any]]
    _output: StepOutput
    _stepped: Any = None

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer's; clipping by the accelerator becomes a look at the norm."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        if accelerator.mixed_precision != "no" or accelerator.distributed_type not in ("NO", "XLA"):
            raise OptionError(
                f"mixed_precision={accelerator.mixed_precision!r} and distributed_type="
                f"{str(accelerator.distributed_type)!r} of the trainer's accelerator change the "
                "training step behind the trainer; leave bf16, fp16, fsdp and deepspeed out; set "
                "window_options = {'compute_dtype': torch.bfloat16} for mixed precision"
            )
        # Already clipped, in the program.
        accelerator.clip_grad_norm_ = lambda *args, **kwargs: self._output.grad_norm
        self._batches = []

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the trainer's; ``optimizer.step()`` of the loop does nothing."""
        self.optimizer.step = self._was_taken  # type: ignore[attr-defined]
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def _was_taken(self, closure: Any = None) -> None:
        """In place of the optimizer's step, which was taken with the window's last batch."""

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Collect a batch; with the last of the window, take the optimizer step.

        Returns:
            What the trainer adds up for its logs: 0, and with the last batch the window's loss.

        Raises:
            BatchError: for batches of other shapes than the first of the window.
        """
        zero = torch.zeros((), device=self.args.device)  # type: ignore[attr-defined]
        prepared = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        batch = {"inputs": dict(prepared)}
        if num_items_in_batch is not None:
            batch["items"] = zero + num_items_in_batch
        self._batches.append(batch)
        if not self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            return zero
        model.train()
        window = self._window(zero)
        self._output = self._made_step()(window)
        return self._output.loss.to(zero.dtype)

    def _window(self, zero: Tensor) -> Window:
        count = len(self._batches)
        capacity = max(count, self.args.gradient_accumulation_steps)  # type: ignore[attr-defined]
        batches = [{**batch, "share": zero + 1 / count} for batch in self._batches]
        self._batches = []
        try:
            # A shorter last window has the same program.
            return Window(stack(batches + batches[-1:] * (capacity - count)).tree, count)
        except BatchError as e:
            raise BatchError(
                f"{e}; give the trainer dataloader_drop_last=True and a collator that pads to one "
                "length (padding='max_length')"
            ) from e

    def _made_step(self) -> TrainStep:
        optimizer = self.optimizer  # type: ignore[attr-defined]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # not Accelerate's wrapper
        if self.window_step is None or self._stepped is not optimizer:
            self._stepped = optimizer
            options = {"clip_norm": self.args.max_grad_norm or None, **self.window_options}  # type: ignore[attr-defined]
            self.window_step = TrainStep(self.model, optimizer, self._loss, **options)  # type: ignore[attr-defined]
        return self.window_step

    def _loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        """The trainer's loss of one batch, added up over the window or averaged as it does."""
        items = batch.get("items")
        loss = self.compute_loss(model, dict(batch["inputs"]), num_items_in_batch=items)  # type: ignore[attr-defined]
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            accepts = self.model_accepts_loss_kwargs  # type: ignore[attr-defined]
            own = self.compute_loss_func is not None  # type: ignore[attr-defined]
            scaled = (accepts and items is not None) or own
        # Already divided by what the whole window has: the shares add up to 1.
        return Loss(loss, batch["share"]) if scaled else Loss.mean(loss)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        if self.window_step is not None:
            torch.save(self.window_step.state_dict(), Path(output_dir) / _FILE)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]
        path = None if checkpoint is None else Path(checkpoint) / _FILE
        if path is not None and path.exists():
            self._made_step().load_state_dict(torch.load(path, weights_only=True))


class WindowTrainer(WindowsMixin, transformers.Trainer):
    """`transformers.Trainer` with one compiled program for each optimizer step.

    See `WindowsMixin` for what is the same and what differs. Written for transformers 5, with
    accelerate.
    """
