"""Attention over latents is attention over the K and V that they stand for."""

from __future__ import annotations

import pytest
import torch

from remora.kernels.attention.mla import attend_latents, extend_over_latents

NUM_HEADS, HEAD_DIM, LATENT, ROTATED, PAGE_SIZE = 3, 8, 12, 4, 4
LENGTHS = [7, 1, 10]
TABLES = torch.tensor([[3, 1, 0], [2, 0, 0], [4, 6, 5]], dtype=torch.int32)


def test_absorbed_matrices_give_what_keys_and_values_of_each_head_give() -> None:
    torch.manual_seed(0)
    pages = torch.randn(7, PAGE_SIZE, LATENT + ROTATED, dtype=torch.float64)
    make_k, make_v = torch.randn(2, NUM_HEADS, HEAD_DIM, LATENT, dtype=torch.float64)
    query = torch.randn(len(LENGTHS), NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    rotated = torch.randn(len(LENGTHS), NUM_HEADS, ROTATED, dtype=torch.float64)

    absorbed = torch.cat((torch.einsum("rhd,hdc->rhc", query, make_k), rotated), dim=-1)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    latents = attend_latents(absorbed, pages, TABLES, lengths, latent_size=LATENT, scale=0.3)
    attended = torch.einsum("rhc,hdc->rhd", latents, make_v)

    for row, length in enumerate(LENGTHS):
        slots = pages[TABLES[row].long()].flatten(0, 1)[:length]
        for head in range(NUM_HEADS):
            key = torch.cat((slots[:, :LATENT] @ make_k[head].T, slots[:, LATENT:]), dim=-1)
            whole_query = torch.cat((query[row, head], rotated[row, head]))
            weights = torch.softmax(key @ whole_query * 0.3, 0)
            expected = weights @ (slots[:, :LATENT] @ make_v[head].T)
            torch.testing.assert_close(attended[row, head], expected)


def test_each_extended_token_gets_what_it_gets_alone() -> None:
    torch.manual_seed(0)
    pages = torch.randn(7, PAGE_SIZE, LATENT + ROTATED)
    pages[5, 2:] = float("nan")  # past the end
    starts = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    query = torch.randn(9, NUM_HEADS, LATENT + ROTATED)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)

    extended = extend_over_latents(
        query, pages, TABLES, starts, lengths, latent_size=LATENT, scale=0.3
    )

    places = [(0, length) for length in (5, 6, 7)] + [(2, length) for length in range(5, 11)]
    for token, (row, length) in enumerate(places):
        alone = attend_latents(
            query[token : token + 1],
            pages,
            TABLES[row : row + 1],
            torch.tensor([length], dtype=torch.int32),
            latent_size=LATENT,
            scale=0.3,
        )
        torch.testing.assert_close(extended[token], alone[0])


def test_a_row_of_no_tokens_gives_zeros() -> None:
    query, pages = torch.randn(1, 2, 16), torch.randn(7, 4, 16)

    attended = attend_latents(
        query, pages, TABLES[:1], torch.tensor([0]), latent_size=12, scale=1.0
    )

    assert torch.equal(attended, torch.zeros(1, 2, 12))


@pytest.mark.parametrize(
    ("query", "pages", "reason"),
    [
        (torch.zeros(1, 2, 16), torch.zeros(2, 4, 16).half(), "pages of torch.float16"),
        (torch.zeros(1, 2, 16), torch.zeros(2, 4, 20), "queries of 16, slots of 20"),
        (torch.zeros(1, 2, 12), torch.zeros(2, 4, 12), "latents of 12"),
        (torch.zeros(1, 2, 32)[..., ::2], torch.zeros(2, 4, 16), "contiguous"),
    ],
)
def test_what_does_not_go_together_is_refused(
    query: torch.Tensor, pages: torch.Tensor, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        attend_latents(query, pages, TABLES[:1], torch.tensor([1]), latent_size=12, scale=1.0)
