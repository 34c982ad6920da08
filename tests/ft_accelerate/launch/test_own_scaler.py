"""Scripts that scale their loss by a `torch.amp.GradScaler` of their own, under `accelerate launch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ft_accelerate.launch.test_caught_errors import run

# In one batch gradients are not finite: the scale shrinks. It grows else. One dies in the second epoch, the other
# in the third.
SCALES = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
accelerator.register_for_checkpointing(scaler)
for epoch in range(3):
    for index, (batch,) in enumerate(loader):
        dies = {(1, "0", 1, 4), (0, "0", 2, 4)}
        if (accelerator.process_index, os.environ["FT_RESTARTS"], epoch, index) in dies:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(batch).pow(2).mean() * (float("inf") if (epoch, index) == (0, 6) else 1.0)
        accelerator.backward(scaler.scale(loss))
        UNSCALES
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
scale = f"{scaler.get_scale()} {scaler._get_growth_tracker()}"
Path(sys.argv[1], f"scale-{accelerator.process_index}").write_text(scale)
"""


@pytest.mark.process
@pytest.mark.parametrize("unscales", ["", "scaler.unscale_(optimizer)"], ids=["step", "unscale_"])
def test_each_dies_in_turn_in_a_script_with_a_scaler_of_its_own(
    tmp_path: Path, unscales: str
) -> None:
    """A scaler that is registered has its peers' scale, and finds no gradients missing in the past."""
    said = run(SCALES.replace("UNSCALES", unscales), tmp_path)
    assert said.count("was killed by SIGKILL; it is started again") == 2
    assert "failed with exit code" not in said
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()
    # 6 steps, one that is not finite and halves the scale, and 17 steps: each fifth doubles it.
    assert {(tmp_path / f"scale-{i}").read_text() for i in range(2)} == {"8192.0 2"}
