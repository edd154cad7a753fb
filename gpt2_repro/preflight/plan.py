"""The plan of a run on a machine, and what 10B tokens cost on every card of the tables."""

import dataclasses
import datetime
from typing import Any

from gpt2_repro.data.sources.presets import size
from gpt2_repro.preflight import cost
from gpt2_repro.preflight.prices import card_of, price_of, price_table


def plan_on(
    work: cost.Work, name: str, cards: int, *, usd_per_hour: float, tokens_per_second: float | None
) -> dict[str, Any]:
    """Hours and dollars on this machine, and of 10B tokens of GPT-2 124M on every card of the tables.

    The table's speeds are of that model; another one is taken to be slower or faster by its FLOPs a token.
    """
    card, price = card_of(name), price_of(name)
    ratio = work.flops / work.tokens / cost.GPT2_FLOPS_PER_TOKEN
    another = abs(ratio - 1) > 0.02
    listed = card.tokens_per_second * cards / (ratio if another else 1) if card else None
    basis: cost.Basis = "published"
    speed, source = listed, card.speed if card else None
    if card and another:
        basis, source = "estimated", f"{card.speed}, by this model's FLOPs a token"
    elif card and card.is_estimated:
        basis = "estimated"
    if tokens_per_second:
        speed, basis, source = tokens_per_second, "typed", "as typed"
    paid = usd_per_hour or (price.usd_per_hour * cards if price else None)
    today = datetime.datetime.now(datetime.UTC).date()
    offers = [
        cost.Ranked(
            card=row.card,
            provider=row.provider,
            usd=cost.hours(cost.TEN_BILLION, found.tokens_per_second) * row.usd_per_hour,
            hours=cost.hours(cost.TEN_BILLION, found.tokens_per_second),
            usd_per_hour=row.usd_per_hour,
            priced=f"{row.aged(today)}, {row.source}",
            speed=found.speed,
        )
        for row in price_table()
        if (found := card_of(row.card))
    ]
    entries = cost.budget(work, speed, basis=basis) if speed else []
    return {
        "machine": {
            "card": card.card if card else name,
            "cards": cards,
            "tokens_per_second": speed,
            "usd_per_hour": paid,
        },
        "speed": source,
        "price": "as typed" if usd_per_hour else price.aged(today) + f", {price.source}" if price else None,
        "work": dataclasses.asdict(work),
        "budget": [entry._asdict() for entry in entries],
        "ranking": [offer._asdict() for offer in cost.ranked(offers)],
    }


def plan_lines(planned: dict[str, Any]) -> list[str]:
    """The plan for the terminal."""
    work, machine = planned["work"], planned["machine"]
    lines = [
        "",
        f"{work['steps']:,} steps, {_tokens(work['tokens'])} tokens on {machine['cards']} x {machine['card']}",
    ]
    if not planned["budget"]:
        lines.append("  nobody has measured this card: type --tokens_per_second, or --gpu CARD for another machine")
    for entry in planned["budget"]:
        lines.append(f"  {entry['name']:<16} {entry['minutes']:>7.1f} min  {entry['basis']}")
    if planned["budget"]:
        minutes = sum(entry["minutes"] for entry in planned["budget"])
        paid = machine["usd_per_hour"]
        dollars = f", ${minutes / 60 * paid:,.2f} at ${paid:,.2f} an hour ({planned['price']})" if paid else ""
        lines += [f"  {'in all':<16} {minutes:>7.1f} min{dollars}", f"  speed: {planned['speed']}"]
    lines.append(
        f"  {work['flops']:.3g} FLOPs; a checkpoint {size(work['checkpoint_bytes'])}, final {size(work['final_bytes'])}"
    )
    if "disk_bytes" in planned:
        lines.append(
            f"  disk: {size(planned['disk_bytes'])} for the data, the checkpoints that are kept and one that is written"
        )
    if data := planned.get("preparing"):
        copied = f", from ${data['break_even_copied']:.2f}" if data["break_even_copied"] else ", never"
        lines += [
            "",
            f"preparing the data: {60 * data['hours_there']:.0f} min on {data['cores']} cores of this machine, "
            f"${data['usd_there']:.2f}; {60 * data['hours_apart']:.0f} min on {cost.CPU_MACHINE_CORES} cores without cards, "
            f"${data['usd_apart']:.2f} on a volume that both mount, ${data['usd_apart'] + data['usd_copying']:.2f} where it is copied",
            f"  break-even: elsewhere is cheaper from ${data['break_even']:.2f} an hour of this machine where both mount one volume{copied} "
            "where it is copied",
        ]
    lines += ["", "10B tokens of GPT-2 124M, steps alone, the cheapest card first:"]
    for offer in planned["ranking"]:
        guessed = "; speed estimated" if offer["speed"].startswith("estimated") else ""
        lines.append(
            f"  ${offer['usd']:>6.2f}  {offer['hours']:>5.1f} h of one  {offer['card']:<15} {offer['provider']:<17} "
            f"${offer['usd_per_hour']:.2f} an hour, {offer['priced']}{guessed}"
        )
    return lines


def _tokens(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count:,}"
