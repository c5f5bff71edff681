import pytest
import torch

from remora.engine.layers.rotary import RotaryEmbedding
from remora.engine.models.rope_config import RopeConfig

LLAMA3 = RopeConfig(kind="llama3", factor=8.0, original_max_position=8192)
DYNAMIC = RopeConfig(kind="dynamic", factor=2.0, original_max_position=64)


def angle_of(config: RopeConfig, position: int) -> torch.Tensor:
    cos, sin = RotaryEmbedding(config, 32, device="cpu").angles(
        torch.tensor([position]), torch.float32
    )
    return torch.atan2(sin[0], cos[0])


def test_angles_are_the_position_times_falling_frequencies() -> None:
    angles = angle_of(RopeConfig(theta=100.0), 1)

    assert angles.tolist() == pytest.approx([100.0 ** (-pair / 16) for pair in range(16)])


@pytest.mark.parametrize("config", [RopeConfig(), LLAMA3, DYNAMIC])
def test_angles_of_a_token_do_not_depend_on_its_batch(config: RopeConfig) -> None:
    rotary = RotaryEmbedding(config, 32, device="cpu")

    together, _ = rotary.angles(torch.tensor([3, 200, 70]), torch.float32)

    for row, position in enumerate((3, 200, 70)):
        alone, _ = rotary.angles(torch.tensor([position]), torch.float32)
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-6, rtol=0)


def test_divided_rope_has_a_divisor_for_each_pair() -> None:
    config = RopeConfig(kind="divided", divisors=tuple(range(1, 17)))

    scaled = RotaryEmbedding(config, 32, device="cpu").inverse_frequencies

    assert scaled[3].item() == pytest.approx(10_000 ** (-3 / 16) / 4)


@pytest.mark.parametrize("config", [RopeConfig(), LLAMA3, DYNAMIC])
def test_angles_in_a_table_are_the_computed_ones(config: RopeConfig) -> None:
    rotary = RotaryEmbedding(config, 32, device="cpu")
    positions = torch.tensor([0, 3, 63, 64, 199])
    computed = rotary.angles(positions, torch.float32)

    rotary.tabulate(200, torch.float32)

    torch.testing.assert_close(rotary.angles(positions, torch.float32), computed, atol=1e-6, rtol=0)
    with pytest.raises(IndexError):
        rotary.angles(torch.tensor([200]), torch.float32)
    assert rotary.angles(torch.tensor([200]), torch.float64)[0].dtype == torch.float64
