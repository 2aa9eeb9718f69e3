"""Each ready-made loss over a window equals PyTorch's own on the full batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcacc
from funcacc.errors import ModelError

losses = funcacc.losses
C = 4
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.1])


def shifted(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def masked_labels(shape):
    labels = torch.randint(0, C, shape)
    labels.view(-1)[::3] = -100
    labels[0] = -100
    return labels


# name: (shape of the logits, targets, ours, PyTorch's)
CASES = {
    "classes": (
        (6, C),
        lambda: torch.randint(0, C, (6,)),
        losses.cross_entropy,
        F.cross_entropy,
    ),
    "ignored": ((6, C), lambda: masked_labels((6,)), losses.cross_entropy, F.cross_entropy),
    "ignored-class": (
        (6, C),
        lambda: torch.tensor([0, 1, 1, 2, 1, 3]),
        lambda x, y: losses.cross_entropy(x, y, ignore_index=1, weight=WEIGHTS.to(x.device)),
        lambda x, y: F.cross_entropy(x, y, ignore_index=1, weight=WEIGHTS),
    ),
    "weights-and-smoothing": (
        (6, C),
        lambda: masked_labels((6,)),
        lambda x, y: losses.cross_entropy(x, y, weight=WEIGHTS, label_smoothing=0.2),
        lambda x, y: F.cross_entropy(x, y, weight=WEIGHTS, label_smoothing=0.2),
    ),
    "images": ((6, C, 3), lambda: masked_labels((6, 3)), losses.cross_entropy, F.cross_entropy),
    "probabilities": (
        (6, C),
        lambda: torch.randn(6, C).softmax(1),
        losses.cross_entropy,
        F.cross_entropy,
    ),
    "causal": ((6, 5, C), lambda: masked_labels((6, 5)), losses.causal_lm, shifted),
    "mse": ((6, 3), lambda: torch.randn(6, 3), losses.mse, F.mse_loss),
    "bce": (
        (6, 3),
        lambda: torch.randint(0, 2, (6, 3)).float(),
        lambda x, y: losses.bce_with_logits(x, y, pos_weight=WEIGHTS[:3]),
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=WEIGHTS[:3]),
    ),
}


class Scaled(nn.Module):
    """Logits from the batch, times a parameter: enough for a gradient."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_full_batch(engine, name):
    shape, targets, ours, theirs = CASES[name]
    x, y = torch.randn(shape), targets()
    model, ref = Scaled().to(funcacc.device(engine)), Scaled()
    window = funcacc.split({"x": x, "y": y}, 3)
    out = funcacc.accumulate(model, window, lambda m, b: ours(b["x"] * m.scale, b["y"]))
    loss = theirs(x * ref.scale, y)
    loss.backward()
    torch.testing.assert_close(out.loss.cpu(), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.grads["scale"].cpu(), ref.scale.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [losses.mse, losses.bce_with_logits])
def test_shapes_are_not_broadcast(loss):
    with pytest.raises(ModelError, match=r"was given shapes \(5, 1\) and \(5,\); make them equal"):
        loss(torch.zeros(5, 1), torch.zeros(5))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), "5", None])
def test_weights_are_numbers_that_are_not_negative(weight):
    with pytest.raises(
        ModelError, match=r"the weight of a Loss is .*; give what `total` is a sum of"
    ):
        funcacc.Loss(torch.zeros(()), weight)


def test_aux_of_any_tree_comes_back_in_its_structure(engine):
    def loss_fn(m, b):
        aux = {
            "z": (b["n"], None, [b["flag"]]),
            "a": {"y": funcacc.Last(b["flag"]), "x": funcacc.Sum(b["n"]), "none": None},
            "stack": funcacc.Stack(b["n"]),
        }
        return (m.scale * b["x"]).sum(), aux

    batches = [
        {"x": torch.ones(1), "n": torch.tensor(i), "flag": torch.tensor(i > 1)} for i in (1, 2, 4)
    ]
    aux = funcacc.accumulate(Scaled().to(funcacc.device(engine)), batches, loss_fn).aux
    assert list(aux) == ["z", "a", "stack"] and list(aux["a"]) == ["y", "x", "none"]
    assert aux["z"][1] is None and aux["a"]["none"] is None
    assert aux["z"][0].item() == pytest.approx(7 / 3)
    assert aux["z"][2][0].item() == pytest.approx(2 / 3)
    assert aux["a"]["y"].item() is True
    assert (aux["a"]["x"].item(), aux["a"]["x"].dtype) == (7, torch.int64)
    assert (aux["stack"].tolist(), aux["stack"].dtype) == ([1, 2, 4], torch.int64)


def test_losses_add_up_by_sum():
    terms = [funcacc.Loss(torch.tensor(3.0), torch.tensor(2.0)) for _ in range(3)]
    assert len(sum(terms).terms) == 3
    with pytest.raises(TypeError):
        1 + terms[0]
