import torch

from remora.engine.layers.embedding import Embedding, Head
from remora.engine.layers.linear import Linear


def test_parts_of_a_fused_linear_are_filled_one_by_one() -> None:
    linear = Linear(4, {"q": 3, "k": 2}, bias=True, dtype=torch.float32, device="cpu")
    values = {name: torch.randn(view.shape) for name, view in linear.tensors("a.")}
    for name, view in linear.tensors("a."):
        view.copy_(values[name])
    x = torch.randn(2, 4)

    projected = linear(x)

    q = x @ values["a.q.weight"].T + values["a.q.bias"]
    k = x @ values["a.k.weight"].T + values["a.k.bias"]
    torch.testing.assert_close(projected, torch.cat((q, k), dim=1))


def test_a_tied_head_uses_the_memory_of_the_embedding() -> None:
    embedding = Embedding(8, 4, dtype=torch.bfloat16, device="cpu")
    embedding.weight.normal_()
    head = Head(embedding, tied=True)

    logits = head(embedding(torch.tensor([3])))

    assert list(head.tensors()) == []
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 8)


def test_an_untied_head_has_a_weight_of_its_own() -> None:
    head = Head(Embedding(8, 4, dtype=torch.float32, device="cpu"), tied=False)

    assert [name for name, _ in head.tensors()] == ["lm_head.weight"]
