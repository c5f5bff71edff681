"""The peak estimate against a simulation, and the adaptive reserve."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import PromptTooLong
from remora.engine.scheduler.admission import Demand, ReserveRatio, check_fits, peak_tokens
from remora.engine.types import Request, SamplingParams
from tests.engine.fakes import make_plan

DEMANDS = st.lists(
    st.builds(Demand, held=st.integers(0, 50), growth=st.integers(0, 30)), max_size=8
)


def simulate_peak(demands: list[Demand]) -> int:
    """Let every request grow a token per step and leave when its growth is used up."""
    peak = 0
    for step in range(31):
        alive = [demand for demand in demands if demand.growth >= step]
        peak = max(peak, sum(demand.held + step for demand in alive))
    return peak


@given(DEMANDS)
def test_peak_equals_a_step_by_step_simulation(demands: list[Demand]) -> None:
    assert peak_tokens(demands) == simulate_peak(demands)


@given(DEMANDS, st.builds(Demand, held=st.integers(0, 50), growth=st.integers(0, 30)))
def test_one_more_request_never_lowers_the_peak(demands: list[Demand], extra: Demand) -> None:
    assert peak_tokens([*demands, extra]) >= peak_tokens(demands)


@pytest.mark.parametrize("max_tokens", [3, 4])
def test_a_request_may_fill_the_context_and_no_more(max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Request(request_id="a", prompt_ids=[1] * 5, sampling=sampling)
    plan = make_plan(max_model_len=8)

    with nullcontext() if max_tokens == 3 else pytest.raises(PromptTooLong):
        check_fits(request, plan)


def test_reserve_relaxes_jumps_after_a_preemption_and_starts_over_when_idle() -> None:
    reserve = ReserveRatio(1.0)
    start = reserve.value

    for _ in range(10_000):
        reserve.on_step()
    relaxed = reserve.value
    reserve.on_preemption(num_produced=50, num_allowed=100, num_rows=1)
    raised = reserve.value
    reserve.on_idle()

    assert relaxed < start
    assert raised == 0.7
    assert reserve.value == start

    reserve = ReserveRatio(0.1)
    assert reserve.growth(100, certain=True) == 100 > 5 * reserve.growth(100, certain=False)
