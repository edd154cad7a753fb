"""Numbers of tokens in options, and the label of positions without a target."""

IGNORED = -100  # label of a position without a target; the default ignore_index of torch
MOST_TOKENS = 10**18  # larger counts are mistakes, and their products would not fit into a float


class TokenCount(int):
    """A number of tokens, parsed from `10e9`, `10_000_000_000` or `524288`."""

    def __new__(cls, value: object) -> "TokenCount":
        number = float(str(value))
        if not number.is_integer() or not 0 <= number < MOST_TOKENS:
            raise ValueError(f"{value!r} is not a whole number of tokens")
        return super().__new__(cls, int(number))
