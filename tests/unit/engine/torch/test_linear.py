"""Packed linear layers compute what plain ones do, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farfill.engine.torch.linear import PackedLinear, pack_linears, padded_rows


@pytest.mark.parametrize("inputs", [48, 1024, 1536, 5000])
@pytest.mark.parametrize("bias", [False, True])
def test_product_is_that_of_the_plain_layer(inputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, 40, bias=bias)
    x = torch.randn(2, 5, inputs)
    with torch.inference_mode():
        y = PackedLinear(plain)(x)
        assert y.shape == (2, 5, 40)
        torch.testing.assert_close(y, plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs", [576, 1536, 2048])
def test_rows_alone_and_together_are_bit_identical(inputs: int) -> None:
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(inputs, 96, bias=False))
    x = torch.randn(40, inputs)
    with torch.inference_mode():
        alone = torch.cat([packed(row.unsqueeze(0)) for row in x])
        for rows in (2, 3, 8, 16, 17, 40):
            assert torch.equal(packed(x[:rows]), alone[:rows])


def test_few_shapes_serve_all_lengths() -> None:
    padded = [padded_rows(rows) for rows in range(1, 2049)]
    assert all(rows <= up <= max(rows + 31, rows * 5 / 4) for rows, up in enumerate(padded, 1))
    assert padded[:16] == list(range(1, 17))
    assert {512, 1024, 2048} <= set(padded)
    assert len(set(padded)) <= 40


def test_only_plain_layers_of_suitable_types_are_replaced() -> None:
    class Special(nn.Linear):
        pass

    net = nn.ModuleDict({"a": nn.Linear(8, 8), "b": Special(8, 8), "c": nn.Linear(8, 8).double()})
    assert pack_linears(net) == 1
    assert type(net["a"]) is PackedLinear
    assert (type(net["b"]), type(net["c"])) == (Special, nn.Linear)
