"""The loss of a call without a loss function: the model's own, weighted exactly."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcacc.loss import Loss
from funcacc.types import PyTree

_IGNORED = -100
_BY_SAMPLE = ("ForSequenceClassification", "ForImageClassification")
_BY_LABEL = ("ForMaskedLM", "ForTokenClassification")
_SHIFTED = ("ForCausalLM", "LMHeadModel")


def default_loss(model: Any, batch: PyTree) -> Any:
    """Call the model on a microbatch, and weigh the loss that it returns.

    For transformers models with ``labels`` in the microbatch:

    - causal language models: ``sum over tokens of -log p / number of labels``, both over the
      whole window, as the model computes it with ``num_items_in_batch``; label t + 1 belongs
      to logits t and -100 is ignored. The router loss of a mixture of experts is averaged over
      the microbatches.
    - encoder-decoders, masked language models, token classification: the mean over labels
      that aren't -100, over the whole window.
    - sequence and image classification: the mean over samples.

    Any other model returns its loss itself; it is averaged over the microbatches.

    Args:
        model: a module, called as ``model(**batch)``, ``model(*batch)`` or ``model(batch)``.
        batch: a mapping, a tuple or list, or a tensor.
    """
    if not isinstance(batch, Mapping):
        return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    labels = batch.get("labels")
    kinds = {cls.__name__ for cls in type(model).__mro__}
    if "PreTrainedModel" not in kinds or not isinstance(labels, Tensor):
        return model(**batch)
    name = type(model).__name__
    if name.endswith(_SHIFTED):
        return _causal(model, batch, labels)
    result = model(**batch)
    if name.endswith(_BY_SAMPLE):
        return Loss(result.loss * labels.shape[0], labels.shape[0])
    # The others of that name put images into a causal model.
    conditional = name.endswith("ForConditionalGeneration") and model.config.is_encoder_decoder
    if conditional or name.endswith(_BY_LABEL):
        return _of_mean(result.loss, (labels != _IGNORED).sum())
    return result


def _of_mean(mean: Tensor, count: Tensor) -> Loss:
    # The mean over no label is 0 / 0.
    return Loss(torch.where(count > 0, mean, 0.0) * count, count)


def _causal(model: Any, batch: Mapping[str, Any], labels: Tensor) -> Any:
    kinds = inspect.signature(model.forward).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in kinds):
        # Such a model can't be told the number of labels.
        result = model(**batch)
        return _of_mean(result.loss, (labels[..., 1:] != _IGNORED).sum())
    # Divided by one: the sum over the labels, also where there are none.
    result = model(**batch, num_items_in_batch=1)
    total, count = result.loss, (labels[..., 1:] != _IGNORED).sum()
    router = getattr(result, "aux_loss", None)
    coefficient = getattr(model.config, "router_aux_loss_coef", None)
    if isinstance(router, Tensor) and coefficient:
        return Loss(total - coefficient * router, count) + coefficient * Loss.mean(router)
    return Loss(total, count)
