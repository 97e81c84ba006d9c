"""Number formats, and the rules that lower an aten operation to one of them."""

from lightning_ledger.precision.formats import FORMATS, Format, Operand, get_format
from lightning_ledger.precision.lowering import Lowering
from lightning_ledger.precision.rounding import ROUNDINGS, derive_seed
from lightning_ledger.precision.specs import ProductFormats, parse_formats
from lightning_ledger.precision.weights import Tape, WeightUse

__all__ = [
    "FORMATS",
    "ROUNDINGS",
    "Format",
    "Lowering",
    "Operand",
    "ProductFormats",
    "Tape",
    "WeightUse",
    "derive_seed",
    "get_format",
    "parse_formats",
]
