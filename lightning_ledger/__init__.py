"""lightning-ledger: would this training be cheaper if most of its gradients came from idle inference hardware?

``lightning_ledger.callbacks`` and ``lightning_ledger.strategies`` plug into a Lightning Trainer; what is imported here
needs no torch.
"""

from lightning_ledger.ledger import Ledger, Work
from lightning_ledger.prices import PriceBook

__all__ = ["Ledger", "PriceBook", "Work"]
