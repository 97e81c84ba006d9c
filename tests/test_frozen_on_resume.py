"""What is trainable is read from the parameters as they are: also where a resumed run has frozen some again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning

from lightning_ledger.callbacks import GradientPrediction
from tests.settings_runs import Model, fresh, stack, trainer

FROZEN = r"backbone\.weight, backbone\.bias are frozen, and the optimizer .* of an earlier training"


class Trained(L.Callback):
    """Whether each step had a gradient of the backbone."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.seen.append(pl_module.backbone.weight.grad is not None)


def finetune(
    path: Path, epochs: int, *callbacks: L.Callback, ckpt_path: str | None = None
) -> tuple[L.Trainer, L.LightningModule, list[bool]]:
    """The backbone is trained from the second epoch on."""
    predicted = any(isinstance(callback, GradientPrediction) for callback in callbacks)
    strategy = "predicted_gradients" if predicted else "auto"
    model, trained = fresh(Model), Trained()
    unfreeze = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1)
    run = trainer(path, unfreeze, trained, *callbacks, strategy=strategy, max_epochs=epochs)
    run.fit(model, ckpt_path=ckpt_path)
    return run, model, trained.seen


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # stock Lightning goes on from ours
@pytest.mark.parametrize("arm", ["all exact", "corrected"])
def test_pl21901_a_resumed_finetuning_trains_what_stock_trains_and_names_what_it_froze(
    arm: str, tmp_path: Path
) -> None:
    before, _, trained = finetune(tmp_path, 3, *stack(arm))
    assert trained == [False] * 4 + [True] * 8
    checkpoint = str(tmp_path / "three.ckpt")
    before.save_checkpoint(checkpoint)
    _, theirs, stock = finetune(tmp_path, 5, ckpt_path=checkpoint)
    with pytest.warns(UserWarning, match=FROZEN) as told:
        _, ours, trained = finetune(tmp_path, 5, *stack(arm), ckpt_path=checkpoint)
    assert sum("are frozen" in str(warning.message) for warning in told) == 1
    assert trained == stock == [False] * 8  # Lightning has frozen the backbone again
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("arm", ["all exact", "corrected"])
def test_pl21901_what_is_unfrozen_by_hand_is_trained_at_once(arm: str, tmp_path: Path) -> None:
    class Unfreeze(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pl_module.backbone.requires_grad_(True)

    before, _, _ = finetune(tmp_path, 3, *stack(arm))
    checkpoint = str(tmp_path / "three.ckpt")
    before.save_checkpoint(checkpoint)
    _, theirs, stock = finetune(tmp_path, 5, Unfreeze(), ckpt_path=checkpoint)
    _, ours, trained = finetune(tmp_path, 5, Unfreeze(), *stack(arm), ckpt_path=checkpoint)
    assert trained == stock == [True] * 8
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_a_new_run_with_frozen_layers_is_told_nothing(tmp_path: Path) -> None:
    class Adapter(Model):
        def __init__(self) -> None:
            super().__init__()
            self.backbone.requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    run = trainer(tmp_path, *stack())
    run.fit(fresh(Adapter))  # a warning would be an error
    assert run.global_step == 8
