"""Which number format each kind of matrix product runs in: ``"int8"``, or ``"int8:grad_weight=bf16"``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from lightning_ledger.precision.formats import Format, get_format

Product = Literal["output", "grad_input", "grad_weight", "attention"]


@dataclass(frozen=True)
class ProductFormats:
    """The format of each kind of product of a training step.

    For a layer ``y = x W'`` whose output has the gradient ``dy``:

    ===============  =====================================================================================
    ``output``       ``x W'``, and a convolution
    ``grad_input``   ``dy W``
    ``grad_weight``  ``dy' x``
    ``attention``    products of two activations (``q k'``, ``p v``), and those of their backward pass
    ===============  =====================================================================================

    Attributes:
        name: the spec, as short as it can be written.
    """

    output: Format
    grad_input: Format
    grad_weight: Format
    attention: Format

    @property
    def name(self) -> str:
        others = {f.name: getattr(self, f.name).name for f in fields(self)[1:]}
        apart = [f"{product}={fmt}" for product, fmt in others.items() if fmt != self.output.name]
        return ":".join([self.output.name, *([",".join(apart)] if apart else [])])

    @property
    def distinct(self) -> tuple[Format, ...]:
        """The formats in use, each once."""
        return tuple(dict.fromkeys(getattr(self, f.name) for f in fields(self)))


def parse_formats(spec: str | Format | ProductFormats) -> ProductFormats:
    """The formats that a spec names.

    Args:
        spec: ``"format"`` for all products alike, or ``"format:product=format,product=format"`` to set some of
            ``output``, ``grad_input``, ``grad_weight`` and ``attention`` apart.

    Raises:
        ValueError: an unknown format or product, or one that is set twice.

    Example:
        >>> formats = parse_formats("int8:grad_weight=bf16,attention=bf16")
        >>> formats.output.name, formats.grad_weight.name, formats.name
        ('int8', 'bf16', 'int8:grad_weight=bf16,attention=bf16')
    """
    if isinstance(spec, ProductFormats):
        return spec
    if isinstance(spec, Format):
        return ProductFormats(spec, spec, spec, spec)
    base, colon, rest = str(spec).partition(":")
    formats = parse_formats(get_format(base.strip()))
    known = [f.name for f in fields(ProductFormats)]
    seen = set()
    for part in rest.split(",") if colon else ():
        product, equals, name = (x.strip() for x in part.partition("="))
        if not equals or product not in known or product in seen:
            fault = "is set twice" if product in seen else f"is not one of {', '.join(known)}"
            raise ValueError(
                f"format={spec!r}: {part!r} {fault if equals else 'is no product=format'}. Write for example "
                "'int8:grad_weight=bf16,attention=bf16'."
            )
        seen.add(product)
        formats = replace(formats, **{product: get_format(name)})
    return formats
