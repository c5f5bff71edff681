"""What replicas say when Serve was started without what `remora serve` sets."""

from __future__ import annotations

from remora.deployments.serve_environment import ENVIRONMENT, unset_warning


def test_nothing_is_said_under_remora_serve_or_when_the_operator_has_chosen() -> None:
    assert unset_warning(ENVIRONMENT) is None
    assert unset_warning(dict.fromkeys(ENVIRONMENT, "of the operator")) is None


def test_what_is_missing_is_named_with_its_price() -> None:
    name = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    text = unset_warning({key: value for key, value in ENVIRONMENT.items() if key != name})

    assert text is not None
    assert f"{name}=remora.deployments.http.core.serve_proxy:middlewares (" in text
    assert text.count("=") == 1
