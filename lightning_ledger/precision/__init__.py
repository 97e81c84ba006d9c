"""Number formats, and the rules that lower an aten operation to one of them."""

from lightning_ledger.precision.formats import FORMATS, Format, Operand, get_format
from lightning_ledger.precision.lowering import Lowering
from lightning_ledger.precision.rounding import ROUNDINGS, derive_seed

__all__ = ["FORMATS", "ROUNDINGS", "Format", "Lowering", "Operand", "derive_seed", "get_format"]
