"""The plan of a run on a machine, and what 10B tokens cost on every card of the tables."""

import dataclasses
import datetime
from typing import Any

from gpt2_repro.preflight import cost
from gpt2_repro.preflight.prices import card_of, price_of, price_table
from gpt2_repro.units import size, tokens


def plan_on(
    work: cost.Work,
    name: str,
    cards: int,
    *,
    usd_per_hour: float,
    tokens_per_second: float | None,
    as_published: bool = True,
) -> dict[str, Any]:
    """Hours and dollars on this machine, and of 10B tokens of GPT-2 124M on every card of the tables.

    The table's speeds are of that model; another one is taken to be slower or faster by its FLOPs a token.

    Args:
        name: of the card, as the driver or the table has it.
        usd_per_hour: of the whole machine, 0 for the list price; tokens_per_second: of all cards, None for the table's.
        as_published: whether the run computes as the table's runs did; where it does not there is no speed but a typed one.
    """
    card, price = card_of(name), price_of(name)
    ratio = work.flops / work.tokens / cost.GPT2_FLOPS_PER_TOKEN
    another = abs(ratio - 1) > 0.02
    listed = card.tokens_per_second * cards / (ratio if another else 1) if card and as_published else None
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
    minutes = sum(entry.minutes for entry in entries)
    return {
        "machine": {
            "card": card.card if card else name,
            "cards": cards,
            "memory_gb": card.memory_gb if card else None,
            # Of the table's model; of another one the recipe's is what there is.
            "micro_batch": card.micro_batch if card and not another else None,
            "micro_batch_is": card.micro_batch_is if card and not another else None,
            "tokens_per_second": speed,
            "usd_per_hour": paid,
        },
        "speed": source if speed else None,
        "price": "as typed" if usd_per_hour else price.aged(today) + f", {price.source}" if price else None,
        "work": dataclasses.asdict(work),
        "budget": [entry._asdict() for entry in entries],
        "minutes": minutes or None,
        "usd": minutes / 60 * paid if minutes and paid else None,
        "ranking": [offer._asdict() for offer in cost.ranked(offers)],
    }


def plan_lines(planned: dict[str, Any]) -> list[str]:
    """The plan for the terminal."""
    work, machine = planned["work"], planned["machine"]
    lines = [
        "",
        f"{work['steps']:,} steps, {tokens(work['tokens'])} tokens on {machine['cards']} x {machine['card']}",
    ]
    for entry in planned["budget"]:
        lines.append(f"  {entry['name']:<16} {entry['minutes']:>7.1f} min  {entry['basis']}")
    if planned["budget"]:
        paid = f"at ${machine['usd_per_hour']:,.2f} an hour ({planned['price']})" if machine["usd_per_hour"] else ""
        dollars = f", ${planned['usd']:,.2f} {paid}" if paid else ""
        lines += [f"  {'in all':<16} {planned['minutes']:>7.1f} min{dollars}", f"  speed: {planned['speed']}"]
    else:
        lines.append("  nobody has measured this here: type --tokens_per_second, or --gpu CARD for another machine")
    if machine["micro_batch"]:
        lines.append(
            f"  to start from: --per_device_train_batch_size {machine['micro_batch']} on {machine['memory_gb']} GB, "
            f"{machine['micro_batch_is']}"
        )
    lines += [
        f"  {work['flops']:.3g} FLOPs; a checkpoint {size(work['checkpoint_bytes'])} under DeepSpeed, final {size(work['final_bytes'])}",
        f"  disk: {size(planned['data_bytes'])} for the data, {size(planned['run_bytes'])} for the run",
    ]
    lines += [
        "",
        "10B tokens of GPT-2 124M, steps alone, the cheapest card first; community machines mount no network volume:",
    ]
    for offer in planned["ranking"]:
        guessed = "; speed estimated" if offer["speed"].startswith("estimated") else ""
        lines.append(
            f"  ${offer['usd']:>6.2f}  {offer['hours']:>5.1f} h of one  {offer['card']:<15} {offer['provider']:<17} "
            f"${offer['usd_per_hour']:.2f} an hour, {offer['priced']}{guessed}"
        )
    return lines
