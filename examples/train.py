"""A user's own training script. It knows nothing of `lightning_ledger`: a configuration file adds that."""

from digits import DigitsClassifier, DigitsDataModule
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(DigitsClassifier, DigitsDataModule, save_config_kwargs={"overwrite": True})
