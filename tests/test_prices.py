"""Each price and each number of hours of a recipe, on any page, is the one that preflight computes."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpt2_repro.planning.cost import CARDS, PRICES, RunCost, cost_of, price_of
from gpt2_repro.planning.workload import workload_of
from tests.sections import RECIPES, ROOT, parse_for_training


def header_of(path: Path) -> str:
    """Return the comment at the top of a recipe. Each of its fields is a paragraph."""
    comment = path.read_text(encoding="utf-8").split("\n\n")[0].replace("#", "")
    return re.sub(r"^ (?=[A-Z]\w+ {2,})", "\n", comment, flags=re.MULTILINE)


DEFAULT = "gpt2_124m"  # the recipe of a sentence that names none
PRICED = {path.stem: path for path in RECIPES if "all-in" in header_of(path)}
COST = ROOT / "docs" / "cost.md"
TABLE = ROOT / "docs" / "recipes.md"
PAGES = [ROOT / "README.md", ROOT / "runpod" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [*sorted((ROOT / "cloud").glob("*.md")), *RECIPES]
CARD = "|".join(re.escape(name) for name in sorted(CARDS, key=len, reverse=True))
AMOUNT = re.compile(r"\$(?!0 )(\d[\d,]*(?:\.\d+)?)|(\d[\d,]*(?:\.\d+)?) (?:h|hours?)\b")
NO_RUN = "no full run has been made yet"
# Amounts that are no price and no time of a recipe on a rented machine, with the words around them.
OTHER = {
    "runpod/README.md": ["spend at most $80", "$3.50", "$18 per TB", "$0.20 per GB", "it has cost $22", "to $0.74"],
    "docs/cost.md": ["write a recipe for 8 hours"],
    "docs/data.md": ["costs about $0.20 an hour", "cost $3.50 a month"],
    "docs/machines.md": ["after 12 hours", "30 hours a week"],
    "docs/recipes.md": ["llm.c published 13.7 h and 135 h", "24 h for the third"],
    "docs/reliability.md": ["has cost $25"],
    "docs/watching.md": ["$1.55 1 h"],
    "cloud/lambda.md": ["waits 4 hours", "$0.20 per hour"],
    "recipes/demo.yaml": ["0.03 hours", "0.16 hours"],
    "recipes/own_text.yaml": ["0.05 hours"],
    "recipes/shakespeare_char_cpu_best.yaml": ["0.29 hours"],
    "recipes/gpt2_350m.yaml": ["so 13.7 hours, $191 at $14 per hour (the script's header has $200)"],
    "recipes/gpt2_774m.yaml": ['so 135 hours (5.6 days), $1,890 at $14 per hour ("~$2000")'],
    "recipes/gpt2_1558m.yaml": ["24 hours, $672 at $28 per hour", "24.9 hours"],
}


def blocks_of(text: str) -> Iterator[str]:
    """Yield each paragraph, list item, and table row with the header of its table, as one line."""
    header = ""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        begins = re.match(r"\s*(- |\d+\. |\||#|```)", line)
        if block and (begins or not line.strip()):
            yield " ".join(" ".join(block).split())
            block = []
        if not line.startswith("|"):
            header = ""
        elif not header:
            header = line
        else:
            block.append(header)
        block.append(line)


def plans_in(block: str, recipe: str | None) -> Iterator[RunCost]:
    """Yield the plans of the machines in a text, with `recipe`, or with the recipes and options in the text."""
    recipes = {recipe}
    options: tuple[str, ...] = ()
    if recipe is None:
        recipes = PRICED.keys() & set(re.findall(r"\w+", block)) or {DEFAULT}
        options = tuple(re.findall(r"--(?:stop_at_step|total_tokens) \d+", block))
    for count, card in re.findall(rf"(\d+|one) (?:x )?({CARD})\b", block):
        cards = 1 if count == "one" else int(count)
        for name in recipes & PRICED.keys():
            yield planned(name, card, cards, options)


@functools.cache
def planned(recipe: str, card: str, cards: int, options: tuple[str, ...] = ()) -> RunCost:
    words = " ".join(options).split()
    arguments = parse_for_training(PRICED[recipe], "--dataset_dir", "data/nowhere", *words)
    return cost_of(workload_of(arguments), card, cards)


def usd_of(plan: RunCost) -> str:
    """Return a price as all pages write it."""
    assert plan.usd
    if plan.usd < 10:
        return f"{plan.usd:.2f}"
    return f"{plan.usd:,.0f}"


def hours_of(plan: RunCost) -> str:
    """Return a number of hours as all pages write it."""
    assert plan.minutes
    hours = plan.minutes / 60
    if hours < 50:
        return f"{hours:.1f}"
    return f"{hours:,.0f}"


def rates_in(block: str) -> set[str]:
    """Return the list prices per hour of the machines in a text."""
    rates: set[str] = set()
    for count, card in re.findall(rf"(?:(\d+|one) (?:x )?)?({CARD})\b", block):
        cards = int(count) if count.isdigit() else 1
        for price in PRICES:
            if price.card == card:
                rates.add(f"{cards * price.usd_per_hour:.2f}")
    return rates


def without_limits(block: str) -> str:
    """Return a text without `$23.46 (34 hours x $0.69)`, after a check of the list price per hour and of the product."""
    limit = re.compile(r"\$([\d.]+) \((\d+) hours x \$([\d.]+)\)")
    rates = {f"{cards * price.usd_per_hour:.2f}" for price in PRICES for cards in (1, 8)}
    for most, hours, rate in limit.findall(block):
        assert rate in rates, block
        assert float(most) == pytest.approx(float(hours) * float(rate)), block
    return limit.sub("", block)


def wrong_amounts(text: str, recipe: str | None, others: list[str]) -> list[str]:
    """Return the amounts in a text that preflight does not compute, and that are not in `others`."""
    wrong: list[str] = []
    for block in blocks_of(text):
        for other in others:
            block = block.replace(other, "")
        plans = list(plans_in(block, recipe))
        prices = {usd_of(plan) for plan in plans} | rates_in(block)
        hours = {hours_of(plan) for plan in plans}
        for amount in AMOUNT.finditer(without_limits(block)):
            usd, number = amount.groups()
            if (usd and usd not in prices) or (number and number not in hours):
                wrong.append(f"{amount[0]} in: {block}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_amount_is_computed_by_preflight(page: Path) -> None:
    others = OTHER.get(str(page.relative_to(ROOT)), [])
    text = page.read_text(encoding="utf-8")
    recipe = None
    if page in RECIPES:
        text = header_of(page)
        recipe = page.stem
    one_line = " ".join(text.split())
    assert not [other for other in others if other not in one_line]
    assert wrong_amounts(text, recipe, others) == []


def test_a_wrong_amount_is_found() -> None:
    """The amounts of other machines, other recipes and other list prices are wrong."""
    right = "`check_124m` takes 1.6 hours and $1.11 on one RTX 4090 at $0.69 an hour"
    assert wrong_amounts(right, None, []) == []
    for old, new in (("check_124m", "gpt2_124m"), ("one", "2"), ("4090", "3090"), ("1.6", "1.7"), ("1.11", "1.10")):
        assert wrong_amounts(right.replace(old, new, 1), None, []), new
    assert wrong_amounts(right.replace("0.69", "0.70"), None, [])
    with pytest.raises(AssertionError):
        wrong_amounts("at most $24.00 (34 hours x $0.69)", None, [])


def test_tables() -> None:
    """Each cell has the hours and the price of its own row and column."""
    for page in (ROOT / "README.md", COST):
        row = r"^\| (\d+) x (.+?) \| ([\d.]+) \| \$(\d+) \| \$([\d.]+) \|"
        rows = re.findall(row, page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(rows) >= 5, page.name
        for count, card, *shown in rows:
            plan = planned(DEFAULT, card, int(count))
            assert shown == [hours_of(plan), usd_of(plan), f"{plan.usd_per_hour:.2f}"], (
                f"{page.name}: {count} x {card}"
            )
    row = r"^\| \d+ x (.+?) \| .* \| (\w[^|]*), (2026-\d\d-\d\d) \|"
    for card, provider, date in re.findall(row, COST.read_text(encoding="utf-8"), re.MULTILINE):
        price = price_of(card)
        assert price
        assert (provider, date) == (price.provider, str(price.date)), card
    cells = re.findall(
        r"^\| `(\w+)`.* \| ([\d.]+) h, \$(\S+) \| ([\d.]+) h, \$(\S+) \|",
        TABLE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(cells) >= 8
    for recipe, *shown in cells:
        a100 = planned(recipe, "A100 SXM 80 GB", 8)
        h100 = planned(recipe, "H100 SXM", 8)
        assert shown == [hours_of(a100), usd_of(a100), hours_of(h100), usd_of(h100)], recipe


@pytest.mark.parametrize("recipe", PRICED)
def test_a_price_in_a_recipe_is_a_list_price_with_a_date(recipe: str) -> None:
    (cost,) = [block for block in blocks_of(header_of(PRICED[recipe])) if block.startswith("Cost")]
    assert "from list prices of November 2026" in cost
    for _, card in re.findall(rf"(\d+|one) (?:x )?({CARD})\b", cost):
        price = price_of(card)
        assert price
        assert price.date.isoformat().startswith("2026-11"), card


def test_an_expected_result_is_not_one_that_was_measured() -> None:
    for recipe, path in PRICED.items():
        (expected,) = [block for block in blocks_of(header_of(path)) if block.startswith("Expected")]
        assert NO_RUN in expected.lower(), recipe
    for page in PAGES:
        text = " ".join(page.read_text(encoding="utf-8").split())
        if page not in RECIPES and re.search(r"3\.27 to 3\.29|expected loss of \d", text):
            assert NO_RUN in text.lower(), page.name
