import torch

from remora.engine.layers.embedding import Embedding, Head
from remora.engine.layers.linear import Linear
from remora.engine.parallel.shard import Axis


def make_head(tied: Embedding | None, dtype: torch.dtype) -> Head:
    return Head("lm_head", Axis.whole(8), 4, tied=tied, dtype=dtype, device="cpu")


def test_parts_of_a_fused_linear_are_filled_one_by_one() -> None:
    parts = {"q": Axis.whole(3), "k": Axis.whole(2)}
    linear = Linear(Axis.whole(4), parts, bias=True, dtype=torch.float32, device="cpu")
    values = {name: torch.randn(shard.shape) for name, shard in linear.tensors("a.")}
    for name, shard in linear.tensors("a."):
        shard.fill(values[name])
    x = torch.randn(2, 4)

    projected = linear(x)

    q = x @ values["a.q.weight"].T + values["a.q.bias"]
    k = x @ values["a.k.weight"].T + values["a.k.bias"]
    torch.testing.assert_close(projected, torch.cat((q, k), dim=1))


def test_a_tied_head_uses_the_memory_of_the_embedding() -> None:
    embedding = Embedding(Axis.whole(8), 4, dtype=torch.bfloat16, device="cpu")
    embedding.weight.normal_()
    head = make_head(embedding, torch.bfloat16)

    logits = head(embedding(torch.tensor([3])))

    assert list(head.tensors()) == []
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 8)


def test_an_untied_head_has_a_weight_of_its_own() -> None:
    assert [name for name, _ in make_head(None, torch.float32).tensors()] == ["lm_head.weight"]
