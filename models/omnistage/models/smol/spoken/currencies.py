"""Names of money."""

from __future__ import annotations

from omnistage.models.smol.spoken.tables import read_rows

CURRENCIES = {sign: (one, many, coin, coins) for sign, one, many, coin, coins in read_rows("currencies.tsv")}
"""By sign or code: the singular and plural of the money, then of its small coins; empty for money that has none."""
