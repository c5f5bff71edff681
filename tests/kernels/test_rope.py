import cmath

import pytest
import torch

from remora.kernels.rope import apply_rope


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_rope_turns_each_pair_like_a_complex_number(num_tokens: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 3, 8, dtype=torch.float64)
    angles = torch.randn(num_tokens, 4, dtype=torch.float64)

    rotated = apply_rope(x, angles.cos(), angles.sin())

    for token in range(num_tokens):
        for head in range(3):
            for pair in range(4):
                before = complex(x[token, head, pair], x[token, head, pair + 4])
                after = complex(rotated[token, head, pair], rotated[token, head, pair + 4])
                assert after == pytest.approx(before * cmath.exp(1j * angles[token, pair].item()))


def test_rope_reads_a_slice_of_a_fused_projection_and_leaves_it_alone() -> None:
    fused = torch.randn(5, 6, 16, dtype=torch.bfloat16)
    untouched = fused.clone()
    angles = torch.randn(5, 8)

    rotated = apply_rope(fused[:, :4], angles.cos().bfloat16(), angles.sin().bfloat16())

    assert torch.equal(fused, untouched)
    assert rotated.is_contiguous()
    assert rotated.dtype == torch.bfloat16
    # Three roundings to 8 bits of values around 1.
    expected = apply_rope(fused[:, :4].float(), angles.cos(), angles.sin())
    torch.testing.assert_close(rotated.float(), expected, atol=0.05, rtol=0.02)
