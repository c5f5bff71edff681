import torch

from remora.kernels.kv_store import store_kv


def test_tokens_land_in_their_slots_and_nowhere_else() -> None:
    pages = torch.zeros(2, 4, 8, 2, 16)
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    slots = torch.tensor([2 * 8 + 7, 1 * 8 + 0, 3 * 8 + 3])

    store_kv(key, value, pages, slots)

    for index, tokens in enumerate((key, value)):
        assert torch.equal(pages[index, 2, 7], tokens[0])
        assert torch.equal(pages[index, 1, 0], tokens[1])
        assert torch.equal(pages[index, 3, 3], tokens[2])
        assert pages[index].count_nonzero() == tokens.count_nonzero()


def test_what_is_not_a_number_is_stored_as_one() -> None:
    pages = torch.zeros(2, 2, 4, 1, 4, dtype=torch.float16)
    key = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0], dtype=torch.float16)

    store_kv(key.view(1, 1, 4), key.view(1, 1, 4), pages, torch.tensor([5]))

    assert pages.isfinite().all()
    assert pages[0, 1, 1, 0, 3] == 1.0
