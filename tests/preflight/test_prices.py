"""Every price has its date and source, and a card is found by the name of its driver."""

import datetime

import pytest

from gpt2_repro.hardware import peak_flops
from gpt2_repro.preflight.prices import card_table, cards_named, price_of, price_table


def test_every_row_says_when_and_where_from() -> None:
    rows = price_table()
    assert len(rows) > 10
    for row in rows:
        assert isinstance(row.date, datetime.date) and row.date.year >= 2026 and row.source and row.provider
        assert 0.1 < row.usd_per_hour < 20
    assert all(peak_flops(card.name) is not None for card in card_table())


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A4000", None),
        ("Tesla T4", None),
        ("x86_64", None),
    ],
)
def test_a_card_is_found_by_its_name(name: str, card: str | None) -> None:
    price = price_of(name)
    assert (price and price.card) == card
    assert price is None or str(price).startswith(("RunPod", "Lambda"))


@pytest.mark.parametrize(
    ("typed", "cards"),
    [
        ("A100 SXM", ["A100 SXM 80 GB", "A100 SXM 40 GB"]),
        ("a100 sxm 40gb", ["A100 SXM 40 GB"]),
        ("nvidia h100 pcie", ["H100 PCIe"]),
        ("H100", ["H100 SXM", "H100 NVL", "H100 PCIe"]),
        ("4090", ["RTX 4090"]),
        ("NVIDIA A100-PCIE-40GB", ["A100 PCIe 40 GB"]),
        ("H", []),
        ("a", []),
        ("", []),
    ],
)
def test_whole_words_of_a_name_mean_a_card(typed: str, cards: list[str]) -> None:
    assert [card.card for card in cards_named(typed)] == cards
