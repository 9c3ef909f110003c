"""Packed linear layers compute what plain ones do, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farfill.engine.torch.linear import PackedLinear, SiblingLinear, pack_linears, padded_rows


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


class Attention(nn.Module):
    def __init__(self, inputs: int, outputs: tuple[int, int, int], *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(inputs, width, bias=bias) for width in outputs)

    def projections(self) -> list[nn.Module]:
        return [self.q_proj, self.k_proj, self.v_proj]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [64, 1536])
def test_siblings_give_the_bits_of_layers_by_themselves(inputs: int, bias: bool) -> None:
    net = Attention(inputs, (96, 32, 32), bias=bias)
    alone = [PackedLinear(linear) for linear in net.projections()]
    assert pack_linears(net) == 3
    assert {type(linear) for linear in net.projections()} == {SiblingLinear}
    with torch.inference_mode():
        for rows in (1, 3, 16, 40):
            x = torch.randn(2, rows, inputs)
            for sibling, single in zip(net.projections(), alone, strict=True):
                assert torch.equal(sibling(x), single(x))


def test_siblings_called_with_other_inputs_or_in_another_order_are_not_mixed_up() -> None:
    net = Attention(64, (96, 32, 32))
    alone = [PackedLinear(linear) for linear in net.projections()]
    pack_linears(net)
    (q, k, v), (one, other) = net.projections(), torch.randn(2, 3, 64)
    with torch.inference_mode():
        calls = [(q, 0, one), (q, 0, other), (k, 1, one), (v, 2, other), (v, 2, one), (k, 1, other), (q, 0, one)]
        for sibling, index, x in calls:
            assert torch.equal(sibling(x), alone[index](x))


def test_layers_that_only_look_like_siblings_stay_by_themselves() -> None:
    net = Attention(64, (96, 32, 32))
    net.k_proj = nn.Linear(32, 32, bias=False)
    assert pack_linears(net) == 3
    assert {type(linear) for linear in net.projections()} == {PackedLinear}
