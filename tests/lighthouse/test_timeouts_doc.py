"""Sets of timeouts that docs/timeouts.md calls contradictory are refused; its values: test_docs."""

from __future__ import annotations

import pytest

from lighthouse.config import Timeouts


@pytest.mark.parametrize(
    "given",
    [
        {"heartbeat_s": 2.0, "heartbeat_timeout_s": 1.0},
        {"heartbeat_timeout_s": 3.0, "revoke_timeout_s": 2.0},
        {"heartbeat_timeout_s": 3.0, "step_timeout_s": 2.0},
        {"resend_s": 3.0, "step_timeout_s": 2.0},
    ],
)
def test_a_contradiction_is_refused_with_both_names(given: dict[str, float]) -> None:
    small, large = given
    with pytest.raises(ValueError, match=f"{small}.*{large}"):
        Timeouts.derive(60.0, **given)
