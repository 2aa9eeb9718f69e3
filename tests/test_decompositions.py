"""Operations that are written out: the numbers of PyTorch's own kernels."""

import pytest
import torch

from funcacc.capture.trace import capture
from funcacc.types import TensorSpec


@pytest.mark.parametrize(
    "x, bins, low, high",
    [
        (torch.tensor([0.0, 1, 1, 2, 3, 3, 3]), 4, 0, 3),
        (torch.tensor([-1.0, 0, 0.5, 2, 9]), 3, 0, 2),
        (torch.randn(50), 7, 0, 0),
        (torch.ones(4), 5, 0, 0),
    ],
)
def test_histc(x, bins, low, high):
    graph = capture(
        lambda _, t: [torch.histc(t, bins=bins, min=low, max=high)], [TensorSpec.of(x)], ["x"]
    )
    assert not any("histc" in str(n.target) for n in graph.nodes)
    torch.testing.assert_close(graph(x)[0], torch.histc(x, bins=bins, min=low, max=high))
