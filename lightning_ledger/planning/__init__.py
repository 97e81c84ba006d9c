"""The dry run: what predicted gradients would be worth for a user's own model and data, before anything is trained."""

from lightning_ledger.planning.forecast import Forecast, FormatForecast
from lightning_ledger.planning.settings import PlanSettings
from lightning_ledger.planning.ways import Verdict, Way

__all__ = ["Forecast", "FormatForecast", "PlanSettings", "Verdict", "Way"]
