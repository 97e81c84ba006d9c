"""Price books: hand-worked prices, both billing rules, dates, and YAML."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path

import pytest

from lightning_ledger.prices import PriceBook
from lightning_ledger.work import ACCOUNTS, Work

FORWARD = 200
ROOT = Path(__file__).parent.parent


def test_scarce_work_by_hand() -> None:
    book = PriceBook(scarce_forward=2.0)
    # 700 FLOPs / 200 a forward = 3.5 forwards, at 2.
    for account, (_, hardware, _) in ACCOUNTS.items():
        if hardware == "scarce":
            assert book.cost(account, Work(flops=700, passes=9), FORWARD) == 7.0


def test_fleet_work_by_hand() -> None:
    work = Work(flops_by_format={"int8": 400, "fp32": 100, "int4": 100}, passes=2)
    for account in ("fleet/prediction", "fleet/control", "fleet/probe", "waste/lost_prediction"):
        # 600 / 200 = 3 forwards at .1
        assert PriceBook(fleet_forward=0.1).cost(account, work, FORWARD) == pytest.approx(0.3)
        # int8 2 x .02, fp32 .5 x .1 (not listed), int4 .5 x .01
        formats = PriceBook(fleet_forward=0.1, fleet_formats={"int8": 0.02, "int4": 0.01})
        assert formats.cost(account, work, FORWARD) == pytest.approx(0.04 + 0.05 + 0.005)
        # Two whole predictions, whatever their FLOPs; int8 dominates, so its price is theirs.
        gradient = PriceBook(fleet_forward=0.1, fleet_billing="per_gradient")
        assert gradient.cost(account, work, FORWARD) == pytest.approx(0.2)
        dominated = PriceBook(fleet_billing="per_gradient", fleet_formats={"int8": 0.02, "int4": 0.01})
        assert dominated.cost(account, work, FORWARD) == pytest.approx(0.04)
    assert PriceBook().cost("fleet/prediction", Work(flops=600), FORWARD) == pytest.approx(0.15)


def test_per_gradient_never_bills_nothing_in_silence() -> None:
    book = PriceBook(fleet_billing="per_gradient")
    with pytest.raises(ValueError, match="passes=0"):
        book.cost("fleet/probe", Work(flops_by_format={"int8": 5}), FORWARD)
    assert book.cost("fleet/probe", Work(), FORWARD) == 0.0


def test_transfer_by_hand() -> None:
    # 2.5 GB at 4 a GB; no FLOPs, so no unit is needed.
    assert PriceBook(gigabyte=4.0).cost("transfer/weights", Work(bytes=2_500_000_000), None) == 10.0
    assert PriceBook().cost("transfer/weights", Work(bytes=2_500_000_000), None) == 0.0
    # Bytes that a lost step transferred are still paid for.
    assert PriceBook(gigabyte=4.0).cost("waste/lost_steps", Work(flops=200, bytes=10**9), FORWARD) == 5.0


def test_costs_are_double_precision() -> None:
    # (10**30 + 10**14) / 10**30 rounds to the double next above 1; float32, or floats divided, would lose it.
    assert PriceBook().cost("scarce/forward", Work(flops=10**30 + 3 * 10**14), 10**30) == 1 + 2**-52


def test_unknown_account_and_unit_teach() -> None:
    with pytest.raises(ValueError, match=r"account='scarce' is unknown.*scarce/forward"):
        PriceBook().cost("scarce", Work(flops=1), FORWARD)
    with pytest.raises(ValueError, match="forward_flops=None"):
        PriceBook().cost("fleet/probe", Work(flops=1), None)


@pytest.mark.parametrize("name", ["scarce_forward", "fleet_forward", "gigabyte", "fleet_formats"])
@pytest.mark.parametrize(
    ("price", "error"),
    [(-0.1, ValueError), (math.nan, ValueError), (math.inf, ValueError), ("1", TypeError), (True, TypeError)],
)
def test_bad_prices_teach(name: str, price: object, error: type[Exception]) -> None:
    value = {"int8": price} if name == "fleet_formats" else price
    with pytest.raises(error, match=name):
        PriceBook(**{name: value})


def test_bad_fields_teach() -> None:
    with pytest.raises(ValueError, match=r"fleet_billing='per_hour'.*per_gradient"):
        PriceBook(fleet_billing="per_hour")
    with pytest.raises(ValueError, match=r"date='last May'.*YYYY-MM-DD"):
        PriceBook(date="last May")
    with pytest.raises(ValueError, match="currency='USD' needs a date"):
        PriceBook(currency="USD")
    with pytest.raises(ValueError, match="max_age_days=0"):
        PriceBook(max_age_days=0)


def test_staleness() -> None:
    book = PriceBook(currency="USD", date="2026-01-01", source="an invoice", max_age_days=30)
    assert not book.stale(datetime.date(2026, 1, 31))
    book.warn_if_stale(datetime.date(2026, 1, 31))
    assert book.stale(datetime.date(2026, 2, 1))
    with pytest.warns(UserWarning, match=r"2026-01-01 \(source: an invoice\) is 31 days old"):
        book.warn_if_stale(datetime.date(2026, 2, 1))
    assert PriceBook(currency="USD", date="2001-01-01").stale()  # today, by the clock


def test_simulated_prices_never_go_stale() -> None:
    assert PriceBook().source == "simulated"
    assert not PriceBook().stale(datetime.date(2100, 1, 1))
    assert PriceBook(currency="USD", date="2026-01-01").source == "unstated"


def test_fleet_price_replaces_every_format_price() -> None:
    book = PriceBook(fleet_formats={"int8": 0.02}, gigabyte=3.0).with_fleet_price(0.5)
    assert book == PriceBook(fleet_forward=0.5, gigabyte=3.0)


def test_yaml(tmp_path: Path) -> None:
    book = PriceBook(fleet_formats={"int8": 0.02}, date="2026-01-01", source="test")
    assert PriceBook(**json.loads(json.dumps(book.to_dict()))) == book
    path = tmp_path / "prices.yaml"
    path.write_text("fleet_forward: 0.07\ndate: 2026-01-01\n")  # YAML reads a date here, not a string
    assert PriceBook.from_yaml(path) == PriceBook(fleet_forward=0.07, date="2026-01-01")
    path.write_text("fleet_foward: 0.07\n")
    with pytest.raises(ValueError, match="unknown key 'fleet_foward'; did you mean 'fleet_forward'"):
        PriceBook.from_yaml(path)
    path.write_text("- 0.07\n")
    with pytest.raises(ValueError, match="must hold a mapping"):
        PriceBook.from_yaml(path)


def test_example_book_says_what_it_is() -> None:
    book = PriceBook.from_yaml(ROOT / "configs" / "prices" / "example.yaml")
    assert book.currency == "USD"
    assert "illustrative" in book.source
    # 1e8 FLOPs are half a forward of 2e8: half of 1e-4 dollars.
    assert book.cost("scarce/forward", Work(flops=10**8), 2 * 10**8) == pytest.approx(
        1e-8
    )  # 1e8 of the 1e12 FLOPs that 1e-4 dollars buy
